//! The UNIX socket of an endpoint, and the messages of its client.

use std::io::{ErrorKind, IoSliceMut};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;

use sockets::{ByteStream, FlushStatus, MessageQueue, ReceivedDescriptors, StreamAddress, TransferResult};
use target_shell::CloseReason;
use wire_vfio_user::{Header, MessageType};

/// File name of the socket in the endpoint's directory.
const NAME: &str = "cntrl";
/// Maximum file descriptors of a message (`max_msg_fds`).
pub(super) const DESCRIPTORS_MAX: usize = 8;
/// Maximum bytes of data of a message (`max_data_xfer_size`). No region is larger.
pub(super) const DATA_BYTES_MAX: u32 = 64 << 10;
/// Maximum bytes of a message's payload: data and the structure before it.
const PAYLOAD_BYTES_MAX: usize = DATA_BYTES_MAX as usize + 4096;
/// Maximum bytes of replies queued for a client that does not read.
const UNSENT_BYTES_MAX: usize = 1 << 20;
/// Maximum descriptors in these replies: a client asks once for each of a device's regions.
const UNSENT_DESCRIPTORS_MAX: usize = 64;

/// The address of the endpoint in a directory.
pub(crate) fn endpoint_address(directory: &str) -> StreamAddress {
    StreamAddress::Unix(Path::new(directory).join(NAME))
}

/// A request from the client.
#[derive(Debug)]
pub(super) struct ClientMessage {
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// A reply to the client, without the header.
#[derive(Debug, Default)]
pub(super) struct VfioUserReply {
    pub(super) payload: Vec<u8>,
    pub(super) descriptor: Option<Rc<OwnedFd>>,
}

/// Why a client is disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DisconnectReason {
    #[error("the client sent an invalid message: {0}")]
    InvalidMessage(&'static str),
    #[error("the client does not read its replies")]
    SendQueueFull,
    #[error("the client has not enabled its controller, is silent, and another client waits")]
    Silent,
}

/// The messages of a client: the request that is being received, and the replies that are not sent yet, up to a limit.
pub(super) struct ClientMessages {
    header_bytes: [u8; Header::SIZE],
    /// The message whose payload is being received.
    current: Option<ClientMessage>,
    filled: usize,
    /// Descriptors of the current message.
    descriptors: ReceivedDescriptors,
    unsent: MessageQueue<Rc<OwnedFd>>,
}

impl ClientMessages {
    pub(super) fn new() -> ClientMessages {
        ClientMessages {
            header_bytes: [0; Header::SIZE],
            current: None,
            filled: 0,
            descriptors: ReceivedDescriptors::new(DESCRIPTORS_MAX),
            unsent: MessageQueue::new(UNSENT_BYTES_MAX, UNSENT_DESCRIPTORS_MAX),
        }
    }

    /// The next message; `None` if it is not complete yet.
    pub(super) fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
    ) -> Result<Option<ClientMessage>, CloseReason<DisconnectReason>> {
        loop {
            if self.current.is_none() {
                if self.filled < Header::SIZE {
                    // Read exactly the header: file descriptors arrive with the first bytes of their message.
                    let count =
                        receive(stream, &mut self.header_bytes[self.filled..], &mut self.descriptors)?;
                    let Some(count) = count else { return Ok(None) };
                    self.filled += count;
                    continue;
                }
                let header = Header::decode(&self.header_bytes).map_err(|_| invalid("invalid header"))?;
                if header.payload_bytes() > PAYLOAD_BYTES_MAX {
                    return Err(invalid("it is too long"));
                }
                if header.kind == MessageType::Reply {
                    return Err(invalid("an unexpected reply"));
                }
                let payload = vec![0; header.payload_bytes()];
                self.current = Some(ClientMessage { header, payload, descriptors: Vec::new() });
                self.filled = 0;
            }
            if let Some(message) = &mut self.current
                && self.filled < message.payload.len()
            {
                let into = &mut message.payload[self.filled..];
                let Some(count) = receive(stream, into, &mut self.descriptors)? else {
                    return Ok(None);
                };
                self.filled += count;
                continue;
            }
            self.filled = 0;
            let message = self.current.take();
            return Ok(
                message.map(|message| ClientMessage { descriptors: self.descriptors.take(), ..message })
            );
        }
    }

    /// Queues a reply.
    pub(super) fn push(
        &mut self,
        header: &Header,
        reply: &VfioUserReply,
    ) -> Result<(), CloseReason<DisconnectReason>> {
        let descriptors = reply.descriptor.iter().cloned().collect();
        let pushed = self.unsent.push(&[&header.to_bytes(), &reply.payload], descriptors);
        pushed.map_err(|_| CloseReason::Protocol(DisconnectReason::SendQueueFull))
    }

    /// Sends queued replies until the socket's buffer is full.
    #[inline]
    pub(super) fn flush<S: ByteStream>(
        &mut self,
        stream: &mut S,
    ) -> Result<(), CloseReason<DisconnectReason>> {
        if self.unsent.is_empty() {
            return Ok(());
        }
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
) -> Result<Option<usize>, CloseReason<DisconnectReason>> {
    match stream.receive_with_descriptors(&mut [IoSliceMut::new(into)], descriptors) {
        TransferResult::Failed(ErrorKind::QuotaExceeded) => Err(invalid("it carries too many descriptors")),
        result => Ok(Some(CloseReason::check(result)?).filter(|count| *count > 0)),
    }
}

/// The reason to disconnect a client that sent an invalid message.
pub(super) fn invalid(what: &'static str) -> CloseReason<DisconnectReason> {
    CloseReason::Protocol(DisconnectReason::InvalidMessage(what))
}
