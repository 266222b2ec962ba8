//! Access to the host system for planning and applying: files to read, and a few to write.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::flock::flock_exclusive;

/// Exclusive access to a device or lock file until drop.
#[derive(Debug)]
pub struct DeviceClaim(#[allow(dead_code, reason = "kept open for its lock")] pub(crate) Option<File>);

/// The files and devices of a system. Paths have no leading `/`. The implementation is [`LinuxHost`]; tests use an
/// in-memory model of the kernel's behaviour.
pub trait HostSystem {
    /// Reads a text file.
    fn read(&self, path: &str) -> io::Result<String>;
    /// Lists the names in a directory, in order.
    fn list(&self, path: &str) -> io::Result<Vec<String>>;
    /// Resolves all symbolic links of a path.
    fn resolve(&self, path: &str) -> io::Result<String>;
    /// Fills `out` from a device, from byte `offset`.
    fn read_device(&self, path: &str, offset: u64, out: &mut [u8]) -> io::Result<()>;
    /// Claims a device exclusively: `EBUSY` if it is in use.
    fn claim(&self, path: &str) -> io::Result<DeviceClaim>;
    /// Writes to an existing sysfs file in one call.
    fn write(&self, path: &str, text: &str) -> io::Result<()>;
    /// Replaces one of our own files atomically; durable on return.
    fn store(&self, path: &str, text: &str) -> io::Result<()>;
    /// Removes one of our own files; succeeds if it does not exist.
    fn remove(&self, path: &str) -> io::Result<()>;
}

/// The running Linux system.
#[derive(Clone, Debug)]
pub struct LinuxHost {
    root: PathBuf,
}

impl Default for LinuxHost {
    fn default() -> Self {
        LinuxHost { root: PathBuf::from("/") }
    }
}

impl LinuxHost {
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Locks a file, created if needed, until the result is dropped, so that only one process changes bindings.
    /// `EBUSY` if another process has the lock.
    pub fn lock(&self, path: &str) -> io::Result<DeviceClaim> {
        let path = self.path(path);
        create_parent_directory(&path)?;
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        flock_exclusive(&file)?;
        Ok(DeviceClaim(Some(file)))
    }
}

/// Maximum size of a text file; `/proc/self/mountinfo` on a system with many containers has a few hundred
/// thousand bytes.
const TEXT_BYTES_MAX: u64 = 16 << 20;

impl HostSystem for LinuxHost {
    fn read(&self, path: &str) -> io::Result<String> {
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut io::Read::take(File::open(self.path(path))?, TEXT_BYTES_MAX), &mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let entries = std::fs::read_dir(self.path(path))?;
        let names: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.file_name())).collect();
        let mut names: Vec<String> = names?.into_iter().filter_map(|name| name.into_string().ok()).collect();
        names.sort();
        Ok(names)
    }

    fn resolve(&self, path: &str) -> io::Result<String> {
        let full = std::fs::canonicalize(self.path(path))?;
        let below = full.strip_prefix(&self.root).unwrap_or(&full);
        below.to_str().map(str::to_string).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn read_device(&self, path: &str, offset: u64, out: &mut [u8]) -> io::Result<()> {
        File::open(self.path(path))?.read_exact_at(out, offset)
    }

    fn claim(&self, path: &str) -> io::Result<DeviceClaim> {
        let flags = libc::O_EXCL | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(self.path(path))?;
        if file.metadata()?.file_type().is_char_device() {
            // VFIO and UIO ignore O_EXCL; this crate locks the node of a function that it has opened, and the
            // kernel rejects a second open of a VFIO group.
            flock_exclusive(&file)?;
        }
        Ok(DeviceClaim(Some(file)))
    }

    fn write(&self, path: &str, text: &str) -> io::Result<()> {
        OpenOptions::new().write(true).open(self.path(path))?.write_at(text.as_bytes(), 0).map(drop)
    }

    fn store(&self, path: &str, text: &str) -> io::Result<()> {
        let path = self.path(path);
        create_parent_directory(&path)?;
        os::replace_file(&path, 0o600, text.as_bytes())
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        match std::fs::remove_file(self.path(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }
}

/// Creates the parent directory of one of our own files.
fn create_parent_directory(path: &Path) -> io::Result<()> {
    std::fs::create_dir_all(path.parent().ok_or(io::ErrorKind::InvalidInput)?)
}
