//! Target ports of a unit, in groups that share an asymmetric access state (SPC-4, section 5.15).

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use wire_scsi::port_groups::{AccessReason, AccessState, PortGroupDescriptor};
use wire_scsi::{AdditionalSense, Cdb, Sense, SenseKey};

use crate::nexus::NexusPorts;
use crate::response::{Failure, check};

/// A target port through which initiators reach a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetPort {
    /// Its name, as in [`NexusPorts::target`](crate::NexusPorts::target).
    pub name: String,
    /// Relative identifier, from 1.
    pub relative: u16,
    /// The group that it belongs to.
    pub group: u16,
}

impl TargetPort {
    /// The port of an iSCSI target in a portal group, whose tag is its relative identifier and its target port group.
    pub fn iscsi(target: &str, tag: u16) -> TargetPort {
        TargetPort { name: NexusPorts::iscsi_target(target, tag), relative: tag, group: tag }
    }
}

/// The access state of a group, which the nexuses of its ports read with each command.
#[derive(Debug, Default)]
pub(crate) struct GroupAccess(AtomicU8);

impl GroupAccess {
    #[inline]
    pub(crate) fn state(&self) -> AccessState {
        AccessState::from_wire(self.0.load(Ordering::Relaxed)).unwrap_or_default()
    }
}

/// The ports of a unit, and the access states of their groups. Commands take its lock only to report or change them.
#[derive(Debug, Default)]
pub(crate) struct UnitPorts(Mutex<PortTable>);

#[derive(Debug, Default)]
struct PortTable {
    ports: Vec<TargetPort>,
    groups: Vec<PortGroup>,
}

#[derive(Debug)]
struct PortGroup {
    id: u16,
    access: Arc<GroupAccess>,
    reason: AccessReason,
}

impl UnitPorts {
    /// Replaces the ports. Groups that remain keep their state.
    pub(crate) fn set(&self, ports: Vec<TargetPort>) {
        let mut table = sync::lock(&self.0);
        table.groups.retain(|group| ports.iter().any(|port| port.group == group.id));
        for port in &ports {
            table.group(port.group);
        }
        table.ports = ports;
    }

    /// The state of a group. One that is not there yet is active.
    pub(crate) fn access(&self, group: u16) -> Arc<GroupAccess> {
        let table = sync::lock(&self.0);
        let found = table.groups.iter().find(|one| one.id == group);
        found.map_or_else(Arc::default, |group| group.access.clone())
    }

    /// Whether there are groups, so that initiators may ask for them.
    pub(crate) fn has_groups(&self) -> bool {
        !sync::lock(&self.0).groups.is_empty()
    }

    /// Changes the states of groups, of all or none. Returns whether any has changed; `None` if a group is not there.
    pub(crate) fn change(&self, states: &[(u16, AccessState)], reason: AccessReason) -> Option<bool> {
        let mut table = sync::lock(&self.0);
        let has = |id: u16| table.groups.iter().any(|group| group.id == id);
        if !states.iter().all(|(group, _)| has(*group)) {
            return None;
        }
        let mut has_changed = false;
        for (id, state) in states {
            let group = table.group(*id);
            if group.access.0.swap(*state as u8, Ordering::Relaxed) != *state as u8 {
                group.reason = reason;
                has_changed = true;
            }
        }
        Some(has_changed)
    }

    /// The groups with their ports.
    pub(crate) fn describe(&self) -> Vec<PortGroupDescriptor> {
        let table = sync::lock(&self.0);
        let ports = |id: u16| table.ports.iter().filter(move |port| port.group == id);
        let groups = table.groups.iter().map(|group| PortGroupDescriptor {
            group: group.id,
            state: group.access.state(),
            reason: group.reason,
            ports: ports(group.id).map(|port| port.relative).collect(),
        });
        groups.collect()
    }

    /// Names of all ports.
    pub(crate) fn names(&self) -> Vec<String> {
        sync::lock(&self.0).ports.iter().map(|port| port.name.clone()).collect()
    }

    /// The name of a port.
    pub(crate) fn name_of(&self, relative: u16) -> Option<String> {
        let table = sync::lock(&self.0);
        table.ports.iter().find(|port| port.relative == relative).map(|port| port.name.clone())
    }

    /// The relative identifier of a port.
    pub(crate) fn relative_of(&self, name: &str) -> Option<u16> {
        sync::lock(&self.0).ports.iter().find(|port| port.name == name).map(|port| port.relative)
    }
}

impl PortTable {
    fn group(&mut self, id: u16) -> &mut PortGroup {
        let at = self.groups.iter().position(|group| group.id == id).unwrap_or_else(|| {
            self.groups.push(PortGroup { id, access: Arc::default(), reason: AccessReason::None });
            self.groups.len() - 1
        });
        &mut self.groups[at]
    }
}

/// Whether a command is executed in an access state (SPC-4, sections 5.15.2.4 and 5.15.2.5). In standby, initiators may
/// also learn the capacity, as Linux wants to before it uses a path.
#[inline]
pub(crate) fn check_state(state: AccessState, cdb: &Cdb) -> Result<(), Failure> {
    match state {
        AccessState::Optimized | AccessState::NonOptimized => Ok(()),
        AccessState::Standby | AccessState::Unavailable => check_inactive(state, cdb),
    }
}

#[cold]
fn check_inactive(state: AccessState, cdb: &Cdb) -> Result<(), Failure> {
    let is_always = matches!(
        cdb,
        Cdb::Inquiry { .. }
            | Cdb::ReportLuns { .. }
            | Cdb::RequestSense { .. }
            | Cdb::ReportTargetPortGroups { .. }
            | Cdb::SetTargetPortGroups { .. }
    );
    let is_for_standby = matches!(
        cdb,
        Cdb::ModeSense { .. }
            | Cdb::ModeSelect { .. }
            | Cdb::PersistentReserveIn { .. }
            | Cdb::PersistentReserveOut { .. }
            | Cdb::ReadCapacity10 { .. }
            | Cdb::ReadCapacity16 { .. }
            | Cdb::ReportSupportedOpcodes { .. }
            | Cdb::ReportSupportedFunctions { .. }
    );
    if is_always || is_for_standby && state == AccessState::Standby {
        return Ok(());
    }
    let additional = match state {
        AccessState::Standby => AdditionalSense::TARGET_PORT_STANDBY,
        _ => AdditionalSense::TARGET_PORT_UNAVAILABLE,
    };
    Err(check(Sense::new(SenseKey::NotReady, additional)))
}
