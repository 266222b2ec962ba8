//! The UIO backend (`uio_pci_generic`): BARs and configuration space through sysfs, no IOMMU, no interrupts.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::flock::flock_exclusive;
use crate::{PciAddress, PciError, Sysfs};

pub(crate) struct UioDevice {
    address: PciAddress,
    directory: PathBuf,
    config: File,
    /// Kept open: the driver disables bus mastering when the last descriptor is closed.
    _node: File,
}

impl UioDevice {
    pub(crate) fn open(sysfs: &Sysfs, address: PciAddress) -> Result<UioDevice, PciError> {
        let directory = sysfs.function(address);
        let name = std::fs::read_dir(directory.join("uio")).ok().and_then(|mut entries| entries.next());
        let name = name.and_then(Result::ok).map(|entry| entry.file_name());
        let name =
            name.ok_or(PciError::Unsupported("a UIO device of this function (modprobe uio_pci_generic)"))?;
        let path = sysfs.path("dev").join(name);
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        let node = opened.map_err(|error| PciError::Node { path: path.clone(), error })?;
        // UIO allows several opens; two drivers of one device would corrupt each other's state.
        flock_exclusive(&node).map_err(|error| PciError::Node { path, error })?;
        let config = directory.join("config");
        let opened = OpenOptions::new().read(true).write(true).open(&config);
        let config = opened.map_err(|error| PciError::Node { path: config, error })?;
        Ok(UioDevice { address, directory, config, _node: node })
    }

    /// The sysfs file of a BAR, to map it.
    pub(crate) fn bar(&self, index: u8) -> Result<OwnedFd, PciError> {
        let path = self.directory.join(format!("resource{index}"));
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
        let path = self.directory.join("reset");
        OpenOptions::new().write(true).open(&path).and_then(|file| file.write_all_at(b"1", 0)).map_err(
            |error| match error.kind() {
                io::ErrorKind::NotFound => PciError::NotOffered {
                    address: self.address,
                    backend: crate::PciBackend::Uio,
                    what: "reset that the function supports",
                },
                _ => PciError::File { path, error },
            },
        )
    }
}
