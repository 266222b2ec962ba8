//! Ceph in turn with the store: the same image size, the same load, two replicas on the same kind of loop devices.
//!
//! The cluster is a monitor and two OSDs (BlueStore) of the distribution's packages, on loopback and without
//! authentication, with the settings that made Ceph fastest on two cores. fio's `rbd` engine is its client.

use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::super::load::{self, IoPattern};
use super::super::machine_info::process_seconds;
use super::super::metric::BenchMetric;
use super::super::process::{ChildProcess, describe};
use super::super::{RunContext, RunOutcome};
use super::cluster::{self, ClusterOptions, LoopCache, LoopDevice, StoreCluster};
use super::{DEVICE_BYTES, IMAGE, under_load};

/// A command of Ceph's command line ends within this time.
const COMMAND_MAX: Duration = Duration::from_secs(60);
/// How long the monitor, or the pool, may take until it answers.
const START_MAX: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);
const PLACEMENT_GROUPS: &str = "32";
/// Preloaded where it is installed: BlueStore is faster with it than with the C library's allocator.
const ALLOCATOR: &str = "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4";
/// What the comparison runs.
const PROGRAMS: [&str; 6] = ["ceph-mon", "ceph-osd", "monmaptool", "ceph", "rbd", "fio"];

/// Loads an image of Ceph and one of the store in turn, and compares rates and the CPU time of OSDs and nodes.
pub(in crate::bench) fn compare_ceph(
    context: &RunContext<'_>,
    pattern: &IoPattern,
) -> anyhow::Result<RunOutcome> {
    if let Some(skipped) = cluster::unavailable() {
        return Ok(skipped);
    }
    if let Some(missing) = PROGRAMS.into_iter().find(|program| !is_installed(program)) {
        let packages = "ceph-mon, ceph-osd, ceph-common and fio";
        return Ok(RunOutcome::Skipped(format!("no {missing} (Debian: {packages})")));
    }
    let (theirs, ours) = if context.run.is_multiple_of(2) {
        let theirs = load_ceph(context, pattern)?;
        (theirs, load_store(context, pattern)?)
    } else {
        let ours = load_store(context, pattern)?;
        (load_ceph(context, pattern)?, ours)
    };
    let (mut values, mut commands) = ours;
    let ratio = |metric, their: f64| Some(values.get(&metric)? / their);
    let ratios = [
        (BenchMetric::CephRatio, ratio(BenchMetric::Iops, theirs.iops)),
        (BenchMetric::CephCpuRatio, ratio(BenchMetric::TargetCpuNs, theirs.cpu_ns)),
    ];
    values.extend(ratios.into_iter().filter_map(|(metric, ratio)| Some((metric, ratio?))));
    values.insert(BenchMetric::CephIops, theirs.iops);
    values.insert(BenchMetric::CephCpuNs, theirs.cpu_ns);
    commands.push(theirs.command);
    Ok(RunOutcome::measured(values, commands))
}

fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

type Loaded = (std::collections::BTreeMap<BenchMetric, f64>, Vec<String>);

fn load_store(context: &RunContext<'_>, pattern: &IoPattern) -> anyhow::Result<Loaded> {
    let device = || LoopDevice::create(context, LoopCache::None, DEVICE_BYTES);
    let devices = [device()?, device()?];
    let options = ClusterOptions { devices: &devices, image: IMAGE, ..ClusterOptions::default() };
    let cluster = StoreCluster::start(context, &options)?;
    let loaded = under_load(context, &cluster.uri(), pattern, &devices, || cluster.cpu_seconds())?;
    let commands = vec![cluster.command.clone(), loaded.command];
    cluster.end()?;
    Ok((loaded.values, commands))
}

/// What an image of Ceph does under a load.
struct CephRates {
    iops: f64,
    /// CPU time of the OSDs per I/O, in nanoseconds.
    cpu_ns: f64,
    command: String,
}

fn load_ceph(context: &RunContext<'_>, pattern: &IoPattern) -> anyhow::Result<CephRates> {
    let device = || LoopDevice::create(context, LoopCache::None, DEVICE_BYTES);
    let devices = [device()?, device()?];
    let ceph = CephCluster::start(context, &devices)?;
    load::perf(context, &mut ceph.fio(&IoPattern { rw: "write", block: "128k", depth: 16 }))?;
    let mut fio = ceph.fio(pattern);
    let runtime = if context.quick { "--runtime=1" } else { "--runtime=4" };
    fio.args(["--time_based", runtime]);
    let cpu_before = ceph.cpu_seconds()?;
    let job = load::perf(context, &mut fio)?;
    let cpu = ceph.cpu_seconds()? - cpu_before;
    let (iops, total) = rates(&job).with_context(|| describe(&fio))?;
    Ok(CephRates { iops, cpu_ns: cpu / total * 1e9, command: describe(&fio) })
}

/// IOPS and number of I/Os of a job in fio's JSON format.
fn rates(job: &Value) -> anyhow::Result<(f64, f64)> {
    let sides = ["read", "write"].map(|side| &job[side]);
    let side = sides.into_iter().find(|side| side["total_ios"].as_u64() > Some(0));
    let side = side.context("fio did no I/O")?;
    let number = |field: &str| side[field].as_f64().with_context(|| format!("no {field} in the result"));
    Ok((number("iops")?, number("total_ios")?))
}

/// A monitor and an OSD a device, killed on drop.
struct CephCluster {
    /// Before the monitor, so that they end first.
    osds: Vec<ChildProcess>,
    _monitor: ChildProcess,
    configuration: PathBuf,
}

impl CephCluster {
    fn start(context: &RunContext<'_>, devices: &[LoopDevice]) -> anyhow::Result<CephCluster> {
        let directory = context.directory.folder("ceph")?;
        let port = free_port()?;
        let fsid = random_uuid()?;
        let configuration = directory.join("ceph.conf");
        std::fs::write(&configuration, settings(&directory, &fsid, port))?;
        std::fs::write(directory.join("keyring"), "")?;
        let map = directory.join("monmap");
        let mut create = Command::new("monmaptool");
        create.args(["--create", "--fsid", &fsid, "--addv", "a", &address(port)]).arg(&map);
        run(context, &mut create)?;
        let mut make = daemon("ceph-mon", "a", &configuration);
        run(context, make.arg("--mkfs").arg("--monmap").arg(&map))?;
        let monitor =
            ChildProcess::start(daemon("ceph-mon", "a", &configuration).arg("-f"), context.directory, "mon")?;
        let mut cluster = CephCluster { osds: Vec::new(), _monitor: monitor, configuration };
        cluster.wait_for_monitor(context)?;
        for (number, device) in devices.iter().enumerate() {
            cluster.add_osd(context, &directory, &number.to_string(), device)?;
        }
        cluster.run(context, "ceph", &["osd", "pool", "create", "rbd", PLACEMENT_GROUPS])?;
        // Waits until the pool's placement groups are active.
        cluster.run(
            context,
            "rbd",
            &["create", "vol", "--size", &IMAGE.to_uppercase(), "--image-feature", "layering"],
        )?;
        Ok(cluster)
    }

    fn wait_for_monitor(&self, context: &RunContext<'_>) -> anyhow::Result<()> {
        let begun = Instant::now();
        loop {
            match self.run(context, "ceph", &["--connect-timeout", "5", "mon", "stat"]) {
                Ok(_) => return Ok(()),
                Err(error) => ensure!(begun.elapsed() < START_MAX, "Ceph's monitor does not answer: {error}"),
            }
            std::thread::sleep(POLL);
        }
    }

    fn add_osd(
        &mut self,
        context: &RunContext<'_>,
        directory: &Path,
        number: &str,
        device: &LoopDevice,
    ) -> anyhow::Result<()> {
        let uuid = random_uuid()?;
        let data = directory.join(format!("osd.{number}"));
        std::fs::create_dir(&data)?;
        symlink(&device.node, data.join("block"))?;
        let assigned = self.run(context, "ceph", &["osd", "new", &uuid])?;
        ensure!(assigned.trim() == number, "Ceph's new OSD is {}, not {number}", assigned.trim());
        let mut make = daemon("ceph-osd", number, &self.configuration);
        run(context, make.args(["--mkfs", "--osd-uuid", &uuid]))?;
        let mut command = daemon("ceph-osd", number, &self.configuration);
        self.osds.push(ChildProcess::start(command.arg("-f"), context.directory, &format!("osd{number}"))?);
        Ok(())
    }

    /// A job on the whole image, without its runtime.
    fn fio(&self, pattern: &IoPattern) -> Command {
        let mut command = Command::new("fio");
        command.env("CEPH_CONF", &self.configuration);
        if Path::new(ALLOCATOR).exists() {
            command.env("LD_PRELOAD", ALLOCATOR);
        }
        command.args(["--name=bench", "--ioengine=rbd", "--clientname=admin", "--pool=rbd", "--rbdname=vol"]);
        command.args([format!("--rw={}", pattern.rw), format!("--bs={}", pattern.block)]);
        command.args([format!("--iodepth={}", pattern.depth), "--norandommap".to_string()]);
        command
    }

    fn cpu_seconds(&self) -> anyhow::Result<f64> {
        let seconds = |osd: &ChildProcess| process_seconds(&osd.id().to_string(), false);
        self.osds.iter().map(|osd| seconds(osd).context("an OSD ended early")).sum()
    }

    /// Runs a command of Ceph's on the cluster, and returns its output.
    fn run(&self, context: &RunContext<'_>, program: &str, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(program);
        run(context, command.arg("-c").arg(&self.configuration).args(arguments))
    }
}

fn daemon(program: &str, name: &str, configuration: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["-i", name, "-c"]).arg(configuration);
    if program == "ceph-osd" && Path::new(ALLOCATOR).exists() {
        command.env("LD_PRELOAD", ALLOCATOR);
    }
    command
}

fn run(context: &RunContext<'_>, command: &mut Command) -> anyhow::Result<String> {
    let mut process = ChildProcess::start(command, context.directory, "ceph-command")?;
    let status = process.wait(COMMAND_MAX).with_context(|| describe(command))?;
    ensure!(
        status.success(),
        "{}: {status}: {}",
        describe(command),
        context.directory.tail("ceph-command.err")
    );
    Ok(std::fs::read_to_string(context.directory.file("ceph-command.out"))?)
}

fn random_uuid() -> anyhow::Result<String> {
    let path = "/proc/sys/kernel/random/uuid";
    Ok(std::fs::read_to_string(path).context(path)?.trim().to_string())
}

fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

fn address(port: u16) -> String {
    format!("[v2:127.0.0.1:{port}]")
}

/// Ceph's configuration: all on loopback, nothing authenticated or logged, one shard of two threads an OSD.
fn settings(directory: &Path, fsid: &str, port: u16) -> String {
    let (directory, address) = (directory.display(), address(port));
    let mut text = format!(
        "[global]\n\
         fsid = {fsid}\n\
         mon host = {address}\n\
         mon initial members = a\n\
         public network = 127.0.0.0/8\n\
         cluster network = 127.0.0.0/8\n\
         public addr = 127.0.0.1\n\
         cluster addr = 127.0.0.1\n\
         auth cluster required = none\n\
         auth service required = none\n\
         auth client required = none\n\
         auth allow insecure global id reclaim = false\n\
         keyring = {directory}/keyring\n\
         run dir = {directory}\n\
         admin socket =\n\
         pid file =\n\
         log file =\n\
         crash dir = {directory}\n\
         mon data = {directory}/mon.$id\n\
         osd data = {directory}/osd.$id\n\
         mon data avail warn = 1\n\
         mon data avail crit = 0\n\
         osd pool default size = 2\n\
         osd pool default min size = 1\n\
         osd pool default pg autoscale mode = off\n\
         osd crush chooseleaf type = 0\n\
         throttler perf counter = false\n\
         [osd]\n\
         bluestore debug enforce settings = ssd\n\
         bluestore cache autotune = false\n\
         bluestore cache size = 1073741824\n\
         osd op num shards = 1\n\
         osd op num threads per shard = 2\n\
         ms async op threads = 2\n\
         osd enable op tracker = false\n\
         [client]\n\
         rbd cache = false\n\
         ms async op threads = 1\n\
         [global]\n"
    );
    // Levels of what is logged and of what is kept in memory for a crash.
    for part in [
        "asok",
        "auth",
        "bdev",
        "bluefs",
        "bluestore",
        "buffer",
        "context",
        "crush",
        "filer",
        "finisher",
        "heartbeatmap",
        "lockdep",
        "mon",
        "monc",
        "ms",
        "none",
        "objclass",
        "objectcacher",
        "objecter",
        "optracker",
        "osd",
        "paxos",
        "perfcounter",
        "prioritycache",
        "rados",
        "rbd",
        "reserver",
        "rocksdb",
        "striper",
        "throttle",
        "timer",
        "tp",
    ] {
        text.push_str(&format!("debug {part} = 0/0\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_side_that_did_io() {
        let job = serde_json::json!({
            "read": { "total_ios": 0, "iops": 0.0 }, "write": { "total_ios": 2000, "iops": 1639.0 } });
        assert_eq!(rates(&job).ok(), Some((1639.0, 2000.0)));
        let nothing = serde_json::json!({ "read": { "total_ios": 0 }, "write": { "total_ios": 0 } });
        assert!(rates(&nothing).is_err());
    }
}
