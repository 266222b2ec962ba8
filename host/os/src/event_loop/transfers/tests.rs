//! Memory belongs to the event loop until the kernel's last completion, on real TCP connections.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use dma::{Arena, Data};
use rustix::net::sockopt;

use super::super::{EventBackend, EventLoop, EventLoopConfig};
use super::*;

const TIMEOUT: Duration = Duration::from_secs(20);

fn event_loop() -> Option<EventLoop> {
    let config = EventLoopConfig { backend: Some(EventBackend::Uring), operations_max: 64 };
    let event_loop = match EventLoop::new(&config) {
        Ok(event_loop) => event_loop,
        Err(error) => {
            eprintln!("SKIPPED: no io_uring: {error}");
            return None;
        }
    };
    let capabilities = event_loop.client().socket_capabilities();
    if capabilities != (SocketCapabilities { zero_copy_send: true, multishot_receive: true }) {
        eprintln!("SKIPPED: the kernel has only {capabilities:?}");
        return None;
    }
    Some(event_loop)
}

/// A pool with `chunks` chunks of 2 MiB, so that it is soon empty.
fn pool(chunks: usize) -> Pool {
    let limit_bytes = chunks * dma::BUFFER_BYTES_MAX * 2;
    Pool::new(&Arena::new(dma::ArenaConfig { limit_bytes, hugepages: false, ..dma::ArenaConfig::default() }))
}

/// Both ends of a connection. The second receives at most 128 KiB ahead of its reader.
fn pair() -> (Rc<OwnedFd>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    sockopt::set_socket_recv_buffer_size(&listener, 64 << 10).unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (Rc::new(near.into()), listener.accept().unwrap().0)
}

fn wait_sends(
    event_loop: &EventLoop,
    client: &EventClient,
    until: impl Fn(&[SendEvent]) -> bool,
) -> Vec<SendEvent> {
    let (start, mut seen) = (Instant::now(), Vec::new());
    while !until(&seen) {
        assert!(start.elapsed() < TIMEOUT, "{seen:?}");
        event_loop.wait(Some(10_000_000));
        client.reap_sends(&mut seen);
    }
    seen
}

/// The bytes that a completion returns.
fn slice(completion: &EventCompletion) -> &[u8] {
    completion.data.as_ref().and_then(Data::single).unwrap().as_slice()
}

fn wait_received(event_loop: &EventLoop, client: &EventClient, count: usize) -> Vec<EventCompletion> {
    let (start, mut seen) = (Instant::now(), Vec::new());
    while seen.len() < count {
        assert!(start.elapsed() < TIMEOUT, "{seen:?}");
        event_loop.wait(Some(10_000_000));
        client.reap(&mut seen);
    }
    seen
}

fn released(events: &[SendEvent]) -> usize {
    events.iter().filter(|event| matches!(event, SendEvent::Released { .. })).count()
}

/// One buffer of 1 MiB with a pattern, and a header.
fn large_parts(pool: &Pool) -> (Vec<SendPart>, Vec<u8>) {
    let mut buffer = pool.take(dma::BUFFER_BYTES_MAX).unwrap();
    for (at, byte) in buffer.as_mut_slice().iter_mut().enumerate() {
        *byte = (at / 3) as u8;
    }
    let expected = [b"header", &buffer.as_slice()[7..1_000_007]].concat();
    let data = SendPart::Buffer { buffer, start: 7, length: 1_000_000 };
    (vec![SendPart::Bytes(b"header".to_vec()), data], expected)
}

#[test]
fn a_send_keeps_its_memory_until_the_peer_has_the_data() {
    let Some(event_loop) = event_loop() else { return };
    let (client, pool) = (event_loop.client(), pool(1));
    let (socket, mut peer) = pair();
    sockopt::set_socket_send_buffer_size(&socket, 4 << 20).unwrap();
    let (parts, expected) = large_parts(&pool);
    client.submit_send(&socket, parts, 5).unwrap();
    // The second buffer of the chunk: the pool is now empty but for what the send has.
    let _other = pool.take(dma::BUFFER_BYTES_MAX).unwrap();
    let mut seen = wait_sends(&event_loop, &client, |seen| !seen.is_empty());
    assert!(matches!(seen[..], [SendEvent::Accepted { tag: 5, result: 1_000_006 }]), "{seen:?}");
    assert!(pool.take(4096).is_none(), "the data is in use until it is acknowledged");
    let mut received = vec![0; expected.len()];
    peer.read_exact(&mut received).unwrap();
    assert_eq!(received, expected);
    seen.extend(wait_sends(&event_loop, &client, |seen| released(seen) == 1));
    let Some(SendEvent::Released { tag: 5, parts, .. }) = seen.pop() else { panic!("{seen:?}") };
    assert_eq!(parts.iter().map(SendPart::len).collect::<Vec<_>>(), [6, 1_000_000]);
    drop(parts);
    assert!(pool.take(dma::BUFFER_BYTES_MAX).is_some());
}

#[test]
fn a_send_survives_its_socket_and_its_client() {
    let Some(event_loop) = event_loop() else { return };
    let (client, pool) = (event_loop.client(), pool(1));
    let (socket, mut peer) = pair();
    sockopt::set_socket_send_buffer_size(&socket, 4 << 20).unwrap();
    let (parts, expected) = large_parts(&pool);
    client.submit_send(&socket, parts, 5).unwrap();
    // Not submitted to the kernel yet: the descriptor's number must not be reused before that.
    drop(socket);
    let other_file = std::fs::File::open("/dev/null").unwrap();
    wait_sends(&event_loop, &client, |seen| !seen.is_empty());
    drop((client, other_file));
    let _other = pool.take(dma::BUFFER_BYTES_MAX).unwrap();
    event_loop.turn();
    assert!(pool.take(4096).is_none(), "the send still uses its memory");
    let mut received = vec![0; expected.len()];
    peer.read_exact(&mut received).unwrap();
    assert_eq!(received, expected);
    let start = Instant::now();
    while pool.take(4096).is_none() {
        assert!(start.elapsed() < TIMEOUT, "the memory was not released");
        event_loop.wait(Some(10_000_000));
    }
}

#[test]
fn memory_that_the_kernel_still_uses_is_leaked_with_the_event_loop() {
    let Some(event_loop) = event_loop() else { return };
    let (client, pool) = (event_loop.client(), pool(1));
    let (socket, peer) = pair();
    sockopt::set_socket_send_buffer_size(&socket, 4 << 20).unwrap();
    client.submit_send(&socket, large_parts(&pool).0, 5).unwrap();
    wait_sends(&event_loop, &client, |seen| !seen.is_empty());
    let other = pool.take(dma::BUFFER_BYTES_MAX).unwrap();
    drop((client, event_loop));
    assert!(pool.take(4096).is_none(), "unacknowledged data was returned to the pool");
    drop((peer, other));
    assert!(pool.take(dma::BUFFER_BYTES_MAX).is_some(), "the other half of the chunk is usable");
}

#[test]
fn a_send_that_waits_for_space_ends_when_the_socket_is_shut_down() {
    let Some(event_loop) = event_loop() else { return };
    let (client, pool) = (event_loop.client(), pool(1));
    let (socket, peer) = pair();
    sockopt::set_socket_send_buffer_size(&socket, 4096).unwrap();
    client.submit_send(&socket, large_parts(&pool).0, 5).unwrap();
    event_loop.wait(Some(10_000_000));
    let mut seen = Vec::new();
    assert_eq!(client.reap_sends(&mut seen), 0, "it waits for the peer: {seen:?}");
    rustix::net::shutdown(&*socket, rustix::net::Shutdown::Both).unwrap();
    // The peer's reset releases what it did not read.
    drop(peer);
    let seen = wait_sends(&event_loop, &client, |seen| released(seen) == 1);
    assert!(matches!(seen[0], SendEvent::Accepted { tag: 5, result } if result < 1_000_006), "{seen:?}");
}

#[test]
fn sends_that_cannot_be_submitted_return_their_parts() {
    let Some(event_loop) = event_loop() else { return };
    let (client, (socket, _peer)) = (event_loop.client(), pair());
    let bytes = || SendPart::Bytes(vec![1]);
    let rejected = |parts: Vec<SendPart>| client.submit_send(&socket, parts, 0).unwrap_err();
    assert_eq!(rejected(vec![]).reason, io::ErrorKind::InvalidInput);
    let many: Vec<SendPart> = (0..=SEND_PARTS_MAX).map(|_| bytes()).collect();
    let many = rejected(many);
    assert_eq!((many.reason, many.parts.len()), (io::ErrorKind::InvalidInput, SEND_PARTS_MAX + 1));
    for tag in 0..64 {
        client.submit_send(&socket, vec![bytes()], tag).unwrap();
    }
    assert_eq!(rejected(vec![bytes()]).reason, io::ErrorKind::WouldBlock);
    let mut released_tags: Vec<u64> = wait_sends(&event_loop, &client, |seen| released(seen) == 64)
        .iter()
        .filter_map(|event| match event {
            SendEvent::Released { tag, .. } => Some(*tag),
            SendEvent::Accepted { .. } => None,
        })
        .collect();
    released_tags.sort_unstable();
    assert_eq!(released_tags, (0..64).collect::<Vec<_>>());
    let epoll = EventLoopConfig { backend: Some(EventBackend::Epoll), operations_max: 64 };
    let client = EventLoop::new(&epoll).unwrap().client();
    assert_eq!(client.socket_capabilities(), SocketCapabilities::default());
    let rejected = client.submit_send(&socket, vec![bytes()], 0).unwrap_err();
    assert_eq!((rejected.reason, rejected.parts.len()), (io::ErrorKind::Unsupported, 1));
    assert_eq!(client.provide_buffers(&pool(2), 4, 4096).unwrap_err().kind(), io::ErrorKind::Unsupported);
}

#[test]
fn the_copying_send_continues_in_the_middle_of_a_part() {
    let (socket, mut peer) = pair();
    let mut buffer = pool(1).take(4096).unwrap();
    buffer.copy_from(0, b"0123456789");
    let parts = [SendPart::Bytes(b"ab".to_vec()), SendPart::Buffer { buffer, start: 2, length: 5 }];
    for (skip, expected) in [(0, "ab23456"), (1, "b23456"), (2, "23456"), (4, "456")] {
        assert_eq!(send_parts(socket.as_fd(), &parts, skip).unwrap(), expected.len());
        let mut received = vec![0; expected.len()];
        peer.read_exact(&mut received).unwrap();
        assert_eq!(received, expected.as_bytes(), "{skip}");
    }
}

#[test]
fn received_buffers_belong_to_the_receiver() {
    let Some(event_loop) = event_loop() else { return };
    let (client, pool) = (event_loop.client(), pool(2));
    let (socket, mut peer) = pair();
    let group = client.provide_buffers(&pool, 4, 4096).unwrap();
    client.start_receive(&socket, group, 9).unwrap();
    let mut kept = Vec::new();
    for round in 0..20u8 {
        peer.write_all(&[round; 100]).unwrap();
        let received = wait_received(&event_loop, &client, 1);
        let [EventCompletion { tag: 9, result: 100, data: Some(Data::One(buffer)) }] = &received[..] else {
            panic!("{received:?}")
        };
        assert_eq!(buffer.len(), 100);
        kept.extend(received);
    }
    drop(peer);
    let end = wait_received(&event_loop, &client, 1);
    assert!(matches!(end[..], [EventCompletion { tag: 9, result: 0, data: None }]), "{end:?}");
    for (round, received) in kept.iter().enumerate() {
        assert!(slice(received).iter().all(|byte| usize::from(*byte) == round));
    }
}

#[test]
fn a_receive_without_buffers_continues_when_there_are_some() {
    let Some(event_loop) = event_loop() else { return };
    // A chunk for the ring and one for two buffers.
    let (client, pool) = (event_loop.client(), pool(2));
    let (socket, mut peer) = pair();
    let group = client.provide_buffers(&pool, 2, dma::BUFFER_BYTES_MAX).unwrap();
    client.start_receive(&socket, group, 9).unwrap();
    let mut held = Vec::new();
    for round in 0..2u8 {
        peer.write_all(&[round; 10]).unwrap();
        held.extend(wait_received(&event_loop, &client, 1));
    }
    // Both buffers are held: the kernel has none.
    peer.write_all(&[2; 10]).unwrap();
    for _ in 0..5 {
        event_loop.wait(Some(5_000_000));
        let mut none = Vec::new();
        assert_eq!(client.reap(&mut none), 0, "{none:?}");
    }
    drop(held.remove(0));
    let received = wait_received(&event_loop, &client, 1);
    assert_eq!(slice(&received[0]), [2; 10]);
}

#[test]
fn a_stopped_receive_ends_once_and_can_start_again() {
    let Some(event_loop) = event_loop() else { return };
    let (client, pool) = (event_loop.client(), pool(2));
    let (socket, mut peer) = pair();
    let group = client.provide_buffers(&pool, 4, 4096).unwrap();
    for round in 0..3u8 {
        let receive = client.start_receive(&socket, group, round.into()).unwrap();
        peer.write_all(&[round; 10]).unwrap();
        let received = wait_received(&event_loop, &client, 1);
        assert_eq!(slice(&received[0]), [round; 10]);
        client.stop_receive(receive);
        let end = wait_received(&event_loop, &client, 1);
        assert_eq!((end[0].tag, end[0].result), (round.into(), -libc::ECANCELED));
        client.stop_receive(receive);
    }
}

#[test]
fn buffers_of_a_dropped_client_return_when_its_receives_have_ended() {
    let Some(event_loop) = event_loop() else { return };
    let (client, pool) = (event_loop.client(), pool(2));
    let (socket, mut peer) = pair();
    let large = dma::BUFFER_BYTES_MAX;
    let group = client.provide_buffers(&pool, 2, large).unwrap();
    client.start_receive(&socket, group, 9).unwrap();
    event_loop.turn();
    drop((client, socket));
    assert!(pool.take(large).is_none(), "the kernel may still write into the buffers");
    let start = Instant::now();
    while pool.take(large).is_none() {
        assert!(start.elapsed() < TIMEOUT);
        event_loop.wait(Some(10_000_000));
    }
    // The receive no longer keeps the socket open.
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
}

#[test]
fn dropping_the_event_loop_ends_receives_and_returns_their_buffers() {
    let Some(event_loop) = event_loop() else { return };
    let (client, pool) = (event_loop.client(), pool(2));
    let (socket, mut peer) = pair();
    let large = dma::BUFFER_BYTES_MAX;
    let group = client.provide_buffers(&pool, 2, large).unwrap();
    client.start_receive(&socket, group, 9).unwrap();
    // One more, which waits for buffers.
    let (starved, mut starved_peer) = pair();
    client.start_receive(&starved, group, 10).unwrap();
    let mut held = Vec::new();
    for _ in 0..2 {
        peer.write_all(b"x").unwrap();
        held.extend(wait_received(&event_loop, &client, 1));
    }
    starved_peer.write_all(b"x").unwrap();
    event_loop.wait(Some(5_000_000));
    let start = Instant::now();
    drop((event_loop, client));
    assert!(start.elapsed() < DROP_TIME_EXPECTED, "a receive was not cancelled");
    drop(held);
    assert!(pool.take(large).is_some() && pool.take(large).is_some());
}

/// Dropping an event loop whose operations can be cancelled takes much less than its time limit of one second.
const DROP_TIME_EXPECTED: Duration = Duration::from_millis(900);
