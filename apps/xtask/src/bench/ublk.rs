//! Benchmarks of ublk disks with fio, and of an idle disk. They need root and the kernel's ublk driver.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::bail;
use serde_json::json;

use super::load::BenchDevice;
use super::metric::BenchMetric;
use super::process::describe;
use super::server::{TargetNamespaces, TargetServer, TargetTransport};
use super::{RunContext, RunOutcome, nbd};

/// The driver's device.
const CONTROL: &str = "/dev/ublk-control";
/// Number of the disk: the last that the driver has by default.
const NUMBER: u32 = 63;
/// Time for the adaptive reactors to go to sleep.
const SETTLE: Duration = Duration::from_secs(1);

/// Random reads of 4 KiB of the null device: server and fio have a core each, and the server sleeps when it is idle.
pub(super) fn reads(context: &RunContext<'_>, depth: u32) -> anyhow::Result<RunOutcome> {
    let [server_core, client_core, ..] = *context.cores else {
        return Ok(RunOutcome::Skipped("target and client need two cores".to_string()));
    };
    if let Some(reason) = missing() {
        return Ok(RunOutcome::Skipped(reason));
    }
    let server = start(context, &server_core.to_string())?;
    let mut fio = Command::new("taskset");
    fio.args(["-c", &client_core.to_string(), "fio", "--name=ublk", "--ioengine=libaio", "--direct=1"]);
    fio.args(["--rw=randread", "--bs=4k", "--output-format=json", "--time_based"]);
    fio.args([&format!("--iodepth={depth}"), &format!("--filename=/dev/ublkb{NUMBER}")]);
    fio.arg(format!("--runtime={}", if context.quick { 2 } else { 5 }));
    let rate = nbd::measure(&mut fio, nbd::rate, || server.cpu_seconds())?;
    let values = [(BenchMetric::Iops, rate.iops), (BenchMetric::TargetCpuNs, rate.cpu_ns)];
    let commands = vec![server.command.clone(), describe(&fio)];
    server.end()?;
    Ok(RunOutcome::measured(values, commands))
}

/// CPU time of an adaptive target with a disk that is not used.
pub(super) fn idle(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    let Some(core) = context.cores.first() else { bail!("no core to run on") };
    if let Some(reason) = missing() {
        return Ok(RunOutcome::Skipped(reason));
    }
    let server = start(context, &core.to_string())?;
    std::thread::sleep(SETTLE);
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    std::thread::sleep(Duration::from_secs(if context.quick { 3 } else { 10 }));
    let percent = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64() * 100.0;
    let values = [(BenchMetric::CpuPercent, percent)];
    let commands = vec![server.command.clone()];
    server.end()?;
    Ok(RunOutcome::measured(values, commands))
}

/// Starts a target with the null device as a disk of one queue.
fn start(context: &RunContext<'_>, cores: &str) -> anyhow::Result<TargetServer> {
    let namespaces = TargetNamespaces::One(BenchDevice::Null);
    let server = TargetServer::start(context, cores, "adaptive", &namespaces, TargetTransport::Tcp)?;
    let mut rpc = server.rpc(context)?;
    // A device has one writer: the NVMe target gives it up.
    rpc.call("nvmf_subsystem_remove_ns", &json!({ "nqn": super::server::NQN, "nsid": 1 }))?;
    rpc.call("ublk_create_target", &json!({}))?;
    rpc.call("ublk_start_disk", &json!({ "bdev_name": "Null0", "ublk_id": NUMBER }))?;
    Ok(server)
}

/// What is missing.
fn missing() -> Option<String> {
    if !Path::new(CONTROL).exists() {
        return Some("the kernel has no ublk driver: modprobe ublk_drv".to_string());
    }
    if std::fs::OpenOptions::new().write(true).open(CONTROL).is_err() {
        return Some("ublk disks need root".to_string());
    }
    let has_fio = Command::new("fio").arg("--version").output().is_ok();
    (!has_fio).then(|| "fio is not installed: apt install fio".to_string())
}
