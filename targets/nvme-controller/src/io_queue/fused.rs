//! Fused Compare and Write: two consecutive commands of a queue, whose data may arrive later.

use block_io::{Op, Payload, Request, RequestFlags, Status};
use dma::Data;
use slots::Slot;
use wire_nvme::Sqe;
use wire_nvme::sqe::Fuse;

use super::IoTransport;
use super::command::{Command, CommandData, CommandState, CommandToken, FusedHalf};
use super::execute::{Execution, MovedData};
use crate::io::{self, FusedMatch, FusedPairing, IoPlan};

impl<T: IoTransport> Execution<'_, T> {
    /// A fused command, or one that follows a first fused command.
    #[cold]
    pub(super) fn fused_command(&mut self, token: CommandToken, sqe: &Sqe) {
        self.queue.open_identified(sqe.nsid);
        let planned = io::plan(sqe, &self.queue.namespaces);
        match self.queue.pairing.match_next(sqe, &planned) {
            FusedMatch::Matched(first, plan) => {
                return match self.accept_half(token, sqe, plan, Some(first)) {
                    Some(second) => _ = self.receive(second),
                    None => self.abort_half(first, Status::FUSED_FAILED),
                };
            }
            FusedMatch::BothAborted(first, first_status, second_status) => {
                self.abort_half(first, first_status);
                return self.transport.complete(token, second_status, 0);
            }
            FusedMatch::FirstAborted(first, status) => self.abort_half(first, status),
            FusedMatch::Independent => {}
            FusedMatch::Rejected(status) => return self.transport.complete(token, status, 0),
        }
        if sqe.fuse() != Fuse::First {
            return self.command(token, sqe);
        }
        let plan = match planned {
            Ok(plan) => plan,
            Err(status) => {
                self.queue.pairing = FusedPairing::FirstRejected;
                return self.transport.complete(token, status, 0);
            }
        };
        match self.accept_half(token, sqe, plan, None) {
            Some(first) => {
                self.queue.pairing = FusedPairing::FirstPending(first, plan);
                // A fused command is never the owner's.
                _ = self.receive(first);
            }
            None => self.queue.pairing = FusedPairing::FirstRejected,
        }
    }

    /// Accepts one of the two commands, or completes it with an error. Its data stays on the heap until both have
    /// arrived, so that no command holds a pool buffer while it waits for the other: at most a queue's worth of small
    /// transfers.
    fn accept_half(
        &mut self,
        token: CommandToken,
        sqe: &Sqe,
        plan: IoPlan,
        partner: Option<Slot>,
    ) -> Option<Slot> {
        let length = plan.blocks * self.queue.namespaces.entry(&plan).block_bytes(plan.protection);
        let MovedData { token, location, room, .. } = self.locate(token, sqe, length, false)?;
        let half =
            FusedHalf { plan, partner, is_first: partner.is_none(), has_data: false, abort_status: None };
        let command = Command::new(token, CommandState::Fused(Box::new(half)), location, length);
        let data = CommandData::Bytes(vec![0; room as usize]);
        let slot = self.queue.insert(Command { data, ..command });
        if let Some(first) = partner {
            self.update_half(first, |half| half.partner = Some(slot));
        }
        Some(slot)
    }

    /// Its plan, its abort status and its partner.
    fn half_info(&mut self, slot: Slot) -> Option<(IoPlan, Option<Status>, Option<Slot>)> {
        match &self.queue.commands.get_mut(slot)?.state {
            CommandState::Fused(half) => Some((half.plan, half.abort_status, half.partner)),
            _ => None,
        }
    }

    fn update_half(&mut self, slot: Slot, change: impl FnOnce(&mut FusedHalf)) {
        if let Some(command) = self.queue.commands.get_mut(slot)
            && let CommandState::Fused(half) = &mut command.state
        {
            change(half);
        }
    }

    /// Aborts one of the two: it completes with `status` as soon as its data has been received.
    fn abort_half(&mut self, slot: Slot, status: Status) {
        let mut has_data = false;
        self.update_half(slot, |half| {
            half.abort_status.get_or_insert(status);
            has_data = half.has_data;
        });
        if has_data {
            self.queue.finish(slot, status, 0, self.transport);
        }
    }

    /// One of the two failed by itself, which aborts the other.
    #[cold]
    pub(super) fn half_failed(&mut self, slot: Slot) {
        let Some((_, _, partner)) = self.half_info(slot) else { return };
        match partner {
            Some(partner) => self.abort_half(partner, Status::FUSED_FAILED),
            None if matches!(self.queue.pairing, FusedPairing::FirstPending(first, _) if first == slot) => {
                self.queue.pairing = FusedPairing::FirstRejected;
            }
            None => {}
        }
    }

    /// The data of one of the two has been received.
    pub(super) fn half_data_received(&mut self, slot: Slot) {
        let (mut partner, mut is_first) = (None, false);
        self.update_half(slot, |half| {
            half.has_data = true;
            (partner, is_first) = (half.partner, half.is_first);
        });
        if let Some((_, Some(status), _)) = self.half_info(slot) {
            // A change of namespaces aborts both, and the other may have had its data before, or comes later.
            self.half_failed(slot);
            self.queue.finish(slot, status, 0, self.transport);
            return;
        }
        let Some(partner) = partner else { return };
        let mut both_have_data = false;
        self.update_half(partner, |half| both_have_data = half.has_data);
        if both_have_data {
            self.compare_and_write(if is_first { slot } else { partner });
        }
    }

    /// Submits both commands, or defers them until two buffers are available.
    pub(super) fn compare_and_write(&mut self, first: Slot) {
        let Some((compare, first_abort, Some(second))) = self.half_info(first) else { return };
        let Some((write, second_abort, _)) = self.half_info(second) else { return };
        // The reservation may have changed meanwhile, and the namespace may be gone.
        let first_error = first_abort.or_else(|| self.queue.namespaces.check_reservation(&compare).err());
        let second_error = second_abort.or_else(|| self.queue.namespaces.check_reservation(&write).err());
        if first_error.is_some() || second_error.is_some() {
            return self.finish_both(first, first_error, second, second_error);
        }
        let backend = self.queue.namespaces.entry(&compare).backend;
        let Some(both) = self.take_both(first, second) else { return self.defer(first) };
        let [compare, write] =
            [(first, Op::Compare, compare), (second, Op::Write, write)].map(|(slot, op, plan)| {
                let request = Request::new(self.queue.tag(slot), op, plan.lba, plan.blocks);
                self.queue.set_state(slot, CommandState::Submitted { remaining: 1, status: Status::SUCCESS });
                Request { flags: plan.flags, ..request }
            });
        let [expected, new] = both.map(Payload::Data);
        let compare = Request { flags: RequestFlags::FUSED, payload: expected, ..compare };
        // Adjacent in the device's batch. The device is there for both or for none.
        let submitted = self
            .transport
            .submit(backend, compare)
            .and_then(|()| self.transport.submit(backend, Request { payload: new, ..write }));
        match submitted {
            Ok(()) => self.queue.device_requests += 2,
            Err(status) => self.finish_both(first, Some(status), second, None),
        }
    }

    fn finish_both(
        &mut self,
        first: Slot,
        first_status: Option<Status>,
        second: Slot,
        second_status: Option<Status>,
    ) {
        self.queue.finish(first, first_status.unwrap_or(Status::FUSED_FAILED), 0, self.transport);
        self.queue.finish(second, second_status.unwrap_or(Status::FUSED_FAILED), 0, self.transport);
    }

    /// Takes memory for each and copies the data into it: both or none, so that no pair holds one's while it waits for
    /// the other's.
    fn take_both(&mut self, first: Slot, second: Slot) -> Option<[Data; 2]> {
        let length = self.queue.commands.get_mut(first)?.length;
        if !self.queue.deferred.is_empty() || !self.queue.memory.admits(2 * length as usize) {
            return None;
        }
        let mut both =
            [self.transport.take_data(length as usize)?, self.transport.take_data(length as usize)?];
        for (slot, memory) in [first, second].into_iter().zip(&mut both) {
            self.queue.take_data(slot).copy_to(memory);
            if let Some(command) = self.queue.commands.get_mut(slot) {
                command.buffer_bytes += length;
            }
            self.queue.memory.add(length as usize);
        }
        Some(both)
    }
}
