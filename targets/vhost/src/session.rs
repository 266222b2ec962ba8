//! The messages of a connection's front-end, and their replies.

use sockets::ByteStream;
use target_shell::{CloseReason, MoreToRead, Notice};
use wire_vhost_user::{FrontendRequest, ProtocolFeatures, U64Payload, VhostUserHeader};

use crate::device::{VhostContext, VhostDevice};
use crate::failure::{RequestError, VhostViolation};
use crate::limits::MESSAGES_PER_POLL_MAX;
use crate::messages::{FrontendMessage, FrontendMessages, ReplyPayload};
use crate::requests::{Outcome, ReplyCondition, Request};
use crate::workers::Workers;

/// The session of a front-end.
///
/// Requests are executed in order. One whose reply waits for devices, or for other cores, blocks those behind
/// it.
pub(crate) struct FrontendSession {
    messages: FrontendMessages,
    pending: Option<PendingReply>,
    pub(crate) workers: Workers,
    /// The front-end has not begun a session.
    pub(crate) awaits_login: bool,
    notice: Notice,
    /// Requests behind one that waited may have arrived.
    resumes_reading: bool,
}

/// A reply that waits: for this core, and for workers.
struct PendingReply {
    header: VhostUserHeader,
    own: OwnOutcome,
}

enum OwnOutcome {
    Waits(ReplyCondition),
    Done(Outcome),
    /// A worker executes the request.
    OfWorker,
}

impl FrontendSession {
    pub(crate) fn new(workers: Workers) -> FrontendSession {
        FrontendSession {
            messages: FrontendMessages::new(),
            pending: None,
            workers,
            awaits_login: true,
            notice: Notice::default(),
            resumes_reading: false,
        }
    }

    /// Receives and executes messages.
    pub(crate) fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        device: &mut VhostDevice,
        token: u64,
        context: &mut VhostContext<'_>,
    ) -> Result<MoreToRead, CloseReason<VhostViolation>> {
        let mut count = 0;
        while self.pending.is_none() {
            if count == MESSAGES_PER_POLL_MAX {
                return Ok(MoreToRead::Yes);
            }
            let Some(message) = self.messages.receive(stream)? else { break };
            count += 1;
            self.handle(message, device, token, context)?;
            self.messages.flush(stream)?;
        }
        Ok(MoreToRead::No)
    }

    fn handle(
        &mut self,
        message: FrontendMessage,
        device: &mut VhostDevice,
        token: u64,
        context: &mut VhostContext<'_>,
    ) -> Result<(), CloseReason<VhostViolation>> {
        let FrontendMessage { header, payload, descriptors } = message;
        let request = Request { payload: &payload, descriptors };
        let kind = FrontendRequest::from_wire(header.request).filter(|_| !header.is_reply);
        let Some(kind) = kind else { return self.reject(&header, RequestError::NotSupported, device) };
        if let Some(core) = self.workers.route(kind, &payload) {
            self.workers.send(core, kind, request, device);
            self.pending = Some(PendingReply { header, own: OwnOutcome::OfWorker });
            return self.finish_pending(device).map(|_| ());
        }
        if kind == FrontendRequest::SetFeatures && self.workers.any_running() {
            device.runs_elsewhere = true;
        }
        let result = device.execute(kind, request, context.pool, token, context.now_ns);
        device.runs_elsewhere = false;
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(reason) => return self.reject(&header, reason, device),
        };
        // Every front-end sets features before it uses the device; most set the owner when they connect.
        if self.awaits_login && device.has_session {
            self.awaits_login = false;
            self.notice.logged_in = true;
        }
        self.workers.send_to_all(kind, device);
        let own = match outcome {
            Outcome::Wait(condition) => OwnOutcome::Waits(condition),
            outcome => OwnOutcome::Done(outcome),
        };
        self.pending = Some(PendingReply { header, own });
        self.finish_pending(device).map(|_| ())
    }

    /// Queues the reply that waits if nothing is left to wait for. Returns whether it has.
    fn finish_pending(&mut self, device: &mut VhostDevice) -> Result<bool, CloseReason<VhostViolation>> {
        let Some(pending) = &mut self.pending else { return Ok(false) };
        if let OwnOutcome::Waits(condition) = &pending.own {
            let Some(outcome) = device.finish(condition) else { return Ok(false) };
            pending.own = OwnOutcome::Done(outcome);
        }
        if !self.workers.are_done() {
            return Ok(false);
        }
        let result = self.workers.take_result();
        let Some(PendingReply { header, own }) = self.pending.take() else { return Ok(false) };
        match (own, result) {
            (OwnOutcome::Done(Outcome::Reply(reply)), _) => self.messages.push(&header, reply)?,
            (OwnOutcome::OfWorker, Ok(Some(bytes))) => {
                self.messages.push(&header, ReplyPayload { bytes, descriptor: None })?;
            }
            (OwnOutcome::OfWorker, Err(reason)) => self.reject(&header, reason, device)?,
            _ => self.acknowledge(&header, 0, device)?,
        }
        Ok(true)
    }

    /// Rejects a request: a front-end that has not asked for an acknowledgement is disconnected.
    fn reject(
        &mut self,
        header: &VhostUserHeader,
        reason: RequestError,
        device: &VhostDevice,
    ) -> Result<(), CloseReason<VhostViolation>> {
        let request = header.request;
        if !acknowledges(header, device) {
            return Err(CloseReason::Protocol(VhostViolation::Rejected { request, reason }));
        }
        log::warn!(target: "vhost", "{}: request {request} is rejected: {reason}", device.controller.name);
        self.acknowledge(header, 1, device)
    }

    fn acknowledge(
        &mut self,
        header: &VhostUserHeader,
        value: u64,
        device: &VhostDevice,
    ) -> Result<(), CloseReason<VhostViolation>> {
        if !acknowledges(header, device) {
            return Ok(());
        }
        let bytes = U64Payload { value }.to_bytes().to_vec();
        self.messages.push(header, ReplyPayload { bytes, descriptor: None })
    }

    /// Sends replies.
    #[inline]
    pub(crate) fn flush<S: ByteStream>(
        &mut self,
        stream: &mut S,
        device: &mut VhostDevice,
    ) -> Result<(), CloseReason<VhostViolation>> {
        if self.pending.is_some() {
            self.resumes_reading |= self.finish_pending(device)?;
        }
        if self.messages.are_sent() { Ok(()) } else { self.messages.flush(stream) }
    }

    /// Whether messages behind one that waited are to be read.
    #[inline]
    pub(crate) fn resumes_reading(&self) -> bool {
        self.resumes_reading
    }

    pub(crate) fn take_resumes_reading(&mut self) -> bool {
        std::mem::take(&mut self.resumes_reading)
    }

    /// Whether a reply waits.
    #[inline]
    pub(crate) fn is_waiting(&self) -> bool {
        self.pending.is_some()
    }

    pub(crate) fn take_notice(&mut self) -> Notice {
        std::mem::take(&mut self.notice)
    }
}

fn acknowledges(header: &VhostUserHeader, device: &VhostDevice) -> bool {
    header.needs_reply && device.protocol_features.contains(ProtocolFeatures::REPLY_ACK)
}
