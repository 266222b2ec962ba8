//! Nodes that leave for good, and devices that are replaced or in the wrong place.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "rig/store.rs"]
mod store;

use std::fs;
use std::path::Path;

use rig::{scratch, text};
use serde_json::Value;
use store::Cluster;

const OPTIONS: [&str; 3] = ["--size=200m", "--log-size=2m", "--groups=4"];
const LOAD: [&str; 5] = ["--rw=randrw", "--size=16m", "--iodepth=4", "--time_based", "--runtime=600"];

fn stderr_of(cluster: &Cluster, arguments: &[&str]) -> String {
    let output = cluster.run(arguments);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    text(&output.stderr)
}

fn filled(name: &str, options: &[&str]) -> (std::path::PathBuf, Cluster) {
    let directory = scratch(name);
    let cluster = Cluster::start(&directory, &[&OPTIONS[..], options].concat());
    cluster.ok(&["image", "create", "vol", "16m"]);
    cluster.wait_until_healthy();
    (directory, cluster)
}

/// Ends a load that must not have failed.
fn end_load(mut load: std::process::Child) {
    assert!(load.try_wait().unwrap().is_none(), "the load ended");
    store::signal(load.id(), rustix::process::Signal::INT);
    let ended = load.wait_with_output().unwrap();
    assert!(ended.status.success(), "{}{}", text(&ended.stdout), text(&ended.stderr));
}

/// Bytes of the log of a node.
fn log_length(directory: &Path, node: u32) -> usize {
    fs::metadata(directory.join(format!("node{node}/log"))).unwrap().len() as usize
}

/// The log of a node from a byte on. A node that does not start is tried again, and writes more.
fn log_since(directory: &Path, node: u32, start: usize) -> String {
    let log = fs::read(directory.join(format!("node{node}/log"))).unwrap();
    String::from_utf8_lossy(&log[start..]).into_owned()
}

#[test]
fn a_node_is_drained_stopped_and_removed_under_load_and_does_not_come_back() {
    let (directory, cluster) = filled("store-remove", &["--nodes=4", "--spare=4"]);
    let load = cluster.perf(&LOAD).spawn().unwrap();
    let removed = cluster.run(&["store", "remove-node", "4", "--wait", "--json"]);
    assert!(removed.status.success(), "{}", text(&removed.stderr));
    let state: Value = serde_json::from_slice(&removed.stdout).unwrap();
    assert_eq!((&state["node"], &state["state"]), (&4.into(), &"removed".into()));
    assert!(text(&removed.stderr).contains("are still to move"), "{}", text(&removed.stderr));
    let three = cluster.wait_until_healthy();
    assert_eq!(three["nodes"].as_array().unwrap().len(), 3, "{three:#}");
    end_load(load);
    let back = stderr_of(&cluster, &["store", "start-node", "4"]);
    assert!(back.contains("node 4 was removed"), "{back}");
    // Three replicas need three nodes, and nothing is begun.
    let refused = stderr_of(&cluster, &["store", "remove-node", "3", "--wait"]);
    assert!(refused.contains("without node 3 pool pool has 2 nodes for 3 replicas"), "{refused}");
    assert_eq!(cluster.status()["nodes"][2]["out"], Value::Null);
    let unknown = stderr_of(&cluster, &["store", "remove-node", "9", "--wait"]);
    assert!(unknown.contains("the cluster has no node 9"), "{unknown}");
    cluster.end();
    fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_device_is_replaced_by_one_command_and_the_old_one_is_refused() {
    let (directory, cluster) = filled("store-replace", &["--nodes=3"]);
    let refused = stderr_of(&cluster, &["store", "replace-device", "7"]);
    assert!(refused.contains("node 7 has no directory in"), "{refused}");
    let load = cluster.perf(&LOAD).spawn().unwrap();
    // What cannot be used leaves the node as it was.
    let missing = directory.join("missing");
    let missing = ["store", "replace-device", "2", "--device", missing.to_str().unwrap()];
    let refused = cluster.run(&missing);
    assert!(!refused.status.success());
    assert!(text(&refused.stderr).contains("missing"), "{}", text(&refused.stderr));
    // One that is found to be too small when it is formatted, while the node starts again.
    let small = directory.join("small");
    fs::write(&small, [0; 1 << 20]).unwrap();
    let small = ["store", "replace-device", "2", "--device", small.to_str().unwrap()];
    assert!(!cluster.run(&small).status.success());
    cluster.wait_until_healthy();
    let size = ["--size=220m", "--log-size=2m", "--json"];
    let replaced = cluster.ok(&[&["store", "replace-device", "2"], &size[..]].concat());
    let replaced: Value = serde_json::from_str(&replaced).unwrap();
    let old = replaced["old_directory"].as_str().unwrap();
    let healthy = cluster.wait_until_healthy();
    assert_eq!(healthy["nodes"][1]["state"], "serves", "{healthy:#}");
    end_load(load);
    // The old device, in its old place.
    cluster.ok(&["store", "stop-node", "2"]);
    let (place, aside) = (cluster.directory.join("node2"), directory.join("aside"));
    fs::rename(&place, &aside).unwrap();
    fs::rename(old, &place).unwrap();
    let start = log_length(&cluster.directory, 2);
    assert!(!cluster.run(&["store", "start-node", "2"]).status.success());
    let log = log_since(&cluster.directory, 2, start);
    assert!(log.contains("belongs to another node"), "{log}");
    cluster.ok(&["store", "stop-node", "2"]);
    fs::remove_dir_all(&place).unwrap();
    fs::rename(&aside, &place).unwrap();
    cluster.ok(&["store", "start-node", "2"]);
    cluster.wait_until_healthy();
    cluster.end();
    fs::remove_dir_all(directory).unwrap();
}

#[test]
fn swapped_devices_and_copies_of_others_are_refused_and_serve_when_they_are_back() {
    let (directory, cluster) = filled("store-swapped", &["--nodes=3"]);
    cluster.end();
    let file = |node: u32| directory.join(format!("cluster/node{node}/store.img"));
    let other = directory.join("other.img");
    let swap = || {
        fs::rename(file(1), &other).unwrap();
        fs::rename(file(2), file(1)).unwrap();
        fs::rename(&other, file(2)).unwrap();
    };
    let refused = |nodes: &[u32]| {
        let place = directory.join("cluster");
        let starts: Vec<usize> = nodes.iter().map(|node| log_length(&place, *node)).collect();
        let cluster = Cluster::start(&directory, &[]);
        for (node, start) in nodes.iter().zip(starts) {
            let log = log_since(&place, *node, start);
            assert!(log.contains("belongs to another node, and is not changed"), "node {node}: {log}");
        }
        assert_eq!(cluster.status()["healthy"], false);
        cluster.end();
    };
    swap();
    refused(&[1, 2]);
    swap();
    // Two copies of one device.
    fs::rename(file(2), &other).unwrap();
    fs::copy(file(1), file(2)).unwrap();
    refused(&[2]);
    fs::rename(&other, file(2)).unwrap();
    let cluster = Cluster::start(&directory, &[]);
    cluster.wait_until_healthy();
    cluster.end();
    fs::remove_dir_all(directory).unwrap();
}
