//! raid0 and concat: where data is, against a model, and the rules of the methods.
#![allow(clippy::unwrap_used)]

mod rig;

use bdev::{Access, AsyncChannel, Completion};
use block_io::{Channel as _, Op, Request, RequestFlags, Status, Tag};
use control::json::{Value, json};
use random::WyRand;
use rig::{BLOCK, Program, uuid};

const ARRAY: &str = "aaaa0000-0000-4000-8000-000000000009";

fn create(program: &Program, level: &str, bases: &[&str], strip_kb: u32, superblock: bool) {
    let params = json!({ "name": "r", "raid_level": level, "base_bdevs": bases, "strip_size_kb": strip_kb,
        "superblock": superblock, "uuid": ARRAY });
    assert_eq!(program.call("bdev_raid_create", params), json!(true));
}

/// Random requests of any length, several in flight, each range by one of them only.
fn compare_with_model(program: &Program, seed: u64) {
    let blocks = program.registry.find("r").unwrap().geometry().blocks;
    let mut model = program.contents("r");
    let descriptor = program.registry.open("r", Access::ReadWrite).unwrap();
    let model = program.on_core(move |core| async move {
        let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
        let mut rng = WyRand::new(seed);
        for round in 0..400u64 {
            let lba = rng.below(blocks);
            let count =
                if round % 3 == 0 { rng.below(blocks - lba) } else { rng.below(12.min(blocks - lba)) } + 1;
            let range = lba as usize * BLOCK..(lba + count) as usize * BLOCK;
            let op = [Op::Read, Op::Write, Op::Write, Op::WriteZeroes, Op::Unmap, Op::Flush]
                [rng.below(6) as usize];
            let mut request = Request::new(Tag(0), op, lba, count as u32);
            if op.has_data() {
                let mut data = core.pool().take_data(range.len()).unwrap();
                let bytes: Vec<u8> = (0..range.len()).map(|at| (at / 7) as u8 ^ round as u8).collect();
                data.copy_from(0, &bytes);
                if op == Op::Write {
                    model[range.clone()].copy_from_slice(&bytes);
                }
                request.set_data(Some(data));
            }
            let completion = io.submit(request).await;
            assert_eq!(
                completion.status(),
                Status::SUCCESS,
                "seed {seed} round {round} {op:?} {lba} {count}"
            );
            match op {
                Op::WriteZeroes | Op::Unmap => model[range].fill(0),
                Op::Read => {
                    let mut found = vec![0; range.len()];
                    completion.into_request().take_data().unwrap().copy_to(0, &mut found);
                    assert!(found == model[range], "seed {seed} round {round} {lba} {count}");
                }
                _ => {}
            }
        }
        model
    });
    assert!(program.contents("r") == model, "seed {seed}");
}

#[test]
fn raid0_and_concat_store_what_a_model_stores() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1u64);
    for (level, sizes, expected) in [
        ("raid0", [300, 264, 290], 3 * 256),
        ("0", [40, 40, 40], 3 * 32),
        ("Concat", [100, 33, 64], 96 + 32 + 64),
    ] {
        let program = Program::start();
        for (index, blocks) in (0..).zip(sizes) {
            program.malloc(&format!("m{index}"), blocks, index);
        }
        create(&program, level, &["m0", "m1", "m2"], if level == "Concat" { 16 } else { 8 }, false);
        assert_eq!(program.registry.find("r").unwrap().geometry().blocks, expected, "{level}");
        (seed..seed + 3).for_each(|seed| compare_with_model(&program, seed));
    }
}

/// On arrays of arrays, whose requests have tags of the same kind, and with callers that have such tags too.
#[test]
fn requests_return_with_their_tags_blocks_and_flags() {
    let program = Program::start();
    for index in 0..4 {
        program.malloc(&format!("m{index}"), 6000, index);
    }
    // With superblocks the data of a member begins behind its first block.
    for (name, bases, strip_kb) in [("a", ["m0", "m1"], 2), ("b", ["m2", "m3"], 2), ("r", ["a", "b"], 8)] {
        let params = json!({ "name": name, "raid_level": "raid0", "base_bdevs": bases,
            "strip_size_kb": strip_kb, "superblock": name != "r" });
        assert_eq!(program.call("bdev_raid_create", params), json!(true));
    }
    let descriptor = program.registry.open("r", Access::ReadWrite).unwrap();
    let blocks = program.registry.find("r").unwrap().geometry().blocks;
    program.on_core(move |core| async move {
        let mut channel = descriptor.channel(&core).unwrap();
        let (mut rng, mut batch, mut sink) = (WyRand::new(7), Vec::new(), Vec::new());
        for round in 0..200u64 {
            let mut expected = Vec::new();
            for index in 0..24u64 {
                let count = 1 + rng.below(if index % 5 == 0 { 60 } else { 4 }) as u32;
                let lba = rng.below(blocks - u64::from(count));
                let prefix = if rng.below(4) == 0 { 0 } else { 0xb000 + rng.below(64) };
                let tag = Tag(prefix << 48 | rng.below(2) << 32 | index);
                let op = if rng.below(2) == 0 { Op::Read } else { Op::Write };
                let mut request = Request::new(tag, op, lba, count);
                if op == Op::Write {
                    request.flags = RequestFlags::FUA;
                }
                request.set_data(core.pool().take_data(count as usize * BLOCK));
                expected.push((tag, op, lba, count, request.flags));
                batch.push(request);
            }
            for _ in 0..1000 {
                channel.submit(&mut batch);
                channel.poll(&mut sink);
                if sink.len() == expected.len() {
                    break;
                }
            }
            let all = |completion: Completion| {
                let status = completion.status();
                let request = completion.into_request();
                assert_eq!(status, Status::SUCCESS, "round {round}: {request:?}");
                let bytes = request.data().map(dma::Data::len);
                assert_eq!(bytes, Some(request.blocks as usize * BLOCK), "round {round}: {request:?}");
                (request.tag, request.op, request.lba, request.blocks, request.flags)
            };
            let mut found: Vec<_> = sink.drain(..).map(all).collect();
            found.sort_unstable_by_key(|(tag, ..)| tag.0 & 0xff);
            assert_eq!(found, expected, "round {round}");
        }
    });
}

#[test]
fn a_strip_is_on_the_member_that_spdk_has_it_on() {
    let program = Program::start();
    ["m0", "m1"].iter().zip(0..).for_each(|(name, index)| program.malloc(name, 4096, index));
    create(&program, "raid0", &["m0", "m1"], 4, true);
    for strip in 0..6u8 {
        program.write("r", u64::from(strip) * 8, &[strip + 1; 8 * BLOCK]).unwrap();
    }
    // After the space of the superblock, in turn.
    let first = |name: &str, strip: u64| program.read(name, rig::OFFSET + strip * 8, BLOCK).unwrap()[0];
    assert_eq!([first("m0", 0), first("m1", 0), first("m0", 1), first("m1", 2)], [1, 2, 3, 6]);
}

#[test]
fn an_array_waits_for_its_members_is_saved_and_returns_with_them() {
    let program = Program::start();
    create(&program, "concat", &["m0", "m1"], 4, false);
    assert_eq!(program.raids("configuring").len(), 1);
    for (index, name) in (0..).zip(["m1", "m0"]) {
        assert!(program.registry.find("r").is_none());
        program.malloc(name, 64, index);
    }
    assert_eq!(program.raids("online")[0]["num_base_bdevs_discovered"], 2);
    assert_eq!(program.show("r")["num_blocks"], 128);
    assert_eq!(program.show("m1")["claimed_by"], "raid bdev r");
    let saved = program.saved();
    let last = saved.iter().find(|call| call["method"] == "bdev_raid_create").unwrap();
    let expected = json!({ "name": "r", "raid_level": "concat", "base_bdevs": ["m0", "m1"], "strip_size_kb": 4,
        "uuid": ARRAY });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(last["params"][name], *value);
    }
    program.write("r", 100, &[7; BLOCK]).unwrap();

    program.call("bdev_malloc_delete", json!({ "name": "m0" }));
    program.wait();
    assert_eq!(program.raids("offline").len(), 1);
    assert!(program.registry.find("r").is_none());
    program.until("the other member is free", || program.registry.claims().is_empty());
    program.malloc("m0", 64, 1);
    program.until("the array returns", || {
        program.wait();
        program.registry.find("r").is_some()
    });
    assert_eq!(program.read("r", 100, BLOCK).unwrap()[0], 7);

    assert_eq!(program.call("bdev_raid_delete", json!({ "name": "r" })), json!(true));
    assert!(program.registry.claims().is_empty() && program.raids("all").is_empty());
    let calls = program.saved();
    assert!(calls.iter().all(|call| call["method"] != "bdev_raid_create"));
}

#[test]
fn members_with_superblocks_make_their_array_in_another_program_until_they_are_cleared() {
    let images: Vec<Vec<u8>> = {
        let program = Program::start();
        ["m0", "m1"].iter().zip(0..).for_each(|(name, index)| program.malloc(name, 4096, index));
        create(&program, "raid0", &["m0", "m1"], 4, true);
        program.write("r", 5, &[5; 20 * BLOCK]).unwrap();
        let saved = program.saved();
        assert!(saved.iter().all(|call| call["method"] != "bdev_raid_create"), "the superblocks say it");
        ["m0", "m1"].map(|name| program.contents(name)).to_vec()
    };
    let program = Program::start();
    (0..).zip(&images).for_each(|(index, image)| program.disk(&format!("x{index}"), image, index));
    assert_eq!(program.read("r", 5, 20 * BLOCK).unwrap(), [5; 20 * BLOCK]);
    assert_eq!(program.raid("r")["uuid"], ARRAY);
    // Neither of its members can be in another array.
    let other = json!({ "name": "s", "raid_level": "raid0", "base_bdevs": ["x0"], "strip_size_kb": 4 });
    assert_eq!(program.failure("bdev_raid_create", other.clone()).0, RpcCode::BUSY);

    program.call("bdev_raid_delete", json!({ "name": "r" }));
    let with_superblock = json!({ "name": "s", "raid_level": "raid0", "base_bdevs": ["x0"], "strip_size_kb": 4,
        "superblock": true });
    let (code, message) = program.failure("bdev_raid_create", with_superblock.clone());
    assert_eq!(code, RpcCode::EXISTS);
    assert!(message.starts_with("x0 has the superblock of the array r"), "{message}");
    // It returns when it is examined.
    ["x0", "x1"].iter().for_each(|name| _ = program.call("bdev_examine", json!({ "name": name })));
    program.wait();
    assert!(program.registry.find("r").is_some());
    program.call("bdev_raid_delete", json!({ "name": "r", "clear_sb": true }));
    ["x0", "x1"].iter().for_each(|name| _ = program.call("bdev_examine", json!({ "name": name })));
    program.wait();
    assert!(program.raids("all").is_empty());
    assert_eq!(program.read("x0", 0, BLOCK).unwrap(), [0; BLOCK]);
    assert_eq!(program.call("bdev_raid_create", with_superblock), json!(true));
}

/// Codes of the errors that are compared.
struct RpcCode;

impl RpcCode {
    const NO_DEVICE: i64 = -19;
    const EXISTS: i64 = -17;
    const BUSY: i64 = -16;
    const INVALID: i64 = -22;
}

#[test]
fn what_is_no_array_is_rejected_by_name() {
    let program = Program::start();
    (0..3).for_each(|index| program.malloc(&format!("m{index}"), 4096, index));
    program.call("bdev_null_create", json!({ "name": "big", "num_blocks": 64, "block_size": 4096 }));
    let valid = json!({ "name": "r", "raid_level": "raid0", "base_bdevs": ["m0", "m1"], "strip_size_kb": 4 });
    let refused = |changes: Value, code: i64, expected: &str| {
        let mut params = valid.clone();
        for (name, value) in changes.as_object().unwrap() {
            params[name] = value.clone();
        }
        let (found, message) = program.failure("bdev_raid_create", params);
        assert_eq!((found, message.as_str()), (code, expected));
        assert!(program.raids("all").is_empty() && program.registry.claims().is_empty());
    };
    let invalid = RpcCode::INVALID;
    refused(
        json!({ "raid_level": "raid6" }),
        invalid,
        "raid_level: raid6 is none of raid0, raid1, raid5f and concat",
    );
    refused(json!({ "raid_level": "5f" }), invalid, "base_bdevs: raid5f has 3 to 64 members, not 2");
    refused(
        json!({ "strip_size_kb": 3 }),
        invalid,
        "strip_size_kb: 3 is not a power of two from 1 to 1048576",
    );
    refused(json!({ "raid_level": "raid1" }), invalid, "strip_size_kb: raid1 has no strips");
    refused(json!({ "base_bdevs": [] }), invalid, "base_bdevs: raid0 has 1 to 64 members, not 0");
    refused(json!({ "base_bdevs": ["m0", "m0"] }), invalid, "base_bdevs: m0 is named twice");
    refused(
        json!({ "name": "r", "base_bdevs": ["r", "m0"] }),
        invalid,
        "base_bdevs: r cannot be a member of itself",
    );
    refused(
        json!({ "base_bdevs": ["m0", uuid(0)] }),
        invalid,
        &format!("base_bdevs: {} is named twice", uuid(0)),
    );
    refused(json!({ "base_bdevs": [""] }), invalid, "base_bdevs: the name of a member is empty");
    refused(
        json!({ "base_bdevs": ["m0", "big"] }),
        invalid,
        "base_bdevs: big has blocks of 4096 bytes, and the array of 512",
    );
    refused(
        json!({ "base_bdevs": ["big"], "superblock": true }),
        invalid,
        "base_bdevs: big has 64 blocks, and data would begin at block 256",
    );
    refused(
        json!({ "base_bdevs": ["big"], "strip_size_kb": 2 }),
        invalid,
        "strip_size_kb: 2 KiB is no power of two of blocks of 4096 bytes",
    );
    refused(
        json!({ "base_bdevs": ["big"], "strip_size_kb": 512 }),
        invalid,
        "base_bdevs: a member has no room for a strip",
    );
    refused(json!({ "name": "m2" }), RpcCode::EXISTS, "a bdev named m2 already exists");
    let long = "n".repeat(64);
    refused(json!({ "name": long }), invalid, &format!("name: \"{long}\" is not a name of 1 to 63 bytes"));

    program.call("bdev_raid_create", valid.clone());
    assert_eq!(program.failure("bdev_raid_create", valid.clone()).0, RpcCode::EXISTS);
    let mut second = valid.clone();
    (second["name"], second["base_bdevs"]) = (json!("s"), json!(["m1", "m2"]));
    let (code, message) = program.failure("bdev_raid_create", second);
    assert_eq!((code, message.as_str()), (RpcCode::BUSY, "m1 is claimed by raid bdev r"));
    for (method, params, code) in [
        ("bdev_raid_delete", json!({ "name": "s" }), RpcCode::NO_DEVICE),
        ("bdev_raid_add_base_bdev", json!({ "raid_bdev": "s", "base_bdev": "m2" }), RpcCode::NO_DEVICE),
        ("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "m9" }), RpcCode::NO_DEVICE),
        ("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "m2" }), RpcCode::INVALID),
        ("bdev_raid_remove_base_bdev", json!({ "name": "m2" }), RpcCode::NO_DEVICE),
        ("bdev_raid_set_options", json!({ "process_window_size_kb": 0 }), RpcCode::INVALID),
    ] {
        assert_eq!(program.failure(method, params.clone()).0, code, "{method} {params}");
    }
    // It does not do without a member.
    assert_eq!(program.call("bdev_raid_remove_base_bdev", json!({ "name": "m1" })), json!(true));
    assert_eq!(program.raid("r")["state"], "offline");
    program.call("bdev_raid_set_options", json!({ "process_max_bandwidth_mb_sec": 10 }));
    let saved = program.saved();
    let options = saved.iter().find(|call| call["method"] == "bdev_raid_set_options").unwrap();
    assert_eq!(options["params"]["process_window_size_kb"], 1024);
}
