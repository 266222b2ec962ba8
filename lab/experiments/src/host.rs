//! Hardware and kernel properties, read from `/proc` and `/sys`.
//!
//! Every path is relative to a root, so that tests use a directory of their own. What cannot be read is absent;
//! nothing here returns an error.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Reads the machine whose `/proc` and `/sys` are under a root directory.
#[derive(Clone, Debug)]
pub struct HostInfo {
    root: PathBuf,
}

/// CPU properties.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CpuInfo {
    /// `model name` of `/proc/cpuinfo`.
    pub model: String,
    /// Online logical CPUs that this process may use.
    pub cpus: Vec<u32>,
    /// NUMA nodes and their CPUs, as lists such as `0-3`.
    pub nodes: BTreeMap<String, String>,
    /// Whether SMT is active.
    pub smt: Option<bool>,
    /// Whether turbo or boost is enabled.
    pub turbo: Option<bool>,
    /// Frequency governors in use, each once.
    pub governors: Vec<String>,
    /// Enabled idle states with an exit latency above 10 us.
    pub deep_idle_states: Vec<String>,
    /// Whether the CPU is virtual.
    pub virtualised: bool,
    /// CPUs that `isolcpus` keeps from the scheduler.
    pub isolated: String,
}

/// Kernel properties.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct KernelInfo {
    /// As in `uname -r`.
    pub release: String,
    /// Boot command line.
    pub command_line: String,
    /// Relevant `CONFIG_` options and values, if the configuration can be read.
    pub options: BTreeMap<String, String>,
    /// `kernel.io_uring_disabled`; 0 allows all processes.
    pub io_uring_disabled: Option<i64>,
    /// `kernel.perf_event_paranoid`.
    pub perf_event_paranoid: Option<i64>,
    /// Active mitigations by vulnerability.
    pub mitigations: BTreeMap<String, String>,
    /// `force_sync_submission` of the patched ICPE'24 kernel; none on other kernels.
    pub forced_sync_submission: Option<String>,
}

/// Properties of one block device.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BlockDeviceInfo {
    /// For example `nvme0n1`.
    pub name: String,
    /// Model as reported by the device.
    pub model: String,
    /// Firmware revision.
    pub firmware: String,
    /// Capacity.
    pub size_bytes: u64,
    /// Logical block size.
    pub block_bytes: u64,
    /// Whether the kernel considers it a rotational disk.
    pub rotational: bool,
    /// Number of hardware queues.
    pub queues: usize,
    /// `nr_requests`.
    pub requests: u64,
    /// Whether completions can be polled (`queue/io_poll`).
    pub polls: bool,
    /// `queue/write_cache`.
    pub write_cache: String,
    /// The active scheduler.
    pub scheduler: String,
    /// The available schedulers.
    pub schedulers: Vec<String>,
    /// Files of `queue/iosched` and their values.
    pub settings: BTreeMap<String, String>,
    /// Other queue settings and their values.
    pub queue: BTreeMap<String, String>,
    /// Its users: mounts, swap, volume managers. Empty if it is not in use.
    pub used_by: Vec<String>,
}

/// Load of the machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SystemLoad {
    /// Load average of the last minute.
    pub load_average: f64,
    /// `MemAvailable`.
    pub available_memory_bytes: u64,
}

const OPTIONS: [&str; 14] = [
    "CONFIG_PREEMPT",
    "CONFIG_PREEMPT_VOLUNTARY",
    "CONFIG_PREEMPT_NONE",
    "CONFIG_PREEMPT_DYNAMIC",
    "CONFIG_HZ",
    "CONFIG_NO_HZ_FULL",
    "CONFIG_IO_URING",
    "CONFIG_MQ_IOSCHED_DEADLINE",
    "CONFIG_MQ_IOSCHED_KYBER",
    "CONFIG_IOSCHED_BFQ",
    "CONFIG_BLK_DEV_NULL_BLK",
    "CONFIG_BLK_CGROUP_IOCOST",
    "CONFIG_DEBUG_LOCKDEP",
    "CONFIG_KASAN",
];

impl Default for HostInfo {
    fn default() -> HostInfo {
        HostInfo { root: PathBuf::from("/") }
    }
}

impl HostInfo {
    /// A machine whose `/proc` and `/sys` are under `root`.
    pub fn with_root(root: impl Into<PathBuf>) -> HostInfo {
        HostInfo { root: root.into() }
    }

    /// `path` under the root.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The content of a file without surrounding white space.
    pub fn text(&self, path: &str) -> Option<String> {
        Some(fs::read_to_string(self.path(path)).ok()?.trim().to_string())
    }

    fn number(&self, path: &str) -> Option<i64> {
        self.text(path)?.parse().ok()
    }

    fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Online CPUs on which this process may run.
    pub fn cpus(&self) -> Vec<u32> {
        let online = self.text("sys/devices/system/cpu/online").map(|text| cpu_list(&text));
        let status = self.text("proc/self/status").unwrap_or_default();
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let allowed = allowed.map(|text| cpu_list(text.trim()));
        match (online, allowed) {
            (Some(online), Some(allowed)) => online.into_iter().filter(|cpu| allowed.contains(cpu)).collect(),
            (Some(cpus), None) | (None, Some(cpus)) => cpus,
            (None, None) => vec![0],
        }
    }

    /// CPU properties.
    pub fn cpu(&self) -> CpuInfo {
        let info = self.text("proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            let line = info.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_string())
        };
        let cpus = self.cpus();
        let base = "sys/devices/system";
        let nodes = self.names(&format!("{base}/node")).into_iter().filter(|name| name.starts_with("node"));
        let nodes = nodes
            .filter_map(|name| Some((name.clone(), self.text(&format!("{base}/node/{name}/cpulist"))?)))
            .collect();
        let mut governors: Vec<String> = cpus
            .iter()
            .filter_map(|cpu| self.text(&format!("{base}/cpu/cpu{cpu}/cpufreq/scaling_governor")))
            .collect();
        governors.sort();
        governors.dedup();
        let no_turbo = self.number(&format!("{base}/cpu/intel_pstate/no_turbo")).map(|off| off == 0);
        let boost = self.number(&format!("{base}/cpu/cpufreq/boost")).map(|on| on == 1);
        CpuInfo {
            model: field("model name").unwrap_or_default(),
            nodes,
            smt: self.number(&format!("{base}/cpu/smt/active")).map(|on| on == 1),
            turbo: no_turbo.or(boost),
            governors,
            deep_idle_states: self.deep_idle_states(cpus.first().copied().unwrap_or(0)),
            virtualised: field("flags")
                .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            isolated: self.text(&format!("{base}/cpu/isolated")).unwrap_or_default(),
            cpus,
        }
    }

    fn deep_idle_states(&self, cpu: u32) -> Vec<String> {
        let base = format!("sys/devices/system/cpu/cpu{cpu}/cpuidle");
        let deep = |state: &String| {
            let number = |file: &str| self.number(&format!("{base}/{state}/{file}"));
            number("latency").is_some_and(|us| us > 10) && number("disable") == Some(0)
        };
        let name = |state: String| self.text(&format!("{base}/{state}/name")).unwrap_or(state);
        self.names(&base).into_iter().filter(deep).map(name).collect()
    }

    /// Kernel properties.
    pub fn kernel(&self) -> KernelInfo {
        let release = self.text("proc/sys/kernel/osrelease").unwrap_or_default();
        let vulnerabilities = "sys/devices/system/cpu/vulnerabilities";
        let mitigation = |name: String| {
            let text = self.text(&format!("{vulnerabilities}/{name}"))?;
            text.starts_with("Mitigation").then_some((name, text))
        };
        KernelInfo {
            command_line: self.text("proc/cmdline").unwrap_or_default(),
            options: self.kernel_options(&release),
            io_uring_disabled: self.number("proc/sys/kernel/io_uring_disabled"),
            perf_event_paranoid: self.number("proc/sys/kernel/perf_event_paranoid"),
            mitigations: self.names(vulnerabilities).into_iter().filter_map(mitigation).collect(),
            forced_sync_submission: self.text("sys/module/fops/parameters/force_sync_submission"),
            release,
        }
    }

    /// Options from `/boot`, or from `/proc/config.gz` through gzip.
    fn kernel_options(&self, release: &str) -> BTreeMap<String, String> {
        let text = self.text(&format!("boot/config-{release}")).or_else(|| {
            let packed = self.path("proc/config.gz");
            let output = std::process::Command::new("gzip").arg("-dc").arg(packed).output().ok()?;
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
        });
        let text = text.unwrap_or_default();
        let wanted = |line: &str| {
            let (name, value) = line.split_once('=')?;
            OPTIONS.contains(&name).then(|| (name.to_string(), value.to_string()))
        };
        text.lines().filter_map(wanted).collect()
    }

    /// The name in `/sys/block` of a device node, for example `nvme0n1` for `/dev/nvme0n1`; none for a partition.
    pub fn block_name(&self, node: &Path) -> Option<String> {
        let real = fs::canonicalize(node).unwrap_or_else(|_| node.to_path_buf());
        let name = real.file_name()?.to_str()?.to_string();
        self.path(&format!("sys/block/{name}")).is_dir().then_some(name)
    }

    /// Properties of the block device with this name in `/sys/block`.
    pub fn block(&self, name: &str) -> BlockDeviceInfo {
        let base = format!("sys/block/{name}");
        let text = |file: &str| self.text(&format!("{base}/{file}")).unwrap_or_default();
        let number = |file: &str| self.number(&format!("{base}/{file}")).unwrap_or(0);
        let (scheduler, schedulers) = chosen(&text("queue/scheduler"));
        let files = |folder: &str, names: &[String]| -> BTreeMap<String, String> {
            names
                .iter()
                .filter_map(|file| Some((file.clone(), self.text(&format!("{base}/{folder}/{file}"))?)))
                .collect()
        };
        let queue = ["nomerges", "rq_affinity", "wbt_lat_usec", "max_sectors_kb", "iostats", "add_random"];
        BlockDeviceInfo {
            model: text("device/model"),
            firmware: [text("device/firmware_rev"), text("device/rev")]
                .into_iter()
                .find(|t| !t.is_empty())
                .unwrap_or_default(),
            size_bytes: u64::try_from(number("size")).unwrap_or(0).saturating_mul(512),
            block_bytes: u64::try_from(number("queue/logical_block_size")).unwrap_or(0),
            rotational: number("queue/rotational") == 1,
            queues: self.names(&format!("{base}/mq")).len(),
            requests: u64::try_from(number("queue/nr_requests")).unwrap_or(0),
            polls: number("queue/io_poll") == 1,
            write_cache: text("queue/write_cache"),
            settings: files("queue/iosched", &self.names(&format!("{base}/queue/iosched"))),
            queue: files("queue", &queue.map(String::from)),
            used_by: self.used_by(name),
            name: name.to_string(),
            scheduler,
            schedulers,
        }
    }

    /// All block devices with a capacity above 0.
    pub fn blocks(&self) -> Vec<BlockDeviceInfo> {
        self.names("sys/block")
            .iter()
            .map(|name| self.block(name))
            .filter(|block| block.size_bytes > 0)
            .collect()
    }

    /// The users of a device and its partitions.
    pub fn used_by(&self, name: &str) -> Vec<String> {
        let mut users = Vec::new();
        let mut parts: Vec<String> = self.names(&format!("sys/block/{name}"));
        parts.retain(|part| part.starts_with(name));
        parts.push(name.to_string());
        for (file, column) in [("proc/self/mounts", 1), ("proc/swaps", 0)] {
            for line in self.text(file).unwrap_or_default().lines() {
                let fields: Vec<&str> = line.split_whitespace().collect();
                let device = fields.first().and_then(|word| word.strip_prefix("/dev/"));
                if device.is_some_and(|device| parts.iter().any(|part| part == device)) {
                    let kind = if column == 1 { "mounted at" } else { "swap on" };
                    users.push(format!("{kind} {}", fields.get(column).unwrap_or(&"?")));
                }
            }
        }
        for part in &parts {
            let folder =
                if part == name { format!("sys/block/{name}") } else { format!("sys/block/{name}/{part}") };
            users.extend(
                self.names(&format!("{folder}/holders")).iter().map(|holder| format!("held by {holder}")),
            );
        }
        users
    }

    /// The file system type at a path: that of the longest matching mount point.
    pub fn file_system(&self, path: &Path) -> String {
        let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let mounts = self.text("proc/self/mounts").unwrap_or_default();
        let under = mounts.lines().filter_map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let mount_point = fields.get(1)?;
            real.starts_with(mount_point)
                .then(|| (mount_point.len(), fields.get(2).unwrap_or(&"?").to_string()))
        });
        under.max_by_key(|(length, _)| *length).map_or_else(|| "?".to_string(), |(_, kind)| kind)
    }

    /// Current load.
    pub fn load(&self) -> SystemLoad {
        let average = self.text("proc/loadavg").unwrap_or_default();
        let average = average.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0.0);
        let memory = self.text("proc/meminfo").unwrap_or_default();
        let available = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
        let kib: u64 = available.and_then(|t| t.split_whitespace().next()?.parse().ok()).unwrap_or(0);
        SystemLoad { load_average: average, available_memory_bytes: kib << 10 }
    }
}

/// The selected word of a list such as `none [mq-deadline] kyber`, and all words.
pub fn chosen(text: &str) -> (String, Vec<String>) {
    let bare = |word: &str| word.trim_matches(['[', ']']).to_string();
    let all: Vec<String> = text.split_whitespace().map(bare).collect();
    let chosen = text.split_whitespace().find(|word| word.starts_with('['));
    // A device without schedulers has `none` without brackets.
    let chosen = chosen.map(bare).or_else(|| all.first().cloned().filter(|_| all.len() == 1));
    (chosen.unwrap_or_default(), all)
}

/// The numbers of a CPU list such as `0-3,5`.
pub fn cpu_list(text: &str) -> Vec<u32> {
    let mut cpus = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<u32>(), last.trim().parse::<u32>())
            && last.saturating_sub(first) < 65_536
        {
            cpus.extend(first..=last);
        }
    }
    cpus
}

#[cfg(test)]
mod tests;
