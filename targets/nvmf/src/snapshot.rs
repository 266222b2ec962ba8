//! The configuration as poll groups see it.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;

use block_io::Op;
use nvme_auth::AuthOptions;
use nvme_controller::{ControllerLimits, DiscoveryFilter, DiscoveryLog, HealthCounters, Subsystem};
use target_shell::{DeviceMap, TargetConfig};
use wire_nvme::fabrics::Nqn;

/// An immutable snapshot of the whole configuration. Every change publishes a new one to all poll groups.
/// Snapshots share what a change leaves as it was, so that its cost does not depend on how much there is.
#[derive(Clone, Default)]
pub(crate) struct ConfigSnapshot {
    pub(crate) subsystems: SubsystemMap,
    /// The block devices of namespaces, by `Namespace::backend`.
    pub(crate) devices: DeviceMap,
    pub(crate) discovery: Arc<DiscoveryLog>,
    /// The hash functions and groups that hosts may authenticate with.
    pub(crate) auth_options: Arc<AuthOptions>,
    /// Options of all subsystems.
    pub(crate) options: TargetOptions,
}

/// Options of a target that concern all its subsystems. Controllers have those with which they were created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetOptions {
    /// Delays before a host that honours them (ACRE) retries a command, in units of 100 ms (CRDT1 to CRDT3).
    /// Failed commands select the first.
    pub retry_delays_100ms: [u16; 3],
    /// Which records of the discovery log a host sees.
    pub discovery_filter: DiscoveryFilter,
    /// A host may have one controller of a subsystem on each listener.
    pub one_controller_per_listener: bool,
}

/// Shards of a [`SubsystemMap`]: a change copies one, and the list of shards.
const SHARDS: usize = 256;

type Hasher = BuildHasherDefault<DefaultHasher>;
type Shard = HashMap<Nqn, Arc<Subsystem>, Hasher>;

/// Subsystems by NQN. A clone shares its shards with the original until one of them changes.
#[derive(Clone)]
pub(crate) struct SubsystemMap(Vec<Arc<Shard>>);

impl Default for SubsystemMap {
    fn default() -> Self {
        SubsystemMap(vec![Arc::default(); SHARDS])
    }
}

impl SubsystemMap {
    pub(crate) fn get(&self, nqn: &Nqn) -> Option<&Arc<Subsystem>> {
        self.0[shard(nqn)].get(nqn)
    }

    /// All, in no order.
    pub(crate) fn values(&self) -> impl Iterator<Item = &Arc<Subsystem>> {
        self.0.iter().flat_map(|shard| shard.values())
    }

    pub(crate) fn insert(&mut self, nqn: Nqn, subsystem: Arc<Subsystem>) {
        Arc::make_mut(&mut self.0[shard(&nqn)]).insert(nqn, subsystem);
    }

    /// Removes and returns a subsystem.
    pub(crate) fn remove(&mut self, nqn: &Nqn) -> Option<Arc<Subsystem>> {
        self.get(nqn)?;
        Arc::make_mut(&mut self.0[shard(nqn)]).remove(nqn)
    }
}

fn shard(nqn: &Nqn) -> usize {
    Hasher::default().hash_one(nqn) as usize % SHARDS
}

impl TargetConfig for ConfigSnapshot {
    fn devices(&self) -> &DeviceMap {
        &self.devices
    }
}

impl ConfigSnapshot {
    /// The subsystem with this NQN; the discovery subsystem is included.
    pub(crate) fn subsystem(&self, nqn: &Nqn) -> Option<Arc<Subsystem>> {
        self.subsystems.get(nqn).cloned()
    }

    /// The limits of a new controller on a transport with these.
    pub(crate) fn controller_limits(&self, transport: &ControllerLimits) -> Arc<ControllerLimits> {
        Arc::new(ControllerLimits {
            retry_delays_100ms: self.options.retry_delays_100ms,
            one_controller_per_listener: self.options.one_controller_per_listener,
            ..transport.clone()
        })
    }

    /// The subsystem that listens on a port; of several, any. The discovery subsystem is not included.
    pub(crate) fn subsystem_on(&self, portid: u16) -> Option<&Arc<Subsystem>> {
        let mut subsystems = self.subsystems.values();
        subsystems.find(|subsystem| !subsystem.nqn.is_discovery() && subsystem.listens_on(portid))
    }

    /// The counters for the SMART / Health log page of the controllers that a host has in a subsystem: sums
    /// over the namespaces that it sees.
    pub(crate) fn health(&self, subsystem: &Subsystem, host: &Nqn) -> HealthCounters {
        let mut health = HealthCounters::default();
        for namespace in subsystem.namespaces.iter().filter(|namespace| namespace.is_visible_to(host)) {
            let Some(descriptor) = self.devices.get(&namespace.backend) else { continue };
            let stats = descriptor.device().stats();
            let (read, write) = (stats.op(Op::Read), stats.op(Op::Write));
            health.bytes_read += u128::from(read.bytes);
            health.bytes_written += u128::from(write.bytes);
            health.reads += u128::from(read.ops);
            health.writes += u128::from(write.ops);
            health.media_errors += stats.errors();
        }
        health
    }
}
