//! Exclusive locks of device nodes and of our own files.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// Locks an open file with `flock` until it is closed; `EBUSY` if it is locked already. It excludes only processes that
/// lock the file as well, which is needed where the kernel allows several opens.
pub(crate) fn flock_exclusive(file: impl AsFd) -> io::Result<()> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(io::Error::from_raw_os_error(libc::EBUSY)),
        done => Ok(done?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_locked_is_busy_until_it_is_closed() {
        let path = std::env::temp_dir().join(format!("ringbolt-flock-{}", std::process::id()));
        let open = || std::fs::OpenOptions::new().create(true).append(true).open(&path).unwrap();
        let first = open();
        flock_exclusive(&first).unwrap();
        assert_eq!(flock_exclusive(open()).unwrap_err().raw_os_error(), Some(libc::EBUSY));
        drop(first);
        flock_exclusive(open()).unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}
