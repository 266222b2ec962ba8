//! What a node has seen of its cluster's map, in a file of its own: a map that is an older copy of itself is
//! known by it, and gets back the records of groups that it lacks.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{GroupId, GroupRecord, MapError};

/// Most bytes of the file: a node has some thousands of groups at most.
const FILE_BYTES_MAX: u64 = 64 << 20;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Contents {
    cluster: Uuid,
    node: Uuid,
    revision: u64,
    groups: BTreeMap<u32, GroupRecord>,
}

/// The newest that a node has seen: the revision of the map, and the records of its groups. It is written
/// with [`save`](Self::save), which replaces the file whole.
#[derive(Debug)]
pub struct KnownMap {
    path: Option<PathBuf>,
    contents: Contents,
    is_changed: bool,
    has_new_groups: bool,
}

impl KnownMap {
    /// Its name in the directory of a node.
    pub const FILE: &str = "map.json";

    /// What the node saw before, if the file is there and is its own. Without a path nothing is kept.
    ///
    /// # Errors
    /// [`MapError::Storage`] if the file cannot be read, [`MapError::Record`] if it is damaged.
    pub fn open(path: Option<&Path>, cluster: Uuid, node: Uuid) -> Result<KnownMap, MapError> {
        let known = path.map(read).transpose()?.flatten();
        let known = known.filter(|known| known.cluster == cluster && known.node == node);
        let contents = known.unwrap_or(Contents { cluster, node, revision: 0, groups: BTreeMap::new() });
        Ok(KnownMap { path: path.map(Path::to_path_buf), contents, is_changed: false, has_new_groups: false })
    }

    /// The revision in the file of a node of this cluster, whichever node it is.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn revision_in(path: &Path, cluster: Uuid) -> Result<Option<u64>, MapError> {
        Ok(read(path)?.filter(|known| known.cluster == cluster).map(|known| known.revision))
    }

    /// The highest revision of the map.
    pub fn revision(&self) -> u64 {
        self.contents.revision
    }

    /// The newest records of groups.
    pub fn groups(&self) -> impl Iterator<Item = (GroupId, &GroupRecord)> {
        self.contents.groups.iter().map(|(group, record)| (GroupId(*group), record))
    }

    /// Whether a record of a group has changed since it was written.
    pub fn has_new_groups(&self) -> bool {
        self.has_new_groups
    }

    /// The map was seen at this revision.
    pub fn note_revision(&mut self, revision: u64) {
        self.is_changed |= revision > self.contents.revision;
        self.contents.revision = revision.max(self.contents.revision);
    }

    /// The map has this record of a group.
    pub fn note_group(&mut self, id: GroupId, record: &GroupRecord) {
        let known = self.contents.groups.get(&id.0);
        if known.is_none_or(|known| known.config.epoch < record.config.epoch) {
            self.contents.groups.insert(id.0, record.clone());
            (self.is_changed, self.has_new_groups) = (true, true);
        }
    }

    /// The node has no replica of a group any more.
    pub fn forget_group(&mut self, id: GroupId) {
        self.is_changed |= self.contents.groups.remove(&id.0).is_some();
    }

    /// Writes what has changed, durable on return.
    ///
    /// # Errors
    /// [`MapError::Storage`]: the file is as before.
    pub fn save(&mut self) -> Result<(), MapError> {
        let Some(path) = self.path.as_ref().filter(|_| self.is_changed) else { return Ok(()) };
        let text = serde_json::to_vec(&self.contents).expect("records have names as keys");
        let scratch = path.with_extension("new");
        let write = || {
            let mut file =
                fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&scratch)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&scratch, path)?;
            path.parent().map_or(Ok(()), |directory| fs::File::open(directory)?.sync_all())
        };
        write().map_err(|error| failed(path, &error))?;
        (self.is_changed, self.has_new_groups) = (false, false);
        Ok(())
    }
}

fn failed(path: &Path, error: &std::io::Error) -> MapError {
    MapError::Storage { what: path.display().to_string(), reason: error.to_string() }
}

fn read(path: &Path) -> Result<Option<Contents>, MapError> {
    let text = match fs::metadata(path).and_then(|metadata| match metadata.len() {
        0..=FILE_BYTES_MAX => fs::read(path),
        _ => Err(ErrorKind::FileTooLarge.into()),
    }) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(path, &error)),
    };
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|error| MapError::Record { what: path.display().to_string(), reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GroupConfig, ReplicaId};

    #[test]
    fn the_newest_that_was_seen_is_there_after_a_restart_and_that_of_no_other_node() {
        let directory = std::env::temp_dir().join(format!("ringbolt-known-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("map.json");
        let (cluster, node) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let record = |epoch, primary| GroupRecord {
            config: GroupConfig { epoch, primary: ReplicaId(primary), in_sync: vec![ReplicaId(primary)] },
            replicas: vec![ReplicaId(1), ReplicaId(2)],
        };
        let mut known = KnownMap::open(Some(&path), cluster, node).unwrap();
        known.note_revision(7);
        known.note_group(GroupId(3), &record(5, 1));
        known.note_group(GroupId(4), &record(1, 1));
        known.save().unwrap();
        // What is older is not noted.
        known.note_revision(6);
        known.note_group(GroupId(3), &record(4, 2));
        known.forget_group(GroupId(4));
        known.save().unwrap();
        let known = KnownMap::open(Some(&path), cluster, node).unwrap();
        assert_eq!(known.revision(), 7);
        assert_eq!(known.groups().collect::<Vec<_>>(), [(GroupId(3), &record(5, 1))]);
        assert_eq!(KnownMap::revision_in(&path, cluster).unwrap(), Some(7));
        assert_eq!(KnownMap::revision_in(&path, node).unwrap(), None);
        let other = KnownMap::open(Some(&path), cluster, Uuid::from_u128(3)).unwrap();
        assert_eq!((other.revision(), other.groups().count()), (0, 0));
        fs::write(&path, "{").unwrap();
        assert!(matches!(KnownMap::open(Some(&path), cluster, node), Err(MapError::Record { .. })));
        fs::remove_dir_all(directory).unwrap();
    }
}
