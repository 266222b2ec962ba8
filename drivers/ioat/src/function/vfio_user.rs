//! A function that another process serves by vfio-user: the software model, for one.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use ::vfio_user::{BAR0, ClientConfig, VfioUserClient, VfioUserError};
use dma::{ChunkMemory, Dma, DmaError, RegionMapping};
use wire_ioat::registers;

use crate::IoatAddress;
use crate::access::{FunctionAccess, IoatOpenError};

/// Time that the server may take for accesses to registers, which block the core, all together (see
/// [`ClientConfig`]). One that hangs costs the core this once.
const SERVER_TIMEOUT: Duration = Duration::from_secs(2);

/// A doorbell is a message: while the server answers within this time, doorbells cost nothing of the time
/// above.
const PROMPT: Duration = Duration::from_millis(20);

pub(super) struct SocketAccess(Arc<Client>);

struct Client {
    client: VfioUserClient,
    /// Mapped memory: its size by its address, which is the same for the device.
    mapped: Mutex<HashMap<u64, u64>>,
}

/// Undoes the mapping of memory, as long as the function is open.
struct MappedMemory {
    client: Weak<Client>,
    address: u64,
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        if let Some(client) = self.client.upgrade() {
            client.unmap(self.address);
        }
    }
}

impl Client {
    fn map(&self, address: u64, bytes: u64, file: &Arc<OwnedFd>) -> Result<u64, DmaError> {
        // Locked meanwhile: what ends DMA unmaps all of it.
        let mut mapped = sync::lock(&self.mapped);
        self.client.dma_map_file(address, file.as_fd(), 0, bytes, true).map_err(|error| {
            if self.client.is_present() { DmaError::Refused(error.to_string()) } else { DmaError::Gone }
        })?;
        mapped.insert(address, bytes);
        Ok(address)
    }

    fn unmap(&self, address: u64) {
        if let Some(bytes) = sync::lock(&self.mapped).remove(&address)
            && let Err(error) = self.client.dma_unmap(address, bytes)
        {
            log::warn!(target: "ioat", "{}: {error}", self.client);
        }
    }

    /// What a failed access reads as is said once an access; the channel fails with the first.
    fn failed(&self, error: &VfioUserError) {
        log::warn!(target: "ioat", "{}: {error}", self.client);
    }
}

impl SocketAccess {
    pub(super) fn open(address: &IoatAddress, path: &Path) -> Result<SocketAccess, IoatOpenError> {
        let config = ClientConfig { timeout: SERVER_TIMEOUT, prompt: PROMPT };
        let client = VfioUserClient::connect(path, &config)
            .map_err(|error| IoatOpenError::VfioUser { address: address.clone(), error })?;
        let bytes = client.regions().get(BAR0 as usize).map_or(0, |region| region.size);
        if bytes < registers::REGISTERS_BYTES.into() {
            return Err(IoatOpenError::BarTooSmall { address: address.clone(), bytes });
        }
        Ok(SocketAccess(Arc::new(Client { client, mapped: Mutex::default() })))
    }

    fn read<const BYTES: usize>(&self, register: u32) -> [u8; BYTES] {
        let mut value = [0; BYTES];
        if let Err(error) = self.0.client.region_read(BAR0, register.into(), &mut value) {
            self.0.failed(&error);
            value = [u8::MAX; BYTES];
        }
        value
    }

    fn write(&self, register: u32, value: &[u8]) {
        if let Err(error) = self.0.client.region_write(BAR0, register.into(), value) {
            self.0.failed(&error);
        }
    }
}

impl Dma for SocketAccess {
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DmaError> {
        let Some(file) = &chunk.file else {
            return Err(DmaError::Refused(
                "buffers are private to this process: `ringbolt serve --shared-memory` shares them".into(),
            ));
        };
        self.0.map(chunk.start.addr() as u64, chunk.bytes as u64, file)
    }

    fn map_region(
        &self,
        region: &Arc<RegionMapping>,
        _reserve_bytes: u64,
    ) -> Result<(u64, Box<dyn Send>), DmaError> {
        let Some(file) = region.file() else {
            return Err(DmaError::Refused("the memory is private to this process".into()));
        };
        let bytes = region.len().next_multiple_of(rustix::param::page_size() as u64);
        let address = self.0.map(region.start() as u64, bytes, file)?;
        Ok((address, Box::new(MappedMemory { client: Arc::downgrade(&self.0), address })))
    }
}

impl FunctionAccess for SocketAccess {
    fn read_u8(&self, register: u32) -> u8 {
        u8::from_le_bytes(self.read(register))
    }

    fn read_u32(&self, register: u32) -> u32 {
        u32::from_le_bytes(self.read(register))
    }

    fn read_u64(&self, register: u32) -> u64 {
        u64::from_le_bytes(self.read(register))
    }

    fn write_u8(&self, register: u32, value: u8) {
        self.write(register, &[value]);
    }

    fn write_u16(&self, register: u32, value: u16) {
        self.write(register, &value.to_le_bytes());
    }

    fn write_u32(&self, register: u32, value: u32) {
        self.write(register, &value.to_le_bytes());
    }

    fn write_u64(&self, register: u32, value: u64) {
        self.write(register, &value.to_le_bytes());
    }

    fn enable_dma(&self) -> Result<(), String> {
        // What is mapped is accessible.
        Ok(())
    }

    fn disable_dma(&self) -> Result<(), String> {
        let mut mapped = sync::lock(&self.0.mapped);
        for (address, bytes) in mapped.drain() {
            match self.0.client.dma_unmap(address, bytes) {
                // A server that has ended writes nothing more; one that does not answer may.
                Err(error) if !self.0.client.has_ended() => return Err(error.to_string()),
                _ => {}
            }
        }
        Ok(())
    }
}
