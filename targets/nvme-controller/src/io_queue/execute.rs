//! Execution of commands, with the transport at hand.

use block_io::{Op, Payload, Request, Status, Tag};
use dma::Data;
use slots::Slot;
use wire_nvme::sqe::Fuse;
use wire_nvme::{Sqe, sqe};

use super::command::{Command, CommandData, CommandState};
use super::{AdminCommand, CommandToken, DIRECT, HostData, HostTransfer, IoQueue, IoTransport, Transferred};
use crate::io::{self, CopyOperation, DataTransfer, IoOp, IoPlan, PlainTransfer};
use crate::reservation::ReservationOutcome;

/// A queue while it executes commands, with its transport.
pub(super) struct Execution<'a, T: IoTransport> {
    pub(super) queue: &'a mut IoQueue<T::Location>,
    pub(super) transport: &'a mut T,
}

/// A command whose data the transport moves: see [`HostData::Moved`].
pub(super) struct MovedData<L> {
    pub(super) token: CommandToken,
    pub(super) location: L,
    pub(super) room: u32,
    immediate: bool,
}

impl<T: IoTransport> Execution<'_, T> {
    /// Executes an I/O command, or as much of it as is possible at present.
    #[inline(always)]
    pub(super) fn entry(&mut self, entry: &[u8; sqe::SIZE]) {
        // Its fields stay in the entry, but for those that are used here.
        let sqe = Sqe::decode(entry);
        match sqe.opcode {
            _ if self.queue.pairing.expects_second() => self.uncommon_entry(entry),
            // Apart, so that the operation is a constant in each.
            io::READ => self.plain_entry(&sqe, Op::Read, entry),
            io::WRITE => self.plain_entry(&sqe, Op::Write, entry),
            _ => self.uncommon_entry(entry),
        }
    }

    #[inline(always)]
    fn plain_entry(&mut self, sqe: &Sqe, op: Op, entry: &[u8; sqe::SIZE]) {
        match io::plain_transfer(sqe, op, &self.queue.namespaces) {
            Some(transfer) => self.transfer(CommandToken::new(sqe.cid), sqe, transfer),
            None => self.uncommon_entry(entry),
        }
    }

    #[cold]
    #[inline(never)]
    fn uncommon_entry(&mut self, entry: &[u8; sqe::SIZE]) {
        let sqe = Sqe::decode(entry);
        self.command(CommandToken::new(sqe.cid), &sqe);
    }

    /// As [`entry`](Self::entry), of a command that was received with a message.
    #[inline(always)]
    pub(super) fn command(&mut self, token: CommandToken, sqe: &Sqe) {
        if self.queue.pairing.expects_second() {
            return self.fused_command(token, sqe);
        }
        match io::plan(sqe, &self.queue.namespaces) {
            Ok(plan) => self.accept(token, sqe, &plan),
            Err(_) if matches!(sqe.fuse(), Fuse::First | Fuse::Second) => self.fused_command(token, sqe),
            Err(status) => self.reject(token, sqe, status),
        }
    }

    /// Answers a command that the table of namespaces does not permit, unless the host has identified its
    /// namespace since.
    #[cold]
    #[inline(never)]
    fn reject(&mut self, token: CommandToken, sqe: &Sqe, status: Status) {
        match self.queue.open_identified(sqe.nsid) {
            true => self.command(token, sqe),
            false => self.transport.complete(token, status, 0),
        }
    }

    #[inline(always)]
    fn accept(&mut self, token: CommandToken, sqe: &Sqe, plan: &IoPlan) {
        let (op, bytes) = match (plan.op, plan.data) {
            (IoOp::Read, DataTransfer::ToHost(bytes)) => (Op::Read, bytes),
            (IoOp::Write, DataTransfer::FromHost(bytes)) => (Op::Write, bytes),
            _ => return self.accept_uncommon(token, sqe, plan),
        };
        self.transfer(token, sqe, PlainTransfer::of(plan, op, bytes, &self.queue.namespaces));
    }

    /// Accepts a Read or Write.
    #[inline(always)]
    fn transfer(&mut self, token: CommandToken, sqe: &Sqe, transfer: PlainTransfer) {
        let PlainTransfer { op, bytes, buffer_alignment, .. } = transfer;
        if let Some(buffer) = self.transport.lend_range(sqe, bytes, op == Op::Read, buffer_alignment) {
            return self.submit_lent(token, transfer, buffer.into());
        }
        let lend_alignment = Some(buffer_alignment);
        match self.transport.locate(sqe, HostTransfer { bytes, to_host: op == Op::Read, lend_alignment }) {
            Ok(HostData::Lent(data)) => self.submit_segments(token, &transfer.plan(), op, data),
            Ok(HostData::Moved { location, room, immediate }) => {
                let moved = MovedData { token, location, room, immediate };
                if T::LENDS {
                    self.accept_moved_uncommon(&transfer.plan(), op, bytes, moved);
                } else {
                    self.accept_moved(&transfer.plan(), op, bytes, moved);
                }
            }
            Err(status) => self.transport.complete(token, status, 0),
        }
    }

    /// Submits a Read or Write of lent memory.
    #[inline(always)]
    fn submit_lent(&mut self, token: CommandToken, transfer: PlainTransfer, data: Data) {
        let PlainTransfer { op, lba, blocks, backend, flags, .. } = transfer;
        let cid = token.answered();
        let payload = Payload::Data(data);
        let mut request = Request::with_payload(Tag(DIRECT | u64::from(cid)), op, lba, blocks, payload);
        request.flags = flags;
        match self.transport.submit(backend, request) {
            Ok(()) => self.queue.device_requests += 1,
            Err(status) => self.transport.complete(CommandToken::new(cid), status, 0),
        }
    }

    /// [`submit_lent`](Self::submit_lent) of memory that the transport had to look for.
    #[inline(never)]
    fn submit_segments(&mut self, token: CommandToken, plan: &IoPlan, op: Op, data: Data) {
        let transfer = PlainTransfer::of(plan, op, data.len() as u32, &self.queue.namespaces);
        self.submit_lent(token, transfer, data);
    }

    /// [`accept_moved`](Self::accept_moved) out of the way of commands whose memory is lent.
    #[cold]
    #[inline(never)]
    fn accept_moved_uncommon(&mut self, plan: &IoPlan, op: Op, bytes: u32, moved: MovedData<T::Location>) {
        self.accept_moved(plan, op, bytes, moved);
    }

    /// Accepts a Read or Write whose data the transport moves.
    #[inline(always)]
    fn accept_moved(&mut self, plan: &IoPlan, op: Op, bytes: u32, moved: MovedData<T::Location>) {
        let MovedData { token, location, room, immediate } = moved;
        // Each command is made as it will be: a change of its state or data would drop the previous one.
        match (op, self.take_data(room)) {
            (Op::Read, Some(memory)) => {
                let (state, token) = (CommandState::Reading, Some(token));
                let (data, length, buffer_bytes) = (CommandData::None, bytes, room);
                let slot = self.queue.insert(Command { token, state, location, data, length, buffer_bytes });
                self.submit(slot, Op::Read, plan, Some(memory));
            }
            (Op::Write, Some(memory)) => {
                let (state, token) = (CommandState::Planned(*plan), Some(token));
                let (data, length, buffer_bytes) = (CommandData::Pool(memory), bytes, room);
                let slot = self.queue.insert(Command { token, state, location, data, length, buffer_bytes });
                // An I/O command is never the owner's.
                _ = self.receive(slot);
            }
            _ => {
                let slot =
                    self.queue.insert(Command::new(token, CommandState::Planned(*plan), location, bytes));
                self.without_buffer(slot, room, immediate);
            }
        }
    }

    #[cold]
    fn accept_uncommon(&mut self, token: CommandToken, sqe: &Sqe, plan: &IoPlan) {
        let (bytes, to_host) = match plan.data {
            DataTransfer::Fused(_) => return self.fused_command(token, sqe),
            DataTransfer::FromHost(bytes) => (bytes, false),
            DataTransfer::ToHost(bytes) | DataTransfer::ControllerData(bytes) => (bytes, true),
            DataTransfer::None => (0, false),
        };
        if bytes == 0 {
            let slot = self.queue.insert(Command::new(
                token,
                CommandState::Planned(*plan),
                T::Location::default(),
                0,
            ));
            return self.execute_plan(slot, plan);
        }
        let Some(moved) = self.locate(token, sqe, bytes, to_host) else { return };
        let slot =
            self.queue.insert(Command::new(moved.token, CommandState::Planned(*plan), moved.location, bytes));
        match plan.op {
            _ if to_host => self.execute_plan(slot, plan),
            IoOp::Compare | IoOp::ProtectedWrite => {
                self.receive_to_buffer(slot, moved.room, moved.immediate);
            }
            // A few pages at most, which the controller itself reads.
            _ => _ = self.receive_into(slot, CommandData::Bytes(vec![0; moved.room as usize])),
        }
    }

    /// Finds the data of a command that has to be moved, or completes the command with an error.
    pub(super) fn locate(
        &mut self,
        token: CommandToken,
        sqe: &Sqe,
        bytes: u32,
        to_host: bool,
    ) -> Option<MovedData<T::Location>> {
        match self.transport.locate(sqe, HostTransfer { bytes, to_host, lend_alignment: None }) {
            Ok(HostData::Moved { location, room, immediate }) => {
                return Some(MovedData { token, location, room, immediate });
            }
            Ok(HostData::Lent(_)) => self.transport.complete(token, Status::INTERNAL_ERROR, 0),
            Err(status) => self.transport.complete(token, status, 0),
        }
        None
    }

    /// Accepts an admin or Connect command with `bytes` bytes of host data. Returns it when its data has been
    /// received, here or by [`data_received`](Self::data_received).
    pub(super) fn admin_command(
        &mut self,
        token: CommandToken,
        sqe: &Sqe,
        bytes: u32,
    ) -> Option<AdminCommand> {
        let state = CommandState::Admin(Box::new(*sqe));
        if bytes == 0 {
            let location = self.transport.answer_location(sqe);
            let slot = self.queue.insert(Command::new(token, state, location, sqe.data.length()));
            return self.execute(slot);
        }
        let moved = self.locate(token, sqe, bytes, false)?;
        let slot = self.queue.insert(Command::new(moved.token, state, moved.location, bytes));
        self.receive_into(slot, CommandData::Bytes(vec![0; moved.room as usize]))
    }

    /// All data of a command has been received, from byte `offset` of its memory, or could not be: then the
    /// command fails with the status.
    #[inline]
    pub(super) fn data_received(
        &mut self,
        slot: Slot,
        received: Result<usize, Status>,
    ) -> Option<AdminCommand> {
        let command = self.queue.commands.get_mut(slot)?;
        match received {
            Ok(offset) => {
                command.data.keep(offset, command.length as usize);
                self.execute(slot)
            }
            Err(status) => {
                self.half_failed(slot);
                self.queue.finish(slot, status, 0, self.transport);
                None
            }
        }
    }

    /// Continues copies and deferred commands, oldest first, until one is deferred again.
    pub(super) fn retry(&mut self) {
        for slot in std::mem::take(&mut self.queue.ready_copies) {
            self.advance_copy(slot);
        }
        let mut deferred = std::mem::take(&mut self.queue.deferred);
        while let Some(slot) = deferred.pop_front() {
            let Some(command) = self.queue.commands.get_mut(slot) else { continue };
            let (length, has_data) = (command.length, !matches!(command.data, CommandData::None));
            match command.state {
                CommandState::Planned(plan) => match self.queue.namespaces.check_reservation(&plan) {
                    Err(status) => self.queue.finish(slot, status, 0, self.transport),
                    Ok(()) if plan.op == IoOp::Read => self.read(slot, &plan, length),
                    Ok(()) if has_data || length == 0 || plan.op == IoOp::ProtectedRead => {
                        self.execute_plan(slot, &plan);
                    }
                    Ok(()) => self.receive_to_buffer(slot, length, false),
                },
                CommandState::Fused(_) => self.compare_and_write(slot),
                CommandState::Rejected => _ = self.execute(slot),
                _ => {}
            }
            if !self.queue.deferred.is_empty() {
                break;
            }
        }
        // The one that was deferred again is the oldest.
        self.queue.deferred.append(&mut deferred);
    }

    /// Takes memory for a command, which is charged for it. `None` if the pool has too little, the queue is
    /// at its limit, or other commands are deferred.
    #[inline]
    fn take_data(&mut self, bytes: u32) -> Option<Data> {
        // Deferred commands come first; otherwise small commands would starve a large one.
        if self.queue.paused || !self.queue.deferred.is_empty() || !self.queue.memory.admits(bytes as usize) {
            return None;
        }
        let data = self.transport.take_data(bytes as usize)?;
        self.queue.memory.add(bytes as usize);
        Some(data)
    }

    /// Takes memory for a command that has a slot.
    fn take_data_for(&mut self, slot: Slot, bytes: u32) -> Option<Data> {
        let data = self.take_data(bytes)?;
        if let Some(command) = self.queue.commands.get_mut(slot) {
            command.buffer_bytes += bytes;
        }
        Some(data)
    }

    /// Defers a command that found no buffers.
    #[cold]
    pub(super) fn defer(&mut self, slot: Slot) {
        self.queue.deferred.push_back(slot);
    }

    /// A command that moves data found no buffer: it is deferred, or receives into heap memory if its data
    /// follows in the stream, which is at most a queue's worth of capsules.
    #[cold]
    fn without_buffer(&mut self, slot: Slot, room: u32, immediate: bool) {
        if immediate {
            // An I/O command is never the owner's.
            _ = self.receive_into(slot, CommandData::Bytes(vec![0; room as usize]));
        } else {
            self.defer(slot);
        }
    }

    /// Receives a command's data into a buffer.
    fn receive_to_buffer(&mut self, slot: Slot, room: u32, immediate: bool) {
        match self.take_data_for(slot, room) {
            Some(data) => _ = self.receive_into(slot, CommandData::Pool(data)),
            None => self.without_buffer(slot, room, immediate),
        }
    }

    pub(super) fn receive_into(&mut self, slot: Slot, data: CommandData) -> Option<AdminCommand> {
        self.queue.commands.get_mut(slot)?.data = data;
        self.receive(slot)
    }

    /// Receives a command's data into the memory that it has.
    #[inline]
    pub(super) fn receive(&mut self, slot: Slot) -> Option<AdminCommand> {
        let command = self.queue.commands.get_mut(slot)?;
        let cid = command.token.as_ref()?.cid();
        match self.transport.receive(slot, cid, &mut command.location, &mut command.data) {
            Ok(Transferred::Later) => None,
            Ok(Transferred::Now) => self.data_received(slot, Ok(0)),
            Err(status) => self.data_received(slot, Err(status)),
        }
    }

    /// Submits a deferred read, or defers it again.
    fn read(&mut self, slot: Slot, plan: &IoPlan, bytes: u32) {
        let Some(data) = self.take_data_for(slot, bytes) else {
            return self.defer(slot);
        };
        self.queue.set_state(slot, CommandState::Reading);
        self.submit(slot, Op::Read, plan, Some(data));
    }

    /// Executes a command that has no data or whose data has been received.
    fn execute(&mut self, slot: Slot) -> Option<AdminCommand> {
        let command = self.queue.commands.get_mut(slot)?;
        match &mut command.state {
            CommandState::Planned(plan) => {
                let plan = *plan;
                self.execute_plan(slot, &plan);
            }
            CommandState::Rejected => {
                let status = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
                self.queue.finish(slot, status, 0, self.transport);
            }
            CommandState::Fused(_) => self.half_data_received(slot),
            CommandState::Admin(_) => {
                let state = std::mem::replace(&mut command.state, CommandState::AtOwner);
                let CommandState::Admin(sqe) = state else { return None };
                let CommandData::Bytes(data) = std::mem::take(&mut command.data) else {
                    return Some(AdminCommand { slot, sqe, data: Vec::new() });
                };
                // What the host asked for, if the command is answered with data.
                command.length = sqe.data.length();
                return Some(AdminCommand { slot, sqe, data });
            }
            CommandState::Reading
            | CommandState::Submitted { .. }
            | CommandState::Copying(_)
            | CommandState::AtOwner
            | CommandState::ReservationPending
            | CommandState::Sending => unreachable!("a command is executed once"),
        }
        None
    }

    fn execute_plan(&mut self, slot: Slot, plan: &IoPlan) {
        // It may have changed while the command waited.
        if let Err(status) = self.queue.namespaces.check_reservation(plan) {
            return self.queue.finish(slot, status, 0, self.transport);
        }
        match plan.op {
            IoOp::Write => self.write(slot, Op::Write, plan),
            IoOp::Compare => self.write(slot, Op::Compare, plan),
            IoOp::ProtectedRead => {
                let bytes = plan.blocks * self.queue.namespaces.entry(plan).block_bytes(plan.protection);
                let Some(data) = self.take_data_for(slot, bytes) else { return self.defer(slot) };
                self.queue.set_state(slot, CommandState::Reading);
                self.submit_protected(slot, Op::Read, plan, data);
            }
            IoOp::ProtectedWrite => {
                let Some(data) = self.take_received(slot) else { return };
                self.queue.set_state(slot, CommandState::Submitted { remaining: 1, status: Status::SUCCESS });
                self.submit_protected(slot, Op::Write, plan, data);
            }
            IoOp::Flush => self.submit_only(slot, Op::Flush, plan, None),
            IoOp::WriteZeroes => self.submit_only(slot, Op::WriteZeroes, plan, None),
            IoOp::WriteUncorrectable => self.submit_only(slot, Op::WriteUncorrectable, plan, None),
            IoOp::Verify => {
                let bytes = plan.blocks * self.queue.namespaces.entry(plan).block_bytes(plan.protection);
                let Some(data) = self.take_data_for(slot, bytes) else { return self.defer(slot) };
                if plan.protection.is_empty() {
                    return self.submit_only(slot, Op::Read, plan, Some(data));
                }
                self.queue.set_state(slot, CommandState::Submitted { remaining: 1, status: Status::SUCCESS });
                self.submit_protected(slot, Op::Read, plan, data);
            }
            IoOp::FlushAll => {
                let flushes = self.queue.namespaces.backends().map(|backend| (backend, 0, 0)).collect();
                self.submit_all(slot, Op::Flush, plan, flushes);
            }
            IoOp::Unmap => {
                let backend = self.queue.namespaces.entry(plan).backend;
                let data = self.queue.take_data(slot);
                let ranges = io::unmap_ranges(plan, &self.queue.namespaces, data.parameters());
                match ranges.map(|ranges| ranges.map(|(lba, blocks)| (backend, lba, blocks)).collect()) {
                    Ok(ranges) => self.submit_all(slot, Op::Unmap, plan, ranges),
                    Err(status) => self.queue.finish(slot, status, 0, self.transport),
                }
            }
            IoOp::Copy => {
                let data = self.queue.take_data(slot);
                match CopyOperation::new(plan, &self.queue.namespaces, data.parameters()) {
                    Ok(copying) => {
                        self.queue.set_state(slot, CommandState::Copying(Box::new(copying)));
                        self.advance_copy(slot);
                    }
                    Err(status) => self.queue.finish(slot, status, 0, self.transport),
                }
            }
            IoOp::Reservation => self.reservation(slot, plan),
            IoOp::NoOp => self.queue.finish(slot, Status::SUCCESS, 0, self.transport),
            IoOp::Disconnect => {
                self.queue.finish(slot, Status::SUCCESS, 0, self.transport);
                self.transport.disconnect();
            }
            // Fused commands are executed as a pair, and reads have no data to wait for.
            IoOp::FusedCompare | IoOp::FusedWrite | IoOp::Read => {
                self.queue.finish(slot, Status::INTERNAL_ERROR, 0, self.transport);
            }
        }
    }

    /// Submits a Write or Compare whose data has been received, once it is in a buffer.
    #[inline]
    fn write(&mut self, slot: Slot, op: Op, plan: &IoPlan) {
        if let Some(data) = self.take_received(slot) {
            self.submit_only(slot, op, plan, Some(data));
        }
    }

    /// The data that a command has received, in buffers; without them the command is deferred.
    #[inline]
    fn take_received(&mut self, slot: Slot) -> Option<Data> {
        let data = match self.queue.take_data(slot) {
            CommandData::Pool(data) => return Some(data),
            data => data,
        };
        let bytes = data.len() as u32;
        if let Some(mut memory) = self.take_data_for(slot, bytes) {
            data.copy_to(&mut memory);
            return Some(memory);
        }
        if let Some(command) = self.queue.commands.get_mut(slot) {
            command.data = data;
        }
        self.defer(slot);
        None
    }

    /// Submits a request that the block device executes with the command's protection.
    #[cold]
    fn submit_protected(&mut self, slot: Slot, op: Op, plan: &IoPlan, data: Data) {
        let backend = self.queue.namespaces.entry(plan).backend;
        let mut request = Request::new(self.queue.tag(slot), op, plan.lba, plan.blocks);
        request.flags = plan.flags;
        request.payload = Payload::Protected(plan.protected(data));
        match self.transport.submit(backend, request) {
            Ok(()) => self.queue.device_requests += 1,
            Err(status) => self.queue.finish(slot, status, 0, self.transport),
        }
    }

    /// Starts the next range of a Copy, or completes it. The layer moves the data: a Copy holds no buffer
    /// here.
    #[cold]
    fn advance_copy(&mut self, slot: Slot) {
        let Some(command) = self.queue.commands.get_mut(slot) else { return };
        let CommandState::Copying(copying) = &command.state else { return };
        let index = copying.index().into();
        let Some(range) = copying.current_range() else {
            return self.queue.finish(slot, Status::SUCCESS, 0, self.transport);
        };
        if let Err(status) = copying.check_access(&self.queue.namespaces) {
            return self.queue.finish(slot, status, index, self.transport);
        }
        let (backend, flags) = (copying.backend, copying.flags());
        let request = Request::copy(self.queue.tag(slot), range.from, range.to, range.blocks);
        match self.transport.submit(backend, Request { flags, ..request }) {
            Ok(()) => self.queue.device_requests += 1,
            Err(status) => self.queue.finish(slot, status, index, self.transport),
        }
    }

    /// A reservation command: executed by the target, without a device request.
    fn reservation(&mut self, slot: Slot, plan: &IoPlan) {
        let data = self.queue.take_data(slot);
        match self.queue.namespaces.execute_reservation(plan, data.parameters()) {
            ReservationOutcome::Done(status) => self.queue.finish(slot, status, 0, self.transport),
            ReservationOutcome::Report(report) => {
                self.queue.send(slot, CommandData::Bytes(report), 0, self.transport)
            }
            ReservationOutcome::Pending(pending) => {
                self.queue.set_state(slot, CommandState::ReservationPending);
                self.queue.pending_reservations.push(slot, pending);
                self.queue.complete_reservations(self.transport);
            }
        }
    }

    /// Submits the only request of a command, which completes with the request's status.
    #[inline]
    fn submit_only(&mut self, slot: Slot, op: Op, plan: &IoPlan, data: Option<Data>) {
        self.queue.set_state(slot, CommandState::Submitted { remaining: 1, status: Status::SUCCESS });
        self.submit(slot, op, plan, data);
    }

    #[inline]
    fn submit(&mut self, slot: Slot, op: Op, plan: &IoPlan, data: Option<Data>) {
        let backend = self.queue.namespaces.entry(plan).backend;
        let payload = Payload::from_data(data);
        let mut request = Request::with_payload(self.queue.tag(slot), op, plan.lba, plan.blocks, payload);
        request.flags = plan.flags;
        match self.transport.submit(backend, request) {
            Ok(()) => self.queue.device_requests += 1,
            Err(status) => self.queue.finish(slot, status, 0, self.transport),
        }
    }

    /// Submits one request for each (backend, first LBA, number of blocks).
    fn submit_all(&mut self, slot: Slot, op: Op, plan: &IoPlan, ranges: Vec<(u32, u64, u32)>) {
        if ranges.is_empty() {
            return self.queue.finish(slot, Status::SUCCESS, 0, self.transport);
        }
        let mut failed = Vec::new();
        self.queue.set_state(
            slot,
            CommandState::Submitted { remaining: ranges.len() as u16, status: Status::SUCCESS },
        );
        for (backend, lba, blocks) in ranges {
            let mut request = Request::new(self.queue.tag(slot), op, lba, blocks);
            request.flags = plan.flags;
            self.queue.device_requests += 1;
            if let Err(status) = self.transport.submit(backend, request) {
                failed.push(Request::new(self.queue.tag(slot), op, lba, blocks).complete(status));
            }
        }
        for completion in failed {
            self.queue.complete(completion.tag(), completion, self.transport);
        }
    }
}
