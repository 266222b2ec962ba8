//! `ringbolt lab compare`: reports the differences between two runs.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use lab_report::compare::{
    CompareOptions, Comparison, ComparisonRow, RegressionVerdict, compare, compare_many, html, html_of_many,
    text, text_of_many,
};

use lab_experiments::RunDirectory;

use super::files::write_output;
use super::report::open_run;
use crate::command_error::{CommandError, ExitStatus};

/// Most rows shown on a terminal.
const ROWS_MAX: usize = 60;

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt lab compare runs/kernel-6.6 runs/kernel-6.12\n  \
    ringbolt lab compare runs/main runs/branch --fail-on-regression 5\n  \
    ringbolt lab compare A B --output-format=html --output changes.html\n  \
    ringbolt lab compare ext4 xfs btrfs --output-format=html --output file-systems.html\n\n\
    Cells with the same experiment and parameters are compared. Intervals cover the variation between runs; what \
    is significant is decided for all rows together. A row is too noisy to tell if its interval does not exclude \
    a difference that matters. --fail-on-regression exits with 1 if a metric is worse by more than this with \
    confidence, and with 6 if none is, but some could be: they are too noisy, or were measured once.")]
pub(crate) struct CompareArgs {
    /// Run directory of the baseline
    #[arg(value_name = "A")]
    a: PathBuf,
    /// Run directory to compare with it
    #[arg(value_name = "B")]
    b: PathBuf,
    /// More run directories: each is compared with the baseline, and one page shows all
    #[arg(value_name = "C", conflicts_with = "b_run")]
    more: Vec<PathBuf>,
    /// A further run of the baseline; with several runs, the variation between runs is measured; may be repeated
    #[arg(long, value_name = "DIR")]
    a_run: Vec<PathBuf>,
    /// A further run to compare with the baseline; may be repeated
    #[arg(long, value_name = "DIR")]
    b_run: Vec<PathBuf>,
    /// Format of the result
    #[arg(long = "output-format", value_enum, default_value = "normal")]
    output_format: CompareFormat,
    /// File for the result; by default standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Exit with status 1 if B is worse by more than this, and with 6 if that cannot be told
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    fail_on_regression: Option<f64>,
    /// Confidence level of the intervals, in percent
    #[arg(long, value_name = "PERCENT", default_value = "95", value_parser = confidence)]
    confidence: f64,
    /// Smaller differences are ignored
    #[arg(long, value_name = "PERCENT", default_value = "1", value_parser = percent)]
    noise: f64,
    /// Smallest difference that matters; by default that of --fail-on-regression, or 5
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    difference: Option<f64>,
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
    let open = |first: &PathBuf, more: &[PathBuf]| -> Result<Vec<_>, CommandError> {
        std::iter::once(first).chain(more).map(|directory| open_run(directory)).collect()
    };
    let (a, b) = (open(&options.a, &options.a_run)?, open(&options.b, &options.b_run)?);
    let rules = CompareOptions {
        confidence_level: options.confidence / 100.0,
        noise_percent: options.noise,
        difference_percent: options.difference.or(options.fail_on_regression).unwrap_or(5.0),
    };
    if !options.more.is_empty() {
        return many(options, &a, b, rules);
    }
    let comparison = compare(&a, &b, rules);
    let message = match options.output_format {
        CompareFormat::Normal => text(&comparison, ROWS_MAX),
        CompareFormat::Json => {
            serde_json::to_string_pretty(&comparison).map_err(CommandError::operation)? + "\n"
        }
        CompareFormat::Html => html(&comparison),
    };
    write_output(options.output.as_deref(), &message)?;
    check_regressions(options, std::slice::from_ref(&comparison))
}

/// Compares several runs with the baseline.
fn many(
    options: &CompareArgs,
    baseline: &[RunDirectory],
    mut runs: Vec<RunDirectory>,
    rules: CompareOptions,
) -> Result<(), CommandError> {
    for directory in &options.more {
        runs.push(open_run(directory)?);
    }
    let many = compare_many(baseline, &runs, rules);
    let message = match options.output_format {
        CompareFormat::Normal => text_of_many(&many, ROWS_MAX / runs.len().max(1)),
        CompareFormat::Json => serde_json::to_string_pretty(&many).map_err(CommandError::operation)? + "\n",
        CompareFormat::Html => html_of_many(&many),
    };
    write_output(options.output.as_deref(), &message)?;
    check_regressions(options, &many.comparisons)
}

/// Exits with 1 if a run is worse than the baseline, and with 6 if none is, but one may be.
fn check_regressions(options: &CompareArgs, comparisons: &[Comparison]) -> Result<(), CommandError> {
    let Some(limit) = options.fail_on_regression else { return Ok(()) };
    let mut undecided = None;
    for comparison in comparisons {
        let describe = |rows: &[&ComparisonRow]| {
            let first = rows.first().map_or(String::new(), |row| {
                format!(", {} [{}] {} among them", row.experiment, row.cell, row.metric)
            });
            format!("{}: {} of {} rows", comparison.b, rows.len(), comparison.rows.len()) + &first
        };
        match comparison.regression(limit) {
            RegressionVerdict::None => {}
            RegressionVerdict::Worse(rows) => {
                return Err(CommandError::operation(format!(
                    "worse by more than {limit} %: {}",
                    describe(&rows)
                )));
            }
            RegressionVerdict::Undecided(rows) => undecided = undecided.or(Some(describe(&rows))),
        }
    }
    let Some(rows) = undecided else { return Ok(()) };
    Err(CommandError::new(
        ExitStatus::Undecided,
        format!(
            "too noisy to tell whether a run is worse by more than {limit} %: {rows}; more repetitions or more runs \
             (--a-run, --b-run) decide it"
        ),
    ))
}
