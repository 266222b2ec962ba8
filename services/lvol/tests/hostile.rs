//! Stores with any bytes: nothing panics, and what is damaged is not served.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "../../blobstore/tests/support/mod.rs"]
mod support;

use codec::crc32c;
use control::json::json;
use random::WyRand;
use rig::Program;
use support::Device;
use support::made::*;
use wire_blob::{BlobFlags, BlobId, MetadataDescriptor, XATTR_SNAPSHOT, Xattr};

/// Writes a page of 4 KiB with a right CRC.
fn write_sealed(device: &mut Device, offset: u64, page: &mut [u8; 4096]) {
    let crc = crc32c(&page[..4092]);
    page[4092..].copy_from_slice(&crc.to_le_bytes());
    device.write(offset, page);
}

/// A program finds the store on a device, if there is one, and all volumes are read.
fn examine(program: &Program, image: Device) -> usize {
    program.add("disk", image, 512);
    let lvols = program.lvols();
    let mut count = 0;
    for lvol in &lvols {
        let alias = lvol["alias"].as_str().unwrap();
        if program.registry.find(alias).is_some_and(|device| device.geometry().bytes() <= 64 << 20) {
            program.content(alias).unwrap();
            count += 1;
        }
    }
    program.remove("disk");
    assert_eq!(program.registry.claims(), []);
    assert!(program.registry.list().is_empty());
    count
}

#[test]
fn pages_of_random_bytes_with_a_right_crc_never_panic() {
    let program = Program::start();
    let recorded = Device::recorded("lvs-512");
    let layout = recorded.load(false).unwrap().layout().clone();
    let mut read = 0;
    for seed in 0..24 {
        let (mut rng, mut image) = (WyRand::new(seed), recorded.clone());
        for _ in 0..1 + rng.below(4) {
            // Super block, masks, and the pages that are used.
            let offset = match rng.below(4) {
                0 => 0,
                1 => 4096 * (1 + rng.below(4)),
                _ => layout.page_offset(rng.below(40) as u32),
            };
            let mut page = [0; 4096];
            image.read(offset, &mut page);
            // The signature, and the type of the store, stay.
            for _ in 0..1 + rng.below(16) {
                let at = if offset == 0 { 12 + rng.below(44) } else { rng.below(4092) };
                page[at as usize] = rng.next_bits() as u8;
            }
            write_sealed(&mut image, offset, &mut page);
        }
        read += examine(&program, image);
    }
    assert!(read > 24, "{read} volumes were read");
    assert_eq!(examine(&program, recorded), 11);
}

fn text(name: &[u8], value: &str) -> MetadataDescriptor {
    MetadataDescriptor::Xattr(Xattr { name: name.to_vec(), value: format!("{value}\0").into_bytes() })
}

fn uuid(number: u32) -> String {
    format!("00000000-0000-4000-8000-{number:012}")
}

/// A store of logical volumes whose super blob is page 0.
fn made() -> MadeStore {
    let mut store = MadeStore::new();
    store.super_block.store_type = *b"LVOLSTORE\0\0\0\0\0\0\0";
    store.super_block.super_blob = Some(id(0));
    store.sealed().blob(0, vec![text(b"uuid", &uuid(0)), text(b"name", "made")])
}

fn volume(store: MadeStore, page: u32, name: &str, more: Vec<MetadataDescriptor>) -> MadeStore {
    let thin = flags(BlobFlags::THIN);
    let mut descriptors = vec![thin, table(2, &[0]), text(b"uuid", &uuid(page)), text(b"name", name)];
    descriptors.extend(more);
    store.blob(page, descriptors)
}

#[test]
fn volumes_whose_snapshots_are_missing_or_circular_are_listed_and_not_served() {
    let program = Program::start();
    let parent = |page: u32| internal(XATTR_SNAPSHOT, BlobId::from_page(page).0);
    let store = volume(made(), 1, "zeroes", vec![]);
    let store = volume(store, 2, "orphan", vec![parent(9)]);
    let store = volume(store, 3, "circle", vec![parent(4)]);
    let store = volume(store, 4, "circle too", vec![parent(3)]);
    let store = volume(store, 5, "into it", vec![parent(3)]);
    let store = volume(store, 6, "zeroes", vec![]);
    let store = volume(store, 7, "clone", vec![parent(1)]);
    // Without a name it cannot be listed either.
    let store = store.blob(8, vec![flags(0), table(0, &[])]);
    program.add("disk", store.device, 512);
    let lvols = program.lvols();
    let degraded: Vec<(&str, bool)> = lvols
        .iter()
        .map(|lvol| (lvol["name"].as_str().unwrap(), lvol["is_degraded"].as_bool().unwrap()))
        .collect();
    assert_eq!(
        degraded,
        [
            ("zeroes", false),
            ("orphan", true),
            ("circle", true),
            ("circle too", true),
            ("into it", true),
            ("zeroes", false),
            ("clone", false)
        ]
    );
    let served: Vec<String> = program.registry.list().iter().map(|bdev| bdev.name().to_string()).collect();
    // The second volume of a name is none of them.
    assert_eq!(served, [uuid(1), uuid(7), "disk".to_string()]);
    assert!(program.content("made/clone").unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn a_store_without_identity_is_refused_and_its_device_free() {
    let program = Program::start();
    for attributes in [
        vec![],
        vec![text(b"uuid", &uuid(0))],
        vec![text(b"name", "made")],
        vec![text(b"uuid", "made"), text(b"name", "made")],
        vec![text(b"uuid", "00000000-0000-0000-0000-000000000000"), text(b"name", "made")],
        vec![text(b"uuid", &uuid(0)), text(b"name", "")],
    ] {
        let mut store = made();
        store.device.write(MadeStore::offset(0), &[0; 4096]);
        program.add("disk", store.blob(0, attributes).device, 512);
        assert_eq!(program.stores(), Vec::<control::json::Value>::new());
        assert_eq!(program.registry.claims(), []);
        program.remove("disk");
    }
    program.add("disk", made().device, 512);
    assert_eq!(program.stores()[0]["name"], "made");
}

#[test]
fn other_blobstores_and_blocks_of_other_sizes_are_left_alone() {
    let program = Program::start();
    program.add("test", MadeStore::new().device, 512);
    program.add("plain", Device::recorded("blobs-plain"), 512);
    // Blocks of 512 bytes cannot be read of a device of larger ones.
    program.add("large", Device::recorded("lvs-512"), 4096);
    program.add("larger", Device::recorded("lvs-512"), 8192);
    assert_eq!(program.call("bdev_lvol_get_lvstores", json!({})), json!([]));
    assert_eq!(program.registry.claims(), []);
    // The other way round they can.
    program.add("small", Device::recorded("lvs-4k"), 512);
    assert_eq!(program.stores()[0]["block_size"], 4096);
    let expected = support::recorded_json("lvs-4k");
    assert_eq!(program.sha256("lvs/thin"), expected["sha256"]["lvs/thin"]);
}

#[test]
fn volumes_without_uuid_are_named_by_store_and_blob() {
    let program = Program::start();
    let old = made().blob(3, vec![flags(BlobFlags::THIN), table(2, &[0]), text(b"name", "old")]);
    program.add("disk", old.device.clone(), 512);
    let name = format!("{}_{}", uuid(0), id(3).0);
    let first = program.registry.find(&name).unwrap();
    assert_eq!(program.lvols()[0]["uuid"], "00000000-0000-0000-0000-000000000000");
    assert_eq!(first.aliases()[..], ["made/old"]);
    program.remove("disk");
    program.add("disk", old.device, 512);
    assert_eq!(program.registry.find(&name).unwrap().uuid(), first.uuid(), "it keeps its UUID");
}
