//! Child processes with time limits, and the temporary directory of their files.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// Time that a process may take to end after SIGTERM.
const END_MAX: Duration = Duration::from_secs(30);

/// A temporary directory, removed on drop.
pub(super) struct BenchDirectory(PathBuf);

impl BenchDirectory {
    pub(super) fn new() -> anyhow::Result<BenchDirectory> {
        let path = std::env::temp_dir().join(format!("ringbolt-bench-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(BenchDirectory(path))
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Creates an empty subdirectory, removing an existing one.
    pub(super) fn folder(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.file(name);
        if path.exists() {
            std::fs::remove_dir_all(&path)?;
        }
        std::fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(path)
    }

    /// The last four lines of a file in it, for messages.
    pub(super) fn tail(&self, name: &str) -> String {
        let text = std::fs::read_to_string(self.file(name)).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(4)..].join("; ")
    }
}

impl Drop for BenchDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A child process, killed on drop.
pub(super) struct ChildProcess(Child);

impl ChildProcess {
    /// Starts a process with standard output and standard error in the files `LOG.out` and `LOG.err`.
    pub(super) fn start(
        command: &mut Command,
        scratch: &BenchDirectory,
        log: &str,
    ) -> anyhow::Result<ChildProcess> {
        let file = |end: &str| File::create(scratch.file(&format!("{log}.{end}")));
        command.stdin(Stdio::null()).stdout(file("out")?).stderr(file("err")?);
        let child = command.spawn().with_context(|| describe(command))?;
        Ok(ChildProcess(child))
    }

    pub(super) fn id(&self) -> u32 {
        self.0.id()
    }

    /// The exit status, if it has ended.
    pub(super) fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.0.try_wait()?)
    }

    /// Waits for it to end; after `limit`, kills it and fails.
    pub(super) fn wait(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                self.kill()?;
                bail!("did not end within {} s", limit.as_secs());
            }
            // Long enough not to disturb the measured cores.
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills it.
    pub(super) fn kill(&mut self) -> anyhow::Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }

    /// Sends SIGTERM and waits for it to end.
    pub(super) fn end(&mut self) -> anyhow::Result<ExitStatus> {
        rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.0),
            rustix::process::Signal::TERM,
        )?;
        self.wait(END_MAX)
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// The command line as a user would type it, without the directories of programs and temporary files.
pub(super) fn describe(command: &Command) -> String {
    let mut words = vec![base(Path::new(command.get_program()))];
    for argument in command.get_args() {
        let text = argument.to_string_lossy();
        let short = match text.find("/ringbolt-bench-") {
            Some(at) => {
                // Keeps what precedes the path: an option name, and the scheme of a URI.
                let start = text[..at].rfind(['=', ':']).map_or(0, |before| before + 1);
                format!("{}{}", &text[..start], text.rsplit('/').next().unwrap_or_default())
            }
            None if text.starts_with('/') => base(Path::new(text.as_ref())),
            None => text.into_owned(),
        };
        words.push(if short.contains(['?', '&', ' ']) { format!("'{short}'") } else { short });
    }
    words.join(" ")
}

fn base(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_described_without_the_directories_of_this_run() {
        let mut command = Command::new("/a/b/ringbolt");
        command.args(["perf", "--output=/tmp/ringbolt-bench-7/perf.json", "nvme+tcp://127.0.0.1:1/n?ns=1"]);
        command
            .args(["/tmp/ringbolt-bench-7/run", "--filename=nvme+vfio-user:/tmp/ringbolt-bench-7/one?ns=1"]);
        let shown = "ringbolt perf --output=perf.json 'nvme+tcp://127.0.0.1:1/n?ns=1' run \
                     '--filename=nvme+vfio-user:one?ns=1'";
        assert_eq!(describe(&command), shown);
    }
}
