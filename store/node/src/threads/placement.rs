//! The cores of non-priority threads, and which of them are idle.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use os::{CpuSet, ThreadId};

/// The cores on which non-priority threads run.
///
/// A core is idle while no thread runs there that was placed there: where the kernel put others is not known,
/// and what other programs do neither. A core that has a priority thread is never idle.
pub(super) struct CorePool {
    cpus: Vec<u32>,
    /// By index in `cpus`: threads that were placed there and have something to do.
    running: Vec<AtomicU32>,
    overlaps: bool,
}

impl CorePool {
    /// Those of the allowed cores that have no priority thread; all if there are none.
    pub(super) fn new(allowed: &[u32], priority: &[u32]) -> CorePool {
        let others: Vec<u32> = allowed.iter().copied().filter(|cpu| !priority.contains(cpu)).collect();
        let overlaps = others.is_empty();
        let cpus = if overlaps { allowed.to_vec() } else { others };
        CorePool { running: cpus.iter().map(|_| AtomicU32::new(0)).collect(), cpus, overlaps }
    }

    pub(super) fn cpus(&self) -> &[u32] {
        &self.cpus
    }

    /// Priority threads are on the same cores: there are too few.
    pub(super) fn overlaps(&self) -> bool {
        self.overlaps
    }

    /// Takes an idle core, the one with index `last` first.
    fn take_idle(&self, last: usize) -> Option<usize> {
        if self.overlaps {
            return None;
        }
        let count = self.cpus.len();
        let mut indices = (0..count).map(|offset| (last + offset) % count);
        let take = |running: &AtomicU32| running.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed);
        indices.find(|index| take(&self.running[*index]).is_ok())
    }

    fn release(&self, index: usize) {
        self.running[index].fetch_sub(1, Ordering::AcqRel);
    }
}

impl fmt::Display for CorePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match CpuSet::new(self.cpus.clone()) {
            Ok(set) => fmt::Display::fmt(&set, f),
            Err(_) => Ok(()),
        }
    }
}

/// Where a thread runs: an index in the pool plus 1, or 0 for wherever the kernel puts it.
pub(super) struct Placed {
    pool: Arc<CorePool>,
    thread: ThreadId,
    /// The core that it takes while it has something to do.
    taken: AtomicU32,
    /// The core that it is restricted to.
    restricted: AtomicU32,
}

impl Placed {
    pub(super) fn new(pool: Arc<CorePool>, thread: ThreadId) -> Placed {
        Placed { pool, thread, taken: AtomicU32::new(0), restricted: AtomicU32::new(0) }
    }

    /// Before the thread wakes up: restricts it to an idle core, else to the pool. Returns whether there is
    /// an idle core.
    pub(super) fn select(&self) -> bool {
        let before = self.restricted.load(Ordering::Relaxed);
        let index = self.pool.take_idle(before.saturating_sub(1) as usize);
        let place = index.map_or(0, |index| index as u32 + 1);
        self.change_taken(place);
        if place == before {
            return index.is_some();
        }
        let cpus = index.map_or(self.pool.cpus(), |index| std::slice::from_ref(&self.pool.cpus()[index]));
        match os::set_thread_cpus(self.thread, cpus) {
            Ok(()) => {
                self.restricted.store(place, Ordering::Relaxed);
                index.is_some()
            }
            Err(_) => {
                // The process may have lost the core: the thread stays where it may run.
                self.change_taken(0);
                false
            }
        }
    }

    /// The thread has nothing to do.
    pub(super) fn release(&self) {
        self.change_taken(0);
    }

    fn change_taken(&self, place: u32) {
        if let Some(index) = self.taken.swap(place, Ordering::AcqRel).checked_sub(1) {
            self.pool.release(index as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_has_the_cores_without_priority_threads_or_all() {
        let pool = CorePool::new(&[0, 1, 2, 5], &[0, 2]);
        assert_eq!((pool.cpus(), pool.overlaps(), pool.to_string()), (&[1, 5][..], false, "1,5".to_string()));
        // Reactors that are not pinned may have numbers of cores that there are not.
        let pool = CorePool::new(&[0, 1], &[0, 1, 2]);
        assert_eq!((pool.cpus(), pool.overlaps()), (&[0, 1][..], true));
        assert_eq!(pool.take_idle(0), None);
    }

    #[test]
    fn an_idle_core_is_taken_once_the_last_one_first() {
        let pool = CorePool::new(&[0, 1, 2, 3], &[0]);
        assert_eq!([2, 2, 2, 2].map(|last| pool.take_idle(last)), [Some(2), Some(0), Some(1), None]);
        pool.release(0);
        assert_eq!(pool.take_idle(2), Some(0));
    }

    /// With two threads and one core of the pool, the second one is left to the kernel, and gets the core
    /// when the first one sleeps.
    #[test]
    fn threads_are_restricted_to_an_idle_core_or_to_the_pool() {
        let allowed = CpuSet::allowed();
        let cpu = allowed.cpus()[0];
        let pool = Arc::new(CorePool::new(&[cpu], &[]));
        // Both are this thread: what counts is what was asked of the kernel.
        let [first, second] = [0, 1].map(|_| Placed::new(pool.clone(), ThreadId::current()));
        assert!(first.select());
        assert_eq!(CpuSet::allowed().cpus(), [cpu]);
        assert!(!second.select());
        first.release();
        assert!(second.select());
        // What it had is given back before it takes another one.
        assert!(!first.select());
        second.release();
        first.release();
        assert!(first.select());
        os::set_thread_cpus(ThreadId::current(), allowed.cpus()).unwrap();
    }
}
