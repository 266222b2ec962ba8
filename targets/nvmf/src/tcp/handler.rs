//! Processes PDUs from a host.
//!
//! This layer validates what the transport defines: PDU types and sequence, lengths, offsets and transfer
//! tags. [`controller`] validates and executes the commands.

use std::io::IoSliceMut;

use block_io::Status;
use nvme_controller::IoQueue;
use nvme_controller::io_queue::CommandToken;
use nvme_controller::sgl;
use nvme_tcp::{DataParts, DataPlacement, PduConsumer};
use slots::Slot;
use target_shell::{TURN_COMMAND_BYTES, turn_cost};
use wire_nvme::Sqe;
use wire_nvme::tcp::{
    CapsuleCmd, FatalError, FatalStatus, Framing, H2cData, IC_SIZE, IcReq, IcResp, PduLayout, PduType,
    SHORT_SIZE,
};

use super::connection::{ConnectionState, IncomingPdu};
use super::link::{TcpLocation, TcpTransport};
use super::protocol::TcpContext;
use crate::fabrics::{
    BEFORE_CONNECT_BYTES_MAX, ConnectionRole, FabricsLink, FabricsQueue, is_authentication,
};

/// A connection while received data is processed, with the resources that its poll group lends it.
pub(crate) struct PduHandler<'a, 'b> {
    pub(crate) state: &'a mut ConnectionState,
    pub(crate) context: &'a mut TcpContext<'b>,
    /// Slots for commands that stay free in this turn.
    pub(crate) reserved_slots: usize,
}

/// Maximum bytes of queued responses and R2Ts; above it, no command is accepted until the host has read
/// some. A full queue of 4096 entries needs 56 bytes each, so only hosts that do not read reach it.
const SEND_QUEUE_BYTES_MAX: usize = 256 << 10;

impl PduConsumer for PduHandler<'_, '_> {
    #[inline]
    fn header(
        &mut self,
        kind: PduType,
        header: &[u8],
        layout: &PduLayout,
    ) -> Result<DataPlacement, FatalError> {
        self.state.incoming_pdu = IncomingPdu::None;
        self.state.terminated |= kind == PduType::H2cTermReq;
        if self.state.terminated {
            return Ok(DataPlacement::Discard);
        }
        if matches!(self.state.fabrics.role, ConnectionRole::AwaitingIcReq) {
            return match (kind, header.first_chunk::<IC_SIZE>()) {
                (PduType::IcReq, Some(header)) => self.initialize(header),
                _ => Err(FatalError::from_status(FatalStatus::SequenceError)),
            };
        }
        match kind {
            PduType::CapsuleCmd => {
                let header = header.first_chunk().expect("the layout has validated the header's length");
                self.capsule(CapsuleCmd::decode(header), layout)
            }
            PduType::H2cData => {
                let header =
                    header.first_chunk::<SHORT_SIZE>().expect("the layout has validated the header's length");
                self.h2c_data(&H2cData::decode(header), layout)
            }
            PduType::IcReq => Err(FatalError::from_status(FatalStatus::SequenceError)),
            // Only controllers send the other types (TCP 1.0, section 3.6.1).
            _ => Err(FatalError::field(0)),
        }
    }

    #[inline]
    fn data_buffer(&mut self, offset: usize, length: usize) -> &mut [u8] {
        let Some((slot, start)) = self.receiving_at(offset) else { return &mut [] };
        self.state.fabrics.queue.data_mut(slot).map(|data| data.part_mut(start, length)).unwrap_or_default()
    }

    fn data_buffers<'c>(&'c mut self, offset: usize, length: usize, parts: &mut DataParts<'c>) {
        let Some((slot, start)) = self.receiving_at(offset) else { return };
        let Some(data) = self.state.fabrics.queue.data_mut(slot) else { return };
        let slices = data.parts_mut(start, length).take(parts.remaining_capacity());
        parts.extend(slices.map(IoSliceMut::new));
    }

    #[inline]
    fn pdu_complete(&mut self, digest_ok: bool) -> Result<(), FatalError> {
        match std::mem::replace(&mut self.state.incoming_pdu, IncomingPdu::None) {
            IncomingPdu::None => {}
            IncomingPdu::Data { slot, start, length } => {
                self.h2c_data_received(slot, start + length, digest_ok)
            }
            IncomingPdu::Capsule { slot, offset, .. } => self.data_received(slot, offset as usize, digest_ok),
        }
        Ok(())
    }
}

impl<'a, 'b> PduHandler<'a, 'b> {
    /// Begins the connection's turn.
    #[inline]
    pub(crate) fn new(state: &'a mut ConnectionState, context: &'a mut TcpContext<'b>) -> PduHandler<'a, 'b> {
        state.turn_is_over = false;
        let reserved_slots = state.fabrics.queue.free_slots().saturating_sub(context.turn_commands());
        PduHandler { state, context, reserved_slots }
    }
}

impl<'b> PduHandler<'_, 'b> {
    /// The command whose data is being received, and where in its memory the byte at `offset` of the PDU's
    /// data goes.
    #[inline]
    fn receiving_at(&self, offset: usize) -> Option<(Slot, usize)> {
        match self.state.incoming_pdu {
            IncomingPdu::Data { slot, start, .. } => Some((slot, start as usize + offset)),
            IncomingPdu::Capsule { slot, .. } => Some((slot, offset)),
            IncomingPdu::None => None,
        }
    }

    /// The queue, and what it executes commands with. `capsule_bytes` is the length of in-capsule data.
    #[inline(always)]
    pub(crate) fn io(&mut self, capsule_bytes: u32) -> (&mut IoQueue<TcpLocation>, TcpTransport<'_, 'b>) {
        let ConnectionState { fabrics, incoming_pdu, .. } = &mut *self.state;
        let FabricsQueue { queue, link, draining, flow, .. } = fabrics;
        let context = &mut *self.context;
        (queue, TcpTransport { link, incoming_pdu, draining, context, flow: *flow, capsule_bytes })
    }

    /// Answers ICReq and negotiates digests, alignment and MAXH2CDATA (TCP 1.0, section 3.5.1).
    fn initialize(&mut self, header: &[u8; IC_SIZE]) -> Result<DataPlacement, FatalError> {
        let request = IcReq::decode(header)?;
        let limits = &self.context.protocol.limits;
        let response = IcResp {
            controller_data_alignment_bytes: 4,
            header_digest: request.header_digest && limits.header_digest,
            data_digest: request.data_digest && limits.data_digest,
            h2c_data_max_bytes: self.context.protocol.core.limits.controller.transfer_max_bytes,
        };
        let mut pdu = [0; IC_SIZE];
        response.encode(&mut pdu);
        self.state.fabrics.link.sender.push_bytes(&pdu);
        let framing = |data_alignment_bytes| Framing {
            header_digest: response.header_digest,
            data_digest: response.data_digest,
            data_alignment_bytes,
        };
        self.state.fabrics.link.framing = framing(request.host_data_alignment_bytes);
        self.state.fabrics.link.c2h_success = limits.c2h_success;
        self.state.receive_framing = framing(response.controller_data_alignment_bytes);
        self.state.fabrics.role = ConnectionRole::AwaitingConnect;
        let connect_timeout_ns = self.context.protocol.core.limits.connect_timeout_ns;
        self.state.fabrics.handshake_deadline_ns = self.context.now_ns + connect_timeout_ns;
        Ok(DataPlacement::Discard)
    }

    /// Processes the header of a command capsule.
    #[inline]
    fn capsule(&mut self, sqe: Sqe, layout: &PduLayout) -> Result<DataPlacement, FatalError> {
        if self.state.fabrics.queue.free_slots() <= self.reserved_slots {
            return self.without_slot();
        }
        if self.state.fabrics.link.sender.header_bytes() > SEND_QUEUE_BYTES_MAX || self.state.is_quiesced() {
            return Ok(DataPlacement::Wait);
        }
        if layout.data_length > self.capsule_bytes_max() {
            return Err(FatalError::from_status(FatalStatus::LimitExceeded));
        }
        if u64::from(sqe.data.length()) > TURN_COMMAND_BYTES {
            self.count_data(sqe.data.length());
        }
        if self.state.fabrics.waits_for_answers() {
            return Ok(DataPlacement::Wait);
        }
        self.state.fabrics.link.responses.consume_sq_entry();
        let authenticates = self.state.fabrics.authentication.is_some();
        let is_rejected = authenticates && self.state.fabrics.rejects_unauthenticated(&sqe);
        match &self.state.fabrics.role {
            _ if is_rejected => {}
            ConnectionRole::Io(_) if !(authenticates && is_authentication(&sqe)) => {
                let (queue, mut transport) = self.io(layout.data_length);
                queue.command(CommandToken::new(sqe.cid), &sqe, &mut transport);
            }
            _ => self.admin_or_fabrics(&sqe, layout.data_length),
        }
        let has_data = matches!(self.state.incoming_pdu, IncomingPdu::Capsule { .. });
        Ok(if has_data { DataPlacement::Buffer } else { DataPlacement::Discard })
    }

    /// A command has more data than one command of a turn.
    #[cold]
    fn count_data(&mut self, bytes: u32) {
        if self.context.is_turn_shared() {
            // The command itself takes a slot.
            self.reserved_slots += turn_cost(bytes.into()) as usize - 1;
        }
    }

    /// There is no slot for a command, or none in this turn.
    #[cold]
    fn without_slot(&mut self) -> Result<DataPlacement, FatalError> {
        if self.state.fabrics.queue.free_slots() > 0 {
            self.state.turn_is_over = true;
            return Ok(DataPlacement::Wait);
        }
        if self.state.fabrics.link.sender.owned_sends() > 0 {
            // The host has received data whose slot the kernel's notification frees, whatever follows in the
            // stream.
            return Ok(DataPlacement::Wait);
        }
        // A slot is freed before the host learns of it, so this host has sent more commands than its queue
        // holds. Blocking the stream instead would leave data that could free a slot, and the end of the
        // stream, unread behind this command.
        Err(FatalError::from_status(FatalStatus::SequenceError))
    }

    /// Accepts an admin or Fabrics command, which is executed when all its data has been received.
    fn admin_or_fabrics(&mut self, sqe: &Sqe, capsule_bytes: u32) {
        let token = CommandToken::new(sqe.cid);
        let bytes = match self.state.fabrics.admin_bytes(sqe, |sqe| sgl::to_host(sqe.data)) {
            Ok(bytes) => bytes,
            Err(status) => return self.state.fabrics.link.respond(token.answered(), status, 0),
        };
        let (queue, mut transport) = self.io(capsule_bytes);
        let ready = queue.admin_command(token, sqe, bytes, &mut transport);
        self.state.fabrics.execute(ready, self.context);
    }

    /// Maximum bytes of in-capsule data in the current role.
    fn capsule_bytes_max(&self) -> u32 {
        match self.state.fabrics.role {
            ConnectionRole::AwaitingConnect => BEFORE_CONNECT_BYTES_MAX,
            // Hosts may assume 8192 for the admin queue (TCP 1.0, section 3.3.2.2).
            ConnectionRole::Admin(_) => 8192,
            _ if self.state.fabrics.authentication.is_some() => self
                .context
                .protocol
                .core
                .limits
                .controller
                .in_capsule_bytes
                .max(wire_nvme::auth::AUTH_MESSAGE_MAX as u32),
            _ => self.context.protocol.core.limits.controller.in_capsule_bytes.max(BEFORE_CONNECT_BYTES_MAX),
        }
    }

    /// H2CData in response to an R2T (TCP 1.0, section 3.3.2.2).
    fn h2c_data(&mut self, pdu: &H2cData, layout: &PduLayout) -> Result<DataPlacement, FatalError> {
        let limits = &self.context.protocol.core.limits.controller;
        let Some((slot, cid, location)) = self.state.fabrics.queue.receiving(pdu.ttag.into()) else {
            return Err(FatalError::field(10));
        };
        if cid != pdu.cccid {
            return Err(FatalError::field(8));
        }
        if !location.waits_for_host() {
            return Err(FatalError::field(10));
        }
        if pdu.length != layout.data_length {
            return Err(FatalError::field(16));
        }
        if pdu.length > limits.transfer_max_bytes {
            return Err(FatalError::from_status(FatalStatus::LimitExceeded));
        }
        let remaining = location.requested_bytes - location.received_bytes;
        if pdu.offset != location.received_bytes || pdu.length > remaining {
            return Err(FatalError::from_status(FatalStatus::DataOutOfRange));
        }
        if pdu.last != (pdu.length == remaining) {
            return Err(FatalError::field(1));
        }
        self.state.incoming_pdu = IncomingPdu::Data { slot, start: pdu.offset, length: pdu.length };
        Ok(DataPlacement::Buffer)
    }

    /// H2CData has been received up to byte `end` of the command's data.
    fn h2c_data_received(&mut self, slot: Slot, end: u32, digest_ok: bool) {
        let Some((_, _, location)) = self.state.fabrics.queue.receiving(slot.index()) else { return };
        location.received_bytes = end;
        location.data_digest_error |= !digest_ok;
        if !location.waits_for_host() {
            let digest_ok = !location.data_digest_error;
            self.data_received(slot, 0, digest_ok);
        }
    }

    /// All data of a command has been received, from byte `offset` of its memory.
    #[inline]
    fn data_received(&mut self, slot: Slot, offset: usize, digest_ok: bool) {
        // A data digest error fails only the command (TCP 1.0, section 3.3.1.2), with a status that allows a
        // retry.
        let received = match digest_ok {
            true => self.state.fabrics.accepts_data().map(|()| offset),
            false => Err(Status::TRANSIENT_TRANSPORT_ERROR),
        };
        let (queue, mut transport) = self.io(0);
        let ready = queue.data_received(slot, received, &mut transport);
        if ready.is_some() {
            self.state.fabrics.execute(ready, self.context);
        }
    }
}
