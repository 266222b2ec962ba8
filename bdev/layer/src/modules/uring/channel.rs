//! One core's ring to the file: requests become operations, short transfers go on, errors statuses.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memory::Buffer;
use reactor::{Period, Poller, Shutdown, Work};
use ring::{Errno, Status};
use slots::{Slab, Slot};
use sys::{Client, Done, FileId, Operation, Write};

use super::plan::{Step, fallback, plan, status_of};
use super::{DEPTH, Shared};
use crate::modules::bytes_of;
use crate::{Completion, Request};

/// How often an operation that was interrupted, or for which the kernel lacks memory, is tried.
const TRIES_MAX: u32 = 100;
/// Bytes of zeroes written at a time where the file cannot zero a range itself.
const ZEROES_BYTES: usize = 256 << 10;

const EINTR: i32 = 4;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;
const EOPNOTSUPP: i32 = 95;

pub(super) struct Channel {
    core: reactor::Core,
    /// `None` once the drop hands it on.
    client: Option<Client>,
    file: FileId,
    block_size: u32,
    shared: Arc<Shared>,
    jobs: Slab<Job>,
    /// Jobs that the core's ring had no room for, or that are tried again.
    stalled: VecDeque<Slot>,
    finished: Vec<Completion>,
    /// Empty between calls.
    done: Vec<Done>,
}

/// A request under way. Its buffer is with the kernel while an operation runs.
#[derive(Debug)]
struct Job {
    request: Request,
    step: Step,
    then: Option<Step>,
    /// Bytes of the step that are done.
    progress: u64,
    tries: u32,
    zeroes: Option<Buffer>,
}

impl Channel {
    pub(super) fn new(
        core: reactor::Core,
        client: Client,
        file: FileId,
        block_size: u32,
        shared: Arc<Shared>,
    ) -> Channel {
        Channel {
            core,
            client: Some(client),
            file,
            block_size,
            shared,
            jobs: Slab::with_capacity(DEPTH),
            stalled: VecDeque::new(),
            finished: Vec::new(),
            done: Vec::new(),
        }
    }

    fn take(&mut self, request: Request) {
        let Some(plan) = plan(request.op, request.flags) else {
            return self.finished.push(request.complete(Status::INVALID_OPCODE));
        };
        let mut step = plan.first;
        while self.known_to_fail(step) {
            step = fallback(step).expect("only what has a fallback is known to fail");
        }
        let job = Job { request, step, then: plan.then, progress: 0, tries: 0, zeroes: None };
        match self.jobs.insert(job) {
            Ok(slot) => self.start(slot),
            Err(_) => unreachable!("the layer admits no more than {DEPTH} requests"),
        }
    }

    fn known_to_fail(&self, step: Step) -> bool {
        match step {
            Step::Punch => self.shared.no_punch.load(Ordering::Relaxed),
            Step::Zero => self.shared.no_zero.load(Ordering::Relaxed),
            _ => false,
        }
    }

    /// Queues the rest of a job's step.
    fn start(&mut self, slot: Slot) {
        let Some(job) = self.jobs.get_mut(slot) else { unreachable!("{slot:?} is started and is no job") };
        let (start, total) = bytes_of(&job.request, self.block_size);
        let offset = start + job.progress;
        let mut left = total - job.progress;
        let mut buffer = None;
        let operation = match job.step {
            Step::Read => Operation::Read,
            Step::Write(how) => Operation::Write(how),
            Step::Sync if self.shared.flush_failed.load(Ordering::Relaxed) => {
                return self.finish(slot, Status::WRITE_FAULT);
            }
            Step::Sync => Operation::Sync,
            Step::Punch => Operation::Punch,
            Step::Zero => Operation::Zero,
            Step::WriteZeroes => {
                let zeroes = job.zeroes.take().or_else(|| zeroes(&self.core, total));
                let Some(zeroes) = zeroes else { return self.finish(slot, Status::COMMAND_INTERRUPTED) };
                left = left.min(zeroes.len() as u64);
                buffer = Some((zeroes, 0));
                Operation::Write(Write::Cached)
            }
        };
        match job.step {
            Step::Read | Step::Write(_) => {
                let progress = job.progress as usize;
                buffer = job.request.buffer.take().map(|buffer| (buffer, progress));
            }
            // The range of a sync is the file.
            Step::Sync => left = 0,
            Step::Punch | Step::Zero | Step::WriteZeroes => {}
        }
        let client = self.client.as_ref().expect("only a dropped channel has no client");
        let Err(refused) = client.operate(self.file, operation, offset, left, buffer, slot.to_bits()) else {
            return;
        };
        put_back(job, refused.buffer);
        if refused.why == std::io::ErrorKind::WouldBlock {
            self.stalled.push_back(slot);
        } else {
            self.finish(slot, Status::INTERNAL_ERROR);
        }
    }

    /// Takes the outcome of an operation in.
    fn step_done(&mut self, done: Done) {
        let slot = Slot::from_bits(done.tag);
        let Some(job) = self.jobs.get_mut(slot) else { unreachable!("{slot:?} is done and is no job") };
        put_back(job, done.buffer);
        if done.result < 0 {
            return self.step_failed(slot, Errno(-done.result));
        }
        if matches!(job.step, Step::Read | Step::Write(_) | Step::WriteZeroes) {
            if done.result == 0 {
                // The end of a file that is shorter than it was: an error, never zeroes.
                let status = status_of(job.request.op, Errno(EIO));
                return self.finish(slot, status);
            }
            job.progress += done.result as u64;
            if job.progress < bytes_of(&job.request, self.block_size).1 {
                return self.start(slot);
            }
        }
        match job.then.take() {
            Some(then) => {
                job.step = then;
                job.progress = 0;
                self.start(slot);
            }
            None => self.finish(slot, Status::SUCCESS),
        }
    }

    #[cold]
    fn step_failed(&mut self, slot: Slot, errno: Errno) {
        let Some(job) = self.jobs.get_mut(slot) else { unreachable!("{slot:?} failed and is no job") };
        if matches!(errno.0, EINTR | EAGAIN) && job.tries < TRIES_MAX {
            job.tries += 1;
            self.stalled.push_back(slot);
            return;
        }
        if errno.0 == EOPNOTSUPP
            && let Some(step) = fallback(job.step)
        {
            let known = if job.step == Step::Punch { &self.shared.no_punch } else { &self.shared.no_zero };
            known.store(true, Ordering::Relaxed);
            job.step = step;
            job.progress = 0;
            return self.start(slot);
        }
        let lost = match job.step {
            Step::Sync => true,
            // Other errors come before the data is in the cache, and lose nothing.
            Step::Write(Write::Durable) => errno.0 == EIO,
            _ => false,
        };
        if lost && !self.shared.direct {
            self.shared.flush_failed.store(true, Ordering::Relaxed);
        }
        let status = status_of(job.request.op, errno);
        self.finish(slot, status);
    }

    fn finish(&mut self, slot: Slot, status: Status) {
        let Some(job) = self.jobs.remove(slot) else { unreachable!("{slot:?} ends and is no job") };
        self.finished.push(job.request.complete(status));
    }
}

/// Gives an operation's buffer back to whom it belongs.
fn put_back(job: &mut Job, buffer: Option<Buffer>) {
    if job.step == Step::WriteZeroes {
        job.zeroes = buffer;
    } else if buffer.is_some() {
        job.request.buffer = buffer;
    }
}

fn zeroes(core: &reactor::Core, bytes: u64) -> Option<Buffer> {
    let mut buffer = core.pool().take(bytes.min(ZEROES_BYTES as u64) as usize)?;
    buffer.clear();
    Some(buffer)
}

impl ring::Channel for Channel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for request in batch.drain(..) {
            self.take(request);
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        for _ in 0..self.stalled.len() {
            let Some(slot) = self.stalled.pop_front() else { break };
            self.start(slot);
        }
        let mut done = std::mem::take(&mut self.done);
        if let Some(client) = &self.client {
            client.reap(&mut done);
        }
        for one in done.drain(..) {
            self.step_done(one);
        }
        self.done = done;
        sink.append(&mut self.finished);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        (!self.finished.is_empty() || !self.stalled.is_empty()).then_some(0)
    }
}

impl Drop for Channel {
    /// The file stays in the core's table until the kernel is done with it: its index must not name
    /// another file while operations that carry it are queued. Buffers are the core's ring's.
    fn drop(&mut self) {
        let Some(client) = self.client.take() else { return };
        let in_flight = self.jobs.len() - self.stalled.len();
        if in_flight == 0 {
            return client.remove_file(self.file);
        }
        let drain = Drain { client, file: self.file, in_flight, done: Vec::new() };
        self.core.add_poller(Box::new(drain), Period::EveryTurn);
    }
}

/// What is left of a channel that was dropped with operations in flight.
struct Drain {
    client: Client,
    file: FileId,
    in_flight: usize,
    done: Vec<Done>,
}

impl Poller for Drain {
    fn name(&self) -> &str {
        "uring bdev drain"
    }

    fn poll(&mut self, _now_ns: u64) -> Work {
        self.in_flight -= self.client.reap(&mut self.done);
        self.done.clear();
        if self.in_flight > 0 {
            return Work::None;
        }
        self.client.remove_file(self.file);
        Work::Finished
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        if self.in_flight == 0 { Shutdown::Done } else { Shutdown::Draining }
    }
}

#[cfg(test)]
mod tests;
