//! One request and its reply over the socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use wire_vfio_user::{Command, Header, Kind};

use crate::ClientError;

/// Most descriptors that a message of ours carries, and that a reply may carry.
pub(crate) const DESCRIPTORS_MAX: usize = 16;
/// Most bytes of a reply: data and what stands before it.
const REPLY_BYTES_MAX: usize = (1 << 20) + 4096;

/// A connection. After a failure that leaves the stream in the middle of a message, every call fails.
pub(crate) struct Link {
    stream: UnixStream,
    timeout: Duration,
    next_id: u16,
    broken: bool,
}

/// What the server answered.
pub(crate) struct Answer {
    pub(crate) payload: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

impl Link {
    pub(crate) fn new(stream: UnixStream, timeout: Duration) -> Result<Link, ClientError> {
        Ok(Link { stream, timeout, next_id: 1, broken: false })
    }

    /// Whether the server still has its end open, as far as the kernel knows.
    pub(crate) fn is_open(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(&self.stream, rustix::event::PollFlags::RDHUP)];
        let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let polled = rustix::event::poll(&mut fds, Some(&none));
        let gone =
            rustix::event::PollFlags::RDHUP | rustix::event::PollFlags::HUP | rustix::event::PollFlags::ERR;
        !self.broken && polled.is_ok() && !fds[0].revents().intersects(gone)
    }

    /// Sends a request and waits for its reply.
    pub(crate) fn call(
        &mut self,
        command: Command,
        payload: &[&[u8]],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Answer, ClientError> {
        if self.broken {
            return Err(ClientError::Gone);
        }
        let deadline = Instant::now() + self.timeout;
        let bytes: usize = payload.iter().map(|part| part.len()).sum();
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let header = Header::request(id, command, bytes);
        let mut message = Vec::with_capacity(Header::SIZE + bytes);
        message.extend(header.to_bytes());
        payload.iter().for_each(|part| message.extend(*part));
        // Whatever goes wrong in here leaves the stream where nobody knows it.
        self.broken = true;
        self.send(command, &message, descriptors, deadline)?;
        let (reply, answer) = loop {
            let (reply, answer) = self.receive(command, deadline)?;
            match reply.kind {
                Kind::Reply if reply.id == id => break (reply, answer),
                Kind::Reply => {
                    return Err(ClientError::Nonsense(command, "it answers another request"));
                }
                // A server that wants to read or write our memory by message. None of it is offered.
                Kind::Request if reply.no_reply => {}
                Kind::Request => {
                    let refusal = reply.failure(Errno::NOTSUP.raw_os_error() as u32);
                    self.send(command, &refusal.to_bytes(), &[], deadline)?;
                }
            }
        };
        self.broken = false;
        if reply.failed {
            let errno = i32::try_from(reply.errno).ok().filter(|errno| *errno > 0);
            return Err(ClientError::Refused(command, errno.unwrap_or(Errno::IO.raw_os_error())));
        }
        if reply.command != command.to_wire() {
            return Err(ClientError::Nonsense(command, "it is for another command"));
        }
        Ok(answer)
    }

    fn send(
        &self,
        command: Command,
        message: &[u8],
        descriptors: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<(), ClientError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            let fits = control.push(SendAncillaryMessage::ScmRights(descriptors));
            assert!(fits, "{} descriptors in one message", descriptors.len());
        }
        let mut sent = 0;
        while sent < message.len() {
            self.stream
                .set_write_timeout(Some(self.left(command, deadline)?))
                .map_err(ClientError::Socket)?;
            let part = [IoSlice::new(&message[sent..])];
            match rustix::net::sendmsg(&self.stream, &part, &mut control, SendFlags::NOSIGNAL) {
                Ok(count) => {
                    sent += count;
                    // The descriptors went with the first bytes.
                    control.clear();
                }
                Err(errno) => self.failed(command, errno)?,
            }
        }
        Ok(())
    }

    fn receive(&self, command: Command, deadline: Instant) -> Result<(Header, Answer), ClientError> {
        let mut descriptors = Vec::new();
        let mut bytes = [0; Header::SIZE];
        self.fill(command, &mut bytes, &mut descriptors, deadline)?;
        let header = Header::decode(&bytes).map_err(|error| ClientError::Answer(command, error))?;
        if header.payload_bytes() > REPLY_BYTES_MAX {
            return Err(ClientError::Nonsense(command, "it is longer than any reply"));
        }
        let mut payload = vec![0; header.payload_bytes()];
        self.fill(command, &mut payload, &mut descriptors, deadline)?;
        Ok((header, Answer { payload, descriptors }))
    }

    fn fill(
        &self,
        command: Command,
        into: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<(), ClientError> {
        let mut filled = 0;
        while filled < into.len() {
            self.stream.set_read_timeout(Some(self.left(command, deadline)?)).map_err(ClientError::Socket)?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut part = [IoSliceMut::new(&mut into[filled..])];
            match rustix::net::recvmsg(&self.stream, &mut part, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) if received.bytes == 0 => return Err(ClientError::Gone),
                Ok(received) => {
                    filled += received.bytes;
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(rights) = message {
                            descriptors.extend(rights);
                        }
                    }
                    if descriptors.len() > DESCRIPTORS_MAX {
                        return Err(ClientError::Nonsense(command, "it carries too many descriptors"));
                    }
                }
                Err(errno) => self.failed(command, errno)?,
            }
        }
        Ok(())
    }

    /// The time that is left, which is never none: the kernel takes none for ever.
    fn left(&self, command: Command, deadline: Instant) -> Result<Duration, ClientError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left < Duration::from_micros(1) {
            return Err(ClientError::Timeout(command, self.timeout));
        }
        Ok(left)
    }

    fn failed(&self, command: Command, errno: Errno) -> Result<(), ClientError> {
        match errno {
            Errno::INTR => Ok(()),
            Errno::AGAIN => Err(ClientError::Timeout(command, self.timeout)),
            Errno::PIPE | Errno::CONNRESET => Err(ClientError::Gone),
            errno => Err(ClientError::Socket(errno.into())),
        }
    }
}
