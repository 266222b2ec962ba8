//! The map in etcd, for clusters on several machines: its JSON gateway (API v3), HTTP/1.1.
//!
//! A record is a key below a prefix; its value is JSON, as in a directory's map. A compare-and-swap is a
//! transaction that compares the value of a key. Transactions have the changes of many groups. Requests go to
//! one endpoint, and to the next one if it does not answer.

mod client;
mod connection;
mod files;
mod images;
mod lease;
mod messages;
mod pools;
mod response;
mod session;
mod snapshot;
mod tls;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::checks::{check_image_name, check_pool, check_settings};
use crate::groups::{self, COUNTED_END, random_volume, range_of};
use crate::keys::check_client_key;
use crate::{
    AcceptedLoss, ClientKeyRecord, ClusterMap, ClusterSettings, DeviceId, DeviceRecord, GroupId, GroupRecord,
    GroupScrub, ImageEntry, ImageLock, KeyName, LeaseHolder, LeaseOutcome, MapBackup, MapChanges, MapError,
    MapPosition, NodeId, NodeMemory, NodeRecord, OutReason, PoolRecord, Proposed, RecoverySettings,
    RemovedImage, ScrubSettings,
};
use client::{EtcdClient, EtcdLocation};
pub(crate) use connection::HttpError;
pub use files::EtcdFiles;
use messages::{
    DeleteAnswer, KeyValue, TxnAnswer, base64, end_of_prefix, never, put, put_if, revision_is, value_is,
    version_is,
};
use watch::EtcdChanges;

/// Groups of one transaction. etcd permits 128 operations, those of nested transactions included.
const GROUPS_PER_TRANSACTION: usize = 64;
/// Attempts of a change that others make at the same time.
const ATTEMPTS_MAX: usize = 32;

/// A map in etcd. Any number of processes use it at a time.
pub struct EtcdMap {
    client: Arc<EtcdClient>,
    /// The lease of this process's node.
    lease: Mutex<Option<i64>>,
    /// Those of processes that have images attached.
    holders: Mutex<BTreeMap<Uuid, i64>>,
}

impl EtcdMap {
    /// A map whose keys have a prefix: `http://HOST:PORT[/PREFIX]`, or several URLs with commas between, all
    /// with the same prefix. Nothing is asked yet. `https://` needs [`with_files`](Self::with_files).
    ///
    /// # Errors
    /// [`MapError::Invalid`] if it is none.
    pub fn new(urls: &str) -> Result<EtcdMap, MapError> {
        EtcdMap::with_files(urls, &EtcdFiles::default())
    }

    /// The same with files that let this process in. They are not read yet.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_files(urls: &str, files: &EtcdFiles) -> Result<EtcdMap, MapError> {
        let client = Arc::new(EtcdClient::new(EtcdLocation::parse(urls)?, files.clone())?);
        Ok(EtcdMap { client, lease: Mutex::default(), holders: Mutex::default() })
    }

    /// Makes a new cluster.
    ///
    /// # Errors
    /// [`MapError::Exists`] if there is one.
    pub fn create(&self) -> Result<Uuid, MapError> {
        let cluster = Uuid::new_v4();
        match self.create_key("cluster", &cluster)? {
            None => Ok(cluster),
            Some(known) if decode::<Uuid>("cluster", &known)? == cluster => Ok(cluster),
            Some(_) => Err(MapError::Exists(format!("cluster below {}", self.client.location.prefix))),
        }
    }

    /// Removes the cluster's map, with everything in it.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn remove(&self) -> Result<(), MapError> {
        let prefix = self.key("");
        let request = json!({ "key": base64(&prefix), "range_end": base64(end_of_prefix(&prefix)) });
        self.client.post::<DeleteAnswer>("/v3/kv/deleterange", &request).map(drop)
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.client.location.prefix)
    }

    fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, MapError> {
        self.client.get(&self.key(name))?.map(|found| decode(name, &found)).transpose()
    }

    /// The records below a name, with the rest of their names.
    fn list<T: DeserializeOwned>(&self, directory: &str) -> Result<Vec<(String, T)>, MapError> {
        let prefix = self.key(directory);
        let found = self.client.range(prefix.as_bytes(), &end_of_prefix(&prefix))?;
        let entry = |found: KeyValue| {
            let name = String::from_utf8_lossy(&found.key[prefix.len()..]).into_owned();
            let value = decode(&format!("{directory}{name}"), &found)?;
            Ok((name, value))
        };
        found.into_iter().map(entry).collect()
    }

    fn numbered<T: DeserializeOwned>(&self, directory: &str) -> Result<BTreeMap<u32, T>, MapError> {
        let all = self.list(directory)?.into_iter();
        Ok(all.filter_map(|(name, value)| Some((name.parse().ok()?, value))).collect())
    }

    fn put(&self, name: &str, value: &impl Serialize) -> Result<(), MapError> {
        self.client.post::<Value>("/v3/kv/put", &put(&self.key(name), &encode(value))).map(drop)
    }

    /// Deletes a key. Returns whether it was there.
    fn delete(&self, name: &str) -> Result<bool, MapError> {
        let request = json!({ "key": base64(self.key(name)) });
        let answer: DeleteAnswer = self.client.post("/v3/kv/deleterange", &request)?;
        Ok(answer.deleted > 0)
    }

    fn transaction(&self, request: &Value) -> Result<TxnAnswer, MapError> {
        self.client.post("/v3/kv/txn", request)
    }

    /// Puts a key that is not there. Returns the one that is.
    fn create_key(&self, name: &str, value: &impl Serialize) -> Result<Option<KeyValue>, MapError> {
        let key = self.key(name);
        let answer = self.transaction(&put_if(&version_is(&key, 0), &key, &encode(value)))?;
        Ok(if answer.succeeded { None } else { answer.into_record() })
    }

    fn claim_identity(&self, what: &'static str, uuid: Uuid, number: u32) -> Result<(), MapError> {
        let name = format!("identities/{what}-{uuid}");
        match self.create_key(&name, &number)? {
            Some(known) => match decode(&name, &known)? {
                owner if owner == number => Ok(()),
                owner => Err(MapError::SameIdentity { what, uuid, number: owner }),
            },
            None => Ok(()),
        }
    }

    /// Changes a record that has a default, if it is still what is known.
    fn change_settings<T>(&self, name: &str, known: &T, to: &T) -> Result<bool, MapError>
    where
        T: Default + PartialEq + Serialize + DeserializeOwned,
    {
        let key = self.key(name);
        let found = self.client.get(&key)?;
        let current = found.as_ref().map_or(Ok(T::default()), |it| decode(name, it))?;
        if current != *known {
            return Ok(false);
        }
        let compare = found.map_or(version_is(&key, 0), |found| revision_is(&key, found.mod_revision));
        let is_changed = self.transaction(&put_if(&compare, &key, &encode(to)))?.succeeded;
        // Its answer may have been lost, and it was repeated.
        Ok(is_changed || self.get(name)?.is_some_and(|now: T| now == *to))
    }

    fn group_key(&self, id: GroupId) -> String {
        // Of one length, so that ranges of numbers are ranges of keys.
        self.key(&format!("groups/{:010}", id.0))
    }

    /// Proposes records of different groups in one transaction.
    fn propose(&self, proposals: &[(GroupId, GroupRecord)]) -> Result<Vec<Proposed>, MapError> {
        let nested = |(id, record): &(GroupId, GroupRecord)| {
            let key = self.group_key(*id);
            // What is not known is read first.
            let before = self.client.groups.get(id.0).filter(|value| {
                let known: Option<GroupRecord> = serde_json::from_slice(value).ok();
                known.is_some_and(|known| known.config.epoch + 1 == record.config.epoch)
            });
            let compare = match (before, record.config.epoch) {
                (Some(value), _) => value_is(&key, &value),
                (None, 1) => version_is(&key, 0),
                (None, _) => never(&key),
            };
            json!({ "request_txn": put_if(&compare, &key, &encode(record)) })
        };
        let request = json!({ "success": proposals.iter().map(nested).collect::<Vec<_>>() });
        let answer = self.transaction(&request)?;
        if answer.responses.len() != proposals.len() {
            let reason = format!("{} answers to {} proposals", answer.responses.len(), proposals.len());
            return Err(MapError::Record { what: "groups".to_string(), reason });
        }
        let outcomes = proposals.iter().zip(answer.responses);
        outcomes
            .map(|((id, record), response)| match response.response_txn {
                Some(TxnAnswer { succeeded: true, .. }) => {
                    self.client.groups.note(id.0, &encode(record));
                    Ok(Proposed::Accepted)
                }
                Some(answer) => self.refused(*id, record, answer.into_record()),
                None => {
                    let what = format!("group {}", id.0);
                    Err(MapError::Record { what, reason: "a transaction has no answer".to_string() })
                }
            })
            .collect()
    }

    /// The outcome of a proposal that was not for what is in the map, as far as that was known.
    fn refused(
        &self,
        id: GroupId,
        record: &GroupRecord,
        found: Option<KeyValue>,
    ) -> Result<Proposed, MapError> {
        let Some(found) = found else { return Ok(Proposed::Missing) };
        let known = self.decode_group(id, &found)?;
        if known == *record {
            // A repeated proposal whose answer was lost.
            return Ok(Proposed::Accepted);
        }
        if known.config.epoch + 1 != record.config.epoch {
            return Ok(Proposed::Superseded(known));
        }
        let key = self.group_key(id);
        let answer = self.transaction(&put_if(&value_is(&key, &found.value), &key, &encode(record)))?;
        if answer.succeeded {
            self.client.groups.note(id.0, &encode(record));
            return Ok(Proposed::Accepted);
        }
        let found = answer.into_record();
        found.map_or(Ok(Proposed::Missing), |found| self.decode_group(id, &found).map(Proposed::Superseded))
    }

    fn decode_group(&self, id: GroupId, found: &KeyValue) -> Result<GroupRecord, MapError> {
        let record = decode(&format!("group {}", id.0), found)?;
        self.client.groups.note(id.0, &found.value);
        Ok(record)
    }
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("records have names as keys")
}

fn decode<T: DeserializeOwned>(what: &str, found: &KeyValue) -> Result<T, MapError> {
    serde_json::from_slice(&found.value)
        .map_err(|error| MapError::Record { what: what.to_string(), reason: error.to_string() })
}

/// The key with the identity of a node that was removed.
fn removed_name(id: NodeId) -> String {
    format!("removed-nodes/{}", id.0)
}

fn busy(what: &str) -> MapError {
    let reason = format!("others change {what} all the time");
    MapError::Storage { what: "in etcd".to_string(), reason }
}

impl ClusterMap for EtcdMap {
    fn cluster(&self) -> Result<Uuid, MapError> {
        self.get("cluster")?.ok_or_else(|| {
            MapError::Missing(format!("cluster in etcd below {}", self.client.location.prefix))
        })
    }

    fn settings(&self) -> Result<ClusterSettings, MapError> {
        let settings: ClusterSettings = self.get("settings")?.unwrap_or_default();
        settings.check().map(|()| settings)
    }

    fn create_settings(&self, settings: &ClusterSettings) -> Result<(), MapError> {
        check_settings(self, settings)?;
        match self.create_key("settings", settings)? {
            None => Ok(()),
            // Its answer was lost.
            Some(known) if decode::<ClusterSettings>("settings", &known)? == *settings => Ok(()),
            Some(_) => Err(MapError::Exists("a lease and grace of the cluster".to_string())),
        }
    }

    fn nodes(&self) -> Result<BTreeMap<NodeId, NodeRecord>, MapError> {
        let out = self.out()?;
        let nodes = self.numbered::<NodeRecord>("nodes/")?.into_iter();
        let node = |(id, node)| {
            let id = NodeId(id);
            (id, NodeRecord { out: out.contains_key(&id), ..node })
        };
        Ok(nodes.map(node).collect())
    }

    fn put_node(&self, id: NodeId, node: &NodeRecord) -> Result<(), MapError> {
        self.claim_identity("node", node.uuid, id.0)?;
        let (key, removed) = (self.key(&format!("nodes/{}", id.0)), self.key(&removed_name(id)));
        let request = put_if(&version_is(&removed, 0), &key, &encode(node));
        match self.transaction(&request)?.succeeded {
            true => Ok(()),
            false => Err(MapError::Removed(id)),
        }
    }

    fn remove_node(&self, id: NodeId) -> Result<(), MapError> {
        let name = format!("nodes/{}", id.0);
        let Some(node) = self.get::<NodeRecord>(&name)? else {
            return Err(MapError::Missing(format!("node {}", id.0)));
        };
        let of_node = self.devices()?.into_iter().filter(|(_, device)| device.node == id);
        let devices = of_node.map(|(device, _)| format!("devices/{}", device.0));
        let names = [name, format!("out/{}", id.0), format!("up/{}", id.0)].into_iter().chain(devices);
        let mut changes =
            vec![json!({ "request_put": put(&self.key(&removed_name(id)), &encode(&node.uuid)) })];
        changes
            .extend(names.map(|name| json!({ "request_delete_range": { "key": base64(self.key(&name)) } })));
        self.transaction(&json!({ "success": changes })).map(drop)
    }

    fn create_node(&self, node: &NodeRecord) -> Result<NodeId, MapError> {
        // A map that is an older copy of itself may not have a node that is a member of a group.
        let members =
            self.list::<GroupRecord>("groups/")?.into_iter().flat_map(|(_, record)| record.replicas);
        let known = self.numbered::<NodeRecord>("nodes/")?.into_keys();
        let known = known.chain(self.numbered::<Uuid>("removed-nodes/")?.into_keys());
        let first = members.map(|member| member.0).chain(known).max().map_or(1, |last| last + 1);
        for id in (first..).take(ATTEMPTS_MAX) {
            let found = self.create_key(&format!("nodes/{id}"), node)?;
            if found.is_none_or(|found| decode("node", &found).is_ok_and(|known: NodeRecord| known == *node))
            {
                self.claim_identity("node", node.uuid, id)?;
                return Ok(NodeId(id));
            }
        }
        Err(busy("the nodes"))
    }

    fn devices(&self) -> Result<BTreeMap<DeviceId, DeviceRecord>, MapError> {
        Ok(self.numbered("devices/")?.into_iter().map(|(id, device)| (DeviceId(id), device)).collect())
    }

    fn put_device(&self, id: DeviceId, device: &DeviceRecord) -> Result<(), MapError> {
        if self.get::<NodeRecord>(&format!("nodes/{}", device.node.0))?.is_none() {
            return Err(MapError::Missing(format!("node {}", device.node.0)));
        }
        self.claim_identity("device", device.uuid, id.0)?;
        self.put(&format!("devices/{}", id.0), device)
    }

    fn pools(&self) -> Result<BTreeMap<String, PoolRecord>, MapError> {
        Ok(self.list("pools/")?.into_iter().collect())
    }

    fn free_groups(&self, groups: u32) -> Result<u32, MapError> {
        let counted_end = self.get("groups-end")?.unwrap_or(0);
        let mut taken = self.removed_groups()?;
        taken.extend(self.pools()?.values().map(range_of));
        groups::free_groups(groups, counted_end, &taken)
    }

    fn removed_groups(&self) -> Result<Vec<Range<u32>>, MapError> {
        let removed = self.numbered::<u32>("removed/")?.into_iter();
        Ok(removed.map(|(first, groups)| first..first.saturating_add(groups)).collect())
    }

    fn create_pool(&self, name: &str, pool: &PoolRecord) -> Result<(), MapError> {
        let key = self.key("groups-end");
        let end = self.client.get(&key)?;
        let known_end: u32 = end.as_ref().map_or(Ok(0), |end| decode("groups-end", end))?;
        check_pool(name, pool, &self.pools()?, &self.removed_groups()?)?;
        let range = range_of(pool);
        // Earlier releases count on from here. Two pools at a time change it, and one of them fails.
        let next_end = if range.end <= COUNTED_END { known_end.max(range.end) } else { known_end };
        let name = format!("pools/{name}");
        let request = json!({
            "compare": [
                version_is(&self.key(&name), 0),
                end.map_or(version_is(&key, 0), |end| revision_is(&key, end.mod_revision)),
            ],
            "success": [
                { "request_put": put(&self.key(&name), &encode(pool)) },
                { "request_put": put(&key, &encode(&next_end)) },
            ],
        });
        // Another one, or this one if its answer was lost.
        let is_there = || Ok::<_, MapError>(self.get::<PoolRecord>(&name)?.as_ref() == Some(pool));
        match self.transaction(&request)?.succeeded || is_there()? {
            true => Ok(()),
            false => Err(busy("the pools")),
        }
    }

    fn change_pool(&self, name: &str, known: &PoolRecord, to: &PoolRecord) -> Result<bool, MapError> {
        self.change_pool_record(name, known, to)
    }

    fn rename_pool(&self, name: &str, to: &str) -> Result<(), MapError> {
        self.rename_pool_record(name, to)
    }

    fn remove_pool(&self, name: &str) -> Result<(), MapError> {
        let pool_name = format!("pools/{name}");
        let key = self.key(&pool_name);
        let found = self.client.get(&key)?.ok_or_else(|| MapError::Missing(format!("pool {name}")))?;
        let pool: PoolRecord = decode(&pool_name, &found)?;
        let images = self.key(&format!("images/{name}/"));
        let range = range_of(&pool);
        let removed = self.key(&format!("removed/{:010}", range.start));
        let request = json!({
            // This pool, and not another one of the same name, if the request is carried out late.
            "compare": [revision_is(&key, found.mod_revision), {
                "key": base64(&images),
                "range_end": base64(end_of_prefix(&images)),
                "target": "VERSION",
                "result": "EQUAL",
                "version": "0",
            }],
            "success": [
                { "request_delete_range": { "key": base64(&key) } },
                // What says that their replicas are superfluous: a map that knows nothing of a group removes
                // none.
                { "request_put": put(&removed, &encode(&pool.groups)) },
                { "request_delete_range": {
                    "key": base64(self.group_key(GroupId(range.start))),
                    "range_end": base64(self.group_key(GroupId(range.end))),
                } },
            ],
        });
        if self.transaction(&request)?.succeeded {
            return Ok(());
        }
        match self.client.get(&key)? {
            Some(known) if known.mod_revision == found.mod_revision => {
                Err(MapError::Invalid(format!("pool {name} has images: remove them first")))
            }
            // It is gone: the answer of an attempt was lost.
            _ => Ok(()),
        }
    }

    fn group(&self, id: GroupId) -> Result<Option<GroupRecord>, MapError> {
        let found = self.client.get(&self.group_key(id))?;
        found.map(|found| self.decode_group(id, &found)).transpose()
    }

    fn groups(&self, range: Range<u32>) -> Result<BTreeMap<GroupId, GroupRecord>, MapError> {
        let [from, to] = [range.start, range.end].map(|id| self.group_key(GroupId(id)));
        let prefix = self.key("groups/").len();
        let mut groups = BTreeMap::new();
        for found in self.client.range(from.as_bytes(), to.as_bytes())? {
            let id = str::from_utf8(&found.key[prefix..]).ok().and_then(|id| id.parse().ok());
            if let Some(id) = id {
                groups.insert(GroupId(id), self.decode_group(GroupId(id), &found)?);
            }
        }
        Ok(groups)
    }

    fn propose_group(&self, id: GroupId, record: &GroupRecord) -> Result<Proposed, MapError> {
        let outcomes = self.propose_groups(&[(id, record.clone())])?;
        Ok(outcomes.into_iter().next().expect("one outcome a proposal"))
    }

    fn propose_groups(&self, proposals: &[(GroupId, GroupRecord)]) -> Result<Vec<Proposed>, MapError> {
        proposals.iter().try_for_each(|(_, record)| record.check())?;
        let mut outcomes = Vec::with_capacity(proposals.len());
        for some in proposals.chunks(GROUPS_PER_TRANSACTION) {
            outcomes.extend(self.propose(some)?);
        }
        Ok(outcomes)
    }

    fn raise_group(&self, id: GroupId, record: &GroupRecord) -> Result<Proposed, MapError> {
        record.check()?;
        let key = self.group_key(id);
        let mut found = self.client.get(&key)?;
        for _ in 0..ATTEMPTS_MAX {
            let compare = match &found {
                None => version_is(&key, 0),
                Some(found) => match self.decode_group(id, found)? {
                    known if known == *record => return Ok(Proposed::Accepted),
                    known if known.config.epoch >= record.config.epoch => {
                        return Ok(Proposed::Superseded(known));
                    }
                    _ => value_is(&key, &found.value),
                },
            };
            let answer = self.transaction(&put_if(&compare, &key, &encode(record)))?;
            if answer.succeeded {
                self.client.groups.note(id.0, &encode(record));
                return Ok(Proposed::Accepted);
            }
            found = answer.into_record();
        }
        Err(busy("a group"))
    }

    fn images(&self) -> Result<BTreeMap<(String, String), ImageEntry>, MapError> {
        let images = self.list("images/")?.into_iter();
        let split = |(name, image): (String, ImageEntry)| {
            let (pool, name) = name.split_once('/')?;
            Some(((pool.to_string(), name.to_string()), image))
        };
        Ok(images.filter_map(split).collect())
    }

    fn create_image(&self, pool: &str, name: &str, bytes: u64) -> Result<ImageEntry, MapError> {
        let pool_name = format!("pools/{pool}");
        if self.get::<PoolRecord>(&pool_name)?.is_none() {
            return Err(MapError::Missing(format!("pool {pool}")));
        }
        check_image_name(name)?;
        let image = ImageEntry::new(Uuid::new_v4(), random_volume(), bytes);
        let key = self.key(&format!("images/{pool}/{name}"));
        let mut request = put_if(&version_is(&key, 0), &key, &encode(&image));
        // The pool is not removed meanwhile.
        request["compare"] = json!([
            version_is(&key, 0),
            { "key": base64(self.key(&pool_name)), "target": "VERSION", "result": "GREATER", "version": "0" },
        ]);
        let answer = self.transaction(&request)?;
        if answer.succeeded {
            return Ok(image);
        }
        match answer.into_record().map(|found| decode::<ImageEntry>(name, &found)).transpose()? {
            Some(known) if known == image => Ok(image),
            Some(_) => Err(MapError::Exists(format!("image {pool}/{name}"))),
            None => Err(MapError::Missing(format!("pool {pool}"))),
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
        let removed = self.list::<RemovedImage>("removed-images/")?.into_iter();
        Ok(removed.map(|(_, removed)| (removed.image.volume, removed)).collect())
    }

    fn image_is_empty(&self, removed: &RemovedImage) -> Result<(), MapError> {
        self.forget_removed(removed)
    }

    fn image_lock(&self, pool: &str, volume: u64) -> Result<Option<ImageLock>, MapError> {
        self.get(&images::lock_name(pool, volume))
    }

    fn change_image_lock(
        &self,
        pool: &str,
        volume: u64,
        known: Option<&ImageLock>,
        to: &ImageLock,
    ) -> Result<bool, MapError> {
        self.change_lock(pool, volume, known, to)
    }

    fn renew_holder(&self, lease: Uuid, seconds: u32) -> Result<(), MapError> {
        self.renew_holder_lease(lease, seconds)
    }

    fn end_holder(&self, lease: Uuid) -> Result<(), MapError> {
        match sync::lock(&self.holders).remove(&lease) {
            Some(id) => {
                let request = json!({ "ID": id.to_string() });
                self.client.post::<Value>("/v3/lease/revoke", &request).map(drop)
            }
            None => Ok(()),
        }
    }

    fn holder_age(&self, lease: Uuid) -> Result<Option<Duration>, MapError> {
        self.age_of_holder(lease)
    }

    fn client_keys(&self) -> Result<BTreeMap<KeyName, ClientKeyRecord>, MapError> {
        let keys = self.list("keys/")?.into_iter();
        Ok(keys.filter_map(|(name, record)| Some((KeyName::new(&name)?, record))).collect())
    }

    fn create_client_key(&self, name: KeyName, record: &ClientKeyRecord) -> Result<(), MapError> {
        check_client_key(record, &self.pools()?, self.client_keys()?.len())?;
        match self.create_key(&format!("keys/{name}"), record)? {
            None => Ok(()),
            // Its answer was lost.
            Some(known) if decode::<ClientKeyRecord>(name.as_str(), &known)? == *record => Ok(()),
            Some(_) => Err(MapError::Exists(format!("client key {name}"))),
        }
    }

    fn remove_client_key(&self, name: KeyName) -> Result<(), MapError> {
        match self.delete(&format!("keys/{name}"))? {
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

    fn end_lease(&self, _node: NodeId, _holder: &LeaseHolder) -> Result<(), MapError> {
        self.revoke()
    }

    fn nodes_up(&self) -> Result<BTreeSet<NodeId>, MapError> {
        Ok(self.numbered::<u32>("up/")?.into_keys().map(NodeId).collect())
    }

    fn out(&self) -> Result<BTreeMap<NodeId, OutReason>, MapError> {
        Ok(self.numbered("out/")?.into_iter().map(|(id, reason)| (NodeId(id), reason)).collect())
    }

    fn set_out(&self, node: NodeId, reason: Option<OutReason>) -> Result<(), MapError> {
        let name = format!("out/{}", node.0);
        match reason {
            Some(reason) => self.put(&name, &reason),
            None => self.delete(&name).map(drop),
        }
    }

    fn recovery(&self) -> Result<RecoverySettings, MapError> {
        Ok(self.get("recovery")?.unwrap_or_default())
    }

    fn change_recovery(&self, known: &RecoverySettings, to: &RecoverySettings) -> Result<bool, MapError> {
        to.check()?;
        self.change_settings("recovery", known, to)
    }

    fn scrub(&self) -> Result<ScrubSettings, MapError> {
        Ok(self.get("scrub")?.unwrap_or_default())
    }

    fn change_scrub(&self, known: &ScrubSettings, to: &ScrubSettings) -> Result<bool, MapError> {
        to.check()?;
        self.change_settings("scrub", known, to)
    }

    fn group_scrubs(&self) -> Result<BTreeMap<GroupId, GroupScrub>, MapError> {
        Ok(self.numbered("scrubs/")?.into_iter().map(|(id, scrub)| (GroupId(id), scrub)).collect())
    }

    fn put_group_scrub(&self, group: GroupId, scrub: &GroupScrub) -> Result<(), MapError> {
        self.put(&format!("scrubs/{}", group.0), scrub)
    }

    fn node_memories(&self) -> Result<BTreeMap<NodeId, NodeMemory>, MapError> {
        Ok(self.numbered("memory/")?.into_iter().map(|(id, memory)| (NodeId(id), memory)).collect())
    }

    fn put_node_memory(&self, node: NodeId, memory: &NodeMemory) -> Result<(), MapError> {
        self.put(&format!("memory/{}", node.0), memory)
    }

    fn accepted_losses(&self) -> Result<BTreeMap<GroupId, AcceptedLoss>, MapError> {
        Ok(self.numbered("losses/")?.into_iter().map(|(id, loss)| (GroupId(id), loss)).collect())
    }

    fn accept_loss(&self, group: GroupId, loss: &AcceptedLoss) -> Result<(), MapError> {
        self.put(&format!("losses/{}", group.0), loss)
    }

    fn position(&self) -> Result<MapPosition, MapError> {
        Ok(self.read_position()?.position)
    }

    fn report_lost(&self, revision: u64) -> Result<(), MapError> {
        self.change_history(|history, _| history.with_lost(revision)).map(drop)
    }

    fn accept_older(&self) -> Result<MapPosition, MapError> {
        self.read_position()?.history.check_complete()?;
        self.change_history(|history, of_storage| history.accepted(of_storage, 0))
    }

    fn backup(&self) -> Result<MapBackup, MapError> {
        self.read_all()
    }

    fn restore(&self, backup: &MapBackup, known: u64) -> Result<MapPosition, MapError> {
        self.replace_all(backup, known)
    }

    fn changes(&self) -> Box<dyn MapChanges> {
        Box::new(EtcdChanges::new(self.client.clone()))
    }
}
