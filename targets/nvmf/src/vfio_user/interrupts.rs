//! Interrupts: eventfds that the client gave.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use wire_vfio_user::{IrqInfo, SetIrqs, irq, irq_flags, irq_set};

/// What the client is told through each kind of interrupt.
pub(super) struct Interrupts {
    msix: Vec<Option<OwnedFd>>,
    error: Vec<Option<OwnedFd>>,
    request: Vec<Option<OwnedFd>>,
}

impl Interrupts {
    /// So many MSI-X vectors that signal nobody.
    pub(super) fn new(vectors: u16) -> Interrupts {
        let none = |count: usize| std::iter::repeat_with(|| None).take(count).collect();
        Interrupts { msix: none(vectors.into()), error: none(1), request: none(1) }
    }

    /// What there is of a kind.
    pub(super) fn info(&self, asked: &IrqInfo) -> Result<IrqInfo, Errno> {
        let count = match asked.index {
            irq::MSIX => self.msix.len() as u32,
            irq::ERROR | irq::REQUEST => 1,
            irq::INTX | irq::MSI => 0,
            _ => return Err(Errno::INVAL),
        };
        if (asked.argsz as usize) < IrqInfo::SIZE {
            return Err(Errno::INVAL);
        }
        Ok(IrqInfo { argsz: IrqInfo::SIZE as u32, flags: irq_flags::EVENTFD, index: asked.index, count })
    }

    /// Does what `DEVICE_SET_IRQS` says.
    pub(super) fn set(&mut self, set: &SetIrqs, data: &[u8], given: Vec<OwnedFd>) -> Result<(), Errno> {
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
            || !given.is_empty() && (kind != irq_set::DATA_EVENTFD || given.len() != count as usize)
        {
            return Err(Errno::INVAL);
        }
        let end = start.checked_add(count).filter(|end| *end as usize <= vectors.len());
        let Some(end) = end else { return Err(Errno::INVAL) };
        let range = start as usize..end as usize;
        if action != irq_set::ACTION_TRIGGER {
            // Vectors are masked where the client keeps their table.
            return Err(Errno::INVAL);
        }
        match kind {
            // All of them are taken away.
            irq_set::DATA_NONE if count == 0 && start == 0 => vectors.iter_mut().for_each(|one| *one = None),
            irq_set::DATA_NONE if count > 0 => vectors[range].iter().for_each(signal),
            irq_set::DATA_BOOL if count > 0 && data.len() == count as usize => {
                let chosen = vectors[range].iter().zip(data).filter(|(_, wanted)| **wanted != 0);
                chosen.for_each(|(one, _)| signal(one));
            }
            irq_set::DATA_EVENTFD if count > 0 && given.is_empty() => {
                vectors[range].iter_mut().for_each(|one| *one = None);
            }
            irq_set::DATA_EVENTFD if count > 0 => {
                for file in &given {
                    check(file)?;
                }
                for (one, file) in vectors[range].iter_mut().zip(given) {
                    *one = Some(file);
                }
            }
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }

    /// Signals an MSI-X vector, if the client wants to know.
    #[inline]
    pub(super) fn trigger(&self, vector: u16) {
        if let Some(one) = self.msix.get(usize::from(vector)) {
            signal(one);
        }
    }

    /// Asks the client to let go of the device.
    pub(super) fn request(&self) {
        self.request.iter().for_each(signal);
    }

    /// Forgets what the client gave.
    pub(super) fn clear(&mut self) {
        for one in self.msix.iter_mut().chain(&mut self.error).chain(&mut self.request) {
            *one = None;
        }
    }
}

fn signal(one: &Option<OwnedFd>) {
    if let Some(file) = one {
        // A counter that is full has signalled already.
        let _ = rustix::io::write(file, &1u64.to_ne_bytes());
    }
}

/// Only an eventfd is taken, and one that does not wait: writing anything else may take as long as the
/// client pleases.
fn check(file: &OwnedFd) -> Result<(), Errno> {
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", file.as_raw_fd()), Vec::new())?;
    if !link.as_bytes().starts_with(b"anon_inode:[eventfd") {
        return Err(Errno::INVAL);
    }
    let flags = rustix::fs::fcntl_getfl(file.as_fd())?;
    rustix::fs::fcntl_setfl(file.as_fd(), flags | OFlags::NONBLOCK)
}
