//! Operations on files, with io_uring only.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use block_io::RegisteredPages;
use dma::Data;
use slots::Slot;

use super::uring::{OperationMemory, OperationParameters};
use super::{BackendState, EventClient, EventLoopInner, PendingOperation};
use crate::ublk_queue::{UblkQueueFile, UblkQueueMap};
use crate::vectors::{IoVectors, check_access};

/// Vectors that are kept for later operations: those of a busy disk.
const SPARE_VECTORS_MAX: usize = 256;

/// A file operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileOperation {
    /// Read into the data.
    Read,
    /// Write the data.
    Write(WriteMode),
    /// Make all completed writes durable (`fdatasync`).
    Sync,
    /// Deallocate the range, which then reads as zeroes (`FALLOC_FL_PUNCH_HOLE`).
    Punch,
    /// Zero the range and keep it allocated (`FALLOC_FL_ZERO_RANGE`).
    Zero,
}

/// When a write completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// Once the kernel or the device has the data, possibly in a volatile cache.
    Cached,
    /// Once the data is durable (`RWF_DSYNC`).
    Durable,
    /// As [`Cached`](Self::Cached), all of the data or none (`RWF_ATOMIC`, Linux 6.11): of a file with direct I/O that
    /// supports it, from a single slice.
    Atomic,
    /// As [`Durable`](Self::Durable), likewise.
    AtomicDurable,
}

/// The error of a file operation that was not submitted; returns its data.
#[derive(Debug)]
pub struct RejectedOperation {
    /// `WouldBlock` at the limit of operations, `NotFound` for an unknown file, `Unsupported` with epoll.
    pub reason: io::ErrorKind,
    /// The data of the operation.
    pub data: Option<Data>,
}

/// Identifies a file for operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(pub(super) Slot);

/// A file in the table of an event loop.
pub(super) struct LoopFile {
    pub(super) fd: OwnedFd,
    /// It and the memory of its operations are registered with io_uring, if that is possible.
    registered: bool,
    /// Of the character device of a ublk disk.
    pub(super) ublk: Option<Box<UblkQueueMap>>,
}

impl EventClient {
    /// Takes ownership of a file for operations on it. Fails with `Unsupported` with epoll, and with `QuotaExceeded`
    /// at the limit of files.
    pub fn add_file(&self, file: OwnedFd) -> io::Result<FileId> {
        self.insert_file(file, None)
    }

    /// As [`add_file`](Self::add_file), for a queue of a ublk disk. Neither the file nor the memory of its
    /// operations is registered with io_uring: the driver copies from and to unregistered memory only, and before Linux
    /// 6.13, an operation on a registered file, such as a fetch that waits for a request, keeps the kernel from closing
    /// every registered file that is removed after the operation was submitted.
    pub fn add_ublk_queue(&self, queue: UblkQueueFile) -> io::Result<FileId> {
        let (file, mut map) = queue.into_parts();
        if map.registers {
            map.pages = self.inner.borrow_mut().pages.take(map.depth());
        }
        self.insert_file(file, Some(Box::new(map)))
    }

    fn insert_file(&self, fd: OwnedFd, ublk: Option<Box<UblkQueueMap>>) -> io::Result<FileId> {
        let mut inner = self.inner.borrow_mut();
        if !matches!(inner.backend, BackendState::Uring(_)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let raw = fd.as_raw_fd();
        let registered = ublk.is_none();
        let slot = inner.files.insert(LoopFile { fd, registered, ublk });
        let slot = slot.map_err(|_| io::Error::from(io::ErrorKind::QuotaExceeded))?;
        if registered && let BackendState::Uring(uring) = &mut inner.backend {
            uring.register_file(slot.index(), raw);
        }
        Ok(FileId(slot))
    }

    /// Closes a file. Operations on it must have completed.
    pub fn remove_file(&self, file: FileId) {
        let mut guard = self.inner.borrow_mut();
        let inner = &mut *guard;
        let Some(removed) = inner.files.remove(file.0) else { return };
        if let Some(pages) = removed.ublk.and_then(|map| map.pages) {
            inner.pages.give_back(pages);
        }
        if removed.registered
            && let BackendState::Uring(uring) = &mut inner.backend
        {
            uring.unregister_file(file.0.index());
        }
    }

    /// Queues a file operation on `length` bytes at `offset` of the file, from or to the data's bytes at `start`. Data of
    /// several slices is one operation too (`readv`, `writev`). The [`EventCompletion`] with `tag` returns the data.
    ///
    /// # Panics
    /// For a read or write, if the data has fewer than `length` bytes from `start`, or these are in more than
    /// [`IO_VECTORS_MAX`](crate::IO_VECTORS_MAX) slices; if a read's data is shared.
    pub fn submit_operation(
        &self,
        file: FileId,
        operation: FileOperation,
        offset: u64,
        length: u64,
        data: Option<(Data, usize)>,
        tag: u64,
    ) -> Result<(), RejectedOperation> {
        let mut guard = self.inner.borrow_mut();
        let inner = &mut *guard;
        let (data, start) = match data {
            Some((data, start)) => (Some(data), start),
            None => (None, 0),
        };
        let Some(LoopFile { fd, registered, .. }) = inner.files.get(file.0) else {
            return Err(RejectedOperation { reason: io::ErrorKind::NotFound, data });
        };
        let transfers = matches!(operation, FileOperation::Read | FileOperation::Write(_));
        let bytes = if transfers { length } else { 0 };
        check_access(data.as_ref(), start, bytes, operation == FileOperation::Read);
        let BackendState::Uring(uring) = &mut inner.backend else {
            return Err(RejectedOperation { reason: io::ErrorKind::Unsupported, data });
        };
        let (fd, registered) = (fd.as_raw_fd(), *registered);
        let vectors = match &data {
            Some(Data::Many(_)) if transfers => Some(inner.spare_vectors.pop().unwrap_or_default()),
            _ => None,
        };
        let pending = PendingOperation::Operation { client: self.id, tag, data, vectors };
        let slot = match inner.pending.insert(pending) {
            Ok(slot) => slot,
            Err(PendingOperation::Operation { data, .. }) => {
                return Err(RejectedOperation { reason: io::ErrorKind::WouldBlock, data });
            }
            Err(_) => unreachable!("a full slab returns the operation"),
        };
        let Some(PendingOperation::Operation { data, vectors, .. }) = inner.pending.get_mut(slot) else {
            unreachable!("the operation was just inserted")
        };
        inner.operations_in_flight += 1;
        let memory = match (&*data, vectors) {
            (Some(Data::One(buffer)), _) => OperationMemory::Buffer(buffer, start),
            (Some(many), Some(vectors)) => {
                let (address, count) = vectors.describe(many.slices(), start, length as usize);
                OperationMemory::Vectors(address, count)
            }
            _ => OperationMemory::None,
        };
        uring.operate(OperationParameters {
            file: registered.then_some(file.0.index()),
            fd,
            operation,
            offset,
            length,
            memory,
            user_data: slot.to_bits(),
        });
        Ok(())
    }

    /// As [`submit_operation`](Self::submit_operation), for a read or write of a registered file from or to the pages of a
    /// ublk request, from the byte that is given with them. They are the kernel's: nothing is copied here.
    ///
    /// # Panics
    /// If the operation is neither a read nor a write, or the index is not one of a [queue](Self::add_ublk_queue).
    pub fn submit_registered(
        &self,
        file: FileId,
        operation: FileOperation,
        offset: u64,
        length: u64,
        (pages, start): (RegisteredPages, u32),
        tag: u64,
    ) -> Result<(), RejectedOperation> {
        assert!(matches!(operation, FileOperation::Read | FileOperation::Write(_)), "{operation:?} of pages");
        assert!(super::pages::contains(pages.index), "buffer {} is not of a queue", pages.index);
        let mut guard = self.inner.borrow_mut();
        let inner = &mut *guard;
        let rejected = |reason| RejectedOperation { reason, data: None };
        let Some(LoopFile { fd, registered, .. }) = inner.files.get(file.0) else {
            return Err(rejected(io::ErrorKind::NotFound));
        };
        let BackendState::Uring(uring) = &mut inner.backend else {
            return Err(rejected(io::ErrorKind::Unsupported));
        };
        let pending = PendingOperation::Operation { client: self.id, tag, data: None, vectors: None };
        let Ok(slot) = inner.pending.insert(pending) else {
            return Err(rejected(io::ErrorKind::WouldBlock));
        };
        inner.operations_in_flight += 1;
        uring.operate(OperationParameters {
            file: registered.then_some(file.0.index()),
            fd: fd.as_raw_fd(),
            operation,
            offset,
            length,
            memory: OperationMemory::Registered(pages.index, start),
            user_data: slot.to_bits(),
        });
        Ok(())
    }

    /// Whether file operations are supported: with io_uring only.
    pub fn supports_files(&self) -> bool {
        matches!(self.inner.borrow().backend, BackendState::Uring(_))
    }
}

impl EventLoopInner {
    /// Keeps the vectors of a completed operation for another.
    #[cold]
    pub(super) fn recycle_vectors(&mut self, vectors: Box<IoVectors>) {
        if self.spare_vectors.len() < SPARE_VECTORS_MAX {
            self.spare_vectors.push(vectors);
        }
    }
}
