//! Typed I/O commands, and the source ranges of Dataset Management and Copy.

use crate::le::{bit, put16, put32, put64, u16_at, u32_at, u64_at};
use crate::metadata_format::Protection;
use crate::opcode::NvmOpcode;
use crate::{DecodeError, Sqe};

/// Protection information field of a command, 4 bits (NVM 1.0, section 3.2).
pub use block_io::ProtectionFlags as Prinfo;

/// Read, Write and Compare, which share a layout (NVM 1.0, sections 3.2.1, 3.2.4 and 3.2.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadWrite {
    /// First logical block.
    pub lba: u64,
    /// Number of logical blocks, 1 to 65536.
    pub blocks: u32,
    /// Force Unit Access.
    pub fua: bool,
    /// Limited Retry.
    pub limited_retry: bool,
    /// Protection information.
    pub prinfo: Prinfo,
    /// Storage Tag Check.
    pub storage_tag_check: bool,
    /// Directive type; 0 for none.
    pub directive_type: u8,
    /// Directive specific value.
    pub directive: u16,
    /// Dataset Management field (DSM); a hint.
    pub hints: u8,
    /// Expected or initial logical block reference tag. Formats with a longer tag, or a storage tag, have
    /// more of it in other dwords: [`set_block_tags`] and [`block_tags`].
    pub reference_tag: u32,
    /// Expected or initial application tag.
    pub application_tag: u16,
    /// Mask of the application tag.
    pub application_tag_mask: u16,
}

/// Sets the storage tag and the initial or expected reference tag of a Read, Write, Compare, Verify or Write
/// Zeroes: dwords 2, 3 and 14 (LBST and LBRT; NVM 1.0, section 5.2.1.4).
pub fn set_block_tags(sqe: &mut Sqe, protection: &Protection, storage: u64, reference: u64) {
    let both = protection.join_tags(storage, reference);
    (sqe.cdw2, sqe.cdw3, sqe.cdw14) = ((both >> 64) as u32, (both >> 32) as u32, both as u32);
}

/// The storage tag and the reference tag that [`set_block_tags`] sets.
pub fn block_tags(sqe: &Sqe, protection: &Protection) -> (u64, u64) {
    let both = u128::from(sqe.cdw2) << 64 | u128::from(sqe.cdw3) << 32 | u128::from(sqe.cdw14);
    protection.split_tags(both)
}

impl ReadWrite {
    /// Decodes the command dwords; every value is valid.
    #[inline]
    pub fn from_sqe(sqe: &Sqe) -> ReadWrite {
        let cdw12 = u64::from(sqe.cdw12);
        ReadWrite {
            lba: lba(sqe),
            blocks: (sqe.cdw12 & 0xffff) + 1,
            fua: bit(cdw12, 30),
            limited_retry: bit(cdw12, 31),
            prinfo: Prinfo::from_prinfo(sqe.cdw12 >> 26),
            storage_tag_check: bit(cdw12, 24),
            directive_type: (sqe.cdw12 >> 20 & 0xf) as u8,
            directive: (sqe.cdw13 >> 16) as u16,
            hints: sqe.cdw13 as u8,
            reference_tag: sqe.cdw14,
            application_tag: sqe.cdw15 as u16,
            application_tag_mask: (sqe.cdw15 >> 16) as u16,
        }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    ///
    /// # Panics
    /// If `blocks` is not 1 to 65536.
    #[inline]
    pub fn to_sqe(&self, opcode: NvmOpcode) -> Sqe {
        Sqe {
            cdw10: self.lba as u32,
            cdw11: (self.lba >> 32) as u32,
            cdw12: nlb(self.blocks)
                | u32::from(self.directive_type & 0xf) << 20
                | u32::from(self.storage_tag_check) << 24
                | self.prinfo.prinfo() << 26
                | u32::from(self.fua) << 30
                | u32::from(self.limited_retry) << 31,
            cdw13: u32::from(self.hints) | u32::from(self.directive) << 16,
            cdw14: self.reference_tag,
            cdw15: u32::from(self.application_tag) | u32::from(self.application_tag_mask) << 16,
            ..Sqe::new(opcode.to_wire())
        }
    }
}

/// Write Zeroes (NVM 1.0, section 3.2.8).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteZeroes {
    /// First logical block.
    pub lba: u64,
    /// Number of logical blocks, 1 to 65536.
    pub blocks: u32,
    /// Force Unit Access.
    pub fua: bool,
    /// Deallocate (DEAC): the controller should deallocate the blocks.
    pub deallocate: bool,
    /// Protection information.
    pub prinfo: Prinfo,
}

impl WriteZeroes {
    /// Decodes the command dwords; every value is valid.
    #[inline]
    pub fn from_sqe(sqe: &Sqe) -> WriteZeroes {
        let cdw12 = u64::from(sqe.cdw12);
        WriteZeroes {
            lba: lba(sqe),
            blocks: (sqe.cdw12 & 0xffff) + 1,
            fua: bit(cdw12, 30),
            deallocate: bit(cdw12, 25),
            prinfo: Prinfo::from_prinfo(sqe.cdw12 >> 26),
        }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    ///
    /// # Panics
    /// If `blocks` is not 1 to 65536.
    #[inline]
    pub fn to_sqe(&self) -> Sqe {
        Sqe {
            cdw10: self.lba as u32,
            cdw11: (self.lba >> 32) as u32,
            cdw12: nlb(self.blocks)
                | u32::from(self.deallocate) << 25
                | self.prinfo.prinfo() << 26
                | u32::from(self.fua) << 30,
            ..Sqe::new(NvmOpcode::WriteZeroes.to_wire())
        }
    }
}

/// Dataset Management (NVM 1.0, section 3.2.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatasetManagement {
    /// Number of ranges in the data, 1 to 256.
    pub ranges: u16,
    /// Attribute Integral Dataset for Read; a hint.
    pub integral_read: bool,
    /// Attribute Integral Dataset for Write; a hint.
    pub integral_write: bool,
    /// Attribute Deallocate.
    pub deallocate: bool,
}

impl DatasetManagement {
    /// Decodes the command dwords; every value is valid.
    #[inline]
    pub fn from_sqe(sqe: &Sqe) -> DatasetManagement {
        DatasetManagement {
            ranges: (sqe.cdw10 & 0xff) as u16 + 1,
            integral_read: sqe.cdw11 & 1 != 0,
            integral_write: sqe.cdw11 & 2 != 0,
            deallocate: sqe.cdw11 & 4 != 0,
        }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    ///
    /// # Panics
    /// If `ranges` is not 1 to 256.
    pub fn to_sqe(&self) -> Sqe {
        assert!((1..=256).contains(&self.ranges), "{} ranges are not 1 to 256", self.ranges);
        Sqe {
            cdw10: u32::from(self.ranges) - 1,
            cdw11: u32::from(self.integral_read)
                | u32::from(self.integral_write) << 1
                | u32::from(self.deallocate) << 2,
            ..Sqe::new(NvmOpcode::DatasetManagement.to_wire())
        }
    }
}

/// Write Uncorrectable (NVM 1.0, section 3.2.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteUncorrectable {
    /// First logical block.
    pub lba: u64,
    /// Number of logical blocks, 1 to 65536.
    pub blocks: u32,
}

impl WriteUncorrectable {
    /// Decodes the command dwords; every value is valid.
    pub fn from_sqe(sqe: &Sqe) -> WriteUncorrectable {
        WriteUncorrectable { lba: lba(sqe), blocks: (sqe.cdw12 & 0xffff) + 1 }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    ///
    /// # Panics
    /// If `blocks` is not 1 to 65536.
    pub fn to_sqe(&self) -> Sqe {
        Sqe {
            cdw10: self.lba as u32,
            cdw11: (self.lba >> 32) as u32,
            cdw12: nlb(self.blocks),
            ..Sqe::new(NvmOpcode::WriteUncorrectable.to_wire())
        }
    }
}

/// Copy (NVM 1.0, section 3.2.2), with source ranges of format 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyCommand {
    /// First logical block of the destination.
    pub lba: u64,
    /// Number of source ranges in the data, 1 to 256.
    pub ranges: u16,
    /// Protection information of the source.
    pub read_prinfo: Prinfo,
    /// Protection information of the destination.
    pub write_prinfo: Prinfo,
    /// Force Unit Access.
    pub fua: bool,
    /// Limited Retry.
    pub limited_retry: bool,
    /// Initial reference tag of the destination.
    pub reference_tag: u32,
    /// Application tag of the destination.
    pub application_tag: u16,
    /// Mask of the application tag.
    pub application_tag_mask: u16,
}

impl CopyCommand {
    /// Decodes the command dwords; `None` if the descriptor format is not 0.
    pub fn from_sqe(sqe: &Sqe) -> Option<CopyCommand> {
        let cdw12 = u64::from(sqe.cdw12);
        (sqe.cdw12 >> 8 & 0xf == 0).then(|| CopyCommand {
            lba: lba(sqe),
            ranges: (sqe.cdw12 & 0xff) as u16 + 1,
            read_prinfo: Prinfo::from_prinfo(sqe.cdw12 >> 12),
            write_prinfo: Prinfo::from_prinfo(sqe.cdw12 >> 26),
            fua: bit(cdw12, 30),
            limited_retry: bit(cdw12, 31),
            reference_tag: sqe.cdw14,
            application_tag: sqe.cdw15 as u16,
            application_tag_mask: (sqe.cdw15 >> 16) as u16,
        })
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    ///
    /// # Panics
    /// If `ranges` is not 1 to 256.
    pub fn to_sqe(&self) -> Sqe {
        assert!((1..=256).contains(&self.ranges), "{} ranges are not 1 to 256", self.ranges);
        Sqe {
            cdw10: self.lba as u32,
            cdw11: (self.lba >> 32) as u32,
            cdw12: (u32::from(self.ranges) - 1)
                | self.read_prinfo.prinfo() << 12
                | self.write_prinfo.prinfo() << 26
                | u32::from(self.fua) << 30
                | u32::from(self.limited_retry) << 31,
            cdw14: self.reference_tag,
            cdw15: u32::from(self.application_tag) | u32::from(self.application_tag_mask) << 16,
            ..Sqe::new(NvmOpcode::Copy.to_wire())
        }
    }
}

/// Size in bytes of a source range of Copy.
pub const COPY_RANGE_SIZE: usize = 32;

/// A source range of Copy, format 0 (NVM 1.0, section 3.2.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyRange {
    /// First logical block.
    pub lba: u64,
    /// Number of logical blocks, 1 to 65536.
    pub blocks: u32,
    /// Expected initial reference tag.
    pub reference_tag: u32,
    /// Expected application tag.
    pub application_tag: u16,
    /// Mask of the application tag.
    pub application_tag_mask: u16,
}

impl CopyRange {
    /// Decodes one range.
    pub fn decode(from: &[u8; COPY_RANGE_SIZE]) -> CopyRange {
        CopyRange {
            lba: u64_at(from, 8),
            blocks: u32::from(u16_at(from, 16)) + 1,
            reference_tag: u32_at(from, 24),
            application_tag: u16_at(from, 28),
            application_tag_mask: u16_at(from, 30),
        }
    }

    /// Encodes one range.
    ///
    /// # Panics
    /// If `blocks` is not 1 to 65536.
    pub fn encode(&self, into: &mut [u8; COPY_RANGE_SIZE]) {
        *into = [0; COPY_RANGE_SIZE];
        put64(into, 8, self.lba);
        put16(into, 16, nlb(self.blocks) as u16);
        put32(into, 24, self.reference_tag);
        put16(into, 28, self.application_tag);
        put16(into, 30, self.application_tag_mask);
    }
}

/// Size in bytes of a Dataset Management range.
pub const DSM_RANGE_SIZE: usize = 16;
/// Maximum ranges per command.
pub const DSM_RANGES_MAX: usize = 256;

/// One range of Dataset Management (NVM 1.0, section 3.2.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DsmRange {
    /// Context attributes; a hint.
    pub attributes: u32,
    /// Number of logical blocks, not 0's based; a range of 0 blocks is empty.
    pub blocks: u32,
    /// First logical block.
    pub lba: u64,
}

impl DsmRange {
    /// Decodes one range.
    #[inline]
    pub fn decode(from: &[u8; DSM_RANGE_SIZE]) -> DsmRange {
        DsmRange { attributes: u32_at(from, 0), blocks: u32_at(from, 4), lba: u64_at(from, 8) }
    }

    /// Encodes one range.
    #[inline]
    pub fn encode(&self, into: &mut [u8; DSM_RANGE_SIZE]) {
        put32(into, 0, self.attributes);
        put32(into, 4, self.blocks);
        put64(into, 8, self.lba);
    }

    /// The first `ranges` ranges of a command's data.
    ///
    /// # Errors
    /// The data is shorter.
    pub fn list(from: &[u8], ranges: u16) -> Result<impl ExactSizeIterator<Item = DsmRange>, DecodeError> {
        let need = usize::from(ranges) * DSM_RANGE_SIZE;
        let data = from.get(..need).ok_or(DecodeError::Length {
            what: "Dataset Management data",
            got: from.len(),
            need,
        })?;
        Ok(data.as_chunks().0.iter().map(DsmRange::decode))
    }
}

#[inline]
fn lba(sqe: &Sqe) -> u64 {
    u64::from(sqe.cdw10) | u64::from(sqe.cdw11) << 32
}

#[inline]
fn nlb(blocks: u32) -> u32 {
    assert!((1..=65536).contains(&blocks), "{blocks} blocks are not 1 to 65536");
    blocks - 1
}
