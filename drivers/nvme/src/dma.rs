//! Translation of host buffers to device addresses, PRPs and SGLs.
//!
//! For each arena chunk a queue pair caches its device address and a PRP list of all its pages, written when the
//! chunk is first used. Every buffer lies within one chunk, so that its PRP list is a part of that list: no I/O of
//! one buffer writes a PRP list. Data of several slices has a list of its own, in the memory of its command's slot.

use std::sync::Arc;

use dma::{Buffer, CHUNK_BYTES, ChunkMemory, DeviceBuffer, Pool};
use wire_nvme::DataPointer;
use wire_nvme::sqe::Sgl;

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
    /// Alignment in bytes of SGL data blocks, 1 or 4, if the controller supports SGLs: then one descriptor is used
    /// instead of a PRP list.
    sgl_alignment: Option<u64>,
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
pub(crate) const LIST_BYTES: usize = CHUNK_BYTES / 4096 * 8;

/// Bytes of an SGL descriptor.
const SGL_BYTES: u64 = 16;
/// Most slices of a command's data that are transferred in place: SGL descriptors in one list.
pub const SLICES_MAX: u32 = (LIST_BYTES as u64 / SGL_BYTES) as u32;

/// The PRP list or SGL segment of a command whose data has several slices.
pub(crate) struct DescriptorList {
    memory: DeviceBuffer,
    address: u64,
}

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
            sgl_alignment: None,
            lists: Vec::new(),
        }
    }

    /// Uses SGLs as far as the SGLS field of Identify Controller allows (Base 2.0, figure 275).
    pub(crate) fn use_sgls(&mut self, sgls: u32) {
        self.sgl_alignment = match sgls & 3 {
            1 => Some(1),
            2 => Some(4),
            _ => None,
        };
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
        if self.sgl_alignment.is_some() {
            let data = Sgl::DataBlock { address, length }.into();
            return DataDescriptor { data, flags: FLAGS_SGL };
        }
        let index = ((address - chunk.device) >> self.page_log2) + 1;
        DataDescriptor { data: DataPointer::prp(address, chunk.list + 8 * index), flags: 0 }
    }

    /// Describes data of several slices: a PRP list where each slice but the first begins, and each but the last ends,
    /// at a page boundary, otherwise an SGL. The descriptors are written to `list`, which must not change before the
    /// command has completed; it is allocated on first use. `None` if neither is possible.
    #[cold]
    pub(crate) fn describe_slices(
        &mut self,
        slices: &[Buffer],
        list: &mut Option<DescriptorList>,
    ) -> Result<Option<DataDescriptor>, DeviceError> {
        if slices.iter().any(Buffer::is_external) {
            return Ok(None);
        }
        // Maps their chunks.
        for slice in slices {
            self.address(slice)?;
        }
        let last = slices.len() - 1;
        let pages = self.ranges(slices).enumerate().try_fold(0, |pages, (index, (address, length))| {
            let starts = if index == 0 { address & 3 == 0 } else { address & self.page_mask == 0 };
            let ends = index == last || (address + length) & self.page_mask == 0;
            let first = address >> self.page_log2;
            (starts && ends).then_some(pages + ((address + length - 1) >> self.page_log2) - first + 1)
        });
        let descriptors = slices.len() as u64;
        let prps = pages.filter(|pages| (*pages - 1) * 8 <= LIST_BYTES as u64);
        let sgl = self.sgl_alignment.filter(|alignment| {
            descriptors * SGL_BYTES <= LIST_BYTES as u64
                && self.ranges(slices).all(|(address, length)| (address | length) & (alignment - 1) == 0)
        });
        if prps.is_none() && sgl.is_none() {
            return Ok(None);
        }
        let list = match list {
            Some(list) => list,
            None => list.insert(self.allocate_list()?),
        };
        if prps.is_some() {
            return Ok(Some(list.write_prps(self.ranges(slices), self.page_log2)));
        }
        for (index, (address, length)) in (0..).zip(self.ranges(slices)) {
            let block: DataPointer = Sgl::DataBlock { address, length: length as u32 }.into();
            list.memory.store_u64(index * SGL_BYTES, block.low);
            list.memory.store_u64(index * SGL_BYTES + 8, block.high);
        }
        let length = (descriptors * SGL_BYTES) as u32;
        let segment = Sgl::Segment { offset: false, last: true, address: list.address, length };
        Ok(Some(DataDescriptor { data: segment.into(), flags: FLAGS_SGL }))
    }

    /// Device addresses and lengths of slices in mapped chunks.
    fn ranges<'a>(&'a self, slices: &'a [Buffer]) -> impl Iterator<Item = (u64, u64)> + 'a {
        let translated = slices.iter().map(|slice| (self.translate(slice), slice.len() as u64));
        translated.filter_map(|(mapped, length)| mapped.map(|(address, _)| (address, length)))
    }

    fn allocate_list(&mut self) -> Result<DescriptorList, DeviceError> {
        let memory =
            self.pool.take(LIST_BYTES).ok_or_else(|| DeviceError::Memory("no buffer is left".into()))?;
        let address = self.address(&memory)?;
        Ok(DescriptorList { memory: DeviceBuffer::new(memory), address })
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

impl DescriptorList {
    /// Writes the PRP entries of ranges that meet at page boundaries, and describes them.
    fn write_prps(&self, ranges: impl Iterator<Item = (u64, u64)>, page_log2: u32) -> DataDescriptor {
        let (mut count, mut first, mut second) = (0u64, 0, 0);
        for (address, length) in ranges {
            let pages = ((address + length - 1) >> page_log2) - (address >> page_log2) + 1;
            for page in 0..pages {
                // Only the very first entry may have an offset.
                let entry = if page == 0 { address } else { ((address >> page_log2) + page) << page_log2 };
                match count {
                    0 => first = entry,
                    1 => second = entry,
                    _ => {}
                }
                if count > 0 {
                    self.memory.store_u64((count - 1) * 8, entry);
                }
                count += 1;
            }
        }
        let second = if count > 2 { self.address } else { second };
        DataDescriptor { data: DataPointer::prp(first, second), flags: 0 }
    }
}

fn not_arena_memory() -> DeviceError {
    DeviceError::Memory("the buffer is external memory, which is not mapped for the device".into())
}
