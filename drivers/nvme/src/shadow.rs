//! Shadow doorbells: a page in memory where the driver leaves what it would ring, and a page where the
//! controller says when it wants to be rung (Base 2.0, section 5.8: Doorbell Buffer Config; annex B.5).
//!
//! Emulated controllers offer this, because a doorbell costs them an exit from the guest.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use memory::{ChunkMemory, SharedRegion};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::device::DeviceError;

/// Both pages of a controller, for all of its queues.
pub(crate) struct ShadowPages {
    region: SharedRegion,
    memory: ChunkMemory,
    page: u64,
}

/// The part of the pages that queues on other cores use.
pub(crate) struct Pages {
    region: SharedRegion,
    page: u64,
}

/// One queue pair's words.
pub(crate) struct Shadow {
    pages: Arc<Pages>,
    sq: u64,
    cq: u64,
}

impl ShadowPages {
    /// Two pages of `page` bytes in a file of their own, so that any transport can share them.
    pub(crate) fn new(page: u64) -> Result<ShadowPages, DeviceError> {
        let failed = |what: std::io::Error| DeviceError::Memory(format!("shadow doorbells: {what}"));
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file =
            rustix::fs::memfd_create("ringbolt-doorbells", flags).map_err(|error| failed(error.into()))?;
        rustix::fs::ftruncate(&file, 2 * page).map_err(|error| failed(error.into()))?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)
            .map_err(|error| failed(error.into()))?;
        let region = SharedRegion::map(std::os::fd::AsFd::as_fd(&file), 0, 2 * page, true)
            .map_err(|error| DeviceError::Memory(error.to_string()))?;
        let memory = ChunkMemory {
            index: u32::MAX,
            start: region.as_ptr(),
            bytes: (2 * page) as usize,
            file: Some(Arc::new(file)),
            huge: false,
        };
        Ok(ShadowPages { region, memory, page })
    }

    /// What the device is to be shown.
    pub(crate) fn memory(&self) -> &ChunkMemory {
        &self.memory
    }

    pub(crate) fn into_pages(self) -> Pages {
        Pages { region: self.region, page: self.page }
    }
}

impl Pages {
    /// The words of a queue pair, unless the pages are too short for it.
    pub(crate) fn of_queue(self: &Arc<Self>, qid: u16, stride_log2: u8) -> Option<Shadow> {
        let at = |index: u64| index << (2 + stride_log2);
        let (sq, cq) = (at(2 * u64::from(qid)), at(2 * u64::from(qid) + 1));
        (cq + 4 <= self.page).then(|| Shadow { pages: self.clone(), sq, cq })
    }
}

impl Shadow {
    /// Leaves the new tail; whether the doorbell must be rung as well.
    #[inline]
    pub(crate) fn submit(&self, old: u16, new: u16) -> bool {
        self.leave(self.sq, old, new)
    }

    /// Leaves the new head; whether the doorbell must be rung as well.
    #[inline]
    pub(crate) fn complete(&self, old: u16, new: u16) -> bool {
        self.leave(self.cq, old, new)
    }

    #[inline]
    fn leave(&self, at: u64, old: u16, new: u16) -> bool {
        self.pages.region.store_u32(at, new.into());
        // The controller reads the shadow after it has said that it wants to be rung; the store above must
        // be seen before the word below is looked at, or both sides may wait for each other.
        fence(Ordering::SeqCst);
        let event = self.pages.region.load_u32(self.pages.page + at) as u16;
        must_ring(event, new, old)
    }

    /// As after a reset of the controller.
    pub(crate) fn clear(&self) {
        for at in [self.sq, self.cq] {
            self.pages.region.store_u32(at, 0);
            self.pages.region.store_u32(self.pages.page + at, 0);
        }
    }
}

/// Whether the step from `old` to `new` passes the position at which the controller wants to be rung.
#[inline]
fn must_ring(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_doorbell_is_rung_exactly_when_the_event_is_passed() {
        // The step goes over the positions old+1 to new; the event counts when it lies in old..new.
        for (event, old, new, rings) in [
            (0, 0, 1, true),
            (1, 0, 1, false),
            (5, 4, 8, true),
            (8, 4, 8, false),
            (3, 4, 8, false),
            (7, 4, 8, true),
            (u16::MAX, u16::MAX, 1, true),
            (1, u16::MAX, 1, false),
            (0, u16::MAX, 1, true),
        ] {
            assert_eq!(must_ring(event, new, old), rings, "event {event}, {old} to {new}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn queues_beyond_the_page_have_no_shadow() {
        let pages = ShadowPages::new(4096).unwrap();
        assert_eq!(pages.memory().bytes, 8192);
        let pages = Arc::new(pages.into_pages());
        assert!(pages.of_queue(511, 0).is_some() && pages.of_queue(512, 0).is_none());
        let shadow = pages.of_queue(1, 0).unwrap();
        assert!(shadow.submit(0, 1), "the controller wants to be rung at 0 at first");
        pages.region.store_u32(4096 + 8, 5);
        assert!(!shadow.submit(1, 4) && shadow.submit(4, 6));
        assert_eq!(pages.region.load_u32(8), 6);
    }
}
