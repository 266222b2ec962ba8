//! Benchmarks of the NBD target with fio's nbd engine or `qemu-img bench`, beside qemu-nbd's null-co with the same client, and of an
//! idle export.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use super::load::BenchDevice;
use super::machine_info::process_seconds;
use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::server::{TargetNamespaces, TargetServer, TargetTransport};
use super::{RunContext, RunOutcome};

/// Blocks of 4 KiB that are read, of either server.
const SIZE: &str = "1G";
const START_MAX: Duration = Duration::from_secs(10);
/// Time for the adaptive reactors to go to sleep.
const SETTLE: Duration = Duration::from_secs(1);

/// Rate of a run, and CPU time of its server for an I/O.
pub(super) struct Rate {
    pub(super) iops: f64,
    pub(super) cpu_ns: f64,
}

/// Who reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NbdClient {
    /// fio's nbd engine.
    Fio,
    /// `qemu-img bench`, which needs less processor time for a read.
    QemuImg,
}

impl NbdClient {
    /// The command, on a core, for the server at a UNIX socket.
    fn command(self, core: u32, depth: u32, quick: bool, path: &Path) -> Command {
        let mut command = Command::new("taskset");
        command.args(["-c", &core.to_string()]);
        let uri = format!("nbd+unix:///bench?socket={}", path.display());
        match self {
            NbdClient::Fio => {
                command.args(["fio", "--name=nbd", "--ioengine=nbd", "--rw=randread", "--bs=4k"]);
                command.args(["--output-format=json", "--time_based", &format!("--size={SIZE}")]);
                command.args([
                    &format!("--iodepth={depth}"),
                    &format!("--runtime={}", if quick { 2 } else { 5 }),
                ]);
                command.arg(format!("--uri={uri}"));
            }
            NbdClient::QemuImg => {
                command.args(["qemu-img", "bench", "-f", "raw", "-s", "4096", "-d", &depth.to_string()]);
                command.args(["-c", &Self::reads(quick).to_string(), &uri]);
            }
        }
        command
    }

    /// Reads of `qemu-img bench`, which has no limit of time: at least a second.
    fn reads(quick: bool) -> u32 {
        if quick { 200_000 } else { 1_000_000 }
    }

    /// Reads a second, and reads, from what the client prints.
    fn rate(self, quick: bool, output: &str) -> anyhow::Result<(f64, f64)> {
        match self {
            NbdClient::Fio => rate(output),
            NbdClient::QemuImg => rate_of_qemu_img(Self::reads(quick), output),
        }
    }
}

/// Reads of 4 KiB of the null device, and of qemu-nbd's: server and client have a core each. Our reactors sleep when
/// they are idle, as qemu-nbd does, so that CPU times compare.
pub(super) fn reads(context: &RunContext<'_>, depth: u32, client: NbdClient) -> anyhow::Result<RunOutcome> {
    let [server_core, client_core, ..] = *context.cores else {
        return Ok(RunOutcome::Skipped("target and client need two cores".to_string()));
    };
    if let Some(reason) = missing(client) {
        return Ok(RunOutcome::Skipped(reason));
    }
    let path = context.directory.file("nbd.sock");
    let server = start(context, &server_core.to_string(), &path)?;
    let mut load = client.command(client_core, depth, context.quick, &path);
    let rate = |output: &str| client.rate(context.quick, output);
    let ours = measure(&mut load, rate, || server.cpu_seconds())?;
    let mut commands = vec![server.command.clone(), describe(&load)];
    server.end()?;

    let _ = std::fs::remove_file(&path);
    let mut command = Command::new("taskset");
    command.args(["-c", &server_core.to_string(), "qemu-nbd", "-t", "-x", "bench", "-k"]).arg(&path);
    command.args(["--image-opts", &format!("driver=null-co,size={SIZE}")]);
    let mut qemu = ChildProcess::start(&mut command, context.directory, "qemu-nbd")?;
    let begun = Instant::now();
    while UnixStream::connect(&path).is_err() {
        ensure!(qemu.ended()?.is_none(), "qemu-nbd: {}", context.directory.tail("qemu-nbd.err"));
        ensure!(begun.elapsed() < START_MAX, "qemu-nbd does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
    let id = qemu.id().to_string();
    let other = measure(&mut load, rate, || process_seconds(&id, false).context("qemu-nbd has ended"))?;
    commands.push(describe(&command));
    qemu.end()?;
    let values = [
        (BenchMetric::Iops, ours.iops),
        (BenchMetric::TargetCpuNs, ours.cpu_ns),
        (BenchMetric::QemuNbdRatio, ours.iops / other.iops),
        (BenchMetric::QemuNbdCpuRatio, ours.cpu_ns / other.cpu_ns),
    ];
    Ok(RunOutcome::measured(values, commands))
}

/// CPU time of an adaptive target with a client that sends nothing.
pub(super) fn idle(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    let Some(core) = context.cores.first() else { bail!("no core to run on") };
    let path = context.directory.file("nbd.sock");
    let server = start(context, &core.to_string(), &path)?;
    let mut client = UnixStream::connect(&path)?;
    enter(&mut client)?;
    std::thread::sleep(SETTLE);
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    std::thread::sleep(Duration::from_secs(if context.quick { 3 } else { 10 }));
    let percent = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64() * 100.0;
    let exports = server.rpc(context)?.call("nbd_export_get", &json!({}))?;
    ensure!(exports[0]["connections"] == 1, "the client was disconnected: {exports}");
    let values = [(BenchMetric::CpuPercent, percent)];
    let commands = vec![server.command.clone()];
    server.end()?;
    Ok(RunOutcome::measured(values, commands))
}

/// Starts a target that exports the null device as `bench`.
fn start(context: &RunContext<'_>, cores: &str, path: &Path) -> anyhow::Result<TargetServer> {
    let namespaces = TargetNamespaces::One(BenchDevice::Null);
    let server = TargetServer::start(context, cores, "adaptive", &namespaces, TargetTransport::Tcp)?;
    let mut rpc = server.rpc(context)?;
    // A device has one writer: the NVMe target gives it up.
    rpc.call("nvmf_subsystem_remove_ns", &json!({ "nqn": super::server::NQN, "nsid": 1 }))?;
    rpc.call("nbd_export_create", &json!({ "bdev_name": "Null0", "name": "bench", "path": path }))?;
    Ok(server)
}

/// What is not installed.
fn missing(client: NbdClient) -> Option<String> {
    let output = |program: &str, argument: &str| {
        let output = Command::new(program).arg(argument).stdin(Stdio::null()).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    match output("fio", "--enghelp") {
        _ if client == NbdClient::QemuImg => {}
        None => return Some("fio is not installed: apt install fio".to_string()),
        Some(engines) if !engines.split_whitespace().any(|engine| engine == "nbd") => {
            return Some("this fio has no nbd engine".to_string());
        }
        Some(_) => {}
    }
    let has_qemu = ["qemu-nbd", "qemu-img"].iter().all(|program| output(program, "--version").is_some());
    (!has_qemu).then(|| "qemu-nbd is not installed: apt install qemu-utils".to_string())
}

/// Runs the client, and returns its rate with the CPU time of the server.
pub(super) fn measure(
    load: &mut Command,
    rate: impl Fn(&str) -> anyhow::Result<(f64, f64)>,
    server_seconds: impl Fn() -> anyhow::Result<f64>,
) -> anyhow::Result<Rate> {
    let before = server_seconds()?;
    let output = load.stdin(Stdio::null()).output().with_context(|| describe(load))?;
    let busy = server_seconds()? - before;
    ensure!(output.status.success(), "{}: {}", describe(load), String::from_utf8_lossy(&output.stderr));
    let (iops, ios) = rate(&String::from_utf8_lossy(&output.stdout))?;
    Ok(Rate { iops, cpu_ns: busy / ios * 1e9 })
}

/// Reads a second, and reads, of fio's JSON; what libnbd writes may precede it.
pub(super) fn rate(output: &str) -> anyhow::Result<(f64, f64)> {
    let json =
        output.find('{').map(|start| &output[start..]).with_context(|| format!("no result in {output}"))?;
    let json: Value = serde_json::from_str(json).context("fio's result")?;
    let read = &json["jobs"][0]["read"];
    let number =
        |key: &str| read[key].as_f64().filter(|value| *value > 0.0).with_context(|| format!("no {key}"));
    Ok((number("iops")?, number("total_ios")?))
}

/// Reads a second, and reads, of `qemu-img bench`, which made so many.
fn rate_of_qemu_img(reads: u32, output: &str) -> anyhow::Result<(f64, f64)> {
    let seconds = output.split("Run completed in ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let seconds = seconds.and_then(|text| text.parse().ok()).filter(|seconds: &f64| *seconds > 0.0);
    let seconds = seconds.with_context(|| format!("no result in {output}"))?;
    Ok((f64::from(reads) / seconds, reads.into()))
}

/// Enters the transmission phase of the export `bench` by EXPORT_NAME.
fn enter(client: &mut UnixStream) -> anyhow::Result<()> {
    use std::io::Write;
    client.set_read_timeout(Some(START_MAX))?;
    let mut greeting = [0; 18];
    client.read_exact(&mut greeting)?;
    ensure!(&greeting[..16] == b"NBDMAGICIHAVEOPT", "no NBD server: {greeting:02x?}");
    // Fixed newstyle, without zeroes; EXPORT_NAME is option 1.
    let mut request = vec![0, 0, 0, 3];
    request.extend(b"IHAVEOPT\0\0\0\x01\0\0\0\x05bench");
    client.write_all(&request)?;
    // Size and flags.
    let mut export = [0; 10];
    client.read_exact(&mut export).context("the export is refused")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_from_the_results_of_clients() {
        let output = "nbd: connected\n{ \"jobs\": [ { \"read\": { \"iops\": 12.5, \"total_ios\": 25 } } ] }";
        assert_eq!(rate(output).ok(), Some((12.5, 25.0)));
        let output = "Sending 1000 read requests, 4096 bytes each\nRun completed in 0.500 seconds.\n";
        assert_eq!(rate_of_qemu_img(1000, output).ok(), Some((2000.0, 1000.0)));
        assert!(rate_of_qemu_img(1000, "Run completed in 0.000 seconds.").is_err());
        assert!(rate("fio: failed").is_err());
        assert!(rate("{ \"jobs\": [ { \"read\": { \"iops\": 0, \"total_ios\": 0 } } ] }").is_err());
    }
}
