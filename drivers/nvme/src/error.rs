//! What can go wrong between a host and a controller.

use std::io::ErrorKind;

use ring::Status;
use wire_nvme::DecodeError;
use wire_nvme::tcp::{Fatal, PduType};

/// Why a connection is over.
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
}

/// Why a namespace could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No socket.
    #[error("cannot connect to {0}: {1}")]
    Connect(std::net::SocketAddr, std::io::Error),
    /// The connection ended on the way.
    #[error("{0}")]
    Failure(#[from] Failure),
    /// A command failed.
    #[error("{0} failed: {1}")]
    Command(&'static str, Status),
    /// The controller answered with nonsense.
    #[error("the controller's answer to {0} makes no sense: {1}")]
    Answer(&'static str, DecodeError),
    /// There is no such namespace.
    #[error("the subsystem has no namespace {0}")]
    NoNamespace(u32),
    /// The namespace cannot be used.
    #[error("namespace {0} has a format that is not supported: {1}")]
    Format(u32, &'static str),
    /// Out of buffers.
    #[error("no buffer memory is left; raise the limit")]
    NoMemory,
    /// The controller took too long.
    #[error("the controller did not answer {0} in time")]
    Timeout(&'static str),
}
