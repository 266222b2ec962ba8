//! What the I/O queues of each core did, by transport, those that are gone included.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

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

/// The counts of every queue.
#[derive(Default)]
pub(crate) struct Totals(Mutex<Queues>);

#[derive(Default)]
struct Queues {
    ended: BTreeMap<Key, QueueStats>,
    live: Vec<(Key, Arc<Live>)>,
}

/// Core and transport.
type Key = (usize, &'static str);

/// The counts of a queue that is used. Its core is the only writer, with plain stores.
#[derive(Default)]
pub(crate) struct Live([AtomicU64; QueueStats::LEN]);

impl Live {
    /// Shows what there is to be told.
    #[inline]
    pub(crate) fn tell(&self, counts: &QueueStats) {
        for (shown, count) in self.0.iter().zip(counts.to_array()) {
            shown.store(count, Relaxed);
        }
    }

    fn load(&self) -> QueueStats {
        QueueStats::from_array(std::array::from_fn(|at| self.0[at].load(Relaxed)))
    }
}

impl Totals {
    /// A queue begins.
    pub(crate) fn begin(&self, core: usize, trtype: &'static str) -> Arc<Live> {
        let live = Arc::<Live>::default();
        lock(&self.0).live.push(((core, trtype), live.clone()));
        live
    }

    /// A queue has ended, with these counts.
    pub(crate) fn end(&self, live: &Arc<Live>, counts: &QueueStats) {
        let Queues { ended, live: all } = &mut *lock(&self.0);
        let Some(at) = all.iter().position(|(_, other)| Arc::ptr_eq(other, live)) else { return };
        let sum = ended.entry(all.swap_remove(at).0).or_default();
        *sum = sum.plus(counts);
    }

    pub(crate) fn all(&self) -> Vec<TransportStats> {
        let Queues { ended, live } = &*lock(&self.0);
        let mut sums = ended.clone();
        for (key, live) in live {
            let sum = sums.entry(*key).or_default();
            *sum = sum.plus(&live.load());
        }
        sums.into_iter().map(|((core, trtype), counts)| TransportStats { core, trtype, counts }).collect()
    }
}
