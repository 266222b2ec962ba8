//! What a target costs that has nothing to do, and how soon it is there.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use super::metric::Metric;
use super::process::{Process, describe};
use super::server::{Namespaces, Reach, Server};
use super::{Outcome, Sample, Setting};

/// For the host to connect, and for both to fall asleep.
const SETTLE: Duration = Duration::from_secs(1);

pub(super) fn idle(setting: &Setting<'_>) -> anyhow::Result<Outcome> {
    let Some(core) = setting.cores.first() else { bail!("no core to run on") };
    let server = Server::start(setting, &core.to_string(), "adaptive", &Namespaces::Ten, Reach::Tcp)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["idle-host", &server.uri(1)]);
    let mut host = Process::start(&mut command, setting.scratch, "host")?;
    let begun = Instant::now();
    while !setting.scratch.tail("host.out").contains("connected") {
        ensure!(host.ended()?.is_none(), "the idle host: {}", setting.scratch.tail("host.err"));
        ensure!(begun.elapsed() < Duration::from_secs(10), "the idle host does not connect");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(SETTLE);
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    std::thread::sleep(Duration::from_secs(if setting.quick { 3 } else { 10 }));
    let percent = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64() * 100.0;
    let values = [(Metric::CpuPercent, percent), (Metric::RssMib, server.resident_mib()?)].into();
    ensure!(host.ended()?.is_none(), "the idle host was not kept: {}", setting.scratch.tail("host.err"));
    host.end()?;
    let commands = vec![server.command.clone(), describe(&command)];
    server.end()?;
    Ok(Outcome::Measured(Sample { values, commands }))
}

pub(super) fn startup(setting: &Setting<'_>) -> anyhow::Result<Outcome> {
    let Some(core) = setting.cores.first() else { bail!("no core to run on") };
    let server =
        Server::start(setting, &core.to_string(), "adaptive", &Namespaces::NullAndMalloc, Reach::Tcp)?;
    let values = [(Metric::StartMs, server.started.as_secs_f64() * 1e3)].into();
    let commands = vec![server.command.clone()];
    server.end()?;
    Ok(Outcome::Measured(Sample { values, commands }))
}

/// Connects to a namespace and does nothing but keep the connection, until it is killed.
pub(crate) fn host(uri: &str) -> anyhow::Result<()> {
    use ring::Channel;
    let uri: nvme::Uri = uri.parse()?;
    let reactor = reactor::Reactor::new(&reactor::Config::default())?;
    let core = reactor.core();
    reactor.block_on(async move {
        let options = nvme::Options::default();
        let mut namespace = nvme::Namespace::open(&core, &uri, &options).await.context("connect")?;
        println!("connected");
        let mut done = Vec::new();
        loop {
            core.sleep_ns(100_000_000).await;
            namespace.poll(&mut done);
            if let Some(failure) = namespace.failure() {
                bail!("{failure}");
            }
        }
    })
}
