//! The files that let a process in: which ones, and how they are read.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use secret::Secret;

use crate::MapError;

/// Most bytes of a file: many certificates.
const FILE_BYTES_MAX: usize = 1 << 20;

/// Files with what etcd asks of its clients. None of them is needed of a server without users and TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EtcdFiles {
    /// A user of etcd, a line `NAME:PASSWORD`; its owner alone can read it.
    pub user: Option<PathBuf>,
    /// Certificates of the CAs that etcd's servers have theirs of, in PEM: `https://` needs it.
    pub ca: Option<PathBuf>,
    /// The certificate of this client, in PEM, with those between it and a CA.
    pub certificate: Option<PathBuf>,
    /// The key of this certificate, in PEM; its owner alone can read it.
    pub key: Option<PathBuf>,
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

impl NamedFile {
    pub(crate) fn is_of_tls(&self) -> bool {
        self.file != USER.file
    }
}

const USER: NamedFile = NamedFile { file: "etcd-user", parameter: "etcd_user_file", is_private: true };
const CA: NamedFile = NamedFile { file: "etcd-ca.pem", parameter: "etcd_ca_file", is_private: false };
const CERTIFICATE: NamedFile =
    NamedFile { file: "etcd-cert.pem", parameter: "etcd_cert_file", is_private: false };
const KEY: NamedFile = NamedFile { file: "etcd-key.pem", parameter: "etcd_key_file", is_private: true };

impl EtcdFiles {
    /// Files at paths that parameters of a method name.
    pub fn at(
        user: Option<String>,
        ca: Option<String>,
        certificate: Option<String>,
        key: Option<String>,
    ) -> EtcdFiles {
        let path = |path: Option<String>| path.map(PathBuf::from);
        EtcdFiles { user: path(user), ca: path(ca), certificate: path(certificate), key: path(key) }
    }

    pub(crate) fn named(&self) -> [(&'static NamedFile, Option<&PathBuf>); 4] {
        let [ca, certificate, key] = self.of_tls();
        [(&USER, self.user.as_ref()), ca, certificate, key]
    }

    /// The CA, the certificate and its key.
    pub(super) fn of_tls(&self) -> [(&'static NamedFile, Option<&PathBuf>); 3] {
        let (ca, certificate, key) = (&self.ca, &self.certificate, &self.key);
        [(&CA, ca.as_ref()), (&CERTIFICATE, certificate.as_ref()), (&KEY, key.as_ref())]
    }

    pub(crate) fn named_mut(&mut self) -> [(&'static NamedFile, &mut Option<PathBuf>); 4] {
        let EtcdFiles { user, ca, certificate, key } = self;
        [(&USER, user), (&CA, ca), (&CERTIFICATE, certificate), (&KEY, key)]
    }

    /// Reads one of the files. All are treated as secrets, also those that are none.
    pub(crate) fn read(named: &NamedFile, path: &Path) -> Result<Secret, EtcdFileError> {
        let read = match named.is_private {
            true => return read_private(path, FILE_BYTES_MAX),
            false => read_public(path),
        };
        read.map(Secret::new).map_err(|reason| EtcdFileError::new(path, reason))
    }
}

/// A file cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}: {reason}", .path.display())]
pub(crate) struct EtcdFileError {
    path: PathBuf,
    reason: String,
}

impl EtcdFileError {
    pub(super) fn new(path: &Path, reason: impl ToString) -> EtcdFileError {
        EtcdFileError { path: path.to_path_buf(), reason: reason.to_string() }
    }
}

impl From<EtcdFileError> for MapError {
    fn from(EtcdFileError { path, reason }: EtcdFileError) -> MapError {
        MapError::Storage { what: format!("in etcd needs {}", path.display()), reason }
    }
}

/// Reads a file of at most this many bytes that its owner alone can use.
///
/// # Errors
/// [`EtcdFileError`] names it.
pub(super) fn read_private(path: &Path, bytes_max: usize) -> Result<Secret, EtcdFileError> {
    Secret::read(path, bytes_max).map_err(|error| EtcdFileError::new(path, error))
}

/// Reads certificates, which others may read and which may be behind a symbolic link.
fn read_public(path: &Path) -> Result<Vec<u8>, String> {
    // Looked at before it is opened: opening a FIFO would wait for a writer.
    if !fs::metadata(path).map_err(|error| error.to_string())?.is_file() {
        return Err("it is not a regular file".to_string());
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(FILE_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    match bytes.len() > FILE_BYTES_MAX {
        true => Err(format!("it has more than {FILE_BYTES_MAX} bytes")),
        false => Ok(bytes),
    }
}
