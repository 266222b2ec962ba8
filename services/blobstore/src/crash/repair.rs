//! Repairs that power failures cut in two: of stores that were not unloaded, and of masks that are wrong.

use std::collections::BTreeMap;

use wire_blob::{BitMask, BlobId, MaskKind, PageRange, Xattr};

use super::CLUSTER;
use super::disk::{Dice, Disk};
use super::runner::{RunOptions, run_seed};
use crate::{BlobParent, BlobStore, BlobStoreDevice, LoadOptions, StoreEvent, StoreRepair};

/// What a blob has: not where its metadata is, which a repair may write elsewhere.
#[derive(Debug, PartialEq)]
struct Kept {
    is_thin: bool,
    read_only: u64,
    parent: BlobParent,
    xattrs: Vec<Xattr>,
    length: u32,
    clusters: Vec<(u32, u32)>,
    data: u32,
}

fn kept(disk: &Disk, store: &BlobStore) -> BTreeMap<BlobId, Kept> {
    let image = disk.image();
    let of = |blob: &crate::Blob| Kept {
        is_thin: blob.is_thin(),
        read_only: blob.flags().data_read_only,
        parent: blob.parent().clone(),
        xattrs: blob.xattrs().to_vec(),
        length: blob.clusters().length(),
        clusters: blob.clusters().iter().collect(),
        data: blob.clusters().iter().fold(0, |sum, (_, cluster)| {
            let data = &image[cluster as usize * CLUSTER..][..CLUSTER];
            codec::crc32c(data) ^ u32::rotate_left(sum, 1)
        }),
    };
    store.blobs().values().map(|blob| (blob.id(), of(blob))).collect()
}

/// Damages masks of a store that was unloaded, or its super block.
fn damage(dice: &mut Dice, device: BlobStoreDevice, mut image: Vec<u8>, store: &BlobStore) -> Disk {
    let super_block = store.super_block();
    let offset = |place: PageRange| place.start as usize * super_block.metadata_page_bytes as usize;
    let ids = super_block.used_blob_ids.unwrap();
    let places = [
        (MaskKind::Pages, offset(super_block.used_pages)),
        (MaskKind::Clusters, offset(super_block.used_clusters)),
        (MaskKind::BlobIds, offset(ids)),
    ];
    for _ in 0..1 + dice.below(6) {
        let (kind, at) = places[dice.below(3)];
        if dice.percent(5) {
            image[at] = 7;
            continue;
        }
        let Ok(mut mask) = BitMask::decode(&image[at..at + 4096], kind) else { continue };
        let bit = dice.below(mask.length() as usize) as u32;
        match mask.get(bit) {
            true => drop(mask.clear(bit)),
            // What is no blob's first page is damage that is not certain.
            false if kind == MaskKind::BlobIds => {}
            false => drop(mask.set(bit)),
        }
        let encoded = mask.encode();
        image[at..at + encoded.len()].copy_from_slice(&encoded);
    }
    if dice.percent(10) {
        image[16] ^= 1;
    }
    Disk::with(device, image)
}

/// Repairs until power no longer fails.
fn repair(seed: u64) -> Result<bool, String> {
    let mut dice = Dice(seed ^ 0x5eed);
    let cut = dice.percent(50);
    let Some(image) = run_seed(seed, RunOptions { cut, ..RunOptions::default() })? else { return Ok(false) };
    let device = BlobStoreDevice {
        bytes: image.len() as u64,
        block_bytes: 512,
        has_volatile_cache: dice.percent(60),
        atomic_write_bytes: [0, 4096][dice.below(2)],
    };
    let mut disk = Disk::with(device, image.clone());
    let loaded = disk.load(true).map_err(|error| error.to_string())?;
    let before = kept(&disk, &loaded);
    if loaded.super_block().clean {
        disk = damage(&mut dice, device, image, &loaded);
    }
    for round in 0.. {
        let load = |ignore_masks| {
            let loaded = disk.load_with(LoadOptions { scan: true, ignore_masks });
            loaded.map_err(|error| format!("the store does not load: {error}"))
        };
        let plan = StoreRepair::plan(load(false)?, load(true)?);
        if !plan.left().is_empty() {
            return Err(format!("{:?} is left", plan.left()));
        }
        let Some((mut open, change)) = plan.open(device) else { break };
        let mut steps = if round < 4 { dice.below(60) } else { usize::MAX };
        let mut is_done = false;
        while steps > 0 && !open.is_idle() {
            while let Some(event) = open.next_event() {
                is_done |= event == StoreEvent::Done { change, result: Ok(crate::ChangeOutcome::Done) };
            }
            while let Some(io) = open.next_io() {
                disk.begin(io.id, io.action);
            }
            if let Some(id) = dice.pick(&disk.in_flight()) {
                disk.complete(id, true);
                open.complete(id, Ok(()));
            }
            steps -= 1;
        }
        while let Some(event) = open.next_event() {
            is_done |= event == StoreEvent::Done { change, result: Ok(crate::ChangeOutcome::Done) };
        }
        if open.is_idle() && !is_done {
            return Err("the repair ended without its change".to_string());
        }
        disk = disk.crash(&mut dice);
    }
    let after = disk.load(true).map_err(|error| error.to_string())?;
    if !after.super_block().clean || !after.findings().is_empty() {
        return Err(format!("after the repair: {:?}", after.findings()));
    }
    let after = kept(&disk, &after);
    if after != before {
        return Err(format!("before the repair {before:#?}, after it {after:#?}"));
    }
    Ok(true)
}

#[test]
fn a_repair_that_is_cut_in_two_leaves_a_store_that_is_repaired_by_the_next() {
    let seeds: u64 = std::env::var("BLOBSTORE_REPAIRS").ok().and_then(|text| text.parse().ok()).unwrap_or(80);
    let mut repaired = 0;
    for seed in 0..seeds {
        match repair(seed) {
            Ok(was_store) => repaired += u64::from(was_store),
            Err(problem) => panic!("seed {seed}: {problem}"),
        }
    }
    assert!(repaired > seeds / 2, "{repaired} stores were repaired");
}
