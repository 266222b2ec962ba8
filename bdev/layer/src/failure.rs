//! Why a control operation on devices failed.

use std::io;
use std::path::PathBuf;

/// Why a device could not be made, found, opened or changed.
#[derive(Debug, thiserror::Error)]
pub enum BdevError {
    /// No device has that name, alias or UUID.
    #[error("no bdev is called {name}")]
    NotFound {
        /// What was asked for.
        name: String,
    },
    /// The name, an alias or the UUID is taken.
    #[error("{name} already names a bdev")]
    Exists {
        /// What is taken.
        name: String,
    },
    /// Somebody holds the device so that it cannot be opened this way.
    #[error("{name} is claimed by {by}")]
    Claimed {
        /// The device, or the file behind it.
        name: String,
        /// Who holds it.
        by: String,
    },
    /// The device was removed while the caller held on to it.
    #[error("{name} has been removed")]
    Removed {
        /// The device.
        name: String,
    },
    /// A parameter that cannot be.
    #[error("{field}: {reason}")]
    Invalid {
        /// The parameter.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The device is of another kind than the operation is for.
    #[error("{name} is not a {wanted}")]
    WrongKind {
        /// The device.
        name: String,
        /// The product name of what would do.
        wanted: &'static str,
    },
    /// No memory for the device's contents.
    #[error(transparent)]
    Memory(#[from] memory::RegionError),
    /// The core has no io_uring, so that there is no file I/O on it.
    #[error(
        "file I/O needs io_uring, which this core does not have (kernel older than 5.19, \
         kernel.io_uring_disabled, or a seccomp filter)"
    )]
    NoFileIo,
    /// The operating system refused something about a file.
    #[error("{} {doing}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// What the operating system said.
        source: io::Error,
    },
}

impl BdevError {
    pub(crate) fn invalid(field: &'static str, reason: impl Into<String>) -> BdevError {
        BdevError::Invalid { field, reason: reason.into() }
    }
}
