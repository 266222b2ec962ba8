//! Locks that give one run at a time exclusive use of a device.
//!
//! A run takes two locks. The journal directory contains a record for each device, by device number of the whole disk
//! or by inode, so that two names of one device share a record; it is locked as long as the run lives. The node or
//! file is locked too: runs with another journal directory (of another user) respect that, as do programs that follow
//! systemd's convention for block devices. All locks are `flock(2)`; those of a killed run are released by the
//! kernel.
//!
//! A lock belongs to one open file. `ringbolt perf` gets the run's own ([`DeviceLocks::files`]) for the files that it writes,
//! so that no other process can take them in between. The bdev layer, in `ringbolt serve` or `ringbolt perf`, locks what it
//! opens itself: the run releases its lock for the cells of such processes, and takes it again for the next other
//! cell. The records stay locked meanwhile.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock, major, minor};

use crate::devices::{Device, DeviceKind};
use crate::host::HostInfo;
use crate::processes::{ProcessIdentity, start_time};

/// How long another program may hold a node's lock before the run is refused. udev does while it probes a device, and
/// the kernel closes the files of a killed process's io_uring some time after its end.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How often a file may be replaced while it is opened and locked.
const OPEN_ATTEMPTS_MAX: usize = 100;
/// Most characters of a key that contains a name.
const KEY_CHARACTERS_MAX: usize = 200;

/// Why a device cannot be locked, in one line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct LockError(String);

/// The locks of one run; dropping it releases them.
#[derive(Debug)]
pub struct DeviceLocks {
    directory: PathBuf,
    records: Vec<LockRecord>,
    /// Locked nodes and files by path.
    nodes: Vec<(PathBuf, File)>,
}

#[derive(Debug)]
struct LockRecord {
    /// The device as the user named it.
    location: String,
    path: PathBuf,
    /// Locked while it is open.
    _file: File,
}

impl DeviceLocks {
    /// Creates an empty set. Records are files in `directory`, that of the journals.
    pub fn new(directory: &Path) -> DeviceLocks {
        DeviceLocks { directory: directory.to_path_buf(), records: Vec::new(), nodes: Vec::new() }
    }

    /// Locks a device. Called again, it locks what has been created since: the inode of a new file.
    ///
    /// # Errors
    /// The process that has locked it, or the file that cannot be locked.
    pub fn lock(&mut self, device: &Device, host: &HostInfo) -> Result<(), LockError> {
        let Some(node_path) = node_path(device) else {
            return match bdev_key(device) {
                Some(key) => self.record(&key, &device.location),
                None => Ok(()),
            };
        };
        for key in lock_keys(&node_path, host) {
            self.record(&key, &device.location)?;
        }
        // The bdev layer locks the node of a bdev when it opens it.
        if device.kind != DeviceKind::Uri && node_path.exists() {
            self.lock_node(node_path)?;
        }
        Ok(())
    }

    /// Locks the nodes of these devices again after [`DeviceLocks::close_nodes`].
    ///
    /// # Errors
    /// The process that has locked one of them.
    pub(crate) fn reopen_nodes(&mut self, devices: &[Device]) -> Result<(), LockError> {
        let nodes = devices.iter().filter(|device| device.kind != DeviceKind::Uri).filter_map(node_path);
        nodes.filter(|node_path| node_path.exists()).try_for_each(|node_path| self.lock_node(node_path))
    }

    fn lock_node(&mut self, node_path: PathBuf) -> Result<(), LockError> {
        if !self.nodes.iter().any(|(known, _)| *known == node_path) {
            let file = lock_node(&node_path)?;
            self.nodes.push((node_path, file));
        }
        Ok(())
    }

    /// Unlocks the nodes and keeps the records: an open loop device cannot be detached, and the bdev layer locks
    /// nodes itself.
    pub fn close_nodes(&mut self) {
        self.nodes.clear();
    }

    /// The locked regular files and block devices, for processes that share the locks: while one has its copy, the lock
    /// stays.
    ///
    /// # Errors
    /// Too many open files.
    pub fn files(&self) -> io::Result<Vec<File>> {
        let is_shared = |file: &&File| {
            let kind = file.metadata().map(|metadata| metadata.file_type());
            kind.is_ok_and(|kind| kind.is_file() || kind.is_block_device())
        };
        self.nodes.iter().map(|(_, file)| file).filter(is_shared).map(File::try_clone).collect()
    }

    fn record(&mut self, key: &str, location: &str) -> Result<(), LockError> {
        let path = self.directory.join(format!("device-{key}"));
        if let Some(known) = self.records.iter().find(|record| record.path == path) {
            if known.location == location {
                return Ok(());
            }
            return Err(LockError(format!("{location}: the same device as {}", known.location)));
        }
        let failed = |error: io::Error| LockError(format!("{}: {error}", path.display()));
        fs::create_dir_all(&self.directory).map_err(failed)?;
        let Some(mut file) = create_locked(&path).map_err(failed)? else {
            let owner =
                fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<ProcessIdentity>(&bytes).ok());
            let owner = owner
                .map_or("another process".into(), |one| format!("process {} ({})", one.pid, one.program));
            return Err(in_use_error(location, &owner));
        };
        let pid = std::process::id();
        let arguments: Vec<String> = std::env::args().collect();
        let own = ProcessIdentity {
            pid,
            started: start_time(pid).unwrap_or_default(),
            program: arguments.join(" "),
        };
        let written = serde_json::to_vec(&own).map_err(io::Error::from).and_then(|bytes| {
            file.set_len(0)?;
            file.write_all(&bytes)
        });
        if let Err(error) = written {
            let _ = fs::remove_file(&path);
            return Err(failed(error));
        }
        self.records.push(LockRecord { location: location.to_string(), path, _file: file });
        Ok(())
    }
}

impl Drop for DeviceLocks {
    fn drop(&mut self) {
        for record in &self.records {
            // Removed while still locked: a waiting process finds that its file is no longer at the path.
            let _ = fs::remove_file(&record.path);
        }
    }
}

/// Removes the records of killed runs, which are not locked.
pub(crate) fn remove_stale_records(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if !entry.file_name().to_string_lossy().starts_with("device-") {
            continue;
        }
        let Ok(file) = File::open(&path) else { continue };
        if try_lock(&file).is_ok_and(|locked| locked) && is_same_file(&file, &path) {
            let _ = fs::remove_file(&path);
        }
    }
}

fn in_use_error(location: &str, owner: &str) -> LockError {
    LockError(format!("{location}: in use by {owner}; one run at a time measures a device"))
}

/// Opens or creates a file and locks it; `None` if another process has locked it.
pub(crate) fn create_locked(path: &Path) -> io::Result<Option<File>> {
    for _ in 0..OPEN_ATTEMPTS_MAX {
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)?;
        if !try_lock(&file)? {
            return Ok(None);
        }
        // Its previous owner may have removed it after it was opened.
        if is_same_file(&file, path) {
            return Ok(Some(file));
        }
    }
    Err(io::Error::other("another process keeps removing it"))
}

/// Tries to lock a file; false if another process has locked it.
pub(crate) fn try_lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether the open file is the one at the path.
pub(crate) fn is_same_file(file: &File, path: &Path) -> bool {
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let (open, there) = (file.metadata().map(identity), fs::metadata(path).map(identity));
    matches!((open, there), (Ok(open), Ok(there)) if open == there)
}

/// The node or file of a device; `None` for a bdev without one.
fn node_path(device: &Device) -> Option<PathBuf> {
    match device.kind {
        DeviceKind::Uri => device.location.strip_prefix("uring:").map(PathBuf::from),
        _ => Some(&device.location).filter(|location| !location.is_empty()).map(PathBuf::from),
    }
}

/// The key of a bdev without a node that two runs would share; `None` for one that each run creates.
fn bdev_key(device: &Device) -> Option<String> {
    let own = ["null:", "malloc:", "model:"].iter().any(|scheme| device.location.starts_with(scheme));
    (!own && !device.location.is_empty()).then(|| format!("uri-{}", sanitize(&device.location)))
}

/// The keys of a node or file, equal for two names of one device.
fn lock_keys(node_path: &Path, host: &HostInfo) -> Vec<String> {
    let mut lock_keys = Vec::new();
    let metadata = fs::metadata(node_path);
    if let Ok(metadata) = &metadata
        && metadata.file_type().is_block_device()
    {
        let number = metadata.rdev();
        let disk = whole_disk(&format!("{}:{}", major(number), minor(number)), host);
        // A loop device shares the bytes of its file.
        let backing = host.text(&format!("sys/dev/block/{disk}/loop/backing_file"));
        lock_keys.push(format!("block-{disk}"));
        lock_keys.extend(backing.and_then(|file| Some(inode_key(&fs::metadata(file).ok()?))));
        return lock_keys;
    }
    // A file that does not exist yet is locked by directory and name.
    let folder = node_path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let (Ok(folder), Some(name)) = (fs::metadata(folder), node_path.file_name()) {
        lock_keys.push(format!("path-{}-{}", inode_key(&folder), sanitize(&name.to_string_lossy())));
    }
    lock_keys.extend(metadata.ok().map(|metadata| inode_key(&metadata)));
    lock_keys
}

fn inode_key(metadata: &fs::Metadata) -> String {
    format!("inode-{}-{}", metadata.dev(), metadata.ino())
}

/// The device number of a partition's disk, or the number itself.
fn whole_disk(number: &str, host: &HostInfo) -> String {
    let device = host.path(&format!("sys/dev/block/{number}"));
    let disk = fs::canonicalize(&device).ok().filter(|device| device.join("partition").exists());
    let disk = disk.and_then(|device| fs::read_to_string(device.parent()?.join("dev")).ok());
    disk.map_or_else(|| number.to_string(), |text| text.trim().to_string())
}

/// Replaces characters that a file name should not contain.
fn sanitize(name: &str) -> String {
    let allowed = |char: char| if char.is_ascii_alphanumeric() || ".:+-".contains(char) { char } else { '_' };
    name.chars().map(allowed).take(KEY_CHARACTERS_MAX).collect()
}

fn lock_node(node_path: &Path) -> Result<File, LockError> {
    let failed = |error: io::Error| LockError(format!("{}: {error}", node_path.display()));
    let file = File::open(node_path).map_err(failed)?;
    let began = Instant::now();
    // On a file system without locks, the records alone protect the device.
    while try_lock(&file).is_ok_and(|locked| !locked) {
        if began.elapsed() > LOCK_TIMEOUT {
            let owner = lock_owner(&file).map_or("another process".into(), |pid| {
                match fs::read_to_string(format!("/proc/{pid}/comm")) {
                    Ok(name) => format!("process {pid} ({})", name.trim_end()),
                    Err(_) => format!("process {pid}"),
                }
            });
            return Err(in_use_error(&node_path.display().to_string(), &owner));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(file)
}

/// The process that has locked a file, according to `/proc/locks`.
fn lock_owner(file: &File) -> Option<u32> {
    let metadata = file.metadata().ok()?;
    let device = metadata.dev();
    let location = format!("{:02x}:{:02x}:{}", major(device), minor(device), metadata.ino());
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, inode, ..] = fields.as_slice() else { return None };
        (*inode == location).then(|| pid.parse().ok())?
    })
}

#[cfg(test)]
mod tests;
