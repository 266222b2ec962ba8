//! Memory that a function reaches: what drivers of PCI functions have in common.

use std::sync::{Arc, Weak};

use dma::{ChunkMemory, Dma, DmaError, RegionMapping};

use crate::{PciError, PciFunction};

/// The DMA of an open function.
pub struct FunctionDma(Arc<PciFunction>);

/// A region that is mapped for a function, for as long as the function is open.
struct MappedRegion {
    function: Weak<PciFunction>,
    start: usize,
}

impl Drop for MappedRegion {
    fn drop(&mut self) {
        if let Some(function) = self.function.upgrade()
            && let Err(error) = function.unmap_region(self.start)
        {
            log::warn!(target: "pci", "{error}");
        }
    }
}

impl FunctionDma {
    /// That of this function.
    pub fn new(function: &Arc<PciFunction>) -> FunctionDma {
        FunctionDma(function.clone())
    }
}

impl Dma for FunctionDma {
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DmaError> {
        self.0.map_dma(chunk).map_err(|error| refused(&error))
    }

    fn map_region(
        &self,
        region: &Arc<RegionMapping>,
        reserve_bytes: u64,
    ) -> Result<(u64, Box<dyn Send>), DmaError> {
        let address = self.0.map_region(region, reserve_bytes).map_err(|error| refused(&error))?;
        let mapping = MappedRegion { function: Arc::downgrade(&self.0), start: region.start() };
        Ok((address, Box::new(mapping)))
    }
}

fn refused(error: &PciError) -> DmaError {
    DmaError::Refused(error.to_string())
}
