//! The error type of control operations on block devices.

use std::io;
use std::path::PathBuf;

/// Why creating, finding, opening or changing a device failed.
#[derive(Debug, thiserror::Error)]
pub enum BdevError {
    /// No device has that name, alias or UUID.
    #[error("no bdev is called {name}")]
    NotFound {
        /// The requested name.
        name: String,
    },
    /// The name, an alias or the UUID is in use.
    #[error("a bdev named {name} already exists")]
    Exists {
        /// The name, alias or UUID that is in use.
        name: String,
    },
    /// A claim or another writer prevents this open.
    #[error("{name} is claimed by {by}")]
    Claimed {
        /// The device, or its backing file.
        name: String,
        /// The holder.
        by: String,
    },
    /// The device was removed while the caller had a reference to it.
    #[error("{name} has been removed")]
    Removed {
        /// The device.
        name: String,
    },
    /// Two devices have one identity: one is a copy of the other.
    #[error(
        "{name} has the UUID {uuid} of the bdev {other}: one is a copy of the other; give one of them a uuid of its own"
    )]
    SameIdentity {
        /// The new device.
        name: String,
        /// Their UUID.
        uuid: uuid::Uuid,
        /// The device that has it already.
        other: String,
    },
    /// A parameter has an invalid value.
    #[error("{field}: {reason}")]
    Invalid {
        /// Name of the parameter.
        field: &'static str,
        /// Why the value is invalid.
        reason: String,
    },
    /// The operation is for another kind of device.
    #[error("{name} is not {} {expected}", article(expected))]
    WrongKind {
        /// The device.
        name: String,
        /// The product name of the required kind.
        expected: &'static str,
    },
    /// The memory for the device's contents could not be allocated.
    #[error(transparent)]
    Memory(#[from] dma::RegionError),
    /// A device in memory is larger than the memory that is left for such devices.
    #[error(
        "{name} needs {} MiB of memory, but {} of {} MiB are left for bdevs in memory; delete some, or reduce the memory \
         of I/O buffers (--memory)",
        bytes.div_ceil(1 << 20), left_bytes >> 20, limit_bytes >> 20
    )]
    NoMemoryLeft {
        /// The device.
        name: String,
        /// Its size.
        bytes: u64,
        /// What the other devices leave.
        left_bytes: u64,
        /// The memory for all devices in memory.
        limit_bytes: u64,
    },
    /// The reactors have no io_uring, which file I/O needs.
    #[error("file I/O needs io_uring, which the reactors do not have: {reason}")]
    NoFileIo {
        /// Why not, and what to do about it.
        reason: String,
    },
    /// Linux AIO, which an AIO device needs, cannot be used.
    #[error("Linux AIO cannot be used: {reason}")]
    NoAio {
        /// Why not, and what to do about it.
        reason: String,
    },
    /// A block device has another user: it is mounted, used as swap, part of another device, or open exclusively.
    #[error(
        "{by}; end that first, or set `force` to use {name} nevertheless, which destroys what its user stores there"
    )]
    InUse {
        /// The block device.
        name: String,
        /// What uses it.
        by: String,
    },
    /// A file operation failed.
    #[error("{} {doing}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operation that failed.
        doing: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl BdevError {
    /// [`Invalid`](Self::Invalid).
    pub fn invalid(field: &'static str, reason: impl Into<String>) -> BdevError {
        BdevError::Invalid { field, reason: reason.into() }
    }
}

/// The indefinite article of a product name.
pub(crate) fn article(name: &str) -> &'static str {
    // U is left out: names such as "URING bdev" are spoken with a consonant.
    if name.starts_with(['A', 'E', 'I', 'O', 'a', 'e', 'i', 'o']) { "an" } else { "a" }
}
