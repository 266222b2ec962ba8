//! What a connection has to send.

use std::collections::VecDeque;
use std::io::IoSlice;

use crate::protocol::CloseReason;
use crate::transfers::TransferReport;
use arrayvec::ArrayVec;
use dma::Data;
use sockets::ByteStream;

/// Identifies the bytes before the PDUs among transfers; there are never so many PDUs.
const BYTES: u64 = u64::MAX >> 1;
/// Parts of one send.
const PARTS_MAX: usize = 64;
/// Longest head of a PDU: an iSCSI header with its digest.
const HEAD_BYTES_MAX: usize = 52;
/// Longest tail: padding and a digest.
const TAIL_BYTES_MAX: usize = 8;

/// A PDU to send: a head, data, and a tail.
#[derive(Debug)]
pub struct OutgoingPdu {
    head: ArrayVec<u8, HEAD_BYTES_MAX>,
    data: PduData,
    tail: ArrayVec<u8, TAIL_BYTES_MAX>,
    /// Bytes of buffers that are free when it is sent.
    frees: usize,
}

/// The data of an [`OutgoingPdu`].
#[derive(Debug, Default)]
pub enum PduData {
    /// None.
    #[default]
    None,
    /// Bytes on the heap, of what is uncommon.
    Bytes(Vec<u8>),
    /// A part of a buffer: from the first byte, up to the second.
    Buffer(Data, usize, usize),
}

/// The PDUs of a connection in the order of their sending. Their data is owned until it is sent.
#[derive(Debug, Default)]
pub struct SendQueue {
    /// Sent before the PDUs: what a handshake answers.
    pub bytes: Vec<u8>,
    pdus: VecDeque<OutgoingPdu>,
    /// Bytes of the first PDU that are sent.
    sent: usize,
    /// Of `bytes`.
    bytes_sent: usize,
    /// PDUs that were sent.
    sent_pdus: u64,
    /// Bytes of the data that is on the heap.
    heap_bytes: usize,
}

impl PduData {
    /// Number of bytes.
    pub fn len(&self) -> usize {
        match self {
            PduData::None => 0,
            PduData::Bytes(bytes) => bytes.len(),
            PduData::Buffer(_, from, to) => to - from,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Visits the slices of what follows the first `skip` bytes, until `visit` returns false.
    pub fn slices<'a>(&'a self, skip: usize, mut visit: impl FnMut(&'a [u8]) -> bool) {
        match self {
            PduData::None => {}
            PduData::Bytes(bytes) => {
                if let Some(rest) = bytes.get(skip..).filter(|rest| !rest.is_empty()) {
                    visit(rest);
                }
            }
            PduData::Buffer(data, from, to) => {
                // Of each slice, what is in `from + skip..to`.
                let (begin, mut offset) = (from + skip, 0);
                for slice in data.slices() {
                    let (first, last) = (begin.max(offset), (*to).min(offset + slice.len()));
                    if first < last && !visit(&slice.as_slice()[first - offset..last - offset]) {
                        return;
                    }
                    offset += slice.len();
                }
            }
        }
    }

    /// Bytes of the buffers that it owns.
    fn buffer_bytes(&self) -> usize {
        match self {
            PduData::Buffer(data, ..) => data.len(),
            PduData::None | PduData::Bytes(_) => 0,
        }
    }

    fn heap_bytes(&self) -> usize {
        match self {
            PduData::Bytes(bytes) => bytes.len(),
            PduData::None | PduData::Buffer(..) => 0,
        }
    }
}

impl OutgoingPdu {
    /// A PDU without data. `encode` writes the head, of at most 52 bytes, and returns its length.
    #[inline]
    pub fn new(encode: impl FnOnce(&mut [u8]) -> usize) -> OutgoingPdu {
        let mut head = ArrayVec::from([0; HEAD_BYTES_MAX]);
        let length = encode(&mut head);
        head.truncate(length);
        OutgoingPdu { head, data: PduData::None, tail: ArrayVec::new(), frees: 0 }
    }

    /// Adds the data. Its buffers are free when it is sent.
    #[must_use]
    pub fn with_data(self, data: PduData) -> OutgoingPdu {
        let frees = data.buffer_bytes();
        self.with_part(data, frees)
    }

    /// Adds data that is a part of buffers which are divided among several PDUs, one after the other: they
    /// are free, with all their bytes, when the last of these is sent. `frees` is 0 for the others.
    #[must_use]
    pub fn with_part(self, data: PduData, frees: usize) -> OutgoingPdu {
        OutgoingPdu { data, frees, ..self }
    }

    /// Adds what follows the data, at most 8 bytes.
    ///
    /// # Panics
    /// If it is longer.
    #[must_use]
    pub fn with_tail(mut self, tail: &[u8]) -> OutgoingPdu {
        self.tail.extend(tail.iter().copied());
        self
    }

    fn length(&self) -> usize {
        self.head.len() + self.data.len() + self.tail.len()
    }

    /// Adds what follows the first `skip` bytes.
    fn parts<'a>(&'a self, mut skip: usize, parts: &mut ArrayVec<IoSlice<'a>, PARTS_MAX>) {
        if skip < self.head.len() {
            parts.push(IoSlice::new(&self.head[skip..]));
        }
        skip = skip.saturating_sub(self.head.len());
        self.data.slices(skip, |slice| {
            parts.push(IoSlice::new(slice));
            !parts.is_full()
        });
        skip = skip.saturating_sub(self.data.len());
        if skip < self.tail.len() && !parts.is_full() {
            parts.push(IoSlice::new(&self.tail[skip..]));
        }
    }
}

impl SendQueue {
    /// Appends a PDU.
    #[inline]
    pub fn push(&mut self, pdu: OutgoingPdu) {
        self.heap_bytes += pdu.data.heap_bytes();
        self.pdus.push_back(pdu);
    }

    /// PDUs that are not sent.
    #[inline]
    pub fn len(&self) -> usize {
        self.pdus.len()
    }

    /// Bytes of data on the heap that is not sent.
    #[inline]
    pub fn heap_bytes(&self) -> usize {
        self.heap_bytes
    }

    /// Whether everything is sent.
    pub fn is_empty(&self) -> bool {
        self.pdus.is_empty() && self.bytes.is_empty()
    }

    /// Reports what the peer has not read: PDUs that share their buffers as one transfer. Identifiers are
    /// below 2^63.
    pub fn transfers(&self, report: &mut TransferReport) {
        if !self.bytes.is_empty() {
            report.waits_for_peer(BYTES, 0, self.bytes_sent);
        }
        let (mut sent, mut unsent_parts) = (self.sent, 0);
        for (index, pdu) in self.pdus.iter().enumerate() {
            let part = pdu.data.buffer_bytes();
            unsent_parts += part;
            if part > 0 && pdu.frees == 0 {
                // Further parts follow.
                continue;
            }
            // Parts that were sent are not in the queue any more.
            let moved = pdu.frees.saturating_sub(unsent_parts) + sent;
            report.waits_for_peer(self.sent_pdus + index as u64, pdu.frees, moved);
            (sent, unsent_parts) = (0, 0);
        }
    }

    /// Sends as much as the stream takes. Returns the bytes of buffers that are free again.
    ///
    /// # Errors
    /// The stream has ended or failed.
    pub fn send<S: ByteStream, E>(&mut self, stream: &mut S) -> Result<usize, CloseReason<E>> {
        let mut freed = 0;
        while !self.is_empty() {
            let mut parts = ArrayVec::<IoSlice<'_>, PARTS_MAX>::new();
            if !self.bytes.is_empty() {
                parts.push(IoSlice::new(&self.bytes[self.bytes_sent..]));
            }
            let mut skip = self.sent;
            for pdu in &self.pdus {
                if parts.len() + 1 >= PARTS_MAX {
                    break;
                }
                pdu.parts(skip, &mut parts);
                skip = 0;
            }
            let offered: usize = parts.iter().map(|part| part.len()).sum();
            let sent = CloseReason::check(stream.send(&parts))?;
            drop(parts);
            freed += self.advance(sent);
            if sent < offered {
                break;
            }
        }
        Ok(freed)
    }

    /// Drops what is sent. Returns the bytes of buffers that are free again.
    fn advance(&mut self, mut sent: usize) -> usize {
        let mut freed = 0;
        if !self.bytes.is_empty() {
            let of_bytes = sent.min(self.bytes.len() - self.bytes_sent);
            self.bytes_sent += of_bytes;
            sent -= of_bytes;
            if self.bytes_sent < self.bytes.len() {
                return 0;
            }
            // Few connections use it again.
            (self.bytes, self.bytes_sent) = (Vec::new(), 0);
        }
        self.sent += sent;
        while let Some(first) = self.pdus.front() {
            let length = first.length();
            if self.sent < length {
                break;
            }
            self.sent -= length;
            self.sent_pdus += 1;
            let Some(done) = self.pdus.pop_front() else { break };
            self.heap_bytes -= done.data.heap_bytes();
            freed += done.frees;
        }
        freed
    }
}

#[cfg(test)]
mod tests;
