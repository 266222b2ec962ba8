//! Settings that are changed for a run, and put back whatever happens.
//!
//! Before a setting is changed, what it was is written to a journal and put on the disk. A run that
//! ends, also by Ctrl-C, puts everything back. One that was killed leaves its journal, and whatever
//! lab command runs next puts back what it finds there ([`restore_left_behind`]).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

/// Most entries of one journal: the first change of each setting is one.
const ENTRIES_MAX: usize = 10_000;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Entry {
    /// Who writes here: its process and when that began, which together are not used twice.
    Owner { pid: u32, began: String },
    /// A setting as it was.
    Setting { path: PathBuf, before: String },
    /// A loop device that was made.
    Loop { device: PathBuf },
    /// A file that was made, to be removed.
    File { path: PathBuf },
}

/// What was changed so far.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    entries: Vec<Entry>,
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
        let pid = std::process::id();
        let path = directory.join(format!("journal-{pid}"));
        let file = OpenOptions::new().create(true).truncate(true).write(true).open(&path)?;
        let mut journal = Journal { path, file, entries: Vec::new(), restored: false };
        journal.note(Entry::Owner { pid, began: began(pid).unwrap_or_default() })?;
        Ok(journal)
    }

    fn note(&mut self, entry: Entry) -> io::Result<()> {
        if self.entries.len() >= ENTRIES_MAX {
            return Err(io::Error::other("too many settings were changed"));
        }
        let mut line = serde_json::to_string(&entry)?;
        line.push('\n');
        self.file.write_all(line.as_bytes())?;
        self.file.sync_data()?;
        self.entries.push(entry);
        Ok(())
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
        let known = |entry: &Entry| matches!(entry, Entry::Setting { path: known, .. } if known == path);
        if !self.entries.iter().any(known) {
            self.note(Entry::Setting { path: path.to_path_buf(), before })?;
        }
        fs::write(path, value)?;
        let after = current(path)?;
        if after != value {
            return Err(io::Error::other(format!("{value} was written and {after} read back")));
        }
        Ok(())
    }

    /// Says that a loop device is about to be there.
    ///
    /// # Errors
    /// What the file system says.
    pub fn made_loop(&mut self, device: &Path) -> io::Result<()> {
        self.note(Entry::Loop { device: device.to_path_buf() })
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
            _ => None,
        };
        self.entries.iter().filter_map(said).collect()
    }

    /// Puts everything back, the last change first.
    ///
    /// Gives what could not be put back.
    pub fn restore(mut self) -> Vec<String> {
        self.put_back()
    }

    fn put_back(&mut self) -> Vec<String> {
        self.restored = true;
        let failed = undo(&self.entries);
        if failed.is_empty() {
            let _ = fs::remove_file(&self.path);
        }
        failed
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if !self.restored {
            self.put_back();
        }
    }
}

/// Puts back what runs that were killed have left. Gives what was put back, and what could not be.
pub fn restore_left_behind(directory: &Path) -> (Vec<String>, Vec<String>) {
    let (mut done, mut failed) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let ours =
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("journal-"));
        let Some(text) = fs::read_to_string(&path).ok().filter(|_| ours) else { continue };
        // A line that was cut off was not acted upon.
        let entries: Vec<Entry> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        if let Some(Entry::Owner { pid, began: at }) = entries.first()
            && began(*pid).as_ref() == Some(at)
        {
            continue;
        }
        let problems = undo(&entries);
        if problems.is_empty() {
            let _ = fs::remove_file(&path);
            done.extend(entries.iter().filter_map(|entry| match entry {
                Entry::Setting { path, before } => Some(format!("{} = {before}", path.display())),
                Entry::Loop { device } => Some(format!("{} detached", device.display())),
                Entry::File { path } => Some(format!("{} removed", path.display())),
                Entry::Owner { .. } => None,
            }));
        }
        failed.extend(problems);
    }
    (done, failed)
}

/// When a process that lives began, in the kernel's clock ticks.
fn began(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    // One that was killed stays as a zombie until its parent asks for it, which not every parent does.
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18).map(String::from)
}

fn current(path: &Path) -> io::Result<String> {
    let text = fs::read_to_string(path)?;
    let text = text.trim();
    // Choices mark the one in use.
    if path.ends_with("queue/scheduler") {
        return Ok(crate::host::chosen(text).0);
    }
    Ok(text.to_string())
}

fn undo(entries: &[Entry]) -> Vec<String> {
    let mut failed = Vec::new();
    for entry in entries.iter().rev() {
        let result = match entry {
            Entry::Owner { .. } => Ok(()),
            Entry::Setting { path, before } => put(path, before),
            Entry::Loop { device } => detach(device),
            Entry::File { path } => gone(fs::remove_file(path)),
        };
        if let Err(error) = result {
            let what = match entry {
                Entry::Setting { path, before } => format!("{} back to {before}", path.display()),
                Entry::Loop { device } => format!("{} detached", device.display()),
                Entry::File { path } => format!("{} removed", path.display()),
                Entry::Owner { .. } => String::new(),
            };
            failed.push(format!("could not get {what}: {error}"));
        }
    }
    failed
}

/// A setting of a scheduler that is no longer in use is gone, and so is that of a device that left.
fn put(path: &Path, before: &str) -> io::Result<()> {
    match current(path) {
        Ok(now) if now == before => Ok(()),
        Ok(_) => fs::write(path, before),
        Err(error) => gone(Err(error)),
    }
}

fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(())
        }
        // ENODEV, ENXIO: the device left while the file was open.
        Err(error) if matches!(error.raw_os_error(), Some(6 | 19)) => Ok(()),
        other => other,
    }
}

/// Detaches a loop device, and gives it the scheduler that a fresh one has: it survives otherwise.
fn detach(device: &Path) -> io::Result<()> {
    let output = Command::new("losetup").arg("--detach").arg(device).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    // Detached already.
    if output.status.success() || said.contains("No such device") {
        return Ok(());
    }
    Err(io::Error::other(said.trim().to_string()))
}

#[cfg(test)]
mod tests;
