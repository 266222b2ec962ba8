//! RDMA: queue pairs of InfiniBand, RoCE and iWARP, through libibverbs and librdmacm.
//!
//! The libraries are loaded when the first listener is opened, so that a program without RDMA needs neither.
//! An [`RdmaNetwork`] is a core's [`Network`](sockets::Network): it listens, accepts, and gives each
//! connection a [`QueuePair`](sockets::QueuePair) instead of a byte stream. An [`RdmaClient`] connects. All
//! connections of a core and a device share a completion queue and a queue of receive buffers; connections
//! stay on their core.
//!
//! ```text
//! EventChannel ──► ConnectionRequest ──► another core ──► RdmaNetwork::add ──► RdmaQueuePair
//! (connection manager)                                    RdmaDevice: completion queue, receive buffers, memory
//! ```
//!
//! Memory that the device reads or writes is owned by the work that is in flight: a queue pair is destroyed
//! before that is dropped, and then the device no longer accesses it.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod client;
mod connection_manager;
mod device;
mod functions;
mod network;
mod queue_pair;
mod receive_buffers;

pub use client::{RdmaClient, RdmaClientConfig, RdmaClientState};
pub use connection_manager::ConnectionRequest;
pub use network::{Admission, RdmaNetwork, RdmaNetworkConfig, RdmaNetworkSettings};

/// Why RDMA cannot be used, or a call failed.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// The libraries cannot be loaded.
    #[error(
        "RDMA's libraries cannot be used ({0}); install libibverbs.so.1 and librdmacm.so.1 with the provider \
         of the device, as with `apt-get install librdmacm1 ibverbs-providers` or `dnf install librdmacm \
         libibverbs`"
    )]
    Load(String),
    /// A call of theirs failed.
    #[error("{0}: {1}")]
    Call(&'static str, std::io::Error),
}

impl RdmaError {
    /// The error of a call that has set `errno`.
    fn last(what: &'static str) -> RdmaError {
        RdmaError::Call(what, std::io::Error::last_os_error())
    }

    /// As an error of the network.
    pub fn into_io(self) -> std::io::Error {
        let kind = match &self {
            RdmaError::Load(_) => std::io::ErrorKind::Unsupported,
            RdmaError::Call(_, error) => error.kind(),
        };
        std::io::Error::new(kind, self)
    }
}
