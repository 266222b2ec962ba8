//! Stores that SPDK wrote: volumes, relations, free clusters and contents are those that SPDK reported.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::{BTreeMap, BTreeSet};

use blobstore::{
    Blob, BlobId, BlobParent, BlobSegment, BlobStore, LoadError, LoadOptions, StoreFinding, StoreSeverity,
    load_with,
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use support::{Device, recorded_json};

/// The SHA-256 of a blob's first bytes, or of all.
fn sha256(device: &Device, store: &BlobStore, external: &Device, blob: &Blob, bytes: Option<u64>) -> String {
    let mut hash = Sha256::new();
    let bytes = bytes.unwrap_or(store.blob_bytes(blob));
    for piece in store.read(blob.id(), 0, bytes).unwrap() {
        device.copy(piece.unwrap(), external, |data| hash.update(data));
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn name(store: &BlobStore, id: BlobId) -> String {
    store.blob(id).unwrap().xattr_text(b"name").unwrap().into_owned()
}

fn by_uuid<'a>(store: &'a BlobStore, uuid: &Value) -> Option<&'a Blob> {
    store.blobs().values().find(|blob| blob.xattr_text(b"uuid").as_deref() == uuid.as_str())
}

/// The device outside the store that a blob has data of, if it is degraded without.
fn external_name(store: &BlobStore, blob: &Blob) -> Option<String> {
    match blob.parent() {
        BlobParent::None => None,
        BlobParent::Snapshot(parent) => external_name(store, store.blob(*parent).unwrap()),
        BlobParent::External(name) => Some(String::from_utf8(name.clone()).unwrap().replace('\0', "")),
    }
}

fn compare_store(store: &BlobStore, lvstore: &Value) {
    let owner = store.blob(store.super_block().super_blob.unwrap()).unwrap();
    assert_eq!(owner.xattr_text(b"name").as_deref(), lvstore["name"].as_str());
    assert_eq!(owner.xattr_text(b"uuid").as_deref(), lvstore["uuid"].as_str());
    assert_eq!(store.super_block().store_type_text(), "LVOLSTORE");
    assert_eq!(store.data_clusters(), lvstore["total_data_clusters"]);
    assert_eq!(store.layout().cluster_bytes, lvstore["cluster_size"]);
    assert_eq!(store.super_block().io_unit_bytes, lvstore["block_size"]);
}

fn compare_volume(store: &BlobStore, lvol: &Value, bdev: &Value) {
    let blob = by_uuid(store, &lvol["uuid"]).unwrap_or_else(|| panic!("{lvol}"));
    let about = lvol["name"].as_str().unwrap();
    assert_eq!(blob.xattr_text(b"name").as_deref(), Some(about));
    assert_eq!(blob.is_thin(), lvol["is_thin_provisioned"], "{about}");
    assert_eq!(!store.clones(blob.id()).is_empty(), lvol["is_snapshot"], "{about}");
    assert_eq!(matches!(blob.parent(), BlobParent::Snapshot(_)), lvol["is_clone"], "{about}");
    assert_eq!(matches!(blob.parent(), BlobParent::External(_)), lvol["is_esnap_clone"], "{about}");
    assert_eq!(blob.clusters().allocated(), lvol["num_allocated_clusters"], "{about}");
    assert!(!store.clones(blob.id()).is_empty() <= blob.is_read_only(), "{about}");
    assert!((about == "ro") <= blob.is_read_only());
    let bytes = bdev["num_blocks"].as_u64().unwrap() * bdev["block_size"].as_u64().unwrap();
    assert_eq!(store.blob_bytes(blob), bytes, "{about}");
    let driver = &bdev["driver_specific"]["lvol"];
    let parent = match blob.parent() {
        BlobParent::Snapshot(parent) => Value::from(name(store, *parent)),
        _ => Value::Null,
    };
    assert_eq!(parent, driver["base_snapshot"], "{about}");
    if lvol["is_esnap_clone"] == true {
        assert_eq!(external_name(store, blob).as_deref(), driver["external_snapshot_name"].as_str());
    }
    let clones: BTreeSet<String> = store.clones(blob.id()).iter().map(|id| name(store, *id)).collect();
    let expected =
        driver["clones"].as_array().into_iter().flatten().map(|name| name.as_str().unwrap().into());
    assert_eq!(clones, expected.collect::<BTreeSet<String>>(), "{about}");
}

/// Compares a store with what SPDK reported; its findings.
fn compare(image: &str) -> Vec<StoreFinding> {
    let (device, expected, external) =
        (Device::recorded(image), recorded_json(image), Device::recorded("esnap"));
    let store = device.load(false).unwrap();
    let scanned = device.load(true).unwrap();
    assert!(store.blobs() == scanned.blobs() && store.findings() == scanned.findings());
    compare_store(&store, &expected["lvstores"][0]);
    let lvols = expected["lvols"].as_array().unwrap();
    // The super blob is no volume.
    assert_eq!(store.blobs().len(), lvols.len() + 1);
    let bdevs: BTreeMap<&str, &Value> = expected["bdevs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|bdev| (bdev["uuid"].as_str().unwrap(), bdev))
        .collect();
    for lvol in lvols {
        compare_volume(&store, lvol, bdevs[lvol["uuid"].as_str().unwrap()]);
        let blob = by_uuid(&store, &lvol["uuid"]).unwrap();
        let sum = sha256(&device, &store, &external, blob, None);
        assert_eq!(sum, expected["sha256"][lvol["alias"].as_str().unwrap()], "{lvol}");
    }
    assert_eq!(store.free_clusters(), expected["lvstores"][0]["free_clusters"], "{:?}", store.findings());
    assert!(store.unusable().is_empty());
    let worst = store.findings().iter().map(StoreFinding::severity).max();
    assert!(worst <= Some(StoreSeverity::Note), "{:?}", store.findings());
    store.findings().to_vec()
}

#[test]
fn a_store_on_blocks_of_512_bytes_is_as_spdk_reports_it() {
    assert_eq!(compare("lvs-512"), []);
}

#[test]
fn a_store_on_blocks_of_4_kib_is_as_spdk_reports_it() {
    assert_eq!(compare("lvs-4k"), []);
}

#[test]
fn a_store_in_clusters_of_4_mib_is_as_spdk_reports_it() {
    assert_eq!(compare("lvs-c4m"), []);
}

#[test]
fn a_store_with_metadata_pages_of_8_kib_is_as_spdk_reports_it() {
    assert_eq!(compare("lvs-md8k"), []);
}

#[test]
fn a_store_that_grew_with_its_device_is_as_spdk_reports_it() {
    assert_eq!(compare("lvs-grown"), []);
}

#[test]
fn a_store_that_was_killed_is_as_spdk_recovers_it() {
    assert_eq!(compare("lvs-dirty"), [StoreFinding::NotUnloaded]);
}

#[test]
fn stores_that_were_killed_amid_changes_are_as_spdk_recovers_them() {
    for image in ["lvs-race0", "lvs-race2", "lvs-race4", "lvs-race5"] {
        assert_eq!(compare(image), [StoreFinding::NotUnloaded], "{image}");
    }
    // A snapshot of the volume `thin`, 0x100000003, whose clusters the volume still had.
    let words = |image| compare(image).iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(
        words("lvs-race1")[1..],
        ["snapshot 0x10000001d of blob 0x100000003 was being made; that is undone"]
    );
    // The same, but it had them no more.
    assert_eq!(
        words("lvs-race3")[1..],
        ["snapshot 0x10000001e of blob 0x100000003 was being made; that is finished"]
    );
}

#[test]
fn a_clone_is_degraded_without_its_external_snapshot() {
    let store = Device::recorded("lvs-512").load(false).unwrap();
    let expected = recorded_json("lvs-degraded");
    let lvols = expected["lvols"].as_array().unwrap();
    assert!(lvols.iter().any(|lvol| lvol["is_degraded"] == true));
    for lvol in lvols {
        let blob = by_uuid(&store, &lvol["uuid"]).unwrap();
        assert_eq!(external_name(&store, blob).is_some(), lvol["is_degraded"], "{lvol}");
        let mut pieces = store.read(blob.id(), 0, store.blob_bytes(blob)).unwrap();
        let reads_it = pieces
            .any(|piece| matches!(piece, Ok(BlobSegment::External { clone, .. }) if clone == blob.id()));
        assert_eq!(reads_it, lvol["is_degraded"], "{lvol}");
    }
}

#[test]
fn blobs_without_volumes_have_the_contents_and_xattrs_that_blobcli_wrote() {
    let (device, expected) = (Device::recorded("blobs-plain"), recorded_json("blobs-plain"));
    let store = load_with(device.bytes, LoadOptions::default(), |offset, out| {
        device.read(offset, out);
        Ok::<(), LoadError>(())
    });
    let store = store.unwrap();
    assert_eq!(store.findings(), []);
    assert_eq!(store.super_block().super_blob, Some(BlobId(0x1_0000_0000)));
    let sizes: Vec<(u64, u32)> =
        store.blobs().values().map(|blob| (blob.id().0, blob.clusters().length())).collect();
    assert_eq!(sizes, [(0x1_0000_0000, 1), (0x1_0000_0002, 4), (0x1_0000_0004, 2)]);
    for (id, bytes, key) in [
        (0x1_0000_0002, None, "0x100000002 whole"),
        (0x1_0000_0002, Some(1_228_800), "0x100000002 first 1228800 bytes"),
        (0x1_0000_0004, None, "0x100000004 whole"),
    ] {
        let sum = sha256(&device, &store, &Device::default(), store.blob(BlobId(id)).unwrap(), bytes);
        assert_eq!(sum, expected["sha256"][key]);
    }
    let blob = store.blob(BlobId(0x1_0000_0002)).unwrap();
    let xattrs = expected["xattrs"]["0x100000002"].as_object().unwrap();
    assert_eq!(blob.xattrs().len(), xattrs.len());
    for (name, value) in xattrs {
        assert_eq!(blob.xattr(name.as_bytes()), value.as_str().map(str::as_bytes));
    }
    assert_eq!((blob.pages(), blob.extent_pages()), (&[2][..], &[(0, 3)][..]));
}
