//! What is said of stores that are not as they should be, and what can be read of them.
#![allow(clippy::unwrap_used)]

mod support;

use blobstore::{
    BlobFlags, BlobId, BlobReadError, BlobSegment, BlobStore, BlobStoreLoader, LoadError, LoadOptions,
    MaskKind, StoreSeverity,
};
use support::made::*;
use wire_blob::{
    BitMask, BlobClusterRun, ExtentTable, ExtentTableRun, MetadataDescriptor, PageRange, XATTR_SNAPSHOT,
    XATTR_SNAPSHOT_IN_PROGRESS, XATTR_SNAPSHOT_PENDING_REMOVAL, Xattr,
};

fn words(store: &BlobStore) -> Vec<String> {
    store.findings().iter().map(ToString::to_string).collect()
}

/// The findings of a scanned store, but for the first, that it was not unloaded.
fn scanned(store: &MadeStore) -> (BlobStore, Vec<String>) {
    let loaded = store.device.load(false).unwrap();
    let mut words = words(&loaded);
    assert_eq!(words.remove(0), "the store was not unloaded; what is used was found by reading all metadata");
    (loaded, words)
}

fn clusters(store: &BlobStore, page: u32) -> Vec<Option<u32>> {
    let map = store.blob(id(page)).unwrap().clusters();
    (0..map.length()).map(|index| map.get(index)).collect()
}

const THIN: u64 = BlobFlags::THIN;

#[test]
fn an_unloaded_store_is_as_its_masks_say() {
    let store = MadeStore::new().blob(0, vec![flags(0), table(2, &[1])]).extents(1, 0, &[9, 10]).unloaded();
    for scan in [false, true] {
        let loaded = store.device.load(scan).unwrap();
        assert_eq!(loaded.findings(), []);
        assert_eq!((loaded.data_clusters(), loaded.free_clusters()), (60, 58));
        assert_eq!(clusters(&loaded, 0), [Some(9), Some(10)]);
        assert_eq!(loaded.used_pages().ones().collect::<Vec<_>>(), [0, 1]);
    }
}

#[test]
fn runs_continue_on_the_next_page_of_the_chain() {
    let runs = |runs: &[(u32, u32)]| {
        let run = |(cluster, length): &(u32, u32)| BlobClusterRun { cluster: *cluster, length: *length };
        MetadataDescriptor::ExtentRuns(runs.iter().map(run).collect())
    };
    let thin = MetadataDescriptor::Flags(BlobFlags { invalid: THIN, ..BlobFlags::default() });
    let store = MadeStore::new().page(3, 3, 0, Some(8), vec![thin, runs(&[(20, 2), (0, 1)])]).page(
        8,
        3,
        1,
        None,
        vec![runs(&[(30, 1)])],
    );
    let (loaded, words) = scanned(&store);
    assert!(words.is_empty());
    assert_eq!(clusters(&loaded, 3), [Some(20), Some(21), None, Some(30)]);
    let blob = loaded.blob(id(3)).unwrap();
    assert_eq!((blob.pages(), blob.has_extent_table()), (&[3, 8][..], false));
    let pieces: Vec<_> = loaded.read(id(3), CLUSTER, 3 * CLUSTER).unwrap().map(Result::unwrap).collect();
    let device = |cluster| BlobSegment::Device { offset: cluster * CLUSTER, length: CLUSTER };
    assert_eq!(pieces, [device(21), BlobSegment::Zeroes { length: CLUSTER }, device(30)]);
}

#[test]
fn a_resize_that_was_cut_in_two_is_undone_if_the_blob_grew_and_finished_if_it_shrank() {
    let grew = MadeStore::new().blob(0, vec![flags(0), table(2, &[1])]).extents(1, 0, &[9, 10, 11, 12]);
    let (loaded, words) = scanned(&grew);
    assert_eq!(
        words,
        ["blob 0x100000000 was being resized: its table says 2 clusters and its extent pages 4; it has 2"]
    );
    assert_eq!((clusters(&loaded, 0).len(), loaded.free_clusters()), (2, 58));
    let shrank = MadeStore::new().blob(0, vec![flags(0), table(4, &[1])]).extents(1, 0, &[9, 10]);
    let (loaded, words) = scanned(&shrank);
    assert_eq!(
        words,
        ["blob 0x100000000 was being resized: its table says 4 clusters and its extent pages 2; it has 2"]
    );
    assert_eq!((clusters(&loaded, 0).len(), loaded.free_clusters()), (2, 58));
    // The second extent page was emptied before the table lost it.
    let empty = MetadataDescriptor::ExtentPage(wire_blob::ExtentPage { first: 512, clusters: vec![] });
    let runs = vec![ExtentTableRun { page: 0, length: 1 }, ExtentTableRun { page: 2, length: 1 }];
    let two = MetadataDescriptor::ExtentTable(ExtentTable { clusters: 600, runs });
    let shrank = MadeStore::new().blob(0, vec![flags(THIN), two]).page(2, 0, 0, None, vec![empty]);
    let (loaded, words) = scanned(&shrank);
    assert_eq!(
        words,
        [
            "blob 0x100000000 was being resized: its table says 600 clusters and its extent pages 512; it has 512"
        ]
    );
    assert_eq!(loaded.blob(id(0)).unwrap().clusters().length(), 512);
}

#[test]
fn owners_of_a_shared_cluster_and_page_are_named() {
    let store = MadeStore::new()
        .blob(0, vec![flags(0), table(2, &[1])])
        .extents(1, 0, &[9, 10])
        .blob(2, vec![flags(0), table(2, &[3])])
        .extents(3, 2, &[10, 11])
        .blob(4, vec![flags(0), table(2, &[3])]);
    let (_, words) = scanned(&store);
    assert_eq!(
        words,
        [
            "metadata page 3 has several owners: blobs 0x100000002, 0x100000004",
            "cluster 10 has several owners: blobs 0x100000000, 0x100000002, 0x100000004",
            "cluster 11 has several owners: blobs 0x100000002, 0x100000004",
        ]
    );
}

#[test]
fn what_masks_and_metadata_say_is_compared() {
    let mut store = MadeStore::new().blob(0, vec![flags(0), table(2, &[1])]).extents(1, 0, &[9, 10]);
    for cluster in [20, 21, 22, 30] {
        store.clusters.set(cluster);
    }
    store.pages.set(17);
    let leaked = store.clone().unloaded();
    let loaded = leaked.device.load(false).unwrap();
    let expected = [
        "1 metadata page is marked as used, but has no owner: 17",
        "4 clusters are marked as used, but have no owner: 20-22, 30",
    ];
    assert_eq!(words(&loaded), expected);
    assert!(loaded.findings().iter().all(|finding| finding.severity() == StoreSeverity::Leak));
    assert_eq!(loaded.free_clusters(), 54);
    // The mask was lost: what has owners is not free all the same.
    let mut unmarked = leaked;
    (unmarked.pages, unmarked.clusters) =
        (BitMask::new(MaskKind::Pages, PAGES), BitMask::new(MaskKind::Clusters, CLUSTERS));
    let loaded = unmarked.sealed().device.load(false).unwrap();
    let expected = [
        "2 metadata pages have an owner, but are not marked as used: 0-1",
        "6 clusters have an owner, but are not marked as used: 0-3, 9-10",
    ];
    assert_eq!(words(&loaded), expected);
    assert_eq!(loaded.free_clusters(), 58);
    assert!(loaded.findings().iter().all(|finding| finding.severity() == StoreSeverity::Damage));
}

#[test]
fn a_blob_that_the_mask_lacks_is_found_by_a_scan() {
    let mut store = MadeStore::new().blob(0, vec![flags(0)]).blob(5, vec![flags(0)]);
    store.blob_ids = BitMask::new(MaskKind::BlobIds, PAGES);
    store.blob_ids.set(7);
    let store = store.unloaded();
    let unusable =
        "blob 0x100000007 cannot be used: metadata page 7, its first one, is not the first page of a blob";
    let leaked = "2 metadata pages are marked as used, but have no owner: 0, 5";
    assert_eq!(words(&store.device.load(false).unwrap()), [unusable, leaked]);
    let unlisted = |id| format!("the mask of blob ids lacks blob {id}, which the metadata has");
    let all = [unusable.into(), leaked.into(), unlisted("0x100000000"), unlisted("0x100000005")];
    assert_eq!(words(&store.device.load(true).unwrap()), all);
}

#[test]
fn a_store_with_an_unusable_mask_is_scanned() {
    let whole = MadeStore::new().blob(0, vec![flags(0), table(1, &[1])]).extents(1, 0, &[9]).unloaded();
    let mut other_kind = whole.clone();
    other_kind.device.write(4096, &[1]);
    let mut short = whole.clone();
    short.device.write(2 * 4096 + 1, &[63]);
    for (store, message) in [
        (
            other_kind,
            "the mask of used metadata pages cannot be used, so that all metadata was read: the mask of used pages at byte 0 has the value 0x1",
        ),
        (short, "the mask of used clusters has 63 bits, but the store has 64"),
    ] {
        let loaded = store.device.load(false).unwrap();
        assert_eq!(words(&loaded), [message]);
        assert_eq!((clusters(&loaded, 0), loaded.free_clusters()), (vec![Some(9)], 59));
    }
    // A store that was being grown has a mask for its new size already.
    let mut grown = whole;
    grown.clusters = BitMask::new(MaskKind::Clusters, 100);
    for cluster in [0, 1, 2, 3, 9, 80] {
        grown.clusters.set(cluster);
    }
    let loaded = grown.sealed().device.load(false).unwrap();
    assert_eq!((loaded.findings(), loaded.free_clusters()), (&[][..], 59));
}

/// A store with a damaged blob in page 0, what is said about it, and the clusters that are free.
type DamagedStore = (MadeStore, &'static str, u32);

fn damaged_chains() -> Vec<DamagedStore> {
    let whole = |store: MadeStore| store.extents(1, 0, &[9, 10]);
    let base = || vec![flags(0), table(2, &[1])];
    let with = |descriptor| vec![flags(0), table(2, &[1]), descriptor];
    let new = MadeStore::new;
    let runs = |cluster, length| MetadataDescriptor::ExtentRuns(vec![BlobClusterRun { cluster, length }]);
    vec![
        (whole(new().page(0, 0, 0, Some(2), base())), "metadata page 2 has a wrong CRC", 58),
        (whole(new().page(0, 0, 0, Some(99), base())), "it has metadata page 99, but the store has 24", 58),
        (
            whole(new().page(0, 0, 0, Some(3), base()).page(3, 7, 1, None, vec![])),
            "its chain continues with metadata page 3, which is blob 0x100000007's",
            58,
        ),
        (
            whole(new().page(0, 0, 0, Some(3), base()).page(3, 0, 2, None, vec![])),
            "metadata page 3 is number 2 of its chain, but must be number 1",
            58,
        ),
        (
            whole(new().page(0, 0, 0, Some(0), base())),
            "metadata page 0 is number 0 of its chain, but must be number 1",
            58,
        ),
        (
            whole(new().blob(0, vec![flags(1 << 40), table(2, &[1])])),
            "it has flags 0x10000000000 that this version does not know; a newer program wrote it",
            58,
        ),
        (
            whole(new().blob(0, with(runs(20, 1)))),
            "metadata page 0 describes clusters in another way than the pages before it",
            58,
        ),
        (
            whole(new().blob(0, with(table(3, &[1])))),
            "metadata page 0 describes clusters in another way than the pages before it",
            58,
        ),
        (whole(new().blob(0, vec![flags(0), table(2, &[1, 1])])), "it has 2 extent pages for 2 clusters", 58),
        (
            whole(new().blob(0, vec![flags(0), table(1 << 40, &[1])])),
            "it has 1099511627776 clusters, more than it can have",
            60,
        ),
    ]
}

fn damaged_extents() -> Vec<DamagedStore> {
    let xattr = |bytes| MetadataDescriptor::Xattr(Xattr { name: b"x".to_vec(), value: vec![1; bytes] });
    let base = || vec![flags(0), table(2, &[1])];
    let new = MadeStore::new;
    let runs = |cluster, length| MetadataDescriptor::ExtentRuns(vec![BlobClusterRun { cluster, length }]);
    vec![
        (
            new().blob(0, vec![flags(THIN), table(2, &[1])]).extents(1, 0, &[0; 513]),
            "metadata page 1 is not the extent page of its clusters from 0 on",
            60,
        ),
        (new().blob(0, vec![flags(0), table(2, &[1])]), "metadata page 1 has a wrong CRC", 60),
        (
            new().blob(0, vec![flags(0), table(2, &[0])]),
            "it is not thin, but its cluster 0 is not allocated",
            60,
        ),
        (
            new().blob(0, base()).extents(1, 0, &[9, 0]),
            "it is not thin, but its cluster 1 is not allocated",
            59,
        ),
        (
            new().blob(0, base()).extents(1, 0, &[9, 64]),
            "its cluster 1 is cluster 64 of the store, which no blob can have",
            59,
        ),
        (
            new().blob(0, base()).extents(1, 0, &[3, 9]),
            "its cluster 0 is cluster 3 of the store, which no blob can have",
            59,
        ),
        (
            new().blob(0, base()).page(1, 0, 0, None, vec![xattr(4)]),
            "metadata page 1 is not the extent page of its clusters from 0 on",
            60,
        ),
        (
            new().blob(0, vec![flags(THIN), runs(0, u32::MAX), runs(0, 1)]),
            "it has 4294967296 clusters, more than it can have",
            60,
        ),
        (
            new().blob(0, vec![flags(THIN | BlobFlags::EXTERNAL_SNAPSHOT)]),
            "it is a clone of an external snapshot, but does not name it",
            60,
        ),
        (
            new().blob(
                0,
                vec![
                    flags(THIN),
                    MetadataDescriptor::XattrInternal(Xattr { name: b"SNAP".to_vec(), value: vec![1; 7] }),
                ],
            ),
            "the id of its snapshot has 7 bytes instead of 8",
            60,
        ),
    ]
}

#[test]
fn a_damaged_blob_is_explained_and_its_clusters_are_not_free() {
    for (store, message, free) in damaged_chains().into_iter().chain(damaged_extents()) {
        let store = store.blob(20, vec![flags(0)]);
        let (loaded, words) = scanned(&store);
        assert_eq!(words[0], format!("blob 0x100000000 cannot be used: {message}"));
        assert_eq!(loaded.free_clusters(), free, "{message}");
        assert_eq!(loaded.read(id(0), 0, 1).unwrap_err(), BlobReadError::NoBlob { blob: id(0) });
        assert!(loaded.blob(id(20)).is_some(), "{message}");
    }
    let mut undecodable = MadeStore::new().blob(0, vec![flags(0)]);
    let mut content = [0; 4096];
    undecodable.device.read(MadeStore::offset(0), &mut content);
    content[17] = 23;
    let crc = codec::crc32c(&content[..4092]);
    content[4092..].copy_from_slice(&crc.to_le_bytes());
    undecodable.device.write(MadeStore::offset(0), &content);
    let message = "blob 0x100000000 cannot be used: metadata page 0: the length of the flags at byte 17 has the value 0x17";
    assert_eq!(scanned(&undecodable).1, [message]);
}

#[test]
fn a_torn_page_is_free_but_found() {
    let mut store = MadeStore::new().blob(0, vec![flags(0), table(1, &[1])]).extents(1, 0, &[9]);
    store.device.write(MadeStore::offset(0) + 60, &[1]);
    store.device.write(MadeStore::offset(7), &[1]);
    let (loaded, words) = scanned(&store);
    assert_eq!(words, ["2 metadata pages are neither empty nor valid: 0, 7"]);
    assert_eq!((loaded.blobs().len(), loaded.free_clusters()), (0, 60));
}

#[test]
fn a_missing_snapshot_is_an_error_where_the_clone_needs_it() {
    let mut store = MadeStore::new()
        .blob(0, vec![flags(THIN), internal(XATTR_SNAPSHOT, id(7).0), table(2, &[1])])
        .extents(1, 0, &[9, 0]);
    store.super_block.super_blob = Some(id(7));
    let (loaded, words) = scanned(&store.sealed());
    let expected = [
        "the super blob 0x100000007 is not there or cannot be used",
        "blob 0x100000000 is a clone of snapshot 0x100000007, which is not there or cannot be used",
    ];
    assert_eq!(words, expected);
    let pieces: Vec<_> = loaded.read(id(0), 0, 2 * CLUSTER).unwrap().collect();
    let device = BlobSegment::Device { offset: 9 * CLUSTER, length: CLUSTER };
    assert_eq!(pieces, [Ok(device), Err(BlobReadError::NoParent { blob: id(0), parent: id(7) })]);
    let range = loaded.read(id(0), CLUSTER, CLUSTER + 1).unwrap_err();
    assert_eq!(range.to_string(), "32769 bytes at 32768 of blob 0x100000000, which has 65536");
    assert!(loaded.read(id(0), u64::MAX, 2).is_err());
}

#[test]
fn clones_of_each_other_are_found_and_cannot_be_read() {
    let clone = |parent: u32| vec![flags(THIN), internal(XATTR_SNAPSHOT, id(parent).0), table(1, &[0])];
    let store = MadeStore::new().blob(0, clone(1)).blob(1, clone(2)).blob(2, clone(1)).blob(3, clone(3));
    let (loaded, words) = scanned(&store);
    let message = |page| format!("blob {} is a clone of itself, by the snapshots that it names", id(page));
    assert_eq!(words, [0, 1, 2, 3].map(message));
    let pieces: Vec<_> = loaded.read(id(0), 0, 1).unwrap().collect();
    assert_eq!(pieces, [Err(BlobReadError::ParentCycle { blob: id(0) })]);
}

#[test]
fn the_end_of_a_parent_is_followed_by_zeroes() {
    let clone = |parent: u32, clusters, extents| {
        vec![flags(THIN), internal(XATTR_SNAPSHOT, id(parent).0), table(clusters, &[extents])]
    };
    let store = MadeStore::new()
        .blob(0, clone(1, 3, 0))
        .blob(1, clone(2, 1, 0))
        .blob(2, vec![flags(0), table(3, &[5])])
        .extents(5, 2, &[9, 10, 11]);
    let (loaded, words) = scanned(&store);
    assert!(words.is_empty());
    let pieces: Vec<_> = loaded.read(id(0), 512, 3 * CLUSTER - 512).unwrap().map(Result::unwrap).collect();
    let first = BlobSegment::Device { offset: 9 * CLUSTER + 512, length: CLUSTER - 512 };
    assert_eq!(pieces, [first, BlobSegment::Zeroes { length: 2 * CLUSTER }]);
    assert_eq!((loaded.clones(id(1)), loaded.clones(id(0))), (&[id(0)][..], &[][..]));
}

#[test]
fn a_huge_thin_blob_is_one_piece_of_zeroes() {
    let clusters = u64::from(u32::MAX);
    let run = ExtentTableRun { page: 0, length: 1 << 23 };
    let all = MetadataDescriptor::ExtentTable(ExtentTable { clusters, runs: vec![run] });
    let (loaded, words) = scanned(&MadeStore::new().blob(0, vec![flags(THIN), all]));
    assert!(words.is_empty());
    let pieces: Vec<_> = loaded.read(id(0), 5, clusters * CLUSTER - 5).unwrap().map(Result::unwrap).collect();
    assert_eq!(pieces, [BlobSegment::Zeroes { length: clusters * CLUSTER - 5 }]);
}

/// A snapshot (page 2) of a blob (page 0) that is being made or deleted. Both have the extents of the other's
/// page if the blob is not a clone of it yet, or not any more.
fn cut(mark: &[u8], clone_is_child: bool) -> MadeStore {
    let marked = vec![flags(THIN), internal(mark, id(0).0), table(2, &[1])];
    let child = vec![flags(THIN), internal(XATTR_SNAPSHOT, id(2).0), table(2, &[0])];
    let alone = vec![flags(THIN), table(2, &[1])];
    let clone = if clone_is_child { child } else { alone };
    MadeStore::new().blob(2, marked).blob(0, clone).extents(1, 0, &[9, 10])
}

#[test]
fn a_snapshot_that_was_being_made_or_deleted_exists_if_its_clone_says_so() {
    for (mark, clone_is_child, outcome) in [
        (XATTR_SNAPSHOT_IN_PROGRESS, true, "made; that is finished"),
        (XATTR_SNAPSHOT_IN_PROGRESS, false, "made; that is undone"),
        (XATTR_SNAPSHOT_PENDING_REMOVAL, true, "deleted; that is undone"),
        (XATTR_SNAPSHOT_PENDING_REMOVAL, false, "deleted; that is finished"),
    ] {
        let (loaded, words) = scanned(&cut(mark, clone_is_child));
        let expected = format!("snapshot 0x100000002 of blob 0x100000000 was being {outcome}");
        assert_eq!(words, [expected]);
        assert_eq!(loaded.free_clusters(), 58);
        let pieces: Vec<_> = loaded.read(id(0), 0, CLUSTER).unwrap().map(Result::unwrap).collect();
        assert_eq!(pieces, [BlobSegment::Device { offset: 9 * CLUSTER, length: CLUSTER }]);
        match loaded.blob(id(2)) {
            Some(snapshot) => {
                assert!(clone_is_child && snapshot.is_read_only() && snapshot.internal_xattrs().is_empty());
                assert_eq!(clusters(&loaded, 0), [None, None]);
            }
            None => assert!(!clone_is_child),
        }
    }
}

#[test]
fn an_undone_deletion_returns_the_clusters_that_the_clone_got_to_the_snapshot() {
    let marked = vec![flags(THIN), internal(XATTR_SNAPSHOT_PENDING_REMOVAL, id(0).0), table(3, &[1])];
    let child = vec![flags(THIN), internal(XATTR_SNAPSHOT, id(2).0), table(3, &[3])];
    let store = MadeStore::new()
        .blob(2, marked)
        .extents(1, 2, &[9, 10, 0])
        .blob(0, child)
        // Cluster 12 is the clone's own; 10 was the snapshot's.
        .extents(3, 0, &[12, 10, 0]);
    let (loaded, words) = scanned(&store);
    assert_eq!(words, ["snapshot 0x100000002 of blob 0x100000000 was being deleted; that is undone"]);
    assert_eq!(clusters(&loaded, 0), [Some(12), None, None]);
    assert_eq!(clusters(&loaded, 2), [Some(9), Some(10), None]);
}

#[test]
fn a_snapshot_whose_clone_is_missing_or_that_others_need_remains() {
    let marked = |value: &[u8]| {
        let mark = Xattr { name: XATTR_SNAPSHOT_IN_PROGRESS.to_vec(), value: value.to_vec() };
        vec![flags(THIN), MetadataDescriptor::XattrInternal(mark)]
    };
    let (loaded, words) = scanned(&MadeStore::new().blob(2, marked(&id(0).0.to_le_bytes())));
    let expected = "snapshot 0x100000002 of blob 0x100000000 was being made or deleted, and blob 0x100000000 does not say which of both is valid";
    assert_eq!(words, [expected]);
    assert!(loaded.blob(id(2)).is_some());
    let (_, words) = scanned(&MadeStore::new().blob(2, marked(&[1])));
    assert_eq!(words, ["snapshot 0x100000002 was being made or deleted, and does not name its blob"]);
    let other = vec![flags(THIN), internal(XATTR_SNAPSHOT, id(2).0)];
    let store = cut(XATTR_SNAPSHOT_PENDING_REMOVAL, false).blob(6, other);
    let (loaded, words) = scanned(&store);
    assert_eq!(words[0], expected);
    assert!(loaded.blob(id(2)).is_some());
}

#[test]
fn a_store_of_version_1_is_scanned_although_it_is_clean() {
    let mut store = MadeStore::new().blob(0, vec![flags(0), table(1, &[1])]).extents(1, 0, &[9]);
    store.super_block.version = 1;
    store.super_block.clean = true;
    store.super_block.used_blob_ids = None;
    store.super_block.size_bytes = None;
    let (loaded, words) = scanned(&store.sealed());
    assert!(words.is_empty());
    assert_eq!((clusters(&loaded, 0), loaded.free_clusters()), (vec![Some(9)], 59));
}

fn load_error(change: impl FnOnce(&mut MadeStore)) -> String {
    let mut store = MadeStore::new();
    change(&mut store);
    store.sealed().device.load(false).unwrap_err().to_string()
}

#[test]
fn a_store_that_does_not_fit_its_device_is_refused() {
    assert_eq!(
        load_error(|store| store.device.bytes -= 1),
        "the blobstore has 2097152 bytes, but its device only 2097151"
    );
    assert_eq!(
        load_error(|store| store.super_block.metadata.pages = 600),
        "the blobstore has 2473984 bytes of metadata, but only 2097152 in all"
    );
    assert_eq!(
        load_error(|store| store.super_block.used_clusters = PageRange { start: 900, pages: 1 }),
        "the mask of used clusters has 4096 bytes for 64 bits, or is not before the end of the metadata"
    );
    assert_eq!(
        load_error(|store| {
            store.super_block.size_bytes = Some(1 << 48);
            store.device.bytes = 1 << 48;
        }),
        "the blobstore has 8589934592 clusters, more than the format can count"
    );
    let error = BlobStoreLoader::new(4095, LoadOptions::default()).outcome().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "there is no blobstore: the device has 4095 bytes");
}

#[test]
fn a_failed_read_fails_the_load_and_later_completions_are_ignored() {
    let store = MadeStore::new().unloaded();
    let mut loader = BlobStoreLoader::new(store.device.bytes, LoadOptions::default());
    let first = loader.next_read().unwrap();
    assert!(loader.next_read().is_none() && loader.outcome().is_none());
    let mut content = vec![0; first.length];
    store.device.read(first.offset, &mut content);
    loader.complete(first.id, Some(&content));
    let masks = [(); 3].map(|()| loader.next_read().unwrap());
    loader.complete(masks[1].id, None);
    loader.complete(masks[0].id, Some(&[0; 4096]));
    let error = loader.outcome().unwrap().unwrap_err();
    assert_eq!(error, LoadError::Read { offset: 8192, length: 4096 });
    assert!(loader.next_read().is_none() && loader.outcome().is_none());
}

#[test]
fn a_scan_reads_metadata_in_large_pieces_and_an_unloaded_store_only_what_is_used() {
    let mut store = MadeStore::new();
    store.super_block.metadata = PageRange { start: 4, pages: 1 << 14 };
    store.super_block.size_bytes = Some(1 << 29);
    store.device.bytes = 1 << 29;
    store.pages = BitMask::new(MaskKind::Pages, 1 << 14);
    store.blob_ids = BitMask::new(MaskKind::BlobIds, 1 << 14);
    store.clusters = BitMask::new(MaskKind::Clusters, 1 << 14);
    for cluster in 0..2049 {
        store.clusters.set(cluster);
    }
    let store = store.blob(0, vec![flags(THIN), table(1, &[16_000])]).extents(16_000, 0, &[0]);
    let reads = |store: &MadeStore| {
        let mut reads = Vec::new();
        let loaded = blobstore::load_with(store.device.bytes, LoadOptions::default(), |offset, out| {
            reads.push((offset, out.len()));
            store.device.read(offset, out);
            Ok::<(), LoadError>(())
        });
        (loaded.unwrap(), reads)
    };
    let (_, scan) = reads(&store);
    // The super block, what is in place of the three masks, and all pages.
    assert_eq!(scan.len(), 1 + 3 + 64);
    assert!(scan[4..].iter().all(|(_, length)| *length == 1 << 20));
    let (_, used) = reads(&store.unloaded());
    let page = |page: u64| (4096 * (4 + page), 4096);
    assert_eq!(used[1..], [(4096, 4096), (8192, 4096), (12_288, 4096), page(0), page(16_000)]);
}

#[path = "support/any.rs"]
mod any;

mod any_metadata {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn is_loaded_and_read_within_the_store(store in any::store(), scan: bool) {
            let loaded = store.make().device.load(scan).unwrap();
            for blob in loaded.blobs().values() {
                let (mut done, bytes) = (0, loaded.blob_bytes(blob).min(1 << 26));
                for piece in loaded.read(blob.id(), 0, bytes).unwrap() {
                    let Ok(piece) = piece else { break };
                    if let BlobSegment::Device { offset, length } = piece {
                        prop_assert!(offset >= u64::from(FIRST) * CLUSTER);
                        prop_assert!(offset + length <= u64::from(CLUSTERS) * CLUSTER);
                    }
                    prop_assert!(piece.length() > 0);
                    done += piece.length();
                }
                prop_assert!(done <= bytes);
                let used = blob.clusters().iter().all(|(_, cluster)| loaded.used_clusters().get(cluster));
                prop_assert!(used && blob.pages().iter().all(|page| loaded.used_pages().get(*page)));
            }
            prop_assert!(loaded.free_clusters() <= loaded.data_clusters());
            let _ = words(&loaded);
        }
    }
}

#[test]
fn ids_of_blobs_without_a_page_are_never_found() {
    let loaded = MadeStore::new().blob(0, vec![flags(0)]).device.load(false).unwrap();
    assert!(loaded.blob(BlobId(0)).is_none() && loaded.blob(BlobId(u64::MAX)).is_none());
}
