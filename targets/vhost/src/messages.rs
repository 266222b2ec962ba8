//! The messages of a front-end: the request that is being received, and the replies that are not sent yet.

use std::io::{ErrorKind, IoSliceMut};
use std::os::fd::OwnedFd;

use sockets::{ByteStream, FlushStatus, MessageQueue, ReceivedDescriptors, TransferResult};
use target_shell::CloseReason;
use wire_vhost_user::{TABLE_REGIONS_MAX, VhostUserHeader};

use crate::failure::VhostViolation;
use crate::limits::{PAYLOAD_BYTES_MAX, UNSENT_BYTES_MAX, UNSENT_DESCRIPTORS_MAX};

/// A message of the front-end.
#[derive(Debug)]
pub(crate) struct FrontendMessage {
    pub(crate) header: VhostUserHeader,
    pub(crate) payload: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// A payload for the front-end.
#[derive(Debug, Default)]
pub(crate) struct ReplyPayload {
    pub(crate) bytes: Vec<u8>,
    pub(crate) descriptor: Option<OwnedFd>,
}

/// The messages of a connection, in both directions.
pub(crate) struct FrontendMessages {
    header: [u8; VhostUserHeader::SIZE],
    /// The message whose payload is being received.
    current: Option<(VhostUserHeader, Vec<u8>)>,
    filled: usize,
    /// Descriptors of the current message.
    descriptors: ReceivedDescriptors,
    unsent: MessageQueue<OwnedFd>,
}

impl FrontendMessages {
    pub(crate) fn new() -> FrontendMessages {
        FrontendMessages {
            header: [0; VhostUserHeader::SIZE],
            current: None,
            filled: 0,
            descriptors: ReceivedDescriptors::new(TABLE_REGIONS_MAX),
            unsent: MessageQueue::new(UNSENT_BYTES_MAX, UNSENT_DESCRIPTORS_MAX),
        }
    }

    /// The next message; `None` if it is not complete yet.
    pub(crate) fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
    ) -> Result<Option<FrontendMessage>, CloseReason<VhostViolation>> {
        loop {
            let Some((_, payload)) = &mut self.current else {
                if self.filled < VhostUserHeader::SIZE {
                    // Exactly the header: descriptors arrive with the first bytes of their message.
                    let into = &mut self.header[self.filled..];
                    let Some(count) = receive(stream, into, &mut self.descriptors)? else { return Ok(None) };
                    self.filled += count;
                    continue;
                }
                let header = VhostUserHeader::decode(&self.header)
                    .map_err(|error| CloseReason::Protocol(VhostViolation::Malformed(error)))?;
                let bytes = header.payload_bytes;
                if bytes as usize > PAYLOAD_BYTES_MAX {
                    return Err(CloseReason::Protocol(VhostViolation::TooLong(bytes)));
                }
                self.current = Some((header, vec![0; bytes as usize]));
                self.filled = 0;
                continue;
            };
            if self.filled < payload.len() {
                let into = &mut payload[self.filled..];
                let Some(count) = receive(stream, into, &mut self.descriptors)? else { return Ok(None) };
                self.filled += count;
                continue;
            }
            self.filled = 0;
            let message = self.current.take();
            let descriptors = self.descriptors.take();
            return Ok(message.map(|(header, payload)| FrontendMessage { header, payload, descriptors }));
        }
    }

    /// Queues a reply.
    pub(crate) fn push(
        &mut self,
        header: &VhostUserHeader,
        reply: ReplyPayload,
    ) -> Result<(), CloseReason<VhostViolation>> {
        let descriptors = reply.descriptor.into_iter().collect();
        let header = header.reply(reply.bytes.len() as u32);
        let pushed = self.unsent.push(&[&header.to_bytes(), &reply.bytes], descriptors);
        pushed.map_err(|_| CloseReason::Protocol(VhostViolation::SendQueueFull))
    }

    /// Whether everything was sent.
    #[inline]
    pub(crate) fn are_sent(&self) -> bool {
        self.unsent.is_empty()
    }

    /// Sends queued replies until the socket's buffer is full.
    pub(crate) fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<VhostViolation>> {
        let flushed =
            self.unsent.flush(|parts, descriptors| stream.send_with_descriptors(parts, descriptors));
        match flushed {
            FlushStatus::Empty | FlushStatus::Blocked => Ok(()),
            FlushStatus::Failed(kind) => Err(CloseReason::Network(kind)),
        }
    }
}

/// Receives bytes and the file descriptors that come with them; `None` if there are none yet.
fn receive<S: ByteStream>(
    stream: &mut S,
    into: &mut [u8],
    descriptors: &mut ReceivedDescriptors,
) -> Result<Option<usize>, CloseReason<VhostViolation>> {
    match stream.receive_with_descriptors(&mut [IoSliceMut::new(into)], descriptors) {
        TransferResult::Failed(ErrorKind::QuotaExceeded) => {
            Err(CloseReason::Protocol(VhostViolation::Descriptors))
        }
        result => Ok(Some(CloseReason::check(result)?).filter(|count| *count > 0)),
    }
}
