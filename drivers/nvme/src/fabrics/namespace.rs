//! A namespace over fabrics on one core, with an association of its own.

use std::sync::atomic::Ordering;

use block_io::{Channel, Completion, Request};
use dma::Data;
use reactor::Core;

use super::association::Association;
use super::io_queue::FabricsIoQueue;
use super::queue::{FabricsQueue, FabricsUri};
use crate::error::{ControllerFailure, NvmeOpenError};
use crate::io_queue::IoQueue;
use crate::options::Options;
use crate::stats::QueueStats;

/// The identifiers of a namespace; zeroes and `None` for those that it does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamespaceIdentifiers {
    nguid: [u8; 16],
    eui64: [u8; 8],
    uuid: Option<[u8; 16]>,
}

/// A namespace over fabrics with an association and one I/O queue of its own, both on one core.
pub(crate) struct FabricsNamespace<Q: FabricsQueue> {
    nsid: u32,
    nguid: [u8; 16],
    eui64: [u8; 8],
    // Fields drop in order: the I/O connection closes before the admin connection.
    io: FabricsIoQueue<Q>,
    association: Association<Q>,
}

impl<Q: FabricsQueue> FabricsNamespace<Q> {
    /// Connects to the controller and opens the namespace on the core that will use it.
    pub(crate) async fn open(
        core: &Core,
        uri: &Q::Uri,
        options: &Options,
    ) -> Result<FabricsNamespace<Q>, NvmeOpenError> {
        let nsid = uri.nsid();
        let mut association = Association::open_over(core, uri, options, 1).await?;
        let identify = association.identify_namespace(nsid).await?;
        let metadata = association.metadata_format(nsid, &identify).await?;
        let io = FabricsIoQueue::open_over(core, association.handle(), nsid, &identify, &metadata).await?;
        Ok(FabricsNamespace { nsid, nguid: identify.nguid, eui64: identify.eui64, io, association })
    }

    /// Reads the identifiers of the namespace.
    pub(super) async fn identify(&mut self) -> Result<NamespaceIdentifiers, NvmeOpenError> {
        let uuid = self.association.namespace_uuid(self.nsid).await?;
        Ok(NamespaceIdentifiers { nguid: self.nguid, eui64: self.eui64, uuid })
    }
}

impl<Q: FabricsQueue> IoQueue for FabricsNamespace<Q> {
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

    fn quiesced_ns(&self) -> u64 {
        self.association.handle().quiesced_ns.load(Ordering::Acquire)
    }
}

impl<Q: FabricsQueue> Channel for FabricsNamespace<Q> {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        self.io.submit(batch);
    }

    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        // An association ends with its admin queue: the controller processes no more I/O (Base 2.0, section
        // 3.6.1).
        if let Some(failure) = self.association.failure() {
            self.io.fail(failure);
        }
        self.io.poll(sink)
    }

    fn deadline(&self) -> Option<u64> {
        self.io.deadline()
    }
}
