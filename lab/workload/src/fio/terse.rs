//! fio's terse format, version 3: a line a job, fields separated by semicolons.

use std::fmt::Write as _;

use serde_json::Value;

/// Number of percentiles in a line.
const PERCENTILES: usize = 20;

/// The jobs of a [`document`](super::document), a line each.
pub fn terse(document: &Value) -> String {
    let mut text = String::new();
    for job in document["jobs"].as_array().into_iter().flatten() {
        let mut fields = vec![
            "3".to_string(),
            plain(&document["fio version"]),
            plain(&job["jobname"]),
            plain(&job["groupid"]),
            plain(&job["error"]),
        ];
        for direction in ["read", "write"] {
            side(&mut fields, &job[direction]);
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
        for disk in document["disk_util"].as_array().into_iter().flatten() {
            let counts =
                ["read_ios", "write_ios", "read_merges", "write_merges", "read_ticks", "write_ticks"];
            fields.push(plain(&disk["name"]));
            fields.extend(counts.map(|name| plain(&disk[name])));
            fields.extend([plain(&disk["in_queue"]), format!("{:.2}%", number(&disk["util"]))]);
        }
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", fields.join(";"));
    }
    text
}

fn side(fields: &mut Vec<String>, side: &Value) {
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
        let table = latency["percentile"].as_object();
        let mut sorted: Vec<(f64, String)> = table
            .into_iter()
            .flatten()
            .map(|(percent, ns)| {
                let value = format!("{percent}%={:.0}", (number(ns) / 1e3).trunc());
                (percent.parse().unwrap_or(0.0), value)
            })
            .collect();
        sorted.sort_by(|one, other| one.0.total_cmp(&other.0));
        let found = sorted.into_iter().map(|(_, value)| value);
        fields.extend(found.chain(std::iter::repeat("0%=0".to_string())).take(PERCENTILES));
    }
    fields.extend(["bw_min", "bw_max"].map(whole));
    fields.push(format!("{:.6}%", number(&side["bw_agg"])));
    fields.extend(["bw_mean", "bw_dev"].map(|name| format!("{:.6}", number(&side[name]))));
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
