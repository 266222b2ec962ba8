//! Reads of a device by the thread that calls, without a core and a channel.
//!
//! A thread that waits for its read anyway, such as a reader of a database, would else hand it to a core and
//! be woken by it: two changes of threads for one read. A file can be read where it is. What a read by this
//! way does not do is counting, limiting or tracing: while one of these is asked for, it is refused, and the
//! caller uses a channel.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use block_io::Status;

use crate::device::{BlockDevice, BlockingReader, SAMPLED};

/// Reads a device on any thread; a read waits in the kernel.
///
/// Made by [`BaseBdev::reader`](crate::stacking::BaseBdev::reader). It does not keep the device open: its
/// reads fail once it is closed. A read allocates nothing.
#[derive(Clone)]
pub struct DeviceReader {
    device: Arc<BlockDevice>,
    reader: Arc<dyn BlockingReader>,
}

impl DeviceReader {
    pub(crate) fn new(device: &Arc<BlockDevice>) -> Option<DeviceReader> {
        let reader = device.bdev().blocking_reader()?;
        Some(DeviceReader { device: device.clone(), reader })
    }

    /// How the address of `out` is to be aligned in [`read`](Self::read), in bytes.
    pub fn alignment(&self) -> usize {
        self.device.geometry().buffer_alignment as usize
    }

    /// Reads whole blocks at a byte of the device.
    ///
    /// # Errors
    /// The device's, also once it is removed. [`Status::INTERNAL_ERROR`] while it is limited, traced or
    /// reserved: a channel can read it then.
    ///
    /// # Panics
    /// If `offset`, `out` or its address is not aligned.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Status> {
        let geometry = self.device.geometry();
        let block_bytes = u64::from(geometry.block_size);
        let is_whole = offset.is_multiple_of(block_bytes) && (out.len() as u64).is_multiple_of(block_bytes);
        assert!(is_whole, "{} bytes at {offset} are no blocks of {block_bytes}", out.len());
        let address = out.as_ptr().addr();
        assert!(address.is_multiple_of(self.alignment()), "memory at {address:#x} is not aligned");
        // Sampling counts requests in flight, and misses this one.
        if self.device.state.load(Ordering::Relaxed) & !SAMPLED != 0 {
            return Err(Status::INTERNAL_ERROR);
        }
        match offset.checked_add(out.len() as u64) {
            Some(end) if end <= geometry.bytes() => self.reader.read(offset, out),
            _ => Err(Status::LBA_OUT_OF_RANGE),
        }
    }
}
