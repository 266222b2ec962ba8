//! What every attached controller offers, whatever its transport.

use std::pin::Pin;
use std::sync::Arc;

use reactor::Core;
use wire_nvme::Sqe;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::feature::AsyncEventConfiguration;
use wire_nvme::identify::{IdentifyController, IdentifyNamespace};
use wire_nvme::protection::MetadataFormat;

use crate::error::{AdminError, ControllerFailure, NvmeOpenError};
use crate::io_queue::IoQueue;
use crate::passthrough::PassthroughOutput;
use crate::shared::{AdminData, AdminOutput};

/// An answer that is waited for on the core.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// The result of opening something on a core, asynchronously.
pub type Opening<'a, T> = Answer<'a, Result<T, NvmeOpenError>>;

/// A controller that one core has attached, ready for I/O. Dropping it detaches the controller.
///
/// This is its control path, and costs an allocation a call. I/O goes through the queues that
/// [`io_queues`](Self::io_queues) opens. What has a default is what only one kind of transport does.
pub trait AttachedController {
    /// Whether its queues are connections. A fabrics controller is reset by attaching it again, and its user
    /// reads the log page of each event; for memory-based controllers the driver does both.
    fn is_fabrics(&self) -> bool;

    /// The Identify Controller data structure.
    fn identity(&self) -> &IdentifyController;

    /// Controller identifier (CNTLID).
    fn cntlid(&self) -> u16;

    /// Why the controller can no longer be used, if it has failed.
    fn failure(&self) -> Option<ControllerFailure>;

    /// Executes an admin command. The driver sets the command identifier and the data pointer; data is
    /// copied.
    fn admin(&mut self, sqe: Sqe, data: AdminData) -> Answer<'_, Result<AdminOutput, AdminError>>;

    /// Takes the oldest pending event.
    fn next_event(&mut self) -> Option<AsyncEvent>;

    /// Waits until an event or a failure may be pending.
    fn wait_event<'a>(&'a self, core: &'a Core) -> Answer<'a, ()>;

    /// What other cores open I/O queues with.
    fn io_queues(&self) -> Arc<dyn IoQueues>;

    /// Whether I/O queues of the namespace can be opened: the driver rejects formats that it does not
    /// support. Identifies a namespace that it knows again. By default each can; opening one may still fail.
    fn supports_namespace(&self, nsid: u32) -> Answer<'_, bool> {
        _ = nsid;
        Box::pin(std::future::ready(true))
    }

    /// Enables the asynchronous events in `mask` that the controller supports. By default they are enabled.
    fn enable_events(&mut self, mask: AsyncEventConfiguration) -> Answer<'_, Result<(), AdminError>> {
        _ = mask;
        Box::pin(std::future::ready(Ok(())))
    }

    /// Authenticates anew on the admin queue if the host has got other keys since the last time; I/O queues
    /// follow when they are polled. By default there is no authentication.
    ///
    /// # Errors
    /// The ends do not accept each other, or the controller does not answer. The controller has failed then.
    fn reauthenticate(&mut self) -> Answer<'_, Result<(), NvmeOpenError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Resets that the driver has made by itself or by [`reset`](Self::reset). By default it makes none.
    fn resets(&self) -> u64 {
        0
    }

    /// Resets the controller. `None`, as by default, if that means to attach it again.
    fn reset(&self) -> Answer<'_, Option<Result<(), ControllerFailure>>> {
        Box::pin(std::future::ready(None))
    }
}

/// Opens I/O queues of a controller on any core.
pub trait IoQueues: Send + Sync {
    /// Opens an I/O queue on `core` for the namespace `nsid`, whose Identify Namespace data is `identify`,
    /// and which has metadata of this format.
    fn open<'a>(
        &'a self,
        core: &'a Core,
        nsid: u32,
        identify: &'a IdentifyNamespace,
        metadata: &'a MetadataFormat,
    ) -> Opening<'a, Box<dyn IoQueue>>;

    /// Executes one I/O command on a temporary queue and waits at most `timeout_ns` for its completion.
    ///
    /// The driver sets command identifier, data pointer and metadata pointer only. The command must not
    /// transfer more than `data` and `metadata` hold, 1 MiB each at most. A fused command is rejected, and so
    /// is metadata over TCP.
    fn execute<'a>(
        &'a self,
        core: &'a Core,
        sqe: Sqe,
        data: &'a AdminData,
        metadata: &'a AdminData,
        timeout_ns: u64,
    ) -> Opening<'a, PassthroughOutput>;
}
