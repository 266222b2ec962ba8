//! NVMe status codes: the error domain of all block I/O.

use std::fmt;

/// The outcome of an I/O: an NVMe status field without its phase bit.
///
/// Bits 0–7 are the status code, 8–10 the status code type, 11–12 the command retry delay, 13 More
/// and 14 Do Not Retry: the layout of completion queue entry DW3 bits 17–31 (NVM Express Base
/// Specification 2.0, figure 92).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(u16);

/// A Linux error number, positive; 0 is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

macro_rules! statuses {
    ($($name:ident = $sct:literal, $sc:literal, $text:literal, $errno:literal;)*) => {
        impl Status {
            $(#[doc = concat!($text, " (type ", $sct, "h, code ", $sc, ")")]
            pub const $name: Status = Status::new($sct, $sc);)*

            /// The specification's name for the code; `None` for a code that is not listed here.
            pub const fn name(self) -> Option<&'static str> {
                $(if self.code_only() == Self::$name.0 { return Some($text); })*
                None
            }

            /// The error number for POSIX callers; 0 is success.
            ///
            /// The only mapping between the two error domains. Unknown codes map to `EIO`.
            pub const fn to_errno(self) -> Errno {
                $(if self.code_only() == Self::$name.0 { return Errno($errno); })*
                Errno(EIO)
            }
        }
        #[cfg(test)]
        const ALL: &[Status] = &[$(Status::$name),*];
    };
}

const EIO: i32 = 5;

// NVM Express Base Specification 2.0, section 4.2.3 (figures 94 to 97); NVM Command Set
// Specification 1.0, section 4.1.2; NVMe over Fabrics codes of section 4.2.3.2 that have one meaning
// (the others: `fabrics_statuses!`); codes of zones: Zoned Namespace Command Set Specification 1.1.
statuses! {
    SUCCESS = 0x0, 0x00, "Successful Completion", 0;
    INVALID_OPCODE = 0x0, 0x01, "Invalid Command Opcode", 95;
    INVALID_FIELD = 0x0, 0x02, "Invalid Field in Command", 22;
    COMMAND_ID_CONFLICT = 0x0, 0x03, "Command ID Conflict", 5;
    DATA_TRANSFER_ERROR = 0x0, 0x04, "Data Transfer Error", 5;
    ABORTED_POWER_LOSS = 0x0, 0x05, "Commands Aborted due to Power Loss Notification", 5;
    INTERNAL_ERROR = 0x0, 0x06, "Internal Error", 5;
    ABORT_REQUESTED = 0x0, 0x07, "Command Abort Requested", 125;
    ABORTED_SQ_DELETION = 0x0, 0x08, "Command Aborted due to SQ Deletion", 125;
    FUSED_FAILED = 0x0, 0x09, "Command Aborted due to Failed Fused Command", 5;
    FUSED_MISSING = 0x0, 0x0a, "Command Aborted due to Missing Fused Command", 5;
    INVALID_NAMESPACE_OR_FORMAT = 0x0, 0x0b, "Invalid Namespace or Format", 19;
    COMMAND_SEQUENCE_ERROR = 0x0, 0x0c, "Command Sequence Error", 5;
    INVALID_SGL_SEGMENT = 0x0, 0x0d, "Invalid SGL Segment Descriptor", 22;
    INVALID_SGL_COUNT = 0x0, 0x0e, "Invalid Number of SGL Descriptors", 22;
    DATA_SGL_LENGTH_INVALID = 0x0, 0x0f, "Data SGL Length Invalid", 22;
    SGL_TYPE_INVALID = 0x0, 0x11, "SGL Descriptor Type Invalid", 22;
    INVALID_USE_OF_CMB = 0x0, 0x12, "Invalid Use of Controller Memory Buffer", 22;
    PRP_OFFSET_INVALID = 0x0, 0x13, "PRP Offset Invalid", 22;
    SGL_OFFSET_INVALID = 0x0, 0x16, "SGL Offset Invalid", 22;
    HOST_ID_INCONSISTENT = 0x0, 0x18, "Host Identifier Inconsistent Format", 22;
    KEEP_ALIVE_EXPIRED = 0x0, 0x19, "Keep Alive Timer Expired", 110;
    KEEP_ALIVE_INVALID = 0x0, 0x1a, "Keep Alive Timeout Invalid", 22;
    NAMESPACE_WRITE_PROTECTED = 0x0, 0x20, "Namespace is Write Protected", 30;
    COMMAND_INTERRUPTED = 0x0, 0x21, "Command Interrupted", 11;
    TRANSIENT_TRANSPORT_ERROR = 0x0, 0x22, "Transient Transport Error", 11;
    LBA_OUT_OF_RANGE = 0x0, 0x80, "LBA Out of Range", 22;
    CAPACITY_EXCEEDED = 0x0, 0x81, "Capacity Exceeded", 28;
    NAMESPACE_NOT_READY = 0x0, 0x82, "Namespace Not Ready", 11;
    RESERVATION_CONFLICT = 0x0, 0x83, "Reservation Conflict", 52;
    INVALID_QUEUE_IDENTIFIER = 0x1, 0x01, "Invalid Queue Identifier", 22;
    INVALID_QUEUE_SIZE = 0x1, 0x02, "Invalid Queue Size", 22;
    ABORT_LIMIT_EXCEEDED = 0x1, 0x03, "Abort Command Limit Exceeded", 11;
    ASYNC_EVENT_LIMIT_EXCEEDED = 0x1, 0x05, "Asynchronous Event Request Limit Exceeded", 11;
    INVALID_LOG_PAGE = 0x1, 0x09, "Invalid Log Page", 22;
    FEATURE_NOT_SAVEABLE = 0x1, 0x0d, "Feature Identifier Not Saveable", 22;
    FEATURE_NOT_CHANGEABLE = 0x1, 0x0e, "Feature Not Changeable", 1;
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x1, 0x0f, "Feature Not Namespace Specific", 22;
    CONFLICTING_ATTRIBUTES = 0x1, 0x80, "Conflicting Attributes", 22;
    INVALID_PROTECTION_INFORMATION = 0x1, 0x81, "Invalid Protection Information", 22;
    READ_ONLY_RANGE = 0x1, 0x82, "Attempted Write to Read Only Range", 30;
    COMMAND_SIZE_LIMIT_EXCEEDED = 0x1, 0x83, "Command Size Limit Exceeded", 22;
    DISCOVERY_RESTART = 0x1, 0x90, "Discover Restart", 11;
    AUTHENTICATION_REQUIRED = 0x1, 0x91, "Authentication Required", 13;
    ZONE_BOUNDARY_ERROR = 0x1, 0xb8, "Zone Boundary Error", 5;
    ZONE_IS_FULL = 0x1, 0xb9, "Zone Is Full", 5;
    ZONE_IS_READ_ONLY = 0x1, 0xba, "Zone Is Read Only", 5;
    ZONE_IS_OFFLINE = 0x1, 0xbb, "Zone Is Offline", 5;
    ZONE_INVALID_WRITE = 0x1, 0xbc, "Zone Invalid Write", 5;
    TOO_MANY_ACTIVE_ZONES = 0x1, 0xbd, "Too Many Active Zones", 5;
    TOO_MANY_OPEN_ZONES = 0x1, 0xbe, "Too Many Open Zones", 5;
    INVALID_ZONE_TRANSITION = 0x1, 0xbf, "Invalid Zone State Transition", 5;
    WRITE_FAULT = 0x2, 0x80, "Write Fault", 5;
    UNRECOVERED_READ_ERROR = 0x2, 0x81, "Unrecovered Read Error", 61;
    GUARD_CHECK_ERROR = 0x2, 0x82, "End-to-end Guard Check Error", 84;
    APPLICATION_TAG_CHECK_ERROR = 0x2, 0x83, "End-to-end Application Tag Check Error", 84;
    REFERENCE_TAG_CHECK_ERROR = 0x2, 0x84, "End-to-end Reference Tag Check Error", 84;
    COMPARE_FAILURE = 0x2, 0x85, "Compare Failure", 52;
    ACCESS_DENIED = 0x2, 0x86, "Access Denied", 13;
    DEALLOCATED_BLOCK = 0x2, 0x87, "Deallocated or Unwritten Logical Block", 61;
    STORAGE_TAG_CHECK_ERROR = 0x2, 0x88, "End-to-end Storage Tag Check Error", 84;
    INTERNAL_PATH_ERROR = 0x3, 0x00, "Internal Path Error", 67;
    ANA_PERSISTENT_LOSS = 0x3, 0x01, "Asymmetric Access Persistent Loss", 67;
    ANA_INACCESSIBLE = 0x3, 0x02, "Asymmetric Access Inaccessible", 67;
    ANA_TRANSITION = 0x3, 0x03, "Asymmetric Access Transition", 11;
    CONTROLLER_PATHING_ERROR = 0x3, 0x60, "Controller Pathing Error", 67;
    HOST_PATHING_ERROR = 0x3, 0x70, "Host Pathing Error", 67;
    ABORTED_BY_HOST = 0x3, 0x71, "Command Aborted By Host", 125;
}

/// The status of a Connect or Disconnect command.
///
/// Status codes 80h to BFh of type 1 belong to the command: 1/82 is "Attempted Write to Read Only Range" of
/// an I/O command and "Connect Invalid Parameters" of Connect. [`Status`] names them as I/O commands mean
/// them; this type names them as the Fabrics commands do. Every other code means the same in both.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct FabricsStatus(pub Status);

macro_rules! fabrics_statuses {
    ($($name:ident = $sct:literal, $sc:literal, $text:literal, $errno:literal;)*) => {
        impl Status {
            $(#[doc = concat!($text, " (type ", $sct, "h, code ", $sc, "); named by [`FabricsStatus`]")]
            pub const $name: Status = Status::new($sct, $sc);)*
        }
        impl FabricsStatus {
            /// The specification's name for the code; `None` for a code that is not listed here.
            pub const fn name(self) -> Option<&'static str> {
                $(if self.0.same_code(Status::$name) { return Some($text); })*
                self.0.name()
            }

            /// The error number for POSIX callers; 0 is success. Unknown codes map to `EIO`.
            pub const fn to_errno(self) -> Errno {
                $(if self.0.same_code(Status::$name) { return Errno($errno); })*
                self.0.to_errno()
            }
        }
    };
}

// NVM Express Base Specification 2.0, section 4.2.3.2, and the status values of Connect (section 6.3.1) and
// Disconnect (section 6.4).
fabrics_statuses! {
    CONNECT_INCOMPATIBLE_FORMAT = 0x1, 0x80, "Connect Incompatible Format", 22;
    CONNECT_CONTROLLER_BUSY = 0x1, 0x81, "Connect Controller Busy", 16;
    CONNECT_INVALID_PARAMETERS = 0x1, 0x82, "Connect Invalid Parameters", 22;
    CONNECT_RESTART_DISCOVERY = 0x1, 0x83, "Connect Restart Discovery", 11;
    CONNECT_INVALID_HOST = 0x1, 0x84, "Connect Invalid Host", 13;
}

impl Status {
    const DNR: u16 = 1 << 14;
    const CODE: u16 = 0x7ff;
    /// First bit of Command Retry Delay (CRD), which has two.
    const CRD_SHIFT: u16 = 11;

    /// A status from its status code type (0 to 7) and status code.
    pub const fn new(status_code_type: u8, status_code: u8) -> Status {
        Status(((status_code_type as u16 & 7) << 8) | status_code as u16)
    }

    /// Decodes the 15 bits above the phase bit of a completion queue entry.
    pub const fn from_field(field: u16) -> Status {
        Status(field & 0x7fff)
    }

    /// Encodes the 15 bits above the phase bit of a completion queue entry.
    pub const fn field(self) -> u16 {
        self.0
    }

    /// The same status with Do Not Retry (DNR) set: the same command would fail again.
    pub const fn do_not_retry(self) -> Status {
        Status(self.0 | Self::DNR)
    }

    /// Whether Do Not Retry (DNR) is set.
    pub const fn is_do_not_retry(self) -> bool {
        self.0 & Self::DNR != 0
    }

    /// The same status with a Command Retry Delay (CRD): the host retries after one of the three delays of
    /// Identify Controller (CRDT1 to CRDT3); 0 is none.
    pub const fn with_retry_delay(self, delay: u8) -> Status {
        let others = self.0 & !(3 << Self::CRD_SHIFT);
        Status(others | (delay as u16 & 3) << Self::CRD_SHIFT)
    }

    /// Command Retry Delay (CRD), 0 to 3.
    pub const fn retry_delay(self) -> u8 {
        (self.0 >> Self::CRD_SHIFT & 3) as u8
    }

    /// Whether the I/O succeeded.
    pub const fn is_success(self) -> bool {
        self.0 & Self::CODE == 0
    }

    /// Status code type, 0 to 7.
    pub const fn status_code_type(self) -> u8 {
        ((self.0 & Self::CODE) >> 8) as u8
    }

    /// Status code within its type.
    pub const fn status_code(self) -> u8 {
        self.0 as u8
    }

    /// Whether two statuses have the same type and code; ignores CRD, More and DNR.
    pub const fn same_code(self, other: Status) -> bool {
        self.code_only() == other.code_only()
    }

    const fn code_only(self) -> u16 {
        self.0 & Self::CODE
    }

    fn write_named(self, name: Option<&str>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = name.unwrap_or("Unknown Status");
        write!(f, "{name} ({:02x}/{:02x})", self.status_code_type(), self.status_code())?;
        if self.is_do_not_retry() { f.write_str(", do not retry") } else { Ok(()) }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_named(self.name(), f)
    }
}

impl fmt::Debug for FabricsStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for FabricsStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.write_named(self.name(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_an_errno() {
        // Error number, status code type and codes; every other status is an I/O error.
        let table: &[(i32, u8, &[u8])] = &[
            // EPERM
            (1, 1, &[0x0e]),
            // EAGAIN
            (11, 0, &[0x21, 0x22, 0x82]),
            // EAGAIN
            (11, 1, &[0x03, 0x05, 0x90]),
            // EAGAIN
            (11, 3, &[0x03]),
            // EACCES
            (13, 1, &[0x91]),
            // EACCES
            (13, 2, &[0x86]),
            // ENODEV
            (19, 0, &[0x0b]),
            // EINVAL
            (22, 0, &[0x02, 0x0d, 0x0e, 0x0f, 0x11, 0x12, 0x13, 0x16, 0x18, 0x1a, 0x80]),
            // EINVAL
            (22, 1, &[0x01, 0x02, 0x09, 0x0d, 0x0f, 0x80, 0x81, 0x83]),
            // ENOSPC
            (28, 0, &[0x81]),
            // EROFS
            (30, 0, &[0x20]),
            // EROFS
            (30, 1, &[0x82]),
            // EBADE
            (52, 0, &[0x83]),
            // EBADE
            (52, 2, &[0x85]),
            // ENODATA
            (61, 2, &[0x81, 0x87]),
            // ENOLINK
            (67, 3, &[0x00, 0x01, 0x02, 0x60, 0x70]),
            // EILSEQ
            (84, 2, &[0x82, 0x83, 0x84, 0x88]),
            // EOPNOTSUPP
            (95, 0, &[0x01]),
            // ETIMEDOUT
            (110, 0, &[0x19]),
            // ECANCELED
            (125, 0, &[0x07, 0x08]),
            // ECANCELED
            (125, 3, &[0x71]),
        ];
        for status_code_type in 0..8 {
            for code in 0..=u8::MAX {
                let status = Status::new(status_code_type, code);
                let row =
                    table.iter().find(|(_, of, codes)| *of == status_code_type && codes.contains(&code));
                let expected = if status.is_success() { 0 } else { row.map_or(EIO, |(errno, ..)| *errno) };
                assert_eq!(status.to_errno(), Errno(expected), "{status}");
                assert_eq!(status.do_not_retry().to_errno(), Errno(expected), "{status}");
            }
        }
    }

    #[test]
    fn retry_bits_change_neither_code_nor_errno() {
        let status = Status::LBA_OUT_OF_RANGE.do_not_retry();
        assert!(status.is_do_not_retry() && status.same_code(Status::LBA_OUT_OF_RANGE));
        assert_eq!(status.to_errno(), Status::LBA_OUT_OF_RANGE.to_errno());
        assert_eq!(status.to_string(), "LBA Out of Range (00/80), do not retry");
    }

    #[test]
    fn a_fabrics_command_has_its_own_names_and_errno() {
        // Code, name and errno of an I/O command, name and errno of Connect or Disconnect.
        let table = [
            (0x80, "Conflicting Attributes", 22, "Connect Incompatible Format", 22),
            (0x81, "Invalid Protection Information", 22, "Connect Controller Busy", 16),
            (0x82, "Attempted Write to Read Only Range", 30, "Connect Invalid Parameters", 22),
            (0x83, "Command Size Limit Exceeded", 22, "Connect Restart Discovery", 11),
            (0x84, "Unknown Status", 5, "Connect Invalid Host", 13),
            (0x91, "Authentication Required", 13, "Authentication Required", 13),
            (0x92, "Unknown Status", 5, "Unknown Status", 5),
        ];
        for (code, name, errno, connect_name, connect_errno) in table {
            let status = Status::new(1, code).do_not_retry();
            let tail = format!("(01/{code:02x}), do not retry");
            assert_eq!(status.to_string(), format!("{name} {tail}"));
            assert_eq!(status.to_errno(), Errno(errno), "{status}");
            let status = FabricsStatus(status);
            assert_eq!(status.to_string(), format!("{connect_name} {tail}"));
            assert_eq!(status.to_errno(), Errno(connect_errno), "{status}");
        }
        for status in ALL.iter().filter(|status| status.status_code_type() != 1) {
            assert_eq!(FabricsStatus(*status).name(), status.name());
            assert_eq!(FabricsStatus(*status).to_errno(), status.to_errno());
        }
    }

    #[test]
    fn field_round_trips_without_the_phase_bit() {
        for field in 0..=u16::MAX {
            assert_eq!(Status::from_field(field).field(), field & 0x7fff);
        }
    }
}
