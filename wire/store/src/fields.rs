//! Little-endian integers at offsets, and the head that all structures share.

use codec::{DecodeError, crc32c};

use crate::{FORMAT_VERSION, SECTOR_BYTES};

/// Offset of the checksum in every structure.
const CHECKSUM: usize = 8;

pub(crate) fn put<const N: usize>(out: &mut [u8], at: usize, value: [u8; N]) {
    codec::put_field(&mut &mut out[at..], &value);
}

pub(crate) fn array<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    codec::next_field(&mut &from[at..])
}

pub(crate) fn u32_at(from: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(from, at))
}

pub(crate) fn u64_at(from: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(from, at))
}

/// Writes magic number, version and checksum into a structure that is otherwise complete.
pub(crate) fn seal(out: &mut [u8], magic: [u8; 4]) {
    seal_version(out, magic, FORMAT_VERSION);
}

/// As [`seal`], with a later version.
pub(crate) fn seal_version(out: &mut [u8], magic: [u8; 4], version: u16) {
    put(out, 0, magic);
    put(out, 4, version.to_le_bytes());
    let checksum = checksum(out);
    put(out, CHECKSUM, checksum.to_le_bytes());
}

/// Checks size, magic number, version and checksum, in this order.
pub(crate) fn open(what: &'static str, from: &[u8], size: usize, magic: [u8; 4]) -> Result<(), DecodeError> {
    open_version(what, from, size, magic, FORMAT_VERSION).map(drop)
}

/// As [`open`], for a structure with versions up to `newest`. Returns its version.
pub(crate) fn open_version(
    what: &'static str,
    from: &[u8],
    size: usize,
    magic: [u8; 4],
    newest: u16,
) -> Result<u16, DecodeError> {
    if from.len() != size {
        return Err(DecodeError::Length { what, got: from.len(), need: size });
    }
    if from[..4] != magic {
        return Err(DecodeError::Text { what, reason: "the magic number is another" });
    }
    let version = u16::from_le_bytes(array(from, 4));
    if !(FORMAT_VERSION..=newest).contains(&version) {
        return Err(DecodeError::Value { what: "the format version", at: 4, value: version.into() });
    }
    if u32_at(from, CHECKSUM) != checksum(from) {
        return Err(DecodeError::Text { what, reason: "the checksum is wrong" });
    }
    Ok(version)
}

/// CRC32C of a structure, its checksum taken as zero.
fn checksum(of: &[u8]) -> u32 {
    // The beginning of a CRC costs more than a copy.
    let mut copy = [0; SECTOR_BYTES];
    let copy = &mut copy[..of.len()];
    copy.copy_from_slice(of);
    copy[CHECKSUM..CHECKSUM + 4].fill(0);
    crc32c(copy)
}

/// Rejects a reserved field that is not zero: a later version would have another number.
pub(crate) fn check_zero(
    what: &'static str,
    from: &[u8],
    range: std::ops::Range<usize>,
) -> Result<(), DecodeError> {
    match from[range.clone()].iter().position(|byte| *byte != 0) {
        None => Ok(()),
        Some(index) => {
            let at = range.start + index;
            Err(DecodeError::value(what, at as u32, from[at].into()))
        }
    }
}

/// Rejects a structure that was written for another place.
pub(crate) fn check_location(found: u64, expected: u64, at: u32) -> Result<(), DecodeError> {
    if found == expected {
        Ok(())
    } else {
        Err(DecodeError::value("the structure's own location", at, found))
    }
}
