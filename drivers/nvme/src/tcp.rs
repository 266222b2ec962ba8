//! NVMe/TCP: a queue pair over a TCP connection, for the associations of [`fabrics`](crate::fabrics).

mod connection;
mod queue;

use reactor::Core;
use sockets::Sockets;
use wire_nvme::identify::IdentifyNamespace;

use crate::error::NvmeOpenError;
use crate::fabrics::{Association, AssociationHandle, FabricsIoQueue};
use crate::options::Options;
use crate::uri::TcpUri;

pub use connection::{TcpConnection, TcpRemote};

/// An association of this host with one controller over TCP.
pub type TcpAssociation<N = Sockets> = Association<TcpConnection<N>>;

/// A channel to one namespace through an I/O queue of a [`TcpAssociation`].
pub type TcpIoQueue<N = Sockets> = FabricsIoQueue<TcpConnection<N>>;

impl Association<TcpConnection> {
    /// As [`open_over`](Self::open_over), over kernel sockets.
    ///
    /// # Errors
    /// The controller is not reachable, or rejects the host.
    pub async fn open(
        core: &Core,
        uri: &TcpUri,
        options: &Options,
        io_queues: u16,
    ) -> Result<TcpAssociation, NvmeOpenError> {
        TcpAssociation::open_over(core, uri, options, io_queues).await
    }
}

impl FabricsIoQueue<TcpConnection> {
    /// As [`open_over`](Self::open_over), over kernel sockets.
    ///
    /// # Errors
    /// As [`open_over`](Self::open_over).
    pub async fn open(
        core: &Core,
        association: &AssociationHandle<TcpRemote>,
        nsid: u32,
        identify: &IdentifyNamespace,
    ) -> Result<TcpIoQueue, NvmeOpenError> {
        TcpIoQueue::open_over(core, association, nsid, identify).await
    }
}
