//! One NVMe/TCP connection of the target: receives PDUs, submits requests to devices, sends PDUs.
//!
//! Sans-IO except for [`NvmfConnection::receive`] and [`NvmfConnection::flush`], which move bytes between
//! the stream and the state machine. The shell's group lends its resources as [`TcpContext`].

use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;

use block_io::{Completion, Status, Tag};
use nvme_controller::reservation::DrainGuards;
use nvme_controller::{ControllerAssociation, ControllerEvent, IoQueue, SecureChannel};
use nvme_tcp::{FlushStatus, PduReceiver, ReceiveProgress, ReceiveStatus, receive_pdus};
use slots::Slot;
use sockets::ByteStream;
use target_shell::{
    CloseReason, MemoryShare, MoreToRead, NEVER_NS, Notice, ProtocolConnection, Reattach, TransferReport,
};
use tls::TlsLayer;
use wire_nvme::tcp::{FatalError, Framing, PduType, TERM_MAX, TermReq};

use super::authentication::QueueAuthentication;
use super::handler::PduHandler;
use super::link::{SendingData, TcpLink, TcpLocation};
use super::protocol::{TcpContext, TcpError, TcpProtocol};
use super::queue::ConnectionRole;
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
    pub(crate) role: ConnectionRole,
    pub(crate) queue: IoQueue<TcpLocation>,
    pub(crate) link: TcpLink,
    /// Digests and alignment of PDUs that are received.
    pub(crate) receive_framing: Framing,
    pub(crate) incoming_pdu: IncomingPdu,
    /// Flow identifier for fair queueing in the block device layer.
    pub(crate) flow: u16,
    /// The listener that accepted it.
    pub(crate) port: nvme_controller::SubsystemPort,
    /// The host's address.
    pub(crate) peer: std::net::SocketAddr,
    /// Whose key TLS was established with; `None` without TLS.
    pub(crate) secure: Option<Box<SecureChannel>>,
    /// The authentication of the host on this queue; `None` if it has no keys.
    pub(crate) authentication: Option<Box<QueueAuthentication>>,
    /// Deadline of ICReq, then of Connect, then of the authentication.
    pub(crate) handshake_deadline_ns: u64,
    /// Reservation commands of other hosts wait for the outstanding device requests of this connection. No
    /// commands are accepted until those complete.
    pub(crate) drain_guards: DrainGuards,
    /// The connection drains: it accepts no commands, and closes when those in flight have completed.
    pub(crate) draining: bool,
    /// The queue completes its commands to move to another core.
    pub(crate) moving: bool,
    /// The host sent H2CTermReq. The role stays until the connection closes: an I/O queue identifier is in
    /// use while device requests are outstanding, and an admin queue closes its I/O queues.
    pub(crate) terminated: bool,
    /// A capsule was not accepted because others have their turn first.
    pub(crate) turn_is_over: bool,
    /// What the group has to know: Connect succeeded, or this controller's I/O queues are not valid any more.
    pub(crate) notice: Notice,
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
        if pumped == Ok(ReceiveStatus::Empty) && self.state.link.sender.is_empty() {
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
        self.state.queue.complete(Tag(tag), completion, &mut self.state.link);
    }

    /// Sends queued PDUs until the socket's buffer is full.
    #[inline]
    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<TcpError>> {
        if self.tls.is_some() {
            return self.flush_secure(stream);
        }
        match self.state.link.sender.flush(stream, &mut SendingData(&mut self.state.queue)) {
            FlushStatus::Empty | FlushStatus::Blocked => Ok(()),
            FlushStatus::Failed(kind) => Err(CloseReason::Network(kind)),
        }
    }

    fn sent(&mut self, tag: u64) {
        let ConnectionState { link, queue, .. } = &mut self.state;
        link.sender.owned_sent(tag, &mut SendingData(queue));
    }

    /// A Copy command's next range can start.
    #[inline]
    fn wants_resume(&self) -> bool {
        self.state.queue.has_ready()
    }

    /// A capsule was not accepted, or a command waits for a buffer.
    #[inline]
    fn is_waiting(&self) -> bool {
        (self.receiver.is_waiting() && !self.state.turn_is_over) || self.state.queue.is_waiting()
    }

    fn begin_drain(&mut self) {
        self.state.begin_drain();
    }

    #[inline]
    fn is_draining(&self) -> bool {
        self.state.draining
    }

    /// Whether the commands have completed and everything is sent.
    ///
    /// The drain does not wait for Asynchronous Event Requests, nor for data behind a capsule that is not
    /// accepted any more. The admin queue closes last: a host that sees it close gives up its I/O queues.
    fn is_drained(&self) -> bool {
        let ConnectionState { role, queue, link, .. } = &self.state;
        let may_close = match role {
            ConnectionRole::Admin(controller) => controller.association().queues().is_empty(),
            _ => true,
        };
        // H2CData that was requested by R2T cannot arrive behind a capsule that is not accepted.
        let stream_blocked = self.receiver.is_waiting();
        let waits_for_host = |location: &TcpLocation| stream_blocked && location.waits_for_host();
        may_close
            && link.sender.is_empty()
            && !self.has_unsent_records()
            && !queue.has_pending(waits_for_host)
    }

    /// The timeout of the handshake, of the authentication or of Keep Alive. An I/O queue has its
    /// controller's: the controller's core may notice the expiry later than this core resumes.
    #[inline]
    fn deadline_ns(&self) -> u64 {
        match &self.state.role {
            ConnectionRole::Io(queue) => {
                let keep_alive_ns = queue.lease.association().keep_alive_deadline_ns();
                keep_alive_ns.min(self.state.handshake_deadline_ns)
            }
            ConnectionRole::Admin(controller) => {
                controller.deadline().unwrap_or(NEVER_NS).min(self.state.handshake_deadline_ns)
            }
            ConnectionRole::AwaitingIcReq | ConnectionRole::AwaitingConnect => {
                self.state.handshake_deadline_ns
            }
            ConnectionRole::Closed => NEVER_NS,
        }
    }

    fn on_deadline(&mut self, protocol: &mut TcpProtocol, now_ns: u64) -> Result<(), CloseReason<TcpError>> {
        if self.state.handshake_deadline_ns <= now_ns && self.state.resume_authentication(protocol, now_ns) {
            return Ok(());
        }
        match self.state.role {
            ConnectionRole::Admin(_) | ConnectionRole::Io(_)
                if self.state.handshake_deadline_ns <= now_ns =>
            {
                return Err(CloseReason::Protocol(TcpError::AuthenticationTimeout));
            }
            ConnectionRole::Admin(_) => self.state.controller_event(ControllerEvent::Tick, now_ns),
            ConnectionRole::AwaitingIcReq | ConnectionRole::AwaitingConnect
                if self.state.handshake_deadline_ns <= now_ns =>
            {
                let timeout =
                    if self.awaits_tls() { TcpError::TlsTimeout } else { TcpError::HandshakeTimeout };
                return Err(CloseReason::Protocol(timeout));
            }
            ConnectionRole::Io(ref queue) if queue.lease.association().keep_alive_deadline_ns() <= now_ns => {
                return Err(CloseReason::Protocol(TcpError::KeepAliveExpired));
            }
            _ => {}
        }
        Ok(())
    }

    /// The subsystem.
    fn object(&self) -> Option<u64> {
        let association = match &self.state.role {
            ConnectionRole::Admin(controller) => controller.association(),
            ConnectionRole::Io(queue) => queue.lease.association(),
            _ => return None,
        };
        let mut hasher = DefaultHasher::new();
        association.subnqn().hash(&mut hasher);
        Some(hasher.finish())
    }

    fn tenant(&self) -> Option<String> {
        let association = match &self.state.role {
            ConnectionRole::Admin(controller) => controller.association(),
            ConnectionRole::Io(queue) => queue.lease.association(),
            _ => return None,
        };
        Some(association.hostnqn().to_string())
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
        state.queue.transfers(arrived, report);
        if let Some(position) = state.link.sender.position() {
            // It changes with each part that is sent: another transfer, or one that has moved.
            let parts =
                position.unsent_segments << 32 | position.unsent_header_bytes << 8 | position.owned_sends;
            report.waits_for_peer(SENDING | parts as u64, 0, position.front_sent);
        }
    }

    fn memory(&mut self) -> Option<&mut MemoryShare> {
        Some(self.state.queue.memory())
    }

    /// The commands whose data is missing fail with Transient Transport Error.
    fn abandon_transfers(&mut self) {
        let ConnectionState { queue, link, .. } = &mut self.state;
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
        std::mem::take(&mut self.state.notice)
    }

    /// A controller ends with its admin queue, and its I/O queues end with the controller. An I/O queue keeps
    /// its identifier until outstanding device requests complete.
    fn on_close(&mut self) -> bool {
        if let ConnectionRole::Io(queue) = &self.state.role {
            queue.totals.closed(self.state.completed_here());
        }
        let was_admin = matches!(self.state.role, ConnectionRole::Admin(_));
        if was_admin {
            self.state.role = ConnectionRole::Closed;
        }
        was_admin
    }
}

impl ReservedConnection for NvmfConnection {
    fn io_association(&self) -> Option<Arc<ControllerAssociation>> {
        match &self.state.role {
            ConnectionRole::Io(queue) => Some(queue.lease.association().clone()),
            _ => None,
        }
    }

    fn drain_guards(&mut self) -> &mut DrainGuards {
        &mut self.state.drain_guards
    }

    fn on_reservation_change(&mut self, now_ns: u64) {
        self.state.queue.complete_reservations(&mut self.state.link);
        self.state.controller_event(ControllerEvent::ReservationChanged, now_ns);
    }

    fn begin_drain(&mut self) {
        self.state.begin_drain();
    }
}

impl NvmfConnection {
    pub(crate) fn new(
        port: nvme_controller::SubsystemPort,
        peer: std::net::SocketAddr,
        flow: u16,
        handshake_deadline_ns: u64,
    ) -> NvmfConnection {
        let state = ConnectionState {
            role: ConnectionRole::AwaitingIcReq,
            // Before Connect completes, one command at a time.
            queue: IoQueue::new(1, MemoryShare::unlimited(), Rc::default()),
            link: TcpLink::new(),
            receive_framing: Framing::PLAIN,
            incoming_pdu: IncomingPdu::None,
            flow,
            port,
            peer,
            secure: None,
            authentication: None,
            handshake_deadline_ns,
            drain_guards: DrainGuards::default(),
            draining: false,
            moving: false,
            terminated: false,
            turn_is_over: false,
            notice: Notice::default(),
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
        self.state.link.sender.push_bytes(&pdu[..length]);
    }
}

impl ConnectionState {
    /// Whether new commands are not accepted: the connection drains or moves, or a reservation change waits
    /// for it.
    #[inline]
    pub(crate) fn is_quiesced(&self) -> bool {
        self.draining || !self.drain_guards.is_empty() || self.defers_capsules()
    }

    /// Starts to drain: accepts no more commands, and closes when those in flight have completed or after
    /// [`DRAIN_TIMEOUT_NS`](crate::transport::DRAIN_TIMEOUT_NS).
    pub(crate) fn begin_drain(&mut self) {
        self.draining = true;
    }

    /// Drains an I/O queue whose controller is gone; returns whether it is.
    pub(crate) fn drain_if_orphaned(&mut self) -> bool {
        let is_orphaned = matches!(&self.role, ConnectionRole::Io(queue) if !queue.lease.is_valid());
        if is_orphaned {
            self.begin_drain();
        }
        is_orphaned
    }

    /// Commands of the queue that have completed since it is on this core.
    pub(crate) fn completed_here(&self) -> u64 {
        let before = match &self.role {
            ConnectionRole::Io(queue) => queue.completed_before,
            _ => 0,
        };
        self.completed_commands() - before
    }

    /// Commands of the queue that have completed.
    pub(crate) fn completed_commands(&self) -> u64 {
        self.link.stats.commands.saturating_sub(self.queue.in_flight() as u64)
    }

    /// Answers an admin or Connect command without data.
    pub(crate) fn answer(&mut self, slot: Slot, status: Status, result: u64) {
        self.queue.answer(slot, status, result, &mut self.link);
    }
}
