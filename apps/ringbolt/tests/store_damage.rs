//! Devices of the store of which a part is damaged.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "rig/store.rs"]
mod store;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rig::{scratch, text};
use serde_json::Value;
use store::Cluster;
use wire_store::{BLOCK_BYTES, LogHeader, PartitionLayout, SECTOR_BYTES, Superblock};

/// A node's device, which no process has open.
struct Device {
    path: PathBuf,
    superblock: Superblock,
}

impl Device {
    fn of(cluster: &Path, node: u32) -> Device {
        let path = cluster.join(format!("node{node}/store.img"));
        let superblock = Superblock::decode(&sector(&path, 0), 0).unwrap();
        Device { path, superblock }
    }

    fn partition_of(&self, group: u32) -> u32 {
        let owner = |partition: u32| {
            let first = self.superblock.log_start(partition);
            let headers = (0..2).filter_map(|slot| {
                LogHeader::decode(&sector(&self.path, first + u64::from(slot)), slot).ok()
            });
            headers.max_by_key(|header| header.generation).map(|header| header.group)
        };
        (0..self.superblock.partitions).find(|partition| owner(*partition) == Some(group)).unwrap()
    }

    /// Damages the first onode of a partition; the second time it is as it was.
    fn damage_onode(&self, partition: u32) {
        damage(&self.path, self.superblock.partition_start(partition) + PartitionLayout::ONODES_START);
    }

    fn damage_headers(&self, partition: u32) {
        let first = self.superblock.log_start(partition);
        (first..first + 2).for_each(|block| damage(&self.path, block));
    }
}

fn sector(path: &Path, block: u64) -> [u8; SECTOR_BYTES] {
    let mut bytes = [0; SECTOR_BYTES];
    File::open(path).unwrap().read_exact_at(&mut bytes, block * BLOCK_BYTES as u64).unwrap();
    bytes
}

fn damage(path: &Path, block: u64) {
    let damaged = sector(path, block).map(|byte| byte ^ 0x5a);
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&damaged, block * BLOCK_BYTES as u64).unwrap();
}

fn load(cluster: &Cluster, options: &[&str]) {
    let all = ["--size=32m", "--bs=64k", "--iodepth=16", "--verify=pattern", "--verify_pattern=0x5c"];
    let loaded = cluster.perf(&[&all[..], options].concat()).output().unwrap();
    assert!(loaded.status.success(), "{}{}", text(&loaded.stdout), text(&loaded.stderr));
}

fn log_of(cluster: &Cluster, node: u32) -> String {
    std::fs::read_to_string(cluster.directory.join(format!("node{node}/log"))).unwrap()
}

#[test]
fn damaged_partitions_end_no_node_and_their_replicas_get_copies() {
    let directory = scratch("store-damage");
    let path = directory.join("cluster");
    let cluster = Cluster::start(&directory, &["--size=200m", "--log-size=2m", "--groups=4", "--spare=0"]);
    cluster.ok(&["image", "create", "vol", "32m"]);
    load(&cluster, &["--rw=write", "--do_verify=0"]);
    cluster.wait_until_healthy();
    cluster.end();
    // An onode, and the headers that name the group of a partition: primaries or followers have them.
    let (first, second) = (Device::of(&path, 1), Device::of(&path, 2));
    let (of_onode, of_headers) = (first.partition_of(0), second.partition_of(1));
    first.damage_onode(of_onode);
    second.damage_headers(of_headers);
    let cluster = Cluster::start(&directory, &[]);
    load(&cluster, &["--rw=read"]);
    let healthy = cluster.wait_until_healthy();
    for node in healthy["nodes"].as_array().unwrap() {
        assert_eq!(node["report"]["failed_partitions"], Value::Array(Vec::new()), "{node:#}");
        assert_eq!(node["report"]["replicas"].as_array().unwrap().len(), 4, "{node:#}");
    }
    let (of_first, of_second) = (log_of(&cluster, 1), log_of(&cluster, 2));
    assert!(of_first.contains(&format!("partition {of_onode} of group 0 is kept as it is")), "{of_first}");
    assert!(of_second.contains(&format!("partition {of_headers} is kept as it is")), "{of_second}");
    // The copies are read, where they are those of primaries.
    for node in ["3", "1"] {
        cluster.ok(&["store", "stop-node", node]);
        load(&cluster, &["--rw=read"]);
        cluster.ok(&["store", "start-node", node]);
        cluster.wait_until_healthy();
    }
    cluster.end();
    for device in [first, second] {
        let checked = rig::ringbolt(&["objects", "check", device.path.to_str().unwrap()]);
        assert!(checked.status.success(), "{}", text(&checked.stdout));
    }
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_damaged_partition_with_the_only_copy_is_kept_and_status_says_what_to_do() {
    let directory = scratch("store-damage-only");
    let options = ["--size=200m", "--log-size=2m", "--groups=2", "--nodes=1", "--spare=1"];
    let cluster = Cluster::start(&directory, &options);
    cluster.ok(&["image", "create", "vol", "32m"]);
    load(&cluster, &["--rw=write", "--do_verify=0"]);
    cluster.end();
    let device = Device::of(&directory.join("cluster"), 1);
    let partition = device.partition_of(0);
    let damage_onode: fn(&Device, u32) = Device::damage_onode;
    for damage in [damage_onode, Device::damage_headers] {
        damage(&device, partition);
        let cluster = Cluster::start(&directory, &[]);
        let named = format!("partition {partition} of node 1 is damaged: ");
        let status = cluster.wait_for("named", |status| {
            let is_named = status["groups"][0]["why"].as_str().is_some_and(|why| why.contains(&named));
            is_named && status["groups"][1]["state"] == "healthy"
        });
        let group = &status["groups"][0];
        let why = group["why"].as_str().unwrap();
        assert_eq!(group["state"], "down", "{group:#}");
        assert!(why.contains("so it is kept") && why.contains("store accept-loss 0"), "{why}");
        let report = &status["nodes"][0]["report"];
        assert_eq!(report["failed_partitions"][0]["partition"], partition, "{report:#}");
        assert_eq!(
            (&report["refused"][0]["group"], &report["refused"][0]["partition"]),
            (&0.into(), &partition.into())
        );
        assert!(cluster.line_of_node(1).contains(&format!("; damaged partitions: {partition} (group ")));
        cluster.end();
        damage(&device, partition);
        let cluster = Cluster::start(&directory, &[]);
        cluster.wait_until_healthy();
        load(&cluster, &["--rw=read"]);
        cluster.end();
    }
    std::fs::remove_dir_all(directory).unwrap();
}
