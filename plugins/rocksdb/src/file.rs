//! An open file.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blobfs::{BlobFsError, BlobFsReply, BlobFsRequest, OpenNumber};
use rocksdb_abi::{BegunRead, ErrorKind, FileError, FileRead, RocksFile};

use crate::call::Call;
use crate::direct::DirectFile;
use crate::store::Store;
use crate::tail::Tail;

/// Reads of one call in flight, a part of what the files take.
const READS_MAX: usize = 256;
/// Bytes of a read that is large enough without reading ahead.
const AHEAD_BYTES: usize = 64 << 10;

/// An error of the files as RocksDB acts on it.
pub(crate) fn file_error(error: BlobFsError) -> FileError {
    let kind = match &error {
        BlobFsError::NotFound => ErrorKind::NotFound,
        BlobFsError::NoSpace | BlobFsError::NoPages => ErrorKind::NoSpace,
        BlobFsError::Locked | BlobFsError::Busy => ErrorKind::Busy,
        BlobFsError::Invalid(_) | BlobFsError::NameTooLong | BlobFsError::NotOpen => ErrorKind::Invalid,
        BlobFsError::Exists
        | BlobFsError::IsDirectory
        | BlobFsError::NotDirectory
        | BlobFsError::NotEmpty
        | BlobFsError::ReadOnly
        | BlobFsError::Io
        | BlobFsError::Broken => ErrorKind::Io,
    };
    FileError::new(kind, error.to_string())
}

/// A file that is open.
pub(crate) struct OpenFile {
    store: Arc<Store>,
    open: OpenNumber,
    /// What is in memory of a file that is written in order, by this opener or another.
    tail: Option<Arc<Tail>>,
    /// The tail is this opener's.
    is_writer: bool,
    is_closed: AtomicBool,
    /// Of an opener that only reads.
    direct: Option<DirectFile>,
    /// Where the last read ended.
    next_offset: AtomicU64,
}

impl OpenFile {
    pub(crate) fn new(store: Arc<Store>, open: OpenNumber) -> Self {
        OpenFile {
            store,
            open,
            tail: None,
            is_writer: false,
            is_closed: AtomicBool::new(false),
            direct: None,
            next_offset: AtomicU64::new(u64::MAX),
        }
    }

    /// The same with what is in memory of it.
    pub(crate) fn with_tail(mut self, tail: Option<Arc<Tail>>, is_writer: bool) -> OpenFile {
        (self.tail, self.is_writer) = (tail, is_writer);
        self
    }

    /// The same for an opener that only reads.
    pub(crate) fn for_reading(mut self) -> OpenFile {
        self.direct = Some(DirectFile::default());
        self
    }

    fn writer(&self) -> Result<&Tail, FileError> {
        let tail = self.tail.as_deref().filter(|_| self.is_writer);
        tail.ok_or_else(|| FileError::new(ErrorKind::Invalid, "the file is not open for writing in order"))
    }

    /// Has what another opener has in memory written, so that a read finds it.
    fn see_tail(&self) -> Result<(), FileError> {
        match &self.tail {
            Some(tail) if !self.is_writer => tail.write_out().map_err(file_error),
            _ => Ok(()),
        }
    }

    /// Reads on this thread, if the file can be read so. Small reads in order go to the reactor, which reads
    /// ahead.
    fn read_direct(&self, offset: u64, out: &mut [u8]) -> Option<usize> {
        let direct = self.direct.as_ref()?;
        let end = offset.saturating_add(out.len() as u64);
        let is_in_order = self.next_offset.swap(end, Ordering::Relaxed) == offset;
        let is_written = self.tail.as_ref().is_some_and(|tail| !tail.is_closed());
        if is_written || is_in_order && out.len() < AHEAD_BYTES {
            return None;
        }
        direct.read(&self.store, self.open, offset, out)
    }

    fn request(&self, request: BlobFsRequest) -> Result<BlobFsReply, FileError> {
        self.store.request(request).map_err(file_error)
    }
}

/// Copies a reply, and returns its bytes.
fn copy(reply: Result<BlobFsReply, BlobFsError>, out: &mut [u8]) -> Result<usize, FileError> {
    match reply.map_err(file_error)? {
        BlobFsReply::Data(data) => {
            let length = data.len().min(out.len());
            out[..length].copy_from_slice(&data[..length]);
            Ok(length)
        }
        _ => Err(file_error(BlobFsError::Broken)),
    }
}

/// A read on the reactor. What is read is copied by the one that waits: nothing is written to memory of a
/// read that was dropped.
struct BegunOnReactor {
    store: Arc<Store>,
    call: Call<BlobFsReply>,
}

impl BegunRead for BegunOnReactor {
    fn finish(self: Box<Self>, out: &mut [u8]) -> Result<usize, FileError> {
        copy(self.store.wait(self.call), out)
    }
}

impl RocksFile for OpenFile {
    fn size(&self) -> u64 {
        match self.tail.as_ref().filter(|_| self.is_writer) {
            Some(tail) => tail.size(),
            None => {
                let open = self.open;
                let found =
                    self.store.inspect(move |fs| fs.open_status(open).map_or(0, |status| status.size));
                found.unwrap_or(0)
            }
        }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<usize, FileError> {
        if let Some(length) = self.read_direct(offset, out) {
            return Ok(length);
        }
        self.see_tail()?;
        let read = BlobFsRequest::Read { open: self.open, offset, length: out.len() };
        copy(self.store.request(read), out)
    }

    fn read_many(&self, reads: &mut [FileRead<'_>]) {
        if let [read] = reads {
            read.result = self.read(read.offset, read.out);
            return;
        }
        // Several are in flight at the same time on the reactor.
        if let Err(error) = self.see_tail() {
            reads.iter_mut().for_each(|read| read.result = Err(error.clone()));
            return;
        }
        let begin = |read: &FileRead<'_>| {
            let (offset, length) = (read.offset, read.out.len());
            self.store.begin(BlobFsRequest::Read { open: self.open, offset, length })
        };
        for part in reads.chunks_mut(READS_MAX) {
            let calls: Vec<_> = part.iter().map(begin).collect();
            for (read, call) in part.iter_mut().zip(calls) {
                read.result = copy(self.store.wait(call), read.out);
            }
        }
    }

    fn begin_read(&self, offset: u64, length: usize) -> Result<Box<dyn BegunRead>, FileError> {
        self.see_tail()?;
        let call = self.store.begin(BlobFsRequest::Read { open: self.open, offset, length });
        Ok(Box::new(BegunOnReactor { store: self.store.clone(), call }))
    }

    fn append(&self, data: &[u8]) -> Result<(), FileError> {
        self.writer()?.append(data).map_err(file_error)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), FileError> {
        self.request(BlobFsRequest::Write { open: self.open, offset, data: data.to_vec() }).map(drop)
    }

    fn write_out(&self) -> Result<(), FileError> {
        match &self.tail {
            Some(tail) => tail.write_out().map_err(file_error),
            None => Ok(()),
        }
    }

    fn allocate(&self, bytes: u64) -> Result<(), FileError> {
        match self.request(BlobFsRequest::Allocate { open: self.open, size: bytes }) {
            Err(error) if error.kind != ErrorKind::NoSpace => Err(error),
            _ => Ok(()),
        }
    }

    fn sync(&self) -> Result<(), FileError> {
        match &self.tail {
            Some(tail) if self.is_writer => tail.sync().map_err(file_error),
            _ => self.request(BlobFsRequest::Sync { open: self.open }).map(drop),
        }
    }

    fn truncate(&self, bytes: u64) -> Result<(), FileError> {
        match &self.tail {
            Some(tail) if self.is_writer => tail.truncate(bytes).map_err(file_error),
            _ => self.request(BlobFsRequest::Truncate { open: self.open, size: bytes }).map(drop),
        }
    }

    fn close(&self) -> Result<(), FileError> {
        if self.is_closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        match &self.tail {
            Some(tail) if self.is_writer => tail.close().map_err(file_error),
            _ => self.request(BlobFsRequest::Close { open: self.open }).map(drop),
        }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        // Its result would have been that of `close`.
        _ = self.close();
    }
}
