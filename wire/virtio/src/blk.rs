//! The block device (virtio 1.3, section 5.2).

use crate::DecodeError;

/// Unit of sectors and of the capacity, in bytes, whatever the block size is.
pub const SECTOR_BYTES: u64 = 512;
/// Bytes of the device identifier that [`RequestKind::GetId`] returns.
pub const ID_BYTES: usize = 20;

codec::fields! {
    /// What a request begins with.
    RequestHeader, 16 {
        /// [`RequestKind`].
        kind: u32,
        /// Reserved; a priority for legacy drivers.
        priority: u32,
        /// First sector of a read or write.
        sector: u64,
    }
}

impl RequestHeader {
    /// As [`split::Descriptor::from_words`](crate::split::Descriptor::from_words).
    #[inline]
    pub const fn from_words([first, sector]: [u64; 2]) -> RequestHeader {
        RequestHeader { kind: first as u32, priority: (first >> 32) as u32, sector }
    }
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum RequestKind {
    /// Read.
    In = 0,
    /// Write.
    Out = 1,
    /// Make completed writes durable.
    Flush = 4,
    /// Read the device identifier.
    GetId = 8,
    /// Deallocate ranges.
    Discard = 11,
    /// Write zeroes to ranges.
    WriteZeroes = 13,
}

impl RequestKind {
    /// The kind with this number; `None` if it is unknown.
    #[inline]
    pub const fn from_wire(value: u32) -> Option<RequestKind> {
        Some(match value {
            0 => RequestKind::In,
            1 => RequestKind::Out,
            4 => RequestKind::Flush,
            8 => RequestKind::GetId,
            11 => RequestKind::Discard,
            13 => RequestKind::WriteZeroes,
            _ => return None,
        })
    }

    /// The number of the kind.
    pub const fn to_wire(self) -> u32 {
        self as u32
    }
}

codec::fields! {
    /// A range of a discard or of a write of zeroes.
    RangeSegment, 16 {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        sectors: u32,
        /// [`UNMAP`](Self::UNMAP), or 0.
        flags: u32,
    }
}

impl RangeSegment {
    /// Flag of a write of zeroes: the range may be deallocated.
    pub const UNMAP: u32 = 1;
}

/// The last byte of a request, which the device writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum BlkStatus {
    /// Success.
    Ok = 0,
    /// An error of device or driver.
    IoError = 1,
    /// The device does not support the request.
    Unsupported = 2,
}

impl BlkStatus {
    /// Decodes a status.
    ///
    /// # Errors
    /// It is undefined.
    pub const fn decode(value: u8) -> Result<BlkStatus, DecodeError> {
        match value {
            0 => Ok(BlkStatus::Ok),
            1 => Ok(BlkStatus::IoError),
            2 => Ok(BlkStatus::Unsupported),
            other => Err(DecodeError::value("status of a block request", 0, other as u64)),
        }
    }

    /// The status on the wire.
    pub const fn to_wire(self) -> u8 {
        self as u8
    }
}

codec::fields! {
    /// The configuration of a block device. Which fields are valid depends on the features.
    BlkConfig, 60 {
        /// Number of sectors.
        capacity: u64,
        /// Largest length of a segment in bytes.
        size_max: u32,
        /// Largest number of data segments of a request.
        seg_max: u32,
        /// Disk geometry: cylinders.
        cylinders: u16,
        /// Disk geometry: heads.
        heads: u8,
        /// Disk geometry: sectors.
        sectors: u8,
        /// Block size in bytes.
        block_size: u32,
        /// Logical blocks of a physical block, as an exponent of 2.
        physical_block_exponent: u8,
        /// Offset of the first aligned logical block.
        alignment_offset: u8,
        /// Suggested minimum I/O size in blocks.
        min_io_blocks: u16,
        /// Optimal I/O size in blocks.
        optimal_io_blocks: u32,
        /// 1: write-back; 0: write-through. The driver may write it.
        writeback: u8,
        /// Unused.
        unused: u8,
        /// Number of queues.
        queues: u16,
        /// Largest number of sectors of a discarded range.
        discard_sectors_max: u32,
        /// Largest number of ranges of a discard.
        discard_segments_max: u32,
        /// Alignment of discarded ranges in sectors.
        discard_alignment: u32,
        /// Largest number of sectors of a range that zeroes are written to.
        write_zeroes_sectors_max: u32,
        /// Largest number of such ranges of a request.
        write_zeroes_segments_max: u32,
        /// 1: such a range may be deallocated if the driver asks for it.
        write_zeroes_may_unmap: u8,
        /// Unused.
        unused1: u8,
        /// Unused.
        unused2: u16,
    }
}

impl BlkConfig {
    /// Offset of [`writeback`](Self::writeback).
    pub const WRITEBACK: usize = 32;
}
