//! Benchmarks that the load generator makes.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::metric::Metric;
use super::process::{Process, describe};
use super::server::{Namespaces, Reach, Server};
use super::{Outcome, Sample, Setting};

/// What is driven.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Device {
    Null,
    Malloc,
}

/// How it is driven.
pub(super) struct Load {
    pub(super) rw: &'static str,
    pub(super) block: &'static str,
    pub(super) depth: u32,
}

/// Beyond its own time, for connecting and ending.
const EXTRA: Duration = Duration::from_secs(30);

/// The load generator alone.
pub(super) fn local(setting: &Setting<'_>, device: Device, load: &Load) -> anyhow::Result<Outcome> {
    let name = match device {
        Device::Null => "null:1g",
        Device::Malloc => "malloc:512m",
    };
    // The first write of each page is the machine's work, and may take milliseconds.
    let ramp = if device == Device::Malloc { "2s" } else { ramp(setting) };
    let mut command = timed(setting, name, load, ramp);
    command.arg(format!("--cpus_allowed={}", last(setting)));
    let result = perf(setting, &mut command)?;
    Ok(Outcome::Measured(Sample { values: values(&result)?, commands: vec![describe(&command)] }))
}

/// Target and load generator, a core each.
pub(super) fn remote(
    setting: &Setting<'_>,
    reach: Reach,
    device: Device,
    load: &Load,
    idle: &'static str,
) -> anyhow::Result<Outcome> {
    let [target, host, ..] = setting.cores else { return Ok(one_core()) };
    let server = Server::start(setting, &target.to_string(), idle, &Namespaces::NullAndMalloc, reach)?;
    let uri = match device {
        Device::Null => server.uri(1),
        Device::Malloc => server.uri(2),
    };
    if device == Device::Malloc {
        // Pages that were never written would all be the kernel's one page of zeroes.
        let fill = Load { rw: "write", block: "128k", depth: 16 };
        perf(setting, &mut base(setting, &uri, &fill))?;
    }
    let mut command = timed(setting, &uri, load, ramp(setting));
    command.arg(format!("--cpus_allowed={host}"));
    with_target(setting, server, &mut command)
}

/// 16 connections on two cores, where the target has both and the load generator too.
pub(super) fn shared(setting: &Setting<'_>) -> anyhow::Result<Outcome> {
    let [first, second, ..] = setting.cores else { return Ok(one_core()) };
    let cores = format!("{first},{second}");
    let server = Server::start(setting, &cores, "adaptive", &Namespaces::NullAndMalloc, Reach::Tcp)?;
    let load = Load { rw: "randread", block: "4k", depth: 8 };
    let mut command = timed(setting, &server.uri(1), &load, ramp(setting));
    command.args(["--numjobs=16", "--group_reporting", &format!("--cpus_allowed={cores}")]);
    with_target(setting, server, &mut command)
}

fn one_core() -> Outcome {
    Outcome::Skipped("target and load generator need two cores".to_string())
}

fn last(setting: &Setting<'_>) -> u32 {
    // The first core of a machine is where most interrupts arrive.
    setting.cores.get(1).or(setting.cores.first()).copied().unwrap_or(0)
}

fn with_target(setting: &Setting<'_>, server: Server, command: &mut Command) -> anyhow::Result<Outcome> {
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    let result = perf(setting, command)?;
    let busy = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64();
    let mut values = values(&result)?;
    if let Some(iops) = values.get(&Metric::Iops) {
        values.insert(Metric::TargetCpuNs, busy / iops * 1e9);
    }
    let commands = vec![server.command.clone(), describe(command)];
    server.end()?;
    Ok(Outcome::Measured(Sample { values, commands }))
}

/// `ringbolt perf` on a device, without an end of its own.
pub(super) fn base(setting: &Setting<'_>, device: &str, load: &Load) -> Command {
    let mut command = Command::new(setting.binary);
    command.args(["perf", &format!("--filename={device}"), &format!("--rw={}", load.rw)]);
    command.args([format!("--bs={}", load.block), format!("--iodepth={}", load.depth)]);
    // Positions are drawn, as bdevperf does, and nothing is measured besides.
    command.args(["--norandommap", "--generator_cost=0"]);
    command
}

/// Before anything is counted.
fn ramp(setting: &Setting<'_>) -> &'static str {
    if setting.quick { "200ms" } else { "500ms" }
}

fn timed(setting: &Setting<'_>, device: &str, load: &Load, ramp: &str) -> Command {
    let mut command = base(setting, device, load);
    let runtime = if setting.quick { "500ms" } else { "2s" };
    command.args(["--time_based", &format!("--ramp_time={ramp}"), &format!("--runtime={runtime}")]);
    command.args(["--idle=spin"]);
    command
}

/// Runs `ringbolt perf` to its end, or fio, of which it is the language; the first job of its result.
pub(super) fn perf(setting: &Setting<'_>, command: &mut Command) -> anyhow::Result<Value> {
    let output = setting.scratch.file("perf.json");
    let mut with_output = Command::new(command.get_program());
    with_output.args(command.get_args()).args(["--eta=never", "--output-format=json"]);
    with_output.arg(format!("--output={}", output.display()));
    let mut process = Process::start(&mut with_output, setting.scratch, "perf")?;
    let status = process.wait(EXTRA).with_context(|| describe(command))?;
    ensure!(status.success(), "{}: {status}: {}", describe(command), setting.scratch.tail("perf.err"));
    let mut document: Value = serde_json::from_slice(&std::fs::read(output)?)?;
    Ok(document["jobs"][0].take())
}

/// What is of interest of a job that reads or writes.
fn values(job: &Value) -> anyhow::Result<std::collections::BTreeMap<Metric, f64>> {
    let sides = ["read", "write"].map(|name| &job[name]);
    let side = sides.into_iter().find(|side| side["total_ios"].as_u64() > Some(0));
    let side = side.context("the load generator did no I/O")?;
    let number =
        |value: &Value, what: &str| value.as_f64().with_context(|| format!("no {what} in the result"));
    Ok([
        (Metric::Iops, number(&side["iops"], "iops")?),
        (Metric::Gibps, number(&side["bw_bytes"], "bandwidth")? / (1u64 << 30) as f64),
        (Metric::MeanUs, number(&side["lat_ns"]["mean"], "latency")? / 1e3),
        (Metric::P99Us, number(&side["clat_ns"]["percentile"]["99.000000"], "percentile")? / 1e3),
        (Metric::HostCpuNs, number(&job["cpu_ns_per_io"], "CPU time")?),
    ]
    .into())
}
