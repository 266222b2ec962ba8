//! NVMe/TCP: a namespace with two connections of its own, the admin queue's and one I/O queue's, or an
//! association that I/O queues of any core join.

mod association;
mod controller;
mod io_queue;
mod namespace;
mod queue;

pub use association::{Association, Membership};
pub use io_queue::IoQueue;
pub(crate) use namespace::TcpNamespace;
