//! A queue on its core: the driver's character device and the block device.

use std::collections::VecDeque;
use std::sync::Arc;

use bdev::{BdevChannel, Descriptor, Flow};
use block_io::Channel;
use dma::{Data, Pool};
use os::{
    EventClient, EventCompletion, FileId, FileOperation, RejectedOperation, UblkCommand, UblkDataPath,
    UblkQueueFile, WriteMode,
};
use reactor::Core;
use target_shell::Responder;

use crate::failure::{UblkError, kernel};
use crate::limits::QUEUE_DEPTH_MAX;
use crate::queue::{DiskQueue, QueueAction};
use crate::shape::DiskShape;

/// Bit of a tag in events: the driver has copied the data of a read of the tag.
const COPIED_OUT: u16 = 1 << 15;
const _: () = assert!(QUEUE_DEPTH_MAX < COPIED_OUT as u32);

/// A queue to serve.
pub(crate) struct QueueStart {
    /// Number of the disk.
    pub(crate) disk: u32,
    /// Index of the queue.
    pub(crate) index: u16,
    pub(crate) depth: u16,
    pub(crate) shape: DiskShape,
    /// How data gets from and to the kernel.
    pub(crate) path: UblkDataPath,
    /// The driver registers the pages of requests, and the device takes them.
    pub(crate) uses_pages: bool,
    /// The character device of the disk, with the descriptors of the queue's requests.
    pub(crate) file: UblkQueueFile,
    pub(crate) descriptor: Arc<Descriptor>,
    /// Of the disk's tenant.
    pub(crate) flow: Flow,
}

/// What a queue is lent for a call.
pub(crate) struct QueueContext<'a> {
    pub(crate) client: &'a EventClient,
    pub(crate) pool: &'a Pool,
    /// Empty between calls.
    pub(crate) actions: &'a mut Vec<QueueAction>,
    /// Empty between calls.
    pub(crate) completions: &'a mut Vec<bdev::Completion>,
}

/// A queue of a disk on the core that serves it.
///
/// It owns the channel to the block device and the queue's file, and executes the actions
/// of a [`DiskQueue`]. Order: [`start`](Self::start), then [`on_event`](Self::on_event) for each completion of the event
/// loop and [`drive`](Self::drive) in each poll with work, until it [has ended](Self::has_ended); then
/// [`close`](Self::close).
pub(crate) struct CoreQueue {
    pub(crate) disk: u32,
    pub(crate) index: u16,
    /// Tags of its events: this and the tag of the request.
    events_base: u64,
    requests: DiskQueue,
    flow: Flow,
    uses_pages: bool,
    depth: u16,
    file: FileId,
    channel: BdevChannel,
    batch: Vec<bdev::Request>,
    /// Actions that the event loop had no room for; at most one a tag.
    deferred: VecDeque<QueueAction>,
    /// In the group's list of queues with work.
    pub(crate) is_active: bool,
    /// Who waits for its end.
    pub(crate) end: Vec<Responder<()>>,
}

impl CoreQueue {
    /// # Errors
    /// The core has no io_uring, or the device cannot be opened on it.
    pub(crate) fn new(core: &Core, client: &EventClient, start: QueueStart) -> Result<CoreQueue, UblkError> {
        let QueueStart { disk, index, depth, shape, path, uses_pages, file, descriptor, flow } = start;
        let channel = descriptor.channel(core)?;
        let file = client.add_ublk_queue(file).map_err(kernel("the reactor's io_uring"))?;
        Ok(CoreQueue {
            disk,
            index,
            events_base: 0,
            requests: DiskQueue::new(depth, shape, path),
            flow,
            uses_pages,
            depth,
            file,
            channel,
            batch: Vec::with_capacity(depth.into()),
            deferred: VecDeque::with_capacity(depth.into()),
            is_active: false,
            end: Vec::new(),
        })
    }

    /// Number of tags.
    pub(crate) fn depth(&self) -> u32 {
        self.depth.into()
    }

    /// Fetches the first requests. Events of the queue have tags from `events_base` on.
    pub(crate) fn start(&mut self, events_base: u64, context: &mut QueueContext<'_>) {
        self.events_base = events_base;
        self.requests.start(context.actions);
        self.perform(context);
    }

    /// An operation on the character device has completed.
    #[inline]
    pub(crate) fn on_event(&mut self, event: EventCompletion, context: &mut QueueContext<'_>) {
        let tag = (event.tag - self.events_base) as u16;
        match event.data {
            Some(data) if tag & COPIED_OUT != 0 => self.requests.on_copied_out(data),
            data if data.is_some() && self.requests.path() == UblkDataPath::UserCopy => {
                self.requests.on_copied(tag, event.result, data, context.actions);
            }
            None if event.result == 0
                && self.uses_pages
                && let Some(pages) = context.client.ublk_pages(self.file, tag) =>
            {
                let descriptor = context.client.ublk_request(self.file, tag);
                self.requests.on_pages(tag, pages, &descriptor, context.pool, context.actions);
            }
            data => {
                let read = || context.client.ublk_request(self.file, tag);
                self.requests.on_command(tag, event.result, data, read, context.pool, context.actions);
            }
        }
        self.perform(context);
    }

    /// Sends requests to the device, and continues those that have completed. Returns their number.
    pub(crate) fn drive(&mut self, context: &mut QueueContext<'_>) -> usize {
        for _ in 0..self.deferred.len() {
            context.actions.extend(self.deferred.pop_front());
        }
        if self.requests.is_waiting() {
            self.requests.resume(context.pool, context.actions);
        }
        self.perform(context);
        if !self.batch.is_empty() {
            self.channel.submit(&mut self.batch);
        }
        let count = self.channel.poll(context.completions);
        for completion in context.completions.drain(..) {
            self.requests.on_completed(completion, context.actions);
        }
        if count > 0 && self.requests.is_waiting() {
            self.requests.resume(context.pool, context.actions);
        }
        self.perform(context);
        count
    }

    /// It has work that no event of the loop announces.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        !self.batch.is_empty() || self.channel.outstanding() > 0 || self.retries()
    }

    /// Time of the next [`drive`](Self::drive) that no event triggers; `retry_ns` is the next time for what waits for
    /// buffers or for room in the event loop.
    pub(crate) fn deadline(&self, retry_ns: u64) -> Option<u64> {
        if !self.batch.is_empty() {
            return Some(0);
        }
        let retry = self.retries().then_some(retry_ns);
        [self.channel.deadline(), retry].into_iter().flatten().min()
    }

    fn retries(&self) -> bool {
        !self.deferred.is_empty() || self.requests.is_waiting()
    }

    /// Nothing is in flight, and nothing will be.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        self.requests.has_ended()
    }

    /// Closes the character device, then answers those who wait for that.
    pub(crate) fn close(self, client: &EventClient) {
        client.remove_file(self.file);
        drop(self.channel);
        for responder in self.end {
            // Who has given up waiting gets no answer.
            _ = responder.answer(());
        }
    }

    /// Executes actions, or defers them.
    #[inline]
    fn perform(&mut self, context: &mut QueueContext<'_>) {
        for action in context.actions.drain(..) {
            let rejected = match action {
                QueueAction::Submit(mut request) => {
                    request.flow = self.flow.id();
                    self.batch.push(request);
                    continue;
                }
                QueueAction::Command { tag, request, result, data } => {
                    let event_tag = self.events_base + u64::from(tag);
                    let data_tag = event_tag | u64::from(COPIED_OUT);
                    let command = UblkCommand { request, tag, result };
                    let submitted = context.client.submit_ublk(self.file, command, data, event_tag, data_tag);
                    submitted.map_err(|rejected| QueueAction::Command {
                        tag,
                        request,
                        result,
                        data: rejected.data,
                    })
                }
                QueueAction::CopyIn { tag, bytes, data } => self
                    .copy(context.client, FileOperation::Read, tag, bytes, data)
                    .map_err(|data| QueueAction::CopyIn { tag, bytes, data }),
                QueueAction::CopyOut { tag, bytes, data } => self
                    .copy(context.client, FileOperation::Write(WriteMode::Cached), tag, bytes, data)
                    .map_err(|data| QueueAction::CopyOut { tag, bytes, data }),
            };
            self.deferred.extend(rejected.err());
        }
    }

    /// Copies the data of a request from or to the kernel. Gives it back if the event loop has no room.
    #[inline]
    fn copy(
        &self,
        client: &EventClient,
        operation: FileOperation,
        tag: u16,
        bytes: u32,
        data: Data,
    ) -> Result<(), Data> {
        let offset = wire_ublk::data_offset(self.index, tag, 0);
        let event_tag = self.events_base + u64::from(tag);
        let submitted =
            client.submit_operation(self.file, operation, offset, bytes.into(), Some((data, 0)), event_tag);
        submitted.map_err(|RejectedOperation { data, .. }| {
            data.unwrap_or_else(|| panic!("{operation:?} of tag {tag} has lost its data"))
        })
    }
}
