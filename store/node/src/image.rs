//! The block device of an image, and its channel.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bdev::{Bdev, BdevError, BdevGeometry, BoxedChannel, Completion, InfoValue, IoLimits, Request};
use block_io::{Channel, Op, Status};
use dma::{Data, Parcel};
use reactor::{Core, MailboxReceiver, MailboxSender};
use slots::{Slab, Slot};
use wire_store::{EntryHeader, OBJECT_BYTES, ObjectId};

use crate::shard::{Reply, ShardHandle, ShardOperation, ShardReply, ShardRequest};

/// Logical block of an image. Writes of whole 4 KiB blocks need no read.
pub const IMAGE_BLOCK_BYTES: u32 = 512;
/// Most bytes of one request to a shard; the block layer divides larger ones.
pub const TRANSFER_BYTES_MAX: u32 = 128 << 10;
/// Requests in flight on one channel.
const DEPTH: u32 = 1024;
/// Objects that one request to zero a range has in flight; and answers that a channel's mailbox has room for.
const RANGE_PARTS_MAX: u32 = 16;
const REPLIES: usize = (DEPTH * RANGE_PARTS_MAX) as usize;

/// The shards of a store, by logical group.
pub(crate) type Shards = Arc<[ShardHandle]>;

/// The object with the bytes from `offset` of a volume on, and the offset in it.
pub(crate) fn locate(volume: u64, offset: u64, groups: usize) -> (ObjectId, u32) {
    let index = (offset / OBJECT_BYTES as u64) as u32;
    (object_of(volume, index, groups), (offset % OBJECT_BYTES as u64) as u32)
}

/// The object of a volume with this index, in its logical group.
pub(crate) fn object_of(volume: u64, index: u32, groups: usize) -> ObjectId {
    let group = ((volume + u64::from(index)) % groups as u64) as u32;
    ObjectId { group, volume, index, suffix: 0 }
}

/// The module's object of an image.
pub(crate) struct ImageBdev {
    pub(crate) store: String,
    pub(crate) image: String,
    pub(crate) volume: u64,
    pub(crate) bytes: AtomicU64,
    pub(crate) shards: Shards,
}

impl Bdev for ImageBdev {
    fn product_name(&self) -> &'static str {
        "Store image"
    }

    fn geometry(&self) -> BdevGeometry {
        let bytes = self.bytes.load(Ordering::Relaxed);
        BdevGeometry {
            physical_block_size: wire_store::BLOCK_BYTES as u32,
            optimal_io_boundary_blocks: OBJECT_BYTES as u32 / IMAGE_BLOCK_BYTES,
            buffer_alignment: 1,
            ..BdevGeometry::new(IMAGE_BLOCK_BYTES, bytes / u64::from(IMAGE_BLOCK_BYTES))
        }
    }

    fn supports(&self, op: Op) -> bool {
        matches!(op, Op::Read | Op::Write | Op::Flush | Op::Unmap | Op::WriteZeroes)
    }

    fn io_limits(&self) -> IoLimits {
        IoLimits {
            transfer_bytes_max: TRANSFER_BYTES_MAX,
            boundary_blocks: OBJECT_BYTES as u32 / IMAGE_BLOCK_BYTES,
            ..IoLimits::NONE
        }
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        let (sender, replies) = core.mailbox(REPLIES);
        Ok(Box::new(ImageChannel {
            core: core.clone(),
            volume: self.volume,
            shards: self.shards.clone(),
            pending: Slab::with_capacity(DEPTH),
            ranges: VecDeque::new(),
            done: Vec::new(),
            sender,
            replies,
        }))
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        let object = vec![
            ("store", self.store.as_str().into()),
            ("image", self.image.as_str().into()),
            ("durability", "disk".into()),
        ];
        vec![("store_image", InfoValue::Object(object))]
    }

    fn depth(&self) -> u32 {
        DEPTH
    }
}

/// A request that a channel has accepted.
enum Pending {
    /// Of one object.
    Io(Request),
    /// To zero a range, object by object.
    Range(RangeRequest),
}

struct RangeRequest {
    request: Request,
    /// Offset of the next part, and the end, in bytes.
    next: u64,
    end: u64,
    in_flight: u32,
    status: Status,
}

/// Sends each request to the core that owns its object.
struct ImageChannel {
    core: Core,
    volume: u64,
    shards: Shards,
    pending: Slab<Pending>,
    /// Ranges of which not every part was sent.
    ranges: VecDeque<Slot>,
    done: Vec<Completion>,
    sender: MailboxSender<ShardReply>,
    replies: MailboxReceiver<ShardReply>,
}

impl ImageChannel {
    /// Sends a request; gives it back if there is no memory or no room in the mailbox.
    fn send(&mut self, request: Request) -> Result<(), Request> {
        if request.op == Op::Flush {
            // Every write is durable when it completes.
            self.done.push(request.complete(Status::SUCCESS));
            return Ok(());
        }
        let bytes = u64::from(request.blocks) * u64::from(IMAGE_BLOCK_BYTES);
        let offset = request.lba * u64::from(IMAGE_BLOCK_BYTES);
        if !request.op.has_data() {
            let (next, end) = (offset, offset + bytes);
            let range = RangeRequest { request, next, end, in_flight: 0, status: Status::SUCCESS };
            match self.pending.insert(Pending::Range(range)) {
                Ok(slot) => self.ranges.push_back(slot),
                Err(Pending::Range(range)) => return Err(range.request),
                Err(Pending::Io(request)) => return Err(request),
            }
            self.send_ranges();
            return Ok(());
        }
        let (object, offset) = locate(self.volume, offset, self.shards.len());
        let length = bytes as u32;
        let operation = if request.op == Op::Read {
            ShardOperation::Read { object, offset, length }
        } else {
            match self.entry(&request, &self.shards[object.group as usize]) {
                Some(entry) => ShardOperation::Write { object, offset, length, entry: Some(entry) },
                None => return Err(request),
            }
        };
        let slot = match self.pending.insert(Pending::Io(request)) {
            Ok(slot) => slot,
            Err(Pending::Io(request) | Pending::Range(RangeRequest { request, .. })) => return Err(request),
        };
        let reply = Reply::Channel(self.sender.clone(), slot.to_bits());
        if self.shards[object.group as usize].send(ShardRequest { operation, reply }).is_ok() {
            return Ok(());
        }
        match self.pending.remove(slot) {
            Some(Pending::Io(request)) => Err(request),
            _ => unreachable!("it was inserted"),
        }
    }

    /// The log entry of a write, with room for its header; `None` if there is no memory now.
    fn entry(&self, request: &Request, shard: &ShardHandle) -> Option<Parcel> {
        let data = request.data()?;
        let mut entry = self.core.pool().take(shard.entry_bytes(data.len()))?;
        let out = entry.as_mut_slice();
        let end = EntryHeader::SIZE + data.len();
        data.copy_to(0, &mut out[EntryHeader::SIZE..end]);
        out[end..].fill(0);
        Some(Data::One(entry).into_parcel())
    }

    /// Sends parts of ranges, as many as may be in flight.
    fn send_ranges(&mut self) {
        for _ in 0..self.ranges.len() {
            let Some(slot) = self.ranges.pop_front() else { return };
            let Some(Pending::Range(range)) = self.pending.get_mut(slot) else { continue };
            while range.next < range.end && range.in_flight < RANGE_PARTS_MAX && range.status.is_success() {
                let (object, offset) = locate(self.volume, range.next, self.shards.len());
                let length = (OBJECT_BYTES as u64 - u64::from(offset)).min(range.end - range.next) as u32;
                let operation = ShardOperation::WriteZeroes { object, offset, length };
                let reply = Reply::Channel(self.sender.clone(), slot.to_bits());
                if self.shards[object.group as usize].send(ShardRequest { operation, reply }).is_err() {
                    break;
                }
                range.next += u64::from(length);
                range.in_flight += 1;
            }
            if range.next < range.end && range.status.is_success() {
                self.ranges.push_back(slot);
            }
        }
    }

    fn complete(&mut self, reply: ShardReply) -> Option<Completion> {
        let slot = Slot::from_bits(reply.tag);
        if let Some(Pending::Range(range)) = self.pending.get_mut(slot) {
            range.in_flight -= 1;
            if range.status.is_success() {
                range.status = reply.status;
            }
            if range.in_flight > 0 || (range.next < range.end && range.status.is_success()) {
                return None;
            }
        }
        match self.pending.remove(slot)? {
            Pending::Range(range) => Some(range.request.complete(range.status)),
            Pending::Io(mut request) => {
                let mut status = reply.status;
                if let (Some(parcel), Some(out)) = (reply.data, request.data_mut()) {
                    match self.core.pool().adopt(parcel) {
                        Ok(Data::One(data)) => out.copy_from(0, data.as_slice()),
                        _ => status = Status::INTERNAL_ERROR,
                    }
                }
                Some(request.complete(status))
            }
        }
    }
}

impl Channel for ImageChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        let mut requests = std::mem::take(batch).into_iter();
        for request in requests.by_ref() {
            if let Err(request) = self.send(request) {
                batch.push(request);
                break;
            }
        }
        batch.extend(requests);
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        sink.append(&mut self.done);
        while let Some(reply) = self.replies.receive() {
            sink.extend(self.complete(reply));
        }
        if !self.ranges.is_empty() {
            self.send_ranges();
        }
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        (!self.done.is_empty() || !self.ranges.is_empty()).then_some(0)
    }
}
