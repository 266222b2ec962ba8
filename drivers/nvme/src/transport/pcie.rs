//! A PCI Express function of this machine.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use memory::{ChunkMemory, SharedRegion};
use pci::{Function, PciError, Sysfs};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wire_nvme::doorbell::DOORBELLS_OFFSET;

use crate::device::{Device, DeviceError, Dma, Doorbells, Registers};
use crate::error::OpenError;
use crate::uri::PcieUri;

struct Pcie {
    name: String,
    function: Function,
    bar: Arc<SharedRegion>,
    /// Readable as soon as the kernel wants the function back.
    wanted_back: Option<OwnedFd>,
}

pub(super) fn open(uri: &PcieUri, name: String) -> Result<Box<dyn Device>, OpenError> {
    let failed = |error: PciError| OpenError::Device(name.clone(), other(&error));
    let address = pci::Address::new(uri.domain, uri.bus, uri.device, uri.function)
        .ok_or(OpenError::Invalid("no PCI function has such an address"))?;
    let function = Function::open(&Sysfs::default(), address, None).map_err(failed)?;
    let bar = Arc::new(function.map_bar(0).map_err(failed)?);
    let need = u64::from(DOORBELLS_OFFSET);
    if bar.len() <= need {
        return Err(OpenError::Device(name, DeviceError::BarTooSmall { have: bar.len(), need: need + 1 }));
    }
    let wanted_back = function.removal_request().map_err(failed)?;
    Ok(Box::new(Pcie { name, function, bar, wanted_back }))
}

fn other(error: &PciError) -> DeviceError {
    DeviceError::Other(error.to_string())
}

impl Registers for Pcie {
    fn read_u32(&self, offset: u32) -> Result<u32, DeviceError> {
        Ok(self.bar.load_u32(offset.into()))
    }

    fn read_u64(&self, offset: u32) -> Result<u64, DeviceError> {
        // In halves: not every root port, and no emulation of one, passes eight bytes at once.
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

    fn doorbells(&self, _bytes: u64) -> Result<Doorbells, DeviceError> {
        let offset = u64::from(DOORBELLS_OFFSET);
        Ok(Doorbells { region: self.bar.clone(), offset, bytes: self.bar.len() - offset })
    }
}

impl Dma for Pcie {
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DeviceError> {
        self.function.map_dma(chunk).map_err(|error| DeviceError::Memory(error.to_string()))
    }

    fn start(&self) -> Result<(), DeviceError> {
        self.function.enable_bus_master().map_err(|error| other(&error))
    }

    fn stop(&self) -> Result<(), DeviceError> {
        // A memory transaction that is on its way when bus mastering ends has arrived before the write to
        // configuration space is answered.
        self.function.disable_bus_master().map_err(|error| other(&error))
    }
}

impl Device for Pcie {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn is_present(&self) -> bool {
        let wanted_back = self.wanted_back.as_ref().is_some_and(|fd| {
            let mut asked = [PollFd::new(fd, PollFlags::IN)];
            poll(&mut asked, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
        });
        !wanted_back && self.function.is_present()
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
