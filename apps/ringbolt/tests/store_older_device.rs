//! Devices of the store that are put back from a copy.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "rig/store.rs"]
mod store;

use std::path::{Path, PathBuf};
use std::process::Command;

use rig::{scratch, text};
use rustix::process::Signal;
use serde_json::Value;
use store::{Cluster, signal};

const SMALL: [&str; 4] = ["--size=200m", "--log-size=2m", "--groups=4", "--spare=0"];

fn load(cluster: &Cluster, options: &[&str], pattern: &str) -> Command {
    let verify = format!("--verify_pattern={pattern}");
    let all = ["--size=64m", "--bs=64k", "--iodepth=16", "--verify=pattern", &verify];
    cluster.perf(&[&all[..], options].concat())
}

/// Writes the image, so that every group has new entries.
fn fill(cluster: &Cluster, pattern: &str) {
    let filled = load(cluster, &["--rw=write", "--do_verify=0"], pattern).output().unwrap();
    assert!(filled.status.success(), "{}{}", text(&filled.stdout), text(&filled.stderr));
}

/// Reads the image, which is to have this everywhere.
fn check(cluster: &Cluster, pattern: &str) {
    let read = load(cluster, &["--rw=read"], pattern).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));
}

fn device(cluster: &Path, node: u32) -> PathBuf {
    cluster.join(format!("node{node}/store.img"))
}

fn copy(from: &Path, to: &Path) {
    // Sparse, and into the same file.
    let copied = Command::new("cp").arg("--sparse=always").args([from, to]).status().unwrap();
    assert!(copied.success());
}

#[test]
fn a_device_that_is_older_than_the_others_destroys_nothing() {
    let directory = scratch("store-older-device");
    let (path, older) = (directory.join("cluster"), directory.join("older.img"));
    let cluster = Cluster::start(&directory, &SMALL);
    cluster.ok(&["image", "create", "vol", "64m"]);
    fill(&cluster, "0x11");
    cluster.end();
    copy(&device(&path, 1), &older);
    let cluster = Cluster::start(&directory, &[]);
    fill(&cluster, "0x22");
    cluster.end();

    // It is the primary of some groups, and a follower of others.
    copy(&older, &device(&path, 1));
    let cluster = Cluster::start(&directory, &[]);
    check(&cluster, "0x22");
    cluster.wait_until_healthy();
    // What it serves is what the others have.
    cluster.ok(&["store", "stop-node", "2"]);
    check(&cluster, "0x22");
    cluster.ok(&["store", "start-node", "2"]);
    cluster.wait_until_healthy();

    // The same while the others serve.
    signal(cluster.up.id(), Signal::STOP);
    signal(cluster.nodes()[0], Signal::KILL);
    copy(&older, &device(&path, 1));
    signal(cluster.up.id(), Signal::CONT);
    check(&cluster, "0x22");
    cluster.wait_until_healthy();
    fill(&cluster, "0x33");
    check(&cluster, "0x33");
    cluster.end();
}

#[test]
fn a_device_that_is_older_and_alone_waits_until_a_person_accepts_the_loss() {
    let directory = scratch("store-older-alone");
    let (path, older) = (directory.join("cluster"), directory.join("older.img"));
    let cluster = Cluster::start(&directory, &[&SMALL[..], &["--nodes=1"]].concat());
    cluster.ok(&["image", "create", "vol", "64m"]);
    fill(&cluster, "0x11");
    cluster.end();
    copy(&device(&path, 1), &older);
    let cluster = Cluster::start(&directory, &[]);
    fill(&cluster, "0x22");
    cluster.end();
    copy(&older, &device(&path, 1));

    let cluster = Cluster::start(&directory, &[]);
    let groups = |status: &Value| status["groups"].as_array().unwrap().clone();
    let is_older = |group: &Value| {
        let of_node = &group["stale"][0];
        group["state"] == "waiting"
            && of_node["node"] == 1
            && of_node["why"] == "its device is an older copy of itself"
    };
    let waiting = cluster.wait_for("waiting", |status| groups(status).iter().all(is_older));
    let mut costs = String::new();
    for group in groups(&waiting) {
        let refused = cluster.run(&["store", "accept-loss", &group["group"].to_string()]);
        let why = text(&refused.stderr);
        assert!(!refused.status.success() && why.contains("an older copy of itself"), "{why}");
        assert!(why.contains("--yes"), "{why}");
        costs += &why;
    }
    assert!(costs.contains("acknowledged writes are missing"), "{costs}");
    assert!(groups(&cluster.status()).iter().all(is_older));
    for group in groups(&waiting) {
        cluster.ok(&["store", "accept-loss", &group["group"].to_string(), "--yes"]);
    }
    cluster.wait_until_healthy();
    check(&cluster, "0x11");
    fill(&cluster, "0x33");
    // The device is believed again.
    cluster.end();
    let cluster = Cluster::start(&directory, &[]);
    check(&cluster, "0x33");
    cluster.end();
}
