//! Primaries that compare what the members have.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::sync::Arc;

use replica::*;
use wire_store::{BLOCK_BYTES, EntryHeader, ObjectId, Operation, crc32c};

const MS: u64 = 1_000_000;
const BLOCK: u32 = BLOCK_BYTES as u32;
const OBJECT: ObjectId = ObjectId { group: 1, volume: 1, index: 0, suffix: 0 };

/// A replica with a storage of two blocks.
struct Node {
    replica: Replica,
    /// `None` for one that is damaged.
    blocks: [Option<u8>; 2],
    appended: usize,
}

/// Three replicas that hear each other at once, the first of them the primary.
struct Group {
    nodes: Vec<Node>,
    map: Arc<GroupConfig>,
    now_ns: u64,
    /// What becomes of answers to the primary.
    answers: Answers,
    held: Vec<ReplicaMessage>,
    scrubbed: Vec<ScrubOutcome>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Answers {
    Arrive,
    AreLost,
    Wait,
    /// As of a release that reads an object which does not exist.
    AreZeroes,
}

impl Group {
    fn new() -> Group {
        let in_sync: Vec<ReplicaId> = (0..3).map(ReplicaId).collect();
        let settings = ReplicaSettings { in_sync_min: 1, ..ReplicaSettings::default() };
        let node = |id: &ReplicaId| Node {
            replica: Replica::new(*id, 1, settings.clone(), RecoveredReplica::default(), 0),
            blocks: [Some(0); 2],
            appended: 0,
        };
        let nodes = in_sync.iter().map(node).collect();
        let map = Arc::new(GroupConfig { epoch: 1, primary: ReplicaId(0), in_sync });
        let (answers, held, scrubbed) = (Answers::Arrive, Vec::new(), Vec::new());
        let mut group = Group { nodes, map: map.clone(), now_ns: 0, answers, held, scrubbed };
        (0..3).for_each(|to| group.handle(to, ReplicaEvent::Map(map.clone())));
        group.run(1000 * MS);
        group.write(0, 1);
        group.write(1, 2);
        group
    }

    fn handle(&mut self, to: usize, event: ReplicaEvent) {
        let mut events = VecDeque::from([(to, event)]);
        while let Some((to, event)) = events.pop_front() {
            let mut actions = Vec::new();
            self.nodes[to].replica.handle(event, self.now_ns, &mut actions);
            for action in actions {
                let node = &mut self.nodes[to];
                let next = match action {
                    ReplicaAction::Append { append, .. } => {
                        node.appended += 1;
                        ReplicaEvent::Appended { append }
                    }
                    ReplicaAction::Apply { entry } => {
                        if entry.data.len() == BLOCK_BYTES {
                            node.blocks[(entry.header.offset / BLOCK) as usize] = Some(entry.data[0]);
                        }
                        continue;
                    }
                    ReplicaAction::Read { read, object, offset, length, .. } => {
                        assert_eq!(object, OBJECT);
                        let first = (offset / BLOCK) as usize;
                        let blocks = &node.blocks[first..first + (length / BLOCK) as usize];
                        let bytes = blocks.iter().map(|block| block.map(|byte| [byte; BLOCK_BYTES]));
                        let data = bytes.collect::<Option<Vec<_>>>().map(|all| all.concat().into());
                        ReplicaEvent::ReadDone { read, data }
                    }
                    ReplicaAction::Checkpoint { checkpoint, .. } => ReplicaEvent::Checkpointed { checkpoint },
                    ReplicaAction::Send { to, message } => {
                        let message = self.delivered(message);
                        events.extend(message.map(|it| (to.0 as usize, ReplicaEvent::Message(it))));
                        continue;
                    }
                    ReplicaAction::Propose(config) => {
                        if config.epoch == self.map.epoch + 1 {
                            self.map = config;
                        }
                        ReplicaEvent::Map(self.map.clone())
                    }
                    ReplicaAction::Scrubbed { outcome, .. } => {
                        self.scrubbed.push(outcome);
                        continue;
                    }
                    _ => continue,
                };
                events.push_back((to, next));
            }
        }
    }

    fn delivered(&mut self, mut message: ReplicaMessage) -> Option<ReplicaMessage> {
        let MessageBody::Fetched { data, .. } = &mut message.body else { return Some(message) };
        match self.answers {
            Answers::Arrive => {}
            Answers::AreLost => return None,
            Answers::AreZeroes => *data = Some([0; 2 * BLOCK_BYTES].into()),
            Answers::Wait => {
                self.held.push(message);
                return None;
            }
        }
        Some(message)
    }

    fn run(&mut self, length_ns: u64) {
        let end_ns = self.now_ns + length_ns;
        while self.now_ns < end_ns {
            self.now_ns += 10 * MS;
            (0..3).for_each(|node| self.handle(node, ReplicaEvent::Timer));
        }
    }

    fn submit(&mut self, block: u32, byte: u8) {
        let header = EntryHeader::new(Operation::Write, OBJECT, block * BLOCK, BLOCK);
        let data = [byte; BLOCK_BYTES];
        let header =
            EntryHeader { client: 5, client_number: self.now_ns, data_crc32c: crc32c(&data), ..header };
        self.handle(0, ReplicaEvent::Request(ClientRequest::Write { header, data: data.into() }));
    }

    fn write(&mut self, block: u32, byte: u8) {
        self.submit(block, byte);
        // Followers learn that it is committed.
        self.run(200 * MS);
    }

    /// Begins to compare some of the blocks at a node.
    fn begin(&mut self, node: usize, first: u32, blocks: u32) {
        let (offset, length) = (first * BLOCK, blocks * BLOCK);
        self.handle(node, ReplicaEvent::Scrub { scrub: 1, object: OBJECT, offset, length });
    }

    fn scrub(&mut self, first: u32, blocks: u32) -> ScrubFindings {
        self.begin(0, first, blocks);
        match self.scrubbed.pop() {
            Some(ScrubOutcome::Compared(findings)) => findings,
            other => panic!("{other:?}"),
        }
    }

    fn blocks(&self) -> Vec<[Option<u8>; 2]> {
        self.nodes.iter().map(|node| node.blocks).collect()
    }
}

#[test]
fn what_differs_is_reported_and_no_copy_is_changed() {
    let mut group = Group::new();
    assert_eq!(group.scrub(0, 2), ScrubFindings::default());
    group.nodes[2].blocks[1] = Some(9);
    let before = (group.blocks(), group.nodes[0].appended);
    for (first, blocks) in [(0, 2), (1, 1)] {
        let findings = group.scrub(first, blocks);
        assert_eq!(findings, ScrubFindings { differing: vec![(BLOCK, ReplicaId(2))], ..Default::default() });
    }
    assert_eq!(group.scrub(0, 1), ScrubFindings::default());
    group.run(500 * MS);
    assert_eq!((group.blocks(), group.nodes[0].appended), before);
}

#[test]
fn a_block_that_a_member_cannot_read_is_written_again() {
    let mut group = Group::new();
    group.nodes[1].blocks[0] = None;
    // It is not known which block it is, and nothing is written.
    let findings = group.scrub(0, 2);
    assert_eq!(findings.unreadable, [ReplicaId(1)]);
    group.run(200 * MS);
    assert_eq!(group.nodes[1].blocks, [None, Some(2)]);
    assert_eq!(group.scrub(0, 1).unreadable, [ReplicaId(1)]);
    group.run(200 * MS);
    assert_eq!(group.blocks(), [[Some(1), Some(2)]; 3]);
    assert_eq!(group.nodes[0].replica.status().repaired, 1);
    assert_eq!(group.scrub(0, 2), ScrubFindings::default());
}

#[test]
fn what_the_primary_cannot_read_is_not_compared() {
    let mut group = Group::new();
    group.nodes[0].blocks[0] = None;
    group.begin(0, 0, 2);
    assert_eq!(group.scrubbed, [ScrubOutcome::Unreadable]);
}

#[test]
fn what_is_written_meanwhile_differs_in_nothing_and_is_not_written_again() {
    let mut group = Group::new();
    for is_damaged in [false, true] {
        group.answers = Answers::Wait;
        if is_damaged {
            group.nodes[1].blocks[0] = None;
        } else {
            group.nodes[1].blocks[0] = Some(7);
        }
        group.begin(0, 0, 1);
        group.answers = Answers::Arrive;
        group.submit(0, 3 + u8::from(is_damaged));
        assert_eq!(group.scrubbed, []);
        let held = std::mem::take(&mut group.held);
        held.into_iter().for_each(|message| group.handle(0, ReplicaEvent::Message(message)));
        let expected = ScrubFindings { overtaken: 1, ..ScrubFindings::default() };
        match group.scrubbed.pop() {
            Some(ScrubOutcome::Compared(findings)) if !is_damaged => assert_eq!(findings, expected),
            Some(ScrubOutcome::Interrupted) if is_damaged => {}
            other => panic!("{other:?}"),
        }
        group.run(200 * MS);
    }
    assert_eq!(group.blocks(), [[Some(4), Some(2)]; 3]);
    assert_eq!(group.nodes[0].replica.status().repaired, 0);
}

#[test]
fn members_without_an_answer_are_named() {
    let mut group = Group::new();
    let members = vec![ReplicaId(1), ReplicaId(2)];
    group.answers = Answers::AreZeroes;
    assert_eq!(group.scrub(0, 2), ScrubFindings { unanswered: members.clone(), ..Default::default() });
    group.answers = Answers::AreLost;
    group.begin(0, 0, 2);
    assert_eq!(group.scrubbed, []);
    group.run(1000 * MS);
    let expected = ScrubFindings { unanswered: members, ..Default::default() };
    assert_eq!(group.scrubbed, [ScrubOutcome::Compared(expected)]);
}

#[test]
fn only_a_primary_scrubs_and_each_scrub_is_answered() {
    let mut group = Group::new();
    group.begin(1, 0, 2);
    assert_eq!(group.scrubbed, [ScrubOutcome::NotPrimary]);
    group.scrubbed.clear();
    group.answers = Answers::Wait;
    group.begin(0, 0, 2);
    group.begin(0, 0, 1);
    assert_eq!(group.scrubbed, [ScrubOutcome::Interrupted]);
    // Another record: what was asked in the epoch before is not known any more.
    let next = GroupConfig { epoch: group.map.epoch + 1, ..(*group.map).clone() };
    group.map = Arc::new(next);
    group.handle(0, ReplicaEvent::Map(group.map.clone()));
    assert_eq!(group.scrubbed, [ScrubOutcome::Interrupted, ScrubOutcome::Interrupted]);
}
