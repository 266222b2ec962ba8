//! A cluster of the store that changes: nodes are added, taken out, lost and replaced, and pools come and go.
#![allow(clippy::unwrap_used)]

#[path = "../../../store/cluster-map/tests/rig/mod.rs"]
mod etcd;
mod rig;
#[path = "rig/store.rs"]
mod store;

use std::collections::{BTreeMap, BTreeSet};

use etcd::EtcdCluster;
use rig::{ringbolt, scratch, text};
use rustix::process::Signal;
use serde_json::Value;
use store::{Cluster, is_running, signal};

const SIZE: [&str; 2] = ["--size=200m", "--log-size=2m"];

/// Replicas of each group, in their order.
fn replicas(status: &Value) -> Vec<Vec<u64>> {
    let numbers = |group: &Value| {
        let mut all: Vec<u64> =
            group["replicas"].as_array().unwrap().iter().map(|node| node.as_u64().unwrap()).collect();
        all.sort_unstable();
        all
    };
    status["groups"].as_array().unwrap().iter().map(numbers).collect()
}

fn with_node(status: &Value, node: u64) -> usize {
    replicas(status).iter().filter(|replicas| replicas.contains(&node)).count()
}

/// All is served, and nothing moves any more.
fn is_settled(status: &Value) -> bool {
    status["healthy"] == true && status["moving"] == 0
}

/// Replicas that one of the placements has and the other does not.
fn moved(before: &[Vec<u64>], after: &[Vec<u64>]) -> usize {
    before
        .iter()
        .zip(after)
        .map(|(before, after)| after.iter().filter(|it| !before.contains(it)).count())
        .sum()
}

#[test]
fn replicas_follow_nodes_that_are_added_out_lost_and_replaced() {
    let directory = scratch("store-nodes");
    let options =
        [&SIZE[..], &["--groups=6", "--spare=6", "--nodes=3", "--replicas=2", "--out-after=5s"]].concat();
    let cluster = Cluster::start(&directory, &options);
    cluster.ok(&["image", "create", "vol", "64m"]);
    let first = replicas(&cluster.wait_until_healthy());
    let filled =
        cluster.perf(&["--rw=write", "--size=16m", "--iodepth=16", "--do_verify=0"]).output().unwrap();
    assert!(filled.status.success(), "{}", text(&filled.stderr));
    let load = cluster.perf(&[
        "--rw=randrw",
        "--offset=32m",
        "--size=32m",
        "--iodepth=4",
        "--time_based",
        "--runtime=20",
    ]);
    let load = { load }.spawn().unwrap();

    // A fourth node takes what it wins by its weight, and nothing else moves.
    cluster.ok(&[&["store", "add-node", "--spare=10"][..], &SIZE].concat());
    let added =
        cluster.wait_for("spread over four nodes", |status| is_settled(status) && with_node(status, 4) > 0);
    let second = replicas(&added);
    assert_eq!(moved(&first, &second), with_node(&added, 4), "{first:?} {second:?}");

    // The first node is taken out: its replicas move, and no others.
    let had = with_node(&added, 1);
    cluster.ok(&["store", "out", "1"]);
    let out = cluster.wait_for("without node 1", |status| is_settled(status) && with_node(status, 1) == 0);
    assert_eq!(moved(&second, &replicas(&out)), had);
    assert_eq!(out["nodes"][0]["out"], "operator");
    cluster.ok(&["store", "in", "1"]);
    let back = cluster.wait_for("with node 1", |status| is_settled(status) && with_node(status, 1) == had);
    assert_eq!(replicas(&back), second);

    // With a weight far above the others a node wins a replica of each group, and nothing else moves.
    let (groups, had) = (second.len(), with_node(&back, 4));
    cluster.ok(&["store", "weight", "4", "100000000"]);
    let heavy =
        cluster.wait_for("all on node 4", |status| is_settled(status) && with_node(status, 4) == groups);
    assert_eq!(moved(&second, &replicas(&heavy)), groups - had);
    cluster.ok(&["store", "weight", "4", &back["nodes"][3]["weight"].to_string()]);
    let back =
        cluster.wait_for("weights as before", |status| is_settled(status) && with_node(status, 4) == had);
    assert_eq!(replicas(&back), second);
    let unknown = cluster.run(&["store", "weight", "9", "1"]);
    assert!(text(&unknown.stderr).contains("the cluster has no node 9"), "{}", text(&unknown.stderr));
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));

    // A node stops, and is out after a while; when it continues it is in again.
    let nodes = cluster.nodes();
    signal(nodes[1], Signal::STOP);
    let down = cluster.wait_for("without node 2", |status| {
        with_node(status, 2) == 0
            && status["moving"] == 0
            && status["groups"].as_array().unwrap().iter().all(|group| group["state"] == "healthy")
    });
    assert_eq!(down["nodes"][1]["out"], "down");
    signal(nodes[1], Signal::CONT);
    let back = cluster.wait_for("with node 2", |status| is_settled(status) && with_node(status, 2) > 0);
    assert_eq!(replicas(&back), second);
    let read = cluster.perf(&["--rw=read", "--size=16m", "--iodepth=16"]).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));

    // Pools: the groups of a new one are new, and nothing of them is copied.
    cluster.ok(&["store", "pool", "create", "other", "--replicas=3", "--groups=2", "--class=memory"]);
    let two = cluster.wait_for("two pools", |status| {
        status["healthy"] == true && status["groups"].as_array().unwrap().len() == 8
    });
    // Its class is named wherever the pool is.
    let classes = |of: &Value| -> Vec<String> {
        let all = of.as_array().unwrap().iter().map(|each| each["class"].as_str().unwrap().to_string());
        all.collect()
    };
    assert_eq!(classes(&two["groups"]).iter().filter(|class| *class == "memory").count(), 2);
    let reports = two["nodes"].as_array().unwrap().iter().map(|node| classes(&node["report"]["replicas"]));
    assert_eq!(reports.flatten().filter(|class| class == "memory").count(), 6);
    let created = cluster.run(&["image", "create", "--pool", "other", "vol", "32m"]);
    assert_eq!(text(&created.stdout), "store:other/vol\n");
    assert!(text(&created.stderr).contains("pool other is of class memory"), "{}", text(&created.stderr));
    let filename = format!("--filename=store:other/vol?cluster={}", cluster.path());
    let written =
        ringbolt(&["perf", &filename, "--rw=write", "--bs=64k", "--size=8m", "--verify=crc32c", "--name=t"]);
    assert!(written.status.success(), "{}", text(&written.stderr));
    let listed: Value = serde_json::from_str(&cluster.ok(&["store", "pool", "list", "--json"])).unwrap();
    assert_eq!((&listed[0]["name"], &listed[0]["images"]), (&"other".into(), &1.into()));
    assert_eq!(classes(&listed), ["memory", "disk"]);
    let refused = cluster.run(&["store", "pool", "remove", "other"]);
    assert!(text(&refused.stderr).contains("pool other has images"), "{}", text(&refused.stderr));
    cluster.ok(&["image", "remove", "--pool", "other", "vol"]);
    cluster.ok(&["store", "pool", "remove", "other"]);
    a_pool_that_does_not_fit_takes_nothing(&cluster);
    // Its partitions are free for others: of 12 with replicas at first, 18 spare ones and 10 of the added node 28 are.
    cluster.wait_for("free partitions", |status| {
        let reports = status["nodes"].as_array().unwrap().iter();
        let spare = reports.map(|node| node["report"]["spare_partitions"].as_u64().unwrap_or(0)).sum::<u64>();
        is_settled(status) && spare == 28
    });
    is_removed_when_it_is_stopped_and_others_have_its_replicas(&cluster);
    // What replicas that moved under load left in these is not taken for damage.
    let devices: Vec<_> =
        (1..=4).map(|node| cluster.directory.join(format!("node{node}/store.img"))).collect();
    cluster.end();
    for device in devices {
        let checked = ringbolt(&["objects", "check", device.to_str().unwrap()]);
        assert!(checked.status.success(), "{}", text(&checked.stdout));
        assert!(text(&checked.stdout).contains(" (spare) "), "{}", text(&checked.stdout));
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

fn a_pool_that_does_not_fit_takes_nothing(cluster: &Cluster) {
    let refused = cluster.run(&["store", "pool", "create", "many", "--replicas=3", "--groups=40"]);
    let reason = text(&refused.stderr);
    assert!(reason.contains("40 groups do not fit: node ") && reason.contains(" fits; "), "{reason}");
    assert_eq!(cluster.ok(&["store", "pool", "list", "--json"]).matches("\"name\"").count(), 1);
}

/// Node 4 of the cluster, which others do without.
fn is_removed_when_it_is_stopped_and_others_have_its_replicas(cluster: &Cluster) {
    let refused = cluster.run(&["store", "remove-node", "4"]);
    assert!(text(&refused.stderr).contains("node 4 has a replica in sync of "), "{}", text(&refused.stderr));
    cluster.ok(&["store", "out", "4"]);
    cluster.wait_for("without node 4", |status| is_settled(status) && with_node(status, 4) == 0);
    let refused = cluster.run(&["store", "remove-node", "4"]);
    assert!(text(&refused.stderr).contains("`ringbolt store stop-node 4`"), "{}", text(&refused.stderr));
    cluster.ok(&["store", "stop-node", "4"]);
    cluster.ok(&["store", "remove-node", "4"]);
    let three = cluster.wait_for("three nodes", |status| status["nodes"].as_array().unwrap().len() == 3);
    assert_eq!(three["healthy"], true);
    let back = cluster.run(&["store", "start-node", "4"]);
    assert!(text(&back.stderr).contains("node 4 was removed"), "{}", text(&back.stderr));
}

/// On a machine with several devices one of them is lost, and the other nodes serve on.
#[test]
fn a_node_that_does_not_start_ends_no_other_one() {
    let directory = scratch("store-failing");
    let cluster = Cluster::start(&directory, &[&SIZE[..], &["--groups=4", "--nodes=3"]].concat());
    cluster.ok(&["image", "create", "vol", "32m"]);
    cluster.wait_until_healthy();
    let load =
        cluster.perf(&["--rw=randrw", "--iodepth=4", "--time_based", "--runtime=600"]).spawn().unwrap();
    let up = |cluster: &Cluster| store::is_running(cluster.up.id());
    let without = |node: u64| {
        move |status: &Value| {
            let groups = status["groups"].as_array().unwrap();
            groups.iter().all(|group| {
                group["state"] == "degraded" && !group["in_sync"].as_array().unwrap().contains(&node.into())
            })
        }
    };

    // Its device is away, and comes back.
    let path = cluster.directory.clone();
    let device = |node: u32| path.join(format!("node{node}/store.img"));
    let away = directory.join("away");
    std::fs::rename(device(1), &away).unwrap();
    signal(cluster.nodes()[0], Signal::KILL);
    cluster.wait_for("without node 1", without(1));
    let log = cluster.directory.join("node1/log");
    let failures = || std::fs::read_to_string(&log).unwrap().matches("store.img").count();
    cluster.wait_for("node 1 failed twice", |_| failures() > 1);
    std::fs::rename(&away, device(1)).unwrap();
    cluster.wait_until_healthy();

    // Its directory is lost, and an empty node takes its place; nothing else is restarted.
    let others = (cluster.nodes()[0], cluster.nodes()[2]);
    std::fs::rename(cluster.directory.join("node2"), directory.join("lost")).unwrap();
    let lost = cluster.nodes()[1];
    signal(lost, Signal::KILL);
    cluster.wait_for("without node 2", without(2));
    let replace = [&["store", "add-node", "--replace", "2"][..], &SIZE].concat();
    cluster.wait_for("node 2 is down and replaced", |_| cluster.run(&replace).status.success());
    cluster.wait_until_healthy();
    assert_eq!((cluster.nodes()[0], cluster.nodes()[2]), others);
    signal(load.id(), Signal::INT);
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    assert!(up(&cluster));

    // The same at a start, and the end of a cluster with a node that is stopped.
    cluster.end();
    std::fs::rename(device(3), &away).unwrap();
    let mut cluster = Cluster::start(&directory, &[]);
    cluster.wait_for("without node 3", without(3));
    std::fs::rename(&away, device(3)).unwrap();
    cluster.wait_until_healthy();
    let nodes = cluster.nodes();
    signal(nodes[1], Signal::STOP);
    signal(cluster.up.id(), Signal::INT);
    assert!(cluster.up.wait().unwrap().success());
    assert!(!nodes.into_iter().any(store::is_running));
    drop(cluster);
    std::fs::remove_dir_all(&directory).unwrap();
}

/// The failure domains of each group's replicas.
fn domains(status: &Value) -> Vec<BTreeSet<String>> {
    let domain = |node: u64| status["nodes"][node as usize - 1]["domain"].as_str().unwrap().to_string();
    replicas(status).into_iter().map(|nodes| nodes.into_iter().map(domain).collect()).collect()
}

#[test]
fn a_machine_with_several_devices_is_one_failure_domain() {
    let Some(etcd) = EtcdCluster::start("domains", 1) else { return };
    let directory = scratch("store-domains");
    let urls = etcd.urls("domains");
    let options = [&SIZE[..], &["--spare=8", "--etcd", &urls]].concat();
    let place = |machine: u32| directory.join(format!("machine{machine}"));
    let first = [&options[..], &["--nodes=2", "--groups=2", "--domain=host1"]].concat();
    let cluster = Cluster::start_in(&place(1), &first);
    // There is one domain, and status says what that means.
    let alone = cluster.wait_until_healthy();
    assert!(alone["summary"].as_str().unwrap().ends_with("; 2 have several replicas in one failure domain"));
    assert_eq!(alone["groups"][0]["why"], "several replicas are in failure domain host1");

    let key = place(1).join("key");
    let mut machines = Vec::new();
    for machine in [2, 3] {
        let (place, domain) = (place(machine), format!("--domain=host{machine}"));
        let add = |more: &[&str]| {
            let of = ["store", "add-node", "--cluster", place.to_str().unwrap()];
            let added = ringbolt(&[&of[..], &options, more].concat());
            assert!(added.status.success(), "{}", text(&added.stderr));
        };
        add(&["--key", key.to_str().unwrap(), &domain]);
        // The next one of a machine is in the domain of that machine.
        add(&[]);
        machines.push(Cluster::start_in(&place, &[]));
    }
    cluster.ok(&["store", "pool", "remove", "pool"]);
    cluster.ok(&["store", "pool", "create", "pool", "--replicas=3", "--groups=8"]);
    cluster.ok(&["image", "create", "vol", "32m"]);
    let settled = cluster.wait_for("in three domains", |status| {
        is_settled(status) && domains(status).iter().all(|domains| domains.len() == 3)
    });
    assert!(settled["groups"].as_array().unwrap().iter().all(|group| group["why"].is_null()), "{settled:#}");
    assert_eq!(cluster.line_of_node(4), "node 4 (host2): serves");

    // A machine is lost with both of its nodes, and comes back.
    let load =
        cluster.perf(&["--rw=randrw", "--iodepth=4", "--time_based", "--runtime=600"]).spawn().unwrap();
    let lost = machines.remove(0);
    drop(lost);
    cluster.wait_for("without host2", |status| {
        let groups = status["groups"].as_array().unwrap();
        groups.iter().all(|group| group["state"] == "degraded")
    });
    machines.push(Cluster::start_in(&place(2), &[]));
    let back = cluster.wait_until_healthy();
    assert_eq!(replicas(&back), replicas(&settled));

    // It is taken out: groups have three replicas again, not all in one domain, and nothing else moves.
    ["3", "4"].into_iter().for_each(|node| _ = cluster.ok(&["store", "out", node]));
    let out = cluster.wait_for("in two domains", |status| {
        is_settled(status) && (3..=4).all(|node| with_node(status, node) == 0)
    });
    assert!(domains(&out).iter().all(|domains| domains.len() == 2), "{out:#}");
    assert_eq!(moved(&replicas(&settled), &replicas(&out)), 8);
    signal(load.id(), Signal::INT);
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    drop((cluster, machines));
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_lost_node_is_replaced_and_another_machine_joins() {
    let Some(etcd) = EtcdCluster::start("nodes", 1) else { return };
    let directory = scratch("store-replaced");
    let urls = etcd.urls("nodes");
    let options =
        [&SIZE[..], &["--groups=4", "--nodes=3", "--replicas=3", "--spare=2", "--etcd", &urls]].concat();
    let mut cluster = Cluster::start(&directory, &options);
    cluster.ok(&["image", "create", "vol", "32m"]);
    cluster.wait_until_healthy();
    let filled =
        cluster.perf(&["--rw=write", "--size=16m", "--iodepth=16", "--do_verify=0"]).output().unwrap();
    assert!(filled.status.success(), "{}", text(&filled.stderr));

    // Not while it is up.
    let refused = cluster.run(&["store", "add-node", "--replace", "2"]);
    assert!(text(&refused.stderr).contains("node 2 is up"), "{}", text(&refused.stderr));
    signal(cluster.up.id(), Signal::INT);
    assert!(cluster.up.wait().unwrap().success());
    let refused = cluster.run(&["store", "add-node", "--replace", "2"]);
    assert!(text(&refused.stderr).contains("move it away first"), "{}", text(&refused.stderr));
    let lost = directory.join("lost");
    std::fs::rename(cluster.directory.join("node2"), &lost).unwrap();
    cluster.ok(&[&["store", "add-node", "--replace", "2"][..], &SIZE].concat());
    let cluster = Cluster::start(&directory, &[]);
    let healthy = cluster.wait_until_healthy();
    assert!(replicas(&healthy).iter().all(|replicas| *replicas == [1, 2, 3]), "{healthy:#}");
    let read = cluster.perf(&["--rw=read", "--size=16m", "--iodepth=16"]).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));

    // Another machine, which has etcd's URLs and the key.
    let other = directory.join("machine2");
    let key = cluster.directory.join("key");
    let add = [
        &["store", "add-node", "--cluster", other.to_str().unwrap(), "--etcd", &urls][..],
        &["--key", key.to_str().unwrap()],
        &SIZE,
    ];
    let joined = ringbolt(&add.concat());
    assert!(joined.status.success(), "{}", text(&joined.stderr));
    let machine = Cluster::start_in(&other, &[]);
    let seen = |status: &Value| is_settled(status) && with_node(status, 4) > 0;
    let spread = cluster.wait_for("spread over two machines", seen);
    assert_eq!(spread["nodes"][3]["state"], "serves");
    assert_eq!(spread["nodes"][3]["report"]["node"], 4, "{spread:#}");
    machine.wait_for("seen from there", seen);
    let read = cluster.perf(&["--rw=read", "--size=16m", "--iodepth=16"]).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));
    drop((machine, cluster));
    std::fs::remove_dir_all(&directory).unwrap();
}

/// Extents of the objects of each replica, by group: without those that were given up and are free after a checkpoint.
fn used_extents(status: &Value) -> BTreeMap<u64, Vec<u64>> {
    let mut used = BTreeMap::<_, Vec<_>>::new();
    for node in status["nodes"].as_array().unwrap() {
        for replica in node["report"]["replicas"].as_array().into_iter().flatten() {
            let number = |name: &str| replica[name].as_u64().unwrap();
            used.entry(number("group")).or_default().push(number("used_extents"));
        }
    }
    used
}

#[test]
fn the_smallest_replica_says_what_fits_and_copies_keep_their_space() {
    let directory = scratch("store-unequal");
    let options = ["--size=200m", "--log-size=2m", "--groups=2", "--nodes=2", "--replicas=2", "--spare=2"];
    let mut cluster = Cluster::start(&directory, &options);
    cluster.ok(&["store", "add-node", "--size=100m", "--log-size=2m", "--spare=4"]);
    cluster.wait_for("three nodes", |status| {
        with_node(status, 3) == 0 && status["nodes"][2]["state"] == "serves"
    });
    cluster.ok(&["store", "pool", "remove", "pool"]);
    cluster.ok(&["store", "pool", "create", "pool", "--replicas=3", "--groups=2"]);
    cluster.wait_for("a pool of three replicas", |status| {
        status["healthy"] == true && replicas(status) == [[1, 2, 3], [1, 2, 3]]
    });

    // Many writes in flight, each of a new extent, until there is no space: the smallest replica stays in sync.
    cluster.ok(&["image", "create", "vol", "1g"]);
    let fill = ["--rw=write", "--bs=64k", "--iodepth=32", "--size=1g", "--do_verify=0"];
    let filled = cluster.perf(&fill).output().unwrap();
    assert!(text(&filled.stderr).contains("Capacity Exceeded"), "{}", text(&filled.stderr));
    let full = cluster.wait_until_healthy();
    assert_eq!(with_node(&full, 3), 2);
    let read = cluster.perf(&["--rw=read", "--bs=64k", "--iodepth=8", "--size=16m"]).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));

    // A replica that gets a copy has the extents of the others, written or not.
    cluster.ok(&["image", "remove", "vol"]);
    cluster.ok(&["image", "create", "--preallocate", "vol", "32m"]);
    let written = cluster.perf(&["--rw=write", "--size=1m", "--do_verify=0"]).output().unwrap();
    assert!(written.status.success(), "{}", text(&written.stderr));
    signal(cluster.up.id(), Signal::INT);
    assert!(cluster.up.wait().unwrap().success());
    std::fs::remove_dir_all(cluster.directory.join("node2")).unwrap();
    cluster.ok(&["store", "add-node", "--replace=2", "--size=200m", "--log-size=2m", "--spare=2"]);
    let cluster = Cluster::start(&directory, &[]);
    // 32 MiB in extents of 64 KiB, once the entries of the logs are in place.
    cluster.wait_for("copies with the extents of the others", |status| {
        let used = used_extents(status);
        status["healthy"] == true
            && used.values().all(|used| used.len() == 3 && used.iter().all(|it| *it == used[0]))
            && used.values().map(|used| used[0]).sum::<u64>() == 512
    });
    drop(cluster);
    std::fs::remove_dir_all(&directory).unwrap();
}

/// A cluster of two replicas a group, filled so far that another node 2, with small partitions, has no room.
fn with_a_small_node(directory: &std::path::Path) -> Cluster {
    let options = ["--size=200m", "--log-size=2m", "--groups=2", "--nodes=2", "--replicas=2", "--spare=2"];
    let mut cluster = Cluster::start(directory, &options);
    cluster.ok(&["image", "create", "--preallocate", "vol", "64m"]);
    cluster.wait_until_healthy();
    let filled =
        cluster.perf(&["--rw=write", "--size=8m", "--iodepth=16", "--do_verify=0"]).output().unwrap();
    assert!(filled.status.success(), "{}", text(&filled.stderr));
    signal(cluster.up.id(), Signal::INT);
    assert!(cluster.up.wait().unwrap().success());
    std::fs::remove_dir_all(cluster.directory.join("node2")).unwrap();
    cluster.ok(&["store", "add-node", "--replace=2", "--size=60m", "--log-size=2m", "--spare=1"]);
    let cluster = Cluster::start(directory, &[]);
    cluster.wait_for("groups without room", |status| {
        status["groups"].as_array().unwrap().iter().all(|group| {
            let why = group["why"].as_str().unwrap_or_default();
            let no_room = why.contains("no other node has room for its 32.")
                && why.contains("the partitions of node 2 lack")
                && why.contains("MiB");
            no_room && group["state"] == "degraded" && group["catching_up"] == "2 (no room)"
        })
    });
    // What is there is served, written and read.
    let load = cluster.perf(&["--rw=randrw", "--size=8m", "--iodepth=4", "--time_based", "--runtime=3"]);
    let load = { load }.output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    let status = cluster.status();
    for replica in status["nodes"][1]["report"]["replicas"].as_array().unwrap() {
        assert_eq!(
            (&replica["state"], &replica["used_extents"]),
            (&"copying".into(), &0.into()),
            "{status:#}"
        );
    }
    assert_eq!(status["moving"], 0, "{status:#}");
    cluster
}

#[test]
fn a_group_without_room_for_another_replica_says_so_and_goes_on_when_there_is_space() {
    let directory = scratch("store-no-room");
    let cluster = with_a_small_node(&directory);
    cluster.ok(&["image", "remove", "vol"]);
    let healthy = cluster.wait_until_healthy();
    assert_eq!(replicas(&healthy), [[1, 2], [1, 2]]);
    assert!(healthy["groups"].as_array().unwrap().iter().all(|group| group["why"].is_null()));
    // From now on the small one says what fits.
    let refused = cluster.run(&["image", "create", "--preallocate", "vol", "64m"]);
    assert!(!refused.status.success());
    cluster.wait_until_healthy();
    drop(cluster);
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_group_gets_a_replica_where_there_is_room_for_it() {
    let directory = scratch("store-room-elsewhere");
    let cluster = with_a_small_node(&directory);
    cluster.ok(&[&["store", "add-node", "--spare=2"][..], &SIZE].concat());
    // Node 2 gives its replicas back.
    cluster.wait_for("replicas on node 3 and no others", |status| {
        let is_copied = |used: &Vec<u64>| used.len() == 2 && used[0] == used[1];
        is_settled(status)
            && replicas(status) == [[1, 3], [1, 3]]
            && used_extents(status).values().all(is_copied)
    });
    let read = cluster.perf(&["--rw=read", "--size=8m", "--iodepth=16"]).output().unwrap();
    assert!(read.status.success(), "{}{}", text(&read.stdout), text(&read.stderr));
    drop(cluster);
    std::fs::remove_dir_all(&directory).unwrap();
}

/// Maintenance of one node, as an operator does it.
#[test]
fn a_node_that_is_stopped_hands_over_and_stays_down_until_it_is_started() {
    let directory = scratch("store-stop");
    let options = [&SIZE[..], &["--groups=6", "--nodes=3", "--replicas=3", "--lease=400ms"]].concat();
    let cluster = Cluster::start(&directory, &options);
    cluster.ok(&["image", "create", "vol", "64m"]);
    cluster.wait_until_healthy();
    let load = ["--rw=randwrite", "--iodepth=4", "--time_based", "--runtime=6", "--output-format=json"];
    let load = cluster.perf(&load).spawn().unwrap();
    // Each node, one after the other: all groups have had another primary then.
    for node in 1..=3u64 {
        let pid = cluster.nodes()[node as usize - 1];
        let stopped: Value =
            serde_json::from_str(&cluster.ok(&["store", "stop-node", &node.to_string(), "--json"])).unwrap();
        assert_eq!(stopped, serde_json::json!({ "node": node, "state": "stopped" }));
        assert!(!is_running(pid));
        let status = cluster.status();
        let of_node = &status["nodes"][node as usize - 1];
        assert_eq!((&of_node["state"], &of_node["up"]), (&"stopped".into(), &false.into()), "{of_node:#}");
        for group in status["groups"].as_array().unwrap() {
            assert!(group["state"] == "degraded" && group["primary"] != node, "{group:#}");
            assert!(!group["in_sync"].as_array().unwrap().contains(&node.into()), "{group:#}");
        }
        // Another one would be too much, and goes on.
        let other = (node % 3 + 1).to_string();
        let refused = cluster.run(&["store", "stop-node", &other]);
        let reason = text(&refused.stderr);
        assert!(
            !refused.status.success() && reason.contains(&format!("node {other} is not stopped")),
            "{reason}"
        );
        assert!(
            reason.contains("fewer replicas of groups 0, 1, 2, 3, 4, 5 than the pool demands"),
            "{reason}"
        );
        assert!(reason.contains("--force"), "{reason}");
        assert_eq!(cluster.nodes().len(), 2);
        assert_eq!(
            cluster.ok(&["store", "start-node", &node.to_string()]),
            format!("node {node} serves again\n")
        );
        cluster.wait_until_healthy();
    }
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));

    // A cluster that starts again leaves it stopped; --force stops what others need.
    cluster.ok(&["store", "stop-node", "2"]);
    let path = cluster.directory.clone();
    cluster.end();
    let cluster = Cluster::start_in(&path, &[]);
    assert_eq!(cluster.nodes().len(), 2);
    cluster.ok(&["store", "stop-node", "1", "--force"]);
    let waits = cluster.status();
    assert!(waits["groups"].as_array().unwrap().iter().all(|group| group["state"] == "waiting"), "{waits:#}");
    let started: Value = serde_json::from_str(&cluster.ok(&["store", "start-node", "1", "--json"])).unwrap();
    assert_eq!(started["state"], "serves");
    cluster.wait_for("served by two", |status| {
        status["groups"].as_array().unwrap().iter().all(|group| group["state"] == "degraded")
    });
    // One that does not run is not started either, and a lost one in its place is.
    assert!(cluster.ok(&["store", "stop-node", "2"]).contains("node 2 does not run"));
    std::fs::rename(cluster.directory.join("node2"), directory.join("lost")).unwrap();
    cluster.ok(&["store", "add-node", "--replace=2", SIZE[0], SIZE[1]]);
    cluster.wait_until_healthy();
    for (arguments, reason) in [
        (["store", "stop-node", "9"], "the cluster has no node 9"),
        (["store", "start-node", "9"], "the cluster has no node 9"),
    ] {
        let refused = cluster.run(&arguments);
        assert!(text(&refused.stderr).contains(reason), "{}", text(&refused.stderr));
    }
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}

/// Without an operator's help: each node that stops hands its primaries over, and the last one would be left with none.
#[test]
fn primaries_are_where_placement_has_them_again_after_a_rolling_restart() {
    let directory = scratch("store-rolling");
    let options = [&SIZE[..], &["--groups=6", "--nodes=3", "--replicas=3"]].concat();
    let cluster = Cluster::start(&directory, &options);
    cluster.ok(&["image", "create", "vol", "64m"]);
    cluster.wait_until_healthy();
    let load =
        cluster.perf(&["--rw=randrw", "--iodepth=4", "--time_based", "--runtime=600"]).spawn().unwrap();
    for node in 0..3 {
        let number = (node + 1).to_string();
        cluster.ok(&["store", "stop-node", &number]);
        let status = cluster.status();
        assert_eq!(status["nodes"][node]["primaries"], 0, "{status:#}");
        cluster.ok(&["store", "start-node", &number]);
        cluster.wait_until_healthy();
    }
    // A record lists the replicas in the order of their placement, the first primary first.
    let are_preferred = |status: &Value| {
        let mut groups = status["groups"].as_array().unwrap().iter();
        status["healthy"] == true && groups.all(|group| group["primary"] == group["replicas"][0])
    };
    cluster.wait_for("primaries as in a new pool", are_preferred);
    signal(load.id(), Signal::INT);
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    cluster.end();
    std::fs::remove_dir_all(directory).unwrap();
}
