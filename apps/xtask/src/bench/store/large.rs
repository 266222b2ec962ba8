//! A node with a large image: its memory under random writes over all of it, and how soon it is ready again when it is
//! killed meanwhile.

use std::time::Duration;

use anyhow::Context;

use super::super::load::{self, IoPattern};
use super::super::metric::BenchMetric;
use super::super::process::describe;
use super::super::{RunContext, RunOutcome};
use super::cluster::{self, ClusterOptions, LoopCache, LoopDevice, StoreCluster};

const LOAD: IoPattern = IoPattern { rw: "randwrite", block: "4k", depth: 128 };
/// Sparse files: what is written takes memory.
const DEVICE_BYTES: u64 = 300 << 30;
const IMAGE: &str = "240g";
const WRITES: &str = "--number_ios=200000";
/// More than the loads write to data, logs and metadata.
const MEMORY_MIN: u64 = 8 << 30;
/// Before the node is killed.
const BEFORE: Duration = Duration::from_secs(2);

/// Random writes at QD 128 to an image of 240 GiB, all of it allocated, on one node.
pub(in crate::bench) fn measure_large(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    if let Some(skipped) = cluster::unavailable() {
        return Ok(skipped);
    }
    let free = cluster::free_bytes()?;
    if free < MEMORY_MIN {
        let reason = format!("{} GiB of /dev/shm are free, {} are needed", free >> 30, MEMORY_MIN >> 30);
        return Ok(RunOutcome::Skipped(reason));
    }
    let devices = [LoopDevice::create(context, LoopCache::None, DEVICE_BYTES)?];
    let options =
        ClusterOptions { devices: &devices, image: IMAGE, preallocate: true, ..ClusterOptions::default() };
    let mut cluster = StoreCluster::start(context, &options)?;
    let uri = cluster.uri();
    let mut command = load::base(context, &uri, &LOAD);
    command.args(["--idle=sleep", WRITES]);
    let mut commands = vec![cluster.command.clone(), describe(&command)];
    let job = load::perf(context, &mut command)?;
    let mut values = load::values(&job)?;
    values.insert(BenchMetric::RssMib, cluster.resident_mib_max()?);

    let mut command = load::base(context, &uri, &LOAD);
    command.args(["--idle=sleep", "--time_based", "--runtime=60"]);
    commands.extend([describe(&command), "SIGKILL".to_string(), cluster.command.clone()]);
    let running = load::start_perf(context, &command)?;
    std::thread::sleep(BEFORE);
    let start = cluster.kill_and_start(context).context("after SIGKILL")?;
    drop(running);
    values.insert(BenchMetric::StartMs, start.as_secs_f64() * 1e3);
    cluster.end()?;
    Ok(RunOutcome::measured(values, commands))
}
