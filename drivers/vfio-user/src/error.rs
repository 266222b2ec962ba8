//! What can go wrong between a client and a server.

use std::path::PathBuf;
use std::time::Duration;

use memory::RegionError;
use wire_vfio_user::{Command, DecodeError};

/// Why a device could not be reached or did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens there.
    #[error("cannot connect to {0}: {1}; is the server running, and does it listen there?")]
    Connect(PathBuf, std::io::Error),
    /// The server closed the connection, or has ended.
    #[error("the server is gone")]
    Gone,
    /// The server took too long. The connection is of no use any more.
    #[error("the server did not answer {0:?} within {1:?}")]
    Timeout(Command, Duration),
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Socket(std::io::Error),
    /// The server refused a request.
    #[error("the server refused {0:?}: {why}", why = std::io::Error::from_raw_os_error(*.1))]
    Refused(Command, i32),
    /// The server speaks another version.
    #[error("the server speaks version {0}.{1} of vfio-user, and 0.1 is what is known here")]
    Version(u16, u16),
    /// The server's answer is not what the protocol says.
    #[error("the server's answer to {0:?} makes no sense: {1}")]
    Answer(Command, DecodeError),
    /// The server's answer is not what the protocol says.
    #[error("the server's answer to {0:?} makes no sense: {1}")]
    Nonsense(Command, &'static str),
    /// There is no such region, or not so much of it.
    #[error("region {region} has no {bytes} bytes at {offset:#x}; it has {size:#x}")]
    Range {
        /// Index of the region.
        region: u32,
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: u64,
        /// Bytes that the region has.
        size: u64,
    },
    /// The server does not let that part of a region be mapped.
    #[error("the server does not let {bytes:#x} bytes at {offset:#x} of region {region} be mapped")]
    NotMappable {
        /// Index of the region.
        region: u32,
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: u64,
    },
    /// A region could not be mapped.
    #[error(transparent)]
    Map(#[from] RegionError),
    /// Memory that no other process can map.
    #[error(
        "buffer memory is private to this process, and the device could not reach it; make the arena with \
         shared memory"
    )]
    PrivateMemory,
    /// The device has fewer interrupt vectors.
    #[error("the device has {have} interrupt vectors, and {want} were asked for")]
    Interrupts {
        /// Vectors that it has.
        have: u32,
        /// Vectors that were asked for.
        want: u32,
    },
}
