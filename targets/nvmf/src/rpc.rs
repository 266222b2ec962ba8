//! The module of the target for the control plane: SPDK's `nvmf_*` methods.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bdev::{Registry, Uuid};
use control::json::{Value, json};
use control::{DecodeLog, Method, Module, ParameterError, ParameterType, Parameters, RpcError, TextOrNumber};
use reactor::ReactorHandle;
use wire_nvme::log::AnaState;

use crate::{
    ListenAddress, NamespaceConfig, NvmfTarget, NvmfTargetError, SubsystemConfig, TcpTransportConfig,
    VfioUserConfig, VfioUserFault,
};

mod info;

/// The NVMe-oF target as a [`Module`].
pub struct NvmfModule {
    target: NvmfTarget,
    /// Most subsystems, the discovery subsystem not counted; 0 is no limit.
    subsystems_max: AtomicU32,
}

impl NvmfModule {
    /// A target without subsystems on `reactors`, for the devices of `registry`.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> Arc<NvmfModule> {
        Arc::new(NvmfModule {
            target: NvmfTarget::new(registry, reactors),
            subsystems_max: AtomicU32::new(0),
        })
    }

    /// The target.
    pub fn target(&self) -> &NvmfTarget {
        &self.target
    }
}

/// Errors of methods that change a subsystem.
const SUBSYSTEM: &[(i64, &str)] = &[
    (RpcError::INVALID_PARAMS, "there is no such subsystem, or it does not have what is named"),
    (RpcError::INTERNAL, "the target is stopping"),
    UNRESPONSIVE,
    PENDING,
];
/// Errors of every method that needs all reactors.
const UNRESPONSIVE: (i64, &str) = (RpcError::ETIMEDOUT, "a reactor does not respond; nothing was changed");
const PENDING: (i64, &str) =
    (RpcError::EINPROGRESS, "the change is made, but a reactor that does not respond applies it later");

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
            Method::update("nvmf_create_transport", create_transport)
                .text("Makes a transport available to listeners.", "true")
                .errors(&[(RpcError::INTERNAL, "it exists"), UNRESPONSIVE, PENDING]),
            Method::update("nvmf_create_subsystem", create_subsystem)
                .text("Creates a subsystem.", "true")
                .errors(&[
                    (RpcError::INTERNAL, "it exists, or the target is stopping"),
                    (RpcError::ENOSPC, "there are as many as nvmf_set_max_subsystems allows"),
                    UNRESPONSIVE,
                ]),
            change(
                Method::update("nvmf_delete_subsystem", delete_subsystem),
                "Deletes a subsystem and disconnects its hosts.",
            ),
            Method::prepared_update("nvmf_subsystem_add_ns", prepare_ns, add_ns)
                .text("Adds a bdev as a namespace.", "the NSID")
                .errors(SUBSYSTEM),
            change(Method::update("nvmf_subsystem_remove_ns", remove_ns), "Removes a namespace."),
            Method::update("nvmf_subsystem_add_listener", add_listener)
                .text("Listens for hosts at an address.", "true")
                .errors(&[
                    (RpcError::INVALID_PARAMS, "there is no such subsystem or transport"),
                    (RpcError::INTERNAL, "the address cannot be listened at, or the target is stopping"),
                    UNRESPONSIVE,
                ]),
            change(
                Method::update("nvmf_subsystem_remove_listener", remove_listener),
                "Ends a listener and disconnects its hosts.",
            ),
            change(
                Method::update("nvmf_subsystem_listener_set_ana_state", set_ana_state),
                "Sets the ANA state that hosts see through a listener.",
            ),
            change(Method::update("nvmf_subsystem_add_host", add_host), "Allows a host to connect."),
            change(
                Method::update("nvmf_subsystem_remove_host", remove_host),
                "Disallows a host, and disconnects it.",
            ),
            change(
                Method::update("nvmf_subsystem_allow_any_host", allow_any_host),
                "Allows any host to connect, or only those that were added.",
            ),
            change(
                Method::update("nvmf_vfio_user_inject", inject),
                "Injects a fault into the controller of a vfio-user listener. Not an SPDK method.",
            ),
        ];
        methods.extend(info::methods());
        methods
    }

    /// Stops listening and rejects further changes. Hosts are disconnected when the reactors stop, each after its
    /// commands in flight have completed.
    fn drain(&self) {
        // Fails only without reactors, and then nothing listens.
        let _ = self.target.stop_listening();
        self.target.shutdown();
    }

    fn save(&self) -> Vec<Value> {
        let max_subsystems = self.subsystems_max.load(Ordering::Relaxed);
        let limit = (max_subsystems != 0).then(|| {
            let params = MaxSubsystems { max_subsystems }.to_object();
            json!({ "method": "nvmf_set_max_subsystems", "params": params })
        });
        limit.into_iter().chain(info::calls(&self.target)).collect()
    }

    fn report(&self) -> Value {
        let subsystems = self.target.subsystems();
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

/// The target's name. There is one target, `nvmf_tgt`.
#[derive(Default)]
struct TargetName;

impl ParameterType for TargetName {
    fn kind() -> String {
        "`nvmf_tgt`".to_string()
    }

    fn decode(value: Value, log: &mut DecodeLog) -> Result<Self, ParameterError> {
        match Option::<String>::decode(value, log)?.as_deref() {
            None | Some("nvmf_tgt") => Ok(TargetName),
            Some(name) => {
                let message = format!("there is no target {name}; the only one is nvmf_tgt");
                Err(ParameterError::with_code(RpcError::INTERNAL, message))
            }
        }
    }

    fn encode(&self) -> Value {
        Value::Null
    }

    fn absent() -> Option<Self> {
        Some(TargetName)
    }
}

/// An identifier of `N` bytes in hexadecimal; dashes are ignored.
struct Identifier<const N: usize>([u8; N]);

impl<const N: usize> ParameterType for Identifier<N> {
    fn kind() -> String {
        format!("{} hexadecimal digits", 2 * N)
    }

    fn decode(value: Value, log: &mut DecodeLog) -> Result<Self, ParameterError> {
        let text = String::decode(value, log)?;
        let digits: Vec<u32> = text.chars().filter(|c| *c != '-').filter_map(|c| c.to_digit(16)).collect();
        let others = text.chars().any(|c| c != '-' && !c.is_ascii_hexdigit());
        if others || digits.len() != 2 * N {
            return Err(ParameterError::new(format!("expected {} hexadecimal digits", 2 * N)));
        }
        Ok(Identifier(std::array::from_fn(|index| (digits[2 * index] << 4 | digits[2 * index + 1]) as u8)))
    }

    fn encode(&self) -> Value {
        Value::String(self.0.iter().map(|byte| format!("{byte:02X}")).collect())
    }
}

control::choices! {
    /// SPDK's names of ANA states.
    enum AnaStateName {
        Optimized = "optimized",
        NonOptimized = "non_optimized",
        Inaccessible = "inaccessible",
        PersistentLoss = "persistent_loss",
        Change = "change",
    }
}

impl From<AnaStateName> for AnaState {
    fn from(name: AnaStateName) -> AnaState {
        match name {
            AnaStateName::Optimized => AnaState::Optimized,
            AnaStateName::NonOptimized => AnaState::NonOptimized,
            AnaStateName::Inaccessible => AnaState::Inaccessible,
            AnaStateName::PersistentLoss => AnaState::PersistentLoss,
            AnaStateName::Change => AnaState::Change,
        }
    }
}

impl From<AnaState> for AnaStateName {
    fn from(state: AnaState) -> AnaStateName {
        match state {
            AnaState::Optimized => AnaStateName::Optimized,
            AnaState::NonOptimized => AnaStateName::NonOptimized,
            AnaState::Inaccessible => AnaStateName::Inaccessible,
            AnaState::PersistentLoss => AnaStateName::PersistentLoss,
            AnaState::Change => AnaStateName::Change,
        }
    }
}

control::parameters! {
    struct CreateTransport {
        /// TCP or VFIOUSER
        trtype: String,
        tgt_name: TargetName,
        /// Entries of an I/O queue at most
        max_queue_depth: Option<u32>,
        /// I/O queues of a controller at most
        max_io_qpairs_per_ctrlr: Option<u16>,
        /// Data in a command capsule at most; TCP only
        in_capsule_data_size: Option<u32> ["bytes"],
        /// Data of a command at most
        max_io_size: Option<u32> ["bytes"],
        /// Entries of an admin queue at most; TCP only
        max_aq_depth: Option<u32>,
        /// Leave out the response capsule of a successful read; TCP only
        c2h_success: Option<bool>,
        /// Trap accesses to doorbells; VFIOUSER only
        disable_mappable_bar0: bool = false,
        /// Connections of hosts that have logged in at most; as many as file descriptors allow if not given; TCP only
        max_connections: Option<u32>,
        /// Connections of hosts that have not logged in at most; beyond, the oldest is closed; TCP only
        max_pending_logins: Option<u32>,
        /// Of these, from one IP address (IPv6: from one /64 network); TCP only
        max_pending_logins_per_peer: Option<u32>,
        /// Buffers that one connection holds at most; TCP only
        connection_bytes_max: Option<u32> ["bytes"],
        /// Time for a host to send requested data or to read an answer; TCP only
        transfer_timeout_ms: Option<u32> ["ms"],
    }
    only {
        dif_insert_or_strip: bool = false,
        disable_compare: bool = false,
        masked_oncs: Vec<String> = Vec::new(),
        masked_fuses: Vec<String> = Vec::new(),
    }
    ignored("buffers come from bounded per-core pools") {
        io_unit_size,
        num_shared_buffers,
        buf_cache_size,
        iobuf_small_cache_size,
        iobuf_large_cache_size,
        zcopy,
        control_msg_num,
    }
    ignored("the transports have fixed values") {
        sock_priority,
        acceptor_backlog,
        acceptor_poll_rate,
        ack_timeout,
        abort_timeout_sec,
        kas,
        min_kato,
        disable_command_passthru,
    }
    ignored("neither transport has them") {
        num_cqe,
        max_srq_depth,
        no_srq,
        no_wr_batching,
        data_wr_pool_size,
        disable_adaptive_irq,
        disable_shadow_doorbells,
    }
}

fn create_transport(module: &NvmfModule, params: CreateTransport) -> Result<bool, RpcError> {
    let vfio_user = params.trtype.eq_ignore_ascii_case("vfiouser");
    if !vfio_user && !params.trtype.eq_ignore_ascii_case("tcp") {
        let message = format!("transport {} is not supported; expected TCP or VFIOUSER", params.trtype);
        return Err(RpcError::invalid_params(message));
    }
    if vfio_user {
        return create_vfio_user(module, &params);
    }
    let mut config = TcpTransportConfig::default();
    config.max_queue_depth = params.max_queue_depth.unwrap_or(config.max_queue_depth);
    config.max_io_qpairs_per_ctrlr = params.max_io_qpairs_per_ctrlr.unwrap_or(config.max_io_qpairs_per_ctrlr);
    config.in_capsule_data_size = params.in_capsule_data_size.unwrap_or(config.in_capsule_data_size);
    config.max_io_size = params.max_io_size.unwrap_or(config.max_io_size);
    config.max_aq_depth = params.max_aq_depth.unwrap_or(config.max_aq_depth);
    config.c2h_success = params.c2h_success.unwrap_or(config.c2h_success);
    config.max_connections = params.max_connections;
    config.max_pending_logins = params.max_pending_logins.unwrap_or(config.max_pending_logins);
    config.max_pending_logins_per_peer =
        params.max_pending_logins_per_peer.unwrap_or(config.max_pending_logins_per_peer);
    config.connection_bytes_max = params.connection_bytes_max.unwrap_or(config.connection_bytes_max);
    config.transfer_timeout_ms = params.transfer_timeout_ms.unwrap_or(config.transfer_timeout_ms);
    module.target.create_transport(config)?;
    Ok(true)
}

fn create_vfio_user(module: &NvmfModule, params: &CreateTransport) -> Result<bool, RpcError> {
    if params.in_capsule_data_size.is_some() || params.max_aq_depth.is_some() {
        log::warn!(
            target: "nvmf",
            "nvmf_create_transport: in_capsule_data_size, max_aq_depth ignored: queues are in the client's memory"
        );
    }
    let mut config = VfioUserConfig::default();
    config.max_queue_depth = params.max_queue_depth.unwrap_or(config.max_queue_depth);
    config.max_io_qpairs_per_ctrlr = params.max_io_qpairs_per_ctrlr.unwrap_or(config.max_io_qpairs_per_ctrlr);
    config.max_io_size = params.max_io_size.unwrap_or(config.max_io_size);
    config.disable_mappable_bar0 = params.disable_mappable_bar0;
    module.target.create_vfio_user(config)?;
    Ok(true)
}

control::choices! {
    enum FaultName {
        None = "none",
        Fatal = "fatal",
        Gone = "gone",
        Disconnect = "disconnect",
        DropCompletions = "drop_completions",
        Stall = "stall",
    }
}

control::parameters! {
    struct InjectVfioUserFault {
        /// Directory of the listener
        traddr: String,
        /// What fails
        fault: FaultName,
        /// How many completions drop_completions drops; without, 1
        count: Option<u32>,
        /// Which queue stalls
        qid: Option<u16>,
    }
}

fn inject(module: &NvmfModule, params: InjectVfioUserFault) -> Result<bool, RpcError> {
    let fault = match (params.fault, params.count, params.qid) {
        (FaultName::None, None, None) => VfioUserFault::None,
        (FaultName::Fatal, None, None) => VfioUserFault::Fatal,
        (FaultName::Gone, None, None) => VfioUserFault::SurpriseRemoval,
        (FaultName::Disconnect, None, None) => VfioUserFault::Disconnect,
        (FaultName::DropCompletions, count, None) => VfioUserFault::DropCompletions(count.unwrap_or(1)),
        (FaultName::Stall, None, Some(qid)) => VfioUserFault::Stall(qid),
        _ => {
            let message = "count belongs to the fault drop_completions, and qid to stall, which needs it";
            return Err(RpcError::invalid_params(message));
        }
    };
    module.target.inject(&params.traddr, fault)?;
    Ok(true)
}

control::parameters! {
    struct MaxSubsystems {
        /// Most subsystems, the discovery subsystem not counted; 0 is no limit
        max_subsystems: u32,
    }
}

fn set_max_subsystems(module: &NvmfModule, params: MaxSubsystems) -> Result<bool, RpcError> {
    let count = module.target.subsystem_count();
    if params.max_subsystems != 0 && count > params.max_subsystems as usize {
        let message = format!("max_subsystems: there are {count} subsystems already");
        return Err(RpcError::new(RpcError::EBUSY, message));
    }
    module.subsystems_max.store(params.max_subsystems, Ordering::Relaxed);
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
    }
    only {
        admin_label: String = String::new(),
        passthrough: bool = false,
        enable_nssr: bool = false,
    }
    one_of { dmrsl: u32 = [0, 2_097_152], wzsl: u8 = [0, 12] }
}

fn create_subsystem(module: &NvmfModule, params: CreateSubsystem) -> Result<bool, RpcError> {
    let max = module.subsystems_max.load(Ordering::Relaxed);
    if max != 0 && module.target.subsystem_count() >= max as usize {
        let message = format!("there are {max} subsystems, as many as nvmf_set_max_subsystems allows");
        return Err(RpcError::new(RpcError::ENOSPC, message));
    }
    let default = SubsystemConfig::default();
    let config = SubsystemConfig {
        serial_number: params.serial_number.unwrap_or(default.serial_number),
        model_number: params.model_number.unwrap_or(default.model_number),
        allow_any_host: params.allow_any_host,
        // 0 is the default, as in SPDK.
        max_namespaces: Some(params.max_namespaces).filter(|max| *max != 0).unwrap_or(default.max_namespaces),
        min_cntlid: params.min_cntlid.unwrap_or(default.min_cntlid),
        max_cntlid: params.max_cntlid.unwrap_or(default.max_cntlid),
        ana_reporting: params.ana_reporting,
    };
    module.target.create_subsystem(&params.nqn, config)?;
    Ok(true)
}

control::parameters! {
    struct ByNqn {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
    }
}

fn delete_subsystem(module: &NvmfModule, params: ByNqn) -> Result<bool, RpcError> {
    module.target.delete_subsystem(&params.nqn)?;
    Ok(true)
}

/// A namespace to add to a subsystem, with the reservations of its device if they are in a file.
type PreparedNamespace = (String, NamespaceConfig, Option<bdev::ReservationLease>);

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
    }
    only { no_auto_visible: bool = false, hide_metadata: bool = false }
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
    };
    let lease = module.target.open_ptpl_file(&params.nqn, &config)?;
    Ok((params.nqn, config, lease))
}

fn add_ns(module: &NvmfModule, (nqn, config, lease): PreparedNamespace) -> Result<u32, RpcError> {
    Ok(module.target.add_namespace_with(&nqn, config, lease)?)
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

fn remove_ns(module: &NvmfModule, params: RemoveNs) -> Result<bool, RpcError> {
    module.target.remove_namespace(&params.nqn, params.nsid)?;
    Ok(true)
}

control::parameters! {
    struct ListenAddressParameters {
        /// TCP or VFIOUSER
        trtype: String,
        /// IPv4 or IPv6
        adrfam: Option<String>,
        /// IP address, or directory of the vfio-user socket
        traddr: String,
        /// TCP port; 0 is any that is free
        trsvcid: Option<TextOrNumber>,
    }
}

impl From<ListenAddressParameters> for ListenAddress {
    fn from(address: ListenAddressParameters) -> ListenAddress {
        let trsvcid = address.trsvcid.map_or_else(String::new, |port| port.0);
        let adrfam = address.adrfam.unwrap_or_default();
        ListenAddress { trtype: address.trtype, adrfam, traddr: address.traddr, trsvcid }
    }
}

control::parameters! {
    struct AddListener {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// The address
        listen_address: ListenAddressParameters,
        /// ANA state; without, optimized
        ana_state: Option<AnaStateName>,
    }
    only { secure_channel: bool = false, numa_id: i32 = -1 }
    ignored("sockets are the kernel's") { sock_impl }
}

fn add_listener(module: &NvmfModule, params: AddListener) -> Result<bool, RpcError> {
    let bound = module.target.add_listener(&params.nqn, params.listen_address.into())?;
    if let Some(ana) = params.ana_state.filter(|ana| *ana != AnaStateName::Optimized) {
        let set = module.target.set_ana_state(&params.nqn, bound.clone(), None, ana.into());
        if let Err(error) = set {
            module.target.remove_listener(&params.nqn, bound)?;
            return Err(error.into());
        }
    }
    Ok(true)
}

control::parameters! {
    struct RemoveListener {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// The address
        listen_address: ListenAddressParameters,
    }
}

fn remove_listener(module: &NvmfModule, params: RemoveListener) -> Result<bool, RpcError> {
    module.target.remove_listener(&params.nqn, params.listen_address.into())?;
    Ok(true)
}

control::parameters! {
    struct SetAnaState {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// The address
        listen_address: ListenAddressParameters,
        /// New state
        ana_state: AnaStateName,
        /// ANA group; 0 is all
        anagrpid: u32 = 0,
    }
}

fn set_ana_state(module: &NvmfModule, params: SetAnaState) -> Result<bool, RpcError> {
    let state = params.ana_state.into();
    let group = Some(params.anagrpid).filter(|group| *group != 0);
    module.target.set_ana_state(&params.nqn, params.listen_address.into(), group, state)?;
    Ok(true)
}

control::parameters! {
    struct AddHost {
        /// Subsystem
        nqn: String,
        tgt_name: TargetName,
        /// Host's NQN
        host: String,
    }
    // Authentication is not supported: a host that must authenticate is rejected rather than let in without.
    only { psk: String = String::new(), dhchap_key: String = String::new(), dhchap_ctrlr_key: String = String::new() }
}

fn add_host(module: &NvmfModule, params: AddHost) -> Result<bool, RpcError> {
    module.target.add_host(&params.nqn, &params.host)?;
    Ok(true)
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
    module.target.remove_host(&params.nqn, &params.host)?;
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
    module.target.allow_any_host(&params.nqn, params.allow_any_host)?;
    Ok(true)
}

#[cfg(test)]
mod tests;
