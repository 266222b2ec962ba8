//! Zoned block devices.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use os::DeviceZone;

use super::EngineFileError;

/// The zones of a file, which decide what a discard does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileZones {
    /// It has none: a discard deallocates the range.
    #[default]
    None,
    /// The device has zones: a discard resets the zone that it names.
    Device,
    /// The job pretends that it has zones, whose write pointers the job keeps: a discard does nothing.
    Emulated,
}

/// Returns 0 or a negative errno.
pub(super) fn reset(device: impl AsFd, start: u64, bytes: u64) -> i32 {
    match os::reset_zone(device, start, bytes) {
        Ok(()) => 0,
        Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
    }
}

/// Most zones of a device: 4 TiB in zones of a MiB, or a PiB in those of disks.
const ZONES_MAX: usize = 1 << 22;

/// A zoned block device, open to query and reset its zones.
#[derive(Debug)]
pub struct DeviceZones {
    device: File,
    /// Most zones that may be open at a time; 0 for no limit.
    pub open_max: u32,
}

impl DeviceZones {
    /// Opens a device; `None` if it is none with zones.
    ///
    /// # Errors
    /// A device that cannot be opened, for writing if `writes`.
    pub fn open(path: &str, writes: bool) -> Result<Option<DeviceZones>, EngineFileError> {
        let failed = |what| move |error| EngineFileError { path: path.to_string(), what, error };
        let found = std::fs::metadata(path).map_err(failed("open"))?;
        if !found.file_type().is_block_device() {
            return Ok(None);
        }
        let (major, minor) = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
        let attribute = |name: &str| {
            let path = format!("/sys/dev/block/{major}:{minor}/queue/{name}");
            std::fs::read_to_string(path).map(|text| text.trim().to_string()).unwrap_or_default()
        };
        if !matches!(attribute("zoned").as_str(), "host-managed" | "host-aware") {
            return Ok(None);
        }
        let device = File::options().read(true).write(writes).open(path).map_err(failed("open"))?;
        Ok(Some(DeviceZones { device, open_max: attribute("max_open_zones").parse().unwrap_or(0) }))
    }

    /// All zones.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn report(&self) -> io::Result<Vec<DeviceZone>> {
        os::report_zones(&self.device, 0, ZONES_MAX)
    }

    /// The zone at `start`.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn report_one(&self, start: u64) -> io::Result<DeviceZone> {
        let zone = os::report_zones(&self.device, start, 1)?.pop();
        zone.ok_or_else(|| io::Error::other("the device reports no zone"))
    }

    /// Resets the zone of `length` bytes at `start`, which discards its data.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn reset(&self, start: u64, length: u64) -> io::Result<()> {
        os::reset_zone(&self.device, start, length)
    }
}
