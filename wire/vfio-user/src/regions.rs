//! The regions of a device.

use crate::DecodeError;

/// Indexes of the regions of a PCI device.
pub mod region {
    /// BAR0, the first base address register.
    pub const BAR0: u32 = 0;
    /// BAR5, the last base address register.
    pub const BAR5: u32 = 5;
    /// The expansion ROM.
    pub const ROM: u32 = 6;
    /// The configuration space.
    pub const CONFIG: u32 = 7;
    /// The VGA ranges.
    pub const VGA: u32 = 8;
    /// Number of regions.
    pub const COUNT: u32 = 9;
}

/// Flags of [`RegionInfo`].
pub mod region_flags {
    /// The region can be read.
    pub const READ: u32 = 1 << 0;
    /// The region can be written.
    pub const WRITE: u32 = 1 << 1;
    /// The region can be mapped: a file descriptor comes with the reply.
    pub const MMAP: u32 = 1 << 2;
    /// Capabilities follow the structure.
    pub const CAPS: u32 = 1 << 3;
}

codec::fields! {
    /// Payload of `DEVICE_GET_REGION_INFO`, all zero but `argsz` and `index`, and of its reply, before
    /// the capabilities.
    RegionInfo, 32 {
        /// Size of the client's buffer in bytes; in the reply, the size that is needed.
        argsz: u32,
        /// See [`region_flags`].
        flags: u32,
        /// Index of the region; see [`region`].
        index: u32,
        /// Offset of the first capability from the start of this structure; 0 for none.
        cap_offset: u32,
        /// Bytes of the region.
        size: u64,
        /// Offset of the region in the file.
        offset: u64,
    }
}

codec::fields! {
    /// A mappable area of a region.
    SparseArea, 16 {
        /// Offset in the region.
        offset: u64,
        /// Bytes.
        size: u64,
    }
}

codec::fields! {
    /// Payload of `DEVICE_GET_REGION_IO_FDS`, all zero but `argsz` and `index`, and of its reply, before the
    /// sub-regions.
    IoFdsRequest, 16 {
        /// Size of the client's buffer in bytes; in the reply, the size that is needed.
        argsz: u32,
        /// Reserved, 0.
        flags: u32,
        /// Index of the region.
        index: u32,
        /// Number of sub-regions.
        count: u32,
    }
}

/// Identifier of the capability that lists the mappable areas of a region.
const SPARSE_MMAP: u16 = 1;
/// Bytes of a capability header: identifier, version and offset of the next one.
const CAPABILITY_BYTES: usize = 8;
/// Most mappable areas of a region; devices have fewer.
const AREAS_MAX: usize = 64;
/// Most capabilities in a list, which bounds a list with a loop.
const CAPABILITIES_MAX: usize = 16;

/// A complete reply to `DEVICE_GET_REGION_INFO`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionReply {
    /// The fixed part. [`to_bytes`](Self::to_bytes) sets `argsz`, `cap_offset` and [`region_flags::CAPS`].
    pub info: RegionInfo,
    /// The mappable areas; empty means all of a mappable region.
    pub areas: Vec<SparseArea>,
}

impl RegionReply {
    /// Bytes of the encoded reply with all areas.
    pub fn bytes(&self) -> usize {
        if self.areas.is_empty() {
            return RegionInfo::SIZE;
        }
        RegionInfo::SIZE + CAPABILITY_BYTES + 8 + self.areas.len() * SparseArea::SIZE
    }

    /// Encodes the reply in at most `capacity` bytes. Capabilities that do not fit are omitted, and `argsz`
    /// is the size with them.
    ///
    /// # Panics
    /// If the size does not fit into 32 bits.
    pub fn to_bytes(&self, capacity: usize) -> Vec<u8> {
        let argsz = u32::try_from(self.bytes()).expect("few areas");
        let fits = !self.areas.is_empty() && self.bytes() <= capacity;
        let caps = if fits { region_flags::CAPS } else { 0 };
        let flags = self.info.flags & !region_flags::CAPS | caps;
        let cap_offset = if fits { RegionInfo::SIZE as u32 } else { 0 };
        let mut bytes = RegionInfo { argsz, flags, cap_offset, ..self.info }.to_bytes().to_vec();
        if fits {
            bytes.extend(SPARSE_MMAP.to_le_bytes());
            bytes.extend(1u16.to_le_bytes());
            bytes.extend(0u32.to_le_bytes());
            bytes.extend((self.areas.len() as u32).to_le_bytes());
            bytes.extend(0u32.to_le_bytes());
            bytes.extend(self.areas.iter().flat_map(SparseArea::to_bytes));
        }
        bytes
    }

    /// Decodes a reply. Other capabilities are ignored.
    ///
    /// # Errors
    /// The reply is too short, a capability is outside it, or there are too many areas or capabilities.
    pub fn decode(from: &[u8]) -> Result<RegionReply, DecodeError> {
        let info = RegionInfo::decode(from)?;
        let mut areas = Vec::new();
        let mut at = info.cap_offset as usize;
        // Where that offset is: the field `cap_offset`, then the last field of each capability's header.
        let mut field = 12;
        if info.flags & region_flags::CAPS == 0 {
            at = 0;
        }
        for _ in 0..CAPABILITIES_MAX {
            if at == 0 {
                return Ok(RegionReply { info, areas });
            }
            let outside = DecodeError::value("offset of a capability", field, at as u64);
            let Some(capability) = from.get(at..).filter(|rest| rest.len() >= CAPABILITY_BYTES) else {
                return Err(outside);
            };
            let body_at = (at + CAPABILITY_BYTES) as u32;
            field = body_at - 4;
            let (mut header, body) = capability.split_at(CAPABILITY_BYTES);
            let id = u16::from_le_bytes(codec::next_field(&mut header));
            let _version: [u8; 2] = codec::next_field(&mut header);
            at = u32::from_le_bytes(codec::next_field(&mut header)) as usize;
            if id != SPARSE_MMAP {
                continue;
            }
            let Some((count, body)) = body.split_first_chunk() else { return Err(outside) };
            let count = u32::from_le_bytes(*count) as usize;
            let need = 4 + count.saturating_mul(SparseArea::SIZE);
            if count > AREAS_MAX || body.len() < need {
                return Err(DecodeError::value("number of areas", body_at, count as u64));
            }
            let list = body[4..need].chunks_exact(SparseArea::SIZE).map(SparseArea::decode);
            areas = list.collect::<Result<_, _>>()?;
        }
        Err(DecodeError::value("offset of one capability too many", field, at as u64))
    }
}
