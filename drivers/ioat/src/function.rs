//! A function that was opened: its registers, its DMA, and the memory that a channel shares with it.

mod pcie;
mod vfio_user;

use std::sync::Arc;

use dma::{
    ChunkMemory, DeviceAddresses, DeviceBuffer, DeviceMappings, Dma, DmaError, EntryRing, MappingConfig,
    Pool, RegionMapping,
};
use pci::Sysfs;
use wire_ioat::{DESCRIPTOR_BYTES, DESCRIPTOR_WORDS, registers};

use crate::access::{FunctionAccess, IoatOpenError};
use crate::{IoatAddress, IoatDevice};

/// Descriptors of a ring: a megabyte and more of 4 KiB copies, and 64 KiB of memory.
const RING_ENTRIES: u32 = 1024;
/// Bytes of the completion word's buffer: a cache line, which nothing else is in.
const COMPLETION_BYTES: usize = 64;
/// Device addresses of chunks are multiples of this; descriptors need no more than 64.
const PAGE_BYTES: u64 = 4096;

/// Why a channel of a function has no memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoatMemoryError {
    /// The core's pool is used up.
    #[error("no memory is left in the core's pool for a ring of descriptors")]
    NoMemory,
    /// The ring cannot be mapped for the function.
    #[error("the ring of descriptors cannot be mapped for the device: {0}")]
    Dma(#[from] DmaError),
}

/// A function that this process has opened, with its DMA off. It is closed with the last clone of its
/// mappings.
pub struct IoatFunction {
    address: IoatAddress,
    access: Box<dyn FunctionAccess>,
}

impl IoatFunction {
    /// Opens a function, and disables its interrupts. It may wait for a server, 2 seconds at most.
    ///
    /// # Errors
    /// It is none, is bound to a driver of the kernel, in use by another process, or its server does not
    /// answer.
    pub fn open(address: &IoatAddress) -> Result<Arc<DeviceMappings<IoatFunction>>, IoatOpenError> {
        let access: Box<dyn FunctionAccess> = match address {
            IoatAddress::Pci(pci) => Box::new(pcie::PciAccess::open(&Sysfs::default(), *pci)?),
            IoatAddress::VfioUser(path) => Box::new(vfio_user::SocketAccess::open(address, path)?),
        };
        access.write_u8(registers::INTERRUPT_CONTROL, 0);
        let config = MappingConfig { name: address.to_string(), log_target: "ioat", map_lent_memory: true };
        let function = IoatFunction { address: address.clone(), access };
        Ok(DeviceMappings::new(Box::new(function), config))
    }

    /// Its address.
    pub fn address(&self) -> &IoatAddress {
        &self.address
    }
}

impl Dma for IoatFunction {
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DmaError> {
        self.access.map(chunk)
    }

    fn map_region(
        &self,
        region: &Arc<RegionMapping>,
        reserve_bytes: u64,
    ) -> Result<(u64, Box<dyn Send>), DmaError> {
        self.access.map_region(region, reserve_bytes)
    }
}

/// A function with the ring and the completion word of its channel, in memory of a core.
pub struct FunctionDevice {
    // Dropped before the memory that the engine may access.
    mappings: Arc<DeviceMappings<IoatFunction>>,
    ring: EntryRing<DESCRIPTOR_WORDS>,
    ring_address: u64,
    completion: DeviceBuffer,
    completion_address: u64,
}

impl FunctionDevice {
    /// Takes the memory from the pool of a core, and enables the function's DMA.
    ///
    /// # Errors
    /// The pool is used up, or its memory cannot be mapped: it is private and the function in another
    /// process, for example.
    pub fn new(
        mappings: Arc<DeviceMappings<IoatFunction>>,
        pool: &Pool,
    ) -> Result<FunctionDevice, IoatMemoryError> {
        let take = |bytes: usize| pool.take(bytes).map(DeviceBuffer::new).ok_or(IoatMemoryError::NoMemory);
        let ring = EntryRing::new(take(RING_ENTRIES as usize * DESCRIPTOR_BYTES)?, RING_ENTRIES);
        let completion = take(COMPLETION_BYTES)?;
        let mut addresses = DeviceAddresses::new(&mappings, pool.arena(), PAGE_BYTES);
        let ring_address = addresses.address(ring.buffer())?.address;
        let completion_address = addresses.address(completion.buffer())?.address;
        mappings.device().access.enable_dma().map_err(DmaError::Refused)?;
        Ok(FunctionDevice { mappings, ring, ring_address, completion, completion_address })
    }

    /// The function, and what is mapped for it.
    pub fn mappings(&self) -> &Arc<DeviceMappings<IoatFunction>> {
        &self.mappings
    }

    /// Ends the function's access to memory.
    ///
    /// # Errors
    /// The reason for which it may go on to write memory.
    pub fn disable_dma(&self) -> Result<(), String> {
        self.access().disable_dma()
    }

    fn access(&self) -> &dyn FunctionAccess {
        &*self.mappings.device().access
    }
}

impl IoatDevice for FunctionDevice {
    fn read_u8(&self, register: u32) -> u8 {
        self.access().read_u8(register)
    }

    fn read_u32(&self, register: u32) -> u32 {
        self.access().read_u32(register)
    }

    fn read_u64(&self, register: u32) -> u64 {
        self.access().read_u64(register)
    }

    fn write_u8(&mut self, register: u32, value: u8) {
        self.access().write_u8(register, value);
    }

    fn write_u16(&mut self, register: u32, value: u16) {
        self.access().write_u16(register, value);
    }

    fn write_u32(&mut self, register: u32, value: u32) {
        self.access().write_u32(register, value);
    }

    fn write_u64(&mut self, register: u32, value: u64) {
        self.access().write_u64(register, value);
    }

    fn ring_entries(&self) -> u32 {
        RING_ENTRIES
    }

    fn ring_address(&self) -> u64 {
        self.ring_address
    }

    fn write_descriptor(&mut self, index: u32, words: &[u64; DESCRIPTOR_WORDS]) {
        self.ring.view().write(index, words);
    }

    fn completion_address(&self) -> u64 {
        self.completion_address
    }

    fn completion(&self) -> u64 {
        self.completion.load_u64(0)
    }

    fn clear_completion(&mut self) {
        self.completion.store_u64(0, 0);
    }
}
