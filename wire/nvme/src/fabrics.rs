//! Fabrics commands and NVMe Qualified Names.

use std::fmt;
use std::sync::Arc;

use crate::le::{array_at, put, put16, sized, u16_at};
use crate::opcode::{FABRICS, FabricsType};
use crate::{DecodeError, Sqe};

/// Bytes of Connect data (Base 2.0, section 6.3).
pub const CONNECT_DATA_SIZE: usize = 1024;
/// Size in bytes of a field that holds an NQN.
pub const NQN_FIELD_SIZE: usize = 256;
/// Maximum length of an NQN in bytes, without its NUL (Base 2.0, section 4.5).
pub const NQN_MAX: usize = 223;
/// The well-known name of the discovery service (Base 2.0, section 3.1.2.3).
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// Controller identifier in Connect data that requests any controller (dynamic controller model).
pub const CNTLID_DYNAMIC: u16 = 0xffff;
/// Controller identifier in Connect data that requests any controller (static controller model).
pub const CNTLID_STATIC: u16 = 0xfffe;

const _: () = assert!(at::HOSTNQN + NQN_FIELD_SIZE <= CONNECT_DATA_SIZE);

mod at {
    pub(super) const HOSTID: usize = 0;
    pub(super) const CNTLID: usize = 16;
    pub(super) const SUBNQN: usize = 256;
    pub(super) const HOSTNQN: usize = 512;
}

/// A validated NVMe Qualified Name; a clone copies a reference.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Nqn(Arc<str>);

impl Nqn {
    /// Validates a name by Base 2.0, section 4.5: `nqn.`, year and month, a dot and at least one more
    /// character; at most 223 bytes, no control characters.
    ///
    /// # Errors
    /// A name of another form or length.
    pub fn new(name: &str) -> Result<Nqn, NqnError> {
        let dated = |rest: &str| {
            let bytes = rest.as_bytes();
            bytes.len() > 8
                && bytes[..4].iter().all(u8::is_ascii_digit)
                && bytes[4] == b'-'
                && bytes[5..7].iter().all(u8::is_ascii_digit)
                && bytes[7] == b'.'
        };
        if name.len() > NQN_MAX {
            return Err(NqnError::Long(name.len()));
        }
        if !name.strip_prefix("nqn.").is_some_and(dated) || name.contains(char::is_control) {
            return Err(NqnError::Format);
        }
        Ok(Nqn(name.into()))
    }

    /// The well-known name of the discovery service.
    pub fn discovery() -> Nqn {
        Nqn(DISCOVERY_NQN.into())
    }

    /// Whether this is the well-known name of the discovery service.
    pub fn is_discovery(&self) -> bool {
        &*self.0 == DISCOVERY_NQN
    }

    /// The empty name: what a host without a name sends in Connect. No host can be allowed by it.
    pub fn unnamed_host() -> Nqn {
        Nqn("".into())
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn decode(what: &'static str, field: [u8; NQN_FIELD_SIZE], at: usize) -> Result<Nqn, DecodeError> {
        let error = |value: u64| DecodeError::value(what, at as u32, value);
        let end = field.iter().position(|&byte| byte == 0).ok_or(error(NQN_FIELD_SIZE as u64))?;
        let name = std::str::from_utf8(&field[..end]).map_err(|bad| error(bad.valid_up_to() as u64))?;
        Nqn::new(name).map_err(|_| error(end as u64))
    }
}

impl std::ops::Deref for Nqn {
    type Target = str;
    fn deref(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for Nqn {
    type Err = NqnError;
    fn from_str(name: &str) -> Result<Nqn, NqnError> {
        Nqn::new(name)
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Error of parsing an NQN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NqnError {
    /// Longer than 223 bytes.
    #[error("an NQN has at most 223 bytes, this has {0}")]
    Long(usize),
    /// Not of the form that Base 2.0, section 4.5 requires.
    #[error("an NQN starts with \"nqn.yyyy-mm.\" and has no control characters")]
    Format,
}

/// The type of a fabrics command; the caller has checked that its opcode is 7Fh.
///
/// # Errors
/// A reserved or vendor specific type.
#[inline]
pub fn fabrics_type(sqe: &Sqe) -> Result<FabricsType, DecodeError> {
    let value = sqe.nsid as u8;
    FabricsType::from_wire(value).ok_or(DecodeError::value("fabrics command type", 4, value.into()))
}

fn command(kind: FabricsType) -> Sqe {
    Sqe { nsid: kind.to_wire().into(), ..Sqe::new(FABRICS) }
}

/// Connect (Base 2.0, section 6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    /// Record Format (RECFMT); only 0 is defined.
    pub record_format: u16,
    /// Queue Identifier of the queue to create; 0 is the admin queue.
    pub qid: u16,
    /// Entries of the submission queue, 1 to 65536; a queue has at least 2.
    pub queue_entries: u32,
    /// Connect attributes.
    pub attributes: ConnectAttributes,
    /// Keep Alive Timeout in milliseconds, admin queue only; 0 disables it.
    pub kato_ms: u32,
}

bitflags::bitflags! {
    /// Connect attributes (CATTR); other bits are kept as received.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct ConnectAttributes: u8 {
        /// Disable SQ Flow Control: the controller does not maintain SQHD.
        const DISABLE_SQ_FLOW_CONTROL = 1 << 2;
        /// Individual I/O Queue Deletion: the host may delete I/O queues with Disconnect.
        const INDIVIDUAL_DELETION = 1 << 3;
    }
}

impl Connect {
    /// Byte offset of the record format in the command, for Connect Invalid Parameters.
    pub const RECORD_FORMAT_AT: u16 = 40;
    /// Byte offset of the queue identifier in the command.
    pub const QID_AT: u16 = 42;
    /// Byte offset of the queue size in the command.
    pub const SQSIZE_AT: u16 = 44;

    /// Decodes the command dwords; every value is valid.
    pub const fn from_sqe(sqe: &Sqe) -> Connect {
        Connect {
            record_format: sqe.cdw10 as u16,
            qid: (sqe.cdw10 >> 16) as u16,
            queue_entries: (sqe.cdw11 & 0xffff) + 1,
            attributes: ConnectAttributes::from_bits_retain((sqe.cdw11 >> 16) as u8),
            kato_ms: sqe.cdw12,
        }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    ///
    /// # Panics
    /// If `queue_entries` is not 1 to 65536.
    pub fn to_sqe(&self) -> Sqe {
        assert!((1..=65536).contains(&self.queue_entries), "{} entries", self.queue_entries);
        Sqe {
            cdw10: u32::from(self.record_format) | u32::from(self.qid) << 16,
            cdw11: (self.queue_entries - 1) | u32::from(self.attributes.bits()) << 16,
            cdw12: self.kato_ms,
            ..command(FabricsType::Connect)
        }
    }
}

/// Data of a Connect command (Base 2.0, section 6.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectData {
    /// Host identifier.
    pub host_id: [u8; 16],
    /// Requested controller, [`CNTLID_DYNAMIC`] or [`CNTLID_STATIC`].
    pub cntlid: u16,
    /// NVM Subsystem NQN.
    pub subnqn: Nqn,
    /// Host NQN.
    pub hostnqn: Nqn,
}

impl ConnectData {
    /// Byte offset of the host identifier in the data, for Connect Invalid Parameters.
    pub const HOSTID_AT: u16 = at::HOSTID as u16;
    /// Byte offset of the controller identifier in the data.
    pub const CNTLID_AT: u16 = at::CNTLID as u16;
    /// Byte offset of the subsystem NQN in the data.
    pub const SUBNQN_AT: u16 = at::SUBNQN as u16;
    /// Byte offset of the host NQN in the data.
    pub const HOSTNQN_AT: u16 = at::HOSTNQN as u16;

    /// Decodes the data.
    ///
    /// # Errors
    /// Less than 1024 bytes, or an invalid NQN. The host's may be empty: `spdk_nvme_perf` sends none.
    pub fn decode(from: &[u8]) -> Result<ConnectData, DecodeError> {
        let from = sized::<CONNECT_DATA_SIZE>("Connect data", from)?;
        Ok(ConnectData {
            host_id: array_at(from, at::HOSTID),
            cntlid: u16_at(from, at::CNTLID),
            subnqn: Nqn::decode("SUBNQN", array_at(from, at::SUBNQN), at::SUBNQN)?,
            hostnqn: match from[at::HOSTNQN] {
                0 => Nqn::unnamed_host(),
                _ => Nqn::decode("HOSTNQN", array_at(from, at::HOSTNQN), at::HOSTNQN)?,
            },
        })
    }

    /// Encodes the data.
    pub fn encode(&self, into: &mut [u8; CONNECT_DATA_SIZE]) {
        *into = [0; CONNECT_DATA_SIZE];
        put(into, at::HOSTID, &self.host_id);
        put16(into, at::CNTLID, self.cntlid);
        put(into, at::SUBNQN, self.subnqn.as_bytes());
        put(into, at::HOSTNQN, self.hostnqn.as_bytes());
    }
}

/// Result of a Connect that fails with Connect Invalid Parameters (Base 2.0, section 6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidParameter {
    /// `offset` is in the data rather than in the command (IATTR).
    pub in_data: bool,
    /// Byte offset of the invalid parameter (IPO).
    pub offset: u16,
}

impl InvalidParameter {
    /// Encodes the result of the completion.
    pub const fn to_result(self) -> u64 {
        self.offset as u64 | (self.in_data as u64) << 16
    }

    /// Decodes the result of a completion.
    pub const fn from_result(result: u64) -> InvalidParameter {
        InvalidParameter { in_data: result >> 16 & 1 != 0, offset: result as u16 }
    }
}

/// Result of a successful Connect (Base 2.0, section 6.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectResponse {
    /// Controller identifier.
    pub cntlid: u16,
    /// The host must authenticate in-band before other commands (AUTHREQ.ATR).
    pub authentication_required: bool,
    /// The host must also ask for secure channel concatenation (AUTHREQ.ASCR).
    pub secure_channel_required: bool,
}

impl ConnectResponse {
    /// Encodes the result of the completion.
    pub const fn to_result(self) -> u64 {
        self.cntlid as u64
            | (self.authentication_required as u64) << 17
            | (self.secure_channel_required as u64) << 18
    }

    /// Decodes the result of a completion.
    pub const fn from_result(result: u64) -> ConnectResponse {
        ConnectResponse {
            cntlid: result as u16,
            authentication_required: result >> 17 & 1 != 0,
            secure_channel_required: result >> 18 & 1 != 0,
        }
    }
}

/// Property Get (Base 2.0, section 6.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PropertyGet {
    /// Whether the property is 8 bytes long rather than 4.
    pub wide: bool,
    /// Offset of the property; see [`registers::offset`](crate::registers::offset).
    pub offset: u32,
}

/// Property Set (Base 2.0, section 6.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PropertySet {
    /// Whether the property is 8 bytes long rather than 4.
    pub wide: bool,
    /// Offset of the property.
    pub offset: u32,
    /// The new value.
    pub value: u64,
}

fn wide(sqe: &Sqe) -> Result<bool, DecodeError> {
    match sqe.cdw10 & 7 {
        0 => Ok(false),
        1 => Ok(true),
        size => Err(DecodeError::value("property size", 40, size.into())),
    }
}

impl PropertyGet {
    /// Decodes the command dwords.
    ///
    /// # Errors
    /// A reserved size.
    pub fn from_sqe(sqe: &Sqe) -> Result<PropertyGet, DecodeError> {
        Ok(PropertyGet { wide: wide(sqe)?, offset: sqe.cdw11 })
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    pub fn to_sqe(&self) -> Sqe {
        Sqe { cdw10: self.wide.into(), cdw11: self.offset, ..command(FabricsType::PropertyGet) }
    }
}

impl PropertySet {
    /// Decodes the command dwords.
    ///
    /// # Errors
    /// A reserved size.
    pub fn from_sqe(sqe: &Sqe) -> Result<PropertySet, DecodeError> {
        let value = u64::from(sqe.cdw12) | u64::from(sqe.cdw13) << 32;
        let wide = wide(sqe)?;
        Ok(PropertySet { wide, offset: sqe.cdw11, value: if wide { value } else { value & 0xffff_ffff } })
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    pub fn to_sqe(&self) -> Sqe {
        Sqe {
            cdw10: self.wide.into(),
            cdw11: self.offset,
            cdw12: self.value as u32,
            cdw13: if self.wide { (self.value >> 32) as u32 } else { 0 },
            ..command(FabricsType::PropertySet)
        }
    }
}

/// Disconnect (Base 2.0, section 6.4): deletes the I/O queue that it is sent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disconnect {
    /// Record Format (RECFMT); only 0 is defined.
    pub record_format: u16,
}

impl Disconnect {
    /// Decodes the command dwords; every value is valid.
    pub const fn from_sqe(sqe: &Sqe) -> Disconnect {
        Disconnect { record_format: sqe.cdw10 as u16 }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    pub fn to_sqe(&self) -> Sqe {
        Sqe { cdw10: self.record_format.into(), ..command(FabricsType::Disconnect) }
    }
}
