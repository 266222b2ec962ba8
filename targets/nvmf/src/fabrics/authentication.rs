//! In-band authentication of hosts over fabrics: on every queue, before any other command.

use block_io::Status;
use nvme_auth::{
    AuthParties, AuthStatus, ConcatenationRule, ControllerAuth, Received, SystemNonces, TlsPsk, explain,
};
use nvme_controller::io_queue::{AdminCommand, CommandToken};
use nvme_controller::{AuthRequirement, ConnectOk, ControllerAssociation};
use wire_nvme::Sqe;
use wire_nvme::auth::{AUTH_MESSAGE_MAX, AuthCommand};
use wire_nvme::fabrics::{PropertySet, fabrics_type};
use wire_nvme::opcode::{AdminOpcode, FABRICS, FabricsType};
use wire_nvme::registers::offset;
use wire_nvme::sqe::{Fuse, Psdt};

use super::{ConnectionRole, FabricsCore, FabricsLink, FabricsQueue};
use crate::snapshot::ConfigSnapshot;

/// Invalid Field in Command with Do Not Retry.
const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();

/// The authentication of a host on one queue.
///
/// Until it has succeeded once, the queue executes Authentication Send and Receive alone, one at a time, so
/// that a host without a key costs 4 KiB and the exchange; the connection counts as one that has not logged
/// in, and is closed after `connect_timeout_ms`. Later the host may authenticate anew, within the same time.
/// A failure closes the connection: no other command is executed from then on, also none that was accepted
/// before and whose data was missing. Exponentiations block; a poll computes one, and the others wait.
///
/// With secure channel concatenation the host makes a key of TLS on a connection without, which counts as one
/// that has not logged in until it closes. On it the host, which may not know yet whether it will be
/// accepted, can look at the controller, but not change anything but its own controller's state. The host
/// connects anew with the key; there it need not authenticate, but may, to replace the key.
pub(crate) struct QueueAuthentication {
    exchange: ControllerAuth,
    /// It has succeeded, and none has failed since.
    is_done: bool,
    /// It has succeeded once, or need not.
    has_logged_in: bool,
    /// A failure was logged.
    has_failed: bool,
    /// A message that waits for its turn to be computed, and until when.
    waiting: Option<(AdminCommand, u64)>,
    /// Within which time an exchange of a host has to end that is authenticated already, and a host has to
    /// come back with a key of TLS.
    timeout_ns: u64,
}

/// Whether a host may send a command on a connection without TLS after secure channel concatenation: those
/// with which hosts begin before they connect anew. They have no data, and others see of them what they leave
/// in the Persistent Event log, if anything.
fn is_permitted_before_tls(sqe: &Sqe) -> bool {
    if sqe.opcode == FABRICS {
        return match fabrics_type(sqe) {
            Ok(FabricsType::PropertySet) => {
                PropertySet::from_sqe(sqe).is_ok_and(|set| set.offset == offset::CC)
            }
            Ok(FabricsType::PropertyGet | FabricsType::Disconnect) => true,
            _ => false,
        };
    }
    matches!(
        AdminOpcode::from_wire(sqe.opcode),
        Some(
            AdminOpcode::Identify
                | AdminOpcode::GetLogPage
                | AdminOpcode::GetFeatures
                | AdminOpcode::KeepAlive
                | AdminOpcode::AsyncEventRequest
        )
    )
}

/// The identity has a digest of the key, from which it cannot be had.
fn log_generated(association: &ControllerAssociation, peer: std::net::SocketAddr, psk: &TlsPsk) {
    log::info!(
        target: "nvmf",
        "{}: authentication of {} at {peer} has generated a key of TLS: {}",
        association.subnqn(), association.hostnqn(), psk.identity,
    );
}

/// Whether a command is Authentication Send or Receive.
pub(crate) fn is_authentication(sqe: &Sqe) -> bool {
    let kinds = [FabricsType::AuthenticationSend, FabricsType::AuthenticationReceive];
    sqe.opcode == FABRICS && fabrics_type(sqe).is_ok_and(|kind| kinds.contains(&kind))
}

fn is_send(sqe: &Sqe) -> bool {
    fabrics_type(sqe) == Ok(FabricsType::AuthenticationSend)
}

impl<L: FabricsLink> FabricsQueue<L> {
    /// Whether a command of a queue with authentication is rejected, which is answered then: only an
    /// authenticated host's commands are executed, and those of the authentication.
    #[cold]
    pub(crate) fn rejects_unauthenticated(&mut self, sqe: &Sqe) -> bool {
        let is_permitted = match self.concatenates() {
            true => is_permitted_before_tls(sqe),
            false => true,
        };
        if is_authentication(sqe) || (self.is_authenticated() && is_permitted) {
            return false;
        }
        let status = Status::AUTHENTICATION_REQUIRED.do_not_retry();
        self.link.respond(CommandToken::new(sqe.cid).answered(), status, 0);
        true
    }

    /// Bytes of host data of Authentication Send or Receive.
    pub(super) fn authentication_bytes(
        &self,
        sqe: &Sqe,
        to_host: impl Fn(&Sqe) -> Result<u32, Status>,
    ) -> Result<u32, Status> {
        let command = AuthCommand::from_sqe(sqe);
        let is_valid = sqe.fuse() == Fuse::Normal && sqe.psdt() == Psdt::Sgl && command.is_of_nvme();
        if !is_valid || !(1..=AUTH_MESSAGE_MAX as u32).contains(&command.length_bytes) {
            return Err(INVALID_FIELD);
        }
        if is_send(sqe) {
            return Ok(command.length_bytes);
        }
        match to_host(sqe)? == command.length_bytes {
            true => Ok(0),
            false => Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry()),
        }
    }

    /// Whether commands other than those of the authentication are executed.
    pub(crate) fn is_authenticated(&self) -> bool {
        self.authentication.as_ref().is_none_or(|authentication| authentication.is_done)
    }

    /// Whether the host has not logged in yet. Until then it may send one command at a time. One that has,
    /// and fails when it authenticates anew, has Asynchronous Event Requests that never end.
    pub(crate) fn is_logging_in(&self) -> bool {
        self.authentication.as_ref().is_some_and(|one| !one.has_logged_in)
    }

    /// Whether an authentication of the host has failed.
    pub(crate) fn has_failed_authentication(&self) -> bool {
        self.authentication.as_ref().is_some_and(|one| one.exchange.failure().is_some())
    }

    /// Whether a command may be executed whose data has been received.
    ///
    /// # Errors
    /// An authentication of the host has failed since the command was accepted.
    #[inline]
    pub(crate) fn accepts_data(&self) -> Result<(), Status> {
        match self.authentication.is_some() && self.has_failed_authentication() {
            true => Err(Status::AUTHENTICATION_REQUIRED.do_not_retry()),
            false => Ok(()),
        }
    }

    /// Whether the connection is for secure channel concatenation alone.
    pub(crate) fn concatenates(&self) -> bool {
        let is_required =
            |one: &QueueAuthentication| one.exchange.concatenation() == ConcatenationRule::Required;
        self.authentication.as_deref().is_some_and(is_required)
    }

    /// What follows Connect: the host has to authenticate, or has logged in.
    pub(crate) fn begin_authentication(
        &mut self,
        connected: &ConnectOk,
        config: &ConfigSnapshot,
        now_ns: u64,
        core: &FabricsCore,
    ) {
        let (association, requirement) = (connected.association(), connected.requirement());
        let qid = match connected {
            ConnectOk::Admin(_) => 0,
            ConnectOk::Io(io) => io.lease.qid(),
        };
        let is_done = requirement == AuthRequirement::Authenticated;
        self.authentication = connected.keys().map(|keys| {
            let parties = AuthParties::new(association.hostnqn().as_str(), association.subnqn().as_str());
            let options = (*config.auth_options).clone();
            let exchange = ControllerAuth::new(keys.clone(), parties, options);
            let exchange = exchange.with_concatenation(requirement.concatenation(qid));
            let timeout_ns = core.limits.connect_timeout_ns;
            Box::new(QueueAuthentication {
                exchange,
                is_done,
                has_logged_in: is_done,
                has_failed: false,
                waiting: None,
                timeout_ns,
            })
        });
        let concatenates = requirement == AuthRequirement::Concatenate;
        assert!(self.authentication.is_some() || !concatenates, "a host without keys concatenates");
        match self.authentication {
            Some(_) if !is_done => {
                self.handshake_deadline_ns = now_ns.saturating_add(core.limits.connect_timeout_ns)
            }
            _ => self.logged_in(),
        }
    }

    /// Executes Authentication Send or Receive, or has it wait for a poll that computes it.
    pub(crate) fn authenticate(&mut self, command: AdminCommand, core: &mut FabricsCore, now_ns: u64) {
        let Some(authentication) = &mut self.authentication else { return };
        let AdminCommand { slot, sqe, data } = &command;
        let exchange = &mut authentication.exchange;
        if authentication.waiting.is_some() {
            let status = Status::COMMAND_SEQUENCE_ERROR.do_not_retry();
            return self.answer(*slot, status, 0);
        }
        if is_send(sqe) {
            if exchange.computes(data) && !core.take_exponentiation(now_ns) {
                authentication.waiting = Some((command, self.handshake_deadline_ns));
                // The next poll.
                self.handshake_deadline_ns = now_ns + 1;
                return;
            }
            exchange.sent(data, &mut SystemNonces);
            self.answer(*slot, Status::SUCCESS, 0);
        } else {
            let length = AuthCommand::from_sqe(sqe).length_bytes as usize;
            match exchange.receive(length) {
                Received::Message(mut message) => {
                    message.resize(length, 0);
                    self.queue.answer_with_data(*slot, message, 0, &mut self.link);
                }
                Received::NotExpected => {
                    let status = Status::COMMAND_SEQUENCE_ERROR.do_not_retry();
                    self.answer(*slot, status, 0);
                }
                Received::TooShort => self.answer(*slot, INVALID_FIELD, 0),
            }
        }
        self.after_authentication(core, now_ns);
    }

    /// Executes a message that waited, if there is one and it is in time. Whether there was.
    pub(crate) fn resume_authentication(&mut self, core: &mut FabricsCore, now_ns: u64) -> bool {
        let waiting = self.authentication.as_mut().and_then(|one| one.waiting.take());
        let Some((command, deadline_ns)) = waiting else { return false };
        self.handshake_deadline_ns = deadline_ns;
        if deadline_ns <= now_ns {
            return false;
        }
        self.authenticate(command, core, now_ns);
        true
    }

    fn logged_in(&mut self) {
        self.handshake_deadline_ns = target_shell::NEVER_NS;
        self.notice.logged_in = true;
    }

    /// Acts on the status of the exchange.
    fn after_authentication(&mut self, core: &FabricsCore, now_ns: u64) {
        self.keep_generated_key(core, now_ns);
        let concatenates = self.concatenates();
        let Some(authentication) = &mut self.authentication else { return };
        let exchange = &authentication.exchange;
        if authentication.is_done {
            // An exchange of a host that is authenticated has a time too, and one that fails ends what it may
            // do.
            let has_deadline = self.handshake_deadline_ns != target_shell::NEVER_NS;
            match exchange.is_in_progress() {
                _ if concatenates => {}
                true if !has_deadline => {
                    self.handshake_deadline_ns = now_ns.saturating_add(authentication.timeout_ns);
                }
                true => {}
                false => self.handshake_deadline_ns = target_shell::NEVER_NS,
            }
            authentication.is_done = exchange.failure().is_none();
        }
        self.log_failed_authentication();
        let Some(authentication) = &mut self.authentication else { return };
        match authentication.exchange.status() {
            AuthStatus::Authenticated if !authentication.is_done && !authentication.has_failed => {
                authentication.is_done = true;
                authentication.has_logged_in = true;
                match concatenates {
                    // The time of the host to come back with TLS.
                    true => {
                        let timeout_ns = authentication.timeout_ns;
                        self.handshake_deadline_ns = now_ns.saturating_add(timeout_ns);
                    }
                    false => self.logged_in(),
                }
            }
            AuthStatus::Failed(..) => self.begin_drain(),
            _ => {}
        }
    }

    /// Logs a failure when it is found, which the host need not ask for.
    fn log_failed_authentication(&mut self) {
        let Some(authentication) = &mut self.authentication else { return };
        let Some((step, reason)) = authentication.exchange.failure() else { return };
        if std::mem::replace(&mut authentication.has_failed, true) {
            return;
        }
        let (queue, association) = match &self.role {
            ConnectionRole::Admin(controller) => (0, controller.association()),
            ConnectionRole::Io(queue) => (queue.lease.qid(), queue.lease.association()),
            _ => return,
        };
        let (host, subsystem) = (association.hostnqn(), association.subnqn());
        log::warn!(
            target: "nvmf",
            "{subsystem}: authentication of {host} at {} on queue {queue} failed at {}: {}",
            self.peer, step.name(), explain(reason),
        );
    }

    /// Stores a key of TLS that an exchange has generated: for a new association, or for this one.
    fn keep_generated_key(&mut self, core: &FabricsCore, now_ns: u64) {
        let generated = self.authentication.as_mut().and_then(|one| {
            let psk = one.exchange.take_generated()?;
            Some((psk, one.exchange.concatenation(), now_ns.saturating_add(one.timeout_ns)))
        });
        let Some((psk, rule, until_ns)) = generated else { return };
        let ConnectionRole::Admin(controller) = &self.role else { return };
        let association = controller.association();
        log_generated(association, self.peer, &psk);
        match rule {
            ConcatenationRule::Required => {
                core.directory.add_generated_key(association, psk, now_ns, until_ns);
            }
            ConcatenationRule::Replaces | ConcatenationRule::Refused => {
                core.directory.replace_generated_key(association, psk);
            }
        }
    }

    /// Takes new keys of the host for its next exchange. A connection that was made without authentication is
    /// closed when the host has to authenticate: it connects anew.
    pub(crate) fn apply_keys(&mut self, config: &ConfigSnapshot) {
        let association = match &self.role {
            ConnectionRole::Admin(controller) => controller.association(),
            ConnectionRole::Io(queue) => queue.lease.association(),
            _ => return,
        };
        let Some(subsystem) = config.subsystem(association.subnqn()) else { return };
        let Some(keys) = subsystem.host_keys.get(association.hostnqn()) else { return };
        match &mut self.authentication {
            Some(one) => one.exchange.set_keys(keys.clone(), (*config.auth_options).clone()),
            None => self.begin_drain(),
        }
    }
}
