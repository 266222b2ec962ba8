//! Links over streams that are cut, stalled and broken; peers without the key; bytes that no message is.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use random::WyRand;
use sockets::{ConnectionId, Listen, Network, NetworkEvent, NetworkFaults, SimulatedNetwork};
use store_link::{ClientKey, ClusterKey, Identity, Link, LinkError, LinkEvent};
use wire_replica::{ClientReply, EncodedFrame, Frame, Greeting, GreetingKind, KeyName, ReplicaId};

fn identity(cluster: u8, key: u8, node: Option<u32>) -> Arc<Identity> {
    let key = ClusterKey::from_bytes([key; 32]);
    Arc::new(Identity { cluster: [cluster; 16], node: node.map(ReplicaId), key: key.into() })
}

/// Two networks with a connection between them.
struct Pair {
    near: (SimulatedNetwork, ConnectionId),
    far: (SimulatedNetwork, ConnectionId),
}

impl Pair {
    fn new(seed: u64, faults: NetworkFaults) -> Pair {
        let (mut near, mut far) = SimulatedNetwork::pair(seed, faults);
        let listener = far.listen(&"127.0.0.1:1".parse().unwrap()).unwrap();
        let stream = near.connect(far.local_address(listener).unwrap());
        let near_id = near.add(stream).unwrap();
        let mut events = Vec::new();
        far.poll(&mut events);
        let incoming = events.into_iter().find_map(|event| match event {
            NetworkEvent::Incoming { stream, .. } => Some(stream),
            _ => None,
        });
        let far_id = far.add(incoming.unwrap()).unwrap();
        Pair { near: (near, near_id), far: (far, far_id) }
    }

    /// Drives both ends for a while; returns what each received, or the first error.
    fn run(&mut self, near: &mut Link, far: &mut Link) -> Result<[Vec<LinkEvent>; 2], LinkError> {
        let mut received = [Vec::new(), Vec::new()];
        for _ in 0..400 {
            let ends = [(&mut self.near, &mut *near), (&mut self.far, &mut *far)];
            for (((network, id), link), out) in ends.into_iter().zip(&mut received) {
                network.poll(&mut Vec::new());
                link.drive(&mut network.stream(*id), out)?;
            }
        }
        Ok(received)
    }
}

fn reply(number: u64, bytes: usize) -> Frame {
    Frame::Reply { client: 1, number, reply: ClientReply::Data(vec![number as u8; bytes].into()) }
}

#[test]
fn messages_arrive_in_order_however_the_stream_is_cut() {
    for seed in 0..60 {
        let faults = NetworkFaults { cut_per_mille: 500, stall_per_mille: 200, break_per_mille: 0 };
        let mut pair = Pair::new(seed, faults);
        let mut random = WyRand::new(seed);
        let mut near = Link::connect_to(identity(1, 1, None), ReplicaId(2)).unwrap();
        let mut far = Link::accept(identity(1, 1, Some(2)));
        if seed % 3 > 0 {
            near = near.over_tls();
        }
        if seed % 3 == 2 {
            far = far.requiring_tls();
        }
        let sizes: Vec<usize> = (0..20).map(|_| random.index(20_000)).collect();
        // Also before the greetings are over.
        for (number, bytes) in (0..).zip(&sizes) {
            near.send(reply(number, *bytes).encode(7));
            far.send(reply(number, *bytes).encode(7));
        }
        let received = pair.run(&mut near, &mut far).unwrap();
        assert_eq!((near.is_tls(), far.is_tls()), (seed % 3 > 0, seed % 3 > 0));
        for (events, expected) in received.into_iter().zip([Some(ReplicaId(2)), None]) {
            let mut events = events.into_iter();
            assert!(matches!(events.next(), Some(LinkEvent::Ready { peer, key: None }) if peer == expected));
            let frames: Vec<Frame> = events
                .map(|event| match event {
                    LinkEvent::Frame { group: 7, frame } => frame,
                    other => panic!("{other:?}"),
                })
                .collect();
            let sent: Vec<Frame> = (0..).zip(&sizes).map(|(number, bytes)| reply(number, *bytes)).collect();
            assert!(frames == sent, "seed {seed}: {} of {} messages", frames.len(), sent.len());
        }
    }
}

#[test]
fn who_does_not_know_the_key_gets_no_further() {
    let refused = |near: Arc<Identity>, far: Arc<Identity>, node: Option<u32>| {
        let mut pair = Pair::new(1, NetworkFaults::default());
        let mut near = match node {
            Some(node) => Link::connect_to(near, ReplicaId(node)).unwrap(),
            None => Link::connect(near).unwrap(),
        };
        let mut far = Link::accept(far);
        let error = pair.run(&mut near, &mut far).unwrap_err().to_string();
        assert!(!far.is_ready(), "{error}");
        error
    };
    let right = || identity(1, 1, Some(2));
    assert_eq!(
        refused(identity(1, 9, None), right(), None),
        "the peer does not have the key of this cluster"
    );
    assert_eq!(refused(identity(9, 1, None), right(), None), "the peer is of another cluster");
    let error = refused(identity(1, 1, None), right(), Some(3));
    assert!(error.starts_with("the peer is node Some(ReplicaId(2)), not"), "{error}");
}

#[test]
fn tls_needs_the_key_of_the_greetings_and_can_be_required() {
    let name = |name: &str| KeyName::new(name).unwrap();
    let cluster = ClusterKey::from_bytes([1; 32]);
    let of_client = |of: &str, context: &[u8]| {
        let key = cluster.client_key(name(of), context).into();
        Arc::new(Identity { cluster: [1; 16], node: None, key })
    };
    let connect = |near: Arc<Identity>, has_tls: bool| {
        let taken = Arc::new([cluster.client_key(name("vm"), b"1")].into_iter().collect());
        let mut pair = Pair::new(1, NetworkFaults::default());
        let mut near = Link::connect_to(near, ReplicaId(2)).unwrap();
        if has_tls {
            near = near.over_tls();
        }
        let mut far = Link::accept_with(identity(1, 1, Some(2)), taken).requiring_tls();
        let outcome = pair.run(&mut near, &mut far);
        assert_eq!((near.is_ready(), far.is_ready()), (outcome.is_ok(), outcome.is_ok()));
        outcome.map(drop).map_err(|error| error.to_string())
    };
    connect(identity(1, 1, None), true).unwrap();
    connect(of_client("vm", b"1"), true).unwrap();
    assert_eq!(
        connect(identity(1, 1, None), false).unwrap_err(),
        "the peer connected without TLS, which this node requires"
    );
    let unknown =
        "TLS of the connection: ClientHello offers a key with an identity that is not known here".to_string();
    let wrong =
        "TLS of the connection: ClientHello's binder does not match: the two ends have different keys";
    for (near, expected) in [
        (identity(1, 9, None), wrong),
        (identity(9, 1, None), &unknown),
        (of_client("vm", b"2"), wrong),
        (of_client("other", b"1"), &unknown),
    ] {
        assert_eq!(connect(near, true).unwrap_err(), expected);
    }
}

#[test]
fn what_is_no_handshake_ends_its_connection() {
    let mut random = WyRand::new(7);
    for round in 0..300 {
        let mut pair = Pair::new(round, NetworkFaults::default());
        let mut far = Link::accept(identity(1, 1, Some(2)));
        let mut bytes: Vec<u8> = (0..1 + random.index(40_000)).map(|_| random.next_bits() as u8).collect();
        // A record of a handshake, also with a plausible head.
        bytes[0] = 22;
        if round % 2 == 0 && bytes.len() > 9 {
            bytes[1..9].copy_from_slice(&[3, 1, 2, 0, 1, 0, 1, 252]);
        }
        let (network, id) = &mut pair.near;
        network.send(*id, &[std::io::IoSlice::new(&bytes)]);
        let mut received = Vec::new();
        for _ in 0..100 {
            let (network, id) = &mut pair.far;
            network.poll(&mut Vec::new());
            if let Err(error) = far.drive(&mut network.stream(*id), &mut received) {
                assert!(matches!(error, LinkError::Tls(_)), "{error}");
                break;
            }
        }
        assert!(!far.is_ready() && received.is_empty());
    }
}

#[test]
fn a_client_has_a_key_that_the_node_takes_or_gets_no_further() {
    let name = |name: &str| KeyName::new(name).unwrap();
    let cluster = ClusterKey::from_bytes([1; 32]);
    let key = |of: &str, context: &[u8]| cluster.client_key(name(of), context);
    let connect = |near: ClientKey| {
        let taken = [key("backup", b"1"), key("vm", b"2")].into_iter().collect();
        let near = Arc::new(Identity { cluster: [1; 16], node: None, key: near.into() });
        let mut pair = Pair::new(1, NetworkFaults::default());
        let mut near = Link::connect_to(near, ReplicaId(2)).unwrap();
        let mut far = Link::accept_with(identity(1, 1, Some(2)), Arc::new(taken));
        let outcome = pair.run(&mut near, &mut far).map(|[_, far]| far);
        assert_eq!((near.is_ready(), far.is_ready()), (outcome.is_ok(), outcome.is_ok()));
        outcome
    };
    let received = connect(key("backup", b"1")).unwrap();
    let ready = LinkEvent::Ready { peer: None, key: Some(name("backup")) };
    assert_eq!(format!("{received:?}"), format!("[{ready:?}]"));
    // Unknown, with other rights, with the secret of another one.
    for (key, of) in [(key("other", b"1"), "other"), (key("backup", b"9"), "backup"), (key("vm", b"1"), "vm")]
    {
        let error = connect(key).unwrap_err();
        assert!(matches!(&error, LinkError::ClientKey(found) if *found == name(of)), "{error}");
        let expected = format!(
            "the client key {of} is not one of this cluster: it is unknown, was deleted, or has another secret"
        );
        assert_eq!(error.to_string(), expected);
    }
    // A client that does not check the node's proof is refused by the node.
    for of in ["other", "backup"] {
        let mut pair = Pair::new(1, NetworkFaults::default());
        let taken = [key("backup", b"1")].into_iter().collect();
        let mut far = Link::accept_with(identity(1, 1, Some(2)), Arc::new(taken));
        let (cluster, nonce) = ([1; 16], [3; 32]);
        let hello = Greeting {
            kind: GreetingKind::Hello,
            sender: None,
            cluster,
            nonce,
            proof: [0; 32],
            key: Some(name(of)),
        };
        let proof = Greeting {
            kind: GreetingKind::Proof,
            nonce: [0; 32],
            proof: [7; 32],
            key: None,
            ..hello.clone()
        };
        let mut drive = |greeting: &Greeting| {
            let (network, id) = &mut pair.near;
            network.send(*id, &[std::io::IoSlice::new(&greeting.encode())]);
            let (network, id) = &mut pair.far;
            network.poll(&mut Vec::new());
            far.drive(&mut network.stream(*id), &mut Vec::new())
        };
        drive(&hello).unwrap();
        assert!(matches!(drive(&proof), Err(LinkError::ClientKey(_))));
        assert!(!far.is_ready());
    }
}

/// One who has no key sends back what it was sent, or proves with what another connection proved.
#[test]
fn proofs_of_others_are_refused() {
    let mut pair = Pair::new(1, NetworkFaults::default());
    let mut far = Link::accept(identity(1, 1, Some(2)));
    let greet = |pair: &mut Pair, far: &mut Link, greeting: &Greeting| {
        let (network, id) = &mut pair.near;
        network.send(*id, &[std::io::IoSlice::new(&greeting.encode())]);
        let (network, id) = &mut pair.far;
        network.poll(&mut Vec::new());
        far.drive(&mut network.stream(*id), &mut Vec::new())
    };
    let hello = Greeting {
        kind: GreetingKind::Hello,
        sender: Some(ReplicaId(1)),
        cluster: [1; 16],
        nonce: [3; 32],
        proof: [0; 32],
        key: None,
    };
    greet(&mut pair, &mut far, &hello).unwrap();
    let mut bytes = [0; Greeting::SIZE];
    let (network, id) = &mut pair.near;
    network.receive(*id, &mut [std::io::IoSliceMut::new(&mut bytes)]);
    let challenge = Greeting::decode(&bytes).unwrap();
    assert_ne!(challenge.proof, [0; 32]);
    let echo =
        Greeting { kind: GreetingKind::Proof, nonce: [0; 32], proof: challenge.proof, ..hello.clone() };
    assert!(matches!(greet(&mut pair, &mut far, &echo), Err(LinkError::Key)));
    assert!(!far.is_ready());
    let mut again = Link::accept(identity(1, 1, Some(2)));
    let mut pair = Pair::new(2, NetworkFaults::default());
    assert!(matches!(greet(&mut pair, &mut again, &echo), Err(LinkError::Order)));
}

#[test]
fn bytes_that_are_no_message_end_the_connection_and_nothing_else() {
    for seed in 0..2000 {
        let mut pair = Pair::new(seed, NetworkFaults::default());
        let mut random = WyRand::new(seed);
        let mut near = Link::connect(identity(1, 1, None)).unwrap();
        let mut far = Link::accept(identity(1, 1, Some(2)));
        let is_greeted = seed % 2 == 0;
        if is_greeted {
            pair.run(&mut near, &mut far).unwrap();
        }
        let EncodedFrame { head, data } = reply(seed, random.index(500)).encode(1);
        let mut bytes = [head, data.concat()].concat();
        let at = random.index(bytes.len());
        bytes[at] ^= 1 << random.index(8);
        bytes.truncate(1 + random.index(bytes.len()));
        let (network, id) = &mut pair.near;
        network.send(*id, &[std::io::IoSlice::new(&bytes)]);
        network.close(*id);
        let (network, id) = &mut pair.far;
        let mut events = Vec::new();
        network.poll(&mut Vec::new());
        let outcome = (0..4).find_map(|_| far.drive(&mut network.stream(*id), &mut events).err());
        assert!(outcome.is_some(), "seed {seed}");
        assert!(!events.iter().any(|event| matches!(event, LinkEvent::Frame { .. })), "seed {seed}");
    }
}
