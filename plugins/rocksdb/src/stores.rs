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
///
/// A thread of its own does it: the locals of the thread that exits are gone, and waits of the control plane,
/// as for the end of a store of logical volumes, use some.
pub(crate) fn close_all() {
    if process::is_forked() {
        return;
    }
    let closing = std::mem::take(&mut sync::lock(stores()).stores);
    if closing.is_empty() {
        return;
    }
    let close = move || closing.values().for_each(|(files, _)| files.close());
    match std::thread::Builder::new().name("rocksdb close".to_string()).spawn(close) {
        // A panic there has printed its own line.
        Ok(thread) => _ = thread.join(),
        Err(error) => {
            log::error!(
                target: "rocksdb",
                "stores are not closed properly: a thread cannot be started: {error}"
            );
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Closes all stores when its thread ends.
    struct CloseAll;

    impl Drop for CloseAll {
        fn drop(&mut self) {
            close_all();
        }
    }

    thread_local! {
        static AT_END: CloseAll = const { CloseAll };
    }

    #[test]
    fn stores_are_closed_by_a_thread_whose_locals_are_gone() {
        let path = std::env::temp_dir().join(format!("ringbolt-exit-{}.json", std::process::id()));
        let call = |method: &str, params: &str| format!(r#"{{"method":"{method}","params":{{{params}}}}}"#);
        let calls = [
            call("bdev_malloc_create", r#""name":"M","num_blocks":16384,"block_size":4096"#),
            call("bdev_lvol_create_lvstore", r#""bdev_name":"M","lvs_name":"vs","cluster_sz":1048576"#),
            call("bdev_lvol_create", r#""lvs_name":"vs","lvol_name":"v","size_in_mib":48"#),
        ];
        let config = format!(r#"{{"subsystems":[{{"subsystem":"bdev","config":[{}]}}]}}"#, calls.join(","));
        std::fs::write(&path, config).unwrap();
        let uri = format!("ringbolt://{}?bdev=vs/v&create=1", path.display());
        let exiting = move || {
            // Locals end in the reverse order of their first use: those of the waits first.
            AT_END.with(|_| {});
            let store = open(&uri).unwrap();
            store.make_directory(b"d").unwrap();
            // As a database that is not deleted.
            std::mem::forget(store);
        };
        std::thread::spawn(exiting).join().unwrap();
        let path_of_key = path.canonicalize().unwrap();
        std::fs::remove_file(&path).unwrap();
        let stores = sync::lock(stores());
        assert!(!stores.stores.keys().any(|(path, _)| *path == path_of_key));
        let configured = stores.configured.get(&path_of_key).unwrap();
        assert!(configured.upgrade().is_none(), "the bdevs have ended");
    }
}
