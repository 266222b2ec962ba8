//! The kernel's ublk driver, as far as the target needs it.

use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::Descriptor;
use os::{UblkControl, UblkDataPath, UblkDevice, UblkQueueFile};
use reactor::blocking;
use wire_ublk::{DeviceInfo, Features, UblkDeviceState, UblkParameters};

use crate::UblkError;
use crate::core_queue::QueueStart;
use crate::failure::kernel;
use crate::limits::{
    ASK_INTERVAL, COMMAND_TIMEOUT, IO_BYTES_MAX, NODE_TIMEOUT, RECOVERY_TIMEOUT, START_TIMEOUT, STOP_TIMEOUT,
};
use crate::shape::{DiskShape, check_served};

const EPERM: i32 = 1;
const EACCES: i32 = 13;
const EBUSY: i32 = 16;
const EEXIST: i32 = 17;
const ENODEV: i32 = 19;

/// Features of the devices that the target adds. The driver has neither user copy nor recovery for those of
/// unprivileged users.
fn device_features(unprivileged: bool, shape: &DiskShape) -> Features {
    let data = if unprivileged {
        UNPRIVILEGED
    } else {
        // Pages that cannot be registered are copied.
        let pages = if shape.page_alignment.is_some() { Features::AUTO_BUF_REG } else { Features::empty() };
        pages | Features::USER_COPY | Features::USER_RECOVERY | Features::USER_RECOVERY_REISSUE
    };
    // Without it, a driver that is built into the kernel interrupts no core: one that spins would not see
    // requests.
    data | Features::URING_CMD_COMP_IN_TASK
}

/// Features without which a device cannot be served, or does not outlive its server.
const REQUIRED: Features = Features::USER_COPY.union(Features::USER_RECOVERY);

/// Features of the devices of unprivileged users, and without which these cannot be served.
const UNPRIVILEGED: Features = Features::UNPRIVILEGED_DEVICE.union(Features::NEED_GET_DATA);

/// The driver's alignment mask of memory where a server sets none.
const ALIGNMENT_MASK_DEFAULT: u32 = 3;

/// The upper half of the value that the driver stores for devices that the target adds: "RBLT".
const MARK: u64 = 0x5242_4c54 << 32;

/// The value that the driver stores for a device: that the target has added it, and for which block device.
fn mark(bdev_name: &str) -> u64 {
    MARK | u64::from(codec::crc32c(bdev_name.as_bytes()))
}

/// The driver.
pub(super) struct Driver {
    control: UblkControl,
    features: Features,
}

/// What [`Driver::add`] has found.
pub(super) enum Found {
    /// A new device.
    Added(DeviceInfo),
    /// The device of a process of ours that is gone.
    Left(DeviceInfo),
}

impl Driver {
    pub(super) fn open() -> Result<Driver, UblkError> {
        let opened = UblkControl::open().map_err(|error| match (error.kind(), error.raw_os_error()) {
            (ErrorKind::NotFound, _) => {
                UblkError::Unsupported("the kernel has no ublk driver (modprobe ublk_drv)")
            }
            (_, Some(EACCES)) => UblkError::NotPermitted(
                "/dev/ublk-control: permission denied; run as root, or give the user the rights that docs/UBLK.md names"
                    .into(),
            ),
            (_, Some(EPERM)) => UblkError::NotPermitted(
                "this user may not use io_uring; set the sysctl kernel.io_uring_disabled to 0".into(),
            ),
            _ => kernel("/dev/ublk-control")(error),
        });
        let mut control = opened?;
        let features = control.features(COMMAND_TIMEOUT).map_err(|error| match error.kind() {
            ErrorKind::PermissionDenied => kernel("/dev/ublk-control")(error),
            _ => UblkError::Unsupported("ublk needs Linux 6.5 or later"),
        })?;
        if !features.contains(REQUIRED | Features::CMD_IOCTL_ENCODE) {
            return Err(UblkError::Unsupported("the ublk driver has no user copy (Linux 6.5 and later)"));
        }
        Ok(Driver { control, features })
    }

    /// Adds a device with the queues, depth and number of `wanted` for a block device, and sets its
    /// parameters.
    pub(super) fn add(
        &mut self,
        bdev_name: &str,
        wanted: &DeviceInfo,
        unprivileged: bool,
        shape: &DiskShape,
    ) -> Result<Found, UblkError> {
        if unprivileged && !self.features.contains(UNPRIVILEGED) {
            return Err(UblkError::Unsupported(
                "unprivileged: this kernel has no ublk disks of unprivileged users",
            ));
        }
        let has_pages = !unprivileged && self.features.contains(Features::AUTO_BUF_REG);
        let shape = &DiskShape { page_alignment: shape.page_alignment.filter(|_| has_pages), ..*shape };
        let info = DeviceInfo {
            io_bytes_max: IO_BYTES_MAX,
            features: (device_features(unprivileged, shape) & self.features).bits(),
            server_flags: mark(bdev_name),
            ..*wanted
        };
        let added = match self.control.add_device(&info, COMMAND_TIMEOUT) {
            Err(error) if error.raw_os_error() == Some(EEXIST) => match self.find_left(&info)? {
                Some(left) => return Ok(Found::Left(left)),
                None => self.control.add_device(&info, COMMAND_TIMEOUT),
            },
            added => added,
        };
        let added = added.map_err(|error| not_added(error, unprivileged))?;
        let device = UblkDevice::of(&added);
        if unprivileged && !device.unprivileged {
            let _ = self.delete(device);
            let reason =
                "unprivileged: the process has CAP_SYS_ADMIN, whose disks are ordinary ones; leave it out";
            return Err(UblkError::Invalid(reason.into()));
        }
        self.set_parameters(device, &shape.parameters(added.io_bytes_max.min(IO_BYTES_MAX)))?;
        Ok(Found::Added(added))
    }

    /// Finds the device of a process of ours that is gone, with the number of `info`. Returns `None` if it
    /// can be added, after it was deleted if it had no user.
    fn find_left(&mut self, info: &DeviceInfo) -> Result<Option<DeviceInfo>, UblkError> {
        let read = |driver: &mut Driver| match driver.info(info.device) {
            // It is another user's.
            Err(UblkError::Kernel { source, .. }) if source.kind() == ErrorKind::PermissionDenied => {
                Err(UblkError::Busy(info.device))
            }
            result => result,
        };
        let is_dead =
            |left: &DeviceInfo| UblkDeviceState::from_number(left.state) == Some(UblkDeviceState::Dead);
        let deadline = Instant::now() + RECOVERY_TIMEOUT;
        loop {
            let left = read(self)?;
            if left.server_flags != info.server_flags {
                return Err(UblkError::Busy(info.device));
            }
            let device = UblkDevice::of(&left);
            if is_dead(&left) {
                // It was never started, or is stopped: it has no user.
                self.delete(device)?;
                return Ok(None);
            }
            if !device.unprivileged {
                return Ok(Some(left));
            }
            // The kernel stops it once it has ended its server.
            if Instant::now() >= deadline {
                return Err(UblkError::Busy(info.device));
            }
            blocking::sleep(ASK_INTERVAL);
        }
    }

    /// Sets the parameters of a device that was added, or deletes it.
    fn set_parameters(&mut self, device: UblkDevice, parameters: &UblkParameters) -> Result<(), UblkError> {
        // The commands of an unprivileged device need its node, which udev makes and gives to the user.
        let is_temporary = |error: &io::Error| device.unprivileged && lacks_node(error);
        let set = retry(NODE_TIMEOUT, is_temporary, || {
            self.control.set_parameters(device, parameters, COMMAND_TIMEOUT)
        });
        set.map_err(|error| {
            let _ = self.delete(device);
            if is_temporary(&error) {
                let path = device.path();
                return UblkError::NotPermitted(format!(
                    "{path}: {error}; the user has to own {path}, by a rule of udev for example (docs/UBLK.md)"
                ));
            }
            kernel("the parameters of the device are refused")(error)
        })
    }

    /// Makes the block device appear.
    pub(super) fn start(&mut self, device: UblkDevice) -> Result<(), UblkError> {
        self.control.start_device(device, START_TIMEOUT).map_err(kernel("the disk cannot be started"))
    }

    /// What a device is.
    pub(super) fn info(&mut self, number: u32) -> Result<DeviceInfo, UblkError> {
        self.control.device_info(number, COMMAND_TIMEOUT).map_err(|error| {
            if error.raw_os_error() == Some(ENODEV) {
                UblkError::NotFound(number)
            } else {
                kernel("the device cannot be read")(error)
            }
        })
    }

    /// Prepares a device for this process, once the kernel has ended its server. Its data is copied if its
    /// users' memory is not aligned as the block device wants it.
    pub(super) fn begin_recovery(
        &mut self,
        info: &DeviceInfo,
        shape: &mut DiskShape,
    ) -> Result<(), UblkError> {
        let (number, device) = (info.device, UblkDevice::of(info));
        if device.unprivileged {
            return Err(UblkError::Unsupported(
                "the kernel recovers no disks of unprivileged users; start it again",
            ));
        }
        if !Features::from_bits_retain(info.features).contains(REQUIRED) {
            return Err(UblkError::Unsupported("the device was added without recovery and user copy"));
        }
        check_served(info)?;
        let parameters = self.control.parameters(device, COMMAND_TIMEOUT);
        let parameters = parameters.map_err(kernel("the parameters of the device cannot be read"))?;
        if !shape.suits(&parameters) {
            let reason = format!(
                "bdev_name: it has not the size, the blocks, the cache or the maximum request of /dev/ublkb{number}"
            );
            return Err(UblkError::Invalid(reason));
        }
        let aligned_bytes = parameters.alignment_mask.unwrap_or(ALIGNMENT_MASK_DEFAULT).saturating_add(1);
        shape.page_alignment = shape.page_alignment.filter(|bytes| *bytes <= aligned_bytes);
        let busy = |error: &io::Error| error.raw_os_error() == Some(EBUSY);
        let begun = retry(RECOVERY_TIMEOUT, busy, || self.control.start_recovery(device, COMMAND_TIMEOUT));
        begun.map_err(|error| {
            if busy(&error) { UblkError::Busy(number) } else { kernel("the disk cannot be recovered")(error) }
        })
    }

    /// Resumes the I/O of a device.
    pub(super) fn end_recovery(&mut self, device: UblkDevice) -> Result<(), UblkError> {
        self.control.end_recovery(device, START_TIMEOUT).map_err(kernel("the disk cannot be recovered"))
    }

    /// Removes the block device. No error if there is none.
    pub(super) fn stop(&mut self, device: UblkDevice) -> Result<(), UblkError> {
        unless_gone(self.control.stop_device(device, STOP_TIMEOUT))
            .map_err(kernel("the disk cannot be stopped"))
    }

    /// Removes a device that is closed. No error if there is none.
    pub(super) fn delete(&mut self, device: UblkDevice) -> Result<(), UblkError> {
        unless_gone(self.control.delete_device(device, COMMAND_TIMEOUT))
            .map_err(kernel("the device cannot be deleted"))
    }

    /// Sets the size of a disk.
    pub(super) fn resize(&mut self, device: UblkDevice, sectors: u64) -> Result<(), UblkError> {
        if !self.features.contains(Features::UPDATE_SIZE) {
            return Err(UblkError::Unsupported(
                "this kernel does not resize ublk disks; stop and start the disk",
            ));
        }
        self.control
            .update_size(device, sectors, COMMAND_TIMEOUT)
            .map_err(kernel("the disk cannot be resized"))
    }
}

/// The error of a device that the kernel does not add.
fn not_added(error: io::Error, unprivileged: bool) -> UblkError {
    match error.raw_os_error() {
        Some(EPERM) if !unprivileged => UblkError::NotPermitted(
            "the device cannot be added: only root may do that (CAP_SYS_ADMIN); the disks of other users are started with \
             unprivileged=true"
                .into(),
        ),
        Some(EACCES) => UblkError::TooMany(
            "the driver has as many devices as it allows (parameter ublks_max of the module ublk_drv)".into(),
        ),
        _ => kernel("the device cannot be added")(error),
    }
}

/// The node of a device is absent, another one's, or may not be read and written.
fn lacks_node(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied)
}

/// Another process may have removed the device.
fn unless_gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.raw_os_error() == Some(ENODEV) => Ok(()),
        result => result,
    }
}

/// Opens and maps the queues of a device.
pub(super) fn map_queues(
    info: &DeviceInfo,
    descriptor: &Arc<Descriptor>,
    shape: &DiskShape,
) -> Result<Vec<QueueStart>, UblkError> {
    let path = UblkDataPath::of(Features::from_bits_retain(info.features));
    let path = path.ok_or(UblkError::Unsupported("the device has neither user copy nor get-data"))?;
    let absent = |error: &io::Error| error.kind() == ErrorKind::NotFound;
    let device = UblkDevice::of(info);
    let file = retry(NODE_TIMEOUT, absent, || UblkControl::open_character_device(device));
    let file = file.map_err(kernel("the character device cannot be opened"))?;
    let queue = |index: u16| {
        let queue = UblkQueueFile::map(file.as_fd(), info, index);
        Ok(QueueStart {
            disk: info.device,
            index,
            depth: info.queue_depth,
            shape: *shape,
            path,
            uses_pages: shape.uses_pages(info),
            file: queue.map_err(kernel("the descriptors of a queue cannot be mapped"))?,
            descriptor: descriptor.clone(),
            flow: descriptor.device().tenants().connect(&format!("ublk {}", info.device)),
        })
    };
    (0..info.queues).map(queue).collect()
}

/// Repeats what fails with an error that `is_temporary`.
fn retry<T>(
    timeout: Duration,
    is_temporary: impl Fn(&io::Error) -> bool,
    mut attempt: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let deadline = Instant::now() + timeout;
    loop {
        match attempt() {
            Err(error) if is_temporary(&error) && Instant::now() < deadline => blocking::sleep(ASK_INTERVAL),
            result => return result,
        }
    }
}
