//! Why the target does not do what it was asked.

use bdev::BdevError;

use crate::ptpl::PtplError;

/// An operation of the control plane failed; nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// There is no such subsystem.
    #[error("there is no subsystem {0}")]
    NoSubsystem(String),
    /// The subsystem is there already.
    #[error("subsystem {0} exists")]
    SubsystemExists(String),
    /// Not a name for a subsystem or host.
    #[error("'{0}' is not an NVMe qualified name")]
    Nqn(String),
    /// There is no such namespace.
    #[error("subsystem {0} has no namespace {1}")]
    NoNamespace(String, u32),
    /// The namespace is there already, or its identifier is out of range.
    #[error("subsystem {0} cannot have namespace {1}: {2}")]
    Namespace(String, u32, &'static str),
    /// The block device cannot be used.
    #[error(transparent)]
    Bdev(#[from] BdevError),
    /// No transport was created.
    #[error("transport {0} was not created; call nvmf_create_transport first")]
    NoTransport(&'static str),
    /// There is a transport.
    #[error("transport {0} exists")]
    TransportExists(&'static str),
    /// A transport that we do not have.
    #[error("transport '{0}' is not supported; TCP and VFIOUSER are")]
    Transport(String),
    /// Not an address.
    #[error("'{0}' is not an address to listen on")]
    Address(String),
    /// The listener is there already.
    #[error("subsystem {0} listens on {1} already")]
    ListenerExists(String, String),
    /// There is no such listener.
    #[error("subsystem {0} does not listen on {1}")]
    NoListener(String, String),
    /// The kernel does not let us.
    #[error("cannot listen on {0}: {1}")]
    Listen(String, std::io::Error),
    /// There is no such host.
    #[error("host {0} is not on the list of subsystem {1}")]
    NoHost(String, String),
    /// The host is there already.
    #[error("host {0} is on the list of subsystem {1} already")]
    HostExists(String, String),
    /// The file that reservations are kept in cannot be used.
    #[error("ptpl_file {0}")]
    Ptpl(#[from] PtplError),
    /// A parameter is out of range.
    #[error("{0}")]
    Parameter(String),
    /// A reactor has stopped.
    #[error("the target is stopping")]
    Stopping,
}
