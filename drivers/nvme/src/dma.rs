//! Translation of host buffers to device addresses, PRPs and SGLs.
//!
//! For each arena chunk a queue pair caches its device address and a PRP list of all its pages, written when the
//! chunk is first used. Every buffer of the core's pool lies within one chunk, so that its PRP list is a part of that
//! list: no I/O of one such buffer writes a PRP list. Other data has a list of its own, in the memory of its command's
//! slot: that of several slices, of other cores' pools, and [lent memory](crate::lent_memory).

use std::sync::Arc;

use dma::{Buffer, CHUNK_BYTES, ChunkMemory, DeviceBuffer, Pool};
use wire_nvme::DataPointer;
use wire_nvme::sqe::Sgl;

use crate::device::DeviceError;
use crate::lent_memory::RegionCache;
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
    regions: RegionCache,
    /// Device addresses and lengths of the slices that are being described.
    ranges: Vec<(u64, u64)>,
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

/// The PRP list or SGL segment of a command whose data is not one buffer of the core's pool.
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
            regions: RegionCache::default(),
            ranges: Vec::new(),
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

    /// Device address of a buffer; `None` if its chunk is not mapped yet, or if the buffer is not of this core's pool.
    #[inline(always)]
    fn translate(&self, buffer: &Buffer) -> Option<(u64, &MappedChunk)> {
        // For memory of others this is not a chunk index, and the offset check below fails.
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

    /// Describes the first `length` bytes of a buffer of this core's pool; maps its chunk on first use.
    pub(crate) fn describe(&mut self, buffer: &Buffer, length: u32) -> Result<DataDescriptor, DeviceError> {
        if self.translate(buffer).is_none() {
            self.map_chunk(buffer)?;
        }
        self.describe_mapped(buffer, length).ok_or_else(not_pool_memory)
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

    /// Describes data of one slice or several, in whatever memory: two PRPs or a PRP list where each slice but the first
    /// begins, and each but the last ends, at a page boundary, otherwise an SGL. Lists are written to `list`, which must
    /// not change before the command has completed; it is allocated on first use. `None` if the data has to be copied:
    /// neither is possible, or the device cannot reach the memory.
    #[cold]
    pub(crate) fn describe_slices(
        &mut self,
        slices: &[Buffer],
        list: &mut Option<DescriptorList>,
    ) -> Result<Option<DataDescriptor>, DeviceError> {
        let mut ranges = std::mem::take(&mut self.ranges);
        ranges.clear();
        let described = match self.locate_all(slices, &mut ranges) {
            Ok(true) => self.describe_ranges(&ranges, list),
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        };
        self.ranges = ranges;
        described
    }

    /// Whether the device reaches all of the slices.
    pub(crate) fn can_access(&mut self, slices: &[Buffer]) -> bool {
        slices.iter().all(|slice| matches!(self.locate(slice), Ok(Some(_))))
    }

    fn describe_ranges(
        &mut self,
        ranges: &[(u64, u64)],
        list: &mut Option<DescriptorList>,
    ) -> Result<Option<DataDescriptor>, DeviceError> {
        let last = ranges.len() - 1;
        let pages = ranges.iter().enumerate().try_fold(0, |pages, (index, &(address, length))| {
            let starts = if index == 0 { address & 3 == 0 } else { address & self.page_mask == 0 };
            let ends = index == last || (address + length) & self.page_mask == 0;
            let first = address >> self.page_log2;
            (starts && ends).then_some(pages + ((address + length - 1) >> self.page_log2) - first + 1)
        });
        let descriptors = ranges.len() as u64;
        let prps = pages.filter(|pages| (*pages - 1) * 8 <= LIST_BYTES as u64);
        let sgl = self.sgl_alignment.filter(|alignment| {
            descriptors * SGL_BYTES <= LIST_BYTES as u64
                && ranges.iter().all(|(address, length)| (address | length) & (alignment - 1) == 0)
        });
        if let (&[(address, length)], Some(_), None | Some(3..)) = (ranges, sgl, prps) {
            let data = Sgl::DataBlock { address, length: length as u32 }.into();
            return Ok(Some(DataDescriptor { data, flags: FLAGS_SGL }));
        }
        if prps.is_some_and(|pages| pages <= 2) {
            return Ok(Some(two_prps(ranges, self.page_log2)));
        }
        if prps.is_none() && sgl.is_none() {
            return Ok(None);
        }
        let list = match list {
            Some(list) => list,
            None => list.insert(self.allocate_list()?),
        };
        if prps.is_some() {
            return Ok(Some(list.write_prps(ranges, self.page_log2)));
        }
        for (index, &(address, length)) in (0..).zip(ranges) {
            let block: DataPointer = Sgl::DataBlock { address, length: length as u32 }.into();
            list.memory.store_u64(index * SGL_BYTES, block.low);
            list.memory.store_u64(index * SGL_BYTES + 8, block.high);
        }
        let length = (descriptors * SGL_BYTES) as u32;
        let segment = Sgl::Segment { offset: false, last: true, address: list.address, length };
        Ok(Some(DataDescriptor { data: segment.into(), flags: FLAGS_SGL }))
    }

    /// Appends the device addresses and lengths of slices. Returns `false` if the device cannot reach one of them.
    fn locate_all(&mut self, slices: &[Buffer], ranges: &mut Vec<(u64, u64)>) -> Result<bool, DeviceError> {
        for slice in slices {
            let Some(address) = self.locate(slice)? else { return Ok(false) };
            ranges.push((address, slice.len() as u64));
        }
        Ok(true)
    }

    /// Device address of a buffer's first byte, in whatever memory; `None` if the device cannot reach it. Maps its chunk
    /// on first use; lent memory is mapped in the background.
    fn locate(&mut self, buffer: &Buffer) -> Result<Option<u64>, DeviceError> {
        if let Some((address, _)) = self.translate(buffer) {
            return Ok(Some(address));
        }
        let Some(index) = buffer.chunk_index() else {
            return Ok(self.regions.address(buffer, &self.shared));
        };
        // A chunk of the arena, of this core's pool or of another's.
        let index = index as usize;
        if self.chunks.get(index).is_none_or(|chunk| chunk.start == 0) {
            self.map_chunk(buffer)?;
        }
        let chunk = self.chunks[index];
        Ok(Some(chunk.device + (buffer.as_ptr().addr() - chunk.start) as u64))
    }

    fn allocate_list(&mut self) -> Result<DescriptorList, DeviceError> {
        let memory =
            self.pool.take(LIST_BYTES).ok_or_else(|| DeviceError::Memory("no buffer is left".into()))?;
        let address = self.address(&memory)?;
        Ok(DescriptorList { memory: DeviceBuffer::new(memory), address })
    }

    /// Device address of the first byte of a buffer of this core's pool; maps its chunk on first use.
    pub(crate) fn address(&mut self, buffer: &Buffer) -> Result<u64, DeviceError> {
        if self.translate(buffer).is_none() {
            self.map_chunk(buffer)?;
        }
        self.translate(buffer).map(|(address, _)| address).ok_or_else(not_pool_memory)
    }

    /// Maps the chunk of a buffer and writes its PRP list.
    #[cold]
    fn map_chunk(&mut self, buffer: &Buffer) -> Result<(), DeviceError> {
        let chunk = buffer.chunk().ok_or_else(not_pool_memory)?;
        let device = self.map(&chunk)?;
        let list =
            self.pool.take(LIST_BYTES).ok_or_else(|| DeviceError::Memory("no buffer is left".into()))?;
        let home = list.chunk().ok_or_else(not_pool_memory)?;
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
        self.lists.len() * LIST_BYTES
            + self.chunks.capacity() * size_of::<MappedChunk>()
            + self.regions.bytes()
    }
}

impl DescriptorList {
    /// Writes the PRP entries of ranges that meet at page boundaries, more than two, and describes them.
    fn write_prps(&self, ranges: &[(u64, u64)], page_log2: u32) -> DataDescriptor {
        let mut entries = prp_entries(ranges, page_log2);
        let first = entries.next().unwrap_or_default();
        for (index, entry) in (0..).zip(entries) {
            self.memory.store_u64(index * 8, entry);
        }
        DataDescriptor { data: DataPointer::prp(first, self.address), flags: 0 }
    }
}

/// Describes ranges that meet at a page boundary and lie in at most two pages.
fn two_prps(ranges: &[(u64, u64)], page_log2: u32) -> DataDescriptor {
    let mut entries = prp_entries(ranges, page_log2);
    let (first, second) = (entries.next().unwrap_or_default(), entries.next().unwrap_or_default());
    DataDescriptor { data: DataPointer::prp(first, second), flags: 0 }
}

/// The PRP entries of ranges that meet at page boundaries.
fn prp_entries(ranges: &[(u64, u64)], page_log2: u32) -> impl Iterator<Item = u64> {
    ranges.iter().flat_map(move |&(address, length)| {
        let (first, last) = (address >> page_log2, (address + length - 1) >> page_log2);
        // Only the very first entry may have an offset.
        std::iter::once(address).chain((first + 1..=last).map(move |page| page << page_log2))
    })
}

fn not_pool_memory() -> DeviceError {
    DeviceError::Memory("the buffer is not of the core's pool".into())
}
