//! The translation of NVMe status codes into status and sense data of SCSI.

use block_io::Status;
use wire_scsi::{AdditionalSense as Code, ScsiStatus, Sense, SenseKey};

/// Status and sense data for a status other than success. The only such table.
///
/// What NVMe and SCSI both have is as in NVM Express' SCSI translation reference; a condition that passes is one that
/// initiators retry (ABORTED COMMAND, BUSY), and an unknown status is an internal target failure.
pub fn failure_of(status: Status) -> (ScsiStatus, Option<Sense>) {
    use SenseKey as Key;
    if status.same_code(Status::RESERVATION_CONFLICT) {
        return (ScsiStatus::ReservationConflict, None);
    }
    if status.same_code(Status::COMMAND_INTERRUPTED) {
        return (ScsiStatus::Busy, None);
    }
    let found = TABLE.iter().find(|(_, _, codes)| codes.iter().any(|code| status.same_code(*code)));
    let (key, additional) =
        found.map_or((Key::HardwareError, Code::INTERNAL_TARGET_FAILURE), |row| (row.0, row.1));
    (ScsiStatus::CheckCondition, Some(Sense::new(key, additional)))
}

type Row = (SenseKey, Code, &'static [Status]);

const TABLE: [Row; 20] = [
    (SenseKey::IllegalRequest, Code::INVALID_COMMAND_OPERATION_CODE, &[Status::INVALID_OPCODE]),
    (
        SenseKey::IllegalRequest,
        Code::INVALID_FIELD_IN_CDB,
        &[
            Status::INVALID_FIELD,
            Status::CONFLICTING_ATTRIBUTES,
            Status::INVALID_PROTECTION_INFORMATION,
            Status::COMMAND_SIZE_LIMIT_EXCEEDED,
        ],
    ),
    (SenseKey::IllegalRequest, Code::LBA_OUT_OF_RANGE, &[Status::LBA_OUT_OF_RANGE]),
    // The device was removed.
    (SenseKey::IllegalRequest, Code::LOGICAL_UNIT_NOT_SUPPORTED, &[Status::INVALID_NAMESPACE_OR_FORMAT]),
    (
        SenseKey::AbortedCommand,
        Code::NONE,
        &[
            Status::ABORT_REQUESTED,
            Status::ABORTED_SQ_DELETION,
            Status::FUSED_FAILED,
            Status::FUSED_MISSING,
            Status::ABORTED_BY_HOST,
        ],
    ),
    (SenseKey::AbortedCommand, Code::POWER_LOSS_EXPECTED, &[Status::ABORTED_POWER_LOSS]),
    (
        SenseKey::AbortedCommand,
        Code::DATA_PHASE_ERROR,
        &[Status::DATA_TRANSFER_ERROR, Status::TRANSIENT_TRANSPORT_ERROR],
    ),
    (SenseKey::AbortedCommand, Code::GUARD_CHECK_FAILED, &[Status::GUARD_CHECK_ERROR]),
    (SenseKey::AbortedCommand, Code::APPLICATION_TAG_CHECK_FAILED, &[Status::APPLICATION_TAG_CHECK_ERROR]),
    (SenseKey::AbortedCommand, Code::REFERENCE_TAG_CHECK_FAILED, &[Status::REFERENCE_TAG_CHECK_ERROR]),
    (SenseKey::NotReady, Code::BECOMING_READY, &[Status::NAMESPACE_NOT_READY]),
    (SenseKey::NotReady, Code::ASYMMETRIC_ACCESS_TRANSITION, &[Status::ANA_TRANSITION]),
    (
        SenseKey::NotReady,
        Code::TARGET_PORT_UNAVAILABLE,
        &[
            Status::INTERNAL_PATH_ERROR,
            Status::ANA_PERSISTENT_LOSS,
            Status::ANA_INACCESSIBLE,
            Status::CONTROLLER_PATHING_ERROR,
            Status::HOST_PATHING_ERROR,
        ],
    ),
    (
        SenseKey::DataProtect,
        Code::WRITE_PROTECTED,
        &[Status::NAMESPACE_WRITE_PROTECTED, Status::READ_ONLY_RANGE, Status::ZONE_IS_READ_ONLY],
    ),
    (SenseKey::DataProtect, Code::SPACE_ALLOCATION_FAILED, &[Status::CAPACITY_EXCEEDED]),
    (SenseKey::DataProtect, Code::ACCESS_DENIED, &[Status::ACCESS_DENIED, Status::AUTHENTICATION_REQUIRED]),
    (SenseKey::MediumError, Code::WRITE_FAULT, &[Status::WRITE_FAULT]),
    (
        SenseKey::MediumError,
        Code::UNRECOVERED_READ_ERROR,
        &[Status::UNRECOVERED_READ_ERROR, Status::DEALLOCATED_BLOCK],
    ),
    (SenseKey::Miscompare, Code::MISCOMPARE_DURING_VERIFY, &[Status::COMPARE_FAILURE]),
    (SenseKey::HardwareError, Code::INTERNAL_TARGET_FAILURE, &[Status::INTERNAL_ERROR]),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Type, code, sense key, additional sense code and qualifier.
    const EXPECTED: [(u8, u8, u8, u8, u8); 39] = [
        (0, 0x01, 0x5, 0x20, 0x00),
        (0, 0x02, 0x5, 0x24, 0x00),
        (0, 0x04, 0xb, 0x4b, 0x00),
        (0, 0x05, 0xb, 0x0b, 0x08),
        (0, 0x06, 0x4, 0x44, 0x00),
        (0, 0x07, 0xb, 0x00, 0x00),
        (0, 0x08, 0xb, 0x00, 0x00),
        (0, 0x09, 0xb, 0x00, 0x00),
        (0, 0x0a, 0xb, 0x00, 0x00),
        (0, 0x0b, 0x5, 0x25, 0x00),
        (0, 0x20, 0x7, 0x27, 0x00),
        (0, 0x22, 0xb, 0x4b, 0x00),
        (0, 0x80, 0x5, 0x21, 0x00),
        (0, 0x81, 0x7, 0x27, 0x07),
        (0, 0x82, 0x2, 0x04, 0x01),
        (1, 0x80, 0x5, 0x24, 0x00),
        (1, 0x81, 0x5, 0x24, 0x00),
        (1, 0x82, 0x7, 0x27, 0x00),
        (1, 0x83, 0x5, 0x24, 0x00),
        (1, 0x91, 0x7, 0x20, 0x02),
        (1, 0xba, 0x7, 0x27, 0x00),
        (2, 0x80, 0x3, 0x03, 0x00),
        (2, 0x81, 0x3, 0x11, 0x00),
        (2, 0x82, 0xb, 0x10, 0x01),
        (2, 0x83, 0xb, 0x10, 0x02),
        (2, 0x84, 0xb, 0x10, 0x03),
        (2, 0x85, 0xe, 0x1d, 0x00),
        (2, 0x86, 0x7, 0x20, 0x02),
        (2, 0x87, 0x3, 0x11, 0x00),
        (3, 0x00, 0x2, 0x04, 0x0c),
        (3, 0x01, 0x2, 0x04, 0x0c),
        (3, 0x02, 0x2, 0x04, 0x0c),
        (3, 0x03, 0x2, 0x04, 0x0a),
        (3, 0x60, 0x2, 0x04, 0x0c),
        (3, 0x70, 0x2, 0x04, 0x0c),
        (3, 0x71, 0xb, 0x00, 0x00),
        // Among those that are not listed.
        (0, 0x19, 0x4, 0x44, 0x00),
        (5, 0x01, 0x4, 0x44, 0x00),
        (7, 0xff, 0x4, 0x44, 0x00),
    ];

    #[test]
    fn every_status_has_status_and_sense_data() {
        for status_code_type in 0..8 {
            for code in 0..=u8::MAX {
                let status = Status::new(status_code_type, code);
                if status.is_success() {
                    continue;
                }
                let row = EXPECTED.iter().find(|row| (row.0, row.1) == (status_code_type, code));
                let expected = match (status_code_type, code) {
                    (0, 0x83) => (ScsiStatus::ReservationConflict, None),
                    (0, 0x21) => (ScsiStatus::Busy, None),
                    _ => {
                        let (key, code, qualifier) = row.map_or((4, 0x44, 0), |row| (row.2, row.3, row.4));
                        let additional = Code { code, qualifier };
                        let key = SenseKey::from_wire(key).unwrap();
                        (ScsiStatus::CheckCondition, Some(Sense::new(key, additional)))
                    }
                };
                assert_eq!(failure_of(status), expected, "{status}");
                assert_eq!(failure_of(status.do_not_retry()), expected, "{status}");
            }
        }
    }
}
