//! A controller over any transport: one interface to attach, administer and reset it, and to open I/O queues.

use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;

use reactor::Core;
use sockets::{CoreNetwork, Sockets};
use wire_nvme::Sqe;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::feature::AsyncEventConfiguration;
use wire_nvme::identify::{IdentifyController, IdentifyNamespace};

use crate::controller::Controller;
use crate::error::{AdminError, ControllerFailure, NvmeOpenError};
use crate::io_queue::IoQueue;
use crate::namespace::MemoryNamespace;
use crate::options::Options;
use crate::passthrough::PassthroughOutput;
use crate::shared::{AdminData, AdminOutput};
use crate::tcp::{AssociationHandle, TcpAssociation, TcpIoQueue};
use crate::uri::Uri;

/// Interval at which a memory-based controller is checked for events and failures.
const MEMORY_EVENT_POLL_NS: u64 = 50_000_000;

/// A controller over any transport, attached by one core.
///
/// [`attach`](Self::attach) returns it ready for I/O. Its user executes [`admin`](Self::admin) commands, waits for
/// [events](Self::wait_event), watches [`failure`](Self::failure), and hands [`io_queues`](Self::io_queues) to the
/// cores that do I/O. Dropping it detaches the controller: over TCP at once, and a memory-based one with the last of
/// its I/O queues. The transports differ in one respect, [`is_fabrics`](Self::is_fabrics).
pub enum AnyController<N: CoreNetwork = Sockets> {
    /// Over TCP, through the network `N`.
    Tcp(Box<TcpAssociation<N>>),
    /// Over a memory-based transport: PCI Express or vfio-user.
    Memory(Controller, Box<Options>),
}

impl<N: CoreNetwork> AnyController<N> {
    /// Attaches the controller that `uri` names; its namespace is ignored. Over TCP it requests `io_queues` I/O queues;
    /// a memory-based controller has as many as it grants.
    pub async fn attach(
        core: &Core,
        uri: &Uri,
        options: &Options,
        io_queues: u16,
    ) -> Result<AnyController<N>, NvmeOpenError> {
        Ok(match uri {
            Uri::Tcp(uri) => {
                AnyController::Tcp(Box::new(TcpAssociation::open_over(core, uri, options, io_queues).await?))
            }
            Uri::Pcie(_) | Uri::VfioUser(_) => AnyController::Memory(
                Controller::attach(core, uri, options).await?,
                Box::new(options.clone()),
            ),
        })
    }

    /// Whether its queues are connections. A fabrics controller is reset by attaching it again, and its user reads the
    /// log page of each event; for memory-based controllers the driver does both.
    pub fn is_fabrics(&self) -> bool {
        matches!(self, AnyController::Tcp(_))
    }

    /// The Identify Controller data structure.
    pub fn identity(&self) -> &IdentifyController {
        match self {
            AnyController::Tcp(association) => association.identity(),
            AnyController::Memory(controller, _) => controller.identity(),
        }
    }

    /// Controller identifier (CNTLID).
    pub fn cntlid(&self) -> u16 {
        match self {
            AnyController::Tcp(association) => association.handle().cntlid(),
            AnyController::Memory(controller, _) => controller.identity().cntlid,
        }
    }

    /// Why the controller can no longer be used, if it has failed.
    pub fn failure(&self) -> Option<ControllerFailure> {
        match self {
            AnyController::Tcp(association) => association.failure(),
            AnyController::Memory(controller, _) => controller.failure(),
        }
    }

    /// Executes an admin command. The driver sets the command identifier and the data pointer; data is copied.
    pub async fn admin(&mut self, sqe: Sqe, data: AdminData) -> Result<AdminOutput, AdminError> {
        match self {
            AnyController::Tcp(association) => association.admin(sqe, data).await,
            AnyController::Memory(controller, _) => controller.admin(sqe, data).await,
        }
    }

    /// Whether I/O queues of the namespace can be opened: the driver rejects formats that it does not
    /// support. Identifies a namespace that it knows again.
    pub async fn supports_namespace(&self, nsid: u32) -> bool {
        match self {
            AnyController::Tcp(_) => true,
            AnyController::Memory(controller, _) => {
                controller.refresh(nsid).await.is_ok() && controller.namespace(nsid).await.is_ok()
            }
        }
    }

    /// Resets that the driver has made by itself or by [`reset`](Self::reset); none over fabrics.
    pub fn resets(&self) -> u64 {
        match self {
            AnyController::Tcp(_) => 0,
            AnyController::Memory(controller, _) => controller.resets(),
        }
    }

    /// Resets the controller; `None` over fabrics.
    pub async fn reset(&self) -> Option<Result<(), ControllerFailure>> {
        match self {
            AnyController::Tcp(_) => None,
            AnyController::Memory(controller, _) => Some(controller.reset().await),
        }
    }

    /// Enables the asynchronous events in `mask` that the controller supports. The driver enables those of memory-based
    /// controllers itself.
    pub async fn enable_events(&mut self, mask: AsyncEventConfiguration) -> Result<(), AdminError> {
        match self {
            AnyController::Tcp(association) => association.enable_events(mask).await,
            AnyController::Memory(..) => Ok(()),
        }
    }

    /// Takes the oldest pending event.
    pub fn next_event(&mut self) -> Option<AsyncEvent> {
        match self {
            AnyController::Tcp(association) => association.next_event(),
            AnyController::Memory(controller, _) => controller.next_event().map(|event| event.0),
        }
    }

    /// Waits until an event or a failure may be pending.
    pub async fn wait_event(&self, core: &Core) {
        match self {
            AnyController::Tcp(association) => association.wait_event().await,
            AnyController::Memory(..) => core.sleep_ns(MEMORY_EVENT_POLL_NS).await,
        }
    }

    /// What other cores open I/O queues with.
    pub fn io_queues(&self) -> Arc<dyn IoQueues> {
        Arc::new(match self {
            AnyController::Tcp(association) => {
                TransportQueues::<N>::Tcp(association.handle().clone(), PhantomData)
            }
            AnyController::Memory(controller, options) => {
                TransportQueues::Memory(controller.clone(), (**options).clone())
            }
        })
    }
}

/// The result of opening something on a core, asynchronously.
pub type Opening<'a, T> = Pin<Box<dyn Future<Output = Result<T, NvmeOpenError>> + 'a>>;

/// Opens I/O queues of a controller on any core.
pub trait IoQueues: Send + Sync {
    /// Opens an I/O queue on `core` for the namespace `nsid`, whose Identify Namespace data is `identify`.
    fn open<'a>(
        &'a self,
        core: &'a Core,
        nsid: u32,
        identify: &'a IdentifyNamespace,
    ) -> Opening<'a, Box<dyn IoQueue>>;

    /// Executes one I/O command on a temporary queue and waits at most `timeout_ns` for its completion.
    ///
    /// The driver sets command identifier, data pointer and metadata pointer only. The command must not transfer more
    /// than `data` and `metadata` hold, 1 MiB each at most. A fused command is rejected, and so is metadata over TCP.
    fn execute<'a>(
        &'a self,
        core: &'a Core,
        sqe: Sqe,
        data: &'a AdminData,
        metadata: &'a AdminData,
        timeout_ns: u64,
    ) -> Opening<'a, PassthroughOutput>;
}

enum TransportQueues<N> {
    Tcp(AssociationHandle, PhantomData<fn() -> N>),
    Memory(Controller, Options),
}

impl<N: CoreNetwork> IoQueues for TransportQueues<N> {
    fn open<'a>(
        &'a self,
        core: &'a Core,
        nsid: u32,
        identify: &'a IdentifyNamespace,
    ) -> Opening<'a, Box<dyn IoQueue>> {
        Box::pin(async move {
            Ok(match self {
                TransportQueues::Tcp(association, _) => {
                    Box::new(TcpIoQueue::<N>::open_over(core, association, nsid, identify).await?)
                        as Box<dyn IoQueue>
                }
                TransportQueues::Memory(controller, options) => {
                    Box::new(MemoryNamespace::open(controller, core, nsid, options).await?)
                }
            })
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
            match self {
                TransportQueues::Tcp(..) if *metadata != AdminData::None => {
                    Err(NvmeOpenError::InvalidArgument("metadata is not supported over TCP"))
                }
                TransportQueues::Tcp(association, _) => {
                    association.execute_io::<N>(core, sqe, data, timeout_ns).await
                }
                TransportQueues::Memory(controller, _) => {
                    controller.execute_io(core, sqe, data, metadata, timeout_ns).await
                }
            }
        })
    }
}
