//! The block device modules of this crate.

mod base;
pub mod delay;
pub mod error;
pub mod malloc;
pub mod null;
pub mod passthru;
pub mod split;
pub mod uring;
mod virtual_bdev;

use crate::{BdevError, BdevGeometry, Request};

/// Validates the size of a new device and returns its geometry.
pub(crate) fn geometry(num_blocks: u64, block_size: u32) -> Result<BdevGeometry, BdevError> {
    if block_size < 512 || !block_size.is_multiple_of(512) {
        let reason = format!("{block_size} is not a multiple of 512");
        return Err(BdevError::invalid("block_size", reason));
    }
    if num_blocks == 0 || num_blocks.checked_mul(u64::from(block_size)).is_none() {
        let reason = format!("{num_blocks} blocks of {block_size} bytes is not a valid capacity");
        return Err(BdevError::invalid("num_blocks", reason));
    }
    Ok(BdevGeometry { buffer_alignment: 1, ..BdevGeometry::new(block_size, num_blocks) })
}

/// Byte offset and length of a request; 0 and 0 for operations without a range, whose range fields are not
/// validated.
#[inline]
pub(crate) fn bytes_of(request: &Request, block_size: u32) -> (u64, u64) {
    if !request.op.has_range() {
        return (0, 0);
    }
    (request.lba * u64::from(block_size), u64::from(request.blocks) * u64::from(block_size))
}
