//! A copy of a map, in a file.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use crate::{GroupId, GroupRecord, MapError};

/// Most bytes of a file: a map of a hundred thousand images has some tens of MiB.
const FILE_BYTES_MAX: u64 = 1 << 30;
const FORMAT: u32 = 1;

/// The records of a map, which [`ClusterMap::restore`](crate::ClusterMap::restore) puts back. None is a
/// secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MapBackup {
    format: u32,
    /// `etcd` or `directory`: names of records differ.
    pub kind: String,
    /// The cluster.
    pub cluster: Uuid,
    /// The revision of the map.
    pub revision: u64,
    /// The records by their names.
    pub records: BTreeMap<String, Value>,
}

impl MapBackup {
    pub(crate) fn new(
        kind: &str,
        cluster: Uuid,
        revision: u64,
        records: BTreeMap<String, Value>,
    ) -> MapBackup {
        MapBackup { format: FORMAT, kind: kind.to_string(), cluster, revision, records }
    }

    /// Refuses what is for another kind of map or another cluster.
    pub(crate) fn check(&self, kind: &str, cluster: Option<Uuid>) -> Result<(), MapError> {
        let reason = if self.kind != kind {
            format!("the backup is of a map in a {}, and this one is in a {kind}", self.kind)
        } else if let Some(other) = cluster.filter(|other| *other != self.cluster) {
            format!("the backup is of cluster {}, and the map is of {other}", self.cluster)
        } else {
            return Ok(());
        };
        Err(MapError::Invalid(reason))
    }

    /// The records of groups, whose numbers `id` finds in their names.
    pub(crate) fn groups(
        &self,
        id: impl Fn(&str) -> Option<u32>,
    ) -> Result<Vec<(GroupId, GroupRecord)>, MapError> {
        let mut groups = Vec::new();
        for (name, value) in &self.records {
            let Some(id) = id(name) else { continue };
            let record: GroupRecord = serde_json::from_value(value.clone())
                .map_err(|error| MapError::Record { what: name.clone(), reason: error.to_string() })?;
            record.check()?;
            groups.push((GroupId(id), record));
        }
        Ok(groups)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`MapError::Storage`]; [`MapError::Invalid`] if it is no backup.
    pub fn load(path: &Path) -> Result<MapBackup, MapError> {
        let failed = |reason: String| MapError::Storage { what: path.display().to_string(), reason };
        let bytes = fs::metadata(path).map_err(|error| failed(error.to_string()))?.len();
        if bytes > FILE_BYTES_MAX {
            return Err(failed("it is too large for a backup of a map".to_string()));
        }
        let text = fs::read(path).map_err(|error| failed(error.to_string()))?;
        let backup: MapBackup = serde_json::from_slice(&text).map_err(|error| {
            MapError::Invalid(format!("{} is no backup of a map: {error}", path.display()))
        })?;
        match backup.format {
            FORMAT => Ok(backup),
            other => Err(MapError::Invalid(format!(
                "{} has format {other}, and this version reads {FORMAT}",
                path.display()
            ))),
        }
    }

    /// Writes a file, which its owner alone can read and which is durable on return.
    ///
    /// # Errors
    /// [`MapError::Storage`], also if there is a file.
    pub fn save(&self, path: &Path) -> Result<(), MapError> {
        let text = serde_json::to_vec_pretty(self).expect("records have names as keys");
        let written = fs::File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()));
        written.map_err(|error| MapError::Storage {
            what: path.display().to_string(),
            reason: error.to_string(),
        })
    }
}
