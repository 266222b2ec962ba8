//! A queue pair with its TCP connection and the network that it belongs to.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use block_io::Request;
use dma::Data;
use nvme_auth::{AuthHash, TlsIdentityVersion, TlsPsk};
use reactor::Core;
use sockets::{ConnectOptions, CoreNetwork, NetworkEvent, SentEvent, Sockets};
use tls::{Psk, PskHash, TlsLayer};
use wire_nvme::Sqe;
use wire_nvme::fabrics::Nqn;

use super::queue::{self, TcpQueue};
use crate::error::{ControllerFailure, NvmeOpenError};
use crate::fabrics::hostnqn;
use crate::fabrics::{CommandData, FabricsCompletion, FabricsQueue, FabricsUri, QueuePurpose};
use crate::options::{HostTls, Options};
use crate::uri::TcpUri;

/// Receive buffer size of an admin queue: its data is small, and long log pages are read in several commands.
const ADMIN_SCRATCH_BYTES: usize = 8 << 10;
/// Receive buffer size for data that is not received directly into place: eleven responses of 4 KiB, which
/// are still in the L2 cache when they are copied.
const IO_SCRATCH_BYTES: usize = 48 << 10;

/// Where a controller is, and what is requested of connections to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpRemote {
    /// Its address.
    pub address: SocketAddr,
    /// The address of this machine that connections come from.
    pub source: Option<SocketAddr>,
    /// Request header digests.
    pub header_digest: bool,
    /// Request data digests.
    pub data_digest: bool,
    /// The subsystem, for which a key of TLS is derived.
    pub subnqn: Nqn,
    /// The key of TLS that the host's authentication has generated; `None` for none.
    pub generated: Option<GeneratedPsk>,
}

/// A generated key of TLS. Clones share it, and the one that replaces it.
#[derive(Clone, Debug)]
pub struct GeneratedPsk(Arc<Mutex<TlsPsk>>);

impl PartialEq for GeneratedPsk {
    fn eq(&self, other: &GeneratedPsk) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for GeneratedPsk {}

impl fmt::Display for TcpRemote {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(formatter)
    }
}

impl FabricsUri for TcpUri {
    fn subnqn(&self) -> &Nqn {
        &self.subnqn
    }

    fn nsid(&self) -> u32 {
        self.nsid
    }
}

/// The key of a queue's TLS; `None` without TLS.
fn tls_psk(
    remote: &TcpRemote,
    purpose: QueuePurpose,
    options: &Options,
) -> Result<Option<TlsPsk>, NvmeOpenError> {
    match (&options.tls, &remote.generated) {
        (Some(_), _) if options.concat => {
            Err(NvmeOpenError::InvalidArgument("secure channel concatenation needs no psk: it generates one"))
        }
        (Some(tls), _) => configured_psk(tls, remote, options).map(Some),
        (None, Some(generated)) => Ok(Some(sync::lock(&generated.0).clone())),
        // Without TLS a host with concatenation only generates the key.
        (None, None) if options.concat && purpose != QueuePurpose::Admin => {
            Err(NvmeOpenError::InvalidArgument("no key of TLS has been generated yet"))
        }
        (None, None) => Ok(None),
    }
}

fn configured_psk(tls: &HostTls, remote: &TcpRemote, options: &Options) -> Result<TlsPsk, NvmeOpenError> {
    let (host, version) = (hostnqn(options), TlsIdentityVersion::One);
    let psk = tls.key.psk(host.as_str(), remote.subnqn.as_str(), version, tls.derivation);
    psk.ok_or_else(|| NvmeOpenError::Psk("has no identity for these names".into()))
}

/// The layer of a connection with a key.
fn tls_layer(psk: TlsPsk) -> Result<TlsLayer, NvmeOpenError> {
    let psk = Some(psk).and_then(|psk| {
        let hash = match psk.hash {
            AuthHash::Sha256 => PskHash::Sha256,
            AuthHash::Sha384 => PskHash::Sha384,
            AuthHash::Sha512 => return None,
        };
        Psk::new(psk.identity, psk.key, hash)
    });
    let psk = psk.ok_or_else(|| NvmeOpenError::Psk("has no identity for these names".into()))?;
    Ok(TlsLayer::client(psk))
}

/// A queue pair over one TCP connection, through the network `N` of its core.
pub struct TcpConnection<N: CoreNetwork = Sockets> {
    network: N,
    scratch: Vec<u8>,
    received: Vec<NetworkEvent<N::Stream>>,
    sent: Vec<SentEvent>,
    /// The connection was closed after a failure, because it still used data of commands.
    closed: bool,
    queue: TcpQueue,
}

impl<N: CoreNetwork> FabricsQueue for TcpConnection<N> {
    type Uri = TcpUri;
    type Remote = TcpRemote;

    const HANDSHAKE: &'static str = "ICReq";
    const DEPTH_MAX: u32 = queue::DEPTH_MAX;
    const NO_METADATA: &'static str = "metadata is not supported over TCP";

    fn resolve(uri: &TcpUri) -> Result<TcpRemote, NvmeOpenError> {
        let (header_digest, data_digest) = (uri.header_digest, uri.data_digest);
        let (address, source, subnqn) = (uri.resolve()?, uri.source, uri.subnqn.clone());
        Ok(TcpRemote { address, source, header_digest, data_digest, subnqn, generated: None })
    }

    fn use_psk(remote: &mut TcpRemote, psk: TlsPsk) -> Result<(), NvmeOpenError> {
        match &remote.generated {
            Some(generated) => *sync::lock(&generated.0) = psk,
            None => remote.generated = Some(GeneratedPsk(Arc::new(Mutex::new(psk)))),
        }
        Ok(())
    }

    fn connect(
        core: &Core,
        remote: &TcpRemote,
        entries: u32,
        purpose: QueuePurpose,
        options: &Options,
    ) -> Result<TcpConnection<N>, NvmeOpenError> {
        let layer = tls_psk(remote, purpose, options)?.map(tls_layer).transpose()?;
        let mut network = N::of_core(core);
        let (type_of_service, priority) = (options.type_of_service, options.socket_priority);
        let how = ConnectOptions { source: remote.source, type_of_service, priority };
        let stream = network.connect_with(&remote.address.into(), &how);
        let id = stream.and_then(|stream| {
            if options.ack_timeout_ms > 0 {
                network.set_ack_timeout(&stream, options.ack_timeout_ms)?;
            }
            network.add(stream)
        });
        let id = id.map_err(|error| NvmeOpenError::Connect(remote.address, error))?;
        // One entry of a queue always stays empty (Base 2.0, section 3.3.1.5), to distinguish full from
        // empty.
        let mut queue = TcpQueue::new(id, entries - 1, remote.header_digest, remote.data_digest);
        let scratch_bytes = match purpose {
            QueuePurpose::Admin => ADMIN_SCRATCH_BYTES,
            QueuePurpose::Io(_) => {
                queue.enable_owned_sends();
                IO_SCRATCH_BYTES
            }
        };
        if let Some(layer) = layer {
            queue.secure(layer);
        }
        let (scratch, received, sent) = (vec![0; scratch_bytes], Vec::new(), Vec::new());
        Ok(TcpConnection { network, scratch, received, sent, closed: false, queue })
    }

    fn connect_error(remote: &TcpRemote, failure: ControllerFailure) -> NvmeOpenError {
        failure.while_connecting(remote.address)
    }

    fn is_ready(&self) -> bool {
        self.queue.is_ready()
    }

    #[inline]
    fn failure(&self) -> Option<ControllerFailure> {
        self.queue.failure
    }

    fn fail(&mut self, failure: ControllerFailure) {
        self.queue.fail(failure);
    }

    fn is_full(&self) -> bool {
        self.queue.is_full()
    }

    #[inline]
    fn free_slots(&self) -> usize {
        self.queue.room()
    }

    fn set_in_capsule_max(&mut self, bytes: u32) {
        self.queue.set_in_capsule_max(bytes);
    }

    #[inline]
    fn submit(&mut self, sqe: Sqe, request: Request<Data>, data: CommandData, inline_data: &[u8]) {
        self.queue.submit(sqe, request, data, inline_data);
    }

    #[inline]
    fn flush(&mut self) {
        self.queue.flush(&mut self.network);
    }

    #[inline]
    fn receive(&mut self) -> u64 {
        let mut arrivals = 0;
        self.network.poll(&mut self.received);
        if self.network.reap_sent(&mut self.sent) {
            self.process_sent();
        }
        for event in self.received.drain(..) {
            if matches!(event, NetworkEvent::Ready(id) if id == self.queue.connection()) {
                arrivals += 1;
                while self.queue.receive(&mut self.network, &mut self.scratch) {}
            }
        }
        arrivals
    }

    #[inline]
    fn completions(&mut self) -> &mut Vec<FabricsCompletion> {
        self.queue.completions()
    }

    #[inline]
    fn is_pending(&self) -> bool {
        self.network.is_pending()
    }
}

impl<N: CoreNetwork> TcpConnection<N> {
    /// Passes on the ends of owned sends, and has them end soon after a failure.
    #[cold]
    fn process_sent(&mut self) {
        for SentEvent { connection, tag, result } in self.sent.drain(..) {
            if connection == self.queue.connection() {
                self.queue.owned_sent(tag, result);
                self.queue.flush(&mut self.network);
            }
        }
        if self.queue.failure.is_some() && self.queue.has_owned_sends() && !self.closed {
            self.closed = true;
            self.network.close(self.queue.connection());
        }
    }
}
