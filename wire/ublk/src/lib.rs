//! Encodings of ublk, the Linux driver whose block devices are served by a process.
//!
//! A server sends [`ControlCommand`]s, each with the number of a [`ControlRequest`], to `/dev/ublk-control`:
//! they add a device ([`DeviceInfo`]), set its [`UblkParameters`], start and stop it. On `/dev/ublkcN` it
//! fetches the requests of a queue with [`IoCommand`]s ([`IoRequest`]); the driver describes each in an
//! [`IoDescriptor`], in memory that both map. With [`Features::USER_COPY`] the data of a request is read and
//! written at the [`data_offset`] of the same file; without, the driver copies it from and to addresses that
//! the server gives, that of a write when it knows the request with [`Features::NEED_GET_DATA`]. Commands are
//! sent by io_uring (`IORING_OP_URING_CMD`): control commands of 32 bytes need entries of 128 bytes, I/O
//! commands of 16 fit in those of 64. Integers are in host byte order; this crate assumes little-endian, as
//! on every machine that Ringbolt supports. The format is that of `linux/ublk_cmd.h`; the numbers of commands
//! are the ones of [`Features::CMD_IOCTL_ENCODE`] (Linux 6.4 and later).
//!
//! ```
//! use wire_ublk::{IoDescriptor, IoFlags, UblkOperation};
//! let descriptor = IoDescriptor { op_flags: 1 | 1 << 13, sectors: 8, start_sector: 64, address: 0 };
//! assert_eq!(UblkOperation::from_number(descriptor.operation()), Some(UblkOperation::Write));
//! assert_eq!(descriptor.flags(), IoFlags::FUA);
//! assert_eq!(IoDescriptor::decode(&descriptor.to_bytes())?, descriptor);
//! # Ok::<(), wire_ublk::DecodeError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod control;
mod io;
mod parameters;

pub use codec::DecodeError;
pub use control::{ControlCommand, ControlRequest, DeviceInfo, Features, UblkDeviceState};
pub use io::{
    AutoBufferRegistration, IO_BYTES_MAX, IoCommand, IoDescriptor, IoFlags, IoRequest, NEED_GET_DATA,
    UblkOperation, data_offset, descriptors_bytes, descriptors_offset,
};
pub use parameters::{Attributes, BasicParameters, DiscardParameters, UblkParameters};

/// Bytes of a sector, the unit of all ranges and sizes.
pub const SECTOR_BYTES: u64 = 512;
/// Maximum requests in flight in a queue (`UBLK_MAX_QUEUE_DEPTH`).
pub const QUEUE_DEPTH_MAX: u16 = 4096;
/// Maximum queues of a device that [`data_offset`] can name (`UBLK_MAX_NR_QUEUES`).
pub const QUEUES_MAX: u16 = 4096;

/// The number of an ioctl of ublk that takes a structure of `size` bytes.
const fn ioctl_number(direction: u32, number: u8, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number as u32
}

/// The direction of an ioctl that returns data.
const IOC_READ: u32 = 2;
/// The direction of an ioctl that takes and returns data.
const IOC_READ_WRITE: u32 = 3;
