//! What a node knows of the cluster: nodes, devices, pools, who is up, and where placement wants the replicas
//! of a group.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

use cluster_map::{
    ClusterMap, DeviceId, DeviceRecord, GroupId, GroupRecord, MapError, NodeId, NodeRecord, OutReason,
    PartitionSize, PoolRecord, RecoverySettings, ReplicaId, Topology,
};
use sockets::StreamAddress;
use store_link::NodeAddress;
use uuid::Uuid;
use wire_store::{BLOCK_BYTES, BLOCKS_PER_EXTENT};

const EXTENT_KIB: u64 = (BLOCK_BYTES * BLOCKS_PER_EXTENT) as u64 >> 10;

/// The cluster, as it was read last.
#[derive(Default)]
pub(super) struct Membership {
    nodes: BTreeMap<NodeId, NodeRecord>,
    devices: BTreeMap<DeviceId, DeviceRecord>,
    /// Those of every node that has said how large they are.
    pub(super) partitions: BTreeMap<NodeId, PartitionSize>,
    pub(super) pools: BTreeMap<String, PoolRecord>,
    /// Groups of pools that were removed.
    removed: Vec<Range<u32>>,
    up: BTreeSet<NodeId>,
    out: BTreeMap<NodeId, OutReason>,
    topology: Topology,
    /// How operators want the cluster to recover.
    pub(super) recovery: RecoverySettings,
    /// Since when nodes are down, as far as this node saw it.
    down_since: BTreeMap<NodeId, Instant>,
    /// It was read.
    pub(super) is_known: bool,
}

impl Membership {
    /// Reads the map of this cluster.
    pub(super) fn read(&mut self, map: &dyn ClusterMap, cluster: Uuid, now: Instant) -> Result<(), MapError> {
        let found = map.cluster()?;
        if found != cluster {
            return Err(MapError::Invalid(format!(
                "the map is that of cluster {found}, and not of {cluster}"
            )));
        }
        self.removed = map.removed_groups()?;
        let (nodes, devices) = (map.nodes()?, map.devices()?);
        self.pools = map.pools()?;
        self.up = map.nodes_up()?;
        self.out = map.out()?;
        self.recovery = map.recovery()?;
        self.topology = Topology::new(&nodes, &devices);
        (self.nodes, self.devices) = (nodes, devices);
        self.partitions = self.devices.values().filter_map(|it| Some((it.node, it.partition?))).collect();
        self.down_since.retain(|node, _| !self.up.contains(node) && self.nodes.contains_key(node));
        for node in self.nodes.keys().filter(|node| !self.up.contains(node)) {
            self.down_since.entry(*node).or_insert(now);
        }
        self.is_known = true;
        Ok(())
    }

    /// Where the nodes listen.
    pub(super) fn addresses(&self) -> BTreeMap<ReplicaId, NodeAddress> {
        let address = |(id, node): (&NodeId, &NodeRecord)| {
            let address = node.addresses.iter().find_map(|address| address.parse().ok())?;
            let stream = StreamAddress::Tcp(address);
            Some((ReplicaId(id.0), NodeAddress { stream, has_tls: !node.tls.is_off() }))
        };
        self.nodes.iter().filter_map(address).collect()
    }

    /// The device of a node, which has one.
    pub(super) fn device_of(&self, node: NodeId) -> Option<(DeviceId, &DeviceRecord)> {
        self.devices.iter().find(|(_, device)| device.node == node).map(|(id, device)| (*id, device))
    }

    /// The partitions of these nodes, as far as they are known.
    pub(super) fn partitions_of(&self, nodes: &[ReplicaId]) -> Vec<(ReplicaId, Option<PartitionSize>)> {
        nodes.iter().map(|node| (*node, self.partition_of(*node))).collect()
    }

    fn partition_of(&self, node: ReplicaId) -> Option<PartitionSize> {
        self.partitions.get(&NodeId(node.0)).copied()
    }

    /// The ranges of groups of all pools.
    pub(super) fn pools(&self) -> impl Iterator<Item = std::ops::Range<u32>> {
        self.pools.values().map(|pool| pool.first_group..pool.first_group + pool.groups)
    }

    /// The same by the names of the pools.
    pub(super) fn ranges(&self) -> BTreeMap<String, Range<u32>> {
        self.pools.keys().cloned().zip(self.pools()).collect()
    }

    pub(super) fn pool_of(&self, group: u32) -> Option<&PoolRecord> {
        self.pools.values().find(|pool| (pool.first_group..pool.first_group + pool.groups).contains(&group))
    }

    /// Whether a group is of a pool that was removed. A map that lost its pools, or an older copy of it, does
    /// not say so: replicas stay.
    pub(super) fn is_removed(&self, group: u32) -> bool {
        self.removed.iter().any(|removed| removed.contains(&group)) && self.pool_of(group).is_none()
    }

    pub(super) fn node(&self, node: ReplicaId) -> Option<&NodeRecord> {
        self.nodes.get(&NodeId(node.0))
    }

    /// The nodes that are to have a replica of a group: those that have room for what it uses.
    pub(super) fn wanted(
        &self,
        group: u32,
        replicas: usize,
        record: &GroupRecord,
        used: PartitionSize,
    ) -> Placement {
        let node_of = |device: DeviceId| self.devices.get(&device).map(|device| ReplicaId(device.node.0));
        if self.partitions.values().all(|partition| partition.holds(used)) {
            let devices = self.topology.place(GroupId(group), replicas).into_iter();
            return Placement { nodes: devices.filter_map(node_of).collect(), ..Placement::default() };
        }
        let has_room = |node| record.has_room(node, self.partition_of(node), used);
        let device_has_room = |device| node_of(device).is_some_and(has_room);
        let devices = self.topology.place_where(GroupId(group), replicas, device_has_room).into_iter();
        let nodes: Vec<_> = devices.filter_map(node_of).collect();
        let all = self.topology.place(GroupId(group), replicas).into_iter().filter_map(node_of);
        let without_room = all.filter(|node| !has_room(*node)).collect();
        let needs_room = nodes.len() < replicas;
        let no_room = if needs_room { self.no_room(used, has_room) } else { None };
        Placement { nodes, without_room, no_room }
    }

    /// The node with the most room of those that have too little.
    fn no_room(&self, used: PartitionSize, has_room: impl Fn(ReplicaId) -> bool) -> Option<NoRoom> {
        let is_in = |device: &&DeviceRecord| !device.out && !self.out.contains_key(&device.node);
        let lacking = self.devices.values().filter(is_in).filter_map(|device| {
            let (node, partition) = (ReplicaId(device.node.0), device.partition?);
            (!has_room(node)).then(|| NoRoom { node, used, missing: partition.lacks(used) })
        });
        lacking.min_by_key(|it| (it.missing.extents, it.missing.onodes, it.node.0))
    }

    pub(super) fn is_up(&self, replica: ReplicaId) -> bool {
        self.up.contains(&NodeId(replica.0))
    }

    pub(super) fn out_reason(&self, node: ReplicaId) -> Option<OutReason> {
        self.out.get(&NodeId(node.0)).copied()
    }

    /// Nodes that are down for so long that they are to be out, if this node declares it: the one with the
    /// lowest number of those that are up. While half of the nodes are down or out, none is: more likely a
    /// network has failed. A node that an operator took out does not count. With `noout` none is.
    pub(super) fn overdue(&self, own: ReplicaId, out_after: Duration, now: Instant) -> Vec<NodeId> {
        let lowest = self.up.iter().find(|node| self.nodes.contains_key(node));
        let is_retired = |node: &&NodeId| self.out.get(node) == Some(&OutReason::Operator);
        let counted: Vec<_> = self.nodes.keys().filter(|node| !is_retired(node)).collect();
        let lost = counted.iter().filter(|node| !self.up.contains(node) || self.out.contains_key(node));
        if self.recovery.noout || lowest != Some(&NodeId(own.0)) || lost.count() * 2 >= counted.len() {
            return Vec::new();
        }
        let is_overdue = |node: &NodeId, since: &Instant| {
            !self.out.contains_key(node) && now.duration_since(*since) >= out_after
        };
        self.down_since
            .iter()
            .filter(|(node, since)| is_overdue(node, since))
            .map(|(node, _)| *node)
            .collect()
    }
}

/// Where the replicas of a group are to be.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Placement {
    pub(super) nodes: Vec<ReplicaId>,
    /// Nodes that would have one if there were room.
    pub(super) without_room: Vec<ReplicaId>,
    /// Too few nodes have room.
    pub(super) no_room: Option<NoRoom>,
}

/// What a group uses, and what the node lacks that has the most room of those with too little.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// The node.
    pub node: ReplicaId,
    /// What the group uses.
    pub used: PartitionSize,
    /// What the partitions of the node lack.
    pub missing: PartitionSize,
}

impl fmt::Display for NoRoom {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NoRoom { node, used, missing } = self;
        let space = |extents: u32| match u64::from(extents) * EXTENT_KIB {
            kib if kib < 1024 => format!("{kib} KiB"),
            kib => format!("{:.1} MiB", kib as f64 / 1024.0),
        };
        let lacks = [
            (missing.extents > 0).then(|| space(missing.extents)),
            (missing.onodes > 0).then(|| format!("room for {} objects", missing.onodes)),
        ];
        let lacks = lacks.into_iter().flatten().collect::<Vec<_>>().join(" and ");
        write!(
            out,
            "no other node has room for its {} in {} objects: the partitions of node {} lack {lacks}",
            space(used.extents),
            used.onodes,
            node.0
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cluster_map::{LocalMap, TlsPolicy};

    fn membership(nodes: u32, up: &[u32], out: &[u32], since: Instant) -> Membership {
        let node = |id: u32| {
            let uuid = Uuid::from_u128(id.into());
            let record = NodeRecord {
                uuid,
                addresses: Vec::new(),
                domain: format!("node{id}"),
                tls: TlsPolicy::Off,
                out: false,
            };
            (NodeId(id), record)
        };
        let nodes: BTreeMap<_, _> = (1..=nodes).map(node).collect();
        let up: BTreeSet<_> = up.iter().copied().map(NodeId).collect();
        let down_since = nodes.keys().filter(|node| !up.contains(node)).map(|node| (*node, since)).collect();
        let out = out.iter().map(|node| (NodeId(*node), OutReason::Down)).collect();
        Membership { nodes, up, out, down_since, ..Membership::default() }
    }

    #[test]
    fn a_node_that_is_down_for_too_long_is_out_and_one_node_says_so() {
        let (since, after) = (Instant::now(), Duration::from_secs(60));
        let late = since + after;
        let four = membership(4, &[2, 3, 4], &[], since);
        assert_eq!(four.overdue(ReplicaId(2), after, late), [NodeId(1)]);
        assert_eq!(four.overdue(ReplicaId(2), after, late - Duration::from_millis(1)), []);
        for other in [3, 4] {
            assert_eq!(four.overdue(ReplicaId(other), after, late), []);
        }
        // An operator keeps them in, and says no more that they stay.
        let mut kept = membership(4, &[2, 3, 4], &[], since);
        kept.recovery.noout = true;
        assert_eq!(kept.overdue(ReplicaId(2), after, late + after), []);
        kept.recovery.noout = false;
        assert_eq!(kept.overdue(ReplicaId(2), after, late), [NodeId(1)]);
        // It is out already.
        let out = membership(4, &[2, 3, 4], &[1], since);
        assert_eq!(out.overdue(ReplicaId(2), after, late), []);
    }

    #[test]
    fn only_a_pool_that_was_removed_removes_its_groups() {
        let directory = std::env::temp_dir().join(format!("ringbolt-membership-{}", std::process::id()));
        let map = LocalMap::open(&directory.join("map")).unwrap();
        let cluster = map.cluster().unwrap();
        let pool = |first_group| PoolRecord {
            first_group,
            groups: 4,
            replicas: 1,
            in_sync_min: 1,
            class: Default::default(),
        };
        map.create_pool("kept", &pool(0)).unwrap();
        map.create_pool("removed", &pool(4)).unwrap();
        let mut membership = Membership::default();
        membership.read(&map, cluster, Instant::now()).unwrap();
        assert!((0..8).all(|group| !membership.is_removed(group)));
        map.remove_pool("removed").unwrap();
        membership.read(&map, cluster, Instant::now()).unwrap();
        assert!((0..8).all(|group| membership.is_removed(group) == (group >= 4)));
        // A map that is new, as after the loss of its storage, removes nothing; neither does that of another
        // cluster.
        let empty = LocalMap::open(&directory.join("empty")).unwrap();
        membership.read(&empty, empty.cluster().unwrap(), Instant::now()).unwrap();
        assert!((0..8).all(|group| !membership.is_removed(group)));
        assert!(membership.read(&empty, cluster, Instant::now()).is_err());
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_group_goes_where_it_has_room_and_what_is_missing_is_known() {
        let mut membership = membership(4, &[1, 2, 3, 4], &[], Instant::now());
        let device = |id: u32, extents: u32| {
            let partition = Some(PartitionSize { extents, onodes: 100 });
            let uuid = Uuid::from_u128(id.into());
            (
                DeviceId(id),
                DeviceRecord {
                    uuid,
                    node: NodeId(id),
                    weight: 10,
                    out: false,
                    partition,
                    class: None,
                    partitions: None,
                },
            )
        };
        membership.devices = [device(1, 1000), device(2, 1000), device(3, 1000), device(4, 500)].into();
        membership.partitions =
            membership.devices.values().filter_map(|it| Some((it.node, it.partition?))).collect();
        membership.topology = Topology::new(&membership.nodes, &membership.devices);
        let record = |in_sync: &[u32], replicas: &[u32]| {
            let ids = |numbers: &[u32]| numbers.iter().copied().map(ReplicaId).collect::<Vec<_>>();
            let in_sync = ids(in_sync);
            let config = cluster_map::GroupConfig { epoch: 3, primary: in_sync[0], in_sync };
            GroupRecord { config, replicas: ids(replicas) }
        };
        let used = |extents, onodes| PartitionSize { extents, onodes };
        let of_1_and_2 = record(&[1, 2], &[1, 2]);
        let small = ReplicaId(4);
        let mut displaced = 0;
        for group in 0..100 {
            let fits = membership.wanted(group, 3, &of_1_and_2, used(500, 100));
            assert_eq!((&fits.without_room, fits.no_room, fits.nodes.len()), (&vec![], None, 3));
            let large = membership.wanted(group, 3, &of_1_and_2, used(501, 100));
            assert!(!large.nodes.contains(&small) && large.nodes.len() == 3, "{large:?}");
            assert_eq!(large.without_room.contains(&small), fits.nodes.contains(&small));
            assert_eq!(large.no_room, None);
            // Nothing else moves.
            displaced += usize::from(large.nodes != fits.nodes);
            assert!(fits.nodes.iter().all(|node| *node == small || large.nodes.contains(node)));
            // With one replica more than there are nodes with room, it is known what the small one lacks.
            let none = membership.wanted(group, 4, &of_1_and_2, used(516, 103));
            let missing = used(16, 3);
            // Others lack onodes, too, and more room for data is the better answer.
            assert_eq!(none.no_room.map(|it| it.missing), Some(used(0, 3)), "{none:?}");
            let none = membership.wanted(group, 4, &record(&[1, 2, 3], &[1, 2, 3, 4]), used(516, 103));
            assert_eq!(none.no_room, Some(NoRoom { node: small, used: used(516, 103), missing }));
            assert_eq!(none.nodes.len(), 3);
            assert_eq!(
                none.no_room.unwrap().to_string(),
                "no other node has room for its 32.2 MiB in 103 objects: the partitions of node 4 lack 1.0 MiB and room \
                 for 3 objects"
            );
            // A member in sync has what the group uses, whatever its size.
            let member = membership.wanted(group, 4, &record(&[1, 2, 3, 4], &[1, 2, 3, 4]), used(516, 103));
            assert_eq!((member.nodes.len(), member.no_room), (4, None));
        }
        assert!(displaced > 50, "{displaced}");
    }

    #[test]
    fn nodes_that_an_operator_took_out_are_not_lost_ones() {
        let (since, after) = (Instant::now(), Duration::from_secs(60));
        let mut six = membership(6, &[1, 2], &[], since);
        six.out = [4, 5, 6].map(|node| (NodeId(node), OutReason::Operator)).into();
        assert_eq!(six.overdue(ReplicaId(1), after, since + after), [NodeId(3)]);
        // Of those that count, half are lost.
        six.out.insert(NodeId(2), OutReason::Operator);
        assert_eq!(six.overdue(ReplicaId(1), after, since + after), []);
    }

    #[test]
    fn no_node_is_out_while_half_of_them_are_lost() {
        let (since, after) = (Instant::now(), Duration::from_secs(60));
        for (nodes, up, out) in
            [(2, &[1][..], &[][..]), (4, &[1, 2], &[]), (4, &[1, 2, 3], &[3]), (1, &[], &[])]
        {
            assert_eq!(membership(nodes, up, out, since).overdue(ReplicaId(1), after, since + after), []);
        }
        assert_eq!(
            membership(3, &[1, 2], &[], since).overdue(ReplicaId(1), after, since + after),
            [NodeId(3)]
        );
    }
}
