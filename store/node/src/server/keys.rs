//! The keys of clients, and the groups that each may use.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use cluster_map::{ClientKeyRecord, ClusterMap, KeyName, MapError, PoolAccess, PoolRecord};
use store_link::{ClientKeys, ClusterKey};
use uuid::Uuid;
use wire_replica::ClientRequest;

/// The keys of clients as the map has them.
#[derive(Clone)]
pub struct ClientKeyTable {
    cluster: Uuid,
    key: ClusterKey,
    records: BTreeMap<KeyName, ClientKeyRecord>,
    pools: BTreeMap<String, Range<u32>>,
    grants: Arc<KeyGrants>,
}

/// What connections need of the keys.
#[derive(Default)]
pub(super) struct KeyGrants {
    pub(super) secrets: Arc<ClientKeys>,
    rights: BTreeMap<KeyName, KeyRights>,
}

/// The rights of a key on logical groups.
#[derive(Clone)]
pub(super) struct KeyRights {
    /// Identity of the key.
    id: Uuid,
    groups: Arc<[(Range<u32>, PoolAccess)]>,
}

impl ClientKeyTable {
    /// Reads the keys of a cluster.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn read(key: ClusterKey, map: &dyn ClusterMap) -> Result<ClientKeyTable, MapError> {
        let (records, pools, grants) = (BTreeMap::new(), BTreeMap::new(), Arc::default());
        let mut table = ClientKeyTable { cluster: map.cluster()?, key, records, pools, grants };
        table.update(map, &map.pools()?)?;
        Ok(table)
    }

    /// Reads them again. Returns whether a key or a pool is another one.
    pub(super) fn update(
        &mut self,
        map: &dyn ClusterMap,
        pools: &BTreeMap<String, PoolRecord>,
    ) -> Result<bool, MapError> {
        let records = map.client_keys()?;
        let range = |pool: &PoolRecord| pool.first_group..pool.first_group.saturating_add(pool.groups);
        let pools: BTreeMap<_, _> = pools.iter().map(|(name, pool)| (name.clone(), range(pool))).collect();
        if records == self.records && pools == self.pools {
            return Ok(false);
        }
        (self.records, self.pools) = (records, pools);
        let key = |(name, record): (&KeyName, &ClientKeyRecord)| {
            self.key.client_key(*name, &record.context(self.cluster))
        };
        let rights = |(name, record): (&KeyName, &ClientKeyRecord)| {
            // A pool that was removed gives no rights.
            let groups = record.pools.iter().take(ClientKeyRecord::POOLS_MAX);
            let groups = groups.filter_map(|(pool, access)| Some((self.pools.get(pool)?.clone(), *access)));
            (*name, KeyRights { id: record.id, groups: groups.collect() })
        };
        let secrets = Arc::new(self.records.iter().map(key).collect());
        self.grants = Arc::new(KeyGrants { secrets, rights: self.records.iter().map(rights).collect() });
        Ok(true)
    }

    pub(super) fn grants(&self) -> Arc<KeyGrants> {
        self.grants.clone()
    }
}

impl KeyGrants {
    pub(super) fn rights(&self, name: KeyName) -> Option<&KeyRights> {
        self.rights.get(&name)
    }

    /// The rights of the same key: one of the same name that was made later is another.
    pub(super) fn rights_of_same(&self, name: KeyName, before: &KeyRights) -> Option<&KeyRights> {
        self.rights(name).filter(|rights| rights.id == before.id)
    }
}

impl KeyRights {
    /// Whether a client may have this request of a group carried out.
    pub(super) fn permit(&self, group: u32, request: &ClientRequest) -> bool {
        let is_permitted = |access: PoolAccess| match request {
            ClientRequest::Read { .. } => true,
            ClientRequest::Write { .. } => access == PoolAccess::ReadWrite,
        };
        self.groups.iter().any(|(groups, access)| groups.contains(&group) && is_permitted(*access))
    }
}
