//! Ranges of a device that one request has to itself, against writes from every core.
//!
//! While nobody has a range, a write costs a store, a load and a branch a batch. Who wants one says so, makes
//! every core see it ([`sys::barrier`]), and waits until each channel's writes that were under way before have
//! come back. Until then all new writes are held, and after that those of the range.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Ranges at a time, given or waited for.
const RANGES_MAX: usize = 64;

/// Writes that a channel's module has, as other cores see them.
#[derive(Default)]
#[repr(align(64))]
pub(crate) struct Writes(AtomicU32);

impl Writes {
    /// Tells how many there are now. What they wrote is there for who sees them gone.
    #[inline]
    pub(crate) fn tell(&self, count: u32) {
        self.0.store(count, Ordering::Release);
    }
}

/// The locks of one device.
#[derive(Default)]
pub(crate) struct Locks {
    any: AtomicBool,
    table: Mutex<Table>,
}

#[derive(Default)]
pub(crate) struct Table {
    channels: Vec<Arc<Writes>>,
    locks: Vec<Lock>,
    next: u64,
}

struct Lock {
    id: u64,
    range: Range<u64>,
    /// Channels whose earlier writes may still be under way.
    awaited: Vec<Arc<Writes>>,
}

impl Locks {
    /// Whether some range is locked or wanted. A channel asks after it has told of the writes that it is about
    /// to hand over.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        sys::barrier::light();
        self.any.load(Ordering::Acquire)
    }

    pub(crate) fn join(&self) -> Arc<Writes> {
        let writes = Arc::new(Writes::default());
        self.table().channels.push(writes.clone());
        writes
    }

    /// A channel is gone, with all that it had.
    pub(crate) fn leave(&self, writes: &Arc<Writes>) {
        writes.tell(0);
        self.table().channels.retain(|other| !Arc::ptr_eq(other, writes));
    }

    /// Wants a range; `None` while another has a part of it.
    pub(crate) fn want(&self, range: Range<u64>) -> Option<u64> {
        let mut table = self.table();
        if table.locks.len() >= RANGES_MAX || table.locks.iter().any(|lock| overlap(&lock.range, &range)) {
            return None;
        }
        let id = table.next;
        table.next += 1;
        let awaited = table.channels.clone();
        table.locks.push(Lock { id, range, awaited });
        self.any.store(true, Ordering::Release);
        // Whoever has not seen that has told of its writes before, and is seen now.
        sys::barrier::heavy();
        Some(id)
    }

    /// Whether a range that was wanted is given: no write of it is under way, and none begins.
    pub(crate) fn is_given(&self, id: u64) -> bool {
        let mut table = self.table();
        let Some(lock) = table.locks.iter_mut().find(|lock| lock.id == id) else { return false };
        lock.awaited.retain(|writes| writes.0.load(Ordering::Acquire) > 0);
        lock.awaited.is_empty()
    }

    pub(crate) fn release(&self, id: u64) {
        let mut table = self.table();
        table.locks.retain(|lock| lock.id != id);
        self.any.store(!table.locks.is_empty(), Ordering::Release);
    }

    /// The table, for a channel that finds out which of its writes can go, and tells of those before it lets go.
    pub(crate) fn table(&self) -> MutexGuard<'_, Table> {
        // Every change under the lock is whole before anything can panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Whether a write of a range has to wait.
    pub(crate) fn holds(&self, range: &Range<u64>) -> bool {
        self.locks.iter().any(|lock| !lock.awaited.is_empty() || overlap(&lock.range, range))
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_given_when_earlier_writes_are_back_and_to_one_at_a_time() {
        let locks = Locks::default();
        let (one, two) = (locks.join(), locks.join());
        one.tell(3);
        assert!(!locks.any());
        let id = locks.want(8..16).unwrap();
        assert!(locks.any() && !locks.is_given(id));
        // Until it is given all writes wait, and after that those of the range.
        assert!(locks.table().holds(&(100..101)));
        one.tell(0);
        assert!(locks.is_given(id));
        two.tell(1);
        assert!(locks.is_given(id), "what began later was let through by the table");
        assert!(!locks.table().holds(&(16..17)) && locks.table().holds(&(15..17)));
        assert_eq!(locks.want(15..20), None);
        let other = locks.want(16..20).unwrap();
        assert!(!locks.is_given(other));
        locks.leave(&two);
        assert!(locks.is_given(other));
        locks.release(id);
        assert!(locks.any() && locks.want(8..9).is_some());
        locks.release(other);
        locks.release(2);
        assert!(!locks.any());
    }

    #[test]
    fn ranges_are_bounded() {
        let locks = Locks::default();
        let ids: Vec<u64> = (0..RANGES_MAX as u64).map(|lba| locks.want(lba..lba + 1).unwrap()).collect();
        assert_eq!(locks.want(1000..1001), None);
        ids.into_iter().for_each(|id| locks.release(id));
        assert!(locks.want(1000..1001).is_some());
    }
}
