//! What clients of the store notice when a node is lost, comes back, or its replicas move.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::{Signal, kill_process};

use super::super::load::{self, IoPattern};
use super::super::metric::BenchMetric;
use super::super::process::describe;
use super::super::{RunContext, RunOutcome};
use super::cluster::{self, ClusterOptions, LoopCache, LoopDevice, StoreCluster};

/// What happens to one of three nodes under load.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::bench) enum StoreFault {
    /// SIGKILL; `ringbolt store up` starts it again.
    Kill,
    /// SIGSTOP, and SIGCONT after [`STOPPED`].
    Stop,
    /// The operator stops it, and starts it again after [`STOPPED`].
    Maintenance,
    /// The operator takes it out: its replicas are copied to other nodes.
    Out,
}

const LOAD: IoPattern = IoPattern { rw: "randwrite", block: "4k", depth: 16 };
/// How long a stopped node is stopped.
const STOPPED: Duration = Duration::from_secs(2);
/// Before the node is lost.
const BEFORE: Duration = Duration::from_secs(1);
/// A cluster that is healthy for so long has recovered: a lost node may not be noticed for its lease.
const STEADY: Duration = Duration::from_secs(1);
/// How often a recovery is looked at.
const POLL: Duration = Duration::from_millis(50);
/// The same while clients' latencies are compared with those before: `store status` is a process of its own, which takes
/// processor time that is none of a copy's.
const POLL_OF_COPY: Duration = Duration::from_secs(1);
const RECOVERY_MAX: Duration = Duration::from_secs(120);
/// The node: not the first, which may be the primary of more groups.
const VICTIM: usize = 1;

/// Random writes at QD 16 to an image with two replicas on three nodes, while one of these is lost or taken out.
pub(in crate::bench) fn measure_fault(
    context: &RunContext<'_>,
    fault: StoreFault,
) -> anyhow::Result<RunOutcome> {
    if let Some(skipped) = cluster::unavailable() {
        return Ok(skipped);
    }
    let (image, device_bytes) = if context.quick { ("512m", 2 << 30) } else { ("4g", 12 << 30) };
    let device = || LoopDevice::create(context, LoopCache::None, device_bytes);
    let devices = [device()?, device()?, device()?];
    let options = ClusterOptions { devices: &devices, spare: 8, image, ..ClusterOptions::default() };
    let cluster = StoreCluster::start(context, &options)?;
    let uri = cluster.uri();
    load::fill(context, &uri)?;
    // A replica that fell behind meanwhile gets a copy, which would be measured instead.
    recovery(context, &cluster, POLL)?;
    let mut command = load::base(context, &uri, &LOAD);
    command.args(["--time_based", "--idle=sleep", "--runtime=8"]);
    let mut commands = vec![cluster.command.clone(), describe(&command)];

    let p99_us = |job: &serde_json::Value| {
        let p99_ns = job["write"]["clat_ns"]["percentile"]["99.000000"].as_f64();
        Ok::<_, anyhow::Error>(p99_ns.context("no percentile in the result")? / 1e3)
    };
    let undisturbed_us = match fault {
        StoreFault::Out => Some(p99_us(&load::perf(context, &mut command)?)?),
        StoreFault::Kill | StoreFault::Stop | StoreFault::Maintenance => None,
    };
    let running = load::start_perf(context, &command)?;
    std::thread::sleep(BEFORE);
    let node = *cluster.nodes()?.get(VICTIM).context("too few nodes")?;
    let number = (VICTIM + 1).to_string();
    match fault {
        StoreFault::Kill => kill_process(node, Signal::KILL)?,
        StoreFault::Stop => {
            kill_process(node, Signal::STOP)?;
            std::thread::sleep(STOPPED);
            kill_process(node, Signal::CONT)?;
        }
        StoreFault::Maintenance => {
            cluster.run(context, &["store", "stop-node", &number])?;
            std::thread::sleep(STOPPED);
            cluster.run(context, &["store", "start-node", &number])?;
        }
        StoreFault::Out => drop(cluster.run(context, &["store", "out", &number])?),
    }
    let poll = if fault == StoreFault::Out { POLL_OF_COPY } else { POLL };
    let recovered_ms = recovery(context, &cluster, poll)?.as_secs_f64() * 1e3;
    let job = running.finish(context)?;
    commands.push(format!(
        "{} of node {number}",
        match fault {
            StoreFault::Kill => "SIGKILL",
            StoreFault::Stop => "SIGSTOP, SIGCONT",
            StoreFault::Maintenance => "ringbolt store stop-node, start-node",
            StoreFault::Out => "ringbolt store out",
        }
    ));
    cluster.end()?;

    let longest_ns = job["write"]["clat_ns"]["max"].as_f64().context("no latency in the result")?;
    let mut values = load::values(&job)?;
    values.insert(BenchMetric::StallMs, longest_ns / 1e6);
    match undisturbed_us {
        Some(undisturbed_us) => {
            values.insert(BenchMetric::MovedMs, recovered_ms);
            values.insert(BenchMetric::CopyP99Ratio, p99_us(&job)? / undisturbed_us);
        }
        None => drop(values.insert(BenchMetric::RecoveryMs, recovered_ms)),
    }
    Ok(RunOutcome::measured(values, commands))
}

/// Waits until all groups are healthy and nothing moves, and stays so. Returns how long that took.
fn recovery(context: &RunContext<'_>, cluster: &StoreCluster, poll: Duration) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let mut healthy_since = None;
    loop {
        let asked = begun.elapsed();
        let status = cluster.status(context)?;
        if status["healthy"] != true || status["moving"] != 0 {
            healthy_since = None;
        } else if asked.saturating_sub(*healthy_since.get_or_insert(asked)) >= STEADY {
            return Ok(healthy_since.unwrap_or(asked));
        }
        ensure!(asked < RECOVERY_MAX, "it does not recover: {}", status["summary"]);
        std::thread::sleep(poll);
    }
}
