//! Checksums of the data on a device: what is read is compared with what was written.
//!
//! [`ChecksumBdev`] stands on a device that has data from its start, and a CRC32C of each 4 KiB of it after
//! the data ([`ChecksumLayout`], `wire_blob::ChecksumHeader`). A read of other data than was written fails
//! with Unrecovered Read Error, is counted, and the log names it. What others find on the device is the data,
//! where they expect it.
//!
//! ```
//! let layout = bdev_checksums::ChecksumLayout::within(64 << 20, 1 << 20, 1 << 20).expect("there is space");
//! assert_eq!(layout.data_bytes, 63 << 20);
//! assert!(layout.end() <= 64 << 20);
//! ```
//!
//! # What a write costs
//! No second write: a region of 1 MiB has a bit on the device, which is set before the first write to it, and
//! cleared when the region was left alone for a second and its checksums are durable. After a power failure,
//! the regions whose bits are set are read, and have the checksums of what is there: of those, nothing is
//! noticed that was damaged between the last write and the failure.
//!
//! # Who changes the data
//! Nothing on the device says that another program has changed it. Who uses this says whether the checksums
//! are to be believed ([`ChecksumBdev::begin`]); until then, nothing is verified.
//!
//! # State
//! `table` is the owner's state, sans-IO: which regions are in memory, and which bits are set. `region` has
//! the checksums of one, which all cores share, a word for each block. `owner` runs the table on one core,
//! and channels ask it by mailbox for regions that they do not know.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod channel;
mod device;
mod layout;
mod owner;
mod region;
mod shared;
mod table;

pub use device::{ChecksumBdev, checksums_name, register};
pub use layout::ChecksumLayout;
pub use shared::DescribeOffset;
