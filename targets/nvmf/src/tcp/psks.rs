//! The keys of TLS of connections.

use std::sync::Arc;

use nvme_auth::{AuthHash, TlsPsk};
use nvme_controller::{ControllerDirectory, SecureChannel};
use tls::{Psk, PskHash, PskSource};

use crate::snapshot::ConfigSnapshot;

/// The keys of a connection's handshake: those of the configuration, as the hosts were when it was accepted,
/// and those that authentications have generated. Connect asks whether the host still has one.
pub(super) struct ConnectionKeys {
    pub(super) config: Arc<ConfigSnapshot>,
    pub(super) directory: Arc<ControllerDirectory>,
    /// When it was accepted.
    pub(super) accepted_ns: u64,
}

impl PskSource for ConnectionKeys {
    fn find(&self, identity: &str) -> Option<Psk> {
        if let Some(psk) = self.config.tls_psk(identity) {
            return psk_of(psk);
        }
        psk_of(&self.directory.generated_key(identity, self.accepted_ns)?)
    }
}

impl ConfigSnapshot {
    /// Whether a host may use secure channel concatenation at a port.
    pub(super) fn concatenates_at(&self, portid: u16) -> bool {
        self.subsystems.values().any(|subsystem| {
            subsystem.listens_on(portid)
                && subsystem.host_keys.keys().any(|host| subsystem.concatenates(host))
        })
    }

    /// The configured key with an identity.
    pub(super) fn tls_psk(&self, identity: &str) -> Option<&TlsPsk> {
        let channel = SecureChannel::of_identity(identity)?;
        let subsystem = self.subsystems.get(&channel.subnqn)?;
        let psks = subsystem.tls_hosts.get(&channel.hostnqn)?;
        psks.iter().find(|psk| psk.identity == identity)
    }
}

fn psk_of(psk: &TlsPsk) -> Option<Psk> {
    let hash = match psk.hash {
        AuthHash::Sha256 => PskHash::Sha256,
        AuthHash::Sha384 => PskHash::Sha384,
        AuthHash::Sha512 => return None,
    };
    Psk::new(psk.identity.clone(), psk.key.clone(), hash)
}
