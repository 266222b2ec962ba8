//! Synchronous requests and replies over the socket.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sockets::{ReceivedDescriptors, Wait};
use wire_vfio_user::{Header, MessageType, VfioUserCommand};

use crate::VfioUserError;

/// Most descriptors in a request or reply.
pub(crate) const DESCRIPTORS_MAX: usize = 16;
/// Most bytes of a reply: 1 MiB of data and the structures before it.
const REPLY_BYTES_MAX: usize = (1 << 20) + 4096;

/// Of the time that passes, the part by which the time for replies grows again: a tenth.
const BUDGET_REFILL: u32 = 10;

/// The connection to a server: one outstanding request at a time. After a failure in the middle of a message
/// every call fails.
///
/// Calls block, perhaps a reactor, so the time that a server may take is bounded for all of them together:
/// `timeout` at once, and a tenth of the time in the long run. A server that never answers costs `timeout`
/// once, and one that answers each request late fails too.
pub(crate) struct ClientConnection {
    stream: UnixStream,
    timeout: Duration,
    /// What a reply may take for nothing.
    prompt: Duration,
    /// Time that replies may take from `refilled` on.
    budget: Duration,
    refilled: Instant,
    next_id: u16,
    broken: bool,
}

/// The payload and the descriptors of a reply.
pub(crate) struct ClientReply {
    pub(crate) payload: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

impl ClientConnection {
    pub(crate) fn new(
        stream: UnixStream,
        timeout: Duration,
        prompt: Duration,
    ) -> Result<ClientConnection, VfioUserError> {
        let refilled = Instant::now();
        Ok(ClientConnection { stream, timeout, prompt, budget: timeout, refilled, next_id: 1, broken: false })
    }

    /// Whether the connection is usable and the server has not closed it.
    pub(crate) fn is_open(&self) -> bool {
        !self.broken && !self.is_closed()
    }

    /// Whether the server has closed the connection.
    pub(crate) fn is_closed(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(&self.stream, rustix::event::PollFlags::RDHUP)];
        let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let polled = rustix::event::poll(&mut fds, Some(&none));
        let closed =
            rustix::event::PollFlags::RDHUP | rustix::event::PollFlags::HUP | rustix::event::PollFlags::ERR;
        polled.is_err() || fds[0].revents().intersects(closed)
    }

    /// Sends a request and waits for its reply.
    pub(crate) fn call(
        &mut self,
        command: VfioUserCommand,
        payload: &[&[u8]],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<ClientReply, VfioUserError> {
        if self.broken {
            return Err(VfioUserError::Disconnected);
        }
        let begun = Instant::now();
        let refill = (begun - self.refilled) / BUDGET_REFILL;
        (self.budget, self.refilled) = (self.timeout.min(self.budget + refill), begun);
        let deadline = begun + self.budget;
        let bytes: usize = payload.iter().map(|part| part.len()).sum();
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let header = Header::request(id, command, bytes);
        let mut message = Vec::with_capacity(Header::SIZE + bytes);
        message.extend(header.to_bytes());
        payload.iter().for_each(|part| message.extend(*part));
        // A failure before the complete reply leaves the stream at an unknown position.
        self.broken = true;
        self.send(command, &message, descriptors, deadline)?;
        let (reply, response) = loop {
            let (reply, response) = self.receive(command, deadline)?;
            match reply.kind {
                MessageType::Reply if reply.id == id => break (reply, response),
                MessageType::Reply => {
                    return Err(VfioUserError::ProtocolViolation(
                        command,
                        "the message ID belongs to another request",
                    ));
                }
                // DMA_READ or DMA_WRITE of the server. Memory access by message is not supported.
                MessageType::Request if reply.no_reply => {}
                MessageType::Request => {
                    let rejection = reply.failure(Errno::NOTSUP.raw_os_error() as u32);
                    self.send(command, &rejection.to_bytes(), &[], deadline)?;
                }
            }
        };
        self.broken = false;
        self.budget = self.budget.saturating_sub(begun.elapsed().saturating_sub(self.prompt));
        if reply.failed {
            let errno = i32::try_from(reply.errno).ok().filter(|errno| *errno > 0);
            return Err(VfioUserError::Refused(command, errno.unwrap_or(Errno::IO.raw_os_error())));
        }
        if reply.command != command.to_wire() {
            return Err(VfioUserError::ProtocolViolation(command, "the command differs from the request"));
        }
        Ok(response)
    }

    fn send(
        &self,
        command: VfioUserCommand,
        message: &[u8],
        descriptors: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<(), VfioUserError> {
        let mut descriptors = descriptors;
        let mut sent = 0;
        while sent < message.len() {
            self.stream
                .set_write_timeout(Some(self.remaining(command, deadline)?))
                .map_err(VfioUserError::Socket)?;
            let part = [IoSlice::new(&message[sent..])];
            match sockets::send_with_descriptors(&self.stream, &part, descriptors, Wait::Yes) {
                Ok(count) => {
                    sent += count;
                    // The descriptors were sent with the first bytes.
                    descriptors = &[];
                }
                Err(error) => self.check_error(command, error)?,
            }
        }
        Ok(())
    }

    fn receive(
        &self,
        command: VfioUserCommand,
        deadline: Instant,
    ) -> Result<(Header, ClientReply), VfioUserError> {
        let mut descriptors = ReceivedDescriptors::new(DESCRIPTORS_MAX);
        let mut bytes = [0; Header::SIZE];
        self.receive_exact(command, &mut bytes, &mut descriptors, deadline)?;
        let header = Header::decode(&bytes).map_err(|error| VfioUserError::InvalidReply(command, error))?;
        if header.payload_bytes() > REPLY_BYTES_MAX {
            return Err(VfioUserError::ProtocolViolation(command, "the message is too long"));
        }
        let mut payload = vec![0; header.payload_bytes()];
        self.receive_exact(command, &mut payload, &mut descriptors, deadline)?;
        Ok((header, ClientReply { payload, descriptors: descriptors.take() }))
    }

    fn receive_exact(
        &self,
        command: VfioUserCommand,
        into: &mut [u8],
        descriptors: &mut ReceivedDescriptors,
        deadline: Instant,
    ) -> Result<(), VfioUserError> {
        let mut filled = 0;
        while filled < into.len() {
            self.stream
                .set_read_timeout(Some(self.remaining(command, deadline)?))
                .map_err(VfioUserError::Socket)?;
            let mut part = [IoSliceMut::new(&mut into[filled..])];
            match sockets::receive_with_descriptors(&self.stream, &mut part, descriptors, Wait::Yes) {
                Ok(0) => return Err(VfioUserError::Disconnected),
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::QuotaExceeded => {
                    return Err(VfioUserError::ProtocolViolation(
                        command,
                        "the message has too many descriptors",
                    ));
                }
                Err(error) => self.check_error(command, error)?,
            }
        }
        Ok(())
    }

    /// The time until the deadline, never zero: a socket timeout of zero means no timeout.
    fn remaining(&self, command: VfioUserCommand, deadline: Instant) -> Result<Duration, VfioUserError> {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining < Duration::from_micros(1) {
            return Err(VfioUserError::Timeout(command, self.timeout));
        }
        Ok(remaining)
    }

    fn check_error(&self, command: VfioUserCommand, error: io::Error) -> Result<(), VfioUserError> {
        match error.kind() {
            ErrorKind::Interrupted => Ok(()),
            ErrorKind::WouldBlock => Err(VfioUserError::Timeout(command, self.timeout)),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Err(VfioUserError::Disconnected),
            _ => Err(VfioUserError::Socket(error)),
        }
    }
}
