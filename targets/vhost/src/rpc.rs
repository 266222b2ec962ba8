//! The module of the target for the control plane: the methods `vhost_*` and `virtio_blk_*`.

use std::path::PathBuf;
use std::sync::Arc;

use bdev::Registry;
use control::json::{Value, json};
use control::{Method, Module, RpcError};
use reactor::ReactorHandle;

use crate::{VhostBlkConfig, VhostControllerInfo, VhostTarget, VhostTargetError};

/// The only transport of virtio-blk controllers.
const TRANSPORT: &str = "vhost_user_blk";

/// The vhost-user target as a [`Module`].
pub struct VhostModule {
    target: VhostTarget,
}

impl VhostModule {
    /// A target without controllers on `reactors`, for the devices of `registry`, whose sockets are in `directory`.
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

impl Module for VhostModule {
    const NAME: &'static str = "vhost_blk";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<VhostModule>> {
        vec![
            Method::update("vhost_create_blk_controller", create)
                .text("Makes a bdev a virtio-blk device of vhost-user clients, such as QEMU, at a UNIX socket.", "true")
                .errors(&[
                    (RpcError::INVALID_PARAMS, "a parameter is invalid, or the bdev has blocks that virtio lacks"),
                    (RpcError::EEXIST, "the controller exists"),
                    (RpcError::ENODEV, "there is no such bdev"),
                    (RpcError::ENOSPC, "there are as many controllers as the target has"),
                    (RpcError::INTERNAL, "the socket cannot be created, or the target is stopping"),
                    UNRESPONSIVE,
                ]),
            Method::update("vhost_delete_controller", delete)
                .text("Deletes a controller without clients, and its socket.", "true")
                .errors(&[NOT_FOUND, (RpcError::EBUSY, "clients are connected"), UNRESPONSIVE]),
            Method::query("vhost_get_controllers", get)
                .text(
                    "Describes controllers.",
                    "array of controllers with `ctrlr`, `socket`, `backend_specific`, and `connections`, their number \
                     (not in SPDK)",
                )
                .errors(&[NOT_FOUND, UNRESPONSIVE]),
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
        let call = |info: VhostControllerInfo| {
            json!({ "method": "vhost_create_blk_controller", "params": {
                "ctrlr": info.config.name,
                "dev_name": info.config.bdev_name,
                "readonly": info.config.read_only,
                "packed_ring": info.config.packed_ring,
                "transport": TRANSPORT,
            } })
        };
        self.target.configured().into_iter().map(call).collect()
    }

    fn report(&self) -> Value {
        json!({ "controllers": self.target.configured().len() })
    }
}

impl From<VhostTargetError> for RpcError {
    fn from(error: VhostTargetError) -> RpcError {
        let code = match &error {
            VhostTargetError::Bdev(bdev::BdevError::NotFound { .. }) | VhostTargetError::NotFound(_) => {
                RpcError::ENODEV
            }
            VhostTargetError::Invalid(_) => RpcError::INVALID_PARAMS,
            VhostTargetError::Exists(_) => RpcError::EEXIST,
            VhostTargetError::Busy(_) => RpcError::EBUSY,
            VhostTargetError::TooMany(_) => RpcError::ENOSPC,
            VhostTargetError::NotApplied(_)
            | VhostTargetError::Shell(target_shell::ShellError::Unresponsive(_)) => RpcError::ETIMEDOUT,
            _ => RpcError::INTERNAL,
        };
        RpcError::new(code, error.to_string())
    }
}

control::parameters! {
    struct Create {
        /// Name of the controller and of its socket's file, in the directory that `serve --vhost-socket-dir` names
        ctrlr: String,
        /// The bdev, by name, alias or UUID
        dev_name: String,
        /// Reject writes
        readonly: bool = false,
        /// Offer packed virtqueues
        packed_ring: bool = false,
    }
    only { transport: String = TRANSPORT.to_string() }
    ignored("each connection is served by the reactor that has the fewest") { cpumask }
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
    let Create { ctrlr: name, dev_name: bdev_name, readonly: read_only, packed_ring } = params;
    module.target.create(VhostBlkConfig { name, bdev_name, read_only, packed_ring })?;
    Ok(true)
}

fn delete(module: &VhostModule, params: Controller) -> Result<bool, RpcError> {
    module.target.delete(&params.ctrlr)?;
    Ok(true)
}

fn get(module: &VhostModule, params: Get) -> Result<Vec<Value>, RpcError> {
    let mut controllers = module.target.controllers()?;
    if let Some(name) = params.name {
        controllers.retain(|controller| controller.config.name == name);
        if controllers.is_empty() {
            return Err(VhostTargetError::NotFound(name).into());
        }
    }
    let describe = |info: VhostControllerInfo| {
        json!({
            "ctrlr": info.config.name,
            "socket": info.socket.to_string_lossy(),
            "connections": info.connections,
            "backend_specific": { "block": {
                "bdev": info.config.bdev_name,
                "readonly": info.read_only,
                "packed_ring": info.config.packed_ring,
                "transport": TRANSPORT,
            } },
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
