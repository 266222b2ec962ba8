//! The client's memory.

/// Flags of [`DmaMap`].
pub mod dma_flags {
    /// The device may read it.
    pub const READ: u32 = 1 << 0;
    /// The device may write it.
    pub const WRITE: u32 = 1 << 1;
    /// It is to be reached by mapping the descriptor; the default with a descriptor.
    pub const MMAP: u32 = 1 << 2;
    /// It is to be reached by reading and writing the descriptor.
    pub const FILE_IO: u32 = 1 << 3;
}

/// Flags of [`DmaUnmap`].
pub mod unmap_flags {
    /// Answer with the pages that were written.
    pub const GET_DIRTY_BITMAP: u32 = 1 << 0;
    /// Everything; address and size are 0.
    pub const ALL: u32 = 1 << 1;
}

fields! {
    /// Payload of `DMA_MAP`. One descriptor may come with it, without which the server has to ask the
    /// client for every byte.
    DmaMap, 32 {
        /// Bytes of this structure.
        argsz: u32,
        /// See [`dma_flags`].
        flags: u32,
        /// First byte within the descriptor.
        offset: u64,
        /// Address that the device knows it by.
        address: u64,
        /// Bytes.
        size: u64,
    }
}

fields! {
    /// Payload of `DMA_UNMAP` and of its reply.
    DmaUnmap, 24 {
        /// Bytes that the client has room for in the reply.
        argsz: u32,
        /// See [`unmap_flags`].
        flags: u32,
        /// Address that the device knew it by, as it was mapped.
        address: u64,
        /// Bytes, as they were mapped.
        size: u64,
    }
}

fields! {
    /// Payload of `DMA_READ` and `DMA_WRITE`, before the data.
    DmaAccess, 16 {
        /// Address that the device knows the memory by.
        address: u64,
        /// Bytes.
        count: u64,
    }
}

impl DmaMap {
    /// A range that the device may read and, if `writable`, write.
    pub fn new(address: u64, size: u64, offset: u64, writable: bool) -> DmaMap {
        let write = if writable { dma_flags::WRITE } else { 0 };
        DmaMap { argsz: DmaMap::SIZE as u32, flags: dma_flags::READ | write, offset, address, size }
    }
}

impl DmaUnmap {
    /// The range that was mapped with this address and size.
    pub fn new(address: u64, size: u64) -> DmaUnmap {
        DmaUnmap { argsz: DmaUnmap::SIZE as u32, flags: 0, address, size }
    }
}
