//! A cluster of the store on several machines (network namespaces), each with a node and a server of etcd: links that
//! are cut one way and both ways, a stopped leader of etcd and a rolling restart, under verified load.
#![allow(clippy::unwrap_used)]

#[path = "../../../store/map/tests/rig/mod.rs"]
mod etcd;
#[path = "rig/machines.rs"]
mod machines;
mod rig;
#[path = "rig/store.rs"]
mod store;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Child;

use etcd::EtcdCluster;
use machines::MachineNetwork;
use rig::{scratch, text};
use rustix::process::Signal;
use serde_json::Value;
use store::{Cluster, signal};

const MACHINES: usize = 3;

fn start_node(network: &MachineNetwork, machine: usize, directory: &Path, options: &[&str]) -> Cluster {
    let directory = directory.join(format!("machine{}", machine + 1));
    network.machines[machine].run(|| Cluster::start_in(&directory, options))
}

/// Of each group, whether the node is in sync.
fn in_sync(status: &Value, node: u64) -> Vec<bool> {
    let groups = status["groups"].as_array().unwrap().iter();
    groups.map(|group| group["in_sync"].as_array().unwrap().contains(&node.into())).collect()
}

/// The server of etcd that is the leader, by the JSON gateway's `/v3/maintenance/status`.
fn etcd_leader(addresses: &[[SocketAddr; 2]]) -> usize {
    let statuses = addresses.iter().map(|[client, _]| -> Value {
        let mut stream = TcpStream::connect(client).unwrap();
        let request = format!(
            "POST /v3/maintenance/status HTTP/1.1\r\nHost: {client}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        let body = &response[response.find('{').unwrap()..=response.rfind('}').unwrap()];
        serde_json::from_str(body).unwrap()
    });
    let is_leader = |status: Value| status["leader"] == status["header"]["member_id"];
    statuses.map(is_leader).position(|is_leader| is_leader).expect("a server is the leader")
}

/// Ends a load, which has verified what it read.
fn end_load(load: Child) {
    signal(load.id(), Signal::INT);
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
}

#[test]
fn verified_load_outlives_partitions_a_stopped_leader_of_etcd_and_a_rolling_restart() {
    let Some(network) = MachineNetwork::new(MACHINES) else { return };
    let address = |machine: usize, port: u16| -> SocketAddr {
        format!("{}:{port}", network.machines[machine].address).parse().unwrap()
    };
    let addresses: Vec<_> =
        (0..MACHINES).map(|machine| [address(machine, 2379), address(machine, 2380)]).collect();
    let Some(mut etcd) = EtcdCluster::with_addresses("machines", addresses.clone()) else { return };
    (0..MACHINES).for_each(|machine| network.machines[machine].run(|| etcd.start_server(machine)));
    etcd.wait_until_served();
    let directory = scratch("store-machines");
    let urls = etcd.urls("machines");

    // The first machine makes the cluster, the others join it; then there is a pool that is on all of them.
    let options = |machine: usize| {
        let listen = network.machines[machine].address.clone();
        let all = ["--size=200m", "--log-size=2m", "--spare=5", "--allow-plain-network", "--etcd", &urls];
        let mut all: Vec<String> = all.map(String::from).to_vec();
        all.extend([String::from("--listen"), listen]);
        all
    };
    let first = [options(0), vec!["--nodes=1".into(), "--groups=1".into()]].concat();
    let first: Vec<&str> = first.iter().map(String::as_str).collect();
    let mut clusters = vec![start_node(&network, 0, &directory, &first)];
    let key = clusters[0].directory.join("key");
    for machine in 1..MACHINES {
        let joined = directory.join(format!("machine{}", machine + 1));
        let mut add = options(machine);
        add.extend(["--key".into(), key.to_str().unwrap().into()]);
        add.extend(["--cluster".into(), joined.to_str().unwrap().into()]);
        let arguments: Vec<&str> =
            ["store", "add-node"].into_iter().chain(add.iter().map(String::as_str)).collect();
        let added = rig::ringbolt(&arguments);
        assert!(added.status.success(), "{}", text(&added.stderr));
        clusters.push(start_node(&network, machine, &directory, &[]));
    }
    clusters[0].ok(&["store", "pool", "remove", "pool"]);
    clusters[0].ok(&["store", "pool", "create", "pool", "--replicas=3", "--groups=4"]);
    clusters[0].ok(&["image", "create", "vol", "64m"]);
    let healthy = |clusters: &[Cluster]| {
        clusters[0].wait_for("healthy everywhere", |status| {
            status["healthy"] == true && (1..=3).all(|node| in_sync(status, node) == [true; 4])
        });
    };
    healthy(&clusters);
    let load = |clusters: &[Cluster]| {
        let load = ["--rw=randrw", "--iodepth=8", "--time_based", "--runtime=600"];
        clusters[0].perf(&load).spawn().unwrap()
    };
    let running = load(&clusters);

    // One way: what machine 1 sends to machine 2 is lost. They are not in sync with each other any more, so no group
    // has both.
    network.machines[0].cut_to(&network.machines[1]);
    clusters[0].wait_for("cut one way", |status| {
        let (one, two) = (in_sync(status, 1), in_sync(status, 2));
        one.iter().zip(two).all(|(one, two)| !(*one && two))
    });
    network.machines[0].mend_to(&network.machines[1]);
    healthy(&clusters);

    // Both ways: machine 3 hears nothing.
    network.machines[2].set_link(false);
    clusters[0].wait_for("without machine 3", |status| in_sync(status, 3) == [false; 4]);
    network.machines[2].set_link(true);
    healthy(&clusters);
    end_load(running);

    // The leader of etcd stops. I/O goes on, and another leader takes changes of the map.
    let running = load(&clusters);
    let leader = etcd_leader(&addresses);
    signal(etcd.pid(leader), Signal::STOP);
    clusters[0].ok(&["image", "create", "other", "8m"]);
    let nodes = clusters[1].nodes();
    signal(nodes[0], Signal::STOP);
    clusters[0].wait_for("without the stopped node", |status| in_sync(status, 2) == [false; 4]);
    signal(nodes[0], Signal::CONT);
    healthy(&clusters);
    signal(etcd.pid(leader), Signal::CONT);
    end_load(running);

    // A rolling restart, each machine when the one before it is in sync again.
    let running = load(&clusters);
    for machine in (0..MACHINES).rev() {
        let cluster = clusters.remove(machine);
        cluster.end();
        clusters.insert(machine, start_node(&network, machine, &directory, &[]));
        healthy(&clusters);
    }
    end_load(running);
    drop(clusters);
    std::fs::remove_dir_all(&directory).unwrap();
}
