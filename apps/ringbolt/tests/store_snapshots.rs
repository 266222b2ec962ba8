//! Snapshots, clones, rollback and flatten of a cluster's images, with verified data.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "rig/store.rs"]
mod store;

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rig::{ringbolt, scratch, text};
use rustix::process::Signal;
use serde_json::Value;
use store::{Cluster, signal};

const SIZE: [&str; 2] = ["--size=400m", "--log-size=4m"];

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn stderr_of(output: &Output) -> String {
    assert!(!output.status.success(), "{}", text(&output.stdout));
    text(&output.stderr)
}

/// Writes or verifies a part of an image, whose blocks have the pattern of a number; one at a time, unless
/// the arguments say otherwise.
fn pattern(cluster: &Cluster, image: &str, number: u32, arguments: &[&str]) -> Output {
    let filename = format!("--filename=store:pool/{image}?cluster={}", cluster.path());
    let pattern = format!("--verify_pattern=0x{number:02x}");
    let common = ["perf", &filename, "--name=t", "--verify=pattern", &pattern, "--iodepth=1"];
    ringbolt(&[&common[..], arguments].concat())
}

/// Writes a number to a part of an image.
fn write(cluster: &Cluster, image: &str, number: u32, bs: &str, offset: &str, size: &str) {
    let (bs, offset, size) = (format!("--bs={bs}"), format!("--offset={offset}"), format!("--size={size}"));
    let written = pattern(cluster, image, number, &["--rw=write", "--do_verify=0", &bs, &offset, &size]);
    assert!(written.status.success(), "{image}: {}{}", text(&written.stdout), text(&written.stderr));
}

/// Verifies that a part of an image has a number.
fn check(cluster: &Cluster, image: &str, number: u32, offset: &str, size: &str) {
    verify(cluster, image, number, "64k", offset, size);
}

/// The same with other parts at a time.
fn verify(cluster: &Cluster, image: &str, number: u32, bs: &str, offset: &str, size: &str) {
    let (bs, from, length) = (format!("--bs={bs}"), format!("--offset={offset}"), format!("--size={size}"));
    let read = pattern(cluster, image, number, &["--rw=read", &bs, &from, &length]);
    assert!(
        read.status.success(),
        "{image} from {offset}, {size}: not {number}: {}{}",
        text(&read.stdout),
        text(&read.stderr)
    );
}

fn image(cluster: &Cluster, name: &str) -> Value {
    json(&cluster.ok(&["image", "info", name, "--json"]))
}

/// What the groups have of volumes that no image has: nothing.
fn assert_nothing_is_left(cluster: &Cluster) {
    let reclaimed = json(&cluster.ok(&["store", "reclaim", "--json"]));
    assert_eq!(reclaimed["unknown"], Value::Array(Vec::new()), "{reclaimed:#}");
}

fn refused(cluster: &Cluster, arguments: &[&str], reason: &str) {
    let said = stderr_of(&cluster.run(&[&["image"][..], arguments].concat()));
    assert!(said.contains(reason), "{arguments:?}: {said}");
}

fn snapshot(cluster: &Cluster, command: &str, name: &str) {
    cluster.ok(&["image", "snapshot", command, name]);
}

#[test]
fn snapshots_clones_and_rollbacks_have_what_was_written_before() {
    let directory = scratch("store-snapshots");
    let cluster = Cluster::start(&directory, &[&SIZE[..], &["--nodes=3", "--groups=6"]].concat());
    cluster.ok(&["image", "create", "vol", "32m"]);
    cluster.wait_until_healthy();
    write(&cluster, "vol", 0x11, "64k", "0", "16m");
    let made = cluster.ok(&["image", "snapshot", "create", "vol@one"]);
    assert_eq!(made, "store:pool/vol@one\n");
    // Whole blocks, parts of blocks, and what the snapshot does not have.
    write(&cluster, "vol", 0x22, "4k", "1m", "1m");
    write(&cluster, "vol", 0x22, "512", "4m", "1536");
    write(&cluster, "vol", 0x22, "64k", "20m", "2m");
    snapshot(&cluster, "create", "vol@two");
    // A node is killed, and comes back, while the third one is written.
    signal(cluster.nodes()[1], Signal::KILL);
    write(&cluster, "vol", 0x33, "4k", "0", "2m");
    let read_all = |image: &str, version: u32| {
        let in_two = if version < 2 { 0x11 } else { 0x22 };
        check(&cluster, image, if version < 3 { 0x11 } else { 0x33 }, "0", "1m");
        check(&cluster, image, if version < 3 { in_two } else { 0x33 }, "1m", "1m");
        check(&cluster, image, 0x11, "2m", "2m");
        verify(&cluster, image, 0x11, "4k", "4100k", "2m");
        check(&cluster, image, if version < 2 { 0 } else { 0x22 }, "20m", "2m");
        check(&cluster, image, 0, "24m", "8m");
        verify(&cluster, image, in_two, "512", "4m", "1536");
        verify(&cluster, image, 0x11, "512", "4195840", "2560");
    };
    read_all("vol@one", 1);
    read_all("vol@two", 2);
    read_all("vol", 3);
    cluster.wait_until_healthy();

    // Clones are written apart from each other and from the image.
    cluster.ok(&["image", "clone", "vol@one", "first"]);
    cluster.ok(&["image", "clone", "vol@two", "second"]);
    write(&cluster, "first", 0x44, "4k", "8m", "1m");
    check(&cluster, "first", 0x44, "8m", "1m");
    check(&cluster, "second", 0x11, "8m", "1m");
    read_all("second", 2);
    assert_eq!(image(&cluster, "first")["parent"], "vol@one");
    let info = image(&cluster, "vol");
    let clones = |at: usize| info["snapshots"][at]["clones"].clone();
    assert_eq!((clones(0), clones(1)), (Value::from(vec!["first"]), Value::from(vec!["second"])));
    let listed = json(&cluster.ok(&["image", "list", "--json"]));
    let vol = listed.as_array().unwrap().iter().find(|it| it["name"] == "vol").unwrap();
    assert_eq!(vol["snapshots"], Value::from(vec!["one", "two"]));
    let lines = cluster.ok(&["image", "snapshot", "list", "vol"]);
    assert!(lines.contains("pool/vol@one") && lines.contains("second"), "{lines}");

    what_is_in_use_is_refused(&cluster);
    snapshot(&cluster, "rollback", "vol@one");
    read_all("vol", 1);
    // The second snapshot is not below the image any more, and stays as it was.
    read_all("vol@two", 2);
    snapshot(&cluster, "rollback", "vol@two");
    read_all("vol", 2);
    assert_nothing_is_left(&cluster);

    cluster.ok(&["image", "flatten", "first"]);
    assert_eq!(image(&cluster, "first")["parent"], Value::Null);
    cluster.ok(&["image", "flatten", "second"]);
    read_all("second", 2);
    // What the second snapshot has from the first is merged into it, then into the image.
    snapshot(&cluster, "remove", "vol@one");
    read_all("vol@two", 2);
    write(&cluster, "vol", 0x33, "4k", "0", "2m");
    snapshot(&cluster, "remove", "vol@two");
    read_all("vol", 3);
    read_all("second", 2);
    check(&cluster, "first", 0x44, "8m", "1m");
    check(&cluster, "first", 0x11, "9m", "7m");
    assert_eq!(image(&cluster, "vol")["snapshots"], Value::Array(Vec::new()));
    ["vol", "first", "second"].iter().for_each(|name| _ = cluster.ok(&["image", "remove", name]));
    assert_nothing_is_left(&cluster);
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

fn what_is_in_use_is_refused(cluster: &Cluster) {
    refused(cluster, &["snapshot", "create", "vol@one"], "snapshot pool/vol@one exists");
    refused(cluster, &["snapshot", "create", "none@one"], "there is no image pool/none");
    refused(cluster, &["snapshot", "create", "vol"], "expected an image and a snapshot, as vol@monday");
    refused(cluster, &["snapshot", "remove", "vol@none"], "image pool/vol has no snapshot none");
    refused(cluster, &["snapshot", "remove", "vol@two"], "has clones: pool/second");
    // The clone of a later one has what this one has.
    refused(cluster, &["snapshot", "remove", "vol@one"], "has clones: pool/first, pool/second");
    snapshot(cluster, "protect", "vol@two");
    refused(cluster, &["snapshot", "remove", "vol@two"], "snapshot pool/vol@two is protected");
    snapshot(cluster, "unprotect", "vol@two");
    refused(cluster, &["remove", "vol"], "image pool/vol has snapshots: one, two; remove them first");
    refused(cluster, &["remove", "--keep=1h", "vol"], "image pool/vol has snapshots");
    refused(cluster, &["clone", "vol@none", "new"], "image pool/vol has no snapshot none");
    refused(cluster, &["clone", "vol@one", "second"], "image pool/second exists");
    refused(cluster, &["create", "a@b", "1m"], "IMAGE@SNAPSHOT is the name of a snapshot");
    refused(cluster, &["rename", "first", "a@b"], "IMAGE@SNAPSHOT is the name of a snapshot");
    // A snapshot is only read.
    let written = pattern(cluster, "vol@one", 1, &["--rw=write", "--bs=4k", "--size=4k"]);
    assert!(stderr_of(&written).contains("Write Protected"), "{}", text(&written.stderr));
}

#[test]
fn what_was_cut_off_or_zeroed_comes_back_from_no_snapshot() {
    let directory = scratch("store-snapshot-sizes");
    let options = [&SIZE[..], &["--nodes=2", "--replicas=2", "--groups=4"]].concat();
    let cluster = Cluster::start(&directory, &options);
    cluster.ok(&["image", "create", "vol", "16m"]);
    cluster.wait_until_healthy();
    write(&cluster, "vol", 0x11, "64k", "0", "16m");
    snapshot(&cluster, "create", "vol@full");
    cluster.ok(&["image", "resize", "--allow-shrink", "vol", "6m"]);
    cluster.ok(&["image", "resize", "vol", "16m"]);
    check(&cluster, "vol", 0x11, "0", "6m");
    check(&cluster, "vol", 0, "6m", "10m");
    // Unmapped blocks are zero, and not those of the snapshot.
    let trim = format!("--filename=store:pool/vol?cluster={}", cluster.path());
    let trimmed =
        ringbolt(&["perf", &trim, "--name=t", "--rw=trim", "--bs=6k", "--offset=1m", "--size=1536k"]);
    assert!(trimmed.status.success(), "{}{}", text(&trimmed.stdout), text(&trimmed.stderr));
    check(&cluster, "vol", 0x11, "0", "1m");
    check(&cluster, "vol", 0, "1m", "1536k");
    check(&cluster, "vol", 0x11, "2560k", "3584k");
    check(&cluster, "vol@full", 0x11, "0", "16m");
    // A copy has the same, in another volume.
    cluster.ok(&["image", "copy", "vol", "copy"]);
    cluster.ok(&["image", "copy", "vol@full", "full"]);
    check(&cluster, "copy", 0, "1m", "1536k");
    check(&cluster, "copy", 0x11, "2560k", "3584k");
    check(&cluster, "copy", 0, "6m", "10m");
    check(&cluster, "full", 0x11, "0", "16m");
    // Without the snapshot the image is the same.
    snapshot(&cluster, "remove", "vol@full");
    check(&cluster, "vol", 0, "1m", "1536k");
    check(&cluster, "vol", 0x11, "2560k", "3584k");
    check(&cluster, "vol", 0, "6m", "10m");
    assert_nothing_is_left(&cluster);
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

/// A node that lacks more than the logs have gets a copy of all objects: what is zero over a snapshot is so
/// there, too, and not what the snapshot has.
#[test]
fn zeroes_over_a_snapshot_survive_the_copy_to_a_node() {
    let directory = scratch("store-snapshot-zeroes");
    let options = ["--size=160m", "--nodes=2", "--replicas=2", "--groups=2", "--log-size=2m"];
    let cluster = Cluster::start(&directory, &options);
    cluster.ok(&["image", "create", "vol", "24m"]);
    cluster.wait_until_healthy();
    write(&cluster, "vol", 0x11, "64k", "0", "6m");
    snapshot(&cluster, "create", "vol@a");
    let trim = format!("--filename=store:pool/vol?cluster={}", cluster.path());
    let trimmed = ringbolt(&["perf", &trim, "--name=t", "--rw=trim", "--bs=64k", "--offset=1m", "--size=1m"]);
    assert!(trimmed.status.success(), "{}{}", text(&trimmed.stdout), text(&trimmed.stderr));
    write(&cluster, "vol", 0, "64k", "3m", "1m");
    snapshot(&cluster, "create", "vol@b");
    cluster.ok(&["store", "stop-node", "1"]);
    write(&cluster, "vol", 0x22, "64k", "8m", "16m");
    cluster.ok(&["store", "start-node", "1"]);
    cluster.wait_until_healthy();
    cluster.ok(&["store", "stop-node", "2"]);
    for image in ["vol@b", "vol"] {
        check(&cluster, image, 0x11, "0", "1m");
        check(&cluster, image, 0, "1m", "1m");
        check(&cluster, image, 0x11, "2m", "1m");
        check(&cluster, image, 0, "3m", "1m");
        check(&cluster, image, 0x11, "4m", "2m");
    }
    check(&cluster, "vol@a", 0x11, "0", "6m");
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

/// Blocks of 4 KiB that the writer writes, one after the other.
const BLOCKS: u64 = 1024;

/// Writes a number to all blocks in their order, the next one when the one before is completed.
fn writer(cluster: &Cluster, number: u32) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
    let filename = format!("--filename=store:pool/vol?cluster={}", cluster.path());
    let pattern = format!("--verify_pattern=0x{number:02x}");
    command.args(["perf", &filename, "--name=t", "--rw=write", "--bs=4k", "--iodepth=1", "--size=4m"]);
    command.args(["--verify=pattern", &pattern, "--do_verify=0", "--rate_iops=400"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// The number of blocks from the first on that have one number; all others have another one.
fn boundary(cluster: &Cluster, image: &str, new: u32, old: u32) -> u64 {
    let has = |block: u64| {
        let offset = format!("--offset={}", block * 4096);
        pattern(cluster, image, new, &["--rw=read", "--bs=4k", "--size=4k", &offset]).status.success()
    };
    let (mut low, mut high) = (0, BLOCKS);
    while low < high {
        let middle = (low + high) / 2;
        if has(middle) { low = middle + 1 } else { high = middle }
    }
    let bytes = |blocks: u64| (blocks * 4096).to_string();
    if low > 0 {
        verify(cluster, image, new, "4k", "0", &bytes(low));
    }
    if low < BLOCKS {
        verify(cluster, image, old, "4k", &bytes(low), &bytes(BLOCKS - low));
    }
    low
}

fn writes_of(cluster: &Cluster) -> u64 {
    let stats = json(&cluster.ok(&["image", "stats", "vol", "--interval=0s", "--json"]));
    stats[0]["writes"].as_u64().unwrap_or(0)
}

/// Waits until so many writes were counted.
fn wait_for_writes(cluster: &Cluster, count: u64) -> u64 {
    let started = Instant::now();
    loop {
        let counted = writes_of(cluster);
        if counted >= count {
            return counted;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "{counted} of {count} writes");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn snapshots_of_an_image_in_use_have_what_was_completed() {
    let directory = scratch("store-snapshot-in-use");
    let options = [&SIZE[..], &["--nodes=2", "--replicas=2", "--groups=4"]].concat();
    let cluster = Cluster::start(&directory, &options);
    cluster.ok(&["image", "create", "vol", "4m"]);
    cluster.wait_until_healthy();
    write(&cluster, "vol", 0x11, "64k", "0", "4m");
    let before = writes_of(&cluster);
    let writing = writer(&cluster, 0x22);
    let counted = wait_for_writes(&cluster, before + 100) - before;
    // A plain image gets its first snapshot, then one with a parent others.
    for name in ["vol@one", "vol@two", "vol@three"] {
        snapshot(&cluster, "create", name);
    }
    refused(&cluster, &["snapshot", "create", "vol@one"], "snapshot pool/vol@one exists");
    refused(&cluster, &["snapshot", "rollback", "vol@one"], "image pool/vol is in use by ");
    refused(&cluster, &["snapshot", "remove", "vol@one"], "image pool/vol is in use by ");
    refused(&cluster, &["flatten", "vol"], "image pool/vol is in use by ");
    let written = writing.wait_with_output().unwrap();
    assert!(written.status.success(), "{}{}", text(&written.stdout), text(&written.stderr));
    check(&cluster, "vol", 0x22, "0", "4m");
    let has = ["vol@one", "vol@two", "vol@three"].map(|name| boundary(&cluster, name, 0x22, 0x11));
    // What the nodes have counted was completed, but for the last one.
    assert!(has[0] + 1 >= counted && has[0] < BLOCKS, "{has:?}, {counted}");
    assert!(has.is_sorted(), "{has:?}");
    // Their volumes have had lower attach epochs than the head.
    for name in ["vol@two", "vol@one"] {
        snapshot(&cluster, "remove", name);
    }
    assert_eq!(boundary(&cluster, "vol@three", 0x22, 0x11), has[2]);
    check(&cluster, "vol", 0x22, "0", "4m");
    // One that does not answer is named, and is fenced by force.
    let written = writes_of(&cluster);
    let stopped = writer(&cluster, 0x33);
    wait_for_writes(&cluster, written + 20);
    signal(stopped.id(), Signal::STOP);
    refused(&cluster, &["snapshot", "create", "vol@four"], "which did not make the snapshot within 10 s");
    cluster.ok(&["image", "snapshot", "create", "--force", "vol@four"]);
    signal(stopped.id(), Signal::CONT);
    assert!(!stopped.wait_with_output().unwrap().status.success());
    assert_eq!(boundary(&cluster, "vol@four", 0x33, 0x22), boundary(&cluster, "vol", 0x33, 0x22));
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_holder_that_is_killed_while_it_makes_a_snapshot_leaves_one_or_none() {
    let directory = scratch("store-snapshot-killed");
    let options = [&SIZE[..], &["--nodes=2", "--replicas=2", "--groups=4"]].concat();
    let cluster = Cluster::start(&directory, &options);
    cluster.ok(&["image", "create", "vol", "4m"]);
    cluster.wait_until_healthy();
    write(&cluster, "vol", 1, "64k", "0", "4m");
    for attempt in 0..5_u32 {
        let (old, new) = (attempt + 1, attempt + 2);
        let written = writes_of(&cluster);
        let mut writing = writer(&cluster, new);
        wait_for_writes(&cluster, written + 20);
        let name = format!("vol@attempt{attempt}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
        command.args(["image", "snapshot", "create", &name, "--cluster", cluster.path()]);
        let making = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // At different moments of it.
        std::thread::sleep(Duration::from_millis(u64::from(attempt) * 25));
        writing.kill().unwrap();
        writing.wait().unwrap();
        let made = making.wait_with_output().unwrap();
        println!("attempt {attempt}: {}{}", text(&made.stdout), text(&made.stderr));
        let info = image(&cluster, "vol");
        let snapshots = info["snapshots"].as_array().unwrap();
        let exists = snapshots.iter().any(|it| name.ends_with(it["name"].as_str().unwrap()));
        assert!(exists || !made.status.success());
        let has = boundary(&cluster, "vol", new, old);
        if exists {
            assert!(boundary(&cluster, &name, new, old) <= has);
        }
        // The image is used again at once, and its snapshots are as before.
        write(&cluster, "vol", new, "64k", "0", "4m");
    }
    assert_nothing_is_left(&cluster);
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}
