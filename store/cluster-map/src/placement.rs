//! Which devices have the replicas of a logical group: weighted rendezvous hashing, as the straws of CRUSH's straw2.
//!
//! Each device draws a straw, whose length depends on the group, the device and its weight alone. The longest one wins, then
//! the longest one in another failure domain, and so on. So shares are in proportion to weights, and a device that comes,
//! goes or changes its weight moves only what it wins or loses: at most one replica of a group, and of the others no data.
//! (Straws of domains, then of nodes, as CRUSH draws them, would move more than twice as much when one device leaves.)
//! All arithmetic is in integers: every node computes the same.

use std::collections::BTreeMap;

use crate::{DeviceId, DeviceRecord, GroupId, NodeId, NodeRecord};

/// Bits after the point of a logarithm.
const FRACTION_BITS: u32 = 24;
/// The table of logarithms has two to this many segments.
const SEGMENT_BITS: u32 = 8;

/// The devices that take data. A group takes about 7 ns a device.
#[derive(Clone, Debug, Default)]
pub struct Topology {
    devices: Vec<Candidate>,
    domains: usize,
    /// The failure domain of each node.
    nodes: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: DeviceId,
    name: u64,
    weight: u32,
    /// Indices of its failure domain and its node.
    domain: u32,
    node: u32,
}

impl Topology {
    /// The devices that are in and have a weight, on nodes that are in.
    pub fn new(nodes: &BTreeMap<NodeId, NodeRecord>, devices: &BTreeMap<DeviceId, DeviceRecord>) -> Topology {
        let (mut domains, mut known_nodes, mut of_nodes) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        let devices = devices.iter().filter(|(_, device)| !device.out && device.weight > 0);
        let devices = devices.filter_map(|(id, device)| {
            let node = nodes.get(&device.node).filter(|node| !node.out)?;
            let next = domains.len() as u32;
            let domain = *domains.entry(&node.domain).or_insert(next);
            let next = known_nodes.len() as u32;
            let node = *known_nodes.entry(device.node).or_insert_with(|| {
                of_nodes.push(domain);
                next
            });
            Some(Candidate { id: *id, name: mix(id.0.into()), weight: device.weight, domain, node })
        });
        let devices = devices.collect();
        Topology { devices, domains: domains.len(), nodes: of_nodes }
    }

    /// The devices for the replicas of a group, the first for its first primary. Each is in a failure domain of its own; if
    /// there are fewer domains than replicas, on a node of its own, and all domains have as many as possible. There are fewer
    /// devices if there are fewer nodes.
    pub fn place(&self, group: GroupId, replicas: usize) -> Vec<DeviceId> {
        self.place_where(group, replicas, |_| true)
    }

    /// As [`place`](Self::place), on devices that `has_room` accepts: others draw no straw.
    pub fn place_where(
        &self,
        group: GroupId,
        replicas: usize,
        has_room: impl Fn(DeviceId) -> bool,
    ) -> Vec<DeviceId> {
        let seed = mix(u64::from(group.0) | 1 << 32);
        // The longest straw of each domain and of each node.
        let mut of_domains: Vec<Option<(u64, DeviceId)>> = vec![None; self.domains];
        let mut of_nodes = vec![None; self.nodes.len()];
        for device in self.devices.iter().filter(|device| has_room(device.id)) {
            let straw = (straw(seed, device.name, device.weight), device.id);
            for longest in [&mut of_domains[device.domain as usize], &mut of_nodes[device.node as usize]] {
                *longest = Some(longest.map_or(straw, |longest| straw.min(longest)));
            }
        }
        let mut longest: Vec<_> = of_domains.into_iter().flatten().collect();
        longest.sort_unstable();
        if longest.len() < replicas {
            longest = self.in_few_domains(&of_nodes);
        }
        longest.into_iter().take(replicas).map(|(_, device)| device).collect()
    }

    /// The longest straws of nodes, in an order that goes round the domains: the longest of each, the second of each, and so on. So
    /// what the domains won when there were enough of them stays where it is.
    fn in_few_domains(&self, of_nodes: &[Option<(u64, DeviceId)>]) -> Vec<(u64, DeviceId)> {
        let of_nodes = of_nodes.iter().zip(&self.nodes);
        let mut straws: Vec<_> = of_nodes.filter_map(|(straw, domain)| Some(((*straw)?, *domain))).collect();
        straws.sort_unstable();
        let mut counts = vec![0; self.domains];
        let mut ranked: Vec<(usize, (u64, DeviceId))> = Vec::with_capacity(straws.len());
        for (straw, domain) in straws {
            let count = &mut counts[domain as usize];
            ranked.push((*count, straw));
            *count += 1;
        }
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, straw)| straw).collect()
    }
}

/// How much a straw lacks: an exponential variable whose rate is the weight, so that the least of several is a device's
/// with a probability in proportion to its weight.
fn straw(seed: u64, name: u64, weight: u32) -> u64 {
    let uniform = (mix(seed ^ name) >> 32) as u32;
    (minus_log2(uniform) << 32) / u64::from(weight.max(1))
}

/// Minus the binary logarithm of (`uniform` + 1/2) / 2^32, with [`FRACTION_BITS`] bits after the point, between the entries
/// of a table.
fn minus_log2(uniform: u32) -> u64 {
    let value = u64::from(uniform) << 1 | 1;
    let whole = value.ilog2();
    // From 0 to below 1, with 32 bits.
    let part = (value << (32 - whole)) & 0xffff_ffff;
    let segment = (part >> (32 - SEGMENT_BITS)) as usize;
    let within = part & ((1 << (32 - SEGMENT_BITS)) - 1);
    let (low, high) = (LOG2[segment], LOG2[segment + 1]);
    let log = low + (((high - low) * within) >> (32 - SEGMENT_BITS));
    (33 << FRACTION_BITS) - (u64::from(whole) << FRACTION_BITS) - log
}

/// The binary logarithm of 1 + index / 256.
static LOG2: [u64; (1 << SEGMENT_BITS) + 1] = {
    let mut table = [1 << FRACTION_BITS; (1 << SEGMENT_BITS) + 1];
    let mut segment = 0;
    while segment < 1 << SEGMENT_BITS {
        // With 63 bits after the point: squaring a number doubles its logarithm.
        let mut power = ((1 << SEGMENT_BITS) + segment as u128) << (63 - SEGMENT_BITS);
        let mut log = 0;
        let mut bit = 0;
        while bit < FRACTION_BITS {
            power = (power * power) >> 63;
            let carry = power >> 64;
            power >>= carry;
            log = log << 1 | carry as u64;
            bit += 1;
        }
        table[segment] = log;
        segment += 1;
    }
    table
};

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_is_that_of_floating_point() {
        for uniform in (0..=u32::MAX).step_by(65_521).chain([0, 1, u32::MAX, u32::MAX - 1, 1 << 31]) {
            let expected = 32.0 - (f64::from(uniform) + 0.5).log2();
            let found = minus_log2(uniform) as f64 / f64::from(1 << FRACTION_BITS);
            assert!((found - expected).abs() < 3e-6, "{uniform}: {found} instead of {expected}");
        }
    }
}
