//! AES-XTS (IEEE 1619-2018) of whole 16-byte blocks, over the crate `aes`, which selects the processor's
//! widest instructions at run time.
//!
//! The data of a call is a run of *data units*, each with a tweak of its own. All units of a call go through
//! one pass, so that the cipher always has many independent blocks to work on, and its key schedule is loaded
//! once. There is no ciphertext stealing: units are multiples of 16 bytes.

use aes::cipher::array::Array;
use aes::cipher::consts::U16;
use aes::cipher::typenum::Unsigned;
use aes::cipher::{
    BlockCipherDecBackend, BlockCipherDecClosure, BlockCipherDecrypt, BlockCipherEncBackend,
    BlockCipherEncClosure, BlockCipherEncrypt, BlockSizeUser, KeyInit,
};
use aes::{Aes128, Aes128Enc, Aes256, Aes256Enc};

/// Bytes of a block of AES.
pub const XTS_BLOCK_BYTES: usize = 16;

type Block = Array<u8, U16>;

/// Blocks whose tweaks are made at a time: the most that a backend of the cipher takes at once.
const GROUP: usize = 64;
/// Data units whose tweaks are encrypted at a time.
const UNITS: usize = 64;
/// x^128 in the field of XTS: what a carry out of the highest bit adds.
const FEEDBACK: u128 = 0x87;

/// A key of AES-XTS: the schedules of its two halves, which are wiped on drop.
pub struct XtsKey(Schedules);

enum Schedules {
    Aes128 { data: Aes128, tweak: Aes128Enc },
    Aes256 { data: Aes256, tweak: Aes256Enc },
}

impl XtsKey {
    /// A key of two halves of 16 bytes each (AES-128) or 32 (AES-256): for the data, and for the tweaks.
    /// `None` for other lengths.
    pub fn new(data: &[u8], tweak: &[u8]) -> Option<XtsKey> {
        Some(XtsKey(match (data.len(), tweak.len()) {
            (16, 16) => Schedules::Aes128 {
                data: Aes128::new_from_slice(data).ok()?,
                tweak: Aes128Enc::new_from_slice(tweak).ok()?,
            },
            (32, 32) => Schedules::Aes256 {
                data: Aes256::new_from_slice(data).ok()?,
                tweak: Aes256Enc::new_from_slice(tweak).ok()?,
            },
            _ => return None,
        }))
    }

    /// Encrypts data units of `unit_bytes` each, in place. `tweak_of` gives the tweak of a unit by its
    /// number, from 0.
    ///
    /// # Panics
    /// If `data` is not a multiple of `unit_bytes`, or that not one of 16 bytes.
    pub fn encrypt(&self, data: &mut [u8], unit_bytes: usize, tweak_of: impl Fn(u64) -> u128) {
        self.each_group(data, None, unit_bytes, tweak_of, Direction::Encrypt);
    }

    /// As [`encrypt`](Self::encrypt), from one slice to another of the same length.
    ///
    /// # Panics
    /// As [`encrypt`](Self::encrypt), and if the lengths differ.
    pub fn encrypt_to(&self, to: &mut [u8], from: &[u8], unit_bytes: usize, tweak_of: impl Fn(u64) -> u128) {
        assert_eq!(to.len(), from.len(), "as many bytes from as to");
        self.each_group(to, Some(from), unit_bytes, tweak_of, Direction::Encrypt);
    }

    /// Decrypts data units in place; as [`encrypt`](Self::encrypt).
    ///
    /// # Panics
    /// As [`encrypt`](Self::encrypt).
    pub fn decrypt(&self, data: &mut [u8], unit_bytes: usize, tweak_of: impl Fn(u64) -> u128) {
        self.each_group(data, None, unit_bytes, tweak_of, Direction::Decrypt);
    }

    /// Processes up to [`UNITS`] data units at a time.
    fn each_group(
        &self,
        to: &mut [u8],
        from: Option<&[u8]>,
        unit_bytes: usize,
        tweak_of: impl Fn(u64) -> u128,
        direction: Direction,
    ) {
        let is_whole = unit_bytes > 0 && unit_bytes.is_multiple_of(XTS_BLOCK_BYTES);
        assert!(
            is_whole && to.len().is_multiple_of(unit_bytes),
            "{} bytes in units of {unit_bytes}",
            to.len()
        );
        let group_bytes = unit_bytes * UNITS;
        let mut first_unit = 0;
        for (index, to) in to.chunks_mut(group_bytes).enumerate() {
            let units = to.len() / unit_bytes;
            let from = from.map(|from| &from[index * group_bytes..][..to.len()]);
            let mut tweaks = [Block::default(); UNITS];
            let tweaks = &mut tweaks[..units];
            for (unit, tweak) in tweaks.iter_mut().enumerate() {
                *tweak = tweak_of(first_unit + unit as u64).to_le_bytes().into();
            }
            first_unit += units as u64;
            match &self.0 {
                Schedules::Aes128 { tweak, .. } => tweak.encrypt_blocks(tweaks),
                Schedules::Aes256 { tweak, .. } => tweak.encrypt_blocks(tweaks),
            }
            let pass = Pass {
                to: Block::slice_as_chunks_mut(to).0,
                from: from.map(|from| Block::slice_as_chunks(from).0),
                tweaks: Tweaks { units: tweaks, unit_blocks: unit_bytes / XTS_BLOCK_BYTES, left: 0, next: 0 },
            };
            match (&self.0, direction) {
                (Schedules::Aes128 { data, .. }, Direction::Encrypt) => data.encrypt_with_backend(pass),
                (Schedules::Aes128 { data, .. }, Direction::Decrypt) => data.decrypt_with_backend(pass),
                (Schedules::Aes256 { data, .. }, Direction::Encrypt) => data.encrypt_with_backend(pass),
                (Schedules::Aes256 { data, .. }, Direction::Decrypt) => data.decrypt_with_backend(pass),
            }
        }
    }
}

impl std::fmt::Debug for XtsKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("XtsKey(…)")
    }
}

#[derive(Clone, Copy)]
enum Direction {
    Encrypt,
    Decrypt,
}

/// The tweaks of successive blocks.
struct Tweaks<'a> {
    /// Encrypted tweaks of the units that have not begun.
    units: &'a [Block],
    unit_blocks: usize,
    /// Blocks left of the present unit.
    left: usize,
    /// Tweak of its next block.
    next: u128,
}

#[inline(always)]
fn double(tweak: u128) -> u128 {
    (tweak << 1) ^ ((tweak >> 127) * FEEDBACK)
}

/// The tweak eight blocks on. The carry of eight bits times the feedback, as shifts.
#[inline(always)]
fn times_x8(tweak: u128) -> u128 {
    let carry = tweak >> 120;
    tweak << 8 ^ carry ^ carry << 1 ^ carry << 2 ^ carry << 7
}

impl Tweaks<'_> {
    #[inline(always)]
    fn fill(&mut self, mut out: &mut [u128]) {
        while !out.is_empty() {
            if self.left == 0 {
                let Some((first, rest)) = self.units.split_first() else { return };
                (self.next, self.units) = (u128::from_le_bytes((*first).into()), rest);
                self.left = self.unit_blocks;
            }
            let count = out.len().min(self.left);
            let (now, rest) = out.split_at_mut(count);
            let (eights, ones) = now.as_chunks_mut::<8>();
            if !eights.is_empty() {
                let mut lanes = [self.next; 8];
                for lane in 1..8 {
                    lanes[lane] = double(lanes[lane - 1]);
                }
                for eight in eights {
                    *eight = lanes;
                    lanes = lanes.map(times_x8);
                }
                self.next = lanes[0];
            }
            for one in ones {
                *one = self.next;
                self.next = double(self.next);
            }
            self.left -= count;
            out = rest;
        }
    }
}

/// One pass of the cipher over a run of data units.
struct Pass<'a> {
    to: &'a mut [Block],
    from: Option<&'a [Block]>,
    tweaks: Tweaks<'a>,
}

impl BlockSizeUser for Pass<'_> {
    type BlockSize = U16;
}

#[inline(always)]
fn xor(block: &Block, tweak: u128) -> Block {
    (u128::from_le_bytes((*block).into()) ^ tweak).to_le_bytes().into()
}

impl Pass<'_> {
    /// Calls `many` for groups of exactly `width` blocks and `one` for the blocks of a small rest, between
    /// the two additions of the tweaks.
    #[inline(always)]
    fn run(mut self, width: usize, mut many: impl FnMut(&mut [Block]), mut one: impl FnMut(&mut Block)) {
        let mut tweaks = [0; GROUP];
        let width = width.clamp(1, GROUP);
        let mut from = self.from;
        let mut to = self.to;
        while !to.is_empty() {
            let count = to.len().min(width);
            let (group, rest) = to.split_at_mut(count);
            let tweaks = &mut tweaks[..count];
            self.tweaks.fill(tweaks);
            match from {
                Some(blocks) => {
                    let (group_from, rest) = blocks.split_at(count);
                    from = Some(rest);
                    for ((to, from), tweak) in group.iter_mut().zip(group_from).zip(&*tweaks) {
                        *to = xor(from, *tweak);
                    }
                }
                None => group.iter_mut().zip(&*tweaks).for_each(|(to, tweak)| *to = xor(to, *tweak)),
            }
            if count == width {
                many(group);
            } else if count * 4 > width {
                // What a backend does with a group costs the same however many of its blocks are needed.
                let mut work = [Block::default(); GROUP];
                work[..count].copy_from_slice(group);
                many(&mut work[..width]);
                group.copy_from_slice(&work[..count]);
            } else {
                group.iter_mut().for_each(&mut one);
            }
            group.iter_mut().zip(&*tweaks).for_each(|(to, tweak)| *to = xor(to, *tweak));
            to = rest;
        }
    }
}

impl BlockCipherEncClosure for Pass<'_> {
    #[inline(always)]
    fn call<B: BlockCipherEncBackend<BlockSize = U16>>(self, backend: &B) {
        let many = |blocks: &mut [Block]| {
            if let Ok(group) = <&mut Array<Block, B::ParBlocksSize>>::try_from(blocks) {
                backend.encrypt_par_blocks(group.into());
            }
        };
        self.run(B::ParBlocksSize::USIZE, many, |block| backend.encrypt_block(block.into()));
    }
}

impl BlockCipherDecClosure for Pass<'_> {
    #[inline(always)]
    fn call<B: BlockCipherDecBackend<BlockSize = U16>>(self, backend: &B) {
        let many = |blocks: &mut [Block]| {
            if let Ok(group) = <&mut Array<Block, B::ParBlocksSize>>::try_from(blocks) {
                backend.decrypt_par_blocks(group.into());
            }
        };
        self.run(B::ParBlocksSize::USIZE, many, |block| backend.decrypt_block(block.into()));
    }
}

#[cfg(test)]
mod tests;
