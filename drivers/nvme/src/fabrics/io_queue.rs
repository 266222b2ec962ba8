//! An I/O queue of an association, as a channel to one namespace.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block_io::{Channel, Completion, FabricsStatus, Op, Request, Status, Tag};
use dma::Data;
use nvme_auth::Concatenation;
use reactor::Core;
use wire_nvme::Sqe;
use wire_nvme::fabrics::ConnectResponse;
use wire_nvme::identify::IdentifyNamespace;
use wire_nvme::protection::MetadataFormat;

use super::association::{AssociationHandle, FreeQids};
use super::authentication::{AuthQueue, authenticate};
use super::connect::connect_command;
use super::namespace_info::FabricsNamespaceInfo;
use super::queue::{CommandData, FabricsCompletion, FabricsQueue, QueuePurpose};
use super::reauthentication::{QueueReauthentication, is_own};
use crate::error::{ControllerFailure, NvmeOpenError};
use crate::io_queue::IoQueue;
use crate::shared::AdminData;
use crate::stats::QueueStats;
use crate::wait::{next_turn, race};

/// Interval at which the connection is polled without an event.
const POLL_INTERVAL_NS: u64 = 10_000_000;

/// A channel to one namespace through an I/O queue of an [`Association`](super::Association), which may live
/// on another core.
///
/// It owns the connection of its queue, and authenticates anew on it after the association has. Its user
/// calls [`fail`](Self::fail) when the association fails; requests then complete with
/// [`Status::HOST_PATHING_ERROR`].
pub struct FabricsIoQueue<Q: FabricsQueue> {
    core: Core,
    connection: ConnectedQueue<Q>,
    info: FabricsNamespaceInfo,
    nsid: u32,
    /// Requests completed without a command.
    refused: Vec<Completion<Data>>,
    stats: QueueStats,
    /// Of its association.
    quiesced_ns: Arc<AtomicU64>,
}

/// A connected I/O queue, not bound to a namespace.
pub(super) struct ConnectedQueue<Q: FabricsQueue> {
    pub(super) queue: Q,
    /// `None` if its host has no credentials.
    reauthentication: Option<Box<QueueReauthentication>>,
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

impl<Q: FabricsQueue> ConnectedQueue<Q> {
    /// Connects an I/O queue with the depth in the association's options, limited to what the controller
    /// supports.
    pub(super) async fn open(
        core: &Core,
        association: &AssociationHandle<Q::Remote>,
    ) -> Result<ConnectedQueue<Q>, NvmeOpenError> {
        let qid = association.free_qids.alloc().ok_or(NvmeOpenError::NoFreeQueue(0))?;
        let qid = QidGuard { qid, qids: association.free_qids.clone() };
        let depth_max = association.entries_max.saturating_sub(1).clamp(1, Q::DEPTH_MAX - 1);
        let depth = association.options.queue_depth.clamp(1, depth_max);
        let AssociationHandle { remote, subnqn, options, cntlid, .. } = association;
        let queue = Q::connect(core, remote, depth + 1, QueuePurpose::Io(qid.qid), options)?;
        let (sqe, data) = connect_command(options, subnqn, qid.qid, depth + 1, *cntlid);
        let qid_number = qid.qid;
        let mut connection = ConnectedQueue { queue, reauthentication: None, _qid: qid };
        let deadline_ns = core.now_ns() + association.options.timeout_ns;
        let handshake_end_ns = core.now_ns() + association.options.handshake_ns();
        while !connection.queue.is_ready() {
            connection.queue.receive();
            if let Some(failure) = connection.queue.failure() {
                return Err(Q::connect_error(remote, failure));
            }
            if !connection.queue.is_ready() {
                connection.wait(core, Q::HANDSHAKE, handshake_end_ns).await?;
            }
        }
        let request = Request::new(Tag(0), Op::Flush, 0, 0);
        let completed = connection
            .execute(core, "Connect", sqe, request, (CommandData::None, &data), deadline_ns)
            .await?;
        if !completed.cqe.status.is_success() {
            return Err(NvmeOpenError::ConnectRejected(FabricsStatus(completed.cqe.status)));
        }
        let is_required = ConnectResponse::from_result(completed.cqe.result).authentication_required;
        // Before the keys: the admin queue may authenticate with newer ones from now on.
        connection.reauthentication = QueueReauthentication::new(association, qid_number, is_required);
        let mut messages =
            QueueMessages { connection: &mut connection, core, timeout_ns: options.timeout_ns };
        // With a key that the host's authentication has generated, it is authenticated.
        if is_required || !options.concat {
            let none = Concatenation::None;
            authenticate(&mut messages, qid_number, is_required, options, subnqn, none).await?;
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
        (data, inline_data): (CommandData, &[u8]),
        deadline_ns: u64,
    ) -> Result<FabricsCompletion, NvmeOpenError> {
        self.queue.submit(sqe, request, data, inline_data);
        self.queue.flush();
        let completed = loop {
            self.queue.receive();
            if let Some(completed) = self.queue.completions().pop() {
                break completed;
            }
            self.wait(core, what, deadline_ns).await?;
        };
        self.queue.failure().map_or(Ok(completed), |failure| Err(failure.into()))
    }

    /// Waits for an event of the core or the poll interval.
    async fn wait(&self, core: &Core, what: &'static str, deadline_ns: u64) -> Result<(), NvmeOpenError> {
        let now_ns = core.now_ns();
        if now_ns >= deadline_ns {
            return Err(NvmeOpenError::Timeout(what));
        }
        if self.queue.is_pending() {
            next_turn().await;
            return Ok(());
        }
        let event = std::pin::pin!(core.next_event());
        // Bounded, because a dropped timer stays registered until it expires, and a busy core has thousands
        // of events.
        let timeout = std::pin::pin!(core.sleep_ns((deadline_ns - now_ns).min(POLL_INTERVAL_NS)));
        race(event, timeout).await;
        Ok(())
    }
}

/// A connected queue as the carrier of an exchange, with the timeout of each command.
struct QueueMessages<'a, Q: FabricsQueue> {
    connection: &'a mut ConnectedQueue<Q>,
    core: &'a Core,
    timeout_ns: u64,
}

impl<Q: FabricsQueue> QueueMessages<'_, Q> {
    async fn execute(
        &mut self,
        what: &'static str,
        sqe: Sqe,
        request: Request<Data>,
        data: (CommandData, &[u8]),
    ) -> Result<Request<Data>, NvmeOpenError> {
        let deadline_ns = self.core.now_ns() + self.timeout_ns;
        let completed = self.connection.execute(self.core, what, sqe, request, data, deadline_ns).await?;
        match completed.cqe.status {
            status if status.is_success() => Ok(completed.request),
            status => Err(NvmeOpenError::Command(what, status)),
        }
    }
}

impl<Q: FabricsQueue> AuthQueue for QueueMessages<'_, Q> {
    async fn send(&mut self, sqe: Sqe, message: &[u8]) -> Result<(), NvmeOpenError> {
        let request = Request::new(Tag(0), Op::Flush, 0, 0);
        self.execute("Authentication Send", sqe, request, (CommandData::None, message)).await.map(drop)
    }

    async fn receive(&mut self, sqe: Sqe, bytes: usize) -> Result<Vec<u8>, NvmeOpenError> {
        const WHAT: &str = "Authentication Receive";
        let data = AdminData::In(bytes);
        let mut request = Request::new(Tag(0), Op::Flush, 0, 0);
        request.set_data(data.take_buffer(self.core.pool()).map_err(|error| error.while_opening(WHAT))?);
        let request = self.execute(WHAT, sqe, request, (CommandData::of(&data), &[])).await?;
        Ok(data.read_back(request.data().and_then(Data::single)))
    }
}

impl<R> AssociationHandle<R> {
    /// Connects a temporary I/O queue, executes one command on it and closes it.
    pub(crate) async fn execute_one<Q: FabricsQueue<Remote = R>>(
        &self,
        core: &Core,
        what: &'static str,
        sqe: Sqe,
        request: Request<Data>,
        data: &AdminData,
        deadline_ns: u64,
    ) -> Result<FabricsCompletion, NvmeOpenError> {
        let mut connection = ConnectedQueue::<Q>::open(core, self).await?;
        connection.execute(core, what, sqe, request, (CommandData::of(data), &[]), deadline_ns).await
    }
}

impl<Q: FabricsQueue> FabricsIoQueue<Q> {
    /// Connects an I/O queue for namespace `nsid`, whose Identify Namespace data is `identify`, and which has
    /// metadata of this format.
    pub async fn open_over(
        core: &Core,
        association: &AssociationHandle<Q::Remote>,
        nsid: u32,
        identify: &IdentifyNamespace,
        metadata: &MetadataFormat,
    ) -> Result<FabricsIoQueue<Q>, NvmeOpenError> {
        let info = FabricsNamespaceInfo::new(nsid, identify, metadata, association.mdts, association.oncs)?;
        let connection = ConnectedQueue::open(core, association).await?;
        let quiesced_ns = association.quiesced_ns.clone();
        let (core, stats) = (core.clone(), QueueStats::default());
        Ok(FabricsIoQueue { core, connection, info, nsid, refused: Vec::new(), stats, quiesced_ns })
    }

    /// Requests that can be submitted now; 0 after a failure.
    pub fn room(&self) -> usize {
        if self.connection.queue.failure().is_some() { 0 } else { self.connection.queue.free_slots() }
    }

    /// Fails the queue: requests in flight complete with [`Status::HOST_PATHING_ERROR`].
    pub fn fail(&mut self, failure: ControllerFailure) {
        if self.connection.queue.failure().is_none() {
            self.connection.queue.fail(failure);
        }
    }

    /// Advances the authentication with new keys.
    #[cold]
    fn reauthenticate(&mut self) {
        let ConnectedQueue { queue, reauthentication, .. } = &mut self.connection;
        let Some(reauthentication) = reauthentication else { return };
        while let Some(own) = take_own(queue) {
            reauthentication.completed(own, queue);
        }
        reauthentication.advance(queue, &self.core);
        // Of a queue that has failed just now.
        while let Some(own) = take_own(queue) {
            reauthentication.completed(own, queue);
        }
    }
}

/// Takes the completion of a command that the user has not submitted.
fn take_own<Q: FabricsQueue>(queue: &mut Q) -> Option<FabricsCompletion> {
    let completions = queue.completions();
    let index = completions.iter().position(|completed| is_own(&completed.request))?;
    Some(completions.remove(index))
}

impl<Q: FabricsQueue> IoQueue for FabricsIoQueue<Q> {
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
        self.connection.queue.failure()
    }

    /// A controller that closed the connection has stopped.
    fn quiesced_ns(&self) -> u64 {
        match self.connection.queue.failure() {
            Some(ControllerFailure::Detached) => self.quiesced_ns.load(Ordering::Acquire),
            _ => 0,
        }
    }

    fn detach(&mut self) {
        self.fail(ControllerFailure::Detached);
    }
}

impl<Q: FabricsQueue> Channel for FabricsIoQueue<Q> {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        if self.connection.queue.failure().is_some() {
            let refused = batch.drain(..).map(|request| request.complete(Status::HOST_PATHING_ERROR));
            self.refused.extend(refused);
            return;
        }
        let count = batch.len().min(self.connection.queue.free_slots());
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
        self.connection.queue.flush();
    }

    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        let before = sink.len();
        self.stats.arrivals += self.connection.queue.receive();
        if self.connection.reauthentication.as_ref().is_some_and(|one| one.is_due()) {
            self.reauthenticate();
        }
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
        if !self.refused.is_empty() || self.connection.queue.is_pending() {
            return Some(0);
        }
        self.connection.reauthentication.as_ref().and_then(|one| one.deadline_ns())
    }
}
