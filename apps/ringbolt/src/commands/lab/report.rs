//! `ringbolt lab report`: renders a run as one HTML file.

use std::path::{Path, PathBuf};

use clap::Args;
use lab_experiments::{PlannedDevice, RunDirectory};

use super::files::{why_not_a_run, write_output};
use crate::command_error::CommandError;
use crate::console::{stderr_line, stdout_line};

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt lab report runs/today\n  \
    ringbolt lab report runs/today --output report.html\n\n\
    The file holds everything, charts and data too, and fetches nothing. docs/REPORT.md explains it.")]
pub(crate) struct ReportArgs {
    /// The run directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// File for the page; by default report.html in the run directory
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(crate) fn run(options: &ReportArgs) -> Result<(), CommandError> {
    let run = open_run(&options.directory)?;
    let page = lab_report::page::render_html_on(&run, &is_present).map_err(CommandError::operation)?;
    let output = options.output.clone().unwrap_or_else(|| options.directory.join("report.html"));
    write_output(Some(&output), &page)?;
    stdout_line!("{} ({:.1} MB, {} records)", output.display(), page.len() as f64 / 1e6, run.records.len());
    Ok(())
}

/// Reads a run directory; an error is one line. So are records that cannot be read: the others are used.
pub(crate) fn open_run(directory: &Path) -> Result<RunDirectory, CommandError> {
    if let Some(why) = why_not_a_run(directory) {
        return Err(CommandError::environment(why));
    }
    let run = RunDirectory::open(directory).map_err(CommandError::operation)?;
    if let Some(first) = run.dropped.first() {
        let (results, count) = (directory.join("results.jsonl"), run.dropped.len());
        stderr_line!(
            "ringbolt: {}: {count} line(s) cannot be read, the first: {first}; the other {} are used",
            results.display(),
            run.records.len()
        );
    }
    Ok(run)
}

/// Whether a measured device is on this machine.
pub(crate) fn is_present(device: &PlannedDevice) -> bool {
    Path::new(&device.path).exists()
}
