//! The GUID partition table of a disk, as in the UEFI specification: [`ProtectiveMbr`], [`GptHeader`] and
//! [`GptTable`].
//!
//! Block 0 has the protective MBR, which keeps older software away. Block 1 has the primary header, which
//! says where the array of partition entries is; the last block has the backup header, with an array of its
//! own. Headers and arrays have CRC32s. Integers are little-endian, and so are the first three fields of a
//! GUID. Blocks are those of the disk, of 512 bytes or a multiple.
//!
//! The crate decodes and encodes. Which of the two tables counts is known to `bdev_gpt::TableSearch`.
//!
//! ```
//! use wire_gpt::ProtectiveMbr;
//! let mbr = ProtectiveMbr::of(131_072);
//! assert_eq!(ProtectiveMbr::decode(&mbr.encode())?, mbr);
//! assert!(mbr.covers(131_072) && !mbr.covers(131_071));
//! # Ok::<(), wire_gpt::DecodeError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod header;
mod mbr;
mod partition_type;
mod table;

pub use codec::DecodeError;
pub use header::{GptHeader, HEADER_BYTES};
pub use mbr::{MBR_BYTES, ProtectiveMbr};
pub use partition_type::PartitionType;
pub use table::{ENTRY_BYTES, GptEntry, GptTable, NAME_UNITS};
pub use uuid::Uuid;

/// Most bytes of an array of entries: 16 times what the specification wants reserved at least, for 2048
/// entries. A header that asks for more is rejected before anything is allocated for it.
pub const ENTRIES_BYTES_MAX: u32 = 256 << 10;

/// The block of the primary header.
pub const PRIMARY_LBA: u64 = 1;

/// The bytes of a field.
///
/// # Panics
/// If the field is not within `from`, whose length the caller has checked.
fn array<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    *from[at..].first_chunk().expect("the length was checked")
}

fn u32_at(from: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(from, at))
}

fn u64_at(from: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(from, at))
}

fn guid_at(from: &[u8], at: usize) -> Uuid {
    Uuid::from_bytes_le(array(from, at))
}

fn put(out: &mut [u8], at: usize, field: &[u8]) {
    out[at..at + field.len()].copy_from_slice(field);
}
