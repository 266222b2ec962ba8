//! A namespace as a channel, whatever is in between.

mod direct;

use memory::Buffer;
use reactor::Core;
use ring::{Channel, Completion, Request};

use crate::controller::Controller;
use crate::error::{Failure, OpenError};
use crate::namespace_info::NamespaceInfo;
use crate::options::Options;
use crate::qpair::QueuePair;
use crate::stats::QueueStats;
use crate::tcp::TcpNamespace;
use crate::uri::Uri;
use crate::wait::{first, next_turn};

pub(crate) use direct::Direct;

/// A namespace, open on one core with a queue pair of its own.
pub struct Namespace {
    way: Way,
    core: Core,
    /// What [`run`](Namespace::run) found besides what it waited for.
    kept: Vec<Completion<Buffer>>,
}

enum Way {
    Tcp(Box<TcpNamespace>),
    Direct(Box<Direct>),
}

/// Calls a method of whichever it is.
macro_rules! either {
    ($way:expr, $namespace:ident => $call:expr) => {
        match $way {
            Way::Tcp($namespace) => $call,
            Way::Direct($namespace) => $call,
        }
    };
}

impl Namespace {
    /// Opens the namespace on the core that will use it, and connects to its controller where that was not
    /// done yet.
    ///
    /// A controller over PCI Express or vfio-user is attached once a process: the first core to open one of
    /// its namespaces owns it, and must run for as long as any is open.
    pub async fn open(core: &Core, uri: &Uri, options: &Options) -> Result<Namespace, OpenError> {
        if let Uri::Tcp(uri) = uri {
            let namespace = TcpNamespace::open(core, uri, options).await?;
            return Ok(Namespace::new(Way::Tcp(Box::new(namespace)), core));
        }
        let controller = Controller::attach(core, uri, options).await?;
        Namespace::of(&controller, core, uri.nsid(), options).await
    }

    /// Opens a namespace of a controller that is attached, on the core that will use it.
    pub async fn of(
        controller: &Controller,
        core: &Core,
        nsid: u32,
        options: &Options,
    ) -> Result<Namespace, OpenError> {
        let direct = Direct::open(controller, core, nsid, options).await?;
        Ok(Namespace::new(Way::Direct(Box::new(direct)), core))
    }

    fn new(way: Way, core: &Core) -> Namespace {
        Namespace { way, core: core.clone(), kept: Vec::new() }
    }

    /// Executes one request and waits for it: for first steps, tools and tests. What else is in flight
    /// completes at the next [`poll`](Channel::poll).
    pub async fn run(&mut self, request: Request<Buffer>) -> Completion<Buffer> {
        let tag = request.tag;
        let (mut batch, mut done) = (vec![request], Vec::new());
        loop {
            self.submit(&mut batch);
            self.poll(&mut done);
            if let Some(at) = done.iter().position(|completion: &Completion<Buffer>| completion.tag() == tag)
                && batch.is_empty()
            {
                let completion = done.swap_remove(at);
                self.kept.append(&mut done);
                return completion;
            }
            let now_ns = sys::clock::now_ns();
            match self.deadline().map(|at| at.saturating_sub(now_ns)) {
                Some(0) => next_turn().await,
                Some(ns) => {
                    let event = std::pin::pin!(self.core.next_event());
                    first(event, std::pin::pin!(self.core.sleep_ns(ns))).await;
                }
                None => self.core.next_event().await,
            }
        }
    }

    /// Bytes of a logical block.
    pub fn block_size(&self) -> u32 {
        either!(&self.way, namespace => namespace.block_size())
    }

    /// Number of logical blocks.
    pub fn blocks(&self) -> u64 {
        either!(&self.way, namespace => namespace.blocks())
    }

    /// Most bytes of one request.
    pub fn transfer_max_bytes(&self) -> u32 {
        either!(&self.way, namespace => namespace.transfer_max_bytes())
    }

    /// Why the namespace can no longer be reached, if so.
    pub fn failure(&self) -> Option<Failure> {
        either!(&self.way, namespace => namespace.failure())
    }

    /// What identification told; not over TCP.
    pub fn info(&self) -> Option<&NamespaceInfo> {
        match &self.way {
            Way::Tcp(_) => None,
            Way::Direct(namespace) => Some(namespace.info()),
        }
    }

    /// Its queue pair, for typed commands and for what it counts; not over TCP.
    pub fn queue_pair(&mut self) -> Option<&mut QueuePair> {
        match &mut self.way {
            Way::Tcp(_) => None,
            Way::Direct(namespace) => Some(namespace.queue_pair()),
        }
    }

    /// What its queue counted.
    pub fn stats(&self) -> QueueStats {
        match &self.way {
            Way::Tcp(namespace) => namespace.stats(),
            Way::Direct(namespace) => namespace.stats(),
        }
    }

    /// Its controller; not over TCP.
    pub fn controller(&self) -> Option<&Controller> {
        match &self.way {
            Way::Tcp(_) => None,
            Way::Direct(namespace) => Some(namespace.controller()),
        }
    }
}

impl Channel for Namespace {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        either!(&mut self.way, namespace => namespace.submit(batch))
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        let count = either!(&mut self.way, namespace => namespace.poll(sink));
        if self.kept.is_empty() {
            return count;
        }
        let kept = self.kept.len();
        sink.append(&mut self.kept);
        count + kept
    }

    fn deadline(&self) -> Option<u64> {
        if self.kept.is_empty() { either!(&self.way, namespace => namespace.deadline()) } else { Some(0) }
    }
}
