//! `ringbolt lab import`: converts fio's results to rows.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use workload::import::{self, FioRow, TEXT_BYTES_MAX};

use crate::command_error::CommandError;
use crate::console::{self, stderr_line};

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt lab import out.json\n  \
    ringbolt lab import results/*.json --output-format=json\n  \
    fio job.fio --output-format=json | ringbolt lab import -\n\n\
    Reads fio 3's JSON (json, json+), also between other lines, and its normal text. Latencies are in \
    microseconds; percentiles and max_us are of clat where fio reports it; cpu_cores is \
    (usr + sys) * procs / 100. A job that failed keeps its options and its error (fio's error number, 0 for \
    success) and has no measured values. It is named, as is a file without fio's results; the others are \
    imported, and the exit status is 1. Files of the same name are told apart by their paths.")]
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
    let mut unread = 0;
    for (path, source) in options.files.iter().zip(sources(&options.files)) {
        let found = read(path)
            .map_err(|error| format!("{}: {error}", path.display()))
            .and_then(|text| import::rows(&text).map_err(|error| format!("{} {error}", path.display())));
        match found {
            Ok(found) => rows.extend(found.into_iter().map(|row| (source.clone(), row))),
            Err(message) if options.files.len() == 1 => return Err(CommandError::operation(message)),
            Err(message) => {
                stderr_line!("ringbolt: {message}");
                unread += 1;
            }
        }
    }
    if unread < options.files.len() {
        print(options.output_format, &rows)?;
    }
    let failed = warn_of_errors(&rows);
    let files = (unread > 0).then(|| format!("{unread} of {} files are not imported", options.files.len()));
    let jobs = (failed > 0).then(|| format!("{failed} job(s) failed"));
    let problems: Vec<String> = files.into_iter().chain(jobs).collect();
    if problems.is_empty() { Ok(()) } else { Err(CommandError::operation(problems.join(", and "))) }
}

/// Names the jobs that failed, and returns how many there are, and those with I/Os that failed.
fn warn_of_errors(rows: &[(String, FioRow)]) -> usize {
    let mut failed = 0;
    for (index, (source, row)) in rows.iter().enumerate() {
        let is_same_job = |(other, before): &(String, FioRow)| other == source && before.job == row.job;
        if index > 0 && is_same_job(&rows[index - 1]) {
            continue;
        }
        let name = &row.jobname;
        if row.error != 0 {
            failed += 1;
            let code = i32::try_from(row.error).unwrap_or_default();
            let reason = std::io::Error::from_raw_os_error(code);
            stderr_line!(
                "ringbolt: warning: {source}: job {name} failed: {reason}; it has no measured values"
            );
        } else if row.io_errors > 0 {
            stderr_line!(
                "ringbolt: warning: {source}: job {name} continued after {} I/Os that failed",
                row.io_errors
            );
        }
    }
    failed
}

/// The names by which rows tell their files apart: file names, or paths where several files have one name.
fn sources(files: &[PathBuf]) -> Vec<String> {
    let name = |path: &PathBuf| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().to_string();
    let names: Vec<String> = files.iter().map(name).collect();
    let is_shared = |name: &String| names.iter().filter(|other| *other == name).count() > 1;
    let source = |(path, name): (&PathBuf, &String)| {
        if is_shared(name) { path.display().to_string() } else { name.clone() }
    };
    files.iter().zip(&names).map(source).collect()
}

fn print(format: ImportFormat, rows: &[(String, FioRow)]) -> Result<(), CommandError> {
    let text = match format {
        ImportFormat::Csv => import::csv(rows),
        ImportFormat::Json => {
            serde_json::to_string_pretty(&import::to_json(rows)).map_err(CommandError::operation)? + "\n"
        }
    };
    console::print(text);
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_one_name_are_told_apart_by_their_paths() {
        let files = ["a/out.json", "b/out.json", "b/other.json", "-"].map(PathBuf::from);
        assert_eq!(sources(&files), ["a/out.json", "b/out.json", "other.json", "-"]);
    }
}
