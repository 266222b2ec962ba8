//! A cluster of the store under its operators' hands: ports, what may be stopped, recovery, copies of images.
#![allow(clippy::unwrap_used)]

mod rig;
#[path = "rig/store.rs"]
mod store;

use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rig::{ringbolt, scratch, text};
use rustix::process::Signal;
use serde_json::Value;
use store::{Cluster, signal};

const SIZE: [&str; 2] = ["--size=200m", "--log-size=2m"];

/// The first of some ports of loopback, one after the other, that nothing uses now. The kernel gives none of
/// them to a connection.
fn free_ports(count: u16) -> u16 {
    let bind = |port: u16| TcpListener::bind(("127.0.0.1", port)).ok();
    // Programs that run at the same time begin elsewhere.
    let begin = 10_000 + (std::process::id() % 2000) as u16 * 10;
    let firsts = (begin..32_000).chain(10_000..begin).step_by(count.into());
    let is_free = |first: &u16| (*first..first + count).map_while(bind).count() == usize::from(count);
    firsts.into_iter().find(is_free).unwrap()
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn stderr_of(output: &Output) -> String {
    assert!(!output.status.success(), "{}", text(&output.stdout));
    text(&output.stderr)
}

/// Kills node 1, and returns when it was started again.
fn kill_first_node(cluster: &Cluster) {
    let before = cluster.nodes();
    signal(before[0], Signal::KILL);
    cluster.wait_for("started again", |_| {
        let nodes = cluster.nodes();
        nodes.len() == before.len() && nodes[0] != before[0]
    });
}

#[test]
fn nodes_listen_on_the_ports_that_were_named_and_keep_them() {
    let directory = scratch("store-ports");
    let first = free_ports(4);
    let address = |index: u16| format!("127.0.0.1:{}", first + index);
    let listens_on = |status: &Value, node: usize| {
        status["nodes"][node - 1]["report"]["address"].as_str().unwrap_or_default().to_string()
    };
    // Nothing is made where a port is in use.
    let taken = TcpListener::bind(address(1)).unwrap();
    let (place, listen) = (directory.join("cluster"), format!("--listen={}", address(0)));
    let up = ["store", "up", "--cluster", place.to_str().unwrap(), "--nodes=2", &listen];
    let refused = stderr_of(&ringbolt(&[&up[..], &SIZE].concat()));
    assert!(refused.contains(&format!("--listen {}: Address already in use", address(1))), "{refused}");
    assert!(!place.exists());
    drop(taken);

    let options = [&SIZE[..], &["--nodes=2", "--groups=4", "--spare=8", &listen]].concat();
    let cluster = Cluster::start(&directory, &options);
    let status = cluster.wait_until_healthy();
    assert_eq!([1, 2].map(|node| listens_on(&status, node)), [address(0), address(1)]);
    // A node that is killed is where it was.
    kill_first_node(&cluster);
    let back = cluster.wait_until_healthy();
    assert_eq!([1, 2].map(|node| listens_on(&back, node)), [address(0), address(1)]);

    // Another node has a port of its own.
    let add = |listen: &str| {
        let listen = format!("--listen={listen}");
        cluster.run(&[&["store", "add-node", &listen, "--spare=4"][..], &SIZE].concat())
    };
    let refused = stderr_of(&add(&address(1)));
    assert!(refused.contains("node 2 has this address"), "{refused}");
    let added = add(&address(2));
    assert!(added.status.success(), "{}", text(&added.stderr));
    let three = cluster.wait_for("a third node", |status| listens_on(status, 3) == address(2));
    assert_eq!(three["nodes"].as_array().unwrap().len(), 3);
    a_stopped_node_goes_to_another_port(&cluster, &address);
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

/// Node 2, which listens on the second port; the fourth is free.
fn a_stopped_node_goes_to_another_port(cluster: &Cluster, address: &impl Fn(u16) -> String) {
    let start = |listen: &str| cluster.run(&["store", "start-node", "2", "--listen", listen]);
    let refused = stderr_of(&start(&address(3)));
    assert!(refused.contains("node 2 runs: `ringbolt store stop-node 2`"), "{refused}");
    cluster.wait_until_healthy();
    cluster.ok(&["store", "stop-node", "2"]);
    for (listen, reason) in [
        (address(0), "node 1 has this address".to_string()),
        ("192.0.2.1:7001".to_string(), "192.0.2.1 is not this machine alone".to_string()),
        ("7001".to_string(), "expected IP or IP:PORT".to_string()),
    ] {
        let refused = stderr_of(&start(&listen));
        assert!(refused.contains(&reason), "{refused}");
    }
    // A program that took its port while it was stopped is named by its address.
    let taken = TcpListener::bind(address(1)).unwrap();
    let served = Command::new(env!("CARGO_BIN_EXE_ringbolt"))
        .args(["serve", "--config", "node2/config.json", "--rpc-socket", "node2/rpc.sock"])
        .current_dir(&cluster.directory)
        .output()
        .unwrap();
    let reason = stderr_of(&served);
    assert!(reason.contains(&format!("cannot listen on {}: Address already in use", address(1))), "{reason}");
    let moved = start(&address(3));
    assert!(moved.status.success(), "{}", text(&moved.stderr));
    let status = cluster.wait_until_healthy();
    assert_eq!(status["nodes"][1]["report"]["address"], address(3));
    drop(taken);
    // Clients find it.
    cluster.ok(&["image", "create", "vol", "16m"]);
    let written = cluster.perf(&["--rw=write", "--size=4m"]).output().unwrap();
    assert!(written.status.success(), "{}", text(&written.stderr));
}

#[test]
fn it_is_said_before_which_nodes_may_be_stopped_together() {
    let directory = scratch("store-ok-to-stop");
    let options = [&SIZE[..], &["--nodes=4", "--replicas=3", "--groups=8"]].concat();
    let cluster = Cluster::start(&directory, &options);
    cluster.ok(&["store", "pool", "create", "pair", "--replicas=2", "--groups=2"]);
    let status = cluster.wait_until_healthy();
    let check = |nodes: &[&str]| cluster.run(&[&["store", "ok-to-stop"][..], nodes].concat());
    // Of every pool one replica may be missing.
    for node in ["1", "2", "3", "4"] {
        let output = check(&[node]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(text(&output.stdout).contains(&format!("ok to stop node {node}: ")));
    }
    // Of two nodes that share a group of three replicas, one is too many.
    let shares = |group: &&Value, nodes: [u64; 2]| {
        let replicas = group["replicas"].as_array().unwrap();
        nodes.iter().all(|node| replicas.contains(&(*node).into()))
    };
    let groups = status["groups"].as_array().unwrap();
    let shared = groups.iter().filter(|group| shares(group, [1, 2])).count();
    assert!(shared > 0);
    let output = check(&["1", "2", "--json"]);
    let refused = stderr_of(&output);
    let expected = if shared == 1 { "1 group".to_string() } else { format!("{shared} groups") };
    assert!(refused.contains(&format!("not ok to stop nodes 1, 2 together: {expected} would not be served")));
    let said = json(&text(&output.stdout));
    assert_eq!((&said["ok"], &said["nodes"]), (&false.into(), &serde_json::json!([1, 2])));
    let not_served = said["groups"].as_array().unwrap().iter().filter(|it| it["effect"] == "not_served");
    for group in not_served {
        assert!(
            group["left"].as_array().unwrap().len() < group["needed"].as_u64().unwrap() as usize,
            "{said:#}"
        );
    }
    // What it says is what happens: a group that is served without both is not among them.
    let nodes = cluster.nodes();
    [0, 1].into_iter().for_each(|node| signal(nodes[node], Signal::STOP));
    let down = cluster.wait_for("without two nodes", |status| {
        let groups = status["groups"].as_array().unwrap().iter();
        groups.filter(|group| ["waiting", "down"].contains(&group["state"].as_str().unwrap())).count()
            == shared
    });
    // While one is down, the next one may be one too many, and whether it is depends on what is there now.
    let third = check(&["3"]);
    let waiting = |status: &Value| status["groups"].as_array().unwrap().clone();
    assert!(waiting(&down).iter().any(|group| group["state"] == "waiting" || group["state"] == "down"));
    assert!(stderr_of(&third).contains("not ok to stop node 3: "));
    [0, 1].into_iter().for_each(|node| signal(nodes[node], Signal::CONT));
    cluster.wait_until_healthy();
    for (nodes, reason) in [(&["9"][..], "the cluster has no node 9"), (&[], "<NODES>")] {
        let refused = stderr_of(&check(nodes));
        assert!(refused.contains(reason), "{refused}");
    }
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn replicas_stay_while_noout_is_on_and_copies_keep_their_rate() {
    let directory = scratch("store-noout");
    let options =
        [&SIZE[..], &["--nodes=4", "--replicas=2", "--groups=6", "--spare=8", "--out-after=5s"]].concat();
    let cluster = Cluster::start(&directory, &options);
    cluster.ok(&["image", "create", "vol", "64m"]);
    cluster.wait_until_healthy();
    let filled = cluster.perf(&["--rw=write", "--size=48m", "--iodepth=16", "--do_verify=0"]);
    let filled = { filled }.output().unwrap();
    assert!(filled.status.success(), "{}", text(&filled.stderr));
    for (setting, reason) in [
        ("noout=maybe", "expected on or off"),
        ("nodown=on", "expected noout=on, noout=off, recovery-rate=SIZE"),
        ("recovery-rate=1k", "is too low: at least 1048576"),
    ] {
        let refused = stderr_of(&cluster.run(&["store", "set", setting]));
        assert!(refused.contains(reason), "{refused}");
    }
    assert_eq!(
        cluster.ok(&["store", "set", "noout=on"]),
        "noout=on recovery-rate=off scrub-every=7d scrub-rate=20971520\n"
    );
    let set = json(&cluster.ok(&["store", "set", "recovery-rate=1m", "--json"]));
    assert_eq!((&set["noout"], &set["recovery_bytes_per_second"]), (&true.into(), &(1 << 20).into()));
    let lines = cluster.ok(&["store", "status"]);
    assert!(lines.contains("noout: replicas of nodes that are down stay"), "{lines}");
    assert!(lines.contains("recovery rate: a node copies 1.0 MiB/s at most"), "{lines}");

    let replicas = |status: &Value| -> Vec<Value> {
        status["groups"].as_array().unwrap().iter().map(|group| group["replicas"].clone()).collect()
    };
    let before = replicas(&cluster.status());
    let nodes = cluster.nodes();
    signal(nodes[1], Signal::STOP);
    cluster.wait_for("node 2 down", |status| status["nodes"][1]["up"] == false);
    // For longer than after which it would be out.
    let down = Instant::now();
    let kept = cluster.wait_for("long enough", |status| {
        assert_eq!((&status["nodes"][1]["out"], &replicas(status)), (&Value::Null, &before));
        down.elapsed() > Duration::from_secs(9)
    });
    assert_eq!((&kept["noout"], &kept["moving"]), (&true.into(), &0.into()));

    // Without it the node is out, and what it had is copied, slowly.
    cluster.ok(&["store", "set", "noout=off"]);
    cluster.wait_for("node 2 out", |status| status["nodes"][1]["out"] == "down");
    let copying = |status: &Value| -> Vec<(u64, u64)> {
        let groups = status["groups"].as_array().unwrap().iter();
        let learners = groups.flat_map(|group| group["learners"].as_array().into_iter().flatten());
        let of = |learner: &Value| {
            Some((learner["copied_bytes"].as_u64()?, learner["copied_bytes_per_second"].as_u64()?))
        };
        learners.filter_map(of).collect()
    };
    let slow =
        cluster.wait_for("a copy", |status| copying(status).iter().any(|(bytes, _)| *bytes >= 2 << 20));
    // A part is sent at once, and the time that it takes follows.
    for (bytes, speed) in copying(&slow).into_iter().filter(|(bytes, _)| *bytes >= 2 << 20) {
        assert!(speed <= (1 << 20) * 5 / 4, "{bytes} bytes with {speed} in a second");
    }
    cluster.ok(&["store", "set", "recovery-rate=off"]);
    let moved = cluster.wait_for("moved", |status| {
        let groups = status["groups"].as_array().unwrap();
        status["moving"] == 0 && groups.iter().all(|group| group["state"] == "healthy")
    });
    assert!(replicas(&moved).iter().all(|nodes| !nodes.as_array().unwrap().contains(&2.into())));
    signal(nodes[1], Signal::CONT);
    cluster.wait_until_healthy();
    let read = cluster.perf(&["--rw=read", "--size=48m", "--iodepth=16"]).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_pool_gets_another_number_of_replicas_and_another_name_while_it_is_used() {
    let directory = scratch("store-pool-changes");
    let options = ["--size=400m", "--log-size=2m", "--nodes=4", "--replicas=2", "--groups=4", "--spare=6"];
    let cluster = Cluster::start(&directory, &options);
    cluster.ok(&["image", "create", "vol", "64m"]);
    cluster.wait_until_healthy();
    let load =
        cluster.perf(&["--rw=randrw", "--iodepth=4", "--time_based", "--runtime=600"]).spawn().unwrap();
    let have = |status: &Value, count: usize| {
        let groups = status["groups"].as_array().unwrap();
        let all = groups.iter().all(|group| {
            ["replicas", "in_sync"].iter().all(|list| group[*list].as_array().unwrap().len() == count)
        });
        all && status["healthy"] == true && status["moving"] == 0
    };
    cluster.ok(&["store", "pool", "set", "pool", "--replicas=3"]);
    cluster.wait_for("three replicas", |status| have(status, 3));
    let pool = || json(&cluster.ok(&["store", "pool", "list", "--json"]))[0].clone();
    // What clients do to it is counted meanwhile, whichever nodes serve it.
    let stats = json(&cluster.ok(&["image", "stats", "vol", "--interval=3s", "--json"]))[0].clone();
    assert_eq!(stats["image"], "pool/vol");
    for field in ["reads", "read_bytes", "read_mean_ns", "writes", "written_bytes", "write_mean_ns"] {
        assert!(stats[field].as_u64().is_some_and(|count| count > 0), "{field}: {stats:#}");
    }
    assert_eq!((&pool()["replicas"], &pool()["in_sync_min"]), (&3.into(), &2.into()));
    // Two are needed in sync now: without two of its nodes a group waits, where one was enough before.
    let (nodes, status) = (cluster.nodes(), cluster.status());
    let members = status["groups"][0]["replicas"].as_array().unwrap();
    let two: Vec<u32> = members[..2].iter().map(|node| nodes[node.as_u64().unwrap() as usize - 1]).collect();
    two.iter().for_each(|node| signal(*node, Signal::STOP));
    cluster.wait_for("a group that waits", |status| {
        status["groups"][0]["why"].as_str().is_some_and(|why| why.contains("than the pool demands"))
    });
    two.iter().for_each(|node| signal(*node, Signal::CONT));
    cluster.wait_until_healthy();
    let refused = |arguments: &[&str]| stderr_of(&cluster.run(&[&["store", "pool"][..], arguments].concat()));
    for (arguments, reason) in [
        (&["set", "pool", "--replicas=5"][..], "5 replicas need as many nodes, and 4 are in"),
        (&["set", "none", "--replicas=2"], "there is no pool none"),
        (&["set", "pool", "--replicas=0"], "0 is not in 1.."),
        (&["rename", "none", "other"], "there is no pool none"),
        (&["rename", "pool", "a/b"], "is no name of a pool"),
        (&["rename", "pool", "other"], "image pool/vol is in use by "),
    ] {
        let said = refused(arguments);
        assert!(said.contains(reason), "{said}");
    }
    cluster.ok(&["store", "pool", "set", "pool", "--replicas=2"]);
    cluster.wait_for("two replicas", |status| have(status, 2));
    assert_eq!((&pool()["replicas"], &pool()["in_sync_min"]), (&2.into(), &1.into()));
    signal(load.id(), Signal::INT);
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    let written = cluster.perf(&["--rw=write", "--size=16m", "--do_verify=0"]).output().unwrap();
    assert!(written.status.success(), "{}", text(&written.stderr));

    requests_of_an_image_are_counted_once(&cluster);
    wait_until_detached(&cluster, "vol");
    // A client key knows the pool by its name.
    let key = directory.join("vm7.key");
    cluster.ok(&["store", "key", "create", "vm7", "--pool=pool:rw", "--out", key.to_str().unwrap()]);
    let said = refused(&["rename", "pool", "other"]);
    assert!(said.contains("client key vm7 has rights on pool pool"), "{said}");
    cluster.ok(&["store", "key", "delete", "vm7"]);
    cluster.ok(&["store", "pool", "rename", "pool", "other"]);
    assert_eq!(pool()["name"], "other");
    let renamed = cluster.wait_until_healthy();
    assert!(
        renamed["groups"].as_array().unwrap().iter().all(|group| group["pool"] == "other"),
        "{renamed:#}"
    );
    let filename = format!("--filename=store:other/vol?cluster={}", cluster.path());
    let read =
        ringbolt(&["perf", &filename, "--rw=read", "--bs=4k", "--size=16m", "--verify=crc32c", "--name=t"]);
    assert!(read.status.success(), "{}", text(&read.stderr));
    let gone = cluster.perf(&["--rw=read", "--size=4k"]).output().unwrap();
    assert!(text(&gone.stderr).contains("there is no"), "{}", text(&gone.stderr));
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

/// By all nodes together, in a pool that was not in use for another image of this name. A write that another
/// primary commits than appended it is not counted, so no group may get a new epoch meanwhile.
fn requests_of_an_image_are_counted_once(cluster: &Cluster) {
    let epochs = || -> Vec<Value> {
        let status = cluster.wait_until_healthy();
        status["groups"].as_array().unwrap().iter().map(|group| group["epoch"].clone()).collect()
    };
    let write_and_count = |attempt: u32| {
        let image = format!("counted{attempt}");
        cluster.ok(&["image", "create", &image, "16m"]);
        let before = epochs();
        let written =
            cluster.perf_of(&image, &["--rw=write", "--size=12m", "--do_verify=0"]).output().unwrap();
        assert!(written.status.success(), "{}", text(&written.stderr));
        let stats = json(&cluster.ok(&["image", "stats", &image, "--interval=0s", "--json"]))[0].clone();
        assert!(stats["writes"].as_u64().unwrap() <= 3072, "{stats:#}");
        wait_until_detached(cluster, &image);
        (epochs() == before).then_some((image, stats))
    };
    let (image, stats) = (0..5).find_map(write_and_count).expect("epochs that last");
    assert_eq!((&stats["writes"], &stats["written_bytes"]), (&3072.into(), &(12 << 20).into()), "{stats:#}");
    assert_eq!(
        (&stats["reads"], &stats["read_mean_ns"], &stats["seconds"]),
        (&0.into(), &Value::Null, &Value::Null)
    );
    // The metrics of the nodes have the same.
    let volume = json(&cluster.ok(&["image", "info", &image, "--json"]))["volume"].to_string();
    let writes = |node: u32| -> u64 {
        let socket = cluster.directory.join(format!("node{node}/rpc.sock"));
        let call =
            ["rpc", "-r", socket.to_str().unwrap(), "metrics_get", "name=ringbolt_store_volume_operations"];
        let metrics = json(&text(&ringbolt(&call).stdout));
        let is_it = |sample: &&Value| {
            sample["labels"]["volume"] == volume.as_str() && sample["labels"]["operation"] == "write"
        };
        let sample = metrics[0]["samples"].as_array().unwrap().iter().find(is_it);
        sample.map_or(0, |sample| sample["value"].as_u64().unwrap())
    };
    assert_eq!((1..=4).map(writes).sum::<u64>(), 3072);
    let lines = cluster.ok(&["image", "stats", "--interval=0s"]);
    assert!(lines.contains(&format!("pool/{image}")) && lines.contains("12.0 MiB"), "{lines}");
    let refused = stderr_of(&cluster.run(&["image", "stats", "none"]));
    assert!(refused.contains("there is no image pool/none"), "{refused}");
}

/// Waits until no client has an image: a process that ended has it for some seconds, if it was killed.
fn wait_until_detached(cluster: &Cluster, image: &str) {
    let started = Instant::now();
    let has_users = || {
        let info = json(&cluster.ok(&["image", "info", image, "--json"]));
        !info["attached_by"].as_array().unwrap().is_empty()
    };
    while has_users() {
        assert!(started.elapsed() < Duration::from_secs(30), "{image} is attached");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_node_has_the_cores_that_were_named() {
    let directory = scratch("store-cores");
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let cores =
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_string();
    let place = directory.join("cluster");
    let up = |lists: &[&str]| {
        let lists: Vec<String> = lists.iter().map(|list| format!("--cores={list}")).collect();
        let lists: Vec<&str> = lists.iter().map(String::as_str).collect();
        let up = ["store", "up", "--cluster", place.to_str().unwrap(), "--nodes=3"];
        stderr_of(&ringbolt(&[&up[..], &SIZE, &lists].concat()))
    };
    assert!(up(&["all"]).contains("'all' is not a list of cores"));
    assert!(up(&["1023"]).contains("core 1023 is not among the cores of this process"));
    assert!(
        up(&[&cores, &cores]).contains("--cores is given once for all of them, or 3 times, and not 2 times")
    );
    assert!(!place.exists());
    let list = format!("--cores={cores}");
    let cluster = Cluster::start(&directory, &[&SIZE[..], &["--nodes=3", "--groups=6", &list]].concat());
    cluster.ok(&["image", "create", "vol", "16m"]);
    cluster.wait_until_healthy();
    let log = std::fs::read_to_string(cluster.directory.join("node2/log")).unwrap();
    assert!(log.lines().any(|line| line.starts_with("cores: ") && line.ends_with(", pinned")), "{log}");
    // Each core has its part of the groups, and all are served while one node does not answer.
    let load = cluster.perf(&["--rw=randrw", "--iodepth=8", "--time_based", "--runtime=4"]).spawn().unwrap();
    kill_first_node(&cluster);
    cluster.wait_until_healthy();
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

/// Extents that the groups of a pool use on their primaries.
fn used_extents(status: &Value, pool: &str) -> u64 {
    let mut used = 0;
    for group in status["groups"].as_array().unwrap().iter().filter(|group| group["pool"] == pool) {
        let primary = group["primary"].as_u64().unwrap() as usize - 1;
        let replicas = status["nodes"][primary]["report"]["replicas"].as_array().unwrap();
        let of_group = replicas.iter().find(|replica| replica["group"] == group["group"]);
        used += of_group.unwrap()["used_extents"].as_u64().unwrap();
    }
    used
}

#[test]
fn images_are_copied_whole_or_not_at_all() {
    let directory = scratch("store-copy");
    let options = ["--size=400m", "--log-size=2m", "--nodes=3", "--replicas=2", "--groups=4", "--spare=6"];
    let cluster = Cluster::start(&directory, &options);
    cluster.ok(&["store", "pool", "create", "other", "--replicas=2", "--groups=2"]);
    cluster.ok(&["image", "create", "vol", "1g"]);
    cluster.wait_until_healthy();
    // Two ranges with a hole between.
    let ranges = [["--offset=0", "--size=10m"], ["--offset=900m", "--size=5m"]];
    let perf = |image: &str, mode: &[&str], range: &[&str; 2]| {
        let filename = format!("--filename=store:{image}?cluster={}", cluster.path());
        let load = ["perf", &filename, "--bs=64k", "--iodepth=8", "--verify=crc32c", "--name=t"];
        let output = ringbolt(&[&load[..], mode, range].concat());
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    };
    ranges.iter().for_each(|range| perf("pool/vol", &["--rw=write", "--do_verify=0"], range));
    let verify = |image: &str| ranges.iter().for_each(|range| perf(image, &["--rw=read"], range));

    // To another pool, while a node that has some of it does not answer.
    let nodes = cluster.nodes();
    signal(nodes[0], Signal::STOP);
    let copied = json(&cluster.ok(&["image", "copy", "vol", "vol", "--to-pool=other", "--json"]));
    signal(nodes[0], Signal::CONT);
    let expected = ("store:other/vol", 1u64 << 30, 15u64 << 20);
    assert_eq!(
        (
            copied["image"].as_str().unwrap(),
            copied["size"].as_u64().unwrap(),
            copied["written_bytes"].as_u64().unwrap()
        ),
        expected
    );
    verify("other/vol");
    cluster.wait_for("as much space as the image has, and no more", |status| {
        let used = [used_extents(status, "pool"), used_extents(status, "other")];
        status["healthy"] == true && used[1] >= 15 << 4 && used[1] <= used[0]
    });

    // What is not to be copied, and where nothing may be.
    let refused = |arguments: &[&str]| stderr_of(&cluster.run(&[&["image", "copy"][..], arguments].concat()));
    for (arguments, reason) in [
        (&["vol", "vol"][..], "image pool/vol exists"),
        (&["vol", "vol", "--to-pool=other"], "image other/vol exists"),
        (&["none", "new"], "there is no image pool/none"),
        (&["vol", "new", "--to-pool=none"], "there is no pool none"),
        (&["vol", "trash.new"], "names that begin with `trash.`"),
        (&["vol", "new?"], "none of `?`"),
        (&["vol", "new", "--to-cluster=/nowhere"], "there is no cluster in /nowhere"),
    ] {
        let said = refused(arguments);
        assert!(said.contains(reason), "{said}");
    }
    let load = cluster
        .perf(&["--rw=randrw", "--offset=100m", "--size=8m", "--time_based", "--runtime=600"])
        .spawn()
        .unwrap();
    let in_use = |image: &Value| !image["attached_by"].as_array().unwrap().is_empty();
    // The map says so at once, and nothing tells a test.
    while !in_use(&json(&cluster.ok(&["image", "info", "vol", "--json"]))) {
        std::thread::sleep(Duration::from_millis(50));
    }
    let said = refused(&["vol", "new"]);
    assert!(said.contains("image pool/vol is in use by "), "{said}");
    signal(load.id(), Signal::INT);
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    a_killed_copy_leaves_nothing_under_its_name(&cluster);
    verify("pool/new");

    // To another cluster.
    let second =
        Cluster::start_in(&directory.join("second"), &[&SIZE[..], &["--nodes=1", "--groups=2"]].concat());
    cluster.ok(&["image", "copy", "vol", "away", "--to-cluster", second.path()]);
    let filename = format!("--filename=store:pool/away?cluster={}", second.path());
    let read =
        ringbolt(&["perf", &filename, "--rw=read", "--bs=64k", "--size=10m", "--verify=crc32c", "--name=t"]);
    assert!(read.status.success(), "{}", text(&read.stderr));
    second.end();
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

fn a_killed_copy_leaves_nothing_under_its_name(cluster: &Cluster) {
    let nodes = cluster.nodes();
    nodes.iter().for_each(|node| signal(*node, Signal::STOP));
    let mut copy = Command::new(env!("CARGO_BIN_EXE_ringbolt"))
        .args(["image", "copy", "vol", "new", "--cluster", cluster.path()])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let trash = || json(&cluster.ok(&["image", "list", "--trash", "--json"]));
    while trash().as_array().unwrap().is_empty() {
        std::thread::sleep(Duration::from_millis(50));
    }
    copy.kill().unwrap();
    copy.wait().unwrap();
    nodes.iter().for_each(|node| signal(*node, Signal::CONT));
    cluster.wait_until_healthy();
    assert_eq!(trash()[0]["name"], "new (unfinished copy)");
    assert!(!cluster.ok(&["image", "list"]).contains("pool/new"));
    // The next one begins anew.
    assert_eq!(cluster.ok(&["image", "copy", "vol", "new"]), "store:pool/new\n");
    assert_eq!(trash(), serde_json::json!([]));
}
