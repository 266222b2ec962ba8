//! How new a map is.

use serde::{Deserialize, Serialize};

use crate::MapError;

/// How new a map is. One whose revision is lower than what a node has seen is an older copy of itself, as
/// after the restoration of a snapshot: what it does not have may be there all the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapPosition {
    /// Higher after each change of nodes, devices, pools, images and keys; in etcd after every change.
    pub revision: u64,
    /// The highest revision that a node has seen and reported, if the map was at that before and is not now.
    pub lost: Option<u64>,
}

impl MapPosition {
    /// [`lost`](Self::lost) of a map that is being restored: it lacks more than anything until that is
    /// complete.
    pub const RESTORING: u64 = u64::MAX;

    /// Whether it is older than what nodes have seen.
    pub fn is_older(&self) -> bool {
        self.lost.is_some()
    }
}

/// The record of what a map lacks, and of what was accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MapHistory {
    /// Added to the revisions of the storage: more after each acceptance of an older map.
    #[serde(default)]
    pub(crate) base: u64,
    /// See [`MapPosition::lost`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lost: Option<u64>,
}

impl MapHistory {
    /// The position of a map whose storage has this revision.
    pub(crate) fn position(self, of_storage: u64) -> MapPosition {
        let revision = self.base.saturating_add(of_storage);
        // Later changes bring back nothing of it, so it stays when the revision is higher than that.
        MapPosition { revision, lost: self.lost }
    }

    /// Refuses the acceptance of a map of which only a part is there.
    pub(crate) fn check_complete(self) -> Result<(), MapError> {
        match self.lost {
            Some(MapPosition::RESTORING) => Err(MapError::Invalid(
                "the restoration of the map was interrupted: `ringbolt store map restore` again".to_string(),
            )),
            _ => Ok(()),
        }
    }

    /// After a node reported what it has seen.
    pub(crate) fn with_lost(self, lost: u64) -> MapHistory {
        MapHistory { lost: Some(self.lost.map_or(lost, |known| known.max(lost))), ..self }
    }

    /// With a position after `min` and all that was reported, which lacks nothing.
    pub(crate) fn accepted(self, of_storage: u64, min: u64) -> MapHistory {
        let lost = self.lost.filter(|lost| *lost != MapPosition::RESTORING);
        let min = lost.map_or(min, |lost| lost.max(min));
        let position = self.base.saturating_add(of_storage).max(min).saturating_add(1);
        MapHistory { base: position.saturating_sub(of_storage), lost: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_accepted_is_newer_than_all_that_was_seen() {
        let history = MapHistory::default();
        assert_eq!(history.position(7), MapPosition { revision: 7, lost: None });
        let reported = history.with_lost(9).with_lost(8);
        assert_eq!(reported.position(7), MapPosition { revision: 7, lost: Some(9) });
        assert_eq!(reported.position(10), MapPosition { revision: 10, lost: Some(9) });
        let accepted = reported.accepted(7, 0);
        assert_eq!(accepted.position(7), MapPosition { revision: 10, lost: None });
        // It stays so while the storage counts on, and once more.
        assert_eq!(accepted.position(8).revision, 11);
        assert!(reported.check_complete().is_ok());
        let restoring = reported.with_lost(MapPosition::RESTORING);
        assert!(restoring.check_complete().is_err() && restoring.position(7).is_older());
        assert_eq!(restoring.accepted(7, 12).position(7), MapPosition { revision: 13, lost: None });
        let twice = accepted.with_lost(20).accepted(8, 30);
        assert_eq!(twice.position(8), MapPosition { revision: 31, lost: None });
    }
}
