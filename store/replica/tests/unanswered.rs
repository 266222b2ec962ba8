//! Members that are slow to make entries durable, or lost some.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use replica::*;
use wire_store::{EntryHeader, ObjectId, Operation};

const MS: u64 = 1_000_000;
const PRIMARY: ReplicaId = ReplicaId(1);
const MEMBER: ReplicaId = ReplicaId(2);

/// A primary with another member, which answers what a test says.
struct Pair {
    primary: Replica,
    config: Arc<GroupConfig>,
    now_ns: u64,
    writes: u64,
    /// Of the member's stream; 0 while it is in sync.
    session: u64,
    proposed: Vec<Arc<GroupConfig>>,
}

impl Pair {
    /// It serves.
    fn new() -> Pair {
        let settings = ReplicaSettings { in_sync_min: 1, ..ReplicaSettings::default() };
        let primary = Replica::new(PRIMARY, 1, settings, RecoveredReplica::default(), 0);
        let config =
            |epoch| Arc::new(GroupConfig { epoch, primary: PRIMARY, in_sync: vec![PRIMARY, MEMBER] });
        let mut pair =
            Pair { primary, config: config(2), now_ns: 0, writes: 0, session: 0, proposed: Vec::new() };
        pair.handle(ReplicaEvent::Map(config(1)));
        pair.handle(ReplicaEvent::Map(config(2)));
        pair.answer(AppendOutcome::Durable(0));
        pair.wait(460 * MS, AppendOutcome::Durable(0));
        assert_eq!(pair.primary.status().blocked, None);
        pair.proposed.clear();
        pair
    }

    /// What the member is sent.
    fn handle(&mut self, event: ReplicaEvent) -> Vec<Append> {
        let mut actions = Vec::new();
        self.primary.handle(event, self.now_ns, &mut actions);
        let mut sent = Vec::new();
        for action in actions {
            match action {
                ReplicaAction::Send {
                    message: ReplicaMessage { body: MessageBody::Append(append), .. },
                    ..
                } => {
                    sent.push(append);
                }
                ReplicaAction::Append { append, .. } => {
                    sent.extend(self.handle(ReplicaEvent::Appended { append }));
                }
                ReplicaAction::Propose(config) => self.proposed.push(config),
                _ => {}
            }
        }
        sent
    }

    /// The member answers the last message.
    fn answer(&mut self, outcome: AppendOutcome) -> Vec<Append> {
        let body = MessageBody::Appended { sent_ns: self.now_ns, session: self.session, outcome };
        let message = ReplicaMessage { from: MEMBER, config: self.config.clone(), body };
        self.handle(ReplicaEvent::Message(message))
    }

    fn write(&mut self) -> Vec<Append> {
        self.writes += 1;
        let object = ObjectId { group: 0, volume: 1, index: 0, suffix: 0 };
        let header = EntryHeader::new(Operation::WriteZeroes, object, 0, 4096);
        let header = EntryHeader { client: 5, client_number: self.writes, ..header };
        self.handle(ReplicaEvent::Request(ClientRequest::Write { header, data: Arc::default() }))
    }

    /// Time passes; the member answers each message at once. Returns how many entries it was sent, and how many messages.
    fn wait(&mut self, time_ns: u64, outcome: AppendOutcome) -> (usize, usize) {
        let end_ns = self.now_ns + time_ns;
        let (mut entries, mut messages) = (0, 0);
        while let Some(at_ns) = self.primary.deadline().filter(|at_ns| *at_ns <= end_ns) {
            self.now_ns = at_ns;
            for append in self.handle(ReplicaEvent::Timer) {
                (entries, messages) = (entries + append.entries.len(), messages + 1);
                entries += self.answer(outcome).iter().map(|append| append.entries.len()).sum::<usize>();
            }
        }
        self.now_ns = end_ns;
        (entries, messages)
    }
}

#[test]
fn a_slow_member_is_asked_and_gets_nothing_twice() {
    let mut pair = Pair::new();
    let sent: usize =
        (0..20).map(|_| pair.write().iter().map(|append| append.entries.len()).sum::<usize>()).sum();
    assert_eq!(sent, 20);
    // It has all of them, and its device is slow. It is asked every 60 ms, and its answers are a lease.
    for _ in 0..5 {
        assert_eq!(pair.wait(300 * MS, AppendOutcome::Durable(pair.primary.status().commit_point)), (0, 5));
        let durable = pair.primary.status().commit_point + 2;
        assert_eq!(pair.answer(AppendOutcome::Durable(durable)), []);
        let ReplicaStatus { commit_point, blocked, .. } = pair.primary.status();
        assert_eq!((commit_point, blocked), (durable, None));
    }
    assert_eq!(pair.proposed, []);
}

#[test]
fn a_member_that_lacks_entries_gets_them_again() {
    let mut pair = Pair::new();
    for _ in 0..3 {
        assert_eq!(pair.write().len(), 1);
    }
    // All three are lost: the member is asked, has not the last one, and is asked for what it has.
    pair.now_ns += 60 * MS;
    let asked = pair.handle(ReplicaEvent::Timer);
    assert_eq!((asked.len(), asked[0].previous.sequence, asked[0].entries.len()), (1, 3, 0));
    let asked = pair.answer(AppendOutcome::Mismatch { commit_point: 0 });
    assert_eq!((asked.len(), asked[0].previous.sequence, asked[0].entries.len()), (1, 0, 0));
    let sent = pair.answer(AppendOutcome::Durable(0));
    assert_eq!((sent.len(), sent[0].entries.len()), (1, 3));
    assert_eq!(pair.answer(AppendOutcome::Durable(3)), []);
    assert_eq!(pair.primary.status().commit_point, 3);
}

/// Its device does not answer, for example.
#[test]
fn a_member_that_makes_nothing_durable_leaves_the_in_sync_set_although_it_answers() {
    let mut pair = Pair::new();
    pair.write();
    assert_eq!(pair.wait(399 * MS, AppendOutcome::Durable(0)).0, 0);
    assert_eq!(pair.proposed, []);
    // It is asked every 60 ms.
    pair.wait(61 * MS, AppendOutcome::Durable(0));
    let alone = GroupConfig { epoch: 3, primary: PRIMARY, in_sync: vec![PRIMARY] };
    assert_eq!(pair.proposed, [Arc::new(alone)]);
}

#[test]
fn writes_do_not_wait_for_a_learner_that_makes_nothing_durable() {
    let mut pair = Pair::new();
    pair.write();
    pair.wait(470 * MS, AppendOutcome::Durable(0));
    let alone = Arc::new(GroupConfig { epoch: 3, primary: PRIMARY, in_sync: vec![PRIMARY] });
    pair.config = alone.clone();
    pair.handle(ReplicaEvent::Map(alone));
    assert_eq!(pair.primary.status().commit_point, 1);
    let join = MessageBody::Join { session: 9, commit_point: 0, complete: true };
    let message = ReplicaMessage { from: MEMBER, config: pair.config.clone(), body: join };
    pair.session = 9;
    pair.handle(ReplicaEvent::Message(message));
    pair.answer(AppendOutcome::Durable(0));
    pair.write();
    assert_eq!(pair.primary.status().commit_point, 2);
    // Its device works again: from now on they do, until it is in sync.
    pair.answer(AppendOutcome::Durable(1));
    pair.write();
    assert_eq!(pair.primary.status().commit_point, 2);
    pair.answer(AppendOutcome::Durable(3));
    assert_eq!(pair.primary.status().commit_point, 3);
    assert_eq!(pair.proposed.last().unwrap().in_sync, [PRIMARY, MEMBER]);
}
