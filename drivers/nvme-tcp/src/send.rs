//! The send queue of a connection.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice};

use arrayvec::ArrayVec;
use sockets::{ByteStream, FlushStatus, SendPart, TransferResult};
use wire_nvme::digest::crc32c;
use wire_nvme::tcp::PduLayout;

/// Most segments in one call to the network: header and data of 128 reads. The kernel accepts 1,024
/// (UIO_MAXIOV).
const PARTS_MAX: usize = 256;
/// Bytes of sent headers after which the header buffer is compacted.
const COMPACT_BYTES: usize = 64 << 10;

/// Owned sends of a connection that have not ended: less than what a network accepts for one.
const OWNED_SENDS_MAX: usize = 16;

/// The owner of the data to send.
pub trait SegmentSource {
    /// `length` bytes from `start` of the data in `slot`.
    fn bytes(&self, slot: u32, start: usize, length: usize) -> &[u8];

    /// These bytes for an owned send: by default a copy. Shared memory must not be written until
    /// [`sent`](Self::sent).
    fn share(&mut self, slot: u32, start: usize, length: usize) -> SendPart {
        SendPart::Bytes(self.bytes(slot, start, length).to_vec())
    }

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
///
/// After [`enable_owned_sends`](Self::enable_owned_sends), where the stream sends without a copy and there is
/// enough to send, [`flush`](Self::flush) makes it an owned send, which shares the data. Its end is passed to
/// [`owned_sent`](Self::owned_sent); until then what is pushed follows as owned sends too.
#[derive(Debug, Default)]
pub struct PduSender {
    /// Headers, digests and padding, back to back.
    headers: Vec<u8>,
    /// Bytes of them whose segments were sent.
    headers_sent: usize,
    queue: VecDeque<Segment>,
    /// Bytes of the first segment that were sent.
    front_sent: usize,
    /// The owner of the queue passes on the ends of owned sends.
    makes_owned: bool,
    /// `None` before the first, so that nothing else is looked at where there is none.
    owned: Option<Box<OwnedSends>>,
}

/// Owned sends that have not ended.
#[derive(Debug, Default)]
struct OwnedSends {
    /// The data of each, by tag.
    by_tag: [Option<Vec<OwnedSegment>>; OWNED_SENDS_MAX],
    count: usize,
    /// See [`PduSender::abandon`].
    abandoned: bool,
}

#[derive(Clone, Copy, Debug)]
struct OwnedSegment {
    slot: u32,
    release: bool,
}

/// Where a [`PduSender`] stands in what it has to send. While nothing is sent, it changes only by what is
/// pushed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendPosition {
    /// Segments that are not sent to their end.
    pub unsent_segments: usize,
    /// Bytes of headers in these segments.
    pub unsent_header_bytes: usize,
    /// Bytes of the first segment that were sent.
    pub front_sent: usize,
    /// Owned sends that have not ended.
    pub owned_sends: usize,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    kind: SegmentKind,
    /// In bytes.
    length: u32,
    /// Of data: its slot, and where it begins there.
    slot: u32,
    start: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SegmentKind {
    /// The next of the headers.
    Headers,
    Data,
    /// Data whose slot is released when it was sent.
    LastData,
}

impl Segment {
    const fn headers(length: usize) -> Segment {
        Segment { kind: SegmentKind::Headers, length: length as u32, slot: 0, start: 0 }
    }
}

impl PduSender {
    /// Makes owned sends from now on.
    pub fn enable_owned_sends(&mut self) {
        self.makes_owned = true;
    }

    /// Owned sends that have not ended.
    #[inline]
    pub fn owned_sends(&self) -> usize {
        self.owned.as_ref().map_or(0, |owned| owned.count)
    }

    /// Queues the part of a PDU before its data: header, header digest and padding according to the layout.
    #[inline(always)]
    pub fn push_header<const N: usize>(&mut self, header: &[u8; N], layout: &PduLayout) {
        self.headers.extend_from_slice(header);
        let length = layout.prefix_length();
        if length > N {
            self.push_after_header(header, layout);
        }
        self.queue_headers(length);
    }

    /// The header digest, and the padding, which only PDUs with data have.
    #[inline(never)]
    fn push_after_header(&mut self, header: &[u8], layout: &PduLayout) {
        let end = self.headers.len() - header.len() + layout.prefix_length();
        if layout.header_digest {
            self.headers.extend_from_slice(&crc32c(header).to_le_bytes());
        }
        self.headers.resize(end, 0);
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
        let kind = if release { SegmentKind::LastData } else { SegmentKind::Data };
        self.queue.push_back(Segment { kind, length, slot, start });
    }

    /// Whether everything is sent.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.owned_sends() == 0
    }

    /// Bytes of queued headers, digests and padding, until their segment is sent; bounds the memory of the
    /// queue.
    pub fn header_bytes(&self) -> usize {
        self.headers.len() - self.headers_sent
    }

    /// Where sending stands; `None` if everything is sent.
    pub fn position(&self) -> Option<SendPosition> {
        let position = || SendPosition {
            unsent_segments: self.queue.len(),
            unsent_header_bytes: self.header_bytes(),
            front_sent: self.front_sent,
            owned_sends: self.owned_sends(),
        };
        (!self.is_empty()).then(position)
    }

    /// Sends as much as the stream accepts.
    pub fn flush(&mut self, stream: &mut impl ByteStream, segments: &mut impl SegmentSource) -> FlushStatus {
        if self.makes_owned && self.prefers_owned(stream) {
            return self.flush_owned(stream, segments);
        }
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

    /// Whether to make owned sends: enough is queued for one, or must not overtake one.
    #[inline]
    fn prefers_owned(&self, stream: &impl ByteStream) -> bool {
        let has_bytes = |min: usize| {
            let mut bytes = 0;
            self.queue.iter().any(|segment| {
                bytes += segment.length as usize;
                bytes >= min
            })
        };
        self.owned_sends() > 0 || stream.zero_copy_min_bytes().is_some_and(has_bytes)
    }

    /// Sends everything as owned sends, as many as there may be.
    #[cold]
    fn flush_owned(
        &mut self,
        stream: &mut impl ByteStream,
        segments: &mut impl SegmentSource,
    ) -> FlushStatus {
        while !self.queue.is_empty() {
            let owned = self.owned.get_or_insert_default();
            let free = owned.by_tag.iter().position(Option::is_none);
            let Some(tag) = free else { return FlushStatus::Blocked };
            let (parts, taken) = self.take_parts(segments);
            if let Some(owned) = &mut self.owned {
                owned.by_tag[tag] = Some(taken);
                owned.count += 1;
            }
            if let Err(rejected) = stream.send_owned(parts, tag as u64) {
                // It has no end, but the connection has one.
                self.owned_sent(tag as u64, segments);
                return FlushStatus::Failed(rejected.reason);
            }
        }
        self.headers.clear();
        self.headers_sent = 0;
        FlushStatus::Empty
    }

    /// Takes the next segments out of the queue, as the parts of an owned send.
    fn take_parts(&mut self, segments: &mut impl SegmentSource) -> (Vec<SendPart>, Vec<OwnedSegment>) {
        let (mut parts, mut taken) = (Vec::new(), Vec::new());
        let count = self.queue.len().min(PARTS_MAX);
        for segment in self.queue.drain(..count) {
            let skip = std::mem::take(&mut self.front_sent);
            let length = segment.length as usize;
            if segment.kind == SegmentKind::Headers {
                let bytes = &self.headers[self.headers_sent..][skip..length];
                parts.push(SendPart::Bytes(bytes.to_vec()));
                self.headers_sent += length;
            } else {
                parts.push(segments.share(segment.slot, segment.start as usize + skip, length - skip));
                let release = segment.kind == SegmentKind::LastData;
                taken.push(OwnedSegment { slot: segment.slot, release });
            }
        }
        self.compact();
        (parts, taken)
    }

    /// The owned send with this tag has ended. [`flush`](Self::flush) may send more now.
    pub fn owned_sent(&mut self, tag: u64, segments: &mut impl SegmentSource) {
        let Some(owned) = &mut self.owned else { return };
        let entry = usize::try_from(tag).ok().and_then(|tag| owned.by_tag.get_mut(tag));
        let Some(mut taken) = entry.and_then(Option::take) else { return };
        owned.count -= 1;
        if owned.abandoned {
            taken.sort_unstable_by_key(|segment| segment.slot);
            taken.dedup_by_key(|segment| segment.slot);
            taken.iter_mut().for_each(|segment| segment.release = !owned.uses(segment.slot));
        }
        for OwnedSegment { slot, .. } in taken.into_iter().filter(|segment| segment.release) {
            segments.sent(slot);
        }
    }

    /// Drops what is not sent, because the connection has failed. Returns the slots whose data owned sends
    /// use, each once: [`SegmentSource::sent`] follows for each of them, when the last of these sends has
    /// ended.
    pub fn abandon(&mut self) -> Vec<u32> {
        self.queue.clear();
        self.headers.clear();
        (self.headers_sent, self.front_sent) = (0, 0);
        let Some(owned) = &mut self.owned else { return Vec::new() };
        owned.abandoned = true;
        let mut slots: Vec<u32> =
            owned.by_tag.iter().flatten().flatten().map(|segment| segment.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    /// Drops headers that were sent, once there are many.
    fn compact(&mut self) {
        if self.headers_sent >= COMPACT_BYTES {
            self.headers.drain(..self.headers_sent);
            self.headers_sent = 0;
        }
    }

    #[inline]
    fn queue_headers(&mut self, added: usize) {
        match self.queue.back_mut() {
            Some(segment) if segment.kind == SegmentKind::Headers => segment.length += added as u32,
            _ => self.queue.push_back(Segment::headers(added)),
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
            let length = segment.length as usize;
            let bytes = if segment.kind == SegmentKind::Headers {
                let (bytes, rest) = headers.split_at(length);
                headers = rest;
                &bytes[skip..]
            } else {
                segments.bytes(segment.slot, segment.start as usize + skip, length - skip)
            };
            skip = 0;
            offered += bytes.len();
            parts.push(IoSlice::new(bytes));
        }
        offered
    }

    /// Takes the first `count` bytes that [`parts`](Self::parts) has collected out of the queue.
    fn advance(&mut self, count: usize, segments: &mut impl SegmentSource) {
        // From the start of the first segment.
        let mut left = self.front_sent + count;
        let mut sent = 0;
        for segment in &self.queue {
            let length = segment.length as usize;
            if left < length {
                break;
            }
            left -= length;
            sent += 1;
            match segment.kind {
                SegmentKind::Headers => self.headers_sent += length,
                SegmentKind::Data => {}
                SegmentKind::LastData => segments.sent(segment.slot),
            }
        }
        let is_within = sent < self.queue.len() || left == 0;
        assert!(is_within, "the stream sent {left} bytes more than it was passed");
        self.queue.drain(..sent);
        self.front_sent = left;
        self.compact();
    }
}

impl OwnedSends {
    /// Whether the data of a slot is part of any.
    fn uses(&self, slot: u32) -> bool {
        self.by_tag.iter().flatten().flatten().any(|segment| segment.slot == slot)
    }
}
