//! A namespace as a [`Channel`], independent of the transport.

mod memory_based;

use std::any::Any;

use block_io::{Channel, Completion, Request};
use dma::Data;
use reactor::Core;

use crate::controller::Controller;
use crate::error::{ControllerFailure, NvmeOpenError};
use crate::fabrics::{FabricsNamespace, ReconnectingNamespace};
use crate::io_queue::IoQueue;
use crate::namespace_info::NamespaceInfo;
use crate::options::Options;
use crate::qpair::QueuePair;
use crate::rdma::RdmaConnection;
use crate::stats::QueueStats;
use crate::tcp::TcpConnection;
use crate::uri::Uri;
use crate::wait::{next_turn, race};

pub(crate) use memory_based::MemoryNamespace;

/// A namespace, open on one core with a queue pair of its own.
///
/// As a [`Channel`] it takes batches of requests with [`submit`](Channel::submit) and returns completions
/// from [`poll`](Channel::poll). Its [`IoQueue`] is the transport's, and is called once a batch.
pub struct Namespace {
    queue: Box<dyn IoQueue>,
    core: Core,
    /// Completions of other requests that [`run`](Namespace::run) has received.
    unreturned: Vec<Completion<Data>>,
}

impl Namespace {
    /// Opens a namespace on the core that will use it, and attaches its controller if this is not done yet.
    ///
    /// A controller over PCI Express or vfio-user is attached once per process: the first core to open one of
    /// its namespaces owns the controller, and must run for as long as any namespace is open.
    pub async fn open(core: &Core, uri: &Uri, options: &Options) -> Result<Namespace, NvmeOpenError> {
        match uri {
            Uri::Tcp(uri) => {
                let options = uri.options(options)?;
                let queue = FabricsNamespace::<TcpConnection>::open(core, uri, &options).await?;
                return Ok(Namespace::new(queue, core));
            }
            Uri::Rdma(uri) => {
                let options = uri.options(options);
                let queue = FabricsNamespace::<RdmaConnection>::open(core, uri, &options).await?;
                return Ok(Namespace::new(queue, core));
            }
            Uri::Pcie(_) | Uri::VfioUser(_) => {}
        }
        let controller = Controller::attach(core, uri, options).await?;
        Namespace::of(&controller, core, uri.nsid(), options).await
    }

    /// As [`open`](Self::open); over fabrics the namespace is connected again when the connection is lost,
    /// for as long as `outage_ns_max` each time. Requests wait meanwhile, those in flight are sent again, and
    /// [`failure`](Self::failure) says when it has given up. The driver does the same for controllers over
    /// PCI Express and vfio-user where a reset helps.
    pub async fn open_reconnecting(
        core: &Core,
        uri: &Uri,
        options: &Options,
        outage_ns_max: u64,
    ) -> Result<Namespace, NvmeOpenError> {
        match uri {
            Uri::Tcp(uri) => {
                let options = uri.options(options)?;
                let queue =
                    ReconnectingNamespace::<TcpConnection>::open(core, uri, &options, outage_ns_max).await?;
                Ok(Namespace::new(queue, core))
            }
            Uri::Rdma(uri) => {
                let options = uri.options(options);
                let queue =
                    ReconnectingNamespace::<RdmaConnection>::open(core, uri, &options, outage_ns_max).await?;
                Ok(Namespace::new(queue, core))
            }
            Uri::Pcie(_) | Uri::VfioUser(_) => Namespace::open(core, uri, options).await,
        }
    }

    /// Opens a namespace of an attached controller on the core that will use it.
    pub async fn of(
        controller: &Controller,
        core: &Core,
        nsid: u32,
        options: &Options,
    ) -> Result<Namespace, NvmeOpenError> {
        Ok(Namespace::new(MemoryNamespace::open(controller, core, nsid, options).await?, core))
    }

    fn new(queue: impl IoQueue, core: &Core) -> Namespace {
        Namespace { queue: Box::new(queue), core: core.clone(), unreturned: Vec::new() }
    }

    /// Executes one request and waits for its completion: for examples, tools and tests. Other requests in
    /// flight complete at the next [`poll`](Channel::poll).
    pub async fn run(&mut self, request: Request<Data>) -> Completion<Data> {
        let tag = request.tag;
        let (mut batch, mut done) = (vec![request], Vec::new());
        loop {
            self.submit(&mut batch);
            self.poll(&mut done);
            if let Some(at) = done.iter().position(|completion: &Completion<Data>| completion.tag() == tag)
                && batch.is_empty()
            {
                let completion = done.swap_remove(at);
                self.unreturned.append(&mut done);
                return completion;
            }
            let now_ns = self.core.now_ns();
            match self.deadline().map(|at| at.saturating_sub(now_ns)) {
                Some(0) => next_turn().await,
                Some(ns) => {
                    let event = std::pin::pin!(self.core.next_event());
                    race(event, std::pin::pin!(self.core.sleep_ns(ns))).await;
                }
                None => self.core.next_event().await,
            }
        }
    }

    /// Logical block size in bytes.
    pub fn block_size(&self) -> u32 {
        self.queue.block_size()
    }

    /// Number of logical blocks.
    pub fn blocks(&self) -> u64 {
        self.queue.blocks()
    }

    /// Most bytes of one request.
    pub fn transfer_max_bytes(&self) -> u32 {
        self.queue.transfer_max_bytes()
    }

    /// Why the controller can no longer be used, if it has failed.
    pub fn failure(&self) -> Option<ControllerFailure> {
        self.queue.failure()
    }

    /// Properties of the namespace; `None` over TCP.
    pub fn info(&self) -> Option<&NamespaceInfo> {
        self.memory_based().map(MemoryNamespace::info)
    }

    /// The queue pair, for typed commands and counters; `None` over TCP.
    pub fn queue_pair(&mut self) -> Option<&mut QueuePair> {
        let queue: &mut dyn Any = &mut *self.queue;
        queue.downcast_mut().map(MemoryNamespace::queue_pair)
    }

    /// Counters of the queue pair.
    pub fn stats(&self) -> QueueStats {
        self.queue.stats()
    }

    /// The controller; `None` over TCP.
    pub fn controller(&self) -> Option<&Controller> {
        self.memory_based().map(MemoryNamespace::controller)
    }

    fn memory_based(&self) -> Option<&MemoryNamespace> {
        let queue: &dyn Any = &*self.queue;
        queue.downcast_ref()
    }
}

impl Channel for Namespace {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        self.queue.submit(batch);
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        let count = self.queue.poll(sink);
        if self.unreturned.is_empty() {
            return count;
        }
        let kept = self.unreturned.len();
        sink.append(&mut self.unreturned);
        count + kept
    }

    fn deadline(&self) -> Option<u64> {
        if self.unreturned.is_empty() { self.queue.deadline() } else { Some(0) }
    }
}
