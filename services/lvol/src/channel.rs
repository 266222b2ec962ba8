//! The channel of a volume on one core.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bdev::stacking::{BaseChannel, BaseChannels, BaseSet};
use bdev::{BlockDevice, Completion, Request};
use blobstore::ChangeId;
use block_io::{Op, Payload, Request as BlockRequest, RequestFlags, Status, Tag};
use dma::Data;
use reactor::MailboxReceiver;
use slots::{Slab, Slot};

use crate::external_end::{external_bytes_below, readable_bytes};
use crate::owner::OwnerMessage;
use crate::shared::{ChannelMessage, ChannelSeat, PublishedUse, VolumeShared};
use crate::volume_map::{ChangePiece, PieceSource, ReadPiece, Unusable, VolumeMap};
use crate::volume_view::{RangePlace, VolumeView};

mod changes;
mod in_place;

use in_place::{SLOTS_MAX, WholeRequest};

/// Clusters of the largest request with data that the channel gets, so that the pieces of each have a limit.
pub(crate) const CLUSTERS_MAX: u32 = 256;
/// Pieces in flight of requests that were divided; more requests wait. Enough for four of the largest: these
/// have a piece for each cluster, parts of two, and one more where the external snapshot ends.
const PIECES_MAX: u32 = 4 * (CLUSTERS_MAX + 4);
/// First writes to clusters that wait for the owner; more wait for these.
pub(crate) const ALLOCATIONS_MAX: usize = 64;

/// Divides requests into pieces for the store's device and the external snapshot.
///
/// A request of one piece is passed on with another address, in the caller's batch; `in_place.rs` has that.
/// Its place in a table has what it was. The others have a place for the request, and one for each piece, in
/// another. The tables grow until they are as full as they ever were, and have limits. A piece of a write in
/// a cluster that the volume does not have waits until the owner has prepared one; `changes.rs` has the
/// steps. What flushes and writes with FUA make durable includes the cluster maps that were written before.
pub(crate) struct LvolChannel {
    volume: Arc<VolumeShared>,
    seat: Arc<ChannelSeat>,
    messages: MailboxReceiver<ChannelMessage>,
    /// Empty between calls.
    received: Vec<ChannelMessage>,
    in_use: PublishedUse,
    /// Of the metadata of `view_epoch`.
    view: VolumeView,
    view_epoch: u64,
    /// Bytes of a block of the volume.
    block_bytes: u64,
    base: OpenSource,
    /// Of the external snapshot, if data is there.
    external: BaseChannels,
    external_set: Arc<BaseSet>,
    /// Of the metadata of an epoch: where the external snapshot ends for the volume.
    external_limit: Cell<Option<(u64, u64)>>,
    whole: Slab<WholeRequest>,
    entries: Slab<Entry>,
    /// Places of `entries` for flushes that follow writes with FUA: one for each of `whole`.
    flush_places: usize,
    /// Requests that wait for places in the table; at most the depth.
    waiting: VecDeque<Request>,
    /// What completed here, until the next poll.
    finished: Vec<Completion>,
    /// Empty between calls.
    completions: Vec<Completion>,
    pieces: Vec<ReadPiece>,
    change_pieces: Vec<ChangePiece>,
    /// With the store's device; they keep a snapshot waiting.
    writes_in_flight: u32,
    /// First writes to clusters, by index in the volume.
    allocations: BTreeMap<u32, Allocation>,
    /// Pieces that wait for a place among the allocations.
    deferred: VecDeque<Slot>,
    /// No write may begin in the present call.
    is_paused: bool,
    /// Writes and pieces of them that wait while the volume is paused.
    paused: VecDeque<Request>,
    paused_pieces: VecDeque<Slot>,
    /// Messages for which the owner's mailbox was full.
    unsent: VecDeque<OwnerMessage>,
}

/// The device that has data of the volume.
pub(crate) struct OpenSource {
    channel: BaseChannel,
    block_bytes: u64,
    /// The logarithm of a block's bytes, where these are a power of two.
    block_shift: Option<u32>,
}

impl OpenSource {
    pub(crate) fn new(channel: BaseChannel, device: &BlockDevice) -> OpenSource {
        let block_size = device.geometry().block_size;
        let block_shift = block_size.is_power_of_two().then_some(block_size.trailing_zeros());
        OpenSource { channel, block_bytes: block_size.into(), block_shift }
    }

    /// The first block and the number of blocks of a piece.
    fn range(&self, offset: u64, length: u64) -> (u64, u32) {
        range(self.block_bytes, offset, length)
    }
}

/// The first block and the number of blocks of a piece: a whole number, as the blocks of a device divide
/// those of the volume.
fn range(block_bytes: u64, offset: u64, length: u64) -> (u64, u32) {
    // The volume's limit of a request has fewer bytes than 2^32.
    (offset / block_bytes, (length / block_bytes) as u32)
}

/// A first write to a cluster, or the release of one.
struct Allocation {
    /// The piece of which the owner knows.
    first: Slot,
    /// Pieces that wait for its end.
    waiters: Vec<Slot>,
}

enum Entry {
    /// A flush, as it was submitted, and the number of cluster maps that it makes durable.
    Flush { tag: Tag, lba: u64, blocks: u32, maps: u64 },
    /// A write with FUA that is done but for a flush of cluster maps.
    Durable { request: Request, maps: u64 },
    /// A request of several.
    Divided(DividedRequest),
    /// One of its pieces.
    Piece(PieceOfRequest),
}

struct DividedRequest {
    /// Without its data, which the pieces have.
    request: Request,
    /// The first error, or success.
    status: Status,
    pending: u32,
    /// The first of the pieces, which are a list.
    first: Option<Slot>,
    /// Bytes of a range that have no pieces yet: it begins at the offset in the volume.
    rest: Option<(u64, u64)>,
}

struct PieceOfRequest {
    parent: Slot,
    /// `None` while it is in flight.
    data: Option<Data>,
    next: Option<Slot>,
    /// Where it is in the volume, in bytes.
    offset: u64,
    length: u64,
    /// That of its I/O in flight.
    epoch: Option<u64>,
    /// It is in flight to a new cluster.
    fills_cluster: bool,
    /// The owner's change for that cluster.
    change: Option<ChangeId>,
}

/// What a channel is opened with.
pub(crate) struct LvolChannelParts {
    pub(crate) volume: Arc<VolumeShared>,
    pub(crate) seat: Arc<ChannelSeat>,
    pub(crate) messages: MailboxReceiver<ChannelMessage>,
    /// Bytes of a block of the volume.
    pub(crate) block_bytes: u32,
    /// The volume's [depth](bdev::Bdev::depth).
    pub(crate) depth: u32,
    pub(crate) base: OpenSource,
    /// Of the external snapshot, in place 0 of the set.
    pub(crate) external: BaseChannels,
    pub(crate) external_set: Arc<BaseSet>,
}

impl LvolChannel {
    pub(crate) fn new(parts: LvolChannelParts) -> LvolChannel {
        let LvolChannelParts { volume, seat, messages, block_bytes, depth, base, external, external_set } =
            parts;
        LvolChannel {
            in_use: PublishedUse::new(&volume.store),
            view: VolumeView::new(),
            // Not that of any metadata.
            view_epoch: u64::MAX,
            volume,
            seat,
            messages,
            received: Vec::new(),
            block_bytes: block_bytes.into(),
            base,
            external,
            external_set,
            external_limit: Cell::new(None),
            whole: Slab::with_capacity(depth.min(SLOTS_MAX)),
            entries: Slab::with_capacity((2 * depth.min(SLOTS_MAX / 4)).saturating_add(PIECES_MAX)),
            flush_places: depth.min(SLOTS_MAX / 4) as usize,
            waiting: VecDeque::new(),
            finished: Vec::new(),
            completions: Vec::new(),
            pieces: Vec::new(),
            change_pieces: Vec::new(),
            writes_in_flight: 0,
            allocations: BTreeMap::new(),
            deferred: VecDeque::new(),
            is_paused: false,
            paused: VecDeque::new(),
            paused_pieces: VecDeque::new(),
            unsent: VecDeque::new(),
        }
    }

    fn map(&self) -> VolumeMap<'_> {
        VolumeMap { blobs: &self.in_use.published, blob: self.volume.blob }
    }

    /// The bytes that the external snapshot has for the volume, by the metadata in use.
    fn external_limit(&self) -> u64 {
        let (epoch, published) = (self.in_use.epoch(), &self.in_use.published);
        match self.external_limit.get() {
            Some((of, bytes)) if of == epoch => bytes,
            _ => {
                let bytes = external_bytes_below(published, self.volume.blob);
                self.external_limit.set(Some((epoch, bytes)));
                bytes
            }
        }
    }

    /// Places of the table for requests that begin, and their pieces.
    fn free_places(&self) -> usize {
        (self.entries.capacity() - self.flush_places).saturating_sub(self.entries.len())
    }

    /// Starts a request that is not in one place of the store's device; returns one for which the table has
    /// no places.
    fn start(&mut self, mut request: Request) -> Option<Request> {
        let offset = request.lba.wrapping_mul(self.block_bytes);
        let length = u64::from(request.blocks) * self.block_bytes;
        match request.op {
            Op::Read => {}
            Op::Write | Op::WriteZeroes | Op::Unmap => return self.start_change(request, offset, length),
            Op::Flush => return self.start_flush(request),
            Op::SeekData | Op::SeekHole => {
                let found = self.map().seek(request.op, offset, length);
                request.payload = Payload::Found(found.map(|at| at / self.block_bytes));
                self.finished.push(request.complete(Status::SUCCESS));
                return None;
            }
            _ => {
                self.finished.push(request.complete(Status::INVALID_OPCODE));
                return None;
            }
        }
        if self.view.read_at(offset, length) == RangePlace::Zeroes {
            self.read_zeroes(request);
            return None;
        }
        let mut pieces = std::mem::take(&mut self.pieces);
        pieces.clear();
        let (external, limit) = (&self.external_set, self.external_limit());
        let external_bytes = || {
            let present = external.base(0).map_or(u64::MAX, |base| base.device().geometry().bytes());
            readable_bytes(present, limit)
        };
        let readable = self.map().pieces(offset, length, external_bytes, &mut pieces);
        let is_single = pieces.len() == 1;
        let returned = if let Err(why) = readable {
            self.finished.push(request.complete(status_of(why)));
            None
        } else if is_single && self.whole.is_full() || !is_single && self.free_places() <= pieces.len() {
            Some(request)
        } else if let [piece] = &pieces[..] {
            self.pass_on(request, piece);
            None
        } else {
            self.divide(request, &pieces);
            None
        };
        self.pieces = pieces;
        returned
    }

    fn pass_on(&mut self, mut request: Request, piece: &ReadPiece) {
        if piece.source == PieceSource::Zeroes {
            return self.read_zeroes(request);
        }
        self.insert_whole(&mut request);
        self.push_to(piece, request);
    }

    fn read_zeroes(&mut self, mut request: Request) {
        let status = match request.data_mut() {
            Some(data) => {
                data.clear();
                Status::SUCCESS
            }
            None => Status::INVALID_FIELD,
        };
        self.finished.push(request.complete(status));
    }

    /// Sends a read of a piece to where its data is.
    fn push_to(&mut self, piece: &ReadPiece, mut request: Request) {
        match piece.source {
            PieceSource::External => {
                let base = self.external_set.base(0);
                let block_bytes =
                    base.map_or(self.block_bytes, |base| u64::from(base.device().geometry().block_size));
                (request.lba, request.blocks) = range(block_bytes, piece.offset, piece.length);
                // Without a device it fails.
                self.external.push(0, request);
            }
            PieceSource::Base | PieceSource::Zeroes => {
                (request.lba, request.blocks) = self.base.range(piece.offset, piece.length);
                self.base.channel.push(request);
            }
        }
    }

    fn divide(&mut self, mut request: Request, pieces: &[ReadPiece]) {
        let Payload::Data(_) = request.payload else {
            return self.finished.push(request.complete(Status::INVALID_FIELD));
        };
        let (flow, issued_ticks) = (request.flow, request.issued_ticks);
        let mut offset = request.lba * self.block_bytes;
        let mut rest = request.take_data();
        let read = DividedRequest { request, status: Status::SUCCESS, pending: 0, first: None, rest: None };
        let read = self.insert(Entry::Divided(read));
        let mut last: Option<Slot> = None;
        for piece in pieces {
            let mut data = rest.take();
            if let Some(data) = &mut data
                && piece.length < data.len() as u64
            {
                rest = Some(data.split_off(piece.length as usize));
            }
            let is_zero = piece.source == PieceSource::Zeroes;
            if is_zero && let Some(data) = &mut data {
                data.clear();
            }
            let stored = if is_zero { data.take() } else { None };
            let epoch = (!is_zero).then(|| self.in_use.begin());
            let slot = self.insert(Entry::Piece(PieceOfRequest {
                parent: read,
                data: stored,
                next: None,
                offset,
                length: piece.length,
                epoch,
                fills_cluster: false,
                change: None,
            }));
            offset += piece.length;
            self.link(read, last.replace(slot), slot);
            if is_zero {
                continue;
            }
            let payload = Payload::from_data(data);
            let mut child = BlockRequest::with_payload(Tag(slot.to_bits()), Op::Read, 0, 0, payload);
            (child.flow, child.issued_ticks) = (flow, issued_ticks);
            self.push_to(piece, child);
            self.divided(read).pending += 1;
        }
        if self.divided(read).pending == 0 {
            self.finish(read);
        }
    }

    /// Adds a piece to the list of a request, after `last`.
    fn link(&mut self, parent: Slot, last: Option<Slot>, slot: Slot) {
        match last {
            Some(last) => self.piece(last).next = Some(slot),
            None => self.divided(parent).first = Some(slot),
        }
    }

    fn complete(&mut self, completion: Completion) {
        let (slot, status) = (Slot::from_bits(completion.tag().0), completion.status());
        let mut request = completion.into_request();
        match self.entries.get_mut(slot) {
            Some(Entry::Piece(piece)) => {
                piece.data = request.take_data();
                if let Some(epoch) = piece.epoch.take() {
                    let (parent, fills_cluster) = (piece.parent, piece.fills_cluster);
                    self.in_use.end(epoch);
                    self.writes_in_flight -= u32::from(request.op.is_write());
                    match fills_cluster {
                        true => self.cluster_filled(slot, status),
                        false => self.piece_ended(parent, status),
                    }
                }
            }
            Some(Entry::Flush { .. } | Entry::Durable { .. }) => self.flushed(slot, request, status),
            _ => unreachable!("slot {slot:?} was completed by a device and is not in the table"),
        }
    }

    /// A piece of a request needs no more.
    fn piece_ended(&mut self, parent: Slot, status: Status) {
        let divided = self.divided(parent);
        divided.pending -= 1;
        if divided.status.is_success() {
            divided.status = status;
        }
        if divided.pending == 0 {
            self.finish(parent);
        }
    }

    /// Completes a request with the data of its pieces, as one again, or begins the rest of its range.
    fn finish(&mut self, slot: Slot) {
        let mut next = self.divided(slot).first.take();
        let mut whole = None::<Data>;
        while let Some(Entry::Piece(piece)) = next.and_then(|slot| self.entries.remove(slot)) {
            whole = match (whole, piece.data) {
                (Some(whole), Some(data)) => Some(whole.join(data)),
                (one, other) => one.or(other),
            };
            next = piece.next;
        }
        let divided = self.divided(slot);
        if divided.status.is_success()
            && let Some((offset, length)) = divided.rest.take()
        {
            return self.continue_range(slot, offset, length);
        }
        let Some(Entry::Divided(DividedRequest { mut request, status, .. })) = self.entries.remove(slot)
        else {
            unreachable!("slot {slot:?} is a request that was divided")
        };
        if whole.is_some() {
            request.set_data(whole);
        }
        self.finish_request(request, status);
    }

    /// The request is done, but for a flush if it wants to be durable.
    fn finish_request(&mut self, request: Request, status: Status) {
        let is_durable = request.op.is_write() && request.flags.contains(RequestFlags::FUA);
        if is_durable && status.is_success() && !self.volume.store.are_maps_durable() {
            return self.flush_maps(request);
        }
        self.finished.push(request.complete(status));
    }

    fn insert(&mut self, entry: Entry) -> Slot {
        match self.entries.insert(entry) {
            Ok(slot) => slot,
            Err(_) => unreachable!("places were counted before"),
        }
    }

    fn divided(&mut self, slot: Slot) -> &mut DividedRequest {
        match self.entries.get_mut(slot) {
            Some(Entry::Divided(divided)) => divided,
            _ => unreachable!("slot {slot:?} is a request that was divided"),
        }
    }

    fn piece(&mut self, slot: Slot) -> &mut PieceOfRequest {
        match self.entries.get_mut(slot) {
            Some(Entry::Piece(piece)) => piece,
            _ => unreachable!("slot {slot:?} is a piece of a request"),
        }
    }

    fn submit_pushed(&mut self) {
        self.base.channel.submit();
        self.external.submit();
    }

    /// Before anything begins: I/O that begins is by the newest metadata.
    fn enter(&mut self) {
        // One more than there are: one may begin.
        self.is_paused = self.in_use.enter(&self.volume, &self.seat, self.writes_in_flight + 1);
        if self.in_use.epoch() != self.view_epoch {
            self.view_epoch = self.in_use.epoch();
            self.view.follow(&self.in_use.published, self.volume.blob);
        }
    }

    /// After what could begin has begun.
    fn publish(&mut self) {
        self.in_use.publish(&self.volume.store, &self.seat, self.writes_in_flight);
    }
}

/// The status of a request whose range cannot be used.
fn status_of(why: Unusable) -> Status {
    match why {
        Unusable::Missing => Status::INTERNAL_ERROR,
        Unusable::BeyondEnd => Status::LBA_OUT_OF_RANGE.do_not_retry(),
        Unusable::ReadOnly => Status::NAMESPACE_WRITE_PROTECTED.do_not_retry(),
    }
}

impl block_io::Channel for LvolChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        self.enter();
        let translated = if self.waiting.is_empty() { self.translate(batch) } else { 0 };
        if translated == batch.len() {
            self.base.channel.submit_batch(batch);
            return self.publish();
        }
        let mut requests = batch.drain(..);
        requests.by_ref().take(translated).for_each(|request| self.base.channel.push(request));
        for mut request in requests {
            if self.waiting.is_empty() && self.translate(std::slice::from_mut(&mut request)) == 1 {
                self.base.channel.push(request);
                continue;
            }
            if self.is_paused && request.op.is_write() {
                self.paused.push_back(request);
                continue;
            }
            // In order: a large request must not wait for ever.
            let returned = if self.waiting.is_empty() { self.start(request) } else { Some(request) };
            self.waiting.extend(returned);
        }
        self.submit_pushed();
        self.publish();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        self.base.channel.poll_into(sink);
        let mut has_more = self.restore(sink, before);
        let count = sink.len();
        self.external.poll(sink);
        has_more |= self.restore(sink, count);
        // Before it follows to the newest metadata, which has what they are about.
        while let Some(message) = self.messages.receive() {
            self.received.push(message);
        }
        if has_more || !self.is_plain() {
            self.enter();
            let mut completions = std::mem::take(&mut self.completions);
            for completion in completions.drain(..) {
                self.complete(completion);
            }
            if !self.is_plain() {
                self.advance();
            }
            self.completions = completions;
            self.submit_pushed();
            self.publish();
        } else if sink.len() > before {
            self.publish();
        }
        sink.append(&mut self.finished);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        let is_waiting = !self.paused.is_empty() || !self.paused_pieces.is_empty();
        let is_resumed = is_waiting && !self.volume.is_paused();
        if !self.finished.is_empty()
            || !self.messages.is_empty()
            || !self.unsent.is_empty()
            || is_resumed
            || (!self.waiting.is_empty() && self.entries.is_empty() && self.whole.is_empty())
        {
            return Some(0);
        }
        [self.base.channel.deadline(), self.external.deadline()].into_iter().flatten().min()
    }
}

impl Drop for LvolChannel {
    fn drop(&mut self) {
        self.volume.remove_seat(&self.seat);
        if !self.allocations.is_empty() {
            // A full mailbox has woken the owner, and without an owner there are no allocations.
            _ = self.volume.store.send(OwnerMessage::Look);
        }
    }
}
