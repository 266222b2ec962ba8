//! The document against fio's own output.

use super::*;
use crate::{DepthCounts, JobSpec, TimelineEntry, Usage};

/// Every JSON path and its type in the output of fio 3.33 for `--ioengine=null --size=1m --rw=randrw`.
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
    let mut sides: [DirectionResult; 3] = Default::default();
    for side in &mut sides {
        side.elapsed_ns = 2_000_000_000;
    }
    for side in &mut sides[..2] {
        side.total_ios = 1000;
        side.bytes = 4_096_000;
        for tick in 0..1000 {
            side.latency_ticks.record(clock::ns_to_ticks(1000 + tick));
            side.completion_ticks.record(clock::ns_to_ticks(1000 + tick));
        }
    }
    let usage =
        Usage { cpu_ns: 1_000_000_000, user_ns: 750_000_000, system_ns: 250_000_000, ..Usage::default() };
    JobResult {
        directions: sides,
        depths: DepthCounts {
            level: [0, 0, 0, 0, 0, 10, 1990],
            submit: [0, 0, 0, 0, 0, 1, 15],
            complete: [0, 10_000, 1, 0, 0, 0, 0],
        },
        timeline: vec![TimelineEntry { at_ns: 1_500_000, ios: 3, completions: vec![(100, 2), (127, 1)] }],
        ..JobResult::without_io(JobSpec { io_depth: 128, ..JobSpec::default() }, usage, 0)
    }
}

fn document(result: JobResult, plus: bool) -> Value {
    let reported = ReportedJob {
        job: crate::jobfile::PerfJob::default(),
        group: 0,
        index: Some(0),
        result,
        generator_cost_ns: Some(12.5),
    };
    let globals = vec![("ioengine".to_string(), "null".to_string())];
    let disks = vec![("vda".to_string(), DiskStats { busy_ms: 500, ..DiskStats::default() }, 1000)];
    let run = RunReport {
        globals,
        jobs: vec![reported],
        disks,
        kernel_workers_ns: 7,
        at: std::time::SystemTime::now(),
    };
    super::document(&run, plus)
}

#[test]
fn every_field_of_fio_is_present_with_its_type() {
    let document = document(result(), false);
    assert!(FIO.lines().count() > 150);
    for line in FIO.lines() {
        let (path, expected) = line.split_once('\t').unwrap();
        let value = document.pointer(path).unwrap_or_else(|| panic!("{path} is missing"));
        assert_eq!(kind(value), expected, "{path}");
    }
}

#[test]
fn values_are_in_fios_units() {
    let document = document(result(), false);
    let job = &document["jobs"][0];
    let read = &job["read"];
    assert_eq!(read["iops"], 500.0);
    assert_eq!((&read["bw_bytes"], &read["bw"]), (&json!(2_048_000), &json!(2000)));
    assert_eq!((&read["runtime"], &read["io_kbytes"]), (&json!(2000), &json!(4000)));
    let mean = read["clat_ns"]["mean"].as_f64().unwrap();
    assert!((1490.0..1510.0).contains(&mean), "{mean}");
    assert!((job["usr_cpu"].as_f64().unwrap() - 37.5).abs() < 0.01);
    assert!((job["sys_cpu"].as_f64().unwrap() - 12.5).abs() < 0.01);
    assert_eq!((&job["iodepth_level"][">=64"], &job["iodepth_level"]["32"]), (&json!(99.5), &json!(0.5)));
    assert_eq!((&job["iodepth_submit"]["64"], &job["iodepth_submit"][">=64"]), (&json!(6.25), &json!(93.75)));
    // A percentage above 0 is at least 0.1, as in fio.
    assert_eq!((&job["iodepth_complete"]["8"], &job["iodepth_complete"]["0"]), (&json!(0.1), &json!(0.0)));
    let below_2_us = job["latency_us"]["2"].as_f64().unwrap();
    assert!(below_2_us > 98.0 && job["latency_ms"][">=2000"] == 0.0, "{below_2_us}");
}

#[test]
fn json_plus_adds_buckets() {
    let document = document(result(), true);
    assert_eq!(document["jobs"][0]["timeline"], json!([[1.5, 3, [100, 2, 127, 1]]]));
    let bins = document["jobs"][0]["read"]["clat_ns"]["bins"].as_object().unwrap();
    assert_eq!(bins.values().map(|count| count.as_u64().unwrap()).sum::<u64>(), 1000);
    assert_eq!(document["jobs"][0]["generator_cost_ns_per_io"], 12.5);
    assert_eq!(
        (&document["disk_util"][0]["util"], &document["disk_util"][0]["name"]),
        (&json!(50.0), &json!("vda"))
    );
    let rows = crate::import::rows(&document.to_string()).unwrap();
    assert_eq!((rows.len(), rows[0].iops, rows[0].direction.as_str()), (2, 500.0, "read"));
}

/// The fields that scripts pick by number, counted in the output of fio 3.33.
#[test]
fn terse_fields_are_where_fio_has_them() {
    let text = super::terse(&document(result(), false), 3);
    let fields: Vec<&str> = text.trim_end().split(';').collect();
    assert_eq!((text.lines().count(), fields.len()), (1, 121 + 9));
    let expected = [
        (1, "3"),
        (3, "job"),
        (6, "4000"),
        (7, "2000"),
        (8, "500"),
        (9, "2000"),
        (15, "1"),
        (18, "1.000000%=1"),
        (37, "0%=0"),
        (44, "0.000000%"),
        (48, "2000"),
        (49, "500"),
        (88, "37.500000%"),
        (99, "99.5%"),
        (122, "vda"),
        (130, "50.00%"),
    ];
    for (field, value) in expected {
        assert_eq!(fields[field - 1], value, "field {field} of {text}");
    }
    let below_2_us: f64 = fields[99].trim_end_matches('%').parse().unwrap();
    assert!(below_2_us > 98.0, "{below_2_us}");
}
