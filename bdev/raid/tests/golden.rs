//! Arrays that SPDK made: what is assembled from their members is what SPDK says.
#![allow(clippy::unwrap_used)]

mod rig;

use control::json::{Value, json};
use rig::{BLOCK, OFFSET, Program, golden, image};
use sha2::{Digest, Sha256};

fn spdk(name: &str) -> Value {
    let text = std::fs::read(golden(&format!("{name}.json"))).unwrap();
    serde_json::from_slice::<Value>(&text).unwrap()
}

fn sha(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn has(found: &Value, expected: &Value, path: &str) {
    match expected {
        Value::Object(members) => {
            members.iter().for_each(|(name, value)| has(&found[name], value, &format!("{path}.{name}")));
        }
        Value::Array(values) if found.as_array().is_some_and(|found| found.len() == values.len()) => {
            values
                .iter()
                .enumerate()
                .for_each(|(at, value)| has(&found[at], value, &format!("{path}[{at}]")));
        }
        value => assert_eq!(found, value, "{path}"),
    }
}

#[test]
fn arrays_of_spdk_are_assembled_in_any_order_as_spdk_shows_them() {
    for name in ["raid0", "concat", "raid1", "raid1-degraded"] {
        let expected = spdk(name);
        for order in [[0, 1], [1, 0]] {
            let program = Program::start();
            for index in order {
                assert!(program.raids("online").is_empty() || name == "raid1-degraded");
                let bytes = image(&format!("{name}-{index}"));
                program.disk(&format!("x{index}"), &bytes, index);
            }
            program.until_in_sync("r");
            has(&json!(program.raids("all")), &expected["reloaded"], name);
            let mut shown = expected["bdev"][0].clone();
            for member in ["driver_specific", "supported_io_types", "claimed", "assigned_rate_limits"] {
                shown.as_object_mut().unwrap().remove(member);
            }
            let found = program.show("r");
            for member in ["name", "uuid", "aliases", "num_blocks", "block_size", "product_name"] {
                assert_eq!(found[member], shown[member], "{name} {member}");
            }
            has(
                &json!([found["driver_specific"]["raid"]]),
                &json!(without_name(&expected["reloaded"])),
                name,
            );
            let contents = program.contents("r");
            assert_eq!(sha(&contents), expected["sha256"]["r"].as_str().unwrap(), "{name} {order:?}");
            if name.starts_with("raid1") {
                let data =
                    |index: u64| program.contents(&format!("x{index}"))[OFFSET as usize * BLOCK..].to_vec();
                assert!(data(0) == data(1), "{name}: the members are alike");
            }
        }
    }
}

/// What `driver_specific` has of an array: all but its name.
fn without_name(raids: &Value) -> Vec<Value> {
    let mut raids = raids.as_array().unwrap().clone();
    raids.iter_mut().for_each(|raid| _ = raid.as_object_mut().unwrap().remove("name"));
    raids
}

#[test]
fn a_member_with_another_uuid_is_not_taken() {
    let program = Program::start();
    program.disk("x0", &image("raid0-0"), 0);
    program.disk("x1", &image("raid0-1"), 7);
    let raid = program.raid("r");
    assert_eq!((&raid["state"], &raid["num_base_bdevs_discovered"]), (&json!("configuring"), &json!(1)));
    assert!(program.registry.find("r").is_none());
    assert_eq!(program.show("x0")["claimed_by"], "raid bdev r");
    assert_eq!(program.show("x1")["claimed"], false);
    // A copy of the first.
    program.disk("x2", &image("raid0-0"), 8);
    assert_eq!(program.members("r"), ["x0"]);
}
