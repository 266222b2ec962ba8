//! Errors of the target, and violations of the protocol.

use std::path::PathBuf;

use secret::SecretFileError;
use target_shell::{NotApplied, ShellError};
use tls::{CertificateError, TlsFailure};
use wire_nbd::DecodeError;

/// An export could not be created, deleted or found.
#[derive(Debug, thiserror::Error)]
pub enum NbdTargetError {
    /// The device is missing or claimed.
    #[error(transparent)]
    Bdev(#[from] bdev::BdevError),
    /// Listening failed, or a reactor does not respond.
    #[error(transparent)]
    Shell(#[from] ShellError),
    /// A reactor has not applied the change, which is undone.
    #[error("{0}; nothing was changed")]
    NotApplied(NotApplied),
    /// There is an export of this name.
    #[error("the export {0} exists")]
    Exists(String),
    /// There is no export of this name.
    #[error("there is no export {0}")]
    NotFound(String),
    /// There are as many exports as the target has.
    #[error("there are {0} exports already")]
    TooMany(usize),
    /// A name, description or address is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The keys or certificates for TLS cannot be read.
    #[error(transparent)]
    TlsKeys(#[from] TlsKeysError),
    /// The target is stopping.
    #[error("the target is stopping")]
    Stopping,
}

impl From<target_shell::TargetStopping> for NbdTargetError {
    fn from(_: target_shell::TargetStopping) -> NbdTargetError {
        NbdTargetError::Stopping
    }
}

/// The keys or certificates for TLS cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TlsKeysError {
    /// The certificate or its key.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// The file of keys is refused.
    #[error("{}: {error}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        error: SecretFileError,
    },
    /// A line of it is not a key.
    #[error("{}, line {line}: {reason}", .path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Why.
        reason: &'static str,
    },
    /// The parameters do not fit together.
    #[error("{0}")]
    Parameters(&'static str),
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NbdViolation {
    /// The peer sent what is not NBD, or unknown client flags.
    #[error("{0}")]
    Malformed(#[from] DecodeError),
    /// The data of an option is too long to be skipped.
    #[error("an option has {0} bytes of data")]
    OptionLength(u32),
    /// Too many options without entering the transmission phase.
    #[error("there were {0} options without an export")]
    TooManyOptions(u32),
    /// `EXPORT_NAME` names no export, and has no reply for that.
    #[error("there is no export of the name that EXPORT_NAME selects")]
    NoExport,
    /// The payload of a request is too long to be skipped.
    #[error("a request has {0} bytes of payload")]
    PayloadLength(u64),
    /// `EXPORT_NAME` names an export for clients with TLS.
    #[error("the export that EXPORT_NAME selects is for clients with TLS")]
    TlsRequired,
    /// There were bytes between STARTTLS and its answer.
    #[error("there are bytes after STARTTLS that are not TLS")]
    BytesBeforeTls,
    /// TLS failed.
    #[error("TLS failed: {0}")]
    Tls(TlsFailure),
    /// The client closed the connection instead of completing TLS.
    #[error("the client closed the connection during the TLS handshake")]
    TlsClosed,
    /// The handshake of TLS took too long.
    #[error("the TLS handshake was not completed in time")]
    TlsTimeout,
    /// The handshake took too long.
    #[error("the handshake was not completed in time")]
    HandshakeTimeout,
}
