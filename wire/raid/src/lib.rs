//! What members of a RAID array have beside its data: SPDK's [`RaidSuperblock`], version 1.0, with its
//! [`RaidMember`]s, and our [`IntentPage`].
//!
//! The superblock is in the first blocks of every member, the data begins 1 MiB or more later. Between them
//! SPDK leaves the space free in which a mirror of ours has two copies of a write-intent bitmap,
//! [`INTENT_OFFSETS`]. Integers are little-endian, UUIDs as they are printed. Offsets and sizes of the
//! superblock are in blocks of the member, which have as many bytes as those of the array.
//!
//! ```
//! use wire_raid::{MemberState, RaidLevel, RaidMember, RaidSuperblock, Uuid};
//! let member = |slot| RaidMember {
//!     uuid: Uuid::from_u128(2 + u128::from(slot)),
//!     data_offset: 2048,
//!     data_blocks: 4096,
//!     state: MemberState::Configured,
//!     slot,
//! };
//! let superblock = RaidSuperblock {
//!     uuid: Uuid::from_u128(1),
//!     name: "Mirror0".into(),
//!     blocks: 4096,
//!     block_bytes: 512,
//!     level: RaidLevel::Raid1,
//!     strip_blocks: 0,
//!     sequence: 1,
//!     slots: 2,
//!     members: vec![member(0), member(1)],
//! };
//! assert_eq!(RaidSuperblock::decode(&superblock.encode())?, superblock);
//! # Ok::<(), wire_raid::DecodeError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod intent;
mod superblock;

pub use codec::DecodeError;
pub use intent::{INTENT_OFFSETS, INTENT_PAGE_BYTES, INTENT_REGIONS_MAX, IntentPage};
pub use superblock::{
    MEMBERS_MAX, MemberState, NAME_BYTES_MAX, RaidLevel, RaidMember, RaidSuperblock, SUPERBLOCK_BYTES_MAX,
    SUPERBLOCK_HEADER_BYTES,
};
pub use uuid::Uuid;

/// Least bytes between the start of a member with a superblock and its data.
pub const DATA_OFFSET_BYTES_MIN: u64 = 1 << 20;

const _: () = assert!(SUPERBLOCK_BYTES_MAX as u64 <= INTENT_OFFSETS[0]);
const _: () = assert!(INTENT_OFFSETS[1] + INTENT_PAGE_BYTES as u64 <= DATA_OFFSET_BYTES_MIN);

/// The bytes of a field.
///
/// # Panics
/// If the field is not within `from`, whose length the caller has checked.
fn array<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    *from[at..].first_chunk().expect("the length was checked")
}

fn u16_at(from: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(from, at))
}

fn u32_at(from: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(from, at))
}

fn u64_at(from: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(from, at))
}

fn uuid_at(from: &[u8], at: usize) -> Uuid {
    Uuid::from_bytes(array(from, at))
}

fn put(out: &mut [u8], at: usize, field: &[u8]) {
    out[at..at + field.len()].copy_from_slice(field);
}
