//! NVMe/TCP: an association, which I/O queues of any core join, and a namespace that has both for itself.

mod association;
mod connect;
mod facts;
mod io_queue;
mod namespace;
mod queue;

pub use association::{Association, Membership};
pub use io_queue::IoQueue;
pub(crate) use namespace::TcpNamespace;
