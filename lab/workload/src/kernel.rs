//! Jobs on kernel I/O engines: each copy runs on a thread with its own buffers, files and engine.

mod numa;
mod operation_files;
mod page_caches;

use std::sync::{Arc, Condvar, Mutex};

use dma::{Arena, Pool};
use io_engines::{
    AnyEngine, EngineConfig, EngineFile, EngineKind, FileAccess, FileOpenOptions, FileZones, IoEngine,
    MetadataOperationEngine, WriteLock,
};
use os::clock;

use crate::access_pattern::{Geometry, SetupError, file_region};
use crate::flow::FlowMember;
use crate::generator::Generator;
use crate::jobfile::{EngineName, PerfJob};
use crate::poller::Progress;
use crate::result::{JobResult, KernelThreads};
use crate::run::RunError;
use crate::spec::JobSpec;
use crate::usage::Usage;
use crate::work;
use crate::zoned::{ZonedDevices, ZonedJob, align_region};
use numa::NumaNodes;
use page_caches::PageCaches;

/// A barrier at which jobs wait until all are ready.
#[derive(Debug, Default)]
pub(crate) struct StartGate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl StartGate {
    /// Releases all current and future waiters.
    pub(crate) fn open(&self) {
        *sync::lock(&self.is_open) = true;
        self.opened.notify_all();
    }

    pub(crate) fn pass(&self) {
        let closed = sync::lock(&self.is_open);
        // The flag stays valid when the lock is poisoned.
        let _open = self.opened.wait_while(closed, |is_open| !*is_open);
    }
}

/// The paths of the files of one copy of a job.
pub(crate) fn paths(job: &PerfJob, number: u32) -> Vec<String> {
    let names = match job.filenames.as_slice() {
        [] => (0..job.nrfiles).map(|file| format!("{}.{number}.{file}", job.spec.name)).collect(),
        names => names.to_vec(),
    };
    let in_directory = |name: String| match &job.directory {
        Some(directory) if !name.starts_with('/') => format!("{directory}/{name}"),
        _ => name,
    };
    names.into_iter().map(in_directory).collect()
}

/// The size that each file must have, if the options give one.
fn requested_bytes(job: &PerfJob) -> Option<u64> {
    let spec = &job.spec;
    let files = if job.filenames.is_empty() { job.nrfiles as usize } else { job.filenames.len() } as u64;
    let increment_bytes = spec.offset_increment.saturating_mul(u64::from(job.numjobs.saturating_sub(1)));
    spec.size_bytes
        .map(|size| (size / files).saturating_add(spec.offset_bytes).saturating_add(increment_bytes))
}

/// Creates and lays out the files of all copies of a job, before any of them starts. Returns the locks of
/// those, and of block devices, that they write, for as long as they run.
pub(crate) fn prepare_files(job: &PerfJob) -> Result<Vec<WriteLock>, RunError> {
    let Some(EngineName::Kernel(kind)) = job.engine else { return Ok(Vec::new()) };
    match kind {
        EngineKind::Null => return Ok(Vec::new()),
        EngineKind::File(operation) => {
            return operation_files::prepare(job, operation).map(|()| Vec::new());
        }
        _ => {}
    }
    let lock = |path: &str| match job.allow_mounted_write {
        true => Ok(None),
        false => WriteLock::take(path),
    };
    let writes = job.spec.workload.writes();
    let mut locks = Vec::new();
    let copies = if job.filenames.is_empty() { job.numjobs } else { 1 };
    for path in (0..copies).flat_map(|number| paths(job, number)) {
        let found = std::fs::metadata(&path).ok();
        if found.as_ref().is_some_and(|found| !found.is_file()) {
            locks.extend(writes.then(|| lock(&path)).transpose()?.flatten());
            continue;
        }
        if job.spec.fills_device {
            // The writes extend it, until there is no space.
            if found.is_none() && !job.allow_file_create {
                return Err(RunError::Options(format!("{path}: no such file, and --allow_file_create=0")));
            }
            EngineFile::room(&path)?;
            locks.extend(lock(&path)?);
            continue;
        }
        let existing = found.map(|found| found.len());
        match (requested_bytes(job), existing) {
            (None, Some(_)) => {}
            (Some(requested), Some(existing)) if existing >= requested => {}
            (None, None) => {
                let reason = match path.contains('/') {
                    true => format!("{path}: no such file; give --size to have it made"),
                    false => format!(
                        "{path}: no such file, and no bdev is called {path}; give --size to have a file made"
                    ),
                };
                return Err(RunError::Options(reason));
            }
            (Some(_), None) if !job.allow_file_create => {
                return Err(RunError::Options(format!("{path}: no such file, and --allow_file_create=0")));
            }
            (Some(requested), _) => {
                // Files that are read need data; files that are only written need allocated space.
                let reads = job.spec.workload.directions(job.spec.read_percent)[0];
                // `create_on_open` asks for files that grow as they are written.
                let fill = reads && !(job.create_on_open && job.spec.workload.writes());
                // Extending a file writes it, whatever the job does then.
                let _extended = existing.map(|_| lock(&path)).transpose()?;
                match fill || job.allocates {
                    true => EngineFile::lay_out(&path, requested, fill, job.spec.seed)?,
                    false => EngineFile::extend(&path, requested)?,
                }
            }
        }
        locks.extend(writes.then(|| lock(&path)).transpose()?.flatten());
    }
    Ok(locks)
}

/// The identity of one copy of a job, and how it reports its progress and is started.
pub(crate) struct JobCopyContext {
    pub(crate) number: u32,
    pub(crate) log_number: u32,
    pub(crate) progress: Arc<Progress>,
    pub(crate) gate: Arc<StartGate>,
    pub(crate) flow: Option<Arc<FlowMember>>,
    /// Of a job on zones.
    pub(crate) zoned: Option<Arc<ZonedDevices>>,
}

/// Sets up one copy of a job on the calling thread, calls `ready`, waits at the gate, and runs the job until
/// it finishes.
pub(crate) fn run(
    job: &PerfJob,
    context: &JobCopyContext,
    ready: impl FnOnce(),
) -> Result<JobResult, RunError> {
    apply_scheduling(job, context.number)?;
    let kind = match job.engine {
        Some(EngineName::Kernel(kind)) => kind,
        Some(EngineName::Work(kind)) => return work::run(job, kind, context, ready),
        _ => return Err(RunError::Options("ioengine=bdev runs on reactors".to_string())),
    };
    let mut files = match kind {
        EngineKind::File(_) => Vec::new(),
        _ => open_files(job, context.number, kind)?,
    };
    let geometry = |file: &EngineFile| Geometry {
        block_bytes: file.block_bytes(),
        blocks: file.bytes() / u64::from(file.block_bytes()),
    };
    let geometries: Vec<Geometry> = match kind {
        // Each file is one I/O, whatever its size.
        EngineKind::File(_) => {
            vec![Geometry { block_bytes: job.spec.block_bytes, blocks: 1 }; paths(job, context.number).len()]
        }
        _ => files.iter().map(geometry).collect(),
    };
    let first = geometries.first().map_or(0, |one| one.blocks.saturating_mul(u64::from(one.block_bytes)));
    let (mut spec, zoned) = match &context.zoned {
        Some(devices) => join_zones(job, context.number, devices, &mut files)?,
        None => (job.spec.for_thread(context.number, job.numjobs, first), None),
    };
    if !job.repeatable {
        spec.seed ^= clock::now_ns() ^ u64::from(std::process::id()) << 32;
    }
    let arena_bytes = buffers_bytes(&spec);
    let arena = Arena::new(dma::ArenaConfig {
        limit_bytes: arena_bytes,
        hugepages: arena_bytes > 64 << 20,
        ..Default::default()
    });
    let pool = Pool::new(&arena);
    let mut generator = Generator::with_files(spec, &geometries, &pool)?;
    if let Some(zoned) = zoned {
        generator.join_zones(zoned);
    }
    if let Some(flow) = &context.flow {
        generator.join_flow(flow.clone());
    }
    let caches = PageCaches::new(job, &files);
    let engine = match kind {
        EngineKind::File(operation) => {
            AnyEngine::File(MetadataOperationEngine::new(operation, paths(job, context.number)))
        }
        _ => {
            let access_order = page_caches::expected_order(job);
            let config = EngineConfig {
                priorities: generator.priorities(),
                access_order,
                ..job.engine_config.clone()
            };
            io_engines::open(&config, files, generator.requests())?
        }
    };
    ready();
    context.gate.pass();
    if job.delay_ns > 0 {
        delay(job.delay_ns, &context.progress);
    }
    let result = match engine {
        AnyEngine::Null(engine) => drive(generator, engine, caches, context),
        AnyEngine::Sync(engine) => drive(generator, engine, caches, context),
        AnyEngine::Aio(engine) => drive(generator, engine, caches, context),
        AnyEngine::PosixAio(engine) => drive(generator, engine, caches, context),
        AnyEngine::Uring(engine) => drive(generator, engine, caches, context),
        AnyEngine::Passthrough(engine) => drive(generator, engine, caches, context),
        AnyEngine::File(engine) => drive(generator, engine, caches, context),
    };
    Ok(JobResult { number: context.number, ..result })
}

/// A job's part in the zones of its device, and the job with its region in whole zones.
fn join_zones(
    job: &PerfJob,
    number: u32,
    devices: &ZonedDevices,
    files: &mut [EngineFile],
) -> Result<(JobSpec, Option<ZonedJob>), RunError> {
    let Some(options) = job.spec.zoned.as_deref() else { return Ok((job.spec.clone(), None)) };
    let [file] = files else {
        return Err(RunError::Options("--zonemode=zbd has one file or device a job".to_string()));
    };
    let is_null = matches!(job.engine, Some(EngineName::Kernel(EngineKind::Null)));
    let device = devices.open(file.path(), file.bytes(), is_null, options)?;
    let writes = job.spec.workload.writes();
    if device.is_zoned() && writes && !job.direct {
        return Err(RunError::Options(format!(
            "{}: writes to a zoned device need --direct=1, because the page cache reorders them",
            file.path()
        )));
    }
    if job.spec.workload.directions(job.spec.read_percent)[2] && device.zone_bytes > u64::from(u32::MAX) {
        return Err(RunError::Options(format!("{}: zones of 4 GiB and more cannot be trimmed", file.path())));
    }
    file.set_zones(if device.is_zoned() { FileZones::Device } else { FileZones::Emulated });
    let geometry =
        Geometry { block_bytes: file.block_bytes(), blocks: file.bytes() / u64::from(file.block_bytes()) };
    let mut spec = job.spec.clone();
    let too_large = || RunError::Options("a size in zones is too large".to_string());
    spec.resolve_zones(device.zone_bytes).ok_or_else(too_large)?;
    let mut spec = spec.for_thread(number, job.numjobs, file.bytes());
    // A trim is a zone, and so none is larger than the region.
    let (mut offset, mut size) = file_region(&spec, geometry, 1, 1)?;
    if writes {
        (offset, size) = align_region(&device, offset, size).map_err(RunError::Options)?;
    }
    (spec.offset_bytes, spec.offset_percent) = (offset, 0);
    (spec.size_bytes, spec.size_percent) = (Some(size), None);
    let region = offset..offset + size;
    let zoned = device.join(options, region, job.min_bytes(), writes).map_err(RunError::Options)?;
    Ok((spec, Some(zoned)))
}

/// The arena size for the buffers of the I/O depth: whole chunks, plus one.
fn buffers_bytes(spec: &JobSpec) -> usize {
    let [reads, writes, trims] = spec.workload.directions(spec.read_percent);
    // Trims have no buffer, whatever their size.
    let bytes = if trims && !reads && !writes { 0 } else { spec.block_bytes as usize };
    let each = match bytes <= dma::BUFFER_BYTES_MAX {
        true => bytes.max(4096).next_power_of_two(),
        false => bytes.next_multiple_of(dma::BUFFER_BYTES_MAX),
    };
    let chunks = (each * spec.io_depth as usize).div_ceil(dma::CHUNK_BYTES) + 1;
    chunks * dma::CHUNK_BYTES
}

/// Sets the CPU affinity, niceness, I/O priority and cgroup of the calling thread.
fn apply_scheduling(job: &PerfJob, number: u32) -> Result<(), RunError> {
    let system_error = |what: &str| {
        let what = what.to_string();
        move |error: rustix::io::Errno| RunError::Machine { what, error: error.into() }
    };
    if let Some(cpus) = &job.cpus {
        let allowed = os::CpuSet::allowed();
        if let Some(missing) = cpus.iter().find(|cpu| !allowed.cpus().contains(cpu)) {
            return Err(RunError::Options(format!("--cpus_allowed: core {missing} is not among {allowed}")));
        }
        let mut set = rustix::thread::CpuSet::new();
        match job.cpus_split {
            true => set.set(cpus[number as usize % cpus.len()] as usize),
            false => cpus.iter().for_each(|cpu| set.set(*cpu as usize)),
        }
        rustix::thread::sched_setaffinity(None, &set).map_err(system_error("cpus_allowed"))?;
    }
    apply_nodes(job)?;
    if job.nice != 0 {
        rustix::process::setpriority_process(None, job.nice).map_err(system_error("nice"))?;
    }
    if let Some((class, level)) = job.io_priority {
        io_engines::usage::set_io_priority(class, level)
            .map_err(|error| RunError::Machine { what: "prio".to_string(), error })?;
    }
    if let Some(group) = &job.cgroup {
        let path = format!("/sys/fs/cgroup/{}/cgroup.procs", group.trim_matches('/'));
        std::fs::write(&path, std::process::id().to_string())
            .map_err(|error| RunError::Machine { what: format!("cgroup: {path}"), error })?;
    }
    Ok(())
}

/// Sets the cores and the memory policy that NUMA nodes give.
fn apply_nodes(job: &PerfJob) -> Result<(), RunError> {
    if job.numa_cpu_nodes.is_none() && job.memory_policy.is_none() {
        return Ok(());
    }
    let machine = NumaNodes::of_machine()?;
    if let Some(nodes) = &job.numa_cpu_nodes {
        let allowed = os::CpuSet::allowed();
        let mut set = rustix::thread::CpuSet::new();
        let cpus = machine.cpus("numa_cpu_nodes", nodes)?;
        let usable: Vec<u32> = cpus.into_iter().filter(|cpu| allowed.cpus().contains(cpu)).collect();
        if usable.is_empty() {
            return Err(RunError::Options(format!("--numa_cpu_nodes: the nodes have no core of {allowed}")));
        }
        usable.iter().for_each(|cpu| set.set(*cpu as usize));
        rustix::thread::sched_setaffinity(None, &set)
            .map_err(|error| RunError::Machine { what: "numa_cpu_nodes".to_string(), error: error.into() })?;
    }
    if let Some(policy) = &job.memory_policy {
        let policy = machine.resolved(policy)?;
        os::set_memory_policy(&policy)
            .map_err(|error| RunError::Machine { what: "numa_mem_policy".to_string(), error })?;
    }
    Ok(())
}

fn open_files(job: &PerfJob, number: u32, kind: EngineKind) -> Result<Vec<EngineFile>, RunError> {
    let unit_bytes = job.unit_bytes();
    if kind == EngineKind::Null {
        let bytes = requested_bytes(job).unwrap_or(1 << 30);
        let count = if job.filenames.is_empty() { job.nrfiles as usize } else { job.filenames.len() };
        return (0..count).map(|_| Ok(EngineFile::null(unit_bytes, bytes)?)).collect();
    }
    let writes = job.spec.workload.writes();
    let options = FileOpenOptions {
        access: if writes { FileAccess::ReadWrite } else { FileAccess::ReadOnly },
        direct: job.direct,
        sync: job.sync,
        buffered_block_bytes: unit_bytes,
        allow_mounted_write: job.allow_mounted_write,
        grows_to: 0,
    };
    let mut files = Vec::new();
    for path in paths(job, number) {
        let grows = job.spec.fills_device && std::fs::metadata(&path).is_ok_and(|found| found.is_file());
        let grows_to = if grows { EngineFile::room(&path)? } else { 0 };
        let file = EngineFile::open(&path, &FileOpenOptions { grows_to, ..options })?;
        if file.bytes() == 0 {
            return Err(SetupError::Region { offset: 0, size: 0, device: 0 }.into());
        }
        files.push(file);
    }
    Ok(files)
}

/// Waits, unless the job is stopped.
pub(crate) fn delay(ns: u64, progress: &Progress) {
    let end = clock::now_ns().saturating_add(ns);
    while !progress.is_stopped() {
        let left = end.saturating_sub(clock::now_ns());
        if left == 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_nanos(left.min(STOP_CHECK_NS)));
    }
}

/// How often an idle job checks whether it must stop.
const STOP_CHECK_NS: u64 = 50_000_000;
/// How late a sleep may wake up; the job busy-waits for anything due sooner.
const SLEEP_SLACK_NS: u64 = 60_000;

fn drive<E: IoEngine>(
    mut generator: Generator,
    mut engine: E,
    mut caches: PageCaches,
    context: &JobCopyContext,
) -> JobResult {
    let polling_thread = engine.submission_thread();
    let kernel_ns = || KernelThreads {
        submission_ns: polling_thread.and_then(io_engines::usage::task_ns).unwrap_or(0),
        workers_ns: io_engines::usage::uring_workers_ns(),
    };
    let threads_ns = |engine: &E| io_engines::usage::tasks_ns(&engine.worker_threads());
    let mut before = None;
    loop {
        if context.progress.is_stopped() {
            generator.stop();
        }
        let count = generator.turn(&mut engine);
        context.progress.publish(generator.completed(), generator.faults());
        context.progress.publish_rates(generator.take_rates());
        if before.is_none() && generator.is_measuring() {
            before = Some((kernel_ns(), threads_ns(&engine)));
        }
        if generator.is_finished() {
            context.progress.end();
            break;
        }
        if caches.has_passes()
            && let Some(pass) = generator.pass()
        {
            caches.begin_pass(pass);
        }
        if count > 0 || generator.is_spinning() {
            continue;
        }
        let now_ns = clock::now_ns();
        let due = generator.deadline_ns(now_ns).map_or(STOP_CHECK_NS, |due| due.saturating_sub(now_ns));
        let wait_ns = due.min(STOP_CHECK_NS).saturating_sub(SLEEP_SLACK_NS);
        if wait_ns == 0 {
            std::hint::spin_loop();
        } else if engine.in_flight() > 0 {
            engine.wait(wait_ns);
        } else {
            std::thread::sleep(std::time::Duration::from_nanos(wait_ns));
        }
    }
    let ((before, threads_before), after) = (before.unwrap_or_default(), kernel_ns());
    let threads_after = threads_ns(&engine);
    let mut result = generator.finish(context.log_number);
    // The engine's own threads do the job's I/O, as its thread does with other engines.
    let [user_ns, system_ns] = [0, 1].map(|mode| threads_after[mode].saturating_sub(threads_before[mode]));
    result.usage =
        result.usage.plus(Usage { cpu_ns: user_ns + system_ns, user_ns, system_ns, ..Usage::default() });
    result.kernel = KernelThreads {
        submission_ns: after.submission_ns.saturating_sub(before.submission_ns),
        workers_ns: after.workers_ns.saturating_sub(before.workers_ns),
    };
    result
}
