//! One namespace through an I/O queue that joined an association.

use std::net::TcpStream;

use memory::Buffer;
use net::{Event, Network, Sockets};
use reactor::Core;
use ring::{Channel, Completion, Op, Request, Status, Tag};
use wire_nvme::Sqe;
use wire_nvme::identify::IdentifyNamespace;

use super::association::{Membership, Qids};
use super::connect::{connect, connect_command};
use super::facts::Facts;
use super::queue::{self, Data, Finished, Queue};
use crate::error::{Failure, OpenError};
use crate::shared::AdminData;
use crate::stats::QueueStats;
use crate::wait::{first, next_turn};

/// Bytes read at a time beyond what goes into place directly: eleven responses of 4 KiB, which are
/// still in the L2 cache when they are copied on.
const SCRATCH_BYTES: usize = 48 << 10;
/// How often an answer is looked for even where no event announces it.
const LOOK_NS: u64 = 10_000_000;

/// A namespace as a channel, through an I/O queue of an [`Association`](super::Association) that may
/// live on another core. It ends with the association, and before it when told to.
pub struct IoQueue {
    line: Line,
    facts: Facts,
    nsid: u32,
    /// Completed without a command.
    refused: Vec<Completion<Buffer>>,
    stats: QueueStats,
}

/// An I/O queue, of no namespace.
pub(super) struct Line {
    network: Sockets,
    scratch: Vec<u8>,
    received: Vec<Event<TcpStream>>,
    pub(super) queue: Queue,
    _qid: Qid,
}

/// The queue's identifier, given back when the queue is gone.
struct Qid {
    qid: u16,
    qids: Qids,
}

impl Drop for Qid {
    fn drop(&mut self) {
        self.qids.give(self.qid);
    }
}

impl Line {
    /// Joins the association with a queue of as many commands as its options say.
    pub(super) async fn open(core: &Core, membership: &Membership) -> Result<Line, OpenError> {
        let qid = membership.qids.take().ok_or(OpenError::NoQueue(0))?;
        let qid = Qid { qid, qids: membership.qids.clone() };
        let mut network = Sockets::new(core.events()).spinning(core.spins());
        let most = membership.entries_max.saturating_sub(1).clamp(1, queue::DEPTH_MAX - 1);
        let depth = membership.options.queue_depth.clamp(1, most);
        let queue = connect(&mut network, membership.address, depth + 1, &membership.uri)?;
        let (sqe, data) = connect_command(membership, qid.qid, depth + 1, membership.cntlid);
        let mut line =
            Line { network, scratch: vec![0; SCRATCH_BYTES], received: Vec::new(), queue, _qid: qid };
        let deadline_ns = sys::clock::now_ns() + membership.options.timeout_ns;
        while !line.queue.is_ready() {
            line.receive();
            if let Some(failure) = line.queue.failure {
                return Err(failure.into());
            }
            if !line.queue.is_ready() {
                line.wait(core, "ICReq", deadline_ns).await?;
            }
        }
        let request = Request::new(Tag(u64::MAX), Op::Flush, 0, 0);
        let finished = line.execute(core, "Connect", sqe, request, (Data::None, &data), deadline_ns).await?;
        if !finished.cqe.status.is_success() {
            return Err(OpenError::Command("Connect", finished.cqe.status));
        }
        line.queue.set_in_capsule_max(membership.capsule_bytes);
        Ok(line)
    }

    /// Executes one command while there is no other.
    pub(super) async fn execute(
        &mut self,
        core: &Core,
        what: &'static str,
        sqe: Sqe,
        request: Request<Buffer>,
        (data, small): (Data, &[u8]),
        deadline_ns: u64,
    ) -> Result<Finished, OpenError> {
        self.queue.submit(sqe, request, data, small);
        self.queue.flush(&mut self.network);
        let finished = loop {
            self.receive();
            if let Some(finished) = self.queue.finished().pop() {
                break finished;
            }
            self.wait(core, what, deadline_ns).await?;
        };
        self.queue.failure.map_or(Ok(finished), |failure| Err(failure.into()))
    }

    /// Waits for something to arrive.
    async fn wait(&self, core: &Core, what: &'static str, deadline_ns: u64) -> Result<(), OpenError> {
        let now_ns = sys::clock::now_ns();
        if now_ns >= deadline_ns {
            return Err(OpenError::Timeout(what));
        }
        if self.network.is_pending() {
            next_turn().await;
            return Ok(());
        }
        let event = std::pin::pin!(core.next_event());
        // A timer stays until it ends, and a busy core has events by the thousand.
        let timeout = std::pin::pin!(core.sleep_ns((deadline_ns - now_ns).min(LOOK_NS)));
        first(event, timeout).await;
        Ok(())
    }

    /// Takes in what arrived; returns how often there was something.
    #[inline]
    fn receive(&mut self) -> u64 {
        let mut arrivals = 0;
        self.network.poll(&mut self.received);
        for event in self.received.drain(..) {
            if matches!(event, Event::Ready(id) if id == self.queue.connection()) {
                arrivals += 1;
                while self.queue.receive(&mut self.network, &mut self.scratch) {}
            }
        }
        arrivals
    }
}

impl Membership {
    /// Joins with an I/O queue, executes one command on it, and leaves.
    pub(crate) async fn execute_one(
        &self,
        core: &Core,
        what: &'static str,
        sqe: Sqe,
        request: Request<Buffer>,
        data: &AdminData,
        deadline_ns: u64,
    ) -> Result<Finished, OpenError> {
        let mut line = Line::open(core, self).await?;
        let data = match data {
            AdminData::None => Data::None,
            AdminData::In(length) => Data::In(*length as u32),
            AdminData::Out(bytes) => Data::Out(bytes.len() as u32),
        };
        line.execute(core, what, sqe, request, (data, &[]), deadline_ns).await
    }
}

impl IoQueue {
    /// Joins the association with a queue for namespace `nsid`, of which `identify` was learned.
    pub async fn open(
        core: &Core,
        membership: &Membership,
        nsid: u32,
        identify: &IdentifyNamespace,
    ) -> Result<IoQueue, OpenError> {
        let facts = Facts::new(nsid, identify, membership.mdts, membership.oncs)?;
        let line = Line::open(core, membership).await?;
        Ok(IoQueue { line, facts, nsid, refused: Vec::new(), stats: QueueStats::default() })
    }

    /// Most bytes of one request.
    pub fn transfer_max_bytes(&self) -> u32 {
        self.facts.transfer_max_bytes
    }

    /// Bytes of a logical block.
    pub fn block_size(&self) -> u32 {
        self.facts.block_size
    }

    /// Number of logical blocks.
    pub fn blocks(&self) -> u64 {
        self.facts.blocks
    }

    /// Requests that can be submitted now.
    pub fn room(&self) -> usize {
        if self.line.queue.failure.is_some() { 0 } else { self.line.queue.room() }
    }

    /// What it counted. There are no doorbells, aborts or resets over TCP.
    pub fn stats(&self) -> QueueStats {
        self.stats
    }

    /// Why the queue can no longer be used, if so.
    pub fn failure(&self) -> Option<Failure> {
        self.line.queue.failure
    }

    /// Ends the queue; what is in flight completes with [`Status::HOST_PATHING_ERROR`].
    pub fn fail(&mut self, failure: Failure) {
        if self.line.queue.failure.is_none() {
            self.line.queue.fail(failure);
        }
    }
}

impl Channel for IoQueue {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        if self.line.queue.failure.is_some() {
            let refused = batch.drain(..).map(|request| request.complete(Status::HOST_PATHING_ERROR));
            self.refused.extend(refused);
            return;
        }
        let count = batch.len().min(self.line.queue.room());
        self.stats.full += u64::from(count < batch.len());
        self.stats.batches += u64::from(count > 0);
        self.stats.submitted += count as u64;
        for request in batch.drain(..count) {
            match self.facts.command(self.nsid, &request) {
                Ok((sqe, data, small)) => {
                    let small = small.as_ref().map_or(&[][..], |range| &range[..]);
                    self.line.queue.submit(sqe, request, data, small);
                }
                Err(status) => self.refused.push(request.complete(status)),
            }
        }
        self.line.queue.flush(&mut self.line.network);
    }

    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        let before = sink.len();
        self.stats.arrivals += self.line.receive();
        let finished = self.line.queue.finished().drain(..);
        sink.extend(finished.map(|finished| finished.request.complete(finished.cqe.status)));
        sink.append(&mut self.refused);
        let count = sink.len() - before;
        self.stats.polls += 1;
        self.stats.idle_polls += u64::from(count == 0);
        self.stats.completed += count as u64;
        count
    }

    fn deadline(&self) -> Option<u64> {
        (!self.refused.is_empty() || self.line.network.is_pending()).then_some(0)
    }
}
