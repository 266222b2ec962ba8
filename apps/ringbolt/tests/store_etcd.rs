//! A cluster of the store whose map is in etcd, which is killed and restarted under verified load.
#![allow(clippy::unwrap_used)]

#[path = "../../../store/cluster-map/tests/rig/mod.rs"]
mod etcd;
mod rig;
#[path = "rig/store.rs"]
mod store;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use etcd::EtcdCluster;
use etcd::certificates::Ca;
use rig::{ServerProcess, ringbolt, scratch, text};
use rustix::process::Signal;
use serde_json::{Value, json};
use store::{Cluster, signal};

fn start(directory: &Path, urls: &str) -> Cluster {
    let options = ["--size=200m", "--groups=4", "--log-size=2m", "--nodes=3", "--replicas=3", "--etcd", urls];
    Cluster::start(directory, &options)
}

fn all_groups(status: &Value, is_so: impl Fn(&Value) -> bool) -> bool {
    status["groups"].as_array().is_some_and(|groups| groups.len() == 4 && groups.iter().all(is_so))
}

#[test]
fn verified_load_continues_while_etcd_is_gone() {
    let Some(mut etcd) = EtcdCluster::start("load", 3) else { return };
    let directory = scratch("store-etcd");
    let urls = etcd.urls("load");
    let cluster = start(&directory, &urls);
    // The directory has no map; it remembers where that is.
    assert!(!cluster.directory.join("map").exists());
    assert_eq!(cluster.ok(&["image", "create", "vol", "64m"]), "store:pool/vol\n");
    let healthy = cluster.wait_until_healthy();
    assert!(healthy["nodes"].as_array().unwrap().iter().all(|node| node["up"] == true), "{healthy:#}");

    let load = cluster.perf(&["--rw=randrw", "--iodepth=8", "--time_based", "--runtime=8"]).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    (0..3).for_each(|server| etcd.kill_server(server));
    // Status says what the nodes know, and that memberships stand still.
    let status = cluster.status();
    assert!(status["map_error"].as_str().unwrap().contains("in etcd at 127.0.0.1:"), "{status:#}");
    assert!(all_groups(&status, |group| group["state"] == "healthy"), "{status:#}");
    std::thread::sleep(Duration::from_secs(2));
    (0..3).for_each(|server| etcd.start_server(server));
    etcd.wait_until_served();
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    cluster.wait_until_healthy();

    // A second cluster below the prefix is refused, and harms nothing.
    let other = directory.join("other");
    let second =
        ringbolt(&["store", "up", "--cluster", other.to_str().unwrap(), "--size=200m", "--etcd", &urls]);
    assert!(text(&second.stderr).contains("cluster below /load/ exists"), "{}", text(&second.stderr));
    assert!(!other.exists());
    cluster.wait_until_healthy();

    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn groups_that_lost_a_replica_wait_for_etcd_and_nothing_is_lost() {
    let Some(mut etcd) = EtcdCluster::start("wait", 1) else { return };
    let directory = scratch("store-etcd-wait");
    let cluster = start(&directory, &etcd.urls("wait"));
    cluster.ok(&["image", "create", "vol", "64m"]);
    cluster.wait_until_healthy();
    let filled =
        cluster.perf(&["--rw=write", "--size=8m", "--iodepth=16", "--do_verify=0"]).output().unwrap();
    assert!(filled.status.success(), "{}", text(&filled.stderr));
    // A node that ends soon after its start would be started again later.
    std::thread::sleep(Duration::from_secs(2));

    etcd.kill_server(0);
    let nodes = cluster.nodes();
    signal(nodes[1], Signal::KILL);
    let why =
        |group: &Value| group["why"].as_str().is_some_and(|why| why.contains("the map has not answered"));
    cluster.wait_for("waiting for the map", |status| {
        all_groups(status, |group| (group["state"] == "waiting" || group["state"] == "down") && why(group))
    });
    // It ended, and cannot start without the map. Requests wait.
    let mut load = cluster.perf(&["--rw=read", "--size=8m", "--iodepth=16"]).spawn().unwrap();
    let ended = Instant::now();
    while ended.elapsed() < Duration::from_secs(2) {
        // An image cannot be opened without the map, so the load has begun or failed.
        if let Some(status) = load.try_wait().unwrap() {
            assert!(!status.success());
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let _ = load.kill();
    let _ = load.wait();

    etcd.start_server(0);
    etcd.wait_until_served();
    let read = cluster.perf(&["--rw=read", "--size=8m", "--iodepth=16"]).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));
    cluster.wait_until_healthy();
    assert_ne!(cluster.nodes()[1], nodes[1]);
    drop(cluster);
    std::fs::remove_dir_all(&directory).unwrap();
}

/// Every file of a directory that has a text.
fn files_with(directory: &Path, wanted: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if kind.is_dir() {
            found.extend(files_with(&path, wanted));
        } else if kind.is_file()
            && entry.metadata().unwrap().len() < 1 << 20
            && String::from_utf8_lossy(&std::fs::read(&path).unwrap()).contains(wanted)
        {
            found.push(path.file_name().unwrap().to_str().unwrap().to_string());
        }
    }
    found
}

#[test]
fn a_cluster_is_a_user_of_etcd_whose_tokens_expire_under_load() {
    let Some(mut etcd) = EtcdCluster::start_with("user", 1, &["--auth-token-ttl=1"]) else { return };
    etcd.enable_users("s3cret", "/user/");
    let directory = scratch("store-etcd-user");
    std::fs::create_dir_all(&directory).unwrap();
    let urls = etcd.urls("user");
    let user = etcd.file("user", "ringbolt:s3cret\n");
    let file = ["--etcd-user-file", user.to_str().unwrap()];

    // Without a user, and with a wrong password, nothing is made.
    let wrong = etcd.file("wrong", "ringbolt:wrong");
    let wrong = ["--etcd-user-file", wrong.to_str().unwrap()];
    for (arguments, reason) in [(&[][..], "--etcd-user-file names it"), (&wrong, "is not one of etcd's")] {
        let path = directory.join("none");
        let up = ["store", "up", "--cluster", path.to_str().unwrap(), "--size=200m", "--etcd", &urls];
        let output = ringbolt(&[&up[..], arguments].concat());
        assert!(text(&output.stderr).contains(reason), "{}", text(&output.stderr));
        assert!(!path.exists());
    }

    let options =
        ["--size=200m", "--groups=4", "--log-size=2m", "--nodes=3", "--replicas=3", "--etcd", &urls];
    let cluster = Cluster::start(&directory, &[&options[..], &file].concat());
    cluster.ok(&["image", "create", "vol", "64m"]);
    cluster.wait_until_healthy();
    // The directory remembers the user.
    std::fs::remove_file(&user).unwrap();
    let kept = cluster.directory.join("etcd-user");
    assert_eq!(std::fs::metadata(&kept).unwrap().permissions().mode() & 0o777, 0o600);

    // Longer than tokens live and watches are open; etcd forgets all tokens meanwhile.
    let load = cluster.perf(&["--rw=randrw", "--iodepth=8", "--time_based", "--runtime=9"]).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(3));
    etcd.kill_server(0);
    etcd.start_server(0);
    etcd.wait_until_served();
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    // Nodes change the map with tokens that they have got since.
    let node = cluster.nodes()[2];
    signal(node, Signal::STOP);
    cluster.wait_for("degraded", |status| status["map_error"].is_null() && status["healthy"] == false);
    signal(node, Signal::CONT);
    cluster.wait_until_healthy();

    // A client elsewhere names its file.
    let elsewhere = directory.join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    std::fs::copy(cluster.directory.join("key"), elsewhere.join("key")).unwrap();
    let user = etcd.file("user", "ringbolt:s3cret\n");
    let perf = |user: &str| {
        let uri = format!("--filename=store:pool/vol?cluster={}&etcd={urls}{user}", elsewhere.display());
        ringbolt(&["perf", &uri, "--rw=randread", "--bs=4k", "--number_ios=100", "--name=t"])
    };
    let refused = perf("");
    assert!(text(&refused.stderr).contains("user name is empty"), "{}", text(&refused.stderr));
    let read = perf(&format!("&etcd_user_file={}", user.display()));
    assert!(read.status.success(), "{}", text(&read.stderr));

    // So does a server, whose configuration has the path of the file.
    let server = ServerProcess::start(&directory, "server", &[]);
    let parameters = [
        ("pool", "pool".to_string()),
        ("image", "vol".to_string()),
        ("cluster", elsewhere.display().to_string()),
        ("etcd", urls.clone()),
        ("etcd_user_file", user.display().to_string()),
    ];
    let call: Vec<String> = parameters.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let call: Vec<&str> =
        std::iter::once("bdev_store_create").chain(call.iter().map(String::as_str)).collect();
    assert_eq!(server.ok(&call), "pool/vol");
    let saved = server.ok(&["save_config"]);
    let saved = saved["subsystems"].as_array().unwrap().iter().find(|it| it["subsystem"] == "bdev_store");
    let saved = &saved.unwrap()["config"][0]["params"];
    assert!(parameters.iter().all(|(name, value)| saved[name] == **value), "{saved:#}");
    assert!(!saved.to_string().contains("s3cret"));
    server.stop();

    // Another password, in etcd and for the cluster.
    let token = etcd.root_token();
    etcd.request(
        "/v3/auth/user/changepw",
        Some(&token),
        &json!({ "name": "ringbolt", "password": "s3cret2" }),
    );
    let user = etcd.file("user", "ringbolt:s3cret2\n");
    std::fs::copy(&user, &kept).unwrap();
    cluster.wait_until_healthy();
    assert_eq!(files_with(&cluster.directory, "s3cret"), ["etcd-user"]);
    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_cluster_uses_etcd_with_tls_while_that_restarts_under_load() {
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let identity = ca.server(&["127.0.0.1"], 2100);
    let Some(mut etcd) = EtcdCluster::start_with_tls("secure", &identity, Some(&ca), &[]) else { return };
    etcd.enable_users("s3cret", "/secure/");
    let directory = scratch("store-etcd-tls");
    std::fs::create_dir_all(&directory).unwrap();
    let urls = etcd.urls("secure");
    let client = ca.client("");
    let file = |name: &str, text: &str| etcd.file(name, text).to_str().unwrap().to_string();
    let ca_file = ["--etcd-ca-file".to_string(), file("ca.pem", &ca.pem())];
    let user_file = ["--etcd-user-file".to_string(), file("user", "ringbolt:s3cret")];
    let certificate = [
        ["--etcd-cert-file".to_string(), file("cert.pem", &client.certificate)],
        ["--etcd-key-file".to_string(), file("key.pem", &client.key)],
    ]
    .concat();

    // What is missing or wrong is named, and nothing is made.
    let path = directory.join("none");
    let in_vain =
        ringbolt(&["store", "up", "--cluster", path.to_str().unwrap(), &user_file[0], &user_file[1]]);
    assert!(text(&in_vain.stderr).contains("no effect without URLs"), "{}", text(&in_vain.stderr));
    assert!(!path.exists());
    let other = ["--etcd-ca-file".to_string(), file("other.pem", &other.pem())];
    for (arguments, reason) in [
        (&[][..], "https:// needs the certificate of etcd's CA: --etcd-ca-file names it"),
        (&other, "its certificate is not of the CA in --etcd-ca-file"),
        (&ca_file, "it requires a client certificate"),
    ] {
        let path = directory.join("none");
        let up = ["store", "up", "--cluster", path.to_str().unwrap(), "--size=200m", "--etcd", &urls];
        let output = ringbolt(&[&up[..], &arguments.iter().map(String::as_str).collect::<Vec<_>>()].concat());
        assert!(text(&output.stderr).contains(reason), "{}", text(&output.stderr));
        assert!(!path.exists());
    }

    let files = [&ca_file[..], &user_file, &certificate].concat();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let options =
        ["--size=200m", "--groups=4", "--log-size=2m", "--nodes=3", "--replicas=3", "--etcd", &urls];
    let cluster = Cluster::start(&directory, &[&options[..], &files].concat());
    cluster.ok(&["image", "create", "vol", "64m"]);
    cluster.wait_until_healthy();
    let load = cluster.perf(&["--rw=randrw", "--iodepth=8", "--time_based", "--runtime=9"]).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    etcd.kill_server(0);
    std::thread::sleep(Duration::from_secs(2));
    etcd.start_server(0);
    etcd.wait_until_served();
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    cluster.wait_until_healthy();

    // Another machine joins, and runs its node.
    let second = directory.join("second");
    let key = cluster.directory.join("key");
    let join = ["store", "add-node", "--cluster", second.to_str().unwrap(), "--etcd", &urls];
    let sizes = ["--size=200m", "--log-size=2m", "--key", key.to_str().unwrap()];
    let joined = ringbolt(&[&join[..], &sizes, &files].concat());
    assert!(joined.status.success(), "{}", text(&joined.stderr));
    let second = Cluster::start_in(&second, &[]);
    cluster.wait_for("four nodes up", |status| {
        status["nodes"].as_array().unwrap().iter().filter(|node| node["up"] == true).count() == 4
    });
    // Secrets are where their owner alone can read them, and nowhere else.
    let key_line = client.key.lines().nth(1).unwrap();
    for cluster in [&cluster, &second] {
        assert_eq!(files_with(&cluster.directory, "s3cret"), ["etcd-user"]);
        assert_eq!(files_with(&cluster.directory, key_line), ["etcd-key.pem"]);
    }
    second.end();
    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

/// While other nodes take over, which the map delays here, a node reports that it leaves.
#[test]
fn a_node_reports_its_status_while_it_is_stopped() {
    let Some(etcd) = EtcdCluster::start("leaving", 1) else { return };
    let directory = scratch("store-leaving");
    let cluster = start(&directory, &etcd.urls("leaving"));
    cluster.wait_until_healthy();
    let socket = cluster.directory.join("node1/rpc.sock");
    let socket = socket.to_str().unwrap();
    let state = || {
        let report = ringbolt(&["rpc", "-r", socket, "store_node_get_status"]);
        assert!(report.status.success(), "{}", text(&report.stderr));
        serde_json::from_slice::<Value>(&report.stdout).unwrap()["state"].as_str().unwrap().to_string()
    };
    assert_eq!(state(), "serves");
    // A request to the map ends after 2 s.
    signal(etcd.pid(0), Signal::STOP);
    let mut stop = std::process::Command::new(env!("CARGO_BIN_EXE_ringbolt"))
        .args(["rpc", "-r", socket, "store_node_stop"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    while state() != "leaving" {
        assert!(stop.try_wait().unwrap().is_none(), "it did not report that it leaves");
    }
    let stop = stop.wait_with_output().unwrap();
    assert!(text(&stop.stderr).contains("no other node can take over"), "{}", text(&stop.stderr));
    assert_eq!(state(), "serves");
    signal(etcd.pid(0), Signal::CONT);
    cluster.wait_until_healthy();
    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

fn epochs(status: &Value) -> Vec<u64> {
    status["groups"].as_array().unwrap().iter().map(|group| group["epoch"].as_u64().unwrap()).collect()
}

fn is_served(group: &Value) -> bool {
    group["state"] == "healthy" || group["state"] == "degraded"
}

/// A node stands still until all groups go on without it, and comes back: groups have other epochs than
/// before.
fn raise_epochs(cluster: &Cluster) {
    cluster.wait_until_healthy();
    let node = cluster.nodes()[1];
    signal(node, Signal::STOP);
    let is_without = |group: &Value| {
        let in_sync = group["in_sync"].as_array().unwrap();
        group["replicas"].as_array().unwrap().len() < 3 || !in_sync.contains(&2.into())
    };
    cluster.wait_for("without a node", |status| {
        status["groups"].as_array().is_some_and(|groups| groups.iter().all(is_without))
    });
    signal(node, Signal::CONT);
    cluster.wait_until_healthy();
}

/// etcd is put back from a snapshot while nodes and clients run: they go on, also when a node is lost then,
/// and what is made at once shares nothing with what the map forgot.
#[test]
fn running_nodes_outlive_an_older_map() {
    let Some(mut etcd) = EtcdCluster::start("older-run", 1) else { return };
    let directory = scratch("store-older-run");
    let cluster = start(&directory, &etcd.urls("older"));
    cluster.wait_until_healthy();
    cluster.ok(&["image", "create", "vol", "16m"]);
    etcd.save_snapshot();
    cluster.ok(&["image", "create", "late", "16m"]);
    cluster.ok(&["store", "pool", "create", "late", "--groups=1", "--replicas=1"]);
    raise_epochs(&cluster);
    let before = cluster.status();
    let of_pool = |status: &Value| {
        let groups = status["groups"].as_array().unwrap().iter().filter(|group| group["pool"] == "pool");
        groups.map(|group| group["epoch"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let load = cluster.perf(&["--rw=randrw", "--iodepth=8", "--time_based", "--runtime=14"]).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    etcd.restore_snapshot();
    // At once, in any order of what nodes notice.
    cluster.ok(&["image", "create", "other", "16m"]);
    let status = cluster.wait_for("older, and its groups as they were", |status| {
        let epochs = of_pool(status);
        !status["map_lost_revision"].is_null()
            && epochs.iter().zip(of_pool(&before)).all(|(now, before)| *now >= before)
            && all_groups(status, is_served)
    });
    assert!(status["summary"].as_str().unwrap().contains("`ringbolt store map accept`"), "{status:#}");
    let unknown = |node: &Value| node["report"]["map"]["unknown_groups"].as_array().map_or(0, Vec::len);
    cluster.wait_for("the replica of the pool that the map forgot", |status| {
        status["nodes"].as_array().unwrap().iter().map(unknown).sum::<usize>() == 1
    });
    let refused = cluster.run(&["store", "pool", "create", "other", "--groups=1", "--replicas=1"]);
    assert!(
        text(&refused.stderr).contains("the map is older than what nodes have seen"),
        "{}",
        text(&refused.stderr)
    );

    // A node is lost: its groups go on without it, and with it again.
    let node = cluster.nodes()[2];
    signal(node, Signal::STOP);
    cluster
        .wait_for("served without a node", |status| all_groups(status, |group| group["state"] == "degraded"));
    let other = cluster.perf_of("other", &["--rw=write", "--size=8m", "--iodepth=16"]).output().unwrap();
    assert!(other.status.success(), "{}{}", text(&other.stdout), text(&other.stderr));
    signal(node, Signal::CONT);
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));

    assert!(!cluster.ok(&["image", "list"]).contains("late"), "the map is not older");
    cluster.ok(&["store", "map", "accept"]);
    assert!(cluster.ok(&["store", "map", "accept"]).contains("not older"));
    let status = cluster.wait_until_healthy();
    assert!(status["map_lost_revision"].is_null(), "{status:#}");
    // What no pool has is kept, whatever counts.
    assert_eq!(status["nodes"].as_array().unwrap().iter().map(unknown).sum::<usize>(), 1, "{status:#}");
    cluster.ok(&["store", "pool", "create", "other", "--groups=1", "--replicas=1"]);
    cluster.wait_until_healthy();
    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

/// The same while all nodes are down: the records that they know count, and nothing that was acknowledged is
/// lost then or later.
#[test]
fn nodes_that_start_with_an_older_map_lose_nothing() {
    let Some(mut etcd) = EtcdCluster::start("older-start", 1) else { return };
    let directory = scratch("store-older-start");
    let cluster = start(&directory, &etcd.urls("older"));
    cluster.ok(&["image", "create", "vol", "16m"]);
    cluster.wait_until_healthy();
    let backup = directory.join("backup");
    cluster.ok(&["store", "map", "backup", backup.to_str().unwrap()]);
    etcd.save_snapshot();
    cluster.ok(&["image", "create", "late", "16m"]);
    raise_epochs(&cluster);
    let known = epochs(&cluster.status());
    let filled =
        cluster.perf(&["--rw=write", "--size=8m", "--iodepth=16", "--do_verify=0"]).output().unwrap();
    assert!(filled.status.success(), "{}", text(&filled.stderr));
    let path = cluster.directory.clone();
    cluster.end();
    etcd.restore_snapshot();

    let cluster = Cluster::start_in(&path, &[]);
    let read = |cluster: &Cluster| {
        let read = cluster.perf(&["--rw=read", "--size=8m", "--iodepth=16"]).output().unwrap();
        assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));
    };
    let status = cluster.wait_for("served", |status| {
        !status["map_lost_revision"].is_null() && all_groups(status, |group| group["state"] == "healthy")
    });
    assert!(epochs(&status).iter().zip(&known).all(|(now, before)| now > before), "{known:?}: {status:#}");
    read(&cluster);
    // An older copy is restored only when that is said; groups keep their records.
    let restore = ["store", "map", "restore", backup.to_str().unwrap()];
    let refused = text(&cluster.run(&restore).stderr);
    assert!(refused.contains("has seen revision") && refused.contains("--older"), "{refused}");
    let before = epochs(&cluster.status());
    cluster.ok(&[&restore[..], &["--older"]].concat());
    let status = cluster.wait_until_healthy();
    assert!(epochs(&status).iter().zip(&before).all(|(now, before)| now >= before), "{before:?}: {status:#}");
    // A failover after that.
    raise_epochs(&cluster);
    read(&cluster);
    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

/// A copy of a node's directory, as on a cloned machine: it is refused while the original runs. One that was
/// cut off for too long serves no more when the copy is the node, and comes back by itself when that is gone.
#[test]
fn of_two_processes_of_one_node_one_serves() {
    let Some(etcd) = EtcdCluster::start("twin", 1) else { return };
    let directory = scratch("store-twin");
    let mut cluster = start(&directory, &etcd.urls("twin"));
    cluster.ok(&["image", "create", "vol", "16m"]);
    cluster.wait_until_healthy();
    signal(cluster.up.id(), Signal::INT);
    assert!(cluster.up.wait().unwrap().success());
    let path = cluster.directory.join("node2/config.json");
    let config = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, config.replace("\"node\": 2", "\"lease_s\": 2, \"node\": 2")).unwrap();
    let cluster = Cluster::start(&directory, &[]);
    cluster.wait_until_healthy();

    let twin = directory.join("twin");
    std::fs::create_dir(&twin).unwrap();
    for name in ["key", "etcd"] {
        std::fs::copy(cluster.directory.join(name), twin.join(name)).unwrap();
    }
    let node = cluster.directory.join("node2");
    let copied =
        std::process::Command::new("cp").args(["-a", "--sparse=always"]).arg(&node).arg(&twin).output();
    assert!(copied.unwrap().status.success());
    let _ = std::fs::remove_file(twin.join("node2/rpc.sock"));
    let address =
        |status: &Value| status["nodes"][1]["report"]["address"].as_str().unwrap_or_default().to_string();
    let known = address(&cluster.status());
    let refused = ringbolt(&["store", "up", "--cluster", twin.to_str().unwrap()]);
    let refused = text(&refused.stderr);
    assert!(refused.contains("another process is node 2") && refused.contains(&known), "{refused}");
    assert!(is_healthy_at(&cluster.status(), &known));

    // The original stands still for longer than its lease.
    let original = cluster.nodes()[1];
    signal(original, Signal::STOP);
    cluster.wait_for("down", |status| status["nodes"][1]["up"] == false);
    let copy = Cluster::start_in(&twin, &[]);
    cluster.wait_for("a node again", |status| status["nodes"][1]["up"] == true);
    signal(original, Signal::CONT);
    let socket = node.join("rpc.sock");
    let state = || {
        let report = ringbolt(&["rpc", "-r", socket.to_str().unwrap(), "store_node_get_status"]);
        format!("{}{}", text(&report.stdout), text(&report.stderr))
    };
    let started = Instant::now();
    while !state().contains("another process is") {
        assert!(started.elapsed() < Duration::from_secs(60), "{}", state());
        std::thread::sleep(Duration::from_millis(50));
    }
    copy.end();
    cluster.wait_until_healthy();
    assert_eq!(cluster.nodes()[1], original, "its process has not ended");
    let read = cluster.perf(&["--rw=randrw", "--size=8m", "--iodepth=16"]).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));
    cluster.end();
    std::fs::remove_dir_all(&directory).unwrap();
}

fn is_healthy_at(status: &Value, address: &str) -> bool {
    status["healthy"] == true && status["nodes"][1]["report"]["address"] == address
}
