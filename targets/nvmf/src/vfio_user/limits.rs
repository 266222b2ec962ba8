//! What the vfio-user transport offers.

use wire_nvme::log::TransportType;

use super::function::QUEUES_MAX;
use super::pci::VENDOR;
use crate::failure::TargetError;

/// Options of the vfio-user transport, by the names that the management interface has for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VfioUserConfig {
    /// Entries of an I/O queue, 2 to 65536.
    pub max_queue_depth: u32,
    /// I/O queues of a controller, 1 to 511: there is one page of doorbells.
    pub max_io_qpairs_per_ctrlr: u16,
    /// Bytes of one command's data, a power of two.
    pub max_io_size: u32,
    /// Doorbells are not mapped by clients but written by message, each of which wakes the core. Slow, and
    /// without any cost while nothing happens.
    pub disable_mappable_bar0: bool,
}

impl Default for VfioUserConfig {
    fn default() -> Self {
        VfioUserConfig {
            max_queue_depth: 1024,
            max_io_qpairs_per_ctrlr: 127,
            max_io_size: 128 << 10,
            disable_mappable_bar0: false,
        }
    }
}

/// The same, checked.
#[derive(Clone, Debug)]
pub(crate) struct VfioUserLimits {
    pub(crate) controller: controller::Limits,
    pub(crate) doorbells_trapped: bool,
}

impl VfioUserConfig {
    pub(crate) fn limits(&self) -> Result<VfioUserLimits, TargetError> {
        let range = |name: &str, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(TargetError::Parameter(format!("{name} of {value} is not {low} to {high}")))
        };
        let queues_max = QUEUES_MAX - 1;
        range("max_queue_depth", self.max_queue_depth, 2, 65536)?;
        range("max_io_qpairs_per_ctrlr", self.max_io_qpairs_per_ctrlr.into(), 1, queues_max.into())?;
        range("max_io_size", self.max_io_size, 8192, memory::BUFFER_BYTES_MAX as u32)?;
        if !self.max_io_size.is_power_of_two() {
            let size = self.max_io_size;
            return Err(TargetError::Parameter(format!("max_io_size of {size} is no power of 2")));
        }
        let controller = controller::Limits {
            compare_and_write: bdev::can_fuse(),
            io_queues_max: self.max_io_qpairs_per_ctrlr,
            io_queue_entries_max: self.max_queue_depth,
            // What AQA can say.
            admin_queue_entries_max: 4096,
            transfer_max_bytes: self.max_io_size,
            in_capsule_bytes: 0,
            transport: TransportType::IntraHost,
            memory_based: true,
            // Where doorbells are mapped they are memory, and shadows would only cost the client a fence.
            shadow_doorbells: self.disable_mappable_bar0,
            // One for each queue pair, the admin queue's included.
            interrupt_vectors: self.max_io_qpairs_per_ctrlr + 1,
            pci_vendor: VENDOR,
            ..controller::Limits::default()
        };
        Ok(VfioUserLimits { controller, doorbells_trapped: self.disable_mappable_bar0 })
    }
}
