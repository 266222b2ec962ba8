//! A block device's scheduler, with the settings that the kernel resets when the scheduler is switched.
//!
//! A switch gives the queue the new scheduler's defaults: `nr_requests`, whatever is under `iosched`, and
//! write-back throttling. [`QueueState`] is all of it at one moment, to be compared and to be written back.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// What a switch resets beside `iosched`. In this order, and before `iosched`: a scheduler derives settings of
/// its own from `nr_requests`.
const RESET: [&str; 3] = ["nr_requests", "async_depth", "wbt_lat_usec"];
/// How often settings are written: one of BFQ's may change another, which the second pass corrects.
const PASSES: usize = 2;

/// The state of a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct QueueState {
    /// The scheduler in use. Empty where the device offers none.
    pub(crate) scheduler: String,
    /// Files below `queue` with their values, in the order in which they are written back.
    pub(crate) settings: Vec<(String, String)>,
}

/// Why a value was not written back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Problem {
    /// It may work later.
    Retry(String),
    /// It will never work: the kernel does not take this value here.
    Lost(String),
}

impl QueueState {
    /// The state of the device whose `queue` directory this is. What cannot be read is left out.
    pub(crate) fn read(queue: &Path) -> QueueState {
        let mut files: Vec<String> = RESET.map(String::from).into();
        let iosched = fs::read_dir(queue.join("iosched")).into_iter().flatten().flatten();
        let mut own: Vec<String> =
            iosched.filter_map(|entry| Some(format!("iosched/{}", entry.file_name().to_str()?))).collect();
        own.sort();
        files.extend(own);
        let value = |file: String| Some((file.clone(), current(&queue.join(file)).ok()?));
        QueueState {
            scheduler: current(&queue.join("scheduler")).unwrap_or_default(),
            settings: files.into_iter().filter_map(value).collect(),
        }
    }

    /// Writes it back: the scheduler, and then the settings that its switch has reset. What is so already is not
    /// written.
    pub(crate) fn write_back(&self, queue: &Path) -> Vec<Problem> {
        if !self.scheduler.is_empty()
            && let Err(problem) = write_back(&queue.join("scheduler"), &self.scheduler)
        {
            // The settings are those of a scheduler that is not in use.
            return vec![problem];
        }
        let mut problems = Vec::new();
        for _ in 0..PASSES {
            let write = |(file, value): &(String, String)| write_back(&queue.join(file), value).err();
            problems = self.settings.iter().filter_map(write).collect();
        }
        problems
    }

    /// What differs in a later state of the same queue: each file with both values.
    pub(crate) fn differences(&self, queue: &Path, later: &QueueState) -> Vec<String> {
        let line = |file: &str, expected: &str, found: &str| {
            let (path, found) = (queue.join(file), if found.is_empty() { "nothing" } else { found });
            format!("{}: expected {expected}, found {found}", path.display())
        };
        if self.scheduler != later.scheduler {
            // All the settings are another scheduler's.
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

/// Whether a file below `queue` is one of those that a [`QueueState`] has, and if so, the `queue` directory.
pub(crate) fn queue_of(path: &Path) -> Option<&Path> {
    let folder = path.parent()?;
    let name = path.file_name()?.to_str()?;
    match folder.file_name()?.to_str()? {
        "queue" if name == "scheduler" || RESET.contains(&name) => Some(folder),
        "iosched" => folder.parent().filter(|queue| queue.file_name().is_some_and(|name| name == "queue")),
        _ => None,
    }
}

/// The value of a setting. Of a list of choices that is the one in use.
pub(crate) fn current(path: &Path) -> io::Result<String> {
    let text = fs::read_to_string(path)?;
    let text = text.trim();
    if path.ends_with("queue/scheduler") {
        return Ok(crate::host::chosen(text).0);
    }
    Ok(text.to_string())
}

/// Writes a value where it is not there already. A setting that is gone needs none: its scheduler is no longer in
/// use, or its device was removed.
pub(crate) fn write_back(path: &Path, value: &str) -> Result<(), Problem> {
    let named = |why: String| format!("{} is not {value} again: {why}", path.display());
    match current(path) {
        Ok(now) if now == value => return Ok(()),
        Ok(_) => {}
        Err(error) if is_gone(&error) => return Ok(()),
        // It is there and cannot be read, as some settings cannot.
        Err(error) => return Err(Problem::Lost(named(error.to_string()))),
    }
    if fs::metadata(path).is_ok_and(|metadata| metadata.permissions().mode() & 0o222 == 0) {
        return Err(Problem::Lost(named("it is read-only".into())));
    }
    match fs::write(path, value) {
        Ok(()) => {}
        Err(error) if is_gone(&error) || !path.exists() => return Ok(()),
        Err(error) if is_permanent(&error) => return Err(Problem::Lost(named(error.to_string()))),
        Err(error) => return Err(Problem::Retry(named(error.to_string()))),
    }
    match current(path) {
        Ok(now) if now != value => {
            Err(Problem::Lost(named(format!("it was written, and {now} was read back"))))
        }
        _ => Ok(()),
    }
}

/// The file is not there, or its device was removed while it was open.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let removed = [Errno::NODEV, Errno::NXIO].map(|errno| Some(errno.raw_os_error()));
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        || removed.contains(&error.raw_os_error())
}

/// Whether the kernel refuses the value itself, so that trying again is of no use.
fn is_permanent(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let of_value = [Errno::INVAL, Errno::RANGE, Errno::OPNOTSUPP, Errno::ROFS, Errno::NOSYS];
    // Root may do what others may not, so that a later command of root's is tried.
    let of_root = [Errno::ACCESS, Errno::PERM];
    let is = |all: &[Errno]| all.iter().any(|errno| Some(errno.raw_os_error()) == error.raw_os_error());
    is(&of_value) || rustix::process::geteuid().is_root() && is(&of_root)
}

#[cfg(test)]
mod tests;
