//! Doorbells in BAR0 and, after Doorbell Buffer Config, shadow doorbells in client memory.
//!
//! Shadow doorbells save the client a message per doorbell write. They are offered only when BAR0 cannot be
//! mapped; otherwise the doorbells themselves are shared memory. The admin queue has no shadow doorbells (Base
//! 2.0, section 5.8 and annex B.5).

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use block_io::Status;
use dma::SharedRegion;
use rustix::io::Errno;
use wire_nvme::doorbell::{DOORBELLS_OFFSET, DoorbellBuffer};

use super::data::PAGE;
use super::memory::ClientMemory;
use super::queue::QueueMemory;

/// Bytes of doorbells: one page, the unit of mapping.
pub(super) const DOORBELLS_BYTES: u64 = 4096;
/// Bytes of BAR0: registers and doorbells.
pub(super) const BAR0_BYTES: u64 = DOORBELLS_OFFSET as u64 + DOORBELLS_BYTES;
/// The first two doorbells are those of the admin queue.
const ADMIN: u64 = 2;
/// Number of doorbells.
const COUNT: u64 = DOORBELLS_BYTES / 4;

/// The doorbells of a function. The tail doorbell of submission queue `qid` has index `2 * qid`; the head
/// doorbell of completion queue `qid` has index `2 * qid + 1`.
pub(super) struct ControllerDoorbells {
    bar0: SharedRegion,
    file: Rc<OwnedFd>,
    shadow: Option<ShadowDoorbells>,
}

struct ShadowDoorbells {
    addresses: DoorbellBuffer,
    /// The shadow doorbell page and the EventIdx page. `None` while the DMA range of either is unmapped.
    pages: Option<(QueueMemory, QueueMemory)>,
    /// EventIdx values are current: the client's next doorbell write sends a message.
    armed: bool,
}

impl ControllerDoorbells {
    /// Creates the memory of BAR0, sealed so that the client cannot shrink or grow it. Each client gets its own,
    /// because a former client may keep its mapping.
    pub(super) fn new() -> Result<ControllerDoorbells, Errno> {
        use rustix::fs::{MemfdFlags, SealFlags};
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("ringbolt-bar0", flags)?;
        rustix::fs::ftruncate(&file, BAR0_BYTES)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let bar0 = SharedRegion::map(file.as_fd(), 0, BAR0_BYTES, true).map_err(|_| Errno::NOMEM)?;
        Ok(ControllerDoorbells { bar0, file: Rc::new(file), shadow: None })
    }

    /// The memfd of BAR0, for the client to map.
    pub(super) fn file(&self) -> Rc<OwnedFd> {
        Rc::clone(&self.file)
    }

    /// The current value of a doorbell; `None` while its shadow page is unmapped.
    #[inline(always)]
    pub(super) fn load(&self, index: u64) -> Option<u32> {
        match &self.shadow {
            Some(shadow) if index >= ADMIN => Some(shadow.pages.as_ref()?.0.load_u32(index * 4)),
            _ => Some(self.bar0.load_u32(u64::from(DOORBELLS_OFFSET) + index * 4)),
        }
    }

    /// Stores a doorbell that the client wrote by message. With shadow doorbells the message only wakes the core.
    pub(super) fn write(&self, index: u64, value: u32) {
        self.bar0.store_u32(u64::from(DOORBELLS_OFFSET) + index * 4, value);
    }

    /// Resets a doorbell to 0 for a new queue.
    pub(super) fn reset_doorbell(&self, index: u64) {
        self.write(index, 0);
        if index >= ADMIN
            && let Some((doorbells, events)) = self.shadow.as_ref().and_then(|shadow| shadow.pages.as_ref())
        {
            doorbells.store_u32(index * 4, 0);
            events.store_u32(index * 4, 0);
        }
    }

    /// Resets all doorbells, or only those of I/O queues if not `admin`.
    pub(super) fn reset(&mut self, admin: bool) {
        if admin {
            self.shadow = None;
        }
        for index in if admin { 0 } else { ADMIN }..COUNT {
            self.write(index, 0);
        }
    }

    /// Executes Doorbell Buffer Config and copies the current doorbell values to the shadow page.
    ///
    /// # Errors
    /// The status to complete the command with: a page is not mapped and writable.
    pub(super) fn configure_shadow(
        &mut self,
        addresses: DoorbellBuffer,
        memory: &ClientMemory,
    ) -> Result<(), Status> {
        let shadow = ShadowDoorbells { addresses, pages: pages(&addresses, memory), armed: false };
        let Some((doorbells, events)) = &shadow.pages else { return Err(Status::DATA_TRANSFER_ERROR) };
        for index in ADMIN..COUNT {
            // The current value comes from an earlier shadow page or else from BAR0.
            doorbells.store_u32(index * 4, self.load(index).unwrap_or(0));
            events.store_u32(index * 4, 0);
        }
        self.shadow = Some(shadow);
        Ok(())
    }

    /// Shadow doorbells are in use and not armed: the client writes doorbells without a message.
    #[inline]
    pub(super) fn can_arm(&self) -> bool {
        self.shadow.as_ref().is_some_and(|shadow| !shadow.armed)
    }

    /// Disarms, after a doorbell write was seen: the client need not send messages until the next [`arm`](Self::arm).
    #[inline]
    pub(super) fn disarm(&mut self) {
        if let Some(shadow) = &mut self.shadow {
            shadow.armed = false;
        }
    }

    /// Requests a message for the next write of each doorbell, given its current value, through EventIdx. The
    /// caller must read all doorbells once more afterwards: the client may have written one meanwhile.
    pub(super) fn arm(&mut self, values: impl Iterator<Item = (u64, u32)>) {
        let Some(shadow) = &mut self.shadow else { return };
        shadow.armed = true;
        if let Some((_, events)) = &shadow.pages {
            for (index, value) in values.filter(|(index, _)| *index >= ADMIN) {
                events.store_u32(index * 4, value);
            }
        }
        // The client writes the shadow doorbell and then reads EventIdx; this side stores EventIdx and then
        // reads the shadow doorbell. With a full fence on both sides at least one sees the other's store.
        fence(Ordering::SeqCst);
    }

    /// Translates the shadow pages again, after DMA ranges have changed.
    pub(super) fn remap(&mut self, memory: &ClientMemory) {
        if let Some(shadow) = &mut self.shadow {
            shadow.pages = pages(&shadow.addresses, memory);
        }
    }

    pub(super) fn is_poisoned(&self) -> bool {
        let pages = self.shadow.as_ref().and_then(|shadow| shadow.pages.as_ref());
        pages.is_some_and(|(doorbells, events)| doorbells.is_poisoned() || events.is_poisoned())
    }
}

fn pages(addresses: &DoorbellBuffer, memory: &ClientMemory) -> Option<(QueueMemory, QueueMemory)> {
    let page = |address| QueueMemory::locate(memory, address, PAGE, true);
    Some((page(addresses.shadow)?, page(addresses.events)?))
}
