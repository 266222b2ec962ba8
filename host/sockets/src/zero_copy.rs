//! Whether TCP connections send without a copy.

use std::sync::atomic::{AtomicBool, Ordering};

/// The switch of this process, which the sockets of every core obey.
pub static ZERO_COPY_SEND: ZeroCopySwitch = ZeroCopySwitch::new();

/// Whether connections that are added from now on send large data without a copy, by who opened them. Off at first:
/// where the kernel copies anyway, as over loopback, zero-copy takes longer.
#[derive(Debug, Default)]
pub struct ZeroCopySwitch {
    accepted: AtomicBool,
    connected: AtomicBool,
}

impl ZeroCopySwitch {
    /// A switch that is off.
    pub const fn new() -> ZeroCopySwitch {
        ZeroCopySwitch { accepted: AtomicBool::new(false), connected: AtomicBool::new(false) }
    }

    fn side(&self, accepted: bool) -> &AtomicBool {
        if accepted { &self.accepted } else { &self.connected }
    }

    /// Sets it for accepted connections, or for those that this process opens.
    pub fn set(&self, accepted: bool, enabled: bool) {
        // A setting publishes no other data.
        self.side(accepted).store(enabled, Ordering::Relaxed);
    }

    /// Whether it is on for accepted connections, or for those that this process opens.
    pub fn is_on(&self, accepted: bool) -> bool {
        self.side(accepted).load(Ordering::Relaxed)
    }
}
