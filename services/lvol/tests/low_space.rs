//! The limit of free clusters: warnings, the field and the metrics, and that it is stored.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "../../blobstore/tests/support/mod.rs"]
mod support;

use std::sync::Mutex;
use std::time::{Duration, Instant};

use control::json::{Value, json};
use rig::Program;
use support::Device;

const MIB: u64 = 1 << 20;

/// The warnings of this program, which has one test that logs.
struct Warnings;

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = record.args().to_string();
        if line.contains(" clusters free, ") {
            LINES.lock().unwrap().push(line);
        }
    }

    fn flush(&self) {}
}

/// The number of warnings when there are `count`, or after a while.
fn warnings(count: usize) -> usize {
    let end = Instant::now() + Duration::from_secs(5);
    while LINES.lock().unwrap().len() < count && Instant::now() < end {
        std::thread::yield_now();
    }
    LINES.lock().unwrap().len()
}

fn low(program: &Program) -> (Value, Value) {
    let store = program.stores()[0].clone();
    (store["low_space_percent"].clone(), store["is_low_on_space"].clone())
}

#[test]
fn a_store_with_few_free_clusters_is_reported_once_and_its_limit_is_stored() {
    log::set_logger(&Warnings).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let program = Program::start();
    // 63 clusters; 7 are the limit.
    program.add_store("disk", 64, MIB);
    assert_eq!(low(&program), (json!(10), json!(false)));
    let delete = |program: &Program, name: &str| {
        program.call("bdev_lvol_delete", json!({ "name": format!("lvs/{name}") }));
    };
    program.create("most", 56, false);
    assert_eq!((program.free_clusters(), warnings(0)), (7, 0));
    program.create("one", 1, false);
    assert_eq!((low(&program), warnings(1)), ((json!(10), json!(true)), 1));
    let line = LINES.lock().unwrap()[0].clone();
    let start =
        "the logical volume store lvs on disk has 6 of 63 clusters free, 6 MiB, less than its limit of 10 %";
    assert!(line.starts_with(start) && line.ends_with("call bdev_lvol_grow_lvstore"), "{line}");
    // As many as the limit are not enough to warn again; one more is.
    for (mib, count) in [(56, 1), (55, 2)] {
        delete(&program, "one");
        let resize = |mib: u32| {
            program.call("bdev_lvol_resize", json!({ "name": "lvs/most", "size_in_mib": mib }));
        };
        resize(mib);
        assert_eq!(program.free_clusters(), 63 - u64::from(mib));
        resize(56);
        program.create("one", 1, false);
        assert_eq!((program.free_clusters(), warnings(count)), (6, count));
    }
    let metrics = program.call("metrics_get", json!({})).to_string();
    assert!(
        metrics.contains("ringbolt_lvol_free_clusters") && metrics.contains("ringbolt_lvol_total_clusters")
    );

    let set = |percent: u32| json!({ "lvs_name": "lvs", "low_space_percent": percent });
    assert_eq!(program.code("bdev_lvol_set_low_space", set(101)), -22);
    program.call("bdev_lvol_set_low_space", set(0));
    assert_eq!(low(&program), (json!(0), json!(false)));
    program.call("bdev_lvol_set_low_space", set(50));
    assert_eq!((low(&program), warnings(3)), ((json!(50), json!(true)), 3));
    delete(&program, "most");
    assert_eq!(low(&program), (json!(50), json!(false)));
    program.end();
}

#[test]
fn a_limit_survives_the_end_of_the_program() {
    let program = Program::start();
    let disk = program.add("disk", Device::new(64 * MIB), 512);
    let create =
        |percent: u32| json!({ "bdev_name": "disk", "lvs_name": "lvs", "low_space_percent": percent });
    assert_eq!(program.code("bdev_lvol_create_lvstore", create(101)), -22);
    program.call("bdev_lvol_create_lvstore", create(20));
    assert_eq!(low(&program).0, 20);
    for percent in [20, 7] {
        program.call("bdev_lvol_set_low_space", json!({ "lvs_name": "lvs", "low_space_percent": percent }));
        let image = disk.image();
        let other = Program::start();
        other.add("disk", image, 512);
        assert_eq!(low(&other).0, percent);
        other.end();
    }
    program.end();
}
