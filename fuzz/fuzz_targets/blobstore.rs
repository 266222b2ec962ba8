//! The metadata of a blobstore: every decoder of `wire/blob`, and a store of which all pages and masks, or what
//! is in place of the masks, are the input's. It is loaded, read and repaired.
#![no_main]

use blobstore::{
    BlobSegment, BlobStore, BlobStoreDevice, ChangeOutcome, LoadError, LoadOptions, StoreAction, StoreEvent,
    StoreRepair, load_with,
};
use libfuzzer_sys::fuzz_target;
use wire_blob::{
    BitMask, CopyTarget, MaskKind, MetadataPage, PAGE_BYTES, PageCopy, PageGroups, PageHeader, PageRange,
    SuperBlock, has_valid_crc,
};

const PAGES: u32 = 24;
const CLUSTER_BYTES: u32 = 32 << 10;
const CLUSTERS: u32 = 64;
const DEVICE_BYTES: u64 = CLUSTERS as u64 * CLUSTER_BYTES as u64;
/// Bytes of the metadata, in whole clusters: a repair writes nothing behind them.
const METADATA_BYTES: usize = 4 * CLUSTER_BYTES as usize;
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

/// Gives a page the magic and the CRC of a copy, or of groups.
fn sealed_intent(input: &[u8], magic: &[u8; 8]) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    page[..input.len().min(PAGE_BYTES)].copy_from_slice(&input[..input.len().min(PAGE_BYTES)]);
    page[..8].copy_from_slice(magic);
    page[8..12].fill(0);
    let crc = codec::crc32c(&page);
    page[8..12].copy_from_slice(&crc.to_le_bytes());
    page
}

/// What is in place of the masks: decoded, it is of the size of a page, and round-trips.
fn intent(bytes: &[u8]) {
    let part = bytes.get(12).map_or(0, |part| (*part).into());
    for page in [bytes, &sealed_intent(bytes, b"\xb1RbCopy1"), &sealed_intent(bytes, b"\xb1RbPage1")] {
        if let Some(copy) = PageCopy::decode(page) {
            assert_eq!(copy.content.len(), PAGE_BYTES);
            let encoded = copy.encode().expect("no larger than it was");
            assert_eq!(PageCopy::decode(&encoded), Some(copy));
        }
        if let Some(groups) = PageGroups::decode(page, part) {
            assert_eq!((groups.part, groups.groups.length()), (part, PageGroups::GROUPS));
            assert_eq!(PageGroups::decode(&groups.encode(), part), Some(groups));
        }
    }
}

/// Writes groups and copies where the masks are.
fn write_intent(device: &mut [u8], bytes: &[u8]) {
    let mut parts = bytes.chunks(INPUT_BYTES);
    let mut groups = PageGroups::new(0);
    if parts.next().and_then(|part| part.get(1)).is_some_and(|byte| byte & 1 == 1) {
        groups.groups.set(0);
    }
    device[PAGE_BYTES..2 * PAGE_BYTES].copy_from_slice(&groups.encode());
    for (at, part) in (2..4).zip(parts) {
        let target = match part.first().copied().unwrap_or(u8::MAX) {
            page if u32::from(page) < PAGES => CopyTarget::Page(page.into()),
            page if page < 128 => CopyTarget::Page(u32::MAX - u32::from(page)),
            _ => CopyTarget::SuperBlock,
        };
        let content = match target {
            CopyTarget::SuperBlock => device[..PAGE_BYTES].to_vec(),
            CopyTarget::Page(_) => sealed(part.get(1..).unwrap_or_default()).to_vec(),
        };
        let copy = PageCopy { target, number: at as u64, content };
        let Some(encoded) = copy.encode() else { continue };
        device[at * PAGE_BYTES..(at + 1) * PAGE_BYTES].copy_from_slice(&encoded);
    }
}

/// The beginning of a device, with the input's masks and pages. Of the first byte, bit 0 says that the store was
/// unloaded, bit 1 that it has copies and groups otherwise, bit 2 that its super block is half written.
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
    let mut device = vec![0; METADATA_BYTES];
    let has = |bit: u8| bytes.first().is_some_and(|first| first >> bit & 1 == 1);
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
        let mut content = sealed(part);
        // Half written, or damaged.
        content[PAGE_BYTES - 5] ^= u8::from(part.last() == Some(&255));
        device[page * PAGE_BYTES..(page + 1) * PAGE_BYTES].copy_from_slice(&content);
    }
    if has(1) && !has(0) {
        write_intent(&mut device, bytes);
    }
    // In the id of the super blob, which only a copy restores, or in the field `clean`.
    if has(2) {
        device[if has(3) { 16 } else { 20 }] ^= 1;
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

fn load(device: &[u8], options: LoadOptions) -> Result<BlobStore, LoadError> {
    load_with(DEVICE_BYTES, options, |offset, out| {
        out.copy_from_slice(&device[offset as usize..][..out.len()]);
        Ok(())
    })
}

/// Repairs the store. If nothing is left, there are no findings, and otherwise the same is left.
fn repair(device: &mut [u8]) {
    let plan = |device: &[u8]| {
        let load =
            |ignore_masks| load(device, LoadOptions { scan: true, ignore_masks }).expect("it was loaded");
        StoreRepair::plan(load(false), load(true))
    };
    let planned = plan(device);
    let is_all = planned.left().is_empty();
    let promises = BlobStoreDevice {
        bytes: DEVICE_BYTES,
        block_bytes: 512,
        has_volatile_cache: true,
        atomic_write_bytes: 0,
    };
    let Some((mut open, change)) = planned.open(promises) else { return };
    while let Some(io) = open.next_io() {
        match &io.action {
            StoreAction::Write { offset, data } => {
                device[*offset as usize..][..data.len()].copy_from_slice(data);
            }
            StoreAction::WriteZeroes { offset, bytes } => {
                device[*offset as usize..][..*bytes as usize].fill(0);
            }
            StoreAction::Flush => {}
            other => panic!("a repair changes metadata only: {other:?}"),
        }
        open.complete(io.id, Ok(()));
    }
    let done = StoreEvent::Done { change, result: Ok(ChangeOutcome::Done) };
    // Otherwise there was no metadata page left for what recovery writes.
    if std::iter::from_fn(|| open.next_event()).any(|event| event == done) {
        let after = load(device, LoadOptions { scan: true, ..LoadOptions::default() }).expect("repaired");
        assert!(after.super_block().clean && (!is_all || after.findings().is_empty()));
        assert!(plan(device).steps().is_empty());
    }
}

fuzz_target!(|bytes: &[u8]| {
    decoders(bytes);
    intent(bytes);
    let mut device = device(bytes);
    for (scan, ignore_masks) in [(false, false), (true, false), (true, true)] {
        match load(&device, LoadOptions { scan, ignore_masks }) {
            Ok(store) => read_all(&store),
            // Damage that nothing restores.
            Err(error) => {
                assert!(bytes.first().is_some_and(|first| first >> 2 & 1 == 1), "{error}");
                return;
            }
        }
    }
    repair(&mut device);
});
