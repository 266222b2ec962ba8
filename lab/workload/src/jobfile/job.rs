//! One job with all of its options.

mod checks;
mod zones;

use io_engines::{EngineConfig, EngineKind, SyncMode};
use os::MemoryPolicy;

use super::transport_id;
use crate::PriorityShare;
use crate::accel_device::AccelSource;
use crate::spec::{BlockSizes, JobSpec, ReducibleContent, Verify, gcd};
use crate::steady::SteadyCriterion;
use crate::work::{WorkKind, WorkOptions};
pub(super) use zones::{ZoneArguments, ZoneMode};

/// The I/O engine: `ioengine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineName {
    /// `bdev`: Ringbolt's block layer, drivers and device models, on reactors.
    Bdev,
    /// A kernel I/O engine or the null engine, on threads or processes.
    Kernel(EngineKind),
    /// `cpuio`, `exec`: work without I/O, on threads or processes.
    Work(WorkKind),
}

/// What the kernel expects of buffered I/O: fio's `fadvise_hint`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FadviseHint {
    /// Nothing special.
    None,
    /// Random or sequential I/O, as `rw` has it.
    Workload,
    /// Random I/O, for which nothing is read ahead.
    Random,
    /// Sequential I/O.
    Sequential,
}

/// What stops when a job with `exitall` finishes: `exit_what`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExitScope {
    /// The jobs of its reporting group.
    #[default]
    Group,
    /// The jobs that run; those after the next `stonewall` start.
    Running,
    /// All jobs, also those that have not started.
    All,
}

/// Base names of log files as given; an empty name stands for the job's name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogPaths {
    /// `write_lat_log`.
    pub latency: Option<String>,
    /// `write_bw_log`.
    pub bandwidth: Option<String>,
    /// `write_iops_log`.
    pub iops: Option<String>,
    /// `write_hist_log`.
    pub histograms: Option<String>,
}

/// I/O priorities of single I/Os as given, of reads and of writes.
#[derive(Clone, Debug, Default)]
pub(super) struct CommandPriorityOptions {
    pub(super) percent: [u8; 2],
    /// 0 for real time.
    pub(super) class: [u8; 2],
    pub(super) level: [u8; 2],
    pub(super) split: [Vec<PriorityShare>; 2],
}

/// A section of a job file, or a job of the command line.
#[derive(Clone, Debug)]
pub struct PerfJob {
    /// The job that the generator runs.
    pub spec: JobSpec,
    /// The options as written.
    pub options: Vec<(String, String)>,
    /// `ioengine`; chosen from `filename` if not given.
    pub engine: Option<EngineName>,
    /// Options of the kernel I/O engine.
    pub engine_config: EngineConfig,
    /// `filename`, split: paths, device URIs or bdev names.
    pub filenames: Vec<String>,
    /// `description`.
    pub description: String,
    /// `directory`: prefix of relative file names.
    pub directory: Option<String>,
    /// `nrfiles`: number of files if no `filename` is given.
    pub nrfiles: u32,
    /// Bytes of each file that a job queries or deletes, where it makes the file.
    pub operation_file_bytes: u64,
    /// `numjobs`.
    pub numjobs: u32,
    /// `thread`: run copies as threads, not as processes.
    pub thread: bool,
    /// `group_reporting`.
    pub group_reporting: bool,
    /// `new_group`.
    pub new_group: bool,
    /// `stonewall`: wait until all jobs before this one have finished.
    pub stonewall: bool,
    /// `wait_for`: the job that must have finished.
    pub(super) wait_for: Option<String>,
    /// Whether it waits for all jobs before it, by `wait_for`.
    pub(super) waits: bool,
    /// `exitall` and `exit_what`: which jobs stop when the job finishes.
    pub exitall: bool,
    /// See `exitall`.
    pub exit_scope: ExitScope,
    /// What a job of an engine without I/O does.
    pub work: WorkOptions,
    /// `cpus_allowed`.
    pub cpus: Option<Vec<u32>>,
    /// `cpus_allowed_policy=split`: one core for each job.
    pub cpus_split: bool,
    /// `direct`.
    pub direct: bool,
    /// `sync`.
    pub sync: SyncMode,
    /// `allow_file_create`.
    pub allow_file_create: bool,
    /// `allow_mounted_write`.
    pub allow_mounted_write: bool,
    /// `create_only`.
    pub create_only: bool,
    /// `invalidate`.
    pub invalidate: bool,
    /// `fadvise_hint`.
    pub fadvise_hint: FadviseHint,
    /// `startdelay`.
    pub delay_ns: u64,
    /// `nice`.
    pub nice: i32,
    /// `ioprio_class`: 1 real time, 2 best effort, 3 idle; and `prio` within it.
    pub io_priority: Option<(u8, u8)>,
    /// `cmdprio_percentage`, `cmdprio_bssplit` and their like.
    pub(super) command_priority: CommandPriorityOptions,
    /// `numa_cpu_nodes`; empty for all nodes.
    pub numa_cpu_nodes: Option<Vec<u32>>,
    /// `numa_mem_policy`; with an empty list for all nodes.
    pub memory_policy: Option<MemoryPolicy>,
    /// `cgroup`.
    pub cgroup: Option<String>,
    /// `ioscheduler`.
    pub scheduler: Option<String>,
    /// `randrepeat`: the same seed every time.
    pub repeatable: bool,
    /// `percentile_list`.
    pub percentiles: Vec<f64>,
    /// `slat_percentiles`, `clat_percentiles`, `lat_percentiles`.
    pub percentiles_of: [Option<bool>; 3],
    /// `unified_rw_reporting`.
    pub unified: bool,
    /// Base names of log files.
    pub logs: LogPaths,
    /// `unit_base`: whether rates are printed in bits.
    pub rates_in_bits: bool,
    /// `kb_base`: 1024 or 1000.
    pub(super) kb_base: u64,
    /// Polled completions and submissions by the `ioengine` modes `iou-c` and `iou-s`, beside `hipri` and
    /// `sqthread_poll`.
    pub(super) polling_mode: (bool, bool),
    /// `iodepth_batch_submit` and `iodepth_batch_complete_max` as given.
    pub(super) batch_submit: Option<u32>,
    pub(super) batch_complete_max: Option<u32>,
    pub(super) sizes: [Option<BlockSizes>; 3],
    pub(super) random_map: bool,
    pub(super) filename: Option<String>,
    /// `serialize_overlap`.
    pub(super) serialize_overlap: bool,
    /// `zonemode`, and the zones.
    pub(super) zones: ZoneArguments,
    /// `filesize`.
    pub(super) file_bytes: Option<u64>,
    /// What `buffer_compress_percentage`, `dedupe_percentage` and their like ask for.
    pub(super) reducible: ReducibleContent,
    /// `fallocate`: whether files that are written are allocated before the jobs start.
    pub allocates: bool,
    /// `steadystate`, `steadystate_duration` and `steadystate_ramp_time`.
    pub(super) steady: (Option<SteadyCriterion>, u64, u64),
    /// `create_on_open` and `openfiles`.
    pub(crate) create_on_open: bool,
    pub(super) open_files: Option<u32>,
    /// Whether names without a URI scheme are bdevs: a configuration file is given.
    pub(super) has_bdevs: bool,
}

/// fio's default percentiles.
const PERCENTILES: [f64; 17] =
    [1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99];

impl Default for PerfJob {
    fn default() -> Self {
        PerfJob {
            spec: JobSpec { name: "perf".to_string(), ..JobSpec::default() },
            options: Vec::new(),
            engine: None,
            engine_config: EngineConfig::default(),
            batch_submit: None,
            batch_complete_max: None,
            filenames: Vec::new(),
            description: String::new(),
            directory: None,
            nrfiles: 1,
            operation_file_bytes: 0,
            numjobs: 1,
            thread: false,
            group_reporting: false,
            new_group: false,
            stonewall: false,
            wait_for: None,
            waits: false,
            exitall: false,
            exit_scope: ExitScope::Group,
            work: WorkOptions::default(),
            cpus: None,
            cpus_split: false,
            direct: false,
            sync: SyncMode::None,
            allow_file_create: true,
            allow_mounted_write: false,
            create_only: false,
            invalidate: true,
            fadvise_hint: FadviseHint::Workload,
            delay_ns: 0,
            nice: 0,
            io_priority: None,
            command_priority: CommandPriorityOptions::default(),
            numa_cpu_nodes: None,
            memory_policy: None,
            cgroup: None,
            scheduler: None,
            repeatable: true,
            percentiles: PERCENTILES.to_vec(),
            percentiles_of: [None; 3],
            unified: false,
            logs: LogPaths::default(),
            rates_in_bits: false,
            kb_base: 1024,
            polling_mode: (false, false),
            sizes: [None, None, None],
            random_map: true,
            filename: None,
            serialize_overlap: false,
            zones: ZoneArguments::default(),
            file_bytes: None,
            reducible: ReducibleContent {
                dedupe_percent: 0,
                working_set_percent: None,
                global: false,
                compress_percent: 0,
                chunk_bytes: 512,
                pattern: Vec::new(),
            },
            allocates: true,
            steady: (None, 0, 0),
            create_on_open: false,
            open_files: None,
            has_bdevs: false,
        }
    }
}

/// URI schemes of the block layer.
const SCHEMES: [&str; 8] = ["null", "malloc", "uring", "aio", "model", "store", "accel", "nvme+"];

impl PerfJob {
    /// Derives the job from all options and checks combinations of options.
    pub(super) fn finalize(&mut self) -> Result<(), String> {
        // An operation of the acceleration framework is an I/O of its size.
        let names = split_names(self.filename.as_deref().unwrap_or_default());
        let of_operation = names.iter().find_map(|name| AccelSource::io_bytes_of(name));
        let default_size = BlockSizes::Fixed(of_operation.unwrap_or(4096));
        let sizes = self.sizes.clone().map(|size| size.unwrap_or_else(|| default_size.clone()));
        let used = self.spec.workload.directions(self.spec.read_percent);
        let of_used = |index: &usize| used[*index];
        self.spec.block_bytes = (0..3).filter(of_used).map(|index| sizes[index].max()).max().unwrap_or(4096);
        let same =
            (0..3).filter(of_used).all(|index| sizes[index] == BlockSizes::Fixed(self.spec.block_bytes));
        self.spec.sizes = (!same).then(|| Box::new(sizes));
        self.spec.random_map = self.random_map;
        self.finalize_verify()?;
        self.finalize_pauses_and_trims()?;
        self.finalize_steady()?;
        self.finalize_limits()?;
        self.finalize_zones()?;
        self.finalize_content()?;
        self.finalize_priorities()?;
        let filename = self.filename.as_deref().unwrap_or_default();
        self.filenames = match transport_id::uris(filename)? {
            Some(uris) => uris,
            None => split_names(filename),
        };
        self.finalize_file_size();
        let scheme = |name: &String| is_uri(name);
        let uris = self.filenames.iter().filter(|name| scheme(name)).count();
        let engine = match self.engine {
            Some(engine) => engine,
            None if uris > 0 || self.has_bdevs => EngineName::Bdev,
            None => EngineName::Kernel(EngineKind::Psync),
        };
        if let (EngineName::Kernel(kind), Some(uri)) =
            (engine, self.filenames.iter().find(|name| scheme(name)))
            && kind != EngineKind::Null
        {
            return Err(format!("ioengine={} takes files, not {uri}; ioengine=bdev takes it", kind.name()));
        }
        if let EngineName::Work(kind) = engine {
            self.engine = Some(engine);
            return self.work.check(kind, self.spec.runtime_ns);
        }
        if engine == EngineName::Bdev && self.filenames.is_empty() {
            return Err("needs --filename: null:1g, malloc:64m, uring:/path, nvme+tcp://…, or a bdev of -c"
                .to_string());
        }
        self.engine = Some(engine);
        self.finalize_large_blocks()?;
        let operation = match engine {
            EngineName::Kernel(EngineKind::File(operation)) => Some(operation),
            _ => None,
        };
        self.finalize_file_operation(operation)?;
        if let EngineName::Kernel(kind) = engine {
            self.finalize_kernel(kind)?;
        } else {
            self.reject_kernel_options()?;
        }
        if self.spec.time_based && self.spec.runtime_ns.is_none() {
            return Err("--time_based needs --runtime; for example --runtime=10s".to_string());
        }
        if self.spec.latency_target.is_some_and(|target| target.target_ns == 0) {
            return Err(
                "--latency_window and --latency_percentile do nothing without --latency_target".to_string()
            );
        }
        if self.numjobs == 0 {
            return Err("--numjobs=0 does nothing; it is at least 1".to_string());
        }
        if self.sync != SyncMode::None && engine == EngineName::Bdev {
            return Err("--sync is for files; flushes of bdevs are --fsync=N".to_string());
        }
        let logs = &self.logs;
        let path = |name: &Option<String>| {
            let name = name.as_ref().map(|name| if name.is_empty() { &self.spec.name } else { name });
            name.map(std::path::PathBuf::from)
        };
        self.spec.log.latency = path(&logs.latency);
        self.spec.log.bandwidth = path(&logs.bandwidth);
        self.spec.log.iops = path(&logs.iops);
        self.spec.log.histograms = path(&logs.histograms);
        let log = &self.spec.log;
        if log.average_ns > 0 {
            self.spec.sample_ns = log.average_ns;
        }
        match (&log.histograms, log.histograms_ns) {
            (Some(_), 0) => Err("--write_hist_log needs --log_hist_msec; for example 1000".to_string()),
            (None, ns) if ns > 0 || log.histograms_coarseness > 0 => {
                Err("--log_hist_msec and --log_hist_coarseness do nothing without --write_hist_log"
                    .to_string())
            }
            _ => Ok(()),
        }
    }

    /// Whether a job changes data, or files and directories.
    pub fn writes(&self) -> bool {
        match self.engine {
            Some(EngineName::Kernel(EngineKind::File(operation))) => operation.writes(),
            Some(EngineName::Work(_)) => false,
            _ => self.spec.workload.writes(),
        }
    }

    /// The path or name of a file of copy `number`.
    pub fn file_name(&self, number: u32, file: u16) -> String {
        crate::kernel::paths(self, number).swap_remove(usize::from(file))
    }

    /// Whether the job starts when all jobs before it have finished.
    pub fn begins_phase(&self) -> bool {
        self.stonewall || self.waits
    }

    /// Resolves `wait_for`. Jobs run in phases, so a job waits for all jobs of the phase before its own: any other meaning is
    /// rejected.
    pub(super) fn resolve_wait_for(&mut self, above: &[PerfJob]) -> Result<(), String> {
        if let Some(name) = &self.wait_for
            && !above.iter().any(|job| job.spec.name == *name)
        {
            return Err(format!("--wait_for={name}: no job of this name is above {}", self.spec.name));
        }
        if self.stonewall {
            return Ok(());
        }
        let first = above.iter().rposition(PerfJob::begins_phase).unwrap_or(0);
        let (before, current) = above.split_at(first);
        let previous = before.iter().rposition(PerfJob::begins_phase).unwrap_or(0);
        let waits = current.first().is_some_and(|job| job.waits);
        let are_all = |jobs: &[PerfJob], name: &str| jobs.iter().all(|job| job.spec.name == name);
        match &self.wait_for {
            None if waits => Err(format!(
                "{} would start beside jobs above those with wait_for; list it before them, or give it a stonewall",
                self.spec.name
            )),
            None => Ok(()),
            Some(name) if are_all(current, name) => {
                self.waits = true;
                Ok(())
            }
            Some(name) if waits && are_all(&before[previous..], name) => Ok(()),
            Some(name) => Err(format!("--wait_for={name}: other jobs run beside {name}; use stonewall")),
        }
    }

    /// The block size of files without a block size of their own: the greatest common divisor of all I/O sizes
    /// and 512 bytes.
    pub fn unit_bytes(&self) -> u32 {
        let sizes = self.spec.sizes.as_deref().map(|sizes| sizes.each_ref().map(BlockSizes::unit));
        let sizes = sizes.unwrap_or([self.spec.block_bytes; 3]);
        let unit = sizes.into_iter().fold(0, gcd);
        if self.spec.verify != Verify::Off {
            // Each block carries a verification header.
            return if unit.is_multiple_of(512) { 512 } else { unit };
        }
        gcd(unit, 512).max(1)
    }
}

fn is_uri(name: &str) -> bool {
    SCHEMES.iter().any(|scheme| match scheme.strip_suffix('+') {
        Some(_) => name.starts_with(scheme),
        None => name.strip_prefix(scheme).is_some_and(|rest| rest.starts_with(':')),
    })
}

/// Splits names at colons; `\:` is a literal colon. A URI with escaped colons ends at the next unescaped one,
/// as a path does; any other URI extends to the next colon that is followed by a URI scheme, or to the end.
fn split_names(text: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    // Whether the colon before the piece is part of the name, and whether the last name escaped its first colon.
    let (mut glue, mut escapes) = (false, false);
    for piece in text.split(':') {
        let (plain, escaped) = match piece.strip_suffix('\\') {
            Some(plain) => (plain, true),
            None => (piece, false),
        };
        let begins = is_uri(plain) || SCHEMES.contains(&plain) || plain.starts_with("nvme+");
        let inside = names.last().is_some_and(|last| is_uri(last) || SCHEMES.contains(&last.as_str()));
        match names.last_mut() {
            Some(last) if glue || (inside && !escapes && !begins) => {
                last.push(':');
                last.push_str(plain);
            }
            _ => {
                names.push(plain.to_string());
                escapes = escaped;
            }
        }
        glue = escaped;
    }
    names.retain(|name| !name.is_empty());
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_split_at_colons_and_uris_stay_whole() {
        let cases: [(&str, &[&str]); 12] = [
            ("/dev/a:/dev/b", &["/dev/a", "/dev/b"]),
            ("/dev/disk/by-path/pci-0000\\:01:file", &["/dev/disk/by-path/pci-0000:01", "file"]),
            ("null:1g", &["null:1g"]),
            ("null:1g:malloc:64m?bs=4k", &["null:1g", "malloc:64m?bs=4k"]),
            ("store:pool/vol?cluster=/srv/store", &["store:pool/vol?cluster=/srv/store"]),
            (
                "nvme+tcp://127.0.0.1:4420/nqn.2025-01.io:a?ns=1",
                &["nvme+tcp://127.0.0.1:4420/nqn.2025-01.io:a?ns=1"],
            ),
            ("uring:/tmp/a:uring:/tmp/b", &["uring:/tmp/a", "uring:/tmp/b"]),
            (
                "uring\\:/dev/a:uring\\:/dev/b:uring\\:/dev/c",
                &["uring:/dev/a", "uring:/dev/b", "uring:/dev/c"],
            ),
            ("null\\:1g:nvme+tcp\\://[\\:\\:1]\\:4420/a\\:b", &["null:1g", "nvme+tcp://[::1]:4420/a:b"]),
            ("uring\\:/dev/a:/dev/b", &["uring:/dev/a", "/dev/b"]),
            ("Malloc0:Malloc1", &["Malloc0", "Malloc1"]),
            ("", &[]),
        ];
        for (text, names) in cases {
            assert_eq!(split_names(text), names, "{text}");
        }
    }
}
