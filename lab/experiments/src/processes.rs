//! The processes that a run starts, and how every one of them ends with the run.
//!
//! A generator forks, and its processes may leave its process group: each job of fio is a session of its
//! own. So a run does not count on one mechanism:
//!
//! * Each process is started with a tag in its environment ([`VARIABLE`]), which whatever it forks
//!   inherits. The tag is in the journal before the first process exists.
//! * The kernel kills the process that was started, when the run's thread ends.
//! * A watchdog, a process of its own, reads a pipe that only the run holds open. At its end, it kills
//!   whatever carries the tag.
//! * If the watchdog was killed too, the next lab command does the same with the tag of the journal.
//!
//! A process is signalled through a pidfd, and only if what identifies it is still so after the pidfd was
//! opened. A process number that is used again is therefore never signalled.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// The environment variable that carries the tag.
pub const VARIABLE: &str = "RINGBOLT_LAB_RUN";
/// How long killed processes may take to end. The kernel waits for I/O that it cannot abort.
const KILLED_MAX: Duration = Duration::from_secs(10);
/// How often a child is polled.
const POLL: Duration = Duration::from_millis(10);
/// Scans of `/proc` in a row that must find nothing: one scan can miss a process whose parent forks and
/// ends while the scan passes.
const EMPTY_SCANS: u32 = 2;
/// Most bytes of an environment that are searched. The kernel limits environments to 6 MiB.
const ENVIRONMENT_MAX: usize = 6 << 20;

/// A process that was started, by what is not used twice between two starts of the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) pid: u32,
    /// When it started, in clock ticks since the machine's start: `starttime` of `/proc/PID/stat`.
    pub(crate) started: String,
    /// Its program, for messages.
    pub(crate) program: String,
}

/// Starts processes under one tag, and ends them.
#[derive(Debug)]
pub struct Processes {
    tag: String,
    started: u64,
    /// Where the identities of those that live are written.
    record: Option<PathBuf>,
    live: Vec<Identity>,
    watchdog: Option<(Child, ChildStdin)>,
}

/// A process that was started with a tag of its own.
#[derive(Debug)]
pub struct Process {
    child: Child,
    tag: String,
}

/// What became of the processes that were to be killed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Killed {
    /// Those that ended, as `fio (process 12)`.
    pub(crate) ended: BTreeSet<String>,
    /// Those that did not end in time.
    pub(crate) remaining: BTreeSet<String>,
}

impl Default for Processes {
    fn default() -> Processes {
        Processes::new()
    }
}

impl Processes {
    /// Processes whose identities are recorded nowhere, for what does no I/O.
    pub fn new() -> Processes {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let pid = std::process::id();
        let tag =
            format!("{pid}-{}-{}", start_time(pid).unwrap_or_default(), NEXT.fetch_add(1, Ordering::Relaxed));
        Processes { tag, started: 0, record: None, live: Vec::new(), watchdog: None }
    }

    /// From now on, the identities of those that live are in this file.
    pub(crate) fn record_in(&mut self, path: PathBuf) {
        self.record = Some(path);
    }

    /// What the environment of all of them carries, before a full stop and a number.
    pub(crate) fn tag(&self) -> &str {
        &self.tag
    }

    /// Starts the watchdog: a command that calls [`watchdog`] with its standard input.
    ///
    /// # Errors
    /// What the system reports of the command.
    pub fn guard(&mut self, command: &mut Command) -> io::Result<()> {
        // A group of its own: a signal that the terminal sends to the run must not end it.
        let mut child = command
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let mut input = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        input.write_all(format!("{}\n", self.tag).as_bytes())?;
        self.watchdog = Some((child, input));
        Ok(())
    }

    /// Starts a command in a process group of its own, and records its identity.
    ///
    /// It is killed when the calling thread ends, so that is to be one that lives as long as the run.
    ///
    /// # Errors
    /// What the system reports of the command or of the record; nothing runs then.
    pub fn spawn(&mut self, command: &mut Command) -> io::Result<Process> {
        self.started += 1;
        let tag = format!("{}.{}", self.tag, self.started);
        command.env(VARIABLE, &tag).process_group(0);
        let child = os::kill_with_parent(command).spawn()?;
        let program = command.get_program().to_string_lossy().into_owned();
        let mut process = Process { child, tag };
        let pid = process.id();
        self.live.retain(Identity::is_alive);
        // One that has ended already needs no record.
        if let Some(started) = start_time(pid) {
            self.live.push(Identity { pid, started, program });
        }
        if let Err(error) = self.write_record() {
            process.end(Duration::ZERO);
            return Err(error);
        }
        Ok(process)
    }

    fn write_record(&self) -> io::Result<()> {
        let Some(path) = &self.record else { return Ok(()) };
        os::replace_file(path, 0o600, &serde_json::to_vec(&self.live)?)
    }

    /// Ends whatever is left of them, and the watchdog. Returns those that do not end.
    pub(crate) fn end_all(&mut self) -> Vec<String> {
        let killed = if self.started > 0 { kill_tagged(&self.tag) } else { Killed::default() };
        self.started = 0;
        if let Some((mut child, input)) = self.watchdog.take() {
            drop(input);
            let _ = child.wait();
        }
        if let Some(path) = self.record.take_if(|_| killed.remaining.is_empty()) {
            let _ = fs::remove_file(path);
        }
        killed.remaining.into_iter().collect()
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.end_all();
    }
}

impl Process {
    /// Its number, which is also that of its process group.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its status, where it has ended.
    ///
    /// # Errors
    /// What the system reports.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Ends it and whatever it started: SIGTERM to its process group, and after `grace` at the latest SIGKILL
    /// to whatever carries its tag.
    pub fn end(&mut self, grace: Duration) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
            && matches!(self.child.try_wait(), Ok(None))
        {
            let _ = rustix::process::kill_process_group(group, Signal::TERM);
            let asked = Instant::now();
            while asked.elapsed() < grace && matches!(self.child.try_wait(), Ok(None)) {
                std::thread::sleep(POLL);
            }
        }
        kill_tagged(&self.tag);
        // A command that cleared its environment is killed by its number, which is its own until it is waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Identity {
    /// Whether this very process lives.
    pub(crate) fn is_alive(&self) -> bool {
        start_time(self.pid).as_ref() == Some(&self.started)
    }
}

/// The watchdog's part: reads a tag, waits for the end of the input, and kills whatever carries the tag.
pub fn watchdog(input: impl io::Read) {
    let mut input = io::BufReader::new(input);
    let mut tag = String::new();
    if input.read_line(&mut tag).is_err() || !tag.ends_with('\n') {
        return;
    }
    // Nothing more is written; what ends this is the end of the last process that could write.
    let _ = io::copy(&mut input, &mut io::sink());
    kill_tagged(tag.trim_end());
}

/// When a process that lives started, in the kernel's clock ticks. A zombie does not live.
pub(crate) fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    // A process that was killed stays as a zombie until its parent waits for it, which not every parent does.
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18).map(String::from)
}

/// Kills every process whose environment carries the tag, until there is none.
pub(crate) fn kill_tagged(tag: &str) -> Killed {
    kill_until_none(|| {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let own = std::process::id();
        let found = pids.filter(|pid| *pid != own).filter_map(|pid| open_if(pid, || carries(pid, tag)));
        found.collect()
    })
}

/// Kills these processes where they live.
pub(crate) fn kill_identified(identities: &[Identity]) -> Killed {
    kill_until_none(|| identities.iter().filter_map(|one| open_if(one.pid, || one.is_alive())).collect())
}

/// A process that is to be killed.
struct Victim {
    name: String,
    fd: OwnedFd,
}

/// A pidfd of a process, where `is_meant` holds before and after it was opened.
fn open_if(pid: u32, is_meant: impl Fn() -> bool) -> Option<Victim> {
    if !is_meant() {
        return None;
    }
    let fd = pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty()).ok()?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    is_meant().then(|| Victim { name: format!("{} (process {pid})", name.trim_end()), fd })
}

fn kill_until_none(scan: impl Fn() -> Vec<Victim>) -> Killed {
    let deadline = Instant::now() + KILLED_MAX;
    let mut killed = Killed::default();
    let mut empty = 0;
    while empty < EMPTY_SCANS {
        let found = scan();
        empty = if found.is_empty() { empty + 1 } else { 0 };
        // All first: one that is waited for must not leave time to the others.
        for victim in &found {
            let _ = pidfd_send_signal(&victim.fd, Signal::KILL);
        }
        for victim in found {
            if wait_until(&victim.fd, deadline) {
                killed.ended.insert(victim.name);
            } else {
                killed.remaining.insert(victim.name);
            }
        }
        if !killed.remaining.is_empty() {
            break;
        }
    }
    killed
}

/// Whether the process ends before the deadline.
fn wait_until(process: &OwnedFd, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut polled = [PollFd::new(process, PollFlags::IN)];
        match poll(&mut polled, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            other => return other.is_ok_and(|ready| ready > 0),
        }
    }
}

/// Whether a process's environment carries the tag, or one that was derived from it.
fn carries(pid: u32, tag: &str) -> bool {
    use io::Read;
    let mut bytes = Vec::new();
    let file = fs::File::open(format!("/proc/{pid}/environ"));
    // What cannot be read belongs to somebody else, or is gone.
    if file.and_then(|file| file.take(ENVIRONMENT_MAX as u64).read_to_end(&mut bytes)).is_err() {
        return false;
    }
    let value = bytes
        .split(|byte| *byte == 0)
        .find_map(|variable| variable.strip_prefix(VARIABLE.as_bytes())?.strip_prefix(b"="));
    let rest = value.and_then(|value| value.strip_prefix(tag.as_bytes()));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"."))
}

#[cfg(test)]
mod tests;
