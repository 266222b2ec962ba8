//! How many connections clients may have to a node, and those with one key.
//!
//! Connections of other nodes are not counted here: a group would lose its replicas if clients could take
//! all.

use std::collections::BTreeMap;

use wire_replica::KeyName;

/// At most one line about refused connections is logged in this time.
const LOG_EVERY_NS: u64 = 10_000_000_000;

/// The key that a client connects with; `None` for the cluster's.
pub(super) type UsedKey = Option<KeyName>;

/// Limits of a node's connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionLimits {
    /// All at a time: those of nodes, of clients, and those whose greetings are not over.
    pub(super) all: u32,
    /// Of clients. What is left is for other nodes and for greetings.
    pub(super) of_clients: u32,
    /// Of clients with one key.
    pub(super) of_key: u32,
}

impl Default for ConnectionLimits {
    /// A channel has one connection to a node. Each takes some KiB, and more if its peer reads slowly.
    fn default() -> ConnectionLimits {
        ConnectionLimits { all: 1024, of_clients: 768, of_key: 512 }
    }
}

/// The connections of clients, by key.
pub(super) struct ClientConnections {
    limits: ConnectionLimits,
    by_key: BTreeMap<UsedKey, u32>,
    /// Refused since the last line.
    refused: u64,
    /// When another line may be logged.
    log_from_ns: u64,
}

impl ClientConnections {
    pub(super) fn new(limits: ConnectionLimits) -> ClientConnections {
        ClientConnections { limits, by_key: BTreeMap::new(), refused: 0, log_from_ns: 0 }
    }

    /// Counts a connection, if there may be another one with its key.
    pub(super) fn admit(&mut self, key: UsedKey) -> bool {
        let all: u32 = self.by_key.values().sum();
        let of_key = self.by_key.get(&key).copied().unwrap_or(0);
        let is_admitted = all < self.limits.of_clients && of_key < self.limits.of_key;
        if is_admitted {
            self.by_key.insert(key, of_key + 1);
        }
        is_admitted
    }

    /// One that was admitted has ended.
    pub(super) fn remove(&mut self, key: UsedKey) {
        if let Some(connections) = self.by_key.get_mut(&key) {
            *connections -= 1;
            if *connections == 0 {
                self.by_key.remove(&key);
            }
        }
    }

    /// A connection was refused, by a limit of clients or because all are taken. Returns a line, unless one
    /// was returned a short time ago. `all` is the number of connections of the node.
    pub(super) fn refused(&mut self, all: usize, now_ns: u64) -> Option<String> {
        self.refused += 1;
        if now_ns < self.log_from_ns {
            return None;
        }
        self.log_from_ns = now_ns + LOG_EVERY_NS;
        let refused = std::mem::take(&mut self.refused);
        let ConnectionLimits { all: limit, of_clients, of_key } = self.limits;
        let of_all_clients: u32 = self.by_key.values().sum();
        let most = self.by_key.iter().max_by_key(|(_, connections)| **connections);
        let most = match most {
            None => String::new(),
            Some((None, connections)) => format!("; most of clients, {connections}, have the cluster's key"),
            Some((Some(key), connections)) => {
                format!("; most of clients, {connections}, have the client key {key}")
            }
        };
        Some(format!(
            "{refused} connections were refused: there are {all} of at most {limit}, {of_all_clients} of clients, \
             which may have {of_clients}, and {of_key} with one key{most}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ConnectionLimits = ConnectionLimits { all: 10, of_clients: 6, of_key: 4 };

    fn key(name: &str) -> UsedKey {
        KeyName::new(name)
    }

    #[test]
    fn one_key_keeps_no_other_client_out() {
        let mut clients = ClientConnections::new(LIMITS);
        let admit = |clients: &mut ClientConnections, key, attempts: u32| {
            (0..attempts).filter(|_| clients.admit(key)).count()
        };
        assert_eq!(admit(&mut clients, key("vm7"), 9), 4);
        // The cluster's key is one like another.
        assert_eq!(admit(&mut clients, None, 1), 1);
        assert_eq!(admit(&mut clients, key("backup"), 9), 1);
        assert!(!clients.admit(None));
        clients.remove(key("vm7"));
        assert_eq!(admit(&mut clients, key("backup"), 9), 1);
        // One whose connections have all ended has all it may have again.
        (0..3).for_each(|_| clients.remove(key("vm7")));
        assert_eq!(admit(&mut clients, key("vm7"), 9), 3);
        assert_eq!(clients.by_key.values().sum::<u32>(), LIMITS.of_clients);
    }

    #[test]
    fn the_key_with_the_most_connections_is_named_and_not_again_and_again() {
        let mut clients = ClientConnections::new(LIMITS);
        (0..4).for_each(|_| _ = clients.admit(key("vm7")));
        assert!(clients.admit(None));
        assert_eq!(
            clients.refused(9, 5).unwrap(),
            "1 connections were refused: there are 9 of at most 10, 5 of clients, which may have 6, and 4 with one \
             key; most of clients, 4, have the client key vm7"
        );
        for now_ns in [6, LOG_EVERY_NS, LOG_EVERY_NS + 4] {
            assert_eq!(clients.refused(9, now_ns), None);
        }
        assert!(clients.refused(9, LOG_EVERY_NS + 5).unwrap().starts_with("4 connections were refused"));
        (0..4).for_each(|_| clients.remove(key("vm7")));
        let line = clients.refused(10, 3 * LOG_EVERY_NS).unwrap();
        assert!(line.ends_with("; most of clients, 1, have the cluster's key"), "{line}");
    }

    #[test]
    fn nodes_have_room_beside_clients() {
        let ConnectionLimits { all, of_clients, of_key } = ConnectionLimits::default();
        assert!(of_key <= all / 2 && of_clients + super::super::hub::GREETING_MAX as u32 <= all);
    }
}
