//! How large the map of a large cluster is, how long placement takes, and what a lost rack moves:
//! `cargo run --release -p ringbolt-cluster-map --example scale [NODES DEVICES GROUPS]`.

use std::collections::BTreeMap;
use std::time::Instant;

use cluster_map::{
    DeviceId, DeviceRecord, GroupConfig, GroupId, GroupRecord, NodeId, NodeRecord, ReplicaId, TlsPolicy,
    Topology,
};
use uuid::Uuid;

const RACKS: u32 = 40;
const REPLICAS: usize = 3;
/// GiB of a device.
const DEVICE_GIB: u32 = 3840;
/// The share of it that has data.
const FULL: f64 = 0.5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers = std::env::args().skip(1).map(|number| number.parse()).collect::<Result<Vec<u32>, _>>()?;
    let (nodes, devices, groups) = match numbers[..] {
        [nodes, devices, groups] => (nodes, devices, groups),
        _ => (1000, 10, 200_000),
    };
    let node = |id: u32| {
        let addresses = vec![format!("10.0.{}.{}:7000", id / 250, id % 250 + 1)];
        let (uuid, domain) = (Uuid::new_v4(), format!("rack{}", id % RACKS));
        (NodeId(id), NodeRecord { uuid, addresses, domain, tls: TlsPolicy::Off, out: false })
    };
    let device = |id: u32| {
        let (uuid, node) = (Uuid::new_v4(), NodeId(id / devices));
        (
            DeviceId(id),
            DeviceRecord {
                uuid,
                node,
                weight: DEVICE_GIB,
                out: false,
                partition: None,
                class: None,
                partitions: None,
            },
        )
    };
    let mut node_records: BTreeMap<_, _> = (0..nodes).map(node).collect();
    let device_records: BTreeMap<_, _> = (0..nodes * devices).map(device).collect();

    let place_all = |nodes: &BTreeMap<NodeId, NodeRecord>| {
        let topology = Topology::new(nodes, &device_records);
        (0..groups).map(|group| topology.place(GroupId(group), REPLICAS)).collect::<Vec<_>>()
    };
    let begin = Instant::now();
    let before = place_all(&node_records);
    let seconds = begin.elapsed().as_secs_f64();
    println!(
        "placement: {seconds:.1} s for {groups} groups on {} devices, {:.1} ns a group and device",
        nodes * devices,
        seconds * 1e9 / f64::from(groups) / f64::from(nodes * devices)
    );

    let record = |placed: &Vec<DeviceId>| {
        let replicas: Vec<ReplicaId> = placed.iter().map(|device| ReplicaId(device.0)).collect();
        let config = GroupConfig { epoch: 1000, primary: replicas[0], in_sync: replicas.clone() };
        serde_json::to_vec(&GroupRecord { config, replicas }).map(|json| json.len())
    };
    let group_bytes = before.iter().map(record).sum::<Result<usize, _>>()?;
    let json_bytes = |length: Result<Vec<u8>, serde_json::Error>| length.map(|json| json.len());
    let nodes_bytes =
        node_records.values().map(|node| json_bytes(serde_json::to_vec(node))).sum::<Result<usize, _>>()?;
    let devices_bytes =
        device_records.values().map(|it| json_bytes(serde_json::to_vec(it))).sum::<Result<usize, _>>()?;
    println!(
        "bytes: {group_bytes} of groups ({:.0} each), {devices_bytes} of devices, {nodes_bytes} of nodes",
        group_bytes as f64 / f64::from(groups)
    );

    let mut shares = BTreeMap::new();
    before.iter().flatten().for_each(|device| *shares.entry(*device).or_insert(0u64) += 1);
    let mean = f64::from(groups) * REPLICAS as f64 / f64::from(nodes * devices);
    let most = shares.values().max().copied().unwrap_or(0);
    println!("replicas a device: {mean:.1} on average, {most} at most");

    node_records.values_mut().filter(|node| node.domain == "rack3").for_each(|node| node.out = true);
    let after = place_all(&node_records);
    let lost = |device: &&DeviceId| node_records[&device_records[*device].node].out;
    let had = before.iter().flatten().filter(lost).count();
    let changed = before.iter().zip(&after).filter(|(before, after)| before != after).count();
    let mut received = BTreeMap::new();
    for (before, after) in before.iter().zip(&after) {
        let new = after.iter().filter(|device| !before.contains(device));
        new.for_each(|device| *received.entry(*device).or_insert(0u64) += 1);
    }
    let moved: u64 = received.values().sum();
    println!(
        "a lost rack: it had {had} replicas, {moved} move, {changed} groups change ({:.2} % of all replicas)",
        moved as f64 * 100.0 / (f64::from(groups) * REPLICAS as f64)
    );
    let replica_gib = f64::from(DEVICE_GIB) * FULL / mean;
    println!(
        "bytes of a replica where devices are half full: {replica_gib:.1} GiB; moved in all: {:.0} TiB; \
         to the device that gets most: {:.0} GiB",
        moved as f64 * replica_gib / 1024.0,
        received.values().max().copied().unwrap_or(0) as f64 * replica_gib
    );
    Ok(())
}
