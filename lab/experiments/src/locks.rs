//! One run at a time on a device.
//!
//! A run locks what it measures in two ways. The machine's journal directory has a record for each device, by
//! device number (of the whole disk) or by inode, which is locked as long as the run lives: two names of one
//! device are one record. The node or file itself is locked too, which runs with another journal directory (those
//! of another user) and programs that follow systemd's convention for block devices obey. All are locks of
//! `flock(2)`, so that those of a run that was killed are gone with it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock, major, minor};

use crate::host::Host;
use crate::processes::{Identity, start_time};
use crate::target::{Device, Kind};

/// How long another program may have a node locked before the run is refused. udev has while it probes a device, and
/// the kernel releases the files of a killed process's io_uring some time after the process has ended.
const WAIT_MAX: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(20);
/// How often a file may be replaced by another while it is opened and locked.
const ATTEMPTS: usize = 100;
/// Most characters of a key that is made of a name.
const KEY_MAX: usize = 200;

/// Why a device is not locked. One line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct LockError(String);

/// The locks of one run, released when it is dropped.
#[derive(Debug)]
pub struct DeviceLocks {
    directory: PathBuf,
    records: Vec<Record>,
    /// What is locked itself, by its path.
    nodes: Vec<(PathBuf, File)>,
}

#[derive(Debug)]
struct Record {
    /// The device as the user named it.
    place: String,
    path: PathBuf,
    /// Locked as long as it is open.
    _file: File,
}

impl DeviceLocks {
    /// No locks yet. Records are kept in the directory of the journals.
    pub fn new(directory: &Path) -> DeviceLocks {
        DeviceLocks { directory: directory.to_path_buf(), records: Vec::new(), nodes: Vec::new() }
    }

    /// Locks a device, or the rest of it where a part is locked already: a file that was not there before.
    ///
    /// # Errors
    /// The process that has it locked, or the file that cannot be locked.
    pub fn lock(&mut self, device: &Device, host: &Host) -> Result<(), LockError> {
        let Some(node) = node(device) else {
            return match shared_key(device) {
                Some(key) => self.record(&key, &device.place),
                None => Ok(()),
            };
        };
        for key in keys(&node, host) {
            self.record(&key, &device.place)?;
        }
        // A device of our own is locked by the process that opens it.
        if device.kind != Kind::Uri && node.exists() {
            self.lock_node(node)?;
        }
        Ok(())
    }

    /// Locks the nodes of these devices again, after [`DeviceLocks::close_nodes`].
    ///
    /// # Errors
    /// The process that has one locked.
    pub(crate) fn reopen_nodes(&mut self, devices: &[Device]) -> Result<(), LockError> {
        let nodes = devices.iter().filter(|device| device.kind != Kind::Uri).filter_map(node);
        nodes.filter(|node| node.exists()).try_for_each(|node| self.lock_node(node))
    }

    fn lock_node(&mut self, node: PathBuf) -> Result<(), LockError> {
        if !self.nodes.iter().any(|(known, _)| *known == node) {
            let file = lock_node(&node)?;
            self.nodes.push((node, file));
        }
        Ok(())
    }

    /// Closes the devices and keeps the records: a loop device is not detached while it is open, and our block layer
    /// locks a device itself.
    pub fn close_nodes(&mut self) {
        self.nodes.clear();
    }

    fn record(&mut self, key: &str, place: &str) -> Result<(), LockError> {
        let path = self.directory.join(format!("device-{key}"));
        if let Some(known) = self.records.iter().find(|record| record.path == path) {
            if known.place == place {
                return Ok(());
            }
            return Err(LockError(format!("{place}: the same device as {}", known.place)));
        }
        let failed = |error: io::Error| LockError(format!("{}: {error}", path.display()));
        fs::create_dir_all(&self.directory).map_err(failed)?;
        let Some(mut file) = create_locked(&path).map_err(failed)? else {
            let owner =
                fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<Identity>(&bytes).ok());
            let owner = owner
                .map_or("another process".into(), |one| format!("process {} ({})", one.pid, one.program));
            return Err(refused(place, &owner));
        };
        let pid = std::process::id();
        let words: Vec<String> = std::env::args().collect();
        let own = Identity { pid, started: start_time(pid).unwrap_or_default(), program: words.join(" ") };
        let written = serde_json::to_vec(&own).map_err(io::Error::from).and_then(|bytes| {
            file.set_len(0)?;
            file.write_all(&bytes)
        });
        if let Err(error) = written {
            let _ = fs::remove_file(&path);
            return Err(failed(error));
        }
        self.records.push(Record { place: place.to_string(), path, _file: file });
        Ok(())
    }
}

impl Drop for DeviceLocks {
    fn drop(&mut self) {
        for record in &self.records {
            // Still locked: who waits for it finds that the file it opened is no longer there.
            let _ = fs::remove_file(&record.path);
        }
    }
}

/// Removes the records of runs that were killed: they lock nothing.
pub(crate) fn remove_left_behind(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if !entry.file_name().to_string_lossy().starts_with("device-") {
            continue;
        }
        let Ok(file) = File::open(&path) else { continue };
        if try_lock(&file).is_ok_and(|locked| locked) && is_at(&file, &path) {
            let _ = fs::remove_file(&path);
        }
    }
}

fn refused(place: &str, owner: &str) -> LockError {
    LockError(format!("{place}: in use by {owner}; one run at a time measures a device"))
}

/// Opens or makes a file and locks it. None where another process has it locked.
pub(crate) fn create_locked(path: &Path) -> io::Result<Option<File>> {
    for _ in 0..ATTEMPTS {
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)?;
        if !try_lock(&file)? {
            return Ok(None);
        }
        // Its last owner may have removed it after it was opened here.
        if is_at(&file, path) {
            return Ok(Some(file));
        }
    }
    Err(io::Error::other("it is removed again and again"))
}

/// Whether the file is locked now.
pub(crate) fn try_lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether this very file is at the path.
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let (open, there) = (file.metadata().map(identity), fs::metadata(path).map(identity));
    matches!((open, there), (Ok(open), Ok(there)) if open == there)
}

/// The node or file behind a device.
fn node(device: &Device) -> Option<PathBuf> {
    match device.kind {
        Kind::Uri => device.place.strip_prefix("uring:").map(PathBuf::from),
        _ => Some(&device.place).filter(|place| !place.is_empty()).map(PathBuf::from),
    }
}

/// The key of a device of our own that two runs would share: not those that each makes for itself.
fn shared_key(device: &Device) -> Option<String> {
    let own = ["null:", "malloc:", "model:"].iter().any(|scheme| device.place.starts_with(scheme));
    (!own && !device.place.is_empty()).then(|| format!("uri-{}", plain(&device.place)))
}

/// The keys of a node or file. They are equal for two names of one device.
fn keys(node: &Path, host: &Host) -> Vec<String> {
    let mut keys = Vec::new();
    let metadata = fs::metadata(node);
    if let Ok(metadata) = &metadata
        && metadata.file_type().is_block_device()
    {
        let number = metadata.rdev();
        let disk = whole_disk(&format!("{}:{}", major(number), minor(number)), host);
        // What a loop device is attached to is the same bytes.
        let backing = host.text(&format!("sys/dev/block/{disk}/loop/backing_file"));
        keys.push(format!("block-{disk}"));
        keys.extend(backing.and_then(|file| Some(inode_key(&fs::metadata(file).ok()?))));
        return keys;
    }
    // Its place, for the time when it is not there yet.
    let folder = node.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let (Ok(folder), Some(name)) = (fs::metadata(folder), node.file_name()) {
        keys.push(format!("path-{}-{}", inode_key(&folder), plain(&name.to_string_lossy())));
    }
    keys.extend(metadata.ok().map(|metadata| inode_key(&metadata)));
    keys
}

fn inode_key(metadata: &fs::Metadata) -> String {
    format!("inode-{}-{}", metadata.dev(), metadata.ino())
}

/// The device number of the disk that a partition is on, or the number itself.
fn whole_disk(number: &str, host: &Host) -> String {
    let device = host.path(&format!("sys/dev/block/{number}"));
    let disk = fs::canonicalize(&device).ok().filter(|device| device.join("partition").exists());
    let disk = disk.and_then(|device| fs::read_to_string(device.parent()?.join("dev")).ok());
    disk.map_or_else(|| number.to_string(), |text| text.trim().to_string())
}

/// A name that may stand in the name of a file.
fn plain(name: &str) -> String {
    let allowed = |char: char| if char.is_ascii_alphanumeric() || ".:+-".contains(char) { char } else { '_' };
    name.chars().map(allowed).take(KEY_MAX).collect()
}

fn lock_node(node: &Path) -> Result<File, LockError> {
    let failed = |error: io::Error| LockError(format!("{}: {error}", node.display()));
    let file = File::open(node).map_err(failed)?;
    let began = Instant::now();
    // Some file systems have no locks: the records are all there is then.
    while try_lock(&file).is_ok_and(|locked| !locked) {
        if began.elapsed() > WAIT_MAX {
            let owner = lock_owner(&file).map_or("another process".into(), |pid| {
                match fs::read_to_string(format!("/proc/{pid}/comm")) {
                    Ok(name) => format!("process {pid} ({})", name.trim_end()),
                    Err(_) => format!("process {pid}"),
                }
            });
            return Err(refused(&node.display().to_string(), &owner));
        }
        std::thread::sleep(POLL);
    }
    Ok(file)
}

/// Who has a file locked, from `/proc/locks`.
fn lock_owner(file: &File) -> Option<u32> {
    let metadata = file.metadata().ok()?;
    let device = metadata.dev();
    let place = format!("{:02x}:{:02x}:{}", major(device), minor(device), metadata.ino());
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, at, ..] = words.as_slice() else { return None };
        (*at == place).then(|| pid.parse().ok())?
    })
}

#[cfg(test)]
mod tests;
