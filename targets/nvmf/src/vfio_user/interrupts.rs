//! Interrupts: eventfds that the client has assigned.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use wire_vfio_user::{IrqInfo, SetIrqs, irq, irq_flags, irq_set};

use super::function::QUEUES_MAX;

/// The client's eventfds: one per MSI-X vector, one for errors, one for device release requests.
pub(super) struct ClientInterrupts {
    msix: Vec<Option<OwnedFd>>,
    error: Vec<Option<OwnedFd>>,
    request: Vec<Option<OwnedFd>>,
}

impl ClientInterrupts {
    /// Creates MSI-X vectors without eventfds.
    pub(super) fn new(vectors: u16) -> ClientInterrupts {
        let no_eventfds = |count: usize| std::iter::repeat_with(|| None).take(count).collect();
        ClientInterrupts { msix: no_eventfds(vectors.into()), error: no_eventfds(1), request: no_eventfds(1) }
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
            irq_set::DATA_NONE if count > 0 => vectors[range].iter().for_each(signal),
            irq_set::DATA_BOOL if count > 0 && data.len() == count as usize => {
                let selected = vectors[range].iter().zip(data).filter(|(_, trigger)| **trigger != 0);
                selected.for_each(|(eventfd, _)| signal(eventfd));
            }
            irq_set::DATA_EVENTFD if count > 0 && eventfds.is_empty() => {
                vectors[range].iter_mut().for_each(|eventfd| *eventfd = None);
            }
            irq_set::DATA_EVENTFD if count > 0 => {
                for file in &eventfds {
                    check(file)?;
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
    pub(super) fn trigger(&self, vector: u16) {
        if let Some(eventfd) = self.msix.get(usize::from(vector)) {
            signal(eventfd);
        }
    }

    /// Requests that the client releases the device.
    pub(super) fn request(&self) {
        self.request.iter().for_each(signal);
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

fn signal(eventfd: &Option<OwnedFd>) {
    if let Some(file) = eventfd {
        // EAGAIN: the counter is at its maximum, so the client is already signalled.
        let _ = rustix::io::write(file, &1u64.to_ne_bytes());
    }
}

/// Accepts only an eventfd, and makes it non-blocking: a write to anything else may block for as long as the
/// client wants.
fn check(file: &OwnedFd) -> Result<(), Errno> {
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", file.as_raw_fd()), Vec::new())?;
    if !link.as_bytes().starts_with(b"anon_inode:[eventfd") {
        return Err(Errno::INVAL);
    }
    let flags = rustix::fs::fcntl_getfl(file.as_fd())?;
    rustix::fs::fcntl_setfl(file.as_fd(), flags | OFlags::NONBLOCK)
}
