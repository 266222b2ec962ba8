//! Sessions of clients at a primary: who is admitted, and when a session ends.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use replica::*;
use wire_store::{EntryHeader, ObjectId, Operation};

const MS: u64 = 1_000_000;
const GROUP: u32 = 3;

/// The only replica of a group, with a log that takes time only where a test says so.
struct Primary {
    replica: Replica,
    now_ns: u64,
    /// Appends are not durable until they are let go.
    holds: bool,
    held: Option<u64>,
    checkpoint: Option<ReplicaCheckpoint>,
    replies: Vec<(u64, u64, ClientReply)>,
    /// Reads of the storage, by number.
    reads: Vec<u64>,
}

impl Primary {
    fn new(recovered: RecoveredReplica) -> Primary {
        let settings = ReplicaSettings {
            group: GROUP,
            in_sync_min: 1,
            session_timeout_ns: 1000 * MS,
            ..ReplicaSettings::default()
        };
        let mut primary = Primary {
            replica: Replica::new(ReplicaId(1), 1, settings, recovered, 0),
            now_ns: 0,
            holds: false,
            held: None,
            checkpoint: None,
            replies: Vec::new(),
            reads: Vec::new(),
        };
        let config = GroupConfig { epoch: 1, primary: ReplicaId(1), in_sync: vec![ReplicaId(1)] };
        primary.handle(ReplicaEvent::Map(Arc::new(config)));
        primary.run_until(500 * MS);
        primary
    }

    fn handle(&mut self, event: ReplicaEvent) {
        let mut actions = Vec::new();
        self.replica.handle(event, self.now_ns, &mut actions);
        for action in actions {
            match action {
                ReplicaAction::Append { append, .. } if self.holds => self.held = Some(append),
                ReplicaAction::Append { append, .. } => self.handle(ReplicaEvent::Appended { append }),
                ReplicaAction::Propose(config) => self.handle(ReplicaEvent::Map(config)),
                ReplicaAction::Checkpoint { checkpoint, record } => {
                    self.checkpoint = Some(*record);
                    self.handle(ReplicaEvent::Checkpointed { checkpoint });
                }
                ReplicaAction::Read { read, .. } => self.reads.push(read),
                ReplicaAction::Reply { client, number, reply } => self.replies.push((client, number, reply)),
                _ => {}
            }
        }
    }

    fn run_until(&mut self, end_ns: u64) {
        while let Some(at_ns) = self.replica.deadline().filter(|at_ns| *at_ns <= end_ns) {
            self.now_ns = self.now_ns.max(at_ns);
            self.handle(ReplicaEvent::Timer);
        }
        self.now_ns = end_ns;
    }

    fn release(&mut self) {
        self.holds = false;
        if let Some(append) = self.held.take() {
            self.handle(ReplicaEvent::Appended { append });
        }
    }

    /// The answers to a request.
    fn request(&mut self, header: EntryHeader) -> Vec<ClientReply> {
        let (client, number) = (header.client, header.client_number);
        let data: Arc<[u8]> = vec![7; header.data_bytes()].into();
        let header = EntryHeader { data_crc32c: wire_store::crc32c(&data), ..header };
        self.handle(ReplicaEvent::Request(ClientRequest::Write { header, data }));
        let of_request = |reply: &mut (u64, u64, ClientReply)| (reply.0, reply.1) == (client, number);
        self.replies.extract_if(.., of_request).map(|(.., reply)| reply).collect()
    }

    fn open(&mut self, client: u64, number: u64, attach_epoch: u32) -> Vec<ClientReply> {
        let header = SessionChange::Open { volume: 1, attach_epoch }.header(GROUP);
        self.request(EntryHeader { client, client_number: number, ..header })
    }

    /// Opens a session, and returns its token.
    fn opened(&mut self, client: u64, attach_epoch: u32) -> u32 {
        match self.open(client, 1, attach_epoch)[..] {
            [ClientReply::SessionOpened { token }] => token,
            ref other => panic!("{other:?}"),
        }
    }

    fn write(&mut self, client: u64, number: u64, (attach_epoch, token): (u32, u32)) -> Vec<ClientReply> {
        let object = ObjectId { group: GROUP, volume: 1, index: 0, suffix: 0 };
        let header = EntryHeader::new(Operation::Write, object, 0, 4096);
        let (epoch, sequence) = (attach_epoch, token.into());
        self.request(EntryHeader { client, client_number: number, epoch, sequence, ..header })
    }
}

#[test]
fn a_retry_applies_once_however_many_clients_have_written_since() {
    let mut primary = Primary::new(RecoveredReplica::default());
    let token = primary.opened(7, 1);
    assert_eq!(primary.write(7, 2, (1, token)), [ClientReply::Written]);
    for client in 100..1700 {
        let other = primary.opened(client, 1);
        assert_eq!(primary.write(client, 2, (1, other)), [ClientReply::Written]);
        let header = SessionChange::End { volume: 1 }.header(GROUP);
        let ended = primary.request(EntryHeader { client, client_number: 3, ..header });
        assert_eq!(ended, [ClientReply::Written]);
    }
    let before = primary.replica.status().log_end;
    assert_eq!(primary.write(7, 2, (1, token)), [ClientReply::Written]);
    assert_eq!(primary.replica.status().log_end, before, "nothing is appended for it");
}

#[test]
fn a_session_ends_when_its_client_is_silent_for_the_timeout_and_not_before() {
    let mut primary = Primary::new(RecoveredReplica::default());
    let (silent, renewed) = (primary.opened(7, 1), primary.opened(8, 1));
    let began_ns = primary.now_ns;
    primary.run_until(began_ns + 900 * MS);
    assert_eq!(primary.replica.status().sessions, 2);
    assert_eq!(primary.open(8, 5, 1), [ClientReply::SessionOpened { token: renewed }]);
    primary.run_until(began_ns + 1300 * MS);
    assert_eq!(primary.replica.status().sessions, 1);
    assert_eq!(primary.write(7, 9, (1, silent)), [ClientReply::SessionEnded]);
    assert_eq!(primary.write(8, 9, (1, renewed)), [ClientReply::Written]);
    assert!(primary.replies.iter().all(|(_, number, _)| *number == 0), "{:?}", primary.replies);
}

#[test]
fn a_new_primary_counts_the_timeout_from_its_beginning() {
    let mut primary = Primary::new(RecoveredReplica::default());
    let token = primary.opened(7, 1);
    // Enough entries for a checkpoint.
    for number in 2..40 {
        assert_eq!(primary.write(7, number, (1, token)), [ClientReply::Written]);
    }
    let checkpoint = primary.checkpoint.take().unwrap();
    let base = checkpoint.through;
    let recovered = RecoveredReplica { checkpoint, base, ..RecoveredReplica::default() };
    let mut primary = Primary::new(recovered);
    assert_eq!(primary.replica.status().sessions, 1);
    assert_eq!(primary.write(7, 2, (1, token)), [ClientReply::Written], "it is applied");
    // Of no other request than this does it hear before the time-out.
    assert_eq!(primary.write(7, 40, (1, token)), [ClientReply::Written]);
    primary.run_until(primary.now_ns + 400 * MS);
    assert_eq!(primary.replica.status().sessions, 1);
}

#[test]
fn a_late_write_of_a_holder_before_is_refused_once_the_next_one_may_have_read() {
    let mut primary = Primary::new(RecoveredReplica::default());
    let token = primary.opened(7, 1);
    primary.holds = true;
    assert_eq!(primary.open(8, 1, 2), []);
    // Neither refused for good nor let past the other one, which may commit or not.
    assert_eq!(primary.write(7, 2, (1, token)), [ClientReply::Busy]);
    assert_eq!(primary.open(9, 1, 1), [ClientReply::Busy]);
    primary.release();
    assert!(matches!(primary.replies[..], [(8, 1, ClientReply::SessionOpened { .. })]));
    assert_eq!(primary.write(7, 2, (1, token)), [ClientReply::Fenced]);
    assert_eq!(primary.open(9, 1, 1), [ClientReply::Fenced]);
    // One of a version without sessions is no exception.
    assert_eq!(primary.write(10, 1, (0, 0)), [ClientReply::Denied]);
}

#[test]
fn an_object_that_names_sessions_or_lists_has_no_data() {
    let mut primary = Primary::new(RecoveredReplica::default());
    for object in [
        SessionChange::End { volume: 1 }.header(GROUP).object,
        Listing::Objects { volume: 1, from: 0 }.object(GROUP),
    ] {
        let header = EntryHeader::new(Operation::Write, object, 0, 4096);
        let reply = primary.request(EntryHeader { client: 7, client_number: 1, ..header });
        assert_eq!(reply, [ClientReply::Failed]);
    }
}

/// A client repeats what is slow, as on a device that hangs.
#[test]
fn a_read_that_is_repeated_is_carried_out_once() {
    let mut primary = Primary::new(RecoveredReplica::default());
    let object = ObjectId { group: GROUP, volume: 1, index: 0, suffix: 0 };
    let read = |primary: &mut Primary, client, number| {
        let request = ClientRequest::Read { client, number, object, offset: 0, length: 4096 };
        primary.handle(ReplicaEvent::Request(request));
    };
    for _ in 0..100 {
        read(&mut primary, 7, 1);
        read(&mut primary, 7, 2);
        read(&mut primary, 8, 1);
    }
    let reads = std::mem::take(&mut primary.reads);
    assert_eq!((reads.len(), primary.replies.len()), (3, 0));
    for read in reads {
        primary.handle(ReplicaEvent::ReadDone { read, data: Some(vec![0; 4096].into()) });
    }
    assert_eq!(primary.replies.len(), 3);
    // The answer may have been lost.
    read(&mut primary, 7, 1);
    assert_eq!(primary.reads.len(), 1);
}
