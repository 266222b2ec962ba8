//! The client's memory, by device address.

use std::os::fd::{AsFd, OwnedFd};

use dma::SharedRegion;
use rustix::io::Errno;
use wire_vfio_user::{DmaMap, DmaUnmap, dma_flags, unmap_flags};

use crate::ModelMemory;

/// Most ranges of a client: each is a mapping of this process.
const RANGES_MAX: usize = 8192;
const PAGE: u64 = 4096;

/// The ranges that a client has mapped for the device.
#[derive(Default)]
pub(crate) struct ClientMemory(Vec<DmaRange>);

struct DmaRange {
    address: u64,
    size: u64,
    writable: bool,
    region: SharedRegion,
    /// Of the range in the region, which begins at a page of the file's size.
    offset: u64,
}

impl ClientMemory {
    /// Adds a range (`DMA_MAP`).
    ///
    /// # Errors
    /// The reply's error number.
    pub(crate) fn map(&mut self, map: &DmaMap, file: Option<OwnedFd>) -> Result<(), Errno> {
        let DmaMap { flags, offset, address, size, .. } = *map;
        let is_aligned = [address, size, offset].iter().all(|value| value.is_multiple_of(PAGE));
        if !is_aligned || size == 0 || address.checked_add(size).is_none() {
            return Err(Errno::INVAL);
        }
        if self.0.len() >= RANGES_MAX {
            return Err(Errno::NOSPC);
        }
        if self.0.iter().any(|range| range.address < address + size && address < range.address + range.size) {
            return Err(Errno::EXIST);
        }
        // Access by message is not supported.
        let file = file.ok_or(Errno::NOTSUP)?;
        let mapped = SharedRegion::map_peer_memory(file.as_fd(), offset, size);
        let (region, offset) = mapped.map_err(|error| {
            log::warn!(target: "ioat-model", "memory of the client is rejected: {error}");
            Errno::INVAL
        })?;
        let writable = flags & dma_flags::WRITE != 0;
        self.0.push(DmaRange { address, size, writable, region, offset });
        Ok(())
    }

    /// Removes a range (`DMA_UNMAP`), or all.
    ///
    /// # Errors
    /// The reply's error number.
    pub(crate) fn unmap(&mut self, unmap: &DmaUnmap) -> Result<(), Errno> {
        if unmap.flags & unmap_flags::ALL != 0 {
            self.0.clear();
            return Ok(());
        }
        let is_it = |range: &DmaRange| (range.address, range.size) == (unmap.address, unmap.size);
        let at = self.0.iter().position(is_it).ok_or(Errno::NOENT)?;
        self.0.swap_remove(at);
        Ok(())
    }

    /// The region of a range of addresses, and the offset in it.
    fn find(&self, address: u64, bytes: usize, writes: bool) -> Option<(&SharedRegion, u64)> {
        let end = address.checked_add(bytes as u64)?;
        let covers = |range: &&DmaRange| {
            range.address <= address && end <= range.address + range.size && (range.writable || !writes)
        };
        let range = self.0.iter().find(covers)?;
        Some((&range.region, range.offset + (address - range.address)))
    }
}

impl ModelMemory for ClientMemory {
    fn read(&mut self, address: u64, out: &mut [u8]) -> bool {
        let found = self.find(address, out.len(), false);
        found.map(|(region, offset)| region.read(offset, out)).is_some()
    }

    fn write(&mut self, address: u64, data: &[u8]) -> bool {
        let found = self.find(address, data.len(), true);
        found.map(|(region, offset)| region.write(offset, data)).is_some()
    }

    fn write_word(&mut self, address: u64, word: u64) -> bool {
        let found = self.find(address, 8, true).filter(|_| address.is_multiple_of(8));
        found.map(|(region, offset)| region.store_u64(offset, word)).is_some()
    }
}
