//! The kernel's ublk driver, as far as the target needs it.

use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::Descriptor;
use dma::SharedRegion;
use os::UblkControl;
use reactor::blocking;
use wire_ublk::{DeviceInfo, DeviceState, Features};

use crate::UblkError;
use crate::core_queue::QueueStart;
use crate::failure::kernel;
use crate::limits::{
    ASK_INTERVAL, COMMAND_TIMEOUT, IO_BYTES_MAX, NODE_TIMEOUT, RECOVERY_TIMEOUT, START_TIMEOUT, STOP_TIMEOUT,
};
use crate::shape::{DiskShape, check_served};

const EBUSY: i32 = 16;
const EEXIST: i32 = 17;
const ENODEV: i32 = 19;

/// Features of the devices that the target adds.
fn device_features() -> Features {
    Features::USER_COPY
        | Features::USER_RECOVERY
        | Features::USER_RECOVERY_REISSUE
        // Without it, a driver that is built into the kernel interrupts no core: one that spins would not see requests.
        | Features::URING_CMD_COMP_IN_TASK
}

/// Features without which a device cannot be served, or does not outlive its server.
const REQUIRED: Features = Features::USER_COPY.union(Features::USER_RECOVERY);

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
        let opened = UblkControl::open().map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                UblkError::Unsupported("the kernel has no ublk driver (modprobe ublk_drv)")
            }
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

    /// Adds a device with the queues, depth and number of `wanted` for a block device, and sets its parameters.
    pub(super) fn add(
        &mut self,
        bdev_name: &str,
        wanted: &DeviceInfo,
        shape: &DiskShape,
    ) -> Result<Found, UblkError> {
        let number = wanted.device;
        let info = DeviceInfo {
            io_bytes_max: IO_BYTES_MAX,
            features: (device_features() & self.features).bits(),
            server_flags: mark(bdev_name),
            ..*wanted
        };
        let added = match self.control.add_device(&info, COMMAND_TIMEOUT) {
            Err(error) if error.raw_os_error() == Some(EEXIST) => {
                let left = self.info(number)?;
                if left.server_flags != info.server_flags {
                    return Err(UblkError::Busy(number));
                }
                if DeviceState::from_number(left.state) != Some(DeviceState::Dead) {
                    return Ok(Found::Left(left));
                }
                // It was never started, or is stopped: it has no user.
                self.delete(number)?;
                self.control.add_device(&info, COMMAND_TIMEOUT)
            }
            added => added,
        };
        let added = added.map_err(kernel("the device cannot be added"))?;
        let parameters = shape.parameters(added.io_bytes_max.min(IO_BYTES_MAX));
        if let Err(error) = self.control.set_parameters(added.device, &parameters, COMMAND_TIMEOUT) {
            let _ = self.delete(added.device);
            return Err(kernel("the parameters of the device are refused")(error));
        }
        Ok(Found::Added(added))
    }

    /// Makes the block device appear.
    pub(super) fn start(&mut self, number: u32) -> Result<(), UblkError> {
        self.control.start_device(number, START_TIMEOUT).map_err(kernel("the disk cannot be started"))
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

    /// Prepares a device for this process, once the kernel has ended its server.
    pub(super) fn begin_recovery(&mut self, info: &DeviceInfo, shape: &DiskShape) -> Result<(), UblkError> {
        let number = info.device;
        if !Features::from_bits_retain(info.features).contains(REQUIRED) {
            return Err(UblkError::Unsupported("the device was added without recovery and user copy"));
        }
        check_served(info)?;
        let parameters = self.control.parameters(number, COMMAND_TIMEOUT);
        let parameters = parameters.map_err(kernel("the parameters of the device cannot be read"))?;
        if !shape.suits(&parameters) {
            let reason = format!(
                "bdev_name: it has not the size, the blocks, the cache or the maximum request of /dev/ublkb{number}"
            );
            return Err(UblkError::Invalid(reason));
        }
        let busy = |error: &io::Error| error.raw_os_error() == Some(EBUSY);
        let begun = retry(RECOVERY_TIMEOUT, busy, || self.control.start_recovery(number, COMMAND_TIMEOUT));
        begun.map_err(|error| {
            if busy(&error) { UblkError::Busy(number) } else { kernel("the disk cannot be recovered")(error) }
        })
    }

    /// Resumes the I/O of a device.
    pub(super) fn end_recovery(&mut self, number: u32) -> Result<(), UblkError> {
        self.control.end_recovery(number, START_TIMEOUT).map_err(kernel("the disk cannot be recovered"))
    }

    /// Removes the block device. No error if there is none.
    pub(super) fn stop(&mut self, number: u32) -> Result<(), UblkError> {
        unless_gone(self.control.stop_device(number, STOP_TIMEOUT))
            .map_err(kernel("the disk cannot be stopped"))
    }

    /// Removes a device that is closed. No error if there is none.
    pub(super) fn delete(&mut self, number: u32) -> Result<(), UblkError> {
        unless_gone(self.control.delete_device(number, COMMAND_TIMEOUT))
            .map_err(kernel("the device cannot be deleted"))
    }

    /// Sets the size of a disk.
    pub(super) fn resize(&mut self, number: u32, sectors: u64) -> Result<(), UblkError> {
        if !self.features.contains(Features::UPDATE_SIZE) {
            return Err(UblkError::Unsupported(
                "this kernel does not resize ublk disks; stop and start the disk",
            ));
        }
        self.control
            .update_size(number, sectors, COMMAND_TIMEOUT)
            .map_err(kernel("the disk cannot be resized"))
    }
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
    let failed = kernel("the character device cannot be opened");
    let absent = |error: &io::Error| error.kind() == ErrorKind::NotFound;
    let file = retry(NODE_TIMEOUT, absent, || UblkControl::open_character_device(info.device));
    let file = file.map_err(&failed)?;
    let bytes = wire_ublk::descriptors_bytes(info.queue_depth, rustix::param::page_size() as u64);
    let queue = |index: u16| {
        let offset = wire_ublk::descriptors_offset(index);
        let descriptors = SharedRegion::map(file.as_fd(), offset, bytes, false)
            .map_err(|error| UblkError::Invalid(format!("the descriptors of a queue: {error}")))?;
        Ok(QueueStart {
            disk: info.device,
            index,
            depth: info.queue_depth,
            shape: *shape,
            file: file.try_clone().map_err(&failed)?,
            descriptors,
            descriptor: descriptor.clone(),
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
