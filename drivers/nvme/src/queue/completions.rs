//! Completion of commands: by the device, with an injected fault, or aborted after the device was stopped.

use block_io::{Completion, Op, Status};
use dma::Data;

use super::{MemoryQueue, SlotKind, SlotRequest, opcode_of};
use crate::command::CommandCompletion;
use crate::error::BadCompletion;
use crate::inject::InjectedFault;
use crate::rings::RawCqe;

impl MemoryQueue {
    /// Processes new completions: requests into `ios`, typed commands into `done`. Returns their number.
    ///
    /// # Errors
    /// An entry that matches no command in flight: the controller must be taken offline. The completions before it
    /// have been processed.
    #[inline]
    pub(crate) fn reap(
        &mut self,
        ios: &mut Vec<Completion<Data>>,
        done: &mut Vec<CommandCompletion>,
    ) -> Result<usize, BadCompletion> {
        let (mut count, mut outcome) = (0, Ok(()));
        loop {
            if self.injections.is_empty() {
                count += self.reap_successes(ios);
            }
            let Some(entry) = self.rings.peek() else { break };
            if let Err(what) = self.reap_uncommon(entry, ios, done) {
                outcome = Err(what);
                break;
            }
            count += 1;
        }
        self.stats.completed += count as u64;
        if count > 0 {
            self.rings.ring_cq_doorbell();
        }
        outcome.map(|()| count)
    }

    /// Processes the run of successful completions of plain requests at the head of the completion queue.
    #[inline(always)]
    fn reap_successes(&mut self, ios: &mut Vec<Completion<Data>>) -> usize {
        let MemoryQueue { rings, slots, requests, free, room, index_bits, .. } = self;
        let (slots, free) = (&mut slots[..], &mut free[..]);
        let requests = &mut requests[..slots.len()];
        let first = *room;
        let mut next = first;
        let step = 1u16 << *index_bits;
        let index_mask = usize::from(step - 1);
        rings.advance_over_successes(|cid| {
            let index = usize::from(cid) & index_mask;
            let (Some(slot), Some(place)) = (slots.get_mut(index), free.get_mut(next)) else {
                return false;
            };
            if slot.cid != cid || slot.kind != SlotKind::Io {
                return false;
            }
            slot.cid = cid.wrapping_add(step);
            slot.kind = SlotKind::Free;
            *place = index as u16;
            next += 1;
            true
        });
        *room = next;
        let ended = free[first..next].iter().map(|index| requests[usize::from(*index)].complete_success());
        ios.extend(ended);
        next - first
    }

    /// Processes one completion with an error, of a typed command or of a request with a bounce buffer.
    #[cold]
    fn reap_uncommon(
        &mut self,
        entry: RawCqe,
        ios: &mut Vec<Completion<Data>>,
        done: &mut Vec<CommandCompletion>,
    ) -> Result<(), BadCompletion> {
        let index = usize::from(entry.cid()) & ((1 << self.index_bits) - 1);
        let slot = self.slots.get(index).ok_or(BadCompletion::CommandOutOfRange(entry.cid()))?;
        if slot.cid != entry.cid() || !slot.kind.awaits_completion() {
            return Err(BadCompletion::NotInFlight(entry.cid()));
        }
        if entry.sqid() != self.rings.qid() {
            return Err(BadCompletion::WrongQueue(entry.sqid()));
        }
        if !self.rings.matches_queue(entry) {
            return Err(BadCompletion::SqHeadOutOfRange(entry.sqhd()));
        }
        let result = self.rings.result();
        self.rings.advance();
        let status = match self.apply_injection(index) {
            InjectedFault::Nothing => entry.status(),
            InjectedFault::Status(replaced) => replaced,
            InjectedFault::Drop => return Ok(()),
        };
        self.stats.errors += u64::from(!status.is_success());
        self.finish(index, status, result, ios, done);
        Ok(())
    }

    #[cold]
    fn finish(
        &mut self,
        index: usize,
        status: Status,
        result: u64,
        ios: &mut Vec<Completion<Data>>,
        done: &mut Vec<CommandCompletion>,
    ) {
        let slot = &mut self.slots[index];
        let kind = std::mem::replace(&mut slot.kind, SlotKind::Free);
        slot.cid = slot.cid.wrapping_add(1 << self.index_bits);
        let request = self.requests[index].take();
        self.free[self.room] = index as u16;
        self.room += 1;
        match kind {
            SlotKind::Free => unreachable!("a free slot was finished"),
            SlotKind::Io | SlotKind::Dropped => ios.extend(request.map(|request| request.complete(status))),
            SlotKind::Bounced | SlotKind::DroppedBounced => {
                let copy = self.bounce_buffers[index].take();
                if let Some(mut request) = request {
                    if let (Op::Read, Some(copy), Some(data)) = (request.op, copy, request.data_mut())
                        && status.is_success()
                    {
                        data.copy_from(0, copy.as_slice());
                    }
                    ios.push(request.complete(status));
                }
            }
            SlotKind::Command | SlotKind::DroppedCommand => {
                done.extend(self.commands[index].take().map(|command| CommandCompletion {
                    command,
                    status,
                    result,
                }));
            }
        }
    }

    #[cold]
    fn apply_injection(&mut self, index: usize) -> InjectedFault {
        let slot = &mut self.slots[index];
        let opcode = match (&self.requests[index], self.commands.get(index)) {
            (SlotRequest::Request(request), _) => opcode_of(request.op),
            (SlotRequest::Empty, Some(Some(command))) => Some(command.sqe.opcode),
            _ => None,
        };
        let Some(opcode) = opcode else { return InjectedFault::Nothing };
        let injected = self.injections.next(opcode);
        if injected == InjectedFault::Drop {
            slot.kind = match slot.kind {
                SlotKind::Bounced => SlotKind::DroppedBounced,
                SlotKind::Command => SlotKind::DroppedCommand,
                _ => SlotKind::Dropped,
            };
        }
        injected
    }

    /// Completes every command in flight with `status`. The device must no longer access their memory.
    pub(crate) fn abort_all(
        &mut self,
        status: Status,
        ios: &mut Vec<Completion<Data>>,
        done: &mut Vec<CommandCompletion>,
    ) {
        for index in 0..self.slots.len() {
            if self.slots[index].kind != SlotKind::Free {
                self.stats.completed += 1;
                self.stats.errors += 1;
                self.finish(index, status, 0, ios, done);
            }
        }
    }
}
