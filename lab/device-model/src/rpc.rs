//! The module of device models for the control plane: the `bdev_model_*` methods, which SPDK does not have.

use std::path::Path;
use std::sync::Arc;

use bdev::Uuid;
use bdev::rpc::{BdevModule, delete_method};
use control::json::{Value, json};
use control::{Method, Module, NoParameters, RpcError, files};

use crate::disk::{self, ModelConfig, Store};
use crate::{DeviceProfile, FaultKind, FaultOp, MediaState, ModelFault};

/// Device models as a [`Module`].
pub struct ModelModule {
    bdevs: Arc<BdevModule>,
}

impl ModelModule {
    /// Creates models among the devices of `bdevs`.
    pub fn new(bdevs: Arc<BdevModule>) -> Arc<ModelModule> {
        Arc::new(ModelModule { bdevs })
    }
}

/// Largest file of a profile.
const PROFILE_BYTES_MAX: u64 = 1 << 20;

impl Module for ModelModule {
    const NAME: &'static str = "bdev_model";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];

    fn methods() -> Vec<Method<ModelModule>> {
        vec![
            Method::query("bdev_model_get_profiles", get_profiles)
                .text("Lists the built-in profiles.", "array of `name`, `title`, `size`"),
            Method::prepared_update("bdev_model_create", prepare, create)
                .text("Creates a bdev that behaves as a profile says.", "name of the bdev")
                .assigns(&["uuid", "block_size", "num_blocks"])
                .canonical(canonical)
                .errors(&[
                    (RpcError::EEXIST, "the name or UUID is in use"),
                    (RpcError::EINVAL, "the profile cannot be read or is invalid, or the geometry is"),
                    (
                        RpcError::ENOMEM,
                        "with `store=memory`, all bdevs in memory together would be larger than the memory of the machine",
                    ),
                ]),
            delete_method("bdev_model_delete", "NVMe device model", |module: &ModelModule| &module.bdevs),
            Method::update("bdev_model_inject", inject).text("Injects a fault.", "true").errors(&[
                (RpcError::ENODEV, "there is no such model"),
                (RpcError::EINVAL, "the fault's values contradict each other"),
            ]),
        ]
    }
}

fn get_profiles(_module: &ModelModule, _params: NoParameters) -> Result<Value, RpcError> {
    let describe = |name| {
        let profile = DeviceProfile::shipped(name).map_err(RpcError::internal)?;
        Ok(json!({ "name": name, "title": profile.title, "size": profile.capacity_bytes() }))
    };
    DeviceProfile::shipped_names().map(describe).collect()
}

control::choices! {
    enum StateName {
        Fresh = "fresh",
        Steady = "steady",
    }
}

control::choices! {
    enum StoreName {
        None = "none",
        Memory = "memory",
    }
}

control::parameters! {
    struct CreateModel {
        /// Name
        name: String,
        /// A built-in profile; this or `profile_path`
        profile: Option<String>,
        /// A file with a profile: a regular file of at most 1 MiB
        profile_path: Option<String>,
        /// Seed of what is random
        seed: u64 = 0,
        /// UUID; without, a random one
        uuid: Option<Uuid>,
        /// Size of a block; without, the profile's
        block_size: Option<u32> ["bytes"],
        /// Number of blocks; without, as many as the profile has
        num_blocks: Option<u64> ["blocks"],
        /// Size, instead of `num_blocks`
        size: Option<u64> ["bytes"],
        /// What was written before: nothing, or all of it several times
        state: StateName = StateName::Steady,
        /// Whether data is kept
        store: StoreName = StoreName::None,
    }
}

/// A size in bytes becomes one in blocks, as it is saved. If the call leaves their size to the profile, it is
/// that of the bdev.
fn canonical(module: &ModelModule, params: &mut CreateModel) -> Result<(), RpcError> {
    let device = module.bdevs.registry().find(&params.name);
    let block_size = params.block_size.or(device.map(|device| device.geometry().block_size));
    if let (Some(bytes), Some(unit)) = (params.size, block_size.filter(|unit| *unit > 0)) {
        (params.num_blocks, params.size) = (Some(bytes / u64::from(unit)), None);
    }
    Ok(())
}

/// Reads the profile, outside of the lock of updates: its file may be slow.
fn prepare(_: &ModelModule, params: CreateModel) -> Result<(CreateModel, DeviceProfile), RpcError> {
    let invalid = |what: String| RpcError::new(RpcError::EINVAL, what);
    let profile = match (&params.profile, &params.profile_path) {
        (Some(name), None) => DeviceProfile::shipped(name),
        (None, Some(path)) => {
            let bytes = files::read_regular(Path::new(path), PROFILE_BYTES_MAX)
                .map_err(|error| invalid(format!("profile_path: {path}: {error}")))?;
            let text = String::from_utf8(bytes)
                .map_err(|error| invalid(format!("profile_path: {path}: {error}")))?;
            DeviceProfile::parse(&text)
        }
        _ => return Err(RpcError::invalid_params("give exactly one of profile and profile_path")),
    };
    let profile = profile.map_err(|error| invalid(format!("profile: {error}")))?;
    if params.num_blocks.is_some() && params.size.is_some() {
        return Err(RpcError::invalid_params("num_blocks and size are exclusive; give one"));
    }
    Ok((params, profile))
}

fn create(
    module: &ModelModule,
    (mut params, profile): (CreateModel, DeviceProfile),
) -> Result<String, RpcError> {
    let mut config = ModelConfig::new(&params.name, profile);
    config.store = match params.store {
        StoreName::None => Store::None,
        StoreName::Memory => Store::Memory,
    };
    config.state = match params.state {
        StateName::Fresh => MediaState::Fresh,
        StateName::Steady => MediaState::Steady,
    };
    let unit = u64::from(params.block_size.unwrap_or(config.profile.device.block_bytes)).max(1);
    config.num_blocks = params.num_blocks.or(params.size.map(|bytes| bytes / unit));
    config.block_size = params.block_size;
    (config.uuid, config.seed) = (params.uuid, params.seed);
    let device = disk::create(module.bdevs.registry(), config)?;
    params.size = None;
    params.uuid = Some(device.uuid());
    params.block_size = Some(device.geometry().block_size);
    params.num_blocks = Some(device.geometry().blocks);
    Ok(module.bdevs.record(&device, "bdev_model_create", &params))
}

control::choices! {
    enum InjectKind {
        MediaError = "media_error",
        Timeout = "timeout",
        LatencySpike = "latency_spike",
        DroppedCompletion = "dropped_completion",
        ControllerFatal = "controller_fatal",
        SurpriseRemoval = "surprise_removal",
        Clear = "clear",
        Remove = "remove",
    }
}

control::choices! {
    enum FaultOpName {
        Any = "any",
        Read = "read",
        Write = "write",
        Flush = "flush",
        Unmap = "unmap",
    }
}

control::parameters! {
    struct InjectModelFault {
        /// Model
        name: String,
        /// What fails; clear removes all faults, and remove unregisters the bdev with I/O in flight
        kind: InjectKind,
        /// Commands
        op: FaultOpName = FaultOpName::Any,
        /// Share of the commands, 0 to 1
        rate: f64 = 1.0,
        /// First block; without, any
        first_lba: Option<u64>,
        /// Last block; without, any
        last_lba: Option<u64>,
        /// Delay of latency_spike
        latency_us: f64 ["us"] = 0.0,
        /// How often; without, without end
        count: Option<u64>,
    }
}

/// Injected rules are not part of the saved configuration: they belong to an experiment, not to the device.
fn inject(module: &ModelModule, params: InjectModelFault) -> Result<bool, RpcError> {
    let device = module.bdevs.find(&params.name)?;
    let kind = match params.kind {
        InjectKind::Clear => {
            disk::clear_faults(module.bdevs.registry(), device.name())?;
            return Ok(true);
        }
        InjectKind::Remove => {
            disk::surprise_remove(module.bdevs.registry(), device.name())?;
            module.bdevs.forget(device.name());
            return Ok(true);
        }
        InjectKind::MediaError => FaultKind::MediaError,
        InjectKind::Timeout => FaultKind::Timeout,
        InjectKind::LatencySpike => FaultKind::LatencySpike,
        InjectKind::DroppedCompletion => FaultKind::DroppedCompletion,
        InjectKind::ControllerFatal => FaultKind::ControllerFatal,
        InjectKind::SurpriseRemoval => FaultKind::SurpriseRemoval,
    };
    let fault = ModelFault {
        op: match params.op {
            FaultOpName::Any => FaultOp::Any,
            FaultOpName::Read => FaultOp::Read,
            FaultOpName::Write => FaultOp::Write,
            FaultOpName::Flush => FaultOp::Flush,
            FaultOpName::Unmap => FaultOp::Unmap,
        },
        rate: params.rate,
        first_lba: params.first_lba,
        last_lba: params.last_lba,
        latency_us: params.latency_us,
        count: params.count,
        ..ModelFault::new(kind)
    };
    disk::inject_fault(module.bdevs.registry(), device.name(), &fault)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use control::ControlPlane;

    use super::*;

    fn app() -> Arc<ControlPlane> {
        let builder = ControlPlane::builder(Vec::new());
        let bdevs = BdevModule::new(bdev::Registry::new(), builder.examiner());
        let models = ModelModule::new(bdevs.clone());
        builder.module(&bdevs).module(&models).start(None).unwrap()
    }

    fn code(app: &ControlPlane, method: &str, params: Value) -> i64 {
        app.invoke(method, params).expect_err(method).code
    }

    #[test]
    fn a_model_is_created_saved_given_faults_and_removed() {
        let app = app();
        let create = json!({ "name": "D", "profile": "intel-p4800x", "size": 1 << 30, "state": "fresh" });
        assert_eq!(app.invoke("bdev_model_create", create).unwrap(), "D");
        let saved = app.save_subsystem("bdev").unwrap();
        assert_eq!(saved[0]["method"], "bdev_model_create");
        assert_eq!(saved[0]["params"]["num_blocks"], (1u64 << 30) / 512);
        assert_eq!(
            (&saved[0]["params"]["state"], &saved[0]["params"]["store"]),
            (&json!("fresh"), &json!("none"))
        );
        let mut params = saved[0]["params"].clone();
        (params["name"], params["uuid"]) = ("E".into(), Value::Null);
        app.invoke("bdev_model_create", params).unwrap();
        let rule = json!({ "name": "D", "kind": "media_error", "op": "read", "rate": 0.5, "first_lba": 8 });
        assert_eq!(app.invoke("bdev_model_inject", rule).unwrap(), true);
        let shown = app.invoke("bdev_get_bdevs", json!({ "name": "D" })).unwrap();
        assert_eq!(shown[0]["driver_specific"]["model"]["faults"], 1);
        app.invoke("bdev_model_inject", json!({ "name": "D", "kind": "clear" })).unwrap();
        app.invoke("bdev_model_inject", json!({ "name": "D", "kind": "remove" })).unwrap();
        assert_eq!(code(&app, "bdev_get_bdevs", json!({ "name": "D" })), -19);
        app.invoke("bdev_model_delete", json!({ "name": "E" })).unwrap();
        assert!(app.save_subsystem("bdev").unwrap().is_empty());
    }

    #[test]
    fn invalid_parameters_are_rejected() {
        let app = app();
        app.invoke("bdev_null_create", json!({ "name": "N", "num_blocks": 8, "block_size": 512 })).unwrap();
        app.invoke("bdev_model_create", json!({ "name": "D", "profile": "ideal" })).unwrap();
        let cases = [
            ("bdev_model_create", json!({ "name": "X" }), -32602),
            ("bdev_model_create", json!({ "name": "X", "profile": "ideal", "profile_path": "a" }), -32602),
            ("bdev_model_create", json!({ "name": "X", "profile": "floppy" }), -22),
            ("bdev_model_create", json!({ "name": "X", "profile_path": "/nonexistent.toml" }), -22),
            ("bdev_model_create", json!({ "name": "X", "profile_path": "/dev/zero" }), -22),
            ("bdev_model_create", json!({ "name": "X", "profile": "ideal", "store": "tape" }), -32602),
            ("bdev_model_create", json!({ "name": "X", "profile": "ideal", "state": "old" }), -32602),
            ("bdev_model_create", json!({ "name": "X", "profile": "ideal", "block_size": 100 }), -22),
            ("bdev_model_create", json!({ "name": "D", "profile": "ideal" }), -17),
            ("bdev_model_inject", json!({ "name": "D", "kind": "media_error", "rate": 2.0 }), -22),
            ("bdev_model_inject", json!({ "name": "D", "kind": "latency_spike" }), -22),
            ("bdev_model_inject", json!({ "name": "N", "kind": "clear" }), -19),
            ("bdev_model_inject", json!({ "name": "Z", "kind": "clear" }), -19),
            ("bdev_model_delete", json!({ "name": "N" }), -19),
        ];
        for (method, params, expected) in cases {
            assert_eq!(code(&app, method, params.clone()), expected, "{method} {params}");
        }
        let profiles = app.invoke("bdev_model_get_profiles", json!({})).unwrap();
        assert!(profiles.as_array().unwrap().iter().any(|profile| profile["name"] == "samsung-980-pro"));
    }
}
