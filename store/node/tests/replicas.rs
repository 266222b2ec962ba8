//! Replicas of a group on disks with volatile caches lose nothing that was acknowledged, whichever of them
//! lose power, restart, are cut off or get an empty disk; and they recover by themselves.
//!
//! In the end all replicas are in sync, and each serves what was acknowledged. `RINGBOLT_SEED` runs one seed.
#![allow(clippy::unwrap_used)]

mod cluster;
mod process;

use std::sync::Arc;

use cluster::{Cluster, GROUPS, MS, NODES, Totals};
use cluster_map::PoolClass;
use process::Process;
use replica::{
    Append, EntryId, GroupBlocked, GroupConfig, MessageBody, ObjectPart, ReplicaId, ReplicaMessage,
    ReplicatedEntry,
};
use store_node::{ReplicaInput, inspect};
use wire_store::{BLOCK_BYTES, BLOCKS_PER_EXTENT, EntryHeader, ObjectId, Operation};

const SEEDS: u64 = 6;
/// Further seeds run until everything was reached, at most these.
const SEEDS_MAX: u64 = 40;

fn run_seed(seed: u64, ignores_fua: bool) -> Result<Totals, String> {
    let mut cluster = match seed % 3 == 2 && !ignores_fua {
        true => Cluster::with_most_checksums_on_disk(seed),
        false => Cluster::new(seed, ignores_fua),
    };
    for _ in 0..8 {
        let end_ns = cluster.clock.now_ns() + 30 * MS + cluster.random.below(120 * MS);
        while cluster.clock.now_ns() < end_ns {
            cluster.turn()?;
            cluster.run_clients(true);
        }
        for partition in cluster.statuses().into_iter().flatten() {
            cluster.totals.checkpoints += partition.stats.checkpoints;
            cluster.totals.redone += partition.stats.entries_redone;
            cluster.totals.overwriting += partition.stats.entries_overwriting;
            cluster.totals.flushed_reads += partition.stats.reads_flushed;
            cluster.totals.checksum_misses += partition.stats.checksum_misses;
            let is_complete = partition.replica.is_some_and(|replica| replica.status.complete);
            cluster.totals.copies += u64::from(!is_complete);
        }
        let node = cluster.random.index(NODES);
        match cluster.random.below(6) {
            0 => {
                let mut network = cluster.network.lock().unwrap();
                if !network.cut.remove(&node) && network.cut.is_empty() {
                    network.cut.insert(node);
                    cluster.totals.cuts += 1;
                }
            }
            1 => {
                // Its data is lost for good: the others must have everything, as an operator would see to.
                cluster.settle()?;
                let others = (0..NODES as u32).map(ReplicaId).filter(|other| other.0 as usize != node);
                let others: Vec<_> = others.collect();
                cluster.crash(node, true);
                let mut network = cluster.network.lock().unwrap();
                for config in network.map.values_mut() {
                    let primary = if config.primary.0 as usize == node { others[0] } else { config.primary };
                    *config =
                        Arc::new(GroupConfig { epoch: config.epoch + 1, primary, in_sync: others.clone() });
                }
                network.loss_per_mille = 5;
            }
            2 | 3 => (0..NODES).for_each(|node| cluster.crash(node, false)),
            _ => cluster.crash(node, false),
        }
    }
    cluster.settle()?;
    cluster.read_all()?;
    cluster.read_from_each()?;
    for index in 0..NODES {
        cluster.crash(index, false);
        let mut process = Process::start(&cluster.nodes[index].disks, &cluster.clock, &mut cluster.random);
        let (registry, core) = (process.registry.clone(), process.reactor.core());
        let bdevs = cluster.nodes[index].disks.bdevs();
        let contents = process.run(async move { inspect(&core, &registry, bdevs, true, |_| ()).await });
        let problems = contents.map_err(|error| error.to_string())?.problems;
        if !problems.is_empty() {
            return Err(format!("the disk of node {index}: {problems:?}"));
        }
        process.discard();
    }
    Ok(cluster.totals)
}

#[test]
fn replicas_lose_nothing_that_was_acknowledged() {
    let seeds = match std::env::var("RINGBOLT_SEED") {
        Ok(seed) => seed.parse().map(|seed: u64| seed..seed + 1).unwrap(),
        Err(_) => 0..SEEDS_MAX,
    };
    let is_one_seed = seeds.end - seeds.start == 1;
    let mut all = Totals::default();
    for seed in seeds {
        if seed >= SEEDS && all.reaches_everything() {
            break;
        }
        let totals = run_seed(seed, false).unwrap_or_else(|error| panic!("RINGBOLT_SEED={seed}: {error}"));
        all.writes += totals.writes;
        all.reads += totals.reads;
        all.crashes += totals.crashes;
        all.replaced += totals.replaced;
        all.cuts += totals.cuts;
        all.checkpoints += totals.checkpoints;
        all.redone += totals.redone;
        all.copies += totals.copies;
        all.overwriting += totals.overwriting;
        all.flushed_reads += totals.flushed_reads;
        all.checksum_misses += totals.checksum_misses;
    }
    println!("{all:?}");
    assert!(is_one_seed || all.reaches_everything(), "the load does not reach everything: {all:?}");
}

/// A pool of class `memory` loses nothing if processes are killed, all at once too, nor if one machine at a
/// time loses its power: its replica gets a copy.
#[test]
fn class_memory_survives_kills_and_one_power_failure_at_a_time() {
    let (mut copies, mut kills) = (0, 0);
    for seed in 0..SEEDS {
        let mut run = || -> Result<(), String> {
            let mut cluster = Cluster::with_class(seed, false, PoolClass::Memory);
            for round in 0..6 {
                run_for(&mut cluster, 30 * MS + round * 10 * MS, true);
                let node = cluster.random.index(NODES);
                match cluster.random.below(4) {
                    0 => (0..NODES).for_each(|node| cluster.kill(node)),
                    1 => cluster.kill(node),
                    _ => {
                        cluster.settle()?;
                        cluster.crash(node, false);
                        cluster.settle()?;
                        copies += 1;
                    }
                }
            }
            cluster.settle()?;
            cluster.read_all()?;
            kills += cluster.totals.crashes;
            cluster.read_from_each()
        };
        run().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    assert!(copies > 3 && kills > copies, "{copies} {kills}");
}

/// What class `memory` does not promise: if all replicas lose their power, their data is lost. They say so,
/// and serve nothing.
#[test]
fn class_memory_is_lost_with_the_power_of_all_and_says_so() {
    for seed in 0..2 {
        let mut cluster = Cluster::with_class(seed, false, PoolClass::Memory);
        run_for(&mut cluster, 100 * MS, true);
        cluster.settle().unwrap();
        let reads = cluster.totals.reads;
        (0..NODES).for_each(|node| cluster.crash(node, false));
        // No client gets an answer: `turn` would find wrong data.
        run_for(&mut cluster, 1000 * MS, true);
        assert_eq!(cluster.totals.reads, reads);
        let replicas = cluster.statuses().into_iter().flatten().filter_map(|partition| partition.replica);
        let replicas: Vec<_> = replicas.collect();
        assert!(replicas.iter().all(|replica| !replica.status.complete));
        let lost = replicas.iter().filter(|replica| replica.status.blocked == Some(GroupBlocked::DataLost));
        assert_eq!(lost.count(), GROUPS.len(), "the primary of each group");
    }
}

/// The same disks lose nothing with class `disk`: see `replicas_lose_nothing_that_was_acknowledged`. So the
/// classes differ in what they write: with class `memory` only the record of a checkpoint is durable, which
/// has the boot of the machine.
#[test]
fn class_memory_does_not_wait_for_the_medium() {
    let counts = |class| {
        let mut cluster = Cluster::with_class(1, false, class);
        let count = |cluster: &mut Cluster| {
            let stats: Vec<_> = cluster.statuses().remove(0).into_iter().map(|it| it.stats).collect();
            let checkpoints: u64 = stats.iter().map(|it| it.checkpoints).sum();
            let log_writes: u64 = stats.iter().map(|it| it.log_writes).sum();
            (cluster.nodes[0].disks.durable_requests() as u64, checkpoints, log_writes)
        };
        // Opening a replica is durable in both classes.
        run_for(&mut cluster, 20 * MS, true);
        let opened = count(&mut cluster);
        run_for(&mut cluster, 180 * MS, true);
        let end = count(&mut cluster);
        (end.0 - opened.0, end.1 - opened.1, end.2 - opened.2)
    };
    let (durable, checkpoints, log_writes) = counts(PoolClass::Memory);
    // The checkpoint of each group that has begun is not counted.
    assert!(durable <= checkpoints + GROUPS.len() as u64, "{durable} {checkpoints}");
    assert!(checkpoints * 5 < log_writes, "{checkpoints} {log_writes}");
    let (durable, _, log_writes) = counts(PoolClass::Disk);
    assert!(durable >= log_writes && log_writes > 100, "{durable} {log_writes}");
}

/// A message that arrives after a poll wakes nothing, because the core is awake: it must not sleep then.
#[test]
fn a_message_that_waits_keeps_the_core_awake() {
    let mut cluster = Cluster::new(1, false);
    while cluster.nodes[0].node.is_none() {
        cluster.turn().unwrap();
    }
    let deadline = |cluster: &Cluster| cluster.nodes[0].process.as_ref().unwrap().reactor.deadline();
    for _ in 0..1_000_000 {
        if deadline(&cluster) != Some(0) {
            break;
        }
        cluster.nodes[0].process.as_mut().unwrap().turn();
    }
    assert_ne!(deadline(&cluster), Some(0), "it has something to do although nothing happens");
    let config = cluster.network.lock().unwrap().map[&GROUPS[0]].clone();
    assert!(cluster.nodes[0].replicas[&GROUPS[0]].send(ReplicaInput::Map(config)));
    assert_eq!(deadline(&cluster), Some(0));
}

/// While objects are copied to a learner, it gets entries of later ones without their data. If these reserved
/// the space that comes with the copies, a partition with few onodes would have no room for the first copy,
/// for which they wait.
#[test]
fn a_learner_has_room_for_copies_however_many_entries_wait_for_them() {
    const GROUP: u32 = GROUPS[0];
    const EXTENT_BYTES: u32 = (BLOCKS_PER_EXTENT * BLOCK_BYTES) as u32;
    let mut cluster = Cluster::new(2, false);
    // Its primary is played here.
    cluster.nodes[1..].iter_mut().for_each(|node| node.restart_ns = u64::MAX);
    cluster.network.lock().unwrap().loss_per_mille = 0;
    while cluster.nodes[0].node.is_none() {
        cluster.turn().unwrap();
    }
    let (primary, in_sync) = (ReplicaId(1), vec![ReplicaId(1), ReplicaId(2)]);
    let config = Arc::new(GroupConfig { epoch: 2, primary, in_sync });
    cluster.network.lock().unwrap().map.insert(GROUP, config.clone());
    assert!(cluster.nodes[0].replicas[&GROUP].send(ReplicaInput::Map(config.clone())));
    let mut session = 0;
    let heard = |cluster: &mut Cluster, session: &mut u64, expected: fn(&MessageBody) -> bool| {
        // 10 ms.
        for _ in 0..2000 {
            cluster.turn().unwrap();
            let heard = std::mem::take(&mut cluster.network.lock().unwrap().unheard);
            for message in heard.into_iter().filter(|message| message.config.epoch == 2) {
                if let MessageBody::Join { session: wanted, .. } = message.body {
                    *session = wanted;
                }
                if expected(&message.body) {
                    return true;
                }
            }
        }
        false
    };
    let send = |cluster: &Cluster, body| {
        let message = ReplicaMessage { from: primary, config: config.clone(), body };
        assert!(cluster.nodes[0].replicas[&GROUP].send(ReplicaInput::Message(message)));
    };
    assert!(heard(&mut cluster, &mut session, |body| matches!(body, MessageBody::Join { .. })));
    let base = EntryId::default();
    send(&cluster, MessageBody::CopyBegin { session, base, applied: Box::default() });
    assert!(heard(&mut cluster, &mut session, |body| matches!(body, MessageBody::CopyBegun { .. })));
    let object = |index| ObjectId { group: GROUP, volume: 1, index, suffix: 0 };
    // Fewer than make a checkpoint due, which puts them in place.
    let (count, length) = (30, 2 * EXTENT_BYTES);
    let layout = cluster.nodes[0].node.as_ref().unwrap().superblock().layout().unwrap();
    assert!(count * 3 > layout.extents.into(), "they fit anyway");
    let entry = |sequence| {
        let header = EntryHeader::new(Operation::Write, object(1), BLOCK_BYTES as u32, length);
        let header = EntryHeader { sequence, epoch: 2, version: sequence, withheld: true, ..header };
        Arc::new(ReplicatedEntry { header, data: [].into() })
    };
    let entries = (1..=count).map(entry).collect();
    let sent_ns = cluster.clock.now_ns();
    let (commit_point, log_end) = (count, Some(count));
    let append = Append { sent_ns, session, previous: base, entries, commit_point, log_end };
    send(&cluster, MessageBody::Append(append.clone()));
    assert!(heard(&mut cluster, &mut session, |body| matches!(body, MessageBody::Appended { .. })));
    let content = 1_u64.to_le_bytes().as_slice().into();
    send(
        &cluster,
        MessageBody::CopyObject { session, part: ObjectPart { object: object(0), number: 0 }, content },
    );
    // It goes in place after a while, in which the learner hears of its primary.
    let previous = EntryId { sequence: count, epoch: 2 };
    let is_written = (0..50).any(|_| {
        let sent_ns = cluster.clock.now_ns();
        let heartbeat = Append { sent_ns, previous, entries: Vec::new(), ..append.clone() };
        send(&cluster, MessageBody::Append(heartbeat));
        heard(&mut cluster, &mut session, |body| matches!(body, MessageBody::CopyWritten { .. }))
    });
    assert!(is_written, "the copy found no room");
}

/// The test finds disks that acknowledge the log's writes from their caches.
#[test]
fn disks_that_ignore_fua_are_found() {
    let found = (0..SEEDS).find_map(|seed| {
        std::panic::catch_unwind(|| run_seed(seed, true)).unwrap_or_else(|_| Err("a panic".to_string())).err()
    });
    println!("found: {}", found.expect("nothing is found"));
}

/// Each block of the device of a node is damaged. It is the primary of a group: reads are answered with what
/// another node has, and the blocks are written again.
#[test]
fn what_a_device_damages_comes_from_another_replica() {
    let mut cluster = Cluster::new(3, false);
    run_for(&mut cluster, 100 * MS, true);
    cluster.settle().unwrap();
    // Everything goes in place.
    run_for(&mut cluster, 300 * MS, false);
    let primary = cluster.network.lock().unwrap().map[&GROUPS[0]].primary.0 as usize;
    let repaired = |cluster: &mut Cluster| -> Vec<u64> {
        let of_node = |partitions: Vec<store_node::PartitionStatus>| {
            partitions.iter().map(|partition| partition.replica.as_ref().unwrap().status.repaired).sum()
        };
        cluster.statuses().into_iter().map(of_node).collect()
    };
    damage_blocks(&cluster, primary);
    cluster.read_all().unwrap();
    let counts = repaired(&mut cluster);
    assert!(counts[primary] > 0, "{counts:?}");
    assert_eq!(counts.iter().sum::<u64>(), counts[primary], "only its blocks are damaged: {counts:?}");
    // What was repaired is durable where it was damaged.
    run_for(&mut cluster, 300 * MS, false);
    cluster.read_all().unwrap();
    assert_eq!(repaired(&mut cluster), counts);
}

/// A replica with an empty disk gets its copy from a primary whose blocks are all damaged: they come from the
/// third one.
#[test]
fn a_copy_of_damaged_blocks_comes_from_a_third_replica() {
    for is_prioritized in [false, true] {
        let mut seeds = (5..45).step_by(2);
        assert!(
            seeds.any(|seed| copies_damaged_blocks(seed, is_prioritized)),
            "prioritized: {is_prioritized}"
        );
    }
}

/// Returns whether the node with the damaged blocks stayed the primary of every group: what others copy is
/// repaired there.
fn copies_damaged_blocks(seed: u64, is_prioritized: bool) -> bool {
    let mut cluster = Cluster::new(seed, false);
    cluster.is_prioritized = is_prioritized;
    run_for(&mut cluster, 100 * MS, true);
    cluster.settle().unwrap();
    run_for(&mut cluster, 300 * MS, false);
    let primary = cluster.network.lock().unwrap().map[&GROUPS[0]].primary.0 as usize;
    let replaced = (0..cluster.nodes.len()).find(|node| *node != primary).unwrap();
    damage_blocks(&cluster, primary);
    cluster.crash(replaced, true);
    cluster.settle().unwrap();
    let is_primary = cluster.network.lock().unwrap().map.values().all(|it| it.primary.0 as usize == primary);
    if is_primary {
        cluster.read_from_each().unwrap();
    }
    is_primary
}

/// Damages every block of the objects of a node.
fn damage_blocks(cluster: &Cluster, index: usize) {
    let node = &cluster.nodes[index];
    let superblock = node.node.as_ref().unwrap().superblock();
    let layout = superblock.layout().unwrap();
    for partition in 0..superblock.partitions {
        let first = superblock.partition_start(partition) + layout.extent_block(1);
        let count = u64::from(layout.extents) * BLOCKS_PER_EXTENT as u64;
        node.disks.disk.damage(first as usize * BLOCK_BYTES..(first + count) as usize * BLOCK_BYTES);
    }
}

fn run_for(cluster: &mut Cluster, time_ns: u64, begin: bool) {
    let end_ns = cluster.clock.now_ns() + time_ns;
    while cluster.clock.now_ns() < end_ns {
        cluster.turn().unwrap();
        cluster.run_clients(begin);
    }
}
