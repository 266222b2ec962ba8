//! What the kernel is told about a block device, and what a queue has to know of it.

use bdev::BlockDevice;
use block_io::Op;
use wire_ublk::{
    Attributes, BasicParameters, DeviceInfo, DiscardParameters, Features, SECTOR_BYTES, UblkParameters,
};

use crate::UblkError;
use crate::limits::{IO_BYTES_MAX, QUEUE_DEPTH_MAX, RANGE_SECTORS_MAX};

/// What a queue knows of its device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskShape {
    /// Bytes of a block: a power of two, at least those of a sector.
    pub(crate) block_size: u32,
    pub(crate) read_only: bool,
    pub(crate) can_flush: bool,
    pub(crate) can_unmap: bool,
    pub(crate) can_write_zeroes: bool,
    /// Completed writes may be lost at a power failure.
    pub(crate) write_cache: bool,
    /// Reads leave memory as it is: it has to be zeroed first.
    pub(crate) reads_undefined: bool,
    /// Reads and writes take pages that the driver has registered, aligned to a multiple of so many bytes.
    pub(crate) page_alignment: Option<u32>,
    /// Bytes that need no read-modify-write, and of optimal I/O: powers of two.
    pub(crate) physical_block_size: u32,
    pub(crate) optimal_bytes: u32,
    /// Writes are whole multiples of this many bytes.
    pub(crate) write_unit_bytes: u64,
    pub(crate) bytes: u64,
}

impl DiskShape {
    /// # Errors
    /// The kernel has no such block devices.
    pub(crate) fn of(device: &BlockDevice) -> Result<DiskShape, UblkError> {
        let geometry = device.geometry();
        let supports = |op| device.bdev().supports(op);
        let block_size = geometry.block_size;
        let is_possible = block_size.is_power_of_two()
            && u64::from(block_size) >= SECTOR_BYTES
            && block_size as usize <= rustix::param::page_size();
        if !is_possible {
            let reason = format!("bdev_name: the kernel has no block devices of {block_size}-byte blocks");
            return Err(UblkError::Invalid(reason));
        }
        let read_only = device.bdev().read_only();
        let physical = geometry.physical_block_size.max(block_size);
        let physical_block_size = if physical.is_power_of_two() { physical } else { block_size };
        let write_unit_bytes = u64::from(geometry.write_unit_blocks.max(1)) * u64::from(block_size);
        let optimal = match geometry.write_unit_blocks {
            0 | 1 => u64::from(geometry.optimal_io_boundary_blocks) * u64::from(block_size),
            _ => write_unit_bytes,
        };
        let is_optimal = optimal.is_power_of_two() && optimal <= u64::from(IO_BYTES_MAX);
        Ok(DiskShape {
            block_size,
            read_only,
            can_flush: supports(Op::Flush),
            can_unmap: !read_only && supports(Op::Unmap),
            can_write_zeroes: !read_only && supports(Op::WriteZeroes),
            write_cache: geometry.write_cache && supports(Op::Flush),
            reads_undefined: device.bdev().reads_undefined(),
            // File systems read single blocks, and the kernel fails what is aligned to less than the mask:
            // files want no more than their blocks, though a module may say a page.
            page_alignment: device
                .bdev()
                .registered_page_alignment()
                .map(|alignment| alignment.clamp(4, block_size)),
            physical_block_size,
            optimal_bytes: if is_optimal { optimal as u32 } else { physical_block_size },
            write_unit_bytes,
            bytes: geometry.bytes(),
        })
    }

    /// Sectors of a block.
    pub(crate) fn sectors_per_block(&self) -> u32 {
        self.block_size / SECTOR_BYTES as u32
    }

    /// Size in sectors.
    pub(crate) fn sectors(&self) -> u64 {
        self.bytes / SECTOR_BYTES
    }

    /// What the kernel is told, for a device whose requests have at most `io_bytes_max` bytes.
    pub(crate) fn parameters(&self, io_bytes_max: u32) -> UblkParameters {
        let mut attributes = Attributes::empty();
        attributes.set(Attributes::READ_ONLY, self.read_only);
        attributes.set(Attributes::VOLATILE_CACHE | Attributes::FUA, self.write_cache);
        // The kernel divides longer ones at multiples of it.
        let units = u64::from(io_bytes_max) / self.write_unit_bytes;
        let io_bytes_max = if units == 0 { io_bytes_max } else { (units * self.write_unit_bytes) as u32 };
        let basic = BasicParameters {
            attributes: attributes.bits(),
            logical_block_shift: self.block_size.ilog2() as u8,
            physical_block_shift: self.physical_block_size.ilog2() as u8,
            optimal_io_shift: self.optimal_bytes.ilog2() as u8,
            minimum_io_shift: self.physical_block_size.ilog2() as u8,
            sectors_max: io_bytes_max / SECTOR_BYTES as u32,
            size_sectors: self.sectors(),
            ..BasicParameters::default()
        };
        let discard = DiscardParameters {
            granularity_bytes: self.block_size,
            discard_sectors_max: if self.can_unmap { RANGE_SECTORS_MAX } else { 0 },
            write_zeroes_sectors_max: if self.can_write_zeroes { RANGE_SECTORS_MAX } else { 0 },
            discard_segments_max: 1,
            ..DiscardParameters::default()
        };
        let has_discard = self.can_unmap || self.can_write_zeroes;
        UblkParameters {
            basic,
            discard: has_discard.then_some(discard),
            alignment_mask: self.page_alignment.map(|bytes| bytes - 1),
        }
    }

    /// Whether reads and writes of a device of the driver are operations on the kernel's own pages.
    pub(crate) fn uses_pages(&self, info: &DeviceInfo) -> bool {
        let registers = Features::from_bits_retain(info.features).contains(Features::AUTO_BUF_REG);
        registers && self.page_alignment.is_some()
    }

    /// Whether a disk with these parameters can be served from this device: the kernel's users rely on its
    /// size and its blocks, without a cache the kernel sends no flushes, and larger requests than
    /// [`IO_BYTES_MAX`] would fail.
    pub(crate) fn suits(&self, parameters: &UblkParameters) -> bool {
        let basic = &parameters.basic;
        let attributes = Attributes::from_bits_retain(basic.attributes);
        basic.size_sectors == self.sectors()
            && u32::from(basic.logical_block_shift) == self.block_size.ilog2()
            && basic.sectors_max <= IO_BYTES_MAX / SECTOR_BYTES as u32
            && (!self.write_cache || attributes.contains(Attributes::VOLATILE_CACHE))
    }

    #[cfg(test)]
    pub(crate) fn test(block_size: u32) -> DiskShape {
        DiskShape {
            block_size,
            read_only: false,
            can_flush: true,
            can_unmap: true,
            can_write_zeroes: true,
            write_cache: true,
            reads_undefined: false,
            page_alignment: None,
            physical_block_size: block_size,
            optimal_bytes: block_size,
            write_unit_bytes: block_size.into(),
            bytes: 1 << 30,
        }
    }
}

/// Checks the queues of a device that the driver describes; another server may have added it.
///
/// # Errors
/// It has no queue, or more or longer ones than are served.
pub(crate) fn check_served(info: &DeviceInfo) -> Result<(), UblkError> {
    let is_served = (1..=wire_ublk::QUEUES_MAX).contains(&info.queues)
        && (1..=QUEUE_DEPTH_MAX as u16).contains(&info.queue_depth);
    if is_served {
        return Ok(());
    }
    let (queues, depth) = (info.queues, info.queue_depth);
    Err(UblkError::TooMany(format!("the device has {queues} queues of {depth} requests; that is not served")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_the_parameters_of_its_geometry() {
        let registry = bdev::Registry::new();
        bdev::malloc::create(&registry, bdev::malloc::MallocConfig::new("M", 2048, 4096)).unwrap();
        let shape = DiskShape::of(&registry.find("M").unwrap()).unwrap();
        let parameters = shape.parameters(IO_BYTES_MAX);
        let basic = parameters.basic;
        assert_eq!((basic.logical_block_shift, basic.size_sectors, basic.sectors_max), (12, 16384, 1024));
        assert_eq!(basic.attributes, 0, "memory has no cache");
        let discard = parameters.discard.unwrap();
        assert_eq!((discard.granularity_bytes, discard.discard_segments_max), (4096, 1));
        assert_eq!(parameters.alignment_mask, None, "memory takes no pages");
        let units = DiskShape { write_unit_bytes: 192 << 10, ..shape };
        assert_eq!(units.parameters(IO_BYTES_MAX).basic.sectors_max, 768, "two units");
        let large = DiskShape { write_unit_bytes: 1 << 20, ..shape };
        assert_eq!(large.parameters(IO_BYTES_MAX).basic.sectors_max, 1024);
        let aligned = DiskShape { page_alignment: Some(512), ..shape };
        assert_eq!(aligned.parameters(IO_BYTES_MAX).alignment_mask, Some(511));
        assert!(shape.suits(&parameters));
        assert!(!DiskShape { write_cache: true, ..shape }.suits(&parameters), "flushes would be missing");
        bdev::malloc::create(&registry, bdev::malloc::MallocConfig::new("N", 2049, 4096)).unwrap();
        assert!(!DiskShape::of(&registry.find("N").unwrap()).unwrap().suits(&parameters));
    }
}
