//! The mappings of one device, which all cores share.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::lent::{LentRegions, RegionState};
use super::{Dma, DmaError};
use crate::arena::{Arena, ChunkMemory};
use crate::region::RegionMapping;

/// How memory is mapped for a device.
#[derive(Clone, Debug)]
pub struct MappingConfig {
    /// Name of the device in log messages.
    pub name: String,
    /// Target of log messages, and the first part of the mapper thread's name: the driver's.
    pub log_target: &'static str,
    /// Whether memory that a peer lends is mapped for the device, which pins it. Otherwise the device never
    /// reaches it.
    pub map_lent_memory: bool,
}

/// A device, and the memory that is mapped for it.
///
/// It owns the device and, until the device is dropped, what the mappings refer to: the arenas of its users'
/// buffers, and what is given to [`retain`](Self::retain). Buffers are mapped through a core's
/// [`DeviceAddresses`](super::DeviceAddresses); other memory through [`map`](Self::map). A mutex guards each
/// table: a core takes it when it first uses a chunk or region, never per transfer.
pub struct DeviceMappings<D: Dma + ?Sized> {
    /// The first field, and so dropped before the memory that it may access.
    device: Box<D>,
    config: MappingConfig,
    /// Device addresses of mapped memory, by host start address.
    mapped: Mutex<BTreeMap<usize, u64>>,
    lent: Arc<LentRegions>,
    /// Arenas of which chunks may be mapped.
    arenas: Mutex<Vec<Arc<Arena>>>,
    retained: Mutex<Vec<Box<dyn Send>>>,
}

impl<D: Dma + ?Sized> DeviceMappings<D> {
    /// The mappings of a device, for which nothing is mapped yet.
    pub fn new(device: Box<D>, config: MappingConfig) -> Arc<DeviceMappings<D>> {
        Arc::new(DeviceMappings {
            device,
            config,
            mapped: Mutex::default(),
            lent: Arc::default(),
            arenas: Mutex::default(),
            retained: Mutex::default(),
        })
    }

    /// The device.
    #[inline]
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Returns the device address of the first byte of a chunk or other memory, which is mapped on first use.
    /// A mapping that fails is tried again with the next use.
    ///
    /// The caller has the memory outlive the device: [`retain`](Self::retain).
    ///
    /// # Errors
    /// Those of [`Dma::map`].
    pub fn map(&self, memory: &ChunkMemory) -> Result<u64, DmaError> {
        let start = memory.start.addr();
        // Locked while the device maps: another core that needs the same chunk waits for it.
        let mut mapped = sync::lock(&self.mapped);
        if let Some(&address) = mapped.get(&start) {
            return Ok(address);
        }
        let address = self.device.map(memory)?;
        mapped.insert(start, address);
        Ok(address)
    }

    /// How the device reaches a region, as a whole. A thread maps it from the first call on, as it does lent
    /// memory; a core keeps what it is told, since each call takes a lock.
    pub fn region(self: &Arc<Self>, region: &Arc<RegionMapping>) -> RegionState
    where
        D: 'static,
    {
        self.lent.state(region, self)
    }

    /// Drops `value` only after the device: the owner of memory that is mapped, or what announces that the
    /// device is closed.
    pub fn retain(&self, value: Box<dyn Send>) {
        sync::lock(&self.retained).push(value);
    }

    /// Retains an arena, whose chunks may be mapped from now on.
    pub(super) fn retain_arena(&self, arena: &Arc<Arena>) {
        let mut arenas = sync::lock(&self.arenas);
        if !arenas.iter().any(|retained| Arc::ptr_eq(retained, arena)) {
            arenas.push(arena.clone());
        }
    }

    /// Most bytes of chunks that may still be mapped, or are: lent memory must leave as much for them.
    pub(super) fn arena_bytes_max(&self) -> u64 {
        sync::lock(&self.arenas).iter().map(|arena| arena.limit_bytes() as u64).sum()
    }

    pub(super) fn config(&self) -> &MappingConfig {
        &self.config
    }

    pub(super) fn lent(&self) -> &Arc<LentRegions> {
        &self.lent
    }
}
