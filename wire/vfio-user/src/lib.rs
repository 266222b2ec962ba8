//! The vfio-user protocol, version 0.1: a PCI device served over a UNIX socket.
//!
//! A message is a [`Header`] and a payload. Payloads of fixed size are structures with `decode` and
//! `to_bytes`, such as [`DmaMap`] and [`RegionAccess`], which data may follow. [`VersionMessage`] opens a
//! connection and carries capabilities as JSON. File descriptors are ancillary data of the socket and not
//! part of this crate. Integers are in host byte order, as in the kernel's VFIO structures; this crate
//! assumes little-endian, as on every machine that Ringbolt supports.
//!
//! ```
//! use wire_vfio_user::{Header, MessageType, RegionAccess, VfioUserCommand};
//! let access = RegionAccess { offset: 0x14, region: 0, count: 4 };
//! let header = Header::request(7, VfioUserCommand::RegionRead, RegionAccess::SIZE);
//! let mut message = [0; Header::SIZE + RegionAccess::SIZE];
//! message[..Header::SIZE].copy_from_slice(&header.to_bytes());
//! message[Header::SIZE..].copy_from_slice(&access.to_bytes());
//! let (header, rest) = message.split_first_chunk().expect("a header and more");
//! let header = Header::decode(header)?;
//! assert_eq!((header.kind, header.payload_bytes()), (MessageType::Request, RegionAccess::SIZE));
//! assert_eq!(RegionAccess::decode(rest)?, access);
//! # Ok::<(), wire_vfio_user::DecodeError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod access;
mod device;
mod dma;
mod header;
mod interrupts;
mod regions;
mod version;

pub use access::{MULTI_WRITE_DATA_BYTES, MultiWrite, MultiWrites, RegionAccess};
pub use codec::DecodeError;
pub use device::{DeviceInfo, device_flags};
pub use dma::{DmaAccess, DmaMap, DmaUnmap, dma_flags, unmap_flags};
pub use header::{Header, MessageType, VfioUserCommand};
pub use interrupts::{IrqInfo, SetIrqs, irq, irq_flags, irq_set};
pub use regions::{IoFdsRequest, RegionInfo, RegionReply, SparseArea, region, region_flags};
pub use version::{ProtocolCapabilities, VersionMessage};

/// Default of `max_data_xfer_size`: most bytes of data in one message.
pub const DATA_BYTES_DEFAULT: u32 = 1 << 20;
/// Default of `max_msg_fds`: most file descriptors with one message.
pub const DESCRIPTORS_DEFAULT: u32 = 1;
/// Default of `max_dma_maps`: most memory ranges that are mapped at a time.
pub const DMA_MAPS_DEFAULT: u32 = 65_535;
