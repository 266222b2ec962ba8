//! Copies of all objects to a learner: part by part, each in its turn.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use replica::*;
use wire_store::{EntryHeader, ObjectId, Operation};

const MS: u64 = 1_000_000;
const LEARNER: ReplicaId = ReplicaId(2);
const SESSION: u64 = 1;
const ENTRIES_MAX: usize = 32;

/// The only replica in sync, which is the primary and copies to a learner.
struct Copying {
    primary: Replica,
    pacer: Arc<CopyPacer>,
    config: Arc<GroupConfig>,
    now_ns: u64,
    /// Writes so far.
    writes: u64,
}

/// What the primary wants.
#[derive(Debug, Default, PartialEq)]
struct Wanted {
    /// The part to read, as the one before it.
    read: Option<(u64, Option<ObjectPart>)>,
    /// The part that the learner is sent.
    part: Option<ObjectPart>,
    /// The entries that it is sent: the index of the object, and whether they have their data.
    entries: Vec<(u32, bool)>,
}

fn object(index: u32) -> ObjectId {
    ObjectId { group: 0, volume: 1, index, suffix: 0 }
}

fn part(index: u32, number: u32) -> ObjectPart {
    ObjectPart { object: object(index), number }
}

impl Copying {
    /// The copy has begun; the first part is to be read.
    fn new() -> (Copying, Wanted) {
        let settings = ReplicaSettings {
            in_sync_min: 1,
            entries_max: ENTRIES_MAX,
            // The heartbeats of these tests would hide what they look for.
            heartbeat_ns: 10_000 * MS,
            resend_ns: 5000 * MS,
            learner_timeout_ns: 60_000 * MS,
            checkpoint_entries: 1000,
            ..ReplicaSettings::default()
        };
        let mut primary = Replica::new(ReplicaId(1), 1, settings, RecoveredReplica::default(), 0);
        let pacer = Arc::new(CopyPacer::default());
        primary.set_copy_pacer(pacer.clone());
        let config =
            |epoch| Arc::new(GroupConfig { epoch, primary: ReplicaId(1), in_sync: vec![ReplicaId(1)] });
        let mut copying = Copying { primary, pacer, config: config(2), now_ns: 0, writes: 0 };
        copying.handle(ReplicaEvent::Map(config(1)));
        copying.handle(ReplicaEvent::Map(config(2)));
        copying.now_ns = 1000 * MS;
        copying.handle(ReplicaEvent::Timer);
        copying.receive(MessageBody::Join { session: SESSION, commit_point: 0, complete: false });
        let wanted = copying.receive(MessageBody::CopyBegun { session: SESSION });
        (copying, wanted)
    }

    fn handle(&mut self, event: ReplicaEvent) -> Wanted {
        let (mut wanted, mut events) = (Wanted::default(), vec![event]);
        while let Some(event) = events.pop() {
            let mut actions = Vec::new();
            self.primary.handle(event, self.now_ns, &mut actions);
            for action in actions {
                match action {
                    ReplicaAction::Append { append, .. } => events.push(ReplicaEvent::Appended { append }),
                    ReplicaAction::ReadObject { read, after } => wanted.read = Some((read, after)),
                    ReplicaAction::Send { to: LEARNER, message } => match message.body {
                        MessageBody::CopyObject { part, .. } => wanted.part = Some(part),
                        MessageBody::Append(append) => wanted.entries.extend(
                            append.entries.iter().map(|it| (it.header.object.index, !it.header.withheld)),
                        ),
                        _ => {}
                    },
                    _ => {}
                }
            }
        }
        wanted
    }

    fn receive(&mut self, body: MessageBody) -> Wanted {
        let message = ReplicaMessage { from: LEARNER, config: self.config.clone(), body };
        self.handle(ReplicaEvent::Message(message))
    }

    /// A client writes to an object.
    fn write(&mut self, index: u32) -> Wanted {
        self.writes += 1;
        let header = EntryHeader::new(Operation::Write, object(index), 0, 4);
        let header = EntryHeader { client: 5, client_number: self.writes, ..header };
        self.handle(ReplicaEvent::Request(ClientRequest::Write { header, data: (*b"data").into() }))
    }

    /// The storage has read a part: the learner is sent it.
    fn read(&mut self, wanted: &Wanted, part: ObjectPart, is_last: bool) {
        let copied = CopiedPart { part, is_last, content: [0; 8].into() };
        let (read, _) = wanted.read.expect("a part is wanted");
        let sent = self.handle(ReplicaEvent::ObjectRead { read, part: Some(copied) });
        assert_eq!(sent.part, Some(part));
    }

    /// The learner has written a part.
    fn written(&mut self, part: ObjectPart) -> Wanted {
        self.receive(MessageBody::CopyWritten { session: SESSION, part })
    }

    /// The learner has the entries up to a sequence.
    fn acknowledge(&mut self, through: u64) -> Wanted {
        let outcome = AppendOutcome::Durable(through);
        self.receive(MessageBody::Appended { sent_ns: self.now_ns, session: SESSION, outcome })
    }

    /// What happens until a part is wanted, and how long that takes.
    fn wait(&mut self) -> (Wanted, u64) {
        let begun_ns = self.now_ns;
        loop {
            self.now_ns = self.primary.deadline().expect("it waits for its turn");
            let wanted = self.handle(ReplicaEvent::Timer);
            if wanted.read.is_some() {
                return (wanted, self.now_ns - begun_ns);
            }
        }
    }

    /// Other copies have taken the next turns.
    fn take_turns(&mut self) {
        self.pacer.observe_write(MS, self.now_ns);
        for _ in 0..20 {
            self.pacer.turn_ns(self.now_ns, false);
        }
    }
}

#[test]
fn the_stream_stands_still_until_all_parts_of_an_object_are_copied() {
    let (mut copying, first) = Copying::new();
    assert_eq!(first.read.unwrap().1, None);
    copying.read(&first, part(1, 0), false);
    // Object 1 is being copied, object 2 is not yet.
    assert_eq!(copying.write(1).entries, []);
    assert_eq!(copying.write(2).entries, []);
    let mut wanted = copying.written(part(1, 0));
    if wanted.read.is_none() {
        wanted = copying.wait().0;
    }
    assert_eq!(wanted.read.unwrap().1, Some(part(1, 0)));
    assert_eq!(wanted.entries, []);
    copying.read(&wanted, part(1, 5), true);
    assert_eq!(copying.primary.learners()[0].copy.unwrap().objects, 0);
    let sent = copying.written(part(1, 5)).entries;
    assert_eq!(sent, [(1, true), (2, false)]);
    assert_eq!(copying.primary.learners()[0].copy.unwrap().objects, 1);
    let mut wanted = copying.acknowledge(2);
    if wanted.read.is_none() {
        wanted = copying.wait().0;
    }
    assert_eq!(wanted.read.unwrap().1, Some(part(1, 5)));
}

#[test]
fn each_part_has_its_turn_unless_entries_wait_for_it() {
    let (mut copying, first) = Copying::new();
    copying.read(&first, part(1, 0), false);
    copying.take_turns();
    assert_eq!(copying.written(part(1, 0)).read, None);
    let (wanted, waited_ns) = copying.wait();
    assert!(waited_ns > 5 * MS, "{waited_ns}");
    copying.read(&wanted, part(1, 1), false);
    (0..=ENTRIES_MAX / 4).for_each(|_| drop(copying.write(1)));
    copying.take_turns();
    let wanted = copying.written(part(1, 1));
    assert!(wanted.read.is_some(), "the log fills up meanwhile");
}

#[test]
fn the_stream_goes_on_while_the_next_object_waits_for_its_turn() {
    let (mut copying, first) = Copying::new();
    copying.read(&first, part(1, 0), true);
    copying.take_turns();
    assert_eq!(copying.written(part(1, 0)), Wanted::default());
    copying.now_ns += MS;
    copying.write(1);
    assert_eq!(copying.handle(ReplicaEvent::Timer).entries, [(1, true)]);
    copying.write(3);
    assert_eq!(copying.acknowledge(1).entries, [(3, false)]);
    assert_eq!(copying.acknowledge(2).read, None);
    assert_eq!(copying.wait().0.read.unwrap().1, Some(part(1, 0)));
}

#[test]
fn a_copy_without_writes_of_clients_does_not_pause() {
    let (mut copying, mut wanted) = Copying::new();
    for number in 0..100 {
        copying.read(&wanted, part(1, number), false);
        wanted = copying.written(part(1, number));
        assert!(wanted.read.is_some());
    }
}
