//! Processes PDUs from a host.
//!
//! This layer validates what the transport defines: PDU types and sequence, lengths, offsets and transfer
//! tags. [`controller`] validates and executes the commands.

use block_io::Status;
use nvme_controller::sgl::{self, DataSource};
use nvme_tcp::{DataPlacement, PduConsumer};
use slots::Slot;
use wire_nvme::Sqe;
use wire_nvme::fabrics::fabrics_type;
use wire_nvme::opcode::{FABRICS, FabricsType};
use wire_nvme::tcp::{
    CapsuleCmd, FatalError, FatalStatus, Framing, H2cData, IC_SIZE, IcReq, IcResp, PduLayout, PduType,
    SHORT_SIZE,
};

use crate::command::{CommandData, CommandState};
use crate::connection::{ConnectionState, IncomingPdu};
use crate::queue::ConnectionRole;
use crate::tcp::TcpContext;

/// A connection while received data is processed, with the resources that its poll group lends it.
pub(crate) struct PduHandler<'a, 'b> {
    pub(crate) state: &'a mut ConnectionState,
    pub(crate) context: &'a mut TcpContext<'b>,
}

/// Connect has 1024 bytes of data; before Connect no larger capsule is accepted.
const BEFORE_CONNECT_BYTES_MAX: u32 = wire_nvme::fabrics::CONNECT_DATA_SIZE as u32;

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
        if matches!(self.state.role, ConnectionRole::AwaitingIcReq) {
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
        let (slot, start) = match self.state.incoming_pdu {
            IncomingPdu::Data { slot, start, .. } => (slot, start),
            IncomingPdu::Capsule { slot, .. } => (slot, 0),
            IncomingPdu::None => return &mut [],
        };
        let Some(command) = self.state.commands.get_mut(slot) else { return &mut [] };
        let start = start as usize + offset;
        &mut command.data.as_mut_slice()[start..start + length]
    }

    #[inline]
    fn pdu_complete(&mut self, digest_ok: bool) -> Result<(), FatalError> {
        match std::mem::replace(&mut self.state.incoming_pdu, IncomingPdu::None) {
            IncomingPdu::None => {}
            IncomingPdu::Data { slot, start, length } => {
                self.h2c_data_received(slot, start + length, digest_ok)
            }
            IncomingPdu::Capsule { slot, offset, .. } => {
                self.capsule_data_received(slot, offset as usize, digest_ok)
            }
        }
        Ok(())
    }
}

impl PduHandler<'_, '_> {
    /// Answers ICReq and negotiates digests, alignment and MAXH2CDATA (TCP 1.0, section 3.5.1).
    fn initialize(&mut self, header: &[u8; IC_SIZE]) -> Result<DataPlacement, FatalError> {
        let request = IcReq::decode(header)?;
        let limits = &self.context.protocol.limits;
        let response = IcResp {
            controller_data_alignment_bytes: 4,
            header_digest: request.header_digest && limits.header_digest,
            data_digest: request.data_digest && limits.data_digest,
            h2c_data_max_bytes: limits.controller.transfer_max_bytes,
        };
        let mut pdu = [0; IC_SIZE];
        response.encode(&mut pdu);
        self.state.sender.push_bytes(&pdu);
        let framing = |data_alignment_bytes| Framing {
            header_digest: response.header_digest,
            data_digest: response.data_digest,
            data_alignment_bytes,
        };
        self.state.send_framing = framing(request.host_data_alignment_bytes);
        self.state.receive_framing = framing(response.controller_data_alignment_bytes);
        self.state.role = ConnectionRole::AwaitingConnect;
        self.state.handshake_deadline_ns = self.context.now_ns + limits.connect_timeout_ns;
        Ok(DataPlacement::Discard)
    }

    /// Processes the header of a command capsule.
    #[inline]
    fn capsule(&mut self, sqe: Sqe, layout: &PduLayout) -> Result<DataPlacement, FatalError> {
        if self.state.commands.is_full() {
            // A slot is freed before the host learns of it, so this host has sent more commands than its queue
            // holds. Blocking the stream instead would leave data that could free a slot, and the end of the
            // stream, unread behind this command.
            return Err(FatalError::from_status(FatalStatus::SequenceError));
        }
        if self.state.sender.header_bytes() > SEND_QUEUE_BYTES_MAX || self.state.is_quiesced() {
            return Ok(DataPlacement::Wait);
        }
        if layout.data_length > self.capsule_bytes_max() {
            return Err(FatalError::from_status(FatalStatus::LimitExceeded));
        }
        let result = match &self.state.role {
            ConnectionRole::Io(_) => self.io_command(&sqe, layout.data_length),
            _ => self.admin_or_fabrics(&sqe, layout.data_length),
        };
        if let Err(status) = result {
            self.consume_sq_entry();
            self.state.respond(sqe.cid, status, 0);
        }
        let has_data = matches!(self.state.incoming_pdu, IncomingPdu::Capsule { .. });
        Ok(if has_data { DataPlacement::Buffer } else { DataPlacement::Discard })
    }

    /// Maximum bytes of in-capsule data in the current role.
    fn capsule_bytes_max(&self) -> u32 {
        match self.state.role {
            ConnectionRole::AwaitingConnect => BEFORE_CONNECT_BYTES_MAX,
            // Hosts may assume 8192 for the admin queue (TCP 1.0, section 3.3.2.2).
            ConnectionRole::Admin(_) => 8192,
            _ => self.context.protocol.limits.controller.in_capsule_bytes.max(BEFORE_CONNECT_BYTES_MAX),
        }
    }

    /// Advances the submission queue head (SQHD). Called once for each command.
    #[inline]
    pub(crate) fn consume_sq_entry(&mut self) {
        self.state.stats.commands += 1;
        let next = u32::from(self.state.sq_head) + 1;
        self.state.sq_head = if next == self.state.sq_entries { 0 } else { next as u16 };
    }

    /// An admin or Fabrics command: executed when all its data has been received. Uncommon.
    fn admin_or_fabrics(&mut self, sqe: &Sqe, capsule_bytes: u32) -> Result<(), Status> {
        let expected = match &self.state.role {
            ConnectionRole::AwaitingConnect if is_connect(sqe) => BEFORE_CONNECT_BYTES_MAX,
            ConnectionRole::AwaitingConnect => return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
            _ => nvme_controller::data_from_host(sqe),
        };
        if expected == 0 {
            let slot = self.new_admin_or_connect(sqe, Vec::new());
            self.consume_sq_entry();
            self.execute(slot);
            return Ok(());
        }
        let source = sgl::from_host(sqe.data, capsule_bytes)?;
        if source.length() != expected {
            return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
        }
        self.consume_sq_entry();
        match source {
            // All in-capsule data is received; then the range that the descriptor names is extracted.
            DataSource::Capsule { offset, .. } => {
                let slot = self.new_admin_or_connect(sqe, vec![0; capsule_bytes as usize]);
                self.state.incoming_pdu = IncomingPdu::Capsule { slot, offset };
            }
            DataSource::Transport { length } => {
                let slot = self.new_admin_or_connect(sqe, vec![0; length as usize]);
                if let Some(command) = self.state.commands.get_mut(slot) {
                    command.requested_bytes = length;
                }
                self.state.send_r2t(slot, sqe.cid, length);
            }
        }
        Ok(())
    }

    fn new_admin_or_connect(&mut self, sqe: &Sqe, bytes: Vec<u8>) -> Slot {
        let length = sqe.data.length();
        let data = if bytes.is_empty() { CommandData::None } else { CommandData::Bytes(bytes) };
        self.state.new_command(sqe.cid, CommandState::AdminOrConnect(Box::new(*sqe)), data, length)
    }

    /// H2CData in response to an R2T (TCP 1.0, section 3.3.2.2).
    fn h2c_data(&mut self, pdu: &H2cData, layout: &PduLayout) -> Result<DataPlacement, FatalError> {
        let limits = &self.context.protocol.limits.controller;
        let Some((slot, command)) = self.state.commands.by_index(pdu.ttag.into()) else {
            return Err(FatalError::field(10));
        };
        if command.cid != pdu.cccid {
            return Err(FatalError::field(8));
        }
        if command.received_bytes == command.requested_bytes {
            return Err(FatalError::field(10));
        }
        if pdu.length != layout.data_length {
            return Err(FatalError::field(16));
        }
        if pdu.length > limits.transfer_max_bytes {
            return Err(FatalError::from_status(FatalStatus::LimitExceeded));
        }
        let remaining = command.requested_bytes - command.received_bytes;
        if pdu.offset != command.received_bytes || pdu.length > remaining {
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
        let Some(command) = self.state.commands.get_mut(slot) else { return };
        command.received_bytes = end;
        command.data_digest_error |= !digest_ok;
        if end == command.requested_bytes {
            let corrupt = command.data_digest_error;
            self.data_complete(slot, !corrupt);
        }
    }

    /// In-capsule data has been received; the command's data starts at `offset`.
    #[inline]
    fn capsule_data_received(&mut self, slot: Slot, offset: usize, digest_ok: bool) {
        if offset > 0
            && let Some(command) = self.state.commands.get_mut(slot)
        {
            let length = command.length as usize;
            command.data.as_mut_slice().copy_within(offset..offset + length, 0);
        }
        self.data_complete(slot, digest_ok);
    }

    #[inline]
    fn data_complete(&mut self, slot: Slot, digest_ok: bool) {
        let Some(command) = self.state.commands.get_mut(slot) else { return };
        if !digest_ok {
            // A data digest error fails only the command (TCP 1.0, section 3.3.1.2), with a status that
            // allows a retry.
            self.half_failed(slot);
            return self.state.finish(slot, Status::TRANSIENT_TRANSPORT_ERROR, 0);
        }
        command.data.truncate(command.length as usize);
        self.execute(slot);
    }
}

fn is_connect(sqe: &Sqe) -> bool {
    sqe.opcode == FABRICS && fabrics_type(sqe) == Ok(FabricsType::Connect)
}
