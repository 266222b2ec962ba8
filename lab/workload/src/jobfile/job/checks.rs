//! Which options go together, and what they mean together.

use io_engines::{EngineKind, MetadataOperation, SyncMode};
use os::RequestPriorities;

use super::{EngineName, PerfJob};
use crate::priorities::{CommandPriorities, PriorityShare};
use crate::spec::{BufferContent, FioVerify, RateMinima, Verify, Workload};
use crate::steady::{DURATION_S_MAX, SteadyCriterion, SteadyOptions};

/// Whether an engine can be used on zones.
fn takes_zones(kind: EngineKind) -> bool {
    use EngineKind::{Libaio, Null, Psync, Pvsync2, Uring};
    matches!(kind, Psync | Pvsync2 | Libaio | Uring | Null)
}

impl PerfJob {
    /// A pattern without another kind of verification is one, as in fio.
    pub(super) fn finalize_verify(&mut self) -> Result<(), String> {
        let spec = &mut self.spec;
        if !spec.verify_pattern.is_empty() && matches!(spec.verify, Verify::Off | Verify::Pattern) {
            spec.verify = Verify::Fio(FioVerify::Pattern);
        }
        let is_fio = matches!(spec.verify, Verify::Fio(_));
        let cases = [
            (!spec.verify_pattern.is_empty(), "verify_pattern"),
            (spec.verify_interval.is_some(), "verify_interval"),
        ];
        if spec.verify == Verify::Off && self.serialize_overlap {
            let message =
                "--serialize_overlap needs --verify: I/Os in flight may overlap where random offsets repeat";
            return Err(message.to_string());
        }
        if spec.verify == Verify::Off && (spec.verify_backlog > 0 || spec.verify_batch > 0) {
            return Err("--verify_backlog does nothing without --verify".to_string());
        }
        match cases.into_iter().find(|(given, _)| *given && !is_fio) {
            Some((_, option)) => {
                Err(format!("--{option} does nothing without one of fio's kinds of --verify"))
            }
            None => Ok(()),
        }
    }

    pub(super) fn finalize_steady(&mut self) -> Result<(), String> {
        let (criterion, duration_ns, ramp_ns) = self.steady;
        if duration_ns == 0 {
            let given = criterion.is_some() || ramp_ns > 0;
            let message = "--steadystate does nothing without --steadystate_duration; for example 10s";
            return if given { Err(message.to_string()) } else { Ok(()) };
        }
        let duration_s = u32::try_from(duration_ns / 1_000_000_000).unwrap_or(u32::MAX);
        if !(2..=DURATION_S_MAX).contains(&duration_s) {
            return Err(format!("--steadystate_duration is 2 to {DURATION_S_MAX} seconds"));
        }
        let criterion = criterion.unwrap_or(SteadyCriterion::DEFAULT);
        self.spec.steady =
            Some(SteadyOptions { criterion, duration_s, ramp_ns, of_group: self.group_reporting });
        Ok(())
    }

    /// As in fio, `filesize` is the size of each file, of which a job uses all from its offset on, and `size`
    /// the bytes of I/O.
    pub(super) fn finalize_file_size(&mut self) {
        let Some(file_bytes) = self.file_bytes else { return };
        if matches!(self.engine, Some(EngineName::Kernel(EngineKind::File(_)))) {
            // The size of an operation is that of a file.
            self.spec.size_bytes.get_or_insert(file_bytes);
            return;
        }
        let spec = &mut self.spec;
        let files = if self.filenames.is_empty() { self.nrfiles as usize } else { self.filenames.len() };
        // With increments each copy has a region of this size at an offset of its own.
        let has_increments = spec.offset_increment > 0 || spec.offset_increment_percent > 0;
        let before = if has_increments { 0 } else { spec.offset_bytes };
        let used = file_bytes.checked_sub(before).filter(|bytes| *bytes > 0).unwrap_or(file_bytes);
        let region = used.saturating_mul(files as u64);
        if let Some(size) = spec.size_bytes.filter(|size| *size != region) {
            spec.io_bytes.get_or_insert(size.saturating_mul(spec.loops.max(1).into()));
        }
        if let Some(percent) = spec.size_percent.take() {
            spec.io_percent.get_or_insert(percent);
        }
        spec.size_bytes = Some(region);
    }

    pub(super) fn finalize_content(&mut self) -> Result<(), String> {
        let mut content = self.reducible.clone();
        if content.dedupe_percent == 0 && content.compress_percent == 0 {
            let given = content.global || content.working_set_percent.is_some();
            let message = "--dedupe_mode, --dedupe_global and --dedupe_working_set_percentage do nothing without \
                           --dedupe_percentage";
            return if given { Err(message.to_string()) } else { Ok(()) };
        }
        if self.spec.verify != Verify::Off {
            let message = "--verify sets the content of blocks, which excludes --dedupe_percentage and \
                           --buffer_compress_percentage";
            return Err(message.to_string());
        }
        if let BufferContent::Pattern(pattern) = &self.spec.content {
            content.pattern = pattern.clone();
        }
        self.spec.content = BufferContent::Reducible(Box::new(content));
        Ok(())
    }

    /// The priorities of the job and of its I/Os.
    pub(super) fn finalize_priorities(&mut self) -> Result<(), String> {
        self.spec.priority =
            self.io_priority.map_or(0, |(class, level)| RequestPriorities::value(class, level));
        let options = &self.command_priority;
        let has_split = options.split.iter().any(|shares| !shares.is_empty());
        if has_split && options.percent != [0, 0] {
            return Err("--cmdprio_percentage and --cmdprio_bssplit exclude each other".to_string());
        }
        if !has_split && options.percent == [0, 0] && (options.class != [0, 0] || options.level != [0, 0]) {
            return Err(
                "--cmdprio and --cmdprio_class do nothing without --cmdprio_percentage or --cmdprio_bssplit"
                    .to_string(),
            );
        }
        if self.numa_cpu_nodes.is_some() && self.cpus.is_some() {
            return Err("--numa_cpu_nodes and --cpus_allowed exclude each other".to_string());
        }
        let used = self.spec.workload.directions(self.spec.read_percent);
        let shares_of = |direction: usize| {
            let class = if options.class[direction] == 0 { 1 } else { options.class[direction] };
            let default = RequestPriorities::value(class, options.level[direction]);
            let mut shares = options.split[direction].clone();
            if options.percent[direction] > 0 {
                shares.push(PriorityShare {
                    block_bytes: None,
                    percent: options.percent[direction],
                    priority: 0,
                });
            }
            for share in shares.iter_mut().filter(|share| share.priority == 0) {
                share.priority = default;
            }
            if used[direction] { shares } else { Vec::new() }
        };
        self.spec.command_priorities = CommandPriorities {
            shares: [0, 1].map(shares_of),
            of_total_latency: crate::fio::percentiles_of(self)[2],
        };
        Ok(())
    }

    pub(super) fn finalize_limits(&mut self) -> Result<(), String> {
        let only_writes = matches!(self.spec.workload, Workload::Write | Workload::RandWrite);
        // The other options of a flow may stand in [global], for the jobs with a weight.
        self.spec.flow = self.spec.flow.filter(|flow| flow.weight > 0);
        if self.spec.fills_device && !only_writes {
            return Err("--fill_device needs --rw=write or randwrite".to_string());
        }
        if self.spec.fills_device && self.spec.time_based {
            return Err("--fill_device ends when the device is full, which excludes --time_based".to_string());
        }
        if !self.spec.rate_minima.is_on() && self.spec.rate_minima.cycle_ns != RateMinima::default().cycle_ns
        {
            return Err("--rate_cycle does nothing without --rate_min or --rate_iops_min".to_string());
        }
        Ok(())
    }

    pub(super) fn finalize_pauses_and_trims(&self) -> Result<(), String> {
        let think = self.spec.think;
        let cases = [
            (think.spin_ns > 0, "thinktime_spin"),
            (think.blocks > 0, "thinktime_blocks"),
            (think.counts_issued, "thinktime_blocks_type"),
            (think.interval_ns > 0, "thinktime_iotime"),
        ];
        if let Some((_, option)) = cases.into_iter().find(|(given, _)| *given && think.ns == 0) {
            return Err(format!("--{option} does nothing without --thinktime"));
        }
        if self.spec.workload.writes_what_it_trims() {
            let cases = [
                (self.spec.sizes.is_some(), "several block sizes"),
                (!self.spec.rates.is_closed_loop(), "rate"),
                (self.spec.verify != Verify::Off, "verify"),
            ];
            if let Some((_, option)) = cases.into_iter().find(|(given, _)| *given) {
                return Err(format!("--rw={} excludes {option}", self.spec.workload.name()));
            }
        }
        Ok(())
    }

    pub(super) fn finalize_kernel(&mut self, kind: EngineKind) -> Result<(), String> {
        self.engine_config.kind = kind;
        self.engine_config.polling.iopoll |= self.polling_mode.0;
        self.engine_config.polling.sqpoll |= self.polling_mode.1;
        if kind.is_synchronous() {
            // Synchronous engines have a depth of 1, whatever iodepth is given, as in fio.
            self.spec.io_depth = 1;
            self.spec.measure_submission = false;
        }
        self.engine_config.depth = self.spec.io_depth;
        // One at a time, as fio and the studies: batches move time from completion to submission.
        let as_fio = kind.is_synchronous()
            || matches!(kind, EngineKind::Libaio | EngineKind::PosixAio | EngineKind::Uring);
        let most = u32::from(as_fio);
        self.engine_config.batch_max = self.batch_submit.unwrap_or(most);
        self.engine_config.reap_max = self.batch_complete_max.unwrap_or(most);
        let config = &self.engine_config;
        let name = kind.name();
        let uring = matches!(kind, EngineKind::Uring | EngineKind::Passthrough);
        let cases = [
            (config.fixed_buffers && !uring, "fixedbufs", "io_uring or io_uring_cmd"),
            (config.register_files && !uring, "registerfiles", "io_uring or io_uring_cmd"),
            (!config.nonvectored && kind != EngineKind::Uring, "nonvectored", "io_uring"),
            (config.polling.sqpoll && !uring, "sqthread_poll", "io_uring or io_uring_cmd"),
            (
                config.polling.sqpoll_cpu.is_some() && !config.polling.sqpoll,
                "sqthread_poll_cpu",
                "sqthread_poll",
            ),
            (config.userspace_reap && kind != EngineKind::Libaio, "userspace_reap", "libaio"),
            (
                self.spec.command_priorities.is_on()
                    && !matches!(kind, EngineKind::Libaio | EngineKind::Uring),
                "cmdprio",
                "libaio or io_uring",
            ),
            (
                self.spec.zoned.is_some() && !takes_zones(kind),
                "zonemode=zbd",
                "psync, pvsync2, libaio, io_uring or null",
            ),
            (
                config.polling.iopoll && !uring && kind != EngineKind::Pvsync2,
                "hipri",
                "io_uring, io_uring_cmd or pvsync2",
            ),
        ];
        if let Some((_, option, needs)) = cases.into_iter().find(|(wrong, _, _)| *wrong) {
            return Err(format!("--{option} does nothing with ioengine={name}; it needs {needs}"));
        }
        if config.polling.iopoll && !self.direct && kind != EngineKind::Passthrough {
            return Err("--hipri polls a device for direct I/O; add --direct=1".to_string());
        }
        if self.filenames.is_empty() && kind == EngineKind::Null && self.spec.size_bytes.is_none() {
            self.spec.size_bytes = Some(1 << 30);
        }
        Ok(())
    }

    /// Options of engines that create, query or delete files: one I/O is one file, and `size` is that of
    /// each.
    pub(super) fn finalize_file_operation(
        &mut self,
        operation: Option<MetadataOperation>,
    ) -> Result<(), String> {
        let Some(operation) = operation else {
            let count = self.filenames.len().max(self.nrfiles as usize);
            if self.open_files.is_some_and(|open| (open as usize) < count) {
                return Err(format!("--openfiles is below the {count} files of the job, which are all open"));
            }
            // Such files are made without being allocated, and grow as they are written.
            self.allocates &= !self.create_on_open;
            return Ok(());
        };
        if self.create_on_open && !operation.creates() {
            return Err("--create_on_open is for ioengine=filecreate and dircreate".to_string());
        }
        let spec = &mut self.spec;
        let cases = [
            (spec.verify != Verify::Off, "verify"),
            (spec.flush_every > 0 || spec.flush_at_end, "fsync"),
            (spec.sizes.is_some(), "bsrange"),
            (self.direct, "direct"),
            (self.sync != SyncMode::None, "sync"),
            (spec.offset_bytes > 0 || spec.offset_percent > 0, "offset"),
            (spec.offset_increment > 0 || spec.offset_increment_percent > 0, "offset_increment"),
        ];
        if let Some((_, option)) = cases.into_iter().find(|(given, _)| *given) {
            return Err(format!("--{option} is for data; this engine only has the names of files"));
        }
        self.operation_file_bytes = spec.size_bytes.take().unwrap_or(u64::from(spec.block_bytes));
        spec.size_percent = None;
        Ok(())
    }

    pub(super) fn reject_kernel_options(&self) -> Result<(), String> {
        let config = &self.engine_config;
        let cases = [
            (config.fixed_buffers, "fixedbufs"),
            (config.register_files, "registerfiles"),
            (config.polling.sqpoll, "sqthread_poll"),
            (config.polling.iopoll, "hipri"),
            (config.userspace_reap, "userspace_reap"),
            (self.batch_submit.is_some_and(|most| most > 0), "iodepth_batch"),
            (self.batch_complete_max.is_some_and(|most| most > 0), "iodepth_batch_complete_max"),
            (self.io_priority.is_some(), "prio"),
            (self.spec.command_priorities.is_on(), "cmdprio"),
            (self.numa_cpu_nodes.is_some(), "numa_cpu_nodes"),
            (self.memory_policy.is_some(), "numa_mem_policy"),
            (self.spec.zoned.is_some(), "zonemode=zbd"),
            (self.spec.flow.is_some(), "flow"),
            (self.cgroup.is_some(), "cgroup"),
            (self.create_only, "create_only"),
            (self.delay_ns > 0, "startdelay"),
            (self.nice != 0, "nice"),
            (self.scheduler.is_some(), "ioscheduler"),
            (self.directory.is_some(), "directory"),
            (self.nrfiles > 1, "nrfiles"),
            (self.allow_mounted_write, "allow_mounted_write"),
            (config.polling.sqpoll_cpu.is_some(), "sqthread_poll_cpu"),
            (!config.nonvectored, "nonvectored=0"),
        ];
        match cases.into_iter().find(|(given, _)| *given) {
            Some((_, option)) => {
                Err(format!("--{option} is for the kernel's engines, not for ioengine=bdev"))
            }
            None => Ok(()),
        }
    }
}
