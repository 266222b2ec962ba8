//! DMA access to the client's memory.

/// Flags of [`DmaMap`].
pub mod dma_flags {
    /// The device may read the range.
    pub const READ: u32 = 1 << 0;
    /// The device may write the range.
    pub const WRITE: u32 = 1 << 1;
    /// Access it by mapping the file descriptor; the default with a descriptor.
    pub const MMAP: u32 = 1 << 2;
    /// Access it by reading and writing the file descriptor.
    pub const FILE_IO: u32 = 1 << 3;
}

/// Flags of [`DmaUnmap`].
pub mod unmap_flags {
    /// Return the bitmap of dirty pages in the reply.
    pub const GET_DIRTY_BITMAP: u32 = 1 << 0;
    /// Unmap all ranges; address and size are 0.
    pub const ALL: u32 = 1 << 1;
}

codec::fields! {
    /// Payload of `DMA_MAP`, with at most one file descriptor. Without one the server must access the memory
    /// by message.
    DmaMap, 32 {
        /// Bytes of this structure.
        argsz: u32,
        /// See [`dma_flags`].
        flags: u32,
        /// Offset in the file.
        offset: u64,
        /// DMA address of the range.
        address: u64,
        /// Bytes.
        size: u64,
    }
}

codec::fields! {
    /// Payload of `DMA_UNMAP` and of its reply.
    DmaUnmap, 24 {
        /// Size of the client's buffer for the reply in bytes.
        argsz: u32,
        /// See [`unmap_flags`].
        flags: u32,
        /// DMA address of the mapped range.
        address: u64,
        /// Bytes of the mapped range.
        size: u64,
    }
}

codec::fields! {
    /// Payload of `DMA_READ` and `DMA_WRITE`, before the data.
    DmaAccess, 16 {
        /// DMA address.
        address: u64,
        /// Bytes.
        count: u64,
    }
}

impl DmaMap {
    /// Maps a range that the device may read and, if `writable`, write.
    pub fn new(address: u64, size: u64, offset: u64, writable: bool) -> DmaMap {
        let write = if writable { dma_flags::WRITE } else { 0 };
        DmaMap { argsz: DmaMap::SIZE as u32, flags: dma_flags::READ | write, offset, address, size }
    }
}

impl DmaUnmap {
    /// Unmaps the range that was mapped with this address and size.
    pub fn new(address: u64, size: u64) -> DmaUnmap {
        DmaUnmap { argsz: DmaUnmap::SIZE as u32, flags: 0, address, size }
    }
}
