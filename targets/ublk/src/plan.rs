//! From a descriptor of the kernel's to a request of a block device.

use block_io::{Op, RequestFlags};
use wire_ublk::{IoDescriptor, IoFlags, SECTOR_BYTES, UblkOperation};

use crate::limits::{IO_BYTES_MAX, RANGE_SECTORS_MAX};
use crate::shape::DiskShape;

/// What a request needs from the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) op: Op,
    pub(crate) lba: u64,
    pub(crate) blocks: u32,
    /// Bytes of data; 0 without.
    pub(crate) bytes: u32,
    pub(crate) flags: RequestFlags,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// It goes to the device.
    Submit(Plan),
    /// It is completed with this result: 0, or an errno negated.
    Complete(i32),
}

pub(crate) const EIO: i32 = 5;
pub(crate) const EINVAL: i32 = 22;
pub(crate) const EROFS: i32 = 30;
pub(crate) const EOPNOTSUPP: i32 = 95;

/// Plans the execution of a request. The kernel respects the parameters of the device; whatever does not is
/// an error of the request.
pub(crate) fn plan(shape: &DiskShape, descriptor: &IoDescriptor) -> Step {
    let Some(operation) = UblkOperation::from_number(descriptor.operation()) else {
        return Step::Complete(-EOPNOTSUPP);
    };
    let is_write = !matches!(operation, UblkOperation::Read | UblkOperation::Flush);
    if is_write && shape.read_only {
        return Step::Complete(-EROFS);
    }
    let mut flags = RequestFlags::NONE;
    let has_fua = descriptor.flags().contains(IoFlags::FUA);
    flags.set(RequestFlags::FUA, is_write && shape.write_cache && has_fua);
    match operation {
        UblkOperation::Flush if shape.can_flush => {
            Step::Submit(Plan { op: Op::Flush, lba: 0, blocks: 0, bytes: 0, flags })
        }
        // Without a cache that can be flushed there is none.
        UblkOperation::Flush => Step::Complete(0),
        UblkOperation::Read => transfer(shape, descriptor, Op::Read, flags),
        UblkOperation::Write => transfer(shape, descriptor, Op::Write, flags),
        UblkOperation::Discard if shape.can_unmap => range(shape, descriptor, Op::Unmap, RequestFlags::NONE),
        UblkOperation::WriteZeroes if shape.can_write_zeroes => {
            flags.set(RequestFlags::DEALLOCATE, !descriptor.flags().contains(IoFlags::NO_UNMAP));
            range(shape, descriptor, Op::WriteZeroes, flags)
        }
        UblkOperation::Discard | UblkOperation::WriteZeroes | UblkOperation::WriteSame => {
            Step::Complete(-EOPNOTSUPP)
        }
    }
}

/// A request with data.
fn transfer(shape: &DiskShape, descriptor: &IoDescriptor, op: Op, flags: RequestFlags) -> Step {
    if descriptor.sectors > IO_BYTES_MAX / SECTOR_BYTES as u32 {
        return Step::Complete(-EINVAL);
    }
    match range(shape, descriptor, op, flags) {
        Step::Submit(plan) => Step::Submit(Plan { bytes: plan.blocks * shape.block_size, ..plan }),
        step => step,
    }
}

/// A request of whole blocks. The layer checks the range against the size of the device.
fn range(shape: &DiskShape, descriptor: &IoDescriptor, op: Op, flags: RequestFlags) -> Step {
    let per_block = shape.sectors_per_block();
    let (first, sectors) = (descriptor.start_sector, descriptor.sectors);
    let is_whole = first.is_multiple_of(per_block.into()) && sectors.is_multiple_of(per_block);
    if !is_whole || sectors == 0 || sectors > RANGE_SECTORS_MAX {
        return Step::Complete(-EINVAL);
    }
    let (lba, blocks) = (first / u64::from(per_block), sectors / per_block);
    Step::Submit(Plan { op, lba, blocks, bytes: 0, flags })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn descriptor(operation: UblkOperation, flags: IoFlags, start_sector: u64, sectors: u32) -> IoDescriptor {
        IoDescriptor { op_flags: operation as u32 | flags.bits(), sectors, start_sector, address: 0 }
    }

    #[test]
    fn operations_of_the_kernel_are_those_of_the_device() {
        let shape = DiskShape::test(4096);
        let none = IoFlags::empty();
        let submit = |op, lba, blocks, bytes, flags| Step::Submit(Plan { op, lba, blocks, bytes, flags });
        let no = RequestFlags::NONE;
        let table = [
            (descriptor(UblkOperation::Read, none, 16, 8), submit(Op::Read, 2, 1, 4096, no)),
            // A read has no use for FUA.
            (descriptor(UblkOperation::Read, IoFlags::FUA, 0, 16), submit(Op::Read, 0, 2, 8192, no)),
            (descriptor(UblkOperation::Write, none, 8, 8), submit(Op::Write, 1, 1, 4096, no)),
            (
                descriptor(UblkOperation::Write, IoFlags::FUA, 8, 8),
                submit(Op::Write, 1, 1, 4096, RequestFlags::FUA),
            ),
            (descriptor(UblkOperation::Flush, none, 0, 0), submit(Op::Flush, 0, 0, 0, no)),
            (descriptor(UblkOperation::Discard, none, 8, 1 << 21), submit(Op::Unmap, 1, 1 << 18, 0, no)),
            (
                descriptor(UblkOperation::WriteZeroes, none, 8, 8),
                submit(Op::WriteZeroes, 1, 1, 0, RequestFlags::DEALLOCATE),
            ),
            (
                descriptor(UblkOperation::WriteZeroes, IoFlags::NO_UNMAP, 8, 8),
                submit(Op::WriteZeroes, 1, 1, 0, no),
            ),
            (descriptor(UblkOperation::WriteSame, none, 8, 8), Step::Complete(-EOPNOTSUPP)),
            (descriptor(UblkOperation::Read, none, 1, 8), Step::Complete(-EINVAL)),
            (descriptor(UblkOperation::Read, none, 8, 1), Step::Complete(-EINVAL)),
            (descriptor(UblkOperation::Read, none, 8, 0), Step::Complete(-EINVAL)),
            (descriptor(UblkOperation::Write, none, 0, 1032), Step::Complete(-EINVAL)),
        ];
        for (descriptor, expected) in table {
            assert_eq!(plan(&shape, &descriptor), expected, "{descriptor:?}");
        }
    }

    #[test]
    fn what_a_device_cannot_do_is_refused() {
        let none = IoFlags::empty();
        let read_only = DiskShape { read_only: true, ..DiskShape::test(512) };
        for operation in [UblkOperation::Write, UblkOperation::Discard, UblkOperation::WriteZeroes] {
            assert_eq!(plan(&read_only, &descriptor(operation, none, 0, 1)), Step::Complete(-EROFS));
        }
        let plain = DiskShape {
            can_flush: false,
            can_unmap: false,
            can_write_zeroes: false,
            write_cache: false,
            ..DiskShape::test(512)
        };
        assert_eq!(plan(&plain, &descriptor(UblkOperation::Flush, none, 0, 0)), Step::Complete(0));
        for operation in [UblkOperation::Discard, UblkOperation::WriteZeroes] {
            assert_eq!(plan(&plain, &descriptor(operation, none, 0, 1)), Step::Complete(-EOPNOTSUPP));
        }
    }

    proptest! {
        #[test]
        fn any_descriptor_is_a_request_within_the_limits_or_an_error(bytes: [u8; IoDescriptor::SIZE], shift in 9_u32..=12) {
            let shape = DiskShape::test(1 << shift);
            let descriptor = IoDescriptor::decode(&bytes).unwrap();
            match plan(&shape, &descriptor) {
                Step::Complete(result) => prop_assert!(result <= 0),
                Step::Submit(plan) => {
                    prop_assert!(plan.bytes <= IO_BYTES_MAX);
                    prop_assert_eq!(plan.bytes > 0, plan.op.has_data());
                    let sectors = u64::from(plan.blocks) * u64::from(shape.sectors_per_block());
                    if plan.op.has_range() {
                        prop_assert_eq!(sectors, u64::from(descriptor.sectors));
                        prop_assert_eq!(plan.lba * u64::from(shape.sectors_per_block()), descriptor.start_sector);
                    }
                }
            }
        }
    }
}
