//! Reservations: access control for shared namespaces (Base 2.0, section 8.19).

use crate::le::{put, put16, put32, put64, sized, u16_at, u32_at, u64_at};
use crate::opcode::NvmOpcode;
use crate::{DecodeError, Sqe};

wire_enum! {
    /// Reservation types (Base 2.0, section 7.2).
    ReservationType: u8 {
        /// Write Exclusive.
        WriteExclusive = 1,
        /// Exclusive Access.
        ExclusiveAccess = 2,
        /// Write Exclusive - Registrants Only.
        WriteExclusiveRegistrants = 3,
        /// Exclusive Access - Registrants Only.
        ExclusiveAccessRegistrants = 4,
        /// Write Exclusive - All Registrants.
        WriteExclusiveAll = 5,
        /// Exclusive Access - All Registrants.
        ExclusiveAccessAll = 6,
    }
}

wire_enum! {
    /// Reservation Register Action (RREGA).
    RegisterAction: u8 {
        /// Registers a key.
        Register = 0,
        /// Unregisters the host's key.
        Unregister = 1,
        /// Replaces the host's key.
        Replace = 2,
    }
}

wire_enum! {
    /// Reservation Acquire Action (RACQA).
    AcquireAction: u8 {
        /// Acquires the reservation.
        Acquire = 0,
        /// Preempts the registrants with a key.
        Preempt = 1,
        /// Preempts, and aborts the commands of the preempted hosts.
        PreemptAndAbort = 2,
    }
}

wire_enum! {
    /// Reservation Release Action (RRELA).
    ReleaseAction: u8 {
        /// Releases the reservation.
        Release = 0,
        /// Clears the reservation and every registration.
        Clear = 1,
    }
}

wire_enum! {
    /// Change Persist Through Power Loss State (CPTPL).
    PersistChange: u8 {
        /// No change.
        None = 0,
        /// Reservations are released by a power loss.
        Volatile = 2,
        /// Reservations persist through a power loss.
        Persistent = 3,
    }
}

/// Size in bytes of the data of Register and Acquire.
pub const KEYS_SIZE: usize = 16;

/// Encodes the data of Register and Acquire: the current key (CRKEY), and the new key (NRKEY) or the one to
/// preempt (PRKEY).
pub fn encode_keys(current: u64, other: u64) -> [u8; KEYS_SIZE] {
    let mut data = [0; KEYS_SIZE];
    put64(&mut data, 0, current);
    put64(&mut data, 8, other);
    data
}

/// Decodes the data of Register and Acquire: CRKEY, and NRKEY or PRKEY.
pub fn decode_keys(from: &[u8; KEYS_SIZE]) -> (u64, u64) {
    (u64_at(from, 0), u64_at(from, 8))
}

/// The bits of CDW10 that Register, Acquire and Release share: the action in bits 2:0, and Ignore Existing
/// Key in bit 3.
struct ReservationDword {
    action: u8,
    ignore_key: bool,
}

impl ReservationDword {
    fn of(sqe: &Sqe) -> ReservationDword {
        ReservationDword { action: (sqe.cdw10 & 7) as u8, ignore_key: sqe.cdw10 >> 3 & 1 != 0 }
    }

    /// Encodes a command; `rest` provides bits 31:4.
    fn to_sqe(&self, opcode: NvmOpcode, rest: u32) -> Sqe {
        let cdw10 = u32::from(self.action) | u32::from(self.ignore_key) << 3 | rest;
        Sqe { cdw10, ..Sqe::new(opcode.to_wire()) }
    }
}

/// Reservation Register (Base 2.0, section 7.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationRegister {
    /// The action.
    pub action: RegisterAction,
    /// Ignore Existing Key (IEKEY): the current key is not compared.
    pub ignore_key: bool,
    /// Change Persist Through Power Loss State (CPTPL).
    pub persist: PersistChange,
}

impl ReservationRegister {
    /// Decodes the command dwords; `None` for reserved values.
    pub fn from_sqe(sqe: &Sqe) -> Option<ReservationRegister> {
        let ReservationDword { action, ignore_key } = ReservationDword::of(sqe);
        let persist = PersistChange::from_wire((sqe.cdw10 >> 30) as u8)?;
        Some(ReservationRegister { action: RegisterAction::from_wire(action)?, ignore_key, persist })
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    pub fn to_sqe(&self) -> Sqe {
        let dword = ReservationDword { action: self.action.to_wire(), ignore_key: self.ignore_key };
        dword.to_sqe(NvmOpcode::ReservationRegister, u32::from(self.persist.to_wire()) << 30)
    }
}

/// Reservation Acquire (Base 2.0, section 7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationAcquire {
    /// The action (RACQA).
    pub action: AcquireAction,
    /// Ignore Existing Key (IEKEY): the current key is not compared.
    pub ignore_key: bool,
    /// Reservation type (RTYPE).
    pub kind: ReservationType,
}

impl ReservationAcquire {
    /// Decodes the command dwords; `None` for reserved values.
    pub fn from_sqe(sqe: &Sqe) -> Option<ReservationAcquire> {
        let ReservationDword { action, ignore_key } = ReservationDword::of(sqe);
        let kind = ReservationType::from_wire((sqe.cdw10 >> 8) as u8)?;
        Some(ReservationAcquire { action: AcquireAction::from_wire(action)?, ignore_key, kind })
    }

    /// Encodes the command; NSID, CID and data pointer are left to the caller.
    pub fn to_sqe(&self) -> Sqe {
        let dword = ReservationDword { action: self.action.to_wire(), ignore_key: self.ignore_key };
        dword.to_sqe(NvmOpcode::ReservationAcquire, u32::from(self.kind.to_wire()) << 8)
    }
}

/// Reservation Release (Base 2.0, section 7.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationRelease {
    /// The action (RRELA).
    pub action: ReleaseAction,
    /// Ignore Existing Key (IEKEY): the current key is not compared.
    pub ignore_key: bool,
    /// Reservation type (RTYPE).
    pub kind: ReservationType,
}

impl ReservationRelease {
    /// Decodes the command dwords; `None` for reserved values.
    pub fn from_sqe(sqe: &Sqe) -> Option<ReservationRelease> {
        let ReservationDword { action, ignore_key } = ReservationDword::of(sqe);
        let kind = ReservationType::from_wire((sqe.cdw10 >> 8) as u8)?;
        Some(ReservationRelease { action: ReleaseAction::from_wire(action)?, ignore_key, kind })
    }

    /// Encodes the command; NSID, CID and data pointer are left to the caller.
    pub fn to_sqe(&self) -> Sqe {
        let dword = ReservationDword { action: self.action.to_wire(), ignore_key: self.ignore_key };
        dword.to_sqe(NvmOpcode::ReservationRelease, u32::from(self.kind.to_wire()) << 8)
    }
}

/// Reservation Report (Base 2.0, section 7.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationReport {
    /// Extended Data Structure (EDS): 128-bit host identifiers.
    pub extended: bool,
    /// Bytes to return; a multiple of 4, at least 4.
    pub length_bytes: u64,
}

impl ReservationReport {
    /// Decodes the command dwords; every value is valid.
    pub const fn from_sqe(sqe: &Sqe) -> ReservationReport {
        ReservationReport { extended: sqe.cdw11 & 1 != 0, length_bytes: (sqe.cdw10 as u64 + 1) * 4 }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    ///
    /// # Panics
    /// If `length_bytes` is not a multiple of 4 from 4 to 2^34.
    pub fn to_sqe(&self) -> Sqe {
        assert!(self.length_bytes.is_multiple_of(4), "{} bytes are not whole dwords", self.length_bytes);
        let numd = (self.length_bytes / 4).checked_sub(1).and_then(|numd| u32::try_from(numd).ok());
        Sqe {
            cdw10: numd.expect("a report is 4 bytes to 16 GiB"),
            cdw11: self.extended.into(),
            ..Sqe::new(NvmOpcode::ReservationReport.to_wire())
        }
    }
}

/// Reservation Status: the data of Reservation Report (Base 2.0, section 7.5).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservationStatus {
    /// Generation (GEN): incremented when registrations change.
    pub generation: u32,
    /// Reservation Type (RTYPE); `None` without a reservation.
    pub kind: Option<ReservationType>,
    /// Persist Through Power Loss State (PTPLS).
    pub persistent: bool,
    /// Registered controllers (REGCTL of them).
    pub registrants: Vec<RegisteredController>,
}

/// A registered controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisteredController {
    /// Controller identifier.
    pub cntlid: u16,
    /// Its host holds the reservation (RCSTS).
    pub holder: bool,
    /// Host identifier; only the first 64 bits in the non-extended format.
    pub host_id: [u8; 16],
    /// Reservation key (RKEY).
    pub key: u64,
}

const HEADER: usize = 24;
const REGISTRANT: usize = 24;
const EXTENDED_HEADER: usize = 64;
const EXTENDED_REGISTRANT: usize = 64;

impl ReservationStatus {
    /// Size in bytes of a report of this number of registrants.
    pub const fn size(registrants: usize, extended: bool) -> usize {
        if extended {
            EXTENDED_HEADER + registrants * EXTENDED_REGISTRANT
        } else {
            HEADER + registrants * REGISTRANT
        }
    }

    /// Decodes a report, with as many registrants as the data contains.
    ///
    /// # Errors
    /// Data shorter than the header, or a reserved type.
    pub fn decode(from: &[u8], extended: bool) -> Result<ReservationStatus, DecodeError> {
        let header = sized::<HEADER>("Reservation Status", from)?;
        let kind = match header[4] {
            0 => None,
            value => {
                Some(ReservationType::from_wire(value).ok_or(DecodeError::value("RTYPE", 4, value.into()))?)
            }
        };
        let count = usize::from(u16_at(header, 5));
        let (start, each) =
            if extended { (EXTENDED_HEADER, EXTENDED_REGISTRANT) } else { (HEADER, REGISTRANT) };
        let body = from.get(start..).unwrap_or(&[]);
        let registrants = body.chunks_exact(each).take(count).map(|entry| {
            let mut host_id = [0; 16];
            let key = if extended {
                host_id.copy_from_slice(&entry[16..32]);
                u64_at(entry, 8)
            } else {
                host_id[..8].copy_from_slice(&entry[8..16]);
                u64_at(entry, 16)
            };
            RegisteredController { cntlid: u16_at(entry, 0), holder: entry[2] & 1 != 0, host_id, key }
        });
        Ok(ReservationStatus {
            generation: u32_at(header, 0),
            kind,
            persistent: header[9] & 1 != 0,
            registrants: registrants.collect(),
        })
    }

    /// Encodes the report, truncated to the length of `into`.
    pub fn encode(&self, extended: bool, into: &mut [u8]) {
        let mut report = vec![0; ReservationStatus::size(self.registrants.len(), extended)];
        put32(&mut report, 0, self.generation);
        report[4] = self.kind.map_or(0, ReservationType::to_wire);
        put16(&mut report, 5, u16::try_from(self.registrants.len()).unwrap_or(u16::MAX));
        report[9] = self.persistent.into();
        let (start, each) =
            if extended { (EXTENDED_HEADER, EXTENDED_REGISTRANT) } else { (HEADER, REGISTRANT) };
        for (registrant, entry) in self.registrants.iter().zip(report[start..].chunks_exact_mut(each)) {
            put16(entry, 0, registrant.cntlid);
            entry[2] = registrant.holder.into();
            if extended {
                put64(entry, 8, registrant.key);
                put(entry, 16, &registrant.host_id);
            } else {
                put(entry, 8, &registrant.host_id[..8]);
                put64(entry, 16, registrant.key);
            }
        }
        into.fill(0);
        let length = report.len().min(into.len());
        into[..length].copy_from_slice(&report[..length]);
    }
}
