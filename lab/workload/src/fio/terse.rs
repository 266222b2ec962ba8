//! fio's terse format, versions 2 to 5: a line a job, fields separated by semicolons.
//!
//! Version 2 lacks the version of fio and the disks; 4 and 5 have trims, as 2 has; 5 has statistics of samples.

use std::fmt::Write as _;

use serde_json::Value;

/// Number of percentiles in a line.
const PERCENTILES: usize = 20;

/// The versions of the format that fio 3.33 writes.
pub const TERSE_VERSIONS: std::ops::RangeInclusive<u8> = 2..=5;

/// The jobs of a [`document`](super::document), a line each, in one of [`TERSE_VERSIONS`].
pub fn terse(document: &Value, version: u8) -> String {
    let mut text = String::new();
    for job in document["jobs"].as_array().into_iter().flatten() {
        let mut fields = vec![version.to_string()];
        if version > 2 {
            fields.push(plain(&document["fio version"]));
        }
        fields.extend(["jobname", "groupid", "error"].map(|name| plain(&job[name])));
        let directions: &[&str] = if version == 3 { &["read", "write"] } else { &["read", "write", "trim"] };
        // A direction without I/O has the same percentiles, which are 0.
        let percentiles: Vec<&String> = ["read", "write", "trim"]
            .iter()
            .filter_map(|direction| job[direction]["clat_ns"]["percentile"].as_object())
            .max_by_key(|table| table.len())
            .map_or(Vec::new(), |table| table.keys().collect());
        for direction in directions {
            side(&mut fields, &job[direction], &percentiles, version);
        }
        fields.push(format!("{:.6}%", number(&job["usr_cpu"])));
        fields.push(format!("{:.6}%", number(&job["sys_cpu"])));
        fields.extend(["ctx", "majf", "minf"].map(|name| plain(&job[name])));
        for depth in ["1", "2", "4", "8", "16", "32", ">=64"] {
            fields.push(format!("{:.1}%", number(&job["iodepth_level"][depth])));
        }
        let steps = ["2", "4", "10", "20", "50", "100", "250", "500", "750", "1000"];
        // Latencies below a microsecond belong to the first field.
        let nanoseconds: f64 =
            job["latency_ns"].as_object().into_iter().flatten().map(|(_, value)| number(value)).sum();
        for (index, step) in steps.iter().enumerate() {
            let below = if index == 0 { nanoseconds } else { 0.0 };
            fields.push(format!("{:.2}%", number(&job["latency_us"][step]) + below));
        }
        for step in steps.iter().chain(&["2000", ">=2000"]) {
            fields.push(format!("{:.2}%", number(&job["latency_ms"][step])));
        }
        for disk in document["disk_util"].as_array().into_iter().flatten().filter(|_| version > 2) {
            let counts =
                ["read_ios", "write_ios", "read_merges", "write_merges", "read_ticks", "write_ticks"];
            fields.push(plain(&disk["name"]));
            fields.extend(counts.map(|name| plain(&disk[name])));
            fields.extend([plain(&disk["in_queue"]), format!("{:.2}%", number(&disk["util"]))]);
        }
        if let Some(description) = job["desc"].as_str() {
            // Version 2 has it in a line of its own.
            let separator = if version == 2 { "\n;" } else { ";" };
            if let Some(last) = fields.last_mut() {
                last.push_str(separator);
                last.push_str(&description.replace('\n', " "));
            }
        }
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", fields.join(";"));
    }
    text
}

fn side(fields: &mut Vec<String>, side: &Value, percentiles: &[&String], version: u8) {
    let whole = |name: &str| format!("{:.0}", number(&side[name]).trunc());
    fields.extend(["io_kbytes", "bw", "iops", "runtime"].map(whole));
    for (name, with_percentiles) in [("slat_ns", false), ("clat_ns", true), ("lat_ns", false)] {
        let latency = &side[name];
        let us = |name: &str| number(&latency[name]) / 1e3;
        fields.extend([format!("{:.0}", us("min").trunc()), format!("{:.0}", us("max").trunc())]);
        fields.extend([format!("{:.6}", us("mean")), format!("{:.6}", us("stddev"))]);
        if !with_percentiles {
            continue;
        }
        let field = |percent: &&String| {
            let ns = number(&latency["percentile"][percent.as_str()]);
            (percent.parse().unwrap_or(0.0), format!("{percent}%={:.0}", (ns / 1e3).trunc()))
        };
        let mut sorted: Vec<(f64, String)> = percentiles.iter().map(field).collect();
        sorted.sort_by(|one, other| one.0.total_cmp(&other.0));
        let found = sorted.into_iter().map(|(_, value)| value);
        fields.extend(found.chain(std::iter::repeat("0%=0".to_string())).take(PERCENTILES));
    }
    fields.extend(["bw_min", "bw_max"].map(whole));
    fields.push(format!("{:.6}%", number(&side["bw_agg"])));
    let exact = |name: &str| format!("{:.6}", number(&side[name]));
    fields.extend(["bw_mean", "bw_dev"].map(exact));
    if version == 5 {
        fields.extend(["bw_samples", "iops_min", "iops_max"].map(whole));
        fields.extend(["iops_mean", "iops_stddev"].map(exact));
        fields.push(whole("iops_samples"));
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

/// A text or number without quotes; a semicolon would be a separator.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.replace([';', '\n'], " "),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}
