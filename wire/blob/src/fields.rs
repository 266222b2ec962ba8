//! Reading and writing of fields at fixed offsets, and the CRC32C at the end of a page.

use codec::{DecodeError, crc32c};

use crate::PAGE_BYTES;

/// Where the CRC32C of a super block or metadata page is; it covers all before it.
pub(crate) const CRC_AT: usize = PAGE_BYTES - 4;

/// The bytes of a field.
///
/// # Panics
/// If the field is not within `from`, whose length the caller has checked.
pub(crate) fn array<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    *from[at..].first_chunk().expect("the length was checked")
}

pub(crate) fn u16_at(from: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(from, at))
}

pub(crate) fn u32_at(from: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(from, at))
}

pub(crate) fn u64_at(from: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(from, at))
}

pub(crate) fn put(out: &mut [u8], at: usize, field: &[u8]) {
    out[at..at + field.len()].copy_from_slice(field);
}

/// Whether the CRC32C at the end of a page of [`PAGE_BYTES`] is that of the bytes before it.
pub(crate) fn crc_is_valid(page: &[u8; PAGE_BYTES]) -> bool {
    crc32c(&page[..CRC_AT]) == u32_at(page, CRC_AT)
}

/// Checks the length and CRC32C of a page.
pub(crate) fn open<'a>(
    from: &'a [u8],
    what: &'static str,
    crc: &'static str,
) -> Result<&'a [u8; PAGE_BYTES], DecodeError> {
    let Some(page) = from.first_chunk::<PAGE_BYTES>() else {
        return Err(DecodeError::Length { what, got: from.len(), need: PAGE_BYTES });
    };
    match crc_is_valid(page) {
        true => Ok(page),
        false => Err(DecodeError::value(crc, CRC_AT as u32, u32_at(page, CRC_AT).into())),
    }
}

/// Writes the CRC32C of a page.
pub(crate) fn seal(page: &mut [u8; PAGE_BYTES]) {
    let crc = crc32c(&page[..CRC_AT]);
    put(page, CRC_AT, &crc.to_le_bytes());
}
