//! Sense data (SPC-4, section 4.5).

/// Longest sense data of [`Sense::encode`], in bytes.
pub const SENSE_BYTES_MAX: usize = 28;

/// What kind of condition is reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SenseKey {
    /// Nothing to report.
    #[default]
    NoSense = 0x0,
    /// The command succeeded after recovery.
    RecoveredError = 0x1,
    /// The logical unit is not accessible.
    NotReady = 0x2,
    /// The medium is defective.
    MediumError = 0x3,
    /// The device is defective.
    HardwareError = 0x4,
    /// A field of the command or of its parameters is invalid.
    IllegalRequest = 0x5,
    /// Something happened that the initiator has to know of.
    UnitAttention = 0x6,
    /// The medium is protected.
    DataProtect = 0x7,
    /// A copy failed.
    CopyAborted = 0xa,
    /// The device server aborted the command.
    AbortedCommand = 0xb,
    /// Data do not match the medium.
    Miscompare = 0xe,
}

impl SenseKey {
    /// The key with this code; `None` if it is not one of these.
    pub const fn from_wire(code: u8) -> Option<SenseKey> {
        Some(match code {
            0x0 => SenseKey::NoSense,
            0x1 => SenseKey::RecoveredError,
            0x2 => SenseKey::NotReady,
            0x3 => SenseKey::MediumError,
            0x4 => SenseKey::HardwareError,
            0x5 => SenseKey::IllegalRequest,
            0x6 => SenseKey::UnitAttention,
            0x7 => SenseKey::DataProtect,
            0xa => SenseKey::CopyAborted,
            0xb => SenseKey::AbortedCommand,
            0xe => SenseKey::Miscompare,
            _ => return None,
        })
    }
}

/// An additional sense code and its qualifier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AdditionalSense {
    /// ADDITIONAL SENSE CODE.
    pub code: u8,
    /// ADDITIONAL SENSE CODE QUALIFIER.
    pub qualifier: u8,
}

macro_rules! additional_senses {
    ($($name:ident = $code:literal, $qualifier:literal, $text:literal;)*) => {
        impl AdditionalSense {
            $(#[doc = concat!($text, " (", $code, "/", $qualifier, ")")]
            pub const $name: AdditionalSense = AdditionalSense { code: $code, qualifier: $qualifier };)*
        }
    };
}

// SPC-4, annex D.2.
additional_senses! {
    NONE = 0x00, 0x00, "NO ADDITIONAL SENSE INFORMATION";
    WRITE_FAULT = 0x03, 0x00, "PERIPHERAL DEVICE WRITE FAULT";
    NOT_READY = 0x04, 0x00, "LOGICAL UNIT NOT READY, CAUSE NOT REPORTABLE";
    BECOMING_READY = 0x04, 0x01, "LOGICAL UNIT IS IN PROCESS OF BECOMING READY";
    INITIALIZING_COMMAND_REQUIRED = 0x04, 0x02, "LOGICAL UNIT NOT READY, INITIALIZING COMMAND REQUIRED";
    ASYMMETRIC_ACCESS_TRANSITION = 0x04, 0x0a, "LOGICAL UNIT NOT ACCESSIBLE, ASYMMETRIC ACCESS STATE TRANSITION";
    TARGET_PORT_STANDBY = 0x04, 0x0b, "LOGICAL UNIT NOT ACCESSIBLE, TARGET PORT IN STANDBY STATE";
    TARGET_PORT_UNAVAILABLE = 0x04, 0x0c, "LOGICAL UNIT NOT ACCESSIBLE, TARGET PORT IN UNAVAILABLE STATE";
    SANITIZE_IN_PROGRESS = 0x04, 0x1b, "LOGICAL UNIT NOT READY, SANITIZE IN PROGRESS";
    COPY_TARGET_UNREACHABLE = 0x08, 0x04, "UNREACHABLE COPY TARGET";
    POWER_LOSS_EXPECTED = 0x0b, 0x08, "WARNING - POWER LOSS EXPECTED";
    THIRD_PARTY_DEVICE_FAILURE = 0x0d, 0x01, "THIRD PARTY DEVICE FAILURE";
    INCORRECT_COPY_TARGET_TYPE = 0x0d, 0x03, "INCORRECT COPY TARGET DEVICE TYPE";
    INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT = 0x0e, 0x03, "INVALID FIELD IN COMMAND INFORMATION UNIT";
    GUARD_CHECK_FAILED = 0x10, 0x01, "LOGICAL BLOCK GUARD CHECK FAILED";
    APPLICATION_TAG_CHECK_FAILED = 0x10, 0x02, "LOGICAL BLOCK APPLICATION TAG CHECK FAILED";
    REFERENCE_TAG_CHECK_FAILED = 0x10, 0x03, "LOGICAL BLOCK REFERENCE TAG CHECK FAILED";
    UNRECOVERED_READ_ERROR = 0x11, 0x00, "UNRECOVERED READ ERROR";
    PARAMETER_LIST_LENGTH_ERROR = 0x1a, 0x00, "PARAMETER LIST LENGTH ERROR";
    MISCOMPARE_DURING_VERIFY = 0x1d, 0x00, "MISCOMPARE DURING VERIFY OPERATION";
    INVALID_COMMAND_OPERATION_CODE = 0x20, 0x00, "INVALID COMMAND OPERATION CODE";
    ACCESS_DENIED = 0x20, 0x02, "ACCESS DENIED - NO ACCESS RIGHTS";
    LBA_OUT_OF_RANGE = 0x21, 0x00, "LOGICAL BLOCK ADDRESS OUT OF RANGE";
    INVALID_FIELD_IN_CDB = 0x24, 0x00, "INVALID FIELD IN CDB";
    LOGICAL_UNIT_NOT_SUPPORTED = 0x25, 0x00, "LOGICAL UNIT NOT SUPPORTED";
    INVALID_FIELD_IN_PARAMETER_LIST = 0x26, 0x00, "INVALID FIELD IN PARAMETER LIST";
    INVALID_RELEASE = 0x26, 0x04, "INVALID RELEASE OF PERSISTENT RESERVATION";
    TOO_MANY_TARGET_DESCRIPTORS = 0x26, 0x06, "TOO MANY TARGET DESCRIPTORS";
    UNSUPPORTED_TARGET_DESCRIPTOR = 0x26, 0x07, "UNSUPPORTED TARGET DESCRIPTOR TYPE CODE";
    TOO_MANY_SEGMENT_DESCRIPTORS = 0x26, 0x08, "TOO MANY SEGMENT DESCRIPTORS";
    UNSUPPORTED_SEGMENT_DESCRIPTOR = 0x26, 0x09, "UNSUPPORTED SEGMENT DESCRIPTOR TYPE CODE";
    WRITE_PROTECTED = 0x27, 0x00, "WRITE PROTECTED";
    SOFTWARE_WRITE_PROTECTED = 0x27, 0x02, "LOGICAL UNIT SOFTWARE WRITE PROTECTED";
    SPACE_ALLOCATION_FAILED = 0x27, 0x07, "SPACE ALLOCATION FAILED WRITE PROTECT";
    POWER_ON = 0x29, 0x00, "POWER ON, RESET, OR BUS DEVICE RESET OCCURRED";
    BUS_DEVICE_RESET = 0x29, 0x03, "BUS DEVICE RESET FUNCTION OCCURRED";
    NEXUS_LOSS = 0x29, 0x07, "I_T NEXUS LOSS OCCURRED";
    MODE_PARAMETERS_CHANGED = 0x2a, 0x01, "MODE PARAMETERS CHANGED";
    RESERVATIONS_PREEMPTED = 0x2a, 0x03, "RESERVATIONS PREEMPTED";
    RESERVATIONS_RELEASED = 0x2a, 0x04, "RESERVATIONS RELEASED";
    REGISTRATIONS_PREEMPTED = 0x2a, 0x05, "REGISTRATIONS PREEMPTED";
    ASYMMETRIC_ACCESS_CHANGED = 0x2a, 0x06, "ASYMMETRIC ACCESS STATE CHANGED";
    CAPACITY_CHANGED = 0x2a, 0x09, "CAPACITY DATA HAS CHANGED";
    COMMANDS_CLEARED = 0x2f, 0x00, "COMMANDS CLEARED BY ANOTHER INITIATOR";
    SANITIZE_FAILED = 0x31, 0x03, "SANITIZE COMMAND FAILED";
    SAVING_NOT_SUPPORTED = 0x39, 0x00, "SAVING PARAMETERS NOT SUPPORTED";
    MEDIUM_NOT_PRESENT = 0x3a, 0x00, "MEDIUM NOT PRESENT";
    REPORTED_LUNS_CHANGED = 0x3f, 0x0e, "REPORTED LUNS DATA HAS CHANGED";
    INTERNAL_TARGET_FAILURE = 0x44, 0x00, "INTERNAL TARGET FAILURE";
    DATA_PHASE_ERROR = 0x4b, 0x00, "DATA PHASE ERROR";
    MEDIUM_REMOVAL_PREVENTED = 0x53, 0x02, "MEDIUM REMOVAL PREVENTED";
    INSUFFICIENT_RESOURCES = 0x55, 0x03, "INSUFFICIENT RESOURCES";
    INSUFFICIENT_REGISTRATION_RESOURCES = 0x55, 0x04, "INSUFFICIENT REGISTRATION RESOURCES";
}

/// Where an invalid field is (SPC-4, section 4.5.2.4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FieldPointer {
    /// In the CDB, not in the parameter data.
    pub in_cdb: bool,
    /// The byte, counted from 0.
    pub byte: u16,
    /// The field's most significant bit in that byte; `None` for a whole byte.
    pub bit: Option<u8>,
}

/// The format of sense data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SenseFormat {
    /// Fixed: 18 bytes.
    #[default]
    Fixed,
    /// Descriptors: 8 bytes and what descriptors there are.
    Descriptor,
}

/// Sense data of a current error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sense {
    /// SENSE KEY.
    pub key: SenseKey,
    /// What happened.
    pub additional: AdditionalSense,
    /// The INFORMATION field, if it is valid: a block address, or an offset in bytes.
    pub information: Option<u64>,
    /// The invalid field.
    pub field: Option<FieldPointer>,
    /// PROGRESS INDICATION, in 65536ths; excludes `field`.
    pub progress: Option<u16>,
}

const RESPONSE_CODE_FIXED: u8 = 0x70;
const RESPONSE_CODE_DESCRIPTOR: u8 = 0x72;
const VALID: u8 = 0x80;
const SKSV: u8 = 0x80;
const FIXED_BYTES: usize = 18;
const DESCRIPTOR_HEADER_BYTES: usize = 8;
const INFORMATION_DESCRIPTOR_BYTES: usize = 12;
const KEY_SPECIFIC_DESCRIPTOR_BYTES: usize = 8;

impl Sense {
    /// Sense data without further information.
    pub const fn new(key: SenseKey, additional: AdditionalSense) -> Sense {
        Sense { key, additional, information: None, field: None, progress: None }
    }

    /// ILLEGAL REQUEST, INVALID FIELD IN CDB.
    pub const fn invalid_field(byte: u16, bit: Option<u8>) -> Sense {
        let field = Some(FieldPointer { in_cdb: true, byte, bit });
        Sense { field, ..Sense::illegal(AdditionalSense::INVALID_FIELD_IN_CDB) }
    }

    /// ILLEGAL REQUEST, INVALID FIELD IN PARAMETER LIST.
    pub const fn invalid_parameter(byte: u16, bit: Option<u8>) -> Sense {
        let field = Some(FieldPointer { in_cdb: false, byte, bit });
        Sense { field, ..Sense::illegal(AdditionalSense::INVALID_FIELD_IN_PARAMETER_LIST) }
    }

    /// ILLEGAL REQUEST.
    pub const fn illegal(additional: AdditionalSense) -> Sense {
        Sense::new(SenseKey::IllegalRequest, additional)
    }

    /// UNIT ATTENTION.
    pub const fn attention(additional: AdditionalSense) -> Sense {
        Sense::new(SenseKey::UnitAttention, additional)
    }

    /// The three bytes of SENSE KEY SPECIFIC, if they are valid.
    fn key_specific(&self) -> Option<[u8; 3]> {
        if let Some(progress) = self.progress {
            let [high, low] = progress.to_be_bytes();
            return Some([SKSV, high, low]);
        }
        let field = self.field?;
        let bit = field.bit.map_or(0, |bit| 0x08 | (bit & 7));
        let [high, low] = field.byte.to_be_bytes();
        Some([SKSV | (u8::from(field.in_cdb) << 6) | bit, high, low])
    }

    /// Encodes it. Returns the number of bytes.
    ///
    /// The fixed format has 32 bits of information; a larger value is left out (SPC-4, section 4.5.3).
    pub fn encode(&self, format: SenseFormat, out: &mut [u8; SENSE_BYTES_MAX]) -> usize {
        *out = [0; SENSE_BYTES_MAX];
        match format {
            SenseFormat::Fixed => self.encode_fixed(out),
            SenseFormat::Descriptor => self.encode_descriptors(out),
        }
    }

    fn encode_fixed(&self, out: &mut [u8; SENSE_BYTES_MAX]) -> usize {
        out[0] = RESPONSE_CODE_FIXED;
        if let Some(information) = self.information.and_then(|value| u32::try_from(value).ok()) {
            out[0] |= VALID;
            out[3..7].copy_from_slice(&information.to_be_bytes());
        }
        out[2] = self.key as u8;
        out[7] = (FIXED_BYTES - 8) as u8;
        (out[12], out[13]) = (self.additional.code, self.additional.qualifier);
        if let Some(bytes) = self.key_specific() {
            out[15..18].copy_from_slice(&bytes);
        }
        FIXED_BYTES
    }

    fn encode_descriptors(&self, out: &mut [u8; SENSE_BYTES_MAX]) -> usize {
        out[0] = RESPONSE_CODE_DESCRIPTOR;
        out[1] = self.key as u8;
        (out[2], out[3]) = (self.additional.code, self.additional.qualifier);
        let mut at = DESCRIPTOR_HEADER_BYTES;
        if let Some(information) = self.information {
            (out[at], out[at + 1], out[at + 2]) = (0x00, 0x0a, VALID);
            out[at + 4..at + 12].copy_from_slice(&information.to_be_bytes());
            at += INFORMATION_DESCRIPTOR_BYTES;
        }
        if let Some(bytes) = self.key_specific() {
            (out[at], out[at + 1]) = (0x02, 0x06);
            out[at + 4..at + 7].copy_from_slice(&bytes);
            at += KEY_SPECIFIC_DESCRIPTOR_BYTES;
        }
        out[7] = (at - DESCRIPTOR_HEADER_BYTES) as u8;
        at
    }
}

const _: () = assert!(
    DESCRIPTOR_HEADER_BYTES + INFORMATION_DESCRIPTOR_BYTES + KEY_SPECIFIC_DESCRIPTOR_BYTES == SENSE_BYTES_MAX
);

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(sense: Sense, format: SenseFormat) -> Vec<u8> {
        let mut bytes = [0xff; SENSE_BYTES_MAX];
        let length = sense.encode(format, &mut bytes);
        bytes[..length].to_vec()
    }

    #[test]
    fn fixed_sense_data_has_the_fields_of_spc_4_table_53() {
        let sense = Sense {
            information: Some(0x0102_0304),
            ..Sense::new(SenseKey::MediumError, AdditionalSense::UNRECOVERED_READ_ERROR)
        };
        let expected = [0xf0, 0, 3, 1, 2, 3, 4, 10, 0, 0, 0, 0, 0x11, 0, 0, 0, 0, 0];
        assert_eq!(encode(sense, SenseFormat::Fixed), expected);
        // Information of more than 32 bits has no room.
        let sense = Sense { information: Some(1 << 32), ..sense };
        assert_eq!(encode(sense, SenseFormat::Fixed)[..7], [0x70, 0, 3, 0, 0, 0, 0]);
    }

    #[test]
    fn field_pointers_are_key_specific() {
        let sense = Sense::invalid_field(2, Some(5));
        let expected = [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0xcd, 0, 2];
        assert_eq!(encode(sense, SenseFormat::Fixed), expected);
        let expected = [0x72, 5, 0x26, 0, 0, 0, 0, 8, 2, 6, 0, 0, 0x80, 1, 4, 0];
        assert_eq!(encode(Sense::invalid_parameter(0x104, None), SenseFormat::Descriptor), expected);
    }

    #[test]
    fn descriptor_sense_data_has_64_bits_of_information_and_progress() {
        let sense = Sense {
            information: Some(0x0102_0304_0506_0708),
            progress: Some(0x8000),
            ..Sense::new(SenseKey::NotReady, AdditionalSense::SANITIZE_IN_PROGRESS)
        };
        let expected = [
            [0x72, 2, 4, 0x1b, 0, 0, 0, 20].as_slice(),
            &[0, 0x0a, 0x80, 0, 1, 2, 3, 4, 5, 6, 7, 8],
            &[2, 6, 0, 0, 0x80, 0x80, 0, 0],
        ];
        assert_eq!(encode(sense, SenseFormat::Descriptor), expected.concat());
    }

    #[test]
    fn keys_have_their_codes() {
        for code in 0..=u8::MAX {
            assert!(SenseKey::from_wire(code).is_none_or(|key| key as u8 == code));
        }
        assert_eq!((0..=u8::MAX).filter(|code| SenseKey::from_wire(*code).is_some()).count(), 11);
    }
}
