//! Sends of one turn of a core: their bytes are limited, so that bulk transfers do not delay the small
//! answers of others.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;

use arrayvec::ArrayVec;
use slots::Slot;
use sockets::{ByteStream, FlushStatus, ReceivedDescriptors, RejectedSend, SendPart, TransferResult};

/// Bytes of all connections in a turn: the kernel copies them in well under a millisecond, and a turn costs
/// nothing beside them.
pub(crate) const TURN_BYTES_MAX: usize = 1 << 20;
/// Bytes of a connection that has something new to send, although those of the turn are used up: 16 answers
/// of 4 KiB. A thousand such connections take some tens of milliseconds.
pub(crate) const FAIR_BYTES: usize = 64 << 10;
/// Parts of a send that is cut. A longer one continues in the next turn.
const CUT_PARTS_MAX: usize = 32;

/// What may still be sent in a turn, and which connections have more.
///
/// A connection with something new to send comes before those that had more than their share: first those,
/// each with what is left of the turn, at least [`FAIR_BYTES`]; then the others in turn, of which at least
/// one sends in each turn.
#[derive(Debug, Default)]
pub(crate) struct TurnSends {
    left: usize,
    /// Connections that have more to send than they could, in the order of their sending.
    pub(crate) bulk: VecDeque<Slot>,
}

impl TurnSends {
    pub(crate) fn begin(&mut self) {
        self.left = TURN_BYTES_MAX;
    }

    /// What a connection with something new may send.
    #[inline]
    pub(crate) fn share(&self) -> usize {
        self.left.max(FAIR_BYTES)
    }

    #[inline]
    pub(crate) fn used(&mut self, bytes: usize) {
        self.left = self.left.saturating_sub(bytes);
    }

    pub(crate) fn is_used_up(&self) -> bool {
        self.left == 0
    }
}

/// A stream that sends a limited number of bytes. Beyond them it behaves as one whose peer does not read.
pub(crate) struct LimitedStream<S> {
    stream: S,
    left: usize,
    limit: usize,
    is_cut: bool,
}

impl<S> LimitedStream<S> {
    #[inline]
    pub(crate) fn new(stream: S, limit: usize) -> LimitedStream<S> {
        LimitedStream { stream, left: limit, limit, is_cut: false }
    }

    #[inline]
    pub(crate) fn sent(&self) -> usize {
        self.limit - self.left
    }

    /// The stream would have taken more.
    #[inline]
    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut
    }

    #[inline]
    fn count(&mut self, result: TransferResult) -> TransferResult {
        if let TransferResult::Bytes(count) = result {
            self.left = self.left.saturating_sub(count);
        }
        result
    }
}

impl<S: ByteStream> LimitedStream<S> {
    /// Sends as many of the bytes as may be sent.
    #[cold]
    fn send_cut(&mut self, parts: &[IoSlice<'_>]) -> TransferResult {
        if self.left == 0 {
            self.is_cut = true;
            return TransferResult::Blocked;
        }
        let (mut room, mut cut) = (self.left, ArrayVec::<IoSlice<'_>, CUT_PARTS_MAX>::new());
        for part in parts.iter().take(CUT_PARTS_MAX) {
            let length = part.len().min(room);
            cut.push(IoSlice::new(&part[..length]));
            room -= length;
            if room == 0 {
                break;
            }
        }
        let offered: usize = cut.iter().map(|part| part.len()).sum();
        let result = self.stream.send(&cut);
        self.is_cut = matches!(result, TransferResult::Bytes(sent) if sent == offered);
        self.count(result)
    }
}

impl<S: ByteStream> ByteStream for LimitedStream<S> {
    #[inline]
    fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        self.stream.receive(parts)
    }

    #[inline]
    fn send(&mut self, parts: &[IoSlice<'_>]) -> TransferResult {
        if parts.iter().map(|part| part.len()).sum::<usize>() > self.left {
            return self.send_cut(parts);
        }
        let result = self.stream.send(parts);
        self.count(result)
    }

    #[inline]
    fn receive_with_descriptors(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        descriptors: &mut ReceivedDescriptors,
    ) -> TransferResult {
        self.stream.receive_with_descriptors(parts, descriptors)
    }

    /// Messages with descriptors are short and not divided.
    #[inline]
    fn send_with_descriptors(
        &mut self,
        parts: &[IoSlice<'_>],
        descriptors: &[BorrowedFd<'_>],
    ) -> TransferResult {
        self.stream.send_with_descriptors(parts, descriptors)
    }

    #[inline]
    fn zero_copy_min_bytes(&self) -> Option<usize> {
        self.stream.zero_copy_min_bytes()
    }

    /// Not counted: nothing is copied.
    fn send_owned(&mut self, parts: Vec<SendPart>, tag: u64) -> Result<(), RejectedSend> {
        self.stream.send_owned(parts, tag)
    }

    #[inline]
    fn queue_pair(&mut self) -> Option<&mut dyn sockets::QueuePair> {
        self.stream.queue_pair()
    }

    #[inline]
    fn flush(&mut self) -> FlushStatus {
        self.stream.flush()
    }
}
