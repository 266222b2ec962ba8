use random::WyRand;
use reservations::{ChangeWaker, Registrant, ReservationCommand, ReservationType};
use target_shell::ConnectionLimits;
use wire_nbd::*;

use super::*;

/// A client that knows only bytes.
pub(super) struct Client {
    pub(super) id: ConnectionId,
    pub(super) received: Vec<u8>,
}

impl Client {
    pub(super) fn begin(target: &mut SimulatedTarget) -> Client {
        Client::begin_with(target, &[])
    }

    /// Negotiates options without data before it chooses the export.
    pub(super) fn begin_with(target: &mut SimulatedTarget, options: &[OptionCode]) -> Client {
        let id = target.connect();
        Client::negotiate(target, id, options)
    }

    fn negotiate(target: &mut SimulatedTarget, id: ConnectionId, options: &[OptionCode]) -> Client {
        let mut client = Client { id, received: Vec::new() };
        let mut hello = vec![0, 0, 0, 3];
        for option in options {
            hello.extend(OptionHeader { option: *option as u32, length: 0 }.to_bytes());
        }
        hello.extend(OptionHeader { option: OptionCode::ExportName as u32, length: 4 }.to_bytes());
        hello.extend(b"disk");
        client.send(target, &hello);
        client.read(target, NbdGreeting::SIZE + options.len() * OptionReplyHeader::SIZE);
        let export =
            ExportReply::decode(client.read(target, ExportReply::SIZE).first_chunk().unwrap()).unwrap();
        assert_eq!(export.size, DISK_BYTES as u64);
        client
    }

    fn send(&mut self, target: &mut SimulatedTarget, mut bytes: &[u8]) {
        for _ in 0..1_000_000 {
            if let TransferResult::Bytes(count) = target.send(self.id, bytes) {
                bytes = &bytes[count..];
            }
            if bytes.is_empty() {
                return;
            }
            target.poll();
            target.receive(self.id, &mut self.received);
        }
        panic!("{} bytes cannot be sent", bytes.len());
    }

    pub(super) fn read(&mut self, target: &mut SimulatedTarget, count: usize) -> Vec<u8> {
        for _ in 0..1_000_000 {
            if self.received.len() >= count {
                return self.received.drain(..count).collect();
            }
            target.poll();
            assert!(target.receive(self.id, &mut self.received).is_some(), "the connection is closed");
        }
        panic!("{} of {count} bytes arrived", self.received.len());
    }

    pub(super) fn request(
        &mut self,
        target: &mut SimulatedTarget,
        command: NbdCommand,
        offset: usize,
        data: &[u8],
        length: usize,
    ) {
        let (flags, cookie, offset) = (CommandFlags::empty(), offset as u64, offset as u64);
        let header = RequestHeader { flags, command: command.into(), cookie, offset, length: length as u64 };
        let mut bytes = vec![0; 28];
        header.encode(HeaderForm::Compact, &mut bytes);
        bytes.extend(data);
        self.send(target, &bytes);
    }

    pub(super) fn reply(&mut self, target: &mut SimulatedTarget) -> SimpleReply {
        SimpleReply::decode(self.read(target, 16).first_chunk().unwrap()).unwrap()
    }

    /// Polls until the target closes the connection, and returns the seconds that it took.
    fn seconds_until_closed(
        &mut self,
        target: &mut SimulatedTarget,
        reads: bool,
        seconds_max: u64,
    ) -> Option<u64> {
        for second in 0..seconds_max {
            target.now_ns += 1_000_000_000;
            for _ in 0..10 {
                target.poll();
            }
            if reads {
                target.receive(self.id, &mut self.received);
            }
            if target.group.connections().is_empty() {
                return Some(second);
            }
        }
        None
    }
}

#[test]
fn data_survives_any_segmentation() {
    for seed in 0..6 {
        let faults = NetworkFaults { cut_per_mille: 300, stall_per_mille: 200, ..NetworkFaults::default() };
        let (mut target, mut rng) = (SimulatedTarget::new(seed, faults), WyRand::new(seed));
        let mut below = |limit: u64| (rng.next_bits() % limit) as usize;
        let mut client = Client::begin(&mut target);
        let mut image = vec![0; DISK_BYTES];
        for step in 0..60 {
            let length = 1 + if step % 9 == 0 { below(600 << 10) } else { below(6000) };
            let offset = below((DISK_BYTES - length) as u64);
            match below(4) {
                0 | 1 => {
                    let data: Vec<u8> = (0..length).map(|_| below(256) as u8).collect();
                    client.request(&mut target, NbdCommand::Write, offset, &data, length);
                    image[offset..offset + length].copy_from_slice(&data);
                    assert_eq!(client.reply(&mut target).error, 0, "seed {seed}");
                }
                2 => {
                    client.request(&mut target, NbdCommand::WriteZeroes, offset, &[], length);
                    image[offset..offset + length].fill(0);
                    assert_eq!(client.reply(&mut target).error, 0, "seed {seed}");
                }
                _ => {
                    client.request(&mut target, NbdCommand::Read, offset, &[], length);
                    assert_eq!(client.reply(&mut target), SimpleReply { error: 0, cookie: offset as u64 });
                    let data = client.read(&mut target, length);
                    assert!(data == image[offset..offset + length], "seed {seed}, step {step}");
                }
            }
        }
    }
}

#[test]
fn a_handshake_has_ten_seconds() {
    let mut target = SimulatedTarget::new(1, NetworkFaults::default());
    let mut client = Client { id: target.connect(), received: Vec::new() };
    let seconds = client.seconds_until_closed(&mut target, true, 60).unwrap();
    assert!((9..=11).contains(&seconds), "{seconds}");
}

#[test]
fn a_peer_that_owes_payload_or_does_not_read_is_closed_and_an_idle_one_is_not() {
    let mut target = SimulatedTarget::new(1, NetworkFaults::default());
    let mut idle = Client::begin(&mut target);
    assert_eq!(idle.seconds_until_closed(&mut target, true, 3600), None);
    idle.request(&mut target, NbdCommand::Write, 0, &[1; 1000], 2000);
    let seconds = idle.seconds_until_closed(&mut target, true, 600).unwrap();
    assert!((25..=40).contains(&seconds), "{seconds}");

    let mut deaf = Client::begin(&mut target);
    for _ in 0..200 {
        let mut bytes = vec![0; 28];
        let (flags, command) = (CommandFlags::empty(), NbdCommand::Read.into());
        let header = RequestHeader { flags, command, cookie: 1, offset: 0, length: DISK_BYTES as u64 };
        header.encode(HeaderForm::Compact, &mut bytes);
        target.send(deaf.id, &bytes);
        target.poll();
    }
    let seconds = deaf.seconds_until_closed(&mut target, false, 600).unwrap();
    assert!((25..=40).contains(&seconds), "{seconds}");
}

#[test]
fn arbitrary_traffic_leaves_nothing_behind() {
    for seed in 0..120 {
        let mut rng = WyRand::new(seed);
        let bytes: Vec<u8> = (0..rng.next_bits() % 400).map(|_| rng.next_bits() as u8).collect();
        any_bytes(&bytes);
        // Small numbers make valid commands.
        let small: Vec<u8> = bytes.iter().map(|byte| if byte % 3 == 0 { byte % 8 } else { 0 }).collect();
        any_bytes(&[&[seed as u8 | 0x19], &small[..]].concat());
    }
}

#[test]
fn a_flush_has_no_range_whatever_its_fields_say() {
    let mut target = SimulatedTarget::new(1, NetworkFaults::default());
    let mut client = Client::begin(&mut target);
    client.request(&mut target, NbdCommand::Flush, usize::MAX, &[], u32::MAX as usize);
    assert_eq!(client.reply(&mut target).error, 0);
}

#[test]
fn a_write_of_qemu_10_has_payload_without_the_flag() {
    let mut target = SimulatedTarget::new(1, NetworkFaults::default());
    let mut client = Client::begin_with(&mut target, &[OptionCode::ExtendedHeaders]);
    // Captured from qemu-io 10.0.13: `write -P 0x5a 4096 4096`, whose only flag is FUA.
    let mut write = vec![0x21, 0xe4, 0x1c, 0x71, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1];
    write.extend([0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0x10, 0]);
    write.extend([0x5a; 4096]);
    let flags = CommandFlags::empty();
    let read =
        RequestHeader { flags, command: NbdCommand::Read.into(), cookie: 2, offset: 4096, length: 4096 };
    let mut bytes = [0; 32];
    read.encode(HeaderForm::Extended, &mut bytes);
    write.extend(bytes);
    client.send(&mut target, &write);

    let chunk = ChunkHeader::decode(HeaderForm::Extended, &client.read(&mut target, 32)).unwrap();
    assert_eq!((chunk.kind, chunk.cookie, chunk.length), (ChunkKind::None, 1, 0));
    let chunk = ChunkHeader::decode(HeaderForm::Extended, &client.read(&mut target, 32)).unwrap();
    assert_eq!((chunk.kind, chunk.cookie, chunk.length), (ChunkKind::OffsetData, 2, 8 + 4096));
    assert_eq!(client.read(&mut target, 8 + 4096)[8..], [0x5a; 4096]);
}

#[test]
fn a_request_waits_for_a_bounded_number_of_requests_of_other_connections() {
    const OTHERS: usize = 8;
    // Their data counts as well: so many requests are begun in a turn.
    for (burst, bytes, begun_max) in [(120, BLOCK_BYTES, 32), (16, 256 << 10, 4)] {
        let mut target = SimulatedTarget::new(1, NetworkFaults::default());
        let mut clients: Vec<_> = (0..=OTHERS).map(|_| Client::begin(&mut target)).collect();
        let mut honest = clients.pop().unwrap();
        let before = target.reads();
        for client in &mut clients {
            (0..burst).for_each(|_| client.request(&mut target, NbdCommand::Read, 0, &[], bytes));
        }
        honest.request(&mut target, NbdCommand::Read, 0, &[], BLOCK_BYTES);
        assert_eq!(target.reads(), before, "nothing was sent in turns before");
        assert_eq!(honest.reply(&mut target).error, 0);
        // What all others may begin in the turn in which it arrives, and in the one before.
        let begun = target.reads() - before;
        let all = (OTHERS * burst) as u64 + 1;
        assert!(begun <= 2 * (OTHERS * begun_max) as u64 + 1 && begun < all, "{begun} requests came first");
        for client in &mut clients {
            for _ in 0..burst {
                assert_eq!(client.reply(&mut target).error, 0);
                client.read(&mut target, bytes);
            }
        }
        assert_eq!(target.reads() - before, all, "every request is executed");
    }
}

/// Reserves the disk for a host that is registered, with this type.
fn reserve(target: &SimulatedTarget, kind: ReservationType) {
    let holder = Registrant::nvme_host([1; 16]);
    for command in
        [ReservationCommand::Register { key: 1, persist: None }, ReservationCommand::Acquire { key: 1, kind }]
    {
        let change = target.reservations.reservations().execute(&holder, command, Arc::new(NoWaker));
        assert_eq!(change.outcome(), Some(Ok(())));
    }
}

fn unreserve(target: &SimulatedTarget) {
    let holder = Registrant::nvme_host([1; 16]);
    let reservations = target.reservations.reservations();
    let change = reservations.execute(&holder, ReservationCommand::Clear { key: 1 }, Arc::new(NoWaker));
    assert_eq!(change.outcome(), Some(Ok(())));
}

#[derive(Debug)]
struct NoWaker;

impl ChangeWaker for NoWaker {
    fn wake(&self) {}
}

#[test]
fn a_reservation_of_another_host_refuses_writes_or_all_io_until_it_is_released() {
    const EPERM: u32 = 1;
    let mut target = SimulatedTarget::new(1, NetworkFaults::default());
    // It is connected, and has written, before.
    let mut client = Client::begin(&mut target);
    client.request(&mut target, NbdCommand::Write, 0, &[7; BLOCK_BYTES], BLOCK_BYTES);
    assert_eq!(client.reply(&mut target).error, 0);
    for (kind, reads) in
        [(ReservationType::WriteExclusive, true), (ReservationType::ExclusiveAccessRegistrants, false)]
    {
        reserve(&target, kind);
        // The last is a part of a block, which the target reads and compares first.
        for (command, length) in [
            (NbdCommand::Write, BLOCK_BYTES),
            (NbdCommand::Write, DISK_BYTES),
            (NbdCommand::WriteZeroes, BLOCK_BYTES),
            (NbdCommand::Trim, BLOCK_BYTES),
            (NbdCommand::Flush, 0),
            (NbdCommand::Write, 10),
        ] {
            let data = if command == NbdCommand::Write { &[9; DISK_BYTES][..length] } else { &[] };
            client.request(&mut target, command, 0, data, length);
            assert_eq!(client.reply(&mut target).error, EPERM, "{kind:?} {command:?} {length}");
        }
        client.request(&mut target, NbdCommand::Read, 0, &[], BLOCK_BYTES);
        let reply = client.reply(&mut target);
        assert_eq!(reply.error, if reads { 0 } else { EPERM }, "{kind:?}");
        if reads {
            assert_eq!(client.read(&mut target, BLOCK_BYTES), [7; BLOCK_BYTES]);
        }
        unreserve(&target);
        client.request(&mut target, NbdCommand::Write, 0, &[7; BLOCK_BYTES], BLOCK_BYTES);
        assert_eq!(client.reply(&mut target).error, 0);
    }
}

#[test]
fn parts_of_a_block_that_one_connection_writes_take_turns() {
    const PARTS: usize = 40;
    const BYTES: usize = 7;
    let mut target = SimulatedTarget::new(1, NetworkFaults::default());
    let mut client = Client::begin(&mut target);
    let before = target.reads();
    for part in 0..PARTS {
        client.request(&mut target, NbdCommand::Write, part * BYTES, &[part as u8 + 1; BYTES], BYTES);
    }
    for _ in 0..PARTS {
        assert_eq!(client.reply(&mut target).error, 0);
    }
    // None began again.
    assert_eq!(target.reads() - before, PARTS as u64);
    client.request(&mut target, NbdCommand::Read, 0, &[], BLOCK_BYTES);
    assert_eq!(client.reply(&mut target).error, 0);
    let block = client.read(&mut target, BLOCK_BYTES);
    let expected: Vec<u8> = (0..PARTS).flat_map(|part| [part as u8 + 1; BYTES]).collect();
    assert_eq!(block[..PARTS * BYTES], expected);
}

/// Whether a read and a write of 64 KiB are answered within a millisecond.
fn is_served(client: &mut Client, target: &mut SimulatedTarget) -> bool {
    const BYTES: usize = 64 << 10;
    client.request(target, NbdCommand::Read, 0, &[], BYTES);
    client.request(target, NbdCommand::Write, 0, &[7; BYTES], BYTES);
    for _ in 0..100 {
        target.poll();
        target.receive(client.id, &mut client.received);
    }
    let is_answered = client.received.len() == 16 + BYTES + 16;
    client.received.clear();
    is_answered
}

/// How hostile clients begin, and what they do each second.
type Hostile = (fn(&mut Client, &mut SimulatedTarget), fn(&mut Client, &mut SimulatedTarget, u64));

#[test]
fn clients_that_never_read_trickle_or_owe_payload_do_not_stop_others() {
    const HOSTILE: usize = 120;
    fn wait(_: &mut Client, _: &mut SimulatedTarget, _: u64) {}
    let kinds: [Hostile; 3] = [
        // Deaf.
        (
            |client, target| {
                (0..16).for_each(|_| client.request(target, NbdCommand::Read, 0, &[], 64 << 10));
            },
            wait,
        ),
        // Silent, after a part of the payload.
        (|client, target| client.request(target, NbdCommand::Write, 0, &[1; 100], 256 << 10), wait),
        // The same, and 4 bytes each 4 s.
        (
            |client, target| client.request(target, NbdCommand::Write, 0, &[1; 100], 256 << 10),
            |client, target, second| {
                if second % 4 == 0 {
                    target.send(client.id, &[1; 4]);
                }
            },
        ),
    ];
    for (number, (begin, each_second)) in kinds.into_iter().enumerate() {
        // Each of them could have half of the memory.
        let mut target = SimulatedTarget::with_memory(16 << 20);
        let id = target.connect_from("10.0.0.7:1");
        let mut other = Client::negotiate(&mut target, id, &[]);
        let mut same = Client::begin(&mut target);
        for _ in 0..2 {
            // Both make progress, one at the address of the hostile ones.
            assert!(is_served(&mut other, &mut target) && is_served(&mut same, &mut target));
            target.now_ns += 1_000_000_000;
        }
        let mut hostile: Vec<_> = (0..HOSTILE).map(|_| Client::begin(&mut target)).collect();
        for client in &mut hostile {
            begin(client, &mut target);
            target.poll();
            assert!(is_served(&mut other, &mut target) && is_served(&mut same, &mut target), "kind {number}");
        }
        for second in 1..=6 {
            target.now_ns += 1_000_000_000;
            for client in &mut hostile {
                each_second(client, &mut target, second);
            }
            assert!(is_served(&mut other, &mut target), "kind {number}, second {second}");
            assert!(is_served(&mut same, &mut target), "kind {number}, second {second}");
        }
        let left = target.group.connections().len() - 2;
        assert!(left < HOSTILE / 2, "kind {number}: {left} are left, although others lack memory");
        // A client that connects now is served, too.
        let id = target.connect_from("10.0.0.8:1");
        let mut late = Client::negotiate(&mut target, id, &[]);
        assert!(is_served(&mut late, &mut target), "kind {number}");
    }
}

#[test]
fn a_slow_client_is_served_while_there_is_memory() {
    let mut target = SimulatedTarget::new(1, NetworkFaults::default());
    let mut client = Client::begin(&mut target);
    // 2 KiB each 10 s of a write, and then of a read: far longer than any time-out.
    client.request(&mut target, NbdCommand::Write, 0, &[], 64 << 10);
    for _ in 0..32 {
        for _ in 0..10 {
            target.now_ns += 1_000_000_000;
            target.poll();
        }
        client.send(&mut target, &[9; 2048]);
    }
    assert_eq!(client.reply(&mut target).error, 0);
    client.request(&mut target, NbdCommand::Read, 0, &[], DISK_BYTES);
    let mut left = 16 + DISK_BYTES;
    while left > 0 {
        for _ in 0..10 {
            target.now_ns += 1_000_000_000;
            target.poll();
        }
        // It reads at most 64 KiB.
        let received = target.receive(client.id, &mut client.received).expect("the connection is open");
        left -= received;
    }
    assert_eq!(client.received[16..][..64 << 10], [9; 64 << 10]);
}

#[test]
fn an_export_and_an_address_leave_connections_to_others() {
    let mut target = SimulatedTarget::new(1, NetworkFaults::default());
    let limits = ConnectionLimits { max: 100, per_peer_max: Some(20), per_object_max: Some(30) };
    target.group.set_limits(limits);
    let mut begin = |peer: &str| {
        let id = target.connect_from(peer);
        let mut hello = vec![0, 0, 0, 3];
        hello.extend(OptionHeader { option: OptionCode::ExportName as u32, length: 4 }.to_bytes());
        hello.extend(b"disk");
        target.send(id, &hello);
        (0..10).for_each(|_| target.poll());
        // One too many is closed after the answer that ends its handshake, at the latest.
        let mut received = Vec::new();
        [(); 2].map(|()| target.receive(id, &mut received).is_some()) == [true; 2] && !received.is_empty()
    };
    let admitted = |count: usize| (0..count).map(|port| format!("10.0.0.1:{}", port + 1));
    assert_eq!(admitted(40).filter(|peer| begin(peer)).count(), 20);
    let others = (0..40).map(|host| format!("10.0.1.{host}:1"));
    assert_eq!(others.filter(|peer| begin(peer)).count(), 10, "30 in all");
}
