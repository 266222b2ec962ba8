//! The interface between the driver and a memory-based transport: registers, doorbells and DMA.
//!
//! [`NvmeDevice`], made of [`Registers`] and [`dma::Dma`], abstracts a PCI Express function, another process
//! behind vfio-user and the simulated controller of the tests. Registers are for control and may be slow;
//! doorbells are mapped memory, because every batch writes one.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use dma::{Dma, DmaError, SharedRegion};

/// Errors of device access.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device was removed, or its vfio-user server has ended.
    #[error("the device is no longer present")]
    Gone,
    /// BAR0 is too small for the registers and doorbells that the controller reports.
    #[error("BAR0 has {have} bytes, but the controller's registers and doorbells need {need}")]
    BarTooSmall {
        /// Present size in bytes.
        have: u64,
        /// Required size in bytes.
        need: u64,
    },
    /// The memory cannot be mapped for the device.
    #[error("cannot map memory for the device: {0}")]
    Memory(String),
    /// Any other error; the text says what failed and what to do.
    #[error("{0}")]
    Other(String),
}

impl From<DmaError> for DeviceError {
    fn from(error: DmaError) -> DeviceError {
        match error {
            DmaError::Gone => DeviceError::Gone,
            error => DeviceError::Memory(error.to_string()),
        }
    }
}

/// The mapped doorbell registers: BAR0 from offset 1000h.
#[derive(Clone)]
pub struct DoorbellRegion {
    /// Mapped part of BAR0.
    pub region: Arc<SharedRegion>,
    /// Offset in `region` of the first doorbell, that of the admin submission queue.
    pub offset: u64,
    /// Bytes of doorbells from `offset`.
    pub bytes: u64,
}

/// The registers of a controller: BAR0.
///
/// A removed PCI Express function reads as all ones; callers check for it.
pub trait Registers: Send + Sync {
    /// Reads 32 bits at `offset`, which is a multiple of 4.
    fn read_u32(&self, offset: u32) -> Result<u32, DeviceError>;

    /// Reads 64 bits at `offset`, which is a multiple of 8.
    fn read_u64(&self, offset: u32) -> Result<u64, DeviceError>;

    /// Writes 32 bits at `offset`, which is a multiple of 4.
    fn write_u32(&self, offset: u32, value: u32) -> Result<(), DeviceError>;

    /// Writes 64 bits at `offset`, which is a multiple of 8; a transport without 64-bit writes makes two of 32 bits,
    /// the lower half first.
    fn write_u64(&self, offset: u32, value: u64) -> Result<(), DeviceError>;

    /// Maps the doorbells, at least `bytes` bytes.
    fn doorbells(&self, bytes: u64) -> Result<DoorbellRegion, DeviceError>;
}

/// The device of a memory-based controller.
pub trait NvmeDevice: Registers + Dma {
    /// Name for messages, as in the URI.
    fn name(&self) -> String;

    /// Enables the device's DMA: bus mastering for PCI Express, the mappings for vfio-user.
    fn enable_dma(&self) -> Result<(), DeviceError>;

    /// Disables the device's DMA: after success the device writes no memory, whatever its state, until
    /// [`enable_dma`](Self::enable_dma). What is mapped is there afterwards.
    fn disable_dma(&self) -> Result<(), DeviceError>;

    /// Whether the device responds and its orderly removal is not requested.
    fn is_present(&self) -> bool;

    /// Sets up `vectors` interrupts with one eventfd each, or as many as the device has; none if it has no
    /// message-signalled interrupts.
    fn interrupts(&self, vectors: u16) -> Result<Vec<OwnedFd>, DeviceError>;

    /// Resets the function (FLR), if the transport supports it.
    fn reset(&self) -> Result<(), DeviceError>;
}
