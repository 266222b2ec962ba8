//! What a node does where the map is older than what it has seen: it keeps what it sees, compares, and puts records back.

use std::time::{Duration, Instant};

use cluster_map::{GroupId, GroupRecord, MapError, MapPosition, Proposed};
use reactor::blocking;
use replica::GroupConfig;

use super::Watcher;

/// The revision of the map that was seen is kept at most once in this time, and when a group has another
/// record.
const SAVE_EVERY: Duration = Duration::from_secs(5);
/// After a group's record was put back into a map that is older, nothing is proposed for this time: another
/// node may know a newer one. A node that runs notices such a map when it can be used again, or when it
/// renews its lease.
const OLDER_SETTLE: Duration = Duration::from_secs(2);

impl Watcher {
    /// Keeps what was seen for the next start, in the node's directory and on its device. What cannot be kept
    /// is kept later.
    pub(super) fn save_known(&mut self) {
        // In etcd it is another one after each change of whatever.
        if self.known_saved.elapsed() < SAVE_EVERY && !self.config.known.has_new_groups() && self.may_wait {
            return;
        }
        self.known_saved = Instant::now();
        let revision = self.config.known.revision();
        let memory = self.config.replicas.memory();
        let is_on_device = !self.may_wait || memory.state().map_revision >= revision;
        let on_device = if is_on_device {
            Ok(Ok(()))
        } else {
            blocking::block_on(memory.update(|state| state.map_revision = state.map_revision.max(revision)))
        };
        if let Ok(Err(error)) = on_device {
            log::debug!("{error}");
        }
        match self.config.known.save() {
            Ok(()) => self.is_known_unsaved = false,
            Err(error) => {
                if !std::mem::replace(&mut self.is_known_unsaved, true) {
                    log::warn!("what this node knows of the map is not kept: {error}");
                }
            }
        }
    }

    /// Reads how new the map is.
    pub(super) fn read_position(&mut self) -> Result<(), MapError> {
        let mut position = self.config.map.position()?;
        let known = self.config.known.revision();
        if position.revision < known && position.lost.is_none_or(|lost| lost < known) {
            // Other nodes, and those that start later, see it too.
            self.config.map.report_lost(known)?;
            position.lost = Some(known);
        }
        if !position.is_older() {
            self.config.known.note_revision(position.revision);
        }
        let before = {
            let mut seen = sync::lock(&self.config.seen);
            seen.revision = position.revision;
            seen.known_revision = self.config.known.revision();
            std::mem::replace(&mut seen.lost, position.lost)
        };
        self.is_position_stale = false;
        match position.lost {
            Some(MapPosition::RESTORING) if before != position.lost => self.settle(),
            Some(lost) if before != Some(lost) => {
                log::warn!(
                    "the map is older than what nodes have seen, which was at revision {lost}, and it is at {}: no replica is made or removed until a newer \
                     one is restored, or `ringbolt store map accept` says that this one counts",
                    position.revision
                );
                self.settle();
            }
            None if before.is_some() => {
                log::info!(
                    "the map is at revision {}, and lacks nothing that was seen any more",
                    position.revision
                );
                self.is_groups_stale = true;
                self.is_to_review = true;
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn is_map_older(&self) -> bool {
        sync::lock(&self.config.seen).lost.is_some()
    }

    /// Proposes nothing for a while.
    pub(super) fn settle(&mut self) {
        self.propose_from = Some(Instant::now() + OLDER_SETTLE);
    }

    /// Puts the records of groups back that are older in the map than this node knows.
    pub(super) fn put_back(&mut self) -> Result<(), MapError> {
        for group in self.doubted.iter().copied().collect::<Vec<_>>() {
            // The pool is not known to a map that lacks it: what belongs to nothing is not put there.
            if self.membership.pool_of(group).is_some() {
                self.compare(group)?;
            }
            self.doubted.remove(&group);
        }
        Ok(())
    }

    pub(super) fn compare(&mut self, group: u32) -> Result<(), MapError> {
        let Some(known) = self.records.get(&group).cloned() else { return Ok(()) };
        let (id, epoch) = (GroupId(group), known.config.epoch);
        let found = self.config.map.group(id)?;
        let found_epoch = found.as_ref().map_or(0, |found| found.config.epoch);
        match found {
            Some(found) if found_epoch > epoch || found == known => self.set_record(group, found),
            Some(_) if found_epoch == epoch => {
                // Nodes that did not know this record have proposed another one. Who serves knows better.
                if self.serves(group, epoch) {
                    let config = GroupConfig { epoch: epoch + 1, ..known.config.clone() };
                    self.raise(group, GroupRecord { config, ..known })?;
                } else {
                    self.conflicts.insert(group);
                }
            }
            _ => {
                log::warn!(
                    "group {group}: the map's record has epoch {found_epoch}, and this node knows epoch {epoch}, which is put back"
                );
                self.settle();
                self.raise(group, known)?;
            }
        }
        Ok(())
    }

    pub(super) fn raise(&mut self, group: u32, record: GroupRecord) -> Result<(), MapError> {
        match self.config.map.raise_group(GroupId(group), &record)? {
            Proposed::Accepted => self.set_record(group, record),
            Proposed::Superseded(other) => self.set_record(group, other),
            Proposed::Missing => {}
        }
        Ok(())
    }

    /// Whether this node is the primary of a group in this epoch, and serves it: then every other member has
    /// said so within the lease, and none knows a newer epoch.
    pub(super) fn serves(&self, group: u32, epoch: u32) -> bool {
        if !self.may_wait {
            return false;
        }
        let status = blocking::block_on(self.config.replicas.status());
        let status = status.ok().and_then(Result::ok).unwrap_or_default();
        let mut replicas = status.iter().filter_map(|status| status.replica.as_ref());
        replicas.any(|replica| {
            let config = &replica.config;
            replica.group == group
                && config.epoch == epoch
                && config.primary == self.config.node
                && replica.status.blocked.is_none()
        })
    }
}
