//! What the I/O queues of each core did, by transport, those that are gone included.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use nvme::QueueStats;

use crate::path::lock;

/// What the I/O queues of one core over one transport did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransportStats {
    /// The core, by index.
    pub core: usize,
    /// SPDK's name of the transport; see [`TransportId::trtype`](crate::TransportId::trtype).
    pub trtype: &'static str,
    /// The sum over its queues.
    pub counts: QueueStats,
}

/// Where channels book what their queues did, when they are asked to and when a queue ends.
#[derive(Default)]
pub(crate) struct Totals {
    sums: Mutex<BTreeMap<(usize, &'static str), QueueStats>>,
    watched: AtomicBool,
}

impl Totals {
    pub(crate) fn add(&self, core: usize, trtype: &'static str, counts: &QueueStats) {
        let mut sums = lock(&self.sums);
        let sum = sums.entry((core, trtype)).or_default();
        *sum = sum.plus(counts);
    }

    /// Somebody asks: from now on channels book whenever they have nothing more to do.
    pub(crate) fn watch(&self) {
        self.watched.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn are_watched(&self) -> bool {
        self.watched.load(Ordering::Relaxed)
    }

    pub(crate) fn all(&self) -> Vec<TransportStats> {
        let sums = lock(&self.sums);
        let of = |(&(core, trtype), &counts): (&(usize, &'static str), &QueueStats)| TransportStats {
            core,
            trtype,
            counts,
        };
        sums.iter().map(of).collect()
    }
}
