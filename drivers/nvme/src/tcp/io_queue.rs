//! One namespace through an I/O queue that joined an association.

use std::net::TcpStream;

use memory::Buffer;
use net::{Event, Network, Sockets};
use reactor::Core;
use ring::{Channel, Completion, Op, Request, Status, Tag};
use wire_nvme::identify::IdentifyNamespace;

use super::association::{Membership, Qids};
use super::connect::{connect, connect_command};
use super::facts::Facts;
use super::queue::{self, Data, Queue};
use crate::error::{Failure, OpenError};
use crate::wait::{first, next_turn};

/// Bytes read at a time beyond what goes into place directly: eleven responses of 4 KiB, which are
/// still in the L2 cache when they are copied on.
const SCRATCH_BYTES: usize = 48 << 10;
/// How often an answer is looked for even where no event announces it.
const LOOK_NS: u64 = 10_000_000;

/// A namespace as a channel, through an I/O queue of an [`Association`](super::Association) that may
/// live on another core. It ends with the association, and before it when told to.
pub struct IoQueue {
    network: Sockets,
    scratch: Vec<u8>,
    received: Vec<Event<TcpStream>>,
    queue: Queue,
    facts: Facts,
    nsid: u32,
    /// Completed without a command.
    refused: Vec<Completion<Buffer>>,
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

impl IoQueue {
    /// Joins the association with a queue for namespace `nsid`, of which `identify` was learned.
    pub async fn open(
        core: &Core,
        membership: &Membership,
        nsid: u32,
        identify: &IdentifyNamespace,
    ) -> Result<IoQueue, OpenError> {
        let facts = Facts::new(nsid, identify, membership.mdts, membership.oncs)?;
        let qid = membership.qids.take().ok_or(OpenError::NoQueue(0))?;
        let qid = Qid { qid, qids: membership.qids.clone() };
        let mut network = Sockets::new(core.events()).spinning(core.spins());
        let most = membership.entries_max.saturating_sub(1).clamp(1, queue::DEPTH_MAX - 1);
        let depth = membership.options.queue_depth.clamp(1, most);
        let queue = connect(&mut network, membership.address, depth + 1, &membership.uri)?;
        let (sqe, data) = connect_command(membership, qid.qid, depth + 1, membership.cntlid);
        let mut io = IoQueue {
            network,
            scratch: vec![0; SCRATCH_BYTES],
            received: Vec::new(),
            queue,
            facts,
            nsid,
            refused: Vec::new(),
            _qid: qid,
        };
        let deadline_ns = sys::clock::now_ns() + membership.options.timeout_ns;
        while !io.queue.is_ready() {
            io.receive();
            if let Some(failure) = io.queue.failure {
                return Err(failure.into());
            }
            if !io.queue.is_ready() {
                io.wait(core, "ICReq", deadline_ns).await?;
            }
        }
        io.queue.submit(sqe, Request::new(Tag(u64::MAX), Op::Flush, 0, 0), Data::None, &data);
        io.queue.flush(&mut io.network);
        let finished = loop {
            io.receive();
            if let Some(finished) = io.queue.finished().pop() {
                break finished;
            }
            io.wait(core, "Connect", deadline_ns).await?;
        };
        if let Some(failure) = io.queue.failure {
            return Err(failure.into());
        }
        if !finished.cqe.status.is_success() {
            return Err(OpenError::Command("Connect", finished.cqe.status));
        }
        io.queue.set_in_capsule_max(membership.capsule_bytes);
        Ok(io)
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
        if self.queue.failure.is_some() { 0 } else { self.queue.room() }
    }

    /// Why the queue can no longer be used, if so.
    pub fn failure(&self) -> Option<Failure> {
        self.queue.failure
    }

    /// Ends the queue; what is in flight completes with [`Status::HOST_PATHING_ERROR`].
    pub fn fail(&mut self, failure: Failure) {
        if self.queue.failure.is_none() {
            self.queue.fail(failure);
        }
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

    #[inline]
    fn receive(&mut self) {
        self.network.poll(&mut self.received);
        for event in self.received.drain(..) {
            if matches!(event, Event::Ready(id) if id == self.queue.connection()) {
                while self.queue.receive(&mut self.network, &mut self.scratch) {}
            }
        }
    }
}

impl Channel for IoQueue {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        if self.queue.failure.is_some() {
            let refused = batch.drain(..).map(|request| request.complete(Status::HOST_PATHING_ERROR));
            self.refused.extend(refused);
            return;
        }
        let count = batch.len().min(self.queue.room());
        for request in batch.drain(..count) {
            match self.facts.command(self.nsid, &request) {
                Ok((sqe, data, small)) => {
                    let small = small.as_ref().map_or(&[][..], |range| &range[..]);
                    self.queue.submit(sqe, request, data, small);
                }
                Err(status) => self.refused.push(request.complete(status)),
            }
        }
        self.queue.flush(&mut self.network);
    }

    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        let before = sink.len();
        self.receive();
        let finished = self.queue.finished().drain(..);
        sink.extend(finished.map(|finished| finished.request.complete(finished.cqe.status)));
        sink.append(&mut self.refused);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        (!self.refused.is_empty() || self.network.is_pending()).then_some(0)
    }
}
