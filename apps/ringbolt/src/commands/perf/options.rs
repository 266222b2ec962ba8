//! Options of the run, and what is shown of options.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use workload::Totals;
use workload::jobfile::{OPTIONS, Plan, Support};
use workload::units::format_count;

use super::machine_options;
use crate::cli::{self, EngineChoice, Idle};
use crate::failure::Failure;
use crate::say::complain;

/// How results are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Normal,
    Json,
    JsonPlus,
}

/// What belongs to no job.
pub(super) struct Run {
    pub(super) formats: Vec<Format>,
    pub(super) output: Option<PathBuf>,
    pub(super) config: Option<PathBuf>,
    pub(super) machine: cli::Machine,
    pub(super) cmdhelp: bool,
    pub(super) showcmd: bool,
    pub(super) parse_only: bool,
    pub(super) readonly: bool,
    pub(super) generator_cost: bool,
    eta: bool,
    interval: Option<Duration>,
}

impl Run {
    pub(super) fn new(plan: &Plan) -> Result<Run, Failure> {
        let text = |name: &str, default: &str| plan.run_option(name).unwrap_or(default).to_string();
        let flag = |name: &str, default: &str| match text(name, default).as_str() {
            "1" | "true" => Ok(true),
            "0" | "false" => Ok(false),
            other => Err(Failure::usage(format!("--{name}={other}: it is 0 or 1"))),
        };
        let format = |name: &str| match name {
            "normal" => Ok(Format::Normal),
            "json" => Ok(Format::Json),
            "json+" => Ok(Format::JsonPlus),
            other => {
                Err(Failure::usage(format!("--output-format={other}: it is one of normal, json, json+")))
            }
        };
        let eta = match text("eta", "auto").as_str() {
            "always" => true,
            "never" => false,
            "auto" => std::io::stderr().is_terminal(),
            other => return Err(Failure::usage(format!("--eta={other}: it is one of auto, always, never"))),
        };
        let interval = plan.run_option("status_interval").map(|text| {
            let ns = workload::units::parse_time_ns(text).filter(|ns| *ns > 0);
            ns.map(Duration::from_nanos)
                .ok_or_else(|| Failure::usage(format!("--status-interval={text}: it is a time, as 10s")))
        });
        Ok(Run {
            formats: text("output_format", "normal").split(',').map(format).collect::<Result<_, _>>()?,
            output: plan.run_option("output").map(PathBuf::from),
            config: plan.run_option("config").map(PathBuf::from),
            machine: machine_options(
                choice::<Idle>("idle", &text("idle", "adaptive"))?,
                text("memory", "1g"),
                choice::<EngineChoice>("engine", &text("engine", "auto"))?,
            ),
            cmdhelp: flag("cmdhelp", "0")?,
            showcmd: flag("showcmd", "0")?,
            parse_only: flag("parse_only", "0")?,
            readonly: flag("readonly", "0")?,
            generator_cost: flag("generator_cost", "1")?,
            eta,
            interval: interval.transpose()?,
        })
    }
}

fn choice<T: ValueEnum>(name: &str, text: &str) -> Result<T, Failure> {
    T::from_str(text, false).map_err(|_| {
        let names = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let names: Vec<String> = names.map(|value| value.get_name().to_string()).collect();
        Failure::usage(format!("--{name}={text}: it is one of {}", names.join(", ")))
    })
}

/// Lines on standard error while jobs run.
pub(super) struct Watch {
    interval: Option<Duration>,
    begun: Instant,
    then: Instant,
    ios: u64,
    names: usize,
}

impl Watch {
    pub(super) fn new(run: &Run, plan: &Plan) -> Watch {
        let now = Instant::now();
        let interval = run.interval.or(run.eta.then_some(Duration::from_secs(1)));
        Watch { interval, begun: now, then: now, ios: 0, names: plan.jobs.len() }
    }

    pub(super) fn look(&mut self, totals: Totals) {
        let Some(interval) = self.interval else { return };
        let elapsed = self.then.elapsed();
        if elapsed < interval {
            return;
        }
        let rate = totals.ios.saturating_sub(self.ios) as f64 / elapsed.as_secs_f64();
        complain!(
            "{:>4} s  {} of {} section(s)' jobs run  {} IOPS  {} faults",
            self.begun.elapsed().as_secs(),
            totals.jobs,
            self.names,
            format_count(rate),
            totals.faults,
        );
        (self.ios, self.then) = (totals.ios, Instant::now());
    }
}

/// Every option in a table.
pub(super) fn help() -> String {
    let mut text = String::new();
    let mut put = |line: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", line.trim_end());
    };
    for (title, wanted) in [
        ("Options of jobs, as fio's:", 0),
        ("Options of the run:", 1),
        ("Options of fio's that are refused:", 2),
    ] {
        put(title.to_string());
        for option in OPTIONS {
            let kind = match option.support {
                Support::Job(_) => 0,
                Support::Run => 1,
                Support::Refused(_) => 2,
            };
            if kind != wanted {
                continue;
            }
            let mut name = option.name.to_string();
            if !option.value.is_empty() {
                name.push('=');
                name.push_str(option.value);
            }
            put(format!("  --{name:<36} {}", option.help));
            for alias in option.aliases {
                put(format!("  --{alias:<36} {}", format_args!("the same as {}", option.name)));
            }
        }
        put(String::new());
    }
    text
}

/// Each job as a command line.
pub(super) fn show(plan: &Plan) -> String {
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

/// As a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,%+@".contains(c);
    if word.chars().all(plain) { word.to_string() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}
