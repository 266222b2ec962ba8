//! Listeners: addresses of subsystems, and the sockets of the transports.

use std::sync::Arc;

use nvme_controller::SubsystemListener;
use sockets::CoreNetwork;
use target_shell::ShellError;
use wire_nvme::fabrics::Nqn;

use super::{ConfiguredSubsystem, ListenPort, NvmfTarget, TargetState, no_subsystem, parse_nqn};
use crate::address::ListenAddress;
use crate::failure::NvmfTargetError;
use crate::vfio_user;

impl<N: CoreNetwork> NvmfTarget<N> {
    /// Adds a listener to a subsystem; opens the address if no other subsystem listens on it. Returns the
    /// address, with the port that the kernel assigned for port 0.
    pub fn add_listener(&self, nqn: &str, address: ListenAddress) -> Result<ListenAddress, NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        let normalized = address.normalized()?;
        if normalized.is_vfio_user() {
            return self.add_endpoint(nqn, normalized);
        }
        let socket = address.socket()?;
        let mut state = self.lock()?;
        if !nqn.is_discovery() && !state.subsystems.contains_key(&nqn) {
            return Err(no_subsystem(&nqn));
        }
        let existing = state.ports.iter().find(|port| port.address == normalized).map(|port| port.portid);
        if existing.is_some() && nqn.is_discovery() {
            return Ok(normalized);
        }
        let before = state.checkpoint(&nqn);
        let portid = match existing {
            Some(portid) => portid,
            None => {
                let portid = state.last_portid.wrapping_add(1).max(1);
                let transport = state.transport.as_ref().ok_or(NvmfTargetError::NoTransport("TCP"))?;
                let bound = transport.cores.listen(&socket.into(), portid)?.tcp().unwrap_or(socket);
                state.last_portid = portid;
                let address = ListenAddress::from_socket(bound);
                Arc::make_mut(&mut state.ports).push(ListenPort { portid, address });
                portid
            }
        };
        let port = state.ports.iter().find(|port| port.portid == portid);
        let bound = port.map_or(normalized, |port| port.address.clone());
        if let Some(configured) = state.subsystems.get_mut(&nqn) {
            if configured.listeners.contains(&bound) {
                return Err(NvmfTargetError::ListenerExists(nqn.as_str().into(), socket.to_string()));
            }
            configured.listeners.push(bound.clone());
            configured
                .change(|subsystem| subsystem.listeners.push(SubsystemListener { portid, ana: Vec::new() }));
            *state.port_users.entry(portid).or_default() += 1;
        }
        if let Err(error) = self.commit(&mut state, before) {
            if existing.is_none()
                && let Some(transport) = &state.transport
            {
                // A core that does not respond closes it when it runs again.
                _ = transport.cores.unlisten(Some(portid));
            }
            return Err(error);
        }
        Ok(bound)
    }

    /// Adds a vfio-user endpoint: a directory with one socket, one subsystem, and one client at a time.
    fn add_endpoint(&self, nqn: Nqn, address: ListenAddress) -> Result<ListenAddress, NvmfTargetError> {
        let mut state = self.lock()?;
        if !state.subsystems.contains_key(&nqn) {
            return Err(no_subsystem(&nqn));
        }
        if state.ports.iter().any(|port| port.address == address) {
            return Err(NvmfTargetError::ListenerExists("there".into(), address.traddr));
        }
        let portid = state.last_portid.wrapping_add(1).max(1);
        if state.vfio_user.is_none() {
            return Err(NvmfTargetError::NoTransport("VFIOUSER"));
        }
        // The subsystem must list the port before the first client connects.
        let before = state.checkpoint(&nqn);
        state.last_portid = portid;
        Arc::make_mut(&mut state.ports).push(ListenPort { portid, address: address.clone() });
        if let Some(configured) = state.subsystems.get_mut(&nqn) {
            configured.listeners.push(address.clone());
            configured
                .change(|subsystem| subsystem.listeners.push(SubsystemListener { portid, ana: Vec::new() }));
            *state.port_users.entry(portid).or_default() += 1;
        }
        self.commit(&mut state, before.clone())?;
        let transport = state.vfio_user.as_ref().ok_or(NvmfTargetError::NoTransport("VFIOUSER"))?;
        let socket = vfio_user::endpoint_address(&address.traddr);
        let Err(error) = transport.cores.listen(&socket, portid) else { return Ok(address) };
        state.restore(before);
        // The answer is the first error. A core that does not respond applies this when it runs again.
        _ = self.commit_always(&mut state, &nqn);
        Err(error.into())
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

    /// Closes all TCP listeners; existing connections stay. Each port is free when this returns. Without this
    /// call, the kernel releases what io_uring holds of an exited process only some time later.
    pub fn stop_listening(&self) -> Result<(), NvmfTargetError> {
        let state = self.lock()?;
        let mut ports = state.ports.iter().filter(|port| !port.address.is_vfio_user());
        Ok(ports.try_for_each(|port| close_port(&state, port))?)
    }
}

impl<N: CoreNetwork> TargetState<N> {
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
pub(super) fn close_ports<N: CoreNetwork>(
    state: &TargetState<N>,
    ports: &[ListenPort],
) -> Result<(), NvmfTargetError> {
    let mut result = Ok(());
    for port in ports {
        // Only the first core listens.
        result = close_port(state, port).map_err(|_| NvmfTargetError::Pending(0)).and(result);
    }
    result
}

fn close_port<N: CoreNetwork>(state: &TargetState<N>, port: &ListenPort) -> Result<(), ShellError> {
    let portid = Some(port.portid);
    match (&state.transport, &state.vfio_user) {
        (_, Some(transport)) if port.address.is_vfio_user() => transport.cores.unlisten(portid),
        (Some(transport), _) => transport.cores.unlisten(portid),
        _ => Ok(()),
    }
}
