//! The requests of a queue, sans-IO.

use std::collections::VecDeque;

use block_io::{Op, Payload, RegisteredPages, Tag};
use dma::{Data, Pool};
use os::UblkDataPath;
use wire_ublk::{IoDescriptor, IoRequest, NEED_GET_DATA, SECTOR_BYTES};

use crate::limits::{IO_BYTES_MAX, QUEUE_BYTES_MAX};
use crate::plan::{EINVAL, EIO, Plan, Step, plan};
use crate::shape::DiskShape;

/// What a queue wants to be done.
#[derive(Debug)]
pub(crate) enum QueueAction {
    /// Send a command to the driver; [`DiskQueue::on_command`] is called with its result. The data is that of a read that
    /// is committed, for which [`DiskQueue::on_copied_out`] is called, or memory for that of a write, which comes with the
    /// result; with [`UblkDataPath::GetData`] only.
    Command { tag: u16, request: IoRequest, result: i32, data: Option<Data> },
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
/// action outstanding, and a read that was committed with its data, whose memory the driver may still use, besides. It
/// costs no allocation but the buffers of requests, which wait in the order of their arrival while there are none.
///
/// With [`UblkDataPath::UserCopy`], data is copied by operations of ours. With [`UblkDataPath::GetData`] the driver copies:
/// that of a write to memory that it is given when the request is known, that of a read when it is committed.
pub(crate) struct DiskQueue {
    path: UblkDataPath,
    shape: DiskShape,
    tags: Box<[TagState]>,
    /// Tags that wait for a buffer.
    waiting: VecDeque<u16>,
    buffered_bytes: usize,
    /// Reads that were committed, and whose data the driver may still copy.
    copying_out: usize,
    ended: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TagState {
    /// The driver has a command: there is no request.
    Fetching,
    /// It waits for a buffer.
    Waiting(Plan),
    /// It is a write that the driver has not copied, and waits for a buffer of so many bytes.
    WaitingForData(u32),
    /// The driver copies the data of a write to a buffer of so many bytes.
    GetData(u32),
    /// Its data is read from the kernel.
    CopyIn(Plan),
    /// The device has it.
    Device(Plan),
    /// The device has it, with the kernel's own pages.
    Pages(Plan),
    /// Its data is written to the kernel.
    CopyOut(Plan),
    /// The driver sends no more requests.
    Ended,
}

impl DiskQueue {
    pub(crate) fn new(depth: u16, shape: DiskShape, path: UblkDataPath) -> DiskQueue {
        DiskQueue {
            path,
            shape,
            tags: (0..depth).map(|_| TagState::Fetching).collect(),
            waiting: VecDeque::with_capacity(depth.into()),
            buffered_bytes: 0,
            copying_out: 0,
            ended: 0,
        }
    }

    /// Fetches a request for each tag.
    pub(crate) fn start(&mut self, actions: &mut Vec<QueueAction>) {
        let fetch = |tag| command(tag, IoRequest::Fetch, 0, None);
        actions.extend((0..self.tags.len() as u16).map(fetch));
    }

    /// All tags have ended, and the driver uses no buffer.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended == self.tags.len() && self.copying_out == 0
    }

    /// How data gets from and to the kernel.
    pub(crate) fn path(&self) -> UblkDataPath {
        self.path
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

    /// As [`on_command`](Self::on_command) without an error, for a request whose pages the driver has registered.
    pub(crate) fn on_pages(
        &mut self,
        tag: u16,
        pages: RegisteredPages,
        descriptor: &IoDescriptor,
        pool: &Pool,
        actions: &mut Vec<QueueAction>,
    ) {
        assert_eq!(self.tags[tag as usize], TagState::Fetching, "tag {tag} has no command");
        match plan(&self.shape, descriptor) {
            Step::Submit(plan) if plan.bytes > 0 && plan.bytes == pages.bytes => {
                self.submit(tag, plan, Payload::Registered(pages), actions);
                self.tags[tag as usize] = TagState::Pages(plan);
            }
            step => self.execute(tag, step, pool, actions),
        }
    }

    /// A command has completed: there is the request of `descriptor`, or the tag ends. `data` is the memory of
    /// [`IoRequest::NeedGetData`].
    pub(crate) fn on_command(
        &mut self,
        tag: u16,
        result: i32,
        data: Option<Data>,
        descriptor: impl FnOnce() -> IoDescriptor,
        pool: &Pool,
        actions: &mut Vec<QueueAction>,
    ) {
        match (self.tags[tag as usize], data) {
            (TagState::Fetching, None) if result == 0 => {
                self.execute(tag, plan(&self.shape, &descriptor()), pool, actions);
            }
            (TagState::GetData(bytes), Some(data)) if result == 0 => {
                let step = plan(&self.shape, &descriptor());
                if let Step::Submit(plan) = step
                    && plan.op == Op::Write
                    && plan.bytes <= bytes
                {
                    self.submit_copied(tag, plan, data, actions);
                    return;
                }
                self.buffered_bytes -= bytes as usize;
                drop(data);
                self.execute(tag, step, pool, actions);
            }
            (TagState::Fetching | TagState::GetData(_), data) => {
                if let (TagState::GetData(bytes), Some(_)) = (self.tags[tag as usize], &data) {
                    self.buffered_bytes -= bytes as usize;
                }
                drop(data);
                if result == NEED_GET_DATA && self.path == UblkDataPath::GetData {
                    self.get_data(tag, &descriptor(), pool, actions);
                } else {
                    self.tags[tag as usize] = TagState::Ended;
                    self.ended += 1;
                }
            }
            (state, _) => panic!("tag {tag} has no command, but is {state:?}"),
        }
    }

    /// Executes a request of which the driver has, or needs, no data.
    fn execute(&mut self, tag: u16, step: Step, pool: &Pool, actions: &mut Vec<QueueAction>) {
        match step {
            Step::Complete(result) => self.commit(tag, result, actions),
            Step::Submit(plan) if plan.bytes == 0 => self.submit(tag, plan, Payload::None, actions),
            // A driver with addresses asks for a buffer before it delivers a write.
            Step::Submit(plan) if plan.op == Op::Write && self.path == UblkDataPath::GetData => {
                self.commit(tag, -EIO, actions);
            }
            Step::Submit(plan) => self.wait(tag, TagState::Waiting(plan), pool, actions),
        }
    }

    /// Gets the data of a write. It is refused afterwards if need be: the driver accepts nothing else before.
    fn get_data(&mut self, tag: u16, descriptor: &IoDescriptor, pool: &Pool, actions: &mut Vec<QueueAction>) {
        let sectors = descriptor.sectors;
        if sectors == 0 || sectors > IO_BYTES_MAX / SECTOR_BYTES as u32 {
            // The parameters of the device exclude it.
            return self.commit(tag, -EINVAL, actions);
        }
        self.wait(tag, TagState::WaitingForData(sectors * SECTOR_BYTES as u32), pool, actions);
    }

    fn wait(&mut self, tag: u16, state: TagState, pool: &Pool, actions: &mut Vec<QueueAction>) {
        self.tags[tag as usize] = state;
        self.waiting.push_back(tag);
        if self.waiting.len() == 1 {
            self.resume(pool, actions);
        }
    }

    /// Sends a write to the device whose data the driver has copied, all of it or, short of memory, the first part.
    fn submit_copied(&mut self, tag: u16, plan: Plan, mut data: Data, actions: &mut Vec<QueueAction>) {
        let more = data.len() - plan.bytes as usize;
        if more > 0 {
            drop(data.split_off(plan.bytes as usize));
            self.buffered_bytes -= more;
        }
        self.submit(tag, plan, Payload::Data(data), actions);
    }

    /// The driver has copied the data of a read that was committed.
    pub(crate) fn on_copied_out(&mut self, data: Data) {
        self.copying_out -= 1;
        self.buffered_bytes -= data.len();
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
        let plan = match self.tags[tag as usize] {
            TagState::Device(plan) => plan,
            TagState::Pages(plan) => {
                let result = if status.is_success() { plan.bytes as i32 } else { -status.to_errno().0 };
                return self.commit(tag, result, actions);
            }
            state => panic!("tag {tag} was completed, but is {state:?}"),
        };
        if status.is_success() && plan.op == Op::Read {
            let data = completion.into_data().unwrap_or_else(|| panic!("the read of tag {tag} has no data"));
            match self.path {
                UblkDataPath::UserCopy => {
                    self.tags[tag as usize] = TagState::CopyOut(plan);
                    actions.push(QueueAction::CopyOut { tag, bytes: plan.bytes, data });
                }
                UblkDataPath::GetData => {
                    self.tags[tag as usize] = TagState::Fetching;
                    self.copying_out += 1;
                    actions.push(command(tag, IoRequest::CommitAndFetch, plan.bytes as i32, Some(data)));
                }
            }
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
            let state = self.tags[tag as usize];
            let bytes = match state {
                TagState::Waiting(plan) => plan.bytes,
                TagState::WaitingForData(bytes) => bytes,
                _ => panic!("tag {tag} waits, but is {state:?}"),
            } as usize;
            // A request that is larger than all that is allowed would wait for ever: the first is admitted.
            if self.buffered_bytes > 0 && self.buffered_bytes + bytes > QUEUE_BYTES_MAX {
                return;
            }
            let Some(mut buffer) = pool.take(bytes) else { return };
            self.waiting.pop_front();
            self.buffered_bytes += bytes;
            match state {
                TagState::Waiting(plan) if plan.op == Op::Write => {
                    self.tags[tag as usize] = TagState::CopyIn(plan);
                    actions.push(QueueAction::CopyIn { tag, bytes: plan.bytes, data: buffer.into() });
                }
                TagState::Waiting(plan) => {
                    if self.shape.reads_undefined {
                        buffer.clear();
                    }
                    self.submit(tag, plan, Payload::Data(buffer.into()), actions);
                }
                _ => {
                    self.tags[tag as usize] = TagState::GetData(bytes as u32);
                    actions.push(command(tag, IoRequest::NeedGetData, 0, Some(buffer.into())));
                }
            }
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
        actions.push(command(tag, IoRequest::CommitAndFetch, result, None));
    }
}

fn command(tag: u16, request: IoRequest, result: i32, data: Option<Data>) -> QueueAction {
    QueueAction::Command { tag, request, result, data }
}

#[cfg(test)]
mod tests;
