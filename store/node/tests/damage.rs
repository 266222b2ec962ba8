//! A partition that is damaged, or whose log or records are, ends one replica and no node: the group goes on
//! without it, and the replica gets a copy. What may be the only copy is kept.
#![allow(clippy::unwrap_used)]

mod cluster;
mod process;

use std::sync::Arc;

use bdev::testing::CrashDisk;
use cluster::{Cluster, GROUPS, MS, NODES};
use cluster_map::PoolClass;
use process::TestDisks;
use replica::GroupConfig;
use store_node::{FailedPartition, PoolOptions, StoreCores, StoreError};
use wire_store::{BLOCK_BYTES, PartitionLayout, SECTOR_BYTES, Superblock};

/// The group whose partition is damaged, and that partition.
const GROUP: u32 = GROUPS[0];
const PARTITION: u32 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    Onode,
    Headers,
    Records,
}

const ALL: [Damage; 3] = [Damage::Onode, Damage::Headers, Damage::Records];

impl Damage {
    /// Damages a partition; the second time everything is as it was.
    fn inflict(self, disks: &TestDisks, superblock: &Superblock) {
        let sector = |disk: &CrashDisk, block: u64| {
            let at = block as usize * BLOCK_BYTES;
            disk.damage(at..at + SECTOR_BYTES);
        };
        let log = disks.log.as_ref().unwrap_or(&disks.disk);
        match self {
            Damage::Onode => {
                sector(&disks.disk, superblock.partition_start(PARTITION) + PartitionLayout::ONODES_START);
            }
            Damage::Headers => {
                (0..2).for_each(|slot| sector(log, superblock.log_start(PARTITION) + slot));
            }
            Damage::Records => {
                (0..2).for_each(|slot| sector(log, superblock.checkpoint_start(PARTITION, slot)));
            }
        }
    }

    /// What the start of a node says.
    fn reason(self) -> &'static str {
        match self {
            Damage::Onode => "partition 0: block ",
            Damage::Headers => "log 0: ",
            Damage::Records => "neither checkpoint record is valid",
        }
    }
}

fn run_for(cluster: &mut Cluster, time_ns: u64, begin: bool) {
    let end_ns = cluster.clock.now_ns() + time_ns;
    while cluster.clock.now_ns() < end_ns {
        cluster.turn().unwrap();
        cluster.run_clients(begin);
    }
}

/// A cluster with load behind it.
fn loaded(seed: u64) -> Cluster {
    let mut cluster = Cluster::new(seed, false);
    run_for(&mut cluster, 100 * MS, true);
    cluster.settle().unwrap();
    cluster
}

/// Damages a partition of a node that loses its power, and starts the node at once. Returns what has failed
/// then.
fn damage(cluster: &mut Cluster, node: usize, what: Damage) -> Vec<FailedPartition> {
    let superblock = cluster.nodes[node].node.as_ref().unwrap().superblock().clone();
    cluster.crash(node, false);
    what.inflict(&cluster.nodes[node].disks, &superblock);
    cluster.nodes[node].restart_ns = 0;
    while cluster.nodes[node].node.is_none() {
        cluster.turn().unwrap();
    }
    cluster.nodes[node].node.as_ref().unwrap().failed_partitions()
}

fn check_failed(failed: &[FailedPartition], what: Damage) {
    let [FailedPartition { index: PARTITION, group, reason }] = failed else {
        panic!("{what:?}: {failed:?}");
    };
    assert_eq!(*group, (what != Damage::Headers).then_some(GROUP), "{what:?}");
    assert!(reason.contains(what.reason()), "{what:?}: {reason}");
}

fn outlives(what: Damage, seed: u64, of_primary: bool) {
    let mut cluster = loaded(seed);
    let primary = cluster.network.lock().unwrap().map[&GROUP].primary.0 as usize;
    let node = if of_primary { primary } else { (primary + 1) % NODES };
    check_failed(&damage(&mut cluster, node, what), what);
    // Its other replica is there, and clients are served.
    let groups = cluster.nodes[node].node.as_ref().unwrap().groups();
    assert_eq!(groups, [GROUPS[1]], "{what:?}");
    let (writes, end_ns) = (cluster.totals.writes, cluster.clock.now_ns() + 1000 * MS);
    while cluster.totals.writes < writes + 20 {
        assert!(cluster.clock.now_ns() < end_ns, "{what:?}: the group does not go on");
        cluster.turn().unwrap();
        cluster.run_clients(true);
    }
    // The replica is in sync again, by itself, and has everything.
    cluster.settle().unwrap_or_else(|error| panic!("{what:?}: {error}"));
    let renewed = cluster.nodes[node].node.as_ref().unwrap();
    assert_eq!((renewed.failed_partitions(), renewed.groups().len()), (Vec::new(), GROUPS.len()), "{what:?}");
    cluster.read_all().unwrap();
    cluster.read_from_each().unwrap_or_else(|error| panic!("{what:?}: {error}"));
}

#[test]
fn a_damaged_partition_of_a_follower_ends_one_replica_which_gets_a_copy() {
    ALL.into_iter().zip(0..).for_each(|(what, seed)| outlives(what, seed, false));
}

#[test]
fn a_damaged_partition_of_a_primary_ends_one_replica_which_gets_a_copy() {
    ALL.into_iter().zip(3..).for_each(|(what, seed)| outlives(what, seed, true));
}

#[test]
fn a_damaged_partition_that_may_be_the_only_copy_is_kept() {
    for (what, seed) in ALL.into_iter().zip(6..) {
        let mut cluster = loaded(seed);
        let alone = cluster.network.lock().unwrap().map[&GROUP].primary;
        let node = alone.0 as usize;
        for other in (0..NODES).filter(|other| *other != node) {
            cluster.crash(other, false);
        }
        for config in cluster.network.lock().unwrap().map.values_mut() {
            *config = Arc::new(GroupConfig { epoch: config.epoch + 1, primary: alone, in_sync: vec![alone] });
        }
        let failed = damage(&mut cluster, node, what);
        check_failed(&failed, what);
        // The others come back, and none of them serves the group.
        let reads = cluster.totals.reads;
        run_for(&mut cluster, 400 * MS, false);
        assert!(cluster.nodes.iter().all(|node| node.node.is_some()));
        assert_eq!(cluster.nodes[node].node.as_ref().unwrap().failed_partitions(), failed, "{what:?}");
        assert_eq!(cluster.network.lock().unwrap().map[&GROUP].in_sync, [alone]);
        assert_eq!(cluster.totals.reads, reads);
        if what != Damage::Headers {
            check_refused(&mut cluster, node);
        }
        // When its device is in order again everything is there.
        assert_eq!(damage(&mut cluster, node, what), []);
        cluster.settle().unwrap_or_else(|error| panic!("{what:?}: {error}"));
        cluster.read_all().unwrap();
    }
}

/// The group gets no other partition while one that failed is kept.
fn check_refused(cluster: &mut Cluster, node: usize) {
    let machine = &mut cluster.nodes[node];
    let (opened, process) = (machine.node.clone().unwrap(), machine.process.as_mut().unwrap());
    let core = process.reactor.core();
    let pool = PoolOptions { in_sync_min: 2, class: PoolClass::Disk };
    let added =
        process.run(async move { opened.add_group(&StoreCores::This(&core), GROUP, false, pool).await });
    let refused = added.map(drop).unwrap_err();
    assert!(matches!(refused, StoreError::Damaged { partition: PARTITION, group: GROUP, .. }), "{refused}");
}
