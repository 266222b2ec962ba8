//! Sent PDUs arrive unchanged, however the stream is split.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

use proptest::prelude::*;
use sockets::{
    ByteStream, ConnectionId, Listen, Network, NetworkEvent, NetworkFaults, RejectedSend, SendPart,
    SimulatedNetwork, StreamAddress, TransferResult,
};
use wire_nvme::digest::crc32c;
use wire_nvme::tcp::{C2hData, FatalError, FatalStatus, Framing, PduLayout, PduType, SHORT_SIZE};

use super::*;

/// Records the data of every PDU; makes each header wait `deferrals` times.
#[derive(Default)]
struct RecordingConsumer {
    deferrals: u32,
    deferred: u32,
    current: Vec<u8>,
    done: Vec<(u16, Vec<u8>, bool)>,
    cccid: u16,
    /// The data lies in buffers of this many bytes; 0 for one buffer.
    slice_bytes: usize,
    /// Reads into several buffers at once.
    scattered: usize,
}

impl PduConsumer for RecordingConsumer {
    fn header(
        &mut self,
        kind: PduType,
        header: &[u8],
        layout: &PduLayout,
    ) -> Result<DataPlacement, FatalError> {
        assert_eq!(kind, PduType::C2hData);
        if self.deferred < self.deferrals {
            self.deferred += 1;
            return Ok(DataPlacement::Wait);
        }
        self.deferred = 0;
        let data = C2hData::decode(header.first_chunk::<SHORT_SIZE>().unwrap());
        self.cccid = data.cccid;
        self.current = vec![0; layout.data_length as usize];
        if data.cccid.is_multiple_of(7) { Ok(DataPlacement::Discard) } else { Ok(DataPlacement::Buffer) }
    }

    fn data_buffer(&mut self, offset: usize, length: usize) -> &mut [u8] {
        let room = match self.slice_bytes {
            0 => length,
            bytes => bytes - offset % bytes,
        };
        &mut self.current[offset..offset + length.min(room)]
    }

    fn data_buffers<'c>(&'c mut self, offset: usize, length: usize, parts: &mut DataParts<'c>) {
        self.scattered += 1;
        let mut rest = &mut self.current[offset..offset + length];
        let mut room = self.slice_bytes - offset % self.slice_bytes;
        while !rest.is_empty() && !parts.is_full() {
            let (head, tail) = rest.split_at_mut(room.min(rest.len()));
            parts.push(IoSliceMut::new(head));
            (rest, room) = (tail, self.slice_bytes);
        }
    }

    fn pdu_complete(&mut self, digest_ok: bool) -> Result<(), FatalError> {
        self.done.push((self.cccid, std::mem::take(&mut self.current), digest_ok));
        Ok(())
    }
}

/// Data by slot, and the slots that were released.
struct TestSource {
    data: Vec<Vec<u8>>,
    sent: Vec<u32>,
}

impl SegmentSource for TestSource {
    fn bytes(&self, slot: u32, start: usize, length: usize) -> &[u8] {
        &self.data[slot as usize][start..start + length]
    }

    fn sent(&mut self, slot: u32) {
        self.sent.push(slot);
    }
}

fn queue(sender: &mut PduSender, framing: &Framing, slot: u32, data: &[u8]) {
    let mut header = [0; SHORT_SIZE];
    let length = data.len() as u32;
    let pdu = C2hData { cccid: slot as u16, offset: 0, length, last: true, success: true };
    let layout = pdu.encode(framing, &mut header);
    sender.push_header(&header, &layout);
    sender.push_data(slot, 0, length, true);
    if layout.data_digest {
        sender.push_bytes(&crc32c(data).to_le_bytes());
    }
}

fn framings() -> impl Strategy<Value = Framing> {
    (any::<bool>(), any::<bool>(), 1u8..=32).prop_map(|(header_digest, data_digest, dwords)| Framing {
        header_digest,
        data_digest,
        data_alignment_bytes: dwords * 4,
    })
}

/// The state of a record layer: like TLS it cannot use a part of a record, and keeps what was not read or written.
#[derive(Default)]
struct RecordSession {
    incomplete: Vec<u8>,
    plaintext: VecDeque<u8>,
    unsent: VecDeque<u8>,
}

/// A stream over records of at most 1,000 bytes, each with its length in two bytes before it.
struct RecordStream<'a, S> {
    session: &'a mut RecordSession,
    below: S,
}

const KEY: u8 = 0x5a;

impl<S: ByteStream> ByteStream for RecordStream<'_, S> {
    fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        let requested: usize = parts.iter().map(|part| part.len()).sum();
        let RecordSession { incomplete, plaintext, .. } = &mut *self.session;
        while plaintext.len() < requested {
            let mut bytes = [0; 700];
            match self.below.receive(&mut [IoSliceMut::new(&mut bytes)]) {
                TransferResult::Bytes(count) => incomplete.extend(&bytes[..count]),
                _ if !plaintext.is_empty() => break,
                result => return result,
            }
            while let [low, high, rest @ ..] = &incomplete[..]
                && let length = usize::from(u16::from_le_bytes([*low, *high]))
                && let Some(record) = rest.get(..length)
            {
                plaintext.extend(record.iter().map(|byte| byte ^ KEY));
                incomplete.drain(..2 + length);
            }
        }
        let mut received = 0;
        for part in parts {
            let count = part.len().min(plaintext.len());
            for (to, from) in part.iter_mut().zip(plaintext.drain(..count)) {
                *to = from;
            }
            received += count;
        }
        TransferResult::Bytes(received)
    }

    fn send(&mut self, parts: &[IoSlice<'_>]) -> TransferResult {
        let offered: Vec<u8> = parts.iter().flat_map(|part| part.iter()).copied().collect();
        let mut accepted = 0;
        for record in offered.chunks(1000) {
            match self.flush() {
                FlushStatus::Empty => {}
                FlushStatus::Blocked if accepted > 0 => break,
                FlushStatus::Blocked => return TransferResult::Blocked,
                FlushStatus::Failed(kind) => return TransferResult::Failed(kind),
            }
            self.session.unsent.extend((record.len() as u16).to_le_bytes());
            self.session.unsent.extend(record.iter().map(|byte| byte ^ KEY));
            accepted += record.len();
        }
        TransferResult::Bytes(accepted)
    }

    fn flush(&mut self) -> FlushStatus {
        while !self.session.unsent.is_empty() {
            match self.below.send(&[IoSlice::new(self.session.unsent.as_slices().0)]) {
                TransferResult::Bytes(count) => drop(self.session.unsent.drain(..count)),
                TransferResult::Blocked => return FlushStatus::Blocked,
                TransferResult::Closed => return FlushStatus::Failed(std::io::ErrorKind::BrokenPipe),
                TransferResult::Failed(kind) => return FlushStatus::Failed(kind),
            }
        }
        FlushStatus::Empty
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 200 }))]

    #[test]
    fn pdus_arrive_unchanged_with_splits_stalls_and_deferrals(
        framing in framings(),
        sizes in prop::collection::vec(1usize..9000, 1..40),
        seed: u64,
        deferrals in 0u32..3,
        scratch in 1usize..6000,
        slice_bytes in prop_oneof![Just(0), 1usize..3000],
        records: bool,
    ) {
        let data: Vec<Vec<u8>> =
            sizes.iter().enumerate().map(|(n, size)| (0..*size).map(|at| (at * 31 + n) as u8).collect()).collect();
        let faults = NetworkFaults { cut_per_mille: 400, stall_per_mille: 100, break_per_mille: 0 };
        let (mut near, mut far) = SimulatedNetwork::pair(seed, faults);
        let address: StreamAddress = "10.0.0.1:4420".parse().unwrap();
        far.listen(&address).unwrap();
        let stream = near.connect(address);
        let near_id = near.add(stream).unwrap();
        let mut events = Vec::new();
        far.poll(&mut events);
        let Some(NetworkEvent::Incoming { stream, .. }) = events.pop() else { panic!("no connection") };
        let far_id = far.add(stream).unwrap();

        let (mut sender, mut receiver) = (PduSender::default(), PduReceiver::default());
        let mut consumer = RecordingConsumer { deferrals, slice_bytes, ..RecordingConsumer::default() };
        receiver.set_framing(framing);
        let mut source = TestSource { data: data.clone(), sent: Vec::new() };
        for (slot, data) in data.iter().enumerate() {
            queue(&mut sender, &framing, slot as u32, data);
        }
        let mut scratch = vec![0; scratch];
        let (mut near_session, mut far_session) = (RecordSession::default(), RecordSession::default());
        while consumer.done.len() < data.len() {
            let (mut from, mut to) = (near.stream(near_id), far.stream(far_id));
            let flushed = match records {
                false => sender.flush(&mut from, &mut source),
                true => sender.flush(&mut RecordStream { session: &mut near_session, below: from }, &mut source),
            };
            prop_assert!(!matches!(flushed, FlushStatus::Failed(_)));
            let pumped = match records {
                false => receive_pdus(&mut receiver, &mut consumer, &mut to, &mut scratch),
                true => {
                    let mut to = RecordStream { session: &mut far_session, below: to };
                    receive_pdus(&mut receiver, &mut consumer, &mut to, &mut scratch)
                }
            };
            let pumped = pumped.unwrap();
            prop_assert!(!matches!(pumped, ReceiveStatus::Closed | ReceiveStatus::Failed(_)));
        }
        prop_assert!(receiver.is_between_pdus());
        prop_assert_eq!(&source.sent, &(0..data.len() as u32).collect::<Vec<_>>());
        for (slot, (cccid, received, digest_ok)) in consumer.done.iter().enumerate() {
            prop_assert_eq!(usize::from(*cccid), slot);
            prop_assert!(*digest_ok);
            if slot % 7 != 0 {
                prop_assert_eq!(received, &data[slot]);
            }
        }
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..600), framing in framings()) {
        struct Sink(Vec<u8>);
        impl PduConsumer for Sink {
            fn header(&mut self, _: PduType, _: &[u8], layout: &PduLayout) -> Result<DataPlacement, FatalError> {
                self.0 = vec![0; (layout.data_length as usize).min(1 << 16)];
                Ok(if layout.data_length < 1 << 16 { DataPlacement::Buffer } else { DataPlacement::Discard })
            }
            fn data_buffer(&mut self, offset: usize, length: usize) -> &mut [u8] {
                &mut self.0[offset..offset + length]
            }
            fn pdu_complete(&mut self, _: bool) -> Result<(), FatalError> {
                Ok(())
            }
        }
        let mut receiver = PduReceiver::default();
        receiver.set_framing(framing);
        let _ = receiver.consume(&bytes, &mut Sink(Vec::new()));
    }
}

#[test]
#[should_panic(expected = "while a PDU waits for a buffer")]
fn bytes_beyond_a_waiting_pdu_are_saved_from_one_call_only() {
    let mut header = [0; SHORT_SIZE];
    C2hData { cccid: 1, offset: 0, length: 4, last: true, success: true }
        .encode(&Framing::PLAIN, &mut header);
    let (mut receiver, mut consumer) =
        (PduReceiver::default(), RecordingConsumer { deferrals: 1, ..RecordingConsumer::default() });
    let stream = [&header[..], b"da"].concat();
    assert_eq!(receiver.consume(&stream, &mut consumer), Ok(ReceiveProgress::Waiting));
    let _ = receiver.consume(b"ta", &mut consumer);
}

/// A network with a connection, and the other end.
type NetworkEnd = (SimulatedNetwork, ConnectionId);

fn connected() -> (NetworkEnd, NetworkEnd) {
    let (mut near, mut far) = SimulatedNetwork::pair(1, NetworkFaults::default());
    let address: StreamAddress = "10.0.0.1:4420".parse().unwrap();
    far.listen(&address).unwrap();
    let stream = near.connect(address);
    let near_id = near.add(stream).unwrap();
    let mut events = Vec::new();
    far.poll(&mut events);
    let Some(NetworkEvent::Incoming { stream, .. }) = events.pop() else { panic!("no connection") };
    let far_id = far.add(stream).unwrap();
    ((near, near_id), (far, far_id))
}

/// A stream that sends without a copy from 1,000 bytes on, and keeps what it is given.
#[derive(Default)]
struct OwningStream {
    owned: Vec<(u64, Vec<u8>)>,
    plain: Vec<u8>,
}

impl ByteStream for OwningStream {
    fn receive(&mut self, _parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        TransferResult::Blocked
    }

    fn send(&mut self, parts: &[IoSlice<'_>]) -> TransferResult {
        parts.iter().for_each(|part| self.plain.extend_from_slice(part));
        TransferResult::Bytes(parts.iter().map(|part| part.len()).sum())
    }

    fn zero_copy_min_bytes(&self) -> Option<usize> {
        Some(1000)
    }

    fn send_owned(&mut self, parts: Vec<SendPart>, tag: u64) -> Result<(), RejectedSend> {
        let bytes = |part: SendPart| match part {
            SendPart::Bytes(bytes) => bytes,
            SendPart::Buffer { .. } => panic!("the source has no buffers"),
        };
        self.owned.push((tag, parts.into_iter().flat_map(bytes).collect()));
        Ok(())
    }
}

#[test]
fn large_data_is_sent_as_owned_sends_and_released_when_they_end() {
    let data: Vec<Vec<u8>> = [0, 100, 2000, 50, 3000].map(|length| vec![length as u8; length]).into();
    let mut source = TestSource { data: data.clone(), sent: Vec::new() };
    let framing = Framing { header_digest: true, data_digest: true, data_alignment_bytes: 4 };
    let push = |sender: &mut PduSender, slot: u32| queue(sender, &framing, slot, &data[slot as usize]);
    let bytes_of = |slots: &[u32]| {
        let (mut sender, mut stream) = (PduSender::default(), OwningStream::default());
        let mut source = TestSource { data: data.clone(), sent: Vec::new() };
        slots.iter().for_each(|slot| push(&mut sender, *slot));
        assert_eq!(sender.flush(&mut stream, &mut source), FlushStatus::Empty);
        assert!(stream.owned.is_empty(), "a queue makes owned sends only if its owner passes on their ends");
        stream.plain
    };
    let (mut sender, mut stream) = (PduSender::default(), OwningStream::default());
    sender.enable_owned_sends();
    push(&mut sender, 1);
    assert_eq!(sender.flush(&mut stream, &mut source), FlushStatus::Empty);
    assert_eq!((&stream.plain, &source.sent[..]), (&bytes_of(&[1]), &[1][..]), "small data is sent at once");
    assert!(sender.is_empty());

    push(&mut sender, 2);
    assert_eq!(sender.flush(&mut stream, &mut source), FlushStatus::Empty);
    // This one must not overtake it, however small.
    push(&mut sender, 3);
    assert_eq!(sender.flush(&mut stream, &mut source), FlushStatus::Empty);
    assert_eq!(stream.owned, [(0, bytes_of(&[2])), (1, bytes_of(&[3]))]);
    assert_eq!((&source.sent[..], sender.is_empty(), sender.owned_sends()), (&[1][..], false, 2));
    assert!(sender.position().is_some(), "the peer has still to receive it");
    sender.owned_sent(1, &mut source);
    sender.owned_sent(1, &mut source);
    assert_eq!((&source.sent[..], sender.is_empty()), (&[1, 3][..], false));
    sender.owned_sent(0, &mut source);
    assert_eq!((&source.sent[..], sender.is_empty()), (&[1, 3, 2][..], true));
}

#[test]
fn owned_sends_are_limited_and_continue_as_they_end() {
    let mut source = TestSource { data: vec![vec![7; 1000]], sent: Vec::new() };
    let (mut sender, mut stream) = (PduSender::default(), OwningStream::default());
    sender.enable_owned_sends();
    let mut count = 0;
    loop {
        queue(&mut sender, &Framing::PLAIN, 0, &[7; 1000]);
        count += 1;
        if sender.flush(&mut stream, &mut source) == FlushStatus::Blocked {
            break;
        }
        assert!(count < 1000, "no limit");
    }
    assert_eq!((stream.owned.len(), sender.owned_sends()), (count - 1, count - 1));
    sender.owned_sent(3, &mut source);
    assert_eq!(sender.flush(&mut stream, &mut source), FlushStatus::Empty);
    assert_eq!((stream.owned.len(), stream.owned[count - 1].0), (count, 3));
}

#[test]
fn data_of_owned_sends_is_released_once_after_a_failure() {
    let mut source = TestSource { data: vec![vec![7; 4000]; 3], sent: Vec::new() };
    let (mut sender, mut stream) = (PduSender::default(), OwningStream::default());
    sender.enable_owned_sends();
    // The data of slot 1 goes in two sends, and not whole.
    for (start, release) in [(0, false), (2000, false), (3000, true)] {
        sender.push_data(1, start, 1000, release);
        if !release {
            sender.push_data(2, start, 1000, start > 0);
            assert_eq!(sender.flush(&mut stream, &mut source), FlushStatus::Empty);
        }
    }
    sender.push_data(0, 0, 4000, true);
    assert_eq!(stream.owned.len(), 2);
    assert_eq!(sender.abandon(), [1, 2], "nothing has the data of slot 0");
    sender.owned_sent(0, &mut source);
    assert_eq!(source.sent, []);
    sender.owned_sent(1, &mut source);
    assert_eq!((&source.sent[..], sender.is_empty()), (&[1, 2][..], true));
}

#[test]
fn a_read_that_finds_nothing_differs_from_one_that_ends_a_batch() {
    let ((mut near, near_id), (mut far, far_id)) = connected();
    let mut receiver = PduReceiver::default();
    let mut consumer = RecordingConsumer { deferrals: 1, ..RecordingConsumer::default() };
    let mut receive = |far: &mut SimulatedNetwork| {
        let status = receive_pdus(&mut receiver, &mut consumer, &mut far.stream(far_id), &mut [0; 256]);
        (status.unwrap(), consumer.done.len())
    };
    assert_eq!(receive(&mut far), (ReceiveStatus::Empty, 0));
    let (mut sender, mut source) =
        (PduSender::default(), TestSource { data: vec![Vec::new(), vec![7; 4]], sent: Vec::new() });
    queue(&mut sender, &Framing::PLAIN, 1, &[7; 4]);
    assert_eq!(sender.flush(&mut near.stream(near_id), &mut source), FlushStatus::Empty);
    assert_eq!(receive(&mut far), (ReceiveStatus::Waiting, 0));
    // Nothing arrives, but the saved bytes are processed now.
    assert_eq!(receive(&mut far), (ReceiveStatus::Drained, 1));
    assert_eq!(receive(&mut far), (ReceiveStatus::Empty, 1));
}

#[test]
fn data_in_several_buffers_is_received_in_one_read() {
    let ((mut near, near_id), (mut far, far_id)) = connected();
    let framing = Framing { header_digest: false, data_digest: true, data_alignment_bytes: 4 };
    let data: Vec<u8> = (0..10_000).map(|at| (at % 251) as u8).collect();
    let (mut sender, mut source) =
        (PduSender::default(), TestSource { data: vec![Vec::new(), data.clone()], sent: Vec::new() });
    queue(&mut sender, &framing, 1, &data);
    assert_eq!(sender.flush(&mut near.stream(near_id), &mut source), FlushStatus::Empty);
    let mut receiver = PduReceiver::default();
    receiver.set_framing(framing);
    let mut consumer = RecordingConsumer { slice_bytes: 1000, ..RecordingConsumer::default() };
    // Scratch for the header only: the data goes to its ten buffers.
    let status = receive_pdus(&mut receiver, &mut consumer, &mut far.stream(far_id), &mut [0; SHORT_SIZE]);
    assert_eq!(status, Ok(ReceiveStatus::Drained));
    assert_eq!((consumer.scattered, &consumer.done[..]), (1, &[(1, data, true)][..]));
}

#[test]
fn headers_that_repeat_are_checked_against_new_framing() {
    let mut header = [0; SHORT_SIZE];
    let pdu = C2hData { cccid: 1, offset: 0, length: 4, last: true, success: true };
    _ = pdu.encode(&Framing::PLAIN, &mut header);
    let stream = [&header[..], b"data"].concat();
    let (mut receiver, mut consumer) = (PduReceiver::default(), RecordingConsumer::default());
    for _ in 0..2 {
        assert_eq!(receiver.consume(&stream, &mut consumer), Ok(ReceiveProgress::Ready));
    }
    assert_eq!(consumer.done, vec![(1, b"data".to_vec(), true); 2]);
    // The same bytes have no header digest, which is required now.
    receiver.set_framing(Framing { header_digest: true, ..Framing::PLAIN });
    assert!(receiver.consume(&stream, &mut consumer).is_err());
    assert_eq!(consumer.done.len(), 2);
}

#[test]
fn header_and_data_digest_errors_are_distinguished() {
    let framing = Framing { header_digest: true, data_digest: true, data_alignment_bytes: 4 };
    let mut stream = Vec::new();
    let mut header = [0; SHORT_SIZE];
    let data = C2hData { cccid: 1, offset: 0, length: 4, last: true, success: true };
    let layout = data.encode(&framing, &mut header);
    stream.extend(header);
    stream.extend(crc32c(&header).to_le_bytes());
    assert_eq!(stream.len(), layout.prefix_length());
    stream.extend(b"data");
    stream.extend(crc32c(b"data").to_le_bytes());

    let receive = |stream: &[u8]| {
        let (mut receiver, mut consumer) = (PduReceiver::default(), RecordingConsumer::default());
        receiver.set_framing(framing);
        let result = receiver.consume(stream, &mut consumer);
        (result, consumer.done, receiver.failed_header().to_vec())
    };
    assert_eq!(receive(&stream).1, [(1, b"data".to_vec(), true)]);
    let mut corrupt = stream.clone();
    corrupt[30] ^= 1;
    let (result, done, _) = receive(&corrupt);
    assert_eq!(
        (result, done[0].2),
        (Ok(ReceiveProgress::Ready), false),
        "a data digest error fails the command only"
    );
    let mut corrupt = stream.clone();
    corrupt[9] ^= 1;
    let (result, done, in_error) = receive(&corrupt);
    let information = u32::from_le_bytes(*corrupt[SHORT_SIZE..].first_chunk().unwrap());
    assert_eq!(result, Err(FatalError { status: FatalStatus::HeaderDigestError, information }));
    assert_eq!((done.len(), &in_error[..]), (0, &corrupt[..SHORT_SIZE]));
}
