//! Rate-limited log of connections that failed.

use std::net::SocketAddr;

/// Logs hosts that violated the protocol or timed out to standard error: at most one line per second, so
/// that a flood of failing connections does not flood the log.
#[derive(Default)]
pub(super) struct RateLimitedLog {
    last_ns: Option<u64>,
    suppressed: u32,
}

impl RateLimitedLog {
    /// Logs the reason with the address of the peer, or of the listener if there is no peer.
    pub(super) fn log(&mut self, now_ns: u64, peer: SocketAddr, reason: String) {
        const INTERVAL_NS: u64 = 1_000_000_000;
        if self.last_ns.is_some_and(|last_ns| now_ns.saturating_sub(last_ns) < INTERVAL_NS) {
            self.suppressed += 1;
            return;
        }
        self.last_ns = Some(now_ns);
        match std::mem::take(&mut self.suppressed) {
            0 => log::warn!(target: "nvmf", "{peer}: {reason}"),
            suppressed => {
                log::warn!(target: "nvmf", "{peer}: {reason} ({suppressed} more connections failed)")
            }
        }
    }
}
