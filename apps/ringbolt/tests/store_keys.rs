//! Clients with keys of their own: their rights on pools, keys that no node takes, and keys that are deleted
//! under load.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "rig/store.rs"]
mod store;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rig::{ringbolt, scratch, text};
use serde_json::{Value, json};
use store::Cluster;

const LIST: [&str; 4] = ["store", "key", "list", "--json"];
const READ: &[&str] = &["--rw=read"];
const WRITE: &[&str] = &["--rw=write"];

/// A cluster with an image in each of the pools `pool` and `other`; a group of the second one is on one node.
struct KeyRig {
    directory: PathBuf,
    cluster: Cluster,
}

impl KeyRig {
    fn start(name: &str) -> KeyRig {
        let directory = scratch(name);
        let options = ["--size=200m", "--groups=2", "--log-size=2m", "--nodes=2", "--spare=4"];
        let cluster = Cluster::start(&directory, &options);
        cluster.ok(&["store", "pool", "create", "other", "--replicas=1", "--groups=1"]);
        cluster.ok(&["image", "create", "vol", "64m"]);
        cluster.ok(&["image", "create", "--pool=other", "vol", "64m"]);
        cluster.wait_until_healthy();
        KeyRig { directory, cluster }
    }

    fn create(&self, name: &str, pools: &[&str], out: &Path) -> Output {
        let pools = pools.iter().flat_map(|pool| ["--pool", pool]);
        let command = ["store", "key", "create", name, "--out", out.to_str().unwrap()];
        self.cluster.run(&command.into_iter().chain(pools).collect::<Vec<_>>())
    }

    /// The directory of a client with a new key, which nodes take. Its map is here that of the cluster; with
    /// etcd it would be the URLs.
    fn client(&self, name: &str, pools: &[&str], readable: &str) -> PathBuf {
        let path = self.directory.join(name);
        std::fs::create_dir(&path).unwrap();
        std::os::unix::fs::symlink(self.cluster.directory.join("map"), path.join("map")).unwrap();
        let created = self.create(name, pools, &path.join("key"));
        assert!(created.status.success(), "{}", text(&created.stderr));
        wait_until("nodes take the key", || perf(&path, readable, READ).status.success());
        path
    }

    fn rights(&self) -> Vec<(String, Value)> {
        let all: Value = serde_json::from_str(&self.cluster.ok(&LIST)).unwrap();
        let right = |key: &Value| (key["name"].as_str().unwrap().to_string(), key["pools"].clone());
        all.as_array().unwrap().iter().map(right).collect()
    }

    fn end(self) {
        self.cluster.end();
        std::fs::remove_dir_all(&self.directory).unwrap();
    }
}

/// Nodes read a map in a directory every half second.
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(60), "not so: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn perf(client: &Path, pool: &str, options: &[&str]) -> Output {
    let filename = format!("--filename=store:{pool}/vol?cluster={}", client.display());
    ringbolt(&[&["perf", &filename, "--bs=4k", "--size=1m", "--name=t"][..], options].concat())
}

/// A client's requests fail at once, and one line says why.
fn refused(client: &Path, name: &str) {
    let started = Instant::now();
    let output = perf(client, "other", READ);
    // The only replica refuses it: other nodes are not waited for.
    assert!(started.elapsed() < Duration::from_secs(20));
    let stderr = text(&output.stderr);
    let why = format!("the client key {name} is not one of this cluster");
    assert!(!output.status.success() && stderr.contains(&why), "{stderr}");
}

#[test]
fn a_client_key_reads_and_writes_the_pools_that_it_has_rights_on() {
    let rig = KeyRig::start("store-key-rights");
    let vm = rig.client("vm", &["pool:rw", "other:r"], "pool");
    let backup = rig.client("backup", &["other:read"], "other");
    let secret = std::fs::read_to_string(vm.join("key")).unwrap();
    let secret = secret.trim().strip_prefix("vm:").unwrap().to_string();
    let expected = [("backup", json!({ "other": "r" })), ("vm", json!({ "other": "r", "pool": "rw" }))];
    assert_eq!(rig.rights(), expected.map(|(name, rights)| (name.to_string(), rights)));
    // The map has no secret of it.
    let record = std::fs::read_to_string(rig.cluster.directory.join("map/keys/vm")).unwrap();
    assert!(!record.contains(&secret) && record.contains("read_write"), "{record}");

    for (client, pool, options, is_permitted) in [
        (&vm, "pool", WRITE, true),
        (&vm, "pool", READ, true),
        (&vm, "pool", &["--rw=trim"][..], true),
        (&vm, "other", READ, true),
        (&vm, "other", WRITE, false),
        (&vm, "other", &["--rw=trim"], false),
        (&backup, "other", READ, true),
        (&backup, "other", WRITE, false),
        (&backup, "pool", READ, false),
    ] {
        let output = perf(client, pool, options);
        let what = format!("{} {pool} {options:?}: {}", client.display(), text(&output.stderr));
        assert_eq!(output.status.success(), is_permitted, "{what}");
        assert!(is_permitted || text(&output.stderr).contains("Access Denied"), "{what}");
    }
    // What nodes report names all groups: a client's key has no right to it, and makes no other key.
    let with_key = |command: &[&str]| {
        let output = ringbolt(&[command, &["--cluster", vm.to_str().unwrap()]].concat());
        assert!(!output.status.success());
        assert!(text(&output.stderr).contains("it is the key vm of a client"), "{}", text(&output.stderr));
    };
    with_key(&["store", "status"]);
    let out = rig.directory.join("x.key");
    with_key(&["store", "key", "create", "x", "--pool=other:r", "--out", out.to_str().unwrap()]);
    rig.end();
}

#[test]
fn keys_that_are_not_the_clusters_are_refused_by_name() {
    let rig = KeyRig::start("store-key-wrong");
    let vm = rig.client("vm", &["pool:rw", "other:r"], "other");
    let key = std::fs::read_to_string(vm.join("key")).unwrap();
    let secret = key.trim().strip_prefix("vm:").unwrap();
    // Another secret, an unknown name.
    std::fs::write(vm.join("key"), format!("vm:{}", "00".repeat(32))).unwrap();
    refused(&vm, "vm");
    std::fs::write(vm.join("key"), format!("other:{secret}")).unwrap();
    refused(&vm, "other");
    std::fs::write(vm.join("key"), &key).unwrap();
    assert!(perf(&vm, "other", READ).status.success());
    // Who writes to the map gets no more rights: the record is another key.
    let path = rig.cluster.directory.join("map/keys/vm");
    let record = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, record.replace("\"read\"", "\"read_write\"")).unwrap();
    wait_until("rights that were changed in the map are refused", || {
        !perf(&vm, "other", READ).status.success()
    });
    refused(&vm, "vm");
    std::fs::write(&path, &record).unwrap();
    wait_until("the key is taken again", || perf(&vm, "other", READ).status.success());

    for (name, pools, why) in [
        ("vm", &["pool:r"][..], "client key vm exists"),
        ("a/b", &["pool:r"], "1 to 32 letters"),
        ("third", &["missing:r"], "there is no pool missing"),
        ("third", &["pool:x"], "is no right"),
        ("third", &["pool:r", "pool:rw"], "given twice"),
    ] {
        let out = rig.directory.join("third.key");
        let output = rig.create(name, pools, &out);
        assert!(!output.status.success() && text(&output.stderr).contains(why), "{}", text(&output.stderr));
        assert!(!out.exists());
    }
    rig.end();
}

/// The connections of the nodes with TLS, and without.
fn connections(status: &Value) -> [u64; 2] {
    let count = |kind: &str| {
        let of_node = |node: &Value| node["report"]["connections"][kind].as_u64().unwrap_or(0);
        status["nodes"].as_array().unwrap().iter().map(of_node).sum()
    };
    [count("tls"), count("plain")]
}

#[test]
fn connections_are_encrypted_node_by_node_under_a_verified_load() {
    let rig = KeyRig::start("store-tls");
    let vm = rig.client("vm", &["pool:rw", "other:r"], "pool");
    let load = ["--rw=randrw", "--verify=crc32c", "--iodepth=8", "--size=8m", "--time_based", "--runtime=20"];
    let running = rig.cluster.perf(&load).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    assert_eq!(connections(&rig.cluster.status())[0], 0);
    for node in ["--node=1", "--node=2"] {
        rig.cluster.ok(&["store", "tls", "on", node]);
    }
    // The nodes' own connections, and those of clients that begin now.
    rig.cluster.wait_for("TLS between nodes", |status| connections(status)[0] > 0);
    assert!(perf(&vm, "other", READ).status.success());
    rig.cluster.ok(&["store", "tls", "required"]);
    let status = rig.cluster.wait_for("TLS alone", |status| {
        let [tls, plain] = connections(status);
        tls > 0 && plain == 0
    });
    assert_eq!(status["nodes"][0]["tls"], "required");
    let output = running.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    rig.cluster.wait_until_healthy();

    // Keys give the same rights, and others are refused by name.
    assert!(perf(&vm, "pool", READ).status.success());
    assert!(!perf(&vm, "other", WRITE).status.success());
    let key = std::fs::read_to_string(vm.join("key")).unwrap();
    for (wrong, name) in [(format!("vm:{}", "00".repeat(32)), "vm"), (key.replace("vm:", "other:"), "other")]
    {
        std::fs::write(vm.join("key"), wrong).unwrap();
        refused(&vm, name);
    }
    std::fs::write(vm.join("key"), &key).unwrap();

    // A greeting without TLS is not answered.
    let address = status["nodes"][0]["report"]["address"].as_str().unwrap();
    let mut stranger = TcpStream::connect(address).unwrap();
    stranger.write_all(b"RBGR").unwrap();
    let mut answer = Vec::new();
    // An error is a reset, as bytes were not read.
    let _ = stranger.read_to_end(&mut answer);
    assert_eq!(answer, b"");

    rig.cluster.ok(&["store", "tls", "off"]);
    wait_until("a client connects without TLS", || {
        perf(&vm, "pool", READ).status.success() && rig.cluster.status()["nodes"][0]["tls"] == "off"
    });
    let unknown = rig.cluster.run(&["store", "tls", "on", "--node=9"]);
    assert!(text(&unknown.stderr).contains("the cluster has no node 9"), "{}", text(&unknown.stderr));
    rig.end();
}

#[test]
fn a_key_that_is_deleted_ends_the_connections_that_have_it() {
    let rig = KeyRig::start("store-key-deleted");
    let vm = rig.client("vm", &["pool:rw"], "pool");
    let other = rig.client("other", &["pool:rw"], "pool");
    // An image has one user.
    rig.cluster.ok(&["image", "create", "other", "64m"]);
    let load = |client: &Path, image: &str, seconds: u32| {
        let filename = format!("--filename=store:pool/{image}?cluster={}", client.display());
        Command::new(env!("CARGO_BIN_EXE_ringbolt"))
            .args(["perf", &filename, "--bs=4k", "--rw=randwrite", "--size=1m", "--name=t"])
            .args(["--time_based", &format!("--runtime={seconds}")])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let written = |status: &Value| {
        let reports = status["nodes"].as_array().unwrap().iter();
        let replicas = reports.flat_map(|node| node["report"]["replicas"].as_array().unwrap());
        replicas.map(|replica| replica["log_end"].as_u64().unwrap()).sum::<u64>()
    };
    let before = written(&rig.cluster.status());
    let (ended, undisturbed, started) = (load(&vm, "vol", 60), load(&other, "other", 5), Instant::now());
    rig.cluster.wait_for("written to", |status| written(status) > before + 1000);
    rig.cluster.ok(&["store", "key", "delete", "vm"]);
    let ended = ended.wait_with_output().unwrap();
    assert!(!ended.status.success() && started.elapsed() < Duration::from_secs(40));
    let stderr = text(&ended.stderr);
    assert!(stderr.contains("the client key vm is not one of this cluster"), "{stderr}");
    let undisturbed = undisturbed.wait_with_output().unwrap();
    assert!(undisturbed.status.success(), "{}", text(&undisturbed.stderr));
    assert_eq!(rig.rights(), [("other".to_string(), json!({ "pool": "rw" }))]);
    let missing = rig.cluster.run(&["store", "key", "delete", "vm"]);
    assert!(text(&missing.stderr).contains("there is no client key vm"), "{}", text(&missing.stderr));
    // A key of the same name is another key.
    let again = rig.create("vm", &["pool:rw"], &rig.directory.join("again.key"));
    assert!(again.status.success(), "{}", text(&again.stderr));
    std::fs::rename(vm.join("key"), vm.join("before")).unwrap();
    std::fs::copy(rig.directory.join("again.key"), vm.join("key")).unwrap();
    wait_until("the new key is taken", || perf(&vm, "pool", READ).status.success());
    std::fs::rename(vm.join("before"), vm.join("key")).unwrap();
    assert!(!perf(&vm, "pool", READ).status.success());
    rig.end();
}
