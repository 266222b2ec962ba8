//! What is queued to be sent: answers to options, then replies.

use std::collections::VecDeque;
use std::io::IoSlice;

use arrayvec::ArrayVec;
use dma::Data;
use sockets::ByteStream;
use target_shell::CloseReason;

/// Parts of one send.
const PARTS_MAX: usize = 64;
/// Longest head of a reply: an extended chunk of an error with an offset.
const HEAD_BYTES_MAX: usize = 48;

/// A reply or chunk: a head, and a part of a buffer.
pub(crate) struct Reply {
    head: [u8; HEAD_BYTES_MAX],
    head_length: usize,
    data: Option<(Data, usize, usize)>,
}

/// The replies of a connection in the order of their sending. Their data is owned until it is sent.
#[derive(Default)]
pub(crate) struct SendQueue {
    /// Of the handshake, sent first.
    pub(crate) bytes: Vec<u8>,
    replies: VecDeque<Reply>,
    /// Bytes of the first reply that are sent.
    sent: usize,
    /// Of `bytes`.
    bytes_sent: usize,
    /// All bytes ever sent, wrapping: a change is progress.
    pub(crate) progress: u64,
}

impl Reply {
    /// `encode` writes the head and returns its length.
    #[inline]
    pub(crate) fn new(encode: impl FnOnce(&mut [u8]) -> usize) -> Reply {
        let mut head = [0; HEAD_BYTES_MAX];
        let head_length = encode(&mut head);
        Reply { head, head_length, data: None }
    }

    /// Adds bytes `from..to` of `data`.
    pub(crate) fn with_data(self, data: Data, from: usize, to: usize) -> Reply {
        Reply { data: Some((data, from, to)), ..self }
    }

    fn length(&self) -> usize {
        self.head_length + self.data.as_ref().map_or(0, |(_, from, to)| to - from)
    }

    /// Adds what follows the first `skip` bytes.
    fn parts<'a>(&'a self, mut skip: usize, parts: &mut ArrayVec<IoSlice<'a>, PARTS_MAX>) {
        if skip < self.head_length {
            parts.push(IoSlice::new(&self.head[skip..self.head_length]));
        }
        skip = skip.saturating_sub(self.head_length);
        let Some((data, from, to)) = &self.data else { return };
        // Of each slice, what is in `from + skip..to`.
        let (begin, mut offset) = (from + skip, 0);
        for slice in data.slices() {
            let (first, last) = (begin.max(offset), (*to).min(offset + slice.len()));
            if first < last {
                if parts.is_full() {
                    return;
                }
                parts.push(IoSlice::new(&slice.as_slice()[first - offset..last - offset]));
            }
            offset += slice.len();
        }
    }
}

impl SendQueue {
    #[inline]
    pub(crate) fn push(&mut self, reply: Reply) {
        self.replies.push_back(reply);
    }

    /// Replies that are not sent.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.replies.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.replies.is_empty() && self.bytes.is_empty()
    }

    /// Sends as much as the stream takes. Returns the bytes of buffers that are free again.
    pub(crate) fn send<S: ByteStream, E>(&mut self, stream: &mut S) -> Result<usize, CloseReason<E>> {
        let mut freed = 0;
        while !self.is_empty() {
            let mut parts = ArrayVec::<IoSlice<'_>, PARTS_MAX>::new();
            if !self.bytes.is_empty() {
                parts.push(IoSlice::new(&self.bytes[self.bytes_sent..]));
            }
            let mut skip = self.sent;
            for reply in &self.replies {
                if parts.len() + 1 >= PARTS_MAX {
                    break;
                }
                reply.parts(skip, &mut parts);
                skip = 0;
            }
            let offered: usize = parts.iter().map(|part| part.len()).sum();
            let sent = CloseReason::check(stream.send(&parts))?;
            drop(parts);
            self.progress = self.progress.wrapping_add(sent as u64);
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
            // The transmission phase does not use it again.
            (self.bytes, self.bytes_sent) = (Vec::new(), 0);
        }
        self.sent += sent;
        while let Some(first) = self.replies.front() {
            let length = first.length();
            if self.sent < length {
                break;
            }
            self.sent -= length;
            let done = self.replies.pop_front();
            freed += done.and_then(|reply| reply.data).map_or(0, |(data, ..)| data.len());
        }
        freed
    }
}
