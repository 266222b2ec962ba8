//! Requests that a module cannot take as they are, executed as several: split at the module's limits, through
//! bounce buffers where memory is misaligned, and copies as reads and writes.

use std::collections::VecDeque;

use block_io::{
    Op, Payload, ProtectedData, ProtectionFlags, ProtectionTags, Request as BlockRequest, RequestFlags,
    Status, Tag,
};
use dma::{BUFFER_BYTES_MAX, Data, Pool};
use slots::{Slab, Slot};
use wire_nvme::protection::MetadataFormat;

use crate::device::{BdevGeometry, IoLimits};
use crate::internal::{INTERNAL_MAX, InternalTags};
use crate::{Completion, Request};

/// Requests in progress on one channel; further ones wait in order.
const ACTIVE_MAX: u32 = 64;
/// Parts in flight of one request: enough to keep a device busy, and leaves room for others.
const PARTS_IN_FLIGHT_MAX: u32 = 32;
/// Bytes of one step of a copy.
const COPY_BYTES_MAX: u32 = 128 << 10;

/// The divided requests of one channel.
///
/// [`push`](Self::push) takes a request; [`advance`](Self::advance) puts as many of its parts as can start
/// into `internal`, which the channel submits; [`complete_part`](Self::complete_part) takes their
/// completions, in any order, and gives the request back with its data joined again once the last is there.
/// The first error decides the status; parts that have not started then are dropped. Splitting and joining
/// copy nothing; a part is copied only if it is misaligned or has more segments than the module takes.
pub(crate) struct PartQueue {
    limits: IoLimits,
    block_size: u32,
    /// Bytes of a block that a copy moves: on a device with protection information, which depends on the
    /// block's address, that is checked and stripped, and generated anew.
    copy_block_size: u32,
    metadata: MetadataFormat,
    pool: Pool,
    tags: InternalTags,
    queued: VecDeque<Request>,
    active: Slab<DividedRequest>,
    parts: Slab<Part>,
    /// Parts that the module has not accepted yet.
    pub(crate) internal: Vec<Request>,
    /// Whether a part waits for a bounce buffer.
    awaits_buffer: bool,
}

struct DividedRequest {
    /// Without its data, which the parts have.
    request: Request,
    /// Data of parts that have not started.
    rest: Option<Data>,
    /// Data of parts that have started, in order; `None` while one is in flight.
    done: Vec<Option<Data>>,
    /// Blocks of parts that have started.
    started_blocks: u32,
    in_flight: u32,
    status: Status,
}

struct Part {
    parent: Slot,
    /// Position in `done` of the parent.
    index: usize,
    /// The parent's data, where the module has a bounce buffer.
    original: Option<Data>,
}

impl PartQueue {
    pub(crate) fn new(limits: IoLimits, geometry: BdevGeometry, pool: Pool) -> PartQueue {
        let flags = match geometry.metadata.protection {
            Some(_) => ProtectionFlags::ACTION,
            None => ProtectionFlags::empty(),
        };
        PartQueue {
            limits,
            block_size: geometry.block_size,
            copy_block_size: geometry.transfer_bytes(flags),
            metadata: geometry.metadata,
            pool,
            tags: InternalTags::new(),
            queued: VecDeque::new(),
            active: Slab::with_capacity(ACTIVE_MAX),
            parts: Slab::with_capacity(INTERNAL_MAX),
            internal: Vec::new(),
            awaits_buffer: false,
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.queued.is_empty() && self.active.is_empty()
    }

    /// Number of the caller's requests in the queue: not those that the layer made for a compare.
    pub(crate) fn len(&self) -> usize {
        let active = self.active.iter().map(|(_, divided)| &divided.request);
        let is_callers = |request: &&Request| !request.flags.contains(RequestFlags::INTERNAL);
        self.queued.iter().chain(active).filter(is_callers).count()
    }

    /// Whether progress depends on a buffer, which no completion of the module announces.
    pub(crate) fn awaits_buffer(&self) -> bool {
        self.awaits_buffer
    }

    /// Whether a valid request has to go through this queue.
    #[inline]
    pub(crate) fn divides(&self, request: &Request) -> bool {
        match &request.payload {
            Payload::Data(data) => !self.limits.allow(request, data),
            Payload::CopySource(_) => true,
            _ => false,
        }
    }

    pub(crate) fn push(&mut self, request: Request) {
        self.queued.push_back(request);
    }

    /// Starts what can start, and puts its parts into `internal`.
    pub(crate) fn advance(&mut self) {
        self.awaits_buffer = false;
        while !self.active.is_full()
            && let Some(mut request) = self.queued.pop_front()
        {
            let rest = request.take_data();
            let divided = DividedRequest {
                request,
                rest,
                done: Vec::new(),
                started_blocks: 0,
                in_flight: 0,
                status: Status::SUCCESS,
            };
            if self.active.insert(divided).is_err() {
                unreachable!("a slab with room has none");
            }
        }
        let slots: Vec<Slot> = self.active.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            while self.start_part(slot) {}
        }
    }

    /// Starts the next part of a request. `false` if there is none, or it cannot start yet.
    fn start_part(&mut self, parent: Slot) -> bool {
        let Some(divided) = self.active.get_mut(parent) else { return false };
        let is_copy = divided.request.op == Op::Copy;
        let in_flight_max = if is_copy { 1 } else { PARTS_IN_FLIGHT_MAX };
        if divided.in_flight >= in_flight_max || !divided.status.is_success() || self.parts.is_full() {
            return false;
        }
        let internal = if is_copy { self.next_copy_step(parent) } else { self.next_data_part(parent) };
        let Some((mut internal, part)) = internal else { return false };
        let Some(divided) = self.active.get_mut(parent) else { return false };
        divided.in_flight += 1;
        internal.flow = divided.request.flow;
        internal.issued_ticks = divided.request.issued_ticks;
        let Ok(slot) = self.parts.insert(part) else { unreachable!("a slab with room has none") };
        self.tags.mark(&mut internal, slot);
        self.internal.push(internal);
        true
    }

    fn next_data_part(&mut self, parent: Slot) -> Option<(Request, Part)> {
        let divided = self.active.get_mut(parent)?;
        let lba = divided.request.lba + u64::from(divided.started_blocks);
        let rest = divided.rest.as_ref()?;
        let blocks = match divided.request.flags.contains(RequestFlags::ATOMIC) {
            true => divided.request.blocks,
            false => self.limits.part_blocks(lba, rest, self.block_size),
        };
        let bytes = blocks as usize * self.block_size as usize;
        let op = divided.request.op;
        // Looked up before the data is cut: without a bounce buffer nothing has changed.
        let fits = self.limits.fits_prefix(rest, bytes);
        let bounce = match fits {
            true => None,
            false => match self.pool.take(bytes) {
                Some(buffer) => Some(buffer),
                None => {
                    self.awaits_buffer = true;
                    return None;
                }
            },
        };
        let mut head = divided.rest.take()?;
        if bytes < head.len() {
            divided.rest = Some(head.split_off(bytes));
        }
        let index = divided.done.len();
        divided.done.push(None);
        divided.started_blocks += blocks;
        let flags = divided.request.flags;
        let (data, original) = match bounce {
            None => (head, None),
            Some(mut buffer) => {
                if op != Op::Read {
                    head.copy_to(0, buffer.as_mut_slice());
                }
                (Data::from(buffer), Some(head))
            }
        };
        let mut internal = BlockRequest::new(Tag(0), op, lba, blocks);
        internal.flags = flags;
        internal.set_data(Some(data));
        Some((internal, Part { parent, index, original }))
    }

    /// The next read of a copy; its write follows in [`complete_part`](Self::complete_part).
    fn next_copy_step(&mut self, parent: Slot) -> Option<(Request, Part)> {
        let divided = self.active.get_mut(parent)?;
        let left = divided.request.blocks - divided.started_blocks;
        if left == 0 {
            return None;
        }
        let bytes_max = COPY_BYTES_MAX.min(self.limits.transfer_bytes_max).max(self.copy_block_size);
        let mut blocks = left.min(bytes_max / self.copy_block_size);
        let boundary = u64::from(self.limits.boundary_blocks);
        if boundary > 0 {
            for start in [divided.copy_source(), divided.request.lba] {
                let room = if divided.copies_backwards() {
                    (start + u64::from(left) - 1) % boundary + 1
                } else {
                    boundary - (start + u64::from(divided.started_blocks)) % boundary
                };
                blocks = blocks.min(u32::try_from(room).unwrap_or(u32::MAX));
            }
        }
        let Some(buffer) = self.pool.take(blocks as usize * self.copy_block_size as usize) else {
            self.awaits_buffer = true;
            return None;
        };
        let lba = divided.copy_source() + divided.copy_offset(blocks);
        let mut internal = BlockRequest::new(Tag(0), Op::Read, lba, blocks);
        internal.payload = self.copy_payload(buffer.into(), lba);
        Some((internal, Part { parent, index: 0, original: None }))
    }

    /// The payload of a copy's read or write at `lba`.
    fn copy_payload(&self, data: Data, lba: u64) -> Payload<Data> {
        if self.metadata.protection.is_none() {
            return Payload::Data(data);
        }
        let tags = ProtectionTags { reference: lba, ..ProtectionTags::default() };
        let flags = ProtectionFlags::ACTION | self.metadata.checks();
        Payload::Protected(Box::new(ProtectedData { data, metadata: None, flags, tags }))
    }

    /// Whether a completion is that of a part.
    pub(crate) fn owns(&self, completion: &Completion) -> bool {
        self.tags.slot(completion).is_some_and(|slot| self.parts.get(slot).is_some())
    }

    /// Takes the completion of a part; adds its request to `finished` if it was the last.
    pub(crate) fn complete_part(&mut self, completion: Completion, finished: &mut Vec<Completion>) {
        let Some(part) = self.tags.slot(&completion).and_then(|slot| self.parts.remove(slot)) else {
            unreachable!("a part completed that is not in the table")
        };
        let status = completion.status();
        let mut internal = completion.into_request();
        let data = internal.take_data();
        let Some(divided) = self.active.get_mut(part.parent) else {
            unreachable!("a part belongs to a request in progress")
        };
        divided.in_flight -= 1;
        if !status.is_success() && divided.status.is_success() {
            divided.status = status;
        }
        if divided.request.op != Op::Copy {
            divided.done[part.index] = match part.original {
                None => data,
                Some(mut original) => {
                    if let Some(Data::One(bounce)) = &data
                        && internal.op == Op::Read
                        && status.is_success()
                    {
                        original.copy_from(0, bounce.as_slice());
                    }
                    Some(original)
                }
            };
        } else if internal.op == Op::Read && status.is_success() {
            self.write_copy_step(part.parent, internal.blocks, data);
        } else if internal.op == Op::Write {
            divided.started_blocks += internal.blocks;
        }
        while self.start_part(part.parent) {}
        self.finish_if_done(part.parent, finished);
    }

    /// The write of a copy's step whose read is done.
    fn write_copy_step(&mut self, parent: Slot, blocks: u32, data: Option<Data>) {
        let Some(divided) = self.active.get_mut(parent) else { return };
        let lba = divided.request.lba + divided.copy_offset(blocks);
        let mut internal = BlockRequest::new(Tag(0), Op::Write, lba, blocks);
        (internal.flags, internal.flow) = (divided.request.flags, divided.request.flow);
        internal.issued_ticks = divided.request.issued_ticks;
        divided.in_flight += 1;
        internal.payload = data.map_or(Payload::None, |data| self.copy_payload(data, lba));
        let Ok(slot) = self.parts.insert(Part { parent, index: 0, original: None }) else {
            unreachable!("the read's entry is free")
        };
        self.tags.mark(&mut internal, slot);
        self.internal.push(internal);
    }

    fn finish_if_done(&mut self, slot: Slot, finished: &mut Vec<Completion>) {
        let Some(divided) = self.active.get(slot) else { return };
        let complete = divided.started_blocks == divided.request.blocks;
        if divided.in_flight > 0 || (divided.status.is_success() && !complete) {
            return;
        }
        if let Some(divided) = self.active.remove(slot) {
            finished.push(divided.complete());
        }
    }

    /// Ends with `status` what has no part at the module: that of a removed device gets none.
    pub(crate) fn fail_idle(&mut self, status: Status, finished: &mut Vec<Completion>) {
        for internal in std::mem::take(&mut self.internal) {
            // As if it had completed, which gives its data back.
            self.complete_part(internal.complete(status), finished);
        }
        for (_, divided) in self.active.iter_mut() {
            if divided.status.is_success() {
                divided.status = status;
            }
        }
        let slots: Vec<Slot> = self.active.iter().map(|(slot, _)| slot).collect();
        slots.into_iter().for_each(|slot| self.finish_if_done(slot, finished));
        finished.extend(self.queued.drain(..).map(|request| request.complete(status)));
    }
}

impl DividedRequest {
    fn copy_source(&self) -> u64 {
        match self.request.payload {
            Payload::CopySource(lba) => lba,
            _ => unreachable!("a copy has a source"),
        }
    }

    fn copies_backwards(&self) -> bool {
        self.request.lba > self.copy_source()
    }

    /// Offset in blocks of the next `blocks` of a copy. Where the ranges overlap, blocks are read before they
    /// are overwritten: from the end, if the destination lies behind the source.
    fn copy_offset(&self, blocks: u32) -> u64 {
        if self.copies_backwards() {
            u64::from(self.request.blocks - self.started_blocks - blocks)
        } else {
            u64::from(self.started_blocks)
        }
    }

    fn complete(mut self) -> Completion {
        let parts = self.done.into_iter().flatten().chain(self.rest);
        if let Some(data) = parts.reduce(Data::join) {
            self.request.set_data(Some(data));
        }
        self.request.complete(self.status)
    }
}

impl IoLimits {
    /// Whether a request can go to the module as it is.
    #[inline(always)]
    pub(crate) fn allow(&self, request: &Request, data: &Data) -> bool {
        let takes_slices = match data {
            Data::One(buffer) => buffer.as_ptr().addr() & (self.alignment as usize - 1) == 0,
            Data::Many(_) => self.takes_slices(data),
        };
        takes_slices && self.allow_length(request, data.len())
    }

    /// Whether the module takes as many bytes in one request, at this place.
    #[inline(always)]
    fn allow_length(&self, request: &Request, bytes: usize) -> bool {
        let in_boundary = self.boundary_blocks == 0
            || request.lba % u64::from(self.boundary_blocks) + u64::from(request.blocks)
                <= u64::from(self.boundary_blocks);
        in_boundary && bytes <= self.transfer_bytes_max as usize
    }

    /// Whether a request can go to the module undivided, if need be through a bounce buffer.
    pub(crate) fn allow_undivided(&self, request: &Request) -> bool {
        let bytes = request.data().map_or(0, Data::len);
        bytes <= BUFFER_BYTES_MAX && self.allow_length(request, bytes)
    }

    #[inline(never)]
    fn takes_slices(&self, data: &Data) -> bool {
        data.is_aligned(self.alignment as usize)
            && data.slices().len() <= self.segments_max as usize
            && (self.virtual_boundary == 1 || self.fitting_bytes(data) == data.len())
    }

    /// Blocks of the next part: up to the boundary and the largest transfer, and, where that is at least a
    /// block, only as much as the module can take without a bounce buffer.
    fn part_blocks(&self, lba: u64, rest: &Data, block_size: u32) -> u32 {
        let mut bytes =
            rest.len().min((self.transfer_bytes_max.max(block_size) / block_size * block_size) as usize);
        if self.boundary_blocks > 0 {
            let left = u64::from(self.boundary_blocks) - lba % u64::from(self.boundary_blocks);
            bytes = bytes.min((left * u64::from(block_size)).try_into().unwrap_or(usize::MAX));
        }
        let block_size = block_size as usize;
        let fitting = self.fitting_bytes(rest).min(bytes) / block_size * block_size;
        if fitting > 0 {
            return (fitting / block_size) as u32;
        }
        // A bounce buffer, for as much as needs one.
        let misaligned = rest.slices()[0].len().max(block_size).next_multiple_of(block_size);
        (bytes.min(BUFFER_BYTES_MAX).min(misaligned) / block_size) as u32
    }

    /// Bytes at the front of the data that the module can take in place.
    fn fitting_bytes(&self, data: &Data) -> usize {
        let (mask, boundary) = (self.alignment as usize - 1, self.virtual_boundary as usize - 1);
        let mut bytes = 0;
        for slice in data.slices().iter().take(self.segments_max as usize) {
            let start = slice.as_ptr().addr();
            if start & mask != 0 || (bytes > 0 && start & boundary != 0) {
                break;
            }
            bytes += slice.len();
            if slice.len() & mask != 0 || (start + slice.len()) & boundary != 0 {
                break;
            }
        }
        bytes
    }

    fn fits_prefix(&self, data: &Data, bytes: usize) -> bool {
        bytes <= self.fitting_bytes(data)
    }
}

/// Whether the layer answers a seek itself: to a module that does not know which blocks are allocated, all
/// are.
pub(crate) fn seek_without_module(request: &mut Request) {
    request.payload = Payload::Found((request.op == Op::SeekData).then_some(request.lba));
}
