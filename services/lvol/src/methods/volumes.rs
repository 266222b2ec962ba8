//! Methods of single volumes.

use std::sync::Arc;

use bdev::{Access, Closing, Uuid};
use blobstore::{Blob, BlobChange, ChangeOutcome, ClearMethod};
use control::json::Value;
use control::{Method, RpcError};

use super::{
    Conclusion, EBUSY, EEXIST, EINVAL, EIO, ENODEV, EPERM, FoundVolume, NO_STORE, NO_VOLUME, NOT_MADE,
    ONE_STORE, at_once, change_failed, concluded, errno_of, failed, no_operation, one_store, refused,
    selected, volume, why_no_operation,
};
use crate::LvolModule;
use crate::chain_end::{ChainEnd, chain_end, chain_ends};
use crate::owner;
use crate::store::{LvolStore, NoOperation, Volume, VolumeOperation, name_xattr, uuid_xattr};
use crate::volume::LvolBdev;

const MIB: u64 = 1 << 20;

pub(super) fn methods() -> Vec<Method<LvolModule>> {
    vec![
        concluded("bdev_lvol_create", create)
            .text(
                "Creates a volume, a bdev with its UUID as name and the alias `STORE/VOLUME`.",
                "UUID of the volume",
            )
            .errors(&[
                NO_STORE,
                (RpcError::EINVAL, "the name is invalid, or not one store is given"),
                (RpcError::EEXIST, "the store has a volume of that name"),
                NOT_MADE,
            ]),
        concluded("bdev_lvol_delete", delete)
            .text(
                "Deletes a volume, one in use included. A snapshot with one clone is merged into that.",
                "true",
            )
            .errors(&[
                NO_VOLUME,
                (RpcError::INTERNAL, "it has several clones, or is in use by another operation"),
            ]),
        concluded("bdev_lvol_rename", rename)
            .text("Renames a volume. Its alias changes.", "true")
            .errors(&[NO_VOLUME, NOT_MADE]),
        concluded("bdev_lvol_resize", resize)
            .text(
                "Changes the size of a volume, which its users get to know. One that is open does not become smaller.",
                "true",
            )
            .errors(&[NO_VOLUME, NOT_MADE]),
        concluded("bdev_lvol_set_read_only", set_read_only)
            .text("Makes a volume read-only, for ever.", "true")
            .errors(&[NO_VOLUME, NOT_MADE]),
        Method::query("bdev_lvol_get_lvols", get)
            .text(
                "Describes logical volumes: those of one store, or all.",
                "array of volumes, those of a store in the order of their blobs",
            )
            .errors(&[NO_STORE, ONE_STORE]),
    ]
}

control::choices! {
    /// What becomes of clusters that a volume does not need any more.
    enum VolumeClearMethod {
        Default = "default",
        None = "none",
        Unmap = "unmap",
        WriteZeroes = "write_zeroes",
    }
}

control::parameters! {
    struct CreateLvol {
        /// Name of the volume, 1 to 63 bytes
        lvol_name: String,
        /// Size, rounded up to clusters
        size_in_mib: u64 ["MiB"],
        /// Whether clusters are allocated by the first write to each, instead of now
        thin_provision: bool = false,
        /// UUID of the store
        uuid: Option<String>,
        /// Or its name
        lvs_name: Option<String>,
        /// What becomes of clusters that it does not need any more
        clear_method: VolumeClearMethod = VolumeClearMethod::Default,
    }
}

/// Clusters of a size.
fn clusters_of(store: &LvolStore, size_in_mib: u64) -> Result<u32, RpcError> {
    let cluster_bytes = u64::from(store.shared.published().layout().cluster_bytes);
    let bytes = size_in_mib.checked_mul(MIB);
    let clusters = bytes.and_then(|bytes| u32::try_from(bytes.div_ceil(cluster_bytes)).ok());
    clusters.ok_or_else(|| failed(EINVAL, format!("a volume cannot have {size_in_mib} MiB")))
}

/// Begins an operation that makes a volume, and the attributes of the new blob.
pub(super) fn new_volume(
    module: &LvolModule,
    store: &Arc<LvolStore>,
    blobs: &[blobstore::BlobId],
    name: &str,
) -> Result<(VolumeOperation, Uuid, Vec<blobstore::Xattr>), NoOperation> {
    let operation = store.operate(blobs, Some(name))?;
    if module.stores.registry.find(&format!("{}/{name}", store.name())).is_some() {
        return Err(NoOperation::NameInUse);
    }
    let uuid = Uuid::new_v4();
    Ok((operation, uuid, vec![name_xattr(name), uuid_xattr(uuid)]))
}

/// Registers a volume that was made; its UUID.
pub(super) fn made(
    module: &LvolModule,
    mut operation: VolumeOperation,
    uuid: Uuid,
    outcome: ChangeOutcome,
) -> Result<Value, RpcError> {
    let ChangeOutcome::Blob(blob) = outcome else {
        return Err(failed(EIO, "the store has made no blob"));
    };
    let volume = operation.created(blob, uuid);
    if !module.stores.register(&operation.store, &volume) {
        return Err(failed(EIO, "the volume was made, but has no bdev; the log says why"));
    }
    Ok(uuid.to_string().into())
}

fn create(module: &LvolModule, params: CreateLvol) -> Result<Conclusion, RpcError> {
    let store = one_store(module, params.uuid, params.lvs_name)?;
    let new = new_volume(module, &store, &[], &params.lvol_name);
    let (operation, uuid, xattrs) = new.map_err(|no| match no {
        NoOperation::ReadOnly => no_operation(no),
        no => {
            let (errno, why) = why_no_operation(no);
            refused(errno, why)
        }
    })?;
    let clusters = clusters_of(&store, params.size_in_mib)?;
    let clear = match params.clear_method {
        VolumeClearMethod::Default => ClearMethod::Default,
        VolumeClearMethod::None => ClearMethod::None,
        VolumeClearMethod::Unmap => ClearMethod::Unmap,
        VolumeClearMethod::WriteZeroes => ClearMethod::WriteZeroes,
    };
    let change = BlobChange::Create { thin: params.thin_provision, clusters, clear, xattrs };
    let change = owner::begin(&store.shared, change);
    Ok(Box::new(move |module| {
        let outcome = change.wait().map_err(change_failed)?;
        made(module, operation, uuid, outcome)
    }))
}

control::parameters! {
    struct DeleteLvol {
        /// Name, alias or UUID of the volume
        name: String,
        /// Fail if the volume is open, as when it is served
        only_unused: bool = false,
    }
}

/// A volume that can be without a block device, by UUID or alias.
fn degraded(module: &LvolModule, name: &str) -> Option<(Arc<LvolStore>, Arc<Volume>)> {
    let uuid = Uuid::try_parse(name).ok();
    module.stores.all().into_iter().find_map(|store| {
        let is_it = |volume: &Arc<Volume>| {
            volume.bdev_name == name
                || uuid.is_some_and(|uuid| uuid == volume.stored_uuid && !uuid.is_nil())
                || store.alias(volume) == name
        };
        let volume = store.volumes().into_iter().find(is_it)?;
        Some((store, volume))
    })
}

fn delete(module: &LvolModule, params: DeleteLvol) -> Result<Conclusion, RpcError> {
    let (store, volume, device) = match volume(module, &params.name) {
        Ok(FoundVolume { store, volume, device }) => (store, volume, Some(device)),
        Err(missing) => {
            let (store, volume) = degraded(module, &params.name).ok_or(missing)?;
            (store, volume, None)
        }
    };
    let blob = volume.blob;
    let internal = |errno: super::Errno, detail: &str| {
        RpcError::new(RpcError::INTERNAL, format!("{}: {detail}", errno.1))
    };
    if store.is_removing() {
        return Err(internal(ENODEV, "the store is being removed"));
    }
    let published = store.shared.published();
    let is_on_external = matches!(chain_end(&published, blob), ChainEnd::External(_));
    let clones = published.clones(blob).to_vec();
    if clones.len() > 1 {
        return Err(internal(EPERM, &format!("the snapshot has {} clones", clones.len())));
    }
    // An open clone of another store reads it as its external snapshot. A store on it goes with it.
    let reads = |upper: &Arc<bdev::BlockDevice>, device: &Arc<bdev::BlockDevice>| {
        let external = upper.module::<LvolBdev>().and_then(LvolBdev::external);
        external.is_some_and(|external| Arc::ptr_eq(&external, device))
    };
    let uppers = |device: &Arc<bdev::BlockDevice>| module.stores.registry.uppers(device);
    if device.as_ref().is_some_and(|device| uppers(device).iter().any(|upper| reads(upper, device))) {
        return Err(internal(EBUSY, "it is the external snapshot of a volume"));
    }
    if params.only_unused && device.as_ref().is_some_and(|device| device.open_count() > 0) {
        return Err(internal(EBUSY, "the volume is open; end its exports first"));
    }
    let blobs: Vec<_> = [blob].into_iter().chain(clones).collect();
    let operation = store.operate(&blobs, None).map_err(|no| {
        let (errno, why) = why_no_operation(no);
        internal(errno, why)
    })?;
    let removed = match device {
        Some(device) => Some(module.stores.registry.unregister(device.name())?),
        None => None,
    };
    Ok(Box::new(move |module| {
        let deleted = match Closing::removed(removed).wait() {
            Err(error) => Err(RpcError::new(RpcError::INTERNAL, format!("{}: {error}", EBUSY.1))),
            Ok(()) => operation.run(BlobChange::Delete { blob }).map_err(|error| {
                RpcError::new(RpcError::INTERNAL, format!("{}: {error}", errno_of(&error).1))
            }),
        };
        match deleted {
            Ok(_) => {
                operation.deleted(blob);
                if is_on_external {
                    module.stores.follow_chains(&store);
                }
                Ok(true.into())
            }
            Err(error) => {
                module.stores.register(&store, &volume);
                Err(error)
            }
        }
    }))
}

control::parameters! {
    struct RenameLvol {
        /// Name, alias or UUID of the volume
        old_name: String,
        /// Its new name, 1 to 63 bytes, without that of the store
        new_name: String,
    }
}

fn rename(module: &LvolModule, params: RenameLvol) -> Result<Conclusion, RpcError> {
    let found = volume(module, &params.old_name)?;
    let (store, blob) = (found.store.clone(), found.volume.blob);
    if found.blob(Blob::is_read_only)? {
        return Err(failed(EPERM, "the volume is read-only"));
    }
    let mut operation = store.operate(&[blob], Some(&params.new_name)).map_err(no_operation)?;
    let alias = format!("{}/{}", store.name(), params.new_name);
    if module.stores.registry.find(&alias).is_some() {
        return Err(failed(EEXIST, format!("a bdev is called {alias}")));
    }
    let set = vec![name_xattr(&params.new_name)];
    let change = owner::begin(&store.shared, BlobChange::SetXattrs { blob, set, remove: Vec::new() });
    Ok(Box::new(move |module| {
        change.wait().map_err(change_failed)?;
        if let Some(volume) = operation.renamed(blob) {
            module.stores.set_alias(&store, &volume);
        }
        Ok(true.into())
    }))
}

control::parameters! {
    struct ResizeLvol {
        /// Name, alias or UUID of the volume
        name: String,
        /// Size, rounded up to clusters
        size_in_mib: u64 ["MiB"],
    }
}

fn resize(module: &LvolModule, params: ResizeLvol) -> Result<Conclusion, RpcError> {
    let found = volume(module, &params.name)?;
    let blob = found.volume.blob;
    if found.blob(Blob::is_read_only)? {
        return Err(failed(EPERM, "the volume is read-only"));
    }
    let clusters = clusters_of(&found.store, params.size_in_mib)?;
    let present = found.blob(|blob| blob.clusters().length())?;
    if clusters == present {
        return at_once(true);
    }
    let operation = found.store.operate(&[blob], None).map_err(no_operation)?;
    let registry = &module.stores.registry;
    let lvol = |device: &bdev::BlockDevice, change: &dyn Fn(&LvolBdev)| {
        device.module::<LvolBdev>().into_iter().for_each(change);
    };
    let mut alone = None;
    if clusters < present {
        // No other opens it for writing, nor is it open, while it becomes smaller.
        let claim = registry.open(found.device.name(), Access::Exclusive { by: "bdev_lvol_resize" });
        let claim = claim.map_err(|error| failed(EBUSY, error))?;
        if found.device.open_count() > 1 {
            return Err(failed(EBUSY, "the volume is open, and cannot become smaller"));
        }
        alone = Some(claim);
        let bytes = u64::from(clusters) * u64::from(found.store.shared.published().layout().cluster_bytes);
        lvol(&found.device, &|lvol| lvol.set_bytes(bytes));
        registry.notify_resized(found.device.name())?;
    }
    let change = owner::begin(&found.store.shared, BlobChange::Resize { blob, clusters });
    Ok(Box::new(move |module| {
        let (_operation, _alone) = (operation, alone);
        let resized = change.wait();
        // Also after a failure, if it was to become smaller.
        lvol(&found.device, &LvolBdev::resize);
        // It may have been removed meanwhile.
        _ = module.stores.registry.notify_resized(found.device.name());
        resized.map_err(change_failed)?;
        Ok(true.into())
    }))
}

control::parameters! {
    struct SetReadOnly {
        /// Name, alias or UUID of the volume
        name: String,
    }
}

fn set_read_only(module: &LvolModule, params: SetReadOnly) -> Result<Conclusion, RpcError> {
    let found = volume(module, &params.name)?;
    if found.blob(Blob::is_read_only)? {
        return at_once(true);
    }
    let blob = found.volume.blob;
    let operation = found.store.operate(&[blob], None).map_err(no_operation)?;
    let change = owner::begin(&found.store.shared, BlobChange::SetReadOnly { blob });
    Ok(Box::new(move |_| {
        let _operation = operation;
        change.wait().map_err(change_failed)?;
        Ok(true.into())
    }))
}

control::parameters! {
    struct GetLvols {
        /// UUID of a store
        lvs_uuid: Option<String>,
        /// Or its name
        lvs_name: Option<String>,
    }
}

fn get(module: &LvolModule, params: GetLvols) -> Result<Vec<Value>, RpcError> {
    let mut lvols = Vec::new();
    for store in selected(module, "lvs_uuid", params.lvs_uuid, params.lvs_name)? {
        let ends = chain_ends(&store.shared.published());
        for volume in store.volumes() {
            let end = ends.get(&volume.blob).copied().unwrap_or(ChainEnd::Zeroes);
            let is_degraded = module.stores.is_degraded(&store, &volume, end);
            lvols.push(store.volume_to_json(&volume, is_degraded));
        }
    }
    Ok(lvols)
}
