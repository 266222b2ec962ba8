//! `ringbolt lab compare`: reports the differences between two runs.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use lab_report::compare::{CompareOptions, compare, html, text};

use super::files::write_output;
use super::report::open_run;
use crate::command_error::CommandError;

/// Most rows shown on a terminal.
const ROWS_MAX: usize = 60;

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt lab compare runs/kernel-6.6 runs/kernel-6.12\n  \
    ringbolt lab compare runs/main runs/branch --fail-on-regression 5\n  \
    ringbolt lab compare A B --output-format=html --output changes.html\n\n\
    Cells with the same experiment and parameters are compared. A cell that was measured once in a run has a\n\
    ratio without an interval. --fail-on-regression exits with status 1 if a metric is worse by more than this\n\
    percentage with confidence, or by more than this percentage and was measured once.")]
pub(crate) struct CompareArgs {
    /// Run directory of the baseline
    #[arg(value_name = "A")]
    a: PathBuf,
    /// Run directory to compare with it
    #[arg(value_name = "B")]
    b: PathBuf,
    /// Format of the result
    #[arg(long = "output-format", value_enum, default_value = "normal")]
    output_format: CompareFormat,
    /// File for the result; by default standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Exit with status 1 if B is worse by more than this
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    fail_on_regression: Option<f64>,
    /// Confidence level of the intervals, in percent
    #[arg(long, value_name = "PERCENT", default_value = "95", value_parser = confidence)]
    confidence: f64,
    /// Smaller differences are ignored
    #[arg(long, value_name = "PERCENT", default_value = "1", value_parser = percent)]
    noise: f64,
}

#[derive(Clone, Copy, ValueEnum)]
enum CompareFormat {
    /// A table for a terminal
    Normal,
    /// One object with every row
    Json,
    /// A self-contained page
    Html,
}

fn percent(text: &str) -> Result<f64, String> {
    let value: f64 = text.trim_end_matches('%').parse().map_err(|_| "not a percentage".to_string())?;
    if (0.0..=1e6).contains(&value) { Ok(value) } else { Err("it must be 0 or more".to_string()) }
}

fn confidence(text: &str) -> Result<f64, String> {
    let value = percent(text)?;
    if (50.0..=99.99).contains(&value) { Ok(value) } else { Err("it must be from 50 to 99.99".to_string()) }
}

pub(crate) fn run(options: &CompareArgs) -> Result<(), CommandError> {
    let (a, b) = (open_run(&options.a)?, open_run(&options.b)?);
    let rules = CompareOptions { confidence_level: options.confidence / 100.0, noise_percent: options.noise };
    let comparison = compare(&a, &b, rules);
    let message = match options.output_format {
        CompareFormat::Normal => text(&comparison, ROWS_MAX),
        CompareFormat::Json => {
            serde_json::to_string_pretty(&comparison).map_err(CommandError::operation)? + "\n"
        }
        CompareFormat::Html => html(&comparison),
    };
    write_output(options.output.as_deref(), &message)?;
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
