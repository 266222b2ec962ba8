//! An honest host beside hosts that keep the target's memory: they never send data, or never receive it.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;

use super::examples::Example;
use super::load::{self, IoPattern};
use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::server::{TargetNamespaces, TargetServer, TargetTransport};
use super::{Measurement, RunContext, RunOutcome, placement};

/// Hosts with 127 commands of 128 KiB on each queue, which they never finish.
pub(super) const STALLED: Example = Example { package: "ringbolt-nvmf", name: "stalled" };

/// Time for all queues to connect.
const CONNECT_MAX: Duration = Duration::from_secs(60);

/// The hosts that stall, and the reactors of the target that they share with the honest host.
pub(super) struct StalledHosts {
    pub(super) queues: u32,
    /// `write`: their data is never sent. `read`: their answers are never received.
    pub(super) command: &'static str,
    pub(super) reactors: usize,
}

/// Rate and 99th percentile of reads and writes of a memory device, without the stalled hosts and beside them.
pub(super) fn measure(context: &RunContext<'_>, hosts: &StalledHosts) -> anyhow::Result<RunOutcome> {
    let [target, host, ..] = *context.cores else { return Ok(load::skipped_one_core()) };
    let reactors = if hosts.reactors == 1 { target.to_string() } else { format!("{target},{host}") };
    let namespaces = TargetNamespaces::NullAndMalloc;
    let server = TargetServer::start(context, &reactors, "adaptive", &namespaces, TargetTransport::Tcp)?;
    let pattern = IoPattern { rw: "randrw", block: "4k", depth: 32 };
    let mut command = load::timed(context, &server.uri(2), &pattern, load::ramp(context));
    command.args(["--size=64m", &format!("--cpus_allowed={host}")]);
    let (unattacked, _) = load::mixed(&load::perf(context, &mut command)?)?;
    let between = placement::measure([target, host]);

    let mut attack = Command::new(context.examples.path(STALLED)?);
    attack.args([&server.address(), server.nqn(), &hosts.queues.to_string(), hosts.command]);
    let mut attacker = ChildProcess::start(&mut attack, context.directory, "stalled")?;
    let begun = Instant::now();
    while !context.directory.tail("stalled.out").contains("stalled") {
        ensure!(attacker.ended()?.is_none(), "the stalled hosts: {}", context.directory.tail("stalled.err"));
        ensure!(begun.elapsed() < CONNECT_MAX, "the stalled hosts do not connect");
        std::thread::sleep(Duration::from_millis(10));
    }
    let (attacked, p99_us) = load::mixed(&load::perf(context, &mut command)?)?;
    ensure!(attacker.ended()?.is_none(), "the stalled hosts: {}", context.directory.tail("stalled.err"));
    let resident_mib = server.resident_mib()?;
    attacker.end()?;

    let values = [
        (BenchMetric::Iops, attacked),
        (BenchMetric::AttackRatio, attacked / unattacked),
        (BenchMetric::P99Us, p99_us),
        (BenchMetric::RssMib, resident_mib),
    ];
    let commands = vec![server.command.clone(), describe(&attack), describe(&command)];
    server.end()?;
    Ok(RunOutcome::Measured(Measurement {
        values: values.into(),
        commands,
        round_trips_ns: between.into_iter().collect(),
    }))
}
