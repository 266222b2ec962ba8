//! Partitions of recorded tables: what is exposed, where its I/O goes, and when it comes and goes.
#![allow(clippy::unwrap_used)]

mod rig;

use bdev::testing::CrashDisk;
use control::ConfigFile;
use control::json::{Value, json};
use rig::{Program, golden, image};
use sha2::{Digest, Sha256};

const LINUX: &str = "0fc63daf-8483-4772-8e79-3d69d8477de4";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn what_is_exposed_is_what_spdk_exposes() {
    let text = std::fs::read(golden("spdk.json")).unwrap();
    let expected: Value = serde_json::from_slice(&text).unwrap();
    for (file, partitions) in expected.as_object().unwrap() {
        let block = if file.starts_with("gpt4096") { 4096 } else { 512 };
        let program = Program::start();
        program.disk("disk", &image(file), block);
        let partitions = partitions.as_array().unwrap();
        let names = partitions.iter().map(|partition| partition["name"].as_str().unwrap());
        let names: Vec<&str> = std::iter::once("disk").chain(names).collect();
        assert_eq!(program.names(), names, "{file}");
        let claim = &program.show("disk")["claimed_by"];
        assert_eq!(*claim == json!("gpt bdevs of disk"), !partitions.is_empty(), "{file}: {claim}");
        for partition in partitions {
            let name = partition["name"].as_str().unwrap();
            let mut shown = program.show(name);
            assert_eq!(shown["product_name"], "GPT Disk");
            let mut sha = Sha256::new();
            program.contents(name, |piece| sha.update(piece));
            shown["sha256"] = hex(&sha.finalize()).into();
            for (member, value) in partition.as_object().unwrap() {
                assert_eq!(shown[member], *value, "{file} {name} {member}");
            }
        }
    }
}

#[test]
fn io_reaches_the_blocks_of_its_partition_and_no_other() {
    for (file, block, name, first, blocks) in
        [("gpt512.img", 512, "diskp3", 26_624u64, 32_767u64), ("gpt4096.img", 4096, "diskp1", 256, 2048)]
    {
        let program = Program::start();
        // A disk that reorders I/O and loses power.
        let bytes = image(file);
        let _disk =
            CrashDisk::create(&program.registry, "disk", (bytes.len() / block) as u64, block as u32, 1)
                .unwrap();
        program.wait();
        program.write_image("disk", &bytes);
        program.examine("disk");
        let first_text = program.read(name, 0, block).unwrap();
        assert!(first_text.starts_with(b"FIRST block of "), "{file}");
        let before = |lba: u64| bytes[lba as usize * block..(lba as usize + 1) * block].to_vec();
        for (lba, fill) in [(0, 1), (blocks - 1, 2)] {
            program.write(name, lba, &vec![fill; block]);
        }
        for (lba, expected) in [
            (first - 1, before(first - 1)),
            (first, vec![1; block]),
            (first + 1, before(first + 1)),
            (first + blocks - 1, vec![2; block]),
            (first + blocks, before(first + blocks)),
        ] {
            assert_eq!(program.read("disk", lba, block).unwrap(), expected, "{file} {lba}");
        }
        assert_eq!(program.read(name, blocks - 1, 2 * block), None);
        assert_eq!(program.read(name, blocks, block), None);
    }
}

#[test]
fn partitions_go_with_their_base_and_return_with_it() {
    let program = Program::start();
    program.disk("disk", &image("gpt512.img"), 512);
    let all = ["disk", "diskp1", "diskp3", "diskp7"];
    assert_eq!(program.names(), all);
    let claimed = program.show("disk");
    assert_eq!(claimed["claim_type"], "exclusive_write");
    let other = json!({ "name": "other", "base_bdev_name": "disk" });
    assert_eq!(program.failure("bdev_passthru_create", other).0, -16);
    // Examined again while its partitions are there.
    program.examine("disk");
    assert_eq!(program.names(), all);

    program.pull("disk");
    assert!(program.names().is_empty());
    let claims = program.registry.claims();
    assert!(claims.is_empty(), "{claims:?}");
    program.insert("disk");
    assert_eq!(program.names(), all);
}

#[test]
fn a_base_that_is_claimed_or_has_no_partitions_of_spdk_is_left_alone() {
    let program = Program::start();
    program.disk("disk", &image("gpt512.img"), 512);
    // Its medium has the same table, and belongs to it.
    program.examine("disk-medium");
    assert!(program.registry.find("disk-mediump1").is_none());
    program.disk("empty", &vec![0; 1 << 20], 512);
    assert!(program.registry.find("empty").unwrap().claim().is_none());
    assert_eq!(program.names(), ["disk", "diskp1", "diskp3", "diskp7", "empty"]);
}

#[test]
fn a_name_or_uuid_in_use_costs_one_partition_until_it_is_free() {
    let program = Program::start();
    program.malloc("diskp3", 8, 512);
    program.disk("disk", &image("gpt512.img"), 512);
    // A copy has the same UUIDs.
    program.disk("twin", &image("gpt512.img"), 512);
    assert_eq!(program.names(), ["disk", "diskp1", "diskp3", "diskp7", "twin", "twinp3"]);
    assert_eq!(program.show("diskp3")["product_name"], "Malloc disk");
    program.call("bdev_malloc_delete", json!({ "name": "diskp3" }));
    program.pull("twin");
    program.examine("disk");
    assert_eq!(program.show("diskp3")["product_name"], "GPT Disk");
}

#[test]
fn a_table_that_changes_under_its_partitions_moves_nothing_until_all_are_gone() {
    let program = Program::start();
    let bytes = image("gpt512.img");
    let disk = CrashDisk::create(&program.registry, "disk", 131_072, 512, 1).unwrap();
    program.wait();
    program.write_image("disk", &bytes);
    program.examine("disk");
    let before = program.show("diskp1");
    // MBR and both tables.
    disk.damage(0..34 * 512);
    disk.damage(131_039 * 512..131_072 * 512);
    assert_ne!(program.read("disk", 0, 34 * 512).unwrap(), bytes[..34 * 512]);
    program.examine("disk");
    assert_eq!(program.show("diskp1"), before);
    let request = json!({ "base_bdev_name": "disk", "part_type": "linux" });
    assert_eq!(program.call("bdev_gpt_create", request.clone()), json!(["diskp2"]));
    let all = ["disk", "diskp1", "diskp2", "diskp3", "diskp7"];
    assert_eq!(program.names(), all);

    all[1..].iter().for_each(|name| drop(program.registry.unregister(name).unwrap()));
    // The table counts until the last partition is closed, which is on its reactor.
    program.wait_unclaimed("disk");
    program.examine("disk");
    assert_eq!(program.names(), ["disk"]);
    program.call("bdev_gpt_delete", request.clone());
    assert_eq!(program.failure("bdev_gpt_create", request).0, -22);
}

#[test]
fn other_partitions_are_bdevs_by_request() {
    let program = Program::start();
    program.disk("disk", &image("gpt4096.img"), 4096);
    let of = |part_type: &str| json!({ "base_bdev_name": "disk", "part_type": part_type });
    assert_eq!(program.call("bdev_gpt_create", of("linux")), json!(["diskp2"]));
    let shown = program.show("diskp2");
    assert_eq!(shown["uuid"], "bbbbbbbb-0002-4000-8000-000000000002");
    assert_eq!((&shown["num_blocks"], &shown["block_size"]), (&json!(1024), &json!(4096)));
    assert_eq!(shown["driver_specific"]["gpt"]["partition_type_guid"], LINUX);
    // All of a type, by their names.
    assert_eq!(program.call("bdev_gpt_create", of("ALL")), json!(["diskp1", "diskp2"]));
    let (code, message) = program.failure("bdev_gpt_create", of(&LINUX.to_uppercase()));
    assert_eq!((code, message), (-17, format!("{LINUX} partitions of disk are requested already")));

    // What another request or SPDK's type asks for stays.
    program.call("bdev_gpt_delete", of("linux"));
    assert_eq!(program.names(), ["disk", "diskp1", "diskp2"]);
    program.call("bdev_gpt_delete", of("all"));
    assert_eq!(program.names(), ["disk", "diskp1"]);
    assert_eq!(program.failure("bdev_gpt_delete", of("all")).0, -19);
    program.examine("disk");
    assert_eq!(program.names(), ["disk", "diskp1"]);
    assert!(program.saved().iter().all(|call| call["method"] != "bdev_gpt_create"));
}

#[test]
fn a_request_that_cannot_be_met_says_why_and_changes_nothing() {
    let program = Program::start();
    program.disk("disk", &image("gpt512.img"), 512);
    program.disk("bare", &image("gpt512-no-mbr.img"), 512);
    program.disk("broken", &image("gpt512-both-broken.img"), 512);
    let failure = |base: &str, part_type: &str| {
        program.failure("bdev_gpt_create", json!({ "base_bdev_name": base, "part_type": part_type }))
    };
    let (code, message) = failure("disk", "swap");
    assert_eq!(
        (code, message.as_str()),
        (-19, "disk has no partition of the type 0657fd6d-a4ab-43c4-84e5-0933c84b4f4f")
    );
    let (code, message) = failure("bare", "all");
    assert_eq!(
        (code, message.as_str()),
        (
            -22,
            "bare has no partition table: no protective MBR: the signature of the MBR at byte 510 has the value 0x0"
        )
    );
    let (code, message) = failure("broken", "all");
    assert!(code == -22 && message.contains("the backup table: the CRC of the header"), "{message}");
    let (code, message) = failure("disk", "0fc63daf");
    assert!(code == -22 && message.starts_with("part_type: 0fc63daf is not a GUID"), "{message}");
    // Claimed by another.
    let params = json!({ "base_bdev_name": "disk-medium", "part_type": "all" });
    assert_eq!(program.failure("bdev_gpt_create", params).0, -16);
    program.malloc("diskp2", 8, 512);
    assert_eq!(failure("disk", "linux").0, -17);
    assert!(program.registry.find("bare").unwrap().claim().is_none());
    assert!(program.saved().iter().all(|call| call["method"] != "bdev_gpt_create"));
}

#[test]
fn a_request_is_saved_waits_for_its_base_and_is_met_again_when_that_returns() {
    let program = Program::start();
    let request = json!({ "base_bdev_name": "disk", "part_type": "linux" });
    assert_eq!(program.call("bdev_gpt_create", request.clone()), json!([]));
    let saved =
        json!({ "method": "bdev_gpt_create", "params": { "base_bdev_name": "disk", "part_type": LINUX } });
    assert_eq!(program.saved(), std::slice::from_ref(&saved));
    program.disk("disk", &image("gpt512.img"), 512);
    let all = ["disk", "diskp1", "diskp2", "diskp3", "diskp7"];
    assert_eq!(program.names(), all);
    assert!(program.read("diskp2", 0, 512).unwrap().starts_with(b"FIRST block of linux"));
    program.pull("disk");
    assert!(program.names().is_empty());
    program.insert("disk");
    assert_eq!(program.names(), all);
    assert!(program.saved().contains(&saved));

    // The same by the configuration: the base first or last, and other spellings.
    let plane = &program.plane;
    let file = |calls: Value| {
        let text = json!({ "subsystems": [{ "subsystem": "bdev", "config": calls }] }).to_string();
        ConfigFile::parse("test.json", text.as_bytes(), plane.catalog()).unwrap()
    };
    let mut calls = program.saved();
    let in_force = file(calls.clone().into());
    let now = plane.save();
    calls.reverse();
    let reversed = file(calls.clone().into());
    let (in_force, lines) = in_force.reload(&reversed, plane);
    assert_eq!(lines, ["nothing has changed"]);
    for call in &mut calls {
        if call["method"] == "bdev_gpt_create" {
            call["params"] = json!({ "part_type": "Linux",
                "base_bdev_name": program.registry.find("disk").unwrap().uuid() });
        }
    }
    let (in_force, lines) = in_force.reload(&file(calls.clone().into()), plane);
    assert_eq!((lines, plane.save()), (vec!["nothing has changed".to_string()], now));
    calls.retain(|call| call["method"] != "bdev_gpt_create");
    let (_, lines) = in_force.reload(&file(calls.into()), plane);
    assert!(lines.len() == 1 && lines[0].starts_with("removed: bdev_gpt_create"), "{lines:?}");
    assert_eq!(program.names(), ["disk", "diskp1", "diskp3", "diskp7"]);
}

#[test]
fn a_base_without_partitions_is_free_again() {
    let program = Program::start();
    let mut bytes = image("gpt512.img");
    // Only the partition of Linux is left.
    let header = wire_gpt::GptHeader::decode(&bytes[512..1024]).unwrap();
    let mut table = wire_gpt::GptTable::decode(&header, &bytes[1024..]).unwrap();
    table.entries.retain(|(index, _)| *index == 1);
    let (header, array) = table.encode();
    bytes[512..604].copy_from_slice(&header.encode());
    bytes[1024..1024 + array.len()].copy_from_slice(&array);
    program.disk("disk", &bytes, 512);
    assert_eq!(program.names(), ["disk"]);
    let request = json!({ "base_bdev_name": "disk", "part_type": "all" });
    assert_eq!(program.call("bdev_gpt_create", request.clone()), json!(["diskp2"]));
    assert_eq!(program.show("disk")["claimed_by"], "gpt bdevs of disk");
    program.call("bdev_gpt_delete", request);
    assert_eq!(program.show("disk")["claimed"], false);
}
