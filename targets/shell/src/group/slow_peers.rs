//! The check of transfers: which connections keep buffers for peers that do not move their data.

use slots::Slot;
use sockets::Listen;

use super::ConnectionGroup;
use crate::protocol::{CloseReason, Protocol, ProtocolConnection};
use crate::transfers::{CheckTimes, TransferReport};

/// What a group knows of its last check.
///
/// A check visits all connections of the group, a few hundred nanoseconds each. It runs while something is
/// active, and as long as a connection waits for its peer; a group of idle connections has no timer.
#[derive(Debug)]
pub(super) struct SlowPeers {
    times: CheckTimes,
    /// How often the core's pool had no buffer for a connection, and how often one was refused a buffer.
    lacks: (u64, u64),
    /// Filled at each check; here for its allocation.
    report: TransferReport,
}

impl SlowPeers {
    pub(super) fn new(timeout_ns: u64) -> SlowPeers {
        SlowPeers { times: CheckTimes::new(timeout_ns), lacks: (0, 0), report: TransferReport::default() }
    }
}

impl<P: Protocol, N: Listen> ConnectionGroup<P, N> {
    #[cold]
    pub(super) fn arm_check(&mut self, now_ns: u64) {
        self.timers.arm_check(now_ns.saturating_add(self.slow_peers.times.interval_ns));
    }

    /// Whether a connection on this core lacked memory since the last check, of this target or another.
    fn take_lack(&mut self) -> bool {
        let failures = self.pool.counts().iter().map(|counts| counts.failures).sum();
        let lacks = (failures, self.memory.refusals());
        std::mem::replace(&mut self.slow_peers.lacks, lacks) != lacks
    }

    /// Closes connections whose peers have had their time.
    #[cold]
    pub(super) fn check_transfers(&mut self, now_ns: u64) {
        let is_core_lacking = self.take_lack();
        let mut failed: Vec<Slot> = Vec::new();
        let mut is_waiting = false;
        let SlowPeers { times, report, .. } = &mut self.slow_peers;
        for (slot, entry) in self.connections.slab.iter_mut().filter(|(_, entry)| !entry.closed) {
            report.clear();
            entry.connection.transfers(report);
            let memory = entry.connection.memory();
            let counted = memory.as_ref().map_or((0, 0), |one| (one.returned(), one.peer_refusals()));
            let is_lacking = is_core_lacking | entry.transfers.take_refusals(counted.1);
            let result = entry.transfers.check(report, counted.0, times, is_lacking);
            if let Some(memory) = memory {
                memory.checked(result.makes_progress, result.is_slow, is_lacking);
            }
            is_waiting |= result.is_waiting;
            failed.extend(result.has_failed.then_some(slot));
        }
        for slot in failed {
            if let Some(entry) = self.connections.slab.get_mut(slot) {
                entry.connection.abandon_transfers();
            }
            self.close(slot, CloseReason::TransferTimeout, now_ns);
        }
        if is_waiting {
            self.arm_check(now_ns);
        }
    }
}
