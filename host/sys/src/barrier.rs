//! A memory barrier that only the side pays for which seldom needs it.
//!
//! Two threads that each store and then load what the other has stored may both miss it, unless a full barrier
//! stands between on both sides. Where one side does that all the time and the other almost never, the first
//! uses [`light`], which costs nothing, and the second [`heavy`], which makes every thread of the process pass a
//! full barrier: some microseconds.

use std::sync::OnceLock;
use std::sync::atomic::{Ordering, compiler_fence};

use rustix::thread::{MembarrierCommand, membarrier};

/// Whether [`heavy`] can be used: the kernel knows `membarrier` (Linux 4.14), and nothing forbids it.
pub fn is_there() -> bool {
    static IS_THERE: OnceLock<bool> = OnceLock::new();
    // Once registered a process stays so.
    *IS_THERE.get_or_init(|| {
        membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
            && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
    })
}

/// The side that is passed often: what is before it in the program is not moved behind it, nor the other way
/// round, if the other side uses [`heavy`].
#[inline(always)]
pub fn light() {
    compiler_fence(Ordering::SeqCst);
}

/// The other side: every thread of the process has passed a full barrier when this returns.
///
/// # Panics
/// Where it is not [there](is_there).
pub fn heavy() {
    assert!(is_there(), "membarrier is not there, and nobody asked whether it was");
    membarrier(MembarrierCommand::PrivateExpedited).expect("a registered process may use membarrier");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no such call")]
    fn of_two_that_store_and_then_look_one_sees_the_other() {
        if !is_there() {
            println!("SKIPPED: membarrier is not there");
            return;
        }
        for round in 0..2000 {
            let (often, seldom) = (AtomicBool::new(false), AtomicBool::new(false));
            let start = Barrier::new(2);
            let (saw_seldom, saw_often) = thread::scope(|scope| {
                let one = scope.spawn(|| {
                    start.wait();
                    often.store(true, Ordering::Relaxed);
                    light();
                    seldom.load(Ordering::Relaxed)
                });
                start.wait();
                seldom.store(true, Ordering::Relaxed);
                heavy();
                let saw = often.load(Ordering::Relaxed);
                (one.join().unwrap(), saw)
            });
            assert!(saw_seldom || saw_often, "round {round}");
        }
    }
}
