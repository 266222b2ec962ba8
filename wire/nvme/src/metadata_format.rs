//! Formats of metadata and of the protection information in it.

use block_io::ProtectionFlags;

use crate::guard::GuardFormat;

/// The metadata of a block: of a namespace, or of a block device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetadataFormat {
    /// Metadata bytes per block; 0 for none.
    pub bytes: u16,
    /// Extended LBA: metadata follows the data of each block instead of being in a separate buffer.
    pub extended: bool,
    /// Protection information in the metadata, if it is enabled.
    pub protection: Option<Protection>,
}

/// End-to-end protection of a namespace (NVM 1.0, section 5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection {
    /// Protection type 1, 2 or 3.
    pub kind: ProtectionType,
    /// Protection information is in the first bytes of the metadata, not in the last.
    pub first: bool,
    /// Width and code of the guard.
    pub guard: GuardFormat,
    /// Bits of the storage tag (STS), within [`GuardFormat::storage_tag_bits`]. The reference tag has the
    /// rest of the space that both share.
    pub storage_tag_bits: u8,
}

wire_enum! {
    /// Protection information type: the meaning of the reference tag. The values are those of DPS.
    ProtectionType: u8 {
        /// The low bits of the LBA.
        Type1 = 1,
        /// The command's initial reference tag, incremented per block.
        Type2 = 2,
        /// Not checked by the controller.
        Type3 = 3,
    }
}

/// Why a combination of values is no format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidFormat {
    /// The metadata has fewer bytes than the protection information.
    #[error("{metadata_bytes} bytes of metadata have no space for {bytes} bytes of protection information")]
    Metadata {
        /// Bytes of metadata.
        metadata_bytes: u16,
        /// Bytes of protection information.
        bytes: usize,
    },
    /// The storage tag is too short or too long for the guard's format.
    #[error("a storage tag of {bits} bits; {least} to {most} are possible")]
    StorageTag {
        /// Its bits.
        bits: u8,
        /// The fewest.
        least: u8,
        /// The most.
        most: u8,
    },
}

/// `count` bits of ones, at most 64.
pub(crate) const fn ones(count: u8) -> u64 {
    if count == 0 { 0 } else { u64::MAX >> (64 - count) }
}

impl Protection {
    /// With a 16-bit guard, and without a storage tag.
    pub const fn new(kind: ProtectionType, first: bool) -> Protection {
        Protection { kind, first, guard: GuardFormat::Crc16, storage_tag_bits: 0 }
    }

    /// With this guard, and the shortest storage tag that it can have.
    #[must_use]
    pub const fn with_guard(self, guard: GuardFormat) -> Protection {
        Protection { guard, storage_tag_bits: guard.storage_tag_bits().0, ..self }
    }

    /// Whether it is one of the extended formats, which hosts use only if they know them (LBAFEE): every one
    /// but that with a 16-bit guard and no storage tag.
    pub const fn is_extended(&self) -> bool {
        !matches!((self.guard, self.storage_tag_bits), (GuardFormat::Crc16, 0))
    }

    /// Bits of the reference tag: what the storage tag leaves of their space, but no more than 64.
    pub const fn reference_tag_bits(&self) -> u8 {
        let rest = self.guard.space_bits() - self.storage_tag_bits;
        if rest > 64 { 64 } else { rest }
    }

    /// The bits of a reference tag that are stored and compared.
    pub const fn reference_mask(&self) -> u64 {
        ones(self.reference_tag_bits())
    }

    /// The bits of a storage tag that are stored and compared (LBSTM).
    pub const fn storage_mask(&self) -> u64 {
        ones(self.storage_tag_bits)
    }

    /// Storage tag and reference tag in the space that they share: of the protection information, and of
    /// commands (NVM 1.0, section 5.2.1.4). The storage tag is in the most significant bits.
    pub(crate) const fn join_tags(&self, storage: u64, reference: u64) -> u128 {
        let storage = (storage & self.storage_mask()) as u128;
        storage << self.reference_tag_bits() | (reference & self.reference_mask()) as u128
    }

    /// Storage tag and reference tag, from the space that they share.
    pub(crate) const fn split_tags(&self, space: u128) -> (u64, u64) {
        let storage = (space >> self.reference_tag_bits()) as u64 & self.storage_mask();
        (storage, space as u64 & self.reference_mask())
    }
}

impl MetadataFormat {
    /// No metadata.
    pub const NONE: MetadataFormat = MetadataFormat { bytes: 0, extended: false, protection: None };

    /// Checks that the protection information fits the metadata, and the storage tag the guard.
    ///
    /// # Errors
    /// The values contradict each other.
    pub const fn validate(&self) -> Result<(), InvalidFormat> {
        let Some(protection) = self.protection else { return Ok(()) };
        let (bytes, bits) = (protection.guard.bytes(), protection.storage_tag_bits);
        if (self.bytes as usize) < bytes {
            return Err(InvalidFormat::Metadata { metadata_bytes: self.bytes, bytes });
        }
        let (least, most) = protection.guard.storage_tag_bits();
        if bits < least || bits > most {
            return Err(InvalidFormat::StorageTag { bits, least, most });
        }
        Ok(())
    }

    /// Bytes of a block that a command transfers in its data, with `data_bytes` of data: with PRACT,
    /// protection information that is all of the metadata is not transferred (NVM 1.0, section 5.2.2).
    pub fn transfer_bytes(&self, data_bytes: u32, flags: ProtectionFlags) -> u32 {
        let is_interleaved = self.extended && !self.strips(flags);
        data_bytes + if is_interleaved { u32::from(self.bytes) } else { 0 }
    }

    /// Whether a command with these flags transfers no metadata.
    pub fn strips(&self, flags: ProtectionFlags) -> bool {
        flags.contains(ProtectionFlags::ACTION)
            && self.protection.is_some_and(|protection| usize::from(self.bytes) == protection.guard.bytes())
    }

    /// Where the protection information lies in the metadata of a block; `None` without protection.
    pub fn protection_range(&self) -> Option<std::ops::Range<usize>> {
        let protection = self.protection?;
        let bytes = protection.guard.bytes();
        let at = if protection.first { 0 } else { usize::from(self.bytes) - bytes };
        Some(at..at + bytes)
    }

    /// The checks that the type of protection provides for: guard, and reference tag unless type 3.
    pub fn checks(&self) -> ProtectionFlags {
        match self.protection.map(|protection| protection.kind) {
            None => ProtectionFlags::empty(),
            Some(ProtectionType::Type3) => ProtectionFlags::CHECK_GUARD,
            Some(_) => ProtectionFlags::CHECK_GUARD | ProtectionFlags::CHECK_REFERENCE_TAG,
        }
    }
}
