//! A file while the store is open.

use blobstore::BlobId;

use crate::index::IndexPlace;

/// The end of a file that is being appended to: what may not be on the device yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct AppendBuffer {
    /// Where it begins in the file: a multiple of a block. It ends with the file.
    pub(crate) start: u64,
    pub(crate) data: Vec<u8>,
    /// Bytes of it that are on the device.
    pub(crate) written: usize,
}

impl AppendBuffer {
    pub(crate) fn is_dirty(&self) -> bool {
        self.written < self.data.len()
    }
}

/// A file.
#[derive(Clone, Debug)]
pub(crate) struct FileNode {
    pub(crate) blob: BlobId,
    /// Where it is, or was until it was unlinked.
    pub(crate) place: IndexPlace,
    /// Bytes that readers see.
    pub(crate) size: u64,
    /// Bytes that the blob says.
    pub(crate) durable: u64,
    /// Bytes from the front that a flush has made durable, for logs: [`durable`](Self::durable) is ahead of
    /// the size there.
    pub(crate) flushed: u64,
    /// The name survives a power failure.
    pub(crate) is_published: bool,
    pub(crate) is_unlinked: bool,
    pub(crate) is_read_only: bool,
    /// Data was written since the last flush.
    pub(crate) needs_flush: bool,
    pub(crate) opens: u32,
    /// The opener that may write.
    pub(crate) writer: Option<u64>,
    pub(crate) buffer: Option<AppendBuffer>,
}

impl FileNode {
    pub(crate) fn new(blob: BlobId, place: IndexPlace) -> FileNode {
        FileNode {
            blob,
            place,
            size: 0,
            durable: 0,
            flushed: 0,
            is_published: false,
            is_unlinked: false,
            is_read_only: false,
            needs_flush: false,
            opens: 0,
            writer: None,
            buffer: None,
        }
    }

    pub(crate) fn is_dirty(&self) -> bool {
        self.buffer.as_ref().is_some_and(AppendBuffer::is_dirty)
    }

    /// Whether the length on the device is that of a log, ahead of what is written.
    pub(crate) fn is_ahead(&self) -> bool {
        self.is_published && self.durable > self.size
    }

    /// Whether a sync would write something.
    pub(crate) fn needs_sync(&self) -> bool {
        self.is_dirty() || self.needs_flush || self.size != self.durable || !self.is_published
    }
}
