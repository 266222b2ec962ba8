//! Comparison with fio: the same job, run by fio and by `ringbolt perf` one after the other.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::load::perf;
use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::{RunContext, RunOutcome};

/// A job that both run.
pub(super) struct FioJob {
    pub(super) engine: &'static str,
    pub(super) depth: u32,
    pub(super) reads: FioTarget,
}

/// What a job reads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FioTarget {
    /// Nothing: the engine has no device.
    Nothing,
    /// A file in memory, through the page cache.
    MemoryFile,
    /// A loop device over a file in memory, with direct I/O: a thread of the kernel does the reads.
    MemoryDevice,
    /// A zram device, with direct I/O: the reader copies the data, as with a RAM disk. With io_uring a worker of the
    /// kernel does, since the device does not support `RWF_NOWAIT`.
    Zram,
}

/// A tmpfs directory.
const MEMORY: &str = "/dev/shm";
const FILE_BYTES: u64 = 256 << 20;
/// Time allowed beyond the runtime, for layout and exit.
const EXTRA: Duration = Duration::from_secs(30);
/// As many as the L-apps (latency-sensitive applications) on one core in the largest experiment of the studies.
const PROCESSES: u32 = 256;

/// A file in memory, removed on drop.
struct MemoryFile(std::path::PathBuf);

impl MemoryFile {
    fn new() -> anyhow::Result<MemoryFile> {
        let file = MemoryFile(Path::new(MEMORY).join(format!("ringbolt-bench.{}", std::process::id())));
        // Written, so that reads find pages.
        let chunk = [0x5a; 1 << 20];
        let mut output = std::fs::File::create(&file.0).with_context(|| file.0.display().to_string())?;
        for _ in 0..FILE_BYTES / chunk.len() as u64 {
            std::io::Write::write_all(&mut output, &chunk)?;
        }
        Ok(file)
    }
}

/// A loop device over a file in memory, detached on drop.
struct MemoryDevice {
    path: String,
    _file: MemoryFile,
}

impl MemoryDevice {
    fn new() -> anyhow::Result<MemoryDevice> {
        let file = MemoryFile::new()?;
        let output = Command::new("losetup").args(["--find", "--show"]).arg(&file.0).output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "losetup: {}", error.trim());
        let path = String::from_utf8_lossy(&output.stdout).trim().to_string();
        Ok(MemoryDevice { path, _file: file })
    }
}

impl Drop for MemoryDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.path]).status();
    }
}

/// A zram device full of data that does not compress, removed on drop.
struct ZramDevice {
    number: u32,
    path: String,
}

/// Reading it creates a device and returns its number.
const ZRAM_ADD: &str = "/sys/class/zram-control/hot_add";

impl ZramDevice {
    fn new() -> anyhow::Result<ZramDevice> {
        let number = std::fs::read_to_string(ZRAM_ADD).context(ZRAM_ADD)?.trim().parse().context(ZRAM_ADD)?;
        let device = ZramDevice { number, path: format!("/dev/zram{number}") };
        let size = format!("/sys/block/zram{number}/disksize");
        std::fs::write(&size, FILE_BYTES.to_string()).context(size)?;
        let mut output = std::fs::OpenOptions::new().write(true).open(&device.path)?;
        let random = std::fs::File::open("/dev/urandom")?;
        std::io::copy(&mut std::io::Read::take(random, FILE_BYTES), &mut output)?;
        output.sync_all()?;
        Ok(device)
    }
}

impl Drop for ZramDevice {
    fn drop(&mut self) {
        let _ = std::fs::write(format!("/sys/block/zram{}/reset", self.number), "1");
        let _ = std::fs::write("/sys/class/zram-control/hot_remove", self.number.to_string());
    }
}

/// What a job reads, for as long as both generators run.
enum PreparedTarget {
    Nothing,
    File(MemoryFile),
    Device(MemoryDevice),
    Zram(ZramDevice),
}

impl PreparedTarget {
    fn options(&self) -> Vec<String> {
        let direct = |path: &str| vec![format!("--filename={path}"), "--direct=1".to_string()];
        match self {
            PreparedTarget::Nothing => Vec::new(),
            PreparedTarget::File(file) => vec![format!("--filename={}", file.0.display())],
            PreparedTarget::Device(device) => direct(&device.path),
            PreparedTarget::Zram(device) => direct(&device.path),
        }
    }
}

/// Why this machine cannot run a job, if it cannot.
fn obstacle(job: &FioJob) -> Option<String> {
    if let Err(error) = Command::new("fio").arg("--version").output() {
        return Some(format!("fio cannot be started: {error}"));
    }
    if job.reads == FioTarget::Nothing {
        return None;
    }
    if !Path::new(MEMORY).is_dir() {
        return Some(format!("there is no {MEMORY}"));
    }
    if matches!(job.reads, FioTarget::MemoryDevice | FioTarget::Zram) && !rustix::process::geteuid().is_root()
    {
        return Some("loop and zram devices need root".to_string());
    }
    if job.reads == FioTarget::Zram && !Path::new(ZRAM_ADD).exists() {
        return Some(format!("there is no {ZRAM_ADD}: is the kernel module zram loaded?"));
    }
    None
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Measures IOPS, CPU time per I/O and completion latency, and each as a multiple of fio's. The two take turns in being
/// the first.
pub(super) fn compare(context: &RunContext<'_>, job: &FioJob) -> anyhow::Result<RunOutcome> {
    if let Some(reason) = obstacle(job) {
        return Ok(RunOutcome::Skipped(reason));
    }
    let target = match job.reads {
        FioTarget::Nothing => PreparedTarget::Nothing,
        FioTarget::MemoryFile => PreparedTarget::File(MemoryFile::new()?),
        FioTarget::MemoryDevice => PreparedTarget::Device(MemoryDevice::new()?),
        FioTarget::Zram => PreparedTarget::Zram(ZramDevice::new()?),
    };
    let core = context.cores.get(1).or(context.cores.first()).copied().unwrap_or(0);
    let mut arguments = vec![
        format!("--ioengine={}", job.engine),
        format!("--iodepth={}", job.depth),
        format!("--runtime={}", if context.quick { 1 } else { 2 }),
        format!("--size={FILE_BYTES}"),
        format!("--cpus_allowed={core}"),
    ];
    arguments.extend(target.options());
    let common = ["--name=bench", "--rw=randread", "--bs=4k", "--norandommap", "--time_based", "--thread"];
    let mut fio = Command::new("fio");
    fio.args(common).args(&arguments);
    let mut perf = Command::new(context.binary);
    perf.arg("perf").args(common).args(&arguments).arg("--generator_cost=0");
    let (theirs, ours) = if context.run.is_multiple_of(2) {
        let theirs = measure(context, &mut fio)?;
        (theirs, measure(context, &mut perf)?)
    } else {
        let ours = measure(context, &mut perf)?;
        (measure(context, &mut fio)?, ours)
    };
    let mut values = vec![
        (BenchMetric::Iops, ours.iops),
        (BenchMetric::HostCpuNs, ours.cpu_ns()),
        (BenchMetric::FioRatio, ours.iops / theirs.iops),
        (BenchMetric::FioCpuRatio, ours.cpu_ns() / theirs.cpu_ns()),
        (BenchMetric::HostUserNs, ours.user_ns),
        (BenchMetric::HostSystemNs, ours.system_ns),
        (BenchMetric::FioUserNs, theirs.user_ns),
        (BenchMetric::FioSystemNs, theirs.system_ns),
        (BenchMetric::HostSwitches, ours.switches),
        (BenchMetric::FioSwitches, theirs.switches),
    ];
    let [median, p99] = [0, 1].map(|at| ours.latency_ns[at] / theirs.latency_ns[at]);
    let shares = [
        (BenchMetric::FioUserRatio, ours.user_ns / theirs.user_ns),
        (BenchMetric::FioSystemShare, theirs.system_ns / theirs.cpu_ns()),
        (BenchMetric::FioMedianRatio, median),
        (BenchMetric::FioP99Ratio, p99),
    ];
    values.extend(shares.into_iter().filter(|(_, ratio)| ratio.is_finite()));
    let commands = vec![describe(&fio), describe(&perf)];
    Ok(RunOutcome::measured(values, commands))
}

struct FioRates {
    iops: f64,
    /// CPU time per I/O outside the kernel, in nanoseconds.
    user_ns: f64,
    /// CPU time per I/O in the kernel, in nanoseconds.
    system_ns: f64,
    /// Context switches per I/O.
    switches: f64,
    /// Median and 99th percentile of completion latency in nanoseconds.
    latency_ns: [f64; 2],
}

impl FioRates {
    fn cpu_ns(&self) -> f64 {
        self.user_ns + self.system_ns
    }
}

fn measure(context: &RunContext<'_>, command: &mut Command) -> anyhow::Result<FioRates> {
    rates(&perf(context, command)?).with_context(|| describe(command))
}

/// The rates of a job in fio's JSON format, which `ringbolt perf` writes too.
fn rates(job: &Value) -> anyhow::Result<FioRates> {
    let number =
        |value: &Value, what: &str| value.as_f64().with_context(|| format!("no {what} in the result"));
    let ios = number(&job["read"]["total_ios"], "total_ios")?;
    ensure!(ios > 0.0, "no I/O was done");
    let runtime_ns = number(&job["job_runtime"], "job_runtime")? * 1e6;
    let an_io = |field: &str| Ok::<_, anyhow::Error>(number(&job[field], field)? / 100.0 * runtime_ns / ios);
    let percentiles = &job["read"]["clat_ns"]["percentile"];
    let percentile = |name: &str| number(&percentiles[name], "percentile");
    let latency_ns = [percentile("50.000000")?, percentile("99.000000")?];
    let iops = number(&job["read"]["iops"], "iops")?;
    let (user_ns, system_ns) = (an_io("usr_cpu")?, an_io("sys_cpu")?);
    let switches = number(&job["ctx"], "ctx")? / ios;
    Ok(FioRates { iops, user_ns, system_ns, switches, latency_ns })
}

/// The time of many processes that do one I/O each, from exec to the last exit: dominated by process start-up.
pub(super) fn processes(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    if !Path::new(MEMORY).is_dir() {
        return Ok(RunOutcome::Skipped(format!("there is no {MEMORY}")));
    }
    let file = MemoryFile::new()?;
    let mut command = Command::new(context.binary);
    command.args(["perf", "--name=bench", "--ioengine=psync", "--rw=randread", "--bs=4k", "--number_ios=1"]);
    command.args([format!("--numjobs={PROCESSES}"), format!("--filename={}", file.0.display())]);
    command.args(["--generator_cost=0", "--group_reporting", "--eta=never"]);
    let begun = Instant::now();
    let mut process = ChildProcess::start(&mut command, context.directory, "perf")?;
    let status = process.wait(EXTRA).with_context(|| describe(&command))?;
    ensure!(status.success(), "{}: {status}: {}", describe(&command), context.directory.tail("perf.err"));
    let values = [(BenchMetric::StartMs, begun.elapsed().as_secs_f64() * 1e3)];
    Ok(RunOutcome::measured(values, vec![describe(&command)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_and_context_switches_are_those_of_an_io() {
        let job = serde_json::json!({
            "usr_cpu": 30.0, "sys_cpu": 20.0, "ctx": 250_000, "job_runtime": 2000,
            "read": { "iops": 5e5, "total_ios": 1_000_000,
                "clat_ns": { "percentile": { "50.000000": 900, "99.000000": 4000 } } } });
        let found = rates(&job).map(|rates| (rates.iops, rates.user_ns, rates.system_ns, rates.cpu_ns()));
        assert_eq!(found.ok(), Some((5e5, 600.0, 400.0, 1000.0)));
        assert_eq!(rates(&job).map(|rates| rates.switches).ok(), Some(0.25));
        assert_eq!(rates(&job).map(|rates| rates.latency_ns).ok(), Some([900.0, 4000.0]));
    }
}
