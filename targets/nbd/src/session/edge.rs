//! Writes of a part of a block.
//!
//! The block is read, the part is put into it, and the result is written by a fused compare-and-write: the block layer
//! locks the range, compares the block with what was read, and writes only if it is the same. If another client was
//! first, it begins again. So no byte of another write is lost, on whichever connection and core it was.
//! Those of one connection take turns at a block: they would only have each other begin again.

use std::collections::VecDeque;

use block_io::{RequestFlags, Status};
use dma::{Buffer, Data};
use slots::Slot;
use target_shell::{IoContext, NoMemory, SendQueue};

use super::{CommandState, Retry, Role, Session, gave_up};
use crate::connection::NbdCore;
use crate::limits::EDGE_ATTEMPTS_MAX;
use crate::status::error_of;

/// A part of a block that is being written.
pub(super) struct Edge {
    lba: u64,
    within: usize,
    count: usize,
    flags: RequestFlags,
    /// The block with the part in it; the rest is filled when the block was read.
    new: Option<Buffer>,
    /// The block as it was read.
    old: Option<Buffer>,
    attempts: u32,
    /// Of the compare and the write, those in flight.
    in_flight: u8,
    /// Another write was first.
    conflict: bool,
    is_written: bool,
    /// It is its connection's turn at the block.
    has_turn: bool,
}

/// The blocks of which a connection writes parts.
#[derive(Default)]
pub(super) struct EdgeTurns {
    /// Those where one has its turn.
    taken: Vec<u64>,
    /// Those that wait for theirs: the block, and the part.
    waiting: VecDeque<(u64, Slot, usize)>,
}

impl EdgeTurns {
    pub(super) fn are_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }
}

impl Edge {
    pub(super) fn new(lba: u64, within: usize, count: usize, flags: RequestFlags, new: Buffer) -> Edge {
        let new = Some(new);
        let (old, attempts, in_flight) = (None, 0, 0);
        let (conflict, is_written, has_turn) = (false, false, false);
        Edge { lba, within, count, flags, new, old, attempts, in_flight, conflict, is_written, has_turn }
    }
}

impl CommandState {
    fn edge(&mut self, index: usize) -> Option<&mut Edge> {
        self.edges.as_mut()?.get_mut(index)?.as_mut()
    }
}

impl Session {
    pub(super) fn begin_edge(&mut self, slot: Slot, index: usize, edge: Edge) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        command.edges.get_or_insert_default()[index] = Some(edge);
        command.pending += 1;
        self.retries.push_back((slot, Retry::Edge(index)));
    }

    /// The next step: read the block, or compare and write it.
    pub(super) fn edge_again(
        &mut self,
        slot: Slot,
        index: usize,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) -> Result<(), NoMemory> {
        if self.export.reads_undefined {
            // Such a device keeps nothing, so that there is nothing to lose.
            self.end_edge(slot, index, out);
            return Ok(());
        }
        let has_old = |command: &mut CommandState| Some(command.edge(index)?.old.is_some());
        match self.commands.get_mut(slot).and_then(has_old) {
            None => Ok(()),
            Some(true) => {
                self.submit_edge(slot, index, out, context);
                Ok(())
            }
            Some(false) => {
                if !self.takes_turn(slot, index) {
                    return Ok(());
                }
                let old = self.take_block(context)?;
                let lba = self.commands.get_mut(slot).and_then(|command| Some(command.edge(index)?.lba));
                let read = bdev::Request::read(Role::EdgeRead(index).tag(slot), lba.unwrap_or(0), 1, old);
                if !self.submit_step(slot, read, context) {
                    self.end_edge(slot, index, out);
                }
                Ok(())
            }
        }
    }

    /// Whether a part has its turn at the block. If not, it waits for it.
    fn takes_turn(&mut self, slot: Slot, index: usize) -> bool {
        let Some(edge) = self.commands.get_mut(slot).and_then(|command| command.edge(index)) else {
            return false;
        };
        if !edge.has_turn {
            if self.edge_turns.taken.contains(&edge.lba) {
                self.edge_turns.waiting.push_back((edge.lba, slot, index));
                return false;
            }
            edge.has_turn = true;
            self.edge_turns.taken.push(edge.lba);
        }
        true
    }

    /// The next one has its turn at a block.
    fn end_turn(&mut self, lba: u64) {
        let EdgeTurns { taken, waiting } = &mut self.edge_turns;
        taken.retain(|other| *other != lba);
        let next = waiting.iter().position(|(other, ..)| *other == lba);
        if let Some((_, slot, index)) = next.and_then(|next| waiting.remove(next)) {
            self.retries.push_back((slot, Retry::Edge(index)));
        }
    }

    /// As [`submit`](Self::submit), but the piece does not end if it fails.
    fn submit_step(
        &mut self,
        slot: Slot,
        mut request: bdev::Request,
        context: &mut IoContext<'_, NbdCore>,
    ) -> bool {
        request.flow = self.flow;
        let held = request.data().map_or(0, Data::len);
        let submitted = context.submit(self.export.key, request);
        match submitted {
            Ok(()) => self.outstanding += 1,
            Err(status) => {
                self.memory.remove(held);
                if let Some(command) = self.commands.get_mut(slot) {
                    command.fail(error_of(status));
                }
            }
        }
        submitted.is_ok()
    }

    /// The old block has arrived.
    pub(super) fn edge_read(
        &mut self,
        slot: Slot,
        index: usize,
        completion: bdev::Completion,
        out: &mut SendQueue,
    ) {
        let status = completion.status();
        let data = completion.into_data();
        let old = data.and_then(|data| data.into_single().ok());
        if !status.is_success() {
            self.memory.remove(old.as_ref().map_or(0, Buffer::len));
            if let Some(command) = self.commands.get_mut(slot) {
                command.fail(error_of(status));
            }
            return self.end_edge(slot, index, out);
        }
        if let Some(edge) = self.commands.get_mut(slot).and_then(|command| command.edge(index)) {
            edge.old = old;
        }
        self.retries.push_back((slot, Retry::Edge(index)));
    }

    /// Fills the new block from the old one and submits both.
    fn submit_edge(
        &mut self,
        slot: Slot,
        index: usize,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) {
        let Some(edge) = self.commands.get_mut(slot).and_then(|command| command.edge(index)) else { return };
        let (Some(mut new), Some(old)) = (edge.new.take(), edge.old.take()) else { return };
        let end = edge.within + edge.count;
        new.as_mut_slice()[..edge.within].copy_from_slice(&old.as_slice()[..edge.within]);
        new.as_mut_slice()[end..].copy_from_slice(&old.as_slice()[end..]);
        (edge.in_flight, edge.conflict) = (2, false);
        let (lba, flags) = (edge.lba, edge.flags);
        let compare = bdev::Request {
            op: block_io::Op::Compare,
            flags: RequestFlags::FUSED,
            ..bdev::Request::write(Role::EdgeCompare(index).tag(slot), lba, 1, old)
        };
        let write = bdev::Request::write(Role::EdgeWrite(index).tag(slot), lba, 1, new);
        // Both reach the same batch, or neither: only a missing device is an error.
        let compares = self.submit_step(slot, compare, context);
        if !self.submit_step(slot, bdev::Request { flags, ..write }, context) || !compares {
            self.end_edge(slot, index, out);
        }
    }

    pub(super) fn edge_compared(
        &mut self,
        slot: Slot,
        index: usize,
        completion: bdev::Completion,
        out: &mut SendQueue,
    ) {
        let status = completion.status();
        let old = completion.into_data();
        self.memory.remove(old.as_ref().map_or(0, Data::len));
        let Some(command) = self.commands.get_mut(slot) else { return };
        let is_conflict = status.same_code(Status::COMPARE_FAILURE);
        // The write says why.
        let follows_write = status.same_code(Status::FUSED_FAILED);
        if !status.is_success() && !is_conflict && !follows_write {
            command.fail(error_of(status));
        }
        if let Some(edge) = command.edge(index) {
            edge.conflict |= is_conflict;
        }
        self.edge_step_done(slot, index, out);
    }

    pub(super) fn edge_written(
        &mut self,
        slot: Slot,
        index: usize,
        completion: bdev::Completion,
        out: &mut SendQueue,
    ) {
        let status = completion.status();
        let new = completion.into_data();
        let Some(command) = self.commands.get_mut(slot) else { return };
        // The compare says why.
        let follows_compare = status.same_code(Status::FUSED_FAILED);
        if !status.is_success() && !follows_compare {
            command.fail(error_of(status));
        }
        if let Some(edge) = command.edge(index) {
            edge.is_written = status.is_success();
            edge.new = new.and_then(|data| data.into_single().ok());
        }
        self.edge_step_done(slot, index, out);
    }

    /// After the compare and the write, in whichever order.
    fn edge_step_done(&mut self, slot: Slot, index: usize, out: &mut SendQueue) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let has_failed = command.error.is_some();
        let Some(edge) = command.edge(index) else { return };
        edge.in_flight -= 1;
        if edge.in_flight > 0 {
            return;
        }
        if !edge.conflict || has_failed {
            if !edge.is_written {
                // Unless one of both has said why.
                command.fail(gave_up());
            }
            return self.end_edge(slot, index, out);
        }
        edge.attempts += 1;
        if edge.attempts == EDGE_ATTEMPTS_MAX {
            command.fail(gave_up());
            return self.end_edge(slot, index, out);
        }
        self.retries.push_back((slot, Retry::Edge(index)));
    }

    fn end_edge(&mut self, slot: Slot, index: usize, out: &mut SendQueue) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let edge = command.edges.as_mut().and_then(|edges| edges[index].take());
        if let Some(edge) = edge {
            let bytes = [edge.new, edge.old].iter().flatten().map(Buffer::len).sum::<usize>();
            self.memory.remove(bytes);
            if edge.has_turn {
                self.end_turn(edge.lba);
            }
        }
        self.end_piece(slot, out);
    }
}
