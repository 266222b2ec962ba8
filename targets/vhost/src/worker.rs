//! A worker: the virtqueues of a connection that another core serves than the one that the connection is on.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use scsi::SessionNexuses;
use wire_vhost_user::FrontendRequest;

use crate::connection::ClosingConnection;
use crate::device::{VhostContext, VhostDevice};
use crate::device_state::DeviceState;
use crate::failure::{RequestError, VhostViolation};
use crate::links::CoreLinks;
use crate::requests::{Outcome, ReplyCondition, Request};

/// What the connection asks its worker for.
pub(crate) enum WorkerRequest {
    /// To have this state.
    State(DeviceState),
    /// To execute a request of the front-end, which concerns one virtqueue of the worker, or all.
    Frontend { kind: FrontendRequest, payload: Vec<u8>, descriptors: Vec<OwnedFd> },
}

/// A worker's answer: the payload of the reply to the front-end, if the request has one.
pub(crate) type WorkerResult = Result<Option<Vec<u8>>, RequestError>;

/// Where a connection and one of its workers find what they have for each other. The one that puts something there
/// [signals](CoreLinks::signal) the other's core.
pub(crate) struct WorkerExchange {
    home: ConnectionPlace,
    core: usize,
    state: Mutex<ExchangeState>,
    /// Virtqueues that run.
    running: AtomicU32,
}

/// Identifies a connection in the target: its core, and its token there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionPlace {
    pub(crate) core: usize,
    pub(crate) token: u64,
}

/// Requests are few: the connection waits for the answers before it processes the next message.
#[derive(Default)]
struct ExchangeState {
    requests: VecDeque<WorkerRequest>,
    results: Vec<WorkerResult>,
    /// The connection is closed; the worker counts as a closing connection until its last request has completed.
    closing: Option<ClosingConnection>,
    /// The worker does not serve any more.
    has_ended: bool,
}

/// A worker to start on a core.
pub(crate) struct WorkerStart {
    pub(crate) controller_id: u64,
    pub(crate) exchange: Arc<WorkerExchange>,
    pub(crate) nexuses: Arc<SessionNexuses>,
    /// The connection's: its requests are for one tenant on all cores.
    pub(crate) flow: u16,
}

impl WorkerExchange {
    pub(crate) fn new(home: ConnectionPlace, core: usize) -> Arc<WorkerExchange> {
        Arc::new(WorkerExchange { home, core, state: Mutex::default(), running: AtomicU32::new(0) })
    }

    /// The connection.
    pub(crate) fn home(&self) -> ConnectionPlace {
        self.home
    }

    /// The worker's core.
    pub(crate) fn core(&self) -> usize {
        self.core
    }

    /// Virtqueues that run, as of the last answer.
    pub(crate) fn running(&self) -> u32 {
        self.running.load(Ordering::Acquire)
    }

    pub(crate) fn push(&self, request: WorkerRequest) {
        sync::lock(&self.state).requests.push_back(request);
    }

    /// The answers since the last call.
    pub(crate) fn take_results(&self) -> Vec<WorkerResult> {
        std::mem::take(&mut sync::lock(&self.state).results)
    }

    /// The connection is closed.
    pub(crate) fn close(&self, closing: ClosingConnection) {
        sync::lock(&self.state).closing = Some(closing);
    }

    /// The worker does not serve any more, or could not be started.
    pub(crate) fn end(&self, links: &CoreLinks) {
        sync::lock(&self.state).has_ended = true;
        links.signal(self.home.core);
    }

    pub(crate) fn has_ended(&self) -> bool {
        sync::lock(&self.state).has_ended
    }
}

/// The worker's side: it executes what the connection asks for, in order.
pub(crate) struct Worker {
    exchange: Arc<WorkerExchange>,
    links: Arc<CoreLinks>,
    /// What the answer to the current request waits for.
    current: Option<ReplyCondition>,
    /// There may be requests.
    is_asked: bool,
}

/// What a worker has found in its exchange.
pub(crate) enum WorkerEvent {
    /// There may be requests.
    Requests,
    /// The connection is closed. To be dropped with the worker.
    Closed(ClosingConnection),
}

impl Worker {
    pub(crate) fn new(exchange: Arc<WorkerExchange>, links: Arc<CoreLinks>) -> Worker {
        Worker { exchange, links, current: None, is_asked: true }
    }

    pub(crate) fn exchange(&self) -> &WorkerExchange {
        &self.exchange
    }

    /// Its core was signalled.
    pub(crate) fn on_signal(&mut self) -> WorkerEvent {
        self.is_asked = true;
        let closing = sync::lock(&self.exchange.state).closing.take();
        closing.map_or(WorkerEvent::Requests, WorkerEvent::Closed)
    }

    /// Whether [`execute`](Self::execute) has something to do.
    #[inline]
    pub(crate) fn wants_resume(&self) -> bool {
        self.is_asked
    }

    /// Whether an answer waits for devices.
    #[inline]
    pub(crate) fn is_waiting(&self) -> bool {
        self.current.is_some()
    }

    /// Executes requests, until one has to wait.
    ///
    /// # Errors
    /// The core has no room for the state.
    #[cold]
    pub(crate) fn execute(
        &mut self,
        device: &mut VhostDevice,
        token: u64,
        context: &mut VhostContext<'_>,
    ) -> Result<(), VhostViolation> {
        self.is_asked = false;
        self.finish_current(device);
        while self.current.is_none() {
            let request = sync::lock(&self.exchange.state).requests.pop_front();
            let Some(request) = request else { break };
            let result = match request {
                WorkerRequest::State(state) => {
                    let removed = device.apply_state(state, context.pool, context.now_ns);
                    let removed = removed.map_err(VhostViolation::Memory)?;
                    Ok(Outcome::Wait(ReplyCondition::MemoryUnused(removed)))
                }
                WorkerRequest::Frontend { kind, payload, descriptors } => {
                    let request = Request { payload: &payload, descriptors };
                    device.execute(kind, request, context.pool, token, context.now_ns)
                }
            };
            match result {
                Ok(Outcome::Wait(condition)) => {
                    self.current = Some(condition);
                    self.finish_current(device);
                }
                Ok(outcome) => self.answer(device, Ok(outcome)),
                Err(error) => self.answer(device, Err(error)),
            }
        }
        Ok(())
    }

    /// Answers the current request if what it waits for has happened.
    pub(crate) fn finish_current(&mut self, device: &mut VhostDevice) {
        let Some(condition) = &self.current else { return };
        if let Some(outcome) = device.finish(condition) {
            self.current = None;
            self.is_asked = true;
            self.answer(device, Ok(outcome));
        }
    }

    fn answer(&self, device: &VhostDevice, result: Result<Outcome, RequestError>) {
        let result = result.map(|outcome| match outcome {
            Outcome::Reply(reply) => Some(reply.bytes),
            Outcome::Done | Outcome::Wait(_) => None,
        });
        self.exchange.running.store(device.running() as u32, Ordering::Release);
        sync::lock(&self.exchange.state).results.push(result);
        self.links.signal(self.exchange.home.core);
    }

    /// Its stream of requests has ended: it is closed.
    pub(crate) fn end(&self) {
        self.exchange.end(&self.links);
    }
}
