//! Parsing of a byte stream into PDUs.

use std::io::{ErrorKind, IoSliceMut};

use arrayvec::ArrayVec;
use sockets::{ByteStream, TransferResult};
use wire_nvme::digest::{self, Crc32c, crc32c};
use wire_nvme::tcp::{COMMON_SIZE, CommonHeader, FatalError, FatalStatus, Framing, PduLayout, PduType};

/// Longest part of a PDU before its data: PDO is one byte.
const PREFIX_MAX: usize = 256;

/// Most buffers of one read into data that lies in several: 256 KiB in pages.
const PARTS_MAX: usize = 64;

/// Buffers for a PDU's data, in order.
pub type DataParts<'c> = ArrayVec<IoSliceMut<'c>, PARTS_MAX>;

/// Where a PDU's data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPlacement {
    /// Into the buffers of [`PduConsumer::data_buffer`].
    Buffer,
    /// It is read and discarded.
    Discard,
    /// No buffer is available for this PDU yet. The receiver stops until [`PduReceiver::resume`], which
    /// passes the same header again.
    Wait,
}

/// Whether the receiver can continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveProgress {
    /// All bytes were processed.
    Ready,
    /// The consumer has no buffer. The rest of the bytes is saved; read no more until [`PduReceiver::resume`]
    /// succeeds.
    Waiting,
}

/// The recipient of PDUs.
pub trait PduConsumer {
    /// A header arrived and its digest is correct. `header` excludes digest and padding.
    ///
    /// # Errors
    /// The fatal error to terminate the connection with.
    fn header(
        &mut self,
        kind: PduType,
        header: &[u8],
        layout: &PduLayout,
    ) -> Result<DataPlacement, FatalError>;

    /// The buffer for `length` bytes of data of the current PDU from `offset`: this length, or less where the data
    /// continues in another buffer, but not nothing.
    fn data_buffer(&mut self, offset: usize, length: usize) -> &mut [u8];

    /// The buffers for `length` bytes of data from `offset`, in order, as many as `parts` has room for. Called instead
    /// of [`data_buffer`](Self::data_buffer) where one does not have all the bytes.
    fn data_buffers<'c>(&'c mut self, offset: usize, length: usize, parts: &mut DataParts<'c>) {
        parts.push(IoSliceMut::new(self.data_buffer(offset, length)));
    }

    /// The PDU is complete. `digest_ok` is false on a data digest error, which fails the command, not the
    /// connection (TCP 1.0, section 3.3.1.2).
    ///
    /// # Errors
    /// The fatal error to terminate the connection with.
    fn pdu_complete(&mut self, digest_ok: bool) -> Result<(), FatalError>;
}

/// Parses one direction of a connection into PDUs.
///
/// It owns the state of the current PDU: its header if it arrived in pieces, the running data digest, and the
/// bytes behind a PDU for which the consumer had no buffer. Feed it with [`consume`](Self::consume), or read
/// data straight into [`direct_buffer`](Self::direct_buffer) and call [`advance`](Self::advance);
/// [`receive_pdus`] does both. After [`ReceiveProgress::Waiting`] call [`resume`](Self::resume). A header
/// that arrives whole is parsed in place; other headers and data outside the direct buffer are copied once.
pub struct PduReceiver {
    framing: Framing,
    state: ReceiveState,
    /// The part before the data of a PDU that arrived in pieces, waits for a buffer, or was invalid.
    prefix: [u8; PREFIX_MAX],
    prefix_length: usize,
    layout: PduLayout,
    /// The common header that `layout` was made from: PDUs of one kind and size follow each other, and have the same.
    common: Option<[u8; COMMON_SIZE]>,
    data_buffered: bool,
    received: usize,
    crc: Crc32c,
    trailer: [u8; digest::SIZE],
    /// Bytes that arrived behind a PDU that waits for a buffer: at most those of one call of `consume`.
    backlog: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ReceiveState {
    Prefix,
    Waiting,
    Data,
    Trailer,
}

const NO_LAYOUT: PduLayout = PduLayout {
    header_length: 0,
    header_digest: false,
    data_offset: 0,
    data_length: 0,
    data_digest: false,
    length: 0,
};

impl Default for PduReceiver {
    fn default() -> Self {
        PduReceiver {
            framing: Framing::PLAIN,
            state: ReceiveState::Prefix,
            prefix: [0; PREFIX_MAX],
            prefix_length: 0,
            layout: NO_LAYOUT,
            common: None,
            data_buffered: false,
            received: 0,
            crc: Crc32c::new(),
            trailer: [0; digest::SIZE],
            backlog: Vec::new(),
        }
    }
}

impl PduReceiver {
    /// Sets the negotiated framing for the following PDUs. Call it between PDUs, never in the middle of one.
    pub fn set_framing(&mut self, framing: Framing) {
        if self.framing != framing {
            self.framing = framing;
            self.common = None;
        }
    }

    /// The buffer for the rest of the current PDU's data, or the first of several; empty if there is none or it is
    /// discarded.
    #[inline]
    pub fn direct_buffer<'c>(&self, consumer: &'c mut impl PduConsumer) -> &'c mut [u8] {
        match self.direct_length() {
            0 => &mut [],
            left => consumer.data_buffer(self.received, left),
        }
    }

    /// Bytes of the current PDU's data that can be read into the consumer's buffers.
    #[inline]
    fn direct_length(&self) -> usize {
        if self.state != ReceiveState::Data || !self.data_buffered {
            return 0;
        }
        self.layout.data_length as usize - self.received
    }

    /// Processes `count` bytes that were read into the buffers for the rest of the data.
    #[inline]
    pub fn advance(&mut self, count: usize, consumer: &mut impl PduConsumer) -> Result<(), FatalError> {
        if count == 0 {
            return Ok(());
        }
        if self.layout.data_digest {
            let end = self.received + count;
            let mut at = self.received;
            while at < end {
                let part = consumer.data_buffer(at, end - at);
                assert!(!part.is_empty(), "no buffer for data at {at}");
                self.crc.update(part);
                at += part.len();
            }
        }
        self.received += count;
        if self.received == self.layout.data_length as usize { self.data_complete(consumer) } else { Ok(()) }
    }

    /// Processes the next bytes of the stream. Those behind a PDU that waits for a buffer are saved: never more than
    /// one call's, because the stream must not be read again before [`resume`](Self::resume).
    ///
    /// # Errors
    /// The fatal error of the PDU whose header is [`failed_header`](Self::failed_header). The receiver cannot
    /// be used afterwards.
    ///
    /// # Panics
    /// If a PDU waits for a buffer.
    pub fn consume(
        &mut self,
        mut bytes: &[u8],
        consumer: &mut impl PduConsumer,
    ) -> Result<ReceiveProgress, FatalError> {
        assert!(
            self.state != ReceiveState::Waiting,
            "{} bytes were read while a PDU waits for a buffer",
            bytes.len()
        );
        while !bytes.is_empty() {
            let consumed = match self.state {
                ReceiveState::Prefix => self.receive_prefix(bytes, consumer)?,
                ReceiveState::Data => self.receive_data(bytes, consumer)?,
                ReceiveState::Trailer => self.receive_trailer(bytes, consumer)?,
                ReceiveState::Waiting => {
                    self.backlog.extend_from_slice(bytes);
                    return Ok(ReceiveProgress::Waiting);
                }
            };
            bytes = &bytes[consumed..];
        }
        Ok(if self.state == ReceiveState::Waiting {
            ReceiveProgress::Waiting
        } else {
            ReceiveProgress::Ready
        })
    }

    /// Passes the header of the waiting PDU to the consumer again and, if it has a buffer now, processes the
    /// saved bytes.
    ///
    /// # Errors
    /// As [`consume`](Self::consume).
    pub fn resume(&mut self, consumer: &mut impl PduConsumer) -> Result<ReceiveProgress, FatalError> {
        if self.state != ReceiveState::Waiting {
            return Ok(ReceiveProgress::Ready);
        }
        self.state = ReceiveState::Prefix;
        let prefix = self.prefix;
        let length = std::mem::take(&mut self.prefix_length);
        self.prefix_complete(&prefix[..length], consumer)?;
        if self.state == ReceiveState::Waiting {
            return Ok(ReceiveProgress::Waiting);
        }
        let backlog = std::mem::take(&mut self.backlog);
        self.consume(&backlog, consumer)
    }

    /// Bytes to read beyond the current PDU's data, at most `max`.
    ///
    /// These bytes are copied once more. For small PDUs that is cheaper than a system call for each; behind a
    /// large PDU only the next header is useful.
    fn read_ahead(&self, max: usize) -> usize {
        if self.layout.data_length < LARGE_BYTES { max } else { max.min(READ_AHEAD_LARGE_BYTES) }
    }

    /// Whether a PDU waits for a buffer.
    pub fn is_waiting(&self) -> bool {
        self.state == ReceiveState::Waiting
    }

    /// Whether no PDU is partially received.
    pub fn is_between_pdus(&self) -> bool {
        self.state == ReceiveState::Prefix && self.prefix_length == 0
    }

    /// The header of the invalid PDU, as far as it arrived; a termination request carries it.
    pub fn failed_header(&self) -> &[u8] {
        &self.prefix[..self.prefix_length.min(wire_nvme::tcp::HEADER_MAX)]
    }

    /// Consumes the bytes that complete the part of a PDU before its data. Returns their count.
    #[inline]
    fn receive_prefix(&mut self, bytes: &[u8], consumer: &mut impl PduConsumer) -> Result<usize, FatalError> {
        if self.prefix_length == 0
            && let Some(common) = bytes.first_chunk::<COMMON_SIZE>()
        {
            // Fast path: all of it arrived and is parsed in place.
            let needed = self.parse_layout(common)?;
            if let Some(prefix) = bytes.get(..needed) {
                self.prefix_complete(prefix, consumer)?;
                return Ok(needed);
            }
        }
        let mut consumed = 0;
        if self.prefix_length < COMMON_SIZE {
            consumed = self.append_prefix(bytes, COMMON_SIZE);
            if self.prefix_length < COMMON_SIZE {
                return Ok(consumed);
            }
        }
        let common =
            *self.prefix.first_chunk::<COMMON_SIZE>().expect("a prefix is longer than a common header");
        let needed = self.parse_layout(&common)?;
        consumed += self.append_prefix(&bytes[consumed..], needed);
        if self.prefix_length == needed {
            let prefix = self.prefix;
            self.prefix_length = 0;
            self.prefix_complete(&prefix[..needed], consumer)?;
        }
        Ok(consumed)
    }

    fn append_prefix(&mut self, bytes: &[u8], until: usize) -> usize {
        let count = bytes.len().min(until - self.prefix_length);
        self.prefix[self.prefix_length..self.prefix_length + count].copy_from_slice(&bytes[..count]);
        self.prefix_length += count;
        count
    }

    /// The bytes before the data, from the common header. Stores the layout.
    #[inline(always)]
    fn parse_layout(&mut self, common: &[u8; COMMON_SIZE]) -> Result<usize, FatalError> {
        if self.common.as_ref() != Some(common) {
            self.parse_new_layout(common)?;
        }
        Ok(self.layout.prefix_length())
    }

    #[inline(never)]
    fn parse_new_layout(&mut self, common: &[u8; COMMON_SIZE]) -> Result<(), FatalError> {
        match CommonHeader::decode(common).and_then(|header| header.layout(&self.framing)) {
            Ok(layout) => (self.common, self.layout) = (Some(*common), layout),
            Err(fatal) => {
                self.save_prefix(common);
                return Err(fatal);
            }
        }
        Ok(())
    }

    fn save_prefix(&mut self, prefix: &[u8]) {
        self.prefix[..prefix.len()].copy_from_slice(prefix);
        self.prefix_length = prefix.len();
    }

    #[inline]
    fn prefix_complete(&mut self, prefix: &[u8], consumer: &mut impl PduConsumer) -> Result<(), FatalError> {
        let header_length = usize::from(self.layout.header_length);
        let (header, rest) = prefix.split_at(header_length);
        if self.layout.header_digest {
            let expected = rest.first_chunk::<{ digest::SIZE }>().expect("the layout counts the digest");
            let expected = u32::from_le_bytes(*expected);
            if crc32c(header) != expected {
                self.save_prefix(header);
                // The error information is the received digest (TCP 1.0, section 3.6.2).
                return Err(FatalError { status: FatalStatus::HeaderDigestError, information: expected });
            }
        }
        let Some(kind) = PduType::from_u8(header[0]) else {
            unreachable!("the common header was decoded when its layout was parsed")
        };
        let placement = match consumer.header(kind, header, &self.layout) {
            Ok(placement) => placement,
            Err(fatal) => {
                self.save_prefix(header);
                return Err(fatal);
            }
        };
        if placement == DataPlacement::Wait {
            self.save_prefix(prefix);
            self.state = ReceiveState::Waiting;
            return Ok(());
        }
        if self.layout.data_length == 0 {
            return consumer.pdu_complete(true);
        }
        self.data_buffered = placement == DataPlacement::Buffer;
        self.received = 0;
        self.crc = Crc32c::new();
        self.state = ReceiveState::Data;
        Ok(())
    }

    #[inline]
    fn receive_data(&mut self, bytes: &[u8], consumer: &mut impl PduConsumer) -> Result<usize, FatalError> {
        let mut count = bytes.len().min(self.layout.data_length as usize - self.received);
        if self.data_buffered {
            let buffer = consumer.data_buffer(self.received, count);
            count = buffer.len();
            buffer.copy_from_slice(&bytes[..count]);
        }
        let bytes = &bytes[..count];
        if self.layout.data_digest {
            self.crc.update(bytes);
        }
        self.received += count;
        if self.received == self.layout.data_length as usize {
            self.data_complete(consumer)?;
        }
        Ok(count)
    }

    fn data_complete(&mut self, consumer: &mut impl PduConsumer) -> Result<(), FatalError> {
        if self.layout.data_digest {
            self.state = ReceiveState::Trailer;
            self.received = 0;
            return Ok(());
        }
        self.state = ReceiveState::Prefix;
        consumer.pdu_complete(true)
    }

    fn receive_trailer(
        &mut self,
        bytes: &[u8],
        consumer: &mut impl PduConsumer,
    ) -> Result<usize, FatalError> {
        let count = bytes.len().min(digest::SIZE - self.received);
        self.trailer[self.received..self.received + count].copy_from_slice(&bytes[..count]);
        self.received += count;
        if self.received == digest::SIZE {
            self.state = ReceiveState::Prefix;
            consumer.pdu_complete(self.crc.value() == u32::from_le_bytes(self.trailer))?;
        }
        Ok(count)
    }
}

/// The result of [`receive_pdus`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveStatus {
    /// Nothing had arrived: neither the receiver nor the consumer has changed.
    Empty,
    /// Everything that had arrived was processed.
    Drained,
    /// More may have arrived; call again.
    More,
    /// The consumer has no buffer; call again when it has.
    Waiting,
    /// The peer has closed its end.
    Closed,
    /// The connection failed.
    Failed(ErrorKind),
}

/// PDUs with at least so many bytes of data justify a separate system call.
const LARGE_BYTES: u32 = 32 << 10;
/// Bytes to read behind the data of a large PDU: the next header and some in-capsule data.
const READ_AHEAD_LARGE_BYTES: usize = 4096;

/// Most reads in one call, so that a busy connection does not starve others.
const READS_MAX: usize = 16;

/// Receives and processes the PDUs of a stream: data of the current PDU goes directly into its buffer, the
/// rest through `scratch`.
///
/// # Errors
/// As [`PduReceiver::consume`].
pub fn receive_pdus(
    receiver: &mut PduReceiver,
    consumer: &mut impl PduConsumer,
    stream: &mut impl ByteStream,
    scratch: &mut [u8],
) -> Result<ReceiveStatus, FatalError> {
    let has_resumed = receiver.is_waiting();
    if has_resumed && receiver.resume(consumer)? == ReceiveProgress::Waiting {
        return Ok(ReceiveStatus::Waiting);
    }
    for reads in 0..READS_MAX {
        let read_ahead = receiver.read_ahead(scratch.len());
        let scratch = &mut scratch[..read_ahead];
        let direct = receiver.direct_buffer(consumer);
        let mut direct_length = direct.len();
        let mut requested = direct_length + scratch.len();
        let transfer = if direct_length == 0 {
            stream.receive(&mut [IoSliceMut::new(scratch)])
        } else if direct_length == receiver.direct_length() {
            stream.receive(&mut [IoSliceMut::new(direct), IoSliceMut::new(scratch)])
        } else {
            let transfer;
            (transfer, direct_length, requested) = receive_parts(receiver, consumer, stream, scratch);
            transfer
        };
        let count = match transfer {
            TransferResult::Bytes(count) => count,
            TransferResult::Blocked if reads == 0 && !has_resumed => return Ok(ReceiveStatus::Empty),
            TransferResult::Blocked => return Ok(ReceiveStatus::Drained),
            TransferResult::Closed => return Ok(ReceiveStatus::Closed),
            TransferResult::Failed(kind) => return Ok(ReceiveStatus::Failed(kind)),
        };
        let direct_count = count.min(direct_length);
        receiver.advance(direct_count, consumer)?;
        if receiver.consume(&scratch[..count - direct_count], consumer)? == ReceiveProgress::Waiting {
            return Ok(ReceiveStatus::Waiting);
        }
        if count < requested {
            return Ok(ReceiveStatus::Drained);
        }
    }
    Ok(ReceiveStatus::More)
}

/// Receives into data that lies in several buffers and, if all of its rest can be read at once, into `scratch`.
/// Returns the number of bytes that the data's buffers, and all buffers together, had room for.
#[cold]
fn receive_parts(
    receiver: &PduReceiver,
    consumer: &mut impl PduConsumer,
    stream: &mut impl ByteStream,
    scratch: &mut [u8],
) -> (TransferResult, usize, usize) {
    let mut parts = DataParts::new();
    let left = receiver.direct_length();
    consumer.data_buffers(receiver.received, left, &mut parts);
    let direct_length = parts.iter().map(|part| part.len()).sum();
    let mut requested = direct_length;
    if direct_length == left && !parts.is_full() {
        requested += scratch.len();
        parts.push(IoSliceMut::new(scratch));
    }
    (stream.receive(&mut parts), direct_length, requested)
}
