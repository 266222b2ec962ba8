//! Replicas that catch up: what a primary reports of them, and what it takes from them.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use replica::*;
use wire_store::{EntryHeader, ObjectId, Operation};

const MS: u64 = 1_000_000;
const LEARNER: ReplicaId = ReplicaId(2);
const SESSION: u64 = 7;

#[test]
fn a_copy_is_reported_with_its_objects_bytes_and_time() {
    let settings = ReplicaSettings { in_sync_min: 1, ..ReplicaSettings::default() };
    let mut primary = Replica::new(ReplicaId(1), 1, settings, RecoveredReplica::default(), 0);
    let config = |epoch| Arc::new(GroupConfig { epoch, primary: ReplicaId(1), in_sync: vec![ReplicaId(1)] });
    let mut handle = |event, now_ns: u64| {
        let mut actions = Vec::new();
        primary.handle(event, now_ns, &mut actions);
        // Timers that are due, for example the next object of a copy.
        while primary.deadline().is_some_and(|deadline_ns| deadline_ns <= now_ns) {
            primary.handle(ReplicaEvent::Timer, now_ns, &mut actions);
        }
        (actions, primary.learners())
    };
    let from_learner =
        |body| ReplicaEvent::Message(ReplicaMessage { from: LEARNER, config: config(2), body });
    handle(ReplicaEvent::Map(config(1)), 0);
    handle(ReplicaEvent::Map(config(2)), 0);
    assert_eq!(handle(ReplicaEvent::Timer, 2000 * MS).1, []);

    let join = MessageBody::Join { session: SESSION, commit_point: 0, complete: false };
    let (_, joined) = handle(from_learner(join), 2000 * MS);
    let none = CopyProgress::default();
    assert_eq!(joined, [LearnerStatus { id: LEARNER, entries_behind: 0, copy: Some(none) }]);

    let begun_ns = 2010 * MS;
    let (mut actions, _) = handle(from_learner(MessageBody::CopyBegun { session: SESSION }), begun_ns);
    for (copied, bytes) in [(1, 1000), (2, 500)] {
        let at_ns = begun_ns + copied * 100 * MS;
        let mut reads = actions.iter().filter_map(|action| match action {
            ReplicaAction::ReadObject { read, .. } => Some(*read),
            _ => None,
        });
        let read = reads.next_back().expect("the next object is read");
        let object = ObjectId { group: 0, volume: 1, index: copied as u32, suffix: 0 };
        let content: Arc<[u8]> = vec![0; bytes].into();
        let part = ObjectPart { object, number: 3 };
        let read_part = CopiedPart { part, is_last: true, content };
        handle(ReplicaEvent::ObjectRead { read, part: Some(read_part) }, at_ns);
        let written = |object| {
            let part = ObjectPart { object, number: 3 };
            from_learner(MessageBody::CopyWritten { session: SESSION, part })
        };
        let other = ObjectId { volume: 9, ..object };
        // What was not copied does not count.
        handle(written(other), at_ns);
        let before = handle(written(other), at_ns).1[0].copy.unwrap();
        let (next, learners) = handle(written(object), at_ns);
        let after = learners[0].copy.unwrap();
        let elapsed_ns = at_ns - begun_ns;
        assert_eq!((before.objects, after.objects), (copied - 1, copied));
        assert_eq!(
            after,
            CopyProgress { objects: copied, bytes: if copied == 1 { 1000 } else { 1500 }, elapsed_ns }
        );
        actions = next;
    }
}

/// The learner has more than the primary when it is reset, and its second answer arrives late.
#[test]
fn what_a_learner_had_before_a_copy_does_not_count_after_it() {
    let settings = ReplicaSettings { in_sync_min: 1, ..ReplicaSettings::default() };
    let mut primary = Replica::new(ReplicaId(1), 1, settings, RecoveredReplica::default(), 0);
    let config = |epoch| Arc::new(GroupConfig { epoch, primary: ReplicaId(1), in_sync: vec![ReplicaId(1)] });
    let mut handle = |event, now_ns: u64| {
        let mut actions = Vec::new();
        primary.handle(event, now_ns, &mut actions);
        while primary.deadline().is_some_and(|deadline_ns| deadline_ns <= now_ns) {
            primary.handle(ReplicaEvent::Timer, now_ns, &mut actions);
        }
        actions
    };
    let from_learner =
        |body| ReplicaEvent::Message(ReplicaMessage { from: LEARNER, config: config(2), body });
    handle(ReplicaEvent::Map(config(1)), 0);
    handle(ReplicaEvent::Map(config(2)), 0);
    handle(ReplicaEvent::Timer, 2000 * MS);
    handle(from_learner(MessageBody::Join { session: SESSION, commit_point: 0, complete: false }), 2000 * MS);
    handle(from_learner(MessageBody::CopyBegun { session: SESSION }), 2010 * MS);

    // An entry is appended, and the copy goes on with it after the next object.
    let object = ObjectId { group: 0, volume: 1, index: 0, suffix: 0 };
    let header = EntryHeader::new(Operation::WriteZeroes, object, 0, 4096);
    let header = EntryHeader { client: 5, client_number: 1, ..header };
    let request = ClientRequest::Write { header, data: Arc::default() };
    let actions = handle(ReplicaEvent::Request(request), 2020 * MS);
    let append = actions.iter().find_map(|action| match action {
        ReplicaAction::Append { append, .. } => Some(*append),
        _ => None,
    });
    handle(ReplicaEvent::Appended { append: append.unwrap() }, 2020 * MS);
    let outcome = AppendOutcome::Mismatch { commit_point: 1 };
    let late = MessageBody::Appended { sent_ns: 2001 * MS, session: SESSION, outcome };
    handle(from_learner(late), 2021 * MS);
    let ReplicaStatus { commit_point, .. } = primary.status();
    assert_eq!((commit_point, primary.learners()[0].entries_behind), (1, 1));
}
