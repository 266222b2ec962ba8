//! Where a device sees the buffers of one core.

use std::sync::Arc;

use super::lent::RegionCache;
use super::{DeviceMappings, Dma, DmaError};
use crate::arena::{Arena, CHUNK_BYTES};
use crate::buffer::Buffer;

/// The device addresses of the memory that one core gives to a device.
///
/// [`translate`](Self::translate) is the fast path, for buffers in chunks that are known to the core already.
/// [`address`](Self::address) maps a chunk on first use, [`locate`](Self::locate) takes buffers of any
/// memory. It costs 16 bytes for each chunk of the arena, up to the highest that is used.
pub struct DeviceAddresses<D: Dma + ?Sized> {
    /// By index in the arena.
    chunks: Vec<MappedChunk>,
    mappings: Arc<DeviceMappings<D>>,
    arena: Arc<Arena>,
    page_bytes: u64,
    regions: RegionCache,
}

#[derive(Clone, Copy)]
struct MappedChunk {
    /// Host address of the first byte; 0 if the chunk is not mapped yet.
    start: usize,
    /// Device address of the first byte.
    device: u64,
}

const UNMAPPED: MappedChunk = MappedChunk { start: 0, device: 0 };

/// Where a device sees the first byte of a buffer in a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkAddress {
    /// Device address.
    pub address: u64,
    /// Offset in the chunk, in bytes.
    pub offset: usize,
    /// Index of the chunk in the arena.
    pub chunk: u32,
}

impl MappedChunk {
    /// Where the device sees the first byte of a buffer, if it lies in this chunk.
    #[inline(always)]
    fn find(&self, buffer: &Buffer, chunk: u32) -> Option<ChunkAddress> {
        let offset = buffer.as_ptr().addr().wrapping_sub(self.start);
        (offset < CHUNK_BYTES).then(|| ChunkAddress { address: self.device + offset as u64, offset, chunk })
    }
}

impl<D: Dma + ?Sized + 'static> DeviceAddresses<D> {
    /// The addresses of one core whose buffers come from `arena`, which stays until the device is dropped.
    /// Device addresses of chunks are multiples of `page_bytes`, a power of two.
    pub fn new(mappings: &Arc<DeviceMappings<D>>, arena: &Arc<Arena>, page_bytes: u64) -> DeviceAddresses<D> {
        mappings.retain_arena(arena);
        DeviceAddresses {
            chunks: Vec::new(),
            mappings: mappings.clone(),
            arena: arena.clone(),
            page_bytes,
            regions: RegionCache::default(),
        }
    }

    /// Where the device sees a buffer of a chunk that is mapped already; `None` for any other.
    #[inline(always)]
    pub fn translate(&self, buffer: &Buffer) -> Option<ChunkAddress> {
        // For memory of others this is not a chunk index. If there is such a chunk, the buffer lies in it or
        // is not found.
        let index = buffer.backing_index();
        self.chunks.get(index as usize)?.find(buffer, index)
    }

    /// Where the device sees a buffer of a chunk, of this core's pool or of another's. Maps the chunk on
    /// first use.
    ///
    /// # Errors
    /// [`DmaError::NotPoolMemory`] for lent memory and buffers of other arenas, and those of the mapping.
    pub fn address(&mut self, buffer: &Buffer) -> Result<ChunkAddress, DmaError> {
        match self.translate(buffer) {
            Some(found) => Ok(found),
            None => self.find_or_map(buffer)?.ok_or(DmaError::NotPoolMemory),
        }
    }

    /// Device address of a buffer's first byte, in any memory; `None` if the device cannot reach it, or not
    /// yet: lent memory is mapped by a thread from its first use on. Maps its chunk on first use.
    ///
    /// # Errors
    /// Those of the mapping of a chunk.
    pub fn locate(&mut self, buffer: &Buffer) -> Result<Option<u64>, DmaError> {
        if let Some(found) = self.translate(buffer) {
            return Ok(Some(found.address));
        }
        if let Some(found) = self.find_or_map(buffer)? {
            return Ok(Some(found.address));
        }
        Ok(self.regions.address(buffer, &self.mappings))
    }

    /// As [`address`](Self::address); `None` for memory that is not the arena's.
    #[cold]
    fn find_or_map(&mut self, buffer: &Buffer) -> Result<Option<ChunkAddress>, DmaError> {
        let Some(index) = buffer.chunk_index().filter(|_| Arc::ptr_eq(buffer.arena(), &self.arena)) else {
            return Ok(None);
        };
        let at = index as usize;
        // The chunk of another core's buffer, which `translate` does not find by its own index.
        if let Some(found) = self.chunks.get(at).and_then(|chunk| chunk.find(buffer, index)) {
            return Ok(Some(found));
        }
        let memory = self.arena.chunk(index);
        let device = self.mappings.map(&memory)?;
        if !device.is_multiple_of(self.page_bytes) {
            return Err(DmaError::Misaligned { address: device, page_bytes: self.page_bytes });
        }
        if self.chunks.len() <= at {
            self.chunks.resize(at + 1, UNMAPPED);
        }
        self.chunks[at] = MappedChunk { start: memory.start.addr(), device };
        Ok(self.chunks[at].find(buffer, index))
    }

    /// Bytes of memory, besides its own size.
    pub fn bytes(&self) -> usize {
        self.chunks.capacity() * size_of::<MappedChunk>() + self.regions.bytes()
    }
}
