//! The load generator's front: fio's options in, fio's results out.

mod options;
mod text;

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Instant, SystemTime};

use bdev::Registry;
use workload::devices::{self, Disk, DiskStats};
use workload::fio::{Reported, RunReport};
use workload::jobfile::{EngineName, Job, Lookup, Plan};
use workload::{Conductor, Finished, JobResult, RunError, Stage};

use crate::cli::{self, Perf};
use crate::config::Config;
use crate::failure::Failure;
use crate::machine::Machine;
use crate::say::complain;
use crate::state::App;

use options::{Format, Run, Watch};

/// The files and variables of this machine.
struct Here;

impl Lookup for Here {
    fn file(&self, path: &str) -> Result<String, String> {
        if path == "-" {
            return Err("job files are read by every process of theirs, so that - will not do".to_string());
        }
        std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))
    }

    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }
}

pub(crate) fn run(command: &Perf) -> Result<(), Failure> {
    // The process of a job is told so in its first word.
    let (seat, words) = match command.words.split_first() {
        Some((first, rest)) if first.starts_with("--worker=") => (first.strip_prefix("--worker="), rest),
        _ => (None, command.words.as_slice()),
    };
    let plan = workload::jobfile::plan(words, &Here).map_err(Failure::usage)?;
    if let Some(seat) = seat {
        // Ctrl-C goes to the parent, which ends its processes when it has heard of it.
        let ignored = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(signal_hook::consts::SIGINT, ignored).map_err(Failure::machine)?;
        return workload::worker(&plan, seat).map_err(failure);
    }
    let run = Run::new(&plan)?;
    if run.cmdhelp {
        return print(&options::help());
    }
    if plan.jobs.is_empty() {
        return Err(Failure::usage(
            "no job; for example `ringbolt perf --filename=null:1g --rw=randread --iodepth=128 --time_based --runtime=5s`",
        ));
    }
    if let Some(job) = plan.jobs.iter().find(|job| run.readonly && job.spec.workload.writes()) {
        return Err(Failure::usage(format!("--readonly: {} writes", job.spec.name)));
    }
    if run.showcmd {
        return print(&options::show(&plan));
    }
    if run.parse_only {
        return Ok(());
    }
    measure(&plan, &run)
}

fn measure(plan: &Plan, run: &Run) -> Result<(), Failure> {
    let stage = Stand::new(plan, run)?;
    let disks = devices::disks(&plan.jobs);
    for job in &plan.jobs {
        let Some(scheduler) = &job.scheduler else { continue };
        let own = devices::disks(std::slice::from_ref(job));
        if own.is_empty() {
            let name = &job.spec.name;
            return Err(Failure::usage(format!("--ioscheduler={scheduler}: {name} has no block device")));
        }
        own.iter().try_for_each(|disk| disk.set_scheduler(scheduler)).map_err(failure)?;
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).map_err(Failure::machine)?;
    }
    let own = std::env::current_exe().map_err(Failure::machine)?;
    let conductor = Conductor {
        plan,
        stage: stage.as_ref().map(|stand| &stand.stage),
        worker: vec![own.to_string_lossy().into_owned(), "perf".to_string()],
        stop,
    };
    let (begun, before) = (Instant::now(), counted(&disks));
    let workers_before = workload::kernel_workers_ns();
    let mut watch = Watch::new(run, plan);
    let finished = conductor.run(&mut |totals| watch.look(totals)).map_err(failure)?;
    let elapsed_ms = begun.elapsed().as_millis() as u64;
    let used = before.into_iter().zip(counted(&disks)).zip(&disks);
    let report = RunReport {
        globals: plan.globals.clone(),
        disks: used.map(|((then, now), disk)| (disk.name.clone(), now.since(then), elapsed_ms)).collect(),
        kernel_workers_ns: workload::kernel_workers_ns().saturating_sub(workers_before),
        jobs: reported(plan, run, &finished),
        at: SystemTime::now(),
    };
    if let Some(stand) = stage {
        stand.machine.reactors.stop();
    }
    write(run, &report)?;
    verdict(&finished)
}

/// Reactors, where a job needs them.
struct Stand {
    machine: Machine,
    stage: Stage,
}

impl Stand {
    fn new(plan: &Plan, run: &Run) -> Result<Option<Stand>, Failure> {
        let near: Vec<&Job> = plan.jobs.iter().filter(|job| job.engine == Some(EngineName::Bdev)).collect();
        if near.is_empty() {
            return Ok(None);
        }
        let count = near.iter().map(|job| job.numjobs as usize).sum();
        let mut cpus: Vec<u32> = near.iter().filter_map(|job| job.cpus.clone()).flatten().collect();
        cpus.sort_unstable();
        cpus.dedup();
        let list: Vec<String> = cpus.iter().map(u32::to_string).collect();
        let cores = (!list.is_empty()).then(|| list.join(","));
        // A device in another process reads and writes our memory.
        let shared =
            near.iter().any(|job| job.filenames.iter().any(|name| name.starts_with("nvme+vfio-user")));
        let machine = Machine::start_with(&run.machine, cores.as_deref(), count, shared)?;
        let registry = Registry::new();
        let app = App::new(registry.clone(), machine.reactors()?, None);
        if let Some(path) = &run.config {
            Config::read(path)?.apply(&app).map_err(|error| Failure::config(error.message))?;
        }
        let remotes = machine.remotes().to_vec();
        let cpus = cores.is_some().then_some(cpus);
        Ok(Some(Stand { machine, stage: Stage { registry, remotes, cpus } }))
    }
}

fn counted(disks: &[Disk]) -> Vec<DiskStats> {
    disks.iter().map(|disk| disk.stats().unwrap_or_default()).collect()
}

/// Every copy of a job, or one for each group of those that are grouped.
fn reported(plan: &Plan, run: &Run, finished: &[Finished]) -> Vec<Reported> {
    let mut entries: Vec<Reported> = Vec::new();
    let mut costs: Vec<Option<Option<f64>>> = vec![None; plan.jobs.len()];
    for (index, one) in finished.iter().enumerate() {
        let job = &plan.jobs[one.job];
        let grouped = |entry: &&mut Reported| entry.group == one.group && entry.job.group_reporting;
        if job.group_reporting
            && let Some(entry) = entries.iter_mut().find(grouped)
        {
            let both = [entry.result.clone(), one.result.clone()];
            entry.result = JobResult::merged(&both).unwrap_or_else(|| one.result.clone());
            continue;
        }
        let cost = if run.generator_cost {
            *costs[one.job].get_or_insert_with(|| workload::generator_cost_ns(job))
        } else {
            None
        };
        entries.push(Reported {
            job: job.clone(),
            group: one.group,
            index: (!job.group_reporting).then_some(index),
            result: one.result.clone(),
            generator_cost_ns: cost,
        });
    }
    entries
}

fn failure(error: RunError) -> Failure {
    if error.is_usage() { Failure::usage(error) } else { Failure::machine(error) }
}

fn write(run: &Run, report: &RunReport) -> Result<(), Failure> {
    let mut text = String::new();
    for format in &run.formats {
        text.push_str(&match format {
            Format::Normal => text::report(report),
            Format::Json | Format::JsonPlus => {
                let document = workload::fio::document(report, *format == Format::JsonPlus);
                serde_json::to_string_pretty(&document).map_err(Failure::work)? + "\n"
            }
        });
    }
    match &run.output {
        Some(path) => std::fs::write(path, text)
            .map_err(|error| Failure::work(format!("--output={}: {error}", path.display()))),
        None => print(&text),
    }
}

fn print(text: &str) -> Result<(), Failure> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::work(error)),
        _ => Ok(()),
    }
}

/// The first thing that went wrong, if any did.
fn verdict(finished: &[Finished]) -> Result<(), Failure> {
    for result in finished.iter().map(|one| &one.result) {
        if let Some(error) = &result.log_error {
            return Err(Failure::work(format!("{}: its logs: {error}", result.spec.name)));
        }
        if result.lost_entries > 0 {
            complain!(
                "ringbolt: {}: {} entries of logs were too many",
                result.spec.name,
                result.lost_entries
            );
        }
    }
    let bad = finished.iter().map(|one| &one.result).find(|result| !result.is_clean());
    let Some(result) = bad else { return Ok(()) };
    if let Some(mismatch) = result.mismatches.first() {
        return Err(Failure::work(format!(
            "verify: {} block(s) wrong; the first: {mismatch}",
            result.mismatch_count
        )));
    }
    if let Some(failure) = result.failures.first() {
        return Err(Failure::work(format!("{} I/O(s) failed; the first: {failure}", result.errors)));
    }
    if result.errors > 0 {
        return Err(Failure::work(format!("{}: an I/O took longer than --max_latency", result.spec.name)));
    }
    Err(Failure::work(format!("{} I/O(s) never came back", result.stuck)))
}

/// Of the reactors' options, as `cli` has them.
fn machine_options(idle: cli::Idle, memory: String, engine: cli::EngineChoice) -> cli::Machine {
    cli::Machine { idle, memory, engine }
}
