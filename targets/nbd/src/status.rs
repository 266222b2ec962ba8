//! The translation of NVMe status codes into errors of NBD.

use block_io::Status;
use wire_nbd::NbdError;

/// The error that a client gets for a status other than success. The only such table.
pub(crate) fn error_of(status: Status) -> NbdError {
    const EPERM: i32 = 1;
    const EACCES: i32 = 13;
    const EINVAL: i32 = 22;
    const ENOSPC: i32 = 28;
    const EROFS: i32 = 30;
    // The device was removed, or its channel is closed: what the client has to know is that it should reconnect.
    let gone =
        [Status::INVALID_NAMESPACE_OR_FORMAT, Status::NAMESPACE_NOT_READY, Status::ABORTED_SQ_DELETION];
    if gone.iter().any(|code| status.same_code(*code)) {
        return NbdError::Shutdown;
    }
    if status.same_code(Status::INVALID_OPCODE) {
        return NbdError::NotSup;
    }
    if status.same_code(Status::RESERVATION_CONFLICT) {
        return NbdError::Perm;
    }
    match status.to_errno().0 {
        EPERM | EACCES | EROFS => NbdError::Perm,
        EINVAL => NbdError::Inval,
        ENOSPC => NbdError::NoSpc,
        _ => NbdError::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_an_error_of_nbd() {
        // Status code type and codes; every other status is an I/O error.
        let table: [(NbdError, u8, &[u8]); 9] = [
            (NbdError::NotSup, 0, &[0x01]),
            (NbdError::Inval, 0, &[0x02, 0x0d, 0x0e, 0x0f, 0x11, 0x12, 0x13, 0x16, 0x18, 0x1a, 0x80]),
            (NbdError::Shutdown, 0, &[0x08, 0x0b, 0x82]),
            (NbdError::Perm, 0, &[0x20, 0x83]),
            (NbdError::NoSpc, 0, &[0x81]),
            (NbdError::Inval, 1, &[0x01, 0x02, 0x09, 0x0d, 0x0f, 0x80, 0x81, 0x83]),
            (NbdError::Perm, 1, &[0x0e, 0x82, 0x91]),
            (NbdError::Perm, 2, &[0x86]),
            (NbdError::Io, 3, &[0x00]),
        ];
        for status_code_type in 0..8 {
            for code in 0..=u8::MAX {
                let status = Status::new(status_code_type, code);
                if status.is_success() {
                    continue;
                }
                let row =
                    table.iter().find(|(_, of, codes)| *of == status_code_type && codes.contains(&code));
                let expected = row.map_or(NbdError::Io, |(error, ..)| *error);
                assert_eq!(error_of(status), expected, "{status}");
                assert_eq!(error_of(status.do_not_retry()), expected, "{status}");
            }
        }
    }
}
