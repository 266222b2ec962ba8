//! Options that apply to the run rather than to a job, `--cmdhelp` and `--showcmd`.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use workload::ProgressTotals;
use workload::fio::TERSE_VERSIONS;
use workload::jobfile::{JobPlan, OPTIONS, OptionInfo, Support, engine_names, engine_options};
use workload::units::format_count;

use super::machine_options;
use crate::command_error::CommandError;
use crate::console::stderr_line;
use crate::options::{EngineChoice, Idle, ReactorOptions};

/// The values of `--output-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PerfOutputFormat {
    Normal,
    Json,
    JsonPlus,
    Terse,
}

/// Options that apply to no job in particular.
pub(super) struct RunOptions {
    pub(super) formats: Vec<PerfOutputFormat>,
    pub(super) terse_version: u8,
    pub(super) output: Option<PathBuf>,
    pub(super) config: Option<PathBuf>,
    pub(super) reactor_options: ReactorOptions,
    /// The text of `--cmdhelp`, `--enghelp` or `--version`, instead of a run.
    pub(super) help: Option<String>,
    pub(super) showcmd: bool,
    pub(super) parse_only: bool,
    pub(super) readonly: bool,
    pub(super) generator_cost: bool,
    eta: bool,
    interval: Option<Duration>,
}

impl RunOptions {
    pub(super) fn new(plan: &JobPlan) -> Result<RunOptions, CommandError> {
        let text = |name: &str, default: &str| plan.run_option(name).unwrap_or(default).to_string();
        let flag = |name: &str, default: &str| match text(name, default).as_str() {
            "1" | "true" => Ok(true),
            "0" | "false" => Ok(false),
            other => Err(CommandError::usage(format!("--{name}={other}: expected 0 or 1"))),
        };
        let format = |name: &str| match name {
            "normal" => Ok(PerfOutputFormat::Normal),
            "json" => Ok(PerfOutputFormat::Json),
            "json+" => Ok(PerfOutputFormat::JsonPlus),
            "terse" => Ok(PerfOutputFormat::Terse),
            other => Err(CommandError::usage(format!(
                "--output-format={other}: expected normal, json, json+ or terse"
            ))),
        };
        let version = text("terse_version", "3");
        let known = version.parse().ok().filter(|version| TERSE_VERSIONS.contains(version));
        let terse_version = known.ok_or_else(|| {
            CommandError::usage(format!("--terse-version={version}: expected a version from 2 to 5"))
        })?;
        let formats =
            if flag("minimal", "0")? { "terse".to_string() } else { text("output_format", "normal") };
        let eta = match text("eta", "auto").as_str() {
            "always" => true,
            "never" => false,
            "auto" => std::io::stderr().is_terminal(),
            other => {
                return Err(CommandError::usage(format!("--eta={other}: expected auto, always or never")));
            }
        };
        let interval = plan.run_option("status_interval").map(|text| {
            let ns = workload::units::parse_time_ns(text).filter(|ns| *ns > 0);
            ns.map(Duration::from_nanos).ok_or_else(|| {
                CommandError::usage(format!("--status-interval={text}: expected a duration, as 10s"))
            })
        });
        Ok(RunOptions {
            terse_version,
            formats: formats.split(',').map(format).collect::<Result<_, _>>()?,
            output: plan.run_option("output").map(PathBuf::from),
            config: plan.run_option("config").map(PathBuf::from),
            reactor_options: machine_options(
                choice::<Idle>("idle", &text("idle", "adaptive"))?,
                plan.run_option("memory").map(str::to_string),
                choice::<EngineChoice>("engine", &text("engine", "auto"))?,
            ),
            help: requested_help(&text("cmdhelp", "0"), &text("enghelp", "0"), flag("version", "0")?)?,
            showcmd: flag("showcmd", "0")?,
            parse_only: flag("parse_only", "0")?,
            readonly: flag("readonly", "0")?,
            generator_cost: flag("generator_cost", "1")?,
            eta,
            interval: interval.transpose()?,
        })
    }
}

fn choice<T: ValueEnum>(name: &str, text: &str) -> Result<T, CommandError> {
    T::from_str(text, false).map_err(|_| {
        let names = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let names: Vec<String> = names.map(|value| value.get_name().to_string()).collect();
        CommandError::usage(format!("--{name}={text}: expected one of {}", names.join(", ")))
    })
}

/// Progress lines on standard error while jobs run, one an interval.
pub(super) struct ProgressReporter {
    interval: Option<Duration>,
    begun: Instant,
    last_update: Instant,
    /// I/Os completed at `last_update`.
    ios: u64,
    /// Sections of the job file.
    sections: usize,
}

impl ProgressReporter {
    pub(super) fn new(run: &RunOptions, plan: &JobPlan) -> ProgressReporter {
        let now = Instant::now();
        let interval = run.interval.or(run.eta.then_some(Duration::from_secs(1)));
        ProgressReporter { interval, begun: now, last_update: now, ios: 0, sections: plan.jobs.len() }
    }

    pub(super) fn update(&mut self, totals: ProgressTotals) {
        let Some(interval) = self.interval else { return };
        let elapsed = self.last_update.elapsed();
        if elapsed < interval {
            return;
        }
        let rate = totals.ios.saturating_sub(self.ios) as f64 / elapsed.as_secs_f64();
        stderr_line!(
            "{:>4} s  {} job(s) of {} section(s) running  {} IOPS  {} errors",
            self.begun.elapsed().as_secs(),
            totals.jobs,
            self.sections,
            format_count(rate),
            totals.faults,
        );
        (self.ios, self.last_update) = (totals.ios, Instant::now());
    }
}

/// What `--cmdhelp`, `--enghelp` and `--version` print.
fn requested_help(option: &str, engine: &str, version: bool) -> Result<Option<String>, CommandError> {
    Ok(match option {
        "0" | "false" if !["0", "false"].contains(&engine) => Some(engine_help(engine)?),
        "0" | "false" if version => Some(format!("ringbolt {}\n", env!("CARGO_PKG_VERSION"))),
        "0" | "false" => None,
        "1" | "true" | "all" => Some(help()),
        name => Some(option_help(name)?),
    })
}

fn option_help(name: &str) -> Result<String, CommandError> {
    let option = workload::jobfile::option(name).map_err(CommandError::usage)?;
    let support = match option.support {
        Support::PerfJob(_) | Support::Run => "",
        Support::NoEffect { .. } => "accepted with a warning: ",
        Support::Refused(_) => "rejected: ",
    };
    Ok(description(option, support))
}

/// What `--enghelp`, `--enghelp=ENGINE` and `--enghelp=ENGINE,OPTION` print.
fn engine_help(request: &str) -> Result<String, CommandError> {
    if ["1", "true"].contains(&request) {
        return Ok(engine_names().join("\n") + "\n");
    }
    let (engine, option) = request.split_once(',').map_or((request, None), |(name, one)| (name, Some(one)));
    let options = engine_options(engine)
        .map_err(|reason| CommandError::usage(format!("--enghelp={engine}: {reason}")))?;
    match option {
        Some(option) if options.contains(&option) => option_help(option),
        Some(option) => Err(CommandError::usage(format!("{engine} has no option {option}"))),
        None if options.is_empty() => Ok(format!("{engine} has no options of its own\n")),
        None => options.iter().map(|option| option_help(option)).collect(),
    }
}

/// The lines of an option and its aliases.
fn description(option: &OptionInfo, support: &str) -> String {
    let mut name = option.name.to_string();
    if !option.value.is_empty() {
        name.push('=');
        name.push_str(option.value);
    }
    let mut text = format!("  --{name:<36} {support}{}\n", option.help);
    for alias in option.aliases {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  --{alias:<36} the same as {}", option.name);
    }
    text
}

/// The text of `--cmdhelp`: every option.
fn help() -> String {
    let mut text = String::new();
    let groups = [
        ("Job options, as in fio:", 0),
        ("Run options:", 1),
        ("fio options that are accepted with a warning:", 2),
        ("fio options that are rejected:", 3),
    ];
    for (title, wanted) in groups {
        text.push_str(title);
        text.push('\n');
        for option in OPTIONS {
            let kind = match option.support {
                Support::PerfJob(_) => 0,
                Support::Run => 1,
                Support::NoEffect { .. } => 2,
                Support::Refused(_) => 3,
            };
            if kind != wanted {
                continue;
            }
            text.push_str(&description(option, ""));
        }
        text.push('\n');
    }
    text
}

/// The text of `--showcmd`: each job as a command line.
pub(super) fn show(plan: &JobPlan) -> String {
    let mut text = String::new();
    for job in &plan.jobs {
        let options = plan.globals.iter().chain(&job.options).filter(|(name, _)| name != "name");
        let words: Vec<String> = options.map(|(name, value)| quoted(&format!("--{name}={value}"))).collect();
        let _ = writeln!(
            text,
            "ringbolt perf {} {}",
            quoted(&format!("--name={}", job.spec.name)),
            words.join(" ")
        );
    }
    text
}

/// Quotes a word for the shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,%+@".contains(c);
    if word.chars().all(plain) { word.to_string() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}
