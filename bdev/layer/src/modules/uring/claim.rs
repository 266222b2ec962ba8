//! The claim on a block device: while it is open with `O_EXCL`, the kernel neither mounts it, swaps to it nor makes it a
//! part of another device, and it refuses such an open while one of these holds.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use pci::bind::{LinuxHost, RefusalReason, users_of_block_device};
use rustix::fs::{Mode, OFlags, major, minor};
use rustix::io::Errno;

use super::UringConfig;
use crate::BdevError;

/// Claims a block device. One that is only read is not claimed, since readers disturb no other user, and with `force` only
/// if it can be.
///
/// # Errors
/// [`BdevError::InUse`] names the mount, the swap or the device that uses it.
pub(super) fn claim(path: &Path, config: &UringConfig) -> Result<Option<File>, BdevError> {
    if config.readonly {
        return Ok(None);
    }
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    let claim = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(claim) => Some(File::from(claim)),
        Err(Errno::BUSY) => None,
        Err(errno) => {
            let (path, doing) = (path.to_path_buf(), "cannot be claimed (O_EXCL)");
            return Err(BdevError::File { path, doing, source: errno.into() });
        }
    };
    if config.force {
        return Ok(claim);
    }
    let mut users = users(path);
    if claim.is_none() && users.is_empty() {
        users.push(RefusalReason::Busy { device: path.display().to_string() });
    }
    if users.is_empty() {
        return Ok(claim);
    }
    let by: Vec<String> = users.iter().map(ToString::to_string).collect();
    Err(BdevError::InUse { name: path.display().to_string(), by: by.join(", ") })
}

fn users(path: &Path) -> Vec<RefusalReason> {
    let Ok(metadata) = std::fs::metadata(path) else { return Vec::new() };
    let number = format!("{}:{}", major(metadata.rdev()), minor(metadata.rdev()));
    users_of_block_device(&LinuxHost::default(), &number)
}
