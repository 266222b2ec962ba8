//! The metadata of a blobstore: every decoder of `wire/blob`, and a store of which all pages and masks are
//! the input's.
#![no_main]

use blobstore::{BlobSegment, BlobStore, LoadError, LoadOptions, load_with};
use libfuzzer_sys::fuzz_target;
use wire_blob::{
    BitMask, MaskKind, MetadataPage, PAGE_BYTES, PageHeader, PageRange, SuperBlock, has_valid_crc,
};

const PAGES: u32 = 24;
const CLUSTER_BYTES: u32 = 32 << 10;
const CLUSTERS: u32 = 64;
const DEVICE_BYTES: u64 = CLUSTERS as u64 * CLUSTER_BYTES as u64;
/// Bytes of the input for each page: it is followed by zeroes.
const INPUT_BYTES: usize = 64;

/// Gives a page the CRC that makes decoders look at the rest.
fn sealed(input: &[u8]) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    page[..input.len().min(PAGE_BYTES - 8)].copy_from_slice(&input[..input.len().min(PAGE_BYTES - 8)]);
    // A chain goes on at one of the pages, or ends.
    let next = input.last().map_or(u32::MAX, |last| if *last < 32 { (*last).into() } else { u32::MAX });
    page[PAGE_BYTES - 8..PAGE_BYTES - 4].copy_from_slice(&next.to_le_bytes());
    let crc = codec::crc32c(&page[..PAGE_BYTES - 4]);
    page[PAGE_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    page
}

fn decoders(bytes: &[u8]) {
    let _ = (SuperBlock::decode(bytes), PageHeader::decode(bytes), has_valid_crc(bytes));
    let mut super_block = sealed(bytes);
    super_block[..8].copy_from_slice(b"SPDKBLOB");
    let crc = codec::crc32c(&super_block[..PAGE_BYTES - 4]);
    super_block[PAGE_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    if let Ok(decoded) = SuperBlock::decode(&super_block) {
        assert_eq!(SuperBlock::decode(&decoded.encode()), Ok(decoded));
    }
    for kind in [MaskKind::Pages, MaskKind::Clusters, MaskKind::BlobIds] {
        if let Ok(mask) = BitMask::decode(bytes, kind) {
            assert_eq!(BitMask::decode(&mask.encode(), kind), Ok(mask));
        }
    }
    if let Ok(page) = MetadataPage::decode(&sealed(bytes), 7) {
        let encoded = page.encode().expect("no larger than it was");
        assert_eq!(MetadataPage::decode(&encoded, 7), Ok(page));
    }
}

/// The beginning of a device, with the input's masks and pages.
fn device(bytes: &[u8]) -> Vec<u8> {
    let range = |start, pages| PageRange { start, pages };
    let super_block = SuperBlock {
        version: 3,
        clean: bytes.first().is_some_and(|first| first & 1 == 1),
        super_blob: None,
        cluster_bytes: CLUSTER_BYTES,
        used_pages: range(1, 1),
        used_clusters: range(2, 1),
        used_blob_ids: Some(range(3, 1)),
        metadata: range(4, PAGES),
        store_type: [0; 16],
        size_bytes: None,
        io_unit_bytes: 512,
        metadata_page_bytes: PAGE_BYTES as u32,
    };
    let mut device = vec![0; (4 + PAGES as usize) * PAGE_BYTES];
    device[..PAGE_BYTES].copy_from_slice(&super_block.encode());
    let mut parts = bytes.chunks(INPUT_BYTES);
    for (kind, bits) in [(MaskKind::Pages, PAGES), (MaskKind::Clusters, CLUSTERS), (MaskKind::BlobIds, PAGES)]
    {
        let mut mask = BitMask::new(kind, bits);
        for bit in parts.next().unwrap_or_default().iter().filter(|bit| u32::from(**bit) < bits) {
            mask.set((*bit).into());
        }
        let at = (1 + kind as usize) * PAGE_BYTES;
        device[at..at + mask.encode().len()].copy_from_slice(&mask.encode());
    }
    for (page, part) in (4..4 + PAGES as usize).zip(parts) {
        device[page * PAGE_BYTES..(page + 1) * PAGE_BYTES].copy_from_slice(&sealed(part));
    }
    device
}

/// Everything that can be read is within the store.
fn read_all(store: &BlobStore) {
    for blob in store.blobs().values() {
        let bytes = store.blob_bytes(blob).min(1 << 24);
        let mut done = 0;
        for piece in store.read(blob.id(), 0, bytes).expect("within the blob") {
            let Ok(piece) = piece else { break };
            if let BlobSegment::Device { offset, length } = piece {
                assert!(
                    offset + length <= store.layout().store_bytes && offset >= 4 * u64::from(CLUSTER_BYTES)
                );
            }
            assert!(piece.length() > 0);
            done += piece.length();
        }
        assert!(done <= bytes);
    }
    assert!(store.free_clusters() <= store.data_clusters());
    store.findings().iter().for_each(|finding| drop(finding.to_string()));
}

fuzz_target!(|bytes: &[u8]| {
    decoders(bytes);
    let device = device(bytes);
    for scan in [false, true] {
        let store = load_with(DEVICE_BYTES, LoadOptions { scan, ..LoadOptions::default() }, |offset, out| {
            out.copy_from_slice(&device[offset as usize..][..out.len()]);
            Ok::<(), LoadError>(())
        });
        read_all(&store.expect("the super block is valid"));
    }
});
