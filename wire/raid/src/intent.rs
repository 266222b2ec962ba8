//! The write-intent bitmap of a mirror: which regions its members may differ in.

use codec::DecodeError;
use uuid::Uuid;

use crate::{put, u16_at, u32_at, u64_at, uuid_at};

/// Bytes of a page, which is a multiple of the block size of each device that has one.
pub const INTENT_PAGE_BYTES: usize = 4096;
/// Where the two pages of a member are, in bytes from its start. They are written in turn, so that one is
/// whole at any time; the valid one with the higher generation counts.
pub const INTENT_OFFSETS: [u64; 2] = [64 << 10, (64 << 10) + INTENT_PAGE_BYTES as u64];
/// Most regions of an array.
pub const INTENT_REGIONS_MAX: u32 = (INTENT_PAGE_BYTES - BITS_AT) as u32 * 8;

const MAGIC: [u8; 8] = *b"RBINTENT";
const VERSION: u16 = 1;
const FLAG_CLEAN: u16 = 1;
/// So that there is a newer one than any that is valid.
const GENERATION_END: u64 = 1 << 62;

const VERSION_AT: usize = 8;
const FLAGS_AT: usize = 10;
const CRC_AT: usize = 12;
const OFFSET_AT: usize = 16;
const ARRAY_AT: usize = 24;
const SEQUENCE_AT: usize = 40;
const COMPLETE_SINCE_AT: usize = 48;
const GENERATION_AT: usize = 56;
const REGION_SHIFT_AT: usize = 64;
const REGIONS_AT: usize = 68;
const HEADER_END: usize = 72;
const BITS_AT: usize = 128;

/// A page of the bitmap. A region has 2^[`region_shift`](Self::region_shift) blocks of the array; its bit is
/// set before it is written, and cleared when all members are known to have the same.
///
/// The page says what array it belongs to, and to which superblock: one with another sequence number was
/// written by software that does not keep the bitmap, which means nothing then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IntentPage {
    /// UUID of the array.
    pub array: Uuid,
    /// The sequence number of the superblock with which the page was written.
    pub sequence: u64,
    /// What a member lacks whose superblock has this sequence number or a higher one is in the regions whose
    /// bit is set.
    pub complete_since: u64,
    /// Grows with each page; less than 2^62, which no counting reaches.
    pub generation: u64,
    /// The array was closed; no bit is set.
    pub is_clean: bool,
    /// Binary logarithm of the blocks of a region; less than 64.
    pub region_shift: u32,
    /// Number of regions, [`INTENT_REGIONS_MAX`] at most.
    pub regions: u32,
    /// Their bits, as many words as they need.
    pub bits: Vec<u64>,
}

impl IntentPage {
    /// The regions of an array: the least power of two of blocks, `region_bytes_min` or more, of which the
    /// page has as many as are needed. Returns its logarithm and their number.
    pub fn regions_of(blocks: u64, block_bytes: u32, region_bytes_min: u64) -> (u32, u32) {
        let at_least = (region_bytes_min / u64::from(block_bytes.max(1))).max(1);
        let mut shift = at_least.next_power_of_two().trailing_zeros();
        while blocks.div_ceil(1 << shift) > u64::from(INTENT_REGIONS_MAX) {
            shift += 1;
        }
        (shift, blocks.div_ceil(1 << shift) as u32)
    }

    /// Decodes the page at `offset` bytes of a member, one of [`INTENT_OFFSETS`].
    ///
    /// # Errors
    /// The first field that no page there has.
    pub fn decode(from: &[u8], offset: u64) -> Result<IntentPage, DecodeError> {
        let Some(page) = from.get(..INTENT_PAGE_BYTES) else {
            let (got, need) = (from.len(), INTENT_PAGE_BYTES);
            return Err(DecodeError::Length { what: "the page of the bitmap", got, need });
        };
        let wrong = |what, at: usize, value: u64| Err(DecodeError::value(what, at as u32, value));
        if page[..MAGIC.len()] != MAGIC {
            return wrong("the magic of the bitmap", 0, u64_at(page, 0));
        }
        if u16_at(page, VERSION_AT) != VERSION {
            return wrong("the version of the bitmap", VERSION_AT, u16_at(page, VERSION_AT).into());
        }
        if u32_at(page, CRC_AT) != page_crc(page) {
            return wrong("the CRC of the bitmap", CRC_AT, u32_at(page, CRC_AT).into());
        }
        if u64_at(page, OFFSET_AT) != offset {
            return wrong("the position of the bitmap", OFFSET_AT, u64_at(page, OFFSET_AT));
        }
        let flags = u16_at(page, FLAGS_AT);
        if flags & !FLAG_CLEAN != 0 {
            return wrong("the flags of the bitmap", FLAGS_AT, flags.into());
        }
        let (region_shift, regions) = (u32_at(page, REGION_SHIFT_AT), u32_at(page, REGIONS_AT));
        if region_shift >= u64::BITS {
            return wrong("the size of a region", REGION_SHIFT_AT, region_shift.into());
        }
        if regions > INTENT_REGIONS_MAX {
            return wrong("the number of regions", REGIONS_AT, regions.into());
        }
        let generation = u64_at(page, GENERATION_AT);
        if generation >= GENERATION_END {
            return wrong("the generation of the bitmap", GENERATION_AT, generation);
        }
        if let Some(at) = (HEADER_END..BITS_AT).find(|at| page[*at] != 0) {
            return wrong("a reserved byte of the bitmap", at, page[at].into());
        }
        let words = (regions as usize).div_ceil(64);
        let word = |index: usize| u64_at(page, BITS_AT + index * 8);
        let bits: Vec<u64> = (0..words).map(word).collect();
        let behind = (words..(INTENT_PAGE_BYTES - BITS_AT) / 8).any(|index| word(index) != 0);
        let rest = regions % 64;
        let is_beyond = rest != 0 && bits.last().is_some_and(|last| last >> rest != 0);
        if behind || is_beyond {
            return wrong("a bit behind the last region", REGIONS_AT, regions.into());
        }
        let is_clean = flags & FLAG_CLEAN != 0;
        if is_clean && bits.iter().any(|word| *word != 0) {
            return wrong("the clean mark of a bitmap with bits", FLAGS_AT, flags.into());
        }
        Ok(IntentPage {
            array: uuid_at(page, ARRAY_AT),
            sequence: u64_at(page, SEQUENCE_AT),
            complete_since: u64_at(page, COMPLETE_SINCE_AT),
            generation,
            is_clean,
            region_shift,
            regions,
            bits,
        })
    }

    /// Encodes the page for `offset`.
    ///
    /// # Panics
    /// If there are too many regions, or not as many words as they need.
    pub fn encode(&self, offset: u64) -> Vec<u8> {
        let words = (self.regions as usize).div_ceil(64);
        assert!(self.regions <= INTENT_REGIONS_MAX && self.bits.len() == words, "{} regions", self.regions);
        let mut out = vec![0; INTENT_PAGE_BYTES];
        put(&mut out, 0, &MAGIC);
        put(&mut out, VERSION_AT, &VERSION.to_le_bytes());
        put(&mut out, FLAGS_AT, &u16::from(self.is_clean).to_le_bytes());
        put(&mut out, ARRAY_AT, self.array.as_bytes());
        for (at, value) in [
            (OFFSET_AT, offset),
            (SEQUENCE_AT, self.sequence),
            (COMPLETE_SINCE_AT, self.complete_since),
            (GENERATION_AT, self.generation),
        ] {
            put(&mut out, at, &value.to_le_bytes());
        }
        put(&mut out, REGION_SHIFT_AT, &self.region_shift.to_le_bytes());
        put(&mut out, REGIONS_AT, &self.regions.to_le_bytes());
        for (word, at) in self.bits.iter().zip((BITS_AT..).step_by(8)) {
            put(&mut out, at, &word.to_le_bytes());
        }
        let crc = page_crc(&out);
        put(&mut out, CRC_AT, &crc.to_le_bytes());
        out
    }
}

/// The CRC32C of a page, whose field counts as zero.
fn page_crc(page: &[u8]) -> u32 {
    let mut crc = codec::Crc32c::new();
    crc.update(&page[..CRC_AT]);
    crc.update(&[0; 4]);
    crc.update(&page[CRC_AT + 4..]);
    crc.value()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_the_regions_of_any_array() {
        assert_eq!(IntentPage::regions_of(96_256, 512, 64 << 10), (7, 752));
        assert_eq!(IntentPage::regions_of(1, 4096, 64 << 10), (4, 1));
        assert_eq!(IntentPage::regions_of(0, 4096, 64 << 10), (4, 0));
        for (blocks, block_bytes) in [(1 << 31, 512), (u64::MAX / 4096, 4096), (u64::MAX / 512, 512)] {
            let (shift, regions) = IntentPage::regions_of(blocks, block_bytes, 64 << 10);
            assert!(regions <= INTENT_REGIONS_MAX && regions > INTENT_REGIONS_MAX / 2 - 1);
            assert_eq!(blocks.div_ceil(1 << shift), regions.into());
        }
    }
}
