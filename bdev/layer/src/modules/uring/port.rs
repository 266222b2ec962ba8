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

    /// Ends the use of the file, once the operations in flight have ended.
    fn close(self, core: &Core, in_flight: usize);
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
    fn close(self, core: &Core, in_flight: usize) {
        if in_flight == 0 {
            return self.client.remove_file(self.file);
        }
        let drain = UringDrain { port: self, in_flight, done: Vec::new() };
        core.add_poller(Box::new(drain), Period::EveryTurn);
    }
}

/// Unregisters the file of a dropped channel once its operations have completed.
struct UringDrain {
    port: UringPort,
    in_flight: usize,
    done: Vec<EventCompletion>,
}

impl Poller for UringDrain {
    fn name(&self) -> &str {
        "uring bdev drain"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        self.in_flight -= self.port.client.reap(&mut self.done);
        self.done.clear();
        if self.in_flight > 0 {
            return PollResult::Idle;
        }
        self.port.client.remove_file(self.port.file);
        PollResult::Finished
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        if self.in_flight == 0 { Shutdown::Done } else { Shutdown::Draining }
    }
}
