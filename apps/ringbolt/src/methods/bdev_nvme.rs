//! Methods of the NVMe initiator: controllers, paths, discovery.

use std::time::Duration;

use bdev_nvme::{
    Attach, Discovery, InitiatorError, Multipathing, Passed, PassedThrough, PathConfig, PathInfo, Policy,
    Queue, ReconnectPolicy, Selector, TransportId,
};
use nvme::{AdminData, Uri};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use wire_nvme::admin::GetLogPage;
use wire_nvme::fabrics::Nqn;
use wire_nvme::log::{AnaState, HealthLog, LogId};

use super::framework::thread_name;
use super::iostat::counts_of;
use super::parameters::{Nothing, off};
use super::{Stage, Table};
use crate::rpc::RpcError;
use crate::say::complain;
use crate::state::App;

pub(super) fn add(table: &mut Table) {
    table.add("bdev_nvme_set_options", &[Stage::Startup, Stage::Runtime], true, set_options);
    table.change("bdev_nvme_attach_controller", attach);
    table.change("bdev_nvme_detach_controller", detach);
    table.read("bdev_nvme_get_controllers", get_controllers);
    table.read("bdev_nvme_get_io_paths", get_io_paths);
    table.read("bdev_nvme_get_path_iostat", get_path_iostat);
    table.change("bdev_nvme_set_preferred_path", set_preferred_path);
    table.change("bdev_nvme_set_multipath_policy", set_multipath_policy);
    table.read("bdev_nvme_get_controller_health_info", get_health);
    table.change("bdev_nvme_start_discovery", start_discovery);
    table.change("bdev_nvme_stop_discovery", stop_discovery);
    table.read("bdev_nvme_get_discovery_info", get_discovery_info);
    tools::add(table);
}

impl From<InitiatorError> for RpcError {
    fn from(error: InitiatorError) -> RpcError {
        let code = match &error {
            InitiatorError::NotFound(_) => RpcError::ENODEV,
            InitiatorError::Exists(_) => EALREADY,
            InitiatorError::Invalid(_) => RpcError::EINVAL,
            InitiatorError::Attach(_) | InitiatorError::Admin(_) => RpcError::EIO,
            InitiatorError::NoReactor => RpcError::INTERNAL,
            InitiatorError::Busy(_) => EBUSY,
            InitiatorError::Timeout(_) => ETIMEDOUT,
        };
        RpcError::new(code, error.to_string())
    }
}

const EPERM: i64 = -1;
const EBUSY: i64 = -16;
const EALREADY: i64 = -114;
const ETIMEDOUT: i64 = -110;

/// What `bdev_nvme_set_options` set: defaults of controllers that are attached later.
#[derive(Clone, Debug)]
pub(crate) struct NvmeOptions {
    keep_alive_timeout_ms: u32,
    timeout_us: u64,
    timeout_admin_us: u64,
    bdev_retry_count: i32,
    io_queue_requests: u32,
    loss: (i32, u32, u32),
    policy: Policy,
    io_path_stat: bool,
}

impl Default for NvmeOptions {
    fn default() -> Self {
        NvmeOptions {
            keep_alive_timeout_ms: 10_000,
            timeout_us: 0,
            timeout_admin_us: 0,
            bdev_retry_count: 3,
            io_queue_requests: 0,
            loss: (0, 0, 0),
            policy: Policy::ActivePassive,
            io_path_stat: false,
        }
    }
}

impl NvmeOptions {
    fn retries_max(&self) -> u16 {
        // -1 is for ever in SPDK; here every retry has an end.
        u16::try_from(self.bdev_retry_count).unwrap_or(u16::MAX)
    }

    fn driver(&self) -> nvme::Options {
        let default = nvme::Options::default();
        let ns = |us: u64, or: u64| if us == 0 { or } else { us.saturating_mul(1000) };
        nvme::Options {
            keep_alive_ms: self.keep_alive_timeout_ms,
            queue_depth: match self.io_queue_requests {
                0 => default.queue_depth,
                requests => requests.clamp(1, 1023),
            },
            timeout_ns: ns(self.timeout_admin_us, default.timeout_ns),
            io_timeout_ns: ns(self.timeout_us, 0),
            ..default
        }
    }
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum PolicyName {
    ActivePassive,
    ActiveActive,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum SelectorName {
    RoundRobin,
    QueueDepth,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct MultipathOpts {
    policy: Option<PolicyName>,
    selector: Option<SelectorName>,
    min_io: Option<u32>,
}

fn policy(
    policy: Option<PolicyName>,
    selector: Option<SelectorName>,
    min_io: Option<u32>,
) -> Result<Policy, RpcError> {
    if policy != Some(PolicyName::ActiveActive) {
        if selector.is_some() || min_io.is_some() {
            let message = "selector and min_io belong to the policy active_active";
            return Err(RpcError::invalid_params(message));
        }
        return Ok(Policy::ActivePassive);
    }
    match (selector, min_io) {
        (_, Some(0)) => Err(RpcError::invalid_params("min_io is at least 1")),
        (Some(SelectorName::QueueDepth), Some(_)) => {
            Err(RpcError::invalid_params("min_io belongs to the selector round_robin"))
        }
        (Some(SelectorName::QueueDepth), None) => Ok(Policy::ActiveActive(Selector::QueueDepth)),
        (_, min_io) => {
            let min_io = min_io.unwrap_or(1);
            Ok(Policy::ActiveActive(Selector::RoundRobin { min_io }))
        }
    }
}

impl MultipathOpts {
    fn policy(self) -> Result<Policy, RpcError> {
        policy(self.policy, self.selector, self.min_io)
    }
}

fn policy_json(policy: Policy) -> Value {
    let (name, selector, min_io) = bdev_nvme::policy_names(policy);
    let mut object = json!({ "policy": name });
    if let Some(selector) = selector {
        object["selector"] = json!(selector);
    }
    if let Some(min_io) = min_io {
        object["min_io"] = json!(min_io);
    }
    object
}

/// A parameter that tunes what is done differently here: said, not obeyed.
type Tuning = Option<Value>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetOptions {
    action_on_timeout: Option<String>,
    timeout_us: Option<u64>,
    timeout_admin_us: Option<u64>,
    keep_alive_timeout_ms: Option<u32>,
    bdev_retry_count: Option<i32>,
    ctrlr_loss_timeout_sec: Option<i32>,
    reconnect_delay_sec: Option<u32>,
    fast_io_fail_timeout_sec: Option<u32>,
    io_queue_requests: Option<u32>,
    multipath_opts: Option<MultipathOpts>,
    enable_flush: Option<bool>,
    io_path_stat: Option<bool>,
    arbitration_burst: Tuning,
    low_priority_weight: Tuning,
    medium_priority_weight: Tuning,
    high_priority_weight: Tuning,
    nvme_adminq_poll_period_us: Tuning,
    nvme_ioq_poll_period_us: Tuning,
    delay_cmd_submit: Tuning,
    transport_retry_count: Tuning,
    transport_ack_timeout: Tuning,
    disable_auto_failback: Tuning,
    generate_uuids: Tuning,
    transport_tos: Tuning,
    nvme_error_stat: Tuning,
    rdma_srq_size: Tuning,
    allow_accel_sequence: Tuning,
    rdma_max_cq_size: Tuning,
    rdma_cm_event_timeout_ms: Tuning,
    dhchap_digests: Tuning,
    dhchap_dhgroups: Tuning,
    rdma_umr_per_io: Tuning,
    tcp_connect_timeout_ms: Tuning,
}

impl SetOptions {
    fn ignored(&self) -> Vec<&'static str> {
        let all = [
            ("arbitration_burst", &self.arbitration_burst),
            ("low_priority_weight", &self.low_priority_weight),
            ("medium_priority_weight", &self.medium_priority_weight),
            ("high_priority_weight", &self.high_priority_weight),
            ("nvme_adminq_poll_period_us", &self.nvme_adminq_poll_period_us),
            ("nvme_ioq_poll_period_us", &self.nvme_ioq_poll_period_us),
            ("delay_cmd_submit", &self.delay_cmd_submit),
            ("transport_retry_count", &self.transport_retry_count),
            ("transport_ack_timeout", &self.transport_ack_timeout),
            ("disable_auto_failback", &self.disable_auto_failback),
            ("generate_uuids", &self.generate_uuids),
            ("transport_tos", &self.transport_tos),
            ("nvme_error_stat", &self.nvme_error_stat),
            ("rdma_srq_size", &self.rdma_srq_size),
            ("allow_accel_sequence", &self.allow_accel_sequence),
            ("rdma_max_cq_size", &self.rdma_max_cq_size),
            ("rdma_cm_event_timeout_ms", &self.rdma_cm_event_timeout_ms),
            ("dhchap_digests", &self.dhchap_digests),
            ("dhchap_dhgroups", &self.dhchap_dhgroups),
            ("rdma_umr_per_io", &self.rdma_umr_per_io),
            ("tcp_connect_timeout_ms", &self.tcp_connect_timeout_ms),
        ];
        let is_set =
            |value: &Value| !matches!(value, Value::Null | Value::Bool(false)) && value != &Value::from(0);
        all.into_iter()
            .filter(|(_, value)| value.as_ref().is_some_and(is_set))
            .map(|(name, _)| name)
            .collect()
    }
}

fn set_options(app: &App, params: SetOptions) -> Result<bool, RpcError> {
    if !app.initiator.controllers().is_empty() {
        let message = "options are set before the first controller is attached";
        return Err(RpcError::new(-1, message));
    }
    match params.action_on_timeout.as_deref() {
        None | Some("none" | "abort" | "reset") => {}
        Some(other) => {
            let message = format!("action_on_timeout is none, abort or reset, not {other}");
            return Err(RpcError::invalid_params(message));
        }
    }
    off("enable_flush", params.enable_flush, true)?;
    let ignored = params.ignored();
    let mut options = app.state().nvme.clone();
    options.keep_alive_timeout_ms = params.keep_alive_timeout_ms.unwrap_or(options.keep_alive_timeout_ms);
    options.timeout_us = params.timeout_us.unwrap_or(options.timeout_us);
    if params.action_on_timeout.as_deref() == Some("none") {
        options.timeout_us = 0;
    }
    options.timeout_admin_us = params.timeout_admin_us.unwrap_or(options.timeout_admin_us);
    options.bdev_retry_count = params.bdev_retry_count.unwrap_or(options.bdev_retry_count);
    if options.bdev_retry_count < -1 {
        return Err(RpcError::invalid_params("bdev_retry_count is -1 or more"));
    }
    options.io_queue_requests = params.io_queue_requests.unwrap_or(options.io_queue_requests);
    options.io_path_stat = params.io_path_stat.unwrap_or(options.io_path_stat);
    options.loss = (
        params.ctrlr_loss_timeout_sec.unwrap_or(options.loss.0),
        params.reconnect_delay_sec.unwrap_or(options.loss.1),
        params.fast_io_fail_timeout_sec.unwrap_or(options.loss.2),
    );
    reconnect(options.loss)?;
    if let Some(multipath) = params.multipath_opts {
        options.policy = multipath.policy()?;
    }
    if !ignored.is_empty() {
        complain!("bdev_nvme_set_options: {} ignored: the driver has its own ways", ignored.join(", "));
    }
    let again = json!({
        "action_on_timeout": if options.timeout_us == 0 { "none" } else { "reset" },
        "timeout_us": options.timeout_us,
        "timeout_admin_us": options.timeout_admin_us,
        "keep_alive_timeout_ms": options.keep_alive_timeout_ms,
        "bdev_retry_count": options.bdev_retry_count,
        "io_queue_requests": options.io_queue_requests,
        "ctrlr_loss_timeout_sec": options.loss.0,
        "reconnect_delay_sec": options.loss.1,
        "fast_io_fail_timeout_sec": options.loss.2,
        "multipath_opts": policy_json(options.policy),
        "io_path_stat": options.io_path_stat,
    });
    let mut state = app.state();
    state.nvme = options;
    state.journal.created(OPTIONS_KEY, "bdev_nvme_set_options", again);
    Ok(true)
}

fn reconnect((loss, delay, fast_fail): (i32, u32, u32)) -> Result<ReconnectPolicy, RpcError> {
    ReconnectPolicy::from_seconds(loss, delay, fast_fail).map_err(|why| RpcError::new(RpcError::EINVAL, why))
}

/// Under what the journal keeps what is no bdev: no bdev's name holds a line end.
const OPTIONS_KEY: &str = "nvme\noptions";

fn path_key(name: &str, id: &TransportId) -> String {
    format!("nvme\npath\n{name}\n{}", id.0.controller())
}

fn discovery_key(name: &str) -> String {
    format!("nvme\ndiscovery\n{name}")
}

/// Whether something that the journal keeps is still there.
pub(crate) fn exists(app: &App, key: &str) -> bool {
    if key == OPTIONS_KEY || app.initiator.discoveries().iter().any(|one| discovery_key(&one.name) == key) {
        return true;
    }
    let controllers = app.initiator.controllers();
    let mut paths = controllers.iter().flat_map(|one| one.paths.iter().map(|path| (&one.name, path)));
    paths.any(|(name, path)| path_key(name, &path.config.id) == key)
}

/// A port number: SPDK's schema says text, people and some tools send a number.
#[derive(Deserialize)]
#[serde(untagged)]
enum Service {
    Text(String),
    Number(u16),
}

impl Service {
    fn text(&self) -> String {
        match self {
            Service::Text(text) => text.clone(),
            Service::Number(number) => number.to_string(),
        }
    }
}

/// A controller's address, from SPDK's parameters.
fn transport_id(
    trtype: &str,
    traddr: &str,
    adrfam: Option<&str>,
    trsvcid: Option<&Service>,
    subnqn: Option<&str>,
    digests: (bool, bool),
) -> Result<TransportId, RpcError> {
    let wrong = |message: String| RpcError::new(RpcError::EINVAL, message);
    let uri = match trtype.to_ascii_uppercase().as_str() {
        "TCP" => {
            match adrfam.map(str::to_ascii_lowercase).as_deref() {
                None | Some("ipv4" | "ipv6") => {}
                Some(other) => return Err(wrong(format!("Failed to parse adrfam: {other}"))),
            }
            let subnqn = subnqn.ok_or_else(|| wrong("subnqn is needed over TCP".into()))?;
            let subnqn = Nqn::new(subnqn)
                .map_err(|_| wrong(format!("subnqn {subnqn} is not an NVMe qualified name")))?;
            let port = trsvcid.map_or_else(|| "4420".to_string(), Service::text);
            let port = port.parse().ok().filter(|port| *port != 0);
            let port = port.ok_or_else(|| wrong("trsvcid is a TCP port, 1 to 65535".into()))?;
            if traddr.is_empty() || traddr.len() > 255 {
                return Err(wrong("traddr is a name or an address".into()));
            }
            let (header_digest, data_digest) = digests;
            Uri::Tcp(nvme::TcpUri { host: traddr.into(), port, subnqn, nsid: 1, header_digest, data_digest })
        }
        "PCIE" => format!("nvme+pcie://{traddr}")
            .parse()
            .map_err(|error: nvme::UriError| wrong(error.to_string()))?,
        "VFIOUSER" => Uri::VfioUser(nvme::VfioUserUri { directory: traddr.into(), nsid: 1 }),
        other => {
            return Err(wrong(format!(
                "Failed to parse trtype: {other}; Ringbolt has PCIe, TCP and VFIOUSER"
            )));
        }
    };
    Ok(TransportId(uri))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AttachController {
    name: String,
    trtype: String,
    traddr: String,
    adrfam: Option<String>,
    trsvcid: Option<Service>,
    priority: Option<String>,
    subnqn: Option<String>,
    hostnqn: Option<String>,
    hostaddr: Option<String>,
    hostsvcid: Option<String>,
    prchk_reftag: Option<bool>,
    prchk_guard: Option<bool>,
    #[serde(default)]
    hdgst: bool,
    #[serde(default)]
    ddgst: bool,
    fabrics_connect_timeout_us: Option<u64>,
    multipath: Option<MultipathName>,
    num_io_queues: Option<u32>,
    ctrlr_loss_timeout_sec: Option<i32>,
    reconnect_delay_sec: Option<u32>,
    fast_io_fail_timeout_sec: Option<u32>,
    psk: Option<String>,
    max_bdevs: Option<u32>,
    dhchap_key: Option<String>,
    dhchap_ctrlr_key: Option<String>,
    allow_unrecognized_csi: Option<bool>,
    multipath_opts: Option<MultipathOpts>,
    disable_sq_flow_control: Option<bool>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum MultipathName {
    Disable,
    Failover,
    Multipath,
}

fn attach(app: &App, params: AttachController) -> Result<Vec<String>, RpcError> {
    off("priority", params.priority.as_deref(), "")?;
    off("hostaddr", params.hostaddr.as_deref(), "")?;
    off("hostsvcid", params.hostsvcid.as_deref(), "")?;
    off("prchk_reftag", params.prchk_reftag, false)?;
    off("prchk_guard", params.prchk_guard, false)?;
    // A host that was to prove who it is must not do without.
    off("psk", params.psk.as_deref(), "")?;
    off("dhchap_key", params.dhchap_key.as_deref(), "")?;
    off("dhchap_ctrlr_key", params.dhchap_ctrlr_key.as_deref(), "")?;
    off("allow_unrecognized_csi", params.allow_unrecognized_csi, false)?;
    if params.max_bdevs == Some(0) {
        return Err(RpcError::new(RpcError::EINVAL, "max_bdevs cannot be zero"));
    }
    if params.disable_sq_flow_control == Some(false) {
        // It is what SPDK's files say; the queue's slots bound it either way.
    }
    let id = transport_id(
        &params.trtype,
        &params.traddr,
        params.adrfam.as_deref(),
        params.trsvcid.as_ref(),
        params.subnqn.as_deref(),
        (params.hdgst, params.ddgst),
    )?;
    let options = app.state().nvme.clone();
    let mut path = PathConfig::new(id.clone());
    path.options = options.driver();
    path.count_io = options.io_path_stat;
    if let Some(us) = params.fabrics_connect_timeout_us.filter(|us| *us != 0) {
        path.options.timeout_ns = us.saturating_mul(1000);
    }
    path.options.hostnqn = params.hostnqn.as_deref().map(host_nqn).transpose()?;
    let count = params.num_io_queues.unwrap_or(1024);
    path.num_io_queues = u16::try_from(count)
        .ok()
        .filter(|count| *count != 0)
        .ok_or_else(|| RpcError::new(RpcError::EINVAL, "num_io_queues out of bounds, min: 1 max: 65535"))?;
    let loss = (
        params.ctrlr_loss_timeout_sec.unwrap_or(options.loss.0),
        params.reconnect_delay_sec.unwrap_or(options.loss.1),
        params.fast_io_fail_timeout_sec.unwrap_or(options.loss.2),
    );
    path.reconnect = reconnect(loss)?;
    let policy = params.multipath_opts.map_or(Ok(options.policy), MultipathOpts::policy)?;
    let multipath = params.multipath.unwrap_or(MultipathName::Multipath);
    let mut attach = Attach::new(&params.name, path);
    attach.multipath = match multipath {
        MultipathName::Disable => Multipathing::Disable,
        MultipathName::Failover => Multipathing::Failover,
        MultipathName::Multipath => Multipathing::Multipath,
    };
    (attach.policy, attach.retries_max) = (policy, options.retries_max());
    let names = app.initiator.attach(attach)?;
    let mut again = trid(&id);
    again.insert("name".into(), json!(params.name));
    again.insert("hdgst".into(), json!(params.hdgst));
    again.insert("ddgst".into(), json!(params.ddgst));
    again.insert("num_io_queues".into(), json!(count));
    again.insert("ctrlr_loss_timeout_sec".into(), json!(loss.0));
    again.insert("reconnect_delay_sec".into(), json!(loss.1));
    again.insert("fast_io_fail_timeout_sec".into(), json!(loss.2));
    let multipath = match multipath {
        MultipathName::Disable => "disable",
        MultipathName::Failover => "failover",
        MultipathName::Multipath => "multipath",
    };
    again.insert("multipath".into(), json!(multipath));
    again.insert("multipath_opts".into(), policy_json(policy));
    if let Some(hostnqn) = params.hostnqn {
        again.insert("hostnqn".into(), json!(hostnqn));
    }
    if let Some(us) = params.fabrics_connect_timeout_us {
        again.insert("fabrics_connect_timeout_us".into(), json!(us));
    }
    let key = path_key(&params.name, &id);
    app.state().journal.created(&key, "bdev_nvme_attach_controller", Value::Object(again));
    Ok(names)
}

fn host_nqn(text: &str) -> Result<Nqn, RpcError> {
    let message = format!("hostnqn {text} is not an NVMe qualified name");
    Nqn::new(text).map_err(|_| RpcError::new(RpcError::EINVAL, message))
}

/// A controller's address in SPDK's words.
fn trid(id: &TransportId) -> Map<String, Value> {
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DetachController {
    name: String,
    trtype: Option<String>,
    traddr: Option<String>,
    adrfam: Option<String>,
    trsvcid: Option<Service>,
    subnqn: Option<String>,
    hostaddr: Option<String>,
    hostsvcid: Option<String>,
}

fn detach(app: &App, params: DetachController) -> Result<bool, RpcError> {
    off("hostaddr", params.hostaddr.as_deref(), "")?;
    off("hostsvcid", params.hostsvcid.as_deref(), "")?;
    let same = |asked: Option<&str>, is: &str| asked.is_none_or(|asked| asked.eq_ignore_ascii_case(is));
    let which = |id: &TransportId| {
        let (adrfam, trsvcid) = id.service().unwrap_or(("", String::new()));
        same(params.trtype.as_deref(), id.trtype())
            && same(params.traddr.as_deref(), &id.traddr())
            && same(params.adrfam.as_deref(), adrfam)
            && same(params.trsvcid.as_ref().map(Service::text).as_deref(), &trsvcid)
            && same(params.subnqn.as_deref(), id.subnqn().unwrap_or(""))
    };
    app.initiator.detach(&params.name, which)?;
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MaybeNamed {
    name: Option<String>,
}

fn get_controllers(app: &App, params: MaybeNamed) -> Result<Vec<Value>, RpcError> {
    let mut controllers = app.initiator.controllers();
    if let Some(name) = params.name {
        controllers.retain(|controller| controller.name == name);
        if controllers.is_empty() {
            return Err(RpcError::new(RpcError::EINVAL, format!("Controller {name} does not exist")));
        }
    }
    let path = |path: &PathInfo| {
        let nqn = path.config.options.hostnqn.as_ref().map_or("", |nqn| nqn.as_str());
        let mut one = json!({
            "state": path.status.name(),
            "trid": trid(&path.config.id),
            "cntlid": path.cntlid,
            "host": { "nqn": nqn, "addr": "", "svcid": "" },
        });
        if let Some(failure) = &path.failure {
            one["failure"] = json!(failure);
        }
        one
    };
    let one = |controller: &bdev_nvme::ControllerInfo| {
        let paths: Vec<_> = controller.paths.iter().map(path).collect();
        json!({ "name": controller.name, "ctrlrs": paths })
    };
    Ok(controllers.iter().map(one).collect())
}

fn get_io_paths(app: &App, params: MaybeNamed) -> Result<Value, RpcError> {
    let paths = app.initiator.io_paths(params.name.as_deref());
    let groups = app.reactors.iter().enumerate().map(|(core, _)| {
        let of_core = paths.iter().filter(|path| path.core == core);
        let one = |path: &bdev_nvme::IoPath| {
            let mut transport = trid(&path.path.config.id);
            transport.remove("subnqn");
            json!({
                "bdev_name": path.bdev,
                "cntlid": path.path.cntlid,
                "current": path.current,
                "connected": path.connected,
                "accessible": matches!(path.ana, AnaState::Optimized | AnaState::NonOptimized),
                "ana_state": bdev_nvme::ana_name(path.ana),
                "transport": transport,
            })
        };
        json!({ "thread": thread_name(core), "io_paths": of_core.map(one).collect::<Vec<_>>() })
    });
    Ok(json!({ "poll_groups": groups.collect::<Vec<_>>() }))
}

fn get_path_iostat(app: &App, params: ByName) -> Result<Value, RpcError> {
    if !app.state().nvme.io_path_stat {
        let message = "nothing is counted by path: set io_path_stat with bdev_nvme_set_options";
        return Err(RpcError::new(EPERM, message));
    }
    let one = |(path, stats): &(PathInfo, bdev_nvme::PathStats)| {
        let counts = counts_of(|op| stats.op(op), stats.errors());
        json!({ "trid": trid(&path.config.id), "stat": counts })
    };
    let stats: Vec<Value> = app.initiator.path_stats(&params.name)?.iter().map(one).collect();
    Ok(json!({ "name": params.name, "stats": stats }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PreferredPath {
    name: String,
    cntlid: u16,
}

fn set_preferred_path(app: &App, params: PreferredPath) -> Result<bool, RpcError> {
    app.initiator.set_preferred(&params.name, params.cntlid)?;
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MultipathPolicy {
    name: String,
    policy: PolicyName,
    selector: Option<SelectorName>,
    rr_min_io: Option<u32>,
}

fn set_multipath_policy(app: &App, params: MultipathPolicy) -> Result<bool, RpcError> {
    let policy = policy(Some(params.policy), params.selector, params.rr_min_io)?;
    app.initiator.set_policy(&params.name, policy)?;
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ByName {
    name: String,
}

fn get_health(app: &App, params: ByName) -> Result<Value, RpcError> {
    let view = GetLogPage {
        lid: LogId::Health.to_wire(),
        length_bytes: HealthLog::SIZE as u64,
        ..GetLogPage::default()
    };
    let passed = Passed {
        queue: Queue::Admin,
        sqe: view.to_sqe(wire_nvme::NSID_ALL),
        data: AdminData::In(HealthLog::SIZE),
        metadata: AdminData::None,
        timeout: None,
    };
    let answer = app.initiator.pass_through(&params.name, passed)?;
    if !answer.status.is_success() {
        return Err(RpcError::new(RpcError::EIO, answer.status.to_string()));
    }
    let PassedThrough { data, path, .. } = answer;
    let bytes = data.first_chunk().ok_or_else(|| RpcError::internal("the log page is too short"))?;
    let health = HealthLog::decode(bytes);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_string();
    let identity = path.identity.ok_or_else(|| RpcError::internal("the controller was not identified"))?;
    let mut object = json!({
        "model_number": text(&identity.mn),
        "serial_number": text(&identity.sn),
        "firmware_revision": text(&identity.fr),
        "traddr": path.config.id.traddr(),
    });
    let object_of = health_json(&health);
    if let (Value::Object(object), Value::Object(more)) = (&mut object, object_of) {
        object.extend(more);
    }
    Ok(object)
}

/// The health log in SPDK's words.
pub(crate) fn health_json(health: &HealthLog) -> Value {
    // A counter of 128 bits that does not fit JSON's numbers is shown as the most that does.
    let wide = |value: u128| json!(u64::try_from(value).unwrap_or(u64::MAX));
    let celsius = |kelvins: u16| i32::from(kelvins) - 273;
    let mut object = json!({
        "critical_warning": health.critical_warning,
        "temperature_celsius": celsius(health.temperature_kelvins),
        "available_spare_percentage": health.spare_percent,
        "available_spare_threshold_percentage": health.spare_threshold_percent,
        "percentage_used": health.used_percent,
        "data_units_read": wide(health.data_units_read),
        "data_units_written": wide(health.data_units_written),
        "host_read_commands": wide(health.host_reads),
        "host_write_commands": wide(health.host_writes),
        "controller_busy_time": wide(health.busy_minutes),
        "power_cycles": wide(health.power_cycles),
        "power_on_hours": wide(health.power_on_hours),
        "unsafe_shutdowns": wide(health.unsafe_shutdowns),
        "media_errors": wide(health.media_errors),
        "num_err_log_entries": wide(health.error_log_entries),
        "warning_temperature_time_minutes": health.warning_temperature_minutes,
        "critical_composite_temperature_time_minutes": health.critical_temperature_minutes,
    });
    let sensors: Vec<i32> = health
        .sensors_kelvins
        .iter()
        .filter(|kelvins| **kelvins != 0)
        .map(|kelvins| celsius(*kelvins))
        .collect();
    if !sensors.is_empty() {
        object["temperature_sensors_celsius"] = json!(sensors);
    }
    object
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StartDiscovery {
    name: String,
    trtype: String,
    traddr: String,
    adrfam: Option<String>,
    trsvcid: Option<Service>,
    hostnqn: Option<String>,
    wait_for_attach: Option<bool>,
    attach_timeout_ms: Option<u64>,
    ctrlr_loss_timeout_sec: Option<i32>,
    reconnect_delay_sec: Option<u32>,
    fast_io_fail_timeout_sec: Option<u32>,
}

/// How long a discovery that is waited for may take where nothing is said.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(30);
/// The discovery port that IANA assigned.
const DISCOVERY_PORT: u16 = 8009;

fn start_discovery(app: &App, params: StartDiscovery) -> Result<bool, RpcError> {
    let port = params.trsvcid.unwrap_or(Service::Number(DISCOVERY_PORT));
    let nqn = wire_nvme::fabrics::DISCOVERY_NQN;
    let id = transport_id(
        &params.trtype,
        &params.traddr,
        params.adrfam.as_deref(),
        Some(&port),
        Some(nqn),
        (false, false),
    )?;
    let options = app.state().nvme.clone();
    let mut path = PathConfig::new(id.clone());
    path.options = options.driver();
    path.count_io = options.io_path_stat;
    path.options.hostnqn = params.hostnqn.as_deref().map(host_nqn).transpose()?;
    let loss = (
        params.ctrlr_loss_timeout_sec.unwrap_or(options.loss.0),
        params.reconnect_delay_sec.unwrap_or(options.loss.1),
        params.fast_io_fail_timeout_sec.unwrap_or(options.loss.2),
    );
    path.reconnect = reconnect(loss)?;
    let wait = params.wait_for_attach.unwrap_or(false);
    let timeout = params.attach_timeout_ms.filter(|ms| *ms != 0).map(Duration::from_millis);
    let wait_for = (wait || timeout.is_some()).then(|| timeout.unwrap_or(DISCOVERY_TIMEOUT));
    let discovery = Discovery {
        name: params.name.clone(),
        path,
        retries_max: options.retries_max(),
        policy: options.policy,
    };
    app.initiator.start_discovery(discovery, wait_for)?;
    let mut again = trid(&id);
    again.remove("subnqn");
    again.insert("name".into(), json!(params.name));
    again.insert("wait_for_attach".into(), json!(wait));
    again.insert("ctrlr_loss_timeout_sec".into(), json!(loss.0));
    again.insert("reconnect_delay_sec".into(), json!(loss.1));
    again.insert("fast_io_fail_timeout_sec".into(), json!(loss.2));
    if let Some(hostnqn) = params.hostnqn {
        again.insert("hostnqn".into(), json!(hostnqn));
    }
    let key = discovery_key(&params.name);
    app.state().journal.created(&key, "bdev_nvme_start_discovery", Value::Object(again));
    Ok(true)
}

fn stop_discovery(app: &App, params: ByName) -> Result<bool, RpcError> {
    app.initiator.stop_discovery(&params.name)?;
    Ok(true)
}

fn get_discovery_info(app: &App, _params: Nothing) -> Result<Vec<Value>, RpcError> {
    let one = |info: bdev_nvme::DiscoveryInfo| {
        let referrals: Vec<Value> = info.entries.iter().map(|id| json!({ "trid": trid(id) })).collect();
        let mut object = json!({ "name": info.name, "trid": trid(&info.id), "referrals": referrals });
        if let Some(failure) = info.failure {
            object["failure"] = json!(failure);
        }
        object
    };
    Ok(app.initiator.discoveries().into_iter().map(one).collect())
}

mod tools;

#[cfg(test)]
mod tests;
