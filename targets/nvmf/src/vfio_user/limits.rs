//! Options of the vfio-user transport, and the limits derived from them.

use wire_nvme::log::TransportType;

use super::function::QUEUES_MAX;
use super::pci::VENDOR;
use crate::failure::NvmfTargetError;

/// Options of the vfio-user transport, by the names of the RPC `nvmf_create_transport`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VfioUserConfig {
    /// Entries of an I/O queue, 2 to 65536. SPDK's initiator takes a quarter of them as completions at a time: with 1024 by
    /// default it would take all of 128 in flight, and wait.
    pub max_queue_depth: u32,
    /// I/O queues of a controller, 1 to 511: the doorbells are one page.
    pub max_io_qpairs_per_ctrlr: u16,
    /// Maximum bytes of one command (MDTS), a power of two from 8192.
    pub max_io_size: u32,
    /// Clients cannot map doorbells and write them by message, each of which wakes the core. Slow, but an idle
    /// client costs no CPU time.
    pub disable_mappable_bar0: bool,
}

impl Default for VfioUserConfig {
    fn default() -> Self {
        VfioUserConfig {
            max_queue_depth: 256,
            max_io_qpairs_per_ctrlr: 127,
            max_io_size: 128 << 10,
            disable_mappable_bar0: false,
        }
    }
}

/// The validated options.
#[derive(Clone, Debug)]
pub(crate) struct VfioUserLimits {
    pub(crate) controller: nvme_controller::ControllerLimits,
    pub(crate) doorbells_trapped: bool,
}

impl VfioUserConfig {
    pub(crate) fn limits(&self) -> Result<VfioUserLimits, NvmfTargetError> {
        let range = |name: &str, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(NvmfTargetError::Parameter(format!("{name} of {value} is not {low} to {high}")))
        };
        let queues_max = QUEUES_MAX - 1;
        range("max_queue_depth", self.max_queue_depth, 2, 65536)?;
        range("max_io_qpairs_per_ctrlr", self.max_io_qpairs_per_ctrlr.into(), 1, queues_max.into())?;
        range("max_io_size", self.max_io_size, 8192, dma::BUFFER_BYTES_MAX as u32)?;
        if !self.max_io_size.is_power_of_two() {
            let size = self.max_io_size;
            return Err(NvmfTargetError::Parameter(format!("max_io_size of {size} is not a power of 2")));
        }
        let controller = nvme_controller::ControllerLimits {
            compare_and_write: bdev::supports_fused(),
            io_queues_max: self.max_io_qpairs_per_ctrlr,
            io_queue_entries_max: self.max_queue_depth,
            // The maximum that AQA can encode.
            admin_queue_entries_max: 4096,
            transfer_max_bytes: self.max_io_size,
            in_capsule_bytes: 0,
            transport: TransportType::IntraHost,
            memory_based: true,
            // Mapped doorbells are memory already; shadow doorbells would only cost the client a fence.
            shadow_doorbells: self.disable_mappable_bar0,
            // One for each queue pair, the admin queue included.
            interrupt_vectors: self.max_io_qpairs_per_ctrlr + 1,
            pci_vendor: VENDOR,
            ..nvme_controller::ControllerLimits::default()
        };
        Ok(VfioUserLimits { controller, doorbells_trapped: self.disable_mappable_bar0 })
    }
}
