//! Connect and admin commands over NVMe/TCP.

use std::rc::Rc;

use block_io::Status;
use nvme_controller::io_queue::AdminCommand;
use nvme_controller::{
    ConnectOk, Controller, ControllerAction, ControllerEvent, IoQueue, NamespaceTable, io_queue::CommandToken,
};
use target_shell::MemoryShare;
use wire_nvme::Sqe;
use wire_nvme::admin::GetLogPage;
use wire_nvme::fabrics::fabrics_type;
use wire_nvme::log::LogId;
use wire_nvme::opcode::{AdminOpcode, FABRICS, FabricsType};

use super::authentication::is_authentication;
use super::connection::ConnectionState;
use super::handler::{BEFORE_CONNECT_BYTES_MAX, PduHandler};
use super::queue::{ConnectionRole, TargetIoQueue};

impl PduHandler<'_, '_> {
    /// Accepts an admin or Fabrics command, which is executed when all its data has been received.
    pub(crate) fn admin_or_fabrics(&mut self, sqe: &Sqe, capsule_bytes: u32) {
        let token = CommandToken::new(sqe.cid);
        let is_connect = sqe.opcode == FABRICS && fabrics_type(sqe) == Ok(FabricsType::Connect);
        let bytes = match &self.state.role {
            ConnectionRole::AwaitingConnect if is_connect => BEFORE_CONNECT_BYTES_MAX,
            ConnectionRole::AwaitingConnect => {
                let status = Status::COMMAND_SEQUENCE_ERROR.do_not_retry();
                return self.state.link.respond(token.answered(), status, 0);
            }
            _ if self.state.authentication.is_some() && is_authentication(sqe) => {
                match self.authentication_bytes(sqe) {
                    Ok(bytes) => bytes,
                    Err(status) => return self.state.link.respond(token.answered(), status, 0),
                }
            }
            _ => nvme_controller::data_from_host(sqe),
        };
        let (queue, mut transport) = self.io(capsule_bytes);
        let ready = queue.admin_command(token, sqe, bytes, &mut transport);
        self.execute(ready);
    }

    /// Executes an admin or Connect command whose data has been received.
    pub(crate) fn execute(&mut self, ready: Option<AdminCommand>) {
        let Some(command) = ready else { return };
        match self.state.role {
            ConnectionRole::AwaitingConnect => self.connect(&command),
            _ if self.state.authentication.is_some() && is_authentication(&command.sqe) => {
                let now_ns = self.context.now_ns;
                self.state.authenticate(command, self.context.protocol, now_ns);
            }
            _ => self.admin(&command),
        }
    }

    /// The Connect command, which gives the connection its role.
    fn connect(&mut self, command: &AdminCommand) {
        let AdminCommand { slot, sqe, data } = command;
        let (shared, config) = (&*self.context.protocol, self.context.config);
        let limits = config.controller_limits(&shared.limits.controller);
        let context = nvme_controller::ConnectContext {
            directory: &shared.directory,
            limits: &limits,
            port: self.state.port.clone(),
            secure: self.state.secure.as_deref(),
        };
        let connected = nvme_controller::connect(sqe, data, &context, |nqn| config.subsystem(nqn));
        match connected {
            Err(error) => self.state.answer(*slot, error.status, error.result),
            Ok(connected) => {
                let result = connected.cqe(sqe.cid).result;
                let (entries, flow_control_off) = match &connected {
                    ConnectOk::Admin(admin) => (admin.queue_entries, admin.no_flow_control),
                    ConnectOk::Io(io) => (io.queue_entries, io.no_flow_control),
                };
                let link = &mut self.state.link;
                link.sq_entries = entries;
                link.sq_flow_control_disabled = flow_control_off;
                link.c2h_success = flow_control_off && shared.limits.c2h_success;
                link.sq_head = if entries > 1 { 1 } else { 0 };
                self.state.answer(*slot, Status::SUCCESS, result);
                let namespaces = match &connected {
                    ConnectOk::Admin(_) => NamespaceTable::default(),
                    ConnectOk::Io(io) => NamespaceTable::for_controller(
                        &io.subsystem,
                        self.state.port.portid,
                        &shared.limits.controller,
                        &shared.directory,
                        io.lease.association(),
                    ),
                };
                let memory = match &connected {
                    // The data of its commands is on the heap.
                    ConnectOk::Admin(_) => MemoryShare::unlimited(),
                    ConnectOk::Io(io) => self.context.memory_share_of(
                        io.lease.association().hostnqn().as_str().as_bytes(),
                        shared.limits.host_bytes_max,
                        shared.limits.connection_bytes_max,
                    ),
                };
                self.state.queue = IoQueue::new(entries, memory, Rc::new(namespaces));
                self.state.begin_authentication(&connected, config, self.context.now_ns, shared);
                self.state.role = match connected {
                    ConnectOk::Admin(admin) => {
                        let discovery = config.discovery.clone();
                        shared.totals.opened(0);
                        let controller = Controller::new(admin, limits, discovery, self.context.now_ns);
                        ConnectionRole::Admin(Box::new(controller))
                    }
                    ConnectOk::Io(io) => {
                        shared.totals.opened(io.lease.qid());
                        self.state.link.association = Some(io.lease.association().clone());
                        ConnectionRole::Io(TargetIoQueue {
                            subsystem: io.subsystem,
                            lease: io.lease,
                            totals: shared.totals.clone(),
                            completed_before: 0,
                        })
                    }
                };
            }
        }
    }

    /// Passes an admin command to the controller.
    fn admin(&mut self, command: &AdminCommand) {
        let (sqe, now_ns) = (&command.sqe, self.context.now_ns);
        if sqe.opcode == AdminOpcode::GetLogPage.to_wire()
            && GetLogPage::from_sqe(sqe).lid == LogId::Health.to_wire()
            && let ConnectionRole::Admin(controller) = &self.state.role
        {
            let health = self.context.config.health(controller.subsystem(), controller.hostnqn());
            self.state.controller_event(ControllerEvent::Health(health), now_ns);
        }
        self.state.controller_event(ControllerEvent::Command { sqe, data: &command.data }, now_ns);
    }
}

impl ConnectionState {
    /// Passes an event to the controller and performs the actions that it returns.
    pub(crate) fn controller_event(&mut self, event: ControllerEvent<'_>, now_ns: u64) {
        let ConnectionRole::Admin(controller) = &mut self.role else { return };
        let mut actions = Vec::new();
        controller.handle(event, now_ns, &mut actions);
        for action in actions {
            match action {
                ControllerAction::Complete(completion) => {
                    let (cqe, data) = (completion.cqe, completion.data);
                    let Some(slot) = self.queue.at_owner(cqe.cid) else { continue };
                    if cqe.status.is_success() && !data.is_empty() {
                        self.queue.answer_with_data(slot, data, cqe.result, &mut self.link);
                    } else {
                        self.answer(slot, cqe.status, cqe.result);
                    }
                }
                ControllerAction::CloseIoQueues => self.notice.recheck = true,
                ControllerAction::Terminate(_) => self.begin_drain(),
            }
        }
    }
}
