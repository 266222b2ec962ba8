//! The block device modules of this crate.

pub mod delay;
pub mod error;
pub mod malloc;
pub mod null;
pub mod passthru;
pub mod pmem;
pub(crate) mod protected;
pub mod split;
pub mod uring;
mod written_pages;
mod zeroing;

pub use protected::MetadataConfig;

use crate::{BdevError, BdevGeometry, Request};

/// Validates the size of a new device and returns its geometry. `block_size` is without metadata.
pub(crate) fn geometry(
    num_blocks: u64,
    block_size: u32,
    metadata: &MetadataConfig,
) -> Result<BdevGeometry, BdevError> {
    let metadata = metadata.format()?;
    if block_size < 512 || !block_size.is_multiple_of(512) {
        let reason = format!("{block_size} is not a multiple of 512");
        return Err(BdevError::invalid("block_size", reason));
    }
    let stored = block_size.saturating_add(metadata.bytes.into());
    if num_blocks == 0 || num_blocks.checked_mul(u64::from(stored)).is_none() {
        let reason = format!("{num_blocks} blocks of {block_size} bytes is not a valid capacity");
        return Err(BdevError::invalid("num_blocks", reason));
    }
    let whole = if metadata.extended { stored } else { block_size };
    Ok(BdevGeometry { buffer_alignment: 1, metadata, ..BdevGeometry::new(whole, num_blocks) })
}

/// Sets the size of a physical block, unless it is 0.
///
/// # Errors
/// [`BdevError::Invalid`]: it is no multiple of a block, with its metadata or without.
pub(crate) fn set_physical_block_size(geometry: &mut BdevGeometry, bytes: u32) -> Result<(), BdevError> {
    let (block, data) = (geometry.block_size, geometry.data_block_size());
    if !bytes.is_multiple_of(block) && !bytes.is_multiple_of(data) {
        let reason = format!("{bytes} is no multiple of blocks of {data} bytes");
        return Err(BdevError::invalid("physical_block_size", reason));
    }
    if bytes != 0 {
        geometry.physical_block_size = bytes;
    }
    Ok(())
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
