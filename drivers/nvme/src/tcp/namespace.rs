//! A namespace over TCP on one core, with an association of its own.

use block_io::{Channel, Completion, Request};
use dma::Data;
use reactor::Core;

use super::association::TcpAssociation;
use super::io_queue::TcpIoQueue;
use crate::error::{ControllerFailure, NvmeOpenError};
use crate::io_queue::IoQueue;
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
}

impl IoQueue for TcpNamespace {
    fn block_size(&self) -> u32 {
        self.io.block_size()
    }

    fn blocks(&self) -> u64 {
        self.io.blocks()
    }

    fn transfer_max_bytes(&self) -> u32 {
        self.io.transfer_max_bytes()
    }

    fn stats(&self) -> QueueStats {
        self.io.stats()
    }

    fn failure(&self) -> Option<ControllerFailure> {
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
