//! A cluster of the store as its users run it.
#![allow(dead_code)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::rig::{ringbolt, text};

/// `ringbolt store up`, ended on drop.
pub(crate) struct Cluster {
    pub(crate) directory: PathBuf,
    pub(crate) up: Child,
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

pub(crate) fn is_running(pid: u32) -> bool {
    // A process that ended and is not reaped has no program.
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

impl Cluster {
    pub(crate) fn start(directory: &Path, options: &[&str]) -> Cluster {
        Cluster::start_in(&directory.join("cluster"), options)
    }

    /// The cluster of this directory.
    pub(crate) fn start_in(cluster: &Path, options: &[&str]) -> Cluster {
        let mut up = Command::new(env!("CARGO_BIN_EXE_ringbolt"))
            .args(["store", "up", "--cluster", cluster.to_str().unwrap()])
            .args(options)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(up.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line.starts_with("ready")), "the cluster does not start");
        // So that its output never blocks it.
        std::thread::spawn(move || lines.for_each(|line| println!("up: {line}")));
        Cluster { directory: cluster.to_path_buf(), up }
    }

    pub(crate) fn path(&self) -> &str {
        self.directory.to_str().unwrap()
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        ringbolt(&[arguments, &["--cluster", self.path()]].concat())
    }

    pub(crate) fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    pub(crate) fn status(&self) -> Value {
        serde_json::from_str(&self.ok(&["store", "status", "--json"])).unwrap()
    }

    /// Waits until a node does not answer or does.
    pub(crate) fn wait_for(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let started = Instant::now();
        loop {
            let status = self.status();
            if is_so(&status) {
                return status;
            }
            assert!(started.elapsed() < Duration::from_secs(90), "not {what}: {status:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The line of a node in the status for people, without the number of groups whose primary it is: that changes by itself.
    pub(crate) fn line_of_node(&self, node: u64) -> String {
        let lines = self.ok(&["store", "status"]);
        let of_node = |line: &&str| {
            let rest = line.strip_prefix("node ").and_then(|line| line.strip_prefix(&node.to_string()));
            rest.is_some_and(|rest| rest.starts_with([':', ' ']))
        };
        let line = lines.lines().find(of_node).unwrap();
        let Some((state, primaries)) = line.split_once(", primary of ") else { return line.to_string() };
        let (count, rest) = primaries.split_once(" group").unwrap();
        let rest = if count == "1" { Some(rest) } else { rest.strip_prefix('s') };
        assert!(count.parse::<u64>().is_ok_and(|count| count > 0), "{line}");
        format!("{state}{}", rest.unwrap_or_else(|| panic!("{line}")))
    }

    pub(crate) fn wait_until_healthy(&self) -> Value {
        self.wait_for("healthy", |status| status["healthy"] == true)
    }

    /// The processes of the nodes, in their order.
    pub(crate) fn nodes(&self) -> Vec<u32> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            let config = |node: u32| format!("{}/node{node}/config.json", self.path());
            found.extend((1..=9).filter(|node| line.contains(&config(*node))).map(|node| (node, pid)));
        }
        found.sort_unstable();
        found.into_iter().map(|(_, pid)| pid).collect()
    }

    /// Ctrl-C ends every node.
    pub(crate) fn end(mut self) {
        let nodes = self.nodes();
        signal(self.up.id(), Signal::INT);
        assert!(self.up.wait().unwrap().success());
        assert!(!nodes.into_iter().any(is_running));
    }

    /// Arguments of `ringbolt perf` for the image.
    pub(crate) fn perf(&self, arguments: &[&str]) -> Command {
        self.perf_of("vol", arguments)
    }

    /// The same for another image.
    pub(crate) fn perf_of(&self, image: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
        let filename = format!("--filename=store:pool/{image}?cluster={}", self.path());
        command.args(["perf", &filename, "--bs=4k", "--verify=crc32c", "--name=t"]).args(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

impl Drop for Cluster {
    /// Its nodes have ended when this returns: they would write to the directory that a test removes.
    fn drop(&mut self) {
        let nodes = self.nodes();
        let _ = self.up.kill();
        let _ = self.up.wait();
        for node in &nodes {
            let _ = Pid::from_raw(*node as i32).map(|pid| kill_process(pid, Signal::KILL));
        }
        let started = Instant::now();
        while nodes.iter().any(|node| is_running(*node)) && started.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
