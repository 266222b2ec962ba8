//! Streams over links that delay, cut and lose.

use std::io::{IoSlice, IoSliceMut};

use sockets::{ConnectionId, CoreNetwork, Listen, Network, NetworkEvent, StreamAddress};

use super::*;
use crate::World;

const PORT: u16 = 7;

/// A world of two nodes, with a stream from the first to the second.
struct Pair {
    world: World,
    client: SimulatedLinks,
    client_id: ConnectionId,
    server: SimulatedLinks,
    server_id: ConnectionId,
}

fn address() -> StreamAddress {
    SocketAddr::new(node_address(1), PORT).into()
}

fn link(delay_ns: u64, jitter_ns: u64) -> LinkConfig {
    LinkConfig { delay_ns, jitter_ns, byte_ps: 0, blocked: false }
}

impl Pair {
    fn new(seed: u64, config: LinkConfig, options: FabricOptions) -> Pair {
        let world = World::new(seed, options);
        let (one, other) = (world.add_node(), world.add_node());
        world.boot(one, 1);
        world.boot(other, 1);
        world.set_link(one, other, config);
        world.set_link(other, one, config);
        let mut client = SimulatedLinks::of_core(&world.cores(one)[0]);
        let mut server = SimulatedLinks::of_core(&world.cores(other)[0]);
        server.listen(&address()).unwrap();
        let stream = client.connect(&address()).unwrap();
        let client_id = client.add(stream).unwrap();
        let mut pair = Pair { world, client, client_id, server, server_id: client_id };
        pair.run(1_000_000);
        pair.server_id = pair.accept();
        pair
    }

    fn run(&self, ns: u64) {
        self.world.run_until(self.world.now_ns() + ns);
    }

    fn accept(&mut self) -> ConnectionId {
        let mut events = Vec::new();
        self.server.poll(&mut events);
        let stream = events.into_iter().find_map(|event| match event {
            NetworkEvent::Incoming { stream, .. } => Some(stream),
            _ => None,
        });
        self.server.add(stream.unwrap()).unwrap()
    }

    fn send(&mut self, text: &str) {
        let sent = self.client.send(self.client_id, &[IoSlice::new(text.as_bytes())]);
        assert!(matches!(sent, TransferResult::Bytes(count) if count == text.len()), "{sent:?}");
    }

    /// What the server reads until nothing more is there, and how that ends.
    fn read(&mut self) -> (String, TransferResult) {
        let (mut text, mut buffer) = (Vec::new(), [0; 3]);
        loop {
            match self.server.receive(self.server_id, &mut [IoSliceMut::new(&mut buffer)]) {
                TransferResult::Bytes(count) => text.extend_from_slice(&buffer[..count]),
                end => return (String::from_utf8(text).unwrap(), end),
            }
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.world.end();
    }
}

#[test]
fn bytes_arrive_in_order_after_the_delay() {
    for seed in 0..20 {
        let mut pair = Pair::new(seed, link(100_000, 50_000), FabricOptions::default());
        pair.send("one ");
        pair.run(99_999);
        assert!(matches!(pair.read(), (text, TransferResult::Blocked) if text.is_empty()));
        pair.send("two ");
        pair.send("three");
        pair.run(500_000);
        assert!(matches!(pair.read(), (text, TransferResult::Blocked) if text == "one two three"));
    }
}

#[test]
fn one_direction_is_cut_and_what_was_sent_travels_on_when_it_opens() {
    let mut pair = Pair::new(1, link(10_000, 0), FabricOptions::default());
    pair.world.block(0, 1, true);
    pair.send("late");
    // The other direction is open.
    let answer = pair.server.send(pair.server_id, &[IoSlice::new(b"hello")]);
    assert!(matches!(answer, TransferResult::Bytes(5)));
    pair.run(1_000_000_000);
    let mut buffer = [0; 16];
    let received = pair.client.receive(pair.client_id, &mut [IoSliceMut::new(&mut buffer)]);
    assert!(matches!(received, TransferResult::Bytes(5)) && buffer.starts_with(b"hello"));
    assert!(pair.read().0.is_empty());
    pair.world.block(0, 1, false);
    pair.run(10_000);
    assert_eq!(pair.read().0, "late");
}

#[test]
fn streams_overtake_each_other() {
    let orders: std::collections::BTreeSet<bool> = (0..50)
        .map(|seed| {
            let mut pair = Pair::new(seed, link(1_000, 100_000), FabricOptions::default());
            let stream = pair.client.connect(&address()).unwrap();
            let second = pair.client.add(stream).unwrap();
            pair.run(1_000_000);
            let second_end = pair.accept();
            pair.send("first");
            pair.client.send(second, &[IoSlice::new(b"second")]);
            let mut buffer = [0; 16];
            loop {
                pair.run(100);
                let first = !pair.read().0.is_empty();
                let parts = &mut [IoSliceMut::new(&mut buffer)];
                let second = matches!(pair.server.receive(second_end, parts), TransferResult::Bytes(_));
                if first || second {
                    return first;
                }
            }
        })
        .collect();
    assert_eq!(orders.len(), 2, "always the same order");
}

#[test]
fn a_full_window_blocks_the_sender_until_the_receiver_reads() {
    let mut pair = Pair::new(1, link(1_000, 0), FabricOptions::default());
    let block = vec![1; WINDOW_BYTES + 1];
    let sent = pair.client.send(pair.client_id, &[IoSlice::new(&block)]);
    assert!(matches!(sent, TransferResult::Bytes(WINDOW_BYTES)), "{sent:?}");
    assert!(matches!(pair.client.send(pair.client_id, &[IoSlice::new(&[1])]), TransferResult::Blocked));
    pair.run(1_000_000);
    pair.client.poll(&mut Vec::new());
    assert!(!pair.client.is_pending());
    assert_eq!(pair.read().0.len(), WINDOW_BYTES);
    pair.run(1_000_000);
    assert!(pair.client.is_pending(), "it may send again");
    pair.send("x");
}

#[test]
fn a_crashed_node_resets_its_streams_and_refuses_new_ones() {
    let mut pair = Pair::new(1, link(1_000, 0), FabricOptions::default());
    pair.world.crash(1);
    pair.run(10_000);
    let mut buffer = [0; 4];
    let end = pair.client.receive(pair.client_id, &mut [IoSliceMut::new(&mut buffer)]);
    assert!(matches!(end, TransferResult::Failed(io::ErrorKind::ConnectionReset)), "{end:?}");
    let stream = pair.client.connect(&address()).unwrap();
    let id = pair.client.add(stream).unwrap();
    pair.run(10_000);
    let end = pair.client.receive(id, &mut [IoSliceMut::new(&mut buffer)]);
    assert!(matches!(end, TransferResult::Failed(io::ErrorKind::ConnectionRefused)), "{end:?}");
}

#[test]
fn what_a_host_sent_before_it_closed_arrives_late() {
    for late_ns in [0, 5_000_000] {
        let mut pair = Pair::new(1, link(1_000, 0), FabricOptions { late_ns });
        pair.world.block(0, 1, true);
        pair.send("write");
        pair.client.close(pair.client_id);
        pair.world.block(0, 1, false);
        pair.run(1_000_000);
        if late_ns > 0 {
            assert!(pair.read().0.is_empty());
            pair.run(4_500_000);
        }
        let (text, end) = pair.read();
        assert!(text == "write" && matches!(end, TransferResult::Closed), "{text} {end:?}");
    }
}
