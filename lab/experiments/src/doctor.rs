//! Properties of the machine that distort measurements, and how to change them.
//!
//! Nothing is changed here. A [`Distortion`] contains the settings that a run may change through its
//! [`crate::journal::Journal`], which restores them.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Value as Json, json};

use crate::host::{BlockDeviceInfo, CpuInfo, HostInfo, KernelInfo, SystemLoad};

/// Load average per CPU above which the load is reported.
const LOAD_MAX: f64 = 0.1;

/// A property that makes results differ from what the hardware could do, or between runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Distortion {
    /// Short identifier.
    pub id: String,
    /// The property and its effect on results.
    pub what: String,
    /// The command that changes it, if there is one.
    pub command: Option<String>,
    /// What `--apply` writes: files and values.
    #[serde(skip)]
    pub settings: Vec<(PathBuf, String)>,
}

/// Properties of the machine and of devices, as stored with results.
#[derive(Clone, Debug, Default, Serialize)]
pub struct MachineFacts {
    /// CPUs.
    pub cpu: CpuInfo,
    /// Kernel.
    pub kernel: KernelInfo,
    /// Block devices.
    pub devices: Vec<BlockDeviceInfo>,
    /// Load when the facts were read.
    pub load: SystemLoad,
    /// Available counters by name: `yes`, or why not.
    pub counters: Vec<(String, String)>,
    /// Whether io_uring works: `yes`, or why not.
    pub io_uring: String,
}

impl MachineFacts {
    /// Reads the facts of this machine and of `devices`, or of all block devices if that is empty.
    pub fn read(
        host: &HostInfo,
        devices: &[String],
        counters: Vec<(String, String)>,
        io_uring: String,
    ) -> MachineFacts {
        let named = devices.iter().map(|name| host.block(name));
        let devices = if devices.is_empty() { host.blocks() } else { named.collect() };
        MachineFacts {
            cpu: host.cpu(),
            kernel: host.kernel(),
            devices,
            load: host.load(),
            counters,
            io_uring,
        }
    }

    /// The facts as stored in `machine.json`.
    pub fn to_json(&self) -> Json {
        serde_json::to_value(self).unwrap_or_else(|_| json!({}))
    }
}

/// The distortions on a machine with these facts.
pub fn examine(host: &HostInfo, facts: &MachineFacts) -> Vec<Distortion> {
    let mut found = Vec::new();
    of_cpu(host, &facts.cpu, &mut found);
    of_kernel(host, &facts.kernel, facts, &mut found);
    for block in &facts.devices {
        of_block(host, block, &mut found);
    }
    let cpus = facts.cpu.cpus.len().max(1) as f64;
    if facts.load.load_average > LOAD_MAX * cpus {
        found.push(Distortion {
            id: "load".into(),
            what: format!(
                "load average {:.2}: other processes take CPU time and cache",
                facts.load.load_average
            ),
            command: Some("ps -eo pcpu,pid,comm --sort=-pcpu | head".into()),
            settings: Vec::new(),
        });
    }
    found
}

fn push(found: &mut Vec<Distortion>, id: &str, what: String, settings: Vec<(PathBuf, String)>) {
    let shell = |(path, value): &(PathBuf, String)| format!("echo {value} > {}", path.display());
    let command = match settings.as_slice() {
        [] => None,
        [one] => Some(shell(one)),
        [one, rest @ ..] => Some(format!("{}   # and {} more like it", shell(one), rest.len())),
    };
    found.push(Distortion { id: id.into(), what, command, settings });
}

fn of_cpu(host: &HostInfo, cpu: &CpuInfo, found: &mut Vec<Distortion>) {
    let base = "sys/devices/system/cpu";
    let slow: Vec<&String> = cpu.governors.iter().filter(|governor| *governor != "performance").collect();
    if !slow.is_empty() {
        let file = |cpu: &u32| {
            (host.path(&format!("{base}/cpu{cpu}/cpufreq/scaling_governor")), "performance".into())
        };
        let what = format!(
            "frequency governor {}: the CPU frequency follows the load, and so do all times",
            slow[0]
        );
        push(
            found,
            "governor",
            what,
            cpu.cpus.iter().map(file).filter(|(path, _): &(PathBuf, String)| path.exists()).collect(),
        );
    }
    if cpu.turbo == Some(true) {
        let intel = host.path(&format!("{base}/intel_pstate/no_turbo"));
        let settings = if intel.exists() {
            vec![(intel, "1".to_string())]
        } else {
            vec![(host.path(&format!("{base}/cpufreq/boost")), "0".to_string())]
        };
        push(
            found,
            "turbo",
            "turbo is on: few busy cores run faster than many, which bends scaling curves".into(),
            settings,
        );
    }
    if cpu.smt == Some(true) {
        let what = "two logical processors share a core: pinning to half of them, or switching SMT off, is what the \
                    studies did";
        push(found, "smt", what.into(), vec![(host.path(&format!("{base}/smt/control")), "off".into())]);
    }
    if !cpu.deep_idle_states.is_empty() {
        let what = format!(
            "idle states {} take long to leave: I/O at depth 1 waits for a core to wake",
            cpu.deep_idle_states.join(", ")
        );
        let mut settings = Vec::new();
        for number in &cpu.cpus {
            for state in 0..16 {
                let folder = host.path(&format!("{base}/cpu{number}/cpuidle/state{state}"));
                let latency = std::fs::read_to_string(folder.join("latency")).ok();
                if latency.and_then(|text| text.trim().parse::<u64>().ok()).is_some_and(|us| us > 10) {
                    settings.push((folder.join("disable"), "1".to_string()));
                }
            }
        }
        push(found, "idle-states", what, settings);
    }
    if cpu.virtualised {
        let what = "a virtual machine: the hypervisor takes CPU time, slows every exit and may hide counters; trust \
                    ratios of neighbouring cells, not times";
        push(found, "virtualised", what.into(), Vec::new());
    }
    if cpu.cpus.len() < 4 {
        let what = format!(
            "{} CPUs: scaling beyond that cannot be measured, and jobs share cores with the kernel",
            cpu.cpus.len()
        );
        push(found, "few-processors", what, Vec::new());
    }
}

fn of_kernel(host: &HostInfo, kernel: &KernelInfo, facts: &MachineFacts, found: &mut Vec<Distortion>) {
    if kernel.io_uring_disabled.is_some_and(|value| value > 0) {
        let settings = vec![(host.path("proc/sys/kernel/io_uring_disabled"), "0".to_string())];
        push(
            found,
            "io-uring",
            "io_uring is disabled for some or all processes: its cells cannot run".into(),
            settings,
        );
    } else if facts.io_uring != "yes" {
        push(found, "io-uring", format!("io_uring does not work: {}", facts.io_uring), Vec::new());
    }
    for (option, cost) in
        [("CONFIG_KASAN", "checks every access to memory"), ("CONFIG_DEBUG_LOCKDEP", "checks every lock")]
    {
        if kernel.options.get(option).map(String::as_str) == Some("y") {
            push(
                found,
                "debugging-kernel",
                format!("{option} {cost}: this kernel is many times slower than others"),
                Vec::new(),
            );
        }
    }
    if !kernel.mitigations.is_empty() && !kernel.command_line.contains("mitigations=off") {
        let names: Vec<&str> = kernel.mitigations.keys().map(String::as_str).collect();
        let what = format!(
            "mitigations are on ({}): each system call costs more, which favours APIs with few",
            names.join(", ")
        );
        push(found, "mitigations", what, Vec::new());
    }
    match kernel.forced_sync_submission.as_deref() {
        Some("2") => {
            let what =
                "force_sync_submission=2, as in the published ICPE'24 runs: requests are submitted inline";
            push(found, "submission", what.into(), Vec::new());
        }
        Some(_) => {}
        None => {
            let what = "the published ICPE'24 kernel was patched to submit direct I/O inline; this one decides by \
                        itself, and each record says which path it took";
            push(found, "submission", what.into(), Vec::new());
        }
    }
    if facts.counters.iter().any(|(name, state)| name == "instructions" && state != "yes") {
        let what = "instructions are not counted here: figures of instructions and IPC stay empty, and profiles go by time";
        push(found, "counters", what.into(), Vec::new());
    }
    if kernel.perf_event_paranoid.is_some_and(|value| value > 0) && !rustix::process::geteuid().is_root() {
        let settings = vec![(host.path("proc/sys/kernel/perf_event_paranoid"), "-1".to_string())];
        push(found, "paranoid", "only root may count events of the whole machine".into(), settings);
    }
}

fn of_block(host: &HostInfo, block: &BlockDeviceInfo, found: &mut Vec<Distortion>) {
    let queue = format!("sys/block/{}/queue", block.name);
    let name = &block.name;
    if block.queue.get("wbt_lat_usec").is_some_and(|value| value != "0") {
        let what = format!(
            "{name}: writes are throttled in favour of reads (wbt_lat_usec), which is a scheduler of its own"
        );
        push(
            found,
            "write-throttling",
            what,
            vec![(host.path(&format!("{queue}/wbt_lat_usec")), "0".into())],
        );
    }
    if block.rotational {
        push(found, "rotational", format!("{name}: the kernel considers it a rotational disk"), Vec::new());
    }
    if block.queue.get("add_random").is_some_and(|value| value == "1") {
        let what = format!("{name}: every completion adds to the entropy pool");
        push(found, "add-random", what, vec![(host.path(&format!("{queue}/add_random")), "0".into())]);
    }
    if !block.polls && name.starts_with("nvme") {
        found.push(Distortion {
            id: "poll-queues".into(),
            what: format!("{name}: no poll queues, so that iou-c cannot run"),
            command: Some(
                "modprobe -r nvme && modprobe nvme poll_queues=4   # or nvme.poll_queues=4 at boot".into(),
            ),
            settings: Vec::new(),
        });
    }
    if !block.used_by.is_empty() {
        push(
            found,
            "in-use",
            format!("{name}: {}; nothing is run on it", block.used_by.join(", ")),
            Vec::new(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(facts: &MachineFacts) -> Vec<String> {
        examine(&HostInfo::with_root("/nowhere"), facts).into_iter().map(|found| found.id).collect()
    }

    #[test]
    fn the_studies_machine_has_only_a_different_kernel() {
        let facts = MachineFacts {
            cpu: CpuInfo {
                cpus: (0..10).collect(),
                smt: Some(false),
                turbo: Some(false),
                governors: vec!["performance".into()],
                ..CpuInfo::default()
            },
            kernel: KernelInfo { forced_sync_submission: Some("2".into()), ..KernelInfo::default() },
            counters: vec![("instructions".into(), "yes".into())],
            io_uring: "yes".into(),
            ..MachineFacts::default()
        };
        assert_eq!(ids(&facts), ["submission"]);
    }

    #[test]
    fn distortions_have_commands() {
        let block = BlockDeviceInfo {
            name: "nvme0n1".into(),
            queue: [("wbt_lat_usec".to_string(), "2000".to_string())].into(),
            used_by: vec!["mounted at /".into()],
            ..BlockDeviceInfo::default()
        };
        let facts = MachineFacts {
            cpu: CpuInfo {
                cpus: vec![0, 1],
                smt: Some(true),
                turbo: Some(true),
                governors: vec!["powersave".into()],
                deep_idle_states: vec!["C6".into()],
                virtualised: true,
                ..CpuInfo::default()
            },
            kernel: KernelInfo {
                io_uring_disabled: Some(2),
                options: [("CONFIG_KASAN".to_string(), "y".to_string())].into(),
                mitigations: [("mds".to_string(), "Mitigation: x".to_string())].into(),
                ..KernelInfo::default()
            },
            devices: vec![block],
            load: SystemLoad { load_average: 3.0, available_memory_bytes: 0 },
            counters: vec![("instructions".into(), "no such event".into())],
            io_uring: "EPERM".into(),
        };
        let found = examine(&HostInfo::with_root("/nowhere"), &facts);
        for id in [
            "governor",
            "turbo",
            "smt",
            "idle-states",
            "virtualised",
            "few-processors",
            "io-uring",
            "debugging-kernel",
            "mitigations",
            "submission",
            "counters",
            "write-throttling",
            "poll-queues",
            "in-use",
            "load",
        ] {
            assert!(found.iter().any(|one| one.id == id), "{id} is missing");
        }
        let turbo = found.iter().find(|one| one.id == "turbo").unwrap();
        assert!(turbo.command.as_ref().unwrap().starts_with("echo 0 > "), "{turbo:?}");
    }
}
