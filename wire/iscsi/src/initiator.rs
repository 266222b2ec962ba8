//! Headers of what initiators send (RFC 7143, sections 11.3 to 11.18).

use crate::fields::pdu;
use crate::header::Opcode;

pdu! {
    /// SCSI Command (section 11.3).
    ScsiCommand, Opcode::ScsiCommand, flags 0 {
        /// Delivered immediately.
        immediate: bool = 0 / 0x40,
        /// No unsolicited Data-Out follows.
        is_final: bool = 1 / 0x80,
        /// The command may return data.
        read: bool = 1 / 0x40,
        /// The command may send data.
        write: bool = 1 / 0x20,
        /// The SCSI task attribute.
        attributes: u8 = 1 / 0x07,
        /// The logical unit.
        lun: u64 = 8,
        /// Bytes that the command is expected to transfer.
        expected_length: u32 = 20,
        /// Command sequence number.
        cmd_sn: u32 = 24,
        /// Status sequence number that is expected next.
        exp_stat_sn: u32 = 28,
        /// The first 16 bytes of the command descriptor block; the others are in an additional header segment.
        cdb: [u8; 16] = 32,
    }
}

pdu! {
    /// Task Management Function Request (section 11.5).
    TaskManagementRequest, Opcode::TaskManagementRequest, flags 0x80 {
        /// Delivered immediately.
        immediate: bool = 0 / 0x40,
        /// A [`TaskFunction`](crate::TaskFunction).
        function: u8 = 1 / 0x7f,
        /// The logical unit.
        lun: u64 = 8,
        /// Initiator task tag of the task to abort.
        referenced_task_tag: u32 = 20,
        /// Command sequence number.
        cmd_sn: u32 = 24,
        /// Status sequence number that is expected next.
        exp_stat_sn: u32 = 28,
        /// Command sequence number of the task to abort.
        ref_cmd_sn: u32 = 32,
        /// Data sequence number that is expected next.
        exp_data_sn: u32 = 36,
    }
}

pdu! {
    /// Data-Out (section 11.7).
    DataOut, Opcode::DataOut, flags 0 {
        /// The last PDU of its sequence.
        is_final: bool = 1 / 0x80,
        /// The logical unit.
        lun: u64 = 8,
        /// That of the R2T, or reserved.
        target_transfer_tag: u32 = 20,
        /// Status sequence number that is expected next.
        exp_stat_sn: u32 = 28,
        /// Number of this PDU in its sequence.
        data_sn: u32 = 36,
        /// Offset in the command's data.
        buffer_offset: u32 = 40,
    }
}

pdu! {
    /// Text Request (section 11.10).
    TextRequest, Opcode::TextRequest, flags 0 {
        /// Delivered immediately.
        immediate: bool = 0 / 0x40,
        /// The initiator is done with the negotiation.
        is_final: bool = 1 / 0x80,
        /// The text continues in the next request.
        is_continued: bool = 1 / 0x40,
        /// That of the target's response.
        lun: u64 = 8,
        /// That of the target's response, or reserved.
        target_transfer_tag: u32 = 20,
        /// Command sequence number.
        cmd_sn: u32 = 24,
        /// Status sequence number that is expected next.
        exp_stat_sn: u32 = 28,
    }
}

pdu! {
    /// Login Request (section 11.12).
    LoginRequest, Opcode::LoginRequest, flags 0 {
        /// Always set.
        immediate: bool = 0 / 0x40,
        /// The initiator is ready for the next stage.
        transit: bool = 1 / 0x80,
        /// The text continues in the next request.
        is_continued: bool = 1 / 0x40,
        /// The present [`LoginStage`](crate::LoginStage).
        current_stage: u8 = 1 / 0x0c,
        /// The next one, if `transit`.
        next_stage: u8 = 1 / 0x03,
        /// Highest version.
        version_max: u8 = 2,
        /// Lowest version.
        version_min: u8 = 3,
        /// The initiator's part of the session's identifier.
        isid: [u8; 6] = 8,
        /// The target's part of it; 0 for a new session.
        tsih: u16 = 14,
        /// The initiator's name of the connection.
        cid: u16 = 20,
        /// Command sequence number.
        cmd_sn: u32 = 24,
        /// Status sequence number that is expected next.
        exp_stat_sn: u32 = 28,
    }
}

pdu! {
    /// Logout Request (section 11.14).
    LogoutRequest, Opcode::LogoutRequest, flags 0x80 {
        /// Delivered immediately.
        immediate: bool = 0 / 0x40,
        /// A [`LogoutReason`](crate::LogoutReason).
        reason: u8 = 1 / 0x7f,
        /// The connection to close.
        cid: u16 = 20,
        /// Command sequence number.
        cmd_sn: u32 = 24,
        /// Status sequence number that is expected next.
        exp_stat_sn: u32 = 28,
    }
}

pdu! {
    /// SNACK Request (section 11.16).
    SnackRequest, Opcode::SnackRequest, flags 0x80 {
        /// What is requested.
        kind: u8 = 1 / 0x0f,
        /// The logical unit.
        lun: u64 = 8,
        /// That of a Data-In to acknowledge.
        target_transfer_tag: u32 = 20,
        /// Status sequence number that is expected next.
        exp_stat_sn: u32 = 28,
        /// First sequence number.
        begin_run: u32 = 40,
        /// Number of PDUs.
        run_length: u32 = 44,
    }
}

pdu! {
    /// NOP-Out (section 11.18).
    NopOut, Opcode::NopOut, flags 0x80 {
        /// Delivered immediately.
        immediate: bool = 0 / 0x40,
        /// That of the NOP-In.
        lun: u64 = 8,
        /// That of the NOP-In which it answers, or reserved.
        target_transfer_tag: u32 = 20,
        /// Command sequence number.
        cmd_sn: u32 = 24,
        /// Status sequence number that is expected next.
        exp_stat_sn: u32 = 28,
    }
}
