//! Commands to `/dev/ublkcN`, and the descriptors of requests.

use crate::{IOC_READ_WRITE, QUEUE_DEPTH_MAX, QUEUES_MAX, ioctl_number};

/// Maximum bytes of the data of a request, the room that [`data_offset`] leaves it.
pub const IO_BYTES_MAX: u32 = 1 << TAG_SHIFT;

/// Where data begins in the character device; the descriptors are before it.
const DATA_START: u64 = 0x8000_0000;
/// Bits below the tag: the byte of the data.
const TAG_SHIFT: u32 = 25;
/// Bits below the queue: byte and tag.
const QUEUE_SHIFT: u32 = TAG_SHIFT + 16;

/// A request to `/dev/ublkcN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoRequest {
    /// Fetch the first request of a tag.
    Fetch,
    /// Complete the request of a tag, and fetch its next.
    CommitAndFetch,
    /// Give the buffer of a write; with [`Features::NEED_GET_DATA`](crate::Features::NEED_GET_DATA).
    NeedGetData,
}

impl IoRequest {
    /// The number of the command in an io_uring entry.
    pub const fn number(self) -> u32 {
        let number = match self {
            IoRequest::Fetch => 0x20,
            IoRequest::CommitAndFetch => 0x21,
            IoRequest::NeedGetData => 0x22,
        };
        ioctl_number(IOC_READ_WRITE, number, IoCommand::SIZE)
    }
}

codec::fields! {
    /// A command to `/dev/ublkcN` (`ublksrv_io_cmd`).
    IoCommand, 16 {
        /// Index of the queue.
        queue: u16,
        /// Tag of the request, from 0 to the depth of the queue less 1.
        tag: u16,
        /// Of [`IoRequest::CommitAndFetch`]: bytes of a read or write that succeeded, 0 of another request,
        /// or an errno negated.
        result: i32,
        /// Address of the buffer that data is copied from and to; 0 with
        /// [`Features::USER_COPY`](crate::Features::USER_COPY). Without, the driver wants one of every read
        /// that is completed, also of one that has failed.
        address: u64,
    }
}

/// Result of a command whose request is a write that waits for [`IoRequest::NeedGetData`]
/// (`UBLK_IO_RES_NEED_GET_DATA`). It is 0 for any other request.
pub const NEED_GET_DATA: i32 = 1;

codec::fields! {
    /// A request (`ublksrv_io_desc`), in the array of its queue at the index of its tag.
    IoDescriptor, 24 {
        /// [`operation`](IoDescriptor::operation) and [`flags`](IoDescriptor::flags).
        op_flags: u32,
        /// Length in sectors.
        sectors: u32,
        /// First sector.
        start_sector: u64,
        /// Address of the buffer.
        address: u64,
    }
}

impl IoDescriptor {
    /// The number of the [`UblkOperation`].
    pub const fn operation(&self) -> u8 {
        self.op_flags as u8
    }

    /// The flags, unknown ones included.
    pub const fn flags(&self) -> IoFlags {
        IoFlags::from_bits_retain(self.op_flags & !0xff)
    }
}

/// What a request does. Those of zoned devices are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum UblkOperation {
    /// Read data.
    Read = 0,
    /// Write data.
    Write = 1,
    /// Make completed writes durable.
    Flush = 2,
    /// Deallocate a range.
    Discard = 3,
    /// Write a block to the whole of a range.
    WriteSame = 4,
    /// Write zeroes to a range.
    WriteZeroes = 5,
}

impl UblkOperation {
    /// All operations.
    pub const ALL: [UblkOperation; 6] = [
        UblkOperation::Read,
        UblkOperation::Write,
        UblkOperation::Flush,
        UblkOperation::Discard,
        UblkOperation::WriteSame,
        UblkOperation::WriteZeroes,
    ];

    /// The operation with this number.
    pub const fn from_number(number: u8) -> Option<UblkOperation> {
        if (number as usize) < UblkOperation::ALL.len() {
            Some(UblkOperation::ALL[number as usize])
        } else {
            None
        }
    }
}

bitflags::bitflags! {
    /// Flags of a request, where they are in [`IoDescriptor::op_flags`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct IoFlags: u32 {
        /// Do not retry after an error of the device.
        const FAILFAST_DEVICE = 1 << 8;
        /// Do not retry after an error of the transport.
        const FAILFAST_TRANSPORT = 1 << 9;
        /// Do not retry after an error of the driver.
        const FAILFAST_DRIVER = 1 << 10;
        /// Metadata of a file system.
        const META = 1 << 11;
        /// The data is durable when the request completes.
        const FUA = 1 << 13;
        /// Of [`UblkOperation::WriteZeroes`]: do not deallocate.
        const NO_UNMAP = 1 << 15;
        /// The request is of swap space.
        const SWAP = 1 << 16;
        /// The pages of the request could not be registered ([`AutoBufferRegistration::fallback`]).
        const NEED_REGISTRATION = 1 << 17;
        const _ = !0;
    }
}

/// Where the driver registers the pages of the next request of a tag (`ublk_auto_buf_reg`), for a device with
/// [`Features::AUTO_BUF_REG`](crate::Features::AUTO_BUF_REG). It is the address of the io_uring entry of a
/// command, not [`IoCommand::address`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AutoBufferRegistration {
    /// Index among the registered buffers of the io_uring that the command is sent by.
    pub index: u16,
    /// Deliver a request whose pages cannot be registered with [`IoFlags::NEED_REGISTRATION`]; it fails
    /// otherwise.
    pub fallback: bool,
}

impl AutoBufferRegistration {
    /// The address of the entry (`ublk_auto_buf_reg_to_sqe_addr`).
    pub const fn to_entry_address(self) -> u64 {
        self.index as u64 | (self.fallback as u64) << 16
    }
}

/// Offset in `/dev/ublkcN` of a byte of the data of a request; with
/// [`Features::USER_COPY`](crate::Features::USER_COPY).
///
/// # Panics
/// If `queue` is not below [`QUEUES_MAX`] or `byte` not below [`IO_BYTES_MAX`]: the offset would be that of
/// another request.
pub const fn data_offset(queue: u16, tag: u16, byte: u32) -> u64 {
    assert!(queue < QUEUES_MAX && byte < IO_BYTES_MAX);
    DATA_START + ((queue as u64) << QUEUE_SHIFT | (tag as u64) << TAG_SHIFT | byte as u64)
}

/// Offset in `/dev/ublkcN` of the descriptors of a queue.
pub const fn descriptors_offset(queue: u16) -> u64 {
    queue as u64 * (QUEUE_DEPTH_MAX as usize * IoDescriptor::SIZE) as u64
}

/// Bytes to map of the descriptors of a queue with this depth: whole pages.
pub const fn descriptors_bytes(queue_depth: u16, page_bytes: u64) -> u64 {
    (queue_depth as u64 * IoDescriptor::SIZE as u64).next_multiple_of(page_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // Values and bytes of these tests come from a C program that filled the structures of `linux/ublk_cmd.h`
    // of Linux 6.1; offsets of data are those that later kernels define.

    #[test]
    fn requests_have_the_numbers_of_the_kernel_header() {
        let numbers =
            [IoRequest::Fetch, IoRequest::CommitAndFetch, IoRequest::NeedGetData].map(IoRequest::number);
        assert_eq!(numbers, [0xc010_7520, 0xc010_7521, 0xc010_7522]);
    }

    #[test]
    fn a_descriptor_has_the_bytes_of_the_kernel_header() {
        let bytes = [
            0x01, 0x28, 0, 0, 0x08, 0, 0, 0, 0x9a, 0x78, 0x56, 0x34, 0x12, 0, 0, 0, 0x00, 0x10, 0, 0, 0,
            0x7f, 0, 0,
        ];
        let descriptor = IoDescriptor::decode(&bytes).unwrap();
        assert_eq!(UblkOperation::from_number(descriptor.operation()), Some(UblkOperation::Write));
        assert_eq!(descriptor.flags(), IoFlags::FUA | IoFlags::META);
        assert_eq!((descriptor.sectors, descriptor.start_sector), (8, 0x12_3456_789a));
        assert_eq!(descriptor.address, 0x7f00_0000_1000);
        assert_eq!(descriptor.to_bytes(), bytes);
    }

    #[test]
    fn an_io_command_has_the_bytes_of_the_kernel_header() {
        let command = IoCommand { queue: 2, tag: 17, result: -5, address: 0x7f00_0000_2000 };
        let bytes = [0x02, 0, 0x11, 0, 0xfb, 0xff, 0xff, 0xff, 0x00, 0x20, 0, 0, 0, 0x7f, 0, 0];
        assert_eq!(command.to_bytes(), bytes);
        assert_eq!(IoCommand::decode(&bytes).unwrap(), command);
    }

    #[test]
    fn the_address_of_an_entry_has_index_and_fallback() {
        let address = |index, fallback| AutoBufferRegistration { index, fallback }.to_entry_address();
        assert_eq!((address(0x1234, false), address(0xffff, true)), (0x1234, 0x1_ffff));
    }

    #[test]
    fn operations_have_their_numbers() {
        for (number, operation) in (0..).zip(UblkOperation::ALL) {
            assert_eq!((operation as u8, UblkOperation::from_number(number)), (number, Some(operation)));
        }
        assert_eq!(UblkOperation::from_number(6), None);
    }

    #[test]
    fn an_offset_of_data_names_queue_tag_and_byte() {
        assert_eq!(data_offset(0, 0, 0), 0x8000_0000);
        assert_eq!(data_offset(2, 17, 4096), 0x400_a200_1000);
    }

    #[test]
    fn descriptors_of_a_queue_are_whole_pages_at_a_multiple_of_the_largest_array() {
        assert_eq!((descriptors_offset(0), descriptors_offset(3)), (0, 0x4_8000));
        assert_eq!((descriptors_bytes(128, 4096), descriptors_bytes(171, 4096)), (4096, 8192));
    }

    proptest! {
        #[test]
        fn offsets_of_data_name_one_byte_of_one_request(
            queue in 0..QUEUES_MAX, tag: u16, byte in 0..IO_BYTES_MAX,
        ) {
            let offset = data_offset(queue, tag, byte) - DATA_START;
            prop_assert_eq!((offset >> QUEUE_SHIFT) as u16, queue);
            prop_assert_eq!((offset >> TAG_SHIFT) as u16, tag);
            prop_assert_eq!(offset as u32 & (IO_BYTES_MAX - 1), byte);
        }

        #[test]
        fn any_descriptor_round_trips(bytes: [u8; IoDescriptor::SIZE]) {
            let descriptor = IoDescriptor::decode(&bytes).unwrap();
            prop_assert_eq!(u32::from(descriptor.operation()) | descriptor.flags().bits(), descriptor.op_flags);
            prop_assert_eq!(descriptor.to_bytes(), bytes);
        }
    }
}
