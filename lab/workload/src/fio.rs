//! Results in fio's JSON, so that what reads fio's output reads ours.
//!
//! The shape is that of `fio --output-format=json` (fio 3.x), for the fields that mean something here.
//! What is not measured is 0, as fio has it: submission latency (`slat_ns`) is part of `clat_ns`.

use serde_json::{Map, Value, json};
use sys::clock;

use crate::result::{Direction, JobResult, SideResult};
use crate::spec::JobSpec;

/// fio's default percentiles.
const PERCENTILES: [f64; 17] =
    [1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99];

/// The whole document. `now` is the time of day of the report.
pub fn document(results: &[JobResult], filename: &str, now: std::time::SystemTime) -> Value {
    let since_epoch = now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    json!({
        "fio version": concat!("ringbolt-", env!("CARGO_PKG_VERSION")),
        "timestamp": since_epoch.as_secs(),
        "timestamp_ms": since_epoch.as_millis() as u64,
        "time": format!("{} s since 1970-01-01 UTC", since_epoch.as_secs()),
        "global options": { "ioengine": "ringbolt", "filename": filename },
        "jobs": results.iter().enumerate().map(|(number, result)| job(number, result)).collect::<Vec<_>>(),
    })
}

fn job(number: usize, result: &JobResult) -> Value {
    let elapsed_ns = result.elapsed_ns();
    // Merged jobs ran beside each other: their processor time is out of all their time.
    let thread_ns = (elapsed_ns * u64::from(result.jobs)).max(1) as f64;
    let mut job = Map::new();
    job.insert("jobname".into(), json!(result.spec.name));
    job.insert("groupid".into(), json!(0));
    if result.jobs == 1 {
        job.insert("job_index".into(), json!(number));
    }
    job.insert("error".into(), json!(i32::from(!result.is_clean()) * EIO));
    job.insert("eta".into(), json!(0));
    job.insert("elapsed".into(), json!(elapsed_ns.div_ceil(1_000_000_000)));
    job.insert("job options".into(), options(&result.spec));
    for direction in Direction::ALL {
        job.insert(direction.name().into(), side(result.side(direction)));
    }
    job.insert("sync".into(), json!({ "total_ios": 0, "lat_ns": unmeasured() }));
    job.insert("job_runtime".into(), json!(elapsed_ns / 1_000_000 * u64::from(result.jobs)));
    job.insert("usr_cpu".into(), json!(percent(user_ns(result), thread_ns)));
    job.insert("sys_cpu".into(), json!(percent(result.usage.cpu_ns as f64 - user_ns(result), thread_ns)));
    job.insert("ctx".into(), json!(result.usage.switches));
    job.insert("majf".into(), json!(result.usage.major_faults));
    job.insert("minf".into(), json!(result.usage.minor_faults));
    job.insert("iodepth_level".into(), depths(result.spec.io_depth));
    for name in ["iodepth_submit", "iodepth_complete"] {
        let levels = ["0", "4", "8", "16", "32", "64", ">=64"].map(|level| (level.to_string(), json!(0.0)));
        job.insert(name.into(), Value::Object(levels.into_iter().collect()));
    }
    for (name, table) in spread(result) {
        job.insert(name.into(), table);
    }
    job.insert("latency_depth".into(), json!(result.spec.io_depth));
    job.insert("latency_target".into(), json!(0));
    job.insert("latency_percentile".into(), json!(100.0));
    job.insert("latency_window".into(), json!(0));
    job.insert("total_err".into(), json!(result.errors));
    job.insert("verify_errors".into(), json!(result.mismatch_count));
    job.insert("cpu_ns_per_io".into(), json!(result.cpu_ns_per_io()));
    Value::Object(job)
}

const EIO: i32 = 5;

/// The exact processor time, shared out as the kernel's coarse ticks say.
fn user_ns(result: &JobResult) -> f64 {
    let usage = result.usage;
    match usage.user_ns + usage.system_ns {
        0 => usage.cpu_ns as f64,
        both => usage.cpu_ns as f64 * usage.user_ns as f64 / both as f64,
    }
}

fn percent(part: f64, whole: f64) -> f64 {
    (part / whole * 100.0).clamp(0.0, 100.0)
}

fn options(spec: &JobSpec) -> Value {
    let mut options = Map::new();
    let mut put = |name: &str, value: String| options.insert(name.to_string(), Value::String(value));
    put("name", spec.name.clone());
    put("rw", spec.workload.name().to_string());
    put("bs", spec.block_bytes.to_string());
    put("iodepth", spec.io_depth.to_string());
    put("randseed", spec.seed.to_string());
    if let Some(size) = spec.size_bytes {
        put("size", size.to_string());
    }
    if let Some(runtime) = spec.runtime_ns {
        put("runtime", format!("{}ms", runtime / 1_000_000));
    }
    if spec.time_based {
        put("time_based", "1".to_string());
    }
    Value::Object(options)
}

fn side(side: &SideResult) -> Value {
    json!({
        "io_bytes": side.bytes,
        "io_kbytes": side.bytes >> 10,
        "bw_bytes": side.bytes_per_second() as u64,
        "bw": side.bytes_per_second() as u64 >> 10,
        "iops": side.iops(),
        "runtime": if side.total_ios == 0 { 0 } else { side.elapsed_ns / 1_000_000 },
        "total_ios": side.total_ios,
        "short_ios": 0,
        "drop_ios": side.errors,
        "slat_ns": unmeasured(),
        "clat_ns": latency(side, true),
        "lat_ns": latency(side, false),
        "bw_min": 0, "bw_max": 0, "bw_agg": 0.0, "bw_mean": 0.0, "bw_dev": 0.0, "bw_samples": 0,
        "iops_min": 0, "iops_max": 0, "iops_mean": 0.0, "iops_stddev": 0.0, "iops_samples": 0,
    })
}

fn latency(side: &SideResult, percentiles: bool) -> Value {
    let histogram = &side.latency_ticks;
    // Means are fractions of a tick, so they are scaled in floating point.
    let scale = clock::ticks_to_ns(1 << 32) as f64 / (1u64 << 32) as f64;
    let mut latency = json!({
        "min": clock::ticks_to_ns(histogram.min()),
        "max": clock::ticks_to_ns(histogram.max()),
        "mean": histogram.mean() * scale,
        "stddev": histogram.deviation() * scale,
        "N": histogram.count(),
    });
    if percentiles && histogram.count() > 0 {
        let table = PERCENTILES.iter().map(|percent| {
            let ns = clock::ticks_to_ns(histogram.percentile(*percent));
            (format!("{percent:.6}"), json!(ns))
        });
        latency["percentile"] = Value::Object(table.collect());
    }
    latency
}

/// What fio measures and we do not.
fn unmeasured() -> Value {
    json!({ "min": 0, "max": 0, "mean": 0.0, "stddev": 0.0, "N": 0 })
}

/// fio's tables of how many percent of the I/Os took at most so long, in three units.
fn spread(result: &JobResult) -> [(&'static str, Value); 3] {
    const STEPS: [u64; 10] = [2, 4, 10, 20, 50, 100, 250, 500, 750, 1000];
    let mut all = crate::Histogram::new();
    result.sides.iter().for_each(|side| all.merge(&side.latency_ticks));
    let count = all.count().max(1) as f64;
    // The shortest last, to be taken off the end.
    let mut left: Vec<(u64, u64)> =
        all.iter().map(|(ticks, count)| (clock::ticks_to_ns(ticks), count)).collect();
    left.reverse();
    let mut table = |unit_ns: u64, steps: &[u64]| {
        let mut table = Map::new();
        for step in steps {
            let mut within = 0;
            while let Some((ns, count)) = left.last()
                && *ns <= step.saturating_mul(unit_ns)
            {
                within += count;
                left.pop();
            }
            table.insert(step.to_string(), json!(within as f64 / count * 100.0));
        }
        table
    };
    let (ns, us) = (table(1, &STEPS), table(1_000, &STEPS));
    let mut ms = table(1_000_000, &[&STEPS, [2000].as_slice()].concat());
    let beyond: u64 = left.iter().map(|(_, count)| count).sum();
    ms.insert(">=2000".to_string(), json!(beyond as f64 / count * 100.0));
    [("latency_ns", Value::Object(ns)), ("latency_us", Value::Object(us)), ("latency_ms", Value::Object(ms))]
}

/// fio's table of how deep the queue was: ours is as deep as asked for, always.
fn depths(depth: u32) -> Value {
    let full = match depth {
        0..=1 => "1",
        2..=3 => "2",
        4..=7 => "4",
        8..=15 => "8",
        16..=31 => "16",
        32..=63 => "32",
        _ => ">=64",
    };
    let levels = ["1", "2", "4", "8", "16", "32", ">=64"];
    Value::Object(
        levels
            .iter()
            .map(|level| (level.to_string(), json!(if *level == full { 100.0 } else { 0.0 })))
            .collect(),
    )
}

#[cfg(test)]
mod tests;
