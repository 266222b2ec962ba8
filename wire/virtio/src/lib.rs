//! Encodings of virtio: virtqueues, split and packed, the block device and the SCSI host.
//!
//! A split virtqueue ([`split`]) is a table of [`Descriptor`](split::Descriptor)s with two rings of indices; a packed one
//! ([`packed`]) is a single ring of descriptors that driver and device overwrite in turn. A request to the block device
//! ([`blk`]) is a [`RequestHeader`](blk::RequestHeader), data, and one byte of [`BlkStatus`](blk::BlkStatus).
//! A command of the SCSI host ([`scsi`]) is a [`CommandHeader`](scsi::CommandHeader), a CDB and data; the answer a
//! [`ResponseHeader`](scsi::ResponseHeader), sense data and data.
//! [`Features`] are negotiated before. Structures and offsets are those of virtio 1.3; all integers are little-endian,
//! as they are for legacy drivers on every machine that Ringbolt supports.
//!
//! ```
//! use wire_virtio::{blk, split};
//! let header = blk::RequestHeader { kind: blk::RequestKind::In.to_wire(), priority: 0, sector: 8 };
//! assert_eq!(blk::RequestHeader::decode(&header.to_bytes())?, header);
//! let descriptor = split::Descriptor {
//!     address: 0x1000,
//!     length: 16,
//!     flags: wire_virtio::descriptor_flags::NEXT,
//!     next: 1,
//! };
//! assert_eq!(split::Descriptor::decode(&descriptor.to_bytes())?, descriptor);
//! # Ok::<(), wire_virtio::DecodeError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod blk;
mod features;
pub mod packed;
pub mod scsi;
pub mod split;

pub use codec::DecodeError;
pub use features::Features;

/// Maximum number of descriptors of a virtqueue (virtio 1.3, sections 2.7 and 2.8).
pub const QUEUE_SIZE_MAX: u16 = 1 << 15;

/// Flags of a descriptor, in split and packed virtqueues (sections 2.7.5 and 2.8.1).
pub mod descriptor_flags {
    /// Another descriptor follows in the chain.
    pub const NEXT: u16 = 1 << 0;
    /// The device writes the buffer; otherwise it reads it.
    pub const WRITE: u16 = 1 << 1;
    /// The buffer is a table of descriptors.
    pub const INDIRECT: u16 = 1 << 2;
    /// In a packed virtqueue: made available by the driver if it equals the driver's wrap counter.
    pub const AVAILABLE: u16 = 1 << 7;
    /// In a packed virtqueue: used by the device if it and `AVAILABLE` equal the device's wrap counter.
    pub const USED: u16 = 1 << 15;
}

/// Whether a notification is due when an index goes from `old` to `new`, and the other side has asked for one when it
/// passes `event` (section 2.7.7.2 with `VIRTIO_F_EVENT_IDX`). Indices wrap.
#[inline]
pub const fn needs_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
