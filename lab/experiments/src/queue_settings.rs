//! A block device's scheduler and the settings that the kernel resets when it switches schedulers.
//!
//! A switch sets `nr_requests`, everything in `iosched` and write-back throttling to the new scheduler's defaults.
//! [`QueueSettings`] contains all of these, to be compared and restored.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Settings that a switch resets, besides `iosched`. They are restored in this order and before `iosched`: schedulers
/// derive settings from `nr_requests`.
const RESET_BY_SWITCH: [&str; 3] = ["nr_requests", "async_depth", "wbt_lat_usec"];
/// How often settings are written: one of BFQ's may change another, which the second pass corrects.
const WRITE_PASSES: usize = 2;

/// Scheduler and settings of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct QueueSettings {
    /// The active scheduler; empty if the device has none.
    pub(crate) scheduler: String,
    /// Files relative to `queue` and their values, in the order in which they are restored.
    pub(crate) settings: Vec<(String, String)>,
}

/// Why a value was not restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RestoreError {
    /// A later attempt may succeed.
    Retryable(String),
    /// The kernel rejects this value.
    Permanent(String),
}

impl QueueSettings {
    /// Reads the settings in a device's `queue` directory. Unreadable files are omitted.
    pub(crate) fn read(queue: &Path) -> QueueSettings {
        let mut files: Vec<String> = RESET_BY_SWITCH.map(String::from).into();
        let iosched = fs::read_dir(queue.join("iosched")).into_iter().flatten().flatten();
        let mut own: Vec<String> =
            iosched.filter_map(|entry| Some(format!("iosched/{}", entry.file_name().to_str()?))).collect();
        own.sort();
        files.extend(own);
        let value = |file: String| Some((file.clone(), read_setting(&queue.join(file)).ok()?));
        QueueSettings {
            scheduler: read_setting(&queue.join("scheduler")).unwrap_or_default(),
            settings: files.into_iter().filter_map(value).collect(),
        }
    }

    /// Restores the scheduler, then the settings that its switch has reset. Writes only what differs.
    pub(crate) fn restore(&self, queue: &Path) -> Vec<RestoreError> {
        if !self.scheduler.is_empty()
            && let Err(problem) = restore_setting(&queue.join("scheduler"), &self.scheduler)
        {
            // The settings belong to a scheduler that is not active.
            return vec![problem];
        }
        let mut problems = Vec::new();
        for _ in 0..WRITE_PASSES {
            let write = |(file, value): &(String, String)| restore_setting(&queue.join(file), value).err();
            problems = self.settings.iter().filter_map(write).collect();
        }
        problems
    }

    /// The files that differ in a later reading, with both values.
    pub(crate) fn differences(&self, queue: &Path, later: &QueueSettings) -> Vec<String> {
        let line = |file: &str, expected: &str, found: &str| {
            let (path, found) = (queue.join(file), if found.is_empty() { "nothing" } else { found });
            format!("{}: expected {expected}, found {found}", path.display())
        };
        if self.scheduler != later.scheduler {
            // All settings belong to another scheduler.
            return vec![line("scheduler", &self.scheduler, &later.scheduler)];
        }
        let found = |file: &str| later.settings.iter().find(|(name, _)| name == file).map(|(_, value)| value);
        let differs = |(file, value): &(String, String)| {
            let found = found(file).map_or("", String::as_str);
            (found != value).then(|| line(file, value, found))
        };
        self.settings.iter().filter_map(differs).collect()
    }
}

/// The `queue` directory of a file that [`QueueSettings`] contains; `None` for other files.
pub(crate) fn queue_of(path: &Path) -> Option<&Path> {
    let folder = path.parent()?;
    let name = path.file_name()?.to_str()?;
    match folder.file_name()?.to_str()? {
        "queue" if name == "scheduler" || RESET_BY_SWITCH.contains(&name) => Some(folder),
        "iosched" => folder.parent().filter(|queue| queue.file_name().is_some_and(|name| name == "queue")),
        _ => None,
    }
}

/// The value of a setting; of a list of choices, the selected one.
pub(crate) fn read_setting(path: &Path) -> io::Result<String> {
    let text = fs::read_to_string(path)?;
    let text = text.trim();
    if path.ends_with("queue/scheduler") {
        return Ok(crate::host::chosen(text).0);
    }
    Ok(text.to_string())
}

/// Writes a value if it differs. A missing file is no error: its scheduler is not active, or its device was removed.
pub(crate) fn restore_setting(path: &Path, value: &str) -> Result<(), RestoreError> {
    let describe = |why: String| format!("{} is not restored to {value}: {why}", path.display());
    match read_setting(path) {
        Ok(now) if now == value => return Ok(()),
        Ok(_) => {}
        Err(error) if is_gone(&error) => return Ok(()),
        // It exists but cannot be read.
        Err(error) => return Err(RestoreError::Permanent(describe(error.to_string()))),
    }
    if fs::metadata(path).is_ok_and(|metadata| metadata.permissions().mode() & 0o222 == 0) {
        return Err(RestoreError::Permanent(describe("it is read-only".into())));
    }
    match fs::write(path, value) {
        Ok(()) => {}
        Err(error) if is_gone(&error) || !path.exists() => return Ok(()),
        Err(error) if is_permanent(&error) => {
            return Err(RestoreError::Permanent(describe(error.to_string())));
        }
        Err(error) => return Err(RestoreError::Retryable(describe(error.to_string()))),
    }
    match read_setting(path) {
        Ok(now) if now != value => {
            Err(RestoreError::Permanent(describe(format!("it was written, and {now} was read back"))))
        }
        _ => Ok(()),
    }
}

/// Whether the file does not exist, or its device was removed while it was open.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let removed = [Errno::NODEV, Errno::NXIO].map(|errno| Some(errno.raw_os_error()));
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        || removed.contains(&error.raw_os_error())
}

/// Whether the kernel rejects the value itself, so that a retry cannot succeed.
fn is_permanent(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let value_errors = [Errno::INVAL, Errno::RANGE, Errno::OPNOTSUPP, Errno::ROFS, Errno::NOSYS];
    // A later command that runs as root may have permission.
    let permission_errors = [Errno::ACCESS, Errno::PERM];
    let is_any_of =
        |all: &[Errno]| all.iter().any(|errno| Some(errno.raw_os_error()) == error.raw_os_error());
    is_any_of(&value_errors) || rustix::process::geteuid().is_root() && is_any_of(&permission_errors)
}

#[cfg(test)]
mod tests;
