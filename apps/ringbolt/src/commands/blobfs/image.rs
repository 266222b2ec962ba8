//! The file or block device that a store is on.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use blobfs::{BlockingBlobFs, BlockingDevice};
use blobstore::BlobStoreDevice;
use file_lock::LockMode;
use rustix::fs::{FallocateFlags, OFlags};

use super::bdev_device::BdevDevice;
use crate::command_error::CommandError;

/// Bytes that are copied at once.
pub(super) const COPY_BYTES: usize = 4 << 20;
/// Bytes of zeroes that are written at once where a device cannot make them itself.
const ZERO_BYTES: u64 = 1 << 20;

/// How long a store is waited for that another has open: the kernel closes what a killed process had open
/// some time after its end, mostly within 0.1 s.
pub(super) const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) type Files = BlockingBlobFs<StoreDevice>;

pub(super) fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

pub(super) fn at(path: &Path, what: &dyn std::fmt::Display) -> CommandError {
    CommandError::operation(format!("{}: {what}", path.display()))
}

/// What a store is on.
pub(super) enum StoreDevice {
    Image(ImageDevice),
    Bdev(BdevDevice),
}

impl StoreDevice {
    fn device(&self) -> &dyn BlockingDevice {
        match self {
            StoreDevice::Image(device) => device,
            StoreDevice::Bdev(device) => device,
        }
    }

    fn device_mut(&mut self) -> &mut dyn BlockingDevice {
        match self {
            StoreDevice::Image(device) => device,
            StoreDevice::Bdev(device) => device,
        }
    }
}

impl BlockingDevice for StoreDevice {
    fn properties(&self) -> BlobStoreDevice {
        self.device().properties()
    }

    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.device_mut().read(offset, out)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.device_mut().write(offset, data)
    }

    fn write_zeroes(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        self.device_mut().write_zeroes(offset, bytes)
    }

    fn deallocate(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        self.device_mut().deallocate(offset, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.device_mut().flush()
    }
}

/// A file or block device, through the page cache.
pub(super) struct ImageDevice {
    pub(super) file: File,
    pub(super) bytes: u64,
    /// The file behind a loop device, which is locked too.
    _backing: Option<File>,
}

impl ImageDevice {
    /// Opens a device, and locks it against other programs.
    pub(super) fn open(path: &Path, mode: LockMode) -> Result<ImageDevice, CommandError> {
        let failed =
            |what: &dyn std::fmt::Display| CommandError::environment(format!("{}: {what}", path.display()));
        // Opening a pipe would wait for its other end.
        let kind = std::fs::metadata(path).map_err(|error| failed(&error))?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(failed(&"neither a file nor a block device"));
        }
        let mut options = File::options();
        options.read(true).write(mode == LockMode::Exclusive);
        if kind.is_block_device() && mode == LockMode::Exclusive {
            // The kernel refuses what is mounted.
            options.custom_flags(OFlags::EXCL.bits() as i32);
        }
        let opened = options.open(path).and_then(|mut file| Ok((file.seek(SeekFrom::End(0))?, file)));
        let (bytes, file) = opened.map_err(|error| failed(&error))?;
        let locked = file_lock::lock_device(&file, mode, LOCK_TIMEOUT);
        let backing = locked.map_err(|holder| failed(&format!("{holder} has it open; end that first")))?;
        Ok(ImageDevice { file, bytes, _backing: backing })
    }

    /// What a device of this size promises.
    pub(super) fn properties_of(bytes: u64) -> BlobStoreDevice {
        BlobStoreDevice { bytes, block_bytes: 4096, has_volatile_cache: true, atomic_write_bytes: 512 }
    }
}

impl BlockingDevice for ImageDevice {
    fn properties(&self) -> BlobStoreDevice {
        ImageDevice::properties_of(self.bytes)
    }

    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }

    fn write_zeroes(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if rustix::fs::fallocate(&self.file, flags, offset, bytes).is_ok() {
            return Ok(());
        }
        let zeroes = vec![0; ZERO_BYTES.min(bytes) as usize];
        let mut at = offset;
        while at < offset + bytes {
            let length = ZERO_BYTES.min(offset + bytes - at);
            self.file.write_all_at(&zeroes[..length as usize], at)?;
            at += length;
        }
        Ok(())
    }

    fn deallocate(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Nothing is promised of it.
        let _ = rustix::fs::fallocate(&self.file, flags, offset, bytes);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }
}
