//! A namespace over fabrics that outlives its connections.

use std::cell::RefCell;
use std::rc::Rc;

use block_io::{Channel, Completion, Request, Status};
use dma::Data;
use reactor::Core;

use super::namespace::{FabricsNamespace, NamespaceIdentifiers};
use super::queue::FabricsQueue;
use crate::error::{ControllerFailure, NvmeOpenError};
use crate::io_queue::IoQueue;
use crate::options::Options;
use crate::stats::QueueStats;

/// Delay between attempts to connect.
const RETRY_NS: u64 = 100_000_000;
/// How often the outcome of an attempt is looked at.
const ATTEMPT_POLL_NS: u64 = 5_000_000;

type Opened<Q> = Result<(FabricsNamespace<Q>, NamespaceIdentifiers), NvmeOpenError>;
type Attempt<Q> = Rc<RefCell<Option<Opened<Q>>>>;

/// A namespace over fabrics that is connected again when its connection is lost.
///
/// Requests in flight at the loss are sent again: reads, writes, deallocations and flushes may be repeated,
/// and there are no others. New ones stay with the caller meanwhile. It gives up when an outage lasts too
/// long, and when what answers is another namespace; then every request fails. A request costs a comparison
/// more than with [`FabricsNamespace`].
pub(crate) struct ReconnectingNamespace<Q: FabricsQueue> {
    core: Core,
    uri: Q::Uri,
    options: Options,
    /// Longest outage.
    outage_ns_max: u64,
    link: Link<Q>,
    /// Why the connection was lost last.
    lost_by: Option<ControllerFailure>,
    /// Requests that the present connection has and has not returned.
    in_flight: usize,
    /// Requests that a lost connection had, oldest first.
    lost: Vec<Request<Data>>,
    refused: Vec<Completion<Data>>,
    identity: NamespaceIdentifiers,
    block_size: u32,
    blocks: u64,
    transfer_max_bytes: u32,
    stats: QueueStats,
}

enum Link<Q: FabricsQueue> {
    /// Connected; or the connection has failed, and has not returned all requests.
    Up(Box<FabricsNamespace<Q>>),
    /// The next attempt is due at the first time; the connection failed at the second.
    Waiting(u64, u64),
    Connecting(Attempt<Q>, u64),
    GivenUp(ControllerFailure),
}

impl<Q: FabricsQueue> ReconnectingNamespace<Q> {
    pub(crate) async fn open(
        core: &Core,
        uri: &Q::Uri,
        options: &Options,
        outage_ns_max: u64,
    ) -> Result<ReconnectingNamespace<Q>, NvmeOpenError> {
        let (namespace, identity) = open::<Q>(core, uri, options).await?;
        Ok(ReconnectingNamespace {
            core: core.clone(),
            uri: uri.clone(),
            options: options.clone(),
            outage_ns_max,
            lost_by: None,
            in_flight: 0,
            lost: Vec::new(),
            refused: Vec::new(),
            identity,
            block_size: namespace.block_size(),
            blocks: namespace.blocks(),
            transfer_max_bytes: namespace.transfer_max_bytes(),
            stats: QueueStats::default(),
            link: Link::Up(Box::new(namespace)),
        })
    }

    /// Collects what a failed connection returns: requests that it did not execute are sent again.
    #[cold]
    fn close(&mut self, sink: &mut Vec<Completion<Data>>, from: usize) {
        let returned = sink.len() - from;
        for completion in sink.extract_if(from.., |done| done.status().same_code(Status::HOST_PATHING_ERROR))
        {
            self.lost.push(completion.into_request());
        }
        self.in_flight -= returned;
        let Link::Up(namespace) = &self.link else { return };
        if self.in_flight > 0 {
            return;
        }
        // A controller that fell silent may still execute writes: they are repeated only when it has stopped.
        let (now_ns, quiesced_ns) = (self.core.now_ns(), namespace.quiesced_ns());
        self.stats = self.stats.plus(&namespace.stats());
        self.lost_by = namespace.failure();
        self.link = Link::Waiting(now_ns.max(quiesced_ns), now_ns);
    }

    /// Advances a link that is not up.
    #[cold]
    fn advance(&mut self, sink: &mut Vec<Completion<Data>>) {
        let now_ns = self.core.now_ns();
        match &mut self.link {
            Link::Waiting(_, lost_ns) if now_ns.saturating_sub(*lost_ns) > self.outage_ns_max => {
                self.give_up(self.lost_by.unwrap_or(ControllerFailure::Closed));
            }
            Link::Waiting(due_ns, lost_ns) if now_ns >= *due_ns => {
                let (attempt, lost_ns) = (Attempt::<Q>::default(), *lost_ns);
                let (core, uri, options, result) =
                    (self.core.clone(), self.uri.clone(), self.options.clone(), attempt.clone());
                let spawned = self.core.spawn(async move {
                    let opened = open::<Q>(&core, &uri, &options).await;
                    *result.borrow_mut() = Some(opened);
                });
                self.link = match spawned {
                    true => Link::Connecting(attempt, lost_ns),
                    false => Link::Waiting(now_ns + RETRY_NS, lost_ns),
                };
            }
            Link::Connecting(attempt, lost_ns) => {
                let (outcome, lost_ns) = (attempt.borrow_mut().take(), *lost_ns);
                match outcome {
                    Some(Ok((namespace, identity))) if self.is_same(&namespace, &identity) => {
                        self.link = Link::Up(Box::new(namespace));
                        let mut lost = std::mem::take(&mut self.lost);
                        self.submit(&mut lost);
                        self.lost = lost;
                    }
                    Some(Ok(_)) => self.give_up(ControllerFailure::Replaced),
                    Some(Err(_)) => self.link = Link::Waiting(now_ns + RETRY_NS, lost_ns),
                    None => {}
                }
            }
            Link::Up(_) | Link::Waiting(..) | Link::GivenUp(_) => {}
        }
        if matches!(self.link, Link::GivenUp(_)) {
            sink.extend(self.lost.drain(..).map(|request| request.complete(Status::HOST_PATHING_ERROR)));
        }
    }

    fn is_same(&self, namespace: &FabricsNamespace<Q>, identity: &NamespaceIdentifiers) -> bool {
        *identity == self.identity
            && namespace.block_size() == self.block_size
            && namespace.blocks() >= self.blocks
    }

    fn give_up(&mut self, failure: ControllerFailure) {
        self.link = Link::GivenUp(failure);
    }
}

async fn open<Q: FabricsQueue>(core: &Core, uri: &Q::Uri, options: &Options) -> Opened<Q> {
    let mut namespace = FabricsNamespace::open(core, uri, options).await?;
    let identity = namespace.identify().await?;
    Ok((namespace, identity))
}

impl<Q: FabricsQueue> IoQueue for ReconnectingNamespace<Q> {
    fn block_size(&self) -> u32 {
        self.block_size
    }

    fn blocks(&self) -> u64 {
        self.blocks
    }

    fn transfer_max_bytes(&self) -> u32 {
        self.transfer_max_bytes
    }

    /// Of all connections.
    fn stats(&self) -> QueueStats {
        match &self.link {
            Link::Up(namespace) => self.stats.plus(&namespace.stats()),
            _ => self.stats,
        }
    }

    fn failure(&self) -> Option<ControllerFailure> {
        match self.link {
            Link::GivenUp(failure) => Some(failure),
            _ => None,
        }
    }
}

impl<Q: FabricsQueue> Channel for ReconnectingNamespace<Q> {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        match &mut self.link {
            // A lost connection returns at its next poll what it is given.
            Link::Up(namespace) => {
                if !self.lost.is_empty() {
                    let before = self.lost.len();
                    namespace.submit(&mut self.lost);
                    self.in_flight += before - self.lost.len();
                    if !self.lost.is_empty() {
                        return;
                    }
                }
                let before = batch.len();
                namespace.submit(batch);
                self.in_flight += before - batch.len();
            }
            Link::GivenUp(_) => {
                let refused = batch.drain(..).map(|request| request.complete(Status::HOST_PATHING_ERROR));
                self.refused.extend(refused);
            }
            Link::Waiting(..) | Link::Connecting(..) => {}
        }
    }

    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        let before = sink.len();
        match &mut self.link {
            Link::Up(namespace) => {
                let count = namespace.poll(sink);
                if namespace.failure().is_some() {
                    self.close(sink, before);
                } else {
                    self.in_flight -= count;
                    if !self.lost.is_empty() {
                        self.submit(&mut Vec::new());
                    }
                }
            }
            _ => self.advance(sink),
        }
        sink.append(&mut self.refused);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.refused.is_empty() {
            return Some(0);
        }
        match &self.link {
            Link::Up(namespace) if !self.lost.is_empty() || namespace.failure().is_some() => Some(0),
            Link::Up(namespace) => namespace.deadline(),
            Link::Waiting(due_ns, lost_ns) => Some((*due_ns).min(lost_ns.saturating_add(self.outage_ns_max))),
            Link::Connecting(..) => Some(self.core.now_ns() + ATTEMPT_POLL_NS),
            Link::GivenUp(_) => (!self.lost.is_empty()).then_some(0),
        }
    }
}
