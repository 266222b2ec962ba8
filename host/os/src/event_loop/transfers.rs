//! Socket transfers whose memory the kernel uses until it says otherwise: zero-copy sends, and receives into buffers
//! that the kernel selects.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use dma::{Buffer, Pool};
use slots::Slot;

use super::buffer_group::BufferGroup;
use super::{BackendState, EventClient, EventCompletion, EventLoopInner, PendingOperation, RawCompletion};

/// What the kernel offers for sockets besides readiness; probed when the event loop is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketCapabilities {
    /// [`EventClient::submit_send`]: io_uring of Linux 6.1 or later.
    pub zero_copy_send: bool,
    /// [`EventClient::start_receive`]: io_uring of Linux 6.0 or later.
    pub multishot_receive: bool,
}

/// A part of the data of a send, in order.
#[derive(Debug)]
pub enum SendPart {
    /// `length` bytes from `start` of a buffer, which may be external memory.
    Buffer {
        /// The buffer.
        buffer: Buffer,
        /// Offset of the first byte.
        start: u32,
        /// Number of bytes.
        length: u32,
    },
    /// All bytes of a vector, such as a header.
    Bytes(Vec<u8>),
}

impl SendPart {
    /// Number of bytes to send.
    pub fn len(&self) -> usize {
        match self {
            SendPart::Buffer { length, .. } => *length as usize,
            SendPart::Bytes(bytes) => bytes.len(),
        }
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory of the bytes from `skip`, valid as long as this part is neither changed nor dropped.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    fn memory(&self, skip: usize) -> libc::iovec {
        let (start, length) = match self {
            SendPart::Buffer { buffer, start, length } => {
                let inside = u64::from(*start) + u64::from(*length) <= buffer.len() as u64;
                assert!(inside, "{length} bytes from {start} of a buffer of {}", buffer.len());
                (buffer.as_ptr().cast_const().wrapping_add(*start as usize), *length as usize)
            }
            SendPart::Bytes(bytes) => (bytes.as_ptr(), bytes.len()),
        };
        let skip = skip.min(length);
        libc::iovec { iov_base: start.wrapping_add(skip).cast_mut().cast(), iov_len: length - skip }
    }
}

/// Maximum number of parts of a send (`UIO_MAXIOV`).
pub const SEND_PARTS_MAX: usize = 1024;

/// An event of a zero-copy send.
#[derive(Debug)]
pub enum SendEvent {
    /// The socket accepted `result` bytes, or failed with a negative error number. The next send on the socket may be
    /// submitted, but the memory is still used.
    Accepted {
        /// The tag of the send.
        tag: u64,
        /// Number of bytes; fewer than submitted only if the connection then failed.
        result: i32,
    },
    /// The kernel uses the memory no longer. Last event of a send.
    Released {
        /// The tag of the send.
        tag: u64,
        /// The parts.
        parts: Vec<SendPart>,
        /// The kernel copied the data after all, as it does on the loopback interface.
        copied: bool,
    },
}

/// A send that was not submitted; returns its parts.
#[derive(Debug)]
pub struct RejectedSend {
    /// `WouldBlock` at the limit of operations, `Unsupported` without the capability, `InvalidInput` for more than
    /// [`SEND_PARTS_MAX`] parts or no bytes.
    pub reason: io::ErrorKind,
    /// The parts.
    pub parts: Vec<SendPart>,
}

/// Identifies the buffers of a client for [`EventClient::start_receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferGroupId(pub(super) Slot);

/// Identifies a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveId(Slot);

/// A zero-copy send from submission to its last completion. It owns everything that the kernel uses: the socket until
/// the entry is submitted, the message header and vectors while the kernel retries, and the data until it is
/// acknowledged.
pub(super) struct SendOperation {
    pub(super) client: Slot,
    tag: u64,
    socket: Rc<OwnedFd>,
    parts: Vec<SendPart>,
    /// Points into `parts`. Only the kernel reads it; a box does not move its contents.
    _vectors: Box<[libc::iovec]>,
    /// Points to the vectors.
    header: libc::msghdr,
}

/// A receive from its start to its last completion. The buffers are owned by the group, which stays until then.
pub(super) struct ReceiveOperation {
    pub(super) client: Slot,
    tag: u64,
    socket: Rc<OwnedFd>,
    group: Slot,
    /// Whether the kernel executes it. Otherwise it waits for buffers.
    armed: bool,
    /// It was stopped, or its client or the event loop was dropped: it is not armed again.
    stopping: bool,
}

/// Flag of a send's notification result: the data was copied (`IORING_NOTIF_USAGE_ZC_COPIED`).
const ZC_COPIED: u32 = 1 << 31;
/// How long a core sleeps at most while a receive waits for buffers, which another core may release.
pub(super) const STARVED_SLEEP_NS: u64 = 1_000_000;

/// Copies parts to a socket without waiting, from byte `skip` of all of them; returns the number of bytes. The fallback
/// for [`EventClient::submit_send`].
///
/// # Errors
/// `WouldBlock`, `InvalidInput` for more than [`SEND_PARTS_MAX`] parts, and those of `sendmsg(2)`.
pub fn send_parts(socket: BorrowedFd<'_>, parts: &[SendPart], skip: usize) -> io::Result<usize> {
    if parts.len() > SEND_PARTS_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let vectors = vectors_of(parts, skip);
    let header = message_header(&vectors);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the header and the vectors are local, and the memory that they name belongs to `parts`, which are
    // borrowed until the call returns; the kernel only reads it.
    let result = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, flags) };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn vectors_of(parts: &[SendPart], mut skip: usize) -> Box<[libc::iovec]> {
    let vector = |part: &SendPart| {
        let vector = part.memory(skip);
        skip = skip.saturating_sub(part.len());
        vector
    };
    parts.iter().map(vector).collect()
}

fn message_header(vectors: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: null pointers and zeroes are valid values of all fields, and mean that there is no address and no
    // control message.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = vectors.as_ptr().cast_mut();
    header.msg_iovlen = vectors.len() as _;
    header
}

impl SendOperation {
    pub(super) fn fd(&self) -> i32 {
        self.socket.as_raw_fd()
    }

    /// Valid as long as the operation is in its box.
    pub(super) fn header(&self) -> *const libc::msghdr {
        &raw const self.header
    }
}

impl EventClient {
    /// What the kernel offers for sockets.
    pub fn socket_capabilities(&self) -> SocketCapabilities {
        match &self.inner.borrow().backend {
            BackendState::Uring(uring) => uring.capabilities,
            BackendState::Epoll(_) | BackendState::Virtual(_) => SocketCapabilities::default(),
        }
    }

    /// Submits a zero-copy send of all parts on a TCP socket (`IORING_OP_SENDMSG_ZC`). [`reap_sends`] returns its
    /// events and, with the last of them, the parts; until then the event loop owns them, whatever becomes of the
    /// socket and of this client. The socket must be in blocking mode: the kernel waits for it and sends everything.
    ///
    /// Sends on one socket may overtake each other: submit the next after [`SendEvent::Accepted`]. Kernel memory
    /// apart, a send is cheaper than a copy for some 10 KiB and more.
    ///
    /// # Panics
    /// If a part's range is not inside its buffer.
    ///
    /// [`reap_sends`]: Self::reap_sends
    pub fn submit_send(
        &self,
        socket: &Rc<OwnedFd>,
        parts: Vec<SendPart>,
        tag: u64,
    ) -> Result<(), RejectedSend> {
        let mut inner = self.inner.borrow_mut();
        let EventLoopInner { backend, pending, .. } = &mut *inner;
        let uring = match backend {
            BackendState::Uring(uring) if uring.capabilities.zero_copy_send => uring,
            _ => return Err(RejectedSend { reason: io::ErrorKind::Unsupported, parts }),
        };
        if parts.len() > SEND_PARTS_MAX || parts.iter().all(SendPart::is_empty) {
            return Err(RejectedSend { reason: io::ErrorKind::InvalidInput, parts });
        }
        let vectors = vectors_of(&parts, 0);
        let header = message_header(&vectors);
        let (client, socket) = (self.id, socket.clone());
        let send = Box::new(SendOperation { client, tag, socket, parts, _vectors: vectors, header });
        let slot = match pending.insert(PendingOperation::Send(send)) {
            Ok(slot) => slot,
            Err(PendingOperation::Send(send)) => {
                return Err(RejectedSend { reason: io::ErrorKind::WouldBlock, parts: send.parts });
            }
            Err(_) => unreachable!("a full slab returns the operation"),
        };
        let Some(PendingOperation::Send(send)) = pending.get(slot) else {
            unreachable!("the send was just inserted")
        };
        uring.send(send, slot.to_bits());
        inner.operations_in_flight += 1;
        Ok(())
    }

    /// Appends the events of this client's sends since the last call to `out`; returns their number.
    pub fn reap_sends(&self, out: &mut Vec<SendEvent>) -> usize {
        let mut inner = self.inner.borrow_mut();
        let Some(mine) = inner.clients.get_mut(self.id) else { return 0 };
        let count = mine.sends.len();
        out.append(&mut mine.sends);
        count
    }

    /// Registers `count` buffers of `bytes` bytes each, from `pool`, for receives of this client. They are replaced
    /// from the pool as they are used; dropping the client returns them, once no receive uses them.
    ///
    /// # Errors
    /// `Unsupported` without the capability; `InvalidInput` unless `count` is a power of two of at most 32,768 and a
    /// buffer can have `bytes` bytes; `OutOfMemory` if the pool cannot give the ring's memory and one buffer.
    pub fn provide_buffers(&self, pool: &Pool, count: u16, bytes: usize) -> io::Result<BufferGroupId> {
        let mut inner = self.inner.borrow_mut();
        let EventLoopInner { backend, groups, .. } = &mut *inner;
        let uring = match backend {
            BackendState::Uring(uring) if uring.capabilities.multishot_receive => uring,
            _ => return Err(io::ErrorKind::Unsupported.into()),
        };
        let group = BufferGroup::new(self.id, pool, count, bytes)?;
        let slot = groups.insert(group).map_err(|_| io::Error::from(io::ErrorKind::QuotaExceeded))?;
        let Some(group) = groups.get_mut(slot) else { unreachable!("the group was just inserted") };
        if let Err(error) = uring.register_group(group, slot.index() as u16) {
            groups.remove(slot);
            return Err(error);
        }
        Ok(BufferGroupId(slot))
    }

    /// Receives from a socket until the stream ends (multishot `IORING_OP_RECV`), into buffers of the group. Each
    /// [`EventCompletion`] with `tag` returns a buffer with the next bytes of the stream, `result` being their number;
    /// the last has no buffer: `result` is 0 at the end of the stream, `-ECANCELED` after
    /// [`stop_receive`](Self::stop_receive), or another negative error number. While the pool has no buffer, nothing
    /// is received. The socket must be in blocking mode.
    ///
    /// # Errors
    /// `NotFound` for a group that does not exist, `QuotaExceeded` at the limit of operations.
    pub fn start_receive(
        &self,
        socket: &Rc<OwnedFd>,
        group: BufferGroupId,
        tag: u64,
    ) -> io::Result<ReceiveId> {
        let mut inner = self.inner.borrow_mut();
        let EventLoopInner { pending, groups, .. } = &mut *inner;
        let Some(entry) = groups.get_mut(group.0) else { return Err(io::ErrorKind::NotFound.into()) };
        let (client, socket, group) = (self.id, socket.clone(), group.0);
        let receive = ReceiveOperation { client, tag, socket, group, armed: false, stopping: false };
        let slot = pending
            .insert(PendingOperation::Receive(Box::new(receive)))
            .map_err(|_| io::Error::from(io::ErrorKind::QuotaExceeded))?;
        entry.receives += 1;
        inner.operations_in_flight += 1;
        inner.arm_receive(slot);
        Ok(ReceiveId(slot))
    }

    /// Ends a receive. What was received before is still returned, then the last completion.
    pub fn stop_receive(&self, receive: ReceiveId) {
        self.inner.borrow_mut().stop_receive(receive.0);
    }
}

impl EventLoopInner {
    fn arm_receive(&mut self, slot: Slot) {
        let Some(PendingOperation::Receive(receive)) = self.pending.get_mut(slot) else { return };
        receive.armed = true;
        if let BackendState::Uring(uring) = &mut self.backend {
            uring.receive(receive.socket.as_raw_fd(), receive.group.index() as u16, slot.to_bits());
        }
    }

    pub(super) fn stop_receive(&mut self, slot: Slot) {
        let Some(PendingOperation::Receive(receive)) = self.pending.get_mut(slot) else { return };
        receive.stopping = true;
        if receive.armed {
            self.cancel(slot);
        } else {
            self.end_receive(slot, -libc::ECANCELED);
        }
    }

    pub(super) fn cancel(&mut self, slot: Slot) {
        if let BackendState::Uring(uring) = &mut self.backend {
            uring.cancel(slot.to_bits());
        }
    }

    /// Removes a receive that the kernel no longer executes, and its group if it was the last user.
    fn end_receive(&mut self, slot: Slot, result: i32) {
        let Some(PendingOperation::Receive(receive)) = self.pending.remove(slot) else { return };
        self.operations_in_flight -= 1;
        if let Some(group) = self.groups.get_mut(receive.group) {
            group.receives -= 1;
        }
        self.remove_unused_group(receive.group);
        self.deliver(receive.client, EventCompletion { tag: receive.tag, result, data: None });
    }

    /// Removes a group whose client was dropped and whose receives have all ended.
    pub(super) fn remove_unused_group(&mut self, slot: Slot) {
        let Some(group) = self.groups.get(slot) else { return };
        if group.receives > 0 || self.clients.get(group.client).is_some() {
            return;
        }
        if let BackendState::Uring(uring) = &mut self.backend {
            uring.unregister_group(slot.index() as u16);
        }
        self.groups.remove(slot);
    }

    /// A completion of a send: its result or, after a result with `more`, the notification.
    pub(super) fn on_send(&mut self, slot: Slot, raw: &RawCompletion) {
        let Some(PendingOperation::Send(send)) = self.pending.get(slot) else { return };
        let (client, tag) = (send.client, send.tag);
        let is_notification = io_uring::cqueue::notif(raw.flags);
        if !is_notification {
            self.deliver_send(client, SendEvent::Accepted { tag, result: raw.result });
        }
        if raw.more() {
            return;
        }
        let Some(PendingOperation::Send(send)) = self.pending.remove(slot) else { return };
        self.operations_in_flight -= 1;
        let copied = is_notification && raw.result as u32 & ZC_COPIED != 0;
        self.deliver_send(client, SendEvent::Released { tag, parts: send.parts, copied });
    }

    fn deliver_send(&mut self, client: Slot, event: SendEvent) {
        if let Some(queues) = self.clients.get_mut(client) {
            queues.sends.push(event);
        }
    }

    /// A completion of a receive.
    pub(super) fn on_receive(&mut self, slot: Slot, raw: &RawCompletion) {
        let Some(PendingOperation::Receive(receive)) = self.pending.get_mut(slot) else { return };
        let (client, tag, stopping) = (receive.client, receive.tag, receive.stopping);
        receive.armed = raw.more();
        if let Some(id) = io_uring::cqueue::buffer_select(raw.flags)
            && let Some(group) = self.groups.get_mut(receive.group)
        {
            let buffer = group.take(id, usize::try_from(raw.result).unwrap_or(0));
            self.short_of_buffers |= !group.replenish();
            if let Some(buffer) = buffer {
                let result = raw.result;
                self.deliver(client, EventCompletion { tag, result, data: Some(buffer.into()) });
            }
        }
        if raw.more() {
            return;
        }
        // The kernel ended the receive: after an error or at the end of the stream for good; for lack of buffers until
        // there are some; otherwise because the completion queue was full.
        match raw.result {
            _ if stopping => self.end_receive(slot, -libc::ECANCELED),
            result if result == -libc::ENOBUFS => self.short_of_buffers = true,
            result if result > 0 => self.arm_receive(slot),
            result => self.end_receive(slot, result),
        }
    }

    /// Gives buffers to groups that lack some, and continues receives that waited for them.
    #[cold]
    pub(super) fn replenish(&mut self) {
        self.short_of_buffers = false;
        for (_, group) in self.groups.iter_mut() {
            self.short_of_buffers |= !group.replenish();
        }
        let groups = &self.groups;
        let can_continue = |pending: &PendingOperation| match pending {
            PendingOperation::Receive(receive) => {
                !receive.armed
                    && !receive.stopping
                    && groups.get(receive.group).is_some_and(|group| group.available() > 0)
            }
            _ => false,
        };
        let waiting: Vec<Slot> =
            self.pending.iter().filter(|(_, pending)| can_continue(pending)).map(|(slot, _)| slot).collect();
        for slot in waiting {
            self.arm_receive(slot);
        }
    }
}

// Miri does not implement io_uring and sockets.
#[cfg(all(test, not(miri)))]
mod tests;
