//! The key of a cluster.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Most bytes of a key's file.
const FILE_BYTES_MAX: u64 = 128;

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
    /// `InvalidData` if it is something else, `PermissionDenied` if others than its owner may use the file, and what the
    /// system reports.
    pub fn load(path: &Path) -> io::Result<ClusterKey> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "a key is 64 hexadecimal digits");
        let text = read_private(path)?.ok_or_else(invalid)?;
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

/// The text of a file that its owner alone can use; `None` if it is too long or no text.
fn read_private(path: &Path) -> io::Result<Option<String>> {
    // Looked at before it is opened: opening a FIFO would wait for a writer.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file"));
    }
    let file = File::open(path)?;
    let mode = file.metadata()?.mode();
    if mode & 0o077 != 0 {
        let reason = format!("others than its owner may use it, mode {:03o}: chmod 600", mode & 0o777);
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok(String::from_utf8(bytes).ok().filter(|text| text.len() as u64 <= FILE_BYTES_MAX))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_key_that_others_may_use_is_refused() {
        let path = std::env::temp_dir().join(format!("ringbolt-key-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        let key = ClusterKey::create(&path).unwrap();
        assert_eq!(ClusterKey::load(&path).unwrap().bytes(), key.bytes());
        for mode in [0o644, 0o640, 0o601] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = ClusterKey::load(&path).map(drop).unwrap_err().to_string();
            assert_eq!(error, format!("others than its owner may use it, mode {mode:03o}: chmod 600"));
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        ClusterKey::load(&path).unwrap();
        fs::remove_file(&path).unwrap();
        // What is no file has no end, perhaps.
        let error = ClusterKey::load(Path::new("/dev/zero")).map(drop).unwrap_err().to_string();
        assert_eq!(error, "it is not a regular file");
    }
}
