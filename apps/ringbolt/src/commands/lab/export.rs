//! `ringbolt lab export`: converts a run for other programs.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::files::write_output;
use super::report::open_run;
use crate::command_error::CommandError;

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt lab export runs/today > today.csv\n  \
    ringbolt lab export runs/today --output-format=json --output today.json\n\n\
    CSV has a row for each record and role, and a column for each parameter and metric. JSON has everything, \
    histograms too; docs/LAB-SCHEMA.md describes its records.")]
pub(crate) struct ExportArgs {
    /// The run directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Format of the output
    #[arg(long = "output-format", value_enum, default_value = "csv")]
    output_format: ExportFormat,
    /// File for the output; by default standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum ExportFormat {
    /// Comma separated values with a header
    Csv,
    /// One object
    Json,
}

pub(crate) fn run(options: &ExportArgs) -> Result<(), CommandError> {
    let run = open_run(&options.directory)?;
    let text = match options.output_format {
        ExportFormat::Csv => lab_report::export::csv(&run),
        ExportFormat::Json => {
            let json = lab_report::export::json(&run).map_err(CommandError::operation)?;
            serde_json::to_string_pretty(&json).map_err(CommandError::operation)? + "\n"
        }
    };
    write_output(options.output.as_deref(), &text)
}
