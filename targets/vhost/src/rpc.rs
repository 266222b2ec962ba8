//! The module of the target for the control plane: the methods `vhost_*` and `virtio_blk_*`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bdev::rpc::{STILL_OPEN, conclude};
use bdev::{Closing, PreparedReservations, Registry};
use control::json::{Value, json};
use control::{Method, Metric, MetricSamples, Module, NoParameters, RpcError};
use reactor::ReactorHandle;
use scsi::{ScsiDeviceOwner, ScsiDeviceSource};
use target_shell::{ConnectionLimits, canonical_mask};

use crate::limits::CONNECTIONS_MAX;
use crate::{
    Coalescing, VhostBackendInfo, VhostBlkConfig, VhostControllerInfo, VhostScsiTargetInfo, VhostSessionInfo,
    VhostTarget, VhostTargetError,
};

/// The only transport of virtio-blk controllers.
const TRANSPORT: &str = "vhost_user_blk";

/// The vhost-user target as a [`Module`].
pub struct VhostModule {
    target: VhostTarget,
}

impl VhostModule {
    /// A target without controllers on `reactors`, for the devices of `registry`, whose sockets are in
    /// `directory`.
    pub fn new(registry: Registry, reactors: &[ReactorHandle], directory: PathBuf) -> Arc<VhostModule> {
        Arc::new(VhostModule { target: VhostTarget::new(registry, reactors, directory) })
    }

    /// The target.
    pub fn target(&self) -> &VhostTarget {
        &self.target
    }
}

const UNRESPONSIVE: (i64, &str) = (RpcError::ETIMEDOUT, "a reactor does not respond; nothing was changed");
const NOT_FOUND: (i64, &str) = (RpcError::ENODEV, "there is no such controller");

impl VhostModule {
    /// The targets of SCSI hosts, as SCSI devices.
    pub fn scsi_devices(&self) -> ScsiDeviceSource {
        let target = self.target.clone();
        Box::new(move || target.configured().into_iter().flat_map(scsi_targets).collect())
    }
}

fn scsi_targets(controller: VhostControllerInfo) -> Vec<ScsiDeviceOwner> {
    let VhostBackendInfo::Scsi { targets, .. } = controller.backend else { return Vec::new() };
    let owner = |number| ScsiDeviceOwner::VhostTarget { controller: controller.name.clone(), number };
    targets.iter().map(|target| owner(target.number)).collect()
}

impl Module for VhostModule {
    const NAME: &'static str = "vhost_blk";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<VhostModule>> {
        vec![
            Method::update("vhost_create_blk_controller", create)
                .text("Makes a bdev a virtio-blk device of vhost-user clients, such as QEMU, at a UNIX socket.", "true")
                .canonical(|module: &VhostModule, params: &mut Create| {
                    params.dev_name = module.target.bdev_name(&params.dev_name);
                    set_canonical_mask(&mut params.cpumask)
                })
                .errors(&[
                    (RpcError::INVALID_PARAMS, "a parameter is invalid, or the bdev has blocks that virtio lacks"),
                    (RpcError::EEXIST, "the controller exists"),
                    (RpcError::ENODEV, "there is no such bdev"),
                    (RpcError::ENOSPC, "there are as many controllers as the target has"),
                    (RpcError::INTERNAL, "the socket cannot be created, or the target is stopping"),
                    UNRESPONSIVE,
                ]),
            Method::concluded_update("vhost_delete_controller", delete, conclude)
                .text("Deletes a controller without clients, and its socket.", "true")
                .errors(&[NOT_FOUND, (RpcError::EBUSY, "clients are connected"), UNRESPONSIVE, STILL_OPEN]),
            Method::query("vhost_get_controllers", get)
                .text(
                    "Describes controllers.",
                    "array of controllers with `ctrlr`, `cpumask`, `delay_base_us`, `iops_threshold`, `socket`, `sessions` \
                     and `backend_specific`; a session has `vid`, `id`, `name`, `started`, `max_queues`, \
                     `inflight_task_cnt` and `virtqueues`, those that run, with `index` and `lcore`",
                )
                .errors(&[NOT_FOUND, UNRESPONSIVE]),
            Method::update("vhost_controller_set_coalescing", set_coalescing)
                .text(
                    "Delays the notifications of drivers whose virtqueues are busy: by `delay_base_us` for each multiple \
                     of the threshold beyond it, at most 10 ms.",
                    "true",
                )
                .errors(&[(RpcError::INVALID_PARAMS, "a value is too small"), NOT_FOUND, UNRESPONSIVE]),
            Method::update("vhost_set_options", set_options)
                .at_any_stage()
                .text(
                    "Sets how many connections there may be to all controllers, for clients that come from now on. What is \
                     left out is as by default. Not an SPDK method.",
                    "true",
                )
                .errors(&[(RpcError::INVALID_PARAMS, "a limit is 0 or beyond 512")]),
            Method::query("vhost_get_options", |module: &VhostModule, _: NoParameters| {
                Ok::<_, RpcError>(module.target.limits().named("controller"))
            })
            .text("Returns the options. Not an SPDK method.", "the parameters of `vhost_set_options` that are set"),
            Method::query("vhost_get_peers", |module: &VhostModule, _: NoParameters| {
                Ok::<_, RpcError>(module.target.peers())
            })
            .text(
                "Lists the processes that are connected, those with the most connections first. Not an SPDK method.",
                "array with `peer`, `connections`, and `connections_max`, which it may have while others have theirs",
            ),
            Method::update("virtio_blk_create_transport", create_transport)
                .text("Fails: the only transport, `vhost_user_blk`, exists from the start.", "never")
                .errors(&[
                    (RpcError::EEXIST, "the transport exists"),
                    (RpcError::INVALID_PARAMS, "there is no such transport"),
                ]),
            Method::query("virtio_blk_get_transports", get_transports)
                .text("Lists the transports of virtio-blk controllers.", "array of transports with `name`")
                .errors(&[(RpcError::ENODEV, "there is no such transport")]),
        ]
    }

    fn drain(&self) {
        self.target.shutdown();
    }

    fn stop(&self) {
        self.target.close();
    }

    fn save(&self) -> Vec<Value> {
        let calls = |info: VhostControllerInfo| {
            let coalescing = saved_coalescing(&info);
            let VhostBackendInfo::Blk { config, .. } = info.backend else { return Vec::new() };
            // It could not be created again.
            if info.is_without_bdev {
                return Vec::new();
            }
            let mut params = json!({
                "ctrlr": config.name,
                "dev_name": config.bdev_name,
                "readonly": config.read_only,
                "packed_ring": config.packed_ring,
                "transport": TRANSPORT,
            });
            if let Some(cpumask) = config.cpumask {
                params["cpumask"] = json!(cpumask);
            }
            let create = json!({ "method": "vhost_create_blk_controller", "params": params });
            [create].into_iter().chain(coalescing).collect()
        };
        let limits = self.target.limits();
        let options = (limits != ConnectionLimits::new(CONNECTIONS_MAX))
            .then(|| json!({ "method": "vhost_set_options", "params": limits.named("controller") }));
        options.into_iter().chain(self.target.configured().into_iter().flat_map(calls)).collect()
    }

    fn metrics() -> Vec<&'static Metric> {
        target_shell::connection_metrics()
    }

    fn collect(&self, samples: &mut MetricSamples) {
        target_shell::collect_connections("vhost", self.target.connection_totals(), samples);
    }

    fn report(&self) -> Value {
        json!({ "controllers": self.target.configured().len() })
    }
}

control::parameters! {
    struct SetOptions {
        /// Connections of all clients that have begun a session, to all controllers
        max_connections: u32 = CONNECTIONS_MAX,
        /// Of these, of one process; half of what others leave, but at least 16, if left out. All processes
        /// of a user have seven eighths
        max_connections_per_peer: Option<u32>,
        /// Of these, to one controller; three quarters of what others leave, but at least 16, if left out
        max_connections_per_controller: Option<u32>,
    }
}

fn set_options(module: &VhostModule, params: SetOptions) -> Result<bool, RpcError> {
    module.target.set_limits(ConnectionLimits {
        max: params.max_connections,
        per_peer_max: params.max_connections_per_peer,
        per_object_max: params.max_connections_per_controller,
    })?;
    Ok(true)
}

impl From<VhostTargetError> for RpcError {
    fn from(error: VhostTargetError) -> RpcError {
        let code = match &error {
            VhostTargetError::Bdev(bdev::BdevError::NotFound { .. }) | VhostTargetError::NotFound(_) => {
                RpcError::ENODEV
            }
            VhostTargetError::Invalid(_) | VhostTargetError::CpuMask(_) => RpcError::INVALID_PARAMS,
            VhostTargetError::Exists(_) | VhostTargetError::TargetExists(_) => RpcError::EEXIST,
            VhostTargetError::Busy(_) | VhostTargetError::NoTarget(_) | VhostTargetError::Started(_) => {
                RpcError::EBUSY
            }
            VhostTargetError::TooMany(_) | VhostTargetError::NoFreeTarget => RpcError::ENOSPC,
            VhostTargetError::NotApplied(_)
            | VhostTargetError::Shell(target_shell::ShellError::Unresponsive(_)) => RpcError::ETIMEDOUT,
            _ => RpcError::INTERNAL,
        };
        RpcError::new(code, error.to_string())
    }
}

control::parameters! {
    struct Create {
        /// Name of the controller and of its socket's file, in the directory that `serve --vhost-socket-dir`
        /// names
        ctrlr: String,
        /// The bdev, by name, alias or UUID
        dev_name: String,
        /// Reject writes
        readonly: bool = false,
        /// Offer packed virtqueues
        packed_ring: bool = false,
        /// Cores whose reactors serve it, as a mask such as 0x3 or a list such as [0,1]; all if left out
        cpumask: Option<String>,
    }
    only("vhost-user is the only transport") { transport: String = TRANSPORT.to_string() }
}

control::parameters! {
    struct SetCoalescing {
        /// The controller
        ctrlr: String,
        /// Delay for each multiple of the threshold beyond it; 0 for none
        delay_base_us: u32 ["us"],
        /// Requests a second of a virtqueue from which on there is a delay
        iops_threshold: u32,
    }
}

control::parameters! {
    struct Controller {
        /// The controller
        ctrlr: String,
    }
}

control::parameters! {
    struct Get {
        /// The controller; all if left out
        name: Option<String>,
    }
}

control::parameters! {
    struct Transport {
        /// The transport
        name: String,
    }
}

control::parameters! {
    struct GetTransports {
        /// The transport; all if left out
        name: Option<String>,
    }
}

fn create(module: &VhostModule, params: Create) -> Result<bool, RpcError> {
    let Create { ctrlr: name, dev_name: bdev_name, readonly: read_only, packed_ring, cpumask } = params;
    module.target.create(VhostBlkConfig { name, bdev_name, read_only, packed_ring, cpumask })?;
    Ok(true)
}

fn set_coalescing(module: &VhostModule, params: SetCoalescing) -> Result<bool, RpcError> {
    let SetCoalescing { ctrlr, delay_base_us, iops_threshold } = params;
    module.target.set_coalescing(&ctrlr, Coalescing { delay_base_us, iops_threshold })?;
    Ok(true)
}

/// The call that sets how a controller notifies, if it was set.
fn saved_coalescing(info: &VhostControllerInfo) -> Option<Value> {
    let Coalescing { delay_base_us, iops_threshold } = info.coalescing;
    (info.coalescing != Coalescing::default()).then(|| {
        json!({ "method": "vhost_controller_set_coalescing", "params": {
            "ctrlr": info.name, "delay_base_us": delay_base_us, "iops_threshold": iops_threshold,
        } })
    })
}

fn delete(module: &VhostModule, params: Controller) -> Result<Closing, RpcError> {
    Ok(module.target.delete(&params.ctrlr)?)
}

fn get(module: &VhostModule, params: Get) -> Result<Vec<Value>, RpcError> {
    let mut controllers = module.target.controllers()?;
    if let Some(name) = params.name {
        controllers.retain(|controller| controller.name == name);
        if controllers.is_empty() {
            return Err(VhostTargetError::NotFound(name).into());
        }
    }
    let describe = |info: VhostControllerInfo| {
        let backend = match info.backend {
            VhostBackendInfo::Blk { config, read_only } => json!({ "block": {
                "bdev": config.bdev_name,
                "readonly": read_only,
                "packed_ring": config.packed_ring,
                "transport": TRANSPORT,
            } }),
            VhostBackendInfo::Scsi { targets, .. } => {
                let target = |target: &VhostScsiTargetInfo| {
                    let number = target.number;
                    json!({
                        "scsi_dev_num": number,
                        "id": number,
                        "target_name": format!("Target {number}"),
                        "luns": [{ "id": 0, "bdev_name": target.bdev_name }],
                    })
                };
                json!({ "scsi": targets.iter().map(target).collect::<Vec<Value>>() })
            }
        };
        let name = &info.name;
        let virtqueue = |(index, cpu): &(usize, u32)| json!({ "index": index, "lcore": cpu });
        let session = |(number, session): (usize, &VhostSessionInfo)| {
            json!({
                "vid": number,
                "id": session.id,
                "name": format!("{name}s{number}"),
                "started": session.is_started,
                "max_queues": session.queues,
                "inflight_task_cnt": session.requests,
                "virtqueues": session.running.iter().map(virtqueue).collect::<Vec<Value>>(),
            })
        };
        json!({
            "ctrlr": name,
            "cpumask": info.cpumask,
            "delay_base_us": info.coalescing.delay_base_us,
            "iops_threshold": info.coalescing.iops_threshold,
            "socket": info.socket.to_string_lossy(),
            "sessions": info.sessions.iter().enumerate().map(session).collect::<Vec<Value>>(),
            "backend_specific": backend,
        })
    };
    Ok(controllers.into_iter().map(describe).collect())
}

fn create_transport(_: &VhostModule, params: Transport) -> Result<bool, RpcError> {
    if params.name == TRANSPORT {
        return Err(RpcError::new(RpcError::EEXIST, format!("the transport {TRANSPORT} exists")));
    }
    Err(RpcError::invalid_params(format!("name: the only transport is {TRANSPORT}")))
}

fn get_transports(_: &VhostModule, params: GetTransports) -> Result<Vec<Value>, RpcError> {
    match params.name {
        Some(name) if name != TRANSPORT => {
            Err(RpcError::new(RpcError::ENODEV, format!("there is no transport {name}")))
        }
        _ => Ok(vec![json!({ "name": TRANSPORT })]),
    }
}

/// The SCSI controllers of the target as a [`Module`]: a subsystem of its own, as in SPDK.
pub struct VhostScsiModule {
    target: VhostTarget,
}

impl VhostScsiModule {
    /// The SCSI controllers of the target of `vhost`.
    pub fn new(vhost: &VhostModule) -> Arc<VhostScsiModule> {
        Arc::new(VhostScsiModule { target: vhost.target.clone() })
    }
}

fn set_canonical_mask(cpumask: &mut Option<String>) -> Result<(), RpcError> {
    *cpumask = cpumask.as_deref().map(canonical_mask).transpose().map_err(VhostTargetError::from)?;
    Ok(())
}

/// As SPDK, whatever it is.
fn invalid(error: VhostTargetError) -> RpcError {
    match error {
        error @ (VhostTargetError::NotApplied(_) | VhostTargetError::Shell(_)) => error.into(),
        error => RpcError::invalid_params(error),
    }
}

impl Module for VhostScsiModule {
    const NAME: &'static str = "vhost_scsi";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<VhostScsiModule>> {
        const INVALID: &str = "there is no such controller or target, or the number is above 7";
        vec![
            Method::update("vhost_create_scsi_controller", create_scsi)
                .text(
                    "Makes a virtio SCSI host for vhost-user clients, such as QEMU, at a UNIX socket. It has no targets.",
                    "true",
                )
                // The other call says whether it has started.
                .canonical(|_: &VhostScsiModule, params: &mut CreateScsi| {
                    params.delay = true;
                    set_canonical_mask(&mut params.cpumask)
                })
                .errors(&[
                    (RpcError::INVALID_PARAMS, "the name is invalid or in use, or there are too many controllers"),
                    (RpcError::INTERNAL, "the socket cannot be created"),
                    UNRESPONSIVE,
                ]),
            Method::update("vhost_start_scsi_controller", start_scsi)
                .text("Creates the socket of a SCSI controller that was created with `delay`.", "true")
                .errors(&[
                    (RpcError::INVALID_PARAMS, "there is no such controller, or it has started"),
                    (RpcError::INTERNAL, "the socket cannot be created"),
                ]),
            Method::prepared_update("vhost_scsi_controller_add_target", prepare_target, add_target)
                .text(
                    "Adds a bdev to a SCSI controller as LUN 0 of a target. Guests learn of it.",
                    "the target's number",
                )
                .assigns(&["scsi_target_num=-1"])
                .canonical(|module: &VhostScsiModule, params: &mut AddTarget| {
                    params.scsi_target_num = params.scsi_target_num.max(-1);
                    params.bdev_name = module.target.bdev_name(&params.bdev_name);
                    params.ptpl_file = params.ptpl_file.take().filter(|file| !file.is_empty());
                    Ok(())
                })
                .errors(&[
                    (
                        RpcError::INVALID_PARAMS,
                        "there is no such controller or bdev, the number is above 7 or in use, none is free, or the file \
                         cannot be used",
                    ),
                    UNRESPONSIVE,
                ]),
            Method::concluded_update("vhost_scsi_controller_remove_target", remove_target, conclude)
                .text("Removes a target from a SCSI controller. Guests learn of it; commands in flight complete.", "true")
                .errors(&[(RpcError::INVALID_PARAMS, INVALID), UNRESPONSIVE, STILL_OPEN]),
        ]
    }

    fn save(&self) -> Vec<Value> {
        let calls = |info: VhostControllerInfo| {
            let coalescing = saved_coalescing(&info);
            let VhostBackendInfo::Scsi { is_started, targets } = info.backend else { return Vec::new() };
            let name = info.name;
            // Clients that come back at once find all targets.
            let mut params = json!({ "ctrlr": name, "delay": true });
            if let Some(cpumask) = info.configured_cpumask {
                params["cpumask"] = json!(cpumask);
            }
            let mut calls = vec![json!({ "method": "vhost_create_scsi_controller", "params": params })];
            calls.extend(coalescing);
            calls.extend(targets.into_iter().map(|target| {
                let mut params =
                    json!({ "ctrlr": name, "scsi_target_num": target.number, "bdev_name": target.bdev_name });
                if let Some(file) = target.ptpl_file {
                    params["ptpl_file"] = json!(file);
                }
                json!({ "method": "vhost_scsi_controller_add_target", "params": params })
            }));
            if is_started {
                calls.push(json!({ "method": "vhost_start_scsi_controller", "params": { "ctrlr": name } }));
            }
            calls
        };
        self.target.configured().into_iter().flat_map(calls).collect()
    }
}

control::parameters! {
    struct CreateScsi {
        /// Name of the controller and of its socket's file, in the directory that `serve --vhost-socket-dir`
        /// names
        ctrlr: String,
        /// Create the socket only with `vhost_start_scsi_controller`, when targets have been added
        delay: bool = false,
        /// Cores whose reactors serve it, as a mask such as 0x3 or a list such as [0,1]; all if left out
        cpumask: Option<String>,
    }
}

control::parameters! {
    struct AddTarget {
        /// The controller
        ctrlr: String,
        /// Number of the target, 0 to 7; a negative one takes the first that is free
        scsi_target_num: i32,
        /// The bdev, by name, alias or UUID
        bdev_name: String,
        /// File that keeps persistent reservations of the bdev over a power loss (APTPL); not in SPDK
        ptpl_file: Option<String>,
    }
}

control::parameters! {
    struct RemoveTarget {
        /// The controller
        ctrlr: String,
        /// Number of the target, 0 to 7
        scsi_target_num: u32,
    }
}

fn create_scsi(module: &VhostScsiModule, params: CreateScsi) -> Result<bool, RpcError> {
    module.target.create_scsi(&params.ctrlr, params.delay, params.cpumask).map_err(invalid)?;
    Ok(true)
}

fn start_scsi(module: &VhostScsiModule, params: Controller) -> Result<bool, RpcError> {
    module.target.start_scsi(&params.ctrlr).map_err(invalid)?;
    Ok(true)
}

/// Opens the file of the reservations, which may block, before other updates have to wait.
fn prepare_target(
    module: &VhostScsiModule,
    mut params: AddTarget,
) -> Result<(AddTarget, PreparedReservations), RpcError> {
    params.ptpl_file = params.ptpl_file.filter(|file| !file.is_empty());
    let file = params.ptpl_file.as_deref().map(Path::new);
    let reservations = module.target.prepare_target(&params.bdev_name, file).map_err(invalid)?;
    Ok((params, reservations))
}

fn add_target(
    module: &VhostScsiModule,
    (params, reservations): (AddTarget, PreparedReservations),
) -> Result<u8, RpcError> {
    // Numbers above 255 are as invalid as 255.
    let number =
        (params.scsi_target_num >= 0).then(|| u8::try_from(params.scsi_target_num).unwrap_or(u8::MAX));
    let file = params.ptpl_file.map(PathBuf::from);
    let added = module.target.add_target_with(&params.ctrlr, number, &params.bdev_name, file, reservations);
    added.map_err(invalid)
}

fn remove_target(module: &VhostScsiModule, params: RemoveTarget) -> Result<Closing, RpcError> {
    let number = u8::try_from(params.scsi_target_num).unwrap_or(u8::MAX);
    module.target.remove_target(&params.ctrlr, number).map_err(invalid)
}
