//! Replicas that lack what they had: older devices, logs that lost their ends, and who serves then.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::sync::Arc;

use replica::*;
use wire_store::{EntryHeader, ObjectId, Operation};

const MS: u64 = 1_000_000;

/// A replica with its log, which outlives it.
struct Node {
    replica: Option<Replica>,
    entries: Vec<Arc<ReplicatedEntry>>,
    memory: GroupMemory,
    /// Its log is damaged, as the next start finds.
    is_damaged: bool,
    starts: u32,
}

/// Replicas 1 to `n` with links and logs that take no time, and a map.
struct Group {
    nodes: Vec<Node>,
    map: Arc<GroupConfig>,
    /// Every record that the map has had.
    records: Vec<Arc<GroupConfig>>,
    /// Replicas of a release that does not say where its log ends.
    earlier: Vec<ReplicaId>,
    now_ns: u64,
    messages: VecDeque<(ReplicaId, ReplicaMessage)>,
    replies: Vec<(u64, ClientReply)>,
    /// Messages that said where a log ends.
    log_ends: usize,
    restored: Vec<u32>,
}

impl Group {
    fn new(count: u32) -> Group {
        let node = |_| {
            let (entries, memory) = (Vec::new(), GroupMemory::default());
            Node { replica: None, entries, memory, is_damaged: false, starts: 0 }
        };
        let in_sync = (1..=count).map(ReplicaId).collect();
        let map = Arc::new(GroupConfig { epoch: 1, primary: ReplicaId(1), in_sync });
        let mut group = Group {
            nodes: (0..count).map(node).collect(),
            records: vec![map.clone()],
            map,
            earlier: Vec::new(),
            now_ns: 0,
            messages: VecDeque::new(),
            replies: Vec::new(),
            log_ends: 0,
            restored: Vec::new(),
        };
        (1..=count).for_each(|id| group.start(id));
        group.run_for(1000 * MS);
        assert_eq!((group.map.primary, group.map.in_sync.len()), (ReplicaId(1), count as usize));
        group
    }

    fn node(&mut self, id: u32) -> &mut Node {
        &mut self.nodes[id as usize - 1]
    }

    fn status(&self, id: u32) -> ReplicaStatus {
        self.nodes[id as usize - 1].replica.as_ref().unwrap().status()
    }

    fn start(&mut self, id: u32) {
        let (now_ns, memory) = (self.now_ns, self.nodes[id as usize - 1].memory);
        let node = self.node(id);
        node.starts += 1;
        let (entries, is_damaged) = (node.entries.clone(), std::mem::take(&mut node.is_damaged));
        let recovered = RecoveredReplica { entries, is_damaged, ..RecoveredReplica::default() };
        let settings = ReplicaSettings { in_sync_min: 1, ..ReplicaSettings::default() };
        node.replica = Some(Replica::new(ReplicaId(id), node.starts, settings, recovered, now_ns));
        self.handle(ReplicaId(id), ReplicaEvent::Memory(memory));
        self.handle(ReplicaId(id), ReplicaEvent::Map(self.map.clone()));
    }

    fn stop(&mut self, id: u32) {
        self.node(id).replica = None;
    }

    /// Stops a replica, whose log then has this many entries.
    fn cut(&mut self, id: u32, entries: usize) {
        self.stop(id);
        self.node(id).entries.truncate(entries);
    }

    fn handle(&mut self, id: ReplicaId, event: ReplicaEvent) {
        let now_ns = self.now_ns;
        let Some(replica) = &mut self.node(id.0).replica else { return };
        let mut actions = Vec::new();
        replica.handle(event, now_ns, &mut actions);
        for action in actions {
            match action {
                ReplicaAction::Send { to, mut message } => {
                    if let MessageBody::LogEnd { sent_ns, .. } = message.body {
                        self.log_ends += 1;
                        if self.earlier.contains(&id) {
                            let (session, outcome) = (0, AppendOutcome::Durable(0));
                            message.body = MessageBody::Appended { sent_ns, session, outcome };
                        }
                    }
                    self.messages.push_back((to, message));
                }
                ReplicaAction::Reply { number, reply, .. } => self.replies.push((number, reply)),
                ReplicaAction::Append { append, entry } => {
                    self.node(id.0).entries.push(entry);
                    self.handle(id, ReplicaEvent::Appended { append });
                }
                ReplicaAction::Truncate { truncation, from } => {
                    self.node(id.0).entries.truncate(from as usize - 1);
                    self.handle(id, ReplicaEvent::Truncated { truncation, in_place: Vec::new() });
                }
                ReplicaAction::Propose(config) => {
                    if config.epoch == self.map.epoch + 1 {
                        self.map = config.clone();
                        self.records.push(config);
                    }
                    self.handle(id, ReplicaEvent::Map(self.map.clone()));
                }
                ReplicaAction::Restored => self.restored.push(id.0),
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

    fn run_for(&mut self, duration_ns: u64) {
        let end_ns = self.now_ns + duration_ns;
        self.settle();
        while self.now_ns < end_ns {
            self.now_ns += MS;
            for index in 0..self.nodes.len() {
                let deadline = self.nodes[index].replica.as_ref().and_then(Replica::deadline);
                if deadline.is_some_and(|at_ns| at_ns <= self.now_ns) {
                    self.handle(ReplicaId(index as u32 + 1), ReplicaEvent::Timer);
                }
            }
            self.settle();
        }
    }

    /// Writes with these numbers, each acknowledged before the next one.
    fn write(&mut self, numbers: std::ops::RangeInclusive<u64>) {
        for number in numbers {
            let object = ObjectId { group: 0, volume: 1, index: 0, suffix: 0 };
            let header = EntryHeader::new(Operation::WriteZeroes, object, 0, 4096);
            let header = EntryHeader { client: 5, client_number: number, ..header };
            let request = ClientRequest::Write { header, data: Arc::default() };
            self.handle(self.map.primary, ReplicaEvent::Request(request));
            self.settle();
            assert!(self.replies.contains(&(number, ClientReply::Written)), "{number}: {:?}", self.replies);
        }
    }

    /// The requests in a log, by their numbers.
    fn log_of(&self, id: u32) -> Vec<u64> {
        self.nodes[id as usize - 1].entries.iter().map(|entry| entry.header.client_number).collect()
    }

    /// Every replica is in sync and has these requests.
    fn assert_all_have(&self, numbers: &[u64]) {
        assert_eq!(self.map.in_sync.len(), self.nodes.len(), "{:?}", self.records);
        for id in 1..=self.nodes.len() as u32 {
            assert_eq!(self.log_of(id), numbers, "replica {id}");
            assert_eq!(self.status(id).stale, None);
        }
    }

    /// Whether a record of the map since an epoch was without a replica.
    fn has_left(&self, id: u32, since: u32) -> bool {
        self.records.iter().any(|record| record.epoch > since && !record.has(ReplicaId(id)))
    }
}

#[test]
fn the_newest_log_serves_after_all_were_down() {
    // Any of the three lost the end of its log, the primary of the record or another one.
    for lacking in 1..=3 {
        let mut group = Group::new(3);
        group.write(1..=5);
        (1..=3).for_each(|id| group.stop(id));
        group.cut(lacking, 2);
        let epoch = group.map.epoch;
        (1..=3).for_each(|id| group.start(id));
        group.run_for(3000 * MS);
        assert!(group.has_left(lacking, epoch), "{:?}", group.records);
        let of_record = group.records.iter().filter(|record| record.epoch > epoch + 1);
        assert!(of_record.clone().all(|record| record.primary != ReplicaId(lacking)), "{:?}", group.records);
        group.assert_all_have(&[1, 2, 3, 4, 5]);
        group.write(6..=6);
    }
}

/// Nothing proves that the last entry was committed: it is not given up all the same.
#[test]
fn an_entry_that_one_log_lost_is_kept_by_the_others() {
    for lacking in 1..=3 {
        let mut group = Group::new(3);
        group.write(1..=5);
        (1..=3).for_each(|id| group.stop(id));
        group.cut(lacking, 4);
        (1..=3).for_each(|id| group.start(id));
        group.run_for(3000 * MS);
        group.assert_all_have(&[1, 2, 3, 4, 5]);
    }
}

#[test]
fn a_replica_that_restarts_with_less_leaves_and_catches_up() {
    for lacking in [1, 3] {
        let mut group = Group::new(3);
        group.write(1..=5);
        group.cut(lacking, 2);
        let epoch = group.map.epoch;
        group.start(lacking);
        group.settle();
        group.run_for(3000 * MS);
        assert!(group.has_left(lacking, epoch), "{:?}", group.records);
        group.assert_all_have(&[1, 2, 3, 4, 5]);
        group.write(6..=6);
    }
}

#[test]
fn an_older_device_is_believed_in_nothing_until_it_is_in_sync() {
    for all_were_down in [false, true] {
        let mut group = Group::new(3);
        group.write(1..=5);
        // The same entries: only the device says that something is wrong.
        group.stop(1);
        if all_were_down {
            (2..=3).for_each(|id| group.stop(id));
        }
        group.node(1).memory.is_older = true;
        let epoch = group.map.epoch;
        group.start(1);
        assert_eq!(group.status(1).stale, Some(StaleReason::OlderDevice));
        group.run_for(2000 * MS);
        if all_were_down {
            assert_eq!(group.map.epoch, epoch, "it proposed something");
            assert_eq!(group.status(1).blocked, Some(GroupBlocked::Stale));
            (2..=3).for_each(|id| group.start(id));
        }
        group.run_for(3000 * MS);
        assert!(group.has_left(1, epoch));
        group.assert_all_have(&[1, 2, 3, 4, 5]);
        assert_eq!(group.restored, [1]);
    }
}

#[test]
fn one_that_ends_before_what_the_map_has_serves_only_if_a_person_accepts_the_loss() {
    let mut group = Group::new(2);
    group.write(1..=5);
    (1..=2).for_each(|id| group.stop(id));
    group.cut(2, 3);
    group.node(2).memory.committed = EntryId { sequence: 4, epoch: 2 };
    group.start(2);
    group.run_for(2000 * MS);
    assert_eq!(group.status(2).stale, Some(StaleReason::BehindMap));
    assert_eq!(group.status(2).blocked, Some(GroupBlocked::Stale));
    // What was accepted in an earlier epoch is another loss.
    let epoch = group.map.epoch;
    group.handle(ReplicaId(2), ReplicaEvent::AcceptLoss { epoch: epoch - 1 });
    group.run_for(2000 * MS);
    assert_eq!(group.map.epoch, epoch);
    group.handle(ReplicaId(2), ReplicaEvent::AcceptLoss { epoch });
    group.run_for(2000 * MS);
    assert_eq!((group.map.primary, group.map.in_sync.len()), (ReplicaId(2), 1));
    group.write(6..=7);
    assert_eq!(group.log_of(2), [1, 2, 3, 6, 7]);
    // The other one has what counts as lost. Without the decision it keeps that, and says so.
    group.start(1);
    group.run_for(1000 * MS);
    assert!(group.status(1).contradicts);
    assert_eq!((group.log_of(1), group.map.in_sync.len()), (vec![1, 2, 3, 4, 5], 1));
    // With it, it gets a copy.
    group.node(1).memory.loss_epoch = epoch;
    group.start(1);
    group.run_for(1000 * MS);
    assert!(!group.status(1).complete && !group.status(1).contradicts);
}

#[test]
fn one_whose_log_is_damaged_in_the_middle_leaves_and_catches_up() {
    let mut group = Group::new(3);
    group.write(1..=5);
    group.cut(1, 2);
    group.node(1).is_damaged = true;
    let epoch = group.map.epoch;
    group.start(1);
    assert_eq!(group.status(1).stale, Some(StaleReason::DamagedLog));
    group.run_for(3000 * MS);
    assert!(group.has_left(1, epoch));
    group.assert_all_have(&[1, 2, 3, 4, 5]);
}

#[test]
fn one_that_has_what_the_map_has_serves_alone() {
    let mut group = Group::new(2);
    group.write(1..=5);
    (1..=2).for_each(|id| group.stop(id));
    group.node(2).memory.committed = EntryId { sequence: 5, epoch: 2 };
    group.start(2);
    group.run_for(2000 * MS);
    assert_eq!(group.map.in_sync, [ReplicaId(2)]);
    group.write(6..=6);
}

#[test]
fn a_takeover_by_replicas_that_ran_on_compares_nothing() {
    let mut group = Group::new(3);
    group.write(1..=5);
    let log_ends = group.log_ends;
    group.stop(1);
    group.run_for(1000 * MS);
    assert_ne!(group.map.primary, ReplicaId(1));
    group.write(6..=6);
    assert_eq!(group.log_ends, log_ends);
}

#[test]
fn a_message_from_before_its_start_tells_a_follower_nothing() {
    let mut group = Group::new(3);
    group.write(1..=5);
    let previous = EntryId { sequence: 4, epoch: group.map.epoch };
    let append = Append {
        sent_ns: group.now_ns,
        session: 0,
        previous,
        entries: Vec::new(),
        commit_point: 4,
        log_end: Some(4),
    };
    group.stop(1);
    group.cut(2, 4);
    group.start(2);
    let config = group.map.clone();
    let late = ReplicaMessage { from: ReplicaId(1), config, body: MessageBody::Append(append) };
    group.handle(ReplicaId(2), ReplicaEvent::Message(late));
    assert!(!group.node(2).replica.as_ref().unwrap().is_compared());
    group.handle(ReplicaId(3), ReplicaEvent::Timer);
    group.run_for(2000 * MS);
    group.start(1);
    group.run_for(2000 * MS);
    group.assert_all_have(&[1, 2, 3, 4, 5]);
}

#[test]
fn a_follower_that_restarted_was_compared_once_its_primary_has_answered() {
    let mut group = Group::new(3);
    group.write(1..=5);
    group.stop(3);
    group.start(3);
    group.run_for(300 * MS);
    assert!(group.node(3).replica.as_ref().unwrap().is_compared());
    assert_eq!(group.map.primary, ReplicaId(1));
}

#[test]
fn a_restarted_primary_appends_nothing_before_it_has_compared() {
    let mut group = Group::new(3);
    group.write(1..=5);
    (1..=3).for_each(|id| group.stop(id));
    group.start(1);
    let object = ObjectId { group: 0, volume: 1, index: 0, suffix: 0 };
    let header = EntryHeader::new(Operation::WriteZeroes, object, 0, 4096);
    let header = EntryHeader { client: 5, client_number: 6, ..header };
    let request = ClientRequest::Write { header, data: Arc::default() };
    group.handle(ReplicaId(1), ReplicaEvent::Request(request));
    group.run_for(200 * MS);
    assert_eq!(group.status(1).blocked, Some(GroupBlocked::Comparing));
    assert_eq!(group.log_of(1), [1, 2, 3, 4, 5]);
    // The request was not lost.
    (2..=3).for_each(|id| group.start(id));
    group.run_for(2000 * MS);
    assert_eq!(group.log_of(1), [1, 2, 3, 4, 5, 6]);
    assert!(group.replies.contains(&(6, ClientReply::Written)));
}

#[test]
fn replicas_of_an_earlier_release_are_asked_and_need_not_say_where_their_logs_end() {
    let mut group = Group::new(3);
    group.write(1..=5);
    group.earlier = vec![ReplicaId(2), ReplicaId(3)];
    group.stop(1);
    group.start(1);
    group.run_for(1000 * MS);
    assert_eq!(group.map.primary, ReplicaId(1));
    group.write(6..=6);
    group.assert_all_have(&[1, 2, 3, 4, 5, 6]);
}

#[test]
fn a_restarted_primary_ends_no_session_before_it_has_compared() {
    let settings =
        ReplicaSettings { in_sync_min: 1, session_timeout_ns: 100 * MS, ..ReplicaSettings::default() };
    let opened = |client, sequence| {
        let header = SessionChange::Open { volume: 1, attach_epoch: 1 }.header(0);
        EntryHeader { client, client_number: 1, sequence, epoch: 1, ..header }
    };
    // A session that is open, and one of the log.
    let mut applied = AppliedRequests::default();
    applied.apply(&opened(7, 1));
    let base = EntryId { sequence: 1, epoch: 1 };
    let entry = ReplicatedEntry { header: opened(8, 2), data: Arc::default() };
    let recovered = RecoveredReplica {
        checkpoint: ReplicaCheckpoint { through: base, applied, complete: true },
        base,
        entries: vec![Arc::new(entry)],
        ..RecoveredReplica::default()
    };
    let mut replica = Replica::new(ReplicaId(1), 1, settings, recovered, 0);
    let in_sync = vec![ReplicaId(1), ReplicaId(2)];
    let (mut actions, mut now_ns) = (Vec::new(), 0);
    for epoch in 1..=2 {
        let map = GroupConfig { epoch, primary: ReplicaId(1), in_sync: in_sync.clone() };
        replica.handle(ReplicaEvent::Map(map.into()), now_ns, &mut actions);
    }
    let mut timers = 0;
    while let Some(at_ns) = replica.deadline().filter(|at_ns| *at_ns <= 350 * MS) {
        (now_ns, timers) = (at_ns, timers + 1);
        replica.handle(ReplicaEvent::Timer, now_ns, &mut actions);
    }
    assert_eq!(replica.status().blocked, Some(GroupBlocked::Comparing));
    assert!(!actions.iter().any(|action| matches!(action, ReplicaAction::Append { .. })), "{actions:?}");
    assert!((5..100).contains(&timers), "{timers}");
    // The other member has an entry more, and takes over.
    let last = EntryId { sequence: 3, epoch: 1 };
    let body = MessageBody::LogEnd { sent_ns: now_ns, last, committed: 3 };
    let config = Arc::new(replica.config().clone());
    let message = ReplicaMessage { from: ReplicaId(2), config, body };
    actions.clear();
    replica.handle(ReplicaEvent::Message(message), now_ns, &mut actions);
    let proposed = actions.iter().find_map(|action| match action {
        ReplicaAction::Propose(config) => Some(config.primary),
        _ => None,
    });
    assert_eq!(proposed, Some(ReplicaId(2)));
}
