//! Jobs that share their I/O in proportion to weights: fio's `flow`, `flow_id` and `flow_sleep`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A job's part in a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowOptions {
    /// `flow_id`: jobs of one identifier share.
    pub id: i64,
    /// `flow`: the job's weight, at least 1.
    pub weight: u32,
    /// `flow_sleep`: how long the job waits when it is ahead of its share.
    pub sleep_ns: u64,
}

/// The jobs of one flow: their I/Os and their weights.
#[derive(Debug, Default)]
struct FlowTotals {
    ios: AtomicU64,
    weight: AtomicU64,
}

/// The flows of the jobs that run together.
#[derive(Debug, Default)]
pub(crate) struct Flows(Mutex<BTreeMap<i64, Arc<FlowTotals>>>);

impl Flows {
    /// Adds a job to its flow. All jobs are added before any starts, so that none runs ahead.
    pub(crate) fn join(&self, options: FlowOptions) -> FlowMember {
        let totals = sync::lock(&self.0).entry(options.id).or_default().clone();
        totals.weight.fetch_add(options.weight.into(), Ordering::Relaxed);
        FlowMember { totals, options, ios: AtomicU64::new(0) }
    }
}

/// A job in a flow. It leaves the flow, with its I/Os, when it is dropped.
#[derive(Debug)]
pub(crate) struct FlowMember {
    totals: Arc<FlowTotals>,
    pub(crate) options: FlowOptions,
    ios: AtomicU64,
}

impl FlowMember {
    /// Counts an I/O and returns true, unless the job has a larger share of the flow's I/Os than of its weights.
    pub(crate) fn admit(&self) -> bool {
        let (own, all) = (self.ios.load(Ordering::Relaxed), self.totals.ios.load(Ordering::Relaxed));
        let weights = self.totals.weight.load(Ordering::Relaxed);
        let is_ahead =
            u128::from(own) * u128::from(weights) > u128::from(all) * u128::from(self.options.weight);
        if !is_ahead {
            self.ios.fetch_add(1, Ordering::Relaxed);
            self.totals.ios.fetch_add(1, Ordering::Relaxed);
        }
        !is_ahead
    }
}

impl Drop for FlowMember {
    fn drop(&mut self) {
        self.totals.weight.fetch_sub(self.options.weight.into(), Ordering::Relaxed);
        self.totals.ios.fetch_sub(self.ios.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_share_by_weight_and_the_last_one_is_free() {
        let flows = Flows::default();
        let options = |id, weight| FlowOptions { id, weight, sleep_ns: 0 };
        let (one, eight, other) =
            (flows.join(options(0, 1)), flows.join(options(0, 8)), flows.join(options(7, 1)));
        // The first is ready far more often.
        let (mut ones, mut eights) = (0, 0);
        for turn in 0..90_000 {
            ones += u32::from(one.admit());
            eights += u32::from(turn % 2 == 0 && eight.admit());
        }
        assert!(eights.abs_diff(8 * ones) <= 16 && ones > 1000, "{ones} and {eights}");
        assert!((0..100).all(|_| other.admit()), "another flow");
        drop(eight);
        assert!((0..100).all(|_| one.admit()), "alone, it has every I/O");
    }
}
