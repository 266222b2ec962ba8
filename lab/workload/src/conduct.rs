//! Runs the jobs of a plan on threads, processes and reactors that start together, and collects their results.

use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bdev::Registry;
use os::clock;
use reactor::ReactorHandle;

use crate::jobfile::{EngineName, Job, Plan};
use crate::kernel::{self, Gate, Seat};
use crate::poller::Progress;
use crate::result::JobResult;
use crate::run::{self, RunError, Running};
use crate::source::Source;
use crate::transfer;

/// The reactors and bdevs on which jobs with `ioengine=bdev` run.
pub struct Stage {
    /// The registry of bdevs.
    pub registry: Registry,
    /// The reactors.
    pub remotes: Vec<ReactorHandle>,
    /// The core of each reactor; `None` if reactors are not pinned.
    pub cpus: Option<Vec<u32>>,
}

/// Runs the jobs of a plan. Jobs between two `stonewall`s run at the same time: all copies are set up first and
/// report that they are ready, then all start I/O together.
pub struct Conductor<'a> {
    /// The jobs.
    pub plan: &'a Plan,
    /// Needed only for jobs with `ioengine=bdev`.
    pub stage: Option<&'a Stage>,
    /// Program and arguments of a worker process, followed by `--worker=` with the job's index and numbers.
    /// Empty to run every copy as a thread.
    pub worker: Vec<String>,
    /// Set to stop all jobs early; their results are still returned.
    pub stop: Arc<AtomicBool>,
}

/// One copy of a job that has finished.
#[derive(Clone, Debug)]
pub struct Finished {
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
pub struct Totals {
    /// Completed I/Os.
    pub ios: u64,
    /// Failed I/Os and verification mismatches.
    pub faults: u64,
    /// Running jobs.
    pub jobs: u32,
}

/// How often progress and stop requests are checked.
const LOOK: Duration = Duration::from_millis(50);
/// How often a worker process reports its progress.
const TELL: Duration = Duration::from_millis(500);
/// How long jobs may take to stop before their processes are killed.
const END_MAX: Duration = Duration::from_secs(40);
/// Stack of the threads that read a worker process's output.
const STACK_BYTES: usize = 128 << 10;

/// Messages from jobs to the conductor.
enum Said {
    Ready,
    Over(Box<Result<(JobResult, u32), RunError>>),
}

/// One copy of a job on a kernel engine: a thread or a worker process.
struct Member {
    job: usize,
    progress: Arc<Progress>,
    process: Option<(Child, Option<ChildStdin>)>,
    is_over: bool,
}

impl Conductor<'_> {
    /// Runs all jobs; calls `watch` about every 50 ms while jobs run. Results are in the order of the plan and of
    /// the numbers of copies.
    pub fn run(&self, watch: &mut dyn FnMut(Totals)) -> Result<Vec<Finished>, RunError> {
        let jobs = &self.plan.jobs;
        let mut finished = Vec::new();
        let mut first = 0;
        let mut first_log = 1;
        while first < jobs.len() && !self.stop.load(Ordering::Relaxed) {
            let more = jobs[first + 1..].iter().take_while(|job| !job.stonewall).count();
            let end = first + 1 + more;
            self.phase(first..end, first_log, &mut finished, watch)?;
            first_log += jobs[first..end].iter().map(|job| job.numjobs).sum::<u32>();
            first = end;
        }
        finished.sort_by_key(|one| (one.job, one.result.number));
        Ok(finished)
    }

    /// Runs the jobs between two `stonewall`s concurrently.
    fn phase(
        &self,
        range: std::ops::Range<usize>,
        first_log: u32,
        finished: &mut Vec<Finished>,
        watch: &mut dyn FnMut(Totals),
    ) -> Result<(), RunError> {
        let groups = groups(&self.plan.jobs);
        for job in &self.plan.jobs[range.clone()] {
            kernel::prepare_files(job)?;
        }
        let (say, said) = mpsc::channel();
        let gate = Arc::new(Gate::default());
        let (mut members, mut near) = (Vec::new(), Vec::new());
        let mut log = first_log;
        let outcome = range.clone().try_for_each(|index| {
            let job = &self.plan.jobs[index];
            match job.engine {
                _ if job.create_only => {}
                Some(EngineName::Kernel(_)) => {
                    for number in 0..job.numjobs {
                        let member = members.len();
                        members.push(self.enlist(index, number, log + number, member, &gate, &say)?);
                    }
                }
                _ => near.push((index, self.place(job, log)?)),
            }
            log += job.numjobs;
            Ok(())
        });
        let outcome = outcome.and_then(|()| self.all_ready(&said, members.len()));
        if let Err(error) = outcome {
            dismiss(&mut members, &near, &gate);
            return Err(error);
        }
        // Start all together: the gate for threads, a line to each process, a flag for jobs on reactors.
        gate.open();
        for member in &mut members {
            if let Some((_, Some(input))) = &mut member.process {
                // A process that has exited is reported by its reader thread.
                let _ = input.write_all(b"go\n");
            }
        }
        near.iter().for_each(|(_, running)| running.go());
        let result = self.attend(&mut members, &mut near, &said, &groups, finished, watch);
        for (_, running) in &near {
            running.stop();
        }
        for (index, running) in near {
            let pid = std::process::id();
            let of = |(_, result)| Finished { job: index, group: groups[index], result, pid };
            finished.extend(running.into_numbered().into_iter().map(of));
        }
        for member in &mut members {
            if let Some((child, input)) = &mut member.process {
                drop(input.take());
                let _ = child.wait();
            }
        }
        result
    }

    /// Waits until every copy is ready.
    fn all_ready(&self, said: &mpsc::Receiver<(usize, Said)>, count: usize) -> Result<(), RunError> {
        for _ in 0..count {
            loop {
                match said.recv_timeout(LOOK) {
                    Ok((_, Said::Ready)) => break,
                    Ok((_, Said::Over(result))) => {
                        (*result)?;
                    }
                    Err(_) if self.stop.load(Ordering::Relaxed) => {
                        return Err(RunError::Options("ended before it began".to_string()));
                    }
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => {
                        return Err(RunError::Options("the jobs ended before they began".to_string()));
                    }
                }
            }
        }
        Ok(())
    }

    fn place(&self, job: &Job, first_log: u32) -> Result<Running, RunError> {
        let stage =
            self.stage.ok_or_else(|| RunError::Options("ioengine=bdev needs reactors".to_string()))?;
        let sources: Vec<Source> =
            job.filenames.iter().map(|name| Source::parse(name)).collect::<Result<_, _>>()?;
        let mut remotes: Vec<ReactorHandle> = stage.remotes.clone();
        if let (Some(wanted), Some(cpus)) = (&job.cpus, &stage.cpus) {
            let pairs = cpus.iter().zip(&stage.remotes).filter(|(cpu, _)| wanted.contains(cpu));
            remotes = pairs.map(|(_, remote)| remote.clone()).collect();
        } else if !remotes.is_empty() {
            // Different sections start at different reactors.
            let turn = (first_log as usize - 1) % remotes.len();
            remotes.rotate_left(turn);
        }
        let mut spec = job.spec.clone();
        if !job.repeatable {
            spec.seed ^= clock::now_ns();
        }
        run::place(&spec, job.numjobs, first_log, &sources, &stage.registry, &remotes)
    }

    /// Starts a thread or a process for one copy of a job.
    fn enlist(
        &self,
        index: usize,
        number: u32,
        log_number: u32,
        member: usize,
        gate: &Arc<Gate>,
        say: &mpsc::Sender<(usize, Said)>,
    ) -> Result<Member, RunError> {
        let job = &self.plan.jobs[index];
        let machine =
            |error| RunError::Machine { what: format!("{}: cannot be started", job.spec.name), error };
        let progress = Arc::new(Progress::default());
        let say = say.clone();
        if job.thread || self.worker.is_empty() {
            let seat = Seat { number, log_number, progress: progress.clone(), gate: gate.clone() };
            let job = job.clone();
            let body = move || {
                let ready = || drop(say.send((member, Said::Ready)));
                let result = kernel::run(&job, &seat, ready);
                // Sending fails if the receiver is gone; then the result is not needed.
                let _ = say
                    .send((member, Said::Over(Box::new(result.map(|result| (result, std::process::id()))))));
            };
            std::thread::Builder::new().name(format!("job-{member}")).spawn(body).map_err(machine)?;
            return Ok(Member { job: index, progress, process: None, is_over: false });
        }
        let (program, words) =
            self.worker.split_first().ok_or_else(|| machine(std::io::ErrorKind::NotFound.into()))?;
        let mut command = Command::new(program);
        command
            .args(words)
            .arg(format!("--worker={index}:{number}:{log_number}:{}", clock::scale()))
            .args(self.plan.words.iter())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // The end of its input asks it to end, which it does once it looks; a kill of ours ends it at once. This
        // thread is in `run` until all processes have ended.
        let mut child = os::kill_with_parent(&mut command).spawn().map_err(machine)?;
        let (input, output, pid) = (child.stdin.take(), child.stdout.take(), child.id());
        let (spec, heard) = (job.spec.clone(), progress.clone());
        let body = move || {
            let mut result = None;
            for line in output.into_iter().flat_map(|output| BufReader::new(output).lines()) {
                let Ok(line) = line else { break };
                match line.split_once(' ') {
                    None if line == "ready" => drop(say.send((member, Said::Ready))),
                    Some(("told", counts)) => {
                        let mut counts = counts.split(' ').map(|count| count.parse().unwrap_or(0));
                        heard.publish(counts.next().unwrap_or(0), counts.next().unwrap_or(0));
                    }
                    Some(("usage", message)) => result = Some(Err((true, message.to_string()))),
                    Some(("machine", message)) => result = Some(Err((false, message.to_string()))),
                    Some(("result", text)) => result = transfer::decode(text, &spec).map(Ok),
                    _ => {}
                }
            }
            let lost = || Err((false, format!("process {pid} of {} ended without a result", spec.name)));
            let result = result.unwrap_or_else(lost);
            let result = result.map_err(|(usage, message)| RunError::Worker { usage, message });
            let _ = say.send((member, Said::Over(Box::new(result.map(|result| (result, pid))))));
        };
        let spawned = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(body);
        spawned.map_err(machine)?;
        Ok(Member { job: index, progress, process: Some((child, input)), is_over: false })
    }

    /// Collects messages until all jobs have finished.
    fn attend(
        &self,
        members: &mut [Member],
        near: &mut [(usize, Running)],
        said: &mpsc::Receiver<(usize, Said)>,
        groups: &[u32],
        finished: &mut Vec<Finished>,
        watch: &mut dyn FnMut(Totals),
    ) -> Result<(), RunError> {
        let jobs = &self.plan.jobs;
        let mut ended: Option<Instant> = None;
        let mut outcome = Ok(());
        loop {
            let mut exit = outcome.is_err() || self.stop.load(Ordering::Relaxed);
            let mut running = 0;
            for (index, one) in near.iter_mut() {
                running += u32::from(!one.wait(Duration::ZERO));
                exit |= jobs[*index].exitall && one.any_over();
            }
            let open = members.iter().filter(|member| !member.is_over).count() as u32;
            exit |= members.iter().any(|member| member.is_over && jobs[member.job].exitall);
            if running + open == 0 {
                return outcome;
            }
            if exit && ended.is_none() {
                ended = Some(Instant::now());
                near.iter().for_each(|(_, one)| one.stop());
                members.iter_mut().for_each(Member::stop);
            }
            if ended.is_some_and(|since| since.elapsed() > END_MAX) {
                members.iter_mut().for_each(Member::kill);
                return outcome
                    .and(Err(RunError::Options("jobs did not end when they were told to".to_string())));
            }
            // With jobs on reactors only, this is the sleep between checks.
            match said.recv_timeout(LOOK) {
                Ok((member, Said::Over(result))) => {
                    members[member].is_over = true;
                    let job = members[member].job;
                    match *result {
                        Ok((result, pid)) => finished.push(Finished { job, group: groups[job], result, pid }),
                        Err(error) => outcome = outcome.and(Err(error)),
                    }
                }
                Ok((_, Said::Ready)) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => std::thread::sleep(LOOK),
            }
            let mut totals = Totals { jobs: running + open, ..Totals::default() };
            for (ios, faults) in near.iter().map(|(_, one)| one.totals()) {
                totals.ios += ios;
                totals.faults += faults;
            }
            for member in members.iter() {
                totals.ios += member.progress.ios();
                totals.faults += member.progress.faults();
            }
            watch(totals);
        }
    }
}

impl Member {
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

/// Stops all copies before they start I/O.
fn dismiss(members: &mut [Member], near: &[(usize, Running)], gate: &Gate) {
    near.iter().for_each(|(_, running)| running.stop());
    members.iter_mut().for_each(Member::stop);
    gate.open();
    for member in members.iter_mut() {
        if let Some((child, _)) = &mut member.process {
            let _ = child.wait();
        }
    }
}

/// The reporting group of each job: `stonewall` and `new_group` start a new one, as in fio.
fn groups(jobs: &[Job]) -> Vec<u32> {
    let mut group = 0;
    let mut groups = Vec::with_capacity(jobs.len());
    for (index, job) in jobs.iter().enumerate() {
        group += u32::from(index > 0 && (job.stonewall || job.new_group));
        groups.push(group);
    }
    groups
}

/// Runs one copy of one job of `plan` in a worker process: starts it when the parent sends `go` on standard input,
/// reports progress and the result on standard output, and stops early when standard input is closed, as it is
/// when the parent exits.
pub fn worker(plan: &Plan, seat: &str) -> Result<(), RunError> {
    let (seat, scale) = seat.rsplit_once(':').unwrap_or((seat, ""));
    let mut numbers = seat.split(':').map(|number| number.parse::<u32>().ok());
    let mut number = || numbers.next().flatten();
    let (Some(index), Some(number), Some(log_number), Ok(scale)) =
        (number(), number(), number(), scale.parse())
    else {
        return Err(RunError::Options(format!("--worker={seat} is not for people")));
    };
    // Calibrating the clock again would take longer than the rest of the process's start.
    clock::adopt_scale(scale);
    let job = plan.jobs.get(index as usize);
    let job = job.ok_or_else(|| RunError::Options(format!("--worker={seat}: there is no such job")))?;
    let progress = Arc::new(Progress::default());
    let gate = Arc::new(Gate::default());
    let (told, opened, telling) = (progress.clone(), gate.clone(), Arc::new(AtomicBool::new(true)));
    let listen = move || {
        let mut line = String::new();
        let go = std::io::stdin().lock().read_line(&mut line).is_ok() && line == "go\n";
        if go {
            opened.open();
            // The parent sends nothing else: end of file means that it has exited or stops the job.
            let _ = std::io::stdin().lock().read_line(&mut line);
        }
        told.stop();
        opened.open();
    };
    std::thread::spawn(listen);
    let (shown, tells) = (progress.clone(), telling.clone());
    let tell = std::thread::spawn(move || {
        while tells.load(Ordering::Acquire) {
            std::thread::park_timeout(TELL);
            print_line(&format!("told {} {}", shown.ios(), shown.faults()));
        }
    });
    let seat = Seat { number, log_number, progress, gate };
    let result = kernel::run(job, &seat, || print_line("ready"));
    telling.store(false, Ordering::Release);
    tell.thread().unpark();
    let _ = tell.join();
    print_line(&match result {
        Ok(result) => format!("result {}", transfer::encode(&result)),
        Err(error) => {
            let kind = if error.is_usage() { "usage" } else { "machine" };
            format!("{kind} {}", error.to_string().replace('\n', " "))
        }
    });
    Ok(())
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
pub fn generator_cost_ns(job: &Job) -> Option<f64> {
    let mut job = job.clone();
    let kind = io_engines::EngineKind::Null;
    let sizes = job.spec.size_bytes.unwrap_or(1 << 30).max(u64::from(job.spec.block_bytes) * 1024);
    job.engine = Some(EngineName::Kernel(kind));
    job.engine_config =
        io_engines::EngineConfig { kind, depth: job.spec.io_depth, ..io_engines::EngineConfig::default() };
    (job.spec.size_bytes, job.spec.size_percent) = (Some(sizes), None);
    (job.spec.offset_bytes, job.spec.offset_percent, job.spec.offset_increment) = (0, 0, 0);
    job.spec.rates = Default::default();
    job.spec.think = Default::default();
    job.spec.latency_target = None;
    job.spec.latency_max_ns = None;
    job.spec.log = Default::default();
    job.spec.verify = crate::spec::Verify::Off;
    (job.spec.ramp_ns, job.spec.runtime_ns, job.spec.time_based) = (0, None, false);
    job.spec.number_ios = Some(COST_IOS);
    (job.spec.loops, job.spec.io_bytes) = (u32::MAX, None);
    (job.numjobs, job.delay_ns, job.nice, job.io_priority, job.cgroup) = (1, 0, 0, None, None);
    let gate = Arc::new(Gate::default());
    gate.open();
    let seat = Seat { number: 0, log_number: 0, progress: Arc::new(Progress::default()), gate };
    let measure = move || kernel::run(&job, &seat, || ()).ok().map(|result| result.cpu_ns_per_io());
    // On a separate thread, because the job may set its CPU affinity.
    std::thread::spawn(measure).join().ok().flatten()
}
