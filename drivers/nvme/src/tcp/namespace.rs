//! A namespace over TCP as a channel of one core, with an association of its own.

use memory::Buffer;
use reactor::Core;
use ring::{Channel, Completion, Request};

use super::association::Association;
use super::io_queue::IoQueue;
use crate::error::{Failure, OpenError};
use crate::options::Options;
use crate::stats::QueueStats;
use crate::uri::TcpUri;

/// A namespace, open on one core with a queue pair of its own.
pub(crate) struct TcpNamespace {
    // Fields drop in order: the I/O queue's connection ends before the admin queue's.
    io: IoQueue,
    association: Association,
}

impl TcpNamespace {
    /// Connects to the controller and opens the namespace, on the core that will use it.
    pub(crate) async fn open(
        core: &Core,
        uri: &TcpUri,
        options: &Options,
    ) -> Result<TcpNamespace, OpenError> {
        let mut association = Association::open(core, uri, options, 1).await?;
        let identify = association.identify_namespace(uri.nsid).await?;
        let io = IoQueue::open(core, association.membership(), uri.nsid, &identify).await?;
        Ok(TcpNamespace { io, association })
    }

    /// Bytes of a logical block.
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

    /// What its I/O queue counted.
    pub(crate) fn stats(&self) -> QueueStats {
        self.io.stats()
    }

    /// Why the namespace can no longer be reached, if so.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.io.failure().or_else(|| self.association.failure())
    }
}

impl Channel for TcpNamespace {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        self.io.submit(batch);
    }

    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        // A controller that lost its admin queue answers nothing any more (Base 2.0, section 3.6.1).
        if let Some(failure) = self.association.failure() {
            self.io.fail(failure);
        }
        self.io.poll(sink)
    }

    fn deadline(&self) -> Option<u64> {
        self.io.deadline()
    }
}
