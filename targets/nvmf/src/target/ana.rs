//! Asymmetric namespace access: how each address reaches each group.

use wire_nvme::log::AnaState;

use super::{Target, no_subsystem, parse_nqn};
use crate::{ListenAddress, TargetError};

impl Target {
    /// Says how an address reaches an ANA group of a subsystem, or all its groups. Hosts are told.
    ///
    /// The subsystem must report ANA. `Change` is a state like the others: it lasts until the next call.
    pub fn set_ana_state(
        &self,
        nqn: &str,
        address: ListenAddress,
        group: Option<u32>,
        ana: AnaState,
    ) -> Result<(), TargetError> {
        let nqn = parse_nqn(nqn)?;
        let wanted = address.normal()?;
        let mut state = self.lock()?;
        let (portid, configured) = state.listener(&nqn, &wanted)?;
        if !configured.subsystem.ana_reporting {
            let message = format!("subsystem {nqn} was made without ana_reporting");
            return Err(TargetError::Parameter(message));
        }
        let groups_max = configured.subsystem.namespaces_max;
        if group.is_some_and(|group| group == 0 || group > groups_max) {
            return Err(TargetError::Parameter(format!("ANA groups are 1 to {groups_max}")));
        }
        configured.change(|subsystem| {
            let of = subsystem.listeners.iter_mut().filter(|listener| listener.portid == portid);
            for listener in of {
                match group {
                    Some(group) => listener.ana.retain(|(id, _)| *id != group),
                    None => listener.ana.clear(),
                }
                let groups = group.map_or(1..=groups_max, |group| group..=group);
                // What is not listed is optimized.
                let listed = groups.filter(|_| ana != AnaState::Optimized).map(|group| (group, ana));
                listener.ana.extend(listed);
            }
        });
        self.publish(&mut state)
    }

    /// How an address reaches the ANA groups of a subsystem that have namespaces, by rising group.
    pub fn ana_states(
        &self,
        nqn: &str,
        address: &ListenAddress,
    ) -> Result<Vec<(u32, AnaState)>, TargetError> {
        let nqn = parse_nqn(nqn)?;
        let state = self.lock_any();
        let configured = state.subsystems.get(&nqn).ok_or_else(|| no_subsystem(&nqn))?;
        let port = state.ports.iter().find(|port| port.address == *address);
        let portid = port.map_or(0, |port| port.portid);
        let subsystem = &configured.subsystem;
        let of = |group| (group, subsystem.ana_state(portid, group));
        Ok(subsystem.ana_groups().into_iter().map(of).collect())
    }
}
