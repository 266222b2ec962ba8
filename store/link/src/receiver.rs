//! Bytes of a connection to messages.

use std::io::IoSliceMut;

use sockets::{ByteStream, TransferResult};
use wire_replica::{Frame, FrameHeader, Greeting};

use crate::error::LinkError;

/// Bytes read at a time, at least.
const READ_BYTES: usize = 64 << 10;

/// What was received.
pub(crate) enum Received {
    Greeting(Greeting),
    Frame { group: u32, frame: Frame },
}

/// Bytes that are not a whole message yet.
#[derive(Default)]
pub(crate) struct Receiver {
    buffer: Vec<u8>,
    /// The bytes that were read and not decoded.
    start: usize,
    end: usize,
    /// The header of the message at `start`.
    header: Option<FrameHeader>,
}

impl Receiver {
    /// Takes the first byte of a connection.
    pub(crate) fn put_first(&mut self, byte: u8) {
        self.buffer.resize(READ_BYTES, 0);
        self.buffer[0] = byte;
        self.end = 1;
    }

    /// Reads once. Returns the number of bytes, and whether more may be there.
    pub(crate) fn read(&mut self, stream: &mut impl ByteStream) -> Result<(usize, bool), LinkError> {
        // Room for the message that is not complete, and for more.
        let needed = self.header.map_or(0, |header| message_bytes(&header)).max(READ_BYTES);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.start > 0 && self.buffer.len() - self.start < needed {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.buffer.len() < self.start + needed {
            self.buffer.resize(self.start + needed, 0);
        }
        let offered = self.buffer.len() - self.end;
        match stream.receive(&mut [IoSliceMut::new(&mut self.buffer[self.end..])]) {
            TransferResult::Bytes(count) => {
                self.end += count;
                Ok((count, count == offered))
            }
            TransferResult::Blocked => {
                // An idle connection keeps little.
                if self.start == self.end && self.buffer.len() > READ_BYTES {
                    *self = Receiver::default();
                }
                Ok((0, false))
            }
            TransferResult::Closed => Err(LinkError::Closed),
            TransferResult::Failed(kind) => Err(LinkError::Failed(kind)),
        }
    }

    /// The next message, if it is complete.
    pub(crate) fn next(&mut self, is_ready: bool) -> Result<Option<Received>, LinkError> {
        let bytes = &self.buffer[self.start..self.end];
        if !is_ready {
            let Some(greeting) = bytes.first_chunk::<{ Greeting::SIZE }>() else { return Ok(None) };
            let greeting = Greeting::decode(greeting)?;
            self.start += Greeting::SIZE;
            return Ok(Some(Received::Greeting(greeting)));
        }
        let Some((head, rest)) = bytes.split_first_chunk::<{ FrameHeader::SIZE }>() else { return Ok(None) };
        let header = match self.header {
            Some(header) => header,
            None => *self.header.insert(FrameHeader::decode(head)?),
        };
        let Some(message) = rest.get(..message_bytes(&header) - FrameHeader::SIZE) else { return Ok(None) };
        let (body, data) = message.split_at(header.body_bytes as usize);
        let frame = Frame::decode(&header, body, data)?;
        self.start += message_bytes(&header);
        self.header = None;
        Ok(Some(Received::Frame { group: header.group, frame }))
    }
}

fn message_bytes(header: &FrameHeader) -> usize {
    FrameHeader::SIZE + header.body_bytes as usize + header.data_bytes as usize
}
