//! What can go wrong between a host and a controller.

use std::io::ErrorKind;

use ring::Status;
use wire_nvme::DecodeError;
use wire_nvme::tcp::{Fatal, PduType};

use crate::device::DeviceError;
use crate::uri::UriError;

/// Why a controller can no longer be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The controller closed it.
    #[error("the controller closed the connection")]
    Closed,
    /// The network failed.
    #[error("the connection failed: {0}")]
    Network(ErrorKind),
    /// The controller sent what it may not.
    #[error("the controller broke the protocol: {0}")]
    Protocol(Fatal),
    /// The controller says that we did.
    #[error("the controller terminated the connection: {0}")]
    Terminated(Fatal),
    /// A PDU of a kind that only hosts send, or out of turn.
    #[error("the controller sent a {0:?} PDU out of turn")]
    Unexpected(PduType),
    /// The device was pulled out.
    #[error("the device was removed")]
    Removed,
    /// The controller says that it cannot go on (CSTS.CFS).
    #[error("the controller reports a fatal status")]
    Fatal,
    /// A completion queue entry that answers nothing that was asked.
    #[error("the controller broke queue {qid}: {what}")]
    Queue {
        /// The queue; 0 is the admin queue.
        qid: u16,
        /// What was wrong.
        what: BadCompletion,
    },
    /// CAP is not what it was before the reset.
    #[error("the controller's capabilities changed over a reset")]
    CapabilitiesChanged,
    /// CSTS.RDY did not follow CC.EN within CAP.TO.
    #[error("the controller did not become {} within {timeout_ms} ms", if *.ready { "ready" } else { "disabled" })]
    Unready {
        /// What was waited for.
        ready: bool,
        /// How long.
        timeout_ms: u32,
    },
    /// An admin command was not answered.
    #[error("the controller left an admin command unanswered")]
    AdminTimeout,
    /// An I/O queue could not be created anew after a reset.
    #[error("the controller refused queue {0} after a reset: {1}")]
    QueueRefused(u16, Status),
    /// The controller's answer to a command makes no sense.
    #[error("the controller's answer to {0} makes no sense")]
    Answer(&'static str),
    /// A reset was asked for too often, or failed otherwise.
    #[error("the controller could not be reset")]
    ResetFailed,
    /// It was let go.
    #[error("the controller was detached")]
    Detached,
}

/// What is wrong with a completion queue entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadCompletion {
    /// The command identifier is above any that is used.
    #[error("command identifier {0:#x} is out of range")]
    CommandOutOfRange(u16),
    /// No such command is in flight.
    #[error("command identifier {0:#x} is not in flight")]
    NotInFlight(u16),
    /// The head is not in the submission queue.
    #[error("submission queue head {0} is outside of the queue")]
    Head(u16),
    /// The entry is for another queue's command.
    #[error("an entry for submission queue {0}")]
    WrongQueue(u16),
}

/// Why a namespace could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No socket.
    #[error("cannot connect to {0}: {1}")]
    Connect(std::net::SocketAddr, std::io::Error),
    /// The name of the host.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// The connection ended on the way.
    #[error("{0}")]
    Failure(#[from] Failure),
    /// The device could not be reached.
    #[error("{0}: {1}")]
    Device(String, DeviceError),
    /// A command failed.
    #[error("{0} failed: {1}")]
    Command(&'static str, Status),
    /// The controller answered with nonsense.
    #[error("the controller's answer to {0} makes no sense: {1}")]
    Answer(&'static str, DecodeError),
    /// The controller is not one that this driver drives.
    #[error("the controller cannot be used: {0}")]
    Unsupported(&'static str),
    /// There is no such namespace.
    #[error("the subsystem has no namespace {0}")]
    NoNamespace(u32),
    /// The namespace cannot be used.
    #[error("namespace {0} has a format that is not supported: {1}")]
    Format(u32, &'static str),
    /// Another process has to see our buffers.
    #[error("{0} is another process, which must see our buffers: make the arena with `shared: true`")]
    NotShared(String),
    /// Out of I/O queues.
    #[error("the controller has no I/O queue left; it has {0}")]
    NoQueue(u32),
    /// Out of buffers.
    #[error("no buffer memory is left; raise the limit")]
    NoMemory,
    /// The controller took too long.
    #[error("the controller did not answer {0} in time")]
    Timeout(&'static str),
    /// What was asked cannot be asked.
    #[error("{0}")]
    Invalid(&'static str),
}

/// Why an admin command has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdminError {
    /// The controller answered that it failed.
    #[error("{0}")]
    Status(Status),
    /// The controller is not there any more, or was reset meanwhile.
    #[error("{0}")]
    Failure(Failure),
    /// The controller was reset before it answered.
    #[error("the controller was reset before it answered")]
    Reset,
    /// The answer cannot be understood.
    #[error("the answer makes no sense: {0}")]
    Answer(DecodeError),
    /// More data than a buffer holds, or none where some is needed.
    #[error("{0} bytes of data are not 1 to {max}", max = memory::BUFFER_BYTES_MAX)]
    Length(usize),
    /// Out of buffers.
    #[error("no buffer memory is left; raise the limit")]
    NoMemory,
    /// Too much is being asked at once.
    #[error("too many admin commands are waiting")]
    Busy,
}
