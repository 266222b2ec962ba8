//! The role of a connection: admin queue, I/O queue, or not yet connected.

use std::rc::Rc;
use std::sync::Arc;

use nvme_controller::{Controller, QueueLease, Subsystem};

use crate::queue_totals::QueueTotals;

/// The role of a connection.
pub(crate) enum ConnectionRole {
    /// ICReq has not been received.
    AwaitingIcReq,
    /// ICResp was sent; the first command must be Connect.
    AwaitingConnect,
    /// An admin queue; it owns its controller.
    Admin(Box<Controller>),
    /// An I/O queue.
    Io(TargetIoQueue),
    /// An admin queue that was closed: its controller is gone, and it waits only for outstanding device
    /// requests.
    Closed,
}

/// An I/O queue.
pub(crate) struct TargetIoQueue {
    /// Exclusive use of its queue identifier.
    pub(crate) lease: QueueLease,
    /// The version of the subsystem that its queue's namespaces were taken from.
    pub(crate) subsystem: Arc<Subsystem>,
    /// Where its commands are counted when it has closed, or has moved away.
    pub(crate) totals: Rc<QueueTotals>,
    /// Commands that it had completed when it moved to this core, which count there.
    pub(crate) completed_before: u64,
}
