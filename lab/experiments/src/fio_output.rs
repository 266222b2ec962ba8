//! Parses a generator's output, JSON of fio or of `ringbolt perf`, into metrics.

use serde_json::Value as Json;

use crate::record::{RoleRecord, TimelineSlice};

/// fio's keys of the stored percentiles, and their names in metrics.
const PERCENTILES: [(&str, &str); 6] = [
    ("50.000000", "p50"),
    ("90.000000", "p90"),
    ("95.000000", "p95"),
    ("99.000000", "p99"),
    ("99.900000", "p999"),
    ("99.990000", "p9999"),
];

/// Results of one group of jobs.
#[derive(Clone, Debug, Default)]
pub(crate) struct JobGroupResult {
    /// Name of the group's first job, which is the role.
    pub(crate) name: String,
    /// The metrics.
    pub(crate) record: RoleRecord,
    /// I/Os of all jobs.
    pub(crate) ios: f64,
    /// I/O errors of all jobs.
    pub(crate) errors: u64,
}

/// Parses the generator's version and the groups. `jobs_of` returns the number of jobs of a role.
///
/// # Errors
/// What is wrong with the text, as a sentence.
pub(crate) fn parse(
    text: &str,
    jobs_of: impl Fn(&str) -> u64,
) -> Result<(String, Vec<JobGroupResult>), String> {
    // fio writes warnings before its JSON.
    let begin = text.find('{').ok_or("the generator wrote no JSON")?;
    let document: Json =
        serde_json::from_str(&text[begin..]).map_err(|error| format!("the generator's JSON: {error}"))?;
    let version = document["fio version"].as_str().unwrap_or("unknown").to_string();
    let jobs = document["jobs"].as_array().ok_or("the generator's JSON has no jobs")?;
    let mut groups: Vec<JobGroupResult> = Vec::new();
    for job in jobs {
        let name = job["jobname"].as_str().unwrap_or("fg").to_string();
        let count = jobs_of(&name);
        groups.push(group(name, job, count));
    }
    if groups.is_empty() {
        return Err("the generator's JSON contains no job".to_string());
    }
    Ok((version, groups))
}

fn group(name: String, job: &Json, jobs: u64) -> JobGroupResult {
    let mut record = RoleRecord::default();
    let sides: Vec<&Json> =
        ["read", "write"].iter().map(|side| &job[*side]).filter(|side| count(side) > 0.0).collect();
    let sum = |field: &str| sides.iter().filter_map(|side| side[field].as_f64()).sum::<f64>();
    let ios: f64 = sides.iter().map(|side| count(side)).sum();
    record.set("iops", sum("iops"));
    record.set("bw_mib_s", sum("bw_bytes") / f64::from(1 << 20));
    if sides.len() > 1 {
        for side in ["read", "write"] {
            record.set(format!("{side}_iops"), job[side]["iops"].as_f64().unwrap_or(0.0));
        }
    }
    for kind in ["lat", "clat", "slat"] {
        latency(&mut record, kind, &sides);
    }
    if let Some(deviation) =
        sides.first().and_then(|side| side["iops_stddev"].as_f64()).filter(|sd| *sd > 0.0)
    {
        record.set("iops_stddev", deviation);
    }
    // fio reports percent of one CPU, averaged over the group's jobs.
    let cores = |field: &str| job[field].as_f64().map(|percent| percent * jobs as f64 / 100.0);
    if let (Some(user), Some(system)) = (cores("usr_cpu"), cores("sys_cpu")) {
        record.set("cpu_user_cores", user);
        record.set("cpu_system_cores", system);
        record.set("cpu_cores", user + system);
    }
    let seconds = job["job_runtime"].as_f64().unwrap_or(0.0) / 1e3 / jobs.max(1) as f64;
    if let Some(switches) = job["ctx"].as_f64().filter(|_| seconds > 0.0) {
        record.set("context_switches_per_s", switches / seconds);
    }
    record.timeline = job["timeline"].as_array().into_iter().flatten().filter_map(slice).collect();
    let errors =
        job["total_err"].as_u64().unwrap_or(0).max(job["error"].as_i64().unwrap_or(0).unsigned_abs());
    JobGroupResult { name, record, ios, errors }
}

/// An entry of `ringbolt perf`'s timeline: milliseconds, I/Os, then nanoseconds and I/Os alternately.
fn slice(entry: &Json) -> Option<TimelineSlice> {
    let numbers: Vec<u64> = entry[2].as_array()?.iter().map(Json::as_u64).collect::<Option<_>>()?;
    let clat = numbers.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
    Some(TimelineSlice { at_ms: entry[0].as_f64()?, ios: entry[1].as_u64()?, clat })
}

fn count(side: &Json) -> f64 {
    side["total_ios"].as_f64().unwrap_or(0.0)
}

/// Sets mean, standard deviation, maximum and percentiles. Percentiles are the generator's own for one direction, and
/// computed from the bins for two.
fn latency(record: &mut RoleRecord, kind: &str, sides: &[&Json]) {
    let table = |side: &Json| side[format!("{kind}_ns")].clone();
    let weighted: Vec<(f64, Json)> = sides
        .iter()
        .map(|side| table(side))
        .map(|table| (table["N"].as_f64().unwrap_or(0.0), table))
        .filter(|(weight, _)| *weight > 0.0)
        .collect();
    let all: f64 = weighted.iter().map(|(weight, _)| weight).sum();
    if all == 0.0 {
        return;
    }
    let mean =
        weighted.iter().map(|(weight, table)| weight * table["mean"].as_f64().unwrap_or(0.0)).sum::<f64>()
            / all;
    record.set(format!("{kind}_mean_us"), mean / 1e3);
    if kind == "slat" {
        return;
    }
    let largest = weighted.iter().filter_map(|(_, table)| table["max"].as_f64()).fold(0.0, f64::max);
    record.set(format!("{kind}_max_us"), largest / 1e3);
    if let [(_, table)] = weighted.as_slice() {
        record.set(format!("{kind}_stddev_us"), table["stddev"].as_f64().unwrap_or(0.0) / 1e3);
        for (percentile, name) in PERCENTILES {
            if let Some(ns) = table["percentile"][percentile].as_f64() {
                record.set(format!("{kind}_{name}_us"), ns / 1e3);
            }
        }
    }
    let mut bins: Vec<(u64, u64)> = Vec::new();
    for (_, table) in &weighted {
        let pairs = table["bins"].as_object().into_iter().flatten();
        bins.extend(pairs.filter_map(|(ns, count)| Some((ns.parse().ok()?, count.as_u64()?))));
    }
    bins.retain(|(_, count)| *count > 0);
    bins.sort_unstable();
    if bins.is_empty() {
        return;
    }
    if weighted.len() > 1 {
        for (percentile, name) in PERCENTILES {
            let percent: f64 = percentile.parse().unwrap_or(50.0);
            record.set(format!("{kind}_{name}_us"), at(&bins, percent) as f64 / 1e3);
        }
    }
    record.histograms.insert(kind.to_string(), bins);
}

/// The latency, in nanoseconds, at a percentile.
fn at(bins: &[(u64, u64)], percent: f64) -> u64 {
    let all: u64 = bins.iter().map(|(_, count)| count).sum();
    let wanted = (all as f64 * percent / 100.0).ceil() as u64;
    let mut seen = 0;
    for (ns, count) in bins {
        seen += count;
        if seen >= wanted {
            return *ns;
        }
    }
    bins.last().map_or(0, |(ns, _)| *ns)
}

#[cfg(test)]
mod tests;
