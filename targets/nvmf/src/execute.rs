//! Executes commands once their data and buffers are available.

use block_io::{Op, Request, Status};
use dma::Buffer;
use nvme_controller::io::{self, DataTransfer, IoOp as Planned, IoPlan};
use nvme_controller::reservation::ReservationOutcome;
use nvme_controller::sgl::{self, DataSource};
use nvme_controller::{ConnectOk, Controller, ControllerAction, ControllerEvent, NamespaceTable};
use slots::Slot;
use wire_nvme::Sqe;
use wire_nvme::admin::GetLogPage;
use wire_nvme::log::LogId;
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::sqe::Fuse;

use crate::command::{CommandData, CommandState};
use crate::handler::PduHandler;
use crate::queue::{ConnectionRole, TargetIoQueue};

impl PduHandler<'_, '_> {
    /// Accepts an I/O command; its in-capsule data has not been received yet.
    ///
    /// A command without a buffer is deferred and never blocks the stream, because the data that would free
    /// a buffer may be behind this command.
    #[inline]
    pub(crate) fn io_command(&mut self, sqe: &Sqe, capsule_bytes: u32) -> Result<(), Status> {
        if self.state.pairing.expects_second() {
            return self.io_fused(sqe, capsule_bytes);
        }
        let ConnectionRole::Io(queue) = &self.state.role else { return Err(Status::COMMAND_SEQUENCE_ERROR) };
        let plan = match io::plan(sqe, &queue.namespaces) {
            Ok(plan) => plan,
            Err(_) if is_fused(sqe) => return self.io_fused(sqe, capsule_bytes),
            Err(status) => return Err(status),
        };
        match plan.data {
            DataTransfer::Fused(_) => return self.io_fused(sqe, capsule_bytes),
            DataTransfer::ToHost(length) => {
                sgl::to_host(sqe.data)?;
                self.consume_sq_entry();
                let slot =
                    self.state.new_command(sqe.cid, CommandState::Planned(plan), CommandData::None, length);
                self.read(slot, &plan, length);
            }
            DataTransfer::FromHost(length) if length > 0 => {
                let source = sgl::from_host(sqe.data, capsule_bytes)?;
                self.consume_sq_entry();
                let slot =
                    self.state.new_command(sqe.cid, CommandState::Planned(plan), CommandData::None, length);
                match source {
                    DataSource::Transport { .. } => self.request_data(slot, sqe.cid, length),
                    DataSource::Capsule { offset, .. } => {
                        // Without a buffer, receive to the heap: at most a queue's worth of capsules.
                        let data = match self.take_buffer(slot, capsule_bytes) {
                            Some(buffer) => CommandData::Buffer(buffer),
                            None => CommandData::Bytes(vec![0; capsule_bytes as usize]),
                        };
                        if let Some(command) = self.state.commands.get_mut(slot) {
                            command.data = data;
                        }
                        self.state.incoming_pdu = crate::connection::IncomingPdu::Capsule { slot, offset };
                    }
                }
            }
            DataTransfer::ControllerData(length) => {
                sgl::to_host(sqe.data)?;
                self.consume_sq_entry();
                let slot =
                    self.state.new_command(sqe.cid, CommandState::Planned(plan), CommandData::None, length);
                self.execute(slot);
            }
            DataTransfer::FromHost(_) | DataTransfer::None => {
                self.consume_sq_entry();
                let slot = self.state.new_command(sqe.cid, CommandState::Planned(plan), CommandData::None, 0);
                self.execute(slot);
            }
        }
        Ok(())
    }

    /// Takes a buffer for a command. `None` if the pool is empty, the connection is at its limit, or other
    /// commands are deferred.
    #[inline]
    fn take_buffer(&mut self, slot: Slot, bytes: u32) -> Option<Buffer> {
        // Deferred commands come first; otherwise small commands would starve a large one.
        if !self.state.deferred.is_empty() {
            return None;
        }
        let held_bytes = self.state.commands.buffer_bytes;
        // One command always fits, so that every deferred command is served.
        if held_bytes > 0 && held_bytes + bytes as usize > self.context.protocol.limits.connection_bytes_max {
            return None;
        }
        let buffer = self.context.pool.take(bytes as usize)?;
        self.state.commands.account_buffer(slot, bytes);
        Some(buffer)
    }

    /// Defers a command until a buffer is available.
    #[cold]
    pub(crate) fn defer(&mut self, slot: Slot) {
        self.state.deferred.push_back(slot);
    }

    /// Retries deferred commands, oldest first, until one is deferred again.
    pub(crate) fn retry_deferred(&mut self) {
        let mut deferred = std::mem::take(&mut self.state.deferred);
        while let Some(slot) = deferred.pop_front() {
            let Some(command) = self.state.commands.get_mut(slot) else { continue };
            match command.state {
                CommandState::Planned(plan) => self.retry(slot, &plan),
                CommandState::CopyInProgress { .. } => self.advance_copy(slot),
                CommandState::Fused(_) => self.compare_and_write(slot),
                CommandState::Rejected => self.execute(slot),
                _ => {}
            }
            if !self.state.deferred.is_empty() {
                break;
            }
        }
        // The one that was deferred again is the oldest.
        self.state.deferred.append(&mut deferred);
    }

    /// Retries a deferred command.
    fn retry(&mut self, slot: Slot, plan: &IoPlan) {
        let Some(command) = self.state.commands.get_mut(slot) else { return };
        let (cid, length) = (command.cid, command.length);
        match (plan.op, &command.data) {
            (Planned::Read, _) => match self.check_reservation(plan) {
                Ok(()) => self.read(slot, plan, length),
                Err(status) => self.state.finish(slot, status, 0),
            },
            (Planned::Verify, _) => self.execute(slot),
            (_, CommandData::None) => self.request_data(slot, cid, length),
            _ => self.execute(slot),
        }
    }

    /// Checks the current reservation, which may have changed since the command arrived.
    #[inline]
    fn check_reservation(&self, plan: &IoPlan) -> Result<(), Status> {
        match &self.state.role {
            ConnectionRole::Io(queue) => queue.namespaces.check_reservation(plan),
            _ => Ok(()),
        }
    }

    #[inline]
    fn read(&mut self, slot: Slot, plan: &IoPlan, length: u32) {
        let Some(buffer) = self.take_buffer(slot, length) else { return self.defer(slot) };
        let ConnectionRole::Io(queue) = &self.state.role else { return };
        let backend = queue.namespaces.entry(plan).backend;
        if let Some(command) = self.state.commands.get_mut(slot) {
            command.state = CommandState::Read;
        }
        self.submit(slot, backend, Op::Read, plan, Some(buffer));
    }

    /// Requests a command's data by R2T, once there is a buffer for it.
    fn request_data(&mut self, slot: Slot, cid: u16, length: u32) {
        let Some(buffer) = self.take_buffer(slot, length) else { return self.defer(slot) };
        if let Some(command) = self.state.commands.get_mut(slot) {
            command.data = CommandData::Buffer(buffer);
            command.requested_bytes = length;
        }
        self.state.send_r2t(slot, cid, length);
    }

    /// Submits a device request; the command fails if the device was removed.
    #[inline]
    fn submit(&mut self, slot: Slot, backend: u32, op: Op, plan: &IoPlan, buffer: Option<Buffer>) {
        let mut request = Request::new(self.state.tag(slot), op, plan.lba, plan.blocks);
        (request.flow, request.flags) = (self.state.flow, plan.flags);
        request.set_data(buffer);
        if let Err(status) = self.context.submit(backend, request) {
            self.state.finish(slot, status, 0);
        }
    }

    /// Executes a command that has no data or whose data has been received.
    pub(crate) fn execute(&mut self, slot: Slot) {
        let Some(command) = self.state.commands.get_mut(slot) else { return };
        match std::mem::replace(&mut command.state, CommandState::SendingData) {
            CommandState::Planned(plan) => self.execute_plan(slot, &plan),
            CommandState::Rejected => {
                self.state.finish(slot, Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry(), 0);
            }
            CommandState::AdminOrConnect(sqe) => match self.state.role {
                ConnectionRole::AwaitingConnect => self.connect(slot, &sqe),
                _ => self.admin(slot, *sqe),
            },
            CommandState::Fused(half) => self.half_data_received(slot, half),
            CommandState::Read
            | CommandState::Submitted { .. }
            | CommandState::CopyInProgress { .. }
            | CommandState::AtController
            | CommandState::ReservationPending
            | CommandState::SendingData => {
                unreachable!("a command is executed once")
            }
        }
    }

    fn execute_plan(&mut self, slot: Slot, plan: &IoPlan) {
        let ConnectionRole::Io(queue) = &self.state.role else {
            return self.state.finish(slot, Status::COMMAND_SEQUENCE_ERROR, 0);
        };
        if let Err(status) = queue.namespaces.check_reservation(plan) {
            return self.state.finish(slot, status, 0);
        }
        match plan.op {
            Planned::Reservation => self.reservation_command(slot, plan),
            Planned::Read => unreachable!("a read has no data to wait for"),
            Planned::NoOp => self.state.finish(slot, Status::SUCCESS, 0),
            Planned::Disconnect => {
                self.state.finish(slot, Status::SUCCESS, 0);
                self.state.begin_drain();
            }
            Planned::Write | Planned::Compare => {
                let backend = queue.namespaces.entry(plan).backend;
                let op = if plan.op == Planned::Write { Op::Write } else { Op::Compare };
                match self.state.commands.take_data(slot) {
                    CommandData::Buffer(buffer) => {
                        self.set_submitted(slot, 1);
                        self.submit(slot, backend, op, plan, Some(buffer));
                    }
                    data => self.write_from_heap(slot, backend, plan, data),
                }
            }
            Planned::Flush | Planned::WriteZeroes | Planned::WriteUncorrectable => {
                let backend = queue.namespaces.entry(plan).backend;
                let op = match plan.op {
                    Planned::Flush => Op::Flush,
                    Planned::WriteZeroes => Op::WriteZeroes,
                    _ => Op::WriteUncorrectable,
                };
                self.set_submitted(slot, 1);
                self.submit(slot, backend, op, plan, None);
            }
            Planned::FlushAll => {
                let backends: Vec<u32> = queue.namespaces.backends().collect();
                let flushes = backends.into_iter().map(|backend| (backend, 0, 0)).collect();
                self.submit_all(slot, Op::Flush, plan, flushes);
            }
            // Fused commands are executed as a pair in `fused`.
            Planned::FusedCompare | Planned::FusedWrite => {
                self.state.finish(slot, Status::FUSED_MISSING, 0);
            }
            Planned::Copy => {
                let data = self.state.commands.take_data(slot);
                let ConnectionRole::Io(queue) = &self.state.role else { return };
                match io::CopyOperation::new(plan, &queue.namespaces, data.as_slice()) {
                    Ok(copying) => {
                        drop(data);
                        if let Some(command) = self.state.commands.get_mut(slot) {
                            command.state =
                                CommandState::CopyInProgress { copying: Box::new(copying), has_read: false };
                        }
                        self.advance_copy(slot);
                    }
                    Err(status) => self.state.finish(slot, status, 0),
                }
            }
            Planned::Unmap => {
                let ranges = self.unmap_ranges(slot, plan);
                match ranges {
                    Ok(ranges) => self.submit_all(slot, Op::Unmap, plan, ranges),
                    Err(status) => self.state.finish(slot, status, 0),
                }
            }
            Planned::Verify => {
                let entry = queue.namespaces.entry(plan);
                let (backend, bytes) = (entry.backend, (plan.blocks as usize) << entry.block_log2);
                match self.take_buffer(slot, bytes as u32) {
                    Some(buffer) => {
                        self.set_submitted(slot, 1);
                        self.submit(slot, backend, Op::Read, plan, Some(buffer));
                    }
                    None => {
                        if let Some(command) = self.state.commands.get_mut(slot) {
                            command.state = CommandState::Planned(*plan);
                        }
                        self.defer(slot);
                    }
                }
            }
        }
    }

    /// Starts the next step of each Copy command that is ready.
    pub(crate) fn advance_copies(&mut self) {
        for slot in std::mem::take(&mut self.state.ready_copies) {
            self.advance_copy(slot);
        }
    }

    /// Starts the next step of a Copy: reads a piece, writes the piece that was read, or completes the command.
    #[cold]
    fn advance_copy(&mut self, slot: Slot) {
        let ConnectionRole::Io(queue) = &self.state.role else { return };
        let Some(command) = self.state.commands.get_mut(slot) else { return };
        let CommandState::CopyInProgress { copying, has_read } = &command.state else { return };
        let (op, range) = (if *has_read { Op::Write } else { Op::Read }, copying.first_incomplete_range());
        let (backend, flags, bytes_max) = (copying.backend, copying.flags(), copying.piece_bytes_max());
        let Some(piece) = copying.current_piece() else { return self.state.finish(slot, Status::SUCCESS, 0) };
        if let Err(status) = copying.check_access(&queue.namespaces) {
            return self.state.finish(slot, status, range.into());
        }
        let bytes = copying.piece_bytes(&piece);
        // One buffer is used for all pieces, so a Copy that has started never waits for another.
        let buffer = match std::mem::replace(&mut command.data, CommandData::None) {
            CommandData::Buffer(buffer) => Some(buffer),
            _ => self.take_buffer(slot, bytes_max as u32),
        };
        let Some(mut buffer) = buffer else { return self.defer(slot) };
        buffer.resize(bytes);
        let lba = if op == Op::Write { piece.to } else { piece.from };
        let mut request = Request::new(self.state.tag(slot), op, lba, piece.blocks);
        request.flow = self.state.flow;
        request.set_data(Some(buffer));
        if op == Op::Write {
            request.flags = flags;
        }
        if let Err(status) = self.context.submit(backend, request) {
            self.state.finish(slot, status, range.into());
        }
    }

    /// A reservation command: executed by the target, without a device request.
    fn reservation_command(&mut self, slot: Slot, plan: &IoPlan) {
        let data = self.state.commands.take_data(slot);
        let ConnectionRole::Io(queue) = &self.state.role else { return };
        match queue.namespaces.execute_reservation(plan, data.as_slice()) {
            ReservationOutcome::Done(status) => self.state.finish(slot, status, 0),
            ReservationOutcome::Report(report) => {
                self.state.finish_with_data(slot, CommandData::Bytes(report), 0)
            }
            ReservationOutcome::Pending(pending) => {
                if let Some(command) = self.state.commands.get_mut(slot) {
                    command.state = CommandState::ReservationPending;
                }
                self.state.pending_reservations.push(slot, pending);
                self.state.complete_pending_reservations();
            }
        }
    }

    /// Executes a Write or Compare whose data was received to the heap.
    #[cold]
    fn write_from_heap(&mut self, slot: Slot, backend: u32, plan: &IoPlan, data: CommandData) {
        let op = if plan.op == Planned::Write { Op::Write } else { Op::Compare };
        match self.take_buffer(slot, data.as_slice().len() as u32) {
            Some(mut buffer) => {
                buffer.as_mut_slice().copy_from_slice(data.as_slice());
                self.set_submitted(slot, 1);
                self.submit(slot, backend, op, plan, Some(buffer));
            }
            None => {
                if let Some(command) = self.state.commands.get_mut(slot) {
                    (command.data, command.state) = (data, CommandState::Planned(*plan));
                }
                self.defer(slot);
            }
        }
    }

    pub(crate) fn set_submitted(&mut self, slot: Slot, requests: u16) {
        if let Some(command) = self.state.commands.get_mut(slot) {
            command.state = CommandState::Submitted { remaining: requests, status: Status::SUCCESS };
        }
    }

    fn unmap_ranges(&mut self, slot: Slot, plan: &IoPlan) -> Result<Vec<(u32, u64, u32)>, Status> {
        let ConnectionRole::Io(queue) = &self.state.role else { return Err(Status::COMMAND_SEQUENCE_ERROR) };
        let table: &NamespaceTable = &queue.namespaces;
        let backend = table.entry(plan).backend;
        let data = self.state.commands.get_mut(slot).map_or(&[][..], |command| command.data.as_slice());
        Ok(io::unmap_ranges(plan, table, data)?.map(|(lba, blocks)| (backend, lba, blocks)).collect())
    }

    /// Submits one request for each (backend, first LBA, number of blocks).
    fn submit_all(&mut self, slot: Slot, op: Op, plan: &IoPlan, ranges: Vec<(u32, u64, u32)>) {
        if ranges.is_empty() {
            return self.state.finish(slot, Status::SUCCESS, 0);
        }
        self.set_submitted(slot, ranges.len() as u16);
        for (backend, lba, blocks) in ranges {
            let mut request = Request::new(self.state.tag(slot), op, lba, blocks);
            request.flow = self.state.flow;
            request.flags = plan.flags;
            if let Err(status) = self.context.submit(backend, request) {
                // Handled as a device completion with this status.
                let completion = Request::new(self.state.tag(slot), op, lba, blocks).complete(status);
                self.state.complete(completion);
            }
        }
    }

    /// The Connect command, which gives the connection its role.
    fn connect(&mut self, slot: Slot, sqe: &Sqe) {
        let CommandData::Bytes(data) = self.state.commands.take_data(slot) else {
            return self.state.finish(slot, Status::DATA_SGL_LENGTH_INVALID, 0);
        };
        let (shared, config) = (&*self.context.protocol, self.context.config);
        let context = nvme_controller::ConnectContext {
            directory: &shared.directory,
            limits: &shared.limits.controller,
            port: self.state.port.clone(),
        };
        let connected = nvme_controller::connect(sqe, &data, &context, |nqn| config.subsystem(nqn));
        match connected {
            Err(error) => self.state.finish(slot, error.status, error.result),
            Ok(connected) => {
                let result = connected.cqe(sqe.cid).result;
                let (entries, flow_control_off) = match &connected {
                    ConnectOk::Admin(admin) => (admin.queue_entries, admin.no_flow_control),
                    ConnectOk::Io(io) => (io.queue_entries, io.no_flow_control),
                };
                self.state.sq_entries = entries;
                self.state.sq_flow_control_disabled = flow_control_off;
                self.state.c2h_success = flow_control_off && shared.limits.c2h_success;
                self.state.sq_head = if entries > 1 { 1 } else { 0 };
                self.state.finish(slot, Status::SUCCESS, result);
                self.state.commands = crate::command::CommandTable::new(entries);
                self.state.handshake_deadline_ns = u64::MAX;
                self.state.role = match connected {
                    ConnectOk::Admin(admin) => {
                        let limits = std::sync::Arc::new(shared.limits.controller.clone());
                        let discovery = config.discovery.clone();
                        let controller = Controller::new(admin, limits, discovery, self.context.now_ns);
                        ConnectionRole::Admin(Box::new(controller))
                    }
                    ConnectOk::Io(io) => {
                        let portid = self.state.port.portid;
                        ConnectionRole::Io(TargetIoQueue {
                            namespaces: NamespaceTable::for_controller(
                                &io.subsystem,
                                portid,
                                &shared.limits.controller,
                                &shared.directory,
                                io.lease.association(),
                            ),
                            subsystem: io.subsystem,
                            lease: io.lease,
                        })
                    }
                };
            }
        }
    }

    /// Passes an admin command to the controller.
    fn admin(&mut self, slot: Slot, sqe: Sqe) {
        let data = self.state.commands.take_data(slot);
        if let Some(command) = self.state.commands.get_mut(slot) {
            command.state = CommandState::AtController;
        }
        let now_ns = self.context.now_ns;
        if sqe.opcode == AdminOpcode::GetLogPage.to_wire()
            && GetLogPage::from_sqe(&sqe).lid == LogId::Health.to_wire()
            && let ConnectionRole::Admin(controller) = &self.state.role
        {
            let health = self.context.config.health(controller.subsystem());
            self.state.controller_event(ControllerEvent::Health(health), now_ns);
        }
        self.state.controller_event(ControllerEvent::Command { sqe: &sqe, data: data.as_slice() }, now_ns);
    }
}

fn is_fused(sqe: &Sqe) -> bool {
    matches!(sqe.fuse(), Fuse::First | Fuse::Second)
}

impl crate::connection::ConnectionState {
    /// Passes an event to the controller and performs the actions that it returns.
    pub(crate) fn controller_event(&mut self, event: ControllerEvent<'_>, now_ns: u64) {
        let ConnectionRole::Admin(controller) = &mut self.role else { return };
        let mut actions = Vec::new();
        controller.handle(event, now_ns, &mut actions);
        for action in actions {
            match action {
                ControllerAction::Complete(completion) => {
                    let (cqe, data) = (completion.cqe, completion.data);
                    let Some(slot) = self.commands.by_cid(cqe.cid) else { continue };
                    if cqe.status.is_success() && !data.is_empty() {
                        self.finish_with_data(slot, CommandData::Bytes(data), cqe.result);
                    } else {
                        self.finish(slot, cqe.status, cqe.result);
                    }
                }
                ControllerAction::CloseIoQueues => self.close_io_queues = true,
                ControllerAction::Terminate(_) => self.begin_drain(),
            }
        }
    }
}
