//! The target as a module of the control plane, and what is said of errors of its methods.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use bdev::Registry;
use control::{Keyring, RpcError};
use reactor::ReactorHandle;

use crate::NvmfTarget;
use crate::published::PublishedTarget;

/// The name of the target that always exists.
pub(crate) const DEFAULT_TARGET: &str = "nvmf_tgt";

/// Targets that are created in the life of a process at most. The poll groups of a target's transports stay
/// on their reactors when it is deleted, without connections, and are polled there.
const CREATED_TARGETS_MAX: u32 = 64;

/// The NVMe-oF targets as a [`Module`](control::Module): one that always exists, and those that
/// `nvmf_create_target` has created. They have nothing in common but reactors, block devices and keys.
pub struct NvmfModule {
    pub(crate) default: Arc<LimitedTarget>,
    others: Mutex<BTreeMap<String, Arc<LimitedTarget>>>,
    created: AtomicU32,
    registry: Registry,
    reactors: Vec<ReactorHandle>,
    /// Where the keys of hosts are.
    pub(crate) keyring: Keyring,
    /// What multicast DNS publishes.
    pub(crate) mdns: Mutex<Option<PublishedTarget<LimitedTarget>>>,
}

/// A target, with a limit that only methods know.
pub(crate) struct LimitedTarget {
    pub(crate) target: NvmfTarget,
    /// Most subsystems, the discovery subsystem not counted; 0 is no limit.
    pub(crate) subsystems_max: AtomicU32,
}

impl LimitedTarget {
    fn new(target: NvmfTarget, subsystems_max: u32) -> Arc<LimitedTarget> {
        Arc::new(LimitedTarget { target, subsystems_max: AtomicU32::new(subsystems_max) })
    }

    /// Most subsystems; 0 is no limit.
    pub(crate) fn subsystems_max(&self) -> u32 {
        self.subsystems_max.load(Ordering::Relaxed)
    }
}

impl NvmfModule {
    /// A target without subsystems on `reactors`, for the devices of `registry`, with keys from this keyring.
    pub fn new(registry: Registry, reactors: &[ReactorHandle], keyring: Keyring) -> Arc<NvmfModule> {
        Arc::new(NvmfModule {
            default: LimitedTarget::new(NvmfTarget::new(registry.clone(), reactors), 0),
            others: Mutex::default(),
            created: AtomicU32::new(0),
            registry,
            reactors: reactors.to_vec(),
            keyring,
            mdns: Mutex::default(),
        })
    }

    /// The target that always exists.
    pub fn target(&self) -> &NvmfTarget {
        &self.default.target
    }

    /// The target with a name; without, the one that always exists.
    ///
    /// # Errors
    /// There is none; with SPDK's code.
    pub(crate) fn named(&self, name: Option<&str>) -> Result<Arc<LimitedTarget>, RpcError> {
        let Some(name) = name.filter(|name| *name != DEFAULT_TARGET) else { return Ok(self.default.clone()) };
        let found = sync::lock(&self.others).get(name).cloned();
        found.ok_or_else(|| {
            let message = format!("there is no target {name}; nvmf_get_targets lists them");
            RpcError::new(RpcError::INTERNAL, message)
        })
    }

    /// All targets with their names, the default one first as `None`, then by name.
    pub(crate) fn all(&self) -> Vec<(Option<String>, Arc<LimitedTarget>)> {
        let others = sync::lock(&self.others);
        let named = others.iter().map(|(name, target)| (Some(name.clone()), target.clone()));
        std::iter::once((None, self.default.clone())).chain(named).collect()
    }

    /// Creates a target, with the reactors and the options of authentication that the one has which always
    /// exists.
    ///
    /// # Errors
    /// The name is not suitable, or there are too many.
    pub(crate) fn create(&self, name: &str, subsystems_max: u32) -> Result<Arc<LimitedTarget>, RpcError> {
        let is_valid = (1..=255).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_valid {
            let message = format!("name '{name}' is not 1 to 255 printable ASCII characters without spaces");
            return Err(RpcError::invalid_params(message));
        }
        let mut others = sync::lock(&self.others);
        if name == DEFAULT_TARGET || others.contains_key(name) {
            return Err(RpcError::invalid_params(format!("target {name} exists")));
        }
        if self.created.load(Ordering::Relaxed) == CREATED_TARGETS_MAX {
            let message =
                format!("{CREATED_TARGETS_MAX} targets were created, the most in the life of a process");
            return Err(RpcError::new(RpcError::ENOSPC, message));
        }
        let target = NvmfTarget::new(self.registry.clone(), &self.reactors);
        // What restricts hosts of one target restricts those of all.
        target.set_auth_options(self.target().auth_options())?;
        target.set_poll_groups(self.target().poll_groups_mask().as_deref())?;
        self.created.fetch_add(1, Ordering::Relaxed);
        let target = LimitedTarget::new(target, subsystems_max);
        others.insert(name.to_string(), target.clone());
        Ok(target)
    }

    /// Forgets a target.
    pub(crate) fn remove(&self, name: &str) {
        sync::lock(&self.others).remove(name);
    }
}

/// Errors of methods that change a subsystem.
pub(crate) const SUBSYSTEM: &[(i64, &str)] = &[
    (RpcError::INVALID_PARAMS, "there is no such subsystem, or it does not have what is named"),
    (RpcError::INTERNAL, "there is no such target, or it is stopping"),
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
