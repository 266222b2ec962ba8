//! Limits on connections, and the queue of those whose peers have not logged in.

use std::collections::VecDeque;

use slots::Slot;

use crate::admissions::ConnectionLimits;
use crate::peers::PeerKey;

/// What a target admits.
///
/// A peer that has not logged in costs little and is trusted least: such connections are few, count apart from the
/// others, and make room for newer ones, the oldest first. So no number of silent peers keeps others out.
#[derive(Clone, Debug)]
pub struct GroupLimits {
    /// Connections of the target whose peers have logged in, on all cores together, and how they are divided.
    /// Beyond, connections are closed when they are accepted, or when they log in.
    pub connections: ConnectionLimits,
    /// Connections of the target whose peers have not logged in, divided evenly among the cores, at least one each. There
    /// are never more than a quarter of the process's file descriptors.
    pub logins_max: u32,
    /// Of these, connections from one IP address, from one /64 network of IPv6, or of one process at a UNIX
    /// socket; at least one for each core.
    pub logins_per_peer_max: u32,
    /// Time that a draining connection has to complete its commands.
    pub drain_timeout_ns: u64,
    /// Time in which something of what a connection waits for its peer with has to move: requested data that
    /// arrives, or an answer that is read. While memory lacks, progress is measured, and the time is 10 s at
    /// most.
    pub transfer_timeout_ns: u64,
    /// The registry whose devices connections use: it names them as tenants, and has the trace of their
    /// events. `None` for one of the target's own, as in simulations.
    pub registry: Option<bdev::Registry>,
}

impl Default for GroupLimits {
    fn default() -> Self {
        GroupLimits {
            connections: ConnectionLimits::new(1024),
            // More than a rack of hosts that all reconnect at once.
            logins_max: 512,
            logins_per_peer_max: 256,
            drain_timeout_ns: 3_000_000_000,
            transfer_timeout_ns: 30_000_000_000,
            registry: None,
        }
    }
}

/// The connections of a core whose peers have not logged in, oldest first.
#[derive(Debug)]
pub(crate) struct PendingLogins {
    queue: VecDeque<(Slot, PeerKey)>,
    max: usize,
    per_peer_max: usize,
}

impl PendingLogins {
    /// `descriptors` is the limit of the process. Three of four are for what has logged in and for everything else: the
    /// oldest pending login makes room before there is no descriptor to accept the newest with.
    pub(crate) fn new(limits: &GroupLimits, cores: usize, descriptors: u64) -> PendingLogins {
        let pending_max = u32::try_from(descriptors / 4).unwrap_or(u32::MAX);
        let share = |limit: u32| (limit.min(pending_max) as usize / cores.max(1)).max(1);
        PendingLogins {
            queue: VecDeque::new(),
            max: share(limits.logins_max),
            per_peer_max: share(limits.logins_per_peer_max),
        }
    }

    /// Adds a connection. Returns the one that it replaces, for the caller to close.
    pub(crate) fn add(&mut self, slot: Slot, peer: PeerKey) -> Option<Slot> {
        let of_peer = |(_, other): &(Slot, PeerKey)| *other == peer;
        let is_full_for_peer = peer != PeerKey::Unknown
            && self.queue.iter().filter(|entry| of_peer(entry)).count() >= self.per_peer_max;
        let replaced = if is_full_for_peer {
            self.queue.iter().position(of_peer)
        } else {
            (self.queue.len() >= self.max).then_some(0)
        };
        let replaced = replaced.and_then(|index| self.queue.remove(index));
        self.queue.push_back((slot, peer));
        replaced.map(|(slot, _)| slot)
    }

    /// Removes a connection: its peer has logged in, or it is closed.
    pub(crate) fn remove(&mut self, slot: Slot) {
        self.queue.retain(|(other, _)| *other != slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> PeerKey {
        PeerKey::of(&text.parse().unwrap(), None)
    }

    fn pending(logins_max: u32, logins_per_peer_max: u32) -> PendingLogins {
        PendingLogins::new(
            &GroupLimits { logins_max, logins_per_peer_max, ..GroupLimits::default() },
            2,
            u64::MAX,
        )
    }

    #[test]
    fn pending_logins_leave_file_descriptors_to_others() {
        let max = |descriptors: u64| PendingLogins::new(&GroupLimits::default(), 2, descriptors).max;
        assert_eq!([3, 64, 1024, 1 << 20, u64::MAX].map(max), [1, 8, 128, 256, 256]);
    }

    #[test]
    fn the_oldest_of_the_same_peer_goes_first_then_the_oldest_of_all() {
        let mut logins = pending(8, 4);
        let slot = |n: u64| Slot::from_bits(n);
        let (one, other) = (address("10.0.0.1:1"), address("10.0.0.2:1"));
        assert_eq!(logins.add(slot(1), other), None);
        assert_eq!(logins.add(slot(2), one), None);
        assert_eq!(logins.add(slot(3), address("10.0.0.1:2")), None);
        assert_eq!(logins.add(slot(4), one), Some(slot(2)), "two of one address at most");
        assert_eq!(logins.add(slot(5), address("10.0.0.3:1")), None);
        assert_eq!(logins.add(slot(6), address("10.0.0.4:1")), Some(slot(1)), "four at most");
        logins.remove(slot(3));
        assert_eq!(logins.add(slot(7), one), None);
    }

    #[test]
    fn an_ipv6_network_and_a_process_are_one_peer_and_unknown_ones_have_no_limit_of_their_own() {
        let mut logins = pending(8, 2);
        let slot = |n: u64| Slot::from_bits(n);
        assert_eq!(logins.add(slot(1), address("[2001:db8::1]:1")), None);
        assert_eq!(logins.add(slot(2), address("[2001:db8::ffff:2]:1")), Some(slot(1)));
        assert_eq!(logins.add(slot(3), address("[2001:db8:0:1::1]:1")), None);
        let local = PeerKey::Unknown;
        assert_eq!(logins.add(slot(4), local), None);
        assert_eq!(logins.add(slot(5), local), None);
        assert_eq!(logins.add(slot(6), local), Some(slot(2)));
        let process = PeerKey::Process { user: 0, process: 7 };
        assert_eq!(logins.add(slot(7), process), Some(slot(3)));
        assert_eq!(logins.add(slot(8), process), Some(slot(7)));
    }
}
