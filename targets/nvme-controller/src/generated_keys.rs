//! Keys of TLS that authentications of hosts have generated (secure channel concatenation).

use std::collections::HashMap;

use nvme_auth::TlsPsk;
use wire_nvme::fabrics::Nqn;

/// Most keys of a host and a subsystem with which it has not connected yet: as many paths as can sensibly be
/// connected at once. Another one drops the oldest.
const UNUSED_MAX: usize = 16;

/// The generated keys of a target, by identity.
///
/// A key is for one association. An authentication without TLS adds it; the admin queue that the host then
/// connects with it uses it, and I/O queues of that association; it is dropped with the association, or if
/// the host does not come back in time. Only hosts that have authenticated add keys.
#[derive(Debug, Default)]
pub(crate) struct GeneratedKeys {
    by_identity: HashMap<String, GeneratedKey>,
    /// Keys so far, which orders them.
    added: u64,
}

#[derive(Debug)]
struct GeneratedKey {
    psk: TlsPsk,
    hostnqn: Nqn,
    subnqn: Nqn,
    number: u64,
    /// Until when an admin queue has to use it; `None` if one does.
    unused_until_ns: Option<u64>,
}

impl GeneratedKeys {
    /// Adds a key that an admin queue has to use until `until_ns`.
    pub(crate) fn add_unused(
        &mut self,
        host: &Nqn,
        subsystem: &Nqn,
        psk: TlsPsk,
        now_ns: u64,
        until_ns: u64,
    ) {
        self.drop_expired(now_ns);
        self.drop_oldest_of(host, subsystem);
        self.add(host, subsystem, psk, Some(until_ns));
    }

    /// Adds a key that an association uses.
    pub(crate) fn add_used(&mut self, host: &Nqn, subsystem: &Nqn, psk: TlsPsk) {
        self.add(host, subsystem, psk, None);
    }

    /// The key with an identity.
    pub(crate) fn find(&mut self, identity: &str, now_ns: u64) -> Option<TlsPsk> {
        self.drop_expired(now_ns);
        self.by_identity.get(identity).map(|key| key.psk.clone())
    }

    /// Has an association use a key. Returns false if another one does, or it was dropped.
    pub(crate) fn begin_use(&mut self, identity: &str) -> bool {
        self.by_identity.get_mut(identity).is_some_and(|key| key.unused_until_ns.take().is_some())
    }

    pub(crate) fn remove(&mut self, identity: &str) {
        self.by_identity.remove(identity);
    }

    pub(crate) fn len(&self) -> usize {
        self.by_identity.len()
    }

    fn add(&mut self, host: &Nqn, subsystem: &Nqn, psk: TlsPsk, unused_until_ns: Option<u64>) {
        self.added += 1;
        let (hostnqn, subnqn, number) = (host.clone(), subsystem.clone(), self.added);
        let key = GeneratedKey { hostnqn, subnqn, number, unused_until_ns, psk };
        self.by_identity.insert(key.psk.identity.clone(), key);
    }

    fn drop_expired(&mut self, now_ns: u64) {
        self.by_identity.retain(|_, key| key.unused_until_ns.is_none_or(|until_ns| now_ns < until_ns));
    }

    fn drop_oldest_of(&mut self, host: &Nqn, subsystem: &Nqn) {
        let is_of = |key: &&GeneratedKey| {
            key.unused_until_ns.is_some() && key.hostnqn == *host && key.subnqn == *subsystem
        };
        let unused: Vec<_> = self.by_identity.values().filter(is_of).collect();
        let oldest = unused.iter().min_by_key(|key| key.number).filter(|_| unused.len() >= UNUSED_MAX);
        if let Some(identity) = oldest.map(|key| key.psk.identity.clone()) {
            self.by_identity.remove(&identity);
        }
    }
}
