//! LBA range locks of a device, exclusive against writes from every core (SPDK's `spdk_bdev_lock_lba_range`).
//!
//! While no range is locked, a write costs a store, a load and a branch a batch. A requester publishes its lock,
//! makes every core see it ([`os::barrier`], `membarrier`), and waits until the writes that each channel had in
//! flight have completed: only then is the lock granted. Until it is granted all new writes of the device wait, and
//! after that only those that overlap the range.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::BlockDevice;

/// Locks of one device at a time, granted or requested.
const LOCKS_MAX: usize = 256;

/// The number of writes that a channel has in flight, as other cores see it.
#[derive(Default)]
#[repr(align(64))]
pub(crate) struct InflightWrites(AtomicU32);

impl InflightWrites {
    /// Publishes the current number. Who sees it fall also sees the data of the completed writes (release).
    #[inline]
    pub(crate) fn publish(&self, count: u32) {
        self.0.store(count, Ordering::Release);
    }
}

/// The range locks of one device.
#[derive(Default)]
pub(crate) struct RangeLocks {
    any: AtomicBool,
    table: Mutex<LockTable>,
}

/// The locks, and the channels whose writes they wait for.
#[derive(Default)]
pub(crate) struct LockTable {
    channels: Vec<Arc<InflightWrites>>,
    locks: Vec<RangeLock>,
    next_id: u64,
}

struct RangeLock {
    id: u64,
    range: Range<u64>,
    /// Channels whose earlier writes may still be in flight; the lock is granted when there is none.
    draining: Vec<Arc<InflightWrites>>,
}

impl RangeLocks {
    /// Whether a lock is granted or requested. A channel calls this after it has published the writes that it is
    /// about to submit.
    #[inline]
    pub(crate) fn has_locks(&self) -> bool {
        os::barrier::light();
        self.any.load(Ordering::Acquire)
    }

    /// Registers a channel, whose writes locks wait for from now on.
    pub(crate) fn register_channel(&self) -> Arc<InflightWrites> {
        let writes = Arc::new(InflightWrites::default());
        self.table().channels.push(writes.clone());
        writes
    }

    /// Unregisters a channel that has no writes in flight any more.
    pub(crate) fn unregister_channel(&self, writes: &Arc<InflightWrites>) {
        writes.publish(0);
        self.table().channels.retain(|other| !Arc::ptr_eq(other, writes));
    }

    /// Requests a lock and returns its id; `None` while another one overlaps the range, or there are too many.
    pub(crate) fn request(&self, range: Range<u64>) -> Option<u64> {
        let mut table = self.table();
        if table.locks.len() >= LOCKS_MAX || table.locks.iter().any(|lock| overlap(&lock.range, &range)) {
            return None;
        }
        let id = table.next_id;
        table.next_id += 1;
        let draining = table.channels.clone();
        table.locks.push(RangeLock { id, range, draining });
        self.any.store(true, Ordering::Release);
        // A channel that did not see the lock has published its writes before, and they are visible now.
        os::barrier::heavy();
        Some(id)
    }

    /// Whether a requested lock is granted: no write of its range is in flight, and none starts.
    pub(crate) fn is_granted(&self, id: u64) -> bool {
        let mut table = self.table();
        let Some(lock) = table.locks.iter_mut().find(|lock| lock.id == id) else { return false };
        lock.draining.retain(|writes| writes.0.load(Ordering::Acquire) > 0);
        lock.draining.is_empty()
    }

    /// Releases a lock, granted or not.
    pub(crate) fn release(&self, id: u64) {
        let mut table = self.table();
        table.locks.retain(|lock| lock.id != id);
        self.any.store(!table.locks.is_empty(), Ordering::Release);
    }

    /// The table, for a channel that finds its blocked writes: it publishes the others before it drops the guard.
    pub(crate) fn table(&self) -> MutexGuard<'_, LockTable> {
        // Every change under the lock is whole before anything can panic.
        sync::lock(&self.table)
    }
}

impl LockTable {
    /// Whether a write of the range must wait.
    pub(crate) fn must_wait(&self, range: &Range<u64>) -> bool {
        self.locks.iter().any(|lock| !lock.draining.is_empty() || overlap(&lock.range, range))
    }
}

/// A range of a device that its users cannot write: their writes wait until it is dropped (SPDK's
/// `spdk_bdev_quiesce_range`). A module that rebuilds a base copies range by range under it.
///
/// It is for one thread: who waits asks [`is_granted`](Self::is_granted) now and then, as no event says so.
pub struct LockedRange {
    device: Arc<BlockDevice>,
    id: u64,
}

impl LockedRange {
    /// Whether no write of the range is in flight any more. Until then all new writes of the device wait, not
    /// only those of the range.
    pub fn is_granted(&self) -> bool {
        self.device.range_locks.is_granted(self.id)
    }
}

impl Drop for LockedRange {
    fn drop(&mut self) {
        self.device.range_locks.release(self.id);
    }
}

impl BlockDevice {
    /// Requests that no user of the device writes a range of blocks. `None` while another lock overlaps it,
    /// there are too many, or the machine has no locks ([`supports_fused`](crate::supports_fused)).
    pub fn lock_range(self: &Arc<Self>, range: Range<u64>) -> Option<LockedRange> {
        if !crate::supports_fused() {
            return None;
        }
        let id = self.range_locks.request(range)?;
        Some(LockedRange { device: self.clone(), id })
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_granted_after_earlier_writes_complete_and_excludes_overlaps() {
        let locks = RangeLocks::default();
        let (one, two) = (locks.register_channel(), locks.register_channel());
        one.publish(3);
        assert!(!locks.has_locks());
        let id = locks.request(8..16).unwrap();
        assert!(locks.has_locks() && !locks.is_granted(id));
        // Until it is granted all writes wait, and after that those of the range.
        assert!(locks.table().must_wait(&(100..101)));
        one.publish(0);
        assert!(locks.is_granted(id));
        two.publish(1);
        assert!(locks.is_granted(id), "a later write was checked against the table");
        assert!(!locks.table().must_wait(&(16..17)) && locks.table().must_wait(&(15..17)));
        assert_eq!(locks.request(15..20), None);
        let other = locks.request(16..20).unwrap();
        assert!(!locks.is_granted(other));
        locks.unregister_channel(&two);
        assert!(locks.is_granted(other));
        locks.release(id);
        assert!(locks.has_locks() && locks.request(8..9).is_some());
        locks.release(other);
        locks.release(2);
        assert!(!locks.has_locks());
    }

    #[test]
    fn the_number_of_locks_is_bounded() {
        let locks = RangeLocks::default();
        let ids: Vec<u64> = (0..LOCKS_MAX as u64).map(|lba| locks.request(lba..lba + 1).unwrap()).collect();
        assert_eq!(locks.request(1000..1001), None);
        ids.into_iter().for_each(|id| locks.release(id));
        assert!(locks.request(1000..1001).is_some());
    }
}
