//! The deepest queue that keeps a latency: fio's `latency_target`.

use sys::clock;

use crate::spec::LatencyTarget;

/// Halves the interval of depths, window by window, until it knows.
#[derive(Clone, Debug)]
pub(crate) struct Tuner {
    target_ticks: u64,
    window_ticks: u64,
    /// Share of I/Os that may be late.
    late_share: f64,
    depth: usize,
    /// A depth that kept the target, and one that did not or is one too many.
    good: usize,
    bad: usize,
    window_end: u64,
    late: u64,
    count: u64,
}

impl Tuner {
    pub(crate) fn new(target: LatencyTarget, depth_max: usize) -> Tuner {
        Tuner {
            target_ticks: clock::ns_to_ticks(target.target_ns),
            window_ticks: clock::ns_to_ticks(target.window_ns).max(1),
            late_share: 1.0 - target.percentile.clamp(0.0, 100.0) / 100.0,
            depth: 1,
            good: 0,
            bad: depth_max + 1,
            window_end: u64::MAX,
            late: 0,
            count: 0,
        }
    }

    /// I/Os that may be in flight now.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// Time begins; when the first window ends.
    pub(crate) fn begin(&mut self, now: u64) -> u64 {
        self.window_end = now.saturating_add(self.window_ticks);
        self.window_end
    }

    #[inline]
    pub(crate) fn note(&mut self, latency_ticks: u64) {
        self.count += 1;
        self.late += u64::from(latency_ticks > self.target_ticks);
    }

    /// Chooses the next depth if a window has ended; when the next one ends.
    pub(crate) fn judge(&mut self, now: u64) -> u64 {
        if now < self.window_end {
            return self.window_end;
        }
        let kept = self.count > 0 && self.late as f64 <= self.late_share * self.count as f64;
        if kept {
            self.good = self.good.max(self.depth);
            // What was too deep once may do now, but only where nothing else is left to try.
            self.bad = self.bad.max(self.good + 1);
        } else {
            self.bad = self.depth;
            self.good = self.good.min(self.depth.saturating_sub(1));
        }
        let doubled = self.good.saturating_mul(2).max(1);
        self.depth = if doubled < self.bad { doubled } else { (self.good + self.bad) / 2 }.max(1);
        (self.late, self.count) = (0, 0);
        self.begin(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deepest_queue_in_time_is_found() {
        for (limit, depth_max) in [(1, 64), (13, 64), (32, 64), (100, 64), (5, 8)] {
            let target = LatencyTarget { target_ns: 1_000_000, window_ns: 1_000_000, percentile: 99.0 };
            let mut tuner = Tuner::new(target, depth_max);
            let mut now = 0;
            let mut window_end = tuner.begin(now);
            for _ in 0..20 {
                assert!((1..=depth_max).contains(&tuner.depth()));
                let ns = if tuner.depth() <= limit { 900_000 } else { 1_100_000 };
                (0..100).for_each(|_| tuner.note(clock::ns_to_ticks(ns)));
                now = window_end;
                window_end = tuner.judge(now);
            }
            assert_eq!(tuner.depth(), limit.min(depth_max), "{limit} of {depth_max}");
        }
    }
}
