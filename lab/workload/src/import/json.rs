//! Parser of fio's JSON output, which may start anywhere in the text.

use serde_json::Value;

use super::{FioRow, ImportError, PERCENTILES};
use crate::units::parse_bytes;

/// The rows of the first JSON object with `jobs`; `None` if there is none.
pub(super) fn rows(text: &str) -> Option<Result<Vec<FioRow>, ImportError>> {
    let mut broken = None;
    // Searched once, as it is compared with every line.
    let last_version = text.rfind("\"fio version\"");
    // fio prints warnings and, with two output formats, its text before the object, which always starts a
    // line.
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

fn document_rows(document: &Value) -> Vec<FioRow> {
    let global = &document["global options"];
    let jobs = document["jobs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut rows = Vec::new();
    for (index, job) in jobs.iter().enumerate() {
        let first = rows.len();
        for direction in ["read", "write", "trim", "mixed"] {
            if integer(&job[direction]["total_ios"]) > 0 {
                rows.push(FioRow { job: index, ..row(job, global, direction) });
            }
        }
        if rows.len() == first && error(job) != 0 {
            rows.push(FioRow { job: index, ..row(job, global, "") });
        }
    }
    rows
}

fn row(job: &Value, global: &Value, direction: &str) -> FioRow {
    let option = |names: &[&str]| {
        let option_maps = [&job["job options"], global];
        let found =
            option_maps.iter().find_map(|options| names.iter().find_map(|name| options[name].as_str()));
        found.unwrap_or_default().to_string()
    };
    let grouped = is_on(&option(&["group_reporting"]), !job["job_index"].is_null());
    let stats = &job[direction];
    let (lat, clat) = (&stats["lat_ns"], &stats["clat_ns"]);
    let with_table = [clat, lat].into_iter().find(|latency| latency["percentile"].is_object());
    let percentile = |percent: f64| {
        let table = with_table?["percentile"].as_object()?;
        let near = |key: &str| key.parse::<f64>().is_ok_and(|key| (key - percent).abs() < 1e-6);
        table.iter().find(|(key, _)| near(key)).map(|(_, value)| number(value) / 1000.0)
    };
    let bytes = option(&["bs", "blocksize"]);
    let first = bytes.split(',').next().unwrap_or_default();
    FioRow {
        job: 0,
        jobname: job["jobname"].as_str().unwrap_or_default().to_string(),
        group: integer(&job["groupid"]),
        direction: direction.to_string(),
        rw: option(&["rw", "readwrite"]),
        bs_bytes: if first.is_empty() { 4096 } else { parse_bytes(first).unwrap_or(0) },
        engine: option(&["ioengine"]),
        iops: number(&stats["iops"]),
        iops_sd: number(&stats["iops_stddev"]),
        bw_mib_s: match stats["bw_bytes"].as_f64() {
            Some(bytes) => bytes / 1048576.0,
            None => number(&stats["bw"]) / 1024.0,
        },
        mean_us: number(&lat["mean"]) / 1000.0,
        sd_us: number(&lat["stddev"]) / 1000.0,
        clat_mean_us: number(&clat["mean"]) / 1000.0,
        slat_mean_us: number(&stats["slat_ns"]["mean"]) / 1000.0,
        percentiles_us: PERCENTILES.map(percentile),
        max_us: number(if clat["max"].is_number() { &clat["max"] } else { &lat["max"] }) / 1000.0,
        cpu_usr_pct: number(&job["usr_cpu"]),
        cpu_sys_pct: number(&job["sys_cpu"]),
        ctx: integer(&job["ctx"]),
        procs: if grouped { option(&["numjobs"]).parse().unwrap_or(1).max(1) } else { 1 },
        qd: option(&["iodepth"]).parse().unwrap_or(1),
        error: error(job),
        io_errors: integer(&job["total_err"]),
    }
}

fn error(job: &Value) -> i64 {
    job["error"].as_i64().unwrap_or(0)
}

/// Whether a boolean option of fio is on: present without a value counts. A job with an index is not grouped.
fn is_on(value: &str, indexed: bool) -> bool {
    !indexed && matches!(value, "1" | "true" | "")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

fn integer(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}
