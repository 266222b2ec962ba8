//! Metadata of blocks, and end-to-end protection information with a 16-bit guard (NVM 1.0, section 5.2.1.1), generated
//! and verified in software: by hosts that transfer metadata, and by block devices that have it.
//!
//! ```
//! use wire_nvme::protection::{self, MetadataFormat, Protection, ProtectionType, Tags};
//! let protection = Some(Protection { kind: ProtectionType::Type1, first: false });
//! let format = MetadataFormat { bytes: 8, extended: false, protection };
//! let (data, mut metadata) = ([7; 1024], [0; 16]);
//! let tags = Tags { reference: 100, application: 0x1234, application_mask: 0xffff };
//! protection::generate(&format, 512, &data, &mut metadata, &tags);
//! assert_eq!(protection::check(&format, 512, &data, &metadata, &tags), Ok(()));
//! metadata[0] ^= 1;
//! assert_eq!(
//!     protection::check(&format, 512, &data, &metadata, &tags),
//!     Err(block_io::Status::GUARD_CHECK_ERROR)
//! );
//! ```

use block_io::{ProtectionFlags, Status};

/// Bytes of protection information with a 16-bit guard.
pub const SIZE: usize = 8;

pub use block_io::ProtectionTags as Tags;

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
}

wire_enum! {
    /// Protection information type: the meaning of the reference tag. The values are those of DPS.
    ProtectionType: u8 {
        /// The low 32 bits of the LBA.
        Type1 = 1,
        /// The command's initial reference tag, incremented per block.
        Type2 = 2,
        /// Not checked by the controller.
        Type3 = 3,
    }
}

impl MetadataFormat {
    /// No metadata.
    pub const NONE: MetadataFormat = MetadataFormat { bytes: 0, extended: false, protection: None };

    /// Bytes of a block that a command transfers in its data, with `data_bytes` of data: with PRACT, protection information
    /// that is all of the metadata is not transferred (NVM 1.0, section 5.2.2).
    pub fn transfer_bytes(&self, data_bytes: u32, flags: ProtectionFlags) -> u32 {
        let is_interleaved = self.extended && !self.strips(flags);
        data_bytes + if is_interleaved { u32::from(self.bytes) } else { 0 }
    }

    /// Whether a command with these flags transfers no metadata.
    pub fn strips(&self, flags: ProtectionFlags) -> bool {
        flags.contains(ProtectionFlags::ACTION) && usize::from(self.bytes) == SIZE
    }

    /// Where the protection information lies in the metadata of a block; `None` without protection.
    pub fn protection_range(&self) -> Option<std::ops::Range<usize>> {
        let at = if self.protection?.first { 0 } else { usize::from(self.bytes) - SIZE };
        Some(at..at + SIZE)
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

/// The application tag value that disables checks.
const ESCAPE: u16 = 0xffff;
/// CRC-16/T10-DIF polynomial.
const POLYNOMIAL: u16 = 0x8bb7;

/// Slicing-by-8 tables: 4 KiB, computed at compile time.
const TABLES: [[u16; 256]; 8] = {
    let mut tables = [[0u16; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 != 0 { crc << 1 ^ POLYNOMIAL } else { crc << 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = before << 8 ^ tables[0][(before >> 8) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
};

/// CRC-16/T10-DIF of `data`, continued from `crc`; the initial value is 0.
pub fn crc16(crc: u16, data: &[u8]) -> u16 {
    let (words, rest) = data.as_chunks::<8>();
    let crc = words.iter().fold(crc, |crc, word| {
        let [high, low] = crc.to_be_bytes();
        let at = |table: usize, byte: u8| TABLES[table][usize::from(byte)];
        at(7, word[0] ^ high)
            ^ at(6, word[1] ^ low)
            ^ at(5, word[2])
            ^ at(4, word[3])
            ^ at(3, word[4])
            ^ at(2, word[5])
            ^ at(1, word[6])
            ^ at(0, word[7])
    });
    rest.iter().fold(crc, |crc, byte| crc << 8 ^ TABLES[0][usize::from((crc >> 8) as u8 ^ byte)])
}

/// Generates the protection information of whole blocks in their separate metadata.
///
/// # Panics
/// If the length of `metadata` does not match the number of blocks, or the format has no protection information.
pub fn generate(format: &MetadataFormat, block_size: usize, data: &[u8], metadata: &mut [u8], tags: &Tags) {
    let width = usize::from(format.bytes);
    assert_eq!(data.len() / block_size * width, metadata.len(), "metadata of so many blocks");
    for (index, (block, metadata)) in
        data.chunks_exact(block_size).zip(metadata.chunks_exact_mut(width)).enumerate()
    {
        put(format, block, metadata, index, tags);
    }
}

/// Generates the protection information of extended blocks, whose metadata follows their data.
///
/// # Panics
/// If the format has no protection information.
pub fn generate_extended(format: &MetadataFormat, block_size: usize, blocks: &mut [u8], tags: &Tags) {
    for (index, both) in blocks.chunks_exact_mut(block_size + usize::from(format.bytes)).enumerate() {
        let (block, metadata) = both.split_at_mut(block_size);
        put(format, block, metadata, index, tags);
    }
}

/// Verifies whole blocks against the protection information in their separate metadata.
///
/// # Errors
/// The status with which a controller would fail the read: guard, application tag or reference tag check error of
/// the first bad block.
///
/// # Panics
/// As [`generate`].
pub fn check(
    format: &MetadataFormat,
    block_size: usize,
    data: &[u8],
    metadata: &[u8],
    tags: &Tags,
) -> Result<(), Status> {
    let width = usize::from(format.bytes);
    assert_eq!(data.len() / block_size * width, metadata.len(), "metadata of so many blocks");
    let mut blocks = data.chunks_exact(block_size).zip(metadata.chunks_exact(width)).enumerate();
    blocks.try_for_each(|(index, (block, metadata))| verify(format, block, metadata, index, tags))
}

/// Verifies extended blocks, whose metadata follows their data.
///
/// # Errors
/// As [`check`].
///
/// # Panics
/// As [`generate_extended`].
pub fn check_extended(
    format: &MetadataFormat,
    block_size: usize,
    blocks: &[u8],
    tags: &Tags,
) -> Result<(), Status> {
    let mut blocks = blocks.chunks_exact(block_size + usize::from(format.bytes)).enumerate();
    blocks.try_for_each(|(index, both)| {
        let (block, metadata) = both.split_at(block_size);
        verify(format, block, metadata, index, tags)
    })
}

/// Offset of the protection information in a block's metadata, and the computed guard, which covers the data and the
/// metadata before the protection information.
fn guarded(format: &MetadataFormat, block: &[u8], metadata: &[u8]) -> (usize, u16) {
    let at = format.protection_range().expect("the format has protection information").start;
    (at, crc16(crc16(0, block), &metadata[..at]))
}

/// Generates the protection information of one block, `index` blocks after the first, in its metadata.
///
/// # Panics
/// If the format has no protection information.
pub fn generate_block(format: &MetadataFormat, block: &[u8], metadata: &mut [u8], index: usize, tags: &Tags) {
    put(format, block, metadata, index, tags);
}

/// Verifies what `flags` name of one block, `index` blocks after the first, against its metadata.
///
/// # Errors
/// As [`check`].
///
/// # Panics
/// If the format has no protection information.
pub fn check_block(
    format: &MetadataFormat,
    block: &[u8],
    metadata: &[u8],
    index: usize,
    tags: &Tags,
    flags: ProtectionFlags,
) -> Result<(), Status> {
    let (at, half) =
        (format.protection_range(), |at: usize| u16::from_be_bytes([metadata[at], metadata[at + 1]]));
    let at = at.expect("the format has protection information").start;
    let (stored, application) = (half(at), half(at + 2));
    let reference = u32::from(half(at + 4)) << 16 | u32::from(half(at + 6));
    let is_type3 = format.protection.is_some_and(|protection| protection.kind == ProtectionType::Type3);
    if application == ESCAPE && (!is_type3 || reference == u32::MAX) {
        return Ok(());
    }
    if flags.contains(ProtectionFlags::CHECK_GUARD) && stored != guarded(format, block, metadata).1 {
        return Err(Status::GUARD_CHECK_ERROR);
    }
    let differs = (application ^ tags.application) & tags.application_mask != 0;
    if flags.contains(ProtectionFlags::CHECK_APPLICATION_TAG) && differs {
        return Err(Status::APPLICATION_TAG_CHECK_ERROR);
    }
    let checks_reference = flags.contains(ProtectionFlags::CHECK_REFERENCE_TAG) && !is_type3;
    if checks_reference && reference != expected_reference(format, index, tags) {
        return Err(Status::REFERENCE_TAG_CHECK_ERROR);
    }
    Ok(())
}

fn put(format: &MetadataFormat, block: &[u8], metadata: &mut [u8], index: usize, tags: &Tags) {
    let (at, guard) = guarded(format, block, metadata);
    let reference = expected_reference(format, index, tags);
    metadata[at..at + 2].copy_from_slice(&guard.to_be_bytes());
    metadata[at + 2..at + 4].copy_from_slice(&tags.application.to_be_bytes());
    metadata[at + 4..at + 8].copy_from_slice(&reference.to_be_bytes());
}

fn verify(
    format: &MetadataFormat,
    block: &[u8],
    metadata: &[u8],
    index: usize,
    tags: &Tags,
) -> Result<(), Status> {
    let all = ProtectionFlags::all() - ProtectionFlags::ACTION;
    check_block(format, block, metadata, index, tags, all)
}

/// Expected reference tag of block `index`: types 1 and 2 increment it per block, type 3 does not.
fn expected_reference(format: &MetadataFormat, index: usize, tags: &Tags) -> u32 {
    match format.protection.map(|protection| protection.kind) {
        Some(ProtectionType::Type3) => tags.reference,
        _ => tags.reference.wrapping_add(index as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc16_matches_t10_dif_vectors() {
        // The check value of the CRC catalogue, and the 32-byte test patterns of SCSI Block Commands.
        assert_eq!(crc16(0, b"123456789"), 0xd0db);
        assert_eq!(crc16(0, &[0; 32]), 0);
        assert_eq!(crc16(0, &[0xff; 32]), 0xa293);
        let rising: [u8; 32] = std::array::from_fn(|index| index as u8);
        assert_eq!(crc16(0, &rising), 0x0224);
        for cut in 0..32 {
            assert_eq!(crc16(crc16(0, &rising[..cut]), &rising[cut..]), 0x0224, "cut at {cut}");
        }
    }

    #[test]
    fn each_corruption_fails_its_own_check() {
        for (kind, first, bytes) in [
            (ProtectionType::Type1, false, 8u16),
            (ProtectionType::Type1, true, 16),
            (ProtectionType::Type2, false, 64),
            (ProtectionType::Type3, true, 8),
        ] {
            let format =
                MetadataFormat { bytes, extended: true, protection: Some(Protection { kind, first }) };
            let tags = Tags { reference: u32::MAX, application: 0xabcd, application_mask: 0xff00 };
            let width = 512 + usize::from(bytes);
            let mut blocks: Vec<u8> = (0..3 * width).map(|at| (at * 7) as u8).collect();
            generate_extended(&format, 512, &mut blocks, &tags);
            assert_eq!(check_extended(&format, 512, &blocks, &tags), Ok(()));
            let at = width + 512 + if first { 0 } else { usize::from(bytes) - 8 };
            let with = |at: usize| {
                let mut bad = blocks.clone();
                bad[at] ^= 0x10;
                check_extended(&format, 512, &bad, &tags)
            };
            assert_eq!(with(width + 100), Err(Status::GUARD_CHECK_ERROR));
            assert_eq!(with(at), Err(Status::GUARD_CHECK_ERROR));
            assert_eq!(with(at + 2), Err(Status::APPLICATION_TAG_CHECK_ERROR));
            assert_eq!(with(at + 3), Ok(()), "masked out");
            let reference = with(at + 7);
            match kind {
                ProtectionType::Type3 => assert_eq!(reference, Ok(())),
                _ => assert_eq!(reference, Err(Status::REFERENCE_TAG_CHECK_ERROR)),
            }
            let mut escaped = blocks.clone();
            escaped[at + 2..at + 8].fill(0xff);
            escaped[width] ^= 1;
            assert_eq!(check_extended(&format, 512, &escaped, &tags), Ok(()));
        }
    }
}
