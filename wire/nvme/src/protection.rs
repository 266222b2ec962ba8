//! Metadata of blocks, and end-to-end protection information (NVM 1.0, section 5.2), generated and verified
//! in software: by hosts that transfer metadata, and by block devices that have it.
//!
//! ```
//! use wire_nvme::protection::{self, MetadataFormat, Protection, ProtectionType, Tags};
//! let protection = Some(Protection::new(ProtectionType::Type1, false));
//! let format = MetadataFormat { bytes: 8, extended: false, protection };
//! let (data, mut metadata) = ([7; 1024], [0; 16]);
//! let tags = Tags { reference: 100, application: 0x1234, application_mask: 0xffff, ..Tags::default() };
//! protection::generate(&format, 512, &data, &mut metadata, &tags);
//! assert_eq!(protection::check(&format, 512, &data, &metadata, &tags), Ok(()));
//! metadata[0] ^= 1;
//! assert_eq!(
//!     protection::check(&format, 512, &data, &metadata, &tags),
//!     Err(block_io::Status::GUARD_CHECK_ERROR)
//! );
//! ```

use block_io::{ProtectionFlags, Status};

pub use block_io::ProtectionTags as Tags;

use crate::extended_protection::{self, ESCAPE};
pub use crate::guard::{GuardFormat, crc16};
pub use crate::metadata_format::{InvalidFormat, MetadataFormat, Protection, ProtectionType};

/// Bytes of protection information with a 16-bit guard.
pub const SIZE: usize = 8;

/// Generates the protection information of whole blocks in their separate metadata.
///
/// # Panics
/// If the length of `metadata` does not match the number of blocks, or the format has no protection
/// information.
pub fn generate(format: &MetadataFormat, block_size: usize, data: &[u8], metadata: &mut [u8], tags: &Tags) {
    let width = usize::from(format.bytes);
    assert_eq!(data.len() / block_size * width, metadata.len(), "metadata of so many blocks");
    for (index, (block, metadata)) in
        data.chunks_exact(block_size).zip(metadata.chunks_exact_mut(width)).enumerate()
    {
        generate_block(format, block, metadata, index, tags);
    }
}

/// Generates the protection information of extended blocks, whose metadata follows their data.
///
/// # Panics
/// If the format has no protection information.
pub fn generate_extended(format: &MetadataFormat, block_size: usize, blocks: &mut [u8], tags: &Tags) {
    for (index, both) in blocks.chunks_exact_mut(block_size + usize::from(format.bytes)).enumerate() {
        let (block, metadata) = both.split_at_mut(block_size);
        generate_block(format, block, metadata, index, tags);
    }
}

/// Verifies whole blocks against the protection information in their separate metadata.
///
/// # Errors
/// The status with which a controller would fail the read: guard, application tag or reference tag check
/// error of the first bad block.
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

/// The protection of a format, and where it is in the metadata.
///
/// # Panics
/// If the format has no protection information.
fn protection_at(format: &MetadataFormat) -> (&Protection, usize) {
    let range = format.protection_range();
    let protection =
        format.protection.as_ref().zip(range).map(|(protection, range)| (protection, range.start));
    protection.expect("the format has protection information")
}

/// Generates the protection information of one block, `index` blocks after the first, in its metadata.
///
/// # Panics
/// If the format has no protection information.
pub fn generate_block(format: &MetadataFormat, block: &[u8], metadata: &mut [u8], index: usize, tags: &Tags) {
    let (protection, at) = protection_at(format);
    if protection.is_extended() {
        return extended_protection::generate(protection, at, (block, metadata), index, tags);
    }
    let guard = guard(block, &metadata[..at]);
    let reference = expected_reference(protection, index, tags);
    metadata[at..at + 2].copy_from_slice(&guard.to_be_bytes());
    metadata[at + 2..at + 4].copy_from_slice(&tags.application.to_be_bytes());
    metadata[at + 4..at + 8].copy_from_slice(&reference.to_be_bytes());
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
    let (protection, at) = protection_at(format);
    if protection.is_extended() {
        return extended_protection::check(protection, at, (block, metadata), index, tags, flags);
    }
    let half = |at: usize| u16::from_be_bytes([metadata[at], metadata[at + 1]]);
    let (stored, application) = (half(at), half(at + 2));
    let reference = u32::from(half(at + 4)) << 16 | u32::from(half(at + 6));
    let is_type3 = protection.kind == ProtectionType::Type3;
    if application == ESCAPE && (!is_type3 || reference == u32::MAX) {
        return Ok(());
    }
    if flags.contains(ProtectionFlags::CHECK_GUARD) && stored != guard(block, &metadata[..at]) {
        return Err(Status::GUARD_CHECK_ERROR);
    }
    let differs = (application ^ tags.application) & tags.application_mask != 0;
    if flags.contains(ProtectionFlags::CHECK_APPLICATION_TAG) && differs {
        return Err(Status::APPLICATION_TAG_CHECK_ERROR);
    }
    let checks_reference = flags.contains(ProtectionFlags::CHECK_REFERENCE_TAG) && !is_type3;
    if checks_reference && reference != expected_reference(protection, index, tags) {
        return Err(Status::REFERENCE_TAG_CHECK_ERROR);
    }
    Ok(())
}

/// The 16-bit guard, which covers the data and the metadata before the protection information.
fn guard(block: &[u8], metadata: &[u8]) -> u16 {
    crc16(crc16(0, block), metadata)
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

/// Expected reference tag of block `index` with a 16-bit guard: types 1 and 2 increment it per block, type 3
/// does not.
fn expected_reference(protection: &Protection, index: usize, tags: &Tags) -> u32 {
    let first = tags.reference as u32;
    match protection.kind {
        ProtectionType::Type3 => first,
        _ => first.wrapping_add(index as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_corruption_fails_its_own_check() {
        for (kind, first, bytes) in [
            (ProtectionType::Type1, false, 8u16),
            (ProtectionType::Type1, true, 16),
            (ProtectionType::Type2, false, 64),
            (ProtectionType::Type3, true, 8),
        ] {
            let format =
                MetadataFormat { bytes, extended: true, protection: Some(Protection::new(kind, first)) };
            let tags = Tags {
                reference: u32::MAX.into(),
                application: 0xabcd,
                application_mask: 0xff00,
                ..Tags::default()
            };
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
