//! Whether a store keeps its speed: random writes for minutes or hours, the first tenth of the time against the last.

use std::time::Duration;

use anyhow::Context;

use super::super::load::{self, IoPattern};
use super::super::metric::BenchMetric;
use super::super::process::describe;
use super::super::{RunContext, RunOutcome};
use super::cluster::{self, ClusterOptions, LoopCache, LoopDevice, StoreCluster};

const LOAD: IoPattern = IoPattern { rw: "randwrite", block: "4k", depth: 64 };
/// Without `--churn-seconds`.
const SECONDS: u64 = 180;
const SECONDS_QUICK: u64 = 30;
/// The first and the last of so many parts of the time are compared.
const PARTS: u64 = 10;
const DEVICE_BYTES: u64 = 4 << 30;
const IMAGE: &str = "1g";

/// Random writes at QD 64 to an image with two replicas, which has been written once.
pub(in crate::bench) fn measure_churn(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    if let Some(skipped) = cluster::unavailable() {
        return Ok(skipped);
    }
    let device = || LoopDevice::create(context, LoopCache::None, DEVICE_BYTES);
    let devices = [device()?, device()?];
    let options = ClusterOptions { devices: &devices, image: IMAGE, ..ClusterOptions::default() };
    let cluster = StoreCluster::start(context, &options)?;
    let uri = cluster.uri();
    load::fill(context, &uri)?;
    let seconds =
        context.churn_seconds.unwrap_or(if context.quick { SECONDS_QUICK } else { SECONDS }).max(PARTS);
    let part = seconds / PARTS;
    let mut commands = vec![cluster.command.clone()];
    let mut write = |seconds: u64| {
        let mut command = load::base(context, &uri, &LOAD);
        command.args(["--time_based", "--idle=sleep", &format!("--runtime={seconds}")]);
        commands.push(describe(&command));
        let job =
            load::start_perf(context, &command)?.finish_within(context, Duration::from_secs(seconds))?;
        let p99_ns = job["write"]["clat_ns"]["percentile"]["99.000000"].as_f64();
        Ok::<_, anyhow::Error>((load::values(&job)?, p99_ns.context("no percentile in the result")?))
    };
    let (first, first_p99_ns) = write(part)?;
    write(seconds - 2 * part)?;
    let (mut values, last_p99_ns) = write(part)?;
    values.insert(BenchMetric::ChurnRatio, values[&BenchMetric::Iops] / first[&BenchMetric::Iops]);
    values.insert(BenchMetric::ChurnP99Ratio, last_p99_ns / first_p99_ns);
    values.insert(BenchMetric::RssMib, cluster.resident_mib_max()?);
    cluster.end()?;
    Ok(RunOutcome::measured(values, commands))
}
