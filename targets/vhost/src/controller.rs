//! Controllers, and the configuration that the cores see.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use target_shell::{DeviceMap, TargetConfig};

use crate::backend::{Backend, ScsiUnit};
use crate::coalescing::Coalescing;

/// A virtio device behind a socket, as its clients see it.
#[derive(Clone, Debug)]
pub(crate) struct Controller {
    /// Identifies it as long as the target lives; a change keeps it.
    pub(crate) id: u64,
    /// Its listener.
    pub(crate) portid: u16,
    pub(crate) name: String,
    pub(crate) backend: Backend,
    pub(crate) coalescing: Coalescing,
    /// Indexes of the reactors that may serve its connections.
    pub(crate) reactors: Arc<[usize]>,
    /// Closed connections with requests in flight.
    pub(crate) closing: Arc<AtomicU32>,
}

impl Controller {
    pub(crate) fn new(
        id: u64,
        portid: u16,
        name: &str,
        backend: Backend,
        reactors: Arc<[usize]>,
    ) -> Controller {
        let coalescing = Coalescing::default();
        Controller {
            id,
            portid,
            name: name.to_string(),
            backend,
            coalescing,
            reactors,
            closing: Arc::default(),
        }
    }
}

/// The configuration of the target, published to all cores.
#[derive(Default)]
pub(crate) struct VhostConfig {
    pub(crate) controllers: Vec<Arc<Controller>>,
    pub(crate) devices: DeviceMap,
}

impl VhostConfig {
    pub(crate) fn of_port(&self, portid: u16) -> Option<&Arc<Controller>> {
        self.controllers.iter().find(|controller| controller.portid == portid)
    }

    pub(crate) fn by_id(&self, id: u64) -> Option<&Arc<Controller>> {
        self.controllers.iter().find(|controller| controller.id == id)
    }

    /// The logical units of all controllers.
    pub(crate) fn units(&self) -> impl Iterator<Item = &ScsiUnit> {
        let targets = self.controllers.iter().filter_map(|controller| match &controller.backend {
            Backend::Blk(_) => None,
            Backend::Scsi(scsi) => Some(scsi.targets.iter().flatten()),
        });
        targets.flatten()
    }
}

impl TargetConfig for VhostConfig {
    fn devices(&self) -> &DeviceMap {
        &self.devices
    }
}
