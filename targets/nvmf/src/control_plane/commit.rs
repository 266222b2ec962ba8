//! Changes of the configuration: published to every core, or undone.

use std::sync::Arc;

use nvme_controller::{AllowedHosts, DiscoveryLog, DiscoveryRecord, Subsystem, SubsystemListener};
use sockets::ServerNetwork;
use target_shell::{CORE_TIMEOUT, NotApplied};
use wire_nvme::fabrics::Nqn;
use wire_nvme::log::SubsystemType;

use super::{ConfiguredSubsystem, ListenPort, NvmfTarget, Referral, TargetState};
use crate::NvmfTargetError;
use crate::snapshot::{ConfigSnapshot, SubsystemMap};

/// What a change of a subsystem alters, as it was before.
#[derive(Clone)]
pub(super) struct Checkpoint {
    nqn: Nqn,
    /// `None` if it did not exist.
    subsystem: Option<ConfiguredSubsystem>,
    ports: Arc<Vec<ListenPort>>,
    referrals: Arc<Vec<Referral>>,
}

impl<N: ServerNetwork> NvmfTarget<N> {
    /// Publishes the changed configuration and waits until every core has applied it. Otherwise the
    /// configuration is as it was at the checkpoint again, on the cores too.
    pub(super) fn commit(&self, state: &mut TargetState, before: Checkpoint) -> Result<(), NvmfTargetError> {
        let nqn = before.nqn.clone();
        let previous = before.subsystem.as_ref().map(|configured| configured.subsystem.clone());
        let config = state.snapshot(&nqn);
        let published = self.0.publisher().change_with(config, CORE_TIMEOUT, || {
            state.restore(before);
            state.snapshot(&nqn)
        });
        match published {
            Ok(_) => {
                if let Some(configured) = state.subsystems.get(&nqn) {
                    record_namespaces(previous.as_deref(), &configured.subsystem);
                }
                Ok(())
            }
            Err(NotApplied { stopped: true, .. }) => Err(NvmfTargetError::Stopping),
            Err(NotApplied { core, .. }) => Err(NvmfTargetError::Unresponsive(core)),
        }
    }

    /// Publishes a change of a subsystem that cannot be undone.
    ///
    /// # Errors
    /// A core has not applied it in time, and does when it runs again.
    pub(super) fn commit_always(
        &self,
        state: &mut TargetState,
        changed: &Nqn,
    ) -> Result<(), NvmfTargetError> {
        let generation = self.0.publisher().publish(state.snapshot(changed));
        self.wait_applied(generation)
    }

    /// Waits until every core has applied a snapshot.
    ///
    /// # Errors
    /// As [`commit_always`](Self::commit_always).
    pub(super) fn wait_applied(&self, generation: u64) -> Result<(), NvmfTargetError> {
        match self.0.publisher().wait_applied(generation, CORE_TIMEOUT) {
            Err(NotApplied { core, stopped: false }) => Err(NvmfTargetError::Pending(core)),
            // A core that has stopped has no connections and has nothing to apply.
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

/// Records namespaces that a change of a subsystem has created or deleted.
fn record_namespaces(before: Option<&Subsystem>, after: &Subsystem) {
    for created in &after.namespaces {
        if before.is_none_or(|before| before.namespace(created.nsid).is_none()) {
            after.persistent_events.namespace_created(created, after.ana_reporting);
        }
    }
    for deleted in before.iter().flat_map(|before| &before.namespaces) {
        if after.namespace(deleted.nsid).is_none() {
            after.persistent_events.namespace_deleted(deleted);
        }
    }
}

/// Milliseconds since 1970; 0 before.
pub(super) fn unix_ms() -> u64 {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed();
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

impl TargetState {
    /// The state to return to if a change of a subsystem fails.
    pub(super) fn checkpoint(&self, nqn: &Nqn) -> Checkpoint {
        let subsystem = self.subsystems.get(nqn).cloned();
        Checkpoint {
            nqn: nqn.clone(),
            subsystem,
            ports: self.ports.clone(),
            referrals: self.referrals.clone(),
        }
    }

    /// Returns to a checkpoint.
    pub(super) fn restore(&mut self, before: Checkpoint) {
        (self.ports, self.referrals) = (before.ports, before.referrals);
        if let Some(changed) = self.subsystems.remove(&before.nqn) {
            self.release_ports(&changed);
        }
        if let Some(subsystem) = before.subsystem {
            self.use_ports(&subsystem);
            self.subsystems.insert(before.nqn, subsystem);
        }
    }

    /// The configuration as cores see it after a change of one subsystem, and of the ports. The discovery log
    /// gets a new generation if it changes. The cost is that of the subsystem, and that of all ports if one
    /// was opened or closed.
    pub(super) fn snapshot(&mut self, changed: &Nqn) -> Arc<ConfigSnapshot> {
        let mut snapshot = (*self.published).clone();
        let previous = snapshot.subsystems.remove(changed).filter(|_| !changed.is_discovery());
        for namespace in previous.iter().flat_map(|subsystem| &subsystem.namespaces) {
            snapshot.devices.remove(&namespace.backend);
        }
        let configured = self.subsystems.get(changed);
        if let Some(configured) = configured {
            snapshot.subsystems.insert(changed.clone(), configured.published());
            for namespace in &configured.subsystem.namespaces {
                if let Some(descriptor) = configured.descriptors.get(&namespace.nsid) {
                    snapshot.devices.insert(namespace.backend, descriptor.clone());
                }
            }
        }
        let ports_changed =
            self.published_ports.as_ref().is_none_or(|published| !Arc::ptr_eq(published, &self.ports));
        // A change of referrals is one of the discovery service, which was taken out of the snapshot for it.
        if ports_changed || changed.is_discovery() {
            let discovery = Nqn::discovery();
            let portids = self.ports.iter().map(|port| port.portid);
            let listeners = portids.map(|portid| SubsystemListener { portid, ana: Vec::new() }).collect();
            let service = Subsystem { listeners, ..Subsystem::discovery(discovery.clone()) };
            snapshot.subsystems.insert(discovery, Arc::new(service));
            self.published_ports = Some(self.ports.clone());
        }
        let subsystem = configured.map(|configured| &*configured.subsystem);
        let referrals_changed = !Arc::ptr_eq(&self.referrals, &self.published_referrals);
        if ports_changed || referrals_changed || !is_same_in_discovery(previous.as_deref(), subsystem) {
            self.published_referrals = self.referrals.clone();
            snapshot.discovery = self.next_discovery_log(&snapshot);
        }
        self.published = Arc::new(snapshot);
        self.published.clone()
    }

    /// A discovery log of the next generation.
    pub(super) fn next_discovery_log(&mut self, snapshot: &ConfigSnapshot) -> Arc<DiscoveryLog> {
        self.generation += 1;
        let (ports, subsystems) = (self.ports.clone(), snapshot.subsystems.clone());
        let referrals = self.referrals.clone();
        let records = move || discovery_records(&ports, &subsystems, &referrals);
        let log = DiscoveryLog::new(self.generation, records);
        Arc::new(log.with_filter(snapshot.options.discovery_filter))
    }
}

/// The discovery log: one record for each listener of each subsystem that hosts find by discovery, and of the
/// discovery service itself; then the referrals.
fn discovery_records(
    ports: &[ListenPort],
    subsystems: &SubsystemMap,
    referrals: &[Referral],
) -> Vec<DiscoveryRecord> {
    let mut sorted: Vec<&Arc<Subsystem>> = subsystems.values().collect();
    sorted.retain(|subsystem| !subsystem.nqn.is_discovery());
    sorted.sort_by(|one, other| one.nqn.cmp(&other.nqn));
    let nvm = sorted.into_iter().flat_map(|subsystem| {
        let hosts = match subsystem.allow_any_host {
            true => AllowedHosts::Any,
            false => AllowedHosts::Only(subsystem.hosts.clone()),
        };
        let ports = ports.iter().filter(|port| subsystem.listens_on(port.portid));
        ports.filter_map(move |port| {
            let admin_label = subsystem.admin_label.clone();
            let record = port_record(port, subsystem.nqn.clone(), SubsystemType::Nvm)?;
            Some(DiscoveryRecord { hosts: hosts.clone(), admin_label, ..record })
        })
    });
    let service = |port| port_record(port, Nqn::discovery(), SubsystemType::CurrentDiscovery);
    let mut records: Vec<DiscoveryRecord> = ports.iter().filter_map(service).chain(nvm).collect();
    records.extend(referrals.iter().map(Referral::record));
    records
}

/// The record of a port, for every host; `None` if hosts do not find it by discovery.
fn port_record(port: &ListenPort, subnqn: Nqn, subtype: SubsystemType) -> Option<DiscoveryRecord> {
    Some(DiscoveryRecord {
        subnqn,
        subtype,
        address: port.kind.discovery_address(&port.address)?,
        portid: port.portid,
        secure_channel: port.secure,
        hosts: AllowedHosts::Any,
        admin_label: None,
    })
}

impl ConfiguredSubsystem {
    /// The subsystem as cores see it. An empty list of listeners would mean every port: a subsystem without
    /// any gets a port that does not exist.
    fn published(&self) -> Arc<Subsystem> {
        if !self.subsystem.listeners.is_empty() {
            return self.subsystem.clone();
        }
        let unreachable = vec![SubsystemListener { portid: UNREACHABLE, ana: Vec::new() }];
        Arc::new(Subsystem { listeners: unreachable, ..(*self.subsystem).clone() })
    }
}

/// Number of a port that does not exist.
const UNREACHABLE: u16 = 0;

/// Whether the discovery log has the same records for a subsystem as it is published and as it is configured.
fn is_same_in_discovery(published: Option<&Subsystem>, configured: Option<&Subsystem>) -> bool {
    let ports = |subsystem: Option<&Subsystem>| -> Vec<u16> {
        let listeners = subsystem.iter().flat_map(|subsystem| &subsystem.listeners);
        listeners.map(|listener| listener.portid).filter(|portid| *portid != UNREACHABLE).collect()
    };
    let (before, after) = (ports(published), ports(configured));
    before == after
        && (after.is_empty()
            || published.zip(configured).is_some_and(|(published, configured)| {
                published.allow_any_host == configured.allow_any_host && published.hosts == configured.hosts
            }))
}
