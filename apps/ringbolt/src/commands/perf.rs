//! `ringbolt perf`: the load generator with fio's options and fio's results.

mod options;
mod text;

use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Instant, SystemTime};

use clap::Args;
use control::ConfigFile;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use workload::devices::{self, Disk, DiskStats};
use workload::fio::{ReportedJob, RunReport};
use workload::jobfile::{EngineName, JobPlan, Lookup, PerfJob};
use workload::{BdevReactors, FinishedJob, JobResult, JobRunner, RunError, SourceError};

use crate::app::{self, App, StartOptions};
use crate::command_error::CommandError;
use crate::console::{self, stderr_line};
use crate::options::{EngineChoice, Idle, ReactorOptions};
use crate::reactor_runtime::ReactorRuntime;

use options::{PerfOutputFormat, ProgressReporter, RunOptions};

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt perf --filename=null:1g --rw=randread --bs=4k --iodepth=128 --time_based --runtime=5s\n  \
    ringbolt perf --filename=malloc:64m --rw=randwrite --verify --iodepth=16\n  \
    ringbolt perf --filename=uring:/tmp/disk.img --rw=randrw --rwmixread=70 --runtime=10s --time_based\n  \
    ringbolt perf --filename='nvme+tcp://127.0.0.1:4420/nqn.2025-01.io.ringbolt:a?ns=1' --rw=randread\n  \
    ringbolt perf -c bdevs.json --filename=Malloc0 --rw=read --output-format=json --output=out.json\n  \
    ringbolt perf --filename=/dev/nvme0n1 --ioengine=iou-s --direct=1 --rw=randread --iodepth=128 \\\n      \
        --fixedbufs --registerfiles --time_based --runtime=10s --norandommap\n  \
    ringbolt perf --filename=/dev/nvme0n1 --ioengine=libaio --rw=randread --rate_iops=50k \\\n      \
        --rate_process=poisson --time_based --runtime=10s\n  \
    ringbolt perf job.fio --output-format=json\n\n\
    Options, job files, units and JSON are fio's; an unsupported option is an error that names it. \
    Targets: files and devices through psync, pvsync2, libaio, io_uring (iou, iou-c, iou-s) or \
    io_uring_cmd, each job a process unless --thread; null:SIZE, malloc:SIZE, uring:PATH, aio:PATH, \
    model:PROFILE, store:POOL/IMAGE[?cluster=DIR], nvme+tcp://HOST:PORT/NQN?ns=N, \
    nvme+rdma://HOST:PORT/NQN?ns=N, accel:OPERATION?size=BYTES and bdevs of -c FILE through ioengine=bdev, each job on a reactor.")]
pub(crate) struct Perf {
    /// fio options, as --rw=randread, and job files; --cmdhelp lists the options
    #[arg(value_name = "OPTION|JOBFILE", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) arguments: Vec<String>,
}

/// Resolves job files and environment variables on this machine.
struct SystemLookup {
    /// Path and text of the files that were read for a worker process, which reads none itself; `None` in
    /// other processes.
    given: Option<Vec<(String, String)>>,
}

impl Lookup for SystemLookup {
    fn file(&self, path: &str) -> Result<String, String> {
        if let Some(files) = &self.given {
            let file = files.iter().find(|(known, _)| known == path);
            return file.map(|(_, text)| text.clone()).ok_or_else(|| format!("{path}: was not passed on"));
        }
        let read = |from: &mut dyn Read| {
            let mut text = String::new();
            from.take(JOB_FILE_BYTES_MAX + 1).read_to_string(&mut text).map(|_| text)
        };
        let text = match path {
            "-" => read(&mut std::io::stdin().lock()),
            path => File::open(path).and_then(|mut file| read(&mut file)),
        };
        let text = text.map_err(|error| format!("{path}: {error}"))?;
        if text.len() as u64 > JOB_FILE_BYTES_MAX {
            return Err(format!("{path}: a job file has at most {JOB_FILE_BYTES_MAX} bytes"));
        }
        Ok(text)
    }

    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }

    fn keyword(&self, name: &str) -> Option<u64> {
        match name {
            "$pagesize" => Some(rustix::param::page_size() as u64),
            "$ncpus" => std::thread::available_parallelism().ok().map(|cpus| cpus.get() as u64),
            "$mb_memory" => {
                let memory = rustix::system::sysinfo();
                Some((memory.totalram as u64).saturating_mul(u64::from(memory.mem_unit)) / (1 << 20))
            }
            _ => None,
        }
    }
}

/// Longest job file: a million lines, which the parser has as its limit, are shorter.
const JOB_FILE_BYTES_MAX: u64 = 64 << 20;

pub(crate) fn run(command: &Perf) -> Result<(), CommandError> {
    // A job's worker process has --worker=JOB:COPY as its first argument.
    let (worker, arguments) = match command.arguments.split_first() {
        Some((first, rest)) if first.starts_with("--worker=") => (first.strip_prefix("--worker="), rest),
        _ => (None, command.arguments.as_slice()),
    };
    if let Some(worker) = worker {
        // Ctrl-C and the SIGTERM of timeout(1) go to the whole process group; the parent handles them and
        // stops the workers.
        let ignored = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, ignored.clone()).map_err(CommandError::environment)?;
        }
        let lookup = |files| SystemLookup { given: Some(files) };
        workload::worker(worker, |files| workload::jobfile::plan(arguments, &lookup(files)));
        return Ok(());
    }
    let plan =
        workload::jobfile::plan(arguments, &SystemLookup { given: None }).map_err(CommandError::usage)?;
    let run = RunOptions::new(&plan)?;
    if let Some(text) = &run.help {
        console::print(text);
        return Ok(());
    }
    if plan.jobs.is_empty() {
        return Err(CommandError::usage(
            "no job; for example `ringbolt perf --filename=null:1g --rw=randread --iodepth=128 --time_based --runtime=5s`",
        ));
    }
    if let Some(job) = plan.jobs.iter().find(|job| run.readonly && job.writes()) {
        return Err(CommandError::usage(format!("--readonly: job {} writes", job.spec.name)));
    }
    if run.showcmd {
        console::print(options::show(&plan));
        return Ok(());
    }
    for warning in &plan.warnings {
        stderr_line!("ringbolt: warning: {warning}");
    }
    if run.parse_only {
        return Ok(());
    }
    measure(&plan, &run)
}

/// Raises the limit of open files to what the user may have: beside the files that a job opens, the run has
/// the lock of each file that is written. If that fails, opening a file does, and says so.
fn raise_open_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

fn measure(plan: &JobPlan, run: &RunOptions) -> Result<(), CommandError> {
    raise_open_file_limit();
    let bdev_runtime = BdevRuntime::new(plan, run)?;
    let disks = devices::disks(&plan.jobs);
    for job in &plan.jobs {
        let Some(scheduler) = &job.scheduler else { continue };
        let job_disks = devices::disks(std::slice::from_ref(job));
        if job_disks.is_empty() {
            let name = &job.spec.name;
            return Err(CommandError::usage(format!(
                "--ioscheduler={scheduler}: {name} has no block device"
            )));
        }
        job_disks.iter().try_for_each(|disk| disk.set_scheduler(scheduler)).map_err(command_error)?;
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).map_err(CommandError::environment)?;
    }
    let executable = std::env::current_exe().map_err(CommandError::environment)?;
    let runner = JobRunner {
        plan,
        bdev_reactors: bdev_runtime.as_ref().map(|runtime| &runtime.bdev_reactors),
        worker: vec![executable.to_string_lossy().into_owned(), "perf".to_string()],
        stop,
    };
    let (begun, before) = (Instant::now(), disk_stats(&disks));
    let workers_before = workload::kernel_workers_ns();
    let mut watch = ProgressReporter::new(run, plan);
    let finished = runner.run(&mut |totals| watch.update(totals)).map_err(command_error)?;
    let elapsed_ms = begun.elapsed().as_millis() as u64;
    let used = before.into_iter().zip(disk_stats(&disks)).zip(&disks);
    let report = RunReport {
        globals: plan.globals.clone(),
        disks: used.map(|((then, now), disk)| (disk.name.clone(), now.since(then), elapsed_ms)).collect(),
        kernel_workers_ns: workload::kernel_workers_ns().saturating_sub(workers_before),
        jobs: reported(plan, run, &finished),
        at: SystemTime::now(),
    };
    if let Some(runtime) = bdev_runtime {
        runtime.reactors.reactors.stop();
    }
    describe_errors(plan, &finished);
    write(run, &report)?;
    check_results(&finished)
}

/// Reactors and bdevs for the jobs of `ioengine=bdev`.
struct BdevRuntime {
    reactors: ReactorRuntime,
    bdev_reactors: BdevReactors,
}

impl BdevRuntime {
    fn new(plan: &JobPlan, run: &RunOptions) -> Result<Option<BdevRuntime>, CommandError> {
        let bdev_jobs: Vec<&PerfJob> =
            plan.jobs.iter().filter(|job| job.engine == Some(EngineName::Bdev)).collect();
        if bdev_jobs.is_empty() {
            return Ok(None);
        }
        let count = bdev_jobs.iter().map(|job| job.numjobs as usize).sum();
        let mut cpus: Vec<u32> = bdev_jobs.iter().filter_map(|job| job.cpus.clone()).flatten().collect();
        cpus.sort_unstable();
        cpus.dedup();
        let list: Vec<String> = cpus.iter().map(u32::to_string).collect();
        let cores = (!list.is_empty()).then(|| list.join(","));
        let config = run.config.as_deref().map(|path| ConfigFile::read(path, &app::catalog())).transpose();
        let config = config.map_err(CommandError::config)?;
        // A vfio-user device, in another process, maps the I/O buffers.
        let is_served = |name: &String| name.starts_with("nvme+vfio-user");
        let shared = bdev_jobs.iter().any(|job| job.filenames.iter().any(is_served))
            || config.as_ref().is_some_and(app::needs_shared_memory);
        let reactors = ReactorRuntime::start_with(&run.reactor_options, cores.as_deref(), count, shared)?;
        let registry = reactors.registry();
        control::logging::init();
        let app = App::start(registry.clone(), reactors.reactors()?, StartOptions::default())
            .map_err(CommandError::environment)?;
        if let Some(config) = &config {
            config.apply(&app.control).map_err(|error| CommandError::config(error.message))?;
        }
        let handles = reactors.handles().to_vec();
        let cpus = cores.is_some().then_some(cpus);
        Ok(Some(BdevRuntime { reactors, bdev_reactors: BdevReactors { registry, reactors: handles, cpus } }))
    }
}

fn disk_stats(disks: &[Disk]) -> Vec<DiskStats> {
    disks.iter().map(|disk| disk.stats().unwrap_or_default()).collect()
}

/// One entry for each copy of a job, or with `group_reporting`, for each group.
fn reported(plan: &JobPlan, run: &RunOptions, finished: &[FinishedJob]) -> Vec<ReportedJob> {
    let mut entries: Vec<ReportedJob> = Vec::new();
    let mut costs: Vec<Option<Option<f64>>> = vec![None; plan.jobs.len()];
    for (index, copy) in finished.iter().enumerate() {
        let job = &plan.jobs[copy.job];
        let grouped = |entry: &&mut ReportedJob| entry.group == copy.group && entry.job.group_reporting;
        if job.group_reporting
            && let Some(entry) = entries.iter_mut().find(grouped)
        {
            let both = [entry.result.clone(), copy.result.clone()];
            entry.result = JobResult::merged(&both).unwrap_or_else(|| copy.result.clone());
            continue;
        }
        let cost = if run.generator_cost {
            *costs[copy.job].get_or_insert_with(|| workload::generator_cost_ns(job))
        } else {
            None
        };
        entries.push(ReportedJob {
            job: job.clone(),
            group: copy.group,
            index: (!job.group_reporting).then_some(index),
            result: copy.result.clone(),
            generator_cost_ns: cost,
        });
    }
    entries
}

fn command_error(error: RunError) -> CommandError {
    match error {
        RunError::Source(SourceError::Fabric { .. } | SourceError::Store(_)) => {
            CommandError::operation(error)
        }
        error if error.is_usage() => CommandError::usage(error),
        error => CommandError::environment(error),
    }
}

fn write(run: &RunOptions, report: &RunReport) -> Result<(), CommandError> {
    let mut text = String::new();
    for format in &run.formats {
        text.push_str(&match format {
            PerfOutputFormat::Normal => text::report(report),
            PerfOutputFormat::Terse => {
                workload::fio::terse(&workload::fio::document(report, false), run.terse_version)
            }
            PerfOutputFormat::Json | PerfOutputFormat::JsonPlus => {
                let document = workload::fio::document(report, *format == PerfOutputFormat::JsonPlus);
                serde_json::to_string_pretty(&document).map_err(CommandError::operation)? + "\n"
            }
        });
    }
    match &run.output {
        Some(path) => std::fs::write(path, text)
            .map_err(|error| CommandError::operation(format!("--output={}: {error}", path.display()))),
        None => {
            console::print(&text);
            Ok(())
        }
    }
}

/// Describes the failed I/Os of jobs that continue after errors, as `error_dump` asks.
fn describe_errors(plan: &JobPlan, finished: &[FinishedJob]) {
    for copy in finished {
        let (result, job) = (&copy.result, &plan.jobs[copy.job]);
        let (name, errors) = (&result.spec.name, &result.spec.errors);
        if errors.omits_details || errors.continues == [false, false] {
            continue;
        }
        let unit = u64::from(result.directions[0].block_bytes);
        for failure in result.failures.iter().filter(|failure| errors.continues(failure.op)) {
            stderr_line!(
                "ringbolt: {name}: {}: {} of {} bytes at offset {}: {}",
                job.file_name(result.number, failure.file),
                failure.op.name(),
                u64::from(failure.blocks) * unit,
                failure.lba * unit,
                failure.status
            );
        }
        let rest = result.errors.saturating_sub(result.failures.len() as u64);
        if rest > 0 {
            stderr_line!("ringbolt: {name}: {rest} further errors are not described");
        }
    }
}

/// The first error of all jobs, if there is one.
fn check_results(finished: &[FinishedJob]) -> Result<(), CommandError> {
    for result in finished.iter().map(|one| &one.result) {
        if let Some(error) = &result.log_error {
            return Err(CommandError::operation(format!("{}: writing logs: {error}", result.spec.name)));
        }
        if result.dropped_log_entries > 0 {
            stderr_line!(
                "ringbolt: warning: {}: {} log entries were dropped: the log is full",
                result.spec.name,
                result.dropped_log_entries
            );
        }
    }
    let bad = finished.iter().map(|one| &one.result).find(|result| !result.is_clean());
    let Some(result) = bad else { return Ok(()) };
    if let Some(mismatch) = result.mismatches.first() {
        return Err(CommandError::operation(format!(
            "verify: {} block(s) wrong; the first: {mismatch}",
            result.mismatch_count
        )));
    }
    if let Some(failure) = result.failures.first() {
        return Err(CommandError::operation(format!(
            "{} I/O(s) failed; the first: {failure}",
            result.errors
        )));
    }
    if let Some(limit) = &result.broken_limit {
        return Err(CommandError::operation(format!("{}: {limit}", result.spec.name)));
    }
    Err(CommandError::operation(format!("{} I/O(s) never completed", result.never_completed)))
}

/// Reactor options from `perf`'s own options.
fn machine_options(idle: Idle, memory: Option<String>, engine: EngineChoice) -> ReactorOptions {
    ReactorOptions { idle, memory, engine }
}
