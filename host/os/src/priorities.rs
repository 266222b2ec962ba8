//! I/O priorities of single requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

/// The I/O priorities of a queue's requests, by tag, which their owner sets before it submits them.
///
/// A value is that of `linux/ioprio.h`: the class from bit 13, the level below; 0 is the priority of the thread that
/// submits. The owner and the queue have a copy each, on one thread. Beside the requests, because most queues have no
/// use for it and a request has no room.
#[derive(Clone, Debug)]
pub struct RequestPriorities(Arc<[AtomicU16]>);

impl RequestPriorities {
    /// For requests with tags below `depth`; none has a priority of its own.
    pub fn new(depth: u32) -> RequestPriorities {
        RequestPriorities((0..depth).map(|_| AtomicU16::new(0)).collect())
    }

    /// The value of a class, 0 to 3, and a level, 0 to 7.
    pub const fn value(class: u8, level: u8) -> u16 {
        (class as u16) << 13 | level as u16
    }

    /// Sets the priority of the request with this tag.
    ///
    /// # Panics
    /// If the tag is not below the depth.
    #[inline]
    pub fn set(&self, tag: u64, priority: u16) {
        self.0[tag as usize].store(priority, Ordering::Relaxed);
    }

    /// The priority of the request with this tag.
    ///
    /// # Panics
    /// As [`set`](Self::set).
    #[inline]
    pub fn get(&self, tag: u64) -> u16 {
        self.0[tag as usize].load(Ordering::Relaxed)
    }
}
