//! The process at the other end of a UNIX socket.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// A process at the other end of a UNIX socket, as it was when it created that end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process identifier; 0 for a process outside of our namespace.
    pub process_id: u32,
    /// Effective user identifier.
    pub user_id: u32,
    /// Effective group identifier.
    pub group_id: u32,
}

/// The credentials of a UNIX socket's peer (`SO_PEERCRED`).
///
/// # Errors
/// Those of `getsockopt`. For a socket that is not a UNIX socket, the result has no meaning.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<PeerCredentials> {
    // Not rustix's `socket_peercred`: its process identifier must not be 0, which the kernel does return.
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes, the size of the local structure, all of whose bit patterns
    // are valid, and stores the number in `bytes`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut bytes,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let process_id = u32::try_from(credentials.pid).unwrap_or(0);
    Ok(PeerCredentials { process_id, user_id: credentials.uid, group_id: credentials.gid })
}
