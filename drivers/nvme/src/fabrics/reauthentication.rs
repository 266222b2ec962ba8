//! Authentication of a connected I/O queue with new keys, while its commands are in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block_io::{Op, Request, Tag};
use dma::Data;
use nvme_auth::{AuthParties, HostAction, HostAuth, HostAuthError, Nonces, SystemNonces};
use reactor::Core;
use wire_nvme::auth::{AUTH_MESSAGE_MAX, AuthCommand};

use super::association::AssociationHandle;
use super::connect::hostnqn;
use super::queue::{CommandData, FabricsCompletion, FabricsQueue};
use crate::error::ControllerFailure;
use crate::host_credentials::HostCredentials;
use crate::shared::AdminData;

/// Interval at which a step is tried again for which there was no buffer.
const RETRY_NS: u64 = 1_000_000;

/// The exchanges with which an I/O queue authenticates anew after its admin queue has, with new keys of the
/// host (Base 2.0, section 8.13).
///
/// The queue asks [`is_due`](Self::is_due) in each poll, which costs a load. If so it passes the completions
/// of [its own](is_own) commands to [`completed`](Self::completed) and calls [`advance`](Self::advance),
/// which submits the next one between those of the user. An exchange that fails, or that the controller does
/// not answer in time, fails the queue.
pub(super) struct QueueReauthentication {
    credentials: HostCredentials,
    parties: AuthParties,
    qid: u16,
    /// The controller demands authentication.
    is_required: bool,
    timeout_ns: u64,
    /// Of the association.
    authenticated_keys: Arc<AtomicU64>,
    /// What that was at the last exchange.
    generation: u64,
    exchange: Option<Exchange>,
    /// A command of this, or of an exchange that has failed, is in flight.
    in_flight: bool,
}

struct Exchange {
    host: HostAuth,
    next: Step,
    deadline_ns: u64,
    /// When a step is tried again that found no buffer.
    retry_ns: Option<u64>,
}

enum Step {
    /// Send the message, with which the exchange ends or does not.
    Send(Vec<u8>, Ending),
    /// The message is being sent.
    Sending(Ending),
    /// Receive the controller's message.
    Receive,
    /// It is being received.
    Receiving,
}

enum Ending {
    None,
    Authenticated,
    Failed(HostAuthError),
}

/// The request of a command of an exchange. No user has one with this range.
fn own_request() -> Request<Data> {
    Request::new(Tag(u64::MAX), Op::Flush, u64::MAX, u32::MAX)
}

/// Whether a request is that of a command of an exchange.
pub(super) fn is_own(request: &Request<Data>) -> bool {
    request.op == Op::Flush
        && (request.tag, request.lba, request.blocks) == (Tag(u64::MAX), u64::MAX, u32::MAX)
}

impl QueueReauthentication {
    /// Of a queue whose Connect has succeeded, before it authenticates; `None` if its host has no
    /// credentials.
    pub(super) fn new<R>(
        association: &AssociationHandle<R>,
        qid: u16,
        is_required: bool,
    ) -> Option<Box<QueueReauthentication>> {
        let AssociationHandle { options, subnqn, authenticated_keys, .. } = association;
        // I/O queues with a generated key do not authenticate.
        let credentials = options.authentication.clone().filter(|_| is_required || !options.concat)?;
        Some(Box::new(QueueReauthentication {
            generation: authenticated_keys.load(Ordering::Acquire),
            authenticated_keys: authenticated_keys.clone(),
            credentials,
            parties: AuthParties::new(hostnqn(options).as_str(), subnqn.as_str()),
            qid,
            is_required,
            timeout_ns: options.timeout_ns,
            exchange: None,
            in_flight: false,
        }))
    }

    /// Whether the admin queue has authenticated with other keys, there is an exchange, or what is left of
    /// one.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        self.exchange.is_some() || self.in_flight || self.admin_generation() != self.generation
    }

    #[inline]
    fn admin_generation(&self) -> u64 {
        self.authenticated_keys.load(Ordering::Acquire)
    }

    /// When [`advance`](Self::advance) is due, if there is an exchange.
    pub(super) fn deadline_ns(&self) -> Option<u64> {
        let exchange = self.exchange.as_ref()?;
        Some(exchange.retry_ns.unwrap_or(exchange.deadline_ns).min(exchange.deadline_ns))
    }

    /// Begins an exchange if there are new keys, and submits its next command if the queue has a slot.
    pub(super) fn advance<Q: FabricsQueue>(&mut self, queue: &mut Q, core: &Core) {
        if queue.failure().is_some() {
            self.exchange = None;
            self.generation = self.admin_generation();
            return;
        }
        let now_ns = core.now_ns();
        let has_new_keys = self.admin_generation() != self.generation;
        if has_new_keys && self.exchange.is_none() && !self.in_flight {
            self.begin(queue, now_ns);
        }
        let Some(exchange) = &mut self.exchange else { return };
        if now_ns >= exchange.deadline_ns {
            return self.fail(queue, "the controller did not answer in time");
        }
        if queue.is_full() {
            return;
        }
        match std::mem::replace(&mut exchange.next, Step::Receiving) {
            Step::Send(message, ending) => {
                let sqe = AuthCommand::new(message.len() as u32).to_send();
                queue.submit(sqe, own_request(), CommandData::None, &message);
                (exchange.next, self.in_flight) = (Step::Sending(ending), true);
            }
            Step::Receive => {
                let data = AdminData::In(AUTH_MESSAGE_MAX);
                let Ok(buffer) = data.take_buffer(core.pool()) else {
                    (exchange.next, exchange.retry_ns) = (Step::Receive, Some(now_ns + RETRY_NS));
                    return;
                };
                exchange.retry_ns = None;
                let mut request = own_request();
                request.set_data(buffer);
                let sqe = AuthCommand::new(AUTH_MESSAGE_MAX as u32).to_receive();
                queue.submit(sqe, request, CommandData::of(&data), &[]);
                self.in_flight = true;
            }
            waiting @ (Step::Sending(_) | Step::Receiving) => exchange.next = waiting,
        }
        queue.flush();
    }

    fn begin<Q: FabricsQueue>(&mut self, queue: &mut Q, now_ns: u64) {
        // Before the keys: with those that are set meanwhile the admin queue has yet to authenticate.
        self.generation = self.admin_generation();
        let Some(keys) = self.credentials.keys() else { return };
        if !self.is_required && keys.controller.is_none() {
            return;
        }
        let Ok(transaction) = SystemNonces.sequence() else {
            return self.fail(queue, "the system has no random numbers");
        };
        let (parties, accepted) = (self.parties.clone(), self.credentials.options());
        let (host, message) = HostAuth::new(keys, parties, accepted, transaction as u16);
        self.exchange = Some(Exchange {
            host,
            next: Step::Send(message, Ending::None),
            deadline_ns: now_ns + self.timeout_ns,
            retry_ns: None,
        });
    }

    /// Takes the completion of a command of an exchange.
    pub(super) fn completed<Q: FabricsQueue>(&mut self, completed: FabricsCompletion, queue: &mut Q) {
        self.in_flight = false;
        // Of a queue that has failed, every command completes.
        let Some(exchange) = self.exchange.as_mut().filter(|_| queue.failure().is_none()) else { return };
        let status = completed.cqe.status;
        if !status.is_success() {
            return self.fail(queue, status);
        }
        match std::mem::replace(&mut exchange.next, Step::Receive) {
            Step::Sending(Ending::None) => {}
            Step::Sending(Ending::Authenticated) => self.succeed(),
            Step::Sending(Ending::Failed(error)) => self.fail(queue, error),
            Step::Receiving => {
                let answer = AdminData::In(AUTH_MESSAGE_MAX);
                let answer = answer.read_back(completed.request.data().and_then(Data::single));
                match exchange.host.receive(&answer, &mut SystemNonces) {
                    HostAction::Send(message) => exchange.next = Step::Send(message, Ending::None),
                    HostAction::SendLast(last) => exchange.next = Step::Send(last, Ending::Authenticated),
                    HostAction::Authenticated => self.succeed(),
                    HostAction::Failed(error, Some(last)) => {
                        exchange.next = Step::Send(last, Ending::Failed(error));
                    }
                    HostAction::Failed(error, None) => self.fail(queue, error),
                }
            }
            next @ (Step::Send(..) | Step::Receive) => exchange.next = next,
        }
    }

    fn succeed(&mut self) {
        self.exchange = None;
        log::info!(target: "nvme", "{}: queue {} authenticated anew", self.parties.subnqn, self.qid);
    }

    fn fail<Q: FabricsQueue>(&mut self, queue: &mut Q, why: impl std::fmt::Display) {
        self.exchange = None;
        log::warn!(
            target: "nvme",
            "{}: authentication anew on queue {} failed: {why}", self.parties.subnqn, self.qid,
        );
        queue.fail(ControllerFailure::Reauthentication);
    }
}
