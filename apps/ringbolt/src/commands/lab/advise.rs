//! `ringbolt lab advise`: recommends an API and a scheduler, with the evidence.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Args, Parser, ValueEnum};
use lab_report::advise::{Advice, AdviceGoal, Choice, advise, api_description};
use lab_report::chart::format_number;

use super::files::write_output;
use super::report::{is_present, open_run};
use super::run as run_command;
use crate::command_error::CommandError;

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt lab advise runs/today\n  \
    ringbolt lab advise runs/today --goal isolation --output-format=json\n  \
    ringbolt lab advise --device /dev/nvme0n1 --goal p99\n\n\
    With --device or --file it measures first: a few minutes of cells that only read, three times each, stored \
    in --out.\n\n\
    A winner leads by more than chance and by more than the generator's own cost. Without one, there is no \
    recommendation.")]
pub(crate) struct AdviseArgs {
    /// The run directory
    #[arg(value_name = "DIR", required_unless_present_any = ["device", "file"], conflicts_with_all = ["device", "file"])]
    directory: Option<PathBuf>,
    /// A block device to measure first, as `lab run` takes it; may be repeated
    #[arg(long, value_name = "DEVICE")]
    device: Vec<String>,
    /// A file to measure first
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Directory of that run; by default a new one, named after the time
    #[arg(long, value_name = "DIR", conflicts_with = "directory")]
    out: Option<PathBuf>,
    /// What to optimise; by default each goal in turn
    #[arg(long, value_enum)]
    goal: Option<GoalOption>,
    /// Format of the advice
    #[arg(long = "output-format", value_enum, default_value = "normal")]
    output_format: AdviseFormat,
    /// File for the advice; by default standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum GoalOption {
    /// Short tails without background load
    P99,
    /// Most I/Os per second and core
    IopsPerCore,
    /// Short tails next to a background load
    Isolation,
}

#[derive(Clone, Copy, ValueEnum)]
enum AdviseFormat {
    /// Text for a terminal
    Normal,
    /// An array of objects
    Json,
}

pub(crate) fn run(options: &AdviseArgs) -> Result<(), CommandError> {
    let goals = match options.goal {
        None => AdviceGoal::ALL.to_vec(),
        Some(GoalOption::P99) => vec![AdviceGoal::P99],
        Some(GoalOption::IopsPerCore) => vec![AdviceGoal::IopsPerCore],
        Some(GoalOption::Isolation) => vec![AdviceGoal::Isolation],
    };
    let directory = match &options.directory {
        Some(directory) => directory.clone(),
        None => measure(options, &goals)?,
    };
    let run = open_run(&directory)?;
    let all: Vec<Advice> = goals.into_iter().map(|goal| advise(&run, goal, &is_present)).collect();
    let text = match options.output_format {
        AdviseFormat::Normal => all.iter().map(text).collect::<Vec<_>>().join("\n"),
        AdviseFormat::Json => serde_json::to_string_pretty(&all).map_err(CommandError::operation)? + "\n",
    };
    write_output(options.output.as_deref(), &text)
}

/// Runs the cells that the goals need. None of them writes.
fn measure(options: &AdviseArgs, goals: &[AdviceGoal]) -> Result<PathBuf, CommandError> {
    #[derive(Parser)]
    struct RunCommandLine {
        #[command(flatten)]
        run: run_command::RunArgs,
    }
    let folder = options.out.clone().unwrap_or_else(run_command::default_directory_name);
    let mut names: Vec<&str> = goals.iter().flat_map(|goal| experiments_for(*goal)).copied().collect();
    names.sort_unstable();
    names.dedup();
    let mut arguments = vec![OsString::from("run")];
    arguments.extend(names.into_iter().map(OsString::from));
    arguments.extend(["--quick", "--repetitions", "3", "--out"].map(OsString::from));
    arguments.push(folder.clone().into_os_string());
    for device in &options.device {
        arguments.extend([OsString::from("--device"), OsString::from(device)]);
    }
    if let Some(file) = &options.file {
        arguments.extend([OsString::from("--file"), file.clone().into_os_string()]);
    }
    let line = RunCommandLine::try_parse_from(arguments).map_err(CommandError::usage)?;
    run_command::run(&line.run)?;
    Ok(folder)
}

/// The experiments whose cells vary API and scheduler under the goal's conditions.
fn experiments_for(goal: AdviceGoal) -> &'static [&'static str] {
    match goal {
        AdviceGoal::P99 => &["cheops23.fig5a", "icpe24.fig2"],
        AdviceGoal::IopsPerCore => &["cheops23.fig5a", "cheops23.table2", "icpe24.fig2"],
        AdviceGoal::Isolation => &["icpe24.fig11a", "icpe24.fig11b"],
    }
}

fn text(advice: &Advice) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "{} ({})", advice.goal.description(), advice.goal.name());
    for decision in [&advice.api, &advice.scheduler] {
        let message = match &decision.choice {
            Choice::Wins(name) => format!("use {}", api_description(name)),
            Choice::Tied(names) => format!("no winner among {}", names.join(", ")),
            Choice::Untested => "not tested".to_string(),
        };
        let _ = writeln!(out, "  {}: {message}", decision.factor);
        let _ = writeln!(out, "    {}", decision.because);
        for option in decision.options.iter().skip(1) {
            let interval = option.interval.map_or("no interval".to_string(), |found| {
                format!("{} to {}", format_number(found.low), format_number(found.high))
            });
            let _ = writeln!(
                out,
                "    {:<14} x{} ({interval}) over {} situations",
                option.name,
                format_number(option.ratio),
                option.matched_configurations
            );
        }
    }
    for caveat in &advice.caveats {
        let _ = writeln!(out, "  note: {caveat}");
    }
    for command in &advice.commands {
        let sign = if command.starts_with('#') { " " } else { "$" };
        let _ = writeln!(out, "  {sign} {}", command.replace('\n', "\n    "));
    }
    out
}
