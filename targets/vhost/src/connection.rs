//! A connection of a front-end, or a worker of one.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use scsi::{CoreEvents, SessionNexuses, TaskManagement};
use sockets::ByteStream;
use target_shell::{CloseReason, MoreToRead, Notice, Polling, ProtocolConnection};

use crate::controller::{Controller, VhostConfig};
use crate::core::{Notifications, VhostCore};
use crate::device::{VhostContext, VhostDevice};
use crate::failure::VhostViolation;
use crate::info::SessionShare;
use crate::session::FrontendSession;
use crate::worker::{ConnectionPlace, Worker, WorkerEvent};

/// A connection of a core: the [`VhostDevice`] with the virtqueues that the core serves, and what controls it.
pub(crate) struct VhostConnection {
    token: u64,
    device: VhostDevice,
    role: Role,
    /// A driver has notified.
    is_notified: bool,
    is_draining: bool,
    /// It is closed for this reason as soon as possible.
    end: Option<CloseReason<VhostViolation>>,
    /// It is closed, with requests in flight.
    closing: Option<ClosingConnection>,
}

/// What controls a device.
enum Role {
    /// The messages of a front-end.
    Session(Box<FrontendSession>),
    /// A session on another core.
    Worker(Worker),
}

/// Counts a closed connection until its last request has completed.
pub(crate) struct ClosingConnection(Arc<AtomicU32>);

impl ClosingConnection {
    pub(crate) fn new(count: &Arc<AtomicU32>) -> ClosingConnection {
        count.fetch_add(1, Ordering::Release);
        ClosingConnection(count.clone())
    }
}

impl Drop for ClosingConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// What a new connection belongs to.
pub(crate) struct NewConnection<'a> {
    pub(crate) controller: Arc<Controller>,
    pub(crate) notifications: Rc<Notifications>,
    pub(crate) events: &'a Arc<CoreEvents>,
    pub(crate) nexuses: Arc<SessionNexuses>,
    pub(crate) token: u64,
    pub(crate) flow: u16,
    pub(crate) now_ns: u64,
}

impl VhostConnection {
    /// The connection of a front-end.
    pub(crate) fn of_session(new: NewConnection<'_>, session: FrontendSession) -> VhostConnection {
        VhostConnection::new(new, Role::Session(Box::new(session)))
    }

    /// A worker of a connection on another core.
    pub(crate) fn of_worker(new: NewConnection<'_>, worker: Worker) -> VhostConnection {
        VhostConnection::new(new, Role::Worker(worker))
    }

    fn new(new: NewConnection<'_>, role: Role) -> VhostConnection {
        VhostConnection {
            token: new.token,
            device: VhostDevice::new(&new, matches!(role, Role::Worker(_))),
            role,
            is_notified: false,
            is_draining: false,
            end: None,
            closing: None,
        }
    }

    /// Identifies it on its core.
    pub(crate) fn token(&self) -> u64 {
        self.token
    }

    /// Identifier of its controller.
    pub(crate) fn controller_id(&self) -> u64 {
        self.device.controller.id
    }

    /// What the control plane reports of it; `core` is its own.
    pub(crate) fn share(&self, core: usize) -> SessionShare {
        let (place, is_worker) = match &self.role {
            Role::Session(_) => (ConnectionPlace { core, token: self.token }, false),
            Role::Worker(worker) => (worker.exchange().home(), true),
        };
        let running = self.device.queues.iter().enumerate().filter(|(_, queue)| queue.ring.is_some());
        SessionShare {
            controller_id: self.controller_id(),
            place,
            is_worker,
            core,
            running: running.map(|(index, _)| index).collect(),
            queues: self.device.queues.len(),
            requests: self.device.in_flight(),
        }
    }

    /// A driver has notified.
    pub(crate) fn on_notification(&mut self) {
        self.is_notified = true;
    }

    /// Another core has something for a connection of this core.
    pub(crate) fn on_signal(&mut self) {
        match &mut self.role {
            Role::Session(session) => {
                if session.workers.any_has_ended() && !self.is_draining {
                    // The worker's core has logged why, unless it stops.
                    self.end = Some(CloseReason::Closed);
                }
            }
            Role::Worker(worker) => {
                let event = worker.on_signal();
                self.on_worker_event(event);
            }
        }
    }

    /// A worker has found something.
    pub(crate) fn on_worker_event(&mut self, event: WorkerEvent) {
        if let WorkerEvent::Closed(closing) = event {
            self.closing = Some(closing);
            self.end = Some(CloseReason::Closed);
        }
    }

    /// Something of other cores has changed for tasks.
    pub(crate) fn on_task_event(&mut self, functions: &[TaskManagement], is_closed: bool) {
        self.device.on_task_event(functions, is_closed);
        // They concern commands that were not fetched, too.
        self.is_notified |= !functions.is_empty() && !is_closed;
    }

    /// Applies a configuration. Returns whether anything has changed.
    pub(crate) fn apply(&mut self, config: &VhostConfig) -> bool {
        match config.by_id(self.device.controller.id) {
            None => {
                self.begin_drain();
                true
            }
            Some(controller) => {
                let has_changed = !Arc::ptr_eq(controller, &self.device.controller);
                if has_changed {
                    self.device.update_controller(controller);
                    // There may be an event for the driver.
                    self.is_notified = true;
                }
                has_changed
            }
        }
    }

    /// Ends the connection if its client has truncated memory. Returns whether it has.
    pub(crate) fn check_memory(&mut self) -> bool {
        let is_poisoned = self.device.is_poisoned();
        if is_poisoned {
            self.end = Some(CloseReason::Protocol(VhostViolation::Truncated));
        }
        is_poisoned
    }
}

impl ProtocolConnection<VhostCore> for VhostConnection {
    fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        _scratch: &mut [u8],
        context: &mut VhostContext<'_>,
    ) -> Result<MoreToRead, CloseReason<VhostViolation>> {
        match &mut self.role {
            Role::Session(session) if !self.is_draining => {
                session.receive(stream, &mut self.device, self.token, context)
            }
            // A worker has no stream.
            _ => Ok(MoreToRead::No),
        }
    }

    fn resume(&mut self, context: &mut VhostContext<'_>) -> Result<MoreToRead, CloseReason<VhostViolation>> {
        let mut more = MoreToRead::No;
        match &mut self.role {
            Role::Session(session) => {
                if session.take_resumes_reading() {
                    more = MoreToRead::Yes;
                }
            }
            Role::Worker(worker) if worker.wants_resume() && !self.is_draining => {
                let executed = worker.execute(&mut self.device, self.token, context);
                executed.map_err(CloseReason::Protocol)?;
            }
            Role::Worker(_) => {}
        }
        let is_notified = std::mem::take(&mut self.is_notified);
        if self.is_draining {
            // Nothing is fetched any more.
            self.device.cancel_scan();
        } else if is_notified || self.device.is_scanning() {
            self.device.poll(context);
        }
        self.device.resume(context);
        Ok(more)
    }

    #[inline]
    fn complete_in_place(&mut self, completions: &[bdev::Completion]) -> bool {
        let completes = self.device.completes_in_place();
        if completes {
            self.device.complete_in_place(completions);
        }
        completes
    }

    #[inline]
    fn complete(&mut self, tag: u64, completion: bdev::Completion) {
        self.device.complete(tag, completion);
    }

    /// Publishes used chains, and sends replies.
    #[inline]
    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<VhostViolation>> {
        if let Some(reason) = self.end.take() {
            return Err(reason);
        }
        self.device.publish();
        match &mut self.role {
            Role::Session(session) => session.flush(stream, &mut self.device),
            Role::Worker(worker) => {
                worker.finish_current(&mut self.device);
                Ok(())
            }
        }
    }

    #[inline]
    fn polling(&self) -> Polling {
        if self.is_draining { Polling::Off } else { self.device.polling() }
    }

    /// Fetches requests.
    #[inline]
    fn poll(&mut self, context: &mut VhostContext<'_>) -> usize {
        if self.is_draining { 0 } else { self.device.poll(context) }
    }

    #[inline]
    fn wants_resume(&self) -> bool {
        let is_asked = match &self.role {
            Role::Session(session) => session.resumes_reading(),
            Role::Worker(worker) => worker.wants_resume() && !self.is_draining,
        };
        is_asked || self.is_notified || self.device.wants_resume()
    }

    #[inline]
    fn is_waiting(&self) -> bool {
        let is_waiting = match &self.role {
            Role::Session(session) => session.is_waiting(),
            Role::Worker(worker) => worker.is_waiting(),
        };
        is_waiting || self.device.is_waiting()
    }

    #[inline]
    fn is_draining(&self) -> bool {
        self.is_draining
    }

    fn take_notice(&mut self) -> Notice {
        match &mut self.role {
            Role::Session(session) => session.take_notice(),
            Role::Worker(_) => Notice::default(),
        }
    }

    /// The controller.
    fn object(&self) -> Option<u64> {
        Some(self.device.controller.id)
    }

    /// The virtual machine, by its controller.
    fn tenant(&self) -> Option<String> {
        Some(format!("vhost {}", self.device.controller.name))
    }

    fn awaits_login(&self) -> bool {
        matches!(&self.role, Role::Session(session) if session.awaits_login)
    }

    fn begin_drain(&mut self) {
        self.is_draining = true;
    }

    fn is_drained(&self) -> bool {
        self.device.in_flight() == 0
    }

    /// Releases the client's memory and eventfds.
    fn on_close(&mut self) -> bool {
        let closing = &self.device.controller.closing;
        if self.device.in_flight() > 0 && self.closing.is_none() {
            self.closing = Some(ClosingConnection::new(closing));
        }
        match &mut self.role {
            Role::Session(session) => session.workers.close(closing),
            Role::Worker(worker) => worker.end(),
        }
        self.device.release();
        false
    }
}
