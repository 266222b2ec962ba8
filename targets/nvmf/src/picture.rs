//! The configuration as groups see it.

use std::collections::HashMap;
use std::sync::Arc;

use bdev::Descriptor;
use controller::{DiscoveryLog, HealthCounters, Subsystem};
use ring::Op;
use wire_nvme::fabrics::Nqn;

/// Everything that is configured, at one moment. Made anew for every change, and never changed.
#[derive(Default)]
pub(crate) struct Picture {
    pub(crate) subsystems: HashMap<Nqn, Arc<Subsystem>>,
    /// The devices behind namespaces, by the key that namespaces have.
    pub(crate) devices: HashMap<u32, Arc<Descriptor>>,
    pub(crate) discovery: Arc<DiscoveryLog>,
}

impl Picture {
    /// The subsystem of this name, the discovery subsystem included.
    pub(crate) fn subsystem(&self, nqn: &Nqn) -> Option<Arc<Subsystem>> {
        self.subsystems.get(nqn).cloned()
    }

    /// What the health log of a subsystem's controllers says.
    pub(crate) fn health(&self, subsystem: &Subsystem) -> HealthCounters {
        let mut health = HealthCounters::default();
        for namespace in &subsystem.namespaces {
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
