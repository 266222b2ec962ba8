//! Waiting for the kernel when what owns memory in use is dropped.

use std::time::{Duration, Instant};

/// Calls `step` until it returns true or `time_max` has passed; returns its last result. Each call waits for the kernel
/// for a short time. If it returns false, the memory must be leaked.
///
/// While the thread panics, something that was never submitted may be among what is waited for, and never completes:
/// the time is shorter then.
pub(crate) fn drain(time_max: Duration, mut step: impl FnMut() -> bool) -> bool {
    let time_max = if std::thread::panicking() { time_max / 50 } else { time_max };
    let begun = Instant::now();
    loop {
        if step() {
            return true;
        }
        if begun.elapsed() > time_max {
            return false;
        }
    }
}
