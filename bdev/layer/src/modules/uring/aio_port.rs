//! A context of Linux AIO, for which a core needs no io_uring.
//!
//! Reads, writes and flushes are the context's; ranges are deallocated and zeroed by the
//! [thread](super::worker) of the device, because `fallocate` waits for the disk.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use block_io::RegisteredPages;
use dma::Data;
use os::{AioFile, EventClient, EventCompletion, FileOperation, Interest, RejectedOperation};
use reactor::{Core, MailboxReceiver, MailboxSender};

use super::UringShared;
use super::port::FilePort;
use super::worker::{AllocationJob, AllocationResult, FileJob};

/// Requests in flight on one channel. `fs.aio-max-nr` (65,536 by default) is enough for 512 channels of this
/// depth.
pub(super) const AIO_DEPTH: u32 = 128;

pub(super) struct AioPort {
    /// Dropped first: it watches the context's event.
    client: EventClient,
    context: AioFile,
    nowait: bool,
    shared: Arc<UringShared>,
    sender: MailboxSender<AllocationResult>,
    receiver: MailboxReceiver<AllocationResult>,
    /// Scratch; empty between calls.
    woken: Vec<EventCompletion>,
}

impl AioPort {
    /// # Errors
    /// Those of [`AioFile::new`], and of watching its event.
    pub(super) fn new(
        core: &Core,
        file: OwnedFd,
        nowait: bool,
        shared: Arc<UringShared>,
    ) -> io::Result<AioPort> {
        let mut context = AioFile::new(file, AIO_DEPTH)?;
        context.set_nowait(nowait);
        let client = core.event_loop().client();
        client.watch(context.event(), Interest::READABLE, 0)?;
        let (sender, receiver) = core.mailbox(AIO_DEPTH as usize);
        Ok(AioPort { client, context, nowait, shared, sender, receiver, woken: Vec::new() })
    }
}

impl FilePort for AioPort {
    fn start(
        &mut self,
        operation: FileOperation,
        offset: u64,
        bytes: u64,
        data: Option<(Data, usize)>,
        tag: u64,
    ) -> Result<(), RejectedOperation> {
        if !matches!(operation, FileOperation::Punch | FileOperation::Zero) {
            return self.context.start(operation, offset, bytes, data, tag);
        }
        let rejected = |reason| RejectedOperation { reason, data: None };
        let Some(file) = self.shared.worker.file() else { return Err(rejected(io::ErrorKind::NotFound)) };
        let reply = self.sender.clone();
        let job = AllocationJob { file, operation, offset, bytes, tag, reply };
        match self.shared.worker.send(FileJob::Allocate(job)) {
            true => Ok(()),
            false => Err(rejected(io::ErrorKind::OutOfMemory)),
        }
    }

    /// Pages of the kernel are registered with an io_uring, and the device does not offer to take them.
    fn start_registered(
        &mut self,
        _: FileOperation,
        _: u64,
        _: u64,
        _: (RegisteredPages, u32),
        _: u64,
    ) -> Result<(), RejectedOperation> {
        Err(RejectedOperation { reason: io::ErrorKind::Unsupported, data: None })
    }

    fn submit(&mut self) {
        self.context.submit();
    }

    fn reap(&mut self, done: &mut Vec<EventCompletion>) {
        // The event only wakes the core; what has ended is in the context.
        self.client.reap(&mut self.woken);
        self.woken.clear();
        self.context.reap(done);
        while let Some((tag, result)) = self.receiver.receive() {
            done.push(EventCompletion { tag, result, data: None });
        }
    }

    fn must_poll(&self) -> bool {
        self.context.must_poll() || !self.receiver.is_empty()
    }

    fn defers(&self) -> bool {
        self.nowait
    }
}
