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

/// Keys of clients in a map with the pool `p`, and only that one.
pub(crate) fn what_nodes_have_seen_is_kept(map: &impl ClusterMap) {
    let committed = EntryId { sequence: 90, epoch: 3 };
    let groups = [(7, GroupProgress { epoch: 4, committed })].into();
    let memory = NodeMemory { device: Uuid::from_u128(5), incarnation: 2, groups };
    assert!(map.node_memories().unwrap().is_empty() && map.accepted_losses().unwrap().is_empty());
    map.put_node_memory(NodeId(1), &memory).unwrap();
    let newer = NodeMemory { incarnation: 3, ..memory };
    map.put_node_memory(NodeId(1), &newer).unwrap();
    assert_eq!(map.node_memories().unwrap(), [(NodeId(1), newer)].into());
    let loss = AcceptedLoss { node: ReplicaId(1), epoch: 4 };
    map.accept_loss(GroupId(7), &loss).unwrap();
    assert_eq!(map.accepted_losses().unwrap(), [(GroupId(7), loss)].into());
}

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
