//! Third-party copies: parameter data of EXTENDED COPY(LID1) and RECEIVE COPY RESULTS (SPC-4, sections 6.4 and 6.20).

use crate::DecodeError;
use crate::bytes::{be16, be32, be64};

/// Bytes of the parameter list's header.
pub const HEADER_BYTES: usize = 16;
/// Bytes of a target descriptor.
pub const TARGET_BYTES: usize = 32;
/// Bytes of a [`CopySegment`].
pub const SEGMENT_BYTES: usize = 28;
/// Type of a target descriptor that names a device by an identification descriptor.
pub const TARGET_IDENTIFICATION: u8 = 0xe4;
/// Type of a segment descriptor that copies blocks to blocks.
pub const SEGMENT_BLOCKS: u8 = 0x02;
/// Service action of RECEIVE COPY RESULTS for [`CopyStatus`].
pub const COPY_STATUS: u8 = 0x00;
/// Service action of RECEIVE COPY RESULTS for [`CopyLimits`].
pub const OPERATING_PARAMETERS: u8 = 0x03;

/// The parameter list, divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyList<'a> {
    /// What RECEIVE COPY RESULTS asks for the status by; `None` if it does not.
    pub identifier: Option<u8>,
    /// Target descriptors, of [`TARGET_BYTES`] each; the rest is cut off.
    pub targets: &'a [u8],
    /// Segment descriptors.
    pub segments: &'a [u8],
    /// Bytes of inline data.
    pub inline_bytes: u32,
}

impl<'a> CopyList<'a> {
    /// Decodes the list.
    ///
    /// # Errors
    /// It is cut off.
    pub fn decode(bytes: &'a [u8]) -> Result<CopyList<'a>, DecodeError> {
        let short =
            |need| DecodeError::Length { what: "EXTENDED COPY parameter list", got: bytes.len(), need };
        let (header, rest) = bytes.split_at_checked(HEADER_BYTES).ok_or(short(HEADER_BYTES))?;
        let (targets, segments) = (usize::from(be16(header, 2)), be32(header, 8) as usize);
        let cut = || short(HEADER_BYTES.saturating_add(targets).saturating_add(segments));
        let (targets, rest) = rest.split_at_checked(targets).ok_or_else(cut)?;
        let segments = rest.get(..segments).ok_or_else(cut)?;
        // LIST ID USAGE.
        let identifier = (header[1] >> 3 & 3 != 3).then_some(header[0]);
        Ok(CopyList { identifier, targets, segments, inline_bytes: be32(header, 12) })
    }
}

/// The type, code set, type and identifier of an identification descriptor in a target descriptor; `None` if it is of
/// another type.
pub fn target_designator(descriptor: &[u8; TARGET_BYTES]) -> Option<(u8, u8, &[u8])> {
    if descriptor[0] != TARGET_IDENTIFICATION {
        return None;
    }
    let length = usize::from(descriptor[7]).min(20);
    Some((descriptor[4] & 0xf, descriptor[5] & 0x3f, &descriptor[8..8 + length]))
}

/// A segment descriptor that copies blocks to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopySegment {
    /// Index of the source's target descriptor.
    pub source: u16,
    /// Index of the destination's.
    pub destination: u16,
    /// Number of blocks, of the source or of the destination: both are the same here.
    pub blocks: u16,
    /// First block to read.
    pub source_lba: u64,
    /// First block to write.
    pub destination_lba: u64,
}

impl CopySegment {
    /// Decodes the descriptor; `None` if it is of another type.
    pub fn decode(bytes: &[u8; SEGMENT_BYTES]) -> Option<CopySegment> {
        let is_known = bytes[0] == SEGMENT_BLOCKS && usize::from(be16(bytes, 2)) == SEGMENT_BYTES - 4;
        is_known.then(|| CopySegment {
            source: be16(bytes, 4),
            destination: be16(bytes, 6),
            blocks: be16(bytes, 10),
            source_lba: be64(bytes, 12),
            destination_lba: be64(bytes, 20),
        })
    }

    /// Encodes the descriptor.
    pub fn encode(&self) -> [u8; SEGMENT_BYTES] {
        let mut bytes = [0; SEGMENT_BYTES];
        bytes[0] = SEGMENT_BLOCKS;
        bytes[3] = SEGMENT_BYTES as u8 - 4;
        bytes[4..6].copy_from_slice(&self.source.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.destination.to_be_bytes());
        bytes[10..12].copy_from_slice(&self.blocks.to_be_bytes());
        bytes[12..20].copy_from_slice(&self.source_lba.to_be_bytes());
        bytes[20..].copy_from_slice(&self.destination_lba.to_be_bytes());
        bytes
    }
}

/// COPY MANAGER STATUS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyState {
    /// It is in progress.
    #[default]
    Running = 0,
    /// It has ended without errors.
    Complete = 1,
    /// It has ended with an error.
    Failed = 2,
}

/// How far a copy has come, and how it has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyStatus {
    /// Whether it has ended.
    pub state: CopyState,
    /// Segments that were processed.
    pub segments: u16,
    /// Bytes that were copied.
    pub bytes: u32,
}

impl CopyStatus {
    /// Encodes the parameter data of RECEIVE COPY RESULTS.
    pub fn encode(&self) -> [u8; 12] {
        let mut encoded = [0; 12];
        encoded[3] = 8;
        encoded[4] = self.state as u8;
        encoded[5..7].copy_from_slice(&self.segments.to_be_bytes());
        // TRANSFER COUNT UNITS is 0: bytes.
        encoded[8..].copy_from_slice(&self.bytes.to_be_bytes());
        encoded
    }
}

/// The operating parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyLimits {
    /// Most target descriptors.
    pub targets: u16,
    /// Most segment descriptors.
    pub segments: u16,
    /// Most bytes of descriptors.
    pub list_bytes: u32,
    /// Most bytes of a segment.
    pub segment_bytes: u32,
}

impl CopyLimits {
    /// Encodes the parameter data of RECEIVE COPY RESULTS: nothing is held, and descriptors are those above.
    pub fn encode(&self) -> [u8; 46] {
        let mut bytes = [0; 46];
        bytes[3] = 42;
        // SNLID: a list may have no identifier.
        bytes[4] = 1;
        bytes[8..10].copy_from_slice(&self.targets.to_be_bytes());
        bytes[10..12].copy_from_slice(&self.segments.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.list_bytes.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.segment_bytes.to_be_bytes());
        // Copies at a time, in total and of a nexus.
        (bytes[35], bytes[36]) = (255, 255);
        bytes[43..].copy_from_slice(&[2, SEGMENT_BLOCKS, TARGET_IDENTIFICATION]);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_divided_and_segments_decoded() {
        let segment =
            CopySegment { source: 0, destination: 1, blocks: 0x102, source_lba: 3, destination_lba: 1 << 40 };
        let mut bytes = vec![1, 0, 0, 32, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 0];
        bytes.extend([0xe4, 0, 0, 0, 1, 3, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8]);
        bytes.extend([0; 16]);
        bytes.extend(segment.encode());
        let list = CopyList::decode(&bytes).unwrap();
        let designator = target_designator(list.targets.first_chunk().unwrap());
        assert_eq!(designator, Some((1, 3, &[1, 2, 3, 4, 5, 6, 7, 8][..])));
        assert_eq!(list.segments[..12], [2, 0, 0, 24, 0, 0, 0, 1, 0, 0, 1, 2]);
        assert_eq!(CopySegment::decode(list.segments.first_chunk().unwrap()), Some(segment));
        assert!(CopyList::decode(&bytes[..75]).is_err() && CopyList::decode(&bytes[..15]).is_err());
        bytes[8] = 0xff;
        assert!(CopyList::decode(&bytes).is_err());
        let mut other = segment.encode();
        other[0] = 3;
        assert_eq!(CopySegment::decode(&other), None);
        assert_eq!(target_designator(&[0xe0; 32]), None);
    }

    #[test]
    fn limits_have_the_fields_of_spc_4() {
        let limits = CopyLimits { targets: 2, segments: 3, list_bytes: 0x400, segment_bytes: 0x1_0000 };
        let bytes = limits.encode();
        assert_eq!(bytes[..20], [0, 0, 0, 42, 1, 0, 0, 0, 0, 2, 0, 3, 0, 0, 4, 0, 0, 1, 0, 0]);
        assert_eq!(bytes[34..], [0, 255, 255, 0, 0, 0, 0, 0, 0, 2, 2, 0xe4]);
    }
}
