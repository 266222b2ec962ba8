//! Shadow doorbells: a page in memory to which the driver writes doorbell values, and a page of event indices with
//! which the controller says when it needs a register write (Base 2.0, section 5.8: Doorbell Buffer Config; annex
//! B.5).
//!
//! Emulated controllers offer this, because a doorbell register write costs them a VM exit.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use dma::{ChunkMemory, SharedRegion};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::device::DeviceError;

/// Newly allocated shadow doorbell and event index pages of a controller, to be mapped for the device.
pub(crate) struct ShadowDoorbellMemory {
    region: SharedRegion,
    memory: ChunkMemory,
    page: u64,
}

/// The shadow doorbell and event index pages of a controller, shared by its queue pairs on all cores.
pub(crate) struct ShadowDoorbellPages {
    region: SharedRegion,
    page: u64,
}

/// The shadow doorbells and event indices of one queue pair.
pub(crate) struct QueueShadowDoorbells {
    pages: Arc<ShadowDoorbellPages>,
    sq: u64,
    cq: u64,
}

impl ShadowDoorbellMemory {
    /// Allocates two pages of `page` bytes in a memfd, so that any transport can map them.
    pub(crate) fn new(page: u64) -> Result<ShadowDoorbellMemory, DeviceError> {
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
        Ok(ShadowDoorbellMemory { region, memory, page })
    }

    /// The memory to map for the device.
    pub(crate) fn memory(&self) -> &ChunkMemory {
        &self.memory
    }

    pub(crate) fn into_doorbells(self) -> ShadowDoorbellPages {
        ShadowDoorbellPages { region: self.region, page: self.page }
    }
}

impl ShadowDoorbellPages {
    /// The shadow doorbells of a queue pair; `None` if the pages are too short for its identifier.
    pub(crate) fn for_queue(self: &Arc<Self>, qid: u16, stride_log2: u8) -> Option<QueueShadowDoorbells> {
        let at = |index: u64| index << (2 + stride_log2);
        let (sq, cq) = (at(2 * u64::from(qid)), at(2 * u64::from(qid) + 1));
        (cq + 4 <= self.page).then(|| QueueShadowDoorbells { pages: self.clone(), sq, cq })
    }
}

impl QueueShadowDoorbells {
    /// Stores the new submission queue tail; returns whether the doorbell register must be written too.
    #[inline]
    pub(crate) fn update_sq_tail(&self, old: u16, new: u16) -> bool {
        self.update(self.sq, old, new)
    }

    /// Stores the new completion queue head; returns whether the doorbell register must be written too.
    #[inline]
    pub(crate) fn update_cq_head(&self, old: u16, new: u16) -> bool {
        self.update(self.cq, old, new)
    }

    #[inline]
    fn update(&self, at: u64, old: u16, new: u16) -> bool {
        self.pages.region.store_u32(at, new.into());
        // The controller writes its event index, then reads the shadow doorbell. The store above must be visible
        // before the load below, or both sides may wait for each other.
        fence(Ordering::SeqCst);
        let event = self.pages.region.load_u32(self.pages.page + at) as u16;
        needs_doorbell(event, new, old)
    }

    /// Clears both words of both queues, as after a controller reset.
    pub(crate) fn clear(&self) {
        for at in [self.sq, self.cq] {
            self.pages.region.store_u32(at, 0);
            self.pages.region.store_u32(self.pages.page + at, 0);
        }
    }
}

/// Whether the step from `old` to `new` passes the event index (`nvme_dbbuf_need_event` in Linux).
#[inline]
fn needs_doorbell(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbell_register_is_written_only_when_the_event_index_is_passed() {
        // The register write is needed when the event index lies in old..new.
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
            assert_eq!(needs_doorbell(event, new, old), rings, "event {event}, {old} to {new}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn queues_beyond_the_page_have_no_shadow_doorbells() {
        let pages = ShadowDoorbellMemory::new(4096).unwrap();
        assert_eq!(pages.memory().bytes, 8192);
        let pages = Arc::new(pages.into_doorbells());
        assert!(pages.for_queue(511, 0).is_some() && pages.for_queue(512, 0).is_none());
        let shadow = pages.for_queue(1, 0).unwrap();
        assert!(shadow.update_sq_tail(0, 1), "the event index is 0 at first");
        pages.region.store_u32(4096 + 8, 5);
        assert!(!shadow.update_sq_tail(1, 4) && shadow.update_sq_tail(4, 6));
        assert_eq!(pages.region.load_u32(8), 6);
    }
}
