//! The buffers of a request: what a chain of descriptors describes.

use dma::{Buffer, Data};
use wire_virtio::descriptor_flags;

use crate::failure::RingError;
use crate::limits::{CHAIN_MAX, SLICES_MAX};
use crate::memory::{GuestMemory, GuestPlace};

/// A range of guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GuestRange {
    pub(crate) address: u64,
    pub(crate) length: u32,
}

/// The buffers of a chain: first those that the device reads, then those that it writes.
///
/// It is [collected](Self::begin) once, from descriptors that the guest may change meanwhile; nothing is read from them
/// again. Addresses are translated when they are used.
pub(crate) struct Chain {
    ranges: Box<[GuestRange; CHAIN_MAX]>,
    /// Number of ranges.
    count: usize,
    /// Of these, those that the device reads.
    readable: usize,
}

impl Default for Chain {
    fn default() -> Chain {
        Chain { ranges: Box::new([GuestRange::default(); CHAIN_MAX]), count: 0, readable: 0 }
    }
}

/// A chain that is being collected: [`add`](Self::add) for each descriptor, then [`finish`](Self::finish).
// Its numbers are in registers; those of a `Chain` would be in memory, as its ranges are.
pub(crate) struct ChainCollector<'a> {
    chain: &'a mut Chain,
    count: usize,
    readable: usize,
}

/// A descriptor's buffer lies outside of guest memory, or in too many pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unmapped;

impl ChainCollector<'_> {
    /// Adds the buffer of the next descriptor.
    #[inline]
    pub(crate) fn add(&mut self, range: GuestRange, flags: u16) -> Result<(), RingError> {
        let Some(next) = self.chain.ranges.get_mut(self.count) else { return Err(RingError::ChainLength) };
        *next = range;
        if flags & descriptor_flags::WRITE == 0 {
            if self.readable < self.count {
                return Err(RingError::Order);
            }
            self.readable += 1;
        }
        self.count += 1;
        Ok(())
    }

    #[inline]
    pub(crate) fn finish(self) {
        (self.chain.count, self.chain.readable) = (self.count, self.readable);
    }
}

impl Chain {
    /// Begins a new chain.
    #[inline]
    pub(crate) fn begin(&mut self) -> ChainCollector<'_> {
        (self.count, self.readable) = (0, 0);
        ChainCollector { chain: self, count: 0, readable: 0 }
    }

    /// What the device reads.
    #[inline]
    pub(crate) fn readable(&self) -> &[GuestRange] {
        &self.ranges[..self.readable]
    }

    /// What the device writes.
    #[inline]
    pub(crate) fn writable(&self) -> &[GuestRange] {
        &self.ranges[self.readable..self.count]
    }

    /// The first bytes of what the device writes.
    pub(crate) fn written(&self, bytes: u32) -> impl Iterator<Item = GuestRange> {
        part(self.writable(), 0, bytes.into())
    }
}

/// Bytes of ranges, without limit.
#[inline]
pub(crate) fn total(ranges: &[GuestRange]) -> u64 {
    ranges.iter().map(|range| u64::from(range.length)).sum()
}

/// The part of ranges that begins after `skip` bytes and has `length`.
fn part(ranges: &[GuestRange], skip: u64, length: u64) -> impl Iterator<Item = GuestRange> {
    let (mut skip, mut left) = (skip, length);
    ranges.iter().filter_map(move |range| {
        let skipped = skip.min(range.length.into());
        skip -= skipped;
        let length = (u64::from(range.length) - skipped).min(left);
        left -= length;
        let address = range.address.wrapping_add(skipped);
        (length > 0).then_some(GuestRange { address, length: length as u32 })
    })
}

/// The first `N` bytes of ranges, each loaded once.
#[inline]
pub(crate) fn first_bytes<const N: usize>(
    memory: &GuestMemory,
    ranges: &[GuestRange],
) -> Result<[u8; N], Unmapped> {
    if let Some(range) = ranges.first()
        && let Some(piece) = memory.piece(range.address, range.length)
        && piece.length as usize >= N
    {
        return Ok(piece.region().snapshot(piece.offset));
    }
    let mut bytes = [0; N];
    let mut at = 0;
    for range in part(ranges, 0, N as u64) {
        for offset in 0..range.length {
            let piece = memory.piece(range.address.wrapping_add(offset.into()), 1).ok_or(Unmapped)?;
            bytes[at] = piece.region().load_u8(piece.offset);
            at += 1;
        }
    }
    if at == N { Ok(bytes) } else { Err(Unmapped) }
}

/// Writes bytes to the start of ranges, as far as they reach. Returns how many were written.
pub(crate) fn write_bytes(
    memory: &GuestMemory,
    ranges: &[GuestRange],
    bytes: &[u8],
) -> Result<usize, Unmapped> {
    let mut at = 0;
    for mut range in part(ranges, 0, bytes.len() as u64) {
        while range.length > 0 {
            let piece = memory.piece(range.address, range.length).ok_or(Unmapped)?;
            let end = at + piece.length as usize;
            piece.region().write(piece.offset, &bytes[at..end]);
            at = end;
            range.address = range.address.wrapping_add(piece.length.into());
            range.length -= piece.length;
        }
    }
    Ok(at)
}

/// `length` bytes of ranges after `skip`, as data for a device. There must be at least one.
#[inline]
pub(crate) fn data(
    memory: &GuestMemory,
    ranges: &[GuestRange],
    skip: u64,
    length: u64,
) -> Result<Data, Unmapped> {
    let mut first: Option<Buffer> = None;
    let mut others: Vec<Buffer> = Vec::new();
    for mut range in part(ranges, skip, length) {
        while range.length > 0 {
            let piece = memory.piece(range.address, range.length).ok_or(Unmapped)?;
            let buffer = piece.buffer().ok_or(Unmapped)?;
            range.address = range.address.wrapping_add(piece.length.into());
            range.length -= piece.length;
            if first.is_none() {
                first = Some(buffer);
                continue;
            }
            if others.len() >= SLICES_MAX {
                return Err(Unmapped);
            }
            others.push(buffer);
        }
    }
    let first = first.ok_or(Unmapped)?;
    if others.is_empty() {
        return Ok(Data::One(first));
    }
    others.insert(0, first);
    Data::gather(others).ok_or(Unmapped)
}

/// The place of the last byte of the ranges.
#[inline]
pub(crate) fn last_byte(memory: &GuestMemory, ranges: &[GuestRange]) -> Option<GuestPlace> {
    let range = ranges.iter().rev().find(|range| range.length > 0)?;
    let piece = memory.piece(range.address.wrapping_add(u64::from(range.length) - 1), 1)?;
    Some(piece.place())
}
