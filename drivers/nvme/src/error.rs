//! Error types: controller failures, errors of opening and of admin commands.

use std::io::ErrorKind;

use block_io::{FabricsStatus, Status};
use tls::TlsFailure;
use wire_nvme::DecodeError;
use wire_nvme::tcp::{FatalError, PduType};

use crate::device::DeviceError;
use crate::uri::UriError;

/// Why a controller can no longer be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControllerFailure {
    /// The controller closed the TCP connection.
    #[error("the controller closed the connection")]
    Closed,
    /// A socket error.
    #[error("the connection failed: {0}")]
    Network(ErrorKind),
    /// A step of TLS failed, or a record was not authentic.
    #[error("TLS failed: {0}")]
    Tls(TlsFailure),
    /// The controller closed the connection during the handshake of TLS.
    #[error(
        "the controller closed the connection during the TLS handshake: it has no key with this identity (see \
         psk_derivation), or the port has no TLS"
    )]
    TlsClosed,
    /// The controller sent an invalid PDU.
    #[error("the controller violated the protocol: {0}")]
    Protocol(FatalError),
    /// The controller sent C2HTermReq: it reports a protocol error of the host.
    #[error("the controller terminated the connection: {0}")]
    Terminated(FatalError),
    /// A PDU that only hosts send, or that is not valid in the present state.
    #[error("the controller sent an unexpected {0:?} PDU")]
    Unexpected(PduType),
    /// The device was removed.
    #[error("the device was removed")]
    Removed,
    /// The controller reports a fatal status (CSTS.CFS).
    #[error("the controller reports a fatal status")]
    Fatal,
    /// A completion queue entry that matches no command in flight.
    #[error("invalid completion on queue {qid}: {what}")]
    BadCompletion {
        /// Queue identifier; 0 is the admin queue.
        qid: u16,
        /// What is wrong with the entry.
        what: BadCompletion,
    },
    /// CAP, or the number of queues granted, is not the same after a reset.
    #[error("the controller's capabilities changed across a reset")]
    CapabilitiesChanged,
    /// CSTS.RDY did not follow CC.EN within CAP.TO.
    #[error("the controller did not become {} within {timeout_ms} ms", if *.ready { "ready" } else { "disabled" })]
    ReadyTimeout {
        /// The expected value of CSTS.RDY.
        ready: bool,
        /// Timeout from CAP.TO, in milliseconds.
        timeout_ms: u32,
    },
    /// An admin command or a Keep Alive timed out.
    #[error("an admin command timed out")]
    AdminTimeout,
    /// The controller rejected an I/O queue with this identifier after a reset, with this status.
    #[error("the controller rejected queue {0} after a reset: {1}")]
    QueueRejected(u16, Status),
    /// The response to a command, or the value of a register, is invalid.
    #[error("the controller returned an invalid response to {0}")]
    InvalidResponse(&'static str),
    /// A reset failed, or too many resets were needed.
    #[error("the controller could not be reset")]
    ResetFailed,
    /// Under the namespace's identifier there is another namespace, or one of another format or a smaller
    /// one.
    #[error("the namespace was replaced by another one")]
    Replaced,
    /// The host was given new keys, and authentication with them failed, as the log says.
    #[error("authentication with new keys failed")]
    Reauthentication,
    /// The last handle was dropped, or the owner's reactor has ended.
    #[error("the controller was detached")]
    Detached,
}

/// Why a completion queue entry is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadCompletion {
    /// The command identifier names no slot.
    #[error("command identifier {0:#x} is out of range")]
    CommandOutOfRange(u16),
    /// No command with this identifier is in flight.
    #[error("command identifier {0:#x} is not in flight")]
    NotInFlight(u16),
    /// SQHD is not within the submission queue.
    #[error("submission queue head {0} is outside of the queue")]
    SqHeadOutOfRange(u16),
    /// SQID names another submission queue.
    #[error("completion for submission queue {0}")]
    WrongQueue(u16),
}

/// Why a controller or namespace could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum NvmeOpenError {
    /// The TCP connection could not be established.
    #[error("cannot connect to {0}: {1}")]
    Connect(std::net::SocketAddr, std::io::Error),
    /// The URI is invalid, or its host could not be resolved.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// The controller failed meanwhile.
    #[error("{0}")]
    Failure(#[from] ControllerFailure),
    /// The device with this name could not be accessed.
    #[error("{0}: {1}")]
    Device(String, DeviceError),
    /// A command failed with this status.
    #[error("{0} failed: {1}")]
    Command(&'static str, Status),
    /// The controller rejected a Connect command.
    #[error("Connect failed: {0}")]
    ConnectRejected(FabricsStatus),
    /// The controller demands authentication, and the host has no key.
    #[error("the controller demands authentication: a dhchap_key is needed")]
    KeyRequired,
    /// The controller demands secure channel concatenation, and the host does not use it.
    #[error("the controller demands secure channel concatenation: concat is needed")]
    SecureChannelRequired,
    /// The key of TLS is not usable.
    #[error("psk {0}")]
    Psk(String),
    /// Authentication on the queue with this identifier failed.
    #[error("authentication on queue {0} failed: {1}")]
    Authentication(u16, nvme_auth::HostAuthError),
    /// The system has no random numbers, without which a host cannot authenticate.
    #[error("the system has no random numbers")]
    NoRandomness,
    /// The response to a command could not be decoded.
    #[error("the controller returned an invalid response to {0}: {1}")]
    InvalidResponse(&'static str, DecodeError),
    /// The driver does not support the controller.
    #[error("the controller is not supported: {0}")]
    Unsupported(&'static str),
    /// No active namespace has this identifier.
    #[error("the subsystem has no namespace {0}")]
    NoNamespace(u32),
    /// The format of the namespace is not supported.
    #[error("namespace {0} has a format that is not supported: {1}")]
    UnsupportedFormat(u32, &'static str),
    /// vfio-user needs an arena that can be shared with the server.
    #[error("{0} is in another process and needs shared buffers: create the arena with `shared: true`")]
    MemoryNotShared(String),
    /// All I/O queues of the controller are in use; it has this many.
    #[error("the controller has no I/O queue left; it has {0}")]
    NoFreeQueue(u32),
    /// The buffer pool is exhausted.
    #[error("no buffer memory is left; raise the limit")]
    NoMemory,
    /// The controller did not respond in time.
    #[error("the controller did not answer {0} in time")]
    Timeout(&'static str),
    /// An argument is invalid.
    #[error("{0}")]
    InvalidArgument(&'static str),
}

impl ControllerFailure {
    /// This failure of a connection that has not been established, as the reason why it could not be.
    pub(crate) fn while_connecting(self, to: std::net::SocketAddr) -> NvmeOpenError {
        match self {
            ControllerFailure::Network(kind) => NvmeOpenError::Connect(to, kind.into()),
            failure => NvmeOpenError::Failure(failure),
        }
    }
}

impl AdminError {
    /// This error of the command `what`, as the reason why a controller or namespace could not be opened.
    pub(crate) fn while_opening(self, what: &'static str) -> NvmeOpenError {
        match self {
            AdminError::Status(status) => NvmeOpenError::Command(what, status),
            AdminError::Failure(ControllerFailure::AdminTimeout) => NvmeOpenError::Timeout(what),
            AdminError::Failure(failure) => NvmeOpenError::Failure(failure),
            AdminError::InvalidResponse(error) => NvmeOpenError::InvalidResponse(what, error),
            AdminError::NoMemory => NvmeOpenError::NoMemory,
            AdminError::InvalidLength(_) => {
                NvmeOpenError::InvalidArgument("the data length must be 1 byte to 1 MiB")
            }
            // Without a limit of its own: a reset or a full queue has outlasted the command's deadline.
            AdminError::Reset | AdminError::Busy => NvmeOpenError::Timeout(what),
        }
    }
}

/// Why an admin command failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdminError {
    /// The command completed with an error status.
    #[error("{0}")]
    Status(Status),
    /// The controller has failed.
    #[error("{0}")]
    Failure(ControllerFailure),
    /// A controller reset aborted the command.
    #[error("the command was aborted by a controller reset")]
    Reset,
    /// The returned data could not be decoded.
    #[error("the controller returned invalid data: {0}")]
    InvalidResponse(DecodeError),
    /// The data length, in bytes, is 0 or more than a buffer holds.
    #[error("data length {0} is not between 1 and {max} bytes", max = dma::BUFFER_BYTES_MAX)]
    InvalidLength(usize),
    /// The buffer pool is exhausted.
    #[error("no buffer memory is left; raise the limit")]
    NoMemory,
    /// The admin queue or the owner's mailbox is full.
    #[error("too many admin commands are pending")]
    Busy,
}
