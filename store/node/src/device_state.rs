//! Reads and writes what a device remembers of its past.
//!
//! Each write has the superblock with it, so that one which was damaged is whole again after a start.

use wire_store::{BLOCK_BYTES, DeviceState, LogSuperblock, SECTOR_BYTES, Superblock};

use crate::StoreError;
use crate::device::StoreDevice;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// What a device's blocks 0 and last begin with: a sector, before that with its state.
pub(crate) trait DeviceHead {
    /// The device, a UUID.
    fn uuid(&self) -> [u8; 16];
    /// The last block.
    fn last_block(&self) -> u64;
    /// Sector 0 of a block.
    fn sector(&self, location: u64) -> [u8; SECTOR_BYTES];
}

impl DeviceHead for Superblock {
    fn uuid(&self) -> [u8; 16] {
        self.device
    }

    fn last_block(&self) -> u64 {
        self.device_blocks - 1
    }

    fn sector(&self, location: u64) -> [u8; SECTOR_BYTES] {
        self.encode(location)
    }
}

impl DeviceHead for LogSuperblock {
    fn uuid(&self) -> [u8; 16] {
        self.log_device
    }

    fn last_block(&self) -> u64 {
        self.device_blocks - 1
    }

    fn sector(&self, location: u64) -> [u8; SECTOR_BYTES] {
        self.encode(location)
    }
}

/// The newest state of a device; the default if it has none, or neither copy is one of this device.
///
/// # Errors
/// What the device reports, if neither copy can be read.
pub(crate) async fn read(device: &StoreDevice, head: &impl DeviceHead) -> Result<DeviceState, StoreError> {
    let mut newest: Option<DeviceState> = None;
    let mut failed = None;
    let mut is_read = false;
    for location in [0, head.last_block()] {
        let block = match device.read(location * BLOCK, BLOCK_BYTES).await {
            Ok(block) => block,
            Err(error) => {
                failed = Some(error);
                continue;
            }
        };
        is_read = true;
        let sector = &block.as_slice()[DeviceState::OFFSET..][..SECTOR_BYTES];
        match DeviceState::decode(sector, location) {
            Ok(Some(state)) if state.device == head.uuid() => {
                newest = newest.into_iter().chain([state]).max_by_key(|state| state.generation);
            }
            Ok(_) => {}
            Err(error) => log::warn!("the state of the device in block {location} is damaged: {error}"),
        }
    }
    match failed {
        Some(error) if !is_read => Err(error),
        _ => Ok(newest.unwrap_or_else(|| DeviceState { device: head.uuid(), ..DeviceState::default() })),
    }
}

/// Writes a state, whose generation is higher than that of the one before. It is durable on return.
///
/// # Errors
/// What the device reports, if neither place can be written.
pub(crate) async fn write(
    device: &StoreDevice,
    head: &impl DeviceHead,
    state: &DeviceState,
) -> Result<(), StoreError> {
    let state = DeviceState { device: head.uuid(), ..state.clone() };
    let mut written = Err(StoreError::Closed);
    for location in [head.last_block(), 0] {
        let bytes = [head.sector(location), state.encode(location)].concat();
        match device.write_head(location, &bytes).await {
            Ok(()) => written = Ok(()),
            Err(error) => {
                log::warn!("{error}: the other copy of the superblock is used");
                written = written.map_err(|_| error);
            }
        }
    }
    written?;
    device.flush().await
}
