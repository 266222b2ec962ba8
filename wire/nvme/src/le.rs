//! Little-endian loads and stores at constant offsets.
//!
//! Inlined with constant offsets into arrays of known size, they compile to moves without a branch.

use crate::DecodeError;

#[inline(always)]
fn bytes<const W: usize>(from: &[u8], at: usize) -> [u8; W] {
    let mut out = [0; W];
    out.copy_from_slice(&from[at..at + W]);
    out
}

#[inline(always)]
pub(crate) fn u16_at(from: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes(from, at))
}

#[inline(always)]
pub(crate) fn u32_at(from: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes(from, at))
}

#[inline(always)]
pub(crate) fn u64_at(from: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes(from, at))
}

#[inline(always)]
pub(crate) fn u128_at(from: &[u8], at: usize) -> u128 {
    u128::from_le_bytes(bytes(from, at))
}

#[inline(always)]
pub(crate) fn array_at<const W: usize>(from: &[u8], at: usize) -> [u8; W] {
    bytes(from, at)
}

#[inline(always)]
pub(crate) fn put(into: &mut [u8], at: usize, value: &[u8]) {
    into[at..at + value.len()].copy_from_slice(value);
}

#[inline(always)]
pub(crate) fn put16(into: &mut [u8], at: usize, value: u16) {
    put(into, at, &value.to_le_bytes());
}

#[inline(always)]
pub(crate) fn put32(into: &mut [u8], at: usize, value: u32) {
    put(into, at, &value.to_le_bytes());
}

#[inline(always)]
pub(crate) fn put64(into: &mut [u8], at: usize, value: u64) {
    put(into, at, &value.to_le_bytes());
}

#[inline(always)]
pub(crate) fn bit(value: u64, index: u32) -> bool {
    value >> index & 1 != 0
}

/// The first `N` bytes, or an error that names the structure.
pub(crate) fn sized<'a, const N: usize>(
    what: &'static str,
    from: &'a [u8],
) -> Result<&'a [u8; N], DecodeError> {
    from.first_chunk::<N>().ok_or(DecodeError::Length { what, got: from.len(), need: N })
}
