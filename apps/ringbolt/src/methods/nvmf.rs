//! Methods that make and change the NVMe-oF target.

use ::nvmf::{
    Fault, ListenAddress, NamespaceConfig, SubsystemConfig, TargetError, TransportConfig, VfioUserConfig,
};
use serde::Deserialize;
use serde_json::Value;
use uuid::Uuid;
use wire_nvme::log::AnaState;

use super::Table;
use super::parameters::off;
use crate::rpc::RpcError;
use crate::say::complain;
use crate::state::App;

mod info;

pub(crate) use info::calls;

pub(super) fn add(table: &mut Table) {
    table.change("nvmf_create_transport", create_transport);
    table.change("nvmf_create_subsystem", create_subsystem);
    table.change("nvmf_delete_subsystem", delete_subsystem);
    table.change("nvmf_subsystem_add_ns", add_ns);
    table.change("nvmf_subsystem_remove_ns", remove_ns);
    table.change("nvmf_subsystem_add_listener", add_listener);
    table.change("nvmf_subsystem_remove_listener", remove_listener);
    table.change("nvmf_subsystem_listener_set_ana_state", set_ana_state);
    table.change("nvmf_subsystem_add_host", add_host);
    table.change("nvmf_subsystem_remove_host", remove_host);
    table.change("nvmf_subsystem_allow_any_host", allow_any_host);
    table.change("nvmf_vfio_user_inject", inject);
    info::add(table);
}

impl From<TargetError> for RpcError {
    fn from(error: TargetError) -> RpcError {
        let code = match &error {
            TargetError::SubsystemExists(_)
            | TargetError::TransportExists(_)
            | TargetError::Listen(..)
            | TargetError::Stopping => RpcError::INTERNAL,
            _ => RpcError::INVALID_PARAMS,
        };
        RpcError::new(code, error.to_string())
    }
}

/// There is one target; SPDK's tools name it when they name one at all.
#[derive(Default, Deserialize)]
#[serde(transparent)]
struct TargetName(Option<String>);

impl TargetName {
    fn check(&self) -> Result<(), RpcError> {
        match self.0.as_deref() {
            None | Some("nvmf_tgt") => Ok(()),
            Some(name) => {
                let message = format!("no target is called {name}; there is one, nvmf_tgt");
                Err(RpcError::internal(message))
            }
        }
    }
}

/// A parameter that tunes what Ringbolt does differently: said, not obeyed.
type Tuning = Option<Value>;

/// Says which of the tuning parameters were set, if any were.
fn say_ignored(method: &str, tunings: &[(&str, &Tuning)], reason: &str) {
    let is_set =
        |value: &Value| !matches!(value, Value::Null | Value::Bool(false)) && value != &Value::from(0);
    let set = tunings.iter().filter(|(_, value)| value.as_ref().is_some_and(is_set));
    let names: Vec<&str> = set.map(|(name, _)| *name).collect();
    if !names.is_empty() {
        complain!("{method}: {} ignored: {reason}", names.join(", "));
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CreateTransport {
    trtype: String,
    #[serde(default)]
    tgt_name: TargetName,
    max_queue_depth: Option<u32>,
    max_io_qpairs_per_ctrlr: Option<u16>,
    in_capsule_data_size: Option<u32>,
    max_io_size: Option<u32>,
    max_aq_depth: Option<u32>,
    c2h_success: Option<bool>,
    dif_insert_or_strip: Option<bool>,
    masked_oncs: Option<Vec<String>>,
    masked_fuses: Option<Vec<String>>,
    io_unit_size: Tuning,
    num_shared_buffers: Tuning,
    buf_cache_size: Tuning,
    iobuf_small_cache_size: Tuning,
    iobuf_large_cache_size: Tuning,
    zcopy: Tuning,
    num_cqe: Tuning,
    max_srq_depth: Tuning,
    no_srq: Tuning,
    sock_priority: Tuning,
    acceptor_backlog: Tuning,
    abort_timeout_sec: Tuning,
    no_wr_batching: Tuning,
    control_msg_num: Tuning,
    disable_mappable_bar0: Option<bool>,
    disable_adaptive_irq: Tuning,
    disable_shadow_doorbells: Tuning,
    disable_compare: Option<bool>,
    acceptor_poll_rate: Tuning,
    ack_timeout: Tuning,
    data_wr_pool_size: Tuning,
    disable_command_passthru: Tuning,
    kas: Tuning,
    min_kato: Tuning,
}

fn create_transport(app: &App, params: CreateTransport) -> Result<bool, RpcError> {
    params.tgt_name.check()?;
    let vfio_user = params.trtype.eq_ignore_ascii_case("vfiouser");
    if !vfio_user && !params.trtype.eq_ignore_ascii_case("tcp") {
        let message = format!("transport {} is not in Ringbolt; TCP and VFIOUSER are", params.trtype);
        return Err(RpcError::invalid_params(message));
    }
    off("dif_insert_or_strip", params.dif_insert_or_strip, false)?;
    off("disable_compare", params.disable_compare, false)?;
    off("masked_oncs", params.masked_oncs.as_ref(), &Vec::new())?;
    off("masked_fuses", params.masked_fuses.as_ref(), &Vec::new())?;
    let buffers = [
        ("io_unit_size", &params.io_unit_size),
        ("num_shared_buffers", &params.num_shared_buffers),
        ("buf_cache_size", &params.buf_cache_size),
        ("iobuf_small_cache_size", &params.iobuf_small_cache_size),
        ("iobuf_large_cache_size", &params.iobuf_large_cache_size),
        ("zcopy", &params.zcopy),
        ("control_msg_num", &params.control_msg_num),
    ];
    say_ignored("nvmf_create_transport", &buffers, "buffers come from bounded per-core pools");
    let sockets = [
        ("sock_priority", &params.sock_priority),
        ("acceptor_backlog", &params.acceptor_backlog),
        ("acceptor_poll_rate", &params.acceptor_poll_rate),
        ("ack_timeout", &params.ack_timeout),
        ("abort_timeout_sec", &params.abort_timeout_sec),
        ("kas", &params.kas),
        ("min_kato", &params.min_kato),
        ("disable_command_passthru", &params.disable_command_passthru),
    ];
    say_ignored("nvmf_create_transport", &sockets, "the transports have their own");
    let foreign = [
        ("num_cqe", &params.num_cqe),
        ("max_srq_depth", &params.max_srq_depth),
        ("no_srq", &params.no_srq),
        ("no_wr_batching", &params.no_wr_batching),
        ("data_wr_pool_size", &params.data_wr_pool_size),
        ("disable_adaptive_irq", &params.disable_adaptive_irq),
        ("disable_shadow_doorbells", &params.disable_shadow_doorbells),
    ];
    say_ignored("nvmf_create_transport", &foreign, "no transport here has them");
    if vfio_user {
        return create_vfio_user(app, &params);
    }
    let mut config = TransportConfig::default();
    config.max_queue_depth = params.max_queue_depth.unwrap_or(config.max_queue_depth);
    config.max_io_qpairs_per_ctrlr = params.max_io_qpairs_per_ctrlr.unwrap_or(config.max_io_qpairs_per_ctrlr);
    config.in_capsule_data_size = params.in_capsule_data_size.unwrap_or(config.in_capsule_data_size);
    config.max_io_size = params.max_io_size.unwrap_or(config.max_io_size);
    config.max_aq_depth = params.max_aq_depth.unwrap_or(config.max_aq_depth);
    config.c2h_success = params.c2h_success.unwrap_or(config.c2h_success);
    app.target.create_transport(config)?;
    Ok(true)
}

fn create_vfio_user(app: &App, params: &CreateTransport) -> Result<bool, RpcError> {
    let capsules = params.in_capsule_data_size.map(Value::from);
    let admin = params.max_aq_depth.map(Value::from);
    let fabrics = [("in_capsule_data_size", &capsules), ("max_aq_depth", &admin)];
    say_ignored("nvmf_create_transport", &fabrics, "queues lie in the client's memory");
    let mut config = VfioUserConfig::default();
    config.max_queue_depth = params.max_queue_depth.unwrap_or(config.max_queue_depth);
    config.max_io_qpairs_per_ctrlr = params.max_io_qpairs_per_ctrlr.unwrap_or(config.max_io_qpairs_per_ctrlr);
    config.max_io_size = params.max_io_size.unwrap_or(config.max_io_size);
    config.disable_mappable_bar0 = params.disable_mappable_bar0.unwrap_or(false);
    app.target.create_vfio_user(config)?;
    Ok(true)
}

/// What is to go wrong with a controller behind vfio-user; a method of Ringbolt's own.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Inject {
    traddr: String,
    fault: String,
    count: Option<u32>,
    qid: Option<u16>,
}

fn inject(app: &App, params: Inject) -> Result<bool, RpcError> {
    let fault = match (params.fault.as_str(), params.count, params.qid) {
        ("none", None, None) => Fault::None,
        ("fatal", None, None) => Fault::Fatal,
        ("gone", None, None) => Fault::Gone,
        ("disconnect", None, None) => Fault::Disconnect,
        ("drop_completions", count, None) => Fault::DropCompletions(count.unwrap_or(1)),
        ("stall", None, Some(qid)) => Fault::Stall(qid),
        _ => {
            let message =
                "fault is none, fatal, gone, disconnect, drop_completions (with count) or stall (with qid)";
            return Err(RpcError::invalid_params(message));
        }
    };
    app.target.inject(&params.traddr, fault)?;
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CreateSubsystem {
    nqn: String,
    #[serde(default)]
    tgt_name: TargetName,
    serial_number: Option<String>,
    model_number: Option<String>,
    admin_label: Option<String>,
    max_namespaces: Option<u32>,
    #[serde(default)]
    allow_any_host: bool,
    #[serde(default)]
    ana_reporting: bool,
    min_cntlid: Option<u16>,
    max_cntlid: Option<u16>,
    dmrsl: Option<u32>,
    wzsl: Option<u8>,
    passthrough: Option<bool>,
    enable_nssr: Option<bool>,
}

fn create_subsystem(app: &App, params: CreateSubsystem) -> Result<bool, RpcError> {
    params.tgt_name.check()?;
    off("admin_label", params.admin_label.as_deref(), "")?;
    off("dmrsl", params.dmrsl, 0)?;
    off("wzsl", params.wzsl, 0)?;
    off("passthrough", params.passthrough, false)?;
    off("enable_nssr", params.enable_nssr, false)?;
    let default = SubsystemConfig::default();
    let config = SubsystemConfig {
        serial_number: params.serial_number.unwrap_or(default.serial_number),
        model_number: params.model_number.unwrap_or(default.model_number),
        allow_any_host: params.allow_any_host,
        // 0 is SPDK's way of leaving it out.
        max_namespaces: params.max_namespaces.filter(|max| *max != 0).unwrap_or(default.max_namespaces),
        min_cntlid: params.min_cntlid.unwrap_or(default.min_cntlid),
        max_cntlid: params.max_cntlid.unwrap_or(default.max_cntlid),
        ana_reporting: params.ana_reporting,
    };
    app.target.create_subsystem(&params.nqn, config)?;
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ByNqn {
    nqn: String,
    #[serde(default)]
    tgt_name: TargetName,
}

fn delete_subsystem(app: &App, params: ByNqn) -> Result<bool, RpcError> {
    params.tgt_name.check()?;
    app.target.delete_subsystem(&params.nqn)?;
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddNs {
    nqn: String,
    #[serde(default)]
    tgt_name: TargetName,
    namespace: Namespace,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Namespace {
    nsid: Option<u32>,
    bdev_name: String,
    nguid: Option<String>,
    eui64: Option<String>,
    uuid: Option<Uuid>,
    ptpl_file: Option<String>,
    anagrpid: Option<u32>,
    no_auto_visible: Option<bool>,
    hide_metadata: Option<bool>,
}

fn add_ns(app: &App, params: AddNs) -> Result<u32, RpcError> {
    params.tgt_name.check()?;
    let namespace = params.namespace;
    off("no_auto_visible", namespace.no_auto_visible, false)?;
    off("hide_metadata", namespace.hide_metadata, false)?;
    let config = NamespaceConfig {
        bdev_name: namespace.bdev_name,
        // 0 is SPDK's way of asking for the first that is free.
        nsid: namespace.nsid.filter(|nsid| *nsid != 0),
        nguid: namespace.nguid.as_deref().map(|text| hexadecimal("nguid", text)).transpose()?,
        eui64: namespace.eui64.as_deref().map(|text| hexadecimal("eui64", text)).transpose()?,
        uuid: namespace.uuid,
        anagrpid: namespace.anagrpid.filter(|group| *group != 0),
        ptpl_file: namespace.ptpl_file.filter(|file| !file.is_empty()),
    };
    Ok(app.target.add_namespace(&params.nqn, config)?)
}

/// An identifier of `N` bytes; dashes may stand between them.
fn hexadecimal<const N: usize>(name: &str, text: &str) -> Result<[u8; N], RpcError> {
    let digits: Vec<u32> = text.chars().filter(|c| *c != '-').filter_map(|c| c.to_digit(16)).collect();
    let others = text.chars().any(|c| c != '-' && !c.is_ascii_hexdigit());
    if others || digits.len() != 2 * N {
        return Err(RpcError::invalid_params(format!("{name} is {} hexadecimal digits", 2 * N)));
    }
    Ok(std::array::from_fn(|index| (digits[2 * index] << 4 | digits[2 * index + 1]) as u8))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoveNs {
    nqn: String,
    #[serde(default)]
    tgt_name: TargetName,
    nsid: u32,
}

fn remove_ns(app: &App, params: RemoveNs) -> Result<bool, RpcError> {
    params.tgt_name.check()?;
    app.target.remove_namespace(&params.nqn, params.nsid)?;
    Ok(true)
}

/// A port number: SPDK's schema says text, people and some tools send a number.
#[derive(Deserialize)]
#[serde(untagged)]
enum Service {
    Text(String),
    Number(u16),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Address {
    trtype: String,
    adrfam: Option<String>,
    traddr: String,
    trsvcid: Option<Service>,
}

impl From<Address> for ListenAddress {
    fn from(address: Address) -> ListenAddress {
        let trsvcid = match address.trsvcid {
            Some(Service::Text(text)) => text,
            Some(Service::Number(number)) => number.to_string(),
            None => String::new(),
        };
        let adrfam = address.adrfam.unwrap_or_default();
        ListenAddress { trtype: address.trtype, adrfam, traddr: address.traddr, trsvcid }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddListener {
    nqn: String,
    #[serde(default)]
    tgt_name: TargetName,
    listen_address: Address,
    secure_channel: Option<bool>,
    ana_state: Option<String>,
    sock_impl: Tuning,
    numa_id: Option<i32>,
}

fn add_listener(app: &App, params: AddListener) -> Result<bool, RpcError> {
    params.tgt_name.check()?;
    off("secure_channel", params.secure_channel, false)?;
    off("numa_id", params.numa_id, -1)?;
    let sock_impl = [("sock_impl", &params.sock_impl)];
    say_ignored("nvmf_subsystem_add_listener", &sock_impl, "sockets are the kernel's");
    let ana = params.ana_state.as_deref().map(ana_state).transpose()?;
    let bound = app.target.add_listener(&params.nqn, params.listen_address.into())?;
    if let Some(ana) = ana.filter(|ana| *ana != AnaState::Optimized) {
        let set = app.target.set_ana_state(&params.nqn, bound.clone(), None, ana);
        if let Err(error) = set {
            app.target.remove_listener(&params.nqn, bound)?;
            return Err(error.into());
        }
    }
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoveListener {
    nqn: String,
    #[serde(default)]
    tgt_name: TargetName,
    listen_address: Address,
}

fn remove_listener(app: &App, params: RemoveListener) -> Result<bool, RpcError> {
    params.tgt_name.check()?;
    app.target.remove_listener(&params.nqn, params.listen_address.into())?;
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetAnaState {
    nqn: String,
    #[serde(default)]
    tgt_name: TargetName,
    listen_address: Address,
    ana_state: String,
    anagrpid: Option<u32>,
}

fn set_ana_state(app: &App, params: SetAnaState) -> Result<bool, RpcError> {
    params.tgt_name.check()?;
    let state = ana_state(&params.ana_state)?;
    // 0 is SPDK's way of saying every group.
    let group = params.anagrpid.filter(|group| *group != 0);
    app.target.set_ana_state(&params.nqn, params.listen_address.into(), group, state)?;
    Ok(true)
}

fn ana_state(text: &str) -> Result<AnaState, RpcError> {
    let state = ANA_STATES.iter().find(|(name, _)| *name == text);
    state.map(|(_, state)| *state).ok_or_else(|| {
        let names = ANA_STATES.map(|(name, _)| name).join(", ");
        RpcError::invalid_params(format!("ana_state is one of {names}"))
    })
}

/// SPDK's words for ANA states.
pub(super) const ANA_STATES: [(&str, AnaState); 5] = [
    ("optimized", AnaState::Optimized),
    ("non_optimized", AnaState::NonOptimized),
    ("inaccessible", AnaState::Inaccessible),
    ("persistent_loss", AnaState::PersistentLoss),
    ("change", AnaState::Change),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddHost {
    nqn: String,
    host: String,
    #[serde(default)]
    tgt_name: TargetName,
    psk: Option<String>,
    dhchap_key: Option<String>,
    dhchap_ctrlr_key: Option<String>,
}

fn add_host(app: &App, params: AddHost) -> Result<bool, RpcError> {
    params.tgt_name.check()?;
    // A host that was to prove who it is must not get in without.
    off("psk", params.psk.as_deref(), "")?;
    off("dhchap_key", params.dhchap_key.as_deref(), "")?;
    off("dhchap_ctrlr_key", params.dhchap_ctrlr_key.as_deref(), "")?;
    app.target.add_host(&params.nqn, &params.host)?;
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoveHost {
    nqn: String,
    host: String,
    #[serde(default)]
    tgt_name: TargetName,
    timeout_ms: Tuning,
}

fn remove_host(app: &App, params: RemoveHost) -> Result<bool, RpcError> {
    params.tgt_name.check()?;
    let timeout = [("timeout_ms", &params.timeout_ms)];
    say_ignored("nvmf_subsystem_remove_host", &timeout, "hosts are disconnected at once");
    app.target.remove_host(&params.nqn, &params.host)?;
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AllowAnyHost {
    nqn: String,
    allow_any_host: bool,
    #[serde(default)]
    tgt_name: TargetName,
}

fn allow_any_host(app: &App, params: AllowAnyHost) -> Result<bool, RpcError> {
    params.tgt_name.check()?;
    app.target.allow_any_host(&params.nqn, params.allow_any_host)?;
    Ok(true)
}

#[cfg(test)]
mod tests;
