//! The nodes of a cluster, as processes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use cluster_map::MapError;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::SIGCHLD;

use super::arguments::NodeReactors;
use super::layout::ClusterLayout;
use crate::command_error::CommandError;
use crate::console::stdout_line;

/// Memory of a node for I/O, in MiB, and for each of its cores after the first.
const NODE_MEMORY_MIB: usize = 128;
const CORE_MEMORY_MIB: usize = 32;
/// A node that ends sooner than this after its start has failed, and its next start is delayed.
const SHORTEST_RUN: Duration = Duration::from_secs(2);
/// The delay after the first failure, and the longest one; each is twice the one before. A device that is
/// back is found after half a minute at most, and logs get few lines meanwhile.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// How long `store up` waits for nodes that neither serve nor end, as those of devices that hang, before it
/// supervises the others.
const START_MAX: Duration = Duration::from_secs(60);
/// How long nodes may take to end: then they are killed, as one that is stopped (SIGSTOP). That loses
/// nothing.
const STOP_MAX: Duration = Duration::from_secs(10);
/// Most bytes of a log that are read for its last line.
const LAST_BYTES: u64 = 4096;
/// How often a map that cannot be used is tried while nodes wait for it.
const MAP_RETRY: Duration = Duration::from_millis(100);

/// A node's process. Its standard input is a pipe: when that closes, because this process ended somehow, it
/// ends.
struct RunningNode {
    process: Child,
    started: Instant,
    /// Gets `()` when the node serves, and is closed when it has ended.
    serves: Receiver<()>,
    has_served: Arc<AtomicBool>,
    /// Where its part of the log begins.
    log_start: u64,
}

/// A node on this machine.
#[derive(Default)]
struct SupervisedNode {
    running: Option<RunningNode>,
    /// Starts that failed since it served for a while.
    failures: u32,
    /// When it is started again, if it failed.
    retry_at: Option<Instant>,
    /// An operator stopped it, and it has ended.
    is_stopped: bool,
}

impl SupervisedNode {
    /// Counts a failure, and returns the delay of the next start. This process gets SIGCHLD then.
    fn delay_start(&mut self) -> Duration {
        let delay = RETRY_MIN.saturating_mul(1 << self.failures.min(8)).min(RETRY_MAX);
        self.failures += 1;
        self.retry_at = Some(Instant::now() + delay);
        std::thread::spawn(move || {
            std::thread::sleep(delay);
            let _ = signal_hook::low_level::raise(SIGCHLD);
        });
        delay
    }
}

/// The nodes of a cluster on this machine. They fail alone: one whose device is lost is started again and
/// again, with delays, and the others serve. They end when this is dropped.
pub(super) struct RunningNodes {
    layout: ClusterLayout,
    reactors: NodeReactors,
    nodes: BTreeMap<u32, SupervisedNode>,
    /// Nodes that ended, and cannot start while the map cannot be used.
    waiting: BTreeSet<u32>,
    /// A thread waits for the map.
    is_waiting: Arc<AtomicBool>,
}

impl RunningNodes {
    /// Starts every node, all at a time, and returns when each serves, has failed, or takes longer than
    /// [`START_MAX`].
    ///
    /// # Errors
    /// If none serves; if one of a new cluster has failed.
    pub(super) fn start(
        layout: &ClusterLayout,
        reactors: &NodeReactors,
        is_new: bool,
    ) -> Result<RunningNodes, CommandError> {
        reactors.check(layout.nodes.len())?;
        for node in &layout.nodes {
            if UnixStream::connect(layout.socket(*node)).is_ok() {
                let reason = format!("node {node} of {} runs already", layout.directory.display());
                return Err(CommandError::operation(reason));
            }
        }
        let mut nodes = RunningNodes {
            layout: layout.clone(),
            reactors: reactors.clone(),
            nodes: BTreeMap::new(),
            waiting: BTreeSet::new(),
            is_waiting: Arc::default(),
        };
        let mut first_error = None;
        for node in layout.nodes.clone() {
            if layout.is_stopped(node) {
                stdout_line!(
                    "node {node} was stopped by an operator; `ringbolt store start-node {node}` starts it"
                );
                nodes.nodes.insert(node, SupervisedNode { is_stopped: true, ..SupervisedNode::default() });
                continue;
            }
            let spawned = nodes.spawn(node, None);
            let supervised = nodes.nodes.entry(node).or_default();
            match spawned {
                Ok(running) => supervised.running = Some(running),
                Err(error) => {
                    supervised.delay_start();
                    first_error.get_or_insert(error);
                }
            }
        }
        let (end, mut served) = (Instant::now() + START_MAX, 0);
        for (node, supervised) in &nodes.nodes {
            let Some(running) = &supervised.running else { continue };
            match running.serves.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(()) => served += 1,
                Err(RecvTimeoutError::Timeout) => {
                    served += 1;
                    stdout_line!(
                        "node {node} does not serve yet; its log is {}",
                        layout.log(*node).display()
                    );
                }
                Err(RecvTimeoutError::Disconnected) => {
                    first_error.get_or_insert_with(|| does_not_start(layout, *node, running.log_start));
                }
            }
        }
        match first_error {
            Some(error) if is_new || served == 0 => Err(error),
            Some(error) => {
                stdout_line!("{error}; it is started again, and the others serve");
                Ok(nodes)
            }
            None => Ok(nodes),
        }
    }

    /// Starts nodes that were added.
    pub(super) fn start_added(&mut self) {
        if let Err(error) = self.layout.find_nodes() {
            stdout_line!("{}: {error}", self.layout.directory.display());
            return;
        }
        for node in self.layout.nodes.clone() {
            if !self.nodes.contains_key(&node) {
                self.start_or_delay(node, Some(format!("node {node} was added, and serves")));
            }
        }
    }

    /// Starts a node, and returns when it serves.
    pub(super) fn start_node(&mut self, node: u32) -> Result<(), CommandError> {
        let running = self.spawn(node, None)?;
        let (serves, log_start) = (running.serves.recv(), running.log_start);
        self.nodes.entry(node).or_default().running = Some(running);
        serves.map_err(|_| does_not_start(&self.layout, node, log_start))
    }

    fn spawn(&self, node: u32, announcement: Option<String>) -> Result<RunningNode, CommandError> {
        let log_path = self.layout.log(node);
        let failed = |error| CommandError::environment(format!("{}: {error}", log_path.display()));
        let open = || File::options().create(true).append(true).open(&log_path).map_err(failed);
        let mut log = open()?;
        let log_start = log.metadata().map_or(0, |log| log.len());
        // A node that was added or put back may have paths of another place.
        self.layout.make_relative(node)?;
        if let Some(problem) = self.layout.key_problem(node) {
            return Err(CommandError::operation(problem));
        }
        let program = std::env::current_exe().map_err(CommandError::environment)?;
        let idle = self.reactors.idle.to_possible_value().expect("it has a name on the command line");
        let index = self.layout.nodes.iter().position(|it| *it == node);
        let cores = index.and_then(|index| self.reactors.cores_of(index));
        let memory = memory_of(cores.map_or(1, |cores| cores.cpus().len()));
        let mut process = Command::new(program)
            .args(["serve", "--memory", &memory, "--idle", idle.get_name()])
            .args(cores.map(|cores| format!("--cores={cores}")))
            .args(["--until-stdin-closes", "--config"])
            .arg(self.layout.config(node))
            .arg("--rpc-socket")
            .arg(self.layout.socket(node))
            // Paths in the configuration are relative to it.
            .current_dir(&self.layout.directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(open()?)
            .spawn()
            .map_err(CommandError::environment)?;
        let output = process.stdout.take().expect("it is a pipe");
        let (sender, serves) = mpsc::sync_channel(1);
        let has_served = Arc::new(AtomicBool::new(false));
        let running = RunningNode {
            process,
            started: Instant::now(),
            serves,
            has_served: has_served.clone(),
            log_start,
        };
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = writeln!(log, "{line}");
                if line == "ready" && !has_served.swap(true, Ordering::AcqRel) {
                    announcement.iter().for_each(|announcement| stdout_line!("{announcement}"));
                    let _ = sender.send(());
                }
            }
        });
        Ok(running)
    }

    /// Starts a node, later if that fails.
    fn start_or_delay(&mut self, node: u32, announcement: Option<String>) {
        let spawned = self.spawn(node, announcement);
        let supervised = self.nodes.entry(node).or_default();
        supervised.retry_at = None;
        match spawned {
            Ok(running) => {
                supervised.running = Some(running);
                self.waiting.remove(&node);
            }
            Err(error) => {
                let delay = supervised.delay_start().as_secs();
                stdout_line!("node {node} is not started, and again in {delay} s: {error}");
            }
        }
    }

    /// Starts nodes again that have ended. Those that cannot start because the map cannot be used are started
    /// when it can, and those that failed after a delay: this process gets SIGCHLD then.
    pub(super) fn restart_ended(&mut self) {
        for node in self.nodes.keys().copied().collect::<Vec<_>>() {
            let supervised = self.nodes.get_mut(&node).expect("it is one of them");
            let ended = match &mut supervised.running {
                Some(running) => match running.process.try_wait() {
                    Ok(Some(status)) => {
                        let is_soon = running.started.elapsed() < SHORTEST_RUN;
                        let has_failed = is_soon || !running.has_served.load(Ordering::Acquire);
                        let reason = last_line(&self.layout.log(node), running.log_start);
                        Some((status, has_failed.then(|| reason.unwrap_or_default())))
                    }
                    _ => continue,
                },
                None if supervised.retry_at.is_some_and(|at| Instant::now() < at) => continue,
                None => None,
            };
            supervised.running = None;
            if ended.as_ref().is_some_and(|(_, failed)| failed.is_none()) {
                supervised.failures = 0;
            }
            let was_stopped = std::mem::replace(&mut supervised.is_stopped, self.layout.is_stopped(node));
            if supervised.is_stopped {
                supervised.retry_at = None;
                if let Some((status, _)) = ended {
                    stdout_line!("node {node} is stopped, {status}");
                }
                continue;
            }
            if self.is_lost(node) || self.waits_for_map(node) {
                continue;
            }
            let supervised = self.nodes.get_mut(&node).expect("it is one of them");
            match ended {
                Some((status, Some(reason))) => {
                    let delay = supervised.delay_start().as_secs();
                    let log = self.layout.log(node);
                    stdout_line!(
                        "node {node} failed, {status}: it is started again in {delay} s; its log is {}{}",
                        log.display(),
                        if reason.is_empty() { reason } else { format!(": {reason}") }
                    );
                    continue;
                }
                Some((status, None)) => stdout_line!("node {node} ended, {status}: it is started again"),
                None => {}
            }
            let is_back = was_stopped || supervised.failures > 0;
            let announcement = is_back.then(|| format!("node {node} serves again"));
            self.start_or_delay(node, announcement);
        }
    }

    /// Whether a node's directory is gone. Then it is started when another one is in its place.
    fn is_lost(&mut self, node: u32) -> bool {
        // What cannot be looked up, as on a file system with errors, may be there.
        if self.layout.config(node).try_exists().unwrap_or(true) {
            return false;
        }
        stdout_line!(
            "node {node} is lost: {} is gone; `ringbolt store add-node --replace {node}` makes an empty one",
            self.layout.node(node).display()
        );
        self.nodes.remove(&node);
        self.waiting.remove(&node);
        true
    }

    /// Whether the map cannot be used, so that a node cannot start.
    fn waits_for_map(&mut self, node: u32) -> bool {
        let Err(error @ MapError::Storage { .. }) = self.layout.map.cluster() else { return false };
        if self.waiting.insert(node) {
            stdout_line!("node {node} ended, and is started again when the map can be used: {error}");
        }
        if !self.is_waiting.swap(true, Ordering::AcqRel) {
            let (map, is_waiting) = (self.layout.map.clone(), self.is_waiting.clone());
            std::thread::spawn(move || {
                while matches!(map.cluster(), Err(MapError::Storage { .. })) {
                    // Nothing says when it can be used again.
                    std::thread::sleep(MAP_RETRY);
                }
                is_waiting.store(false, Ordering::Release);
                let _ = signal_hook::low_level::raise(SIGCHLD);
            });
        }
        true
    }

    /// Kills a node, as a failure of its machine would, and reaps it.
    pub(super) fn kill(&mut self, node: u32) -> Result<(), CommandError> {
        let running = self.nodes.get_mut(&node).and_then(|supervised| supervised.running.as_mut());
        if let Some(RunningNode { process, .. }) = running {
            process.kill().and_then(|()| process.wait()).map_err(CommandError::environment)?;
        }
        Ok(())
    }

    /// Ends the nodes, all at a time.
    pub(super) fn stop(&mut self) {
        let (sender, ended) = mpsc::channel();
        let mut pending = BTreeMap::new();
        for (node, supervised) in std::mem::take(&mut self.nodes) {
            let Some(RunningNode { mut process, .. }) = supervised.running else { continue };
            let pid = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
            // One that has ended already is gone.
            let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
            pending.insert(node, pid);
            let sender = sender.clone();
            std::thread::spawn(move || {
                let _ = process.wait();
                let _ = sender.send(node);
            });
        }
        drop(sender);
        let end = Instant::now() + STOP_MAX;
        while !pending.is_empty() {
            match ended.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(node) => _ = pending.remove(&node),
                Err(_) => break,
            }
        }
        for (node, pid) in &pending {
            stdout_line!("node {node} does not end, and is killed");
            let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
        }
        // The threads end with their processes.
        while !pending.is_empty() && ended.recv().is_ok_and(|node| pending.remove(&node).is_some()) {}
    }
}

/// Memory of a node with this number of cores.
fn memory_of(cores: usize) -> String {
    format!("{}m", NODE_MEMORY_MIB + CORE_MEMORY_MIB * cores.saturating_sub(1))
}

fn does_not_start(layout: &ClusterLayout, node: u32, log_start: u64) -> CommandError {
    let log = layout.log(node);
    let reason = last_line(&log, log_start).map_or(String::new(), |line| format!(": {line}"));
    CommandError::operation(format!("node {node} does not start{reason}; its log is {}", log.display()))
}

/// The last line of a log since a place in it that is no notice, which threads still write: why a process
/// ended.
fn last_line(log: &Path, start: u64) -> Option<String> {
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(start.max(length.saturating_sub(LAST_BYTES)))).ok()?;
    let mut bytes = Vec::new();
    file.take(LAST_BYTES).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let line =
        text.lines().rev().map(str::trim).find(|line| !line.is_empty() && !line.contains(" NOTICE: "))?;
    Some(line.trim_start_matches("ringbolt: ").chars().filter(|it| !it.is_control()).collect())
}

impl Drop for RunningNodes {
    fn drop(&mut self) {
        self.stop();
    }
}
