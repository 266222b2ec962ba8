//! TLS of connections: the handshake before the first PDU, and records.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use nvme_auth::TlsDerivation;
use nvme_controller::SecureChannel;
use nvme_tcp::receive_pdus;
use sockets::{ByteStream, FlushStatus, HandshakeStatus, StreamLayer, TransferResult};
use target_shell::{CloseReason, MoreToRead};
use tls::{Psk, ServerCredentials, TlsFailure, TlsLayer};
use wire_nvme::tcp::PduType;

use super::connection::NvmfConnection;
use super::handler::PduHandler;
use super::link::SendingData;
use super::protocol::{TcpContext, TcpError};
use super::psks::ConnectionKeys;

/// What a connection at an address with TLS begins with.
enum First {
    Nothing,
    Tls,
    /// A PDU, whose first byte it is.
    Plain(u8),
}

/// A stream whose first byte was received already.
struct AfterFirst<'a, S> {
    first: Option<u8>,
    below: &'a mut S,
}

impl<S: ByteStream> ByteStream for AfterFirst<'_, S> {
    fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        let into = parts.iter_mut().find_map(|part| part.first_mut());
        match (self.first.take(), into) {
            (Some(first), Some(into)) => {
                *into = first;
                TransferResult::Bytes(1)
            }
            (first, _) => {
                self.first = first;
                self.below.receive(parts)
            }
        }
    }

    fn send(&mut self, parts: &[IoSlice<'_>]) -> TransferResult {
        self.below.send(parts)
    }
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
        if self.tls.as_ref().is_some_and(|tls| !tls.has_begun()) {
            match self.receive_first(stream, scratch)? {
                First::Nothing => return Ok(MoreToRead::No),
                First::Tls => {}
                First::Plain(byte) => return self.receive_plain(byte, stream, scratch, context),
            }
        }
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

    /// The first byte, which says whether the host begins TLS.
    fn receive_first<S: ByteStream>(
        &mut self,
        stream: &mut S,
        scratch: &mut [u8],
    ) -> Result<First, CloseReason<TcpError>> {
        let mut first = [0];
        match stream.receive(&mut [IoSliceMut::new(&mut first)]) {
            TransferResult::Bytes(0) | TransferResult::Blocked => return Ok(First::Nothing),
            TransferResult::Bytes(_) => {}
            TransferResult::Closed => return Err(CloseReason::Protocol(TcpError::TlsClosed)),
            TransferResult::Failed(kind) => return Err(CloseReason::Network(kind)),
        }
        if first[0] == PduType::IcReq as u8 {
            return Ok(First::Plain(first[0]));
        }
        let put = self.tls.as_mut().map_or(Ok(()), |tls| tls.put_received(&first));
        put.map_err(|error| {
            discard(stream, scratch);
            CloseReason::Protocol(TcpError::Tls(error.0))
        })?;
        Ok(First::Tls)
    }

    /// A host that begins without TLS: it may do so where hosts make their keys by secure channel
    /// concatenation.
    fn receive_plain<S: ByteStream>(
        &mut self,
        first: u8,
        stream: &mut S,
        scratch: &mut [u8],
        context: &mut TcpContext<'_>,
    ) -> Result<MoreToRead, CloseReason<TcpError>> {
        if !context.config.concatenates_at(self.state.fabrics.port.portid) {
            discard(stream, scratch);
            return Err(CloseReason::Protocol(TcpError::Tls(TlsFailure::NotTls)));
        }
        self.tls = None;
        let mut stream = AfterFirst { first: Some(first), below: stream };
        let pumped = receive_pdus(
            &mut self.receiver,
            &mut PduHandler::new(&mut self.state, context),
            &mut stream,
            scratch,
        );
        // The stream may have more than the one byte.
        self.after(pumped).map(|_| MoreToRead::Yes)
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
    pub(super) fn secured(mut self, keys: ConnectionKeys) -> NvmfConnection {
        self.tls = Some(Box::new(TlsLayer::server(ServerCredentials::of_keys(Arc::new(keys)))));
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

/// Receives what the peer has sent: a connection that is closed before is reset, and the peer sees no end.
fn discard<S: ByteStream>(stream: &mut S, scratch: &mut [u8]) {
    let _ = stream.receive(&mut [IoSliceMut::new(scratch)]);
}

/// The step and the identity; the shell logs the peer and the step where it closes the connection.
fn log_failure(peer: std::net::SocketAddr, failure: TlsFailure, identity: Option<&str>) {
    if let Some(identity) = identity {
        log::warn!(target: "nvmf", "TLS with {peer} failed: {failure}; the host offers {identity}");
    }
}
