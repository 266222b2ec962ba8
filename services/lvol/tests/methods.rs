//! The methods that change stores and volumes: results, errors, and what is on the device afterwards.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "../../blobstore/tests/support/mod.rs"]
mod support;

use std::sync::atomic::Ordering;
use std::time::Duration;

use bdev::Access;
use block_io::{Channel, Op, Status, Tag};
use control::json::{Value, json};
use rig::{ESNAP_UUID, Program};
use support::Device;

const MIB: u64 = 1 << 20;

fn bdev(program: &Program, name: &str) -> Value {
    program.call("bdev_get_bdevs", json!({ "name": name }))[0].clone()
}

#[test]
fn a_store_is_created_reported_and_found_again_after_its_end_or_a_kill() {
    let program = Program::start();
    let disk = program.add("disk", Device::new(128 * MIB), 512);
    let uuid = program.call("bdev_lvol_create_lvstore", json!({ "bdev_name": "disk", "lvs_name": "lvs" }));
    let store = program.stores()[0].clone();
    for (key, value) in [
        ("uuid", uuid.clone()),
        ("name", json!("lvs")),
        ("base_bdev", json!("disk")),
        ("cluster_size", json!(4 * MIB)),
        ("block_size", json!(512)),
        ("total_data_clusters", json!(31)),
        ("free_clusters", json!(31)),
    ] {
        assert_eq!(store[key], value, "{key}");
    }
    assert_eq!(program.lvols(), Vec::<Value>::new());
    assert_eq!(bdev(&program, "disk")["claim_type"], "read_many_write_one");
    let volume = program.create("thick", 8, false);
    let killed = disk.image();
    program.end();
    let ended = disk.image();
    for (image, is_clean) in [(killed, false), (ended, true)] {
        let loaded = image.load(false).unwrap();
        assert_eq!(loaded.super_block().clean, is_clean);
        let program = Program::start();
        program.add("other", image, 512);
        let found = program.stores()[0].clone();
        assert_eq!((&found["uuid"], &found["free_clusters"]), (&uuid, &json!(29)));
        assert_eq!(program.lvol("thick")["uuid"], volume);
    }
}

#[test]
fn stores_that_cannot_be_made_are_refused_with_the_codes_of_spdk() {
    let program = Program::start();
    program.add("disk", Device::new(96 * MIB), 512);
    program.add("second", Device::new(96 * MIB), 512);
    let create = |changes: Value| {
        let mut params = json!({ "bdev_name": "disk", "lvs_name": "lvs", "cluster_sz": MIB });
        let object = params.as_object_mut().unwrap();
        object.extend(changes.as_object().unwrap().clone());
        program.try_call("bdev_lvol_create_lvstore", params).map(drop).map_err(|error| error.code)
    };
    for (changes, code) in [
        (json!({ "bdev_name": "none" }), -19),
        (json!({ "lvs_name": "" }), -22),
        (json!({ "lvs_name": "n".repeat(64) }), -22),
        (json!({ "lvs_name": "two\nlines" }), -22),
        (json!({ "md_page_size": 2048 }), -22),
        (json!({ "md_page_size": 5000 }), -22),
        (json!({ "md_page_size": 131072 }), -22),
        (json!({ "cluster_sz": 511 }), -22),
        (json!({ "cluster_sz": 8191 }), -22),
        (json!({ "cluster_sz": 2048 }), -32602),
        (json!({ "cluster_sz": 4096 }), -32602),
        (json!({ "cluster_sz": 200 * MIB }), -32602),
        (json!({ "num_md_pages_per_cluster_ratio": 1 }), -32602),
        (json!({ "clear_method": "other" }), -32602),
        (json!({ "unknown": 1 }), -32602),
    ] {
        assert_eq!(create(changes.clone()), Err(code), "{changes}");
        assert!(program.stores().is_empty() && program.registry.claims().is_empty(), "{changes}");
    }
    let writer = program.registry.open("disk", bdev::Access::ReadWrite).unwrap();
    assert_eq!(create(json!({})), Err(-1));
    drop(writer);
    assert_eq!(create(json!({ "lvs_name": "n".repeat(63) })), Ok(()));
    assert_eq!(create(json!({})), Err(-1), "the device has a store");
    assert_eq!(create(json!({ "bdev_name": "second", "lvs_name": "n".repeat(63) })), Err(-17));
    for method in ["none", "unmap", "write_zeroes"] {
        assert_eq!(create(json!({ "bdev_name": "second", "clear_method": method })), Ok(()));
        program.call("bdev_lvol_delete_lvstore", json!({ "lvs_name": "lvs" }));
    }
}

#[test]
fn a_store_for_blank_devices_alone_overwrites_nothing() {
    let program = Program::start();
    for (name, at, is_refused) in [
        ("front", 0, true),
        ("mbr", 510, true),
        ("ext4", 1080, true),
        ("end", 65_535, true),
        ("data", 65_536, false),
    ] {
        let mut image = Device::new(64 * MIB);
        image.write(at, &[1]);
        let disk = program.add(name, image, 4096);
        let params = json!({ "bdev_name": name, "lvs_name": name, "cluster_sz": MIB, "only_blank": true });
        let created = program.try_call("bdev_lvol_create_lvstore", params.clone());
        assert_eq!(created.is_err(), is_refused, "{name}");
        let Err(error) = created else { continue };
        let text = format!("Device or resource busy: there is something on {name}, at byte {at};");
        assert!(error.code == -16 && error.to_string().contains(&text), "{error}");
        let mut byte = [0];
        disk.image().read(at, &mut byte);
        assert_eq!(byte, [1], "{name} is as it was");
        // The device is free, and SPDK's call overwrites it.
        assert_eq!(program.registry.find(name).unwrap().claim(), None);
        let params = json!({ "bdev_name": name, "lvs_name": name, "cluster_sz": MIB });
        program.call("bdev_lvol_create_lvstore", params);
    }
    assert_eq!(program.stores().len(), 5);
}

#[test]
fn a_deleted_store_leaves_its_device_free_and_does_not_come_back() {
    let program = Program::start();
    let disk = program.add_store("disk", 64, MIB);
    let delete = "bdev_lvol_delete_lvstore";
    for (params, code) in [
        (json!({ "uuid": ESNAP_UUID }), -19),
        (json!({ "lvs_name": "other" }), -19),
        (json!({}), -22),
        (json!({ "uuid": ESNAP_UUID, "lvs_name": "lvs" }), -22),
    ] {
        assert_eq!(program.code(delete, params), code);
    }
    for index in 0..4 {
        program.create(&format!("v{index}"), 4, index % 2 == 0);
    }
    program.write("lvs/v1", 0, vec![7; 4096]).unwrap();
    program.call("bdev_lvol_snapshot", json!({ "lvol_name": "lvs/v1", "snapshot_name": "s" }));
    program.call("bdev_lvol_clone", json!({ "snapshot_name": "lvs/s", "clone_name": "c" }));
    program.call(delete, json!({ "lvs_name": "lvs" }));
    assert!(program.stores().is_empty() && program.lvols().is_empty());
    assert_eq!((program.registry.list().len(), program.registry.claims()), (1, vec![]));
    assert_eq!(program.code(delete, json!({ "lvs_name": "lvs" })), -19);
    program.call("bdev_examine", json!({ "name": "disk" }));
    assert!(program.stores().is_empty() && disk.image().load(false).is_err());
    program.registry.open("disk", bdev::Access::Exclusive { by: "a test" }).unwrap();
}

#[test]
fn volumes_are_created_with_uuid_and_alias_and_refused_with_the_codes_of_spdk() {
    let program = Program::start();
    program.add_store("disk", 64, MIB);
    let uuid = program.create("v", 3, false);
    let found = bdev(&program, "lvs/v");
    assert_eq!((&found["name"], &found["uuid"]), (&json!(uuid), &json!(uuid)));
    assert_eq!((&found["aliases"], &found["num_blocks"]), (&json!(["lvs/v"]), &json!(3 * 2048)));
    assert_eq!(found["product_name"], "Logical Volume");
    let lvol = &found["driver_specific"]["lvol"];
    assert_eq!(lvol["lvol_store_uuid"], program.stores()[0]["uuid"]);
    assert_eq!((&lvol["thin_provision"], &lvol["num_allocated_clusters"]), (&json!(false), &json!(3)));
    for (io, is_supported) in [("write", true), ("unmap", true), ("write_zeroes", true), ("flush", true)] {
        assert_eq!(found["supported_io_types"][io], is_supported, "{io}");
    }
    let free = program.free_clusters();
    for (changes, code) in [
        (json!({ "lvol_name": "" }), -22),
        (json!({ "lvol_name": "n".repeat(64) }), -22),
        (json!({ "lvol_name": "\u{1b}[2Jcleared" }), -22),
        (json!({ "lvol_name": "v" }), -17),
        (json!({ "size_in_mib": free + 1 }), -32602),
        (json!({ "size_in_mib": u64::MAX / 1024 }), -32602),
        (json!({ "lvs_name": "other" }), -19),
        (json!({ "uuid": ESNAP_UUID }), -22),
        (json!({ "size_in_mib": "4" }), -32602),
        (json!({ "clear_method": "other" }), -32602),
    ] {
        let mut params = json!({ "lvol_name": "w", "size_in_mib": 1, "lvs_name": "lvs" });
        params.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        assert_eq!(program.code("bdev_lvol_create", params), code, "{changes}");
        assert_eq!((program.lvols().len(), program.free_clusters()), (1, free), "{changes}");
    }
    // Rounded up; larger than the store; without a block; a name with a slash.
    program.create("whole", free, false);
    assert_eq!(program.free_clusters(), 0);
    program.create("large", 1000, true);
    program.create("empty", 0, true);
    program.create("a/b", 1, true);
    assert_eq!(bdev(&program, "lvs/empty")["num_blocks"], 0);
    assert_eq!(bdev(&program, "lvs/a/b")["num_blocks"], 2048);
    let open = program.registry.open("lvs/v", bdev::Access::ReadOnly).unwrap();
    let only_unused = json!({ "name": "lvs/v", "only_unused": true });
    assert_eq!(program.code("bdev_lvol_delete", only_unused.clone()), -32603);
    let store = json!({ "lvs_name": "lvs", "only_unused": true });
    assert_eq!(program.code("bdev_lvol_delete_lvstore", store), -32602);
    assert_eq!(program.lvols().len(), 5);
    drop(open);
    program.call("bdev_lvol_delete", only_unused);
    for name in ["whole", "large", "empty", "a/b"] {
        program.call("bdev_lvol_delete", json!({ "name": format!("lvs/{name}") }));
    }
    assert_eq!(program.code("bdev_lvol_delete", json!({ "name": "lvs/v" })), -19);
    assert_eq!(program.code("bdev_lvol_delete", json!({ "name": "disk" })), -19);
    assert_eq!((program.lvols().len(), program.free_clusters()), (0, 63));
    program.create("v", 3, false);
}

#[test]
fn names_change_with_their_aliases_or_nothing_changes() {
    let program = Program::start();
    let disk = program.add_store("disk", 64, MIB);
    let (one, _) = (program.create("one", 1, true), program.create("two", 1, true));
    let rename = "bdev_lvol_rename";
    for (old, new, code) in [
        ("lvs/none", "new", -19),
        ("lvs/one", "two", -32602),
        ("lvs/one", "one", -32602),
        ("lvs/one", "", -32602),
        ("lvs/one", &"n".repeat(64), -32602),
        ("lvs/one", "two\nlines", -32602),
    ] {
        assert_eq!(program.code(rename, json!({ "old_name": old, "new_name": new })), code, "{old} {new}");
        assert_eq!(bdev(&program, &one)["aliases"], json!(["lvs/one"]));
    }
    program.call("bdev_lvol_snapshot", json!({ "lvol_name": "lvs/two", "snapshot_name": "snap" }));
    assert_eq!(program.code(rename, json!({ "old_name": "lvs/snap", "new_name": "new" })), -32602);
    assert_eq!(bdev(&program, "lvs/snap")["aliases"], json!(["lvs/snap"]));
    program.call(rename, json!({ "old_name": "lvs/one", "new_name": "new" }));
    assert_eq!(bdev(&program, &one)["aliases"], json!(["lvs/new"]));
    assert!(program.registry.find("lvs/one").is_none() && program.lvol("new")["uuid"] == one);
    // The name is free.
    program.create("one", 1, true);
    let other = program.add("other", Device::new(64 * MIB), 512);
    program.call("bdev_lvol_create_lvstore", json!({ "bdev_name": "other", "lvs_name": "second" }));
    let rename_store = |old: &str, new: &str| {
        program.try_call("bdev_lvol_rename_lvstore", json!({ "old_name": old, "new_name": new }))
    };
    let missing = rename_store("none", "new").unwrap_err();
    assert_eq!((missing.code, &missing.message[..]), (-2, "Lvol store none not found"));
    for new in ["second", "", &"n".repeat(80)] {
        assert_eq!(rename_store("lvs", new).unwrap_err().code, -32602, "{new}");
        assert_eq!(bdev(&program, &one)["aliases"], json!(["lvs/new"]));
    }
    rename_store("lvs", "lvs").unwrap();
    rename_store("lvs", "pool").unwrap();
    assert_eq!(bdev(&program, &one)["aliases"], json!(["pool/new"]));
    assert_eq!(program.lvol("new")["alias"], "pool/new");
    assert!(program.registry.find("lvs/new").is_none());
    drop(other);
    program.end();
    let program = Program::start();
    program.add("disk", disk.image(), 512);
    assert_eq!(program.stores()[0]["name"], "pool");
    assert_eq!(bdev(&program, &one)["aliases"], json!(["pool/new"]));
}

#[test]
fn sizes_change_under_users_unless_a_volume_in_use_is_to_shrink() {
    let program = Program::start();
    program.add_store("disk", 64, MIB);
    program.create("v", 2, false);
    let resize = |name: &str, mib: u64| {
        let params = json!({ "name": name, "size_in_mib": mib });
        program.try_call("bdev_lvol_resize", params).map(drop).map_err(|error| error.code)
    };
    assert_eq!(resize("lvs/none", 1), Err(-19));
    assert_eq!(resize("lvs/v", 1000), Err(-32602));
    assert_eq!(resize("lvs/v", u64::MAX), Err(-32602));
    assert_eq!(bdev(&program, "lvs/v")["num_blocks"], 2 * 2048);
    assert!(program.write("lvs/v", 2 * MIB, vec![1; 512]).is_err());
    let user = program.registry.open("lvs/v", bdev::Access::ReadWrite).unwrap();
    assert_eq!(resize("lvs/v", 4), Ok(()));
    assert_eq!(user.device().geometry().blocks, 4 * 2048);
    program.write("lvs/v", 4 * MIB - 512, vec![1; 512]).unwrap();
    assert_eq!(resize("lvs/v", 1), Err(-32602), "it is open");
    assert_eq!((user.device().geometry().blocks, program.free_clusters()), (4 * 2048, 59));
    drop(user);
    program.wait_unused("lvs/v");
    assert_eq!(resize("lvs/v", 1), Ok(()));
    assert_eq!((bdev(&program, "lvs/v")["num_blocks"].clone(), program.free_clusters()), (json!(2048), 62));
    assert!(program.write("lvs/v", MIB, vec![1; 512]).unwrap_err().same_code(Status::LBA_OUT_OF_RANGE));
    program.wait_unused("lvs/v");
    assert_eq!((resize("lvs/v", 1), resize("lvs/v", 0)), (Ok(()), Ok(())));
    assert_eq!((bdev(&program, "lvs/v")["num_blocks"].clone(), program.free_clusters()), (json!(0), 63));
    // Thin volumes take no clusters.
    program.create("thin", 2, true);
    assert_eq!((resize("lvs/thin", 600), program.free_clusters()), (Ok(()), 63));
    program.write("lvs/thin", 599 * MIB, vec![1; 512]).unwrap();
    program.wait_unused("lvs/thin");
    assert_eq!((resize("lvs/thin", 2), program.free_clusters()), (Ok(()), 63));
    program.call("bdev_lvol_snapshot", json!({ "lvol_name": "lvs/thin", "snapshot_name": "snap" }));
    assert_eq!(resize("lvs/snap", 4), Err(-32602));
}

#[test]
fn a_read_only_volume_refuses_writes_and_can_be_cloned() {
    let program = Program::start();
    program.add_store("disk", 64, MIB);
    program.create("v", 2, true);
    program.write("lvs/v", 0, vec![5; 512]).unwrap();
    let clone = json!({ "snapshot_name": "lvs/v", "clone_name": "c" });
    assert_eq!(program.code("bdev_lvol_clone", clone.clone()), -32602);
    assert_eq!(program.code("bdev_lvol_set_read_only", json!({ "name": "lvs/none" })), -19);
    for _ in 0..2 {
        program.call("bdev_lvol_set_read_only", json!({ "name": "lvs/v" }));
    }
    for op in [Op::Write, Op::WriteZeroes, Op::Unmap] {
        let data = if op == Op::Write { Ok(vec![1; 512]) } else { Err(512) };
        let (status, _) = program.request_on(0, "lvs/v", op, 0, data, block_io::RequestFlags::NONE);
        assert!(!status.is_success(), "{op:?}");
    }
    program.call("bdev_lvol_clone", clone);
    assert_eq!(program.read("lvs/c", 0, 512), vec![5; 512]);
    program.write("lvs/c", 0, vec![6; 512]).unwrap();
    assert_eq!(program.read("lvs/v", 0, 512), vec![5; 512]);
    assert_eq!(program.code("bdev_lvol_resize", json!({ "name": "lvs/v", "size_in_mib": 4 })), -32602);
    let snapshot = json!({ "lvol_name": "lvs/v", "snapshot_name": "s" });
    assert_eq!(program.code("bdev_lvol_snapshot", snapshot), -32602);
}

#[test]
fn a_store_grows_with_its_device() {
    let program = Program::start();
    let disk = program.add_store("disk", 64, MIB);
    let grow =
        || program.try_call("bdev_lvol_grow_lvstore", json!({ "lvs_name": "lvs" })).map_err(|e| e.code);
    assert_eq!((grow(), program.free_clusters()), (Ok(json!(true)), 63));
    disk.image.lock().unwrap().bytes = 80 * MIB;
    program.registry.notify_resized("disk").unwrap();
    assert_eq!((grow(), program.free_clusters()), (Ok(json!(true)), 79));
    program.create("v", 79, false);
    disk.image.lock().unwrap().bytes = 64 * MIB;
    program.registry.notify_resized("disk").unwrap();
    assert_eq!(grow(), Err(-32602));
    assert_eq!(program.code("bdev_lvol_grow_lvstore", json!({ "lvs_name": "none" })), -19);
}

#[test]
fn a_store_on_a_volume_of_another_is_unloaded_first() {
    let program = Program::start();
    let disk = program.add_store("disk", 64, MIB);
    program.create("base", 32, false);
    let params = json!({ "bdev_name": "lvs/base", "lvs_name": "nested", "cluster_sz": MIB });
    program.call("bdev_lvol_create_lvstore", params);
    let params = json!({ "lvol_name": "inner", "size_in_mib": 4, "lvs_name": "nested" });
    program.call("bdev_lvol_create", params);
    program.write("nested/inner", 0, vec![9; 4096]).unwrap();
    program.end();
    let program = Program::start();
    program.add("disk", disk.image(), 512);
    program.wait();
    assert_eq!(program.read("nested/inner", 0, 4096), vec![9; 4096]);
    // The volume goes, with the store on it.
    program.call("bdev_lvol_delete", json!({ "name": "lvs/base" }));
    assert_eq!(program.stores().len(), 1);
    program.call("bdev_lvol_delete_lvstore", json!({ "lvs_name": "lvs" }));
}

/// As when a mirror is on it, or a target could not disconnect its hosts in time.
#[test]
fn a_store_is_clean_after_the_end_although_a_volume_of_it_is_open() {
    let program = Program::start_on(2);
    let disk = program.add_store("disk", 64, MIB);
    program.create("served", 4, true);
    program.write("lvs/served", 0, vec![6; 4096]).unwrap();
    let served = program.registry.open("lvs/served", Access::ReadWrite).unwrap();
    program.plane.drain();
    assert!(disk.image().load(false).unwrap().super_block().clean);
    program.write("lvs/served", 4096, vec![7; 4096]).unwrap();
    assert_eq!(program.read("lvs/served", 0, 8192), [vec![6; 4096], vec![7; 4096]].concat());
    // A first write to a cluster neither fails nor makes the store unclean.
    let in_flight = move |core: &reactor::Core| {
        let mut channel = served.channel(core).unwrap();
        let mut request = bdev::Request::new(Tag(0), Op::Write, MIB / 512, 8);
        request.set_data(Some(core.pool().take_data(4096).unwrap()));
        channel.submit(&mut vec![request]);
        let mut completed = Vec::new();
        let end = std::time::Instant::now() + Duration::from_millis(50);
        while std::time::Instant::now() < end {
            channel.poll(&mut completed);
        }
        (completed.len(), channel.outstanding())
    };
    // The owner of the store is on the other core.
    assert_eq!(program.reactors.handles()[1].call(in_flight).unwrap(), (0, 1));
    let image = disk.image();
    assert!(image.load(false).unwrap().super_block().clean);
    let program = Program::start();
    program.add("disk", image, 512);
    assert_eq!(program.read("lvs/served", 4096, 4096), vec![7; 4096]);
    assert_eq!(program.read("lvs/served", MIB, 4096), vec![0; 4096]);
}

#[test]
fn a_device_that_does_not_answer_does_not_keep_the_end_nor_other_stores() {
    let program = Program::start_with_unload_timeout(Duration::from_millis(200));
    let disk = program.add_store("disk", 64, MIB);
    let params = json!({ "bdev_name": "good", "lvs_name": "good", "cluster_sz": MIB });
    let good = program.add_with("good", None, Device::new(64 << 20), 512, 64, false);
    program.call("bdev_lvol_create_lvstore", params);
    program.create("v", 4, true);
    disk.answers.store(false, Ordering::Release);
    program.plane.drain();
    assert!(good.image().load(false).unwrap().super_block().clean);
    assert!(!disk.image().load(false).unwrap().super_block().clean);
    disk.answers.store(true, Ordering::Release);
}

/// What hosts write to a volume is not the server's, whatever it looks like.
#[test]
fn a_store_that_a_host_has_written_into_a_volume_is_used_only_on_request() {
    let program = Program::start();
    let disk = program.add_store("disk", 64, MIB);
    program.create("served", 32, true);
    let host = Program::start();
    let written = host.add_store("disk", 16, MIB);
    host.call("bdev_lvol_rename_lvstore", json!({ "old_name": "lvs", "new_name": "inner" }));
    host.end();
    let mut content = vec![0; 16 << 20];
    written.image().read(0, &mut content);
    for (index, part) in content.chunks(MIB as usize).enumerate() {
        program.write("lvs/served", index as u64 * MIB, part.to_vec()).unwrap();
    }
    program.end();
    let names = |program: &Program| {
        let mut names: Vec<Value> = program.stores().iter().map(|store| store["name"].clone()).collect();
        names.sort_by_key(Value::to_string);
        names
    };
    let program = Program::start();
    let again = program.add("disk", disk.image(), 512);
    program.wait();
    assert_eq!(names(&program), ["lvs"]);
    assert_eq!(bdev(&program, "lvs/served")["claimed"], false);
    // Nor is one on a device that stands on the volume.
    let params = json!({ "base_bdev_name": "lvs/served", "name": "upper" });
    program.call("bdev_passthru_create", params);
    program.wait();
    assert_eq!(names(&program), ["lvs"]);
    program.call("bdev_passthru_delete", json!({ "name": "upper" }));
    program.call("bdev_examine", json!({ "name": "lvs/served" }));
    assert_eq!(names(&program), ["inner", "lvs"]);
    program.end();
    // It was asked for: that is in the store.
    let program = Program::start();
    program.add("disk", again.image(), 512);
    program.wait();
    assert_eq!(names(&program), ["inner", "lvs"]);
}

#[test]
fn stores_and_volumes_go_with_their_device_and_return_as_they_were() {
    let program = Program::start();
    let disk = program.add_store("disk", 64, MIB);
    for name in ["a", "b"] {
        program.create(name, 4, true);
        program.write(&format!("lvs/{name}"), 5 * 512, vec![3; 512]).unwrap();
    }
    program.call("bdev_lvol_snapshot", json!({ "lvol_name": "lvs/a", "snapshot_name": "s" }));
    let lvols = program.lvols();
    program.remove("disk");
    assert!(program.stores().is_empty() && program.registry.list().is_empty());
    assert_eq!(program.code("bdev_lvol_delete_lvstore", json!({ "lvs_name": "lvs" })), -19);
    program.add("again", disk.image(), 512);
    assert_eq!(program.lvols(), lvols);
    for name in ["a", "b", "s"] {
        assert_eq!(program.read(&format!("lvs/{name}"), 5 * 512, 512), vec![3; 512], "{name}");
    }
    program.call("bdev_lvol_delete", json!({ "name": "lvs/b" }));
    program.create("b", 4, false);
}
