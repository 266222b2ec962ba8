//! What an admin queue and an I/O queue have in common: commands in slots.
//!
//! A command has a slot from submission to completion, and the slot owns the request and its buffer. The
//! command identifier is the slot's index with the bits above it counting the slot's uses, so that what
//! a broken or hostile device says of a command that is over, or never was, is an error and touches
//! nobody's memory.

use std::vec::Drain;

use memory::{Buffer, DeviceBuffer, Pool};
use ring::{Completion, Flags, Op, Request, Status};
use wire_nvme::io::{
    DSM_RANGE_SIZE, DatasetManagement, DsmRange, Prinfo, ReadWrite, WriteUncorrectable, WriteZeroes,
};
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::sqe::Fuse;
use wire_nvme::{DataPointer, Sqe};

use crate::command::{Command, Executed};
use crate::dma::{Described, Translator};
use crate::error::BadCompletion;
use crate::inject::{Injected, Injections};
use crate::namespace_info::Layout;
use crate::rings::{Entry, Rings};
use crate::stats::QueueStats;

/// Most commands on a queue.
pub(crate) const DEPTH_MAX: u32 = 1023;

/// The commands of one queue pair.
pub(crate) struct Queue {
    pub(crate) rings: Rings,
    pub(crate) translator: Translator,
    slots: Box<[Slot]>,
    /// What the slots of requests hold.
    requests: Box<[Held]>,
    /// Slots without a command: the first [`room`](Self::room) of these.
    free: Box<[u16]>,
    room: usize,
    /// What the slots of typed commands hold; grown when the first is submitted.
    commands: Vec<Option<Command>>,
    /// Copies of lent buffers, by slot; grown when the first is needed.
    bounces: Vec<Option<Buffer>>,
    /// Sixteen bytes a slot, for the ranges of Dataset Management.
    ranges: DeviceBuffer,
    ranges_at: u64,
    index_bits: u32,
    pool: Pool,
    pub(crate) stats: QueueStats,
    pub(crate) injections: Injections,
}

/// What a slot holds for its request. The tag is a word of its own: in an `Option` it would be a byte of the request,
/// which would then be copied in pieces around it.
#[repr(u64)]
enum Held {
    Nothing,
    Request(Request<Buffer>),
}

impl Held {
    fn take(&mut self) -> Option<Request<Buffer>> {
        match std::mem::replace(self, Held::Nothing) {
            Held::Request(request) => Some(request),
            Held::Nothing => None,
        }
    }

    /// Moves the next request of a batch here. What is here and what is there are not the same memory, which the
    /// compiler knows of a function's arguments, and so copies once.
    #[inline]
    fn hold_next(&mut self, batch: &mut Drain<'_, Request<Buffer>>) {
        assert!(matches!(self, Held::Nothing), "a free slot held a request");
        if let Some(request) = batch.next() {
            *self = Held::Request(request);
        }
    }

    /// The end of a request that went well.
    #[inline(always)]
    fn succeed(&mut self) -> Completion<Buffer> {
        match std::mem::replace(self, Held::Nothing) {
            Held::Request(request) => request.complete(Status::SUCCESS),
            Held::Nothing => unreachable!("a command of a request has the request"),
        }
    }
}

/// What is known of a command in flight besides its request: eight of them share a cache line, so that matching
/// completions touches little memory.
struct Slot {
    /// When it was submitted, in units of 2^20 ns.
    stamp: u32,
    /// Identifier of the command that is in flight, or of the next one.
    cid: u16,
    kind: Kind,
}

const _: () = assert!(size_of::<Slot>() == 8);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    Free,
    /// A request of a channel.
    Io,
    /// The same, with a copy of its lent buffer.
    Bounced,
    /// A typed command.
    Command,
    /// In flight, and its completion was thrown away on purpose.
    Lost,
    LostBounced,
    LostCommand,
}

impl Kind {
    /// Whether the device has still to answer.
    fn is_awaited(self) -> bool {
        matches!(self, Kind::Io | Kind::Bounced | Kind::Command)
    }
}

/// Nanoseconds to units of a slot's stamp.
const STAMP_SHIFT: u32 = 20;

/// A command that has been in flight for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overdue {
    pub(crate) cid: u16,
}

impl Queue {
    /// A queue of `depth` commands over fresh rings, which have more entries than that.
    pub(crate) fn new(
        rings: Rings,
        mut translator: Translator,
        depth: u32,
        pool: &Pool,
        ranges: Buffer,
    ) -> Result<Queue, crate::device::DeviceError> {
        assert!((1..=DEPTH_MAX).contains(&depth) && depth <= rings.mask(), "a depth of {depth}");
        let ranges_at = translator.address(&ranges)?;
        assert!(ranges.len() >= depth as usize * DSM_RANGE_SIZE, "no place for ranges");
        Ok(Queue {
            rings,
            translator,
            slots: (0..depth as u16).map(|index| Slot { stamp: 0, cid: index, kind: Kind::Free }).collect(),
            free: (0..depth as u16).rev().collect(),
            room: depth as usize,
            requests: (0..depth).map(|_| Held::Nothing).collect(),
            commands: Vec::new(),
            bounces: Vec::new(),
            ranges: DeviceBuffer::new(ranges),
            ranges_at,
            index_bits: index_bits(depth),
            pool: pool.clone(),
            stats: QueueStats::default(),
            injections: Injections::default(),
        })
    }

    /// Where the device sees the rings: submission queue, completion queue.
    pub(crate) fn ring_addresses(&mut self) -> Result<(u64, u64), crate::device::DeviceError> {
        let (sq, cq) = self.rings.buffers();
        Ok((self.translator.address(sq)?, self.translator.address(cq)?))
    }

    /// Commands that can be in flight.
    pub(crate) fn depth(&self) -> usize {
        self.slots.len()
    }

    /// Commands that can still be submitted.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    /// Commands in flight.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.room
    }

    /// Bytes of our own memory and of DMA memory that the queue holds.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let own = size_of::<Queue>()
            + size_of_val(&self.slots[..])
            + size_of_val(&self.requests[..])
            + size_of_val(&self.free[..])
            + self.commands.capacity() * size_of::<Option<Command>>()
            + self.bounces.capacity() * size_of::<Option<Buffer>>();
        (own, self.rings.bytes() + self.ranges.buffer().capacity() + self.translator.list_bytes())
    }

    /// Takes requests from the front of the batch while there are slots; what cannot be a command is
    /// completed into `refused`.
    #[inline]
    pub(crate) fn submit(
        &mut self,
        layout: &Layout,
        batch: &mut Vec<Request<Buffer>>,
        refused: &mut Vec<Completion<Buffer>>,
        now_ns: u64,
    ) {
        let count = batch.len().min(self.room);
        self.stats.full += u64::from(count < batch.len());
        if count == 0 {
            return;
        }
        let stamp = (now_ns >> STAMP_SHIFT) as u32;
        let mut requests = batch.drain(..count);
        loop {
            // The shortest way for as long as it leads on.
            self.place_while(layout, &mut requests, stamp, Translator::describe_page);
            self.place_while(layout, &mut requests, stamp, Translator::describe_known);
            let Some(request) = requests.next() else { break };
            let index = self.free[self.room - 1];
            match self.place(layout, &request, index) {
                Ok(kind) => {
                    let slot = &mut self.slots[usize::from(index)];
                    (slot.stamp, slot.kind) = (stamp, kind);
                    self.requests[usize::from(index)] = Held::Request(request);
                    self.room -= 1;
                }
                Err(status) => refused.push(request.complete(status)),
            }
        }
        drop(requests);
        self.stats.submitted += count as u64;
        self.stats.batches += 1;
        self.rings.ring();
    }

    /// Writes commands up to the first request that is no read or write of memory that `describe` can describe.
    /// There are slots for all of them.
    #[inline(always)]
    fn place_while(
        &mut self,
        layout: &Layout,
        batch: &mut Drain<'_, Request<Buffer>>,
        stamp: u32,
        describe: impl Fn(&Translator, &Buffer, u32) -> Option<Described>,
    ) {
        let Queue { rings, translator, slots, requests, free, room, .. } = self;
        let slots = &mut slots[..];
        let requests = &mut requests[..slots.len()];
        let mut indices = free[..*room].iter().rev();
        let count = rings.push_all(|| {
            let request = batch.as_slice().first()?;
            let index = usize::from(*indices.next()?);
            let (slot, place) = (&mut slots[index], &mut requests[index]);
            let buffer = simple(layout, request)?;
            let described = describe(translator, buffer, buffer.len() as u32)?;
            let sqe = read_write(layout, request, slot.cid, described);
            (slot.stamp, slot.kind) = (stamp, Kind::Io);
            place.hold_next(batch);
            Some(sqe)
        });
        *room -= count as usize;
    }

    /// Writes the command of a request that is about to go into slot `index`.
    #[cold]
    fn place(&mut self, layout: &Layout, request: &Request<Buffer>, index: u16) -> Result<Kind, Status> {
        if !is_read_or_write(request.op) {
            return self.place_other(layout, request, index);
        }
        let buffer = request.buffer.as_ref().filter(|buffer| layout.covers(request, buffer));
        let Some(buffer) = buffer else { return Err(Status::INVALID_FIELD.do_not_retry()) };
        let copy = if buffer.is_lent() { Some(self.copy_of_lent(request, buffer)?) } else { None };
        let described = self.translator.describe(copy.as_ref().unwrap_or(buffer), buffer.len() as u32);
        let described = described.map_err(|_| Status::COMMAND_INTERRUPTED)?;
        self.rings.push(&read_write(layout, request, self.slots[usize::from(index)].cid, described));
        let Some(copy) = copy else { return Ok(Kind::Io) };
        if self.bounces.is_empty() {
            self.bounces.resize_with(self.slots.len(), || None);
        }
        self.bounces[usize::from(index)] = Some(copy);
        Ok(Kind::Bounced)
    }

    /// A request whose buffer is part of memory that the device does not see goes through a copy.
    fn copy_of_lent(&self, request: &Request<Buffer>, lent: &Buffer) -> Result<Buffer, Status> {
        let mut copy = self.pool.take(lent.len()).ok_or(Status::COMMAND_INTERRUPTED)?;
        if request.op == Op::Write {
            lent.copy_to(0, copy.as_mut_slice());
        }
        Ok(copy)
    }

    /// Everything but reads and writes.
    fn place_other(
        &mut self,
        layout: &Layout,
        request: &Request<Buffer>,
        index: u16,
    ) -> Result<Kind, Status> {
        let (lba, blocks) = (request.lba, request.blocks);
        let fua = request.flags.contains(Flags::FUA);
        let mut sqe = match request.op {
            Op::Flush => Sqe::new(NvmOpcode::Flush.to_wire()),
            Op::Unmap | Op::WriteZeroes if blocks == 0 => return Err(Status::INVALID_FIELD.do_not_retry()),
            Op::WriteZeroes if layout.write_zeroes => {
                if blocks > layout.write_zeroes_blocks_max {
                    return Err(Status::INVALID_FIELD.do_not_retry());
                }
                let deallocate = request.flags.contains(Flags::DEALLOCATE);
                let prinfo = Prinfo(layout.prinfo.0 & Prinfo::ACTION);
                WriteZeroes { lba, blocks, fua, deallocate, prinfo }.to_sqe()
            }
            Op::Unmap if layout.unmap => {
                let mut range = [0; DSM_RANGE_SIZE];
                DsmRange { attributes: 0, blocks, lba }.encode(&mut range);
                let at = u64::from(index) * DSM_RANGE_SIZE as u64;
                self.ranges.write(at, &range);
                let view = DatasetManagement {
                    ranges: 1,
                    integral_read: false,
                    integral_write: false,
                    deallocate: true,
                };
                Sqe { data: DataPointer::prp(self.ranges_at + at, 0), ..view.to_sqe() }
            }
            Op::WriteUncorrectable if (1..=layout.write_uncorrectable_blocks_max).contains(&blocks) => {
                WriteUncorrectable { lba, blocks }.to_sqe()
            }
            Op::WriteUncorrectable if layout.write_uncorrectable_blocks_max > 0 => {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
            Op::Unmap | Op::WriteZeroes | Op::WriteUncorrectable => {
                return Err(Status::INVALID_OPCODE.do_not_retry());
            }
            // A compare is a typed command.
            Op::Reset | Op::Read | Op::Write | Op::Compare => {
                return Err(Status::INVALID_OPCODE.do_not_retry());
            }
        };
        sqe.flags = 0;
        sqe.nsid = layout.nsid;
        sqe.cid = self.slots[usize::from(index)].cid;
        self.rings.push(&sqe);
        Ok(Kind::Io)
    }

    /// Takes typed commands from the front of the batch while there are slots; what cannot be sent is
    /// completed into `refused`. A fused pair is taken together or not at all.
    pub(crate) fn submit_commands(
        &mut self,
        batch: &mut Vec<Command>,
        refused: &mut Vec<Executed>,
        now_ns: u64,
    ) {
        let mut count = batch.len().min(self.room);
        if count > 0 && count < batch.len() && batch[count - 1].sqe.fuse() == Fuse::First {
            count -= 1;
        }
        self.stats.full += u64::from(count < batch.len());
        let stamp = (now_ns >> STAMP_SHIFT) as u32;
        let mut commands = batch.drain(..count).peekable();
        while let Some(command) = commands.next() {
            let fused = command.sqe.fuse() == Fuse::First;
            let alone = fused && commands.peek().is_none_or(|next| next.sqe.fuse() != Fuse::Second);
            if alone || command.sqe.fuse() == Fuse::Second || command.sqe.fuse() == Fuse::Reserved {
                refused.push(command.refuse(Status::FUSED_MISSING.do_not_retry()));
                continue;
            }
            let mut described = [self.describe_command(&command), Ok(NOTHING)];
            let second = if fused { commands.next() } else { None };
            if let Some(second) = &second {
                described[1] = self.describe_command(second);
            }
            self.stats.submitted += 1 + u64::from(fused);
            let [first_described, second_described] = described;
            match (first_described, second_described) {
                (Ok(one), Ok(two)) => {
                    self.place_command(command, one, stamp);
                    if let Some(second) = second {
                        self.place_command(second, two, stamp);
                    }
                }
                (one, two) => {
                    let status = one.err().or(two.err()).unwrap_or(Status::INTERNAL_ERROR);
                    refused.push(command.refuse(status));
                    refused.extend(second.map(|second| second.refuse(Status::FUSED_FAILED)));
                }
            }
        }
        drop(commands);
        self.stats.batches += u64::from(count > 0);
        self.rings.ring();
    }

    fn describe_command(&mut self, command: &Command) -> Result<(Described, u64), Status> {
        let described = match &command.data {
            Some(buffer) if buffer.is_lent() => return Err(Status::INVALID_FIELD.do_not_retry()),
            Some(buffer) => self
                .translator
                .describe(buffer, buffer.len() as u32)
                .map_err(|_| Status::COMMAND_INTERRUPTED)?,
            None if command.pointing => Described { data: command.sqe.data, flags: 0 },
            None => Described::NOTHING,
        };
        let metadata = match &command.metadata {
            Some(buffer) if buffer.is_lent() => return Err(Status::INVALID_FIELD.do_not_retry()),
            Some(buffer) => self.translator.address(buffer).map_err(|_| Status::COMMAND_INTERRUPTED)?,
            None => 0,
        };
        Ok((described, metadata))
    }

    fn place_command(&mut self, command: Command, described: (Described, u64), stamp: u32) {
        self.room -= 1;
        let index = self.free[self.room];
        let (Described { data, flags }, mptr) = described;
        let slot = &mut self.slots[usize::from(index)];
        // The fuse bits are the caller's, PSDT is ours.
        let fuse = command.sqe.flags & 3;
        self.rings.push(&Sqe { flags: flags | fuse, cid: slot.cid, data, mptr, ..command.sqe });
        (slot.stamp, slot.kind) = (stamp, Kind::Command);
        if self.commands.is_empty() {
            self.commands.resize_with(self.slots.len(), || None);
        }
        self.commands[usize::from(index)] = Some(command);
    }

    /// Takes in what the device completed.
    ///
    /// # Errors
    /// An entry that answers nothing that is in flight: the device cannot be trusted any more. What was
    /// found before it has been taken in.
    #[inline]
    pub(crate) fn reap(
        &mut self,
        ios: &mut Vec<Completion<Buffer>>,
        done: &mut Vec<Executed>,
    ) -> Result<usize, BadCompletion> {
        let (mut count, mut outcome) = (0, Ok(()));
        loop {
            if self.injections.is_empty() {
                count += self.reap_successes(ios);
            }
            let Some(entry) = self.rings.peek() else { break };
            if let Err(what) = self.reap_other(entry, ios, done) {
                outcome = Err(what);
                break;
            }
            count += 1;
        }
        self.stats.completed += count as u64;
        if count > 0 {
            self.rings.acknowledge();
        }
        outcome.map(|()| count)
    }

    /// Takes in the completions of requests that ended well and come next.
    #[inline(always)]
    fn reap_successes(&mut self, ios: &mut Vec<Completion<Buffer>>) -> usize {
        let Queue { rings, slots, requests, free, room, index_bits, .. } = self;
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
            if slot.cid != cid || slot.kind != Kind::Io {
                return false;
            }
            slot.cid = cid.wrapping_add(step);
            slot.kind = Kind::Free;
            *place = index as u16;
            next += 1;
            true
        });
        *room = next;
        let ended = free[first..next].iter().map(|index| requests[usize::from(*index)].succeed());
        ios.extend(ended);
        next - first
    }

    /// The same for one entry that is not simply the answer to a request.
    #[cold]
    fn reap_other(
        &mut self,
        entry: Entry,
        ios: &mut Vec<Completion<Buffer>>,
        done: &mut Vec<Executed>,
    ) -> Result<(), BadCompletion> {
        let index = usize::from(entry.cid()) & ((1 << self.index_bits) - 1);
        let slot = self.slots.get(index).ok_or(BadCompletion::CommandOutOfRange(entry.cid()))?;
        if slot.cid != entry.cid() || !slot.kind.is_awaited() {
            return Err(BadCompletion::NotInFlight(entry.cid()));
        }
        if entry.sqid() != self.rings.qid() {
            return Err(BadCompletion::WrongQueue(entry.sqid()));
        }
        if !self.rings.is_ours(entry) {
            return Err(BadCompletion::Head(entry.sqhd()));
        }
        let result = self.rings.result();
        self.rings.advance();
        let status = match self.inject(index) {
            Injected::Nothing => entry.status(),
            Injected::Status(replaced) => replaced,
            Injected::Drop => return Ok(()),
        };
        self.stats.errors += u64::from(!status.is_success());
        self.finish_other(index, status, result, ios, done);
        Ok(())
    }

    #[cold]
    fn finish_other(
        &mut self,
        index: usize,
        status: Status,
        result: u64,
        ios: &mut Vec<Completion<Buffer>>,
        done: &mut Vec<Executed>,
    ) {
        let slot = &mut self.slots[index];
        let kind = std::mem::replace(&mut slot.kind, Kind::Free);
        slot.cid = slot.cid.wrapping_add(1 << self.index_bits);
        let request = self.requests[index].take();
        self.free[self.room] = index as u16;
        self.room += 1;
        match kind {
            Kind::Free => unreachable!("a free slot was finished"),
            Kind::Io | Kind::Lost => ios.extend(request.map(|request| request.complete(status))),
            Kind::Bounced | Kind::LostBounced => {
                let copy = self.bounces[index].take();
                if let Some(mut request) = request {
                    if let (Op::Read, Some(copy), Some(lent)) = (request.op, copy, &mut request.buffer)
                        && status.is_success()
                    {
                        lent.copy_from(0, copy.as_slice());
                    }
                    ios.push(request.complete(status));
                }
            }
            Kind::Command | Kind::LostCommand => {
                done.extend(self.commands[index].take().map(|command| Executed { command, status, result }));
            }
        }
    }

    #[cold]
    fn inject(&mut self, index: usize) -> Injected {
        let slot = &mut self.slots[index];
        let opcode = match (&self.requests[index], self.commands.get(index)) {
            (Held::Request(request), _) => opcode_of(request.op),
            (Held::Nothing, Some(Some(command))) => Some(command.sqe.opcode),
            _ => None,
        };
        let Some(opcode) = opcode else { return Injected::Nothing };
        let injected = self.injections.next(opcode);
        if injected == Injected::Drop {
            slot.kind = match slot.kind {
                Kind::Bounced => Kind::LostBounced,
                Kind::Command => Kind::LostCommand,
                _ => Kind::Lost,
            };
        }
        injected
    }

    /// Ends every command in flight. The device must have let go of their memory.
    pub(crate) fn end_all(
        &mut self,
        status: Status,
        ios: &mut Vec<Completion<Buffer>>,
        done: &mut Vec<Executed>,
    ) {
        for index in 0..self.slots.len() {
            if self.slots[index].kind != Kind::Free {
                self.stats.completed += 1;
                self.stats.errors += 1;
                self.finish_other(index, status, 0, ios, done);
            }
        }
    }

    /// Commands that have been in flight since before `now_ns - timeout_ns`, each told once.
    pub(crate) fn overdue(&mut self, now_ns: u64, timeout_ns: u64, found: &mut Vec<Overdue>) {
        let limit = (timeout_ns >> STAMP_SHIFT).min(u64::from(u32::MAX >> 1)) as u32;
        let now = (now_ns >> STAMP_SHIFT) as u32;
        for slot in self.slots.iter() {
            if slot.kind != Kind::Free && now.wrapping_sub(slot.stamp) > limit {
                found.push(Overdue { cid: slot.cid });
            }
        }
    }

    /// Whether this very command is still in flight.
    pub(crate) fn is_in_flight(&self, cid: u16) -> bool {
        let index = usize::from(cid) & ((1 << self.index_bits) - 1);
        self.slots.get(index).is_some_and(|slot| slot.cid == cid && slot.kind != Kind::Free)
    }
}

const NOTHING: (Described, u64) = (Described::NOTHING, 0);

/// The data of a request, if it is a read or write as the namespace takes them.
#[inline(always)]
fn simple<'a>(layout: &Layout, request: &'a Request<Buffer>) -> Option<&'a Buffer> {
    let buffer = request.buffer.as_ref().filter(|_| is_read_or_write(request.op))?;
    layout.covers(request, buffer).then_some(buffer)
}

#[inline(always)]
fn is_read_or_write(op: Op) -> bool {
    matches!(op, Op::Read | Op::Write)
}

/// The command of a read or write.
#[inline(always)]
fn read_write(layout: &Layout, request: &Request<Buffer>, cid: u16, described: Described) -> Sqe {
    let opcode = if request.op == Op::Read { NvmOpcode::Read } else { NvmOpcode::Write };
    let view = ReadWrite {
        lba: request.lba,
        blocks: request.blocks,
        fua: request.flags.contains(Flags::FUA),
        prinfo: layout.prinfo,
        reference_tag: layout.reference_tag(request.lba),
        ..ReadWrite::default()
    };
    let Described { data, flags } = described;
    Sqe { flags, data, nsid: layout.nsid, cid, ..view.to_sqe(opcode) }
}

/// Bits of a command identifier that are the slot's index. They are never all ones, so that no identifier is
/// FFFFh, which means no command in particular in the error log.
fn index_bits(depth: u32) -> u32 {
    (depth + 1).next_power_of_two().ilog2()
}

/// The opcode of the command that a request becomes; a reset becomes none.
pub fn opcode_of(op: Op) -> Option<u8> {
    let opcode = match op {
        Op::Read => NvmOpcode::Read,
        Op::Write => NvmOpcode::Write,
        Op::Flush => NvmOpcode::Flush,
        Op::Unmap => NvmOpcode::DatasetManagement,
        Op::WriteZeroes => NvmOpcode::WriteZeroes,
        Op::WriteUncorrectable => NvmOpcode::WriteUncorrectable,
        Op::Compare => NvmOpcode::Compare,
        Op::Reset => return None,
    };
    Some(opcode.to_wire())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_command_has_the_identifier_that_means_none() {
        for depth in 1..=DEPTH_MAX {
            let (bits, last) = (index_bits(depth), depth - 1);
            assert!(last < (1 << bits) - 1 && bits <= 10, "{depth}");
        }
    }
}
