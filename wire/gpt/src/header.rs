//! The header of a table.

use codec::{DecodeError, crc32};
use uuid::Uuid;

use crate::{ENTRIES_BYTES_MAX, ENTRY_BYTES, guid_at, put, u32_at, u64_at};

/// Bytes of a header; one may say that it has more, which are reserved.
pub const HEADER_BYTES: usize = 92;

const SIGNATURE: [u8; 8] = *b"EFI PART";
/// The upper half is the major version.
const REVISION: u32 = 0x0001_0000;

const REVISION_AT: usize = 8;
const SIZE_AT: usize = 12;
const CRC_AT: usize = 16;
const LBA_AT: usize = 24;
const ALTERNATE_AT: usize = 32;
const FIRST_USABLE_AT: usize = 40;
const LAST_USABLE_AT: usize = 48;
const DISK_GUID_AT: usize = 56;
const ENTRIES_LBA_AT: usize = 72;
const ENTRY_COUNT_AT: usize = 80;
const ENTRY_SIZE_AT: usize = 84;
const ENTRIES_CRC_AT: usize = 88;
const _: () = assert!(ENTRIES_CRC_AT + 4 == HEADER_BYTES);

/// One of the two headers of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptHeader {
    /// The block that the header is in.
    pub lba: u64,
    /// The block of the other header.
    pub alternate_lba: u64,
    /// The first block for partitions.
    pub first_usable_lba: u64,
    /// The last block for partitions.
    pub last_usable_lba: u64,
    /// Identity of the table, and so of the disk.
    pub disk_guid: Uuid,
    /// First block of the array of entries.
    pub entries_lba: u64,
    /// Number of entries of the array, used or not.
    pub entry_count: u32,
    /// Bytes of an entry: 128 times a power of two.
    pub entry_bytes: u32,
    /// CRC32 of the array.
    pub entries_crc: u32,
}

impl GptHeader {
    /// Decodes a block with a header. What is valid only on a particular device is checked by
    /// [`check_on`](Self::check_on).
    ///
    /// # Errors
    /// The first field that no header has, or an array of more than [`ENTRIES_BYTES_MAX`].
    pub fn decode(block: &[u8]) -> Result<GptHeader, DecodeError> {
        if block.len() < HEADER_BYTES {
            return Err(DecodeError::Length { what: "the header", got: block.len(), need: HEADER_BYTES });
        }
        let wrong = |what, at: usize, value: u64| Err(DecodeError::value(what, at as u32, value));
        if block[..SIGNATURE.len()] != SIGNATURE {
            return wrong("the signature of the header", 0, u64_at(block, 0));
        }
        let revision = u32_at(block, REVISION_AT);
        if revision >> 16 != REVISION >> 16 {
            return wrong("the revision of the header", REVISION_AT, revision.into());
        }
        let size = u32_at(block, SIZE_AT);
        let Some(header) = block.get(..size as usize).filter(|header| header.len() >= HEADER_BYTES) else {
            return wrong("the size of the header", SIZE_AT, size.into());
        };
        if header_crc(header) != u32_at(block, CRC_AT) {
            return wrong("the CRC of the header", CRC_AT, u32_at(block, CRC_AT).into());
        }
        let decoded = GptHeader {
            lba: u64_at(block, LBA_AT),
            alternate_lba: u64_at(block, ALTERNATE_AT),
            first_usable_lba: u64_at(block, FIRST_USABLE_AT),
            last_usable_lba: u64_at(block, LAST_USABLE_AT),
            disk_guid: guid_at(block, DISK_GUID_AT),
            entries_lba: u64_at(block, ENTRIES_LBA_AT),
            entry_count: u32_at(block, ENTRY_COUNT_AT),
            entry_bytes: u32_at(block, ENTRY_SIZE_AT),
            entries_crc: u32_at(block, ENTRIES_CRC_AT),
        };
        if decoded.last_usable_lba < decoded.first_usable_lba {
            return wrong("the last usable block", LAST_USABLE_AT, decoded.last_usable_lba);
        }
        let bytes = decoded.entry_bytes;
        if !bytes.is_power_of_two() || bytes < ENTRY_BYTES as u32 || bytes > ENTRIES_BYTES_MAX {
            return wrong("the size of an entry", ENTRY_SIZE_AT, bytes.into());
        }
        if u64::from(bytes) * u64::from(decoded.entry_count) > ENTRIES_BYTES_MAX.into() {
            return wrong("the number of entries", ENTRY_COUNT_AT, decoded.entry_count.into());
        }
        Ok(decoded)
    }

    /// Checks that it is the header in block `lba` of a device of `device_blocks` blocks of `block_bytes`:
    /// the array is within the device, and neither it nor the header is where partitions may be.
    ///
    /// # Errors
    /// The first field that is not so.
    pub fn check_on(&self, lba: u64, device_blocks: u64, block_bytes: u32) -> Result<(), DecodeError> {
        let wrong = |what, at: usize, value: u64| Err(DecodeError::value(what, at as u32, value));
        if self.lba != lba {
            return wrong("the block of the header", LBA_AT, self.lba);
        }
        if self.last_usable_lba >= device_blocks {
            return wrong("the last usable block", LAST_USABLE_AT, self.last_usable_lba);
        }
        let usable = self.first_usable_lba..=self.last_usable_lba;
        if usable.contains(&0) || usable.contains(&lba) {
            return wrong("the first usable block", FIRST_USABLE_AT, self.first_usable_lba);
        }
        let end = self.entries_lba.checked_add(self.entries_blocks(block_bytes).into());
        let is_inside = end.is_some_and(|end| {
            let meets = |first: u64, last: u64| first < end && self.entries_lba <= last;
            end <= device_blocks
                && !meets(0, 0)
                && !meets(lba, lba)
                && !meets(self.first_usable_lba, self.last_usable_lba)
        });
        if !is_inside {
            return wrong("the first block of the entries", ENTRIES_LBA_AT, self.entries_lba);
        }
        Ok(())
    }

    /// Bytes of the array of entries, at most [`ENTRIES_BYTES_MAX`] in a header that was decoded.
    pub fn entries_bytes(&self) -> u32 {
        self.entry_bytes.saturating_mul(self.entry_count)
    }

    /// Blocks of the array of entries.
    pub fn entries_blocks(&self, block_bytes: u32) -> u32 {
        self.entries_bytes().div_ceil(block_bytes)
    }

    /// Encodes the header, with its CRC: the start of its block, whose rest is zero.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        put(&mut out, 0, &SIGNATURE);
        put(&mut out, REVISION_AT, &REVISION.to_le_bytes());
        put(&mut out, SIZE_AT, &(HEADER_BYTES as u32).to_le_bytes());
        for (at, value) in [
            (LBA_AT, self.lba),
            (ALTERNATE_AT, self.alternate_lba),
            (FIRST_USABLE_AT, self.first_usable_lba),
            (LAST_USABLE_AT, self.last_usable_lba),
            (ENTRIES_LBA_AT, self.entries_lba),
        ] {
            put(&mut out, at, &value.to_le_bytes());
        }
        put(&mut out, DISK_GUID_AT, &self.disk_guid.to_bytes_le());
        put(&mut out, ENTRY_COUNT_AT, &self.entry_count.to_le_bytes());
        put(&mut out, ENTRY_SIZE_AT, &self.entry_bytes.to_le_bytes());
        put(&mut out, ENTRIES_CRC_AT, &self.entries_crc.to_le_bytes());
        let crc = header_crc(&out);
        put(&mut out, CRC_AT, &crc.to_le_bytes());
        out
    }
}

/// The CRC of a header, which takes its own field as zero. A header is a block at most, and so is the copy.
fn header_crc(header: &[u8]) -> u32 {
    let mut copy = header.to_vec();
    put(&mut copy, CRC_AT, &[0; 4]);
    crc32(&copy)
}
