//! Repairs: what can be proved is repaired, and nothing else is touched.
#![allow(clippy::unwrap_used)]

#[path = "support/any.rs"]
mod any;
mod support;

use blobstore::{
    BlobFlags, BlobSegment, BlobStore, BlobStoreDevice, BlobStoreLoader, ChangeOutcome, LoadOptions,
    StoreAction, StoreEvent, StoreRepair,
};
use support::Device;
use support::made::*;
use wire_blob::{BitMask, MaskKind, XATTR_SNAPSHOT, XATTR_SNAPSHOT_PENDING_REMOVAL};

const THIN: u64 = BlobFlags::THIN;

fn load(device: &Device, ignore_masks: bool) -> BlobStore {
    let mut loader = BlobStoreLoader::new(device.bytes, LoadOptions { scan: true, ignore_masks });
    loop {
        while let Some(read) = loader.next_read() {
            let mut content = vec![0; read.length];
            device.read(read.offset, &mut content);
            loader.complete(read.id, Some(&content));
        }
        if let Some(outcome) = loader.outcome() {
            return outcome.unwrap();
        }
    }
}

fn plan(device: &Device) -> StoreRepair {
    StoreRepair::plan(load(device, false), load(device, true))
}

/// What a repair does and leaves, in words; the device is as after it.
fn repair(device: &mut Device) -> (Vec<String>, Vec<String>) {
    let plan = plan(device);
    let steps = plan.steps().iter().map(ToString::to_string).collect();
    let left = plan.left().iter().map(ToString::to_string).collect();
    let promises = BlobStoreDevice {
        bytes: device.bytes,
        block_bytes: 512,
        has_volatile_cache: true,
        atomic_write_bytes: 0,
    };
    let Some((mut open, change)) = plan.open(promises) else { return (steps, left) };
    while let Some(io) = open.next_io() {
        match &io.action {
            StoreAction::Write { offset, data } => device.write(*offset, data),
            StoreAction::WriteZeroes { offset, bytes } => device.write(*offset, &vec![0; *bytes as usize]),
            StoreAction::Flush => {}
            other => panic!("{other:?}"),
        }
        open.complete(io.id, Ok(()));
    }
    let done = StoreEvent::Done { change, result: Ok(ChangeOutcome::Done) };
    assert!(std::iter::from_fn(|| open.next_event()).any(|event| event == done));
    (steps, left)
}

/// The data of all blobs, by piece.
fn contents(device: &Device) -> Vec<Vec<u8>> {
    let store = load(device, true);
    let of = |blob: &blobstore::Blob| {
        let mut content = format!("{} {:?} {:?}", blob.id(), blob.xattrs(), blob.parent()).into_bytes();
        for piece in store.read(blob.id(), 0, store.blob_bytes(blob)).unwrap() {
            if let Ok(piece @ BlobSegment::Device { .. }) = piece {
                device.copy(piece, &Device::new(0), |part| content.extend_from_slice(part));
            }
        }
        content
    };
    store.blobs().values().map(of).collect()
}

/// Repairs, and checks that nothing is left and that the data is the same.
fn repaired(mut device: Device) -> Vec<String> {
    let before = contents(&device);
    let (steps, left) = repair(&mut device);
    assert_eq!(left, [""; 0]);
    let store = load(&device, false);
    assert!(store.super_block().clean);
    assert_eq!(store.findings(), []);
    assert_eq!(contents(&device), before);
    assert!(plan(&device).steps().is_empty());
    steps
}

/// Repairs, and checks that the same is left afterwards. Whether anything was written.
fn left(store: &MadeStore) -> (Vec<String>, Vec<String>) {
    let mut device = store.device.clone();
    let before = load(&device, false);
    let (steps, left) = repair(&mut device);
    let after = load(&device, false);
    assert_eq!(after.blobs().values().count(), before.blobs().values().count());
    let words = |store: &BlobStore| store.findings().iter().map(ToString::to_string).collect::<Vec<_>>();
    if steps.is_empty() {
        assert_eq!(words(&after), words(&before));
        assert_eq!(after.super_block().clean, before.super_block().clean);
    }
    (steps, left)
}

fn whole() -> MadeStore {
    let mut store = MadeStore::new().blob(0, vec![flags(0), table(2, &[1])]).extents(1, 0, &[9, 10]);
    store.device.write(9 * CLUSTER, &[7; 4096]);
    store
}

#[test]
fn a_store_without_findings_is_not_written() {
    assert_eq!(repaired(whole().unloaded().device), [""; 0]);
    let device = whole().unloaded().device;
    let promises = BlobStoreDevice {
        bytes: device.bytes,
        block_bytes: 512,
        has_volatile_cache: true,
        atomic_write_bytes: 0,
    };
    assert!(plan(&device).open(promises).is_none());
}

#[test]
fn recorded_stores_that_were_not_unloaded_are() {
    for image in ["lvs-dirty", "lvs-race0", "lvs-race1", "lvs-race2", "lvs-race3", "lvs-race4", "lvs-race5"] {
        let steps = repaired(Device::recorded(image));
        assert_eq!(steps[0], "write the masks, and unload the store", "{image}");
    }
}

#[test]
fn masks_are_made_those_of_the_metadata() {
    let mut store = whole().blob(5, vec![flags(0)]);
    for cluster in [20, 21, 22, 30] {
        store.clusters.set(cluster);
    }
    store.clusters.clear(10);
    store.pages.set(17);
    store.pages.clear(1);
    store.blob_ids.clear(5);
    let expected = [
        "free metadata pages that have no owner: 5, 17",
        "mark metadata pages as used that have an owner: 1",
        "free clusters that have no owner: 20-22, 30",
        "mark clusters as used that have an owner: 10",
        "add blob 0x100000005 to the mask of blob ids",
    ];
    assert_eq!(repaired(store.unloaded().device), expected);
    let mut other_kind = whole().unloaded();
    other_kind.device.write(2 * 4096, &[7]);
    assert_eq!(repaired(other_kind.device), ["write the mask of used clusters by the metadata"]);
    // An extent page is no blob.
    let mut phantom = whole();
    phantom.blob_ids.set(1);
    let expected = ["remove blob 0x100000001 from the mask of blob ids: its page is another blob's"];
    assert_eq!(repaired(phantom.unloaded().device), expected);
}

#[test]
fn a_snapshot_that_the_mask_lacks_is_the_parent_of_its_clone() {
    let mut store = MadeStore::new()
        .blob(0, vec![flags(THIN), internal(XATTR_SNAPSHOT, id(7).0), table(2, &[1])])
        .extents(1, 0, &[9, 0])
        .blob(7, vec![flags(0), table(2, &[8])])
        .extents(8, 7, &[11, 12]);
    store.blob_ids.clear(7);
    let steps = repaired(store.unloaded().device);
    assert!(steps.contains(&"add blob 0x100000007 to the mask of blob ids".to_string()), "{steps:?}");
}

#[test]
fn operations_that_were_cut_in_two_are_ended() {
    let marked = vec![flags(THIN), internal(XATTR_SNAPSHOT_PENDING_REMOVAL, id(0).0), table(2, &[1])];
    let store = MadeStore::new()
        .blob(2, marked)
        .extents(1, 2, &[9, 10])
        .blob(0, vec![flags(THIN), internal(XATTR_SNAPSHOT, id(2).0), table(2, &[3])])
        .extents(3, 0, &[12, 10])
        .blob(4, vec![flags(0), table(4, &[5])])
        .extents(5, 4, &[13, 14]);
    let expected = [
        "end the resize of blob 0x100000004, with 2 clusters",
        "undo the deletion of snapshot 0x100000002 of blob 0x100000000",
    ];
    assert_eq!(repaired(store.device.clone())[1..], expected);
    assert_eq!(repaired(store.unloaded().device)[..2], expected);
}

#[test]
fn a_torn_super_block_is_written_again() {
    let mut store = whole().unloaded();
    store.device.write(16, &[0]);
    let expected = ["write the masks, and unload the store", "write the super block"];
    assert_eq!(repaired(store.device), expected);
}

#[test]
fn pages_that_no_blob_has_are_zeroed() {
    let mut store = whole();
    store.device.write(MadeStore::offset(7) + 512, &[1; 512]);
    let expected = ["write the masks, and unload the store", "zero metadata pages that no blob has: 7"];
    assert_eq!(repaired(store.device.clone()), expected);
    assert_eq!(repaired(store.clone().unloaded().device), expected[1..]);
    // It is marked as used: what it was is not known.
    store.pages.set(7);
    let (steps, words) = left(&store.unloaded());
    assert_eq!(steps, [""; 0]);
    assert_eq!(words.len(), 2, "{words:?}");
}

#[test]
fn half_of_a_first_page_leaves_the_store_as_it_is() {
    let mut store = whole();
    store.device.write(MadeStore::offset(0) + 1024, &[1]);
    let (steps, words) = left(&store);
    assert_eq!(steps, [""; 0]);
    assert_eq!(words.last().unwrap(), "metadata page 0 may be half of the first page of a blob");
}

#[test]
fn nothing_is_freed_that_a_damaged_blob_may_have() {
    // Cluster 10 is the damaged blob's, which is not known any more; 11 is another's, and is marked.
    let mut store = whole().blob(2, vec![flags(0), table(1, &[3])]).extents(3, 2, &[11]);
    store.device.write(MadeStore::offset(1) + 2000, &[1]);
    store.clusters.clear(11);
    let mut store = store.unloaded();
    let before = load(&store.device, false);
    let (steps, words) = repair(&mut store.device);
    assert_eq!(steps, ["mark clusters as used that have an owner: 11"]);
    assert!(
        words[0].starts_with("blob 0x100000000 cannot be used: metadata page 1 has a wrong CRC"),
        "{words:?}"
    );
    let after = load(&store.device, false);
    for cluster in [9, 10, 11] {
        assert!(before.used_clusters().get(cluster) && after.used_clusters().get(cluster), "{cluster}");
    }
    assert!(after.super_block().clean && after.unusable().len() == 1);
    let has = |start: &str| after.findings().iter().any(|finding| finding.to_string().starts_with(start));
    assert!(!has("1 cluster has an owner") && has("2 clusters are marked as used, but have no owner: 9-10"));
}

#[test]
fn owners_of_one_cluster_keep_it() {
    let shared = whole().blob(2, vec![flags(0), table(2, &[3])]).extents(3, 2, &[10, 11]);
    let named = "cluster 10 has several owners: blobs 0x100000000, 0x100000002";
    let mut leaked = shared.clone();
    leaked.clusters.set(20);
    let (steps, words) = left(&leaked.unloaded());
    assert_eq!((steps, words.first().map(String::as_str)), (vec![], Some(named)));
    // Not unloaded: the rest is repaired.
    let mut device = shared.device.clone();
    let (steps, words) = repair(&mut device);
    assert_eq!(
        (&steps[..], &words[..]),
        (&["write the masks, and unload the store".to_string()][..], &[named.to_string()][..])
    );
    let after = load(&device, false);
    assert!(after.super_block().clean);
    assert_eq!(after.findings().iter().map(ToString::to_string).collect::<Vec<_>>(), [named]);
    assert_eq!(contents(&device), contents(&shared.device));
}

#[test]
fn a_store_with_a_damaged_blob_is_unloaded_with_it() {
    let store = whole().page(4, 4, 0, Some(6), vec![flags(0), table(1, &[5])]).extents(5, 4, &[12]);
    let mut store = store.page(6, 9, 1, None, vec![]);
    let (_, words) = repair(&mut store.device);
    assert_eq!(
        words,
        [
            "blob 0x100000004 cannot be used: its chain continues with metadata page 6, which is blob 0x100000009's"
        ]
    );
    let after = load(&store.device, false);
    assert!(after.super_block().clean && after.used_clusters().get(12) && after.used_pages().get(6));
    assert_eq!(after.unusable().keys().copied().collect::<Vec<_>>(), [id(4)]);
}

#[test]
fn a_mask_is_not_rebuilt_without_a_blob_whose_first_page_is_lost() {
    let mut store = whole().unloaded();
    // The header of the first page, and the mask that would name the blob.
    store.device.write(MadeStore::offset(0), &[3; 16]);
    store.device.write(3 * 4096, &BitMask::new(MaskKind::BlobIds, 1).encode());
    let (steps, _) = left(&store);
    assert_eq!(steps, [""; 0]);
}

mod any_metadata {
    use super::*;
    use blobstore::StoreSeverity;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(600))]
        /// Bits of masks and bytes of pages are changed after the store was made, which has then what is
        /// right, what is wrong and can be repaired, and what cannot.
        #[test]
        fn is_repaired_to_what_is_left_and_no_blob_is_lost(
            store in any::store(), mask_bits in vec((0..3u32, 0..PAGES, any::<bool>()), 0..4),
            bytes in vec((0..4 * PAGES, any::<u8>()), 0..2),
        ) {
            let mut store = store.make();
            for (mask, bit, is_set) in mask_bits {
                let mask = match mask {
                    0 => &mut store.pages,
                    1 => &mut store.clusters,
                    _ => &mut store.blob_ids,
                };
                _ = if is_set { mask.set(bit) } else { mask.clear(bit) };
            }
            let mut device = store.sealed().device;
            for (part, byte) in bytes {
                device.write(MadeStore::offset(0) + u64::from(part) * 1024 + 8, &[byte]);
            }
            let has_unlisted = plan(&device).steps().iter().any(|step| step.to_string().starts_with("add blob "));
            // With blobs that the mask lacked, others have their parents.
            let before = load(&device, has_unlisted);
            let planned = plan(&device);
            let (steps, left) = repair(&mut device);
            let after = load(&device, false);
            let again = plan(&device);
            let bad = |store: &BlobStore| {
                store.findings().iter().filter(|finding| finding.severity() > StoreSeverity::Note).count()
            };
            if steps.is_empty() {
                prop_assert_eq!(after.findings(), before.findings());
            } else if left.is_empty() {
                prop_assert!(after.super_block().clean);
                prop_assert_eq!(after.findings(), []);
            }
            prop_assert!(again.steps().is_empty(), "{:?} after {:?}", again.steps(), planned);
            prop_assert!(bad(&before) > 0 || before.super_block().clean || planned.steps().len() + left.len() > 0);
            for (id, old) in before.blobs().values().map(|blob| (blob.id(), blob)) {
                let Some(new) = after.blob(id) else {
                    prop_assert!(false, "blob {id} is lost by {planned:?}");
                    continue;
                };
                prop_assert_eq!((old.clusters(), old.parent()), (new.clusters(), new.parent()));
            }
            for id in before.unusable().keys() {
                let is_there = after.unusable().contains_key(id) || after.blob(*id).is_some();
                let is_step = steps.iter().any(|step| step.starts_with(&format!("remove blob {id} ")));
                prop_assert!(is_there || is_step, "{id} is lost by {planned:?}");
            }
            // Nothing that a blob has is free, and nothing is that was used by a store with a damaged blob.
            for cluster in before.used_clusters().ones() {
                let is_leak = steps.iter().any(|step| step.starts_with("free clusters"));
                prop_assert!(after.used_clusters().get(cluster) || is_leak);
            }
        }
    }
}
