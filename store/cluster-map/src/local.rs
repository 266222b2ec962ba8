//! The map in a directory, for clusters on one machine.
//!
//! A record is a file, and nothing is ever locked: nodes are processes, and one that is stopped at the wrong
//! moment must keep no other from the map. A compare-and-swap is `link(2)`, which fails if the name is there:
//! the record of a group's epoch is `groups/GROUP/EPOCH`, written elsewhere and made durable first. The
//! newest epoch counts; older ones are removed by the process that wrote a newer one.

mod changes;
mod images;
mod lease;
mod pools;
mod snapshot;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::FlockOperation;
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use changes::LocalChanges;
use images::lock_directory;

use crate::checks::{check_image_name, check_pool, check_settings};
use crate::groups::{self, COUNTED_END, random_volume, range_of};
use crate::keys::check_client_key;
use crate::{
    AcceptedLoss, ClientKeyRecord, ClusterMap, ClusterSettings, DeviceId, DeviceRecord, GroupId, GroupRecord,
    GroupScrub, ImageEntry, ImageLock, KeyName, LeaseHolder, LeaseOutcome, MapBackup, MapChanges, MapError,
    MapPosition, NodeId, NodeMemory, NodeRecord, OutReason, PoolRecord, Proposed, RecoverySettings,
    RemovedImage, ScrubSettings,
};

/// The record of how the cluster recovers.
const RECOVERY: &str = "recovery";
/// The record of when groups are scrubbed, and the directory of what was found.
const SCRUB: &str = "scrub";
const SCRUBS: &str = "scrubs";
/// The directories of records.
const DIRECTORIES: [&str; 19] = [
    "nodes",
    "devices",
    "pools",
    "groups",
    "ranges",
    "images",
    "sizes",
    "locks",
    "removed-images",
    "image-holders",
    "keys",
    "identities",
    "up",
    "out",
    "removed-nodes",
    "temporary",
    "removed",
    "holders",
    "revision",
];
/// Changes of these make the map newer. A change is counted before it is made.
const COUNTED: [&str; 10] = [
    "nodes",
    "removed-nodes",
    "devices",
    "pools",
    "removed",
    "images",
    "sizes",
    "removed-images",
    "keys",
    "out",
];
/// Attempts of a change that others make at the same time.
const ATTEMPTS_MAX: usize = 32;
/// Most bytes of a record.
const RECORD_BYTES_MAX: u64 = 1 << 20;

/// A map in a directory. Any number of processes use it at a time; its values are JSON.
pub struct LocalMap {
    root: PathBuf,
}

/// How a record becomes visible.
enum Publish {
    /// Fails if there is one.
    New,
    /// Takes the place of the one that is there.
    Replace,
}

impl LocalMap {
    /// Opens the map in a directory, which is created if it is not there.
    ///
    /// # Errors
    /// [`MapError::Storage`] if the directory cannot be used.
    pub fn open(path: &Path) -> Result<LocalMap, MapError> {
        let map = LocalMap { root: path.to_path_buf() };
        for directory in DIRECTORIES {
            let directory = path.join(directory);
            fs::create_dir_all(&directory).map_err(|error| failed(&directory, &error))?;
        }
        // A map that is there is only read: a full file system keeps no node from starting, and no status
        // from being shown.
        if !path.join("cluster").exists() {
            map.publish(Path::new("cluster"), &Uuid::new_v4(), Publish::New)?;
        }
        Ok(map)
    }

    /// The directory is a copy: the processes and the addresses that it names are those of the original, with
    /// which the nodes of this map have nothing to do.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn forget_processes(&self) -> Result<(), MapError> {
        for directory in ["holders", "up"] {
            for name in self.names(Path::new(directory))? {
                self.remove(&Path::new(directory).join(name))?;
            }
        }
        for (id, node) in self.nodes()? {
            self.put_node(id, &NodeRecord { addresses: Vec::new(), ..node })?;
        }
        Ok(())
    }

    /// Writes a record and makes it durable, then gives it its name. Returns whether it has it.
    fn publish(&self, name: &Path, value: &impl Serialize, how: Publish) -> Result<bool, MapError> {
        self.count_change(name)?;
        self.publish_uncounted(name, value, how)
    }

    /// The same of what makes the map no newer.
    fn publish_uncounted(&self, name: &Path, value: &impl Serialize, how: Publish) -> Result<bool, MapError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let unique = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        self.remove_abandoned();
        let temporary = self.root.join("temporary").join(unique);
        let bytes = serde_json::to_vec(value).expect("records have names as keys");
        let write = || -> std::io::Result<File> {
            // What a process with the same number left.
            let _ = fs::remove_file(&temporary);
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&temporary)?;
            // For as long as it is open: it is not abandoned.
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            Ok(file)
        };
        // Nothing is left of what cannot be written: that is tried again and again.
        let _written: File = write().map_err(|error| {
            let _ = fs::remove_file(&temporary);
            failed(&temporary, &error)
        })?;
        let path = self.root.join(name);
        let published = match how {
            Publish::New => fs::hard_link(&temporary, &path),
            Publish::Replace => fs::rename(&temporary, &path),
        };
        let _ = fs::remove_file(&temporary);
        match published {
            Ok(()) => sync_directory(path.parent().unwrap_or(&self.root)).map(|()| true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(failed(&path, &error)),
        }
    }

    /// Removes what processes have left that were killed while they wrote: those that are gone, and have no
    /// lock of it. A process that another machine or container sees under another number has the lock.
    fn remove_abandoned(&self) {
        let directory = Path::new("temporary");
        for name in self.names(directory).unwrap_or_default() {
            let process = name.split_once('-').and_then(|(process, _)| process.parse::<u32>().ok());
            if process.is_none_or(|process| Path::new(&format!("/proc/{process}")).exists()) {
                continue;
            }
            let path = self.root.join(directory).join(name);
            let is_locked =
                |file: File| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err();
            if File::open(&path).is_ok_and(|file| !is_locked(file)) {
                let _ = fs::remove_file(path);
            }
        }
    }

    /// Reads a record; `None` if there is none.
    fn read<T: DeserializeOwned>(&self, name: &Path) -> Result<Option<T>, MapError> {
        let path = self.root.join(name);
        let bytes = match fs::metadata(&path).and_then(|metadata| match metadata.len() {
            0..=RECORD_BYTES_MAX => fs::read(&path),
            _ => Err(ErrorKind::FileTooLarge.into()),
        }) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&path, &error)),
        };
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| MapError::Record { what: path.display().to_string(), reason: error.to_string() })
    }

    /// The names of a directory's records.
    fn names(&self, directory: &Path) -> Result<Vec<String>, MapError> {
        let path = self.root.join(directory);
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(&path, &error)),
        };
        let names = entries.map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
        names.collect::<Result<_, _>>().map_err(|error| failed(&path, &error))
    }

    /// The records of a directory whose names are numbers.
    fn numbered<T: DeserializeOwned>(&self, directory: &str) -> Result<BTreeMap<u32, T>, MapError> {
        let mut all = BTreeMap::new();
        for name in self.names(Path::new(directory))? {
            let path = Path::new(directory).join(&name);
            if let Ok(number) = name.parse()
                && let Some(record) = self.read(&path)?
            {
                all.insert(number, record);
            }
        }
        Ok(all)
    }

    /// Replaces a record of a directory that maps of earlier releases do not have.
    fn put_in(&self, directory: &str, number: u32, value: &impl Serialize) -> Result<(), MapError> {
        let path = self.root.join(directory);
        fs::create_dir_all(&path).map_err(|error| failed(&path, &error))?;
        self.publish(&Path::new(directory).join(number.to_string()), value, Publish::Replace).map(drop)
    }

    /// Gives an identity to a number; an error if another one has it.
    fn claim_identity(&self, what: &'static str, uuid: Uuid, number: u32) -> Result<(), MapError> {
        let name = PathBuf::from("identities").join(format!("{what}-{uuid}"));
        if self.publish(&name, &number, Publish::New)? {
            return Ok(());
        }
        match self.read::<u32>(&name)? {
            Some(owner) if owner != number => Err(MapError::SameIdentity { what, uuid, number: owner }),
            _ => Ok(()),
        }
    }

    /// Removes a record; `false` if there is none.
    fn remove(&self, name: &Path) -> Result<bool, MapError> {
        self.count_change(name)?;
        let path = self.root.join(name);
        match fs::remove_file(&path) {
            Ok(()) => sync_directory(path.parent().unwrap_or(&self.root)).map(|()| true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(failed(&path, &error)),
        }
    }

    /// Removes the record of a group.
    fn remove_group(&self, id: GroupId) -> Result<(), MapError> {
        let path = self.root.join(group_directory(id));
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(&path, &error)),
            _ => Ok(()),
        }
    }

    fn remove_epochs_before(&self, id: GroupId, epoch: u32) -> Result<(), MapError> {
        let directory = group_directory(id);
        for old in self.names(&directory)? {
            if old.parse().is_ok_and(|old: u32| old < epoch) {
                let _ = fs::remove_file(self.root.join(&directory).join(old));
            }
        }
        Ok(())
    }

    /// The newest epoch of a group.
    fn newest_epoch(&self, id: GroupId) -> Result<Option<u32>, MapError> {
        let names = self.names(&group_directory(id))?;
        Ok(names.iter().filter_map(|name| name.parse().ok()).max())
    }
}

fn failed(path: &Path, error: &std::io::Error) -> MapError {
    MapError::Storage { what: path.display().to_string(), reason: error.to_string() }
}

/// Makes the names of a directory durable.
fn sync_directory(path: &Path) -> Result<(), MapError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(|error| failed(path, &error))
}

fn range_from((first, groups): (u32, u32)) -> Range<u32> {
    first..first.saturating_add(groups)
}

fn group_directory(id: GroupId) -> PathBuf {
    PathBuf::from("groups").join(id.0.to_string())
}

/// A name of people as the name of a file: what is neither a letter, a digit nor `-` is its bytes in
/// hexadecimal.
fn file_name(name: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let escape =
        |byte: u8| if is_plain(byte) { char::from(byte).to_string() } else { format!("_{byte:02x}") };
    name.bytes().map(escape).collect()
}

/// The name of people that a file's name is.
fn plain_name(file: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = file.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(if byte == b'_' {
            let digits = [rest.next()?, rest.next()?];
            u8::from_str_radix(str::from_utf8(&digits).ok()?, 16).ok()?
        } else {
            byte
        });
    }
    String::from_utf8(bytes).ok()
}

fn image_path(pool: &str, name: &str) -> PathBuf {
    PathBuf::from("images").join(format!("{}.{}", file_name(pool), file_name(name)))
}

/// The identity of a node that was removed.
fn removed_path(id: NodeId) -> PathBuf {
    Path::new("removed-nodes").join(id.0.to_string())
}

fn key_path(name: KeyName) -> PathBuf {
    Path::new("keys").join(file_name(name.as_str()))
}

impl ClusterMap for LocalMap {
    fn cluster(&self) -> Result<Uuid, MapError> {
        self.read(Path::new("cluster"))?.ok_or_else(|| MapError::Missing("record of the cluster".to_string()))
    }

    fn settings(&self) -> Result<ClusterSettings, MapError> {
        let settings: ClusterSettings = self.read(Path::new("settings"))?.unwrap_or_default();
        settings.check().map(|()| settings)
    }

    fn create_settings(&self, settings: &ClusterSettings) -> Result<(), MapError> {
        check_settings(self, settings)?;
        match self.publish(Path::new("settings"), settings, Publish::New)? {
            true => Ok(()),
            false => Err(MapError::Exists("a lease and grace of the cluster".to_string())),
        }
    }

    fn nodes(&self) -> Result<BTreeMap<NodeId, NodeRecord>, MapError> {
        let out = self.out()?;
        let node = |(id, node)| {
            let id = NodeId(id);
            (id, NodeRecord { out: out.contains_key(&id), ..node })
        };
        Ok(self.numbered::<NodeRecord>("nodes")?.into_iter().map(node).collect())
    }

    fn put_node(&self, id: NodeId, node: &NodeRecord) -> Result<(), MapError> {
        if self.read::<Uuid>(&removed_path(id))?.is_some() {
            return Err(MapError::Removed(id));
        }
        self.claim_identity("node", node.uuid, id.0)?;
        self.publish(&Path::new("nodes").join(id.0.to_string()), node, Publish::Replace)?;
        Ok(())
    }

    fn create_node(&self, node: &NodeRecord) -> Result<NodeId, MapError> {
        // A map that is an older copy of itself may not have a node that is a member of a group.
        let mut known: BTreeSet<u32> = self.numbered::<NodeRecord>("nodes")?.into_keys().collect();
        known.extend(self.numbered::<Uuid>("removed-nodes")?.into_keys());
        for group in self.names(Path::new("groups"))?.iter().filter_map(|group| group.parse().ok()) {
            let members = self.group(GroupId(group))?.into_iter().flat_map(|record| record.replicas);
            known.extend(members.map(|member| member.0));
        }
        let mut id = known.last().map_or(1, |last| last + 1);
        while !self.publish(&Path::new("nodes").join(id.to_string()), node, Publish::New)? {
            id += 1;
        }
        self.claim_identity("node", node.uuid, id)?;
        Ok(NodeId(id))
    }

    fn remove_node(&self, id: NodeId) -> Result<(), MapError> {
        let name = Path::new("nodes").join(id.0.to_string());
        let node: NodeRecord =
            self.read(&name)?.ok_or_else(|| MapError::Missing(format!("node {}", id.0)))?;
        // Before anything is removed: from here on the node is refused, and what is interrupted can be
        // repeated.
        self.publish(&removed_path(id), &node.uuid, Publish::Replace)?;
        for (device, _) in self.devices()?.into_iter().filter(|(_, device)| device.node == id) {
            self.remove(&Path::new("devices").join(device.0.to_string()))?;
        }
        self.remove(&Path::new("out").join(id.0.to_string()))?;
        self.remove(&Path::new("up").join(id.0.to_string()))?;
        self.remove(&name).map(drop)
    }

    fn devices(&self) -> Result<BTreeMap<DeviceId, DeviceRecord>, MapError> {
        Ok(self.numbered("devices")?.into_iter().map(|(id, device)| (DeviceId(id), device)).collect())
    }

    fn put_device(&self, id: DeviceId, device: &DeviceRecord) -> Result<(), MapError> {
        let node = PathBuf::from("nodes").join(device.node.0.to_string());
        if self.read::<NodeRecord>(&node)?.is_none() {
            return Err(MapError::Missing(format!("node {}", device.node.0)));
        }
        self.claim_identity("device", device.uuid, id.0)?;
        self.publish(&Path::new("devices").join(id.0.to_string()), device, Publish::Replace)?;
        Ok(())
    }

    fn pools(&self) -> Result<BTreeMap<String, PoolRecord>, MapError> {
        let mut pools = BTreeMap::new();
        for file in self.names(Path::new("pools"))? {
            if let Some(name) = plain_name(&file)
                && let Some(pool) = self.read(&Path::new("pools").join(file))?
            {
                pools.insert(name, pool);
            }
        }
        Ok(pools)
    }

    fn free_groups(&self, groups: u32) -> Result<u32, MapError> {
        let mut taken = self.removed_groups()?;
        taken.extend(self.numbered::<u32>("ranges")?.into_iter().map(range_from));
        taken.extend(self.pools()?.values().map(range_of));
        let counted = taken.iter().map(|range| range.end).filter(|end| *end <= COUNTED_END);
        groups::free_groups(groups, counted.max().unwrap_or(0), &taken)
    }

    fn removed_groups(&self) -> Result<Vec<Range<u32>>, MapError> {
        Ok(self.numbered::<u32>("removed")?.into_iter().map(range_from).collect())
    }

    fn create_pool(&self, name: &str, pool: &PoolRecord) -> Result<(), MapError> {
        let pools = self.pools()?;
        check_pool(name, pool, &pools, &self.removed_groups()?)?;
        // Its groups are its own from here on, whatever others do at the same time.
        let range = Path::new("ranges").join(pool.first_group.to_string());
        if !self.publish(&range, &pool.groups, Publish::New)? {
            return Err(MapError::Invalid(format!("groups of pool {name} are another's meanwhile")));
        }
        match self.publish(&Path::new("pools").join(file_name(name)), pool, Publish::New)? {
            true => Ok(()),
            false => Err(MapError::Exists(format!("pool {name}"))),
        }
    }

    fn change_pool(&self, name: &str, known: &PoolRecord, to: &PoolRecord) -> Result<bool, MapError> {
        self.change_pool_record(name, known, to)
    }

    fn rename_pool(&self, name: &str, to: &str) -> Result<(), MapError> {
        self.rename_pool_record(name, to)
    }

    fn remove_pool(&self, name: &str) -> Result<(), MapError> {
        let pool = self.pools()?.remove(name).ok_or_else(|| MapError::Missing(format!("pool {name}")))?;
        if self.images()?.keys().any(|(of, _)| of == name) {
            return Err(MapError::Invalid(format!("pool {name} has images: remove them first")));
        }
        self.remove(&Path::new("pools").join(file_name(name)))?;
        // What says that their replicas are superfluous: a map that knows nothing of a group removes none.
        let removed = Path::new("removed").join(pool.first_group.to_string());
        self.publish(&removed, &pool.groups, Publish::New)?;
        range_of(&pool).try_for_each(|group| self.remove_group(GroupId(group)))
    }

    fn group(&self, id: GroupId) -> Result<Option<GroupRecord>, MapError> {
        // One that is removed meanwhile has a newer one.
        while let Some(epoch) = self.newest_epoch(id)? {
            if let Some(record) = self.read(&group_directory(id).join(epoch.to_string()))? {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }

    fn propose_group(&self, id: GroupId, record: &GroupRecord) -> Result<Proposed, MapError> {
        record.check()?;
        let directory = group_directory(id);
        let path = self.root.join(&directory);
        fs::create_dir_all(&path).map_err(|error| failed(&path, &error))?;
        let epoch = record.config.epoch;
        let known = self.newest_epoch(id)?;
        if known.unwrap_or(0) + 1 == epoch
            && self.publish(&directory.join(epoch.to_string()), record, Publish::New)?
        {
            self.remove_epochs_before(id, epoch)?;
            // An epoch that others left behind meanwhile, so that its name was free again, is not a new one.
            if self.newest_epoch(id)? == Some(epoch) {
                return Ok(Proposed::Accepted);
            }
            let _ = fs::remove_file(path.join(epoch.to_string()));
        }
        match self.group(id)? {
            // A repeated proposal whose answer was lost.
            Some(known) if known == *record => Ok(Proposed::Accepted),
            Some(known) => Ok(Proposed::Superseded(known)),
            None => Ok(Proposed::Missing),
        }
    }

    fn raise_group(&self, id: GroupId, record: &GroupRecord) -> Result<Proposed, MapError> {
        record.check()?;
        let directory = group_directory(id);
        let path = self.root.join(&directory);
        // A map that is gone does not come back.
        match fs::create_dir(&path) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(failed(&path, &error)),
            _ => {}
        }
        let epoch = record.config.epoch;
        for _ in 0..ATTEMPTS_MAX {
            match self.group(id)? {
                Some(known) if known == *record => return Ok(Proposed::Accepted),
                Some(known) if known.config.epoch >= epoch => return Ok(Proposed::Superseded(known)),
                _ => {}
            }
            if self.publish(&directory.join(epoch.to_string()), record, Publish::New)? {
                self.remove_epochs_before(id, epoch)?;
            }
        }
        Err(MapError::Storage {
            what: path.display().to_string(),
            reason: "others change it all the time".to_string(),
        })
    }

    fn images(&self) -> Result<BTreeMap<(String, String), ImageEntry>, MapError> {
        self.all_images()
    }

    fn create_image(&self, pool: &str, name: &str, bytes: u64) -> Result<ImageEntry, MapError> {
        if !self.pools()?.contains_key(pool) {
            return Err(MapError::Missing(format!("pool {pool}")));
        }
        check_image_name(name)?;
        let image = ImageEntry::new(Uuid::new_v4(), random_volume(), bytes);
        let _names = self.lock_names(FlockOperation::LockExclusive)?;
        // The pool may have another name meanwhile.
        if !self.has_pool(pool)? {
            return Err(MapError::Missing(format!("pool {pool}")));
        }
        self.free_removed_name(pool, name)?;
        match self.publish(&image_path(pool, name), &image, Publish::New)? {
            true => Ok(image),
            false => Err(MapError::Exists(format!("image {pool}/{name}"))),
        }
    }

    fn change_image(
        &self,
        pool: &str,
        name: &str,
        known: &ImageEntry,
        to: &ImageEntry,
    ) -> Result<bool, MapError> {
        self.change_image_record(pool, name, known, to)
    }

    fn rename_image(
        &self,
        pool: &str,
        name: &str,
        to: &str,
        known: Option<&ImageEntry>,
    ) -> Result<(), MapError> {
        check_image_name(to)?;
        self.rename_image_record(pool, name, to, known)
    }

    fn remove_image(
        &self,
        pool: &str,
        name: &str,
        known: Option<&ImageEntry>,
    ) -> Result<RemovedImage, MapError> {
        self.remove_image_record(pool, name, known)
    }

    fn removed_images(&self) -> Result<BTreeMap<u64, RemovedImage>, MapError> {
        self.all_removed()
    }

    fn image_is_empty(&self, removed: &RemovedImage) -> Result<(), MapError> {
        self.forget_removed(removed)
    }

    fn image_lock(&self, _pool: &str, volume: u64) -> Result<Option<ImageLock>, MapError> {
        Ok(self.newest_version(&lock_directory(volume))?.map(|(_, lock)| lock))
    }

    fn change_image_lock(
        &self,
        _pool: &str,
        volume: u64,
        known: Option<&ImageLock>,
        to: &ImageLock,
    ) -> Result<bool, MapError> {
        self.change_version(&lock_directory(volume), known, to)
    }

    fn renew_holder(&self, lease: Uuid, seconds: u32) -> Result<(), MapError> {
        self.renew_file(&Path::new("image-holders").join(lease.to_string()), seconds)
    }

    fn end_holder(&self, lease: Uuid) -> Result<(), MapError> {
        self.remove(&Path::new("image-holders").join(lease.to_string())).map(drop)
    }

    fn holder_age(&self, lease: Uuid) -> Result<Option<Duration>, MapError> {
        self.age_of(&Path::new("image-holders").join(lease.to_string()))
    }

    fn client_keys(&self) -> Result<BTreeMap<KeyName, ClientKeyRecord>, MapError> {
        let mut keys = BTreeMap::new();
        for file in self.names(Path::new("keys"))? {
            if let Some(name) = plain_name(&file).and_then(|name| KeyName::new(&name))
                && let Some(record) = self.read(&Path::new("keys").join(file))?
            {
                keys.insert(name, record);
            }
        }
        Ok(keys)
    }

    fn create_client_key(&self, name: KeyName, record: &ClientKeyRecord) -> Result<(), MapError> {
        check_client_key(record, &self.pools()?, self.names(Path::new("keys"))?.len())?;
        match self.publish(&key_path(name), record, Publish::New)? {
            true => Ok(()),
            false => Err(MapError::Exists(format!("client key {name}"))),
        }
    }

    fn remove_client_key(&self, name: KeyName) -> Result<(), MapError> {
        match self.remove(&key_path(name))? {
            true => Ok(()),
            false => Err(MapError::Missing(format!("client key {name}"))),
        }
    }

    fn renew_lease(
        &self,
        node: NodeId,
        holder: &LeaseHolder,
        seconds: u32,
    ) -> Result<LeaseOutcome, MapError> {
        self.renew(node, holder, seconds)
    }

    fn end_lease(&self, node: NodeId, holder: &LeaseHolder) -> Result<(), MapError> {
        self.end(node, holder)
    }

    fn nodes_up(&self) -> Result<BTreeSet<NodeId>, MapError> {
        let mut up = BTreeSet::new();
        for (id, seconds) in self.numbered::<u32>("up")? {
            let renewed =
                fs::metadata(self.root.join("up").join(id.to_string())).and_then(|it| it.modified());
            // A time in the future is a clock that was set.
            let age = renewed.map(|renewed| renewed.elapsed().unwrap_or_default());
            up.extend(age.is_ok_and(|age| age.as_secs() < seconds.into()).then_some(NodeId(id)));
        }
        Ok(up)
    }

    fn out(&self) -> Result<BTreeMap<NodeId, OutReason>, MapError> {
        Ok(self.numbered("out")?.into_iter().map(|(id, reason)| (NodeId(id), reason)).collect())
    }

    fn set_out(&self, node: NodeId, reason: Option<OutReason>) -> Result<(), MapError> {
        let name = Path::new("out").join(node.0.to_string());
        match reason {
            Some(reason) => self.publish(&name, &reason, Publish::Replace).map(drop),
            None => self.remove(&name).map(drop),
        }
    }

    fn recovery(&self) -> Result<RecoverySettings, MapError> {
        Ok(self.read(Path::new(RECOVERY))?.unwrap_or_default())
    }

    fn change_recovery(&self, known: &RecoverySettings, to: &RecoverySettings) -> Result<bool, MapError> {
        to.check()?;
        // Of two changes at a time the second one sees the first.
        let _changes = self.lock_names(FlockOperation::LockExclusive)?;
        if self.recovery()? != *known {
            return Ok(false);
        }
        self.publish(Path::new(RECOVERY), to, Publish::Replace)
    }

    fn scrub(&self) -> Result<ScrubSettings, MapError> {
        Ok(self.read(Path::new(SCRUB))?.unwrap_or_default())
    }

    fn change_scrub(&self, known: &ScrubSettings, to: &ScrubSettings) -> Result<bool, MapError> {
        to.check()?;
        // Of two changes at a time the second one sees the first.
        let _changes = self.lock_names(FlockOperation::LockExclusive)?;
        if self.scrub()? != *known {
            return Ok(false);
        }
        self.publish(Path::new(SCRUB), to, Publish::Replace)
    }

    fn group_scrubs(&self) -> Result<BTreeMap<GroupId, GroupScrub>, MapError> {
        Ok(self.numbered(SCRUBS)?.into_iter().map(|(id, scrub)| (GroupId(id), scrub)).collect())
    }

    fn put_group_scrub(&self, group: GroupId, scrub: &GroupScrub) -> Result<(), MapError> {
        self.put_in(SCRUBS, group.0, scrub)
    }

    fn node_memories(&self) -> Result<BTreeMap<NodeId, NodeMemory>, MapError> {
        Ok(self.numbered("memory")?.into_iter().map(|(id, memory)| (NodeId(id), memory)).collect())
    }

    fn put_node_memory(&self, node: NodeId, memory: &NodeMemory) -> Result<(), MapError> {
        self.put_in("memory", node.0, memory)
    }

    fn accepted_losses(&self) -> Result<BTreeMap<GroupId, AcceptedLoss>, MapError> {
        Ok(self.numbered("losses")?.into_iter().map(|(id, loss)| (GroupId(id), loss)).collect())
    }

    fn accept_loss(&self, group: GroupId, loss: &AcceptedLoss) -> Result<(), MapError> {
        self.put_in("losses", group.0, loss)
    }

    fn position(&self) -> Result<MapPosition, MapError> {
        Ok(self.history()?.position(self.counted_changes()?))
    }

    fn report_lost(&self, revision: u64) -> Result<(), MapError> {
        self.set_history(self.history()?.with_lost(revision)).map(drop)
    }

    fn accept_older(&self) -> Result<MapPosition, MapError> {
        let history = self.history()?;
        history.check_complete()?;
        self.set_history(history.accepted(self.counted_changes()?, 0))
    }

    fn backup(&self) -> Result<MapBackup, MapError> {
        self.read_all()
    }

    fn restore(&self, backup: &MapBackup, known: u64) -> Result<MapPosition, MapError> {
        self.replace_all(backup, known)
    }

    fn changes(&self) -> Box<dyn MapChanges> {
        Box::new(LocalChanges::new(self.root.clone()))
    }
}
