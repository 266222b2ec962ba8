//! A connection of a front-end.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use scsi::{CoreEvents, TaskAbort};
use sockets::ByteStream;
use target_shell::{CloseReason, MoreToRead, Notice, Polling, ProtocolConnection};
use wire_vhost_user::{FrontendRequest, Header, ProtocolFeatures, U64Payload};

use crate::controller::{Controller, VhostConfig};
use crate::core::{Notifications, VhostCore};
use crate::device::{VhostContext, VhostDevice};
use crate::failure::{RequestError, VhostViolation};
use crate::info::VhostSessionInfo;
use crate::limits::MESSAGES_PER_POLL_MAX;
use crate::messages::{FrontendMessage, FrontendMessages, ReplyPayload};
use crate::requests::{Outcome, ReplyCondition, Request};

/// A connection: messages, and the [`VhostDevice`] that they control.
///
/// Requests are executed in order. One whose reply waits for devices blocks those behind it.
pub(crate) struct VhostConnection {
    token: u64,
    messages: FrontendMessages,
    device: VhostDevice,
    pending: Option<(Header, ReplyCondition)>,
    /// The front-end has not begun a session.
    awaits_login: bool,
    notice: Notice,
    /// Requests behind one that waited may have arrived.
    resumes_reading: bool,
    /// A driver has notified.
    is_notified: bool,
    is_draining: bool,
    /// It is closed for this reason as soon as possible.
    violation: Option<VhostViolation>,
    /// It is closed, with requests in flight.
    closing: Option<ClosingConnection>,
}

/// Counts a closed connection until its last request has completed.
struct ClosingConnection(Arc<AtomicU32>);

impl ClosingConnection {
    fn new(count: &Arc<AtomicU32>) -> ClosingConnection {
        count.fetch_add(1, Ordering::Release);
        ClosingConnection(count.clone())
    }
}

impl Drop for ClosingConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl VhostConnection {
    pub(crate) fn new(
        controller: Arc<Controller>,
        notifications: Rc<Notifications>,
        events: &Arc<CoreEvents>,
        token: u64,
        flow: u16,
        now_ns: u64,
    ) -> VhostConnection {
        VhostConnection {
            token,
            messages: FrontendMessages::new(),
            device: VhostDevice::new(controller, notifications, events, flow, now_ns),
            pending: None,
            awaits_login: true,
            notice: Notice::default(),
            resumes_reading: false,
            is_notified: false,
            is_draining: false,
            violation: None,
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

    /// What the control plane reports of it.
    pub(crate) fn session(&self) -> VhostSessionInfo {
        VhostSessionInfo {
            id: self.token,
            is_started: self.device.queues.iter().any(|queue| queue.ring.is_some()),
            queues: self.device.queues.len(),
            requests: self.device.in_flight(),
        }
    }

    /// A driver has notified.
    pub(crate) fn on_notification(&mut self) {
        self.is_notified = true;
    }

    /// Something of other cores has changed for tasks.
    pub(crate) fn on_task_event(&mut self, aborts: &[TaskAbort], is_closed: bool) {
        self.device.on_task_event(aborts, is_closed);
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
            self.violation = Some(VhostViolation::Truncated);
        }
        is_poisoned
    }

    fn handle(
        &mut self,
        message: FrontendMessage,
        context: &mut VhostContext<'_>,
    ) -> Result<(), CloseReason<VhostViolation>> {
        let FrontendMessage { header, payload, descriptors } = message;
        let request = Request { payload: &payload, descriptors };
        let result = match FrontendRequest::from_wire(header.request).filter(|_| !header.is_reply) {
            Some(kind) => self.device.execute(kind, request, context.pool, self.token, context.now_ns),
            None => Err(RequestError::NotSupported),
        };
        // Every front-end sets features before it uses the device; most set the owner when they connect.
        if self.awaits_login && result.is_ok() && self.device.has_session {
            self.awaits_login = false;
            self.notice.logged_in = true;
        }
        match result {
            Ok(Outcome::Wait(condition)) => {
                self.pending = Some((header, condition));
                self.finish_pending().map(|_| ())
            }
            Ok(Outcome::Reply(reply)) => self.messages.push(&header, reply),
            Ok(Outcome::Done) => self.acknowledge(&header, 0),
            Err(reason) if self.acknowledges(&header) => {
                log::warn!(
                    target: "vhost",
                    "{}: request {} is rejected: {reason}",
                    self.device.controller.name,
                    header.request
                );
                self.acknowledge(&header, 1)
            }
            Err(reason) => {
                let request = header.request;
                Err(CloseReason::Protocol(VhostViolation::Rejected { request, reason }))
            }
        }
    }

    fn acknowledges(&self, header: &Header) -> bool {
        header.needs_reply && self.device.protocol_features.contains(ProtocolFeatures::REPLY_ACK)
    }

    fn acknowledge(&mut self, header: &Header, value: u64) -> Result<(), CloseReason<VhostViolation>> {
        if !self.acknowledges(header) {
            return Ok(());
        }
        let bytes = U64Payload { value }.to_bytes().to_vec();
        self.messages.push(header, ReplyPayload { bytes, descriptor: None })
    }

    /// Queues the reply that waits if its condition is met. Returns whether it was.
    fn finish_pending(&mut self) -> Result<bool, CloseReason<VhostViolation>> {
        let Some((header, condition)) = &self.pending else { return Ok(false) };
        let Some(outcome) = self.device.finish(condition) else { return Ok(false) };
        let header = *header;
        self.pending = None;
        match outcome {
            Outcome::Reply(reply) => self.messages.push(&header, reply)?,
            Outcome::Done | Outcome::Wait(_) => self.acknowledge(&header, 0)?,
        }
        Ok(true)
    }
}

impl ProtocolConnection<VhostCore> for VhostConnection {
    fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        _scratch: &mut [u8],
        context: &mut VhostContext<'_>,
    ) -> Result<MoreToRead, CloseReason<VhostViolation>> {
        let mut count = 0;
        while self.pending.is_none() && !self.is_draining {
            if count == MESSAGES_PER_POLL_MAX {
                return Ok(MoreToRead::Yes);
            }
            let Some(message) = self.messages.receive(stream)? else { break };
            count += 1;
            self.handle(message, context)?;
            self.messages.flush(stream)?;
        }
        Ok(MoreToRead::No)
    }

    fn resume(&mut self, context: &mut VhostContext<'_>) -> Result<MoreToRead, CloseReason<VhostViolation>> {
        if std::mem::take(&mut self.is_notified) && !self.is_draining {
            self.device.poll(context);
        }
        self.device.resume(context);
        Ok(if std::mem::take(&mut self.resumes_reading) { MoreToRead::Yes } else { MoreToRead::No })
    }

    #[inline]
    fn complete_in_place(&mut self, completions: &[bdev::Completion]) -> bool {
        let completes = self.device.completes_in_place();
        if completes {
            completions.iter().for_each(|completion| self.device.complete_in_place(completion));
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
        if let Some(violation) = self.violation.take() {
            return Err(CloseReason::Protocol(violation));
        }
        self.device.publish();
        if self.pending.is_some() {
            self.resumes_reading |= self.finish_pending()?;
        }
        if self.messages.are_sent() { Ok(()) } else { self.messages.flush(stream) }
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
        self.resumes_reading || self.is_notified || self.device.wants_resume()
    }

    #[inline]
    fn is_waiting(&self) -> bool {
        self.pending.is_some() || self.device.is_waiting()
    }

    #[inline]
    fn is_draining(&self) -> bool {
        self.is_draining
    }

    fn take_notice(&mut self) -> Notice {
        std::mem::take(&mut self.notice)
    }

    fn awaits_login(&self) -> bool {
        self.awaits_login
    }

    fn begin_drain(&mut self) {
        self.is_draining = true;
    }

    fn is_drained(&self) -> bool {
        self.device.in_flight() == 0
    }

    /// Releases the client's memory and eventfds.
    fn on_close(&mut self) -> bool {
        if self.device.in_flight() > 0 {
            self.closing = Some(ClosingConnection::new(&self.device.controller.closing));
        }
        self.device.release();
        false
    }
}
