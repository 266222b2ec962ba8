//! A namespace of a controller in memory.

use memory::Buffer;
use reactor::Core;
use ring::{Channel, Completion, Request, Status};

use crate::controller::Controller;
use crate::error::{Failure, OpenError};
use crate::namespace_info::{Layout, NamespaceInfo};
use crate::options::Options;
use crate::qpair::QueuePair;
use crate::stats::QueueStats;

/// A queue pair whose requests go to one namespace.
pub(crate) struct Direct {
    pair: QueuePair,
    layout: Layout,
    info: NamespaceInfo,
    controller: Controller,
    /// The namespace is gone, or is not what it was any more.
    lost: bool,
    refused: Vec<Completion<Buffer>>,
}

impl Direct {
    pub(crate) async fn open(
        controller: &Controller,
        core: &Core,
        nsid: u32,
        options: &Options,
    ) -> Result<Direct, OpenError> {
        let info = controller.namespace(nsid).await?;
        let layout = info.layout()?;
        let pair = controller.qpair(core, options).await?;
        Ok(Direct { pair, layout, info, controller: controller.clone(), lost: false, refused: Vec::new() })
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.info.block_size
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.info.blocks
    }

    pub(crate) fn transfer_max_bytes(&self) -> u32 {
        self.info.transfer_max_bytes
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.pair.failure()
    }

    pub(crate) fn info(&self) -> &NamespaceInfo {
        &self.info
    }

    pub(crate) fn queue_pair(&mut self) -> &mut QueuePair {
        &mut self.pair
    }

    pub(crate) fn stats(&self) -> QueueStats {
        self.pair.stats()
    }

    pub(crate) fn controller(&self) -> &Controller {
        &self.controller
    }

    /// Takes over what has become of the namespace. Its blocks may be more or fewer; with blocks of another
    /// size nothing that the user computed holds any more, so that I/O ends.
    #[cold]
    fn look_again(&mut self) {
        self.pair.take_change();
        let now = self.controller.handle().shared.namespace(self.info.nsid);
        match now.map(|info| (info.layout(), info)) {
            Some((Ok(layout), info)) if info.block_size == self.info.block_size => {
                (self.layout, self.info, self.lost) = (layout, info, false);
            }
            _ => self.lost = true,
        }
    }
}

impl Channel for Direct {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        if self.lost {
            let status = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
            self.refused.extend(batch.drain(..).map(|request| request.complete(status)));
            return;
        }
        self.pair.submit(&self.layout, batch);
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        let count = self.pair.poll(sink);
        if self.pair.has_news() {
            self.look_again();
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
