//! Values round-trip; arbitrary bytes, also with a valid CRC, are decoded or rejected.
#![allow(clippy::unwrap_used)]

use proptest::collection::vec;
use proptest::prelude::*;
use wire_blob::*;

/// Mostly zeroes, so that reserved fields often are.
fn sparse() -> impl Strategy<Value = Vec<u8>> {
    let head = vec((0..200usize, any::<u8>()), 0..24);
    let rest = vec((0..PAGE_BYTES, any::<u8>()), 0..4);
    (head, rest).prop_map(|(head, rest)| {
        let mut bytes = vec![0; PAGE_BYTES];
        head.into_iter().chain(rest).for_each(|(at, value)| bytes[at] = value);
        bytes
    })
}

fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let crc = codec::crc32c(&bytes[..PAGE_BYTES - 4]);
    bytes[PAGE_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

proptest! {
    #[test]
    fn checksums_of_any_bytes_are_decoded_or_rejected(bytes in sparse(), page in any::<u16>()) {
        let id = [bytes[16]; 16];
        let bits = DirtyRegions::decode(&bytes, page.into(), id);
        prop_assert_eq!(bits.len(), DirtyRegions::BITS_BYTES);
        prop_assert_eq!(ChecksumsMark::decode(&bytes), None);
        for bytes in [intent(bytes.clone(), b"\xb1RbSumH1"), intent(bytes, b"\xb1RbSumP1")] {
            if let Some(header) = ChecksumHeader::decode(&bytes) {
                prop_assert_eq!(ChecksumHeader::decode(&header.encode()), Some(header));
            }
            let region = u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]);
            let id = *bytes[16..].first_chunk().unwrap();
            if let Some(found) = ChecksumPage::decode(&bytes, region, id) {
                prop_assert_eq!(ChecksumPage::decode(&found.encode(id), region, id), Some(found));
            }
        }
    }
}

proptest! {
    #[test]
    fn ranges_of_a_mask_are_set_as_their_bits_are(
        length in 1..100u32, set in vec(any::<u32>(), 0..5), ends in (any::<u32>(), any::<u32>()),
    ) {
        let mut bits = BitMask::new(MaskKind::Clusters, length);
        set.iter().for_each(|bit| _ = bits.set(bit % length));
        let (one, other) = (ends.0 % (length + 1), ends.1 % (length + 1));
        let range = one.min(other)..one.max(other);
        prop_assert_eq!(bits.is_clear(range.clone()), !range.clone().any(|bit| bits.get(bit)));
        let mut ranges = bits.clone();
        ranges.set_range(range.clone());
        range.for_each(|bit| _ = bits.set(bit));
        prop_assert_eq!(ranges, bits);
    }
}

/// A page with the magic and the CRC of what is in place of the masks.
fn intent(mut bytes: Vec<u8>, magic: &[u8; 8]) -> Vec<u8> {
    bytes[..8].copy_from_slice(magic);
    bytes[8..12].fill(0);
    let crc = codec::crc32c(&bytes[..PAGE_BYTES]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn xattr() -> impl Strategy<Value = Xattr> {
    (vec(any::<u8>(), 0..20), vec(any::<u8>(), 0..200)).prop_map(|(name, value)| Xattr { name, value })
}

fn descriptor() -> impl Strategy<Value = MetadataDescriptor> {
    let runs = vec((1..1000u32, 1..1000u32), 1..20);
    let runs =
        runs.prop_map(|runs| runs.into_iter().map(|(cluster, length)| BlobClusterRun { cluster, length }));
    let pages = vec(prop_oneof![(1..u32::MAX, Just(1)), (Just(0), 1..u32::MAX)], 0..20);
    let pages = pages.prop_map(|runs| runs.into_iter().map(|(page, length)| ExtentTableRun { page, length }));
    prop_oneof![
        runs.prop_map(|runs| MetadataDescriptor::ExtentRuns(runs.collect())),
        xattr().prop_map(MetadataDescriptor::Xattr),
        xattr().prop_map(MetadataDescriptor::XattrInternal),
        any::<[u64; 3]>().prop_map(
            |[invalid, data_read_only, metadata_read_only]| MetadataDescriptor::Flags(BlobFlags {
                invalid,
                data_read_only,
                metadata_read_only
            })
        ),
        (any::<u64>(), pages).prop_map(|(clusters, runs)| MetadataDescriptor::ExtentTable(ExtentTable {
            clusters,
            runs: runs.collect()
        })),
        (any::<u32>(), vec(any::<u32>(), 0..600))
            .prop_map(|(first, clusters)| MetadataDescriptor::ExtentPage(ExtentPage { first, clusters })),
        (7..=255u8, vec(any::<u8>(), 0..50))
            .prop_map(|(kind, content)| MetadataDescriptor::Unknown { kind, content }),
    ]
}

proptest! {
    #[test]
    fn pages_round_trip(
        id: u64, sequence: u32, next in proptest::option::of(0..u32::MAX), descriptors in vec(descriptor(), 0..8),
    ) {
        let page = MetadataPage { id: BlobId(id), sequence, descriptors, next };
        let bytes: usize = page.descriptors.iter().map(MetadataDescriptor::encoded_bytes).sum();
        match page.encode() {
            Some(encoded) => prop_assert_eq!(MetadataPage::decode(&encoded, 0), Ok(page)),
            None => prop_assert!(bytes > DESCRIPTOR_AREA_BYTES),
        }
    }

    #[test]
    fn masks_round_trip(length in 0..500u32, set in vec(0..500u32, 0..40)) {
        let mut mask = BitMask::new(MaskKind::Clusters, length);
        let set: std::collections::BTreeSet<u32> = set.into_iter().filter(|bit| *bit < length).collect();
        for bit in &set {
            prop_assert!(!mask.set(*bit) && mask.set(*bit));
        }
        prop_assert_eq!(mask.ones().collect::<Vec<_>>(), set.iter().copied().collect::<Vec<_>>());
        prop_assert_eq!(mask.count_ones() as usize, set.len());
        prop_assert_eq!(mask.encode().len() as u64, BitMask::encoded_bytes(length));
        prop_assert_eq!(BitMask::decode(&mask.encode(), MaskKind::Clusters), Ok(mask));
    }

    #[test]
    fn whatever_is_decoded_of_a_page_is_decoded_again_from_its_encoding(bytes in sparse(), page: u32) {
        let bytes = sealed(bytes);
        if let Ok(decoded) = MetadataPage::decode(&bytes, page) {
            let encoded = decoded.encode().expect("no larger than it was");
            prop_assert_eq!(MetadataPage::decode(&encoded, page), Ok(decoded));
        }
    }

    #[test]
    fn a_super_block_that_is_decoded_round_trips(
        bytes in sparse(), fields in vec(0..300u32, 14), size: u64, clean: bool,
    ) {
        let mut bytes = bytes;
        bytes[..8].copy_from_slice(b"SPDKBLOB");
        for (at, field) in (28..56).step_by(4).zip(&fields) {
            bytes[at..at + 4].copy_from_slice(&field.to_le_bytes());
        }
        for (at, field) in [(8, fields[7] % 5), (12, 4096), (16, clean.into()), (28, fields[8] << 12), (88, 512), (92, 4096)] {
            bytes[at..at + 4].copy_from_slice(&field.to_le_bytes());
        }
        bytes[80..88].copy_from_slice(&size.to_le_bytes());
        bytes[96..].fill(0);
        if let Ok(decoded) = SuperBlock::decode(&sealed(bytes)) {
            prop_assert_eq!(SuperBlock::decode(&decoded.encode()), Ok(decoded));
        }
    }

    #[test]
    fn arbitrary_bytes_are_decoded_or_rejected(bytes in vec(any::<u8>(), 0..5000)) {
        let _ = (SuperBlock::decode(&bytes), MetadataPage::decode(&bytes, 0), PageHeader::decode(&bytes));
        let _ = (BitMask::decode(&bytes, MaskKind::Pages), has_valid_crc(&bytes));
        if bytes.len() >= PAGE_BYTES {
            let _ = MetadataPage::decode(&sealed(bytes[..PAGE_BYTES].to_vec()), 0);
        }
    }

    #[test]
    fn copies_round_trip_if_the_page_leaves_what_they_need(
        bytes in sparse(), number: u64, page in proptest::option::of(any::<u32>()),
    ) {
        let target = page.map_or(CopyTarget::SuperBlock, CopyTarget::Page);
        let copy = PageCopy { target, number, content: bytes };
        match copy.encode() {
            Some(encoded) => prop_assert_eq!(PageCopy::decode(&encoded), Some(copy)),
            None => {
                let body = &copy.content[PageCopy::CONTENT_BYTES_MAX..PAGE_BYTES - 8];
                prop_assert!(body.iter().any(|byte| *byte != 0));
            }
        }
    }

    /// What is decoded has the size of a page, whatever its fields say.
    #[test]
    fn copies_and_groups_of_any_bytes_are_bounded_and_round_trip(
        bytes in sparse(), length: u16, target in prop_oneof![0..100u64, any::<u64>(), Just(u64::MAX)], part in 0..4u32,
    ) {
        let mut bytes = bytes;
        bytes[28..30].copy_from_slice(&length.to_le_bytes());
        bytes[20..28].copy_from_slice(&target.to_le_bytes());
        let copied = PageCopy::decode(&intent(bytes.clone(), b"\xb1RbCopy1"));
        let may_be = usize::from(length) <= PageCopy::CONTENT_BYTES_MAX
            && (target <= u64::from(u32::MAX) || target == u64::MAX);
        prop_assert_eq!(copied.is_some(), may_be);
        if let Some(copy) = copied {
            prop_assert_eq!(copy.content.len(), PAGE_BYTES);
            let encoded = copy.encode().expect("no larger than it was");
            prop_assert_eq!(PageCopy::decode(&encoded), Some(copy));
        }
        bytes[12..16].copy_from_slice(&part.to_le_bytes());
        let page = intent(bytes, b"\xb1RbPage1");
        let groups = PageGroups::decode(&page, part).expect("all bits may be set");
        prop_assert_eq!(groups.groups.length(), PageGroups::GROUPS);
        prop_assert_eq!(PageGroups::decode(&page, part + 1), None);
        prop_assert_eq!(PageGroups::decode(&groups.encode(), part), Some(groups));
    }

    #[test]
    fn arbitrary_bytes_are_no_copies_or_groups_but_with_a_crc(bytes in vec(any::<u8>(), 0..5000), part: u32) {
        prop_assert_eq!((PageCopy::decode(&bytes), PageGroups::decode(&bytes, part)), (None, None));
        let short = &intent(vec![0; PAGE_BYTES], b"\xb1RbCopy1")[..bytes.len().min(PAGE_BYTES - 1)];
        prop_assert_eq!(PageCopy::decode(short), None);
    }
}
