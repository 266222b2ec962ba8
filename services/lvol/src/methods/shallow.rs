//! Methods that copy what a volume itself has to another bdev.

use control::json::{Value, json};
use control::{Method, RpcError};

use super::{EBUSY, EINVAL, EIO, ENODEV, EPERM, NO_VOLUME, NOT_MADE, failed, refused, volume};
use crate::LvolModule;
use crate::shallow_copy::{CopyEnd, CopyRefused};

pub(super) fn methods() -> Vec<Method<LvolModule>> {
    vec![
        Method::update("bdev_lvol_start_shallow_copy", start)
            .text(
                "Copies the clusters that a read-only volume itself has, not its parent, to the same places of a bdev.",
                "object with `operation_id`, for bdev_lvol_check_shallow_copy",
            )
            .errors(&[NO_VOLUME, NOT_MADE]),
        Method::query("bdev_lvol_check_shallow_copy", check)
            .text(
                "Reports the state of a copy; one that has ended is reported once.",
                "object with `state` (`in progress`, `complete`, `error`), clusters, and the error",
            )
            .errors(&[(RpcError::ENODEV, "there is no such copy, or its end was reported")]),
    ]
}

control::parameters! {
    struct StartShallowCopy {
        /// Name, alias or UUID of the volume
        src_lvol_name: String,
        /// Name, alias or UUID of the bdev
        dst_bdev_name: String,
    }
}

fn start(module: &LvolModule, params: StartShallowCopy) -> Result<Value, RpcError> {
    let found = volume(module, &params.src_lvol_name)?;
    let id = module
        .stores
        .start_copy(&found.store, &found.volume, &found.device, &params.dst_bdev_name)
        .map_err(|refused| match refused {
            CopyRefused::NoDestination => {
                failed(ENODEV, format!("no bdev is called {}", params.dst_bdev_name))
            }
            CopyRefused::Destination(error) => failed(EPERM, error),
            CopyRefused::Source(error) => failed(EIO, error),
            CopyRefused::NoReactor => failed(EIO, "there is no reactor"),
        })?;
    Ok(json!({ "operation_id": id }))
}

control::parameters! {
    struct CheckShallowCopy {
        /// What bdev_lvol_start_shallow_copy has returned
        operation_id: u32,
    }
}

fn check(module: &LvolModule, params: CheckShallowCopy) -> Result<Value, RpcError> {
    let status = module.stores.copies.check(params.operation_id);
    let status =
        status.ok_or_else(|| refused(ENODEV, format!("there is no copy {}", params.operation_id)))?;
    let mut object = json!({ "copied_clusters": status.copied, "total_clusters": status.total });
    let error = match status.end {
        None => {
            object["state"] = "in progress".into();
            return Ok(object);
        }
        Some(CopyEnd::Complete) => {
            object["state"] = "complete".into();
            return Ok(object);
        }
        Some(CopyEnd::NotReadOnly) => EPERM,
        Some(CopyEnd::Invalid) => EINVAL,
        Some(CopyEnd::Busy) => EBUSY,
        Some(CopyEnd::Io) => EIO,
    };
    object["state"] = "error".into();
    object["error"] = error.1.into();
    Ok(object)
}
