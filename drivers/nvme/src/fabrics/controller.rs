//! A fabrics controller, as controllers of every transport are used.

use std::marker::PhantomData;
use std::sync::Arc;

use reactor::Core;
use wire_nvme::Sqe;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::feature::AsyncEventConfiguration;
use wire_nvme::identify::{IdentifyController, IdentifyNamespace};
use wire_nvme::protection::MetadataFormat;

use super::association::{Association, AssociationHandle};
use super::io_queue::FabricsIoQueue;
use super::queue::FabricsQueue;
use crate::attached::{Answer, AttachedController, IoQueues, Opening};
use crate::error::{AdminError, ControllerFailure, NvmeOpenError};
use crate::io_queue::IoQueue;
use crate::passthrough::PassthroughOutput;
use crate::shared::{AdminData, AdminOutput};

impl<Q: FabricsQueue> AttachedController for Association<Q> {
    fn is_fabrics(&self) -> bool {
        true
    }

    fn identity(&self) -> &IdentifyController {
        Association::identity(self)
    }

    fn cntlid(&self) -> u16 {
        self.handle().cntlid()
    }

    fn failure(&self) -> Option<ControllerFailure> {
        Association::failure(self)
    }

    fn admin(&mut self, sqe: Sqe, data: AdminData) -> Answer<'_, Result<AdminOutput, AdminError>> {
        Box::pin(Association::admin(self, sqe, data))
    }

    fn enable_events(&mut self, mask: AsyncEventConfiguration) -> Answer<'_, Result<(), AdminError>> {
        Box::pin(Association::enable_events(self, mask))
    }

    fn next_event(&mut self) -> Option<AsyncEvent> {
        Association::next_event(self)
    }

    fn wait_event<'a>(&'a self, _core: &'a Core) -> Answer<'a, ()> {
        Box::pin(Association::wait_event(self))
    }

    fn reauthenticate(&mut self) -> Answer<'_, Result<(), NvmeOpenError>> {
        Box::pin(Association::reauthenticate(self))
    }

    fn io_queues(&self) -> Arc<dyn IoQueues> {
        Arc::new(AssociationQueues::<Q>(self.handle().clone(), PhantomData))
    }
}

/// Connects I/O queues of an association.
struct AssociationQueues<Q: FabricsQueue>(AssociationHandle<Q::Remote>, PhantomData<fn() -> Q>);

impl<Q: FabricsQueue> IoQueues for AssociationQueues<Q> {
    fn open<'a>(
        &'a self,
        core: &'a Core,
        nsid: u32,
        identify: &'a IdentifyNamespace,
        metadata: &'a MetadataFormat,
    ) -> Opening<'a, Box<dyn IoQueue>> {
        Box::pin(async move {
            let queue = FabricsIoQueue::<Q>::open_over(core, &self.0, nsid, identify, metadata).await?;
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
        Box::pin(async move {
            if *metadata != AdminData::None {
                return Err(NvmeOpenError::InvalidArgument(Q::NO_METADATA));
            }
            self.0.execute_io::<Q>(core, sqe, data, timeout_ns).await
        })
    }
}
