//! PRPs and SGLs of buffers.
//!
//! Where the device sees a buffer is [`DeviceAddresses`]' matter. For each arena chunk a queue pair has a PRP
//! list of all its pages, written when the chunk is first used. Every buffer of the core's pool lies within
//! one chunk, so that its PRP list is a part of that list: no I/O of one such buffer writes a PRP list. Other
//! data has a list of its own, in the memory of its command's slot: that of several slices, of other cores'
//! pools, and lent memory.

use std::sync::Arc;

use dma::{Buffer, CHUNK_BYTES, ChunkAddress, DeviceAddresses, DeviceBuffer, Pool};
use wire_nvme::DataPointer;
use wire_nvme::sqe::Sgl;

use crate::device::{DeviceError, NvmeDevice};
use crate::shared::SharedController;

/// Describes the data of one queue pair's commands.
///
/// [`describe_single_page`](Self::describe_single_page) and [`describe_mapped`](Self::describe_mapped) are
/// the fast paths for chunks that are mapped already; [`describe`](Self::describe) maps a chunk on first use.
pub(crate) struct DescriptorBuilder {
    addresses: DeviceAddresses<dyn NvmeDevice>,
    pool: Pool,
    page_log2: u32,
    /// Device page size in bytes and its mask, both stored so that the hot path computes neither.
    page_bytes: u64,
    page_mask: u64,
    /// Alignment in bytes of SGL data blocks, 1 or 4, if the controller supports SGLs: then one descriptor is
    /// used instead of a PRP list.
    sgl_alignment: Option<u64>,
    /// The PRP list of each chunk's pages, by index of the chunk; kept for as long as the device may read
    /// them. A chunk of which only lists and several slices were used has none.
    lists: Vec<Option<DescriptorList>>,
    /// Device addresses and lengths of the slices that are being described.
    ranges: Vec<(u64, u64)>,
}

/// A PRP list fits one page of 4 KiB, so that it never crosses a device page.
pub(crate) const LIST_BYTES: usize = CHUNK_BYTES / 4096 * 8;

/// Bytes of an SGL descriptor.
const SGL_BYTES: u64 = 16;
/// Most slices of a command's data that are transferred in place: SGL descriptors in one list.
pub const SLICES_MAX: u32 = (LIST_BYTES as u64 / SGL_BYTES) as u32;

/// A PRP list or SGL segment: of a chunk, or of a command whose data is not one buffer of the core's pool.
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

impl DescriptorBuilder {
    pub(crate) fn new(shared: &SharedController, pool: &Pool, page_log2: u32) -> DescriptorBuilder {
        let page_bytes = 1 << page_log2;
        DescriptorBuilder {
            addresses: DeviceAddresses::new(shared.mappings(), pool.arena(), page_bytes),
            pool: pool.clone(),
            page_log2,
            page_bytes,
            page_mask: page_bytes - 1,
            sgl_alignment: None,
            lists: Vec::new(),
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

    /// Describes the first `length` bytes of a buffer, if they lie within one page of a mapped chunk. The
    /// buffer must have at least `length` bytes.
    #[inline(always)]
    pub(crate) fn describe_single_page(&self, buffer: &Buffer, length: u32) -> Option<DataDescriptor> {
        let ChunkAddress { address, .. } = self.addresses.translate(buffer)?;
        self.is_one_page(address, length)
            .then_some(DataDescriptor { data: DataPointer::prp(address, 0), flags: 0 })
    }

    /// Describes the first `length` bytes of a buffer over any number of pages; `None` if its chunk is not
    /// mapped yet or has no PRP list yet, or if the buffer is external memory.
    #[inline(always)]
    pub(crate) fn describe_mapped(&self, buffer: &Buffer, length: u32) -> Option<DataDescriptor> {
        self.describe_part(self.addresses.translate(buffer)?, length)
    }

    #[inline(always)]
    fn describe_part(&self, found: ChunkAddress, length: u32) -> Option<DataDescriptor> {
        let address = found.address;
        if self.is_one_page(address, length) {
            return Some(DataDescriptor { data: DataPointer::prp(address, 0), flags: 0 });
        }
        self.describe_multi_page(found, length)
    }

    #[inline(always)]
    fn is_one_page(&self, address: u64, length: u32) -> bool {
        (address & self.page_mask) + u64::from(length) <= self.page_bytes
    }

    /// Whether a buffer lies in a chunk of the core's arena: [`describe`](Self::describe) takes no other.
    pub(crate) fn is_own(&self, buffer: &Buffer) -> bool {
        !buffer.is_external() && Arc::ptr_eq(buffer.arena(), self.pool.arena())
    }

    /// Describes the first `length` bytes of a buffer in a chunk; maps the chunk and writes its PRP list on
    /// first use.
    pub(crate) fn describe(&mut self, buffer: &Buffer, length: u32) -> Result<DataDescriptor, DeviceError> {
        let found = self.prepare(buffer)?;
        Ok(self.describe_part(found, length).expect("the chunk's PRP list is written"))
    }

    /// Describes a range that crosses a page boundary: two PRPs, an SGL descriptor or a PRP list. `None` if
    /// the list is not written yet.
    #[inline]
    fn describe_multi_page(&self, found: ChunkAddress, length: u32) -> Option<DataDescriptor> {
        let (address, page) = (found.address, self.page_bytes);
        let first = page - (address & self.page_mask);
        if u64::from(length) <= first + page {
            return Some(DataDescriptor { data: DataPointer::prp(address, address + first), flags: 0 });
        }
        if self.sgl_alignment.is_some() {
            let data = Sgl::DataBlock { address, length }.into();
            return Some(DataDescriptor { data, flags: FLAGS_SGL });
        }
        let list = self.lists.get(found.chunk as usize)?.as_ref()?.address;
        let index = (found.offset >> self.page_log2) as u64 + 1;
        Some(DataDescriptor { data: DataPointer::prp(address, list + 8 * index), flags: 0 })
    }

    /// Describes data of one slice or several, in whatever memory: two PRPs or a PRP list where each slice
    /// but the first begins, and each but the last ends, at a page boundary, otherwise an SGL. Lists are
    /// written to `list`, which must not change before the command has completed; it is allocated on first
    /// use. `None` if the data has to be copied: neither is possible, or the device cannot reach the memory.
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
        slices.iter().all(|slice| matches!(self.addresses.locate(slice), Ok(Some(_))))
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

    /// Appends the device addresses and lengths of slices. Returns `false` if the device cannot reach one of
    /// them.
    fn locate_all(&mut self, slices: &[Buffer], ranges: &mut Vec<(u64, u64)>) -> Result<bool, DeviceError> {
        for slice in slices {
            let Some(address) = self.addresses.locate(slice)? else { return Ok(false) };
            ranges.push((address, slice.len() as u64));
        }
        Ok(true)
    }

    /// Takes memory for a list, which is zero.
    fn allocate_list(&mut self) -> Result<DescriptorList, DeviceError> {
        let memory =
            self.pool.take(LIST_BYTES).ok_or_else(|| DeviceError::Memory("no buffer is left".into()))?;
        let address = self.addresses.address(&memory)?.address;
        Ok(DescriptorList { memory: DeviceBuffer::new(memory), address })
    }

    /// Device address of the first byte of a buffer in a chunk; maps the chunk and writes its PRP list on
    /// first use.
    pub(crate) fn address(&mut self, buffer: &Buffer) -> Result<u64, DeviceError> {
        Ok(self.prepare(buffer)?.address)
    }

    /// Finds a buffer, whose chunk is mapped and has a PRP list from now on.
    fn prepare(&mut self, buffer: &Buffer) -> Result<ChunkAddress, DeviceError> {
        let found = self.addresses.address(buffer)?;
        if self.lists.get(found.chunk as usize).is_none_or(Option::is_none) {
            self.write_chunk_list(found)?;
        }
        Ok(found)
    }

    /// Writes the PRP list of the chunk in which `found` lies.
    #[cold]
    fn write_chunk_list(&mut self, found: ChunkAddress) -> Result<(), DeviceError> {
        let list = self.allocate_list()?;
        let device = found.address - found.offset as u64;
        for index in 0..(CHUNK_BYTES >> self.page_log2) as u64 {
            list.memory.store_u64(8 * index, device + (index << self.page_log2));
        }
        let chunk = found.chunk as usize;
        if self.lists.len() <= chunk {
            self.lists.resize_with(chunk + 1, || None);
        }
        self.lists[chunk] = Some(list);
        Ok(())
    }

    /// Bytes used by PRP lists and the tables of chunks and regions.
    pub(crate) fn list_bytes(&self) -> usize {
        self.lists.iter().flatten().count() * LIST_BYTES
            + self.lists.capacity() * size_of::<Option<DescriptorList>>()
            + self.addresses.bytes()
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
