//! Runs the `ringbolt` program: commands, and servers that end with the test.
#![allow(dead_code)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

pub(crate) fn ringbolt(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ringbolt")).args(arguments).output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Creates an empty temporary directory for this process.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("ringbolt-test-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir(&path).unwrap();
    path
}

/// A `ringbolt serve` process, killed on drop.
pub(crate) struct ServerProcess {
    child: Child,
    output: std::io::Lines<BufReader<std::process::ChildStdout>>,
    pub(crate) socket: PathBuf,
    /// The lines of its standard output up to `ready`.
    pub(crate) printed: Vec<String>,
}

impl ServerProcess {
    /// Starts a server with the RPC socket `name` and waits until it is ready.
    pub(crate) fn start(directory: &Path, name: &str, arguments: &[&str]) -> ServerProcess {
        ServerProcess::start_with(directory, name, arguments, |_| {})
    }

    /// [`start`](Self::start), with a change of the process.
    pub(crate) fn start_with(
        directory: &Path,
        name: &str,
        arguments: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> ServerProcess {
        let socket = directory.join(format!("{name}.sock"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
        command.args(["serve", "-r", socket.to_str().unwrap()]).args(arguments).stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut printed = Vec::new();
        for line in output.by_ref().map(Result::unwrap) {
            let ready = line == "ready";
            printed.push(line);
            if ready {
                break;
            }
        }
        assert_eq!(printed.last().map(String::as_str), Some("ready"), "{name}");
        ServerProcess { child, output, socket, printed }
    }

    /// Starts a server with a configuration file.
    pub(crate) fn configured(directory: &Path, name: &str, config: &Value) -> ServerProcess {
        let file = directory.join(format!("{name}.json"));
        std::fs::write(&file, config.to_string()).unwrap();
        ServerProcess::start(directory, name, &["-c", file.to_str().unwrap()])
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The TCP port that it listens on.
    pub(crate) fn port(&self) -> String {
        let line = self.printed.iter().find(|line| line.starts_with("listening: TCP 127.0.0.1:"));
        line.unwrap().split([':', ' ']).nth(4).unwrap().to_string()
    }

    pub(crate) fn rpc(&self, arguments: &[&str]) -> Output {
        ringbolt(&[&["rpc", "-r", self.socket.to_str().unwrap()], arguments].concat())
    }

    pub(crate) fn ok(&self, arguments: &[&str]) -> Value {
        let output = self.rpc(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    pub(crate) fn stop(mut self) -> Option<i32> {
        self.ok(&["spdk_kill_instance", "sig_name=SIGTERM"]);
        let status = self.child.wait().unwrap();
        assert!(!self.socket.exists());
        status.code()
    }

    /// Sends a signal and returns what is printed up to a line that begins with `last`.
    pub(crate) fn signal(&mut self, name: &str, last: &str) -> Vec<String> {
        self.ok(&["spdk_kill_instance", &format!("sig_name={name}")]);
        let mut lines = Vec::new();
        for line in self.output.by_ref().map(Result::unwrap) {
            lines.push(line);
            if lines.last().is_some_and(|line| line.starts_with(last)) {
                return lines;
            }
        }
        panic!("it ended: {lines:?}");
    }

    /// Waits for its end after a signal.
    pub(crate) fn wait(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }

    /// Kills it with SIGKILL, which simulates the loss of its machine.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
