//! A PCI function, through VFIO or UIO.

use std::sync::{Arc, Weak};

use dma::{ChunkMemory, Dma, DmaError, RegionMapping, SharedRegion};
use pci::{PciAddress, PciFunction, Sysfs};
use wire_ioat::registers;

use crate::IoatAddress;
use crate::access::{FunctionAccess, IoatOpenError};

pub(super) struct PciAccess {
    function: Arc<PciFunction>,
    bar: SharedRegion,
}

/// Undoes the mapping of memory, as long as the function is open.
struct MappedMemory {
    function: Weak<PciFunction>,
    start: usize,
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        if let Some(function) = self.function.upgrade()
            && let Err(error) = function.unmap_region(self.start)
        {
            log::warn!(target: "ioat", "{error}");
        }
    }
}

impl PciAccess {
    pub(super) fn open(sysfs: &Sysfs, address: PciAddress) -> Result<PciAccess, IoatOpenError> {
        let function = PciFunction::open(sysfs, address, None)?;
        let (vendor, device) = (function.info().vendor, function.info().device);
        let address = IoatAddress::Pci(address);
        if !pci::is_ioat(vendor, device) {
            return Err(IoatOpenError::NotIoat { address, vendor, device });
        }
        let bar = function.map_bar(0)?;
        if bar.len() < registers::REGISTERS_BYTES.into() {
            return Err(IoatOpenError::BarTooSmall { address, bytes: bar.len() });
        }
        Ok(PciAccess { function: Arc::new(function), bar })
    }
}

impl Dma for PciAccess {
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DmaError> {
        self.function.map_dma(chunk).map_err(|error| DmaError::Refused(error.to_string()))
    }

    fn map_region(
        &self,
        region: &Arc<RegionMapping>,
        reserve_bytes: u64,
    ) -> Result<(u64, Box<dyn Send>), DmaError> {
        let address = self.function.map_region(region, reserve_bytes);
        let address = address.map_err(|error| DmaError::Refused(error.to_string()))?;
        let mapping = MappedMemory { function: Arc::downgrade(&self.function), start: region.start() };
        Ok((address, Box::new(mapping)))
    }
}

impl FunctionAccess for PciAccess {
    fn read_u8(&self, register: u32) -> u8 {
        self.bar.load_u8(register.into())
    }

    fn read_u32(&self, register: u32) -> u32 {
        self.bar.load_u32(register.into())
    }

    fn read_u64(&self, register: u32) -> u64 {
        // The kernel's driver reads the lower half first, too: that latches the upper one.
        let low = self.bar.load_u32(register.into());
        let high = self.bar.load_u32(u64::from(register) + 4);
        u64::from(low) | u64::from(high) << 32
    }

    fn write_u8(&self, register: u32, value: u8) {
        self.bar.store_u8(register.into(), value);
    }

    fn write_u16(&self, register: u32, value: u16) {
        self.bar.store_u16(register.into(), value);
    }

    fn write_u32(&self, register: u32, value: u32) {
        self.bar.store_u32(register.into(), value);
    }

    fn write_u64(&self, register: u32, value: u64) {
        self.bar.store_u32(register.into(), value as u32);
        self.bar.store_u32(u64::from(register) + 4, (value >> 32) as u32);
    }

    fn enable_dma(&self) -> Result<(), String> {
        self.function.enable_bus_master().map_err(|error| error.to_string())
    }

    fn disable_dma(&self) -> Result<(), String> {
        self.function.disable_bus_master().map_err(|error| error.to_string())
    }
}
