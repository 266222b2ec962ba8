//! Fetching commands, executing those of I/O queues, and completing them.

use controller::Event;
use controller::io::{self, Copying, Op as Planned, Plan, Transfer};
use controller::reservation::Outcome;
use memory::Buffer;
use ring::{Op, Request, Status, Tag};
use slots::Slot;
use wire_nvme::Sqe;
use wire_nvme::sqe::Fuse;

use super::super::data::{self, PAGE, Piece};
use super::super::queue::{State, rest};
use super::{Function, Lent};

/// A command that devices have, and what is to be done when they are done with it.
pub(in super::super) struct Command {
    cid: u16,
    sqid: u16,
    work: Work,
}

/// What is to be done when the devices are done with a command.
enum Work {
    /// What was read is copied to where the client wants it.
    Copy(Box<[Piece]>),
    /// The next piece is to be read, unless it has been, or a device has it.
    Copying { copying: Box<Copying>, has_read: bool, buffer: Option<Buffer> },
    /// So many requests are out; the worst of their outcomes is the command's.
    Several { left: u32, status: Status },
}

/// What a device is asked to do for a command.
#[derive(Clone, Copy)]
struct Asked<'a> {
    qid: u16,
    cid: u16,
    backend: u32,
    op: Op,
    plan: &'a Plan,
}

impl Asked<'_> {
    #[inline(always)]
    fn request(&self, tag: Tag, buffer: Option<Buffer>, flow: u16) -> bdev::Request {
        let mut request = Request::new(tag, self.op, self.plan.lba, self.plan.blocks);
        (request.flow, request.flags, request.buffer) = (flow, self.plan.flags, buffer);
        request
    }
}

impl Function {
    /// Fetches what is new on every submission queue and hands it to devices; how many commands.
    #[inline]
    pub(in super::super) fn fetch(&mut self, lent: &mut Lent<'_>) -> usize {
        let mut count = self.fetch_all(lent);
        if self.trapped && self.doorbells.are_quiet() && count == 0 {
            count = self.fetch_last(lent);
        }
        if count > 0 {
            self.last_ns = lent.now_ns;
            self.doorbells.disarm();
        }
        count
    }

    /// The core is about to sleep: the client has to ring what it writes from now on.
    #[cold]
    fn fetch_last(&mut self, lent: &mut Lent<'_>) -> usize {
        let tails = self.submissions.iter().flatten().map(|queue| (queue.doorbell, queue.head));
        let heads = self.completions.iter().flatten().map(|queue| queue.known_head());
        self.doorbells.arm(tails.chain(heads));
        self.fetch_all(lent)
    }

    #[inline]
    fn fetch_all(&mut self, lent: &mut Lent<'_>) -> usize {
        let mut count = 0;
        let mut index = 0;
        // The admin queue may add and remove queues meanwhile.
        while let Some(&qid) = self.active.get(index) {
            if let Some(Some(queue)) = self.submissions.get(usize::from(qid)) {
                match self.doorbells.load(queue.doorbell) {
                    Some(tail) if tail != queue.head => count += self.fetch_from(qid, tail, lent),
                    _ => {}
                }
            }
            index += 1;
        }
        count
    }

    fn fetch_from(&mut self, qid: u16, tail: u32, lent: &mut Lent<'_>) -> usize {
        let room = self.commands.capacity() - self.commands.len();
        let Some(Some(queue)) = self.submissions.get_mut(usize::from(qid)) else { return 0 };
        if tail >= queue.entries {
            // Base 2.0, section 5.2.1: Invalid Doorbell Write Value; told once.
            let is_new = queue.refused != tail;
            queue.refused = tail;
            if is_new {
                self.tell(Event::InvalidDoorbellValue, lent.now_ns);
            }
            return 0;
        }
        if queue.place.is_none() || self.faults.stalled == Some(qid) {
            return 0;
        }
        let wanted = queue.waiting(tail).min(u32::try_from(room).unwrap_or(u32::MAX));
        let Some(Some(completions)) = self.completions.get_mut(usize::from(queue.cqid)) else { return 0 };
        // Room for the answer is there before the question is taken.
        let reserved = match completions.reserve(wanted, &self.doorbells) {
            Ok(reserved) => reserved,
            Err(_) => {
                self.tell(Event::InvalidDoorbellValue, lent.now_ns);
                return 0;
            }
        };
        let cqid = queue.cqid;
        let mut done = 0;
        while done < reserved {
            // A command of the admin queue may take that away; others take nothing.
            let most = if qid == 0 { 1 } else { reserved - done };
            let queue = match self.submissions.get_mut(usize::from(qid)) {
                Some(Some(queue)) if queue.state == State::Active => queue,
                _ => break,
            };
            let count = queue.fetch(most, &mut self.fetched[..]);
            if count == 0 {
                break;
            }
            for index in 0..count as usize {
                let sqe = Sqe::decode(&self.fetched[index]);
                if qid == 0 {
                    self.admin(&sqe, lent);
                } else {
                    self.io(qid, &sqe, lent);
                }
            }
            done += count;
        }
        if done < reserved
            && let Some(completions) = self.completion(cqid)
        {
            completions.release(reserved - done);
        }
        done as usize
    }

    #[inline(always)]
    fn io(&mut self, qid: u16, sqe: &Sqe, lent: &mut Lent<'_>) {
        if self.pairings.is_empty() {
            self.io_alone(qid, sqe, lent);
        } else {
            self.io_fused(qid, sqe, lent);
        }
    }

    /// A command whose neighbours do not matter, unless it says so itself.
    #[inline(always)]
    pub(super) fn io_alone(&mut self, qid: u16, sqe: &Sqe, lent: &mut Lent<'_>) {
        match self.begin(qid, sqe, lent) {
            Ok(()) => {}
            Err(_) if matches!(sqe.fuse(), Fuse::First | Fuse::Second) => self.io_fused(qid, sqe, lent),
            Err(status) => self.answer(qid, sqe.cid, status, 0),
        }
    }

    /// Hands a command to its device, or puts it aside until there is a buffer for it.
    #[inline(always)]
    fn begin(&mut self, qid: u16, sqe: &Sqe, lent: &mut Lent<'_>) -> Result<(), Status> {
        let plan = io::plan(sqe, &self.namespaces)?;
        let op = match plan.op {
            Planned::Read => Op::Read,
            Planned::Write => Op::Write,
            _ => return self.begin_seldom(qid, sqe, &plan, lent),
        };
        let (Transfer::ToHost(bytes) | Transfer::FromHost(bytes)) = plan.data else {
            return Err(Status::INTERNAL_ERROR);
        };
        let backend = self.namespaces.entry(&plan).backend;
        let asked = Asked { qid, cid: sqe.cid, backend, op, plan: &plan };
        // No more than a page, from its beginning, is in one piece whatever else the pointer says.
        if !is_sgl(sqe)
            && u64::from(bytes) <= PAGE
            && sqe.data.low.is_multiple_of(PAGE)
            && let Some(buffer) = self.in_place(sqe.data.low, bytes, op, PAGE as u32)
        {
            return self.submit(asked, Some(buffer), lent);
        }
        self.begin_scattered(asked, sqe, bytes, lent)
    }

    /// The client's own memory as a buffer, where it can be used as it lies. Clients map whole pages.
    #[inline(always)]
    fn in_place(&self, address: u64, bytes: u32, op: Op, alignment: u32) -> Option<Buffer> {
        let spot = self.memory.find(address, bytes.into())?;
        let fits = spot.offset & u64::from(alignment - 1) == 0 && (spot.writable || op == Op::Write);
        if fits { spot.loan.buffer(spot.offset, bytes) } else { None }
    }

    #[inline(never)]
    fn begin_scattered(
        &mut self,
        asked: Asked<'_>,
        sqe: &Sqe,
        bytes: u32,
        lent: &mut Lent<'_>,
    ) -> Result<(), Status> {
        data::walk(&self.memory, sqe.data, is_sgl(sqe), bytes, &mut self.pieces)?;
        let alignment = self.namespaces.entry(asked.plan).buffer_alignment;
        if let [piece] = self.pieces[..]
            && let Some(buffer) = self.in_place(piece.address, bytes, asked.op, alignment)
        {
            return self.submit(asked, Some(buffer), lent);
        }
        // It cannot be reached in one piece, and goes by way of a buffer of ours.
        let reachable = |piece: &Piece| {
            let spot = self.memory.find(piece.address, piece.bytes.into());
            spot.is_some_and(|spot| spot.writable || asked.op == Op::Write)
        };
        if !self.pieces.iter().all(reachable) {
            return Err(super::UNREACHABLE);
        }
        let Some(mut buffer) = lent.pool.take(bytes as usize) else {
            self.aside.push_back((asked.qid, *sqe));
            return Ok(());
        };
        if asked.op == Op::Write {
            data::gather(&self.memory, &self.pieces, buffer.as_mut_slice())?;
            return self.submit(asked, Some(buffer), lent);
        }
        let work = Work::Copy(self.pieces.as_slice().into());
        self.submit_for(asked, work, buffer, lent)
    }

    #[cold]
    fn begin_seldom(&mut self, qid: u16, sqe: &Sqe, plan: &Plan, lent: &mut Lent<'_>) -> Result<(), Status> {
        let backend = match plan.op {
            Planned::Nothing | Planned::FlushAll | Planned::Reservation | Planned::Disconnect => 0,
            _ => self.namespaces.entry(plan).backend,
        };
        let mut host = Vec::new();
        if let Transfer::FromHost(bytes) = plan.data
            && bytes > 0
        {
            data::walk(&self.memory, sqe.data, is_sgl(sqe), bytes, &mut self.pieces)?;
            host.resize(bytes as usize, 0);
            data::gather(&self.memory, &self.pieces, &mut host)?;
        }
        let cid = sqe.cid;
        let asked = |op| Asked { qid, cid, backend, op, plan };
        match plan.op {
            Planned::Read | Planned::Write => Err(Status::INTERNAL_ERROR),
            Planned::Disconnect => Err(Status::INVALID_OPCODE.do_not_retry()),
            Planned::Nothing => {
                self.answer(qid, cid, Status::SUCCESS, 0);
                Ok(())
            }
            Planned::Flush => self.submit(asked(Op::Flush), None, lent),
            Planned::WriteZeroes => self.submit(asked(Op::WriteZeroes), None, lent),
            Planned::WriteUncorrectable => self.submit(asked(Op::WriteUncorrectable), None, lent),
            // What is fused is refused here, and then seen to by whoever knows of its neighbours.
            Planned::FusedCompare | Planned::FusedWrite => Err(Status::FUSED_MISSING),
            Planned::Copy => {
                let copying = Box::new(Copying::new(plan, &self.namespaces, &host)?);
                let work = Work::Copying { copying, has_read: false, buffer: None };
                let command = Command { cid, sqid: qid, work };
                let slot = self.commands.insert(command).map_err(|_| Status::COMMAND_INTERRUPTED)?;
                self.copy_on(slot, lent);
                Ok(())
            }
            Planned::Verify => {
                // As long as no transfer is longer, there is a buffer for it.
                let bytes = (plan.blocks as usize) << self.namespaces.entry(plan).block_log2;
                let Some(buffer) = lent.pool.take(bytes) else {
                    self.aside.push_back((qid, *sqe));
                    return Ok(());
                };
                self.submit(asked(Op::Read), Some(buffer), lent)
            }
            Planned::Reservation => self.reserve(qid, sqe, plan, &host),
            Planned::FlushAll => {
                let all = self.namespaces.backends().map(|backend| (backend, 0, 0)).collect();
                self.submit_all(qid, cid, Op::Flush, plan, all, lent);
                Ok(())
            }
            Planned::Unmap => {
                let ranges = io::unmaps(plan, &self.namespaces, &host)?;
                let ranges = ranges.map(|(lba, blocks)| (backend, lba, blocks)).collect();
                self.submit_all(qid, cid, Op::Unmap, plan, ranges, lent);
                Ok(())
            }
            Planned::Compare => {
                let Some(mut buffer) = lent.pool.take(host.len()) else {
                    self.aside.push_back((qid, *sqe));
                    return Ok(());
                };
                buffer.as_mut_slice().copy_from_slice(&host);
                self.submit(asked(Op::Compare), Some(buffer), lent)
            }
        }
    }

    /// Whether copies can go on.
    #[inline]
    pub(in super::super) fn is_going(&self) -> bool {
        !self.going.is_empty()
    }

    /// Whether copies can go on, or try again whether there is a buffer.
    #[inline]
    pub(in super::super) fn has_copies(&self) -> bool {
        !self.going.is_empty() || !self.starved.is_empty()
    }

    /// Begins the next pieces of copies whose last ones are done.
    #[cold]
    pub(in super::super) fn go_on(&mut self, lent: &mut Lent<'_>) {
        let starved = std::mem::take(&mut self.starved);
        for slot in starved.into_iter().chain(std::mem::take(&mut self.going)) {
            self.copy_on(slot, lent);
        }
    }

    /// Gives up copies that no device has anything of.
    pub(super) fn drop_copies(&mut self) {
        let going = std::mem::take(&mut self.going);
        for slot in going.into_iter().chain(std::mem::take(&mut self.starved)) {
            let Some(command) = self.commands.remove(slot) else { continue };
            if let Some(queue) = self.submission(command.sqid) {
                queue.in_flight -= 1;
            }
        }
    }

    /// Reads the next piece of a Copy, or writes what was read of it, or is done with it.
    fn copy_on(&mut self, slot: Slot, lent: &mut Lent<'_>) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let Work::Copying { copying, has_read, buffer } = &mut command.work else { return };
        let (op, range) = (if *has_read { Op::Write } else { Op::Read }, u64::from(copying.range()));
        let queue = self.submissions.get(usize::from(command.sqid)).and_then(Option::as_ref);
        if queue.is_none_or(|queue| queue.state != State::Active) {
            return self.end_copy(slot, Status::ABORTED_SQ_DELETION, range);
        }
        let Some(piece) = copying.next() else { return self.end_copy(slot, Status::SUCCESS, 0) };
        if let Err(status) = copying.admit(&self.namespaces) {
            return self.end_copy(slot, status, range);
        }
        // One buffer serves all pieces, so that a Copy that has begun needs no more.
        let Some(mut buffer) = buffer.take().or_else(|| lent.pool.take(copying.bytes_max())) else {
            return self.starved.push(slot);
        };
        buffer.resize(copying.bytes(&piece));
        let lba = if op == Op::Write { piece.to } else { piece.from };
        let mut request = Request::new(tag(lent.tag_base, slot), op, lba, piece.blocks);
        (request.flow, request.buffer) = (lent.flow, Some(buffer));
        if op == Op::Write {
            request.flags = copying.flags();
        }
        if let Err(status) = lent.devices.put(copying.backend, request) {
            self.end_copy(slot, status, range);
        }
    }

    fn end_copy(&mut self, slot: Slot, status: Status, result: u64) {
        if let Some(command) = self.commands.remove(slot) {
            self.answer(command.sqid, command.cid, status, result);
        }
    }

    /// A reservation command, which no device sees.
    fn reserve(&mut self, qid: u16, sqe: &Sqe, plan: &Plan, host: &[u8]) -> Result<(), Status> {
        match self.namespaces.reserve(plan, host) {
            Outcome::Done(status) => self.answer(qid, sqe.cid, status, 0),
            Outcome::Report(report) => {
                data::walk(&self.memory, sqe.data, is_sgl(sqe), report.len() as u32, &mut self.pieces)?;
                data::scatter(&self.memory, &self.pieces, &report)?;
                self.answer(qid, sqe.cid, Status::SUCCESS, 0);
            }
            Outcome::Pending(pending) => {
                self.parked.push((qid, sqe.cid), pending);
                self.unpark();
            }
        }
        Ok(())
    }

    /// Hands over the one request of a command that is answered as the device answers. Its queue is not free
    /// for another use before, so that the tag names it well enough.
    #[inline(always)]
    fn submit(
        &mut self,
        asked: Asked<'_>,
        buffer: Option<Buffer>,
        lent: &mut Lent<'_>,
    ) -> Result<(), Status> {
        let tag = direct_tag(lent.tag_base, asked.qid, asked.cid);
        lent.devices.put(asked.backend, asked.request(tag, buffer, lent.flow))?;
        self.direct += 1;
        Ok(())
    }

    /// Hands over one request of a command with something to do afterwards.
    fn submit_for(
        &mut self,
        asked: Asked<'_>,
        work: Work,
        buffer: Buffer,
        lent: &mut Lent<'_>,
    ) -> Result<(), Status> {
        let Ok(slot) = self.commands.insert(Command { cid: asked.cid, sqid: asked.qid, work }) else {
            return Err(Status::COMMAND_INTERRUPTED);
        };
        let tag = tag(lent.tag_base, slot);
        let submitted = lent.devices.put(asked.backend, asked.request(tag, Some(buffer), lent.flow));
        if submitted.is_err() {
            self.commands.remove(slot);
        }
        submitted
    }

    /// Hands over one request for each (backend, first block, number of blocks).
    fn submit_all(
        &mut self,
        qid: u16,
        cid: u16,
        op: Op,
        plan: &Plan,
        parts: Vec<(u32, u64, u32)>,
        lent: &mut Lent<'_>,
    ) {
        let work = Work::Several { left: parts.len() as u32, status: Status::SUCCESS };
        let slot = match self.commands.insert(Command { cid, sqid: qid, work }) {
            Ok(slot) if !parts.is_empty() => slot,
            Ok(slot) => {
                self.commands.remove(slot);
                return self.answer(qid, cid, Status::SUCCESS, 0);
            }
            Err(_) => return self.answer(qid, cid, Status::COMMAND_INTERRUPTED, 0),
        };
        let tag = tag(lent.tag_base, slot);
        for (backend, lba, blocks) in parts {
            let mut request = Request::new(tag, op, lba, blocks);
            (request.flow, request.flags) = (lent.flow, plan.flags);
            if let Err(status) = lent.devices.put(backend, request) {
                // As if the device had answered so.
                self.complete(Request::new(tag, op, lba, blocks).complete(status));
            }
        }
    }

    /// Tries again what had no buffer, oldest first.
    pub(in super::super) fn serve_aside(&mut self, lent: &mut Lent<'_>) {
        self.serve_pairs(lent);
        let mut left = self.aside.len();
        while left > 0
            && let Some((qid, sqe)) = self.aside.pop_front()
        {
            let before = self.aside.len();
            // It came before whatever may be half of two now.
            self.io_alone(qid, &sqe, lent);
            if self.aside.len() > before {
                // What was put aside again is the oldest.
                self.aside.rotate_right(1);
                return;
            }
            left -= 1;
        }
    }

    /// Whether a request's tag says all that there is to know of its command.
    #[inline]
    pub(in super::super) fn is_direct(completion: &bdev::Completion) -> bool {
        completion.tag().0 & DIRECT != 0
    }

    /// Devices are done with requests, of which those are answered whose tags say all that there is to know.
    #[inline]
    pub(in super::super) fn complete_direct(&mut self, all: &[bdev::Completion]) {
        // One queue's at a time.
        for run in all.chunk_by(|one, next| (one.tag().0 ^ next.tag().0) >> 16 == 0) {
            if Self::is_direct(&run[0]) {
                self.complete_run((run[0].tag().0 >> 16) as u16, run);
            }
        }
    }

    #[inline]
    fn complete_run(&mut self, qid: u16, run: &[bdev::Completion]) {
        self.direct -= run.len() as u32;
        if let Some(Some(queue)) = self.submissions.get_mut(usize::from(qid))
            && queue.state == State::Active
            && self.faults.drop_completions == 0
            && let Some(Some(completions)) = self.completions.get_mut(usize::from(queue.cqid))
        {
            let was = completions.dirty;
            queue.in_flight -= run.len() as u32;
            for completion in run {
                let status = completion.status();
                queue.errors += u64::from(!status.is_success());
                let high = rest(queue.head as u16, qid, completion.tag().0 as u16, status);
                self.holds |= !completions.post(0, high);
            }
            if completions.dirty && !was {
                self.dirty.push(queue.cqid);
            }
            return;
        }
        for completion in run {
            self.answer(qid, completion.tag().0 as u16, completion.status(), 0);
        }
    }

    /// A device is done with a request.
    pub(in super::super) fn complete(&mut self, completion: bdev::Completion) {
        let tag = completion.tag().0;
        if tag & DIRECT != 0 {
            return self.complete_direct(std::slice::from_ref(&completion));
        }
        let Some(slot) = self.commands.slot_at(tag as u32) else { return };
        if generation(slot) != tag >> 32 & GENERATIONS {
            return;
        }
        let mut status = completion.status();
        let Some(command) = self.commands.get_mut(slot) else { return };
        if let Work::Several { left, status: worst } = &mut command.work {
            if worst.is_success() {
                *worst = status;
            }
            *left -= 1;
            if *left > 0 {
                return;
            }
            status = *worst;
        }
        if let Work::Copying { copying, has_read, buffer } = &mut command.work {
            if !status.is_success() {
                let range = copying.range().into();
                return self.end_copy(slot, status, range);
            }
            if *has_read {
                copying.done();
            }
            *has_read = !*has_read;
            *buffer = completion.into_request().buffer;
            let sqid = command.sqid;
            if self.submission(sqid).is_some_and(|queue| queue.state == State::Closed) {
                // Nobody waits for the rest.
                return self.end_copy(slot, Status::ABORTED_SQ_DELETION, 0);
            }
            self.going.push(slot);
            return;
        }
        let Some(Command { cid, sqid, work }) = self.commands.remove(slot) else { return };
        match work {
            Work::Copy(pieces) if status.is_success() => {
                let buffer = completion.into_request().buffer;
                let copied = buffer.map(|buffer| data::scatter(&self.memory, &pieces, buffer.as_slice()));
                // The client may have taken the memory back meanwhile.
                status = copied.map_or(Status::INTERNAL_ERROR, |copied| copied.err().unwrap_or(status));
            }
            _ => drop(completion),
        }
        self.answer(sqid, cid, status, 0);
    }

    /// Answers a command for which there is a reservation.
    #[inline]
    pub(super) fn answer(&mut self, qid: u16, cid: u16, status: Status, result: u64) {
        let Some(Some(queue)) = self.submissions.get_mut(usize::from(qid)) else { return };
        queue.in_flight -= 1;
        queue.errors += u64::from(!status.is_success());
        let high = rest(queue.head as u16, qid, cid, status);
        let cqid = queue.cqid;
        if queue.state == State::Active {
            return self.post(cqid, result, high);
        }
        self.answer_last(qid, cqid, result, high);
    }

    /// Answers a command of a queue that is not to stay.
    #[cold]
    fn answer_last(&mut self, qid: u16, cqid: u16, result: u64, high: u64) {
        let Some(queue) = self.submission(qid) else { return };
        let (state, in_flight) = (queue.state, queue.in_flight);
        if state != State::Closed {
            self.post(cqid, result, high);
        }
        if state != State::Active && in_flight == 0 {
            self.submissions[usize::from(qid)] = None;
            if let State::Deleting(cid) = state {
                self.answer(0, cid, Status::SUCCESS, 0);
            }
        }
    }

    #[inline]
    fn post(&mut self, cqid: u16, result: u64, high: u64) {
        let Some(Some(completions)) = self.completions.get_mut(usize::from(cqid)) else { return };
        if self.faults.drop_completions > 0 {
            self.faults.drop_completions -= 1;
            return completions.release(1);
        }
        let was = completions.dirty;
        if !completions.post(result, high) {
            self.holds = true;
        } else if !was {
            self.dirty.push(cqid);
        }
    }
}

/// In a tag: it names a queue and a command of the client's, not a slot.
const DIRECT: u64 = 1 << 47;
/// How much of a slot's generation a tag has room for.
const GENERATIONS: u64 = 0x7fff;

#[inline(always)]
pub(super) fn direct_tag(base: u64, qid: u16, cid: u16) -> Tag {
    Tag(base | DIRECT | u64::from(qid) << 16 | u64::from(cid))
}

#[inline]
pub(super) fn is_sgl(sqe: &Sqe) -> bool {
    sqe.flags & 0xc0 != 0
}

#[inline]
fn generation(slot: Slot) -> u64 {
    slot.to_bits() >> 32 & GENERATIONS
}

#[inline]
fn tag(base: u64, slot: Slot) -> Tag {
    Tag(base | generation(slot) << 32 | u64::from(slot.index()))
}
