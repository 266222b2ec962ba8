//! The key of a cluster.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What all nodes and clients of a cluster know: 32 random bytes. It is never printed.
#[derive(Clone)]
pub struct ClusterKey([u8; 32]);

impl ClusterKey {
    /// A key of these bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> ClusterKey {
        ClusterKey(bytes)
    }

    /// Makes a key, and writes it to a new file that only its owner can read.
    ///
    /// # Errors
    /// `AlreadyExists`, and what the system reports.
    pub fn create(path: &Path) -> io::Result<ClusterKey> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(|_| io::Error::other("the system has no random numbers"))?;
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(text.as_bytes())?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        Ok(ClusterKey(bytes))
    }

    /// Reads the key in a file: 64 hexadecimal digits.
    ///
    /// # Errors
    /// `InvalidData` if it is something else, and what the system reports.
    pub fn load(path: &Path) -> io::Result<ClusterKey> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "a key is 64 hexadecimal digits");
        if fs::metadata(path)?.len() > 128 {
            return Err(invalid());
        }
        let text = fs::read_to_string(path)?;
        let digits = text.trim().as_bytes();
        let mut bytes = [0; 32];
        if digits.len() != 2 * bytes.len() {
            return Err(invalid());
        }
        for (byte, digits) in bytes.iter_mut().zip(digits.chunks(2)) {
            let digits = str::from_utf8(digits).map_err(|_| invalid())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| invalid())?;
        }
        Ok(ClusterKey(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}
