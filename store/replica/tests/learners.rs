//! Replicas that catch up: what a primary reports of them, and what it takes from them.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use replica::*;
use wire_store::{EntryHeader, ObjectId, Operation};

const MS: u64 = 1_000_000;
const LEARNER: ReplicaId = ReplicaId(2);
const SESSION: u64 = 7;
const BEGUN_NS: u64 = 2010 * MS;

/// A primary of its own group, with a learner that it copies to.
struct Copying(Replica);

impl Copying {
    /// The learner has joined at 2 s, and was reset 10 ms later. Returns also what the primary did then.
    fn begin() -> (Copying, Vec<ReplicaAction>) {
        let settings = ReplicaSettings { in_sync_min: 1, ..ReplicaSettings::default() };
        let recovered = RecoveredReplica::default();
        let mut copying = Copying(Replica::new(ReplicaId(1), 1, settings, recovered, 0));
        copying.handle(ReplicaEvent::Map(config(1)), 0);
        copying.handle(ReplicaEvent::Map(config(2)), 0);
        copying.handle(ReplicaEvent::Timer, 2000 * MS);
        assert_eq!(copying.0.learners(), []);
        copying.hear(MessageBody::Join { session: SESSION, commit_point: 0, complete: false }, 2000 * MS);
        let none = CopyProgress::default();
        let joined = LearnerStatus { id: LEARNER, entries_behind: 0, copy: Some(none) };
        assert_eq!(copying.0.learners(), [joined]);
        let actions = copying.hear(MessageBody::CopyBegun { session: SESSION }, BEGUN_NS);
        (copying, actions)
    }

    fn handle(&mut self, event: ReplicaEvent, now_ns: u64) -> Vec<ReplicaAction> {
        let mut actions = Vec::new();
        self.0.handle(event, now_ns, &mut actions);
        // Timers that are due, for example the next object of a copy.
        while self.0.deadline().is_some_and(|deadline_ns| deadline_ns <= now_ns) {
            self.0.handle(ReplicaEvent::Timer, now_ns, &mut actions);
        }
        actions
    }

    /// A message of the learner.
    fn hear(&mut self, body: MessageBody, now_ns: u64) -> Vec<ReplicaAction> {
        let message = ReplicaMessage { from: LEARNER, config: config(2), body };
        self.handle(ReplicaEvent::Message(message), now_ns)
    }

    fn progress(&self) -> CopyProgress {
        self.0.learners()[0].copy.unwrap()
    }
}

fn config(epoch: u32) -> Arc<GroupConfig> {
    Arc::new(GroupConfig { epoch, primary: ReplicaId(1), in_sync: vec![ReplicaId(1)] })
}

#[test]
fn a_copy_is_reported_with_its_objects_bytes_and_time() {
    let (mut copying, mut actions) = Copying::begin();
    for (copied, bytes) in [(1, 1000), (2, 500)] {
        let at_ns = BEGUN_NS + copied * 100 * MS;
        let mut reads = actions.iter().filter_map(|action| match action {
            ReplicaAction::ReadObject { read, .. } => Some(*read),
            _ => None,
        });
        let read = reads.next_back().expect("the next object is read");
        let object = ObjectId { group: 0, volume: 1, index: copied as u32, suffix: 0 };
        let content: Arc<[u8]> = vec![0; bytes].into();
        let part = ObjectPart { object, number: 3 };
        let read_part = CopiedPart { part, is_last: true, content };
        copying.handle(ReplicaEvent::ObjectRead { read, part: Some(read_part) }, at_ns);
        let written = |object| {
            let part = ObjectPart { object, number: 3 };
            MessageBody::CopyWritten { session: SESSION, part }
        };
        // What was not copied does not count.
        copying.hear(written(ObjectId { volume: 9, ..object }), at_ns);
        let before = copying.progress();
        actions = copying.hear(written(object), at_ns);
        let after = copying.progress();
        assert_eq!((before.objects, after.objects), (copied - 1, copied));
        let (bytes, elapsed_ns) = (if copied == 1 { 1000 } else { 1500 }, at_ns - BEGUN_NS);
        assert_eq!(after, CopyProgress { objects: copied, bytes, elapsed_ns });
    }
}

/// The learner has more than the primary when it is reset, and its second answer arrives late.
#[test]
fn what_a_learner_had_before_a_copy_does_not_count_after_it() {
    let (mut copying, _) = Copying::begin();
    // An entry is appended, and the copy goes on with it after the next object.
    let object = ObjectId { group: 0, volume: 1, index: 0, suffix: 0 };
    let header = EntryHeader::new(Operation::WriteZeroes, object, 0, 4096);
    let header = EntryHeader { client: 5, client_number: 1, ..header };
    let request = ClientRequest::Write { header, data: Arc::default() };
    let actions = copying.handle(ReplicaEvent::Request(request), 2020 * MS);
    let append = actions.iter().find_map(|action| match action {
        ReplicaAction::Append { append, .. } => Some(*append),
        _ => None,
    });
    copying.handle(ReplicaEvent::Appended { append: append.unwrap() }, 2020 * MS);
    let outcome = AppendOutcome::Mismatch { commit_point: 1 };
    let late = MessageBody::Appended { sent_ns: 2001 * MS, session: SESSION, outcome };
    copying.hear(late, 2021 * MS);
    let commit_point = copying.0.status().commit_point;
    assert_eq!((commit_point, copying.0.learners()[0].entries_behind), (1, 1));
}
