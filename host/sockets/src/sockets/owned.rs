//! Owned transfers on kernel sockets: through io_uring where it can, and by readiness and copies otherwise.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

use dma::{Data, Pool};
use os::{
    BufferGroupId, EventClient, EventCompletion, EventLoop, Interest, ReceiveId, RejectedSend, SendEvent,
    SendPart, SocketCapabilities,
};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use slots::{Slab, Slot};

use super::{SocketConnection, Sockets};
use crate::{
    ConnectionId, NetworkEvent, OwnedTransferConfig, OwnedTransfers, ReceiveEnd, SendStats, SentEvent,
    SocketStream, TransferEvent, ZeroCopySwitch,
};

/// Maximum number of sends of a connection that wait for earlier ones.
const QUEUED_SENDS_MAX: usize = 64;
/// Maximum number of sends of a core whose memory the kernel uses.
const KERNEL_SENDS_MAX: u32 = 1 << 16;
/// Maximum number of reads per connection and poll without multishot receives, so that a busy connection does
/// not starve others.
const READS_PER_POLL_MAX: usize = 16;

/// The owned transfers of a core's sockets.
pub(super) struct Transfers {
    client: EventClient,
    pool: Pool,
    buffer_bytes: usize,
    zero_copy: bool,
    /// Sends of fewer bytes are copied.
    zero_copy_min_bytes: usize,
    copies_max: u32,
    pub(super) stats: SendStats,
    /// The buffers for multishot receives.
    group: Option<BufferGroupId>,
    /// Sends whose memory the kernel uses, also of closed connections; the slot is the tag of the event
    /// loop's send.
    in_kernel: Slab<KernelSend>,
    /// Connections whose next send did not fit in the event loop.
    retry: Vec<ConnectionId>,
    events: Vec<TransferEvent>,
    done: Vec<EventCompletion>,
    send_events: Vec<SendEvent>,
}

/// A send that was submitted to the kernel.
struct KernelSend {
    connection: ConnectionId,
    tag: u64,
    bytes: usize,
    result: Result<(), io::ErrorKind>,
    /// The kernel cannot send this without a copy.
    must_copy: bool,
}

/// What connections need that may send without a copy: see [`Sockets::with_zero_copy`].
pub(super) struct ZeroCopySource {
    switch: &'static ZeroCopySwitch,
    /// Until the first such connection.
    spare: Option<(EventClient, Pool)>,
}

/// The owned transfers of a connection. Its socket is in blocking mode, so that io_uring waits for it.
pub(super) struct ConnectionTransfers {
    queue: VecDeque<QueuedSend>,
    zero_copy: bool,
    /// Zero-copy sends in a row that the kernel has copied.
    copies: u32,
    /// The kernel has not accepted the last send yet: the next must wait, or it could overtake.
    is_sending: bool,
    /// Sends whose memory the kernel uses.
    in_kernel: u32,
    receive: OwnedReceiveState,
}

struct QueuedSend {
    tag: u64,
    parts: Vec<SendPart>,
    sent: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum OwnedReceiveState {
    Off,
    Multishot(ReceiveId),
    Readiness,
}

impl ConnectionTransfers {
    /// Whether the kernel uses memory of sends.
    pub(super) fn has_kernel_sends(&self) -> bool {
        self.in_kernel > 0
    }

    /// Whether nothing is queued, being sent or being received.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.in_kernel == 0 && self.receive == OwnedReceiveState::Off
    }

    /// The readiness that is needed besides the kernel's completions.
    fn interest(&self) -> Interest {
        match self.receive {
            // For sends that are copied.
            OwnedReceiveState::Multishot(_) => Interest::WRITABLE,
            _ => Interest::BOTH,
        }
    }
}

impl Transfers {
    fn new(client: EventClient, pool: &Pool, config: &OwnedTransferConfig) -> io::Result<Transfers> {
        let is_valid = config.receive_buffers.is_power_of_two()
            && config.receive_buffers <= 1 << 15
            && (1..=dma::BUFFER_BYTES_MAX).contains(&config.receive_buffer_bytes);
        if !is_valid {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let capabilities = client.socket_capabilities();
        // A kernel or a sandbox that refuses the registration gets the fallback.
        let group = match config.multishot_receive && capabilities.multishot_receive {
            true => client.provide_buffers(pool, config.receive_buffers, config.receive_buffer_bytes).ok(),
            false => None,
        };
        Ok(Transfers {
            client,
            pool: pool.clone(),
            buffer_bytes: config.receive_buffer_bytes,
            zero_copy: config.zero_copy_send && capabilities.zero_copy_send,
            zero_copy_min_bytes: config.zero_copy_min_bytes,
            copies_max: config.zero_copy_copies_max,
            stats: SendStats::default(),
            group,
            in_kernel: Slab::with_capacity(KERNEL_SENDS_MAX),
            retry: Vec::new(),
            events: Vec::new(),
            done: Vec::new(),
            send_events: Vec::new(),
        })
    }

    /// Whether a poll has something to do that the event loop will not report.
    pub(super) fn is_pending(&self) -> bool {
        !self.retry.is_empty() || !self.events.is_empty()
    }

    /// From how many bytes a send of a connection is zero-copy; `None` if none is.
    #[inline]
    pub(super) fn zero_copy_min_bytes(&self, connection: &SocketConnection) -> Option<usize> {
        let is_on = connection.owned.as_ref().map_or(self.zero_copy, |owned| owned.zero_copy);
        (connection.zero_copy && is_on).then_some(self.zero_copy_min_bytes)
    }

    /// Passes on the ends of sends, and drops what was sent.
    #[cold]
    pub(super) fn reap_sent(&mut self, out: &mut Vec<SentEvent>) {
        out.extend(self.events.drain(..).filter_map(|event| match event {
            TransferEvent::Sent { connection, tag, result, .. } => {
                Some(SentEvent { connection, tag, result })
            }
            _ => None,
        }));
    }

    /// Sends what is queued, up to what the kernel accepts.
    fn advance(&mut self, id: ConnectionId, connection: &mut SocketConnection) {
        let Some(owned) = &mut connection.owned else { return };
        while !owned.is_sending
            && let Some(mut send) = owned.queue.pop_front()
        {
            let bytes = send.parts.iter().map(SendPart::len).sum();
            let is_small = bytes < self.zero_copy_min_bytes;
            if owned.zero_copy && !is_small {
                let (tag, result) = (send.tag, Ok(()));
                let entry = KernelSend { connection: id, tag, bytes, result, must_copy: false };
                let slot = self.in_kernel.insert(entry).ok();
                let submitted = match slot {
                    Some(slot) => self.client.submit_send(&connection.socket, send.parts, slot.to_bits()),
                    None => Err(RejectedSend { reason: io::ErrorKind::WouldBlock, parts: send.parts }),
                };
                match submitted {
                    Ok(()) => {
                        owned.is_sending = true;
                        owned.in_kernel += 1;
                    }
                    Err(rejected) => {
                        if let Some(slot) = slot {
                            self.in_kernel.remove(slot);
                        }
                        owned.queue.push_front(QueuedSend { parts: rejected.parts, ..send });
                        return self.retry.push(id);
                    }
                }
                continue;
            }
            let result = match os::send_parts(connection.socket.as_fd(), &send.parts, send.sent) {
                Ok(count) if send.sent + count == bytes => Ok(()),
                Ok(count) => {
                    send.sent += count;
                    owned.queue.push_front(send);
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    owned.queue.push_front(send);
                    continue;
                }
                // The watch reports when there is space.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return owned.queue.push_front(send);
                }
                Err(error) => Err(error.kind()),
            };
            let QueuedSend { tag, parts, .. } = send;
            if result.is_ok() {
                *(if is_small { &mut self.stats.small } else { &mut self.stats.fallback }) += 1;
            }
            self.events.push(TransferEvent::Sent { connection: id, tag, result, parts, copied: true });
        }
    }

    /// Reads what has arrived; returns whether there may be more, or no buffer.
    fn read(&mut self, id: ConnectionId, connection: &mut SocketConnection) -> bool {
        let Some(owned) = &mut connection.owned else { return false };
        for _ in 0..READS_PER_POLL_MAX {
            let Some(mut buffer) = self.pool.take(self.buffer_bytes) else { return true };
            let received = rustix::net::recv(&*connection.socket, buffer.as_mut_slice(), RecvFlags::DONTWAIT);
            let end = match received {
                Ok((_, 0)) => ReceiveEnd::Closed,
                Ok((_, count)) => {
                    buffer.resize(count);
                    self.events.push(TransferEvent::Received { connection: id, buffer });
                    continue;
                }
                Err(Errno::INTR) => continue,
                Err(Errno::WOULDBLOCK) => return false,
                Err(error) => ReceiveEnd::Failed(io::Error::from(error).kind()),
            };
            owned.receive = OwnedReceiveState::Off;
            self.events.push(TransferEvent::ReceiveEnded { connection: id, end });
            return false;
        }
        true
    }

    /// The memory of a send is no longer used.
    fn on_released(
        &mut self,
        slot: Slot,
        parts: Vec<SendPart>,
        copied: bool,
        connections: &mut Slab<SocketConnection>,
    ) {
        let Some(KernelSend { connection, tag, result, must_copy, .. }) = self.in_kernel.remove(slot) else {
            unreachable!("a send is released once")
        };
        let mut entry = connections.get_mut(connection.0);
        let mut owned = entry.as_mut().and_then(|entry| entry.owned.as_mut());
        if let Some(owned) = &mut owned {
            owned.in_kernel -= 1;
        }
        if must_copy && let Some(owned) = owned {
            owned.is_sending = false;
            owned.queue.push_front(QueuedSend { tag, parts, sent: 0 });
            return entry.map_or((), |entry| self.advance(connection, entry));
        }
        if result.is_ok() {
            *(if copied { &mut self.stats.copied } else { &mut self.stats.zero_copied }) += 1;
        }
        if result.is_ok()
            && let Some(owned) = owned
        {
            owned.copies = if copied { owned.copies.saturating_add(1) } else { 0 };
            if owned.copies >= self.copies_max && owned.zero_copy {
                owned.zero_copy = false;
                self.stats.turned_off += 1;
            }
        }
        self.events.push(TransferEvent::Sent { connection, tag, result, parts, copied });
    }

    /// The connection was closed. What the kernel has of it comes back by itself.
    pub(super) fn on_close(&mut self, id: ConnectionId, owned: ConnectionTransfers) {
        for QueuedSend { tag, parts, .. } in owned.queue {
            let result = Err(io::ErrorKind::ConnectionAborted);
            self.events.push(TransferEvent::Sent { connection: id, tag, result, parts, copied: false });
        }
        if let OwnedReceiveState::Multishot(receive) = owned.receive {
            self.client.stop_receive(receive);
        }
    }
}

impl Sockets {
    /// Enables [`OwnedTransfers`], with received data in buffers of `pool`.
    ///
    /// # Errors
    /// `InvalidInput` for a configuration out of range.
    pub fn with_owned_transfers(
        mut self,
        events: &EventLoop,
        pool: &Pool,
        config: &OwnedTransferConfig,
    ) -> io::Result<Sockets> {
        self.transfers = Some(Box::new(Transfers::new(events.client(), pool, config)?));
        Ok(self)
    }

    /// Lets connections send large data without a copy by
    /// [`Network::send_owned`](crate::Network::send_owned), those that are added while `switch` is on.
    #[must_use]
    pub fn with_zero_copy(self, events: &EventLoop, pool: &Pool, switch: &'static ZeroCopySwitch) -> Sockets {
        let spare = Some((events.client(), pool.clone()));
        Sockets { zero_copy: Some(ZeroCopySource { switch, spare }), ..self }
    }

    /// Whether a new connection may send without a copy.
    pub(super) fn allows_zero_copy(&mut self, is_accepted: bool) -> bool {
        let Some(source) = &mut self.zero_copy else { return false };
        if !source.switch.is_on(is_accepted) {
            return false;
        }
        if let Some((client, pool)) = source.spare.take() {
            let config = OwnedTransferConfig { multishot_receive: false, ..OwnedTransferConfig::default() };
            self.transfers = Transfers::new(client, &pool, &config).ok().map(Box::new);
        }
        self.transfers.is_some()
    }

    /// What the kernel does for owned transfers; the rest is done by copies and readiness.
    pub fn transfer_capabilities(&self) -> SocketCapabilities {
        self.transfers.as_ref().map_or(SocketCapabilities::default(), |transfers| SocketCapabilities {
            zero_copy_send: transfers.zero_copy,
            multishot_receive: transfers.group.is_some(),
        })
    }

    /// Serves owned transfers with the events of a poll from index `before`, of which it removes those that
    /// announce data for an owned receive. Returns the number of transfer events.
    pub(super) fn serve_transfers(
        &mut self,
        events: &mut Vec<NetworkEvent<SocketStream>>,
        before: usize,
    ) -> usize {
        let Some(mut transfers) = self.transfers.take() else { return 0 };
        for id in std::mem::take(&mut transfers.retry) {
            if let Some(connection) = self.connections.get_mut(id.0) {
                transfers.advance(id, connection);
            }
        }
        let mut send_events = std::mem::take(&mut transfers.send_events);
        transfers.client.reap_sends(&mut send_events);
        for event in send_events.drain(..) {
            self.on_send_event(&mut transfers, event);
        }
        transfers.send_events = send_events;
        let mut done = std::mem::take(&mut transfers.done);
        transfers.client.reap(&mut done);
        for completion in done.drain(..) {
            self.on_received(&mut transfers, completion);
        }
        transfers.done = done;
        let mut index = before;
        while let Some(event) = events.get(index) {
            match event {
                NetworkEvent::Ready(id) if self.serve_ready(&mut transfers, *id) => {
                    events.swap_remove(index);
                }
                _ => index += 1,
            }
        }
        let count = transfers.events.len();
        self.transfers = Some(transfers);
        count
    }

    /// Continues with the transfers of a connection that is ready; returns whether the readiness is only of
    /// interest here.
    fn serve_ready(&mut self, transfers: &mut Transfers, id: ConnectionId) -> bool {
        let Some(connection) = self.connections.get_mut(id.0) else { return false };
        transfers.advance(id, connection);
        match connection.owned.as_ref().map_or(OwnedReceiveState::Off, |owned| owned.receive) {
            OwnedReceiveState::Off => return false,
            OwnedReceiveState::Multishot(_) => {}
            OwnedReceiveState::Readiness => {
                if transfers.read(id, connection) {
                    self.ready_next.push(id);
                }
            }
        }
        true
    }

    fn on_send_event(&mut self, transfers: &mut Transfers, event: SendEvent) {
        let (tag, result) = match event {
            SendEvent::Accepted { tag, result } => (tag, result),
            SendEvent::Released { tag, parts, copied } => {
                return transfers.on_released(Slot::from_bits(tag), parts, copied, &mut self.connections);
            }
        };
        let Some(send) = transfers.in_kernel.get_mut(Slot::from_bits(tag)) else { return };
        let error = error_of(result);
        send.result = match error {
            Some(error) => Err(io::Error::from(error).kind()),
            None if result as usize == send.bytes => Ok(()),
            None => Err(io::ErrorKind::BrokenPipe),
        };
        let id = send.connection;
        let Some(connection) = self.connections.get_mut(id.0) else { return };
        let Some(owned) = &mut connection.owned else { return };
        if matches!(error, Some(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOMEM | Errno::NOBUFS)) {
            // The protocol cannot, or the limit of locked memory is reached: copy instead.
            send.must_copy = true;
            owned.zero_copy = false;
            return;
        }
        owned.is_sending = false;
        transfers.advance(id, connection);
    }

    fn on_received(&mut self, transfers: &mut Transfers, completion: EventCompletion) {
        let id = ConnectionId(Slot::from_bits(completion.tag));
        // What arrives after close is dropped.
        let Some(connection) = self.connections.get_mut(id.0) else { return };
        let Some(owned) = &mut connection.owned else { return };
        if let Some(Data::One(buffer)) = completion.data {
            return transfers.events.push(TransferEvent::Received { connection: id, buffer });
        }
        let end = match error_of(completion.result) {
            Some(Errno::INVAL) => {
                // The kernel has no multishot receives after all.
                transfers.group = None;
                owned.receive = OwnedReceiveState::Readiness;
                self.ready_next.push(id);
                return self.update_watch(id);
            }
            Some(Errno::CANCELED) => ReceiveEnd::Stopped,
            Some(error) => ReceiveEnd::Failed(io::Error::from(error).kind()),
            None => ReceiveEnd::Closed,
        };
        owned.receive = OwnedReceiveState::Off;
        transfers.events.push(TransferEvent::ReceiveEnded { connection: id, end });
        self.update_watch(id);
    }

    /// Prepares a connection for owned transfers.
    fn own(&mut self, id: ConnectionId) -> io::Result<()> {
        let zero_copy = self.transfers.as_ref().is_some_and(|transfers| transfers.zero_copy);
        let Some(connection) = self.connections.get_mut(id.0) else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        if self.transfers.is_none() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if connection.owned.is_some() {
            return Ok(());
        }
        rustix::io::ioctl_fionbio(&*connection.socket, false)?;
        // The kernel has no zero-copy send for UNIX sockets.
        let zero_copy = zero_copy && !connection.is_unix;
        connection.owned = Some(Box::new(ConnectionTransfers {
            queue: VecDeque::new(),
            zero_copy,
            copies: 0,
            is_sending: false,
            in_kernel: 0,
            receive: OwnedReceiveState::Off,
        }));
        Ok(())
    }

    /// Watches what the transfers of a connection need. A new watch reports the present readiness.
    fn update_watch(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(id.0) else { return };
        let Some(owned) = &connection.owned else { return };
        if let Some(watch) = connection.watch.take() {
            self.client.unwatch(watch);
        }
        self.busy_polled_count -= usize::from(std::mem::take(&mut connection.busy_polled));
        match self.client.watch(connection.socket.as_fd(), owned.interest(), id.0.to_bits()) {
            Ok(watch) => connection.watch = Some(watch),
            // At the limit of operations: polled on every turn, and watched when there is space.
            Err(_) => {
                connection.busy_polled = true;
                self.busy_polled_count += 1;
            }
        }
    }
}

/// The error of a completion of the event loop, if its result is one.
fn error_of(result: i32) -> Option<Errno> {
    (result < 0).then(|| Errno::from_raw_os_error(-result))
}

impl OwnedTransfers for Sockets {
    fn submit_send(&mut self, id: ConnectionId, parts: Vec<SendPart>, tag: u64) -> Result<(), RejectedSend> {
        if let Err(error) = self.own(id) {
            return Err(RejectedSend { reason: error.kind(), parts });
        }
        let is_valid = parts.len() <= os::SEND_PARTS_MAX && !parts.iter().all(SendPart::is_empty);
        let (Some(transfers), Some(connection)) = (&mut self.transfers, self.connections.get_mut(id.0))
        else {
            return Err(RejectedSend { reason: io::ErrorKind::NotConnected, parts });
        };
        let Some(owned) = &mut connection.owned else {
            return Err(RejectedSend { reason: io::ErrorKind::NotConnected, parts });
        };
        if !is_valid || owned.queue.len() >= QUEUED_SENDS_MAX {
            let reason = if is_valid { io::ErrorKind::WouldBlock } else { io::ErrorKind::InvalidInput };
            return Err(RejectedSend { reason, parts });
        }
        owned.queue.push_back(QueuedSend { tag, parts, sent: 0 });
        if owned.queue.len() == 1 {
            transfers.advance(id, connection);
        }
        Ok(())
    }

    fn start_receive(&mut self, id: ConnectionId) -> io::Result<()> {
        self.own(id)?;
        let (Some(transfers), Some(connection)) = (&mut self.transfers, self.connections.get_mut(id.0))
        else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let Some(owned) = &mut connection.owned else { return Err(io::ErrorKind::NotConnected.into()) };
        if owned.receive != OwnedReceiveState::Off {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        owned.receive = match transfers.group {
            Some(group) => OwnedReceiveState::Multishot(transfers.client.start_receive(
                &connection.socket,
                group,
                id.0.to_bits(),
            )?),
            None => {
                self.ready_next.push(id);
                OwnedReceiveState::Readiness
            }
        };
        self.update_watch(id);
        Ok(())
    }

    fn stop_receive(&mut self, id: ConnectionId) {
        let (Some(transfers), Some(connection)) = (&mut self.transfers, self.connections.get_mut(id.0))
        else {
            return;
        };
        let Some(owned) = &mut connection.owned else { return };
        match owned.receive {
            OwnedReceiveState::Off => {}
            OwnedReceiveState::Multishot(receive) => transfers.client.stop_receive(receive),
            OwnedReceiveState::Readiness => {
                owned.receive = OwnedReceiveState::Off;
                let end = ReceiveEnd::Stopped;
                transfers.events.push(TransferEvent::ReceiveEnded { connection: id, end });
                // Data that was reported before is reported again.
                self.ready_next.push(id);
            }
        }
    }

    fn reap_transfers(&mut self, out: &mut Vec<TransferEvent>) -> usize {
        let Some(transfers) = &mut self.transfers else { return 0 };
        let count = transfers.events.len();
        out.append(&mut transfers.events);
        count
    }
}
