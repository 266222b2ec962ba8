//! Statistics of I/O queues, summed by core and transport, closed queues included.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use nvme::QueueStats;

/// Statistics of the I/O queues of one core and transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransportStats {
    /// Index of the core.
    pub core: usize,
    /// Transport type, as SPDK writes it; see [`TransportId::trtype`](crate::TransportId::trtype).
    pub trtype: &'static str,
    /// Sum over the queues.
    pub counts: QueueStats,
}

/// The statistics of all queues.
#[derive(Default)]
pub(crate) struct TransportTotals(Mutex<QueueTable>);

#[derive(Default)]
struct QueueTable {
    closed: BTreeMap<QueueKey, QueueStats>,
    live: Vec<(QueueKey, Arc<LiveQueueStats>)>,
}

/// Core and transport.
type QueueKey = (usize, &'static str);

/// The published counters of an open queue. Its core is the only writer, with plain stores.
#[derive(Default)]
pub(crate) struct LiveQueueStats([AtomicU64; QueueStats::LEN]);

impl LiveQueueStats {
    /// Publishes the current counters.
    #[inline]
    pub(crate) fn publish(&self, counts: &QueueStats) {
        for (published, count) in self.0.iter().zip(counts.to_array()) {
            published.store(count, Relaxed);
        }
    }

    fn load(&self) -> QueueStats {
        QueueStats::from_array(std::array::from_fn(|at| self.0[at].load(Relaxed)))
    }
}

impl TransportTotals {
    /// Adds an open queue.
    pub(crate) fn add_queue(&self, core: usize, trtype: &'static str) -> Arc<LiveQueueStats> {
        let live = Arc::<LiveQueueStats>::default();
        sync::lock(&self.0).live.push(((core, trtype), live.clone()));
        live
    }

    /// Removes a closed queue, and adds its final counters to the sum.
    pub(crate) fn remove_queue(&self, live: &Arc<LiveQueueStats>, counts: &QueueStats) {
        let QueueTable { closed, live: all } = &mut *sync::lock(&self.0);
        let Some(at) = all.iter().position(|(_, other)| Arc::ptr_eq(other, live)) else { return };
        let sum = closed.entry(all.swap_remove(at).0).or_default();
        *sum = sum.plus(counts);
    }

    pub(crate) fn all(&self) -> Vec<TransportStats> {
        let QueueTable { closed, live } = &*sync::lock(&self.0);
        let mut sums = closed.clone();
        for (key, live) in live {
            let sum = sums.entry(*key).or_default();
            *sum = sum.plus(&live.load());
        }
        sums.into_iter().map(|((core, trtype), counts)| TransportStats { core, trtype, counts }).collect()
    }
}
