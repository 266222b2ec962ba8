//! Registers and descriptors of Intel's I/OAT DMA engine (CBDMA), versions 3.0 to 3.4.
//!
//! [`IoatDescriptor`] is an entry of a channel's ring, [`ChannelStatus`] what a channel writes to memory when
//! it has completed one, [`ChannelErrors`] why it has halted. Offsets of registers are in [`registers`]. The
//! facts are those of Intel's datasheets of server processors and of the Linux kernel's `ioatdma`; no silicon
//! was seen by this code.
//!
//! ```
//! use wire_ioat::{IoatDescriptor, DescriptorOp};
//! let copy = DescriptorOp::Copy { from: 0x1000, to: 0x2000, bytes: 512 };
//! let descriptor = IoatDescriptor { op: copy, reports: true, next: 0x40 };
//! assert_eq!(IoatDescriptor::decode(&descriptor.encode()), Ok(descriptor));
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod descriptor;
pub mod registers;
mod status;

pub use codec::DecodeError;
pub use descriptor::{DESCRIPTOR_BYTES, DESCRIPTOR_WORDS, DescriptorOp, IoatDescriptor};
pub use status::{ChannelErrors, ChannelState, ChannelStatus};
