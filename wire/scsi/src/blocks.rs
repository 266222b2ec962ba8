//! Parameter data about blocks: UNMAP, GET LBA STATUS and SANITIZE OVERWRITE (SBC-4, sections 5.35, 5.8 and 5.25.2.2).

use crate::DecodeError;
use crate::bytes::{be16, be32, be64};

const HEADER_BYTES: usize = 8;
const DESCRIPTOR_BYTES: usize = 16;

/// The parameter list of UNMAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnmapList<'a>(&'a [[u8; DESCRIPTOR_BYTES]]);

impl<'a> UnmapList<'a> {
    /// Decodes a list. A descriptor that is cut off is ignored, as SBC-4 demands.
    ///
    /// # Errors
    /// The list ends within its header or before its descriptors do.
    pub fn decode(bytes: &'a [u8]) -> Result<UnmapList<'a>, DecodeError> {
        const WHAT: &str = "UNMAP parameter list";
        let short = |need| DecodeError::Length { what: WHAT, got: bytes.len(), need };
        let (header, rest) = bytes.split_at_checked(HEADER_BYTES).ok_or(short(HEADER_BYTES))?;
        let length = usize::from(be16(header, 2));
        let descriptors = rest.get(..length).ok_or(short(HEADER_BYTES + length))?;
        Ok(UnmapList(descriptors.as_chunks().0))
    }

    /// Number of descriptors.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// First block and number of blocks of each descriptor.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        self.0.iter().map(|descriptor| (be64(descriptor, 0), be32(descriptor, 8)))
    }
}

/// An extent of GET LBA STATUS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbaStatus {
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u32,
    /// Mapped, not deallocated.
    pub is_mapped: bool,
}

/// Most extents for which an allocation length has room; at least one.
pub const fn lba_status_extents(allocation: u32) -> usize {
    let room = (allocation as usize).saturating_sub(HEADER_BYTES) / DESCRIPTOR_BYTES;
    if room == 0 { 1 } else { room }
}

/// Encodes the parameter data of GET LBA STATUS.
pub fn encode_lba_status(extents: &[LbaStatus]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&((4 + extents.len() * DESCRIPTOR_BYTES) as u32).to_be_bytes());
    for extent in extents {
        bytes.extend(extent.lba.to_be_bytes());
        bytes.extend(extent.blocks.to_be_bytes());
        bytes.extend([u8::from(!extent.is_mapped), 0, 0, 0]);
    }
    bytes
}

/// The parameter list of SANITIZE OVERWRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverwriteParameters<'a> {
    /// INVERT: each pass writes the inverse of the one before.
    pub inverts: bool,
    /// OVERWRITE COUNT, 1 to 31.
    pub passes: u8,
    /// The initialization pattern, at least a byte; the caller has seen that it is not longer than a block.
    pub pattern: &'a [u8],
}

impl<'a> OverwriteParameters<'a> {
    /// Decodes the list.
    ///
    /// # Errors
    /// The byte of the field that is invalid: a vendor's test, no pass, or a pattern that is not as long as the list.
    pub fn decode(bytes: &'a [u8]) -> Result<OverwriteParameters<'a>, u16> {
        let (header, pattern) = bytes.split_at_checked(4).ok_or(2_u16)?;
        if header[0] & 0x60 != 0 || header[0] & 0x1f == 0 {
            return Err(0);
        }
        if pattern.is_empty() || pattern.len() != usize::from(be16(header, 2)) {
            return Err(2);
        }
        Ok(OverwriteParameters { inverts: header[0] & 0x80 != 0, passes: header[0] & 0x1f, pattern })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_an_overwrite_have_passes_and_a_pattern() {
        let decoded = OverwriteParameters::decode(&[0x83, 0, 0, 2, 0xaa, 0x55]).unwrap();
        assert_eq!(decoded, OverwriteParameters { inverts: true, passes: 3, pattern: &[0xaa, 0x55] });
        let cases: [(&[u8], u16); 6] = [
            (&[1, 0, 0], 2),
            (&[0, 0, 0, 1, 7], 0),
            (&[0x21, 0, 0, 1, 7], 0),
            (&[1, 0, 0, 0], 2),
            (&[1, 0, 0, 2, 7], 2),
            (&[1, 0, 0, 1, 7, 7], 2),
        ];
        for (bytes, field) in cases {
            assert_eq!(OverwriteParameters::decode(bytes), Err(field), "{bytes:?}");
        }
    }

    #[test]
    fn unmap_lists_are_decoded_as_far_as_they_are_whole() {
        let mut list = vec![0, 0x26, 0, 0x20, 0, 0, 0, 0];
        list.extend([0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0]);
        list.extend([0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 1, 0, 0, 0, 0, 0]);
        let decoded = UnmapList::decode(&list).unwrap();
        assert_eq!(decoded.iter().collect::<Vec<_>>(), [(0x1_0000_0002, 3), (9, 256)]);
        list[3] = 0x1f;
        assert_eq!(UnmapList::decode(&list).unwrap().len(), 1);
        list[3] = 0x21;
        assert!(UnmapList::decode(&list).is_err());
        assert!(UnmapList::decode(&list[..7]).is_err());
        assert!(UnmapList::decode(&[0; 8]).unwrap().is_empty());
    }

    #[test]
    fn extents_have_their_provisioning_status() {
        let extents = [
            LbaStatus { lba: 2, blocks: 3, is_mapped: true },
            LbaStatus { lba: 5, blocks: 0x100, is_mapped: false },
        ];
        let expected = [
            [0, 0, 0, 36, 0, 0, 0, 0].as_slice(),
            &[0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0],
            &[0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 1, 0, 1, 0, 0, 0],
        ];
        assert_eq!(encode_lba_status(&extents), expected.concat());
        assert_eq!((lba_status_extents(0), lba_status_extents(24), lba_status_extents(40)), (1, 1, 2));
    }
}
