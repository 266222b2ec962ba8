//! Settings that are changed for a run, and put back whatever happens.
//!
//! Before a setting is changed, what it was is written to a journal and put on the disk. A run that
//! ends, also by Ctrl-C, puts everything back. One that was killed leaves its journal, and whatever
//! lab command runs next puts back what it finds there ([`restore_left_behind`]).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::locks::{self, create_locked, is_at, try_lock};
use crate::loops;
use crate::processes::{self, Identity, Killed, Processes, start_time};
use crate::queue::{Problem, QueueState, current, is_gone, queue_of, write_back};

/// Most entries of one journal: the first change of each setting is one.
const ENTRIES_MAX: usize = 10_000;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Entry {
    /// Who writes here: its process and when that began, which together are not used twice, and what the
    /// environment of every process carries that it starts.
    Owner {
        pid: u32,
        began: String,
        #[serde(default)]
        tag: String,
    },
    /// A setting as it was.
    Setting { path: PathBuf, before: String },
    /// A device's scheduler and its settings as they were.
    Queue { queue: PathBuf, before: QueueState },
    /// A loop device that was made over a file. Attached to another file, it is not ours.
    Loop {
        device: PathBuf,
        #[serde(default)]
        file: Option<PathBuf>,
    },
    /// A file that was made, to be removed.
    File { path: PathBuf },
}

/// What was changed so far.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    length: u64,
    entries: Vec<Entry>,
    /// The values that settings have since, those of schedulers aside.
    values: BTreeMap<PathBuf, String>,
    processes: Processes,
    restored: bool,
}

/// Where journals are kept: a place that does not survive a restart of the machine, as the settings
/// do not.
pub fn default_directory() -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let places = [Some(PathBuf::from("/run")), runtime];
    let writable = |place: &PathBuf| rustix::fs::access(place, rustix::fs::Access::WRITE_OK).is_ok();
    let place = places.into_iter().flatten().find(writable);
    place.unwrap_or_else(std::env::temp_dir).join("ringbolt-lab")
}

impl Journal {
    /// Begins a journal in a directory.
    ///
    /// # Errors
    /// What the file system says.
    pub fn begin(directory: &Path) -> io::Result<Journal> {
        fs::create_dir_all(directory)?;
        let mut processes = Processes::new();
        let path = directory.join(format!("journal-{}", processes.tag()));
        // Locked, so that no other command takes it for that of a process that is gone.
        let file = create_locked(&path)?.ok_or(io::ErrorKind::ResourceBusy)?;
        processes.record_in(processes_of(&path));
        let pid = std::process::id();
        let owner = Entry::Owner {
            pid,
            began: start_time(pid).unwrap_or_default(),
            tag: processes.tag().to_string(),
        };
        let mut journal = Journal {
            path,
            file,
            length: 0,
            entries: Vec::new(),
            values: BTreeMap::new(),
            processes,
            restored: false,
        };
        if let Err(error) = journal.note(owner) {
            let _ = fs::remove_file(&journal.path);
            return Err(error);
        }
        Ok(journal)
    }

    fn note(&mut self, entry: Entry) -> io::Result<()> {
        if self.entries.len() >= ENTRIES_MAX {
            return Err(io::Error::other("too many settings were changed"));
        }
        let mut line = serde_json::to_string(&entry)?;
        line.push('\n');
        let written =
            self.file.write_all_at(line.as_bytes(), self.length).and_then(|()| self.file.sync_data());
        if let Err(error) = written {
            // The next line begins where this one did, so that a part of this one never stands before it.
            let _ = self.file.set_len(self.length);
            return Err(error);
        }
        self.length += line.len() as u64;
        self.entries.push(entry);
        Ok(())
    }

    /// The processes of the run: they end with it, also when it is killed.
    pub fn processes(&mut self) -> &mut Processes {
        &mut self.processes
    }

    /// Changes a setting and reads it back.
    ///
    /// # Errors
    /// What the kernel says, or that it took the value for another.
    pub fn set(&mut self, path: &Path, value: &str) -> io::Result<()> {
        let before = current(path)?;
        if before == value {
            return Ok(());
        }
        if let Some(queue) = queue_of(path) {
            self.keep_queue(queue)?;
        } else {
            let known = |entry: &Entry| matches!(entry, Entry::Setting { path: known, .. } if known == path);
            if !self.entries.iter().any(known) {
                self.note(Entry::Setting { path: path.to_path_buf(), before })?;
            }
        }
        fs::write(path, value)?;
        let after = current(path)?;
        if after != value {
            return Err(io::Error::other(format!("{value} was written and {after} read back")));
        }
        if queue_of(path).is_none() {
            self.values.insert(path.to_path_buf(), value.to_string());
        }
        Ok(())
    }

    /// Writes down a device's scheduler and settings, where that was not done yet, before they are changed.
    ///
    /// # Errors
    /// What the file system reports; nothing may be changed then.
    pub(crate) fn keep_queue(&mut self, queue: &Path) -> io::Result<()> {
        let known = |entry: &Entry| matches!(entry, Entry::Queue { queue: known, .. } if known == queue);
        if self.entries.iter().any(known) {
            return Ok(());
        }
        self.note(Entry::Queue { queue: queue.to_path_buf(), before: QueueState::read(queue) })
    }

    /// The settings that were changed, those of schedulers aside, with the values that they have since.
    pub(crate) fn settings(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.values.iter().map(|(path, value)| (path.as_path(), value.as_str()))
    }

    /// Sets them again where another process has changed them.
    ///
    /// # Errors
    /// The file, and what the kernel reports, in one line.
    pub(crate) fn set_again(&mut self) -> Result<(), String> {
        for (path, value) in self.values.clone() {
            self.set(&path, &value).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }

    /// Says that a loop device is about to be attached to a file that exists.
    ///
    /// # Errors
    /// What the file system says.
    pub fn made_loop(&mut self, device: &Path, file: &Path) -> io::Result<()> {
        // The kernel names the file by its path without symbolic links.
        self.note(Entry::Loop { device: device.to_path_buf(), file: Some(fs::canonicalize(file)?) })
    }

    /// Says that a file is about to be made, which is to be removed.
    ///
    /// # Errors
    /// What the file system says.
    pub fn makes_file(&mut self, path: &Path) -> io::Result<()> {
        // Whoever puts it back may stand in another directory.
        self.note(Entry::File { path: std::path::absolute(path)? })
    }

    /// What was changed, for the reader.
    pub fn changes(&self) -> Vec<String> {
        let said = |entry: &Entry| match entry {
            Entry::Setting { path, before } => Some(format!("{} (was {before})", path.display())),
            Entry::Queue { queue, before } => {
                Some(format!("{} (scheduler was {})", queue.display(), before.scheduler))
            }
            _ => None,
        };
        self.entries.iter().filter_map(said).collect()
    }

    /// Puts everything back, the last change first. Returns what could not be put back, in words.
    pub fn restore(mut self) -> Vec<String> {
        self.put_back()
    }

    fn put_back(&mut self) -> Vec<String> {
        self.restored = true;
        // A process that still writes would change what is put back.
        let mut problems: Vec<String> =
            self.processes.end_all().iter().map(|name| does_not_end(name)).collect();
        let undone = undo(&self.entries);
        if problems.is_empty() && !undone.again {
            let _ = fs::remove_file(&self.path);
        }
        problems.extend(undone.problems);
        problems
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if !self.restored {
            self.put_back();
        }
    }
}

/// Ends what runs that were killed have left running, and puts back what they have changed. Returns what
/// was done, and what could not be.
pub fn restore_left_behind(directory: &Path) -> (Vec<String>, Vec<String>) {
    locks::remove_left_behind(directory);
    let (mut done, mut problems) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let ours =
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("journal-"));
        let Some(mut file) = File::open(&path).ok().filter(|_| ours) else { continue };
        // One that is locked belongs to a run, or is being restored by another command, which may just have ended.
        if !try_lock(&file).is_ok_and(|locked| locked) || !is_at(&file, &path) {
            continue;
        }
        let mut text = String::new();
        if file.read_to_string(&mut text).is_err() {
            continue;
        }
        // A line that was cut off was not acted upon.
        let entries: Vec<Entry> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        if let Some(Entry::Owner { pid, began: at, .. }) = entries.first()
            && start_time(*pid).as_ref() == Some(at)
        {
            continue;
        }
        let (ended, not_ended) = end_processes(&entries, &processes_of(&path));
        let undone = undo(&entries);
        if not_ended.is_empty() && !undone.again {
            let _ = fs::remove_file(&path);
        }
        done.extend(ended.into_iter().chain(undone.done));
        problems.extend(not_ended.into_iter().chain(undone.problems));
    }
    (done, problems)
}

/// Beside a journal: the identities of the processes that live.
fn processes_of(journal: &Path) -> PathBuf {
    let name = journal.file_name().unwrap_or_default().to_string_lossy();
    journal.with_file_name(name.replacen("journal", "processes", 1))
}

/// Ends the processes of a run that was killed. Returns what was done, and what could not be.
fn end_processes(entries: &[Entry], record: &Path) -> (Vec<String>, Vec<String>) {
    let tag = entries.iter().find_map(|entry| match entry {
        Entry::Owner { tag, .. } => Some(tag).filter(|tag| !tag.is_empty()),
        _ => None,
    });
    let identities: Vec<Identity> =
        fs::read(record).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    let mut killed = tag.map_or_else(Killed::default, |tag| processes::kill_tagged(tag));
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

/// What became of the entries of a journal.
#[derive(Default)]
struct Undone {
    done: Vec<String>,
    problems: Vec<String>,
    /// Whether a later attempt may succeed where this one did not.
    again: bool,
}

/// The last entry first.
fn undo(entries: &[Entry]) -> Undone {
    let mut undone = Undone::default();
    for entry in entries.iter().rev() {
        let (what, problems) = match entry {
            Entry::Owner { .. } => continue,
            Entry::Setting { path, before } => {
                (format!("{} = {before}", path.display()), Vec::from_iter(write_back(path, before).err()))
            }
            Entry::Queue { queue, before } => {
                let what = format!("{}: scheduler {} with its settings", queue.display(), before.scheduler);
                (what, before.write_back(queue))
            }
            Entry::Loop { device, file } => {
                let problem = loops::detach(device, file.as_deref()).err();
                (format!("{} detached", device.display()), Vec::from_iter(problem))
            }
            Entry::File { path } => {
                let problem = fs::remove_file(path).err().filter(|error| !is_gone(error));
                let named = |error| Problem::Retry(format!("{} is not removed: {error}", path.display()));
                (format!("{} removed", path.display()), Vec::from_iter(problem.map(named)))
            }
        };
        if problems.is_empty() {
            undone.done.push(what);
        }
        for problem in problems {
            undone.again |= matches!(problem, Problem::Retry(_));
            undone.problems.push(match problem {
                Problem::Retry(why) => format!("{why}; the next lab command tries again"),
                Problem::Lost(why) => format!("{why}; it is not tried again"),
            });
        }
    }
    undone
}

#[cfg(test)]
mod tests;
