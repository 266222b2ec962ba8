//! What a connection is, from its first PDU on.

use std::sync::Arc;

use controller::{Controller, NamespaceTable, QueueLease, Subsystem};

/// What a connection has become.
pub(crate) enum Role {
    /// Nothing has come yet.
    AwaitingIcReq,
    /// ICReq is answered; the first command must be Connect.
    AwaitingConnect,
    /// An admin queue, with its controller.
    Admin(Box<Controller>),
    /// An I/O queue.
    Io(IoQueue),
    /// An admin queue that is over: its controller is gone, and only devices hold it up.
    Ended,
}

/// An I/O queue.
pub(crate) struct IoQueue {
    /// The right to be it.
    pub(crate) lease: QueueLease,
    /// What its commands name.
    pub(crate) namespaces: NamespaceTable,
    /// The subsystem that the table was made of.
    pub(crate) subsystem: Arc<Subsystem>,
}
