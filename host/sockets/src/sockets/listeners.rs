//! The listening sockets of a core.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use os::{EventClient, Interest, WatchId};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use slots::Slab;

use super::{LISTENER_BIT, quota_exceeded};
use crate::{ListenerId, NetworkEvent, SocketStream, StreamAddress, UnixListenSocket, stream};

/// Maximum number of listeners on one core: each virtual machine of a host may have a UNIX socket of its own.
const LISTENERS_MAX: u32 = 1024;
/// Maximum number of connections accepted per listener and poll, so that a connection flood does not starve the
/// established connections.
const ACCEPTS_PER_POLL_MAX: usize = 64;
/// Length of the accept queue.
const BACKLOG: i32 = 512;
/// Interval between attempts to accept while the process or the system is out of descriptors or memory, in
/// nanoseconds. Each attempt costs a system call and an event.
const ACCEPT_RETRY_NS: i64 = 100_000_000;
/// The watch tag of the retry timer. No slot has it: an index is below the capacity.
pub(super) const RETRY_TAG: u64 = u64::MAX;

/// The listeners, and what is known of their accept queues.
///
/// Watches are edge-triggered: an accept queue that was not emptied is not reported again. So a listener stays in
/// `unfinished` until accept would block, and in `delayed` while accept fails for lack of resources, which a timer
/// ends; the timer is a descriptor, because a core out of work sleeps until its event loop has an event.
pub(super) struct Listeners {
    slab: Slab<SocketListener>,
    /// Listeners whose accept queue may not be empty yet.
    unfinished: Vec<ListenerId>,
    /// Listeners that accept again when the timer expires.
    delayed: Vec<ListenerId>,
    /// Created with the first listener, so that there is a descriptor for it.
    timer: Option<OwnedFd>,
}

struct SocketListener {
    socket: ListenerSocket,
    watch: Option<WatchId>,
}

enum ListenerSocket {
    Tcp(OwnedFd),
    Unix(UnixListenSocket),
}

impl AsFd for ListenerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            ListenerSocket::Tcp(socket) => socket.as_fd(),
            ListenerSocket::Unix(socket) => socket.as_fd(),
        }
    }
}

impl Listeners {
    pub(super) fn new() -> Listeners {
        Listeners {
            slab: Slab::with_capacity(LISTENERS_MAX),
            unfinished: Vec::new(),
            delayed: Vec::new(),
            timer: None,
        }
    }

    pub(super) fn listen_tcp(&mut self, client: &EventClient, address: SocketAddr) -> io::Result<ListenerId> {
        self.insert(client, ListenerSocket::Tcp(stream::listen_tcp(address, BACKLOG)?))
    }

    pub(super) fn listen_unix(
        &mut self,
        client: &EventClient,
        path: &Path,
        mode: u32,
    ) -> io::Result<ListenerId> {
        self.insert(client, ListenerSocket::Unix(UnixListenSocket::bind(path, mode, BACKLOG)?))
    }

    fn insert(&mut self, client: &EventClient, socket: ListenerSocket) -> io::Result<ListenerId> {
        if self.timer.is_none() {
            let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
            let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
            client.watch(timer.as_fd(), Interest::READABLE, RETRY_TAG)?;
            self.timer = Some(timer);
        }
        let entry = SocketListener { socket, watch: None };
        let slot = self.slab.insert(entry).map_err(|_| quota_exceeded())?;
        let Some(listener) = self.slab.get_mut(slot) else { return Err(quota_exceeded()) };
        match client.watch(listener.socket.as_fd(), Interest::READABLE, LISTENER_BIT | slot.to_bits()) {
            Ok(watch) => listener.watch = Some(watch),
            Err(error) => {
                self.slab.remove(slot);
                return Err(error);
            }
        }
        Ok(ListenerId(slot))
    }

    pub(super) fn close(&mut self, client: &EventClient, id: ListenerId) {
        if let Some(watch) = self.slab.get(id.0).and_then(|listener| listener.watch) {
            client.unwatch(watch);
        }
        if let Some(listener) = self.slab.remove(id.0) {
            // Ends the listening even while the kernel still references the file for the watch.
            let _ = rustix::net::shutdown(&listener.socket, rustix::net::Shutdown::Both);
        }
    }

    pub(super) fn local_address(&self, id: ListenerId) -> Option<StreamAddress> {
        match &self.slab.get(id.0)?.socket {
            ListenerSocket::Tcp(socket) => stream::local_tcp_address(socket.as_fd()),
            ListenerSocket::Unix(socket) => Some(StreamAddress::Unix(socket.path().to_path_buf())),
        }
    }

    /// Whether an accept queue may have connections that the event loop will not report.
    pub(super) fn is_pending(&self) -> bool {
        !self.unfinished.is_empty()
    }

    /// Continues with the accept queues that were not emptied.
    pub(super) fn accept_unfinished(&mut self, events: &mut Vec<NetworkEvent<SocketStream>>) {
        for id in std::mem::take(&mut self.unfinished) {
            self.accept(id, events);
        }
    }

    /// The retry timer expired.
    pub(super) fn retry(&mut self, events: &mut Vec<NetworkEvent<SocketStream>>) {
        let Some(timer) = &self.timer else { return };
        let _ = rustix::io::read(timer, &mut [0; 8]);
        for id in std::mem::take(&mut self.delayed) {
            self.accept(id, events);
        }
    }

    /// Accepts connections until none is left, up to a limit.
    pub(super) fn accept(&mut self, id: ListenerId, events: &mut Vec<NetworkEvent<SocketStream>>) {
        self.accept_with(id, events, stream::accept);
    }

    fn accept_with(
        &mut self,
        id: ListenerId,
        events: &mut Vec<NetworkEvent<SocketStream>>,
        mut accept: impl FnMut(BorrowedFd<'_>) -> Result<(SocketStream, StreamAddress), Errno>,
    ) {
        let Some(listener) = self.slab.get(id.0) else { return };
        if self.delayed.contains(&id) {
            return;
        }
        for _ in 0..ACCEPTS_PER_POLL_MAX {
            let error = match accept(listener.socket.as_fd()) {
                Ok((stream, peer)) => {
                    events.push(NetworkEvent::Incoming { listener: id, stream, peer });
                    continue;
                }
                Err(Errno::WOULDBLOCK) => return,
                Err(Errno::INTR) => continue,
                Err(error) => error,
            };
            events.push(NetworkEvent::AcceptFailed { listener: id, error: error.into() });
            if is_shortage(error) {
                return self.delay(id);
            }
            // The connection failed before it was accepted (`ECONNABORTED`, or an error of the network, see
            // accept(2)), and has left the queue.
        }
        self.unfinished.push(id);
    }

    /// Accepts again later.
    fn delay(&mut self, id: ListenerId) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let expiry =
            Itimerspec { it_interval: zero, it_value: Timespec { tv_sec: 0, tv_nsec: ACCEPT_RETRY_NS } };
        let armed = match &self.timer {
            Some(timer) if self.delayed.is_empty() => {
                timerfd_settime(timer, TimerfdTimerFlags::empty(), &expiry).is_ok()
            }
            timer => timer.is_some(),
        };
        // Without a timer the next poll retries, and the core does not sleep.
        if armed { self.delayed.push(id) } else { self.unfinished.push(id) }
    }
}

/// Whether the connection stays in the accept queue and accept fails until resources are released.
fn is_shortage(error: Errno) -> bool {
    matches!(error, Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
}

#[cfg(test)]
mod tests {
    use os::{EventLoop, EventLoopConfig};

    use super::*;

    #[test]
    fn failed_connections_are_reported_and_those_behind_them_accepted() {
        let events = EventLoop::new(&EventLoopConfig::default()).unwrap();
        let client = events.client();
        let mut listeners = Listeners::new();
        let id = listeners.listen_tcp(&client, "127.0.0.1:0".parse().unwrap()).unwrap();
        let _peer = stream::connect(&listeners.local_address(id).unwrap()).unwrap();
        let mut errors = vec![Errno::INTR, Errno::NETDOWN, Errno::CONNABORTED];
        let mut seen = Vec::new();
        listeners.accept_with(id, &mut seen, |socket| match errors.pop() {
            Some(error) => Err(error),
            None => stream::accept(socket),
        });
        let [
            NetworkEvent::AcceptFailed { error: aborted, .. },
            NetworkEvent::AcceptFailed { error: down, .. },
            NetworkEvent::Incoming { .. },
        ] = &seen[..]
        else {
            panic!("{seen:?}")
        };
        assert_eq!(aborted.kind(), io::ErrorKind::ConnectionAborted);
        assert_eq!(down.kind(), io::ErrorKind::NetworkDown);
        assert!(!listeners.is_pending() && listeners.delayed.is_empty());
    }

    #[test]
    fn a_listener_that_is_closed_while_accept_is_delayed_is_forgotten() {
        let events = EventLoop::new(&EventLoopConfig::default()).unwrap();
        let client = events.client();
        let mut listeners = Listeners::new();
        let id = listeners.listen_tcp(&client, "127.0.0.1:0".parse().unwrap()).unwrap();
        let mut seen = Vec::new();
        listeners.accept_with(id, &mut seen, |_| Err(Errno::NFILE));
        assert_eq!((seen.len(), &listeners.delayed[..]), (1, &[id][..]));
        listeners.accept(id, &mut seen);
        assert_eq!(seen.len(), 1, "it waits for the timer");
        listeners.close(&client, id);
        listeners.retry(&mut seen);
        assert_eq!((seen.len(), listeners.delayed.len()), (1, 0));
    }
}
