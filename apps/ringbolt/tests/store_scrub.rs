//! Scrubs of a cluster: copies are damaged at rest, and differ although both have their checksums.
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
use wire_store::{BLOCK_BYTES, BLOCKS_PER_EXTENT, SECTOR_BYTES, Superblock, crc32c};

const OPTIONS: [&str; 3] = ["--size=200m", "--log-size=2m", "--groups=4"];
/// The bytes of every block of the image.
const BYTE: u8 = 0x5c;

/// The file of a node.
struct Device {
    path: PathBuf,
    superblock: Superblock,
}

/// A block of a partition.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Block {
    partition: u32,
    /// Number after the checksum table.
    index: u64,
}

impl Device {
    fn of(cluster: &Cluster, node: u32) -> Device {
        let path = cluster.directory.join(format!("node{node}/store.img"));
        let mut sector = [0; SECTOR_BYTES];
        File::open(&path).unwrap().read_exact_at(&mut sector, 0).unwrap();
        Device { path, superblock: Superblock::decode(&sector, 0).unwrap() }
    }

    fn file(&self) -> File {
        File::options().read(true).write(true).open(&self.path).unwrap()
    }

    fn offset(&self, block: Block) -> u64 {
        let extents_start = self.superblock.layout().unwrap().extents_start;
        let start = self.superblock.partition_start(block.partition) + extents_start;
        (start + block.index) * BLOCK_BYTES as u64
    }

    fn read(&self, block: Block) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_BYTES];
        self.file().read_exact_at(&mut bytes, self.offset(block)).unwrap();
        bytes
    }

    /// The blocks that have the data of the image.
    fn blocks(&self) -> Vec<Block> {
        let blocks = u64::from(self.superblock.layout().unwrap().extents) * BLOCKS_PER_EXTENT as u64;
        let of_partition = |partition| (0..blocks).map(move |index| Block { partition, index });
        let all = (0..self.superblock.partitions).flat_map(of_partition);
        all.filter(|block| self.read(*block).iter().all(|byte| *byte == BYTE)).collect()
    }

    /// Flips a bit.
    fn damage(&self, block: Block) {
        let mut bytes = self.read(block);
        bytes[77] ^= 4;
        self.file().write_all_at(&bytes, self.offset(block)).unwrap();
    }

    /// Replaces the data of a block, with its checksum.
    fn replace(&self, block: Block, byte: u8) {
        let bytes = [byte; BLOCK_BYTES];
        self.file().write_all_at(&bytes, self.offset(block)).unwrap();
        let checksums_start = self.superblock.layout().unwrap().checksums_start;
        let table = self.superblock.partition_start(block.partition) + checksums_start;
        let at = table * BLOCK_BYTES as u64 + block.index * 4;
        let mut known = [0; 4];
        self.file().read_exact_at(&mut known, at).unwrap();
        assert_eq!(u32::from_le_bytes(known), crc32c(&[BYTE; BLOCK_BYTES]), "it is the block's checksum");
        self.file().write_all_at(&crc32c(&bytes).to_le_bytes(), at).unwrap();
    }
}

/// A cluster with an image that has data, all of it in place.
fn filled(directory: &Path) -> Cluster {
    let cluster = Cluster::start(directory, &OPTIONS);
    cluster.ok(&["image", "create", "vol", "16m"]);
    let pattern = format!("--verify_pattern={BYTE:#x}");
    let options = ["--rw=write", "--size=16m", "--bs=64k", "--iodepth=8", "--verify=pattern", &pattern];
    let loaded = cluster.perf(&[&options[..], &["--do_verify=0"]].concat()).output().unwrap();
    assert!(loaded.status.success(), "{}", text(&loaded.stderr));
    cluster.wait_until_healthy();
    wait_until_in_place(&cluster);
    cluster
}

fn wait_until_in_place(cluster: &Cluster) {
    cluster.wait_for("in place", |status| {
        let nodes = status["nodes"].as_array().unwrap().iter();
        let replicas = nodes.flat_map(|node| node["report"]["replicas"].as_array().into_iter().flatten());
        { replicas }.all(|replica| replica["in_place"] == replica["commit_point"])
    });
}

/// A field of all groups, added up.
fn sum(scrub: &Value, field: &str) -> u64 {
    let groups = scrub["groups"].as_array().unwrap().iter();
    groups.map(|group| group[field].as_u64().unwrap_or_else(|| panic!("{field}: {group:#}"))).sum()
}

fn scrub(cluster: &Cluster, options: &[&str]) -> Value {
    let arguments = [&["store", "scrub", "start", "--wait", "--json"], options].concat();
    serde_json::from_str(&cluster.ok(&arguments)).unwrap()
}

fn stderr_of(cluster: &Cluster, arguments: &[&str]) -> String {
    let output = cluster.run(arguments);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    text(&output.stderr)
}

#[test]
fn blocks_that_are_damaged_at_rest_are_written_again_at_every_node() {
    let directory = scratch("store-scrub");
    let cluster = filled(&directory);
    let clean = scrub(&cluster, &[]);
    assert_eq!((sum(&clean, "bytes"), sum(&clean, "damaged_copies")), (16 << 20, 0), "{clean:#}");
    for node in 1..=3 {
        let device = Device::of(&cluster, node);
        let blocks = device.blocks();
        assert!(blocks.len() >= 4096, "{}", blocks.len());
        let some = [0, 1, 2000, 4000].map(|index| blocks[index]);
        some.iter().for_each(|block| device.damage(*block));
        let found = scrub(&cluster, &["--pool", "pool"]);
        let counts = ["damaged_copies", "repaired_copies", "differing_copies", "uncompared_parts"];
        assert_eq!(counts.map(|field| sum(&found, field)), [4, 4, 0, 0], "node {node}: {found:#}");
        wait_until_in_place(&cluster);
        assert!(some.iter().all(|block| device.read(*block) == [BYTE; BLOCK_BYTES]), "node {node}");
    }
    let lines = cluster.ok(&["store", "status"]);
    assert!(lines.contains("damaged copies of blocks, 4 of them written again"), "{lines}");
    // While clients read and write, and a node is killed, nothing is found.
    cluster.ok(&["image", "create", "other", "16m"]);
    let load = ["--rw=randrw", "--size=16m", "--iodepth=8", "--runtime=8", "--time_based"];
    let mut load = cluster.perf_of("other", &load).spawn().unwrap();
    let mut killed = false;
    while load.try_wait().unwrap().is_none() {
        let found = scrub(&cluster, &[]);
        assert_eq!(["damaged_copies", "differing_copies"].map(|it| sum(&found, it)), [0, 0], "{found:#}");
        if !std::mem::replace(&mut killed, true) {
            store::signal(cluster.nodes()[1], rustix::process::Signal::KILL);
        }
    }
    let ended = load.wait_with_output().unwrap();
    assert!(ended.status.success() && killed, "{}{}", text(&ended.stdout), text(&ended.stderr));
    cluster.wait_until_healthy();
    let found = scrub(&cluster, &[]);
    assert_eq!(["damaged_copies", "differing_copies"].map(|it| sum(&found, it)), [0, 0], "{found:#}");
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn copies_that_differ_are_reported_and_stay_as_they_are() {
    let directory = scratch("store-scrub-differs");
    let cluster = filled(&directory);
    let device = Device::of(&cluster, 3);
    cluster.ok(&["store", "stop-node", "3"]);
    let block = device.blocks()[100];
    device.replace(block, BYTE + 1);
    cluster.ok(&["store", "start-node", "3"]);
    cluster.wait_until_healthy();
    let refused = stderr_of(&cluster, &["store", "scrub", "start", "--wait"]);
    assert!(refused.contains("copies of blocks differ from that of the primary"), "{refused}");
    let status: Value = serde_json::from_str(&cluster.ok(&["store", "scrub", "status", "--json"])).unwrap();
    let groups = status["groups"].as_array().unwrap();
    let [group] = groups.iter().filter(|group| group["differing_copies"] != 0).collect::<Vec<_>>()[..] else {
        panic!("{status:#}");
    };
    // Which copy is right nothing says: both others differ if the node is the primary.
    let nodes: Vec<&Value> = group["differences"].as_array().unwrap().iter().map(|it| &it["node"]).collect();
    let expected: &[u64] = if group["node"] == 3 { &[1, 2] } else { &[3] };
    assert_eq!(nodes, expected, "{group:#}");
    assert_eq!(
        (&group["damaged_copies"], group["differing_copies"].as_u64()),
        (&0.into(), Some(nodes.len() as u64))
    );
    let lines = cluster.ok(&["store", "scrub", "status"]);
    assert!(lines.contains("other data than node"), "{lines}");
    let lines = cluster.ok(&["store", "status"]);
    assert!(lines.contains("differing copies: see `ringbolt store scrub status`"), "{lines}");
    wait_until_in_place(&cluster);
    assert_eq!(device.read(block), [BYTE + 1; BLOCK_BYTES]);
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn groups_are_scrubbed_by_themselves_and_when_operators_say_so() {
    let directory = scratch("store-scrub-settings");
    let cluster = filled(&directory);
    for (arguments, reason) in [
        (&["--pool", "none"][..], "the cluster has no pool none"),
        (&["--node", "9"], "the cluster has no node 9"),
    ] {
        let refused = stderr_of(&cluster, &[&["store", "scrub", "start"], arguments].concat());
        assert!(refused.contains(reason), "{refused}");
    }
    assert!(cluster.ok(&["store", "status"]).contains("scrub: no group yet"));
    // The slowest: a group of 4 MiB takes some seconds.
    cluster.ok(&["store", "set", "scrub-rate=1m", "scrub-every=14d"]);
    assert!(cluster.ok(&["store", "scrub", "start"]).contains("the scrub of 4 groups is started"));
    let running = |cluster: &Cluster| -> Value {
        serde_json::from_str(&cluster.ok(&["store", "scrub", "status", "--json"])).unwrap()
    };
    cluster.wait_for("a scrub", |_| !running(&cluster)["running"].as_object().unwrap().is_empty());
    let lines = cluster.ok(&["store", "scrub", "status"]);
    assert!(lines.starts_with("every 14d, 1.0 MiB/s a node at most\n"), "{lines}");
    cluster.ok(&["store", "scrub", "stop"]);
    cluster.wait_for("the end", |_| running(&cluster)["running"].as_object().unwrap().is_empty());
    let stopped = running(&cluster);
    let states = |status: &Value| -> Vec<String> {
        let groups = status["groups"].as_array().unwrap().iter();
        groups.map(|group| group["state"].as_str().unwrap().to_string()).collect()
    };
    assert!(states(&stopped).iter().any(|state| state == "never"), "{stopped:#}");
    // A shorter interval than the command permits, so that all are due soon.
    std::fs::write(cluster.directory.join("map/scrub"), r#"{"every_s":3,"rate":1073741824}"#).unwrap();
    cluster.wait_for("all", |_| states(&running(&cluster)).iter().all(|state| state == "done"));
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}
