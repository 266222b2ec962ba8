//! An I/O queue of an association, as a channel to one namespace.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block_io::{Channel, Completion, FabricsStatus, Op, Request, Status, Tag};
use dma::Data;
use reactor::Core;
use sockets::{CoreNetwork, NetworkEvent, SentEvent, Sockets};
use wire_nvme::Sqe;
use wire_nvme::identify::IdentifyNamespace;

use super::association::{AssociationHandle, FreeQids};
use super::connect::{connect, connect_command};
use super::namespace_info::TcpNamespaceInfo;
use super::queue::{self, TcpCommandData, TcpCompletion, TcpQueue};
use crate::error::{ControllerFailure, NvmeOpenError};
use crate::io_queue::IoQueue;
use crate::shared::AdminData;
use crate::stats::QueueStats;
use crate::wait::{next_turn, race};

/// Receive buffer size for data that is not received directly into place: eleven responses of 4 KiB, which are still
/// in the L2 cache when they are copied.
const SCRATCH_BYTES: usize = 48 << 10;
/// Interval at which the connection is polled without an event.
const POLL_INTERVAL_NS: u64 = 10_000_000;

/// A channel to one namespace through an I/O queue of a [`TcpAssociation`](super::TcpAssociation), which may live on
/// another core.
///
/// It owns the connection of its queue. Its user calls [`fail`](Self::fail) when the association fails; requests then
/// complete with [`Status::HOST_PATHING_ERROR`].
pub struct TcpIoQueue<N: CoreNetwork = Sockets> {
    connection: ConnectedQueue<N>,
    info: TcpNamespaceInfo,
    nsid: u32,
    /// Requests completed without a command.
    refused: Vec<Completion<Data>>,
    stats: QueueStats,
    /// Of its association.
    quiesced_ns: Arc<AtomicU64>,
}

/// A connected I/O queue, not bound to a namespace.
pub(super) struct ConnectedQueue<N: CoreNetwork> {
    network: N,
    scratch: Vec<u8>,
    received: Vec<NetworkEvent<N::Stream>>,
    sent: Vec<SentEvent>,
    /// The connection was closed after a failure, because it still used data of commands.
    closed: bool,
    pub(super) queue: TcpQueue,
    _qid: QidGuard,
}

/// The queue's identifier, returned to the association on drop.
struct QidGuard {
    qid: u16,
    qids: FreeQids,
}

impl Drop for QidGuard {
    fn drop(&mut self) {
        self.qids.free(self.qid);
    }
}

impl<N: CoreNetwork> ConnectedQueue<N> {
    /// Connects an I/O queue with the depth in the association's options, limited to what the controller supports.
    pub(super) async fn open(
        core: &Core,
        association: &AssociationHandle,
    ) -> Result<ConnectedQueue<N>, NvmeOpenError> {
        let qid = association.free_qids.alloc().ok_or(NvmeOpenError::NoFreeQueue(0))?;
        let qid = QidGuard { qid, qids: association.free_qids.clone() };
        let mut network = N::of_core(core);
        let depth_max = association.entries_max.saturating_sub(1).clamp(1, queue::DEPTH_MAX - 1);
        let depth = association.options.queue_depth.clamp(1, depth_max);
        let (uri, options) = (&association.uri, &association.options);
        let mut queue = connect(&mut network, association.address, depth + 1, uri, options)?;
        queue.enable_owned_sends();
        let (sqe, data) = connect_command(association, qid.qid, depth + 1, association.cntlid);
        let mut connection = ConnectedQueue {
            network,
            scratch: vec![0; SCRATCH_BYTES],
            received: Vec::new(),
            sent: Vec::new(),
            closed: false,
            queue,
            _qid: qid,
        };
        let deadline_ns = core.now_ns() + association.options.timeout_ns;
        while !connection.queue.is_ready() {
            connection.receive();
            if let Some(failure) = connection.queue.failure {
                return Err(failure.while_connecting(association.address));
            }
            if !connection.queue.is_ready() {
                connection.wait(core, "ICReq", deadline_ns).await?;
            }
        }
        let request = Request::new(Tag(0), Op::Flush, 0, 0);
        let completed = connection
            .execute(core, "Connect", sqe, request, (TcpCommandData::None, &data), deadline_ns)
            .await?;
        if !completed.cqe.status.is_success() {
            return Err(NvmeOpenError::ConnectRejected(FabricsStatus(completed.cqe.status)));
        }
        connection.queue.set_in_capsule_max(association.capsule_bytes);
        Ok(connection)
    }

    /// Executes one command. No other command may be in flight.
    pub(super) async fn execute(
        &mut self,
        core: &Core,
        what: &'static str,
        sqe: Sqe,
        request: Request<Data>,
        (data, inline_data): (TcpCommandData, &[u8]),
        deadline_ns: u64,
    ) -> Result<TcpCompletion, NvmeOpenError> {
        self.queue.submit(sqe, request, data, inline_data);
        self.queue.flush(&mut self.network);
        let completed = loop {
            self.receive();
            if let Some(completed) = self.queue.completions().pop() {
                break completed;
            }
            self.wait(core, what, deadline_ns).await?;
        };
        self.queue.failure.map_or(Ok(completed), |failure| Err(failure.into()))
    }

    /// Waits for a network event or the poll interval.
    async fn wait(&self, core: &Core, what: &'static str, deadline_ns: u64) -> Result<(), NvmeOpenError> {
        let now_ns = core.now_ns();
        if now_ns >= deadline_ns {
            return Err(NvmeOpenError::Timeout(what));
        }
        if self.network.is_pending() {
            next_turn().await;
            return Ok(());
        }
        let event = std::pin::pin!(core.next_event());
        // Bounded, because a dropped timer stays registered until it expires, and a busy core has thousands of events.
        let timeout = std::pin::pin!(core.sleep_ns((deadline_ns - now_ns).min(POLL_INTERVAL_NS)));
        race(event, timeout).await;
        Ok(())
    }

    /// Processes received PDUs; returns the number of readiness events.
    #[inline]
    fn receive(&mut self) -> u64 {
        let mut arrivals = 0;
        self.network.poll(&mut self.received);
        if self.network.reap_sent(&mut self.sent) {
            self.process_sent();
        }
        for event in self.received.drain(..) {
            if matches!(event, NetworkEvent::Ready(id) if id == self.queue.connection()) {
                arrivals += 1;
                while self.queue.receive(&mut self.network, &mut self.scratch) {}
            }
        }
        arrivals
    }
}

impl<N: CoreNetwork> ConnectedQueue<N> {
    /// Passes on the ends of owned sends, and has them end soon after a failure.
    #[cold]
    fn process_sent(&mut self) {
        for SentEvent { connection, tag, result } in self.sent.drain(..) {
            if connection == self.queue.connection() {
                self.queue.owned_sent(tag, result);
                self.queue.flush(&mut self.network);
            }
        }
        if self.queue.failure.is_some() && self.queue.has_owned_sends() && !self.closed {
            self.closed = true;
            self.network.close(self.queue.connection());
        }
    }
}

impl AssociationHandle {
    /// Connects a temporary I/O queue, executes one command on it and closes it.
    pub(crate) async fn execute_one<N: CoreNetwork>(
        &self,
        core: &Core,
        what: &'static str,
        sqe: Sqe,
        request: Request<Data>,
        data: &AdminData,
        deadline_ns: u64,
    ) -> Result<TcpCompletion, NvmeOpenError> {
        let mut connection = ConnectedQueue::<N>::open(core, self).await?;
        connection.execute(core, what, sqe, request, (TcpCommandData::of(data), &[]), deadline_ns).await
    }
}

impl TcpIoQueue {
    /// Connects an I/O queue for namespace `nsid`, whose Identify Namespace data is `identify`.
    pub async fn open(
        core: &Core,
        association: &AssociationHandle,
        nsid: u32,
        identify: &IdentifyNamespace,
    ) -> Result<TcpIoQueue, NvmeOpenError> {
        TcpIoQueue::open_over(core, association, nsid, identify).await
    }
}

impl<N: CoreNetwork> TcpIoQueue<N> {
    /// As [`open`](TcpIoQueue::open), over any network.
    pub async fn open_over(
        core: &Core,
        association: &AssociationHandle,
        nsid: u32,
        identify: &IdentifyNamespace,
    ) -> Result<TcpIoQueue<N>, NvmeOpenError> {
        let info = TcpNamespaceInfo::new(nsid, identify, association.mdts, association.oncs)?;
        let connection = ConnectedQueue::open(core, association).await?;
        let quiesced_ns = association.quiesced_ns.clone();
        let stats = QueueStats::default();
        Ok(TcpIoQueue { connection, info, nsid, refused: Vec::new(), stats, quiesced_ns })
    }

    /// Requests that can be submitted now; 0 after a failure.
    pub fn room(&self) -> usize {
        if self.connection.queue.failure.is_some() { 0 } else { self.connection.queue.room() }
    }

    /// Fails the queue: requests in flight complete with [`Status::HOST_PATHING_ERROR`].
    pub fn fail(&mut self, failure: ControllerFailure) {
        if self.connection.queue.failure.is_none() {
            self.connection.queue.fail(failure);
        }
    }
}

impl<N: CoreNetwork> IoQueue for TcpIoQueue<N> {
    fn block_size(&self) -> u32 {
        self.info.block_size
    }

    fn blocks(&self) -> u64 {
        self.info.blocks
    }

    fn transfer_max_bytes(&self) -> u32 {
        self.info.transfer_max_bytes
    }

    /// Doorbells, aborts and resets are always 0.
    fn stats(&self) -> QueueStats {
        self.stats
    }

    fn failure(&self) -> Option<ControllerFailure> {
        self.connection.queue.failure
    }

    /// A controller that closed the connection has stopped.
    fn quiesced_ns(&self) -> u64 {
        match self.connection.queue.failure {
            Some(ControllerFailure::Detached) => self.quiesced_ns.load(Ordering::Acquire),
            _ => 0,
        }
    }

    fn detach(&mut self) {
        self.fail(ControllerFailure::Detached);
    }
}

impl<N: CoreNetwork> Channel for TcpIoQueue<N> {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        if self.connection.queue.failure.is_some() {
            let refused = batch.drain(..).map(|request| request.complete(Status::HOST_PATHING_ERROR));
            self.refused.extend(refused);
            return;
        }
        let count = batch.len().min(self.connection.queue.room());
        self.stats.full += u64::from(count < batch.len());
        self.stats.batches += u64::from(count > 0);
        self.stats.submitted += count as u64;
        for request in batch.drain(..count) {
            match self.info.to_command(self.nsid, &request) {
                Ok((sqe, data, inline_data)) => {
                    let inline_data = inline_data.as_ref().map_or(&[][..], |range| &range[..]);
                    self.connection.queue.submit(sqe, request, data, inline_data);
                }
                Err(status) => self.refused.push(request.complete(status)),
            }
        }
        self.connection.queue.flush(&mut self.connection.network);
    }

    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        let before = sink.len();
        self.stats.arrivals += self.connection.receive();
        let completions = self.connection.queue.completions();
        if !completions.is_empty() {
            sink.extend(
                completions.drain(..).map(|completed| completed.request.complete(completed.cqe.status)),
            );
        }
        sink.append(&mut self.refused);
        let count = sink.len() - before;
        self.stats.polls += 1;
        self.stats.idle_polls += u64::from(count == 0);
        self.stats.completed += count as u64;
        count
    }

    fn deadline(&self) -> Option<u64> {
        (!self.refused.is_empty() || self.connection.network.is_pending()).then_some(0)
    }
}
