//! A logical volume store: its volumes, and operations on them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use bdev::Uuid;
use bdev::stacking::BaseBdev;
use blobstore::{Blob, BlobChange, BlobId, BlobStore, Xattr};
use reactor::blocking;

use crate::chain_end::{ChainEnd, chain_ends, text_of};
use crate::owner::{self, ChangeHandle, begin};
use crate::shared::StoreShared;

/// The type in the super block of a store of logical volumes.
pub(crate) const STORE_TYPE: &str = "LVOLSTORE";
/// Longest name of a store or volume that is accepted, in bytes: it is stored in 64 with a terminator.
const NAME_BYTES_MAX: usize = 63;
/// The limit of free clusters of a store that has none of its own, in percent of all.
pub(crate) const LOW_SPACE_PERCENT: u32 = 10;
/// The attribute of a store with its limit of free clusters: a C string with the percent.
const LOW_SPACE_XATTR: &[u8] = b"low_space_percent";
/// The attribute of a volume in which a store of its own is found at each start: a C string that says so.
const NESTED_STORE_XATTR: &[u8] = b"nested_store";
/// How long the removal of a store waits for operations on its volumes. These have ends of their own.
const OPERATIONS_WAIT: Duration = Duration::from_secs(3600);

/// A store that is used, and its volumes.
pub(crate) struct LvolStore {
    pub(crate) uuid: Uuid,
    pub(crate) base: Arc<BaseBdev>,
    pub(crate) shared: Arc<StoreShared>,
    state: Mutex<StoreState>,
    /// An operation has ended.
    changed: Condvar,
    /// Ends when the owner has closed the device; of a store that can be changed.
    closed: OnceLock<Arc<ChangeHandle>>,
}

struct StoreState {
    name: String,
    /// Ascending by blob.
    volumes: BTreeMap<BlobId, Arc<Volume>>,
    /// Names of volumes, those included that are being created.
    names: BTreeSet<String>,
    /// Blobs that have clones, or had some.
    snapshots: BTreeSet<BlobId>,
    /// Names of external snapshots, and the volumes whose chain ends with each, or did: so that a device that
    /// appears costs a look at these names, and not at all volumes.
    externals: BTreeMap<String, BTreeSet<BlobId>>,
    /// Volumes with an operation under way.
    busy: BTreeSet<BlobId>,
    /// Operations under way, those without a volume included.
    operations: usize,
    is_removing: bool,
}

/// A volume.
#[derive(Clone)]
pub(crate) struct Volume {
    pub(crate) blob: BlobId,
    pub(crate) name: String,
    /// Null in stores that are older than UUIDs of volumes, or if it is damaged.
    pub(crate) stored_uuid: Uuid,
    /// Name of its block device: the UUID, or that of the store and the blob's id.
    pub(crate) bdev_name: String,
}

/// Why a blobstore is no store of logical volumes, although its type says so.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoLvolStore {
    #[error("it has no super blob that can be used, which has its name")]
    SuperBlob,
    #[error("its UUID is missing or damaged")]
    Uuid,
    #[error("its name is missing")]
    Name,
}

/// Why an operation cannot begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoOperation {
    /// The store is being removed, or was.
    Removing,
    /// Another operation on one of the volumes is under way.
    Busy,
    /// The store is read-only here.
    ReadOnly,
    /// A volume has that name, or is being created with it.
    NameInUse,
    /// The name is empty or too long, or has control characters.
    Name,
}

/// An operation on volumes of a store: no other operates on them, and the store is not removed, while it is
/// there. A name that it has reserved is free again with its drop, unless a volume has it.
pub(crate) struct VolumeOperation {
    pub(crate) store: Arc<LvolStore>,
    blobs: Vec<BlobId>,
    name: Option<String>,
}

impl Drop for VolumeOperation {
    fn drop(&mut self) {
        let mut state = self.store.lock();
        self.blobs.iter().for_each(|blob| _ = state.busy.remove(blob));
        if let Some(name) = &self.name {
            state.names.remove(name);
        }
        state.operations -= 1;
        drop(state);
        self.store.changed.notify_all();
    }
}

impl VolumeOperation {
    /// Runs a change to its end.
    pub(crate) fn run(&self, change: BlobChange) -> Result<blobstore::ChangeOutcome, blobstore::ChangeError> {
        begin(&self.store.shared, change).wait()
    }

    /// The new volume of this blob has the reserved name.
    pub(crate) fn created(&mut self, blob: BlobId, uuid: Uuid) -> Arc<Volume> {
        let name = self.name.take().unwrap_or_default();
        let bdev_name = uuid.to_string();
        let volume = Arc::new(Volume { blob, name, stored_uuid: uuid, bdev_name });
        self.store.lock().volumes.insert(blob, volume.clone());
        volume
    }

    /// The volume has the reserved name now.
    pub(crate) fn renamed(&mut self, blob: BlobId) -> Option<Arc<Volume>> {
        let name = self.name.take()?;
        let mut state = self.store.lock();
        let before = state.volumes.get(&blob)?.clone();
        state.names.remove(&before.name);
        let volume = Arc::new(Volume { name, ..(*before).clone() });
        state.volumes.insert(blob, volume.clone());
        Some(volume)
    }

    /// The volume is deleted.
    pub(crate) fn deleted(&self, blob: BlobId) {
        let mut state = self.store.lock();
        if let Some(volume) = state.volumes.remove(&blob) {
            state.names.remove(&volume.name);
        }
        state.snapshots.remove(&blob);
        state.externals.retain(|_, volumes| {
            volumes.remove(&blob);
            !volumes.is_empty()
        });
    }

    /// The blob has a clone now.
    pub(crate) fn has_clone(&self, blob: BlobId) {
        self.store.lock().snapshots.insert(blob);
    }
}

impl LvolStore {
    /// The store of loaded blobs. What is wrong with single volumes is in `problems`, one sentence each.
    pub(crate) fn new(
        shared: Arc<StoreShared>,
        base: Arc<BaseBdev>,
        problems: &mut Vec<String>,
    ) -> Result<LvolStore, NoLvolStore> {
        let blobs = shared.published();
        let super_blob = blobs.super_block().super_blob.and_then(|id| blobs.blob(id));
        let super_blob = super_blob.ok_or(NoLvolStore::SuperBlob)?;
        let uuid = uuid_of(super_blob).ok_or(NoLvolStore::Uuid)?;
        let name = name_of(super_blob).ok_or(NoLvolStore::Name)?;
        shared.set_low_space_percent(low_space_of(super_blob).unwrap_or(LOW_SPACE_PERCENT));
        for (id, unusable) in blobs.unusable() {
            let name = name_of(unusable.partial()).unwrap_or_else(|| "without a name".to_string());
            problems.push(format!("the volume {name}, blob {id}, cannot be used: {}", unusable.damage()));
        }
        let ends = chain_ends(&blobs);
        let (mut volumes, mut names) = (BTreeMap::new(), BTreeSet::new());
        for blob in blobs.blobs().values().filter(|blob| blob.id() != super_blob.id()) {
            let id = blob.id();
            let Some(name) = name_of(blob) else {
                problems.push(format!("blob {id} cannot be used: the name of the volume is missing"));
                continue;
            };
            match ends.get(&id) {
                Some(ChainEnd::Missing(snapshot)) => problems.push(format!(
                    "the volume {name} cannot be used: its snapshot, blob {snapshot}, is not there or damaged"
                )),
                Some(ChainEnd::Cycle) => problems.push(format!(
                    "the volume {name} cannot be used: its snapshots are clones of each other in a circle"
                )),
                _ => {}
            }
            let stored_uuid = uuid_of(blob).unwrap_or(Uuid::nil());
            let bdev_name =
                if stored_uuid.is_nil() { format!("{uuid}_{}", id.0) } else { stored_uuid.to_string() };
            names.insert(name.clone());
            volumes.insert(id, Arc::new(Volume { blob: id, name, stored_uuid, bdev_name }));
        }
        let is_snapshot = |id: &BlobId| !blobs.clones(*id).is_empty();
        let snapshots = volumes.keys().copied().filter(is_snapshot).collect();
        let state = StoreState {
            name,
            volumes,
            names,
            snapshots,
            externals: BTreeMap::new(),
            busy: BTreeSet::new(),
            operations: 0,
            is_removing: false,
        };
        Ok(LvolStore {
            uuid,
            base,
            shared,
            state: Mutex::new(state),
            changed: Condvar::new(),
            closed: OnceLock::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, StoreState> {
        // Each change is whole before anything can panic.
        sync::lock(&self.state)
    }

    /// Its name.
    pub(crate) fn name(&self) -> String {
        self.lock().name.clone()
    }

    /// Sets what ends with the owner; once.
    pub(crate) fn set_closed(&self, closed: Arc<ChangeHandle>) {
        // A store has one owner.
        _ = self.closed.set(closed);
    }

    /// Ends the owner, when all changes are done, and waits until it has closed the device. Returns whether
    /// it has in time.
    pub(crate) fn close(&self, timeout: Duration) -> bool {
        let is_closed = self.closed.get().is_none_or(|closed| owner::close(&self.shared, closed, timeout));
        self.base.release();
        is_closed
    }

    /// The volumes, in the order of their blobs.
    pub(crate) fn volumes(&self) -> Vec<Arc<Volume>> {
        self.lock().volumes.values().cloned().collect()
    }

    /// The volume of a blob.
    pub(crate) fn volume(&self, blob: BlobId) -> Option<Arc<Volume>> {
        self.lock().volumes.get(&blob).cloned()
    }

    /// The name `STORE/VOLUME`.
    pub(crate) fn alias(&self, volume: &Volume) -> String {
        format!("{}/{}", self.lock().name, volume.name)
    }

    /// The UUID of the volume's block device: its own, or one that is made of the store's and the blob's id.
    pub(crate) fn bdev_uuid(&self, volume: &Volume) -> Uuid {
        match volume.stored_uuid.is_nil() {
            true => Uuid::new_v5(&self.uuid, &volume.blob.0.to_le_bytes()),
            false => volume.stored_uuid,
        }
    }

    /// Whether the blob has clones, or had some since the store was loaded.
    pub(crate) fn was_snapshot(&self, blob: BlobId) -> bool {
        self.lock().snapshots.contains(&blob)
    }

    /// Notes that the chain of a volume ends with the external snapshot of this name.
    pub(crate) fn set_on_external(&self, blob: BlobId, name: &str) {
        let mut state = self.lock();
        match state.externals.get_mut(name) {
            Some(volumes) => _ = volumes.insert(blob),
            None => _ = state.externals.insert(name.to_string(), BTreeSet::from([blob])),
        }
    }

    /// The external snapshots on which volumes are, or were since the store was loaded.
    pub(crate) fn externals(&self) -> Vec<String> {
        self.lock().externals.keys().cloned().collect()
    }

    /// Whether no volume is on an external snapshot, or was.
    pub(crate) fn has_no_externals(&self) -> bool {
        self.lock().externals.is_empty()
    }

    /// The volumes on an external snapshot, or that were, in the order of their blobs.
    pub(crate) fn volumes_on(&self, external: &str) -> Vec<Arc<Volume>> {
        let state = self.lock();
        let blobs = state.externals.get(external).into_iter().flatten();
        blobs.filter_map(|blob| state.volumes.get(blob).cloned()).collect()
    }

    /// Whether the store is being removed.
    pub(crate) fn is_removing(&self) -> bool {
        self.lock().is_removing
    }

    /// Begins an operation on volumes. `name` is reserved for a new volume, or for one that gets it.
    pub(crate) fn operate(
        self: &Arc<Self>,
        blobs: &[BlobId],
        name: Option<&str>,
    ) -> Result<VolumeOperation, NoOperation> {
        if !self.shared.is_writable() {
            return Err(NoOperation::ReadOnly);
        }
        let mut state = self.lock();
        if state.is_removing || self.shared.is_closed() {
            return Err(NoOperation::Removing);
        }
        if let Some(name) = name {
            if !is_name(name) {
                return Err(NoOperation::Name);
            }
            if state.names.contains(name) {
                return Err(NoOperation::NameInUse);
            }
        }
        if blobs.iter().any(|blob| state.busy.contains(blob)) {
            return Err(NoOperation::Busy);
        }
        state.busy.extend(blobs);
        state.names.extend(name.map(str::to_string));
        state.operations += 1;
        drop(state);
        Ok(VolumeOperation { store: self.clone(), blobs: blobs.to_vec(), name: name.map(str::to_string) })
    }

    /// Lets no operation begin any more. `false` if that is so already.
    pub(crate) fn begin_removal(&self) -> bool {
        !std::mem::replace(&mut self.lock().is_removing, true)
    }

    /// The removal has failed.
    pub(crate) fn undo_removal(&self) {
        self.lock().is_removing = false;
    }

    /// Waits until no operation is under way.
    pub(crate) fn wait_operations(&self) -> bool {
        let is_done = |state: &mut StoreState| (state.operations == 0).then_some(());
        blocking::wait_until(&self.state, &self.changed, OPERATIONS_WAIT, is_done).is_ok()
    }

    /// A volume was deleted with its store.
    pub(crate) fn forget_volume(&self, blob: BlobId) {
        self.lock().volumes.remove(&blob);
    }

    /// Another name; returns all volumes, whose aliases change with it.
    pub(crate) fn rename(&self, name: &str) -> Vec<Arc<Volume>> {
        let mut state = self.lock();
        state.name = name.to_string();
        state.volumes.values().cloned().collect()
    }
}

/// Whether a new store or volume can have a name: it is stored as a C string, and printed in lines.
pub(crate) fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.contains(char::is_control)
}

/// The attribute `name` of a volume or store: a C string in 64 bytes.
pub(crate) fn name_xattr(name: &str) -> Xattr {
    let mut value = name.as_bytes().to_vec();
    value.resize(NAME_BYTES_MAX + 1, 0);
    Xattr { name: b"name".to_vec(), value }
}

/// The attribute `uuid`: a C string.
pub(crate) fn uuid_xattr(uuid: Uuid) -> Xattr {
    let mut value = uuid.to_string().into_bytes();
    value.push(0);
    Xattr { name: b"uuid".to_vec(), value }
}

/// The attribute with the limit of free clusters, in percent.
pub(crate) fn low_space_xattr(percent: u32) -> Xattr {
    Xattr { name: LOW_SPACE_XATTR.to_vec(), value: format!("{percent}\0").into_bytes() }
}

/// The attribute of a volume in which stores are found.
pub(crate) fn nested_store_xattr() -> Xattr {
    Xattr { name: NESTED_STORE_XATTR.to_vec(), value: b"1\0".to_vec() }
}

/// Whether an operator has made a store in the volume, or has asked for one.
pub(crate) fn has_nested_store(volume: &Blob) -> bool {
    text_of(volume, NESTED_STORE_XATTR).is_some()
}

/// The text of an attribute of the store.
pub(crate) fn text_of_store(blobs: &BlobStore, attribute: &[u8]) -> Option<String> {
    text_of(blobs.super_block().super_blob.and_then(|id| blobs.blob(id))?, attribute)
}

fn low_space_of(super_blob: &Blob) -> Option<u32> {
    text_of(super_blob, LOW_SPACE_XATTR)?.parse().ok().filter(|percent| *percent <= 100)
}

/// Free clusters below which a store with this limit has few of them.
pub(crate) fn low_space_clusters(percent: u32, total: u32) -> u32 {
    // At most 100 percent of 32 bits.
    (u64::from(total) * u64::from(percent)).div_ceil(100) as u32
}

pub(crate) fn name_of(blob: &Blob) -> Option<String> {
    text_of(blob, b"name")
}

fn uuid_of(blob: &Blob) -> Option<Uuid> {
    let text = text_of(blob, b"uuid")?;
    Uuid::try_parse(&text).ok().filter(|uuid| !uuid.is_nil())
}
