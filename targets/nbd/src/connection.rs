//! A connection: from the greeting to the last reply.

use std::io::IoSliceMut;
use std::sync::Arc;

use sockets::ByteStream;
use target_shell::{
    Accepted, CloseReason, Connections, IoContext, MemoryShare, MoreToRead, NEVER_NS, Notice, Protocol,
    ProtocolConnection, Reattach, ReceiveBuffer, SendQueue, TransferReport,
};
use tls::TlsLayer;

use crate::export::NbdConfig;
use crate::failure::NbdViolation;
use crate::handshake::{self, Handshake, Negotiated};
use crate::limits::{HANDSHAKE_TIMEOUT_NS, QUOTA_BYTES, RECEIVE_BUDGET, RECEIVE_BYTES, RECEIVE_BYTES_FIRST};
use crate::session::Session;

/// In the identifiers of transfers: bytes of a request or its payload, whichever comes next.
const OWED: u64 = u64::MAX;

/// The protocol's state of a core: none.
pub(crate) struct NbdCore;

/// A connection of a client.
///
/// Until an export is selected it has a few hundred bytes, and answers options ([`Handshake`]). Then a
/// [`Session`] executes requests. What is received goes into the payload of the current write first, and what
/// is beyond it into `inbound`. If the session is blocked (too many commands, replies or buffers), nothing is
/// received until a completion or a sent reply unblocks it; the stream itself is the queue.
pub(crate) struct NbdConnection {
    pub(crate) flow: u16,
    pub(crate) inbound: ReceiveBuffer,
    pub(crate) out: SendQueue,
    pub(crate) handshake: Handshake,
    pub(crate) session: Option<Box<Session>>,
    /// Since STARTTLS.
    pub(crate) tls: Option<Box<TlsLayer>>,
    pub(crate) draining: bool,
    /// It has selected an export, and the group does not know yet.
    pub(crate) logged_in: bool,
    /// Of the handshake.
    pub(crate) deadline_ns: u64,
    /// Bytes ever received, wrapping.
    pub(crate) received: usize,
}

impl Protocol for NbdCore {
    const NAME: &'static str = "nbd";
    type Config = NbdConfig;
    type Connection = NbdConnection;
    type Error = NbdViolation;

    fn accept(&mut self, accepted: Accepted, _: &Arc<NbdConfig>, now_ns: u64) -> Option<NbdConnection> {
        let mut connection = NbdConnection {
            flow: accepted.flow,
            inbound: ReceiveBuffer::default(),
            out: SendQueue::default(),
            handshake: Handshake::new(accepted.portid),
            session: None,
            tls: None,
            draining: false,
            logged_in: false,
            deadline_ns: now_ns + HANDSHAKE_TIMEOUT_NS,
            received: 0,
        };
        connection.inbound.reserve(RECEIVE_BYTES_FIRST);
        connection.out.bytes.extend(handshake::greeting());
        Some(connection)
    }

    fn apply(&mut self, config: &Arc<NbdConfig>, connections: &mut Connections<NbdConnection>, _now_ns: u64) {
        connections.update(|_, entry| entry.connection.apply(config));
    }
}

impl NbdConnection {
    /// Identifier of its export, once it is selected.
    pub(crate) fn export_id(&self) -> Option<u64> {
        self.session.as_ref().map(|session| session.export_id())
    }

    /// Drains it if its export is gone. Returns whether it is.
    pub(crate) fn apply(&mut self, config: &NbdConfig) -> bool {
        let Some(session) = &self.session else { return false };
        let is_gone = config.exports.iter().all(|export| export.id != session.export_id());
        if is_gone {
            self.begin_drain();
        }
        is_gone
    }

    /// Handles what was received, as far as possible.
    fn advance(&mut self, context: &mut IoContext<'_, NbdCore>) -> Result<(), NbdViolation> {
        if self.draining {
            return Ok(());
        }
        if self.awaits_tls() {
            if self.out.is_empty() {
                self.handshake.unblock();
            }
            return Ok(());
        }
        if self.session.is_none() {
            match self.handshake.advance(&mut self.inbound, context.config, &mut self.out.bytes)? {
                Negotiated::Incomplete | Negotiated::Blocked => return Ok(()),
                Negotiated::Aborted => self.draining = true,
                Negotiated::StartTls => {
                    let credentials = context.config.tls.clone().unwrap_or_default();
                    self.tls = Some(Box::new(TlsLayer::server(credentials)));
                    return Ok(());
                }
                Negotiated::Export(export) => {
                    self.inbound.reserve(RECEIVE_BYTES);
                    let memory = context.memory_share(QUOTA_BYTES);
                    let session = Session::new(export, &self.handshake, self.flow, memory);
                    self.session = Some(Box::new(session));
                    self.deadline_ns = NEVER_NS;
                    self.logged_in = true;
                }
            }
        }
        if let Some(session) = &mut self.session
            && session.advance(&mut self.inbound, &mut self.out, context)?
        {
            self.draining = true;
        }
        Ok(())
    }

    /// Whether what arrives can be used.
    fn wants_bytes(&self) -> bool {
        let blocked = match &self.session {
            None => self.handshake.is_blocked(),
            Some(session) => session.is_blocked(),
        };
        !self.draining && !blocked
    }

    /// Whether what was received is not used because others have their turn first.
    fn turn_is_over(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.turn_is_over())
    }

    /// Receives once, into payload and then into `inbound`. Returns the bytes received and the bytes asked
    /// for.
    fn receive_some<S: ByteStream>(
        &mut self,
        stream: &mut S,
    ) -> Result<(usize, usize), CloseReason<NbdViolation>> {
        let payload = self.session.as_mut().and_then(|session| session.payload_mut());
        let payload = payload.unwrap_or_default();
        let of_payload = payload.len();
        let room = self.inbound.room();
        let asked = of_payload + room.len();
        let mut parts = [IoSliceMut::new(payload), IoSliceMut::new(room)];
        let first = usize::from(of_payload == 0);
        let count = CloseReason::check(stream.receive(&mut parts[first..]))?;
        self.received = self.received.wrapping_add(count);
        let direct = count.min(of_payload);
        if let Some(session) = &mut self.session {
            session.payload_received(direct);
        }
        self.inbound.added(count - direct);
        Ok((count, asked))
    }

    /// Receives and handles what the stream has, up to a budget.
    pub(crate) fn receive_bytes<S: ByteStream>(
        &mut self,
        stream: &mut S,
        context: &mut IoContext<'_, NbdCore>,
    ) -> Result<MoreToRead, CloseReason<NbdViolation>> {
        let mut budget = RECEIVE_BUDGET;
        loop {
            self.advance(context).map_err(CloseReason::Protocol)?;
            if !self.wants_bytes() {
                // `resume` reads on.
                return Ok(MoreToRead::No);
            }
            if budget == 0 || self.turn_is_over() {
                return Ok(MoreToRead::Yes);
            }
            let (count, asked) = self.receive_some(stream)?;
            budget = budget.saturating_sub(count);
            if count < asked {
                self.advance(context).map_err(CloseReason::Protocol)?;
                return Ok(if self.turn_is_over() { MoreToRead::Yes } else { MoreToRead::No });
            }
        }
    }

    /// Sends what the stream takes.
    pub(crate) fn flush_bytes<S: ByteStream>(
        &mut self,
        stream: &mut S,
    ) -> Result<(), CloseReason<NbdViolation>> {
        let freed = self.out.send(stream)?;
        if let Some(session) = &mut self.session {
            session.buffers_freed(freed);
        }
        Ok(())
    }
}

impl ProtocolConnection<NbdCore> for NbdConnection {
    fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        scratch: &mut [u8],
        context: &mut IoContext<'_, NbdCore>,
    ) -> Result<MoreToRead, CloseReason<NbdViolation>> {
        if self.tls.is_some() {
            return self.receive_secure(stream, scratch, context);
        }
        self.receive_bytes(stream, context)
    }

    fn resume(
        &mut self,
        context: &mut IoContext<'_, NbdCore>,
    ) -> Result<MoreToRead, CloseReason<NbdViolation>> {
        if let Some(session) = &mut self.session {
            session.resume(&mut self.out, context);
        }
        self.advance(context).map_err(CloseReason::Protocol)?;
        Ok(if self.wants_bytes() { MoreToRead::Yes } else { MoreToRead::No })
    }

    #[inline]
    fn complete(&mut self, tag: u64, completion: bdev::Completion) {
        if let Some(session) = &mut self.session {
            session.complete(tag, completion, &mut self.out);
        }
    }

    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<NbdViolation>> {
        if self.is_secure() {
            return self.flush_secure(stream);
        }
        self.flush_bytes(stream)
    }

    #[inline]
    fn wants_resume(&self) -> bool {
        match &self.session {
            // The answers that blocked the handshake are sent.
            None => !self.draining && self.handshake.is_blocked() && self.out.is_empty(),
            Some(session) => session.wants_resume(self.out.len(), self.draining),
        }
    }

    #[inline]
    fn is_waiting(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.is_waiting())
    }

    #[inline]
    fn is_draining(&self) -> bool {
        self.draining
    }

    fn begin_drain(&mut self) {
        self.draining = true;
        if let Some(session) = &mut self.session {
            session.abandon();
        }
    }

    fn is_drained(&self) -> bool {
        self.out.is_empty()
            && !self.has_unsent_records()
            && self.session.as_ref().is_none_or(|session| session.is_idle())
    }

    fn awaits_login(&self) -> bool {
        true
    }

    #[inline]
    fn take_notice(&mut self) -> Notice {
        Notice { logged_in: std::mem::take(&mut self.logged_in), recheck: false }
    }

    #[inline]
    fn deadline_ns(&self) -> u64 {
        self.deadline_ns
    }

    fn on_deadline(&mut self, _: &mut NbdCore, _now_ns: u64) -> Result<(), CloseReason<NbdViolation>> {
        match self.session {
            None if self.awaits_tls() => Err(CloseReason::Protocol(NbdViolation::TlsTimeout)),
            None => Err(CloseReason::Protocol(NbdViolation::HandshakeTimeout)),
            Some(_) => Ok(()),
        }
    }

    fn object(&self) -> Option<u64> {
        self.export_id()
    }

    fn transfers(&self, report: &mut TransferReport) {
        // The handshake has a time-out of its own.
        let Some(session) = &self.session else { return };
        if !session.is_blocked() && (session.needs_payload() || !self.inbound.filled().is_empty()) {
            report.waits_for_peer(OWED, 0, self.received);
        }
        session.transfers(report);
        self.out.transfers(report);
    }

    fn memory(&mut self) -> Option<&mut MemoryShare> {
        self.session.as_mut().map(|session| session.memory())
    }

    fn work(&self) -> Option<u64> {
        self.movable_work()
    }

    fn begin_move(&mut self) {
        if let Some(session) = &mut self.session {
            session.begin_move();
        }
    }

    fn cancel_move(&mut self) {
        if let Some(session) = &mut self.session {
            session.cancel_move();
        }
    }

    fn is_movable(&self) -> bool {
        self.is_between_cores()
    }

    fn detach(self) -> Option<Reattach<NbdCore>> {
        self.take_apart()
    }
}
