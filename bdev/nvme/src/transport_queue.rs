//! The I/O queue of a link to a path, whatever its transport.

use bdev::{Completion, Request};
use nvme::{ControllerFailure, Namespace, NvmeOpenError, QueueStats, TcpIoQueue};
use sockets::CoreNetwork;

/// The result of opening a queue.
pub(crate) type OpenedQueue = Result<Box<dyn TransportQueue>, NvmeOpenError>;

/// An I/O queue to one namespace through one path. A channel calls it through the vtable, once a batch.
pub(crate) trait TransportQueue:
    block_io::Channel<Request = Request, Completion = Completion>
{
    /// Counters of the queue.
    fn stats(&self) -> QueueStats;

    /// Why the queue can no longer be used, if it has failed.
    fn failure(&self) -> Option<ControllerFailure>;

    /// Ends the commands in flight if the transport can: memory-based ones wait for the driver's reset or detach.
    fn detach(&mut self) {}
}

impl<N: CoreNetwork> TransportQueue for TcpIoQueue<N> {
    fn stats(&self) -> QueueStats {
        TcpIoQueue::stats(self)
    }

    fn failure(&self) -> Option<ControllerFailure> {
        TcpIoQueue::failure(self)
    }

    fn detach(&mut self) {
        self.fail(ControllerFailure::Detached);
    }
}

impl TransportQueue for Namespace {
    fn stats(&self) -> QueueStats {
        Namespace::stats(self)
    }

    fn failure(&self) -> Option<ControllerFailure> {
        Namespace::failure(self)
    }
}
