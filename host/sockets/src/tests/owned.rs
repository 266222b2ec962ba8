//! Owned transfers behave the same with and without the kernel's help, over TCP and UNIX sockets.

use std::os::unix::net::UnixStream;

use dma::{Arena, Buffer, Pool};

use super::*;

/// Both engines, each with every combination of capabilities that it has.
fn variants() -> Vec<(EventLoop, OwnedTransferConfig)> {
    let mut all = Vec::new();
    for (zero_copy_send, multishot_receive) in [(false, false), (true, false), (false, true), (true, true)] {
        for events in engines() {
            let config = OwnedTransferConfig {
                receive_buffers: 4,
                receive_buffer_bytes: 4096,
                zero_copy_send,
                zero_copy_min_bytes: 1000,
                zero_copy_copies_max: 5,
                multishot_receive,
            };
            all.push((events, config));
        }
    }
    all
}

fn pool(chunks: usize) -> Pool {
    let limit_bytes = chunks * dma::BUFFER_BYTES_MAX * 2;
    Pool::new(&Arena::new(dma::ArenaConfig { limit_bytes, hugepages: false, ..dma::ArenaConfig::default() }))
}

fn sockets(events: &EventLoop, pool: &Pool, config: &OwnedTransferConfig) -> Sockets {
    let sockets = Sockets::new(events).with_owned_transfers(events, pool, config).unwrap();
    let capabilities = sockets.transfer_capabilities();
    let kernel = events.client().socket_capabilities();
    assert_eq!(capabilities.zero_copy_send, config.zero_copy_send && kernel.zero_copy_send);
    assert_eq!(capabilities.multishot_receive, config.multishot_receive && kernel.multishot_receive);
    sockets
}

/// A connection of each kind, with both ends in `sockets`.
fn pairs(sockets: &mut Sockets) -> Vec<(ConnectionId, ConnectionId)> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let tcp = (near.into(), listener.accept().unwrap().0.into());
    let (near, far) = UnixStream::pair().unwrap();
    let unix: (SocketStream, SocketStream) = (near.into(), far.into());
    [tcp, unix].map(|(near, far)| (sockets.add(near).unwrap(), sockets.add(far).unwrap())).into()
}

/// Turns until `done` finds what it waits for among the transfer events.
fn turn_until(
    events: &EventLoop,
    sockets: &mut Sockets,
    seen: &mut Vec<TransferEvent>,
    done: impl Fn(&[TransferEvent]) -> bool,
) {
    let start = Instant::now();
    let mut ready = Vec::new();
    while !done(seen) {
        assert!(start.elapsed() < Duration::from_secs(20), "{events:?}: {seen:?}");
        events.wait(Some(if sockets.is_pending() { 0 } else { 1_000_000_000 }));
        sockets.poll(&mut ready);
        sockets.reap_transfers(seen);
    }
}

fn sent_tags(seen: &[TransferEvent]) -> Vec<u64> {
    let tag = |event: &TransferEvent| match event {
        TransferEvent::Sent { tag, .. } => Some(*tag),
        _ => None,
    };
    seen.iter().filter_map(tag).collect()
}

fn received_bytes(seen: &[TransferEvent], from: ConnectionId) -> Vec<u8> {
    let bytes = |event: &TransferEvent| match event {
        TransferEvent::Received { connection, buffer } if *connection == from => {
            Some(buffer.as_slice().to_vec())
        }
        _ => None,
    };
    seen.iter().filter_map(bytes).flatten().collect()
}

fn end_of(seen: &[TransferEvent], of: ConnectionId) -> Option<ReceiveEnd> {
    seen.iter().find_map(|event| match event {
        TransferEvent::ReceiveEnded { connection, end } if *connection == of => Some(*end),
        _ => None,
    })
}

fn filled(pool: &Pool, bytes: usize, seed: u8) -> Buffer {
    let mut buffer = pool.take(bytes).unwrap();
    for (at, byte) in buffer.as_mut_slice().iter_mut().enumerate() {
        *byte = (at / 5) as u8 ^ seed;
    }
    buffer
}

#[test]
fn sends_arrive_in_order_and_return_their_parts() {
    for (events, config) in variants() {
        let pool = pool(32);
        let mut sockets = sockets(&events, &pool, &config);
        for (near, far) in pairs(&mut sockets) {
            sockets.start_receive(far).unwrap();
            let mut expected = Vec::new();
            for tag in 0..20u64 {
                let buffer = filled(&pool, 200_000, tag as u8);
                expected.extend(tag.to_le_bytes());
                expected.extend(&buffer.as_slice()[3..150_003]);
                let header = SendPart::Bytes(tag.to_le_bytes().to_vec());
                let parts = vec![header, SendPart::Buffer { buffer, start: 3, length: 150_000 }];
                sockets.submit_send(near, parts, tag).unwrap();
            }
            let (start, mut sent, mut received, mut ready) =
                (Instant::now(), Vec::new(), Vec::new(), Vec::new());
            while sent.len() < 20 || received.len() < expected.len() {
                assert!(start.elapsed() < Duration::from_secs(20), "{} {sent:?}", received.len());
                events.wait(Some(if sockets.is_pending() { 0 } else { 1_000_000_000 }));
                sockets.poll(&mut ready);
                let mut seen = Vec::new();
                sockets.reap_transfers(&mut seen);
                received.extend(received_bytes(&seen, far));
                for event in seen {
                    if let TransferEvent::Sent { connection, tag, result, parts, .. } = event {
                        assert_eq!((connection, result, parts.len()), (near, Ok(()), 2));
                        sent.push(tag);
                    }
                }
            }
            assert!(received == expected, "{events:?} {config:?}: the data differs");
            sent.sort_unstable();
            assert_eq!(sent, (0..20).collect::<Vec<_>>());
            let is_far =
                |event: &NetworkEvent<SocketStream>| matches!(event, NetworkEvent::Ready(id) if *id == far);
            assert!(!ready.iter().skip(2).any(is_far), "the receiving end was reported ready");
            sockets.close(near);
            let mut seen = Vec::new();
            turn_until(&events, &mut sockets, &mut seen, |seen| end_of(seen, far).is_some());
            assert_eq!(end_of(&seen, far), Some(ReceiveEnd::Closed), "{events:?} {config:?}");
            sockets.close(far);
        }
    }
}

/// Eight sends of 1 MiB, which the kernel has begun: more than a socket takes.
fn send_8_mib(events: &EventLoop, sockets: &mut Sockets, pool: &Pool, connection: ConnectionId) {
    for tag in 0..8 {
        let buffer = filled(pool, dma::BUFFER_BYTES_MAX, 0);
        let parts = vec![SendPart::Buffer { buffer, start: 0, length: 1 << 20 }];
        sockets.submit_send(connection, parts, tag).unwrap();
    }
    for _ in 0..5 {
        events.wait(Some(1_000_000));
        sockets.poll(&mut Vec::new());
    }
}

#[test]
fn memory_comes_back_when_the_connection_is_closed_before_the_data_is_sent() {
    for (events, config) in variants() {
        let pool = pool(16);
        let mut sockets = sockets(&events, &pool, &config);
        for (near, far) in pairs(&mut sockets) {
            let mut seen = Vec::new();
            send_8_mib(&events, &mut sockets, &pool, near);
            sockets.reap_transfers(&mut seen);
            assert!(sent_tags(&seen).len() < 8, "8 MiB fit into the socket: {events:?}");
            sockets.close(near);
            // The peer's reset releases what it did not read.
            sockets.close(far);
            turn_until(&events, &mut sockets, &mut seen, |seen| sent_tags(seen).len() == 8);
            let mut tags = sent_tags(&seen);
            tags.sort_unstable();
            assert_eq!(tags, (0..8).collect::<Vec<_>>(), "each send completes once");
            let has_failed =
                |event: &TransferEvent| matches!(event, TransferEvent::Sent { result: Err(_), .. });
            assert!(seen.iter().any(has_failed), "{events:?} {config:?}: {seen:?}");
            let rejected = sockets.submit_send(near, vec![SendPart::Bytes(vec![1])], 9).unwrap_err();
            assert_eq!(rejected.reason, io::ErrorKind::NotConnected);
        }
    }
}

#[test]
fn a_peer_that_does_not_read_keeps_no_memory_of_a_closed_connection() {
    for (events, config) in variants() {
        let pool = pool(16);
        let mut sockets = sockets(&events, &pool, &config);
        for (near, _far) in pairs(&mut sockets) {
            let mut seen = Vec::new();
            send_8_mib(&events, &mut sockets, &pool, near);
            sockets.close(near);
            turn_until(&events, &mut sockets, &mut seen, |seen| sent_tags(seen).len() == 8);
        }
    }
}

#[test]
fn zero_copy_is_for_tcp_connections_that_are_added_while_it_is_on() {
    static SWITCH: ZeroCopySwitch = ZeroCopySwitch::new();
    for events in engines() {
        let pool = pool(8);
        let mut sockets = Sockets::new(&events).with_zero_copy(&events, &pool, &SWITCH);
        let can = events.client().socket_capabilities().zero_copy_send;
        let before = pairs(&mut sockets)[0].0;
        SWITCH.set(false, true);
        let [(tcp, far), (unix, _)] = pairs(&mut sockets)[..] else { panic!("two pairs") };
        SWITCH.set(false, false);
        SWITCH.set(true, true);
        let after = pairs(&mut sockets)[0].0;
        SWITCH.set(true, false);
        let min_bytes = [before, tcp, unix, after].map(|id| sockets.zero_copy_min_bytes(id));
        let expected = can.then_some(32 << 10);
        assert_eq!(min_bytes, [None, expected, None, None], "{events:?}");
        if !can {
            continue;
        }
        // Over loopback the kernel copies, which turns it off after a while.
        let (mut received, mut sent) = (0, Vec::new());
        let mut scratch = vec![0; 1 << 20];
        for tag in 0..8 {
            let buffer = filled(&pool, 40_000, tag as u8);
            let parts = vec![SendPart::Buffer { buffer, start: 0, length: 40_000 }];
            assert!(sockets.zero_copy_min_bytes(tcp).is_some());
            sockets.send_owned(tcp, parts, tag).unwrap();
            let start = Instant::now();
            while sent.len() <= tag as usize || received < 40_000 * (tag as usize + 1) {
                assert!(start.elapsed() < Duration::from_secs(20), "{events:?}: {sent:?}, {received} bytes");
                events.wait(Some(if sockets.is_pending() { 0 } else { 10_000_000 }));
                sockets.poll(&mut Vec::new());
                sockets.reap_sent(&mut sent);
                if let TransferResult::Bytes(count) =
                    sockets.receive(far, &mut [IoSliceMut::new(&mut scratch)])
                {
                    received += count;
                }
            }
            assert_eq!(sent[tag as usize], SentEvent { connection: tcp, tag, result: Ok(()) });
        }
        assert_eq!(sockets.zero_copy_min_bytes(tcp), None, "{events:?}");
        assert_eq!(sockets.send_stats().turned_off, 1);
    }
}

#[test]
fn memory_comes_back_when_the_sockets_are_dropped() {
    for (events, config) in variants() {
        let pool = pool(8);
        let mut sockets = sockets(&events, &pool, &config);
        for (near, far) in pairs(&mut sockets) {
            sockets.start_receive(far).unwrap();
            for tag in 0..4 {
                let buffer = filled(&pool, dma::BUFFER_BYTES_MAX, 0);
                sockets
                    .submit_send(near, vec![SendPart::Buffer { buffer, start: 0, length: 1 << 20 }], tag)
                    .unwrap();
            }
        }
        events.turn();
        drop(sockets);
        // All of the arena: 16 buffers of 1 MiB.
        let all = || (0..16).map(|_| pool.take(dma::BUFFER_BYTES_MAX)).collect::<Option<Vec<_>>>();
        let start = Instant::now();
        while all().is_none() {
            assert!(start.elapsed() < Duration::from_secs(20), "{events:?} {config:?}");
            events.wait(Some(10_000_000));
        }
    }
}

#[test]
fn nothing_is_received_without_buffers_and_nothing_is_lost() {
    for (events, config) in variants() {
        let (pool, config) = (pool(2), OwnedTransferConfig { receive_buffer_bytes: 1 << 20, ..config });
        let mut sockets = sockets(&events, &pool, &config);
        for (near, far) in pairs(&mut sockets) {
            sockets.start_receive(far).unwrap();
            let mut held = Vec::new();
            for round in 0..12u8 {
                assert!(matches!(
                    sockets.send(near, &[IoSlice::new(&[round; 10])]),
                    TransferResult::Bytes(10)
                ));
                let mut seen = Vec::new();
                // After two or three rounds, depending on who took the memory of the ring, the pool is empty.
                let deadline = Instant::now() + Duration::from_millis(20);
                while seen.is_empty() && Instant::now() < deadline {
                    events.wait(Some(1_000_000));
                    sockets.poll(&mut Vec::new());
                    sockets.reap_transfers(&mut seen);
                }
                held.extend(seen);
            }
            let received = received_bytes(&held, far).len();
            assert!((10..120).contains(&received), "{events:?} {config:?}: {received} with all buffers held");
            let mut all = received_bytes(&held, far);
            drop(held);
            let start = Instant::now();
            while all.len() < 120 {
                assert!(start.elapsed() < Duration::from_secs(20), "{events:?} {config:?}: {}", all.len());
                let mut seen = Vec::new();
                turn_until(&events, &mut sockets, &mut seen, |seen| !seen.is_empty());
                all.extend(received_bytes(&seen, far));
            }
            assert!(all.iter().enumerate().all(|(at, byte)| usize::from(*byte) == at / 10), "{all:?}");
            sockets.close(near);
            sockets.close(far);
            events.turn();
        }
    }
}

#[test]
fn a_stopped_receive_hands_the_stream_back() {
    for (events, config) in variants() {
        let pool = pool(4);
        let mut sockets = sockets(&events, &pool, &config);
        for (near, far) in pairs(&mut sockets) {
            sockets.start_receive(far).unwrap();
            assert_eq!(sockets.start_receive(far).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
            assert!(matches!(sockets.send(near, &[IoSlice::new(b"owned")]), TransferResult::Bytes(5)));
            let mut seen = Vec::new();
            turn_until(&events, &mut sockets, &mut seen, |seen| !seen.is_empty());
            assert_eq!(received_bytes(&seen, far), b"owned");
            sockets.stop_receive(far);
            turn_until(&events, &mut sockets, &mut seen, |seen| end_of(seen, far).is_some());
            assert_eq!(end_of(&seen, far), Some(ReceiveEnd::Stopped));
            assert!(matches!(sockets.send(near, &[IoSlice::new(b"plain")]), TransferResult::Bytes(5)));
            let mut bytes = Vec::new();
            while bytes.len() < 5 {
                wait(&events, &mut sockets);
                // Two parts: the socket is in blocking mode, and this must not wait.
                bytes.extend(read_all(&mut sockets, far, 1, 100).0);
            }
            assert_eq!(bytes, b"plain");
        }
    }
}

#[test]
fn a_failed_connection_ends_its_transfers() {
    for (events, config) in variants() {
        let pool = pool(4);
        let mut sockets = sockets(&events, &pool, &config);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let id = sockets.add(connect(&listener.local_addr().unwrap().into()).unwrap()).unwrap();
        let peer = listener.accept().unwrap().0;
        sockets.start_receive(id).unwrap();
        // A reset instead of an orderly end.
        rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
        drop(peer);
        let mut seen = Vec::new();
        turn_until(&events, &mut sockets, &mut seen, |seen| end_of(seen, id).is_some());
        let reset = ReceiveEnd::Failed(io::ErrorKind::ConnectionReset);
        assert_eq!(end_of(&seen, id), Some(reset), "{events:?} {config:?}");
        sockets.submit_send(id, vec![SendPart::Bytes(vec![1])], 3).unwrap();
        turn_until(&events, &mut sockets, &mut seen, |seen| sent_tags(seen) == [3]);
        assert!(
            seen.iter().any(|event| matches!(event, TransferEvent::Sent { result: Err(_), .. })),
            "{seen:?}"
        );
    }
}

#[test]
fn sends_beyond_the_limit_are_rejected_with_their_parts() {
    for (events, config) in variants() {
        let pool = pool(4);
        let mut sockets = sockets(&events, &pool, &config);
        for (near, _) in pairs(&mut sockets) {
            let bytes = || vec![SendPart::Bytes(vec![7; 1 << 20])];
            let rejected = (0..100).find_map(|tag| sockets.submit_send(near, bytes(), tag).err());
            let rejected = rejected.expect("a limit");
            assert_eq!((rejected.reason, rejected.parts.len()), (io::ErrorKind::WouldBlock, 1));
            let empty = sockets.submit_send(near, vec![SendPart::Bytes(vec![])], 0).unwrap_err();
            assert_eq!(empty.reason, io::ErrorKind::InvalidInput);
        }
        let plain = &mut Sockets::new(&events);
        let (id, _) = pairs(plain)[0];
        assert_eq!(plain.start_receive(id).unwrap_err().kind(), io::ErrorKind::Unsupported);
    }
}

/// Turns until tag `tag` of `near` is sent and `far` has received `length` bytes; returns those, and whether the send was
/// copied.
fn exchange(
    events: &EventLoop,
    sockets: &mut Sockets,
    (far, length): (ConnectionId, usize),
    tag: u64,
) -> (Vec<u8>, bool) {
    let mut seen = Vec::new();
    turn_until(events, sockets, &mut seen, |seen| {
        sent_tags(seen) == [tag] && received_bytes(seen, far).len() >= length
    });
    let copied = |event: &TransferEvent| match event {
        TransferEvent::Sent { copied, .. } => Some(*copied),
        _ => None,
    };
    (received_bytes(&seen, far), seen.iter().find_map(copied).unwrap())
}

#[test]
fn a_connection_whose_sends_the_kernel_copies_turns_zero_copy_off() {
    for (events, config) in variants() {
        let pool = pool(8);
        let mut sockets = sockets(&events, &pool, &config);
        let is_zero_copy = sockets.transfer_capabilities().zero_copy_send;
        for (at, (near, far)) in pairs(&mut sockets).into_iter().enumerate() {
            let before = sockets.send_stats();
            sockets.start_receive(far).unwrap();
            for tag in 0..20 {
                let buffer = filled(&pool, 40_000, tag as u8);
                let expected = buffer.as_slice().to_vec();
                let parts = vec![SendPart::Buffer { buffer, start: 0, length: 40_000 }];
                sockets.submit_send(near, parts, tag).unwrap();
                let (received, copied) = exchange(&events, &mut sockets, (far, 40_000), tag);
                assert!(received == expected, "{events:?} {config:?}: the data of {tag} differs");
                assert!(copied, "the loopback interface and UNIX sockets copy: {events:?} {config:?}");
            }
            let after = sockets.send_stats();
            let is_tcp = at == 0;
            let by_kernel = if is_zero_copy && is_tcp { 5 } else { 0 };
            let expected = SendStats {
                copied: before.copied + by_kernel,
                fallback: before.fallback + 20 - by_kernel,
                turned_off: before.turned_off + u64::from(by_kernel > 0),
                ..before
            };
            assert_eq!(after, expected, "{events:?} {config:?}");
        }
    }
}

#[test]
fn small_sends_are_copied_in_their_turn() {
    for (events, config) in variants() {
        let pool = pool(16);
        let mut sockets = sockets(&events, &pool, &config);
        let (near, far) = pairs(&mut sockets)[0];
        // More than the socket takes, so that the small sends between have to wait.
        let mut expected = Vec::new();
        for tag in 0..10u64 {
            let length = if tag % 2 == 0 { 1 << 20 } else { 999 };
            let buffer = filled(&pool, length, tag as u8);
            expected.extend(buffer.as_slice());
            let parts = vec![SendPart::Buffer { buffer, start: 0, length: length as u32 }];
            sockets.submit_send(near, parts, tag).unwrap();
        }
        for _ in 0..3 {
            events.wait(Some(1_000_000));
            sockets.poll(&mut Vec::new());
        }
        assert!(sockets.send_stats().small < 5, "5 MiB fit into the socket: {events:?}");
        sockets.start_receive(far).unwrap();
        let mut seen = Vec::new();
        let (mut sent, mut received) = (0, Vec::new());
        let start = Instant::now();
        while sent < 10 || received.len() < expected.len() {
            assert!(start.elapsed() < Duration::from_secs(20), "{events:?}: {sent} {}", received.len());
            turn_until(&events, &mut sockets, &mut seen, |seen| !seen.is_empty());
            sent += sent_tags(&seen).len();
            received.extend(received_bytes(&seen, far));
            seen.clear();
        }
        assert!(received == expected, "{events:?} {config:?}: the data differs");
        let stats = sockets.send_stats();
        assert_eq!((stats.small, stats.zero_copied + stats.copied + stats.fallback), (5, 5), "{config:?}");
    }
}
