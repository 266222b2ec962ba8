//! Records, and a race of proposals, for every kind of map.
#![allow(dead_code, reason = "each test uses its part")]

use std::collections::BTreeMap;
use std::sync::Mutex;

use cluster_map::*;
use uuid::Uuid;

pub(crate) fn record(epoch: u32, primary: u32, in_sync: &[u32]) -> GroupRecord {
    let in_sync = in_sync.iter().copied().map(ReplicaId).collect();
    GroupRecord {
        config: GroupConfig { epoch, primary: ReplicaId(primary), in_sync },
        replicas: [1, 2, 3].map(ReplicaId).into(),
    }
}

pub(crate) fn node(number: u128) -> NodeRecord {
    let addresses = vec!["127.0.0.1:7000".to_string()];
    NodeRecord { uuid: Uuid::from_u128(number), addresses, domain: "rack".to_string(), out: false }
}

/// Three users of a map, each as another process would, propose records of one group until its epoch is `end` at least.
/// Returns how many proposals were accepted for each epoch after the first.
pub(crate) fn race<M: ClusterMap>(open: impl Fn() -> M + Sync, end: u32) -> BTreeMap<u32, u32> {
    let id = GroupId(1);
    open().propose_group(id, &record(1, 1, &[1, 2, 3])).unwrap();
    let accepted = Mutex::new(BTreeMap::<u32, u32>::new());
    std::thread::scope(|scope| {
        for primary in 1..=3 {
            let (open, accepted) = (&open, &accepted);
            scope.spawn(move || {
                let map = open();
                let mut epoch = 2;
                while epoch < end {
                    match map.propose_group(id, &record(epoch, primary, &[primary])).unwrap() {
                        Proposed::Accepted => *accepted.lock().unwrap().entry(epoch).or_default() += 1,
                        Proposed::Superseded(known) => assert!(known.config.epoch >= epoch),
                        Proposed::Missing => panic!("it was there"),
                    }
                    epoch = map.group(id).unwrap().unwrap().config.epoch + 1;
                }
            });
        }
    });
    accepted.into_inner().unwrap()
}

/// Lease and grace of a cluster without nodes yet, which gets one.
pub(crate) fn settings_are_given_once_before_there_are_nodes(map: &impl ClusterMap) {
    let settings = |lease_ms, grace_ms| ClusterSettings { lease_ms, grace_ms };
    // Maps from before there were settings.
    assert_eq!(map.settings().unwrap(), settings(400, 450));
    let refused = |settings| map.create_settings(&settings).unwrap_err().to_string();
    assert_eq!(
        refused(settings(480, 520)),
        "a lease of 480 ms and a grace of 520 ms together are not below 1000 ms"
    );
    for grace_ms in [0, 300, 306] {
        let expected = format!(
            "a grace of {grace_ms} ms does not outlast a lease of 300 ms on clocks that are 1 % fast or slow: at least 307 ms"
        );
        assert_eq!(refused(settings(300, grace_ms)), expected);
    }
    assert_eq!(refused(settings(39, 400)), "a lease of 39 ms is too short: at least 40 ms");
    assert!(refused(settings(u32::MAX, u32::MAX)).contains("not below 1000 ms"));
    map.create_settings(&settings(300, 307)).unwrap();
    assert_eq!(map.settings().unwrap(), settings(300, 307));
    assert_eq!(refused(settings(310, 350)), "a lease and grace of the cluster exists");
    map.create_node(&node(9)).unwrap();
    assert!(refused(settings(310, 350)).contains("has nodes"));
    assert_eq!(map.settings().unwrap(), settings(300, 307));
}

/// A node that is removed, with its device, is refused, and no other gets its number. The map has node 1, and the one that comes is the
/// last.
pub(crate) fn a_removed_node_does_not_come_back(map: &impl ClusterMap) {
    let removed = map.create_node(&node(77)).unwrap();
    let device = DeviceRecord {
        uuid: Uuid::from_u128(78),
        node: removed,
        weight: 1,
        out: false,
        partition: None,
        partitions: Some(3),
        class: None,
    };
    map.put_device(DeviceId(77), &device).unwrap();
    map.set_out(removed, Some(OutReason::Operator)).unwrap();
    map.renew_lease(removed, 60).unwrap();
    map.remove_node(removed).unwrap();
    assert!(!map.nodes().unwrap().contains_key(&removed));
    assert!(!map.devices().unwrap().contains_key(&DeviceId(77)));
    assert!(!map.out().unwrap().contains_key(&removed));
    assert!(!map.nodes_up().unwrap().contains(&removed));
    assert!(map.nodes().unwrap().contains_key(&NodeId(1)));
    let back = map.put_node(removed, &node(77)).unwrap_err();
    assert!(matches!(back, MapError::Removed(id) if id == removed), "{back}");
    let missing = map.remove_node(removed).unwrap_err().to_string();
    assert_eq!(missing, format!("there is no node {}", removed.0));
    assert_eq!(map.create_node(&node(79)).unwrap(), NodeId(removed.0 + 1));
    map.remove_node(NodeId(removed.0 + 1)).unwrap();
}

/// Keys of clients in a map with the pool `p`, and only that one.
pub(crate) fn client_keys_come_and_go(map: &impl ClusterMap) {
    let [vm, backup] = ["vm", "backup.1_a"].map(|name| KeyName::new(name).unwrap());
    let record = |pools: &[(&str, PoolAccess)]| {
        ClientKeyRecord::new(pools.iter().map(|(name, access)| (name.to_string(), *access)).collect())
    };
    assert_eq!(map.client_keys().unwrap(), BTreeMap::new());
    let first = record(&[("p", PoolAccess::ReadWrite)]);
    map.create_client_key(vm, &first).unwrap();
    let second = record(&[("p", PoolAccess::Read)]);
    map.create_client_key(backup, &second).unwrap();
    assert_eq!(map.client_keys().unwrap(), [(vm, first), (backup, second.clone())].into());
    let refused = |record| map.create_client_key(vm, &record).unwrap_err().to_string();
    assert_eq!(refused(second), "client key vm exists");
    assert!(refused(record(&[])).contains("rights on 1 to 64 pools"));
    assert_eq!(refused(record(&[("p", PoolAccess::Read), ("q", PoolAccess::Read)])), "there is no pool q");
    map.remove_client_key(vm).unwrap();
    assert_eq!(map.remove_client_key(vm).unwrap_err().to_string(), "there is no client key vm");
    assert_eq!(map.client_keys().unwrap().into_keys().collect::<Vec<_>>(), [backup]);
    // Another key of the same name is another key.
    let again = record(&[("p", PoolAccess::ReadWrite)]);
    map.create_client_key(vm, &again).unwrap();
    assert_eq!(map.client_keys().unwrap()[&vm], again);
}
