//! Control commands of ublk.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use wire_ublk::{ControlCommand, ControlRequest, DeviceInfo, Features, UblkParameters};

/// Entries of the ring: one command at a time, and those that were given up and have not completed.
const RING_ENTRIES: u32 = 8;
/// Commands that were given up and may have memory; further commands are rejected.
const LEAKED_MAX: u32 = RING_ENTRIES - 1;

/// The control device of ublk (`/dev/ublk-control`), with an io_uring of its own.
///
/// A command blocks the calling thread until the driver has executed it, which may need the reactors: a
/// device starts only when its queues are served, and stops when its requests have completed. So it is not to
/// be used on a reactor. A command that takes longer than its time limit fails with `TimedOut`; the driver
/// may execute it later.
pub struct UblkControl {
    file: File,
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    sequence: u64,
    leaked: u32,
}

/// A device, as commands name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkDevice {
    /// The number N of `/dev/ublkcN`.
    pub number: u32,
    /// It was added with [`UNPRIVILEGED_DEVICE`](Features::UNPRIVILEGED_DEVICE): its commands carry the path
    /// of the character device, which the driver checks the caller's permission for.
    pub unprivileged: bool,
}

impl UblkDevice {
    /// The device that the driver describes.
    pub fn of(info: &DeviceInfo) -> UblkDevice {
        let features = Features::from_bits_retain(info.features);
        UblkDevice { number: info.device, unprivileged: features.contains(Features::UNPRIVILEGED_DEVICE) }
    }

    /// Path of the character device.
    pub fn path(self) -> String {
        format!("/dev/ublkc{}", self.number)
    }
}

/// What a command carries besides its device.
struct Arguments<'a> {
    value: u64,
    /// Bytes that the driver reads and writes.
    payload: &'a mut [u8],
    timeout: Duration,
}

impl UblkControl {
    /// Opens the control device.
    ///
    /// # Errors
    /// `NotFound` without the driver, `PermissionDenied` without the right to open it; those of io_uring.
    pub fn open() -> io::Result<UblkControl> {
        let file = OpenOptions::new().read(true).write(true).open("/dev/ublk-control")?;
        UblkControl::with_file(file)
    }

    fn with_file(file: File) -> io::Result<UblkControl> {
        let ring = IoUring::builder().build(RING_ENTRIES)?;
        Ok(UblkControl { file, ring, sequence: 0, leaked: 0 })
    }

    /// The features of the driver. `Unsupported` before Linux 6.5.
    pub fn features(&mut self, timeout: Duration) -> io::Result<Features> {
        let mut bytes = [0; 8];
        let none = UblkDevice { number: 0, unprivileged: false };
        let features = self.run(ControlRequest::GetFeatures, none, Arguments::read(&mut bytes, timeout));
        features.map(|()| Features::from_bits_retain(u64::from_ne_bytes(bytes)))
    }

    /// Adds a device, and returns what the driver has made of `info`.
    pub fn add_device(&mut self, info: &DeviceInfo, timeout: Duration) -> io::Result<DeviceInfo> {
        let mut bytes = info.to_bytes();
        // There is no character device yet.
        let new = UblkDevice { number: info.device, unprivileged: false };
        self.run(ControlRequest::AddDevice, new, Arguments::read(&mut bytes, timeout))?;
        DeviceInfo::decode(&bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
    }

    /// What a device is, which may be unprivileged or not.
    pub fn device_info(&mut self, number: u32, timeout: Duration) -> io::Result<DeviceInfo> {
        let mut bytes = [0; DeviceInfo::SIZE];
        let device = UblkDevice { number, unprivileged: false };
        let read = self.run(ControlRequest::GetDeviceInfo, device, Arguments::read(&mut bytes, timeout));
        // The driver misses the path.
        if matches!(&read, Err(error) if error.raw_os_error() == Some(libc::EINVAL)) {
            let device = UblkDevice { unprivileged: true, ..device };
            self.run(ControlRequest::GetDeviceInfo2, device, Arguments::read(&mut bytes, timeout))?;
        } else {
            read?;
        }
        DeviceInfo::decode(&bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
    }

    /// Sets the parameters of a device that is not started.
    pub fn set_parameters(
        &mut self,
        device: UblkDevice,
        parameters: &UblkParameters,
        timeout: Duration,
    ) -> io::Result<()> {
        let mut bytes = parameters.to_bytes();
        self.run(ControlRequest::SetParameters, device, Arguments::read(&mut bytes, timeout))
    }

    /// The parameters of a device.
    pub fn parameters(&mut self, device: UblkDevice, timeout: Duration) -> io::Result<UblkParameters> {
        // The driver takes the length that it may write from the structure itself.
        let mut bytes = [0; UblkParameters::SIZE];
        bytes[..4].copy_from_slice(&(UblkParameters::SIZE as u32).to_ne_bytes());
        self.run(ControlRequest::GetParameters, device, Arguments::read(&mut bytes, timeout))?;
        UblkParameters::decode(&bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
    }

    /// Makes the block device appear. Waits until all requests of all queues were fetched, and for the
    /// kernel's search for partitions.
    pub fn start_device(&mut self, device: UblkDevice, timeout: Duration) -> io::Result<()> {
        let value = std::process::id().into();
        self.run(ControlRequest::StartDevice, device, Arguments::value(value, timeout))
    }

    /// Removes the block device. Waits until its requests have completed.
    pub fn stop_device(&mut self, device: UblkDevice, timeout: Duration) -> io::Result<()> {
        self.run(ControlRequest::StopDevice, device, Arguments::value(0, timeout))
    }

    /// Removes a device. Waits until its character device is closed and unmapped.
    pub fn delete_device(&mut self, device: UblkDevice, timeout: Duration) -> io::Result<()> {
        self.run(ControlRequest::DeleteDevice, device, Arguments::value(0, timeout))
    }

    /// Prepares a device whose server is gone for this process. `EBUSY` while the kernel still ends the
    /// server.
    pub fn start_recovery(&mut self, device: UblkDevice, timeout: Duration) -> io::Result<()> {
        self.run(ControlRequest::StartUserRecovery, device, Arguments::value(0, timeout))
    }

    /// Resumes the I/O of a device. Waits until all requests of all queues were fetched.
    pub fn end_recovery(&mut self, device: UblkDevice, timeout: Duration) -> io::Result<()> {
        let value = std::process::id().into();
        self.run(ControlRequest::EndUserRecovery, device, Arguments::value(value, timeout))
    }

    /// Sets the size of a device; with [`Features::UPDATE_SIZE`].
    pub fn update_size(&mut self, device: UblkDevice, sectors: u64, timeout: Duration) -> io::Result<()> {
        self.run(ControlRequest::UpdateSize, device, Arguments::value(sectors, timeout))
    }

    /// Opens the character device of a device. `ResourceBusy` while another process has it open.
    pub fn open_character_device(device: UblkDevice) -> io::Result<OwnedFd> {
        // io_uring copies data of a non-blocking file at once, and of another one by a thread of the kernel.
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
        Ok(options.open(device.path())?.into())
    }

    /// Executes a command.
    fn run(
        &mut self,
        request: ControlRequest,
        device: UblkDevice,
        arguments: Arguments<'_>,
    ) -> io::Result<()> {
        if self.leaked >= LEAKED_MAX {
            return Err(ErrorKind::ResourceBusy.into());
        }
        let Arguments { value, payload, timeout } = arguments;
        let path = if device.unprivileged { device.path() + "\0" } else { String::new() };
        let path_bytes = path.len();
        // The kernel has the copy until the command completes, which may be after this call.
        let mut memory = [path.as_bytes(), &*payload].concat().into_boxed_slice();
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        let command = ControlCommand {
            device: device.number,
            queue: ControlCommand::NO_QUEUE,
            length: memory.len() as u16,
            address: if memory.is_empty() { 0 } else { address },
            value,
            path_length: path_bytes as u16,
            ..ControlCommand::default()
        };
        let mut bytes = [0; 80];
        bytes[..ControlCommand::SIZE].copy_from_slice(&command.to_bytes());
        self.sequence += 1;
        let entry = opcode::UringCmd80::new(Fd(self.file.as_raw_fd()), request.number()).cmd(bytes);
        let entry = entry.build().user_data(self.sequence);
        // SAFETY: the entry points to `memory` alone, which is dropped only after the command has completed
        // and is leaked otherwise; the file is open as long as the ring.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "fewer commands than entries are in flight");
        match self.wait(Instant::now() + timeout) {
            Some(result) if result >= 0 => {
                payload.copy_from_slice(&memory[path_bytes..]);
                Ok(())
            }
            Some(errno) => Err(io::Error::from_raw_os_error(-errno)),
            None => {
                std::mem::forget(memory);
                self.leaked += 1;
                Err(ErrorKind::TimedOut.into())
            }
        }
    }

    /// The result of the latest command; `None` if it has not completed at `deadline`.
    fn wait(&mut self, deadline: Instant) -> Option<i32> {
        loop {
            while let Some(entry) = self.ring.completion().next() {
                if entry.user_data() == self.sequence {
                    return Some(entry.result());
                }
                // One that was given up. Its memory stays leaked.
                self.leaked = self.leaked.saturating_sub(1);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let time = Timespec::from(left);
            let entered = self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time));
            if let Err(error) = entered
                && !matches!(
                    error.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY)
                )
            {
                panic!("io_uring_enter on our own ring cannot fail, but did: {error}");
            }
        }
    }
}

impl<'a> Arguments<'a> {
    fn read(payload: &'a mut [u8], timeout: Duration) -> Arguments<'a> {
        Arguments { value: 0, payload, timeout }
    }

    fn value(value: u64, timeout: Duration) -> Arguments<'a> {
        Arguments { value, payload: &mut [], timeout }
    }
}

// Miri does not implement io_uring.
#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn a_file_that_is_not_the_driver_refuses_commands() {
        let null = OpenOptions::new().read(true).write(true).open("/dev/zero").unwrap();
        // Without io_uring, or without its passthrough commands, there is nothing to test.
        let Ok(mut control) = UblkControl::with_file(null) else { return };
        for _ in 0..2 * RING_ENTRIES {
            assert!(control.features(TIMEOUT).is_err());
            for unprivileged in [false, true] {
                assert!(control.delete_device(UblkDevice { number: 0, unprivileged }, TIMEOUT).is_err());
            }
        }
        assert_eq!(control.leaked, 0);
    }
}
