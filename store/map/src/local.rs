//! The map in a file.

use std::collections::BTreeMap;
use std::path::Path;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{
    ClusterMap, DeviceId, DeviceRecord, GroupId, GroupRecord, MapError, NodeId, NodeRecord, PoolRecord,
    Proposed,
};

type Records<K> = TableDefinition<'static, K, &'static [u8]>;

const NODES: Records<u32> = TableDefinition::new("nodes");
const DEVICES: Records<u32> = TableDefinition::new("devices");
const POOLS: Records<&str> = TableDefinition::new("pools");
const GROUPS: Records<u32> = TableDefinition::new("groups");

/// A map in a file, for clusters on one machine. One process has it open; its values are JSON.
pub struct LocalMap {
    database: Database,
    path: String,
}

impl LocalMap {
    /// Opens the map in a file, which is created if it is not there.
    ///
    /// # Errors
    /// [`MapError::Storage`] if the file cannot be opened, is of something else, or another process has it open.
    pub fn open(path: &Path) -> Result<LocalMap, MapError> {
        let path_text = path.display().to_string();
        let failed = |reason: String| MapError::Storage { what: path_text.clone(), reason };
        let database = Database::create(path).map_err(|error| failed(error.to_string()))?;
        let map = LocalMap { database, path: path_text.clone() };
        // So that every later transaction finds every table.
        map.change(|transaction| {
            for table in [NODES, DEVICES, GROUPS] {
                transaction.open_table(table)?;
            }
            transaction.open_table(POOLS)?;
            Ok(Ok(()))
        })?;
        Ok(map)
    }

    fn failed(&self, error: impl Into<redb::Error>) -> MapError {
        MapError::Storage { what: self.path.clone(), reason: error.into().to_string() }
    }

    /// Carries out a transaction, which is durable when this returns. An error of the map leaves everything as it was.
    fn change<T>(
        &self,
        work: impl FnOnce(&redb::WriteTransaction) -> Result<Result<T, MapError>, redb::Error>,
    ) -> Result<T, MapError> {
        let transaction = self.database.begin_write().map_err(|error| self.failed(error))?;
        let done = work(&transaction).map_err(|error| self.failed(error))??;
        transaction.commit().map_err(|error| self.failed(error))?;
        Ok(done)
    }

    fn all<T: DeserializeOwned>(&self, table: Records<u32>) -> Result<BTreeMap<u32, T>, MapError> {
        let read = || -> Result<Vec<(u32, Vec<u8>)>, redb::Error> {
            let table = self.database.begin_read()?.open_table(table)?;
            let records = table.iter()?.map(|record| {
                let (key, value) = record?;
                Ok((key.value(), value.value().to_vec()))
            });
            records.collect()
        };
        let records = read().map_err(|error| self.failed(error))?;
        records.into_iter().map(|(key, value)| Ok((key, decode(&format!("{key}"), &value)?))).collect()
    }
}

fn decode<T: DeserializeOwned>(what: &str, value: &[u8]) -> Result<T, MapError> {
    serde_json::from_slice(value)
        .map_err(|error| MapError::Record { what: what.to_string(), reason: error.to_string() })
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("records have names as keys")
}

/// Whether another record than that of `id` has an identity.
fn refuse_same<T: DeserializeOwned>(
    table: &impl ReadableTable<u32, &'static [u8]>,
    (what, id): (&'static str, u32),
    uuid: uuid::Uuid,
    uuid_of: impl Fn(&T) -> uuid::Uuid,
) -> Result<Result<(), MapError>, redb::Error> {
    for record in table.iter()? {
        let (key, value) = record?;
        match decode::<T>(what, value.value()) {
            Ok(other) if key.value() != id && uuid_of(&other) == uuid => {
                return Ok(Err(MapError::SameIdentity { what, uuid, number: key.value() }));
            }
            Ok(_) => {}
            Err(error) => return Ok(Err(error)),
        }
    }
    Ok(Ok(()))
}

impl ClusterMap for LocalMap {
    fn nodes(&self) -> Result<BTreeMap<NodeId, NodeRecord>, MapError> {
        Ok(self.all(NODES)?.into_iter().map(|(id, node)| (NodeId(id), node)).collect())
    }

    fn put_node(&self, id: NodeId, node: &NodeRecord) -> Result<(), MapError> {
        self.change(|transaction| {
            let mut table = transaction.open_table(NODES)?;
            let same = refuse_same(&table, ("node", id.0), node.uuid, |other: &NodeRecord| other.uuid)?;
            if same.is_ok() {
                table.insert(id.0, &encode(node)[..])?;
            }
            Ok(same)
        })
    }

    fn devices(&self) -> Result<BTreeMap<DeviceId, DeviceRecord>, MapError> {
        Ok(self.all(DEVICES)?.into_iter().map(|(id, device)| (DeviceId(id), device)).collect())
    }

    fn put_device(&self, id: DeviceId, device: &DeviceRecord) -> Result<(), MapError> {
        self.change(|transaction| {
            let nodes = transaction.open_table(NODES)?;
            if nodes.get(device.node.0)?.is_none() {
                return Ok(Err(MapError::Missing(format!("node {}", device.node.0))));
            }
            let mut table = transaction.open_table(DEVICES)?;
            let same = refuse_same(&table, ("device", id.0), device.uuid, |other: &DeviceRecord| other.uuid)?;
            if same.is_ok() {
                table.insert(id.0, &encode(device)[..])?;
            }
            Ok(same)
        })
    }

    fn pools(&self) -> Result<BTreeMap<String, PoolRecord>, MapError> {
        let read = || -> Result<Vec<(String, Vec<u8>)>, redb::Error> {
            let table = self.database.begin_read()?.open_table(POOLS)?;
            let records = table.iter()?.map(|record| {
                let (key, value) = record?;
                Ok((key.value().to_string(), value.value().to_vec()))
            });
            records.collect()
        };
        let records = read().map_err(|error| self.failed(error))?;
        let decoded = records.into_iter().map(|(name, value)| {
            let pool = decode(&format!("pool {name}"), &value)?;
            Ok((name, pool))
        });
        decoded.collect()
    }

    fn create_pool(&self, name: &str, pool: &PoolRecord) -> Result<(), MapError> {
        let PoolRecord { first_group, groups, replicas, in_sync_min } = *pool;
        let end = first_group.checked_add(groups);
        if name.is_empty() || groups == 0 || !(1..=replicas).contains(&in_sync_min) || end.is_none() {
            let reason = "a pool has a name, groups, and at most as many replicas in sync as replicas";
            return Err(MapError::Invalid(reason.to_string()));
        }
        self.change(|transaction| {
            let mut table = transaction.open_table(POOLS)?;
            if table.get(name)?.is_some() {
                return Ok(Err(MapError::Exists(format!("pool {name}"))));
            }
            for record in table.iter()? {
                let (other, value) = record?;
                let other = other.value().to_string();
                let other_pool = match decode::<PoolRecord>(&format!("pool {other}"), value.value()) {
                    Ok(pool) => pool,
                    Err(error) => return Ok(Err(error)),
                };
                let before = first_group.saturating_add(groups) <= other_pool.first_group;
                let after = other_pool.first_group.saturating_add(other_pool.groups) <= first_group;
                if !before && !after {
                    let reason = format!("pool {name} would share groups with pool {other}");
                    return Ok(Err(MapError::Invalid(reason)));
                }
            }
            table.insert(name, &encode(pool)[..])?;
            Ok(Ok(()))
        })
    }

    fn group(&self, id: GroupId) -> Result<Option<GroupRecord>, MapError> {
        let read = || -> Result<Option<Vec<u8>>, redb::Error> {
            let table = self.database.begin_read()?.open_table(GROUPS)?;
            Ok(table.get(id.0)?.map(|value| value.value().to_vec()))
        };
        let value = read().map_err(|error| self.failed(error))?;
        value.map(|value| decode(&format!("group {}", id.0), &value)).transpose()
    }

    fn propose_group(&self, id: GroupId, record: &GroupRecord) -> Result<Proposed, MapError> {
        record.check()?;
        self.change(|transaction| {
            let mut table = transaction.open_table(GROUPS)?;
            let known = table.get(id.0)?.map(|value| value.value().to_vec());
            let known = known.map(|value| decode::<GroupRecord>(&format!("group {}", id.0), &value));
            let known = match known.transpose() {
                Ok(known) => known,
                Err(error) => return Ok(Err(error)),
            };
            let epoch = known.as_ref().map_or(0, |known| known.config.epoch);
            Ok(Ok(match known {
                // A repeated proposal whose answer was lost.
                Some(known) if known == *record => Proposed::Accepted,
                _ if record.config.epoch == epoch + 1 => {
                    table.insert(id.0, &encode(record)[..])?;
                    Proposed::Accepted
                }
                Some(known) => Proposed::Superseded(known),
                None => Proposed::Missing,
            }))
        })
    }
}
