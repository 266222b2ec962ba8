//! Reservations: who may write to a shared namespace (Base 2.0, section 8.19).

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
    /// What Reservation Register does (RREGA).
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
    /// What Reservation Acquire does (RACQA).
    AcquireAction: u8 {
        /// Acquires.
        Acquire = 0,
        /// Takes over from the holder of a key.
        Preempt = 1,
        /// The same, and aborts the other's commands.
        PreemptAndAbort = 2,
    }
}

wire_enum! {
    /// What Reservation Release does (RRELA).
    ReleaseAction: u8 {
        /// Releases.
        Release = 0,
        /// Clears the reservation and every registration.
        Clear = 1,
    }
}

wire_enum! {
    /// What becomes of persistence through power loss with a registration (CPTPL).
    PersistChange: u8 {
        /// Nothing.
        None = 0,
        /// It goes with the power.
        Volatile = 2,
        /// It survives.
        Persistent = 3,
    }
}

/// Bytes of the keys of Register and Acquire.
pub const KEYS_SIZE: usize = 16;

/// Two keys as Register and Acquire take them: the current one, and the new one or the one to preempt.
pub fn encode_keys(current: u64, other: u64) -> [u8; KEYS_SIZE] {
    let mut data = [0; KEYS_SIZE];
    put64(&mut data, 0, current);
    put64(&mut data, 8, other);
    data
}

/// The keys of Register and Acquire.
pub fn decode_keys(from: &[u8; KEYS_SIZE]) -> (u64, u64) {
    (u64_at(from, 0), u64_at(from, 8))
}

/// What Register, Acquire and Release have in common in CDW10: the action in bits 2:0, and in bit 3 whether the
/// key is not compared.
struct Word {
    action: u8,
    ignore_key: bool,
}

impl Word {
    fn of(sqe: &Sqe) -> Word {
        Word { action: (sqe.cdw10 & 7) as u8, ignore_key: sqe.cdw10 >> 3 & 1 != 0 }
    }

    /// A command with this and `rest`, which has bits 31:4.
    fn to_sqe(&self, opcode: NvmOpcode, rest: u32) -> Sqe {
        let cdw10 = u32::from(self.action) | u32::from(self.ignore_key) << 3 | rest;
        Sqe { cdw10, ..Sqe::new(opcode.to_wire()) }
    }
}

/// Reservation Register (Base 2.0, section 7.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register {
    /// What is done.
    pub action: RegisterAction,
    /// The current key is not compared.
    pub ignore_key: bool,
    /// What becomes of persistence.
    pub persist: PersistChange,
}

impl Register {
    /// The view of a command; `None` for reserved values.
    pub fn of(sqe: &Sqe) -> Option<Register> {
        let Word { action, ignore_key } = Word::of(sqe);
        let persist = PersistChange::from_wire((sqe.cdw10 >> 30) as u8)?;
        Some(Register { action: RegisterAction::from_wire(action)?, ignore_key, persist })
    }

    /// A command with this content.
    pub fn to_sqe(&self) -> Sqe {
        let word = Word { action: self.action.to_wire(), ignore_key: self.ignore_key };
        word.to_sqe(NvmOpcode::ReservationRegister, u32::from(self.persist.to_wire()) << 30)
    }
}

/// Commands that name a type of reservation, in bits 15:8 of CDW10.
macro_rules! typed {
    ($($(#[$about:meta])* $command:ident($action:ident, $opcode:ident);)*) => {$(
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $command {
            /// What is done.
            pub action: $action,
            /// The current key is not compared.
            pub ignore_key: bool,
            /// Which type.
            pub kind: ReservationType,
        }

        impl $command {
            /// The view of a command; `None` for reserved values.
            pub fn of(sqe: &Sqe) -> Option<$command> {
                let Word { action, ignore_key } = Word::of(sqe);
                let kind = ReservationType::from_wire((sqe.cdw10 >> 8) as u8)?;
                Some($command { action: $action::from_wire(action)?, ignore_key, kind })
            }

            /// A command with this content.
            pub fn to_sqe(&self) -> Sqe {
                let word = Word { action: self.action.to_wire(), ignore_key: self.ignore_key };
                word.to_sqe(NvmOpcode::$opcode, u32::from(self.kind.to_wire()) << 8)
            }
        }
    )*};
}

typed! {
    /// Reservation Acquire (Base 2.0, section 7.2).
    Acquire(AcquireAction, ReservationAcquire);
    /// Reservation Release (Base 2.0, section 7.4).
    Release(ReleaseAction, ReservationRelease);
}

/// Reservation Report (Base 2.0, section 7.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Host identifiers of 128 bits.
    pub extended: bool,
    /// Bytes to return; a multiple of 4, at least 4.
    pub length_bytes: u64,
}

impl Report {
    /// The view of a command; any command has one.
    pub const fn of(sqe: &Sqe) -> Report {
        Report { extended: sqe.cdw11 & 1 != 0, length_bytes: (sqe.cdw10 as u64 + 1) * 4 }
    }

    /// A command with this content.
    ///
    /// # Panics
    /// When `length_bytes` is not a multiple of 4 from 4 to 2^34.
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

/// What Reservation Report returns (Base 2.0, section 7.5), with 128-bit host identifiers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reservation {
    /// Counts changes of registrations.
    pub generation: u32,
    /// The type held; `None` for no reservation.
    pub kind: Option<ReservationType>,
    /// Registrations and the reservation survive a power loss.
    pub persistent: bool,
    /// Who is registered.
    pub registrants: Vec<Registrant>,
}

/// A controller whose host is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registrant {
    /// Controller identifier.
    pub cntlid: u16,
    /// Its host holds the reservation.
    pub holder: bool,
    /// The host's identifier; 64 bits of it in the short form.
    pub host_id: [u8; 16],
    /// Its key.
    pub key: u64,
}

const HEADER: usize = 24;
const SHORT: usize = 24;
const EXTENDED_HEADER: usize = 64;
const EXTENDED: usize = 64;

impl Reservation {
    /// Bytes of a report of so many registrants.
    pub const fn size(registrants: usize, extended: bool) -> usize {
        if extended { EXTENDED_HEADER + registrants * EXTENDED } else { HEADER + registrants * SHORT }
    }

    /// Reads a report, as many registrants as there are bytes for.
    ///
    /// # Errors
    /// Less than a header, and a reserved type.
    pub fn decode(from: &[u8], extended: bool) -> Result<Reservation, DecodeError> {
        let header = sized::<HEADER>("Reservation Status", from)?;
        let kind = match header[4] {
            0 => None,
            value => {
                Some(ReservationType::from_wire(value).ok_or(DecodeError::value("RTYPE", 4, value.into()))?)
            }
        };
        let count = usize::from(u16_at(header, 5));
        let (start, each) = if extended { (EXTENDED_HEADER, EXTENDED) } else { (HEADER, SHORT) };
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
            Registrant { cntlid: u16_at(entry, 0), holder: entry[2] & 1 != 0, host_id, key }
        });
        Ok(Reservation {
            generation: u32_at(header, 0),
            kind,
            persistent: header[9] & 1 != 0,
            registrants: registrants.collect(),
        })
    }

    /// Writes the report, cut to what fits.
    pub fn encode(&self, extended: bool, into: &mut [u8]) {
        let mut whole = vec![0; Reservation::size(self.registrants.len(), extended)];
        put32(&mut whole, 0, self.generation);
        whole[4] = self.kind.map_or(0, ReservationType::to_wire);
        put16(&mut whole, 5, u16::try_from(self.registrants.len()).unwrap_or(u16::MAX));
        whole[9] = self.persistent.into();
        let (start, each) = if extended { (EXTENDED_HEADER, EXTENDED) } else { (HEADER, SHORT) };
        for (registrant, entry) in self.registrants.iter().zip(whole[start..].chunks_exact_mut(each)) {
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
        let length = whole.len().min(into.len());
        into[..length].copy_from_slice(&whole[..length]);
    }
}
