//! A power failure while a replica gets or gives up its partition leaves the state before the change or the
//! one after it, and the device opens. `RINGBOLT_SEED` runs one seed.
#![allow(clippy::unwrap_used)]

mod process;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use bdev::testing::CrashDisk;
use bdev::{Registry, Uuid};
use cluster_map::PoolClass;
use control::JobHandle;
use os::clock::VirtualClock;
use process::Process;
use random::WyRand;
use replica::{ClientReply, GroupConfig, ReplicaId, ReplicaMessage, ReplicaSettings};
use store_node::{
    FormatOptions, Outbox, PoolOptions, ReplicaFormat, ReplicaNode, ReplicaNodeConfig, StoreCores,
    StoreThreads, StoreTuning, format_device,
};

const SEEDS: u64 = 24;
const ROUNDS: usize = 12;
const PARTITIONS: usize = 3;
const GROUPS: [u32; 4] = [5, 7, 9, 11];
/// More than a change writes.
const LOG_ENTRIES_MAX: u64 = 24;

/// The replicas of a node: whether each is complete, by group.
type Replicas = BTreeMap<u32, bool>;

/// Of a node that is alone.
struct NoOutbox;

impl Outbox for NoOutbox {
    fn send(&mut self, _group: u32, _to: ReplicaId, _message: ReplicaMessage) {}
    fn reply(&mut self, _group: u32, _client: u64, _number: u64, _reply: ClientReply) {}
    fn propose(&mut self, _group: u32, _config: Arc<GroupConfig>) {}
}

const POOL: PoolOptions = PoolOptions { in_sync_min: 1, class: PoolClass::Disk };

#[derive(Clone, Copy, Debug)]
enum Change {
    Add { group: u32, is_new: bool },
    Remove { group: u32 },
}

impl Change {
    fn random(replicas: &Replicas, random: &mut WyRand) -> Change {
        loop {
            let group = GROUPS[random.index(GROUPS.len())];
            if replicas.contains_key(&group) {
                return Change::Remove { group };
            }
            if replicas.len() < PARTITIONS {
                return Change::Add { group, is_new: random.happens(500) };
            }
        }
    }

    fn apply(self, replicas: &Replicas) -> Replicas {
        let mut after = replicas.clone();
        match self {
            Change::Add { group, is_new } => after.insert(group, is_new),
            Change::Remove { group } => after.remove(&group),
        };
        after
    }
}

/// How the changes ended that a power failure has interrupted, and how many it has not.
#[derive(Debug, Default)]
struct Counts {
    undone: usize,
    done: usize,
    finished: usize,
}

fn format(disk: &CrashDisk, clock: &VirtualClock, random: &mut WyRand) {
    let mut process = Process::start(&disk.clone().into(), clock, random);
    let (registry, core) = (process.registry.clone(), process.reactor.core());
    let replicas = ReplicaFormat {
        cluster: Uuid::nil(),
        node: Uuid::nil(),
        groups: vec![GROUPS[0]],
        are_new: true,
        generation: 0,
        spare: PARTITIONS as u32 - 1,
    };
    let options =
        FormatOptions { log_bytes: Some(256 << 10), replicas: Some(replicas), ..FormatOptions::default() };
    let job = JobHandle::standalone();
    process
        .run(async move { format_device(&registry, "Disk", &StoreCores::This(&core), options, &job).await })
        .unwrap();
    process.discard();
}

/// Opens the node, and returns what it has.
fn open(process: &mut Process) -> Result<(Rc<ReplicaNode>, Replicas), String> {
    let (registry, core) = (process.registry.clone(), process.reactor.core());
    process.run(async move {
        let config = ReplicaNodeConfig {
            name: "test",
            id: ReplicaId(1),
            settings: ReplicaSettings::default(),
            pools: vec![(0..u32::MAX, POOL)],
            boot: [1; 16],
            tuning: StoreTuning::default(),
            threads: StoreThreads::default(),
            outbox: Arc::new(|_, _| Box::new(NoOutbox)),
        };
        let cores = StoreCores::This(&core);
        let opened = ReplicaNode::open(&registry, "Disk", &cores, config, &JobHandle::standalone()).await;
        let node = opened.map_err(|error| format!("the device does not open: {error}"))?;
        let status = node.status().await.map_err(|error| error.to_string())?;
        let replicas: Replicas = status
            .iter()
            .filter_map(|it| it.replica.as_ref())
            .map(|it| (it.group, it.status.complete))
            .collect();
        if replicas.len() + node.spare_partitions() != PARTITIONS {
            return Err(format!("{replicas:?} and {} spare partitions", node.spare_partitions()));
        }
        Ok((Rc::new(node), replicas))
    })
}

/// Begins a change, and fails the power when the disk has got some of its writes and flushes. `true` if it
/// had ended before.
fn interrupt(
    process: &mut Process,
    node: &Rc<ReplicaNode>,
    change: Change,
    disk: &CrashDisk,
    log_entries: usize,
) -> bool {
    let has_ended = Rc::new(Cell::new(false));
    let (ended, node, core) = (has_ended.clone(), node.clone(), process.reactor.core());
    assert!(process.reactor.core().spawn(async move {
        let cores = StoreCores::This(&core);
        match change {
            Change::Add { group, is_new } => drop(node.add_group(&cores, group, is_new, POOL).await.unwrap()),
            Change::Remove { group } => node.remove_group(&cores, group).await.unwrap(),
        }
        ended.set(true);
    }));
    while !has_ended.get() && disk.log_len() < log_entries {
        process.turn();
    }
    has_ended.get()
}

fn run(seed: u64, counts: &mut Counts) -> Result<(), String> {
    let (clock, mut random) = (VirtualClock::default(), WyRand::new(seed));
    let block_size = if seed.is_multiple_of(2) { 512 } else { 4096 };
    let blocks = (8 << 20) / u64::from(block_size);
    let disk = CrashDisk::create(&Registry::new(), "Disk", blocks, block_size, seed).unwrap();
    format(&disk, &clock, &mut random);
    let mut expected = vec![Replicas::from([(GROUPS[0], true)])];
    for round in 0..ROUNDS {
        let mut process = Process::start(&disk.clone().into(), &clock, &mut random);
        let (node, replicas) = open(&mut process).map_err(|error| format!("round {round}: {error}"))?;
        match expected.iter().position(|it| *it == replicas) {
            None => return Err(format!("round {round}: {replicas:?} instead of one of {expected:?}")),
            Some(_) if expected.len() == 1 => counts.finished += usize::from(round > 0),
            Some(0) => counts.undone += 1,
            Some(_) => counts.done += 1,
        }
        let change = Change::random(&replicas, &mut random);
        let log_entries = disk.log_len() + random.below(LOG_ENTRIES_MAX) as usize;
        let has_ended = interrupt(&mut process, &node, change, &disk, log_entries);
        let after = change.apply(&replicas);
        expected = if has_ended { vec![after] } else { vec![replicas, after] };
        drop(node);
        process.discard();
        disk.fail_power(random.next_bits());
    }
    Ok(())
}

#[test]
fn a_power_failure_leaves_the_state_before_or_after_a_change() {
    let only = std::env::var("RINGBOLT_SEED").ok().map(|seed| seed.parse::<u64>().unwrap());
    let mut counts = Counts::default();
    for seed in only.map_or(0..SEEDS, |seed| seed..seed + 1) {
        run(seed, &mut counts).unwrap_or_else(|error| panic!("RINGBOLT_SEED={seed}: {error}"));
    }
    println!("{counts:?}");
    // Power failed before, while and after changes became durable.
    assert!(only.is_some() || counts.undone > 0 && counts.done > 0 && counts.finished > 0, "{counts:?}");
}
