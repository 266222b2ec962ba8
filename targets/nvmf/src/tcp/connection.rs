//! One NVMe/TCP connection of the target: receives PDUs, submits requests to devices, sends PDUs.
//!
//! Sans-IO except for [`NvmfConnection::receive`] and [`NvmfConnection::flush`], which move bytes between
//! the stream and the state machine. The shell's group lends its resources as [`TcpContext`].

use std::sync::Arc;

use block_io::{Completion, Status, Tag};
use nvme_controller::ControllerAssociation;
use nvme_controller::reservation::DrainGuards;
use nvme_tcp::{FlushStatus, PduReceiver, ReceiveProgress, ReceiveStatus, receive_pdus};
use slots::Slot;
use sockets::ByteStream;
use target_shell::{
    CloseReason, MemoryShare, MoreToRead, Notice, ProtocolConnection, Reattach, TransferReport,
};
use tls::TlsLayer;
use wire_nvme::tcp::{FatalError, Framing, PduType, TERM_MAX, TermReq};

use super::handler::PduHandler;
use super::link::{SendingData, TcpLink, TcpLocation};
use super::protocol::{TcpContext, TcpError, TcpProtocol};
use crate::fabrics::{ConnectionRole, FabricsQueue, FabricsTimeout};
use crate::reservation_watch::ReservedConnection;

/// In the identifiers of transfers: what is being sent, and no command.
const SENDING: u64 = 1 << 63;

/// An NVMe/TCP connection, which carries one queue pair.
///
/// It owns the PDU parser and, in [`ConnectionState`], the [`IoQueue`] with the commands in flight and the
/// [`TcpLink`] with the PDUs to send. The shell calls [`receive`](Self::receive) when data arrives,
/// [`resume`](Self::resume) when commands wait for buffers, [`complete`](Self::complete) for each completed
/// device request, and [`flush`](Self::flush) once per poll. The parser and the rest are separate structs
/// because the parser calls back into the state. A read or write allocates nothing unless no buffer is
/// available.
pub(crate) struct NvmfConnection {
    pub(crate) receiver: PduReceiver,
    pub(crate) state: ConnectionState,
    /// The layer below, on a port with TLS.
    pub(crate) tls: Option<Box<TlsLayer>>,
}

/// A connection without its PDU receiver, which calls into this.
pub(crate) struct ConnectionState {
    pub(crate) fabrics: FabricsQueue<TcpLink>,
    /// Digests and alignment of PDUs that are received.
    pub(crate) receive_framing: Framing,
    pub(crate) incoming_pdu: IncomingPdu,
    /// The queue completes its commands to move to another core.
    pub(crate) moving: bool,
    /// The host sent H2CTermReq. The role stays until the connection closes: an I/O queue identifier is in
    /// use while device requests are outstanding, and an admin queue closes its I/O queues.
    pub(crate) terminated: bool,
    /// A capsule was not accepted because others have their turn first.
    pub(crate) turn_is_over: bool,
}

/// The PDU whose data is being received.
#[derive(Clone, Copy, Debug)]
pub(crate) enum IncomingPdu {
    None,
    /// H2CData in response to an R2T, from byte `start` of the command's data.
    Data {
        slot: Slot,
        start: u32,
        length: u32,
    },
    /// In-capsule data; the command's data starts at `offset`.
    Capsule {
        slot: Slot,
        offset: u32,
    },
}

impl ProtocolConnection<TcpProtocol> for NvmfConnection {
    /// Receives and processes PDUs.
    #[inline]
    fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        scratch: &mut [u8],
        context: &mut TcpContext<'_>,
    ) -> Result<MoreToRead, CloseReason<TcpError>> {
        if self.tls.is_some() {
            return self.receive_secure(stream, scratch, context);
        }
        let NvmfConnection { receiver, state, .. } = self;
        let pumped = receive_pdus(receiver, &mut PduHandler::new(state, context), stream, scratch);
        if pumped == Ok(ReceiveStatus::Empty) && self.state.fabrics.link.sender.is_empty() {
            return Ok(MoreToRead::Unchanged);
        }
        self.after(pumped)
    }

    /// Retries ready Copy commands, deferred commands and a capsule that was not accepted.
    fn resume(&mut self, context: &mut TcpContext<'_>) -> Result<MoreToRead, CloseReason<TcpError>> {
        let NvmfConnection { receiver, state, .. } = self;
        // It is received from in the next turn.
        let turn_is_over = state.turn_is_over;
        let mut handler = PduHandler::new(state, context);
        let (queue, mut transport) = handler.io(0);
        queue.retry(&mut transport);
        if turn_is_over || !receiver.is_waiting() {
            handler.state.turn_is_over = turn_is_over;
            return Ok(MoreToRead::No);
        }
        match receiver.resume(&mut handler) {
            Ok(ReceiveProgress::Ready) => self.after(Ok(ReceiveStatus::More)),
            Ok(ReceiveProgress::Waiting) => self.after(Ok(ReceiveStatus::Waiting)),
            Err(fatal) => self.after(Err(fatal)),
        }
    }

    #[inline]
    fn complete(&mut self, tag: u64, completion: Completion<dma::Data>) {
        self.state.fabrics.queue.complete(Tag(tag), completion, &mut self.state.fabrics.link);
    }

    /// Sends queued PDUs until the socket's buffer is full.
    #[inline]
    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<TcpError>> {
        if self.tls.is_some() {
            return self.flush_secure(stream);
        }
        match self.state.fabrics.link.sender.flush(stream, &mut SendingData(&mut self.state.fabrics.queue)) {
            FlushStatus::Empty | FlushStatus::Blocked => Ok(()),
            FlushStatus::Failed(kind) => Err(CloseReason::Network(kind)),
        }
    }

    fn sent(&mut self, tag: u64) {
        let FabricsQueue { link, queue, .. } = &mut self.state.fabrics;
        link.sender.owned_sent(tag, &mut SendingData(queue));
    }

    /// A Copy command's next range can start.
    #[inline]
    fn wants_resume(&self) -> bool {
        self.state.fabrics.queue.has_ready()
    }

    /// A capsule was not accepted, or a command waits for a buffer.
    #[inline]
    fn is_waiting(&self) -> bool {
        (self.receiver.is_waiting() && !self.state.turn_is_over) || self.state.fabrics.queue.is_waiting()
    }

    fn begin_drain(&mut self) {
        self.state.fabrics.begin_drain();
    }

    #[inline]
    fn is_draining(&self) -> bool {
        self.state.fabrics.draining
    }

    /// Whether the commands have completed and everything is sent.
    ///
    /// The drain does not wait for Asynchronous Event Requests, nor for data behind a capsule that is not
    /// accepted any more.
    fn is_drained(&self) -> bool {
        let FabricsQueue { queue, link, .. } = &self.state.fabrics;
        // H2CData that was requested by R2T cannot arrive behind a capsule that is not accepted.
        let stream_blocked = self.receiver.is_waiting();
        let waits_for_host = |location: &TcpLocation| stream_blocked && location.waits_for_host();
        self.state.fabrics.may_close()
            && link.sender.is_empty()
            && !self.has_unsent_records()
            && !queue.has_pending(waits_for_host)
    }

    #[inline]
    fn deadline_ns(&self) -> u64 {
        self.state.fabrics.deadline_ns()
    }

    fn on_deadline(&mut self, protocol: &mut TcpProtocol, now_ns: u64) -> Result<(), CloseReason<TcpError>> {
        let expired = self.state.fabrics.on_deadline(&mut protocol.core, now_ns);
        expired.map_err(|timeout| {
            CloseReason::Protocol(match timeout {
                FabricsTimeout::Handshake if self.awaits_tls() => TcpError::TlsTimeout,
                timeout => TcpError::Timeout(timeout),
            })
        })
    }

    fn object(&self) -> Option<u64> {
        self.state.fabrics.object()
    }

    fn tenant(&self) -> Option<String> {
        self.state.fabrics.tenant()
    }

    fn transfers(&self, report: &mut TransferReport) {
        let state = &self.state;
        let in_capsule = match state.incoming_pdu {
            IncomingPdu::Capsule { slot, .. } => Some(slot),
            _ => None,
        };
        let arrived = |slot, location: &TcpLocation| match location.waits_for_host() {
            true => Some(location.received_bytes as usize),
            false => (Some(slot) == in_capsule).then_some(0),
        };
        state.fabrics.queue.transfers(arrived, report);
        if let Some(position) = state.fabrics.link.sender.position() {
            // It changes with each part that is sent: another transfer, or one that has moved.
            let parts =
                position.unsent_segments << 32 | position.unsent_header_bytes << 8 | position.owned_sends;
            report.waits_for_peer(SENDING | parts as u64, 0, position.front_sent);
        }
    }

    fn memory(&mut self) -> Option<&mut MemoryShare> {
        Some(self.state.fabrics.queue.memory())
    }

    /// The commands whose data is missing fail with Transient Transport Error.
    fn abandon_transfers(&mut self) {
        let FabricsQueue { queue, link, .. } = &mut self.state.fabrics;
        queue.abort_pending(Status::TRANSIENT_TRANSPORT_ERROR, link);
    }

    #[inline]
    fn work(&self) -> Option<u64> {
        self.state.movable_work()
    }

    fn begin_move(&mut self) {
        self.state.begin_move();
    }

    fn cancel_move(&mut self) {
        self.state.cancel_move();
    }

    fn is_movable(&self) -> bool {
        self.state.is_movable() && !self.has_unsent_records()
    }

    fn detach(self) -> Option<Reattach<TcpProtocol>> {
        self.take_apart()
    }

    fn awaits_login(&self) -> bool {
        true
    }

    #[inline]
    fn take_notice(&mut self) -> Notice {
        std::mem::take(&mut self.state.fabrics.notice)
    }

    fn on_close(&mut self) -> bool {
        self.state.fabrics.on_close()
    }
}

impl ReservedConnection for NvmfConnection {
    fn io_association(&self) -> Option<Arc<ControllerAssociation>> {
        self.state.fabrics.io_association()
    }

    fn drain_guards(&mut self) -> &mut DrainGuards {
        &mut self.state.fabrics.drain_guards
    }

    fn on_reservation_change(&mut self, now_ns: u64) {
        self.state.fabrics.on_reservation_change(now_ns);
    }

    fn begin_drain(&mut self) {
        self.state.fabrics.begin_drain();
    }
}

impl NvmfConnection {
    pub(crate) fn new(
        port: nvme_controller::SubsystemPort,
        peer: std::net::SocketAddr,
        flow: u16,
        handshake_deadline_ns: u64,
    ) -> NvmfConnection {
        let role = ConnectionRole::AwaitingIcReq;
        let state = ConnectionState {
            fabrics: FabricsQueue::new(role, TcpLink::new(), port, peer, flow, handshake_deadline_ns),
            receive_framing: Framing::PLAIN,
            incoming_pdu: IncomingPdu::None,
            moving: false,
            terminated: false,
            turn_is_over: false,
        };
        NvmfConnection { receiver: PduReceiver::default(), state, tls: None }
    }

    pub(super) fn after(
        &mut self,
        pumped: Result<ReceiveStatus, FatalError>,
    ) -> Result<MoreToRead, CloseReason<TcpError>> {
        // ICReq changes the framing of both directions, and is processed before the next PDU.
        self.receiver.set_framing(self.state.receive_framing);
        if self.state.terminated {
            return Err(CloseReason::Closed);
        }
        match pumped {
            Ok(ReceiveStatus::Waiting) if self.state.turn_is_over => Ok(MoreToRead::Yes),
            Ok(ReceiveStatus::Empty | ReceiveStatus::Drained | ReceiveStatus::Waiting) => Ok(MoreToRead::No),
            Ok(ReceiveStatus::More) => Ok(MoreToRead::Yes),
            Ok(ReceiveStatus::Closed) => Err(CloseReason::Closed),
            Ok(ReceiveStatus::Failed(kind)) => Err(CloseReason::Network(kind)),
            Err(fatal) => {
                self.terminate(fatal);
                Err(CloseReason::Protocol(TcpError::Violation(fatal)))
            }
        }
    }

    /// Queues C2HTermReq, which reports the fatal error (TCP 1.0, section 3.5.3).
    fn terminate(&mut self, fatal: FatalError) {
        let mut pdu = [0; TERM_MAX];
        let term = TermReq { kind: PduType::C2hTermReq, fatal };
        let length = term.encode(self.receiver.failed_header(), &mut pdu);
        self.state.fabrics.link.sender.push_bytes(&pdu[..length]);
    }
}

impl ConnectionState {
    /// Whether new commands are not accepted: the connection drains or moves, or a reservation change waits
    /// for it.
    #[inline]
    pub(crate) fn is_quiesced(&self) -> bool {
        self.fabrics.draining || !self.fabrics.drain_guards.is_empty() || self.defers_capsules()
    }
}
