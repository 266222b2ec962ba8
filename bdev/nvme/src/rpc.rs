//! The module of NVMe controllers for the control plane: SPDK's `bdev_nvme_*` methods.

use std::net::SocketAddr;

use bdev::rpc::counts_of;
use control::json::{Value, json};
use control::{ByName, JobHandle, Method, Module, RpcError, TextOrNumber, thread_name};
use nvme::{AdminData, Uri};
use wire_nvme::admin::GetLogPage;
use wire_nvme::log::{AnaState, HealthLog, LogId};

use crate::{
    ControllerGroupInfo, InitiatorError, IoPath, PassthroughCommand, PassthroughReply, PathInfo, PathStats,
    QueueKind, TransportId,
};

mod attach;
mod authentication;
mod hotplug;
mod mdns;
mod module;
mod options;
mod tools;

pub use module::NvmeModule;
use module::{NO_BDEV, NO_CONTROLLER, canonical_address, trid};
use options::{PolicyName, SelectorName};

impl Module for NvmeModule {
    const NAME: &'static str = "bdev_nvme";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];

    fn methods() -> Vec<Method<NvmeModule>> {
        let mut methods = vec![
            Method::job("bdev_nvme_detach_controller", detach)
                .text(
                    "Detaches the paths of a controller that match, one after the other. Cancelled, it leaves the rest.",
                    "true",
                )
                .errors(&[NO_CONTROLLER, (RpcError::ETIMEDOUT, "I/O in flight did not complete")]),
            Method::query("bdev_nvme_get_controllers", get_controllers)
                .text("Describes controllers and their paths.", "array of `name`, `ctrlrs`")
                .errors(&[(RpcError::EINVAL, "there is no such controller")]),
            Method::query("bdev_nvme_get_io_paths", get_io_paths)
                .text("Describes the paths of each channel.", "`poll_groups`"),
            Method::query("bdev_nvme_get_path_iostat", get_path_iostat)
                .text("I/O statistics of each path of a bdev.", "`name`, `stats`")
                .errors(&[NO_BDEV, (RpcError::EPERM, "path statistics are off")]),
            Method::update("bdev_nvme_set_preferred_path", set_preferred_path)
                .text("Prefers a controller among paths of the same ANA state.", "true")
                .errors(&[NO_BDEV]),
            Method::update("bdev_nvme_set_multipath_policy", set_multipath_policy)
                .text("Sets how a bdev selects among its paths.", "true")
                .errors(&[NO_BDEV]),
            Method::query("bdev_nvme_get_controller_health_info", get_health)
                .text("The SMART / health log page.", "object of SPDK's fields")
                .errors(&[NO_CONTROLLER, (RpcError::EIO, "the command failed")]),
        ];
        methods.extend(options::methods());
        methods.extend(attach::methods());
        methods.extend(authentication::methods());
        methods.extend(hotplug::methods());
        methods.extend(mdns::methods());
        methods.extend(tools::methods());
        methods
    }

    /// Releases reservations, so that the next program need not take them over.
    fn drain(&self) {
        self.initiator.release_reservations();
    }

    fn stop(&self) {
        self.hotplug.stop();
        self.mdns.stop_all();
        self.initiator.stop_all();
    }

    fn report(&self) -> Value {
        let controllers = self.initiator.controllers();
        let paths: usize = controllers.iter().map(|one| one.paths.len()).sum();
        json!({ "controllers": controllers.len(), "paths": paths,
            "discoveries": self.initiator.discoveries().len() })
    }
}

impl From<InitiatorError> for RpcError {
    fn from(error: InitiatorError) -> RpcError {
        let code = match &error {
            InitiatorError::NotFound(_) => RpcError::ENODEV,
            InitiatorError::Exists(_) => RpcError::EALREADY,
            InitiatorError::Invalid(_) => RpcError::EINVAL,
            InitiatorError::Attach(_) | InitiatorError::Admin(_) => RpcError::EIO,
            InitiatorError::NoReactor => RpcError::INTERNAL,
            InitiatorError::Busy(_) => RpcError::EBUSY,
            InitiatorError::Timeout(_) => RpcError::ETIMEDOUT,
            InitiatorError::Cancelled => RpcError::ECANCELED,
        };
        RpcError::new(code, error.to_string())
    }
}

control::parameters! {
    struct DetachController {
        /// Controller; of its paths, those that match the others
        name: String,
        /// Transport
        trtype: Option<String>,
        /// Address
        traddr: Option<String>,
        /// Address family
        adrfam: Option<String>,
        /// Port
        trsvcid: Option<TextOrNumber>,
        /// Subsystem
        subnqn: Option<String>,
        /// IP address of this machine that connections come from
        hostaddr: Option<String>,
        /// Port that they come from
        hostsvcid: Option<TextOrNumber>,
    }
}

fn detach(module: &NvmeModule, params: DetachController, job: &JobHandle) -> Result<bool, RpcError> {
    let same =
        |wanted: Option<&str>, value: &str| wanted.is_none_or(|wanted| wanted.eq_ignore_ascii_case(value));
    let source = attach::source_of(params.hostaddr.as_deref(), params.hostsvcid.as_ref())?;
    let is_from = |wanted: SocketAddr, source: SocketAddr| {
        wanted.ip() == source.ip() && [0, source.port()].contains(&wanted.port())
    };
    let matches = |id: &TransportId| {
        let (adrfam, trsvcid) = id.service().unwrap_or(("", String::new()));
        let traddr = params.traddr.as_deref().map(canonical_address);
        same(params.trtype.as_deref(), id.trtype())
            && same(traddr.as_deref(), &canonical_address(&id.traddr()))
            && same(params.adrfam.as_deref(), adrfam)
            && same(params.trsvcid.as_ref().map(|port| port.0.as_str()), &trsvcid)
            && same(params.subnqn.as_deref(), id.subnqn().unwrap_or(""))
            && source.is_none_or(|source| id.source().is_some_and(|of| is_from(source, of)))
    };
    for controller in module.initiator.controllers() {
        let is_named = controller.name == params.name;
        let paths = controller.paths.iter().map(|path| &path.config.id);
        // Before they are detached: hot plug must not attach them again.
        for id in paths.filter(|id| is_named && matches!(id.0, Uri::Pcie(_)) && matches(id)) {
            module.hotplug.plan().detached(id);
        }
    }
    module.initiator.detach(&params.name, matches, job)?;
    Ok(true)
}

control::parameters! {
    struct OptionalName {
        /// One of them; all without
        name: Option<String>,
    }
}

fn get_controllers(module: &NvmeModule, params: OptionalName) -> Result<Vec<Value>, RpcError> {
    let mut controllers = module.initiator.controllers();
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
    let one = |controller: &ControllerGroupInfo| {
        let paths: Vec<_> = controller.paths.iter().map(path).collect();
        json!({ "name": controller.name, "ctrlrs": paths })
    };
    Ok(controllers.iter().map(one).collect())
}

fn get_io_paths(module: &NvmeModule, params: OptionalName) -> Result<Value, RpcError> {
    let paths = module.initiator.io_paths(params.name.as_deref());
    let groups = (0..module.reactors).map(|core| {
        let of_core = paths.iter().filter(|path| path.core == core);
        let one = |path: &IoPath| {
            let mut transport = trid(&path.path.config.id);
            transport.remove("subnqn");
            json!({
                "bdev_name": path.bdev,
                "cntlid": path.path.cntlid,
                "current": path.current,
                "connected": path.connected,
                "accessible": matches!(path.ana, AnaState::Optimized | AnaState::NonOptimized),
                "ana_state": crate::ana_name(path.ana),
                "transport": transport,
            })
        };
        json!({ "thread": thread_name(core), "io_paths": of_core.map(one).collect::<Vec<_>>() })
    });
    Ok(json!({ "poll_groups": groups.collect::<Vec<_>>() }))
}

fn get_path_iostat(module: &NvmeModule, params: ByName) -> Result<Value, RpcError> {
    if !module.options().io_path_stat {
        let message = "path statistics are off: set io_path_stat with bdev_nvme_set_options";
        return Err(RpcError::new(RpcError::EPERM, message));
    }
    let one = |(path, stats): &(PathInfo, PathStats)| {
        let counts = counts_of(|op| stats.op(op), stats.errors());
        json!({ "trid": trid(&path.config.id), "stat": counts })
    };
    let stats: Vec<Value> = module.initiator.path_stats(&params.name)?.iter().map(one).collect();
    Ok(json!({ "name": params.name, "stats": stats }))
}

control::parameters! {
    struct PreferredPath {
        /// Bdev
        name: String,
        /// Controller identifier
        cntlid: u16,
    }
}

fn set_preferred_path(module: &NvmeModule, params: PreferredPath) -> Result<bool, RpcError> {
    module.initiator.set_preferred(&params.name, params.cntlid)?;
    Ok(true)
}

control::parameters! {
    struct MultipathPolicy {
        /// Bdev
        name: String,
        /// Policy
        policy: PolicyName,
        /// How active_active selects; without, round_robin
        selector: Option<SelectorName>,
        /// I/Os on a path before the next, for round_robin; without, 1
        rr_min_io: Option<u32>,
    }
}

fn set_multipath_policy(module: &NvmeModule, params: MultipathPolicy) -> Result<bool, RpcError> {
    let policy = options::policy(Some(params.policy), params.selector, params.rr_min_io)?;
    module.initiator.set_policy(&params.name, policy)?;
    Ok(true)
}

fn get_health(module: &NvmeModule, params: ByName) -> Result<Value, RpcError> {
    let command = GetLogPage {
        lid: LogId::Health.to_wire(),
        length_bytes: HealthLog::SIZE as u64,
        ..GetLogPage::default()
    };
    let passed = PassthroughCommand {
        queue: QueueKind::Admin,
        sqe: command.to_sqe(wire_nvme::NSID_ALL),
        data: AdminData::In(HealthLog::SIZE),
        metadata: AdminData::None,
        timeout: None,
    };
    let completion = module.initiator.pass_through(&params.name, passed)?;
    if !completion.status.is_success() {
        return Err(RpcError::new(RpcError::EIO, completion.status.to_string()));
    }
    let PassthroughReply { data, path, .. } = completion;
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
    if let (Value::Object(object), Value::Object(more)) = (&mut object, health_json(&health)) {
        object.extend(more);
    }
    Ok(object)
}

/// The SMART / health log page under SPDK's names.
pub fn health_json(health: &HealthLog) -> Value {
    // 128-bit counters saturate at the largest JSON integer, 2^64 - 1.
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

#[cfg(test)]
mod tests;
