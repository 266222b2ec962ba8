//! Files on a blobstore, sans-IO: requests in, I/O and replies out.
//!
//! `plan` makes a request's steps (`task` lists them), `execute` runs a step, `io` turns ranges of files into
//! I/O of the device. Names change one request at a time; reads of a file run at the same time, and whatever
//! changes it alone; requests on different files do not wait for each other.

mod execute;
mod extents;
mod fault;
mod io;
mod plan;
mod task;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use blobstore::{
    BlobId, BlobStore, BlobStoreDevice, BlobStoreFormat, ChangeError, ChangeId, OpenBlobStore, StoreIoFailed,
};

use crate::cache::ReadCache;
use crate::error::{BlobFsError, NoBlobFs};
use crate::extents::ReadLease;
use crate::file::FileNode;
use crate::index::{DirectoryNumber, FileIndex, FileNumber, IndexEntry};
use crate::load::{FileFinding, LoadedFiles, load_files};
use crate::record::STORE_TYPE;
use crate::request::{
    BlobFsIo, BlobFsReply, BlobFsRequest, BlobFsRequestId, DirectoryItem, FileStatus, OpenNumber,
};
#[cfg(test)]
pub(crate) use fault::FileFault;
use task::{Step, Task, TaskIo, TaskLocks};

/// Requests that may wait or run: a caller that blocks has one.
pub const REQUESTS_MAX: usize = 4096;
/// Bytes of one read or write, at most.
pub const REQUEST_BYTES_MAX: usize = 1 << 30;
/// Bytes that the length of a log on the device is ahead at most ([`BlobFsRequest::SyncLog`]).
pub const LOG_AHEAD_BYTES: u64 = 1 << 20;
/// Bytes of a block of a log: whose reader skips the rest of one after a zero, as RocksDB's does.
pub const LOG_BLOCK_BYTES: u64 = 32 << 10;
/// Bytes that a file keeps in memory while it is appended to, before they are written.
const BUFFER_BYTES_MAX: usize = 256 << 10;
/// Bytes of an append that is written at once, without a copy in memory.
const LARGE_APPEND_BYTES: usize = 32 << 10;

/// What files may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobFsOptions {
    /// Bytes of memory for what is read ahead.
    pub cache_bytes: usize,
    /// Bytes that are read ahead at most, of a file that is read in order; 0 for none.
    pub read_ahead_bytes: usize,
    /// Bytes that a file gets at most beyond what it needs when it grows, so that appends do not write
    /// metadata each time. They are returned when its writer closes it.
    pub preallocate_bytes: u64,
}

impl Default for BlobFsOptions {
    fn default() -> BlobFsOptions {
        BlobFsOptions { cache_bytes: 32 << 20, read_ahead_bytes: 1 << 20, preallocate_bytes: 64 << 20 }
    }
}

/// Pages of metadata, whose number is that of when the store was made. A directory has one; a file has one,
/// and one for each 512 clusters of its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetadataPages {
    /// Those that are used.
    pub used: u32,
    /// All.
    pub all: u32,
}

/// How a new store for files is made: clusters of 1 MiB as SPDK's, with metadata for a file in each.
pub fn format_options() -> BlobStoreFormat {
    BlobStoreFormat {
        cluster_bytes: 1 << 20,
        metadata_pages_percent: 250,
        store_type: STORE_TYPE,
        super_blob: None,
        ..BlobStoreFormat::default()
    }
}

/// An opener of a file.
#[derive(Clone, Copy, Debug)]
struct FileOpener {
    file: FileNumber,
    can_write: bool,
    /// Where the last read ended.
    next_offset: u64,
    /// Bytes to read ahead.
    window: usize,
    /// Where what was read ahead ends.
    ahead_end: u64,
    /// What is being read ahead: reads of it wait.
    ahead: Option<FileRange>,
}

/// A range of a file.
#[derive(Clone, Copy, Debug)]
struct FileRange {
    start: u64,
    end: u64,
}

/// Files on a blobstore, on the core that owns the store.
///
/// [`begin`](Self::begin) starts requests; after it and after [`complete`](Self::complete),
/// [`next_io`](Self::next_io) and [`next_reply`](Self::next_reply) are to be called until they return
/// nothing. [`status`](Self::status) and [`list`](Self::list) answer at once, from memory.
pub struct BlobFs {
    store: Option<OpenBlobStore>,
    /// The state of a store that is only read.
    read_only: Arc<BlobStore>,
    block: u64,
    has_volatile_cache: bool,
    options: BlobFsOptions,
    index: FileIndex,
    files: BTreeMap<FileNumber, FileNode>,
    directories: BTreeMap<DirectoryNumber, BlobId>,
    openers: BTreeMap<OpenNumber, FileOpener>,
    cache: ReadCache,
    findings: Vec<FileFinding>,
    next_file: u64,
    next_directory: u64,
    next_sequence: u64,
    next_open: u64,
    queue: VecDeque<(BlobFsRequestId, BlobFsRequest)>,
    tasks: BTreeMap<u64, Task>,
    changes: BTreeMap<ChangeId, PendingChange>,
    ready: VecDeque<BlobFsIo>,
    in_flight: BTreeMap<u64, TaskIo>,
    /// I/O in flight by states of the store.
    epochs: BTreeMap<u64, u32>,
    released: u64,
    /// Of files with snapshots of their extents.
    leases: BTreeMap<FileNumber, Arc<ReadLease>>,
    /// Leases that were revoked while threads read, with the state of the store then.
    revoked: Vec<(u64, Arc<ReadLease>)>,
    replies: VecDeque<(BlobFsRequestId, Result<BlobFsReply, BlobFsError>)>,
    next_request: u64,
    next_task: u64,
    next_io: u64,
    is_broken: bool,
    is_unloaded: bool,
    #[cfg(test)]
    fault: Option<FileFault>,
}

/// A change of the store that a task waits for.
#[derive(Clone, Copy, Debug)]
struct PendingChange {
    task: u64,
    may_fail: bool,
}

impl BlobFs {
    /// Opens a loaded store for changes. Files that loading found to be of no use are deleted first.
    ///
    /// # Errors
    /// The store is not one of files.
    pub fn open(
        mut store: BlobStore,
        device: BlobStoreDevice,
        options: BlobFsOptions,
    ) -> Result<BlobFs, NoBlobFs> {
        let loaded = load_files(&store)?;
        // Without a type it would be no store of files any more when its last file is deleted. A store that
        // was not unloaded gets its first write as it is opened.
        store.set_store_type(STORE_TYPE);
        let open = OpenBlobStore::open(store.clone(), device);
        Ok(BlobFs::new(Some(open), store, device, options, loaded))
    }

    /// Opens a loaded store, and writes nothing to it.
    ///
    /// # Errors
    /// The store is not one of files.
    pub fn open_read_only(
        store: BlobStore,
        device: BlobStoreDevice,
        options: BlobFsOptions,
    ) -> Result<BlobFs, NoBlobFs> {
        let loaded = load_files(&store)?;
        Ok(BlobFs::new(None, store, device, options, loaded))
    }

    /// Makes a new store without files. It is on the device when [`is_idle`](Self::is_idle); if
    /// [`is_broken`](Self::is_broken) then, it is not.
    ///
    /// # Errors
    /// Those of [`OpenBlobStore::format`].
    pub fn format(
        format: &BlobStoreFormat,
        device: BlobStoreDevice,
        options: BlobFsOptions,
    ) -> Result<BlobFs, ChangeError> {
        let (open, _) = OpenBlobStore::format(format, device)?;
        let store = BlobStore::clone(open.published());
        let loaded =
            LoadedFiles { next_file: 1, next_directory: 1, next_sequence: 1, ..LoadedFiles::default() };
        Ok(BlobFs::new(Some(open), store, device, options, loaded))
    }

    fn new(
        store: Option<OpenBlobStore>,
        read_only: BlobStore,
        device: BlobStoreDevice,
        options: BlobFsOptions,
        loaded: LoadedFiles,
    ) -> BlobFs {
        let LoadedFiles { index, files, directories, removed, excess, findings, .. } = loaded;
        let mut fs = BlobFs {
            released: store.as_ref().map_or(0, OpenBlobStore::epoch),
            store,
            read_only: Arc::new(read_only),
            block: u64::from(device.block_bytes.max(512)),
            has_volatile_cache: device.has_volatile_cache,
            cache: ReadCache::new(options.cache_bytes),
            options,
            index,
            files,
            directories,
            openers: BTreeMap::new(),
            findings,
            next_file: loaded.next_file,
            next_directory: loaded.next_directory,
            next_sequence: loaded.next_sequence,
            next_open: 1,
            queue: VecDeque::new(),
            tasks: BTreeMap::new(),
            changes: BTreeMap::new(),
            ready: VecDeque::new(),
            in_flight: BTreeMap::new(),
            epochs: BTreeMap::new(),
            leases: BTreeMap::new(),
            revoked: Vec::new(),
            replies: VecDeque::new(),
            next_request: 0,
            next_task: 0,
            next_io: 0,
            is_broken: false,
            is_unloaded: false,
            #[cfg(test)]
            fault: None,
        };
        if fs.store.is_some() && !(removed.is_empty() && excess.is_empty()) {
            let steps = removed.into_iter().map(|blob| Step::DeleteBlob { blob });
            let excess = excess.into_iter().map(|(blob, clusters)| Step::ResizeBlob { blob, clusters });
            let steps = steps.chain(excess).collect();
            fs.add_task(Task { locks: TaskLocks::all(), steps, ..Task::default() });
        }
        fs.run();
        fs
    }

    /// Begins a request. How it ended is a reply with the id.
    pub fn begin(&mut self, request: BlobFsRequest) -> BlobFsRequestId {
        let id = BlobFsRequestId(self.next_request);
        self.next_request += 1;
        match self.queue.len() + self.tasks.len() < REQUESTS_MAX {
            true => self.queue.push_back((id, request)),
            false => self.replies.push_back((id, Err(BlobFsError::Busy))),
        }
        self.run();
        id
    }

    /// An I/O to begin now.
    pub fn next_io(&mut self) -> Option<BlobFsIo> {
        self.ready.pop_front()
    }

    /// Completes an I/O, with what was read.
    ///
    /// # Panics
    /// If no I/O with this id is in flight.
    pub fn complete(&mut self, id: u64, result: Result<Vec<u8>, StoreIoFailed>) {
        let owner = self.in_flight.remove(&id).expect("an I/O that is in flight");
        self.io_completed(owner, result);
        self.run();
    }

    /// The next reply, in the order in which requests ended.
    pub fn next_reply(&mut self) -> Option<(BlobFsRequestId, Result<BlobFsReply, BlobFsError>)> {
        self.replies.pop_front()
    }

    /// What a path is.
    ///
    /// # Errors
    /// There is nothing, or the path is none.
    pub fn status(&self, path: &[u8]) -> Result<FileStatus, BlobFsError> {
        let entry = self.index.find(path)?;
        Ok(self.status_of(entry))
    }

    /// What an open file is, also if it has no name any more.
    ///
    /// # Errors
    /// It is not open.
    pub fn open_status(&self, open: OpenNumber) -> Result<FileStatus, BlobFsError> {
        let opener = self.openers.get(&open).ok_or(BlobFsError::NotOpen)?;
        Ok(self.status_of(IndexEntry::File(opener.file)))
    }

    /// What a directory has, by name.
    ///
    /// # Errors
    /// There is no such directory.
    pub fn list(&self, path: &[u8]) -> Result<Vec<DirectoryItem>, BlobFsError> {
        let IndexEntry::Directory(directory) = self.index.find(path)? else {
            return Err(BlobFsError::NotDirectory);
        };
        let items = self.index.list(directory);
        Ok(items
            .map(|(name, entry)| DirectoryItem { name: name.to_vec(), status: self.status_of(entry) })
            .collect())
    }

    fn status_of(&self, entry: IndexEntry) -> FileStatus {
        let directory = FileStatus { is_directory: true, size: 0, allocated_bytes: 0, is_synced: true };
        let IndexEntry::File(file) = entry else { return directory };
        let Some(node) = self.files.get(&file) else { return directory };
        FileStatus {
            is_directory: false,
            size: node.size,
            allocated_bytes: u64::from(self.clusters_of(node)) * self.cluster_bytes(),
            is_synced: !node.needs_sync(),
        }
    }

    /// What was not as in a store that was closed, when it was opened.
    pub fn findings(&self) -> &[FileFinding] {
        &self.findings
    }

    /// The state of the store.
    pub fn blobs(&self) -> &Arc<BlobStore> {
        self.store.as_ref().map_or(&self.read_only, OpenBlobStore::published)
    }

    /// Bytes of clusters that are free.
    pub fn free_bytes(&self) -> u64 {
        let clusters = match &self.store {
            Some(store) => store.free_clusters(),
            None => self.read_only.free_clusters(),
        };
        u64::from(clusters) * self.cluster_bytes()
    }

    /// How the metadata pages were used when the store was opened.
    pub fn metadata_pages(&self) -> MetadataPages {
        let store = &self.read_only;
        MetadataPages { used: store.used_pages().count_ones(), all: store.layout().pages }
    }

    /// Bytes of memory with what was read ahead.
    pub fn cached_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Whether nothing is in flight or waits.
    pub fn is_idle(&self) -> bool {
        let is_store_idle = self.store.as_ref().is_none_or(OpenBlobStore::is_idle);
        is_store_idle && self.queue.is_empty() && self.tasks.is_empty() && self.in_flight.is_empty()
    }

    /// Whether requests fail until the store is opened again: a flush or a write of metadata failed.
    pub fn is_broken(&self) -> bool {
        self.is_broken || !self.is_unloaded && self.store.as_ref().is_some_and(OpenBlobStore::is_closed)
    }

    #[cfg(test)]
    pub(crate) fn plant(&mut self, fault: FileFault) {
        self.fault = Some(fault);
    }

    #[cfg(test)]
    fn has_fault(&self, fault: fault::FileFault) -> bool {
        self.fault == Some(fault)
    }

    #[cfg(not(test))]
    fn has_fault(&self, _: fault::FileFault) -> bool {
        false
    }

    fn cluster_bytes(&self) -> u64 {
        u64::from(self.read_only.layout().cluster_bytes)
    }

    /// Clusters of a file's blob.
    fn clusters_of(&self, node: &FileNode) -> u32 {
        self.blobs().blob(node.blob).map_or(0, |blob| blob.clusters().length())
    }

    fn add_task(&mut self, task: Task) {
        self.tasks.insert(self.next_task, task);
        self.next_task += 1;
        self.advance(self.next_task - 1);
    }

    fn run(&mut self) {
        // Those that wait for space look again: something may have ended.
        let waiting = self.tasks.iter_mut().filter(|(_, task)| task.waits_for_space);
        let waiting = waiting.map(|(id, task)| {
            task.waits_for_space = false;
            *id
        });
        let waiting: Vec<u64> = waiting.collect();
        waiting.into_iter().for_each(|task| self.advance(task));
        if self.is_broken() {
            self.revoke_all_extents();
        }
        while self.take_store() | self.start_requests() {}
    }

    /// Starts requests that need nothing that another one has. Whether one was started.
    fn start_requests(&mut self) -> bool {
        let mut blocked = TaskLocks::default();
        let mut has_started = false;
        for (id, request) in std::mem::take(&mut self.queue) {
            // What a path names is certain only while no other request changes names.
            let waits_for_names = request.uses_names()
                && (blocked.names || blocked.all || self.tasks.values().any(|task| task.locks.names));
            if waits_for_names {
                blocked.names = true;
                self.queue.push_back((id, request));
                continue;
            }
            let locks = match self.locks(&request) {
                _ if self.is_broken() || self.is_unloaded => Err(BlobFsError::Broken),
                locks => locks,
            };
            let locks = match locks {
                Ok(locks) => locks,
                Err(error) => {
                    self.replies.push_back((id, Err(error)));
                    continue;
                }
            };
            let is_used = self.tasks.values().any(|task| task.locks.conflicts(&locks));
            if is_used || self.awaits_read_ahead(&request) || blocked.conflicts(&locks) {
                blocked.add(locks);
                self.queue.push_back((id, request));
                continue;
            }
            match self.steps(request) {
                Err(error) => self.replies.push_back((id, Err(error))),
                Ok(steps) => {
                    let steps = steps.into();
                    self.add_task(Task { request: Some(id), locks, steps, ..Task::default() });
                    has_started = true;
                }
            }
        }
        has_started
    }
}
