//! The module of the target for the control plane: SPDK's `nvmf_*` methods.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bdev::rpc::conclude;
use bdev::{Closing, Uuid};
use control::json::{Value, json};
use control::{BalancedTarget, Method, Metric, MetricSamples, Module, Parameters, RpcError};
use target_shell::ConnectionTotals;

use crate::module::{PENDING, SUBSYSTEM, UNRESPONSIVE};
use crate::transports::TRANSPORTS;
use crate::{NamespaceConfig, NvmfTarget, NvmfTargetError, SubsystemConfig};

mod authentication;
mod info;
mod listeners;
mod mdns;
mod options;
mod parameters;
mod referrals;
mod targets;
mod transports;
mod visibility;

pub use crate::module::NvmfModule;

use parameters::{ByNqn, Identifier, TargetName};

impl Module for NvmfModule {
    const NAME: &'static str = "nvmf";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<NvmfModule>> {
        let change = |method: Method<NvmfModule>, text| method.text(text, "true").errors(SUBSYSTEM);
        let mut methods = vec![
            Method::update("nvmf_set_max_subsystems", set_max_subsystems)
                .at_any_stage()
                .text("Limits the number of subsystems. There is no limit before.", "true")
                .errors(&[(RpcError::EBUSY, "there are more subsystems already")]),
            Method::update("nvmf_create_transport", transports::create_transport)
                .text("Makes a transport available to listeners.", "true")
                .errors(&[(RpcError::INTERNAL, "it exists"), UNRESPONSIVE, PENDING]),
            Method::update("nvmf_create_subsystem", create_subsystem)
                .text("Creates a subsystem.", "true")
                .canonical(|_: &NvmfModule, params: &mut CreateSubsystem| params.set_defaults())
                .errors(&[
                    (RpcError::INTERNAL, "it exists, or the target is stopping"),
                    (RpcError::ENOSPC, "there are as many as max_subsystems of the target allows"),
                    UNRESPONSIVE,
                ]),
            change(
                Method::concluded_update("nvmf_delete_subsystem", delete_subsystem, conclude),
                "Deletes a subsystem and disconnects its hosts. Commands in flight complete first.",
            ),
            Method::prepared_update("nvmf_subsystem_add_ns", prepare_ns, add_ns)
                .text("Adds a bdev as a namespace.", "the NSID")
                .assigns(&["namespace.nsid", "namespace.uuid", "namespace.nguid", "namespace.anagrpid"])
                .canonical(canonical_ns)
                .errors(SUBSYSTEM),
            change(
                Method::concluded_update("nvmf_subsystem_remove_ns", remove_ns, conclude),
                "Removes a namespace. Commands in flight complete first; then its bdev is free for others.",
            ),
            Method::update("nvmf_subsystem_add_listener", listeners::add_listener)
                .text("Listens for hosts at an address.", "true")
                .assigns(&["listen_address.trsvcid=\"0\""])
                .canonical(listeners::canonical_listener)
                .errors(&[
                    (RpcError::INVALID_PARAMS, "there is no such subsystem or transport"),
                    (RpcError::INTERNAL, "the address cannot be listened at, or the target is stopping"),
                    UNRESPONSIVE,
                ]),
            change(
                Method::update("nvmf_subsystem_remove_listener", listeners::remove_listener),
                "Ends a listener and disconnects its hosts.",
            ),
            change(
                Method::update("nvmf_subsystem_listener_set_ana_state", listeners::set_ana_state),
                "Sets the ANA state that hosts see through a listener.",
            )
            .canonical(listeners::canonical_ana_state),
            change(
                Method::update("nvmf_subsystem_set_ns_ana_group", listeners::set_ns_ana_group),
                "Moves a namespace to another ANA group of a subsystem that reports ANA.",
            ),
            change(
                Method::update("nvmf_subsystem_remove_host", remove_host),
                "Disallows a host, and disconnects it.",
            ),
            change(
                Method::update("nvmf_subsystem_allow_any_host", allow_any_host),
                "Allows any host to connect, or only those that were added.",
            ),
        ];
        methods.extend(authentication::methods());
        methods.extend(options::methods());
        methods.extend(targets::methods());
        methods.extend(visibility::methods());
        methods.extend(referrals::methods());
        methods.extend(mdns::methods());
        methods.extend(info::methods());
        methods.extend(TRANSPORTS.iter().flat_map(|kind| kind.methods()));
        methods
    }

    /// Disconnects the hosts, each after its commands in flight have completed, and rejects further changes.
    fn drain(&self) {
        self.stop_mdns();
        for (_, one) in self.all() {
            if let Err(error) = one.target.disconnect_all() {
                log::warn!(target: "nvmf", "connections are left at the end: {error}");
            }
            one.target.shutdown();
        }
    }

    fn save(&self) -> Vec<Value> {
        let max_subsystems = self.default.subsystems_max();
        let limit = (max_subsystems != 0).then(|| {
            let params = MaxSubsystems { max_subsystems }.to_object();
            json!({ "method": "nvmf_set_max_subsystems", "params": params })
        });
        let default =
            limit.into_iter().chain(options::calls(self.target())).chain(info::calls(self.target()));
        default.chain(targets::calls(self)).chain(self.mdns_call()).collect()
    }

    fn metrics() -> Vec<&'static Metric> {
        target_shell::connection_metrics()
    }

    fn collect(&self, samples: &mut MetricSamples) {
        // The sums over all targets: a target has no label.
        let mut sums: BTreeMap<&str, ConnectionTotals> = BTreeMap::new();
        for (_, one) in self.all() {
            for (transport, totals) in one.target.connection_totals() {
                *sums.entry(transport).or_default() += totals;
            }
        }
        for (transport, totals) in sums {
            target_shell::collect_connections(transport, totals, samples);
        }
    }

    fn balanced(&self) -> Vec<Arc<dyn BalancedTarget>> {
        self.all().iter().flat_map(|(_, one)| one.target.balanced()).collect()
    }

    fn report(&self) -> Value {
        let all = self.all();
        let subsystems: Vec<_> = all.iter().flat_map(|(_, one)| one.target.subsystems()).collect();
        let listeners: usize = subsystems.iter().map(|one| one.listeners.len()).sum();
        let namespaces: usize = subsystems.iter().map(|one| one.namespaces.len()).sum();
        json!({ "subsystems": subsystems.len(), "namespaces": namespaces, "listeners": listeners })
    }
}

impl From<NvmfTargetError> for RpcError {
    fn from(error: NvmfTargetError) -> RpcError {
        let code = match &error {
            NvmfTargetError::SubsystemExists(_)
            | NvmfTargetError::TransportExists(_)
            | NvmfTargetError::Listen(..)
            | NvmfTargetError::Stopping => RpcError::INTERNAL,
            NvmfTargetError::Unresponsive(_) => RpcError::ETIMEDOUT,
            NvmfTargetError::Pending(_) => RpcError::EINPROGRESS,
            _ => RpcError::INVALID_PARAMS,
        };
        RpcError::new(code, error.to_string())
    }
}

control::parameters! {
    struct MaxSubsystems {
        /// Most subsystems, the discovery subsystem not counted; 0 is no limit
        max_subsystems: u32,
    }
}

fn set_max_subsystems(module: &NvmfModule, params: MaxSubsystems) -> Result<bool, RpcError> {
    let count = module.target().subsystem_count();
    if params.max_subsystems != 0 && count > params.max_subsystems as usize {
        let message = format!("max_subsystems: there are {count} subsystems already");
        return Err(RpcError::new(RpcError::EBUSY, message));
    }
    module.default.subsystems_max.store(params.max_subsystems, Ordering::Relaxed);
    Ok(true)
}

control::parameters! {
    struct CreateSubsystem {
        /// NQN
        nqn: String,
        tgt_name: TargetName,
        /// Let any host connect
        allow_any_host: bool = false,
        /// Serial number
        serial_number: Option<String>,
        /// Model number
        model_number: Option<String>,
        /// Namespaces at most; 0 is the default
        max_namespaces: u32 = 0,
        /// Lowest controller identifier
        min_cntlid: Option<u16>,
        /// Highest controller identifier
        max_cntlid: Option<u16>,
        /// Report ANA states
        ana_reporting: bool = false,
        /// Range of Dataset Management at most (DMRSL): longer ones fail with Command Size Limit Exceeded. 0
        /// is no limit
        dmrsl: u32 ["blocks"] = 0,
        /// Write Zeroes at most, as a power of two of 4 KiB (WZSL): longer ones fail with Invalid Field in
        /// Command. 0 is no limit
        wzsl: u8 = 0,
        /// Older form of `dmrsl`, for blocks of 512 bytes
        max_discard_size_kib: u64 ["KiB"] = 0,
        /// Older form of `wzsl`, rounded down to a power of two; less than 8 is no limit
        max_write_zeroes_size_kib: u64 ["KiB"] = 0,
        /// Let a host reset all controllers of the subsystem (NSSR)
        enable_nssr: bool = false,
        /// Text for the administrator, 4 to 256 ASCII characters, in extended entries of the discovery log
        admin_label: Option<String>,
    }
    only("commands are executed by the target, and not passed to NVMe devices below") {
        passthrough: bool = false
    }
}

impl CreateSubsystem {
    /// Fills in what is absent; 0 namespaces are the default, as in SPDK. Limits get the names that they have
    /// since SPDK 26.09; its 26.01 saves the older ones always.
    fn set_defaults(&mut self) -> Result<(), RpcError> {
        let default = SubsystemConfig::default();
        self.serial_number.get_or_insert(default.serial_number);
        self.model_number.get_or_insert(default.model_number);
        self.min_cntlid.get_or_insert(default.min_cntlid);
        self.max_cntlid.get_or_insert(default.max_cntlid);
        if self.max_namespaces == 0 {
            self.max_namespaces = default.max_namespaces;
        }
        self.admin_label = self.admin_label.take().filter(|label| !label.is_empty());
        let discard_kib = std::mem::take(&mut self.max_discard_size_kib);
        if discard_kib != 0 && self.dmrsl == 0 {
            let blocks = discard_kib.checked_mul(2).and_then(|blocks| u32::try_from(blocks).ok());
            self.dmrsl = blocks.ok_or_else(|| {
                RpcError::invalid_params(format!("max_discard_size_kib: {discard_kib} is 2^31 or more"))
            })?;
        }
        let pages = std::mem::take(&mut self.max_write_zeroes_size_kib) / 4;
        if pages > 1 && self.wzsl == 0 {
            self.wzsl = pages.ilog2() as u8;
        }
        Ok(())
    }
}

fn create_subsystem(module: &NvmfModule, mut params: CreateSubsystem) -> Result<bool, RpcError> {
    let limited = params.tgt_name.limited(module)?;
    let max = limited.subsystems_max();
    if max != 0 && limited.target.subsystem_count() >= max as usize {
        let message = format!("there are {max} subsystems, as many as max_subsystems of the target allows");
        return Err(RpcError::new(RpcError::ENOSPC, message));
    }
    params.set_defaults()?;
    let default = SubsystemConfig::default();
    let config = SubsystemConfig {
        serial_number: params.serial_number.unwrap_or(default.serial_number),
        model_number: params.model_number.unwrap_or(default.model_number),
        allow_any_host: params.allow_any_host,
        max_namespaces: params.max_namespaces,
        min_cntlid: params.min_cntlid.unwrap_or(default.min_cntlid),
        max_cntlid: params.max_cntlid.unwrap_or(default.max_cntlid),
        ana_reporting: params.ana_reporting,
        dmrsl: params.dmrsl,
        wzsl: params.wzsl,
        enable_nssr: params.enable_nssr,
        admin_label: params.admin_label,
    };
    limited.target.create_subsystem(&params.nqn, config)?;
    Ok(true)
}

fn delete_subsystem(module: &NvmfModule, params: ByNqn) -> Result<Closing, RpcError> {
    let closing = params.tgt_name.find(module)?.delete_subsystem(&params.nqn)?;
    module.update_mdns();
    Ok(closing)
}

/// A namespace to add to a subsystem of a target, with the reservations of its device if they are in a file.
type PreparedNamespace = (NvmfTarget, String, NamespaceConfig, bdev::PreparedReservations);

control::parameters! {
    struct AddNs {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// The namespace
        namespace: NamespaceParameters,
    }
}

control::parameters! {
    struct NamespaceParameters {
        /// NSID; 0 is the first that is free
        nsid: u32 = 0,
        /// Bdev
        bdev_name: String,
        /// NGUID; without, made from the UUID
        nguid: Option<Identifier<16>>,
        /// EUI-64
        eui64: Option<Identifier<8>>,
        /// UUID; without, that of the bdev
        uuid: Option<Uuid>,
        /// File that keeps reservations over a power loss
        ptpl_file: Option<String>,
        /// ANA group; 0 is the NSID
        anagrpid: u32 = 0,
        /// Hosts see it only after `nvmf_ns_add_host`
        no_auto_visible: bool = false,
        /// Hosts do not see the protection information of the bdev, which generates, checks and strips it. It
        /// is all of the metadata
        hide_metadata: bool = false,
    }
}

fn canonical_ns(module: &NvmfModule, params: &mut AddNs) -> Result<(), RpcError> {
    // A target that does not exist yet hides no metadata unless it is asked to.
    let target = params.tgt_name.find(module);
    let namespace = &mut params.namespace;
    namespace.bdev_name = module.target().bdev_name(&namespace.bdev_name);
    namespace.ptpl_file = namespace.ptpl_file.take().filter(|file| !file.is_empty());
    namespace.eui64 = namespace.eui64.take().filter(|id| id.0 != [0; 8]);
    if let Ok(target) = target {
        namespace.hide_metadata = target.hides_metadata_of(&namespace.bdev_name, namespace.hide_metadata);
    }
    // The default is the group of the NSID's number. An NSID that is left to the method is not known here.
    if namespace.anagrpid == 0 {
        namespace.anagrpid = namespace.nsid;
    }
    Ok(())
}

/// Opens the file of the reservations, which may block, before other updates have to wait.
fn prepare_ns(module: &NvmfModule, params: AddNs) -> Result<PreparedNamespace, RpcError> {
    let namespace = params.namespace;
    let config = NamespaceConfig {
        bdev_name: namespace.bdev_name,
        nsid: Some(namespace.nsid).filter(|nsid| *nsid != 0),
        nguid: namespace.nguid.map(|id| id.0),
        eui64: namespace.eui64.map(|id| id.0),
        uuid: namespace.uuid,
        anagrpid: Some(namespace.anagrpid).filter(|group| *group != 0),
        ptpl_file: namespace.ptpl_file.filter(|file| !file.is_empty()),
        no_auto_visible: namespace.no_auto_visible,
        hide_metadata: namespace.hide_metadata,
    };
    let target = params.tgt_name.find(module)?;
    let reservations = target.prepare_namespace(&params.nqn, &config)?;
    Ok((target, params.nqn, config, reservations))
}

fn add_ns(_: &NvmfModule, (target, nqn, config, reservations): PreparedNamespace) -> Result<u32, RpcError> {
    Ok(target.add_namespace_with(&nqn, config, reservations)?)
}

control::parameters! {
    struct RemoveNs {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// NSID
        nsid: u32,
    }
}

fn remove_ns(module: &NvmfModule, params: RemoveNs) -> Result<Closing, RpcError> {
    Ok(params.tgt_name.find(module)?.remove_namespace(&params.nqn, params.nsid)?)
}

control::parameters! {
    struct RemoveHost {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// Host's NQN
        host: String,
    }
    ignored("hosts are disconnected at once") { timeout_ms }
}

fn remove_host(module: &NvmfModule, params: RemoveHost) -> Result<bool, RpcError> {
    params.tgt_name.find(module)?.remove_host(&params.nqn, &params.host)?;
    Ok(true)
}

control::parameters! {
    struct AllowAnyHost {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// Whether any host may connect
        allow_any_host: bool,
    }
}

fn allow_any_host(module: &NvmfModule, params: AllowAnyHost) -> Result<bool, RpcError> {
    params.tgt_name.find(module)?.allow_any_host(&params.nqn, params.allow_any_host)?;
    Ok(true)
}

#[cfg(test)]
mod tests;
