//! A job's I/Os and latencies over the run: what its histograms gained between regular times. Costs nothing per I/O.

use os::clock;

use crate::Histogram;

/// Buckets: four for each power of two of nanoseconds.
const BUCKETS: usize = 4 * 64;
/// Most entries of a timeline: an hour at 100 ms. Later ones are not kept.
const ENTRIES_MAX: usize = 36_000;

/// The I/Os that completed in one interval, in all directions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TimelineEntry {
    /// End of the interval, from the start of the measurement.
    pub at_ns: u64,
    /// Completed I/Os.
    pub ios: u64,
    /// Completion latencies: the highest nanoseconds of a bucket, at most a quarter above its lowest, and its I/Os.
    pub completions: Vec<(u64, u64)>,
}

/// Records the entries of a job.
#[derive(Debug)]
pub(crate) struct TimelineRecorder {
    interval_ns: u64,
    due_ticks: u64,
    seen: Box<[u64; BUCKETS]>,
    last_ns: u64,
    entries: Vec<TimelineEntry>,
}

impl TimelineRecorder {
    pub(crate) fn new(interval_ns: u64) -> TimelineRecorder {
        TimelineRecorder {
            interval_ns,
            due_ticks: u64::MAX,
            seen: Box::new([0; BUCKETS]),
            last_ns: 0,
            entries: Vec::new(),
        }
    }

    /// Starts with the measurement; returns when the first entry is due, in ticks.
    pub(crate) fn begin(&mut self, now: u64) -> u64 {
        self.due_ticks = now.saturating_add(self.step());
        self.due_ticks
    }

    fn step(&self) -> u64 {
        clock::ns_to_ticks(self.interval_ns).max(1)
    }

    /// Takes an entry if one is due; returns when the next one is.
    pub(crate) fn update<'a>(
        &mut self,
        now: u64,
        elapsed_ns: u64,
        completions: impl Iterator<Item = &'a Histogram>,
    ) -> u64 {
        if now >= self.due_ticks {
            self.take(elapsed_ns, completions);
            let missed = (now - self.due_ticks) / self.step();
            self.due_ticks = self.due_ticks.saturating_add((missed + 1).saturating_mul(self.step()));
        }
        self.due_ticks
    }

    /// Takes the rest of the run as the last entry, unless it is shorter than half an interval.
    pub(crate) fn end<'a>(&mut self, elapsed_ns: u64, completions: impl Iterator<Item = &'a Histogram>) {
        if elapsed_ns.saturating_sub(self.last_ns) >= self.interval_ns / 2 {
            self.take(elapsed_ns, completions);
        }
        self.due_ticks = u64::MAX;
    }

    fn take<'a>(&mut self, at_ns: u64, completions: impl Iterator<Item = &'a Histogram>) {
        if self.entries.len() == ENTRIES_MAX {
            return;
        }
        let mut counts = Box::new([0u64; BUCKETS]);
        for (ticks, count) in completions.flat_map(Histogram::iter) {
            counts[bucket(clock::ticks_to_ns(ticks))] += count;
        }
        let gained = counts.iter().zip(self.seen.iter()).map(|(now, before)| now - before);
        let completions: Vec<(u64, u64)> = gained
            .enumerate()
            .filter(|(_, count)| *count > 0)
            .map(|(index, count)| (highest(index), count))
            .collect();
        let ios = completions.iter().map(|(_, count)| count).sum();
        self.entries.push(TimelineEntry { at_ns, ios, completions });
        (self.seen, self.last_ns) = (counts, at_ns);
    }

    pub(crate) fn into_entries(self) -> Vec<TimelineEntry> {
        self.entries
    }
}

/// The bucket of a latency.
fn bucket(ns: u64) -> usize {
    if ns < 4 {
        return ns as usize;
    }
    let exponent = ns.ilog2();
    4 * exponent as usize + (ns >> (exponent - 2) & 3) as usize
}

/// The highest latency of a bucket.
fn highest(bucket: usize) -> u64 {
    // The buckets from 4 to 7 are never used.
    if bucket < 8 {
        return bucket.min(3) as u64;
    }
    let (exponent, quarter) = (bucket / 4, bucket as u64 % 4);
    // The highest of the last bucket is `u64::MAX`.
    ((u128::from(5 + quarter) << (exponent - 2)) - 1) as u64
}

/// The timelines of jobs that ran at the same time, added up: entries that end within half an interval of each other
/// belong together.
pub(crate) fn merged(one: &[TimelineEntry], other: &[TimelineEntry], interval_ns: u64) -> Vec<TimelineEntry> {
    let mut all: Vec<TimelineEntry> = one.to_vec();
    for entry in other {
        let near = |known: &&mut TimelineEntry| known.at_ns.abs_diff(entry.at_ns) <= interval_ns / 2;
        match all.iter_mut().find(near) {
            Some(known) => known.add(entry),
            None => all.push(entry.clone()),
        }
    }
    all.sort_by_key(|entry| entry.at_ns);
    all
}

impl TimelineEntry {
    fn add(&mut self, other: &TimelineEntry) {
        self.ios += other.ios;
        for (ns, count) in &other.completions {
            match self.completions.binary_search_by_key(ns, |(known, _)| *known) {
                Ok(index) => self.completions[index].1 += count,
                Err(index) => self.completions.insert(index, (*ns, *count)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_at_most_a_quarter_wide_and_adjacent() {
        for ns in [0, 1, 3, 4, 5, 7, 8, 100, 1 << 20, u64::MAX - 1, u64::MAX] {
            let index = bucket(ns);
            assert!(ns <= highest(index) && (index == 0 || ns > highest(index - 1)), "{ns}: {index}");
        }
        for index in 8..BUCKETS {
            let (lowest, highest) = (highest(index - 1) + 1, highest(index));
            assert!(highest - lowest <= lowest / 4, "{index}");
        }
    }

    #[test]
    fn an_entry_has_what_completed_since_the_one_before() {
        let mut histogram = Histogram::new();
        let mut timeline = TimelineRecorder::new(1_000_000);
        let second = clock::ns_to_ticks(1_000_000);
        assert_eq!(timeline.begin(0), second);
        histogram.record_many(clock::ns_to_ticks(1000), 3);
        assert_eq!(timeline.update(second - 1, 999_999, [&histogram].into_iter()), second);
        // The second entry is late: the next one is due at the next multiple of the interval.
        assert!(timeline.update(2 * second + 1, 2_000_001, [&histogram].into_iter()) > 2 * second + 1);
        histogram.record_many(clock::ns_to_ticks(5000), 2);
        timeline.end(2_100_000, [&histogram].into_iter());
        timeline.end(2_600_000, [&histogram].into_iter());
        let entries = timeline.into_entries();
        let counts: Vec<(u64, u64)> = entries.iter().map(|entry| (entry.at_ns, entry.ios)).collect();
        assert_eq!(counts, [(2_000_001, 3), (2_600_000, 2)]);
        assert!(matches!(entries[1].completions[..], [(ns, 2)] if (5000..=6300).contains(&ns)));
    }

    #[test]
    fn timelines_of_concurrent_jobs_add_up() {
        let entry = |at_ns, ios| TimelineEntry { at_ns, ios, completions: vec![(100, ios)] };
        let one = [entry(1000, 1), entry(2000, 2)];
        let other = [entry(1010, 10), entry(2990, 20)];
        let merged = merged(&one, &other, 1000);
        assert_eq!(merged, [entry(1000, 11), entry(2000, 2), entry(2990, 20)]);
    }
}
