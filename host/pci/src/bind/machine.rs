//! The machine as planning and applying see it: files to read, and a few to write.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

/// A device that nobody else can claim while the value lives.
#[derive(Debug)]
pub struct Claim(#[allow(dead_code, reason = "it is held, not used")] pub(crate) Option<File>);

/// What is read and written. Paths have no leading `/`. The real one is [`Host`]; tests have another,
/// in memory, that behaves as the kernel does.
pub trait Machine {
    /// A file's text.
    fn read(&self, path: &str) -> io::Result<String>;
    /// The names in a folder, in order.
    fn list(&self, path: &str) -> io::Result<Vec<String>>;
    /// The path that is meant, with every link followed.
    fn resolve(&self, path: &str) -> io::Result<String>;
    /// Fills `out` from a device.
    fn read_device(&self, path: &str, offset: u64, out: &mut [u8]) -> io::Result<()>;
    /// Claims a device: `EBUSY` while anyone has it.
    fn claim(&self, path: &str) -> io::Result<Claim>;
    /// Writes to a file of the kernel's, which must exist, in one piece.
    fn write(&self, path: &str, text: &str) -> io::Result<()>;
    /// Replaces a file of ours: whole or not at all, and on return durable.
    fn store(&self, path: &str, text: &str) -> io::Result<()>;
    /// Removes a file of ours; it may be gone already.
    fn remove(&self, path: &str) -> io::Result<()>;
}

/// This machine.
#[derive(Clone, Debug)]
pub struct Host {
    root: PathBuf,
}

impl Default for Host {
    fn default() -> Self {
        Host { root: PathBuf::from("/") }
    }
}

impl Host {
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Makes sure that only one process changes bindings: holds the lock file until it is dropped.
    /// `EBUSY` while another one does.
    pub fn lock(&self, path: &str) -> io::Result<Claim> {
        let path = self.path(path);
        make_folder(&path)?;
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        flock(&file)?;
        Ok(Claim(Some(file)))
    }
}

/// Most bytes of a file that is read as text; `/proc/self/mountinfo` of a machine with many containers
/// has a few hundred thousand.
const TEXT_BYTES_MAX: u64 = 16 << 20;

impl Machine for Host {
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

    fn claim(&self, path: &str) -> io::Result<Claim> {
        let flags = libc::O_EXCL | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(self.path(path))?;
        if file.metadata()?.file_type().is_char_device() {
            // O_EXCL means nothing to VFIO and UIO; this crate locks the node of a function that it has
            // opened, and the kernel refuses a second open of a VFIO group by itself.
            flock(&file)?;
        }
        Ok(Claim(Some(file)))
    }

    fn write(&self, path: &str, text: &str) -> io::Result<()> {
        OpenOptions::new().write(true).open(self.path(path))?.write_at(text.as_bytes(), 0).map(drop)
    }

    fn store(&self, path: &str, text: &str) -> io::Result<()> {
        let path = self.path(path);
        make_folder(&path)?;
        sys::replace_file(&path, text.as_bytes())
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        match std::fs::remove_file(self.path(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }
}

/// Makes the folder of a file of ours.
fn make_folder(path: &Path) -> io::Result<()> {
    std::fs::create_dir_all(path.parent().ok_or(io::ErrorKind::InvalidInput)?)
}

fn flock(file: &File) -> io::Result<()> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(io::Error::from_raw_os_error(libc::EBUSY)),
        done => Ok(done?),
    }
}
