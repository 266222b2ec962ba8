//! NVMe/TCP: a queue pair over a TCP connection, for the associations of [`fabrics`](crate::fabrics).

mod connection;
mod queue;

use std::borrow::Cow;

use nvme_auth::TlsKey;
use reactor::Core;
use secret::Secret;
use sockets::Sockets;
use wire_nvme::identify::IdentifyNamespace;
use wire_nvme::protection::MetadataFormat;

use crate::error::NvmeOpenError;
use crate::fabrics::{Association, AssociationHandle, FabricsIoQueue};
use crate::options::{HostTls, Options};
use crate::uri::TcpUri;

pub use connection::{GeneratedPsk, TcpConnection, TcpRemote};

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
        metadata: &MetadataFormat,
    ) -> Result<TcpIoQueue, NvmeOpenError> {
        TcpIoQueue::open_over(core, association, nsid, identify, metadata).await
    }
}

/// Most bytes of a file with a key of TLS, line end included.
const PSK_FILE_MAX: usize = 256;

impl TcpUri {
    /// The options with those that this names. Reads the file of the key.
    pub(crate) fn options<'a>(&self, options: &'a Options) -> Result<Cow<'a, Options>, NvmeOpenError> {
        let mut options = Cow::Borrowed(options);
        if let Some(hostnqn) = &self.hostnqn {
            options.to_mut().hostnqn = Some(hostnqn.clone());
        }
        if let Some(file) = &self.psk {
            let failed = |reason: String| NvmeOpenError::Psk(format!("{}: {reason}", file.display()));
            let secret = Secret::read(file, PSK_FILE_MAX).map_err(|error| failed(error.to_string()))?;
            let key = TlsKey::of_secret(&secret).map_err(|error| failed(error.to_string()))?;
            options.to_mut().tls = Some(HostTls { key, derivation: self.psk_derivation });
        }
        Ok(options)
    }
}
