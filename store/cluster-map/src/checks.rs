//! What both kinds of map refuse.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::groups::range_of;
use crate::{ClusterMap, ClusterSettings, MapError, PoolRecord};

/// Refuses a pool that makes no sense, or that has groups of another one, or of one that was removed.
pub(crate) fn check_pool(
    name: &str,
    pool: &PoolRecord,
    pools: &BTreeMap<String, PoolRecord>,
    removed: &[Range<u32>],
) -> Result<(), MapError> {
    let PoolRecord { first_group, groups, replicas, in_sync_min, .. } = *pool;
    let is_name = !name.is_empty() && name.len() <= 64 && !name.contains(['/', '?', '\n']);
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
pub(crate) fn check_image_name(name: &str) -> Result<(), MapError> {
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
