//! How new a map in etcd is, and copies of it.
//!
//! Its revision is that of etcd, which counts all changes, those of leases and of other clusters too: a
//! snapshot always lacks some.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use uuid::Uuid;

use super::messages::{
    DeleteAnswer, KeyValue, RangeAnswer, base64, end_of_prefix, put, put_if, revision_is, version_is,
};
use super::{ATTEMPTS_MAX, EtcdMap, busy, decode, encode};
use crate::position::MapHistory;
use crate::{ClusterMap, MapBackup, MapError, MapPosition};

const HISTORY: &str = "history";
/// What says who is up, and is in no backup.
const LEASES: [&str; 3] = ["up/", "holders/", "image-holders/"];
const GROUPS: &str = "groups/";
/// What only goes on, and the number that does: who has an image attached, what a node has seen, and losses
/// that were accepted. Of the map and a backup the one with the higher number counts, and none is removed.
const CONTINUED: [(&str, &str); 3] =
    [("attached/", "attach_epoch"), ("memory/", "incarnation"), ("losses/", "epoch")];
const KIND: &str = "etcd";
/// Keys that are put in one transaction; etcd permits 128 operations.
const PUTS: usize = 100;

/// How new the map is, and what says so.
pub(super) struct ReadPosition {
    pub(super) position: MapPosition,
    of_storage: u64,
    pub(super) history: MapHistory,
    key: Option<KeyValue>,
}

impl EtcdMap {
    pub(super) fn read_position(&self) -> Result<ReadPosition, MapError> {
        let request = json!({ "key": base64(self.key(HISTORY)) });
        let answer: RangeAnswer = self.client.post("/v3/kv/range", &request)?;
        let of_storage = u64::try_from(answer.header.revision).unwrap_or(0);
        let key = answer.kvs.into_iter().next();
        let history = key.as_ref().map_or(Ok(MapHistory::default()), |key| decode(HISTORY, key))?;
        Ok(ReadPosition { position: history.position(of_storage), of_storage, history, key })
    }

    pub(super) fn change_history(
        &self,
        change: impl Fn(MapHistory, u64) -> MapHistory,
    ) -> Result<MapPosition, MapError> {
        for _ in 0..ATTEMPTS_MAX {
            let ReadPosition { of_storage, history, key: found, .. } = self.read_position()?;
            let next = change(history, of_storage);
            if next == history {
                return Ok(history.position(of_storage));
            }
            let key = self.key(HISTORY);
            let compare = found.map_or(version_is(&key, 0), |found| revision_is(&key, found.mod_revision));
            if self.transaction(&put_if(&compare, &key, &encode(&next)))?.succeeded {
                return Ok(self.read_position()?.position);
            }
        }
        Err(busy(HISTORY))
    }

    /// The records by their names, all as of one revision, and what is no record.
    pub(super) fn read_all(&self) -> Result<MapBackup, MapError> {
        let prefix = self.key("");
        let (found, of_storage) = self.client.range_at(prefix.as_bytes(), &end_of_prefix(&prefix))?;
        let mut records: BTreeMap<String, Value> = BTreeMap::new();
        let mut history = MapHistory::default();
        for found in found {
            let name = String::from_utf8_lossy(&found.key[prefix.len()..]).into_owned();
            if name == HISTORY {
                history = decode(HISTORY, &found)?;
            } else if !LEASES.iter().any(|leases| name.starts_with(leases)) {
                records.insert(name.clone(), decode(&name, &found)?);
            }
        }
        let cluster = records.get("cluster").and_then(|cluster| cluster.as_str()?.parse::<Uuid>().ok());
        let cluster = cluster.ok_or_else(|| MapError::Missing(format!("cluster in etcd below {prefix}")))?;
        Ok(MapBackup::new(KIND, cluster, history.position(of_storage).revision, records))
    }

    pub(super) fn replace_all(&self, backup: &MapBackup, known: u64) -> Result<MapPosition, MapError> {
        backup.check(KIND, self.get("cluster")?)?;
        let groups = backup.groups(|name| name.strip_prefix(GROUPS)?.parse().ok())?;
        // Until all is there, nothing is believed. One that is not complete lacks more than anything.
        let before = self.read_position()?.position;
        let lost = before.lost.filter(|lost| *lost != MapPosition::RESTORING);
        let min = known.max(backup.revision).max(before.revision).max(lost.unwrap_or(0));
        self.change_history(|history, _| history.with_lost(MapPosition::RESTORING))?;
        let is_record = |name: &str| !name.starts_with(GROUPS) && continued_by(name).is_none();
        let others: Vec<_> = backup.records.iter().filter(|(name, _)| is_record(name)).collect();
        for some in others.chunks(PUTS) {
            let put = |(name, value): &(&String, &Value)| json!({ "request_put": put(&self.key(name), &encode(value)) });
            self.transaction(&json!({ "success": some.iter().map(put).collect::<Vec<_>>() }))?;
        }
        for (id, record) in &groups {
            self.raise_group(*id, record)?;
        }
        for (name, record) in &backup.records {
            continued_by(name).map_or(Ok(()), |by| self.continue_record(name, record, by))?;
        }
        let kept: BTreeSet<&str> = backup.records.keys().map(String::as_str).collect();
        let prefix = self.key("");
        for found in self.client.range(prefix.as_bytes(), &end_of_prefix(&prefix))? {
            let name = String::from_utf8_lossy(&found.key[prefix.len()..]).into_owned();
            let is_kept = kept.contains(name.as_str())
                || name == HISTORY
                || continued_by(&name).is_some()
                || LEASES.iter().any(|leases| name.starts_with(leases));
            if !is_kept {
                let request = json!({ "key": base64(&found.key) });
                self.client.post::<DeleteAnswer>("/v3/kv/deleterange", &request)?;
            }
        }
        self.change_history(|history, of_storage| history.accepted(of_storage, min))
    }

    /// Replaces a record that only goes on, if that of a backup is later.
    fn continue_record(&self, name: &str, record: &Value, by: &str) -> Result<(), MapError> {
        let key = self.key(name);
        for _ in 0..ATTEMPTS_MAX {
            let found = self.client.get(&key)?;
            let known: Option<Value> = found.as_ref().map(|found| decode(name, found)).transpose()?;
            // That of another device goes on from nothing in the backup.
            let is_of_another = known.as_ref().is_some_and(|known| known["device"] != record["device"]);
            let is_later = known.as_ref().is_none_or(|known| known[by].as_u64() < record[by].as_u64());
            if !is_later || is_of_another {
                return Ok(());
            }
            let compare = found.map_or(version_is(&key, 0), |found| revision_is(&key, found.mod_revision));
            if self.transaction(&put_if(&compare, &key, &encode(record)))?.succeeded {
                return Ok(());
            }
        }
        Err(busy(name))
    }
}

fn continued_by(name: &str) -> Option<&'static str> {
    CONTINUED.iter().find(|(records, _)| name.starts_with(records)).map(|(_, by)| *by)
}
