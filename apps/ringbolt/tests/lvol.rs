//! `ringbolt lvol` against a server.
#![allow(clippy::unwrap_used)]

mod rig;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rig::{ServerProcess, ringbolt, scratch, text};
use serde_json::{Value, json};

const NQN: &str = "nqn.2025-01.io.ringbolt:lvol";

/// Exit status and standard error.
fn lvol(server: &ServerProcess, arguments: &[&str]) -> (i32, String) {
    let [command, rest @ ..] = arguments else { panic!() };
    let socket = server.socket.to_str().unwrap();
    let output = ringbolt(&[&["lvol", *command, "-r", socket], rest].concat());
    (output.status.code().unwrap(), text(&output.stderr))
}

#[test]
fn a_store_is_not_created_over_something_without_force() {
    let directory = scratch("lvol-force");
    let server = ServerProcess::start(&directory, "server", &[]);
    // A signature of ext4, the end of a partition table, a blobstore, the header of a GUID partition table.
    for (name, at, content) in [
        ("ext4", 1080, &b"\x53\xef"[..]),
        ("mbr", 510, b"\x55\xaa"),
        ("blob", 0, b"SPDKBLOB"),
        ("gpt", 512, b"EFI PART"),
    ] {
        let path = directory.join(name);
        let file = File::create(&path).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(content, at).unwrap();
        server.ok(&[
            "bdev_aio_create",
            &format!("filename={}", path.display()),
            &format!("name={name}"),
            "block_size=512",
        ]);
        let (status, error) = lvol(&server, &["create", "--on", name, name]);
        assert!(status != 0 && error.contains(&format!("there is something on {name}")), "{status} {error}");
        assert!(error.contains("--force"), "{error}");
        let mut found = vec![0; content.len()];
        File::open(&path).unwrap().read_exact_at(&mut found, at).unwrap();
        assert_eq!(found, content, "{name} is as it was");
        let (status, error) = lvol(&server, &["create", "--on", name, "--force", name]);
        assert_eq!(status, 0, "{error}");
    }
    server.ok(&["bdev_malloc_create", "name=new", "num_blocks=131072", "block_size=512"]);
    assert_eq!(lvol(&server, &["create", "--on", "new", "new"]), (0, String::new()));
    let (status, error) = lvol(&server, &["create", "--force", "new/v", "4m"]);
    assert!(status == 2 && error.contains("--on"), "{error}");
    assert_eq!(server.stop(), Some(0));
    std::fs::remove_dir_all(directory).unwrap();
}

fn sparse_file(directory: &Path, name: &str, bytes: u64) -> String {
    let path = directory.join(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path.to_str().unwrap().to_string()
}

fn call(method: &str, params: Value) -> Value {
    json!({ "method": method, "params": params })
}

/// A configuration that serves devices by NVMe/TCP.
fn serving(disks: &[(&str, &str)], namespaces: &[&str]) -> Value {
    let disk = |(name, file): &(&str, &str)| {
        call("bdev_aio_create", json!({ "name": name, "filename": file, "block_size": 512 }))
    };
    let mut nvmf = vec![
        call("nvmf_create_transport", json!({ "trtype": "TCP" })),
        call("nvmf_create_subsystem", json!({ "nqn": NQN, "allow_any_host": true })),
    ];
    nvmf.extend(namespaces.iter().map(|name| {
        call("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": { "bdev_name": name } }))
    }));
    let address = json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0" });
    nvmf.push(call("nvmf_subsystem_add_listener", json!({ "nqn": NQN, "listen_address": address })));
    let disks: Vec<Value> = disks.iter().map(disk).collect();
    json!({ "subsystems": [
        { "subsystem": "bdev", "config": disks },
        { "subsystem": "nvmf", "config": nvmf },
    ] })
}

fn served(server: &ServerProcess) -> Vec<Value> {
    let subsystems = server.ok(&["nvmf_get_subsystems", &format!("nqn={NQN}")]);
    let namespaces = subsystems[0]["namespaces"].as_array().unwrap();
    namespaces.iter().map(|namespace| namespace["bdev_name"].clone()).collect()
}

#[test]
fn a_store_that_is_served_is_clean_after_sigterm_under_load() {
    let directory = scratch("lvol-sigterm");
    let disk = sparse_file(&directory, "disk", 256 << 20);
    let server = ServerProcess::configured(&directory, "first", &serving(&[("disk", &disk)], &[]));
    assert_eq!(lvol(&server, &["create", "--on", "disk", "pool"]), (0, String::new()));
    assert_eq!(lvol(&server, &["create", "--thin", "pool/v", "128m"]).0, 0);
    assert_eq!(server.stop(), Some(0));

    let server = ServerProcess::configured(&directory, "second", &serving(&[("disk", &disk)], &["pool/v"]));
    let uri = format!("--filename=nvme+tcp://127.0.0.1:{}/{NQN}?ns=1", server.port());
    let mut load = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
    load.args(["perf", &uri, "--rw=randwrite", "--bs=4k", "--iodepth=16", "--runtime=60", "--time_based"]);
    let mut load = load.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // With clusters that are written for the first time.
    let written = || server.ok(&["bdev_get_iostat", "name=pool/v"])["bdevs"][0]["num_write_ops"].as_u64();
    while written().unwrap() < 200 {
        assert!(load.try_wait().unwrap().is_none(), "the load has ended");
    }
    assert_eq!(server.stop(), Some(0));
    load.kill().unwrap();
    load.wait().unwrap();
    let check = ringbolt(&["blob", "check", "--json", &disk]);
    let found: Value = serde_json::from_slice(&check.stdout).unwrap();
    assert_eq!((check.status.code(), &found["findings"]), (Some(0), &json!([])), "{found}");
    std::fs::remove_dir_all(directory).unwrap();
}

/// Hosts write what they like to what they are served, a store of logical volumes too.
#[test]
fn what_hosts_have_written_keeps_no_configured_export_from_being_served() {
    let directory = scratch("lvol-tenant");
    let disk = sparse_file(&directory, "disk", 64 << 20);
    let raw = sparse_file(&directory, "raw", 64 << 20);
    let disks = [("disk", disk.as_str()), ("raw", raw.as_str())];
    let server = ServerProcess::configured(&directory, "first", &serving(&disks, &[]));
    for (on, store) in [("disk", "pool"), ("raw", "tenant")] {
        assert_eq!(lvol(&server, &["create", "--on", on, "--cluster", "1m", store]), (0, String::new()));
    }
    assert_eq!(lvol(&server, &["create", "--thin", "pool/v", "32m"]).0, 0);
    assert_eq!(lvol(&server, &["create", "--on", "pool/v", "--cluster", "1m", "inner"]), (0, String::new()));
    assert_eq!(server.stop(), Some(0));

    // A volume with a store, and a disk with one: both are exported as they are.
    let config = serving(&disks, &["pool/v", "raw"]);
    let server = ServerProcess::configured(&directory, "second", &config);
    let stores = server.ok(&["bdev_lvol_get_lvstores"]);
    let names: Vec<&Value> = stores.as_array().unwrap().iter().map(|store| &store["name"]).collect();
    assert_eq!((served(&server).len(), names), (2, vec![&json!("pool")]));
    assert_eq!(server.stop(), Some(0));
    std::fs::remove_dir_all(directory).unwrap();
}
