//! The channel of a volume on one core.

use std::collections::VecDeque;
use std::sync::Arc;

use bdev::stacking::BaseChannel;
use bdev::{BlockDevice, Completion, Request};
use block_io::{Op, Payload, Request as BlockRequest, Status, Tag};
use dma::Data;
use slots::{Slab, Slot};

use crate::volume_map::{PieceSource, ReadPiece, VolumeMap};

/// Clusters of the largest read that the channel gets, so that the pieces of each have a limit.
pub(crate) const READ_CLUSTERS_MAX: u32 = 256;
/// Pieces in flight of reads that were divided; more reads wait. Enough for four of the largest: these have a
/// piece for each cluster, parts of two, and one more where the external snapshot ends.
const PIECES_MAX: u32 = 4 * (READ_CLUSTERS_MAX + 4);

/// Divides reads into pieces for the store's device and the external snapshot.
///
/// A read that is one piece is passed on with another address; its place in the table has what it was. The
/// others have a place for the read, and one for each piece. The tables grow until they are as full as they
/// ever were, and have limits.
pub(crate) struct LvolChannel {
    map: VolumeMap,
    /// Bytes of a block of the volume.
    block_bytes: u64,
    base: OpenSource,
    external: Option<OpenSource>,
    entries: Slab<Entry>,
    /// Reads that wait for places in the table; at most the depth.
    waiting: VecDeque<Request>,
    /// What completed here, until the next poll.
    finished: Vec<Completion>,
    /// Empty between calls.
    completions: Vec<Completion>,
    pieces: Vec<ReadPiece>,
}

/// A device that has data of the volume.
pub(crate) struct OpenSource {
    channel: BaseChannel,
    device: Arc<BlockDevice>,
    block_bytes: u64,
}

impl OpenSource {
    pub(crate) fn new(channel: BaseChannel, device: Arc<BlockDevice>) -> OpenSource {
        let block_bytes = device.geometry().block_size.into();
        OpenSource { channel, device, block_bytes }
    }

    /// The first block and the number of blocks of a piece: a whole number, as the blocks of the device
    /// divide those of the volume.
    fn range(&self, piece: &ReadPiece) -> (u64, u32) {
        // The volume's limit of a read has fewer bytes than 2^32.
        (piece.offset / self.block_bytes, (piece.length / self.block_bytes) as u32)
    }
}

enum Entry {
    /// A read of one piece, as it was submitted.
    Whole { tag: Tag, lba: u64, blocks: u32 },
    /// A read of several.
    Divided(DividedRead),
    /// One of its pieces.
    Piece(PieceOfRead),
}

struct DividedRead {
    /// Without its data, which the pieces have.
    request: Request,
    /// The first error, or success.
    status: Status,
    in_flight: u32,
    /// The first of the pieces, which are a list.
    first: Option<Slot>,
}

struct PieceOfRead {
    read: Slot,
    /// `None` while it is in flight.
    data: Option<Data>,
    next: Option<Slot>,
}

impl LvolChannel {
    /// For a volume with blocks of `block_bytes` and this [depth](bdev::Bdev::depth).
    pub(crate) fn new(
        map: VolumeMap,
        block_bytes: u32,
        depth: u32,
        base: OpenSource,
        external: Option<OpenSource>,
    ) -> LvolChannel {
        LvolChannel {
            map,
            block_bytes: block_bytes.into(),
            base,
            external,
            entries: Slab::with_capacity(depth.saturating_add(PIECES_MAX).min(u32::MAX - 1)),
            waiting: VecDeque::new(),
            finished: Vec::new(),
            completions: Vec::new(),
            pieces: Vec::new(),
        }
    }

    /// Starts a request; returns one for which the table has no places.
    fn start(&mut self, mut request: Request) -> Option<Request> {
        let offset = request.lba.wrapping_mul(self.block_bytes);
        let length = u64::from(request.blocks) * self.block_bytes;
        match request.op {
            Op::Read => {}
            Op::SeekData | Op::SeekHole => {
                let found = self.map.seek(request.op, offset, length);
                request.payload = Payload::Found(found.map(|at| at / self.block_bytes));
                self.finished.push(request.complete(Status::SUCCESS));
                return None;
            }
            _ => {
                self.finished.push(request.complete(Status::INVALID_OPCODE));
                return None;
            }
        }
        let mut pieces = std::mem::take(&mut self.pieces);
        pieces.clear();
        let external_bytes = self.external.as_ref().map_or(0, |source| source.device.geometry().bytes());
        let is_readable = self.map.pieces(offset, length, external_bytes, &mut pieces).is_ok();
        let places = if pieces.len() == 1 { 1 } else { pieces.len() + 1 };
        let returned = if !is_readable {
            self.finished.push(request.complete(Status::INTERNAL_ERROR));
            None
        } else if self.entries.capacity() - self.entries.len() < places {
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
            let status = match request.data_mut() {
                Some(data) => {
                    data.clear();
                    Status::SUCCESS
                }
                None => Status::INVALID_FIELD,
            };
            return self.finished.push(request.complete(status));
        }
        let BlockRequest { tag, lba, blocks, .. } = request;
        let slot = self.insert(Entry::Whole { tag, lba, blocks });
        let Some(source) = self.source(piece.source) else {
            unreachable!("only a volume with an external snapshot has pieces there")
        };
        request.tag = Tag(slot.to_bits());
        (request.lba, request.blocks) = source.range(piece);
        source.channel.push(request);
    }

    fn divide(&mut self, mut request: Request, pieces: &[ReadPiece]) {
        let Payload::Data(_) = request.payload else {
            return self.finished.push(request.complete(Status::INVALID_FIELD));
        };
        let (flow, issued_ticks) = (request.flow, request.issued_ticks);
        let mut rest = request.take_data();
        let read = DividedRead { request, status: Status::SUCCESS, in_flight: 0, first: None };
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
            let slot = self.insert(Entry::Piece(PieceOfRead { read, data: stored, next: None }));
            match last {
                Some(last) => self.piece(last).next = Some(slot),
                None => self.read(read).first = Some(slot),
            }
            last = Some(slot);
            let Some(source) = self.source(piece.source) else { continue };
            let (lba, blocks) = source.range(piece);
            let payload = Payload::from_data(data);
            let mut child = BlockRequest::with_payload(Tag(slot.to_bits()), Op::Read, lba, blocks, payload);
            (child.flow, child.issued_ticks) = (flow, issued_ticks);
            source.channel.push(child);
            self.read(read).in_flight += 1;
        }
        if self.read(read).in_flight == 0 {
            let completion = self.finish(read);
            self.finished.push(completion);
        }
    }

    fn complete(&mut self, completion: Completion, sink: &mut Vec<Completion>) {
        let (slot, status) = (Slot::from_bits(completion.tag().0), completion.status());
        let mut request = completion.into_request();
        match self.entries.get_mut(slot) {
            Some(Entry::Whole { tag, lba, blocks }) => {
                (request.tag, request.lba, request.blocks) = (*tag, *lba, *blocks);
                self.entries.remove(slot);
                sink.push(request.complete(status));
            }
            Some(Entry::Piece(piece)) => {
                piece.data = request.take_data();
                let slot = piece.read;
                let read = self.read(slot);
                read.in_flight -= 1;
                if read.status.is_success() {
                    read.status = status;
                }
                if read.in_flight == 0 {
                    sink.push(self.finish(slot));
                }
            }
            _ => unreachable!("slot {slot:?} was completed by a device and is not in the table"),
        }
    }

    /// The read with the data of its pieces, as one again.
    fn finish(&mut self, slot: Slot) -> Completion {
        let Some(Entry::Divided(DividedRead { mut request, status, first, .. })) = self.entries.remove(slot)
        else {
            unreachable!("slot {slot:?} is a read that was divided")
        };
        let (mut next, mut whole) = (first, None::<Data>);
        while let Some(Entry::Piece(piece)) = next.and_then(|slot| self.entries.remove(slot)) {
            whole = match (whole, piece.data) {
                (Some(whole), Some(data)) => Some(whole.join(data)),
                (one, other) => one.or(other),
            };
            next = piece.next;
        }
        request.set_data(whole);
        request.complete(status)
    }

    fn source(&mut self, source: PieceSource) -> Option<&mut OpenSource> {
        match source {
            PieceSource::Base => Some(&mut self.base),
            PieceSource::External => self.external.as_mut(),
            PieceSource::Zeroes => None,
        }
    }

    fn insert(&mut self, entry: Entry) -> Slot {
        match self.entries.insert(entry) {
            Ok(slot) => slot,
            Err(_) => unreachable!("places were counted before"),
        }
    }

    fn read(&mut self, slot: Slot) -> &mut DividedRead {
        match self.entries.get_mut(slot) {
            Some(Entry::Divided(read)) => read,
            _ => unreachable!("slot {slot:?} is a read that was divided"),
        }
    }

    fn piece(&mut self, slot: Slot) -> &mut PieceOfRead {
        match self.entries.get_mut(slot) {
            Some(Entry::Piece(piece)) => piece,
            _ => unreachable!("slot {slot:?} is a piece of a read"),
        }
    }

    fn submit_pushed(&mut self) {
        self.base.channel.submit();
        if let Some(external) = &mut self.external {
            external.channel.submit();
        }
    }
}

impl block_io::Channel for LvolChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for request in batch.drain(..) {
            // In order: a large read must not wait for ever.
            let returned = if self.waiting.is_empty() { self.start(request) } else { Some(request) };
            self.waiting.extend(returned);
        }
        self.submit_pushed();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let mut completions = std::mem::take(&mut self.completions);
        completions.extend(self.base.channel.poll());
        if let Some(external) = &mut self.external {
            completions.extend(external.channel.poll());
        }
        for completion in completions.drain(..) {
            self.complete(completion, sink);
        }
        self.completions = completions;
        if !self.waiting.is_empty() {
            while let Some(request) = self.waiting.pop_front() {
                if let Some(returned) = self.start(request) {
                    self.waiting.push_front(returned);
                    break;
                }
            }
            self.submit_pushed();
        }
        sink.append(&mut self.finished);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.finished.is_empty() || (!self.waiting.is_empty() && self.entries.is_empty()) {
            return Some(0);
        }
        let external = self.external.as_ref().and_then(|external| external.channel.deadline());
        [self.base.channel.deadline(), external].into_iter().flatten().min()
    }
}
