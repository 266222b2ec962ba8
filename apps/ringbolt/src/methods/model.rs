//! Methods for devices made of software: [`model`]'s profiles as bdevs.

use ::model::disk::{self, ModelConfig, Store};
use ::model::{Fault, FaultKind, FaultOp, Profile, State};
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::Table;
use super::bdev::find;
use super::devices::{delete, remember};
use super::parameters::{ByName, Nothing};
use crate::rpc::RpcError;
use crate::state::App;

pub(super) fn add(table: &mut Table) {
    table.read("bdev_model_get_profiles", get_profiles);
    table.change("bdev_model_create", create);
    table.change("bdev_model_delete", |app, params: ByName| delete(app, &params.name, "NVMe device model"));
    table.change("bdev_model_inject", inject);
}

fn get_profiles(_app: &App, _params: Nothing) -> Result<Value, RpcError> {
    let describe = |name| {
        let profile = Profile::shipped(name).map_err(RpcError::internal)?;
        Ok(json!({ "name": name, "title": profile.title, "size": profile.capacity_bytes() }))
    };
    Profile::shipped_names().map(describe).collect()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    name: String,
    /// One that is shipped,
    profile: Option<String>,
    /// or a file.
    profile_path: Option<String>,
    #[serde(default)]
    seed: u64,
    uuid: Option<Uuid>,
    block_size: Option<u32>,
    num_blocks: Option<u64>,
    /// In bytes, instead of `num_blocks`.
    size: Option<u64>,
    state: Option<State>,
    store: Option<String>,
}

fn create(app: &App, params: Create) -> Result<String, RpcError> {
    let profile = match (&params.profile, &params.profile_path) {
        (Some(name), None) => Profile::shipped(name),
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path)
                .map_err(|error| RpcError::new(RpcError::EINVAL, format!("profile_path: {path}: {error}")))?;
            Profile::parse(&text)
        }
        _ => return Err(RpcError::invalid_params("name one of profile and profile_path")),
    };
    let profile = profile.map_err(|error| RpcError::new(RpcError::EINVAL, format!("profile: {error}")))?;
    if params.num_blocks.is_some() && params.size.is_some() {
        return Err(RpcError::invalid_params("num_blocks and size say the same; name one"));
    }
    let mut config = ModelConfig::new(&params.name, profile);
    if let Some(store) = &params.store {
        let wrong = || RpcError::invalid_params(format!("store={store} is none of none and memory"));
        config.store = Store::from_name(store).ok_or_else(wrong)?;
    }
    let unit = u64::from(params.block_size.unwrap_or(config.profile.device.block_bytes)).max(1);
    config.num_blocks = params.num_blocks.or(params.size.map(|bytes| bytes / unit));
    config.state = params.state.unwrap_or_default();
    config.block_size = params.block_size;
    (config.uuid, config.seed) = (params.uuid, params.seed);
    let (state, store) = (config.state.name(), config.store.name());
    let device = disk::create(&app.registry, config)?;
    let geometry = device.geometry();
    let mut again = json!({
        "name": params.name,
        "seed": params.seed,
        "uuid": device.uuid(),
        "block_size": geometry.block_size,
        "num_blocks": geometry.blocks,
        "state": state,
        "store": store,
    });
    for (key, value) in [("profile", params.profile), ("profile_path", params.profile_path)] {
        if let Some(value) = value {
            again[key] = value.into();
        }
    }
    remember(app, &device, "bdev_model_create", again)
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    MediaError,
    Timeout,
    LatencySpike,
    DroppedCompletion,
    ControllerFatal,
    SurpriseRemoval,
    /// Takes every rule away.
    Clear,
    /// Pulls the device out.
    Remove,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Inject {
    name: String,
    kind: Kind,
    #[serde(default)]
    op: FaultOp,
    rate: Option<f64>,
    first_lba: Option<u64>,
    last_lba: Option<u64>,
    latency_us: Option<f64>,
    count: Option<u64>,
}

/// Rules are not in the saved configuration: they are an experiment's, not the device's.
fn inject(app: &App, params: Inject) -> Result<bool, RpcError> {
    let device = find(app, &params.name)?;
    let kind = match params.kind {
        Kind::Clear => {
            disk::clear(&app.registry, device.name())?;
            return Ok(true);
        }
        Kind::Remove => {
            disk::pull(&app.registry, device.name())?;
            let mut state = app.state();
            state.journal.deleted(device.name());
            state.histograms.remove(device.name());
            return Ok(true);
        }
        Kind::MediaError => FaultKind::MediaError,
        Kind::Timeout => FaultKind::Timeout,
        Kind::LatencySpike => FaultKind::LatencySpike,
        Kind::DroppedCompletion => FaultKind::DroppedCompletion,
        Kind::ControllerFatal => FaultKind::ControllerFatal,
        Kind::SurpriseRemoval => FaultKind::SurpriseRemoval,
    };
    let fault = Fault {
        op: params.op,
        rate: params.rate.unwrap_or(1.0),
        first_lba: params.first_lba,
        last_lba: params.last_lba,
        latency_us: params.latency_us.unwrap_or(0.0),
        count: params.count,
        ..Fault::new(kind)
    };
    disk::inject(&app.registry, device.name(), &fault)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::super::tests::app;
    use super::*;
    use crate::config;

    fn code(app: &App, method: &str, params: Value) -> i64 {
        app.invoke(method, params).expect_err(method).code
    }

    #[test]
    fn a_model_is_made_saved_hurt_and_pulled_out() {
        let app = app();
        let create = json!({ "name": "D", "profile": "intel-p4800x", "size": 1 << 30, "state": "fresh" });
        assert_eq!(app.invoke("bdev_model_create", create).unwrap(), "D");
        let saved = config::subsystem_config(&app, "bdev").unwrap();
        assert_eq!(saved[0]["method"], "bdev_model_create");
        assert_eq!(saved[0]["params"]["num_blocks"], (1u64 << 30) / 512);
        assert_eq!(
            (&saved[0]["params"]["state"], &saved[0]["params"]["store"]),
            (&json!("fresh"), &json!("none"))
        );
        let mut again = saved[0]["params"].clone();
        (again["name"], again["uuid"]) = ("E".into(), Value::Null);
        app.invoke("bdev_model_create", again).unwrap();
        let rule = json!({ "name": "D", "kind": "media_error", "op": "read", "rate": 0.5, "first_lba": 8 });
        assert_eq!(app.invoke("bdev_model_inject", rule).unwrap(), true);
        let shown = app.invoke("bdev_get_bdevs", json!({ "name": "D" })).unwrap();
        assert_eq!(shown[0]["driver_specific"]["model"]["faults"], 1);
        app.invoke("bdev_model_inject", json!({ "name": "D", "kind": "clear" })).unwrap();
        app.invoke("bdev_model_inject", json!({ "name": "D", "kind": "remove" })).unwrap();
        assert_eq!(code(&app, "bdev_get_bdevs", json!({ "name": "D" })), -19);
        app.invoke("bdev_model_delete", json!({ "name": "E" })).unwrap();
        assert!(config::subsystem_config(&app, "bdev").unwrap().is_empty());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let app = app();
        app.invoke("bdev_null_create", json!({ "name": "N", "num_blocks": 8, "block_size": 512 })).unwrap();
        app.invoke("bdev_model_create", json!({ "name": "D", "profile": "ideal" })).unwrap();
        let cases = [
            ("bdev_model_create", json!({ "name": "X" }), -32602),
            ("bdev_model_create", json!({ "name": "X", "profile": "ideal", "profile_path": "a" }), -32602),
            ("bdev_model_create", json!({ "name": "X", "profile": "floppy" }), -22),
            ("bdev_model_create", json!({ "name": "X", "profile_path": "/nonexistent.toml" }), -22),
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
