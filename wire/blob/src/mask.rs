//! Masks: a bit for each metadata page, cluster or blob id.

use std::ops::Range;

use codec::DecodeError;

use crate::fields::{put, u32_at};

/// What the bits of a mask stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskKind {
    /// Metadata pages that a blob uses.
    Pages = 0,
    /// Clusters that a blob or the metadata uses.
    Clusters = 1,
    /// First metadata pages of blobs.
    BlobIds = 2,
}

impl MaskKind {
    const fn what(self) -> &'static str {
        match self {
            MaskKind::Pages => "the mask of used pages",
            MaskKind::Clusters => "the mask of used clusters",
            MaskKind::BlobIds => "the mask of used blob ids",
        }
    }
}

/// Bits with their number and kind. Bit 0 is the lowest of the first byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitMask {
    kind: MaskKind,
    length: u32,
    bytes: Vec<u8>,
}

impl BitMask {
    /// Bytes before the bits: the kind, and the number of bits.
    pub const HEADER_BYTES: usize = 5;

    const LENGTH_AT: usize = 1;

    /// A mask without a bit set.
    pub fn new(kind: MaskKind, length: u32) -> BitMask {
        BitMask { kind, length, bytes: vec![0; length.div_ceil(8) as usize] }
    }

    /// Bytes of a mask with this number of bits.
    pub const fn encoded_bytes(length: u32) -> u64 {
        BitMask::HEADER_BYTES as u64 + length.div_ceil(8) as u64
    }

    /// Decodes a mask from the start of `from`. Bits after the last one are ignored.
    ///
    /// # Errors
    /// The mask is of another kind, or longer than `from`.
    pub fn decode(from: &[u8], kind: MaskKind) -> Result<BitMask, DecodeError> {
        let short = |need| DecodeError::Length { what: kind.what(), got: from.len(), need };
        if from.len() < Self::HEADER_BYTES {
            return Err(short(Self::HEADER_BYTES));
        }
        if from[0] != kind as u8 {
            return Err(DecodeError::Value { what: kind.what(), at: 0, value: from[0].into() });
        }
        let length = u32_at(from, Self::LENGTH_AT);
        let bytes = length.div_ceil(8) as usize;
        let bits =
            from[Self::HEADER_BYTES..].get(..bytes).ok_or_else(|| short(Self::HEADER_BYTES + bytes))?;
        let mut mask = BitMask { kind, length, bytes: bits.to_vec() };
        mask.truncate(length);
        Ok(mask)
    }

    /// Encodes the mask; the inverse of [`decode`](Self::decode).
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; Self::HEADER_BYTES];
        out[0] = self.kind as u8;
        put(&mut out, Self::LENGTH_AT, &self.length.to_le_bytes());
        out.extend_from_slice(&self.bytes);
        out
    }

    /// What the bits stand for.
    pub fn kind(&self) -> MaskKind {
        self.kind
    }

    /// Number of bits.
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Removes the bits from `length` on, if there are more.
    pub fn truncate(&mut self, length: u32) {
        self.length = self.length.min(length);
        self.bytes.truncate(self.length.div_ceil(8) as usize);
        if let (Some(last), bits @ 1..) = (self.bytes.last_mut(), self.length % 8) {
            *last &= (1 << bits) - 1;
        }
    }

    /// Whether a bit is set; bits beyond the last are not.
    pub fn get(&self, index: u32) -> bool {
        let byte = self.bytes.get((index / 8) as usize).copied().unwrap_or(0);
        byte >> (index % 8) & 1 == 1
    }

    /// Sets a bit; whether it was set before.
    ///
    /// # Panics
    /// If there is no such bit.
    pub fn set(&mut self, index: u32) -> bool {
        assert!(index < self.length, "bit {index} of a mask of {}", self.length);
        let byte = &mut self.bytes[(index / 8) as usize];
        let before = *byte;
        *byte |= 1 << (index % 8);
        before == *byte
    }

    /// Whether no bit of a range is set; bits beyond the last are not.
    pub fn is_clear(&self, bits: Range<u32>) -> bool {
        let (bytes, first, last) = Self::bytes_of(&bits);
        let of = |at: usize| self.bytes.get(at).copied().unwrap_or(0);
        match bytes.len() {
            0 => true,
            1 => of(bytes.start) & first & last == 0,
            _ => {
                let end = bytes.end.min(self.bytes.len());
                let within = self.bytes.get(bytes.start + 1..end.saturating_sub(1)).unwrap_or_default();
                of(bytes.start) & first == 0
                    && of(bytes.end - 1) & last == 0
                    && within.iter().all(|byte| *byte == 0)
            }
        }
    }

    /// Sets all bits of a range.
    ///
    /// # Panics
    /// If it ends beyond the last bit.
    pub fn set_range(&mut self, bits: Range<u32>) {
        assert!(bits.end <= self.length, "bits up to {} of a mask of {}", bits.end, self.length);
        let (bytes, first, last) = Self::bytes_of(&bits);
        match &mut self.bytes[bytes] {
            [] => {}
            [byte] => *byte |= first & last,
            [start, within @ .., end] => {
                *start |= first;
                within.fill(u8::MAX);
                *end |= last;
            }
        }
    }

    /// The bytes that have a range of bits, and which bits of the first and the last are in it.
    fn bytes_of(bits: &Range<u32>) -> (Range<usize>, u8, u8) {
        let (start, end) = (bits.start as usize / 8, bits.end.div_ceil(8) as usize);
        let unused = (8 - bits.end % 8) % 8;
        (start..if bits.is_empty() { start } else { end }, u8::MAX << (bits.start % 8), u8::MAX >> unused)
    }

    /// Clears a bit; whether it was set before.
    ///
    /// # Panics
    /// If there is no such bit.
    pub fn clear(&mut self, index: u32) -> bool {
        assert!(index < self.length, "bit {index} of a mask of {}", self.length);
        let byte = &mut self.bytes[(index / 8) as usize];
        let before = *byte;
        *byte &= !(1 << (index % 8));
        before != *byte
    }

    /// Appends bits that are not set, up to `length`, if there are fewer.
    pub fn extend(&mut self, length: u32) {
        self.length = self.length.max(length);
        self.bytes.resize(self.length.div_ceil(8) as usize, 0);
    }

    /// The first bit from `from` on that is not set.
    pub fn next_zero(&self, from: u32) -> Option<u32> {
        let mut index = from;
        while index < self.length {
            let byte = self.bytes[(index / 8) as usize];
            if byte == u8::MAX {
                index = (index / 8 + 1).saturating_mul(8);
            } else if byte >> (index % 8) & 1 == 0 {
                return Some(index);
            } else {
                index += 1;
            }
        }
        None
    }

    /// Number of bits that are set.
    pub fn count_ones(&self) -> u32 {
        self.bytes.iter().map(|byte| byte.count_ones()).sum()
    }

    /// The bits that are set, ascending.
    pub fn ones(&self) -> impl Iterator<Item = u32> + '_ {
        let set = self.bytes.iter().enumerate().filter(|(_, byte)| **byte != 0);
        set.flat_map(|(at, byte)| {
            (0..8).filter(move |bit| byte >> bit & 1 == 1).map(move |bit| at as u32 * 8 + bit)
        })
    }

    /// Sets the bits that are set in `other`, as far as this mask has them.
    pub fn union(&mut self, other: &BitMask) {
        for (byte, other) in self.bytes.iter_mut().zip(&other.bytes) {
            *byte |= other;
        }
        self.truncate(self.length);
    }
}
