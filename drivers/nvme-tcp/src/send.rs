//! The send queue of a connection.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice};

use arrayvec::ArrayVec;
use sockets::{ByteStream, FlushStatus, TransferResult};
use wire_nvme::digest::crc32c;
use wire_nvme::tcp::PduLayout;

/// Most segments in one call to the network: header and data of 128 reads. The kernel accepts 1,024
/// (UIO_MAXIOV).
const PARTS_MAX: usize = 256;
/// Bytes of sent headers after which the header buffer is compacted.
const COMPACT_BYTES: usize = 64 << 10;

/// The owner of the data to send.
pub trait SegmentSource {
    /// `length` bytes from `start` of the data in `slot`.
    fn bytes(&self, slot: u32, start: usize, length: usize) -> &[u8];

    /// A segment of `slot` that was pushed with `release` was sent; its data is no longer used.
    fn sent(&mut self, slot: u32);
}

/// The send queue of one connection: headers, which it copies, and references to data in slots of a
/// [`SegmentSource`].
///
/// Push a PDU with [`push_header`](Self::push_header), then [`push_data`](Self::push_data) for its data and
/// [`push_bytes`](Self::push_bytes) for a data digest; [`flush`](Self::flush) sends as many segments as
/// possible in each vectored call. Data is not copied and must stay in its slot until
/// [`SegmentSource::sent`].
#[derive(Debug, Default)]
pub struct PduSender {
    /// Headers, digests and padding, back to back.
    headers: Vec<u8>,
    headers_sent: usize,
    queue: VecDeque<Segment>,
    /// Bytes of the first segment that were sent.
    front_sent: usize,
}

/// Where a [`PduSender`] stands in what it has to send. While nothing is sent, it changes only by what is pushed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendPosition {
    /// Segments that are not sent to their end.
    pub unsent_segments: usize,
    /// Bytes of headers that are not sent.
    pub unsent_header_bytes: usize,
    /// Bytes of the first segment that were sent.
    pub front_sent: usize,
}

#[derive(Debug)]
enum Segment {
    Headers { length: u32 },
    Data { slot: u32, start: u32, length: u32, release: bool },
}

impl PduSender {
    /// Queues the part of a PDU before its data: header, header digest and padding according to the layout.
    #[inline]
    pub fn push_header(&mut self, header: &[u8], layout: &PduLayout) {
        let before = self.headers.len();
        self.headers.extend_from_slice(header);
        if layout.header_digest {
            self.headers.extend_from_slice(&crc32c(header).to_le_bytes());
        }
        // Padding: only PDUs with data have any.
        let length = layout.prefix_length();
        if self.headers.len() < before + length {
            self.headers.resize(before + length, 0);
        }
        self.queue_headers(length);
    }

    /// Queues a copy of bytes, such as a data digest.
    #[inline]
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        self.headers.extend_from_slice(bytes);
        self.queue_headers(bytes.len());
    }

    /// Queues a part of the data in `slot`. With `release`, [`SegmentSource::sent`] is called after it was
    /// sent.
    #[inline]
    pub fn push_data(&mut self, slot: u32, start: u32, length: u32, release: bool) {
        self.queue.push_back(Segment::Data { slot, start, length, release });
    }

    /// Whether the queue is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Bytes of queued headers, digests and padding; bounds the memory of the queue.
    pub fn header_bytes(&self) -> usize {
        self.headers.len() - self.headers_sent
    }

    /// Where sending stands; `None` if everything is sent.
    pub fn position(&self) -> Option<SendPosition> {
        let position = || SendPosition {
            unsent_segments: self.queue.len(),
            unsent_header_bytes: self.header_bytes(),
            front_sent: self.front_sent,
        };
        (!self.is_empty()).then(position)
    }

    /// Sends as much as the stream accepts.
    pub fn flush(&mut self, stream: &mut impl ByteStream, segments: &mut impl SegmentSource) -> FlushStatus {
        while !self.queue.is_empty() {
            let (result, offered) = {
                let mut parts = ArrayVec::new();
                let offered = self.parts(segments, &mut parts);
                (stream.send(&parts), offered)
            };
            match result {
                TransferResult::Bytes(count) => {
                    self.advance(count, segments);
                    if count < offered {
                        return FlushStatus::Blocked;
                    }
                }
                TransferResult::Blocked => return FlushStatus::Blocked,
                TransferResult::Closed => return FlushStatus::Failed(ErrorKind::BrokenPipe),
                TransferResult::Failed(kind) => return FlushStatus::Failed(kind),
            }
        }
        self.headers.clear();
        self.headers_sent = 0;
        stream.flush()
    }

    fn queue_headers(&mut self, added: usize) {
        if let Some(Segment::Headers { length }) = self.queue.back_mut() {
            *length += added as u32;
        } else {
            self.queue.push_back(Segment::Headers { length: added as u32 });
        }
    }

    /// Collects the next segments to send into `parts` and returns their length in bytes. The caller provides
    /// the list because it is too large to return.
    fn parts<'a>(
        &'a self,
        segments: &'a impl SegmentSource,
        parts: &mut ArrayVec<IoSlice<'a>, PARTS_MAX>,
    ) -> usize {
        let mut offered = 0;
        let mut headers = &self.headers[self.headers_sent..];
        let mut skip = self.front_sent;
        for segment in self.queue.iter().take(PARTS_MAX) {
            let bytes = match *segment {
                Segment::Headers { length } => {
                    // `headers_sent` already includes the sent bytes of the first segment.
                    let (bytes, rest) = headers.split_at(length as usize - skip);
                    headers = rest;
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

    fn advance(&mut self, mut count: usize, segments: &mut impl SegmentSource) {
        while let Some(front) = self.queue.front() {
            let (length, is_header, released) = match *front {
                Segment::Headers { length } => (length as usize, true, None),
                Segment::Data { slot, length, release, .. } => {
                    (length as usize, false, release.then_some(slot))
                }
            };
            let left = length - self.front_sent;
            let step = count.min(left);
            if is_header {
                self.headers_sent += step;
            }
            if step < left {
                self.front_sent += step;
                count = 0;
                break;
            }
            count -= left;
            self.front_sent = 0;
            self.queue.pop_front();
            if let Some(slot) = released {
                segments.sent(slot);
            }
        }
        assert!(count == 0, "the stream sent {count} bytes more than it was passed");
        if self.headers_sent >= COMPACT_BYTES {
            self.headers.drain(..self.headers_sent);
            self.headers_sent = 0;
        }
    }
}
