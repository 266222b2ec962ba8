//! Blocks that have the data of entries which a log lost, and what becomes of them.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::sync::Arc;

use replica::*;
use wire_store::{BLOCK_BYTES, EntryHeader, ObjectId, Operation, crc32c};

const MS: u64 = 1_000_000;
const BLOCK: u32 = BLOCK_BYTES as u32;
const OBJECT: ObjectId = ObjectId { group: 1, volume: 1, index: 0, suffix: 0 };

fn write(client: u64, client_number: u64, offset: u32, data: &[u8]) -> (EntryHeader, Arc<[u8]>) {
    let header = EntryHeader::new(Operation::Write, OBJECT, offset, data.len() as u32);
    (EntryHeader { client, client_number, data_crc32c: crc32c(data), ..header }, data.into())
}

fn unsettled(client: u64, client_number: u64, byte: u8) -> Vec<Arc<ReplicatedEntry>> {
    let (header, data) = write(client, client_number, 0, &[byte; BLOCK_BYTES]);
    vec![Arc::new(ReplicatedEntry { header, data })]
}

/// A replica with a storage of one block.
struct Node {
    replica: Replica,
    /// `None` if it is damaged.
    block: Option<Arc<[u8]>>,
    /// The entries that were appended.
    entries: Vec<Arc<ReplicatedEntry>>,
    replies: Vec<ClientReply>,
}

/// Replicas that hear each other at once, the first of them the primary.
struct Group {
    nodes: Vec<Node>,
    map: Arc<GroupConfig>,
    now_ns: u64,
}

impl Group {
    fn new(disks: Vec<(Option<u8>, RecoveredReplica)>) -> Group {
        let settings = ReplicaSettings { in_sync_min: 1, in_place: true, ..ReplicaSettings::default() };
        let in_sync: Vec<ReplicaId> = (0..disks.len() as u32).map(ReplicaId).collect();
        let node = |(id, (byte, recovered)): (&ReplicaId, (Option<u8>, RecoveredReplica))| Node {
            replica: Replica::new(*id, 1, settings.clone(), recovered, 0),
            block: byte.map(|byte| [byte; BLOCK_BYTES].into()),
            entries: Vec::new(),
            replies: Vec::new(),
        };
        let nodes = in_sync.iter().zip(disks).map(node).collect();
        let map = Arc::new(GroupConfig { epoch: 1, primary: ReplicaId(0), in_sync });
        let mut group = Group { nodes, map: map.clone(), now_ns: 0 };
        for to in 0..group.nodes.len() {
            group.handle(to, ReplicaEvent::Map(map.clone()));
        }
        group.run(1000 * MS);
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
                    ReplicaAction::Append { append, entry } => {
                        node.entries.push(entry);
                        ReplicaEvent::Appended { append }
                    }
                    ReplicaAction::Apply { entry } => {
                        if entry.data.len() == BLOCK_BYTES {
                            node.block = Some(entry.data.clone());
                        }
                        continue;
                    }
                    ReplicaAction::Settle { number, data, .. } => {
                        node.block = Some(data);
                        ReplicaEvent::Settled { number }
                    }
                    ReplicaAction::Read { read, .. } => {
                        ReplicaEvent::ReadDone { read, data: node.block.clone() }
                    }
                    ReplicaAction::Checkpoint { checkpoint, .. } => ReplicaEvent::Checkpointed { checkpoint },
                    ReplicaAction::Reply { reply, .. } => {
                        node.replies.push(reply);
                        continue;
                    }
                    ReplicaAction::Send { to, message } => {
                        events.push_back((to.0 as usize, ReplicaEvent::Message(message)));
                        continue;
                    }
                    ReplicaAction::Propose(config) => {
                        if config.epoch == self.map.epoch + 1 {
                            self.map = config;
                        }
                        ReplicaEvent::Map(self.map.clone())
                    }
                    _ => continue,
                };
                events.push_back((to, next));
            }
        }
    }

    fn run(&mut self, length_ns: u64) {
        let end_ns = self.now_ns + length_ns;
        while self.now_ns < end_ns {
            self.now_ns += 10 * MS;
            (0..self.nodes.len()).for_each(|node| self.handle(node, ReplicaEvent::Timer));
        }
    }

    /// What the primary answers to a read of the block.
    fn read(&mut self) -> Option<ClientReply> {
        let (client, number) = (9, self.now_ns);
        let read = ClientRequest::Read { client, number, object: OBJECT, offset: 0, length: BLOCK };
        self.handle(0, ReplicaEvent::Request(read));
        self.run(100 * MS);
        self.nodes[0].replies.pop()
    }

    fn blocks(&self) -> Vec<Option<u8>> {
        self.nodes.iter().map(|node| node.block.as_ref().map(|block| block[0])).collect()
    }
}

fn disk(unsettled: Vec<Arc<ReplicatedEntry>>) -> RecoveredReplica {
    RecoveredReplica { unsettled, ..RecoveredReplica::default() }
}

fn data(byte: u8) -> Option<ClientReply> {
    Some(ClientReply::Data([byte; BLOCK_BYTES].into()))
}

#[test]
fn a_block_that_no_replica_can_read_gets_what_followers_have() {
    let mut group = Group::new(vec![
        (None, disk(vec![])),
        (Some(7), disk(unsettled(5, 1, 7))),
        (Some(8), disk(unsettled(6, 1, 8))),
    ]);
    assert_eq!(group.blocks(), [Some(7); 3]);
    assert!(group.nodes.iter().all(|node| node.replica.status().unsettled == 0));
    assert_eq!(group.read(), data(7));
    // The request of the entry that counted is done: a retry changes nothing. That of the other one is not.
    let end = group.nodes[0].replica.status().log_end;
    let (header, bytes) = write(5, 1, 0, &[7; BLOCK_BYTES]);
    group.handle(0, ReplicaEvent::Request(ClientRequest::Write { header, data: bytes }));
    assert_eq!(group.nodes[0].replies.pop(), Some(ClientReply::Written));
    assert_eq!(group.nodes[0].replica.status().log_end, end);
    let (header, bytes) = write(6, 1, 0, &[8; BLOCK_BYTES]);
    group.handle(0, ReplicaEvent::Request(ClientRequest::Write { header, data: bytes }));
    group.run(100 * MS);
    assert_eq!(group.blocks(), [Some(8); 3]);
}

#[test]
fn a_lost_entry_of_a_client_whose_session_has_ended_never_takes_effect() {
    // Others may have read what was in the block, since another one attached the image.
    let mut applied = AppliedRequests::default();
    for (sequence, client, attach_epoch) in [(1, 5, 1), (2, 6, 2)] {
        let header = SessionChange::Open { volume: 1, attach_epoch }.header(1);
        applied.apply(&EntryHeader { client, client_number: 1, sequence, epoch: 1, ..header });
    }
    let with = |mut unsettled: Vec<Arc<ReplicatedEntry>>| {
        let base = EntryId { sequence: 2, epoch: 1 };
        unsettled.iter_mut().for_each(|entry| Arc::make_mut(entry).header.sequence = 3);
        let checkpoint = ReplicaCheckpoint { through: base, applied: applied.clone(), complete: true };
        RecoveredReplica { checkpoint, base, unsettled, ..RecoveredReplica::default() }
    };
    let mut group = Group::new(vec![(None, with(vec![])), (Some(7), with(unsettled(5, 1, 7)))]);
    assert_eq!(group.read(), Some(ClientReply::Failed));
    let (header, bytes) = write(6, 2, 0, &[8; BLOCK_BYTES]);
    let header = EntryHeader { epoch: 2, sequence: 2, ..header };
    group.handle(0, ReplicaEvent::Request(ClientRequest::Write { header, data: bytes }));
    group.run(200 * MS);
    assert_eq!(group.read(), data(8));
    assert_eq!(group.blocks(), [Some(8); 2]);
    // That of a client which may still repeat its request does.
    let mut group = Group::new(vec![(None, with(vec![])), (Some(9), with(unsettled(6, 2, 9)))]);
    assert_eq!(group.read(), data(9));
}

#[test]
fn what_was_committed_counts_while_one_replica_has_it() {
    let mut group =
        Group::new(vec![(None, disk(vec![])), (Some(7), disk(unsettled(5, 1, 7))), (Some(3), disk(vec![]))]);
    // No client has read it: the follower with the unsettled block made the primary repair it.
    assert_eq!(group.blocks(), [Some(3); 3]);
    assert_eq!(group.read(), data(3));
}

#[test]
fn an_applied_request_does_not_settle_a_block_again() {
    // Its retry is in the logs, and another write follows: the record of the first follower is older.
    let entry = |sequence: u64, (header, data): (EntryHeader, Arc<[u8]>)| {
        let header = EntryHeader { sequence, epoch: 1, ..header };
        Arc::new(ReplicatedEntry { header, data })
    };
    let entries =
        || vec![entry(1, write(5, 1, 0, &[7; BLOCK_BYTES])), entry(2, write(5, 2, 0, &[4; BLOCK_BYTES]))];
    let with = |unsettled| RecoveredReplica { entries: entries(), unsettled, ..RecoveredReplica::default() };
    let mut group = Group::new(vec![(Some(0), with(vec![])), (Some(7), with(unsettled(5, 1, 7)))]);
    group.nodes[0].block = None;
    let mut reply = None;
    for _ in 0..10 {
        reply = group.read();
    }
    assert_eq!(reply, data(4));
    assert_eq!(group.nodes[1].replica.status().unsettled, 0);
}

#[test]
fn a_repair_that_a_log_lost_keeps_what_was_written_since() {
    let (header, data) = write(5, 3, 512, &[9; 512]);
    let header = EntryHeader { sequence: 1, epoch: 1, ..header };
    let entries = vec![Arc::new(ReplicatedEntry { header, data })];
    // As the primary appends repairs.
    let lost = unsettled(0, 1, 7);
    let recovered = RecoveredReplica { entries, unsettled: lost, ..RecoveredReplica::default() };
    let group = Group::new(vec![(Some(7), recovered)]);
    let mut expected = vec![7; BLOCK_BYTES];
    expected[512..1024].fill(9);
    assert_eq!(group.nodes[0].block.as_deref(), Some(&expected[..]));
}
