//! A namespace of a controller with a memory-based transport.

use block_io::{Channel, Completion, Request, Status};
use dma::Data;
use reactor::Core;

use crate::controller::Controller;
use crate::error::{ControllerFailure, NvmeOpenError};
use crate::io_queue::IoQueue;
use crate::namespace_info::{NamespaceInfo, NamespaceLayout};
use crate::options::Options;
use crate::qpair::QueuePair;
use crate::stats::QueueStats;

/// A queue pair for the requests of one namespace.
pub(crate) struct MemoryNamespace {
    pair: QueuePair,
    layout: NamespaceLayout,
    info: NamespaceInfo,
    controller: Controller,
    /// The namespace is inactive, its block size has changed, or it is another one: every request fails.
    unavailable: bool,
    refused: Vec<Completion<Data>>,
}

impl MemoryNamespace {
    pub(crate) async fn open(
        controller: &Controller,
        core: &Core,
        nsid: u32,
        options: &Options,
    ) -> Result<MemoryNamespace, NvmeOpenError> {
        let info = controller.namespace(nsid).await?;
        let layout = info.layout()?;
        let pair = controller.qpair(core, options).await?;
        Ok(MemoryNamespace {
            pair,
            layout,
            info,
            controller: controller.clone(),
            unavailable: false,
            refused: Vec::new(),
        })
    }

    /// Properties of the namespace.
    pub(super) fn info(&self) -> &NamespaceInfo {
        &self.info
    }

    /// The queue pair, for typed commands and counters.
    pub(super) fn queue_pair(&mut self) -> &mut QueuePair {
        &mut self.pair
    }

    pub(super) fn controller(&self) -> &Controller {
        &self.controller
    }

    /// Applies a change of the namespace. Its capacity may change; a new block size makes it unavailable, because
    /// addresses that the user has computed are no longer valid, and so do other identifiers: the data is not
    /// the user's.
    #[cold]
    fn refresh_info(&mut self) {
        self.pair.take_change();
        let now = self.controller.handle().shared.namespace(self.info.nsid);
        match now.map(|info| (info.layout(), info)) {
            Some((Ok(layout), info))
                if info.block_size == self.info.block_size && info.has_identity_of(&self.info) =>
            {
                (self.layout, self.info, self.unavailable) = (layout, info, false);
            }
            _ => self.unavailable = true,
        }
    }
}

impl IoQueue for MemoryNamespace {
    fn block_size(&self) -> u32 {
        self.info.block_size
    }

    fn blocks(&self) -> u64 {
        self.info.blocks
    }

    fn transfer_max_bytes(&self) -> u32 {
        self.info.transfer_max_bytes
    }

    fn can_access(&mut self, data: &Data) -> bool {
        self.pair.can_access(data)
    }

    fn stats(&self) -> QueueStats {
        self.pair.stats()
    }

    fn failure(&self) -> Option<ControllerFailure> {
        self.pair.failure()
    }
}

impl Channel for MemoryNamespace {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        if self.unavailable {
            let status = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
            self.refused.extend(batch.drain(..).map(|request| request.complete(status)));
            return;
        }
        self.pair.submit(&self.layout, batch);
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        let count = self.pair.poll(sink);
        if self.pair.has_change() {
            self.refresh_info();
        }
        if self.refused.is_empty() {
            return count;
        }
        let refused = self.refused.len();
        sink.append(&mut self.refused);
        count + refused
    }

    fn deadline(&self) -> Option<u64> {
        if self.refused.is_empty() { self.pair.deadline() } else { Some(0) }
    }
}
