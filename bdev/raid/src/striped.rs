//! The channel of raid0 and concat.

use std::sync::Arc;

use bdev::stacking::{BaseChannels, FanOut, FanOutResult, PLACES_MAX, Piece};
use bdev::{Completion, Request};
use block_io::{Channel, Op, Status};

use crate::layout::StripeLayout;

/// Most pieces of a request with data, which the layer keeps to by its length.
pub(crate) const PIECES_MAX: usize = PLACES_MAX;

/// Divides requests by the layout. One that is within a strip is passed on; others are pieces that are in
/// flight together.
pub(crate) struct StripedChannel {
    layout: Arc<StripeLayout>,
    channels: BaseChannels,
    fan_out: FanOut,
    /// Of requests that cannot be divided.
    finished: Vec<Completion>,
    /// Empty between calls.
    completions: Vec<Completion>,
    pieces: Vec<Piece>,
}

impl StripedChannel {
    /// With a table for this depth.
    pub(crate) fn new(layout: Arc<StripeLayout>, channels: BaseChannels, depth: u32) -> StripedChannel {
        StripedChannel {
            layout,
            channels,
            fan_out: FanOut::new(depth, PIECES_MAX),
            finished: Vec::new(),
            completions: Vec::new(),
            pieces: Vec::with_capacity(PIECES_MAX),
        }
    }

    #[inline]
    fn start(&mut self, request: Request) {
        if !request.op.has_range() {
            return self.start_everywhere(request);
        }
        let blocks = u64::from(request.blocks);
        let piece = self.layout.piece(request.lba, blocks);
        if piece.blocks == blocks {
            return self.fan_out.pass(request, piece.place, piece.lba, &mut self.channels);
        }
        self.divide(request);
    }

    /// A flush.
    fn start_everywhere(&mut self, request: Request) {
        match self.channels.present() {
            0 => self.finished.push(request.complete(Status::INTERNAL_PATH_ERROR)),
            places => self.fan_out.copy_to(request, places, &mut self.channels),
        }
    }

    /// Polls the members, and gives the requests that were passed to them their blocks of the array again.
    #[inline]
    fn poll_members(&mut self, sink: &mut Vec<Completion>) {
        let (layout, fan_out) = (&*self.layout, &self.fan_out);
        self.channels.poll_places(sink, |place, completions| {
            for completion in completions {
                if !fan_out.is_child(completion.tag()) {
                    let request = completion.request_mut();
                    request.lba = layout.array_lba(place, request.lba);
                }
            }
        });
    }

    /// As [`poll_members`](Self::poll_members), with pieces in flight.
    #[cold]
    fn poll_pieces(&mut self, sink: &mut Vec<Completion>) {
        let mut completions = std::mem::take(&mut self.completions);
        self.poll_members(&mut completions);
        for completion in completions.drain(..) {
            if self.fan_out.is_child(completion.tag()) {
                let result = self.fan_out.complete(completion, &mut self.channels);
                sink.extend(result.map(FanOutResult::complete));
            } else {
                sink.push(completion);
            }
        }
        self.completions = completions;
    }

    #[cold]
    fn divide(&mut self, request: Request) {
        let (lba, blocks) = (request.lba, u64::from(request.blocks));
        let to_piece = |piece: crate::StripePiece| Piece {
            place: piece.place,
            lba: piece.lba,
            blocks: piece.blocks as u32,
        };
        self.pieces.clear();
        if matches!(request.op, Op::Read | Op::Write) {
            let mut done = 0;
            while done < blocks && self.pieces.len() < PIECES_MAX {
                let piece = self.layout.piece(lba + done, blocks - done);
                done += piece.blocks;
                self.pieces.push(to_piece(piece));
            }
            if done < blocks {
                // The layer divides what has more.
                return self.finished.push(request.complete(Status::INVALID_FIELD.do_not_retry()));
            }
        } else {
            self.pieces.extend(self.layout.pieces_by_member(lba, blocks).map(to_piece));
        }
        if let Err(request) = self.fan_out.divide(request, &self.pieces, &mut self.channels) {
            self.finished.push(request.complete(Status::INVALID_FIELD.do_not_retry()));
        }
    }
}

impl Channel for StripedChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        self.channels.sync();
        for request in batch.drain(..) {
            self.start(request);
        }
        self.channels.submit();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        sink.append(&mut self.finished);
        if self.fan_out.is_empty() {
            self.poll_members(sink);
        } else {
            self.poll_pieces(sink);
        }
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.finished.is_empty() {
            return Some(0);
        }
        self.channels.deadline()
    }
}
