//! Older copies of members that are put back, as backups and snapshots are: copied to, never copied from.
#![allow(clippy::unwrap_used)]

mod rig;

use control::json::json;
use rig::{BLOCK, OFFSET, Program};
use wire_raid::{MemberState, RaidSuperblock};

/// Blocks of the array: 1 MiB, which is 16 regions.
const BLOCKS: u64 = 2048;
const REGION: u64 = 128;

/// A mirror of `m0` and `m1`, full of ones and clean.
fn filled() -> Program {
    let program = Program::start();
    for (index, name) in (0..).zip(["m0", "m1"]) {
        program.medium(name, OFFSET + BLOCKS);
        program.insert(name, index);
    }
    let params =
        json!({ "name": "r", "raid_level": "raid1", "base_bdevs": ["m0", "m1"], "superblock": true });
    program.call("bdev_raid_create", params);
    let piece = vec![1; REGION as usize * BLOCK];
    (0..BLOCKS).step_by(REGION as usize).for_each(|lba| program.write("r", lba, &piece).unwrap());
    program.plane.drain();
    program
}

fn images(program: &Program) -> [Vec<u8>; 2] {
    ["m0", "m1"].map(|name| program.contents(name))
}

fn started(images: &[Vec<u8>; 2]) -> Program {
    let program = Program::start();
    (0..).zip(images).for_each(|(index, image)| program.disk(&format!("m{index}"), image, index));
    program
}

fn data(image: &[u8]) -> &[u8] {
    &image[OFFSET as usize * BLOCK..]
}

fn bytes_written(program: &Program, name: &str) -> u64 {
    let stats = program.call("bdev_get_iostat", json!({ "name": name }));
    stats["bdevs"][0]["bytes_written"].as_u64().unwrap()
}

/// The array has these data, at once and once all is copied, and so has each member.
fn has(program: &Program, expected: &[u8], what: &str) {
    // Twice, as reads are spread.
    for _ in 0..2 {
        assert!(program.contents("r") == expected, "{what}: a read is of older data");
    }
    program.until_in_sync("r");
    for (name, image) in ["m0", "m1"].into_iter().zip(images(program)) {
        assert!(data(&image) == expected, "{what}: {name} has other data");
    }
}

fn superblock_of(image: &[u8]) -> RaidSuperblock {
    RaidSuperblock::decode(image).unwrap()
}

fn set_superblock(image: &mut [u8], superblock: &RaidSuperblock) {
    let bytes = superblock.encode();
    image[..bytes.len()].copy_from_slice(&bytes);
}

#[test]
fn an_older_copy_of_a_member_is_copied_to_and_never_from() {
    for index in 0..2 {
        // It was removed and has returned meanwhile, or only written to.
        for is_readded in [true, false] {
            for (writes, is_clean) in [(1, false), (1, true), (3, false), (3, true)] {
                let what = format!("m{index}, added again: {is_readded}, writes {writes}, {is_clean}");
                let program = filled();
                let name = format!("m{index}");
                let old = program.contents(&name);
                if is_readded {
                    program.call("bdev_raid_remove_base_bdev", json!({ "name": name }));
                    program.write("r", 5 * REGION, &[2; BLOCK]).unwrap();
                    let add = json!({ "raid_bdev": "r", "base_bdev": name });
                    program.call("bdev_raid_add_base_bdev", add);
                    program.until_in_sync("r");
                }
                for region in 0..writes {
                    program.write("r", (1 + 2 * region) * REGION + 3, &[3; BLOCK]).unwrap();
                }
                if is_clean {
                    program.plane.drain();
                }
                let mut images = images(&program);
                let expected = data(&images[1 - index]).to_vec();
                drop(program);
                images[index] = old;
                let program = started(&images);
                has(&program, &expected, &what);
                if is_readded || writes > 1 {
                    let written = bytes_written(&program, &name);
                    assert!(written >= BLOCKS * BLOCK as u64, "{what}: {written} bytes");
                }
                // The next start finds nothing to do.
                program.plane.drain();
                let again = self::images(&program);
                drop(program);
                let program = started(&again);
                has(&program, &expected, &what);
                assert!(bytes_written(&program, &name) < 512 << 10, "{what}");
            }
        }
    }
}

#[test]
fn older_copies_of_all_members_of_one_moment_agree() {
    let program = filled();
    program.write("r", 7, &[2; BLOCK]).unwrap();
    let old = images(&program);
    program.write("r", 900, &[3; BLOCK]).unwrap();
    program.call("bdev_raid_remove_base_bdev", json!({ "name": "m1" }));
    program.call("bdev_raid_add_base_bdev", json!({ "raid_bdev": "r", "base_bdev": "m1" }));
    program.until_in_sync("r");
    drop(program);
    let program = started(&old);
    has(&program, data(&old[0]), "both");
    for name in ["m0", "m1"] {
        let written = bytes_written(&program, name);
        assert!(written < 512 << 10, "{name}: {written} bytes, more than the region that may differ");
    }
}

#[test]
fn an_older_copy_that_returns_to_a_mirror_gets_all_that_has_left_the_bitmap() {
    for restarts in [false, true] {
        let program = filled();
        let old = program.contents("m1");
        program.write("r", 3 * REGION, &[2; BLOCK]).unwrap();
        // Nothing says so any more.
        program.plane.drain();
        program.pull("m1");
        program.write("r", 9 * REGION, &[3; BLOCK]).unwrap();
        let image = program.contents("m0");
        let program = if restarts {
            drop(program);
            let program = Program::start();
            program.disk("m0", &image, 0);
            assert_eq!(program.members("r"), ["m0"]);
            program.disk("m1", &old, 1);
            program
        } else {
            program.write_image("m1-medium", &old);
            program.insert("m1", 1);
            program
        };
        program.until_in_sync("r");
        has(&program, data(&image), &format!("restarts: {restarts}"));
    }
}

#[test]
fn an_update_of_the_superblock_that_a_crash_has_cut_leaves_no_member_behind() {
    for index in 0..2 {
        let program = filled();
        let mut images = images(&program);
        drop(program);
        let mut newer = superblock_of(&images[index]);
        newer.sequence += 1;
        set_superblock(&mut images[index], &newer);
        let program = started(&images);
        assert_eq!(program.members("r"), ["m0", "m1"]);
        has(&program, data(&images[1 - index]), "cut");
        let superblocks = self::images(&program).map(|image| superblock_of(&image));
        assert_eq!(superblocks, [newer.clone(), newer], "none was recorded as missing");
    }
}

#[test]
fn a_mirror_does_not_start_with_an_older_copy_alone_unless_that_is_asked_for() {
    let program = filled();
    let mut images = images(&program);
    drop(program);
    // It was copied to when the server ended, from one that is another now.
    let mut newest = superblock_of(&images[1]);
    newest.sequence = 6;
    newest.members[1].state = MemberState::Missing;
    set_superblock(&mut images[1], &newest);
    let program = started(&images);
    assert_eq!(program.raid("r")["state"], "configuring");
    assert_eq!(program.call("bdev_raid_start_degraded", json!({ "name": "r" })), json!(true));
    has(&program, data(&images[0]), "as it was");
}

#[test]
fn an_older_copy_of_a_member_of_raid5f_is_made_of_the_others() {
    let names = ["m0", "m1", "m2"];
    for index in 0..3 {
        let program = Program::start();
        for (index, name) in (0..).zip(names) {
            program.medium(name, OFFSET + BLOCKS);
            program.insert(name, index);
        }
        let params = json!({ "name": "r", "raid_level": "raid5f", "strip_size_kb": 64, "base_bdevs": names,
            "superblock": true });
        program.call("bdev_raid_create", params);
        let stripe_blocks = 2 * REGION;
        let write = |stripe: u64, value: u8| {
            let data = vec![value; stripe_blocks as usize * BLOCK];
            program.write("r", stripe * stripe_blocks, &data).unwrap();
        };
        (0..BLOCKS / REGION).for_each(|stripe| write(stripe, 1));
        program.plane.drain();
        let old = program.contents(names[index]);
        [3, 5, 7].into_iter().for_each(|stripe| write(stripe, 2));
        let expected = program.contents("r");
        let mut images = names.map(|name| program.contents(name));
        let newest = std::mem::replace(&mut images[index], old);
        drop(program);
        let program = Program::start();
        (0..).zip(&images).for_each(|(index, image)| program.disk(&format!("m{index}"), image, index));
        assert!(program.contents("r") == expected, "m{index}");
        program.until_in_sync("r");
        assert!(program.contents("r") == expected, "m{index}");
        assert!(data(&program.contents(names[index])) == data(&newest), "m{index} is as it was");
    }
}
