//! The channel of a device on one core.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use bdev::stacking::BaseChannel;
use bdev::{Completion, Request};
use block_io::{Op, Payload, RequestFlags, Status, Tag};
use dma::{Data, Pool};
use reactor::{Core, MailboxReceiver, MailboxSender};
use slots::{Slab, Slot};
use wire_blob::{CHECKSUM_BLOCK_BYTES, CHECKSUM_REGION_BYTES, CHECKSUMS_PER_REGION};

use crate::region::{BlockState, ChecksumRegion, Verdict, Written};
use crate::shared::{ChecksumShared, OwnerMessage};
use crate::table::{Granted, RegionHold};

const BLOCK: u64 = CHECKSUM_BLOCK_BYTES as u64;
/// Regions that a channel knows without asking: of 1 GiB.
const CACHE_REGIONS: usize = 1024;
/// How often a read is repeated whose blocks are written meanwhile; then it is not verified.
const RETRIES_MAX: u32 = 8;

/// Passes requests on, with tags of its own. Reads are compared with the checksums of their blocks, and
/// writes leave theirs. A region that the channel does not know is asked for, and so is one for a write that
/// is not open; meanwhile the request is parked.
pub(crate) struct ChecksumChannel {
    shared: Arc<ChecksumShared>,
    base: BaseChannel,
    pool: Pool,
    block_bytes: u64,
    pending: Slab<Pending>,
    /// Direct-mapped, by index; empty before the first region is known.
    cache: Vec<Option<Arc<ChecksumRegion>>>,
    trims_seen: u64,
    parked: BTreeMap<u64, Request>,
    last_token: u64,
    seat: Arc<MailboxSender<Granted>>,
    replies: MailboxReceiver<Granted>,
    /// For which the owner's mailbox was full.
    unsent: VecDeque<OwnerMessage>,
    completed: Vec<Completion>,
    /// Completions of the base; empty between polls.
    at_base: Vec<Completion>,
    scratch: Vec<u8>,
    zeroes_sum: u32,
}

/// What comes back with a completion of the base.
struct Pending {
    tag: Tag,
    flags: RequestFlags,
    kind: PendingKind,
}

enum PendingKind {
    Passed,
    Read {
        holds: Holds,
        private: Option<PrivateRead>,
        retry: Option<Box<ReadRetry>>,
    },
    /// With the checksums of data that others may change while it is written.
    Write {
        holds: Holds,
        sums: Vec<u32>,
    },
}

/// The regions of a request, in order.
struct Holds {
    first: RegionHold,
    others: Vec<RegionHold>,
}

/// A read into memory of the channel's own: the caller's has parts of blocks, or others may change it.
struct PrivateRead {
    lba: u64,
    blocks: u32,
    payload: Payload<Data>,
}

/// A read that is repeated, as a checksum is not that of its data.
struct ReadRetry {
    count: u32,
    /// The blocks, before the read began.
    before: Vec<BlockState>,
}

impl Holds {
    fn of(holds: Vec<RegionHold>) -> Option<Holds> {
        let mut holds = holds.into_iter();
        Some(Holds { first: holds.next()?, others: holds.collect() })
    }

    /// The region of a block of the device, and the block's index in it.
    fn block(&self, block: u64) -> (&ChecksumRegion, usize) {
        let per_region = CHECKSUMS_PER_REGION as u64;
        let first = self.first.region();
        let hold = match (block / per_region).saturating_sub(first.index.into()) {
            0 => first,
            // The regions are those of the request, in order.
            at => self.others[at as usize - 1].region(),
        };
        (hold, (block % per_region) as usize)
    }
}

impl ChecksumChannel {
    pub(crate) fn new(
        shared: &Arc<ChecksumShared>,
        base: BaseChannel,
        core: &Core,
        block_bytes: u32,
        depth: u32,
    ) -> ChecksumChannel {
        let (seat, replies) = core.mailbox(depth as usize);
        ChecksumChannel {
            shared: shared.clone(),
            base,
            pool: core.pool().clone(),
            block_bytes: block_bytes.into(),
            pending: Slab::with_capacity(depth),
            cache: Vec::new(),
            trims_seen: 0,
            parked: BTreeMap::new(),
            last_token: 0,
            seat: Arc::new(seat),
            replies,
            unsent: VecDeque::new(),
            completed: Vec::new(),
            at_base: Vec::new(),
            scratch: vec![0; BLOCK as usize],
            zeroes_sum: codec::crc32c(&[0; BLOCK as usize]),
        }
    }

    /// The bytes of a request's range.
    fn range(&self, request: &Request) -> Range<u64> {
        let offset = request.lba * self.block_bytes;
        offset..offset + u64::from(request.blocks) * self.block_bytes
    }

    /// The blocks that a range has a part of, and those that it has all of.
    fn blocks(&self, range: &Range<u64>) -> (Range<u64>, Range<u64>) {
        let start = range.start.max(self.shared.layout.data_start);
        let whole_end = range.end / BLOCK;
        (start / BLOCK..range.end.div_ceil(BLOCK), start.div_ceil(BLOCK)..whole_end)
    }

    fn accept(&mut self, request: Request) {
        let is_data = matches!(request.op, Op::Read | Op::Write | Op::WriteZeroes | Op::Unmap);
        if !is_data && request.op != Op::WriteUncorrectable || !self.shared.is_active() {
            return self.pass(request, PendingKind::Passed);
        }
        let range = self.range(&request);
        if range.end <= self.shared.layout.data_start || request.blocks == 0 {
            // The store's metadata has checksums of its own.
            return self.pass(request, PendingKind::Passed);
        }
        let start = range.start.max(self.shared.layout.data_start);
        // The device has fewer than 2^32 regions.
        let first = (start / CHECKSUM_REGION_BYTES) as u32;
        let end = range.end.div_ceil(CHECKSUM_REGION_BYTES) as u32;
        match self.known(first, end, request.op.is_write()) {
            Some(holds) => self.begin(request, holds),
            None => {
                self.last_token += 1;
                let (token, is_write) = (self.last_token, request.op.is_write());
                self.parked.insert(token, request);
                let seat = self.seat.clone();
                self.unsent.push_back(OwnerMessage::Want { seat, token, regions: first..end, is_write });
                self.send();
            }
        }
    }

    /// The regions, if the channel knows all of them, and they are open where it is a write.
    fn known(&mut self, first: u32, end: u32, is_write: bool) -> Option<Holds> {
        let hold = |region: u32| {
            let known = self.cache.get(region as usize % CACHE_REGIONS)?.as_ref()?;
            match known.index == region {
                true if is_write => RegionHold::write(known),
                true => Some(RegionHold::read(known)),
                false => None,
            }
        };
        let first_hold = hold(first)?;
        let mut others = Vec::new();
        for region in first + 1..end {
            others.push(hold(region)?);
        }
        Some(Holds { first: first_hold, others })
    }

    /// Sends what the owner has place for.
    fn send(&mut self) {
        while let Some(message) = self.unsent.pop_front() {
            if let Err(message) = self.shared.send(message) {
                self.unsent.push_front(message);
                break;
            }
        }
        if !self.parked.is_empty() && self.shared.is_closed() {
            self.unsent.clear();
            let parked = std::mem::take(&mut self.parked);
            self.completed
                .extend(parked.into_values().map(|request| request.complete(Status::INTERNAL_ERROR)));
        }
    }

    fn pass(&mut self, mut request: Request, kind: PendingKind) {
        let pending = Pending { tag: request.tag, flags: request.flags, kind };
        let Ok(slot) = self.pending.insert(pending) else {
            unreachable!("the layer admits no more than {}", self.pending.capacity())
        };
        request.tag = Tag(slot.to_bits());
        // With its new tag the base would take it for a request of its own layer.
        request.flags -= RequestFlags::INTERNAL;
        self.base.push(request);
    }

    fn begin(&mut self, request: Request, holds: Holds) {
        if !matches!(request.op, Op::Read | Op::Write) {
            return self.begin_write(request, holds, Vec::new());
        }
        let Payload::Data(data) = &request.payload else {
            // The device has no metadata, and takes no pages of others.
            return self.completed.push(request.complete(Status::INVALID_FIELD.do_not_retry()));
        };
        let is_external = data.is_external();
        if request.op == Op::Read {
            return self.begin_read(request, holds, is_external);
        }
        let mut sums = Vec::new();
        if is_external {
            let range = self.range(&request);
            let (_, whole) = self.blocks(&range);
            for block in whole {
                let at = (block * BLOCK - range.start) as usize;
                sums.push(sum_of(data, at, &mut self.scratch));
            }
        }
        self.begin_write(request, holds, sums);
    }

    fn begin_write(&mut self, request: Request, holds: Holds, sums: Vec<u32>) {
        for block in self.blocks(&self.range(&request)).0 {
            let (region, at) = holds.block(block);
            region.begin_block(at);
        }
        self.pass(request, PendingKind::Write { holds, sums });
    }

    fn begin_read(&mut self, mut request: Request, holds: Holds, is_external: bool) {
        let range = self.range(&request);
        let is_aligned = range.start.is_multiple_of(BLOCK) && range.end.is_multiple_of(BLOCK);
        if is_aligned && !is_external {
            return self.pass(request, PendingKind::Read { holds, private: None, retry: None });
        }
        let (start, end) = (range.start / BLOCK * BLOCK, range.end.next_multiple_of(BLOCK));
        let Some(data) = self.pool.take_data((end - start) as usize) else {
            return self.completed.push(request.complete(Status::COMMAND_INTERRUPTED));
        };
        let payload = std::mem::replace(&mut request.payload, Payload::Data(data));
        let private = PrivateRead { lba: request.lba, blocks: request.blocks, payload };
        // The end of the device is one of a block.
        (request.lba, request.blocks) = (start / self.block_bytes, ((end - start) / self.block_bytes) as u32);
        self.pass(request, PendingKind::Read { holds, private: Some(private), retry: None });
    }

    fn complete(&mut self, completion: Completion) {
        let slot = Slot::from_bits(completion.tag().0);
        let Some(Pending { tag, flags, kind }) = self.pending.remove(slot) else {
            unreachable!("slot {slot:?} was completed by the base and is not in the table")
        };
        let status = completion.status();
        let mut request = completion.into_request();
        (request.tag, request.flags) = (tag, flags);
        match kind {
            PendingKind::Passed => self.completed.push(request.complete(status)),
            PendingKind::Write { holds, sums } => {
                self.end_write(&request, status, &holds, &sums);
                self.completed.push(request.complete(status));
            }
            PendingKind::Read { holds, private, retry } => {
                self.end_read(request, status, holds, private, retry)
            }
        }
    }

    fn end_write(&mut self, request: &Request, status: Status, holds: &Holds, sums: &[u32]) {
        let range = self.range(request);
        let (touched, whole) = self.blocks(&range);
        for block in touched {
            let is_whole = whole.contains(&block);
            let written = match (request.op, &request.payload) {
                _ if !status.is_success() || !is_whole => Written::Other,
                (Op::Write, Payload::Data(data)) => {
                    let sum = sum_of(data, (block * BLOCK - range.start) as usize, &mut self.scratch);
                    let before = sums.get((block - whole.start) as usize);
                    // Of memory that has changed, it is not known what the device has.
                    if before.is_none_or(|before| *before == sum) {
                        Written::Data(sum)
                    } else {
                        Written::Other
                    }
                }
                (Op::WriteZeroes, _) => Written::Data(self.zeroes_sum),
                (Op::Unmap, _) => Written::Nothing,
                _ => Written::Other,
            };
            let (region, at) = holds.block(block);
            region.end_block(at, written);
        }
    }

    fn end_read(
        &mut self,
        mut request: Request,
        status: Status,
        holds: Holds,
        private: Option<PrivateRead>,
        retry: Option<Box<ReadRetry>>,
    ) {
        let mut status = status;
        if status.is_success()
            && let Some((block, state)) = self.first_mismatch(&request, &holds)
        {
            let first = self.blocks(&self.range(&request)).1.start;
            let is_same = |retry: &ReadRetry| retry.before[(block - first) as usize] == state;
            let count = retry.as_ref().map_or(0, |retry| retry.count);
            if retry.as_deref().is_some_and(is_same) {
                status = Status::UNRECOVERED_READ_ERROR.do_not_retry();
                self.shared.count_mismatch();
                self.unsent.push_back(OwnerMessage::Mismatch { offset: block * BLOCK });
                self.send();
            } else if count < RETRIES_MAX {
                // A write may have been in flight with the read: the next one tells.
                let before = self.blocks(&self.range(&request)).1.map(|block| {
                    let (region, at) = holds.block(block);
                    region.block(at)
                });
                let retry = Some(Box::new(ReadRetry { count: count + 1, before: before.collect() }));
                return self.pass(request, PendingKind::Read { holds, private, retry });
            }
        }
        drop(holds);
        if !status.is_success()
            && let Some(data) = request.data_mut().filter(|data| data.is_writable())
        {
            data.clear();
        }
        if let Some(PrivateRead { lba, blocks, mut payload }) = private {
            let skip = ((lba - request.lba) * self.block_bytes) as usize;
            if let (Payload::Data(from), Payload::Data(to)) = (&request.payload, &mut payload) {
                copy(from, skip, to);
            }
            (request.lba, request.blocks, request.payload) = (lba, blocks, payload);
        }
        self.completed.push(request.complete(status));
    }

    /// The first block of a read that is not as it was written, with its state.
    fn first_mismatch(&mut self, request: &Request, holds: &Holds) -> Option<(u64, BlockState)> {
        let Payload::Data(data) = &request.payload else { return None };
        let range = self.range(request);
        let (_, mut whole) = self.blocks(&range);
        let scratch = &mut self.scratch;
        whole.find_map(|block| {
            let (region, at) = holds.block(block);
            let sum = || sum_of(data, (block * BLOCK - range.start) as usize, scratch);
            match region.verify(at, sum) {
                Verdict::Mismatch(state) => Some((block, state)),
                Verdict::Match | Verdict::Unknown => None,
            }
        })
    }

    /// Begins requests whose regions the owner has given.
    fn take_replies(&mut self) {
        while let Some(Granted { token, result }) = self.replies.receive() {
            let Some(request) = self.parked.remove(&token) else { continue };
            let Some(holds) = result.ok().and_then(Holds::of) else {
                // The log has why.
                self.completed.push(request.complete(Status::INTERNAL_ERROR));
                continue;
            };
            if self.cache.is_empty() {
                self.cache.resize(CACHE_REGIONS, None);
            }
            for hold in std::iter::once(&holds.first).chain(&holds.others) {
                let region = hold.region();
                self.cache[region.index as usize % CACHE_REGIONS] = Some(region.clone());
            }
            self.begin(request, holds);
        }
    }
}

/// The checksum of the block at a byte of data.
fn sum_of(data: &Data, at: usize, scratch: &mut [u8]) -> u32 {
    match data.single() {
        Some(buffer) if !buffer.is_external() => codec::crc32c(&buffer.as_slice()[at..at + scratch.len()]),
        _ => {
            data.copy_to(at, scratch);
            codec::crc32c(scratch)
        }
    }
}

/// Copies data from a byte on, as much as `to` has.
fn copy(from: &Data, skip: usize, to: &mut Data) {
    let mut at = 0;
    for part in from.parts(skip, to.len()) {
        to.copy_from(at, part);
        at += part.len();
    }
}

impl block_io::Channel for ChecksumChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        let trims = self.shared.trims();
        if trims != self.trims_seen {
            self.trims_seen = trims;
            self.cache.clear();
        }
        for request in batch.drain(..) {
            self.accept(request);
        }
        self.base.submit();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        self.take_replies();
        if !self.unsent.is_empty() {
            self.send();
        }
        let mut completions = std::mem::take(&mut self.at_base);
        completions.extend(self.base.poll());
        completions.drain(..).for_each(|completion| self.complete(completion));
        self.at_base = completions;
        // What is repeated.
        self.base.submit();
        sink.append(&mut self.completed);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.completed.is_empty() || !self.unsent.is_empty() || !self.replies.is_empty() {
            return Some(0);
        }
        self.base.deadline()
    }
}

impl Drop for ChecksumChannel {
    fn drop(&mut self) {
        // What a write leaves that did not complete is not known: its region stays dirty.
        for (_, pending) in self.pending.iter_mut() {
            let kind = std::mem::replace(&mut pending.kind, PendingKind::Passed);
            if matches!(kind, PendingKind::Write { .. }) {
                std::mem::forget(kind);
            }
        }
    }
}
