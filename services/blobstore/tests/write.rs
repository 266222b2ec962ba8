//! Changes of stores that SPDK wrote, and the order of what is written.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;

use blobstore::{
    BlobChange, BlobId, BlobParent, BlobStore, BlobStoreDevice, BlobStoreFormat, ChangeError, ChangeId,
    ChangeOutcome, ClearMethod, OpenBlobStore, StoreAction, StoreEvent, StoreSeverity, Xattr,
};
use support::Device;

/// A store on a device that completes I/O one after another, with a channel that needs nothing.
struct Driver {
    device: Device,
    open: OpenBlobStore,
    done: BTreeMap<ChangeId, Result<ChangeOutcome, ChangeError>>,
    /// Offsets of writes, and flushes.
    log: Vec<Option<u64>>,
}

fn promises(device: &Device) -> BlobStoreDevice {
    BlobStoreDevice {
        bytes: device.bytes,
        block_bytes: 512,
        has_volatile_cache: true,
        atomic_write_bytes: 4096,
    }
}

impl Driver {
    fn open(device: Device, store: BlobStore) -> Driver {
        let open = OpenBlobStore::open(store, promises(&device));
        let mut driver = Driver { device, open, done: BTreeMap::new(), log: Vec::new() };
        driver.run();
        driver
    }

    fn format(bytes: u64, options: &BlobStoreFormat) -> Driver {
        let device = Device::new(bytes);
        let (open, change) = OpenBlobStore::format(options, promises(&device)).unwrap();
        let mut driver = Driver { device, open, done: BTreeMap::new(), log: Vec::new() };
        driver.run();
        driver.done.remove(&change).unwrap().unwrap();
        driver
    }

    fn run(&mut self) {
        loop {
            while let Some(event) = self.open.next_event() {
                match event {
                    StoreEvent::Done { change, result } => drop(self.done.insert(change, result)),
                    StoreEvent::Published { epoch } => self.open.release(epoch),
                    StoreEvent::Pause { blob } => self.open.paused(blob),
                    StoreEvent::WriteCluster { change, offset } => {
                        self.device.write(offset, b"written by a channel");
                        self.open.cluster_written(change, Ok(()));
                    }
                    StoreEvent::Resume { .. } | StoreEvent::LowSpace { .. } => {}
                }
            }
            let Some(io) = self.open.next_io() else { return };
            self.io(&io.action);
            self.open.complete(io.id, Ok(()));
        }
    }

    fn io(&mut self, action: &StoreAction) {
        match action {
            StoreAction::Write { offset, data } => {
                self.log.push(Some(*offset));
                self.device.write(*offset, data);
            }
            StoreAction::WriteZeroes { offset, bytes } | StoreAction::Deallocate { offset, bytes } => {
                self.log.push(Some(*offset));
                let zeroes = vec![0; 1 << 16];
                let mut at = 0;
                while at < *bytes {
                    let length = (bytes - at).min(1 << 16);
                    self.device.clear(offset + at, &zeroes[..length as usize]);
                    at += length;
                }
            }
            StoreAction::Copy { from, offset } => {
                let external = Device::new(0);
                let (mut data, mut at) = (Vec::new(), *offset);
                from.iter().for_each(|piece| {
                    self.device.copy(*piece, &external, |part| data.extend_from_slice(part));
                });
                for part in data.chunks(1 << 16) {
                    self.device.write(at, part);
                    at += part.len() as u64;
                }
            }
            StoreAction::Flush => self.log.push(None),
        }
    }

    fn change(&mut self, change: BlobChange) -> Result<ChangeOutcome, ChangeError> {
        self.log.clear();
        let id = self.open.begin(change);
        self.run();
        assert!(self.open.is_idle());
        self.done.remove(&id).unwrap()
    }

    fn blob(&mut self, change: BlobChange) -> BlobId {
        match self.change(change) {
            Ok(ChangeOutcome::Blob(blob)) => blob,
            other => panic!("{other:?}"),
        }
    }

    /// Unloads the store, and loads it with a scan of everything.
    fn reload(mut self) -> (Device, BlobStore) {
        assert_eq!(self.change(BlobChange::Unload), Ok(ChangeOutcome::Done));
        let store = self.device.load(true).unwrap();
        assert!(store.super_block().clean);
        assert_eq!(store.findings(), []);
        (self.device, store)
    }
}

fn name(name: &str) -> Vec<Xattr> {
    let uuid = format!("90000000-0000-4000-8000-{:012}", name.len());
    let text = |name: &str, value: &str| {
        let value = format!("{value}\0").into_bytes();
        Xattr { name: name.as_bytes().to_vec(), value }
    };
    vec![text("name", name), text("uuid", &uuid)]
}

/// The bytes of each blob's own clusters, those of an external snapshot left out.
fn contents(device: &Device, store: &BlobStore) -> BTreeMap<BlobId, u32> {
    let external = Device::new(0);
    let of = |blob: &blobstore::Blob| {
        let mut sum = codec::crc32c(&[]);
        for piece in store.read(blob.id(), 0, store.blob_bytes(blob)).unwrap() {
            device.copy(piece.unwrap(), &external, |part| {
                sum = codec::crc32c(&[&sum.to_le_bytes()[..], part].concat());
            });
        }
        (blob.id(), sum)
    };
    store.blobs().values().map(of).collect()
}

#[test]
fn whose_the_checksums_are_is_said_until_another_program_changes_the_store() {
    let ids = [[1; 16], [2; 16]];
    // With and without space for it in the last page of the mask.
    for clusters in [200, 8 * (4096 - 5 - 16)] {
        let format = BlobStoreFormat {
            cluster_bytes: 16 << 10,
            checksums: Some(ids[0]),
            super_blob: Some(name("store")),
            ..BlobStoreFormat::default()
        };
        let driver = Driver::format(clusters * (16 << 10), &format);
        // Also before it is unloaded, once a blob was made.
        let mut driver = driver;
        driver.blob(BlobChange::Create {
            thin: true,
            clusters: 1,
            xattrs: name("a"),
            clear: ClearMethod::None,
        });
        assert_eq!(driver.device.load(false).unwrap().checksums(), Some(ids[0]));
        let (device, store) = driver.reload();
        assert_eq!(store.checksums(), Some(ids[0]));
        let reopen = |device: Device, checksums| {
            let store = device.load(false).unwrap();
            let open = OpenBlobStore::open_with_checksums(store, promises(&device), checksums);
            let mut driver = Driver { device, open, done: BTreeMap::new(), log: Vec::new() };
            driver.change(BlobChange::SetSuperBlob { blob: None }).unwrap();
            driver
        };
        for (checksums, ends) in [(None, true), (None, false), (Some(ids[1]), true), (Some(ids[1]), false)] {
            let mut driver = reopen(device.clone(), checksums);
            if ends {
                driver.change(BlobChange::Unload).unwrap();
            }
            assert_eq!(driver.device.load(false).unwrap().checksums(), checksums, "{clusters} {ends}");
        }
    }
}

/// Changes a store that SPDK wrote: what it had stays, and the result has nothing wrong.
fn change_recorded(image: &str) {
    let device = Device::recorded(image);
    let store = device.load(false).unwrap();
    let before = contents(&device, &store);
    let mut driver = Driver::open(device, store);
    let clear = ClearMethod::Default;
    let thin = driver.blob(BlobChange::Create { thin: true, clusters: 700, clear, xattrs: name("new-thin") });
    let write = |index| BlobChange::AllocateCluster { blob: thin, index, written: 0..512 };
    for index in [0, 3, 699] {
        assert!(matches!(driver.change(write(index)), Ok(ChangeOutcome::Cluster(_))));
    }
    let snapshot = driver.blob(BlobChange::Snapshot { blob: thin, xattrs: name("new-snapshot") });
    let clone = driver.blob(BlobChange::Clone { of: snapshot, xattrs: name("new-clone") });
    assert!(matches!(driver.change(write(1)), Ok(ChangeOutcome::Cluster(_))));
    assert_eq!(driver.change(BlobChange::Delete { blob: snapshot }), Err(ChangeError::HasClones(2)));
    let (loaded, done) = (driver.device.load(true).unwrap(), Ok(ChangeOutcome::Done));
    assert!(loaded.findings().iter().all(|finding| finding.severity() == StoreSeverity::Note));
    assert_eq!(driver.change(BlobChange::Delete { blob: clone }), done);
    assert_eq!(driver.change(BlobChange::Delete { blob: snapshot }), done);
    assert_eq!(driver.change(BlobChange::Resize { blob: thin, clusters: 2 }), done);
    let (device, store) = driver.reload();
    let mut after = contents(&device, &store);
    assert!(after.remove(&thin).is_some());
    assert_eq!(after, before, "{image}");
    let blob = store.blob(thin).unwrap();
    assert_eq!((blob.clusters().length(), blob.clusters().allocated()), (2, 2));
}

#[test]
fn stores_of_spdk_are_changed_and_keep_what_they_had() {
    for image in ["lvs-512", "lvs-4k", "lvs-c4m", "lvs-md8k", "lvs-grown", "blobs-plain"] {
        change_recorded(image);
    }
}

#[test]
fn stores_that_spdk_left_amid_changes_are_recovered_and_changed() {
    for image in ["lvs-dirty", "lvs-race0", "lvs-race1", "lvs-race2", "lvs-race3", "lvs-race4", "lvs-race5"] {
        change_recorded(image);
    }
}

#[test]
fn opening_an_unloaded_store_writes_nothing() {
    let device = Device::recorded("lvs-512");
    let store = device.load(false).unwrap();
    let mut driver = Driver::open(device, store);
    assert_eq!(driver.change(BlobChange::Unload), Ok(ChangeOutcome::Done));
    assert_eq!(driver.log, []);
    assert_eq!(driver.change(BlobChange::Grow { device_bytes: 1 << 40 }), Err(ChangeError::Broken));
}

/// The sizes that SPDK chose for the recorded stores.
#[test]
fn a_new_store_has_the_layout_of_spdks() {
    for (image, cluster_bytes, page_bytes) in
        [("lvs-512", 1 << 20, 4096), ("lvs-c4m", 4 << 20, 4096), ("lvs-md8k", 1 << 20, 8192)]
    {
        let recorded = Device::recorded(image).load(false).unwrap();
        let options =
            BlobStoreFormat { cluster_bytes, metadata_page_bytes: page_bytes, ..BlobStoreFormat::default() };
        let bytes = recorded.layout().store_bytes;
        let (_, store) = Driver::format(bytes, &options).reload();
        let (found, expected) = (store.super_block(), recorded.super_block());
        assert_eq!((found.used_pages, found.metadata), (expected.used_pages, expected.metadata), "{image}");
        assert_eq!(
            (found.used_clusters, found.used_blob_ids),
            (expected.used_clusters, expected.used_blob_ids)
        );
        assert_eq!((store.layout(), store.data_clusters()), (recorded.layout(), recorded.data_clusters()));
    }
}

/// An extent table has 0 where a blob has no extent page.
#[test]
fn page_0_is_no_extent_page_of_a_store_without_super_blob() {
    let options = BlobStoreFormat { cluster_bytes: 1 << 20, super_blob: None, ..BlobStoreFormat::default() };
    let mut driver = Driver::format(64 << 20, &options);
    let create = |clusters| BlobChange::Create {
        thin: false,
        clusters,
        clear: ClearMethod::Default,
        xattrs: Vec::new(),
    };
    let first = driver.blob(create(0));
    let blob = driver.blob(create(0));
    assert_eq!(first, BlobId::from_page(0));
    driver.change(BlobChange::Delete { blob: first }).unwrap();
    driver.change(BlobChange::Resize { blob, clusters: 3 }).unwrap();
    // It is free for a first page.
    assert_eq!(driver.blob(create(0)), first);
    let (_, store) = driver.reload();
    assert_eq!(store.blob(blob).map(|blob| blob.clusters().allocated()), Some(3));
    assert!(store.findings().is_empty(), "{:?}", store.findings());
}

#[test]
fn sizes_that_no_store_can_have_are_refused() {
    let device = promises(&Device::new(96 << 20));
    let format = |options: BlobStoreFormat| OpenBlobStore::format(&options, device).err();
    let with = |cluster_bytes, metadata_page_bytes, metadata_pages_percent| BlobStoreFormat {
        cluster_bytes,
        metadata_page_bytes,
        metadata_pages_percent,
        ..BlobStoreFormat::default()
    };
    assert!(matches!(format(with(2048, 4096, 100)), Some(ChangeError::Invalid(_))));
    assert!(matches!(format(with(8192, 2048, 100)), Some(ChangeError::Invalid(_))));
    assert!(matches!(format(with(1 << 20, 1 << 17, 100)), Some(ChangeError::Invalid(_))));
    assert_eq!(format(with(4096, 4096, 100)), Some(ChangeError::NoPages));
    assert_eq!(format(with(200 << 20, 4096, 100)), Some(ChangeError::NoClusters { need: 1, free: 0 }));
    assert!(matches!(format(with(4 << 20, 4096, 1)), Some(ChangeError::Invalid(_))));
    assert_eq!(format(with(4 << 20, 4096, 100)), None);
}

#[test]
fn a_blob_is_deleted_by_its_first_page_alone() {
    let mut driver = Driver::format(96 << 20, &BlobStoreFormat::default());
    let large = Xattr { name: b"large".to_vec(), value: vec![7; 4000] };
    let xattrs = [name("long"), vec![large]].concat();
    let clear = ClearMethod::Unmap;
    let blob = driver.blob(BlobChange::Create { thin: false, clusters: 3, clear, xattrs });
    let store = driver.open.published().clone();
    let (first, others) = store.blob(blob).unwrap().pages().split_first().unwrap();
    assert!(!others.is_empty());
    assert_eq!(driver.change(BlobChange::Delete { blob }), Ok(ChangeOutcome::Done));
    assert_eq!(driver.log[..2], [Some(store.layout().page_offset(*first)), None]);
    let mut page = [1; 4096];
    driver.device.read(store.layout().page_offset(others[0]), &mut page);
    assert_eq!(page, [0; 4096]);
    assert_eq!(driver.open.free_clusters(), store.free_clusters() + 3);
}

#[test]
fn a_first_write_flushes_once_between_data_and_cluster_map() {
    let mut driver = Driver::format(96 << 20, &BlobStoreFormat::default());
    let clear = ClearMethod::Default;
    let blob = driver.blob(BlobChange::Create { thin: true, clusters: 9, clear, xattrs: name("thin") });
    let write = |index| BlobChange::AllocateCluster { blob, index, written: 0..4 << 20 };
    driver.change(write(0)).unwrap();
    driver.change(write(1)).unwrap();
    let store = driver.open.published();
    let extents = store.layout().page_offset(store.blob(blob).unwrap().extent_pages()[0].1);
    assert_eq!(driver.log, [None, Some(extents)]);
}

#[test]
fn parents_that_make_no_sense_are_refused() {
    let mut driver = Driver::format(96 << 20, &BlobStoreFormat::default());
    let clear = ClearMethod::Default;
    let blob = driver.blob(BlobChange::Create { thin: true, clusters: 4, clear, xattrs: name("thin") });
    let old = driver.blob(BlobChange::Snapshot { blob, xattrs: name("older") });
    let new = driver.blob(BlobChange::Snapshot { blob, xattrs: name("newer") });
    let set = |blob, parent| BlobChange::SetParent { blob, parent };
    assert_eq!(driver.change(set(blob, new)), Err(ChangeError::Exists));
    for (blob, parent) in [(old, new), (old, old), (new, blob)] {
        assert!(matches!(driver.change(set(blob, parent)), Err(ChangeError::Invalid(_))), "{blob} {parent}");
    }
    assert_eq!(driver.change(set(blob, old)), Ok(ChangeOutcome::Done));
    let (_, store) = driver.reload();
    assert_eq!(store.blob(blob).unwrap().parent(), &BlobParent::Snapshot(old));
    assert_eq!(store.clones(old), [blob, new]);
}
