//! Learners whose storage has no room for what the primary has, and replicas that have left the group.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use replica::*;
use wire_store::ObjectId;

const MS: u64 = 1_000_000;
const LEARNER: ReplicaId = ReplicaId(2);

/// The only replica in sync, which is the primary.
struct Group {
    primary: Replica,
    config: Arc<GroupConfig>,
    now_ns: u64,
    /// What was proposed to the map.
    proposed: Vec<Arc<GroupConfig>>,
    /// Objects that are to be read for a copy.
    reads: Vec<u64>,
}

impl Group {
    fn new() -> Group {
        let settings = ReplicaSettings { in_sync_min: 1, ..ReplicaSettings::default() };
        let primary = Replica::new(ReplicaId(1), 1, settings, RecoveredReplica::default(), 0);
        let config =
            |epoch| Arc::new(GroupConfig { epoch, primary: ReplicaId(1), in_sync: vec![ReplicaId(1)] });
        let mut group =
            Group { primary, config: config(2), now_ns: 0, proposed: Vec::new(), reads: Vec::new() };
        group.handle(ReplicaEvent::Map(config(1)));
        group.handle(ReplicaEvent::Map(config(2)));
        group.sent_within(1000 * MS);
        assert_eq!(group.primary.status().blocked, None);
        group
    }

    /// What the learner is sent.
    fn handle(&mut self, event: ReplicaEvent) -> Vec<MessageBody> {
        let mut actions = Vec::new();
        self.primary.handle(event, self.now_ns, &mut actions);
        let mut sent = Vec::new();
        for action in actions {
            match action {
                ReplicaAction::Send { to: LEARNER, message } => sent.push(message.body),
                ReplicaAction::Propose(config) => self.proposed.push(config),
                ReplicaAction::ReadObject { read, .. } => self.reads.push(read),
                _ => {}
            }
        }
        sent
    }

    fn join(&mut self, session: u64) -> Vec<MessageBody> {
        self.receive(MessageBody::Join { session, commit_point: 0, complete: false })
    }

    fn receive(&mut self, body: MessageBody) -> Vec<MessageBody> {
        let message = ReplicaMessage { from: LEARNER, config: self.config.clone(), body };
        self.handle(ReplicaEvent::Message(message))
    }

    /// What the learner is sent in this time, while nothing else happens.
    fn sent_within(&mut self, time_ns: u64) -> Vec<MessageBody> {
        let end_ns = self.now_ns + time_ns;
        let mut sent = Vec::new();
        while let Some(at_ns) = self.primary.deadline().filter(|at_ns| *at_ns <= end_ns) {
            self.now_ns = at_ns;
            sent.extend(self.handle(ReplicaEvent::Timer));
        }
        self.now_ns = end_ns;
        sent
    }
}

fn is_copy(sent: &[MessageBody]) -> bool {
    matches!(sent, [MessageBody::CopyBegin { .. }, ..])
}

#[test]
fn a_learner_without_room_gets_nothing_until_it_has_room() {
    let mut group = Group::new();
    group.handle(ReplicaEvent::Learners(vec![ReplicaId(1), ReplicaId(3)]));
    assert_eq!(group.join(1), []);
    assert_eq!(group.sent_within(5000 * MS), []);
    // Another replica has none: this one has.
    group.handle(ReplicaEvent::Learners(vec![ReplicaId(1), LEARNER]));
    assert!(is_copy(&group.join(2)));
    assert!(is_copy(&group.sent_within(100 * MS)), "what has no answer is sent again");
}

#[test]
fn a_copy_ends_when_the_learner_has_no_room() {
    let mut group = Group::new();
    assert!(is_copy(&group.join(1)));
    assert_eq!(group.handle(ReplicaEvent::Learners(vec![ReplicaId(1), ReplicaId(3)])), []);
    assert_eq!(group.sent_within(5000 * MS), []);
    // Its answers from before mean nothing.
    assert_eq!(group.receive(MessageBody::CopyBegun { session: 1 }), []);
    assert_eq!(group.sent_within(1000 * MS), []);
    assert_eq!(group.primary.status().blocked, None);
    group.handle(ReplicaEvent::Learners(vec![ReplicaId(1), LEARNER]));
    assert!(is_copy(&group.join(2)));
}

#[test]
fn a_member_in_sync_keeps_its_stream_whatever_its_room() {
    let mut group = Group::new();
    let in_sync = vec![ReplicaId(1), LEARNER];
    let config = Arc::new(GroupConfig { epoch: 3, primary: ReplicaId(1), in_sync });
    assert!(!group.handle(ReplicaEvent::Map(config)).is_empty());
    group.handle(ReplicaEvent::Learners(vec![ReplicaId(1), ReplicaId(3)]));
    assert!(!group.sent_within(100 * MS).is_empty());
}

/// Its node removes it later: until then it asks to learn, has all entries, and would be proposed in each epoch.
#[test]
fn one_that_has_left_the_group_is_proposed_no_more() {
    let mut group = Group::new();
    group.proposed.clear();
    let has_all = |group: &mut Group, session| {
        group.receive(MessageBody::Join { session, commit_point: 0, complete: true });
        let (sent_ns, outcome) = (group.now_ns, AppendOutcome::Durable(0));
        group.receive(MessageBody::Appended { sent_ns, session, outcome });
        group.sent_within(MS)
    };
    has_all(&mut group, 1);
    let in_sync: Vec<_> = group.proposed.iter().map(|config| config.in_sync.clone()).collect();
    assert_eq!(in_sync, [vec![ReplicaId(1), LEARNER]]);
    // The map's record has other members by now, and the answer is without the learner.
    group.handle(ReplicaEvent::Learners(vec![ReplicaId(1), ReplicaId(3)]));
    group.config = Arc::new(GroupConfig { epoch: 3, ..(*group.config).clone() });
    group.handle(ReplicaEvent::Map(group.config.clone()));
    assert_eq!(group.sent_within(1000 * MS), []);
    assert_eq!(has_all(&mut group, 2), []);
    assert_eq!(group.sent_within(5000 * MS), []);
    assert_eq!(group.proposed.len(), 1);
}

/// One that has no room for an object answers everything else, and would keep the entries that it lacks in the primary's log.
#[test]
fn a_copy_that_stands_still_ends_when_the_log_is_low() {
    let part = ObjectPart { object: ObjectId { group: 0, volume: 1, index: 0, suffix: 0 }, number: 0 };
    let copying = || {
        let mut group = Group::new();
        group.join(1);
        group.receive(MessageBody::CopyBegun { session: 1 });
        let read = group.reads.pop().expect("the first object is read");
        let copied = CopiedPart { part, is_last: true, content: vec![0; 8].into() };
        let sent = group.handle(ReplicaEvent::ObjectRead { read, part: Some(copied) });
        assert!(matches!(sent[..], [MessageBody::CopyObject { .. }]));
        group
    };
    let answer_for = |group: &mut Group, is_low: bool, time_ns: u64| {
        for _ in 0..time_ns / (50 * MS) {
            group.sent_within(50 * MS);
            let (sent_ns, outcome) = (group.now_ns, AppendOutcome::Durable(0));
            group.receive(MessageBody::Appended { sent_ns, session: 1, outcome });
            if is_low {
                group.handle(ReplicaEvent::LogLow);
            }
        }
    };
    // With room in the log it may take as long as it likes.
    let mut group = copying();
    answer_for(&mut group, false, 5000 * MS);
    assert_eq!(group.primary.learners().len(), 1);
    let timeout_ns = ReplicaSettings::default().learner_timeout_ns;
    let mut group = copying();
    answer_for(&mut group, true, timeout_ns / 2);
    assert_eq!(group.primary.learners().len(), 1);
    answer_for(&mut group, true, timeout_ns);
    assert_eq!(group.primary.learners(), []);
    assert!(is_copy(&group.join(2)), "it may begin again");
}
