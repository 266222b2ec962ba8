//! A controller over any transport: attached by its URI.

use std::fmt;
use std::ops::{Deref, DerefMut};

use reactor::Core;
use sockets::{CoreNetwork, Sockets};

use crate::attached::AttachedController;
use crate::controller::Controller;
use crate::error::NvmeOpenError;
use crate::memory_based::MemoryController;
use crate::options::Options;
use crate::rdma::RdmaAssociation;
use crate::tcp::TcpAssociation;
use crate::uri::Uri;

/// A controller over any transport, attached by one core.
///
/// [`attach`](Self::attach) returns it ready for I/O. Its user executes [`admin`](AttachedController::admin)
/// commands, waits for [events](AttachedController::wait_event), watches
/// [`failure`](AttachedController::failure), and hands [`io_queues`](AttachedController::io_queues) to the
/// cores that do I/O. Dropping it detaches the controller: over TCP at once, and a memory-based one with the
/// last of its I/O queues.
pub struct AnyController(Box<dyn AttachedController>);

impl AnyController {
    /// Attaches the controller that `uri` names; its namespace is ignored. Over fabrics it requests
    /// `io_queues` I/O queues; a memory-based controller has as many as it grants.
    pub async fn attach(
        core: &Core,
        uri: &Uri,
        options: &Options,
        io_queues: u16,
    ) -> Result<AnyController, NvmeOpenError> {
        AnyController::attach_over::<Sockets>(core, uri, options, io_queues).await
    }

    /// As [`attach`](Self::attach), over the network `N`.
    pub async fn attach_over<N: CoreNetwork>(
        core: &Core,
        uri: &Uri,
        options: &Options,
        io_queues: u16,
    ) -> Result<AnyController, NvmeOpenError> {
        Ok(AnyController(match uri {
            Uri::Tcp(uri) => {
                let options = uri.options(options)?;
                Box::new(TcpAssociation::<N>::open_over(core, uri, &options, io_queues).await?)
            }
            Uri::Rdma(uri) => {
                Box::new(RdmaAssociation::open_over(core, uri, &uri.options(options), io_queues).await?)
            }
            Uri::Pcie(_) | Uri::VfioUser(_) => {
                let controller = Controller::attach(core, uri, options).await?;
                Box::new(MemoryController::new(controller, options))
            }
        }))
    }
}

impl Deref for AnyController {
    type Target = dyn AttachedController;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl DerefMut for AnyController {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut *self.0
    }
}

impl fmt::Debug for AnyController {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AnyController").field("cntlid", &self.cntlid()).finish()
    }
}
