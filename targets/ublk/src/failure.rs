//! Errors of the target.

use std::io;

use target_shell::{CpuMaskError, ShellError};

/// A disk or the target could not be created, started, recovered or stopped.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    /// The device is missing or claimed.
    #[error(transparent)]
    Bdev(#[from] bdev::BdevError),
    /// A reactor does not respond.
    #[error(transparent)]
    Shell(#[from] ShellError),
    /// The CPU mask does not suit.
    #[error(transparent)]
    CpuMask(#[from] CpuMaskError),
    /// The target was created already.
    #[error("the ublk target was created already")]
    Created,
    /// There is no target.
    #[error("there is no ublk target; ublk_create_target makes it")]
    NoTarget,
    /// There is no such disk.
    #[error("there is no disk /dev/ublkb{0}")]
    NotFound(u32),
    /// The number is in use, by this target or another server.
    #[error("/dev/ublkb{0} is in use")]
    Busy(u32),
    /// A parameter or the device does not suit.
    #[error("{0}")]
    Invalid(String),
    /// There are as many disks, queues or tags as are allowed.
    #[error("{0}")]
    TooMany(String),
    /// The kernel lacks what the target needs.
    #[error("{0}")]
    Unsupported(&'static str),
    /// The process lacks a right.
    #[error("{0}")]
    NotPermitted(String),
    /// The kernel refused.
    #[error("{}", explain(.doing, .source))]
    Kernel {
        /// What failed.
        doing: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The target is stopping.
    #[error("the target is stopping")]
    Stopping,
}

impl From<target_shell::TargetStopping> for UblkError {
    fn from(_: target_shell::TargetStopping) -> UblkError {
        UblkError::Stopping
    }
}

/// The error of a kernel that refuses to do something.
pub(crate) fn kernel(doing: &'static str) -> impl Fn(io::Error) -> UblkError {
    move |source| UblkError::Kernel { doing, source }
}

fn explain(doing: &str, source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::TimedOut => format!("{doing}: the kernel does not answer; it may still do it"),
        io::ErrorKind::PermissionDenied => format!("{doing}: only root may do that (CAP_SYS_ADMIN)"),
        _ => format!("{doing}: {source}"),
    }
}
