//! The regions of a device.

use crate::DecodeError;

/// The regions of a PCI device, by index.
pub mod region {
    /// The first base address register's.
    pub const BAR0: u32 = 0;
    /// The last base address register's.
    pub const BAR5: u32 = 5;
    /// The expansion ROM.
    pub const ROM: u32 = 6;
    /// Configuration space.
    pub const CONFIG: u32 = 7;
    /// The VGA ranges.
    pub const VGA: u32 = 8;
    /// How many there are.
    pub const COUNT: u32 = 9;
}

/// Flags of [`RegionInfo`].
pub mod region_flags {
    /// It can be read.
    pub const READ: u32 = 1 << 0;
    /// It can be written.
    pub const WRITE: u32 = 1 << 1;
    /// It can be mapped: a descriptor comes with the reply.
    pub const MMAP: u32 = 1 << 2;
    /// Capabilities follow the structure.
    pub const CAPS: u32 = 1 << 3;
}

fields! {
    /// Payload of `DEVICE_GET_REGION_INFO`, all zero but `argsz` and `index`, and of its reply, before
    /// the capabilities.
    RegionInfo, 32 {
        /// Bytes that the client has room for; in the reply, bytes that there are.
        argsz: u32,
        /// See [`region_flags`].
        flags: u32,
        /// Which region; see [`region`].
        index: u32,
        /// Where the first capability is, from the start of this structure; 0 for nowhere.
        cap_offset: u32,
        /// Bytes of the region.
        size: u64,
        /// Where in the descriptor the region begins.
        offset: u64,
    }
}

fields! {
    /// A part of a region that can be mapped.
    SparseArea, 16 {
        /// First byte within the region.
        offset: u64,
        /// Bytes.
        size: u64,
    }
}

fields! {
    /// Payload of `DEVICE_GET_REGION_IO_FDS`, all zero but `argsz` and `index`, and of its reply, before
    /// the parts of the region.
    IoFdsRequest, 16 {
        /// Bytes that the client has room for; in the reply, bytes that there are.
        argsz: u32,
        /// 0.
        flags: u32,
        /// Which region.
        index: u32,
        /// Number of parts.
        count: u32,
    }
}

/// Identifier of the capability that lists the parts of a region that can be mapped.
const SPARSE_MMAP: u16 = 1;
/// Identifier, version and next of a capability.
const CAPABILITY_BYTES: usize = 8;
/// Areas that are listened to: more than a sane device has.
const AREAS_MAX: usize = 64;
/// Capabilities that are followed, so that a loop ends.
const CAPABILITIES_MAX: usize = 16;

/// A whole reply to `DEVICE_GET_REGION_INFO`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionReply {
    /// The structure. [`to_bytes`](Self::to_bytes) sets `argsz`, `cap_offset` and the flag for
    /// capabilities.
    pub info: RegionInfo,
    /// The parts that can be mapped; empty for all of it, where it can be mapped at all.
    pub areas: Vec<SparseArea>,
}

impl RegionReply {
    /// Bytes that the reply has.
    pub fn bytes(&self) -> usize {
        if self.areas.is_empty() {
            return RegionInfo::SIZE;
        }
        RegionInfo::SIZE + CAPABILITY_BYTES + 8 + self.areas.len() * SparseArea::SIZE
    }

    /// As bytes, `room` of them at most: where the capabilities do not fit, they are left out and
    /// `argsz` says how much they need.
    ///
    /// # Panics
    /// With more areas than 32 bits can count.
    pub fn to_bytes(&self, room: usize) -> Vec<u8> {
        let argsz = u32::try_from(self.bytes()).expect("few areas");
        let fits = !self.areas.is_empty() && self.bytes() <= room;
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

    /// Reads a reply. Capabilities of other kinds are passed over.
    ///
    /// # Errors
    /// It is too short, or a capability lies outside of it.
    pub fn decode(from: &[u8]) -> Result<RegionReply, DecodeError> {
        let info = RegionInfo::decode(from)?;
        let mut areas = Vec::new();
        let mut at = info.cap_offset as usize;
        if info.flags & region_flags::CAPS == 0 {
            at = 0;
        }
        for _ in 0..CAPABILITIES_MAX {
            if at == 0 {
                return Ok(RegionReply { info, areas });
            }
            let outside = DecodeError::Value { what: "offset of a capability", value: at as u64 };
            let Some(capability) = from.get(at..).filter(|rest| rest.len() >= CAPABILITY_BYTES) else {
                return Err(outside);
            };
            let (mut header, body) = capability.split_at(CAPABILITY_BYTES);
            let id = u16::from_le_bytes(crate::fields::next(&mut header));
            let _version: [u8; 2] = crate::fields::next(&mut header);
            at = u32::from_le_bytes(crate::fields::next(&mut header)) as usize;
            if id != SPARSE_MMAP {
                continue;
            }
            let Some((count, body)) = body.split_first_chunk() else { return Err(outside) };
            let count = u32::from_le_bytes(*count) as usize;
            let need = 4 + count.saturating_mul(SparseArea::SIZE);
            if count > AREAS_MAX || body.len() < need {
                return Err(DecodeError::Value { what: "number of areas", value: count as u64 });
            }
            let list = body[4..need].chunks_exact(SparseArea::SIZE).map(SparseArea::decode);
            areas = list.collect::<Result<_, _>>()?;
        }
        Err(DecodeError::Value { what: "number of capabilities", value: CAPABILITIES_MAX as u64 })
    }
}
