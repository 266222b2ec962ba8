//! Listeners: addresses of subsystems, and the sockets of the transports.

use std::sync::Arc;

use nvme_controller::SubsystemListener;
use sockets::ServerNetwork;
use wire_nvme::fabrics::Nqn;

use super::{ConfiguredSubsystem, ListenPort, NvmfTarget, TargetState, no_subsystem, parse_nqn};
use crate::address::ListenAddress;
use crate::failure::NvmfTargetError;
use crate::transport::{Listening, TransportKind};

impl<N: ServerNetwork> NvmfTarget<N> {
    /// Adds a listener to a subsystem; opens the address if no other subsystem listens on it. Returns the
    /// address, with the port that the kernel assigned for port 0.
    pub fn add_listener(&self, nqn: &str, address: ListenAddress) -> Result<ListenAddress, NvmfTargetError> {
        self.add_listener_with(nqn, address, false)
    }

    /// As [`add_listener`](Self::add_listener), with TLS: through this address only hosts with a key connect
    /// ([`HostPsk`](crate::HostPsk)).
    ///
    /// # Errors
    /// The transport has no TLS, or another subsystem listens on the address without.
    pub fn add_secure_listener(
        &self,
        nqn: &str,
        address: ListenAddress,
    ) -> Result<ListenAddress, NvmfTargetError> {
        self.add_listener_with(nqn, address, true)
    }

    fn add_listener_with(
        &self,
        nqn: &str,
        address: ListenAddress,
        secure: bool,
    ) -> Result<ListenAddress, NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        let kind = address.kind()?;
        let normalized = kind.normalize(&address)?;
        if secure && !kind.has_tls() {
            return Err(NvmfTargetError::NoSecureChannel(kind.name().into()));
        }
        match kind.listening() {
            Listening::Shared => self.add_shared_listener(nqn, kind, normalized, secure),
            Listening::Exclusive => self.add_endpoint(nqn, kind, normalized),
        }
    }

    /// Adds a listener at an address that several subsystems may share: it is opened first, since only then
    /// it is known.
    fn add_shared_listener(
        &self,
        nqn: Nqn,
        kind: &'static dyn TransportKind,
        normalized: ListenAddress,
        secure: bool,
    ) -> Result<ListenAddress, NvmfTargetError> {
        let mut state = self.lock()?;
        if !nqn.is_discovery() && !state.subsystems.contains_key(&nqn) {
            return Err(no_subsystem(&nqn));
        }
        let existing = state.ports.iter().find(|port| port.address == normalized);
        if let Some(port) = existing
            && port.secure != secure
        {
            return Err(NvmfTargetError::OtherSecurity(normalized.text(), port.secure));
        }
        let existing = existing.map(|port| port.portid);
        if existing.is_some() && nqn.is_discovery() {
            return Ok(normalized);
        }
        let before = state.checkpoint(&nqn);
        let portid = match existing {
            Some(portid) => portid,
            None => {
                let portid = state.last_portid.wrapping_add(1).max(1);
                let address = state.transport(kind)?.listen(&normalized, portid, secure)?;
                state.last_portid = portid;
                Arc::make_mut(&mut state.ports).push(ListenPort { portid, address, kind, secure });
                portid
            }
        };
        let port = state.ports.iter().find(|port| port.portid == portid);
        let bound = port.map_or_else(|| normalized.clone(), |port| port.address.clone());
        if let Some(configured) = state.subsystems.get_mut(&nqn) {
            if configured.listeners.contains(&bound) {
                return Err(NvmfTargetError::ListenerExists(nqn.as_str().into(), normalized.text()));
            }
            configured.listeners.push(bound.clone());
            configured
                .change(|subsystem| subsystem.listeners.push(SubsystemListener { portid, ana: Vec::new() }));
            *state.port_users.entry(portid).or_default() += 1;
        }
        if let Err(error) = self.commit(&mut state, before) {
            if existing.is_none()
                && let Ok(transport) = state.transport(kind)
            {
                // A core that does not respond closes it when it runs again.
                _ = transport.stop_listening(portid);
            }
            return Err(error);
        }
        Ok(bound)
    }

    /// Adds a listener at an address that belongs to one subsystem.
    fn add_endpoint(
        &self,
        nqn: Nqn,
        kind: &'static dyn TransportKind,
        address: ListenAddress,
    ) -> Result<ListenAddress, NvmfTargetError> {
        let mut state = self.lock()?;
        if !state.subsystems.contains_key(&nqn) {
            return Err(no_subsystem(&nqn));
        }
        if state.ports.iter().any(|port| port.address == address) {
            return Err(NvmfTargetError::ListenerExists("there".into(), address.traddr));
        }
        let portid = state.last_portid.wrapping_add(1).max(1);
        state.transport(kind)?;
        // The subsystem must list the port before the first client connects.
        let before = state.checkpoint(&nqn);
        state.last_portid = portid;
        Arc::make_mut(&mut state.ports).push(ListenPort {
            portid,
            address: address.clone(),
            kind,
            secure: false,
        });
        if let Some(configured) = state.subsystems.get_mut(&nqn) {
            configured.listeners.push(address.clone());
            configured
                .change(|subsystem| subsystem.listeners.push(SubsystemListener { portid, ana: Vec::new() }));
            *state.port_users.entry(portid).or_default() += 1;
        }
        self.commit(&mut state, before.clone())?;
        let error = match state.transport(kind)?.listen(&address, portid, false) {
            Ok(bound) => return Ok(bound),
            Err(error) => error,
        };
        state.restore(before);
        // The answer is the first error. A core that does not respond applies this when it runs again.
        _ = self.commit_always(&mut state, &nqn);
        Err(error)
    }

    /// Removes a listener from a subsystem. Hosts connected through it are disconnected after their commands
    /// in flight complete.
    pub fn remove_listener(&self, nqn: &str, address: ListenAddress) -> Result<(), NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        let normalized = address.normalized()?;
        let mut state = self.lock()?;
        let before = state.checkpoint(&nqn);
        if nqn.is_discovery() {
            state.port(&nqn, &normalized)?;
        } else {
            let (portid, configured) = state.listener(&nqn, &normalized)?;
            configured.listeners.retain(|listener| *listener != normalized);
            configured.change(|subsystem| subsystem.listeners.retain(|listener| listener.portid != portid));
            state.release_port(portid);
        }
        let unused = state.take_unused_ports(&[normalized]);
        self.commit(&mut state, before)?;
        close_ports(&state, &unused)
    }

    /// Closes the listeners of all transports and disconnects the hosts, each after its commands in flight
    /// have completed. Each address is free when this returns.
    ///
    /// # Errors
    /// The target is stopping; or the first transport that has connections left.
    pub fn disconnect_all(&self) -> Result<(), NvmfTargetError> {
        let state = self.lock()?;
        // Each, whatever becomes of the others.
        let drained = state.transports.values().map(|transport| transport.shutdown());
        Ok(drained.fold(Ok(()), Result::and)?)
    }
}

impl TargetState {
    /// Removes those of the addresses that no subsystem listens on any longer.
    pub(super) fn take_unused_ports(&mut self, addresses: &[ListenAddress]) -> Vec<ListenPort> {
        let users = &self.port_users;
        let is_unused =
            |port: &ListenPort| addresses.contains(&port.address) && !users.contains_key(&port.portid);
        let unused: Vec<ListenPort> = self.ports.iter().filter(|port| is_unused(port)).cloned().collect();
        if !unused.is_empty() {
            Arc::make_mut(&mut self.ports).retain(|port| !is_unused(port));
        }
        unused
    }

    /// Counts a subsystem as a user of its listeners' ports.
    pub(super) fn use_ports(&mut self, configured: &ConfiguredSubsystem) {
        for listener in &configured.subsystem.listeners {
            *self.port_users.entry(listener.portid).or_default() += 1;
        }
    }

    /// The subsystem does not use its listeners' ports any longer.
    pub(super) fn release_ports(&mut self, configured: &ConfiguredSubsystem) {
        for listener in &configured.subsystem.listeners {
            self.release_port(listener.portid);
        }
    }

    fn release_port(&mut self, portid: u16) {
        if let Some(users) = self.port_users.get_mut(&portid) {
            *users -= 1;
            if *users == 0 {
                self.port_users.remove(&portid);
            }
        }
    }

    /// The port identifier of a listening address.
    fn port(&self, nqn: &Nqn, address: &ListenAddress) -> Result<u16, NvmfTargetError> {
        let port = self.ports.iter().find(|port| port.address == *address);
        port.map(|port| port.portid).ok_or_else(|| no_listener(nqn, address))
    }

    /// A subsystem, and the port identifier of one of its listeners.
    pub(super) fn listener(
        &mut self,
        nqn: &Nqn,
        address: &ListenAddress,
    ) -> Result<(u16, &mut ConfiguredSubsystem), NvmfTargetError> {
        let portid = self.port(nqn, address);
        let configured = self.subsystems.get_mut(nqn).ok_or_else(|| no_subsystem(nqn))?;
        if !configured.listeners.contains(address) {
            return Err(no_listener(nqn, address));
        }
        Ok((portid?, configured))
    }
}

fn no_listener(nqn: &Nqn, address: &ListenAddress) -> NvmfTargetError {
    NvmfTargetError::NoListener(nqn.as_str().into(), format!("{}:{}", address.traddr, address.trsvcid))
}

/// Closes the sockets of ports that were removed from the configuration.
///
/// # Errors
/// A core does not respond, and closes its sockets when it runs again.
pub(super) fn close_ports(state: &TargetState, ports: &[ListenPort]) -> Result<(), NvmfTargetError> {
    let mut result = Ok(());
    for port in ports {
        // Only the first core listens.
        let Ok(transport) = state.transport(port.kind) else { continue };
        result = transport.stop_listening(port.portid).map_err(|_| NvmfTargetError::Pending(0)).and(result);
    }
    result
}
