//! The UNIX socket of an endpoint, and the message stream of its client.

use std::io::{self, ErrorKind, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use sockets::{
    FlushStatus, MessageQueue, ReceivedDescriptors, SocketStream, TransferResult, UnixListenSocket, Wait,
};
use wire_vfio_user::{Header, MessageType};

/// File name of the socket in the endpoint's directory.
const NAME: &str = "cntrl";
/// Permission bits of the socket's file.
const MODE: u32 = 0o600;
/// Length of the accept queue: one client is served, the others wait.
const BACKLOG: i32 = 128;
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

/// Listens on the socket `cntrl` in an existing directory.
pub(super) fn listen(directory: &str) -> io::Result<UnixListenSocket> {
    let directory = Path::new(directory);
    if !directory.is_dir() {
        return Err(io::Error::new(ErrorKind::NotFound, "the directory does not exist"));
    }
    UnixListenSocket::bind(&directory.join(NAME), MODE, BACKLOG)
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
pub(super) enum DisconnectReason {
    #[error("the client has disconnected")]
    Closed,
    #[error("the client sent an invalid message: {0}")]
    InvalidMessage(&'static str),
    #[error("the client does not read its replies")]
    SendQueueFull,
    #[error("the client has not enabled its controller, is silent, and another client waits")]
    Silent,
}

/// The non-blocking connection to a client. Replies that the socket does not accept are queued, up to a limit.
pub(super) struct ClientSocket {
    stream: SocketStream,
    header_bytes: [u8; Header::SIZE],
    /// The message whose payload is being received.
    current: Option<ClientMessage>,
    filled: usize,
    /// Descriptors of the current message.
    descriptors: ReceivedDescriptors,
    unsent: MessageQueue<Rc<OwnedFd>>,
}

impl ClientSocket {
    pub(super) fn new(stream: SocketStream) -> ClientSocket {
        ClientSocket {
            stream,
            header_bytes: [0; Header::SIZE],
            current: None,
            filled: 0,
            descriptors: ReceivedDescriptors::new(DESCRIPTORS_MAX),
            unsent: MessageQueue::new(UNSENT_BYTES_MAX, UNSENT_DESCRIPTORS_MAX),
        }
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// The next message; `None` if it is not complete yet.
    pub(super) fn receive(&mut self) -> Result<Option<ClientMessage>, DisconnectReason> {
        loop {
            if self.current.is_none() {
                if self.filled < Header::SIZE {
                    // Read exactly the header: file descriptors arrive with the first bytes of their message.
                    let count =
                        receive(&self.stream, &mut self.header_bytes[self.filled..], &mut self.descriptors)?;
                    let Some(count) = count else { return Ok(None) };
                    self.filled += count;
                    continue;
                }
                let header = Header::decode(&self.header_bytes)
                    .map_err(|_| DisconnectReason::InvalidMessage("invalid header"))?;
                if header.payload_bytes() > PAYLOAD_BYTES_MAX {
                    return Err(DisconnectReason::InvalidMessage("it is too long"));
                }
                if header.kind == MessageType::Reply {
                    return Err(DisconnectReason::InvalidMessage("an unexpected reply"));
                }
                let payload = vec![0; header.payload_bytes()];
                self.current = Some(ClientMessage { header, payload, descriptors: Vec::new() });
                self.filled = 0;
            }
            if let Some(message) = &mut self.current
                && self.filled < message.payload.len()
            {
                let into = &mut message.payload[self.filled..];
                let Some(count) = receive(&self.stream, into, &mut self.descriptors)? else {
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

    /// Sends a reply, or queues what the socket does not accept.
    pub(super) fn send(&mut self, header: &Header, reply: &VfioUserReply) -> Result<(), DisconnectReason> {
        let descriptors = reply.descriptor.iter().cloned().collect();
        let pushed = self.unsent.push(&[&header.to_bytes(), &reply.payload], descriptors);
        pushed.map_err(|_| DisconnectReason::SendQueueFull)?;
        self.flush()
    }

    /// Sends queued replies until the socket's buffer is full.
    pub(super) fn flush(&mut self) -> Result<(), DisconnectReason> {
        let stream = &self.stream;
        let flushed = self.unsent.flush(|parts, descriptors| {
            TransferResult::of(|| sockets::send_with_descriptors(stream, parts, descriptors, Wait::No))
        });
        match flushed {
            FlushStatus::Empty | FlushStatus::Blocked => Ok(()),
            FlushStatus::Failed(_) => Err(DisconnectReason::Closed),
        }
    }
}

/// Receives bytes and the file descriptors that come with them; `None` if there are none yet.
fn receive(
    stream: &SocketStream,
    into: &mut [u8],
    descriptors: &mut ReceivedDescriptors,
) -> Result<Option<usize>, DisconnectReason> {
    let parts = &mut [IoSliceMut::new(into)];
    match TransferResult::of(|| sockets::receive_with_descriptors(stream, parts, descriptors, Wait::No)) {
        TransferResult::Bytes(0) | TransferResult::Closed => Err(DisconnectReason::Closed),
        TransferResult::Bytes(count) => Ok(Some(count)),
        TransferResult::Blocked => Ok(None),
        TransferResult::Failed(ErrorKind::QuotaExceeded) => {
            Err(DisconnectReason::InvalidMessage("it carries too many descriptors"))
        }
        TransferResult::Failed(_) => Err(DisconnectReason::Closed),
    }
}
