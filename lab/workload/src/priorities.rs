//! I/O priorities of single I/Os: fio's `cmdprio_percentage`, `cmdprio_bssplit` and their like.

use block_io::Op;
use os::RequestPriorities;

use crate::direction_stats::direction_index;
use crate::{Histogram, WyRand};

/// Which reads and writes of a job have a priority of their own.
///
/// A priority is a value of `linux/ioprio.h`: the class from bit 13, the level below.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandPriorities {
    /// Of reads and of writes.
    pub shares: [Vec<PriorityShare>; 2],
    /// Latencies by priority are total ones, not those of completion, as with `lat_percentiles` in fio.
    pub of_total_latency: bool,
}

/// The share of I/Os with a priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PriorityShare {
    /// I/Os of this size only.
    pub block_bytes: Option<u32>,
    /// Their percentage. The shares of one size add up to at most 100.
    pub percent: u8,
    /// The priority.
    pub priority: u16,
}

impl CommandPriorities {
    /// Whether any I/O has a priority of its own.
    pub fn is_on(&self) -> bool {
        self.shares.iter().any(|shares| !shares.is_empty())
    }

    /// The priority of an I/O, where `drawn` is 0 to 99; 0 for that of the job.
    fn draw(&self, direction: usize, bytes: u32, drawn: u64) -> u16 {
        let Some(shares) = self.shares.get(direction) else { return 0 };
        let mut below = 0;
        for share in shares.iter().filter(|share| share.block_bytes.is_none_or(|size| size == bytes)) {
            below += u64::from(share.percent);
            if drawn < below {
                return share.priority;
            }
        }
        0
    }
}

/// Draws the priorities of a job's I/Os, and records their latencies by priority.
pub(crate) struct PriorityRecorder {
    options: CommandPriorities,
    /// Priority of the other I/Os.
    default: u16,
    random: WyRand,
    /// The engine reads them.
    pub(crate) by_tag: RequestPriorities,
    /// Of reads and of writes: each priority with its latencies in ticks, in the order of their first I/O.
    latencies: [Vec<(u16, Histogram)>; 2],
}

impl PriorityRecorder {
    pub(crate) fn new(
        options: &CommandPriorities,
        default: u16,
        depth: usize,
        seed: u64,
    ) -> PriorityRecorder {
        PriorityRecorder {
            options: options.clone(),
            default,
            random: WyRand::new(seed ^ 0x7072_696f),
            by_tag: RequestPriorities::new(depth as u32),
            latencies: Default::default(),
        }
    }

    /// Draws the priority of the next I/O with this tag.
    pub(crate) fn draw(&mut self, tag: u64, op: Op, bytes: u32) {
        let priority = self.options.draw(direction_index(op), bytes, self.random.below(100));
        self.by_tag.set(tag, priority);
    }

    /// The priority of the I/O in flight with this tag.
    pub(crate) fn of(&self, tag: u64) -> u16 {
        match self.by_tag.get(tag) {
            0 => self.default,
            priority => priority,
        }
    }

    /// Records the latencies of completion and in total of an I/O, in ticks.
    pub(crate) fn record(&mut self, tag: u64, direction: usize, completion: u64, total: u64) {
        let priority = self.of(tag);
        let Some(latencies) = self.latencies.get_mut(direction) else { return };
        if self.options.shares[direction].is_empty() {
            return;
        }
        let index = latencies.iter().position(|(known, _)| *known == priority).unwrap_or_else(|| {
            latencies.push((priority, Histogram::new()));
            latencies.len() - 1
        });
        latencies[index].1.record(if self.options.of_total_latency { total } else { completion });
    }

    /// Discards the latencies of the ramp.
    pub(crate) fn clear(&mut self) {
        self.latencies = Default::default();
    }

    /// Latencies by priority of reads and of writes.
    pub(crate) fn into_latencies(self) -> [Vec<(u16, Histogram)>; 2] {
        self.latencies
    }
}

/// Adds latencies by priority.
pub(crate) fn merge(into: &mut Vec<(u16, Histogram)>, from: &[(u16, Histogram)]) {
    for (priority, latencies) in from {
        match into.iter_mut().find(|(known, _)| known == priority) {
            Some((_, merged)) => merged.merge(latencies),
            None => into.push((*priority, latencies.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REAL_TIME: u16 = RequestPriorities::value(1, 1);
    const IDLE: u16 = RequestPriorities::value(3, 2);

    #[test]
    fn shares_are_those_of_the_size() {
        let share = |block_bytes, percent, priority| PriorityShare { block_bytes, percent, priority };
        let options = CommandPriorities {
            shares: [
                vec![share(Some(4096), 25, REAL_TIME), share(Some(4096), 75, IDLE)],
                vec![share(None, 10, IDLE)],
            ],
            of_total_latency: false,
        };
        let count = |direction, bytes, priority| {
            (0..100).filter(|drawn| options.draw(direction, bytes, *drawn) == priority).count()
        };
        assert_eq!((count(0, 4096, REAL_TIME), count(0, 4096, IDLE)), (25, 75));
        assert_eq!((count(0, 8192, 0), count(1, 8192, IDLE), count(1, 8192, 0)), (100, 10, 90));
        assert_eq!(count(2, 4096, 0), 100, "trims have none");
    }

    #[test]
    fn latencies_are_recorded_by_priority() {
        let share = PriorityShare { block_bytes: None, percent: 100, priority: REAL_TIME };
        let options = CommandPriorities { shares: [vec![share], vec![]], of_total_latency: true };
        let mut recorder = PriorityRecorder::new(&options, IDLE, 2, 1);
        recorder.draw(1, Op::Read, 512);
        assert_eq!((recorder.of(1), recorder.of(0), recorder.by_tag.get(0)), (REAL_TIME, IDLE, 0));
        recorder.record(1, 0, 5, 7);
        recorder.record(0, 0, 5, 9);
        recorder.record(0, 1, 5, 9);
        let [reads, writes] = recorder.into_latencies();
        let summary: Vec<_> =
            reads.iter().map(|(priority, all)| (*priority, all.count(), all.max())).collect();
        assert_eq!((summary, writes.len()), (vec![(REAL_TIME, 1, 7), (IDLE, 1, 9)], 0));
        let mut merged = reads.clone();
        merge(&mut merged, &reads);
        assert_eq!(merged.iter().map(|(_, all)| all.count()).collect::<Vec<_>>(), [2, 2]);
    }
}
