//! What transports report of their queues, and how long they drain them.

use wire_nvme::fabrics::Nqn;

use crate::ListenAddress;

/// Maximum time to drain the commands in flight before a queue is closed. Far below the time that hosts wait
/// for a controller to become ready (CAP.TO).
pub(crate) const DRAIN_TIMEOUT_NS: u64 = 3_000_000_000;

/// An open queue, or a connection that is none yet.
#[derive(Clone, Debug)]
pub(crate) struct QueueReport {
    /// `None` before Connect.
    pub(crate) subnqn: Option<Nqn>,
    pub(crate) cntlid: u16,
    /// `None` before Connect.
    pub(crate) qid: Option<u16>,
    pub(crate) peer: ListenAddress,
    pub(crate) local: ListenAddress,
    pub(crate) entries: u32,
    pub(crate) commands: u64,
    pub(crate) errors: u64,
    /// Commands that have completed since it is on this core.
    pub(crate) completed: u64,
}
