//! Beside fio: the same job, fio's and ours in turn.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::load::perf;
use super::metric::Metric;
use super::process::{Process, describe};
use super::{Outcome, Sample, Setting};

/// A job that both do.
pub(super) struct Job {
    pub(super) engine: &'static str,
    pub(super) depth: u32,
    /// Of a file in memory; otherwise there is no file.
    pub(super) file: bool,
}

/// A file system in memory.
const MEMORY: &str = "/dev/shm";
const FILE_BYTES: u64 = 256 << 20;
/// Beyond its own time, for laying out and ending.
const EXTRA: Duration = Duration::from_secs(30);
/// L-apps on one core in the largest experiment of the studies.
const PROCESSES: u32 = 256;

/// A file in memory that goes when this does.
struct MemoryFile(std::path::PathBuf);

impl MemoryFile {
    fn new() -> anyhow::Result<MemoryFile> {
        let file = MemoryFile(Path::new(MEMORY).join(format!("ringbolt-bench.{}", std::process::id())));
        // Written, so that there are pages to be read.
        let part = [0x5a; 1 << 20];
        let mut text = std::fs::File::create(&file.0).with_context(|| file.0.display().to_string())?;
        for _ in 0..FILE_BYTES / part.len() as u64 {
            std::io::Write::write_all(&mut text, &part)?;
        }
        Ok(file)
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// I/Os a second and processor time an I/O, as multiples of fio's.
pub(super) fn beside(setting: &Setting<'_>, job: &Job) -> anyhow::Result<Outcome> {
    if let Err(error) = Command::new("fio").arg("--version").output() {
        return Ok(Outcome::Skipped(format!("fio cannot be started: {error}")));
    }
    if job.file && !Path::new(MEMORY).is_dir() {
        return Ok(Outcome::Skipped(format!("there is no {MEMORY}")));
    }
    let file = if job.file { Some(MemoryFile::new()?) } else { None };
    let core = setting.cores.get(1).or(setting.cores.first()).copied().unwrap_or(0);
    let mut arguments = vec![
        format!("--ioengine={}", job.engine),
        format!("--iodepth={}", job.depth),
        format!("--runtime={}", if setting.quick { 1 } else { 2 }),
        format!("--size={FILE_BYTES}"),
        format!("--cpus_allowed={core}"),
    ];
    arguments.extend(file.iter().map(|file| format!("--filename={}", file.0.display())));
    let both = ["--name=bench", "--rw=randread", "--bs=4k", "--norandommap", "--time_based", "--thread"];
    let mut fio = Command::new("fio");
    fio.args(both).args(&arguments);
    let mut own = Command::new(setting.binary);
    own.arg("perf").args(both).args(&arguments).arg("--generator_cost=0");
    let (theirs, ours) = (measure(setting, &mut fio)?, measure(setting, &mut own)?);
    let values = [
        (Metric::Iops, ours.iops),
        (Metric::HostCpuNs, ours.cpu_ns),
        (Metric::FioRatio, ours.iops / theirs.iops),
        (Metric::FioCpuRatio, ours.cpu_ns / theirs.cpu_ns),
    ];
    let commands = vec![describe(&fio), describe(&own)];
    Ok(Outcome::Measured(Sample { values: values.into(), commands }))
}

struct Rates {
    iops: f64,
    /// Processor time an I/O in nanoseconds, the kernel's included.
    cpu_ns: f64,
}

fn measure(setting: &Setting<'_>, command: &mut Command) -> anyhow::Result<Rates> {
    rates(&perf(setting, command)?).with_context(|| describe(command))
}

/// Of a job in fio's JSON, which ours is too.
fn rates(job: &Value) -> anyhow::Result<Rates> {
    let number =
        |value: &Value, what: &str| value.as_f64().with_context(|| format!("no {what} in the result"));
    let percent = number(&job["usr_cpu"], "usr_cpu")? + number(&job["sys_cpu"], "sys_cpu")?;
    let ios = number(&job["read"]["total_ios"], "total_ios")?;
    ensure!(ios > 0.0, "no I/O was done");
    let busy_ns = percent / 100.0 * number(&job["job_runtime"], "job_runtime")? * 1e6;
    Ok(Rates { iops: number(&job["read"]["iops"], "iops")?, cpu_ns: busy_ns / ios })
}

/// Many processes that do one I/O each, from exec to the end of the last: no less than they need to start.
pub(super) fn processes(setting: &Setting<'_>) -> anyhow::Result<Outcome> {
    if !Path::new(MEMORY).is_dir() {
        return Ok(Outcome::Skipped(format!("there is no {MEMORY}")));
    }
    let file = MemoryFile::new()?;
    let mut command = Command::new(setting.binary);
    command.args(["perf", "--name=bench", "--ioengine=psync", "--rw=randread", "--bs=4k", "--number_ios=1"]);
    command.args([format!("--numjobs={PROCESSES}"), format!("--filename={}", file.0.display())]);
    command.args(["--generator_cost=0", "--group_reporting", "--eta=never"]);
    let begun = Instant::now();
    let mut process = Process::start(&mut command, setting.scratch, "perf")?;
    let status = process.wait(EXTRA).with_context(|| describe(&command))?;
    ensure!(status.success(), "{}: {status}: {}", describe(&command), setting.scratch.tail("perf.err"));
    let values = [(Metric::StartMs, begun.elapsed().as_secs_f64() * 1e3)].into();
    Ok(Outcome::Measured(Sample { values, commands: vec![describe(&command)] }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_that_of_the_user_and_of_the_kernel() {
        let job = serde_json::json!({
            "usr_cpu": 30.0, "sys_cpu": 20.0, "job_runtime": 2000,
            "read": { "iops": 5e5, "total_ios": 1_000_000 } });
        let found = rates(&job).map(|rates| (rates.iops, rates.cpu_ns));
        assert_eq!(found.ok(), Some((5e5, 1000.0)));
    }
}
