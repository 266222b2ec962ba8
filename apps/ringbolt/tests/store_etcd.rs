//! A cluster of the store whose map is in etcd, which is killed and restarted under verified load.
#![allow(clippy::unwrap_used)]

#[path = "../../../store/map/tests/rig/mod.rs"]
mod etcd;
mod rig;
#[path = "rig/store.rs"]
mod store;

use std::path::Path;
use std::time::{Duration, Instant};

use etcd::EtcdCluster;
use rig::{ringbolt, scratch, text};
use rustix::process::Signal;
use serde_json::Value;
use store::{Cluster, signal};

fn start(directory: &Path, urls: &str) -> Cluster {
    let options = ["--size=200m", "--groups=4", "--log-size=2m", "--nodes=3", "--replicas=3", "--etcd", urls];
    Cluster::start(directory, &options)
}

fn all_groups(status: &Value, is_so: impl Fn(&Value) -> bool) -> bool {
    status["groups"].as_array().is_some_and(|groups| groups.len() == 4 && groups.iter().all(is_so))
}

#[test]
fn verified_load_continues_while_etcd_is_gone() {
    let Some(mut etcd) = EtcdCluster::start("load", 3) else { return };
    let directory = scratch("store-etcd");
    let urls = etcd.urls("load");
    let cluster = start(&directory, &urls);
    // The directory has no map; it remembers where that is.
    assert!(!cluster.directory.join("map").exists());
    assert_eq!(cluster.ok(&["image", "create", "vol", "64m"]), "store:pool/vol\n");
    let healthy = cluster.wait_until_healthy();
    assert!(healthy["nodes"].as_array().unwrap().iter().all(|node| node["up"] == true), "{healthy:#}");

    let load = cluster.perf(&["--rw=randrw", "--iodepth=8", "--time_based", "--runtime=8"]).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    (0..3).for_each(|server| etcd.kill_server(server));
    // Status says what the nodes know, and that memberships stand still.
    let status = cluster.status();
    assert!(status["map_error"].as_str().unwrap().contains("in etcd at 127.0.0.1:"), "{status:#}");
    assert!(all_groups(&status, |group| group["state"] == "healthy"), "{status:#}");
    std::thread::sleep(Duration::from_secs(2));
    (0..3).for_each(|server| etcd.start_server(server));
    etcd.wait_until_served();
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    cluster.wait_until_healthy();

    // A second cluster below the prefix is refused, and harms nothing.
    let other = directory.join("other");
    let second =
        ringbolt(&["store", "up", "--cluster", other.to_str().unwrap(), "--size=200m", "--etcd", &urls]);
    assert!(text(&second.stderr).contains("cluster below /load/ exists"), "{}", text(&second.stderr));
    assert!(!other.exists());
    cluster.wait_until_healthy();

    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn groups_that_lost_a_replica_wait_for_etcd_and_nothing_is_lost() {
    let Some(mut etcd) = EtcdCluster::start("wait", 1) else { return };
    let directory = scratch("store-etcd-wait");
    let cluster = start(&directory, &etcd.urls("wait"));
    cluster.ok(&["image", "create", "vol", "64m"]);
    cluster.wait_until_healthy();
    let filled =
        cluster.perf(&["--rw=write", "--size=8m", "--iodepth=16", "--do_verify=0"]).output().unwrap();
    assert!(filled.status.success(), "{}", text(&filled.stderr));
    // A node that ends soon after its start would not be started again.
    std::thread::sleep(Duration::from_secs(2));

    etcd.kill_server(0);
    let nodes = cluster.nodes();
    signal(nodes[1], Signal::KILL);
    let why =
        |group: &Value| group["why"].as_str().is_some_and(|why| why.contains("the map has not answered"));
    cluster.wait_for("waiting for the map", |status| {
        all_groups(status, |group| (group["state"] == "waiting" || group["state"] == "down") && why(group))
    });
    // It ended, and cannot start without the map. Requests wait.
    let mut load = cluster.perf(&["--rw=read", "--size=8m", "--iodepth=16"]).spawn().unwrap();
    let ended = Instant::now();
    while ended.elapsed() < Duration::from_secs(2) {
        // An image cannot be opened without the map, so the load has begun or failed.
        if let Some(status) = load.try_wait().unwrap() {
            assert!(!status.success());
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let _ = load.kill();
    let _ = load.wait();

    etcd.start_server(0);
    etcd.wait_until_served();
    let read = cluster.perf(&["--rw=read", "--size=8m", "--iodepth=16"]).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));
    cluster.wait_until_healthy();
    assert_ne!(cluster.nodes()[1], nodes[1]);
    drop(cluster);
    std::fs::remove_dir_all(&directory).unwrap();
}
