//! A controller with a memory-based transport, as controllers of every transport are used.

use std::sync::Arc;

use reactor::Core;
use wire_nvme::Sqe;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::identify::{IdentifyController, IdentifyNamespace};
use wire_nvme::protection::MetadataFormat;

use crate::attached::{Answer, AttachedController, IoQueues, Opening};
use crate::controller::Controller;
use crate::error::{AdminError, ControllerFailure};
use crate::io_queue::IoQueue;
use crate::namespace::MemoryNamespace;
use crate::options::Options;
use crate::passthrough::PassthroughOutput;
use crate::shared::{AdminData, AdminOutput};

/// Interval at which the controller is checked for events and failures.
const EVENT_POLL_NS: u64 = 50_000_000;

/// A handle of a controller over PCI Express or vfio-user, with the options of its I/O queues.
#[derive(Clone)]
pub(crate) struct MemoryController {
    controller: Controller,
    options: Options,
}

impl MemoryController {
    pub(crate) fn new(controller: Controller, options: &Options) -> MemoryController {
        MemoryController { controller, options: options.clone() }
    }
}

impl AttachedController for MemoryController {
    fn is_fabrics(&self) -> bool {
        false
    }

    fn identity(&self) -> &IdentifyController {
        self.controller.identity()
    }

    fn cntlid(&self) -> u16 {
        self.controller.identity().cntlid
    }

    fn failure(&self) -> Option<ControllerFailure> {
        self.controller.failure()
    }

    fn admin(&mut self, sqe: Sqe, data: AdminData) -> Answer<'_, Result<AdminOutput, AdminError>> {
        Box::pin(self.controller.admin(sqe, data))
    }

    fn next_event(&mut self) -> Option<AsyncEvent> {
        self.controller.next_event().map(|event| event.0)
    }

    fn wait_event<'a>(&'a self, core: &'a Core) -> Answer<'a, ()> {
        Box::pin(core.sleep_ns(EVENT_POLL_NS))
    }

    fn io_queues(&self) -> Arc<dyn IoQueues> {
        Arc::new(self.clone())
    }

    fn supports_namespace(&self, nsid: u32) -> Answer<'_, bool> {
        Box::pin(async move {
            self.controller.refresh(nsid).await.is_ok() && self.controller.namespace(nsid).await.is_ok()
        })
    }

    fn resets(&self) -> u64 {
        self.controller.resets()
    }

    fn reset(&self) -> Answer<'_, Option<Result<(), ControllerFailure>>> {
        Box::pin(async move { Some(self.controller.reset().await) })
    }
}

impl IoQueues for MemoryController {
    fn open<'a>(
        &'a self,
        core: &'a Core,
        nsid: u32,
        _identify: &'a IdentifyNamespace,
        _metadata: &'a MetadataFormat,
    ) -> Opening<'a, Box<dyn IoQueue>> {
        Box::pin(async move {
            let queue = MemoryNamespace::open(&self.controller, core, nsid, &self.options).await?;
            Ok(Box::new(queue) as Box<dyn IoQueue>)
        })
    }

    fn execute<'a>(
        &'a self,
        core: &'a Core,
        sqe: Sqe,
        data: &'a AdminData,
        metadata: &'a AdminData,
        timeout_ns: u64,
    ) -> Opening<'a, PassthroughOutput> {
        Box::pin(self.controller.execute_io(core, sqe, data, metadata, timeout_ns))
    }
}
