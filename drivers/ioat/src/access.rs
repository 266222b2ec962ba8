//! What a way to a function has to offer: its registers, and its DMA.

use dma::Dma;
use pci::PciError;
use wire_ioat::registers;

use crate::IoatAddress;

/// Why a function is not opened.
#[derive(Debug, thiserror::Error)]
pub enum IoatOpenError {
    /// It is a PCI function of another kind.
    #[error("{address} is no I/OAT function: its vendor and device ID are {vendor:04x}:{device:04x}")]
    NotIoat {
        /// The function.
        address: IoatAddress,
        /// Vendor ID.
        vendor: u16,
        /// Device ID.
        device: u16,
    },
    /// The kernel or the PCI bus; the message says what to do.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// The server of a device behind vfio-user.
    #[error("{address}: {error}")]
    VfioUser {
        /// The function.
        address: IoatAddress,
        /// What the client says.
        error: ::vfio_user::VfioUserError,
    },
    /// BAR 0 has no space for the registers.
    #[error("{address}: BAR 0 has {bytes} bytes, and the registers need {}", registers::REGISTERS_BYTES)]
    BarTooSmall {
        /// The function.
        address: IoatAddress,
        /// Size of BAR 0.
        bytes: u64,
    },
}

/// The registers of a function, and its DMA.
///
/// Accesses have the width of the register. Registers of a function that is gone, and of one whose server
/// does not answer, read as ones; writes to them have no effect.
pub(crate) trait FunctionAccess: Dma {
    fn read_u8(&self, register: u32) -> u8;
    fn read_u32(&self, register: u32) -> u32;
    fn read_u64(&self, register: u32) -> u64;
    fn write_u8(&self, register: u32, value: u8);
    fn write_u16(&self, register: u32, value: u16);
    fn write_u32(&self, register: u32, value: u32);
    fn write_u64(&self, register: u32, value: u64);
    /// Allows the function to read and write memory.
    fn enable_dma(&self) -> Result<(), String>;
    /// Ends that: after success the function writes no memory, whatever its state.
    fn disable_dma(&self) -> Result<(), String>;
}
