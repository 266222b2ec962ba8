//! One NVMe/TCP connection of the target: receives PDUs, submits requests to devices, sends PDUs.
//!
//! Sans-IO except for [`NvmfConnection::receive`] and [`NvmfConnection::flush`], which move bytes between
//! the stream and the state machine. The shell's group lends its resources as [`TcpContext`].

use block_io::{Completion, Status};
use nvme_controller::ControllerEvent;
use nvme_controller::io::FusedPairing;
use nvme_controller::reservation::{PendingCommands, PendingGuard};
use nvme_tcp::{FlushStatus, PduReceiver, PduSender, ReceiveProgress, ReceiveStatus, receive_pdus};
use slots::Slot;
use sockets::ByteStream;
use target_shell::{CloseReason, MoreToRead, ProtocolConnection};
use wire_nvme::Cqe;
use wire_nvme::digest::crc32c;
use wire_nvme::tcp::{
    C2hData, CapsuleResp, FatalError, Framing, PduType, R2t, SHORT_SIZE, TERM_MAX, TermReq,
};

use crate::command::{CommandData, CommandState, CommandTable, NvmfCommand};
use crate::handler::PduHandler;
use crate::queue::ConnectionRole;
use crate::tcp::{TcpContext, TcpError, TcpProtocol};

/// Maximum time to drain the commands in flight before a queue is closed. Far below the time that hosts wait
/// for a controller to become ready (CAP.TO).
pub(crate) const DRAIN_TIMEOUT_NS: u64 = 3_000_000_000;

/// An NVMe/TCP connection, which carries one queue pair.
///
/// It owns the PDU parser and, in [`ConnectionState`], the commands in flight with their buffers and the
/// PDUs to send. The shell calls [`receive`](Self::receive) when data arrives, [`resume`](Self::resume)
/// when commands wait for buffers, [`ConnectionState::complete`] for each completed device request, and
/// [`flush`](Self::flush) once per poll. The parser and the rest are separate structs because the parser
/// calls back into the state. A read or write allocates nothing unless no buffer is available.
pub(crate) struct NvmfConnection {
    pub(crate) receiver: PduReceiver,
    pub(crate) state: ConnectionState,
}

/// A connection without its PDU receiver, which calls into this.
pub(crate) struct ConnectionState {
    pub(crate) role: ConnectionRole,
    pub(crate) commands: CommandTable,
    pub(crate) sender: PduSender,
    /// Digests and alignment of PDUs that are sent, and of PDUs that are received.
    pub(crate) send_framing: Framing,
    pub(crate) receive_framing: Framing,
    pub(crate) incoming_pdu: IncomingPdu,
    /// Flow identifier for fair queueing in the block device layer.
    pub(crate) flow: u16,
    /// The listener that accepted it.
    pub(crate) port: nvme_controller::SubsystemPort,
    /// The host's address.
    pub(crate) peer: std::net::SocketAddr,
    /// Deadline of ICReq, then of Connect.
    pub(crate) handshake_deadline_ns: u64,
    /// Submission queue entries, and the submission queue head that is reported in SQHD.
    pub(crate) sq_entries: u32,
    pub(crate) sq_head: u16,
    /// The host disabled SQ flow control in Connect: SQHD is not reported.
    pub(crate) sq_flow_control_disabled: bool,
    /// A C2HData PDU with the SUCCESS flag replaces the response capsule of a successful read.
    pub(crate) c2h_success: bool,
    /// Commands deferred until a buffer is available, oldest first.
    pub(crate) deferred: std::collections::VecDeque<Slot>,
    /// The first command of a fused operation, while its second is expected.
    pub(crate) pairing: FusedPairing<Slot>,
    /// Copy commands whose next piece can start.
    pub(crate) ready_copies: Vec<Slot>,
    /// Reservation commands that complete when their drains and file writes are done.
    pub(crate) pending_reservations: PendingCommands<Slot>,
    /// Reservation commands of other hosts wait for the outstanding device requests of this connection. No
    /// commands are accepted until those complete.
    pub(crate) drain_guards: Vec<PendingGuard>,
    /// The connection drains: it accepts no commands, and closes when those in flight have completed.
    pub(crate) draining: bool,
    /// The host sent H2CTermReq. The role stays until the connection closes: an I/O queue identifier is in use
    /// while device requests are outstanding, and an admin queue closes its I/O queues.
    pub(crate) terminated: bool,
    /// All groups must recheck whether this controller's I/O queues are still valid.
    pub(crate) close_io_queues: bool,
    pub(crate) stats: QueueCounters,
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

/// Statistics of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QueueCounters {
    pub(crate) commands: u64,
    pub(crate) errors: u64,
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
        let NvmfConnection { receiver, state } = self;
        let pumped = receive_pdus(receiver, &mut PduHandler { state, context }, stream, scratch);
        self.after(pumped)
    }

    /// Retries ready Copy commands, deferred commands and a capsule that was not accepted.
    fn resume(&mut self, context: &mut TcpContext<'_>) -> Result<MoreToRead, CloseReason<TcpError>> {
        let NvmfConnection { receiver, state } = self;
        let mut handler = PduHandler { state, context };
        handler.advance_copies();
        handler.retry_deferred();
        if !receiver.is_waiting() {
            return Ok(MoreToRead::No);
        }
        match receiver.resume(&mut handler) {
            Ok(ReceiveProgress::Ready) => self.after(Ok(ReceiveStatus::More)),
            Ok(ReceiveProgress::Waiting) => Ok(MoreToRead::No),
            Err(fatal) => self.after(Err(fatal)),
        }
    }

    #[inline]
    fn complete(&mut self, _tag: u32, completion: Completion<dma::Data>) {
        self.state.complete(completion);
    }

    /// Sends queued PDUs until the socket's buffer is full.
    #[inline]
    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<TcpError>> {
        match self.state.sender.flush(stream, &mut self.state.commands) {
            FlushStatus::Empty | FlushStatus::Blocked => Ok(()),
            FlushStatus::Failed(kind) => Err(CloseReason::Network(kind)),
        }
    }

    /// A Copy command's next piece can start.
    #[inline]
    fn wants_resume(&self) -> bool {
        !self.state.ready_copies.is_empty()
    }

    /// A capsule was not accepted, or a command waits for a buffer.
    #[inline]
    fn is_waiting(&self) -> bool {
        self.receiver.is_waiting() || !self.state.deferred.is_empty()
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
        let ConnectionState { role, commands, sender, .. } = &self.state;
        let may_close = match role {
            ConnectionRole::Admin(controller) => controller.association().queues().is_empty(),
            _ => true,
        };
        may_close && sender.is_empty() && !commands.has_pending(self.receiver.is_waiting())
    }

    /// The timeout of the handshake or of Keep Alive.
    #[inline]
    fn deadline_ns(&self) -> u64 {
        match &self.state.role {
            ConnectionRole::Admin(controller) => controller.deadline().unwrap_or(u64::MAX),
            ConnectionRole::AwaitingIcReq | ConnectionRole::AwaitingConnect => {
                self.state.handshake_deadline_ns
            }
            _ => u64::MAX,
        }
    }

    fn on_deadline(&mut self, now_ns: u64) -> Result<(), CloseReason<TcpError>> {
        if matches!(self.state.role, ConnectionRole::Admin(_)) {
            self.state.controller_event(ControllerEvent::Tick, now_ns);
            return Ok(());
        }
        Err(CloseReason::Protocol(TcpError::HandshakeTimeout))
    }

    /// The controller is gone, and its I/O queues with it.
    #[inline]
    fn take_recheck(&mut self) -> bool {
        std::mem::take(&mut self.state.close_io_queues)
    }

    /// A controller ends with its admin queue, and its I/O queues end with the controller. An I/O queue keeps its
    /// identifier until outstanding device requests complete.
    fn on_close(&mut self) -> bool {
        let was_admin = matches!(self.state.role, ConnectionRole::Admin(_));
        if was_admin {
            self.state.role = ConnectionRole::Closed;
        }
        was_admin
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
            commands: CommandTable::new(1),
            sender: PduSender::default(),
            send_framing: Framing::PLAIN,
            receive_framing: Framing::PLAIN,
            incoming_pdu: IncomingPdu::None,
            flow,
            port,
            peer,
            handshake_deadline_ns,
            sq_entries: 1,
            sq_head: 0,
            sq_flow_control_disabled: false,
            c2h_success: false,
            deferred: std::collections::VecDeque::new(),
            pairing: FusedPairing::None,
            ready_copies: Vec::new(),
            pending_reservations: PendingCommands::default(),
            drain_guards: Vec::new(),
            draining: false,
            terminated: false,
            close_io_queues: false,
            stats: QueueCounters::default(),
        };
        NvmfConnection { receiver: PduReceiver::default(), state }
    }

    fn after(
        &mut self,
        pumped: Result<ReceiveStatus, FatalError>,
    ) -> Result<MoreToRead, CloseReason<TcpError>> {
        // ICReq changes the framing of both directions, and is processed before the next PDU.
        self.receiver.set_framing(self.state.receive_framing);
        if self.state.terminated {
            return Err(CloseReason::Closed);
        }
        match pumped {
            Ok(ReceiveStatus::Drained | ReceiveStatus::Waiting) => Ok(MoreToRead::No),
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
        self.state.sender.push_bytes(&pdu[..length]);
    }
}

impl ConnectionState {
    /// The tag of a device request for the command in `slot`: bits 31:16 its generation, bits 15:0 its index.
    #[inline]
    pub(crate) fn tag(&self, slot: Slot) -> block_io::Tag {
        let generation = slot.to_bits() >> 32 & 0xffff;
        block_io::Tag(generation << 16 | u64::from(slot.index()))
    }

    /// The command of a tag; `None` if the tag is stale.
    #[inline]
    pub(crate) fn slot_of(&mut self, tag: block_io::Tag) -> Option<Slot> {
        let (slot, _) = self.commands.by_index(tag.0 as u32 & 0xffff)?;
        (slot.to_bits() >> 32 & 0xffff == tag.0 >> 16 & 0xffff).then_some(slot)
    }

    /// Whether new commands are not accepted: the connection drains, or a reservation change waits for it.
    #[inline]
    pub(crate) fn is_quiesced(&self) -> bool {
        self.draining || !self.drain_guards.is_empty()
    }

    /// Starts to drain: accepts no more commands, and closes when those in flight have completed or after
    /// [`DRAIN_TIMEOUT_NS`].
    pub(crate) fn begin_drain(&mut self) {
        self.draining = true;
    }

    /// Completes pending reservation commands that no longer wait for anything.
    pub(crate) fn complete_pending_reservations(&mut self) {
        while let Some((slot, status)) = self.pending_reservations.pop_completed() {
            self.finish(slot, status, 0);
        }
    }

    /// Queues a response capsule.
    #[inline]
    pub(crate) fn respond(&mut self, cid: u16, status: Status, result: u64) {
        self.stats.errors += u64::from(!status.is_success());
        let mut header = [0; SHORT_SIZE];
        // Without SQ flow control SQHD is reserved and set to all ones (Base 2.0, section 6.3: CATTR).
        let sqhd = if self.sq_flow_control_disabled { 0xffff } else { self.sq_head };
        let cqe = Cqe { sqhd, ..Cqe::new(cid, status).with_result(result) };
        let layout = CapsuleResp { cqe }.encode(&self.send_framing, &mut header);
        self.sender.push_header(&header, &layout);
    }

    /// Completes a command with a response capsule and no data.
    #[inline]
    pub(crate) fn finish(&mut self, slot: Slot, status: Status, result: u64) {
        if let Some(command) = self.commands.get_mut(slot) {
            let cid = command.cid;
            self.commands.remove(slot);
            self.respond(cid, status, result);
        }
    }

    /// Completes a command with C2HData, followed by a response capsule unless the SUCCESS flag replaces it.
    #[inline]
    pub(crate) fn finish_with_data(&mut self, slot: Slot, data: CommandData, result: u64) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let length = (data.as_slice().len() as u32).min(command.length);
        if length == 0 {
            return self.finish(slot, Status::SUCCESS, result);
        }
        let cid = command.cid;
        command.state = CommandState::SendingData;
        let success = self.c2h_success && result == 0;
        let mut header = [0; SHORT_SIZE];
        let pdu = C2hData { cccid: cid, offset: 0, length, last: true, success };
        let layout = pdu.encode(&self.send_framing, &mut header);
        self.sender.push_header(&header, &layout);
        self.sender.push_data(slot.index(), 0, length, true);
        if layout.data_digest {
            self.sender.push_bytes(&crc32c(&data.as_slice()[..length as usize]).to_le_bytes());
        }
        command.data = data;
        if !success {
            self.respond(cid, Status::SUCCESS, result);
        }
    }

    /// Queues an R2T for all of a command's data.
    pub(crate) fn send_r2t(&mut self, slot: Slot, cid: u16, length: u32) {
        let mut header = [0; SHORT_SIZE];
        let pdu = R2t { cccid: cid, ttag: slot.index() as u16, offset: 0, length };
        let layout = pdu.encode(&self.send_framing, &mut header);
        self.sender.push_header(&header, &layout);
    }

    /// Handles the completion of a device request of this connection.
    #[inline]
    pub(crate) fn complete(&mut self, completion: Completion<dma::Data>) {
        // Stale only if the command was aborted; its buffer returns to the pool.
        let Some(slot) = self.slot_of(completion.tag()) else { return };
        let status = completion.status();
        let Some(command) = self.commands.get_mut(slot) else { return };
        match &mut command.state {
            CommandState::Read => match crate::command::into_buffer(completion) {
                Some(buffer) if status.is_success() => {
                    self.finish_with_data(slot, CommandData::Buffer(buffer), 0)
                }
                _ => self.finish(slot, status, 0),
            },
            CommandState::Submitted { remaining, status: first_error } => {
                if first_error.is_success() {
                    *first_error = status;
                }
                *remaining -= 1;
                let (remaining, first_error) = (*remaining, *first_error);
                if remaining == 0 {
                    self.finish(slot, first_error, 0);
                }
            }
            CommandState::CopyInProgress { copying, has_read } if status.is_success() => {
                if *has_read {
                    copying.complete_piece();
                }
                *has_read = !*has_read;
                command.data =
                    crate::command::into_buffer(completion).map_or(CommandData::None, CommandData::Buffer);
                self.ready_copies.push(slot);
            }
            CommandState::CopyInProgress { copying, .. } => {
                let range = copying.first_incomplete_range().into();
                self.finish(slot, status, range);
            }
            _ => self.finish(slot, status, 0),
        }
    }

    pub(crate) fn new_command(
        &mut self,
        cid: u16,
        work: CommandState,
        data: CommandData,
        length: u32,
    ) -> Slot {
        self.commands.insert(NvmfCommand::new(cid, work, data, length))
    }
}
