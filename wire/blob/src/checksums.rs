//! Checksums of the data of a store, beside it: after its end, on the same device. The format of blobstores
//! does not know them, and what reads or writes only that format needs not.
//!
//! ```text
//! store | ChecksumHeader | DirtyRegions ... | ChecksumPage of region 0 | of region 1 | ...
//! ```
//!
//! A region is 1 MiB of the device, and has a page with the CRC32C of each 4 KiB. While its bit in
//! [`DirtyRegions`] is set, the page is not valid. All three name the checksums that they belong to: what
//! others left on the device is not taken for them.

use codec::crc32c;

use crate::PAGE_BYTES;
use crate::fields::{array, put, u32_at, u64_at};
use crate::sealed::{open, seal};

/// Bytes of the data that one checksum is of.
pub const CHECKSUM_BLOCK_BYTES: u32 = 4096;
/// Bytes of a region.
pub const CHECKSUM_REGION_BYTES: u64 = 1 << 20;
/// Checksums of a region.
pub const CHECKSUMS_PER_REGION: usize = (CHECKSUM_REGION_BYTES / CHECKSUM_BLOCK_BYTES as u64) as usize;

const HEADER_MAGIC: [u8; 8] = *b"\xb1RbSumH1";
const PAGE_MAGIC: [u8; 8] = *b"\xb1RbSumP1";
const ID_AT: usize = 16;
const DATA_START_AT: usize = 32;
const DATA_BYTES_AT: usize = 40;
const REGION_AT: usize = 12;
const KNOWN_AT: usize = 32;
const SUMS_AT: usize = 64;

/// Names the checksums of one store: random, and another one whenever all are computed anew.
pub type ChecksumsId = [u8; 16];

/// The first page of the checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumHeader {
    /// Which checksums these are.
    pub id: ChecksumsId,
    /// Where the data begins that has checksums, in bytes: the end of the store's metadata.
    pub data_start: u64,
    /// Where it ends, and the store with it. The header follows there.
    pub data_bytes: u64,
}

impl ChecksumHeader {
    /// Encodes the header.
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        let mut out = [0; PAGE_BYTES];
        put(&mut out, 0, &HEADER_MAGIC);
        put(&mut out, ID_AT, &self.id);
        put(&mut out, DATA_START_AT, &self.data_start.to_le_bytes());
        put(&mut out, DATA_BYTES_AT, &self.data_bytes.to_le_bytes());
        seal(&mut out);
        out
    }

    /// Decodes the header; `None` if there is none.
    pub fn decode(from: &[u8]) -> Option<ChecksumHeader> {
        let from = open(from, HEADER_MAGIC)?;
        let (data_start, data_bytes) = (u64_at(from, DATA_START_AT), u64_at(from, DATA_BYTES_AT));
        Some(ChecksumHeader { id: array(from, ID_AT), data_start, data_bytes })
    }
}

/// The checksums of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChecksumPage {
    /// Index of the region.
    pub region: u32,
    /// The CRC32C of each block; `None` if it is not known.
    pub sums: [Option<u32>; CHECKSUMS_PER_REGION],
}

impl ChecksumPage {
    /// Encodes the page.
    pub fn encode(&self, id: ChecksumsId) -> [u8; PAGE_BYTES] {
        let mut out = [0; PAGE_BYTES];
        put(&mut out, 0, &PAGE_MAGIC);
        put(&mut out, REGION_AT, &self.region.to_le_bytes());
        put(&mut out, ID_AT, &id);
        for (index, sum) in self.sums.iter().enumerate() {
            if let Some(sum) = sum {
                out[KNOWN_AT + index / 8] |= 1 << (index % 8);
                put(&mut out, SUMS_AT + index * 4, &sum.to_le_bytes());
            }
        }
        seal(&mut out);
        out
    }

    /// Whether this is the page of a region, and damaged: it has the place and the id of these checksums, and
    /// a wrong CRC.
    pub fn is_damaged(from: &[u8], region: u32, id: ChecksumsId) -> bool {
        from.len() >= PAGE_BYTES
            && from.starts_with(&PAGE_MAGIC)
            && u32_at(from, REGION_AT) == region
            && array::<16>(from, ID_AT) == id
            && open(from, PAGE_MAGIC).is_none()
    }

    /// Decodes the page of a region; `None` if there is none of these checksums.
    pub fn decode(from: &[u8], region: u32, id: ChecksumsId) -> Option<ChecksumPage> {
        let from = open(from, PAGE_MAGIC)?;
        if u32_at(from, REGION_AT) != region || array::<16>(from, ID_AT) != id {
            return None;
        }
        let is_known = |index: usize| from[KNOWN_AT + index / 8] >> (index % 8) & 1 == 1;
        let sum = |index: usize| is_known(index).then(|| u32_at(from, SUMS_AT + index * 4));
        Some(ChecksumPage { region, sums: std::array::from_fn(sum) })
    }
}

/// A page of bits of regions. Each 512 bytes of it have a CRC, so that a page that was half written has only
/// bits of before and of after.
pub struct DirtyRegions;

const SECTOR_BYTES: usize = 512;
const SECTOR_NUMBER_AT: usize = 4;
const SECTOR_ID_AT: usize = 8;
const SECTOR_BITS_AT: usize = 24;
const SECTOR_BITS_BYTES: usize = SECTOR_BYTES - SECTOR_BITS_AT;
const SECTORS: usize = PAGE_BYTES / SECTOR_BYTES;

impl DirtyRegions {
    /// Bytes of bits in a page, lowest bit first.
    pub const BITS_BYTES: usize = SECTORS * SECTOR_BITS_BYTES;
    /// Regions of a page.
    pub const REGIONS: u32 = 8 * Self::BITS_BYTES as u32;

    /// Encodes a page: the one with this index, of [`Self::BITS_BYTES`].
    ///
    /// # Panics
    /// If the bits are more or fewer.
    pub fn encode(page: u32, id: ChecksumsId, bits: &[u8]) -> [u8; PAGE_BYTES] {
        assert_eq!(bits.len(), Self::BITS_BYTES, "bytes of bits of a page");
        let mut out = [0; PAGE_BYTES];
        let sectors = out.as_chunks_mut::<SECTOR_BYTES>().0.iter_mut();
        for (index, (sector, bits)) in sectors.zip(bits.as_chunks::<SECTOR_BITS_BYTES>().0).enumerate() {
            let number = page * SECTORS as u32 + index as u32;
            put(sector, SECTOR_NUMBER_AT, &number.to_le_bytes());
            put(sector, SECTOR_ID_AT, &id);
            put(sector, SECTOR_BITS_AT, bits);
            let crc = crc32c(&sector[SECTOR_NUMBER_AT..]);
            put(sector, 0, &crc.to_le_bytes());
        }
        out
    }

    /// Decodes a page. Where it is not valid, all bits are set.
    pub fn decode(from: &[u8], page: u32, id: ChecksumsId) -> Vec<u8> {
        let mut bits = vec![u8::MAX; Self::BITS_BYTES];
        let parts = bits.as_chunks_mut::<SECTOR_BITS_BYTES>().0.iter_mut();
        for (index, (sector, part)) in from.as_chunks::<SECTOR_BYTES>().0.iter().zip(parts).enumerate() {
            let number = page * SECTORS as u32 + index as u32;
            let is_valid = u32_at(sector, 0) == crc32c(&sector[SECTOR_NUMBER_AT..])
                && u32_at(sector, SECTOR_NUMBER_AT) == number
                && array::<16>(sector, SECTOR_ID_AT) == id;
            if is_valid {
                part.copy_from_slice(&sector[SECTOR_BITS_AT..]);
            }
        }
        bits
    }
}

/// Says in the mask of pages which checksums the program kept that unloaded the store. SPDK and others write
/// zeroes there, and so it is not believed that the checksums are those of the data after them.
pub struct ChecksumsMark;

const MARK_MAGIC: [u8; 8] = *b"\xb1RbMark1";

impl ChecksumsMark {
    /// Bytes of the mark, the last ones of the mask.
    pub const BYTES: usize = 32;

    /// Encodes the mark.
    pub fn encode(id: ChecksumsId) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        put(&mut out, 0, &MARK_MAGIC);
        put(&mut out, 8, &id);
        let crc = crc32c(&out[..24]);
        put(&mut out, 24, &crc.to_le_bytes());
        out
    }

    /// Decodes the mark; `None` if there is none.
    pub fn decode(from: &[u8]) -> Option<ChecksumsId> {
        let from = from.first_chunk::<{ Self::BYTES }>()?;
        let id = array::<16>(from, 8);
        (Self::encode(id) == *from).then_some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: ChecksumsId = *b"0123456789abcdef";

    fn page() -> ChecksumPage {
        let sum = |index: usize| (!index.is_multiple_of(3)).then_some(index as u32 * 0x0101_0101);
        ChecksumPage { region: 7, sums: std::array::from_fn(sum) }
    }

    #[test]
    fn what_is_encoded_is_decoded_and_belongs_to_its_place() {
        let header = ChecksumHeader { id: ID, data_start: 1 << 20, data_bytes: 1 << 30 };
        assert_eq!(ChecksumHeader::decode(&header.encode()), Some(header));
        assert_eq!(ChecksumHeader::decode(&[0; PAGE_BYTES]), None);
        let bytes = page().encode(ID);
        assert_eq!(ChecksumPage::decode(&bytes, 7, ID), Some(page()));
        assert_eq!(ChecksumPage::decode(&bytes, 8, ID), None);
        assert_eq!(ChecksumPage::decode(&bytes, 7, [0; 16]), None);
        assert_eq!(ChecksumsMark::decode(&ChecksumsMark::encode(ID)), Some(ID));
        assert_eq!(ChecksumsMark::decode(&[0; 32]), None);
    }

    #[test]
    fn a_changed_bit_makes_a_page_invalid() {
        let bytes = page().encode(ID);
        for at in (0..PAGE_BYTES).step_by(61) {
            let mut changed = bytes;
            changed[at] ^= 4;
            assert_eq!(ChecksumPage::decode(&changed, 7, ID), None, "byte {at}");
            let is_recognized = !(0..8).contains(&at) && !(12..32).contains(&at);
            assert_eq!(ChecksumPage::is_damaged(&changed, 7, ID), is_recognized, "byte {at}");
        }
    }

    #[test]
    fn the_fields_are_where_the_documentation_says() {
        let bytes = page().encode(ID);
        assert_eq!(bytes[..8], *b"\xb1RbSumP1");
        assert_eq!((bytes[12], &bytes[16..32]), (7, &ID[..]));
        assert_eq!(bytes[32], 0b1011_0110);
        assert_eq!(bytes[64..72], [0, 0, 0, 0, 1, 1, 1, 1]);
        let mut zeroed = bytes;
        zeroed[8..12].fill(0);
        assert_eq!(bytes[8..12], crc32c(&zeroed).to_le_bytes());
    }

    #[test]
    fn a_half_written_page_of_bits_has_bits_of_before_and_after() {
        let before = DirtyRegions::encode(2, ID, &[0; DirtyRegions::BITS_BYTES]);
        let after = DirtyRegions::encode(2, ID, &[0x55; DirtyRegions::BITS_BYTES]);
        let mut torn = before;
        torn[512..1024].copy_from_slice(&after[512..1024]);
        let bits = DirtyRegions::decode(&torn, 2, ID);
        assert!(bits[..488].iter().all(|byte| *byte == 0));
        assert!(bits[488..976].iter().all(|byte| *byte == 0x55));
        // In a place of its own, of these checksums, and whole: otherwise all are dirty.
        torn[600] ^= 1;
        assert!(DirtyRegions::decode(&torn, 2, ID)[488..976].iter().all(|byte| *byte == 0xff));
        assert!(DirtyRegions::decode(&torn, 3, ID).iter().all(|byte| *byte == 0xff));
        assert!(DirtyRegions::decode(&torn, 2, [0; 16]).iter().all(|byte| *byte == 0xff));
    }
}
