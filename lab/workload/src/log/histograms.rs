//! A job's histograms of completion latency over time, in fio's buckets: `write_hist_log`.

use std::io::{self, Write};

/// fio's buckets: 64 for each of 29 powers of two, of nanoseconds.
const BUCKETS: usize = 29 * 64;
/// The highest `log_hist_coarseness`: a bucket for each power of two.
pub(crate) const COARSENESS_MAX: u8 = 6;
/// Most buckets with I/Os that one job keeps, over all lines: 256 MiB of memory. Further lines are only counted.
const ENTRIES_MAX: usize = 32 << 20;

/// A line: the I/Os of one direction in one interval.
#[derive(Debug)]
struct HistogramLine {
    at_ns: u64,
    direction: u8,
    /// Of the interval's last I/O, as with fio.
    bytes: u32,
    /// Buckets with I/Os, in order.
    counts: Vec<(u16, u32)>,
}

/// The current interval of one direction.
#[derive(Debug)]
struct HistogramWindow {
    counts: Box<[u32; BUCKETS]>,
    started_ns: u64,
    /// Time and size of the last I/O; `None` without any.
    last: Option<(u64, u32)>,
}

/// The histograms of one job. An interval of a direction ends with the first I/O that completes after it; the last
/// line has what is left, which fio omits.
#[derive(Debug)]
pub(crate) struct HistogramLog {
    interval_ns: u64,
    windows: [HistogramWindow; 3],
    lines: Vec<HistogramLine>,
    entries: usize,
    pub(crate) dropped: u64,
}

impl HistogramWindow {
    fn new() -> HistogramWindow {
        HistogramWindow { counts: Box::new([0; BUCKETS]), started_ns: 0, last: None }
    }

    fn line(&self, direction: usize) -> Option<HistogramLine> {
        let (at_ns, bytes) = self.last?;
        let counts = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        let counts = counts.map(|(bucket, count)| (bucket as u16, *count)).collect();
        Some(HistogramLine { at_ns, direction: direction as u8, bytes, counts })
    }
}

impl HistogramLog {
    pub(crate) fn new(interval_ns: u64) -> HistogramLog {
        let windows = std::array::from_fn(|_| HistogramWindow::new());
        HistogramLog { interval_ns, windows, lines: Vec::new(), entries: 0, dropped: 0 }
    }

    /// Records a completed I/O.
    pub(crate) fn record(&mut self, at_ns: u64, direction: u8, bytes: u32, completion_ns: u64) {
        let window = &mut self.windows[usize::from(direction)];
        let count = &mut window.counts[bucket(completion_ns)];
        *count = count.saturating_add(1);
        window.last = Some((at_ns, bytes));
        if at_ns.saturating_sub(window.started_ns) < self.interval_ns {
            return;
        }
        if let Some(line) = window.line(usize::from(direction)) {
            if self.entries + line.counts.len() <= ENTRIES_MAX {
                self.entries += line.counts.len();
                self.lines.push(line);
            } else {
                self.dropped += 1;
            }
        }
        window.counts.fill(0);
        (window.started_ns, window.last) = (at_ns, None);
    }

    /// Discards what the ramp has recorded.
    pub(crate) fn clear(&mut self) {
        *self = HistogramLog::new(self.interval_ns);
    }

    /// Writes the lines: time in ms, direction, bytes, and the buckets, each sum of `2^coarseness` of fio's.
    pub(crate) fn write(&self, out: &mut dyn Write, coarseness: u8, start_ms: u64) -> io::Result<()> {
        let last = self.windows.iter().enumerate().filter_map(|(index, window)| {
            let line = window.line(index)?;
            // fio's tools divide by the time between lines.
            Some(HistogramLine { at_ns: line.at_ns.max(window.started_ns + 1_000_000), ..line })
        });
        let last: Vec<HistogramLine> = last.collect();
        let mut sums = vec![0u64; BUCKETS >> coarseness];
        for line in self.lines.iter().chain(&last) {
            sums.fill(0);
            for (bucket, count) in &line.counts {
                sums[usize::from(*bucket) >> coarseness] += u64::from(*count);
            }
            write!(out, "{}, {}, {}", start_ms + line.at_ns / 1_000_000, line.direction, line.bytes)?;
            for sum in &sums {
                write!(out, ", {sum}")?;
            }
            writeln!(out)?;
        }
        Ok(())
    }
}

/// fio's bucket of a latency: exact below 128 ns, then 64 buckets for each power of two.
fn bucket(ns: u64) -> usize {
    let shift = (u64::BITS - ns.leading_zeros()).saturating_sub(7) as usize;
    if shift == 0 {
        return ns as usize;
    }
    (((shift + 1) << 6) + (63 & (ns >> shift)) as usize).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_those_of_fio() {
        let of_fio = [(0, 0), (127, 127), (128, 128), (129, 128), (1 << 20, 960), (u64::MAX, BUCKETS - 1)];
        for (ns, index) in of_fio {
            assert_eq!(bucket(ns), index, "{ns}");
        }
        assert!((0..1 << 16).all(|ns| bucket(ns + 1) - bucket(ns) <= 1), "no bucket is left out");
    }

    fn text(log: &HistogramLog, coarseness: u8) -> Vec<Vec<u64>> {
        let mut out = Vec::new();
        log.write(&mut out, coarseness, 0).unwrap();
        let text = String::from_utf8(out).unwrap();
        text.lines().map(|line| line.split(", ").map(|word| word.parse().unwrap()).collect()).collect()
    }

    #[test]
    fn each_direction_has_its_lines_and_none_without_ios() {
        let mut log = HistogramLog::new(1_000_000);
        log.record(500_000, 0, 4096, 100);
        log.record(600_000, 1, 512, 100);
        log.record(1_200_000, 0, 8192, 101);
        log.record(9_000_000, 0, 4096, 100);
        log.record(9_500_000, 0, 4096, 3);
        let lines = text(&log, 0);
        assert!(lines.iter().all(|line| line.len() == 3 + 1856));
        let heads: Vec<&[u64]> = lines.iter().map(|line| &line[..3]).collect();
        let expected: [&[u64]; 4] = [&[1, 0, 8192], &[9, 0, 4096], &[10, 0, 4096], &[1, 1, 512]];
        assert_eq!(heads, expected);
        assert_eq!((lines[0][3 + 100], lines[0][3 + 101], lines[1][3 + 100], lines[2][3 + 3]), (1, 1, 1, 1));
        let coarse = text(&log, COARSENESS_MAX);
        assert!(coarse.iter().all(|line| line.len() == 3 + 29) && coarse[0][3 + 1] == 2);
        log.clear();
        assert!(text(&log, 0).is_empty());
    }
}
