//! Persistent reservations: parameter data of PERSISTENT RESERVE IN and OUT (SPC-4, sections 6.15 and 6.16).

#[cfg(test)]
mod tests;

use crate::DecodeError;
use crate::bytes::{be32, be64};

/// Service actions of PERSISTENT RESERVE IN.
pub mod action_in {
    /// The keys of all registrants.
    pub const READ_KEYS: u8 = 0x00;
    /// The reservation.
    pub const READ_RESERVATION: u8 = 0x01;
    /// What is supported.
    pub const REPORT_CAPABILITIES: u8 = 0x02;
    /// All registrants with their ports.
    pub const READ_FULL_STATUS: u8 = 0x03;
}

/// Service actions of PERSISTENT RESERVE OUT.
pub mod action_out {
    /// Registers, changes the key or unregisters.
    pub const REGISTER: u8 = 0x00;
    /// Reserves.
    pub const RESERVE: u8 = 0x01;
    /// Releases.
    pub const RELEASE: u8 = 0x02;
    /// Removes all registrations.
    pub const CLEAR: u8 = 0x03;
    /// Removes registrations, or takes over.
    pub const PREEMPT: u8 = 0x04;
    /// The same, and aborts tasks.
    pub const PREEMPT_AND_ABORT: u8 = 0x05;
    /// As REGISTER, whatever the current key is.
    pub const REGISTER_AND_IGNORE_EXISTING_KEY: u8 = 0x06;
    /// Registers another nexus and moves the reservation to it.
    pub const REGISTER_AND_MOVE: u8 = 0x07;
}

/// The type of a reservation, as on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PersistentType {
    /// Write Exclusive.
    WriteExclusive = 0x1,
    /// Exclusive Access.
    ExclusiveAccess = 0x3,
    /// Write Exclusive - Registrants Only.
    WriteExclusiveRegistrants = 0x5,
    /// Exclusive Access - Registrants Only.
    ExclusiveAccessRegistrants = 0x6,
    /// Write Exclusive - All Registrants.
    WriteExclusiveAll = 0x7,
    /// Exclusive Access - All Registrants.
    ExclusiveAccessAll = 0x8,
}

impl PersistentType {
    /// The type with this code.
    pub const fn from_wire(code: u8) -> Option<PersistentType> {
        Some(match code {
            0x1 => PersistentType::WriteExclusive,
            0x3 => PersistentType::ExclusiveAccess,
            0x5 => PersistentType::WriteExclusiveRegistrants,
            0x6 => PersistentType::ExclusiveAccessRegistrants,
            0x7 => PersistentType::WriteExclusiveAll,
            0x8 => PersistentType::ExclusiveAccessAll,
            _ => return None,
        })
    }
}

/// The parameter list of PERSISTENT RESERVE OUT, except of REGISTER AND MOVE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReserveOutList {
    /// RESERVATION KEY: the sender's key.
    pub key: u64,
    /// SERVICE ACTION RESERVATION KEY: a new key, or the key to preempt.
    pub action_key: u64,
    /// SPEC_I_PT: initiator ports follow.
    pub names_ports: bool,
    /// ALL_TG_PT: the registration is for all target ports.
    pub all_target_ports: bool,
    /// APTPL: the state persists through power loss.
    pub persists: bool,
}

impl ReserveOutList {
    /// Bytes without initiator ports.
    pub const BYTES: usize = 24;

    /// Decodes the list; what follows it is ignored.
    ///
    /// # Errors
    /// It is cut off.
    pub fn decode(bytes: &[u8]) -> Result<ReserveOutList, DecodeError> {
        let Some(list) = bytes.first_chunk::<{ Self::BYTES }>() else {
            let (what, got) = ("PERSISTENT RESERVE OUT parameter list", bytes.len());
            return Err(DecodeError::Length { what, got, need: Self::BYTES });
        };
        Ok(ReserveOutList {
            key: be64(list, 0),
            action_key: be64(list, 8),
            names_ports: list[20] & 0x08 != 0,
            all_target_ports: list[20] & 0x04 != 0,
            persists: list[20] & 0x01 != 0,
        })
    }

    /// Encodes the list.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.key.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.action_key.to_be_bytes());
        let (ports, all) = (u8::from(self.names_ports) << 3, u8::from(self.all_target_ports) << 2);
        bytes[20] = ports | all | u8::from(self.persists);
        bytes
    }
}

/// The parameter list of REGISTER AND MOVE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReserveMoveList<'a> {
    /// RESERVATION KEY: the sender's key.
    pub key: u64,
    /// SERVICE ACTION RESERVATION KEY: the key of the nexus that gets the reservation.
    pub new_key: u64,
    /// UNREG: the sender's registration is removed.
    pub unregister: bool,
    /// APTPL: the state persists through power loss.
    pub persists: bool,
    /// RELATIVE TARGET PORT IDENTIFIER of that nexus.
    pub relative_port: u16,
    /// The TransportID of its initiator port, encoded.
    pub transport_id: &'a [u8],
}

impl<'a> ReserveMoveList<'a> {
    /// Bytes without the TransportID.
    pub const BYTES: usize = 24;

    /// Decodes the list.
    ///
    /// # Errors
    /// It is cut off, or longer than it says.
    pub fn decode(bytes: &'a [u8]) -> Result<ReserveMoveList<'a>, DecodeError> {
        let short =
            |need| DecodeError::Length { what: "REGISTER AND MOVE parameter list", got: bytes.len(), need };
        let (list, transport_id) = bytes.split_first_chunk::<24>().ok_or(short(Self::BYTES))?;
        let length = be32(list, 20) as usize;
        if transport_id.len() != length {
            return Err(short(Self::BYTES.saturating_add(length)));
        }
        Ok(ReserveMoveList {
            key: be64(list, 0),
            new_key: be64(list, 8),
            unregister: list[17] & 0x02 != 0,
            persists: list[17] & 0x01 != 0,
            relative_port: u16::from_be_bytes([list[18], list[19]]),
            transport_id,
        })
    }

    /// Encodes the list.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.key.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.new_key.to_be_bytes());
        bytes[17] = u8::from(self.unregister) << 1 | u8::from(self.persists);
        bytes[18..20].copy_from_slice(&self.relative_port.to_be_bytes());
        bytes[20..24].copy_from_slice(&(self.transport_id.len() as u32).to_be_bytes());
        bytes.extend(self.transport_id);
        bytes
    }
}

/// A header with PRGENERATION and the length of what follows.
fn with_header(generation: u32, content: Vec<u8>) -> Vec<u8> {
    let header = [generation.to_be_bytes(), (content.len() as u32).to_be_bytes()].concat();
    [header, content].concat()
}

/// READ KEYS.
pub fn encode_keys(generation: u32, keys: impl Iterator<Item = u64>) -> Vec<u8> {
    with_header(generation, keys.flat_map(u64::to_be_bytes).collect())
}

/// READ RESERVATION: the key of the holder, 0 if every registrant is one, and the type.
pub fn encode_reservation(generation: u32, reservation: Option<(u64, PersistentType)>) -> Vec<u8> {
    let content = reservation.map_or(Vec::new(), |(key, kind)| {
        let mut content = key.to_be_bytes().to_vec();
        content.extend([0, 0, 0, 0, 0, kind as u8, 0, 0]);
        content
    });
    with_header(generation, content)
}

/// REPORT CAPABILITIES.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReserveCapabilities {
    /// SIP_C: SPEC_I_PT is supported.
    pub names_ports: bool,
    /// ATP_C: ALL_TG_PT is supported.
    pub all_target_ports: bool,
    /// PTPL_C: APTPL is supported.
    pub can_persist: bool,
    /// PTPL_A: the state persists through power loss.
    pub persists: bool,
}

impl ReserveCapabilities {
    /// Encodes them, with all types.
    pub fn encode(&self) -> [u8; 8] {
        let can = u8::from(self.names_ports) << 3 | u8::from(self.all_target_ports) << 2;
        // TMV; and ALLOW COMMANDS 001b: TEST UNIT READY is allowed with Exclusive Access.
        [0, 8, can | u8::from(self.can_persist), 0x90 | u8::from(self.persists), 0xea, 0x01, 0, 0]
    }
}

/// A registrant of READ FULL STATUS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FullStatus {
    /// Its key.
    pub key: u64,
    /// ALL_TG_PT.
    pub all_target_ports: bool,
    /// The type of the reservation that it holds.
    pub held: Option<PersistentType>,
    /// RELATIVE TARGET PORT IDENTIFIER; 0 if it is not known.
    pub relative_port: u16,
    /// The encoded TransportID of the initiator port.
    pub transport_id: Vec<u8>,
}

/// READ FULL STATUS.
pub fn encode_full_status(generation: u32, registrants: &[FullStatus]) -> Vec<u8> {
    let mut content = Vec::new();
    for one in registrants {
        content.extend(one.key.to_be_bytes());
        content.extend([0; 4]);
        content.push(u8::from(one.all_target_ports) << 1 | u8::from(one.held.is_some()));
        content.push(one.held.map_or(0, |kind| kind as u8));
        content.extend([0; 4]);
        content.extend(one.relative_port.to_be_bytes());
        content.extend((one.transport_id.len() as u32).to_be_bytes());
        content.extend(&one.transport_id);
    }
    with_header(generation, content)
}

/// A TransportID (SPC-4, section 7.6.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportId<'a> {
    /// An iSCSI initiator port: `NAME,i,0xISID`.
    IscsiPort(&'a str),
    /// An iSCSI initiator device, whatever the port.
    IscsiDevice(&'a str),
    /// An SRP initiator port, by its identifier.
    SrpPort([u8; 16]),
}

const SRP: u8 = 0x04;
const ISCSI: u8 = 0x05;
const FORMAT_PORT: u8 = 0x40;
/// Longest text of an iSCSI TransportID: a name of 223 bytes, and an ISID.
const NAME_BYTES_MAX: usize = 244;

impl<'a> TransportId<'a> {
    /// Encodes it.
    pub fn encode(&self) -> Vec<u8> {
        let (format, name) = match self {
            TransportId::IscsiPort(name) => (FORMAT_PORT, name),
            TransportId::IscsiDevice(name) => (0, name),
            TransportId::SrpPort(identifier) => {
                return [&[SRP, 0, 0, 0, 0, 0, 0, 0], &identifier[..]].concat();
            }
        };
        // Terminated, and at least 20 bytes in multiples of four.
        let length = (name.len() + 1).next_multiple_of(4).max(20);
        let mut bytes = vec![format | ISCSI, 0];
        bytes.extend((length as u16).to_be_bytes());
        bytes.extend(name.as_bytes());
        bytes.resize(4 + length, 0);
        bytes
    }

    /// Decodes the identifier at the start of `list`, which is not empty. Returns the rest of the list.
    ///
    /// # Errors
    /// It is cut off, not terminated, not iSCSI's, or not text.
    pub fn decode(list: &'a [u8]) -> Result<(TransportId<'a>, &'a [u8]), DecodeError> {
        const WHAT: &str = "TransportID";
        let short = |need| DecodeError::Length { what: WHAT, got: list.len(), need };
        let (header, rest) = list.split_at_checked(4).ok_or(short(4))?;
        let length = usize::from(u16::from_be_bytes([header[2], header[3]]));
        if header[0] & 0x3f != ISCSI || header[0] & 0x80 != 0 {
            return Err(DecodeError::value(WHAT, 0, header[0].into()));
        }
        if length < 20 || !length.is_multiple_of(4) {
            return Err(DecodeError::value("length of a TransportID", 2, length as u64));
        }
        let (text, rest) = rest.split_at_checked(length).ok_or(short(4 + length))?;
        let end = text.iter().position(|byte| *byte == 0).filter(|end| (1..=NAME_BYTES_MAX).contains(end));
        let invalid = |reason| DecodeError::Text { what: WHAT, reason };
        let name = &text[..end.ok_or(invalid("not terminated, empty or too long"))?];
        let name = std::str::from_utf8(name).map_err(|_| invalid("not UTF-8"))?;
        let has_port = header[0] & FORMAT_PORT != 0;
        if has_port != name.contains(",i,0x") {
            return Err(invalid("its format is another"));
        }
        Ok((if has_port { TransportId::IscsiPort(name) } else { TransportId::IscsiDevice(name) }, rest))
    }
}

/// The TransportIDs of a list with SPEC_I_PT: its bytes after the first 24.
///
/// # Errors
/// They are cut off.
pub fn transport_ids(list: &[u8]) -> Result<&[u8], DecodeError> {
    let short = |need| DecodeError::Length { what: "list of TransportIDs", got: list.len(), need };
    let start = ReserveOutList::BYTES + 4;
    if list.len() < start {
        return Err(short(start));
    }
    let length = be32(list, ReserveOutList::BYTES) as usize;
    list[start..].get(..length).ok_or(short(start.saturating_add(length)))
}
