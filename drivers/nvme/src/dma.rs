//! Translation of host buffers to device addresses, PRPs and SGLs.
//!
//! For each arena chunk a queue pair caches its device address and a PRP list of all its pages, written when the
//! chunk is first used. Every buffer lies within one chunk, so that its PRP list is a part of that list: no I/O of
//! any size writes a PRP list.

use std::sync::Arc;

use dma::{Buffer, CHUNK_BYTES, ChunkMemory, DeviceBuffer, Pool};
use wire_nvme::DataPointer;

use crate::device::DeviceError;
use crate::shared::SharedController;

/// Address translation cache of one queue pair, per arena chunk.
///
/// [`describe_single_page`](Self::describe_single_page) and [`describe_mapped`](Self::describe_mapped) are the fast
/// paths for chunks that are mapped already; [`describe`](Self::describe) maps a chunk on first use.
pub(crate) struct Translator {
    chunks: Vec<MappedChunk>,
    shared: Arc<SharedController>,
    pool: Pool,
    page_log2: u32,
    /// Device page size in bytes and its mask, both stored so that the hot path computes neither.
    page_bytes: u64,
    page_mask: u64,
    /// Use one SGL data block descriptor instead of a PRP list.
    sgl: bool,
    /// PRP lists, kept for as long as the device may read them.
    lists: Vec<DeviceBuffer>,
}

#[derive(Clone, Copy)]
struct MappedChunk {
    /// Host address of the first byte; 0 if the chunk is not mapped yet.
    start: usize,
    /// Device address of the first byte.
    device: u64,
    /// Device address of the PRP list of the chunk's pages.
    list: u64,
}

const UNMAPPED: MappedChunk = MappedChunk { start: 0, device: 0, list: 0 };
/// A PRP list fits one page of 4 KiB, so that it never crosses a device page.
const LIST_BYTES: usize = CHUNK_BYTES / 4096 * 8;

/// Data pointer of a command and the PSDT flags that go with it.
#[derive(Clone, Copy)]
pub(crate) struct DataDescriptor {
    pub(crate) data: DataPointer,
    /// PSDT bits of CDW0.
    pub(crate) flags: u8,
}

impl DataDescriptor {
    pub(crate) const NONE: DataDescriptor = DataDescriptor { data: DataPointer::prp(0, 0), flags: 0 };
}

/// PSDT bits for an SGL data pointer.
const FLAGS_SGL: u8 = wire_nvme::Sqe::FLAGS_SGL;

impl Translator {
    pub(crate) fn new(shared: &Arc<SharedController>, pool: &Pool, page_log2: u32) -> Translator {
        Translator {
            chunks: Vec::new(),
            shared: shared.clone(),
            pool: pool.clone(),
            page_log2,
            page_bytes: 1 << page_log2,
            page_mask: (1 << page_log2) - 1,
            sgl: false,
            lists: Vec::new(),
        }
    }

    pub(crate) fn use_sgl(&mut self, sgl: bool) {
        self.sgl = sgl;
    }

    /// Device address of a buffer; `None` if its chunk is not mapped yet, or if the buffer is external memory.
    #[inline(always)]
    fn translate(&self, buffer: &Buffer) -> Option<(u64, &MappedChunk)> {
        // For external memory this is not a chunk index, and the offset check below fails.
        let chunk = self.chunks.get(buffer.backing_index() as usize)?;
        let offset = buffer.as_ptr().addr().wrapping_sub(chunk.start);
        if offset >= CHUNK_BYTES {
            return None;
        }
        Some((chunk.device + offset as u64, chunk))
    }

    /// Describes the first `length` bytes of a buffer, if they lie within one page of a mapped chunk. The buffer must
    /// have at least `length` bytes.
    #[inline(always)]
    pub(crate) fn describe_single_page(&self, buffer: &Buffer, length: u32) -> Option<DataDescriptor> {
        let (address, _) = self.translate(buffer)?;
        self.is_one_page(address, length)
            .then_some(DataDescriptor { data: DataPointer::prp(address, 0), flags: 0 })
    }

    /// Describes the first `length` bytes of a buffer over any number of pages; `None` if its chunk is not mapped yet,
    /// or if the buffer is external memory.
    #[inline(always)]
    pub(crate) fn describe_mapped(&self, buffer: &Buffer, length: u32) -> Option<DataDescriptor> {
        let (address, chunk) = self.translate(buffer)?;
        if self.is_one_page(address, length) {
            return Some(DataDescriptor { data: DataPointer::prp(address, 0), flags: 0 });
        }
        Some(self.describe_multi_page(address, length, chunk))
    }

    #[inline(always)]
    fn is_one_page(&self, address: u64, length: u32) -> bool {
        (address & self.page_mask) + u64::from(length) <= self.page_bytes
    }

    /// Describes the first `length` bytes of any arena buffer; maps its chunk on first use.
    pub(crate) fn describe(&mut self, buffer: &Buffer, length: u32) -> Result<DataDescriptor, DeviceError> {
        if self.translate(buffer).is_none() {
            self.map_chunk(buffer)?;
        }
        self.describe_mapped(buffer, length).ok_or_else(not_arena_memory)
    }

    /// Describes a range that crosses a page boundary: two PRPs, an SGL descriptor or a PRP list.
    #[inline]
    fn describe_multi_page(&self, address: u64, length: u32, chunk: &MappedChunk) -> DataDescriptor {
        let page = self.page_bytes;
        let first = page - (address & self.page_mask);
        if u64::from(length) <= first + page {
            return DataDescriptor { data: DataPointer::prp(address, address + first), flags: 0 };
        }
        if self.sgl {
            let data = wire_nvme::sqe::Sgl::DataBlock { address, length }.into();
            return DataDescriptor { data, flags: FLAGS_SGL };
        }
        let index = ((address - chunk.device) >> self.page_log2) + 1;
        DataDescriptor { data: DataPointer::prp(address, chunk.list + 8 * index), flags: 0 }
    }

    /// Device address of a buffer's first byte; maps its chunk on first use.
    pub(crate) fn address(&mut self, buffer: &Buffer) -> Result<u64, DeviceError> {
        if self.translate(buffer).is_none() {
            self.map_chunk(buffer)?;
        }
        self.translate(buffer).map(|(address, _)| address).ok_or_else(not_arena_memory)
    }

    /// Maps the chunk of a buffer and writes its PRP list.
    #[cold]
    fn map_chunk(&mut self, buffer: &Buffer) -> Result<(), DeviceError> {
        let chunk = buffer.chunk().ok_or_else(not_arena_memory)?;
        let device = self.map(&chunk)?;
        let list =
            self.pool.take(LIST_BYTES).ok_or_else(|| DeviceError::Memory("no buffer is left".into()))?;
        let home = list.chunk().ok_or_else(not_arena_memory)?;
        let list_address = self.map(&home)? + (list.as_ptr().addr() - home.start.addr()) as u64;
        let list = DeviceBuffer::new(list);
        for index in 0..(CHUNK_BYTES >> self.page_log2) as u64 {
            list.store_u64(8 * index, device + (index << self.page_log2));
        }
        self.lists.push(list);
        let index = chunk.index as usize;
        if self.chunks.len() <= index {
            self.chunks.resize(index + 1, UNMAPPED);
        }
        self.chunks[index] = MappedChunk { start: chunk.start.addr(), device, list: list_address };
        Ok(())
    }

    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DeviceError> {
        let device = self.shared.map(chunk)?;
        if device.is_multiple_of(1 << self.page_log2) {
            return Ok(device);
        }
        let page = 1u64 << self.page_log2;
        Err(DeviceError::Memory(format!(
            "device address {device:#x} is not aligned to its page size of {page} bytes"
        )))
    }

    /// Bytes used by PRP lists and the chunk table.
    pub(crate) fn list_bytes(&self) -> usize {
        self.lists.len() * LIST_BYTES + self.chunks.capacity() * size_of::<MappedChunk>()
    }
}

fn not_arena_memory() -> DeviceError {
    DeviceError::Memory("the buffer is external memory, which is not mapped for the device".into())
}
