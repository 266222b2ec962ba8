//! The modules.

mod base;
pub mod delay;
pub mod error;
pub mod malloc;
pub mod null;
pub mod uring;

pub(crate) use base::Dice;

use crate::{BdevError, Geometry, Request};

/// The geometry of a device that is made to measure.
pub(crate) fn geometry(num_blocks: u64, block_size: u32) -> Result<Geometry, BdevError> {
    if block_size < 512 || !block_size.is_multiple_of(512) {
        let reason = format!("{block_size} is not a multiple of 512");
        return Err(BdevError::invalid("block_size", reason));
    }
    if num_blocks == 0 || num_blocks.checked_mul(u64::from(block_size)).is_none() {
        let reason = format!("{num_blocks} blocks of {block_size} bytes cannot be");
        return Err(BdevError::invalid("num_blocks", reason));
    }
    Ok(Geometry { buffer_alignment: 1, ..Geometry::new(block_size, num_blocks) })
}

/// First byte and number of bytes of a request. A flush or reset has none, whatever its range says:
/// the layer does not check a range that means nothing.
#[inline]
pub(crate) fn bytes_of(request: &Request, block_size: u32) -> (u64, u64) {
    if !request.op.has_range() {
        return (0, 0);
    }
    (request.lba * u64::from(block_size), u64::from(request.blocks) * u64::from(block_size))
}
