//! A cluster of the store on several machines (network namespaces), each with a node and a server of etcd.
#![allow(dead_code)]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Child;

use rustix::process::Signal;
use serde_json::Value;

use crate::etcd::EtcdCluster;
use crate::machines::MachineNetwork;
use crate::rig::{self, scratch, text};
use crate::store::{Cluster, signal};

pub(crate) const MACHINES: usize = 3;

pub(crate) fn start_node(
    network: &MachineNetwork,
    machine: usize,
    directory: &Path,
    options: &[&str],
) -> Cluster {
    let directory = directory.join(format!("machine{}", machine + 1));
    network.machines[machine].run(|| Cluster::start_in(&directory, options))
}

/// Starts all servers of etcd, each on its machine.
pub(crate) fn start_etcd(network: &MachineNetwork, etcd: &mut EtcdCluster) {
    (0..MACHINES).for_each(|machine| network.machines[machine].run(|| etcd.start_server(machine)));
    etcd.wait_until_served();
}

/// Of each group, whether the node is in sync.
pub(crate) fn in_sync(status: &Value, node: u64) -> Vec<bool> {
    let groups = status["groups"].as_array().unwrap().iter();
    groups.map(|group| group["in_sync"].as_array().unwrap().contains(&node.into())).collect()
}

/// Ends a load, which has verified what it read; returns what it printed.
pub(crate) fn end_load(load: Child) -> String {
    signal(load.id(), Signal::INT);
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}{}", text(&load.stdout), text(&load.stderr));
    text(&load.stdout)
}

/// A cluster with a node and a server of etcd on each machine, and a pool of three replicas on all of them.
pub(crate) struct Machines {
    pub(crate) network: MachineNetwork,
    pub(crate) etcd: EtcdCluster,
    pub(crate) etcd_addresses: Vec<[SocketAddr; 2]>,
    pub(crate) directory: PathBuf,
    pub(crate) clusters: Vec<Cluster>,
}

impl Machines {
    /// The first machine makes the cluster, the others join it. `None` where there are no network namespaces, or no etcd.
    pub(crate) fn start(name: &str) -> Option<Machines> {
        let network = MachineNetwork::new(MACHINES)?;
        let address = |machine: usize, port: u16| -> SocketAddr {
            format!("{}:{port}", network.machines[machine].address).parse().unwrap()
        };
        let addresses: Vec<_> =
            (0..MACHINES).map(|machine| [address(machine, 2379), address(machine, 2380)]).collect();
        let mut etcd = EtcdCluster::with_addresses(name, addresses.clone())?;
        start_etcd(&network, &mut etcd);
        let directory = scratch(&format!("store-{name}"));
        let urls = etcd.urls(name);
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
        let machines = Machines { network, etcd, etcd_addresses: addresses, directory, clusters };
        wait_until_healthy(&machines.clusters);
        Some(machines)
    }
}

pub(crate) fn wait_until_healthy(clusters: &[Cluster]) -> Value {
    clusters[0].wait_for("healthy everywhere", |status| {
        status["healthy"] == true && (1..=3).all(|node| in_sync(status, node) == [true; 4])
    })
}
