//! Messages to bytes of a connection.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

use sockets::{ByteStream, FlushStatus, TransferResult};
use wire_replica::{EncodedFrame, Greeting, recycle_head};

use crate::error::LinkError;

/// Most bytes that wait for a peer.
const QUEUED_BYTES_MAX: usize = 64 << 20;
/// Parts of one write.
const PARTS_MAX: usize = 64;
/// Heads of messages without data share memory up to here: an answer to a client has less than 100 bytes.
const HEADS_BYTES: usize = 4 << 10;

enum Part {
    Head(Vec<u8>),
    Data(Arc<[u8]>),
}

impl Part {
    fn bytes(&self) -> &[u8] {
        match self {
            Part::Head(bytes) => bytes,
            Part::Data(bytes) => bytes,
        }
    }
}

/// What is to be written.
#[derive(Default)]
pub(crate) struct Sender {
    /// Greetings, which go before messages.
    greetings: VecDeque<Part>,
    messages: VecDeque<Part>,
    /// Bytes of the first part that are written.
    written: usize,
    queued: usize,
}

impl Sender {
    pub(crate) fn greet(&mut self, greeting: &Greeting) {
        self.greetings.push_back(Part::Head(greeting.encode().to_vec()));
        self.queued += Greeting::SIZE;
    }

    pub(crate) fn queue(&mut self, frame: EncodedFrame) {
        let EncodedFrame { head, data } = frame;
        self.queued += head.len();
        match self.messages.back_mut() {
            Some(Part::Head(heads)) if heads.len() + head.len() <= HEADS_BYTES => {
                heads.extend_from_slice(&head);
                recycle_head(head);
            }
            _ => self.messages.push_back(Part::Head(head)),
        }
        for part in data.into_iter().filter(|part| !part.is_empty()) {
            self.queued += part.len();
            self.messages.push_back(Part::Data(part));
        }
    }

    pub(crate) fn queued_bytes(&self) -> usize {
        self.queued
    }

    /// Writes what can be written now: greetings, and messages if these are over.
    pub(crate) fn write(&mut self, stream: &mut impl ByteStream, is_ready: bool) -> Result<(), LinkError> {
        loop {
            let queue = if self.greetings.is_empty() { &mut self.messages } else { &mut self.greetings };
            if queue.is_empty() || (!is_ready && self.greetings.is_empty()) {
                return match stream.flush() {
                    FlushStatus::Empty | FlushStatus::Blocked => Ok(()),
                    FlushStatus::Failed(kind) => Err(LinkError::Failed(kind)),
                };
            }
            let queue = if self.greetings.is_empty() { &mut self.messages } else { &mut self.greetings };
            let mut parts: Vec<IoSlice<'_>> =
                queue.iter().take(PARTS_MAX).map(|part| IoSlice::new(part.bytes())).collect();
            parts[0].advance(self.written);
            let offered: usize = parts.iter().map(|part| part.len()).sum();
            let count = match stream.send(&parts) {
                TransferResult::Bytes(count) => count,
                TransferResult::Blocked if self.queued > QUEUED_BYTES_MAX => {
                    return Err(LinkError::Slow(self.queued));
                }
                TransferResult::Blocked => return Ok(()),
                TransferResult::Closed => return Err(LinkError::Closed),
                TransferResult::Failed(kind) => return Err(LinkError::Failed(kind)),
            };
            self.queued -= count;
            let mut left = self.written + count;
            while let Some(part) = queue.pop_front_if(|part| part.bytes().len() <= left) {
                left -= part.bytes().len();
                if let Part::Head(head) = part {
                    recycle_head(head);
                }
            }
            self.written = left;
            if count < offered {
                return Ok(());
            }
        }
    }
}
