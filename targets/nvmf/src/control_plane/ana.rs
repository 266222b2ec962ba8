//! Asymmetric Namespace Access (ANA): the state of each ANA group at each listener.

use sockets::ServerNetwork;
use wire_nvme::log::AnaState;

use super::{NvmfTarget, no_subsystem, parse_nqn};
use crate::{ListenAddress, NvmfTargetError};

impl<N: ServerNetwork> NvmfTarget<N> {
    /// Sets the ANA state of one group (or of all groups) at a listener. Hosts get an ANA Change event.
    ///
    /// The subsystem must report ANA. `Change` is set like every other state and stays until the next call.
    ///
    /// # Errors
    /// There is no such subsystem or listener, the subsystem does not report ANA, or the group is out of range.
    pub fn set_ana_state(
        &self,
        nqn: &str,
        address: ListenAddress,
        group: Option<u32>,
        ana: AnaState,
    ) -> Result<(), NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        let normalized = address.normalized()?;
        let mut state = self.lock()?;
        let before = state.checkpoint(&nqn);
        let (portid, configured) = state.listener(&nqn, &normalized)?;
        if !configured.subsystem.ana_reporting {
            let message = format!("subsystem {nqn} was created without ana_reporting");
            return Err(NvmfTargetError::Parameter(message));
        }
        let groups_max = configured.subsystem.namespaces_max;
        if let Some(group) = group {
            check_group(group, groups_max)?;
        }
        configured.change(|subsystem| {
            let at_port = subsystem.listeners.iter_mut().filter(|listener| listener.portid == portid);
            for listener in at_port {
                match group {
                    Some(group) => listener.ana.retain(|(id, _)| *id != group),
                    None => listener.ana.clear(),
                }
                let groups = group.map_or(1..=groups_max, |group| group..=group);
                // A group without an entry is optimized.
                let not_optimized = groups.filter(|_| ana != AnaState::Optimized).map(|group| (group, ana));
                listener.ana.extend(not_optimized);
            }
        });
        self.commit(&mut state, before)
    }

    /// Moves a namespace to another ANA group. Hosts get the events of a changed namespace and, if the states of groups
    /// differ now, of ANA.
    ///
    /// # Errors
    /// There is no such subsystem or namespace, the subsystem does not report ANA, or the group is out of range.
    pub fn set_ana_group(&self, nqn: &str, nsid: u32, group: u32) -> Result<(), NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        let mut state = self.lock()?;
        let before = state.checkpoint(&nqn);
        let configured = state.subsystems.get_mut(&nqn).ok_or_else(|| no_subsystem(&nqn))?;
        let subsystem = &configured.subsystem;
        if !subsystem.ana_reporting {
            let message = format!("subsystem {nqn} was created without ana_reporting");
            return Err(NvmfTargetError::Parameter(message));
        }
        check_group(group, subsystem.namespaces_max)?;
        if subsystem.namespace(nsid).is_none() {
            return Err(NvmfTargetError::NoNamespace(nqn.as_str().into(), nsid));
        }
        configured.change(|subsystem| {
            let moved = subsystem.namespaces.iter_mut().find(|namespace| namespace.nsid == nsid);
            moved.into_iter().for_each(|namespace| namespace.anagrpid = group);
        });
        self.commit(&mut state, before)
    }

    /// ANA states at a listener, for the ANA groups that have namespaces, in ascending order.
    pub fn ana_states(
        &self,
        nqn: &str,
        address: &ListenAddress,
    ) -> Result<Vec<(u32, AnaState)>, NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        let state = self.lock_any();
        let configured = state.subsystems.get(&nqn).ok_or_else(|| no_subsystem(&nqn))?;
        let port = state.ports.iter().find(|port| port.address == *address);
        let portid = port.map_or(0, |port| port.portid);
        let subsystem = &configured.subsystem;
        let state_of = |group| (group, subsystem.ana_state(portid, group));
        Ok(subsystem.ana_groups().into_iter().map(state_of).collect())
    }
}

/// Fails unless a subsystem of so many namespaces at most has this ANA group.
pub(super) fn check_group(group: u32, groups_max: u32) -> Result<(), NvmfTargetError> {
    if (1..=groups_max).contains(&group) {
        return Ok(());
    }
    Err(NvmfTargetError::Parameter(format!("anagrpid: ANA groups are 1 to {groups_max}, not {group}")))
}
