//! PCI Express transport: a function of this machine, through VFIO or UIO.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use dma::{ChunkMemory, Dma, DmaError, RegionMapping, SharedRegion};
use pci::{FunctionDma, PciError, PciFunction, Sysfs};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wire_nvme::doorbell::DOORBELLS_OFFSET;

use crate::device::{DeviceError, DoorbellRegion, NvmeDevice, Registers};
use crate::error::NvmeOpenError;
use crate::uri::PcieUri;

struct PcieDevice {
    name: String,
    function: Arc<PciFunction>,
    dma: FunctionDma,
    bar: Arc<SharedRegion>,
    /// Becomes readable when the kernel requests the release of the function.
    removal_request: Option<OwnedFd>,
}

pub(super) fn open(uri: &PcieUri, name: String) -> Result<Box<dyn NvmeDevice>, NvmeOpenError> {
    let failed = |error: PciError| NvmeOpenError::Device(name.clone(), other(&error));
    let address = pci::PciAddress::new(uri.domain, uri.bus, uri.device, uri.function)
        .ok_or(NvmeOpenError::InvalidArgument("the PCI address is out of range"))?;
    let function = Arc::new(PciFunction::open(&Sysfs::default(), address, None).map_err(failed)?);
    let bar = Arc::new(function.map_bar(0).map_err(failed)?);
    let need = u64::from(DOORBELLS_OFFSET);
    if bar.len() <= need {
        return Err(NvmeOpenError::Device(
            name,
            DeviceError::BarTooSmall { have: bar.len(), need: need + 1 },
        ));
    }
    let removal_request = function.removal_event().map_err(failed)?;
    let dma = FunctionDma::new(&function);
    Ok(Box::new(PcieDevice { name, function, dma, bar, removal_request }))
}

fn other(error: &PciError) -> DeviceError {
    DeviceError::Other(error.to_string())
}

impl Registers for PcieDevice {
    fn read_u32(&self, offset: u32) -> Result<u32, DeviceError> {
        Ok(self.bar.load_u32(offset.into()))
    }

    fn read_u64(&self, offset: u32) -> Result<u64, DeviceError> {
        // Two 32-bit reads: not every root port, and no emulated one, supports 64-bit accesses.
        let low = self.bar.load_u32(offset.into());
        let high = self.bar.load_u32(u64::from(offset) + 4);
        Ok(u64::from(low) | u64::from(high) << 32)
    }

    fn write_u32(&self, offset: u32, value: u32) -> Result<(), DeviceError> {
        self.bar.store_u32(offset.into(), value);
        Ok(())
    }

    fn write_u64(&self, offset: u32, value: u64) -> Result<(), DeviceError> {
        self.bar.store_u32(offset.into(), value as u32);
        self.bar.store_u32(u64::from(offset) + 4, (value >> 32) as u32);
        Ok(())
    }

    fn doorbells(&self, _bytes: u64) -> Result<DoorbellRegion, DeviceError> {
        let offset = u64::from(DOORBELLS_OFFSET);
        Ok(DoorbellRegion { region: self.bar.clone(), offset, bytes: self.bar.len() - offset })
    }
}

impl Dma for PcieDevice {
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

impl NvmeDevice for PcieDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn enable_dma(&self) -> Result<(), DeviceError> {
        self.function.enable_bus_master().map_err(|error| other(&error))
    }

    fn disable_dma(&self) -> Result<(), DeviceError> {
        // A memory transaction in flight when bus mastering is disabled arrives before the completion of the
        // write to configuration space.
        self.function.disable_bus_master().map_err(|error| other(&error))
    }

    fn is_present(&self) -> bool {
        let removal_request = self.removal_request.as_ref().is_some_and(|fd| {
            let mut fds = [PollFd::new(fd, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
        });
        !removal_request && self.function.is_present()
    }

    fn interrupts(&self, vectors: u16) -> Result<Vec<OwnedFd>, DeviceError> {
        let count = u32::from(vectors).min(self.function.interrupts_max().map_err(|error| other(&error))?);
        if count == 0 {
            return Ok(Vec::new());
        }
        self.function.enable_interrupts(count).map_err(|error| other(&error))
    }

    fn reset(&self) -> Result<(), DeviceError> {
        self.function.reset().map_err(|error| other(&error))
    }
}
