//! Pauses between I/Os: `thinktime` and its kin.

use os::clock;

use super::NEVER;
use crate::spec::ThinkTime;

/// When a job pauses. A pause is due after a number of I/Os or a time, begins when no I/O is in flight, as in fio, and ends
/// at [`until`](Self::until). I/Os that complete while a pause is due count for the next one.
pub(super) struct Pauses {
    think: ThinkTime,
    counted: u64,
    /// The count at which the next pause is due.
    due_at: u64,
    /// When the last pause ended, ticks.
    ended: u64,
    /// When the pause ends, ticks: 0 before the first, [`NEVER`] from when one is due until it begins.
    until: u64,
    spin_until: u64,
}

impl Pauses {
    pub(super) fn new(think: ThinkTime) -> Pauses {
        let mut pauses = Pauses { think, counted: 0, due_at: 0, ended: 0, until: 0, spin_until: 0 };
        pauses.due_at = pauses.next_due();
        pauses
    }

    /// The job starts.
    pub(super) fn begin(&mut self, now: u64) {
        self.ended = now;
    }

    fn next_due(&self) -> u64 {
        match self.think {
            ThinkTime { blocks: 0, interval_ns: 1.., .. } => NEVER,
            ThinkTime { blocks, .. } => self.counted + u64::from(blocks.max(1)),
        }
    }

    /// No I/O starts before this time, ticks.
    pub(super) fn until(&self) -> u64 {
        self.until
    }

    pub(super) fn count_issued(&mut self) {
        if self.think.ns > 0 && self.think.counts_issued {
            self.counted += 1;
            self.check_due(self.ended);
        }
    }

    pub(super) fn count_completed(&mut self, now: u64) {
        if self.think.ns > 0 {
            self.counted += u64::from(!self.think.counts_issued);
            self.check_due(now);
        }
    }

    fn check_due(&mut self, now: u64) {
        let interval_ns = self.think.interval_ns;
        let elapsed = interval_ns > 0 && now.saturating_sub(self.ended) >= clock::ns_to_ticks(interval_ns);
        if self.until != NEVER && (self.counted >= self.due_at || elapsed) {
            self.until = NEVER;
            self.due_at = self.next_due();
        }
    }

    /// Begins the pause that is due, if any: no I/O is in flight.
    pub(super) fn begin_due(&mut self, now: u64) {
        if self.until == NEVER {
            self.until = now.saturating_add(clock::ns_to_ticks(self.think.ns));
            self.spin_until = now.saturating_add(clock::ns_to_ticks(self.think.spin_ns.min(self.think.ns)));
            self.ended = self.until;
        }
    }

    /// Whether the job busy-waits now.
    pub(super) fn is_spinning(&self) -> bool {
        self.spin_until > 0 && clock::ticks() < self.spin_until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a pause is due after each of `count` completions at `now`.
    fn due(pauses: &mut Pauses, count: u32, now: u64) -> Vec<bool> {
        (0..count)
            .map(|_| {
                pauses.count_completed(now);
                pauses.until() == NEVER
            })
            .collect()
    }

    #[test]
    fn a_pause_is_due_after_its_ios_and_begins_when_none_is_in_flight() {
        let mut pauses = Pauses::new(ThinkTime { ns: 1000, blocks: 4, ..ThinkTime::default() });
        pauses.begin(0);
        assert_eq!(due(&mut pauses, 3, 10), [false; 3]);
        pauses.begin_due(10);
        assert_eq!(pauses.until(), 0, "no pause is due");
        // Three more were in flight: fio counts them for the next pause.
        assert_eq!(due(&mut pauses, 4, 20), [true; 4]);
        pauses.begin_due(20);
        let until = 20 + clock::ns_to_ticks(1000);
        assert_eq!(pauses.until(), until);
        assert_eq!(due(&mut pauses, 1, until), [true]);
    }

    #[test]
    fn issued_ios_are_counted_instead() {
        let think = ThinkTime { ns: 1000, blocks: 2, counts_issued: true, ..ThinkTime::default() };
        let mut pauses = Pauses::new(think);
        assert_eq!(due(&mut pauses, 9, 10), [false; 9]);
        pauses.count_issued();
        assert_eq!(pauses.until(), 0);
        pauses.count_issued();
        assert_eq!(pauses.until(), NEVER);
    }

    #[test]
    fn a_pause_is_due_a_time_after_the_end_of_the_last() {
        let mut pauses = Pauses::new(ThinkTime { ns: 1000, interval_ns: 5000, ..ThinkTime::default() });
        let interval = clock::ns_to_ticks(5000);
        pauses.begin(100);
        assert_eq!(due(&mut pauses, 1000, 99 + interval), [false; 1000]);
        assert_eq!(due(&mut pauses, 1, 100 + interval), [true]);
        pauses.begin_due(100 + interval);
        let end = pauses.until();
        assert_eq!(due(&mut pauses, 1, end + interval - 1), [false]);
        assert_eq!(due(&mut pauses, 1, end + interval), [true]);
    }
}
