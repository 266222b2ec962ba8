//! The log of dirty pages, by which a front-end migrates a running guest.

use crate::memory::{GuestPlace, SharedPlace};

/// Bytes of guest memory for each bit of the log.
const PAGE_BYTES: u64 = 4096;

/// A bitmap of the guest's pages that were written, in memory of the front-end.
pub(crate) struct DirtyLog {
    place: GuestPlace,
    bytes: u64,
}

/// The log of a core's, on its way to another one. Bits are set atomically.
pub(crate) struct SharedDirtyLog {
    place: SharedPlace,
    bytes: u64,
}

impl From<SharedDirtyLog> for DirtyLog {
    fn from(SharedDirtyLog { place, bytes }: SharedDirtyLog) -> DirtyLog {
        DirtyLog { place: place.into(), bytes }
    }
}

impl DirtyLog {
    /// The same log, for another core.
    pub(crate) fn share(&self) -> SharedDirtyLog {
        SharedDirtyLog { place: self.place.share(), bytes: self.bytes }
    }

    /// The log of `bytes` bytes at a place, all of them mapped.
    pub(crate) fn new(place: GuestPlace, bytes: u64) -> DirtyLog {
        DirtyLog { place, bytes }
    }

    /// Marks the pages of a range of guest addresses, as far as the log reaches.
    pub(crate) fn mark(&self, address: u64, bytes: u64) {
        let Some(last) = bytes.checked_sub(1) else { return };
        let last =
            (address.saturating_add(last) / PAGE_BYTES).min(self.bytes.saturating_mul(8).saturating_sub(1));
        for page in address / PAGE_BYTES..=last {
            self.place.region.set_bits_u8(self.place.offset + page / 8, 1 << (page % 8));
        }
    }

    /// Whether its file was truncated.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.place.region.is_poisoned()
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn pages_are_marked_up_to_the_end_of_the_log() {
        let region = Rc::new(dma::SharedRegion::new(4096).unwrap());
        let log = DirtyLog::new(GuestPlace { region: region.clone(), offset: 16 }, 2);
        log.mark(0x0fff, 2);
        log.mark(0x9000, 0);
        assert_eq!(region.snapshot::<4>(15), [0, 0b11, 0, 0]);
        log.mark(0xf000, u64::MAX);
        log.mark(u64::MAX, 1);
        log.mark(0x1_0000, 4096);
        assert_eq!(region.snapshot::<4>(15), [0, 0b11, 0x80, 0]);
    }
}
