//! `ringbolt store stop-node` and `start-node`: maintenance of one node of this machine.

use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use cluster_map::{MapError, NodeId, TlsPolicy};
use control::client::{self, CallError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{PidfdFlags, pidfd_open};
use serde_json::{Value, json};

use super::arguments::ClusterArgs;
use super::layout::ClusterLayout;
use super::listen::{check_address, parse_listen};
use crate::command_error::CommandError;
use crate::console::stdout_line;

/// How long the node may take to hand over and to close its device, some times more than it gives itself.
const STOP_MAX: Duration = Duration::from_secs(30);
/// How long a node may take to serve before the command says that it does not. Its logs may be on a slow
/// device.
const START_MAX: Duration = Duration::from_secs(20);
/// How often the socket of a node that starts is tried: nothing says when it is there.
const START_POLL: Duration = Duration::from_millis(50);

/// Arguments of `ringbolt store stop-node`.
#[derive(Args)]
pub(crate) struct StopNodeArgs {
    /// Number of the node
    node: u32,
    /// Stop it although groups wait without it, or no other node takes over
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of: ClusterArgs,
}

/// Arguments of `ringbolt store start-node`.
#[derive(Args)]
pub(crate) struct StartNodeArgs {
    /// Number of the node
    node: u32,
    /// Listen there from now on; the node does not run yet. Without a port it selects a free one
    #[arg(long, value_name = "IP[:PORT]", value_parser = parse_listen)]
    listen: Option<SocketAddr>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of: ClusterArgs,
}

/// The cluster, whose directory has the node.
fn open(of: &ClusterArgs, node: u32) -> Result<ClusterLayout, CommandError> {
    let layout = ClusterLayout::open(&of.cluster, &of.etcd.options())?;
    if layout.nodes.contains(&node) {
        return Ok(layout);
    }
    let is_known = layout.map.nodes().is_ok_and(|nodes| nodes.contains_key(&NodeId(node)));
    Err(CommandError::operation(match is_known {
        true => format!("node {node} is not in {}: run this on its machine", layout.directory.display()),
        false => format!("the cluster has no node {node}"),
    }))
}

fn print(node: u32, state: &str, as_json: bool, line: &str) {
    match as_json {
        true => stdout_line!("{:#}", json!({ "node": node, "state": state })),
        false => stdout_line!("{line}"),
    }
}

pub(super) fn stop_node(options: &StopNodeArgs) -> Result<(), CommandError> {
    let StopNodeArgs { node, force, json, .. } = *options;
    let layout = open(&options.of, node)?;
    let line = match stop(&layout, node, force)? {
        true => format!(
            "node {node} is stopped; `ringbolt store start-node {node}` starts it. Its replicas move to \
             other nodes if it is down for the time that --out-after says"
        ),
        false => format!("node {node} does not run, and is not started any more"),
    };
    print(node, "stopped", json, &line);
    Ok(())
}

/// Stops a node of this machine, which is not started any more. Returns whether it ran.
pub(super) fn stop(layout: &ClusterLayout, node: u32, force: bool) -> Result<bool, CommandError> {
    let socket = layout.socket(node);
    let Ok(connection) = UnixStream::connect(&socket) else {
        layout.set_stopped(node, true).map_err(CommandError::environment)?;
        return Ok(false);
    };
    let peer = socket_peercred(&connection);
    let process = peer.and_then(|peer| Ok((peer.pid, pidfd_open(peer.pid, PidfdFlags::empty())?)));
    let (pid, process) =
        process.map_err(|error| CommandError::environment(format!("node {node}: {error}")))?;
    drop(connection);
    // Before it ends: `store up` would start it again.
    let is_new = layout.set_stopped(node, true).map_err(CommandError::environment)?;
    let kill = format!(
        "`kill -9 {}` ends it, and loses nothing that it acknowledged; it is not started any more",
        pid.as_raw_nonzero()
    );
    let stopped = leave(&socket, force).and_then(|()| end_process(&socket));
    if let Err(CallError::Disconnected(error)) = &stopped
        && error.kind() == std::io::ErrorKind::TimedOut
    {
        return Err(CommandError::operation(format!(
            "node {node} does not end, as when its device hangs, of which its log {} tells: {kill}",
            layout.log(node).display()
        )));
    }
    if let Err(error) = stopped {
        if is_new {
            layout.set_stopped(node, false).map_err(CommandError::environment)?;
        }
        let hint = if force { "" } else { "; --force stops it all the same" };
        return Err(CommandError::operation(format!("node {node} is not stopped: {error}{hint}")));
    }
    let limit = Timespec::try_from(STOP_MAX).ok();
    let mut ended = [PollFd::new(&process, PollFlags::IN)];
    match poll(&mut ended, limit.as_ref()) {
        Ok(1..) => Ok(true),
        Ok(_) => {
            let reason = format!("node {node} has handed over, and its process does not end: {kill}");
            Err(CommandError::operation(reason))
        }
        Err(error) => Err(CommandError::environment(format!("node {node}: {error}"))),
    }
}

/// Has the node hand over and close its device.
pub(super) fn leave(socket: &Path, force: bool) -> Result<(), CallError> {
    match client::call(socket, "store_node_stop", json!({ "force": force }), STOP_MAX) {
        // It has been stopped before, and its process not.
        Err(CallError::Rejected(error)) if error.code == control::RpcError::ENODEV => Ok(()),
        stopped => stopped.map(drop),
    }
}

/// The process ends as at the end of `store up`.
pub(super) fn end_process(socket: &Path) -> Result<(), CallError> {
    let params = json!({ "sig_name": "SIGTERM" });
    client::call(socket, "spdk_kill_instance", params, STOP_MAX).map(drop)
}

pub(super) fn start_node(options: &StartNodeArgs) -> Result<(), CommandError> {
    let StartNodeArgs { node, json, listen, .. } = *options;
    let layout = open(&options.of, node)?;
    // Without the map, the node says itself why it does not start.
    if layout.map.nodes().is_ok_and(|nodes| !nodes.contains_key(&NodeId(node))) {
        return Err(CommandError::operation(MapError::Removed(NodeId(node)).to_string()));
    }
    listen.map_or(Ok(()), |listen| listen_elsewhere(&layout, node, listen))?;
    if UnixStream::connect(layout.socket(node)).is_err()
        && let Some(problem) = layout.key_problem(node)
    {
        return Err(CommandError::operation(problem));
    }
    let was_stopped = layout.set_stopped(node, false).map_err(CommandError::environment)?;
    let socket = layout.socket(node);
    let end = Instant::now() + START_MAX;
    loop {
        let left = end.saturating_duration_since(Instant::now()).max(START_POLL);
        match client::call(&socket, "store_node_get_status", Value::Null, left) {
            Ok(_) => break,
            Err(CallError::Connect { .. }) if Instant::now() < end => std::thread::sleep(START_POLL),
            Err(error) => {
                let log = layout.log(node);
                return Err(CommandError::operation(format!(
                    "node {node} may start, and does not serve yet ({error}): `ringbolt store up` of {} runs it; its log is {}",
                    layout.directory.display(),
                    log.display()
                )));
            }
        }
    }
    let line = match was_stopped {
        true => format!("node {node} serves again"),
        false => format!("node {node} was not stopped, and serves"),
    };
    print(node, "serves", json, &line);
    Ok(())
}

/// Has a node that does not run listen elsewhere from its next start on.
fn listen_elsewhere(layout: &ClusterLayout, node: u32, listen: SocketAddr) -> Result<(), CommandError> {
    if UnixStream::connect(layout.socket(node)).is_ok() {
        let reason = format!("node {node} runs: `ringbolt store stop-node {node}` stops it first");
        return Err(CommandError::operation(reason));
    }
    layout.change_start(node, |params| {
        let records = layout.map.nodes().map_err(CommandError::operation)?;
        let is_permitted = params.get("allow_plain_network") == Some(&Value::Bool(true))
            || records.get(&NodeId(node)).is_some_and(|record| record.tls == TlsPolicy::Required);
        if !listen.ip().is_loopback() && !is_permitted {
            return Err(CommandError::operation(format!(
                "{} is not this machine alone, and data is not encrypted: `ringbolt store tls required \
                 --node {node}` encrypts it",
                listen.ip()
            )));
        }
        check_address(&records, &layout.nodes, Some(node), listen)?;
        params["listen"] = listen.to_string().into();
        Ok(())
    })
}
