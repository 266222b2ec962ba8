//! Where the map of a cluster is: in its directory, or in etcd.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{ClusterMap, DirectoryPlace, EtcdFiles, EtcdMap, LocalMap, MapError};

/// The file of a cluster's directory with the URLs of etcd.
const URLS_FILE: &str = "etcd";
/// Most bytes of it.
const URLS_BYTES_MAX: u64 = 4096;

/// What a caller gives for etcd; the rest is in a cluster's directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EtcdOptions {
    /// See [`EtcdMap::new`].
    pub urls: Option<String>,
    /// Files that let this process in.
    pub files: EtcdFiles,
}

impl EtcdOptions {
    /// Names of parameters, and their values where there are any. None is a secret.
    pub fn parameters(&self) -> impl Iterator<Item = (&'static str, String)> {
        let urls = self.urls.iter().map(|urls| ("etcd", urls.clone()));
        let files = self.files.named().into_iter();
        urls.chain(files.filter_map(|(named, path)| Some((named.parameter, path?.display().to_string()))))
    }

    /// Refuses files that would not be used: a caller that names a certificate relies on TLS.
    fn check_files(&self, urls: Option<&str>) -> Result<(), MapError> {
        let mut named = self.files.named().into_iter().filter_map(|(named, path)| path.map(|_| named));
        let unused = match urls {
            None => named.next(),
            Some(urls) if urls.trim_start().starts_with("https://") => None,
            Some(_) => named.find(|named| named.is_of_tls()),
        };
        let Some(unused) = unused else { return Ok(()) };
        let reason = match urls {
            None => "without URLs of etcd",
            Some(_) => "with URLs that are not https://",
        };
        Err(MapError::Invalid(format!("{} has no effect {reason}", unused.parameter)))
    }

    /// Sets a parameter. Returns whether there is one of this name.
    pub fn set_parameter(&mut self, name: &str, value: &str) -> bool {
        if name == "etcd" {
            self.urls = Some(value.to_string());
            return true;
        }
        let mut files = self.files.named_mut().into_iter();
        files.find(|(named, _)| named.parameter == name).is_some_and(|(_, path)| {
            *path = Some(value.into());
            true
        })
    }
}

/// Where a map is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapLocation {
    /// In a directory.
    Directory(PathBuf),
    /// In etcd.
    Etcd {
        /// See [`EtcdMap::new`].
        urls: String,
        /// Files that let this process in.
        files: EtcdFiles,
    },
}

fn failed(path: &Path, error: &std::io::Error) -> MapError {
    MapError::Storage { what: path.display().to_string(), reason: error.to_string() }
}

impl MapLocation {
    /// The map of the cluster with a directory: in etcd if there are URLs or its file `etcd` has some, else in its
    /// directory `map`. `None` if there is no cluster. Its files that let a process in are `etcd-*`, unless others are named.
    ///
    /// # Errors
    /// [`MapError::Storage`] if the file cannot be read; [`MapError::Invalid`] if files are named that would
    /// not be used, or the directory is a copy of another one that is there, with its map.
    pub fn find(cluster: &Path, etcd: &EtcdOptions) -> Result<Option<MapLocation>, MapError> {
        let urls = etcd.urls.clone().map_or_else(|| read_urls(cluster), |urls| Ok(Some(urls)))?;
        etcd.check_files(urls.as_deref())?;
        let Some(urls) = urls else {
            let map = cluster.join("map");
            if !map.is_dir() {
                return Ok(None);
            }
            // Its nodes listen where the map of the original says.
            DirectoryPlace::find(cluster, None)?;
            return Ok(Some(MapLocation::Directory(map)));
        };
        let mut files = etcd.files.clone();
        for (named, path) in files.named_mut() {
            let known = cluster.join(named.file);
            if path.is_none() && known.exists() {
                *path = Some(known);
            }
        }
        Ok(Some(MapLocation::Etcd { urls, files }))
    }

    /// Opens the map.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn open(&self) -> Result<Arc<dyn ClusterMap>, MapError> {
        Ok(match self {
            MapLocation::Directory(path) => Arc::new(LocalMap::open(path)?),
            MapLocation::Etcd { urls, files } => Arc::new(EtcdMap::with_files(urls, files)?),
        })
    }

    /// Writes the files of a cluster's directory that say so, with copies of those that let a process in.
    ///
    /// # Errors
    /// [`MapError::Storage`].
    pub fn save(&self, cluster: &Path) -> Result<(), MapError> {
        let MapLocation::Etcd { urls, files } = self else { return Ok(()) };
        for (named, path) in files.named() {
            let copy = cluster.join(named.file);
            if let Some(path) = path.filter(|path| **path != copy) {
                let content = EtcdFiles::read(named, path)?;
                replace_file(&copy, content.reveal()).map_err(|error| failed(&copy, &error))?;
            }
        }
        let path = cluster.join(URLS_FILE);
        fs::write(&path, format!("{urls}\n")).map_err(|error| failed(&path, &error))
    }
}

fn read_urls(cluster: &Path) -> Result<Option<String>, MapError> {
    let path = cluster.join(URLS_FILE);
    let failed = |error: std::io::Error| Err(failed(&path, &error));
    match fs::metadata(&path) {
        Ok(metadata) if metadata.len() > URLS_BYTES_MAX => failed(ErrorKind::FileTooLarge.into()),
        Ok(_) => fs::read_to_string(&path).map(|urls| Some(urls.trim().to_string())).or_else(failed),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => failed(error),
    }
}

/// Puts a file that its owner alone can read in the place of another one, whole: nodes may read it meanwhile.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let scratch = path.with_extension(format!("{}.new", std::process::id()));
    let written = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&scratch)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&scratch, path));
    if written.is_err() {
        let _ = fs::remove_file(&scratch);
    }
    written
}
