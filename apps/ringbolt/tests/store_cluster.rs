//! A cluster of the store as its users run it: three processes, whose nodes are killed and stopped under
//! verified load.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "rig/store.rs"]
mod store;

use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rig::{ServerProcess, ringbolt, scratch, text};
use rustix::process::Signal;
use serde_json::{Value, json};
use store::{Cluster, is_running, signal};

const SMALL: [&str; 5] = ["--size=200m", "--groups=4", "--log-size=2m", "--nodes=3", "--replicas=3"];

fn small() -> &'static [&'static str] {
    &SMALL
}

#[test]
fn verified_load_outlives_nodes_that_are_killed_and_stopped() {
    let directory = scratch("store-cluster");
    let mut cluster = Cluster::start(&directory, small());
    assert_eq!(cluster.ok(&["image", "create", "vol", "64m"]), "store:pool/vol\n");
    assert!(text(&cluster.run(&["image", "create", "vol", "64m"]).stderr).contains("image pool/vol exists"));
    cluster.wait_until_healthy();
    let load = cluster.perf(&["--rw=randrw", "--iodepth=8", "--time_based", "--runtime=9"]).spawn().unwrap();
    // A node that ends soon after its start is started again later.
    std::thread::sleep(Duration::from_secs(3));
    let nodes = cluster.nodes();
    assert_eq!(nodes.len(), 3);
    signal(nodes[0], Signal::KILL);
    std::thread::sleep(Duration::from_secs(1));
    signal(nodes[1], Signal::STOP);
    // The others go on without it.
    let degraded = cluster.wait_for("degraded", |status| {
        let groups = status["groups"].as_array().unwrap();
        groups
            .iter()
            .all(|group| group["primary"] != 2 && !group["in_sync"].as_array().unwrap().contains(&2.into()))
    });
    assert!(degraded["summary"].as_str().unwrap().starts_with("not healthy"), "{degraded:#}");
    signal(nodes[1], Signal::CONT);
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    cluster.wait_until_healthy();
    assert_ne!(cluster.nodes()[0], nodes[0]);

    // All at once; what was acknowledged is there when they are back.
    // Nodes that end in their first two seconds are started again later.
    let time = ["--time_based", "--runtime=3"];
    let fill = [&["--rw=write", "--size=8m", "--iodepth=16", "--do_verify=0"], &time[..]].concat();
    let filled = cluster.perf(&fill).output().unwrap();
    assert!(filled.status.success(), "{}", text(&filled.stderr));
    std::thread::sleep(Duration::from_secs(2));
    cluster.nodes().into_iter().for_each(|node| signal(node, Signal::KILL));
    let read = cluster.perf(&["--rw=read", "--size=8m", "--iodepth=16"]).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));
    cluster.wait_until_healthy();

    // Clients find nodes that have other addresses: theirs are taken while they are away.
    let load = cluster.perf(&["--rw=randrw", "--iodepth=8", "--time_based", "--runtime=6"]).spawn().unwrap();
    let status = cluster.status();
    signal(cluster.up.id(), Signal::INT);
    assert!(cluster.up.wait().unwrap().success());
    let addresses =
        status["nodes"].as_array().unwrap().iter().map(|node| node["report"]["address"].as_str().unwrap());
    let taken: Vec<_> = addresses.map(|address| TcpListener::bind(address).unwrap()).collect();
    cluster = Cluster::start(&directory, &[]);
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    drop(taken);

    // A preallocated image has its space on every replica.
    let free = |status: &Value| {
        let reports = status["nodes"].as_array().unwrap().iter();
        let replicas = reports.flat_map(|node| node["report"]["replicas"].as_array().unwrap());
        replicas.map(|replica| replica["free_extents"].as_u64().unwrap()).sum::<u64>()
    };
    let before = free(&cluster.wait_until_healthy());
    cluster.ok(&["image", "create", "--preallocate", "whole", "32m"]);
    let objects = 32 / 4 * 3;
    let extents = (wire_store::EXTENTS_PER_OBJECT * objects) as u64;
    cluster.wait_for("allocated", |status| free(status) == before - extents);
    cluster.ok(&["image", "remove", "whole"]);

    // What a write survives is what the file system of the files keeps, whatever the pool wants.
    let file = cluster.directory.join("node1/store.img");
    // It has data of users: its owner alone may use it.
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let in_memory = rustix::fs::statfs(&file).unwrap().f_type as u64 & 0xffff_ffff == 0x0102_1994;
    let status = cluster.status();
    if in_memory {
        assert_eq!(status["groups"][0]["durability"], "memory");
    }
    for node in status["nodes"].as_array().unwrap() {
        assert_eq!(node["report"]["durability"], status["groups"][0]["durability"]);
    }
    assert_eq!(status["groups"][0]["class"], "disk");

    // What is not there.
    let missing = ringbolt(&["image", "remove", "other", "--cluster", cluster.path()]);
    assert!(text(&missing.stderr).contains("there is no image pool/other"), "{}", text(&missing.stderr));
    an_image_in_use_is_not_taken_away(&cluster, &directory);
    an_image_in_the_trash_is_had_back_until_it_is_purged(&cluster);
    cluster.ok(&["image", "resize", "--allow-shrink", "vol", "32m"]);
    let listed: Value = serde_json::from_str(&cluster.ok(&["image", "list", "--json"])).unwrap();
    assert_eq!((&listed[0]["name"], &listed[0]["size"]), (&"vol".into(), &(32u64 << 20).into()));
    cluster.ok(&["image", "remove", "vol"]);
    assert_eq!(cluster.ok(&["image", "list", "--json"]), "[]\n");
    // Nothing is left of any image.
    let objects = |status: &Value| {
        let reports = status["nodes"].as_array().unwrap().iter();
        let replicas = reports.flat_map(|node| node["report"]["replicas"].as_array().unwrap());
        replicas.map(|replica| replica["objects"].as_u64().unwrap()).sum::<u64>()
    };
    cluster.wait_for("empty", |status| objects(status) == 0);
    assert_eq!(cluster.ok(&["store", "reclaim"]), "");
    // A large one costs no more than it has.
    let began = Instant::now();
    cluster.ok(&["image", "create", "large", "1t"]);
    cluster.ok(&["image", "remove", "large"]);
    println!("an empty image of 1 TiB is removed after {:?}", began.elapsed());

    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

/// Two servers, and commands, want image `vol` of 64 MiB.
fn an_image_in_use_is_not_taken_away(cluster: &Cluster, directory: &Path) {
    let refused = |output: std::process::Output, why: &str| {
        let stderr = text(&output.stderr);
        assert!(!output.status.success() && stderr.contains(why), "{stderr}");
    };
    let create = format!("cluster={}", cluster.path());
    let create = ["bdev_store_create", "pool=pool", "image=vol", &create, "name=v"];
    let first = ServerProcess::start(directory, "first", &[]);
    first.ok(&create);
    let blocks = |server: &ServerProcess| server.ok(&["bdev_get_bdevs", "name=v"])[0]["num_blocks"].clone();
    assert_eq!(blocks(&first), (64u64 << 20) / 512);

    let in_use = format!("in use by {}", rustix::system::uname().nodename().to_string_lossy());
    refused(cluster.run(&["image", "remove", "vol"]), &in_use);
    refused(cluster.run(&["image", "resize", "vol", "8m"]), "--allow-shrink");
    refused(cluster.run(&["image", "resize", "--allow-shrink", "vol", "8m"]), &in_use);
    refused(cluster.perf(&["--rw=write", "--size=1m"]).output().unwrap(), &in_use);
    let second = ServerProcess::start(directory, "second", &[]);
    refused(second.rpc(&create), &in_use);
    refused(second.rpc(&[&create[..], &["shared=true"]].concat()), &in_use);
    second.ok(&[&create[..], &["read_only=true"]].concat());
    second.ok(&["bdev_store_delete", "name=v"]);

    // Who has it is no secret, and what is protected goes not even by force.
    let info = cluster.ok(&["image", "info", "vol"]);
    assert!(
        info.contains(&format!("process {}", first.pid())) && info.contains("protected from removal: no"),
        "{info}"
    );
    cluster.ok(&["image", "protect", "vol"]);
    let described: Value = serde_json::from_str(&cluster.ok(&["image", "info", "--json", "vol"])).unwrap();
    assert_eq!(
        (&described["protected"], &described["attached_by"][0]["process"]),
        (&json!(true), &json!(first.pid()))
    );
    refused(cluster.run(&["image", "remove", "--force", "vol"]), "pool/vol is protected");
    refused(
        cluster.run(&["image", "resize", "--allow-shrink", "--force", "vol", "8m"]),
        "pool/vol is protected",
    );
    cluster.ok(&["image", "unprotect", "vol"]);

    // Growing needs no exclusive use, and the server sees it.
    cluster.ok(&["image", "resize", "vol", "96m"]);
    let end = Instant::now() + Duration::from_secs(30);
    while blocks(&first) != (96u64 << 20) / 512 {
        assert!(Instant::now() < end, "the server does not see that the image has grown");
        std::thread::sleep(Duration::from_millis(50));
    }

    // With another name it is the same image to the one that has it.
    cluster.ok(&["image", "rename", "vol", "data"]);
    refused(cluster.run(&["image", "rename", "vol", "data"]), "there is no image pool/vol");
    refused(cluster.run(&["image", "remove", "--keep", "1d", "data"]), &in_use);
    cluster.ok(&["image", "resize", "data", "100m"]);
    let end = Instant::now() + Duration::from_secs(30);
    while blocks(&first) != (100u64 << 20) / 512 {
        assert!(Instant::now() < end, "the server does not see that the renamed image has grown");
        std::thread::sleep(Duration::from_millis(50));
    }
    cluster.ok(&["image", "rename", "data", "vol"]);
    cluster.ok(&["image", "resize", "--allow-shrink", "--force", "vol", "96m"]);
    first.ok(&["bdev_store_delete", "name=v"]);
    first.ok(&create);

    // By force; then both have it for their whole blocks.
    second.ok(&[&create[..], &["force=true"]].concat());
    second.ok(&["bdev_store_delete", "name=v"]);
    first.ok(&["bdev_store_delete", "name=v"]);
    for server in [&first, &second] {
        server.ok(&[&create[..], &["shared=true"]].concat());
        assert_eq!(server.ok(&["bdev_get_bdevs", "name=v"])[0]["block_size"], 4096);
    }
    assert_eq!((first.stop(), second.stop()), (Some(0), Some(0)));
    // Cut off and grown again, its end is empty; what the image had before is there.
    let filled =
        cluster.perf(&["--rw=write", "--do_verify=0", "--size=32m", "--iodepth=16"]).output().unwrap();
    assert!(filled.status.success(), "{}", text(&filled.stderr));
    cluster.ok(&["image", "resize", "--allow-shrink", "vol", "6m"]);
    cluster.ok(&["image", "resize", "vol", "64m"]);
    let kept = cluster.perf(&["--rw=read", "--size=6m", "--iodepth=16"]).output().unwrap();
    assert!(kept.status.success(), "{}{}", text(&kept.stdout), text(&kept.stderr));
    refused(cluster.perf(&["--rw=read", "--offset=6m", "--size=4k"]).output().unwrap(), "");
}

/// Image `vol` of 64 MiB, which none has.
fn an_image_in_the_trash_is_had_back_until_it_is_purged(cluster: &Cluster) {
    let refused = |arguments: &[&str], why: &str| {
        let stderr = text(&cluster.run(arguments).stderr);
        assert!(stderr.contains(why), "{stderr}");
    };
    let trash =
        || -> Value { serde_json::from_str(&cluster.ok(&["image", "list", "--trash", "--json"])).unwrap() };
    let verify = || cluster.perf(&["--rw=read", "--size=6m", "--iodepth=16"]).output().unwrap();
    let written = cluster.perf(&["--rw=write", "--size=6m", "--iodepth=16"]).output().unwrap();
    assert!(written.status.success(), "{}", text(&written.stderr));
    cluster.ok(&["image", "protect", "vol"]);
    refused(&["image", "remove", "--keep", "7d", "vol"], "pool/vol is protected");
    cluster.ok(&["image", "unprotect", "vol"]);
    cluster.ok(&["image", "remove", "--keep", "7d", "vol"]);
    refused(&["image", "remove", "vol"], "there is no image pool/vol");
    let entry = &trash()[0];
    assert_eq!((&entry["name"], &entry["size"]), (&json!("vol"), &json!(64 << 20)));
    let inside = format!("trash.{}", entry["volume"]);
    refused(&["image", "resize", &inside, "80m"], "is in the trash");
    assert!(!cluster.ok(&["image", "list"]).contains("pool/"), "it is listed");
    refused(&["store", "pool", "remove", "pool"], "has images");

    // Its name is free, and its data is there.
    cluster.ok(&["image", "create", "vol", "8m"]);
    refused(&["image", "restore", "vol"], "--as");
    cluster.ok(&["image", "remove", "--keep", "0s", "vol"]);
    refused(&["image", "restore", "vol"], "--volume");
    cluster.ok(&["image", "purge", "--expired"]);
    assert_eq!(trash().as_array().unwrap().len(), 1);
    refused(&["image", "purge", "vol"], "--force");
    cluster.ok(&["image", "restore", "vol"]);
    assert!(verify().status.success(), "{}", text(&verify().stdout));
    assert_eq!(trash(), json!([]));

    cluster.ok(&["image", "remove", "--keep", "7d", "vol"]);
    cluster.ok(&["image", "purge", "--force", "vol"]);
    refused(&["image", "restore", "vol"], "there is no image pool/vol in the trash");
    cluster.ok(&["image", "create", "vol", "64m"]);
}

/// All nodes hang under load through an export, which is removed then.
#[test]
fn removing_an_export_aborts_what_hangs_and_the_bdev_serves_again() {
    let directory = scratch("store-export");
    let cluster = Cluster::start(&directory, small());
    cluster.ok(&["image", "create", "vol", "64m"]);
    cluster.wait_until_healthy();
    let nqn = "nqn.2026-11.io.ringbolt:export";
    let call = |method: &str, params: Value| json!({ "method": method, "params": params });
    let image = json!({ "name": "v", "cluster": cluster.path(), "pool": "pool", "image": "vol" });
    let address = json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0" });
    let nvmf = [
        call("nvmf_create_transport", json!({ "trtype": "TCP" })),
        call("nvmf_create_subsystem", json!({ "nqn": nqn, "allow_any_host": true })),
        call("nvmf_subsystem_add_ns", json!({ "nqn": nqn, "namespace": { "bdev_name": "v", "nsid": 1 } })),
        call("nvmf_subsystem_add_listener", json!({ "nqn": nqn, "listen_address": address })),
    ];
    let config = json!({ "subsystems": [
        { "subsystem": "bdev", "config": [call("bdev_store_create", image)] },
        { "subsystem": "nvmf", "config": nvmf },
    ] });
    let server = ServerProcess::configured(&directory, "server", &config);
    let filename = format!("--filename=nvme+tcp://127.0.0.1:{}/{nqn}?ns=1", server.port());
    let perf = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
        command.args(["perf", &filename, "--name=t", "--bs=4k", "--rw=randwrite", "--iodepth=4"]);
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let mut load = perf(&["--time_based", "--runtime=60"]).spawn().unwrap();
    let written = || server.ok(&["bdev_get_iostat", "name=v"])["bdevs"][0]["num_write_ops"].as_u64().unwrap();
    let wait_for = |what: &str, is_so: &mut dyn FnMut() -> bool| {
        let end = Instant::now() + Duration::from_secs(30);
        while !is_so() {
            assert!(Instant::now() < end, "{what}");
            std::thread::sleep(Duration::from_millis(200));
        }
    };
    wait_for("the load does not begin", &mut || written() > 100);
    cluster.nodes().into_iter().for_each(|node| signal(node, Signal::STOP));
    let mut before = 0;
    wait_for("the load does not hang", &mut || std::mem::replace(&mut before, written()) == written());

    let began = Instant::now();
    let subsystem = format!("nqn={nqn}");
    server.ok(&["nvmf_subsystem_remove_ns", &subsystem, "nsid=1"]);
    println!("the export is removed after {:?}", began.elapsed());
    load.kill().unwrap();
    load.wait().unwrap();
    cluster.nodes().into_iter().for_each(|node| signal(node, Signal::CONT));
    cluster.wait_until_healthy();
    server.ok(&["nvmf_subsystem_add_ns", &subsystem, r#"namespace={"bdev_name":"v","nsid":1}"#]);
    let again = perf(&["--size=1m", "--verify=crc32c"]).output().unwrap();
    assert!(again.status.success(), "{}{}", text(&again.stdout), text(&again.stderr));
    assert_eq!(server.stop(), Some(0));
    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_full_cluster_refuses_writes_and_serves_what_it_has() {
    let directory = scratch("store-full");
    let cluster = Cluster::start(&directory, small());
    // A preallocated image that is too large leaves nothing.
    let large = cluster.run(&["image", "create", "--preallocate", "large", "1g"]);
    let why = "its space cannot be allocated, so that it is removed: Capacity Exceeded";
    assert!(text(&large.stderr).contains(why), "{}", text(&large.stderr));
    assert_eq!(cluster.ok(&["image", "list", "--json"]), "[]\n");

    // Many writes in flight, each of a new extent, until there is no space.
    cluster.ok(&["image", "create", "vol", "1g"]);
    let fill = ["--rw=write", "--bs=64k", "--iodepth=32", "--size=1g", "--do_verify=0"];
    let filled = cluster.perf(&fill).output().unwrap();
    assert!(text(&filled.stderr).contains("Capacity Exceeded"), "{}", text(&filled.stderr));
    cluster.wait_until_healthy();
    let read = ["--rw=read", "--bs=64k", "--iodepth=8", "--size=32m"];
    let read = cluster.perf(&read).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));

    // What is removed makes room.
    cluster.ok(&["image", "remove", "vol"]);
    cluster.ok(&["image", "create", "--preallocate", "vol", "64m"]);
    let write = cluster.perf(&["--rw=write", "--bs=64k", "--iodepth=32", "--size=64m"]).output().unwrap();
    assert!(write.status.success(), "{}{}", text(&write.stdout), text(&write.stderr));
    cluster.wait_until_healthy();
    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn strangers_disturb_no_client() {
    let directory = scratch("store-strangers");
    let mut cluster = Cluster::start(&directory, small());
    cluster.ok(&["image", "create", "vol", "64m"]);
    let status = cluster.wait_until_healthy();
    // Connections that say nothing, or nonsense.
    let mut strangers = Vec::new();
    for node in status["nodes"].as_array().unwrap() {
        let address = node["report"]["address"].as_str().unwrap();
        for index in 0..100 {
            let mut stranger = TcpStream::connect(address).unwrap();
            if index % 2 == 0 {
                std::io::Write::write_all(&mut stranger, b"GET / HTTP/1.1\\r\\n\\r\\n").unwrap();
            }
            strangers.push(stranger);
        }
    }
    let load = cluster.perf(&["--rw=randrw", "--iodepth=8", "--number_ios=500"]).output().unwrap();
    assert!(load.status.success(), "{}", text(&load.stderr));
    drop(strangers);

    // The map without the right key.
    let copy = directory.join("copy");
    std::fs::create_dir(&copy).unwrap();
    std::os::unix::fs::symlink(cluster.directory.join("map"), copy.join("map")).unwrap();
    let key = copy.join("key");
    let filename = format!("--filename=store:pool/vol?cluster={}", copy.display());
    let perf = || ringbolt(&["perf", &filename, "--bs=4k", "--rw=read", "--number_ios=1", "--name=t"]);
    for (content, mode, reason) in [
        (None, 0, "No such file"),
        (Some("00".repeat(32)), 0o640, "others than its owner may use it, mode 640: chmod 600"),
        (Some("short\n".to_string()), 0o600, "64 hexadecimal digits"),
        (Some("00".repeat(32)), 0o600, "does not have the key of this cluster"),
    ] {
        if let Some(content) = content {
            std::fs::write(&key, content).unwrap();
            std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        }
        let refused = perf();
        assert!(!refused.status.success());
        assert!(text(&refused.stderr).contains(reason), "{reason}: {}", text(&refused.stderr));
    }

    // A second `up` of the same cluster, and one that is killed: its nodes end with it.
    let second = ringbolt(&["store", "up", "--cluster", cluster.path()]);
    assert!(text(&second.stderr).contains("runs already"), "{}", text(&second.stderr));
    let nodes = cluster.nodes();
    assert_eq!(nodes.len(), 3);
    cluster.up.kill().unwrap();
    cluster.up.wait().unwrap();
    let started = Instant::now();
    while nodes.iter().any(|node| is_running(*node)) {
        assert!(started.elapsed() < Duration::from_secs(30), "a node outlives its cluster");
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = cluster.status();
    assert!(status["summary"].as_str().unwrap().ends_with("4 down"), "{status:#}");
    assert!(status["groups"][0]["why"].as_str().unwrap().contains("does not answer"), "{status:#}");

    // A node with a copy of the device of another: the original is in use.
    let config = cluster.directory.join("node1/config.json");
    let foreign = directory.join("foreign");
    std::fs::copy(cluster.directory.join("node2/store.img"), &foreign).unwrap();
    let other = std::fs::read_to_string(&config).unwrap();
    assert!(other.contains("\"node1/store.img\""), "{other}");
    let other = other.replace("node1/store.img", foreign.to_str().unwrap());
    std::fs::write(&config, other).unwrap();
    let path = cluster.directory.clone();
    let cluster = Cluster::start_in(&path, &[]);
    let log = || std::fs::read_to_string(path.join("node1/log")).unwrap();
    cluster.wait_for("without node 1", |status| {
        let groups = status["groups"].as_array().unwrap();
        groups.iter().all(|group| group["state"] == "degraded")
            && log().contains("the device Disk belongs to another node")
    });
    drop(cluster);

    // None of the nodes starts.
    for node in 1..=3 {
        std::fs::remove_file(path.join(format!("node{node}/config.json"))).unwrap();
    }
    let up = ringbolt(&["store", "up", "--cluster", path.to_str().unwrap()]);
    let reason = text(&up.stderr);
    assert!(reason.contains("node 1 does not start: ") && reason.contains("config.json"), "{reason}");
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn lease_and_grace_are_those_of_the_clusters_creation() {
    let directory = scratch("store-lease");
    let path = directory.join("cluster");
    let one = ["--size=200m", "--groups=1", "--log-size=2m", "--nodes=1"];
    let up = |options: &[&str]| {
        let output =
            ringbolt(&[&["store", "up", "--cluster", path.to_str().unwrap()], &one[..], options].concat());
        assert!(!output.status.success());
        text(&output.stderr)
    };
    for (options, why) in [
        (&["--lease=600ms"][..], "does not outlast a lease of 600 ms"),
        (&["--lease=480ms", "--grace=520ms"], "together are not below 1000 ms"),
        (&["--grace=300ms"], "does not outlast a lease of 400 ms"),
        (&["--lease=10ms"], "a lease of 10 ms is too short"),
        (&["--lease=300500us"], "whole milliseconds"),
    ] {
        let refused = up(options);
        assert!(refused.contains(why) && refused.trim_end().lines().count() == 1, "{options:?}: {refused}");
        assert!(!path.exists());
    }
    let given = ["--lease=150ms", "--grace=170ms"];
    let mut cluster = Cluster::start(&directory, &[&one[..], &given].concat());
    let times = |of: &Value| (of["lease_ms"].as_u64(), of["grace_ms"].as_u64());
    let expected = (Some(150), Some(170));
    let status = cluster.wait_until_healthy();
    assert_eq!((times(&status), times(&status["nodes"][0]["report"])), (expected, expected));
    assert!(cluster.ok(&["store", "status"]).contains("lease 150 ms, grace 170 ms"));
    signal(cluster.up.id(), Signal::INT);
    assert!(cluster.up.wait().unwrap().success());
    // It keeps them, and takes no others.
    let refused = up(&["--lease=200ms", "--grace=250ms"]);
    assert!(refused.contains("a lease of 150 ms and a grace of 170 ms, which do not change"), "{refused}");
    cluster = Cluster::start(&directory, &["--lease=150ms"]);
    assert_eq!(times(&cluster.wait_until_healthy()["nodes"][0]["report"]), expected);
    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

/// A cluster whose node 2 has its device below one that fails or hangs when it is asked to.
fn cluster_with_error_device(directory: &Path) -> Cluster {
    let mut cluster = Cluster::start(directory, small());
    cluster.ok(&["image", "create", "vol", "64m"]);
    signal(cluster.up.id(), Signal::INT);
    assert!(cluster.up.wait().unwrap().success());
    let path = cluster.directory.join("node2/config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let devices = config["subsystems"][0]["config"].as_array_mut().unwrap();
    devices.push(serde_json::json!({ "method": "bdev_error_create", "params": { "base_name": "Disk" } }));
    config["subsystems"][1]["config"][0]["params"]["bdev_name"] = "EE_Disk".into();
    std::fs::write(&path, config.to_string()).unwrap();
    Cluster::start(directory, &[])
}

/// Calls a method of that device.
fn call_error_device(cluster: &Cluster, method: &str, parameters: &[&str]) {
    let socket = cluster.directory.join("node2/rpc.sock");
    let rpc = ["rpc", "-r", socket.to_str().unwrap(), method, "name=EE_Disk"];
    let called = ringbolt(&[&rpc[..], parameters].concat());
    assert!(called.status.success(), "{method}: {}", text(&called.stderr));
}

/// Node 2 hangs for longer than a device may, and answers again.
#[test]
fn replicas_on_a_device_that_hangs_hand_over_until_it_answers() {
    let directory = scratch("store-hang");
    let cluster = cluster_with_error_device(&directory);
    let primaries = |status: &Value| {
        let groups = status["groups"].as_array().unwrap();
        groups.iter().filter(|group| group["primary"] == 2).count()
    };
    cluster.wait_for("healthy, with primaries on node 2", |status| {
        status["healthy"] == true && primaries(status) > 0
    });
    let load = ["--rw=randrw", "--iodepth=8", "--time_based", "--runtime=14"];
    let load = cluster.perf(&load).spawn().unwrap();
    let pending = ["io_type=all", "error_type=pending", "num=4294967295"];
    call_error_device(&cluster, "bdev_error_inject_error", &pending);
    cluster.wait_for("without node 2", |status| {
        let groups = status["groups"].as_array().unwrap();
        let in_sync = |group: &Value| group["in_sync"].as_array().unwrap().contains(&2.into());
        primaries(status) == 0 && !groups.iter().any(in_sync)
    });
    // No request has failed.
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    let clear = ["io_type=clear", "error_type=failure", "num=0"];
    call_error_device(&cluster, "bdev_error_inject_error", &clear);
    call_error_device(&cluster, "bdev_error_resume_pending", &[]);
    cluster.wait_until_healthy();
    let log = std::fs::read_to_string(cluster.directory.join("node2/log")).unwrap();
    assert!(log.contains("the device answers nothing for 10 s") && log.contains("answers again"), "{log}");
    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_device_that_fails_ends_its_replicas_and_no_process() {
    let directory = scratch("store-eio");
    let cluster = cluster_with_error_device(&directory);
    let healthy = cluster.wait_until_healthy();
    assert_eq!(healthy["nodes"][1]["report"]["bdev_name"], "EE_Disk");
    let nodes = cluster.nodes();
    assert_eq!(nodes.len(), 3);

    let load = cluster.perf(&["--rw=randrw", "--iodepth=8", "--time_based", "--runtime=8"]).spawn().unwrap();
    let written = |status: &Value| {
        let replicas = status["nodes"][1]["report"]["replicas"].as_array().unwrap();
        replicas.iter().map(|replica| replica["log_end"].as_u64().unwrap()).sum::<u64>()
    };
    cluster.wait_for("written to", |status| written(status) > written(&healthy) + 100);
    let failure = ["io_type=all", "error_type=failure", "num=4294967295"];
    call_error_device(&cluster, "bdev_error_inject_error", &failure);
    let degraded = cluster.wait_for("without node 2", |status| {
        let is_without = |group: &Value| {
            let in_sync = group["in_sync"].as_array().unwrap();
            group["state"] == "degraded"
                && !in_sync.contains(&2.into())
                && group["catching_up"] == "2 (failed)"
        };
        status["groups"].as_array().unwrap().iter().all(is_without)
    });
    for group in degraded["groups"].as_array().unwrap() {
        let why = group["why"].as_str().unwrap();
        assert!(why.starts_with("the replica on node 2 failed: ") && why.contains("of the device"), "{why}");
    }
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    // Every process still runs; one that is started again finds its device in order.
    assert_eq!(cluster.nodes(), nodes);
    signal(nodes[1], Signal::KILL);
    cluster.wait_until_healthy();
    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn nodes_with_their_logs_on_files_of_their_own_lose_nothing_when_they_are_killed() {
    let directory = scratch("store-logs");
    let log = |node: u32| directory.join(format!("log{node}")).to_str().unwrap().to_string();
    for node in [1, 2] {
        std::fs::File::create(log(node)).unwrap().set_len(32 << 20).unwrap();
    }
    let two = ["--size=200m", "--groups=2", "--log-size=2m", "--nodes=2"];
    let refused = directory.join("refused");
    let with = |logs: &[String]| {
        let logs = logs.iter().flat_map(|log| ["--log", log]);
        let start = ["store", "up", "--cluster", refused.to_str().unwrap()].into_iter().chain(two);
        let output = ringbolt(&start.chain(logs).collect::<Vec<_>>());
        assert!(!output.status.success() && !refused.exists());
        text(&output.stderr)
    };
    assert!(with(&[log(1)]).contains("2 nodes need as many --log, and 1 are given"));
    assert!(with(&[log(1), log(1)]).contains("given twice"));
    assert!(with(&[log(1), log(3)]).contains("--log"));

    let (first, second) = (log(1), log(2));
    let options = [&two[..], &["--log", &first, "--log", &second]].concat();
    let mut cluster = Cluster::start(&directory, &options);
    cluster.ok(&["image", "create", "vol", "64m"]);
    let healthy = cluster.wait_until_healthy();
    assert_eq!(healthy["nodes"][0]["report"]["log_bdev_name"], "Log");
    // Nodes that end in their first two seconds are started again later.
    let time = ["--time_based", "--runtime=3"];
    let fill = [&["--rw=write", "--size=8m", "--iodepth=16", "--do_verify=0"], &time[..]].concat();
    let filled = cluster.perf(&fill).output().unwrap();
    assert!(filled.status.success(), "{}", text(&filled.stderr));
    cluster.nodes().into_iter().for_each(|node| signal(node, Signal::KILL));
    let read = cluster.perf(&["--rw=read", "--size=8m", "--iodepth=16"]).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));
    cluster.wait_until_healthy();
    signal(cluster.up.id(), Signal::INT);
    assert!(cluster.up.wait().unwrap().success());

    // Each file of data belongs to its log.
    let data =
        |node: u32| cluster.directory.join(format!("node{node}/store.img")).to_str().unwrap().to_string();
    let check = |data: &str, log: &[&str]| ringbolt(&[&["objects", "check", data][..], log].concat());
    let checked = check(&data(1), &["--log", &first]);
    assert!(checked.status.success(), "{}{}", text(&checked.stdout), text(&checked.stderr));
    for (log, why) in
        [(&["--log", second.as_str()][..], "those of another store"), (&[], "has its logs on another device")]
    {
        let refused = check(&data(1), log);
        assert!(text(&refused.stderr).contains(why), "{}", text(&refused.stderr));
    }
    drop(cluster);
    std::fs::remove_dir_all(&directory).unwrap();
}

/// A tmpfs in the place of a directory, with what that has; unmounted on drop.
struct SmallFileSystem(std::path::PathBuf);

impl SmallFileSystem {
    /// `None` where that is not permitted.
    fn below(directory: &std::path::Path, bytes: u64) -> Option<SmallFileSystem> {
        let contents = directory.with_extension("moved");
        std::fs::rename(directory, &contents).unwrap();
        std::fs::create_dir(directory).unwrap();
        let options = format!("size={bytes}");
        let mount = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(directory)
            .status();
        if !mount.is_ok_and(|status| status.success()) {
            return None;
        }
        let copy = std::process::Command::new("cp")
            .args(["-a", "--sparse=always", "-T"])
            .args([&contents, directory])
            .status();
        assert!(copy.unwrap().success());
        Some(SmallFileSystem(directory.to_path_buf()))
    }

    /// Takes all space that is left, until the file is removed.
    fn fill(&self) -> std::path::PathBuf {
        let path = self.0.join("balloon");
        let mut file = std::fs::File::create(&path).unwrap();
        let error = std::io::copy(&mut std::io::repeat(1), &mut file).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        path
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_node_whose_file_system_was_full_is_started_again_when_it_has_space() {
    let directory = scratch("store-full-disk");
    let mut cluster = Cluster::start(&directory, small());
    cluster.ok(&["image", "create", "vol", "64m"]);
    cluster.wait_until_healthy();
    signal(cluster.up.id(), Signal::INT);
    assert!(cluster.up.wait().unwrap().success());
    let Some(small_disk) = SmallFileSystem::below(&cluster.directory.join("node2"), 128 << 20) else {
        return println!("SKIPPED: a file system cannot be mounted here");
    };
    cluster = Cluster::start(&directory, &[]);
    cluster.wait_until_healthy();
    let balloon = small_disk.fill();
    let nodes = cluster.nodes();
    let write = || {
        let written = cluster.perf(&["--rw=write", "--size=32m", "--iodepth=8"]).output().unwrap();
        assert!(written.status.success(), "{}{}", text(&written.stdout), text(&written.stderr));
    };
    write();
    let full = cluster.wait_for("without space", |status| {
        let groups = status["groups"].as_array().unwrap();
        groups.iter().any(|group| group["catching_up"] == "2 (failed)")
    });
    let replicas = full["nodes"][1]["report"]["replicas"].as_array().unwrap();
    let failed = replicas.iter().find(|replica| replica["state"] == "failed").unwrap();
    assert_eq!(failed["out_of_space"], true, "{failed:#}");
    let groups = full["groups"].as_array().unwrap().iter();
    let why = groups.map(|group| group["why"].to_string()).find(|why| why.contains("failed")).unwrap();
    assert!(why.contains("when its file system has space"), "{why}");
    // Without space nothing is tried, although the nodes were asked meanwhile.
    let since = Instant::now();
    cluster.wait_for("after a check", |_| since.elapsed() > Duration::from_secs(6));
    assert_eq!(cluster.nodes(), nodes);
    std::fs::remove_file(balloon).unwrap();
    cluster.wait_until_healthy();
    let (now, of_others) = (cluster.nodes(), [nodes[0], nodes[2]]);
    assert!([now[0], now[2]] == of_others && now[1] != nodes[1], "{nodes:?} {now:?}");
    write();
    cluster.end();
    drop(small_disk);
    std::fs::remove_dir_all(&directory).unwrap();
}

/// A copy has the same identities as the original, and its map the same addresses.
#[test]
fn a_copied_directory_is_refused_beside_the_original_and_a_moved_one_starts() {
    let directory = scratch("store-copy");
    let one = ["--size=200m", "--groups=2", "--log-size=2m", "--nodes=1"];
    let cluster = Cluster::start(&directory, &one);
    cluster.ok(&["image", "create", "vol", "16m"]);
    let filled =
        cluster.perf(&["--rw=write", "--size=8m", "--iodepth=16", "--do_verify=0"]).output().unwrap();
    assert!(filled.status.success(), "{}", text(&filled.stderr));
    let original = cluster.directory.clone();
    cluster.end();
    let [copy, moved, old] = ["copy", "moved", "old"].map(|name| directory.join(name));
    let cp = |to: &std::path::Path| {
        let copied =
            std::process::Command::new("cp").args(["-a", "--sparse=always"]).args([&original, to]).output();
        assert!(copied.unwrap().status.success());
    };
    cp(&copy);
    cp(&old);
    // As an earlier release made it: it does not say where it is, and has absolute paths.
    std::fs::remove_file(old.join("location")).unwrap();
    let config = old.join("node1/config.json");
    let text_of = |path: &std::path::Path| std::fs::read_to_string(path).unwrap();
    let absolute = text_of(&config)
        .replace("\"node1/store.img\"", &format!("\"{}/node1/store.img\"", original.display()))
        .replace("\"cluster\": \".\"", &format!("\"cluster\": \"{}\"", original.display()));
    assert!(absolute.contains(original.to_str().unwrap()));
    std::fs::write(&config, &absolute).unwrap();

    let refused = |arguments: &[&str], of: &std::path::Path| {
        let output = ringbolt(&[arguments, &["--cluster", of.to_str().unwrap()]].concat());
        let reason = text(&output.stderr);
        assert!(
            !output.status.success() && reason.contains("is a copy of the cluster in"),
            "{arguments:?}: {reason}"
        );
    };
    refused(&["store", "up"], &copy);
    refused(&["image", "remove", "vol"], &copy);
    refused(&["store", "up"], &old);
    assert_eq!(text_of(&config), absolute);

    let verify = |cluster: &Cluster| {
        let read = cluster.perf(&["--rw=read", "--size=8m", "--iodepth=16"]).output().unwrap();
        assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));
    };
    std::fs::rename(&original, &moved).unwrap();
    let cluster = Cluster::start_in(&moved, &[]);
    verify(&cluster);
    cluster.end();
    // Now that the original is gone, each copy is a cluster of its own.
    for copy in [&copy, &old] {
        let cluster = Cluster::start_in(copy, &[]);
        verify(&cluster);
        cluster.ok(&["image", "remove", "vol"]);
        cluster.end();
    }
    assert!(
        text_of(&config).contains("\"node1/store.img\"") && text_of(&config).contains("\"cluster\": \".\"")
    );
    let cluster = Cluster::start_in(&moved, &[]);
    verify(&cluster);
    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

/// The map's directory is put back from an older copy while the cluster is down.
#[test]
fn an_older_copy_of_the_maps_directory_counts_when_it_is_accepted_and_loses_nothing() {
    let directory = scratch("store-older-map");
    let mut cluster = Cluster::start(&directory, small());
    cluster.ok(&["image", "create", "vol", "16m"]);
    cluster.wait_until_healthy();
    let [map, copy] = [cluster.directory.join("map"), directory.join("copy")];
    let cp = |from: &std::path::Path, to: &std::path::Path| {
        let copied = std::process::Command::new("cp").arg("-a").args([from, to]).output();
        assert!(copied.unwrap().status.success());
    };
    cp(&map, &copy);
    cluster.ok(&["image", "create", "late", "16m"]);
    let epochs = |status: &Value| {
        let groups = status["groups"].as_array().unwrap().iter();
        groups.map(|group| group["epoch"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let node = cluster.nodes()[1];
    signal(node, Signal::STOP);
    cluster.wait_for("degraded", |status| {
        let groups = status["groups"].as_array().unwrap();
        groups.iter().all(|group| group["in_sync"].as_array().unwrap().len() == 2)
    });
    signal(node, Signal::CONT);
    let known = epochs(&cluster.wait_until_healthy());
    let filled =
        cluster.perf(&["--rw=write", "--size=8m", "--iodepth=16", "--do_verify=0"]).output().unwrap();
    assert!(filled.status.success(), "{}", text(&filled.stderr));
    signal(cluster.up.id(), Signal::INT);
    assert!(cluster.up.wait().unwrap().success());
    std::fs::remove_dir_all(&map).unwrap();
    cp(&copy, &map);

    cluster = Cluster::start(&directory, &[]);
    let status = cluster.wait_for("served, and older", |status| {
        let groups = status["groups"].as_array().unwrap();
        !status["map_lost_revision"].is_null() && groups.iter().all(|group| group["state"] == "healthy")
    });
    assert!(epochs(&status).iter().zip(&known).all(|(now, before)| now > before), "{known:?}: {status:#}");
    let read = cluster.perf(&["--rw=read", "--size=8m", "--iodepth=16"]).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));
    cluster.ok(&["store", "map", "accept"]);
    cluster.wait_until_healthy();
    // A copy that is made now is newer than all that was seen.
    let backup = directory.join("backup");
    cluster.ok(&["store", "map", "backup", backup.to_str().unwrap()]);
    cluster.ok(&["image", "remove", "vol"]);
    let restored = cluster.run(&["store", "map", "restore", backup.to_str().unwrap(), "--older"]);
    assert!(restored.status.success(), "{}", text(&restored.stderr));
    assert!(cluster.ok(&["image", "list"]).contains("vol"));
    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}
