//! The vfio-user transport: an NVMe controller as a PCI function behind a UNIX socket, with queues and data in
//! memory that the client shares.
//!
//! Each listener is an endpoint with its own socket and at most one client at a time. A client gets a
//! [`function`], which runs on one core with all its queues; the controller logic is shared with the other
//! transports. The shell drives the clients' connections ([`protocol`], [`connection`]). Configuration uses messages
//! ([`session`], [`socket`]). I/O does not: submission queue entries are
//! read from client memory, contiguous data is lent to block devices without a copy ([`data`], [`memory`]), and
//! completions are written to client memory ([`queue`]).

mod connection;
mod data;
mod doorbells;
mod function;
mod interrupts;
mod limits;
mod memory;
mod pci;
mod protocol;
mod queue;
mod seats;
mod session;
mod socket;

use uuid::Uuid;
use wire_nvme::fabrics::Nqn;

pub use limits::VfioUserConfig;
pub use protocol::VfioUserFault;
pub(crate) use protocol::{ClientQueueReport, ClientReport, VfioUserProtocol, inject, report};
pub(crate) use seats::Seats;
pub(crate) use socket::endpoint_address;

/// Host identifier of the client of a socket. vfio-user has no host identity, so it is derived from the path of
/// the directory.
pub(crate) fn host_uuid(directory: &str) -> Uuid {
    Uuid::new_v5(&Uuid::NAMESPACE_URL, format!("vfio-user:{directory}").as_bytes())
}

/// Host NQN of the client of a socket.
pub(crate) fn host_nqn(directory: &str) -> Nqn {
    let name = format!("nqn.2014-08.org.nvmexpress:uuid:{}", host_uuid(directory));
    name.parse().expect("a UUID makes a valid NQN")
}
