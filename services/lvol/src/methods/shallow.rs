//! Methods that copy what a volume itself has to another bdev.

use control::json::{Value, json};
use control::{Method, RpcError};

use super::{EBUSY, EINVAL, EIO, ENODEV, EPERM, Errno, NO_VOLUME, NOT_MADE, failed, refused, volume};
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
                "object with `state` (`in progress`, `complete`, `error`), clusters, `error`, and its `reason`",
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
            CopyRefused::Destination(error) => {
                failed(EPERM, format!("{error}; the copy needs a bdev that nothing else has open"))
            }
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
    object["state"] = match status.end {
        None => "in progress".into(),
        Some(CopyEnd::Complete) => "complete".into(),
        Some(end) => {
            let (errno, what) = why_failed(end);
            // SPDK's clients compare it.
            object["error"] = errno.1.into();
            object["reason"] = what.into();
            "error".into()
        }
    };
    Ok(object)
}

/// The errno of a copy that has failed, and what is to be done.
fn why_failed(end: CopyEnd) -> (Errno, String) {
    let device_failed = |what: &str, status| {
        (
            EIO,
            format!(
                "{what} failed with {status}; what is copied is not complete: look at the device and copy again"
            ),
        )
    };
    match end {
        CopyEnd::NotReadOnly => {
            let how = "make a snapshot of it and copy that, or call bdev_lvol_set_read_only";
            (EPERM, format!("the volume is written; {how}"))
        }
        CopyEnd::Invalid => {
            let needed = "as many bytes as the volume, in blocks that divide the store's";
            (EINVAL, format!("the bdev does not fit; it needs {needed}"))
        }
        CopyEnd::Busy => {
            (EBUSY, "another operation on the volume is under way; copy when it has ended".into())
        }
        CopyEnd::Source(status) => device_failed("a read of the volume", status),
        CopyEnd::Destination(status) => device_failed("a write to the bdev", status),
        CopyEnd::Core | CopyEnd::Complete => (EIO, "the core cannot run the copy; copy again".into()),
    }
}
