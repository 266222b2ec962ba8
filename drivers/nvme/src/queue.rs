//! Command slots of a queue pair with queues in memory, admin or I/O.
//!
//! A command has a slot from submission to completion, and the slot owns the request and its buffer. The
//! command identifier is the slot's index with a generation in the upper bits. A completion from a broken or
//! hostile device for a command that has completed or never existed is therefore an error and touches no
//! memory.

mod completions;

use std::vec::Drain;

use block_io::{Completion, Op, Request, RequestFlags, Status};
use dma::{Buffer, Data, DeviceBuffer, Pool};
use wire_nvme::io::{
    DSM_RANGE_SIZE, DatasetManagement, DsmRange, Prinfo, ReadWrite, WriteUncorrectable, WriteZeroes,
};
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::sqe::Fuse;
use wire_nvme::{DataPointer, Sqe};

use crate::command::{Command, CommandCompletion};
use crate::descriptors::{DataDescriptor, DescriptorBuilder, DescriptorList};
use crate::device::DeviceError;
use crate::inject::CompletionInjections;
use crate::namespace_info::NamespaceLayout;
use crate::rings::Rings;
use crate::stats::QueueStats;

/// Most commands in flight on a queue.
pub(crate) const DEPTH_MAX: u32 = 1023;

/// The commands of one queue pair, over its [`Rings`].
///
/// [`submit`](Self::submit) and [`submit_commands`](Self::submit_commands) move requests into slots, write a
/// batch of submission queue entries and ring the doorbell once. [`reap`](Self::reap) moves completed ones
/// out and rings the completion doorbell once. [`abort_all`](Self::abort_all) empties the slots after the
/// device was stopped. Submission and completion of plain reads and writes allocate nothing and stay in the
/// inlined loops (`push_run`, `reap_successes`); everything else takes the cold path.
pub(crate) struct MemoryQueue {
    pub(crate) rings: Rings,
    pub(crate) descriptors: DescriptorBuilder,
    slots: Box<[CommandSlot]>,
    /// The request of each slot.
    requests: Box<[SlotRequest]>,
    /// Indices of free slots: the first [`room`](Self::room) elements.
    free: Box<[u16]>,
    room: usize,
    /// The typed command of each slot; allocated when the first is submitted.
    commands: Vec<Option<Command>>,
    /// Bounce buffers, by slot; allocated when the first is needed.
    bounce_buffers: Vec<Option<Buffer>>,
    /// Descriptors of data that is not one buffer of the pool, by slot; allocated when the first is needed,
    /// and kept.
    lists: Vec<Option<DescriptorList>>,
    /// 16 bytes per slot for the range of a Dataset Management command.
    ranges: DeviceBuffer,
    ranges_address: u64,
    index_bits: u32,
    pool: Pool,
    pub(crate) stats: QueueStats,
    pub(crate) injections: CompletionInjections,
}

/// The request of a slot. `repr(u64)` makes the discriminant a word of its own: an `Option` would put it into
/// a niche of the request, which the compiler would then copy in pieces.
#[repr(u64)]
enum SlotRequest {
    Empty,
    Request(Request<Data>),
}

impl SlotRequest {
    fn take(&mut self) -> Option<Request<Data>> {
        match std::mem::replace(self, SlotRequest::Empty) {
            SlotRequest::Request(request) => Some(request),
            SlotRequest::Empty => None,
        }
    }

    /// Moves the next request of a batch into this slot. As function arguments, source and destination do not
    /// alias, so that the compiler copies once.
    #[inline]
    fn take_next_from(&mut self, batch: &mut Drain<'_, Request<Data>>) {
        assert!(matches!(self, SlotRequest::Empty), "a free slot held a request");
        if let Some(request) = batch.next() {
            *self = SlotRequest::Request(request);
        }
    }

    /// Completes the request with success and frees the slot.
    #[inline(always)]
    fn complete_success(&mut self) -> Completion<Data> {
        match std::mem::replace(self, SlotRequest::Empty) {
            SlotRequest::Request(request) => request.complete(Status::SUCCESS),
            SlotRequest::Empty => unreachable!("a slot of kind Io holds its request"),
        }
    }
}

/// Metadata of a slot, apart from its request: eight share a cache line, so that matching completions touches
/// little memory.
struct CommandSlot {
    /// Submission time, in units of 2^20 ns.
    stamp: u32,
    /// Identifier of the command in flight, or of the next one if the slot is free.
    cid: u16,
    kind: SlotKind,
}

const _: () = assert!(size_of::<CommandSlot>() == 8);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum SlotKind {
    Free,
    /// A channel request.
    Io,
    /// A channel request with a bounce buffer.
    Bounced,
    /// A typed command.
    Command,
    /// In flight; its completion was dropped by fault injection.
    Dropped,
    DroppedBounced,
    DroppedCommand,
}

impl SlotKind {
    /// Whether a completion from the device is valid for the slot.
    fn awaits_completion(self) -> bool {
        matches!(self, SlotKind::Io | SlotKind::Bounced | SlotKind::Command)
    }
}

/// Shift from nanoseconds to the unit of [`CommandSlot::stamp`].
const STAMP_SHIFT: u32 = 20;

/// A command that has exceeded its timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overdue {
    pub(crate) cid: u16,
}

impl MemoryQueue {
    /// Creates a queue of `depth` commands over new rings, which must have more entries than `depth`.
    pub(crate) fn new(
        rings: Rings,
        mut descriptors: DescriptorBuilder,
        depth: u32,
        pool: &Pool,
        ranges: Buffer,
    ) -> Result<MemoryQueue, DeviceError> {
        assert!((1..=DEPTH_MAX).contains(&depth) && depth <= rings.mask(), "invalid queue depth {depth}");
        let ranges_address = descriptors.address(&ranges)?;
        assert!(
            ranges.len() >= depth as usize * DSM_RANGE_SIZE,
            "the range buffer is too small for {depth} commands"
        );
        Ok(MemoryQueue {
            rings,
            descriptors,
            slots: (0..depth as u16)
                .map(|index| CommandSlot { stamp: 0, cid: index, kind: SlotKind::Free })
                .collect(),
            free: (0..depth as u16).rev().collect(),
            room: depth as usize,
            requests: (0..depth).map(|_| SlotRequest::Empty).collect(),
            commands: Vec::new(),
            bounce_buffers: Vec::new(),
            lists: Vec::new(),
            ranges: DeviceBuffer::new(ranges),
            ranges_address,
            index_bits: index_bits(depth),
            pool: pool.clone(),
            stats: QueueStats::default(),
            injections: CompletionInjections::default(),
        })
    }

    /// Device addresses of the submission and completion queue.
    pub(crate) fn ring_addresses(&mut self) -> Result<(u64, u64), DeviceError> {
        let (sq, cq) = self.rings.buffers();
        Ok((self.descriptors.address(sq)?, self.descriptors.address(cq)?))
    }

    /// Most commands in flight.
    pub(crate) fn depth(&self) -> usize {
        self.slots.len()
    }

    /// Free slots: commands that can be submitted now.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    /// Commands in flight.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.room
    }

    /// Memory use in bytes: host memory, and memory that the device accesses.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let own = size_of::<MemoryQueue>()
            + size_of_val(&self.slots[..])
            + size_of_val(&self.requests[..])
            + size_of_val(&self.free[..])
            + self.commands.capacity() * size_of::<Option<Command>>()
            + self.bounce_buffers.capacity() * size_of::<Option<Buffer>>()
            + self.lists.capacity() * size_of::<Option<DescriptorList>>();
        let lists = self.lists.iter().flatten().count() * crate::descriptors::LIST_BYTES;
        (own, lists + self.rings.bytes() + self.ranges.buffer().capacity() + self.descriptors.list_bytes())
    }

    /// Submits requests from the front of the batch while slots are free. An invalid request completes with
    /// an error into `refused`.
    #[inline]
    pub(crate) fn submit(
        &mut self,
        layout: &NamespaceLayout,
        batch: &mut Vec<Request<Data>>,
        refused: &mut Vec<Completion<Data>>,
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
            // Fast paths first: runs of reads and writes within one page, then within mapped chunks.
            self.push_run(layout, &mut requests, stamp, DescriptorBuilder::describe_single_page);
            self.push_run(layout, &mut requests, stamp, DescriptorBuilder::describe_mapped);
            let Some(request) = requests.next() else { break };
            let index = self.free[self.room - 1];
            match self.push_uncommon(layout, &request, index) {
                Ok(kind) => {
                    let slot = &mut self.slots[usize::from(index)];
                    (slot.stamp, slot.kind) = (stamp, kind);
                    self.requests[usize::from(index)] = SlotRequest::Request(request);
                    self.room -= 1;
                }
                Err(status) => refused.push(request.complete(status)),
            }
        }
        drop(requests);
        self.stats.submitted += count as u64;
        self.stats.batches += 1;
        self.rings.ring_sq_doorbell();
    }

    /// Submits reads and writes up to the first other request, or the first buffer that `describe` cannot
    /// describe. The caller guarantees a free slot for each request of the batch.
    #[inline(always)]
    fn push_run(
        &mut self,
        layout: &NamespaceLayout,
        batch: &mut Drain<'_, Request<Data>>,
        stamp: u32,
        describe: impl Fn(&DescriptorBuilder, &Buffer, u32) -> Option<DataDescriptor>,
    ) {
        let MemoryQueue { rings, descriptors, slots, requests, free, room, .. } = self;
        let slots = &mut slots[..];
        let requests = &mut requests[..slots.len()];
        let mut indices = free[..*room].iter().rev();
        let count = rings.push_all(|| {
            let request = batch.as_slice().first()?;
            let index = usize::from(*indices.next()?);
            let (slot, place) = (&mut slots[index], &mut requests[index]);
            let buffer = read_write_buffer(layout, request)?;
            let described = describe(descriptors, buffer, buffer.len() as u32)?;
            let sqe = read_write(layout, request, slot.cid, described);
            (slot.stamp, slot.kind) = (stamp, SlotKind::Io);
            place.take_next_from(batch);
            Some(sqe)
        });
        *room -= count as usize;
    }

    /// Writes the command of a request that takes slot `index`: the cold path.
    #[cold]
    fn push_uncommon(
        &mut self,
        layout: &NamespaceLayout,
        request: &Request<Data>,
        index: u16,
    ) -> Result<SlotKind, Status> {
        if !is_read_or_write(request.op) {
            return self.push_other(layout, request, index);
        }
        let data = request.data().filter(|data| layout.is_valid_data(request, data));
        let Some(data) = data else { return Err(Status::INVALID_FIELD.do_not_retry()) };
        let cid = self.slots[usize::from(index)].cid;
        if let Some(described) =
            self.describe_in_place(data, index).map_err(|_| Status::COMMAND_INTERRUPTED)?
        {
            self.rings.push(&uncommon_read_write(layout, request, cid, described));
            return Ok(SlotKind::Io);
        }
        let copy = self.bounce_buffer(request, data)?;
        let described = self.descriptors.describe(&copy, copy.len() as u32);
        let described = described.map_err(|_| Status::COMMAND_INTERRUPTED)?;
        self.rings.push(&uncommon_read_write(layout, request, cid, described));
        if self.bounce_buffers.is_empty() {
            self.bounce_buffers.resize_with(self.slots.len(), || None);
        }
        self.bounce_buffers[usize::from(index)] = Some(copy);
        Ok(SlotKind::Bounced)
    }

    /// Describes the data of the command in slot `index` where it lies; `None` if the device cannot access it
    /// there.
    fn describe_in_place(&mut self, data: &Data, index: u16) -> Result<Option<DataDescriptor>, DeviceError> {
        match data {
            Data::One(buffer) if !buffer.is_adopted() && self.descriptors.is_own(buffer) => {
                self.descriptors.describe(buffer, buffer.len() as u32).map(Some)
            }
            _ => {
                if self.lists.is_empty() {
                    self.lists.resize_with(self.slots.len(), || None);
                }
                self.descriptors.describe_slices(data.slices(), &mut self.lists[usize::from(index)])
            }
        }
    }

    /// Takes a bounce buffer for data that the device cannot access in place: lent memory that is not mapped
    /// for it, or slices that neither a PRP list nor an SGL can describe. For a write it is filled.
    fn bounce_buffer(&mut self, request: &Request<Data>, data: &Data) -> Result<Buffer, Status> {
        let mut copy = self.pool.take(data.len()).ok_or(Status::COMMAND_INTERRUPTED)?;
        self.stats.bounced += 1;
        if request.op == Op::Write {
            data.copy_to(0, copy.as_mut_slice());
        }
        Ok(copy)
    }

    /// Writes the command of a request that is neither a read nor a write.
    fn push_other(
        &mut self,
        layout: &NamespaceLayout,
        request: &Request<Data>,
        index: u16,
    ) -> Result<SlotKind, Status> {
        let (lba, blocks) = (request.lba, request.blocks);
        let fua = request.flags.contains(RequestFlags::FUA);
        let mut sqe = match request.op {
            Op::Flush => Sqe::new(NvmOpcode::Flush.to_wire()),
            Op::Unmap | Op::WriteZeroes if blocks == 0 => return Err(Status::INVALID_FIELD.do_not_retry()),
            Op::WriteZeroes if layout.write_zeroes => {
                if blocks > layout.write_zeroes_blocks_max {
                    return Err(Status::INVALID_FIELD.do_not_retry());
                }
                let deallocate = request.flags.contains(RequestFlags::DEALLOCATE);
                let prinfo = layout.prinfo & Prinfo::ACTION;
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
                Sqe { data: DataPointer::prp(self.ranges_address + at, 0), ..view.to_sqe() }
            }
            Op::WriteUncorrectable if (1..=layout.write_uncorrectable_blocks_max).contains(&blocks) => {
                WriteUncorrectable { lba, blocks }.to_sqe()
            }
            Op::WriteUncorrectable if layout.write_uncorrectable_blocks_max > 0 => {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
            // Compare and Copy are available as typed commands only.
            _ => return Err(Status::INVALID_OPCODE.do_not_retry()),
        };
        sqe.flags = 0;
        sqe.nsid = layout.nsid;
        sqe.cid = self.slots[usize::from(index)].cid;
        self.rings.push(&sqe);
        Ok(SlotKind::Io)
    }

    /// Submits typed commands from the front of the batch while slots are free. An invalid command completes
    /// with an error into `refused`. Both commands of a fused pair are submitted together, or neither is.
    pub(crate) fn submit_commands(
        &mut self,
        batch: &mut Vec<Command>,
        refused: &mut Vec<CommandCompletion>,
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
            let unpaired = fused && commands.peek().is_none_or(|next| next.sqe.fuse() != Fuse::Second);
            if unpaired || command.sqe.fuse() == Fuse::Second || command.sqe.fuse() == Fuse::Reserved {
                refused.push(command.reject(Status::FUSED_MISSING.do_not_retry()));
                continue;
            }
            let mut described = [self.describe_command(&command), Ok(NO_DATA)];
            let second = if fused { commands.next() } else { None };
            if let Some(second) = &second {
                described[1] = self.describe_command(second);
            }
            self.stats.submitted += 1 + u64::from(fused);
            let [first_described, second_described] = described;
            match (first_described, second_described) {
                (Ok(one), Ok(two)) => {
                    self.push_command(command, one, stamp);
                    if let Some(second) = second {
                        self.push_command(second, two, stamp);
                    }
                }
                (one, two) => {
                    let status = one.err().or(two.err()).unwrap_or(Status::INTERNAL_ERROR);
                    refused.push(command.reject(status));
                    refused.extend(second.map(|second| second.reject(Status::FUSED_FAILED)));
                }
            }
        }
        drop(commands);
        self.stats.batches += u64::from(count > 0);
        self.rings.ring_sq_doorbell();
    }

    fn describe_command(&mut self, command: &Command) -> Result<(DataDescriptor, u64), Status> {
        let described = match &command.data {
            Some(buffer) if !self.descriptors.is_own(buffer) => {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
            Some(buffer) => self
                .descriptors
                .describe(buffer, buffer.len() as u32)
                .map_err(|_| Status::COMMAND_INTERRUPTED)?,
            None if command.has_data_pointer => DataDescriptor { data: command.sqe.data, flags: 0 },
            None => DataDescriptor::NONE,
        };
        let metadata = match &command.metadata {
            Some(buffer) if !self.descriptors.is_own(buffer) => {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
            Some(buffer) => self.descriptors.address(buffer).map_err(|_| Status::COMMAND_INTERRUPTED)?,
            None => 0,
        };
        Ok((described, metadata))
    }

    fn push_command(&mut self, command: Command, described: (DataDescriptor, u64), stamp: u32) {
        self.room -= 1;
        let index = self.free[self.room];
        let (DataDescriptor { data, flags }, mptr) = described;
        let slot = &mut self.slots[usize::from(index)];
        // FUSE comes from the caller, PSDT from the driver.
        let fuse = command.sqe.flags & 3;
        self.rings.push(&Sqe { flags: flags | fuse, cid: slot.cid, data, mptr, ..command.sqe });
        (slot.stamp, slot.kind) = (stamp, SlotKind::Command);
        if self.commands.is_empty() {
            self.commands.resize_with(self.slots.len(), || None);
        }
        self.commands[usize::from(index)] = Some(command);
    }

    /// Appends the commands submitted before `now_ns - timeout_ns`.
    pub(crate) fn overdue(&mut self, now_ns: u64, timeout_ns: u64, found: &mut Vec<Overdue>) {
        let limit = (timeout_ns >> STAMP_SHIFT).min(u64::from(u32::MAX >> 1)) as u32;
        let now = (now_ns >> STAMP_SHIFT) as u32;
        for slot in self.slots.iter() {
            if slot.kind != SlotKind::Free && now.wrapping_sub(slot.stamp) > limit {
                found.push(Overdue { cid: slot.cid });
            }
        }
    }

    /// Whether the command with this identifier, generation included, is still in flight.
    pub(crate) fn is_in_flight(&self, cid: u16) -> bool {
        let index = usize::from(cid) & ((1 << self.index_bits) - 1);
        self.slots.get(index).is_some_and(|slot| slot.cid == cid && slot.kind != SlotKind::Free)
    }
}

const NO_DATA: (DataDescriptor, u64) = (DataDescriptor::NONE, 0);

/// The data buffer of a request, if it is a valid read or write for the namespace.
#[inline(always)]
fn read_write_buffer<'a>(layout: &NamespaceLayout, request: &'a Request<Data>) -> Option<&'a Buffer> {
    let buffer = request.data().and_then(Data::single).filter(|_| is_read_or_write(request.op))?;
    layout.is_common_transfer(request, buffer).then_some(buffer)
}

#[inline(always)]
fn is_read_or_write(op: Op) -> bool {
    matches!(op, Op::Read | Op::Write)
}

/// Encodes a read or write.
#[inline(always)]
fn read_write(layout: &NamespaceLayout, request: &Request<Data>, cid: u16, described: DataDescriptor) -> Sqe {
    let opcode = if request.op == Op::Read { NvmOpcode::Read } else { NvmOpcode::Write };
    let view = ReadWrite {
        lba: request.lba,
        blocks: request.blocks,
        fua: request.flags.contains(RequestFlags::FUA),
        prinfo: layout.prinfo,
        reference_tag: layout.reference_tag(request.lba),
        ..ReadWrite::default()
    };
    let DataDescriptor { data, flags } = described;
    Sqe { flags, data, nsid: layout.nsid, cid, ..view.to_sqe(opcode) }
}

/// As [`read_write`], with all of a wide reference tag.
fn uncommon_read_write(
    layout: &NamespaceLayout,
    request: &Request<Data>,
    cid: u16,
    described: DataDescriptor,
) -> Sqe {
    let mut sqe = read_write(layout, request, cid, described);
    layout.widen_reference_tag(&mut sqe, request.lba);
    sqe
}

/// Bits of the slot's index in a command identifier. The index is never all ones, so that no identifier is
/// FFFFh, which in the Error Information log means "no particular command".
fn index_bits(depth: u32) -> u32 {
    (depth + 1).next_power_of_two().ilog2()
}

/// The NVM opcode of a request's command; `None` for an operation that has none.
pub fn opcode_of(op: Op) -> Option<u8> {
    let opcode = match op {
        Op::Read => NvmOpcode::Read,
        Op::Write => NvmOpcode::Write,
        Op::Flush => NvmOpcode::Flush,
        Op::Unmap => NvmOpcode::DatasetManagement,
        Op::WriteZeroes => NvmOpcode::WriteZeroes,
        Op::WriteUncorrectable => NvmOpcode::WriteUncorrectable,
        Op::Compare => NvmOpcode::Compare,
        Op::Copy => NvmOpcode::Copy,
        Op::Reset | Op::Abort | Op::SeekData | Op::SeekHole => return None,
    };
    Some(opcode.to_wire())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_identifiers_are_never_ffff() {
        for depth in 1..=DEPTH_MAX {
            let (bits, last) = (index_bits(depth), depth - 1);
            assert!(last < (1 << bits) - 1 && bits <= 10, "{depth}");
        }
    }
}
