//! Where the map of a cluster is: in its directory, or in etcd.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{ClusterMap, EtcdMap, LocalMap, MapError};

/// The file of a cluster's directory with the URLs of etcd.
const URLS_FILE: &str = "etcd";
/// Most bytes of it.
const URLS_BYTES_MAX: u64 = 4096;

/// Where a map is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapLocation {
    /// In a directory.
    Directory(PathBuf),
    /// In etcd, at these URLs: see [`EtcdMap::new`].
    Etcd(String),
}

impl MapLocation {
    /// The map of the cluster with a directory: in etcd if there are URLs or its file `etcd` has some, else in its
    /// directory `map`. `None` if there is no cluster.
    ///
    /// # Errors
    /// [`MapError::Storage`] if the file cannot be read.
    pub fn find(cluster: &Path, etcd: Option<&str>) -> Result<Option<MapLocation>, MapError> {
        if let Some(urls) = etcd {
            return Ok(Some(MapLocation::Etcd(urls.to_string())));
        }
        let path = cluster.join(URLS_FILE);
        let failed = |error: std::io::Error| MapError::Storage {
            what: path.display().to_string(),
            reason: error.to_string(),
        };
        match fs::metadata(&path) {
            Ok(metadata) if metadata.len() > URLS_BYTES_MAX => Err(failed(ErrorKind::FileTooLarge.into())),
            Ok(_) => {
                let urls = fs::read_to_string(&path).map_err(failed)?;
                Ok(Some(MapLocation::Etcd(urls.trim().to_string())))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let map = cluster.join("map");
                Ok(map.is_dir().then_some(MapLocation::Directory(map)))
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Opens the map.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn open(&self) -> Result<Arc<dyn ClusterMap>, MapError> {
        Ok(match self {
            MapLocation::Directory(path) => Arc::new(LocalMap::open(path)?),
            MapLocation::Etcd(urls) => Arc::new(EtcdMap::new(urls)?),
        })
    }

    /// Writes the file of a cluster's directory that says so.
    ///
    /// # Errors
    /// [`MapError::Storage`].
    pub fn save(&self, cluster: &Path) -> Result<(), MapError> {
        let MapLocation::Etcd(urls) = self else { return Ok(()) };
        let path = cluster.join(URLS_FILE);
        fs::write(&path, format!("{urls}\n")).map_err(|error| MapError::Storage {
            what: path.display().to_string(),
            reason: error.to_string(),
        })
    }
}
