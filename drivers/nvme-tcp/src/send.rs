//! From PDUs to bytes.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice};

use arrayvec::ArrayVec;
use net::{ConnectionId, Network, Transfer};
use wire_nvme::digest::crc32c;
use wire_nvme::tcp::Layout;

/// Pieces handed to the network in one call: 128 reads of header and data each. The kernel takes 1,024.
const PARTS_MAX: usize = 256;
/// Sent headers are squeezed out of the queue's memory once so many bytes of them lie at its front.
const SQUEEZE_BYTES: usize = 64 << 10;

/// Whoever owns the data that is sent.
pub trait Segments {
    /// The `length` bytes from `start` of what lies in `slot`.
    fn bytes(&self, slot: u32, start: usize, length: usize) -> &[u8];

    /// The last segment of `slot` that was pushed with `release` has left.
    fn sent(&mut self, slot: u32);
}

/// How a flush ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flushed {
    /// Everything has left.
    Empty,
    /// The peer does not take more now; try again when the connection is ready.
    Blocked,
    /// The connection is broken.
    Failed(ErrorKind),
}

/// What waits to be sent on one connection, in order.
#[derive(Default)]
pub struct Sender {
    /// Headers, digests and padding, back to back.
    small: Vec<u8>,
    small_sent: usize,
    queue: VecDeque<Segment>,
    /// Bytes of the first segment that have left.
    front_sent: usize,
}

enum Segment {
    Small { length: u32 },
    Data { slot: u32, start: u32, length: u32, release: bool },
}

impl Sender {
    /// Queues the start of a PDU: its header, header digest and padding as the layout says.
    #[inline]
    pub fn push_header(&mut self, header: &[u8], layout: &Layout) {
        let before = self.small.len();
        self.small.extend_from_slice(header);
        if layout.header_digest {
            self.small.extend_from_slice(&crc32c(header).to_le_bytes());
        }
        // Only PDUs with data are padded.
        self.small.resize(before + layout.prefix_length(), 0);
        self.count_small(self.small.len() - before);
    }

    /// Queues bytes as they are.
    #[inline]
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        self.small.extend_from_slice(bytes);
        self.count_small(bytes.len());
    }

    /// Queues a part of the data in `slot`, which stays where it is until [`Segments::sent`].
    #[inline]
    pub fn push_data(&mut self, slot: u32, start: u32, length: u32, release: bool) {
        self.queue.push_back(Segment::Data { slot, start, length, release });
    }

    /// Whether nothing waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Bytes of headers that wait, which bounds the queue's own memory.
    pub fn small_bytes(&self) -> usize {
        self.small.len() - self.small_sent
    }

    /// Sends as much as the network takes.
    pub fn flush<N: Network>(
        &mut self,
        network: &mut N,
        connection: ConnectionId,
        segments: &mut impl Segments,
    ) -> Flushed {
        while !self.queue.is_empty() {
            let (result, offered) = {
                let mut parts = ArrayVec::new();
                let offered = self.parts(segments, &mut parts);
                (network.send(connection, &parts), offered)
            };
            match result {
                Transfer::Bytes(count) => {
                    self.advance(count, segments);
                    if count < offered {
                        return Flushed::Blocked;
                    }
                }
                Transfer::Blocked => return Flushed::Blocked,
                Transfer::Closed => return Flushed::Failed(ErrorKind::BrokenPipe),
                Transfer::Failed(kind) => return Flushed::Failed(kind),
            }
        }
        self.small.clear();
        self.small_sent = 0;
        Flushed::Empty
    }

    fn count_small(&mut self, added: usize) {
        if let Some(Segment::Small { length }) = self.queue.back_mut() {
            *length += added as u32;
        } else {
            self.queue.push_back(Segment::Small { length: added as u32 });
        }
    }

    /// Lists what is to be sent next and returns how many bytes that is. The list is the caller's: it
    /// is too large to be handed back.
    fn parts<'a>(
        &'a self,
        segments: &'a impl Segments,
        parts: &mut ArrayVec<IoSlice<'a>, PARTS_MAX>,
    ) -> usize {
        let mut offered = 0;
        let mut small = &self.small[self.small_sent..];
        let mut skip = self.front_sent;
        for segment in self.queue.iter().take(PARTS_MAX) {
            let bytes = match *segment {
                Segment::Small { length } => {
                    // `small_sent` already stands behind what was sent of the first segment.
                    let (bytes, rest) = small.split_at(length as usize - skip);
                    small = rest;
                    bytes
                }
                Segment::Data { slot, start, length, .. } => {
                    segments.bytes(slot, start as usize + skip, length as usize - skip)
                }
            };
            skip = 0;
            offered += bytes.len();
            parts.push(IoSlice::new(bytes));
        }
        offered
    }

    fn advance(&mut self, mut count: usize, segments: &mut impl Segments) {
        while count > 0 {
            let Some(front) = self.queue.front() else {
                unreachable!("the network sent {count} bytes more than it was given")
            };
            let (length, small) = match *front {
                Segment::Small { length } => (length as usize, true),
                Segment::Data { length, .. } => (length as usize, false),
            };
            let step = count.min(length - self.front_sent);
            count -= step;
            self.front_sent += step;
            if small {
                self.small_sent += step;
            }
            if self.front_sent < length {
                break;
            }
            self.front_sent = 0;
            if let Some(Segment::Data { slot, release: true, .. }) = self.queue.pop_front() {
                segments.sent(slot);
            }
        }
        if self.small_sent >= SQUEEZE_BYTES {
            self.small.drain(..self.small_sent);
            self.small_sent = 0;
        }
    }
}
