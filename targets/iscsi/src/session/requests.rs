//! PDUs of the initiator in the full feature phase.

use block_io::Tag;
use scsi::Command;
use slots::Slot;
use target_shell::{IoContext, NoMemory, PduData, turn_cost};
use wire_iscsi::{
    BasicHeader, DataOut, LogoutReason, LogoutReply, LogoutRequest, LogoutResponse, NopIn, NopOut, Opcode,
    RESERVED_TAG, RejectReason, ScsiCommand,
};

use super::data_out::{DIGEST_ERROR, UNEXPECTED_DATA};
use super::{CommandState, Session, tag_of};
use crate::core::IscsiCore;
use crate::failure::IscsiViolation;
use crate::limits::{FUNCTIONS_MAX, IMMEDIATE_COMMANDS_MAX, TEXT_BYTES_MAX};
use crate::pdu_writer::PduWriter;
use crate::sink::Sink;

/// Additional header segment with the rest of a long command descriptor block (RFC 7143, section 11.2.2.3).
const EXTENDED_CDB: u8 = 1;
/// Longest command descriptor block: READ(32) and the like.
const CDB_BYTES_MAX: usize = 32;

impl Session {
    /// A header has arrived. Returns where its data goes.
    ///
    /// # Errors
    /// The connection is to be closed.
    pub(crate) fn begin_pdu(
        &mut self,
        header: &[u8; wire_iscsi::HEADER_BYTES],
        segments: &[u8],
        out: &mut PduWriter,
    ) -> Result<Sink, IscsiViolation> {
        let Ok(common) = BasicHeader::decode(header) else {
            self.reject(header, RejectReason::CommandNotSupported, out);
            return Ok(Sink::Discard);
        };
        match common.opcode {
            Opcode::ScsiCommand => {
                let sink = self.begin_command(&ScsiCommand::decode(header)?, segments, out);
                self.finish_delivery();
                sink
            }
            Opcode::DataOut => {
                let slot = self.start_data_out(&DataOut::decode(header)?, out);
                Ok(slot.map_or(Sink::Discard, Sink::Command))
            }
            Opcode::NopOut | Opcode::TextRequest => Ok(Sink::Collect(Vec::new())),
            Opcode::TaskManagementRequest | Opcode::LogoutRequest => Ok(Sink::Discard),
            Opcode::SnackRequest => {
                self.reject(header, RejectReason::SnackReject, out);
                Ok(Sink::Discard)
            }
            Opcode::LoginRequest => {
                self.reject(header, RejectReason::ProtocolError, out);
                Ok(Sink::Discard)
            }
            _ => {
                self.reject(header, RejectReason::CommandNotSupported, out);
                Ok(Sink::Discard)
            }
        }
    }

    /// The data of a PDU has arrived.
    ///
    /// # Errors
    /// The connection is to be closed.
    pub(crate) fn end_pdu(
        &mut self,
        header: &[u8; wire_iscsi::HEADER_BYTES],
        sink: Sink,
        is_intact: bool,
        out: &mut PduWriter,
    ) -> Result<(), IscsiViolation> {
        let Ok(common) = BasicHeader::decode(header) else { return Ok(()) };
        if !is_intact {
            self.reject(header, RejectReason::DataDigestError, out);
            if let Sink::Command(slot) = sink {
                self.fail_command(slot, DIGEST_ERROR, out);
            }
            return Ok(());
        }
        let data = match sink {
            Sink::Command(slot) => {
                self.end_data_out(slot, common.is_final, out);
                return Ok(());
            }
            Sink::Collect(data) => data,
            Sink::Discard | Sink::NeedsMemory(..) | Sink::Defer(_) => Vec::new(),
        };
        let result = match common.opcode {
            Opcode::NopOut => self.ping(&NopOut::decode(header)?, data, out),
            Opcode::TextRequest => self.text_request(header, &data, out),
            Opcode::TaskManagementRequest => self.manage(header, out),
            Opcode::LogoutRequest => self.log_out(&LogoutRequest::decode(header)?, out),
            _ => Ok(()),
        };
        self.finish_delivery();
        result
    }

    fn begin_command(
        &mut self,
        header: &ScsiCommand,
        segments: &[u8],
        out: &mut PduWriter,
    ) -> Result<Sink, IscsiViolation> {
        if self.identity.node.is_none() {
            self.reject(&header.to_bytes(), RejectReason::ProtocolError, out);
            return Ok(Sink::Discard);
        }
        if header.immediate && self.immediate_commands >= IMMEDIATE_COMMANDS_MAX {
            self.reject(&header.to_bytes(), RejectReason::ImmediateCommandReject, out);
            return Ok(Sink::Discard);
        }
        if !self.admit(header.immediate, header.cmd_sn)? {
            return Ok(Sink::Discard);
        }
        let mut cdb = arrayvec::ArrayVec::<u8, CDB_BYTES_MAX>::new();
        cdb.extend(header.cdb);
        if let [high, low, EXTENDED_CDB, _, rest @ ..] = segments {
            let length = usize::from(u16::from_be_bytes([*high, *low])).saturating_sub(1);
            cdb.extend(rest.iter().copied().take(length.min(CDB_BYTES_MAX - cdb.len())));
        }
        let expected = header.expected_length;
        let mut command = Command {
            cdb: &cdb,
            data_out_bytes: if header.write { expected } else { 0 },
            data_in_bytes: if header.read && !header.write { expected } else { 0 },
            tag: Tag(0),
            flow: self.flow,
        };
        let lun = wire_scsi::luns::decode_lun(header.lun.to_be_bytes());
        let unit = self.tasks.find_unit(|unit| Some(unit.lun) == lun);
        let Some(unit) = unit else {
            self.answer_absent_unit(header, &command, out);
            return Ok(Sink::Discard);
        };
        let state = CommandState {
            running: self.tasks.begin(unit),
            initiator_task_tag: header.initiator_task_tag,
            lun: header.lun,
            is_immediate: header.immediate,
            abort_function: None,
            held: 0,
            held_at_once: 0,
            r2ts: 0,
            expected_length: expected,
            started_ticks: if self.histogram().is_some() { os::clock::ticks().max(1) } else { 0 },
            data_out: None,
        };
        // The window and the limit of immediate commands leave a slot.
        let Ok(slot) = self.commands.insert(state) else { return Ok(Sink::Discard) };
        self.immediate_commands += u32::from(header.immediate);
        self.work_done = self.work_done.wrapping_add(turn_cost(expected.into()).into());
        command.tag = tag_of(slot);
        self.start_task(slot, &command, out);
        Ok(self.begin_command_data(slot, header, out))
    }

    /// Decides where the data goes that comes with a command.
    fn begin_command_data(&mut self, slot: Slot, header: &ScsiCommand, out: &mut PduWriter) -> Sink {
        let wants_data = self.commands.get(slot).is_some_and(|command| command.data_out.is_some());
        if !wants_data {
            return Sink::Discard;
        }
        let parameters = &self.parameters;
        let immediate = header.data_length;
        let first_burst = parameters.first_burst_bytes_max.min(header.expected_length);
        let is_valid = immediate <= first_burst
            && (immediate == 0 || parameters.immediate_data)
            && (header.is_final || !parameters.initial_r2t);
        if !is_valid {
            self.fail_command(slot, UNEXPECTED_DATA, out);
            return Sink::Discard;
        }
        let unsolicited = if header.is_final { 0 } else { first_burst };
        Sink::NeedsMemory(slot, immediate, unsolicited)
    }

    /// Finds memory for the data that comes with a command. `None`: there is none now, and nothing is
    /// received until there is ([`is_sink_waiting`](Session::is_sink_waiting)).
    ///
    /// It does not wait if other commands expect data, which is behind this in the stream and would never
    /// arrive. Then the command ends with TASK SET FULL (SAM-5, section 5.3.1), so that the initiator sends
    /// it again when others have ended.
    pub(crate) fn prepare_sink(
        &mut self,
        sink: &mut Sink,
        out: &mut PduWriter,
        context: &IoContext<'_, IscsiCore>,
    ) -> Option<()> {
        let Sink::NeedsMemory(slot, immediate, unsolicited) = *sink else { return Some(()) };
        match self.expect_unsolicited(slot, immediate, unsolicited, context) {
            Ok(()) => *sink = if immediate > 0 { Sink::Command(slot) } else { Sink::Discard },
            Err(_) if self.awaits_data() => {
                self.refuse_command(slot, out);
                *sink = Sink::Discard;
            }
            Err(NoMemory::Full | NoMemory::Lacking) => {
                self.is_sink_waiting = true;
                return None;
            }
        }
        Some(())
    }

    /// Where the data of a PDU is received directly; empty if it has to be passed to
    /// [`take_data`](Self::take_data).
    #[inline]
    pub(crate) fn sink_room(&mut self, sink: &Sink) -> &mut [u8] {
        match sink {
            Sink::Command(slot) => self.data_out_room(*slot),
            _ => &mut [],
        }
    }

    /// `count` bytes were received into [`sink_room`](Self::sink_room).
    #[inline]
    pub(crate) fn sink_received(&mut self, sink: &Sink, count: usize) {
        if let Sink::Command(slot) = sink {
            self.data_out_received(*slot, count);
        }
    }

    /// Takes data of a PDU. Returns how many bytes.
    ///
    /// # Errors
    /// It is a text that is too long.
    pub(crate) fn take_data(&mut self, sink: &mut Sink, data: &[u8]) -> Result<usize, IscsiViolation> {
        match sink {
            Sink::Discard | Sink::NeedsMemory(..) => {}
            // Within RECEIVE_DATA_MAX.
            Sink::Defer(collected) => collected.extend_from_slice(data),
            Sink::Collect(collected) => {
                if collected.len() + data.len() > TEXT_BYTES_MAX {
                    return Err(IscsiViolation::DataLength((collected.len() + data.len()) as u32));
                }
                collected.extend_from_slice(data);
            }
            Sink::Command(slot) => {
                let room = self.data_out_room(*slot);
                let count = if room.is_empty() { data.len() } else { room.len().min(data.len()) };
                if let Some(room) = room.get_mut(..count) {
                    room.copy_from_slice(&data[..count]);
                }
                self.data_out_received(*slot, count);
                return Ok(count);
            }
        }
        Ok(data.len())
    }

    /// Answers a command to a LUN without a unit.
    fn answer_absent_unit(&mut self, header: &ScsiCommand, command: &Command<'_>, out: &mut PduWriter) {
        let response = scsi::absent_unit(command, &self.luns);
        if !header.immediate {
            self.widen_window();
        }
        let sense = response.sense_bytes();
        let data = match response.data {
            scsi::DataIn::Bytes(bytes) => bytes,
            scsi::DataIn::None | scsi::DataIn::Data(..) => Vec::new(),
        };
        let mut data_pdus = 0;
        if !data.is_empty() {
            data_pdus = self.send_data(header.initiator_task_tag, PduData::Bytes(data), None, out);
        }
        let (status, residual) = (response.status, response.residual);
        self.send_response(header.initiator_task_tag, status, &sense, residual, data_pdus, out);
    }

    /// NOP-Out: a ping, or the answer to one.
    fn ping(
        &mut self,
        header: &NopOut,
        mut data: Vec<u8>,
        out: &mut PduWriter,
    ) -> Result<(), IscsiViolation> {
        if header.initiator_task_tag == RESERVED_TAG {
            self.is_pinged = false;
            return Ok(());
        }
        if !self.admit(header.immediate, header.cmd_sn)? {
            return Ok(());
        }
        if !header.immediate {
            self.widen_window();
        }
        data.truncate(self.parameters.send_data_max as usize);
        let answer = NopIn {
            data_length: data.len() as u32,
            initiator_task_tag: header.initiator_task_tag,
            lun: header.lun,
            target_transfer_tag: RESERVED_TAG,
            stat_sn: self.next_stat_sn(),
            exp_cmd_sn: self.exp_cmd_sn(),
            max_cmd_sn: self.max_cmd_sn(),
        };
        out.push(&answer.to_bytes(), PduData::Bytes(data));
        Ok(())
    }

    /// Asks the initiator whether it is there.
    pub(crate) fn send_ping(&mut self, out: &mut PduWriter) {
        self.is_pinged = true;
        let ping = NopIn {
            initiator_task_tag: RESERVED_TAG,
            target_transfer_tag: 1,
            stat_sn: self.stat_sn,
            exp_cmd_sn: self.exp_cmd_sn(),
            max_cmd_sn: self.max_cmd_sn(),
            ..NopIn::default()
        };
        out.push(&ping.to_bytes(), PduData::None);
    }

    fn log_out(&mut self, header: &LogoutRequest, out: &mut PduWriter) -> Result<(), IscsiViolation> {
        if !self.admit(header.immediate, header.cmd_sn)? {
            return Ok(());
        }
        if !header.immediate {
            self.widen_window();
        }
        let (tag, is_own) = (header.initiator_task_tag, header.cid == self.identity.cid);
        match LogoutReason::try_from(header.reason) {
            Ok(LogoutReason::CloseSession) => {
                self.handle.end_others();
                self.answer_logout(tag, LogoutResponse::Closed, out);
                self.abandon();
            }
            Ok(LogoutReason::CloseConnection) if is_own => {
                self.answer_logout(tag, LogoutResponse::Closed, out);
                self.abandon();
            }
            Ok(LogoutReason::CloseConnection) => match self.handle.end_other(header.cid) {
                Some(_) if self.logouts.len() >= FUNCTIONS_MAX => {
                    self.answer_logout(tag, LogoutResponse::CleanupFailed, out);
                }
                Some(closing) => self.logouts.push((tag, closing)),
                None => self.answer_logout(tag, LogoutResponse::NoConnection, out),
            },
            Ok(LogoutReason::RemoveForRecovery) | Err(_) => {
                self.answer_logout(tag, LogoutResponse::RecoveryNotSupported, out);
            }
        }
        Ok(())
    }

    /// Answers requests to close other connections, when nothing of those is in flight.
    pub(super) fn finish_logouts(&mut self, out: &mut PduWriter) {
        let ended: Vec<_> = self.logouts.extract_if(.., |(_, closing)| closing.has_ended()).collect();
        for (tag, _) in ended {
            self.answer_logout(tag, LogoutResponse::Closed, out);
        }
    }

    fn answer_logout(&mut self, tag: u32, response: LogoutResponse, out: &mut PduWriter) {
        let reply = LogoutReply {
            initiator_task_tag: tag,
            response: response.into(),
            stat_sn: self.next_stat_sn(),
            exp_cmd_sn: self.exp_cmd_sn(),
            max_cmd_sn: self.max_cmd_sn(),
            time_to_wait: 2,
            ..LogoutReply::default()
        };
        out.push(&reply.to_bytes(), PduData::None);
    }
}
