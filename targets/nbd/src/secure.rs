//! TLS of connections, which a client begins with the option STARTTLS: its handshake, and the bytes after it.

use sockets::{ByteStream, FlushStatus, HandshakeStatus, StreamLayer};
use target_shell::{CloseReason, IoContext, MoreToRead};
use tls::{Psk, TlsLayer};

use crate::connection::{NbdConnection, NbdCore};
use crate::failure::NbdViolation;

impl NbdConnection {
    /// Whether the client has still to complete the handshake of TLS.
    pub(crate) fn awaits_tls(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| !tls.is_established())
    }

    /// Whether all bytes are those of TLS.
    pub(crate) fn is_secure(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_established())
    }

    /// Whether records were accepted that the stream has not taken yet.
    pub(crate) fn has_unsent_records(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unsent())
    }

    /// Continues the handshake; afterwards receives and handles what the client sends.
    #[cold]
    pub(crate) fn receive_secure<S: ByteStream>(
        &mut self,
        stream: &mut S,
        scratch: &mut [u8],
        context: &mut IoContext<'_, NbdCore>,
    ) -> Result<MoreToRead, CloseReason<NbdViolation>> {
        if !self.out.is_empty() && self.awaits_tls() {
            // The answer to STARTTLS comes before the first record; `resume` reads on.
            return Ok(MoreToRead::No);
        }
        self.with_tls(|this, tls| {
            if !tls.is_established() {
                match tls.handshake(stream, scratch) {
                    HandshakeStatus::Pending => return Ok(MoreToRead::No),
                    HandshakeStatus::Done => log_established(tls),
                    HandshakeStatus::Closed => return Err(CloseReason::Protocol(NbdViolation::TlsClosed)),
                    HandshakeStatus::Failed(kind) => return Err(CloseReason::Network(kind)),
                }
            }
            this.receive_bytes(&mut tls.stream(stream), context)
        })
    }

    /// Sends what the stream takes, and records that it has not taken yet.
    #[cold]
    pub(crate) fn flush_secure<S: ByteStream>(
        &mut self,
        stream: &mut S,
    ) -> Result<(), CloseReason<NbdViolation>> {
        self.with_tls(|this, tls| {
            let mut plain = tls.stream(stream);
            this.flush_bytes(&mut plain)?;
            match plain.flush() {
                FlushStatus::Failed(kind) => Err(CloseReason::Network(kind)),
                FlushStatus::Empty | FlushStatus::Blocked => Ok(()),
            }
        })
    }

    /// Runs `action` with the layer, and names the failure if TLS has failed.
    fn with_tls<R>(
        &mut self,
        action: impl FnOnce(&mut NbdConnection, &mut TlsLayer) -> Result<R, CloseReason<NbdViolation>>,
    ) -> Result<R, CloseReason<NbdViolation>> {
        let Some(mut tls) = self.tls.take() else {
            return Err(CloseReason::Protocol(NbdViolation::TlsRequired));
        };
        let result = action(self, &mut tls);
        let failure = tls.failure();
        self.tls = Some(tls);
        match (result, failure) {
            (Err(CloseReason::Network(_)), Some(failure)) => {
                Err(CloseReason::Protocol(NbdViolation::Tls(failure)))
            }
            (result, _) => result,
        }
    }
}

fn log_established(tls: &TlsLayer) {
    match tls.psk().map(Psk::identity) {
        Some(identity) => log::info!(target: "nbd", "TLS is established with the key of {identity}"),
        None => log::info!(target: "nbd", "TLS is established with the server's certificate"),
    }
}
