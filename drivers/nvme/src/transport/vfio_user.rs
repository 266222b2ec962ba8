//! vfio-user transport: a controller in another process.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ::vfio_user::{BAR0, ClientConfig, VfioUserClient, VfioUserError};
use dma::{ChunkMemory, Dma, DmaError};
use reactor::Core;
use rustix::event::{EventfdFlags, eventfd};
use wire_nvme::doorbell::DOORBELLS_OFFSET;

use crate::device::{DeviceError, DoorbellRegion, NvmeDevice, Registers};
use crate::error::NvmeOpenError;
use crate::options::Options;
use crate::uri::VfioUserUri;

struct VfioUserDevice {
    name: String,
    client: VfioUserClient,
    /// DMA mappings of the device.
    mapped: Mutex<Mapped>,
}

/// DMA mappings as (address, bytes, file), kept to restore them after [`NvmeDevice::disable_dma`].
#[derive(Default)]
struct Mapped {
    chunks: Vec<(u64, u64, Arc<OwnedFd>)>,
    stopped: bool,
}

/// Time that the server may take for register accesses, which block the core, all together (see
/// [`ClientConfig`]); it responds within a turn of its reactor. One that hangs costs the core this once.
const MESSAGE_TIMEOUT_MAX: Duration = Duration::from_secs(2);

pub(super) fn open(
    uri: &VfioUserUri,
    name: String,
    core: &Core,
    options: &Options,
) -> Result<Box<dyn NvmeDevice>, NvmeOpenError> {
    // Check a buffer of the pool, because the arena's buffers must be shared with the server.
    let buffer = core.pool().take(dma::BUFFER_BYTES_MIN).ok_or(NvmeOpenError::NoMemory)?;
    if buffer.chunk().is_none_or(|chunk| chunk.file.is_none()) {
        return Err(NvmeOpenError::MemoryNotShared(name));
    }
    let timeout = Duration::from_nanos(options.timeout_ns).min(MESSAGE_TIMEOUT_MAX);
    let config = ClientConfig { timeout, ..ClientConfig::default() };
    let client = VfioUserClient::connect(&uri.directory, &config)
        .map_err(|error| NvmeOpenError::Device(name.clone(), other(&error)))?;
    Ok(Box::new(VfioUserDevice { name, client, mapped: Mutex::default() }))
}

fn other(error: &VfioUserError) -> DeviceError {
    DeviceError::Other(error.to_string())
}

impl VfioUserDevice {
    fn failed(&self, error: &VfioUserError) -> DeviceError {
        if self.client.is_present() { other(error) } else { DeviceError::Gone }
    }
}

impl Registers for VfioUserDevice {
    fn read_u32(&self, offset: u32) -> Result<u32, DeviceError> {
        self.client.read_u32(BAR0, offset.into()).map_err(|error| self.failed(&error))
    }

    fn read_u64(&self, offset: u32) -> Result<u64, DeviceError> {
        self.client.read_u64(BAR0, offset.into()).map_err(|error| self.failed(&error))
    }

    fn write_u32(&self, offset: u32, value: u32) -> Result<(), DeviceError> {
        self.client.write_u32(BAR0, offset.into(), value).map_err(|error| self.failed(&error))
    }

    fn write_u64(&self, offset: u32, value: u64) -> Result<(), DeviceError> {
        self.client.write_u64(BAR0, offset.into(), value).map_err(|error| self.failed(&error))
    }

    fn doorbells(&self, bytes: u64) -> Result<DoorbellRegion, DeviceError> {
        let base = u64::from(DOORBELLS_OFFSET);
        let areas = self.client.regions().get(BAR0 as usize).map_or(&[][..], |region| &region.areas);
        let area = areas.iter().find(|area| area.offset <= base && base - area.offset < area.size);
        let have = area.map_or(0, |area| area.size - (base - area.offset));
        if have < bytes {
            return Err(DeviceError::BarTooSmall { have: base + have, need: base + bytes });
        }
        let region = self.client.map_region(BAR0, base, have).map_err(|error| self.failed(&error))?;
        Ok(DoorbellRegion { region: Arc::new(region), offset: 0, bytes: have })
    }
}

impl Dma for VfioUserDevice {
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DmaError> {
        let Some(file) = chunk.file.clone() else {
            return Err(DmaError::Refused(
                "it is private to this process: create the arena with `shared: true`".into(),
            ));
        };
        let (address, bytes) = (chunk.start.addr() as u64, chunk.bytes as u64);
        let mut mapped = sync::lock(&self.mapped);
        if !mapped.stopped {
            self.client.dma_map_file(address, file.as_fd(), 0, bytes, true).map_err(|error| {
                if self.client.is_present() { DmaError::Refused(error.to_string()) } else { DmaError::Gone }
            })?;
        }
        mapped.chunks.push((address, bytes, file));
        Ok(address)
    }
}

impl NvmeDevice for VfioUserDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn enable_dma(&self) -> Result<(), DeviceError> {
        let mut mapped = sync::lock(&self.mapped);
        if std::mem::take(&mut mapped.stopped) {
            for (address, bytes, file) in &mapped.chunks {
                self.client
                    .dma_map_file(*address, file.as_fd(), 0, *bytes, true)
                    .map_err(|error| self.failed(&error))?;
            }
        }
        Ok(())
    }

    fn disable_dma(&self) -> Result<(), DeviceError> {
        let mut mapped = sync::lock(&self.mapped);
        if !std::mem::replace(&mut mapped.stopped, true) {
            for (address, bytes, _) in &mapped.chunks {
                self.client.dma_unmap(*address, *bytes).map_err(|error| self.failed(&error))?;
            }
        }
        Ok(())
    }

    fn is_present(&self) -> bool {
        self.client.is_present()
    }

    fn interrupts(&self, vectors: u16) -> Result<Vec<OwnedFd>, DeviceError> {
        let count = u32::from(vectors).min(self.client.msix_vectors());
        let eventfds = (0..count).map(|_| eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC));
        let fds: Vec<OwnedFd> = eventfds
            .collect::<Result<_, _>>()
            .map_err(|error| DeviceError::Other(format!("cannot create an eventfd: {error}")))?;
        if !fds.is_empty() {
            let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            self.client.set_interrupts(&borrowed).map_err(|error| self.failed(&error))?;
        }
        Ok(fds)
    }

    fn reset(&self) -> Result<(), DeviceError> {
        self.client.reset().map_err(|error| self.failed(&error))
    }
}
