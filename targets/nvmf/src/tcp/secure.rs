//! TLS of connections: the keys, and the handshake before the first PDU.

use std::sync::Arc;

use nvme_auth::{AuthHash, TlsDerivation, TlsPsk};
use nvme_controller::SecureChannel;
use nvme_tcp::receive_pdus;
use sockets::{ByteStream, FlushStatus, HandshakeStatus, StreamLayer};
use target_shell::{CloseReason, MoreToRead};
use tls::{Psk, PskHash, PskSource, ServerCredentials, TlsFailure, TlsLayer};

use super::connection::NvmfConnection;
use super::handler::PduHandler;
use super::link::SendingData;
use super::protocol::{TcpContext, TcpError};
use crate::snapshot::ConfigSnapshot;

/// The keys of a configuration: those of a connection's handshake, as the hosts were when it was accepted.
/// Connect asks whether the host still has one.
impl PskSource for ConfigSnapshot {
    fn find(&self, identity: &str) -> Option<Psk> {
        psk_of(self.tls_psk(identity)?)
    }
}

impl ConfigSnapshot {
    fn tls_psk(&self, identity: &str) -> Option<&TlsPsk> {
        let channel = SecureChannel::of_identity(identity)?;
        let subsystem = self.subsystems.get(&channel.subnqn)?;
        let psks = subsystem.tls_hosts.get(&channel.hostnqn)?;
        psks.iter().find(|psk| psk.identity == identity)
    }
}

fn psk_of(psk: &TlsPsk) -> Option<Psk> {
    let hash = match psk.hash {
        AuthHash::Sha256 => PskHash::Sha256,
        AuthHash::Sha384 => PskHash::Sha384,
        AuthHash::Sha512 => return None,
    };
    Psk::new(psk.identity.clone(), psk.key.clone(), hash)
}

impl NvmfConnection {
    /// Continues the handshake; afterwards receives and processes PDUs, as a connection without TLS does.
    #[cold]
    pub(super) fn receive_secure<S: ByteStream>(
        &mut self,
        stream: &mut S,
        scratch: &mut [u8],
        context: &mut TcpContext<'_>,
    ) -> Result<MoreToRead, CloseReason<TcpError>> {
        let NvmfConnection { receiver, state, tls } = self;
        let Some(tls) = tls else { return Ok(MoreToRead::No) };
        if !tls.is_established() {
            match tls.handshake(stream, scratch) {
                HandshakeStatus::Pending => return Ok(MoreToRead::No),
                HandshakeStatus::Done => {}
                HandshakeStatus::Closed => return Err(CloseReason::Protocol(TcpError::TlsClosed)),
                HandshakeStatus::Failed(kind) => {
                    let Some(failure) = tls.failure() else { return Err(CloseReason::Network(kind)) };
                    log_failure(state.fabrics.peer, failure, tls.offered_identity());
                    return Err(CloseReason::Protocol(TcpError::Tls(failure)));
                }
            }
            let identity = tls.psk().map_or("", Psk::identity);
            let derivation = context.config.tls_psk(identity).map(|psk| psk.derivation);
            log::info!(
                target: "nvmf",
                "TLS with {} is established: {identity}{}", state.fabrics.peer,
                match derivation {
                    Some(TlsDerivation::Libnvme) => " (derived as libnvme did until July 2025)",
                    _ => "",
                },
            );
            state.fabrics.secure = SecureChannel::of_identity(identity).map(Box::new);
            state.fabrics.handshake_deadline_ns =
                context.now_ns.saturating_add(context.protocol.limits.ic_timeout_ns);
        }
        let pumped =
            receive_pdus(receiver, &mut PduHandler::new(state, context), &mut tls.stream(stream), scratch);
        let failure = tls.failure();
        match self.after(pumped) {
            Err(CloseReason::Network(kind)) => Err(match failure {
                Some(failure) => CloseReason::Protocol(TcpError::Tls(failure)),
                None => CloseReason::Network(kind),
            }),
            other => other,
        }
    }

    /// Sends queued PDUs, and records that the stream has not taken yet.
    #[cold]
    pub(super) fn flush_secure<S: ByteStream>(
        &mut self,
        stream: &mut S,
    ) -> Result<(), CloseReason<TcpError>> {
        let NvmfConnection { state, tls, .. } = self;
        let Some(tls) = tls.as_mut().filter(|tls| tls.is_established()) else { return Ok(()) };
        let mut plain = tls.stream(stream);
        let sent = state.fabrics.link.sender.flush(&mut plain, &mut SendingData(&mut state.fabrics.queue));
        match (sent, plain.flush()) {
            (nvme_tcp::FlushStatus::Failed(kind), _) | (_, FlushStatus::Failed(kind)) => {
                Err(CloseReason::Network(kind))
            }
            _ => Ok(()),
        }
    }

    /// A connection whose first bytes are those of TLS, with the keys of this configuration.
    pub(super) fn secured(mut self, keys: Arc<ConfigSnapshot>) -> NvmfConnection {
        self.tls = Some(Box::new(TlsLayer::server(ServerCredentials::of_keys(keys))));
        self
    }

    /// Whether the peer has still to complete the handshake of TLS.
    pub(super) fn awaits_tls(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| !tls.is_established())
    }

    /// Whether records were accepted that the stream has not taken yet.
    pub(super) fn has_unsent_records(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unsent())
    }
}

/// The step and the identity; the shell logs the peer and the step where it closes the connection.
fn log_failure(peer: std::net::SocketAddr, failure: TlsFailure, identity: Option<&str>) {
    if let Some(identity) = identity {
        log::warn!(target: "nvmf", "TLS with {peer} failed: {failure}; the host offers {identity}");
    }
}
