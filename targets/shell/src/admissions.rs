//! How many connections of a target each peer, user and object has, and how many it may have.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Mutex;

use serde::Serialize;

use crate::peers::PeerKey;

/// Connections that each may have without a look at the others: a host with a queue for each of its cores, or
/// a client with several connections, whatever the total is.
const ALWAYS_MAX: u32 = 16;

/// How many connections of a target there may be after their login.
///
/// By default no peer can take them all: a peer has at most half of what the others leave, a user with all
/// its processes seven eighths, and an object (an export, a controller, a target node or a subsystem) three
/// quarters. 16 are always allowed, as far as the total permits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Of the target, on all cores together.
    pub max: u32,
    /// Of a peer: an IPv4 address, a /64 network of IPv6, or a process at a UNIX socket.
    pub per_peer_max: Option<u32>,
    /// Of one export, controller, target node or subsystem.
    pub per_object_max: Option<u32>,
}

impl ConnectionLimits {
    /// The limits that are set, as targets' options have them: by name, in which an object is what the target
    /// calls it.
    pub fn named(&self, object: &str) -> BTreeMap<String, u32> {
        let limits = [
            ("max_connections".into(), Some(self.max)),
            ("max_connections_per_peer".into(), self.per_peer_max),
            (format!("max_connections_per_{object}"), self.per_object_max),
        ];
        limits.into_iter().filter_map(|(name, limit)| Some((name, limit?))).collect()
    }

    /// Whether the limits are 1 to `most`.
    ///
    /// # Errors
    /// The name of one that is not, and what is expected.
    pub fn check(&self, most: u32, object: &str) -> Result<(), String> {
        match self.named(object).into_iter().find(|(_, limit)| !(1..=most).contains(limit)) {
            Some((name, _)) => Err(format!("{name}: expected 1 to {most}")),
            None => Ok(()),
        }
    }

    /// This many connections, divided by default.
    pub const fn new(max: u32) -> ConnectionLimits {
        ConnectionLimits { max, per_peer_max: None, per_object_max: None }
    }
}

/// What connections are counted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Counted {
    Peer(PeerKey),
    User(u32),
    Object(u64),
}

/// Whose connections a connection counts among.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admitted {
    peer: PeerKey,
    object: Option<u64>,
}

/// Which limit a connection exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LimitExceeded {
    Target(u32),
    Peer(PeerKey, u32),
    User(u32, u32),
    Object(PeerKey, u32),
}

impl fmt::Display for LimitExceeded {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LimitExceeded::Target(max) => write!(formatter, "the target has {max} connections, its limit"),
            LimitExceeded::Peer(peer, max) => write!(
                formatter,
                "{peer} has {max} connections, the limit of one peer at present; max_connections_per_peer sets it"
            ),
            LimitExceeded::User(user, max) => write!(
                formatter,
                "user {user} has {max} connections, the limit of one user at present: seven eighths of what \
                 others leave of max_connections"
            ),
            LimitExceeded::Object(peer, max) => write!(
                formatter,
                "what {peer} connects to has {max} connections, its limit at present; max_connections_per_export, \
                 _controller, _node or _subsystem sets it"
            ),
        }
    }
}

/// Connections of a peer, as targets report them, in JSON too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PeerConnections {
    /// The peer.
    pub peer: PeerKey,
    /// Those that have logged in.
    pub connections: u32,
    /// How many it may have at present.
    pub connections_max: u32,
}

/// The connections of a target that have logged in, on all cores.
///
/// A lock, which is taken where a connection is accepted, logs in or ends, and for nothing else.
#[derive(Debug)]
pub(crate) struct Admissions(Mutex<State>);

#[derive(Debug)]
struct State {
    limits: ConnectionLimits,
    total: u32,
    counts: HashMap<Counted, u32>,
}

impl Admissions {
    pub(crate) fn new(limits: ConnectionLimits) -> Admissions {
        Admissions(Mutex::new(State { limits, total: 0, counts: HashMap::new() }))
    }

    /// Changes the limits, for connections that come from now on.
    pub(crate) fn set_limits(&self, limits: ConnectionLimits) {
        sync::lock(&self.0).limits = limits;
    }

    /// Whether a peer could log in.
    pub(crate) fn check(&self, peer: PeerKey) -> Result<(), LimitExceeded> {
        sync::lock(&self.0).check(Admitted { peer, object: None })
    }

    /// Counts a connection whose peer has logged in, for an object. The result is for
    /// [`remove`](Self::remove).
    pub(crate) fn add(&self, peer: PeerKey, object: Option<u64>) -> Result<Admitted, LimitExceeded> {
        let mut state = sync::lock(&self.0);
        let admitted = Admitted { peer, object };
        state.check(admitted)?;
        state.total += 1;
        for counted in admitted.counted() {
            *state.counts.entry(counted).or_default() += 1;
        }
        Ok(admitted)
    }

    /// A connection has ended.
    pub(crate) fn remove(&self, admitted: Admitted) {
        let mut state = sync::lock(&self.0);
        state.total -= 1;
        for counted in admitted.counted() {
            if let Some(count) = state.counts.get_mut(&counted) {
                *count -= 1;
                if *count == 0 {
                    state.counts.remove(&counted);
                }
            }
        }
    }

    /// The peers with connections, those with the most first.
    pub(crate) fn peers(&self) -> Vec<PeerConnections> {
        let state = sync::lock(&self.0);
        let of_peer = |(counted, connections): (&Counted, &u32)| match counted {
            Counted::Peer(peer) => {
                let connections_max = state.limit_of(*counted);
                Some(PeerConnections { peer: *peer, connections: *connections, connections_max })
            }
            _ => None,
        };
        let mut peers: Vec<_> = state.counts.iter().filter_map(of_peer).collect();
        peers.sort_by_cached_key(|one| (std::cmp::Reverse(one.connections), one.peer.to_string()));
        peers
    }

    /// How many connections an object may have at present.
    pub(crate) fn object_max(&self, object: u64) -> u32 {
        sync::lock(&self.0).limit_of(Counted::Object(object))
    }
}

impl Admitted {
    fn counted(self) -> impl Iterator<Item = Counted> {
        let user = match self.peer {
            PeerKey::Process { user, .. } => Some(Counted::User(user)),
            _ => None,
        };
        [Some(Counted::Peer(self.peer)), user, self.object.map(Counted::Object)].into_iter().flatten()
    }
}

impl State {
    fn check(&self, admitted: Admitted) -> Result<(), LimitExceeded> {
        if self.total >= self.limits.max {
            return Err(LimitExceeded::Target(self.limits.max));
        }
        for counted in admitted.counted() {
            let (count, max) = (self.count_of(counted), self.limit_of(counted));
            if count < max {
                continue;
            }
            return Err(match counted {
                Counted::Peer(peer) => LimitExceeded::Peer(peer, count),
                Counted::User(user) => LimitExceeded::User(user, count),
                Counted::Object(_) => LimitExceeded::Object(admitted.peer, count),
            });
        }
        Ok(())
    }

    fn count_of(&self, counted: Counted) -> u32 {
        self.counts.get(&counted).copied().unwrap_or(0)
    }

    /// How many connections it may have while the others have theirs.
    fn limit_of(&self, counted: Counted) -> u32 {
        let max = self.limits.max;
        let left = u64::from(max.saturating_sub(self.total - self.count_of(counted)));
        let part = |eighths: u64| ((left * eighths / 8) as u32).max(ALWAYS_MAX).min(max);
        match counted {
            Counted::Peer(PeerKey::Own | PeerKey::Unknown) => max,
            Counted::Peer(_) => self.limits.per_peer_max.unwrap_or_else(|| part(4)),
            Counted::User(_) => part(7),
            Counted::Object(_) => self.limits.per_object_max.unwrap_or_else(|| part(6)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u8) -> PeerKey {
        PeerKey::Ipv4([10, 0, 0, number].into())
    }

    fn process(user: u32, process: u32) -> PeerKey {
        PeerKey::Process { user, process }
    }

    /// Adds connections until one is refused. Returns how many, and why.
    fn fill(admissions: &Admissions, peer: impl Fn(u32) -> PeerKey, object: u64) -> (u32, LimitExceeded) {
        for count in 0.. {
            if let Err(limit) = admissions.add(peer(count), Some(object)) {
                return (count, limit);
            }
        }
        unreachable!("there are limits")
    }

    #[test]
    fn a_peer_has_half_of_what_others_leave() {
        let admissions = Admissions::new(ConnectionLimits::new(1024));
        assert_eq!(fill(&admissions, |_| peer(1), 1), (512, LimitExceeded::Peer(peer(1), 512)));
        assert_eq!(fill(&admissions, |_| peer(2), 2).0, 256);
        assert_eq!(fill(&admissions, |_| peer(3), 3).0, 128);
        // Sixteen connections are always allowed.
        for number in 4..8 {
            fill(&admissions, |_| peer(number), 4);
        }
        assert_eq!(fill(&admissions, |_| peer(8), 5), (16, LimitExceeded::Peer(peer(8), 16)));
        let peers = admissions.peers();
        assert_eq!((peers[0].peer, peers[0].connections), (peer(1), 512));
    }

    #[test]
    fn an_object_leaves_a_quarter_to_others_however_many_peers_it_has() {
        let admissions = Admissions::new(ConnectionLimits::new(1000));
        let (count, limit) = fill(&admissions, |count| peer(count as u8), 1);
        assert_eq!((count, limit), (750, LimitExceeded::Object(peer(750u32 as u8), 750)));
        assert_eq!(admissions.object_max(1), 750);
        assert!(admissions.add(peer(1), Some(2)).is_ok());
        assert!(admissions.add(peer(1), None).is_ok(), "what has no object");
    }

    #[test]
    fn a_user_leaves_an_eighth_to_others_however_many_processes_it_has() {
        let admissions = Admissions::new(ConnectionLimits::new(256));
        let own = |count| fill(&admissions, move |number| process(1000, number), count);
        // It has an object for each eighth.
        let counts: Vec<_> = (0..8).map(|object| own(object).0).collect();
        assert_eq!(counts.iter().sum::<u32>(), 224, "{counts:?}");
        assert_eq!(own(9).1, LimitExceeded::User(1000, 224));
        assert_eq!(fill(&admissions, |_| process(0, 1), 10).0, 16);
    }

    #[test]
    fn limits_that_are_set_apply_and_a_connection_that_ends_counts_no_more() {
        let limits = ConnectionLimits { max: 20, per_peer_max: Some(3), per_object_max: Some(5) };
        let admissions = Admissions::new(ConnectionLimits::new(2));
        assert_eq!(fill(&admissions, |_| peer(1), 1), (2, LimitExceeded::Target(2)));
        admissions.set_limits(limits);
        let third = admissions.add(peer(1), Some(1)).unwrap();
        assert_eq!(admissions.check(peer(1)), Err(LimitExceeded::Peer(peer(1), 3)));
        admissions.remove(third);
        let (count, limit) = fill(&admissions, |count| peer(10 + count as u8), 1);
        assert_eq!((count, limit), (3, LimitExceeded::Object(peer(13), 5)));
        assert_eq!(fill(&admissions, |_| peer(1), 2).0, 1);
        let texts =
            [LimitExceeded::Peer(process(1000, 7), 3).to_string(), LimitExceeded::Target(20).to_string()];
        let expected = "process 7 of user 1000 has 3 connections, the limit of one peer at present; \
                        max_connections_per_peer sets it";
        assert_eq!(texts[0], expected);
        assert_eq!(texts[1], "the target has 20 connections, its limit");
    }
}
