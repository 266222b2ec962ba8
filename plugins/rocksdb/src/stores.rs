//! The stores that this process has open, each once.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use plugin_bdevs::{ConfiguredBdevs, ConfiguredBdevsError};
use rocksdb_abi::{ErrorKind, FileAttributes, FileError, FileOpen, ListedName, RocksFile, RocksFiles};

use crate::files::Files;
use crate::process;
use crate::store::Store;
use crate::uri::StoreUri;

/// Names a store: the configuration file, and the bdev.
type StoreKey = (PathBuf, String);

#[derive(Default)]
struct OpenStores {
    configured: HashMap<PathBuf, Weak<ConfiguredBdevs>>,
    /// With the number of those who have it open.
    stores: HashMap<StoreKey, (Arc<Files>, usize)>,
}

fn stores() -> &'static Mutex<OpenStores> {
    static STORES: OnceLock<Mutex<OpenStores>> = OnceLock::new();
    STORES.get_or_init(Mutex::default)
}

fn refused(error: ConfiguredBdevsError) -> FileError {
    let kind = match &error {
        ConfiguredBdevsError::Invalid(_) => ErrorKind::Invalid,
        ConfiguredBdevsError::Failed(_) => ErrorKind::Io,
    };
    FileError::new(kind, error.to_string())
}

/// Opens the store of a URI, or returns the one that is open.
///
/// # Errors
/// Those of [`StoreUri::parse`], [`ConfiguredBdevs::start`] and [`Store::open`].
pub(crate) fn open(text: &str) -> Result<Arc<dyn RocksFiles>, FileError> {
    let uri = StoreUri::parse(text)?;
    if process::is_forked() {
        let text =
            "this process is a fork of one that has stores open: open them after the fork, in one process";
        return Err(FileError::new(ErrorKind::Io, text));
    }
    process::claim();
    let mut stores = sync::lock(stores());
    // One file is opened once, however its path is written. A file that is not there is named by its start.
    let path = uri.config.canonicalize().unwrap_or_else(|_| uri.config.clone());
    let key = (path.clone(), uri.bdev.clone());
    let files = match stores.stores.get_mut(&key) {
        Some((files, users)) => {
            *users += 1;
            files.clone()
        }
        None => {
            let configured = match stores.configured.get(&path).and_then(Weak::upgrade) {
                Some(configured) => configured,
                None => Arc::new(ConfiguredBdevs::start(&uri.config).map_err(refused)?),
            };
            stores.configured.insert(path, Arc::downgrade(&configured));
            let files = Arc::new(Files::new(Store::open(configured, &uri)?));
            stores.stores.insert(key.clone(), (files.clone(), 1));
            files
        }
    };
    Ok(Arc::new(StoreUser { files, key }))
}

/// Closes all stores: the process exits.
pub(crate) fn close_all() {
    if process::is_forked() {
        return;
    }
    let closing = std::mem::take(&mut sync::lock(stores()).stores);
    closing.values().for_each(|(files, _)| files.close());
}

/// One who has a store open. The last one closes it.
struct StoreUser {
    files: Arc<Files>,
    key: StoreKey,
}

impl Drop for StoreUser {
    fn drop(&mut self) {
        if process::is_forked() {
            return;
        }
        // The lock is kept until the store is closed, so that it is not opened meanwhile.
        let mut stores = sync::lock(stores());
        // It is not there if all were closed.
        let Some((_, users)) = stores.stores.get_mut(&self.key) else { return };
        *users -= 1;
        if *users == 0
            && let Some((files, _)) = stores.stores.remove(&self.key)
        {
            files.close();
        }
    }
}

impl RocksFiles for StoreUser {
    fn open(&self, path: &[u8], how: FileOpen) -> Result<Box<dyn RocksFile>, FileError> {
        self.files.open(path, how)
    }

    fn lock(&self, path: &[u8]) -> Result<Box<dyn RocksFile>, FileError> {
        self.files.lock(path)
    }

    fn status(&self, path: &[u8]) -> Result<FileAttributes, FileError> {
        self.files.status(path)
    }

    fn list(&self, path: &[u8]) -> Result<Vec<ListedName>, FileError> {
        self.files.list(path)
    }

    fn unlink(&self, path: &[u8]) -> Result<(), FileError> {
        self.files.unlink(path)
    }

    fn make_directory(&self, path: &[u8]) -> Result<(), FileError> {
        self.files.make_directory(path)
    }

    fn remove_directory(&self, path: &[u8]) -> Result<(), FileError> {
        self.files.remove_directory(path)
    }

    fn rename(&self, from: &[u8], to: &[u8]) -> Result<(), FileError> {
        self.files.rename(from, to)
    }

    fn sync_directory(&self, path: &[u8]) -> Result<(), FileError> {
        self.files.sync_directory(path)
    }

    fn free_bytes(&self) -> Result<u64, FileError> {
        self.files.free_bytes()
    }
}
