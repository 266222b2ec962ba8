//! Errors of the client.

use std::path::PathBuf;
use std::time::Duration;

use dma::RegionError;
use wire_vfio_user::{DecodeError, VfioUserCommand};

/// Why a connection or a request failed.
#[derive(Debug, thiserror::Error)]
pub enum VfioUserError {
    /// No server listens at the path.
    #[error("cannot connect to {0}: {1}; is the server running, and does it listen there?")]
    Connect(PathBuf, std::io::Error),
    /// The server closed the connection or exited.
    #[error("the server closed the connection")]
    Disconnected,
    /// The server did not reply in time. The connection cannot be used any more.
    #[error("the server did not answer {0:?} within {1:?}")]
    Timeout(VfioUserCommand, Duration),
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Socket(std::io::Error),
    /// The server rejected a request with this errno.
    #[error("the server rejected {0:?}: {why}", why = std::io::Error::from_raw_os_error(*.1))]
    Refused(VfioUserCommand, i32),
    /// The server's protocol version (major, minor) is not supported.
    #[error("the server uses vfio-user version {0}.{1}; only 0.1 is supported")]
    Version(u16, u16),
    /// A reply cannot be decoded.
    #[error("the server's reply to {0:?} is invalid: {1}")]
    InvalidReply(VfioUserCommand, DecodeError),
    /// A reply violates the protocol.
    #[error("the server's reply to {0:?} violates the protocol: {1}")]
    ProtocolViolation(VfioUserCommand, &'static str),
    /// The device does not support reset. Nothing was sent.
    #[error("the device does not support reset")]
    ResetUnsupported,
    /// The region does not exist or the range exceeds it.
    #[error("{bytes} bytes at {offset:#x} exceed region {region} of {size:#x} bytes")]
    OutOfRange {
        /// Index of the region.
        region: u32,
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: u64,
        /// Size of the region in bytes.
        size: u64,
    },
    /// The part of a region is not in a mappable area.
    #[error("the server does not allow to map {bytes:#x} bytes at {offset:#x} of region {region}")]
    NotMappable {
        /// Index of the region.
        region: u32,
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: u64,
    },
    /// mmap of a region failed.
    #[error(transparent)]
    Map(#[from] RegionError),
    /// The buffer memory is private to this process, so the server cannot map it.
    #[error(
        "buffer memory is private to this process, so the device cannot access it; make the arena with \
         shared memory"
    )]
    PrivateMemory,
    /// The device has fewer interrupt vectors.
    #[error("{want} interrupt vectors were requested, but the device has {have}")]
    Interrupts {
        /// Vectors of the device.
        have: u32,
        /// Requested vectors.
        want: u32,
    },
}
