//! NVMe/TCP: two connections to a controller, the admin queue's and one I/O queue's.

mod controller;
mod namespace;
mod queue;

pub(crate) use namespace::TcpNamespace;
