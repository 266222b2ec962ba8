//! Who spends processor time on a run: the generator's processes, and the kernel threads beside them.
//!
//! fio counts its own threads. The threads that io_uring starts for it (`iou-sqp`, `iou-wrk`) and the
//! kernel's workers are not in that, so they are looked at from outside, in `/proc`. Whether requests
//! go through such workers is also how the path of submission is known.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Instant;

use crate::host::Host;

/// Clock ticks of `/proc` a second, as on every architecture that Linux still has.
const TICKS_PER_S: f64 = 100.0;
/// Share of a core that workers must use before requests are said to go through them.
const WORKER_CORES: f64 = 0.02;

/// Processor time by class since a moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Spent {
    /// Cores that the generator's own threads kept busy.
    pub(crate) own: f64,
    /// `iou-sqp`: threads that poll for submissions.
    pub(crate) sqp: f64,
    /// `iou-wrk`: workers that carry out what could not be done at once.
    pub(crate) wrk: f64,
    /// The kernel's workers and interrupt threads, of the whole machine.
    pub(crate) kworker: f64,
    /// Threads of loop devices, of the whole machine.
    pub(crate) loops: f64,
    /// All of the machine.
    pub(crate) machine: f64,
}

impl Spent {
    /// How requests reached the device.
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

/// Looks at a process and its descendants, now and then.
#[derive(Debug)]
pub(crate) struct Watch<'a> {
    host: &'a Host,
    root: u32,
    /// Seconds of each thread by then, and the class that it is of. Threads that end stay.
    seen: BTreeMap<u32, (Class, f64)>,
    /// What each had when measuring began.
    base: BTreeMap<u32, f64>,
    machine: f64,
    kernel: [f64; 2],
    began: Instant,
    /// The last look at which the process was alive.
    last: Last,
}

#[derive(Clone, Copy, Debug)]
struct Last {
    at: Instant,
    machine: f64,
    kernel: [f64; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Own,
    Sqp,
    Wrk,
}

impl<'a> Watch<'a> {
    /// Begins with a process.
    pub(crate) fn new(host: &'a Host, root: u32) -> Watch<'a> {
        let mut watch = Watch {
            host,
            root,
            seen: BTreeMap::new(),
            base: BTreeMap::new(),
            machine: 0.0,
            kernel: [0.0; 2],
            began: Instant::now(),
            last: Last { at: Instant::now(), machine: 0.0, kernel: [0.0; 2] },
        };
        watch.begin();
        watch
    }

    /// Counts from now on.
    pub(crate) fn begin(&mut self) {
        self.look();
        self.base = self.seen.iter().map(|(thread, (_, seconds))| (*thread, *seconds)).collect();
        let Last { at, machine, kernel } = self.last;
        (self.began, self.machine, self.kernel) = (at, machine, kernel);
    }

    /// Takes note of all threads that there are. Once the process has ended, nothing is taken note of.
    pub(crate) fn look(&mut self) {
        let state = stat(&self.host.path(&format!("proc/{}", self.root)))
            .and_then(|fields| fields.into_iter().next());
        if state.is_none_or(|state| state == "Z" || state == "X") {
            return;
        }
        self.last =
            Last { at: Instant::now(), machine: self.machine_seconds(), kernel: self.kernel_seconds() };
        for process in self.family() {
            let tasks = self.host.path(&format!("proc/{process}/task"));
            for entry in fs::read_dir(tasks).into_iter().flatten().flatten() {
                let Some(thread) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
                else {
                    continue;
                };
                let Some((name, seconds)) = thread_time(&entry.path()) else { continue };
                let class = match name.as_str() {
                    name if name.starts_with("iou-sqp") => Class::Sqp,
                    name if name.starts_with("iou-wrk") => Class::Wrk,
                    _ => Class::Own,
                };
                self.seen.insert(thread, (class, seconds));
            }
        }
    }

    /// What was spent from [`Watch::begin`] to the last look, in cores.
    pub(crate) fn spent(&self) -> Spent {
        let seconds = self.last.at.duration_since(self.began).as_secs_f64().max(1e-3);
        let of = |class: Class| {
            let each = self.seen.iter().filter(|(_, (of, _))| *of == class);
            let sum: f64 =
                each.map(|(thread, (_, now))| now - self.base.get(thread).copied().unwrap_or(0.0)).sum();
            // A sum of nothing is a negative zero.
            if sum > 0.0 { sum / seconds } else { 0.0 }
        };
        let kernel = self.last.kernel;
        Spent {
            own: of(Class::Own),
            sqp: of(Class::Sqp),
            wrk: of(Class::Wrk),
            kworker: (kernel[0] - self.kernel[0]).max(0.0) / seconds,
            loops: (kernel[1] - self.kernel[1]).max(0.0) / seconds,
            machine: (self.last.machine - self.machine).max(0.0) / seconds,
        }
    }

    /// The process and those that it started.
    fn family(&self) -> BTreeSet<u32> {
        let mut family = BTreeSet::from([self.root]);
        let mut parents: Vec<(u32, u32)> = Vec::new();
        for entry in fs::read_dir(self.host.path("proc")).into_iter().flatten().flatten() {
            let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            if let Some(parent) = stat(&entry.path()).and_then(|fields| fields.get(1)?.parse().ok()) {
                parents.push((process, parent));
            }
        }
        // A child's number may be the smaller one, so until nothing is added.
        loop {
            let before = family.len();
            for (process, parent) in &parents {
                if family.contains(parent) {
                    family.insert(*process);
                }
            }
            if family.len() == before {
                return family;
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
        // All but idle and iowait; guests are in user time already.
        let busy = numbers.iter().take(8).enumerate().filter(|(i, _)| *i != 3 && *i != 4).map(|(_, n)| n);
        busy.sum::<f64>() / TICKS_PER_S
    }

    /// Of kworkers and interrupt threads, and of loop devices.
    fn kernel_seconds(&self) -> [f64; 2] {
        let mut sums = [0.0; 2];
        for entry in fs::read_dir(self.host.path("proc")).into_iter().flatten().flatten() {
            let path = entry.path();
            // Children of kthreadd alone.
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

/// The fields of a stat file after the name, state first.
fn stat(path: &Path) -> Option<Vec<String>> {
    let text = fs::read_to_string(path.join("stat")).ok()?;
    Some(text.rsplit_once(')')?.1.split_whitespace().map(String::from).collect())
}

/// A thread's name and seconds, exact where the scheduler tells them.
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
