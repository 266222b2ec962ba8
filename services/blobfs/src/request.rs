//! Requests on files, and their replies.

/// Names a request that was begun. Ids ascend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobFsRequestId(pub u64);

/// Names a file that is open. Numbers are not used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpenNumber(pub u64);

/// How a file is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenHow {
    /// The opener may write: the only one at a time.
    pub write: bool,
    /// The file is made if there is none. It survives a power failure from its first sync on.
    pub create: bool,
    /// There must be none.
    pub only_new: bool,
    /// It is truncated to nothing, which is durable when the request ends.
    pub truncate: bool,
}

impl OpenHow {
    /// Reads an existing file.
    pub const READ: OpenHow = OpenHow { write: false, create: false, only_new: false, truncate: false };
    /// Writes an existing file.
    pub const WRITE: OpenHow = OpenHow { write: true, ..OpenHow::READ };
    /// Writes a file, which is made if there is none.
    pub const CREATE: OpenHow = OpenHow { create: true, ..OpenHow::WRITE };
    /// Writes a file that is empty at first.
    pub const REPLACE: OpenHow = OpenHow { truncate: true, ..OpenHow::CREATE };
}

/// A request. Paths are bytes, from the root; a slash at the front makes no difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlobFsRequest {
    /// Opens a file. Replies [`BlobFsReply::Opened`].
    Open {
        /// The file.
        path: Vec<u8>,
        /// How.
        how: OpenHow,
    },
    /// Opens a file for writing, or makes it, so that no other can: as `LockFile` of RocksDB. What locks is
    /// the opener; it ends with [`Close`](Self::Close), and with the program.
    Lock {
        /// The file.
        path: Vec<u8>,
    },
    /// Closes a file. What was not synced stays in memory, and is lost with a power failure. A file that was
    /// unlinked is deleted with its last opener.
    Close {
        /// The opener.
        open: OpenNumber,
    },
    /// Reads. Replies [`BlobFsReply::Data`], which is shorter at the end of the file.
    Read {
        /// The opener.
        open: OpenNumber,
        /// Where.
        offset: u64,
        /// Bytes.
        length: usize,
    },
    /// Writes anywhere. What is between the end of the file and `offset` is zero.
    Write {
        /// The opener.
        open: OpenNumber,
        /// Where.
        offset: u64,
        /// What.
        data: Vec<u8>,
    },
    /// Writes at the end of the file.
    Append {
        /// The opener.
        open: OpenNumber,
        /// What.
        data: Vec<u8>,
    },
    /// Sets the size. A smaller one is durable when the request ends.
    Truncate {
        /// The opener.
        open: OpenNumber,
        /// Bytes.
        size: u64,
    },
    /// Allocates clusters for a file that is expected to grow, in one change of the metadata
    /// instead of one each time it has grown. It does nothing if they would be more than half of what is
    /// free. What is not used is returned when the writer closes the file.
    Allocate {
        /// The opener.
        open: OpenNumber,
        /// Bytes of the file.
        size: u64,
    },
    /// Allocates clusters for data that is accepted before it is written, and more as a write does, so that
    /// the writes have space. Replies [`BlobFsReply::Reserved`]. A store without that much free is
    /// [`BlobFsError::NoSpace`](crate::BlobFsError::NoSpace), and the file is as before. What is not used is
    /// returned as for [`Allocate`](Self::Allocate), and with a [`Truncate`](Self::Truncate) to less.
    Reserve {
        /// The opener.
        open: OpenNumber,
        /// Bytes of the file, with what is accepted.
        size: u64,
    },
    /// Makes durable: the data, then size and name at once.
    Sync {
        /// The opener.
        open: OpenNumber,
    },
    /// Makes the data of a log durable, with one flush and mostly no metadata: the length on the device is
    /// up to [`LOG_AHEAD_BYTES`](crate::LOG_AHEAD_BYTES) ahead, over zeroes. A power failure leaves what was
    /// synced, and then zeroes; before them may be what was appended since, but never behind a gap: what is
    /// beyond the next multiple of [`LOG_BLOCK_BYTES`](crate::LOG_BLOCK_BYTES) is there only with all before
    /// it. The length is right again with the next [`Sync`](Self::Sync), when the file is closed, and when
    /// the store is.
    SyncLog {
        /// The opener, which appends.
        open: OpenNumber,
    },
    /// Renames a file, with its data, or a directory. A file of the new name is replaced at once: after a
    /// power failure there is the old one or the new one, as a whole.
    Rename {
        /// The name until now.
        from: Vec<u8>,
        /// The new name.
        to: Vec<u8>,
    },
    /// Removes the name of a file, and the file with its last opener.
    Unlink {
        /// The file.
        path: Vec<u8>,
    },
    /// Removes files and empty directories at the same time, so that they share flushes. Nothing is removed
    /// if one of them cannot be; after a power failure any of them may be left.
    RemoveAll {
        /// The files and directories, each once.
        paths: Vec<Vec<u8>>,
    },
    /// Makes a directory. It is durable when the request ends.
    MakeDirectory {
        /// The directory.
        path: Vec<u8>,
    },
    /// Removes an empty directory.
    RemoveDirectory {
        /// The directory.
        path: Vec<u8>,
    },
    /// Makes the names of new files in a directory durable, with what was synced of the files.
    SyncDirectory {
        /// The directory.
        path: Vec<u8>,
    },
    /// Syncs all files.
    SyncAll,
    /// Syncs all files and closes the store, so that it loads at once. Nothing can be begun afterwards.
    Unload,
}

impl BlobFsRequest {
    /// Whether what the request does depends on names, or changes them.
    pub(crate) fn uses_names(&self) -> bool {
        use BlobFsRequest::*;
        match self {
            Open { .. } | Lock { .. } | Close { .. } | Rename { .. } | Unlink { .. } => true,
            RemoveAll { .. }
            | MakeDirectory { .. }
            | RemoveDirectory { .. }
            | SyncDirectory { .. }
            | SyncAll
            | Unload => true,
            Read { .. } | Write { .. } | Append { .. } | Truncate { .. } => false,
            Allocate { .. } | Reserve { .. } | Sync { .. } | SyncLog { .. } => false,
        }
    }
}

/// What a request returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlobFsReply {
    /// It is done.
    Done,
    /// The opener of a file.
    Opened(OpenNumber),
    /// What was read.
    Data(Vec<u8>),
    /// Bytes of the file that have clusters.
    Reserved(u64),
}

/// What a path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStatus {
    /// Whether it is a directory.
    pub is_directory: bool,
    /// Bytes of a file.
    pub size: u64,
    /// Bytes of the clusters that a file has.
    pub allocated_bytes: u64,
    /// Whether nothing of it would be lost by a power failure.
    pub is_synced: bool,
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryItem {
    /// The name.
    pub name: Vec<u8>,
    /// What it is.
    pub status: FileStatus,
}

/// An I/O that the files need. Any number may be in flight, and they complete in any order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobFsIo {
    /// Names it in [`BlobFs::complete`](crate::BlobFs::complete). Ids are not used twice.
    pub id: u64,
    /// What to do.
    pub action: BlobFsAction,
}

/// What an I/O does. Offsets are bytes of the device; they and lengths are multiples of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlobFsAction {
    /// Read.
    Read {
        /// Where.
        offset: u64,
        /// Bytes.
        bytes: usize,
    },
    /// Write.
    Write {
        /// Where.
        offset: u64,
        /// What.
        data: Vec<u8>,
        /// It is durable when it completes (FUA).
        durable: bool,
    },
    /// Make a range read as zeroes.
    WriteZeroes {
        /// Where.
        offset: u64,
        /// Bytes.
        bytes: u64,
    },
    /// The content is of no use any more. A device without that does nothing.
    Deallocate {
        /// Where.
        offset: u64,
        /// Bytes.
        bytes: u64,
    },
    /// Make durable what has completed before.
    Flush,
}
