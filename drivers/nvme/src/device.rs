//! What a transport gives the driver: registers, doorbells, and memory that the device can reach.
//!
//! [`Registers`] and [`Dma`] are all that a controller in memory differs by, whether it is a PCI
//! Express function, another process behind vfio-user or the software controller of the tests.
//! Registers are for control and may be slow; doorbells are a mapping, because every batch rings one.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use memory::{ChunkMemory, SharedRegion};

/// Why a device could not be reached.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// It was pulled out, or the process behind it has ended.
    #[error("the device is gone")]
    Gone,
    /// The register area is too small for what the controller claims to have.
    #[error("BAR0 has {have} bytes, but the controller's registers and doorbells need {need}")]
    BarTooSmall {
        /// Bytes that there are.
        have: u64,
        /// Bytes that are needed.
        need: u64,
    },
    /// The memory cannot be shared with the device.
    #[error("the device cannot be given memory: {0}")]
    Memory(String),
    /// Anything else; the text says what failed and what to do.
    #[error("{0}")]
    Other(String),
}

/// Where the doorbells are: the mapped part of BAR0 from offset 1000h on.
#[derive(Clone)]
pub struct Doorbells {
    /// The mapping.
    pub region: Arc<SharedRegion>,
    /// Where in it the first doorbell, the admin submission queue's, lies.
    pub offset: u64,
    /// Bytes of doorbells from there.
    pub bytes: u64,
}

/// The registers of a controller: BAR0.
///
/// A value of all ones is what a PCI Express function that was pulled out reads as; callers look for it.
pub trait Registers: Send + Sync {
    /// Reads 32 bits at `offset`, which is a multiple of 4.
    fn read_u32(&self, offset: u32) -> Result<u32, DeviceError>;

    /// Reads 64 bits at `offset`, which is a multiple of 8.
    fn read_u64(&self, offset: u32) -> Result<u64, DeviceError>;

    /// Writes 32 bits at `offset`, which is a multiple of 4.
    fn write_u32(&self, offset: u32, value: u32) -> Result<(), DeviceError>;

    /// Writes 64 bits at `offset`, which is a multiple of 8; a transport without such writes makes two
    /// of 32 bits, the lower half first.
    fn write_u64(&self, offset: u32, value: u64) -> Result<(), DeviceError>;

    /// The doorbells, at least `bytes` of them.
    fn doorbells(&self, bytes: u64) -> Result<Doorbells, DeviceError>;
}

/// Memory that the device reads and writes.
pub trait Dma: Send + Sync {
    /// Lets the device reach a chunk, and returns the address at which it sees the chunk's first byte.
    ///
    /// Asked once a chunk and controller. The chunk stays with the device until the device is dropped.
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DeviceError>;

    /// Lets the device take part: bus mastering, or whatever stands for it.
    fn start(&self) -> Result<(), DeviceError>;

    /// Takes the memory away: when this has returned without error, the device writes none of it any
    /// more, whatever its state. [`start`](Self::start) gives it back.
    fn stop(&self) -> Result<(), DeviceError>;
}

/// A controller's device.
pub trait Device: Registers + Dma {
    /// Its name for messages, as the URI has it.
    fn name(&self) -> String;

    /// Whether it still answers, and nobody wants it back, as before an orderly removal.
    fn is_present(&self) -> bool;

    /// Sets up `vectors` interrupts, one event descriptor each, or as many as the device has; none
    /// where it has no message-signalled interrupts.
    fn interrupts(&self, vectors: u16) -> Result<Vec<OwnedFd>, DeviceError>;

    /// Resets the whole function, where the transport can.
    fn reset(&self) -> Result<(), DeviceError>;
}
