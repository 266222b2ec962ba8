//! Jobs without I/O: `cpuio` keeps cores busy, `exec` runs a program beside other jobs.

use std::process::{Command, Stdio};
use std::time::Duration;

use os::clock;

use crate::jobfile::PerfJob;
use crate::kernel::JobCopyContext;
use crate::result::JobResult;
use crate::run::RunError;
use crate::usage::Usage;

/// What a job without I/O does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkKind {
    /// `cpuio`: uses a share of a core.
    Cpu,
    /// `exec`: runs a program.
    Program,
}

/// Options of jobs without I/O.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkOptions {
    /// `cpuload`: percentage of a core, 1 to 100; 0 if not given.
    pub cpu_percent: u8,
    /// `cpuchunks`: length of a busy period.
    pub chunk_ns: u64,
    /// `cpumode=qsort`: sort numbers instead of counting.
    pub sorts: bool,
    /// `exit_on_io_done`: stop when all jobs with I/O have finished.
    pub ends_with_io: bool,
    /// `program`.
    pub program: String,
    /// `arguments`, with `%r` for the runtime in seconds and `%n` for the job's name.
    pub arguments: String,
    /// `grace_time`: from SIGTERM to SIGKILL.
    pub grace_ns: u64,
    /// `std_redirect`: output goes to `NAME.stdout` and `NAME.stderr`.
    pub redirects: bool,
}

impl Default for WorkOptions {
    fn default() -> Self {
        WorkOptions {
            cpu_percent: 0,
            chunk_ns: 50_000_000,
            sorts: false,
            ends_with_io: false,
            program: String::new(),
            arguments: String::new(),
            grace_ns: 1_000_000_000,
            redirects: true,
        }
    }
}

/// How often a job checks whether it must stop.
const STOP_CHECK: Duration = Duration::from_millis(20);
/// Numbers that `cpumode=qsort` sorts at a time.
const SORTED: usize = 8192;

impl WorkOptions {
    /// Whether the options suffice for a kind of work.
    pub(crate) fn check(&self, kind: WorkKind, runtime_ns: Option<u64>) -> Result<(), String> {
        match kind {
            WorkKind::Cpu if self.cpu_percent == 0 => {
                Err("ioengine=cpuio needs --cpuload, 1 to 100 percent of a core".to_string())
            }
            WorkKind::Cpu if runtime_ns.is_none() && !self.ends_with_io => {
                Err("ioengine=cpuio needs --runtime or --exit_on_io_done".to_string())
            }
            WorkKind::Program if self.program.is_empty() => Err("ioengine=exec needs --program".to_string()),
            _ => Ok(()),
        }
    }
}

/// Does the work of one copy of a job: calls `ready`, waits at the gate, and works until the runtime has passed or the job
/// is stopped.
pub(crate) fn run(
    job: &PerfJob,
    kind: WorkKind,
    context: &JobCopyContext,
    ready: impl FnOnce(),
) -> Result<JobResult, RunError> {
    ready();
    context.gate.pass();
    if job.delay_ns > 0 {
        crate::kernel::delay(job.delay_ns, &context.progress);
    }
    let (before, started_ns) = (Usage::now(), clock::now_ns());
    let end_ns = job.spec.runtime_ns.map_or(u64::MAX, |runtime| started_ns.saturating_add(runtime));
    match kind {
        WorkKind::Cpu => use_core(&job.work, end_ns, context),
        WorkKind::Program => run_program(job, end_ns, context)?,
    }
    let mut result = JobResult::without_io(job.spec.clone(), Usage::now().since(before), context.number);
    for direction in &mut result.directions {
        direction.elapsed_ns = clock::now_ns().saturating_sub(started_ns);
    }
    Ok(result)
}

/// Is busy for a chunk, then sleeps so that the busy share is that of the options.
fn use_core(work: &WorkOptions, end_ns: u64, context: &JobCopyContext) {
    let percent = u64::from(work.cpu_percent.clamp(1, 100));
    let pause_ns = work.chunk_ns.saturating_mul(100 - percent) / percent;
    let mut numbers: Vec<u64> = Vec::new();
    let mut random = crate::WyRand::new(context.number.into());
    while !context.progress.is_stopped() && clock::now_ns() < end_ns {
        let busy_until = clock::now_ns().saturating_add(work.chunk_ns).min(end_ns);
        while clock::now_ns() < busy_until && !context.progress.is_stopped() {
            if work.sorts {
                numbers.clear();
                numbers.extend((0..SORTED).map(|_| random.next_bits()));
                numbers.sort_unstable();
                std::hint::black_box(&numbers);
            } else {
                std::hint::spin_loop();
            }
        }
        crate::kernel::delay(pause_ns.min(end_ns.saturating_sub(clock::now_ns())), &context.progress);
    }
}

/// Runs the program until it ends, or ends it with SIGTERM and, after the grace time, SIGKILL.
fn run_program(job: &PerfJob, end_ns: u64, context: &JobCopyContext) -> Result<(), RunError> {
    let work = &job.work;
    let machine = |error| RunError::Machine { what: format!("{}: {}", job.spec.name, work.program), error };
    let runtime_s = job.spec.runtime_ns.unwrap_or(0) / 1_000_000_000;
    let replaced = |word: &str| word.replace("%r", &runtime_s.to_string()).replace("%n", &job.spec.name);
    let mut command = Command::new(&work.program);
    command.args(work.arguments.split_whitespace().map(replaced)).stdin(Stdio::null());
    if work.redirects {
        let file = |kind: &str| std::fs::File::create(format!("{}.{kind}", job.spec.name)).map_err(machine);
        command.stdout(file("stdout")?).stderr(file("stderr")?);
    } else {
        // Standard output is the result's.
        command.stdout(Stdio::null());
    }
    let mut child = os::kill_with_parent(&mut command).spawn().map_err(machine)?;
    let mut kill_at_ns = None;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(machine)? {
            break status;
        }
        let now_ns = clock::now_ns();
        match kill_at_ns {
            None if now_ns >= end_ns || context.progress.is_stopped() => {
                kill_at_ns = Some(now_ns.saturating_add(work.grace_ns));
                if let Some(process) = rustix::process::Pid::from_raw(child.id() as i32) {
                    // A program that has just ended is found by the next check.
                    let _ = rustix::process::kill_process(process, rustix::process::Signal::TERM);
                }
            }
            Some(kill_at_ns) if now_ns >= kill_at_ns => child.kill().map_err(machine)?,
            _ => {}
        }
        std::thread::sleep(STOP_CHECK);
    };
    if kill_at_ns.is_none() && !status.success() {
        return Err(machine(std::io::Error::other(status.to_string())));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::StartGate;
    use crate::poller::Progress;
    use std::sync::Arc;

    fn context() -> JobCopyContext {
        let gate = Arc::new(StartGate::default());
        gate.open();
        JobCopyContext {
            number: 0,
            log_number: 1,
            progress: Arc::new(Progress::default()),
            gate,
            flow: None,
            zoned: None,
        }
    }

    fn job(work: WorkOptions, runtime_ms: u64) -> PerfJob {
        let mut job = PerfJob::default();
        job.work = work;
        job.spec.runtime_ns = Some(runtime_ms * 1_000_000);
        job
    }

    #[test]
    fn a_core_is_busy_for_its_share() {
        let work = WorkOptions { cpu_percent: 25, chunk_ns: 10_000_000, ..WorkOptions::default() };
        for sorts in [false, true] {
            let result =
                run(&job(WorkOptions { sorts, ..work.clone() }, 400), WorkKind::Cpu, &context(), || ());
            let cpu_ms = result.unwrap().usage.cpu_ns / 1_000_000;
            // A busy machine gives less; no machine gives more than the busy periods.
            assert!((1..=140).contains(&cpu_ms), "{cpu_ms} ms of 400 with sorts={sorts}");
        }
    }

    #[test]
    fn a_program_ends_with_the_runtime_and_its_failure_is_an_error() {
        let program = |program: &str, arguments: &str| WorkOptions {
            program: program.to_string(),
            arguments: arguments.to_string(),
            redirects: false,
            ..WorkOptions::default()
        };
        let ran = |work, runtime_ms| run(&job(work, runtime_ms), WorkKind::Program, &context(), || ());
        let begun = std::time::Instant::now();
        ran(program("sleep", "100"), 50).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(50));
        ran(program("test", "%n = perf"), 60_000).unwrap();
        let error = ran(program("false", ""), 60_000).unwrap_err().to_string();
        assert!(error.contains("false"), "{error}");
        assert!(ran(program("/nonexistent", ""), 1000).is_err());
    }
}
