//! The block device of an image, and its channel.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bdev::{
    Bdev, BdevError, BdevGeometry, BoxedChannel, Completion, Durability, InfoValue, IoLimits, Request,
};
use block_io::{Channel, Op, Status};
use dma::{Data, Parcel};
use reactor::{Core, MailboxReceiver, MailboxSender};
use slots::{Slab, Slot};
use store_image::{IMAGE_BLOCK_BYTES, RangeProgress, RangeRequest, TRANSFER_BYTES_MAX};
use wire_store::{EntryHeader, OBJECT_BYTES, ObjectId};

use crate::shard::{Reply, ShardHandle, ShardOperation, ShardReply, ShardRequest};

/// Requests in flight on one channel.
const DEPTH: u32 = 1024;
/// Requests to shards in flight on one channel, for whose answers its mailbox has room: those with data, and parts of
/// ranges to zero.
const IN_FLIGHT_MAX: usize = DEPTH as usize;

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
    /// Where a write is when it is acknowledged.
    pub(crate) durability: Durability,
}

impl Bdev for ImageBdev {
    fn product_name(&self) -> &'static str {
        "Store image"
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry {
            // A write within an object is one entry of its log, and reads return committed entries only.
            atomic_write_blocks: TRANSFER_BYTES_MAX / IMAGE_BLOCK_BYTES,
            atomic_write_boundary_blocks: OBJECT_BYTES as u32 / IMAGE_BLOCK_BYTES,
            ..store_image::geometry(self.bytes.load(Ordering::Relaxed))
        }
    }

    fn durability(&self) -> Durability {
        self.durability
    }

    fn supports(&self, op: Op) -> bool {
        store_image::supports(op)
    }

    fn io_limits(&self) -> IoLimits {
        store_image::io_limits()
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        let (sender, replies) = core.mailbox(IN_FLIGHT_MAX);
        Ok(Box::new(ImageChannel {
            core: core.clone(),
            volume: self.volume,
            shards: self.shards.clone(),
            pending: Slab::with_capacity(DEPTH),
            ranges: VecDeque::new(),
            in_flight: 0,
            batch: Vec::new(),
            done: Vec::new(),
            sender,
            replies,
        }))
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        let object = vec![("store", self.store.as_str().into()), ("image", self.image.as_str().into())];
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
    /// Of a range, object by object.
    Range(RangeRequest),
}

/// Sends each request to the core that owns its object.
struct ImageChannel {
    core: Core,
    volume: u64,
    shards: Shards,
    pending: Slab<Pending>,
    /// Ranges of which not every part was sent.
    ranges: VecDeque<Slot>,
    /// Requests to shards that are not answered.
    in_flight: usize,
    /// Scratch of [`submit`](Channel::submit), empty between calls.
    batch: Vec<Request>,
    done: Vec<Completion>,
    sender: MailboxSender<ShardReply>,
    replies: MailboxReceiver<ShardReply>,
}

impl ImageChannel {
    /// Accepts a request; gives it back if there is no memory for it, or no room in a mailbox.
    fn accept(&mut self, request: Request) -> Result<(), Request> {
        if request.op == Op::Flush {
            // Every write is durable when it completes.
            self.done.push(request.complete(Status::SUCCESS));
            return Ok(());
        }
        if self.pending.is_full() {
            return Err(request);
        }
        let bytes = u64::from(request.blocks) * u64::from(IMAGE_BLOCK_BYTES);
        let offset = request.lba * u64::from(IMAGE_BLOCK_BYTES);
        if !request.op.has_data() {
            let range = Pending::Range(RangeRequest::new(request));
            let slot = self.pending.insert(range).ok().expect("there is room");
            self.ranges.push_back(slot);
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
        let slot = self.pending.insert(Pending::Io(request)).ok().expect("there is room");
        if self.send(object, operation, slot) {
            return Ok(());
        }
        match self.pending.remove(slot) {
            Some(Pending::Io(request)) => Err(request),
            _ => unreachable!("it was inserted"),
        }
    }

    /// Sends an operation to the shard of an object; `false` if there is no room for it or for its answer.
    fn send(&mut self, object: ObjectId, operation: ShardOperation, slot: Slot) -> bool {
        if self.in_flight == IN_FLIGHT_MAX {
            return false;
        }
        let reply = Reply::Channel(self.sender.clone(), slot.to_bits());
        let is_sent = self.shards[object.group as usize].send(ShardRequest { operation, reply }).is_ok();
        self.in_flight += usize::from(is_sent);
        is_sent
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
            while self.send_part(slot) {}
            if let Some(Pending::Range(range)) = self.pending.get(slot)
                && range.is_unsent()
            {
                self.ranges.push_back(slot);
            }
        }
    }

    /// Sends the next part of a range, if it may be sent now.
    fn send_part(&mut self, slot: Slot) -> bool {
        let Some(Pending::Range(range)) = self.pending.get(slot) else { return false };
        let Some(part) = range.next_part() else { return false };
        let (object, offset) = locate(self.volume, part.offset, self.shards.len());
        let operation = match part.allocates {
            true => ShardOperation::Preallocate { object },
            false => ShardOperation::WriteZeroes { object, offset, length: part.length },
        };
        let is_sent = self.send(object, operation, slot);
        if is_sent && let Some(Pending::Range(range)) = self.pending.get_mut(slot) {
            range.part_sent(part);
        }
        is_sent
    }

    fn complete(&mut self, reply: ShardReply) -> Option<Completion> {
        self.in_flight -= 1;
        let slot = Slot::from_bits(reply.tag);
        if let Some(Pending::Range(range)) = self.pending.get_mut(slot) {
            match range.part_completed(reply.status) {
                RangeProgress::InFlight => return None,
                RangeProgress::Again => {
                    self.ranges.push_back(slot);
                    return None;
                }
                RangeProgress::Ended => {}
            }
        }
        match self.pending.remove(slot)? {
            Pending::Range(range) => Some(range.complete()),
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
        let mut requests = std::mem::take(&mut self.batch);
        std::mem::swap(&mut requests, batch);
        for request in requests.drain(..) {
            // In order: after the first that waits, all do.
            if batch.is_empty() {
                batch.extend(self.accept(request).err());
            } else {
                batch.push(request);
            }
        }
        self.batch = requests;
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
        // An answer has the next parts of ranges sent; without one in flight, a full mailbox is tried again.
        let retries = !self.ranges.is_empty() && self.in_flight == 0;
        (!self.done.is_empty() || !self.replies.is_empty() || retries).then_some(0)
    }
}
