//! What the images of a store on one device and those of a cluster have in common: sizes and limits of the block device, and
//! [`RangeRequest`], a request without data that is carried out object by object.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod range;

use bdev::{BdevGeometry, IoLimits};
use block_io::Op;
use wire_store::{BLOCK_BYTES, OBJECT_BYTES};

pub use range::{RangePart, RangeProgress, RangeRequest};
/// Most bytes of one request for data; the block layer divides larger ones.
pub use wire_replica::TRANSFER_BYTES_MAX;

/// Logical block of an image. Writes of whole 4 KiB blocks need no read.
pub const IMAGE_BLOCK_BYTES: u32 = 512;
/// Most bytes of an image: its objects have 32-bit indices.
pub const IMAGE_BYTES_MAX: u64 = (OBJECT_BYTES as u64) << 32;

const OBJECT_BLOCKS: u32 = OBJECT_BYTES as u32 / IMAGE_BLOCK_BYTES;

/// Whether an image can have this many bytes.
pub fn is_image_size(bytes: u64) -> bool {
    bytes > 0 && bytes <= IMAGE_BYTES_MAX && bytes.is_multiple_of(IMAGE_BLOCK_BYTES.into())
}

/// The geometry of an image of `bytes`, which promises no atomic writes.
pub fn geometry(bytes: u64) -> BdevGeometry {
    BdevGeometry {
        physical_block_size: BLOCK_BYTES as u32,
        optimal_io_boundary_blocks: OBJECT_BLOCKS,
        buffer_alignment: 1,
        ..BdevGeometry::new(IMAGE_BLOCK_BYTES, bytes / u64::from(IMAGE_BLOCK_BYTES))
    }
}

/// The operations of an image.
pub fn supports(op: Op) -> bool {
    matches!(op, Op::Read | Op::Write | Op::Flush | Op::Unmap | Op::WriteZeroes)
}

/// What the block layer divides: a request for data is one of one object.
pub fn io_limits() -> IoLimits {
    IoLimits { transfer_bytes_max: TRANSFER_BYTES_MAX, boundary_blocks: OBJECT_BLOCKS, ..IoLimits::NONE }
}
