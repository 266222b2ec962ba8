//! Fetches commands, executes I/O commands, and writes completions.

use block_io::{Op, Request, Status, Tag};
use dma::Buffer;
use nvme_controller::ControllerEvent;
use nvme_controller::io::{self, CopyOperation, DataTransfer, IoOp as Planned, IoPlan};
use nvme_controller::reservation::ReservationOutcome;
use slots::Slot;
use wire_nvme::Sqe;
use wire_nvme::sqe::Fuse;

use super::super::data::{self, DataSegment, PAGE};
use super::super::queue::{SubmissionQueueState, cqe_high};
use super::{FunctionContext, VfioUserFunction};

/// A command with outstanding device requests that needs work when they complete.
pub(in super::super) struct PendingCommand {
    cid: u16,
    sqid: u16,
    work: PendingWork,
}

/// The work of a command when its device requests complete.
enum PendingWork {
    /// A read through a pool buffer: copy the data to these segments of client memory.
    CopyToClient(Box<[DataSegment]>),
    /// A Copy in progress: the current piece is read next, or written next if `has_read`, or is at a device.
    CopyInProgress { copying: Box<CopyOperation>, has_read: bool, buffer: Option<Buffer> },
    /// `remaining` device requests are outstanding; the command completes with the first error among them.
    Submitted { remaining: u32, status: Status },
}

/// The parameters of a command's device request.
#[derive(Clone, Copy)]
struct CommandRequest<'a> {
    qid: u16,
    cid: u16,
    backend: u32,
    op: Op,
    plan: &'a IoPlan,
}

impl CommandRequest<'_> {
    #[inline(always)]
    fn request(&self, tag: Tag, buffer: Option<Buffer>, flow: u16) -> bdev::Request {
        let mut request = Request::new(tag, self.op, self.plan.lba, self.plan.blocks);
        (request.flow, request.flags) = (flow, self.plan.flags);
        request.set_data(buffer);
        request
    }
}

impl VfioUserFunction {
    /// Fetches and executes new entries of every submission queue. Returns the number of commands.
    #[inline]
    pub(in super::super) fn fetch(&mut self, context: &mut FunctionContext<'_>) -> usize {
        let mut count = self.fetch_all(context);
        if self.doorbells_trapped && self.doorbells.can_arm() && count == 0 {
            count = self.arm_and_fetch(context);
        }
        if count > 0 {
            self.last_activity_ns = context.now_ns;
            self.doorbells.disarm();
        }
        count
    }

    /// Arms the shadow doorbells because the core may sleep, then fetches once more.
    #[cold]
    fn arm_and_fetch(&mut self, context: &mut FunctionContext<'_>) -> usize {
        let tails = self.sqs.iter().flatten().map(|queue| (queue.doorbell, queue.head));
        let heads = self.cqs.iter().flatten().map(|queue| queue.known_head());
        self.doorbells.arm(tails.chain(heads));
        self.fetch_all(context)
    }

    #[inline]
    fn fetch_all(&mut self, context: &mut FunctionContext<'_>) -> usize {
        let mut count = 0;
        let mut index = 0;
        // Admin commands may create and delete queues during the loop.
        while let Some(&qid) = self.active_sqids.get(index) {
            if let Some(Some(queue)) = self.sqs.get(usize::from(qid)) {
                match self.doorbells.load(queue.doorbell) {
                    Some(tail) if tail != queue.head => count += self.fetch_from(qid, tail, context),
                    _ => {}
                }
            }
            index += 1;
        }
        count
    }

    fn fetch_from(&mut self, qid: u16, tail: u32, context: &mut FunctionContext<'_>) -> usize {
        let free_slots = self.commands.capacity() - self.commands.len();
        let Some(Some(queue)) = self.sqs.get_mut(usize::from(qid)) else { return 0 };
        if tail >= queue.entries {
            // Base 2.0, section 5.2.1: Invalid Doorbell Write Value, reported once per value.
            let is_new = queue.invalid_tail != tail;
            queue.invalid_tail = tail;
            if is_new {
                self.controller_event(ControllerEvent::InvalidDoorbellValue, context.now_ns);
            }
            return 0;
        }
        if queue.memory.is_none() || self.faults.stalled == Some(qid) {
            return 0;
        }
        let pending = queue.pending_entries(tail).min(u32::try_from(free_slots).unwrap_or(u32::MAX));
        let Some(Some(completions)) = self.cqs.get_mut(usize::from(queue.cqid)) else { return 0 };
        // Reserve completion queue entries before fetching the commands.
        let reserved = completions.reserve(pending, &self.doorbells);
        let cqid = queue.cqid;
        if completions.take_invalid_head() {
            self.controller_event(ControllerEvent::InvalidDoorbellValue, context.now_ns);
        }
        let mut fetched = 0;
        while fetched < reserved {
            // An admin command may delete or close queues, so fetch those one at a time.
            let batch_max = if qid == 0 { 1 } else { reserved - fetched };
            let queue = match self.sqs.get_mut(usize::from(qid)) {
                Some(Some(queue)) if queue.state == SubmissionQueueState::Active => queue,
                _ => break,
            };
            let count = queue.fetch(batch_max, &mut self.fetched[..]);
            if count == 0 {
                break;
            }
            for index in 0..count as usize {
                let sqe = Sqe::decode(&self.fetched[index]);
                if qid == 0 {
                    self.admin_command(&sqe, context);
                } else {
                    self.io(qid, &sqe, context);
                }
            }
            fetched += count;
        }
        if fetched < reserved
            && let Some(completions) = self.cq(cqid)
        {
            completions.release(reserved - fetched);
        }
        fetched as usize
    }

    #[inline(always)]
    fn io(&mut self, qid: u16, sqe: &Sqe, context: &mut FunctionContext<'_>) {
        if self.pairings.is_empty() {
            self.io_unfused(qid, sqe, context);
        } else {
            self.io_fused(qid, sqe, context);
        }
    }

    /// Executes an I/O command that does not follow a first fused command.
    #[inline(always)]
    pub(super) fn io_unfused(&mut self, qid: u16, sqe: &Sqe, context: &mut FunctionContext<'_>) {
        match self.submit_io(qid, sqe, context) {
            Ok(()) => {}
            Err(_) if matches!(sqe.fuse(), Fuse::First | Fuse::Second) => self.io_fused(qid, sqe, context),
            Err(status) => self.complete_command(qid, sqe.cid, status, 0),
        }
    }

    /// Submits an I/O command to its device, or defers it until a buffer is available.
    #[inline(always)]
    fn submit_io(&mut self, qid: u16, sqe: &Sqe, context: &mut FunctionContext<'_>) -> Result<(), Status> {
        let plan = io::plan(sqe, &self.namespaces)?;
        let op = match plan.op {
            Planned::Read => Op::Read,
            Planned::Write => Op::Write,
            _ => return self.submit_uncommon(qid, sqe, &plan, context),
        };
        let (DataTransfer::ToHost(bytes) | DataTransfer::FromHost(bytes)) = plan.data else {
            return Err(Status::INTERNAL_ERROR);
        };
        let backend = self.namespaces.entry(&plan).backend;
        let request = CommandRequest { qid, cid: sqe.cid, backend, op, plan: &plan };
        // A transfer of at most a page from a page boundary is contiguous; only PRP1 matters.
        if !is_sgl(sqe)
            && u64::from(bytes) <= PAGE
            && sqe.data.low.is_multiple_of(PAGE)
            && let Some(buffer) = self.lend_client_memory(sqe.data.low, bytes, op, PAGE as u32)
        {
            return self.submit(request, Some(buffer), context);
        }
        self.submit_scattered(request, sqe, bytes, context)
    }

    /// Lends client memory as a buffer, if it is contiguous, aligned, and writable where needed. Clients map whole
    /// pages.
    #[inline(always)]
    fn lend_client_memory(&self, address: u64, bytes: u32, op: Op, alignment: u32) -> Option<Buffer> {
        let mapped = self.memory.translate(address, bytes.into())?;
        let fits = mapped.offset & u64::from(alignment - 1) == 0 && (mapped.writable || op == Op::Write);
        if fits { mapped.external.buffer(mapped.offset, bytes) } else { None }
    }

    #[inline(never)]
    fn submit_scattered(
        &mut self,
        request: CommandRequest<'_>,
        sqe: &Sqe,
        bytes: u32,
        context: &mut FunctionContext<'_>,
    ) -> Result<(), Status> {
        data::parse_data_pointer(&self.memory, sqe.data, is_sgl(sqe), bytes, &mut self.segments)?;
        let alignment = self.namespaces.entry(request.plan).buffer_alignment;
        if let [segment] = self.segments[..]
            && let Some(buffer) = self.lend_client_memory(segment.address, bytes, request.op, alignment)
        {
            return self.submit(request, Some(buffer), context);
        }
        // Not contiguous or not aligned: copy through a pool buffer.
        let reachable = |segment: &DataSegment| {
            let mapped = self.memory.translate(segment.address, segment.bytes.into());
            mapped.is_some_and(|mapped| mapped.writable || request.op == Op::Write)
        };
        if !self.segments.iter().all(reachable) {
            return Err(super::MEMORY_NOT_MAPPED);
        }
        let Some(mut buffer) = context.pool.take(bytes as usize) else {
            self.deferred.push_back((request.qid, *sqe));
            return Ok(());
        };
        if request.op == Op::Write {
            data::gather(&self.memory, &self.segments, buffer.as_mut_slice())?;
            return self.submit(request, Some(buffer), context);
        }
        let work = PendingWork::CopyToClient(self.segments.as_slice().into());
        self.submit_with_slot(request, work, buffer, context)
    }

    #[cold]
    fn submit_uncommon(
        &mut self,
        qid: u16,
        sqe: &Sqe,
        plan: &IoPlan,
        context: &mut FunctionContext<'_>,
    ) -> Result<(), Status> {
        let backend = match plan.op {
            Planned::NoOp | Planned::FlushAll | Planned::Reservation | Planned::Disconnect => 0,
            _ => self.namespaces.entry(plan).backend,
        };
        let mut host_data = Vec::new();
        if let DataTransfer::FromHost(bytes) = plan.data
            && bytes > 0
        {
            data::parse_data_pointer(&self.memory, sqe.data, is_sgl(sqe), bytes, &mut self.segments)?;
            host_data.resize(bytes as usize, 0);
            data::gather(&self.memory, &self.segments, &mut host_data)?;
        }
        let cid = sqe.cid;
        let request = |op| CommandRequest { qid, cid, backend, op, plan };
        match plan.op {
            Planned::Read | Planned::Write => Err(Status::INTERNAL_ERROR),
            Planned::Disconnect => Err(Status::INVALID_OPCODE.do_not_retry()),
            Planned::NoOp => {
                self.complete_command(qid, cid, Status::SUCCESS, 0);
                Ok(())
            }
            Planned::Flush => self.submit(request(Op::Flush), None, context),
            Planned::WriteZeroes => self.submit(request(Op::WriteZeroes), None, context),
            Planned::WriteUncorrectable => self.submit(request(Op::WriteUncorrectable), None, context),
            // The caller passes fused commands with an error to `io_fused`.
            Planned::FusedCompare | Planned::FusedWrite => Err(Status::FUSED_MISSING),
            Planned::Copy => {
                let copying = Box::new(CopyOperation::new(plan, &self.namespaces, &host_data)?);
                let work = PendingWork::CopyInProgress { copying, has_read: false, buffer: None };
                let command = PendingCommand { cid, sqid: qid, work };
                let slot = self.commands.insert(command).map_err(|_| Status::COMMAND_INTERRUPTED)?;
                self.advance_copy(slot, context);
                Ok(())
            }
            Planned::Verify => {
                // Verify is limited to the maximum transfer size, so a buffer exists.
                let bytes = (plan.blocks as usize) << self.namespaces.entry(plan).block_log2;
                let Some(buffer) = context.pool.take(bytes) else {
                    self.deferred.push_back((qid, *sqe));
                    return Ok(());
                };
                self.submit(request(Op::Read), Some(buffer), context)
            }
            Planned::Reservation => self.reservation_command(qid, sqe, plan, &host_data),
            Planned::FlushAll => {
                let flushes = self.namespaces.backends().map(|backend| (backend, 0, 0)).collect();
                self.submit_all(qid, cid, Op::Flush, plan, flushes, context);
                Ok(())
            }
            Planned::Unmap => {
                let ranges = io::unmap_ranges(plan, &self.namespaces, &host_data)?;
                let ranges = ranges.map(|(lba, blocks)| (backend, lba, blocks)).collect();
                self.submit_all(qid, cid, Op::Unmap, plan, ranges, context);
                Ok(())
            }
            Planned::Compare => {
                let Some(mut buffer) = context.pool.take(host_data.len()) else {
                    self.deferred.push_back((qid, *sqe));
                    return Ok(());
                };
                buffer.as_mut_slice().copy_from_slice(&host_data);
                self.submit(request(Op::Compare), Some(buffer), context)
            }
        }
    }

    /// Whether a Copy can start its next piece.
    #[inline]
    pub(in super::super) fn has_ready_copies(&self) -> bool {
        !self.ready_copies.is_empty()
    }

    /// Whether a Copy can start its next piece or is deferred until a buffer is available.
    #[inline]
    pub(in super::super) fn has_unfinished_copies(&self) -> bool {
        !self.ready_copies.is_empty() || !self.deferred_copies.is_empty()
    }

    /// Starts the next step of each Copy that is ready or deferred.
    #[cold]
    pub(in super::super) fn advance_copies(&mut self, context: &mut FunctionContext<'_>) {
        let deferred = std::mem::take(&mut self.deferred_copies);
        for slot in deferred.into_iter().chain(std::mem::take(&mut self.ready_copies)) {
            self.advance_copy(slot, context);
        }
    }

    /// Aborts Copy commands without an outstanding device request.
    pub(super) fn abort_copies(&mut self) {
        let ready = std::mem::take(&mut self.ready_copies);
        for slot in ready.into_iter().chain(std::mem::take(&mut self.deferred_copies)) {
            let Some(command) = self.commands.remove(slot) else { continue };
            if let Some(queue) = self.sq(command.sqid) {
                queue.in_flight -= 1;
            }
        }
    }

    /// Starts the next step of a Copy: reads a piece, writes the piece that was read, or completes the command.
    fn advance_copy(&mut self, slot: Slot, context: &mut FunctionContext<'_>) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let PendingWork::CopyInProgress { copying, has_read, buffer } = &mut command.work else { return };
        let (op, range) =
            (if *has_read { Op::Write } else { Op::Read }, u64::from(copying.first_incomplete_range()));
        let queue = self.sqs.get(usize::from(command.sqid)).and_then(Option::as_ref);
        if queue.is_none_or(|queue| queue.state != SubmissionQueueState::Active) {
            return self.finish_copy(slot, Status::ABORTED_SQ_DELETION, range);
        }
        let Some(piece) = copying.current_piece() else { return self.finish_copy(slot, Status::SUCCESS, 0) };
        if let Err(status) = copying.check_access(&self.namespaces) {
            return self.finish_copy(slot, status, range);
        }
        // One buffer is used for all pieces, so a Copy that has started never waits for another.
        let Some(mut buffer) = buffer.take().or_else(|| context.pool.take(copying.piece_bytes_max())) else {
            return self.deferred_copies.push(slot);
        };
        buffer.resize(copying.piece_bytes(&piece));
        let lba = if op == Op::Write { piece.to } else { piece.from };
        let mut request = Request::new(tag(context.tag_base, slot), op, lba, piece.blocks);
        request.flow = context.flow;
        request.set_data(Some(buffer));
        if op == Op::Write {
            request.flags = copying.flags();
        }
        if let Err(status) = context.devices.submit(copying.backend, request) {
            self.finish_copy(slot, status, range);
        }
    }

    fn finish_copy(&mut self, slot: Slot, status: Status, result: u64) {
        if let Some(command) = self.commands.remove(slot) {
            self.complete_command(command.sqid, command.cid, status, result);
        }
    }

    /// A reservation command: executed by the target, without a device request.
    fn reservation_command(
        &mut self,
        qid: u16,
        sqe: &Sqe,
        plan: &IoPlan,
        host_data: &[u8],
    ) -> Result<(), Status> {
        match self.namespaces.execute_reservation(plan, host_data) {
            ReservationOutcome::Done(status) => self.complete_command(qid, sqe.cid, status, 0),
            ReservationOutcome::Report(report) => {
                data::parse_data_pointer(
                    &self.memory,
                    sqe.data,
                    is_sgl(sqe),
                    report.len() as u32,
                    &mut self.segments,
                )?;
                data::scatter(&self.memory, &self.segments, &report)?;
                self.complete_command(qid, sqe.cid, Status::SUCCESS, 0);
            }
            ReservationOutcome::Pending(pending) => {
                self.pending_reservations.push((qid, sqe.cid), pending);
                self.complete_pending_reservations();
            }
        }
        Ok(())
    }

    /// Submits the only request of a command that completes with the request's status. It needs no slot: the
    /// queue cannot be reused before, so the queue identifier and CID in the tag suffice.
    #[inline(always)]
    fn submit(
        &mut self,
        request: CommandRequest<'_>,
        buffer: Option<Buffer>,
        context: &mut FunctionContext<'_>,
    ) -> Result<(), Status> {
        let tag = slotless_tag(context.tag_base, request.qid, request.cid);
        context.devices.submit(request.backend, request.request(tag, buffer, context.flow))?;
        self.direct_in_flight += 1;
        Ok(())
    }

    /// Hands over one request of a command with something to do afterwards.
    fn submit_with_slot(
        &mut self,
        request: CommandRequest<'_>,
        work: PendingWork,
        buffer: Buffer,
        context: &mut FunctionContext<'_>,
    ) -> Result<(), Status> {
        let Ok(slot) = self.commands.insert(PendingCommand { cid: request.cid, sqid: request.qid, work })
        else {
            return Err(Status::COMMAND_INTERRUPTED);
        };
        let tag = tag(context.tag_base, slot);
        let submitted =
            context.devices.submit(request.backend, request.request(tag, Some(buffer), context.flow));
        if submitted.is_err() {
            self.commands.remove(slot);
        }
        submitted
    }

    /// Submits one request for each (backend, first LBA, number of blocks).
    fn submit_all(
        &mut self,
        qid: u16,
        cid: u16,
        op: Op,
        plan: &IoPlan,
        ranges: Vec<(u32, u64, u32)>,
        context: &mut FunctionContext<'_>,
    ) {
        let work = PendingWork::Submitted { remaining: ranges.len() as u32, status: Status::SUCCESS };
        let slot = match self.commands.insert(PendingCommand { cid, sqid: qid, work }) {
            Ok(slot) if !ranges.is_empty() => slot,
            Ok(slot) => {
                self.commands.remove(slot);
                return self.complete_command(qid, cid, Status::SUCCESS, 0);
            }
            Err(_) => return self.complete_command(qid, cid, Status::COMMAND_INTERRUPTED, 0),
        };
        let tag = tag(context.tag_base, slot);
        for (backend, lba, blocks) in ranges {
            let mut request = Request::new(tag, op, lba, blocks);
            (request.flow, request.flags) = (context.flow, plan.flags);
            if let Err(status) = context.devices.submit(backend, request) {
                // Handled as a device completion with this status.
                self.complete(Request::new(tag, op, lba, blocks).complete(status));
            }
        }
    }

    /// Retries deferred commands, oldest first, until one is deferred again.
    pub(in super::super) fn retry_deferred(&mut self, context: &mut FunctionContext<'_>) {
        self.retry_deferred_pairs(context);
        let mut remaining = self.deferred.len();
        while remaining > 0
            && let Some((qid, sqe)) = self.deferred.pop_front()
        {
            let before = self.deferred.len();
            // It was fetched before any first fused command that is pending now.
            self.io_unfused(qid, &sqe, context);
            if self.deferred.len() > before {
                // The one that was deferred again is the oldest.
                self.deferred.rotate_right(1);
                return;
            }
            remaining -= 1;
        }
    }

    /// Whether a completion belongs to a command without a slot, identified by its tag alone.
    #[inline]
    pub(in super::super) fn is_slotless(completion: &bdev::Completion) -> bool {
        completion.tag().0 & TAG_WITHOUT_SLOT != 0
    }

    /// Completes the commands without a slot among these completions; ignores the others.
    #[inline]
    pub(in super::super) fn complete_slotless(&mut self, all: &[bdev::Completion]) {
        // One run per queue.
        for run in all.chunk_by(|one, next| (one.tag().0 ^ next.tag().0) >> 16 == 0) {
            if Self::is_slotless(&run[0]) {
                self.complete_run((run[0].tag().0 >> 16) as u16, run);
            }
        }
    }

    #[inline]
    fn complete_run(&mut self, qid: u16, run: &[bdev::Completion]) {
        self.direct_in_flight -= run.len() as u32;
        if let Some(Some(queue)) = self.sqs.get_mut(usize::from(qid))
            && queue.state == SubmissionQueueState::Active
            && self.faults.drop_completions == 0
            && let Some(Some(completions)) = self.cqs.get_mut(usize::from(queue.cqid))
        {
            let was_dirty = completions.dirty;
            queue.in_flight -= run.len() as u32;
            for completion in run {
                let status = completion.status();
                queue.errors += u64::from(!status.is_success());
                let high = cqe_high(queue.head as u16, qid, completion.tag().0 as u16, status);
                self.has_blocked_completions |= !completions.post(0, high);
            }
            if completions.dirty && !was_dirty {
                self.dirty_cqids.push(queue.cqid);
            }
            return;
        }
        for completion in run {
            self.complete_command(qid, completion.tag().0 as u16, completion.status(), 0);
        }
    }

    /// Handles the completion of a device request.
    pub(in super::super) fn complete(&mut self, completion: bdev::Completion) {
        let tag = completion.tag().0;
        if tag & TAG_WITHOUT_SLOT != 0 {
            return self.complete_slotless(std::slice::from_ref(&completion));
        }
        let Some(slot) = self.commands.slot_at(tag as u32) else { return };
        if generation(slot) != tag >> 32 & GENERATION_MASK {
            return;
        }
        let mut status = completion.status();
        let Some(command) = self.commands.get_mut(slot) else { return };
        if let PendingWork::Submitted { remaining, status: first_error } = &mut command.work {
            if first_error.is_success() {
                *first_error = status;
            }
            *remaining -= 1;
            if *remaining > 0 {
                return;
            }
            status = *first_error;
        }
        if let PendingWork::CopyInProgress { copying, has_read, buffer } = &mut command.work {
            if !status.is_success() {
                let range = copying.first_incomplete_range().into();
                return self.finish_copy(slot, status, range);
            }
            if *has_read {
                copying.complete_piece();
            }
            *has_read = !*has_read;
            *buffer = crate::command::into_buffer(completion);
            let sqid = command.sqid;
            if self.sq(sqid).is_some_and(|queue| queue.state == SubmissionQueueState::Closed) {
                // The queue is closed: abort the rest of the Copy.
                return self.finish_copy(slot, Status::ABORTED_SQ_DELETION, 0);
            }
            self.ready_copies.push(slot);
            return;
        }
        let Some(PendingCommand { cid, sqid, work }) = self.commands.remove(slot) else { return };
        match work {
            PendingWork::CopyToClient(segments) if status.is_success() => {
                let buffer = crate::command::into_buffer(completion);
                let copied = buffer.map(|buffer| data::scatter(&self.memory, &segments, buffer.as_slice()));
                // The client may have unmapped the memory meanwhile.
                status = copied.map_or(Status::INTERNAL_ERROR, |copied| copied.err().unwrap_or(status));
            }
            _ => drop(completion),
        }
        self.complete_command(sqid, cid, status, 0);
    }

    /// Completes a command. A completion queue entry must be reserved for it.
    #[inline]
    pub(super) fn complete_command(&mut self, qid: u16, cid: u16, status: Status, result: u64) {
        let Some(Some(queue)) = self.sqs.get_mut(usize::from(qid)) else { return };
        queue.in_flight -= 1;
        queue.errors += u64::from(!status.is_success());
        let high = cqe_high(queue.head as u16, qid, cid, status);
        let cqid = queue.cqid;
        if queue.state == SubmissionQueueState::Active {
            return self.post(cqid, result, high);
        }
        self.complete_on_inactive_queue(qid, cqid, result, high);
    }

    /// Completes a command of a queue that is being deleted or is closed.
    #[cold]
    fn complete_on_inactive_queue(&mut self, qid: u16, cqid: u16, result: u64, high: u64) {
        let Some(queue) = self.sq(qid) else { return };
        let (state, in_flight) = (queue.state, queue.in_flight);
        if state != SubmissionQueueState::Closed {
            self.post(cqid, result, high);
        }
        if state != SubmissionQueueState::Active && in_flight == 0 {
            self.sqs[usize::from(qid)] = None;
            if let SubmissionQueueState::Deleting(cid) = state {
                self.complete_command(0, cid, Status::SUCCESS, 0);
            }
        }
    }

    #[inline]
    fn post(&mut self, cqid: u16, result: u64, high: u64) {
        let Some(Some(completions)) = self.cqs.get_mut(usize::from(cqid)) else { return };
        if self.faults.drop_completions > 0 {
            self.faults.drop_completions -= 1;
            return completions.release(1);
        }
        let was_dirty = completions.dirty;
        if !completions.post(result, high) {
            self.has_blocked_completions = true;
        } else if !was_dirty {
            self.dirty_cqids.push(cqid);
        }
    }
}

/// Bit of a tag that holds a queue identifier and CID instead of a slot.
const TAG_WITHOUT_SLOT: u64 = 1 << 47;
/// Bits of a slot's generation that fit in a tag.
const GENERATION_MASK: u64 = 0x7fff;

#[inline(always)]
pub(super) fn slotless_tag(base: u64, qid: u16, cid: u16) -> Tag {
    Tag(base | TAG_WITHOUT_SLOT | u64::from(qid) << 16 | u64::from(cid))
}

#[inline]
pub(super) fn is_sgl(sqe: &Sqe) -> bool {
    sqe.flags & 0xc0 != 0
}

#[inline]
fn generation(slot: Slot) -> u64 {
    slot.to_bits() >> 32 & GENERATION_MASK
}

#[inline]
fn tag(base: u64, slot: Slot) -> Tag {
    Tag(base | generation(slot) << 32 | u64::from(slot.index()))
}
