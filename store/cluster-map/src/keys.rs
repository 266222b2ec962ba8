//! The keys of clients: which rights they have on which pools.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{MapError, PoolRecord};

/// What a client may do with the images of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolAccess {
    /// Read.
    Read,
    /// Read, write and discard.
    ReadWrite,
}

impl PoolAccess {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            PoolAccess::Read => "r",
            PoolAccess::ReadWrite => "rw",
        }
    }
}

impl FromStr for PoolAccess {
    type Err = String;

    fn from_str(text: &str) -> Result<PoolAccess, String> {
        match text {
            "r" | "read" => Ok(PoolAccess::Read),
            "rw" | "read-write" => Ok(PoolAccess::ReadWrite),
            other => Err(format!("{other:?} is no right: r or read, rw or read-write")),
        }
    }
}

/// A client's key. The map has no secret of it: that follows from the cluster's key and [`context`](Self::context), which has all
/// that gives the key its rights. So a record that is changed in the map is another key, which no client has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientKeyRecord {
    /// Identity: a key of the same name that is made later is another one.
    pub id: Uuid,
    /// Rights, by the names of pools.
    pub pools: BTreeMap<String, PoolAccess>,
}

impl ClientKeyRecord {
    /// Most pools of a key: nodes look through them for each request.
    pub const POOLS_MAX: usize = 64;

    /// A new key.
    pub fn new(pools: BTreeMap<String, PoolAccess>) -> ClientKeyRecord {
        ClientKeyRecord { id: Uuid::new_v4(), pools }
    }

    /// What its secret depends on, beside its name and the cluster's key.
    pub fn context(&self, cluster: Uuid) -> Vec<u8> {
        let mut bytes = [cluster.into_bytes(), self.id.into_bytes()].concat();
        for (pool, access) in &self.pools {
            bytes.extend((pool.len() as u64).to_le_bytes());
            bytes.extend(pool.as_bytes());
            bytes.push(match access {
                PoolAccess::Read => 1,
                PoolAccess::ReadWrite => 2,
            });
        }
        bytes
    }
}

/// Most keys of a cluster: every node has all of them.
const KEYS_MAX: usize = 1024;

/// Refuses a key without rights or for pools that are not there, and one more than nodes take.
pub(crate) fn check_client_key(
    record: &ClientKeyRecord,
    known: &BTreeMap<String, PoolRecord>,
    keys: usize,
) -> Result<(), MapError> {
    if let Some(pool) = record.pools.keys().find(|pool| !known.contains_key(*pool)) {
        return Err(MapError::Missing(format!("pool {pool}")));
    }
    let pools = record.pools.len();
    let reason = if pools == 0 || pools > ClientKeyRecord::POOLS_MAX {
        format!("a client key has rights on 1 to {} pools, and not on {pools}", ClientKeyRecord::POOLS_MAX)
    } else if keys >= KEYS_MAX {
        format!("the cluster has {keys} client keys, the most that it may have")
    } else {
        return Ok(());
    };
    Err(MapError::Invalid(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_gives_rights_is_in_the_context() {
        use PoolAccess::{Read, ReadWrite};
        let record = |id, pools: &[(&str, PoolAccess)]| {
            let pools = pools.iter().map(|(name, access)| (name.to_string(), *access)).collect();
            ClientKeyRecord { id: Uuid::from_u128(id), pools }.context(Uuid::from_u128(9))
        };
        let all = [
            record(1, &[("a", Read)]),
            record(2, &[("a", Read)]),
            record(1, &[("a", ReadWrite)]),
            record(1, &[("b", Read)]),
            record(1, &[("a", Read), ("b", Read)]),
            record(1, &[("a", Read), ("b", ReadWrite)]),
            ClientKeyRecord { id: Uuid::from_u128(1), pools: [("a".to_string(), Read)].into() }
                .context(Uuid::from_u128(8)),
        ];
        for (index, one) in all.iter().enumerate() {
            assert!(!all[..index].contains(one), "{index}");
        }
    }
}
