//! Data of the initiator: immediate, unsolicited, and solicited by R2Ts (RFC 7143, sections 4.2.5 and 11.7).

use dma::Data;
use scsi::TaskEvent;
use slots::Slot;
use target_shell::{IoContext, NoMemory, PduData, TransferReport};
use wire_iscsi::{DataOut, R2t, RESERVED_TAG};
use wire_scsi::{AdditionalSense, Sense, SenseKey};

use super::{Session, Work};
use crate::core::IscsiCore;
use crate::pdu_writer::PduWriter;

/// What of a command's data is missing, and where it goes.
///
/// Data comes in order, in sequences: first what the initiator sends unasked, then the answers to R2Ts. What is beyond
/// `needed` is received and dropped, or not asked for. The memory is in two parts: one for unsolicited data,
/// which has to be there at once, and one for the rest, which comes when the connection's share permits.
#[derive(Debug)]
pub(super) struct DataOutState {
    /// Bytes that the task wants.
    needed: u32,
    /// Bytes received, those that are dropped included.
    received: u32,
    first: Option<Data>,
    rest: Option<Data>,
    /// The end of what may come unasked; `None` when no more does.
    unsolicited_end: Option<u32>,
    /// R2Ts were sent up to here.
    solicited: u32,
    /// The end of the sequence that is being received, and the number of its R2T.
    sequence_end: u32,
    answered_r2ts: u32,
    /// Number of the next PDU of the sequence.
    data_sn: u32,
}

/// The sequence of PDUs is not what it has to be (RFC 7143, section 7.9).
const SEQUENCE_ERROR: Sense =
    Sense::new(SenseKey::AbortedCommand, AdditionalSense { code: 0x47, qualifier: 0x05 });
/// There is unsolicited data where none may be.
pub(super) const UNEXPECTED_DATA: Sense =
    Sense::new(SenseKey::AbortedCommand, AdditionalSense { code: 0x0c, qualifier: 0x0c });
/// There is more or less data than was announced.
const INCORRECT_AMOUNT: Sense =
    Sense::new(SenseKey::AbortedCommand, AdditionalSense { code: 0x0c, qualifier: 0x0d });
/// A data digest does not match: PROTOCOL SERVICE CRC ERROR.
pub(super) const DIGEST_ERROR: Sense = SEQUENCE_ERROR;

impl DataOutState {
    /// Whether an R2T is not answered, or unsolicited data is on its way.
    pub(super) fn awaits_data(&self) -> bool {
        self.unsolicited_end.is_some() || self.solicited > self.received
    }

    /// Reports what has to arrive.
    pub(super) fn transfers(&self, id: u64, report: &mut TransferReport) {
        let bytes = [&self.first, &self.rest].into_iter().flatten().map(Data::len).sum();
        report.waits_for_peer(id, bytes, self.received as usize);
    }

    /// Where the byte at `received` goes, and how much may follow it there; empty if it is dropped.
    fn room(&mut self) -> &mut [u8] {
        let at = self.received as usize;
        let first_length = self.first.as_ref().map_or(0, Data::len);
        let (part, at) =
            if at < first_length { (&mut self.first, at) } else { (&mut self.rest, at - first_length) };
        match part {
            Some(Data::One(buffer)) => buffer.as_mut_slice().get_mut(at..).unwrap_or_default(),
            Some(many) => many.slice_at_mut(at).map_or(&mut [], |(buffer, start)| {
                buffer.as_mut_slice().get_mut(start..).unwrap_or_default()
            }),
            None => &mut [],
        }
    }

    /// Everything that the task wants, once it has arrived. One buffer, as most writes have, allocates nothing.
    fn take(self) -> Option<Data> {
        match (self.first, self.rest) {
            (Some(first), Some(rest)) => Some(first.join(rest)),
            (first, rest) => first.or(rest),
        }
    }
}

impl Session {
    /// A task wants the first `needed` bytes of its command's data.
    pub(super) fn begin_data_out(&mut self, slot: Slot, needed: u32) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        command.data_out = Some(DataOutState {
            needed,
            received: 0,
            first: None,
            rest: None,
            unsolicited_end: None,
            solicited: 0,
            sequence_end: 0,
            answered_r2ts: 0,
            data_sn: 0,
        });
    }

    /// Announces the data that comes with a command and after it without an R2T, up to `unsolicited` bytes.
    /// While the core has enough memory, the queue's depth and FirstBurstLength are the only limit.
    pub(super) fn expect_unsolicited(
        &mut self,
        slot: Slot,
        immediate: u32,
        unsolicited: u32,
        context: &IoContext<'_, IscsiCore>,
    ) -> Result<(), NoMemory> {
        let Some(command) = self.commands.get_mut(slot) else { return Ok(()) };
        let Some(state) = &mut command.data_out else { return Ok(()) };
        let expected = immediate.max(unsolicited);
        let bytes = expected.min(state.needed) as usize;
        if bytes > 0 && state.first.is_none() {
            state.first = Some(self.memory.take_at_once(bytes, context.pool)?);
            command.held_at_once += bytes;
        }
        state.sequence_end = expected;
        state.unsolicited_end = (unsolicited > immediate).then_some(unsolicited);
        if expected == 0 {
            self.work.push_back((slot, Work::Solicit));
        }
        Ok(())
    }

    /// Checks a Data-Out. Returns the command that its data belongs to; without one the data is dropped.
    pub(super) fn start_data_out(&mut self, header: &DataOut, out: &mut PduWriter) -> Option<Slot> {
        let is_unsolicited = header.target_transfer_tag == RESERVED_TAG;
        // Few commands wait for data at a time, but any might.
        let found = self.commands.iter().find(|(_, command)| {
            command.initiator_task_tag == header.initiator_task_tag && command.data_out.is_some()
        });
        let (slot, _) = found?;
        let state = self.commands.get_mut(slot).and_then(|command| command.data_out.as_mut())?;
        let is_expected = match (is_unsolicited, state.unsolicited_end) {
            (true, Some(_)) => true,
            (false, None) => header.target_transfer_tag == transfer_tag(slot, state.answered_r2ts),
            (true, None) | (false, Some(_)) => false,
        };
        let end = header.buffer_offset.checked_add(header.data_length);
        let sense = if is_unsolicited && state.unsolicited_end.is_none() {
            Some(UNEXPECTED_DATA)
        } else if !is_expected || header.data_sn != state.data_sn || header.buffer_offset != state.received {
            Some(SEQUENCE_ERROR)
        } else if end.is_none_or(|end| end > state.sequence_end) {
            Some(INCORRECT_AMOUNT)
        } else {
            None
        };
        if let Some(sense) = sense {
            self.fail_command(slot, sense, out);
            return None;
        }
        state.data_sn += 1;
        Some(slot)
    }

    /// Where the next data of a command is received directly; empty if it is dropped.
    #[inline]
    pub(super) fn data_out_room(&mut self, slot: Slot) -> &mut [u8] {
        let state = self.commands.get_mut(slot).and_then(|command| command.data_out.as_mut());
        state.map_or(&mut [], DataOutState::room)
    }

    /// Data was written to [`data_out_room`](Self::data_out_room), or dropped.
    #[inline]
    pub(super) fn data_out_received(&mut self, slot: Slot, bytes: usize) {
        self.data_progress = self.data_progress.wrapping_add(bytes as u64);
        if let Some(state) = self.commands.get_mut(slot).and_then(|command| command.data_out.as_mut()) {
            state.received += bytes as u32;
        }
    }

    /// The data of a PDU is complete, and `is_final` says whether its sequence is.
    pub(super) fn end_data_out(&mut self, slot: Slot, is_final: bool, out: &mut PduWriter) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let Some(state) = &mut command.data_out else { return };
        if state.received >= state.needed {
            let data = command.data_out.take().and_then(DataOutState::take);
            if let Some(data) = data {
                self.resume_task(slot, TaskEvent::DataOut(data), out);
            }
            return;
        }
        let is_unsolicited = state.unsolicited_end.is_some();
        if !is_final {
            if !is_unsolicited && state.received == state.sequence_end {
                self.fail_command(slot, INCORRECT_AMOUNT, out);
            }
            return;
        }
        if !is_unsolicited && state.solicited > 0 {
            if state.received != state.sequence_end {
                return self.fail_command(slot, INCORRECT_AMOUNT, out);
            }
            state.answered_r2ts += 1;
            let burst = self.parameters.burst_bytes_max;
            state.sequence_end = state.received.saturating_add(burst).min(state.needed);
        }
        state.unsolicited_end = None;
        state.data_sn = 0;
        self.work.push_back((slot, Work::Solicit));
    }

    /// Takes memory for the data that is missing, and asks for it.
    pub(super) fn solicit(
        &mut self,
        slot: Slot,
        out: &mut PduWriter,
        context: &IoContext<'_, IscsiCore>,
    ) -> Result<(), NoMemory> {
        let Some(state) = self.commands.get(slot).and_then(|command| command.data_out.as_ref()) else {
            return Ok(());
        };
        if state.solicited == 0 {
            let first_length = state.first.as_ref().map_or(0, Data::len);
            let missing = state.needed as usize - first_length;
            let rest = if missing > 0 { Some(self.take(slot, missing, context)?) } else { None };
            let burst = self.parameters.burst_bytes_max;
            let state = self.commands.get_mut(slot).and_then(|command| command.data_out.as_mut());
            let Some(state) = state else { return Ok(()) };
            state.rest = rest;
            state.solicited = state.received;
            state.sequence_end = state.received.saturating_add(burst).min(state.needed);
        }
        self.send_r2ts(slot, out);
        Ok(())
    }

    /// Sends as many R2Ts as may be outstanding.
    fn send_r2ts(&mut self, slot: Slot, out: &mut PduWriter) {
        let (burst, r2ts_max) = (self.parameters.burst_bytes_max, self.parameters.r2ts_max);
        let (stat_sn, exp_cmd_sn, max_cmd_sn) = (self.stat_sn, self.exp_cmd_sn(), self.max_cmd_sn());
        let Some(command) = self.commands.get_mut(slot) else { return };
        let Some(state) = &mut command.data_out else { return };
        while state.solicited < state.needed && command.r2ts - state.answered_r2ts < r2ts_max {
            let length = burst.min(state.needed - state.solicited);
            let r2t = R2t {
                initiator_task_tag: command.initiator_task_tag,
                lun: command.lun,
                target_transfer_tag: transfer_tag(slot, command.r2ts),
                stat_sn,
                exp_cmd_sn,
                max_cmd_sn,
                r2t_sn: command.r2ts,
                buffer_offset: state.solicited,
                desired_length: length,
                ..R2t::default()
            };
            out.push(&r2t.to_bytes(), PduData::None);
            state.solicited += length;
            command.r2ts += 1;
        }
    }
}

/// The target's name of an R2T, never the reserved one.
fn transfer_tag(slot: Slot, r2t_sn: u32) -> u32 {
    let generation = (slot.to_bits() >> 32) as u32;
    (generation & 0x7f) << 24 | (slot.index() & 0xfff) << 12 | r2t_sn & 0xfff
}
