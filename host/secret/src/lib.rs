//! Secrets: bytes that are never printed, compare in constant time, and are wiped when their last owner drops
//! them.
//!
//! A [`Secret`] is made of a value, or read from a file that its owner alone can use ([`Secret::read`]). A
//! [`SecretFileError`] says why a file is refused and what to do. Clones share the bytes.
//!
//! ```
//! use secret::Secret;
//! let path = std::env::temp_dir().join(format!("secret-example-{}", std::process::id()));
//! Secret::new("swordfish").write_new(&path)?;
//! let secret = Secret::read(&path, 64)?;
//! assert_eq!((format!("{secret:?}"), secret.reveal()), ("…".to_string(), &b"swordfish"[..]));
//! # std::fs::remove_file(&path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod file;

use std::fmt;
use std::io;
use std::sync::Arc;

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

pub use file::SecretFileError;

/// Bytes that only [`reveal`](Self::reveal) shows. It has no `Serialize`: what writes one does so in its own
/// words.
///
/// Equality takes the same time whatever differs, but not for different lengths, which are no secret. Wiped
/// is the memory of this value alone: a request from which it came, or a copy that its user makes, is not.
#[derive(Clone)]
pub struct Secret(Arc<Zeroizing<Vec<u8>>>);

impl Secret {
    /// A secret of these bytes. A vector or string becomes the secret itself; others are copied.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Secret {
        Secret(Arc::new(Zeroizing::new(bytes.into())))
    }

    /// A secret that `read` writes to a buffer, of which it returns the number of bytes; `None` if there are
    /// more than `bytes_max`. The buffer has one byte more and is wiped.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn read_with(
        bytes_max: usize,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<Option<Secret>> {
        let mut buffer = Zeroizing::new(vec![0; bytes_max + 1]);
        let count = read(&mut buffer)?;
        Ok((count <= bytes_max).then(|| Secret::new(&buffer[..count])))
    }

    /// The bytes.
    pub fn reveal(&self) -> &[u8] {
        &self.0
    }

    /// The bytes as text; `None` if they are not UTF-8.
    pub fn reveal_text(&self) -> Option<&str> {
        str::from_utf8(&self.0).ok()
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Secret) -> bool {
        self.reveal().ct_eq(other.reveal()).into()
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("…")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("…")
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_secret_is_not_printed_by_itself_or_within_others() {
        #[derive(Debug)]
        struct User {
            _password: Option<Secret>,
        }
        let secret = Secret::new("swordfish");
        let user = User { _password: Some(secret.clone()) };
        let printed = format!("{secret} {secret:?} {secret:#?} {secret:20} {user:?}");
        assert!(!printed.contains("fish") && !printed.contains("115"), "{printed}");
    }

    #[test]
    fn secrets_are_equal_by_their_bytes() {
        let one = Secret::new("swordfish");
        for (other, equal) in [("swordfish", true), ("swordfisH", false), ("swordfis", false), ("", false)] {
            assert_eq!(one == Secret::new(other), equal, "{other}");
        }
        assert_eq!(Secret::new(""), Secret::new(Vec::new()));
        assert_eq!((Secret::new([0xff]).reveal_text(), one.reveal_text()), (None, Some("swordfish")));
    }

    #[test]
    fn a_clone_shares_the_bytes() {
        let secret = Secret::new("swordfish");
        assert!(std::ptr::eq(secret.reveal(), secret.clone().reveal()));
    }

    /// What is in the memory of this process, which need not belong to anything any more.
    #[cfg(not(miri))]
    fn memory_at(address: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        File::open("/proc/self/mem").unwrap().read_exact_at(&mut bytes, address as u64).unwrap();
        bytes
    }

    #[test]
    #[cfg(not(miri))]
    fn the_memory_is_wiped_when_the_last_clone_is_dropped() {
        // So small that the allocator keeps the memory, of which it uses the first bytes itself.
        let pattern: Vec<u8> = (1..=200).collect();
        let has_pattern = |address| {
            memory_at(address, 200).windows(8).any(|part| pattern.windows(8).any(|one| one == part))
        };
        let secret = Secret::new(pattern.clone());
        let address = secret.reveal().as_ptr() as usize;
        let clone = secret.clone();
        drop(secret);
        assert!(has_pattern(address), "a clone is there");
        drop(clone);
        assert!(!has_pattern(address));

        // And so is the buffer of what is read.
        let mut address = 0;
        let secret = Secret::read_with(250, |buffer| {
            buffer[..200].copy_from_slice(&pattern);
            address = buffer.as_ptr() as usize;
            Ok(200)
        });
        assert_eq!(secret.unwrap().unwrap(), Secret::new(pattern.clone()));
        assert!(!has_pattern(address));
    }

    #[test]
    fn what_is_longer_than_the_limit_is_no_secret() {
        let read = |count| Secret::read_with(4, |_| Ok(count)).unwrap().map(|secret| secret.reveal().len());
        assert_eq!([0, 4, 5, 400].map(read), [Some(0), Some(4), None, None]);
    }
}
