//! The channel of raid5f.

use std::collections::VecDeque;
use std::sync::Arc;

use bdev::stacking::BaseChannels;
use bdev::{Completion, Request};
use block_io::{Channel, Op, Payload, RequestFlags, Status, Tag};
use dma::{Data, Pool};
use os::clock::Clock;
use reactor::Core;
use slots::{Slab, Slot};

use super::Mirror;
use super::xor::XorEngine;
use crate::parity_layout::ParityLayout;

/// Interval of the attempts to get a stripe or memory, of which no event tells.
const RETRY_NS: u64 = 20_000;
/// After this time without memory a request fails with a status that its user may retry.
const MEMORY_WAIT_NS: u64 = 1_000_000_000;

/// Writes whole stripes with their parity, and reads from the member that has the block; where that cannot
/// be read, from all others.
///
/// A write waits until the bitmap has its region, and is acknowledged when all members have it that the
/// superblock says have all data: where one fails, when the superblock says so. Data is neither copied nor
/// allocated; parity and reconstructions take memory of the pool.
pub(super) struct ParityChannel {
    mirror: Arc<Mirror>,
    layout: ParityLayout,
    channels: BaseChannels,
    xor: XorEngine,
    pool: Pool,
    clock: Clock,
    requests: Slab<StripeRequest>,
    children: Slab<StripeChild>,
    /// Writes whose regions are not in the bitmap yet, with the failures before.
    unmarked: Vec<(Request, u64)>,
    /// Writes that a member lacks whose failure is not recorded yet: with the members that have it, and the
    /// failures before.
    unrecorded: Vec<(Request, u64, u64)>,
    waiting: VecDeque<(Waiting, u64)>,
    /// Lists of pieces without entries.
    lists: Vec<Vec<StripePart>>,
    finished: Vec<Completion>,
    /// Empty between calls.
    completions: Vec<Completion>,
}

/// What waits for its stripe or for memory, beside the time since when.
enum Waiting {
    Write(Request),
    Reconstruction { request: Slot, part: usize },
}

/// A request whose parts are in flight or wait.
struct StripeRequest {
    /// Without its data.
    request: Request,
    /// Those with data in its order; of a write, the parity last.
    parts: Vec<StripePart>,
    left: usize,
    status: Status,
    /// Bits of members.
    succeeded: u64,
    failed: u64,
    /// The stripe that it has claimed.
    claim: Option<u64>,
}

/// What of a request is on one member.
struct StripePart {
    place: usize,
    row: u64,
    blocks: u32,
    data: Option<Data>,
    /// The same rows of the other members, if it is reconstructed.
    sources: Vec<(usize, Option<Data>)>,
    in_flight: u32,
    /// Of the read of the member, or of its sources.
    status: Status,
}

/// A request of a member.
struct StripeChild {
    request: Slot,
    part: usize,
    /// Index of the source, of a reconstruction.
    source: Option<usize>,
}

impl ParityChannel {
    pub(super) fn new(
        mirror: Arc<Mirror>,
        layout: ParityLayout,
        channels: BaseChannels,
        core: &Core,
        depth: u32,
    ) -> ParityChannel {
        let xor = XorEngine::new(mirror.accel.channel(core.index()));
        // A read has up to one part a data member, and each has up to one source another member.
        let children = u64::from(depth) * (layout.members() * layout.members()) as u64;
        ParityChannel {
            mirror,
            layout,
            channels,
            xor,
            pool: core.pool().clone(),
            clock: core.clock().clone(),
            requests: Slab::with_capacity(depth),
            children: Slab::with_capacity(u32::try_from(children).unwrap_or(u32::MAX - 1)),
            unmarked: Vec::new(),
            unrecorded: Vec::new(),
            waiting: VecDeque::new(),
            lists: Vec::new(),
            finished: Vec::new(),
            completions: Vec::new(),
        }
    }

    fn start(&mut self, request: Request) {
        match request.op {
            Op::Read => self.read(request),
            Op::Flush => self.flush(request),
            Op::Write => self.begin_write(request),
            _ => self.finished.push(request.complete(Status::INVALID_OPCODE.do_not_retry())),
        }
    }

    fn begin_write(&mut self, request: Request) {
        let stripe_blocks = self.layout.stripe_blocks();
        let is_whole =
            request.lba.is_multiple_of(stripe_blocks) && u64::from(request.blocks) == stripe_blocks;
        if !is_whole || !matches!(request.payload, Payload::Data(_)) {
            // Its parity would need the rest of the stripe.
            return self.finished.push(request.complete(Status::INVALID_FIELD.do_not_retry()));
        }
        let (row, blocks) = self.rows_of(&request);
        if self.mirror.regions().begin(row, blocks) {
            return self.write(request, self.clock.now_ns());
        }
        self.unmarked.push((request, self.mirror.failures()));
        self.mirror.request_marks();
    }

    /// First row and number of rows of a write.
    fn rows_of(&self, write: &Request) -> (u64, u32) {
        let rows = self.layout.rows_of(self.layout.stripe_of(write.lba));
        (rows.start, (rows.end - rows.start) as u32)
    }

    /// Writes a stripe that the bitmap has.
    fn write(&mut self, mut request: Request, since_ns: u64) {
        let stripe = self.layout.stripe_of(request.lba);
        if !self.mirror.busy.try_claim(stripe) {
            return self.waiting.push_back((Waiting::Write(request), since_ns));
        }
        let places = self.channels.present();
        let (row, blocks) = self.rows_of(&request);
        let Some(data) = request.take_data() else {
            self.mirror.busy.release(stripe);
            return self.end_write(request.complete(Status::INVALID_FIELD.do_not_retry()));
        };
        let strip_bytes = data.len() / (self.layout.members() - 1);
        let parity_place = self.layout.parity_place(stripe);
        let mut parity = None;
        if places >> parity_place & 1 != 0 {
            parity = self.pool.take_data(strip_bytes);
            if parity.is_none() {
                self.mirror.busy.release(stripe);
                request.set_data(Some(data));
                return self.wait_for_memory(Waiting::Write(request), since_ns);
            }
        }
        let mut parts = self.lists.pop().unwrap_or_default();
        let mut rest = Some(data);
        for index in 0..self.layout.members() - 1 {
            let mut strip = rest.take();
            if let Some(strip) = &mut strip
                && strip.len() > strip_bytes
            {
                rest = Some(strip.split_off(strip_bytes));
            }
            parts.push(StripePart::new(self.layout.data_place(stripe, index), row, blocks, strip));
        }
        if let Some(mut parity) = parity {
            let strips = parts.iter().filter_map(|part| part.data.as_ref());
            if self.xor.xor(&mut parity, strips).is_err() {
                self.mirror.busy.release(stripe);
                self.join_data(&mut request, &mut parts);
                self.lists.push(parts);
                return self.end_write(request.complete(Status::INTERNAL_ERROR));
            }
            parts.push(StripePart::new(parity_place, row, blocks, Some(parity)));
        }
        let sent = parts.iter().filter(|part| places >> part.place & 1 != 0).count();
        let slot = self.insert(StripeRequest::new(request, parts, sent, Some(stripe)));
        self.send_parts(slot, places);
        if sent == 0 {
            self.finish(slot);
        }
    }

    /// Sends the parts of a request to those places.
    fn send_parts(&mut self, slot: Slot, places: u64) {
        let count = self.request(slot).parts.len();
        for part in 0..count {
            if places >> self.request(slot).parts[part].place & 1 != 0 {
                self.send(slot, part);
            }
        }
    }

    fn flush(&mut self, request: Request) {
        let places = self.channels.present();
        let mut parts = self.lists.pop().unwrap_or_default();
        let present = (0..self.layout.members()).filter(|place| places >> place & 1 != 0);
        parts.extend(present.map(|place| StripePart::new(place, 0, 0, None)));
        let sent = parts.len();
        let slot = self.insert(StripeRequest::new(request, parts, sent, None));
        self.send_parts(slot, places);
        if sent == 0 {
            self.finish(slot);
        }
    }

    fn read(&mut self, mut request: Request) {
        let (lba, blocks) = (request.lba, u64::from(request.blocks));
        let Some(data) = request.take_data() else {
            // The array takes no pages of others, and has no metadata.
            return self.finished.push(request.complete(Status::INVALID_FIELD.do_not_retry()));
        };
        let block_bytes = data.len() / request.blocks.max(1) as usize;
        let mut parts = self.lists.pop().unwrap_or_default();
        let (mut rest, mut done) = (Some(data), 0);
        while done < blocks {
            let piece = self.layout.piece(lba + done, blocks - done);
            done += piece.blocks;
            let mut head = rest.take();
            if let Some(head) = &mut head
                && done < blocks
            {
                rest = Some(head.split_off(piece.blocks as usize * block_bytes));
            }
            parts.push(StripePart::new(piece.place, piece.lba, piece.blocks as u32, head));
        }
        let count = parts.len();
        let slot = self.insert(StripeRequest::new(request, parts, count, None));
        let healthy = self.healthy();
        for part in 0..count {
            if healthy >> self.request(slot).parts[part].place & 1 != 0 {
                self.send(slot, part);
            } else {
                self.reconstruct(slot, part, self.clock.now_ns());
            }
        }
    }

    /// Bits of the members that can be read.
    fn healthy(&self) -> u64 {
        self.mirror.in_sync() & self.channels.present()
    }

    /// Reads the rows of a part from all other members.
    #[cold]
    fn reconstruct(&mut self, slot: Slot, index: usize, since_ns: u64) {
        let healthy = self.healthy();
        let all = self.mirror.all_places();
        let is_whole = self.mirror.in_sync() == all;
        let StripeRequest { parts, claim, .. } = self.request(slot);
        let (place, row, blocks) = (parts[index].place, parts[index].row, parts[index].blocks);
        let has_claim = claim.is_some();
        let bytes = parts[index].data.as_ref().map_or(0, Data::len);
        let others = all & !(1 << place);
        let may_differ = is_whole && self.mirror.regions().may_differ(row, blocks);
        if healthy & others != others || may_differ {
            // Two members are missing, or the parity is to be made of this member's data.
            let part = &mut self.request(slot).parts[index];
            if part.status.is_success() {
                part.status = Status::INTERNAL_PATH_ERROR;
            }
            return self.end_part(slot, index);
        }
        let stripe = self.layout.stripe_of_row(row);
        let waiting = Waiting::Reconstruction { request: slot, part: index };
        if !has_claim {
            if !self.mirror.busy.try_claim(stripe) {
                return self.waiting.push_back((waiting, since_ns));
            }
            self.request(slot).claim = Some(stripe);
        }
        let mut sources = Vec::with_capacity(self.layout.members() - 1);
        for other in (0..self.layout.members()).filter(|other| *other != place) {
            match self.pool.take_data(bytes) {
                Some(data) => sources.push((other, Some(data))),
                None => return self.wait_for_memory(waiting, since_ns),
            }
        }
        let count = sources.len();
        let part = &mut self.request(slot).parts[index];
        part.sources = sources;
        for source in 0..count {
            self.send_source(slot, index, source);
        }
    }

    /// Tries later, or gives up.
    #[cold]
    fn wait_for_memory(&mut self, waiting: Waiting, since_ns: u64) {
        if self.clock.now_ns().saturating_sub(since_ns) < MEMORY_WAIT_NS {
            return self.waiting.push_back((waiting, since_ns));
        }
        match waiting {
            Waiting::Write(request) => self.end_write(request.complete(Status::COMMAND_INTERRUPTED)),
            Waiting::Reconstruction { request, part } => {
                self.request(request).parts[part].status = Status::COMMAND_INTERRUPTED;
                self.end_part(request, part);
            }
        }
    }

    fn insert(&mut self, request: StripeRequest) -> Slot {
        match self.requests.insert(request) {
            Ok(slot) => slot,
            Err(_) => unreachable!("the layer admits no more than the depth of {}", self.requests.capacity()),
        }
    }

    fn request(&mut self, slot: Slot) -> &mut StripeRequest {
        let Some(request) = self.requests.get_mut(slot) else {
            unreachable!("a part belongs to a request in the table")
        };
        request
    }

    /// Sends a part to its member.
    fn send(&mut self, slot: Slot, index: usize) {
        let request = self.request(slot);
        let (op, flags) = (request.request.op, request.request.flags);
        let part = &mut request.parts[index];
        let (place, row, blocks, data) = (part.place, part.row, part.blocks, part.data.take());
        self.push((slot, index, None), place, (op, flags), (row, blocks), data);
    }

    fn send_source(&mut self, slot: Slot, index: usize, source: usize) {
        let part = &mut self.request(slot).parts[index];
        part.in_flight += 1;
        let (row, blocks) = (part.row, part.blocks);
        let (place, data) = (part.sources[source].0, part.sources[source].1.take());
        let flags = RequestFlags::empty();
        self.push((slot, index, Some(source)), place, (Op::Read, flags), (row, blocks), data);
    }

    fn push(
        &mut self,
        (request, part, source): (Slot, usize, Option<usize>),
        place: usize,
        (op, flags): (Op, RequestFlags),
        (row, blocks): (u64, u32),
        data: Option<Data>,
    ) {
        let (flow, issued_ticks) = {
            let parent = &self.request(request).request;
            (parent.flow, parent.issued_ticks)
        };
        let Ok(slot) = self.children.insert(StripeChild { request, part, source }) else {
            unreachable!("each request has at most the square of the members as children")
        };
        let payload = Payload::from_data(data);
        let mut child = block_io::Request::with_payload(Tag(slot.to_bits()), op, row, blocks, payload);
        // The base would take it for a request of its own layer. A stripe is not atomic.
        child.flags = flags - RequestFlags::INTERNAL - RequestFlags::ATOMIC;
        (child.flow, child.issued_ticks) = (flow, issued_ticks);
        self.channels.push(place, child);
    }

    fn complete(&mut self, completion: Completion) {
        let slot = Slot::from_bits(completion.tag().0);
        let Some(StripeChild { request: parent, part: index, source }) = self.children.remove(slot) else {
            unreachable!("slot {slot:?} was completed by a base and is not in the table")
        };
        let status = completion.status();
        let data = completion.into_request().take_data();
        let request = self.request(parent);
        let op = request.request.op;
        let part = &mut request.parts[index];
        let bit = 1 << part.place;
        if let Some(source) = source {
            part.sources[source].1 = data;
            part.in_flight -= 1;
            // The source's error, not that of the member which is reconstructed.
            if !status.is_success() {
                part.status = status;
                part.sources[source].1 = None;
            }
            if part.in_flight == 0 {
                self.finish_reconstruction(parent, index);
            }
            return;
        }
        part.data = data;
        if status.is_success() {
            request.succeeded |= bit;
        } else {
            request.failed |= bit;
            part.status = status;
        }
        if op == Op::Read && !status.is_success() {
            let now_ns = self.clock.now_ns();
            return self.reconstruct(parent, index, now_ns);
        }
        self.end_part(parent, index);
    }

    #[cold]
    fn finish_reconstruction(&mut self, slot: Slot, index: usize) {
        let Some(request) = self.requests.get_mut(slot) else {
            unreachable!("a part belongs to a request in the table")
        };
        let failed = request.failed;
        let part = &mut request.parts[index];
        let sources = std::mem::take(&mut part.sources);
        let is_complete = sources.iter().all(|(_, data)| data.is_some());
        if is_complete && let Some(to) = &mut part.data {
            let all = sources.iter().filter_map(|(_, data)| data.as_ref());
            part.status = match self.xor.xor(to, all) {
                Ok(()) => Status::SUCCESS,
                Err(_) => Status::INTERNAL_ERROR,
            };
            let (row, blocks, bit) = (part.row, part.blocks, 1u64 << part.place);
            if part.status.is_success() && failed & bit != 0 {
                self.mirror.repair(row, blocks, bit);
            }
        }
        self.end_part(slot, index);
    }

    /// A part has its result.
    fn end_part(&mut self, slot: Slot, index: usize) {
        let request = self.request(slot);
        let status = request.parts[index].status;
        if !status.is_success() && request.status.is_success() {
            request.status = status;
        }
        request.left -= 1;
        if request.left == 0 {
            self.finish(slot);
        }
    }

    fn join_data(&mut self, request: &mut Request, parts: &mut Vec<StripePart>) {
        let count = match request.op {
            // The last one is the parity, if it is there.
            Op::Write => self.layout.members() - 1,
            _ => parts.len(),
        };
        let strips = parts.drain(..).take(count).filter_map(|part| part.data);
        let whole = strips.reduce(Data::join);
        request.set_data(whole);
    }

    fn finish(&mut self, slot: Slot) {
        let Some(ended) = self.requests.remove(slot) else { return };
        let StripeRequest { mut request, mut parts, status, succeeded, failed, claim, .. } = ended;
        if request.op != Op::Flush {
            self.join_data(&mut request, &mut parts);
        }
        parts.clear();
        self.lists.push(parts);
        if let Some(stripe) = claim {
            self.mirror.busy.release(stripe);
        }
        if request.op == Op::Read {
            return self.finished.push(request.complete(status));
        }
        if failed == 0 && self.mirror.recorded() & !succeeded == 0 {
            return self.end_write(request.complete(Status::SUCCESS));
        }
        self.finish_failed(request, status, succeeded, failed);
    }

    /// A write, or a flush, that a member has not done.
    #[cold]
    fn finish_failed(&mut self, request: Request, status: Status, succeeded: u64, mut failed: u64) {
        while failed != 0 {
            // Before the completion: from then on no core reads what the member does not have.
            self.mirror.fail(failed.trailing_zeros() as usize);
            failed &= failed - 1;
        }
        if self.mirror.in_sync() & !succeeded != 0 {
            // Without two members there is no stripe.
            let status = if status.is_success() { Status::WRITE_FAULT } else { status };
            return self.end_write(request.complete(status));
        }
        if self.mirror.recorded() & !succeeded == 0 {
            return self.end_write(request.complete(Status::SUCCESS));
        }
        self.unrecorded.push((request, succeeded, self.mirror.failures()));
    }

    /// Completes what [`begin_write`](Self::begin_write) has begun, or a flush.
    fn end_write(&mut self, completion: Completion) {
        let request = completion.request();
        if request.op == Op::Write {
            let (row, blocks) = self.rows_of(request);
            self.mirror.regions().end(row, blocks);
        }
        self.finished.push(completion);
    }

    /// Looks whether what waits may continue.
    #[cold]
    fn resume(&mut self) {
        let failures = self.mirror.failures();
        for (request, before) in std::mem::take(&mut self.unmarked) {
            let (row, blocks) = self.rows_of(&request);
            if self.mirror.regions().is_stored(row, blocks) {
                self.write(request, self.clock.now_ns());
            } else if before != failures {
                self.end_write(request.complete(Status::WRITE_FAULT));
            } else {
                self.unmarked.push((request, before));
            }
        }
        for (request, succeeded, before) in std::mem::take(&mut self.unrecorded) {
            if self.mirror.in_sync() & !succeeded != 0 || before != failures {
                self.end_write(request.complete(Status::WRITE_FAULT));
            } else if self.mirror.recorded() & !succeeded == 0 {
                self.end_write(request.complete(Status::SUCCESS));
            } else {
                self.unrecorded.push((request, succeeded, before));
            }
        }
        for _ in 0..self.waiting.len() {
            match self.waiting.pop_front() {
                Some((Waiting::Write(request), since_ns)) => self.write(request, since_ns),
                Some((Waiting::Reconstruction { request, part }, since_ns)) => {
                    self.reconstruct(request, part, since_ns);
                }
                None => break,
            }
        }
    }
}

impl StripeRequest {
    fn new(request: Request, parts: Vec<StripePart>, left: usize, claim: Option<u64>) -> StripeRequest {
        StripeRequest { request, parts, left, status: Status::SUCCESS, succeeded: 0, failed: 0, claim }
    }
}

impl StripePart {
    fn new(place: usize, row: u64, blocks: u32, data: Option<Data>) -> StripePart {
        let sources = Vec::new();
        StripePart { place, row, blocks, data, sources, in_flight: 0, status: Status::SUCCESS }
    }
}

impl Channel for ParityChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        self.channels.sync();
        for request in batch.drain(..) {
            self.start(request);
        }
        self.channels.submit();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let mut completions = std::mem::take(&mut self.completions);
        self.channels.poll(&mut completions);
        let is_idle = completions.is_empty();
        for completion in completions.drain(..) {
            self.complete(completion);
        }
        self.completions = completions;
        let waits = !(self.unmarked.is_empty() && self.unrecorded.is_empty() && self.waiting.is_empty());
        if waits {
            self.resume();
        }
        if waits || !is_idle {
            // Reconstructions have begun with completions.
            self.channels.submit();
        }
        sink.append(&mut self.finished);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.finished.is_empty() {
            return Some(0);
        }
        let retry = (!self.waiting.is_empty()).then(|| self.clock.now_ns() + RETRY_NS);
        [self.channels.deadline(), retry].into_iter().flatten().min()
    }
}
