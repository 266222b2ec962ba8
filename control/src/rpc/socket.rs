//! The RPC socket in the file system: mode 0600, and never replacing the socket of a running server.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// Connections that may wait until one of the server's ends; the kernel's net.core.somaxconn is a limit too.
/// A client that does not wait itself, as Python's with a time-out, fails beyond.
const BACKLOG: i32 = 4096;

/// A listening socket. Its file is removed when it is dropped.
pub struct ListenSocket {
    pub(crate) listener: UnixListener,
    path: PathBuf,
    /// The device and inode of its file.
    identity: (u64, u64),
    lock_path: PathBuf,
    /// Holds the file lock as long as the socket exists.
    _lock: File,
}

/// Why a socket cannot be bound.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A running process answers on it.
    #[error("{}: another process answers on this socket; stop it, or name another with --rpc-socket", .0.display())]
    InUse(PathBuf),
    /// Another kind of file is there.
    #[error("{}: exists and is not a socket; remove it, or name another with --rpc-socket", .0.display())]
    NotASocket(PathBuf),
    /// The lock file beside it is locked by another process, whose socket is not there.
    #[error(
        "{}: another process has locked this file; stop it, or name another socket with --rpc-socket",
        .0.display()
    )]
    Locked(PathBuf),
    /// The lock file beside it is not one of this program's.
    #[error("{}: {why}; remove it, or name another socket with --rpc-socket", path.display())]
    NotALockFile {
        /// The lock file.
        path: PathBuf,
        /// What it is.
        why: &'static str,
    },
    /// The file system refuses.
    #[error("{}: {source}; name another place with --rpc-socket", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl ListenSocket {
    /// Listens at `path` with mode 0600. Replaces a socket that refuses connections; anything else at
    /// `path` is an error.
    pub fn bind(path: &Path) -> Result<ListenSocket, SocketError> {
        let failed = |source: io::Error| SocketError::Io { path: path.to_path_buf(), source };
        let lock_path = with_suffix(path, ".lock");
        let lock = open_lock(&lock_path)?;
        if lock.try_lock().is_err() {
            let answers = UnixStream::connect(path).is_ok();
            return Err(if answers {
                SocketError::InUse(path.into())
            } else {
                SocketError::Locked(lock_path)
            });
        }
        check_free(path)?;
        // Bound in a private directory, set to mode 0600, then renamed into place: at no moment can
        // another user connect.
        let private_dir = with_suffix(path, &format!(".{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&private_dir).map_err(failed)?;
        let temporary = private_dir.join("s");
        let listener = UnixListener::bind(&temporary).and_then(|listener| {
            rustix::net::listen(&listener, BACKLOG)?;
            fs::set_permissions(&temporary, Permissions::from_mode(0o600))?;
            fs::rename(&temporary, path)?;
            Ok(listener)
        });
        let _ = fs::remove_file(&temporary);
        let _ = fs::remove_dir(&private_dir);
        let listener = listener.map_err(failed)?;
        let identity = identity(path).map_err(failed)?;
        Ok(ListenSocket { listener, path: path.to_path_buf(), identity, lock_path, _lock: lock })
    }

    /// Where it is in the file system.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ListenSocket {
    fn drop(&mut self) {
        // If its directory was moved, another process may have the path.
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = fs::remove_file(&self.path);
            let _ = fs::remove_file(&self.lock_path);
        }
    }
}

/// The device and inode of a file.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Opens the lock file. In a directory for everybody, as `/tmp`, another user may have made it: a symbolic
/// link is not followed, a FIFO does not keep this waiting for its other end, and a file of theirs is
/// refused, as they could hold its lock.
fn open_lock(path: &Path) -> Result<File, SocketError> {
    use rustix::fs::OFlags;
    let refused = |why| SocketError::NotALockFile { path: path.to_path_buf(), why };
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600).custom_flags(flags);
    let file =
        options.open(path).map_err(|source| match source.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::LOOP | Errno::NXIO | Errno::ISDIR) => refused("exists and is not a regular file"),
            _ => SocketError::Io { path: path.to_path_buf(), source },
        })?;
    let metadata = file.metadata().map_err(|source| SocketError::Io { path: path.to_path_buf(), source })?;
    if !metadata.is_file() {
        return Err(refused("exists and is not a regular file"));
    }
    is_trusted(metadata.uid(), rustix::process::geteuid().as_raw())
        .then_some(file)
        .ok_or_else(|| refused("belongs to another user"))
}

/// Whether a program of `user` may use the lock file of `owner`: its own, or root's.
fn is_trusted(owner: u32, user: u32) -> bool {
    owner == user || owner == 0
}

fn check_free(path: &Path) -> Result<(), SocketError> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(SocketError::Io { path: path.to_path_buf(), source }),
        Ok(metadata) => metadata,
    };
    if !metadata.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.to_path_buf()));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(()),
        Ok(_) => Err(SocketError::InUse(path.to_path_buf())),
        Err(source) => Err(SocketError::Io { path: path.to_path_buf(), source }),
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(suffix);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket_path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("ringbolt-{name}-{}.sock", std::process::id()))
    }

    #[test]
    fn the_socket_has_mode_0600_and_is_removed_with_the_server() {
        let path = socket_path("owner");
        let socket = ListenSocket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(UnixStream::connect(&path).is_ok());
        drop(socket);
        assert!(!path.exists() && !with_suffix(&path, ".lock").exists());
    }

    #[test]
    fn the_socket_of_another_process_at_the_same_path_stays() {
        let directory = std::env::temp_dir().join(format!("ringbolt-moved-{}", std::process::id()));
        let moved = directory.with_extension("old");
        fs::create_dir(&directory).unwrap();
        let path = directory.join("rpc.sock");
        let first = ListenSocket::bind(&path).unwrap();
        fs::rename(&directory, &moved).unwrap();
        fs::create_dir(&directory).unwrap();
        let second = ListenSocket::bind(&path).unwrap();
        drop(first);
        assert!(UnixStream::connect(&path).is_ok());
        drop(second);
        assert!(!path.exists());
        fs::remove_dir_all(directory).unwrap();
        fs::remove_dir_all(moved).unwrap();
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let path = socket_path("stale");
        drop(UnixListener::bind(&path).unwrap());
        let socket = ListenSocket::bind(&path).unwrap();
        assert!(matches!(ListenSocket::bind(&path), Err(SocketError::InUse(_))));
        drop(socket);
        let foreign = UnixListener::bind(&path).unwrap();
        assert!(matches!(ListenSocket::bind(&path), Err(SocketError::InUse(_))));
        drop(foreign);
        fs::remove_file(&path).unwrap();
        let _ = fs::remove_file(with_suffix(&path, ".lock"));
    }

    #[test]
    fn a_file_that_is_not_a_socket_is_kept() {
        let path = socket_path("file");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(ListenSocket::bind(&path), Err(SocketError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        fs::remove_file(&path).unwrap();
        let _ = fs::remove_file(with_suffix(&path, ".lock"));
    }

    #[test]
    fn a_lock_file_of_another_kind_is_refused_at_once() {
        let path = socket_path("fifo");
        let lock_path = with_suffix(&path, ".lock");
        let make_fifo = |path: &Path| {
            let mode = rustix::fs::Mode::from_raw_mode(0o600);
            rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        };
        let error = || ListenSocket::bind(&path).map(drop).unwrap_err().to_string();
        let expected = format!("{}: exists and is not a regular file; remove it", lock_path.display());
        make_fifo(&lock_path);
        assert!(error().starts_with(&expected), "{}", error());
        // With a reader it can be opened.
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let reader = OpenOptions::new().read(true).custom_flags(flags).open(&lock_path).unwrap();
        assert!(error().starts_with(&expected), "{}", error());
        drop(reader);
        fs::remove_file(&lock_path).unwrap();
        std::os::unix::fs::symlink("/dev/null", &lock_path).unwrap();
        assert!(error().starts_with(&expected), "{}", error());
        fs::remove_file(&lock_path).unwrap();
        assert!(is_trusted(7, 7) && is_trusted(0, 7) && !is_trusted(7, 8) && !is_trusted(7, 0));
    }

    #[test]
    fn a_lock_without_a_socket_is_named() {
        let path = socket_path("locked");
        let lock_path = with_suffix(&path, ".lock");
        let holder = open_lock(&lock_path).unwrap();
        holder.try_lock().unwrap();
        let error = ListenSocket::bind(&path).map(drop).unwrap_err();
        assert!(matches!(&error, SocketError::Locked(locked) if *locked == lock_path), "{error}");
        fs::remove_file(&lock_path).unwrap();
    }
}
