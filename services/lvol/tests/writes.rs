//! Writes to volumes: contents against a model, first writes, full stores, snapshots under load, and kills.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "../../blobstore/tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bdev::Access;
use block_io::{Op, RequestFlags, Status};
use control::json::json;
use random::WyRand;
use rig::{ESNAP_UUID, Program};
use support::{Device, recorded_json};

const MIB: u64 = 1 << 20;
const CLUSTER: u64 = 64 << 10;

#[test]
fn thick_and_thin_volumes_return_what_was_written_after_a_kill_too() {
    let program = Program::start();
    let disk = program.add_store("disk", 16, CLUSTER);
    program.create("thick", 1, false);
    program.create("thin", 1, true);
    let data = |seed: u64, bytes: usize| {
        let mut rng = WyRand::new(seed);
        (0..bytes).map(|_| rng.below(256) as u8).collect::<Vec<u8>>()
    };
    for (volume, seed) in [("thick", 1), ("thin", 2)] {
        let name = format!("lvs/{volume}");
        // Within a cluster, across two, and over several.
        for (offset, bytes) in
            [(512, 1024), (CLUSTER - 512, 1024), (4 * CLUSTER - 4096, 3 * CLUSTER as usize)]
        {
            program.write(&name, offset, data(seed + offset, bytes)).unwrap();
            assert!(
                program.read(&name, offset, bytes as u64) == data(seed + offset, bytes),
                "{volume} {offset}"
            );
        }
    }
    assert_eq!(program.lvol("thin")["num_allocated_clusters"], 6);
    let contents = ["lvs/thick", "lvs/thin"].map(|name| program.content(name).unwrap());
    let killed = disk.image();
    drop(program);
    let program = Program::start();
    program.add("disk", killed, 512);
    assert!(["lvs/thick", "lvs/thin"].map(|name| program.content(name).unwrap()) == contents);
    program.call("bdev_lvol_delete", json!({ "name": "lvs/thin" }));
    program.write("lvs/thick", 0, vec![1; 4096]).unwrap();
}

#[test]
fn a_first_write_shows_no_old_content_beside_it() {
    let program = Program::start();
    let mut image = Device::new(16 * MIB);
    image.write(0, &vec![0xdd; 16 * MIB as usize]);
    program.add_with("disk", None, image, 512, 64, false);
    let params =
        json!({ "bdev_name": "disk", "lvs_name": "lvs", "cluster_sz": CLUSTER, "clear_method": "none" });
    program.call("bdev_lvol_create_lvstore", params);
    program.create("v", 1, true);
    assert!(program.content("lvs/v").unwrap().iter().all(|byte| *byte == 0));
    program.write("lvs/v", CLUSTER + 1024, vec![7; 512]).unwrap();
    let content = program.content("lvs/v").unwrap();
    for (at, byte) in content.iter().enumerate() {
        let is_written = (CLUSTER as usize + 1024..CLUSTER as usize + 1536).contains(&at);
        assert_eq!(*byte, if is_written { 7 } else { 0 }, "{at}");
    }
}

#[test]
fn clusters_of_thin_volumes_are_counted_and_given_back() {
    let program = Program::start();
    program.add_store("disk", 16, CLUSTER);
    let all = program.free_clusters();
    program.create("v", 2, true);
    assert_eq!(program.free_clusters(), all);
    let allocated = || program.lvol("v")["num_allocated_clusters"].as_u64().unwrap();
    program.write("lvs/v", 0, vec![1; CLUSTER as usize]).unwrap();
    assert_eq!(allocated(), 1);
    program.write("lvs/v", CLUSTER + CLUSTER / 2, vec![2; CLUSTER as usize]).unwrap();
    assert_eq!((allocated(), program.free_clusters()), (3, all - 3));
    // Zeroes where there are zeroes take no space.
    for op in [Op::WriteZeroes, Op::Unmap] {
        program.range("lvs/v", op, 8 * CLUSTER, 4 * CLUSTER).unwrap();
        assert_eq!(allocated(), 3, "{op:?}");
    }
    let (status, _) =
        program.request_on(0, "lvs/v", Op::WriteZeroes, 8 * CLUSTER, Err(CLUSTER), RequestFlags::ALLOCATE);
    assert!(status.is_success());
    assert_eq!(allocated(), 4, "space was asked for");
    // Parts of a cluster are zeroed, whole ones are free again.
    program.range("lvs/v", Op::Unmap, CLUSTER / 2, 3 * CLUSTER).unwrap();
    assert_eq!(allocated(), 2);
    let content = program.content("lvs/v").unwrap();
    assert!(content[..CLUSTER as usize / 2].iter().all(|byte| *byte == 1));
    assert!(content[CLUSTER as usize / 2..].iter().all(|byte| *byte == 0));
    program.range("lvs/v", Op::Unmap, 0, 2 * MIB).unwrap();
    assert_eq!((allocated(), program.free_clusters()), (0, all));
    program.write("lvs/v", 0, vec![3; 512]).unwrap();
    program.call("bdev_lvol_delete", json!({ "name": "lvs/v" }));
    assert_eq!(program.free_clusters(), all);
}

#[test]
fn a_full_store_answers_capacity_exceeded_and_keeps_what_it_has() {
    let program = Program::start();
    program.add_store("disk", 8, CLUSTER);
    let free = program.free_clusters();
    for name in ["a", "b"] {
        program.create(name, 16, true);
    }
    for cluster in 0..free {
        let name = if cluster % 2 == 0 { "lvs/a" } else { "lvs/b" };
        program.write(name, cluster / 2 * CLUSTER, vec![cluster as u8; CLUSTER as usize]).unwrap();
    }
    assert_eq!(program.free_clusters(), 0);
    let error = program.write("lvs/b", 10 * MIB, vec![1; 4096]).unwrap_err();
    assert!(error.same_code(Status::CAPACITY_EXCEEDED), "{error}");
    // A write that has clusters goes on.
    program.write("lvs/b", 0, vec![9; 512]).unwrap();
    for cluster in (0..free).step_by(2) {
        let content = program.read("lvs/a", cluster / 2 * CLUSTER, CLUSTER);
        assert!(content.iter().all(|byte| *byte == cluster as u8), "{cluster}");
    }
    assert_eq!(program.read("lvs/b", 10 * MIB, 4096), vec![0; 4096]);
    program.call("bdev_lvol_delete", json!({ "name": "lvs/a" }));
    program.write("lvs/b", 10 * MIB, vec![1; 4096]).unwrap();
}

#[test]
fn writes_of_two_cores_to_new_clusters_are_all_there() {
    let program = Program::start_on(2);
    program.add_store("disk", 32, CLUSTER);
    program.create("v", 8, true);
    let blocks = 8 * MIB / 512;
    let mut results = Vec::new();
    for core in 0..2u64 {
        // Each writes every second block: all clusters are wanted by both.
        let work = move |core_of: reactor::Core, io: bdev::AsyncChannel, _: u64, _: usize| async move {
            let done = std::rc::Rc::new(std::cell::Cell::new(0));
            let mine: Vec<u64> = (0..blocks).filter(|block| block % 2 == core).step_by(8).collect();
            for (begun, lba) in mine.iter().copied().enumerate() {
                while begun - done.get() >= 64 {
                    core_of.sleep_ns(1000).await;
                }
                let (io, counter) = (io.clone(), done.clone());
                let mut buffer = core_of.pool().take(512).unwrap();
                buffer.as_mut_slice().fill(1 + (lba % 251) as u8);
                core_of.spawn(async move {
                    io.write(lba, buffer).await.unwrap();
                    counter.set(counter.get() + 1);
                });
            }
            while done.get() < mine.len() {
                core_of.sleep_ns(1000).await;
            }
        };
        results.push(program.begin_on(core as usize, "lvs/v", Access::ReadWrite, work));
    }
    for result in results {
        result.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    }
    let content = program.content("lvs/v").unwrap();
    for core in 0..2 {
        for block in (0..blocks).filter(|block| block % 2 == core).step_by(8) {
            assert_eq!(content[block as usize * 512], 1 + (block % 251) as u8, "block {block}");
        }
    }
}

#[test]
fn a_durable_write_flushes_the_map_of_its_cluster() {
    let program = Program::start();
    let disk = program.add_store("disk", 16, CLUSTER);
    program.create("v", 1, true);
    let durable = |offset: u64| {
        let data = Ok(vec![1; 512]);
        let (status, _) = program.request_on(0, "lvs/v", Op::Write, offset, data, RequestFlags::FUA);
        assert!(status.is_success());
        disk.flushes.load(Ordering::Acquire)
    };
    program.write("lvs/v", 0, vec![1; 512]).unwrap();
    let before = disk.flushes.load(Ordering::Acquire);
    let first = durable(0);
    assert!(first > before, "the map was in the cache of the disk");
    assert_eq!(durable(0), first, "nothing is to be flushed");
    program.range("lvs/v", Op::Flush, 0, 0).unwrap();
    assert_eq!(disk.flushes.load(Ordering::Acquire), first + 1);
}

#[test]
fn a_snapshot_under_load_is_of_one_moment() {
    let program = Program::start_on(2);
    program.add_store("disk", 64, CLUSTER);
    program.create("v", 1, true);
    let is_done = Arc::new(AtomicBool::new(false));
    let stop = is_done.clone();
    // One write at a time: the content is always a number of rounds, the last of which is begun.
    let work = move |core: reactor::Core, io: bdev::AsyncChannel, blocks: u64, _: usize| async move {
        let mut round = 0u8;
        while !stop.load(Ordering::Acquire) {
            round = round.wrapping_add(1);
            for lba in 0..blocks {
                let mut buffer = core.pool().take(512).unwrap();
                buffer.as_mut_slice().fill(round);
                io.write(lba, buffer).await.unwrap();
            }
        }
    };
    let writer = program.begin_on(1, "lvs/v", Access::ReadWrite, work);
    for index in 0..12 {
        let name = format!("s{index}");
        program.call("bdev_lvol_snapshot", json!({ "lvol_name": "lvs/v", "snapshot_name": name }));
        let content = program.content(&format!("lvs/{name}")).unwrap();
        let first = content[0];
        let end = content.iter().position(|byte| *byte != first).unwrap_or(content.len());
        let before = first.wrapping_sub(1);
        assert!(content[end..].iter().all(|byte| *byte == before), "{name}: {first} up to {end}");
        assert!(end.is_multiple_of(512), "{name}: a torn block");
    }
    is_done.store(true, Ordering::Release);
    writer.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    assert_eq!(program.lvols().len(), 13);
}

#[test]
fn clusters_are_written_and_released_while_snapshots_are_taken() {
    let program = Program::start_on(2);
    program.add_store("disk", 64, CLUSTER);
    program.create("v", 1, true);
    let is_done = Arc::new(AtomicBool::new(false));
    let cluster_blocks = CLUSTER / 512;
    let writers: Vec<_> = (0..16)
        .map(|index| {
            let stop = is_done.clone();
            let work = move |core: reactor::Core, io: bdev::AsyncChannel, _: u64, _: usize| async move {
                let (lba, blocks) = (index * cluster_blocks, cluster_blocks as u32);
                let mut buffer = core.pool().take(CLUSTER as usize).unwrap();
                while !stop.load(Ordering::Acquire) {
                    buffer = io.write(lba, buffer).await.unwrap();
                    io.unmap(lba, blocks).await.unwrap();
                    buffer = io.write(lba, buffer).await.unwrap();
                    io.write_zeroes(lba, blocks).await.unwrap();
                }
            };
            program.begin_on(1, "lvs/v", Access::ReadWrite, work)
        })
        .collect();
    for _ in 0..40 {
        program.call("bdev_lvol_snapshot", json!({ "lvol_name": "lvs/v", "snapshot_name": "s" }));
        program.call("bdev_lvol_delete", json!({ "name": "lvs/s" }));
    }
    is_done.store(true, Ordering::Release);
    for writer in writers {
        writer.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    }
}

#[test]
fn a_device_that_fails_fails_the_write_and_leaves_the_store_to_be_loaded() {
    let program = Program::start();
    let disk = program.add_store("disk", 16, CLUSTER);
    program.create("v", 1, true);
    program.write("lvs/v", 0, vec![1; 512]).unwrap();
    disk.fails.store(true, Ordering::Release);
    assert!(program.write("lvs/v", 0, vec![2; 512]).is_err());
    assert!(program.write("lvs/v", CLUSTER, vec![2; 512]).is_err());
    let params = json!({ "lvol_name": "w", "size_in_mib": 1, "lvs_name": "lvs" });
    assert_eq!(program.code("bdev_lvol_create", params), -32602);
    assert_eq!(program.read("lvs/v", 0, 512), vec![1; 512]);
    disk.fails.store(false, Ordering::Release);
    let image = disk.image();
    drop(program);
    let program = Program::start();
    program.add("disk", image, 512);
    assert_eq!(program.read("lvs/v", 0, 512), vec![1; 512]);
    program.write("lvs/v", CLUSTER, vec![2; 512]).unwrap();
}

/// Volumes as a test expects them.
struct Model {
    /// Contents and whether they can be written.
    volumes: BTreeMap<String, (Vec<u8>, bool)>,
    count: u32,
}

impl Model {
    fn name(&mut self, rng: &mut WyRand, writable: bool) -> Option<String> {
        let names: Vec<String> = self
            .volumes
            .iter()
            .filter(|(_, (_, is))| *is || !writable)
            .map(|(name, _)| name.clone())
            .collect();
        (!names.is_empty()).then(|| names[rng.below(names.len() as u64) as usize].clone())
    }

    fn next(&mut self) -> String {
        self.count += 1;
        format!("v{}", self.count)
    }
}

fn check(program: &Program, model: &Model) {
    assert_eq!(program.lvols().len(), model.volumes.len());
    for (name, (expected, _)) in &model.volumes {
        assert!(program.content(&format!("lvs/{name}")).unwrap() == *expected, "{name}");
    }
}

fn random_step(program: &Program, model: &mut Model, rng: &mut WyRand, step: u64) {
    let kind = rng.below(100);
    if kind < 8 || model.volumes.is_empty() {
        let (name, clusters) = (model.next(), 1 + rng.below(12));
        let params = json!({
            "lvol_name": name, "size_in_mib": clusters, "thin_provision": rng.below(4) > 0, "lvs_name": "lvs"
        });
        if program.try_call("bdev_lvol_create", params).is_ok() {
            let bytes = clusters * MIB;
            // Thick volumes have what the device has.
            let content = program.content(&format!("lvs/{name}")).unwrap();
            assert_eq!(content.len() as u64, bytes);
            model.volumes.insert(name, (content, true));
        }
        return;
    }
    let Some(name) = model.name(rng, kind < 70) else { return };
    let alias = format!("lvs/{name}");
    let bytes = model.volumes[&name].0.len() as u64;
    match kind {
        8..60 if bytes > 0 => {
            let offset = rng.below(bytes / 512) * 512;
            let length = (1 + rng.below(300)).min((bytes - offset) / 512) * 512;
            let range = offset as usize..(offset + length) as usize;
            let value = 1 + (step % 255) as u8;
            let (result, value) = match rng.below(10) {
                0 => (program.range(&alias, Op::WriteZeroes, offset, length), 0),
                1 => (program.range(&alias, Op::Unmap, offset, length), 0),
                2 => (program.range(&alias, Op::Unmap, 0, bytes), 0),
                _ => (program.write(&alias, offset, vec![value; length as usize]), value),
            };
            let is_full = matches!(result, Err(status) if status.same_code(Status::CAPACITY_EXCEEDED));
            assert!(result.is_ok() || is_full, "{result:?}");
            let found = program.content(&alias).unwrap();
            let content = &mut model.volumes.get_mut(&name).unwrap().0;
            if result.is_ok() && value == 0 && found[..] != content[..] {
                // All of it, or the range.
                let mut expected = content.clone();
                expected[range.clone()].fill(0);
                let whole = found.iter().all(|byte| *byte == 0);
                assert!(whole || found == expected, "step {step}");
            } else if result.is_ok() && value != 0 {
                content[range].fill(value);
                assert!(found == *content, "step {step}");
            }
            // A part of a write that failed may be there.
            *content = found;
        }
        60..70 => {
            let new = model.next();
            let params = json!({ "lvol_name": alias, "snapshot_name": new });
            if program.try_call("bdev_lvol_snapshot", params).is_ok() {
                let content = model.volumes[&name].0.clone();
                model.volumes.insert(new, (content, false));
            }
        }
        70..78 => {
            let new = model.next();
            let params = json!({ "snapshot_name": alias, "clone_name": new });
            let is_writable = model.volumes[&name].1;
            let result = program.try_call("bdev_lvol_clone", params);
            let has_no_pages = |error: &control::RpcError| error.message.contains("metadata pages");
            assert!(result.is_ok() != is_writable || result.as_ref().is_err_and(has_no_pages), "{result:?}");
            if result.is_ok() {
                let content = model.volumes[&name].0.clone();
                model.volumes.insert(new, (content, true));
            }
        }
        78..86 if program.try_call("bdev_lvol_delete", json!({ "name": alias })).is_ok() => {
            model.volumes.remove(&name);
        }
        86..92 if model.volumes[&name].1 => {
            let mib = rng.below(12);
            program.wait_unused(&alias);
            let params = json!({ "name": alias, "size_in_mib": mib });
            if program.try_call("bdev_lvol_resize", params).is_ok() {
                let found = program.content(&alias).unwrap();
                let content = &mut model.volumes.get_mut(&name).unwrap().0;
                let kept = content.len().min(found.len());
                assert!(found[..kept] == content[..kept] && found.len() as u64 == mib * MIB, "step {step}");
                *content = found;
            }
        }
        92..96 => {
            // Without space, or without a parent, nothing changes.
            _ = program.try_call("bdev_lvol_decouple_parent", json!({ "name": alias }));
        }
        96.. => _ = program.try_call("bdev_lvol_inflate", json!({ "name": alias })),
        _ => {}
    }
}

#[test]
fn random_operations_and_kills_agree_with_a_model() {
    for seed in 0..4 {
        println!("seed {seed}");
        let mut rng = WyRand::new(seed);
        let mut model = Model { volumes: BTreeMap::new(), count: 0 };
        let mut program = Program::start_on(1 + (seed % 2) as u32);
        let mut disk = program.add_store("disk", 24, MIB >> (2 * (seed % 2)));
        for round in 0..4 {
            for step in 0..40 {
                random_step(&program, &mut model, &mut rng, round * 40 + step);
            }
            check(&program, &model);
            let image = match rng.below(2) {
                0 => disk.image(),
                _ => {
                    program.end();
                    let image = disk.image();
                    assert!(image.load(false).unwrap().super_block().clean);
                    program = Program::start();
                    image
                }
            };
            let found = image.load(true).unwrap();
            let shared = found.findings().iter().filter(|finding| {
                matches!(
                    finding,
                    blobstore::StoreFinding::Shared { .. } | blobstore::StoreFinding::Unusable { .. }
                )
            });
            assert_eq!(shared.count(), 0, "{:?}", found.findings());
            drop(program);
            program = Program::start_on(1 + (seed % 2) as u32);
            disk = program.add("disk", image, 512);
            check(&program, &model);
        }
    }
}

#[test]
fn recorded_stores_can_be_written_and_keep_what_was_not() {
    for image in
        ["lvs-512", "lvs-4k", "lvs-c4m", "lvs-md8k", "lvs-grown", "lvs-dirty", "lvs-race0", "lvs-race3"]
    {
        let expected = recorded_json(image);
        let block_size = expected["lvstores"][0]["block_size"].as_u64().unwrap() as u32;
        let program = Program::start();
        program.add_esnap();
        let disk = program.add("disk", Device::recorded(image), block_size);
        let mut contents = BTreeMap::new();
        for lvol in program.lvols() {
            let alias = lvol["alias"].as_str().unwrap().to_string();
            contents.insert(alias.clone(), program.content(&alias).unwrap());
        }
        for (alias, sha) in expected["sha256"].as_object().unwrap() {
            assert_eq!(program.sha256(alias), *sha, "{image} {alias}");
        }
        for (alias, content) in &mut contents {
            let device = program.registry.find(alias).unwrap();
            if device.bdev().read_only() || content.is_empty() {
                continue;
            }
            // At the start, and in the middle.
            for offset in [0, content.len() / 8192 * 4096] {
                let data = vec![0x5a; 4096];
                match program.write(alias, offset as u64, data) {
                    Ok(()) => content[offset..offset + 4096].fill(0x5a),
                    Err(status) => {
                        assert!(status.same_code(Status::CAPACITY_EXCEEDED), "{image} {alias} {status}")
                    }
                }
            }
        }
        for (alias, content) in &contents {
            assert!(program.content(alias).unwrap() == *content, "{image} {alias}");
        }
        let killed = disk.image();
        program.end();
        for copy in [killed, disk.image()] {
            let program = Program::start();
            program.add_as("esnap", Some(ESNAP_UUID), Device::recorded("esnap"), 512);
            program.add("disk", copy, block_size);
            for (alias, content) in &contents {
                assert!(program.content(alias).unwrap() == *content, "{image} {alias}");
            }
        }
    }
}
