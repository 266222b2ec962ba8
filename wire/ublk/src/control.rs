//! Commands to `/dev/ublk-control`.

use crate::{IOC_READ, IOC_READ_WRITE, ioctl_number};

/// A request to `/dev/ublk-control`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ControlRequest {
    /// Return the CPUs whose I/O a queue gets.
    GetQueueAffinity,
    /// Return the [`DeviceInfo`] of a device.
    GetDeviceInfo,
    /// Add the device of a [`DeviceInfo`], and return that which the driver has made of it.
    AddDevice,
    /// Remove a device, when its character device is closed.
    DeleteDevice,
    /// Make the block device appear, when all requests of all queues were fetched.
    StartDevice,
    /// Remove the block device.
    StopDevice,
    /// Set the [`UblkParameters`](crate::UblkParameters) of a device that is not started.
    SetParameters,
    /// Return the [`UblkParameters`](crate::UblkParameters) of a device.
    GetParameters,
    /// Prepare a quiesced device for another server.
    StartUserRecovery,
    /// Resume the I/O of a device, when all requests of all queues were fetched by its new server.
    EndUserRecovery,
    /// As [`GetDeviceInfo`](ControlRequest::GetDeviceInfo), where the caller names the device by its path
    /// too.
    GetDeviceInfo2,
    /// Return the [`Features`] of the driver (Linux 6.5 and later).
    GetFeatures,
    /// Set the size of a device, in sectors; with [`Features::UPDATE_SIZE`].
    UpdateSize,
}

impl ControlRequest {
    /// The number of the command in an io_uring entry.
    pub const fn number(self) -> u32 {
        let (direction, number) = match self {
            ControlRequest::GetQueueAffinity => (IOC_READ, 0x01),
            ControlRequest::GetDeviceInfo => (IOC_READ, 0x02),
            ControlRequest::AddDevice => (IOC_READ_WRITE, 0x04),
            ControlRequest::DeleteDevice => (IOC_READ_WRITE, 0x05),
            ControlRequest::StartDevice => (IOC_READ_WRITE, 0x06),
            ControlRequest::StopDevice => (IOC_READ_WRITE, 0x07),
            ControlRequest::SetParameters => (IOC_READ_WRITE, 0x08),
            ControlRequest::GetParameters => (IOC_READ, 0x09),
            ControlRequest::StartUserRecovery => (IOC_READ_WRITE, 0x10),
            ControlRequest::EndUserRecovery => (IOC_READ_WRITE, 0x11),
            ControlRequest::GetDeviceInfo2 => (IOC_READ, 0x12),
            ControlRequest::GetFeatures => (IOC_READ, 0x13),
            ControlRequest::UpdateSize => (IOC_READ_WRITE, 0x15),
        };
        ioctl_number(direction, number, ControlCommand::SIZE)
    }
}

codec::fields! {
    /// A command to `/dev/ublk-control` (`ublksrv_ctrl_cmd`).
    ControlCommand, 32 {
        /// Number of the device, or [`NEW_DEVICE`](ControlCommand::NEW_DEVICE).
        device: u32,
        /// Index of the queue, or [`NO_QUEUE`](ControlCommand::NO_QUEUE).
        queue: u16,
        /// Bytes at `address`.
        length: u16,
        /// Address of a structure that the driver reads or writes.
        address: u64,
        /// The server's process at the start and at the end of a recovery, the sectors of a new size, the
        /// queue whose affinity is asked for.
        value: u64,
        /// Bytes of the path of the character device before the structure, its NUL included; with
        /// [`Features::UNPRIVILEGED_DEVICE`] only.
        path_length: u16,
        /// Reserved, 0.
        reserved0: u16,
        /// Reserved, 0.
        reserved1: u32,
    }
}

impl ControlCommand {
    /// The device of a command that lets the driver select a number.
    pub const NEW_DEVICE: u32 = u32::MAX;
    /// The queue of a command that concerns the whole device.
    pub const NO_QUEUE: u16 = u16::MAX;
}

codec::fields! {
    /// What a device is (`ublksrv_ctrl_dev_info`).
    DeviceInfo, 64 {
        /// Number of queues.
        queues: u16,
        /// Maximum requests in flight in a queue.
        queue_depth: u16,
        /// [`UblkDeviceState`].
        state: u16,
        /// Reserved, 0.
        reserved0: u16,
        /// Maximum bytes of a request.
        io_bytes_max: u32,
        /// Number of the device.
        device: u32,
        /// Process of the server; -1 where there is none.
        process: i32,
        /// Reserved, 0.
        reserved1: u32,
        /// [`Features`].
        features: u64,
        /// A value of the server's, which the driver stores.
        server_flags: u64,
        /// User who owns the device, set by the driver.
        owner_user: u32,
        /// Group that owns the device, set by the driver.
        owner_group: u32,
        /// Reserved, 0.
        reserved2: u64,
        /// Reserved, 0.
        reserved3: u64,
    }
}

/// The state of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum UblkDeviceState {
    /// There is no block device.
    Dead = 0,
    /// The block device is served.
    Live = 1,
    /// The server is gone: I/O waits for a recovery.
    Quiesced = 2,
    /// The server is gone: I/O fails until a recovery.
    FailIo = 3,
}

impl UblkDeviceState {
    /// All states.
    pub const ALL: [UblkDeviceState; 4] =
        [UblkDeviceState::Dead, UblkDeviceState::Live, UblkDeviceState::Quiesced, UblkDeviceState::FailIo];

    /// The state with this number.
    pub const fn from_number(number: u16) -> Option<UblkDeviceState> {
        if (number as usize) < UblkDeviceState::ALL.len() {
            Some(UblkDeviceState::ALL[number as usize])
        } else {
            None
        }
    }
}

bitflags::bitflags! {
    /// Features of the driver and of a device. Those of zoned devices and of integrity are left out; unknown
    /// ones are preserved.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Features: u64 {
        /// The pages of a request can be registered with an io_uring as a buffer.
        const SUPPORT_ZERO_COPY = 1 << 0;
        /// Requests are delivered by io_uring's task work.
        const URING_CMD_COMP_IN_TASK = 1 << 1;
        /// The server gives the buffer of a write when it knows the request ([`IoRequest::NeedGetData`]).
        ///
        /// [`IoRequest::NeedGetData`]: crate::IoRequest::NeedGetData
        const NEED_GET_DATA = 1 << 2;
        /// The device survives its server, and is recovered.
        const USER_RECOVERY = 1 << 3;
        /// Requests that were in flight when the server died are issued again to the next one.
        const USER_RECOVERY_REISSUE = 1 << 4;
        /// An unprivileged user can add the device.
        const UNPRIVILEGED_DEVICE = 1 << 5;
        /// Commands have the numbers of ioctls.
        const CMD_IOCTL_ENCODE = 1 << 6;
        /// Data is read and written at the [`data_offset`](crate::data_offset) of the character device.
        const USER_COPY = 1 << 7;
        /// I/O without a server fails rather than waits.
        const USER_RECOVERY_FAIL_IO = 1 << 9;
        /// The size of a device can be changed.
        const UPDATE_SIZE = 1 << 10;
        /// The pages of a request are registered as a buffer when it is delivered.
        const AUTO_BUF_REG = 1 << 11;
        const _ = !0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Values and bytes of these tests come from a C program that filled the structures of `linux/ublk_cmd.h`
    // of Linux 6.1. It wrote what later kernels define (owners, newer features and commands) as numbers into
    // their reserved fields.

    #[test]
    fn requests_have_the_numbers_of_the_kernel_header() {
        let expected = [
            (ControlRequest::GetQueueAffinity, 0x8020_7501),
            (ControlRequest::GetDeviceInfo, 0x8020_7502),
            (ControlRequest::AddDevice, 0xc020_7504),
            (ControlRequest::DeleteDevice, 0xc020_7505),
            (ControlRequest::StartDevice, 0xc020_7506),
            (ControlRequest::StopDevice, 0xc020_7507),
            (ControlRequest::SetParameters, 0xc020_7508),
            (ControlRequest::GetParameters, 0x8020_7509),
            (ControlRequest::StartUserRecovery, 0xc020_7510),
            (ControlRequest::EndUserRecovery, 0xc020_7511),
            (ControlRequest::GetDeviceInfo2, 0x8020_7512),
            (ControlRequest::GetFeatures, 0x8020_7513),
            (ControlRequest::UpdateSize, 0xc020_7515),
        ];
        for (request, number) in expected {
            assert_eq!(request.number(), number, "{request:?}");
        }
    }

    #[test]
    fn a_control_command_has_the_bytes_of_the_kernel_header() {
        let command = ControlCommand {
            device: 3,
            queue: ControlCommand::NO_QUEUE,
            length: 64,
            address: 0x1122_3344_5566_7788,
            value: 0x99aa_bbcc_ddee_ff00,
            ..Default::default()
        };
        let bytes = [
            0x03, 0, 0, 0, 0xff, 0xff, 0x40, 0, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x00, 0xff,
            0xee, 0xdd, 0xcc, 0xbb, 0xaa, 0x99, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(command.to_bytes(), bytes);
        assert_eq!(ControlCommand::decode(&bytes).unwrap(), command);
    }

    #[test]
    fn a_device_has_the_bytes_of_the_kernel_header() {
        let features = Features::USER_RECOVERY
            | Features::USER_RECOVERY_REISSUE
            | Features::CMD_IOCTL_ENCODE
            | Features::USER_COPY;
        let info = DeviceInfo {
            queues: 4,
            queue_depth: 128,
            state: UblkDeviceState::Quiesced as u16,
            io_bytes_max: 1 << 20,
            device: 7,
            process: 4321,
            features: features.bits(),
            server_flags: 0x0102_0304_0506_0708,
            owner_user: 1000,
            owner_group: 1001,
            ..Default::default()
        };
        let mut bytes = [0; DeviceInfo::SIZE];
        bytes[..48].copy_from_slice(&[
            0x04, 0, 0x80, 0, 0x02, 0, 0, 0, 0, 0, 0x10, 0, 0x07, 0, 0, 0, 0xe1, 0x10, 0, 0, 0, 0, 0, 0,
            0xd8, 0, 0, 0, 0, 0, 0, 0, 0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01, 0xe8, 0x03, 0, 0,
            0xe9, 0x03, 0, 0,
        ]);
        assert_eq!(info.to_bytes(), bytes);
        assert_eq!(DeviceInfo::decode(&bytes).unwrap(), info);
    }

    #[test]
    fn states_have_their_numbers() {
        for (number, state) in (0..).zip(UblkDeviceState::ALL) {
            assert_eq!((state as u16, UblkDeviceState::from_number(number)), (number, Some(state)));
        }
        assert_eq!(UblkDeviceState::from_number(4), None);
    }
}
