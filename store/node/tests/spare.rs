//! Replicas that a node gets and gives up: each has a spare partition meanwhile.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use bdev::testing::CrashDisk;
use bdev::{Registry, Uuid, malloc};
use cluster_map::PoolClass;
use control::JobHandle;
use os::CpuSet;
use reactor::blocking::block_on;
use reactor::{ReactorConfig, Reactors};
use replica::{ClientReply, GroupConfig, ReplicaId, ReplicaMessage, ReplicaSettings};
use store_node::{
    FormatOptions, Outbox, PoolOptions, ReplicaFormat, ReplicaNode, ReplicaNodeConfig, StoreBdevs,
    StoreCores, StoreError, StoreThreads, StoreTuning, format_device,
};

/// Of a node that is alone.
struct NoOutbox;

impl Outbox for NoOutbox {
    fn send(&mut self, _group: u32, _to: ReplicaId, _message: ReplicaMessage) {}
    fn reply(&mut self, _group: u32, _client: u64, _number: u64, _reply: ClientReply) {}
    fn propose(&mut self, _group: u32, _config: Arc<GroupConfig>) {}
}

/// A partition for group 5, and spare ones.
fn format_options(spare: u32) -> FormatOptions {
    let (cluster, node) = (Uuid::nil(), Uuid::nil());
    let replicas = ReplicaFormat { cluster, node, groups: vec![5], are_new: true, generation: 0, spare };
    FormatOptions { replicas: Some(replicas), ..FormatOptions::default() }
}

fn format(registry: &Registry, cores: &StoreCores<'_>) {
    let options = format_options(2);
    block_on(format_device(registry, "Malloc0", cores, options, &JobHandle::standalone())).unwrap().unwrap();
}

fn open(registry: &Registry, cores: &StoreCores<'_>) -> ReplicaNode {
    let config = ReplicaNodeConfig {
        name: "test",
        id: ReplicaId(1),
        settings: ReplicaSettings::default(),
        pools: Vec::new(),
        boot: [1; 16],
        tuning: StoreTuning::default(),
        threads: StoreThreads::default(),
        outbox: Arc::new(|_, _| Box::new(NoOutbox)),
    };
    block_on(ReplicaNode::open(registry, "Malloc0", cores, config, &JobHandle::standalone()))
        .unwrap()
        .unwrap()
}

const POOL: PoolOptions = PoolOptions { in_sync_min: 1, class: PoolClass::Disk };

/// Groups with whether their replicas are complete.
fn replicas(node: &ReplicaNode) -> Vec<(u32, bool)> {
    let status = block_on(node.status()).unwrap().unwrap();
    let mut all: Vec<_> = status
        .into_iter()
        .filter_map(|it| it.replica)
        .map(|replica| (replica.group, replica.status.complete))
        .collect();
    all.sort_unstable();
    all
}

/// A node whose logs end before its data could not be opened again.
#[test]
fn logs_of_replicas_last_as_long_as_their_data() {
    let reactors = Reactors::start(&ReactorConfig { pin: false, ..Default::default() }).unwrap();
    let registry = Registry::new();
    for name in ["Malloc0", "Malloc1"] {
        malloc::create(&registry, malloc::MallocConfig::new(name, 65_536, 512)).unwrap();
    }
    for name in ["Disk0", "Disk1"] {
        CrashDisk::create(&registry, name, 65_536, 512, 1).unwrap();
    }
    let cores = StoreCores::Reactors(reactors.handles());
    let formatted = |data, log| {
        let options = FormatOptions { force: true, ..format_options(0) };
        let bdevs = StoreBdevs { data, log: Some(log) };
        block_on(format_device(&registry, bdevs, &cores, options, &JobHandle::standalone()))
            .unwrap()
            .map(drop)
    };
    for (data, log) in [("Disk0", "Disk1"), ("Malloc0", "Malloc1"), ("Malloc0", "Disk1")] {
        formatted(data, log).unwrap();
    }
    let refused = formatted("Disk0", "Malloc1").unwrap_err().to_string();
    assert!(
        refused.contains("Malloc1 keeps what is written in memory, and Disk0 outlives that"),
        "{refused}"
    );
    reactors.stop();
}

#[test]
fn replicas_come_and_go_and_a_restart_finds_them() {
    let cpus = CpuSet::new(vec![0, 1]).unwrap();
    let reactors = Reactors::start(&ReactorConfig { cpus, pin: false, ..Default::default() }).unwrap();
    let registry = Registry::new();
    malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 131_072, 512)).unwrap();
    let cores = StoreCores::Reactors(reactors.handles());
    format(&registry, &cores);
    let node = open(&registry, &cores);
    assert_eq!((node.groups(), node.spare_partitions()), (vec![5], 2));

    // One of a new group has everything there is; the other one needs a copy.
    block_on(node.add_group(&cores, 7, true, POOL)).unwrap().unwrap();
    block_on(node.add_group(&cores, 9, false, POOL)).unwrap().unwrap();
    assert_eq!(replicas(&node), [(5, true), (7, true), (9, false)]);
    let full = block_on(node.add_group(&cores, 11, true, POOL)).unwrap();
    assert!(matches!(full.map(drop), Err(StoreError::NoSpare(11))));
    block_on(node.close()).unwrap();
    drop(node);
    settle(&reactors);

    let node = open(&registry, &cores);
    assert_eq!(replicas(&node), [(5, true), (7, true), (9, false)]);
    // A replica that is removed, the first one too, leaves its partition to others, and nothing of its data.
    for group in [5, 9] {
        block_on(node.remove_group(&cores, group)).unwrap().unwrap();
    }
    assert_eq!((replicas(&node), node.spare_partitions()), (vec![(7, true)], 2));
    block_on(node.add_group(&cores, 5, false, POOL)).unwrap().unwrap();
    assert_eq!(replicas(&node), [(5, false), (7, true)]);
    block_on(node.close()).unwrap();
    drop(node);
    settle(&reactors);
    let node = open(&registry, &cores);
    assert_eq!((replicas(&node), node.spare_partitions()), (vec![(5, false), (7, true)], 1));
    block_on(node.close()).unwrap();
    drop(node);
    reactors.stop();
}

/// What was closed has released its device when this returns.
fn settle(reactors: &Reactors) {
    for handle in reactors.handles() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let run = move |core: &reactor::Core| {
            let of_task = core.clone();
            core.spawn(async move {
                of_task.sleep_ns(2_000_000).await;
                let _ = sender.send(());
            });
        };
        handle.post(run).unwrap();
        receiver.recv().unwrap();
    }
}
