//! File descriptors that travel with the bytes of a UNIX stream (`SCM_RIGHTS`, `unix(7)`).
//!
//! The kernel attaches descriptors to the first byte of a `sendmsg` and delivers them with a read that includes this
//! byte; such a read ends before the next byte that has descriptors.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::{FlushStatus, TransferResult};

/// Maximum number of descriptors in one message (the kernel's `SCM_MAX_FD`).
pub const DESCRIPTORS_PER_MESSAGE_MAX: usize = 253;

const CONTROL_BYTES_MAX: usize = rustix::cmsg_space!(ScmRights(DESCRIPTORS_PER_MESSAGE_MAX));

/// Whether a call on a socket waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It returns `WouldBlock` instead of waiting.
    No,
    /// It waits unless the socket is non-blocking, up to the socket's timeout.
    Yes,
}

/// Descriptors that were received on a connection and not taken yet, up to a limit. Dropping it closes them.
#[derive(Debug)]
pub struct ReceivedDescriptors {
    descriptors: VecDeque<OwnedFd>,
    max: usize,
}

impl ReceivedDescriptors {
    /// Creates an empty list for at most `max` descriptors.
    pub fn new(max: usize) -> ReceivedDescriptors {
        ReceivedDescriptors { descriptors: VecDeque::new(), max }
    }

    /// Takes the oldest descriptor.
    pub fn pop(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop_front()
    }

    /// Takes all descriptors, the oldest first.
    pub fn take(&mut self) -> Vec<OwnedFd> {
        self.descriptors.drain(..).collect()
    }

    /// Number of descriptors.
    pub fn len(&self) -> usize {
        self.descriptors.len()
    }

    /// Whether there is no descriptor.
    pub fn is_empty(&self) -> bool {
        self.descriptors.is_empty()
    }

    /// Number of descriptors that it takes before it is full.
    pub fn room(&self) -> usize {
        self.max - self.descriptors.len()
    }

    /// Adds the descriptors of one message, or closes them all if there is no room.
    pub(crate) fn extend(&mut self, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        if descriptors.len() > self.room() {
            return Err(too_many());
        }
        self.descriptors.extend(descriptors);
        Ok(())
    }
}

/// Writes from `parts`, in order, and passes `descriptors` with the first byte. Returns the number of bytes written;
/// unless it fails, all descriptors are on their way, and what remains of the parts is sent without them.
///
/// # Errors
/// `WouldBlock` if nothing could be written, `InvalidInput` for more than [`DESCRIPTORS_PER_MESSAGE_MAX`]
/// descriptors or without a byte to send them with, and those of `sendmsg(2)`: `ETOOMANYREFS` if too many
/// descriptors of this user are in flight.
pub fn send_with_descriptors(
    socket: impl AsFd,
    parts: &[IoSlice<'_>],
    descriptors: &[BorrowedFd<'_>],
    wait: Wait,
) -> io::Result<usize> {
    let no_bytes = || parts.iter().all(|part| part.is_empty());
    if descriptors.len() > DESCRIPTORS_PER_MESSAGE_MAX || !descriptors.is_empty() && no_bytes() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES_MAX];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let pushed = control.push(SendAncillaryMessage::ScmRights(descriptors));
        assert!(pushed, "there is room for {DESCRIPTORS_PER_MESSAGE_MAX} descriptors");
    }
    let flags = match wait {
        Wait::No => SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        Wait::Yes => SendFlags::NOSIGNAL,
    };
    Ok(rustix::net::sendmsg(socket, parts, &mut control, flags)?)
}

/// Reads into `parts`, in order, and adds the descriptors that come with the bytes to `descriptors`. Returns the
/// number of bytes; 0 at the end of the stream. The descriptors are close-on-exec.
///
/// # Errors
/// `QuotaExceeded` if descriptors were closed because they exceed the limit of `descriptors`, or because this process
/// may open no more; their message cannot be understood, so the connection should be closed. `WouldBlock`, and those
/// of `recvmsg(2)`.
pub fn receive_with_descriptors(
    socket: impl AsFd,
    parts: &mut [IoSliceMut<'_>],
    descriptors: &mut ReceivedDescriptors,
    wait: Wait,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES_MAX];
    // The kernel opens only descriptors for which there is room here, and closes the others.
    let room = descriptors.room().min(DESCRIPTORS_PER_MESSAGE_MAX);
    let bytes = if room == 0 { 0 } else { rustix::cmsg_space!(ScmRights(room)) };
    let mut control = RecvAncillaryBuffer::new(&mut space[..bytes]);
    let flags = match wait {
        Wait::No => RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        Wait::Yes => RecvFlags::CMSG_CLOEXEC,
    };
    let received = rustix::net::recvmsg(socket, parts, &mut control, flags)?;
    let mut arrived = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            arrived.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(too_many());
    }
    descriptors.extend(arrived)?;
    Ok(received.bytes)
}

fn too_many() -> io::Error {
    io::ErrorKind::QuotaExceeded.into()
}

/// Messages with descriptors that are being sent on a stream, up to a limit of bytes.
///
/// [`push`](Self::push) a message, then [`flush`](Self::flush) until it returns [`FlushStatus::Empty`]; after
/// [`FlushStatus::Blocked`], flush again when the connection is writable. Descriptors are sent with the first byte of
/// their message and then dropped, however often the message is interrupted. `D` is an `OwnedFd`, or an `Rc` of one.
#[derive(Debug)]
pub struct MessageQueue<D> {
    bytes: VecDeque<u8>,
    /// Descriptors by the position in the stream of the byte that carries them.
    attached: VecDeque<(u64, Vec<D>)>,
    /// Position in the stream of the first byte of `bytes`.
    position: u64,
    /// Number of descriptors.
    descriptors: usize,
    bytes_max: usize,
    descriptors_max: usize,
}

/// The message does not fit in its [`MessageQueue`], or has too many descriptors or no byte to carry them.
#[derive(Debug)]
pub struct RejectedMessage;

impl<D: AsFd> MessageQueue<D> {
    /// Creates an empty queue for messages of `bytes_max` bytes with `descriptors_max` descriptors together.
    pub fn new(bytes_max: usize, descriptors_max: usize) -> MessageQueue<D> {
        MessageQueue {
            bytes: VecDeque::new(),
            attached: VecDeque::new(),
            position: 0,
            descriptors: 0,
            bytes_max,
            descriptors_max,
        }
    }

    /// Queues a copy of `parts`, as one message with `descriptors`.
    ///
    /// # Errors
    /// The message is not queued, and the descriptors are dropped.
    pub fn push(&mut self, parts: &[&[u8]], descriptors: Vec<D>) -> Result<(), RejectedMessage> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let fits = self.bytes.len().checked_add(bytes).is_some_and(|bytes| bytes <= self.bytes_max);
        let total = self.descriptors + descriptors.len();
        let carried =
            descriptors.len() <= DESCRIPTORS_PER_MESSAGE_MAX && (descriptors.is_empty() || bytes > 0);
        if !fits || !carried || total > self.descriptors_max {
            return Err(RejectedMessage);
        }
        self.descriptors = total;
        if !descriptors.is_empty() {
            self.attached.push_back((self.position + self.bytes.len() as u64, descriptors));
        }
        parts.iter().for_each(|part| self.bytes.extend(*part));
        Ok(())
    }

    /// Whether everything was sent.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Sends as much as `send` accepts. `send` gets bytes and the descriptors of the first of them, and does what
    /// [`Network::send_with_descriptors`](crate::Network::send_with_descriptors) does.
    pub fn flush(
        &mut self,
        mut send: impl FnMut(&[IoSlice<'_>], &[BorrowedFd<'_>]) -> TransferResult,
    ) -> FlushStatus {
        while !self.bytes.is_empty() {
            let mut attached = self.attached.iter();
            let first = attached.next();
            let (descriptors, next) = match first {
                Some((at, descriptors)) if *at == self.position => (descriptors.as_slice(), attached.next()),
                other => (&[][..], other),
            };
            // A call ends before the next byte with descriptors.
            let offered = next.map_or(self.bytes.len(), |(at, _)| (at - self.position) as usize);
            let (head, tail) = self.bytes.as_slices();
            let head = &head[..head.len().min(offered)];
            let parts = [IoSlice::new(head), IoSlice::new(&tail[..offered - head.len()])];
            let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            match send(&parts, &borrowed) {
                TransferResult::Bytes(count) => {
                    if !borrowed.is_empty() {
                        self.descriptors -= borrowed.len();
                        self.attached.pop_front();
                    }
                    self.bytes.drain(..count);
                    self.position += count as u64;
                }
                TransferResult::Blocked => return FlushStatus::Blocked,
                TransferResult::Closed => return FlushStatus::Failed(io::ErrorKind::BrokenPipe),
                TransferResult::Failed(kind) => return FlushStatus::Failed(kind),
            }
        }
        FlushStatus::Empty
    }
}
