//! The document against what fio itself writes.

use super::*;
use crate::Usage;

/// The paths that tools read, with the JSON type that `fio --output-format=json` (3.33) gives each.
const SCHEMA: &[(&str, &str)] = &[
    ("/fio version", "string"),
    ("/timestamp", "number"),
    ("/timestamp_ms", "number"),
    ("/time", "string"),
    ("/jobs/0/jobname", "string"),
    ("/jobs/0/groupid", "number"),
    ("/jobs/0/error", "number"),
    ("/jobs/0/eta", "number"),
    ("/jobs/0/elapsed", "number"),
    ("/jobs/0/job options/rw", "string"),
    ("/jobs/0/job options/bs", "string"),
    ("/jobs/0/job options/iodepth", "string"),
    ("/jobs/0/job_runtime", "number"),
    ("/jobs/0/usr_cpu", "number"),
    ("/jobs/0/sys_cpu", "number"),
    ("/jobs/0/ctx", "number"),
    ("/jobs/0/majf", "number"),
    ("/jobs/0/minf", "number"),
    ("/jobs/0/iodepth_level/1", "number"),
    ("/jobs/0/iodepth_level/>=64", "number"),
    ("/jobs/0/latency_depth", "number"),
];

const SIDE_SCHEMA: &[(&str, &str)] = &[
    ("io_bytes", "number"),
    ("io_kbytes", "number"),
    ("bw_bytes", "number"),
    ("bw", "number"),
    ("iops", "number"),
    ("runtime", "number"),
    ("total_ios", "number"),
    ("short_ios", "number"),
    ("drop_ios", "number"),
    ("slat_ns/min", "number"),
    ("slat_ns/max", "number"),
    ("slat_ns/mean", "number"),
    ("slat_ns/stddev", "number"),
    ("slat_ns/N", "number"),
    ("clat_ns/min", "number"),
    ("clat_ns/mean", "number"),
    ("clat_ns/N", "number"),
    ("lat_ns/min", "number"),
    ("lat_ns/max", "number"),
    ("lat_ns/mean", "number"),
    ("lat_ns/stddev", "number"),
    ("lat_ns/N", "number"),
    ("bw_min", "number"),
    ("bw_mean", "number"),
    ("bw_samples", "number"),
    ("iops_min", "number"),
    ("iops_mean", "number"),
    ("iops_samples", "number"),
];

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn result() -> JobResult {
    let mut sides: [SideResult; 3] = Default::default();
    for side in &mut sides {
        side.elapsed_ns = 2_000_000_000;
    }
    sides[0].total_ios = 1000;
    sides[0].bytes = 4_096_000;
    for tick in 0..1000 {
        sides[0].latency_ticks.record(clock::ns_to_ticks(1000 + tick));
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
fn every_field_that_tools_read_has_fios_name_and_type() {
    let document = document(&[result()], "null:1g", std::time::SystemTime::now());
    let sides = Direction::ALL.iter().flat_map(|direction| {
        let name = direction.name();
        SIDE_SCHEMA.iter().map(move |(path, kind)| (format!("/jobs/0/{name}/{path}"), *kind))
    });
    let percentiles = ["1.000000", "50.000000", "99.000000", "99.990000"];
    let percentiles =
        percentiles.iter().map(|level| (format!("/jobs/0/read/clat_ns/percentile/{level}"), "number"));
    let top = SCHEMA.iter().map(|(path, kind)| (path.to_string(), *kind));
    for (path, expected) in top.chain(sides).chain(percentiles) {
        let value = document.pointer(&path).unwrap_or_else(|| panic!("{path} is missing"));
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
}
