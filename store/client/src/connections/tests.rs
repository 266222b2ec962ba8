//! What a message costs: one write, and no read before its answer is there.
#![allow(clippy::unwrap_used)]

use std::io::{self, IoSlice, IoSliceMut};

use sockets::{Listen, NetworkFaults, SimulatedNetwork, SimulatedStream, StreamAddress, TransferResult};
use store_link::ClusterKey;
use wire_replica::ClientReply;

use super::*;

/// Counts reads and writes, and reports connections as ready only where a test says so: the simulation does
/// always.
struct CountedNetwork {
    network: SimulatedNetwork,
    are_ready: bool,
    address: StreamAddress,
    reads: usize,
    writes: usize,
}

impl Network for CountedNetwork {
    type Stream = SimulatedStream;

    fn local_address_of(stream: &SimulatedStream) -> Option<StreamAddress> {
        SimulatedNetwork::local_address_of(stream)
    }

    fn add(&mut self, stream: SimulatedStream) -> io::Result<ConnectionId> {
        self.network.add(stream)
    }

    fn poll(&mut self, events: &mut Vec<NetworkEvent<SimulatedStream>>) -> usize {
        let before = events.len();
        self.network.poll(events);
        if !self.are_ready {
            events.truncate(before);
        }
        events.len() - before
    }

    fn receive(&mut self, connection: ConnectionId, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        self.reads += 1;
        self.network.receive(connection, parts)
    }

    fn send(&mut self, connection: ConnectionId, parts: &[IoSlice<'_>]) -> TransferResult {
        self.writes += 1;
        self.network.send(connection, parts)
    }

    fn close(&mut self, connection: ConnectionId) {
        self.network.close(connection);
    }

    fn is_pending(&self) -> bool {
        self.network.is_pending()
    }
}

impl CoreNetwork for CountedNetwork {
    fn of_core(_core: &Core) -> CountedNetwork {
        unreachable!("tests make it")
    }

    fn connect(&mut self, _address: &StreamAddress) -> io::Result<SimulatedStream> {
        Ok(self.network.connect(self.address.clone()))
    }
}

fn identity(node: Option<u32>) -> Arc<Identity> {
    let key = ClusterKey::from_bytes([1; 32]);
    Arc::new(Identity { cluster: [1; 16], node: node.map(ReplicaId), key: key.into() })
}

fn reply(number: u64) -> EncodedFrame {
    Frame::Reply { client: 1, number, reply: ClientReply::Written }.encode(7)
}

#[test]
fn a_node_that_takes_no_more_connections_is_tried_less_and_less() {
    let address = NodeAddress { stream: "127.0.0.1:1".parse().unwrap(), has_tls: false };
    let mut node = NodeConnection::new(&address);
    let mut waits = Vec::new();
    for now_ns in 0..9 {
        node.ended(true, now_ns);
        waits.push((node.at_ns - now_ns) / 1_000_000);
    }
    assert_eq!(waits, [20, 40, 80, 160, 320, 640, 1000, 1000, 1000]);
    // One that is not there is another matter: it may come at any moment.
    let mut absent = NodeConnection::new(&address);
    (0..9).for_each(|_| absent.ended(false, 5));
    assert_eq!(absent.at_ns, 5 + RECONNECT_NS);
}

#[test]
fn a_message_is_written_without_a_read() {
    let node = ReplicaId(2);
    let faults = NetworkFaults { cut_per_mille: 0, stall_per_mille: 0, break_per_mille: 0 };
    let (near, mut far) = SimulatedNetwork::pair(1, faults);
    let address: StreamAddress = "127.0.0.1:1".parse().unwrap();
    let listener = far.listen(&address).unwrap();
    let address = far.local_address(listener).unwrap();
    let mut connections = Connections {
        network: CountedNetwork {
            network: near,
            are_ready: true,
            address: address.clone(),
            reads: 0,
            writes: 0,
        },
        identity: identity(None),
        nodes: BTreeMap::from([(
            node,
            NodeConnection::new(&NodeAddress { stream: address, has_tls: false }),
        )]),
        by_connection: BTreeMap::new(),
        events: Vec::new(),
        received: Vec::new(),
        unread: Vec::new(),
    };
    let mut accepted: Option<(ConnectionId, Link)> = None;
    let mut run = |connections: &mut Connections<CountedNetwork>, number: Option<u64>| {
        let (mut events, mut received, mut replies) = (Vec::new(), Vec::new(), Vec::new());
        far.poll(&mut events);
        for event in events {
            if let NetworkEvent::Incoming { stream, .. } = event {
                accepted = Some((far.add(stream).unwrap(), Link::accept(identity(Some(2)))));
            }
        }
        if let Some((id, link)) = &mut accepted {
            number.into_iter().for_each(|number| link.send(reply(number)));
            link.drive(&mut far.stream(*id), &mut received).unwrap();
        }
        let sink = |_, frame| match frame {
            Frame::Reply { number, .. } => replies.push(number),
            _ => unreachable!("a node answers"),
        };
        connections.poll(0, sink, |node| panic!("{node:?} is lost"));
        replies
    };
    assert!(connections.send(node, || reply(1), 0));
    for _ in 0..100 {
        assert_eq!(run(&mut connections, None), Vec::<u64>::new());
    }
    assert!(connections.nodes[&node].link.as_ref().unwrap().1.is_ready());

    for number in 2..10 {
        connections.network.are_ready = false;
        let (reads, writes) = (connections.network.reads, connections.network.writes);
        assert!(connections.send(node, || reply(number), 0));
        assert_eq!(run(&mut connections, None), Vec::<u64>::new());
        assert_eq!((connections.network.reads, connections.network.writes), (reads, writes + 1));
        connections.network.are_ready = true;
        assert_eq!(run(&mut connections, Some(number)), [number]);
    }
}
