//! Typed admin commands.

use crate::Sqe;
use crate::le::bit;
use crate::opcode::AdminOpcode;

/// Identify (Base 2.0, section 5.17).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identify {
    /// Controller or Namespace Structure, raw; see [`Cns`](crate::identify::Cns).
    pub cns: u8,
    /// Controller identifier, for some structures.
    pub cntid: u16,
    /// CNS specific identifier.
    pub cns_specific: u16,
    /// I/O command set, raw; see [`Csi`](crate::identify::Csi).
    pub csi: u8,
    /// Index into the UUID list; 0 for none.
    pub uuid_index: u8,
}

impl Identify {
    /// Decodes the command dwords; every value is valid.
    pub const fn from_sqe(sqe: &Sqe) -> Identify {
        Identify {
            cns: sqe.cdw10 as u8,
            cntid: (sqe.cdw10 >> 16) as u16,
            cns_specific: sqe.cdw11 as u16,
            csi: (sqe.cdw11 >> 24) as u8,
            uuid_index: (sqe.cdw14 & 0x7f) as u8,
        }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    pub fn to_sqe(&self, nsid: u32) -> Sqe {
        Sqe {
            nsid,
            cdw10: u32::from(self.cns) | u32::from(self.cntid) << 16,
            cdw11: u32::from(self.cns_specific) | u32::from(self.csi) << 24,
            cdw14: u32::from(self.uuid_index & 0x7f),
            ..Sqe::new(AdminOpcode::Identify.to_wire())
        }
    }
}

/// Get Log Page (Base 2.0, section 5.16).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GetLogPage {
    /// Log Page Identifier, raw; see [`LogId`](crate::log::LogId).
    pub lid: u8,
    /// Log specific parameter.
    pub specific: u8,
    /// Retain Asynchronous Event: reading does not clear the event.
    pub retain_event: bool,
    /// Bytes to return; a multiple of 4, at least 4.
    pub length_bytes: u64,
    /// Log Page Offset in bytes, or an index if `offset_is_index` is set.
    pub offset: u64,
    /// Offset Type: `offset` is an index of an entry.
    pub offset_is_index: bool,
    /// Log specific identifier.
    pub identifier: u16,
    /// I/O command set, raw.
    pub csi: u8,
    /// Index into the UUID list; 0 for none.
    pub uuid_index: u8,
}

impl GetLogPage {
    /// Decodes the command dwords; every value is valid.
    pub fn from_sqe(sqe: &Sqe) -> GetLogPage {
        let dwords = u64::from(sqe.cdw10 >> 16 | sqe.cdw11 << 16) + 1;
        GetLogPage {
            lid: sqe.cdw10 as u8,
            specific: (sqe.cdw10 >> 8 & 0x7f) as u8,
            retain_event: bit(sqe.cdw10.into(), 15),
            length_bytes: dwords * 4,
            offset: u64::from(sqe.cdw12) | u64::from(sqe.cdw13) << 32,
            offset_is_index: bit(sqe.cdw14.into(), 23),
            identifier: (sqe.cdw11 >> 16) as u16,
            csi: (sqe.cdw14 >> 24) as u8,
            uuid_index: (sqe.cdw14 & 0x7f) as u8,
        }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    ///
    /// # Panics
    /// If `length_bytes` is not a multiple of 4 from 4 to 2^34.
    pub fn to_sqe(&self, nsid: u32) -> Sqe {
        assert!(self.length_bytes.is_multiple_of(4), "{} bytes are not whole dwords", self.length_bytes);
        let numd = (self.length_bytes / 4).checked_sub(1).and_then(|numd| u32::try_from(numd).ok());
        let numd = numd.expect("a log page is 4 bytes to 16 GiB");
        Sqe {
            nsid,
            cdw10: u32::from(self.lid)
                | u32::from(self.specific & 0x7f) << 8
                | u32::from(self.retain_event) << 15
                | numd << 16,
            cdw11: numd >> 16 | u32::from(self.identifier) << 16,
            cdw12: self.offset as u32,
            cdw13: (self.offset >> 32) as u32,
            cdw14: u32::from(self.uuid_index & 0x7f)
                | u32::from(self.offset_is_index) << 23
                | u32::from(self.csi) << 24,
            ..Sqe::new(AdminOpcode::GetLogPage.to_wire())
        }
    }
}

/// Get Features (Base 2.0, section 5.15).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GetFeatures {
    /// Feature Identifier, raw; see [`FeatureId`](crate::feature::FeatureId).
    pub fid: u8,
    /// Select, raw; see [`Select`](crate::feature::Select).
    pub select: u8,
    /// Command Dword 11.
    pub cdw11: u32,
    /// Index into the UUID list; 0 for none.
    pub uuid_index: u8,
}

impl GetFeatures {
    /// Decodes the command dwords; every value is valid.
    pub const fn from_sqe(sqe: &Sqe) -> GetFeatures {
        GetFeatures {
            fid: sqe.cdw10 as u8,
            select: (sqe.cdw10 >> 8 & 7) as u8,
            cdw11: sqe.cdw11,
            uuid_index: (sqe.cdw14 & 0x7f) as u8,
        }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    pub fn to_sqe(&self, nsid: u32) -> Sqe {
        Sqe {
            nsid,
            cdw10: u32::from(self.fid) | u32::from(self.select & 7) << 8,
            cdw11: self.cdw11,
            cdw14: u32::from(self.uuid_index & 0x7f),
            ..Sqe::new(AdminOpcode::GetFeatures.to_wire())
        }
    }
}

/// Set Features (Base 2.0, section 5.27).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetFeatures {
    /// Feature Identifier, raw; see [`FeatureId`](crate::feature::FeatureId).
    pub fid: u8,
    /// Save: keep the value across power cycles and resets.
    pub save: bool,
    /// The feature value: Command Dword 11.
    pub cdw11: u32,
    /// Index into the UUID list; 0 for none.
    pub uuid_index: u8,
}

impl SetFeatures {
    /// Decodes the command dwords; every value is valid.
    pub fn from_sqe(sqe: &Sqe) -> SetFeatures {
        SetFeatures {
            fid: sqe.cdw10 as u8,
            save: bit(sqe.cdw10.into(), 31),
            cdw11: sqe.cdw11,
            uuid_index: (sqe.cdw14 & 0x7f) as u8,
        }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    pub fn to_sqe(&self, nsid: u32) -> Sqe {
        Sqe {
            nsid,
            cdw10: u32::from(self.fid) | u32::from(self.save) << 31,
            cdw11: self.cdw11,
            cdw14: u32::from(self.uuid_index & 0x7f),
            ..Sqe::new(AdminOpcode::SetFeatures.to_wire())
        }
    }
}

/// Abort (Base 2.0, section 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abort {
    /// Submission Queue Identifier of the command to abort; 0 is the admin queue.
    pub sqid: u16,
    /// Command Identifier of the command to abort.
    pub cid: u16,
}

impl Abort {
    /// Decodes the command dwords; every value is valid.
    pub const fn from_sqe(sqe: &Sqe) -> Abort {
        Abort { sqid: sqe.cdw10 as u16, cid: (sqe.cdw10 >> 16) as u16 }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    pub fn to_sqe(&self) -> Sqe {
        Sqe {
            cdw10: u32::from(self.sqid) | u32::from(self.cid) << 16,
            ..Sqe::new(AdminOpcode::Abort.to_wire())
        }
    }
}
