//! Changes of the configuration: published to every core, or undone.

use std::sync::Arc;

use nvme_controller::{AllowedHosts, DiscoveryLog, DiscoveryRecord, Subsystem, SubsystemListener};
use sockets::CoreNetwork;
use target_shell::{CORE_TIMEOUT, NotApplied};
use wire_nvme::fabrics::Nqn;
use wire_nvme::log::SubsystemType;

use super::{ConfiguredSubsystem, ListenPort, NvmfTarget, TargetState};
use crate::NvmfTargetError;
use crate::address::transport_address;
use crate::snapshot::ConfigSnapshot;

/// What a change of a subsystem alters, as it was before.
#[derive(Clone)]
pub(super) struct Checkpoint {
    nqn: Nqn,
    /// `None` if it did not exist.
    subsystem: Option<ConfiguredSubsystem>,
    ports: Vec<ListenPort>,
}

impl<N: CoreNetwork> NvmfTarget<N> {
    /// Publishes the changed configuration and waits until every core has applied it. Otherwise the configuration
    /// is as it was at the checkpoint again, on the cores too.
    pub(super) fn commit(
        &self,
        state: &mut TargetState<N>,
        before: Checkpoint,
    ) -> Result<(), NvmfTargetError> {
        let config = state.snapshot();
        let published = self.0.publisher.change_with(config, CORE_TIMEOUT, || {
            state.restore(before);
            state.snapshot()
        });
        match published {
            Ok(_) => Ok(()),
            Err(NotApplied { stopped: true, .. }) => Err(NvmfTargetError::Stopping),
            Err(NotApplied { core, .. }) => Err(NvmfTargetError::Unresponsive(core)),
        }
    }

    /// Publishes a change that cannot be undone.
    ///
    /// # Errors
    /// A core has not applied it in time, and does when it runs again.
    pub(super) fn commit_always(&self, state: &mut TargetState<N>) -> Result<(), NvmfTargetError> {
        let generation = self.0.publisher.publish(state.snapshot());
        self.wait_applied(generation)
    }

    /// Waits until every core has applied a snapshot.
    ///
    /// # Errors
    /// As [`commit_always`](Self::commit_always).
    pub(super) fn wait_applied(&self, generation: u64) -> Result<(), NvmfTargetError> {
        match self.0.publisher.wait_applied(generation, CORE_TIMEOUT) {
            Err(NotApplied { core, stopped: false }) => Err(NvmfTargetError::Pending(core)),
            // A core that has stopped has no connections and has nothing to apply.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Assigns a key to a block device.
    pub(super) fn allocate_backend(&self, state: &mut TargetState<N>) -> u32 {
        let applied = self.0.publisher.applied_by_all();
        let free = state.retired_backends.iter().position(|(generation, _)| *generation <= applied);
        if let Some(index) = free {
            return state.retired_backends.swap_remove(index).1;
        }
        state.backends_allocated += 1;
        state.backends_allocated - 1
    }

    /// Returns the key of a block device that the latest snapshot does not contain. It is assigned again when every
    /// core has applied that snapshot: until then one may have a channel to the device.
    pub(super) fn retire_backend(&self, state: &mut TargetState<N>, backend: u32) {
        state.retired_backends.push((self.0.publisher.generation(), backend));
    }
}

impl<N: CoreNetwork> TargetState<N> {
    /// The state to return to if a change of a subsystem fails.
    pub(super) fn checkpoint(&self, nqn: &Nqn) -> Checkpoint {
        let subsystem = self.subsystems.get(nqn).cloned();
        Checkpoint { nqn: nqn.clone(), subsystem, ports: self.ports.clone() }
    }

    /// Returns to a checkpoint.
    pub(super) fn restore(&mut self, before: Checkpoint) {
        self.ports = before.ports;
        match before.subsystem {
            Some(subsystem) => _ = self.subsystems.insert(before.nqn, subsystem),
            None => _ = self.subsystems.remove(&before.nqn),
        }
    }

    /// The configuration as cores see it, with a new generation of the discovery log.
    pub(super) fn snapshot(&mut self) -> Arc<ConfigSnapshot> {
        self.generation += 1;
        let mut snapshot =
            ConfigSnapshot { discovery: Arc::new(self.discovery()), ..ConfigSnapshot::default() };
        let discovery = Nqn::discovery();
        let listeners =
            self.ports.iter().map(|port| SubsystemListener { portid: port.portid, ana: Vec::new() });
        let discovery_subsystem =
            Subsystem { listeners: listeners.collect(), ..Subsystem::discovery(discovery.clone()) };
        snapshot.subsystems.insert(discovery, Arc::new(discovery_subsystem));
        for (nqn, configured) in &self.subsystems {
            // An empty list would mean every port. A subsystem without listeners gets a port that does not exist.
            if configured.subsystem.listeners.is_empty() {
                let unreachable = vec![SubsystemListener { portid: 0, ana: Vec::new() }];
                let hidden = Subsystem { listeners: unreachable, ..(*configured.subsystem).clone() };
                snapshot.subsystems.insert(nqn.clone(), Arc::new(hidden));
            } else {
                snapshot.subsystems.insert(nqn.clone(), configured.subsystem.clone());
            }
            for namespace in &configured.subsystem.namespaces {
                if let Some(descriptor) = configured.descriptors.get(&namespace.nsid) {
                    snapshot.devices.insert(namespace.backend, descriptor.clone());
                }
            }
        }
        Arc::new(snapshot)
    }

    /// The discovery log: one record for each listener of each subsystem, and of the discovery service itself.
    fn discovery(&self) -> DiscoveryLog {
        let mut records = Vec::new();
        let nvm = self.subsystems.iter().flat_map(|(nqn, configured)| {
            let hosts = if configured.subsystem.allow_any_host {
                AllowedHosts::Any
            } else {
                AllowedHosts::Only(configured.subsystem.hosts.clone())
            };
            let ports = self.ports.iter().filter(|port| configured.listeners.contains(&port.address));
            ports.map(move |port| (nqn.clone(), SubsystemType::Nvm, port, hosts.clone()))
        });
        let service = self
            .ports
            .iter()
            .map(|port| (Nqn::discovery(), SubsystemType::CurrentDiscovery, port, AllowedHosts::Any));
        for (subnqn, subtype, port, hosts) in service.chain(nvm) {
            let Ok(socket) = port.address.socket() else { continue };
            let address = transport_address(socket);
            records.push(DiscoveryRecord { subnqn, subtype, address, portid: port.portid, hosts });
        }
        DiscoveryLog { generation: self.generation, records }
    }
}
