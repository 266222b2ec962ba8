//! A core's channel to the file: maps requests to file operations, which a [`FilePort`] carries, continues
//! short transfers, and maps errors to statuses.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use block_io::{Errno, Op, Payload, RequestFlags, Status};
use dma::Data;
use os::{EventCompletion, FileOperation, WriteMode};
use slots::{Slab, Slot};

use super::plan::{FileStep, fallback, plan, status_of};
use super::port::FilePort;
use super::seek::ChannelSeeks;
use super::{DEPTH, UringShared};
use crate::modules::bytes_of;
use crate::{Completion, Request};

/// Attempts of an operation that fails with EINTR or EAGAIN.
const TRIES_MAX: u32 = 100;
/// How long a request that the device has no resources for is deferred, unless another one ends before.
const DEFERRED_NS: u64 = 1_000_000;
/// Times that this passes before the request fails: half a minute without a single completion.
const DEFERRALS_MAX: u32 = 30_000;
/// Bytes of zeroes in one write, where the file cannot zero a range itself.
const ZEROES_BYTES: usize = 256 << 10;

const EINTR: i32 = 4;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;
const EOPNOTSUPP: i32 = 95;

pub(super) struct FileIoChannel<P: FilePort> {
    core: reactor::Core,
    /// `None` only in `drop`.
    port: Option<P>,
    block_size: u32,
    shared: Arc<UringShared>,
    active: Slab<FileRequest>,
    /// Requests to be submitted again: the port was full, or the operation is retried.
    retry_queue: VecDeque<Slot>,
    /// Requests for which the device had no resources, in order. They are retried when another completes, or
    /// at `deferred_until_ns`.
    deferred: VecDeque<Slot>,
    deferred_until_ns: u64,
    finished: Vec<Completion>,
    /// Since the first seek.
    seeks: Option<Box<ChannelSeeks>>,
    /// Scratch of `poll`; empty between calls.
    done: Vec<EventCompletion>,
}

/// A request in progress. Its data is with the kernel while an operation is in flight.
#[derive(Debug)]
struct FileRequest {
    request: Request,
    step: FileStep,
    then: Option<FileStep>,
    /// Bytes of the current step that are complete.
    progress: u64,
    tries: u32,
    /// The step writes data of the channel: zeroes, or a copy of an atomic write's slices in one.
    writes_own: bool,
    /// That data, while no operation has it.
    own: Option<Data>,
}

impl<P: FilePort> FileIoChannel<P> {
    pub(super) fn new(
        core: reactor::Core,
        port: P,
        block_size: u32,
        shared: Arc<UringShared>,
    ) -> FileIoChannel<P> {
        FileIoChannel {
            core,
            port: Some(port),
            block_size,
            shared,
            active: Slab::with_capacity(DEPTH),
            retry_queue: VecDeque::new(),
            deferred: VecDeque::new(),
            deferred_until_ns: 0,
            finished: Vec::new(),
            seeks: None,
            done: Vec::new(),
        }
    }

    fn accept(&mut self, request: Request) {
        // Where the device promises nothing, the flag asks for nothing.
        let ignored =
            if self.shared.atomic_blocks_max > 0 { RequestFlags::NONE } else { RequestFlags::ATOMIC };
        let Some(plan) = plan(request.op, request.flags - ignored) else {
            return self.accept_uncommon(request);
        };
        let mut step = plan.first;
        while self.is_unsupported(step) {
            step = fallback(step).expect("an unsupported step has a fallback");
        }
        let mut active = FileRequest {
            request,
            step,
            then: plan.then,
            progress: 0,
            tries: 0,
            writes_own: step == FileStep::WriteZeroes,
            own: None,
        };
        if is_atomic(step)
            && let Some(status) = self.join_slices(&mut active)
        {
            return self.finished.push(active.request.complete(status));
        }
        match self.active.insert(active) {
            Ok(slot) => self.start(slot),
            Err(_) => unreachable!("the layer admits no more than {DEPTH} requests"),
        }
    }

    /// Copies an atomic write of several slices to one, as the kernel wants it. Returns the error if it is too long, or if
    /// there is no memory.
    #[cold]
    fn join_slices(&self, active: &mut FileRequest) -> Option<Status> {
        if active.request.blocks > self.shared.atomic_blocks_max {
            return Some(Status::INVALID_FIELD.do_not_retry());
        }
        let Some(data @ Data::Many(_)) = active.request.data() else { return None };
        let Some(buffer) = self.core.pool().take(data.len()) else {
            return Some(Status::COMMAND_INTERRUPTED);
        };
        let mut joined = Data::from(buffer);
        let mut offset = 0;
        for part in data.parts(0, data.len()) {
            joined.copy_from(offset, part);
            offset += part.len();
        }
        (active.writes_own, active.own) = (true, Some(joined));
        None
    }

    /// Accepts a request that is no operation of a port.
    #[cold]
    fn accept_uncommon(&mut self, request: Request) {
        let done = if matches!(request.op, Op::SeekData | Op::SeekHole) {
            let seeks = self.seeks.get_or_insert_with(|| Box::new(ChannelSeeks::new(&self.core)));
            seeks.start(request, self.block_size, &self.shared.worker)
        } else {
            Some(request.complete(Status::INVALID_OPCODE))
        };
        self.finished.extend(done);
    }

    fn is_unsupported(&self, step: FileStep) -> bool {
        match step {
            FileStep::Punch => self.shared.no_punch.load(Ordering::Relaxed),
            FileStep::Zero => self.shared.no_zero.load(Ordering::Relaxed),
            _ => false,
        }
    }

    /// Submits the remainder of a request's current step.
    fn start(&mut self, slot: Slot) {
        let Some(active) = self.active.get_mut(slot) else {
            unreachable!("started {slot:?} is not in the table")
        };
        let (start, total) = bytes_of(&active.request, self.block_size);
        let offset = start + active.progress;
        let mut left = total - active.progress;
        let mut data = None;
        let operation = match active.step {
            FileStep::Read => FileOperation::Read,
            FileStep::Write(how) => FileOperation::Write(how),
            FileStep::Sync if self.shared.flush_failed.load(Ordering::Relaxed) => {
                return self.finish(slot, Status::WRITE_FAULT);
            }
            FileStep::Sync => FileOperation::Sync,
            FileStep::Punch => FileOperation::Punch,
            FileStep::Zero => FileOperation::Zero,
            FileStep::WriteZeroes => {
                let zeroes = active.own.take().or_else(|| zeroes(&self.core, total));
                let Some(zeroes) = zeroes else { return self.finish(slot, Status::COMMAND_INTERRUPTED) };
                left = left.min(zeroes.len() as u64);
                data = Some((zeroes, 0));
                FileOperation::Write(WriteMode::Cached)
            }
        };
        match active.step {
            FileStep::Read | FileStep::Write(_) => {
                let progress = active.progress as usize;
                let whole = if active.writes_own { active.own.take() } else { active.request.take_data() };
                data = whole.map(|data| (data, progress));
            }
            // A sync covers the whole file.
            FileStep::Sync => left = 0,
            FileStep::Punch | FileStep::Zero | FileStep::WriteZeroes => {}
        }
        let port = self.port.as_mut().expect("only a dropped channel has no port");
        let submitted = match active.request.payload {
            Payload::Registered(pages) if !active.writes_own => {
                let start = active.progress as u32;
                port.start_registered(operation, offset, left, (pages, start), slot.to_bits())
            }
            _ => port.start(operation, offset, left, data, slot.to_bits()),
        };
        let Err(refused) = submitted else { return };
        return_data(active, refused.data);
        if refused.reason == std::io::ErrorKind::WouldBlock {
            self.retry_queue.push_back(slot);
        } else {
            self.finish(slot, Status::INTERNAL_ERROR);
        }
    }

    /// Handles the completion of an operation.
    fn step_done(&mut self, done: EventCompletion) {
        let slot = Slot::from_bits(done.tag);
        let Some(active) = self.active.get_mut(slot) else {
            unreachable!("completed {slot:?} is not in the table")
        };
        return_data(active, done.data);
        if done.result < 0 {
            return self.step_failed(slot, Errno(-done.result));
        }
        if matches!(active.step, FileStep::Read | FileStep::Write(_) | FileStep::WriteZeroes) {
            if done.result == 0 {
                // The end of a file that was truncated: an error, never zeroes.
                let status = status_of(active.request.op, Errno(EIO));
                return self.finish(slot, status);
            }
            active.progress += done.result as u64;
            if active.progress < bytes_of(&active.request, self.block_size).1 {
                // A part of an atomic write is none; the kernel promises all.
                let is_refused = is_atomic(active.step);
                return if is_refused { self.finish(slot, Status::WRITE_FAULT) } else { self.start(slot) };
            }
        }
        match active.then.take() {
            Some(then) => {
                active.step = then;
                active.progress = 0;
                self.start(slot);
            }
            None => self.finish(slot, Status::SUCCESS),
        }
    }

    #[cold]
    fn step_failed(&mut self, slot: Slot, errno: Errno) {
        let Some(active) = self.active.get_mut(slot) else {
            unreachable!("failed {slot:?} is not in the table")
        };
        if errno.0 == EAGAIN
            && active.tries < DEFERRALS_MAX
            && self.port.as_ref().is_some_and(FilePort::defers)
        {
            if self.deferred.is_empty() {
                self.deferred_until_ns = self.core.now_ns() + DEFERRED_NS;
            }
            return self.deferred.push_back(slot);
        }
        if matches!(errno.0, EINTR | EAGAIN) && active.tries < TRIES_MAX {
            active.tries += 1;
            self.retry_queue.push_back(slot);
            return;
        }
        if errno.0 == EOPNOTSUPP
            && let Some(step) = fallback(active.step)
        {
            let unsupported =
                if active.step == FileStep::Punch { &self.shared.no_punch } else { &self.shared.no_zero };
            unsupported.store(true, Ordering::Relaxed);
            active.step = step;
            active.writes_own = step == FileStep::WriteZeroes;
            active.progress = 0;
            return self.start(slot);
        }
        let data_lost = match active.step {
            FileStep::Sync => true,
            // Other errors occur before the data is in the page cache, and lose nothing.
            FileStep::Write(WriteMode::Durable | WriteMode::AtomicDurable) => errno.0 == EIO,
            _ => false,
        };
        if data_lost && !self.shared.direct {
            self.shared.flush_failed.store(true, Ordering::Relaxed);
        }
        let status = status_of(active.request.op, errno);
        self.finish(slot, status);
    }

    /// Retries deferred requests when others have ended, which free what these lack, or when the time has
    /// come.
    fn retry_deferred(&mut self, have_others_ended: bool) {
        if self.deferred.is_empty() {
            return;
        }
        if !have_others_ended {
            if self.core.now_ns() < self.deferred_until_ns {
                return;
            }
            for slot in &self.deferred {
                if let Some(active) = self.active.get_mut(*slot) {
                    active.tries += 1;
                }
            }
        }
        self.retry_queue.append(&mut self.deferred);
    }

    /// Passes to the kernel what was started.
    #[inline]
    fn submit_started(&mut self) {
        if let Some(port) = &mut self.port {
            port.submit();
        }
    }

    fn finish(&mut self, slot: Slot, status: Status) {
        let Some(active) = self.active.remove(slot) else {
            unreachable!("finished {slot:?} is not in the table")
        };
        self.finished.push(active.request.complete(status));
    }
}

const fn is_atomic(step: FileStep) -> bool {
    matches!(step, FileStep::Write(WriteMode::Atomic | WriteMode::AtomicDurable))
}

/// Returns the data of an operation to the request, or to the channel.
fn return_data(active: &mut FileRequest, data: Option<Data>) {
    if active.writes_own {
        active.own = data;
    } else if data.is_some() {
        active.request.set_data(data);
    }
}

fn zeroes(core: &reactor::Core, bytes: u64) -> Option<Data> {
    let mut buffer = core.pool().take(bytes.min(ZEROES_BYTES as u64) as usize)?;
    buffer.clear();
    Some(buffer.into())
}

impl<P: FilePort> block_io::Channel for FileIoChannel<P> {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for request in batch.drain(..) {
            self.accept(request);
        }
        self.submit_started();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        self.retry_deferred(false);
        for _ in 0..self.retry_queue.len() {
            let Some(slot) = self.retry_queue.pop_front() else { break };
            self.start(slot);
        }
        let mut done = std::mem::take(&mut self.done);
        if let Some(port) = &mut self.port {
            port.submit();
            port.reap(&mut done);
        }
        for one in done.drain(..) {
            self.step_done(one);
        }
        self.done = done;
        if let Some(seeks) = &mut self.seeks {
            seeks.poll(sink);
        }
        self.retry_deferred(!self.finished.is_empty());
        self.submit_started();
        sink.append(&mut self.finished);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        let have_seeks_ended = self.seeks.as_ref().is_some_and(|seeks| seeks.have_ended());
        let must_poll = self.port.as_ref().is_some_and(FilePort::must_poll);
        if !self.finished.is_empty() || !self.retry_queue.is_empty() || have_seeks_ended || must_poll {
            return Some(0);
        }
        (!self.deferred.is_empty()).then_some(self.deferred_until_ns)
    }
}

impl<P: FilePort> Drop for FileIoChannel<P> {
    fn drop(&mut self) {
        if let Some(port) = self.port.take() {
            port.close(&self.core, self.active.len() - self.retry_queue.len() - self.deferred.len());
        }
    }
}

#[cfg(test)]
mod tests;
