//! Compares, which the layer does for every module: read, look, and for a fused one write.
//!
//! What is read goes into the request's own buffer, whose content is kept aside meanwhile and put back: a
//! compare needs no other buffer, so that it never waits for one.

use std::collections::VecDeque;

use memory::Buffer;
use ring::{Flags, Op, Request as Raw, Status, Tag};
use slots::{Slab, Slot};

use crate::locks::Locks;
use crate::{Completion, Request};

/// Compares of one channel, those that wait included; further ones stay with the caller.
pub(crate) const COMPARES_MAX: usize = 256;
/// Of those, under way at a time: their expected contents are in memory besides.
const ACTIVE_MAX: u32 = 16;

/// The compares of one channel.
pub(crate) struct Compares {
    waiting: VecDeque<Compare>,
    active: Slab<Active>,
    /// Requests of the layer's own that the module has not taken yet.
    pub(crate) own: Vec<Request>,
    /// Requests of the layer's own that the module has.
    pub(crate) at_module: u32,
}

/// A compare, with the write that is fused to it.
struct Compare {
    compare: Request,
    write: Option<Request>,
}

struct Active {
    compare: Option<Request>,
    write: Option<Request>,
    expected: Vec<u8>,
    lock: Option<u64>,
    phase: Phase,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Somebody else has a part of the range.
    Wanting,
    /// Earlier writes are awaited.
    Draining,
    /// The module has it, or is about to get it.
    Reading,
    Writing,
}

impl Default for Compares {
    fn default() -> Self {
        Compares {
            waiting: VecDeque::new(),
            active: Slab::with_capacity(ACTIVE_MAX),
            own: Vec::new(),
            at_module: 0,
        }
    }
}

impl Compares {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.active.is_empty()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.waiting.len() >= COMPARES_MAX
    }

    /// Requests that are in here.
    pub(crate) fn len(&self) -> usize {
        let of = |compare: bool, write: &Option<Request>| usize::from(compare) + usize::from(write.is_some());
        let waiting: usize = self.waiting.iter().map(|one| of(true, &one.write)).sum();
        // What the module has is counted there.
        let active: usize = self.active.iter().map(|(_, one)| of(one.compare.is_some(), &one.write)).sum();
        waiting + active
    }

    /// Whether something waits for what is no completion of the module.
    pub(crate) fn waits(&self) -> bool {
        let waits = |active: &Active| matches!(active.phase, Phase::Wanting | Phase::Draining);
        self.active.iter().any(|(_, active)| waits(active))
    }

    /// Takes a compare, and the write that is fused to it.
    pub(crate) fn push(&mut self, compare: Request, write: Option<Request>) {
        self.waiting.push_back(Compare { compare, write });
    }

    /// Begins what can begin; what the module is to do is in `own` then.
    pub(crate) fn drive(&mut self, locks: &Locks) {
        while !self.active.is_full()
            && let Some(Compare { compare, write }) = self.waiting.pop_front()
        {
            let phase = if write.is_some() { Phase::Wanting } else { Phase::Draining };
            let active = Active { compare: Some(compare), write, expected: Vec::new(), lock: None, phase };
            if self.active.insert(active).is_err() {
                unreachable!("a slab with room has none");
            }
        }
        for (slot, active) in self.active.iter_mut() {
            if active.phase == Phase::Wanting
                && let Some(compare) = &active.compare
            {
                active.lock = locks.want(compare.lba..compare.lba + u64::from(compare.blocks));
                if active.lock.is_some() {
                    active.phase = Phase::Draining;
                }
            }
            if active.phase == Phase::Draining && active.lock.is_none_or(|id| locks.is_given(id)) {
                active.phase = Phase::Reading;
                self.own.extend(active.read(slot));
            }
        }
    }

    /// The module is done with a request of the layer's own.
    pub(crate) fn done(&mut self, completion: Completion, locks: &Locks, finished: &mut Vec<Completion>) {
        self.at_module -= 1;
        let slot = Slot::from_bits(completion.tag().0);
        let Some(active) = self.active.get_mut(slot) else {
            unreachable!("slot {slot:?} completed and is not in the table")
        };
        let (status, own) = (completion.status(), completion.into_request());
        if active.phase == Phase::Reading {
            let outcome = active.look(status, own.buffer);
            if let Some(compare) = active.compare.take() {
                finished.push(compare.complete(outcome));
            }
            if outcome.is_success()
                && let Some(write) = &mut active.write
            {
                active.phase = Phase::Writing;
                let buffer = write.buffer.take();
                let mut own = Raw::new(Tag(slot.to_bits()), Op::Write, write.lba, write.blocks);
                (own.buffer, own.flow, own.issued) = (buffer, write.flow, write.issued);
                own.flags = write.flags.with(Flags::OWN);
                self.own.push(own);
                return;
            }
            let failed = |write: Request| write.complete(Status::FUSED_FAILED);
            finished.extend(active.write.take().map(failed));
        } else if let Some(mut write) = active.write.take() {
            write.buffer = own.buffer;
            finished.push(write.complete(status));
        }
        self.end(slot, locks);
    }

    /// Ends everything that the module has nothing of.
    pub(crate) fn fail(&mut self, status: Status, locks: &Locks, finished: &mut Vec<Completion>) {
        for mut own in std::mem::take(&mut self.own) {
            // Its buffer goes back to whose it is.
            let slot = Slot::from_bits(own.tag.0);
            let Some(active) = self.active.get_mut(slot) else { continue };
            if active.phase == Phase::Reading {
                active.look(status, own.buffer.take());
            } else if let Some(write) = &mut active.write {
                write.buffer = own.buffer.take();
            }
            active.phase = Phase::Wanting;
        }
        let idle = |active: &Active| matches!(active.phase, Phase::Wanting | Phase::Draining);
        let slots: Vec<Slot> =
            self.active.iter().filter(|(_, active)| idle(active)).map(|(slot, _)| slot).collect();
        for slot in slots {
            let Some(active) = self.active.get_mut(slot) else { continue };
            let both = [active.compare.take(), active.write.take()];
            finished.extend(both.into_iter().flatten().map(|request| request.complete(status)));
            self.end(slot, locks);
        }
        for Compare { compare, write } in self.waiting.drain(..) {
            let both = [Some(compare), write];
            finished.extend(both.into_iter().flatten().map(|request| request.complete(status)));
        }
    }

    /// Gives up every lock, for a channel that goes.
    pub(crate) fn release(&mut self, locks: &Locks) {
        self.active.iter_mut().filter_map(|(_, active)| active.lock.take()).for_each(|id| locks.release(id));
    }

    fn end(&mut self, slot: Slot, locks: &Locks) {
        if let Some(Active { lock: Some(id), .. }) = self.active.remove(slot) {
            locks.release(id);
        }
    }
}

impl Active {
    /// The read of what is to be compared.
    fn read(&mut self, slot: Slot) -> Option<Request> {
        let compare = self.compare.as_mut()?;
        let mut buffer = compare.buffer.take()?;
        self.expected.clear();
        self.expected.extend_from_slice(buffer.as_slice());
        // A device that leaves it as it was must not be found equal for that.
        buffer.clear();
        let mut own = Raw::read(Tag(slot.to_bits()), compare.lba, compare.blocks, buffer);
        (own.flags, own.flow, own.issued) = (Flags::OWN, compare.flow, compare.issued);
        Some(own)
    }

    /// Compares what was read, and makes the buffer what it was.
    fn look(&mut self, status: Status, buffer: Option<Buffer>) -> Status {
        let (Some(mut buffer), Some(compare)) = (buffer, &mut self.compare) else {
            return Status::INTERNAL_ERROR;
        };
        let equal = buffer.as_slice() == self.expected;
        buffer.as_mut_slice().copy_from_slice(&self.expected);
        self.expected = Vec::new();
        compare.buffer = Some(buffer);
        match status.is_success() {
            true if equal => Status::SUCCESS,
            true => Status::COMPARE_FAILURE.do_not_retry(),
            false => status,
        }
    }
}
