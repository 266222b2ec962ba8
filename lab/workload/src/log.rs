//! Log files of a job: fio's `write_lat_log`, `write_bw_log`, `write_iops_log` and `write_hist_log`.

mod histograms;

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

pub(crate) use histograms::COARSENESS_MAX;
use histograms::HistogramLog;

/// Which logs a job keeps, and where they go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// `write_lat_log`: latencies, as `NAME_lat.N.log`, `NAME_slat.N.log` and `NAME_clat.N.log`.
    pub latency: Option<PathBuf>,
    /// `write_bw_log`, as `NAME_bw.N.log`: of each I/O, its bytes by its completion latency in kB/s; with
    /// `log_avg_msec`, the job's KiB/s.
    pub bandwidth: Option<PathBuf>,
    /// `write_iops_log`, as `NAME_iops.N.log`: 1 for each I/O; with `log_avg_msec`, the job's I/Os a second.
    pub iops: Option<PathBuf>,
    /// `log_avg_msec`: interval of averages; 0 for one entry per I/O.
    pub average_ns: u64,
    /// `log_max_value`: the largest value of each interval, not the average.
    pub has_maxima: bool,
    /// `log_unix_epoch`: times are since 1970 and not since the start of the job.
    pub has_unix_times: bool,
    /// `write_hist_log`: histograms of completion latency, as `NAME_clat_hist.N.log`.
    pub histograms: Option<PathBuf>,
    /// `log_hist_msec`: time between histograms.
    pub histograms_ns: u64,
    /// `log_hist_coarseness`: each bucket of the file is the sum of 2 to this power, up to 6.
    pub histograms_coarseness: u8,
    /// `log_prio`: the last column is the I/O priority; otherwise 1 for I/Os of the real-time class, 0 for others.
    pub priority_values: bool,
    /// `log_offset`: the offset of the I/O, in a column before the last.
    pub has_offsets: bool,
}

impl LogOptions {
    /// Whether anything is logged.
    pub fn is_on(&self) -> bool {
        self.needs_each_io() || self.bandwidth.is_some() || self.iops.is_some()
    }

    /// Whether a log needs each I/O.
    pub(crate) fn needs_each_io(&self) -> bool {
        let rates = self.bandwidth.is_some() || self.iops.is_some();
        self.latency.is_some() || self.histograms.is_some() || (rates && self.average_ns == 0)
    }
}

/// Most entries that one job keeps for one log: 1.5 GiB of memory. Further entries are only counted.
const ENTRIES_MAX: usize = 32 << 20;

/// One line of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogEntry {
    pub(crate) at_ns: u64,
    pub(crate) value: u64,
    pub(crate) direction: u8,
    pub(crate) bytes: u32,
    pub(crate) offset: u64,
    /// Value of `linux/ioprio.h`.
    pub(crate) priority: u16,
}

/// Sum, count and maximum of the values in the current averaging interval.
#[derive(Clone, Copy, Debug, Default)]
struct AveragingWindow {
    sum: u64,
    count: u64,
    max: u64,
}

/// A job's logs: submission, completion and total latency, bandwidth and IOPS. Kept in memory until the job has
/// finished.
#[derive(Debug, Default)]
pub(crate) struct JobLogs {
    pub(crate) options: LogOptions,
    entries: [Vec<LogEntry>; 5],
    windows: [[AveragingWindow; 3]; 3],
    histograms: Option<HistogramLog>,
    dropped: u64,
    /// When the measurement began, in milliseconds since 1970.
    began_unix_ms: u64,
}

/// Names of the logs, by index in [`JobLogs::entries`].
const NAMES: [&str; 5] = ["slat", "clat", "lat", "bw", "iops"];
const BANDWIDTH: usize = 3;
const IOPS: usize = 4;

impl JobLogs {
    pub(crate) fn new(options: LogOptions) -> JobLogs {
        let histograms = options.histograms.as_ref().map(|_| HistogramLog::new(options.histograms_ns));
        JobLogs { options, histograms, ..JobLogs::default() }
    }

    /// The measurement begins.
    pub(crate) fn begin(&mut self) {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        self.began_unix_ms = since.map_or(0, |since| since.as_millis() as u64);
    }

    /// Entries and histograms that were not kept.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped + self.histograms.as_ref().map_or(0, |log| log.dropped)
    }

    /// Records a completed I/O; latencies in nanoseconds: submission, completion, total.
    pub(crate) fn record_io(&mut self, entry: LogEntry, latencies_ns: [u64; 3]) {
        if let Some(log) = &mut self.histograms {
            log.record(entry.at_ns, entry.direction, entry.bytes, latencies_ns[1]);
        }
        if self.options.average_ns == 0 {
            if self.options.bandwidth.is_some() {
                // Bytes in a millisecond are kB/s, as in fio's log.
                let bytes = u64::from(entry.bytes) * 1_000_000;
                let value = bytes.checked_div(latencies_ns[1]).unwrap_or(0);
                self.push(BANDWIDTH, LogEntry { value, ..entry });
            }
            if self.options.iops.is_some() {
                self.push(IOPS, LogEntry { value: 1, ..entry });
            }
        }
        if self.options.latency.is_none() {
            return;
        }
        for (log, value) in latencies_ns.into_iter().enumerate() {
            if self.options.average_ns == 0 {
                self.push(log, LogEntry { value, ..entry });
            } else {
                let window = &mut self.windows[log][usize::from(entry.direction)];
                window.sum += value;
                window.count += 1;
                window.max = window.max.max(value);
            }
        }
    }

    /// Records the rates of a direction in an averaging interval, if the logs have averages.
    pub(crate) fn record_rates(&mut self, at_ns: u64, direction: u8, iops: u64, bytes_per_second: u64) {
        if self.options.average_ns == 0 {
            return;
        }
        let entry = LogEntry { at_ns, value: 0, direction, bytes: 0, offset: 0, priority: 0 };
        if self.options.bandwidth.is_some() {
            self.push(BANDWIDTH, LogEntry { value: bytes_per_second >> 10, ..entry });
        }
        if self.options.iops.is_some() {
            self.push(IOPS, LogEntry { value: iops, ..entry });
        }
    }

    /// Ends an averaging interval.
    pub(crate) fn end_window(&mut self, at_ns: u64) {
        for log in 0..3 {
            for direction in 0..3 {
                let window = std::mem::take(&mut self.windows[log][direction]);
                if let Some(average) = window.sum.checked_div(window.count) {
                    let value = if self.options.has_maxima { window.max } else { average };
                    let direction = direction as u8;
                    self.push(log, LogEntry { at_ns, value, direction, bytes: 0, offset: 0, priority: 0 });
                }
            }
        }
    }

    fn push(&mut self, log: usize, entry: LogEntry) {
        if self.entries[log].len() < ENTRIES_MAX {
            self.entries[log].push(entry);
        } else {
            self.dropped += 1;
        }
    }

    /// Discards the entries of the ramp.
    pub(crate) fn clear(&mut self) {
        self.entries.iter_mut().for_each(Vec::clear);
        self.windows = Default::default();
        if let Some(log) = &mut self.histograms {
            log.clear();
        }
    }

    /// Writes the log files; `number` is part of their names, from 1. A line is `time in ms, value, direction,
    /// bytes, priority`, with the offset before the priority if that is wanted; latencies are in nanoseconds.
    pub(crate) fn write(&self, number: u32) -> io::Result<()> {
        let options = &self.options;
        let start_ms = if options.has_unix_times { self.began_unix_ms } else { 0 };
        let bases = [&options.latency, &options.latency, &options.latency, &options.bandwidth, &options.iops];
        for (index, base) in bases.into_iter().enumerate() {
            let Some(base) = base else { continue };
            let path = format!("{}_{}.{number}.log", base.display(), NAMES[index]);
            let mut text = String::new();
            for entry in &self.entries[index] {
                let LogEntry { at_ns, value, direction, bytes, offset, priority } = entry;
                let priority = match options.priority_values {
                    true => format!("{priority:#06x}"),
                    false => u16::from(priority >> 13 == 1).to_string(),
                };
                let at_ms = start_ms + at_ns / 1_000_000;
                // Writing to a string cannot fail.
                let _ = match options.has_offsets {
                    true => {
                        writeln!(text, "{at_ms}, {value}, {direction}, {bytes}, {offset}, {priority}")
                    }
                    false => writeln!(text, "{at_ms}, {value}, {direction}, {bytes}, {priority}"),
                };
            }
            write_file(&path, |out| out.write_all(text.as_bytes()))?;
        }
        if let (Some(base), Some(log)) = (&options.histograms, &self.histograms) {
            let path = format!("{}_clat_hist.{number}.log", base.display());
            write_file(&path, |out| log.write(out, options.histograms_coarseness, start_ms))?;
        }
        Ok(())
    }
}

/// Creates a file and its folder; errors name the file.
fn write_file(path: &str, write: impl FnOnce(&mut dyn io::Write) -> io::Result<()>) -> io::Result<()> {
    let attempt = || {
        if let Some(directory) = Path::new(path).parent() {
            std::fs::create_dir_all(directory)?;
        }
        let mut out = io::BufWriter::new(std::fs::File::create(path)?);
        write(&mut out)?;
        out.flush()
    };
    attempt().map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_have_fios_format() {
        let directory = std::env::temp_dir().join(format!("ringbolt-log-{}", std::process::id()));
        let base = directory.join("x");
        let options = LogOptions { latency: Some(base.clone()), iops: Some(base), ..LogOptions::default() };
        let entry =
            |at_ns| LogEntry { at_ns, value: 0, direction: 1, bytes: 4096, offset: 8192, priority: 0 };
        let mut logs = JobLogs::new(options.clone());
        logs.record_io(entry(1_500_000), [10, 20, 30]);
        logs.record_rates(500_000_000, 0, 77, 4096);
        logs.write(3).unwrap();
        let read = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap();
        // fio 3.33 writes five columns, and six with log_offset.
        assert_eq!(read("x_lat.3.log"), "1, 30, 1, 4096, 0\n");
        assert_eq!(
            (read("x_slat.3.log").len(), read("x_iops.3.log")),
            (18, "1, 1, 1, 4096, 0\n".to_string())
        );
        let mut logs = JobLogs::new(LogOptions { has_offsets: true, ..options.clone() });
        logs.record_io(entry(1_500_000), [10, 20, 30]);
        logs.record_rates(500_000_000, 0, 77, 4096);
        logs.write(5).unwrap();
        assert_eq!(
            (read("x_lat.5.log"), read("x_iops.5.log")),
            ("1, 30, 1, 4096, 8192, 0\n".to_string(), "1, 1, 1, 4096, 8192, 0\n".to_string())
        );
        let real_time = LogEntry { priority: 1 << 13 | 4, ..entry(1) };
        for (priority_values, column) in [(false, "1"), (true, "0x2004")] {
            let mut logs = JobLogs::new(LogOptions { priority_values, ..options.clone() });
            logs.record_io(real_time, [10, 20, 30]);
            logs.write(4).unwrap();
            assert_eq!(read("x_lat.4.log"), format!("0, 30, 1, 4096, {column}\n"));
        }
        let mut logs = JobLogs::new(LogOptions { average_ns: 1_000_000, ..options });
        logs.record_io(entry(1), [10, 20, 30]);
        logs.record_io(entry(2), [20, 30, 50]);
        logs.end_window(1_000_000);
        logs.end_window(2_000_000);
        logs.write(1).unwrap();
        assert_eq!(read("x_lat.1.log"), "1, 40, 1, 0, 0\n");
        logs.options.has_maxima = true;
        logs.record_io(entry(3), [10, 20, 30]);
        logs.record_io(entry(4), [10, 20, 90]);
        logs.end_window(3_000_000);
        logs.options.has_unix_times = true;
        logs.begin();
        let began = logs.began_unix_ms;
        assert!(began > 1_700_000_000_000, "{began}");
        logs.write(1).unwrap();
        assert_eq!(read("x_lat.1.log"), format!("{}, 40, 1, 0, 0\n{}, 90, 1, 0, 0\n", began + 1, began + 3));
        std::fs::remove_dir_all(directory).unwrap();
    }

    /// The values are of fio 3.33: 4096 bytes in 10,977 ns are 373,143, in 76 ns 53,894,736.
    #[test]
    fn logs_of_rates_have_each_io_unless_averages_are_wanted() {
        let directory = std::env::temp_dir().join(format!("ringbolt-rates-{}", std::process::id()));
        let base = Some(directory.join("x"));
        let written = |average_ns, name: &str| {
            let (bandwidth, iops) = (base.clone(), base.clone());
            let options = LogOptions { bandwidth, iops, average_ns, ..LogOptions::default() };
            assert!(options.is_on() && options.needs_each_io() == (average_ns == 0));
            let mut logs = JobLogs::new(options);
            for (at_ns, direction, completion_ns) in [(1_000_000, 0, 10_977), (2_000_000, 1, 76), (3, 1, 0)] {
                let entry = LogEntry { at_ns, value: 0, direction, bytes: 4096, offset: 0, priority: 0 };
                logs.record_io(entry, [1, completion_ns, completion_ns + 1]);
            }
            logs.record_rates(500_000_000, 1, 77, 8192);
            logs.write(1).unwrap();
            std::fs::read_to_string(directory.join(name)).unwrap()
        };
        assert_eq!(
            written(0, "x_bw.1.log"),
            "1, 373143, 0, 4096, 0\n2, 53894736, 1, 4096, 0\n0, 0, 1, 4096, 0\n"
        );
        assert_eq!(written(0, "x_iops.1.log"), "1, 1, 0, 4096, 0\n2, 1, 1, 4096, 0\n0, 1, 1, 4096, 0\n");
        assert_eq!(written(1_000_000, "x_bw.1.log"), "500, 8, 1, 0, 0\n");
        assert_eq!(written(1_000_000, "x_iops.1.log"), "500, 77, 1, 0, 0\n");
        std::fs::remove_dir_all(directory).unwrap();
    }
}
