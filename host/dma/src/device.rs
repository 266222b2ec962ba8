//! Memory of devices: the mappings of one device, and where it sees a buffer.
//!
//! A driver implements [`Dma`] for its transport. [`DeviceMappings`] owns the device and what is mapped for
//! it: every chunk of an arena once, when a buffer of it is first used, and memory that a peer lends, region
//! by region. Each core that gives the device buffers has a [`DeviceAddresses`], where the address of a
//! buffer is one lookup by chunk, without a lock.
//!
//! ```text
//! buffer ──► DeviceAddresses ──► DeviceMappings ──► Dma::map
//!            (a core)            (a device)    └──► mapper thread ──► Dma::map_region
//! ```
//!
//! The device sees one contiguous range for each chunk and region. What a driver derives from the address of
//! a chunk (PRP lists, keys) it stores in a table of its own, by [`ChunkAddress::chunk`].

mod addresses;
mod lent;
mod mappings;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use addresses::{ChunkAddress, DeviceAddresses};
pub use lent::RegionState;
pub use mappings::{DeviceMappings, MappingConfig};

use crate::arena::ChunkMemory;
use crate::region::RegionMapping;

/// Why a device cannot access memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DmaError {
    /// The device was removed, or the process behind it has ended.
    #[error("the device is no longer present")]
    Gone,
    /// The transport or the kernel refuses the mapping; the text says why, and what to do.
    #[error("{0}")]
    Refused(String),
    /// The device address of a chunk is not a multiple of the device's page size.
    #[error("device address {address:#x} is not aligned to its page size of {page_bytes} bytes")]
    Misaligned {
        /// Device address of the chunk's first byte.
        address: u64,
        /// The device's page size in bytes.
        page_bytes: u64,
    },
    /// The buffer is not of the arena that the core's buffers come from.
    #[error("the buffer is not of the core's pool")]
    NotPoolMemory,
}

/// Maps memory for a device.
pub trait Dma: Send + Sync {
    /// Maps a chunk for the device and returns the device address of its first byte.
    ///
    /// [`DeviceMappings`] calls it once for each chunk. The chunk stays mapped until the device is dropped.
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DmaError>;

    /// Maps memory that a peer lends, and returns the device address of its first byte and what undoes it
    /// when it is dropped. It takes long, since all of the memory is pinned, and is called on a thread that
    /// may wait. Fails if less than `reserve_bytes` of the memory that the process may pin would be left.
    ///
    /// A device that is stopped and started has the mapping afterwards; meanwhile it accesses no lent memory.
    fn map_region(
        &self,
        _region: &Arc<RegionMapping>,
        _reserve_bytes: u64,
    ) -> Result<(u64, Box<dyn Send>), DmaError> {
        Err(DmaError::Refused("the transport cannot map memory of others".into()))
    }
}
