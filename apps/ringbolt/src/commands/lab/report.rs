//! `ringbolt lab report`: a run as one HTML file.

use std::path::{Path, PathBuf};

use clap::Args;
use lab_experiments::Run;

use super::files::{absent, write};
use crate::command_error::CommandError;
use crate::console::stdout_line;

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt lab report runs/today\n  \
    ringbolt lab report runs/today --output report.html\n\n\
    The file holds everything, charts and data too, and fetches nothing. docs/REPORT.md says how to read it.")]
pub(crate) struct Report {
    /// The run directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Where the page is written; by default report.html in the run directory
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(crate) fn run(options: &Report) -> Result<(), CommandError> {
    let run = open(&options.directory)?;
    let page = lab_report::page::render_html(&run).map_err(CommandError::operation)?;
    let output = options.output.clone().unwrap_or_else(|| options.directory.join("report.html"));
    write(Some(&output), &page)?;
    stdout_line!("{} ({:.1} MB, {} records)", output.display(), page.len() as f64 / 1e6, run.records.len());
    Ok(())
}

/// Reads a run directory; one line says why it cannot be read.
pub(crate) fn open(directory: &Path) -> Result<Run, CommandError> {
    if let Some(why) = absent(directory) {
        return Err(CommandError::usage(why));
    }
    Run::open(directory).map_err(CommandError::operation)
}
