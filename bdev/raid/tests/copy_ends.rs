//! Copies that end early: with the array, and with the member that they are for.
#![allow(clippy::unwrap_used)]

mod rig;

use control::json::{Value, json};
use rig::{BLOCK, OFFSET, Program};

/// Blocks of the array: 4 MiB, which take some seconds at 1 MiB/s.
const BLOCKS: u64 = 8192;

/// A mirror of `m0` and `m1`, whose first member is being copied to the other.
fn resyncing(superblock: bool) -> Program {
    let program = Program::start();
    for (index, name) in (0..).zip(["m0", "m1"]) {
        program.malloc(name, OFFSET + BLOCKS, index);
    }
    program.write("m0", OFFSET, &[7; BLOCK]).unwrap();
    program.call("bdev_raid_set_options", json!({ "process_max_bandwidth_mb_sec": 1 }));
    let params = json!({
        "name": "r", "raid_level": "raid1", "base_bdevs": ["m0", "m1"], "superblock": superblock,
        "resync": "full",
    });
    program.call("bdev_raid_create", params);
    program.until("a part is copied", || {
        program.raid("r")["process"]["progress"]["blocks"].as_u64().is_some_and(|blocks| blocks > 0)
    });
    program
}

fn is_claimed(program: &Program, name: &str) -> bool {
    program.show(name)["claimed"] != json!(false)
}

#[test]
fn a_deletion_ends_a_copy_and_removes_all_superblocks() {
    let program = resyncing(true);
    let delete = json!({ "name": "r", "clear_sb": true });
    assert_eq!(program.call("bdev_raid_delete", delete), json!(true));
    for name in ["m0", "m1"] {
        assert!(!is_claimed(&program, name), "{name}");
        assert_eq!(program.read(name, 0, BLOCK).unwrap(), [0; BLOCK], "{name}");
        program.call("bdev_examine", json!({ "name": name }));
    }
    program.wait();
    assert!(program.raids("all").is_empty(), "nothing is left of it");
}

#[test]
fn the_members_are_free_when_a_deletion_that_ends_a_copy_is_answered() {
    for superblock in [true, false] {
        let program = resyncing(superblock);
        assert_eq!(program.call("bdev_raid_delete", json!({ "name": "r" })), json!(true));
        for name in ["m0", "m1"] {
            assert!(!is_claimed(&program, name), "{name}, superblock {superblock}");
        }
    }
}

#[test]
fn a_resync_ends_with_its_only_target_which_can_return_at_once() {
    for superblock in [true, false] {
        let program = resyncing(superblock);
        let remove = json!({ "name": "m1" });
        assert_eq!(program.call("bdev_raid_remove_base_bdev", remove), json!(true));
        assert_eq!(program.raid("r")["process"], Value::Null);
        assert!(!is_claimed(&program, "m1"));
        let first = if superblock { 0 } else { OFFSET };
        program.write("r", BLOCKS - 1, &[9; BLOCK]).unwrap();
        let add = json!({ "raid_bdev": "r", "base_bdev": "m1" });
        assert_eq!(program.call("bdev_raid_add_base_bdev", add), json!(true));
        let process = program.raid("r")["process"].clone();
        assert_eq!((&process["type"], &process["target"]), (&json!("rebuild"), &json!("m1")), "{process}");
        program.until_in_sync("r");
        // What the array has is on the member that has returned.
        program.call("bdev_raid_remove_base_bdev", json!({ "name": "m0" }));
        assert_eq!(program.read("r", first, BLOCK).unwrap(), [7; BLOCK]);
        assert_eq!(program.read("r", BLOCKS - 1, BLOCK).unwrap(), [9; BLOCK]);
    }
}

#[test]
fn a_present_member_is_not_added_and_the_error_says_why() {
    for superblock in [true, false] {
        let program = resyncing(superblock);
        for name in ["m0", "m1"] {
            let add = json!({ "raid_bdev": "r", "base_bdev": name });
            let (code, message) = program.failure("bdev_raid_add_base_bdev", add);
            assert_eq!((code, message), (-17, format!("{name} is a member of the array r already")));
        }
    }
}
