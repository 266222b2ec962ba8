//! Keys that the kernel keeps (`keyrings(7)`).

use std::ffi::CString;
use std::io;

/// The type of keys whose payload a program can read.
const USER_KEY: &std::ffi::CStr = c"user";
/// `KEY_SPEC_SESSION_KEYRING` of `linux/keyctl.h`; the user's session keyring for a process that has none of
/// its own.
const SESSION_KEYRING: libc::c_long = -3;
/// `KEYCTL_*` of the same file.
const UNLINK: libc::c_long = 9;
const SEARCH: libc::c_long = 10;
const READ: libc::c_long = 11;

/// A key of the type `user` in this process's session keyring, or in a keyring that is linked to it. The
/// kernel's `user` keys have at most 32767 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelKey(libc::c_long);

impl KernelKey {
    /// Finds the key with this description. No program is asked to make one.
    ///
    /// # Errors
    /// `ENOKEY` if there is none, `EKEYEXPIRED` and `EKEYREVOKED`, `EACCES` without the right to search,
    /// `ENOSYS` of a kernel without keyrings, `EPERM` where a sandbox refuses the call; `InvalidInput` for a
    /// name with a NUL.
    pub fn find(description: &str) -> io::Result<KernelKey> {
        let description = CString::new(description)?;
        // SAFETY: both texts end with a NUL and live until the call returns; the other arguments are
        // integers.
        let result = unsafe {
            libc::syscall(
                libc::SYS_keyctl,
                SEARCH,
                SESSION_KEYRING,
                USER_KEY.as_ptr(),
                description.as_ptr(),
                0 as libc::c_long,
            )
        };
        checked(result).map(KernelKey)
    }

    /// Adds a key to the session keyring, or changes the one of this description.
    ///
    /// # Errors
    /// `EDQUOT` at the user's limit, `EINVAL` without a byte or with more than 32767, `ENOSYS`, `EPERM`;
    /// `InvalidInput` for a name with a NUL.
    pub fn add(description: &str, payload: &[u8]) -> io::Result<KernelKey> {
        let description = CString::new(description)?;
        // SAFETY: both texts end with a NUL, the kernel reads as many bytes as `payload` has, and all live
        // until the call returns.
        let result = unsafe {
            libc::syscall(
                libc::SYS_add_key,
                USER_KEY.as_ptr(),
                description.as_ptr(),
                payload.as_ptr(),
                payload.len(),
                SESSION_KEYRING,
            )
        };
        checked(result).map(KernelKey)
    }

    /// Reads the payload. Returns its length; what is longer than the buffer is not written to it, or in
    /// part.
    ///
    /// # Errors
    /// As [`find`](Self::find) if the key has ended since; `EACCES` without the right to read it.
    pub fn read(self, buffer: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the kernel writes at most as many bytes as the buffer has, which is borrowed until the call
        // returns.
        let result = unsafe {
            libc::syscall(
                libc::SYS_keyctl,
                READ,
                self.0,
                buffer.as_mut_ptr(),
                buffer.len(),
                0 as libc::c_long,
            )
        };
        checked(result).map(|count| count as usize)
    }

    /// Removes it from the session keyring.
    ///
    /// # Errors
    /// `ENOENT` if it is not in it, and as [`find`](Self::find).
    pub fn unlink(self) -> io::Result<()> {
        // SAFETY: the arguments are integers.
        let result = unsafe { libc::syscall(libc::SYS_keyctl, UNLINK, self.0, SESSION_KEYRING) };
        checked(result).map(drop)
    }

    /// The kernel's number of it.
    pub fn serial(self) -> u32 {
        self.0 as u32
    }
}

fn checked(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no keyrings")]
    fn a_key_of_the_session_is_found_by_its_name_until_it_is_removed() {
        let name = format!("ringbolt-kernel-key-{}", std::process::id());
        let errno = |result: io::Result<KernelKey>| result.err().and_then(|error| error.raw_os_error());
        if matches!(errno(KernelKey::find(&name)), Some(libc::ENOSYS | libc::EPERM)) {
            println!("skipped: there are no keyrings here");
            return;
        }
        assert_eq!(errno(KernelKey::find(&name)), Some(libc::ENOKEY));
        let added = KernelKey::add(&name, b"swordfish").unwrap();
        let key = KernelKey::find(&name).unwrap();
        assert_eq!((key, key.serial()), (added, added.serial()));
        let mut buffer = [0; 16];
        assert_eq!(key.read(&mut buffer).unwrap(), 9);
        assert_eq!(&buffer[..10], b"swordfish\0");
        // Longer than the buffer: its length is returned, and nothing is written behind the end.
        let mut short = [0; 4];
        assert_eq!(key.read(&mut short).unwrap(), 9);
        assert_eq!(KernelKey::add(&name, b"other").unwrap(), key);
        assert_eq!(key.read(&mut buffer).unwrap(), 5);
        key.unlink().unwrap();
        assert_eq!(errno(KernelKey::find(&name)), Some(libc::ENOKEY));
        assert_eq!(KernelKey::find("a\0b").unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
