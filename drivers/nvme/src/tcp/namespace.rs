//! A namespace over TCP on one core, with an association of its own.

use block_io::{Channel, Completion, Request};
use dma::Data;
use reactor::Core;

use super::association::TcpAssociation;
use super::io_queue::TcpIoQueue;
use crate::error::{ControllerFailure, NvmeOpenError};
use crate::options::Options;
use crate::stats::QueueStats;
use crate::uri::TcpUri;

/// A namespace over TCP with an association and one I/O queue of its own, both on one core.
pub(crate) struct TcpNamespace {
    // Fields drop in order: the I/O connection closes before the admin connection.
    io: TcpIoQueue,
    association: TcpAssociation,
}

impl TcpNamespace {
    /// Connects to the controller and opens the namespace on the core that will use it.
    pub(crate) async fn open(
        core: &Core,
        uri: &TcpUri,
        options: &Options,
    ) -> Result<TcpNamespace, NvmeOpenError> {
        let mut association = TcpAssociation::open(core, uri, options, 1).await?;
        let identify = association.identify_namespace(uri.nsid).await?;
        let io = TcpIoQueue::open(core, association.handle(), uri.nsid, &identify).await?;
        Ok(TcpNamespace { io, association })
    }

    /// Logical block size in bytes.
    pub(crate) fn block_size(&self) -> u32 {
        self.io.block_size()
    }

    /// Number of logical blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.io.blocks()
    }

    /// Most bytes of one request.
    pub(crate) fn transfer_max_bytes(&self) -> u32 {
        self.io.transfer_max_bytes()
    }

    /// Counters of the I/O queue.
    pub(crate) fn stats(&self) -> QueueStats {
        self.io.stats()
    }

    /// Why the controller can no longer be used, if it has failed.
    pub(crate) fn failure(&self) -> Option<ControllerFailure> {
        self.io.failure().or_else(|| self.association.failure())
    }
}

impl Channel for TcpNamespace {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        self.io.submit(batch);
    }

    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        // An association ends with its admin queue: the controller processes no more I/O (Base 2.0, section 3.6.1).
        if let Some(failure) = self.association.failure() {
            self.io.fail(failure);
        }
        self.io.poll(sink)
    }

    fn deadline(&self) -> Option<u64> {
        self.io.deadline()
    }
}
