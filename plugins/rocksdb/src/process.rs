//! The process that has stores open.
//!
//! A process that forks has a copy without the reactor's thread: whatever it asked for would never be
//! answered, and what it closes is still its parent's. There, calls fail and closing does nothing.

use std::sync::OnceLock;

/// The process that opened the first store.
static OWNER: OnceLock<u32> = OnceLock::new();

/// This process opens a store.
pub(crate) fn claim() {
    OWNER.get_or_init(std::process::id);
}

/// Whether this process is a fork of the one that opened the stores. It costs a system call.
pub(crate) fn is_forked() -> bool {
    OWNER.get().is_some_and(|owner| *owner != std::process::id())
}
