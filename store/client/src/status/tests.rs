//! Nodes that answer, and all that is none: over sockets, against peers with the real handshake.
#![allow(clippy::unwrap_used)]

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Barrier;

use reactor::{IdlePolicy, Reactor, ReactorConfig};
use sockets::{ByteStream, Sockets, StreamAddress, TransferResult};
use store_link::ClusterKey;

use super::*;

/// A stream that waits for its peer.
struct BlockingStream(TcpStream);

fn transferred(result: io::Result<usize>) -> TransferResult {
    match result {
        Ok(0) => TransferResult::Closed,
        Ok(bytes) => TransferResult::Bytes(bytes),
        Err(error) => TransferResult::Failed(error.kind()),
    }
}

impl ByteStream for BlockingStream {
    fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        transferred(self.0.read_vectored(parts))
    }

    fn send(&mut self, parts: &[IoSlice<'_>]) -> TransferResult {
        transferred(self.0.write_vectored(parts))
    }
}

fn identity(node: Option<u32>, cluster: u8, key: u8) -> Identity {
    let key = ClusterKey::from_bytes([key; 32]);
    Identity { cluster: [cluster; 16], node: node.map(ReplicaId), key: key.into() }
}

/// What a node sends when it is asked; `None` closes the connection.
type NodeResponse = Box<dyn FnOnce() -> Option<Vec<u8>> + Send>;

/// A node that takes one connection.
fn node(identity: Identity, respond: NodeResponse) -> NodeAddress {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut stream = BlockingStream(listener.accept().unwrap().0);
        let mut link = Link::accept(identity.into());
        let mut respond = Some(respond);
        loop {
            let mut events = Vec::new();
            if link.drive(&mut stream, &mut events).is_err() {
                return;
            }
            for event in events {
                if let LinkEvent::Frame { frame: Frame::StatusRequest { number }, group: 0 } = event {
                    let Some(report) = respond.take().and_then(|respond| respond()) else { return };
                    // What is no answer to the request is passed over.
                    link.send(Frame::Status { number: number + 1, report: (*b"null").into() }.encode(0));
                    link.send(Frame::Status { number, report: report.into() }.encode(0));
                    let _ = link.write(&mut stream);
                }
            }
        }
    });
    plain(address)
}

fn plain(address: SocketAddr) -> NodeAddress {
    NodeAddress { stream: StreamAddress::Tcp(address), has_tls: false }
}

fn answering(id: u32, report: &str) -> NodeAddress {
    let report = report.as_bytes().to_vec();
    node(identity(Some(id), 1, 1), Box::new(move || Some(report)))
}

/// Asks the nodes, from 1 on.
fn ask(nodes: Vec<NodeAddress>, timeout_ns: u64) -> BTreeMap<u32, Result<Value, String>> {
    let reactor = Reactor::new(&ReactorConfig { idle: IdlePolicy::Sleep, ..Default::default() }).unwrap();
    let core = reactor.core();
    let nodes = (1..).map(ReplicaId).zip(nodes).collect();
    let asked = async move { ask_nodes::<Sockets>(&core, identity(None, 1, 1), nodes, timeout_ns).await };
    let answers = reactor.block_on(asked).into_iter();
    answers.map(|(node, answer)| (node.0, answer.map_err(|error| error.to_string()))).collect()
}

#[test]
fn a_node_reports_or_there_is_a_reason() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let refusing = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let long = format!(r#"{{"node":1,"text":"{}"}}"#, "x".repeat(3 << 20));
    let deep = "[".repeat(4 << 20);
    let answers = ask(
        vec![
            answering(1, &long),
            answering(2, r#"{"node":2,"later versions":["know","more"]}"#),
            answering(3, r#"{"node":4}"#),
            answering(4, &deep),
            answering(5, r#"{"node":5,"error":"it has 5000000 bytes"}"#),
            node(identity(Some(6), 1, 1), Box::new(|| None)),
            node(identity(Some(7), 1, 2), Box::new(|| unreachable!("it has another key"))),
            node(identity(Some(8), 2, 1), Box::new(|| unreachable!("it is of another cluster"))),
            node(identity(Some(10), 1, 1), Box::new(|| unreachable!("it is another node"))),
            plain(silent.local_addr().unwrap()),
            plain(refusing),
            answering(12, r#"["node"]"#),
        ],
        1_000_000_000,
    );
    assert_eq!(answers[&1].as_ref().unwrap()["text"].as_str().unwrap().len(), 3 << 20);
    assert_eq!(answers[&2].as_ref().unwrap()["later versions"][1], "more");
    let ends = "it closed the connection instead of an answer";
    for (node, reason) in [
        (3, "its answer is no status: it is that of node 4"),
        (4, "its answer is no status: recursion limit exceeded"),
        (5, "its answer is no status: it has 5000000 bytes"),
        (6, ends),
        (7, "the peer does not have the key of this cluster"),
        (8, "it closed the connection before it proved its key"),
        (9, "the peer is node Some(ReplicaId(10))"),
        (10, "timed out"),
        (11, "it cannot be reached: connection refused"),
        (12, "its answer is no status: it names no node"),
    ] {
        let error = answers[&node].as_ref().unwrap_err();
        assert!(error.starts_with(reason), "node {node}: {error}");
    }
}

#[test]
fn nodes_are_asked_at_the_same_time_and_all_of_them() {
    let all = 2 * ASKED_MAX as u32 + 5;
    // The first of those that are asked at a time answers when the last one was asked.
    let together = Arc::new(Barrier::new(2));
    let respond = |id: u32| -> NodeResponse {
        let together = [1, ASKED_MAX as u32].contains(&id).then(|| together.clone());
        Box::new(move || {
            together.map(|together| together.wait());
            Some(format!(r#"{{"node":{id}}}"#).into_bytes())
        })
    };
    let nodes = (1..=all).map(|id| node(identity(Some(id), 1, 1), respond(id))).collect();
    let answers = ask(nodes, 60_000_000_000);
    assert_eq!(answers.len(), all as usize);
    answers.iter().for_each(|(node, answer)| assert_eq!(answer.as_ref().unwrap()["node"], *node));
}
