//! Errors of the control plane.

use bdev::BdevError;
use target_shell::ShellError;

use bdev::OpenReservationsError;

/// An operation of the control plane failed. The configuration is unchanged, except after
/// [`Pending`](Self::Pending).
#[derive(Debug, thiserror::Error)]
pub enum NvmfTargetError {
    /// The subsystem does not exist.
    #[error("there is no subsystem {0}")]
    NoSubsystem(String),
    /// The subsystem already exists.
    #[error("subsystem {0} exists")]
    SubsystemExists(String),
    /// Not a valid NQN of a subsystem or host.
    #[error("'{0}' is not an NVMe qualified name")]
    Nqn(String),
    /// The namespace does not exist.
    #[error("subsystem {0} has no namespace {1}")]
    NoNamespace(String, u32),
    /// Every host sees the namespace.
    #[error("every host sees namespace {1} of subsystem {0}; add it with no_auto_visible to select hosts")]
    AlwaysVisible(String, u32),
    /// The namespace already exists, its NSID is out of range, or its block device is unsuitable.
    #[error("subsystem {0} cannot have namespace {1}: {2}")]
    Namespace(String, u32, &'static str),
    /// The block device does not exist or is claimed.
    #[error(transparent)]
    Bdev(#[from] BdevError),
    /// The transport was not created.
    #[error("transport {0} was not created; call nvmf_create_transport first")]
    NoTransport(&'static str),
    /// The transport already exists.
    #[error("transport {0} exists")]
    TransportExists(&'static str),
    /// Not a supported transport type; those that are.
    #[error("transport '{0}' is not supported; {1} are")]
    Transport(String, String),
    /// Not a valid listening address.
    #[error("'{0}' is not an address to listen on")]
    Address(String),
    /// The subsystem already has this listener.
    #[error("subsystem {0} listens on {1} already")]
    ListenerExists(String, String),
    /// The transport has no TLS.
    #[error("transport {0} has no secure channel")]
    NoSecureChannel(String),
    /// Others listen on the address, and differ in whether they use TLS.
    #[error("other subsystems listen on {0} {without} a secure channel", without = if *.1 { "with" } else { "without" })]
    OtherSecurity(String, bool),
    /// The subsystem does not have this listener.
    #[error("subsystem {0} does not listen on {1}")]
    NoListener(String, String),
    /// Binding or listening failed.
    #[error("cannot listen on {0}: {1}")]
    Listen(String, std::io::Error),
    /// The host is not on the subsystem's list.
    #[error("host {0} is not on the list of subsystem {1}")]
    NoHost(String, String),
    /// The host is on the subsystem's list already.
    #[error("host {0} is on the list of subsystem {1} already")]
    HostExists(String, String),
    /// The reservations of the block device cannot be opened, or not with that file.
    #[error("ptpl_file {0}")]
    Reservations(#[from] OpenReservationsError),
    /// A parameter is out of range.
    #[error("{0}")]
    Parameter(String),
    /// The target was shut down or a reactor has stopped.
    #[error("the target is stopping")]
    Stopping,
    /// A core did not answer, or did not apply the change in time, and the change was undone.
    #[error("reactor {0} does not respond; nothing was changed")]
    Unresponsive(usize),
    /// The change is made, but a core has not applied it yet.
    #[error("the change is made, but reactor {0} does not respond and applies it when it runs again")]
    Pending(usize),
}

impl From<target_shell::TargetStopping> for NvmfTargetError {
    fn from(_: target_shell::TargetStopping) -> NvmfTargetError {
        NvmfTargetError::Stopping
    }
}

impl From<ShellError> for NvmfTargetError {
    fn from(error: ShellError) -> NvmfTargetError {
        match error {
            ShellError::Listen(address, error) => NvmfTargetError::Listen(address.to_string(), error),
            ShellError::Stopped(_) => NvmfTargetError::Stopping,
            ShellError::Unresponsive(core) => NvmfTargetError::Unresponsive(core),
        }
    }
}
