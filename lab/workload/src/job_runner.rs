//! Runs the jobs of a plan on threads, processes and reactors that start together, and collects their results.

use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

mod steady_watch;
mod worker_files;

use bdev::Registry;
use os::clock;
use reactor::ReactorHandle;

use crate::flow::Flows;
use crate::job_groups::{JobGroups, ends_with_io};
use crate::jobfile::{EngineName, JobPlan, JobPlanError, PerfJob};
use crate::kernel::{self, JobCopyContext, StartGate};
use crate::poller::Progress;
use crate::result::JobResult;
use crate::run::{self, RunError, RunningJob};
use crate::source::Source;
use crate::transfer;
use crate::zoned::ZonedDevices;
use steady_watch::SteadyWatch;

/// The reactors and bdevs on which jobs with `ioengine=bdev` run.
pub struct BdevReactors {
    /// The registry of bdevs.
    pub registry: Registry,
    /// The reactors.
    pub reactors: Vec<ReactorHandle>,
    /// The core of each reactor; `None` if reactors are not pinned.
    pub cpus: Option<Vec<u32>>,
}

/// Runs the jobs of a plan. Jobs between two `stonewall`s or `wait_for`s run at the same time: all copies are set up first and
/// report that they are ready, then all start I/O together.
pub struct JobRunner<'a> {
    /// The jobs.
    pub plan: &'a JobPlan,
    /// Needed only for jobs with `ioengine=bdev`.
    pub bdev_reactors: Option<&'a BdevReactors>,
    /// Program and arguments of a worker process, followed by `--worker=` with the job's index and numbers.
    /// Empty to run every copy as a thread.
    pub worker: Vec<String>,
    /// Set to stop all jobs early; their results are still returned.
    pub stop: Arc<AtomicBool>,
}

/// One copy of a job that has finished.
#[derive(Clone, Debug)]
pub struct FinishedJob {
    /// Index of the job in the plan.
    pub job: usize,
    /// Reporting group.
    pub group: u32,
    /// Its measurements.
    pub result: JobResult,
    /// Process in which it ran.
    pub pid: u32,
}

/// Counters of all running jobs so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgressTotals {
    /// Completed I/Os.
    pub ios: u64,
    /// Failed I/Os and verification mismatches.
    pub faults: u64,
    /// Running jobs.
    pub jobs: u32,
}

/// How often progress and stop requests are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How often a worker process reports its progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);
/// How long jobs may take to stop before their processes are killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);
/// Stack of the threads that read a worker process's output.
const READER_STACK_BYTES: usize = 128 << 10;

/// Messages from jobs to the [`JobRunner`].
enum JobMessage {
    Ready,
    Finished(Box<Result<(JobResult, u32), RunError>>),
}

/// One copy of a job on a kernel engine: a thread or a worker process.
struct JobCopy {
    job: usize,
    progress: Arc<Progress>,
    process: Option<(Child, Option<ChildStdin>)>,
    is_finished: bool,
}

impl JobRunner<'_> {
    /// Runs all jobs; calls `on_progress` about every 50 ms while jobs run. Results are in the order of the plan and of
    /// the numbers of copies.
    pub fn run(&self, on_progress: &mut dyn FnMut(ProgressTotals)) -> Result<Vec<FinishedJob>, RunError> {
        let jobs = &self.plan.jobs;
        let (mut finished, mut groups) = (Vec::new(), JobGroups::new(jobs));
        let changes_zones = |job: &PerfJob| job.spec.zoned.is_some() && job.spec.workload.writes();
        let zoned = Arc::new(ZonedDevices::new(jobs.iter().any(changes_zones)));
        let mut first = 0;
        let mut first_log = 1;
        while first < jobs.len() && !groups.rest_ends() && !self.stop.load(Ordering::Relaxed) {
            let more = jobs[first + 1..].iter().take_while(|job| !job.begins_phase()).count();
            let end = first + 1 + more;
            self.run_phase(first..end, first_log, &zoned, &mut groups, &mut finished, on_progress)?;
            first_log += jobs[first..end].iter().map(|job| job.numjobs).sum::<u32>();
            first = end;
        }
        finished.sort_by_key(|one| (one.job, one.result.number));
        Ok(finished)
    }

    /// Runs the jobs between two `stonewall`s concurrently.
    fn run_phase(
        &self,
        range: std::ops::Range<usize>,
        first_log: u32,
        zoned: &Arc<ZonedDevices>,
        groups: &mut JobGroups,
        finished: &mut Vec<FinishedJob>,
        on_progress: &mut dyn FnMut(ProgressTotals),
    ) -> Result<(), RunError> {
        groups.begin_phase();
        // Until all copies have ended: they do not lock the files themselves, since many of them can write one file.
        let mut locks = Vec::new();
        for index in range.clone().filter(|index| !groups.stops(*index)) {
            locks.extend(kernel::prepare_files(&self.plan.jobs[index])?);
        }
        let (sender, messages) = mpsc::channel();
        let gate = Arc::new(StartGate::default());
        let (mut copies, mut reactor_jobs) = (Vec::new(), Vec::new());
        let (mut log, flows) = (first_log, Flows::default());
        let outcome = range.clone().try_for_each(|index| {
            let job = &self.plan.jobs[index];
            match job.engine {
                _ if job.create_only || groups.stops(index) => {}
                Some(EngineName::Kernel(_) | EngineName::Work(_)) => {
                    for number in 0..job.numjobs {
                        let copy = copies.len();
                        let context = JobCopyContext {
                            number,
                            log_number: log + number,
                            progress: Arc::new(Progress::default()),
                            gate: gate.clone(),
                            flow: job.spec.flow.map(|options| Arc::new(flows.join(options))),
                            zoned: job.spec.zoned.is_some().then(|| zoned.clone()),
                        };
                        copies.push(self.start_copy(index, copy, context, &sender)?);
                    }
                }
                _ => reactor_jobs.push((index, self.start_on_reactors(job, log)?)),
            }
            log += job.numjobs;
            Ok(())
        });
        let outcome = outcome.and_then(|()| self.wait_until_ready(&messages, copies.len()));
        if let Err(error) = outcome {
            stop_before_start(&mut copies, &reactor_jobs, &gate);
            return Err(error);
        }
        // Start all together: the gate for threads, a line to each process, a flag for jobs on reactors.
        gate.open();
        for copy in &mut copies {
            if let Some((_, Some(input))) = &mut copy.process {
                // A process that has exited is reported by its reader thread.
                let _ = input.write_all(b"go\n");
            }
        }
        reactor_jobs.iter().for_each(|(_, running)| running.start_io());
        let mut steady = SteadyWatch::new(&self.plan.jobs, groups, &copies, &reactor_jobs);
        let first_finished = finished.len();
        let result = self.wait_for_jobs(
            &mut copies,
            &mut reactor_jobs,
            &messages,
            (groups, &mut steady),
            finished,
            on_progress,
        );
        for (_, running) in &reactor_jobs {
            running.stop();
        }
        for (index, running) in reactor_jobs {
            let pid = std::process::id();
            let of = |(_, result)| FinishedJob { job: index, group: groups.of(index), result, pid };
            finished.extend(running.into_numbered().into_iter().map(of));
        }
        steady.add_results(&mut finished[first_finished..]);
        for copy in &mut copies {
            if let Some((child, input)) = &mut copy.process {
                drop(input.take());
                let _ = child.wait();
            }
        }
        drop(locks);
        result
    }

    /// Waits until every copy is ready.
    fn wait_until_ready(
        &self,
        messages: &mpsc::Receiver<(usize, JobMessage)>,
        count: usize,
    ) -> Result<(), RunError> {
        for _ in 0..count {
            loop {
                match messages.recv_timeout(POLL_INTERVAL) {
                    Ok((_, JobMessage::Ready)) => break,
                    Ok((_, JobMessage::Finished(result))) => {
                        (*result)?;
                    }
                    Err(_) if self.stop.load(Ordering::Relaxed) => {
                        return Err(RunError::Options("stopped before I/O started".to_string()));
                    }
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => {
                        return Err(RunError::Options("the jobs ended before I/O started".to_string()));
                    }
                }
            }
        }
        Ok(())
    }

    fn start_on_reactors(&self, job: &PerfJob, first_log: u32) -> Result<RunningJob, RunError> {
        let bdev_reactors = self
            .bdev_reactors
            .ok_or_else(|| RunError::Options("ioengine=bdev needs reactors".to_string()))?;
        let sources: Vec<Source> =
            job.filenames.iter().map(|name| Source::parse(name)).collect::<Result<_, _>>()?;
        let mut reactors: Vec<ReactorHandle> = bdev_reactors.reactors.clone();
        if let (Some(wanted), Some(cpus)) = (&job.cpus, &bdev_reactors.cpus) {
            let pairs = cpus.iter().zip(&bdev_reactors.reactors).filter(|(cpu, _)| wanted.contains(cpu));
            reactors = pairs.map(|(_, remote)| remote.clone()).collect();
        } else if !reactors.is_empty() {
            // Different sections start at different reactors.
            let turn = (first_log as usize - 1) % reactors.len();
            reactors.rotate_left(turn);
        }
        let mut spec = job.spec.clone();
        if !job.repeatable {
            spec.seed ^= clock::now_ns();
        }
        run::prepare(&spec, job.numjobs, first_log, &sources, &bdev_reactors.registry, &reactors)
    }

    /// Starts a thread or a process for one copy of a job.
    fn start_copy(
        &self,
        index: usize,
        copy: usize,
        context: JobCopyContext,
        sender: &mpsc::Sender<(usize, JobMessage)>,
    ) -> Result<JobCopy, RunError> {
        let job = &self.plan.jobs[index];
        let machine =
            |error| RunError::Machine { what: format!("{}: cannot be started", job.spec.name), error };
        let JobCopyContext { number, log_number, .. } = context;
        let (progress, sender) = (context.progress.clone(), sender.clone());
        if job.thread || job.shares_state() || self.worker.is_empty() {
            let job = job.clone();
            let body = move || {
                let ready = || drop(sender.send((copy, JobMessage::Ready)));
                let result = kernel::run(&job, &context, ready);
                // Sending fails if the receiver is gone; then the result is not needed.
                let _ = sender.send((
                    copy,
                    JobMessage::Finished(Box::new(result.map(|result| (result, std::process::id())))),
                ));
            };
            std::thread::Builder::new().name(format!("job-{copy}")).spawn(body).map_err(machine)?;
            return Ok(JobCopy { job: index, progress, process: None, is_finished: false });
        }
        let (program, arguments) =
            self.worker.split_first().ok_or_else(|| machine(std::io::ErrorKind::NotFound.into()))?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .arg(format!("--worker={index}:{number}:{log_number}:{}", clock::scale()))
            .args(self.plan.words.iter())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // Closing its input asks it to stop; SIGKILL, also on the end of this thread, stops it at once. This thread
        // stays in `run` until all processes have ended.
        let mut child = os::kill_with_parent(&mut command).spawn().map_err(machine)?;
        let (mut input, output, pid) = (child.stdin.take(), child.stdout.take(), child.id());
        if let Some(input) = &mut input {
            // A process that has ended already is reported by the thread that reads its output.
            let _ = worker_files::send(&self.plan.files, input);
        }
        let (spec, published) = (job.spec.clone(), progress.clone());
        let body = move || {
            let mut result = None;
            for line in output.into_iter().flat_map(|output| BufReader::new(output).lines()) {
                let Ok(line) = line else { break };
                match line.split_once(' ') {
                    None if line == "ready" => drop(sender.send((copy, JobMessage::Ready))),
                    Some(("progress", counts)) => {
                        let mut counts = counts.split(' ').map(|count| count.parse().unwrap_or(0));
                        published.publish(counts.next().unwrap_or(0), counts.next().unwrap_or(0));
                    }
                    Some(("rate", pair)) => {
                        let mut pair = pair.split(' ').map(|rate| rate.parse().unwrap_or(0));
                        published.publish_rates(vec![(pair.next().unwrap_or(0), pair.next().unwrap_or(0))]);
                    }
                    Some(("usage", message)) => result = Some(Err((true, message.to_string()))),
                    Some(("machine", message)) => result = Some(Err((false, message.to_string()))),
                    Some(("result", text)) => result = transfer::decode(text, &spec).map(Ok),
                    _ => {}
                }
                if result.is_some() {
                    // It is the last line.
                    break;
                }
            }
            published.end();
            let lost = || {
                let how = how_it_ended(pid);
                Err((false, format!("process {pid} of {} ended without a result{how}", spec.name)))
            };
            let result = result.unwrap_or_else(lost);
            let result = result.map_err(|(usage, message)| RunError::Worker { usage, message });
            let _ = sender.send((copy, JobMessage::Finished(Box::new(result.map(|result| (result, pid))))));
        };
        let spawned = std::thread::Builder::new().stack_size(READER_STACK_BYTES).spawn(body);
        spawned.map_err(machine)?;
        let process = Some((child, input));
        Ok(JobCopy { job: index, progress, process, is_finished: false })
    }

    /// Collects messages until all jobs have finished.
    fn wait_for_jobs(
        &self,
        copies: &mut [JobCopy],
        reactor_jobs: &mut [(usize, RunningJob)],
        messages: &mpsc::Receiver<(usize, JobMessage)>,
        (groups, steady): (&mut JobGroups, &mut SteadyWatch),
        finished: &mut Vec<FinishedJob>,
        on_progress: &mut dyn FnMut(ProgressTotals),
    ) -> Result<(), RunError> {
        let jobs = &self.plan.jobs;
        let mut stop_requested: Option<Instant> = None;
        let mut outcome = Ok(());
        loop {
            let mut with_io = 0;
            let stop_all = outcome.is_err() || self.stop.load(Ordering::Relaxed);
            let mut running = 0;
            for (index, one) in reactor_jobs.iter_mut() {
                running += u32::from(!one.wait(Duration::ZERO));
                if one.any_finished() {
                    groups.finished(jobs, *index);
                }
            }
            let mut open = 0;
            for copy in copies.iter() {
                if copy.is_finished {
                    groups.finished(jobs, copy.job);
                } else {
                    open += 1;
                    with_io += u32::from(!ends_with_io(&jobs[copy.job]));
                }
            }
            steady.poll().for_each(|group| groups.end_steady(group));
            if running + open == 0 {
                return outcome;
            }
            let stops = |job: usize| {
                stop_all || groups.stops(job) || (running + with_io == 0 && ends_with_io(&jobs[job]))
            };
            for (_, one) in reactor_jobs.iter().filter(|(index, _)| stops(*index)) {
                one.stop();
            }
            for copy in copies.iter_mut().filter(|copy| !copy.is_finished && stops(copy.job)) {
                stop_requested.get_or_insert_with(Instant::now);
                copy.stop();
            }
            if stop_all {
                stop_requested.get_or_insert_with(Instant::now);
            }
            if copies.iter().all(|copy| copy.is_finished || !stops(copy.job)) && !stop_all {
                stop_requested = None;
            }
            if stop_requested.is_some_and(|since| since.elapsed() > STOP_TIMEOUT) {
                copies.iter_mut().for_each(JobCopy::kill);
                return outcome.and(Err(RunError::Options("jobs did not stop within 40 s".to_string())));
            }
            // With jobs on reactors only, this is the sleep between checks.
            match messages.recv_timeout(POLL_INTERVAL) {
                Ok((copy, JobMessage::Finished(result))) => {
                    copies[copy].is_finished = true;
                    let job = copies[copy].job;
                    match *result {
                        Ok((result, pid)) => {
                            finished.push(FinishedJob { job, group: groups.of(job), result, pid })
                        }
                        Err(error) => outcome = outcome.and(Err(error)),
                    }
                }
                Ok((_, JobMessage::Ready)) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => std::thread::sleep(POLL_INTERVAL),
            }
            let mut totals = ProgressTotals { jobs: running + open, ..ProgressTotals::default() };
            for (ios, faults) in reactor_jobs.iter().map(|(_, one)| one.totals()) {
                totals.ios += ios;
                totals.faults += faults;
            }
            for copy in copies.iter() {
                totals.ios += copy.progress.ios();
                totals.faults += copy.progress.faults();
            }
            on_progress(totals);
        }
    }
}

impl JobCopy {
    /// Asks the job to stop; closing its standard input stops a process.
    fn stop(&mut self) {
        self.progress.stop();
        if let Some((_, input)) = &mut self.process {
            drop(input.take());
        }
    }

    fn kill(&mut self) {
        if let Some((child, _)) = &mut self.process {
            let _ = child.kill();
        }
    }
}

/// How a process that has closed its output ended, in parentheses; empty if another thread has reaped it.
fn how_it_ended(pid: u32) -> String {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return String::new() };
    // The process stays to be reaped by `run`.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let Ok(Some(status)) = waitid(WaitId::Pid(pid), options) else { return String::new() };
    match (status.terminating_signal(), status.exit_status()) {
        (Some(signal), _) => format!(" (signal {signal})"),
        (None, Some(code)) => format!(" (exit status {code})"),
        (None, None) => String::new(),
    }
}

/// Stops all copies before they start I/O.
fn stop_before_start(copies: &mut [JobCopy], reactor_jobs: &[(usize, RunningJob)], gate: &StartGate) {
    reactor_jobs.iter().for_each(|(_, running)| running.stop());
    copies.iter_mut().for_each(JobCopy::stop);
    gate.open();
    for copy in copies.iter_mut() {
        if let Some((child, _)) = &mut copy.process {
            let _ = child.wait();
        }
    }
}

/// Runs one copy of one job in a worker process: receives the files of the plan on standard input, from which
/// `plan` makes the parent's plan again; starts the job when the parent sends `go` there, reports progress
/// and the result on standard output, and stops early when standard input is closed, as it is when the parent
/// exits. What goes wrong is reported to the parent.
pub fn worker(context: &str, plan: impl FnOnce(Vec<(String, String)>) -> Result<JobPlan, JobPlanError>) {
    print_line(&match run_worker(context, plan) {
        Ok(result) => format!("result {}", transfer::encode(&result)),
        Err(error) => {
            let kind = if error.is_usage() { "usage" } else { "machine" };
            format!("{kind} {}", error.to_string().replace('\n', " "))
        }
    });
}

fn run_worker(
    context: &str,
    plan: impl FnOnce(Vec<(String, String)>) -> Result<JobPlan, JobPlanError>,
) -> Result<JobResult, RunError> {
    let (context, scale) = context.rsplit_once(':').unwrap_or((context, ""));
    let mut numbers = context.split(':').map(|number| number.parse::<u32>().ok());
    let mut number = || numbers.next().flatten();
    let (Some(index), Some(number), Some(log_number), Ok(scale)) =
        (number(), number(), number(), scale.parse())
    else {
        return Err(RunError::Options(format!("--worker={context} is only for worker processes")));
    };
    // Calibrating the clock again would take longer than the rest of the process's start.
    clock::adopt_scale(scale);
    let files = worker_files::receive(&mut std::io::stdin().lock())
        .map_err(|error| RunError::Machine { what: "the job files of the run".to_string(), error })?;
    let plan = plan(files).map_err(|error| RunError::Options(error.to_string()))?;
    let job = plan.jobs.get(index as usize);
    let job = job.ok_or_else(|| RunError::Options(format!("--worker={context}: there is no such job")))?;
    let progress = Arc::new(Progress::default());
    let gate = Arc::new(StartGate::default());
    let (stopped_progress, start_gate, is_running) =
        (progress.clone(), gate.clone(), Arc::new(AtomicBool::new(true)));
    let read_commands = move || {
        let mut line = String::new();
        let start_io = std::io::stdin().lock().read_line(&mut line).is_ok() && line == "go\n";
        if start_io {
            start_gate.open();
            // The parent sends nothing else: end of file means that it has exited or stops the job.
            let _ = std::io::stdin().lock().read_line(&mut line);
        }
        stopped_progress.stop();
        start_gate.open();
    };
    std::thread::spawn(read_commands);
    let (reported, is_reporting) = (progress.clone(), is_running.clone());
    let reporter = std::thread::spawn(move || {
        while is_reporting.load(Ordering::Acquire) {
            std::thread::park_timeout(PROGRESS_INTERVAL);
            print_line(&format!("progress {} {}", reported.ios(), reported.faults()));
            for (iops, bandwidth) in reported.take_rates() {
                print_line(&format!("rate {iops} {bandwidth}"));
            }
        }
    });
    let context = JobCopyContext { number, log_number, progress, gate, flow: None, zoned: None };
    let result = kernel::run(job, &context, || print_line("ready"));
    is_running.store(false, Ordering::Release);
    reporter.thread().unpark();
    let _ = reporter.join();
    result
}

/// Writes a line to the parent; ignores errors, as the parent may have exited.
fn print_line(line: &str) {
    let _ = std::io::stdout().write_all(format!("{line}\n").as_bytes());
}

/// Processor time of all kernel workers of the host so far, in nanoseconds.
pub fn kernel_workers_ns() -> u64 {
    io_engines::usage::kernel_workers_ns()
}

/// I/Os of a measurement of the generator's cost.
const COST_IOS: u64 = 400_000;

/// Measures the cost of the generator itself: processor nanoseconds per I/O of the same job on the null engine, in a
/// closed loop and without verification.
pub fn generator_cost_ns(job: &PerfJob) -> Option<f64> {
    if matches!(job.engine, Some(EngineName::Work(_))) {
        return None;
    }
    let mut job = job.clone();
    job.spec.flow = None;
    let kind = io_engines::EngineKind::Null;
    let sizes = job.spec.size_bytes.unwrap_or(1 << 30).max(u64::from(job.spec.block_bytes) * 1024);
    job.engine = Some(EngineName::Kernel(kind));
    job.engine_config =
        io_engines::EngineConfig { kind, depth: job.spec.io_depth, ..io_engines::EngineConfig::default() };
    (job.spec.size_bytes, job.spec.size_percent) = (Some(sizes), None);
    (job.spec.offset_bytes, job.spec.offset_percent) = (0, 0);
    (job.spec.offset_increment, job.spec.offset_increment_percent) = (0, 0);
    job.spec.rates = Default::default();
    job.spec.think = Default::default();
    job.spec.latency_target = None;
    job.spec.steady = None;
    job.spec.command_priorities = Default::default();
    (job.spec.zoned, job.spec.in_zones) = (None, Default::default());
    (job.numa_cpu_nodes, job.memory_policy) = (None, None);
    job.spec.timeline_ns = 0;
    job.spec.rate_minima = Default::default();
    job.spec.fills_device = false;
    job.spec.latency_max_ns = None;
    job.spec.log = Default::default();
    job.spec.verify = crate::spec::Verify::Off;
    (job.spec.ramp_ns, job.spec.runtime_ns, job.spec.time_based) = (0, None, false);
    job.spec.number_ios = Some(COST_IOS);
    (job.spec.loops, job.spec.io_bytes, job.spec.io_percent) = (u32::MAX, None, None);
    (job.numjobs, job.delay_ns, job.nice, job.io_priority, job.cgroup) = (1, 0, 0, None, None);
    let gate = Arc::new(StartGate::default());
    gate.open();
    let progress = Arc::new(Progress::default());
    let context = JobCopyContext { number: 0, log_number: 0, progress, gate, flow: None, zoned: None };
    let measure = move || kernel::run(&job, &context, || ()).ok().map(|result| result.cpu_ns_per_io());
    // On a separate thread, because the job may set its CPU affinity.
    std::thread::spawn(measure).join().ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobfile::plan;
    use crate::jobfile::tests::{TestFiles, words};

    #[test]
    fn a_worker_that_cannot_run_ends_the_run_with_its_reason() {
        let line = words("--name=a --ioengine=null --size=1m --numjobs=2");
        let plan = plan(&line, &TestFiles::default()).unwrap();
        for (worker, reason) in [
            (["sh", "-c", "exit 3"], "ended without a result (exit status 3)"),
            (["sh", "-c", "kill -9 $$"], "ended without a result (signal 9)"),
            (["sh", "-c", "read files; exit 4"], "(exit status 4)"),
            (["sh", "-c", "echo usage no such thing; cat > /dev/null"], "no such thing"),
            (["/nonexistent/program", "", ""], "a: cannot be started: No such file"),
        ] {
            let runner = JobRunner {
                plan: &plan,
                bdev_reactors: None,
                worker: worker.map(String::from).to_vec(),
                stop: Arc::new(AtomicBool::new(false)),
            };
            let error = runner.run(&mut |_| ()).unwrap_err().to_string();
            assert!(error.contains(reason), "{worker:?}: {error}");
        }
    }
}
