//! The RPC socket in the file system: mode 0600, and never replacing the socket of a running server.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

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
        let lock = open_lock(&lock_path).map_err(failed)?;
        if lock.try_lock().is_err() {
            return Err(SocketError::InUse(path.to_path_buf()));
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

/// Opens the lock file with O_NOFOLLOW, against a symbolic link that another user may have made.
fn open_lock(path: &Path) -> io::Result<File> {
    let no_follow = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
    OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).custom_flags(no_follow).open(path)
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
}
