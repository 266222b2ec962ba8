//! What clients do to volumes, as the primaries of a node count it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use foldhash::HashMap;
use wire_store::{ObjectId, Operation};

/// Volumes of a group that are counted by themselves, and of all groups of a node; others are counted
/// together. Counters take 100 bytes.
const OF_GROUP_MAX: usize = 1024;
const OF_NODE_MAX: usize = 128 << 10;

/// Requests for a volume that have succeeded since the node started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeStats {
    /// Reads.
    pub reads: u64,
    /// Bytes that they returned.
    pub read_bytes: u64,
    /// Their times together, from arrival at the primary to the answer.
    pub read_ns: u64,
    /// Writes of data.
    pub writes: u64,
    /// Bytes that they wrote.
    pub written_bytes: u64,
    /// Their times together, from arrival in the log to the commitment.
    pub write_ns: u64,
    /// Zeroed, preallocated and removed ranges and objects.
    pub others: u64,
}

/// The counters of a volume in a group: one replica writes them, and others read.
#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    read_ns: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    write_ns: AtomicU64,
    others: AtomicU64,
}

/// Adds to a counter that no other core writes.
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Relaxed).saturating_add(more), Relaxed);
}

impl Counters {
    fn add_to(&self, stats: &mut VolumeStats) {
        for (sum, counter) in [
            (&mut stats.reads, &self.reads),
            (&mut stats.read_bytes, &self.read_bytes),
            (&mut stats.read_ns, &self.read_ns),
            (&mut stats.writes, &self.writes),
            (&mut stats.written_bytes, &self.written_bytes),
            (&mut stats.write_ns, &self.write_ns),
            (&mut stats.others, &self.others),
        ] {
            *sum = sum.saturating_add(counter.load(Relaxed));
        }
    }
}

/// The counters of requests by group and volume; those of several volumes of a group have none.
type CountersByVolume = BTreeMap<(u32, Option<u64>), Arc<Counters>>;

/// The counters of a node, which its replicas share. No core waits for another one: a replica writes its own,
/// and takes the lock only for the first request of a volume.
#[derive(Debug, Default)]
pub struct VolumeTotals {
    counters: Mutex<CountersByVolume>,
}

impl VolumeTotals {
    /// What was counted, by volume. Those without a volume are of several.
    pub fn all(&self) -> BTreeMap<Option<u64>, VolumeStats> {
        let mut all = BTreeMap::new();
        let counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        for ((_, volume), counters) in counters.iter() {
            counters.add_to(all.entry(*volume).or_default());
        }
        all
    }

    /// The counters of a volume in a group, or those of its other volumes if there are too many.
    fn of(&self, group: u32, volume: Option<u64>) -> Arc<Counters> {
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let has_space = counters.len() < OF_NODE_MAX || counters.contains_key(&(group, volume));
        let key = (group, volume.filter(|_| has_space));
        counters.entry(key).or_default().clone()
    }
}

/// The counters of a replica. A request costs one look-up.
#[derive(Default)]
pub(crate) struct VolumeCounters {
    totals: Arc<VolumeTotals>,
    known: HashMap<u64, Arc<Counters>>,
    /// Those of volumes that have none of their own.
    rest: Option<Arc<Counters>>,
}

impl VolumeCounters {
    /// Counts in the totals of a node.
    pub(crate) fn new(totals: Arc<VolumeTotals>) -> VolumeCounters {
        VolumeCounters { totals, ..VolumeCounters::default() }
    }

    /// The counters of the volume of an object; `None` if it is none, as a list.
    fn of(&mut self, object: ObjectId) -> Option<&Arc<Counters>> {
        let ObjectId { group, volume, suffix, .. } = object;
        if suffix != 0 {
            return None;
        }
        let has_space = self.known.len() < OF_GROUP_MAX || self.known.contains_key(&volume);
        let counters = match has_space {
            true => self.known.entry(volume).or_insert_with(|| self.totals.of(group, Some(volume))),
            false => self.rest.get_or_insert_with(|| self.totals.of(group, None)),
        };
        Some(counters)
    }

    /// A read was answered with data.
    pub(crate) fn read(&mut self, object: ObjectId, bytes: u32, took_ns: u64) {
        if let Some(counters) = self.of(object) {
            add(&counters.reads, 1);
            add(&counters.read_bytes, bytes.into());
            add(&counters.read_ns, took_ns);
        }
    }

    /// A change by a client was committed.
    pub(crate) fn changed(&mut self, operation: Operation, object: ObjectId, bytes: u32, took_ns: u64) {
        let Some(counters) = self.of(object) else { return };
        if operation != Operation::Write {
            return add(&counters.others, 1);
        }
        add(&counters.writes, 1);
        add(&counters.written_bytes, bytes.into());
        add(&counters.write_ns, took_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(group: u32, volume: u64) -> ObjectId {
        ObjectId { group, volume, index: 3, suffix: 0 }
    }

    #[test]
    fn requests_are_counted_by_volume() {
        let totals = Arc::new(VolumeTotals::default());
        let [mut first, mut second] = [0; 2].map(|_| VolumeCounters::new(totals.clone()));
        first.read(object(1, 7), 4096, 100);
        first.changed(Operation::Write, object(1, 7), 512, 30);
        second.changed(Operation::Write, object(2, 7), 8192, 50);
        second.changed(Operation::Remove, object(2, 9), 0, 50);
        // A list is no read of an image.
        first.read(ObjectId { suffix: 1, ..object(1, 7) }, 4096, 100);
        let of_7 = VolumeStats {
            reads: 1,
            read_bytes: 4096,
            read_ns: 100,
            writes: 2,
            written_bytes: 8704,
            write_ns: 80,
            others: 0,
        };
        let of_9 = VolumeStats { others: 1, ..VolumeStats::default() };
        assert_eq!(totals.all(), [(Some(7), of_7), (Some(9), of_9)].into());
        // A replica that starts again goes on.
        VolumeCounters::new(totals.clone()).read(object(1, 7), 4096, 100);
        assert_eq!(totals.all()[&Some(7)].reads, 2);
    }

    #[test]
    fn volumes_beyond_the_limit_are_counted_together() {
        let totals = Arc::new(VolumeTotals::default());
        let mut counters = VolumeCounters::new(totals.clone());
        for volume in 1..=OF_GROUP_MAX as u64 + 5 {
            counters.read(object(1, volume), 512, 1);
        }
        counters.read(object(1, 1), 512, 1);
        let all = totals.all();
        assert_eq!(all.len(), OF_GROUP_MAX + 1);
        assert_eq!((all[&None].reads, all[&Some(1)].reads), (5, 2));
    }
}
