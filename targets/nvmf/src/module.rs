//! The target as a module of the control plane, and what is said of errors of its methods.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use bdev::Registry;
use control::{Keyring, RpcError};
use reactor::ReactorHandle;

use crate::NvmfTarget;

/// The NVMe-oF target as a [`Module`](control::Module).
pub struct NvmfModule {
    pub(crate) target: NvmfTarget,
    /// Most subsystems, the discovery subsystem not counted; 0 is no limit.
    pub(crate) subsystems_max: AtomicU32,
    /// Where the keys of hosts are.
    pub(crate) keyring: Keyring,
}

impl NvmfModule {
    /// A target without subsystems on `reactors`, for the devices of `registry`, with keys from this keyring.
    pub fn new(registry: Registry, reactors: &[ReactorHandle], keyring: Keyring) -> Arc<NvmfModule> {
        Arc::new(NvmfModule {
            target: NvmfTarget::new(registry, reactors),
            subsystems_max: AtomicU32::new(0),
            keyring,
        })
    }

    /// The target.
    pub fn target(&self) -> &NvmfTarget {
        &self.target
    }
}

/// Errors of methods that change a subsystem.
pub(crate) const SUBSYSTEM: &[(i64, &str)] = &[
    (RpcError::INVALID_PARAMS, "there is no such subsystem, or it does not have what is named"),
    (RpcError::INTERNAL, "the target is stopping"),
    UNRESPONSIVE,
    PENDING,
];
/// Errors of every method that needs all reactors.
pub(crate) const UNRESPONSIVE: (i64, &str) =
    (RpcError::ETIMEDOUT, "a reactor does not respond; nothing was changed");
pub(crate) const PENDING: (i64, &str) = (
    RpcError::EINPROGRESS,
    "the change is made, but a reactor that does not respond applies it later, or I/O in flight uses a bdev still",
);
