//! Counts of operations, by core.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::AccelOp;

/// Counts of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccelOpStats {
    /// Operations that succeeded.
    pub executed: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
}

impl AccelOpStats {
    pub(crate) fn add(&mut self, other: AccelOpStats) {
        self.executed += other.executed;
        self.failed += other.failed;
        self.bytes += other.bytes;
    }

    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        *self == AccelOpStats::default()
    }
}

/// Counts of a core. Its thread alone writes them, so that a count is a load and a store; others may read.
#[derive(Default)]
pub(crate) struct CoreCounts([Counts; AccelOp::COUNT]);

#[derive(Default)]
struct Counts {
    executed: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
}

fn add(count: &AtomicU64, by: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

impl CoreCounts {
    #[inline]
    pub(crate) fn executed(&self, op: AccelOp, bytes: u64) {
        let counts = &self.0[op.index()];
        add(&counts.executed, 1);
        add(&counts.bytes, bytes);
    }

    #[cold]
    pub(crate) fn failed(&self, op: AccelOp) {
        add(&self.0[op.index()].failed, 1);
    }

    pub(crate) fn read(&self) -> [AccelOpStats; AccelOp::COUNT] {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        std::array::from_fn(|index| {
            let counts = &self.0[index];
            AccelOpStats {
                executed: read(&counts.executed),
                failed: read(&counts.failed),
                bytes: read(&counts.bytes),
            }
        })
    }
}
