//! Resource use of an idle target, and start-up time.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::server::{TargetNamespaces, TargetServer, TargetTransport};
use super::{RunContext, RunOutcome};

/// Time for the adaptive reactors of target and host to go to sleep.
const SETTLE: Duration = Duration::from_secs(1);

pub(super) fn idle(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    let Some(core) = context.cores.first() else { bail!("no core to run on") };
    let server = TargetServer::start(
        context,
        &core.to_string(),
        "adaptive",
        &TargetNamespaces::Ten,
        TargetTransport::Tcp,
    )?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["idle-host", &server.uri(1)]);
    let mut host = ChildProcess::start(&mut command, context.directory, "host")?;
    let begun = Instant::now();
    while !context.directory.tail("host.out").contains("connected") {
        ensure!(host.ended()?.is_none(), "the idle host: {}", context.directory.tail("host.err"));
        ensure!(begun.elapsed() < Duration::from_secs(10), "the idle host does not connect");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(SETTLE);
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    std::thread::sleep(Duration::from_secs(if context.quick { 3 } else { 10 }));
    let percent = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64() * 100.0;
    let values = [(BenchMetric::CpuPercent, percent), (BenchMetric::RssMib, server.resident_mib()?)];
    ensure!(
        host.ended()?.is_none(),
        "the idle host was disconnected: {}",
        context.directory.tail("host.err")
    );
    host.end()?;
    let commands = vec![server.command.clone(), describe(&command)];
    server.end()?;
    Ok(RunOutcome::measured(values, commands))
}

pub(super) fn startup(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    let Some(core) = context.cores.first() else { bail!("no core to run on") };
    let server = TargetServer::start(
        context,
        &core.to_string(),
        "adaptive",
        &TargetNamespaces::NullAndMalloc,
        TargetTransport::Tcp,
    )?;
    let values = [(BenchMetric::StartMs, server.startup_time.as_secs_f64() * 1e3)];
    let commands = vec![server.command.clone()];
    server.end()?;
    Ok(RunOutcome::measured(values, commands))
}

/// Connects to a namespace, prints `connected`, and keeps the connection open without I/O until it is killed.
pub(crate) fn host(uri: &str) -> anyhow::Result<()> {
    use block_io::Channel;
    let uri: nvme::Uri = uri.parse()?;
    let reactor = reactor::Reactor::new(&reactor::ReactorConfig::default())?;
    let core = reactor.core();
    reactor.block_on(async move {
        let options = nvme::Options::default();
        let mut namespace = nvme::Namespace::open(&core, &uri, &options).await.context("connect")?;
        println!("connected");
        let mut completions = Vec::new();
        loop {
            core.sleep_ns(100_000_000).await;
            namespace.poll(&mut completions);
            if let Some(failure) = namespace.failure() {
                bail!("{failure}");
            }
        }
    })
}
