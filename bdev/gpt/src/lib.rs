//! Partitions of a GUID partition table as bdevs `BASEp1`, `BASEp2`, …, as SPDK's module `gpt`:
//! [`GptModule`].
//!
//! Each bdev that appears is examined. [`TableSearch`] finds its table; the partitions of SPDK's types become
//! bdevs ([`GptPart`]), others if a method asks for them. All partitions of a base share one claim on it,
//! which they take when the first appears. From then on the table is that which was read: one that changes on
//! the disk counts when all partitions are gone and the base is examined again, so that no partition moves
//! under its users.
//!
//! ```
//! use bdev_gpt::{SearchStep, TableSearch};
//! let (mut search, step) = TableSearch::new(2048, 512);
//! assert_eq!(step, SearchStep::Read { lba: 0, blocks: 64 });
//! let SearchStep::Nothing(nothing) = search.read(Some(&[0; 64 * 512])) else { panic!("no MBR") };
//! assert_eq!(nothing.to_string(), "no protective MBR: the signature of the MBR at byte 510 has the value 0x0");
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod module;
mod parts;
mod search;

pub use module::GptModule;
pub use parts::GptPart;
pub use search::{FoundTable, NoTable, SearchStep, TableError, TableSearch};
