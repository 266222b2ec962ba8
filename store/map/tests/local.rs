//! The map in a file: compare-and-swap, identities, what a start finds.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cluster_map::*;
use uuid::Uuid;

struct MapFile(PathBuf);

impl MapFile {
    fn new(name: &str) -> MapFile {
        let path = std::env::temp_dir().join(format!("ringbolt-map-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        MapFile(path)
    }
}

impl Drop for MapFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn record(epoch: u32, primary: u32, in_sync: &[u32]) -> GroupRecord {
    let in_sync = in_sync.iter().copied().map(ReplicaId).collect();
    GroupRecord {
        config: GroupConfig { epoch, primary: ReplicaId(primary), in_sync },
        replicas: [1, 2, 3].map(ReplicaId).into(),
    }
}

fn node(number: u128) -> NodeRecord {
    let addresses = vec!["127.0.0.1:7000".to_string()];
    NodeRecord { uuid: Uuid::from_u128(number), addresses, domain: "rack".to_string(), out: false }
}

#[test]
fn a_record_changes_from_epoch_to_epoch_only() {
    let file = MapFile::new("epochs");
    let map = LocalMap::open(&file.0).unwrap();
    let id = GroupId(5);
    assert_eq!(map.group(id).unwrap(), None);
    assert_eq!(map.propose_group(id, &record(2, 1, &[1])).unwrap(), Proposed::Missing);
    let first = record(1, 1, &[1, 2, 3]);
    assert_eq!(map.propose_group(id, &first).unwrap(), Proposed::Accepted);
    // Its answer was lost.
    assert_eq!(map.propose_group(id, &first).unwrap(), Proposed::Accepted);
    for late in [record(1, 2, &[2]), record(3, 2, &[2])] {
        assert_eq!(map.propose_group(id, &late).unwrap(), Proposed::Superseded(first.clone()));
    }
    let second = record(2, 2, &[2, 3]);
    assert_eq!(map.propose_group(id, &second).unwrap(), Proposed::Accepted);
    drop(map);
    assert_eq!(LocalMap::open(&file.0).unwrap().group(id).unwrap(), Some(second));
}

#[test]
fn of_proposals_for_one_epoch_one_is_accepted() {
    let file = MapFile::new("race");
    let map = Arc::new(LocalMap::open(&file.0).unwrap());
    let id = GroupId(1);
    map.propose_group(id, &record(1, 1, &[1, 2, 3])).unwrap();
    for epoch in 2..12 {
        let accepted = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for primary in 1..=3 {
                let (map, accepted) = (&map, &accepted);
                scope.spawn(move || {
                    if map.propose_group(id, &record(epoch, primary, &[primary])).unwrap()
                        == Proposed::Accepted
                    {
                        accepted.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(accepted.into_inner(), 1, "epoch {epoch}");
    }
}

#[test]
fn records_without_sense_are_refused_by_name() {
    let file = MapFile::new("sense");
    let map = LocalMap::open(&file.0).unwrap();
    for (wrong, reason) in [
        (record(1, 1, &[2]), "its primary 1 is not in sync"),
        (record(1, 1, &[1, 4]), "4 is in sync and not a replica"),
        (record(1, 1, &[1, 2, 2]), "2 is in sync twice"),
        (record(0, 1, &[1]), "its epoch is 0"),
    ] {
        let error = map.propose_group(GroupId(1), &wrong).unwrap_err().to_string();
        assert_eq!(error, format!("the record of a group is refused: {reason}"));
    }
    let pool = PoolRecord { first_group: 0, groups: 8, replicas: 2, in_sync_min: 3 };
    assert!(matches!(map.create_pool("p", &pool), Err(MapError::Invalid(_))));
    let pool = PoolRecord { in_sync_min: 1, ..pool };
    map.create_pool("p", &pool).unwrap();
    assert_eq!(map.create_pool("p", &pool).unwrap_err().to_string(), "pool p exists");
    let overlapping = PoolRecord { first_group: 7, ..pool.clone() };
    let error = map.create_pool("q", &overlapping).unwrap_err().to_string();
    assert_eq!(error, "pool q would share groups with pool p");
    map.create_pool("q", &PoolRecord { first_group: 8, ..pool }).unwrap();
    assert_eq!(map.pools().unwrap().len(), 2);
}

#[test]
fn a_copied_identity_is_refused() {
    let file = MapFile::new("identity");
    let map = LocalMap::open(&file.0).unwrap();
    map.put_node(NodeId(1), &node(1)).unwrap();
    map.put_node(NodeId(1), &NodeRecord { out: true, ..node(1) }).unwrap();
    let error = map.put_node(NodeId(2), &node(1)).unwrap_err();
    assert!(matches!(error, MapError::SameIdentity { what: "node", number: 1, .. }), "{error}");
    let device = DeviceRecord { uuid: Uuid::from_u128(9), node: NodeId(1), weight: 100, out: false };
    map.put_device(DeviceId(1), &device).unwrap();
    let error = map.put_device(DeviceId(2), &device).unwrap_err();
    assert!(matches!(error, MapError::SameIdentity { what: "device", number: 1, .. }), "{error}");
    let stray = DeviceRecord { uuid: Uuid::from_u128(8), node: NodeId(7), ..device.clone() };
    assert_eq!(map.put_device(DeviceId(2), &stray).unwrap_err().to_string(), "there is no node 7");
    assert_eq!(map.devices().unwrap(), [(DeviceId(1), device)].into());
    assert!(map.nodes().unwrap()[&NodeId(1)].out);
}

#[test]
fn a_file_of_something_else_or_in_use_is_an_error_and_keeps_its_content() {
    let file = MapFile::new("foreign");
    std::fs::write(&file.0, vec![7; 8192]).unwrap();
    let error = LocalMap::open(&file.0).map(drop).unwrap_err().to_string();
    assert!(error.starts_with(&format!("the cluster map {}: ", file.0.display())), "{error}");
    assert_eq!(std::fs::read(&file.0).unwrap(), vec![7; 8192]);
    std::fs::remove_file(&file.0).unwrap();
    let map = LocalMap::open(&file.0).unwrap();
    let error = LocalMap::open(&file.0).map(drop).unwrap_err().to_string();
    assert!(error.contains("already open"), "{error}");
    drop(map);
}
