//! RAID arrays of bdevs, as SPDK's module `raid`: raid0, concat, raid1 and raid5f, made by [`RaidModule`].
//!
//! An array is made by a method, or from superblocks that its members have: each bdev that appears is
//! examined. While members are missing it is configuring; then it is a bdev. raid0 and concat divide requests
//! by a [`StripeLayout`]. raid1 ([`Mirror`]) writes to all members and reads from the least busy; it survives
//! the loss of members, and copies to those that return or replace others. raid5f is the same with a
//! [`ParityLayout`]: it writes whole stripes, and survives the loss of one member. Both keep a write-intent
//! bitmap if they have a superblock: after a crash, or when a member returns, they copy what may differ
//! instead of all.
//!
//! ```
//! use bdev_raid::{StripeLayout, StripePiece};
//! let layout = StripeLayout::raid0(2, 128);
//! assert_eq!(layout.piece(130, 400), StripePiece { place: 1, lba: 2, blocks: 126 });
//! assert_eq!(layout.piece(256, 4), StripePiece { place: 0, lba: 128, blocks: 4 });
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod array;
mod assembly;
mod bdev_of_array;
mod layout;
mod level;
mod member_age;
mod methods;
mod mirror;
mod module;
mod on_disk;
mod parity_layout;
mod striped;

pub use layout::{StripeLayout, StripePiece};
pub use mirror::Mirror;
pub use module::RaidModule;
pub use parity_layout::ParityLayout;
