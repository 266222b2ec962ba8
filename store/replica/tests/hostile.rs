//! Messages that make no sense: a replica must survive them, whatever role it has.
#![allow(clippy::unwrap_used)]

#[path = "../../../wire/replica/tests/arbitrary/mod.rs"]
mod arbitrary;

use std::collections::VecDeque;
use std::sync::Arc;

use random::WyRand;
use replica::*;
use wire_replica::{Frame, NUMBER_LIMIT};

const REPLICAS: u64 = 4;

/// A storage that carries everything out, at some time later.
#[derive(Default)]
struct Storage {
    pending: VecDeque<ReplicaEvent>,
    replies: usize,
    messages: usize,
}

impl Storage {
    fn act(&mut self, action: ReplicaAction) {
        match action {
            ReplicaAction::Append { append, .. } => self.pending.push_back(ReplicaEvent::Appended { append }),
            ReplicaAction::Checkpoint { checkpoint, .. } => {
                self.pending.push_back(ReplicaEvent::Checkpointed { checkpoint });
            }
            ReplicaAction::Reset { session, .. } => {
                self.pending.push_back(ReplicaEvent::ResetDone { session });
            }
            ReplicaAction::Read { read, .. } => {
                let data = (read % 3 > 0).then(|| [1; 8].into());
                self.pending.push_back(ReplicaEvent::ReadDone { read, data });
            }
            ReplicaAction::ReadObject { read, after } => {
                let mut random = WyRand::new(read);
                let part = arbitrary::part(&mut random);
                let is_last = random.happens(500);
                let content = [2; 8].into();
                let part = (after < Some(part)).then_some(CopiedPart { part, is_last, content });
                self.pending.push_back(ReplicaEvent::ObjectRead { read, part });
            }
            ReplicaAction::Truncate { truncation, .. } => {
                self.pending.push_back(ReplicaEvent::Truncated { truncation, in_place: Vec::new() });
            }
            ReplicaAction::Settle { number, .. } => {
                self.pending.push_back(ReplicaEvent::Settled { number });
            }
            ReplicaAction::WriteObject { session, part, .. } => {
                self.pending.push_back(ReplicaEvent::ObjectWritten { session, part });
            }
            ReplicaAction::Send { message, .. } => {
                // What it sends can be decoded, unless its numbers have come near the limit.
                let frame = Frame::Replica(message);
                let (bytes, _) = arbitrary::bytes(&frame);
                if let Ok(received) = arbitrary::received(&bytes) {
                    // A replica of a version without sessions gets none of them with a copy.
                    assert!(
                        received == frame
                            || matches!(frame, Frame::Replica(ReplicaMessage { body: MessageBody::CopyBegin { session, .. }, .. }) if session & wire_replica::KNOWS_SESSIONS == 0),
                        "{frame:?}"
                    );
                    self.messages += 1;
                }
            }
            ReplicaAction::Reply { .. } => self.replies += 1,
            ReplicaAction::Apply { .. }
            | ReplicaAction::Stable { .. }
            | ReplicaAction::Free { .. }
            | ReplicaAction::Restored
            | ReplicaAction::Scrubbed { .. }
            | ReplicaAction::Propose(_) => {}
        }
    }
}

/// A message that concerns the replica more often than chance has it.
fn message(random: &mut WyRand, replica: &Replica<NoFaults>) -> ReplicaMessage {
    let mut message = arbitrary::replica_message(random, REPLICAS);
    let known = replica.config();
    if known.epoch > 0 && random.happens(800) {
        message.config = Arc::new(known.clone());
        if random.happens(700) {
            message.from = known.primary;
        }
    }
    let log_end = replica.status().log_end;
    if let MessageBody::Append(append) = &mut message.body
        && random.happens(300)
        && log_end < NUMBER_LIMIT
        && append.entries.is_empty()
    {
        append.previous.sequence = log_end;
    }
    let Frame::Replica(message) = arbitrary::received(&arbitrary::bytes(&Frame::Replica(message)).0).unwrap()
    else {
        unreachable!("it was a message of a replica");
    };
    message
}

fn run(seed: u64) -> Storage {
    let mut random = WyRand::new(seed);
    let settings = ReplicaSettings {
        in_sync_min: 1,
        checkpoint_entries: 1 + random.below(16),
        retained_entries: random.below(20),
        entries_max: 16 + random.index(40),
        in_place: random.happens(500),
        ..ReplicaSettings::default()
    };
    let mut now_ns = random.below(1 << 40);
    let recovered = RecoveredReplica::default();
    let mut replica = Replica::new(ReplicaId(1), 1, settings, recovered, now_ns);
    if random.happens(200) {
        let memory = GroupMemory { is_older: random.happens(500), ..GroupMemory::default() };
        replica.handle(ReplicaEvent::Memory(memory), now_ns, &mut Vec::new());
    }
    let (mut storage, mut actions) = (Storage::default(), Vec::new());
    for _ in 0..400 {
        now_ns += if random.happens(50) { random.below(2_000_000_000) } else { random.below(20_000_000) };
        let event = match random.below(10) {
            0..=4 => ReplicaEvent::Message(message(&mut random, &replica)),
            5 => ReplicaEvent::Request(arbitrary::request(&mut random)),
            6 if random.happens(300) => ReplicaEvent::Map(arbitrary::config(&mut random, REPLICAS)),
            6 if random.happens(100) => ReplicaEvent::LogLow,
            6 if random.happens(20) => ReplicaEvent::AcceptLoss { epoch: random.below(8) as u32 },
            6 if random.happens(300) => {
                let (object, length) = (arbitrary::part(&mut random).object, 4096 << random.below(6));
                ReplicaEvent::Scrub { scrub: random.below(9), object, offset: 0, length }
            }
            6 | 7 => ReplicaEvent::Timer,
            _ => storage.pending.pop_front().unwrap_or(ReplicaEvent::Timer),
        };
        replica.handle(event, now_ns, &mut actions);
        actions.drain(..).for_each(|action| storage.act(action));
        let deadline = replica.deadline();
        assert!(deadline.is_none_or(|at_ns| at_ns > now_ns) || replica.status().blocked.is_some());
    }
    storage
}

#[test]
fn no_message_makes_a_replica_panic() {
    let (mut replies, mut messages) = (0, 0);
    for seed in 1..=2000 {
        let storage = std::panic::catch_unwind(|| run(seed));
        let storage = storage.unwrap_or_else(|_| panic!("the replica of seed {seed} panicked"));
        replies += storage.replies;
        messages += storage.messages;
    }
    // It was not deaf: it answered clients and replicas.
    assert!(replies > 10_000 && messages > 10_000, "{replies} replies, {messages} messages");
}
