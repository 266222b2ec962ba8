//! Fused Compare and Write over NVMe/TCP: two consecutive commands, whose data may arrive later.

use block_io::{Op, Payload, Request, RequestFlags, Status};
use dma::Buffer;
use nvme_controller::io::{self, FusedMatch, FusedPairing, IoPlan};
use nvme_controller::sgl::{self, DataSource};
use slots::Slot;
use wire_nvme::Sqe;
use wire_nvme::sqe::Fuse;

use crate::command::{CommandData, CommandState};
use crate::connection::IncomingPdu;
use crate::handler::PduHandler;
use crate::queue::ConnectionRole;

/// One of the two commands of a fused operation.
pub(crate) struct FusedHalf {
    pub(crate) plan: IoPlan,
    /// The other command, once both have been received.
    pub(crate) partner: Option<Slot>,
    is_first: bool,
    /// Its data has been received.
    has_data: bool,
    /// Set when it must not be executed: the status to complete it with once its data has been received.
    pub(crate) abort_status: Option<Status>,
}

impl PduHandler<'_, '_> {
    /// A fused command, or one that follows a first fused command.
    #[cold]
    pub(crate) fn io_fused(&mut self, sqe: &Sqe, capsule_bytes: u32) -> Result<(), Status> {
        let ConnectionRole::Io(queue) = &self.state.role else { return Err(Status::COMMAND_SEQUENCE_ERROR) };
        let planned = io::plan(sqe, &queue.namespaces);
        match self.state.pairing.match_next(sqe, &planned) {
            FusedMatch::Matched(first, plan) => {
                let second = self.start_half(sqe, plan, capsule_bytes, Some(first));
                match second {
                    Ok(second) => self.update_half(first, |half| half.partner = Some(second)),
                    Err(_) => self.abort_half(first, Status::FUSED_FAILED),
                }
                return second.map(|_| ());
            }
            FusedMatch::BothAborted(first, first_status, second_status) => {
                self.abort_half(first, first_status);
                return Err(second_status);
            }
            FusedMatch::FirstAborted(first, status) => self.abort_half(first, status),
            FusedMatch::Independent => {}
            FusedMatch::Rejected(status) => return Err(status),
        }
        if sqe.fuse() != Fuse::First {
            return self.io_command(sqe, capsule_bytes);
        }
        let first = planned.and_then(|plan| Ok((self.start_half(sqe, plan, capsule_bytes, None)?, plan)));
        self.state.pairing = match first {
            Ok((slot, plan)) => FusedPairing::FirstPending(slot, plan),
            Err(_) => FusedPairing::FirstRejected,
        };
        first.map(|_| ())
    }

    /// Accepts one of the two commands. Its data stays on the heap until both have arrived, so that no command
    /// holds a pool buffer while it waits for the other. At most a queue's worth of small transfers.
    fn start_half(
        &mut self,
        sqe: &Sqe,
        plan: IoPlan,
        capsule_bytes: u32,
        other: Option<Slot>,
    ) -> Result<Slot, Status> {
        let source = sgl::from_host(sqe.data, capsule_bytes)?;
        self.consume_sq_entry();
        let half = FusedHalf {
            plan,
            partner: other,
            is_first: other.is_none(),
            has_data: false,
            abort_status: None,
        };
        let length = source.length();
        let bytes = match source {
            DataSource::Transport { .. } => length,
            DataSource::Capsule { .. } => capsule_bytes,
        };
        let data = CommandData::Bytes(vec![0; bytes as usize]);
        let slot = self.state.new_command(sqe.cid, CommandState::Fused(Box::new(half)), data, length);
        match source {
            DataSource::Transport { .. } => {
                if let Some(command) = self.state.commands.get_mut(slot) {
                    command.requested_bytes = length;
                }
                self.state.send_r2t(slot, sqe.cid, length);
            }
            DataSource::Capsule { offset, .. } => {
                self.state.incoming_pdu = IncomingPdu::Capsule { slot, offset }
            }
        }
        Ok(slot)
    }

    /// Its plan, its abort status and its partner.
    fn half_info(&mut self, slot: Slot) -> Option<(IoPlan, Option<Status>, Option<Slot>)> {
        match &self.state.commands.get_mut(slot)?.state {
            CommandState::Fused(half) => Some((half.plan, half.abort_status, half.partner)),
            _ => None,
        }
    }

    fn update_half(&mut self, slot: Slot, change: impl FnOnce(&mut FusedHalf)) {
        if let Some(command) = self.state.commands.get_mut(slot)
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
            self.state.finish(slot, status, 0);
        }
    }

    /// One of the two failed by itself, which aborts the other.
    #[cold]
    pub(crate) fn half_failed(&mut self, slot: Slot) {
        let mut other = None;
        self.update_half(slot, |half| other = half.partner);
        match other {
            Some(other) => self.abort_half(other, Status::FUSED_FAILED),
            None if matches!(self.state.pairing, FusedPairing::FirstPending(first, _) if first == slot) => {
                self.state.pairing = FusedPairing::FirstRejected;
            }
            None => {}
        }
    }

    /// The data of one of the two has been received.
    pub(crate) fn half_data_received(&mut self, slot: Slot, mut half: Box<FusedHalf>) {
        half.has_data = true;
        let (abort_status, other, is_first) = (half.abort_status, half.partner, half.is_first);
        if let Some(command) = self.state.commands.get_mut(slot) {
            command.state = CommandState::Fused(half);
        }
        if let Some(status) = abort_status {
            return self.state.finish(slot, status, 0);
        }
        let Some(other) = other else { return };
        let mut has_data = false;
        self.update_half(other, |half| has_data = half.has_data);
        if has_data {
            self.compare_and_write(if is_first { slot } else { other });
        }
    }

    /// Submits both commands, or defers them until two buffers are available.
    pub(crate) fn compare_and_write(&mut self, first: Slot) {
        let Some((compare, first_abort, Some(second))) = self.half_info(first) else { return };
        let Some((write, second_abort, _)) = self.half_info(second) else { return };
        let ConnectionRole::Io(queue) = &self.state.role else { return };
        // The reservation may have changed meanwhile, and the namespace may be gone.
        let first_error = first_abort.or_else(|| queue.namespaces.check_reservation(&compare).err());
        let second_error = second_abort.or_else(|| queue.namespaces.check_reservation(&write).err());
        if first_error.is_some() || second_error.is_some() {
            return self.finish_both(first, first_error, second, second_error);
        }
        let backend = queue.namespaces.entry(&compare).backend;
        let Some(buffers) = self.take_both_buffers(first, second) else { return self.defer(first) };
        let [compare, write] =
            [(first, Op::Compare, compare), (second, Op::Write, write)].map(|(slot, op, plan)| {
                let mut request = Request::new(self.state.tag(slot), op, plan.lba, plan.blocks);
                (request.flow, request.flags) = (self.state.flow, plan.flags);
                request
            });
        let [expected, new] = buffers;
        let payload = Payload::Data(expected.into());
        let compare = Request { flags: RequestFlags::FUSED, payload, ..compare };
        let write = Request { payload: Payload::Data(new.into()), ..write };
        self.set_submitted(first, 1);
        self.set_submitted(second, 1);
        // Adjacent in the device's batch.
        let submitted =
            self.context.submit(backend, compare).and_then(|()| self.context.submit(backend, write));
        if let Err(status) = submitted {
            self.finish_both(first, Some(status), second, None);
        }
    }

    fn finish_both(
        &mut self,
        first: Slot,
        first_status: Option<Status>,
        second: Slot,
        second_status: Option<Status>,
    ) {
        self.state.finish(first, first_status.unwrap_or(Status::FUSED_FAILED), 0);
        self.state.finish(second, second_status.unwrap_or(Status::FUSED_FAILED), 0);
    }

    /// Takes a buffer for each and copies the data into it: both or none.
    fn take_both_buffers(&mut self, first: Slot, second: Slot) -> Option<[Buffer; 2]> {
        let length = self.state.commands.get_mut(first)?.length;
        let bytes_max = self.context.protocol.limits.connection_bytes_max;
        let held_bytes = self.state.commands.buffer_bytes;
        let fits = held_bytes == 0 || held_bytes + 2 * length as usize <= bytes_max;
        if !self.state.deferred.is_empty() || !fits {
            return None;
        }
        let mut buffers =
            [self.context.pool.take(length as usize)?, self.context.pool.take(length as usize)?];
        for (slot, buffer) in [first, second].into_iter().zip(&mut buffers) {
            let data = self.state.commands.take_data(slot);
            buffer.as_mut_slice().copy_from_slice(data.as_slice());
            self.state.commands.account_buffer(slot, length);
        }
        Some(buffers)
    }
}
