//! Description of the machine, and CPU time used by other processes during a run.

use std::fmt;
use std::process::Command;
use std::time::Instant;

use serde_json::{Value, json};

/// The machine and revision that the results depend on.
pub(super) struct MachineInfo {
    pub(super) cpu: String,
    /// CPUs that this process may use.
    pub(super) cores: Vec<u32>,
    pub(super) kernel: String,
    /// cpufreq governor; `None` where the kernel has none, as in most virtual machines.
    pub(super) governor: Option<String>,
    pub(super) hypervisor: bool,
    pub(super) revision: String,
    pub(super) started: String,
    pub(super) load: f64,
}

impl MachineInfo {
    pub(super) fn of_this_machine() -> MachineInfo {
        let cpuinfo = read("/proc/cpuinfo");
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_once(':')).map_or("", |(_, value)| value.trim())
        };
        let status = read("/proc/self/status");
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        MachineInfo {
            cpu: format!(
                "{} (family {} model {})",
                field("model name"),
                field("cpu family"),
                field("model\t")
            ),
            cores: cores(allowed.unwrap_or("0").trim()),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_string(),
            governor: std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
                .ok()
                .map(|text| text.trim().to_string()),
            hypervisor: field("flags").split(' ').any(|flag| flag == "hypervisor"),
            revision: output("git", &["describe", "--always", "--dirty", "--abbrev=12"]),
            started: output("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]),
            load: load(),
        }
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "cpu": self.cpu,
            "cores": self.cores,
            "kernel": self.kernel,
            "governor": self.governor,
            "virtual": self.hypervisor,
            "revision": self.revision,
            "started": self.started,
            "load_average_at_start": self.load,
        })
    }
}

impl fmt::Display for MachineInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {}, {} cores{}, Linux {}, governor {}, load average {:.2}, revision {}",
            self.started,
            self.cpu,
            self.cores.len(),
            if self.hypervisor { " of a virtual machine" } else { "" },
            self.kernel,
            self.governor.as_deref().unwrap_or("unknown"),
            self.load,
            self.revision,
        )
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    output.map_or("unknown".to_string(), |output| String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// Parses the kernel's list of CPUs, as `0-3,5`.
fn cores(list: &str) -> Vec<u32> {
    let mut cores = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) {
            cores.extend(first..=last);
        }
    }
    cores
}

/// Load average of the last minute.
fn load() -> f64 {
    read("/proc/loadavg").split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0.0)
}

/// The kernel's USER_HZ: 100 on every architecture that Ringbolt runs on.
const TICKS_PER_SECOND: f64 = 100.0;

/// CPU time of a process so far, in seconds; with `children`, that of its reaped children too.
pub(super) fn process_seconds(pid: &str, children: bool) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    seconds_of(&stat, children)
}

/// proc(5): fields 14 to 17 are utime, stime, cutime and cstime. Field 2, the name, may contain spaces and
/// parentheses.
fn seconds_of(stat: &str, children: bool) -> Option<f64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let fields = rest.split_whitespace().skip(11).take(if children { 4 } else { 2 });
    let ticks: u64 = fields.map(|field| field.parse::<u64>().unwrap_or(0)).sum();
    Some(ticks as f64 / TICKS_PER_SECOND)
}

/// Busy time of all CPUs together, in seconds: user, nice, system, irq, softirq and steal.
fn busy_seconds(stat: &str) -> f64 {
    let line = stat.lines().next().unwrap_or("");
    let ticks: Vec<u64> = line.split_whitespace().skip(1).map(|field| field.parse().unwrap_or(0)).collect();
    let busy: u64 = [0, 1, 2, 5, 6, 7].iter().filter_map(|index| ticks.get(*index)).sum();
    busy as f64 / TICKS_PER_SECOND
}

/// Measures the CPU time that other processes use during a run.
pub(super) struct LoadMonitor {
    load: f64,
    begun: Instant,
    busy: f64,
    own: f64,
}

impl LoadMonitor {
    pub(super) fn start() -> LoadMonitor {
        LoadMonitor {
            load: load(),
            begun: Instant::now(),
            busy: busy_seconds(&read("/proc/stat")),
            own: process_seconds("self", true).unwrap_or(0.0),
        }
    }

    /// Returns the load average at the start, and the number of CPUs that other processes used on average
    /// since. All processes of the run must have been reaped.
    pub(super) fn finish(self) -> (f64, f64) {
        let busy = busy_seconds(&read("/proc/stat")) - self.busy;
        let own = process_seconds("self", true).unwrap_or(0.0) - self.own;
        let seconds = self.begun.elapsed().as_secs_f64().max(0.001);
        (self.load, ((busy - own) / seconds).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_have_ranges_and_single_cpus() {
        assert_eq!(cores("0-2,5"), [0, 1, 2, 5]);
        assert_eq!(cores("7"), [7]);
    }

    #[test]
    fn cpu_time_is_parsed_for_any_process_name() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 100 0 0 0 150 50 30 20 20 0 3 0 99";
        assert_eq!(seconds_of(stat, false), Some(2.0));
        assert_eq!(seconds_of(stat, true), Some(2.5));
        assert_eq!(busy_seconds("cpu  100 10 40 9000 7 1 2 47 0 0\ncpu0 1"), 2.0);
    }
}
