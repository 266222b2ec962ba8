//! Nodes whose file system was full: `store up` starts them again when it has space.
//!
//! A replica that finds no space to write has failed, because what its log and its file have is not what it promised. A new
//! process reads both again. The node hands over first, so that its other replicas are not missed.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use control::client::{self, CallError};
use serde_json::Value;

use super::layout::ClusterLayout;
use super::stop::{end_process, leave};
use crate::console::stdout_line;

/// How often nodes are asked: nothing says that a file system has space.
const CHECK_EVERY: Duration = Duration::from_secs(5);
const ASK_MAX: Duration = Duration::from_secs(2);
/// With less it would be full again at once.
const SPACE_MIN: u64 = 64 << 20;
/// The delay after the first attempt, and the longest one; each is twice the one before. An attempt costs others a hand-over and
/// a copy of what the node missed.
const RETRY_MIN: Duration = Duration::from_secs(30);
const RETRY_MAX: Duration = Duration::from_secs(600);

/// What was done for a node since it had no space.
struct SpaceRetry {
    attempts: u32,
    next: Instant,
}

/// Starts the thread that looks after the nodes of this machine, as long as the process runs.
pub(super) fn watch(layout: &ClusterLayout) {
    let mut layout = layout.clone();
    std::thread::spawn(move || {
        let mut retries = BTreeMap::new();
        loop {
            std::thread::sleep(CHECK_EVERY);
            if layout.find_nodes().is_ok() {
                layout.nodes.iter().for_each(|node| check(&layout, *node, &mut retries));
            }
        }
    });
}

fn check(layout: &ClusterLayout, node: u32, retries: &mut BTreeMap<u32, SpaceRetry>) {
    // One that does not answer is started by others.
    let Ok(report) = client::call(&layout.socket(node), "store_node_get_status", Value::Null, ASK_MAX) else {
        return;
    };
    if !is_out_of_space(&report) {
        retries.remove(&node);
        return;
    }
    let retry = retries.entry(node).or_insert_with(|| {
        stdout_line!("node {node} has no space in its file system: it is started again when there is some");
        SpaceRetry { attempts: 0, next: Instant::now() }
    });
    if Instant::now() < retry.next || free_bytes(&layout.node(node)) < SPACE_MIN {
        return;
    }
    let delay = RETRY_MIN.saturating_mul(1 << retry.attempts.min(8)).min(RETRY_MAX);
    retry.attempts += 1;
    retry.next = Instant::now() + delay;
    let socket = layout.socket(node);
    let left = match leave(&socket, false) {
        // Its replicas that are served are missed for the time of a start; the others would be for longer.
        Err(CallError::Rejected(error)) if error.code == control::RpcError::EBUSY => leave(&socket, true),
        left => left,
    };
    match left.and_then(|()| end_process(&socket)) {
        Ok(()) => stdout_line!("node {node} has space again, and is started again"),
        Err(error) => {
            let delay = delay.as_secs();
            stdout_line!("node {node} has space, and is not started again before {delay} s: {error}");
        }
    }
}

fn is_out_of_space(report: &Value) -> bool {
    report["replicas"].as_array().into_iter().flatten().any(|replica| replica["out_of_space"] == true)
}

/// What users may write to the file system of a directory.
fn free_bytes(directory: &Path) -> u64 {
    rustix::fs::statvfs(directory).map_or(0, |found| found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn one_replica_without_space_is_enough() {
        let report = |replicas: Value| json!({ "replicas": replicas });
        assert!(!is_out_of_space(&report(json!([]))));
        assert!(!is_out_of_space(&report(json!([{ "out_of_space": false }, { "failure": "read" }]))));
        assert!(is_out_of_space(&report(json!([{ "out_of_space": false }, { "out_of_space": true }]))));
    }
}
