//! How new a map in a directory is, and copies of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::Value;
use uuid::Uuid;

use super::images::SIZES;
use super::{ATTEMPTS_MAX, COUNTED, LocalMap, Publish, RECOVERY, SCRUB};
use crate::position::MapHistory;
use crate::{ClusterMap, GroupId, ImageEntry, MapBackup, MapError, MapPosition};

const HISTORY: &str = "history";
/// Records beside those that are [`COUNTED`]; groups have a directory each.
const FILES: [&str; 4] = ["cluster", "settings", RECOVERY, SCRUB];
const OTHERS: [&str; 2] = ["ranges", "identities"];
const IMAGES: &str = "images";
const KIND: &str = "directory";

/// The directories whose files are the records of a backup. An image is there as it was changed last.
fn directories() -> impl Iterator<Item = &'static str> {
    COUNTED.into_iter().chain(OTHERS).filter(|directory| *directory != SIZES)
}

impl LocalMap {
    /// Counts a change of a record, if it makes the map newer.
    pub(super) fn count_change(&self, name: &Path) -> Result<(), MapError> {
        let directory = name.components().next().and_then(|first| first.as_os_str().to_str());
        if !directory.is_some_and(|directory| COUNTED.contains(&directory)) {
            return Ok(());
        }
        let counts = Path::new("revision");
        for _ in 0..ATTEMPTS_MAX {
            let known = self.counted_changes()?;
            if self.publish_uncounted(&counts.join((known + 1).to_string()), &(), Publish::New)? {
                for old in self.names(counts)? {
                    if old.parse().is_ok_and(|old: u64| old <= known) {
                        let _ = fs::remove_file(self.root.join(counts).join(old));
                    }
                }
                return Ok(());
            }
        }
        let what = self.root.join(counts).display().to_string();
        Err(MapError::Storage { what, reason: "others change it all the time".to_string() })
    }

    pub(super) fn counted_changes(&self) -> Result<u64, MapError> {
        let names = self.names(Path::new("revision"))?;
        Ok(names.iter().filter_map(|name| name.parse().ok()).max().unwrap_or(0))
    }

    pub(super) fn history(&self) -> Result<MapHistory, MapError> {
        Ok(self.read(Path::new(HISTORY))?.unwrap_or_default())
    }

    /// Nodes of one machine report the same, and a person accepts it: of two at a time the last one counts,
    /// and what another one reported it reports again.
    pub(super) fn set_history(&self, history: MapHistory) -> Result<MapPosition, MapError> {
        if history != self.history()? {
            self.publish(Path::new(HISTORY), &history, Publish::Replace)?;
        }
        Ok(history.position(self.counted_changes()?))
    }

    /// The records by the names of their files.
    pub(super) fn read_all(&self) -> Result<MapBackup, MapError> {
        for _ in 0..ATTEMPTS_MAX {
            let (before, mut records) = (self.position()?, BTreeMap::new());
            for name in FILES {
                records.extend(self.read::<Value>(Path::new(name))?.map(|record| (name.to_string(), record)));
            }
            for directory in directories() {
                for name in self.names(Path::new(directory))? {
                    let record = self.read_for_backup(directory, &name)?;
                    records.extend(record.map(|record| (format!("{directory}/{name}"), record)));
                }
            }
            for group in self.names(Path::new("groups"))? {
                let Ok(id) = group.parse() else { continue };
                let record = self.group(GroupId(id))?;
                let record = record.map(|record| serde_json::to_value(record).expect("it has names as keys"));
                records.extend(record.map(|record| (format!("groups/{id}"), record)));
            }
            if self.position()? == before {
                return Ok(MapBackup::new(KIND, self.cluster()?, before.revision, records));
            }
        }
        let what = self.root.display().to_string();
        Err(MapError::Storage { what, reason: "others change it all the time".to_string() })
    }

    fn read_for_backup(&self, directory: &str, name: &str) -> Result<Option<Value>, MapError> {
        let path = Path::new(directory).join(name);
        if directory != IMAGES {
            return self.read(&path);
        }
        let Some(created) = self.read::<ImageEntry>(&path)? else { return Ok(None) };
        let image = self.newest_image(created)?;
        Ok(Some(serde_json::to_value(image).expect("it has names as keys")))
    }

    pub(super) fn replace_all(&self, backup: &MapBackup, known: u64) -> Result<MapPosition, MapError> {
        backup.check(KIND, self.read::<Uuid>(Path::new("cluster"))?.filter(|_| !self.is_new()))?;
        let groups = backup.groups(|name| name.strip_prefix("groups/")?.parse().ok())?;
        let is_record = |name: &str| {
            let (directory, file) = name.split_once('/').unwrap_or(("", name));
            let is_known = match directory {
                "" => FILES.contains(&file),
                directory => directories().any(|known| known == directory) || directory == "groups",
            };
            is_known && !file.is_empty() && !file.contains('/') && !file.starts_with('.')
        };
        if let Some(name) = backup.records.keys().find(|name| !is_record(name)) {
            return Err(MapError::Invalid(format!("the backup has a record {name:?}, which no map has")));
        }
        let before = self.position()?;
        let lost = before.lost.filter(|lost| *lost != MapPosition::RESTORING);
        let min = known.max(backup.revision).max(before.revision).max(lost.unwrap_or(0));
        // Until all is there, nothing is believed.
        self.set_history(self.history()?.with_lost(MapPosition::RESTORING))?;
        for (name, record) in backup.records.iter().filter(|(name, _)| !name.starts_with("groups/")) {
            self.publish(Path::new(name), record, Publish::Replace)?;
        }
        self.forget_sizes()?;
        for settings in [RECOVERY, SCRUB] {
            if !backup.records.contains_key(settings) {
                self.remove(Path::new(settings))?;
            }
        }
        for (id, record) in &groups {
            self.raise_group(*id, record)?;
        }
        for directory in directories() {
            for name in self.names(Path::new(directory))? {
                if !backup.records.contains_key(&format!("{directory}/{name}")) {
                    self.remove(&Path::new(directory).join(name))?;
                }
            }
        }
        let kept: BTreeSet<u32> = groups.iter().map(|(id, _)| id.0).collect();
        for id in self.names(Path::new("groups"))?.iter().filter_map(|name| name.parse().ok()) {
            if !kept.contains(&id) {
                self.remove_group(GroupId(id))?;
            }
        }
        self.set_history(self.history()?.accepted(self.counted_changes()?, min))
    }

    /// Whether nothing was written but the cluster's identity, which each map gets that is opened for the
    /// first time.
    fn is_new(&self) -> bool {
        self.counted_changes().is_ok_and(|changes| changes == 0)
            && self.names(Path::new("nodes")).is_ok_and(|nodes| nodes.is_empty())
    }
}
