//! What both kinds of map refuse.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::groups::range_of;
use crate::{ClusterMap, ClusterSettings, MapError, PoolRecord};

fn is_pool_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= 64 && !name.contains(['/', '?', '\n'])
}

/// Refuses changes of a pool that its groups do not follow.
pub(crate) fn check_pool_change(name: &str, known: &PoolRecord, to: &PoolRecord) -> Result<(), MapError> {
    let PoolRecord { first_group, groups, replicas, in_sync_min, class } = *to;
    if (first_group, groups, class) != (known.first_group, known.groups, known.class) {
        let reason = format!("pool {name} keeps its groups and its class");
        return Err(MapError::Invalid(reason));
    }
    if !(1..=replicas).contains(&in_sync_min) {
        let reason = format!("pool {name} cannot need {in_sync_min} replicas in sync of {replicas}");
        return Err(MapError::Invalid(reason));
    }
    Ok(())
}

/// Refuses to give a pool another name while something of it would keep the old one. Returns its record. A
/// pool of the other name that has the same groups is what an interrupted attempt has left.
pub(crate) fn check_pool_rename(map: &impl ClusterMap, name: &str, to: &str) -> Result<PoolRecord, MapError> {
    let refused = |reason: String| Err(MapError::Invalid(reason));
    let mut pools = map.pools()?;
    let pool = pools.remove(name).ok_or_else(|| MapError::Missing(format!("pool {name}")))?;
    if !is_pool_name(to) {
        return refused(format!("{to:?} is no name of a pool: 1 to 64 bytes without `/` and `?`"));
    }
    if name == to || pools.get(to).is_some_and(|other| other.first_group != pool.first_group) {
        return Err(MapError::Exists(format!("pool {to}")));
    }
    if let Some((key, _)) = map.client_keys()?.iter().find(|(_, key)| key.pools.contains_key(name)) {
        return refused(format!(
            "client key {key} has rights on pool {name}, by its name: `ringbolt store key delete {key}` first"
        ));
    }
    if map.removed_images()?.values().any(|removed| removed.pool == name) {
        return refused(format!(
            "pool {name} has images whose removal was interrupted: `ringbolt store reclaim` first"
        ));
    }
    for ((_, image), entry) in map.images()?.into_iter().filter(|((pool, _), _)| pool == name) {
        check_unattached(map, (name, &image), entry.volume)?;
    }
    Ok(pool)
}

/// Refuses to go on while a process that lives has an image attached.
pub(crate) fn check_unattached(
    map: &impl ClusterMap,
    (pool, image): (&str, &str),
    volume: u64,
) -> Result<(), MapError> {
    for holder in map.image_lock(pool, volume)?.unwrap_or_default().holders {
        if map.holder_age(holder.lease)?.is_some() {
            return Err(MapError::Invalid(format!(
                "image {pool}/{image} is in use by {} (process {}, {}), which knows the pool by its name: stop that first; \
                 one that was killed has it for 10 s",
                holder.name, holder.process, holder.address
            )));
        }
    }
    Ok(())
}

/// Refuses a pool that makes no sense, or that has groups of another one, or of one that was removed.
pub(crate) fn check_pool(
    name: &str,
    pool: &PoolRecord,
    pools: &BTreeMap<String, PoolRecord>,
    removed: &[Range<u32>],
) -> Result<(), MapError> {
    let PoolRecord { first_group, groups, replicas, in_sync_min, .. } = *pool;
    let is_name = is_pool_name(name);
    let end = first_group.checked_add(groups).filter(|end| *end < u32::MAX);
    if !is_name || groups == 0 || !(1..=replicas).contains(&in_sync_min) || end.is_none() {
        let reason =
            "a pool has a name without `/`, groups, and at most as many replicas in sync as replicas";
        return Err(MapError::Invalid(reason.to_string()));
    }
    if pools.contains_key(name) {
        return Err(MapError::Exists(format!("pool {name}")));
    }
    for (other, record) in pools {
        let before = first_group.saturating_add(groups) <= record.first_group;
        let after = record.first_group.saturating_add(record.groups) <= first_group;
        if !before && !after {
            return Err(MapError::Invalid(format!("pool {name} would share groups with pool {other}")));
        }
    }
    let range = range_of(pool);
    if removed.iter().any(|removed| range.start < removed.end && removed.start < range.end) {
        let reason = format!("pool {name} would have groups that a pool had which was removed");
        return Err(MapError::Invalid(reason));
    }
    Ok(())
}

/// Refuses what is no name of an image.
///
/// # Errors
/// [`MapError::Invalid`].
pub fn check_image_name(name: &str) -> Result<(), MapError> {
    if name.is_empty() || name.len() > 64 || name.contains(['/', '\n']) {
        return Err(MapError::Invalid(format!("{name:?} is no name of an image: 1 to 64 bytes without `/`")));
    }
    Ok(())
}

/// Refuses settings that fence nothing, and those of a cluster with nodes.
pub(crate) fn check_settings(map: &impl ClusterMap, settings: &ClusterSettings) -> Result<(), MapError> {
    settings.check()?;
    if !map.nodes()?.is_empty() {
        let reason = "the cluster has nodes: its lease and grace do not change any more";
        return Err(MapError::Invalid(reason.to_string()));
    }
    Ok(())
}
