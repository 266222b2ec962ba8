//! CPU time of a run: of the generator's processes and of the kernel threads that work for them.
//!
//! fio counts only its own threads. The threads that io_uring creates for it (`iou-sqp`, `iou-wrk`) and the kernel's
//! workers are sampled from `/proc`. CPU use of these workers also reveals the path of submission.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Instant;

use crate::host::HostInfo;

/// `USER_HZ`: clock ticks per second in `/proc`, on every architecture that Linux supports.
const TICKS_PER_S: f64 = 100.0;
/// CPU use of workers, in cores, above which requests are considered to go through them.
const WORKER_CORES: f64 = 0.02;

/// CPU use by class of threads, in cores.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CpuUse {
    /// The generator's own threads.
    pub(crate) own: f64,
    /// `iou-sqp`: threads that poll the submission queue.
    pub(crate) sqp: f64,
    /// `iou-wrk`: workers for requests that would block.
    pub(crate) wrk: f64,
    /// Kernel workers, softirq and interrupt threads of the whole machine.
    pub(crate) kworker: f64,
    /// Threads of loop devices, of the whole machine.
    pub(crate) loops: f64,
    /// The whole machine.
    pub(crate) machine: f64,
}

impl CpuUse {
    /// The path by which requests reached the device, as in `submission_path` of a record.
    pub(crate) fn path(&self) -> &'static str {
        if self.sqp > WORKER_CORES {
            "polled-thread"
        } else if self.wrk > WORKER_CORES {
            "worker"
        } else {
            "inline"
        }
    }
}

/// Samples the CPU time of a process and its descendants. Costs a scan of `/proc` per sample, so samples are taken a
/// few times a second.
#[derive(Debug)]
pub(crate) struct CpuTimeSampler<'a> {
    host: &'a HostInfo,
    root: u32,
    /// Class and CPU seconds of each thread at its last sample. Threads that ended stay.
    threads: BTreeMap<u32, (ThreadClass, f64)>,
    /// CPU seconds of each thread when measuring started.
    baseline: BTreeMap<u32, f64>,
    machine: f64,
    kernel: [f64; 2],
    started: Instant,
    /// The last sample at which the process was alive.
    last: CpuSample,
}

#[derive(Clone, Copy, Debug)]
struct CpuSample {
    at: Instant,
    machine: f64,
    kernel: [f64; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThreadClass {
    Own,
    Sqp,
    Wrk,
}

impl<'a> CpuTimeSampler<'a> {
    /// Samples the process `root` and starts measuring.
    pub(crate) fn new(host: &'a HostInfo, root: u32) -> CpuTimeSampler<'a> {
        let mut sampler = CpuTimeSampler {
            host,
            root,
            threads: BTreeMap::new(),
            baseline: BTreeMap::new(),
            machine: 0.0,
            kernel: [0.0; 2],
            started: Instant::now(),
            last: CpuSample { at: Instant::now(), machine: 0.0, kernel: [0.0; 2] },
        };
        sampler.start_measuring();
        sampler
    }

    /// Makes the current sample the start of the measurement.
    pub(crate) fn start_measuring(&mut self) {
        self.sample();
        self.baseline = self.threads.iter().map(|(thread, (_, seconds))| (*thread, *seconds)).collect();
        let CpuSample { at, machine, kernel } = self.last;
        (self.started, self.machine, self.kernel) = (at, machine, kernel);
    }

    /// Updates all threads. Does nothing once the process has ended.
    pub(crate) fn sample(&mut self) {
        let state = stat(&self.host.path(&format!("proc/{}", self.root)))
            .and_then(|fields| fields.into_iter().next());
        if state.is_none_or(|state| state == "Z" || state == "X") {
            return;
        }
        self.last =
            CpuSample { at: Instant::now(), machine: self.machine_seconds(), kernel: self.kernel_seconds() };
        for process in self.process_tree() {
            let tasks = self.host.path(&format!("proc/{process}/task"));
            for entry in fs::read_dir(tasks).into_iter().flatten().flatten() {
                let Some(thread) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
                else {
                    continue;
                };
                let Some((name, seconds)) = thread_time(&entry.path()) else { continue };
                let class = match name.as_str() {
                    name if name.starts_with("iou-sqp") => ThreadClass::Sqp,
                    name if name.starts_with("iou-wrk") => ThreadClass::Wrk,
                    _ => ThreadClass::Own,
                };
                self.threads.insert(thread, (class, seconds));
            }
        }
    }

    /// CPU use from [`CpuTimeSampler::start_measuring`] to the last sample.
    pub(crate) fn cpu_use(&self) -> CpuUse {
        let seconds = self.last.at.duration_since(self.started).as_secs_f64().max(1e-3);
        let cores = |class: ThreadClass| {
            let each = self.threads.iter().filter(|(_, (known, _))| *known == class);
            let sum: f64 =
                each.map(|(thread, (_, now))| now - self.baseline.get(thread).copied().unwrap_or(0.0)).sum();
            // The sum of an empty iterator of floats is -0.0.
            if sum > 0.0 { sum / seconds } else { 0.0 }
        };
        let kernel = self.last.kernel;
        CpuUse {
            own: cores(ThreadClass::Own),
            sqp: cores(ThreadClass::Sqp),
            wrk: cores(ThreadClass::Wrk),
            kworker: (kernel[0] - self.kernel[0]).max(0.0) / seconds,
            loops: (kernel[1] - self.kernel[1]).max(0.0) / seconds,
            machine: (self.last.machine - self.machine).max(0.0) / seconds,
        }
    }

    /// The process and its descendants.
    fn process_tree(&self) -> BTreeSet<u32> {
        let mut process_tree = BTreeSet::from([self.root]);
        let mut parents: Vec<(u32, u32)> = Vec::new();
        for entry in fs::read_dir(self.host.path("proc")).into_iter().flatten().flatten() {
            let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            if let Some(parent) = stat(&entry.path()).and_then(|fields| fields.get(1)?.parse().ok()) {
                parents.push((process, parent));
            }
        }
        // A child's pid may be smaller than its parent's: repeat until nothing is added.
        loop {
            let before = process_tree.len();
            for (process, parent) in &parents {
                if process_tree.contains(parent) {
                    process_tree.insert(*process);
                }
            }
            if process_tree.len() == before {
                return process_tree;
            }
        }
    }

    fn machine_seconds(&self) -> f64 {
        let text = self.host.text("proc/stat").unwrap_or_default();
        let numbers: Vec<f64> = text
            .lines()
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .skip(1)
            .filter_map(|word| word.parse().ok())
            .collect();
        // All fields but idle and iowait; guest time is part of user time.
        let busy = numbers.iter().take(8).enumerate().filter(|(i, _)| *i != 3 && *i != 4).map(|(_, n)| n);
        busy.sum::<f64>() / TICKS_PER_S
    }

    /// CPU seconds of kernel workers, softirq and interrupt threads, and of loop devices.
    fn kernel_seconds(&self) -> [f64; 2] {
        let mut sums = [0.0; 2];
        for entry in fs::read_dir(self.host.path("proc")).into_iter().flatten().flatten() {
            let path = entry.path();
            // Kernel threads are children of kthreadd, pid 2.
            if stat(&path).is_none_or(|fields| fields.get(1).is_none_or(|parent| parent != "2")) {
                continue;
            }
            let Some((name, seconds)) = thread_time(&path) else { continue };
            if name.starts_with("kworker") || name.starts_with("ksoftirqd") || name.starts_with("irq/") {
                sums[0] += seconds;
            } else if name.starts_with("loop") {
                sums[1] += seconds;
            }
        }
        sums
    }
}

/// The fields of `stat` after the name, state first.
fn stat(path: &Path) -> Option<Vec<String>> {
    let text = fs::read_to_string(path.join("stat")).ok()?;
    Some(text.rsplit_once(')')?.1.split_whitespace().map(String::from).collect())
}

/// Name and CPU seconds of a thread, in nanosecond resolution if the kernel has `schedstat`.
fn thread_time(path: &Path) -> Option<(String, f64)> {
    let name = fs::read_to_string(path.join("comm")).ok()?.trim().to_string();
    let exact = fs::read_to_string(path.join("schedstat")).ok();
    let exact = exact.and_then(|text| text.split(' ').next()?.parse::<f64>().ok()).filter(|ns| *ns > 0.0);
    if let Some(ns) = exact {
        return Some((name, ns / 1e9));
    }
    let fields = stat(path)?;
    let ticks = |at: usize| fields.get(at).and_then(|word| word.parse::<f64>().ok()).unwrap_or(0.0);
    Some((name, (ticks(11) + ticks(12)) / TICKS_PER_S))
}

#[cfg(test)]
mod tests;
