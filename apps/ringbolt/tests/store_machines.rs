//! A cluster of the store on several machines (network namespaces), each with a node and a server of etcd: links that
//! are cut one way and both ways, a stopped leader of etcd and a rolling restart, under verified load.
#![allow(clippy::unwrap_used)]

#[path = "../../../store/cluster-map/tests/rig/mod.rs"]
mod etcd;
#[path = "rig/machines.rs"]
mod machines;
mod rig;
#[path = "rig/store.rs"]
mod store;
#[path = "rig/store_machines.rs"]
mod store_machines;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use rustix::process::Signal;
use serde_json::Value;
use store::{Cluster, signal};
use store_machines::{MACHINES, Machines, end_load, in_sync, start_node, wait_until_healthy};

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

#[test]
fn verified_load_outlives_partitions_a_stopped_leader_of_etcd_and_a_rolling_restart() {
    let Some(mut machines) = Machines::start("machines") else { return };
    let Machines { network, etcd, etcd_addresses: addresses, directory, clusters } = &mut machines;
    let healthy = |clusters: &[Cluster]| _ = wait_until_healthy(clusters);
    let load = |clusters: &[Cluster]| {
        let load = ["--rw=randrw", "--iodepth=8", "--time_based", "--runtime=600"];
        clusters[0].perf(&load).spawn().unwrap()
    };
    let running = load(clusters);

    // One way: what machine 1 sends to machine 2 is lost. A group whose primary is one of them has the other
    // no more; one with its primary on machine 3 needs no messages between them.
    network.machines[0].cut_to(&network.machines[1]);
    clusters[0].wait_for("cut one way", |status| {
        let groups = status["groups"].as_array().unwrap().iter();
        let (one, two) = (in_sync(status, 1), in_sync(status, 2));
        let members = groups.zip(one.iter().zip(two));
        members.into_iter().all(|(group, (one, two))| group["primary"] == 3 || !(*one && two))
    });
    network.machines[0].mend_to(&network.machines[1]);
    healthy(clusters);

    // Both ways: machine 3 hears nothing.
    network.machines[2].set_link(false);
    clusters[0].wait_for("without machine 3", |status| in_sync(status, 3) == [false; 4]);
    network.machines[2].set_link(true);
    healthy(clusters);
    end_load(running);

    // The leader of etcd stops. I/O goes on, and another leader takes changes of the map.
    let running = load(clusters);
    let leader = etcd_leader(addresses);
    signal(etcd.pid(leader), Signal::STOP);
    clusters[0].ok(&["image", "create", "other", "8m"]);
    let nodes = clusters[1].nodes();
    signal(nodes[0], Signal::STOP);
    clusters[0].wait_for("without the stopped node", |status| in_sync(status, 2) == [false; 4]);
    signal(nodes[0], Signal::CONT);
    healthy(clusters);
    signal(etcd.pid(leader), Signal::CONT);
    end_load(running);

    // A rolling restart, each machine when the one before it is in sync again.
    let running = load(clusters);
    for machine in (0..MACHINES).rev() {
        let cluster = clusters.remove(machine);
        cluster.end();
        clusters.insert(machine, start_node(network, machine, directory, &[]));
        healthy(clusters);
    }
    end_load(running);
    clusters.clear();
    std::fs::remove_dir_all(directory).unwrap();
}

/// The node's part of a status, and its line for people as `Cluster::line_of_node` has it.
fn node_of(machines: &Machines, status: &Value, node: u64) -> (Value, String) {
    let json = status["nodes"][node as usize - 1].clone();
    assert_eq!(json["node"], node, "{status:#}");
    (json, machines.clusters[0].line_of_node(node))
}

#[test]
fn status_has_what_the_nodes_of_other_machines_report_without_etcd_too() {
    let Some(mut machines) = Machines::start("status") else { return };
    let status = wait_until_healthy(&machines.clusters);
    for node in 1..=3 {
        let (json, line) = node_of(&machines, &status, node);
        assert_eq!(
            (line.as_str(), json["state"].as_str()),
            (&*format!("node {node}: serves"), Some("serves"))
        );
        // The same fields, wherever the node is.
        let fields = |report: &Value| report.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let local = &status["nodes"][0]["report"];
        assert_eq!(fields(&json["report"]), fields(local));
        assert_eq!(fields(&json["report"]["replicas"][0]), fields(&local["replicas"][0]));
        let address = &machines.network.machines[node as usize - 1].address;
        assert!(json["report"]["address"].as_str().unwrap().starts_with(&format!("{address}:")), "{json:#}");
        assert_eq!(json["report"]["replicas"].as_array().unwrap().len(), 4);
    }

    // A node that is stopped is named with the reason, and its groups are served by others.
    let stopped = machines.clusters[1].nodes()[0];
    signal(stopped, Signal::STOP);
    let status = machines.clusters[0].wait_for("degraded", |status| {
        in_sync(status, 2) == [false; 4]
            && status["groups"].as_array().unwrap().iter().all(|group| group["state"] == "degraded")
    });
    let (json, line) = node_of(&machines, &status, 2);
    assert_eq!(line, "node 2: does not answer: timed out");
    assert_eq!((json["report"].is_null(), &json["error"]), (true, &"timed out".into()));
    signal(stopped, Signal::CONT);
    wait_until_healthy(&machines.clusters);

    // Without etcd the nodes of this machine know where the others are, and these why nothing is served.
    (0..MACHINES).for_each(|server| machines.etcd.kill_server(server));
    let silent = machines.clusters.remove(2);
    let all = silent.nodes();
    all.iter().for_each(|node| signal(*node, Signal::STOP));
    let waits = |status: &Value, node: usize| {
        let replicas = status["nodes"][node]["report"]["replicas"].as_array().cloned().unwrap_or_default();
        let silent =
            ["a replica", "the primary"].map(|who| format!("{who} is silent, and the map has not answered"));
        replicas.iter().any(|it| silent.iter().any(|why| it["waits_for"] == why.as_str()))
    };
    let status = machines.clusters[0].wait_for("waiting for the map", |status| {
        status["map_error"].is_string() && (waits(status, 0) || waits(status, 1))
    });
    assert_eq!(status["nodes"].as_array().unwrap().len(), 3, "{status:#}");
    assert_eq!(status["nodes"][1]["state"], "serves", "{status:#}");
    assert_eq!(status["nodes"][2]["error"], "timed out", "{status:#}");
    assert!(status["groups"].as_array().unwrap().iter().all(|group| !group["why"].is_null()), "{status:#}");
    all.iter().for_each(|node| signal(*node, Signal::CONT));
    drop(silent);
    machines.clusters.clear();
    std::fs::remove_dir_all(&machines.directory).unwrap();
}
