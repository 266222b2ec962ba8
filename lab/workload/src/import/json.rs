//! fio's JSON, wherever in the text it begins.

use serde_json::Value;

use super::{ImportError, PERCENTILES, Row};
use crate::units::parse_bytes;

/// The rows of the first JSON object with jobs; `None` where there is none at all.
pub(super) fn rows(text: &str) -> Option<Result<Vec<Row>, ImportError>> {
    let mut broken = None;
    // Looked for once: whether it follows a line is asked for every line.
    let last_version = text.rfind("\"fio version\"");
    // fio prints warnings and, with two formats, its text before the object; only a line's first
    // character can begin it.
    let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1));
    for start in starts.filter(|start| text[*start..].trim_start_matches([' ', '\t']).starts_with('{')) {
        let mut stream = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
        match stream.next() {
            Some(Ok(document)) if document.get("jobs").is_some() => {
                return Some(Ok(document_rows(&document)));
            }
            Some(Err(error)) if last_version.is_some_and(|at| at >= start) => {
                broken.get_or_insert(ImportError::Json(error.to_string()));
            }
            _ => {}
        }
    }
    broken.map(Err)
}

fn document_rows(document: &Value) -> Vec<Row> {
    let global = &document["global options"];
    let jobs = document["jobs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut rows = Vec::new();
    for job in jobs {
        for direction in ["read", "write", "trim", "mixed"] {
            if whole(&job[direction]["total_ios"]) > 0 {
                rows.push(row(job, global, direction));
            }
        }
    }
    rows
}

fn row(job: &Value, global: &Value, direction: &str) -> Row {
    let option = |names: &[&str]| {
        let places = [&job["job options"], global];
        let found = places.iter().find_map(|options| names.iter().find_map(|name| options[name].as_str()));
        found.unwrap_or_default().to_string()
    };
    let grouped = switch(&option(&["group_reporting"]), !job["job_index"].is_null());
    let side = &job[direction];
    let (lat, clat) = (&side["lat_ns"], &side["clat_ns"]);
    let with_table = [clat, lat].into_iter().find(|latency| latency["percentile"].is_object());
    let percentile = |percent: f64| {
        let table = with_table?["percentile"].as_object()?;
        let near = |key: &str| key.parse::<f64>().is_ok_and(|key| (key - percent).abs() < 1e-6);
        table.iter().find(|(key, _)| near(key)).map(|(_, value)| number(value) / 1000.0)
    };
    let bytes = option(&["bs", "blocksize"]);
    let first = bytes.split(',').next().unwrap_or_default();
    Row {
        jobname: job["jobname"].as_str().unwrap_or_default().to_string(),
        group: whole(&job["groupid"]),
        direction: direction.to_string(),
        rw: option(&["rw", "readwrite"]),
        bs_bytes: if first.is_empty() { 4096 } else { parse_bytes(first).unwrap_or(0) },
        engine: option(&["ioengine"]),
        iops: number(&side["iops"]),
        iops_sd: number(&side["iops_stddev"]),
        bw_mib_s: match side["bw_bytes"].as_f64() {
            Some(bytes) => bytes / 1048576.0,
            None => number(&side["bw"]) / 1024.0,
        },
        mean_us: number(&lat["mean"]) / 1000.0,
        sd_us: number(&lat["stddev"]) / 1000.0,
        clat_mean_us: number(&clat["mean"]) / 1000.0,
        slat_mean_us: number(&side["slat_ns"]["mean"]) / 1000.0,
        percentiles_us: PERCENTILES.map(percentile),
        max_us: number(if clat["max"].is_number() { &clat["max"] } else { &lat["max"] }) / 1000.0,
        cpu_usr_pct: number(&job["usr_cpu"]),
        cpu_sys_pct: number(&job["sys_cpu"]),
        ctx: whole(&job["ctx"]),
        procs: if grouped { option(&["numjobs"]).parse().unwrap_or(1).max(1) } else { 1 },
        qd: option(&["iodepth"]).parse().unwrap_or(1),
        error: job["error"].as_i64().unwrap_or(0),
    }
}

/// A switch of fio's: there and empty is on. What carries an index was not grouped.
fn switch(value: &str, indexed: bool) -> bool {
    !indexed && matches!(value, "1" | "true" | "")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

fn whole(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}
