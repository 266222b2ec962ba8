//! `ringbolt blob` on stores that SPDK wrote.
#![allow(clippy::unwrap_used)]

mod rig;

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rig::{ringbolt, scratch, text};
use serde_json::Value;

/// A recorded image as a sparse file.
fn image(directory: &Path, name: &str) -> PathBuf {
    let recorded = concat!(env!("CARGO_MANIFEST_DIR"), "/../../services/blobstore/tests/golden");
    let file = File::open(format!("{recorded}/{name}.img.zst")).unwrap();
    let mut content = ruzstd::decoding::StreamingDecoder::new(std::io::BufReader::new(file)).unwrap();
    let path = directory.join(name);
    let file = File::create_new(&path).unwrap();
    let (mut offset, mut block) = (0, Vec::new());
    while content.by_ref().take(4096).read_to_end(&mut block).unwrap() > 0 {
        if block.iter().any(|byte| *byte != 0) {
            file.write_all_at(&block, offset).unwrap();
        }
        offset += block.len() as u64;
        block.clear();
    }
    file.set_len(offset).unwrap();
    path
}

/// Exit status, standard output and standard error.
fn blob(command: &str, path: &Path, more: &[&str]) -> (i32, String, String) {
    let output = ringbolt(&[&["blob", command, path.to_str().unwrap()], more].concat());
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn volumes_are_listed_with_their_relations() {
    let directory = scratch("blob-list");
    let path = image(&directory, "lvs-512");
    let (status, listed, _) = blob("list", &path, &[]);
    assert_eq!(status, 0);
    let first = "LVOLSTORE lvs: 71 of 95 clusters of 1024 KiB are free; version 3, unloaded";
    assert_eq!(listed.lines().next(), Some(first));
    let row = |name: &str| {
        let is_row = |line: &&str| line.split_whitespace().nth(1) == Some(name);
        let row = listed.lines().find(is_row).unwrap_or_else(|| panic!("no {name} in {listed}"));
        row.split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row("thick"), "thick 4194304 4 of 4");
    assert_eq!(row("thin"), "thin 8388608 0 of 8 thin snap2");
    assert_eq!(row("snap2"), "snap2 8388608 1 of 8 thin read-only snapshot snap1 thin");
    assert_eq!(row("esclone"), "esclone 4194304 1 of 4 thin external e5e5e5e5-0000-4000-8000-000000000001");
    let json: Value = serde_json::from_str(&blob("list", &path, &["--json"]).1).unwrap();
    assert_eq!((&json["free_clusters"], json["blobs"].as_array().unwrap().len()), (&71.into(), 13));
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn the_metadata_is_printed() {
    let directory = scratch("blob-dump");
    let path = image(&directory, "lvs-512");
    let (status, dumped, _) = blob("dump", &path, &[]);
    assert_eq!(status, 0);
    for line in [
        "metadata: 96 pages of 4096 bytes at page 4",
        "blob 0x100000003: 8388608 bytes",
        "  internal xattr SNAP: 0x0900000001000000",
        "  xattr uuid: b9100a7c-390f-4d97-8ace-75da3b1a98f5",
        "  clusters 4 to 5: 8 to 9",
    ] {
        assert!(dumped.lines().any(|found| found == line), "no {line} in {dumped}");
    }
    let json: Value = serde_json::from_str(&blob("dump", &path, &["--json"]).1).unwrap();
    let thin = json["blobs"].as_array().unwrap().iter().find(|blob| blob["name"] == "thin").unwrap();
    assert_eq!((&thin["pages"], &thin["snapshot"]), (&serde_json::json!([3]), &"0x100000009".into()));
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_check_ends_with_status_1_if_something_is_wrong() {
    let directory = scratch("blob-check");
    let path = image(&directory, "lvs-race1");
    let (status, checked, _) = blob("check", &path, &[]);
    assert!(status == 0 && checked.contains("is undone\n"), "{checked}");
    assert!(checked.ends_with(" metadata pages, 0 problems\n"), "{checked}");
    // The first page of the volume `thick`. In a store that was not unloaded, a power failure leaves such pages.
    File::options().write(true).open(&path).unwrap().write_all_at(b"x", 5 * 4096 + 100).unwrap();
    let (status, checked, _) = blob("check", &path, &[]);
    assert!(status == 0 && checked.ends_with(" metadata pages, 0 problems\n"), "{checked}");
    assert!(checked.contains("1 metadata page is neither empty nor valid: 1\n"), "{checked}");
    let path = image(&directory, "lvs-512");
    File::options().write(true).open(&path).unwrap().write_all_at(b"x", 5 * 4096 + 100).unwrap();
    let (status, checked, error) = blob("check", &path, &["--json"]);
    let checked: Value = serde_json::from_str(&checked).unwrap();
    assert_eq!((status, checked["problems"].as_u64()), (1, Some(4)), "{checked}");
    let reason = "metadata page 1, its first one, is not the first page of a blob";
    assert_eq!(checked["unusable"], serde_json::json!([{"id": "0x100000001", "reason": reason}]));
    assert!(error.ends_with("4 problems\n"), "{error}");
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn what_is_no_store_or_is_in_use_is_refused_with_what_to_do() {
    let directory = scratch("blob-refused");
    let path = image(&directory, "blobs-plain");
    let writer = File::options().write(true).open(&path).unwrap();
    rustix::fs::flock(&writer, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let (status, _, error) = blob("list", &path, &[]);
    assert_eq!(status, 4);
    assert!(error.contains("has it open for writing; end that first, or check a copy"), "{error}");
    drop(writer);
    assert_eq!(blob("list", &path, &[]).0, 0);
    File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    let (status, _, error) = blob("list", &path, &[]);
    let expected =
        "the blobstore has 67108864 bytes, but its device only 1048576; a copy needs the whole device";
    assert!(status == 1 && error.contains(expected), "{error}");
    let other = directory.join("other");
    std::fs::write(&other, [7; 8192]).unwrap();
    let (status, _, error) = blob("check", &other, &[]);
    assert!(
        status == 1 && error.contains("name the device or file that SPDK's store was made on"),
        "{error}"
    );
    assert_eq!(blob("check", &directory.join("none"), &[]).0, 4);
    let (status, _, error) = blob("list", &directory, &[]);
    assert!(status == 4 && error.contains("neither a file nor a block device"), "{error}");
    std::fs::remove_dir_all(directory).unwrap();
}

/// The content of each blob, as the store says where it is.
fn contents(path: &Path) -> Value {
    let json: Value = serde_json::from_str(&blob("dump", path, &["--json"]).1).unwrap();
    let cluster_bytes = json["cluster_bytes"].as_u64().unwrap();
    let file = File::open(path).unwrap();
    let mut blobs = json["blobs"].clone();
    for blob in blobs.as_array_mut().unwrap() {
        let mut sum = 0_u64;
        for run in blob["runs"].as_array().unwrap() {
            let [cluster, length] = ["cluster", "length"].map(|key| run[key].as_u64().unwrap());
            let mut data = vec![0; (length * cluster_bytes) as usize];
            file.read_exact_at(&mut data, cluster * cluster_bytes).unwrap();
            sum = data.iter().fold(sum, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
        }
        // Metadata may be written elsewhere.
        ["pages", "extent_pages"].iter().for_each(|key| drop(blob.as_object_mut().unwrap().remove(*key)));
        blob["sum"] = sum.into();
    }
    blobs
}

#[test]
fn a_repair_is_printed_first_and_made_when_it_is_asked_for() {
    let directory = scratch("blob-repair");
    let path = image(&directory, "lvs-race1");
    let before = (contents(&path), std::fs::read(&path).unwrap());
    let (status, printed, _) = blob("repair", &path, &[]);
    assert_eq!(status, 0);
    assert!(printed.contains("to do: write the masks, and unload the store\n"), "{printed}");
    assert!(printed.ends_with(" repairs to make with --apply, 0 problems left then\n"), "{printed}");
    assert_eq!(std::fs::read(&path).unwrap(), before.1, "nothing was asked for");
    let (status, printed, error) = blob("repair", &path, &["--apply"]);
    assert_eq!((status, &error[..]), (0, ""));
    assert!(printed.contains("done: write the masks, and unload the store\n"), "{printed}");
    assert!(printed.ends_with(" repairs made, 0 problems left\n"), "{printed}");
    assert_eq!(contents(&path), before.0);
    let checked: Value = serde_json::from_str(&blob("check", &path, &["--json"]).1).unwrap();
    assert_eq!((&checked["clean"], &checked["findings"]), (&true.into(), &serde_json::json!([])));
    let json: Value = serde_json::from_str(&blob("repair", &path, &["--apply", "--json"]).1).unwrap();
    assert_eq!(
        (&json["applied"], &json["repairs"], &json["problems"]),
        (&true.into(), &serde_json::json!([]), &0.into())
    );
    // The mask of clusters, which begins at page 2, loses a cluster that has an owner and gets one without.
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let mut mask = [0; 17];
    file.read_exact_at(&mut mask, 2 * 4096).unwrap();
    let (owned, free) = (mask[6].trailing_zeros(), mask[5..].iter().rposition(|byte| *byte == 0).unwrap());
    mask[6] &= !(1 << owned);
    mask[5 + free] |= 1;
    file.write_all_at(&mask, 2 * 4096).unwrap();
    drop(file);
    assert_eq!(blob("check", &path, &[]).0, 1);
    let (status, printed, _) = blob("repair", &path, &["--apply"]);
    assert!(status == 0 && printed.ends_with("2 repairs made, 0 problems left\n"), "{printed}");
    assert_eq!(contents(&path), before.0);
    assert_eq!(blob("check", &path, &[]).0, 0);
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn what_cannot_be_proved_is_left_and_a_store_in_use_is_refused() {
    let directory = scratch("blob-repair-left");
    let path = image(&directory, "lvs-512");
    let file = File::options().read(true).write(true).open(&path).unwrap();
    // The first page of the volume `thick`.
    file.write_all_at(b"x", 5 * 4096 + 100).unwrap();
    let before = std::fs::read(&path).unwrap();
    let (status, printed, error) = blob("repair", &path, &["--apply"]);
    assert_eq!(status, 1, "{printed}");
    assert!(error.contains("problems cannot be repaired; copy what can be read to another store"), "{error}");
    let unusable = "left: blob 0x100000001 cannot be used: metadata page 1, its first one, is not the first page of a blob";
    assert!(printed.lines().any(|line| line == unusable), "{printed}");
    assert_eq!(std::fs::read(&path).unwrap(), before, "its clusters stay used");
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockShared).unwrap();
    assert_eq!(blob("repair", &path, &[]).0, 1, "readers are no hindrance to a reader");
    let (status, _, error) = blob("repair", &path, &["--apply"]);
    assert!(status == 4 && error.contains("has it open; end that first, or repair a copy"), "{error}");
    std::fs::remove_dir_all(directory).unwrap();
}
