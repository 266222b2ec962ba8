//! The map in a directory, for clusters on one machine.
//!
//! A record is a file, and nothing is ever locked: nodes are processes, and one that is stopped at the wrong moment must
//! keep no other from the map. A compare-and-swap is `link(2)`, which fails if the name is there: the record of a group's
//! epoch is `groups/GROUP/EPOCH`, written elsewhere and made durable first. The newest epoch counts; older ones are
//! removed by the process that wrote a newer one.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use crate::{
    ClusterMap, DeviceId, DeviceRecord, GroupId, GroupRecord, ImageEntry, MapError, NodeId, NodeRecord,
    PoolRecord, Proposed,
};

/// The directories of records.
const DIRECTORIES: [&str; 8] =
    ["nodes", "devices", "pools", "groups", "images", "volumes", "identities", "temporary"];
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
        map.publish(Path::new("cluster"), &Uuid::new_v4(), Publish::New)?;
        Ok(map)
    }

    /// Writes a record and makes it durable, then gives it its name. Returns whether it has it.
    fn publish(&self, name: &Path, value: &impl Serialize, how: Publish) -> Result<bool, MapError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let unique = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let temporary = self.root.join("temporary").join(unique);
        let bytes = serde_json::to_vec(value).expect("records have names as keys");
        let write = || {
            // What a process with the same number left.
            let _ = fs::remove_file(&temporary);
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&temporary)?;
            file.write_all(&bytes)?;
            file.sync_all()
        };
        write().map_err(|error| failed(&temporary, &error))?;
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

fn group_directory(id: GroupId) -> PathBuf {
    PathBuf::from("groups").join(id.0.to_string())
}

/// A name of people as the name of a file: what is neither a letter, a digit nor `-` is its bytes in hexadecimal.
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

impl ClusterMap for LocalMap {
    fn cluster(&self) -> Result<Uuid, MapError> {
        self.read(Path::new("cluster"))?.ok_or_else(|| MapError::Missing("record of the cluster".to_string()))
    }

    fn nodes(&self) -> Result<BTreeMap<NodeId, NodeRecord>, MapError> {
        Ok(self.numbered("nodes")?.into_iter().map(|(id, node)| (NodeId(id), node)).collect())
    }

    fn put_node(&self, id: NodeId, node: &NodeRecord) -> Result<(), MapError> {
        self.claim_identity("node", node.uuid, id.0)?;
        self.publish(&Path::new("nodes").join(id.0.to_string()), node, Publish::Replace)?;
        Ok(())
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

    fn create_pool(&self, name: &str, pool: &PoolRecord) -> Result<(), MapError> {
        let PoolRecord { first_group, groups, replicas, in_sync_min } = *pool;
        let end = first_group.checked_add(groups);
        if name.is_empty() || groups == 0 || !(1..=replicas).contains(&in_sync_min) || end.is_none() {
            let reason = "a pool has a name, groups, and at most as many replicas in sync as replicas";
            return Err(MapError::Invalid(reason.to_string()));
        }
        for (other, record) in self.pools()? {
            let before = first_group.saturating_add(groups) <= record.first_group;
            let after = record.first_group.saturating_add(record.groups) <= first_group;
            if other == name {
                return Err(MapError::Exists(format!("pool {name}")));
            }
            if !before && !after {
                return Err(MapError::Invalid(format!("pool {name} would share groups with pool {other}")));
            }
        }
        match self.publish(&Path::new("pools").join(file_name(name)), pool, Publish::New)? {
            true => Ok(()),
            false => Err(MapError::Exists(format!("pool {name}"))),
        }
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
            for old in self.names(&directory)? {
                if old.parse().is_ok_and(|old: u32| old < epoch) {
                    let _ = fs::remove_file(path.join(old));
                }
            }
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

    fn images(&self) -> Result<BTreeMap<(String, String), ImageEntry>, MapError> {
        let mut images = BTreeMap::new();
        for file in self.names(Path::new("images"))? {
            let Some((pool, name)) = file.split_once('.') else { continue };
            if let (Some(pool), Some(name)) = (plain_name(pool), plain_name(name))
                && let Some(image) = self.read(&Path::new("images").join(&file))?
            {
                images.insert((pool, name), image);
            }
        }
        Ok(images)
    }

    fn create_image(&self, pool: &str, name: &str, bytes: u64) -> Result<ImageEntry, MapError> {
        if !self.pools()?.contains_key(pool) {
            return Err(MapError::Missing(format!("pool {pool}")));
        }
        if name.is_empty() || name.len() > 64 || name.contains(['/', '\n']) {
            return Err(MapError::Invalid(format!(
                "{name:?} is no name of an image: 1 to 64 bytes without `/`"
            )));
        }
        // Numbers are used once: objects of a removed image never belong to another.
        let volumes = self.numbered::<()>("volumes")?;
        let mut volume = volumes.last_key_value().map_or(1, |(last, ())| last + 1);
        while !self.publish(&Path::new("volumes").join(volume.to_string()), &(), Publish::New)? {
            volume += 1;
        }
        let image = ImageEntry { uuid: Uuid::new_v4(), volume: volume.into(), bytes };
        match self.publish(&image_path(pool, name), &image, Publish::New)? {
            true => Ok(image),
            false => Err(MapError::Exists(format!("image {pool}/{name}"))),
        }
    }

    fn resize_image(&self, pool: &str, name: &str, bytes: u64) -> Result<ImageEntry, MapError> {
        let path = image_path(pool, name);
        let image: Option<ImageEntry> = self.read(&path)?;
        let image = image.ok_or_else(|| MapError::Missing(format!("image {pool}/{name}")))?;
        let image = ImageEntry { bytes, ..image };
        self.publish(&path, &image, Publish::Replace)?;
        Ok(image)
    }

    fn remove_image(&self, pool: &str, name: &str) -> Result<(), MapError> {
        let path = self.root.join(image_path(pool, name));
        match fs::remove_file(&path) {
            Ok(()) => sync_directory(&self.root.join("images")),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(MapError::Missing(format!("image {pool}/{name}")))
            }
            Err(error) => Err(failed(&path, &error)),
        }
    }
}
