//! Requests, completions and errors.

use wire_ioat::ChannelErrors;

/// What a request does, in addresses of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoatOp {
    /// A copy; the ranges do not overlap.
    Copy {
        /// Source.
        from: u64,
        /// Destination.
        to: u64,
        /// Bytes, not 0.
        bytes: u64,
    },
    /// Eight bytes, again and again.
    Fill {
        /// Little-endian.
        pattern: u64,
        /// Destination.
        to: u64,
        /// Bytes, not 0.
        bytes: u64,
    },
}

impl IoatOp {
    /// Bytes of the destination.
    pub fn bytes(&self) -> u64 {
        match self {
            IoatOp::Copy { bytes, .. } | IoatOp::Fill { bytes, .. } => *bytes,
        }
    }
}

/// A request, and what it owns: the memory, for one.
#[derive(Debug)]
pub struct IoatRequest<T> {
    /// What it does.
    pub op: IoatOp,
    /// Comes back with the completion.
    pub owned: T,
}

/// The result of a request.
#[derive(Debug, PartialEq, Eq)]
pub struct IoatCompletion<T> {
    /// What the request owned.
    pub owned: T,
    /// Whether the operation was executed; else memory of the destination may have any bytes.
    pub result: Result<(), IoatError>,
}

/// Why a request was not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoatError {
    /// It has no bytes, more than the ring takes, or an end that overflows.
    #[error("an operation on {bytes} bytes is invalid")]
    Length {
        /// As requested.
        bytes: u64,
    },
    /// The engine has no fills.
    #[error("the engine cannot fill")]
    Unsupported,
    /// The engine has halted at it.
    #[error("the engine has halted: {0}")]
    Halted(ChannelErrors),
    /// The channel was reset before it.
    #[error("the channel was reset")]
    Aborted,
    /// The channel can no longer be used.
    #[error("the channel has failed: {0}")]
    Failed(IoatFailure),
}

/// Why a channel can no longer be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoatFailure {
    /// The version of the registers.
    #[error("version {}.{} is none of 3.x", .0 >> 4, .0 & 15)]
    Version(u8),
    /// The most bytes of a descriptor.
    #[error("a transfer capacity of 2^{0} bytes is invalid")]
    TransferCapacity(u8),
    /// The ring is none of 4 to [`RING_ENTRIES_MAX`](crate::RING_ENTRIES_MAX) entries, a power of two.
    #[error("a ring of {0} entries is invalid")]
    Ring(u32),
    /// The engine does not stop.
    #[error("the channel is not suspended in time")]
    SuspendTimeout,
    /// The engine does not reset.
    #[error("the channel is not reset in time")]
    ResetTimeout,
    /// The engine does not execute the first descriptor.
    #[error("the channel does not start in time")]
    StartTimeout,
    /// It halts at the first descriptor.
    #[error("the channel has halted when it started: {0}")]
    Start(ChannelErrors),
    /// It reports a descriptor that it does not have.
    #[error("the engine reports descriptor {0:#x}, which it was not given")]
    Completion(u64),
    /// The times in a row that it has halted, or has completed nothing in time.
    #[error("the channel has halted or completed nothing {0} times in a row")]
    Faults(u32),
    /// It reports a state that there is not: it may be gone.
    #[error("the channel is in state {0}: the engine is gone, or broken")]
    State(u8),
}
