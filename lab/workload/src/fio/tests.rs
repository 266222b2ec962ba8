//! The document against what fio itself writes.

use super::*;
use crate::Usage;

/// Every path of what fio 3.33 wrote for `--ioengine=null --size=1m --rw=randrw`, and its kind.
const FIO: &str = include_str!("fio-3.33.txt");

fn kind(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "text",
        Value::Number(number) if number.is_f64() => "fraction",
        Value::Number(_) => "integer",
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => "other",
    }
}

fn result() -> JobResult {
    let mut sides: [SideResult; 3] = Default::default();
    for side in &mut sides {
        side.elapsed_ns = 2_000_000_000;
    }
    for side in &mut sides[..2] {
        side.total_ios = 1000;
        side.bytes = 4_096_000;
        for tick in 0..1000 {
            side.latency_ticks.record(clock::ns_to_ticks(1000 + tick));
        }
    }
    JobResult {
        spec: JobSpec { io_depth: 128, ..JobSpec::default() },
        sides,
        usage: Usage {
            cpu_ns: 1_000_000_000,
            user_ns: 750_000_000,
            system_ns: 250_000_000,
            ..Usage::default()
        },
        errors: 0,
        failures: Vec::new(),
        mismatches: Vec::new(),
        mismatch_count: 0,
        checked_blocks: 0,
        stuck: 0,
        jobs: 1,
    }
}

#[test]
fn every_field_of_fios_is_there_and_of_its_kind() {
    let document = document(&[result()], "null:1g", std::time::SystemTime::now());
    assert!(FIO.lines().count() > 150);
    for line in FIO.lines() {
        let (path, expected) = line.split_once('\t').unwrap();
        let value = document.pointer(path).unwrap_or_else(|| panic!("{path} is missing"));
        assert_eq!(kind(value), expected, "{path}");
    }
}

#[test]
fn figures_are_in_fios_units() {
    let document = document(&[result()], "null:1g", std::time::SystemTime::now());
    let job = &document["jobs"][0];
    let read = &job["read"];
    assert_eq!(read["iops"], 500.0);
    assert_eq!((&read["bw_bytes"], &read["bw"]), (&json!(2_048_000), &json!(2000)));
    assert_eq!((&read["runtime"], &read["io_kbytes"]), (&json!(2000), &json!(4000)));
    let mean = read["clat_ns"]["mean"].as_f64().unwrap();
    assert!((1490.0..1510.0).contains(&mean), "{mean}");
    assert!((job["usr_cpu"].as_f64().unwrap() - 37.5).abs() < 0.01);
    assert!((job["sys_cpu"].as_f64().unwrap() - 12.5).abs() < 0.01);
    assert_eq!(job["iodepth_level"][">=64"], 100.0);
    let below_2_us = job["latency_us"]["2"].as_f64().unwrap();
    assert!(below_2_us > 98.0 && job["latency_ms"][">=2000"] == 0.0, "{below_2_us}");
}
