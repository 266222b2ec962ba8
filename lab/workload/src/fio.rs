//! Results in fio's JSON format, for tools that read fio's output.
//!
//! The structure is that of `fio --output-format=json` (fio 3.x), with the fields that apply here. If
//! submission is not measured, `slat_ns` is 0 and `clat_ns` includes it, as in fio for synchronous engines.
//! `lat_ns` counts from the scheduled start of an I/O: in an open loop that is before its submission if the
//! device or the I/O depth delayed it. The fields `generator_cost_ns_per_io`, `cpu_ns_per_io`,
//! `sqpoll_cpu_ns`, `io_workers_cpu_ns`, `kernel_workers_cpu_ns`, `submission`, `open_loop` and `timeline` are extensions.

mod terse;

pub use terse::{TERSE_VERSIONS, terse};

use os::clock;
use serde_json::{Map, Value, json};

use crate::devices::DiskStats;
use crate::jobfile::PerfJob;
use crate::result::{DepthCounts, Direction, DirectionResult, JobResult};
use crate::steady::{SteadyOptions, SteadyResult};
use crate::timeline::TimelineEntry;

/// One entry of the document's `jobs`.
#[derive(Clone, Debug)]
pub struct ReportedJob {
    /// The job and its options.
    pub job: PerfJob,
    /// Reporting group.
    pub group: u32,
    /// Index among all copies of all jobs; `None` for a group.
    pub index: Option<usize>,
    /// Measurements.
    pub result: JobResult,
    /// Cost of the generator in processor nanoseconds per I/O; `None` if not measured.
    pub generator_cost_ns: Option<f64>,
}

/// A run with everything that is reported.
#[derive(Clone, Debug)]
pub struct RunReport {
    /// Options of all jobs.
    pub globals: Vec<(String, String)>,
    /// Jobs or reporting groups.
    pub jobs: Vec<ReportedJob>,
    /// Each disk's name, its counters during the run, and the length of the run in milliseconds.
    pub disks: Vec<(String, DiskStats, u64)>,
    /// Processor time of all kernel workers of the host during the run.
    pub kernel_workers_ns: u64,
    /// Time of the report.
    pub at: std::time::SystemTime,
}

/// The whole document; `plus` adds the histograms' buckets (`bins`), as fio's `json+` does.
pub fn document(run: &RunReport, plus: bool) -> Value {
    let since_epoch = run.at.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let mut document = json!({
        "fio version": concat!("ringbolt-", env!("CARGO_PKG_VERSION")),
        "timestamp": since_epoch.as_secs(),
        "timestamp_ms": since_epoch.as_millis() as u64,
        "time": clock::local_time_text(since_epoch.as_secs()),
        "global options": pairs(&run.globals),
        "jobs": run.jobs.iter().map(|reported| job(reported, plus)).collect::<Vec<_>>(),
        "kernel_workers_cpu_ns": run.kernel_workers_ns,
    });
    if !run.disks.is_empty() {
        document["disk_util"] = run.disks.iter().map(disk).collect();
    }
    document
}

fn pairs(options: &[(String, String)]) -> Value {
    Value::Object(options.iter().map(|(name, value)| (name.clone(), json!(value))).collect())
}

fn disk((name, stats, elapsed_ms): &(String, DiskStats, u64)) -> Value {
    json!({
        "name": name,
        "read_ios": stats.ios[0],
        "write_ios": stats.ios[1],
        "read_merges": stats.merges[0],
        "write_merges": stats.merges[1],
        "read_ticks": stats.ticks[0],
        "write_ticks": stats.ticks[1],
        "in_queue": stats.queue_ms,
        "util": percent(stats.busy_ms as f64, (*elapsed_ms).max(1) as f64),
    })
}

/// Which latencies of a job are reported with percentiles: submission, completion, total.
pub fn percentiles_of(job: &PerfJob) -> [bool; 3] {
    let closed = job.spec.rates.is_closed_loop();
    let [submission, completion, whole] = job.percentiles_of;
    [submission.unwrap_or(false), completion.unwrap_or(closed), whole.unwrap_or(!closed)]
}

fn job(reported: &ReportedJob, plus: bool) -> Value {
    let ReportedJob { job: job_options, result, .. } = reported;
    let elapsed_ns = result.elapsed_ns();
    // Merged jobs ran concurrently: processor time is relative to the sum of their times.
    let thread_ns = (elapsed_ns * u64::from(result.jobs)).max(1) as f64;
    let mut job = Map::new();
    job.insert("jobname".into(), json!(result.spec.name));
    job.insert("groupid".into(), json!(reported.group));
    if let Some(index) = reported.index {
        job.insert("job_index".into(), json!(index));
    }
    job.insert("error".into(), json!(i32::from(!result.is_clean()) * EIO));
    job.insert("eta".into(), json!(0));
    job.insert("elapsed".into(), json!((elapsed_ns + result.spec.ramp_ns).div_ceil(1_000_000_000)));
    let mut options = pairs(&job_options.options);
    options["name"] = json!(result.spec.name);
    job.insert("job options".into(), options);
    if !job_options.description.is_empty() {
        job.insert("desc".into(), json!(job_options.description));
    }
    let format =
        LatencyFormat { percentiles: &job_options.percentiles, of: percentiles_of(job_options), plus };
    if job_options.unified {
        job.insert("mixed".into(), side(&result.unified(), &format));
    } else {
        for direction in Direction::ALL {
            job.insert(direction.name().into(), side(result.direction(direction), &format));
        }
    }
    let lat = latency(&result.sync.latency_ticks, &format, true);
    job.insert("sync".into(), json!({ "total_ios": result.sync.total_ios, "lat_ns": lat }));
    job.insert("job_runtime".into(), json!(elapsed_ns / 1_000_000 * u64::from(result.jobs)));
    job.insert("usr_cpu".into(), json!(percent(user_ns(result), thread_ns)));
    job.insert("sys_cpu".into(), json!(percent(result.usage.cpu_ns as f64 - user_ns(result), thread_ns)));
    job.insert("ctx".into(), json!(result.usage.switches));
    job.insert("majf".into(), json!(result.usage.major_faults));
    job.insert("minf".into(), json!(result.usage.minor_faults));
    let DepthCounts { level, submit, complete } = &result.depths;
    job.insert("iodepth_level".into(), percentages(["1", "2", "4", "8", "16", "32", ">=64"], level));
    let sizes = ["0", "4", "8", "16", "32", "64", ">=64"];
    job.insert("iodepth_submit".into(), percentages(sizes, submit));
    job.insert("iodepth_complete".into(), percentages(sizes, complete));
    for (name, table) in latency_distribution(result) {
        job.insert(name.into(), table);
    }
    let target = result.spec.latency_target;
    job.insert("latency_depth".into(), json!(result.latency_depth.unwrap_or(result.spec.io_depth as usize)));
    job.insert("latency_target".into(), json!(target.map_or(0, |target| target.target_ns / 1000)));
    job.insert("latency_percentile".into(), json!(target.map_or(100.0, |target| target.percentile)));
    job.insert("latency_window".into(), json!(target.map_or(0, |target| target.window_ns / 1000)));
    if let (Some(options), Some(steady)) = (&result.spec.steady, &result.steady) {
        job.insert("steadystate".into(), steady_state(options, steady));
    }
    if !result.timeline.is_empty() {
        job.insert("timeline".into(), result.timeline.iter().map(timeline_entry).collect());
    }
    job.insert("total_err".into(), json!(result.errors));
    // fio has it where a job may continue after errors.
    let first_error = result.failures.first().map_or(0, |failure| failure.status.to_errno().0);
    job.insert("first_error".into(), json!(first_error));
    job.insert("verify_errors".into(), json!(result.mismatch_count));
    job.insert("cpu_ns_per_io".into(), json!(result.cpu_ns_per_io()));
    job.insert("numjobs".into(), json!(result.jobs));
    if let Some(resets) = result.zone_resets {
        job.insert("zone_resets".into(), json!(resets));
    }
    let config = &job_options.engine_config;
    let single = (config.batch_max, config.reap_max) == (1, 1);
    let submission = json!({
        "mode": if single { "one at a time" } else { "batches" },
        "iodepth_batch_submit": config.batch_max,
        "iodepth_batch_complete_max": config.reap_max,
    });
    job.insert("submission".into(), submission);
    job.insert("open_loop".into(), json!(!result.spec.rates.is_closed_loop()));
    if let Some(cost) = reported.generator_cost_ns {
        job.insert("generator_cost_ns_per_io".into(), json!(cost));
    }
    job.insert("sqpoll_cpu_ns".into(), json!(result.kernel.submission_ns));
    job.insert("io_workers_cpu_ns".into(), json!(result.kernel.workers_ns));
    Value::Object(job)
}

/// Milliseconds, I/Os, and completion latencies as nanoseconds and I/Os alternately.
fn timeline_entry(entry: &TimelineEntry) -> Value {
    let completions: Vec<u64> = entry.completions.iter().flat_map(|(ns, count)| [*ns, *count]).collect();
    json!([entry.at_ns as f64 / 1e6, entry.ios, completions])
}

fn steady_state(options: &SteadyOptions, steady: &SteadyResult) -> Value {
    let criterion = options.criterion;
    let unit = if criterion.in_percent { "%" } else { "" };
    // fio divides by the number of samples that it waits for.
    let mean = |samples: &[u64]| samples.iter().sum::<u64>() / u64::from(options.duration_s);
    json!({
        "ss": format!("{}:{:.6}{unit}", criterion.metric(), criterion.limit),
        "duration": options.duration_s,
        "attained": i32::from(steady.attained),
        "criterion": format!("{:.6}{unit}", steady.criterion),
        "max_deviation": steady.deviation_max,
        "slope": steady.slope,
        "data": {
            "bw_mean": mean(&steady.bandwidth),
            "iops_mean": mean(&steady.iops),
            "iops": steady.iops,
            "bw": steady.bandwidth,
        },
    })
}

/// Options of the format of latencies.
struct LatencyFormat<'a> {
    percentiles: &'a [f64],
    of: [bool; 3],
    plus: bool,
}

const EIO: i32 = 5;

/// The part of the exact processor time in user space, in the ratio of the kernel's coarse counters.
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

/// Latencies by I/O priority, where there are several, as fio has them.
fn priorities(side: &DirectionResult, format: &LatencyFormat<'_>) -> Option<Value> {
    let name = if format.of[2] { "lat_ns" } else { "clat_ns" };
    let used: Vec<_> = side.priorities.iter().filter(|(_, latencies)| latencies.count() > 0).collect();
    let object = |(priority, latencies): &&(u16, crate::Histogram)| {
        let latencies = latency(latencies, format, format.of[1] || format.of[2]);
        let mut object = json!({ "prioclass": priority >> 13, "prio": priority & 7, name: latencies });
        let hint = priority >> 3 & 0x3ff;
        if hint > 0 {
            // As later versions of fio have it.
            object["priohint"] = json!(hint);
        }
        object
    };
    (used.len() > 1).then(|| used.iter().map(object).collect())
}

fn side(side: &DirectionResult, format: &LatencyFormat<'_>) -> Value {
    let (bandwidth, iops) = (&side.bandwidth_samples, &side.iops_samples);
    let mut object = json!({
        "io_bytes": side.bytes,
        "io_kbytes": side.bytes >> 10,
        "bw_bytes": side.bytes_per_second() as u64,
        "bw": side.bytes_per_second() as u64 >> 10,
        "iops": side.iops(),
        "runtime": if side.total_ios == 0 { 0 } else { side.elapsed_ns / 1_000_000 },
        "total_ios": side.total_ios,
        "short_ios": 0,
        "drop_ios": side.errors,
        "slat_ns": latency(&side.submission_ticks, format, format.of[0]),
        "clat_ns": latency(&side.completion_ticks, format, format.of[1]),
        "lat_ns": latency(&side.latency_ticks, format, format.of[2]),
        "bw_min": bandwidth.min as u64,
        "bw_max": bandwidth.max as u64,
        "bw_agg": if bandwidth.count == 0 { 0.0 } else { 100.0 },
        "bw_mean": bandwidth.mean(),
        "bw_dev": bandwidth.deviation(),
        "bw_samples": bandwidth.count,
        "iops_min": iops.min as u64,
        "iops_max": iops.max as u64,
        "iops_mean": iops.mean(),
        "iops_stddev": iops.deviation(),
        "iops_samples": iops.count,
    });
    if let Some(priorities) = priorities(side, format) {
        object["prios"] = priorities;
    }
    object
}

fn latency(histogram: &crate::Histogram, format: &LatencyFormat<'_>, percentiles: bool) -> Value {
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
        let table = format.percentiles.iter().map(|percent| {
            let ns = clock::ticks_to_ns(histogram.percentile(*percent));
            (format!("{percent:.6}"), json!(ns))
        });
        latency["percentile"] = Value::Object(table.collect());
        if format.plus {
            let mut bins = Map::new();
            for (ticks, count) in histogram.iter() {
                let ns = clock::ticks_to_ns(ticks).to_string();
                // Two buckets of ticks may round to the same nanosecond.
                let before = bins.get(&ns).and_then(Value::as_u64).unwrap_or(0);
                bins.insert(ns, json!(before + count));
            }
            latency["bins"] = Value::Object(bins);
        }
    }
    latency
}

/// fio's latency distribution tables: percentages of I/Os by latency, in ns, us and ms.
fn latency_distribution(result: &JobResult) -> [(&'static str, Value); 3] {
    const STEPS: [u64; 10] = [2, 4, 10, 20, 50, 100, 250, 500, 750, 1000];
    let mut all = crate::Histogram::new();
    result.directions.iter().for_each(|side| all.merge(&side.latency_ticks));
    let count = all.count().max(1) as f64;
    // In descending order, so that the shortest can be popped.
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

/// fio's tables of depths and batch sizes: percentages, of which any above 0 is at least 0.1.
fn percentages(names: [&str; 7], counts: &[u64; 7]) -> Value {
    let total = counts.iter().sum::<u64>().max(1) as f64;
    let share = |count: u64| if count == 0 { 0.0 } else { (count as f64 / total * 100.0).max(0.1) };
    let shares = names.into_iter().zip(counts).map(|(name, count)| (name.to_string(), json!(share(*count))));
    Value::Object(shares.collect())
}

#[cfg(test)]
mod tests;
