//! What the operator is told of bad connections.

use std::net::SocketAddr;

/// Lines on standard error about hosts that broke the protocol or stayed silent, at most one a second:
/// a flood of bad connections must not become a flood of lines.
#[derive(Default)]
pub(super) struct Complaints {
    last_ns: Option<u64>,
    unsaid: u32,
}

impl Complaints {
    pub(super) fn say(&mut self, peer: SocketAddr, why: String) {
        const EVERY_NS: u64 = 1_000_000_000;
        let now_ns = sys::clock::now_ns();
        if self.last_ns.is_some_and(|last_ns| now_ns.saturating_sub(last_ns) < EVERY_NS) {
            self.unsaid += 1;
            return;
        }
        self.last_ns = Some(now_ns);
        match std::mem::take(&mut self.unsaid) {
            0 => eprintln!("nvmf: {peer}: {why}"),
            unsaid => eprintln!("nvmf: {peer}: {why} ({unsaid} more connections ended badly)"),
        }
    }
}
