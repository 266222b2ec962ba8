//! Writes and other requests that change a volume.
//!
//! A piece in a cluster that the volume has goes to the store's device. The first write to another cluster:
//! the channel asks the owner ([`OwnerMessage::Allocate`]), which fills the rest of a new cluster, and says
//! where it is ([`ChannelMessage::Write`]); the data is written there; the owner writes the cluster map, and
//! says so ([`ChannelMessage::Done`]). Other pieces in the same cluster wait, and then are looked up again.

use bdev::Request;
use block_io::{Op, Payload, Request as BlockRequest, RequestFlags, Status, Tag};
use slots::Slot;

use super::{
    ALLOCATIONS_MAX, Allocation, CLUSTERS_MAX, DividedRequest, Entry, LvolChannel, PieceOfRequest, status_of,
};
use crate::owner::OwnerMessage;
use crate::shared::ChannelMessage;
use crate::volume_map::{ChangeKind, ChangePiece};

/// Pieces of a range without data that are in progress; the rest of the range follows.
const RANGE_PIECES_MAX: usize = CLUSTERS_MAX as usize;
/// Bytes of a range without data that are in progress: a device gets whole blocks, counted in 32 bits.
const RANGE_BYTES_MAX: u64 = 1 << 30;

/// How an operation changes its range.
fn kind_of(request: &Request) -> ChangeKind {
    match request.op {
        Op::WriteZeroes if request.flags.contains(RequestFlags::ALLOCATE) => ChangeKind::Data,
        Op::WriteZeroes if request.flags.contains(RequestFlags::DEALLOCATE) => ChangeKind::Deallocate,
        Op::WriteZeroes => ChangeKind::Zeroes,
        Op::Unmap => ChangeKind::Deallocate,
        _ => ChangeKind::Data,
    }
}

impl LvolChannel {
    /// Starts a request that changes a range; returns one for which the table has no places.
    pub(super) fn start_change(&mut self, request: Request, offset: u64, length: u64) -> Option<Request> {
        if request.op == Op::Write && !matches!(request.payload, Payload::Data(_)) {
            self.finished.push(request.complete(Status::INVALID_FIELD));
            return None;
        }
        let mut pieces = std::mem::take(&mut self.change_pieces);
        pieces.clear();
        let has_data = request.op == Op::Write;
        // A write has at most as many pieces as clusters, and one.
        let max = if has_data { usize::MAX } else { RANGE_PIECES_MAX };
        let covered = if has_data { length } else { length.min(RANGE_BYTES_MAX) };
        let kind = kind_of(&request);
        let found = self.map().change_pieces(kind, offset, covered, max, &mut pieces);
        let returned = match found {
            Err(why) => {
                self.finished.push(request.complete(status_of(why)));
                None
            }
            Ok(_) if self.free_places() <= pieces.len() || self.whole.is_full() => Some(request),
            Ok(bytes) => {
                match pieces[..] {
                    [ChangePiece::Device { offset: at, .. }] if bytes == length => {
                        self.pass_change_on(request, at, length);
                    }
                    _ => self.divide_change(request, offset, length, &pieces),
                }
                None
            }
        };
        self.change_pieces = pieces;
        returned
    }

    /// Passes a request on that is in one place of the store's device.
    fn pass_change_on(&mut self, mut request: Request, at: u64, length: u64) {
        self.insert_whole(&mut request);
        (request.lba, request.blocks) = self.base.range(at, length);
        self.writes_in_flight += 1;
        self.base.channel.push(request);
    }

    fn divide_change(&mut self, mut request: Request, offset: u64, length: u64, pieces: &[ChangePiece]) {
        let mut rest_of_data = request.take_data();
        let divided =
            DividedRequest { request, status: Status::SUCCESS, pending: 1, first: None, rest: None };
        let parent = self.insert(Entry::Divided(divided));
        let mut data_of = |length: u64| {
            let mut data = rest_of_data.take();
            if let Some(data) = &mut data
                && length < data.len() as u64
            {
                rest_of_data = Some(data.split_off(length as usize));
            }
            data
        };
        let (mut at, mut last) = (offset, None::<Slot>);
        for piece in pieces {
            let slot = self.insert(Entry::Piece(PieceOfRequest {
                parent,
                data: data_of(piece.length()),
                next: None,
                offset: at,
                length: piece.length(),
                epoch: None,
                fills_cluster: false,
                change: None,
            }));
            self.link(parent, last.replace(slot), slot);
            at += piece.length();
        }
        let end = offset + length;
        let divided = self.divided(parent);
        divided.rest = (at < end).then_some((at, end - at));
        divided.pending += pieces.len() as u32;
        let mut next = divided.first;
        for piece in pieces {
            let Some(slot) = next else { unreachable!("each piece is in the list") };
            next = self.piece(slot).next;
            self.start_piece(slot, piece);
        }
        // It was counted as pending while its pieces were started.
        self.piece_ended(parent, Status::SUCCESS);
    }

    /// Begins the next pieces of a range without data.
    pub(super) fn continue_range(&mut self, parent: Slot, offset: u64, length: u64) {
        self.divided(parent).pending = 1;
        let slot = self.insert(Entry::Piece(PieceOfRequest {
            parent,
            data: None,
            next: None,
            offset,
            length,
            epoch: None,
            fills_cluster: false,
            change: None,
        }));
        self.divided(parent).first = Some(slot);
        self.look_up(slot);
    }

    /// Begins a piece by the present metadata: as much of it as is in one place; the rest follows.
    fn look_up(&mut self, slot: Slot) {
        if self.is_paused {
            return self.paused_pieces.push_back(slot);
        }
        let PieceOfRequest { parent, offset, length, .. } = *self.piece(slot);
        let kind = kind_of(&self.divided(parent).request);
        let mut pieces = Vec::new();
        let found = self.map().change_pieces(kind, offset, length.min(RANGE_BYTES_MAX), 1, &mut pieces);
        match (found, pieces.first()) {
            (Ok(bytes), Some(piece)) if bytes == length => self.start_piece(slot, piece),
            (Ok(bytes), Some(piece)) => {
                // Only of a range without data: a piece of data is within a cluster.
                self.piece(slot).length = bytes;
                self.divided(parent).rest = Some((offset + bytes, length - bytes));
                self.start_piece(slot, piece);
            }
            (Ok(_), None) => self.piece_ended(parent, Status::SUCCESS),
            (Err(why), _) => self.piece_ended(parent, status_of(why)),
        }
    }

    fn start_piece(&mut self, slot: Slot, piece: &ChangePiece) {
        match *piece {
            ChangePiece::Nothing { .. } => {
                let parent = self.piece(slot).parent;
                self.piece_ended(parent, Status::SUCCESS);
            }
            ChangePiece::Device { offset, .. } => self.push_piece(slot, offset),
            ChangePiece::Allocate { index, .. } => self.ask_owner(slot, index, false),
            ChangePiece::Release { index, .. } => self.ask_owner(slot, index, true),
        }
    }

    /// Sends a piece to an offset of the store's device.
    fn push_piece(&mut self, slot: Slot, at: u64) {
        let epoch = self.in_use.begin();
        let piece = self.piece(slot);
        piece.epoch = Some(epoch);
        let (parent, data, length) = (piece.parent, piece.data.take(), piece.length);
        let (lba, blocks) = self.base.range(at, length);
        let request = &self.divided(parent).request;
        let mut child = BlockRequest::with_payload(
            Tag(slot.to_bits()),
            request.op,
            lba,
            blocks,
            Payload::from_data(data),
        );
        let passed = RequestFlags::FUA | RequestFlags::DEALLOCATE | RequestFlags::ALLOCATE;
        (child.flow, child.issued_ticks, child.flags) =
            (request.flow, request.issued_ticks, request.flags & passed);
        self.writes_in_flight += 1;
        self.base.channel.push(child);
    }

    fn ask_owner(&mut self, slot: Slot, index: u32, releases: bool) {
        if let Some(allocation) = self.allocations.get_mut(&index) {
            return allocation.waiters.push(slot);
        }
        if self.allocations.len() == ALLOCATIONS_MAX {
            return self.deferred.push_back(slot);
        }
        self.allocations.insert(index, Allocation { first: slot, waiters: Vec::new() });
        let cluster_bytes = u64::from(self.in_use.published.layout().cluster_bytes);
        let PieceOfRequest { offset, length, .. } = *self.piece(slot);
        // Within a cluster, which has fewer bytes than 2^32.
        let start = (offset % cluster_bytes) as u32;
        let (seat, blob) = (self.seat.clone(), self.volume.blob);
        self.send(match releases {
            true => OwnerMessage::Release { seat, blob, index },
            false => OwnerMessage::Allocate { seat, blob, index, written: start..start + length as u32 },
        });
    }

    /// Sends a message to the owner, or keeps it until its mailbox has space.
    fn send(&mut self, message: OwnerMessage) {
        if !self.unsent.is_empty() {
            return self.unsent.push_back(message);
        }
        match self.volume.store.send(message) {
            Ok(true) => {}
            Ok(false) => self.fail_allocations(),
            Err(message) => self.unsent.push_back(message),
        }
    }

    /// There is no owner any more: what waits for it fails.
    fn fail_allocations(&mut self) {
        self.unsent.clear();
        for slot in std::mem::take(&mut self.deferred) {
            let parent = self.piece(slot).parent;
            self.piece_ended(parent, Status::INTERNAL_ERROR);
        }
        for (_, Allocation { first, waiters }) in std::mem::take(&mut self.allocations) {
            for slot in std::iter::once(first).chain(waiters) {
                // Data in flight to a new cluster completes by itself.
                if let Some(Entry::Piece(piece)) = self.entries.get_mut(slot)
                    && piece.epoch.is_none()
                {
                    let parent = piece.parent;
                    self.piece_ended(parent, Status::INTERNAL_ERROR);
                }
            }
        }
    }

    /// The data of a first write is on the device, or not.
    pub(super) fn cluster_filled(&mut self, slot: Slot, status: Status) {
        let piece = self.piece(slot);
        piece.fills_cluster = false;
        let (parent, change) = (piece.parent, piece.change.take());
        let known = self.allocations.values().any(|allocation| allocation.first == slot);
        let (true, Some(change)) = (known, change) else {
            return self.piece_ended(parent, Status::INTERNAL_ERROR);
        };
        if !status.is_success() {
            let divided = self.divided(parent);
            divided.status = if divided.status.is_success() { status } else { divided.status };
        }
        self.send(OwnerMessage::Written { change, is_written: status.is_success() });
    }

    fn take_message(&mut self, message: ChannelMessage) {
        match message {
            ChannelMessage::Write { index, change, offset } => {
                let Some(allocation) = self.allocations.get(&index) else { return };
                let slot = allocation.first;
                let cluster_bytes = u64::from(self.in_use.published.layout().cluster_bytes);
                let piece = self.piece(slot);
                (piece.fills_cluster, piece.change) = (true, Some(change));
                let at = offset + piece.offset % cluster_bytes;
                self.push_piece(slot, at);
            }
            ChannelMessage::Done { index, result } => {
                let Some(Allocation { first, waiters }) = self.allocations.remove(&index) else { return };
                match result {
                    Ok(is_written) => {
                        let parent = self.piece(first).parent;
                        match is_written {
                            true => self.piece_ended(parent, Status::SUCCESS),
                            // Another channel was first.
                            false => self.look_up(first),
                        }
                        waiters.into_iter().for_each(|slot| self.look_up(slot));
                    }
                    Err(status) => {
                        for slot in std::iter::once(first).chain(waiters) {
                            let parent = self.piece(slot).parent;
                            self.piece_ended(parent, status);
                        }
                    }
                }
                while self.allocations.len() < ALLOCATIONS_MAX
                    && let Some(slot) = self.deferred.pop_front()
                {
                    self.look_up(slot);
                }
            }
        }
    }

    /// Whether nothing waits but for completions of devices.
    #[inline]
    pub(super) fn is_plain(&self) -> bool {
        self.received.is_empty()
            && self.waiting.is_empty()
            && self.paused.is_empty()
            && self.paused_pieces.is_empty()
            && self.unsent.is_empty()
    }

    /// Continues what has waited, as far as it can.
    pub(super) fn advance(&mut self) {
        let mut received = std::mem::take(&mut self.received);
        received.drain(..).for_each(|message| self.take_message(message));
        self.received = received;
        while let Some(message) = self.unsent.pop_front() {
            match self.volume.store.send(message) {
                Ok(true) => {}
                Ok(false) => self.fail_allocations(),
                Err(message) => {
                    self.unsent.push_front(message);
                    break;
                }
            }
        }
        if !self.is_paused {
            for slot in std::mem::take(&mut self.paused_pieces) {
                self.look_up(slot);
            }
            let paused = std::mem::take(&mut self.paused);
            for request in paused.into_iter().rev() {
                self.waiting.push_front(request);
            }
        }
        while let Some(request) = self.waiting.pop_front() {
            if self.is_paused && request.op.is_write() {
                self.paused.push_back(request);
            } else if let Some(returned) = self.start(request) {
                self.waiting.push_front(returned);
                break;
            }
        }
    }

    /// A flush makes what completed before durable: data, and cluster maps, which are written before the
    /// writes complete that need them.
    pub(super) fn start_flush(&mut self, mut request: Request) -> Option<Request> {
        if self.free_places() == 0 {
            return Some(request);
        }
        let BlockRequest { tag, lba, blocks, .. } = request;
        let maps = self.volume.store.maps_written();
        let slot = self.insert(Entry::Flush { tag, lba, blocks, maps });
        request.tag = Tag(slot.to_bits());
        self.base.channel.push(request);
        None
    }

    /// A write with FUA is on the device; cluster maps that it may need are not durable yet.
    pub(super) fn flush_maps(&mut self, request: Request) {
        let maps = self.volume.store.maps_written();
        let (flow, issued_ticks) = (request.flow, request.issued_ticks);
        // The places of the request itself are free.
        let slot = self.insert(Entry::Durable { request, maps });
        let mut flush = BlockRequest::new(Tag(slot.to_bits()), Op::Flush, 0, 0);
        (flush.flow, flush.issued_ticks) = (flow, issued_ticks);
        self.base.channel.push(flush);
    }

    pub(super) fn flushed(&mut self, slot: Slot, mut flush: Request, status: Status) {
        let (maps, request) = match self.entries.remove(slot) {
            Some(Entry::Flush { tag, lba, blocks, maps }) => {
                (flush.tag, flush.lba, flush.blocks) = (tag, lba, blocks);
                (maps, flush)
            }
            Some(Entry::Durable { request, maps }) => (maps, request),
            _ => unreachable!("slot {slot:?} is a flush"),
        };
        if status.is_success() {
            self.volume.store.maps_flushed(maps);
        }
        self.finished.push(request.complete(status));
    }
}
