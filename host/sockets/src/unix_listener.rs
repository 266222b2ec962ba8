//! A listening UNIX socket and its file.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use crate::{SocketStream, StreamAddress, stream};

/// A UNIX socket that listens at a path. Dropping it removes the file, unless another file has taken its place.
///
/// A socket at the path that refuses connections is stale and is replaced, under a lock of the directory, which takes
/// permission to read it; anything else there is an error. The file appears at the path with its final mode and only
/// when connections are accepted, so that no other user can connect too early and no other process takes it for stale.
#[derive(Debug)]
pub struct UnixListenSocket {
    socket: OwnedFd,
    path: PathBuf,
    identity: FileIdentity,
}

/// Device and inode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileIdentity(u64, u64);

/// Attempts to find an unused name, and to replace a stale socket while other processes do the same.
const ATTEMPTS_MAX: u32 = 16;

/// With the interval, 2 s of attempts to lock a directory.
const LOCK_ATTEMPTS_MAX: u32 = 400;
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);

impl UnixListenSocket {
    /// Listens at `path` with an accept queue of `backlog` connections. `mode` are the permission bits of the
    /// file; to connect, a process needs write permission.
    ///
    /// The directory's path has at most 90 bytes or so: the socket is bound to a temporary name there at first.
    ///
    /// # Errors
    /// `AddrInUse` if a process listens there, `AlreadyExists` if the file is not a socket, `InvalidFilename` if the
    /// path is too long for an address, and those of the file system.
    pub fn bind(path: &Path, mode: u32, backlog: i32) -> io::Result<UnixListenSocket> {
        // Only the temporary name is bound, but clients use this one.
        SocketAddrUnix::new(path)?;
        let socket = stream::open(&StreamAddress::Unix(path.to_path_buf()))?;
        // Linux gives the file the mode of the socket's inode, less the umask: it never has other permissions.
        let mode = mode & 0o777;
        rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
        let temporary = TemporaryName(bind_temporary(&socket, path)?);
        fs::set_permissions(&temporary.0, fs::Permissions::from_mode(mode))?;
        rustix::net::listen(&socket, backlog)?;
        let identity = FileIdentity::of(&temporary.0)?;
        for _ in 0..ATTEMPTS_MAX {
            // A link, unlike a rename, fails if there is a file.
            match fs::hard_link(&temporary.0, path) {
                Ok(()) => return Ok(UnixListenSocket { socket, path: path.to_path_buf(), identity }),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => remove_stale(path)?,
                Err(error) => return Err(error),
            }
        }
        Err(ErrorKind::AddrInUse.into())
    }

    /// Accepts a connection as a non-blocking stream; `None` if none is waiting.
    ///
    /// # Errors
    /// See `accept(2)`. The connection stays in the queue after `EMFILE` and `ENFILE`.
    pub fn accept(&self) -> io::Result<Option<SocketStream>> {
        loop {
            return match stream::accept(self.socket.as_fd()) {
                Ok((stream, _)) => Ok(Some(stream)),
                Err(Errno::AGAIN) => Ok(None),
                Err(Errno::INTR) => continue,
                Err(error) => Err(error.into()),
            };
        }
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for UnixListenSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for UnixListenSocket {
    fn drop(&mut self) {
        if FileIdentity::of(&self.path).is_ok_and(|identity| identity == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl FileIdentity {
    fn of(path: &Path) -> io::Result<FileIdentity> {
        fs::symlink_metadata(path).map(|metadata| FileIdentity(metadata.dev(), metadata.ino()))
    }
}

/// A name that is removed on drop.
struct TemporaryName(PathBuf);

impl Drop for TemporaryName {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Binds the socket to an unused name in the directory of `path`.
fn bind_temporary(socket: &OwnedFd, path: &Path) -> io::Result<PathBuf> {
    for _ in 0..ATTEMPTS_MAX {
        let name = temporary_name(path);
        match rustix::net::bind(socket, &SocketAddrUnix::new(name.as_path())?) {
            Ok(()) => return Ok(name),
            // Left behind by a process that was killed, in a namespace where it had our process identifier.
            Err(Errno::ADDRINUSE) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(ErrorKind::AddrInUse.into())
}

fn temporary_name(path: &Path) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    path.with_file_name(format!(".{:x}.{:x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// Removes the socket at `path` if it refuses connections.
fn remove_stale(path: &Path) -> io::Result<()> {
    // Until the removal no other process may remove the socket and link its own, which would be removed instead.
    let _lock = lock_directory_of(path)?;
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    if !metadata.file_type().is_socket() {
        let what = format!("'{}' exists and is not a socket", path.display());
        return Err(io::Error::new(ErrorKind::AlreadyExists, what));
    }
    match stream::connect(&StreamAddress::Unix(path.to_path_buf())) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        // WouldBlock: its accept queue is full.
        Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error),
        Ok(_) | Err(_) => {
            let what = format!("another process listens on '{}'", path.display());
            return Err(io::Error::new(ErrorKind::AddrInUse, what));
        }
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Locks the directory of `path` by `flock(2)`; dropping the file unlocks it.
///
/// Other programs lock directories for long, so the wait is bounded. `flock` has no time-out, hence the sleep.
fn lock_directory_of(path: &Path) -> io::Result<fs::File> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = fs::File::open(parent)?;
    for _ in 0..LOCK_ATTEMPTS_MAX {
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(directory),
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(LOCK_RETRY_INTERVAL),
            Err(error) => return Err(error.into()),
        }
    }
    let what = format!(
        "'{}' is locked by another process (flock): end it, or choose another directory",
        parent.display()
    );
    Err(io::Error::new(ErrorKind::AddrInUse, what))
}
