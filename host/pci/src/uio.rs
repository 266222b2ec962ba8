//! A function bound to `uio_pci_generic`: registers and configuration space through sysfs, no IOMMU,
//! no interrupts of its own.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rustix::fs::FlockOperation;

use crate::{Address, PciError, Sysfs};

pub(crate) struct Device {
    address: Address,
    folder: PathBuf,
    config: File,
    /// The driver takes bus mastering away when the last descriptor is closed.
    _node: File,
}

impl Device {
    pub(crate) fn open(sysfs: &Sysfs, address: Address) -> Result<Device, PciError> {
        let folder = sysfs.function(address);
        let name = std::fs::read_dir(folder.join("uio")).ok().and_then(|mut entries| entries.next());
        let name = name.and_then(Result::ok).map(|entry| entry.file_name());
        let name =
            name.ok_or(PciError::Unsupported("a UIO device of this function (modprobe uio_pci_generic)"))?;
        let path = sysfs.path("dev").join(name);
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        let node = opened.map_err(|error| PciError::Node { path: path.clone(), error })?;
        // UIO lets everybody in; two drivers of one device would destroy each other's work.
        lock(&node, path)?;
        let config = folder.join("config");
        let opened = OpenOptions::new().read(true).write(true).open(&config);
        let config = opened.map_err(|error| PciError::Node { path: config, error })?;
        Ok(Device { address, folder, config, _node: node })
    }

    /// The file that maps a BAR.
    pub(crate) fn bar(&self, index: u8) -> Result<OwnedFd, PciError> {
        let path = self.folder.join(format!("resource{index}"));
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => Ok(file.into()),
            Err(error) => Err(PciError::Node { path, error }),
        }
    }

    pub(crate) fn read_config(&self, offset: u16, out: &mut [u8]) -> io::Result<()> {
        self.config.read_exact_at(out, offset.into())
    }

    pub(crate) fn write_config(&self, offset: u16, data: &[u8]) -> io::Result<()> {
        self.config.write_all_at(data, offset.into())
    }

    pub(crate) fn reset(&self) -> Result<(), PciError> {
        let path = self.folder.join("reset");
        OpenOptions::new().write(true).open(&path).and_then(|file| file.write_all_at(b"1", 0)).map_err(
            |error| match error.kind() {
                io::ErrorKind::NotFound => PciError::NotOffered {
                    address: self.address,
                    backend: crate::Backend::Uio,
                    what: "reset that the function supports",
                },
                _ => PciError::File { path, error },
            },
        )
    }
}

/// Keeps a node from others who ask: the kernel itself lets everybody in.
pub(crate) fn lock(node: impl AsFd, path: PathBuf) -> Result<(), PciError> {
    rustix::fs::flock(node, FlockOperation::NonBlockingLockExclusive).map_err(|errno| {
        let error = match errno {
            rustix::io::Errno::WOULDBLOCK => io::Error::from_raw_os_error(libc::EBUSY),
            errno => errno.into(),
        };
        PciError::Node { path, error }
    })
}
