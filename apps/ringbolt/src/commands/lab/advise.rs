//! `ringbolt lab advise`: which API and which scheduler, with what carries it.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Args, Parser, ValueEnum};
use lab_report::advise::{Advice, AdviceGoal, Choice, advise, api_description};
use lab_report::chart::format_number;

use super::files::write;
use super::report::open;
use super::run as measuring;
use crate::command_error::CommandError;

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt lab advise runs/today\n  \
    ringbolt lab advise runs/today --goal isolation --output-format=json\n  \
    ringbolt lab advise --device /dev/nvme0n1 --goal p99\n\n\
    With --device or --file it measures first: a few minutes of cells that only read, three times each, kept\n\
    in --out.\n\n\
    What wins is ahead by more than chance and by more than the generator itself costs. Where nothing is,\n\
    nothing is named.")]
pub(crate) struct Advise {
    /// The run directory
    #[arg(value_name = "DIR", required_unless_present_any = ["device", "file"], conflicts_with_all = ["device", "file"])]
    directory: Option<PathBuf>,
    /// A block device to measure first, as `lab run` takes it; may be repeated
    #[arg(long, value_name = "DEVICE")]
    device: Vec<String>,
    /// A file to measure first
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Where that run is kept; by default a new directory named after the time
    #[arg(long, value_name = "DIR", conflicts_with = "directory")]
    out: Option<PathBuf>,
    /// What is wanted; by default each in turn
    #[arg(long, value_enum)]
    goal: Option<Wanted>,
    /// How the advice is written
    #[arg(long = "output-format", value_enum, default_value = "normal")]
    output_format: Format,
    /// Where it is written; by default to standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Wanted {
    /// Short tails where nobody disturbs
    P99,
    /// Most I/Os for the processor time
    IopsPerCore,
    /// Short tails beside others who do a lot
    Isolation,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// For people
    Normal,
    /// An array of objects
    Json,
}

pub(crate) fn run(options: &Advise) -> Result<(), CommandError> {
    let goals = match options.goal {
        None => AdviceGoal::ALL.to_vec(),
        Some(Wanted::P99) => vec![AdviceGoal::P99],
        Some(Wanted::IopsPerCore) => vec![AdviceGoal::IopsPerCore],
        Some(Wanted::Isolation) => vec![AdviceGoal::Isolation],
    };
    let directory = match &options.directory {
        Some(directory) => directory.clone(),
        None => measure(options, &goals)?,
    };
    let run = open(&directory)?;
    let all: Vec<Advice> = goals.into_iter().map(|goal| advise(&run, goal)).collect();
    let text = match options.output_format {
        Format::Normal => all.iter().map(text).collect::<Vec<_>>().join("\n"),
        Format::Json => serde_json::to_string_pretty(&all).map_err(CommandError::operation)? + "\n",
    };
    write(options.output.as_deref(), &text)
}

/// A short run of the cells that speak to the goals, and none that writes.
fn measure(options: &Advise, goals: &[AdviceGoal]) -> Result<PathBuf, CommandError> {
    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        run: measuring::Run,
    }
    let folder = options.out.clone().unwrap_or_else(measuring::named_after_now);
    let mut names: Vec<&str> = goals.iter().flat_map(|goal| experiments_for(*goal)).copied().collect();
    names.sort_unstable();
    names.dedup();
    let mut words = vec![OsString::from("run")];
    words.extend(names.into_iter().map(OsString::from));
    words.extend(["--quick", "--repetitions", "3", "--out"].map(OsString::from));
    words.push(folder.clone().into_os_string());
    for device in &options.device {
        words.extend([OsString::from("--device"), OsString::from(device)]);
    }
    if let Some(file) = &options.file {
        words.extend([OsString::from("--file"), file.clone().into_os_string()]);
    }
    let line = Line::try_parse_from(words).map_err(CommandError::usage)?;
    measuring::run(&line.run)?;
    Ok(folder)
}

/// The experiments whose cells vary API and scheduler under what the goal is about.
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
        let said = match &decision.choice {
            Choice::Wins(name) => format!("use {}", api_description(name)),
            Choice::Leads(name) => format!("{} leads", api_description(name)),
            Choice::Tied(names) => format!("no winner among {}", names.join(", ")),
            Choice::Untested => "not tested".to_string(),
        };
        let _ = writeln!(out, "  {}: {said}", decision.factor);
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
