//! Snapshots, clones, parents and copies: what methods report and what volumes read.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "../../blobstore/tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use control::json::{Value, json};
use rig::{ESNAP_UUID, Program};
use support::Device;

const MIB: u64 = 1 << 20;

fn specific(program: &Program, name: &str) -> Value {
    program.call("bdev_get_bdevs", json!({ "name": name }))[0]["driver_specific"]["lvol"].clone()
}

fn snapshot(program: &Program, volume: &str, name: &str) {
    program.call("bdev_lvol_snapshot", json!({ "lvol_name": volume, "snapshot_name": name }));
}

fn clone(program: &Program, snapshot: &str, name: &str) {
    program.call("bdev_lvol_clone", json!({ "snapshot_name": snapshot, "clone_name": name }));
}

fn fill(program: &Program, volume: &str, clusters: &[u64], value: u8) {
    for cluster in clusters {
        program.write(volume, cluster * MIB, vec![value; MIB as usize]).unwrap();
    }
}

/// The first byte of each cluster, after a check that all bytes of a cluster are equal.
fn clusters(program: &Program, volume: &str) -> Vec<u8> {
    let content = program.content(volume).unwrap();
    let one = |cluster: &[u8]| {
        assert!(cluster.iter().all(|byte| *byte == cluster[0]), "{volume}");
        cluster[0]
    };
    content.chunks(MIB as usize).map(one).collect()
}

#[test]
fn snapshots_and_clones_read_what_they_were_made_of() {
    let program = Program::start();
    program.add_store("disk", 64, MIB);
    program.create("thin", 4, true);
    program.create("thick", 4, false);
    fill(&program, "lvs/thin", &[0, 1], 1);
    fill(&program, "lvs/thick", &[0, 1, 2, 3], 2);
    for (volume, content) in [("thin", [1, 1, 0, 0]), ("thick", [2; 4])] {
        let (alias, name) = (format!("lvs/{volume}"), format!("{volume}-s"));
        let free = program.free_clusters();
        snapshot(&program, &alias, &name);
        assert_eq!(program.free_clusters(), free, "a snapshot takes no clusters");
        fill(&program, &alias, &[1, 2], 9);
        assert_eq!(clusters(&program, &format!("lvs/{name}")), content);
        assert_eq!(clusters(&program, &alias), [content[0], 9, 9, content[3]]);
        assert!(program.write(&format!("lvs/{name}"), 0, vec![1; 512]).is_err());
        let (of, made) = (specific(&program, &alias), specific(&program, &format!("lvs/{name}")));
        assert_eq!(
            (&of["clone"], &of["snapshot"], &of["base_snapshot"]),
            (&json!(true), &json!(false), &json!(name))
        );
        assert_eq!(
            (&made["clone"], &made["snapshot"], &made["clones"]),
            (&json!(false), &json!(true), &json!([volume]))
        );
        assert_eq!(made["thin_provision"], volume == "thin");
        assert_eq!(of["thin_provision"], true);
    }
    for name in ["c1", "c2"] {
        clone(&program, "lvs/thin-s", name);
    }
    fill(&program, "lvs/c1", &[3], 5);
    assert_eq!(clusters(&program, "lvs/c1"), [1, 1, 0, 5]);
    assert_eq!(clusters(&program, "lvs/c2"), [1, 1, 0, 0]);
    assert_eq!(specific(&program, "lvs/thin-s")["clones"].as_array().unwrap().len(), 3);
    for (method, params, code) in [
        ("bdev_lvol_snapshot", json!({ "lvol_name": "lvs/none", "snapshot_name": "x" }), -19),
        ("bdev_lvol_snapshot", json!({ "lvol_name": "lvs/c1", "snapshot_name": "c2" }), -32602),
        ("bdev_lvol_snapshot", json!({ "lvol_name": "lvs/c1", "snapshot_name": "" }), -32602),
        ("bdev_lvol_snapshot", json!({ "lvol_name": "lvs/thin-s", "snapshot_name": "x" }), -32602),
        ("bdev_lvol_clone", json!({ "snapshot_name": "lvs/none", "clone_name": "x" }), -19),
        ("bdev_lvol_clone", json!({ "snapshot_name": "lvs/thin", "clone_name": "x" }), -32602),
        ("bdev_lvol_clone", json!({ "snapshot_name": "lvs/thin-s", "clone_name": "c1" }), -32602),
        ("bdev_lvol_delete", json!({ "name": "lvs/thin-s" }), -32603),
    ] {
        assert_eq!(program.code(method, params.clone()), code, "{method} {params}");
    }
    for name in ["c1", "thin"] {
        program.call("bdev_lvol_delete", json!({ "name": format!("lvs/{name}") }));
    }
    // One clone is left, which is open: the snapshot is merged into it.
    let user = program.registry.open("lvs/c2", bdev::Access::ReadWrite).unwrap();
    program.call("bdev_lvol_delete", json!({ "name": "lvs/thin-s" }));
    assert_eq!(specific(&program, "lvs/c2")["clone"], false);
    assert_eq!(clusters(&program, "lvs/c2"), [1, 1, 0, 0]);
    drop(user);
}

#[test]
fn inflated_and_decoupled_volumes_keep_their_contents() {
    let program = Program::start();
    let disk = program.add_store("disk", 64, MIB);
    program.create("v", 4, true);
    fill(&program, "lvs/v", &[0], 1);
    snapshot(&program, "lvs/v", "s1");
    fill(&program, "lvs/v", &[1], 2);
    snapshot(&program, "lvs/v", "s2");
    fill(&program, "lvs/v", &[2], 3);
    clone(&program, "lvs/s2", "c");
    let content = [1, 2, 3, 0];
    let decouple = || program.try_call("bdev_lvol_decouple_parent", json!({ "name": "lvs/v" }));
    decouple().unwrap();
    let found = specific(&program, "lvs/v");
    assert_eq!((&found["base_snapshot"], &found["thin_provision"]), (&json!("s1"), &json!(true)));
    assert_eq!(
        (clusters(&program, "lvs/v"), &found["num_allocated_clusters"]),
        (content.to_vec(), &json!(2))
    );
    program.call("bdev_lvol_delete", json!({ "name": "lvs/c" }));
    let lvol = program.lvol("s2");
    assert_eq!((&lvol["is_snapshot"], &lvol["is_clone"]), (&json!(true), &json!(true)), "it had a clone");
    program.call("bdev_lvol_delete", json!({ "name": "lvs/s2" }));
    decouple().unwrap();
    assert_eq!(decouple().unwrap_err().code, -32602);
    assert_eq!(
        (specific(&program, "lvs/v")["clone"].clone(), clusters(&program, "lvs/v")),
        (json!(false), content.to_vec())
    );
    let job = program.call("bdev_lvol_inflate", json!({ "name": "lvs/v", "background": true }));
    let end = Instant::now() + Duration::from_secs(30);
    while program.call("job_get", json!({ "job": job["job"] }))[0]["state"] == "running" {
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
    assert_eq!(specific(&program, "lvs/v")["thin_provision"], false);
    assert_eq!(
        (program.lvol("v")["num_allocated_clusters"].clone(), clusters(&program, "lvs/v")),
        (json!(4), content.to_vec())
    );
    program.call("bdev_lvol_inflate", json!({ "name": "lvs/v" }));
    program.call("bdev_lvol_delete", json!({ "name": "lvs/s1" }));
    assert_eq!(program.free_clusters(), 59);
    for (method, code) in [("bdev_lvol_inflate", -19), ("bdev_lvol_decouple_parent", -19)] {
        assert_eq!(program.code(method, json!({ "name": "lvs/none" })), code);
    }
    // What does not fit is refused, and changes nothing.
    program.create("large", 200, true);
    fill(&program, "lvs/large", &[7], 7);
    assert_eq!(program.code("bdev_lvol_inflate", json!({ "name": "lvs/large" })), -32602);
    assert_eq!(program.lvol("large")["num_allocated_clusters"], 1);
    let image = disk.image();
    let program = Program::start();
    program.add("disk", image, 512);
    assert_eq!(clusters(&program, "lvs/v"), content);
}

#[test]
fn another_parent_shows_where_a_volume_has_no_data_of_its_own() {
    let program = Program::start();
    program.add_store("disk", 64, MIB);
    for (name, value) in [("a", 1), ("b", 2)] {
        program.create(name, 3, true);
        fill(&program, &format!("lvs/{name}"), &[0, 1, 2], value);
        snapshot(&program, &format!("lvs/{name}"), &format!("{name}-s"));
    }
    clone(&program, "lvs/a-s", "v");
    fill(&program, "lvs/v", &[1], 9);
    program.create("thick", 3, false);
    program.create("plain", 3, true);
    program.create("short", 2, true);
    snapshot(&program, "lvs/short", "short-s");
    let set = |volume: &str, parent: &str| {
        let params = json!({ "lvol_name": format!("lvs/{volume}"), "parent_name": parent });
        program.try_call("bdev_lvol_set_parent", params).map(drop).map_err(|error| error.code)
    };
    for (volume, parent, code) in [
        ("none", "lvs/a-s", -19),
        ("v", "lvs/none", -19),
        ("v", "disk", -19),
        ("v", "lvs/a-s", -32602),
        ("v", "lvs/v", -32602),
        ("v", "lvs/plain", -32602),
        ("v", "lvs/short-s", -32602),
        ("thick", "lvs/b-s", -32602),
    ] {
        assert_eq!(set(volume, parent), Err(code), "{volume} {parent}");
    }
    assert_eq!(set("v", "lvs/b-s"), Ok(()));
    assert_eq!(clusters(&program, "lvs/v"), [2, 9, 2]);
    assert_eq!(specific(&program, "lvs/v")["base_snapshot"], "b-s");
    assert_eq!(set("v", "lvs/b-s"), Err(-32602));
    assert_eq!(set("plain", "lvs/a-s"), Ok(()));
    assert_eq!(clusters(&program, "lvs/plain"), [1, 1, 1]);
    // A snapshot below its own clone would be a circle.
    snapshot(&program, "lvs/v", "v-s");
    assert_eq!(set("b-s", "lvs/v-s"), Err(-32602));
}

#[test]
fn clones_of_devices_outside_read_them_and_never_write_them() {
    let program = Program::start();
    let disk = program.add_store("disk", 64, MIB);
    let mut outside = Device::new(4 * MIB);
    outside.write(0, &vec![4; 4 * MIB as usize]);
    program.add_as("outside", Some(ESNAP_UUID), outside.clone(), 512);
    program.add("odd", Device::new(MIB + 512), 512);
    let clone_bdev = |bdev: &str, store: &str, name: &str| {
        let params = json!({ "bdev": bdev, "lvs_name": store, "clone_name": name });
        program.try_call("bdev_lvol_clone_bdev", params).map_err(|error| error.message)
    };
    program.create("own", 4, true);
    for (bdev, store, name, text) in [
        ("outside", "none", "e", "lvs does not exist"),
        ("none", "lvs", "e", "bdev does not exist"),
        ("lvs/own", "lvs", "e", "bdev is an lvol in same lvs as clone; use bdev_lvol_clone instead"),
        ("odd", "lvs", "e", "Invalid argument"),
        ("outside", "lvs", "own", "File exists"),
        ("outside", "lvs", "", "Invalid argument"),
    ] {
        let error = clone_bdev(bdev, store, name).unwrap_err();
        assert!(error.starts_with(text), "{bdev} {store} {name}: {error}");
    }
    clone_bdev("outside", "lvs", "e").unwrap();
    let claim = program.call("bdev_get_bdevs", json!({ "name": "outside" }))[0]["claim_type"].clone();
    assert_eq!((claim, clusters(&program, "lvs/e")), (json!("read_many_write_none"), vec![4; 4]));
    assert_eq!(program.lvol("e")["num_allocated_clusters"], 0);
    // A part of a cluster: the rest is of the device outside.
    program.write("lvs/e", MIB + 4096, vec![8; 512]).unwrap();
    let content = program.read("lvs/e", MIB, MIB);
    assert!(
        content.iter().enumerate().all(|(at, byte)| *byte == if (4096..4608).contains(&at) { 8 } else { 4 })
    );
    let found = specific(&program, "lvs/e");
    assert_eq!((&found["esnap_clone"], &found["external_snapshot_name"]), (&json!(true), &json!(ESNAP_UUID)));
    // A snapshot takes the relation, and gives it back.
    snapshot(&program, "lvs/e", "e-s");
    assert_eq!(specific(&program, "lvs/e-s")["esnap_clone"], true);
    let found = specific(&program, "lvs/e");
    assert_eq!((&found["esnap_clone"], &found["base_snapshot"]), (&json!(false), &json!("e-s")));
    fill(&program, "lvs/e", &[3], 6);
    assert_eq!(
        (program.read("lvs/e", 0, 512), program.read("lvs/e-s", 3 * MIB, 512)),
        (vec![4; 512], vec![4; 512])
    );
    program.call("bdev_lvol_delete", json!({ "name": "lvs/e-s" }));
    assert_eq!(specific(&program, "lvs/e")["esnap_clone"], true);
    assert_eq!(program.read("lvs/e", 2 * MIB, 512), vec![4; 512]);
    // Degraded while the device is not there: it can be deleted only.
    let image = disk.image();
    let second = Program::start();
    second.add("disk", image, 512);
    assert_eq!(second.lvol("e")["is_degraded"], true);
    assert_eq!(second.code("bdev_lvol_resize", json!({ "name": "lvs/e", "size_in_mib": 8 })), -19);
    second.add_as("outside", Some(ESNAP_UUID), outside.clone(), 512);
    assert_eq!(second.read("lvs/e", 2 * MIB, 512), vec![4; 512]);
    second.remove("outside");
    second.call("bdev_lvol_delete", json!({ "name": "lvs/e" }));
    assert_eq!(second.lvols().len(), 1);
    drop(second);
    // Inflated, it needs the device no more.
    program.call("bdev_lvol_decouple_parent", json!({ "name": "lvs/e" }));
    assert_eq!(specific(&program, "lvs/e")["esnap_clone"], false);
    let outside = program.registry.find("outside").unwrap();
    assert_eq!((outside.claim(), program.read("lvs/e", 2 * MIB, 512)), (None, vec![4; 512]));
}

#[test]
fn a_device_outside_can_become_the_parent() {
    let program = Program::start();
    program.add_store("disk", 64, MIB);
    for (name, value) in [("one", 1), ("two", 2)] {
        let mut outside = Device::new(3 * MIB);
        outside.write(0, &vec![value; 3 * MIB as usize]);
        program.add(name, outside, 512);
    }
    program.create("v", 3, true);
    program.create("thick", 3, false);
    fill(&program, "lvs/v", &[1], 9);
    let set = |volume: &str, parent: &str| {
        let params = json!({ "lvol_name": volume, "parent_name": parent });
        program.try_call("bdev_lvol_set_parent_bdev", params).map(drop).map_err(|error| error.code)
    };
    for (volume, parent, code) in [
        ("lvs/none", "one", -19),
        ("lvs/v", "none", -32602),
        ("lvs/v", "lvs/thick", -32602),
        ("lvs/thick", "one", -32602),
    ] {
        assert_eq!(set(volume, parent), Err(code), "{volume} {parent}");
    }
    for (parent, value) in [("one", 1), ("two", 2)] {
        assert_eq!(set("lvs/v", parent), Ok(()));
        assert_eq!(clusters(&program, "lvs/v"), [value, 9, value]);
        assert_eq!(set("lvs/v", parent), Err(-32602));
    }
    assert_eq!(program.registry.find("one").unwrap().claim(), None);
    program.create("w", 3, true);
    fill(&program, "lvs/w", &[0], 5);
    snapshot(&program, "lvs/w", "w-s");
    program.call("bdev_lvol_set_parent", json!({ "lvol_name": "lvs/v", "parent_name": "lvs/w-s" }));
    assert_eq!(clusters(&program, "lvs/v"), [5, 9, 0]);
    assert_eq!(program.registry.find("two").unwrap().claim(), None);
    program.write("lvs/v", 0, vec![7; 512]).unwrap();
    assert_eq!(program.read("lvs/v", 512, 512), vec![5; 512]);
}

#[test]
fn an_external_snapshot_that_grows_changes_no_clone() {
    let program = Program::start();
    let disk = program.add_store("disk", 64, MIB);
    let outside = program.add_as("outside", Some(ESNAP_UUID), Device::new(2 * MIB), 512);
    let params = json!({ "bdev": "outside", "lvs_name": "lvs", "clone_name": "e" });
    program.call("bdev_lvol_clone_bdev", params);
    program.create("v", 2, true);
    program.call("bdev_lvol_set_parent_bdev", json!({ "lvol_name": "lvs/v", "parent_name": "outside" }));
    for name in ["lvs/e", "lvs/v"] {
        program.call("bdev_lvol_resize", json!({ "name": name, "size_in_mib": 5 }));
    }
    snapshot(&program, "lvs/v", "s");
    program.call("bdev_lvol_clone", json!({ "snapshot_name": "lvs/s", "clone_name": "c" }));
    {
        let mut image = outside.image.lock().unwrap();
        image.bytes = 5 * MIB;
        image.write(0, &vec![7; 5 * MIB as usize]);
    }
    program.registry.notify_resized("outside").unwrap();
    for name in ["lvs/e", "lvs/v", "lvs/s", "lvs/c"] {
        assert_eq!(clusters(&program, name), [7, 7, 0, 0, 0], "{name}");
    }
    // Nor does a first write to a cluster copy what is behind the end.
    program.write("lvs/e", 3 * MIB, vec![1; 512]).unwrap();
    assert_eq!(program.read("lvs/e", 3 * MIB + 512, 512), vec![0; 512]);
    // The clone gets the parent of a snapshot that is deleted.
    program.call("bdev_lvol_delete", json!({ "name": "lvs/v" }));
    program.call("bdev_lvol_delete", json!({ "name": "lvs/s" }));
    assert_eq!(specific(&program, "lvs/c")["esnap_clone"], true);
    program.end();
    let program = Program::start();
    program.add("disk", disk.image(), 512);
    let outside = program.add_as("outside", Some(ESNAP_UUID), outside.image(), 512);
    program.wait();
    for name in ["lvs/e", "lvs/c"] {
        assert_eq!(program.read(name, 2 * MIB, 4096), vec![0; 4096], "{name}");
        assert_eq!(program.read(name, 2 * MIB - 512, 512), vec![7; 512], "{name}");
    }
    // A device that has become smaller lacks what its clones had: that is an error, and no zeroes.
    outside.image.lock().unwrap().bytes = MIB;
    program.registry.notify_resized("outside").unwrap();
    for name in ["lvs/e", "lvs/c"] {
        assert_eq!(program.read(name, 0, 4096), vec![7; 4096], "{name}");
        assert!(program.content(name).is_err(), "{name}");
        assert_ne!(program.code("bdev_lvol_inflate", json!({ "name": name })), 0, "{name}");
        assert_eq!(program.read(name, 2 * MIB, 4096), vec![0; 4096], "{name}");
    }
}

#[test]
fn a_volume_that_is_an_external_snapshot_elsewhere_is_not_deleted() {
    let program = Program::start();
    program.add_store("disk", 64, MIB);
    program.add("other", Device::new(64 * MIB), 512);
    let params = json!({ "bdev_name": "other", "lvs_name": "second", "cluster_sz": MIB });
    program.call("bdev_lvol_create_lvstore", params);
    program.create("v", 2, false);
    let params = json!({ "bdev": "lvs/v", "lvs_name": "second", "clone_name": "e" });
    program.call("bdev_lvol_clone_bdev", params);
    assert_eq!(program.code("bdev_lvol_delete", json!({ "name": "lvs/v" })), -32603);
    // Nor with its store.
    for only_unused in [true, false] {
        let params = json!({ "lvs_name": "lvs", "only_unused": only_unused });
        let refused = program.try_call("bdev_lvol_delete_lvstore", params).unwrap_err();
        let text = "Device or resource busy: the volume lvs/v is the external snapshot of second/e;";
        assert!(refused.code == -32602 && refused.to_string().contains(text), "{refused}");
    }
    assert_eq!(program.lvol("e")["is_degraded"], false);
    program.read("second/e", 0, 512);
    program.call("bdev_lvol_delete", json!({ "name": "second/e" }));
    program.call("bdev_lvol_delete", json!({ "name": "lvs/v" }));
    program.create("w", 2, false);
    let params = json!({ "bdev": "lvs/w", "lvs_name": "second", "clone_name": "f" });
    program.call("bdev_lvol_clone_bdev", params);
    // A store goes with all that reads its own volumes, and one on which no other depends at once.
    program.call("bdev_lvol_delete_lvstore", json!({ "lvs_name": "second" }));
    program.call("bdev_lvol_delete_lvstore", json!({ "lvs_name": "lvs" }));
    assert!(program.stores().is_empty());
}

#[test]
fn a_shallow_copy_has_the_clusters_of_a_volume_itself() {
    let program = Program::start();
    program.add_store("disk", 64, MIB);
    program.add("to", Device::new(4 * MIB), 512);
    program.add("small", Device::new(2 * MIB), 512);
    program.create("v", 4, true);
    fill(&program, "lvs/v", &[1, 3], 1);
    snapshot(&program, "lvs/v", "s");
    fill(&program, "lvs/v", &[0, 2], 2);
    let start = |to: &str| {
        let params = json!({ "src_lvol_name": "lvs/v", "dst_bdev_name": to });
        program.try_call("bdev_lvol_start_shallow_copy", params).map(|id| id["operation_id"].clone())
    };
    let check = |id: &Value| program.try_call("bdev_lvol_check_shallow_copy", json!({ "operation_id": id }));
    assert_eq!(check(&json!(1)).unwrap_err().code, -19);
    assert_eq!(start("none").unwrap_err().code, -32602);
    let id = start("to").unwrap();
    assert_eq!(id, 2, "a failed start uses an id");
    let state = check(&id).unwrap();
    assert_eq!((&state["state"], &state["error"]), (&json!("error"), &json!("Operation not permitted")));
    assert!(state["reason"].as_str().unwrap().contains("bdev_lvol_set_read_only"), "{state}");
    assert_eq!(check(&id).unwrap_err().code, -19);
    program.call("bdev_lvol_set_read_only", json!({ "name": "lvs/v" }));
    let state = check(&start("small").unwrap()).unwrap();
    assert_eq!(state["error"], "Invalid argument");
    assert!(state["reason"].as_str().unwrap().contains("as many bytes"), "{state}");
    let id = start("to").unwrap();
    let end = Instant::now() + Duration::from_secs(30);
    let state = loop {
        let state = check(&id).unwrap();
        if state["state"] != "in progress" {
            break state;
        }
        assert!(Instant::now() < end);
        std::thread::yield_now();
    };
    assert_eq!(state, json!({ "copied_clusters": 2, "total_clusters": 2, "state": "complete" }));
    assert_eq!(clusters(&program, "to"), [2, 0, 2, 0]);
    program.registry.open("to", bdev::Access::Exclusive { by: "a test" }).unwrap();
}
