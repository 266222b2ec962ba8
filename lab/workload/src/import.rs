//! Imports fio's output as rows, one for each job and direction.
//!
//! [`rows`] parses fio's JSON or text output, or both in one file, and skips other lines around it. It converts
//! times to microseconds and bandwidth to MiB a second, and computes nothing else.

use std::fmt::Write as _;

mod json;
mod text;

/// One direction of one job, or of a group of jobs that fio reported as one. A job that failed has a row too,
/// without measured values: what fio printed of it is not the result of the run that was asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FioRow {
    /// Index of the job in the output. A job has a row for each direction.
    pub job: usize,
    /// Name of the job, fio's `jobname`.
    pub jobname: String,
    /// Number of the reporting group.
    pub group: u64,
    /// `read`, `write`, `trim`, or `mixed` for unified reporting; empty for a job that failed before its
    /// first I/O.
    pub direction: String,
    /// The job's `rw` option; empty if unknown.
    pub rw: String,
    /// I/O size in bytes by the options; 0 if unknown.
    pub bs_bytes: u64,
    /// The job's `ioengine`; empty if unknown.
    pub engine: String,
    /// I/Os a second.
    pub iops: f64,
    /// Standard deviation of fio's IOPS samples.
    pub iops_sd: f64,
    /// MiB a second.
    pub bw_mib_s: f64,
    /// Mean total latency, `lat`.
    pub mean_us: f64,
    /// Standard deviation of the total latency.
    pub sd_us: f64,
    /// Mean completion latency, `clat`.
    pub clat_mean_us: f64,
    /// Mean submission latency, `slat`.
    pub slat_mean_us: f64,
    /// Percentiles in the order of [`PERCENTILES`]: those of `clat` if reported, otherwise those of `lat`.
    pub percentiles_us: [Option<f64>; 5],
    /// Maximum of `clat` if reported, otherwise of `lat`.
    pub max_us: f64,
    /// Processor time in user space, in percent of one core, averaged over the jobs of a group.
    pub cpu_usr_pct: f64,
    /// Processor time in the kernel, in the same unit.
    pub cpu_sys_pct: f64,
    /// Context switches.
    pub ctx: u64,
    /// Jobs in the group.
    pub procs: u64,
    /// `iodepth` of each job.
    pub qd: u64,
    /// fio's error code of the job, 0 for success.
    pub error: i64,
    /// I/Os that failed, after which the job continued.
    pub io_errors: u64,
}

/// The percentiles of a row.
pub const PERCENTILES: [f64; 5] = [50.0, 90.0, 95.0, 99.0, 99.9];

/// Why fio's output could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// The text holds neither fio's JSON nor its text output.
    #[error("holds no fio results: neither a JSON object with \"jobs\" nor a line with \"groupid=\"")]
    NoResults,
    /// The text has fio's JSON, but it is malformed or truncated.
    #[error("is fio's JSON, but malformed: {0}; was fio stopped before it had written everything?")]
    Json(String),
    /// A line of fio's text output is malformed.
    #[error("line {line} is not in fio's format: {text}")]
    Text {
        /// Line number, from 1.
        line: usize,
        /// The line.
        text: String,
    },
    /// The text is above [`TEXT_BYTES_MAX`].
    #[error("is {0} bytes long; at most {TEXT_BYTES_MAX} are read")]
    TooLarge(usize),
}

/// Largest text that is parsed, in bytes. The `json+` output of a thousand jobs is smaller.
pub const TEXT_BYTES_MAX: usize = 256 << 20;

/// The rows of every job and direction with I/O, in the order of the output. JSON is preferred over text,
/// because the text is rounded.
pub fn rows(text: &str) -> Result<Vec<FioRow>, ImportError> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(ImportError::TooLarge(text.len()));
    }
    match json::rows(text) {
        Some(rows) => rows,
        None => text::rows(text)?.ok_or(ImportError::NoResults),
    }
}

/// Column names, as in the header of [`csv`].
pub const COLUMNS: [&str; 26] = [
    "jobname",
    "group",
    "direction",
    "rw",
    "engine",
    "bs_kib",
    "procs",
    "qd",
    "iops",
    "iops_sd",
    "bw_mib_s",
    "mean_us",
    "sd_us",
    "clat_mean_us",
    "slat_mean_us",
    "p50_us",
    "p90_us",
    "p95_us",
    "p99_us",
    "p999_us",
    "max_us",
    "cpu_usr_pct",
    "cpu_sys_pct",
    "cpu_cores",
    "ctx",
    "error",
];

impl FioRow {
    /// The values in the order of [`COLUMNS`]; empty if unknown, as are the measured values of a job that
    /// failed.
    pub fn values(&self) -> Vec<String> {
        let some = |text: &str| text.to_string();
        let rounded = |value: f64, digits: usize| trimmed(&format!("{value:.digits$}"));
        let mut values = vec![some(&self.jobname), self.group.to_string(), some(&self.direction)];
        values.extend([some(&self.rw), some(&self.engine)]);
        values.push(if self.bs_bytes == 0 {
            String::new()
        } else {
            rounded(self.bs_bytes as f64 / 1024.0, 3)
        });
        values.extend([self.procs.to_string(), self.qd.to_string()]);
        if self.error != 0 {
            values.resize(COLUMNS.len() - 1, String::new());
            values.push(self.error.to_string());
            return values;
        }
        values.extend([self.iops, self.iops_sd, self.bw_mib_s].map(|value| rounded(value, 1)));
        let latencies = [self.mean_us, self.sd_us, self.clat_mean_us, self.slat_mean_us];
        values.extend(latencies.map(|value| rounded(value, 3)));
        let percentile = |value: Option<f64>| value.map_or(String::new(), |value| rounded(value, 3));
        values.extend(self.percentiles_us.map(percentile));
        values.extend([self.max_us, self.cpu_usr_pct, self.cpu_sys_pct].map(|value| rounded(value, 3)));
        values.push(rounded(self.cpu_cores(), 3));
        values.extend([self.ctx.to_string(), self.error.to_string()]);
        values
    }

    /// Processor time of all jobs of the row, in cores.
    pub fn cpu_cores(&self) -> f64 {
        (self.cpu_usr_pct + self.cpu_sys_pct) * self.procs as f64 / 100.0
    }
}

/// Removes trailing zeros of the fraction.
fn trimmed(number: &str) -> String {
    match number.contains('.') {
        true => number.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => number.to_string(),
    }
}

/// Formats rows as CSV (RFC 4180) with a header. The last column is the name of the row's source.
pub fn csv(rows: &[(String, FioRow)]) -> String {
    let mut text = format!("{},source\n", COLUMNS.join(","));
    for (source, row) in rows {
        let values = row.values();
        let cells: Vec<String> = values.iter().chain([source]).map(|value| quoted(value)).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", cells.join(","));
    }
    text
}

fn quoted(value: &str) -> String {
    match value.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", value.replace('"', "\"\"")),
        false => value.to_string(),
    }
}

/// Formats rows as a JSON array of objects; unknown numbers are null.
pub fn to_json(rows: &[(String, FioRow)]) -> serde_json::Value {
    let texts = ["jobname", "direction", "rw", "engine"];
    let object = |(source, row): &(String, FioRow)| {
        let mut object = serde_json::Map::new();
        for (column, value) in COLUMNS.iter().zip(row.values()) {
            let value = match value.parse::<f64>() {
                _ if texts.contains(column) => serde_json::Value::String(value),
                Ok(number) if number.fract() == 0.0 && number.abs() < 9e15 => (number as i64).into(),
                Ok(number) => number.into(),
                Err(_) => serde_json::Value::Null,
            };
            object.insert((*column).to_string(), value);
        }
        object.insert("source".to_string(), serde_json::Value::String(source.clone()));
        serde_json::Value::Object(object)
    };
    serde_json::Value::Array(rows.iter().map(object).collect())
}

#[cfg(test)]
mod tests;
