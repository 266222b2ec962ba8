//! Interrupts: eventfds that the client has assigned.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use os::EventSignaler;
use rustix::io::Errno;
use wire_vfio_user::{IrqInfo, SetIrqs, irq, irq_flags, irq_set};

use super::function::QUEUES_MAX;

/// The client's eventfds: one per MSI-X vector, one for errors, one for device release requests.
///
/// The client shares them, and may fill their counters and change their flags at any time. So they are never written
/// to, which could block the core, but signalled by the kernel ([`EventSignaler`]).
pub(super) struct ClientInterrupts {
    signaler: EventSignaler,
    msix: Vec<Option<OwnedFd>>,
    error: Vec<Option<OwnedFd>>,
    request: Vec<Option<OwnedFd>>,
}

impl ClientInterrupts {
    /// Creates MSI-X vectors without eventfds.
    ///
    /// # Errors
    /// As of [`EventSignaler::new`].
    pub(super) fn new(vectors: u16) -> io::Result<ClientInterrupts> {
        let no_eventfds = |count: usize| std::iter::repeat_with(|| None).take(count).collect();
        Ok(ClientInterrupts {
            signaler: EventSignaler::new()?,
            msix: no_eventfds(vectors.into()),
            error: no_eventfds(1),
            request: no_eventfds(1),
        })
    }

    /// Replies to `DEVICE_GET_IRQ_INFO`.
    pub(super) fn info(&self, request: &IrqInfo) -> Result<IrqInfo, Errno> {
        let count = match request.index {
            irq::MSIX => self.msix.len() as u32,
            irq::ERROR | irq::REQUEST => 1,
            irq::INTX | irq::MSI => 0,
            _ => return Err(Errno::INVAL),
        };
        if (request.argsz as usize) < IrqInfo::SIZE {
            return Err(Errno::INVAL);
        }
        Ok(IrqInfo { argsz: IrqInfo::SIZE as u32, flags: irq_flags::EVENTFD, index: request.index, count })
    }

    /// Executes `DEVICE_SET_IRQS`.
    pub(super) fn set(&mut self, set: &SetIrqs, data: &[u8], eventfds: Vec<OwnedFd>) -> Result<(), Errno> {
        let SetIrqs { argsz, flags, index, start, count } = *set;
        let signaler = &mut self.signaler;
        let vectors = match index {
            irq::MSIX => &mut self.msix,
            irq::ERROR => &mut self.error,
            irq::REQUEST => &mut self.request,
            _ => return Err(Errno::INVAL),
        };
        let (kind, action) = (flags & irq_set::DATA_MASK, flags & irq_set::ACTION_MASK_ALL);
        let known = irq_set::DATA_MASK | irq_set::ACTION_MASK_ALL;
        if (argsz as usize) < SetIrqs::SIZE
            || flags & !known != 0
            || !kind.is_power_of_two()
            || !action.is_power_of_two()
            || !eventfds.is_empty() && (kind != irq_set::DATA_EVENTFD || eventfds.len() != count as usize)
        {
            return Err(Errno::INVAL);
        }
        let end = start.checked_add(count).filter(|end| *end as usize <= vectors.len());
        let Some(end) = end else { return Err(Errno::INVAL) };
        let range = start as usize..end as usize;
        if action != irq_set::ACTION_TRIGGER {
            // Masking is the client's task: it emulates the MSI-X table.
            return Err(Errno::INVAL);
        }
        match kind {
            // Removes all eventfds of this index.
            irq_set::DATA_NONE if count == 0 && start == 0 => {
                vectors.iter_mut().for_each(|eventfd| *eventfd = None)
            }
            irq_set::DATA_NONE if count > 0 => {
                vectors[range].iter().for_each(|eventfd| signal(signaler, eventfd));
            }
            irq_set::DATA_BOOL if count > 0 && data.len() == count as usize => {
                let selected = vectors[range].iter().zip(data).filter(|(_, trigger)| **trigger != 0);
                selected.for_each(|(eventfd, _)| signal(signaler, eventfd));
            }
            irq_set::DATA_EVENTFD if count > 0 && eventfds.is_empty() => {
                vectors[range].iter_mut().for_each(|eventfd| *eventfd = None);
            }
            irq_set::DATA_EVENTFD if count > 0 => {
                if !eventfds.iter().all(|file| os::is_eventfd(file.as_fd())) {
                    return Err(Errno::INVAL);
                }
                for (eventfd, file) in vectors[range].iter_mut().zip(eventfds) {
                    *eventfd = Some(file);
                }
            }
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }

    /// Signals an MSI-X vector, if it has an eventfd.
    #[inline]
    pub(super) fn trigger(&mut self, vector: u16) {
        if let Some(eventfd) = self.msix.get(usize::from(vector)) {
            signal(&mut self.signaler, eventfd);
        }
    }

    /// Requests that the client releases the device.
    pub(super) fn request(&mut self) {
        self.request.iter().for_each(|eventfd| signal(&mut self.signaler, eventfd));
    }

    /// Drops all eventfds.
    pub(super) fn clear(&mut self) {
        for eventfd in self.msix.iter_mut().chain(&mut self.error).chain(&mut self.request) {
            *eventfd = None;
        }
    }
}

/// The vectors that were signalled in one turn. A vector beyond [`QUEUES_MAX`], which does not exist, is never in it.
#[derive(Default)]
pub(super) struct VectorSet([u64; QUEUES_MAX as usize / 64]);

const _: () = assert!(QUEUES_MAX.is_multiple_of(64));

impl VectorSet {
    /// Adds a vector; `false` if it is in the set already.
    #[inline]
    pub(super) fn insert(&mut self, vector: u16) -> bool {
        let Some(word) = self.0.get_mut(usize::from(vector / 64)) else { return true };
        let bit = 1 << (vector % 64);
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }
}

#[inline]
fn signal(signaler: &mut EventSignaler, eventfd: &Option<OwnedFd>) {
    if let Some(file) = eventfd {
        // It is an eventfd, so this fails only for lack of kernel memory; the client polls its queues after a while.
        _ = signaler.signal(file.as_fd());
    }
}
