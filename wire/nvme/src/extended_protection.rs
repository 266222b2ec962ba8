//! Protection information of every format of the NVM Command Set (NVM 1.0, section 5.2.1): guards of 16, 32
//! and 64 bits, with a storage tag. Generated and verified in software, one block at a time.
//!
//! [`protection`](crate::protection) is the format with a 16-bit guard and no storage tag, which block
//! devices here have.
//!
//! ```
//! use wire_nvme::extended_protection::{ExtendedFormat, ExtendedTags, GuardFormat, TagChecks};
//! use wire_nvme::protection::ProtectionType;
//! let format = ExtendedFormat::new(GuardFormat::Crc64, ProtectionType::Type1, 16, 16, false)?;
//! let (data, mut metadata) = ([7; 4096], [0; 16]);
//! let tags = ExtendedTags { reference: 100, storage: 0xbeef, application: 0x1234, ..ExtendedTags::all_bits() };
//! format.generate(&data, &mut metadata, 0, &tags);
//! assert_eq!(format.check(&data, &metadata, 0, &tags, TagChecks::all()), Ok(()));
//! metadata[0] ^= 1;
//! let failed = format.check(&data, &metadata, 0, &tags, TagChecks::all());
//! assert_eq!(failed, Err(block_io::Status::GUARD_CHECK_ERROR));
//! # Ok::<(), wire_nvme::extended_protection::InvalidFormat>(())
//! ```

use block_io::Status;
use codec::{Crc32c, Crc64};

use crate::protection::{ProtectionType, crc16};

/// Width and code of the guard (PIF, NVM 1.0, figure 98).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuardFormat {
    /// CRC-16/T10-DIF; eight bytes of protection information.
    Crc16,
    /// CRC-32C; sixteen bytes.
    Crc32,
    /// The CRC of 64 bits of NVMe; sixteen bytes.
    Crc64,
}

impl GuardFormat {
    /// From PIF of the extended LBA format; `None` for a reserved value.
    pub const fn from_wire(pif: u8) -> Option<GuardFormat> {
        match pif {
            0 => Some(GuardFormat::Crc16),
            1 => Some(GuardFormat::Crc32),
            2 => Some(GuardFormat::Crc64),
            _ => None,
        }
    }

    /// PIF.
    pub const fn to_wire(self) -> u8 {
        match self {
            GuardFormat::Crc16 => 0,
            GuardFormat::Crc32 => 1,
            GuardFormat::Crc64 => 2,
        }
    }

    /// Bytes of the guard.
    const fn guard_bytes(self) -> usize {
        match self {
            GuardFormat::Crc16 => 2,
            GuardFormat::Crc32 => 4,
            GuardFormat::Crc64 => 8,
        }
    }

    /// Bytes of the protection information: guard, application tag, and the space of storage and reference
    /// tags.
    pub const fn bytes(self) -> usize {
        match self {
            GuardFormat::Crc16 => 8,
            GuardFormat::Crc32 | GuardFormat::Crc64 => 16,
        }
    }

    /// Bits of the space that storage and reference tags share: 32, 80 or 48.
    pub const fn space_bits(self) -> u32 {
        ((self.bytes() - self.guard_bytes() - 2) * 8) as u32
    }

    /// The least and the most bits of a storage tag (STS, NVM 1.0, figure 98).
    pub const fn storage_tag_bits(self) -> (u32, u32) {
        match self {
            GuardFormat::Crc16 => (0, 32),
            // The reference tag has at most 64 bits.
            GuardFormat::Crc32 => (16, 64),
            GuardFormat::Crc64 => (0, 48),
        }
    }

    /// The guard over `data` and the `metadata` before the protection information.
    fn guard(self, data: &[u8], metadata: &[u8]) -> u64 {
        match self {
            GuardFormat::Crc16 => crc16(crc16(0, data), metadata).into(),
            GuardFormat::Crc32 => {
                let mut crc = Crc32c::new();
                crc.update(data);
                crc.update(metadata);
                crc.value().into()
            }
            GuardFormat::Crc64 => {
                let mut crc = Crc64::new();
                crc.update(data);
                crc.update(metadata);
                crc.value()
            }
        }
    }
}

/// Why a combination of values is no format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidFormat {
    /// The metadata has fewer bytes than the protection information.
    #[error("{metadata_bytes} bytes of metadata have no space for {bytes} bytes of protection information")]
    Metadata {
        /// Bytes of metadata.
        metadata_bytes: usize,
        /// Bytes of protection information.
        bytes: usize,
    },
    /// The storage tag is too short or too long for the guard's format.
    #[error("a storage tag of {bits} bits; {least} to {most} are possible")]
    StorageTag {
        /// Its bits.
        bits: u32,
        /// The fewest.
        least: u32,
        /// The most.
        most: u32,
    },
}

/// The protection information of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtendedFormat {
    guard: GuardFormat,
    kind: ProtectionType,
    metadata_bytes: usize,
    storage_bits: u32,
    at: usize,
}

/// The tags of a range of blocks: generated, or expected where they are checked. Bits beyond those that a tag
/// has in a format are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExtendedTags {
    /// Reference tag of the first block; for type 1 the low bits of its LBA.
    pub reference: u64,
    /// Storage tag of every block.
    pub storage: u64,
    /// Mask of the storage tag bits that are compared.
    pub storage_mask: u64,
    /// Application tag of every block.
    pub application: u16,
    /// Mask of the application tag bits that are compared.
    pub application_mask: u16,
}

impl ExtendedTags {
    /// Tags of zero, of which all bits are compared.
    pub const fn all_bits() -> ExtendedTags {
        ExtendedTags {
            reference: 0,
            storage: 0,
            storage_mask: u64::MAX,
            application: 0,
            application_mask: u16::MAX,
        }
    }
}

bitflags::bitflags! {
    /// What is checked: PRCHK, and STC.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct TagChecks: u8 {
        /// The reference tag, unless the type is 3.
        const REFERENCE = 1 << 0;
        /// The application tag.
        const APPLICATION = 1 << 1;
        /// The guard.
        const GUARD = 1 << 2;
        /// The storage tag.
        const STORAGE = 1 << 3;
    }
}

/// The application tag value that disables checks.
const ESCAPE: u16 = 0xffff;

/// `count` bits of ones, at most 64.
const fn ones(count: u32) -> u64 {
    if count == 0 { 0 } else { u64::MAX >> (64 - count) }
}

impl ExtendedFormat {
    /// A format with `metadata_bytes` of metadata a block, in whose first bytes, or else in the last, the
    /// protection information is, with a storage tag of `storage_bits` bits.
    ///
    /// # Errors
    /// The values contradict each other.
    pub const fn new(
        guard: GuardFormat,
        kind: ProtectionType,
        metadata_bytes: usize,
        storage_bits: u32,
        first: bool,
    ) -> Result<ExtendedFormat, InvalidFormat> {
        let bytes = guard.bytes();
        if metadata_bytes < bytes {
            return Err(InvalidFormat::Metadata { metadata_bytes, bytes });
        }
        let (least, most) = guard.storage_tag_bits();
        if storage_bits < least || storage_bits > most {
            return Err(InvalidFormat::StorageTag { bits: storage_bits, least, most });
        }
        let at = if first { 0 } else { metadata_bytes - bytes };
        Ok(ExtendedFormat { guard, kind, metadata_bytes, storage_bits, at })
    }

    /// Bits of the reference tag.
    pub const fn reference_bits(&self) -> u32 {
        self.guard.space_bits() - self.storage_bits
    }

    /// Generates the protection information of a block, `index` blocks after the first, in its metadata.
    ///
    /// # Panics
    /// If the metadata does not have the length of the format.
    pub fn generate(&self, data: &[u8], metadata: &mut [u8], index: u64, tags: &ExtendedTags) {
        let guard = self.guard.guard(data, self.before(metadata)).to_be_bytes();
        let information = &mut metadata[self.at..self.at + self.guard.bytes()];
        let (stored, rest) = information.split_at_mut(self.guard.guard_bytes());
        stored.copy_from_slice(&guard[guard.len() - stored.len()..]);
        let (application, space) = rest.split_at_mut(2);
        application.copy_from_slice(&tags.application.to_be_bytes());
        // The storage tag is in the most significant bits.
        let storage = u128::from(tags.storage & ones(self.storage_bits));
        let tag_space = storage << self.reference_bits() | u128::from(self.reference(index, tags));
        space.copy_from_slice(&tag_space.to_be_bytes()[16 - space.len()..]);
    }

    /// Verifies what `checks` name of a block, `index` blocks after the first, against its metadata.
    ///
    /// # Errors
    /// The status with which a controller would fail the read.
    ///
    /// # Panics
    /// As [`generate`](Self::generate).
    pub fn check(
        &self,
        data: &[u8],
        metadata: &[u8],
        index: u64,
        tags: &ExtendedTags,
        checks: TagChecks,
    ) -> Result<(), Status> {
        let before = self.before(metadata);
        let information = &metadata[self.at..self.at + self.guard.bytes()];
        let (stored, rest) = information.split_at(self.guard.guard_bytes());
        let (application, space) = rest.split_at(2);
        let number = |bytes: &[u8]| bytes.iter().fold(0u128, |number, byte| number << 8 | u128::from(*byte));
        let application = u16::from_be_bytes([application[0], application[1]]);
        let reference = number(space) as u64 & ones(self.reference_bits());
        let storage = (number(space) >> self.reference_bits()) as u64 & ones(self.storage_bits);
        let is_type3 = self.kind == ProtectionType::Type3;
        if application == ESCAPE && (!is_type3 || reference == ones(self.reference_bits())) {
            return Ok(());
        }
        if checks.contains(TagChecks::GUARD) && number(stored) != self.guard.guard(data, before).into() {
            return Err(Status::GUARD_CHECK_ERROR);
        }
        let differs = (application ^ tags.application) & tags.application_mask != 0;
        if checks.contains(TagChecks::APPLICATION) && differs {
            return Err(Status::APPLICATION_TAG_CHECK_ERROR);
        }
        let checks_reference = checks.contains(TagChecks::REFERENCE) && !is_type3;
        if checks_reference && reference != self.reference(index, tags) {
            return Err(Status::REFERENCE_TAG_CHECK_ERROR);
        }
        let differs = (storage ^ tags.storage) & tags.storage_mask & ones(self.storage_bits) != 0;
        if checks.contains(TagChecks::STORAGE) && differs {
            return Err(STORAGE_TAG_CHECK_ERROR);
        }
        Ok(())
    }

    /// The metadata that the guard covers.
    fn before<'a>(&self, metadata: &'a [u8]) -> &'a [u8] {
        assert_eq!(metadata.len(), self.metadata_bytes, "bytes of metadata");
        &metadata[..self.at]
    }

    /// The reference tag of block `index`: types 1 and 2 increment it per block, type 3 does not.
    fn reference(&self, index: u64, tags: &ExtendedTags) -> u64 {
        let first = tags.reference;
        let tag = if self.kind == ProtectionType::Type3 { first } else { first.wrapping_add(index) };
        tag & ones(self.reference_bits())
    }
}

/// End-to-end Storage Tag Check Error (NVM 1.0, figure 28).
pub const STORAGE_TAG_CHECK_ERROR: Status = Status::new(2, 0x88);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The blocks of 4 KiB of the specification's examples: zeroes, ones, rising and falling bytes.
    fn examples() -> [Vec<u8>; 4] {
        let rising: Vec<u8> = (0..4096).map(|at| at as u8).collect();
        [vec![0; 4096], vec![0xff; 4096], rising.clone(), rising.into_iter().rev().collect()]
    }

    #[test]
    fn guards_are_those_of_the_specification() {
        // NVM 1.0, sections 5.2.1.3.4 and 5.2.1.3.5: examples of the CRCs of 32 and 64 bits.
        let of_32 = [0x98f9_4189, 0x25c1_fe13, 0x9c71_fe32, 0x2149_41a8];
        let of_64 =
            [0x6482_d367_eb22_b64e, 0xc0dd_ba73_02ec_a3ac, 0x3e72_9f5f_6750_449c, 0x9a2d_f64b_8e9e_517e];
        for (index, data) in examples().iter().enumerate() {
            assert_eq!(GuardFormat::Crc32.guard(data, &[]), of_32[index], "{index}");
            assert_eq!(GuardFormat::Crc64.guard(data, &[]), of_64[index], "{index}");
            let (one, other) = data.split_at(1000);
            assert_eq!(GuardFormat::Crc32.guard(one, other), of_32[index], "{index}, in two parts");
            assert_eq!(GuardFormat::Crc64.guard(one, other), of_64[index], "{index}, in two parts");
        }
        assert_eq!(GuardFormat::Crc16.guard(b"12345", b"6789"), 0xd0db);
    }

    #[test]
    fn fields_are_where_the_specification_has_them() {
        let data = vec![0; 4096];
        let tags = ExtendedTags {
            reference: 0x1122_3344_5566_7788,
            storage: 0xaabb_ccdd_eeff_0011,
            application: 0x9876,
            ..ExtendedTags::all_bits()
        };
        let generated = |guard, bits| {
            let format = ExtendedFormat::new(guard, ProtectionType::Type1, 24, bits, false).unwrap();
            let mut metadata = [0; 24];
            format.generate(&data, &mut metadata, 1, &tags);
            metadata[24 - guard.bytes()..].to_vec()
        };
        // Guard, application tag, then storage tag and reference tag, most significant bits first.
        let expected = |guard: &[u8], space: &[u8]| [guard, &[0x98, 0x76], space].concat();
        let guard = &generated(GuardFormat::Crc32, 16)[..4];
        assert_eq!(
            generated(GuardFormat::Crc32, 16),
            expected(guard, &[0x00, 0x11, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x89])
        );
        assert_eq!(
            generated(GuardFormat::Crc32, 64),
            expected(guard, &[0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff, 0x00, 0x11, 0x77, 0x89])
        );
        let guard = &generated(GuardFormat::Crc64, 0)[..8];
        let reference = [0x33, 0x44, 0x55, 0x66, 0x77, 0x89];
        assert_eq!(generated(GuardFormat::Crc64, 0), expected(guard, &reference));
        let space = [0x00, 0x11, 0x55, 0x66, 0x77, 0x89];
        assert_eq!(generated(GuardFormat::Crc64, 16), expected(guard, &space));
        // Four bits: the nibble of the storage tag is before 44 bits of the reference tag.
        let space = [0x13, 0x44, 0x55, 0x66, 0x77, 0x89];
        assert_eq!(generated(GuardFormat::Crc64, 4), expected(guard, &space));
        let space = [0xcc, 0xdd, 0xee, 0xff, 0x00, 0x11];
        assert_eq!(generated(GuardFormat::Crc64, 48), expected(guard, &space), "no reference tag");
    }

    #[test]
    fn formats_that_contradict_themselves_are_errors() {
        let new =
            |guard, metadata, bits| ExtendedFormat::new(guard, ProtectionType::Type1, metadata, bits, true);
        let bytes = InvalidFormat::Metadata { metadata_bytes: 8, bytes: 16 };
        assert_eq!(new(GuardFormat::Crc64, 8, 0), Err(bytes));
        for (guard, bits, is_valid) in [
            (GuardFormat::Crc16, 0, true),
            (GuardFormat::Crc16, 32, true),
            (GuardFormat::Crc16, 33, false),
            (GuardFormat::Crc32, 15, false),
            (GuardFormat::Crc32, 64, true),
            (GuardFormat::Crc32, 65, false),
            (GuardFormat::Crc64, 0, true),
            (GuardFormat::Crc64, 49, false),
        ] {
            assert_eq!(new(guard, 16, bits).is_ok(), is_valid, "{guard:?} {bits}");
        }
        for pif in 0..=255 {
            assert!(GuardFormat::from_wire(pif).is_none_or(|guard| guard.to_wire() == pif));
        }
    }

    #[test]
    fn a_guard_of_16_bits_without_a_storage_tag_is_that_of_block_devices() {
        use crate::protection::{self, MetadataFormat, Protection, Tags};
        let data: Vec<u8> = (0..512).map(|at| (at * 7) as u8).collect();
        for first in [false, true] {
            let kind = ProtectionType::Type2;
            let format =
                MetadataFormat { bytes: 16, extended: false, protection: Some(Protection { kind, first }) };
            let extended = ExtendedFormat::new(GuardFormat::Crc16, kind, 16, 0, first).unwrap();
            let tags = Tags { reference: u32::MAX, application: 0xabcd, application_mask: 0xffff };
            let wide =
                ExtendedTags { reference: u32::MAX.into(), application: 0xabcd, ..ExtendedTags::all_bits() };
            let (mut one, mut other) = ([5; 16], [5; 16]);
            protection::generate_block(&format, &data, &mut one, 3, &tags);
            extended.generate(&data, &mut other, 3, &wide);
            assert_eq!(one, other);
            assert_eq!(extended.check(&data, &one, 3, &wide, TagChecks::all()), Ok(()));
        }
    }

    proptest! {
        /// Each bit of data and metadata is in one field, and its corruption fails the check of that field
        /// only.
        #[test]
        fn each_corruption_fails_its_own_check(
            pif in 0u8..3,
            kind in prop::sample::select(vec![ProtectionType::Type1, ProtectionType::Type2, ProtectionType::Type3]),
            bits in 0u32..=64,
            first: bool,
            extra in 0usize..20,
            index in 0u64..1000,
            (reference, storage) in any::<(u64, u64)>(),
            // No bit of it makes it the value that disables checks.
            application in 0u16..0x7000,
            bit in 0usize..8 * 600,
        ) {
            let guard = GuardFormat::from_wire(pif).unwrap();
            let (least, most) = guard.storage_tag_bits();
            let bits = bits.clamp(least, most);
            let width = guard.bytes() + extra;
            let format = ExtendedFormat::new(guard, kind, width, bits, first).unwrap();
            let tags = ExtendedTags { reference, storage, application, ..ExtendedTags::all_bits() };
            let mut block: Vec<u8> = (0..512 + width).map(|at| (at * 13) as u8).collect();
            let (data, metadata) = block.split_at_mut(512);
            format.generate(data, metadata, index, &tags);
            prop_assert_eq!(format.check(data, metadata, index, &tags, TagChecks::all()), Ok(()));
            prop_assert_eq!(format.check(data, metadata, index + 1, &tags, TagChecks::REFERENCE).is_ok(),
                kind == ProtectionType::Type3 || format.reference_bits() == 0);

            let bit = bit % (block.len() * 8);
            block[bit / 8] ^= 0x80 >> (bit % 8);
            let (data, metadata) = block.split_at(512);
            let failing = |checks| format.check(data, metadata, index, &tags, checks).err();
            let at = (bit / 8).checked_sub(512 + format.at);
            let in_information = at.filter(|at| *at < guard.bytes()).map(|at| at * 8 + bit % 8);
            let guard_bits = guard.guard_bytes() * 8;
            let expected = match in_information {
                // Behind the protection information nothing is covered.
                None if at.is_some() && first => None,
                None => Some(Status::GUARD_CHECK_ERROR),
                Some(bit) if bit < guard_bits => Some(Status::GUARD_CHECK_ERROR),
                Some(bit) if bit < guard_bits + 16 => Some(Status::APPLICATION_TAG_CHECK_ERROR),
                Some(bit) if bit < guard_bits + 16 + bits as usize => Some(STORAGE_TAG_CHECK_ERROR),
                Some(_) if kind == ProtectionType::Type3 => None,
                Some(_) => Some(Status::REFERENCE_TAG_CHECK_ERROR),
            };
            prop_assert_eq!(failing(TagChecks::all()), expected);
            for check in TagChecks::all().iter() {
                let status = match check {
                    TagChecks::GUARD => Status::GUARD_CHECK_ERROR,
                    TagChecks::APPLICATION => Status::APPLICATION_TAG_CHECK_ERROR,
                    TagChecks::STORAGE => STORAGE_TAG_CHECK_ERROR,
                    _ => Status::REFERENCE_TAG_CHECK_ERROR,
                };
                prop_assert_eq!(failing(check), expected.filter(|expected| *expected == status));
            }
        }
    }

    #[test]
    fn the_application_tag_of_ones_disables_checks() {
        let data = [1; 512];
        for kind in [ProtectionType::Type1, ProtectionType::Type2, ProtectionType::Type3] {
            let format = ExtendedFormat::new(GuardFormat::Crc64, kind, 16, 16, false).unwrap();
            let tags = ExtendedTags { application: ESCAPE, ..ExtendedTags::all_bits() };
            let mut metadata = [0; 16];
            format.generate(&data, &mut metadata, 0, &tags);
            metadata[0] ^= 1;
            let other = ExtendedTags { application: 5, ..tags };
            let outcome = format.check(&data, &metadata, 0, &other, TagChecks::all());
            let is_type3 = kind == ProtectionType::Type3;
            assert_eq!(outcome.is_err(), is_type3, "type 3 needs a reference tag of ones too");
            metadata[12..].fill(0xff);
            assert_eq!(format.check(&data, &metadata, 0, &other, TagChecks::all()), Ok(()), "{kind:?}");
        }
    }
}
