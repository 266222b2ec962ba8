//! Where the device sees our memory.
//!
//! A queue pair keeps, for each chunk of the arena, the device's address of the chunk and of one page that
//! lists the chunk's pages. Any buffer lies in one chunk, so that its PRP list is a part of that page
//! and was written when the chunk was first seen: an I/O of any size writes no list.

use std::sync::Arc;

use memory::{Buffer, CHUNK_BYTES, ChunkMemory, DeviceBuffer, Pool};
use wire_nvme::DataPointer;

use crate::device::DeviceError;
use crate::shared::Shared;

/// What a queue pair knows of the memory that its buffers come from.
pub(crate) struct Translator {
    chunks: Vec<Chunk>,
    shared: Arc<Shared>,
    pool: Pool,
    page_log2: u32,
    /// Bytes of the device's pages, and that less one: of each there is one look at memory, and no sum.
    page_bytes: u64,
    page_mask: u64,
    /// Whether one SGL descriptor is used where a PRP list would be.
    sgl: bool,
    /// Kept for as long as the device may read them.
    lists: Vec<DeviceBuffer>,
}

#[derive(Clone, Copy)]
struct Chunk {
    /// Address of the first byte for us; 0 for a chunk that was not seen.
    start: usize,
    /// And for the device.
    device: u64,
    /// Where the device finds the list of the chunk's pages.
    list: u64,
}

const UNSEEN: Chunk = Chunk { start: 0, device: 0, list: 0 };
/// A list fits one page of 4 KiB, and so never crosses a page of the device's.
const LIST_BYTES: usize = CHUNK_BYTES / 4096 * 8;

/// How a command describes its data.
#[derive(Clone, Copy)]
pub(crate) struct Described {
    pub(crate) data: DataPointer,
    /// CDW0's flags: PSDT.
    pub(crate) flags: u8,
}

impl Described {
    pub(crate) const NOTHING: Described = Described { data: DataPointer::prp(0, 0), flags: 0 };
}

/// PSDT of an SGL.
const FLAGS_SGL: u8 = wire_nvme::Sqe::FLAGS_SGL;

impl Translator {
    pub(crate) fn new(shared: &Arc<Shared>, pool: &Pool, page_log2: u32) -> Translator {
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

    /// The device's address of a buffer; `None` for a buffer of a chunk that was not seen, or a lent one.
    #[inline(always)]
    fn find(&self, buffer: &Buffer) -> Option<(u64, &Chunk)> {
        // Of a lent buffer this is no chunk's index, and it lies in none of them.
        let chunk = self.chunks.get(buffer.home_index() as usize)?;
        let offset = buffer.as_ptr().addr().wrapping_sub(chunk.start);
        if offset >= CHUNK_BYTES {
            return None;
        }
        Some((chunk.device + offset as u64, chunk))
    }

    /// Describes the first `length` bytes of a buffer, which has at least so many, if they lie on one page of a
    /// chunk that was seen before.
    #[inline(always)]
    pub(crate) fn describe_page(&self, buffer: &Buffer, length: u32) -> Option<Described> {
        let (address, _) = self.find(buffer)?;
        self.is_one_page(address, length)
            .then_some(Described { data: DataPointer::prp(address, 0), flags: 0 })
    }

    /// The same on any number of pages; `None` where its chunk was not seen before, and for a lent one.
    #[inline(always)]
    pub(crate) fn describe_known(&self, buffer: &Buffer, length: u32) -> Option<Described> {
        let (address, chunk) = self.find(buffer)?;
        if self.is_one_page(address, length) {
            return Some(Described { data: DataPointer::prp(address, 0), flags: 0 });
        }
        Some(self.describe_pages(address, length, chunk))
    }

    #[inline(always)]
    fn is_one_page(&self, address: u64, length: u32) -> bool {
        (address & self.page_mask) + u64::from(length) <= self.page_bytes
    }

    /// The same for any buffer of our own.
    pub(crate) fn describe(&mut self, buffer: &Buffer, length: u32) -> Result<Described, DeviceError> {
        if self.find(buffer).is_none() {
            self.learn(buffer)?;
        }
        self.describe_known(buffer, length).ok_or_else(not_ours)
    }

    /// More than what is left of the first page.
    #[inline]
    fn describe_pages(&self, address: u64, length: u32, chunk: &Chunk) -> Described {
        let page = self.page_bytes;
        let first = page - (address & self.page_mask);
        if u64::from(length) <= first + page {
            return Described { data: DataPointer::prp(address, address + first), flags: 0 };
        }
        if self.sgl {
            let data = wire_nvme::sqe::Sgl::DataBlock { address, length }.into();
            return Described { data, flags: FLAGS_SGL };
        }
        let index = ((address - chunk.device) >> self.page_log2) + 1;
        Described { data: DataPointer::prp(address, chunk.list + 8 * index), flags: 0 }
    }

    /// The device's address of a buffer's first byte.
    pub(crate) fn address(&mut self, buffer: &Buffer) -> Result<u64, DeviceError> {
        if self.find(buffer).is_none() {
            self.learn(buffer)?;
        }
        self.find(buffer).map(|(address, _)| address).ok_or_else(not_ours)
    }

    /// Maps the chunk that a buffer lies in, and writes its list.
    #[cold]
    fn learn(&mut self, buffer: &Buffer) -> Result<(), DeviceError> {
        let chunk = buffer.chunk().ok_or_else(not_ours)?;
        let device = self.map(&chunk)?;
        let list =
            self.pool.take(LIST_BYTES).ok_or_else(|| DeviceError::Memory("no buffer is left".into()))?;
        let home = list.chunk().ok_or_else(not_ours)?;
        let list_address = self.map(&home)? + (list.as_ptr().addr() - home.start.addr()) as u64;
        let list = DeviceBuffer::new(list);
        for index in 0..(CHUNK_BYTES >> self.page_log2) as u64 {
            list.store_u64(8 * index, device + (index << self.page_log2));
        }
        self.lists.push(list);
        let index = chunk.index as usize;
        if self.chunks.len() <= index {
            self.chunks.resize(index + 1, UNSEEN);
        }
        self.chunks[index] = Chunk { start: chunk.start.addr(), device, list: list_address };
        Ok(())
    }

    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DeviceError> {
        let device = self.shared.map(chunk)?;
        if device.is_multiple_of(1 << self.page_log2) {
            return Ok(device);
        }
        let page = 1u64 << self.page_log2;
        Err(DeviceError::Memory(format!(
            "address {device:#x} does not begin one of its pages of {page} bytes"
        )))
    }

    /// Bytes of lists.
    pub(crate) fn list_bytes(&self) -> usize {
        self.lists.len() * LIST_BYTES + self.chunks.capacity() * size_of::<Chunk>()
    }
}

fn not_ours() -> DeviceError {
    DeviceError::Memory("the buffer is part of memory that was lent".into())
}
