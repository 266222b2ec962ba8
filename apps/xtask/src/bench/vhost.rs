//! Benchmarks of the vhost-user target, with libblkio as the client; and the same client with QEMU's storage daemon
//! and with the least device that it accepts.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::json;

use super::examples::Example;
use super::load::{self, BenchDevice};
use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::server::{NQN, TargetNamespaces, TargetServer, TargetTransport};
use super::{Measurement, RunContext, RunOutcome};

/// libblkio's vhost-user driver, which spins.
pub(super) const CLIENT: Example = Example { package: "ringbolt-blkio", name: "load" };

/// The least vhost-user device, which spins too.
pub(super) const BARE: Example = Example { package: "ringbolt-vhost", name: "bare" };

const DAEMON: &str = "qemu-storage-daemon";
/// Time that a server may take until it listens.
const START_MAX: Duration = Duration::from_secs(10);
const RUN_MAX: Duration = Duration::from_secs(60);
/// Time for the adaptive reactors to go to sleep.
const SETTLE: Duration = Duration::from_secs(1);

/// What the client reads from.
#[derive(Clone, Copy)]
enum Peer {
    Target,
    /// QEMU's storage daemon with a null device.
    Daemon,
    /// The least device: what this client can reach with any.
    Bare,
}

/// Random reads of 4 KiB with `depth` in flight, target and client on a core each. Of the null device, those of QEMU's
/// storage daemon and of the least device on the same cores too; the three take turns in being the first.
pub(super) fn reads(context: &RunContext<'_>, device: BenchDevice, depth: u32) -> anyhow::Result<RunOutcome> {
    let [first, second, ..] = *context.cores else { return Ok(load::skipped_one_core()) };
    let compares = device == BenchDevice::Null;
    if compares && Command::new(DAEMON).arg("--version").stdout(Stdio::null()).status().is_err() {
        return Ok(RunOutcome::Skipped(format!("{DAEMON} is not installed: apt install qemu-utils")));
    }
    let mut measured = Measurement::default();
    let mut peers = vec![Peer::Target];
    if compares {
        peers.extend([Peer::Daemon, Peer::Bare]);
        peers.rotate_left(context.run as usize % 3);
    }
    for peer in peers {
        match peer {
            Peer::Target => of_target(context, device, [first, second], depth, &mut measured)?,
            Peer::Daemon => {
                let rate = of_daemon(context, [first, second], depth, &mut measured)?;
                measured.values.insert(BenchMetric::QemuExportIops, rate);
            }
            Peer::Bare => {
                let rate = of_bare(context, [first, second], depth, &mut measured)?;
                measured.values.insert(BenchMetric::BareDeviceIops, rate);
            }
        }
    }
    let rate = |metric| measured.values.get(&metric).copied();
    let [ours, daemon, bare] =
        [BenchMetric::Iops, BenchMetric::QemuExportIops, BenchMetric::BareDeviceIops].map(rate);
    if let (Some(ours), Some(daemon), Some(bare)) = (ours, daemon, bare) {
        measured.values.extend([
            (BenchMetric::QemuExportRatio, ours / daemon),
            (BenchMetric::BareDeviceRatio, ours / bare),
            (BenchMetric::BareQemuRatio, bare / daemon),
        ]);
    }
    Ok(RunOutcome::Measured(measured))
}

/// The rate of the client with a device of the target, and the target's CPU time.
fn of_target(
    context: &RunContext<'_>,
    device: BenchDevice,
    [first, second]: [u32; 2],
    depth: u32,
    measured: &mut Measurement,
) -> anyhow::Result<()> {
    let server = start(context, first, "spin", device)?;
    let socket = context.directory.file("disk");
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    let rate = client(context, &socket, second, depth, measured)?;
    let busy = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64();
    measured.commands.insert(0, server.command.clone());
    server.end()?;
    measured.values.extend([(BenchMetric::Iops, rate), (BenchMetric::TargetCpuNs, busy / rate * 1e9)]);
    Ok(())
}

/// CPU time of an adaptive target with a device that is attached and not used.
pub(super) fn idle(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    let Some(core) = context.cores.first() else { bail!("no core to run on") };
    let server = start(context, *core, "adaptive", BenchDevice::Null)?;
    let mut command = Command::new(context.examples.path(CLIENT)?);
    command.arg(context.directory.file("disk")).arg("idle");
    let mut client = ChildProcess::start(&mut command, context.directory, "client")?;
    let begun = Instant::now();
    while !context.directory.tail("client.out").contains("connected") {
        ensure!(client.ended()?.is_none(), "libblkio: {}", context.directory.tail("client.err"));
        ensure!(begun.elapsed() < START_MAX, "libblkio does not connect");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(SETTLE);
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    std::thread::sleep(Duration::from_secs(if context.quick { 3 } else { 10 }));
    let percent = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64() * 100.0;
    let controllers = server.rpc(context)?.call("vhost_get_controllers", &json!({}))?;
    let session = &controllers[0]["sessions"][0];
    ensure!(session["started"] == true, "the device is not attached any more: {controllers}");
    client.end()?;
    let commands = vec![server.command.clone(), describe(&command)];
    server.end()?;
    Ok(RunOutcome::measured([(BenchMetric::CpuPercent, percent)], commands))
}

/// Starts a target with a device as the controller `disk`.
fn start(
    context: &RunContext<'_>,
    core: u32,
    idle: &str,
    device: BenchDevice,
) -> anyhow::Result<TargetServer> {
    let namespaces = TargetNamespaces::NullAndMalloc;
    let server = TargetServer::start(context, &core.to_string(), idle, &namespaces, TargetTransport::Tcp)?;
    let mut rpc = server.rpc(context)?;
    // A device has one writer: the NVMe target gives it up.
    let (bdev, nsid) = if device == BenchDevice::Null { ("Null0", 1) } else { ("Malloc0", 2) };
    if device == BenchDevice::Malloc {
        load::fill(context, &server.uri(nsid))?;
    }
    rpc.call("nvmf_subsystem_remove_ns", &json!({ "nqn": NQN, "nsid": nsid }))?;
    let controller = json!({ "ctrlr": context.directory.file("disk"), "dev_name": bdev });
    rpc.call("vhost_create_blk_controller", &controller)?;
    Ok(server)
}

/// The rate of the client with the export of a null device by QEMU's storage daemon.
fn of_daemon(
    context: &RunContext<'_>,
    cores: [u32; 2],
    depth: u32,
    measured: &mut Measurement,
) -> anyhow::Result<f64> {
    let socket = context.directory.file("qemu");
    let address = format!("addr.type=unix,addr.path={}", socket.display());
    let mut command = on_core(cores[0], Path::new(DAEMON));
    command.args(["--blockdev", "driver=null-co,node-name=null,size=1073741824", "--export"]);
    command.arg(format!("vhost-user-blk,id=null,node-name=null,writable=on,{address}"));
    of_server(context, "qemu", &mut command, cores[1], depth, measured)
}

/// The rate of the client with the least device.
fn of_bare(
    context: &RunContext<'_>,
    cores: [u32; 2],
    depth: u32,
    measured: &mut Measurement,
) -> anyhow::Result<f64> {
    let mut command = on_core(cores[0], context.examples.path(BARE)?);
    command.arg(context.directory.file("bare"));
    of_server(context, "bare", &mut command, cores[1], depth, measured)
}

fn on_core(core: u32, program: &Path) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &core.to_string()]).arg(program);
    command
}

/// The rate of the client with a server, which listens at the socket `name`.
fn of_server(
    context: &RunContext<'_>,
    name: &str,
    command: &mut Command,
    client_core: u32,
    depth: u32,
    measured: &mut Measurement,
) -> anyhow::Result<f64> {
    let socket = context.directory.file(name);
    _ = std::fs::remove_file(&socket);
    let mut server = ChildProcess::start(command, context.directory, name)?;
    let begun = Instant::now();
    while !socket.exists() {
        let output = context.directory.tail(&format!("{name}.err"));
        ensure!(server.ended()?.is_none(), "{}: {output}", describe(command));
        ensure!(begun.elapsed() < START_MAX, "{} does not listen", describe(command));
        std::thread::sleep(Duration::from_millis(10));
    }
    let rate = client(context, &socket, client_core, depth, measured)?;
    measured.commands.push(describe(command));
    server.end()?;
    Ok(rate)
}

/// Runs the client on a core. Returns the reads a second.
fn client(
    context: &RunContext<'_>,
    socket: &Path,
    core: u32,
    depth: u32,
    measured: &mut Measurement,
) -> anyhow::Result<f64> {
    let mut command = on_core(core, context.examples.path(CLIENT)?);
    command.arg(socket).arg(depth.to_string()).arg(if context.quick { "1" } else { "4" });
    let mut process = ChildProcess::start(&mut command, context.directory, "client")?;
    let status = process.wait(RUN_MAX).with_context(|| describe(&command))?;
    ensure!(status.success(), "{}: {status}: {}", describe(&command), context.directory.tail("client.err"));
    let output = context.directory.tail("client.out");
    measured.commands.push(describe(&command));
    rate(&output).with_context(|| format!("{}: {output}", describe(&command)))
}

/// The rate in the last line of the client's output.
fn rate(output: &str) -> Option<f64> {
    output.strip_suffix(" IOPS")?.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_parsed_from_the_output() {
        assert_eq!(rate("read at depth 32 by libblkio: 512000 IOPS"), Some(512_000.0));
        assert_eq!(rate("libblkio: Connection refused"), None);
    }
}
