//! The module and what its methods share.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard};

use bdev::rpc::BdevModule;
use control::json::{Map, Value, json};
use control::{CallRecorder, Keyring, RpcError};
use reactor::ReactorHandle;

use super::hotplug::SetHotplug;
use super::options::NvmeOptions;
use crate::mdns_discovery::MdnsSearches;
use crate::{Hotplug, Initiator, TransportId};

/// NVMe controllers as a [`Module`](control::Module): methods to attach, inspect and control them.
pub struct NvmeModule {
    pub(super) initiator: Initiator,
    pub(super) reactors: usize,
    /// Defaults for controllers attached from now on.
    pub(super) options: Arc<Mutex<NvmeOptions>>,
    pub(super) hotplug: Hotplug,
    /// The last call that set it.
    pub(super) hotplug_call: Mutex<Option<Arc<SetHotplug>>>,
    pub(super) saved: SavedKinds,
    pub(super) mdns: MdnsSearches,
    /// Where the keys of hosts and controllers are.
    pub(super) keyring: Keyring,
}

/// Recorders of the calls that `save_config` writes, in the subsystem `bdev`.
pub(super) struct SavedKinds {
    pub(super) options: CallRecorder,
    pub(super) paths: CallRecorder,
    pub(super) discoveries: CallRecorder,
    pub(super) mdns: CallRecorder,
}

impl NvmeModule {
    /// Attaches controllers on `reactors`, with keys from this keyring, and registers their namespaces with
    /// the devices of `bdevs`.
    pub fn new(bdevs: &BdevModule, reactors: &[ReactorHandle], keyring: Keyring) -> Arc<NvmeModule> {
        let initiator = Initiator::new(bdevs.registry().clone(), reactors);
        let (of_paths, of_discoveries) = (initiator.clone(), initiator.clone());
        let mdns = MdnsSearches::default();
        let of_mdns = mdns.clone();
        let saved = SavedKinds {
            options: bdevs.saved_calls().recorder(|_| true),
            paths: bdevs.saved_calls().recorder(move |key| {
                let controllers = of_paths.controllers();
                let mut paths =
                    controllers.iter().flat_map(|one| one.paths.iter().map(move |path| (one, path)));
                paths.any(|(one, path)| path_key(&one.name, &path.config.id) == key)
            }),
            mdns: bdevs
                .saved_calls()
                .recorder(move |name| of_mdns.list().iter().any(|search| search.name == name)),
            discoveries: bdevs.saved_calls().recorder(move |name| {
                of_discoveries.discoveries().iter().any(|discovery| discovery.name == name)
            }),
        };
        let hotplug = Hotplug::new(initiator.clone());
        Arc::new(NvmeModule {
            initiator,
            reactors: reactors.len(),
            options: Arc::default(),
            hotplug,
            hotplug_call: Mutex::default(),
            saved,
            mdns,
            keyring,
        })
    }

    /// The initiator.
    pub fn initiator(&self) -> &Initiator {
        &self.initiator
    }

    pub(super) fn options(&self) -> MutexGuard<'_, NvmeOptions> {
        sync::lock(&self.options)
    }
}

/// Names a path of a controller among the saved calls.
pub(super) fn path_key(name: &str, id: &TransportId) -> String {
    format!("{name} {}", id.0.controller())
}

pub(super) const NO_CONTROLLER: (i64, &str) = (RpcError::ENODEV, "there is no such controller");
pub(super) const NO_BDEV: (i64, &str) = (RpcError::ENODEV, "there is no such bdev");

/// A transport ID as SPDK's `trid` object.
pub(super) fn trid(id: &TransportId) -> Map<String, Value> {
    let mut object = Map::new();
    object.insert("trtype".into(), json!(id.trtype()));
    if let Some((adrfam, _)) = id.service() {
        object.insert("adrfam".into(), json!(adrfam));
    }
    object.insert("traddr".into(), json!(id.traddr()));
    if let Some((_, trsvcid)) = id.service() {
        object.insert("trsvcid".into(), json!(trsvcid));
    }
    if let Some(subnqn) = id.subnqn() {
        object.insert("subnqn".into(), json!(subnqn));
    }
    object
}

/// An address as it is compared: IP addresses in one spelling, `localhost` as the loopback address that it is
/// (RFC 6761, section 6.3), other names in lower case, directories without a slash at the end.
pub(super) fn canonical_address(traddr: &str) -> String {
    match nvme::TcpUri::host_of(traddr) {
        Some(host) if host.eq_ignore_ascii_case("localhost") => Ipv4Addr::LOCALHOST.to_string(),
        _ if traddr.starts_with('/') => format!("/{}", traddr.trim_matches('/')),
        host => host.unwrap_or_else(|| traddr.to_string()).to_ascii_lowercase(),
    }
}
