//! Memory that a peer lends, a guest's for example, mapped for a device where it lies.
//!
//! A region is mapped as a whole when a transfer first names a part of it. Since that pins every page, a
//! thread does it, and the users of the device copy meanwhile. They copy for good what is not mapped: regions
//! that are small or read-only, those beyond [`REGIONS_MAX`], and those that the transport cannot map.
//!
//! ```text
//! transfer ──► RegionCache ──► LentRegions ──► mapper thread ──► Dma::map_region
//!              (a core)        (a device)                        │
//!                                    region is unmapped ◄────────┘ undone by RegionMapping's drop
//! ```

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, Weak};

use super::{DeviceMappings, Dma};
use crate::buffer::Buffer;
use crate::region::RegionMapping;

/// Smallest region that is mapped, in bytes. A peer that lends many small ones would use up the IOMMU's
/// mappings.
pub(super) const REGION_BYTES_MIN: u64 = 1 << 20;
/// Most regions that are mapped for a device at a time; a guest's memory is a few.
pub(super) const REGIONS_MAX: usize = 256;

/// The regions that are mapped for one device, or are about to be. Shared by the cores that use it.
#[derive(Default)]
pub(super) struct LentRegions(Mutex<LentState>);

#[derive(Default)]
struct LentState {
    /// By their identifier.
    regions: HashMap<u64, RegionState>,
    /// What the mapper thread has still to do.
    queue: VecDeque<Arc<RegionMapping>>,
    has_mapper: bool,
}

/// How a device reaches a region of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionState {
    /// Not yet: it is being mapped.
    Pending,
    /// At this device address.
    Mapped(u64),
    /// Never.
    Unmapped,
}

/// Undoes the mapping of a region before its memory is unmapped.
struct LentGuard {
    regions: Weak<LentRegions>,
    id: u64,
    /// Of the transport; dropped after the region is forgotten, so that no core finds it.
    _mapping: Option<Box<dyn Send>>,
}

impl Drop for LentGuard {
    fn drop(&mut self) {
        if let Some(regions) = self.regions.upgrade() {
            sync::lock(&regions.0).regions.remove(&self.id);
        }
    }
}

impl LentRegions {
    /// The state of a region, which is mapped from now on if it can be.
    pub(super) fn state<D: Dma + ?Sized + 'static>(
        &self,
        region: &Arc<RegionMapping>,
        mappings: &Arc<DeviceMappings<D>>,
    ) -> RegionState {
        let mut state = sync::lock(&self.0);
        if let Some(known) = state.regions.get(&region.id()) {
            return *known;
        }
        let is_eligible = mappings.config().map_lent_memory
            && region.is_writable()
            && region.len() >= REGION_BYTES_MIN
            && state.regions.len() < REGIONS_MAX;
        if !is_eligible {
            return RegionState::Unmapped;
        }
        if !state.has_mapper {
            let mapper = std::thread::Builder::new().name(format!("{}-map", mappings.config().log_target));
            let mappings = mappings.clone();
            if mapper.spawn(move || map_queued(&mappings)).is_err() {
                return RegionState::Unmapped;
            }
            state.has_mapper = true;
        }
        state.regions.insert(region.id(), RegionState::Pending);
        state.queue.push_back(region.clone());
        RegionState::Pending
    }

    /// The next region to map; with `None` the mapper ends.
    fn next(&self) -> Option<Arc<RegionMapping>> {
        let mut state = sync::lock(&self.0);
        let next = state.queue.pop_front();
        state.has_mapper = next.is_some();
        next
    }
}

/// Maps the regions that cores have asked for: a thread that ends when there are no more.
fn map_queued<D: Dma + ?Sized>(mappings: &DeviceMappings<D>) {
    let regions = mappings.lent();
    let target = mappings.config().log_target;
    let name = &mappings.config().name;
    while let Some(region) = regions.next() {
        // The buffers of the pools come first.
        let (state, mapping) = match mappings.device().map_region(&region, mappings.arena_bytes_max()) {
            Ok((address, mapping)) => {
                log::info!(target: target, "{name} accesses {} bytes of lent memory in place", region.len());
                (RegionState::Mapped(address), Some(mapping))
            }
            Err(error) => {
                log::info!(target: target, "{name}: {} bytes of lent memory are copied: {error}", region.len());
                (RegionState::Unmapped, None)
            }
        };
        let id = region.id();
        sync::lock(&regions.0).regions.insert(id, state);
        region.keep(Box::new(LentGuard { regions: Arc::downgrade(regions), id, _mapping: mapping }));
    }
}

/// What a core knows of lent regions, by the index of their entries in its core's pool.
#[derive(Default)]
pub(super) struct RegionCache(Vec<Option<CachedRegion>>);

#[derive(Clone, Copy)]
struct CachedRegion {
    /// An entry is used for another region when its own has ended.
    id: u64,
    start: usize,
    state: RegionState,
}

impl RegionCache {
    /// Device address of the first byte of lent memory; `None` if it has to be copied.
    pub(super) fn address<D: Dma + ?Sized + 'static>(
        &mut self,
        buffer: &Buffer,
        mappings: &Arc<DeviceMappings<D>>,
    ) -> Option<u64> {
        let index = buffer.backing_index() as usize;
        let known = self.0.get(index).copied().flatten();
        let cached = buffer.with_region(|region| match known {
            Some(known) if known.id == region.id() && known.state != RegionState::Pending => known,
            _ => {
                let state = mappings.lent().state(region, mappings);
                CachedRegion { id: region.id(), start: region.start(), state }
            }
        })?;
        if self.0.len() <= index {
            self.0.resize(index + 1, None);
        }
        self.0[index] = Some(cached);
        match cached.state {
            RegionState::Mapped(address) => Some(address + (buffer.as_ptr().addr() - cached.start) as u64),
            RegionState::Pending | RegionState::Unmapped => None,
        }
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<Option<CachedRegion>>()
    }
}
