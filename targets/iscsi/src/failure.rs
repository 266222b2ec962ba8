//! Errors of the target, and violations of the protocol.

use target_shell::{NotApplied, ShellError};
use wire_iscsi::{DecodeError, LoginStatus};

/// A change of the target could not be made.
#[derive(Debug, thiserror::Error)]
pub enum IscsiTargetError {
    /// The device is missing or claimed.
    #[error(transparent)]
    Bdev(#[from] bdev::BdevError),
    /// The reservations of the device cannot be opened.
    #[error(transparent)]
    Reservations(#[from] bdev::OpenReservationsError),
    /// Listening failed, or a reactor does not respond.
    #[error(transparent)]
    Shell(#[from] ShellError),
    /// A reactor has not applied the change, which is undone.
    #[error("{0}; nothing was changed")]
    NotApplied(NotApplied),
    /// There is an object of this name or tag.
    #[error("{0} exists")]
    Exists(String),
    /// There is none.
    #[error("there is no {0}")]
    NotFound(String),
    /// There are as many as the target has.
    #[error("there are {0} already")]
    TooMany(usize),
    /// A parameter is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The target is stopping.
    #[error("the target is stopping")]
    Stopping,
}

impl From<target_shell::TargetStopping> for IscsiTargetError {
    fn from(_: target_shell::TargetStopping) -> IscsiTargetError {
        IscsiTargetError::Stopping
    }
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IscsiViolation {
    /// The peer sent what is not iSCSI.
    #[error("{0}")]
    Malformed(#[from] DecodeError),
    /// The data of a PDU is longer than the target accepts.
    #[error("a PDU has {0} bytes of data")]
    DataLength(u32),
    /// A header digest does not match.
    #[error("a header digest does not match")]
    HeaderDigest,
    /// A command number is missing.
    #[error("command {expected} is missing before {got}")]
    CommandMissing {
        /// The next in order.
        expected: u32,
        /// What came instead.
        got: u32,
    },
    /// Something else than a login request came before the end of the login.
    #[error("there was no login")]
    NoLogin,
    /// The login has failed.
    #[error("the login has failed: {0:?}")]
    LoginFailed(LoginStatus),
    /// The login took too long.
    #[error("the login was not completed in time")]
    LoginTimeout,
    /// The peer does not answer a NOP-In.
    #[error("the initiator did not answer a NOP-In in time")]
    Silent,
}
