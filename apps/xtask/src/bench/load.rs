//! Benchmarks with `ringbolt perf`.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::server::{TargetNamespaces, TargetServer, TargetTransport};
use super::{Measurement, RunContext, RunOutcome, spdk};

/// The device under load.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BenchDevice {
    Null,
    Malloc,
}

/// The I/O pattern: fio's `rw`, `bs` and `iodepth`.
pub(super) struct IoPattern {
    pub(super) rw: &'static str,
    pub(super) block: &'static str,
    pub(super) depth: u32,
}

/// Time allowed beyond the runtime, for connecting and exit.
const EXTRA: Duration = Duration::from_secs(30);

/// The load generator alone.
pub(super) fn local(
    context: &RunContext<'_>,
    device: BenchDevice,
    pattern: &IoPattern,
) -> anyhow::Result<RunOutcome> {
    let name = match device {
        BenchDevice::Null => "null:1g",
        BenchDevice::Malloc => "malloc:512m",
    };
    // The ramp time covers the first writes to each page, whose page faults may take milliseconds.
    let ramp = if device == BenchDevice::Malloc { "2s" } else { ramp(context) };
    let mut command = timed(context, name, pattern, ramp);
    command.arg(format!("--cpus_allowed={}", second_core(context)));
    let result = perf(context, &mut command)?;
    Ok(RunOutcome::measured(values(&result)?, vec![describe(&command)]))
}

/// A load on a target over a transport.
pub(super) struct RemoteLoad<'a> {
    pub(super) transport: TargetTransport,
    pub(super) device: BenchDevice,
    pub(super) pattern: &'a IoPattern,
    /// Idle policy of the target.
    pub(super) idle: &'static str,
    /// Further parameters of the namespace's URI.
    pub(super) query: &'static str,
}

/// Target and load generator on a core each; and SPDK's load generator with either target, where there is an
/// SPDK.
pub(super) fn remote(context: &RunContext<'_>, load: &RemoteLoad<'_>) -> anyhow::Result<RunOutcome> {
    let [target, host, ..] = *context.cores else { return Ok(skipped_one_core()) };
    let cores = [target, host];
    let mut measured = measure_remote(context, load, cores)?;
    if let Some(spdk) = context.spdk.filter(|_| load.idle == "spin") {
        spdk::compare(context, spdk, load, cores, &mut measured)?;
    }
    Ok(RunOutcome::Measured(measured))
}

/// Target and load generator on a core each.
pub(super) fn measure_remote(
    context: &RunContext<'_>,
    load: &RemoteLoad<'_>,
    [target, host]: [u32; 2],
) -> anyhow::Result<Measurement> {
    let namespaces = TargetNamespaces::NullAndMalloc;
    let server = TargetServer::start(context, &target.to_string(), load.idle, &namespaces, load.transport)?;
    let uri = match load.device {
        BenchDevice::Null => server.uri(1),
        BenchDevice::Malloc => server.uri(2),
    };
    if load.device == BenchDevice::Malloc {
        fill(context, &uri)?;
    }
    let mut command = timed(context, &format!("{uri}{}", load.query), load.pattern, ramp(context));
    command.arg(format!("--cpus_allowed={host}"));
    with_target(context, server, &mut command)
}

/// Writes all blocks of a memory device: pages that were never written would all map to the kernel's zero
/// page.
pub(super) fn fill(context: &RunContext<'_>, uri: &str) -> anyhow::Result<()> {
    let pattern = IoPattern { rw: "write", block: "128k", depth: 16 };
    perf(context, &mut base(context, uri, &pattern)).map(drop)
}

/// What `framework_set_scheduler` has the target do.
#[derive(Clone, Copy)]
pub(super) enum TargetScheduler {
    Static,
    Dynamic,
}

/// 16 connections; target and load generator both run on the same two cores. The target assigns connections
/// by their number, so that admin queues are on one reactor and I/O queues on the other when they begin.
pub(super) fn shared(context: &RunContext<'_>, scheduler: TargetScheduler) -> anyhow::Result<RunOutcome> {
    let [first, second, ..] = context.cores else { return Ok(skipped_one_core()) };
    let cores = format!("{first},{second}");
    let server = TargetServer::start(
        context,
        &cores,
        "adaptive",
        &TargetNamespaces::NullAndMalloc,
        TargetTransport::Tcp,
    )?;
    if matches!(scheduler, TargetScheduler::Dynamic) {
        server.rpc(context)?.call("framework_set_scheduler", &json!({ "name": "dynamic" }))?;
    }
    let pattern = IoPattern { rw: "randread", block: "4k", depth: 8 };
    let mut command = timed(context, &server.uri(1), &pattern, ramp(context));
    command.args(["--numjobs=16", "--group_reporting", &format!("--cpus_allowed={cores}")]);
    with_target(context, server, &mut command).map(RunOutcome::Measured)
}

pub(super) fn skipped_one_core() -> RunOutcome {
    RunOutcome::Skipped("target and load generator need two cores".to_string())
}

/// The core of the load generator: not the first, where most interrupts arrive.
pub(super) fn second_core(context: &RunContext<'_>) -> u32 {
    context.cores.get(1).or(context.cores.first()).copied().unwrap_or(0)
}

fn with_target(
    context: &RunContext<'_>,
    server: TargetServer,
    command: &mut Command,
) -> anyhow::Result<Measurement> {
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    let result = perf(context, command)?;
    let busy = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64();
    let mut values = values(&result)?;
    if let Some(iops) = values.get(&BenchMetric::Iops) {
        values.insert(BenchMetric::TargetCpuNs, busy / iops * 1e9);
    }
    let commands = vec![server.command.clone(), describe(command)];
    server.end()?;
    Ok(Measurement { values, commands, ..Measurement::default() })
}

/// `ringbolt perf` on a device, without a limit of time or I/Os.
pub(super) fn base(context: &RunContext<'_>, device: &str, pattern: &IoPattern) -> Command {
    let mut command = Command::new(context.binary);
    command.args(["perf", &format!("--filename={device}"), &format!("--rw={}", pattern.rw)]);
    command.args([format!("--bs={}", pattern.block), format!("--iodepth={}", pattern.depth)]);
    // Random offsets as in bdevperf, and no measurement of the generator's own cost.
    command.args(["--norandommap", "--generator_cost=0"]);
    command
}

/// The ramp time, which is not measured.
pub(super) fn ramp(context: &RunContext<'_>) -> &'static str {
    if context.quick { "200ms" } else { "500ms" }
}

pub(super) fn timed(context: &RunContext<'_>, device: &str, pattern: &IoPattern, ramp: &str) -> Command {
    let mut command = base(context, device, pattern);
    let runtime = if context.quick { "500ms" } else { "2s" };
    command.args(["--time_based", &format!("--ramp_time={ramp}"), &format!("--runtime={runtime}")]);
    command.args(["--idle=spin"]);
    command
}

/// Runs `ringbolt perf`, or fio, with JSON output, and returns the first job of the result.
pub(super) fn perf(context: &RunContext<'_>, command: &mut Command) -> anyhow::Result<Value> {
    start_perf(context, command)?.finish(context)
}

/// A load that runs.
pub(super) struct RunningPerf {
    process: ChildProcess,
    output: PathBuf,
    command: String,
}

/// Starts `ringbolt perf`, or fio, with JSON output.
pub(super) fn start_perf(context: &RunContext<'_>, command: &Command) -> anyhow::Result<RunningPerf> {
    let output = context.directory.file("perf.json");
    let mut with_output = Command::new(command.get_program());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => with_output.env(name, value),
            None => with_output.env_remove(name),
        };
    }
    with_output.args(command.get_args()).args(["--eta=never", "--output-format=json"]);
    with_output.arg(format!("--output={}", output.display()));
    let process = ChildProcess::start(&mut with_output, context.directory, "perf")?;
    Ok(RunningPerf { process, output, command: describe(command) })
}

impl RunningPerf {
    /// Waits until it ends, and returns the first job of the result.
    pub(super) fn finish(self, context: &RunContext<'_>) -> anyhow::Result<Value> {
        self.finish_within(context, Duration::ZERO)
    }

    /// The same for a load that takes so long.
    pub(super) fn finish_within(
        mut self,
        context: &RunContext<'_>,
        runtime: Duration,
    ) -> anyhow::Result<Value> {
        let status = self.process.wait(runtime + EXTRA).with_context(|| self.command.clone())?;
        ensure!(status.success(), "{}: {status}: {}", self.command, context.directory.tail("perf.err"));
        let mut document: Value = serde_json::from_slice(&std::fs::read(self.output)?)?;
        Ok(document["jobs"][0].take())
    }
}

/// IOPS of a job that reads and writes, and the longer of both 99th percentiles in microseconds.
pub(super) fn mixed(job: &Value) -> anyhow::Result<(f64, f64)> {
    let mut sum = (0.0, 0.0_f64);
    for side in [&job["read"], &job["write"]] {
        let p99_ns =
            side["clat_ns"]["percentile"]["99.000000"].as_f64().context("no percentile in the result")?;
        sum = (sum.0 + side["iops"].as_f64().context("no iops in the result")?, sum.1.max(p99_ns / 1e3));
    }
    Ok(sum)
}

/// The metrics of a job that reads or writes.
pub(super) fn values(job: &Value) -> anyhow::Result<std::collections::BTreeMap<BenchMetric, f64>> {
    let sides = ["read", "write"].map(|name| &job[name]);
    let side = sides.into_iter().find(|side| side["total_ios"].as_u64() > Some(0));
    let side = side.context("the load generator did no I/O")?;
    let number =
        |value: &Value, what: &str| value.as_f64().with_context(|| format!("no {what} in the result"));
    Ok([
        (BenchMetric::Iops, number(&side["iops"], "iops")?),
        (BenchMetric::Gibps, number(&side["bw_bytes"], "bandwidth")? / (1u64 << 30) as f64),
        (BenchMetric::MeanUs, number(&side["lat_ns"]["mean"], "latency")? / 1e3),
        (BenchMetric::P99Us, number(&side["clat_ns"]["percentile"]["99.000000"], "percentile")? / 1e3),
        (BenchMetric::HostCpuNs, number(&job["cpu_ns_per_io"], "CPU time")?),
    ]
    .into())
}
