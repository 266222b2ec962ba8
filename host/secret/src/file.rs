//! Files of secrets: which are refused, and what to do then.

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use crate::Secret;

/// Why a file is not taken for a secret. Each says what to do; none has a byte of the file.
#[derive(Debug, thiserror::Error)]
pub enum SecretFileError {
    /// The system does not read it.
    #[error("{0}")]
    System(#[from] io::Error),
    /// It is of this kind.
    #[error("it is not a regular file, but a {0}: name a file that has only the secret")]
    NotRegular(&'static str),
    /// Its mode, of which bits for group and others are set.
    #[error("others than its owner may use it, mode {0:03o}: chmod 600")]
    Mode(u32),
    /// It is neither of the user of this process nor of root.
    #[error("it belongs to user {owner}, who could replace it: chown {user}")]
    Owner {
        /// Who it belongs to.
        owner: u32,
        /// The effective user of this process.
        user: u32,
    },
    /// It has more bytes than this limit.
    #[error("it has more than {0} bytes, and is to have only the secret")]
    TooLarge(usize),
    /// It has no byte.
    #[error("it is empty, and is to have the secret")]
    Empty,
}

impl From<SecretFileError> for io::Error {
    fn from(error: SecretFileError) -> io::Error {
        let kind = match error {
            SecretFileError::System(error) => return error,
            SecretFileError::Mode(_) | SecretFileError::Owner { .. } => io::ErrorKind::PermissionDenied,
            _ => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, error.to_string())
    }
}

impl Secret {
    /// Reads a regular file of 1 to `bytes_max` bytes, with its line end if it has one. It belongs to the
    /// effective user of this process or to root, and group and others have no right on it. To be called
    /// without a lock: a file system may be slow.
    ///
    /// # Errors
    /// [`SecretFileError`], whose text does not name the file.
    pub fn read(path: &Path, bytes_max: usize) -> Result<Secret, SecretFileError> {
        // Looked at before it is opened, which has effects on some devices. A link is followed, as secrets
        // that are replaced as a whole are mounted behind one: what it points to is what is checked.
        check_kind(fs::metadata(path)?.file_type())?;
        // And again, because it may be another one now. NONBLOCK: opening a FIFO must not wait for a writer.
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        let metadata = file.metadata()?;
        check_kind(metadata.file_type())?;
        check_access(metadata.mode(), metadata.uid(), rustix::process::geteuid().as_raw())?;
        let secret = Secret::read_with(bytes_max, |buffer| read_all(&file, buffer))?;
        match secret.ok_or(SecretFileError::TooLarge(bytes_max))? {
            secret if secret.reveal().is_empty() => Err(SecretFileError::Empty),
            secret => Ok(secret),
        }
    }

    /// Writes it to a new file that its owner alone can use, durable on return.
    ///
    /// # Errors
    /// `AlreadyExists`, and what the system reports.
    pub fn write_new(&self, path: &Path) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(self.reveal())?;
        file.sync_all()
    }
}

/// Reads to the end of the file or of the buffer.
fn read_all(mut file: &File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut count = 0;
    while count < buffer.len() {
        match file.read(&mut buffer[count..]) {
            Ok(0) => break,
            Ok(read) => count += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

fn check_kind(kind: FileType) -> Result<(), SecretFileError> {
    if kind.is_file() {
        return Ok(());
    }
    Err(SecretFileError::NotRegular(match () {
        () if kind.is_dir() => "directory",
        () if kind.is_fifo() => "FIFO",
        () if kind.is_socket() => "socket",
        () => "device",
    }))
}

fn check_access(mode: u32, owner: u32, user: u32) -> Result<(), SecretFileError> {
    if owner != user && owner != 0 {
        return Err(SecretFileError::Owner { owner, user });
    }
    match mode & 0o077 {
        0 => Ok(()),
        _ => Err(SecretFileError::Mode(mode & 0o777)),
    }
}

#[cfg(test)]
mod tests;
