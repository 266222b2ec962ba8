//! A cluster of the store on loop devices in memory.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;

use super::super::machine_info::process_seconds;
use super::super::process::{ChildProcess, describe};
use super::super::server::resident_mib;
use super::super::{RunContext, RunOutcome};

/// The backing files are here: memory.
const MEMORY: &str = "/dev/shm";
const START_MAX: Duration = Duration::from_secs(30);
/// Time that a killed node may take to end.
const END_MAX: Duration = Duration::from_secs(10);
const SECTOR_BYTES: f64 = 512.0;

/// Why a benchmark on loop devices in memory cannot run here.
pub(super) fn unavailable() -> Option<RunOutcome> {
    if !rustix::process::geteuid().is_root() {
        return Some(RunOutcome::Skipped("loop devices in memory need root".to_string()));
    }
    (!Path::new(MEMORY).is_dir()).then(|| RunOutcome::Skipped(format!("{MEMORY} does not exist")))
}

/// Bytes that the backing files may still have.
pub(super) fn free_bytes() -> anyhow::Result<u64> {
    let space = rustix::fs::statvfs(MEMORY).context(MEMORY)?;
    Ok(space.f_bavail * space.f_frsize)
}

/// What a loop device reports about its cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::bench) enum LoopCache {
    /// It has none: a write that is complete is durable, on both sides of the comparison.
    None,
    /// It is volatile: the store's writes are followed by flushes, those of the other volume are not.
    Volatile,
}

/// A loop device on a file in memory, detached on drop.
pub(super) struct LoopDevice {
    pub(super) node: PathBuf,
    backing: PathBuf,
}

impl LoopDevice {
    pub(super) fn create(
        context: &RunContext<'_>,
        cache: LoopCache,
        bytes: u64,
    ) -> anyhow::Result<LoopDevice> {
        let (file, backing) = (0..)
            .map(|number| Path::new(MEMORY).join(format!("ringbolt-bench-{}-{number}", std::process::id())))
            .find_map(|path| Some((std::fs::File::create_new(&path).ok()?, path)))
            .context("no file in memory")?;
        // Removes the file where the rest fails.
        let mut device = LoopDevice { node: PathBuf::new(), backing };
        file.set_len(bytes)?;
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
    pub(super) fn written_bytes(&self) -> anyhow::Result<f64> {
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

/// What a cluster consists of.
#[derive(Default)]
pub(super) struct ClusterOptions<'a> {
    /// A node each.
    pub(super) devices: &'a [LoopDevice],
    /// For the logs of each node; without, they are on its device.
    pub(super) logs: &'a [LoopDevice],
    /// Logical groups, if not the usual number.
    pub(super) groups: Option<u32>,
    /// Spare partitions of each node, for replicas that move to it.
    pub(super) spare: u32,
    /// The size of the image `vol`.
    pub(super) image: &'a str,
    /// All its objects are allocated from the beginning.
    pub(super) preallocate: bool,
}

/// A running `ringbolt store up`, with two replicas of each group where there are two nodes.
pub(super) struct StoreCluster {
    process: ChildProcess,
    directory: PathBuf,
    up: Command,
    pub(super) command: String,
}

impl StoreCluster {
    pub(super) fn start(
        context: &RunContext<'_>,
        options: &ClusterOptions<'_>,
    ) -> anyhow::Result<StoreCluster> {
        let directory = context.directory.folder("cluster-parent")?.join("cluster");
        let mut command = Command::new(context.binary);
        // The backing files in memory have no power to lose.
        command.args(["store", "up", "--atomic-blocks"]);
        command.arg(format!("--replicas={}", options.devices.len().min(2)));
        command.arg(format!("--spare={}", options.spare)).arg("--cluster").arg(&directory);
        command.args(options.groups.map(|groups| format!("--groups={groups}")));
        for (option, devices) in [("--device", options.devices), ("--log", options.logs)] {
            for device in devices {
                command.arg(option).arg(&device.node);
            }
        }
        let process = start_until_ready(context, &mut command)?;
        let cluster = StoreCluster { process, directory, command: describe(&command), up: command };
        let mut create = vec!["image", "create", "vol", options.image];
        create.extend(options.preallocate.then_some("--preallocate"));
        cluster.run(context, &create)?;
        Ok(cluster)
    }

    /// Kills it with its nodes, and starts it again. Returns the time from exec until it is ready.
    pub(super) fn kill_and_start(&mut self, context: &RunContext<'_>) -> anyhow::Result<Duration> {
        // First itself: it starts nodes again.
        let open = |node: Pid| Ok(pidfd_open(node, PidfdFlags::empty())?);
        let nodes: Vec<OwnedFd> = self.nodes()?.into_iter().map(open).collect::<anyhow::Result<_>>()?;
        self.process.kill()?;
        for node in nodes {
            pidfd_send_signal(&node, Signal::KILL)?;
            // Readable when it has ended.
            let limit = Timespec::try_from(END_MAX)?;
            let ended = poll(&mut [PollFd::new(&node, PollFlags::IN)], Some(&limit))?;
            ensure!(ended > 0, "a node did not end after SIGKILL");
        }
        let begun = Instant::now();
        self.process = start_until_ready(context, &mut self.up)?;
        Ok(begun.elapsed())
    }

    /// The image's URI.
    pub(super) fn uri(&self) -> String {
        format!("store:pool/vol?cluster={}", self.directory.display())
    }

    /// Runs a command of `ringbolt` on this cluster, and returns its output.
    pub(super) fn run(&self, context: &RunContext<'_>, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(context.binary);
        command.args(arguments).arg("--cluster").arg(&self.directory);
        let mut process = ChildProcess::start(&mut command, context.directory, "cluster")?;
        let status = process.wait(START_MAX)?;
        ensure!(status.success(), "{}: {}", describe(&command), context.directory.tail("cluster.err"));
        Ok(std::fs::read_to_string(context.directory.file("cluster.out"))?)
    }

    /// What `ringbolt store status --json` prints.
    pub(super) fn status(&self, context: &RunContext<'_>) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&self.run(context, &["store", "status", "--json"])?)?)
    }

    /// The processes of the nodes, which are its children.
    pub(super) fn nodes(&self) -> anyhow::Result<Vec<Pid>> {
        let id = self.process.id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
        let pid = |number: &str| Pid::from_raw(number.parse().ok()?);
        Ok(children.split_whitespace().filter_map(pid).collect())
    }

    /// CPU time of the nodes.
    pub(super) fn cpu_seconds(&self) -> anyhow::Result<f64> {
        let seconds = |node: Pid| process_seconds(&node.to_string(), false).context("a node ended early");
        self.nodes()?.into_iter().map(seconds).sum()
    }

    /// Resident memory of the largest node.
    pub(super) fn resident_mib_max(&self) -> anyhow::Result<f64> {
        let mib = self.nodes()?.into_iter().map(|node| resident_mib(&node.to_string()));
        Ok(mib.collect::<anyhow::Result<Vec<f64>>>()?.into_iter().fold(0.0, f64::max))
    }

    pub(super) fn end(mut self) -> anyhow::Result<()> {
        let status = self.process.end().context("store up")?;
        ensure!(status.success(), "store up ended with {status}");
        Ok(())
    }
}

/// Starts `store up`, and waits until it is ready.
fn start_until_ready(context: &RunContext<'_>, command: &mut Command) -> anyhow::Result<ChildProcess> {
    let mut process = ChildProcess::start(command, context.directory, "store")?;
    let begun = Instant::now();
    while !context.directory.tail("store.out").contains("ready") {
        if let Some(status) = process.ended()? {
            bail!("store up: {status}: {}", context.directory.tail("store.err"));
        }
        ensure!(begun.elapsed() < START_MAX, "store up is not ready in time");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(process)
}
