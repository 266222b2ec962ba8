//! Benchmarks of the vhost-user target, with libblkio as the client; and the same client with QEMU's storage daemon.

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

const DAEMON: &str = "qemu-storage-daemon";
/// Time that a server may take until it listens.
const START_MAX: Duration = Duration::from_secs(10);
const RUN_MAX: Duration = Duration::from_secs(60);
/// Time for the adaptive reactors to go to sleep.
const SETTLE: Duration = Duration::from_secs(1);

/// Random reads of 4 KiB with `depth` in flight, target and client on a core each. Of the null device, those of QEMU's
/// storage daemon on the same cores too; the two take turns in being the first.
pub(super) fn reads(context: &RunContext<'_>, device: BenchDevice, depth: u32) -> anyhow::Result<RunOutcome> {
    let [first, second, ..] = *context.cores else { return Ok(load::skipped_one_core()) };
    let compares = device == BenchDevice::Null;
    if compares && Command::new(DAEMON).arg("--version").stdout(Stdio::null()).status().is_err() {
        return Ok(RunOutcome::Skipped(format!("{DAEMON} is not installed: apt install qemu-utils")));
    }
    let mut measured = Measurement::default();
    let daemon_is_first = context.run % 2 == 1;
    let mut daemon = None;
    if compares && daemon_is_first {
        daemon = Some(of_daemon(context, [first, second], depth, &mut measured)?);
    }
    let server = start(context, first, "spin", device)?;
    let socket = context.directory.file("disk");
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    let ours = client(context, &socket, second, depth, &mut measured)?;
    let busy = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64();
    measured.commands.insert(0, server.command.clone());
    server.end()?;
    if compares && !daemon_is_first {
        daemon = Some(of_daemon(context, [first, second], depth, &mut measured)?);
    }
    measured.values.extend([(BenchMetric::Iops, ours), (BenchMetric::TargetCpuNs, busy / ours * 1e9)]);
    if let Some(theirs) = daemon {
        measured.values.extend([(BenchMetric::QemuExportRatio, ours / theirs)]);
    }
    Ok(RunOutcome::Measured(measured))
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
    [first, second]: [u32; 2],
    depth: u32,
    measured: &mut Measurement,
) -> anyhow::Result<f64> {
    let socket = context.directory.file("qemu");
    _ = std::fs::remove_file(&socket);
    let mut command = Command::new("taskset");
    command.args([
        "-c",
        &first.to_string(),
        DAEMON,
        "--blockdev",
        "driver=null-co,node-name=null,size=1073741824",
    ]);
    command.arg("--export");
    let address = format!("addr.type=unix,addr.path={}", socket.display());
    command.arg(format!("vhost-user-blk,id=null,node-name=null,writable=on,{address}"));
    let mut daemon = ChildProcess::start(&mut command, context.directory, "qemu")?;
    let begun = Instant::now();
    while !socket.exists() {
        ensure!(daemon.ended()?.is_none(), "{DAEMON}: {}", context.directory.tail("qemu.err"));
        ensure!(begun.elapsed() < START_MAX, "{DAEMON} does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
    let rate = client(context, &socket, second, depth, measured)?;
    measured.commands.push(describe(&command));
    daemon.end()?;
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
    let mut command = Command::new("taskset");
    command.args(["-c", &core.to_string()]).arg(context.examples.path(CLIENT)?);
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
