//! The program that makes the load: `ringbolt perf`, or fio.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::job::{self, Job};
use crate::outcome;
use crate::processes::Processes;

/// How long the generator may take beyond what it was told, before it is ended.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long it may take to end when it is asked to, before it is killed.
const GRACE: Duration = Duration::from_secs(2);
/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(20);
/// How often the processes are looked at for their time: each look costs some itself.
const SAMPLE: Duration = Duration::from_millis(200);
/// Most bytes of its complaints that are kept.
const COMPLAINT_MAX: usize = 2000;

/// A generator.
#[derive(Clone, Debug, PartialEq)]
pub struct Generator {
    /// `ringbolt` or `fio`.
    pub name: String,
    /// The program.
    pub program: PathBuf,
    /// What comes before the job file, as `perf`.
    pub first: Vec<String>,
    /// How it is told what to do.
    pub style: Style,
}

/// How a generator is told what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// By a job file.
    JobFile,
    /// By options: one group of jobs, on one device.
    Options,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Ended {
    /// It wrote its results.
    Well,
    /// It failed, with what it said.
    Badly(String),
    /// It was told to end: somebody pressed Ctrl-C.
    Stopped,
}

impl Generator {
    /// fio, from the path.
    pub fn fio() -> Generator {
        Generator { name: "fio".into(), program: "fio".into(), first: Vec::new(), style: Style::JobFile }
    }

    /// Our own, which is the program `ringbolt`.
    pub fn ringbolt(program: PathBuf) -> Generator {
        Generator { name: "ringbolt".into(), program, first: vec!["perf".into()], style: Style::JobFile }
    }

    /// Whether it knows our block layer.
    pub fn has_own_engine(&self) -> bool {
        self.name != "fio"
    }

    /// Whether it takes job files.
    pub fn takes_job_files(&self) -> bool {
        self.style == Style::JobFile
    }

    /// The command that does what a job says without a job file.
    pub(crate) fn command_of(&self, job: &Job<'_>, output: &Path) -> Vec<String> {
        let mut words = vec![self.program.display().to_string()];
        words.extend(self.first.clone());
        words.extend(job.options_of_perf());
        words.push("--output-format=json".into());
        words.push(format!("--output={}", output.display()));
        words.push("--eta=never".into());
        words
    }

    /// The command for a job file.
    pub fn command(&self, job_file: &Path, output: &Path) -> Vec<String> {
        let mut words = vec![self.program.display().to_string()];
        words.extend(self.first.clone());
        words.push(job_file.display().to_string());
        words.push("--output-format=json+".into());
        words.push(format!("--output={}", output.display()));
        if self.name != "fio" {
            words.push("--eta=never".into());
            // It is measured once, before the run: after each cell it would be taken for the cell's.
            words.push("--generator_cost=0".into());
        }
        words
    }

    /// Runs a tiny job against an engine that does nothing: whether it works at all, its version, and
    /// the processor time that an I/O costs the generator itself, in nanoseconds.
    ///
    /// # Errors
    /// Why it does not work, in one line.
    pub fn probe(&self, folder: &Path) -> Result<(String, Option<f64>), String> {
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let (file, output) = (folder.join("probe.fio"), folder.join("probe.json"));
        let text = "[fg]\nioengine=null\nfilename=probe\nsize=1g\nrw=randread\nbs=4096\niodepth=16\n\
                    norandommap=1\ntime_based=1\nruntime=300ms\n";
        fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
        let never = AtomicBool::new(false);
        let mut processes = Processes::new();
        let ended = run(&mut processes, &self.command(&file, &output), 1.0, &never, &mut |_, _| {});
        let result = match ended {
            Ok(Ended::Well) => {
                let text =
                    fs::read_to_string(&output).map_err(|error| format!("{}: {error}", output.display()))?;
                let (version, groups) = outcome::parse(&text, |_| 1)?;
                let of = |group: &outcome::Group| {
                    let metric =
                        |name: &str| group.record.metrics.get(name).copied().filter(|value| *value > 0.0);
                    Some(metric("cpu_cores")? / metric("iops")? * 1e9)
                };
                Ok((version, groups.first().and_then(of)))
            }
            Ok(Ended::Badly(said)) => Err(said),
            Ok(Ended::Stopped) => Err("stopped".to_string()),
            Err(error) => Err(format!("{}: {error}", self.program.display())),
        };
        let _ = fs::remove_file(&file);
        let _ = fs::remove_file(&output);
        result
    }
}

/// What a look is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The process is there, with this number.
    Began(u32),
    /// It runs.
    Runs,
    /// It ended, and its numbers are not used again yet.
    Ended,
}

/// Runs a command to its end, as one of the processes of a run: Ctrl-C reaches the run first, and all that
/// the command started can be ended. `look` is called at its beginning, now and then, and just before its
/// end is taken note of, with the seconds since it began.
///
/// # Errors
/// A program that is not there, or whose identity cannot be recorded.
pub fn run(
    processes: &mut Processes,
    words: &[String],
    seconds: f64,
    stop: &AtomicBool,
    look: &mut dyn FnMut(Moment, f64),
) -> io::Result<Ended> {
    let Some((program, arguments)) = words.split_first() else {
        return Err(io::Error::other("an empty command"));
    };
    let mut complaints = tempfile()?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(complaints.0.try_clone()?);
    let mut child = processes.spawn(&mut command)?;
    let began = Instant::now();
    look(Moment::Began(child.id()), 0.0);
    let limit = Duration::from_secs_f64(seconds.clamp(0.0, 1e6)) + PATIENCE;
    let mut sampled = began;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if stop.load(Ordering::Relaxed) {
            child.end(GRACE);
            return Ok(Ended::Stopped);
        }
        if began.elapsed() > limit {
            child.end(GRACE);
            return Ok(Ended::Badly(format!(
                "it did not end within {:.0} s and was killed",
                limit.as_secs_f64()
            )));
        }
        if sampled.elapsed() >= SAMPLE {
            look(Moment::Runs, began.elapsed().as_secs_f64());
            sampled = Instant::now();
        }
        std::thread::sleep(LOOK);
    };
    look(Moment::Ended, began.elapsed().as_secs_f64());
    if status.success() {
        return Ok(Ended::Well);
    }
    // Its leader may have been killed alone.
    child.end(GRACE);
    let said = complaints.read()?;
    let line = said.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("it said nothing");
    Ok(Ended::Badly(format!("{status}: {line}")))
}

/// A file without a name, for what the generator complains of.
struct Complaints(File);

fn tempfile() -> io::Result<Complaints> {
    let number = rustix::fs::memfd_create("complaints", rustix::fs::MemfdFlags::CLOEXEC)?;
    Ok(Complaints(File::from(number)))
}

impl Complaints {
    fn read(&mut self) -> io::Result<String> {
        use std::os::unix::fs::FileExt;
        let mut bytes = vec![0; COMPLAINT_MAX];
        let length = self.0.read_at(&mut bytes, 0)?;
        Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
    }
}

/// The command that drives block devices of our own.
pub fn is_own(api: &str) -> bool {
    job::engine(api).is_none()
}
