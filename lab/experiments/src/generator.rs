//! The load generator process: `ringbolt perf` or fio.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::fio_histogram_log::HistogramLogs;
use crate::fio_output;
use crate::job_file::{self, CellJob};
use crate::processes::RunProcesses;

/// How long the generator may run beyond the expected time before it is terminated.
const TIMEOUT_SLACK: Duration = Duration::from_secs(30);
/// How long it may take after SIGTERM before SIGKILL.
const TERM_GRACE: Duration = Duration::from_secs(2);
/// How often its exit is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How often `Running` is reported: each sample of `/proc` costs CPU time.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(200);
/// Bytes of its standard error that are read, at its start and at its end: an error for each of many I/Os may be between.
const STDERR_PART_BYTES: usize = 2000;
/// Longest message of a failure, in characters: it is a cell of a table.
const FAILURE_CHARS_MAX: usize = 400;

/// A load generator and how it is invoked.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadGenerator {
    /// `ringbolt` or `fio`.
    pub name: String,
    /// Path of the program.
    pub program: PathBuf,
    /// Arguments before the job file: `perf` for ringbolt.
    pub arguments: Vec<String>,
    /// How the job is passed.
    pub input: GeneratorInput,
}

/// How a job is passed to a generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeneratorInput {
    /// As a job file.
    JobFile,
    /// As arguments: one group of jobs, on one device.
    Arguments,
}

/// How a generator process ended.
#[derive(Clone, Debug, PartialEq)]
pub enum GeneratorExit {
    /// Exit status 0; the results are written.
    Success,
    /// It failed, with its status and the errors on its standard error.
    Failure(String),
    /// The user stopped the run.
    Stopped,
}

impl LoadGenerator {
    /// fio, found in `PATH`.
    pub fn fio() -> LoadGenerator {
        LoadGenerator {
            name: "fio".into(),
            program: "fio".into(),
            arguments: Vec::new(),
            input: GeneratorInput::JobFile,
        }
    }

    /// `ringbolt perf` of the given program.
    pub fn ringbolt(program: PathBuf) -> LoadGenerator {
        LoadGenerator {
            name: "ringbolt".into(),
            program,
            arguments: vec!["perf".into()],
            input: GeneratorInput::JobFile,
        }
    }

    /// The logs from which a cell gets its timeline, if the generator's results have none. Their paths begin with `prefix`.
    pub(crate) fn histogram_logs(&self, prefix: PathBuf, runtime_s: f64) -> Option<HistogramLogs> {
        (self.name == "fio").then(|| HistogramLogs::new(prefix, slice_ms(runtime_s)))
    }

    /// Whether it can drive bdevs.
    pub fn has_bdev_engine(&self) -> bool {
        self.name != "fio"
    }

    /// Whether it accepts job files.
    pub fn accepts_job_files(&self) -> bool {
        self.input == GeneratorInput::JobFile
    }

    /// The command that runs a job without a job file.
    pub(crate) fn options_command(&self, job: &CellJob<'_>, output: &Path) -> Vec<String> {
        let mut arguments = vec![self.program.display().to_string()];
        arguments.extend(self.arguments.clone());
        arguments.extend(job.perf_options());
        arguments.push(timeline_option(job.runtime_s));
        arguments.push("--output-format=json".into());
        arguments.push(format!("--output={}", output.display()));
        arguments.push("--eta=never".into());
        arguments
    }

    /// The command that runs the job file of a cell: as [`command`](Self::command), with a timeline of the measurement
    /// where the generator has one.
    pub(crate) fn cell_command(&self, job_file: &Path, output: &Path, runtime_s: f64) -> Vec<String> {
        let mut arguments = self.command(job_file, output);
        if self.name != "fio" {
            arguments.push(timeline_option(runtime_s));
        }
        arguments
    }

    /// The command that runs a job file.
    pub fn command(&self, job_file: &Path, output: &Path) -> Vec<String> {
        let mut arguments = vec![self.program.display().to_string()];
        arguments.extend(self.arguments.clone());
        arguments.push(job_file.display().to_string());
        arguments.push("--output-format=json+".into());
        arguments.push(format!("--output={}", output.display()));
        if self.name != "fio" {
            arguments.push("--eta=never".into());
            // The cost is measured once, before the run, so that it does not count as CPU time of a cell.
            arguments.push("--generator_cost=0".into());
        }
        arguments
    }

    /// Runs a short job on an engine that performs no I/O. Returns the generator's version and its own CPU time per
    /// I/O, in nanoseconds.
    ///
    /// # Errors
    /// Why the generator does not work, in one line.
    pub fn probe(&self, folder: &Path) -> Result<(String, Option<f64>), String> {
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let (file, output) = (folder.join("probe.fio"), folder.join("probe.json"));
        // A thread and not a process: there is no watchdog yet, and the kernel kills only the process that was started.
        let text = "[fg]\nioengine=null\nfilename=probe\nsize=1g\nrw=randread\nbs=4096\niodepth=16\n\
                    norandommap=1\ntime_based=1\nruntime=300ms\nthread=1\n";
        fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
        let never = AtomicBool::new(false);
        let mut processes = RunProcesses::new();
        let ended = run(&mut processes, &self.command(&file, &output), 1.0, &never, &mut |_, _| {});
        let result = match ended {
            Ok(GeneratorExit::Success) => {
                let text =
                    fs::read_to_string(&output).map_err(|error| format!("{}: {error}", output.display()))?;
                let (version, groups) = fio_output::parse(&text, |_| 1)?;
                let cost_ns = |group: &fio_output::JobGroupResult| {
                    let metric =
                        |name: &str| group.record.metrics.get(name).copied().filter(|value| *value > 0.0);
                    Some(metric("cpu_cores")? / metric("iops")? * 1e9)
                };
                Ok((version, groups.first().and_then(cost_ns)))
            }
            Ok(GeneratorExit::Failure(message)) => Err(message),
            Ok(GeneratorExit::Stopped) => Err("stopped".to_string()),
            Err(error) => Err(format!("{}: {error}", self.program.display())),
        };
        let _ = fs::remove_file(&file);
        let _ = fs::remove_file(&output);
        result
    }
}

/// Slices of a cell's timeline: enough to see a change, few enough to store with every repetition.
const TIMELINE_SLICES: f64 = 24.0;

/// Length of a slice of a timeline, in milliseconds.
fn slice_ms(runtime_s: f64) -> u32 {
    (runtime_s * 1e3 / TIMELINE_SLICES).clamp(10.0, 3.6e6).round() as u32
}

fn timeline_option(runtime_s: f64) -> String {
    format!("--timeline={}", slice_ms(runtime_s))
}

/// The state of a generator process, as [`run`] reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeneratorEvent {
    /// The process was started and has this pid.
    Started(u32),
    /// The process is still running.
    Running,
    /// The process has ended; its pid is not reused yet.
    Exited,
}

/// Runs a command until it ends, as one of the run's processes: in a process group of its own, with a tag by which
/// all its descendants can be killed. `on_event` is called when it starts, a few times a second, and when it ends,
/// with the seconds since the start.
///
/// # Errors
/// A program that does not exist, or a process whose identity cannot be recorded.
pub fn run(
    processes: &mut RunProcesses,
    arguments: &[String],
    seconds: f64,
    stop: &AtomicBool,
    on_event: &mut dyn FnMut(GeneratorEvent, f64),
) -> io::Result<GeneratorExit> {
    let Some((program, arguments)) = arguments.split_first() else {
        return Err(io::Error::other("an empty command"));
    };
    let mut stderr = stderr_file()?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr.0.try_clone()?);
    let mut child = processes.spawn(&mut command)?;
    let began = Instant::now();
    on_event(GeneratorEvent::Started(child.id()), 0.0);
    let limit = Duration::from_secs_f64(seconds.clamp(0.0, 1e6)) + TIMEOUT_SLACK;
    let mut sampled = began;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if stop.load(Ordering::Relaxed) {
            child.terminate(TERM_GRACE);
            return Ok(GeneratorExit::Stopped);
        }
        if began.elapsed() > limit {
            child.terminate(TERM_GRACE);
            return Ok(GeneratorExit::Failure(format!(
                "it did not end within {:.0} s and was killed",
                limit.as_secs_f64()
            )));
        }
        if sampled.elapsed() >= SAMPLE_INTERVAL {
            on_event(GeneratorEvent::Running, began.elapsed().as_secs_f64());
            sampled = Instant::now();
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    on_event(GeneratorEvent::Exited, began.elapsed().as_secs_f64());
    if status.success() {
        return Ok(GeneratorExit::Success);
    }
    // The group's leader may have been killed alone: its descendants must end too.
    child.terminate(TERM_GRACE);
    Ok(GeneratorExit::Failure(format!("{status}: {}", failure_message(&stderr.read()?))))
}

/// What failed, in one line. fio describes it first, before its consequences, and `ringbolt perf` last, after the
/// failed I/Os; warnings and hints precede or follow both.
fn failure_message(text: &str) -> String {
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let is_error = |line: &&str| !line.contains("warning: ") && !line.starts_with("note: ");
    let errors = || lines().filter(is_error);
    let message = match (errors().next(), errors().next_back()) {
        (Some(first), Some(last)) if first != last => format!("{first}; {last}"),
        (Some(first), _) => first.to_string(),
        (None, _) => lines().next_back().unwrap_or("no error message").to_string(),
    };
    message.chars().take(FAILURE_CHARS_MAX).collect()
}

/// An unnamed file that receives the generator's standard error.
struct StderrFile(File);

fn stderr_file() -> io::Result<StderrFile> {
    let number = rustix::fs::memfd_create("complaints", rustix::fs::MemfdFlags::CLOEXEC)?;
    Ok(StderrFile(File::from(number)))
}

impl StderrFile {
    /// Its start and its end, with a line break between them if something was left out.
    fn read(&mut self) -> io::Result<String> {
        use std::os::unix::fs::FileExt;
        let read_at = |at: u64| -> io::Result<String> {
            let mut bytes = vec![0; STDERR_PART_BYTES];
            let length = self.0.read_at(&mut bytes, at)?;
            Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
        };
        let (length, part) = (self.0.metadata()?.len(), STDERR_PART_BYTES as u64);
        let mut text = read_at(0)?;
        if length > 2 * part {
            text.push('\n');
        }
        if length > part {
            text.push_str(&read_at(part.max(length - part))?);
        }
        Ok(text)
    }
}

/// Whether cells of this API run on bdevs, not on a kernel API.
pub fn is_bdev_api(api: &str) -> bool {
    job_file::engine(api).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_error_and_not_a_warning() {
        let warning =
            "ringbolt: warning: command line: gtod_reduce=1 has no effect: latencies are measured\n";
        let cases = [
            ("", "no error message"),
            (
                &format!("{warning}ringbolt: /nonexistent/x: no such file\n"),
                "ringbolt: /nonexistent/x: no such file",
            ),
            (&format!("{warning}\n"), warning.trim()),
            // fio 3.33, a file that does not exist.
            (
                "a: you need to specify size=\nfio: pid=0, err=22/file:filesetup.c:1155, func=total_file_size\n",
                "a: you need to specify size=; fio: pid=0, err=22/file:filesetup.c:1155, func=total_file_size",
            ),
            (
                "note: both iodepth >= 1 and synchronous I/O engine are selected\nfio: unrecognized option '--a'\n",
                "fio: unrecognized option '--a'",
            ),
            (
                "thread 'main' panicked at a.rs:1:\nmade up\nnote: run with `RUST_BACKTRACE=1`\n",
                "thread 'main' panicked at a.rs:1:; made up",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(failure_message(text), expected);
        }
        assert_eq!(failure_message(&"x".repeat(1_000_000)).len(), FAILURE_CHARS_MAX);
    }

    #[test]
    fn the_last_error_of_very_many_is_reported() {
        let stop = AtomicBool::new(false);
        let script = "i=0; while [ $i -lt 2000 ]; do echo failed I/O $i >&2; i=$((i+1)); done; echo 2000 I/Os failed >&2; exit 3";
        let command = ["sh", "-c", script].map(String::from);
        let exit = run(&mut RunProcesses::new(), &command, 5.0, &stop, &mut |_, _| {}).unwrap();
        assert_eq!(
            exit,
            GeneratorExit::Failure("exit status: 3: failed I/O 0; 2000 I/Os failed".to_string())
        );
        // Between one and two parts nothing is read twice and nothing is left out.
        for length in [1999, 2000, 2001, 3999, 4000, 4001] {
            use std::io::Write;
            let mut file = stderr_file().unwrap();
            file.0.write_all("x".repeat(length).as_bytes()).unwrap();
            assert_eq!(file.read().unwrap().replace('\n', "").len(), length.min(4000), "{length}");
        }
    }
}
