//! Loop devices: their files, their users, and how they are detached.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::queue_settings::RestoreError;

/// How long a detached device may stay attached: the kernel waits for the last close, and programs that probe new
/// devices have them open for a moment.
const DETACH_TIMEOUT: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The kernel's suffix of a removed file's name.
const DELETED_SUFFIX: &str = " (deleted)";

/// `losetup`, in a process group of its own, so that Ctrl-C does not end it half-way.
pub(crate) fn losetup() -> Command {
    let mut command = Command::new("losetup");
    command.process_group(0);
    command
}

/// The file of a loop device, and whether it was removed.
fn backing_file(device: &Path) -> Option<(PathBuf, bool)> {
    let name = device.file_name()?.to_str()?;
    let text = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).ok()?;
    // Strip only the newline: a file name may end in a space.
    let text = text.strip_suffix('\n').unwrap_or(&text);
    Some(match text.strip_suffix(DELETED_SUFFIX) {
        Some(path) => (path.into(), true),
        None => (text.into(), false),
    })
}

/// Detaches a device if it is attached to `file` (to any without one), and waits until it is detached.
pub(crate) fn detach(device: &Path, file: Option<&Path>) -> Result<(), RestoreError> {
    let attached = || {
        let backing = backing_file(device);
        backing.is_some_and(|(backing, _)| file.is_none_or(|file| file == backing))
    };
    if !attached() {
        return Ok(());
    }
    let retryable =
        |why: String| RestoreError::Retryable(format!("{} is not detached: {why}", device.display()));
    let output = losetup().arg("--detach").arg(device).output();
    let output = output.map_err(|error| retryable(format!("losetup: {error}")))?;
    let began = Instant::now();
    while attached() {
        if !output.status.success() {
            return Err(retryable(String::from_utf8_lossy(&output.stderr).trim().to_string()));
        }
        if began.elapsed() > DETACH_TIMEOUT {
            return Err(retryable(format!("it is open in {}", users(device))));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// The loop devices on removed files, each in a sentence that names the processes that have it open.
pub fn on_deleted_files() -> Vec<String> {
    let names = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let mut nodes: Vec<PathBuf> = names
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with("loop"))
        .map(|name| Path::new("/dev").join(name))
        .collect();
    nodes.sort();
    let sentence = |node: &PathBuf| {
        let (file, _) = backing_file(node).filter(|(_, on_deleted_files)| *on_deleted_files)?;
        let (node_shown, file, users) = (node.display(), file.display(), users(node));
        Some(format!("{node_shown} is attached to {file}, which was removed; it is open in {users}"))
    };
    nodes.iter().filter_map(sentence).collect()
}

/// The processes that have a device open, in words.
fn users(device: &Path) -> String {
    let mut users = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let descriptors = fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten();
        let mut targets = descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
        if targets.any(|target| target == device) {
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            users.push(format!("{} (process {pid})", name.trim_end()));
        }
    }
    if users.is_empty() { "no process that can be seen from here".into() } else { users.join(", ") }
}
