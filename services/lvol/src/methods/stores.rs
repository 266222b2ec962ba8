//! Methods of stores.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use bdev::stacking::BaseBdev;
use bdev::{Access, BdevError, DiskReader, Uuid};
use bdev_checksums::{ChecksumBdev, ChecksumLayout, checksums_name};
use blobstore::{BlobChange, BlobId, BlobStoreFormat, ChangeError, ClearMethod, OpenBlobStore};
use control::json::Value;
use control::{Method, RpcError};
use reactor::blocking;

use super::{
    Conclusion, EBUSY, EEXIST, EINVAL, EIO, ENODEV, ENOSPC, EPERM, NO_STORE, NOT_MADE, ONE_STORE, at_once,
    change_failed, concluded, failed, no_operation, one_store, refused, selected,
};
use crate::LvolModule;
use crate::blob_store_device;
use crate::checksums::{checksums_of, checksums_xattr};
use crate::load::CLAIM_HOLDER;
use crate::owner::{self, ChangeHandle, OwnerMessage};
use crate::shared::StoreShared;
use crate::store::{LOW_SPACE_PERCENT, LvolStore, Volume, is_name, low_space_xattr, name_xattr, uuid_xattr};
use crate::volume::LvolBdev;

/// How long the owner of a store has to close the device.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes at the front that are zero where nothing is: partition tables, super blocks of file systems, of
/// stores and of members of arrays are in them.
const FOREIGN_BYTES: u32 = 64 << 10;
const MIB: u32 = 1 << 20;

pub(super) fn methods() -> Vec<Method<LvolModule>> {
    vec![
        concluded("bdev_lvol_create_lvstore", create)
            .text(
                "Creates a store of logical volumes on a bdev, whose data is lost. The store claims the bdev.",
                "UUID of the store",
            )
            .errors(&[
                (RpcError::ENODEV, "there is no such bdev"),
                (RpcError::EPERM, "the bdev is claimed, or open for writing"),
                (RpcError::EEXIST, "a store has that name"),
                (RpcError::EINVAL, "a name or size is invalid"),
                (RpcError::EBUSY, "something is on the bdev, with `only_blank`"),
                NOT_MADE,
            ]),
        concluded("bdev_lvol_delete_lvstore", delete)
            .text("Deletes a store with all its volumes, those in use included.", "true")
            .errors(&[NO_STORE, ONE_STORE, NOT_MADE]),
        concluded("bdev_lvol_rename_lvstore", rename)
            .text("Renames a store. The aliases of all its volumes change.", "true")
            .errors(&[(-2, "there is no such store"), NOT_MADE]),
        concluded("bdev_lvol_grow_lvstore", grow)
            .text("Extends a store to the present size of its bdev.", "true")
            .errors(&[NO_STORE, ONE_STORE, NOT_MADE]),
        concluded("bdev_lvol_set_low_space", set_low_space)
            .text(
                "Sets the limit of free clusters of a store, below which the log has a warning. Ringbolt's own.",
                "true",
            )
            .errors(&[
                (RpcError::ENODEV, "there is no such store"),
                (RpcError::EINVAL, "both UUID and name are given, or none, or the limit is above 100"),
                NOT_MADE,
            ]),
        Method::query("bdev_lvol_get_lvstores", get)
            .text(
                "Describes the stores of logical volumes: one of them, or all.",
                "array of stores, sorted by UUID",
            )
            .errors(&[NO_STORE, (RpcError::EINVAL, "both UUID and name are given")]),
    ]
}

control::choices! {
    /// What becomes of the old content of the clusters for data.
    enum StoreClearMethod {
        Unmap = "unmap",
        WriteZeroes = "write_zeroes",
        None = "none",
    }
}

control::choices! {
    /// The checksums of the data of a store.
    enum DataChecksums {
        None = "none",
        Crc32c = "crc32c",
    }
}

control::parameters! {
    struct CreateLvstore {
        /// Name, alias or UUID of the bdev
        bdev_name: String,
        /// Name of the store, 1 to 63 bytes
        lvs_name: String,
        /// Bytes of a cluster, a multiple of 4096: the unit of allocation
        cluster_sz: u32 ["bytes"] = 4 * MIB,
        /// What becomes of the old content of the bdev
        clear_method: StoreClearMethod = StoreClearMethod::Unmap,
        /// Metadata pages for each hundred clusters: a limit of volumes, and of later growth
        num_md_pages_per_cluster_ratio: u32 = 100,
        /// Bytes of a metadata page, a power of two from 4096 to 65536; 0 is the larger of 4096 and the
        /// bdev's physical block
        md_page_size: u32 ["bytes"] = 0,
        /// Ringbolt's own: percent of all clusters, 0 to 100; with fewer free ones the log has a warning. 0
        /// for none. It is stored in the store
        low_space_percent: u32 = LOW_SPACE_PERCENT,
        /// Ringbolt's own: fail if there is a byte other than zero in the first 64 KiB of the bdev, where
        /// partition tables, file systems and stores begin
        only_blank: bool = false,
        /// Ringbolt's own: checksums of the data, which reads are compared with. They take 0.4 % of the bdev,
        /// after the end of the store, and SPDK's volumes do not know them
        data_checksums: DataChecksums = DataChecksums::None,
    }
}

fn create(module: &LvolModule, params: CreateLvstore) -> Result<Conclusion, RpcError> {
    let stores = &module.stores;
    let device = stores.registry.find(&params.bdev_name);
    let device = device.ok_or_else(|| refused(ENODEV, format!("no bdev is called {}", params.bdev_name)))?;
    let name = params.lvs_name;
    check_name(&name).map_err(|why| refused(EINVAL, why))?;
    let reserved = stores.reserve_name(&name);
    let reserved = reserved.ok_or_else(|| refused(EEXIST, format!("a store is called {name} already")))?;
    let percent = params.low_space_percent;
    check_percent(percent)?;
    let geometry = device.geometry();
    let page_bytes = match params.md_page_size {
        0 => geometry.physical_block_size.clamp(4096, 65536).next_power_of_two(),
        bytes if bytes.is_power_of_two() && (4096..=65536).contains(&bytes) => bytes,
        bytes => return Err(refused(EINVAL, format!("a metadata page cannot have {bytes} bytes"))),
    };
    let cluster_bytes = if params.cluster_sz == 0 { 4 * MIB } else { params.cluster_sz };
    if !cluster_bytes.is_multiple_of(geometry.block_size) {
        let block = geometry.block_size;
        return Err(refused(
            EINVAL,
            format!("{cluster_bytes} bytes is no multiple of the block size {block}"),
        ));
    }
    if geometry.metadata.bytes > 0 {
        return Err(refused(EINVAL, "the bdev has metadata beside its blocks"));
    }
    let access = Access::ReadManyWriteOne { by: CLAIM_HOLDER };
    let base = BaseBdev::open(&stores.registry, &params.bdev_name, access).map_err(|error| match error {
        BdevError::Claimed { .. } => refused(EPERM, error),
        _ => refused(ENODEV, error),
    })?;
    if device.bdev().read_only() {
        return Err(refused(EPERM, "the bdev is read-only"));
    }
    let (base, uuid) = (Arc::new(base), Uuid::new_v4());
    let mut own = if percent == LOW_SPACE_PERCENT { Vec::new() } else { vec![low_space_xattr(percent)] };
    let has_checksums = params.data_checksums == DataChecksums::Crc32c;
    own.extend(has_checksums.then(checksums_xattr));
    let format = BlobStoreFormat {
        cluster_bytes,
        metadata_page_bytes: page_bytes,
        metadata_pages_percent: match params.num_md_pages_per_cluster_ratio {
            0 => 100,
            percent => percent,
        },
        clear: match params.clear_method {
            StoreClearMethod::Unmap => ClearMethod::Unmap,
            StoreClearMethod::WriteZeroes => ClearMethod::WriteZeroes,
            StoreClearMethod::None => ClearMethod::None,
        },
        super_blob: Some([vec![uuid_xattr(uuid), name_xattr(&name)], own].concat()),
        ..BlobStoreFormat::default()
    };
    Ok(Box::new(move |module| {
        let _reserved = reserved;
        // The claim keeps others from writing meanwhile.
        let blank = if params.only_blank { check_blank(module, &base) } else { Ok(()) };
        let made = match has_checksums {
            true => blank.and_then(|()| make_with_checksums(module, &base, &format, percent)),
            false => blank.and_then(|()| make(module, &base, &format, percent)),
        };
        if made.is_err() {
            base.release();
        }
        made.map(|()| uuid.to_string().into())
    }))
}

/// Writes a store with checksums of its data on a bdev and uses it.
fn make_with_checksums(
    module: &LvolModule,
    base: &Arc<BaseBdev>,
    format: &BlobStoreFormat,
    percent: u32,
) -> Result<(), RpcError> {
    let mut device = blob_store_device(base);
    let no_space = || refused(ENOSPC, "the bdev is too small for a store with checksums");
    let layout = ChecksumLayout::within(device.bytes, format.cluster_bytes.into(), 0).ok_or_else(no_space)?;
    device.bytes = layout.data_bytes;
    // It says where the data begins; nothing is written yet.
    let (open, _) = OpenBlobStore::format(format, device).map_err(change_failed)?;
    let _making = module.stores.not_examined(checksums_name(base.device()));
    let created = module.stores.create_checksums(base, layout.data_bytes, open.published().layout());
    let verified = created.map_err(|error| failed(EIO, error))?;
    let access = Access::ReadManyWriteOne { by: CLAIM_HOLDER };
    let claimed = BaseBdev::open(&module.stores.registry, verified.name(), access);
    let made = claimed.map_err(|error| refused(EPERM, error)).and_then(|claimed| {
        let claimed = Arc::new(claimed);
        let format =
            BlobStoreFormat { checksums: checksums_of(&verified).map(ChecksumBdev::id), ..format.clone() };
        make(module, &claimed, &format, percent).inspect_err(|_| claimed.release())
    });
    made.inspect_err(|_| module.stores.remove_checksums(&verified))
}

/// Writes a store on a bdev and uses it.
fn make(
    module: &LvolModule,
    base: &Arc<BaseBdev>,
    format: &BlobStoreFormat,
    percent: u32,
) -> Result<(), RpcError> {
    let (open, change) = OpenBlobStore::format(format, blob_store_device(base)).map_err(change_failed)?;
    let reactor = module.stores.next_reactor().ok_or_else(|| refused(EIO, "there is no reactor"))?;
    let shared = StoreShared::new(open.published().clone());
    shared.set_low_space_percent(percent);
    let formatted = ChangeHandle::new();
    let first = Some((change, formatted.clone()));
    let closed = owner::start(reactor, &shared, base, open, first).map_err(|error| failed(EIO, error))?;
    let made = formatted.wait().map_err(change_failed).and_then(|_| {
        let store = LvolStore::new(shared.clone(), base.clone(), &mut Vec::new());
        let store = Arc::new(store.map_err(|error| failed(EIO, error))?);
        store.set_closed(closed.clone());
        if !module.stores.begin_new_checksums(&store) {
            return Err(failed(EIO, "the bdev has not answered in 30 s"));
        }
        module.stores.insert(&store).map_err(|why| failed(EEXIST, why.unwrap_or_default()))?;
        module.stores.mark_volumes_below(base.device());
        Ok(store)
    });
    let store = made.inspect_err(|_| _ = owner::close(&shared, &closed, CLOSE_TIMEOUT))?;
    // Its removal was reported before the store was there.
    if store.base.device().is_removed() {
        module.stores.forget_base(store.base.device());
    }
    Ok(())
}

/// Fails if something is at the front of a bdev.
fn check_blank(module: &LvolModule, base: &BaseBdev) -> Result<(), RpcError> {
    let (name, geometry) = (base.device().name(), base.device().geometry());
    let blocks = (FOREIGN_BYTES / geometry.block_size).max(1).into();
    let blocks = geometry.blocks.min(blocks) as u32;
    let (sender, result) = channel();
    let reactor = module.stores.next_reactor().ok_or_else(|| refused(EIO, "there is no reactor"))?;
    let reader = DiskReader::new(module.stores.registry.clone(), reactor.clone());
    // Without a receiver nobody waits any more.
    reader.read(name, 0, blocks, move |read| _ = sender.send(read));
    let front = blocking::receive(&result);
    let front = front.map_err(|error| refused(EIO, error))?.map_err(|error| refused(EIO, error))?;
    match front.iter().position(|byte| *byte != 0) {
        None => Ok(()),
        Some(at) => {
            let how = "without only_blank it is overwritten, as by `ringbolt lvol create --force`";
            Err(refused(EBUSY, format!("there is something on {name}, at byte {at}; {how}")))
        }
    }
}

fn check_percent(percent: u32) -> Result<(), RpcError> {
    match percent {
        0..=100 => Ok(()),
        _ => Err(refused(EINVAL, format!("a limit of free clusters has 0 to 100 percent, not {percent}"))),
    }
}

/// Why a name cannot be that of a store.
fn check_name(name: &str) -> Result<(), &'static str> {
    match is_name(name) {
        true => Ok(()),
        false => Err("a name has 1 to 63 bytes, and no control characters"),
    }
}

control::parameters! {
    struct OneLvstore {
        /// UUID of a store
        uuid: Option<String>,
        /// Or its name
        lvs_name: Option<String>,
    }
}

control::parameters! {
    struct DeleteLvstore {
        /// UUID of a store
        uuid: Option<String>,
        /// Or its name
        lvs_name: Option<String>,
        /// Fail if a volume of the store is open, as when it is served
        only_unused: bool = false,
    }
}

fn delete(module: &LvolModule, params: DeleteLvstore) -> Result<Conclusion, RpcError> {
    let store = one_store(module, params.uuid, params.lvs_name)?;
    if let Some((volume, reader)) = external_snapshot_in(module, &store) {
        let alias = store.alias(&volume);
        let what = format!("the volume {alias} is the external snapshot of {reader}");
        let text = format!("{what}; remove or inflate that first");
        return Err(failed(EBUSY, text));
    }
    let is_open = |volume: &Arc<Volume>| {
        module.stores.device(&store, volume).is_some_and(|device| device.open_count() > 0)
    };
    if let Some(open) = store.volumes().iter().find(|volume| params.only_unused && is_open(volume)) {
        let alias = store.alias(open);
        return Err(failed(EBUSY, format!("the volume {alias} is open; end its exports first")));
    }
    if !store.shared.is_writable() {
        return Err(failed(EPERM, "the store is read-only here"));
    }
    if !store.begin_removal() {
        return Err(refused(ENODEV, "the store is being removed"));
    }
    Ok(Box::new(move |module| {
        let removed = remove(module, &store);
        if removed.is_err() {
            store.undo_removal();
            // What was closed and not deleted is there again.
            store.volumes().iter().for_each(|volume| _ = module.stores.register(&store, volume));
        }
        removed
    }))
}

/// A volume of the store that a clone of another one reads, with the name of that.
fn external_snapshot_in(module: &LvolModule, store: &Arc<LvolStore>) -> Option<(Arc<Volume>, String)> {
    store.volumes().into_iter().find_map(|volume| {
        let device = module.stores.device(store, &volume)?;
        let upper = module.stores.registry.uppers(&device).into_iter().find(|upper| {
            let external = upper.module::<LvolBdev>().and_then(LvolBdev::external);
            external.is_some_and(|external| Arc::ptr_eq(&external, &device))
        })?;
        let alias = |lvol: &LvolBdev| lvol.volume().map(|clone| lvol.store().alias(&clone));
        let reader = upper.module::<LvolBdev>().and_then(alias);
        Some((volume, reader.unwrap_or_else(|| upper.name().to_string())))
    })
}

/// Deletes all volumes of a store, and the store.
fn remove(module: &LvolModule, store: &Arc<LvolStore>) -> Result<Value, RpcError> {
    store.wait_operations();
    if !module.stores.close_volumes(store) {
        return Err(failed(EBUSY, "I/O in flight uses volumes of the store still"));
    }
    loop {
        let published = store.shared.published();
        let leaves: Vec<BlobId> = (store.volumes().iter().map(|volume| volume.blob))
            .filter(|blob| published.clones(*blob).is_empty())
            .collect();
        if leaves.is_empty() {
            break;
        }
        // All at once; those that have them as clones follow.
        let changes: Vec<(BlobId, Arc<ChangeHandle>)> = leaves
            .into_iter()
            .map(|blob| (blob, owner::begin(&store.shared, BlobChange::Delete { blob })))
            .collect();
        for (blob, change) in changes {
            change.wait().map_err(change_failed)?;
            store.forget_volume(blob);
        }
    }
    owner::begin(&store.shared, BlobChange::Destroy).wait().map_err(change_failed)?;
    module.stores.remove(store);
    store.close(CLOSE_TIMEOUT);
    module.stores.remove_checksums(store.base.device());
    Ok(true.into())
}

control::parameters! {
    struct RenameLvstore {
        /// Name of the store
        old_name: String,
        /// Its new name, 1 to 63 bytes
        new_name: String,
    }
}

fn rename(module: &LvolModule, params: RenameLvstore) -> Result<Conclusion, RpcError> {
    let RenameLvstore { old_name, new_name } = params;
    let is_it = |store: &Arc<LvolStore>| store.name() == old_name;
    let store = module.stores.all().into_iter().find(is_it);
    let store = store.ok_or_else(|| RpcError::new(-2, format!("Lvol store {old_name} not found")))?;
    if new_name == old_name {
        return at_once(true);
    }
    check_name(&new_name).map_err(|why| failed(EINVAL, why))?;
    let in_use = || failed(EEXIST, format!("{new_name} is in use"));
    let reserved = module.stores.reserve_name(&new_name).ok_or_else(in_use)?;
    let published = store.shared.published();
    let blob =
        published.super_block().super_blob.ok_or_else(|| failed(EIO, "the store has no super blob"))?;
    let operation = store.operate(&[blob], None).map_err(no_operation)?;
    let alias = |volume: &str| format!("{new_name}/{volume}");
    let is_taken = |volume: &str| module.stores.registry.find(&alias(volume)).is_some();
    if let Some(volume) = store.volumes().iter().find(|volume| is_taken(&volume.name)) {
        return Err(failed(EEXIST, format!("a bdev is called {}", alias(&volume.name))));
    }
    let set = vec![name_xattr(&new_name)];
    let change = owner::begin(&store.shared, BlobChange::SetXattrs { blob, set, remove: Vec::new() });
    Ok(Box::new(move |module| {
        let (_reserved, _operation) = (reserved, operation);
        change.wait().map_err(change_failed)?;
        for volume in store.rename(&new_name) {
            if module.stores.device(&store, &volume).is_some() {
                module.stores.set_alias(&store, &volume);
            }
        }
        Ok(true.into())
    }))
}

fn grow(module: &LvolModule, params: OneLvstore) -> Result<Conclusion, RpcError> {
    let store = one_store(module, params.uuid, params.lvs_name)?;
    let (device_bytes, published) = (store.base.device().geometry().bytes(), store.shared.published());
    if checksums_of(store.base.device()).is_some() {
        let text = "a store with checksums of its data keeps its size: they follow its end";
        return Err(failed(EINVAL, text));
    }
    match published.super_block().size_bytes {
        Some(store_bytes) if store_bytes == device_bytes => return at_once(true),
        Some(store_bytes) if store_bytes > device_bytes => {
            let text = format!("the bdev has {device_bytes} bytes, and the store {store_bytes}");
            return Err(failed(ENOSPC, text));
        }
        _ => {}
    }
    let operation = store.operate(&[], None).map_err(no_operation)?;
    let change = owner::begin(&store.shared, BlobChange::Grow { device_bytes });
    Ok(Box::new(move |_| {
        let _operation = operation;
        change.wait().map_err(|error| match error {
            // The mask of clusters has no space for more.
            ChangeError::NoPages => failed(ENOSPC, "the store cannot have as many clusters"),
            error => change_failed(error),
        })?;
        Ok(true.into())
    }))
}

control::parameters! {
    struct SetLowSpace {
        /// UUID of a store
        uuid: Option<String>,
        /// Or its name
        lvs_name: Option<String>,
        /// Percent of all clusters, 0 to 100; 0 for no limit
        low_space_percent: u32,
    }
}

fn set_low_space(module: &LvolModule, params: SetLowSpace) -> Result<Conclusion, RpcError> {
    let percent = params.low_space_percent;
    check_percent(percent)?;
    let store = one_store(module, params.uuid, params.lvs_name)?;
    let super_blob = store.shared.published().super_block().super_blob;
    let blob = super_blob.ok_or_else(|| failed(EIO, "the store has no super blob"))?;
    let operation = store.operate(&[blob], None).map_err(no_operation)?;
    let set = vec![low_space_xattr(percent)];
    let change = owner::begin(&store.shared, BlobChange::SetXattrs { blob, set, remove: Vec::new() });
    Ok(Box::new(move |_| {
        let _operation = operation;
        change.wait().map_err(change_failed)?;
        store.shared.set_low_space_percent(percent);
        // An owner whose mailbox is full looks with its next change.
        _ = store.shared.send(OwnerMessage::Look);
        Ok(true.into())
    }))
}

control::parameters! {
    struct GetLvstores {
        /// UUID of a store
        uuid: Option<String>,
        /// Or its name
        lvs_name: Option<String>,
    }
}

fn get(module: &LvolModule, params: GetLvstores) -> Result<Vec<Value>, RpcError> {
    let stores = selected(module, "uuid", params.uuid, params.lvs_name)?;
    Ok(stores.iter().map(|store| store.to_json()).collect())
}
