//! The placement of two cores: how long a cache line takes from one to the other and back.
//!
//! The virtual processors of a machine may share a core, a cache or nothing, and the hypervisor may move them at any
//! time. Rates of two processes that exchange data differ by half between such states, so results are compared only
//! within a state.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Round trips of a batch, and batches. The shortest batch counts, because interrupts and other processes only
/// lengthen it. Together they take 20 ms at 250 ns a round trip.
const ROUND_TRIPS: u32 = 2000;
const BATCHES: u32 = 40;
/// Round trips that differ by more than this factor belong to different states. Measurements of one state differ by
/// about a tenth; neighbouring hardware threads, cores and packages differ by a factor of two or more.
const SAME_STATE_MAX: f64 = 1.5;

/// The shortest and longest round trip of those measured before, during and after a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RunPlacement {
    pub(super) shortest_ns: f64,
    pub(super) longest_ns: f64,
}

impl RunPlacement {
    /// `None` without measurements.
    pub(super) fn of(round_trips_ns: impl IntoIterator<Item = f64>) -> Option<RunPlacement> {
        let mut placement: Option<RunPlacement> = None;
        for value in round_trips_ns {
            let known = placement.get_or_insert(RunPlacement { shortest_ns: value, longest_ns: value });
            known.shortest_ns = known.shortest_ns.min(value);
            known.longest_ns = known.longest_ns.max(value);
        }
        placement
    }

    /// Whether the cores stayed in one state.
    pub(super) fn is_steady(self) -> bool {
        is_same_state(self.shortest_ns, self.longest_ns)
    }
}

/// Whether two round trips belong to one state.
pub(super) fn is_same_state(one_ns: f64, other_ns: f64) -> bool {
    one_ns.max(other_ns) <= one_ns.min(other_ns) * SAME_STATE_MAX
}

/// The shortest mean round trip between two cores, in nanoseconds; `None` if a thread cannot be pinned.
pub(super) fn measure([first, second]: [u32; 2]) -> Option<f64> {
    let line = AtomicU32::new(0);
    let ready = AtomicU32::new(0);
    let failed = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let (line, ready, failed) = (&line, &ready, &failed);
        let pin = |cpu| {
            if os::pin_thread_to(cpu).is_err() {
                failed.store(1, Ordering::SeqCst);
            }
            // Neither end waits for one that is not pinned.
            ready.fetch_add(1, Ordering::SeqCst);
            while ready.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
            failed.load(Ordering::SeqCst) == 0
        };
        scope.spawn(move || {
            if pin(second) {
                (0..ROUND_TRIPS * BATCHES).for_each(|trip| answer(line, 2 * trip + 1));
            }
        });
        let first = scope.spawn(move || {
            if !pin(first) {
                return None;
            }
            let batches = (0..BATCHES).map(|batch| {
                let begun = Instant::now();
                for trip in batch * ROUND_TRIPS..(batch + 1) * ROUND_TRIPS {
                    line.store(2 * trip + 1, Ordering::Release);
                    await_value(line, 2 * trip + 2);
                }
                begun.elapsed().as_nanos() as f64 / f64::from(ROUND_TRIPS)
            });
            batches.min_by(f64::total_cmp)
        });
        first.join().ok().flatten()
    })
}

fn answer(line: &AtomicU32, value: u32) {
    await_value(line, value);
    line.store(value + 1, Ordering::Release);
}

fn await_value(line: &AtomicU32, value: u32) {
    while line.load(Ordering::Acquire) != value {
        std::hint::spin_loop();
    }
}

/// The states among round trips, each as its shortest and longest, by number of members, most first.
pub(super) fn states(round_trips_ns: &[f64]) -> Vec<PlacementState> {
    let mut sorted = round_trips_ns.to_vec();
    sorted.sort_by(f64::total_cmp);
    let mut states: Vec<PlacementState> = Vec::new();
    for value in sorted {
        match states.last_mut() {
            Some(state) if is_same_state(state.shortest_ns, value) => {
                state.longest_ns = value;
                state.runs += 1;
            }
            _ => states.push(PlacementState { shortest_ns: value, longest_ns: value, runs: 1 }),
        }
    }
    states.sort_by_key(|state| std::cmp::Reverse(state.runs));
    states
}

/// A state of the two cores, and how many runs found them in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PlacementState {
    pub(super) shortest_ns: f64,
    pub(super) longest_ns: f64,
    pub(super) runs: usize,
}

impl PlacementState {
    /// Whether a run was made in it.
    pub(super) fn contains(&self, placement: RunPlacement) -> bool {
        placement.is_steady() && (self.shortest_ns..=self.longest_ns).contains(&placement.shortest_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_is_measured_on_cores_of_this_process() {
        let cpus = os::CpuSet::allowed();
        if let [first, second, ..] = cpus.cpus() {
            let measured = measure([*first, *second]).expect("both cores are allowed");
            assert!(measured > 1.0, "{measured} ns");
        }
        assert_eq!(measure([cpus.cpus()[0], 1023]), None);
    }

    #[test]
    fn runs_are_divided_into_states() {
        let states = states(&[82.0, 300.0, 80.0, 95.0, 310.0]);
        assert_eq!(states[0], PlacementState { shortest_ns: 80.0, longest_ns: 95.0, runs: 3 });
        assert_eq!(states[1], PlacementState { shortest_ns: 300.0, longest_ns: 310.0, runs: 2 });
        let run = |before, after| RunPlacement::of([before, after]).expect("two measurements");
        assert!(states[0].contains(run(85.0, 90.0)));
        assert!(!states[0].contains(run(300.0, 85.0)), "moved during the run");
        assert!(!states[0].contains(run(301.0, 305.0)));
    }
}
