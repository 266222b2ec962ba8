//! Tunes the I/O depth to a latency: fio's `latency_target`.

use os::clock;

use crate::generator::NEVER;
use crate::spec::LatencyTarget;

/// Binary search for the deepest queue that meets a latency target, one depth per window.
#[derive(Clone, Debug)]
pub(crate) struct LatencyTuner {
    target_ticks: u64,
    window_ticks: u64,
    /// Share of I/Os that may exceed the target.
    late_share: f64,
    depth: usize,
    /// A depth that met the target, and one that did not or is above the maximum.
    passing_depth: usize,
    failing_depth: usize,
    window_end: u64,
    late: u64,
    count: u64,
}

impl LatencyTuner {
    pub(crate) fn new(target: LatencyTarget, depth_max: usize) -> LatencyTuner {
        LatencyTuner {
            target_ticks: clock::ns_to_ticks(target.target_ns),
            window_ticks: clock::ns_to_ticks(target.window_ns).max(1),
            late_share: 1.0 - target.percentile.clamp(0.0, 100.0) / 100.0,
            depth: 1,
            passing_depth: 0,
            failing_depth: depth_max + 1,
            window_end: NEVER,
            late: 0,
            count: 0,
        }
    }

    /// The current I/O depth.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// Starts the first window at `now`; returns when it ends, in ticks.
    pub(crate) fn begin(&mut self, now: u64) -> u64 {
        self.window_end = now.saturating_add(self.window_ticks);
        self.window_end
    }

    #[inline]
    pub(crate) fn record(&mut self, latency_ticks: u64) {
        self.count += 1;
        self.late += u64::from(latency_ticks > self.target_ticks);
    }

    /// Selects the next depth if the window has ended; returns when the current window ends, in ticks.
    pub(crate) fn update(&mut self, now: u64) -> u64 {
        if now < self.window_end {
            return self.window_end;
        }
        let met_target = self.count > 0 && self.late as f64 <= self.late_share * self.count as f64;
        if met_target {
            self.passing_depth = self.passing_depth.max(self.depth);
            // Retry a depth that has failed only when no other is left to try.
            self.failing_depth = self.failing_depth.max(self.passing_depth + 1);
        } else {
            self.failing_depth = self.depth;
            self.passing_depth = self.passing_depth.min(self.depth.saturating_sub(1));
        }
        let doubled = self.passing_depth.saturating_mul(2).max(1);
        self.depth = if doubled < self.failing_depth {
            doubled
        } else {
            (self.passing_depth + self.failing_depth) / 2
        }
        .max(1);
        (self.late, self.count) = (0, 0);
        self.begin(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tuner_finds_the_deepest_queue_within_the_target() {
        for (limit, depth_max) in [(1, 64), (13, 64), (32, 64), (100, 64), (5, 8)] {
            let target = LatencyTarget { target_ns: 1_000_000, window_ns: 1_000_000, percentile: 99.0 };
            let mut tuner = LatencyTuner::new(target, depth_max);
            let mut now = 0;
            let mut window_end = tuner.begin(now);
            for _ in 0..20 {
                assert!((1..=depth_max).contains(&tuner.depth()));
                let ns = if tuner.depth() <= limit { 900_000 } else { 1_100_000 };
                (0..100).for_each(|_| tuner.record(clock::ns_to_ticks(ns)));
                now = window_end;
                window_end = tuner.update(now);
            }
            assert_eq!(tuner.depth(), limit.min(depth_max), "{limit} of {depth_max}");
        }
    }
}
