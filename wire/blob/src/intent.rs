//! What a store that is not clean has in the pages of its masks. The format does not define these structures:
//! it says that the masks are not read then, and that whatever recovers the store writes them.
//!
//! A page of the metadata or the super block is replaced in place. Where the device may write half of it, a
//! [`PageCopy`] of the new content is made durable before. [`PageGroups`] says which pages may be in use, so
//! that not all of them must be read after a power failure.

use crate::checksums::ChecksumsId;
use crate::fields::{array, put, u16_at, u32_at, u64_at};
use crate::sealed::{open, seal};
use crate::{BitMask, MaskKind, PAGE_BYTES};

const COPY_MAGIC: [u8; 8] = *b"\xb1RbCopy1";
const GROUPS_MAGIC: [u8; 8] = *b"\xb1RbPage1";
const NUMBER_AT: usize = 12;
const TARGET_AT: usize = 20;
const LENGTH_AT: usize = 28;
const TAIL_AT: usize = 32;
const CONTENT_AT: usize = 40;
const COPY_TAIL_BYTES: usize = 8;

/// What a copy is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CopyTarget {
    /// The super block.
    SuperBlock,
    /// The metadata page with this index.
    Page(u32),
}

/// A copy of a page that is about to be replaced in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// Which one.
    pub target: CopyTarget,
    /// Ascends with each copy; the last one is valid.
    pub number: u64,
    /// The new content, [`PAGE_BYTES`].
    pub content: Vec<u8>,
}

impl PageCopy {
    /// Bytes that a page may have before its zeroes and its last 8 bytes, if a copy is to be possible.
    pub const CONTENT_BYTES_MAX: usize = PAGE_BYTES - CONTENT_AT;

    /// Encodes the copy; `None` if the content is not a page, or too long. It is no valid mask, super block
    /// or metadata page.
    pub fn encode(&self) -> Option<[u8; PAGE_BYTES]> {
        let content = self.content.first_chunk::<PAGE_BYTES>()?;
        let (body, tail) = content.split_at(PAGE_BYTES - COPY_TAIL_BYTES);
        let length = body.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        if length > Self::CONTENT_BYTES_MAX {
            return None;
        }
        let mut out = [0; PAGE_BYTES];
        let target = match self.target {
            CopyTarget::SuperBlock => u64::MAX,
            CopyTarget::Page(page) => page.into(),
        };
        put(&mut out, 0, &COPY_MAGIC);
        put(&mut out, NUMBER_AT, &self.number.to_le_bytes());
        put(&mut out, TARGET_AT, &target.to_le_bytes());
        put(&mut out, LENGTH_AT, &(length as u16).to_le_bytes());
        put(&mut out, TAIL_AT, tail);
        put(&mut out, CONTENT_AT, &body[..length]);
        seal(&mut out);
        Some(out)
    }

    /// Decodes a copy; `None` if there is none.
    pub fn decode(from: &[u8]) -> Option<PageCopy> {
        let from = open(from, COPY_MAGIC)?;
        let length = usize::from(u16_at(from, LENGTH_AT));
        let target = match u64_at(from, TARGET_AT) {
            u64::MAX => CopyTarget::SuperBlock,
            page => CopyTarget::Page(u32::try_from(page).ok()?),
        };
        let mut content = vec![0; PAGE_BYTES];
        put(&mut content, 0, from[CONTENT_AT..].get(..length)?);
        put(&mut content, PAGE_BYTES - COPY_TAIL_BYTES, &from[TAIL_AT..TAIL_AT + COPY_TAIL_BYTES]);
        Some(PageCopy { target, number: u64_at(from, NUMBER_AT), content })
    }
}

/// Which metadata pages may be in use, in groups of 64.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageGroups {
    /// Index of the part: a part has [`Self::GROUPS`] groups.
    pub part: u32,
    /// The checksums of the data that the program keeps which changes the store.
    pub checksums: Option<ChecksumsId>,
    /// Bits of groups.
    pub groups: BitMask,
}

impl PageGroups {
    /// Metadata pages of a group.
    pub const GROUP_PAGES: u32 = 64;
    /// Groups of a part, which is a page of [`PAGE_BYTES`].
    pub const GROUPS: u32 = 8 * 4032;

    /// Zeroes where there are no checksums.
    const CHECKSUMS_AT: usize = 16;
    const BITS_AT: usize = 64;

    /// Parts for this number of metadata pages.
    pub const fn parts(pages: u32) -> u32 {
        pages.div_ceil(Self::GROUP_PAGES).div_ceil(Self::GROUPS)
    }

    /// A part without a group.
    pub fn new(part: u32) -> PageGroups {
        let groups = BitMask::new(MaskKind::Pages, Self::GROUPS);
        PageGroups { part, checksums: None, groups }
    }

    /// Encodes the part. It is no valid mask.
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        let mut out = [0; PAGE_BYTES];
        put(&mut out, 0, &GROUPS_MAGIC);
        put(&mut out, NUMBER_AT, &self.part.to_le_bytes());
        put(&mut out, Self::CHECKSUMS_AT, &self.checksums.unwrap_or_default());
        put(&mut out, Self::BITS_AT, &self.groups.encode()[BitMask::HEADER_BYTES..]);
        seal(&mut out);
        out
    }

    /// Decodes a part; `None` if there is none.
    pub fn decode(from: &[u8], part: u32) -> Option<PageGroups> {
        let from = open(from, GROUPS_MAGIC)?;
        if u32_at(from, NUMBER_AT) != part {
            return None;
        }
        let mut mask = BitMask::new(MaskKind::Pages, Self::GROUPS).encode();
        put(&mut mask, BitMask::HEADER_BYTES, &from[Self::BITS_AT..]);
        let checksums = Some(array(from, Self::CHECKSUMS_AT)).filter(|id| *id != ChecksumsId::default());
        Some(PageGroups { part, checksums, groups: BitMask::decode(&mask, MaskKind::Pages).ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlobFlags, BlobId, MetadataDescriptor, MetadataPage, SuperBlock, has_valid_crc};

    fn page() -> Vec<u8> {
        let flags = MetadataDescriptor::Flags(BlobFlags::default());
        let page =
            MetadataPage { id: BlobId::from_page(3), sequence: 0, descriptors: vec![flags], next: Some(9) };
        page.encode().unwrap().to_vec()
    }

    #[test]
    fn a_copy_has_the_page_and_is_none() {
        let copy = PageCopy { target: CopyTarget::Page(3), number: 7, content: page() };
        let bytes = copy.encode().unwrap();
        assert_eq!(PageCopy::decode(&bytes), Some(copy));
        assert!(!has_valid_crc(&bytes) && SuperBlock::decode(&bytes).is_err());
        for kind in [MaskKind::Pages, MaskKind::Clusters, MaskKind::BlobIds] {
            assert!(BitMask::decode(&bytes, kind).is_err());
        }
        assert_eq!(PageCopy::decode(&page()), None);
    }

    #[test]
    fn a_changed_bit_makes_a_copy_invalid() {
        let bytes = PageCopy { target: CopyTarget::SuperBlock, number: 1, content: page() }.encode().unwrap();
        for at in (0..64).chain([511, 512, 4095]) {
            let mut changed = bytes;
            changed[at] ^= 1;
            assert_eq!(PageCopy::decode(&changed), None, "byte {at}");
        }
    }

    #[test]
    fn a_page_that_is_too_full_has_no_copy() {
        let mut content = page();
        content[PageCopy::CONTENT_BYTES_MAX - 1] = 1;
        let mut copy = PageCopy { target: CopyTarget::Page(3), number: 7, content };
        assert!(copy.encode().is_some());
        copy.content[PageCopy::CONTENT_BYTES_MAX] = 1;
        assert_eq!(copy.encode(), None);
    }

    #[test]
    fn groups_are_read_back_at_their_part_only() {
        let mut groups = PageGroups::new(2);
        groups.checksums = Some([9; 16]);
        groups.groups.set(0);
        groups.groups.set(PageGroups::GROUPS - 1);
        let bytes = groups.encode();
        assert_eq!(PageGroups::decode(&bytes, 2), Some(groups));
        assert_eq!(PageGroups::decode(&bytes, 1), None);
        assert_eq!(PageGroups::parts(PageGroups::GROUPS * PageGroups::GROUP_PAGES), 1);
        assert_eq!(PageGroups::parts(PageGroups::GROUPS * PageGroups::GROUP_PAGES + 1), 2);
    }
}
