//! Ranges that are set to zero a piece a poll, so that no poll takes long.

use std::collections::VecDeque;

use crate::Request;

/// Bytes of a piece: about a tenth of a millisecond of processor time.
pub(super) const PIECE_BYTES: u64 = 1 << 20;

/// Requests that zero a range, oldest first.
#[derive(Default)]
pub(super) struct ZeroingQueue(VecDeque<Zeroing>);

struct Zeroing {
    request: Request,
    offset: u64,
    left: u64,
}

impl ZeroingQueue {
    pub(super) fn push(&mut self, request: Request, offset: u64, bytes: u64) {
        self.0.push_back(Zeroing { request, offset, left: bytes });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Calls `zero` for the offset and bytes of the next piece. Returns the request that it was the last one of.
    #[cold]
    pub(super) fn zero_next_piece(&mut self, zero: impl FnOnce(u64, u64)) -> Option<Request> {
        let first = self.0.front_mut()?;
        let piece = first.left.min(PIECE_BYTES);
        zero(first.offset, piece);
        first.offset += piece;
        first.left -= piece;
        if first.left > 0 {
            return None;
        }
        self.0.pop_front().map(|first| first.request)
    }
}
