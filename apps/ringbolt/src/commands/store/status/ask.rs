//! Asks the nodes of a cluster for their reports: those of this machine by their RPC sockets, the others over
//! the network.

use std::collections::BTreeMap;
use std::time::Duration;

use bdev::Uuid;
use cluster_map::{ClusterMap, MapError, NodeRecord, ReplicaId};
use reactor::{IdlePolicy, Reactor, ReactorConfig};
use serde_json::Value;
use sockets::Sockets;
use store_client::{StatusError, ask_nodes};
use store_link::{ClusterKey, Identity, NodeAddress};

use crate::command_error::CommandError;
use crate::commands::rpc;
use crate::commands::store::layout::ClusterLayout;

/// How long a node may take for its answer.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(2);

/// What a node answered.
pub(super) enum NodeReply {
    /// Its report, the result of `store_node_get_status`.
    Report(Value),
    /// It serves, but its version has no report for other machines.
    Unreported(String),
    /// Nothing, and why.
    Silent(String),
    /// Nothing: an operator stopped it.
    Stopped(String),
}

/// The answer of a node, and whether the node is on this machine.
pub(super) struct NodeAnswer {
    pub(super) answer: NodeReply,
    pub(super) is_local: bool,
}

/// The answers of the nodes.
pub(super) type NodeAnswers = BTreeMap<u32, NodeAnswer>;

type Addresses = BTreeMap<ReplicaId, Option<NodeAddress>>;

/// Asks all nodes of the map, at the same time; if the map cannot be used, those that the nodes of this
/// machine know, and why it cannot.
///
/// # Errors
/// The map has something that it cannot have.
pub(super) fn ask(layout: &ClusterLayout) -> Result<(NodeAnswers, Option<MapError>), CommandError> {
    let (mut answers, of_others) = std::thread::scope(|scope| {
        let ask = |node: u32| {
            let socket = layout.socket(node);
            scope.spawn(move || rpc::call(&socket, "store_node_get_status", Value::Null, TIMEOUT))
        };
        let local: Vec<_> = layout.nodes.iter().map(|node| (*node, ask(*node))).collect();
        let of_others = read_nodes(&*layout.map).map(|(cluster, nodes)| ask_others(layout, cluster, nodes));
        let answers = local.into_iter().map(|(node, asked)| {
            let answer = match asked.join() {
                Ok(Ok(report)) => NodeReply::Report(report),
                Ok(Err(_)) if layout.is_stopped(node) => NodeReply::Stopped(format!(
                    "an operator stopped it; `ringbolt store start-node {node}` starts it"
                )),
                Ok(Err(error)) => NodeReply::Silent(match layout.key_problem(node) {
                    Some(problem) => format!("{error}; {problem}"),
                    None => error.to_string(),
                }),
                Err(_) => NodeReply::Silent("it could not be asked".to_string()),
            };
            (node, NodeAnswer { answer, is_local: true })
        });
        (answers.collect::<NodeAnswers>(), of_others)
    });
    let (of_others, map_error) = match of_others {
        Ok(answers) => (answers?, None),
        Err(error @ MapError::Storage { .. }) => match known_nodes(&answers) {
            Some((cluster, nodes)) => (ask_others(layout, cluster, nodes)?, Some(error)),
            None => (NodeAnswers::new(), Some(error)),
        },
        Err(error) => return Err(CommandError::operation(error)),
    };
    answers.extend(of_others);
    Ok((answers, map_error))
}

/// The cluster, and the addresses of its nodes; a node that was never started has none.
fn read_nodes(map: &dyn ClusterMap) -> Result<(Uuid, Addresses), MapError> {
    let address = |node: &NodeRecord| {
        let stream = node.addresses.first()?.parse().ok()?;
        Some(NodeAddress { stream, has_tls: !node.tls.is_off() })
    };
    let nodes = map.nodes()?.into_iter().map(|(id, node)| (ReplicaId(id.0), address(&node)));
    Ok((map.cluster()?, nodes.collect()))
}

/// The same, as the nodes of this machine read it last.
fn known_nodes(answers: &NodeAnswers) -> Option<(Uuid, Addresses)> {
    let mut known = None;
    let mut nodes = Addresses::new();
    for answer in answers.values() {
        let NodeReply::Report(report) = &answer.answer else { continue };
        known = known.or(report["cluster"].as_str().and_then(|cluster| cluster.parse().ok()));
        for node in report["nodes"].as_array().into_iter().flatten() {
            let number = node["node"].as_u64().and_then(|number| u32::try_from(number).ok());
            let stream = node["address"].as_str().and_then(|address| address.parse().ok());
            let has_tls = node["tls"].as_bool().unwrap_or(false);
            let address = stream.map(|stream| NodeAddress { stream, has_tls });
            nodes.extend(number.map(|number| (ReplicaId(number), address)));
        }
    }
    Some((known?, nodes))
}

/// Asks the nodes that are not on this machine.
fn ask_others(layout: &ClusterLayout, cluster: Uuid, nodes: Addresses) -> Result<NodeAnswers, CommandError> {
    let mut answers = NodeAnswers::new();
    let mut asked = BTreeMap::new();
    for (node, address) in nodes.into_iter().filter(|(node, _)| !layout.nodes.contains(&node.0)) {
        match address {
            Some(address) => _ = asked.insert(node, address),
            None => {
                let answer = NodeReply::Silent("it was never started".to_string());
                answers.insert(node.0, NodeAnswer { answer, is_local: false });
            }
        }
    }
    if asked.is_empty() {
        return Ok(answers);
    }
    let path = layout.directory.join("key");
    let key = ClusterKey::load(&path)
        .map_err(|error| CommandError::operation(format!("{}: {error}", path.display())))?;
    let identity = Identity { cluster: cluster.into_bytes(), node: None, key: key.into() };
    let config = ReactorConfig { idle: IdlePolicy::Sleep, ..ReactorConfig::default() };
    let reactor = Reactor::new(&config).map_err(CommandError::environment)?;
    let core = reactor.core();
    let timeout_ns = TIMEOUT.as_nanos() as u64;
    let reports =
        reactor.block_on(async move { ask_nodes::<Sockets>(&core, identity, asked, timeout_ns).await });
    answers.extend(reports.into_iter().map(|(node, report)| {
        let answer = match report {
            Ok(report) => NodeReply::Report(report),
            Err(error @ StatusError::Closed) => NodeReply::Unreported(error.to_string()),
            Err(error) => NodeReply::Silent(error.to_string()),
        };
        (node.0, NodeAnswer { answer, is_local: false })
    }));
    Ok(answers)
}
