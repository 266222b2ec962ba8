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
    NodeRecord {
        uuid: Uuid::from_u128(number),
        addresses,
        domain: "rack".to_string(),
        tls: TlsPolicy::Off,
        out: false,
    }
}

/// Three users of a map, each as another process would, propose records of one group until its epoch is `end`
/// at least. Returns how many proposals were accepted for each epoch after the first.
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

/// A node that is removed, with its device, is refused, and no other gets its number. The map has node 1, and
/// the one that comes is the last.
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
    map.renew_lease(removed, &holder(77, "here"), 60).unwrap();
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

/// Pools in a map that has none.
pub(crate) fn pools_get_other_names_and_numbers_of_replicas(map: &impl ClusterMap) {
    let pool = |first_group, replicas, in_sync_min| PoolRecord {
        first_group,
        groups: 2,
        replicas,
        in_sync_min,
        class: PoolClass::Disk,
    };
    map.create_pool("a", &pool(0, 2, 1)).unwrap();
    map.create_pool("b", &pool(2, 2, 1)).unwrap();
    assert!(map.change_pool("a", &pool(0, 2, 1), &pool(0, 3, 2)).unwrap());
    assert_eq!(map.pools().unwrap()["a"], pool(0, 3, 2));
    // Another one has changed it since.
    assert!(!map.change_pool("a", &pool(0, 2, 1), &pool(0, 1, 1)).unwrap());
    let refused = |to| map.change_pool("a", &pool(0, 3, 2), &to).unwrap_err().to_string();
    assert_eq!(refused(pool(2, 3, 2)), "pool a keeps its groups and its class");
    assert_eq!(refused(pool(0, 3, 4)), "pool a cannot need 4 replicas in sync of 3");
    assert_eq!(refused(pool(0, 3, 0)), "pool a cannot need 0 replicas in sync of 3");
    let missing = map.change_pool("c", &pool(0, 3, 2), &pool(0, 2, 1)).unwrap_err();
    assert_eq!(missing.to_string(), "there is no pool c");

    let [vol, other] = ["vol", "a.b"].map(|name| map.create_image("a", name, 1 << 20).unwrap());
    let changed = ImageEntry { bytes: 2 << 20, ..vol.clone() };
    assert!(map.change_image("a", "vol", &vol, &changed).unwrap());
    let refused = |to: &str| map.rename_pool("a", to).unwrap_err().to_string();
    assert_eq!(refused("b"), "pool b exists");
    assert_eq!(refused("a"), "pool a exists");
    assert!(refused("a/b").contains("is no name of a pool"));
    assert_eq!(map.rename_pool("c", "d").unwrap_err().to_string(), "there is no pool c");
    // Whatever knows the name.
    let key = KeyName::new("vm7").unwrap();
    map.create_client_key(key, &ClientKeyRecord::new([("a".to_string(), PoolAccess::Read)].into())).unwrap();
    assert!(refused("c").starts_with("client key vm7 has rights on pool a"));
    map.remove_client_key(key).unwrap();
    let lease = Uuid::from_u128(5);
    let holder = ImageHolder {
        id: Uuid::from_u128(6),
        lease,
        name: "host7".to_string(),
        address: String::new(),
        since: 1,
        shared: false,
        machine: String::new(),
        process: 1,
        started: 1,
    };
    let lock = ImageLock { attach_epoch: 7, holders: vec![holder] };
    assert!(map.change_image_lock("a", vol.volume, None, &lock).unwrap());
    map.renew_holder(lease, 60).unwrap();
    assert!(refused("c").starts_with("image a/vol is in use by host7"));
    map.end_holder(lease).unwrap();
    let removed = map.remove_image("a", "a.b", None).unwrap();
    assert!(refused("c").contains("whose removal was interrupted"));
    map.image_is_empty(&removed).unwrap();
    let other = map.create_image("a", "a.b", other.bytes).unwrap();

    map.rename_pool("a", "c").unwrap();
    assert_eq!(
        map.pools().unwrap(),
        [("b".to_string(), pool(2, 2, 1)), ("c".to_string(), pool(0, 3, 2))].into()
    );
    let name = |name: &str| ("c".to_string(), name.to_string());
    assert_eq!(map.images().unwrap(), [(name("a.b"), other), (name("vol"), changed)].into());
    // Its attach epoch is never used twice.
    assert_eq!(map.image_lock("c", vol.volume).unwrap().unwrap().attach_epoch, 7);
    assert!(map.create_image("a", "new", 1 << 20).unwrap_err().to_string().contains("there is no pool a"));
    let refused = map.remove_pool("c").unwrap_err().to_string();
    assert!(refused.contains("pool c has images"), "{refused}");
    // Its groups are those of the pool: no other one gets them, and they are not removed.
    assert!(
        map.create_pool("a", &pool(0, 2, 1))
            .unwrap_err()
            .to_string()
            .contains("would share groups with pool c")
    );
    assert_eq!(map.removed_groups().unwrap(), []);
}

/// How a cluster recovers, in a map that has no record of it.
pub(crate) fn recovery_changes_from_what_was_read(map: &impl ClusterMap) {
    let none = RecoverySettings::default();
    assert_eq!(map.recovery().unwrap(), none);
    let noout = RecoverySettings { noout: true, ..none };
    assert!(map.change_recovery(&none, &noout).unwrap());
    let limited = RecoverySettings { rate: Some(RecoverySettings::RATE_MIN), ..noout };
    // Another one has changed it since.
    assert!(!map.change_recovery(&none, &limited).unwrap());
    assert_eq!(map.recovery().unwrap(), noout);
    let low = RecoverySettings { rate: Some(RecoverySettings::RATE_MIN - 1), ..noout };
    let refused = map.change_recovery(&noout, &low).unwrap_err().to_string();
    assert_eq!(refused, "a recovery rate of 1048575 bytes a second is too low: at least 1048576");
    assert!(map.change_recovery(&noout, &limited).unwrap());
    assert_eq!(map.recovery().unwrap(), limited);
    let backup = map.backup().unwrap();
    assert!(map.change_recovery(&limited, &none).unwrap());
    map.restore(&backup, 0).unwrap();
    assert_eq!(map.recovery().unwrap(), limited);
    assert!(map.change_recovery(&limited, &none).unwrap());
}

/// Scrubs of a map that knows none.
pub(crate) fn scrubs_are_started_from_what_was_read_and_their_ends_are_kept(map: &impl ClusterMap) {
    let none = ScrubSettings::default();
    assert_eq!(map.scrub().unwrap(), none);
    let started = none.clone().started(Some("p".to_string()), None);
    assert!(map.change_scrub(&none, &started).unwrap());
    // Another one has started it since.
    assert!(!map.change_scrub(&none, &none.clone().started(None, Some(1))).unwrap());
    assert_eq!(map.scrub().unwrap(), started);
    let slow = ScrubSettings { rate: 1, ..started.clone() };
    let refused = map.change_scrub(&started, &slow).unwrap_err().to_string();
    assert_eq!(refused, "a scrub rate of 1 bytes a second is too low: at least 1048576");
    let backup = map.backup().unwrap();
    assert!(map.change_scrub(&started, &started.clone().stopped(5)).unwrap());
    map.restore(&backup, 0).unwrap();
    assert_eq!(map.scrub().unwrap(), started);
    assert!(map.group_scrubs().unwrap().is_empty());
    let difference = ScrubDifference { node: 2, volume: u64::MAX, index: 3, offset: 4096 };
    let found = GroupScrub { number: 1, ended_s: 9, differences: vec![difference], ..GroupScrub::default() };
    map.put_group_scrub(GroupId(7), &GroupScrub::default()).unwrap();
    map.put_group_scrub(GroupId(7), &found).unwrap();
    assert_eq!(map.group_scrubs().unwrap(), [(GroupId(7), found)].into());
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

/// A process that is a node.
/// In a map with pool `p`, whose images are `vol` and no others of these names.
pub(crate) fn images_get_other_names(map: &impl ClusterMap) {
    let key = |name: &str| ("p".to_string(), name.to_string());
    let rename =
        |from: &str, to: &str| map.rename_image("p", from, to, None).map_err(|error| error.to_string());
    let before = map.images().unwrap();
    let vol = before[&key("vol")].clone();
    rename("vol", "data").unwrap();
    let after = map.images().unwrap();
    assert_eq!(
        (after.get(&key("data")), after.get(&key("vol")), after.len()),
        (Some(&vol), None, before.len())
    );
    assert_eq!(rename("vol", "other").unwrap_err(), "there is no image p/vol");
    assert!(rename("data", "a/b").unwrap_err().contains("no name"));
    let other = map.create_image("p", "vol", 4096).unwrap();
    assert_eq!(rename("data", "vol").unwrap_err(), "image p/vol exists");
    // What is changed follows the image, and not its name.
    let trashed = Some(TrashedImage { name: "data".to_string(), until: 7 });
    let changed = ImageEntry { bytes: vol.bytes + 4096, trashed, ..vol.clone() };
    assert!(map.change_image("p", "data", &vol, &changed).unwrap());
    // An image that is another one than was read is neither renamed nor removed.
    for known in [&vol, &other] {
        let error = map.rename_image("p", "data", "more", Some(known)).unwrap_err().to_string();
        assert_eq!(error, "image p/data was changed by another one at the same time");
        let error = map.remove_image("p", "data", Some(known)).unwrap_err().to_string();
        assert_eq!(error, "image p/data was changed by another one at the same time");
    }
    map.rename_image("p", "data", "more", Some(&changed)).unwrap();
    rename("more", "trash.1").unwrap();
    assert_eq!(map.images().unwrap()[&key("trash.1")], changed);
    assert_eq!(map.images().unwrap()[&key("vol")], other);
    let removed = map.remove_image("p", "vol", None).unwrap();
    map.image_is_empty(&removed).unwrap();
    rename("trash.1", "vol").unwrap();
    assert!(map.change_image("p", "vol", &changed, &vol).unwrap());
    assert_eq!(map.images().unwrap(), before);
}

/// In a map with pool `p`: an image gets a snapshot, goes back to it, and loses it, all by changes of its
/// record.
pub(crate) fn an_image_gets_other_heads(map: &impl ClusterMap) {
    let image = map.create_image("p", "layered", 1 << 20).unwrap();
    let found = || map.images().unwrap()[&("p".to_string(), "layered".to_string())].clone();
    let change = |to: &ImageEntry| {
        assert!(map.change_image("p", "layered", &found(), to).unwrap());
        assert_eq!(found(), *to);
    };
    let snapshot = image.with_snapshot("monday", 7, 101);
    change(&snapshot);
    // Of two changes of what was read one is refused, also if the head is another one since.
    assert!(!map.change_image("p", "layered", &image, &image.with_snapshot("b", 7, 109)).unwrap());
    let error = map.remove_image("p", "layered", Some(&image)).unwrap_err().to_string();
    assert_eq!(error, "image p/layered was changed by another one at the same time");
    let back = snapshot.rolled_back(&snapshot.layers.snapshots[0], 102);
    change(&back);
    // What the map has of the head that was dropped goes, and the image stays.
    let dropped = RemovedImage::new("p", "layered (volume 101)", ImageEntry { volume: 101, ..image.clone() });
    map.image_is_empty(&dropped).unwrap();
    let mut clean = back.clone();
    clean.layers.dropped.clear();
    change(&clean);
    map.rename_image("p", "layered", "other", Some(&clean)).unwrap();
    map.rename_image("p", "other", "layered", Some(&clean)).unwrap();
    change(&clean.without_snapshot(&clean.layers.snapshots[0]));
    // What is left of an image that was removed is its head.
    let removed = map.remove_image("p", "layered", Some(&found())).unwrap();
    assert_eq!((removed.image.volume, removed.image.layers.is_empty()), (102, true));
    assert_eq!(map.removed_images().unwrap()[&102], removed);
    map.image_is_empty(&removed).unwrap();
}

pub(crate) fn holder(id: u128, place: &str) -> LeaseHolder {
    LeaseHolder {
        id: Uuid::from_u128(id),
        address: format!("127.0.0.1:{}", 7000 + id),
        place: place.to_string(),
    }
}

/// Each user of the map is another process.
pub(crate) fn one_process_holds_the_lease_of_a_node<M: ClusterMap>(open: impl Fn() -> M) {
    use LeaseOutcome::{Held, Taken};
    let (first, copy, again) = (open(), open(), open());
    let node = NodeId(1);
    assert_eq!(first.renew_lease(node, &holder(1, "a"), 60).unwrap(), Held);
    assert_eq!(first.renew_lease(node, &holder(1, "a"), 60).unwrap(), Held);
    // A copy elsewhere learns who it is, and disturbs nothing.
    assert_eq!(copy.renew_lease(node, &holder(2, "b"), 60).unwrap(), Taken(holder(1, "a")));
    copy.end_lease(node, &holder(2, "b")).unwrap();
    assert_eq!(first.renew_lease(node, &holder(1, "a"), 60).unwrap(), Held);
    assert_eq!(first.nodes_up().unwrap(), [node].into());
    // A process in the place of one that was killed waits for no lease, and the one before learns it.
    assert_eq!(again.renew_lease(node, &holder(3, "a"), 60).unwrap(), Held);
    assert_eq!(first.renew_lease(node, &holder(1, "x"), 60).unwrap(), Taken(holder(3, "a")));
    // Another one may be the node when it has ended.
    again.end_lease(node, &holder(3, "a")).unwrap();
    assert_eq!(first.nodes_up().unwrap(), [].into());
    assert_eq!(copy.renew_lease(node, &holder(2, "b"), 60).unwrap(), Held);
    assert_eq!(again.renew_lease(node, &holder(3, "a"), 60).unwrap(), Taken(holder(2, "b")));
    // Other nodes are others.
    assert_eq!(first.renew_lease(NodeId(2), &holder(1, "a"), 60).unwrap(), Held);
}

/// `save` makes a copy of the map's storage, and `revert` puts it in the place of that.
pub(crate) fn an_older_copy_gives_no_number_twice_and_says_what_it_is(
    map: &impl ClusterMap,
    save: impl Fn(),
    revert: impl Fn(),
) {
    let pool = |first_group| PoolRecord {
        first_group,
        groups: 8,
        replicas: 1,
        in_sync_min: 1,
        class: Default::default(),
    };
    assert_eq!(map.free_groups(8).unwrap(), 0);
    map.create_pool("p", &pool(0)).unwrap();
    map.create_node(&node(1)).unwrap();
    let id = GroupId(0);
    assert_eq!(map.propose_group(id, &record(1, 1, &[1, 2, 3])).unwrap(), Proposed::Accepted);
    map.create_image("p", "a", 4096).unwrap();
    let before = map.position().unwrap();
    assert_eq!(before.lost, None);
    save();
    // Another image and pool, a node that is a member of a group, and an epoch.
    let image = map.create_image("p", "b", 4096).unwrap();
    let first = map.free_groups(8).unwrap();
    map.create_pool("q", &pool(first)).unwrap();
    let known = GroupRecord { replicas: [1, 2, 3, 4].map(ReplicaId).into(), ..record(2, 1, &[1, 2]) };
    assert_eq!(map.propose_group(id, &known).unwrap(), Proposed::Accepted);
    let after = map.position().unwrap();
    assert!(after.revision > before.revision);

    revert();
    // What is created at once has other numbers.
    let other = map.create_image("p", "c", 4096).unwrap();
    assert_ne!(other.volume, image.volume);
    let start = map.free_groups(8).unwrap();
    assert!(start + 8 <= first || first + 8 <= start, "{start} and {first}");
    assert_eq!(map.removed_groups().unwrap(), []);

    // A node that knows more says so, and puts back what it knows of groups.
    assert!(map.position().unwrap().revision < after.revision);
    map.report_lost(after.revision).unwrap();
    map.report_lost(after.revision - 1).unwrap();
    assert_eq!(map.position().unwrap().lost, Some(after.revision));
    assert_eq!(
        map.propose_group(id, &record(3, 2, &[2])).unwrap(),
        Proposed::Superseded(record(1, 1, &[1, 2, 3]))
    );
    assert_eq!(map.raise_group(id, &known).unwrap(), Proposed::Accepted);
    assert_eq!(map.raise_group(id, &known).unwrap(), Proposed::Accepted);
    let late = record(2, 2, &[2]);
    assert_eq!(map.raise_group(id, &late).unwrap(), Proposed::Superseded(known.clone()));
    assert_eq!(map.group(id).unwrap(), Some(known.clone()));
    let next = GroupRecord { config: record(3, 2, &[2]).config, ..known.clone() };
    assert_eq!(map.propose_group(id, &next).unwrap(), Proposed::Accepted);
    assert!(matches!(map.raise_group(id, &record(9, 1, &[2])), Err(MapError::Invalid(_))));
    let jump = record(9, 1, &[1]);
    assert_eq!(map.raise_group(id, &jump).unwrap(), Proposed::Accepted);
    // From there on as before; what is late is refused, whatever the storage has counted.
    for epoch in [4, 5, 6, 9] {
        assert_eq!(
            map.propose_group(id, &record(epoch, 3, &[3])).unwrap(),
            Proposed::Superseded(jump.clone())
        );
    }
    let jump = GroupRecord { replicas: known.replicas, ..record(10, 2, &[2]) };
    assert_eq!(map.propose_group(id, &jump).unwrap(), Proposed::Accepted);
    // The number of a node that is a member is not given again.
    assert_eq!(map.create_node(&node(5)).unwrap(), NodeId(5));

    let accepted = map.accept_older().unwrap();
    assert!(accepted.revision > after.revision && accepted.lost.is_none());
    let known = map.position().unwrap();
    assert!(known.revision >= accepted.revision && !known.is_older());
    map.create_image("p", "d", 4096).unwrap();
    assert!(map.position().unwrap().revision > accepted.revision);
    // A pool that is removed leaves a record of that.
    map.create_pool("r", &pool(start)).unwrap();
    map.remove_pool("r").unwrap();
    let removed = map.removed_groups().unwrap();
    assert_eq!((removed.len(), removed[0].clone()), (1, start..start + 8));
    let again = map.create_pool("r", &pool(start + 7)).unwrap_err().to_string();
    assert!(again.contains("a pool had which was removed"), "{again}");
}

/// `empty` is a map without a cluster.
pub(crate) fn a_backup_brings_back_what_was_there(map: &impl ClusterMap, empty: &impl ClusterMap) {
    let pool =
        PoolRecord { first_group: 0, groups: 8, replicas: 1, in_sync_min: 1, class: Default::default() };
    map.create_settings(&ClusterSettings { lease_ms: 300, grace_ms: 320 }).unwrap();
    map.create_node(&node(1)).unwrap();
    map.create_pool("p", &pool).unwrap();
    map.create_image("p", "vol.1/ä".replace('/', "-").as_str(), 4096).unwrap();
    let records = [(GroupId(0), record(1, 1, &[1])), (GroupId(1), record(1, 2, &[2]))];
    map.propose_groups(&records).unwrap();
    map.propose_group(GroupId(1), &record(2, 2, &[2, 3])).unwrap();
    map.renew_lease(NodeId(1), &holder(1, "a"), 60).unwrap();
    // The image has another size than at first, and was attached.
    let (pool_name, image) = map.images().unwrap().into_keys().next().unwrap();
    let small = map.images().unwrap().into_values().next().unwrap();
    let large = ImageEntry { bytes: 8192, ..small.clone() };
    assert!(map.change_image(&pool_name, &image, &small, &large).unwrap());
    // What is protected stays, and the protection is a part of the backup.
    let (small, large) = (large.clone(), ImageEntry { protected: true, ..large });
    assert!(map.change_image(&pool_name, &image, &small, &large).unwrap());
    let refused = map.remove_image(&pool_name, &image, None).unwrap_err();
    assert!(matches!(refused, MapError::Protected(_)), "{refused}");
    let lock = |attach_epoch| ImageLock { attach_epoch, holders: Vec::new() };
    assert!(map.change_image_lock("p", large.volume, None, &lock(3)).unwrap());
    let memory =
        |incarnation| NodeMemory { device: Uuid::from_u128(9), incarnation, groups: Default::default() };
    map.put_node_memory(NodeId(1), &memory(4)).unwrap();
    let backup = map.backup().unwrap();
    assert_eq!((backup.cluster, backup.revision), (map.cluster().unwrap(), map.position().unwrap().revision));

    let all = |map: &dyn ClusterMap| {
        (
            map.cluster().unwrap(),
            map.settings().unwrap(),
            map.nodes().unwrap(),
            map.pools().unwrap(),
            map.images().unwrap(),
        )
    };
    let (before, groups) = (all(map), map.groups(0..8).unwrap());
    let position = empty.restore(&backup, 0).unwrap();
    assert_eq!((all(empty), empty.groups(0..8).unwrap()), (before.clone(), groups));
    assert!(position.revision > backup.revision && position.lost.is_none());
    let known = empty.position().unwrap();
    assert!(known.revision >= position.revision && !known.is_older());
    // Leases are none of it.
    assert_eq!(empty.nodes_up().unwrap(), [].into());

    // What came since goes, but for the epoch of a group, and for leases.
    map.create_image("p", "other", 4096).unwrap();
    map.set_out(NodeId(1), Some(OutReason::Operator)).unwrap();
    map.propose_group(GroupId(1), &record(3, 3, &[3])).unwrap();
    map.propose_group(GroupId(2), &record(1, 3, &[3])).unwrap();
    assert!(map.change_image("p", &image, &large, &ImageEntry { bytes: 16384, ..large.clone() }).unwrap());
    assert!(map.change_image_lock("p", large.volume, Some(&lock(3)), &lock(5)).unwrap());
    map.put_node_memory(NodeId(1), &memory(6)).unwrap();
    let known = map.position().unwrap().revision + 100;
    let position = map.restore(&backup, known).unwrap();
    assert!(position.revision > known && !position.is_older());
    assert_eq!(all(map), before);
    // Attach epochs and what nodes have seen only go on: what was given since is not given again.
    assert_eq!(map.image_lock("p", large.volume).unwrap(), Some(lock(5)));
    assert_eq!(map.node_memories().unwrap(), [(NodeId(1), memory(6))].into());
    let groups = map.groups(0..8).unwrap();
    assert_eq!(groups, [(GroupId(0), record(1, 1, &[1])), (GroupId(1), record(3, 3, &[3]))].into());
    assert_eq!(map.nodes_up().unwrap(), [NodeId(1)].into());
}
