//! Tests of kernel sockets with both event backends and of the simulated network.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use os::{EventBackend, EventLoop, EventLoopConfig};
use rustix::net::sockopt;

use super::*;

mod accept;
mod descriptors;
mod owned;
mod unix;

fn engines() -> Vec<EventLoop> {
    let make = |engine| EventLoop::new(&EventLoopConfig { backend: Some(engine), operations_max: 256 });
    let mut all = vec![make(EventBackend::Epoll).unwrap()];
    match make(EventBackend::Uring) {
        Ok(events) => all.push(events),
        Err(error) => eprintln!("SKIPPED for io_uring: {error}"),
    }
    all
}

/// Polls until there is an event.
fn wait(events: &EventLoop, sockets: &mut Sockets) -> Vec<NetworkEvent<SocketStream>> {
    let (start, mut seen) = (Instant::now(), Vec::new());
    while seen.is_empty() {
        assert!(start.elapsed() < Duration::from_secs(20), "no event within 20 s");
        events.wait(Some(if sockets.is_pending() { 0 } else { 1_000_000_000 }));
        sockets.poll(&mut seen);
    }
    seen
}

fn connected(events: &EventLoop, sockets: &mut Sockets, address: &str) -> (TcpStream, ConnectionId) {
    let listener = sockets.listen(&address.parse().unwrap()).unwrap();
    let peer = TcpStream::connect(sockets.local_address(listener).unwrap().tcp().unwrap()).unwrap();
    loop {
        for event in wait(events, sockets) {
            if let NetworkEvent::Incoming { stream, .. } = event {
                return (peer, sockets.add(stream).unwrap());
            }
        }
    }
}

/// Reads until blocked, into a first part of `first` bytes and a scratch area of `scratch` bytes.
fn read_all(sockets: &mut Sockets, id: ConnectionId, first: usize, scratch: usize) -> (Vec<u8>, bool) {
    let mut all = Vec::new();
    loop {
        let (mut head, mut tail) = (vec![0; first], vec![0; scratch]);
        let result = sockets.receive(id, &mut [IoSliceMut::new(&mut head), IoSliceMut::new(&mut tail)]);
        match result {
            TransferResult::Bytes(count) => {
                head.extend(tail);
                all.extend(&head[..count]);
            }
            TransferResult::Blocked => return (all, false),
            TransferResult::Closed => return (all, true),
            TransferResult::Failed(kind) => panic!("{kind}"),
        }
    }
}

#[test]
fn data_and_end_of_stream_are_received() {
    for events in engines() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let mut sockets = Sockets::new(&events);
            let (mut peer, id) = connected(&events, &mut sockets, address);
            let message: Vec<u8> = (0..100_000u32).map(|n| n as u8).collect();
            let sent = message.clone();
            let thread = std::thread::spawn(move || std::io::Write::write_all(&mut peer, &sent).unwrap());
            let (mut all, mut closed) = (Vec::new(), false);
            while !closed {
                wait(&events, &mut sockets);
                let (bytes, end) = read_all(&mut sockets, id, 1000, 4096);
                all.extend(bytes);
                closed = end;
            }
            thread.join().unwrap();
            assert_eq!(all, message, "{events:?} {address}");
            sockets.close(id);
            assert!(sockets.is_empty());
        }
    }
}

/// Bytes that were not read before move with the connection, and so does the end of the stream.
#[test]
fn a_connection_moves_to_another_network() {
    for (events, others) in engines().iter().zip(&engines()) {
        let (mut sockets, mut other) = (Sockets::new(events), Sockets::new(others));
        let (mut peer, id) = connected(events, &mut sockets, "127.0.0.1:0");
        std::io::Write::write_all(&mut peer, b"before").unwrap();
        wait(events, &mut sockets);
        let mut first = [0; 2];
        let received = sockets.receive(id, &mut [IoSliceMut::new(&mut first)]);
        assert!(matches!(received, TransferResult::Bytes(2)) && &first == b"be", "{received:?}");
        let stream = sockets.remove(id).unwrap();
        assert!(sockets.is_empty() && sockets.remove(id).is_none(), "it is gone");
        std::io::Write::write_all(&mut peer, b" between").unwrap();
        let id = other.add(stream).unwrap();
        let mut all = Vec::new();
        while all.len() < b"fore between".len() {
            wait(others, &mut other);
            all.extend(read_all(&mut other, id, 3, 5).0);
        }
        assert_eq!(all, b"fore between", "{events:?}");
        assert!(matches!(other.send(id, &[IoSlice::new(b"answer")]), TransferResult::Bytes(6)));
        let mut answer = [0; 6];
        std::io::Read::read_exact(&mut peer, &mut answer).unwrap();
        assert_eq!(&answer, b"answer");
        // Back again, with an end that the first network has not seen.
        drop(peer);
        let id = sockets.add(other.remove(id).unwrap()).unwrap();
        let mut is_closed = false;
        while !is_closed {
            wait(events, &mut sockets);
            is_closed = read_all(&mut sockets, id, 8, 8).1;
        }
        sockets.close(id);
    }
}

#[test]
fn parts_of_any_size_are_sent_in_order() {
    for events in engines() {
        let mut sockets = Sockets::new(&events);
        let (mut peer, id) = connected(&events, &mut sockets, "127.0.0.1:0");
        // As of few small PDUs, which are copied together, and of others; also more than the socket takes at
        // once.
        for (header, data, pairs) in
            [(24, 0, 2), (24, 4096, 1), (24, 4096, 16), (24, 4096, 500), (72, 65536, 64)]
        {
            let message: Vec<u8> = (0..(header + data) * pairs).map(|at| (at / 7) as u8).collect();
            let expected = message.clone();
            let mut end = peer.try_clone().unwrap();
            let reader = std::thread::spawn(move || {
                let mut received = vec![0; expected.len()];
                std::io::Read::read_exact(&mut end, &mut received).unwrap();
                assert!(received == expected, "{header} + {data}, {pairs} times");
            });
            let mut sent = 0;
            while sent < message.len() {
                let mut parts = Vec::new();
                for pair in (0..pairs).map(|pair| pair * (header + data)) {
                    for (start, end) in [(pair, pair + header), (pair + header, pair + header + data)] {
                        parts.push(IoSlice::new(&message[start.max(sent).min(end)..end]));
                    }
                }
                match sockets.send(id, &parts) {
                    TransferResult::Bytes(count) => sent += count,
                    TransferResult::Blocked => drop(wait(&events, &mut sockets)),
                    other => panic!("{other:?}"),
                }
            }
            reader.join().unwrap();
        }
        std::io::Write::write_all(&mut peer, b"x").unwrap();
    }
}

#[test]
fn small_parts_are_joined() {
    let (header, page, large) = ([1; 24], [2; 4096], vec![3; 32 << 10]);
    let pair = |data| [IoSlice::new(&header), IoSlice::new(data)];
    let mut joined = Vec::new();
    assert!(super::sockets::join(&pair(&page), &mut joined));
    assert_eq!(joined, [&header[..], &page].concat());
    assert!(!super::sockets::join(&pair(&large), &mut joined), "a copy of it takes longer");
    assert!(!super::sockets::join(&pair(&page)[1..], &mut joined), "it is one already");
    assert!(super::sockets::join(&[pair(&page); 2].concat(), &mut joined));
    assert!(!super::sockets::join(&[pair(&page); 3].concat(), &mut joined), "so does a copy of these");
}

#[test]
fn a_blocked_send_is_reported_ready_once_the_peer_reads() {
    for events in engines() {
        let mut sockets = Sockets::new(&events);
        let (mut peer, id) = connected(&events, &mut sockets, "127.0.0.1:0");
        wait(&events, &mut sockets);
        let block = vec![7; 1 << 20];
        let mut sent = 0;
        loop {
            match sockets.send(id, &[IoSlice::new(&block[..1]), IoSlice::new(&block[1..])]) {
                TransferResult::Bytes(count) => sent += count,
                TransferResult::Blocked => break,
                other => panic!("{other:?}"),
            }
        }
        let thread = std::thread::spawn(move || {
            std::io::Read::read_exact(&mut peer, &mut vec![0; sent]).unwrap();
            peer
        });
        wait(&events, &mut sockets);
        let _peer = thread.join().unwrap();
        assert!(matches!(sockets.send(id, &[IoSlice::new(&block)]), TransferResult::Bytes(_)), "{events:?}");
    }
}

#[test]
fn end_of_stream_is_reported_after_a_short_read() {
    for events in engines() {
        let mut sockets = Sockets::new(&events);
        let (mut peer, id) = connected(&events, &mut sockets, "127.0.0.1:0");
        sockets.poll(&mut Vec::new());
        std::io::Write::write_all(&mut peer, b"last").unwrap();
        drop(peer);
        // Both the data and the end of stream have arrived before the first poll.
        let mut closed = false;
        while !closed {
            wait(&events, &mut sockets);
            // One read per event, like a reader that stops at the first short read.
            match sockets.receive(id, &mut [IoSliceMut::new(&mut [0; 64])]) {
                TransferResult::Bytes(count) => assert_eq!(count, 4),
                TransferResult::Closed => closed = true,
                TransferResult::Blocked => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_busy_connection_is_polled_while_data_arrives_and_watched_again_when_none_does() {
    for events in engines() {
        let mut sockets = Sockets::new(&events).with_busy_poll(true);
        let (mut peer, id) = connected(&events, &mut sockets, "127.0.0.1:0");
        let mut exchange = |sockets: &mut Sockets| {
            std::io::Write::write_all(&mut peer, b"x").unwrap();
            while wait(&events, sockets).is_empty() || read_all(sockets, id, 1, 9).0.is_empty() {}
        };
        for _ in 0..3 {
            // Two messages in quick succession, which other processes may prevent for a while.
            while !sockets.is_pending() {
                exchange(&mut sockets);
            }
            let mut seen = Vec::new();
            sockets.poll(&mut seen);
            assert!(matches!(&seen[..], [NetworkEvent::Ready(ready)] if *ready == id), "{seen:?}");
            while sockets.is_pending() {
                events.turn();
                sockets.poll(&mut seen);
            }
            exchange(&mut sockets);
        }
    }
}

#[test]
fn a_closed_connection_rejects_io() {
    for events in engines() {
        let mut sockets = Sockets::new(&events);
        let (_peer, id) = connected(&events, &mut sockets, "127.0.0.1:0");
        sockets.close(id);
        assert!(matches!(sockets.send(id, &[IoSlice::new(b"x")]), TransferResult::Failed(_)));
        assert!(matches!(sockets.receive(id, &mut [IoSliceMut::new(&mut [0])]), TransferResult::Failed(_)));
    }
}

#[test]
fn connect_succeeds_or_reports_its_error() {
    for events in engines() {
        let mut sockets = Sockets::new(&events);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().into();
        let id = sockets.add(connect(&address).unwrap()).unwrap();
        let accepted = listener.accept().unwrap();
        while !matches!(sockets.send(id, &[IoSlice::new(b"x")]), TransferResult::Bytes(1)) {
            wait(&events, &mut sockets);
        }
        drop((accepted, listener));
        let id = connect(&address).and_then(|stream| sockets.add(stream));
        let Ok(id) = id else { continue };
        loop {
            match sockets.receive(id, &mut [IoSliceMut::new(&mut [0])]) {
                TransferResult::Failed(kind) => break assert_eq!(kind, io::ErrorKind::ConnectionRefused),
                TransferResult::Blocked => drop(wait(&events, &mut sockets)),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_connection_comes_from_the_address_that_is_chosen_with_its_service() {
    for (listen, source) in [("127.0.0.1:0", "127.0.0.9:0"), ("[::1]:0", "[::1]:0")] {
        let Ok(listener) = std::net::TcpListener::bind(listen) else {
            println!("SKIPPED {listen}: this machine has no such address");
            continue;
        };
        let address = listener.local_addr().unwrap();
        let options =
            ConnectOptions { source: Some(source.parse().unwrap()), type_of_service: 0x28, priority: 5 };
        let stream = connect_with(&address.into(), &options).unwrap();
        let (_, peer) = listener.accept().unwrap();
        assert_eq!(peer.ip(), options.source.unwrap().ip());
        let service = match address.is_ipv4() {
            true => sockopt::ip_tos(&stream).unwrap().into(),
            false => sockopt::ipv6_tclass(&stream).unwrap(),
        };
        assert_eq!((service, os::socket_priority(&stream).unwrap()), (0x28, 5));
        // From the same port again, which is in use, or from what is none of this machine's addresses.
        let from = |source| ConnectOptions { source: Some(source), ..options };
        let error = |source| connect_with(&address.into(), &from(source)).map(drop).unwrap_err().kind();
        assert_eq!(
            error("203.0.113.9:0".parse().unwrap()),
            match address.is_ipv4() {
                true => io::ErrorKind::AddrNotAvailable,
                false => io::ErrorKind::InvalidInput,
            }
        );
        assert!([io::ErrorKind::AddrInUse, io::ErrorKind::AddrNotAvailable].contains(&error(peer)));
    }
}

#[test]
fn listening_on_an_address_in_use_fails() {
    let events = EventLoop::new(&EventLoopConfig::default()).unwrap();
    let mut sockets = Sockets::new(&events);
    let listener = sockets.listen(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let address = sockets.local_address(listener).unwrap();
    assert_eq!(sockets.listen(&address).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    sockets.close_listener(listener);
    sockets.listen(&address).unwrap();
}

#[test]
fn simulated_streams_stay_in_order_under_faults() {
    for seed in 1..50 {
        let faults = NetworkFaults { cut_per_mille: 500, stall_per_mille: 200, break_per_mille: 0 };
        let (mut near, mut far) = SimulatedNetwork::pair(seed, faults);
        let address: StreamAddress = "10.0.0.1:4420".parse().unwrap();
        far.listen(&address).unwrap();
        let stream = near.connect(address);
        let near_id = near.add(stream).unwrap();
        let mut events = Vec::new();
        far.poll(&mut events);
        let Some(NetworkEvent::Incoming { stream, .. }) = events.pop() else { panic!("no connection") };
        let far_id = far.add(stream).unwrap();
        let message: Vec<u8> = (0..5000u32).map(|n| (n * 7) as u8).collect();
        let (mut sent, mut received) = (0, Vec::<u8>::new());
        while received.len() < message.len() {
            if sent < message.len()
                && let TransferResult::Bytes(count) = near.send(near_id, &[IoSlice::new(&message[sent..])])
            {
                sent += count;
            }
            let mut part = [0; 700];
            if let TransferResult::Bytes(count) = far.receive(far_id, &mut [IoSliceMut::new(&mut part)]) {
                received.extend(&part[..count]);
            }
        }
        assert_eq!(received, message, "seed {seed}");
        near.close(near_id);
        assert!(matches!(far.receive(far_id, &mut [IoSliceMut::new(&mut [0])]), TransferResult::Closed));
    }
}
