//! A PCI function, through VFIO or UIO.

use std::sync::Arc;

use dma::{ChunkMemory, Dma, DmaError, RegionMapping, SharedRegion};
use pci::{FunctionDma, PciAddress, PciFunction, Sysfs};
use wire_ioat::registers;

use crate::IoatAddress;
use crate::access::{FunctionAccess, IoatOpenError};

pub(super) struct PciAccess {
    function: Arc<PciFunction>,
    dma: FunctionDma,
    bar: SharedRegion,
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
        let function = Arc::new(function);
        let dma = FunctionDma::new(&function);
        Ok(PciAccess { function, dma, bar })
    }
}

impl Dma for PciAccess {
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DmaError> {
        self.dma.map(chunk)
    }

    fn map_region(
        &self,
        region: &Arc<RegionMapping>,
        reserve_bytes: u64,
    ) -> Result<(u64, Box<dyn Send>), DmaError> {
        self.dma.map_region(region, reserve_bytes)
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
