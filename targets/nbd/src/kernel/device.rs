//! What the kernel says about a device of its NBD driver, in sysfs.

use std::fs::File;
use std::path::PathBuf;

use rustix::fs::FlockOperation;

const SECTOR_BYTES: u64 = 512;

/// A device that the driver has.
pub(super) struct KernelDevice {
    directory: PathBuf,
}

/// A lock that the process which serves a device holds, on its directory in sysfs. It ends with the process.
pub(super) struct DeviceLock {
    _directory: File,
}

impl KernelDevice {
    pub(super) fn new(index: u32) -> KernelDevice {
        KernelDevice::at(PathBuf::from(format!("/sys/block/nbd{index}")))
    }

    fn at(directory: PathBuf) -> KernelDevice {
        KernelDevice { directory }
    }

    /// The identifier of its server; `None` if it is not connected, or was without one.
    pub(super) fn backend(&self) -> Option<String> {
        self.read("backend")
    }

    /// Bytes, and bytes of a block.
    pub(super) fn shape(&self) -> Option<(u64, u32)> {
        let sectors: u64 = self.read("size")?.parse().ok()?;
        Some((sectors * SECTOR_BYTES, self.read("queue/logical_block_size")?.parse().ok()?))
    }

    /// Takes the lock; `None` if another process has it.
    pub(super) fn lock(&self) -> Option<DeviceLock> {
        let directory = File::open(&self.directory).ok()?;
        rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive).ok()?;
        Some(DeviceLock { _directory: directory })
    }

    fn read(&self, attribute: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.directory.join(attribute)).ok()?;
        Some(text.trim_end().to_string()).filter(|text| !text.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_and_the_lock_is_exclusive() {
        let directory = std::env::temp_dir().join(format!("ringbolt-nbd-device-{}", std::process::id()));
        std::fs::create_dir_all(directory.join("queue")).unwrap();
        let device = KernelDevice::at(directory.clone());
        assert_eq!((device.backend(), device.shape()), (None, None));
        for (name, text) in
            [("backend", "ringbolt:1\n"), ("size", "16\n"), ("queue/logical_block_size", "4096\n")]
        {
            std::fs::write(directory.join(name), text).unwrap();
        }
        assert_eq!(device.backend().as_deref(), Some("ringbolt:1"));
        assert_eq!(device.shape(), Some((8192, 4096)));
        let lock = device.lock().unwrap();
        assert!(device.lock().is_none());
        drop(lock);
        assert!(device.lock().is_some());
        std::fs::remove_dir_all(directory).unwrap();
        assert!(device.lock().is_none(), "there is no such device");
    }
}
