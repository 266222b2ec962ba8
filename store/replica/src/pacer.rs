//! When the parts of copied objects are read: copies yield to clients.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Above this multiple of the usual latency, in quarters, a request counts as slow: five quarters, so that
/// what clients see, who also wait elsewhere, at most doubles.
const SLOW_QUARTERS: u64 = 5;
/// The percentile of latencies that is compared, as the share of requests above it: one in so many.
const SHARE: u64 = 100;
/// A latency above the usual one moves that by this fraction of itself, one below it by a `SHARE`th as much:
/// it settles where a `SHARE`th of the requests is above.
const USUAL_STEP: u64 = 64;
/// The same for the pause between parts, which follows within some hundred requests.
const PAUSE_STEP: u64 = 8;
/// What is usual before any request was seen without a copy.
const USUAL_DEFAULT_NS: u64 = 2_000_000;
/// Slower requests wait for a member that is lost, not for the load.
const USUAL_MAX_NS: u64 = 100_000_000;
/// Requests count as undisturbed this long after the last part of a copy.
const UNDISTURBED_NS: u64 = 200_000_000;
/// Without a request for so long, copies do not pause.
const IDLE_NS: u64 = 20_000_000;
/// The first pause, and the shortest: with it, copies of parts of 128 KiB have about 2.5 GB/s.
const FIRST_PAUSE_NS: u64 = 1_000_000;
const PAUSE_MIN_NS: u64 = 50_000;
/// The longest pause, so that a copy always ends: about 16 MB/s of parts of 128 KiB.
const PAUSE_MAX_NS: u64 = 8_000_000;
/// The longest while another failure would lose data or stop writes: clients wait for a copy then, to be safe
/// sooner.
const URGENT_PAUSE_MAX_NS: u64 = 300_000;

/// A rate that an operator gives is at least this: a part takes an eighth of a second.
const RATE_MIN: u64 = 1 << 20;

/// Gives the copies of a node their turns, one part each, and adapts the pause between these to what clients
/// see.
///
/// All replicas of a node share one: copies of one group delay the requests of others. While nothing is
/// copied it learns the 99th percentiles of the latencies of reads and of writes; while something is, it has
/// the pause follow the share of requests that take longer than 1.25 times that, so that this stays at one in
/// a hundred. Without requests of clients there is no pause, and with them it has a maximum.
///
/// An operator may bound what is copied in a second ([`set_rate`](Self::set_rate)): urgent copies too.
///
/// Its counters are updated without locks: an update that is lost to another core's changes little.
#[derive(Debug)]
pub struct CopyPacer {
    usual_read_ns: AtomicU64,
    usual_write_ns: AtomicU64,
    pause_ns: AtomicU64,
    /// The earliest time of the next turn.
    next_ns: AtomicU64,
    /// Bytes in a second; 0 for no bound.
    rate: AtomicU64,
    /// When what was copied is below the rate again.
    below_rate_ns: AtomicU64,
    /// When a request of a client last ended, and a turn was last given.
    served_ns: AtomicU64,
    copied_ns: AtomicU64,
}

impl Default for CopyPacer {
    fn default() -> CopyPacer {
        CopyPacer {
            usual_read_ns: AtomicU64::new(0),
            usual_write_ns: AtomicU64::new(0),
            pause_ns: AtomicU64::new(FIRST_PAUSE_NS),
            next_ns: AtomicU64::new(0),
            rate: AtomicU64::new(0),
            below_rate_ns: AtomicU64::new(0),
            served_ns: AtomicU64::new(0),
            copied_ns: AtomicU64::new(0),
        }
    }
}

impl CopyPacer {
    /// Takes how long a write of a client took until it was committed.
    pub fn observe_write(&self, latency_ns: u64, now_ns: u64) {
        self.observe(&self.usual_write_ns, latency_ns, now_ns);
    }

    /// Takes how long a read of a client took.
    pub fn observe_read(&self, latency_ns: u64, now_ns: u64) {
        self.observe(&self.usual_read_ns, latency_ns, now_ns);
    }

    fn observe(&self, usual: &AtomicU64, latency_ns: u64, now_ns: u64) {
        self.served_ns.store(now_ns, Relaxed);
        let copied_ns = self.copied_ns.load(Relaxed);
        if copied_ns > 0 && now_ns < copied_ns.saturating_add(UNDISTURBED_NS) {
            let is_slow = latency_ns > slow_ns(usual);
            let pause_ns = follow(self.pause_ns.load(Relaxed), is_slow, PAUSE_STEP);
            return self.pause_ns.store(pause_ns.clamp(PAUSE_MIN_NS, PAUSE_MAX_NS), Relaxed);
        }
        if latency_ns < USUAL_MAX_NS {
            let usual_ns = match usual.load(Relaxed) {
                0 => latency_ns,
                usual_ns => follow(usual_ns, latency_ns > usual_ns, USUAL_STEP),
            };
            usual.store(usual_ns.max(1), Relaxed);
        }
    }

    /// Bounds the bytes that are copied in a second, at least 1 MiB; `None` ends that.
    pub fn set_rate(&self, rate: Option<u64>) {
        self.rate.store(rate.map_or(0, |rate| rate.max(RATE_MIN)), Relaxed);
        self.below_rate_ns.store(0, Relaxed);
    }

    /// Counts a part that is sent to a learner: with a rate, what comes later waits for as long as its bytes
    /// take.
    pub fn sent(&self, bytes: u64, now_ns: u64) {
        // Without a rate it is 0.
        if let Some(takes_ns) = bytes.saturating_mul(1_000_000_000).checked_div(self.rate.load(Relaxed)) {
            let next_ns = |below_ns: u64| Some(below_ns.max(now_ns).saturating_add(takes_ns));
            // Copies of several groups add to it.
            let _ = self.below_rate_ns.fetch_update(Relaxed, Relaxed, next_ns);
        }
    }

    /// When a copy may read its next part: now or later. Copies that ask get their turns in that order. A
    /// copy is urgent while another failure would lose data or stop writes.
    pub fn turn_ns(&self, now_ns: u64, is_urgent: bool) -> u64 {
        let is_idle = now_ns > self.served_ns.load(Relaxed).saturating_add(IDLE_NS);
        let pause_max_ns = match (is_idle, is_urgent) {
            (true, _) => 0,
            (false, true) => URGENT_PAUSE_MAX_NS,
            (false, false) => PAUSE_MAX_NS,
        };
        let pause_ns = self.pause_ns.load(Relaxed).min(pause_max_ns);
        let turn_ns = if is_idle { now_ns } else { self.next_ns.load(Relaxed).max(now_ns) };
        let turn_ns = if self.rate.load(Relaxed) == 0 {
            turn_ns
        } else {
            turn_ns.max(self.below_rate_ns.load(Relaxed))
        };
        self.next_ns.store(turn_ns + pause_ns, Relaxed);
        self.copied_ns.store(turn_ns, Relaxed);
        turn_ns
    }
}

/// Requests that take longer are slow.
fn slow_ns(usual: &AtomicU64) -> u64 {
    let usual_ns = match usual.load(Relaxed) {
        0 => USUAL_DEFAULT_NS,
        usual_ns => usual_ns,
    };
    usual_ns * SLOW_QUARTERS / 4
}

/// Moves a value up by a fraction of itself, or down by a [`SHARE`]th as much.
fn follow(value: u64, is_up: bool, step: u64) -> u64 {
    if is_up { value + value / step + 1 } else { value - (value / (step * (SHARE - 1))).max(1).min(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;
    const MS: u64 = 1_000_000;

    /// Writes one after the other, each of a latency; of every hundred, `slow` take `slow_ns`.
    fn write(pacer: &CopyPacer, now_ns: &mut u64, count: u64, (slow, slow_ns): (u64, u64)) {
        for number in 0..count {
            let latency_ns = if number % 100 < slow { slow_ns } else { 300 * US };
            *now_ns += latency_ns;
            pacer.observe_write(latency_ns, *now_ns);
        }
    }

    /// The time between two turns.
    fn pause_ns(pacer: &CopyPacer, now_ns: u64, is_urgent: bool) -> u64 {
        let first_ns = pacer.turn_ns(now_ns, is_urgent);
        pacer.turn_ns(now_ns, is_urgent) - first_ns
    }

    #[test]
    fn copies_pause_while_more_than_one_write_in_a_hundred_is_slow() {
        let (pacer, mut now_ns) = (CopyPacer::default(), 1000 * MS);
        write(&pacer, &mut now_ns, 4000, (2, MS));
        let first_ns = pause_ns(&pacer, now_ns, false);
        // A copy may double the latency of the slowest hundredth, less what clients see besides.
        write(&pacer, &mut now_ns, 500, (2, 1200 * US));
        let tolerated_ns = pause_ns(&pacer, now_ns, false);
        assert!(tolerated_ns < first_ns, "{tolerated_ns} {first_ns}");
        for _ in 0..8 {
            pacer.turn_ns(now_ns, false);
            write(&pacer, &mut now_ns, 300, (4, 3 * MS));
        }
        let slowed_ns = pause_ns(&pacer, now_ns, false);
        assert!(slowed_ns > 2 * tolerated_ns, "{slowed_ns} {tolerated_ns}");
        for _ in 0..8 {
            pacer.turn_ns(now_ns, false);
            write(&pacer, &mut now_ns, 300, (0, 0));
        }
        assert!(pause_ns(&pacer, now_ns, false) < slowed_ns / 2);
    }

    #[test]
    fn a_copy_has_a_floor_and_an_urgent_one_a_higher() {
        let (pacer, mut now_ns) = (CopyPacer::default(), 1000 * MS);
        for _ in 0..100 {
            pacer.turn_ns(now_ns, false);
            write(&pacer, &mut now_ns, 1, (100, 15 * MS));
        }
        assert_eq!(pause_ns(&pacer, now_ns, false), PAUSE_MAX_NS);
        assert_eq!(pause_ns(&pacer, now_ns, true), URGENT_PAUSE_MAX_NS);
    }

    #[test]
    fn copies_do_not_pause_without_writes_and_take_turns_with_them() {
        let (pacer, mut now_ns) = (CopyPacer::default(), 1000 * MS);
        write(&pacer, &mut now_ns, 10, (0, 0));
        let turns = [0; 3].map(|_| pacer.turn_ns(now_ns, false));
        assert_eq!(turns, [0, 1, 2].map(|turn| now_ns + turn * FIRST_PAUSE_NS));
        now_ns += IDLE_NS + 1;
        assert_eq!([0; 3].map(|_| pacer.turn_ns(now_ns, false)), [now_ns; 3]);
    }

    #[test]
    fn no_more_is_copied_in_a_second_than_an_operator_permits() {
        let (pacer, start_ns) = (CopyPacer::default(), 1000 * MS);
        pacer.set_rate(Some(4 << 20));
        // Two groups copy parts at the same time, an urgent one and another, while no client asks for
        // anything.
        let (mut at_ns, mut bytes) = ([start_ns; 2], 0);
        while at_ns[0].max(at_ns[1]) < start_ns + 10_000 * MS {
            let group = usize::from(at_ns[1] < at_ns[0]);
            let turn_ns = pacer.turn_ns(at_ns[group], group == 0);
            pacer.sent(128 << 10, turn_ns);
            (at_ns[group], bytes) = (turn_ns + MS, bytes + (128 << 10));
        }
        assert!((38 << 20..=42 << 20).contains(&bytes), "{bytes}");
        // Without the bound it is as before, at once.
        pacer.set_rate(None);
        let now_ns = at_ns[0];
        assert_eq!(pacer.turn_ns(now_ns, false), now_ns);
        pacer.sent(1 << 30, now_ns);
        assert_eq!(pacer.turn_ns(now_ns, false), now_ns);
        // One that is too low would hold up a copy for longer than its learner waits.
        pacer.set_rate(Some(1));
        pacer.sent(128 << 10, now_ns);
        assert_eq!(pacer.turn_ns(now_ns, false), now_ns + 125 * MS);
    }

    #[test]
    fn reads_and_writes_are_compared_with_their_own() {
        let (pacer, mut now_ns) = (CopyPacer::default(), 1000 * MS);
        for _ in 0..100 {
            now_ns += MS;
            pacer.observe_read(100 * US, now_ns);
            pacer.observe_write(2 * MS, now_ns);
        }
        let before_ns = pause_ns(&pacer, now_ns, false);
        (0..10).for_each(|_| pacer.observe_write(2 * MS, now_ns));
        assert!(pause_ns(&pacer, now_ns, false) <= before_ns);
        (0..10).for_each(|_| pacer.observe_read(MS, now_ns));
        assert!(pause_ns(&pacer, now_ns, false) > 2 * before_ns);
    }

    #[test]
    fn what_waited_for_a_lost_member_or_a_copy_is_not_usual() {
        let (pacer, mut now_ns) = (CopyPacer::default(), 1000 * MS);
        write(&pacer, &mut now_ns, 4000, (2, MS));
        let usual_ns = slow_ns(&pacer.usual_write_ns);
        write(&pacer, &mut now_ns, 100, (100, 450 * MS));
        assert_eq!(slow_ns(&pacer.usual_write_ns), usual_ns);
        pacer.turn_ns(now_ns, false);
        write(&pacer, &mut now_ns, 100, (100, MS));
        assert_eq!(slow_ns(&pacer.usual_write_ns), usual_ns);
        now_ns += 2 * UNDISTURBED_NS;
        write(&pacer, &mut now_ns, 100, (100, 10 * MS));
        assert!(slow_ns(&pacer.usual_write_ns) > usual_ns);
    }
}
