//! Keys of TLS that authentications of hosts have generated (secure channel concatenation).

use std::collections::HashMap;

use nvme_auth::TlsPsk;
use wire_nvme::fabrics::Nqn;

use crate::{ControllerAssociation, ControllerDirectory};

/// Most keys of a host and a subsystem with which it has not connected yet: as many paths as can sensibly be
/// connected at once. Another one drops the oldest.
const UNUSED_MAX: usize = 16;

/// The generated keys of a target, by identity.
///
/// A key is for one association. An authentication without TLS adds it; the admin queue that the host then
/// connects with it uses it, and I/O queues of that association; it is dropped with the association, or if the
/// host does not come back in time. Only hosts that have authenticated add keys.
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
    fn drop_expired(&mut self, now_ns: u64) {
        self.by_identity.retain(|_, key| key.unused_until_ns.is_none_or(|until_ns| now_ns < until_ns));
    }

    fn add(&mut self, association: &ControllerAssociation, psk: TlsPsk, unused_until_ns: Option<u64>) {
        let (hostnqn, subnqn) = (association.hostnqn().clone(), association.subnqn().clone());
        self.added += 1;
        let number = self.added;
        let key = GeneratedKey { hostnqn, subnqn, number, unused_until_ns, psk };
        self.by_identity.insert(key.psk.identity.clone(), key);
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

impl ControllerDirectory {
    /// Adds a key that the host of this association, whose connection has no TLS, has generated. Until
    /// `until_ns` it can connect an admin queue with it.
    pub fn add_generated_key(
        &self,
        association: &ControllerAssociation,
        psk: TlsPsk,
        now_ns: u64,
        until_ns: u64,
    ) {
        let mut keys = sync::lock(&self.generated_keys);
        keys.drop_expired(now_ns);
        keys.drop_oldest_of(association.hostnqn(), association.subnqn());
        keys.add(association, psk, Some(until_ns));
    }

    /// Replaces the key of an association with one that its host has generated through it. Queues that are
    /// connected stay so.
    pub fn replace_generated_key(&self, association: &ControllerAssociation, psk: TlsPsk) {
        let mut keys = sync::lock(&self.generated_keys);
        let replaced = sync::lock(&association.generated_identity).replace(psk.identity.clone());
        if let Some(replaced) = replaced {
            keys.by_identity.remove(&replaced);
        }
        keys.add(association, psk, None);
    }

    /// The key with an identity, for a handshake that begins at `now_ns`.
    pub fn generated_key(&self, identity: &str, now_ns: u64) -> Option<TlsPsk> {
        let mut keys = sync::lock(&self.generated_keys);
        keys.drop_expired(now_ns);
        keys.by_identity.get(identity).map(|key| key.psk.clone())
    }

    /// Number of generated keys that the target remembers.
    pub fn generated_keys(&self) -> usize {
        sync::lock(&self.generated_keys).by_identity.len()
    }

    /// Makes a key that of an association, whose admin queue has been connected with it. Returns false if it
    /// is that of another, or was dropped.
    pub(crate) fn use_generated_key(&self, identity: &str, association: &ControllerAssociation) -> bool {
        let mut keys = sync::lock(&self.generated_keys);
        let key = keys.by_identity.get_mut(identity);
        let is_unused = key.is_some_and(|key| key.unused_until_ns.take().is_some());
        if is_unused {
            *sync::lock(&association.generated_identity) = Some(identity.to_string());
        }
        is_unused
    }

    /// Drops the key of an association that ends.
    pub(crate) fn drop_generated_key(&self, association: &ControllerAssociation) {
        let mut keys = sync::lock(&self.generated_keys);
        if let Some(identity) = sync::lock(&association.generated_identity).take() {
            keys.by_identity.remove(&identity);
        }
    }
}

impl ControllerAssociation {
    /// The identity of the generated key with which its queues use TLS; `None` if it has none.
    pub fn generated_identity(&self) -> Option<String> {
        sync::lock(&self.generated_identity).clone()
    }
}
