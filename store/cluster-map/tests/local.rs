//! The map in a directory: compare-and-swap, identities, what a start finds.
#![allow(clippy::unwrap_used)]

mod records;

use std::path::PathBuf;
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
use uuid::Uuid;

struct MapFile(PathBuf);

impl MapFile {
    fn new(name: &str) -> MapFile {
        let path = std::env::temp_dir().join(format!("ringbolt-map-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        MapFile(path)
    }
}

impl Drop for MapFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// As where a file system is full, or read-only.
#[test]
fn a_map_that_is_there_is_opened_without_a_write() {
    let file = MapFile::new("open");
    let map = LocalMap::open(&file.0).unwrap();
    let temporary = std::fs::File::open(file.0.join("temporary")).unwrap();
    let modified = || temporary.metadata().unwrap().modified().unwrap();
    temporary.set_modified(std::time::UNIX_EPOCH).unwrap();
    let again = LocalMap::open(&file.0).unwrap();
    assert_eq!(again.cluster().unwrap(), map.cluster().unwrap());
    assert_eq!(modified(), std::time::UNIX_EPOCH);
}

#[test]
fn what_a_killed_process_was_writing_is_removed_by_the_next_one() {
    let file = MapFile::new("abandoned");
    let map = LocalMap::open(&file.0).unwrap();
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let killed = child.id();
    child.wait().unwrap();
    let left = |process: u32, number: u32| {
        let path = file.0.join(format!("temporary/{process}-{number}"));
        std::fs::write(&path, "{").unwrap();
        path
    };
    let (of_killed, of_living) = (left(killed, 0), left(std::process::id(), 1_000_000));
    // One of another machine, whose process is not here, is being written.
    let of_another = left(killed, 1);
    let locked = std::fs::File::open(&of_another).unwrap();
    locked.lock().unwrap();
    map.create_node(&node(1)).unwrap();
    assert!(!of_killed.exists() && of_living.exists() && of_another.exists());
    drop(locked);
    map.create_node(&node(2)).unwrap();
    assert!(of_living.exists() && !of_another.exists());
}

/// The weakest device of a pool decides; one that says nothing promises what the pool does.
#[test]
fn a_pool_keeps_what_the_weakest_device_keeps() {
    let pool = |class| PoolRecord { first_group: 0, groups: 1, replicas: 1, in_sync_min: 1, class };
    let device = |class| DeviceRecord {
        uuid: Uuid::nil(),
        node: NodeId(1),
        weight: 1,
        out: false,
        partition: None,
        partitions: None,
        class,
    };
    use PoolClass::{Disk, Memory, Pmem};
    for (class, devices, expected) in [
        (Disk, vec![], Disk),
        (Disk, vec![None, None], Disk),
        (Disk, vec![Some(Disk), Some(Memory), None], Memory),
        (Disk, vec![Some(Disk), None], Disk),
        (Disk, vec![Some(Pmem)], Disk),
        (Pmem, vec![Some(Pmem), Some(Pmem)], Pmem),
        (Pmem, vec![Some(Pmem), Some(Disk)], Disk),
        (Memory, vec![Some(Disk)], Memory),
    ] {
        let devices: Vec<_> = devices.into_iter().map(device).collect();
        assert_eq!(pool(class).class_on(&devices), expected, "{class:?} on {devices:?}");
    }
    // Records of versions that know no class are read, and written as before.
    let text = serde_json::to_string(&device(None)).unwrap();
    assert!(!text.contains("class"), "{text}");
    assert_eq!(serde_json::from_str::<DeviceRecord>(&text).unwrap(), device(None));
    let text = serde_json::to_string(&device(Some(Memory))).unwrap();
    assert_eq!(serde_json::from_str::<DeviceRecord>(&text).unwrap(), device(Some(Memory)));
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

/// Everything is also read at an interval: on a slow machine that may come first, so that an event is tried
/// for several times.
#[test]
fn changes_of_others_are_reported_at_once() {
    let file = MapFile::new("changes");
    let (map, other) = (LocalMap::open(&file.0).unwrap(), LocalMap::open(&file.0).unwrap());
    let known = record(1, 1, &[1, 2, 3]);
    other.propose_group(GroupId(1), &known).unwrap();
    let mut changes = map.changes();
    let mut reported = || changes.wait(std::time::Duration::ZERO).unwrap();
    assert_eq!(reported(), [MapChange::Everything]);
    // Groups with a directory that was there, and a new one.
    for id in [1, 2].map(GroupId) {
        let seen = (1..100).any(|epoch| {
            let next = record(epoch, 1, &[1]);
            let is_new = other.propose_group(id, &next).unwrap() == Proposed::Accepted;
            is_new && reported() == [MapChange::Group(id, next)]
        });
        assert!(seen, "{id:?}");
    }
    let node = other.create_node(&node(1)).unwrap();
    assert_eq!(reported(), [MapChange::Everything], "a node");
    other.renew_lease(node, &holder(1, ""), 5).unwrap();
    assert_eq!(reported(), [MapChange::Everything], "it is up");
    other.end_lease(node, &holder(1, "")).unwrap();
    assert_eq!(reported(), [MapChange::Everything], "it stops");
    let quiet = (0..100).any(|_| {
        other.renew_lease(node, &holder(1, ""), 5).unwrap();
        reported();
        other.renew_lease(node, &holder(1, ""), 5).unwrap();
        reported().is_empty()
    });
    assert!(quiet, "a renewed lease is no change");
}

#[test]
fn of_proposals_for_one_epoch_one_is_accepted() {
    let file = MapFile::new("race");
    let accepted = race(|| LocalMap::open(&file.0).unwrap(), 150);
    assert!(accepted.values().all(|count| *count == 1), "{accepted:?}");
    // One whose record has a follower before it looks again learns that one instead: how often depends on the
    // machine.
    assert!(accepted.len() > 10, "{accepted:?}");
    let newest = LocalMap::open(&file.0).unwrap().group(GroupId(1)).unwrap().unwrap();
    assert!(newest.config.epoch >= 149);
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
    let pool =
        PoolRecord { first_group: 0, groups: 8, replicas: 2, in_sync_min: 3, class: Default::default() };
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
    assert!(!map.nodes().unwrap()[&NodeId(1)].out);
    map.set_out(NodeId(1), Some(OutReason::Operator)).unwrap();
    let error = map.put_node(NodeId(2), &node(1)).unwrap_err();
    assert!(matches!(error, MapError::SameIdentity { what: "node", number: 1, .. }), "{error}");
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
    let error = map.put_device(DeviceId(2), &device).unwrap_err();
    assert!(matches!(error, MapError::SameIdentity { what: "device", number: 1, .. }), "{error}");
    let stray = DeviceRecord { uuid: Uuid::from_u128(8), node: NodeId(7), ..device.clone() };
    assert_eq!(map.put_device(DeviceId(2), &stray).unwrap_err().to_string(), "there is no node 7");
    assert_eq!(map.devices().unwrap(), [(DeviceId(1), device)].into());
    assert!(map.nodes().unwrap()[&NodeId(1)].out);
    a_removed_node_does_not_come_back(&map);
}

#[test]
fn images_have_volumes_of_their_own() {
    let file = MapFile::new("images");
    let map = LocalMap::open(&file.0).unwrap();
    let refused = |result: Result<ImageEntry, MapError>| result.unwrap_err().to_string();
    assert_eq!(refused(map.create_image("p", "vol", 4096)), "there is no pool p");
    map.create_pool(
        "p",
        &PoolRecord { first_group: 0, groups: 8, replicas: 2, in_sync_min: 1, class: Default::default() },
    )
    .unwrap();
    let first = map.create_image("p", "vol", 4096).unwrap();
    assert_eq!(refused(map.create_image("p", "vol", 4096)), "image p/vol exists");
    assert!(refused(map.create_image("p", "a/b", 4096)).contains("no name"));
    let strange = map.create_image("p", "Vol_1.\u{e4} ..", 8192).unwrap();
    assert_ne!(first.volume, strange.volume);
    images_get_other_names(&map);
    an_image_gets_other_heads(&map);
    let names: Vec<_> = map.images().unwrap().into_keys().collect();
    assert_eq!(
        names,
        [("p".to_string(), "Vol_1.\u{e4} ..".to_string()), ("p".to_string(), "vol".to_string())]
    );
    let removed = map.remove_image("p", "vol", None).unwrap();
    let gone = map.change_image("p", "vol", &first, &first).unwrap_err().to_string();
    assert_eq!(gone, "there is no image p/vol");
    assert_eq!(
        map.removed_images().unwrap().into_values().collect::<Vec<_>>(),
        std::slice::from_ref(&removed)
    );
    // Its name is free before its objects are removed.
    let again = map.create_image("p", "vol", 4096).unwrap();
    assert!(again.volume != first.volume && again.volume != strange.volume && again.uuid != first.uuid);
    map.image_is_empty(&removed).unwrap();
    assert!(map.removed_images().unwrap().is_empty());
    assert_eq!(map.images().unwrap()[&("p".to_string(), "vol".to_string())], again);
}

/// Renames, changes, removals and lists at the same time: each image has one name, and is listed.
#[test]
fn images_whose_names_change_under_other_changes_stay_in_the_map() {
    let file = MapFile::new("names");
    let map = LocalMap::open(&file.0).unwrap();
    let pool =
        PoolRecord { first_group: 0, groups: 8, replicas: 2, in_sync_min: 1, class: Default::default() };
    map.create_pool("p", &pool).unwrap();
    let volumes = ["a", "b"].map(|name| map.create_image("p", name, 4096).unwrap().volume);
    let end = Instant::now() + Duration::from_secs(2);
    let repeat = |work: &dyn Fn(&LocalMap)| {
        let own = LocalMap::open(&file.0).unwrap();
        while Instant::now() < end {
            work(&own);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            repeat(&|map| {
                for (from, to) in [("a", "c"), ("b", "a"), ("c", "b")] {
                    map.rename_image("p", from, to, None).unwrap();
                }
            });
        });
        for protected in [true, false] {
            scope.spawn(move || {
                repeat(&|map| {
                    let all = map.images().unwrap();
                    let Some(known) = all.get(&("p".to_string(), "a".to_string())) else { return };
                    // It may have another name by now, or be another one.
                    let _ = map.change_image("p", "a", known, &ImageEntry { protected, ..known.clone() });
                });
            });
        }
        scope.spawn(|| {
            repeat(&|map| {
                let mut listed: Vec<u64> = map.images().unwrap().values().map(|image| image.volume).collect();
                listed.sort_unstable();
                let mut expected = volumes.to_vec();
                expected.sort_unstable();
                assert_eq!(listed, expected);
                assert!(map.remove_pool("p").is_err());
            });
        });
    });
}

fn map_with_image(file: &MapFile) -> (LocalMap, ImageEntry) {
    let map = LocalMap::open(&file.0).unwrap();
    let pool =
        PoolRecord { first_group: 0, groups: 8, replicas: 2, in_sync_min: 1, class: Default::default() };
    map.create_pool("p", &pool).unwrap();
    let image = map.create_image("p", "vol", 4096).unwrap();
    (map, image)
}

#[test]
fn a_size_changes_only_from_the_one_that_was_read() {
    let file = MapFile::new("sizes");
    let (map, first) = map_with_image(&file);
    let sized = |bytes| ImageEntry { bytes, ..first.clone() };
    assert!(map.change_image("p", "vol", &first, &sized(8192)).unwrap());
    // A growth that read the size before is no shrinking of what another one has grown.
    assert!(!map.change_image("p", "vol", &first, &sized(6144)).unwrap());
    assert!(map.change_image("p", "vol", &sized(8192), &sized(1 << 20)).unwrap());
    let other = LocalMap::open(&file.0).unwrap();
    assert_eq!(other.images().unwrap().into_values().next(), Some(sized(1 << 20)));
    // Of many at the same time one is first.
    let changed = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=8_u64)
            .map(|number| {
                let (map, known, to) =
                    (LocalMap::open(&file.0).unwrap(), sized(1 << 20), sized(number << 21));
                scope.spawn(move || u32::from(map.change_image("p", "vol", &known, &to).unwrap()))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u32>()
    });
    assert_eq!(changed, 1);
}

/// A removal that ends after its first step.
#[test]
fn an_interrupted_removal_leaves_no_image_and_its_name_is_free() {
    let file = MapFile::new("removal");
    let (map, image) = map_with_image(&file);
    let name = std::fs::read_dir(file.0.join("images")).unwrap().next().unwrap().unwrap().path();
    let kept = std::fs::read(&name).unwrap();
    let removed = map.remove_image("p", "vol", None).unwrap();
    std::fs::write(&name, kept).unwrap();
    assert!(map.images().unwrap().is_empty());
    assert!(map.remove_image("p", "vol", None).is_err());
    let again = map.create_image("p", "vol", 8192).unwrap();
    map.image_is_empty(&removed).unwrap();
    assert_eq!(map.images().unwrap().into_values().collect::<Vec<_>>(), [again]);
    assert_eq!(removed.image, image);
}

/// Changes of the head that end before they replace the file of the image.
#[test]
fn an_image_whose_changes_were_interrupted_is_changed_again() {
    let file = MapFile::new("interrupted");
    let (map, first) = map_with_image(&file);
    let path = file.0.join("images/p.vol");
    let found = || map.images().unwrap()[&("p".to_string(), "vol".to_string())].clone();
    let change = |known: &ImageEntry, to: &ImageEntry| map.change_image("p", "vol", known, to).unwrap();
    let kept = std::fs::read(&path).unwrap();
    let second = first.with_snapshot("a", 7, 101);
    assert!(change(&first, &second));
    std::fs::write(&path, &kept).unwrap();
    assert_eq!(found(), second);
    // The next one, by a program that did not complete it.
    let third = second.with_snapshot("b", 7, 102);
    std::fs::create_dir(file.0.join("sizes/101")).unwrap();
    std::fs::write(file.0.join("sizes/101/2"), serde_json::to_vec(&third).unwrap()).unwrap();
    assert_eq!(found(), third);
    assert!(!change(&second, &second.with_snapshot("c", 7, 103)));
    let mut newest = third;
    for head in 104..110 {
        // One that changes the size alone, and one that changes the head.
        let sized = ImageEntry { bytes: newest.bytes + 4096, ..newest.clone() };
        let kept = std::fs::read(&path).unwrap();
        assert!(change(&newest, &sized));
        std::fs::write(&path, &kept).unwrap();
        assert_eq!(found(), sized);
        newest = sized.with_snapshot(&head.to_string(), 7, head);
        let kept = std::fs::read(&path).unwrap();
        assert!(change(&sized, &newest) && !change(&sized, &newest));
        std::fs::write(&path, &kept).unwrap();
        assert_eq!(found(), newest);
    }
    // What the map has of a head that was dropped goes, and the image stays as it is.
    let image = ImageEntry::new(Uuid::nil(), found_volume(&path), 4096);
    assert_ne!(image.volume, newest.volume);
    map.image_is_empty(&RemovedImage::new("p", "vol (dropped)", image)).unwrap();
    assert_eq!(found(), newest);
    let kept = std::fs::read(&path).unwrap();
    let last = newest.with_snapshot("last", 7, 200);
    assert!(change(&newest, &last));
    std::fs::write(&path, &kept).unwrap();
    assert_eq!(map.backup().unwrap().records["images/p.vol"], serde_json::to_value(&last).unwrap());
    // A removal that ends after its first step, and a pool that gets another name.
    map.rename_pool("p", "q").unwrap();
    map.rename_image("q", "vol", "other", Some(&last)).unwrap();
    let path = file.0.join("images/q.other");
    let removed = map.remove_image("q", "other", Some(&last)).unwrap();
    assert_eq!(removed.image.volume, 200);
    std::fs::write(&path, &kept).unwrap();
    assert!(map.images().unwrap().is_empty());
    map.image_is_empty(&removed).unwrap();
    assert!(map.images().unwrap().is_empty() && !path.exists());
}

/// The head that the file of an image has.
fn found_volume(path: &std::path::Path) -> u64 {
    serde_json::from_slice::<ImageEntry>(&std::fs::read(path).unwrap()).unwrap().volume
}

/// Heads that lead to each other are damage.
#[test]
fn heads_without_an_end_are_an_error() {
    let file = MapFile::new("heads");
    let (map, first) = map_with_image(&file);
    let second = first.with_snapshot("a", 7, 101);
    for (of, to) in [(first.volume, &second), (101, &first)] {
        std::fs::create_dir(file.0.join(format!("sizes/{of}"))).unwrap();
        std::fs::write(file.0.join(format!("sizes/{of}/1")), serde_json::to_vec(to).unwrap()).unwrap();
    }
    let error = map.images().unwrap_err().to_string();
    assert!(error.contains("more than 32 heads after each other"), "{error}");
}

#[test]
fn one_of_those_that_attach_an_image_at_the_same_time_has_it() {
    let file = MapFile::new("locks");
    let (map, image) = map_with_image(&file);
    assert_eq!(map.image_lock("p", image.volume).unwrap(), None);
    let holder = |process| ImageHolder {
        id: Uuid::new_v4(),
        lease: Uuid::new_v4(),
        name: "host".to_string(),
        address: "127.0.0.1".to_string(),
        since: 0,
        shared: false,
        machine: String::new(),
        process,
        started: 0,
    };
    let lock = |attach_epoch| ImageLock { attach_epoch, holders: vec![holder(attach_epoch)] };
    let first = lock(1);
    assert!(map.change_image_lock("p", image.volume, None, &first).unwrap());
    assert!(!map.change_image_lock("p", image.volume, None, &lock(1)).unwrap());
    assert_eq!(map.image_lock("p", image.volume).unwrap(), Some(first.clone()));
    assert!(map.change_image_lock("p", image.volume, Some(&first), &lock(2)).unwrap());
    assert!(!map.change_image_lock("p", image.volume, Some(&first), &lock(3)).unwrap());

    let lease = Uuid::new_v4();
    assert_eq!(map.holder_age(lease).unwrap(), None);
    map.renew_holder(lease, 60).unwrap();
    assert!(map.holder_age(lease).unwrap().is_some());
    let holder =
        std::fs::File::options().write(true).open(file.0.join("image-holders").join(lease.to_string()));
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(61);
    holder.unwrap().set_modified(long_ago).unwrap();
    assert_eq!(map.holder_age(lease).unwrap(), None);
    map.renew_holder(lease, 60).unwrap();
    map.end_holder(lease).unwrap();
    assert_eq!(map.holder_age(lease).unwrap(), None);
}

#[test]
fn a_path_of_something_else_and_damaged_records_are_errors() {
    let file = MapFile::new("foreign");
    std::fs::write(&file.0, vec![7; 8192]).unwrap();
    let error = LocalMap::open(&file.0).map(drop).unwrap_err().to_string();
    assert!(error.starts_with(&format!("the cluster map {}", file.0.display())), "{error}");
    assert_eq!(std::fs::read(&file.0).unwrap(), vec![7; 8192]);
    std::fs::remove_file(&file.0).unwrap();
    let map = LocalMap::open(&file.0).unwrap();
    map.propose_group(GroupId(3), &record(1, 1, &[1])).unwrap();
    let path = file.0.join("groups/3/1");
    for damaged in [&b"{"[..], b"", b"{\"epoch\":1}", &vec![b' '; 2 << 20]] {
        std::fs::write(&path, damaged).unwrap();
        let error = map.group(GroupId(3)).unwrap_err().to_string();
        assert!(error.contains("groups/3/1"), "{error}");
    }
}

#[test]
fn lease_and_grace_never_change() {
    let file = MapFile::new("settings");
    let map = LocalMap::open(&file.0).unwrap();
    settings_are_given_once_before_there_are_nodes(&map);
    what_nodes_have_seen_is_kept(&map);
    recovery_changes_from_what_was_read(&map);
    scrubs_are_started_from_what_was_read_and_their_ends_are_kept(&map);
    // Those that fence nothing, and what a later version may have, are errors and no default.
    let path = file.0.join("settings");
    std::fs::write(&path, br#"{"lease_ms":500,"grace_ms":450}"#).unwrap();
    assert!(map.settings().unwrap_err().to_string().contains("does not outlast"));
    std::fs::write(&path, br#"{"lease_ms":300,"grace_ms":350,"other":1}"#).unwrap();
    assert!(matches!(map.settings(), Err(MapError::Record { .. })));
}

#[test]
fn a_client_key_has_rights_on_pools_that_are_there() {
    let file = MapFile::new("keys");
    let map = LocalMap::open(&file.0).unwrap();
    let pool =
        PoolRecord { first_group: 0, groups: 8, replicas: 2, in_sync_min: 1, class: Default::default() };
    map.create_pool("p", &pool).unwrap();
    client_keys_come_and_go(&map);
    // What a later version may restrict is not passed over.
    let path = file.0.join("keys/vm");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replacen('{', r#"{"from":"10.0.0.0/8","#, 1)).unwrap();
    assert!(matches!(map.client_keys(), Err(MapError::Record { .. })));
}

#[test]
fn one_process_is_a_node_at_a_time() {
    let file = MapFile::new("holders");
    one_process_holds_the_lease_of_a_node(|| LocalMap::open(&file.0).unwrap());
    // Two that find a lease ended: one of them gets it.
    let map = LocalMap::open(&file.0).unwrap();
    let taken = (0..20u32).all(|round| {
        let node = NodeId(100 + round);
        map.renew_lease(node, &holder(1, "a"), 0).unwrap();
        let outcomes = std::thread::scope(|scope| {
            let take = |number: u128, place: &'static str| {
                let path = &file.0;
                scope.spawn(move || {
                    LocalMap::open(path).unwrap().renew_lease(node, &holder(number, place), 60).unwrap()
                })
            };
            [take(2, "b"), take(3, "c")].map(|thread| thread.join().unwrap())
        });
        outcomes.iter().filter(|outcome| **outcome == LeaseOutcome::Held).count() == 1
    });
    assert!(taken);
}

#[test]
fn a_map_that_is_an_older_copy_gives_no_number_twice_and_says_what_it_is() {
    let file = MapFile::new("older");
    let copy = MapFile::new("older-copy");
    let map = LocalMap::open(&file.0).unwrap();
    let revert = || {
        let _ = std::fs::remove_dir_all(&file.0);
        copy_directory(&copy.0, &file.0);
    };
    an_older_copy_gives_no_number_twice_and_says_what_it_is(
        &map,
        || copy_directory(&file.0, &copy.0),
        revert,
    );
}

fn copy_directory(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy_directory(&entry.path(), &target),
            false => _ = std::fs::copy(entry.path(), target).unwrap(),
        }
    }
}

#[test]
fn a_backup_is_restored_whole_and_lowers_no_epoch() {
    let file = MapFile::new("backup");
    let other = MapFile::new("backup-new");
    let map = LocalMap::open(&file.0).unwrap();
    a_backup_brings_back_what_was_there(&map, &LocalMap::open(&other.0).unwrap());
    let backup = map.backup().unwrap();
    let path = file.0.join("file");
    backup.save(&path).unwrap();
    assert!(matches!(backup.save(&path), Err(MapError::Storage { .. })));
    assert_eq!(MapBackup::load(&path).unwrap(), backup);
    // Names of other files are no records.
    let mut text: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    text["records"]["nodes/../../etc"] = 1.into();
    std::fs::write(&path, text.to_string()).unwrap();
    let error = map.restore(&MapBackup::load(&path).unwrap(), 0).unwrap_err();
    assert!(error.to_string().contains("which no map has"), "{error}");
    std::fs::write(&path, text.to_string().replace("\"format\":1", "\"format\":2")).unwrap();
    assert!(MapBackup::load(&path).unwrap_err().to_string().contains("format 2"));
}

#[test]
fn a_pool_gets_another_name_and_number_of_replicas() {
    let file = MapFile::new("pools");
    let map = LocalMap::open(&file.0).unwrap();
    pools_get_other_names_and_numbers_of_replicas(&map);
    // One that was interrupted has two names, and goes on when it is repeated.
    let copy = |from: &str, to: &str| std::fs::copy(file.0.join(from), file.0.join(to)).unwrap();
    copy("pools/c", "pools/d");
    std::fs::rename(file.0.join("images/c.vol"), file.0.join("images/d.vol")).unwrap();
    map.rename_pool("c", "d").unwrap();
    assert_eq!(map.pools().unwrap().keys().collect::<Vec<_>>(), ["b", "d"]);
    assert!(map.images().unwrap().keys().all(|(pool, _)| pool == "d") && map.images().unwrap().len() == 2);
}
