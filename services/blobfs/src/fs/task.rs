//! Requests that run: steps one after another, each of which may wait for I/O and changes of the store.

use std::collections::VecDeque;

use crate::error::BlobFsError;
use crate::index::{DirectoryNumber, FileNumber, IndexPlace};
use crate::request::{BlobFsReply, BlobFsRequestId, OpenHow, OpenNumber};

/// What a request has for itself while it runs.
#[derive(Clone, Debug, Default)]
pub(super) struct TaskLocks {
    /// Everything.
    pub(super) all: bool,
    /// The names.
    pub(super) names: bool,
    /// Files, and whether others must not read them.
    pub(super) files: Vec<(FileNumber, bool)>,
}

impl TaskLocks {
    pub(super) fn all() -> TaskLocks {
        TaskLocks { all: true, ..TaskLocks::default() }
    }

    pub(super) fn names(files: impl IntoIterator<Item = FileNumber>) -> TaskLocks {
        TaskLocks { names: true, files: files.into_iter().map(|file| (file, true)).collect(), all: false }
    }

    pub(super) fn file(file: FileNumber, exclusive: bool) -> TaskLocks {
        TaskLocks { files: vec![(file, exclusive)], ..TaskLocks::default() }
    }

    pub(super) fn conflicts(&self, other: &TaskLocks) -> bool {
        let is_shared = |(file, exclusive): &(FileNumber, bool)| {
            other.files.iter().any(|(used, by_one)| used == file && (*exclusive || *by_one))
        };
        let is_any = |locks: &TaskLocks| locks.all || locks.names || !locks.files.is_empty();
        let by_all = self.all && is_any(other) || other.all && is_any(self);
        by_all || self.names && other.names || self.files.iter().any(is_shared)
    }

    pub(super) fn add(&mut self, other: TaskLocks) {
        self.all |= other.all;
        self.names |= other.names;
        self.files.extend(other.files);
    }
}

/// A step of a request.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Reads blocks of a file to the task's data.
    Fetch {
        file: FileNumber,
        start: u64,
        bytes: usize,
    },
    /// Cuts the reply of a read out of what was fetched, and caches the rest.
    Cut {
        file: FileNumber,
        fetched: u64,
        offset: u64,
        length: usize,
    },
    /// Caches what was read ahead.
    CacheAhead {
        file: FileNumber,
        start: u64,
        end: u64,
    },
    /// Begins the buffer of appends with the last block, of which a part is on the device.
    LoadEnd {
        file: FileNumber,
    },
    /// The last block was fetched.
    EndLoaded {
        file: FileNumber,
    },
    /// Adds data to the buffer.
    AddEnd {
        file: FileNumber,
        data: Vec<u8>,
    },
    /// Writes data at the end of the file, a multiple of a block, past the buffer.
    WriteEnd {
        file: FileNumber,
        data: Vec<u8>,
    },
    /// Its whole blocks are written; the rest is the buffer.
    EndWritten {
        file: FileNumber,
        end: u64,
        rest: Vec<u8>,
    },
    /// Writes the buffer; `above` is the size that it may have without.
    WriteOut {
        file: FileNumber,
        above: usize,
    },
    /// Writes the buffer up to a place in the file, a multiple of a block, or its end. It is durable then, if
    /// nothing else of the file awaits a flush.
    WriteThrough {
        file: FileNumber,
        end: u64,
    },
    /// The buffer was written.
    WrittenOut {
        file: FileNumber,
        end: usize,
    },
    /// Forgets the buffer, which was written.
    DropBuffer {
        file: FileNumber,
    },
    /// Allocates clusters up to an offset.
    Grow {
        file: FileNumber,
        end: u64,
        exact: bool,
    },
    /// Writes a range that need not begin and end with a block.
    Patch {
        file: FileNumber,
        offset: u64,
        data: Vec<u8>,
    },
    /// Writes what was patched.
    WritePatch {
        file: FileNumber,
    },
    /// Makes what is between the end of the file and an offset zero.
    Fill {
        file: FileNumber,
        end: u64,
    },
    /// Writes zeroes to blocks.
    Zero {
        file: FileNumber,
        start: u64,
        end: u64,
    },
    /// The size that readers see.
    SetSize {
        file: FileNumber,
        size: u64,
    },
    /// Makes durable what was written of files.
    Flush {
        files: Vec<FileNumber>,
    },
    /// They are.
    Flushed {
        files: Vec<FileNumber>,
    },
    /// Writes the length and that the name is durable, if they are not.
    WriteLength {
        file: FileNumber,
    },
    LengthWritten {
        file: FileNumber,
        length: u64,
    },
    /// Makes zero what is behind the end of a log, up to a place.
    ZeroAhead {
        file: FileNumber,
        end: u64,
    },
    /// Writes a length that is ahead.
    WriteAhead {
        file: FileNumber,
        length: u64,
    },
    /// Writes that the name is durable, with the length of the last sync.
    Publish {
        file: FileNumber,
    },
    /// Writes a smaller length, if the one on the device is larger.
    ShortenLength {
        file: FileNumber,
        size: u64,
    },
    Shortened {
        file: FileNumber,
        size: u64,
    },
    /// Frees clusters that the size does not need.
    Trim {
        file: FileNumber,
    },
    /// Makes the blob of a file.
    CreateFile {
        place: IndexPlace,
    },
    FileCreated {
        place: IndexPlace,
        how: OpenHow,
        open: OpenNumber,
    },
    AddOpener {
        file: FileNumber,
        how: OpenHow,
        open: OpenNumber,
    },
    CreateDirectory {
        place: IndexPlace,
    },
    DirectoryCreated {
        place: IndexPlace,
        number: DirectoryNumber,
    },
    RenameFile {
        file: FileNumber,
        place: IndexPlace,
    },
    FileRenamed {
        file: FileNumber,
        place: IndexPlace,
        length: u64,
    },
    RenameDirectory {
        number: DirectoryNumber,
        place: IndexPlace,
    },
    DirectoryRenamed {
        number: DirectoryNumber,
        place: IndexPlace,
    },
    /// Marks a file that is open as deleted.
    MarkDeleted {
        file: FileNumber,
    },
    Unlinked {
        file: FileNumber,
    },
    /// Deletes a file.
    DeleteFile {
        file: FileNumber,
    },
    FileDeleted {
        file: FileNumber,
    },
    DeleteDirectory {
        number: DirectoryNumber,
    },
    DirectoryDeleted {
        number: DirectoryNumber,
    },
    /// Deletes blobs at the same time.
    DeleteBlobs {
        blobs: Vec<blobstore::BlobId>,
    },
    /// Deletes blobs that loading found to be of no use.
    DeleteBlob {
        blob: blobstore::BlobId,
    },
    /// Frees clusters that loading found to be of no use.
    ResizeBlob {
        blob: blobstore::BlobId,
        clusters: u32,
    },
    /// Closes the store.
    Unload,
    Reply(BlobFsReply),
    /// Replies how many bytes of the file have clusters.
    ReplyReserved {
        file: FileNumber,
    },
}

/// A patch that waits for the blocks that it covers in part.
#[derive(Clone, Debug)]
pub(super) struct PendingPatch {
    /// Where the blocks begin in the file.
    pub(super) start: u64,
    /// The blocks, with the data in them.
    pub(super) blocks: Vec<u8>,
    /// The data is at this range of the file.
    pub(super) data: std::ops::Range<u64>,
    /// Bytes of the file.
    pub(super) valid: u64,
}

/// A request that runs.
#[derive(Clone, Debug, Default)]
pub(super) struct Task {
    pub(super) request: Option<BlobFsRequestId>,
    pub(super) locks: TaskLocks,
    pub(super) steps: VecDeque<Step>,
    /// I/O and changes that the last step waits for.
    pub(super) pending: usize,
    pub(super) waits_for_space: bool,
    pub(super) error: Option<BlobFsError>,
    pub(super) data: Vec<u8>,
    pub(super) patch: Option<PendingPatch>,
    pub(super) blob: Option<blobstore::BlobId>,
    pub(super) reply: Option<BlobFsReply>,
    /// The opener that it reads ahead for.
    pub(super) ahead_of: Option<OpenNumber>,
}

/// What an I/O is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum TaskIo {
    /// The store's own.
    Store(u64),
    /// Of a task, nothing comes back; with the state of the store that it uses.
    Task {
        task: u64,
        epoch: u64,
    },
    /// Reads to the task's data at an index.
    Fetch {
        task: u64,
        epoch: u64,
        at: usize,
    },
    /// Reads a block of the patch at an index.
    Block {
        task: u64,
        epoch: u64,
        at: usize,
    },
    Flush {
        task: u64,
    },
}

impl TaskIo {
    pub(super) fn epoch(&self) -> Option<u64> {
        match self {
            TaskIo::Task { epoch, .. } | TaskIo::Fetch { epoch, .. } | TaskIo::Block { epoch, .. } => {
                Some(*epoch)
            }
            TaskIo::Store(_) | TaskIo::Flush { .. } => None,
        }
    }
}

impl PendingPatch {
    /// Takes what was read of the blocks at an index: what the file has, and the patch does not change.
    pub(super) fn fill(&mut self, at: usize, read: &[u8]) {
        for (index, byte) in read.iter().enumerate() {
            let offset = self.start + (at + index) as u64;
            if offset < self.valid
                && !self.data.contains(&offset)
                && let Some(to) = self.blocks.get_mut(at + index)
            {
                *to = *byte;
            }
        }
    }
}
