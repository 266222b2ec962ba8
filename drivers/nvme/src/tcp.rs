//! NVMe/TCP: an association with I/O queues on any core, and a namespace with an association of its own.

mod association;
mod connect;
mod io_queue;
mod keep_alive;
mod namespace;
mod namespace_info;
mod queue;
mod reconnecting;

pub use association::{AssociationHandle, TcpAssociation};
pub use io_queue::TcpIoQueue;
pub(crate) use namespace::TcpNamespace;
pub(crate) use reconnecting::ReconnectingNamespace;
