//! PDUs from a host, one at a time.
//!
//! What is checked here is the transport's: types and sequence of PDUs, lengths, offsets, tags. What
//! a command means is [`controller`]'s to say.

use controller::sgl::{self, Source};
use nvme_tcp::{Consumer, Place};
use ring::Status;
use slots::Slot;
use wire_nvme::Sqe;
use wire_nvme::fabrics::fabrics_type;
use wire_nvme::opcode::{FABRICS, FabricsType};
use wire_nvme::tcp::{
    CapsuleCmd, Fatal, FatalStatus, Framing, H2cData, IC_SIZE, IcReq, IcResp, Layout, PduType, SHORT_SIZE,
};

use crate::command::{Data, Work};
use crate::connection::{Current, State};
use crate::group::Lent;
use crate::queue::Role;

/// A connection while bytes are taken in, with what its core lends it.
pub(crate) struct Handler<'a, 'b> {
    pub(crate) state: &'a mut State,
    pub(crate) lent: &'a mut Lent<'b>,
}

/// Connect has 1024 bytes of data; before it no more are taken in.
const BEFORE_CONNECT_BYTES_MAX: u32 = wire_nvme::fabrics::CONNECT_DATA_SIZE as u32;

/// Responses and R2Ts that wait to be sent; beyond, no command is taken until the host has read some.
/// A full queue of 4096 entries needs 56 bytes each, so that only hosts that do not read meet it.
const ANSWER_BYTES_MAX: usize = 256 << 10;

impl Consumer for Handler<'_, '_> {
    #[inline]
    fn header(&mut self, kind: PduType, header: &[u8], layout: &Layout) -> Result<Place, Fatal> {
        self.state.current = Current::None;
        self.state.terminated |= kind == PduType::H2cTermReq;
        if self.state.terminated {
            return Ok(Place::Nowhere);
        }
        if matches!(self.state.role, Role::AwaitingIcReq) {
            return match (kind, header.first_chunk::<IC_SIZE>()) {
                (PduType::IcReq, Some(header)) => self.initialize(header),
                _ => Err(Fatal::of(FatalStatus::SequenceError)),
            };
        }
        match kind {
            PduType::CapsuleCmd => {
                let header = header.first_chunk().expect("the layout gave this header its length");
                self.capsule(CapsuleCmd::decode(header), layout)
            }
            PduType::H2cData => {
                let header =
                    header.first_chunk::<SHORT_SIZE>().expect("the layout gave this header its length");
                self.host_data(&H2cData::decode(header), layout)
            }
            PduType::IcReq => Err(Fatal::of(FatalStatus::SequenceError)),
            // Only controllers send the others (TCP 1.0, section 3.6.1).
            _ => Err(Fatal::field(0)),
        }
    }

    #[inline]
    fn place(&mut self, offset: usize, length: usize) -> &mut [u8] {
        let (slot, start) = match self.state.current {
            Current::Data { slot, start, .. } => (slot, start),
            Current::Capsule { slot, .. } => (slot, 0),
            Current::None => return &mut [],
        };
        let Some(command) = self.state.commands.get_mut(slot) else { return &mut [] };
        let start = start as usize + offset;
        &mut command.data.as_mut_slice()[start..start + length]
    }

    #[inline]
    fn end(&mut self, digest_ok: bool) -> Result<(), Fatal> {
        match std::mem::replace(&mut self.state.current, Current::None) {
            Current::None => {}
            Current::Data { slot, start, length } => self.arrived(slot, start + length, digest_ok),
            Current::Capsule { slot, offset, .. } => self.capsule_arrived(slot, offset as usize, digest_ok),
        }
        Ok(())
    }
}

impl Handler<'_, '_> {
    /// TCP 1.0, section 3.5.1: the first PDU says what both sides are capable of.
    fn initialize(&mut self, header: &[u8; IC_SIZE]) -> Result<Place, Fatal> {
        let request = IcReq::decode(header)?;
        let limits = &self.lent.shared.limits;
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
        self.state.outgoing = framing(request.host_data_alignment_bytes);
        self.state.incoming = framing(response.controller_data_alignment_bytes);
        self.state.role = Role::AwaitingConnect;
        self.state.deadline_ns = self.lent.now_ns + limits.connect_timeout_ns;
        Ok(Place::Nowhere)
    }

    /// A command.
    #[inline]
    fn capsule(&mut self, sqe: Sqe, layout: &Layout) -> Result<Place, Fatal> {
        if self.state.commands.is_full() {
            // A slot is free again before the host can know of it: this host sends more than its queue
            // holds. Waiting would leave the data that could free a slot, and the end of the stream,
            // unread behind this command.
            return Err(Fatal::of(FatalStatus::SequenceError));
        }
        if self.state.sender.small_bytes() > ANSWER_BYTES_MAX || self.state.takes_nothing() {
            return Ok(Place::Wait);
        }
        if layout.data_length > self.capsule_bytes_max() {
            return Err(Fatal::of(FatalStatus::LimitExceeded));
        }
        let taken = match &self.state.role {
            Role::Io(_) => self.io(&sqe, layout.data_length),
            _ => self.control(&sqe, layout.data_length),
        };
        if let Err(status) = taken {
            self.take_entry();
            self.state.respond(sqe.cid, status, 0);
        }
        let here = matches!(self.state.current, Current::Capsule { .. });
        Ok(if here { Place::Here } else { Place::Nowhere })
    }

    /// Most data that a capsule may carry now.
    fn capsule_bytes_max(&self) -> u32 {
        match self.state.role {
            Role::AwaitingConnect => BEFORE_CONNECT_BYTES_MAX,
            // 8192 is what hosts may assume for the admin queue (TCP 1.0, section 3.3.2.2).
            Role::Admin(_) => 8192,
            _ => self.lent.shared.limits.controller.in_capsule_bytes.max(BEFORE_CONNECT_BYTES_MAX),
        }
    }

    /// A submission queue entry is taken. Call it once for each command.
    #[inline]
    pub(crate) fn take_entry(&mut self) {
        self.state.stats.commands += 1;
        let next = u32::from(self.state.head) + 1;
        self.state.head = if next == self.state.entries { 0 } else { next as u16 };
    }

    /// A command of the admin queue, or a fabrics command: rare, and handled as a whole.
    fn control(&mut self, sqe: &Sqe, capsule_bytes: u32) -> Result<(), Status> {
        let expected = match &self.state.role {
            Role::AwaitingConnect if is_connect(sqe) => BEFORE_CONNECT_BYTES_MAX,
            Role::AwaitingConnect => return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
            _ => controller::data_from_host(sqe),
        };
        if expected == 0 {
            let slot = self.whole_command(sqe, Vec::new());
            self.take_entry();
            self.execute(slot);
            return Ok(());
        }
        let source = sgl::from_host(sqe.data, capsule_bytes)?;
        if source.length() != expected {
            return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
        }
        self.take_entry();
        match source {
            // All of the capsule's data is taken in; what the descriptor names is cut out of it then.
            Source::Capsule { offset, .. } => {
                let slot = self.whole_command(sqe, vec![0; capsule_bytes as usize]);
                self.state.current = Current::Capsule { slot, offset };
            }
            Source::Transport { length } => {
                let slot = self.whole_command(sqe, vec![0; length as usize]);
                if let Some(command) = self.state.commands.get_mut(slot) {
                    command.asked = length;
                }
                self.state.ready_to_transfer(slot, sqe.cid, length);
            }
        }
        Ok(())
    }

    fn whole_command(&mut self, sqe: &Sqe, bytes: Vec<u8>) -> Slot {
        let length = sqe.data.length();
        let data = if bytes.is_empty() { Data::None } else { Data::Bytes(bytes) };
        self.state.new_command(sqe.cid, Work::Whole(Box::new(*sqe)), data, length)
    }

    /// Data that was asked for by R2T (TCP 1.0, section 3.3.2.2).
    fn host_data(&mut self, pdu: &H2cData, layout: &Layout) -> Result<Place, Fatal> {
        let limits = &self.lent.shared.limits.controller;
        let Some((slot, command)) = self.state.commands.by_index(pdu.ttag.into()) else {
            return Err(Fatal::field(10));
        };
        if command.cid != pdu.cccid {
            return Err(Fatal::field(8));
        }
        if command.arrived == command.asked {
            return Err(Fatal::field(10));
        }
        if pdu.length != layout.data_length {
            return Err(Fatal::field(16));
        }
        if pdu.length > limits.transfer_max_bytes {
            return Err(Fatal::of(FatalStatus::LimitExceeded));
        }
        let left = command.asked - command.arrived;
        if pdu.offset != command.arrived || pdu.length > left {
            return Err(Fatal::of(FatalStatus::DataOutOfRange));
        }
        if pdu.last != (pdu.length == left) {
            return Err(Fatal::field(1));
        }
        self.state.current = Current::Data { slot, start: pdu.offset, length: pdu.length };
        Ok(Place::Here)
    }

    /// Bytes of a command's data up to `end`, which was asked for, are here.
    fn arrived(&mut self, slot: Slot, end: u32, digest_ok: bool) {
        let Some(command) = self.state.commands.get_mut(slot) else { return };
        command.arrived = end;
        command.corrupt |= !digest_ok;
        if end == command.asked {
            let corrupt = command.corrupt;
            self.data_complete(slot, !corrupt);
        }
    }

    /// A capsule's data is here; the command's own starts at `offset` of it.
    #[inline]
    fn capsule_arrived(&mut self, slot: Slot, offset: usize, digest_ok: bool) {
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
            // A data digest error is the command's failure (TCP 1.0, section 3.3.1.2), and worth a
            // second try.
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
