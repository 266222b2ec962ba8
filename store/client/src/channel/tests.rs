//! What a channel does when a group has ended its session.

use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};

use block_io::Tag;
use cluster_map::{PoolClass, PoolRecord};
use reactor::{Reactor, ReactorConfig};
use sockets::{
    ConnectionId, Listen, Network, NetworkEvent, NetworkFaults, SimulatedNetwork, SimulatedStream,
    StreamAddress, TransferResult,
};
use store_link::{ClusterKey, Identity, Link, LinkEvent, NodeAddress};
use wire_store::BLOCK_BYTES;

use super::*;

const NODE: ReplicaId = ReplicaId(2);
const GROUP: u32 = 5;

thread_local! {
    /// The network of the next channel of this thread.
    static NEAR: RefCell<Option<SimulatedNetwork>> = const { RefCell::new(None) };
}

struct TestNetwork(SimulatedNetwork);

impl Network for TestNetwork {
    type Stream = SimulatedStream;

    fn local_address_of(stream: &SimulatedStream) -> Option<StreamAddress> {
        SimulatedNetwork::local_address_of(stream)
    }

    fn add(&mut self, stream: SimulatedStream) -> io::Result<ConnectionId> {
        self.0.add(stream)
    }

    fn poll(&mut self, events: &mut Vec<NetworkEvent<SimulatedStream>>) -> usize {
        self.0.poll(events)
    }

    fn receive(&mut self, connection: ConnectionId, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        self.0.receive(connection, parts)
    }

    fn send(&mut self, connection: ConnectionId, parts: &[IoSlice<'_>]) -> TransferResult {
        self.0.send(connection, parts)
    }

    fn close(&mut self, connection: ConnectionId) {
        self.0.close(connection);
    }

    fn is_pending(&self) -> bool {
        self.0.is_pending()
    }
}

impl CoreNetwork for TestNetwork {
    fn of_core(_core: &Core) -> TestNetwork {
        TestNetwork(NEAR.take().expect("a network for the channel"))
    }

    fn connect(&mut self, address: &StreamAddress) -> io::Result<SimulatedStream> {
        Ok(self.0.connect(address.clone()))
    }
}

fn identity(node: Option<ReplicaId>) -> Arc<Identity> {
    let key = ClusterKey::from_bytes([1; 32]);
    Arc::new(Identity { cluster: [1; 16], node, key: key.into() })
}

/// A channel, and the node that it is connected to.
struct Rig {
    channel: ImageChannel<TestNetwork>,
    node: SimulatedNetwork,
    link: Option<(ConnectionId, Link)>,
    done: Vec<Completion>,
}

impl Rig {
    fn new(core: &Core) -> Rig {
        let faults = NetworkFaults { cut_per_mille: 0, stall_per_mille: 0, break_per_mille: 0 };
        let (near, mut node) = SimulatedNetwork::pair(1, faults);
        let listener = node.listen(&"127.0.0.1:1".parse().unwrap()).unwrap();
        let stream = node.local_address(listener).unwrap();
        NEAR.set(Some(near));
        let class = PoolClass::default();
        let view = PoolView {
            identity: identity(None),
            pool: PoolRecord { first_group: GROUP, groups: 1, replicas: 1, in_sync_min: 1, class },
            nodes: BTreeMap::from([(NODE, NodeAddress { stream, has_tls: false })]),
            replicas: BTreeMap::from([(GROUP, vec![NODE])]),
        };
        let watch = PoolWatch::fixed(view);
        let placement = Placement { first_group: GROUP, groups: 1, volume: 7 };
        let attach = Arc::new(AttachState::new(3, GROUP..GROUP + 1));
        let channel = ImageChannel::new(core, watch, placement, attach, BLOCK_BYTES as u32);
        Rig { channel, node, link: None, done: Vec::new() }
    }

    fn write(&mut self, core: &Core) {
        let mut buffer = core.pool().take(BLOCK_BYTES).unwrap();
        buffer.as_mut_slice().fill(9);
        self.channel.submit(&mut vec![Request::write(Tag(1), 0, 1, buffer)]);
    }

    /// The requests that the node has received.
    fn requests(&mut self) -> Vec<EntryHeader> {
        self.channel.poll(&mut self.done);
        let (mut events, mut received) = (Vec::new(), Vec::new());
        self.node.poll(&mut events);
        for event in events {
            if let NetworkEvent::Incoming { stream, .. } = event {
                self.link = Some((self.node.add(stream).unwrap(), Link::accept(identity(Some(NODE)))));
            }
        }
        if let Some((id, link)) = &mut self.link {
            link.drive(&mut self.node.stream(*id), &mut received).unwrap();
        }
        let headers = received.into_iter().filter_map(|event| match event {
            LinkEvent::Frame { frame: Frame::Request(ClientRequest::Write { header, .. }), .. } => {
                Some(header)
            }
            _ => None,
        });
        headers.collect()
    }

    async fn next_request(&mut self, core: &Core) -> EntryHeader {
        loop {
            let mut requests = self.requests();
            assert!(requests.len() < 2 && self.done.is_empty());
            match requests.pop() {
                Some(header) => return header,
                None => core.sleep_ns(1_000_000).await,
            }
        }
    }

    fn answer(&mut self, header: &EntryHeader, reply: ClientReply) {
        let (client, number) = (header.client, header.client_number);
        let (id, link) = self.link.as_mut().unwrap();
        link.send(Frame::Reply { client, number, reply }.encode(GROUP));
        link.drive(&mut self.node.stream(*id), &mut Vec::new()).unwrap();
    }

    async fn status(&mut self, core: &Core) -> Status {
        loop {
            assert!(self.requests().is_empty(), "there is nothing to send");
            match self.done.pop() {
                Some(completion) => return completion.status(),
                None => core.sleep_ns(1_000_000).await,
            }
        }
    }
}

fn is_open(header: &EntryHeader) -> bool {
    matches!(SessionChange::of(header), Some(SessionChange::Open { volume: 7, attach_epoch: 3 }))
}

fn with_reactor<F: Future<Output = ()> + 'static>(test: impl FnOnce(Core) -> F + 'static) {
    let reactor = Reactor::new(&ReactorConfig::default()).unwrap();
    let core = reactor.core();
    reactor.block_on(async move { test(core).await });
}

#[test]
fn a_write_that_was_sent_once_goes_into_another_session() {
    with_reactor(|core| async move {
        let mut rig = Rig::new(&core);
        rig.write(&core);
        let first = rig.next_request(&core).await;
        assert!(is_open(&first));
        rig.answer(&first, ClientReply::SessionOpened { token: 40 });
        let write = rig.next_request(&core).await;
        assert_eq!((write.client, write.epoch, write.sequence), (first.client, 3, 40));
        rig.answer(&write, ClientReply::SessionEnded);
        let second = rig.next_request(&core).await;
        assert!(is_open(&second) && second.client != first.client);
        rig.answer(&second, ClientReply::SessionOpened { token: 41 });
        let again = rig.next_request(&core).await;
        assert_eq!((again.client, again.epoch, again.sequence), (second.client, 3, 41));
        assert_eq!(again.data_crc32c, write.data_crc32c);
        rig.answer(&again, ClientReply::Written);
        assert_eq!(rig.status(&core).await, Status::SUCCESS);
    });
}

#[test]
fn a_write_that_was_sent_twice_fails_with_its_session() {
    with_reactor(|core| async move {
        let mut rig = Rig::new(&core);
        rig.write(&core);
        let open = rig.next_request(&core).await;
        rig.answer(&open, ClientReply::SessionOpened { token: 40 });
        let write = rig.next_request(&core).await;
        // Without an answer it is sent again: the first may have been executed.
        let again = rig.next_request(&core).await;
        assert_eq!(again, write);
        rig.answer(&again, ClientReply::SessionEnded);
        assert_eq!(rig.status(&core).await, Status::INTERNAL_ERROR);
    });
}
