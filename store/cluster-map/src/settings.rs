//! What is the same on all nodes of a cluster for as long as it exists.

use serde::{Deserialize, Serialize};

use crate::MapError;

/// Lease and grace of the replicas. They fence primaries only if every node has the same, so that they are in the map from
/// the cluster's creation on and never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterSettings {
    /// How long a secondary's answer lets the primary serve, in ms.
    pub lease_ms: u32,
    /// How long a secondary waits for its primary before it proposes itself, in ms.
    pub grace_ms: u32,
}

impl Default for ClusterSettings {
    /// Also those of clusters from before there were settings.
    fn default() -> ClusterSettings {
        ClusterSettings { lease_ms: 400, grace_ms: 450 }
    }
}

impl ClusterSettings {
    /// Shortest lease. A primary sends four messages in this time; a core that is busy for longer loses its replicas.
    pub const LEASE_MS_MIN: u32 = 40;
    /// Lease and grace together are less: that long a client waits when a node is lost.
    pub const SUM_MS_LIMIT: u32 = 1000;

    /// Shortest grace for a lease: a clock of the primary that is 1 % slow, and one of a secondary that is 1 % fast, still
    /// end the lease first.
    pub fn grace_ms_min(lease_ms: u32) -> u32 {
        let min = u64::from(lease_ms) * 101 / 99 + 1;
        u32::try_from(min).unwrap_or(u32::MAX)
    }

    /// Checks that a grace outlasts the lease, and that both are over soon.
    ///
    /// # Errors
    /// [`MapError::Invalid`].
    pub fn check(&self) -> Result<(), MapError> {
        let ClusterSettings { lease_ms, grace_ms } = *self;
        let (grace_ms_min, limit) = (Self::grace_ms_min(lease_ms), Self::SUM_MS_LIMIT);
        let reason = if lease_ms < Self::LEASE_MS_MIN {
            format!("a lease of {lease_ms} ms is too short: at least {} ms", Self::LEASE_MS_MIN)
        } else if grace_ms < grace_ms_min {
            format!(
                "a grace of {grace_ms} ms does not outlast a lease of {lease_ms} ms on clocks that are 1 % fast or slow: at least \
                 {grace_ms_min} ms"
            )
        } else if u64::from(lease_ms) + u64::from(grace_ms) >= limit.into() {
            format!("a lease of {lease_ms} ms and a grace of {grace_ms} ms together are not below {limit} ms")
        } else {
            return Ok(());
        };
        Err(MapError::Invalid(reason))
    }
}
