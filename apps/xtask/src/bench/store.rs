//! The replicated store, compared in the same run with a volume that is not replicated.
//!
//! Both are on loop devices in memory, and have the same load in turn: an image with two replicas, and a target with
//! `bdev_uring` over NVMe/TCP. Target, nodes and load generator sleep when they are idle. The ratios say what
//! replication costs on this machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use super::load::{self, IoPattern};
use super::machine_info::process_seconds;
use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::server::{TargetNamespaces, TargetServer, TargetTransport};
use super::{Measurement, RunContext, RunOutcome};

/// Size of each loop device, and of the image.
const DEVICE_BYTES: u64 = 2 << 30;
const IMAGE: &str = "512m";
/// The backing files are here: memory.
const MEMORY: &str = "/dev/shm";
const START_MAX: Duration = Duration::from_secs(30);
const SECTOR_BYTES: f64 = 512.0;

/// What a loop device reports about its cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LoopCache {
    /// It has none: a write that is complete is durable, on both sides of the comparison.
    None,
    /// It is volatile: the store's writes are followed by flushes, those of the other volume are not.
    Volatile,
}

/// Loads an image with two replicas and the same device without replication, in turn.
pub(super) fn compare(
    context: &RunContext<'_>,
    pattern: &IoPattern,
    cache: LoopCache,
) -> anyhow::Result<RunOutcome> {
    if !rustix::process::geteuid().is_root() {
        return Ok(RunOutcome::Skipped("loop devices in memory need root".to_string()));
    }
    if !Path::new(MEMORY).is_dir() {
        return Ok(RunOutcome::Skipped(format!("{MEMORY} does not exist")));
    }
    let devices = [LoopDevice::create(context, cache)?, LoopDevice::create(context, cache)?];
    let plain = unreplicated(context, &devices[0], pattern)?;
    let cluster = StoreCluster::start(context, &devices)?;
    let uri = format!("store:pool/vol?cluster={}", cluster.directory.display());
    let loaded = under_load(context, &uri, pattern, &devices, || cluster.cpu_seconds())?;
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

/// A loop device on a file in memory, detached on drop.
struct LoopDevice {
    node: PathBuf,
    backing: PathBuf,
}

impl LoopDevice {
    fn create(context: &RunContext<'_>, cache: LoopCache) -> anyhow::Result<LoopDevice> {
        let (file, backing) = (0..)
            .map(|number| Path::new(MEMORY).join(format!("ringbolt-bench-{}-{number}", std::process::id())))
            .find_map(|path| Some((std::fs::File::create_new(&path).ok()?, path)))
            .context("no file in memory")?;
        // Removes the file where the rest fails.
        let mut device = LoopDevice { node: PathBuf::new(), backing };
        file.set_len(DEVICE_BYTES)?;
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--sector-size=512"]).arg(&device.backing);
        let mut process = ChildProcess::start(&mut losetup, context.directory, "losetup")?;
        let status = process.wait(START_MAX)?;
        ensure!(status.success(), "{}: {}", describe(&losetup), context.directory.tail("losetup.err"));
        device.node = PathBuf::from(context.directory.tail("losetup.out").trim());
        let mode = if cache == LoopCache::None { "write through" } else { "write back" };
        let setting = device.sysfs()?.join("queue/write_cache");
        std::fs::write(&setting, mode).with_context(|| setting.display().to_string())?;
        Ok(device)
    }

    fn sysfs(&self) -> anyhow::Result<PathBuf> {
        let name = self.node.file_name().context("a loop device has a name")?;
        Ok(Path::new("/sys/block").join(name))
    }

    /// Bytes written to it so far: block/stat, field 7, in sectors.
    fn written_bytes(&self) -> anyhow::Result<f64> {
        let path = self.sysfs()?.join("stat");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let sectors = text.split_whitespace().nth(6).context("too few fields")?;
        Ok(sectors.parse::<f64>()? * SECTOR_BYTES)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if !self.node.as_os_str().is_empty() {
            // If a process still has it open, it is detached when that ends.
            let _ = Command::new("losetup").arg("--detach").arg(&self.node).status();
        }
        let _ = std::fs::remove_file(&self.backing);
    }
}

/// A running `ringbolt store up` with a node a device.
struct StoreCluster {
    process: ChildProcess,
    directory: PathBuf,
    command: String,
}

impl StoreCluster {
    fn start(context: &RunContext<'_>, devices: &[LoopDevice]) -> anyhow::Result<StoreCluster> {
        let directory = context.directory.folder("cluster-parent")?.join("cluster");
        let mut command = Command::new(context.binary);
        // The backing files in memory have no power to lose.
        command
            .args(["store", "up", "--replicas=2", "--spare=0", "--atomic-blocks", "--cluster"])
            .arg(&directory);
        for device in devices {
            command.arg("--device").arg(&device.node);
        }
        let process = ChildProcess::start(&mut command, context.directory, "store")?;
        let mut cluster = StoreCluster { process, directory, command: describe(&command) };
        let begun = Instant::now();
        while !context.directory.tail("store.out").contains("ready") {
            if let Some(status) = cluster.process.ended()? {
                bail!("store up: {status}: {}", context.directory.tail("store.err"));
            }
            ensure!(begun.elapsed() < START_MAX, "store up is not ready in time");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut image = Command::new(context.binary);
        image.args(["image", "create", "--cluster"]).arg(&cluster.directory).args(["vol", IMAGE]);
        let mut created = ChildProcess::start(&mut image, context.directory, "image")?;
        let status = created.wait(START_MAX)?;
        ensure!(status.success(), "{}: {}", describe(&image), context.directory.tail("image.err"));
        Ok(cluster)
    }

    /// CPU time of the nodes, which are its children.
    fn cpu_seconds(&self) -> anyhow::Result<f64> {
        let id = self.process.id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
        let seconds = |pid: &str| process_seconds(pid, false).context("a node ended early");
        children.split_whitespace().map(seconds).sum()
    }

    fn end(mut self) -> anyhow::Result<()> {
        let status = self.process.end().context("store up")?;
        ensure!(status.success(), "store up ended with {status}");
        Ok(())
    }
}
