//! Encodings of SCSI: SPC-4 (commands of every device) and SBC-4 (commands of disks).
//!
//! [`Cdb`] decodes a command descriptor block; [`Sense`] is sense data in both of its formats; the modules hold the
//! parameter data of commands. Multi-byte fields are big-endian. Nothing here executes a command.
//!
//! ```
//! use wire_scsi::{BlockRange, Cdb, RangeFlags};
//! // READ(10) of 8 blocks from block 0x1234, with FUA.
//! let cdb = [0x28, 0x08, 0, 0, 0x12, 0x34, 0, 0, 8, 0];
//! let range = BlockRange { lba: 0x1234, blocks: 8, flags: RangeFlags::FUA, protect: 0 };
//! assert_eq!(Cdb::decode(&cdb), Ok(Cdb::Read(range)));
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod blocks;
mod bytes;
pub mod capacity;
mod cdb;
pub mod copy;
pub mod inquiry;
pub mod luns;
pub mod mode;
pub mod opcode;
pub mod port_groups;
pub mod report;
pub mod reserve;
mod sense;
mod status;

pub use cdb::{BlockRange, Cdb, CdbError, CommandBits, RangeFlags};
pub use codec::DecodeError;
pub use sense::{AdditionalSense, FieldPointer, SENSE_BYTES_MAX, Sense, SenseFormat, SenseKey};
pub use status::ScsiStatus;
