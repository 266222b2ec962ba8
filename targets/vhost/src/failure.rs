//! Errors of the target, and violations of the protocol.

use target_shell::{CpuMaskError, NotApplied, ShellError};
use wire_vhost_user::DecodeError;
use wire_virtio::QUEUE_SIZE_MAX;

use crate::memory::MemoryError;

/// A controller could not be created, deleted or found.
#[derive(Debug, thiserror::Error)]
pub enum VhostTargetError {
    /// The device is missing or claimed.
    #[error(transparent)]
    Bdev(#[from] bdev::BdevError),
    /// The reservations of the device cannot be used.
    #[error(transparent)]
    Reservations(#[from] bdev::OpenReservationsError),
    /// Listening failed, or a reactor does not respond.
    #[error(transparent)]
    Shell(#[from] ShellError),
    /// A reactor has not applied the change, which is undone.
    #[error("{0}; nothing was changed")]
    NotApplied(NotApplied),
    /// The CPU mask does not suit.
    #[error(transparent)]
    CpuMask(#[from] CpuMaskError),
    /// There is a controller of this name.
    #[error("the vhost controller {0} exists")]
    Exists(String),
    /// There is no controller of this name.
    #[error("there is no vhost controller {0}")]
    NotFound(String),
    /// Clients use the controller.
    #[error("the vhost controller {0} is in use: disconnect its clients first")]
    Busy(String),
    /// The SCSI controller has started.
    #[error("the vhost controller {0} has started")]
    Started(String),
    /// The number is in use.
    #[error("SCSI target {0} exists")]
    TargetExists(u8),
    /// There is no such target.
    #[error("there is no SCSI target {0}")]
    NoTarget(u8),
    /// Every number is in use.
    #[error("there is no free SCSI target")]
    NoFreeTarget,
    /// There are as many controllers as the target has.
    #[error("there are {0} vhost controllers already")]
    TooMany(usize),
    /// A parameter is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The target is stopping.
    #[error("the target is stopping")]
    Stopping,
}

impl From<target_shell::TargetStopping> for VhostTargetError {
    fn from(_: target_shell::TargetStopping) -> VhostTargetError {
        VhostTargetError::Stopping
    }
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VhostViolation {
    /// The peer sent what is not vhost-user.
    #[error("{0}")]
    Malformed(#[from] DecodeError),
    /// The payload of a message is too long.
    #[error("a message has {0} bytes of payload")]
    TooLong(u32),
    /// A message carries more file descriptors than any may.
    #[error("a message carries too many file descriptors")]
    Descriptors,
    /// A request is invalid, and the front-end has not asked for an acknowledgement that could say so.
    #[error("request {request} is rejected: {reason}")]
    Rejected {
        /// Number of the request.
        request: u32,
        /// The reason.
        reason: RequestError,
    },
    /// The front-end does not read its replies.
    #[error("the front-end does not read replies")]
    SendQueueFull,
    /// The front-end truncated memory that it shares.
    #[error("the front-end truncated memory that it shares")]
    Truncated,
    /// A core that serves virtqueues of the connection has no room for its memory.
    #[error("a core cannot serve its virtqueues: {0}")]
    Memory(MemoryError),
}

/// Why a request of the front-end is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// It is unknown, or its feature was not negotiated.
    #[error("it is not supported")]
    NotSupported,
    /// Its payload is not what it should be.
    #[error("its payload is invalid")]
    Payload,
    /// It has the wrong number of descriptors, or of the wrong kind.
    #[error("its file descriptors are invalid")]
    Descriptors,
    /// The memory is not accepted.
    #[error("{0}")]
    Memory(#[from] MemoryError),
    /// A virtqueue cannot have this number of entries.
    #[error(
        "a virtqueue cannot have {0} entries: a split one has a power of two, a packed one any number, of at most {QUEUE_SIZE_MAX}"
    )]
    QueueSize(u32),
    /// A virtqueue cannot begin there.
    #[error("a virtqueue of {size} entries cannot begin at entry {entry}")]
    QueueBase {
        /// Number of the entry.
        entry: u16,
        /// Number of entries.
        size: u16,
    },
    /// There is no such virtqueue.
    #[error("there is no such virtqueue")]
    Queue,
    /// A virtqueue is running and cannot be changed.
    #[error("the virtqueue is running")]
    Running,
    /// There is no memory for requests in flight.
    #[error("there is no memory")]
    NoMemory,
    /// A feature is not offered.
    #[error("a feature is not offered")]
    Feature,
}

/// Why a virtqueue is not served any more, until it is started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RingError {
    #[error("the available index jumps by {0}")]
    IndexJump(u16),
    #[error("the chain at descriptor {0} is available again while it is in flight")]
    InFlight(u16),
    #[error("descriptor {0} is not in its table")]
    Descriptor(u16),
    #[error("a chain has too many descriptors or is a loop")]
    ChainLength,
    #[error("a writable descriptor is followed by a readable one")]
    Order,
    #[error("an indirect table is invalid")]
    IndirectTable,
    #[error("a chain has no room for the status")]
    NoStatus,
    #[error("the memory for requests in flight is damaged")]
    InflightArea,
}
