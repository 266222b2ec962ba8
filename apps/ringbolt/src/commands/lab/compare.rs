//! `ringbolt lab compare`: what changed between two runs.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use lab_report::compare::{CompareOptions, compare, html, text};

use super::files::write;
use super::report::open;
use crate::command_error::CommandError;

/// Rows that a terminal shows.
const ROWS_MAX: usize = 60;

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt lab compare runs/kernel-6.6 runs/kernel-6.12\n  \
    ringbolt lab compare runs/main runs/branch --fail-on-regression 5\n  \
    ringbolt lab compare A B --output-format=html --output changes.html\n\n\
    Cells are compared where experiment and parameters are the same. A cell that was measured once on a side\n\
    has a ratio and no interval. --fail-on-regression ends with exit status 1 where a metric is worse by more\n\
    than so many per cent beyond chance, or so much worse and measured once.")]
pub(crate) struct Compare {
    /// The run directory that is set against
    #[arg(value_name = "A")]
    a: PathBuf,
    /// The run directory that is looked at
    #[arg(value_name = "B")]
    b: PathBuf,
    /// How the result is written
    #[arg(long = "output-format", value_enum, default_value = "normal")]
    output_format: Format,
    /// Where the result is written; by default to standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Exit status 1 where B is worse by more than this
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    fail_on_regression: Option<f64>,
    /// Confidence of the intervals, in per cent
    #[arg(long, value_name = "PERCENT", default_value = "95", value_parser = confidence)]
    confidence: f64,
    /// A difference below this is none
    #[arg(long, value_name = "PERCENT", default_value = "1", value_parser = percent)]
    noise: f64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// A table for a terminal
    Normal,
    /// One object with every row
    Json,
    /// A page of its own
    Html,
}

fn percent(text: &str) -> Result<f64, String> {
    let value: f64 =
        text.trim_end_matches('%').parse().map_err(|_| "it is a number of per cent".to_string())?;
    if (0.0..=1e6).contains(&value) { Ok(value) } else { Err("it is 0 or more".to_string()) }
}

fn confidence(text: &str) -> Result<f64, String> {
    let value = percent(text)?;
    if (50.0..=99.99).contains(&value) { Ok(value) } else { Err("it is from 50 to 99.99".to_string()) }
}

pub(crate) fn run(options: &Compare) -> Result<(), CommandError> {
    let (a, b) = (open(&options.a)?, open(&options.b)?);
    let rules = CompareOptions { confidence_level: options.confidence / 100.0, noise_percent: options.noise };
    let comparison = compare(&a, &b, rules);
    let said = match options.output_format {
        Format::Normal => text(&comparison, ROWS_MAX),
        Format::Json => serde_json::to_string_pretty(&comparison).map_err(CommandError::operation)? + "\n",
        Format::Html => html(&comparison),
    };
    write(options.output.as_deref(), &said)?;
    let Some(limit) = options.fail_on_regression else { return Ok(()) };
    let worse: Vec<_> = comparison.regressions(limit).collect();
    match worse.first() {
        None => Ok(()),
        Some(first) => Err(CommandError::operation(format!(
            "{} of {} rows are worse by more than {limit} %, {} [{}] {} among them",
            worse.len(),
            comparison.rows.len(),
            first.experiment,
            first.cell,
            first.metric
        ))),
    }
}
