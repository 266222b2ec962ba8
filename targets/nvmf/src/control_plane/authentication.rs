//! Keys of hosts, and what they may authenticate with.

use std::collections::BTreeMap;
use std::sync::Arc;

use control::Key;
use nvme_auth::{AuthKey, AuthKeys, AuthOptions, TlsKey};
use sockets::ServerNetwork;
use wire_nvme::fabrics::Nqn;

use super::{ConfiguredSubsystem, NvmfTarget, no_subsystem, parse_nqn};
use crate::NvmfTargetError;

/// The keys of a host, which has to authenticate on every queue: each as the keyring has it, and its secret, which was
/// read when the host got the key.
#[derive(Clone, Debug)]
pub struct HostKeys {
    /// The host proves that it has this.
    pub host: (Key, AuthKey),
    /// The subsystem proves that it has this, to hosts that ask for it.
    pub controller: Option<(Key, AuthKey)>,
}

/// The names of a host's keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostKeyNames {
    /// Of the host's key.
    pub host: Option<String>,
    /// Of the subsystem's key.
    pub controller: Option<String>,
    /// Of the key of TLS.
    pub psk: Option<String>,
}

/// The key with which a host has to use TLS: as the keyring has it, and its secret, which was read when the
/// host got it.
#[derive(Clone, Debug)]
pub struct HostPsk {
    /// The key of the keyring.
    pub key: Key,
    /// The configured PSK.
    pub configured: TlsKey,
}

impl HostKeys {
    fn secrets(&self) -> AuthKeys {
        let controller = self.controller.as_ref().map(|(_, key)| key.clone());
        AuthKeys { host: self.host.1.clone(), controller }
    }

    /// The names of the keys.
    pub(super) fn names(&self) -> HostKeyNames {
        let controller = self.controller.as_ref().map(|(key, _)| key.name().to_string());
        HostKeyNames { host: Some(self.host.0.name().to_string()), controller, psk: None }
    }
}

impl<N: ServerNetwork> NvmfTarget<N> {
    /// Allows a host to connect to a subsystem if it authenticates with these keys.
    ///
    /// # Errors
    /// As [`add_host`](Self::add_host).
    pub fn add_host_with_keys(&self, nqn: &str, host: &str, keys: HostKeys) -> Result<(), NvmfTargetError> {
        let (nqn, host) = (parse_nqn(nqn)?, parse_nqn(host)?);
        self.change_keys(&nqn, &host, Some(keys), None, false)
    }

    /// Allows a host to connect to a subsystem through TLS with this key, and then only so; and if it
    /// authenticates with other keys, if there are any.
    ///
    /// # Errors
    /// As [`add_host`](Self::add_host).
    pub fn add_host_with_psk(
        &self,
        nqn: &str,
        host: &str,
        psk: HostPsk,
        keys: Option<HostKeys>,
    ) -> Result<(), NvmfTargetError> {
        let (nqn, host) = (parse_nqn(nqn)?, parse_nqn(host)?);
        self.change_keys(&nqn, &host, keys, Some(psk), false)
    }

    /// Replaces the keys of a host, or removes them with `None`. A host that is connected stays so, and uses the new ones
    /// when it connects or authenticates anew; one that had no keys is disconnected, and connects with them.
    ///
    /// # Errors
    /// There is no such subsystem, or the host is not on its list.
    pub fn set_host_keys(
        &self,
        nqn: &str,
        host: &str,
        keys: Option<HostKeys>,
    ) -> Result<(), NvmfTargetError> {
        let (nqn, host) = (parse_nqn(nqn)?, parse_nqn(host)?);
        self.change_keys(&nqn, &host, keys, None, true)
    }

    fn change_keys(
        &self,
        nqn: &Nqn,
        host: &Nqn,
        keys: Option<HostKeys>,
        psk: Option<HostPsk>,
        exists: bool,
    ) -> Result<(), NvmfTargetError> {
        let mut state = self.lock()?;
        let before = state.checkpoint(nqn);
        let configured = state.subsystems.get_mut(nqn).ok_or_else(|| no_subsystem(nqn))?;
        let (host_text, nqn_text) = (host.as_str().into(), nqn.as_str().into());
        match configured.subsystem.hosts.contains(host) {
            true if !exists => return Err(NvmfTargetError::HostExists(host_text, nqn_text)),
            false if exists => return Err(NvmfTargetError::NoHost(host_text, nqn_text)),
            _ => {}
        }
        configured.change(|subsystem| {
            subsystem.hosts.insert(host.clone());
            match &keys {
                Some(keys) => subsystem.host_keys.insert(host.clone(), keys.secrets()),
                None => subsystem.host_keys.remove(host),
            };
            if let Some(psk) = &psk {
                let psks = psk.configured.psks(host.as_str(), nqn.as_str());
                subsystem.tls_hosts.insert(host.clone(), psks.into());
            }
        });
        if let Some(psk) = psk {
            configured.host_psks.insert(host.clone(), psk.key);
        }
        match keys {
            Some(keys) => configured.host_keys.insert(host.clone(), keys),
            None => configured.host_keys.remove(host),
        };
        self.commit(&mut state, before)
    }

    /// Sets the hash functions and groups that hosts may authenticate with from now on.
    ///
    /// # Errors
    /// The target is stopping, or a reactor does not respond.
    pub fn set_auth_options(&self, options: AuthOptions) -> Result<(), NvmfTargetError> {
        let mut state = self.lock()?;
        let mut snapshot = (*state.published).clone();
        snapshot.auth_options = Arc::new(options);
        state.published = Arc::new(snapshot);
        let generation = self.0.publisher().publish(state.published.clone());
        self.wait_applied(generation)
    }

    /// The hash functions and groups that hosts may authenticate with.
    pub fn auth_options(&self) -> AuthOptions {
        (*self.lock_any().published.auth_options).clone()
    }
}

impl ConfiguredSubsystem {
    /// The names of the keys of hosts, by their NQN.
    pub(super) fn key_names(&self) -> BTreeMap<String, HostKeyNames> {
        let keys = self.host_keys.iter().map(|(host, keys)| (host.as_str().to_string(), keys.names()));
        let mut names: BTreeMap<String, HostKeyNames> = keys.collect();
        for (host, key) in &self.host_psks {
            names.entry(host.as_str().to_string()).or_default().psk = Some(key.name().to_string());
        }
        names
    }
}
