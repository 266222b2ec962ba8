//! Changes machine settings for a run and restores them, however the run ends.
//!
//! Before a setting is changed, its value is appended to a journal and synced. A run that ends, also by SIGINT,
//! restores everything. A run that is killed leaves its journal, which the next lab command restores
//! ([`restore_killed_runs`]). `docs/formats/lab-journal.md` describes the file.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::locks::{self, create_locked, is_same_file, try_lock};
use crate::loops;
use crate::processes::{self, KillReport, ProcessIdentity, RunProcesses, start_time};
use crate::queue_settings::{QueueSettings, RestoreError, is_gone, queue_of, read_setting, restore_setting};

/// Most entries of one journal: one for the first change of each setting.
const ENTRIES_MAX: usize = 10_000;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum JournalEntry {
    /// The run that owns the journal: pid and start time, which together identify the process, and the tag in the
    /// environment of its processes.
    Owner {
        pid: u32,
        began: String,
        #[serde(default)]
        tag: String,
    },
    /// A setting and its value before the change.
    Setting { path: PathBuf, before: String },
    /// A block device and its queue settings before the change.
    Queue { queue: PathBuf, before: QueueSettings },
    /// A loop device that the run attached to `file`. Attached to another file, it is not the run's.
    Loop {
        device: PathBuf,
        #[serde(default)]
        file: Option<PathBuf>,
    },
    /// A file that the run creates and that must be removed.
    File { path: PathBuf },
}

/// The journal of one run. [`Journal::begin`] comes first; [`Journal::set`], [`Journal::record_loop`] and
/// [`Journal::record_file`] record before a change is made, at the cost of an fsync; [`Journal::restore`], or
/// dropping it, undoes all changes in reverse order and removes the file.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    length: u64,
    entries: Vec<JournalEntry>,
    /// Values that the run has set, except those in [`JournalEntry::Queue`].
    applied: BTreeMap<PathBuf, String>,
    processes: RunProcesses,
    restored: bool,
}

/// The directory of journals: `/run/ringbolt-lab`, or below `$XDG_RUNTIME_DIR` or the directory for temporary files
/// if `/run` is not writable. Like the settings, it does not survive a reboot.
pub fn default_directory() -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let places = [Some(PathBuf::from("/run")), runtime];
    let writable = |location: &PathBuf| rustix::fs::access(location, rustix::fs::Access::WRITE_OK).is_ok();
    let location = places.into_iter().flatten().find(writable);
    location.unwrap_or_else(std::env::temp_dir).join("ringbolt-lab")
}

impl Journal {
    /// Creates a journal in a directory.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn begin(directory: &Path) -> io::Result<Journal> {
        fs::create_dir_all(directory)?;
        let mut processes = RunProcesses::new();
        let path = directory.join(format!("journal-{}", processes.tag()));
        // Locked, so that other commands do not consider its owner dead.
        let file = create_locked(&path)?.ok_or(io::ErrorKind::ResourceBusy)?;
        processes.set_record_file(processes_file(&path));
        let pid = std::process::id();
        let owner = JournalEntry::Owner {
            pid,
            began: start_time(pid).unwrap_or_default(),
            tag: processes.tag().to_string(),
        };
        let mut journal = Journal {
            path,
            file,
            length: 0,
            entries: Vec::new(),
            applied: BTreeMap::new(),
            processes,
            restored: false,
        };
        if let Err(error) = journal.append(owner) {
            let _ = fs::remove_file(&journal.path);
            return Err(error);
        }
        Ok(journal)
    }

    fn append(&mut self, entry: JournalEntry) -> io::Result<()> {
        if self.entries.len() >= ENTRIES_MAX {
            return Err(io::Error::other("too many settings were changed"));
        }
        let mut line = serde_json::to_string(&entry)?;
        line.push('\n');
        let written =
            self.file.write_all_at(line.as_bytes(), self.length).and_then(|()| self.file.sync_data());
        if let Err(error) = written {
            // Cut the incomplete line off: the next one must start at the same offset.
            let _ = self.file.set_len(self.length);
            return Err(error);
        }
        self.length += line.len() as u64;
        self.entries.push(entry);
        Ok(())
    }

    /// The processes of the run. They end with it, even if it is killed.
    pub fn processes(&mut self) -> &mut RunProcesses {
        &mut self.processes
    }

    /// Changes a setting and reads it back.
    ///
    /// # Errors
    /// An error of the journal, in which case nothing is changed, or of the setting; a value that reads back
    /// differently.
    pub fn set(&mut self, path: &Path, value: &str) -> io::Result<()> {
        let before = read_setting(path)?;
        if before == value {
            return Ok(());
        }
        if let Some(queue) = queue_of(path) {
            self.record_queue(queue)?;
        } else {
            let known = |entry: &JournalEntry| matches!(entry, JournalEntry::Setting { path: known, .. } if known == path);
            if !self.entries.iter().any(known) {
                self.append(JournalEntry::Setting { path: path.to_path_buf(), before })?;
            }
        }
        fs::write(path, value)?;
        let after = read_setting(path)?;
        if after != value {
            return Err(io::Error::other(format!("{value} was written and {after} read back")));
        }
        if queue_of(path).is_none() {
            self.applied.insert(path.to_path_buf(), value.to_string());
        }
        Ok(())
    }

    /// Records a device's queue settings before their first change.
    ///
    /// # Errors
    /// An error of the file system; nothing may be changed then.
    pub(crate) fn record_queue(&mut self, queue: &Path) -> io::Result<()> {
        let known = |entry: &JournalEntry| matches!(entry, JournalEntry::Queue { queue: known, .. } if known == queue);
        if self.entries.iter().any(known) {
            return Ok(());
        }
        self.append(JournalEntry::Queue { queue: queue.to_path_buf(), before: QueueSettings::read(queue) })
    }

    /// Changed settings and their current values, except those of schedulers.
    pub(crate) fn settings(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.applied.iter().map(|(path, value)| (path.as_path(), value.as_str()))
    }

    /// Writes the changed settings again if another process has changed them.
    ///
    /// # Errors
    /// File and error, in one line.
    pub(crate) fn reapply(&mut self) -> Result<(), String> {
        for (path, value) in self.applied.clone() {
            self.set(&path, &value).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }

    /// Records a loop device before it is attached to a file that exists.
    ///
    /// # Errors
    /// An error of the file system; nothing may be attached then.
    pub fn record_loop(&mut self, device: &Path, file: &Path) -> io::Result<()> {
        // The kernel reports the file by its path without symbolic links.
        self.append(JournalEntry::Loop { device: device.to_path_buf(), file: Some(fs::canonicalize(file)?) })
    }

    /// Records a file before it is created, so that it is removed.
    ///
    /// # Errors
    /// An error of the file system; nothing may be created then.
    pub fn record_file(&mut self, path: &Path) -> io::Result<()> {
        // The process that restores it may run in another directory.
        self.append(JournalEntry::File { path: std::path::absolute(path)? })
    }

    /// The changed settings and their original values, in words.
    pub fn changes(&self) -> Vec<String> {
        let message = |entry: &JournalEntry| match entry {
            JournalEntry::Setting { path, before } => Some(format!("{} (was {before})", path.display())),
            JournalEntry::Queue { queue, before } => {
                Some(format!("{} (scheduler was {})", queue.display(), before.scheduler))
            }
            _ => None,
        };
        self.entries.iter().filter_map(message).collect()
    }

    /// Undoes all changes, the last one first. Returns what could not be restored, in words.
    pub fn restore(mut self) -> Vec<String> {
        self.restore_all()
    }

    fn restore_all(&mut self) -> Vec<String> {
        self.restored = true;
        // Processes end first: one that still writes would change restored data.
        let mut problems: Vec<String> =
            self.processes.kill_all().iter().map(|name| does_not_end(name)).collect();
        // A loop device that is open, if only for its lock, cannot be detached.
        self.processes.share_locks(Vec::new());
        let undone = undo_all(&self.entries);
        if problems.is_empty() && !undone.retry {
            let _ = fs::remove_file(&self.path);
        }
        problems.extend(undone.problems);
        problems
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if !self.restored {
            self.restore_all();
        }
    }
}

/// Kills the processes of killed runs and undoes their changes. Returns what was done and what failed.
pub fn restore_killed_runs(directory: &Path) -> (Vec<String>, Vec<String>) {
    locks::remove_stale_records(directory);
    remove_stale_probes(directory);
    let (mut done, mut problems) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let ours =
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("journal-"));
        let Some(mut file) = File::open(&path).ok().filter(|_| ours) else { continue };
        // A locked journal belongs to a live run or is being restored by another command. One that is no longer at
        // its path has just been restored.
        if !try_lock(&file).is_ok_and(|locked| locked) || !is_same_file(&file, &path) {
            continue;
        }
        let mut text = String::new();
        if file.read_to_string(&mut text).is_err() {
            continue;
        }
        // An incomplete line was never acted upon.
        let entries: Vec<JournalEntry> =
            text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        if let Some(JournalEntry::Owner { pid, began: at, .. }) = entries.first()
            && start_time(*pid).as_ref() == Some(at)
        {
            continue;
        }
        let (ended, not_ended) = kill_processes(&entries, &processes_file(&path));
        let undone = undo_all(&entries);
        if not_ended.is_empty() && !undone.retry {
            let _ = fs::remove_file(&path);
        }
        done.extend(ended.into_iter().chain(undone.done));
        problems.extend(not_ended.into_iter().chain(undone.problems));
    }
    remove_stale_process_records(directory);
    (done, problems)
}

/// Removes what a kill left of records of processes: a record is replaced by renaming a new file, and a kill before that
/// leaves the new one, which no journal names.
fn remove_stale_process_records(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(tag) = name.to_str().and_then(|name| name.strip_prefix("processes-")) else { continue };
        let tag = tag.strip_suffix(".new").unwrap_or(tag);
        let pid = tag.split('-').next().and_then(|pid| pid.parse().ok());
        let is_needed = directory.join(format!("journal-{tag}")).exists();
        if !is_needed && pid.is_some_and(|pid: u32| start_time(pid).is_none()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The directory in which a process probes generators, below that of journals.
pub fn probe_directory(pid: u32) -> PathBuf {
    default_directory().join(format!("{PROBE_PREFIX}{pid}"))
}

const PROBE_PREFIX: &str = "probe-";

/// Removes the directories of killed probes.
fn remove_stale_probes(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(PROBE_PREFIX)?.parse().ok());
        if pid.is_some_and(|pid: u32| start_time(pid).is_none()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// The file next to a journal that contains the identities of live processes.
fn processes_file(journal: &Path) -> PathBuf {
    let name = journal.file_name().unwrap_or_default().to_string_lossy();
    journal.with_file_name(name.replacen("journal", "processes", 1))
}

/// Kills the processes of a killed run. Returns what was done and what failed.
fn kill_processes(entries: &[JournalEntry], record: &Path) -> (Vec<String>, Vec<String>) {
    let tag = entries.iter().find_map(|entry| match entry {
        JournalEntry::Owner { tag, .. } => Some(tag).filter(|tag| !tag.is_empty()),
        _ => None,
    });
    let identities: Vec<ProcessIdentity> =
        fs::read(record).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    let mut killed = tag.map_or_else(KillReport::default, |tag| processes::kill_tagged(tag));
    let identified = processes::kill_identified(&identities);
    killed.ended.extend(identified.ended);
    killed.remaining.extend(identified.remaining);
    if killed.remaining.is_empty() {
        let _ = fs::remove_file(record);
    }
    let done = killed.ended.iter().map(|name| format!("{name} ended")).collect();
    (done, killed.remaining.iter().map(|name| does_not_end(name)).collect())
}

fn does_not_end(name: &str) -> String {
    format!("{name} was killed and does not end: it still uses the device")
}

/// Results of undoing the entries of a journal.
#[derive(Default)]
struct UndoReport {
    done: Vec<String>,
    problems: Vec<String>,
    /// Whether a later attempt may succeed.
    retry: bool,
}

/// Undoes the entries, the last one first.
fn undo_all(entries: &[JournalEntry]) -> UndoReport {
    let mut undone = UndoReport::default();
    for entry in entries.iter().rev() {
        let (what, problems) = match entry {
            JournalEntry::Owner { .. } => continue,
            JournalEntry::Setting { path, before } => (
                format!("{} = {before}", path.display()),
                Vec::from_iter(restore_setting(path, before).err()),
            ),
            JournalEntry::Queue { queue, before } => {
                let what = format!("{}: scheduler {} with its settings", queue.display(), before.scheduler);
                (what, before.restore(queue))
            }
            JournalEntry::Loop { device, file } => {
                let problem = loops::detach(device, file.as_deref()).err();
                (format!("{} detached", device.display()), Vec::from_iter(problem))
            }
            JournalEntry::File { path } => {
                let problem = fs::remove_file(path).err().filter(|error| !is_gone(error));
                let named =
                    |error| RestoreError::Retryable(format!("{} is not removed: {error}", path.display()));
                (format!("{} removed", path.display()), Vec::from_iter(problem.map(named)))
            }
        };
        if problems.is_empty() {
            undone.done.push(what);
        }
        for problem in problems {
            undone.retry |= matches!(problem, RestoreError::Retryable(_));
            undone.problems.push(match problem {
                RestoreError::Retryable(why) => format!("{why}; the next lab command tries again"),
                RestoreError::Permanent(why) => format!("{why}; it is not retried"),
            });
        }
    }
    undone
}

#[cfg(test)]
mod tests;
