//! Placement is what another implementation computes, balanced, and moves the least.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use cluster_map::{DeviceId, DeviceRecord, GroupId, NodeId, NodeRecord, TlsPolicy, Topology};
use uuid::Uuid;

type Nodes = BTreeMap<NodeId, NodeRecord>;
type Devices = BTreeMap<DeviceId, DeviceRecord>;

/// Nodes in racks in turn, each with as many devices, of which the weight is given by node and device.
fn cluster(racks: u32, nodes: u32, devices: u32, weight: impl Fn(u32, u32) -> u32) -> (Nodes, Devices) {
    let node = |id: u32| {
        let (uuid, domain) = (Uuid::from_u128(id.into()), format!("rack{}", id % racks));
        (NodeId(id), NodeRecord { uuid, addresses: Vec::new(), domain, tls: TlsPolicy::Off, out: false })
    };
    let device = |id: u32| {
        let (uuid, node) = (Uuid::from_u128(id.into()), NodeId(id / devices));
        let weight = weight(node.0, id % devices);
        (
            DeviceId(id),
            DeviceRecord { uuid, node, weight, out: false, partition: None, class: None, partitions: None },
        )
    };
    ((0..nodes).map(node).collect(), (0..nodes * devices).map(device).collect())
}

fn place_all(topology: &Topology, groups: u32, replicas: usize) -> Vec<Vec<DeviceId>> {
    (0..groups).map(|group| topology.place(GroupId(group), replicas)).collect()
}

fn moved(before: &[Vec<DeviceId>], after: &[Vec<DeviceId>]) -> usize {
    let moved = before.iter().zip(after);
    moved.map(|(before, after)| after.iter().filter(|device| !before.contains(device)).count()).sum()
}

/// From Python, with the table of logarithms from its decimal numbers.
#[test]
fn placement_is_that_of_another_implementation() {
    let (nodes, devices) = cluster(4, 12, 2, |node, device| match (device, node % 3) {
        (0, _) => 100 + node,
        (_, 0) => 200,
        _ => 100,
    });
    let topology = Topology::new(&nodes, &devices);
    for (group, expected) in [
        (0, [6, 18, 0]),
        (1, [7, 18, 9]),
        (2, [14, 9, 13]),
        (3, [1, 15, 11]),
        (7, [9, 5, 18]),
        (1000, [15, 20, 2]),
        (199999, [19, 21, 14]),
        (4294967295, [6, 5, 1]),
    ] {
        assert_eq!(topology.place(GroupId(group), 3), expected.map(DeviceId), "group {group}");
    }
}

#[test]
fn replicas_are_in_failure_domains_of_their_own() {
    let (nodes, devices) = cluster(5, 20, 3, |_, _| 10);
    let topology = Topology::new(&nodes, &devices);
    for placed in place_all(&topology, 5000, 3) {
        let domains = placed.iter().map(|device| &nodes[&devices[device].node].domain);
        assert_eq!(domains.collect::<std::collections::BTreeSet<_>>().len(), 3);
    }
}

#[test]
fn with_too_few_domains_replicas_are_on_nodes_of_their_own() {
    let (nodes, devices) = cluster(2, 6, 2, |_, _| 10);
    let topology = Topology::new(&nodes, &devices);
    for replicas in [3, 4] {
        for placed in place_all(&topology, 2000, replicas) {
            let of = placed.iter().map(|device| devices[device].node);
            assert_eq!(of.collect::<std::collections::BTreeSet<_>>().len(), replicas);
            // No domain has all of them: each has half.
            let in_first =
                placed.iter().filter(|device| nodes[&devices[device].node].domain == "rack0").count();
            assert!((replicas / 2..=replicas.div_ceil(2)).contains(&in_first), "{placed:?}");
        }
    }
    let (nodes, devices) = cluster(1, 2, 4, |_, _| 10);
    assert_eq!(Topology::new(&nodes, &devices).place(GroupId(1), 3).len(), 2);
    assert!(Topology::new(&Nodes::new(), &Devices::new()).place(GroupId(1), 3).is_empty());
}

#[test]
fn shares_are_in_proportion_to_weights() {
    let (nodes, devices) =
        cluster(8, 40, 4, |node, device| if node % 2 == 0 { 100 } else { 50 * (1 + device) });
    let placed = place_all(&Topology::new(&nodes, &devices), 100_000, 1);
    let total: u64 = devices.values().map(|device| u64::from(device.weight)).sum();
    let mut found = BTreeMap::new();
    placed.iter().flatten().for_each(|device| *found.entry(*device).or_insert(0u32) += 1);
    for (id, device) in &devices {
        let expected = 100_000.0 * f64::from(device.weight) / total as f64;
        let difference = (f64::from(found[id]) - expected).abs();
        // Five standard deviations: the placement is fixed, so this holds or does not.
        assert!(difference < 5.0 * expected.sqrt(), "{id:?}: {} instead of {expected:.0}", found[id]);
    }
}

#[test]
fn a_device_that_leaves_or_comes_moves_only_its_own_data() {
    let (nodes, mut devices) = cluster(6, 30, 4, |_, _| 100);
    let before = place_all(&Topology::new(&nodes, &devices), 20_000, 3);
    let lost = DeviceId(17);
    devices.get_mut(&lost).unwrap().out = true;
    let after = place_all(&Topology::new(&nodes, &devices), 20_000, 3);
    let had = before.iter().filter(|placed| placed.contains(&lost)).count();
    assert!(after.iter().flatten().all(|device| *device != lost));
    assert_eq!(moved(&before, &after), had);
    devices.get_mut(&lost).unwrap().out = false;
    assert_eq!(place_all(&Topology::new(&nodes, &devices), 20_000, 3), before);
}

#[test]
fn a_lost_domain_moves_only_what_it_had() {
    let (mut nodes, devices) = cluster(10, 50, 2, |_, _| 100);
    let before = place_all(&Topology::new(&nodes, &devices), 20_000, 3);
    nodes.values_mut().filter(|node| node.domain == "rack3").for_each(|node| node.out = true);
    let after = place_all(&Topology::new(&nodes, &devices), 20_000, 3);
    let in_rack = |device: &DeviceId| nodes[&devices[device].node].domain == "rack3";
    let had = before.iter().flatten().filter(|device| in_rack(device)).count();
    assert_eq!(moved(&before, &after), had);

    // Also if fewer domains than replicas are left.
    let (mut nodes, devices) = cluster(3, 9, 2, |_, _| 100);
    let before = place_all(&Topology::new(&nodes, &devices), 2_000, 3);
    nodes.values_mut().filter(|node| node.domain == "rack1").for_each(|node| node.out = true);
    let after = place_all(&Topology::new(&nodes, &devices), 2_000, 3);
    assert_eq!(moved(&before, &after), 2_000);
}

#[test]
fn devices_without_room_draw_no_straw_and_nothing_else_moves() {
    // 5 racks of 4 nodes; the nodes of rack 4 have no room, and two of rack 3.
    let (nodes, devices) = cluster(5, 20, 1, |_, _| 10);
    let topology = Topology::new(&nodes, &devices);
    let has_room = |device: DeviceId| device.0 % 5 != 4 && ![3, 8].contains(&device.0);
    for group in (0..1000).map(GroupId) {
        let (all, placed) = (topology.place(group, 3), topology.place_where(group, 3, has_room));
        assert!(placed.len() == 3 && placed.iter().all(|device| has_room(*device)));
        let racks: std::collections::BTreeSet<u32> = placed.iter().map(|device| device.0 % 5).collect();
        assert_eq!(racks.len(), 3);
        if all.iter().all(|device| has_room(*device)) {
            assert_eq!(placed, all);
        }
        // In fewer racks than replicas, on nodes of their own; with fewer nodes, on those that there are.
        let in_two_racks = topology.place_where(group, 3, |device| device.0 % 5 < 2);
        assert!(in_two_racks.len() == 3 && in_two_racks.iter().all(|device| device.0 % 5 < 2));
        assert_eq!(topology.place_where(group, 3, |device| device.0 < 2).len(), 2);
        assert!(topology.place_where(group, 3, |_| false).is_empty());
    }
}
