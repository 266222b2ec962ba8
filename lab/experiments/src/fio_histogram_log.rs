//! fio's histogram logs (`write_hist_log`), from which its cells get a timeline.
//!
//! A line has the milliseconds since the start of the measurement, the direction, the bytes of the last I/O, and the I/Os
//! in each bucket of completion latency since the line before. fio writes no line for the interval that the end of the job
//! cuts short, and lines late when the job does not get a core.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};

use crate::record::TimelineSlice;

/// `log_hist_coarseness`: each bucket is 2^4 of fio's, of which 64 are between a latency and its double. Buckets are a
/// quarter wide, as those of `ringbolt perf`.
const COARSENESS: u32 = 4;
/// Buckets of a line.
const BUCKETS: usize = 1856 >> COARSENESS;
/// Most bytes of a file that are read: 100,000 lines.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Most files of a role, one a job.
const FILES_MAX: usize = 65_536;
/// Latest slice: lines behind it are dropped.
const SLICES_MAX: usize = 10_000;

/// The histogram logs of a cell.
#[derive(Clone, Debug)]
pub(crate) struct HistogramLogs {
    /// Path of the logs without the role and what fio appends.
    prefix: PathBuf,
    interval_ms: u32,
}

impl HistogramLogs {
    /// Logs whose paths begin with `prefix`, with a line each `interval_ms` at most.
    pub(crate) fn new(prefix: PathBuf, interval_ms: u32) -> HistogramLogs {
        HistogramLogs { prefix, interval_ms }
    }

    fn path(&self, role: &str) -> PathBuf {
        let mut path = self.prefix.clone().into_os_string();
        path.push(".");
        path.push(role);
        path.into()
    }

    /// The options of the jobs of a role.
    pub(crate) fn options(&self, role: &str) -> [(&'static str, String); 3] {
        [
            ("write_hist_log", self.path(role).display().to_string()),
            ("log_hist_msec", self.interval_ms.to_string()),
            ("log_hist_coarseness", COARSENESS.to_string()),
        ]
    }

    /// Reads and removes the logs of a role. The timeline is empty if there are none.
    pub(crate) fn take(&self, role: &str) -> Vec<TimelineSlice> {
        let mut slices = SliceMap::new();
        for path in files_of(&self.path(role)) {
            if let Ok(file) = File::open(&path) {
                add(&mut slices, file, self.interval_ms);
            }
            // A log that remains costs space only.
            let _ = fs::remove_file(&path);
        }
        let last = slices.last_key_value().map_or(0, |(index, _)| index + 1);
        let slice = |index: usize| {
            let clat: Vec<(u64, u64)> =
                slices.get(&index).into_iter().flatten().map(|(a, b)| (*a, *b)).collect();
            TimelineSlice {
                at_ms: (index + 1) as f64 * f64::from(self.interval_ms),
                ios: clat.iter().map(|(_, ios)| ios).sum(),
                clat,
            }
        };
        (0..last).map(slice).collect()
    }
}

/// I/Os by the highest latency of their bucket in nanoseconds, by slice.
type SliceMap = BTreeMap<usize, BTreeMap<u64, u64>>;

/// The logs of all jobs: `PREFIX_clat_hist.1.log` and so on.
fn files_of(prefix: &Path) -> Vec<PathBuf> {
    let (Some(folder), Some(name)) = (prefix.parent(), prefix.file_name()) else { return Vec::new() };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let begin = format!("{}_clat_hist.", name.to_string_lossy());
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with(&begin) && name.ends_with(".log")
    });
    named.map(|entry| entry.path()).take(FILES_MAX).collect()
}

/// Adds the lines of a log; those that are none of fio's are skipped.
fn add(slices: &mut SliceMap, log: File, interval_ms: u32) {
    for line in BufReader::new(log.take(FILE_BYTES_MAX)).lines().map_while(Result::ok) {
        let Some((at_ms, counts)) = parse(&line) else { continue };
        let end = (at_ms / f64::from(interval_ms.max(1))).round().max(1.0) as usize;
        if end > SLICES_MAX {
            continue;
        }
        let slice = slices.entry(end - 1).or_default();
        for (bucket, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            let total = slice.entry(highest_ns(bucket)).or_default();
            *total = total.saturating_add(count);
        }
    }
}

/// The time and the buckets of a line.
fn parse(line: &str) -> Option<(f64, Vec<u64>)> {
    let mut fields = line.splitn(BUCKETS + 4, ',').map(str::trim);
    let at_ms: u32 = fields.next()?.parse().ok()?;
    let counts: Vec<u64> = fields.skip(2).map(str::parse).collect::<Result<_, _>>().ok()?;
    (counts.len() == BUCKETS).then_some((f64::from(at_ms), counts))
}

/// The highest latency of a bucket, in nanoseconds (fio's `plat_idx_to_val`).
fn highest_ns(bucket: usize) -> u64 {
    let index = ((bucket + 1) << COARSENESS) as u64 - 1;
    if index < 128 {
        return index;
    }
    let error_bits = (index >> 6) - 1;
    (1 << (error_bits + 6)) + (((index & 63) + 1) << error_bits) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("ringbolt-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn line(at_ms: u32, direction: u32, buckets: &[(usize, u64)]) -> String {
        let mut counts = vec![0; BUCKETS];
        buckets.iter().for_each(|(bucket, count)| counts[*bucket] = *count);
        let counts: Vec<String> = counts.iter().map(u64::to_string).collect();
        format!("{at_ms}, {direction}, 4096, {}\n", counts.join(", "))
    }

    #[test]
    fn the_logs_of_all_jobs_and_directions_are_one_timeline() {
        let folder = folder("histogram-logs");
        let logs = HistogramLogs::new(folder.join("00001"), 50);
        let write = |name: &str, text: String| fs::write(folder.join(name), text).unwrap();
        let first = line(51, 0, &[(0, 3), (40, 7)]) + &line(51, 1, &[(40, 1)]) + &line(152, 0, &[(41, 5)]);
        // A line of another program, one that was cut, and one far beyond the run.
        let noise =
            format!("time, 0\n{}\n{}", &line(52, 0, &[(1, 9)])[..60], line(4_000_000_000, 0, &[(1, 9)]));
        write("00001.fg_clat_hist.2.log", first + &noise);
        write("00001.fg_clat_hist.3.log", line(49, 0, &[(40, 2)]));
        write("00001.bg_clat_hist.1.log", line(50, 1, &[(40, 100)]));
        let slice = |at_ms, ios, clat| TimelineSlice { at_ms, ios, clat };
        let expected = vec![
            slice(50.0, 13, vec![(15, 3), (highest_ns(40), 10)]),
            slice(100.0, 0, vec![]),
            slice(150.0, 5, vec![(highest_ns(41), 5)]),
        ];
        assert_eq!(logs.take("fg"), expected);
        assert_eq!(logs.take("fg"), [], "the files are removed");
        assert_eq!(logs.take("bg"), [slice(50.0, 100, vec![(highest_ns(40), 100)])]);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn buckets_are_at_most_a_quarter_wide_and_without_gaps() {
        assert_eq!([0, 7, 8, 115].map(highest_ns), [15, 127, 159, (1 << 34) - 1]);
        for bucket in 8..BUCKETS {
            let (low, high) = (highest_ns(bucket - 1), highest_ns(bucket));
            assert!(high > low && (high - low) * 4 <= low + 1, "{bucket}: {low} to {high}");
        }
    }

    #[test]
    fn fio_itself_writes_such_logs() {
        let folder = folder("fio-histogram-logs");
        let logs = HistogramLogs::new(folder.join("7"), 50);
        let output = folder.join("out.json");
        let mut fio = std::process::Command::new("fio");
        fio.args(["--name=fg", "--ioengine=null", "--size=1g", "--bs=4k", "--rw=randrw", "--numjobs=2"]);
        fio.args([
            "--time_based",
            "--runtime=600ms",
            "--group_reporting",
            "--output-format=json+",
            "--thread",
        ]);
        fio.arg(format!("--output={}", output.display()));
        fio.args(logs.options("fg").map(|(name, value)| format!("--{name}={value}")));
        if !fio.status().is_ok_and(|status| status.success()) {
            return println!("SKIPPED: no fio in PATH");
        }
        let text = fs::read_to_string(&output).unwrap();
        let (_, groups) = crate::fio_output::parse(&text, |_| 2).unwrap();
        let timeline = logs.take("fg");
        let (logged, all) = (timeline.iter().map(|slice| slice.ios).sum::<u64>() as f64, groups[0].ios);
        // Without the interval in which the jobs end; on a busy machine that may be longer.
        assert!(
            timeline.len() >= 3 && logged > 0.1 * all && logged <= all,
            "{logged} of {all}: {timeline:?}"
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
