//! What an admin queue and an I/O queue have in common: commands in slots.
//!
//! A command has a slot from submission to completion, and the slot owns the request and its buffer. The
//! command identifier is the slot's index with the bits above it counting the slot's uses, so that what
//! a broken or hostile device says of a command that is over, or never was, is an error and touches
//! nobody's memory.

use memory::{Buffer, DeviceBuffer, Pool};
use ring::{Completion, Flags, Op, Request, Status};
use wire_nvme::io::{DSM_RANGE_SIZE, DatasetManagement, DsmRange, Prinfo, ReadWrite, WriteZeroes};
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::sqe::Fuse;
use wire_nvme::{DataPointer, Sqe};

use crate::command::{Command, Executed};
use crate::dma::{Described, Translator};
use crate::error::BadCompletion;
use crate::inject::{Injected, Injections};
use crate::namespace_info::Layout;
use crate::rings::Rings;
use crate::stats::QueueStats;

/// Most commands on a queue.
pub(crate) const DEPTH_MAX: u32 = 1023;

/// The commands of one queue pair.
pub(crate) struct Queue {
    pub(crate) rings: Rings,
    pub(crate) translator: Translator,
    slots: Vec<Slot>,
    free: Vec<u16>,
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

/// What is in flight, in a cache line.
struct Slot {
    request: Option<Request<Buffer>>,
    /// When it was submitted, in units of 2^20 ns.
    stamp: u32,
    /// Identifier of the command that is in flight, or of the next one.
    cid: u16,
    kind: Kind,
}

const _: () = assert!(size_of::<Slot>() == 64);

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
            slots: (0..depth as u16)
                .map(|index| Slot { request: None, stamp: 0, cid: index, kind: Kind::Free })
                .collect(),
            free: (0..depth as u16).rev().collect(),
            commands: Vec::new(),
            bounces: Vec::new(),
            ranges: DeviceBuffer::new(ranges),
            ranges_at,
            index_bits: u32::from(depth.next_power_of_two().ilog2() as u16).max(1),
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
        self.free.len()
    }

    /// Commands in flight.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Bytes of our own memory and of DMA memory that the queue holds.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let own = size_of::<Queue>()
            + self.slots.capacity() * size_of::<Slot>()
            + self.free.capacity() * 2
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
        let count = batch.len().min(self.free.len());
        self.stats.full += u64::from(count < batch.len());
        if count == 0 {
            return;
        }
        let stamp = (now_ns >> STAMP_SHIFT) as u32;
        for request in batch.drain(..count) {
            let Some(index) = self.free.pop() else { unreachable!("the batch was cut to what is free") };
            if let Err((request, status)) = self.place(layout, request, index, stamp) {
                self.free.push(index);
                refused.push(request.complete(status));
            }
        }
        self.stats.submitted += count as u64;
        self.stats.batches += 1;
        self.rings.ring();
    }

    /// Writes the command of a request and puts the request into its slot.
    #[inline(always)]
    fn place(
        &mut self,
        layout: &Layout,
        request: Request<Buffer>,
        index: u16,
        stamp: u32,
    ) -> Result<(), (Request<Buffer>, Status)> {
        let fast = matches!(request.op, Op::Read | Op::Write);
        let Some(buffer) = request.buffer.as_ref().filter(|_| fast) else {
            return self.place_other(layout, request, index, stamp);
        };
        let bytes = u64::from(request.blocks) << layout.block_log2;
        if buffer.len() as u64 != bytes || bytes > u64::from(layout.transfer_max_bytes) {
            return Err((request, Status::INVALID_FIELD.do_not_retry()));
        }
        if buffer.is_lent() {
            return self.place_lent(layout, request, index, stamp);
        }
        let described = match self.translator.describe(buffer, bytes as u32) {
            Ok(described) => described,
            Err(_) => return Err((request, Status::COMMAND_INTERRUPTED)),
        };
        let sqe = self.read_write(layout, &request, index, described);
        self.rings.push(&sqe);
        let slot = &mut self.slots[usize::from(index)];
        (slot.request, slot.stamp, slot.kind) = (Some(request), stamp, Kind::Io);
        Ok(())
    }

    #[inline(always)]
    fn read_write(
        &self,
        layout: &Layout,
        request: &Request<Buffer>,
        index: u16,
        described: Described,
    ) -> Sqe {
        let opcode = if request.op == Op::Read { NvmOpcode::Read } else { NvmOpcode::Write };
        let view = ReadWrite {
            lba: request.lba,
            blocks: request.blocks,
            fua: request.flags.contains(Flags::FUA),
            prinfo: layout.prinfo,
            reference_tag: layout.reference_tag(request.lba),
            ..ReadWrite::default()
        };
        let mut sqe = view.to_sqe(opcode);
        sqe.flags = described.flags;
        sqe.data = described.data;
        sqe.nsid = layout.nsid;
        sqe.cid = self.slots[usize::from(index)].cid;
        sqe
    }

    /// Everything but reads and writes.
    #[cold]
    fn place_other(
        &mut self,
        layout: &Layout,
        request: Request<Buffer>,
        index: u16,
        stamp: u32,
    ) -> Result<(), (Request<Buffer>, Status)> {
        let (lba, blocks) = (request.lba, request.blocks);
        let fua = request.flags.contains(Flags::FUA);
        let mut sqe = match request.op {
            Op::Flush => Sqe::new(NvmOpcode::Flush.to_wire()),
            Op::Unmap | Op::WriteZeroes if blocks == 0 => {
                return Err((request, Status::INVALID_FIELD.do_not_retry()));
            }
            Op::WriteZeroes if layout.write_zeroes => {
                if blocks > layout.write_zeroes_blocks_max {
                    return Err((request, Status::INVALID_FIELD.do_not_retry()));
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
                let mut sqe = view.to_sqe();
                sqe.data = DataPointer::prp(self.ranges_at + at, 0);
                sqe
            }
            // Without a buffer there is nothing to read into or write from.
            Op::Read | Op::Write => return Err((request, Status::INVALID_FIELD.do_not_retry())),
            Op::Unmap | Op::WriteZeroes | Op::Reset => {
                return Err((request, Status::INVALID_OPCODE.do_not_retry()));
            }
        };
        sqe.flags = 0;
        sqe.nsid = layout.nsid;
        let slot = &mut self.slots[usize::from(index)];
        sqe.cid = slot.cid;
        (slot.request, slot.stamp, slot.kind) = (Some(request), stamp, Kind::Io);
        self.rings.push(&sqe);
        Ok(())
    }

    /// A request whose buffer is part of memory that the device does not see goes through a copy.
    #[cold]
    fn place_lent(
        &mut self,
        layout: &Layout,
        request: Request<Buffer>,
        index: u16,
        stamp: u32,
    ) -> Result<(), (Request<Buffer>, Status)> {
        let Some(lent) = &request.buffer else { return Err((request, Status::INVALID_FIELD)) };
        let length = lent.len();
        let Some(mut copy) = self.pool.take(length) else {
            return Err((request, Status::COMMAND_INTERRUPTED));
        };
        if request.op == Op::Write {
            lent.copy_to(0, copy.as_mut_slice());
        }
        let Ok(described) = self.translator.describe(&copy, length as u32) else {
            return Err((request, Status::COMMAND_INTERRUPTED));
        };
        let sqe = self.read_write(layout, &request, index, described);
        self.rings.push(&sqe);
        if self.bounces.is_empty() {
            self.bounces.resize_with(self.slots.len(), || None);
        }
        self.bounces[usize::from(index)] = Some(copy);
        let slot = &mut self.slots[usize::from(index)];
        (slot.request, slot.stamp, slot.kind) = (Some(request), stamp, Kind::Bounced);
        Ok(())
    }

    /// Takes typed commands from the front of the batch while there are slots; what cannot be sent is
    /// completed into `refused`. A fused pair is taken together or not at all.
    pub(crate) fn submit_commands(
        &mut self,
        batch: &mut Vec<Command>,
        refused: &mut Vec<Executed>,
        now_ns: u64,
    ) {
        let mut count = batch.len().min(self.free.len());
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
        let Some(index) = self.free.pop() else { unreachable!("the batch was cut to what is free") };
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
        let mut count = 0;
        let mut outcome = Ok(());
        let index_mask = (1u32 << self.index_bits) - 1;
        while let Some(entry) = self.rings.peek() {
            let index = (u32::from(entry.cid) & index_mask) as usize;
            let Some(slot) = self.slots.get_mut(index) else {
                outcome = Err(BadCompletion::CommandOutOfRange(entry.cid));
                break;
            };
            if slot.cid != entry.cid
                || slot.kind as u8 == Kind::Free as u8
                || slot.kind as u8 >= Kind::Lost as u8
            {
                outcome = Err(BadCompletion::NotInFlight(entry.cid));
                break;
            }
            if entry.sqid != self.rings.qid() {
                outcome = Err(BadCompletion::WrongQueue(entry.sqid));
                break;
            }
            // Nothing is done with the head: slots bound the queue. One outside of it is nonsense all the same.
            if u32::from(entry.sqhd) > self.rings.mask() {
                outcome = Err(BadCompletion::Head(entry.sqhd));
                break;
            }
            self.rings.advance();
            count += 1;
            let mut status = entry.status;
            if !self.injections.is_empty() {
                match self.inject(index) {
                    Injected::Nothing => {}
                    Injected::Status(replaced) => status = replaced,
                    Injected::Drop => continue,
                }
            }
            self.stats.errors += u64::from(!status.is_success());
            let slot = &mut self.slots[index];
            if slot.kind == Kind::Io {
                slot.kind = Kind::Free;
                slot.cid = next_cid(slot.cid, self.index_bits);
                self.free.push(index as u16);
                if let Some(request) = slot.request.take() {
                    ios.push(request.complete(status));
                }
            } else {
                self.finish_other(index, status, entry.result, ios, done);
            }
        }
        self.stats.completed += count as u64;
        if count > 0 {
            self.rings.acknowledge();
        }
        outcome.map(|()| count)
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
        slot.cid = next_cid(slot.cid, self.index_bits);
        let request = slot.request.take();
        self.free.push(index as u16);
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
        let opcode = match (&slot.request, self.commands.get(index)) {
            (Some(request), _) => opcode_of(request.op),
            (None, Some(Some(command))) => command.sqe.opcode,
            _ => return Injected::Nothing,
        };
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
        for slot in &self.slots {
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

/// The identifier that a slot's next command has. FFFFh is none: it means no command in particular in the
/// error log.
#[inline(always)]
fn next_cid(cid: u16, index_bits: u32) -> u16 {
    let next = cid.wrapping_add(1 << index_bits);
    if next == u16::MAX { next & ((1 << index_bits) - 1) } else { next }
}

fn opcode_of(op: Op) -> u8 {
    match op {
        Op::Read => NvmOpcode::Read,
        Op::Write => NvmOpcode::Write,
        Op::Flush | Op::Reset => NvmOpcode::Flush,
        Op::Unmap => NvmOpcode::DatasetManagement,
        Op::WriteZeroes => NvmOpcode::WriteZeroes,
    }
    .to_wire()
}
