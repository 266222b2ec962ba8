//! What a device remembers of its past: how often it was started, and the newest that it has seen of its
//! cluster's map.

use codec::DecodeError;

use crate::SECTOR_BYTES;
use crate::fields::{array, check_location, check_zero, open, put, seal, u32_at, u64_at};

const MAGIC: [u8; 4] = *b"RBDS";

/// The state of a device: sector 1 of block 0, and a copy in sector 1 of the last block. Both are written,
/// one after the other, and the one of the higher generation counts. A device of an earlier release has
/// zeroes there, which is the default.
///
/// A device that was put back from a copy brings an older state with it. So what matters is kept outside of
/// the device too, and compared at the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceState {
    /// The device, a UUID, as in its superblock.
    pub device: [u8; 16],
    /// Higher with each write.
    pub generation: u64,
    /// Starts of the node with this device.
    pub incarnation: u64,
    /// The highest revision of the map that was seen; 0 if the map has none.
    pub map_revision: u64,
    /// No image that was seen has this volume or a higher one.
    pub volumes_end: u64,
    /// No pool that was seen has this logical group or a higher one.
    pub groups_end: u32,
}

impl DeviceState {
    /// Offset in a block of the sector that has it.
    pub const OFFSET: usize = SECTOR_BYTES;

    /// Encodes the state for block `location`.
    pub fn encode(&self, location: u64) -> [u8; SECTOR_BYTES] {
        let mut out = [0; SECTOR_BYTES];
        put(&mut out, 16, location.to_le_bytes());
        put(&mut out, 24, self.device);
        put(&mut out, 40, self.generation.to_le_bytes());
        put(&mut out, 48, self.incarnation.to_le_bytes());
        put(&mut out, 56, self.map_revision.to_le_bytes());
        put(&mut out, 64, self.volumes_end.to_le_bytes());
        put(&mut out, 72, self.groups_end.to_le_bytes());
        seal(&mut out, MAGIC);
        out
    }

    /// Decodes what was read from block `location`; `None` if there is none yet.
    ///
    /// # Errors
    /// The first field that no state of this version and place has.
    pub fn decode(from: &[u8], location: u64) -> Result<Option<DeviceState>, DecodeError> {
        if from.len() == SECTOR_BYTES && from.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        open("the state of a device", from, SECTOR_BYTES, MAGIC)?;
        check_zero("a reserved field of the state of a device", from, 6..8)?;
        check_zero("a reserved field of the state of a device", from, 12..16)?;
        check_location(u64_at(from, 16), location, 16)?;
        check_zero("a reserved field of the state of a device", from, 76..SECTOR_BYTES)?;
        Ok(Some(DeviceState {
            device: array(from, 24),
            generation: u64_at(from, 40),
            incarnation: u64_at(from, 48),
            map_revision: u64_at(from, 56),
            volumes_end: u64_at(from, 64),
            groups_end: u32_at(from, 72),
        }))
    }
}
