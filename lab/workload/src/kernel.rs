//! Jobs of the kernel's engines: each a thread that has a core, buffers, files and an engine of its own.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use engines::{Access, AnyEngine, Engine, File, Kind, Layout};
use memory::{Arena, Pool};
use sys::clock;

use crate::generator::Generator;
use crate::jobfile::{EngineName, Job};
use crate::place::{Geometry, SetupError};
use crate::poller::Progress;
use crate::result::{JobResult, KernelThreads};
use crate::run::RunError;
use crate::spec::JobSpec;

/// A door behind which jobs wait until all are ready.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    /// Lets everybody through, from now on.
    pub(crate) fn open(&self) {
        *self.is_open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let closed = self.is_open.lock().unwrap_or_else(PoisonError::into_inner);
        // A poisoned lock guards a flag that is still right.
        let _open = self.opened.wait_while(closed, |is_open| !*is_open);
    }
}

/// The paths of the files of one copy of a job.
pub(crate) fn paths(job: &Job, number: u32) -> Vec<String> {
    let names = match job.filenames.as_slice() {
        [] => (0..job.nrfiles).map(|file| format!("{}.{number}.{file}", job.spec.name)).collect(),
        names => names.to_vec(),
    };
    let within = |name: String| match &job.directory {
        Some(directory) if !name.starts_with('/') => format!("{directory}/{name}"),
        _ => name,
    };
    names.into_iter().map(within).collect()
}

/// Bytes that each file is to have, if the options tell.
fn wanted_bytes(job: &Job) -> Option<u64> {
    let spec = &job.spec;
    let files = if job.filenames.is_empty() { job.nrfiles as usize } else { job.filenames.len() } as u64;
    let later = spec.offset_increment.saturating_mul(u64::from(job.numjobs.saturating_sub(1)));
    spec.size_bytes.map(|size| (size / files).saturating_add(spec.offset_bytes).saturating_add(later))
}

/// Makes and lays out the files that all copies of a job need, before any of them starts.
pub(crate) fn prepare_files(job: &Job) -> Result<(), RunError> {
    let Some(EngineName::Kernel(kind)) = job.engine else { return Ok(()) };
    if kind == Kind::Null {
        return Ok(());
    }
    let copies = if job.filenames.is_empty() { job.numjobs } else { 1 };
    for path in (0..copies).flat_map(|number| paths(job, number)) {
        let found = std::fs::metadata(&path).ok();
        if found.as_ref().is_some_and(|found| !found.is_file()) {
            continue;
        }
        let have = found.map(|found| found.len());
        match (wanted_bytes(job), have) {
            (None, Some(_)) => {}
            (Some(wanted), Some(have)) if have >= wanted => {}
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
            (Some(wanted), _) => {
                // What is read is to be there; what is only written needs its room.
                let fill = job.spec.workload.directions(job.spec.read_percent)[0];
                File::make(&path, wanted, fill, job.spec.seed)?;
            }
        }
    }
    Ok(())
}

/// What one copy of a job is handed.
pub(crate) struct Seat {
    pub(crate) number: u32,
    pub(crate) log_number: u32,
    pub(crate) progress: Arc<Progress>,
    pub(crate) gate: Arc<Gate>,
}

/// Sets one copy of a job up on the calling thread, says that it is ready, waits at the gate, and runs it
/// to its end.
pub(crate) fn run(job: &Job, seat: &Seat, ready: impl FnOnce()) -> Result<JobResult, RunError> {
    let Some(EngineName::Kernel(kind)) = job.engine else {
        return Err(RunError::Options("ioengine=bdev runs on reactors".to_string()));
    };
    settle_down(job, seat.number)?;
    let files = open_files(job, seat.number, kind)?;
    let geometry = |file: &File| Geometry {
        block_bytes: file.block_bytes(),
        blocks: file.bytes() / u64::from(file.block_bytes()),
    };
    let geometries: Vec<Geometry> = files.iter().map(geometry).collect();
    let first = geometries.first().map_or(0, |one| one.blocks.saturating_mul(u64::from(one.block_bytes)));
    let mut spec = job.spec.for_thread(seat.number, job.numjobs, first);
    if !job.repeatable {
        spec.seed ^= clock::now_ns() ^ u64::from(std::process::id()) << 32;
    }
    let need = buffers_bytes(&spec);
    let arena =
        Arena::new(memory::Config { limit_bytes: need, hugepages: need > 64 << 20, ..Default::default() });
    let pool = Pool::new(&arena);
    let generator = Generator::over(spec, &geometries, &pool)?;
    let engine = engines::open(&job.engine_config, files, generator.requests())?;
    ready();
    seat.gate.pass();
    if job.delay_ns > 0 {
        delay(job.delay_ns, &seat.progress);
    }
    let result = match engine {
        AnyEngine::Null(engine) => drive(generator, engine, seat),
        AnyEngine::Sync(engine) => drive(generator, engine, seat),
        AnyEngine::Aio(engine) => drive(generator, engine, seat),
        AnyEngine::Uring(engine) => drive(generator, engine, seat),
        AnyEngine::Passthrough(engine) => drive(generator, engine, seat),
    };
    Ok(JobResult { number: seat.number, ..result })
}

/// As many chunks as the buffers of the depth fill, and one.
fn buffers_bytes(spec: &JobSpec) -> usize {
    let each = (spec.block_bytes as usize).max(4096).next_power_of_two();
    let chunks = (each * spec.io_depth as usize).div_ceil(memory::CHUNK_BYTES) + 1;
    chunks * memory::CHUNK_BYTES
}

/// Cores, niceness and I/O priority of the calling thread.
fn settle_down(job: &Job, number: u32) -> Result<(), RunError> {
    let machine = |what: &str| {
        let what = what.to_string();
        move |error: rustix::io::Errno| RunError::Machine { what, error: error.into() }
    };
    if let Some(cpus) = &job.cpus {
        let allowed = sys::CpuSet::allowed();
        if let Some(missing) = cpus.iter().find(|cpu| !allowed.cpus().contains(cpu)) {
            return Err(RunError::Options(format!("--cpus_allowed: core {missing} is not among {allowed}")));
        }
        let mut set = rustix::thread::CpuSet::new();
        match job.cpus_split {
            true => set.set(cpus[number as usize % cpus.len()] as usize),
            false => cpus.iter().for_each(|cpu| set.set(*cpu as usize)),
        }
        rustix::thread::sched_setaffinity(None, &set).map_err(machine("cpus_allowed"))?;
    }
    if job.nice != 0 {
        rustix::process::setpriority_process(None, job.nice).map_err(machine("nice"))?;
    }
    if let Some((class, level)) = job.io_priority {
        engines::usage::set_io_priority(class, level)
            .map_err(|error| RunError::Machine { what: "prio".to_string(), error })?;
    }
    if let Some(group) = &job.cgroup {
        let path = format!("/sys/fs/cgroup/{}/cgroup.procs", group.trim_matches('/'));
        std::fs::write(&path, std::process::id().to_string())
            .map_err(|error| RunError::Machine { what: format!("cgroup: {path}"), error })?;
    }
    Ok(())
}

fn open_files(job: &Job, number: u32, kind: Kind) -> Result<Vec<File>, RunError> {
    let unit_bytes = job.unit_bytes();
    if kind == Kind::Null {
        let bytes = wanted_bytes(job).unwrap_or(1 << 30);
        let count = if job.filenames.is_empty() { job.nrfiles as usize } else { job.filenames.len() };
        return (0..count).map(|_| Ok(File::nothing(unit_bytes, bytes)?)).collect();
    }
    let writes = job.spec.workload.writes();
    let layout = Layout {
        access: if writes { Access::Write } else { Access::Read },
        direct: job.direct,
        sync: job.sync,
        unit_bytes,
        allow_mounted_write: job.allow_mounted_write,
    };
    let mut files = Vec::new();
    for path in paths(job, number) {
        let file = File::open(&path, &layout)?;
        if job.invalidate && !job.direct && file.kind() == engines::FileKind::Regular {
            // What cannot be dropped stays: a file in memory has nothing else.
            let _ = file.invalidate();
        }
        if file.bytes() == 0 {
            return Err(SetupError::Region { offset: 0, size: 0, device: 0 }.into());
        }
        files.push(file);
    }
    Ok(files)
}

fn delay(ns: u64, progress: &Progress) {
    let end = clock::now_ns().saturating_add(ns);
    while !progress.is_stopped() {
        let left = end.saturating_sub(clock::now_ns());
        if left == 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_nanos(left.min(LOOK_NS)));
    }
}

/// How often a job looks whether it is to end, where nothing else wakes it.
const LOOK_NS: u64 = 50_000_000;
/// A sleep may end so much late; what is due sooner is waited for awake.
const SLACK_NS: u64 = 60_000;

fn drive<E: Engine>(mut generator: Generator, mut engine: E, seat: &Seat) -> JobResult {
    let polling_thread = engine.submission_thread();
    let kernel_ns = || KernelThreads {
        submission_ns: polling_thread.and_then(engines::usage::task_ns).unwrap_or(0),
        workers_ns: engines::usage::uring_workers_ns(),
    };
    let mut before = None;
    loop {
        if seat.progress.is_stopped() {
            generator.stop();
        }
        let count = generator.turn(&mut engine);
        seat.progress.publish(generator.completed(), generator.faults());
        if before.is_none() && generator.is_measuring() {
            before = Some(kernel_ns());
        }
        if generator.is_over() {
            break;
        }
        if count > 0 || generator.is_spinning() {
            continue;
        }
        let now_ns = clock::now_ns();
        let due = generator.deadline_ns(now_ns).map_or(LOOK_NS, |due| due.saturating_sub(now_ns));
        let wait_ns = due.min(LOOK_NS).saturating_sub(SLACK_NS);
        if wait_ns == 0 {
            std::hint::spin_loop();
        } else if engine.in_flight() > 0 {
            engine.wait(wait_ns);
        } else {
            std::thread::sleep(std::time::Duration::from_nanos(wait_ns));
        }
    }
    let (before, after) = (before.unwrap_or_default(), kernel_ns());
    let mut result = generator.finish(seat.log_number);
    result.kernel = KernelThreads {
        submission_ns: after.submission_ns.saturating_sub(before.submission_ns),
        workers_ns: after.workers_ns.saturating_sub(before.workers_ns),
    };
    result
}
