//! Fused Compare and Write over a connection: two commands in a row, whose data may come later.

use controller::io::{self, Paired, Pairing, Plan};
use controller::sgl::{self, Source};
use memory::Buffer;
use ring::{Flags, Op, Request, Status};
use slots::Slot;
use wire_nvme::Sqe;
use wire_nvme::sqe::Fuse;

use crate::command::{Data, Work};
use crate::connection::Current;
use crate::handler::Handler;
use crate::queue::Role;

/// One of the two commands.
pub(crate) struct Half {
    pub(crate) plan: Plan,
    /// The other, once both are there.
    pub(crate) other: Option<Slot>,
    is_first: bool,
    /// Its data is here.
    is_ready: bool,
    /// What it will be answered without having been executed.
    pub(crate) doom: Option<Status>,
}

impl Handler<'_, '_> {
    /// A command that is fused, or follows one that is.
    #[cold]
    pub(crate) fn io_fused(&mut self, sqe: &Sqe, capsule_bytes: u32) -> Result<(), Status> {
        let Role::Io(queue) = &self.state.role else { return Err(Status::COMMAND_SEQUENCE_ERROR) };
        let planned = io::plan(sqe, &queue.namespaces);
        match self.state.pairing.follow(sqe, &planned) {
            Paired::With(first, plan) => {
                let second = self.half(sqe, plan, capsule_bytes, Some(first));
                match second {
                    Ok(second) => self.with_half(first, |half| half.other = Some(second)),
                    Err(_) => self.doom(first, Status::FUSED_FAILED),
                }
                return second.map(|_| ());
            }
            Paired::Neither(first, of_first, of_second) => {
                self.doom(first, of_first);
                return Err(of_second);
            }
            Paired::Apart(first, status) => self.doom(first, status),
            Paired::Alone => {}
            Paired::Refused(status) => return Err(status),
        }
        if sqe.fuse() != Fuse::First {
            return self.io(sqe, capsule_bytes);
        }
        let first = planned.and_then(|plan| Ok((self.half(sqe, plan, capsule_bytes, None)?, plan)));
        self.state.pairing = match first {
            Ok((slot, plan)) => Pairing::Waits(slot, plan),
            Err(_) => Pairing::Refused,
        };
        first.map(|_| ())
    }

    /// Takes one of the two. Its data is kept on the heap until both are here, so that none holds a buffer while
    /// it waits for the other: a queue's worth of small ones at most.
    fn half(
        &mut self,
        sqe: &Sqe,
        plan: Plan,
        capsule_bytes: u32,
        other: Option<Slot>,
    ) -> Result<Slot, Status> {
        let source = sgl::from_host(sqe.data, capsule_bytes)?;
        self.take_entry();
        let half = Half { plan, other, is_first: other.is_none(), is_ready: false, doom: None };
        let length = source.length();
        let bytes = match source {
            Source::Transport { .. } => length,
            Source::Capsule { .. } => capsule_bytes,
        };
        let data = Data::Bytes(vec![0; bytes as usize]);
        let slot = self.state.new_command(sqe.cid, Work::Fused(Box::new(half)), data, length);
        match source {
            Source::Transport { .. } => {
                if let Some(command) = self.state.commands.get_mut(slot) {
                    command.asked = length;
                }
                self.state.ready_to_transfer(slot, sqe.cid, length);
            }
            Source::Capsule { offset, .. } => self.state.current = Current::Capsule { slot, offset },
        }
        Ok(slot)
    }

    /// Its plan, its doom and the other.
    fn facts_of_half(&mut self, slot: Slot) -> Option<(Plan, Option<Status>, Option<Slot>)> {
        match &self.state.commands.get_mut(slot)?.work {
            Work::Fused(half) => Some((half.plan, half.doom, half.other)),
            _ => None,
        }
    }

    fn with_half(&mut self, slot: Slot, change: impl FnOnce(&mut Half)) {
        if let Some(command) = self.state.commands.get_mut(slot)
            && let Work::Fused(half) = &mut command.work
        {
            change(half);
        }
    }

    /// Answers one of the two with a status as soon as its data is here.
    fn doom(&mut self, slot: Slot, status: Status) {
        let mut is_ready = false;
        self.with_half(slot, |half| {
            half.doom.get_or_insert(status);
            is_ready = half.is_ready;
        });
        if is_ready {
            self.state.finish(slot, status, 0);
        }
    }

    /// One of the two fails by itself; the other cannot be done either.
    #[cold]
    pub(crate) fn half_failed(&mut self, slot: Slot) {
        let mut other = None;
        self.with_half(slot, |half| other = half.other);
        match other {
            Some(other) => self.doom(other, Status::FUSED_FAILED),
            None if matches!(self.state.pairing, Pairing::Waits(first, _) if first == slot) => {
                self.state.pairing = Pairing::Refused;
            }
            None => {}
        }
    }

    /// The data of one of the two is here.
    pub(crate) fn half_arrived(&mut self, slot: Slot, mut half: Box<Half>) {
        half.is_ready = true;
        let (doom, other, is_first) = (half.doom, half.other, half.is_first);
        if let Some(command) = self.state.commands.get_mut(slot) {
            command.work = Work::Fused(half);
        }
        if let Some(status) = doom {
            return self.state.finish(slot, status, 0);
        }
        let Some(other) = other else { return };
        let mut is_ready = false;
        self.with_half(other, |half| is_ready = half.is_ready);
        if is_ready {
            self.compare_and_write(if is_first { slot } else { other });
        }
    }

    /// Executes both, once both are here, or puts them aside until there are buffers.
    pub(crate) fn compare_and_write(&mut self, first: Slot) {
        let Some((compare, doom_of_first, Some(second))) = self.facts_of_half(first) else { return };
        let Some((write, doom_of_second, _)) = self.facts_of_half(second) else { return };
        let Role::Io(queue) = &self.state.role else { return };
        // Reservations may be others by now, and the namespace gone.
        let of_first = doom_of_first.or_else(|| queue.namespaces.admit(&compare).err());
        let of_second = doom_of_second.or_else(|| queue.namespaces.admit(&write).err());
        if of_first.is_some() || of_second.is_some() {
            return self.finish_both(first, of_first, second, of_second);
        }
        let backend = queue.namespaces.entry(&compare).backend;
        let Some(buffers) = self.take_two(first, second) else { return self.put_aside(first) };
        let [compare, write] =
            [(first, Op::Compare, compare), (second, Op::Write, write)].map(|(slot, op, plan)| {
                let mut request = Request::new(self.state.tag(slot), op, plan.lba, plan.blocks);
                (request.flow, request.flags) = (self.state.flow, plan.flags);
                request
            });
        let [expected, new] = buffers;
        let compare = Request { flags: Flags::FUSED, buffer: Some(expected), ..compare };
        let write = Request { buffer: Some(new), ..write };
        self.begin(first, 1);
        self.begin(second, 1);
        // Next to each other in the device's batch.
        let submitted = self.lent.submit(backend, compare).and_then(|()| self.lent.submit(backend, write));
        if let Err(status) = submitted {
            self.finish_both(first, Some(status), second, None);
        }
    }

    fn finish_both(&mut self, first: Slot, one: Option<Status>, second: Slot, other: Option<Status>) {
        self.state.finish(first, one.unwrap_or(Status::FUSED_FAILED), 0);
        self.state.finish(second, other.unwrap_or(Status::FUSED_FAILED), 0);
    }

    /// Buffers with the data of both: both or none.
    fn take_two(&mut self, first: Slot, second: Slot) -> Option<[Buffer; 2]> {
        let length = self.state.commands.get_mut(first)?.length;
        let most = self.lent.shared.limits.connection_bytes_max;
        let held = self.state.commands.held_bytes;
        let has_room = held == 0 || held + 2 * length as usize <= most;
        if !self.state.aside.is_empty() || !has_room {
            return None;
        }
        let mut buffers = [self.lent.pool.take(length as usize)?, self.lent.pool.take(length as usize)?];
        for (slot, buffer) in [first, second].into_iter().zip(&mut buffers) {
            let data = self.state.commands.take_data(slot);
            buffer.as_mut_slice().copy_from_slice(data.as_slice());
            self.state.commands.hold(slot, length);
        }
        Some(buffers)
    }
}
