//! Methods of snapshots, clones and parents.

use std::sync::Arc;
use std::time::Duration;

use blobstore::{Blob, BlobChange, BlobId, BlobParent, ChangeError, Xattr};
use control::{JobHandle, Method, RpcError};

use super::volumes::{made, new_volume};
use super::{
    Conclusion, EEXIST, EINVAL, ENODEV, NO_VOLUME, NOT_MADE, change_failed, concluded, failed, no_operation,
    volume,
};
use crate::LvolModule;
use crate::chain_end::external_text;
use crate::external_end::{external_bytes_xattr, recorded_xattr};
use crate::owner;
use crate::store::{LvolStore, VolumeOperation};
use crate::volume::{LvolBdev, VolumeError, open_external};

/// How often the progress of a job is reported.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

pub(super) fn methods() -> Vec<Method<LvolModule>> {
    vec![
        concluded("bdev_lvol_snapshot", snapshot)
            .text(
                "Makes a snapshot of a volume, which becomes a clone of it. Writes to the volume wait meanwhile.",
                "UUID of the snapshot",
            )
            .errors(&[NO_VOLUME, NOT_MADE]),
        concluded("bdev_lvol_clone", clone)
            .text("Makes a clone of a snapshot, or of a read-only volume.", "UUID of the clone")
            .errors(&[NO_VOLUME, NOT_MADE]),
        concluded("bdev_lvol_clone_bdev", clone_bdev)
            .text(
                "Makes a clone of a bdev outside the store, its external snapshot, which nothing may write from then on.",
                "UUID of the clone",
            )
            .errors(&[NOT_MADE]),
        Method::job("bdev_lvol_inflate", inflate)
            .text("Allocates all clusters of a volume, which has no parent then.", "true")
            .errors(&[NO_VOLUME, NOT_MADE]),
        Method::job("bdev_lvol_decouple_parent", decouple)
            .text("Copies what a volume reads of its parent, whose parent becomes its own.", "true")
            .errors(&[NO_VOLUME, NOT_MADE]),
        concluded("bdev_lvol_set_parent", set_parent)
            .text(
                "Makes a snapshot the parent of a thin volume. What the volume has not of its own changes.",
                "true",
            )
            .errors(&[NO_VOLUME, NOT_MADE]),
        concluded("bdev_lvol_set_parent_bdev", set_parent_bdev)
            .text(
                "Makes a bdev outside the store the parent of a thin volume. What the volume has not of its own changes.",
                "true",
            )
            .errors(&[NO_VOLUME, NOT_MADE]),
    ]
}

control::parameters! {
    struct SnapshotLvol {
        /// Name, alias or UUID of the volume
        lvol_name: String,
        /// Name of the snapshot, 1 to 63 bytes
        snapshot_name: String,
    }
}

fn snapshot(module: &LvolModule, params: SnapshotLvol) -> Result<Conclusion, RpcError> {
    let found = volume(module, &params.lvol_name)?;
    if found.blob(Blob::is_read_only)? {
        return Err(failed(EINVAL, "a read-only volume needs no snapshot"));
    }
    let (store, blob) = (found.store.clone(), found.volume.blob);
    let new = new_volume(module, &store, &[blob], &params.snapshot_name);
    let (operation, uuid, mut xattrs) = new.map_err(no_operation)?;
    xattrs.extend(found.blob(recorded_xattr)?);
    let change = owner::begin(&store.shared, BlobChange::Snapshot { blob, xattrs });
    Ok(Box::new(move |module| {
        let outcome = change.wait().map_err(change_failed)?;
        if let blobstore::ChangeOutcome::Blob(snapshot) = outcome {
            operation.has_clone(snapshot);
        }
        made(module, operation, uuid, outcome)
    }))
}

control::parameters! {
    struct CloneLvol {
        /// Name, alias or UUID of the snapshot
        snapshot_name: String,
        /// Name of the clone, 1 to 63 bytes
        clone_name: String,
    }
}

fn clone(module: &LvolModule, params: CloneLvol) -> Result<Conclusion, RpcError> {
    let found = volume(module, &params.snapshot_name)?;
    if !found.blob(Blob::is_read_only)? {
        return Err(failed(EINVAL, "only a snapshot or a read-only volume can have clones"));
    }
    let (store, of) = (found.store.clone(), found.volume.blob);
    let new = new_volume(module, &store, &[of], &params.clone_name);
    let (operation, uuid, mut xattrs) = new.map_err(no_operation)?;
    xattrs.extend(found.blob(recorded_xattr)?);
    let change = owner::begin(&store.shared, BlobChange::Clone { of, xattrs });
    Ok(Box::new(move |module| {
        let outcome = change.wait().map_err(change_failed)?;
        operation.has_clone(of);
        made(module, operation, uuid, outcome)
    }))
}

control::parameters! {
    struct CloneBdev {
        /// Name, alias or UUID of the bdev
        bdev: String,
        /// Name of the store
        lvs_name: String,
        /// Name of the clone, 1 to 63 bytes
        clone_name: String,
    }
}

/// A bdev that is to be an external snapshot in a store: as it is named there, its clusters and bytes, and
/// the open device, which stays open until volumes have opened it.
struct External {
    name: Vec<u8>,
    clusters: u32,
    bytes: u64,
    base: Arc<bdev::stacking::BaseBdev>,
}

fn external(
    module: &LvolModule,
    store: &Arc<LvolStore>,
    device: &Arc<bdev::BlockDevice>,
    alias: &str,
) -> Result<External, RpcError> {
    let published = store.shared.published();
    let cluster_bytes = u64::from(published.layout().cluster_bytes);
    let bytes = device.geometry().bytes();
    let clusters = u32::try_from(bytes / cluster_bytes).ok().filter(|_| bytes.is_multiple_of(cluster_bytes));
    let text = || format!("its {bytes} bytes are no multiple of the cluster size, {cluster_bytes}");
    let clusters = clusters.ok_or_else(|| failed(EINVAL, text()))?;
    let uuid = device.uuid().to_string();
    let base = open_external(&module.stores.registry, &uuid, published.super_block().io_unit_bytes, alias);
    let base = Arc::new(base.map_err(|error| match error {
        VolumeError::NoExternal(_) => failed(ENODEV, error),
        VolumeError::ExternalBlocks { .. } => failed(EINVAL, error),
        VolumeError::Bdev(bdev::BdevError::Claimed { .. }) => failed(super::EPERM, error),
        VolumeError::Bdev(_) => failed(ENODEV, error),
    })?);
    store.shared.add_external(&uuid, &base);
    let mut name = uuid.into_bytes();
    name.push(0);
    Ok(External { name, clusters, bytes, base })
}

fn clone_bdev(module: &LvolModule, params: CloneBdev) -> Result<Conclusion, RpcError> {
    let is_it = |store: &Arc<LvolStore>| store.name() == params.lvs_name && !store.is_removing();
    let store = module.stores.all().into_iter().find(is_it);
    let store = store.ok_or_else(|| RpcError::new(RpcError::INVALID_PARAMS, "lvs does not exist"))?;
    let device = module.stores.registry.find(&params.bdev);
    let device = device.ok_or_else(|| RpcError::new(RpcError::INVALID_PARAMS, "bdev does not exist"))?;
    if device.module::<LvolBdev>().is_some_and(|lvol| lvol.is_of(&store)) {
        let message = "bdev is an lvol in same lvs as clone; use bdev_lvol_clone instead";
        return Err(RpcError::new(RpcError::INVALID_PARAMS, message));
    }
    let new = new_volume(module, &store, &[], &params.clone_name);
    let (operation, uuid, mut xattrs) = new.map_err(no_operation)?;
    let alias = format!("{}/{}", params.lvs_name, params.clone_name);
    let External { name, clusters, bytes, base } = external(module, &store, &device, &alias)?;
    xattrs.push(external_bytes_xattr(&name, bytes));
    let change = owner::begin(&store.shared, BlobChange::CloneExternal { name, clusters, xattrs });
    Ok(Box::new(move |module| {
        let _base = base;
        let outcome = change.wait().map_err(change_failed)?;
        made(module, operation, uuid, outcome)
    }))
}

control::parameters! {
    struct NamedLvol {
        /// Name, alias or UUID of the volume
        name: String,
    }
}

/// Runs a change of a volume that takes long, as a job.
fn run_job(
    module: &LvolModule,
    found: &super::FoundVolume,
    change: BlobChange,
    job: &JobHandle,
) -> Result<bool, RpcError> {
    let store = &found.store;
    let _operation = store.operate(&[found.volume.blob], None).map_err(no_operation)?;
    let handle = owner::begin(&store.shared, change);
    let (cancelled, shared) = (handle.clone(), store.shared.clone());
    job.on_cancel(move || cancelled.cancel(&shared));
    let (mut total, mut last) = (0, 0);
    let result = loop {
        let result = handle.wait_for(PROGRESS_EVERY);
        let (done, all) = handle.progress();
        if all != total {
            total = all;
            job.set_total(total.into(), "clusters");
        }
        job.advance(u64::from(done.saturating_sub(last)));
        last = last.max(done);
        if let Some(result) = result {
            break result;
        }
    };
    result.map_err(change_failed)?;
    module.stores.follow_chains(store);
    Ok(true)
}

fn inflate(module: &LvolModule, params: NamedLvol, job: &JobHandle) -> Result<bool, RpcError> {
    let found = volume(module, &params.name)?;
    if !found.blob(Blob::is_thin)? {
        return Ok(true);
    }
    let blob = found.volume.blob;
    run_job(module, &found, BlobChange::Inflate { blob }, job)
}

fn decouple(module: &LvolModule, params: NamedLvol, job: &JobHandle) -> Result<bool, RpcError> {
    let found = volume(module, &params.name)?;
    if found.blob(|blob| *blob.parent() == BlobParent::None)? {
        return Err(failed(EINVAL, "the volume has no parent"));
    }
    let blob = found.volume.blob;
    run_job(module, &found, BlobChange::Decouple { blob }, job)
}

control::parameters! {
    struct SetParent {
        /// Name, alias or UUID of the volume
        lvol_name: String,
        /// Name, alias or UUID of the snapshot
        parent_name: String,
    }
}

fn set_parent(module: &LvolModule, params: SetParent) -> Result<Conclusion, RpcError> {
    let (found, above) = (volume(module, &params.lvol_name)?, volume(module, &params.parent_name)?);
    let (store, blob, parent) = (found.store.clone(), found.volume.blob, above.volume.blob);
    if !Arc::ptr_eq(&store, &above.store) {
        return Err(failed(EINVAL, "the snapshot is in another store"));
    }
    if blob == parent {
        return Err(failed(EINVAL, "a volume cannot be its own parent"));
    }
    if found.blob(|blob| *blob.parent() == BlobParent::Snapshot(parent))? {
        return Err(failed(EEXIST, "the snapshot is its parent already"));
    }
    if !found.blob(Blob::is_thin)? {
        return Err(failed(EINVAL, "the volume is not thin"));
    }
    if !store.was_snapshot(parent) {
        return Err(failed(EINVAL, format!("{} is no snapshot", params.parent_name)));
    }
    let length = |blob: &Blob| blob.clusters().length();
    if found.blob(length)? != above.blob(length)? {
        return Err(failed(EINVAL, "the snapshot has another size"));
    }
    let published = store.shared.published();
    let mut ancestor = parent;
    for _ in 0..published.blobs().len() {
        match published.blob(ancestor).map(Blob::parent) {
            Some(BlobParent::Snapshot(next)) if *next == blob => {
                return Err(failed(EINVAL, "the snapshot is a clone of the volume"));
            }
            Some(BlobParent::Snapshot(next)) => ancestor = *next,
            _ => break,
        }
    }
    let operation = store.operate(&[blob, parent], None).map_err(no_operation)?;
    let record = above.blob(recorded_xattr)?;
    // What the snapshot reads from outside, the volume reads too.
    open_before(module, &found, above.device.module::<LvolBdev>().and_then(LvolBdev::external));
    let change = owner::begin(&store.shared, BlobChange::SetParent { blob, parent });
    Ok(Box::new(move |module| {
        let result = change.wait();
        if result.is_ok() {
            operation.has_clone(parent);
        }
        let result = result.and_then(|_| set_record(&operation, blob, record));
        module.stores.follow_chains(&store);
        result.map_err(change_failed)?;
        Ok(true.into())
    }))
}

/// Records in a volume where the external snapshot of its new parent ends.
fn set_record(operation: &VolumeOperation, blob: BlobId, record: Option<Xattr>) -> Result<(), ChangeError> {
    let Some(record) = record else { return Ok(()) };
    operation.run(BlobChange::SetXattrs { blob, set: vec![record], remove: Vec::new() }).map(drop)
}

/// Opens the external snapshot that a volume is about to read, unless it reads another one until then.
fn open_before(module: &LvolModule, found: &super::FoundVolume, external: Option<Arc<bdev::BlockDevice>>) {
    if let (Some(external), Some(lvol)) = (external, found.device.module::<LvolBdev>())
        && lvol.external().is_none()
    {
        match lvol.open_external(&module.stores.registry, &external.uuid().to_string()) {
            Ok(opened) => module.stores.registry.stack(opened.device(), &found.device),
            // It is tried again when the parent is set, and logged then.
            Err(error) => log::debug!(target: "lvol", "{error}"),
        }
    }
}

control::parameters! {
    struct SetParentBdev {
        /// Name, alias or UUID of the volume
        lvol_name: String,
        /// Name, alias or UUID of the bdev
        parent_name: String,
    }
}

fn set_parent_bdev(module: &LvolModule, params: SetParentBdev) -> Result<Conclusion, RpcError> {
    let found = volume(module, &params.lvol_name)?;
    let (store, blob) = (found.store.clone(), found.volume.blob);
    let device = module.stores.registry.find(&params.parent_name);
    let device = device.ok_or_else(|| failed(ENODEV, format!("no bdev is called {}", params.parent_name)))?;
    if device.module::<LvolBdev>().is_some_and(|lvol| lvol.is_of(&store)) {
        return Err(failed(EINVAL, "the bdev is a volume of the same store"));
    }
    let is_parent = |blob: &Blob| {
        external_text(blob)
            .and_then(|(name, _)| module.stores.registry.find(&name))
            .is_some_and(|present| Arc::ptr_eq(&present, &device))
    };
    if found.blob(is_parent)? {
        return Err(failed(EEXIST, "the bdev is its parent already"));
    }
    if !found.blob(Blob::is_thin)? {
        return Err(failed(EINVAL, "the volume is not thin"));
    }
    module.stores.registry.check_levels(&device, Some(&found.device))?;
    let operation = store.operate(&[blob], None).map_err(no_operation)?;
    let External { name, bytes, base, .. } = external(module, &store, &device, &store.alias(&found.volume))?;
    let record = Some(external_bytes_xattr(&name, bytes));
    store.set_on_external(blob, &device.uuid().to_string());
    open_before(module, &found, Some(device));
    let change = owner::begin(&store.shared, BlobChange::SetParentExternal { blob, name });
    Ok(Box::new(move |module| {
        let (operation, _base) = (operation, base);
        let result = change.wait().and_then(|_| set_record(&operation, blob, record));
        module.stores.follow_chains(&store);
        result.map_err(change_failed)?;
        Ok(true.into())
    }))
}
