//! Doorbells: in BAR0 and, once the client has said so, their shadows in its memory.
//!
//! A shadow saves the client a message for every doorbell. They are offered where doorbells cannot be mapped:
//! elsewhere both are memory. The admin queue has none (Base 2.0, section 5.8 and annex B.5).

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use memory::SharedRegion;
use ring::Status;
use rustix::io::Errno;
use wire_nvme::doorbell::{DOORBELLS_OFFSET, DoorbellBuffer};

use super::data::PAGE;
use super::memory::Memory;
use super::queue::Place;

/// Bytes of doorbells: a page, which is what can be mapped.
pub(super) const DOORBELLS_BYTES: u64 = 4096;
/// Bytes of the region with registers and doorbells.
pub(super) const BAR0_BYTES: u64 = DOORBELLS_OFFSET as u64 + DOORBELLS_BYTES;
/// Doorbells of the admin queue come first.
const ADMIN: u64 = 2;
/// All doorbells that there are.
const COUNT: u64 = DOORBELLS_BYTES / 4;

/// The doorbells of a function. Each has an index: twice its queue's identifier for the tail of a submission
/// queue, one more for the head of a completion queue.
pub(super) struct Doorbells {
    bar0: SharedRegion,
    file: Rc<OwnedFd>,
    shadow: Option<Shadow>,
}

struct Shadow {
    addresses: DoorbellBuffer,
    /// The doorbells, and where the client looks whether it has to ring them all the same. `None` while it has
    /// taken either away.
    pages: Option<(Place, Place)>,
    /// The client rings whatever it does next.
    armed: bool,
}

impl Doorbells {
    /// Memory for BAR0 that the client can map and neither shrink nor grow. One for each client: whoever had it
    /// once may keep it.
    pub(super) fn new() -> Result<Doorbells, Errno> {
        use rustix::fs::{MemfdFlags, SealFlags};
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("ringbolt-bar0", flags)?;
        rustix::fs::ftruncate(&file, BAR0_BYTES)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let bar0 = SharedRegion::map(file.as_fd(), 0, BAR0_BYTES, true).map_err(|_| Errno::NOMEM)?;
        Ok(Doorbells { bar0, file: Rc::new(file), shadow: None })
    }

    /// BAR0, to be mapped by the client.
    pub(super) fn file(&self) -> Rc<OwnedFd> {
        Rc::clone(&self.file)
    }

    /// What the client has written last; `None` while it has taken the memory away.
    #[inline(always)]
    pub(super) fn load(&self, index: u64) -> Option<u32> {
        match &self.shadow {
            Some(shadow) if index >= ADMIN => Some(shadow.pages.as_ref()?.0.load_u32(index * 4)),
            _ => Some(self.bar0.load_u32(u64::from(DOORBELLS_OFFSET) + index * 4)),
        }
    }

    /// A doorbell that was written by message. With shadows the value is only a wake-up.
    pub(super) fn ring(&self, index: u64, value: u32) {
        self.bar0.store_u32(u64::from(DOORBELLS_OFFSET) + index * 4, value);
    }

    /// As for a new queue.
    pub(super) fn clear(&self, index: u64) {
        self.ring(index, 0);
        if index >= ADMIN
            && let Some((doorbells, events)) = self.shadow.as_ref().and_then(|shadow| shadow.pages.as_ref())
        {
            doorbells.store_u32(index * 4, 0);
            events.store_u32(index * 4, 0);
        }
    }

    /// As for a new controller, or for one whose I/O queues are gone.
    pub(super) fn reset(&mut self, admin: bool) {
        if admin {
            self.shadow = None;
        }
        for index in if admin { 0 } else { ADMIN }..COUNT {
            self.ring(index, 0);
        }
    }

    /// Doorbell Buffer Config. What was written until now is found there.
    ///
    /// # Errors
    /// The status to complete the command with.
    pub(super) fn share(&mut self, addresses: DoorbellBuffer, memory: &Memory) -> Result<(), Status> {
        let shadow = Shadow { addresses, pages: pages(&addresses, memory), armed: false };
        let Some((doorbells, events)) = &shadow.pages else { return Err(Status::DATA_TRANSFER_ERROR) };
        for index in ADMIN..COUNT {
            // What it is now in a shadow before, or else in BAR0.
            doorbells.store_u32(index * 4, self.load(index).unwrap_or(0));
            events.store_u32(index * 4, 0);
        }
        self.shadow = Some(shadow);
        Ok(())
    }

    /// Whether the client does not ring while nobody has asked it to.
    #[inline]
    pub(super) fn are_quiet(&self) -> bool {
        self.shadow.as_ref().is_some_and(|shadow| !shadow.armed)
    }

    /// Something has come: until it is asked again, the client does not ring.
    #[inline]
    pub(super) fn disarm(&mut self) {
        if let Some(shadow) = &mut self.shadow {
            shadow.armed = false;
        }
    }

    /// Asks the client to ring when it writes a doorbell that has this value now. Look at all of them once more
    /// afterwards: it may just have written.
    pub(super) fn arm(&mut self, values: impl Iterator<Item = (u64, u32)>) {
        let Some(shadow) = &mut self.shadow else { return };
        shadow.armed = true;
        if let Some((_, events)) = &shadow.pages {
            for (index, value) in values.filter(|(index, _)| *index >= ADMIN) {
                events.store_u32(index * 4, value);
            }
        }
        // The client writes a doorbell, and then looks whether to ring. Either it sees what was just stored, or
        // we see what it wrote.
        fence(Ordering::SeqCst);
    }

    /// Looks for the client's memory again.
    pub(super) fn replace(&mut self, memory: &Memory) {
        if let Some(shadow) = &mut self.shadow {
            shadow.pages = pages(&shadow.addresses, memory);
        }
    }

    pub(super) fn is_poisoned(&self) -> bool {
        let pages = self.shadow.as_ref().and_then(|shadow| shadow.pages.as_ref());
        pages.is_some_and(|(doorbells, events)| doorbells.is_poisoned() || events.is_poisoned())
    }
}

fn pages(addresses: &DoorbellBuffer, memory: &Memory) -> Option<(Place, Place)> {
    let page = |address| Place::find(memory, address, PAGE, true);
    Some((page(addresses.shadow)?, page(addresses.events)?))
}
