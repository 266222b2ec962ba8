//! File descriptors arrive with their bytes, within limits, over kernel sockets and simulated ones.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use super::*;

/// A file with a number in it.
fn numbered(number: u32) -> OwnedFd {
    let file = rustix::fs::memfd_create("number", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    File::from(file.try_clone().unwrap()).write_all(&number.to_le_bytes()).unwrap();
    file
}

fn number_in(file: OwnedFd) -> u32 {
    let (mut file, mut bytes) = (File::from(file), [0; 4]);
    file.rewind().unwrap();
    file.read_exact(&mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

fn unix_pair(sockets: &mut Sockets) -> (ConnectionId, ConnectionId) {
    let (near, far) = UnixStream::pair().unwrap();
    (sockets.add(near.into()).unwrap(), sockets.add(far.into()).unwrap())
}

fn receive(
    sockets: &mut Sockets,
    connection: ConnectionId,
    received: &mut ReceivedDescriptors,
) -> TransferResult {
    sockets.receive_with_descriptors(connection, &mut [IoSliceMut::new(&mut [0; 8])], received)
}

/// A pipe whose writing end was sent and closed here: its reader sees the end once the receiver closes it too.
fn sent_pipe(sockets: &mut Sockets, from: ConnectionId) -> OwnedFd {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let sent = sockets.send_with_descriptors(from, &[IoSlice::new(b"x")], &[writer.as_fd()]);
    assert!(matches!(sent, TransferResult::Bytes(1)));
    rustix::io::ioctl_fionbio(&reader, true).unwrap();
    reader
}

fn is_closed(reader: &OwnedFd) -> bool {
    match rustix::io::read(reader, &mut [0]) {
        Ok(0) => true,
        Err(rustix::io::Errno::WOULDBLOCK) => false,
        other => panic!("{other:?}"),
    }
}

/// Sends messages with descriptors until all have arrived, through reads that end anywhere; `turn` lets time pass.
fn exchange<N: Network>(
    networks: &mut [N],
    near: (usize, ConnectionId),
    far: (usize, ConnectionId),
    mut turn: impl FnMut(&mut [N]),
) {
    const MESSAGES: u32 = 60;
    let length_of = |message: u32| 1 + (message as usize * 7919) % 30_000;
    let count_of = |message: u32| if message == 7 { DESCRIPTORS_PER_MESSAGE_MAX as u32 } else { message % 4 };
    let mut queue = MessageQueue::new(100_000, 300);
    let (mut pushed, mut starts, mut received) = (0, vec![0], 0);
    let mut descriptors = ReceivedDescriptors::new(DESCRIPTORS_PER_MESSAGE_MAX);
    let (mut arrived, mut buffer) = (vec![], vec![0; 5000]);
    let start = Instant::now();
    while pushed < MESSAGES || received < starts[MESSAGES as usize] {
        assert!(start.elapsed() < Duration::from_secs(60), "{received} bytes of {pushed} messages");
        if pushed < MESSAGES {
            let bytes = vec![pushed as u8; length_of(pushed)];
            let attached = (0..count_of(pushed)).map(|index| numbered(pushed << 16 | index)).collect();
            if queue.push(&[&bytes[..1], &bytes[1..]], attached).is_ok() {
                starts.push(starts[pushed as usize] + bytes.len());
                pushed += 1;
            }
        }
        let flushed = queue
            .flush(|parts, descriptors| networks[near.0].send_with_descriptors(near.1, parts, descriptors));
        assert!(!matches!(flushed, FlushStatus::Failed(_)), "{flushed:?}");
        turn(networks);
        let size = 1 + received * 31 % buffer.len();
        let parts = &mut [IoSliceMut::new(&mut buffer[..size])];
        match networks[far.0].receive_with_descriptors(far.1, parts, &mut descriptors) {
            TransferResult::Bytes(count) => {
                for (at, byte) in (received..).zip(&buffer[..count]) {
                    let message = starts.partition_point(|start| *start <= at) - 1;
                    assert_eq!(usize::from(*byte), message, "byte {at}");
                }
                for number in descriptors.take().into_iter().map(number_in) {
                    let place = starts[(number >> 16) as usize];
                    assert!((received..received + count).contains(&place), "{number:#x} at {received}");
                    arrived.push(number);
                }
                received += count;
            }
            TransferResult::Blocked => {}
            other => panic!("{other:?}"),
        }
    }
    let all =
        (0..MESSAGES).flat_map(|message| (0..count_of(message)).map(move |index| message << 16 | index));
    assert_eq!(arrived, all.collect::<Vec<_>>());
}

#[test]
fn descriptors_arrive_with_their_byte_however_often_messages_are_cut() {
    for events in engines() {
        let mut sockets = Sockets::new(&events);
        let (near, far) = UnixStream::pair().unwrap();
        // The smallest buffer that the kernel allows, so that writes are partial.
        rustix::net::sockopt::set_socket_send_buffer_size(&near, 1).unwrap();
        let near = sockets.add(near.into()).unwrap();
        let far = sockets.add(far.into()).unwrap();
        let mut network = [sockets];
        exchange(&mut network, (0, near), (0, far), |network| {
            events.turn();
            network[0].poll(&mut Vec::new());
        });
    }
}

#[test]
fn simulated_descriptors_arrive_with_their_byte_under_faults() {
    for seed in 1..20 {
        println!("seed {seed}");
        let faults = NetworkFaults { cut_per_mille: 500, stall_per_mille: 200, break_per_mille: 0 };
        let (mut near, mut far) = SimulatedNetwork::pair(seed, faults);
        let address = StreamAddress::Unix("/s".into());
        far.listen(&address).unwrap();
        let stream = near.connect(address);
        let near_id = near.add(stream).unwrap();
        let mut events = Vec::new();
        far.poll(&mut events);
        let Some(NetworkEvent::Incoming { stream, .. }) = events.pop() else { panic!("no connection") };
        let far_id = far.add(stream).unwrap();
        exchange(&mut [near, far], (0, near_id), (1, far_id), |_| {});
    }
}

#[test]
fn more_descriptors_than_a_message_carries_are_rejected() {
    for events in engines() {
        let mut sockets = Sockets::new(&events);
        let (near, far) = unix_pair(&mut sockets);
        let file = numbered(1);
        let many = vec![file.as_fd(); DESCRIPTORS_PER_MESSAGE_MAX + 1];
        let invalid = |result| matches!(result, TransferResult::Failed(io::ErrorKind::InvalidInput));
        assert!(invalid(sockets.send_with_descriptors(near, &[IoSlice::new(b"x")], &many)));
        assert!(invalid(sockets.send_with_descriptors(near, &[], &many[..1])), "no byte carries it");
        let sent = sockets.send_with_descriptors(near, &[IoSlice::new(b"x")], &many[1..]);
        assert!(matches!(sent, TransferResult::Bytes(1)));
        let mut received = ReceivedDescriptors::new(300);
        assert!(matches!(receive(&mut sockets, far, &mut received), TransferResult::Bytes(1)));
        assert_eq!((received.len(), received.room()), (DESCRIPTORS_PER_MESSAGE_MAX, 47));
        assert_eq!(received.pop().map(number_in), Some(1));
    }
}

#[test]
fn a_tcp_connection_carries_no_descriptors() {
    for events in engines() {
        let mut sockets = Sockets::new(&events);
        let (_peer, id) = connected(&events, &mut sockets, "127.0.0.1:0");
        let file = numbered(1);
        let sent = sockets.send_with_descriptors(id, &[IoSlice::new(b"x")], &[file.as_fd()]);
        assert!(matches!(sent, TransferResult::Failed(io::ErrorKind::Unsupported)), "{sent:?}");
        let sent = sockets.send_with_descriptors(id, &[IoSlice::new(b"x")], &[]);
        assert!(matches!(sent, TransferResult::Bytes(1)), "{sent:?}");
    }
}

#[test]
fn descriptors_above_the_limit_are_closed() {
    for events in engines() {
        for limit in 0..4 {
            let mut sockets = Sockets::new(&events);
            let (near, far) = unix_pair(&mut sockets);
            let mut received = ReceivedDescriptors::new(limit);
            let readers: Vec<OwnedFd> = (0..=limit).map(|_| sent_pipe(&mut sockets, near)).collect();
            for _ in 0..limit {
                let result = receive(&mut sockets, far, &mut received);
                assert!(matches!(result, TransferResult::Bytes(1)), "{result:?}");
            }
            let result = receive(&mut sockets, far, &mut received);
            assert!(matches!(result, TransferResult::Failed(io::ErrorKind::QuotaExceeded)), "{result:?}");
            assert!(is_closed(&readers[limit]));
            assert!(!readers[..limit].iter().any(is_closed));
            drop(received);
            assert!(readers.iter().all(is_closed), "dropped descriptors are closed");
        }
    }
}

#[test]
fn descriptors_that_are_not_taken_are_closed() {
    for events in engines() {
        let mut sockets = Sockets::new(&events);
        let (near, far) = unix_pair(&mut sockets);
        let read = sent_pipe(&mut sockets, near);
        assert_eq!(read_all(&mut sockets, far, 4, 4).0, b"x");
        assert!(is_closed(&read), "a plain receive closes them");
        let unread = sent_pipe(&mut sockets, near);
        assert!(!is_closed(&unread));
        sockets.close(far);
        // The kernel may still hold the file for the watch, until the next turn.
        let start = Instant::now();
        while !is_closed(&unread) {
            assert!(start.elapsed() < Duration::from_secs(20), "{events:?}");
            events.turn();
        }
    }
}

#[test]
fn the_end_of_the_stream_is_reported_with_descriptors_too() {
    for events in engines() {
        let mut sockets = Sockets::new(&events);
        let (near, far) = unix_pair(&mut sockets);
        let _reader = sent_pipe(&mut sockets, near);
        sockets.close(near);
        let mut received = ReceivedDescriptors::new(1);
        let mut closed = false;
        while !closed {
            wait(&events, &mut sockets);
            match receive(&mut sockets, far, &mut received) {
                TransferResult::Bytes(count) => assert_eq!(count, 1),
                TransferResult::Closed => closed = true,
                TransferResult::Blocked => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(received.len(), 1);
    }
}

#[test]
fn a_message_queue_has_a_limit() {
    let mut queue = MessageQueue::<OwnedFd>::new(10, 1);
    queue.push(&[b"123456"], vec![]).unwrap();
    assert!(queue.push(&[b"12345"], vec![]).is_err());
    assert!(queue.push(&[], vec![numbered(1)]).is_err(), "no byte carries it");
    assert!(queue.push(&[b"1234"], vec![numbered(1), numbered(2)]).is_err());
    queue.push(&[b"1234"], vec![numbered(1)]).unwrap();
    let mut calls = Vec::new();
    let flushed = queue.flush(|parts, descriptors| {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        calls.push((bytes, descriptors.len()));
        if calls.len() == 3 { TransferResult::Blocked } else { TransferResult::Bytes(bytes.min(5)) }
    });
    // The second call ends before the byte with the descriptor.
    assert_eq!((flushed, calls), (FlushStatus::Blocked, vec![(6, 0), (1, 0), (4, 1)]));
    assert!(!queue.is_empty());
    assert_eq!(queue.flush(|_, _| TransferResult::Bytes(1)), FlushStatus::Empty);
    assert!(queue.is_empty());
}
