//! What is on a device that a new store would overwrite.

use std::ops::Range;

/// Bytes that are looked at from the front and up to the end. At the front are partition tables and the super
/// blocks of file systems (that of btrfs from 64 KiB on), volume managers and stores; at the end the backup
/// of a GPT and the metadata of a member of an md array.
const LOOK_BYTES: u64 = 1 << 20;
/// The first bytes of a blobstore.
const BLOBSTORE: &[u8] = b"SPDKBLOB";

/// What is on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceContent {
    /// Nothing was found: what was looked at is zero.
    Blank,
    /// A blobstore, of whatever kind, or what is left of one.
    Blobstore,
    /// Something else.
    Other {
        /// Its first byte that is not zero.
        at: u64,
    },
}

/// Looks at the first and the last MiB of a device, sans-IO.
///
/// ```
/// use blobfs::{DeviceContent, DeviceLook};
/// let mut device = vec![0; 8 << 20];
/// device[(8 << 20) - 512..][..8].copy_from_slice(b"EFI PART");
/// let mut look = DeviceLook::new(8 << 20, 512);
/// while let Some(range) = look.next_range() {
///     look.add(range.start, &device[range.start as usize..range.end as usize]);
/// }
/// assert_eq!(look.content(), DeviceContent::Other { at: (8 << 20) - 512 });
/// ```
#[derive(Clone, Debug)]
pub struct DeviceLook {
    /// The last one first.
    ranges: Vec<Range<u64>>,
    is_blobstore: bool,
    found: Option<u64>,
}

impl DeviceLook {
    /// A look at a device with blocks of this size.
    pub fn new(bytes: u64, block_bytes: u32) -> DeviceLook {
        let front = 0..LOOK_BYTES.min(bytes);
        let end = bytes.saturating_sub(LOOK_BYTES).next_multiple_of(block_bytes.max(1).into());
        let ranges = [end.max(front.end)..bytes, front].into_iter().filter(|range| !range.is_empty());
        DeviceLook { ranges: ranges.collect(), is_blobstore: false, found: None }
    }

    /// A range to read, of 1 MiB at most and of whole blocks; `None` if all were returned.
    pub fn next_range(&mut self) -> Option<Range<u64>> {
        self.ranges.pop()
    }

    /// Adds what was read.
    pub fn add(&mut self, start: u64, data: &[u8]) {
        self.is_blobstore |= start == 0 && data.starts_with(BLOBSTORE);
        let first = data.iter().position(|byte| *byte != 0).map(|at| start + at as u64);
        self.found = self.found.into_iter().chain(first).min();
    }

    /// What was found.
    pub fn content(&self) -> DeviceContent {
        match self.found {
            _ if self.is_blobstore => DeviceContent::Blobstore,
            Some(at) => DeviceContent::Other { at },
            None => DeviceContent::Blank,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(bytes: u64, block_bytes: u32) -> Vec<Range<u64>> {
        let mut look = DeviceLook::new(bytes, block_bytes);
        std::iter::from_fn(|| look.next_range()).collect()
    }

    #[test]
    fn the_front_and_the_end_are_read_in_whole_blocks_and_once() {
        const MIB: u64 = 1 << 20;
        assert_eq!(ranges(64 * MIB, 4096), [0..MIB, 63 * MIB..64 * MIB]);
        assert_eq!(ranges(64 * MIB + 512, 512), [0..MIB, 63 * MIB + 512..64 * MIB + 512]);
        assert_eq!(ranges(MIB + 4096, 4096), [0..MIB, MIB..MIB + 4096]);
        assert_eq!(ranges(4096, 4096), std::slice::from_ref(&(0..4096)));
        assert_eq!(ranges(0, 4096), []);
        // A file that ends within a block.
        assert_eq!(ranges(4 * MIB + 5, 4096), [0..MIB, 3 * MIB + 4096..4 * MIB + 5]);
    }

    #[test]
    fn a_blobstore_is_named_also_if_it_is_damaged() {
        let mut look = DeviceLook::new(8192, 4096);
        look.add(4096, &[0, 1]);
        assert_eq!(look.content(), DeviceContent::Other { at: 4097 });
        look.add(0, b"\0\0SPDKBLOB");
        assert_eq!(look.content(), DeviceContent::Other { at: 2 });
        look.add(0, b"SPDKBLOB, and then nonsense");
        assert_eq!(look.content(), DeviceContent::Blobstore);
    }
}
