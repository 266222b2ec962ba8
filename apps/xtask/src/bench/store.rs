//! The replicated store, compared in the same run with a volume that is not replicated.
//!
//! Both are on loop devices in memory, and have the same load in turn: an image with two replicas, and a target with
//! `bdev_uring` over NVMe/TCP. Target, nodes and load generator sleep when they are idle. The ratios say what
//! replication costs on this machine.

mod ceph;
mod churn;
mod cluster;
mod faults;
mod large;

use std::time::Instant;

use anyhow::ensure;

use super::load::{self, IoPattern};
use super::metric::BenchMetric;
use super::process::describe;
use super::server::{TargetNamespaces, TargetServer, TargetTransport};
use super::{Measurement, RunContext, RunOutcome};

pub(super) use ceph::compare_ceph;
pub(super) use churn::measure_churn;
pub(super) use cluster::LoopCache;
use cluster::{ClusterOptions, LoopDevice, StoreCluster};
pub(super) use faults::{StoreFault, measure_fault};
pub(super) use large::measure_large;

/// Size of each loop device, and of the image.
const DEVICE_BYTES: u64 = 2 << 30;
const IMAGE: &str = "512m";

/// Loads an image with two replicas, in a pool of so many logical groups or the usual number, and the same device without
/// replication, in turn.
pub(super) fn compare(
    context: &RunContext<'_>,
    pattern: &IoPattern,
    cache: LoopCache,
    groups: Option<u32>,
) -> anyhow::Result<RunOutcome> {
    if let Some(skipped) = cluster::unavailable() {
        return Ok(skipped);
    }
    let device = || LoopDevice::create(context, cache, DEVICE_BYTES);
    let devices = [device()?, device()?];
    let plain = unreplicated(context, &devices[0], pattern)?;
    let options = ClusterOptions { devices: &devices, groups, image: IMAGE, ..ClusterOptions::default() };
    let cluster = StoreCluster::start(context, &options)?;
    let loaded = under_load(context, &cluster.uri(), pattern, &devices, || cluster.cpu_seconds())?;
    let mut commands = plain.commands;
    commands.extend([cluster.command.clone(), loaded.command]);
    cluster.end()?;

    let mut values = loaded.values;
    let ratio = |metric| Some(values.get(&metric)? / plain.values.get(&metric)?);
    let ratios = [
        (BenchMetric::PlainCpuRatio, ratio(BenchMetric::TargetCpuNs)),
        (BenchMetric::PlainLatencyRatio, ratio(BenchMetric::MeanUs)),
    ];
    values.extend(ratios.into_iter().filter_map(|(metric, ratio)| Some((metric, ratio?))));
    Ok(RunOutcome::measured(values, commands))
}

/// Loads an image with two replicas whose logs are on devices of their own, and counts what reaches the others.
pub(super) fn measure_separate_logs(
    context: &RunContext<'_>,
    pattern: &IoPattern,
) -> anyhow::Result<RunOutcome> {
    if let Some(skipped) = cluster::unavailable() {
        return Ok(skipped);
    }
    let device = || LoopDevice::create(context, LoopCache::None, DEVICE_BYTES);
    let (devices, logs) = ([device()?, device()?], [device()?, device()?]);
    let options =
        ClusterOptions { devices: &devices, logs: &logs, image: IMAGE, ..ClusterOptions::default() };
    let cluster = StoreCluster::start(context, &options)?;
    let loaded = under_load(context, &cluster.uri(), pattern, &devices, || cluster.cpu_seconds())?;
    let commands = vec![cluster.command.clone(), loaded.command];
    cluster.end()?;
    Ok(RunOutcome::measured(loaded.values, commands))
}

/// The load on a target whose namespace is a device.
fn unreplicated(
    context: &RunContext<'_>,
    device: &LoopDevice,
    pattern: &IoPattern,
) -> anyhow::Result<Measurement> {
    let namespaces = TargetNamespaces::Device(device.node.clone());
    let cores: Vec<String> = context.cores.iter().take(2).map(ToString::to_string).collect();
    let server = TargetServer::start(context, &cores.join(","), "sleep", &namespaces, TargetTransport::Tcp)?;
    let devices = std::slice::from_ref(device);
    let loaded = under_load(context, &server.uri(1), pattern, devices, || server.cpu_seconds())?;
    let commands = vec![server.command.clone(), loaded.command];
    server.end()?;
    Ok(Measurement { values: loaded.values, commands, ..Measurement::default() })
}

struct LoadedVolume {
    values: std::collections::BTreeMap<BenchMetric, f64>,
    command: String,
}

/// Writes the whole volume, then measures a load: also the servers' CPU time of an I/O, and the bytes that reached
/// each device for a byte of the load.
fn under_load(
    context: &RunContext<'_>,
    uri: &str,
    pattern: &IoPattern,
    devices: &[LoopDevice],
    cpu_seconds: impl Fn() -> anyhow::Result<f64>,
) -> anyhow::Result<LoadedVolume> {
    let fill = IoPattern { rw: "write", block: "128k", depth: 16 };
    let mut filling = load::base(context, uri, &fill);
    filling.arg(format!("--size={IMAGE}"));
    load::perf(context, &mut filling)?;
    // Both processors serve both, so that all sleep while they wait.
    let mut command = load::base(context, uri, pattern);
    let runtime = if context.quick { "1s" } else { "4s" };
    command.args([&format!("--size={IMAGE}"), "--time_based", "--idle=sleep"]);
    command.arg(format!("--runtime={runtime}"));
    let written = || devices.iter().map(LoopDevice::written_bytes).sum::<anyhow::Result<f64>>();
    let (begun, cpu_before, written_before) = (Instant::now(), cpu_seconds()?, written()?);
    let job = load::perf(context, &mut command)?;
    let seconds = begun.elapsed().as_secs_f64();
    let (cpu, written) = (cpu_seconds()? - cpu_before, written()? - written_before);
    let mut values = load::values(&job)?;
    let total: f64 = ["read", "write"].iter().filter_map(|side| job[*side]["total_ios"].as_f64()).sum();
    ensure!(total > 0.0 && seconds > 0.0, "the load generator did no I/O");
    values.insert(BenchMetric::TargetCpuNs, cpu / total * 1e9);
    if let Some(bytes) = job["write"]["io_bytes"].as_f64().filter(|bytes| *bytes > 0.0) {
        values.insert(BenchMetric::WriteAmplification, written / bytes / devices.len() as f64);
    }
    Ok(LoadedVolume { values, command: describe(&command) })
}
