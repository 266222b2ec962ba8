//! Differential backups of a cluster's images: what was exported and imported is the image, byte by byte, at
//! every snapshot. `RINGBOLT_BACKUP_SEED` sets what is written.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "rig/store.rs"]
mod store;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bdev::{Access, AsyncChannel, Registry};
use random::WyRand;
use reactor::{Core, Reactor, ReactorConfig};
use rig::{scratch, text};
use rustix::process::Signal;
use serde_json::Value;
use store::{Cluster, signal};
use store_client::{
    AttachOptions, ClusterImage, DiffError, DiffExport, DiffPosition, EtcdOptions, ImageName, ImportOptions,
    ImportedDiff, ReclaimError, create_snapshot, import_diff,
};
use wire_store::{DiffDecoder, DiffItem};

const SIZE: [&str; 2] = ["--size=400m", "--log-size=4m"];
const BLOCK: usize = 512;
const MIB: usize = 1 << 20;

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn stderr_of(output: &Output) -> String {
    assert!(!output.status.success(), "{}", text(&output.stdout));
    text(&output.stderr)
}

fn refused(cluster: &Cluster, arguments: &[&str], reason: &str) {
    let said = stderr_of(&cluster.run(&[&["image"][..], arguments].concat()));
    assert!(said.contains(reason), "{arguments:?}: {said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

fn client(cluster: &Cluster) -> store_client::Cluster {
    store_client::Cluster::open(&cluster.directory, &EtcdOptions::default()).unwrap()
}

fn block_on<T: 'static, F: Future<Output = T> + 'static>(begin: impl FnOnce(Core) -> F) -> T {
    let reactor = Reactor::new(&ReactorConfig::default()).unwrap();
    let work = begin(reactor.core());
    reactor.block_on(work)
}

/// Does something with an image or a snapshot.
fn with_image<T: 'static, F: Future<Output = T> + 'static>(
    cluster: &Cluster,
    name: &str,
    work: impl FnOnce(Core, AsyncChannel, usize) -> F + 'static,
) -> T {
    let options = AttachOptions { read_only: name.contains('@'), ..AttachOptions::default() };
    let image = Arc::new(ClusterImage::open(&client(cluster), "pool", name, options).unwrap());
    let bytes = image.size() as usize;
    let registry = Registry::new();
    registry.register("image", None, &[], image.clone()).unwrap();
    let access = if options.read_only { Access::ReadOnly } else { Access::ReadWrite };
    let descriptor = registry.open("image", access).unwrap();
    let done = block_on(move |core| async move {
        let channel = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
        work(core, channel, bytes).await
    });
    image.detach();
    done
}

fn read(cluster: &Cluster, name: &str) -> Vec<u8> {
    with_image(cluster, name, |core, channel, bytes| async move {
        let mut all = Vec::new();
        while all.len() < bytes {
            let length = (bytes - all.len()).min(MIB / 8);
            let buffer = core.pool().take(length).unwrap();
            let buffer = channel.read((all.len() / BLOCK) as u64, buffer).await.map_err(|(status, _)| status);
            all.extend_from_slice(buffer.unwrap().as_slice());
        }
        all
    })
}

fn assert_same(cluster: &Cluster, name: &str, expected: &[u8]) {
    let found = read(cluster, name);
    assert_eq!(found.len(), expected.len(), "{name}");
    let differs = found.iter().zip(expected).position(|(one, other)| one != other);
    assert_eq!(differs, None, "{name}: the first byte that differs");
}

/// A change of an image, which its model has as well.
#[derive(Clone, Debug)]
enum Change {
    Write(usize, Vec<u8>),
    Zero(usize, usize),
    Unmap(usize, usize),
}

fn change(cluster: &Cluster, name: &str, model: &mut [u8], changes: Vec<Change>) {
    for change in &changes {
        match change {
            Change::Write(at, data) => model[*at..at + data.len()].copy_from_slice(data),
            Change::Zero(at, length) | Change::Unmap(at, length) => model[*at..at + length].fill(0),
        }
    }
    with_image(cluster, name, |core, channel, _| async move {
        let lba = |at: usize| (at / BLOCK) as u64;
        for change in changes {
            match change {
                Change::Write(at, data) => {
                    let mut buffer = core.pool().take(data.len()).unwrap();
                    buffer.as_mut_slice().copy_from_slice(&data);
                    assert!(channel.write(lba(at), buffer).await.is_ok());
                }
                Change::Zero(at, length) => {
                    channel.write_zeroes(lba(at), (length / BLOCK) as u32).await.unwrap();
                }
                Change::Unmap(at, length) => channel.unmap(lba(at), (length / BLOCK) as u32).await.unwrap(),
            }
        }
    });
}

/// Changes at random places, of some of which a block of 4 KiB is a part.
fn random_changes(random: &mut WyRand, bytes: usize, count: usize) -> Vec<Change> {
    let mut changes = Vec::new();
    for _ in 0..count {
        let blocks_max = if random.happens(100) { 256 } else { 64 };
        let length = (1 + random.index(blocks_max)) * BLOCK;
        let at = random.index((bytes - length) / BLOCK + 1) * BLOCK;
        changes.push(match random.below(8) {
            0 => Change::Zero(at, length),
            1 => Change::Unmap(at, length),
            2 => Change::Write(at, vec![0; length]),
            _ => Change::Write(at, (0..length).map(|_| random.next_bits() as u8).collect()),
        });
    }
    changes
}

fn path_of(directory: &Path, name: &str) -> (PathBuf, String) {
    let path = directory.join(name);
    let text = path.to_str().unwrap().to_string();
    (path, text)
}

fn export(cluster: &Cluster, snapshot: &str, file: &str, from: Option<&str>) -> Value {
    let from: Vec<&str> = from.into_iter().flat_map(|from| ["--from", from]).collect();
    json(&cluster.ok(&[&["image", "export-diff", snapshot, file, "--json"], &from[..]].concat()))
}

fn import(cluster: &Cluster, file: &str, image: &str) -> Value {
    json(&cluster.ok(&["image", "import-diff", file, image, "--json"]))
}

/// Imports what is in memory.
fn import_bytes(
    cluster: &Cluster,
    name: &'static str,
    stream: Vec<u8>,
    discard_changes: bool,
) -> Result<ImportedDiff, DiffError> {
    let client = client(cluster);
    block_on(move |core| async move {
        let to = ImageName { cluster: &client, pool: "pool", name };
        let options = ImportOptions { discard_changes };
        import_diff(&core, to, std::io::Cursor::new(stream), options, |_, _| {}).await
    })
}

#[test]
fn a_chain_of_diffs_is_the_image_at_every_snapshot() {
    let seed = std::env::var("RINGBOLT_BACKUP_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    println!("seed {seed}");
    let mut random = WyRand::new(seed);
    let directory = scratch("store-backups");
    let nodes = ["--nodes=2", "--replicas=2", "--groups=4"];
    let cluster = Cluster::start(&directory, &[&SIZE[..], &nodes].concat());
    let other =
        Cluster::start_in(&directory.join("other"), &[&SIZE[..], &["--nodes=1", "--groups=2"]].concat());
    let size = 12 * MIB + BLOCK;
    cluster.ok(&["image", "create", "vol", &size.to_string()]);
    cluster.wait_until_healthy();
    let (mut model, mut snapshots) = (vec![0; size], Vec::<(String, Vec<u8>)>::new());
    for step in 0..7_usize {
        match step {
            // Its end is cut off, within a block of the snapshot, and is back without what it had.
            2 => {
                model.truncate(5 * MIB + 3 * BLOCK);
                let bytes = model.len().to_string();
                cluster.ok(&["image", "resize", "--allow-shrink", "vol", &bytes]);
                model.resize(10 * MIB, 0);
                cluster.ok(&["image", "resize", "vol", "10m"]);
            }
            3 => {
                model.truncate(9 * MIB + BLOCK);
                let bytes = model.len().to_string();
                cluster.ok(&["image", "resize", "--allow-shrink", "vol", &bytes]);
            }
            4 => {
                model.resize(16 * MIB, 0);
                cluster.ok(&["image", "resize", "vol", "16m"]);
            }
            // What the last two snapshots have is not below the image any more.
            5 => {
                cluster.ok(&["image", "snapshot", "rollback", &format!("vol@{}", snapshots[2].0)]);
                model = snapshots[2].1.clone();
            }
            _ => {}
        }
        let count = if step == 6 { 0 } else { 60 };
        let changes = random_changes(&mut random, model.len(), count);
        change(&cluster, "vol", &mut model, changes);
        let name = format!("s{step}");
        cluster.ok(&["image", "snapshot", "create", &format!("vol@{name}")]);
        let from = snapshots.last().map(|(from, _)| from.clone());
        let (path, file) = path_of(&directory, &name);
        if step == 1 {
            // Through a pipe, while the image is in use.
            let program = env!("CARGO_BIN_EXE_ringbolt");
            let (from_cluster, to_cluster) = (cluster.path(), other.path());
            let line = format!(
                "{program} image export-diff --cluster {from_cluster} vol@s1 - --from s0 | \
                 {program} image import-diff --cluster {to_cluster} - vol"
            );
            let held =
                ClusterImage::open(&client(&cluster), "pool", "vol", AttachOptions::default()).unwrap();
            let piped = Command::new("sh").args(["-c", &line]).output().unwrap();
            held.detach();
            assert_eq!(text(&piped.stdout), "store:pool/vol@s1\n", "{}", text(&piped.stderr));
        } else {
            let exported = export(&cluster, &format!("vol@{name}"), &file, from.as_deref());
            assert_eq!(exported["stream_bytes"], path.metadata().unwrap().len());
            let imported = import(&other, &file, "vol");
            assert_eq!(imported["written_bytes"], exported["data_bytes"]);
            assert_eq!((&imported["snapshot"], &imported["size"]), (&name.into(), &model.len().into()));
            if step == 6 {
                assert_eq!((&exported["objects"], &exported["data_bytes"]), (&0.into(), &0.into()));
            }
        }
        snapshots.push((format!("s{step}"), model.clone()));
        for (name, model) in &snapshots {
            assert_same(&other, &format!("vol@{name}"), model);
        }
        assert_same(&other, "vol", &model);
        assert_same(&cluster, &format!("vol@s{step}"), &model);
    }
    one_block_is_one_record(&cluster, &other, &directory, &mut model);
    // A backup of everything, of the backup, is the image again.
    let (_, file) = path_of(&directory, "all");
    export(&other, "vol@last", &file, None);
    import(&cluster, &file, "restored");
    assert_same(&cluster, "restored", &model);
    assert_same(&cluster, "restored@last", &model);
    // A clone has what its parent has.
    cluster.ok(&["image", "clone", "vol@s1", "clone"]);
    let mut clone = snapshots[1].1.clone();
    let changes = random_changes(&mut random, clone.len(), 5);
    change(&cluster, "clone", &mut clone, changes);
    cluster.ok(&["image", "snapshot", "create", "clone@one"]);
    let (_, file) = path_of(&directory, "clone");
    export(&cluster, "clone@one", &file, None);
    import(&other, &file, "clone");
    assert_same(&other, "clone", &clone);
    for cluster in [cluster, other] {
        let reclaimed = json(&cluster.ok(&["store", "reclaim", "--json"]));
        assert_eq!(reclaimed["unknown"], Value::Array(Vec::new()), "{reclaimed:#}");
        cluster.end();
    }
    std::fs::remove_dir_all(directory).unwrap();
}

/// A diff has the blocks that were written since, and no others.
fn one_block_is_one_record(cluster: &Cluster, other: &Cluster, directory: &Path, model: &mut [u8]) {
    let changes = vec![Change::Write(MIB + BLOCK, vec![5; BLOCK]), Change::Unmap(2 * MIB, 4 * MIB)];
    change(cluster, "vol", model, changes);
    cluster.ok(&["image", "snapshot", "create", "vol@last"]);
    let (path, file) = path_of(directory, "last");
    let exported = export(cluster, "vol@last", &file, Some("s6"));
    assert_eq!((&exported["objects"], &exported["data_bytes"]), (&2.into(), &4096.into()));
    let zero_bytes = exported["zero_bytes"].as_u64().unwrap();
    assert!(zero_bytes > 0 && zero_bytes <= 4 << 20, "{exported:#}");
    assert!(path.metadata().unwrap().len() < 16 << 10);
    import(other, &file, "vol");
    assert_same(other, "vol", model);
    let info = json(&other.ok(&["image", "info", "vol", "--json"]));
    let last = info["snapshots"].as_array().unwrap().last().unwrap();
    assert!(last["name"] == "last" && last["origin"].is_string(), "{info:#}");
    assert_eq!(info["import"], Value::Null);
}

/// Where the pieces of a stream end that are whole.
fn piece_ends(stream: &[u8]) -> Vec<usize> {
    let (mut decoder, mut rest, mut ends) = (DiffDecoder::new(), stream, Vec::new());
    while decoder.needs() > 0 {
        let (piece, after) = rest.split_at(decoder.needs());
        rest = after;
        if matches!(decoder.take(piece), Ok(Some(item)) if item != DiffItem::End) {
            ends.push(decoder.whole_bytes() as usize);
        }
    }
    ends
}

/// A cluster of one node with `vol`, its snapshots `one` and `two`, and the backup of the first. Returns the
/// model of both.
fn two_snapshots(directory: &Path, random: &mut WyRand) -> (Cluster, [Vec<u8>; 2]) {
    let cluster = Cluster::start(directory, &[&SIZE[..], &["--nodes=1", "--groups=4"]].concat());
    cluster.ok(&["image", "create", "vol", "8m"]);
    cluster.wait_until_healthy();
    let mut model = vec![0; 8 * MIB];
    let changes = random_changes(random, model.len(), 30);
    change(&cluster, "vol", &mut model, changes);
    cluster.ok(&["image", "snapshot", "create", "vol@one"]);
    let one = model.clone();
    let changes = random_changes(random, model.len(), 24);
    change(&cluster, "vol", &mut model, changes);
    cluster.ok(&["image", "snapshot", "create", "vol@two"]);
    let (_, file) = path_of(directory, "one");
    export(&cluster, "vol@one", &file, None);
    import(&cluster, &file, "backup");
    (cluster, [one, model])
}

#[test]
fn a_stream_that_is_cut_or_damaged_is_gone_on_with() {
    let mut random = WyRand::new(7);
    let directory = scratch("store-backup-damage");
    let (cluster, [one, two]) = two_snapshots(&directory, &mut random);
    let (path, file) = path_of(&directory, "two");
    export(&cluster, "vol@two", &file, Some("one"));
    let stream = std::fs::read(path).unwrap();
    let ends = piece_ends(&stream);
    assert!(ends.len() > 10, "{ends:?}");
    // Nothing of a stream without a whole header.
    for length in [0, 1, ends[0] - 1] {
        let error = import_bytes(&cluster, "backup", stream[..length].to_vec(), false).unwrap_err();
        assert!(matches!(error, DiffError::Truncated { at: 0 }), "{error}");
    }
    let error = import_bytes(&cluster, "backup", vec![7; 4096], false).unwrap_err();
    assert!(error.to_string().contains("none of `image export-diff`, at byte 0"), "{error}");
    assert_same(&cluster, "backup", &one);
    let cuts: Vec<usize> =
        ends.iter().copied().chain((0..10).map(|_| ends[0] + random.index(stream.len() - ends[0]))).collect();
    for (attempt, cut) in cuts.iter().enumerate() {
        // Some go on with what the ones before have left, others begin anew.
        let discard = attempt % 3 == 0;
        let error = import_bytes(&cluster, "backup", stream[..*cut].to_vec(), discard).unwrap_err();
        let said = error.to_string();
        let whole = ends.iter().rfind(|end| *end <= cut).unwrap();
        assert!(said.contains(&format!("the stream ends after byte {whole}, and is not whole")), "{said}");
        assert!(said.contains("pool/backup has a part of it: import the whole stream again"), "{said}");
        let mut damaged = stream.clone();
        damaged[*cut.min(&(stream.len() - 1))] ^= 0x10;
        let error = import_bytes(&cluster, "backup", damaged, false).unwrap_err().to_string();
        assert!(error.contains("the stream is damaged, or none of `image export-diff`, at byte "), "{error}");
    }
    let mut longer = stream.clone();
    longer.push(0);
    let error = import_bytes(&cluster, "backup", longer, false).unwrap_err().to_string();
    assert!(error.contains("something follows its end"), "{error}");
    a_part_of_an_image_is_not_used(&cluster);
    // The snapshot that it had is as it was.
    assert_same(&cluster, "backup@one", &one);
    let imported = import_bytes(&cluster, "backup", stream.clone(), false).unwrap();
    assert!(imported.resumed_at > 0 && imported.snapshot == "two", "{imported:?}");
    assert_same(&cluster, "backup", &two);
    assert_same(&cluster, "backup@two", &two);
    let error = import_bytes(&cluster, "backup", stream, false).unwrap_err().to_string();
    assert_eq!(error, "image pool/backup has a snapshot two already");

    // One of everything, which leaves nothing under its name.
    let (path, file) = path_of(&directory, "all");
    export(&cluster, "vol@two", &file, None);
    let all = std::fs::read(path).unwrap();
    let cut = piece_ends(&all)[8];
    let error = import_bytes(&cluster, "whole", all[..cut].to_vec(), false).unwrap_err().to_string();
    assert!(error.contains("it is in the trash; import the whole stream again"), "{error}");
    let trash = || json(&cluster.ok(&["image", "list", "--trash", "--json"]));
    assert_eq!(trash()[0]["name"], "whole (unfinished import)");
    refused(&cluster, &["info", "whole"], "there is no image pool/whole");
    refused(&cluster, &["restore", "whole (unfinished import)"], "has a part of a backup of snapshot two");
    // Of another stream: what the first has left is of no use to it.
    let (path, file) = path_of(&directory, "other");
    export(&cluster, "vol@one", &file, None);
    let other = std::fs::read(path).unwrap();
    import_bytes(&cluster, "whole", other[..other.len() - 1].to_vec(), false).unwrap_err();
    assert_eq!(trash().as_array().unwrap().len(), 1);
    assert_eq!(import_bytes(&cluster, "whole", other, false).unwrap().bytes, 8 << 20);
    assert_eq!(trash(), serde_json::json!([]));
    assert_same(&cluster, "whole", &one);
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

/// Of an image that has a part of a stream nothing but the part is changed.
fn a_part_of_an_image_is_not_used(cluster: &Cluster) {
    let reason = "image pool/backup has a part of a backup of snapshot two";
    for arguments in [
        &["copy", "backup", "new"][..],
        &["resize", "backup", "16m"],
        &["flatten", "backup"],
        &["snapshot", "create", "backup@new"],
        &["snapshot", "remove", "backup@one"],
    ] {
        refused(cluster, arguments, reason);
    }
    let opened = ClusterImage::open(&client(cluster), "pool", "backup", AttachOptions::default());
    assert!(opened.err().unwrap().to_string().contains(reason));
    let info = json(&cluster.ok(&["image", "info", "backup", "--json"]));
    assert_eq!(info["import"]["snapshot"], "two");
    assert!(cluster.ok(&["image", "info", "backup"]).contains("import of snapshot two: "));
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let mut random = WyRand::new(9);
    let directory = scratch("store-backup-refused");
    let (cluster, [one, two]) = two_snapshots(&directory, &mut random);
    let file = |name: &str| path_of(&directory, name).1;
    export(&cluster, "vol@two", &file("two"), Some("one"));
    cluster.ok(&["image", "snapshot", "create", "vol@three"]);
    export(&cluster, "vol@three", &file("three"), Some("two"));
    export(&cluster, "vol@three", &file("onethree"), Some("one"));
    let exists = format!("{} exists: name another file", file("two"));
    refused(&cluster, &["export-diff", "vol@two", &file("two")], &exists);
    refused(&cluster, &["export-diff", "vol", &file("new")], "expected an image and a snapshot");
    refused(&cluster, &["export-diff", "vol@none", &file("new")], "image pool/vol has no snapshot none");
    refused(&cluster, &["export-diff", "none@one", &file("new")], "there is no image pool/none");
    let from = ["export-diff", "vol@two", &file("new"), "--from", "none"];
    refused(&cluster, &from, "image pool/vol has no snapshot none");
    refused(&cluster, &["export-diff", "vol@two", "-", "--json"], "standard output has the diff");
    refused(&cluster, &["export-diff", "vol@two", "/nowhere/new"], "/nowhere/new.partial: No such file");
    refused(&cluster, &["import-diff", "/nowhere/new", "backup"], "/nowhere/new: No such file");
    refused(&cluster, &["import-diff", &file("one"), "backup"], "image pool/backup exists");
    refused(
        &cluster,
        &["import-diff", &file("two"), "new"],
        "there is no image pool/new, and the stream has",
    );
    refused(&cluster, &["import-diff", &file("two"), "a@b"], "IMAGE@SNAPSHOT is the name of a snapshot");
    let other = "the stream begins at snapshot two, and the newest one of image pool/backup is one";
    refused(&cluster, &["import-diff", &file("three"), "backup"], other);
    refused(&cluster, &["import-diff", &file("one"), "--pool=none", "new"], "there is no pool none");
    assert!(!directory.join("new").exists() && !directory.join("new.partial").exists());

    for name in ["", "a/b"] {
        let reason = format!("{name:?} is no name of an image: 1 to 64 bytes without `/`\n");
        let said = stderr_of(&cluster.run(&["image", "import-diff", &file("one"), name]));
        assert!(said.ends_with(&reason), "{said}");
    }
    assert_eq!(json(&cluster.ok(&["image", "list", "--trash", "--json"])), serde_json::json!([]));
    // A file of something else is not written.
    let new = file("new");
    for resume in [None, Some("--resume")] {
        std::fs::write(directory.join("new.partial"), "of another one").unwrap();
        let mut arguments = vec!["export-diff", "vol@two", &new];
        arguments.extend(resume);
        refused(&cluster, &arguments, "new.partial is no export that was interrupted: remove it");
        assert_eq!(std::fs::read(directory.join("new.partial")).unwrap(), b"of another one");
    }
    std::fs::remove_file(directory.join("new.partial")).unwrap();
    let program = env!("CARGO_BIN_EXE_ringbolt");
    let line = format!("{program} image export-diff --cluster {} vol@two -", cluster.path());
    let said = stderr_of(&Command::new("sh").args(["-c", &format!("{line} >&-")]).output().unwrap());
    assert!(said.contains("standard output is closed"), "{said}");
    assert!(Command::new("sh").args(["-c", &format!("{line} >/dev/null")]).status().unwrap().success());

    // Changes of the backup.
    let mut changed = one.clone();
    change(&cluster, "backup", &mut changed, vec![Change::Write(0, vec![3; BLOCK])]);
    let reason = "image pool/backup has changes since its snapshot one: --discard-changes removes them";
    refused(&cluster, &["import-diff", &file("two"), "backup"], reason);
    assert_same(&cluster, "backup", &changed);
    cluster.ok(&["image", "snapshot", "rollback", "backup@one"]);
    cluster.ok(&["image", "resize", "backup", "9m"]);
    refused(&cluster, &["import-diff", &file("two"), "backup"], reason);
    let held = ClusterImage::open(&client(&cluster), "pool", "backup", AttachOptions::default()).unwrap();
    refused(&cluster, &["import-diff", &file("two"), "backup"], "image pool/backup is in use by ");
    held.detach();
    // A part of another stream.
    let stream = std::fs::read(file("onethree")).unwrap();
    import_bytes(&cluster, "backup", stream[..stream.len() - 1].to_vec(), true).unwrap_err();
    let reason = "image pool/backup has a part of another stream, to snapshot three";
    refused(&cluster, &["import-diff", &file("two"), "backup"], reason);
    let imported = cluster.ok(&["image", "import-diff", "--discard-changes", &file("two"), "backup"]);
    assert_eq!(imported, "store:pool/backup@two\n");
    assert_same(&cluster, "backup", &two);

    // A snapshot that is made anew has its name, and not its identity.
    cluster.ok(&["image", "snapshot", "remove", "vol@three"]);
    cluster.ok(&["image", "snapshot", "remove", "vol@two"]);
    cluster.ok(&["image", "snapshot", "create", "vol@two"]);
    cluster.ok(&["image", "snapshot", "create", "vol@four"]);
    export(&cluster, "vol@four", &file("four"), Some("two"));
    let reason = "is the copy of another snapshot than the two that the stream begins at";
    refused(&cluster, &["import-diff", &file("four"), "backup"], reason);

    // Protected images keep their size.
    cluster.ok(&["image", "resize", "--allow-shrink", "vol", "4m"]);
    cluster.ok(&["image", "snapshot", "create", "vol@small"]);
    cluster.ok(&["image", "snapshot", "create", "backup@four"]);
    cluster.ok(&["image", "protect", "backup"]);
    export(&cluster, "vol@small", &file("small"), Some("four"));
    refused(&cluster, &["import-diff", &file("small"), "backup"], "image pool/backup is protected");
    cluster.ok(&["image", "unprotect", "backup"]);
    import(&cluster, &file("small"), "backup");
    assert_same(&cluster, "backup", &two[..4 * MIB]);
    the_volumes_below_each_other_have_a_limit(&cluster, &file("deep"));
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

/// What is discarded may stand on fewer volumes than the snapshot below the import.
fn the_volumes_below_each_other_have_a_limit(cluster: &Cluster, file: &str) {
    cluster.ok(&["image", "create", "deep", "1m"]);
    let client = client(cluster);
    let made = block_on(move |core| async move {
        for number in 0..64 {
            let name = format!("s{number}");
            create_snapshot(&core, &client, ("pool", "deep"), &name, false).await?;
        }
        Ok::<_, ReclaimError>(())
    });
    made.unwrap();
    cluster.ok(&["image", "create", "source", "1m"]);
    for snapshot in ["source@s63", "source@next"] {
        cluster.ok(&["image", "snapshot", "create", snapshot]);
    }
    export(cluster, "source@next", file, Some("s63"));
    let reason = "image pool/deep has 64 volumes below each other, the most that it may have";
    refused(cluster, &["import-diff", file, "deep"], reason);
    cluster.ok(&["image", "flatten", "deep"]);
    let info = || json(&cluster.ok(&["image", "info", "deep", "--json"]));
    let before = info();
    refused(cluster, &["import-diff", file, "deep"], "has changes since its snapshot s63");
    refused(cluster, &["import-diff", file, "deep", "--discard-changes"], reason);
    assert_eq!(info(), before);
    assert_same(cluster, "deep", &vec![0; MIB]);
}

#[test]
fn interrupted_commands_go_on() {
    let mut random = WyRand::new(11);
    let directory = scratch("store-backup-interrupted");
    let (cluster, [one, two]) = two_snapshots(&directory, &mut random);
    let (path, file) = path_of(&directory, "two");
    let partial = directory.join("two.partial");
    export(&cluster, "vol@two", &file, Some("one"));
    let stream = std::fs::read(&path).unwrap();
    let ends = piece_ends(&stream);

    // An export whose file ends anywhere, or with what a crash has left there.
    let resume = ["image", "export-diff", "vol@two", &file, "--from", "one", "--resume", "--json"];
    for attempt in 0..12 {
        let mut begin = stream[..random.index(stream.len())].to_vec();
        let whole = ends.iter().copied().rfind(|end| *end <= begin.len()).unwrap_or(0);
        if attempt % 3 == 0 {
            begin.resize(begin.len() + 5000, 0xa5);
        }
        std::fs::rename(&path, directory.join("before")).unwrap();
        std::fs::write(&partial, &begin).unwrap();
        let exported = json(&cluster.ok(&resume));
        assert_eq!(exported["resumed_at"], whole, "{exported:#}");
        assert!(std::fs::read(&path).unwrap() == stream && !partial.exists(), "{} bytes", begin.len());
    }
    // Without anything to go on with, and with that of another one.
    std::fs::remove_file(&path).unwrap();
    assert_eq!(json(&cluster.ok(&resume))["resumed_at"], 0);
    assert!(std::fs::read(&path).unwrap() == stream);
    std::fs::rename(&path, &partial).unwrap();
    let reason = "is the begin of another export";
    refused(&cluster, &["export-diff", "vol@two", &file, "--resume"], reason);
    assert!(std::fs::read(&partial).unwrap() == stream);
    a_last_short_block_is_exported_once(&cluster, &directory);
    killed_in_the_middle(&cluster, &directory, [&one, &two]);

    // The volume of a snapshot may be empty once that was removed.
    let client = client(&cluster);
    let removed = DiffExport::new(&client, ("pool", "vol"), "two", Some("one")).unwrap();
    cluster.ok(&["image", "snapshot", "remove", "vol@one"]);
    let (written, ends_whole) = block_on(move |core| async move {
        let out = Shared::default();
        let written = removed.write(&core, out.clone(), DiffPosition::default(), |_, _| {}).await;
        let bytes = out.0.lock().unwrap().clone();
        (written.map(drop), piece_ends_whole(&bytes))
    });
    assert!(written.unwrap_err().to_string().contains("snapshots of image pool/vol were removed while"));
    assert!(!ends_whole);
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

/// Exports go on behind each record, also where that is the last, short block of the image.
fn a_last_short_block_is_exported_once(cluster: &Cluster, directory: &Path) {
    let size = 9_000_448;
    cluster.ok(&["image", "create", "odd", &size.to_string()]);
    let mut model = vec![0; size];
    let last = size - 1024;
    let changes = vec![Change::Write(0, vec![1; 2 * BLOCK]), Change::Write(last, vec![2; 2 * BLOCK])];
    change(cluster, "odd", &mut model, changes);
    cluster.ok(&["image", "snapshot", "create", "odd@data"]);
    let with_data = model.clone();
    let changes = vec![Change::Write(MIB, vec![3; 2 * BLOCK]), Change::Zero(last, 2 * BLOCK)];
    change(cluster, "odd", &mut model, changes);
    cluster.ok(&["image", "snapshot", "create", "odd@zeroes"]);
    for (snapshot, from, expected) in [("data", None, &with_data), ("zeroes", Some("data"), &model)] {
        let (path, file) = path_of(directory, snapshot);
        let partial = directory.join(format!("{snapshot}.partial"));
        export(cluster, &format!("odd@{snapshot}"), &file, from);
        let stream = std::fs::read(&path).unwrap();
        let ends = piece_ends(&stream);
        assert_eq!(ends.len(), 3);
        // The end record does not count.
        for length in ends.iter().copied().chain([stream.len()]) {
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&partial, &stream[..length]).unwrap();
            let name = format!("odd@{snapshot}");
            let mut arguments = vec!["image", "export-diff", &name, &file, "--resume", "--json"];
            arguments.extend(from.into_iter().flat_map(|from| ["--from", from]));
            let exported = json(&cluster.ok(&arguments));
            assert_eq!(exported["resumed_at"], length.min(ends[2]), "{exported:#}");
            assert!(std::fs::read(&path).unwrap() == stream, "{length} of {} bytes", stream.len());
        }
        import(cluster, &file, "odd-backup");
        assert_same(cluster, "odd-backup", expected);
    }
}

/// What is written, for who has given the writer away.
#[derive(Clone, Default)]
struct Shared(Arc<std::sync::Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Whether a stream has its end.
fn piece_ends_whole(stream: &[u8]) -> bool {
    let (mut decoder, mut rest) = (DiffDecoder::new(), stream);
    while decoder.needs() > 0 {
        let Some((piece, after)) = rest.split_at_checked(decoder.needs()) else { return false };
        rest = after;
        decoder.take(piece).unwrap();
    }
    true
}

/// Both commands are killed while the nodes do not answer.
fn killed_in_the_middle(cluster: &Cluster, directory: &Path, [one, two]: [&[u8]; 2]) {
    let (path, file) = path_of(directory, "killed");
    let partial = directory.join("killed.partial");
    let stop = |which: Signal| cluster.nodes().into_iter().for_each(|node| signal(node, which));
    let spawn = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
        command.arg("image").args(arguments).args(["--cluster", cluster.path()]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let wait = |what: &str, is_so: &dyn Fn() -> bool| {
        let started = std::time::Instant::now();
        while !is_so() {
            assert!(started.elapsed() < Duration::from_secs(60), "not {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    stop(Signal::STOP);
    let mut export = spawn(&["export-diff", "vol@two", &file, "--from", "one"]);
    wait("exporting", &|| partial.exists());
    export.kill().unwrap();
    export.wait().unwrap();
    stop(Signal::CONT);
    cluster.ok(&["image", "export-diff", "vol@two", &file, "--from", "one", "--resume"]);
    assert!(path.exists() && !partial.exists());
    // Another one makes the file meanwhile.
    let whole = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    stop(Signal::STOP);
    let mut export = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
    export.args(["image", "export-diff", "vol@two", &file, "--from", "one", "--cluster", cluster.path()]);
    let export = export.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // It has looked for the file when it asks nodes.
    let files = PathBuf::from(format!("/proc/{}/fd", export.id()));
    let is_socket = |link: PathBuf| link.to_string_lossy().starts_with("socket:");
    wait("exporting", &|| {
        let mut links = std::fs::read_dir(&files).unwrap().flatten();
        links.any(|file| std::fs::read_link(file.path()).is_ok_and(is_socket))
    });
    std::fs::write(&path, "of another one").unwrap();
    stop(Signal::CONT);
    let said = stderr_of(&export.wait_with_output().unwrap());
    assert!(said.contains("it was made by another one since the export began"), "{said}");
    assert!(said.contains("killed.partial has the whole export, and --resume gives it the name"), "{said}");
    assert_eq!(std::fs::read(&path).unwrap(), b"of another one");
    assert!(std::fs::read(&partial).unwrap() == whole);
    std::fs::remove_file(&path).unwrap();
    cluster.ok(&["image", "export-diff", "vol@two", &file, "--from", "one", "--resume"]);
    assert!(std::fs::read(&path).unwrap() == whole && !partial.exists());
    // The map says that the import has begun before it waits for a node; its image is free at once.
    let image = || json(&cluster.ok(&["image", "info", "backup", "--json"]));
    let stream = std::fs::read(&path).unwrap();
    let (first, rest) = stream.split_at(piece_ends(&stream)[2]);
    let mut import = Command::new(env!("CARGO_BIN_EXE_ringbolt"))
        .args(["image", "import-diff", "-", "backup", "--cluster", cluster.path()])
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut pipe = import.stdin.take().unwrap();
    pipe.write_all(first).unwrap();
    wait("importing", &|| image()["import"]["snapshot"] == "two");
    import.kill().unwrap();
    import.wait().unwrap();
    drop((pipe, rest));
    assert_same(cluster, "backup@one", one);
    refused(cluster, &["copy", "backup", "new"], "has a part of a backup of snapshot two");
    // Taken back, or gone on with.
    cluster.ok(&["image", "snapshot", "rollback", "backup@one"]);
    assert_eq!(image()["import"], Value::Null);
    assert_same(cluster, "backup", one);
    assert_eq!(self::import(cluster, &file, "backup")["snapshot"], "two");
    assert_same(cluster, "backup", two);
}
