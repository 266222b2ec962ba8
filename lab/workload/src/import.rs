//! Results that fio wrote, as rows: one for each job and direction.
//!
//! [`rows`] takes what fio printed, JSON or text or one after the other, with whatever else was printed
//! around it. Times become microseconds and bandwidth MiB a second; nothing else is computed, so that a
//! row says what fio said.

use std::fmt::Write as _;

mod json;
mod text;

/// One direction of one job, or of a group of jobs that fio reported as one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// Name of the job.
    pub jobname: String,
    /// Number of the reporting group.
    pub group: u64,
    /// `read`, `write`, `trim`, or `mixed` where fio reported all as one.
    pub direction: String,
    /// The job's `rw` option; empty where the output does not tell.
    pub rw: String,
    /// Bytes of one I/O as the options have them; 0 where the output does not tell.
    pub bs_bytes: u64,
    /// The engine; empty where the output does not tell.
    pub engine: String,
    /// I/Os a second.
    pub iops: f64,
    /// Deviation of fio's samples of it.
    pub iops_sd: f64,
    /// MiB a second.
    pub bw_mib_s: f64,
    /// Mean of the whole latency, `lat`.
    pub mean_us: f64,
    /// Deviation of the whole latency.
    pub sd_us: f64,
    /// Mean from submission to completion, `clat`.
    pub clat_mean_us: f64,
    /// Mean of submission, `slat`.
    pub slat_mean_us: f64,
    /// Percentiles in the order of [`PERCENTILES`]; of `clat` where there are any, otherwise of `lat`.
    pub percentiles_us: [Option<f64>; 5],
    /// Longest of the latencies that the percentiles are of.
    pub max_us: f64,
    /// Processor time in user space, percent of one core, mean of the jobs of a group.
    pub cpu_usr_pct: f64,
    /// Processor time in the kernel, likewise.
    pub cpu_sys_pct: f64,
    /// Context switches.
    pub ctx: u64,
    /// Jobs in the group.
    pub procs: u64,
    /// `iodepth` of each.
    pub qd: u64,
    /// Errors that the job ended with.
    pub error: i64,
}

/// The percentiles of a row.
pub const PERCENTILES: [f64; 5] = [50.0, 90.0, 95.0, 99.0, 99.9];

/// Why fio's output could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// Neither JSON nor text of fio's.
    #[error("holds no fio results: neither a JSON object with \"jobs\" nor a line with \"groupid=\"")]
    Nothing,
    /// It begins like fio's JSON.
    #[error("is fio's JSON, but broken: {0}; was fio ended before it had written all?")]
    Json(String),
    /// A line of fio's text that cannot be read.
    #[error("line {line} is not as fio writes it: {text}")]
    Text {
        /// Counted from 1.
        line: usize,
        /// The line.
        text: String,
    },
    /// It is larger than any output of fio's.
    #[error("is {0} bytes long; at most {TEXT_BYTES_MAX} are read")]
    TooLarge(usize),
}

/// The outputs of a thousand jobs with `json+` stay below it.
pub const TEXT_BYTES_MAX: usize = 256 << 20;

/// Every job and direction that did any I/O, in the order of the output. JSON is preferred where there
/// are both, because the text is rounded.
pub fn rows(text: &str) -> Result<Vec<Row>, ImportError> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(ImportError::TooLarge(text.len()));
    }
    match json::rows(text) {
        Some(rows) => rows,
        None => text::rows(text)?.ok_or(ImportError::Nothing),
    }
}

/// The columns' names, as in the header of [`csv`].
pub const COLUMNS: [&str; 25] = [
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
];

impl Row {
    /// The values in the order of [`COLUMNS`]; empty for what the output does not tell.
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
        values.extend([self.iops, self.iops_sd, self.bw_mib_s].map(|value| rounded(value, 1)));
        let latencies = [self.mean_us, self.sd_us, self.clat_mean_us, self.slat_mean_us];
        values.extend(latencies.map(|value| rounded(value, 3)));
        let percentile = |value: Option<f64>| value.map_or(String::new(), |value| rounded(value, 3));
        values.extend(self.percentiles_us.map(percentile));
        values.extend([self.max_us, self.cpu_usr_pct, self.cpu_sys_pct].map(|value| rounded(value, 3)));
        values.push(rounded(self.cpu_cores(), 3));
        values.push(self.ctx.to_string());
        values
    }

    /// Cores that the jobs of the row kept busy.
    pub fn cpu_cores(&self) -> f64 {
        (self.cpu_usr_pct + self.cpu_sys_pct) * self.procs as f64 / 100.0
    }
}

/// Without zeroes at the end of its fraction.
fn trimmed(number: &str) -> String {
    match number.contains('.') {
        true => number.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => number.to_string(),
    }
}

/// A table with a header, quoted as RFC 4180 has it. Each row is led by the name of what it is from.
pub fn csv(rows: &[(String, Row)]) -> String {
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

/// The same as an array of objects; numbers are numbers, and what the output does not tell is null.
pub fn to_json(rows: &[(String, Row)]) -> serde_json::Value {
    let texts = ["jobname", "direction", "rw", "engine"];
    let object = |(source, row): &(String, Row)| {
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
