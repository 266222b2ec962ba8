//! `ringbolt lab import`: converts fio's results to rows.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use workload::import::{self, FioRow, TEXT_BYTES_MAX};

use crate::command_error::CommandError;

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt lab import out.json\n  \
    ringbolt lab import results/*.json --output-format=json\n  \
    fio job.fio --output-format=json | ringbolt lab import -\n\n\
    Reads fio 3's JSON (json, json+), also between other lines, and its normal text. Latencies are in\n\
    microseconds; percentiles and max_us are of clat where fio reports it; cpu_cores is\n\
    (usr + sys) * procs / 100.")]
pub(crate) struct ImportArgs {
    /// Output of fio; - for standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Format of the rows
    #[arg(long = "output-format", value_enum, default_value = "csv")]
    output_format: ImportFormat,
}

#[derive(Clone, Copy, ValueEnum)]
enum ImportFormat {
    /// Comma separated values with a header
    Csv,
    /// An array of objects
    Json,
}

pub(crate) fn run(options: &ImportArgs) -> Result<(), CommandError> {
    let mut rows: Vec<(String, FioRow)> = Vec::new();
    for path in &options.files {
        let text =
            read(path).map_err(|error| CommandError::operation(format!("{}: {error}", path.display())))?;
        let found = import::rows(&text)
            .map_err(|error| CommandError::operation(format!("{} {error}", path.display())))?;
        let source = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().to_string();
        rows.extend(found.into_iter().map(|row| (source.clone(), row)));
    }
    let text = match options.output_format {
        ImportFormat::Csv => import::csv(&rows),
        ImportFormat::Json => {
            serde_json::to_string_pretty(&import::to_json(&rows)).map_err(CommandError::operation)? + "\n"
        }
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(CommandError::operation(error)),
        _ => Ok(()),
    }
}

/// Reads one byte more than the limit, so that the parser rejects larger input. Invalid UTF-8 is replaced.
fn read(path: &Path) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    let limit = TEXT_BYTES_MAX as u64 + 1;
    if path == Path::new("-") {
        std::io::stdin().lock().take(limit).read_to_end(&mut bytes)?;
    } else {
        std::fs::File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
