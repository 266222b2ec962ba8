//! The nodes of a cluster, as processes.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use cluster_map::MapError;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::SIGCHLD;

use super::layout::ClusterLayout;
use crate::cli::Idle;
use crate::command_error::CommandError;
use crate::console::stdout_line;

/// Memory of a node for I/O.
const NODE_MEMORY: &str = "128m";
/// A node that ended sooner than this after its start is not started again.
const SHORTEST_RUN: Duration = Duration::from_secs(2);
/// How often a map that cannot be used is tried while nodes wait for it.
const MAP_RETRY: Duration = Duration::from_millis(100);

/// A node's process. Its standard input is a pipe: when that closes, because this process ended somehow, it ends.
struct RunningNode {
    node: u32,
    process: Child,
    started: Instant,
}

/// The nodes of a cluster. They end when this is dropped.
pub(super) struct RunningNodes {
    layout: ClusterLayout,
    /// What they do when they are idle, as `--idle` of `ringbolt serve` names it.
    idle: Idle,
    running: Vec<RunningNode>,
    /// Nodes that ended, and cannot start while the map cannot be used.
    waiting: BTreeSet<u32>,
    /// A thread waits for the map.
    is_waiting: Arc<AtomicBool>,
}

impl RunningNodes {
    /// Starts every node, and returns when all serve.
    pub(super) fn start(layout: &ClusterLayout, idle: Idle) -> Result<RunningNodes, CommandError> {
        for node in &layout.nodes {
            if UnixStream::connect(layout.socket(*node)).is_ok() {
                let reason = format!("node {node} of {} runs already", layout.directory.display());
                return Err(CommandError::operation(reason));
            }
        }
        let layout = layout.clone();
        let mut nodes = RunningNodes {
            layout,
            idle,
            running: Vec::new(),
            waiting: BTreeSet::new(),
            is_waiting: Arc::default(),
        };
        for node in nodes.layout.nodes.clone() {
            nodes.start_node(node)?;
        }
        Ok(nodes)
    }

    /// Starts nodes that were added.
    pub(super) fn start_added(&mut self) -> Result<(), CommandError> {
        self.layout.find_nodes()?;
        for node in self.layout.nodes.clone() {
            if self.running.iter().all(|running| running.node != node) {
                self.start_node(node)?;
                stdout_line!("node {node} was added, and serves");
            }
        }
        Ok(())
    }

    /// Starts a node, and returns when it serves.
    pub(super) fn start_node(&mut self, node: u32) -> Result<(), CommandError> {
        let directory = self.layout.node(node);
        let log_path = directory.join("log");
        let open = || File::options().create(true).append(true).open(&log_path);
        let mut log = open().map_err(CommandError::environment)?;
        let program = std::env::current_exe().map_err(CommandError::environment)?;
        let idle = self.idle.to_possible_value().expect("it has a name on the command line");
        let mut process = Command::new(program)
            .args(["serve", "--memory", NODE_MEMORY, "--idle", idle.get_name()])
            .args(["--until-stdin-closes", "--config"])
            .arg(directory.join("config.json"))
            .arg("--rpc-socket")
            .arg(self.layout.socket(node))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(open().map_err(CommandError::environment)?)
            .spawn()
            .map_err(CommandError::environment)?;
        let output = process.stdout.take().expect("it is a pipe");
        self.running.retain(|other| other.node != node);
        self.running.push(RunningNode { node, process, started: Instant::now() });
        let mut lines = BufReader::new(output).lines();
        loop {
            let Some(Ok(line)) = lines.next() else {
                let reason = format!("node {node} does not start; its log is {}", log_path.display());
                return Err(CommandError::operation(reason));
            };
            let _ = writeln!(log, "{line}");
            if line == "ready" {
                break;
            }
        }
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = writeln!(log, "{line}");
            }
        });
        Ok(())
    }

    /// Starts nodes again that have ended. Those that cannot start because the map cannot be used are started when it can:
    /// this process gets SIGCHLD then.
    pub(super) fn restart_ended(&mut self) -> Result<(), CommandError> {
        for node in self.layout.nodes.clone() {
            let Some(running) = self.running.iter_mut().find(|running| running.node == node) else {
                continue;
            };
            let Ok(Some(status)) = running.process.try_wait() else { continue };
            let is_soon = running.started.elapsed() < SHORTEST_RUN;
            if self.waits_for_map(node) {
                continue;
            }
            if is_soon && !self.waiting.contains(&node) {
                let log = self.layout.node(node).join("log");
                let reason =
                    format!("node {node} ended soon after its start, {status}; its log is {}", log.display());
                return Err(CommandError::operation(reason));
            }
            stdout_line!("node {node} ended, {status}: it is started again");
            match self.start_node(node) {
                Err(error) if !self.waits_for_map(node) => return Err(error),
                Err(_) => {}
                Ok(()) => _ = self.waiting.remove(&node),
            }
        }
        Ok(())
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
        if let Some(running) = self.running.iter_mut().find(|running| running.node == node) {
            running
                .process
                .kill()
                .and_then(|()| running.process.wait())
                .map_err(CommandError::environment)?;
        }
        Ok(())
    }

    /// Ends the nodes, all at a time.
    pub(super) fn stop(&mut self) {
        for running in &self.running {
            let pid = i32::try_from(running.process.id()).ok().and_then(Pid::from_raw);
            // One that has ended already is gone.
            let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
        }
        for mut running in self.running.drain(..) {
            let _ = running.process.wait();
        }
    }
}

impl Drop for RunningNodes {
    fn drop(&mut self) {
        self.stop();
    }
}
