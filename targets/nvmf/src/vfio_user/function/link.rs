//! What the vfio-user transport does for a queue: data in client memory, and completion queue entries.

use block_io::{Request, Status};
use dma::{Buffer, Data};
use nvme_controller::io_queue::{
    CommandData, CommandToken, HostData, HostLink, HostTransfer, IoTransport, Transferred,
};
use slots::Slot;
use wire_nvme::{DataPointer, Sqe};

use super::super::data::{self, DataSegment, PAGE};
use super::super::memory::ClientMemory;
use super::super::protocol::VfioUserContext;
use super::super::queue::{CompletionQueue, SubmissionQueueState, SubmissionRing, cqe_high, reported_status};
use super::{InjectedFaults, MEMORY_NOT_MAPPED, QUEUES_MAX};

/// The data of a command in client memory, which is copied.
pub(in super::super) type SegmentList = Box<[DataSegment]>;

/// First bit of the queue identifier in the tag of a device request; [`IoQueue`](nvme_controller::IoQueue)
/// uses those below.
pub(super) const TAG_QID_SHIFT: u32 = 33;
const _: () = assert!(
    QUEUES_MAX.is_power_of_two()
        && (QUEUES_MAX as u64) << TAG_QID_SHIFT <= 1 << target_shell::REQUEST_TAG_BITS
);

/// Bits of PSDT in a command's flags: 0 for PRPs.
const PSDT: u8 = 0xc0;
/// PSDT of an SGL whose metadata, if any, is contiguous.
const PSDT_SGL: u8 = 0x40;

/// The way to the client: a submission queue's counters, and the completion queue that its completions go to.
pub(super) struct QueueLink<'a> {
    pub(super) qid: u16,
    pub(super) ring: &'a mut SubmissionRing,
    pub(super) completions: Option<&'a mut CompletionQueue>,
    pub(super) memory: &'a ClientMemory,
    pub(super) faults: &'a mut InjectedFaults,
    pub(super) dirty_cqids: &'a mut Vec<u16>,
    pub(super) has_blocked_completions: &'a mut bool,
    pub(super) flow: u16,
}

impl QueueLink<'_> {
    /// Completes a command, for which a completion queue entry is reserved. The commands of a closed queue
    /// get none.
    #[inline]
    pub(super) fn post(&mut self, cid: u16, status: Status, result: u64) {
        self.ring.in_flight -= 1;
        self.ring.errors += u64::from(!status.is_success());
        let status = reported_status(self.ring.lease.as_ref(), status);
        if self.ring.state == SubmissionQueueState::Closed {
            return;
        }
        let Some(completions) = &mut self.completions else { return };
        if self.faults.drop_completions > 0 {
            self.faults.drop_completions -= 1;
            return completions.release(1);
        }
        let high = cqe_high(self.ring.head as u16, self.qid, cid, status);
        let was_dirty = completions.dirty;
        if !completions.post(result, high) {
            *self.has_blocked_completions = true;
        } else if !was_dirty {
            self.dirty_cqids.push(self.ring.cqid);
        }
    }
}

impl HostLink for QueueLink<'_> {
    type Location = SegmentList;

    #[inline]
    fn complete(&mut self, token: CommandToken, status: Status, result: u64) {
        self.post(token.answered(), status, result);
    }

    /// Copies data to client memory, which may have been unmapped meanwhile, and completes the command.
    fn send(
        &mut self,
        token: CommandToken,
        _slot: Slot,
        location: &SegmentList,
        data: &CommandData,
        length: usize,
        result: u64,
    ) -> Transferred {
        let copied = data::scatter(self.memory, location, data.parts(0, length));
        self.complete(token, copied.err().unwrap_or(Status::SUCCESS), result);
        Transferred::Now
    }
}

/// A queue's link while commands are executed, with the resources that the poll group lends.
pub(super) struct QueueTransport<'a, 'b> {
    pub(super) link: QueueLink<'a>,
    /// Scratch space for the segments of a command.
    pub(super) segments: &'a mut Vec<DataSegment>,
    pub(super) context: &'a mut VfioUserContext<'b>,
    /// Bytes of data of the requests that were submitted.
    pub(super) bytes: u64,
}

impl QueueTransport<'_, '_> {
    /// Lends client memory as a buffer, if it is in one range, aligned, and writable where needed. Clients
    /// map whole pages.
    #[inline(always)]
    fn lend(&self, address: u64, bytes: u32, to_host: bool, alignment: u32) -> Option<Buffer> {
        let mapped = self.link.memory.translate(address, bytes.into())?;
        let fits = mapped.offset & u64::from(alignment - 1) == 0 && (mapped.writable || !to_host);
        if fits { mapped.external.buffer(mapped.offset, bytes) } else { None }
    }

    /// Lends the segments of a transfer, if each begins and each but the last ends at a multiple of the
    /// alignment.
    fn lend_segments(&self, transfer: &HostTransfer) -> Option<Data> {
        let (alignment, to_host) = (transfer.lend_alignment?, transfer.to_host);
        let lend = |segment: &DataSegment| self.lend(segment.address, segment.bytes, to_host, alignment);
        if self.segments.iter().any(|segment| segment.is_discarded) {
            return None;
        }
        let (last, others) = self.segments.split_last()?;
        if others.is_empty() {
            return lend(last).map(Data::One);
        }
        if others.iter().any(|segment| segment.bytes & (alignment - 1) != 0) {
            return None;
        }
        Data::gather(self.segments.iter().map(lend).collect::<Option<_>>()?)
    }

    #[inline(never)]
    fn locate_segments(
        &mut self,
        pointer: DataPointer,
        is_sgl: bool,
        transfer: HostTransfer,
    ) -> Result<HostData<SegmentList>, Status> {
        let HostTransfer { bytes, to_host, .. } = transfer;
        data::parse_data_pointer(self.link.memory, (pointer, is_sgl), to_host, bytes, self.segments)?;
        if let Some(data) = self.lend_segments(&transfer) {
            return Ok(HostData::Lent(data));
        }
        // Not aligned, or not mapped: copied if it can be reached.
        let is_reachable = |segment: &DataSegment| {
            segment.is_discarded
                || self
                    .link
                    .memory
                    .translate(segment.address, segment.bytes.into())
                    .is_some_and(|mapped| mapped.writable || !to_host)
        };
        if !self.segments.iter().all(is_reachable) {
            return Err(MEMORY_NOT_MAPPED);
        }
        let location = self.segments.as_slice().into();
        Ok(HostData::Moved { location, room: bytes, immediate: false })
    }
}

impl HostLink for QueueTransport<'_, '_> {
    type Location = SegmentList;

    #[inline]
    fn complete(&mut self, token: CommandToken, status: Status, result: u64) {
        self.link.complete(token, status, result);
    }

    fn send(
        &mut self,
        token: CommandToken,
        slot: Slot,
        location: &SegmentList,
        data: &CommandData,
        length: usize,
        result: u64,
    ) -> Transferred {
        self.link.send(token, slot, location, data, length, result)
    }
}

impl IoTransport for QueueTransport<'_, '_> {
    const LENDS: bool = true;

    /// The descriptor in the command is one Data Block, or PRP1 is the only page.
    #[inline(always)]
    fn lend_range(&mut self, sqe: &Sqe, bytes: u32, to_host: bool, alignment: u32) -> Option<Buffer> {
        if sqe.flags & PSDT != 0 {
            let is_data_block = sqe.flags & PSDT == PSDT_SGL && sqe.data.high == u64::from(bytes);
            return if is_data_block { self.lend(sqe.data.low, bytes, to_host, alignment) } else { None };
        }
        let is_page = u64::from(bytes) <= PAGE && sqe.data.low.is_multiple_of(PAGE);
        if is_page { self.lend(sqe.data.low, bytes, to_host, PAGE as u32) } else { None }
    }

    #[inline(always)]
    fn locate(&mut self, sqe: &Sqe, transfer: HostTransfer) -> Result<HostData<SegmentList>, Status> {
        self.locate_segments(sqe.data, sqe.flags & PSDT != 0, transfer)
    }

    fn receive(
        &mut self,
        _slot: Slot,
        _cid: u16,
        location: &mut SegmentList,
        into: &mut CommandData,
    ) -> Result<Transferred, Status> {
        data::gather(self.link.memory, location, into.parts_mut(0, into.len()))?;
        Ok(Transferred::Now)
    }

    #[inline]
    fn take_data(&mut self, bytes: usize) -> Option<Data> {
        let data = self.context.pool.take_data(bytes);
        if data.is_none() {
            self.link.ring.totals.waited_for_buffer();
        }
        data
    }

    #[inline(always)]
    fn submit(&mut self, backend: u32, mut request: Request<Data>) -> Result<(), Status> {
        request.tag.0 |= u64::from(self.link.qid) << TAG_QID_SHIFT;
        request.flow = self.link.flow;
        self.bytes += request.data().map_or(0, |data| data.len() as u64);
        self.context.submit(backend, request)
    }
}
