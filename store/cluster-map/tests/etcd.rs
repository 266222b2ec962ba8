//! The map in etcd, against a real one, which is killed, and restarted.
#![allow(clippy::unwrap_used)]

mod records;
mod rig;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cluster_map::*;
use records::{
    a_backup_brings_back_what_was_there, a_removed_node_does_not_come_back, an_image_gets_other_heads,
    an_older_copy_gives_no_number_twice_and_says_what_it_is, client_keys_come_and_go, holder,
    images_get_other_names, node, one_process_holds_the_lease_of_a_node,
    pools_get_other_names_and_numbers_of_replicas, race, record, recovery_changes_from_what_was_read,
    scrubs_are_started_from_what_was_read_and_their_ends_are_kept,
    settings_are_given_once_before_there_are_nodes, what_nodes_have_seen_is_kept,
};
use rig::EtcdCluster;
use uuid::Uuid;

fn pool(first_group: u32) -> PoolRecord {
    PoolRecord { first_group, groups: 8, replicas: 2, in_sync_min: 1, class: Default::default() }
}

/// Waits for changes until one is as wanted.
fn wait_for(changes: &mut dyn MapChanges, what: &str, is_so: impl Fn(&MapChange) -> bool) {
    let started = Instant::now();
    loop {
        match changes.wait(Duration::from_secs(1)) {
            Ok(found) if found.iter().any(&is_so) => return,
            Ok(_) => {}
            Err(_) => std::thread::sleep(changes.retry_after()),
        }
        assert!(started.elapsed() < Duration::from_secs(60), "no change: {what}");
    }
}

#[test]
fn records_change_as_in_a_directory() {
    let Some(etcd) = EtcdCluster::start("records", 1) else { return };
    let map = EtcdMap::new(&etcd.urls("a")).unwrap();
    let missing = map.cluster().unwrap_err();
    assert_eq!(missing.to_string(), "there is no cluster in etcd below /a/");
    let uuid = map.create().unwrap();
    assert_eq!(map.cluster().unwrap(), uuid);
    assert!(matches!(map.create(), Err(MapError::Exists(_))));
    // Another prefix is another cluster.
    assert!(EtcdMap::new(&etcd.urls("b")).unwrap().cluster().is_err());

    assert_eq!(map.create_node(&node(1)).unwrap(), NodeId(1));
    assert_eq!(map.create_node(&node(2)).unwrap(), NodeId(2));

    // Epochs.
    let id = GroupId(5);
    assert_eq!(map.group(id).unwrap(), None);
    assert_eq!(map.propose_group(id, &record(2, 1, &[1])).unwrap(), Proposed::Missing);
    let first = record(1, 1, &[1, 2, 3]);
    assert_eq!(map.propose_group(id, &first).unwrap(), Proposed::Accepted);
    assert_eq!(map.propose_group(id, &first).unwrap(), Proposed::Accepted);
    for late in [record(1, 2, &[2]), record(3, 2, &[2])] {
        assert_eq!(map.propose_group(id, &late).unwrap(), Proposed::Superseded(first.clone()));
    }
    assert!(matches!(map.propose_group(id, &record(2, 1, &[2])), Err(MapError::Invalid(_))));
    // Many in one request, each with an outcome of its own.
    let many: Vec<_> = (0..200).map(|group| (GroupId(group), record(1, 1, &[1]))).collect();
    let outcomes = map.propose_groups(&many).unwrap();
    for (group, outcome) in (0..).zip(outcomes) {
        let expected = if group == 5 { Proposed::Superseded(first.clone()) } else { Proposed::Accepted };
        assert_eq!(outcome, expected, "group {group}");
    }
    let found = map.groups(3..8).unwrap();
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), (3..8).map(GroupId).collect::<Vec<_>>());
    assert_eq!((&found[&id], &found[&GroupId(4)]), (&first, &many[4].1));

    // Nodes, devices, who is out.
    let copied = map.put_node(NodeId(3), &node(1)).unwrap_err();
    assert!(matches!(copied, MapError::SameIdentity { what: "node", number: 1, .. }), "{copied}");
    let device = DeviceRecord {
        uuid: Uuid::from_u128(9),
        node: NodeId(1),
        weight: 100,
        out: false,
        partition: None,
        partitions: None,
        class: None,
    };
    map.put_device(DeviceId(1), &device).unwrap();
    assert!(matches!(map.put_device(DeviceId(2), &device), Err(MapError::SameIdentity { .. })));
    let stray = DeviceRecord { uuid: Uuid::from_u128(8), node: NodeId(7), ..device.clone() };
    assert_eq!(map.put_device(DeviceId(2), &stray).unwrap_err().to_string(), "there is no node 7");
    assert_eq!(map.devices().unwrap(), [(DeviceId(1), device)].into());
    map.set_out(NodeId(2), Some(OutReason::Down)).unwrap();
    assert_eq!(map.out().unwrap(), [(NodeId(2), OutReason::Down)].into());
    assert!(map.nodes().unwrap()[&NodeId(2)].out);
    map.set_out(NodeId(2), None).unwrap();
    assert!(!map.nodes().unwrap()[&NodeId(2)].out);
    a_removed_node_does_not_come_back(&map);

    // Pools and images.
    map.create_pool("p", &pool(0)).unwrap();
    assert!(map.free_groups(8).unwrap() >= 8);
    assert_eq!(map.create_pool("p", &pool(8)).unwrap_err().to_string(), "pool p exists");
    client_keys_come_and_go(&map);
    assert!(map.create_pool("q", &pool(7)).unwrap_err().to_string().contains("would share groups"));
    let refused = |result: Result<ImageEntry, MapError>| result.unwrap_err().to_string();
    assert_eq!(refused(map.create_image("q", "vol", 4096)), "there is no pool q");
    let image = map.create_image("p", "vol", 4096).unwrap();
    assert_eq!(refused(map.create_image("p", "vol", 4096)), "image p/vol exists");
    assert!(refused(map.create_image("p", "a/b", 4096)).contains("no name"));
    images_get_other_names(&map);
    an_image_gets_other_heads(&map);
    let larger = ImageEntry { bytes: 8192, ..image.clone() };
    assert!(map.change_image("p", "vol", &image, &larger).unwrap());
    // By the record, not by the name.
    assert!(!map.change_image("p", "vol", &image, &ImageEntry { bytes: 512, ..image.clone() }).unwrap());
    assert_eq!(map.images().unwrap()[&("p".to_string(), "vol".to_string())], larger);
    assert_eq!(map.remove_pool("p").unwrap_err().to_string(), "pool p has images: remove them first");
    let removed = map.remove_image("p", "vol", None).unwrap();
    assert_eq!((removed.image.clone(), map.images().unwrap().len()), (larger, 0));
    assert_eq!(
        map.removed_images().unwrap().into_values().collect::<Vec<_>>(),
        std::slice::from_ref(&removed)
    );
    map.image_is_empty(&removed).unwrap();
    assert!(map.removed_images().unwrap().is_empty());
    assert_eq!(map.remove_image("p", "vol", None).unwrap_err().to_string(), "there is no image p/vol");
    assert_ne!(map.create_image("p", "vol", 4096).unwrap().volume, image.volume);
    map.remove_image("p", "vol", None).unwrap();
    map.remove_pool("p").unwrap();
    // Its groups are gone, and no other pool gets their numbers.
    assert_eq!(map.groups(0..8).unwrap(), BTreeMap::new());
    assert!(map.create_pool("q", &pool(0)).unwrap_err().to_string().contains("a pool had which was removed"));
    map.create_pool("q", &pool(8)).unwrap();
}

#[test]
fn lease_and_grace_never_change() {
    let Some(etcd) = EtcdCluster::start("settings", 1) else { return };
    let map = EtcdMap::new(&etcd.urls("a")).unwrap();
    map.create().unwrap();
    settings_are_given_once_before_there_are_nodes(&map);
    what_nodes_have_seen_is_kept(&map);
    recovery_changes_from_what_was_read(&map);
    scrubs_are_started_from_what_was_read_and_their_ends_are_kept(&map);
}

#[test]
fn of_proposals_for_one_epoch_one_is_accepted() {
    let Some(etcd) = EtcdCluster::start("race", 1) else { return };
    let urls = etcd.urls("");
    let accepted = race(|| EtcdMap::new(&urls).unwrap(), 100);
    assert!(accepted.values().all(|count| *count == 1) && accepted.len() == 98, "{accepted:?}");
}

#[test]
fn a_cluster_of_three_serves_without_one_and_continues_after_a_restart() {
    let Some(mut etcd) = EtcdCluster::start("three", 3) else { return };
    let map = EtcdMap::new(&etcd.urls("c")).unwrap();
    let uuid = map.create().unwrap();
    let mut changes = map.changes();
    assert_eq!(changes.wait(Duration::from_secs(30)).unwrap(), [MapChange::Everything]);

    // What changes is streamed, with the record of a group.
    let first = record(1, 1, &[1, 2, 3]);
    map.propose_group(GroupId(7), &first).unwrap();
    wait_for(&mut *changes, "a record", |change| *change == MapChange::Group(GroupId(7), first.clone()));

    // The endpoint in use is killed: another one is asked.
    etcd.kill_server(0);
    let second = record(2, 2, &[2, 3]);
    let started = Instant::now();
    while map.propose_group(GroupId(7), &second).is_err() {
        assert!(started.elapsed() < Duration::from_secs(60), "two of three do not serve");
    }
    wait_for(&mut *changes, "after a kill", |change| *change == MapChange::Group(GroupId(7), second.clone()));

    // One of three decides nothing; memberships stand still, and calls end with an error.
    etcd.kill_server(1);
    let error = map.propose_group(GroupId(7), &record(3, 3, &[3])).unwrap_err().to_string();
    assert!(error.starts_with("the cluster map in etcd at 127.0.0.1:"), "{error}");
    etcd.kill_server(2);
    assert!(map.nodes().is_err());

    // All are back, with what was accepted.
    (0..3).for_each(|server| etcd.start_server(server));
    etcd.wait_until_served();
    assert_eq!(map.cluster().unwrap(), uuid);
    let known = map.group(GroupId(7)).unwrap().unwrap();
    // The proposal to one of three may have been carried out since.
    assert!(known == second || known == record(3, 3, &[3]), "{known:?}");
    let next = record(known.config.epoch + 1, 3, &[3]);
    assert_eq!(map.propose_group(GroupId(7), &next).unwrap(), Proposed::Accepted);
    wait_for(&mut *changes, "after a restart", |change| {
        *change == MapChange::Everything || *change == MapChange::Group(GroupId(7), next.clone())
    });
}

#[test]
fn leases_say_who_is_up() {
    let Some(etcd) = EtcdCluster::start("leases", 1) else { return };
    let maps = [1, 2].map(|_| EtcdMap::new(&etcd.urls("")).unwrap());
    let mut changes = maps[1].changes();
    wait_for(&mut *changes, "the first", |change| *change == MapChange::Everything);
    maps[0].renew_lease(NodeId(1), &holder(1, ""), 2).unwrap();
    maps[1].renew_lease(NodeId(2), &holder(2, ""), 30).unwrap();
    assert_eq!(maps[0].nodes_up().unwrap(), [NodeId(1), NodeId(2)].into());
    wait_for(&mut *changes, "up", |change| *change == MapChange::Other);
    maps[0].renew_lease(NodeId(1), &holder(1, ""), 2).unwrap();
    // The first is renewed no more: its end is an event.
    let started = Instant::now();
    while maps[1].nodes_up().unwrap().contains(&NodeId(1)) {
        wait_for(&mut *changes, "down", |change| *change == MapChange::Other);
        assert!(started.elapsed() < Duration::from_secs(60));
    }
    assert_eq!(maps[1].nodes_up().unwrap(), [NodeId(2)].into());
    // A lease that has ended is replaced.
    maps[0].renew_lease(NodeId(1), &holder(1, ""), 30).unwrap();
    assert_eq!(maps[1].nodes_up().unwrap(), [NodeId(1), NodeId(2)].into());
    maps[0].end_lease(NodeId(1), &holder(1, "")).unwrap();
    assert_eq!(maps[1].nodes_up().unwrap(), [NodeId(2)].into());
}

#[test]
fn one_process_is_a_node_at_a_time() {
    let Some(etcd) = EtcdCluster::start("holders", 1) else { return };
    one_process_holds_the_lease_of_a_node(|| EtcdMap::new(&etcd.urls("")).unwrap());
}

#[test]
fn a_map_that_is_an_older_copy_gives_no_number_twice_and_says_what_it_is() {
    let Some(etcd) = EtcdCluster::start("older", 1) else { return };
    let map = EtcdMap::new(&etcd.urls("c")).unwrap();
    map.create().unwrap();
    let etcd = std::cell::RefCell::new(etcd);
    let mut changes = map.changes();
    wait_for(&mut *changes, "the first", |change| *change == MapChange::Everything);
    let revert = || etcd.borrow_mut().restore_snapshot();
    an_older_copy_gives_no_number_twice_and_says_what_it_is(&map, || etcd.borrow().save_snapshot(), revert);
    // A watch notices that what it followed is gone, and follows what is there.
    wait_for(&mut *changes, "an older map", |change| *change == MapChange::Everything);
    let record = record(1, 1, &[1]);
    map.propose_group(GroupId(77), &record).unwrap();
    wait_for(&mut *changes, "a new record", |change| {
        *change == MapChange::Group(GroupId(77), record.clone())
    });
}

#[test]
fn a_backup_is_restored_whole_and_lowers_no_epoch() {
    let Some(etcd) = EtcdCluster::start("backup", 1) else { return };
    let map = EtcdMap::new(&etcd.urls("a")).unwrap();
    map.create().unwrap();
    // Another cluster, whose keys are beside, is as it was.
    let beside = EtcdMap::new(&etcd.urls("b")).unwrap();
    let cluster = beside.create().unwrap();
    a_backup_brings_back_what_was_there(&map, &EtcdMap::new(&etcd.urls("d")).unwrap());
    assert_eq!(beside.cluster().unwrap(), cluster);
    assert!(beside.restore(&map.backup().unwrap(), 0).unwrap_err().to_string().contains("and the map is of"));
}

#[test]
fn a_pool_gets_another_name_and_number_of_replicas() {
    let Some(etcd) = EtcdCluster::start("pools", 1) else { return };
    let map = EtcdMap::new(&etcd.urls("c")).unwrap();
    map.create().unwrap();
    pools_get_other_names_and_numbers_of_replicas(&map);
}
