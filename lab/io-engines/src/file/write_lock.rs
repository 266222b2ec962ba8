//! The lock of a file or block device that the jobs of a run write.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::Duration;

use file_lock::LockMode;

use super::{EngineFileError, LOCKED};

/// Excludes other processes from a regular file or a block device, those that serve it for reading included,
/// until the last copy is dropped. A process has one lock of a file, whatever the number of jobs and names.
/// It is taken by the process that starts the jobs, since they can be processes of their own, and opening an
/// [`super::EngineFile`] does not need it.
#[derive(Clone, Debug)]
pub struct WriteLock {
    _file: Arc<File>,
}

/// Device and inode; of a block device its own number, since it has several nodes, and no file has the inode
/// number `u64::MAX`. No other file has them while the file is open.
type FileId = (u64, u64);

fn id_of(metadata: &Metadata) -> FileId {
    match metadata.file_type().is_block_device() {
        true => (metadata.rdev(), u64::MAX),
        false => (metadata.dev(), metadata.ino()),
    }
}

struct TableEntry {
    id: FileId,
    file: Weak<File>,
}

/// The files that this process has locked.
static TABLE: Mutex<Vec<TableEntry>> = Mutex::new(Vec::new());
/// The files that the process which started this one has locked for both.
static SHARED: LazyLock<Vec<File>> = LazyLock::new(|| os::inherited_files(file_lock::SHARED_LOCKS_VARIABLE));
/// The kernel closes the files of a killed process's io_uring some time after its end.
const TIMEOUT: Duration = Duration::from_secs(1);

impl WriteLock {
    /// Locks a regular file or a block device, or shares the lock that this process or the one that started
    /// it has; `None` if the path is neither.
    ///
    /// # Errors
    /// A file that cannot be opened, a regular one for writing, or the process that has locked it.
    pub fn take(path: &str) -> Result<Option<WriteLock>, EngineFileError> {
        let failed = |what| move |error| EngineFileError { path: path.to_string(), what, error };
        let kind = std::fs::metadata(path).map_err(failed("open"))?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Ok(None);
        }
        // Closing a block device that was open for writing makes udev probe it, and a lock needs no write
        // access.
        let file = File::options().read(true).write(kind.is_file()).open(path).map_err(failed("open"))?;
        let metadata = file.metadata().map_err(failed("open"))?;
        let id = id_of(&metadata);
        let mut table = sync::lock(&TABLE);
        table.retain(|entry| entry.file.strong_count() > 0);
        let known = table.iter().find(|entry| entry.id == id);
        if let Some(file) = known.and_then(|entry| entry.file.upgrade()) {
            return Ok(Some(WriteLock { _file: file }));
        }
        let shared = SHARED.iter().find(|file| file.metadata().is_ok_and(|metadata| id_of(&metadata) == id));
        let file = match shared.map(File::try_clone) {
            Some(shared) => shared.map_err(failed("open"))?,
            None => file,
        };
        file_lock::lock(&file, LockMode::Exclusive, TIMEOUT).map_err(|holder| {
            failed(LOCKED)(io::Error::new(io::ErrorKind::WouldBlock, holder.to_string()))
        })?;
        let file = Arc::new(file);
        table.push(TableEntry { id, file: Arc::downgrade(&file) });
        Ok(Some(WriteLock { _file: file }))
    }
}
