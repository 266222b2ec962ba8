//! The priority of a socket's packets (`SO_PRIORITY` of `socket(7)`).

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};

/// Sets the priority of a socket's packets, which queueing disciplines of the kernel use. To set the type of
/// service afterwards changes it.
///
/// # Errors
/// `EPERM` above 6 without `CAP_NET_ADMIN`.
pub fn set_socket_priority(socket: impl AsFd, priority: u32) -> io::Result<()> {
    let value = priority as libc::c_int;
    // SAFETY: the kernel reads an integer of this size from `value`, which lives until the call returns.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PRIORITY,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The priority of a socket's packets.
///
/// # Errors
/// It is no socket.
pub fn socket_priority(socket: impl AsFd) -> io::Result<u32> {
    let (mut value, mut length) = (0 as libc::c_int, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the kernel writes an integer of this size to `value` at most, and its size to `length`; both
    // live until the call returns.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PRIORITY,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(value as u32) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement the option of sockets")]
    fn a_priority_is_set_and_what_is_no_socket_has_none() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(socket_priority(&socket).unwrap(), 0);
        set_socket_priority(&socket, 6).unwrap();
        assert_eq!(socket_priority(&socket).unwrap(), 6);
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(set_socket_priority(&file, 1).unwrap_err().raw_os_error(), Some(libc::ENOTSOCK));
        assert!(socket_priority(&file).is_err());
    }
}
