//! How a cluster recovers, as its operators want it.

use serde::{Deserialize, Serialize};

use crate::MapError;

/// What operators change in a cluster that runs. All nodes follow it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoverySettings {
    /// No node is declared out because it is down: its replicas stay.
    #[serde(default)]
    pub noout: bool,
    /// Bytes in a second that a node copies to replicas of other nodes at most, all its groups together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
}

impl RecoverySettings {
    /// The lowest rate: with it a copy of 1 TiB takes twelve days.
    pub const RATE_MIN: u64 = 1 << 20;

    /// Refuses a rate with which copies do not end.
    ///
    /// # Errors
    /// [`MapError::Invalid`].
    pub fn check(&self) -> Result<(), MapError> {
        match self.rate {
            Some(rate) if rate < Self::RATE_MIN => Err(MapError::Invalid(format!(
                "a recovery rate of {rate} bytes a second is too low: at least {}",
                Self::RATE_MIN
            ))),
            _ => Ok(()),
        }
    }
}
