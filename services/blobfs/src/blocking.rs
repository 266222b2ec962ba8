//! Files for threads that wait: requests run to their end on the calling thread.

use std::io;
use std::sync::Mutex;

use blobstore::{
    BlobStoreDevice, BlobStoreFormat, ChangeError, LoadError, LoadOptions, StoreIoFailed, load_with,
};

use crate::content::{DeviceContent, DeviceLook};
use crate::error::{BlobFsError, NoBlobFs};
use crate::fs::{BlobFs, BlobFsOptions};
use crate::request::{
    BlobFsAction, BlobFsReply, BlobFsRequest, DirectoryItem, FileStatus, OpenHow, OpenNumber,
};

/// A device whose operations wait. Offsets and lengths are multiples of its block.
pub trait BlockingDevice: Send {
    /// What it promises.
    fn properties(&self) -> BlobStoreDevice;

    /// Reads all of `out`.
    ///
    /// # Errors
    /// The device's.
    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Writes all of `data`.
    ///
    /// # Errors
    /// The device's.
    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// The device's.
    fn write_zeroes(&mut self, offset: u64, bytes: u64) -> io::Result<()>;

    /// Says that a range is of no use any more. A device without that does nothing.
    ///
    /// # Errors
    /// The device's.
    fn deallocate(&mut self, offset: u64, bytes: u64) -> io::Result<()>;

    /// Makes durable what was written.
    ///
    /// # Errors
    /// The device's.
    fn flush(&mut self) -> io::Result<()>;
}

/// What is on a device, for who would overwrite it.
///
/// # Errors
/// The device's.
pub fn content_of(device: &mut impl BlockingDevice) -> io::Result<DeviceContent> {
    let properties = device.properties();
    let mut look = DeviceLook::new(properties.bytes, properties.block_bytes);
    while let Some(range) = look.next_range() {
        let mut data = vec![0; (range.end - range.start) as usize];
        device.read(range.start, &mut data)?;
        look.add(range.start, &data);
    }
    Ok(look.content())
}

/// Why files cannot be opened or used.
#[derive(Debug, thiserror::Error)]
pub enum BlobFsOpenError {
    /// There is no blobstore, or it is damaged.
    #[error("{0}")]
    Load(#[from] LoadError),
    /// The blobstore has no files.
    #[error("{0}")]
    NoFiles(#[from] NoBlobFs),
    /// The device failed.
    #[error("{length} bytes at {offset} cannot be read: {source}")]
    Device {
        /// Where.
        offset: u64,
        /// Bytes.
        length: usize,
        /// Why.
        source: io::Error,
    },
    /// No store can be made.
    #[error("{0}")]
    Format(#[from] ChangeError),
    /// A request failed.
    #[error("{0}")]
    Request(#[from] BlobFsError),
}

struct BlockingState<D> {
    fs: BlobFs,
    device: D,
}

/// Files of a store, for any thread. A request has the store for itself until it ends.
///
/// Dropping it is as a power failure: what was not synced is lost. [`unload`](Self::unload) closes properly.
pub struct BlockingBlobFs<D> {
    state: Mutex<BlockingState<D>>,
}

impl<D: BlockingDevice> BlockingBlobFs<D> {
    /// Makes a new store. What is on the device is lost.
    ///
    /// # Errors
    /// The sizes are impossible, or the device failed.
    pub fn format(
        format: &BlobStoreFormat,
        device: D,
        options: BlobFsOptions,
    ) -> Result<BlockingBlobFs<D>, BlobFsOpenError> {
        let fs = BlobFs::format(format, device.properties(), options)?;
        let mut state = BlockingState { fs, device };
        state.run();
        match state.fs.is_broken() {
            true => Err(BlobFsError::Io.into()),
            false => Ok(BlockingBlobFs { state: Mutex::new(state) }),
        }
    }

    /// Opens a store, and finishes what was cut in two.
    ///
    /// # Errors
    /// It cannot be loaded, is another's, or the device failed.
    pub fn load(device: D, options: BlobFsOptions) -> Result<BlockingBlobFs<D>, BlobFsOpenError> {
        Self::load_as(device, options, true, LoadOptions::default())
    }

    /// Opens a store and writes nothing to it.
    ///
    /// # Errors
    /// It cannot be loaded, is another's, or the device failed.
    pub fn load_read_only(
        device: D,
        options: BlobFsOptions,
        load: LoadOptions,
    ) -> Result<BlockingBlobFs<D>, BlobFsOpenError> {
        Self::load_as(device, options, false, load)
    }

    fn load_as(
        mut device: D,
        options: BlobFsOptions,
        is_writable: bool,
        load: LoadOptions,
    ) -> Result<BlockingBlobFs<D>, BlobFsOpenError> {
        let properties = device.properties();
        let store = load_with(properties.bytes, load, |offset, out| {
            let length = out.len();
            let read = device.read(offset, out);
            read.map_err(|source| BlobFsOpenError::Device { offset, length, source })
        })?;
        let fs = match is_writable {
            true => BlobFs::open(store, properties, options)?,
            false => BlobFs::open_read_only(store, properties, options)?,
        };
        let mut state = BlockingState { fs, device };
        state.run();
        match state.fs.is_broken() {
            true => Err(BlobFsError::Io.into()),
            false => Ok(BlockingBlobFs { state: Mutex::new(state) }),
        }
    }

    /// Runs a request to its end.
    ///
    /// # Errors
    /// The request's.
    pub fn request(&self, request: BlobFsRequest) -> Result<BlobFsReply, BlobFsError> {
        let mut state = sync::lock(&self.state);
        let id = state.fs.begin(request);
        state.run();
        while let Some((ended, result)) = state.fs.next_reply() {
            if ended == id {
                return result;
            }
        }
        Err(BlobFsError::Broken)
    }

    /// Opens a file.
    ///
    /// # Errors
    /// Those of [`BlobFsRequest::Open`].
    pub fn open(&self, path: &[u8], how: OpenHow) -> Result<OpenNumber, BlobFsError> {
        self.opened(BlobFsRequest::Open { path: path.to_vec(), how })
    }

    /// Locks a file, which is made if there is none.
    ///
    /// # Errors
    /// [`BlobFsError::Locked`] while another opener may write it.
    pub fn lock(&self, path: &[u8]) -> Result<OpenNumber, BlobFsError> {
        self.opened(BlobFsRequest::Lock { path: path.to_vec() })
    }

    fn opened(&self, request: BlobFsRequest) -> Result<OpenNumber, BlobFsError> {
        match self.request(request)? {
            BlobFsReply::Opened(open) => Ok(open),
            _ => Err(BlobFsError::Broken),
        }
    }

    /// Closes a file, or ends a lock.
    ///
    /// # Errors
    /// The file is not open, or data could not be written.
    pub fn close(&self, open: OpenNumber) -> Result<(), BlobFsError> {
        self.request(BlobFsRequest::Close { open }).map(drop)
    }

    /// Reads; less at the end of the file.
    ///
    /// # Errors
    /// The file is not open, or the device failed.
    pub fn read(&self, open: OpenNumber, offset: u64, length: usize) -> Result<Vec<u8>, BlobFsError> {
        match self.request(BlobFsRequest::Read { open, offset, length })? {
            BlobFsReply::Data(data) => Ok(data),
            _ => Err(BlobFsError::Broken),
        }
    }

    /// Writes anywhere.
    ///
    /// # Errors
    /// The file is not open for writing, the store is full, or the device failed.
    pub fn write(&self, open: OpenNumber, offset: u64, data: Vec<u8>) -> Result<(), BlobFsError> {
        self.request(BlobFsRequest::Write { open, offset, data }).map(drop)
    }

    /// Writes at the end.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn append(&self, open: OpenNumber, data: Vec<u8>) -> Result<(), BlobFsError> {
        self.request(BlobFsRequest::Append { open, data }).map(drop)
    }

    /// Sets the size.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn truncate(&self, open: OpenNumber, size: u64) -> Result<(), BlobFsError> {
        self.request(BlobFsRequest::Truncate { open, size }).map(drop)
    }

    /// Makes a file durable.
    ///
    /// # Errors
    /// The file is not open, or the device failed.
    pub fn sync(&self, open: OpenNumber) -> Result<(), BlobFsError> {
        self.request(BlobFsRequest::Sync { open }).map(drop)
    }

    /// Renames a file or directory.
    ///
    /// # Errors
    /// Those of [`BlobFsRequest::Rename`].
    pub fn rename(&self, from: &[u8], to: &[u8]) -> Result<(), BlobFsError> {
        self.request(BlobFsRequest::Rename { from: from.to_vec(), to: to.to_vec() }).map(drop)
    }

    /// Removes the name of a file.
    ///
    /// # Errors
    /// There is none, or it is a directory.
    pub fn unlink(&self, path: &[u8]) -> Result<(), BlobFsError> {
        self.request(BlobFsRequest::Unlink { path: path.to_vec() }).map(drop)
    }

    /// Removes files and empty directories together.
    ///
    /// # Errors
    /// One is not there, or is a directory with entries: nothing is removed then. Or the device failed.
    pub fn remove_all(&self, paths: Vec<Vec<u8>>) -> Result<(), BlobFsError> {
        self.request(BlobFsRequest::RemoveAll { paths }).map(drop)
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// It exists, or the one above does not.
    pub fn make_directory(&self, path: &[u8]) -> Result<(), BlobFsError> {
        self.request(BlobFsRequest::MakeDirectory { path: path.to_vec() }).map(drop)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// There is none, or it has entries.
    pub fn remove_directory(&self, path: &[u8]) -> Result<(), BlobFsError> {
        self.request(BlobFsRequest::RemoveDirectory { path: path.to_vec() }).map(drop)
    }

    /// Syncs all files and closes the store.
    ///
    /// # Errors
    /// The device failed.
    pub fn unload(&self) -> Result<(), BlobFsError> {
        self.request(BlobFsRequest::Unload).map(drop)
    }

    /// What a path is.
    ///
    /// # Errors
    /// There is nothing.
    pub fn status(&self, path: &[u8]) -> Result<FileStatus, BlobFsError> {
        sync::lock(&self.state).fs.status(path)
    }

    /// What a directory has.
    ///
    /// # Errors
    /// There is none.
    pub fn list(&self, path: &[u8]) -> Result<Vec<DirectoryItem>, BlobFsError> {
        sync::lock(&self.state).fs.list(path)
    }

    /// Runs a function on the files between requests, for what is answered from memory.
    pub fn inspect<T>(&self, with: impl FnOnce(&BlobFs) -> T) -> T {
        with(&sync::lock(&self.state).fs)
    }

    /// Ends, and returns the device.
    pub fn into_device(self) -> D {
        self.state.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner).device
    }
}

impl<D: BlockingDevice> BlockingState<D> {
    /// Runs everything that has begun to its end.
    fn run(&mut self) {
        while let Some(io) = self.fs.next_io() {
            let device = &mut self.device;
            let done = match io.action {
                BlobFsAction::Read { offset, bytes } => {
                    let mut data = vec![0; bytes];
                    device.read(offset, &mut data).map(|()| data)
                }
                BlobFsAction::Write { offset, data, durable } => {
                    let written = device.write(offset, &data);
                    let flushed = written.and_then(|()| if durable { device.flush() } else { Ok(()) });
                    flushed.map(|()| Vec::new())
                }
                BlobFsAction::WriteZeroes { offset, bytes } => {
                    device.write_zeroes(offset, bytes).map(|()| Vec::new())
                }
                BlobFsAction::Deallocate { offset, bytes } => {
                    device.deallocate(offset, bytes).map(|()| Vec::new())
                }
                BlobFsAction::Flush => device.flush().map(|()| Vec::new()),
            };
            self.fs.complete(io.id, done.map_err(|_| StoreIoFailed));
        }
    }
}

/// A device in memory, for tests and examples. It has a block of 512 bytes and no volatile cache.
#[derive(Clone, Debug)]
pub struct MemoryDevice {
    bytes: Vec<u8>,
}

impl MemoryDevice {
    /// A device of zeroes.
    pub fn new(bytes: usize) -> MemoryDevice {
        MemoryDevice { bytes: vec![0; bytes] }
    }

    fn range(&mut self, offset: u64, length: u64) -> io::Result<&mut [u8]> {
        let end = offset.checked_add(length).and_then(|end| usize::try_from(end).ok());
        let range = end.and_then(|end| self.bytes.get_mut(offset as usize..end));
        range.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
    }
}

impl BlockingDevice for MemoryDevice {
    fn properties(&self) -> BlobStoreDevice {
        BlobStoreDevice {
            bytes: self.bytes.len() as u64,
            block_bytes: 512,
            has_volatile_cache: false,
            atomic_write_bytes: 512,
        }
    }

    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        out.copy_from_slice(self.range(offset, out.len() as u64)?);
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.range(offset, data.len() as u64)?.copy_from_slice(data);
        Ok(())
    }

    fn write_zeroes(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        self.range(offset, bytes)?.fill(0);
        Ok(())
    }

    fn deallocate(&mut self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
