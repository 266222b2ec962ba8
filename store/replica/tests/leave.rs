//! Replicas that leave the in-sync set because their nodes are to stop, and primaries that hand over to the
//! preferred one.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::sync::Arc;

use replica::*;
use wire_store::{EntryHeader, ObjectId, Operation};

const MS: u64 = 1_000_000;

/// Replicas 1 to `n` with links and logs that take no time, and a map.
struct Group {
    replicas: Vec<Replica>,
    map: Arc<GroupConfig>,
    /// Replicas that are stopped.
    stopped: Vec<ReplicaId>,
    /// The map does not answer.
    is_map_lost: bool,
    now_ns: u64,
    messages: VecDeque<(ReplicaId, ReplicaMessage)>,
    replies: Vec<(u64, ClientReply)>,
}

impl Group {
    /// The first is the primary, and has waited for leases of an earlier one.
    fn new(count: u32, in_sync_min: usize) -> Group {
        let settings = ReplicaSettings { in_sync_min, ..ReplicaSettings::default() };
        let replica = |id| Replica::new(ReplicaId(id), 1, settings.clone(), RecoveredReplica::default(), 0);
        let in_sync = (1..=count).map(ReplicaId).collect();
        let mut group = Group {
            replicas: (1..=count).map(replica).collect(),
            map: Arc::new(GroupConfig { epoch: 1, primary: ReplicaId(1), in_sync }),
            stopped: Vec::new(),
            is_map_lost: false,
            now_ns: 0,
            messages: VecDeque::new(),
            replies: Vec::new(),
        };
        for id in 1..=count {
            group.handle(ReplicaId(id), ReplicaEvent::Map(group.map.clone()));
        }
        group.run_until(1000 * MS);
        assert_eq!(group.map.primary, ReplicaId(1));
        assert_eq!(group.map.in_sync.len(), count as usize);
        group
    }

    fn replica(&self, id: ReplicaId) -> &Replica {
        &self.replicas[id.0 as usize - 1]
    }

    fn handle(&mut self, id: ReplicaId, event: ReplicaEvent) {
        if self.stopped.contains(&id) {
            return;
        }
        let mut actions = Vec::new();
        self.replicas[id.0 as usize - 1].handle(event, self.now_ns, &mut actions);
        for action in actions {
            match action {
                ReplicaAction::Send { to, message } => self.messages.push_back((to, message)),
                ReplicaAction::Reply { number, reply, .. } => self.replies.push((number, reply)),
                ReplicaAction::Append { append, .. } => self.handle(id, ReplicaEvent::Appended { append }),
                ReplicaAction::Checkpoint { checkpoint, .. } => {
                    self.handle(id, ReplicaEvent::Checkpointed { checkpoint });
                }
                ReplicaAction::Propose(_) if self.is_map_lost => {}
                ReplicaAction::Propose(config) => {
                    if config.epoch == self.map.epoch + 1 {
                        self.map = config;
                    }
                    self.handle(id, ReplicaEvent::Map(self.map.clone()));
                }
                _ => {}
            }
        }
    }

    /// Delivers what is under way.
    fn settle(&mut self) {
        while let Some((to, message)) = self.messages.pop_front() {
            self.handle(to, ReplicaEvent::Message(message));
        }
    }

    fn run_until(&mut self, end_ns: u64) {
        self.settle();
        while self.now_ns < end_ns {
            self.now_ns += MS;
            for index in 0..self.replicas.len() {
                if self.replicas[index].deadline().is_some_and(|at_ns| at_ns <= self.now_ns) {
                    self.handle(ReplicaId(index as u32 + 1), ReplicaEvent::Timer);
                }
            }
            self.settle();
        }
    }

    fn leave(&mut self, id: u32, successors: &[u32], force: bool) {
        let successors = successors.iter().copied().map(ReplicaId).collect();
        self.handle(ReplicaId(id), ReplicaEvent::Leave { successors, force });
        self.settle();
    }

    fn prefer(&mut self, id: u32) {
        for replica in 1..=self.replicas.len() as u32 {
            self.handle(ReplicaId(replica), ReplicaEvent::PreferredPrimary(ReplicaId(id)));
        }
        self.settle();
    }

    /// Until a primary may hand over to the preferred one.
    fn run_calm(&mut self) {
        self.run_until(self.now_ns + ReplicaSettings::default().transfer_after_ns);
    }

    fn write(&mut self, to: u32, number: u64) {
        let object = ObjectId { group: 0, volume: 1, index: 0, suffix: 0 };
        let header = EntryHeader::new(Operation::WriteZeroes, object, 0, 4096);
        let header = EntryHeader { client: 5, client_number: number, ..header };
        self.handle(
            ReplicaId(to),
            ReplicaEvent::Request(ClientRequest::Write { header, data: Arc::default() }),
        );
        self.settle();
    }

    fn is_written(&self, number: u64) -> bool {
        self.replies.contains(&(number, ClientReply::Written))
    }

    fn status(&self, id: u32) -> Option<LeaveStatus> {
        self.replica(ReplicaId(id)).leave_status()
    }
}

#[test]
fn a_primary_that_leaves_is_replaced_without_a_wait() {
    let mut group = Group::new(3, 2);
    group.leave(1, &[3, 2], false);
    assert_eq!((group.map.primary, group.map.has(ReplicaId(1))), (ReplicaId(3), false));
    assert_eq!(group.status(1), Some(LeaveStatus::Left));
    group.write(3, 1);
    assert!(group.is_written(1), "at the time of the hand-over: {:?}", group.replica(ReplicaId(3)).status());
    // It stops, and nothing waits for its lease.
    group.stopped.push(ReplicaId(1));
    group.write(3, 2);
    assert!(group.is_written(2));
    group.run_until(group.now_ns + 2000 * MS);
    assert_eq!(group.map.in_sync, [ReplicaId(2), ReplicaId(3)]);
}

#[test]
fn a_follower_that_leaves_holds_up_no_write() {
    let mut group = Group::new(3, 2);
    group.leave(2, &[1, 3], false);
    assert_eq!((group.map.primary, group.map.has(ReplicaId(2))), (ReplicaId(1), false));
    assert_eq!(group.status(2), Some(LeaveStatus::Left));
    // While it runs it asks for no entries; then it is silent.
    group.run_until(group.now_ns + 1000 * MS);
    assert_eq!(group.replica(ReplicaId(1)).learners(), []);
    group.stopped.push(ReplicaId(2));
    group.write(1, 1);
    assert!(group.is_written(1));
}

#[test]
fn a_learner_that_leaves_holds_up_no_write() {
    let mut group = Group::new(3, 2);
    group.stopped.push(ReplicaId(3));
    group.run_until(group.now_ns + 1000 * MS);
    assert!(!group.map.has(ReplicaId(3)));
    group.stopped.clear();
    // It asks for a stream, and is counted from its first answer on.
    group.handle(ReplicaId(3), ReplicaEvent::Timer);
    let join = group.messages.pop_front().unwrap();
    group.handle(join.0, ReplicaEvent::Message(join.1));
    assert_eq!(group.replica(ReplicaId(1)).learners().len(), 1);
    group.messages.clear();
    group.leave(3, &[1, 2], false);
    assert_eq!(group.status(3), Some(LeaveStatus::Left));
    assert_eq!(group.replica(ReplicaId(1)).learners(), []);
}

#[test]
fn what_a_pool_demands_changes_while_its_groups_run() {
    let mut group = Group::new(2, 2);
    group.stopped.push(ReplicaId(2));
    group.write(1, 1);
    group.run_until(group.now_ns + 1000 * MS);
    assert_eq!((group.map.in_sync.as_slice(), group.is_written(1)), (&[ReplicaId(1)][..], false));
    group.handle(ReplicaId(1), ReplicaEvent::InSyncMin(1));
    group.run_until(group.now_ns + 100 * MS);
    assert!(group.is_written(1));
    // More again: what is written then waits for the other one.
    group.handle(ReplicaId(1), ReplicaEvent::InSyncMin(2));
    group.write(1, 2);
    group.run_until(group.now_ns + 1000 * MS);
    let blocked = group.replica(ReplicaId(1)).status().blocked;
    assert_eq!((blocked, group.is_written(2)), (Some(GroupBlocked::TooFewInSync), false));
    group.stopped.clear();
    group.run_until(group.now_ns + 2000 * MS);
    assert!(group.is_written(2), "{:?}", group.map);
}

#[test]
fn a_replica_stays_where_too_few_would_be_in_sync() {
    let mut group = Group::new(3, 2);
    group.leave(1, &[2, 3], false);
    group.stopped.push(ReplicaId(1));
    // One of two that a write needs.
    group.leave(3, &[2], false);
    group.leave(2, &[3], false);
    assert_eq!(
        (group.status(3), group.status(2)),
        (Some(LeaveStatus::TooFewInSync), Some(LeaveStatus::TooFewInSync))
    );
    // Those that go on count, and not those that are in sync.
    let mut other = Group::new(3, 2);
    other.leave(2, &[1], false);
    assert_eq!((other.status(2), other.map.in_sync.len()), (Some(LeaveStatus::TooFewInSync), 3));
    // It goes on: it is in sync, and serves.
    group.handle(ReplicaId(3), ReplicaEvent::Stay);
    group.handle(ReplicaId(2), ReplicaEvent::Stay);
    assert_eq!(group.status(3), None);
    let primary = group.map.primary.0;
    group.write(primary, 1);
    assert!(group.is_written(1));
    // If it must be, it leaves all the same.
    group.leave(primary, &[2, 3], true);
    assert_eq!((group.status(primary), group.map.in_sync.len()), (Some(LeaveStatus::Left), 1));
}

#[test]
fn a_replica_that_stays_after_all_is_in_sync_again() {
    let mut group = Group::new(3, 2);
    group.leave(1, &[2, 3], false);
    assert!(!group.map.has(ReplicaId(1)));
    group.handle(ReplicaId(1), ReplicaEvent::Stay);
    group.run_until(group.now_ns + 1000 * MS);
    assert!(group.map.has(ReplicaId(1)), "{:?}", group.map);
}

/// Whether a primary hands over when it learns of this record.
fn hands_over(known_at_ns: u64, next_epoch: u32) -> bool {
    let settings = ReplicaSettings { in_sync_min: 1, ..ReplicaSettings::default() };
    let mut replica = Replica::new(ReplicaId(1), 1, settings.clone(), RecoveredReplica::default(), 0);
    let config = |epoch, primary| {
        let in_sync = [1, 2].map(ReplicaId).into();
        ReplicaEvent::Map(Arc::new(GroupConfig { epoch, primary: ReplicaId(primary), in_sync }))
    };
    let mut actions = Vec::new();
    replica.handle(config(1, 2), 0, &mut actions);
    replica.handle(config(2, 1), 0, &mut actions);
    replica.handle(config(next_epoch, 2), known_at_ns, &mut actions);
    let is_hand_over = |action: &ReplicaAction| match action {
        ReplicaAction::Send { to, message } => *to == ReplicaId(2) && message.body == MessageBody::HandOver,
        _ => false,
    };
    actions.iter().any(is_hand_over)
}

#[test]
fn a_primary_hands_over_only_what_it_had() {
    let grace_ns = ReplicaSettings::default().grace_ns;
    assert!(hands_over(grace_ns, 3));
    // An earlier primary may have its lease.
    assert!(!hands_over(grace_ns - 1, 3));
    // Another one may have been the primary meanwhile, and have its lease.
    assert!(!hands_over(grace_ns, 4));
}

/// Clients need not wait for their time-outs.
#[test]
fn writes_that_were_not_committed_are_for_the_successor() {
    let mut group = Group::new(3, 2);
    group.stopped.push(ReplicaId(2));
    group.write(1, 1);
    assert!(!group.is_written(1));
    group.stopped.clear();
    group.leave(1, &[3], true);
    assert_eq!(group.map.primary, ReplicaId(3));
    let refused = ClientReply::NotPrimary { primary: Some(ReplicaId(3)) };
    assert!(group.replies.contains(&(1, refused)), "{:?}", group.replies);
    // It has the entry: the retry is the same request.
    group.write(3, 1);
    assert!(group.is_written(1));
    assert_eq!(group.replica(ReplicaId(3)).status().log_end, 1);
}

#[test]
fn a_primary_hands_over_to_the_preferred_one_without_a_wait_and_stays_in_sync() {
    let mut group = Group::new(3, 2);
    group.write(1, 1);
    group.run_calm();
    let epoch = group.map.epoch;
    group.prefer(3);
    assert_eq!((group.map.primary, group.map.epoch), (ReplicaId(3), epoch + 1));
    assert_eq!(group.map.in_sync.len(), 3);
    group.write(3, 2);
    assert!(group.is_written(2), "at the time of the hand-over: {:?}", group.replica(ReplicaId(3)).status());
    group.run_until(group.now_ns + 1000 * MS);
    assert_eq!((group.map.primary, group.map.epoch), (ReplicaId(3), epoch + 1), "{:?}", group.map);
}

#[test]
fn a_primary_does_not_hand_over_soon_after_a_change() {
    let mut group = Group::new(3, 2);
    let calm_ns = ReplicaSettings::default().transfer_after_ns;
    group.run_calm();
    group.prefer(2);
    assert_eq!(group.map.primary, ReplicaId(2));
    // Back and forth: not before it was calm again.
    group.run_until(group.now_ns + calm_ns - 2 * MS);
    group.prefer(1);
    assert_eq!(group.map.primary, ReplicaId(2));
    group.run_until(group.now_ns + 2 * MS);
    group.prefer(1);
    assert_eq!(group.map.primary, ReplicaId(1));
}

#[test]
fn a_primary_does_not_hand_over_while_a_replica_is_missing_or_comes_back_or_leaves() {
    let mut group = Group::new(3, 2);
    group.stopped.push(ReplicaId(3));
    group.run_calm();
    assert!(!group.map.has(ReplicaId(3)));
    let epoch = group.map.epoch;
    for preferred in [3, 1, 9] {
        group.prefer(preferred);
    }
    assert_eq!((group.map.primary, group.map.epoch), (ReplicaId(1), epoch));
    // It asks for entries: not yet a member.
    group.stopped.clear();
    group.handle(ReplicaId(3), ReplicaEvent::Map(group.map.clone()));
    group.handle(ReplicaId(3), ReplicaEvent::Timer);
    let join = group.messages.pop_front().unwrap();
    group.handle(join.0, ReplicaEvent::Message(join.1));
    assert_eq!(group.replica(ReplicaId(1)).learners().len(), 1);
    group.messages.clear();
    group.prefer(2);
    assert_eq!(group.map.primary, ReplicaId(1));
    group.run_until(group.now_ns + 1000 * MS);
    assert!(group.map.has(ReplicaId(3)));
    group.run_calm();
    // A primary that leaves: its successor is who is to stay.
    group.is_map_lost = true;
    group.leave(1, &[2, 3], false);
    group.is_map_lost = false;
    group.prefer(3);
    assert_eq!(group.map.primary, ReplicaId(1));
    group.run_until(group.now_ns + 1000 * MS);
    assert_ne!(group.map.primary, ReplicaId(1));
}

/// What was proposed while the map did not answer must not make a primary of one that is lost meanwhile.
#[test]
fn a_member_that_becomes_silent_before_the_map_answers_is_no_primary() {
    let mut group = Group::new(3, 2);
    group.run_calm();
    let epoch = group.map.epoch;
    group.is_map_lost = true;
    group.prefer(3);
    group.stopped.push(ReplicaId(3));
    group.run_until(group.now_ns + 2000 * MS);
    group.is_map_lost = false;
    group.run_until(group.now_ns + 1000 * MS);
    assert_eq!((group.map.primary, &group.map.in_sync[..]), (ReplicaId(1), &[1, 2].map(ReplicaId)[..]));
    assert_eq!(group.map.epoch, epoch + 1);
    group.write(1, 1);
    assert!(group.is_written(1));
}

/// It leaves right after it has handed over.
#[test]
fn a_primary_that_has_handed_over_to_the_preferred_one_can_leave() {
    let mut group = Group::new(3, 2);
    group.run_calm();
    group.prefer(2);
    group.leave(1, &[2, 3], false);
    group.run_until(group.now_ns + 200 * MS);
    assert_eq!((group.status(1), group.map.has(ReplicaId(1))), (Some(LeaveStatus::Left), false));
    assert_eq!(group.map.primary, ReplicaId(2));
}
