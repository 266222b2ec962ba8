//! Reads and writes of regions.

use crate::DecodeError;

/// Size of the data field of each write of a `REGION_WRITE_MULTI`.
pub const MULTI_WRITE_DATA_BYTES: usize = 8;

codec::fields! {
    /// Payload of `REGION_READ` and `REGION_WRITE` and of their replies, before the data.
    RegionAccess, 16 {
        /// Offset in the region.
        offset: u64,
        /// Index of the region.
        region: u32,
        /// Bytes.
        count: u32,
    }
}

/// One write of a `REGION_WRITE_MULTI`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MultiWrite {
    /// Region, offset and length; the length is 8 bytes at most.
    pub access: RegionAccess,
    /// The data; only the first `access.count` bytes are used.
    pub data: [u8; MULTI_WRITE_DATA_BYTES],
}

impl MultiWrite {
    /// Bytes on the wire.
    pub const SIZE: usize = RegionAccess::SIZE + MULTI_WRITE_DATA_BYTES;

    /// The data to write.
    pub fn bytes(&self) -> &[u8] {
        &self.data[..self.access.count as usize]
    }

    /// Encodes the write; [`MultiWrites::decode`] is the inverse.
    pub fn to_bytes(&self) -> [u8; MultiWrite::SIZE] {
        let mut bytes = [0; MultiWrite::SIZE];
        bytes[..RegionAccess::SIZE].copy_from_slice(&self.access.to_bytes());
        bytes[RegionAccess::SIZE..].copy_from_slice(&self.data);
        bytes
    }
}

/// Payload of `REGION_WRITE_MULTI`: the 64-bit number of writes, then the writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MultiWrites(pub Vec<MultiWrite>);

impl MultiWrites {
    /// Decodes all writes.
    ///
    /// # Errors
    /// Fewer bytes than the writes need, or a write of more than 8 bytes.
    pub fn decode(from: &[u8]) -> Result<MultiWrites, DecodeError> {
        let short = |got, need| DecodeError::Length { what: "MultiWrites", got, need };
        let Some((count, rest)) = from.split_first_chunk() else { return Err(short(from.len(), 8)) };
        let count = usize::try_from(u64::from_le_bytes(*count)).unwrap_or(usize::MAX);
        let need = count.saturating_mul(MultiWrite::SIZE);
        let Some(writes) = rest.get(..need) else { return Err(short(rest.len(), need)) };
        let one = |from: &[u8]| {
            let access = RegionAccess::decode(from)?;
            if access.count as usize > MULTI_WRITE_DATA_BYTES {
                return Err(DecodeError::value("bytes of one write", 12, access.count.into()));
            }
            let mut data = [0; MULTI_WRITE_DATA_BYTES];
            data.copy_from_slice(&from[RegionAccess::SIZE..]);
            Ok(MultiWrite { access, data })
        };
        writes.chunks_exact(MultiWrite::SIZE).map(one).collect::<Result<_, _>>().map(MultiWrites)
    }

    /// Encodes the payload; the inverse of [`decode`](Self::decode).
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = (self.0.len() as u64).to_le_bytes().to_vec();
        bytes.extend(self.0.iter().flat_map(MultiWrite::to_bytes));
        bytes
    }
}
