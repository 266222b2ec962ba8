//! The channel: requests become operations of the core's queue.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bdev::{Completion, Request, uring};
use block_io::{Channel, Errno, Op, Payload, RequestFlags, Status};
use dma::Data;
use rbd::{ImageCompletion, ImageOperation, ImageQueue};
use reactor::{Core, Period, PollResult, Poller, Shutdown};
use slots::{Slab, Slot};

use crate::image::{DEPTH, ImageState};

pub(crate) struct RbdChannel {
    core: Core,
    /// `None` only in `drop`.
    queue: Option<ImageQueue>,
    state: Arc<ImageState>,
    block_size: u32,
    /// Without their data, which the queue has.
    active: Slab<Request>,
    /// Requests that were not started.
    rejected: Vec<Completion>,
    /// Scratch; empty between calls.
    done: Vec<ImageCompletion>,
}

impl RbdChannel {
    pub(crate) fn new(core: &Core, queue: ImageQueue, state: Arc<ImageState>, block_size: u32) -> RbdChannel {
        RbdChannel {
            core: core.clone(),
            queue: Some(queue),
            state,
            block_size,
            active: Slab::with_capacity(DEPTH),
            rejected: Vec::new(),
            done: Vec::new(),
        }
    }

    fn start(&mut self, mut request: Request) {
        let Some(operation) = operation(request.op, request.flags) else {
            return self.rejected.push(request.complete(Status::INVALID_OPCODE.do_not_retry()));
        };
        let (mut offset, mut bytes) = (0, 0);
        if request.op.has_range() {
            // Another client may have made the image smaller since the layer has checked the range.
            let blocks = self.state.blocks.load(Ordering::Relaxed);
            let end = request.lba.checked_add(request.blocks.into());
            if end.is_none_or(|end| end > blocks) {
                return self.rejected.push(request.complete(Status::LBA_OUT_OF_RANGE.do_not_retry()));
            }
            offset = request.lba * u64::from(self.block_size);
            bytes = u64::from(request.blocks) * u64::from(self.block_size);
        }
        let Some(queue) = &mut self.queue else { return };
        let data: Option<Data> = request.take_data();
        let Ok(slot) = self.active.insert(request) else {
            unreachable!("the layer admits no more than {DEPTH} requests")
        };
        let Err(data) = queue.start(operation, offset, bytes, data, slot.to_bits()) else { return };
        if let Some(mut request) = self.active.remove(slot) {
            request.payload = Payload::from_data(data);
            self.rejected.push(request.complete(Status::COMMAND_INTERRUPTED));
        }
    }
}

/// What a request asks of the library; `None` if it has nothing for it.
fn operation(op: Op, flags: RequestFlags) -> Option<ImageOperation> {
    let is_durable = flags.contains(RequestFlags::FUA);
    match op {
        Op::Read => Some(ImageOperation::Read),
        Op::Write if is_durable => Some(ImageOperation::WriteDurable),
        Op::Write => Some(ImageOperation::Write),
        Op::Flush => Some(ImageOperation::Flush),
        // A discard may keep what is smaller than its granularity, but reads have to return zeroes.
        Op::Unmap => Some(ImageOperation::WriteZeroes { allocates: false, is_durable: false }),
        Op::WriteZeroes => {
            let allocates = flags.contains(RequestFlags::ALLOCATE);
            Some(ImageOperation::WriteZeroes { allocates, is_durable })
        }
        _ => None,
    }
}

/// The status of an operation on `bytes` bytes.
fn status(op: Op, bytes: u64, result: i64) -> Status {
    match result {
        // The image has become smaller: the library reads up to its end.
        0.. if op == Op::Read && result as u64 != bytes => Status::LBA_OUT_OF_RANGE,
        0.. => Status::SUCCESS,
        _ => uring::status_of(op, Errno(i32::try_from(-result).unwrap_or(i32::MAX))),
    }
}

impl Channel for RbdChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        let free = DEPTH as usize - self.active.len();
        for request in batch.drain(..free.min(batch.len())) {
            self.start(request);
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        sink.append(&mut self.rejected);
        if let Some(queue) = &mut self.queue {
            queue.reap(&mut self.done);
        }
        for ended in self.done.drain(..) {
            let Some(mut request) = self.active.remove(Slot::from_bits(ended.tag)) else { continue };
            let bytes = u64::from(request.blocks) * u64::from(self.block_size);
            let status = status(request.op, bytes, ended.result);
            if ended.data.is_some() {
                request.payload = Payload::from_data(ended.data);
            }
            sink.push(request.complete(status));
        }
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        let has_ended = self.queue.as_ref().is_some_and(ImageQueue::has_ended);
        (has_ended || !self.rejected.is_empty()).then_some(0)
    }
}

impl Drop for RbdChannel {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.take().filter(|queue| queue.in_flight() > 0) {
            self.core.add_poller(Box::new(QueueDrain { queue, done: Vec::new() }), Period::EveryTurn);
        }
    }
}

/// Keeps a dropped channel's queue until its operations have ended.
struct QueueDrain {
    queue: ImageQueue,
    done: Vec<ImageCompletion>,
}

impl Poller for QueueDrain {
    fn name(&self) -> &str {
        "rbd bdev drain"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        self.queue.reap(&mut self.done);
        self.done.clear();
        if self.queue.in_flight() > 0 { PollResult::Idle } else { PollResult::Finished }
    }

    fn deadline(&self) -> Option<u64> {
        self.queue.has_ended().then_some(0)
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        if self.queue.in_flight() == 0 { Shutdown::Done } else { Shutdown::Draining }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_read_and_an_error_number_have_a_status() {
        assert_eq!(status(Op::Read, 4096, 4096), Status::SUCCESS);
        assert_eq!(status(Op::Read, 4096, 512), Status::LBA_OUT_OF_RANGE);
        assert_eq!(status(Op::Write, 4096, 0), Status::SUCCESS);
        assert!(status(Op::Write, 4096, -28).same_code(Status::CAPACITY_EXCEEDED));
        assert!(!status(Op::Write, 4096, -108).is_success(), "ESHUTDOWN: the client is on the blocklist");
        assert!(!status(Op::Write, 4096, i64::MIN + 1).is_success());
    }

    #[test]
    fn flags_choose_the_operation() {
        assert_eq!(operation(Op::Write, RequestFlags::FUA), Some(ImageOperation::WriteDurable));
        let allocate = operation(Op::WriteZeroes, RequestFlags::ALLOCATE);
        assert_eq!(allocate, Some(ImageOperation::WriteZeroes { allocates: true, is_durable: false }));
        let unmap = Some(ImageOperation::WriteZeroes { allocates: false, is_durable: false });
        assert_eq!(operation(Op::Unmap, RequestFlags::NONE), unmap);
        assert_eq!(operation(Op::Reset, RequestFlags::NONE), None);
    }
}
