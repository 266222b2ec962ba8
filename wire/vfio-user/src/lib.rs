//! The vfio-user protocol, version 0.1: a PCI device served over a UNIX socket.
//!
//! A message is a [`Header`] and a payload. Payloads of fixed size are structures with `decode` and
//! `encode`, such as [`DmaMap`] and [`RegionAccess`]; data follows them where a message carries some.
//! [`Version`] opens a connection and carries capabilities as JSON. File descriptors travel beside a
//! message and are no business of this crate. All integers are those of the host, which is taken to be
//! little-endian as the kernel's VFIO structures are on every machine that Ringbolt runs on.
//!
//! ```
//! use wire_vfio_user::{Command, Header, Kind, RegionAccess};
//! let access = RegionAccess { offset: 0x14, region: 0, count: 4 };
//! let header = Header::request(7, Command::RegionRead, RegionAccess::SIZE);
//! let mut message = [0; Header::SIZE + RegionAccess::SIZE];
//! message[..Header::SIZE].copy_from_slice(&header.to_bytes());
//! message[Header::SIZE..].copy_from_slice(&access.to_bytes());
//! let (header, rest) = message.split_first_chunk().expect("a header and more");
//! let header = Header::decode(header)?;
//! assert_eq!((header.kind, header.payload_bytes()), (Kind::Request, RegionAccess::SIZE));
//! assert_eq!(RegionAccess::decode(rest)?, access);
//! # Ok::<(), wire_vfio_user::DecodeError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

#[macro_use]
mod fields;
mod access;
mod device;
mod dma;
mod header;
mod interrupts;
mod regions;
mod version;

pub use access::{MULTI_WRITE_DATA_BYTES, MultiWrite, MultiWrites, RegionAccess};
pub use device::{DeviceInfo, device_flags};
pub use dma::{DmaAccess, DmaMap, DmaUnmap, dma_flags, unmap_flags};
pub use header::{Command, Header, Kind};
pub use interrupts::{IrqInfo, SetIrqs, irq, irq_flags, irq_set};
pub use regions::{IoFdsRequest, RegionInfo, RegionReply, SparseArea, region, region_flags};
pub use version::{Capabilities, Version};

/// Bytes of data that one message may carry unless its receiver said otherwise (`max_data_xfer_size`).
pub const DATA_BYTES_DEFAULT: u32 = 1 << 20;
/// Descriptors that one message may carry unless its receiver said otherwise (`max_msg_fds`).
pub const DESCRIPTORS_DEFAULT: u32 = 1;
/// Regions of memory that may be mapped at a time unless the server said otherwise (`max_dma_maps`).
pub const DMA_MAPS_DEFAULT: u32 = 65_535;

/// Why bytes are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Fewer bytes than the structure has.
    #[error("{what} is {got} bytes long, but {need} are needed")]
    Length {
        /// The structure.
        what: &'static str,
        /// Bytes that were there.
        got: usize,
        /// Bytes that it has.
        need: usize,
    },
    /// An impossible value.
    #[error("{what} has the value {value:#x}")]
    Value {
        /// The field.
        what: &'static str,
        /// What was there.
        value: u64,
    },
    /// The version's capabilities are no JSON object, or are none that ends with a zero byte.
    #[error("the capabilities are not a JSON object: {0}")]
    Capabilities(&'static str),
}
