//! NVMe over Fabrics, apart from any transport: associations and their I/O queues.
//!
//! A transport implements [`FabricsQueue`]: one queue pair over one connection. All else is generic over it
//! and calls it statically, so that the I/O path is the transport's own:
//!
//! - [`Association`]: the admin queue, with Connect, keep alive, identification and events, on one core;
//! - [`FabricsIoQueue`]: an I/O queue of an association, on any core;
//! - [`discovery`]: the log page of a discovery controller;
//! - authentication with [`HostCredentials`](crate::HostCredentials): what follows Connect on every queue of
//!   a controller that asks for it.

mod association;
mod authentication;
mod connect;
mod controller;
pub mod discovery;
mod io_queue;
mod keep_alive;
mod namespace;
mod namespace_info;
mod queue;
mod reauthentication;
mod reconnecting;

pub use association::{Association, AssociationHandle};
pub(crate) use connect::hostnqn;
pub use io_queue::FabricsIoQueue;
pub(crate) use namespace::FabricsNamespace;
pub use queue::{CommandData, FabricsCompletion, FabricsQueue, FabricsUri, QueuePurpose};
pub(crate) use reconnecting::ReconnectingNamespace;
