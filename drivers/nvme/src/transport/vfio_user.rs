//! A controller of another process, behind vfio-user.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ::vfio_user::{BAR0, Client, ClientError, Config};
use memory::ChunkMemory;
use reactor::Core;
use rustix::event::{EventfdFlags, eventfd};
use wire_nvme::doorbell::DOORBELLS_OFFSET;

use crate::device::{Device, DeviceError, Dma, Doorbells, Registers};
use crate::error::OpenError;
use crate::options::Options;
use crate::shared::lock;
use crate::uri::VfioUserUri;

struct VfioUser {
    name: String,
    client: Client,
    /// What the device may reach: address, bytes, and the file, to be shown again after a stop.
    mapped: Mutex<Mapped>,
}

#[derive(Default)]
struct Mapped {
    chunks: Vec<(u64, u64, Arc<OwnedFd>)>,
    stopped: bool,
}

/// A registers' exchange takes this long at most; the target answers between two turns of its reactor.
const EXCHANGE_MAX: Duration = Duration::from_secs(5);

pub(super) fn open(
    uri: &VfioUserUri,
    name: String,
    core: &Core,
    options: &Options,
) -> Result<Box<dyn Device>, OpenError> {
    // Asked of a buffer, because that is what will be shared.
    let buffer = core.pool().take(memory::BUFFER_BYTES_MIN).ok_or(OpenError::NoMemory)?;
    if buffer.chunk().is_none_or(|chunk| chunk.file.is_none()) {
        return Err(OpenError::NotShared(name));
    }
    let config = Config { timeout: Duration::from_nanos(options.timeout_ns).min(EXCHANGE_MAX) };
    let client = Client::connect(&uri.directory, &config)
        .map_err(|error| OpenError::Device(name.clone(), other(&error)))?;
    Ok(Box::new(VfioUser { name, client, mapped: Mutex::default() }))
}

fn other(error: &ClientError) -> DeviceError {
    DeviceError::Other(error.to_string())
}

impl VfioUser {
    fn failed(&self, error: &ClientError) -> DeviceError {
        if self.client.is_present() { other(error) } else { DeviceError::Gone }
    }
}

impl Registers for VfioUser {
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

    fn doorbells(&self, bytes: u64) -> Result<Doorbells, DeviceError> {
        let base = u64::from(DOORBELLS_OFFSET);
        let areas = self.client.regions().get(BAR0 as usize).map_or(&[][..], |region| &region.areas);
        let area = areas.iter().find(|area| area.offset <= base && base - area.offset < area.size);
        let have = area.map_or(0, |area| area.size - (base - area.offset));
        if have < bytes {
            return Err(DeviceError::BarTooSmall { have: base + have, need: base + bytes });
        }
        let region = self.client.map_region(BAR0, base, have).map_err(|error| self.failed(&error))?;
        Ok(Doorbells { region: Arc::new(region), offset: 0, bytes: have })
    }
}

impl Dma for VfioUser {
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DeviceError> {
        let Some(file) = chunk.file.clone() else {
            return Err(DeviceError::Memory(
                "it belongs to this process alone: make the arena with `shared: true`".into(),
            ));
        };
        let (address, bytes) = (chunk.start.addr() as u64, chunk.bytes as u64);
        let mut mapped = lock(&self.mapped);
        if !mapped.stopped {
            self.client
                .dma_map_file(address, file.as_fd(), 0, bytes, true)
                .map_err(|error| self.failed(&error))?;
        }
        mapped.chunks.push((address, bytes, file));
        Ok(address)
    }

    fn start(&self) -> Result<(), DeviceError> {
        let mut mapped = lock(&self.mapped);
        if std::mem::take(&mut mapped.stopped) {
            for (address, bytes, file) in &mapped.chunks {
                self.client
                    .dma_map_file(*address, file.as_fd(), 0, *bytes, true)
                    .map_err(|error| self.failed(&error))?;
            }
        }
        Ok(())
    }

    fn stop(&self) -> Result<(), DeviceError> {
        let mut mapped = lock(&self.mapped);
        if !std::mem::replace(&mut mapped.stopped, true) {
            for (address, bytes, _) in &mapped.chunks {
                self.client.dma_unmap(*address, *bytes).map_err(|error| self.failed(&error))?;
            }
        }
        Ok(())
    }
}

impl Device for VfioUser {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn is_present(&self) -> bool {
        self.client.is_present()
    }

    fn interrupts(&self, vectors: u16) -> Result<Vec<OwnedFd>, DeviceError> {
        let count = u32::from(vectors).min(self.client.msix_vectors());
        let made = (0..count).map(|_| eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC));
        let fds: Vec<OwnedFd> = made
            .collect::<Result<_, _>>()
            .map_err(|error| DeviceError::Other(format!("no event descriptor: {error}")))?;
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
