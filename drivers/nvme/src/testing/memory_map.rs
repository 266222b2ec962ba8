//! Device addresses of the simulated controller.

use std::os::fd::AsFd;

use dma::{ChunkMemory, DmaError, SharedRegion};

/// First device address: far from any host address, so that mixing them up fails.
const BASE: u64 = 0x10_0000_0000;
/// Bytes between the starts of mappings: an access beyond the end of one hits no other.
const STEP: u64 = 4 << 20;

/// Memory mapped for the device; `None` is what was unmapped.
#[derive(Default)]
pub(super) struct MemoryMap(Vec<Option<SharedRegion>>);

impl MemoryMap {
    pub(super) fn add(&mut self, chunk: &ChunkMemory) -> Result<u64, DmaError> {
        let Some(file) = &chunk.file else {
            return Err(DmaError::Refused("the simulated device needs an arena with `shared: true`".into()));
        };
        let region = SharedRegion::map(file.as_fd(), 0, chunk.bytes as u64, true)
            .map_err(|error| DmaError::Refused(error.to_string()))?;
        Ok(self.add_region(region).1)
    }

    /// Adds memory of at most [`STEP`] bytes; returns its index and its device address.
    pub(super) fn add_region(&mut self, region: SharedRegion) -> (usize, u64) {
        assert!(region.len() <= STEP, "{} bytes are more than the simulated device maps", region.len());
        self.0.push(Some(region));
        let index = self.0.len() - 1;
        (index, BASE + index as u64 * STEP)
    }

    pub(super) fn remove(&mut self, index: usize) {
        self.0[index] = None;
    }

    fn find(&self, address: u64, length: u64) -> Option<(&SharedRegion, u64)> {
        let offset = address.checked_sub(BASE)?;
        let region = self.0.get((offset / STEP) as usize)?.as_ref()?;
        let at = offset % STEP;
        (at.checked_add(length)? <= region.len()).then_some((region, at))
    }

    /// Reads mapped memory; `None` if the range is not mapped.
    pub(super) fn read(&self, address: u64, out: &mut [u8]) -> Option<()> {
        let (region, at) = self.find(address, out.len() as u64)?;
        region.read(at, out);
        Some(())
    }

    pub(super) fn read_u32(&self, address: u64) -> Option<u32> {
        let (region, at) = self.find(address, 4)?;
        at.is_multiple_of(4).then(|| region.load_u32(at))
    }

    pub(super) fn write(&self, address: u64, data: &[u8]) -> Option<()> {
        let (region, at) = self.find(address, data.len() as u64)?;
        region.write(at, data);
        Some(())
    }

    pub(super) fn write_u32(&self, address: u64, value: u32) -> Option<()> {
        let (region, at) = self.find(address, 4)?;
        if at.is_multiple_of(4) {
            region.store_u32(at, value);
        }
        Some(())
    }
}
