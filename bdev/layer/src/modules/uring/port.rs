//! What carries a channel's file operations to the kernel: the core's io_uring, or a context of AIO.

use block_io::RegisteredPages;
use dma::Data;
use os::{EventClient, EventCompletion, FileId, FileOperation, RejectedOperation};
use reactor::{Core, Period, PollResult, Poller, Shutdown};

/// A way to the kernel for the operations of one file.
pub(super) trait FilePort: Sized + 'static {
    /// Starts an operation, as [`EventClient::submit_operation`] does.
    fn start(
        &mut self,
        operation: FileOperation,
        offset: u64,
        bytes: u64,
        data: Option<(Data, usize)>,
        tag: u64,
    ) -> Result<(), RejectedOperation>;

    /// Starts an operation on pages of the kernel, as [`EventClient::submit_registered`] does.
    fn start_registered(
        &mut self,
        operation: FileOperation,
        offset: u64,
        bytes: u64,
        pages: (RegisteredPages, u32),
        tag: u64,
    ) -> Result<(), RejectedOperation>;

    /// Passes what was started to the kernel, where the core's event loop does not.
    fn submit(&mut self) {}

    /// Appends the operations that have ended.
    fn reap(&mut self, done: &mut Vec<EventCompletion>);

    /// Whether operations may end without waking the core.
    fn must_poll(&self) -> bool {
        false
    }

    /// Whether `EAGAIN` means that the device has no resources now, which others that complete free.
    fn defers(&self) -> bool {
        false
    }

    /// Gives the file up, of which no operation is in flight.
    fn end(&mut self) {}

    /// Ends the use of the file, once the operations in flight have ended.
    fn close(mut self, core: &Core, in_flight: usize) {
        if in_flight == 0 {
            return self.end();
        }
        core.add_poller(Box::new(PortDrain { port: self, in_flight, done: Vec::new() }), Period::EveryTurn);
    }
}

/// Ends the use of a dropped channel's file once its operations have completed.
struct PortDrain<P> {
    port: P,
    in_flight: usize,
    done: Vec<EventCompletion>,
}

impl<P: FilePort> Poller for PortDrain<P> {
    fn name(&self) -> &str {
        "file bdev drain"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        self.port.submit();
        self.port.reap(&mut self.done);
        self.in_flight -= self.done.len();
        self.done.clear();
        if self.in_flight > 0 {
            return PollResult::Idle;
        }
        self.port.end();
        PollResult::Finished
    }

    fn deadline(&self) -> Option<u64> {
        self.port.must_poll().then_some(0)
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        if self.in_flight == 0 { Shutdown::Done } else { Shutdown::Draining }
    }
}

/// The core's io_uring.
pub(super) struct UringPort {
    client: EventClient,
    file: FileId,
}

impl UringPort {
    pub(super) fn new(client: EventClient, file: FileId) -> UringPort {
        UringPort { client, file }
    }
}

impl FilePort for UringPort {
    fn start(
        &mut self,
        operation: FileOperation,
        offset: u64,
        bytes: u64,
        data: Option<(Data, usize)>,
        tag: u64,
    ) -> Result<(), RejectedOperation> {
        self.client.submit_operation(self.file, operation, offset, bytes, data, tag)
    }

    fn start_registered(
        &mut self,
        operation: FileOperation,
        offset: u64,
        bytes: u64,
        pages: (RegisteredPages, u32),
        tag: u64,
    ) -> Result<(), RejectedOperation> {
        self.client.submit_registered(self.file, operation, offset, bytes, pages, tag)
    }

    fn reap(&mut self, done: &mut Vec<EventCompletion>) {
        self.client.reap(done);
    }

    /// The file stays registered with the core's ring until the kernel has completed all operations: its
    /// index must not be reused while queued operations refer to it. The ring owns the buffers.
    fn end(&mut self) {
        self.client.remove_file(self.file);
    }
}
