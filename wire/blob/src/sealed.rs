//! Pages of our own, which begin with a magic and the CRC32C of the page with that field 0.

use codec::crc32c;

use crate::PAGE_BYTES;
use crate::fields::{array, put};

const CRC_AT: usize = 8;

/// Writes the CRC of a page.
pub(crate) fn seal(page: &mut [u8; PAGE_BYTES]) {
    put(page, CRC_AT, &[0; 4]);
    let crc = crc32c(&page[..]);
    put(page, CRC_AT, &crc.to_le_bytes());
}

/// The page, if it has this magic and its CRC is right.
pub(crate) fn open(from: &[u8], magic: [u8; 8]) -> Option<&[u8; PAGE_BYTES]> {
    let page = from.first_chunk::<PAGE_BYTES>()?;
    let mut sealed = *page;
    seal(&mut sealed);
    (array::<8>(page, 0) == magic && sealed == *page).then_some(page)
}
