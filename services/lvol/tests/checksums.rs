//! Stores with checksums of their data: damage is found, and nothing else is taken for it.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "../../blobstore/tests/support/mod.rs"]
mod support;

use blobstore::{
    BlobChange, BlobStoreDevice, BlobStoreLoader, LoadOptions, OpenBlobStore, StoreAction, StoreEvent, Xattr,
};
use block_io::{Op, RequestFlags, Status};
use control::json::{Value, json};
use random::WyRand;
use rig::{Disk, Program};
use support::Device;

const CLUSTER: u64 = 64 << 10;
const MIB: u64 = 1 << 20;

/// A disk with a store `lvs` that has checksums.
fn add_store(program: &Program, mib: u64) -> Disk {
    let disk = program.add_with("disk", None, Device::new(mib << 20), 512, 64, false);
    let params = json!({
        "bdev_name": "disk", "lvs_name": "lvs", "cluster_sz": CLUSTER, "data_checksums": "crc32c",
    });
    program.call("bdev_lvol_create_lvstore", params);
    disk
}

fn block(seed: u64) -> Vec<u8> {
    let mut dice = WyRand::new(seed);
    (0..512).flat_map(|_| dice.next_bits().to_le_bytes()).collect()
}

/// The byte of the device where this block is.
fn place(image: &Device, block: &[u8]) -> u64 {
    let mut found = vec![0; block.len()];
    let at = (0..image.bytes / 4096).find(|at| {
        image.read(at * 4096, &mut found);
        found == block
    });
    at.unwrap() * 4096
}

fn flip(image: &mut Device, offset: u64) {
    let mut byte = [0];
    image.read(offset, &mut byte);
    image.write(offset, &[byte[0] ^ 0x10]);
}

fn read(program: &Program, name: &str, offset: u64, bytes: u64) -> Status {
    program.request_on(0, name, Op::Read, offset, Err(bytes), RequestFlags::NONE).0
}

fn mismatches(program: &Program) -> Value {
    let bdevs = program.call("bdev_get_bdevs", json!({ "name": "disk_checksums" }));
    bdevs[0]["driver_specific"]["checksums"]["mismatches"].clone()
}

/// Restarts with what the disk has: ended properly, or killed.
fn restart(
    program: Program,
    disk: &Disk,
    is_killed: bool,
    change: impl FnOnce(&mut Device),
) -> (Program, Disk) {
    let mut image = match is_killed {
        true => {
            let image = disk.image();
            drop(program);
            image
        }
        false => {
            program.end();
            disk.image()
        }
    };
    change(&mut image);
    let program = Program::start();
    let disk = program.add_with("disk", None, image, 512, 64, false);
    assert_eq!(program.stores()[0]["data_checksums"], "crc32c");
    (program, disk)
}

#[test]
fn a_damaged_block_fails_its_reads_until_it_is_written_again() {
    let program = Program::start();
    let disk = add_store(&program, 16);
    let store = &program.stores()[0];
    assert_eq!((&store["data_checksums"], &store["base_bdev"]), (&json!("crc32c"), &json!("disk")));
    program.create("v", 2, true);
    program.write("lvs/v", 3 * CLUSTER, [block(1), block(2), block(3)].concat()).unwrap();
    program.call("bdev_lvol_snapshot", json!({ "lvol_name": "lvs/v", "snapshot_name": "s" }));
    program.call("bdev_lvol_clone", json!({ "snapshot_name": "lvs/s", "clone_name": "c" }));
    let at = place(&disk.image(), &block(2));
    flip(&mut disk.image.lock().unwrap(), at + 1000);
    for name in ["lvs/v", "lvs/s", "lvs/c"] {
        let whole = read(&program, name, 3 * CLUSTER, 3 * 4096);
        assert!(whole.same_code(Status::UNRECOVERED_READ_ERROR), "{name}: {whole}");
        // Also of a part of the block, and the block only.
        let part = read(&program, name, 3 * CLUSTER + 4096 + 512, 512);
        assert!(part.same_code(Status::UNRECOVERED_READ_ERROR), "{name}: {part}");
        assert!(program.read(name, 3 * CLUSTER, 4096) == block(1));
        assert!(program.read(name, 3 * CLUSTER + 8192, 4096) == block(3));
    }
    assert_eq!(mismatches(&program), 6);
    // A first write does not copy what is damaged.
    program.write("lvs/c", 3 * CLUSTER, block(9)).unwrap_err();
    flip(&mut disk.image.lock().unwrap(), at + 1000);
    assert!(program.read("lvs/c", 3 * CLUSTER + 4096, 4096) == block(2));
    program.write("lvs/c", 3 * CLUSTER, block(9)).unwrap();
    assert!(program.read("lvs/c", 3 * CLUSTER + 4096, 4096) == block(2));
    let at = place(&disk.image(), &block(9));
    flip(&mut disk.image.lock().unwrap(), at);
    assert!(!read(&program, "lvs/c", 3 * CLUSTER, 4096).is_success());
    program.write("lvs/c", 3 * CLUSTER, block(10)).unwrap();
    assert!(program.read("lvs/c", 3 * CLUSTER, 4096) == block(10));
}

#[test]
fn damage_while_the_store_was_not_used_is_found() {
    let program = Program::start();
    let disk = add_store(&program, 16);
    program.create("v", 2, false);
    program.write("lvs/v", 0, block(1)).unwrap();
    program.write("lvs/v", 3 * CLUSTER + 512, vec![7; 512]).unwrap();
    let at = place(&disk.image(), &block(1));
    let (program, disk) = restart(program, &disk, false, |image| flip(image, at));
    assert!(read(&program, "lvs/v", 0, 4096).same_code(Status::UNRECOVERED_READ_ERROR));
    assert_eq!(program.read("lvs/v", 3 * CLUSTER + 512, 512), vec![7; 512]);
    // What was written in parts has a checksum of what the device has, and so is found as well.
    let mut sector = vec![0; 4096];
    sector[512..1024].fill(7);
    let at = place(&disk.image(), &sector);
    let (program, _) = restart(program, &disk, false, |image| flip(image, at + 2048));
    assert!(read(&program, "lvs/v", 3 * CLUSTER, 4096).same_code(Status::UNRECOVERED_READ_ERROR));
}

#[test]
fn after_a_kill_what_was_being_written_is_not_taken_for_damage() {
    let program = Program::start();
    let disk = add_store(&program, 16);
    program.create("v", 2, true);
    program.write("lvs/v", 0, block(1)).unwrap();
    let at = place(&disk.image(), &block(1));
    // As if a write had been in progress: some of its sectors are there.
    let (program, disk) = restart(program, &disk, true, |image| image.write(at + 512, &[3; 512]));
    let mut torn = block(1);
    torn[512..1024].fill(3);
    assert!(program.read("lvs/v", 0, 4096) == torn);
    // The checksums are computed of what is there.
    let (program, _) = restart(program, &disk, false, |image| flip(image, at));
    assert!(read(&program, "lvs/v", 0, 4096).same_code(Status::UNRECOVERED_READ_ERROR));
}

/// Opens and changes a store as a program that does not know checksums, with all its metadata right.
fn change_as_another(image: &mut Device, ends: bool) {
    let mut loader = BlobStoreLoader::new(image.bytes, LoadOptions::default());
    let store = loop {
        while let Some(read) = loader.next_read() {
            let mut content = vec![0; read.length];
            image.read(read.offset, &mut content);
            loader.complete(read.id, Some(&content));
        }
        if let Some(outcome) = loader.outcome() {
            break outcome.unwrap();
        }
    };
    let blob = store.super_block().super_blob.unwrap();
    let device = BlobStoreDevice {
        bytes: image.bytes,
        block_bytes: 512,
        has_volatile_cache: false,
        atomic_write_bytes: 4096,
    };
    let mut open = OpenBlobStore::open(store, device);
    let set = vec![Xattr { name: b"other".to_vec(), value: vec![1] }];
    open.begin(BlobChange::SetXattrs { blob, set, remove: Vec::new() });
    let mut is_unloading = false;
    loop {
        while let Some(event) = open.next_event() {
            if let StoreEvent::Published { epoch } = event {
                open.release(epoch);
            }
        }
        let Some(io) = open.next_io() else {
            if !ends || std::mem::replace(&mut is_unloading, true) {
                return;
            }
            open.begin(BlobChange::Unload);
            continue;
        };
        match io.action {
            StoreAction::Write { offset, data } => image.write(offset, &data),
            StoreAction::WriteZeroes { offset, bytes } => image.write(offset, &vec![0; bytes as usize]),
            _ => {}
        }
        open.complete(io.id, Ok(()));
    }
}

#[test]
fn checksums_are_not_believed_after_another_program_has_changed_the_store() {
    for (is_killed, ends) in [(false, true), (false, false), (true, true), (true, false)] {
        let program = Program::start();
        let disk = add_store(&program, 16);
        program.create("v", 2, true);
        program.write("lvs/v", 0, [block(1), block(2)].concat()).unwrap();
        let at = place(&disk.image(), &block(1));
        let (program, disk) = restart(program, &disk, is_killed, |image| {
            change_as_another(image, ends);
            image.write(at, &block(5));
        });
        assert!(program.read("lvs/v", 0, 4096) == block(5), "{is_killed} {ends}");
        // From then on they are those of what it wrote.
        let (program, _) = restart(program, &disk, false, |image| flip(image, at + 5000));
        assert!(program.read("lvs/v", 0, 4096) == block(5));
        assert!(!read(&program, "lvs/v", 4096, 4096).is_success(), "{is_killed} {ends}");
    }
}

#[test]
fn the_store_can_be_deleted_and_its_bdev_used_again() {
    let program = Program::start();
    add_store(&program, 16);
    program.create("v", 2, true);
    let params = json!({ "lvs_name": "lvs" });
    assert_eq!(program.code("bdev_lvol_grow_lvstore", params.clone()), -32602);
    program.call("bdev_lvol_delete_lvstore", params.clone());
    assert!(program.registry.find("disk_checksums").is_none());
    program.call("bdev_lvol_create_lvstore", json!({ "bdev_name": "disk", "lvs_name": "lvs" }));
    assert_eq!(program.stores()[0]["data_checksums"], "none");
    program.call("bdev_lvol_delete_lvstore", params);
    let tiny =
        json!({ "bdev_name": "disk", "lvs_name": "lvs", "cluster_sz": 16 << 20, "data_checksums": "crc32c" });
    assert_eq!(program.code("bdev_lvol_create_lvstore", tiny), -28);
    assert!(program.registry.find("disk_checksums").is_none());
    // Removed, all of it goes.
    program.call(
        "bdev_lvol_create_lvstore",
        json!({ "bdev_name": "disk", "lvs_name": "lvs", "cluster_sz": CLUSTER, "data_checksums": "crc32c" }),
    );
    program.create("v", 2, true);
    program.remove("disk");
    assert!(program.stores().is_empty() && program.registry.find("disk_checksums").is_none());
}

/// A volume with what it must have.
struct Known {
    name: String,
    content: Vec<u8>,
}

#[test]
fn whatever_is_done_to_volumes_reads_are_right() {
    for seed in 0..6 {
        let mut dice = WyRand::new(seed);
        let mut program = Program::start();
        let mut disk = add_store(&program, 32);
        program.create("v0", 1, true);
        let mut known = vec![Known { name: "v0".to_string(), content: vec![0; MIB as usize] }];
        let mut made = 1;
        for step in 0..120 {
            let at = dice.index(known.len());
            let name = format!("lvs/{}", known[at].name);
            let bytes = known[at].content.len() as u64;
            let unit = if dice.happens(300) { 512 } else { 4096 };
            let offset = dice.below(bytes / unit) * unit;
            let length = ((1 + dice.below(40)) * unit).min(bytes - offset);
            let range = offset as usize..(offset + length) as usize;
            match dice.index(12) {
                0..5 => {
                    let data = vec![1 + dice.below(255) as u8; length as usize];
                    if program.write(&name, offset, data.clone()).is_ok() {
                        known[at].content[range].copy_from_slice(&data);
                    }
                }
                5 => {
                    let op = [Op::WriteZeroes, Op::Unmap][dice.index(2)];
                    if program.range(&name, op, offset, length).is_ok() {
                        known[at].content[range].fill(0);
                    }
                }
                6 if known.len() < 5 => {
                    let (snapshot, clone) = (format!("s{made}"), format!("v{made}"));
                    made += 1;
                    program
                        .call("bdev_lvol_snapshot", json!({ "lvol_name": name, "snapshot_name": snapshot }));
                    let params = json!({ "snapshot_name": format!("lvs/{snapshot}"), "clone_name": clone });
                    program.call("bdev_lvol_clone", params);
                    let content = known[at].content.clone();
                    known.push(Known { name: clone, content });
                }
                7 => _ = program.try_call("bdev_lvol_inflate", json!({ "name": name })),
                8 => {
                    program.wait_unused(&name);
                    let mib = 1 + dice.below(3);
                    if program
                        .try_call("bdev_lvol_resize", json!({ "name": name, "size_in_mib": mib }))
                        .is_ok()
                    {
                        let is_thin = program.lvol(&known[at].name)["is_thin_provisioned"] == true;
                        let old = known[at].content.len();
                        known[at].content.resize((mib * MIB) as usize, 0);
                        if !is_thin && old < known[at].content.len() {
                            // It has what was there.
                            let content = program.content(&name).unwrap();
                            known[at].content[old..].copy_from_slice(&content[old..]);
                        }
                    }
                }
                9 if known.len() > 2 => {
                    program.wait_unused(&name);
                    if program.try_call("bdev_lvol_delete", json!({ "name": name })).is_ok() {
                        known.remove(at);
                    }
                }
                10 => {
                    known.iter().for_each(|volume| program.wait_unused(&format!("lvs/{}", volume.name)));
                    (program, disk) = restart(program, &disk, step % 2 == 0, |_| {});
                }
                _ => assert!(
                    program.content(&name).unwrap() == known[at].content,
                    "seed {seed}, step {step}: {name}"
                ),
            }
        }
        for Known { name, content } in &known {
            assert!(program.content(&format!("lvs/{name}")).unwrap() == *content, "seed {seed}: {name}");
        }
    }
}

#[test]
fn a_store_that_is_not_used_leaves_its_disk_free() {
    let program = Program::start();
    let disk = add_store(&program, 16);
    program.create("v", 1, true);
    program.write("lvs/v", 0, block(1)).unwrap();
    // A copy of the store beside it is refused, and used when the other is gone.
    let copy = disk.image();
    program.add_with("copy", None, copy, 512, 64, false);
    program.call("bdev_wait_for_examine", json!({}));
    let names = || -> Vec<String> {
        let bdevs = program.call("bdev_get_bdevs", json!({}));
        let bdevs = bdevs.as_array().unwrap();
        bdevs.iter().map(|bdev| bdev["name"].as_str().unwrap().to_string()).collect()
    };
    assert!(!names().contains(&"copy_checksums".to_string()), "{:?}", names());
    program.registry.unregister("disk").unwrap();
    program.call("bdev_examine", json!({ "name": "copy" }));
    program.call("bdev_wait_for_examine", json!({}));
    assert!(names().contains(&"copy_checksums".to_string()), "{:?}", names());
    assert!(program.read("lvs/v", 0, 4096) == block(1));
    // A disk that ends within the checksums has a store that is not used.
    let mut image = disk.image();
    let store_bytes = program.call("bdev_get_bdevs", json!({ "name": "copy_checksums" }))[0]["num_blocks"]
        .as_u64()
        .unwrap()
        * 512;
    program.registry.unregister("copy").unwrap();
    image.bytes = store_bytes + 4096;
    program.add_with("short", None, image, 512, 64, false);
    program.call("bdev_wait_for_examine", json!({}));
    assert_eq!(program.stores().len(), 0);
    program.call("bdev_lvol_create_lvstore", json!({ "bdev_name": "short", "lvs_name": "new" }));
}

#[test]
fn an_operator_who_asks_for_a_disk_gets_the_store_on_it() {
    let program = Program::start();
    let disk = add_store(&program, 16);
    program.create("v", 1, true);
    program.write("lvs/v", 0, block(1)).unwrap();
    let image = disk.image();
    drop(program);
    let program = Program::start();
    program.call("bdev_set_options", json!({ "bdev_auto_examine": false }));
    program.add_with("disk", None, image, 512, 64, false);
    program.call("bdev_wait_for_examine", json!({}));
    assert_eq!(program.stores().len(), 0);
    program.call("bdev_examine", json!({ "name": "disk" }));
    program.call("bdev_wait_for_examine", json!({}));
    assert!(program.read("lvs/v", 0, 4096) == block(1));
}
