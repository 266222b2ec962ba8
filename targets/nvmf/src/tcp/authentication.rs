//! In-band authentication of hosts over NVMe/TCP: on every queue, before any other command.

use block_io::Status;
use nvme_auth::{AuthParties, AuthStatus, ControllerAuth, Received, SystemNonces, explain};
use nvme_controller::ConnectOk;
use nvme_controller::io_queue::{AdminCommand, CommandToken};
use nvme_controller::sgl;
use wire_nvme::Sqe;
use wire_nvme::auth::{AUTH_MESSAGE_MAX, AuthCommand};
use wire_nvme::fabrics::fabrics_type;
use wire_nvme::opcode::{FABRICS, FabricsType};
use wire_nvme::sqe::{Fuse, Psdt};

use super::connection::ConnectionState;
use super::handler::PduHandler;
use super::protocol::TcpProtocol;
use super::queue::ConnectionRole;
use crate::snapshot::ConfigSnapshot;

/// Invalid Field in Command with Do Not Retry.
const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();

/// The authentication of a host on one queue.
///
/// Until it has succeeded once, the queue executes Authentication Send and Receive alone, one at a time, so that a host
/// without a key costs 4 KiB and the exchange; the connection counts as one that has not logged in, and is closed after
/// `connect_timeout_ms`. Later the host may authenticate anew. A failure closes the connection.
pub(crate) struct QueueAuthentication {
    exchange: ControllerAuth,
    /// It has succeeded.
    is_done: bool,
}

/// Whether a command is Authentication Send or Receive.
pub(crate) fn is_authentication(sqe: &Sqe) -> bool {
    let kinds = [FabricsType::AuthenticationSend, FabricsType::AuthenticationReceive];
    sqe.opcode == FABRICS && fabrics_type(sqe).is_ok_and(|kind| kinds.contains(&kind))
}

fn is_send(sqe: &Sqe) -> bool {
    fabrics_type(sqe) == Ok(FabricsType::AuthenticationSend)
}

impl PduHandler<'_, '_> {
    /// Takes a command of a queue with authentication; returns whether it did. Only an authenticated host's other
    /// commands are left to the queue.
    #[cold]
    pub(crate) fn before_authenticated(&mut self, sqe: &Sqe, capsule_bytes: u32) -> bool {
        if is_authentication(sqe) {
            self.admin_or_fabrics(sqe, capsule_bytes);
            return true;
        }
        if self.state.is_authenticated() {
            return false;
        }
        let status = Status::AUTHENTICATION_REQUIRED.do_not_retry();
        self.state.link.respond(CommandToken::new(sqe.cid).answered(), status, 0);
        true
    }

    /// Bytes of host data of Authentication Send or Receive.
    pub(crate) fn authentication_bytes(&self, sqe: &Sqe) -> Result<u32, Status> {
        let command = AuthCommand::from_sqe(sqe);
        let is_valid = sqe.fuse() == Fuse::Normal && sqe.psdt() == Psdt::Sgl && command.is_of_nvme();
        if !is_valid || !(1..=AUTH_MESSAGE_MAX as u32).contains(&command.length_bytes) {
            return Err(INVALID_FIELD);
        }
        if is_send(sqe) {
            return Ok(command.length_bytes);
        }
        match sgl::to_host(sqe.data)? == command.length_bytes {
            true => Ok(0),
            false => Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry()),
        }
    }

    /// Executes Authentication Send or Receive.
    pub(crate) fn authenticate(&mut self, command: &AdminCommand) {
        let AdminCommand { slot, sqe, data } = command;
        let Some(authentication) = &mut self.state.authentication else { return };
        let exchange = &mut authentication.exchange;
        if is_send(sqe) {
            exchange.sent(data, &mut SystemNonces);
            self.state.answer(*slot, Status::SUCCESS, 0);
        } else {
            let length = AuthCommand::from_sqe(sqe).length_bytes as usize;
            match exchange.receive(length) {
                Received::Message(mut message) => {
                    message.resize(length, 0);
                    self.state.queue.answer_with_data(*slot, message, 0, &mut self.state.link);
                }
                Received::NotExpected => {
                    let status = Status::COMMAND_SEQUENCE_ERROR.do_not_retry();
                    self.state.answer(*slot, status, 0);
                }
                Received::TooShort => self.state.answer(*slot, INVALID_FIELD, 0),
            }
        }
        self.state.after_authentication();
    }
}

impl ConnectionState {
    /// Whether commands other than those of the authentication are executed.
    pub(crate) fn is_authenticated(&self) -> bool {
        self.authentication.as_ref().is_none_or(|authentication| authentication.is_done)
    }

    /// What follows Connect: the host has to authenticate, or has logged in.
    pub(crate) fn begin_authentication(
        &mut self,
        connected: &ConnectOk,
        config: &ConfigSnapshot,
        now_ns: u64,
        protocol: &TcpProtocol,
    ) {
        let association = connected.association();
        self.authentication = connected.keys().map(|keys| {
            let parties = AuthParties::new(association.hostnqn().as_str(), association.subnqn().as_str());
            let options = (*config.auth_options).clone();
            let exchange = ControllerAuth::new(keys.clone(), parties, options);
            Box::new(QueueAuthentication { exchange, is_done: false })
        });
        match self.authentication {
            Some(_) => self.handshake_deadline_ns = now_ns.saturating_add(protocol.limits.connect_timeout_ns),
            None => self.logged_in(),
        }
    }

    fn logged_in(&mut self) {
        self.handshake_deadline_ns = target_shell::NEVER_NS;
        self.notice.logged_in = true;
    }

    /// Acts on the status of the exchange.
    fn after_authentication(&mut self) {
        let Some(authentication) = &mut self.authentication else { return };
        match authentication.exchange.status() {
            AuthStatus::Authenticated if !authentication.is_done => {
                authentication.is_done = true;
                self.logged_in();
            }
            AuthStatus::Failed(step, reason) if !self.draining => {
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
                self.begin_drain();
            }
            _ => {}
        }
    }

    /// Takes new keys of the host for its next exchange. A connection that was made without authentication is closed
    /// when the host has to authenticate: it connects anew.
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
