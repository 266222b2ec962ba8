//! What commands do, once all that they need is here.

use controller::io::{self, Op as Planned, Plan, Transfer};
use controller::reservation::Outcome;
use controller::sgl::{self, Source};
use controller::{Action, ConnectOk, Controller, Event, NamespaceTable};
use memory::Buffer;
use ring::{Op, Request, Status};
use slots::Slot;
use wire_nvme::Sqe;
use wire_nvme::admin::GetLogPage;
use wire_nvme::log::LogId;
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::sqe::Fuse;

use crate::command::{Data, Work};
use crate::handler::Handler;
use crate::queue::{IoQueue, Role};

impl Handler<'_, '_> {
    /// A command of an I/O queue has arrived, its capsule's data not yet.
    ///
    /// Nothing here waits for memory while the stream stands still: the data that would free some may
    /// be behind this very command. A command without a buffer is put aside, and given one later.
    #[inline]
    pub(crate) fn io(&mut self, sqe: &Sqe, capsule_bytes: u32) -> Result<(), Status> {
        if self.state.pairing.is_open() {
            return self.io_fused(sqe, capsule_bytes);
        }
        let Role::Io(queue) = &self.state.role else { return Err(Status::COMMAND_SEQUENCE_ERROR) };
        let plan = match io::plan(sqe, &queue.namespaces) {
            Ok(plan) => plan,
            Err(_) if is_fused(sqe) => return self.io_fused(sqe, capsule_bytes),
            Err(status) => return Err(status),
        };
        match plan.data {
            Transfer::Fused(_) => return self.io_fused(sqe, capsule_bytes),
            Transfer::ToHost(length) => {
                sgl::to_host(sqe.data)?;
                self.take_entry();
                let slot = self.state.new_command(sqe.cid, Work::Planned(plan), Data::None, length);
                self.read(slot, &plan, length);
            }
            Transfer::FromHost(length) if length > 0 => {
                let source = sgl::from_host(sqe.data, capsule_bytes)?;
                self.take_entry();
                let slot = self.state.new_command(sqe.cid, Work::Planned(plan), Data::None, length);
                match source {
                    Source::Transport { .. } => self.ask_for_data(slot, sqe.cid, length),
                    Source::Capsule { offset, .. } => {
                        // Without a buffer it goes by way of the heap: a queue's worth of capsules at most.
                        let data = match self.take_buffer(slot, capsule_bytes) {
                            Some(buffer) => Data::Buffer(buffer),
                            None => Data::Bytes(vec![0; capsule_bytes as usize]),
                        };
                        if let Some(command) = self.state.commands.get_mut(slot) {
                            command.data = data;
                        }
                        self.state.current = crate::connection::Current::Capsule { slot, offset };
                    }
                }
            }
            Transfer::Answer(length) => {
                sgl::to_host(sqe.data)?;
                self.take_entry();
                let slot = self.state.new_command(sqe.cid, Work::Planned(plan), Data::None, length);
                self.execute(slot);
            }
            Transfer::FromHost(_) | Transfer::None => {
                self.take_entry();
                let slot = self.state.new_command(sqe.cid, Work::Planned(plan), Data::None, 0);
                self.execute(slot);
            }
        }
        Ok(())
    }

    /// A buffer for a command, unless this connection or the core has none to spare.
    #[inline]
    fn take_buffer(&mut self, slot: Slot, bytes: u32) -> Option<Buffer> {
        // Who waits comes first; otherwise small commands would keep a large one waiting for ever.
        if !self.state.aside.is_empty() {
            return None;
        }
        let held = self.state.commands.held_bytes;
        // One command always fits, so that waiting ends.
        if held > 0 && held + bytes as usize > self.lent.shared.limits.connection_bytes_max {
            return None;
        }
        let buffer = self.lent.pool.take(bytes as usize)?;
        self.state.commands.hold(slot, bytes);
        Some(buffer)
    }

    /// Puts a command aside until there is a buffer for it.
    #[cold]
    pub(crate) fn put_aside(&mut self, slot: Slot) {
        self.state.aside.push_back(slot);
    }

    /// Gives buffers to commands that were put aside, oldest first, as far as there are any.
    pub(crate) fn serve_aside(&mut self) {
        let mut aside = std::mem::take(&mut self.state.aside);
        while let Some(slot) = aside.pop_front() {
            let Some(command) = self.state.commands.get_mut(slot) else { continue };
            match command.work {
                Work::Planned(plan) => self.resume(slot, &plan),
                Work::Copying { .. } => self.copy_on(slot),
                Work::Fused(_) => self.compare_and_write(slot),
                Work::Refused => self.execute(slot),
                _ => {}
            }
            if !self.state.aside.is_empty() {
                break;
            }
        }
        // What was put aside again is the oldest.
        self.state.aside.append(&mut aside);
    }

    /// Begins anew what waited for a buffer.
    fn resume(&mut self, slot: Slot, plan: &Plan) {
        let Some(command) = self.state.commands.get_mut(slot) else { return };
        let (cid, length) = (command.cid, command.length);
        match (plan.op, &command.data) {
            (Planned::Read, _) => match self.admitted(plan) {
                Ok(()) => self.read(slot, plan, length),
                Err(status) => self.state.finish(slot, status, 0),
            },
            (Planned::Verify, _) => self.execute(slot),
            (_, Data::None) => self.ask_for_data(slot, cid, length),
            _ => self.execute(slot),
        }
    }

    /// Whether reservations, which may be others than when the command came, allow a plan.
    #[inline]
    fn admitted(&self, plan: &Plan) -> Result<(), Status> {
        match &self.state.role {
            Role::Io(queue) => queue.namespaces.admit(plan),
            _ => Ok(()),
        }
    }

    #[inline]
    fn read(&mut self, slot: Slot, plan: &Plan, length: u32) {
        let Some(buffer) = self.take_buffer(slot, length) else { return self.put_aside(slot) };
        let Role::Io(queue) = &self.state.role else { return };
        let backend = queue.namespaces.entry(plan).backend;
        if let Some(command) = self.state.commands.get_mut(slot) {
            command.work = Work::Read;
        }
        self.submit(slot, backend, Op::Read, plan, Some(buffer));
    }

    /// Asks the host for a command's data, once there is a buffer for it.
    fn ask_for_data(&mut self, slot: Slot, cid: u16, length: u32) {
        let Some(buffer) = self.take_buffer(slot, length) else { return self.put_aside(slot) };
        if let Some(command) = self.state.commands.get_mut(slot) {
            command.data = Data::Buffer(buffer);
            command.asked = length;
        }
        self.state.ready_to_transfer(slot, cid, length);
    }

    /// Hands a request to a device.
    #[inline]
    fn submit(&mut self, slot: Slot, backend: u32, op: Op, plan: &Plan, buffer: Option<Buffer>) {
        let mut request = Request::new(self.state.tag(slot), op, plan.lba, plan.blocks);
        (request.flow, request.flags, request.buffer) = (self.state.flow, plan.flags, buffer);
        if let Err(status) = self.lent.submit(backend, request) {
            self.state.finish(slot, status, 0);
        }
    }

    /// Executes a command whose data, if it has any, is here.
    pub(crate) fn execute(&mut self, slot: Slot) {
        let Some(command) = self.state.commands.get_mut(slot) else { return };
        match std::mem::replace(&mut command.work, Work::Leaving) {
            Work::Planned(plan) => self.execute_plan(slot, &plan),
            Work::Refused => {
                self.state.finish(slot, Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry(), 0);
            }
            Work::Whole(sqe) => match self.state.role {
                Role::AwaitingConnect => self.connect(slot, &sqe),
                _ => self.admin(slot, *sqe),
            },
            Work::Fused(half) => self.half_arrived(slot, half),
            Work::Read
            | Work::Requests { .. }
            | Work::Copying { .. }
            | Work::AtController
            | Work::Parked
            | Work::Leaving => {
                unreachable!("a command is executed once")
            }
        }
    }

    fn execute_plan(&mut self, slot: Slot, plan: &Plan) {
        let Role::Io(queue) = &self.state.role else {
            return self.state.finish(slot, Status::COMMAND_SEQUENCE_ERROR, 0);
        };
        if let Err(status) = queue.namespaces.admit(plan) {
            return self.state.finish(slot, status, 0);
        }
        match plan.op {
            Planned::Reservation => self.reserve(slot, plan),
            Planned::Read => unreachable!("a read has no data to wait for"),
            Planned::Nothing => self.state.finish(slot, Status::SUCCESS, 0),
            Planned::Disconnect => {
                self.state.finish(slot, Status::SUCCESS, 0);
                self.state.leave(self.lent.now_ns);
            }
            Planned::Write | Planned::Compare => {
                let backend = queue.namespaces.entry(plan).backend;
                let op = if plan.op == Planned::Write { Op::Write } else { Op::Compare };
                match self.state.commands.take_data(slot) {
                    Data::Buffer(buffer) => {
                        self.begin(slot, 1);
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
                self.begin(slot, 1);
                self.submit(slot, backend, op, plan, None);
            }
            Planned::FlushAll => {
                let backends: Vec<u32> = queue.namespaces.backends().collect();
                let flushes = backends.into_iter().map(|backend| (backend, 0, 0)).collect();
                self.submit_all(slot, Op::Flush, plan, flushes);
            }
            // They wait for each other elsewhere.
            Planned::FusedCompare | Planned::FusedWrite => {
                self.state.finish(slot, Status::FUSED_MISSING, 0);
            }
            Planned::Copy => {
                let data = self.state.commands.take_data(slot);
                let Role::Io(queue) = &self.state.role else { return };
                match io::Copying::new(plan, &queue.namespaces, data.as_slice()) {
                    Ok(copying) => {
                        drop(data);
                        if let Some(command) = self.state.commands.get_mut(slot) {
                            command.work = Work::Copying { copying: Box::new(copying), has_read: false };
                        }
                        self.copy_on(slot);
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
                        self.begin(slot, 1);
                        self.submit(slot, backend, Op::Read, plan, Some(buffer));
                    }
                    None => {
                        if let Some(command) = self.state.commands.get_mut(slot) {
                            command.work = Work::Planned(*plan);
                        }
                        self.put_aside(slot);
                    }
                }
            }
        }
    }

    /// Begins the next pieces of copies whose last ones are done.
    pub(crate) fn go_on(&mut self) {
        for slot in std::mem::take(&mut self.state.going) {
            self.copy_on(slot);
        }
    }

    /// Reads the next piece of a Copy, or writes what was read of it, or is done with it.
    #[cold]
    fn copy_on(&mut self, slot: Slot) {
        let Role::Io(queue) = &self.state.role else { return };
        let Some(command) = self.state.commands.get_mut(slot) else { return };
        let Work::Copying { copying, has_read } = &command.work else { return };
        let (op, range) = (if *has_read { Op::Write } else { Op::Read }, copying.range());
        let (backend, flags, bytes_max) = (copying.backend, copying.flags(), copying.bytes_max());
        let Some(piece) = copying.next() else { return self.state.finish(slot, Status::SUCCESS, 0) };
        if let Err(status) = copying.admit(&queue.namespaces) {
            return self.state.finish(slot, status, range.into());
        }
        let bytes = copying.bytes(&piece);
        // One buffer serves all pieces, so that a Copy that has begun needs no more.
        let buffer = match std::mem::replace(&mut command.data, Data::None) {
            Data::Buffer(buffer) => Some(buffer),
            _ => self.take_buffer(slot, bytes_max as u32),
        };
        let Some(mut buffer) = buffer else { return self.put_aside(slot) };
        buffer.resize(bytes);
        let lba = if op == Op::Write { piece.to } else { piece.from };
        let mut request = Request::new(self.state.tag(slot), op, lba, piece.blocks);
        (request.flow, request.buffer) = (self.state.flow, Some(buffer));
        if op == Op::Write {
            request.flags = flags;
        }
        if let Err(status) = self.lent.submit(backend, request) {
            self.state.finish(slot, status, range.into());
        }
    }

    /// A reservation command, which no device sees.
    fn reserve(&mut self, slot: Slot, plan: &Plan) {
        let data = self.state.commands.take_data(slot);
        let Role::Io(queue) = &self.state.role else { return };
        match queue.namespaces.reserve(plan, data.as_slice()) {
            Outcome::Done(status) => self.state.finish(slot, status, 0),
            Outcome::Report(report) => self.state.finish_with_data(slot, Data::Bytes(report), 0),
            Outcome::Pending(pending) => {
                if let Some(command) = self.state.commands.get_mut(slot) {
                    command.work = Work::Parked;
                }
                self.state.parked.push(slot, pending);
                self.state.unpark();
            }
        }
    }

    /// Writes, or compares with, data that came without a buffer.
    #[cold]
    fn write_from_heap(&mut self, slot: Slot, backend: u32, plan: &Plan, data: Data) {
        let op = if plan.op == Planned::Write { Op::Write } else { Op::Compare };
        match self.take_buffer(slot, data.as_slice().len() as u32) {
            Some(mut buffer) => {
                buffer.as_mut_slice().copy_from_slice(data.as_slice());
                self.begin(slot, 1);
                self.submit(slot, backend, op, plan, Some(buffer));
            }
            None => {
                if let Some(command) = self.state.commands.get_mut(slot) {
                    (command.data, command.work) = (data, Work::Planned(*plan));
                }
                self.put_aside(slot);
            }
        }
    }

    pub(crate) fn begin(&mut self, slot: Slot, requests: u16) {
        if let Some(command) = self.state.commands.get_mut(slot) {
            command.work = Work::Requests { left: requests, status: Status::SUCCESS };
        }
    }

    fn unmap_ranges(&mut self, slot: Slot, plan: &Plan) -> Result<Vec<(u32, u64, u32)>, Status> {
        let Role::Io(queue) = &self.state.role else { return Err(Status::COMMAND_SEQUENCE_ERROR) };
        let table: &NamespaceTable = &queue.namespaces;
        let backend = table.entry(plan).backend;
        let data = self.state.commands.get_mut(slot).map_or(&[][..], |command| command.data.as_slice());
        Ok(io::unmaps(plan, table, data)?.map(|(lba, blocks)| (backend, lba, blocks)).collect())
    }

    /// Hands over one request for each (backend, first block, number of blocks).
    fn submit_all(&mut self, slot: Slot, op: Op, plan: &Plan, parts: Vec<(u32, u64, u32)>) {
        if parts.is_empty() {
            return self.state.finish(slot, Status::SUCCESS, 0);
        }
        self.begin(slot, parts.len() as u16);
        for (backend, lba, blocks) in parts {
            let mut request = Request::new(self.state.tag(slot), op, lba, blocks);
            request.flow = self.state.flow;
            request.flags = plan.flags;
            if let Err(status) = self.lent.submit(backend, request) {
                // As if the device had answered so.
                let refused = Request::new(self.state.tag(slot), op, lba, blocks).complete(status);
                self.state.complete(refused);
            }
        }
    }

    /// The first command of a queue.
    fn connect(&mut self, slot: Slot, sqe: &Sqe) {
        let Data::Bytes(data) = self.state.commands.take_data(slot) else {
            return self.state.finish(slot, Status::DATA_SGL_LENGTH_INVALID, 0);
        };
        let shared = self.lent.shared;
        let place = controller::Place {
            directory: &shared.directory,
            limits: &shared.limits.controller,
            port: self.state.port.clone(),
        };
        let connected = controller::connect(sqe, &data, &place, |nqn| shared.picture.subsystem(nqn));
        match connected {
            Err(error) => self.state.finish(slot, error.status, error.result),
            Ok(connected) => {
                let result = connected.cqe(sqe.cid).result;
                let (entries, flow_control_off) = match &connected {
                    ConnectOk::Admin(admin) => (admin.queue_entries, admin.no_flow_control),
                    ConnectOk::Io(io) => (io.queue_entries, io.no_flow_control),
                };
                self.state.entries = entries;
                self.state.flow_control_off = flow_control_off;
                self.state.data_tells_success = flow_control_off && shared.limits.c2h_success;
                self.state.head = if entries > 1 { 1 } else { 0 };
                self.state.finish(slot, Status::SUCCESS, result);
                self.state.commands = crate::command::Commands::new(entries);
                self.state.deadline_ns = u64::MAX;
                self.state.role = match connected {
                    ConnectOk::Admin(admin) => {
                        let limits = std::sync::Arc::new(shared.limits.controller.clone());
                        let discovery = shared.picture.discovery.clone();
                        let controller = Controller::new(admin, limits, discovery, self.lent.now_ns);
                        Role::Admin(Box::new(controller))
                    }
                    ConnectOk::Io(io) => {
                        let portid = self.state.port.portid;
                        Role::Io(IoQueue {
                            namespaces: NamespaceTable::of(
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

    /// A command of the admin queue.
    fn admin(&mut self, slot: Slot, sqe: Sqe) {
        let data = self.state.commands.take_data(slot);
        if let Some(command) = self.state.commands.get_mut(slot) {
            command.work = Work::AtController;
        }
        let now_ns = self.lent.now_ns;
        if sqe.opcode == AdminOpcode::GetLogPage.to_wire()
            && GetLogPage::of(&sqe).lid == LogId::Health.to_wire()
            && let Role::Admin(controller) = &self.state.role
        {
            let health = self.lent.shared.picture.health(controller.subsystem());
            self.state.control(Event::Health(health), now_ns);
        }
        self.state.control(Event::Command { sqe: &sqe, data: data.as_slice() }, now_ns);
    }
}

fn is_fused(sqe: &Sqe) -> bool {
    matches!(sqe.fuse(), Fuse::First | Fuse::Second)
}

impl crate::connection::State {
    /// Tells the controller of something, and does what it wants done.
    pub(crate) fn control(&mut self, event: Event<'_>, now_ns: u64) {
        let Role::Admin(controller) = &mut self.role else { return };
        let mut actions = Vec::new();
        controller.handle(event, now_ns, &mut actions);
        for action in actions {
            match action {
                Action::Complete(completion) => {
                    let (cqe, data) = (completion.cqe, completion.data);
                    let Some(slot) = self.commands.by_cid(cqe.cid) else { continue };
                    if cqe.status.is_success() && !data.is_empty() {
                        self.finish_with_data(slot, Data::Bytes(data), cqe.result);
                    } else {
                        self.finish(slot, cqe.status, cqe.result);
                    }
                }
                Action::CloseIoQueues => self.close_io_queues = true,
                Action::Terminate(_) => self.leave(now_ns),
            }
        }
    }
}
