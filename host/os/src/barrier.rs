//! An asymmetric memory barrier based on `membarrier(2)`.
//!
//! Two threads that each store and then load the other's variable may both miss the other's store, unless both
//! execute a full barrier in between. If one side is hot and the other uncommon, the hot side uses [`light`],
//! which only stops the compiler, and the uncommon side uses [`heavy`], which makes every thread of the process
//! execute a full barrier and takes some microseconds.

use std::sync::OnceLock;
use std::sync::atomic::{Ordering, compiler_fence};

use rustix::thread::{MembarrierCommand, membarrier};

/// Whether [`heavy`] can be used: the kernel has `membarrier` (Linux 4.14), and no seccomp filter forbids it.
pub fn is_supported() -> bool {
    static IS_THERE: OnceLock<bool> = OnceLock::new();
    // A registration lasts for the life of the process.
    *IS_THERE.get_or_init(|| {
        membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
            && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
    })
}

/// The hot side: memory accesses before and after it are not reordered across it, provided that the other side
/// uses [`heavy`].
#[inline(always)]
pub fn light() {
    compiler_fence(Ordering::SeqCst);
}

/// The uncommon side: when it returns, every thread of the process has executed a full barrier.
///
/// # Panics
/// If the kernel does not [support](is_supported) it.
pub fn heavy() {
    assert!(is_supported(), "membarrier is not supported; the caller must check is_supported");
    membarrier(MembarrierCommand::PrivateExpedited)
        .expect("membarrier does not fail in a registered process");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement membarrier")]
    fn of_two_threads_that_store_then_load_one_sees_the_other() {
        if !is_supported() {
            println!("SKIPPED: membarrier is not supported");
            return;
        }
        for round in 0..2000 {
            let (hot, uncommon) = (AtomicBool::new(false), AtomicBool::new(false));
            let start = Barrier::new(2);
            let (saw_uncommon, saw_hot) = thread::scope(|scope| {
                let hot_thread = scope.spawn(|| {
                    start.wait();
                    hot.store(true, Ordering::Relaxed);
                    light();
                    uncommon.load(Ordering::Relaxed)
                });
                start.wait();
                uncommon.store(true, Ordering::Relaxed);
                heavy();
                let saw = hot.load(Ordering::Relaxed);
                (hot_thread.join().unwrap(), saw)
            });
            assert!(saw_uncommon || saw_hot, "round {round}");
        }
    }
}
