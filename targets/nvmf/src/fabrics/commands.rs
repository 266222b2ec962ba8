//! Connect and admin commands.

use std::rc::Rc;

use block_io::Status;
use nvme_controller::io_queue::AdminCommand;
use nvme_controller::{ConnectOk, Controller, ControllerAction, ControllerEvent, IoQueue, NamespaceTable};
use target_shell::{IoContext, MemoryShare};
use wire_nvme::Sqe;
use wire_nvme::admin::GetLogPage;
use wire_nvme::fabrics::fabrics_type;
use wire_nvme::opcode::{AdminOpcode, FABRICS, FabricsType};

use super::authentication::is_authentication;
use super::{
    BEFORE_CONNECT_BYTES_MAX, ConnectionRole, FabricsLink, FabricsProtocol, FabricsQueue, TargetIoQueue,
};

impl<L: FabricsLink> FabricsQueue<L> {
    /// The bytes of host data of an admin or Fabrics command, which the transport then gives to
    /// [`IoQueue::admin_command`]. `to_host` returns the bytes of host memory that a data pointer names.
    ///
    /// # Errors
    /// The status to reject it with.
    pub(crate) fn admin_bytes(
        &self,
        sqe: &Sqe,
        to_host: impl Fn(&Sqe) -> Result<u32, Status>,
    ) -> Result<u32, Status> {
        let is_connect = sqe.opcode == FABRICS && fabrics_type(sqe) == Ok(FabricsType::Connect);
        match &self.role {
            ConnectionRole::AwaitingConnect if is_connect => Ok(BEFORE_CONNECT_BYTES_MAX),
            ConnectionRole::AwaitingConnect => Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
            _ if self.authentication.is_some() && is_authentication(sqe) => {
                self.authentication_bytes(sqe, to_host)
            }
            _ => Ok(nvme_controller::data_from_host(sqe)),
        }
    }

    /// Executes an admin or Connect command whose data has been received.
    pub(crate) fn execute<P: FabricsProtocol>(
        &mut self,
        ready: Option<AdminCommand>,
        context: &mut IoContext<'_, P>,
    ) {
        let Some(command) = ready else { return };
        match self.role {
            ConnectionRole::AwaitingConnect => self.connect(&command, context),
            _ if self.authentication.is_some() && is_authentication(&command.sqe) => {
                let now_ns = context.now_ns;
                self.authenticate(command, context.protocol.core(), now_ns);
            }
            _ => self.admin(&command, context),
        }
    }

    /// The Connect command, which gives the connection its role.
    fn connect<P: FabricsProtocol>(&mut self, command: &AdminCommand, context: &mut IoContext<'_, P>) {
        let AdminCommand { slot, sqe, data } = command;
        let (config, now_ns) = (context.config.clone(), context.now_ns);
        let core = context.protocol.core();
        let limits = config.controller_limits(&core.limits.controller);
        let connect = nvme_controller::ConnectContext {
            directory: &core.directory,
            limits: &limits,
            port: self.port.clone(),
            secure: self.secure.as_deref(),
        };
        let connected = nvme_controller::connect(sqe, data, &connect, |nqn| config.subsystem(nqn));
        let connected = match connected {
            Err(error) => return self.answer(*slot, error.status, error.result),
            Ok(connected) => connected,
        };
        let result = connected.cqe(sqe.cid).result;
        let (entries, no_flow_control) = match &connected {
            ConnectOk::Admin(admin) => (admin.queue_entries, admin.no_flow_control),
            ConnectOk::Io(io) => (io.queue_entries, io.no_flow_control),
        };
        self.link.responses().begin(entries, no_flow_control);
        self.link.connected();
        self.answer(*slot, Status::SUCCESS, result);
        let core = context.protocol.core();
        let namespaces = match &connected {
            ConnectOk::Admin(_) => NamespaceTable::default(),
            ConnectOk::Io(io) => NamespaceTable::for_controller(
                &io.subsystem,
                self.port.portid,
                &core.limits.controller,
                &core.directory,
                io.lease.association(),
            ),
        };
        let memory = match &connected {
            // The data of its commands is on the heap.
            ConnectOk::Admin(_) => MemoryShare::unlimited(),
            ConnectOk::Io(io) => Self::memory_share(io.lease.association(), context),
        };
        self.queue = IoQueue::new(entries, memory, Rc::new(namespaces));
        let core = context.protocol.core();
        self.begin_authentication(&connected, &config, now_ns, core);
        self.role = match connected {
            ConnectOk::Admin(admin) => {
                core.totals.opened(0);
                let controller = Controller::new(admin, limits, config.discovery.clone(), now_ns);
                ConnectionRole::Admin(Box::new(controller))
            }
            ConnectOk::Io(io) => {
                core.totals.opened(io.lease.qid());
                self.link.responses().association = Some(io.lease.association().clone());
                ConnectionRole::Io(TargetIoQueue {
                    subsystem: io.subsystem,
                    lease: io.lease,
                    totals: core.totals.clone(),
                    completed_before: 0,
                })
            }
        };
    }

    /// Passes an admin command to the controller.
    fn admin<P: FabricsProtocol>(&mut self, command: &AdminCommand, context: &IoContext<'_, P>) {
        let (sqe, now_ns) = (&command.sqe, context.now_ns);
        if sqe.opcode == AdminOpcode::GetLogPage.to_wire()
            && nvme_controller::log_has_health(GetLogPage::from_sqe(sqe).lid)
            && let ConnectionRole::Admin(controller) = &self.role
        {
            let health = context.config.health(controller.subsystem(), controller.hostnqn());
            self.controller_event(ControllerEvent::Health(health), now_ns);
        }
        self.controller_event(ControllerEvent::Command { sqe, data: &command.data }, now_ns);
    }

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
