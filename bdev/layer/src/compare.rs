//! Compare, and fused compare-and-write, which the layer implements for every module: read, compare, write.
//!
//! The data is read into the request's own memory, whose expected content is saved first and restored
//! afterwards: a compare needs no second buffer, so that it never waits for one. Memory that others can read
//! or write, external or shared, must never hold what was read: such a compare reads into buffers of the
//! core's pool.

use std::collections::VecDeque;
use std::ops::Range;

use block_io::{Mismatch, Op, Payload, Request as RingRequest, Status, Tag};
use dma::{BUFFER_BYTES_MAX, Data, Pool};
use slots::{Slab, Slot};

use crate::internal::InternalTags;
use crate::range_locks::RangeLocks;
use crate::{BdevGeometry, Completion, Request};

/// Compares queued on one channel; further ones stay in the caller's batch.
pub(crate) const COMPARES_MAX: usize = 256;
/// Compares in progress on one channel: each has a copy of its expected data in memory.
const ACTIVE_MAX: u32 = 16;

/// The compares of one channel, queued and in progress.
///
/// [`push`](Self::push) queues one; [`advance`](Self::advance) starts queued ones and puts their internal
/// reads into `internal`, which the channel submits; [`complete_internal`](Self::complete_internal) compares
/// what was read and then completes the request, or queues the internal write. A fused pair locks its range
/// from before the read until after the write.
pub(crate) struct CompareQueue {
    tags: InternalTags,
    pool: Pool,
    geometry: BdevGeometry,
    queued: VecDeque<QueuedCompare>,
    active: Slab<ActiveCompare>,
    /// Internal reads and writes that the module has not accepted yet.
    pub(crate) internal: Vec<Request>,
}

/// A compare that is not started yet, with the write that is fused to it.
struct QueuedCompare {
    compare: Request,
    write: Option<Request>,
}

struct ActiveCompare {
    compare: Option<Request>,
    write: Option<Request>,
    expected: Vec<u8>,
    lock: Option<u64>,
    phase: ComparePhase,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ComparePhase {
    /// Waits until no other lock overlaps the range.
    AwaitingLock,
    /// Holds the lock, and waits until earlier writes have completed, and for a buffer if it needs one.
    DrainingWrites,
    /// The internal read is queued or in flight.
    Reading,
    /// The internal write is queued or in flight.
    Writing,
}

impl CompareQueue {
    pub(crate) fn new(pool: Pool, geometry: BdevGeometry) -> CompareQueue {
        CompareQueue {
            tags: InternalTags::new(),
            pool,
            geometry,
            queued: VecDeque::new(),
            active: Slab::with_capacity(ACTIVE_MAX),
            internal: Vec::new(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queued.is_empty() && self.active.is_empty()
    }

    /// Whether a completion is that of an internal request.
    pub(crate) fn owns(&self, completion: &Completion) -> bool {
        self.tags.slot(completion).is_some_and(|slot| self.active.get(slot).is_some())
    }

    pub(crate) fn is_full(&self) -> bool {
        self.queued.len() >= COMPARES_MAX
    }

    /// Number of the caller's requests in the queue.
    pub(crate) fn len(&self) -> usize {
        let count =
            |compare: bool, write: &Option<Request>| usize::from(compare) + usize::from(write.is_some());
        let queued: usize = self.queued.iter().map(|one| count(true, &one.write)).sum();
        // Internal requests are not counted: the request that they belong to is.
        let active: usize = self.active.iter().map(|(_, one)| count(one.compare.is_some(), &one.write)).sum();
        queued + active
    }

    /// Whether a compare waits for a range lock or a buffer, which no completion of the module announces.
    pub(crate) fn awaits_lock(&self) -> bool {
        let awaits = |active: &ActiveCompare| {
            matches!(active.phase, ComparePhase::AwaitingLock | ComparePhase::DrainingWrites)
        };
        self.active.iter().any(|(_, active)| awaits(active))
    }

    /// Queues a compare, and the write that is fused to it.
    pub(crate) fn push(&mut self, compare: Request, write: Option<Request>) {
        self.queued.push_back(QueuedCompare { compare, write });
    }

    /// Starts every compare that can start, and puts its internal read into `internal`.
    pub(crate) fn advance(&mut self, locks: &RangeLocks) {
        while !self.active.is_full()
            && let Some(QueuedCompare { compare, write }) = self.queued.pop_front()
        {
            let phase =
                if write.is_some() { ComparePhase::AwaitingLock } else { ComparePhase::DrainingWrites };
            let active =
                ActiveCompare { compare: Some(compare), write, expected: Vec::new(), lock: None, phase };
            if self.active.insert(active).is_err() {
                unreachable!("a slab with room has none");
            }
        }
        for (slot, active) in self.active.iter_mut() {
            if active.phase == ComparePhase::AwaitingLock
                && let Some(compare) = &active.compare
            {
                active.lock = locks.request(compare.lba..compare.lba + u64::from(compare.blocks));
                if active.lock.is_some() {
                    active.phase = ComparePhase::DrainingWrites;
                }
            }
            if active.phase == ComparePhase::DrainingWrites
                && active.lock.is_none_or(|id| locks.is_granted(id))
                && let Some(read) = active.start_read(&self.pool, &self.tags, slot)
            {
                active.phase = ComparePhase::Reading;
                self.internal.push(read);
            }
        }
    }

    /// Handles the completion of an internal request; adds the caller's completions to `finished`.
    pub(crate) fn complete_internal(
        &mut self,
        completion: Completion,
        locks: &RangeLocks,
        finished: &mut Vec<Completion>,
    ) {
        let slot = self.tags.slot(&completion).expect("the completion of an internal request");
        let Some(active) = self.active.get_mut(slot) else {
            unreachable!("slot {slot:?} completed and is not in the table")
        };
        let (status, mut internal) = (completion.status(), completion.into_request());
        if active.phase == ComparePhase::Reading {
            let result = active.compare_data(&self.geometry, status, internal.take_data());
            if let Some(compare) = active.compare.take() {
                finished.push(compare.complete(result));
            }
            if result.is_success()
                && let Some(write) = &mut active.write
            {
                active.phase = ComparePhase::Writing;
                let mut internal = RingRequest::new(Tag(0), Op::Write, write.lba, write.blocks);
                internal.payload = std::mem::take(&mut write.payload);
                (internal.flow, internal.issued_ticks, internal.flags) =
                    (write.flow, write.issued_ticks, write.flags);
                self.tags.mark(&mut internal, slot);
                self.internal.push(internal);
                return;
            }
            let failed = |write: Request| write.complete(Status::FUSED_FAILED);
            finished.extend(active.write.take().map(failed));
        } else if let Some(mut write) = active.write.take() {
            write.payload = internal.payload;
            finished.push(write.complete(status));
        }
        self.finish(slot, locks);
    }

    /// Completes with `status` every compare that has no internal request at the module.
    pub(crate) fn fail_idle(&mut self, status: Status, locks: &RangeLocks, finished: &mut Vec<Completion>) {
        for internal in std::mem::take(&mut self.internal) {
            // The data goes back to the caller's request.
            let completion = internal.complete(status);
            let slot = self.tags.slot(&completion).expect("an internal request");
            let mut internal = completion.into_request();
            let Some(active) = self.active.get_mut(slot) else { continue };
            if active.phase == ComparePhase::Reading {
                active.compare_data(&self.geometry, status, internal.take_data());
            } else if let Some(write) = &mut active.write {
                write.payload = internal.payload;
            }
            active.phase = ComparePhase::AwaitingLock;
        }
        let idle = |active: &ActiveCompare| {
            matches!(active.phase, ComparePhase::AwaitingLock | ComparePhase::DrainingWrites)
        };
        let slots: Vec<Slot> =
            self.active.iter().filter(|(_, active)| idle(active)).map(|(slot, _)| slot).collect();
        for slot in slots {
            let Some(active) = self.active.get_mut(slot) else { continue };
            let both = [active.compare.take(), active.write.take()];
            finished.extend(both.into_iter().flatten().map(|request| request.complete(status)));
            self.finish(slot, locks);
        }
        for QueuedCompare { compare, write } in self.queued.drain(..) {
            let both = [Some(compare), write];
            finished.extend(both.into_iter().flatten().map(|request| request.complete(status)));
        }
    }

    /// Releases every range lock when the channel is closed.
    pub(crate) fn release_locks(&mut self, locks: &RangeLocks) {
        self.active.iter_mut().filter_map(|(_, active)| active.lock.take()).for_each(|id| locks.release(id));
    }

    fn finish(&mut self, slot: Slot, locks: &RangeLocks) {
        if let Some(ActiveCompare { lock: Some(id), .. }) = self.active.remove(slot) {
            locks.release(id);
        }
    }
}

impl ActiveCompare {
    /// Saves the expected data and returns the internal read; `None` without a buffer for it.
    fn start_read(&mut self, pool: &Pool, tags: &InternalTags, slot: Slot) -> Option<Request> {
        let compare = self.compare.as_mut()?;
        let data = compare.data()?;
        let is_exclusive = data.is_writable() && !data.is_external();
        let own = if is_exclusive { None } else { Some(take(pool, data.len())?) };
        self.expected.resize(data.len(), 0);
        data.copy_to(0, &mut self.expected);
        let mut data = match own {
            Some(own) => own,
            None => compare.take_data()?,
        };
        // A device whose reads do not fill the data must not compare equal.
        data.clear();
        let mut internal = RingRequest::read(Tag(0), compare.lba, compare.blocks, data);
        (internal.flow, internal.issued_ticks) = (compare.flow, compare.issued_ticks);
        tags.mark(&mut internal, slot);
        Some(internal)
    }

    /// Compares the data that was read, and restores the expected data in the caller's buffer.
    fn compare_data(&mut self, geometry: &BdevGeometry, status: Status, data: Option<Data>) -> Status {
        let (Some(mut data), Some(compare)) = (data, &mut self.compare) else {
            return Status::INTERNAL_ERROR;
        };
        let difference = match geometry.metadata.protection_range().filter(|_| geometry.metadata.extended) {
            None => first_difference(&data, &self.expected),
            Some(protection) => first_difference_but(&data, &self.expected, geometry, &protection),
        };
        // Otherwise the caller's data was not read into.
        if compare.data().is_none() {
            data.copy_from(0, &self.expected);
            compare.set_data(Some(data));
        }
        self.expected = Vec::new();
        let Some(offset) = difference.filter(|_| status.is_success()) else { return status };
        if let Some(data) = compare.take_data() {
            compare.payload = Payload::Mismatch(Box::new(Mismatch { data, offset: offset as u64 }));
        }
        Status::COMPARE_FAILURE.do_not_retry()
    }
}

/// The first byte that differs; `None` if none does.
fn first_difference(data: &Data, expected: &[u8]) -> Option<usize> {
    let mut at = 0;
    for slice in data.slices() {
        let expected = &expected[at..at + slice.len()];
        if slice.as_slice() != expected {
            let differs = |(one, other): (&u8, &u8)| one != other;
            return slice.as_slice().iter().zip(expected).position(differs).map(|within| at + within);
        }
        at += slice.len();
    }
    None
}

/// As [`first_difference`], of blocks without the protection information in their metadata (NVM 1.0, section
/// 3.2.1).
fn first_difference_but(
    data: &Data,
    expected: &[u8],
    geometry: &BdevGeometry,
    protection: &Range<usize>,
) -> Option<usize> {
    let mut block = vec![0; geometry.block_size as usize];
    let ignored = geometry.data_block_size() as usize + protection.start;
    expected.chunks_exact(block.len()).enumerate().find_map(|(index, expected)| {
        let start = index * block.len();
        data.copy_to(start, &mut block);
        block[ignored..ignored + protection.len()]
            .copy_from_slice(&expected[ignored..ignored + protection.len()]);
        block.iter().zip(expected).position(|(one, other)| one != other).map(|within| start + within)
    })
}

/// Data of the pool, of any length; `None` if it does not have that much now.
fn take(pool: &Pool, bytes: usize) -> Option<Data> {
    let parts = (0..bytes).step_by(BUFFER_BYTES_MAX).map(|at| pool.take(BUFFER_BYTES_MAX.min(bytes - at)));
    Data::gather(parts.collect::<Option<Vec<_>>>()?)
}
