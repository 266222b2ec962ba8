//! The vfio-user transport: an NVMe controller as a PCI device behind a UNIX socket, with queues and data
//! in memory that the client shares.
//!
//! Each listener is an endpoint with a socket of its own and at most one client at a time. A client gets
//! a [`function`], which lives on one core with all of its queues; the controller itself is that of
//! every transport. Control comes by message ([`session`], [`socket`]). I/O does not: submission queue
//! entries are read where the client wrote them, data is lent to block devices straight out of the
//! client's memory where it lies in one piece ([`data`], [`memory`]), and completions are written to where
//! the client looks for them ([`queue`]).

mod data;
mod doorbells;
mod function;
mod group;
mod interrupts;
mod limits;
mod memory;
mod pci;
mod queue;
mod session;
mod socket;

use std::sync::Arc;

use controller::Directory;
use uuid::Uuid;
use wire_nvme::fabrics::Nqn;

use crate::picture::Picture;

pub use group::Fault;
pub(crate) use group::{Group, Message, Report};
pub use limits::VfioUserConfig;
pub(crate) use limits::VfioUserLimits;

/// What all endpoints of a group know.
pub(crate) struct Shared {
    pub(crate) limits: VfioUserLimits,
    pub(crate) directory: Arc<Directory>,
    pub(crate) picture: Arc<Picture>,
}

/// The identifier of the host behind a socket: the protocol knows no names, so it is made from the
/// directory's.
pub(crate) fn host_uuid(directory: &str) -> Uuid {
    Uuid::new_v5(&Uuid::NAMESPACE_URL, format!("vfio-user:{directory}").as_bytes())
}

/// The name of the host behind a socket.
pub(crate) fn host_of(directory: &str) -> Nqn {
    let name = format!("nqn.2014-08.org.nvmexpress:uuid:{}", host_uuid(directory));
    name.parse().expect("a UUID makes a name")
}
