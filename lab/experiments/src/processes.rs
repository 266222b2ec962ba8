//! Starts the processes of a run, and makes sure that all of them end with it.
//!
//! A generator forks, and its processes may leave its process group: each job of fio starts a session. Therefore a
//! run uses several mechanisms:
//!
//! * Each process is started with a tag in its environment ([`TAG_VARIABLE`]), which its descendants inherit. The
//!   tag is in the journal before the first process exists.
//! * The kernel kills the started process when the run's thread ends (PR_SET_PDEATHSIG).
//! * A watchdog process reads a pipe whose only writer is the run. At end of file it kills all processes with the
//!   tag.
//! * If the watchdog was killed too, the next lab command kills them, with the tag from the journal.
//!
//! A process is signalled through a pidfd, and only if it is still identified after the pidfd was opened. A reused
//! pid is therefore never signalled.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufRead, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// The environment variable that contains the tag.
pub const TAG_VARIABLE: &str = "RINGBOLT_LAB_RUN";
/// How long killed processes may take to end: the kernel waits for I/O that it cannot abort.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a child's exit is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Consecutive scans of `/proc` that must find nothing: a single scan misses a process whose parent forks and exits
/// during the scan.
const EMPTY_SCANS_REQUIRED: u32 = 2;
/// Most bytes of an environment that are searched. The kernel limits environments to 6 MiB.
const ENVIRONMENT_BYTES_MAX: usize = 6 << 20;

/// Identifies a process until the next boot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ProcessIdentity {
    pub(crate) pid: u32,
    /// Start time in clock ticks since boot: `starttime` of `/proc/PID/stat`.
    pub(crate) started: String,
    /// Program, for messages.
    pub(crate) program: String,
}

/// Starts the processes of a run under one tag. [`RunProcesses::start_watchdog`] comes before the first
/// [`RunProcesses::spawn`]; dropping it kills all that are left.
#[derive(Debug)]
pub struct RunProcesses {
    tag: String,
    started: u64,
    /// The file that contains the identities of live processes.
    record_file: Option<PathBuf>,
    alive: Vec<ProcessIdentity>,
    /// Files that the run has locked, and its processes too.
    shared_locks: Vec<File>,
    watchdog: Option<(Child, ChildStdin)>,
}

/// A started process. It and its descendants have a tag that is derived from the run's.
#[derive(Debug)]
pub struct RunProcess {
    child: Child,
    tag: String,
}

/// Results of killing processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KillReport {
    /// Ended, for example `fio (process 12)`.
    pub(crate) ended: BTreeSet<String>,
    /// Still alive at the deadline.
    pub(crate) remaining: BTreeSet<String>,
}

impl Default for RunProcesses {
    fn default() -> RunProcesses {
        RunProcesses::new()
    }
}

impl RunProcesses {
    /// Creates a set whose identities are not recorded in a file, for processes that do no I/O.
    pub fn new() -> RunProcesses {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let pid = std::process::id();
        let tag =
            format!("{pid}-{}-{}", start_time(pid).unwrap_or_default(), NEXT.fetch_add(1, Ordering::Relaxed));
        RunProcesses {
            tag,
            started: 0,
            record_file: None,
            alive: Vec::new(),
            shared_locks: Vec::new(),
            watchdog: None,
        }
    }

    /// Keeps the identities of live processes in this file from now on.
    pub(crate) fn set_record_file(&mut self, path: PathBuf) {
        self.record_file = Some(path);
    }

    /// The processes that are started from now on share the locks of these files with the run.
    pub fn share_locks(&mut self, files: Vec<File>) {
        self.shared_locks = files;
    }

    /// The tag of all processes; each has it with a full stop and a number appended.
    pub(crate) fn tag(&self) -> &str {
        &self.tag
    }

    /// Starts the watchdog: a command that calls [`watchdog`] with its standard input.
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn start_watchdog(&mut self, command: &mut Command) -> io::Result<()> {
        // In a process group of its own: a signal from the terminal must not end it.
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
    /// The process is killed when the calling thread ends, so that thread must live as long as the run.
    ///
    /// # Errors
    /// The command cannot be started, or its identity cannot be recorded; then nothing runs.
    pub fn spawn(&mut self, command: &mut Command) -> io::Result<RunProcess> {
        self.started += 1;
        let tag = format!("{}.{}", self.tag, self.started);
        command.env(TAG_VARIABLE, &tag).process_group(0);
        // Duplicates that a program keeps when it is executed.
        let shared = self.shared_locks.iter().map(rustix::io::dup).collect::<Result<Vec<OwnedFd>, _>>()?;
        if !shared.is_empty() {
            let numbers: Vec<String> = shared.iter().map(|file| file.as_raw_fd().to_string()).collect();
            command.env(file_lock::SHARED_LOCKS_VARIABLE, numbers.join(","));
        }
        let child = os::kill_with_parent(command).spawn()?;
        let program = command.get_program().to_string_lossy().into_owned();
        let mut process = RunProcess { child, tag };
        let pid = process.id();
        self.alive.retain(ProcessIdentity::is_alive);
        // A process that has already ended needs no record.
        if let Some(started) = start_time(pid) {
            self.alive.push(ProcessIdentity { pid, started, program });
        }
        if let Err(error) = self.write_record() {
            process.terminate(Duration::ZERO);
            return Err(error);
        }
        Ok(process)
    }

    fn write_record(&self) -> io::Result<()> {
        let Some(path) = &self.record_file else { return Ok(()) };
        os::replace_file(path, 0o600, &serde_json::to_vec(&self.alive)?)
    }

    /// Kills all processes and ends the watchdog. Returns the processes that do not end.
    pub(crate) fn kill_all(&mut self) -> Vec<String> {
        let killed = if self.started > 0 { kill_tagged(&self.tag) } else { KillReport::default() };
        self.started = 0;
        if let Some((mut child, input)) = self.watchdog.take() {
            drop(input);
            let _ = child.wait();
        }
        if let Some(path) = self.record_file.take_if(|_| killed.remaining.is_empty()) {
            let _ = fs::remove_file(path);
        }
        killed.remaining.into_iter().collect()
    }
}

impl Drop for RunProcesses {
    fn drop(&mut self) {
        self.kill_all();
    }
}

impl RunProcess {
    /// The pid, which is also the process group.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, if the process has ended.
    ///
    /// # Errors
    /// An error of `waitpid`.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Ends the process and its descendants: SIGTERM to its process group, and after at most `grace` SIGKILL to all
    /// processes with its tag.
    pub fn terminate(&mut self, grace: Duration) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
            && matches!(self.child.try_wait(), Ok(None))
        {
            let _ = rustix::process::kill_process_group(group, Signal::TERM);
            let requested = Instant::now();
            while requested.elapsed() < grace && matches!(self.child.try_wait(), Ok(None)) {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        kill_tagged(&self.tag);
        // A command that cleared its environment has no tag; its pid is valid until it is waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl ProcessIdentity {
    /// Whether the process is alive.
    pub(crate) fn is_alive(&self) -> bool {
        start_time(self.pid).as_ref() == Some(&self.started)
    }
}

/// Runs the watchdog: reads a tag from `input`, waits for end of file, and kills all processes with the tag.
pub fn watchdog(input: impl io::Read) {
    let mut input = io::BufReader::new(input);
    let mut tag = String::new();
    if input.read_line(&mut tag).is_err() || !tag.ends_with('\n') {
        return;
    }
    // Nothing more is written: this returns when the last writer has exited.
    let _ = io::copy(&mut input, &mut io::sink());
    kill_tagged(tag.trim_end());
}

/// The start time of a live process, in clock ticks since boot; `None` for a zombie.
pub(crate) fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    // A killed process stays a zombie until its parent waits for it, which not every parent does.
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18).map(String::from)
}

/// Kills all processes whose environment contains the tag, until none is found.
pub(crate) fn kill_tagged(tag: &str) -> KillReport {
    kill_all_found(|| {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let own = std::process::id();
        let found = pids.filter(|pid| *pid != own).filter_map(|pid| open_pidfd_if(pid, || has_tag(pid, tag)));
        found.collect()
    })
}

/// Kills these processes if they are alive.
pub(crate) fn kill_identified(identities: &[ProcessIdentity]) -> KillReport {
    kill_all_found(|| identities.iter().filter_map(|one| open_pidfd_if(one.pid, || one.is_alive())).collect())
}

/// A process to be killed.
struct KillTarget {
    name: String,
    fd: OwnedFd,
}

/// Opens a pidfd if `is_target` holds before and after.
fn open_pidfd_if(pid: u32, is_target: impl Fn() -> bool) -> Option<KillTarget> {
    if !is_target() {
        return None;
    }
    let fd = pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty()).ok()?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    is_target().then(|| KillTarget { name: format!("{} (process {pid})", name.trim_end()), fd })
}

fn kill_all_found(scan: impl Fn() -> Vec<KillTarget>) -> KillReport {
    let deadline = Instant::now() + KILL_TIMEOUT;
    let mut killed = KillReport::default();
    let mut empty = 0;
    while empty < EMPTY_SCANS_REQUIRED {
        let found = scan();
        empty = if found.is_empty() { empty + 1 } else { 0 };
        // Signal all before waiting for any, so that none has time to fork.
        for target in &found {
            let _ = pidfd_send_signal(&target.fd, Signal::KILL);
        }
        for target in found {
            if wait_until(&target.fd, deadline) {
                killed.ended.insert(target.name);
            } else {
                killed.remaining.insert(target.name);
            }
        }
        if !killed.remaining.is_empty() {
            break;
        }
    }
    killed
}

/// Waits for the process to end; false at the deadline.
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
fn has_tag(pid: u32, tag: &str) -> bool {
    use io::Read;
    let mut bytes = Vec::new();
    let file = fs::File::open(format!("/proc/{pid}/environ"));
    // Unreadable: another user's process, or one that has ended.
    if file.and_then(|file| file.take(ENVIRONMENT_BYTES_MAX as u64).read_to_end(&mut bytes)).is_err() {
        return false;
    }
    let value = bytes
        .split(|byte| *byte == 0)
        .find_map(|variable| variable.strip_prefix(TAG_VARIABLE.as_bytes())?.strip_prefix(b"="));
    let rest = value.and_then(|value| value.strip_prefix(tag.as_bytes()));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"."))
}

#[cfg(test)]
mod tests;
