//! The I/O of an open store, for a [`PlanRunner`](bdev::PlanRunner) on its device.
//!
//! A copy is divided into parts of up to 1 MiB, each a read and a write of the same memory. What is read of
//! an external snapshot goes through a channel of that device. A flush goes through a channel of its own: it
//! is no barrier, and a store waits itself for what has to be before and after.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bdev::stacking::{BaseBdev, BaseChannel};
use bdev::{PlannedAction, PlannedIo, PlannedOutcome, Planner, Request};
use blobstore::{BlobId, BlobSegment, OpenBlobStore, StoreAction, StoreIoFailed};
use block_io::{Op, Status, Tag};
use dma::Data;
use reactor::Core;

use crate::external_end::{external_bytes_of, readable_bytes};
use crate::shared::StoreShared;

/// Bytes of a part of a copy.
const PART_BYTES_MAX: u64 = 1 << 20;
/// Parts of one copy in progress.
const PARTS_MAX: u32 = 4;
/// Wait for memory.
const RETRY_NS: u64 = 1_000_000;

/// The open store, and the state of the I/O that it has asked for.
pub(crate) struct StorePlan {
    pub(crate) store: OpenBlobStore,
    shared: Arc<StoreShared>,
    core: Core,
    steps: BTreeMap<u64, Step>,
    last_id: u64,
    /// To be begun by the runner.
    ready: VecDeque<PlannedIo>,
    copies: BTreeMap<u64, Copy>,
    flushes: BaseChannel,
    /// Channels of external snapshots, by the blob that names each, with the device.
    externals: BTreeMap<BlobId, (Arc<BaseBdev>, BaseChannel)>,
    /// Reads of external snapshots that have not begun.
    external_reads: VecDeque<(u64, CopyPart)>,
    /// When memory is asked for again.
    memory_at_ns: Option<u64>,
}

/// What an I/O of the runner, or of one of the other channels, is.
enum Step {
    /// One of the store's.
    Store(u64),
    /// A flush of the store, with the number of cluster maps that it makes durable.
    Flush(u64, u64),
    /// A read for a copy, to be written to this offset.
    Read { copy: u64, to: u64 },
    /// A write of a copy.
    Write { copy: u64 },
}

/// A copy that the store has asked for.
struct Copy {
    parts: VecDeque<CopyPart>,
    in_progress: u32,
    has_failed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CopyPart {
    from: PartSource,
    to: u64,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartSource {
    Base(u64),
    External(BlobId, u64),
    Zeroes,
}

impl StorePlan {
    pub(crate) fn new(
        store: OpenBlobStore,
        shared: Arc<StoreShared>,
        core: &Core,
        flushes: BaseChannel,
    ) -> StorePlan {
        StorePlan {
            store,
            shared,
            core: core.clone(),
            steps: BTreeMap::new(),
            last_id: 0,
            ready: VecDeque::new(),
            copies: BTreeMap::new(),
            flushes,
            externals: BTreeMap::new(),
            external_reads: VecDeque::new(),
            memory_at_ns: None,
        }
    }

    /// Whether no I/O is in progress.
    pub(crate) fn is_idle(&self) -> bool {
        self.steps.is_empty() && self.external_reads.is_empty()
    }

    /// When [`turn`](Self::turn) is to be called at the latest.
    pub(crate) fn deadline(&self) -> Option<u64> {
        let external = self.externals.values().filter_map(|(_, channel)| channel.deadline());
        external.chain(self.flushes.deadline()).chain(self.memory_at_ns).min()
    }

    /// Continues what is not on the runner's channel. Returns how many I/Os have ended.
    pub(crate) fn turn(&mut self) -> usize {
        let mut ended = 0;
        let flushed: Vec<(Tag, Status)> =
            self.flushes.poll().map(|completion| (completion.tag(), completion.status())).collect();
        for (tag, status) in flushed {
            ended += 1;
            self.complete(tag.0, if status.is_success() { Ok(None) } else { Err(status) });
        }
        let mut read = Vec::new();
        for (_, channel) in self.externals.values_mut() {
            read.extend(channel.poll());
        }
        for completion in read {
            let (tag, status) = (completion.tag(), completion.status());
            ended += 1;
            let outcome = if status.is_success() { Ok(completion.into_data()) } else { Err(status) };
            self.complete(tag.0, outcome);
        }
        self.begin_external_reads();
        // A channel holds its device open.
        if self.external_reads.is_empty() && self.copies.is_empty() {
            self.externals.clear();
        }
        ended
    }

    fn step(&mut self, step: Step) -> u64 {
        self.last_id += 1;
        self.steps.insert(self.last_id, step);
        self.last_id
    }

    fn begin_copy(&mut self, id: u64, from: Vec<BlobSegment>, offset: u64) {
        let published = self.shared.published();
        let external_bytes = |clone| {
            let there =
                self.shared.external(clone).map_or(u64::MAX, |external| external.device().geometry().bytes());
            readable_bytes(there, external_bytes_of(&published, clone))
        };
        let parts = divide(from, offset, external_bytes);
        self.copies.insert(id, Copy { parts, in_progress: 0, has_failed: false });
        self.continue_copy(id);
    }

    /// Begins parts of a copy, or ends it.
    fn continue_copy(&mut self, id: u64) {
        while let Some(copy) = self.copies.get_mut(&id)
            && copy.in_progress < PARTS_MAX
            && !copy.has_failed
            && let Some(part) = copy.parts.pop_front()
        {
            copy.in_progress += 1;
            let (offset, bytes) = (part.to, part.bytes);
            match part.from {
                PartSource::Zeroes => {
                    let step = self.step(Step::Write { copy: id });
                    let action = PlannedAction::WriteZeroes { offset, bytes };
                    self.ready.push_back(PlannedIo { id: step, action });
                }
                PartSource::Base(from) => {
                    let step = self.step(Step::Read { copy: id, to: offset });
                    // A part has at most 1 MiB.
                    let action = PlannedAction::Read { offset: from, bytes: bytes as usize };
                    self.ready.push_back(PlannedIo { id: step, action });
                }
                PartSource::External(..) => self.external_reads.push_back((id, part)),
            }
        }
        if self
            .copies
            .get(&id)
            .is_some_and(|copy| copy.in_progress == 0 && (copy.has_failed || copy.parts.is_empty()))
            && let Some(copy) = self.copies.remove(&id)
        {
            self.store.complete(id, if copy.has_failed { Err(StoreIoFailed) } else { Ok(()) });
        }
    }

    fn begin_external_reads(&mut self) {
        if self.memory_at_ns.is_some_and(|at_ns| self.core.now_ns() < at_ns) {
            return;
        }
        self.memory_at_ns = None;
        while let Some((copy, part)) = self.external_reads.pop_front() {
            let CopyPart { from: PartSource::External(clone, offset), to, bytes } = part else { continue };
            let Some(data) = self.core.pool().take_data(bytes as usize) else {
                self.memory_at_ns = Some(self.core.now_ns() + RETRY_NS);
                return self.external_reads.push_front((copy, part));
            };
            if !self.read_external(copy, clone, offset, to, data) {
                self.part_ended(copy, false);
            }
        }
    }

    /// Returns whether the device is there.
    fn read_external(&mut self, copy: u64, clone: BlobId, offset: u64, to: u64, data: Data) -> bool {
        let Some(base) = self.shared.external(clone) else { return false };
        let is_open = self.externals.get(&clone).is_some_and(|(open, _)| Arc::ptr_eq(open, &base));
        if !is_open {
            let Ok(channel) = base.channel(&self.core) else { return false };
            self.externals.insert(clone, (base.clone(), BaseChannel::new(channel)));
        }
        let step = self.step(Step::Read { copy, to });
        let Some((_, channel)) = self.externals.get_mut(&clone) else { return false };
        let block_bytes = u64::from(base.device().geometry().block_size);
        // A part has at most 1 MiB.
        let blocks = (data.len() as u64 / block_bytes) as u32;
        let mut request = Request::new(Tag(step), Op::Read, offset / block_bytes, blocks);
        request.set_data(Some(data));
        channel.push(request);
        channel.submit();
        true
    }

    fn part_ended(&mut self, copy: u64, is_done: bool) {
        if let Some(state) = self.copies.get_mut(&copy) {
            state.in_progress -= 1;
            state.has_failed |= !is_done;
        }
        self.continue_copy(copy);
    }
}

impl Planner for StorePlan {
    fn next_io(&mut self) -> Option<PlannedIo> {
        loop {
            if let Some(io) = self.ready.pop_front() {
                return Some(io);
            }
            let io = self.store.next_io()?;
            let action = match io.action {
                StoreAction::Write { offset, data } => {
                    PlannedAction::Write { offset, data: data.into(), durable: false }
                }
                StoreAction::WriteZeroes { offset, bytes } => PlannedAction::WriteZeroes { offset, bytes },
                StoreAction::Deallocate { offset, bytes } => PlannedAction::Deallocate { offset, bytes },
                StoreAction::Copy { from, offset } => {
                    self.begin_copy(io.id, from, offset);
                    continue;
                }
                StoreAction::Flush => {
                    let step = self.step(Step::Flush(io.id, self.shared.maps_written()));
                    self.flushes.push(Request::new(Tag(step), Op::Flush, 0, 0));
                    self.flushes.submit();
                    continue;
                }
            };
            let id = self.step(Step::Store(io.id));
            return Some(PlannedIo { id, action });
        }
    }

    fn complete(&mut self, id: u64, outcome: PlannedOutcome) {
        let Some(step) = self.steps.remove(&id) else {
            unreachable!("I/O {id} completed and is not in progress")
        };
        match (step, outcome) {
            (Step::Store(io), outcome) => {
                self.store.complete(io, outcome.map(drop).map_err(|_| StoreIoFailed));
            }
            (Step::Flush(io, maps), outcome) => {
                if outcome.is_ok() {
                    self.shared.maps_flushed(maps);
                }
                self.store.complete(io, outcome.map(drop).map_err(|_| StoreIoFailed));
            }
            (Step::Read { copy, to }, Ok(Some(data))) => {
                let id = self.step(Step::Write { copy });
                let action = PlannedAction::Write { offset: to, data: data.into(), durable: false };
                self.ready.push_back(PlannedIo { id, action });
            }
            (Step::Read { copy, .. }, _) => self.part_ended(copy, false),
            (Step::Write { copy }, outcome) => self.part_ended(copy, outcome.is_ok()),
        }
    }
}

/// The parts of a copy.
fn divide(from: Vec<BlobSegment>, to: u64, external_bytes: impl Fn(BlobId) -> u64) -> VecDeque<CopyPart> {
    let (mut parts, mut to) = (VecDeque::new(), to);
    for segment in from {
        let mut at = 0;
        while at < segment.length() {
            let left = segment.length() - at;
            let (from, bytes) = match segment {
                BlobSegment::Device { offset, .. } => {
                    (PartSource::Base(offset + at), left.min(PART_BYTES_MAX))
                }
                BlobSegment::Zeroes { .. } => (PartSource::Zeroes, left),
                BlobSegment::External { clone, offset, .. } => {
                    match external_bytes(clone).saturating_sub(offset + at) {
                        0 => (PartSource::Zeroes, left),
                        there => {
                            (PartSource::External(clone, offset + at), left.min(there).min(PART_BYTES_MAX))
                        }
                    }
                }
            };
            parts.push_back(CopyPart { from, to, bytes });
            (at, to) = (at + bytes, to + bytes);
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_divided_at_sources_and_at_what_memory_can_hold() {
        let mib = 1 << 20;
        let clone = BlobId(1 << 32);
        let parts = divide(
            vec![
                BlobSegment::Device { offset: 7 * mib, length: mib + 512 },
                BlobSegment::Zeroes { length: 3 * mib },
                BlobSegment::External { clone, offset: 512, length: 2048 },
            ],
            100 * mib,
            |_| 1024,
        );
        let found: Vec<_> = parts.iter().map(|part| (part.from, part.to - 100 * mib, part.bytes)).collect();
        assert_eq!(
            found,
            [
                (PartSource::Base(7 * mib), 0, mib),
                (PartSource::Base(8 * mib), mib, 512),
                (PartSource::Zeroes, mib + 512, 3 * mib),
                (PartSource::External(clone, 512), 4 * mib + 512, 512),
                (PartSource::Zeroes, 4 * mib + 1024, 1536),
            ]
        );
    }
}
