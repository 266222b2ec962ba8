//! Answers to commands: Data-In and SCSI Response (RFC 7143, sections 11.4 and 11.7).

use dma::Data;
use scsi::{DataIn, Residual, Response};
use slots::Slot;
use target_shell::PduData;
use wire_iscsi::{DataIn as DataInPdu, RESERVED_TAG, ScsiResponse, ScsiServiceResponse};
use wire_scsi::{ScsiStatus, Sense, SenseFormat};

use super::Session;
use crate::pdu_writer::PduWriter;

/// Bits of a response that say how the data's length differs from what was expected.
fn residual_bits(residual: Residual) -> (bool, bool, u32) {
    match residual {
        Residual::None => (false, false, 0),
        Residual::Underflow(bytes) => (false, true, bytes),
        Residual::Overflow(bytes) => (true, false, bytes),
    }
}

impl Session {
    /// Answers a command, which stays.
    pub(super) fn respond(&mut self, slot: Slot, response: Response, out: &mut PduWriter) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let (tag, r2ts) = (command.initiator_task_tag, command.r2ts);
        let carries_status = response.status == ScsiStatus::Good && response.sense.is_none();
        let sense = response.sense_bytes();
        let Response { status, data, residual, .. } = response;
        if let DataIn::Data(data, 1..) = &data {
            // The buffers are free when they are sent.
            command.held -= data.len();
        }
        let data = match data {
            DataIn::None => PduData::None,
            DataIn::Bytes(bytes) => PduData::Bytes(bytes),
            DataIn::Data(data, bytes) => PduData::Buffer(data, 0, bytes as usize),
        };
        let mut data_pdus = r2ts;
        if !data.is_empty() {
            data_pdus += self.send_data(tag, data, carries_status.then_some((status, residual)), out);
            if carries_status {
                return;
            }
        }
        self.send_response(tag, status, &sense, residual, data_pdus, out);
    }

    /// Sends a SCSI Response.
    pub(super) fn send_response(
        &mut self,
        tag: u32,
        status: ScsiStatus,
        sense: &[u8],
        residual: Residual,
        data_pdus: u32,
        out: &mut PduWriter,
    ) {
        let mut bytes = Vec::new();
        if !sense.is_empty() {
            bytes.extend((sense.len() as u16).to_be_bytes());
            bytes.extend(sense);
        }
        let (overflow, underflow, residual) = residual_bits(residual);
        let response = ScsiResponse {
            data_length: bytes.len() as u32,
            initiator_task_tag: tag,
            overflow,
            underflow,
            response: ScsiServiceResponse::Completed.into(),
            status: status as u8,
            stat_sn: self.next_stat_sn(),
            exp_cmd_sn: self.exp_cmd_sn(),
            max_cmd_sn: self.max_cmd_sn(),
            exp_data_sn: data_pdus,
            residual,
        };
        out.push(&response.to_bytes(), PduData::Bytes(bytes));
    }

    /// Sends data, with the status in the last PDU if it is given. Returns the number of PDUs.
    pub(super) fn send_data(
        &mut self,
        tag: u32,
        mut data: PduData,
        status: Option<(ScsiStatus, Residual)>,
        out: &mut PduWriter,
    ) -> u32 {
        let segment = self.parameters.send_data_max as usize;
        let burst = self.parameters.burst_bytes_max as usize;
        let (length, mut offset, mut data_sn) = (data.len(), 0, 0);
        // The parts share the buffers, which are free after the last.
        let buffer_bytes = if let PduData::Buffer(data, ..) = &data { data.len() } else { 0 };
        loop {
            // A burst ends at each multiple of its length.
            let count = (length - offset).min(segment).min(burst - offset % burst);
            let (first, rest) = split(data, count);
            let end = offset + count;
            let is_last = end == length;
            let mut header = DataInPdu {
                data_length: count as u32,
                initiator_task_tag: tag,
                is_final: is_last || end % burst == 0,
                target_transfer_tag: RESERVED_TAG,
                exp_cmd_sn: self.exp_cmd_sn(),
                max_cmd_sn: self.max_cmd_sn(),
                data_sn,
                buffer_offset: offset as u32,
                ..DataInPdu::default()
            };
            if let Some((status, residual)) = status.filter(|_| is_last) {
                header.has_status = true;
                header.status = status as u8;
                header.stat_sn = self.next_stat_sn();
                (header.overflow, header.underflow, header.residual) = residual_bits(residual);
            }
            out.push_part(&header.to_bytes(), first, if is_last { buffer_bytes } else { 0 });
            data_sn += 1;
            if is_last {
                return data_sn;
            }
            (data, offset) = (rest, end);
        }
    }

    /// Ends a command that there is no memory for. Its data is dropped.
    pub(super) fn refuse_command(&mut self, slot: Slot, out: &mut PduWriter) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let expected = command.expected_length;
        command.data_out = None;
        let response = Response {
            status: ScsiStatus::TaskSetFull,
            sense: None,
            sense_format: SenseFormat::Fixed,
            data: DataIn::None,
            residual: Residual::of(0, expected),
        };
        self.respond(slot, response, out);
        self.resume_task(slot, scsi::TaskEvent::Abort, out);
    }

    /// Ends a command whose data is not what was announced (RFC 7143, section 11.4.7.2).
    pub(super) fn fail_command(&mut self, slot: Slot, sense: Sense, out: &mut PduWriter) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let expected = command.expected_length;
        command.data_out = None;
        let is_descriptor =
            self.tasks.units()[command.running.unit()].nexus.unit().settings().descriptor_sense;
        let response = Response {
            status: ScsiStatus::CheckCondition,
            sense: Some(sense),
            sense_format: if is_descriptor { SenseFormat::Descriptor } else { SenseFormat::Fixed },
            data: DataIn::None,
            residual: Residual::of(0, expected),
        };
        self.respond(slot, response, out);
        // It waits for data, so that nothing of it is in flight, and it ends by this.
        self.resume_task(slot, scsi::TaskEvent::Abort, out);
    }
}

/// Cuts data after `count` bytes, without copying.
fn split(data: PduData, count: usize) -> (PduData, PduData) {
    match data {
        data if data.len() == count => (data, PduData::None),
        PduData::None => (PduData::None, PduData::None),
        PduData::Bytes(mut bytes) => {
            let rest = bytes.split_off(count);
            (PduData::Bytes(bytes), PduData::Bytes(rest))
        }
        PduData::Buffer(mut data, from, to) => {
            let rest: Data = data.split_off(from + count);
            (PduData::Buffer(data, from, from + count), PduData::Buffer(rest, 0, to - from - count))
        }
    }
}
