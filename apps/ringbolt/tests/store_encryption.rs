//! Nodes whose devices are encrypted: what is on them, and keys that are lost, changed or swapped.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "rig/store.rs"]
mod store;

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rig::{ringbolt, scratch, text};
use rustix::process::Signal;
use serde_json::Value;
use store::{Cluster, signal};

const SECTOR: usize = 512;
/// Each byte of what is written.
const BYTE: u8 = 0x5c;
const IMAGE: [&str; 3] = ["image", "create", "vol"];

fn stderr_of(output: &Output) -> String {
    assert!(!output.status.success(), "{}", text(&output.stdout));
    text(&output.stderr)
}

fn load(cluster: &Cluster, arguments: &[&str]) {
    let pattern = format!("--verify_pattern={BYTE:#x}");
    let common = ["--size=12m", "--bs=16k", "--iodepth=8", "--verify=pattern", &pattern];
    let output = cluster.perf(&[&common[..], arguments].concat()).output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

fn write(cluster: &Cluster) {
    load(cluster, &["--rw=write", "--do_verify=0"]);
}

fn verify(cluster: &Cluster) {
    load(cluster, &["--rw=read"]);
}

/// Sectors of a file that have what was written.
fn plain_sectors(path: &Path) -> usize {
    let (mut file, mut found) = (File::open(path).unwrap(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut buffer).unwrap();
        if count == 0 {
            return found;
        }
        found +=
            buffer[..count].chunks(SECTOR).filter(|sector| sector.iter().all(|byte| *byte == BYTE)).count();
    }
}

/// Whether sectors of a file have anything.
fn used_sectors(path: &Path) -> usize {
    let contents = fs::read(path).unwrap();
    contents.chunks(SECTOR).filter(|sector| sector.iter().any(|byte| *byte != 0)).count()
}

fn config(cluster: &Path, node: u32) -> String {
    fs::read_to_string(cluster.join(format!("node{node}/config.json"))).unwrap()
}

/// The file and the check value of a node's key.
fn key_of(cluster: &Path, node: u32) -> (PathBuf, String) {
    let config: Value = serde_json::from_str(&config(cluster, node)).unwrap();
    let params = &config["subsystems"][0]["config"][0]["params"];
    let file = cluster.join(params["key_file"].as_str().unwrap());
    (file, params["check_value"].as_str().unwrap().to_string())
}

/// A key's file has digits that nothing else of its node has.
fn check_secrecy(cluster: &Path, node: u32) {
    let (file, check_value) = key_of(cluster, node);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let digits = fs::read_to_string(&file).unwrap();
    assert!(digits.len() == 128 && !digits.contains(&check_value));
    for other in ["config.json", "log"] {
        let contents = fs::read(cluster.join(format!("node{node}/{other}"))).unwrap();
        let contents = String::from_utf8_lossy(&contents);
        assert!(!contents.contains(&digits[..64]) && !contents.contains(&digits[64..]), "{other}");
    }
    let text = ringbolt(&["store", "status", "--json", "--cluster", cluster.to_str().unwrap()]).stdout;
    assert!(!self::text(&text).contains(&digits[..32]));
}

#[test]
fn nodes_are_encrypted_beside_others_that_are_not() {
    let directory = scratch("store-encryption-mixed");
    let size = ["--size=96m", "--log-size=1m"];
    let cluster =
        Cluster::start(&directory, &[&size[..], &["--nodes=2", "--groups=4", "--spare=4"]].concat());
    cluster.ok(&[&IMAGE[..], &["16m"]].concat());
    cluster.wait_until_healthy();
    let refused = stderr_of(&cluster.run(&["store", "replace-device", "2", "--key-dir=/"]));
    assert!(refused.contains("node 2 is not encrypted: --encrypt"), "{refused}");
    cluster.ok(&[&["store", "replace-device", "2", "--encrypt"], &size[..]].concat());
    let status = cluster.wait_until_healthy();
    let encrypted = |status: &Value, node: usize| status["nodes"][node - 1]["encrypted"].clone();
    assert_eq!((encrypted(&status, 1), encrypted(&status, 2)), (false.into(), true.into()), "{status:#}");
    assert_eq!(status["nodes"][1]["report"]["encrypted"], true);
    assert_eq!([1, 2].map(|node| cluster.line_of_node(node).contains(", encrypted")), [false, true]);
    write(&cluster);
    verify(&cluster);
    // Killed, and read from what is on the devices.
    let nodes = cluster.nodes();
    nodes.iter().for_each(|node| signal(*node, Signal::KILL));
    cluster.wait_for("started again", |_| cluster.nodes().len() == 2 && cluster.nodes() != nodes);
    verify(&cluster);
    cluster.wait_until_healthy();
    let place = cluster.directory.clone();
    check_secrecy(&place, 2);
    let file = |node: u32| place.join(format!("node{node}/store.img"));
    assert!(plain_sectors(&file(1)) > 0);
    assert_eq!(plain_sectors(&file(2)), 0);
    assert!(used_sectors(&file(2)) > (12 << 20) / SECTOR);

    // Another device has another key, in the place of the old one.
    let old = key_of(&place, 2);
    let same = ["store", "replace-device", "2", "--key-file", old.0.to_str().unwrap()];
    assert!(stderr_of(&cluster.run(&same)).contains("has the key of the old device"));
    let replaced = cluster.ok(&[&["store", "replace-device", "2", "--json"], &size[..]].concat());
    let replaced: Value = serde_json::from_str(&replaced).unwrap();
    cluster.wait_until_healthy();
    let new = key_of(&place, 2);
    assert!(new.0 == old.0 && new.1 != old.1 && new.0.exists());
    let old_directory = Path::new(replaced["old_directory"].as_str().unwrap());
    assert_ne!(fs::read(old_directory.join("data.key")).unwrap(), fs::read(&new.0).unwrap());
    verify(&cluster);

    // One whose key is elsewhere, with other threads.
    let keys = directory.join("keys");
    let options = ["store", "add-node", "--encrypt", "--threads=prioritized", "--spare=4", "--key-dir"];
    let missing = cluster.run(&[&options[..], &[keys.to_str().unwrap()], &size[..]].concat());
    assert!(stderr_of(&missing).contains("--key-dir"));
    fs::create_dir(&keys).unwrap();
    cluster.ok(&[&options[..], &[keys.to_str().unwrap()], &size[..]].concat());
    cluster.wait_for("a third node", |status| status["nodes"][2]["report"]["encrypted"] == true);
    cluster.wait_until_healthy();
    let third = key_of(&place, 3);
    assert_eq!(third.0, keys.canonicalize().unwrap().join(format!("node3-{}.key", third.1)));
    check_secrecy(&place, 3);
    cluster.ok(&["store", "out", "2"]);
    cluster.wait_for("moved", |status| status["moving"] == 0 && status["healthy"] == true);
    cluster.ok(&["store", "stop-node", "1"]);
    verify(&cluster);
    assert_eq!(plain_sectors(&file(3)), 0);
    cluster.ok(&["store", "start-node", "1"]);
    cluster.end();
    let up = ringbolt(&["store", "up", "--encrypt", "--cluster", place.to_str().unwrap()]);
    let refused = stderr_of(&up);
    assert!(refused.contains("node 1 of") && refused.contains("is not encrypted"), "{refused}");
    fs::remove_dir_all(directory).unwrap();
}

/// Starts a cluster that exists. Returns what it printed before it was ready.
fn up(place: &Path) -> (Cluster, Vec<String>) {
    let mut up = Command::new(env!("CARGO_BIN_EXE_ringbolt"))
        .args(["store", "up", "--cluster", place.to_str().unwrap()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(up.stdout.take().unwrap()).lines().map_while(Result::ok);
    let printed = lines.by_ref().take_while(|line| !line.starts_with("ready")).collect();
    std::thread::spawn(move || lines.for_each(drop));
    (Cluster { directory: place.to_path_buf(), up }, printed)
}

/// Files in the place of devices, with their logs on others.
fn devices(directory: &Path) -> Vec<String> {
    let mut options = Vec::new();
    for (option, name, bytes) in
        [("--device", "a", 64), ("--device", "b", 64), ("--log", "log-a", 16), ("--log", "log-b", 16)]
    {
        let path = directory.join(name);
        File::create(&path).unwrap().set_len(bytes << 20).unwrap();
        options.extend([option.to_string(), path.to_str().unwrap().to_string()]);
    }
    options
}

#[test]
fn without_its_key_a_node_does_not_start_and_its_device_stays_as_it_is() {
    let directory = scratch("store-encryption-keys");
    let keys = directory.join("keys");
    fs::create_dir(&keys).unwrap();
    let options = devices(&directory);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let new = ["--groups=2", "--spare=1", "--log-size=1m", "--encrypt", "--key-dir", keys.to_str().unwrap()];
    let one = ["--encrypt", "--key-file", "a.key"];
    let place = directory.join("cluster");
    let create = ["store", "up", "--cluster", place.to_str().unwrap()];
    let refused = stderr_of(&ringbolt(&[&create[..], &options, &one].concat()));
    assert!(refused.contains("--key-file is the key of one node, and there are 2"), "{refused}");
    let cluster = Cluster::start(&directory, &[&options[..], &new].concat());
    cluster.ok(&[&IMAGE[..], &["16m"]].concat());
    cluster.wait_until_healthy();
    write(&cluster);
    verify(&cluster);
    let file = |name: &str| directory.join(name);
    for name in ["a", "b", "log-a", "log-b"] {
        assert_eq!(plain_sectors(&file(name)), 0, "{name}");
        assert!(used_sectors(&file(name)) > 0, "{name}");
    }
    [1, 2].into_iter().for_each(|node| check_secrecy(&place, node));
    let (key, other) = (key_of(&place, 1).0, key_of(&place, 2).0);
    assert_ne!(fs::read(&key).unwrap(), fs::read(&other).unwrap());

    // What is wrong is said before the node is started.
    cluster.ok(&["store", "stop-node", "1"]);
    let (digits, before) = (fs::read(&key).unwrap(), fs::read(file("a")).unwrap());
    let refused = || {
        let refused = stderr_of(&cluster.run(&["store", "start-node", "1"]));
        assert!(refused.contains(&format!("the key of node 1, {}: ", key.display())), "{refused}");
        assert!(refused.contains("replace-device 1") && refused.trim_end().lines().count() == 1, "{refused}");
        refused
    };
    fs::set_permissions(&key, Permissions::from_mode(0o640)).unwrap();
    assert!(refused().contains("others than its owner may use it, mode 640: chmod 600"));
    fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
    fs::write(&key, "no key").unwrap();
    assert!(refused().contains("it has 5 digits"));
    fs::write(&key, fs::read(&other).unwrap()).unwrap();
    assert!(refused().contains("it is another key, with the check value"));
    the_node_refuses_another_key(&cluster, &key);
    fs::remove_file(&key).unwrap();
    assert!(refused().contains("No such file"));
    cluster.end();

    // The others serve.
    fs::remove_file(place.join("node1.stopped")).unwrap();
    let (cluster, printed) = up(&place);
    let line = printed.iter().find(|line| line.contains("the key of node 1, ")).unwrap();
    assert!(line.contains("No such file") && line.contains("the others serve"), "{line}");
    let status = cluster.status();
    let error = status["nodes"][0]["error"].as_str().unwrap();
    assert!(error.contains(&format!("the key of node 1, {}: No such file", key.display())), "{error}");
    assert_eq!(status["nodes"][0]["encrypted"], true);
    assert!(cluster.line_of_node(1).contains(", encrypted"));
    assert!(fs::read(file("a")).unwrap() == before, "the device has changed");
    // It is started again when the file is back.
    secret_file(&key, &digits);
    cluster.wait_until_healthy();
    verify(&cluster);
    cluster.end();

    // Swapped keys.
    let swap = || {
        fs::rename(&key, directory.join("swapped")).unwrap();
        fs::rename(&other, &key).unwrap();
        fs::rename(directory.join("swapped"), &other).unwrap();
    };
    swap();
    let refused = stderr_of(&ringbolt(&create));
    assert!(refused.contains("the key of node 1, ") && refused.contains("another key"), "{refused}");
    swap();
    commands_say_that_a_device_is_encrypted(&directory, &key, &other);
    let (cluster, _) = up(&place);
    cluster.wait_until_healthy();
    verify(&cluster);
    cluster.end();
    fs::remove_dir_all(directory).unwrap();
}

fn secret_file(path: &Path, contents: &[u8]) {
    File::create(path).unwrap().set_permissions(Permissions::from_mode(0o600)).unwrap();
    fs::write(path, contents).unwrap();
}

/// Node 1 has the key of node 2 in `key`, and is started without `store up`.
fn the_node_refuses_another_key(cluster: &Cluster, key: &Path) {
    let serve = |config: &str| {
        let mut serve = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
        serve.args(["serve", "--config", config, "--rpc-socket", "node1/rpc.sock"]);
        stderr_of(&serve.current_dir(&cluster.directory).output().unwrap())
    };
    let refused = serve("node1/config.json");
    let named = format!("key_file: {} has the key with the check value", key.display());
    assert!(refused.contains(&named), "{refused}");
    // One that is not compared gives noise, which is no store.
    let mut config: Value = serde_json::from_str(&config(&cluster.directory, 1)).unwrap();
    for call in config["subsystems"][0]["config"].as_array_mut().unwrap() {
        call["params"].as_object_mut().unwrap().remove("check_value");
    }
    fs::write(cluster.directory.join("node1/unchecked.json"), config.to_string()).unwrap();
    let refused = serve("node1/unchecked.json");
    assert!(refused.contains("EncryptedDisk has no store when it is decrypted with its key"), "{refused}");
}

fn commands_say_that_a_device_is_encrypted(directory: &Path, key: &Path, other: &Path) {
    let (data, log) = (directory.join("a"), directory.join("log-a"));
    let [data, log] = [&data, &log].map(|path| path.to_str().unwrap());
    let check =
        |arguments: &[&str]| ringbolt(&[&["objects", "check", "--log", log, data], arguments].concat());
    let keys = [key, other].map(|key| key.to_str().unwrap());
    let checked = check(&["--key-file", keys[0], "--json"]);
    assert!(checked.status.success(), "{}", text(&checked.stderr));
    let checked: Value = serde_json::from_slice(&checked.stdout).unwrap();
    assert_eq!(checked["problems"], serde_json::json!([]));
    assert!(checked["blocks_checked"].as_u64().unwrap() > 0);
    let refused = stderr_of(&check(&[]));
    assert!(refused.contains("looks encrypted, and --key-file names the key"), "{refused}");
    let refused = stderr_of(&check(&["--key-file", keys[1]]));
    assert!(refused.contains("has no store when it is decrypted with its key"), "{refused}");
    // It is not formatted again by mistake, with a key or without.
    let refused = stderr_of(&ringbolt(&["objects", "format", data]));
    assert!(refused.contains("looks encrypted"), "{refused}");
    let another = directory.join("another");
    let another = ["store", "up", "--cluster", another.to_str().unwrap(), "--device", data, "--encrypt"];
    let refused = stderr_of(&ringbolt(&another));
    assert!(refused.contains("looks encrypted"), "{refused}");
}
