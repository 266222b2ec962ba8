//! The files that let a process in: which ones, and how they are read.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::MapError;

/// Most bytes of a file: many certificates.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Files with what etcd asks of its clients. None of them is needed of a server without users.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EtcdFiles {
    /// A user of etcd, a line `NAME:PASSWORD`; its owner alone can read it.
    pub user: Option<PathBuf>,
}

/// What one of the files is called.
pub(crate) struct NamedFile {
    /// In a cluster's directory.
    pub(crate) file: &'static str,
    /// By methods.
    pub(crate) parameter: &'static str,
    /// Its owner alone can read it.
    is_private: bool,
}

const USER: NamedFile = NamedFile { file: "etcd-user", parameter: "etcd_user_file", is_private: true };

impl EtcdFiles {
    pub(crate) fn named(&self) -> [(&'static NamedFile, Option<&PathBuf>); 1] {
        [(&USER, self.user.as_ref())]
    }

    pub(crate) fn named_mut(&mut self) -> [(&'static NamedFile, &mut Option<PathBuf>); 1] {
        [(&USER, &mut self.user)]
    }

    pub(crate) fn read(named: &NamedFile, path: &Path) -> Result<Vec<u8>, MapError> {
        match named.is_private {
            true => read_private(path, FILE_BYTES_MAX),
            false => read(path, open(path)?, FILE_BYTES_MAX),
        }
    }
}

pub(super) fn failed(path: &Path, reason: impl ToString) -> MapError {
    MapError::Storage { what: format!("in etcd needs {}", path.display()), reason: reason.to_string() }
}

/// Reads a regular file of at most this many bytes that its owner alone can read.
///
/// # Errors
/// [`MapError::Storage`] names it.
pub(super) fn read_private(path: &Path, bytes_max: u64) -> Result<Vec<u8>, MapError> {
    let file = open(path)?;
    let mode = file.metadata().map_err(|error| failed(path, error))?.mode();
    if mode & 0o077 != 0 {
        let reason = format!("others than its owner may use it, mode {:03o}: chmod 600", mode & 0o777);
        return Err(failed(path, reason));
    }
    read(path, file, bytes_max)
}

fn open(path: &Path) -> Result<File, MapError> {
    // Looked at before it is opened: opening a FIFO would wait for a writer.
    match fs::metadata(path).map_err(|error| failed(path, error))?.is_file() {
        true => File::open(path).map_err(|error| failed(path, error)),
        false => Err(failed(path, "it is not a regular file")),
    }
}

fn read(path: &Path, file: File, bytes_max: u64) -> Result<Vec<u8>, MapError> {
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(|error| failed(path, error))?;
    match bytes.len() as u64 > bytes_max {
        true => Err(failed(path, format!("it has more than {bytes_max} bytes"))),
        false => Ok(bytes),
    }
}
