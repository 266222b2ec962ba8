//! One job, as its options make it.

use engines::{Config, Kind, SyncMode};

use crate::spec::{JobSpec, Sizes, Verify, greatest_divisor};

/// What drives the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineName {
    /// Ringbolt's block layer, drivers and models, on reactors.
    Bdev,
    /// An engine of the kernel's, or none, on threads or processes.
    Kernel(Kind),
}

/// Base names of logs, before the job's name is their default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogPaths {
    /// `write_lat_log`; an empty name is the job's.
    pub latency: Option<String>,
    /// `write_bw_log`.
    pub bandwidth: Option<String>,
    /// `write_iops_log`.
    pub iops: Option<String>,
}

/// A section of a job file, or what a `--name` begins.
#[derive(Clone, Debug)]
pub struct Job {
    /// What the generator does.
    pub spec: JobSpec,
    /// The options as written.
    pub options: Vec<(String, String)>,
    /// What drives the files; settled from `filename` where no `ioengine` is given.
    pub engine: Option<EngineName>,
    /// How the kernel's engine is opened.
    pub engine_config: Config,
    /// The files or URIs.
    pub filenames: Vec<String>,
    /// `description`.
    pub description: String,
    /// `directory`: where files without a path are.
    pub directory: Option<String>,
    /// `nrfiles`: files where no `filename` is given.
    pub nrfiles: u32,
    /// `numjobs`.
    pub numjobs: u32,
    /// `thread`: threads of this process, not processes.
    pub thread: bool,
    /// `group_reporting`.
    pub group_reporting: bool,
    /// `new_group`.
    pub new_group: bool,
    /// `stonewall`: not before all that stand before it are over.
    pub stonewall: bool,
    /// `exitall`: when it is over, all others end.
    pub exitall: bool,
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
    /// `startdelay`.
    pub delay_ns: u64,
    /// `nice`.
    pub nice: i32,
    /// `ioprio_class`: 1 real time, 2 best effort, 3 idle; and `prio` within it.
    pub io_priority: Option<(u8, u8)>,
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
    /// Logs.
    pub logs: LogPaths,
    /// `unit_base`: whether rates are printed in bits.
    pub bits: bool,
    /// `kb_base`: 1024 or 1000.
    pub(super) kb_base: u64,
    /// The mode that `ioengine` names, beside `hipri` and `sqthread_poll`: completions, submissions polled.
    pub(super) mode: (bool, bool),
    pub(super) sizes: [Option<Sizes>; 3],
    pub(super) random_map: bool,
    pub(super) filename: Option<String>,
    /// Whether names without a scheme are bdevs: a configuration makes some.
    pub(super) has_bdevs: bool,
}

/// fio's default percentiles.
const PERCENTILES: [f64; 17] =
    [1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99];

impl Default for Job {
    fn default() -> Self {
        Job {
            spec: JobSpec { name: "perf".to_string(), ..JobSpec::default() },
            options: Vec::new(),
            engine: None,
            engine_config: Config::default(),
            filenames: Vec::new(),
            description: String::new(),
            directory: None,
            nrfiles: 1,
            numjobs: 1,
            thread: false,
            group_reporting: false,
            new_group: false,
            stonewall: false,
            exitall: false,
            cpus: None,
            cpus_split: false,
            direct: false,
            sync: SyncMode::None,
            allow_file_create: true,
            allow_mounted_write: false,
            create_only: false,
            invalidate: true,
            delay_ns: 0,
            nice: 0,
            io_priority: None,
            cgroup: None,
            scheduler: None,
            repeatable: true,
            percentiles: PERCENTILES.to_vec(),
            percentiles_of: [None; 3],
            unified: false,
            logs: LogPaths::default(),
            bits: false,
            kb_base: 1024,
            mode: (false, false),
            sizes: [None, None, None],
            random_map: true,
            filename: None,
            has_bdevs: false,
        }
    }
}

/// What begins a URI of the block layer.
const SCHEMES: [&str; 5] = ["null", "malloc", "uring", "model", "nvme+"];

impl Job {
    /// Makes one of all options, and checks what needs more than one of them.
    pub(super) fn settle(&mut self) -> Result<(), String> {
        let plain = Sizes::Fixed(4096);
        let sizes = self.sizes.clone().map(|size| size.unwrap_or_else(|| plain.clone()));
        let used = self.spec.workload.directions(self.spec.read_percent);
        let of_used = |index: &usize| used[*index];
        self.spec.block_bytes = (0..3).filter(of_used).map(|index| sizes[index].max()).max().unwrap_or(4096);
        let same = (0..3).filter(of_used).all(|index| sizes[index] == Sizes::Fixed(self.spec.block_bytes));
        self.spec.sizes = (!same).then(|| Box::new(sizes));
        self.spec.each_once = self.random_map;
        self.filenames = split_names(self.filename.as_deref().unwrap_or_default());
        let scheme = |name: &String| is_uri(name);
        let uris = self.filenames.iter().filter(|name| scheme(name)).count();
        let engine = match self.engine {
            Some(engine) => engine,
            None if uris > 0 || self.has_bdevs => EngineName::Bdev,
            None => EngineName::Kernel(Kind::Psync),
        };
        if let (EngineName::Kernel(kind), Some(uri)) =
            (engine, self.filenames.iter().find(|name| scheme(name)))
            && kind != Kind::Null
        {
            return Err(format!("ioengine={} takes files, not {uri}; ioengine=bdev takes it", kind.name()));
        }
        if engine == EngineName::Bdev && self.filenames.is_empty() {
            return Err("needs --filename: null:1g, malloc:64m, uring:/path, nvme+tcp://…, or a bdev of -c"
                .to_string());
        }
        self.engine = Some(engine);
        if let EngineName::Kernel(kind) = engine {
            self.settle_kernel(kind)?;
        } else {
            self.refuse_kernel_options()?;
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
        if self.spec.log.average_ns > 0 {
            self.spec.sample_ns = self.spec.log.average_ns;
        }
        Ok(())
    }

    fn settle_kernel(&mut self, kind: Kind) -> Result<(), String> {
        self.engine_config.kind = kind;
        self.engine_config.polling.completion |= self.mode.0;
        self.engine_config.polling.submission |= self.mode.1;
        if kind.is_synchronous() {
            // One at a time, whatever is asked for, as with fio.
            self.spec.io_depth = 1;
            self.spec.measure_submission = false;
        }
        self.engine_config.depth = self.spec.io_depth;
        let config = &self.engine_config;
        let name = kind.name();
        let uring = matches!(kind, Kind::Uring | Kind::Passthrough);
        let cases = [
            (config.fixed_buffers && !uring, "fixedbufs", "io_uring or io_uring_cmd"),
            (config.register_files && !uring, "registerfiles", "io_uring or io_uring_cmd"),
            (!config.nonvectored && kind != Kind::Uring, "nonvectored", "io_uring"),
            (config.polling.submission && !uring, "sqthread_poll", "io_uring or io_uring_cmd"),
            (
                config.polling.submission_cpu.is_some() && !config.polling.submission,
                "sqthread_poll_cpu",
                "sqthread_poll",
            ),
            (config.userspace_reap && kind != Kind::Libaio, "userspace_reap", "libaio"),
            (
                config.polling.completion && !uring && kind != Kind::Pvsync2,
                "hipri",
                "io_uring, io_uring_cmd or pvsync2",
            ),
        ];
        if let Some((_, option, needs)) = cases.into_iter().find(|(wrong, _, _)| *wrong) {
            return Err(format!("--{option} does nothing with ioengine={name}; it needs {needs}"));
        }
        if config.polling.completion && !self.direct && kind != Kind::Passthrough {
            return Err("--hipri polls a device for direct I/O; add --direct=1".to_string());
        }
        if self.filenames.is_empty() && kind == Kind::Null && self.spec.size_bytes.is_none() {
            self.spec.size_bytes = Some(1 << 30);
        }
        Ok(())
    }

    fn refuse_kernel_options(&self) -> Result<(), String> {
        let config = &self.engine_config;
        let cases = [
            (config.fixed_buffers, "fixedbufs"),
            (config.register_files, "registerfiles"),
            (config.polling.submission, "sqthread_poll"),
            (config.polling.completion, "hipri"),
            (config.userspace_reap, "userspace_reap"),
            (config.batch_max > 0, "iodepth_batch"),
            (config.reap_max > 0, "iodepth_batch_complete_max"),
            (self.io_priority.is_some(), "prio"),
            (self.cgroup.is_some(), "cgroup"),
            (self.create_only, "create_only"),
            (self.delay_ns > 0, "startdelay"),
            (self.nice != 0, "nice"),
            (self.scheduler.is_some(), "ioscheduler"),
            (self.directory.is_some(), "directory"),
            (self.nrfiles > 1, "nrfiles"),
            (self.allow_mounted_write, "allow_mounted_write"),
            (config.polling.submission_cpu.is_some(), "sqthread_poll_cpu"),
            (!config.nonvectored, "nonvectored=0"),
        ];
        match cases.into_iter().find(|(given, _)| *given) {
            Some((_, option)) => {
                Err(format!("--{option} is for the kernel's engines, not for ioengine=bdev"))
            }
            None => Ok(()),
        }
    }

    /// Bytes of which all I/Os are multiples, at most 512: the unit of files that have none of their own.
    pub fn unit_bytes(&self) -> u32 {
        let sizes = self.spec.sizes.as_deref().map(|sizes| sizes.each_ref().map(Sizes::unit));
        let sizes = sizes.unwrap_or([self.spec.block_bytes; 3]);
        let unit = sizes.into_iter().fold(0, greatest_divisor);
        if self.spec.verify != Verify::Off {
            // A block carries its description.
            return if unit.is_multiple_of(512) { 512 } else { unit };
        }
        greatest_divisor(unit, 512).max(1)
    }
}

fn is_uri(name: &str) -> bool {
    SCHEMES.iter().any(|scheme| match scheme.strip_suffix('+') {
        Some(_) => name.starts_with(scheme),
        None => name.strip_prefix(scheme).is_some_and(|rest| rest.starts_with(':')),
    })
}

/// Names between colons; `\:` is a colon. A URI whose own colons are written so ends at the next plain one,
/// as a path does; any other goes on to the next colon behind which another's scheme stands, or to the end.
fn split_names(text: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    // Whether the colon before the piece is the name's own, and whether the last name escaped its first.
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
    fn names_are_split_where_fio_splits_them_and_uris_are_not() {
        let cases: [(&str, &[&str]); 11] = [
            ("/dev/a:/dev/b", &["/dev/a", "/dev/b"]),
            ("/dev/disk/by-path/pci-0000\\:01:file", &["/dev/disk/by-path/pci-0000:01", "file"]),
            ("null:1g", &["null:1g"]),
            ("null:1g:malloc:64m?bs=4k", &["null:1g", "malloc:64m?bs=4k"]),
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
