//! What a library implements.

use std::sync::Arc;

use crate::error::FileError;

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum FileOpen {
    /// For reading; it exists.
    Read = 0,
    /// For writing, from its start. One that exists is truncated to nothing.
    Create = 1,
    /// For writing, at its end. It is made if there is none.
    Reopen = 2,
    /// For writing, from its start, over what it has: a log that is recycled.
    Reuse = 3,
    /// For reading and writing anywhere; it exists.
    ReadWrite = 4,
}

impl FileOpen {
    pub(crate) fn from_number(number: i32) -> Option<FileOpen> {
        [FileOpen::Read, FileOpen::Create, FileOpen::Reopen, FileOpen::Reuse, FileOpen::ReadWrite]
            .into_iter()
            .find(|how| *how as i32 == number)
    }
}

/// What a path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileAttributes {
    /// Whether it is a directory.
    pub is_directory: bool,
    /// Bytes of a file, with those that are in memory only.
    pub bytes: u64,
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedName {
    /// The name.
    pub name: Vec<u8>,
    /// What it is.
    pub status: FileAttributes,
}

/// One of several reads.
pub struct FileRead<'a> {
    /// Where in the file.
    pub offset: u64,
    /// Where to.
    pub out: &'a mut [u8],
    /// Bytes that were read, fewer at the end of the file; set by the call.
    pub result: Result<usize, FileError>,
}

/// A read that was begun. Dropped, its data is not wanted any more.
pub trait BegunRead: Send {
    /// Waits for it. Returns the bytes that were read, fewer than `out` has at the end of the file.
    ///
    /// # Errors
    /// The device's.
    fn finish(self: Box<Self>, out: &mut [u8]) -> Result<usize, FileError>;
}

/// A file that is open, for any thread.
pub trait RocksFile: Send + Sync {
    /// Bytes, with those that are in memory only.
    fn size(&self) -> u64;

    /// Reads. Returns the bytes that were read, fewer than `out` has at the end of the file.
    ///
    /// # Errors
    /// The device's.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<usize, FileError>;

    /// Reads several ranges at the same time. Each has its own result.
    fn read_many(&self, reads: &mut [FileRead<'_>]);

    /// Begins a read, and does not wait for it.
    ///
    /// # Errors
    /// As for [`read`](Self::read), of what is known already.
    fn begin_read(&self, offset: u64, length: usize) -> Result<Box<dyn BegunRead>, FileError>;

    /// Writes behind what this opener wrote last.
    ///
    /// # Errors
    /// The store is full, or the device failed; also of data that was accepted before.
    fn append(&self, data: &[u8]) -> Result<(), FileError>;

    /// Writes anywhere.
    ///
    /// # Errors
    /// As for [`append`](Self::append).
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), FileError>;

    /// Begins to write to the device what is in memory, and does not wait for it.
    ///
    /// # Errors
    /// As for [`append`](Self::append).
    fn write_out(&self) -> Result<(), FileError>;

    /// Allocates space for a file that is expected to grow. What is not used is returned when the
    /// file is closed.
    ///
    /// # Errors
    /// The device failed. A store without that much space is none.
    fn allocate(&self, bytes: u64) -> Result<(), FileError>;

    /// Makes the file durable.
    ///
    /// # Errors
    /// As for [`append`](Self::append).
    fn sync(&self) -> Result<(), FileError>;

    /// Sets the size.
    ///
    /// # Errors
    /// As for [`append`](Self::append).
    fn truncate(&self, bytes: u64) -> Result<(), FileError>;

    /// Closes the file; nothing is called afterwards. A file that is dropped is closed without a result.
    ///
    /// # Errors
    /// As for [`append`](Self::append).
    fn close(&self) -> Result<(), FileError>;
}

/// The files of a store, for any thread. Paths are bytes; a slash at the front makes no difference.
pub trait RocksFiles: Send + Sync {
    /// Opens a file.
    ///
    /// # Errors
    /// There is none, another writes it, the store is full or the device failed.
    fn open(&self, path: &[u8], how: FileOpen) -> Result<Box<dyn RocksFile>, FileError>;

    /// Locks a file, which is made if there is none, until what is returned is closed or dropped.
    ///
    /// # Errors
    /// [`Busy`](crate::ErrorKind::Busy) while another has the lock.
    fn lock(&self, path: &[u8]) -> Result<Box<dyn RocksFile>, FileError>;

    /// What a path is.
    ///
    /// # Errors
    /// There is nothing.
    fn status(&self, path: &[u8]) -> Result<FileAttributes, FileError>;

    /// What a directory has.
    ///
    /// # Errors
    /// There is none.
    fn list(&self, path: &[u8]) -> Result<Vec<ListedName>, FileError>;

    /// Removes the name of a file.
    ///
    /// # Errors
    /// There is none, or it is a directory.
    fn unlink(&self, path: &[u8]) -> Result<(), FileError>;

    /// Makes a directory.
    ///
    /// # Errors
    /// There is something of that name, or no directory that would have it.
    fn make_directory(&self, path: &[u8]) -> Result<(), FileError>;

    /// Removes an empty directory.
    ///
    /// # Errors
    /// There is none, or it has entries.
    fn remove_directory(&self, path: &[u8]) -> Result<(), FileError>;

    /// Renames. A file of the new name is replaced at once.
    ///
    /// # Errors
    /// There is no such file.
    fn rename(&self, from: &[u8], to: &[u8]) -> Result<(), FileError>;

    /// Makes the names in a directory durable.
    ///
    /// # Errors
    /// There is no such directory, or the device failed.
    fn sync_directory(&self, path: &[u8]) -> Result<(), FileError>;

    /// Bytes that files can still get.
    ///
    /// # Errors
    /// The store has ended.
    fn free_bytes(&self) -> Result<u64, FileError>;
}

/// What a library exports.
pub struct FilesDefinition {
    /// Opens the store that a URI names. Stores of one URI are one.
    pub open: fn(&str) -> Result<Arc<dyn RocksFiles>, FileError>,
    /// Closes the stores that are still open: the process exits.
    pub close_all: fn(),
}
