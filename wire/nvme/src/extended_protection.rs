//! Protection information of every format of the NVM Command Set (NVM 1.0, section 5.2.1): guards of 16, 32
//! and 64 bits, with or without a storage tag. Generated and verified in software, one block at a time.
//!
//! [`protection`](crate::protection) handles the format with a 16-bit guard and no storage tag itself.

use block_io::{ProtectionFlags, ProtectionTags, Status};

use crate::metadata_format::{Protection, ProtectionType};

/// The application tag value that disables checks.
pub(crate) const ESCAPE: u16 = 0xffff;

/// Generates the protection information of a block, `index` blocks after the first, in its metadata, from the
/// byte `at` on.
///
/// # Panics
/// If the metadata ends before the protection information does.
pub(crate) fn generate(
    protection: &Protection,
    at: usize,
    (data, metadata): (&[u8], &mut [u8]),
    index: usize,
    tags: &ProtectionTags,
) {
    let guard = protection.guard.guard(data, &metadata[..at]).to_be_bytes();
    let information = &mut metadata[at..at + protection.guard.bytes()];
    let (stored, rest) = information.split_at_mut(protection.guard.guard_bytes());
    stored.copy_from_slice(&guard[guard.len() - stored.len()..]);
    let (application, space) = rest.split_at_mut(2);
    application.copy_from_slice(&tags.application.to_be_bytes());
    let both = protection.join_tags(tags.storage, reference(protection, index, tags));
    space.copy_from_slice(&both.to_be_bytes()[16 - space.len()..]);
}

/// Verifies what `flags` name of a block, `index` blocks after the first, against its metadata, in which the
/// protection information begins at the byte `at`.
///
/// # Errors
/// The status with which a controller would fail the read.
///
/// # Panics
/// As [`generate`].
pub(crate) fn check(
    protection: &Protection,
    at: usize,
    (data, metadata): (&[u8], &[u8]),
    index: usize,
    tags: &ProtectionTags,
    flags: ProtectionFlags,
) -> Result<(), Status> {
    let information = &metadata[at..at + protection.guard.bytes()];
    let (stored, rest) = information.split_at(protection.guard.guard_bytes());
    let (application, space) = rest.split_at(2);
    let number = |bytes: &[u8]| bytes.iter().fold(0u128, |number, byte| number << 8 | u128::from(*byte));
    let application = u16::from_be_bytes([application[0], application[1]]);
    let (storage, stored_reference) = protection.split_tags(number(space));
    let is_type3 = protection.kind == ProtectionType::Type3;
    if application == ESCAPE && (!is_type3 || stored_reference == protection.reference_mask()) {
        return Ok(());
    }
    let guard = || protection.guard.guard(data, &metadata[..at]);
    if flags.contains(ProtectionFlags::CHECK_GUARD) && number(stored) != guard().into() {
        return Err(Status::GUARD_CHECK_ERROR);
    }
    let differs = (application ^ tags.application) & tags.application_mask != 0;
    if flags.contains(ProtectionFlags::CHECK_APPLICATION_TAG) && differs {
        return Err(Status::APPLICATION_TAG_CHECK_ERROR);
    }
    let checks_reference = flags.contains(ProtectionFlags::CHECK_REFERENCE_TAG) && !is_type3;
    if checks_reference && stored_reference != reference(protection, index, tags) {
        return Err(Status::REFERENCE_TAG_CHECK_ERROR);
    }
    let differs = (storage ^ tags.storage) & protection.storage_mask() != 0;
    if flags.contains(ProtectionFlags::CHECK_STORAGE_TAG) && differs {
        return Err(Status::STORAGE_TAG_CHECK_ERROR);
    }
    Ok(())
}

/// The reference tag of block `index`: types 1 and 2 increment it per block, type 3 does not.
fn reference(protection: &Protection, index: usize, tags: &ProtectionTags) -> u64 {
    let first = tags.reference;
    let tag = if protection.kind == ProtectionType::Type3 { first } else { first.wrapping_add(index as u64) };
    tag & protection.reference_mask()
}

#[cfg(test)]
mod tests;
