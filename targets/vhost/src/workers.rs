//! The workers of a connection, as the connection sees them.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use scsi::SessionNexuses;
use wire_vhost_user::{FrontendRequest, U64Payload, VringAddress, VringDescriptor, VringState};

use crate::connection::ClosingConnection;
use crate::controller::Controller;
use crate::device::VhostDevice;
use crate::limits::QUEUES_MAX;
use crate::links::CoreLinks;
use crate::requests::Request;
use crate::worker::{ConnectionPlace, WorkerExchange, WorkerRequest, WorkerResult, WorkerStart};

/// Which cores serve the virtqueues of a connection, and its workers there. The connection itself serves those of its own
/// core.
///
/// [`send`](Self::send) and [`send_to_all`](Self::send_to_all) ask workers for something,
/// [`are_done`](Self::are_done) says when all have answered. The front-end's next message is processed then.
pub(crate) struct Workers {
    links: Arc<CoreLinks>,
    place: ConnectionPlace,
    controller_id: u64,
    /// Indexes of the reactors that serve virtqueues, in turn. The first is the connection's own.
    reactors: Vec<usize>,
    /// The first virtqueue that may be on another core.
    first_spread: usize,
    /// What the virtqueues of a SCSI host have in common.
    nexuses: Arc<SessionNexuses>,
    workers: Vec<WorkerLink>,
    /// The answer to the last request of the front-end that was passed on.
    result: Option<WorkerResult>,
}

struct WorkerLink {
    exchange: Arc<WorkerExchange>,
    /// Requests without an answer.
    outstanding: usize,
}

impl Workers {
    pub(crate) fn new(
        links: Arc<CoreLinks>,
        place: ConnectionPlace,
        controller: &Controller,
        nexuses: Arc<SessionNexuses>,
    ) -> Workers {
        let mut reactors: Vec<usize> =
            controller.reactors.iter().copied().filter(|core| links.has(*core)).collect();
        match reactors.iter().position(|core| *core == place.core) {
            Some(own) => reactors.rotate_left(own),
            None => reactors = vec![place.core],
        }
        let (controller_id, first_spread) = (controller.id, controller.backend.first_spread_queue());
        let workers = Vec::new();
        Workers { links, place, controller_id, reactors, first_spread, nexuses, workers, result: None }
    }

    /// The core that serves a virtqueue.
    fn core_of(&self, queue: usize) -> usize {
        self.reactors[queue.saturating_sub(self.first_spread) % self.reactors.len()]
    }

    /// The other core that a request of the front-end concerns; `None` if it is executed here.
    pub(crate) fn route(&self, kind: FrontendRequest, payload: &[u8]) -> Option<usize> {
        use FrontendRequest as Kind;
        let queue = match kind {
            Kind::SetVringNum | Kind::SetVringBase | Kind::GetVringBase | Kind::SetVringEnable => {
                VringState::decode(payload).ok()?.index as usize
            }
            Kind::SetVringAddr => VringAddress::decode(payload).ok()?.index as usize,
            Kind::SetVringKick | Kind::SetVringCall | Kind::SetVringErr => {
                VringDescriptor::from_bits(U64Payload::decode(payload).ok()?.value).index.into()
            }
            _ => return None,
        };
        let core = self.core_of(queue);
        (queue < QUEUES_MAX && core != self.place.core).then_some(core)
    }

    /// Passes a request of the front-end to the worker of a core, which is started if there is none.
    #[cold]
    pub(crate) fn send(
        &mut self,
        core: usize,
        kind: FrontendRequest,
        request: Request<'_>,
        device: &VhostDevice,
    ) {
        let found = self.workers.iter().position(|worker| worker.exchange.core() == core);
        let index = found.unwrap_or_else(|| self.start(core, device));
        let Request { payload, descriptors } = request;
        let request = WorkerRequest::Frontend { kind, payload: payload.to_vec(), descriptors };
        self.push(index, request);
    }

    fn start(&mut self, core: usize, device: &VhostDevice) -> usize {
        let exchange = WorkerExchange::new(self.place, core);
        let (controller_id, nexuses) = (self.controller_id, self.nexuses.clone());
        let start = WorkerStart { controller_id, exchange: exchange.clone(), nexuses, flow: device.flow };
        self.workers.push(WorkerLink { exchange, outstanding: 0 });
        let index = self.workers.len() - 1;
        self.push(index, WorkerRequest::State(device.share_state()));
        self.links.start(core, start);
        index
    }

    fn push(&mut self, index: usize, request: WorkerRequest) {
        let worker = &mut self.workers[index];
        worker.outstanding += 1;
        worker.exchange.push(request);
        self.links.signal(worker.exchange.core());
    }

    /// Has all workers do what a request of the front-end, which was executed here, means for their virtqueues.
    pub(crate) fn send_to_all(&mut self, kind: FrontendRequest, device: &VhostDevice) {
        use FrontendRequest as Kind;
        if kind == Kind::ResetDevice {
            // Each core attaches new ones when its commands have ended, and the reply waits for all.
            self.nexuses.forget();
        }
        for index in 0..self.workers.len() {
            let request = match kind {
                Kind::SetFeatures
                | Kind::SetMemTable
                | Kind::AddMemReg
                | Kind::RemMemReg
                | Kind::SetConfig
                | Kind::SetLogBase
                | Kind::SetInflightFd => WorkerRequest::State(device.share_state()),
                Kind::ResetDevice => {
                    WorkerRequest::Frontend { kind, payload: Vec::new(), descriptors: Vec::new() }
                }
                _ => return,
            };
            self.push(index, request);
        }
    }

    /// Whether all workers have answered.
    pub(crate) fn are_done(&mut self) -> bool {
        for worker in self.workers.iter_mut().filter(|worker| worker.outstanding > 0) {
            let results = worker.exchange.take_results();
            worker.outstanding -= results.len();
            self.result = results.into_iter().last().or(self.result.take());
        }
        self.workers.iter().all(|worker| worker.outstanding == 0)
    }

    /// The answer to the request of the front-end that was passed on.
    pub(crate) fn take_result(&mut self) -> WorkerResult {
        self.result.take().unwrap_or(Ok(None))
    }

    /// Whether a virtqueue of a worker runs.
    pub(crate) fn any_running(&self) -> bool {
        self.workers.iter().any(|worker| worker.exchange.running() > 0)
    }

    /// Whether a worker does not serve any more.
    pub(crate) fn any_has_ended(&self) -> bool {
        self.workers.iter().any(|worker| worker.exchange.has_ended())
    }

    /// The connection is closed: ends the workers. `closing` counts those whose requests have not completed.
    pub(crate) fn close(&mut self, closing: &Arc<AtomicU32>) {
        for worker in self.workers.drain(..) {
            worker.exchange.close(ClosingConnection::new(closing));
            self.links.signal(worker.exchange.core());
        }
    }
}
