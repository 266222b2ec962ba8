//! Memory of the front-end.

use crate::{DecodeError, TABLE_REGIONS_MAX};

codec::fields! {
    /// A region of guest memory. Its bytes are those of a file from `mmap_offset` on.
    MemoryRegion, 32 {
        /// Guest-physical address.
        guest_address: u64,
        /// Bytes.
        size: u64,
        /// Address in the front-end's process, by which virtqueues are described.
        user_address: u64,
        /// Offset of the region in the file.
        mmap_offset: u64,
    }
}

codec::fields! {
    /// The payload of `ADD_MEM_REG` and `REM_MEM_REG`.
    SingleRegion, 40 {
        /// Unused.
        padding: u64,
        /// As in [`MemoryRegion`].
        guest_address: u64,
        /// As in [`MemoryRegion`].
        size: u64,
        /// As in [`MemoryRegion`].
        user_address: u64,
        /// As in [`MemoryRegion`].
        mmap_offset: u64,
    }
}

impl SingleRegion {
    /// The region.
    pub const fn region(&self) -> MemoryRegion {
        let SingleRegion { padding: _, guest_address, size, user_address, mmap_offset } = *self;
        MemoryRegion { guest_address, size, user_address, mmap_offset }
    }
}

impl From<MemoryRegion> for SingleRegion {
    fn from(region: MemoryRegion) -> SingleRegion {
        let MemoryRegion { guest_address, size, user_address, mmap_offset } = region;
        SingleRegion { padding: 0, guest_address, size, user_address, mmap_offset }
    }
}

/// The payload of `SET_MEM_TABLE`: up to [`TABLE_REGIONS_MAX`] regions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryTable(pub Vec<MemoryRegion>);

impl MemoryTable {
    const HEADER_BYTES: usize = 8;

    /// Decodes a table; bytes after it are ignored.
    ///
    /// # Errors
    /// There are too many regions, or fewer than it says.
    pub fn decode(from: &[u8]) -> Result<MemoryTable, DecodeError> {
        let need = MemoryTable::HEADER_BYTES;
        let Some((header, mut rest)) = from.split_first_chunk::<{ MemoryTable::HEADER_BYTES }>() else {
            return Err(DecodeError::Length { what: "memory table", got: from.len(), need });
        };
        let count = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        if count as usize > TABLE_REGIONS_MAX {
            return Err(DecodeError::value("number of memory regions", 0, count.into()));
        }
        let mut regions = Vec::with_capacity(count as usize);
        for _ in 0..count {
            regions.push(MemoryRegion::decode(rest)?);
            rest = &rest[MemoryRegion::SIZE..];
        }
        Ok(MemoryTable(regions))
    }

    /// Encodes the table.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = (self.0.len() as u64).to_le_bytes().to_vec();
        self.0.iter().for_each(|region| bytes.extend(region.to_bytes()));
        bytes
    }
}

codec::fields! {
    /// The payload of `SET_LOG_BASE`: where the log of dirty pages is in its file.
    LogBase, 16 {
        /// Bytes.
        size: u64,
        /// Offset in the file.
        mmap_offset: u64,
    }
}
