//! Headers of what targets send (RFC 7143, sections 11.4 to 11.19).

use crate::fields::pdu;
use crate::header::Opcode;

pdu! {
    /// SCSI Response (section 11.4).
    ScsiResponse, Opcode::ScsiResponse, flags 0x80 {
        /// The command has more data than was expected.
        overflow: bool = 1 / 0x04,
        /// The command has less data than was expected.
        underflow: bool = 1 / 0x02,
        /// A [`ScsiServiceResponse`](crate::ScsiServiceResponse).
        response: u8 = 2,
        /// The SCSI status.
        status: u8 = 3,
        /// Status sequence number.
        stat_sn: u32 = 24,
        /// Command sequence number that is expected next.
        exp_cmd_sn: u32 = 28,
        /// Last command sequence number that is accepted.
        max_cmd_sn: u32 = 32,
        /// Number of Data-In and R2T PDUs of the command.
        exp_data_sn: u32 = 36,
        /// Bytes by which the data is more or less than was expected.
        residual: u32 = 44,
    }
}

pdu! {
    /// Task Management Function Response (section 11.6).
    TaskManagementResponse, Opcode::TaskManagementResponse, flags 0x80 {
        /// A [`TaskResponse`](crate::TaskResponse).
        response: u8 = 2,
        /// Status sequence number.
        stat_sn: u32 = 24,
        /// Command sequence number that is expected next.
        exp_cmd_sn: u32 = 28,
        /// Last command sequence number that is accepted.
        max_cmd_sn: u32 = 32,
    }
}

pdu! {
    /// Data-In (section 11.7).
    DataIn, Opcode::DataIn, flags 0 {
        /// The last PDU of its sequence.
        is_final: bool = 1 / 0x80,
        /// As in a SCSI Response; only with `has_status`.
        overflow: bool = 1 / 0x04,
        /// As in a SCSI Response; only with `has_status`.
        underflow: bool = 1 / 0x02,
        /// It ends the command, with a status and no SCSI Response.
        has_status: bool = 1 / 0x01,
        /// The SCSI status; only with `has_status`.
        status: u8 = 3,
        /// The logical unit; only with a transfer tag.
        lun: u64 = 8,
        /// Reserved, unless an acknowledgement is requested.
        target_transfer_tag: u32 = 20,
        /// Status sequence number; only with `has_status`.
        stat_sn: u32 = 24,
        /// Command sequence number that is expected next.
        exp_cmd_sn: u32 = 28,
        /// Last command sequence number that is accepted.
        max_cmd_sn: u32 = 32,
        /// Number of this PDU among the command's.
        data_sn: u32 = 36,
        /// Offset in the command's data.
        buffer_offset: u32 = 40,
        /// As in a SCSI Response; only with `has_status`.
        residual: u32 = 44,
    }
}

pdu! {
    /// Ready To Transfer (section 11.8).
    R2t, Opcode::R2t, flags 0x80 {
        /// The logical unit.
        lun: u64 = 8,
        /// The target's name of the transfer.
        target_transfer_tag: u32 = 20,
        /// The next status sequence number.
        stat_sn: u32 = 24,
        /// Command sequence number that is expected next.
        exp_cmd_sn: u32 = 28,
        /// Last command sequence number that is accepted.
        max_cmd_sn: u32 = 32,
        /// Number of this R2T among the command's.
        r2t_sn: u32 = 36,
        /// Offset in the command's data.
        buffer_offset: u32 = 40,
        /// Bytes that are requested.
        desired_length: u32 = 44,
    }
}

pdu! {
    /// Asynchronous Message (section 11.9).
    AsyncMessage, Opcode::AsyncMessage, flags 0x80 {
        /// The logical unit.
        lun: u64 = 8,
        /// Status sequence number.
        stat_sn: u32 = 24,
        /// Command sequence number that is expected next.
        exp_cmd_sn: u32 = 28,
        /// Last command sequence number that is accepted.
        max_cmd_sn: u32 = 32,
        /// An [`AsyncEvent`](crate::AsyncEvent).
        event: u8 = 36,
        /// Detail of a vendor's event.
        vendor_code: u8 = 37,
        /// First parameter.
        parameter1: u16 = 38,
        /// Second parameter.
        parameter2: u16 = 40,
        /// Third parameter.
        parameter3: u16 = 42,
    }
}

pdu! {
    /// Text Response (section 11.11).
    TextResponse, Opcode::TextResponse, flags 0 {
        /// The negotiation is complete.
        is_final: bool = 1 / 0x80,
        /// The text continues in the next response.
        is_continued: bool = 1 / 0x40,
        /// The logical unit.
        lun: u64 = 8,
        /// What the initiator repeats in its next request; reserved if there is none.
        target_transfer_tag: u32 = 20,
        /// Status sequence number.
        stat_sn: u32 = 24,
        /// Command sequence number that is expected next.
        exp_cmd_sn: u32 = 28,
        /// Last command sequence number that is accepted.
        max_cmd_sn: u32 = 32,
    }
}

pdu! {
    /// Login Response (section 11.13).
    LoginResponse, Opcode::LoginResponse, flags 0 {
        /// The target is ready for the next stage.
        transit: bool = 1 / 0x80,
        /// The text continues in the next response.
        is_continued: bool = 1 / 0x40,
        /// The present [`LoginStage`](crate::LoginStage).
        current_stage: u8 = 1 / 0x0c,
        /// The next one, if `transit`.
        next_stage: u8 = 1 / 0x03,
        /// Highest version.
        version_max: u8 = 2,
        /// The version in use.
        version_active: u8 = 3,
        /// The initiator's part of the session's identifier.
        isid: [u8; 6] = 8,
        /// The target's part of it.
        tsih: u16 = 14,
        /// Status sequence number.
        stat_sn: u32 = 24,
        /// Command sequence number that is expected next.
        exp_cmd_sn: u32 = 28,
        /// Last command sequence number that is accepted.
        max_cmd_sn: u32 = 32,
        /// A [`LoginStatus`](crate::LoginStatus).
        status: u16 = 36,
    }
}

pdu! {
    /// Logout Response (section 11.15).
    LogoutReply, Opcode::LogoutResponse, flags 0x80 {
        /// A [`LogoutResponse`](crate::LogoutResponse).
        response: u8 = 2,
        /// Status sequence number.
        stat_sn: u32 = 24,
        /// Command sequence number that is expected next.
        exp_cmd_sn: u32 = 28,
        /// Last command sequence number that is accepted.
        max_cmd_sn: u32 = 32,
        /// Seconds to wait before reconnecting.
        time_to_wait: u16 = 40,
        /// Seconds for which tasks are kept.
        time_to_retain: u16 = 42,
    }
}

pdu! {
    /// Reject (section 11.17). The header of the rejected PDU is its data.
    Reject, Opcode::Reject, flags 0x80 {
        /// A [`RejectReason`](crate::RejectReason).
        reason: u8 = 2,
        /// Status sequence number.
        stat_sn: u32 = 24,
        /// Command sequence number that is expected next.
        exp_cmd_sn: u32 = 28,
        /// Last command sequence number that is accepted.
        max_cmd_sn: u32 = 32,
        /// Data sequence number that is expected next, for some reasons.
        data_sn: u32 = 36,
    }
}

pdu! {
    /// NOP-In (section 11.19).
    NopIn, Opcode::NopIn, flags 0x80 {
        /// The logical unit.
        lun: u64 = 8,
        /// What the initiator's answer repeats; reserved if none is wanted.
        target_transfer_tag: u32 = 20,
        /// Status sequence number, or the next one.
        stat_sn: u32 = 24,
        /// Command sequence number that is expected next.
        exp_cmd_sn: u32 = 28,
        /// Last command sequence number that is accepted.
        max_cmd_sn: u32 = 32,
    }
}
