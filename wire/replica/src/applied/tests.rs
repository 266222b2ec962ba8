use wire_store::{ObjectId, Operation};

use super::*;

fn write(client: u64, number: u64, volume: u64, attach_epoch: u32) -> EntryHeader {
    let object = ObjectId { group: 1, volume, index: 0, suffix: 0 };
    let header = EntryHeader::new(Operation::Write, object, 0, 4096);
    EntryHeader { client, client_number: number, epoch: attach_epoch, ..header }
}

fn open(client: u64, volume: u64, attach_epoch: u32) -> EntryHeader {
    let change = SessionChange::Open { volume, attach_epoch };
    EntryHeader { client, client_number: 1, ..change.header(1) }
}

fn end(client: u64, volume: u64) -> EntryHeader {
    EntryHeader { client, client_number: 2, ..SessionChange::End { volume }.header(1) }
}

/// A table with the sequences of its entries.
#[derive(Default)]
struct Table {
    applied: AppliedRequests,
    sequence: u64,
}

impl Table {
    /// A request that is admitted is committed at once.
    fn take(&mut self, header: EntryHeader) -> RequestSeen {
        let admitted = self.applied.admit(&header);
        if admitted == RequestSeen::New {
            self.commit(header);
        }
        admitted
    }

    fn commit(&mut self, header: EntryHeader) {
        self.sequence += 1;
        self.applied.apply(&EntryHeader { sequence: self.sequence, ..header });
    }
}

#[test]
fn a_number_is_new_once_until_the_window_has_passed_it() {
    let mut applied = AppliedRequests::default();
    let mut oracle = std::collections::BTreeSet::new();
    let mut random = random::WyRand::new(1);
    let mut newest = 5000;
    for sequence in 0..20_000 {
        let number = newest + random.below(30) - random.below(600).min(newest);
        let expected = match (number + CLIENT_WINDOW <= newest, oracle.contains(&number)) {
            (true, _) if sequence > 0 => RequestSeen::TooOld,
            (_, true) => RequestSeen::Applied,
            _ => RequestSeen::New,
        };
        assert_eq!(applied.seen(7, number), expected, "{number} of {newest}");
        if expected == RequestSeen::New {
            applied.record(7, number, sequence);
            oracle.insert(number);
            newest = if sequence == 0 { number } else { newest.max(number) };
        }
    }
}

#[test]
fn a_client_with_a_session_is_remembered_however_many_others_write() {
    let mut table = Table::default();
    assert_eq!(table.take(open(1, 5, 1)), RequestSeen::New);
    assert_eq!(table.take(write(1, 7, 5, 1)), RequestSeen::New);
    for client in 2..5000 {
        assert_eq!(table.take(open(client, 6, 1)), RequestSeen::New);
        assert_eq!(table.take(write(client, 1, 6, 1)), RequestSeen::New);
        assert_eq!(table.take(end(client, 6)), RequestSeen::New);
        // One of a version without sessions.
        table.take(write(client + 10_000, 1, 9, 0));
    }
    assert_eq!(table.applied.admit(&write(1, 7, 5, 1)), RequestSeen::Applied);
    assert_eq!(table.applied.session_count(), 1);
    assert!(table.applied.clients.len() <= CLIENTS_MAX);
}

#[test]
fn what_a_client_sends_after_its_session_is_refused() {
    let mut table = Table::default();
    assert_eq!(table.take(write(1, 2, 5, 1)), RequestSeen::SessionEnded);
    assert_eq!(table.take(open(1, 5, 1)), RequestSeen::New);
    assert_eq!(table.take(open(1, 5, 1)), RequestSeen::Applied);
    assert_eq!(table.take(write(1, 2, 5, 1)), RequestSeen::New);
    assert_eq!(table.take(write(1, 3, 6, 1)), RequestSeen::SessionEnded, "of another volume");
    assert_eq!(table.take(end(1, 5)), RequestSeen::New);
    assert_eq!(table.take(end(1, 5)), RequestSeen::Applied);
    for number in [2, 3] {
        assert_eq!(table.take(write(1, number, 5, 1)), RequestSeen::SessionEnded);
    }
}

#[test]
fn late_repetitions_of_the_requests_of_a_session_that_has_ended_apply_nothing() {
    let mut table = Table::default();
    assert_eq!(table.take(open(1, 5, 1)), RequestSeen::New);
    let token = u64::from(table.applied.token(1).unwrap());
    let with_token = |number| EntryHeader { sequence: token, ..write(1, number, 5, 1) };
    assert_eq!(table.take(with_token(2)), RequestSeen::New);
    assert_eq!(table.applied.admit(&with_token(2)), RequestSeen::Applied);
    assert_eq!(table.take(end(1, 5)), RequestSeen::New);
    // The request that opened it arrives once more.
    assert_eq!(table.take(open(1, 5, 1)), RequestSeen::New);
    assert_ne!(table.applied.token(1).map(u64::from), Some(token));
    assert_eq!(table.take(with_token(2)), RequestSeen::SessionEnded);
}

#[test]
fn sessions_of_a_lower_attach_epoch_end_and_are_opened_no_more() {
    let mut table = Table::default();
    for client in [1, 2] {
        assert_eq!(table.take(open(client, 5, 3)), RequestSeen::New);
    }
    assert_eq!(table.take(open(9, 6, 1)), RequestSeen::New);
    assert_eq!(table.take(open(3, 5, 4)), RequestSeen::New);
    for client in [1, 2] {
        assert_eq!(table.take(write(client, 5, 5, 3)), RequestSeen::Fenced);
        assert_eq!(table.take(open(client, 5, 3)), RequestSeen::Fenced);
    }
    assert_eq!(table.take(write(9, 5, 6, 1)), RequestSeen::New, "of another volume");
    assert_eq!(table.take(end(3, 5)), RequestSeen::New);
    assert_eq!(table.take(open(1, 5, 3)), RequestSeen::Fenced, "the epoch outlives the session");
    // What was admitted before another attach, and is committed after it, has no session.
    table.commit(open(4, 5, 5));
    table.commit(open(5, 5, 4));
    assert_eq!(table.take(write(5, 1, 5, 4)), RequestSeen::Fenced);
    assert_eq!(table.applied.session_count(), 2);
}

#[test]
fn a_client_without_a_session_does_not_write_where_others_have_one() {
    let mut table = Table::default();
    assert_eq!(table.take(write(1, 1, 5, 0)), RequestSeen::New);
    assert_eq!(table.take(open(2, 5, 1)), RequestSeen::New);
    assert_eq!(table.take(write(1, 2, 5, 0)), RequestSeen::InUse);
    assert_eq!(table.take(write(1, 3, 6, 0)), RequestSeen::New);
    assert_eq!(table.take(end(2, 5)), RequestSeen::New);
    assert_eq!(table.take(write(1, 4, 5, 0)), RequestSeen::New);
    assert_eq!(table.take(write(0, 0, 5, 0)), RequestSeen::New, "a repair");
}

#[test]
fn one_session_more_than_there_may_be_is_refused_and_no_session_is_forgotten() {
    let mut table = Table::default();
    for client in 1..=SESSIONS_MAX as u64 {
        assert_eq!(table.take(open(client, client, 1)), RequestSeen::New);
    }
    let more = SESSIONS_MAX as u64 + 1;
    assert_eq!(table.take(open(more, 1, 1)), RequestSeen::TooManySessions);
    // Two that were admitted for one place.
    table.commit(open(more, 1, 1));
    assert_eq!(table.applied.session_count(), SESSIONS_MAX);
    // Clients without sessions take turns in what is left.
    for client in 0..3 * CLIENTS_MAX as u64 {
        table.commit(write(1_000_000 + client, 1, 1_000_000, 0));
    }
    assert_eq!(table.applied.clients.len(), CLIENTS_MAX);
    for client in 1..=SESSIONS_MAX as u64 {
        assert!(table.applied.session(client).is_some());
    }
    let mut encoded = Vec::new();
    table.applied.encode(&mut encoded);
    assert!(encoded.len() <= AppliedRequests::ENCODED_BYTES_MAX);
    assert_eq!(AppliedRequests::decode(&encoded), Ok(table.applied.clone()));
    assert_eq!(table.take(end(1, 1)), RequestSeen::New);
    assert_eq!(table.take(open(more, 1, 1)), RequestSeen::New);
}

#[test]
fn volumes_without_sessions_are_forgotten_in_their_order() {
    let mut table = Table::default();
    for volume in 1..=FENCES_MAX as u64 + 1 {
        assert_eq!(table.take(open(1, volume, 2)), RequestSeen::New);
        assert_eq!(table.take(end(1, volume)), RequestSeen::New);
    }
    assert_eq!(table.applied.admit(&open(1, 1, 1)), RequestSeen::New);
    assert_eq!(table.applied.admit(&open(1, 2, 1)), RequestSeen::Fenced);
    let mut encoded = Vec::new();
    table.applied.encode(&mut encoded);
    assert_eq!(AppliedRequests::decode(&encoded), Ok(table.applied));
}

#[test]
fn a_node_without_sessions_and_one_with_them_read_each_others_tables() {
    let mut table = Table::default();
    assert_eq!(table.take(open(1, 5, 1)), RequestSeen::New);
    for number in [600, 1300, 1310] {
        assert_eq!(table.take(write(1, number, 5, 1)), RequestSeen::New);
    }
    let mut encoded = Vec::new();
    table.applied.encode_without_sessions(&mut encoded);
    assert_eq!(encoded.len(), 4 + OLD_CLIENT_BYTES);
    let mut old = Table { applied: AppliedRequests::decode(&encoded).unwrap(), sequence: 9 };
    // It was told apart there, and is again: it has a session with its next renewal.
    assert_eq!(old.applied.admit(&write(1, 1300, 5, 1)), RequestSeen::Applied);
    assert_eq!(old.take(write(1, 1305, 5, 1)), RequestSeen::New);
    assert_eq!(old.take(open(1, 5, 1)), RequestSeen::New);
    assert_eq!(old.applied.admit(&write(1, 1305, 5, 1)), RequestSeen::Applied);
    assert_eq!(old.applied.admit(&write(1, 1306, 5, 1)), RequestSeen::New);
}

#[test]
fn requests_without_a_client_are_always_new() {
    let mut applied = AppliedRequests::default();
    applied.record(0, 1, 1);
    assert_eq!(applied.seen(0, 1), RequestSeen::New);
}
