//! The requests of a queue, sans-IO.

use std::collections::VecDeque;

use block_io::{Op, Payload, Tag};
use dma::{Data, Pool};
use wire_ublk::{IoDescriptor, IoRequest};

use crate::limits::QUEUE_BYTES_MAX;
use crate::plan::{EIO, Plan, Step, plan};
use crate::shape::DiskShape;

/// What a queue wants to be done.
#[derive(Debug)]
pub(crate) enum QueueAction {
    /// Send a command to the driver; [`DiskQueue::on_command`] is called with its result.
    Command { tag: u16, request: IoRequest, result: i32 },
    /// Read the data of a write from the kernel; [`DiskQueue::on_copied`] is called with the bytes.
    CopyIn { tag: u16, bytes: u32, data: Data },
    /// Write the data of a read to the kernel; likewise.
    CopyOut { tag: u16, bytes: u32, data: Data },
    /// Send a request to the device; [`DiskQueue::on_completed`] is called.
    Submit(bdev::Request),
}

/// The requests of one queue of a disk: which of them the kernel, the device or a copy has.
///
/// Order: [`start`](Self::start) once, which fetches; then a call for each action that was done, in any order. Every
/// request that is fetched is committed once, which fetches the next one of its tag. A command that fails ends its tag:
/// the disk stops. When all tags have [ended](Self::has_ended), nothing is in flight any more. A tag has at most one
/// action outstanding. It costs no allocation but the buffers of requests, which wait in the order of their arrival while
/// there are none.
pub(crate) struct DiskQueue {
    shape: DiskShape,
    tags: Box<[TagState]>,
    /// Tags that wait for a buffer.
    waiting: VecDeque<u16>,
    buffered_bytes: usize,
    ended: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TagState {
    /// The driver has a command: there is no request.
    Fetching,
    /// It waits for a buffer.
    Waiting(Plan),
    /// Its data is read from the kernel.
    CopyIn(Plan),
    /// The device has it.
    Device(Plan),
    /// Its data is written to the kernel.
    CopyOut(Plan),
    /// The driver sends no more requests.
    Ended,
}

impl DiskQueue {
    pub(crate) fn new(depth: u16, shape: DiskShape) -> DiskQueue {
        DiskQueue {
            shape,
            tags: (0..depth).map(|_| TagState::Fetching).collect(),
            waiting: VecDeque::with_capacity(depth.into()),
            buffered_bytes: 0,
            ended: 0,
        }
    }

    /// Fetches a request for each tag.
    pub(crate) fn start(&mut self, actions: &mut Vec<QueueAction>) {
        let fetch = |tag| QueueAction::Command { tag, request: IoRequest::Fetch, result: 0 };
        actions.extend((0..self.tags.len() as u16).map(fetch));
    }

    /// All tags have ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended == self.tags.len()
    }

    /// Requests wait for buffers.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Bytes of the buffers in use.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn buffered_bytes(&self) -> usize {
        self.buffered_bytes
    }

    /// A command has completed: there is the request of `descriptor`, or the tag ends.
    pub(crate) fn on_command(
        &mut self,
        tag: u16,
        result: i32,
        descriptor: impl FnOnce() -> IoDescriptor,
        pool: &Pool,
        actions: &mut Vec<QueueAction>,
    ) {
        assert_eq!(self.tags[tag as usize], TagState::Fetching, "tag {tag} has no command");
        if result != 0 {
            self.tags[tag as usize] = TagState::Ended;
            self.ended += 1;
            return;
        }
        match plan(&self.shape, &descriptor()) {
            Step::Complete(result) => self.commit(tag, result, actions),
            Step::Submit(plan) if plan.bytes == 0 => self.submit(tag, plan, Payload::None, actions),
            Step::Submit(plan) => {
                self.tags[tag as usize] = TagState::Waiting(plan);
                self.waiting.push_back(tag);
                if self.waiting.len() == 1 {
                    self.resume(pool, actions);
                }
            }
        }
    }

    /// Data was copied from or to the kernel: `result` bytes, or an errno negated.
    pub(crate) fn on_copied(
        &mut self,
        tag: u16,
        result: i32,
        data: Option<Data>,
        actions: &mut Vec<QueueAction>,
    ) {
        match (self.tags[tag as usize], data) {
            (TagState::CopyIn(plan), Some(data)) if result == plan.bytes as i32 => {
                self.submit(tag, plan, Payload::Data(data), actions);
            }
            (TagState::CopyIn(plan) | TagState::CopyOut(plan), _) => {
                let is_complete = result == plan.bytes as i32;
                self.release(plan);
                self.commit(tag, if is_complete { result } else { -EIO }, actions);
            }
            (state, _) => panic!("tag {tag} was copied, but is {state:?}"),
        }
    }

    /// The device has completed a request.
    pub(crate) fn on_completed(&mut self, completion: bdev::Completion, actions: &mut Vec<QueueAction>) {
        let (tag, status) = (completion.tag().0 as u16, completion.status());
        let TagState::Device(plan) = self.tags[tag as usize] else {
            panic!("tag {tag} was completed, but is {:?}", self.tags[tag as usize])
        };
        if status.is_success() && plan.op == Op::Read {
            let data = completion.into_data().unwrap_or_else(|| panic!("the read of tag {tag} has no data"));
            self.tags[tag as usize] = TagState::CopyOut(plan);
            actions.push(QueueAction::CopyOut { tag, bytes: plan.bytes, data });
            return;
        }
        drop(completion);
        self.release(plan);
        let result = if status.is_success() { plan.bytes as i32 } else { -status.to_errno().0 };
        self.commit(tag, result, actions);
    }

    /// Continues requests that wait for buffers.
    pub(crate) fn resume(&mut self, pool: &Pool, actions: &mut Vec<QueueAction>) {
        while let Some(tag) = self.waiting.front().copied() {
            let TagState::Waiting(plan) = self.tags[tag as usize] else {
                panic!("tag {tag} waits, but is {:?}", self.tags[tag as usize])
            };
            let bytes = plan.bytes as usize;
            // A request that is larger than all that is allowed would wait for ever: the first is admitted.
            if self.buffered_bytes > 0 && self.buffered_bytes + bytes > QUEUE_BYTES_MAX {
                return;
            }
            let Some(mut buffer) = pool.take(bytes) else { return };
            self.waiting.pop_front();
            self.buffered_bytes += bytes;
            if plan.op == Op::Write {
                self.tags[tag as usize] = TagState::CopyIn(plan);
                actions.push(QueueAction::CopyIn { tag, bytes: plan.bytes, data: buffer.into() });
                continue;
            }
            if self.shape.reads_undefined {
                buffer.clear();
            }
            self.submit(tag, plan, Payload::Data(buffer.into()), actions);
        }
    }

    fn submit(&mut self, tag: u16, plan: Plan, payload: Payload<Data>, actions: &mut Vec<QueueAction>) {
        self.tags[tag as usize] = TagState::Device(plan);
        let mut request =
            bdev::Request::with_payload(Tag(tag.into()), plan.op, plan.lba, plan.blocks, payload);
        request.flags = plan.flags;
        actions.push(QueueAction::Submit(request));
    }

    fn release(&mut self, plan: Plan) {
        self.buffered_bytes -= plan.bytes as usize;
    }

    fn commit(&mut self, tag: u16, result: i32, actions: &mut Vec<QueueAction>) {
        self.tags[tag as usize] = TagState::Fetching;
        actions.push(QueueAction::Command { tag, request: IoRequest::CommitAndFetch, result });
    }
}

#[cfg(test)]
mod tests;
