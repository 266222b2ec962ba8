//! The methods: those of SPDK's `bdev_lvol_*` that read.

use bdev::Uuid;
use control::json::Value;
use control::{Method, RpcError};

use crate::LvolModule;
use crate::module::UsedStore;

const ERRORS: &[(i64, &str)] =
    &[(RpcError::ENODEV, "there is no such store"), (RpcError::EINVAL, "both UUID and name are given")];

pub(crate) fn methods() -> Vec<Method<LvolModule>> {
    vec![
        Method::query("bdev_lvol_get_lvstores", get_lvstores)
            .text(
                "Describes the stores of logical volumes that were found on bdevs: one of them, or all. They are read-only.",
                "array of stores, sorted by UUID",
            )
            .errors(ERRORS),
        Method::query("bdev_lvol_get_lvols", get_lvols)
            .text(
                "Describes logical volumes: those of one store, or all. They are read-only.",
                "array of volumes, those of a store in the order of their blobs",
            )
            .errors(ERRORS),
    ]
}

control::parameters! {
    struct GetLvstores {
        /// UUID of a store
        uuid: Option<String>,
        /// Or its name
        lvs_name: Option<String>,
    }
}

control::parameters! {
    struct GetLvols {
        /// UUID of a store
        lvs_uuid: Option<String>,
        /// Or its name
        lvs_name: Option<String>,
    }
}

fn get_lvstores(module: &LvolModule, params: GetLvstores) -> Result<Vec<Value>, RpcError> {
    let stores = selected(module, "uuid", params.uuid, params.lvs_name)?;
    Ok(stores.iter().map(|used| used.store.to_json(used.base.device().name())).collect())
}

fn get_lvols(module: &LvolModule, params: GetLvols) -> Result<Vec<Value>, RpcError> {
    let mut lvols = Vec::new();
    for used in selected(module, "lvs_uuid", params.lvs_uuid, params.lvs_name)? {
        for volume in &used.store.volumes {
            let is_degraded = module.stores.is_degraded(&used, volume);
            lvols.push(used.store.volume_to_json(volume, is_degraded));
        }
    }
    Ok(lvols)
}

/// The store with a UUID or a name, or all.
fn selected(
    module: &LvolModule,
    parameter: &str,
    uuid: Option<String>,
    name: Option<String>,
) -> Result<Vec<UsedStore>, RpcError> {
    let mut stores = module.stores.all();
    let selector = match (uuid, name) {
        (None, None) => return Ok(stores),
        (Some(_), Some(_)) => {
            let message = format!("give either {parameter} or lvs_name, not both");
            return Err(RpcError::new(RpcError::EINVAL, message));
        }
        (Some(uuid), None) => {
            let wanted = Uuid::try_parse(&uuid).ok();
            stores.retain(|used| Some(used.store.uuid) == wanted);
            uuid
        }
        (None, Some(name)) => {
            stores.retain(|used| used.store.name == name);
            name
        }
    };
    if stores.is_empty() {
        let message = format!("no logical volume store is called {selector}");
        return Err(RpcError::new(RpcError::ENODEV, message));
    }
    Ok(stores)
}
