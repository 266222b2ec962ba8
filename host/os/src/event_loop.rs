//! One core's event loop: io_uring, or epoll as the fallback.
//!
//! Everything that a core waits for is reported here: file operations, socket readiness, wake-ups. Each
//! component of the core creates an [`EventClient`] and reaps only its own completions. The event loop
//! never calls back: operations are queued, submitted once per turn and reaped once per turn.

use std::cell::RefCell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;
use std::{fmt, io};

use dma::Data;
use rustix::event::{EventfdFlags, eventfd};
use slots::{Slab, Slot};

use crate::vectors::IoVectors;

mod buffer_group;
mod epoll;
mod files;
mod pages;
mod transfers;
mod ublk;
mod uring;

pub use files::{FileId, FileOperation, RejectedOperation, WriteMode};
pub use transfers::{
    BufferGroupId, ReceiveId, RejectedSend, SEND_PARTS_MAX, SendEvent, SendPart, SocketCapabilities,
    send_parts,
};
pub use ublk::UblkCommand;

pub(crate) use pages::PageRange;

/// Configuration of an [`EventLoop`].
#[derive(Clone, Debug)]
pub struct EventLoopConfig {
    /// The kernel interface; `None` tries io_uring and falls back to epoll.
    pub backend: Option<EventBackend>,
    /// Maximum number of operations and watches at a time.
    pub operations_max: u32,
}

impl Default for EventLoopConfig {
    fn default() -> Self {
        // 8192: an NVMe/TCP target with 6,144 connections and 2,048 file operations per core.
        EventLoopConfig { backend: None, operations_max: 8192 }
    }
}

/// The kernel interface of an [`EventLoop`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventBackend {
    /// io_uring: file operations and readiness.
    Uring,
    /// epoll: readiness only; file operations fail with `Unsupported`.
    Epoll,
    /// No kernel interface, for simulated cores: events are those that the simulation
    /// [raises](EventLoop::raise_event), the loop never sleeps, and watches and file operations fail with `Unsupported`.
    Virtual,
}

bitflags::bitflags! {
    /// The events that a watch reports, as `poll(2)` bits.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Interest: u32 {
        /// Data, a new connection or end of stream.
        const READABLE = libc::POLLIN as u32 | libc::POLLRDHUP as u32;
        /// Space in the send buffer.
        const WRITABLE = libc::POLLOUT as u32;
        /// Readable or writable.
        const BOTH = Interest::READABLE.bits() | Interest::WRITABLE.bits();
    }
}

/// The completion of a file operation, or an event of a watch.
#[derive(Debug)]
pub struct EventCompletion {
    /// The tag of the operation or watch.
    pub tag: u64,
    /// For an operation: the number of bytes, or a negative error number. For a watch: `poll(2)` bits, or a
    /// negative error number, which ends the watch.
    pub result: i32,
    /// The operation's data.
    pub data: Option<Data>,
}

/// Identifies a watched descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchId(Slot);

/// One core's interface to the kernel; must be created on the thread that uses it.
///
/// It owns the io_uring or epoll instance, the files and the buffers of operations in flight. Its
/// [`EventClient`]s queue operations and watches; [`turn`](Self::turn) or [`wait`](Self::wait) submits them and
/// distributes the completions, which each client then [reaps](EventClient::reap). A turn usually costs at
/// most one system call. A clone costs a reference count.
#[derive(Clone)]
pub struct EventLoop {
    inner: Rc<RefCell<EventLoopInner>>,
    waker: Waker,
}

/// A client of an [`EventLoop`], which reaps only the completions of its own operations and watches.
///
/// Dropping it ends its watches; the completions of its operations in flight are discarded.
pub struct EventClient {
    inner: Rc<RefCell<EventLoopInner>>,
    id: Slot,
}

/// Wakes a core that sleeps in [`EventLoop::wait`]; usable on any thread.
#[derive(Clone)]
pub struct Waker(Arc<WakerInner>);

struct WakerInner {
    sleeping: AtomicBool,
    /// `None` with the virtual backend, which is polled instead.
    event: Option<OwnedFd>,
    /// Woken since [`EventLoop::take_wake`]; set with the virtual backend only.
    woken: AtomicBool,
}

struct EventLoopInner {
    backend: BackendState,
    pending: Slab<PendingOperation>,
    files: Slab<files::LoopFile>,
    clients: Slab<ClientQueues>,
    groups: Slab<buffer_group::BufferGroup>,
    /// Vectors of completed operations, to be used again.
    #[expect(clippy::vec_box, reason = "moved to and from slots without copying the vectors")]
    spare_vectors: Vec<Box<IoVectors>>,
    /// The registered buffers of queues of ublk disks.
    pages: pages::PageBuffers,
    /// Operations that own memory which the kernel may use.
    operations_in_flight: u32,
    /// A group of buffers has vacant places, or a receive waits for buffers.
    short_of_buffers: bool,
    wake_event: Arc<WakerInner>,
}

/// What a client has not reaped yet.
#[derive(Default)]
struct ClientQueues {
    completions: Vec<EventCompletion>,
    sends: Vec<SendEvent>,
}

enum BackendState {
    Uring(Box<uring::UringBackend>),
    Epoll(epoll::EpollBackend),
    /// The number of events raised since the last turn.
    Virtual(usize),
}

/// An operation or watch in a slot.
enum PendingOperation {
    Operation {
        client: Slot,
        tag: u64,
        data: Option<Data>,
        /// Of data in several slices.
        vectors: Option<Box<IoVectors>>,
    },
    Watch {
        client: Slot,
        tag: u64,
        fd: RawFd,
        interest: Interest,
    },
    Send(Box<transfers::SendOperation>),
    Receive(Box<transfers::ReceiveOperation>),
    /// A watch that ended; its last completion is pending and will be discarded.
    Unwatched,
}

/// A completion from the kernel, as io_uring describes it.
struct RawCompletion {
    user_data: u64,
    result: i32,
    flags: u32,
}

impl RawCompletion {
    /// Whether the operation has more completions.
    #[inline]
    fn more(&self) -> bool {
        io_uring::cqueue::more(self.flags)
    }
}

/// Maximum number of clients of one event loop.
const CLIENTS_MAX: u32 = 1 << 16;
/// Maximum number of groups of buffers of one event loop: one for each user of a network, with some to spare.
const GROUPS_MAX: u32 = 64;

/// How long drop waits for operations in flight.
const DROP_TIME_MAX: Duration = Duration::from_secs(1);

const WAKE: u64 = u64::MAX;
const IGNORED: u64 = u64::MAX - 1;

impl EventLoop {
    /// Creates an event loop for the calling thread.
    pub fn new(config: &EventLoopConfig) -> io::Result<EventLoop> {
        let is_virtual = config.backend == Some(EventBackend::Virtual);
        let event = match is_virtual {
            true => None,
            false => Some(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?),
        };
        // A virtual core sleeps whenever it is not turned, so that each wake-up is recorded.
        let sleeping = AtomicBool::new(is_virtual);
        let waker = Arc::new(WakerInner { sleeping, event, woken: AtomicBool::new(false) });
        let backend = match config.backend {
            Some(EventBackend::Uring) => {
                BackendState::Uring(Box::new(uring::UringBackend::new(config.operations_max)?))
            }
            Some(EventBackend::Epoll) => BackendState::Epoll(epoll::EpollBackend::new()?),
            Some(EventBackend::Virtual) => BackendState::Virtual(0),
            None => match uring::UringBackend::new(config.operations_max) {
                Ok(uring) => BackendState::Uring(Box::new(uring)),
                Err(_) => BackendState::Epoll(epoll::EpollBackend::new()?),
            },
        };
        let mut inner = EventLoopInner {
            backend,
            pending: Slab::with_capacity(config.operations_max),
            files: Slab::with_capacity(uring::FILES_MAX),
            clients: Slab::with_capacity(CLIENTS_MAX),
            groups: Slab::with_capacity(GROUPS_MAX),
            spare_vectors: Vec::new(),
            pages: pages::PageBuffers::default(),
            operations_in_flight: 0,
            short_of_buffers: false,
            wake_event: waker.clone(),
        };
        if let Some(event) = &waker.event {
            inner.backend.watch(event.as_raw_fd(), Interest::READABLE, WAKE)?;
        }
        Ok(EventLoop { inner: Rc::new(RefCell::new(inner)), waker: Waker(waker) })
    }

    /// The kernel interface in use.
    pub fn backend(&self) -> EventBackend {
        match self.inner.borrow().backend {
            BackendState::Uring(_) => EventBackend::Uring,
            BackendState::Epoll(_) => EventBackend::Epoll,
            BackendState::Virtual(_) => EventBackend::Virtual,
        }
    }

    /// Adds an event to those that the next turn of a virtual loop counts; no effect with other backends.
    pub fn raise_event(&self) {
        if let BackendState::Virtual(raised) = &mut self.inner.borrow_mut().backend {
            *raised += 1;
        }
    }

    /// Whether a virtual loop was woken since the last call.
    pub fn take_wake(&self) -> bool {
        self.waker.0.woken.swap(false, Ordering::Relaxed)
    }

    /// Creates a client.
    ///
    /// # Panics
    /// If there are 65,536 clients already, which is more than components of a core.
    pub fn client(&self) -> EventClient {
        match self.inner.borrow_mut().clients.insert(ClientQueues::default()) {
            Ok(id) => EventClient { inner: self.inner.clone(), id },
            Err(_) => panic!("more than {CLIENTS_MAX} clients of one event loop"),
        }
    }

    /// The waker of this core, for other threads.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Submits queued operations and distributes completions, without waiting. Returns the number of
    /// completions. With io_uring it makes no system call if nothing is queued and no kernel task is pending.
    #[inline]
    pub fn turn(&self) -> usize {
        self.inner.borrow_mut().turn(None)
    }

    /// As [`turn`](Self::turn), but sleeps until there is a completion or `timeout_ns` have passed.
    pub fn wait(&self, timeout_ns: Option<u64>) -> usize {
        self.inner.borrow_mut().turn(Some(timeout_ns))
    }
}

impl Waker {
    /// Wakes the core if it sleeps or is about to sleep. Call it after publishing the work for the core.
    #[inline]
    pub fn wake(&self) {
        // Orders the caller's store before this load; the core orders its store of `sleeping` before its last
        // check for work. At least one of the two sees the other's store.
        fence(Ordering::SeqCst);
        if self.0.sleeping.load(Ordering::Relaxed) {
            self.wake_always();
        }
    }

    /// Wakes the core, or makes its next sleep return immediately.
    pub fn wake_always(&self) {
        match &self.0.event {
            Some(event) => _ = rustix::io::write(event, &1u64.to_ne_bytes()),
            None => self.0.woken.store(true, Ordering::Relaxed),
        }
    }

    /// Declares that the core is about to sleep; the core must check every mailbox once more after this.
    pub fn prepare_sleep(&self) {
        self.0.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Declares that the core is awake.
    pub fn finish_sleep(&self) {
        self.0.sleeping.store(false, Ordering::Relaxed);
    }
}

impl EventClient {
    /// Appends this client's completions since the last call to `out`; returns their number.
    #[inline]
    pub fn reap(&self, out: &mut Vec<EventCompletion>) -> usize {
        let mut inner = self.inner.borrow_mut();
        let Some(mine) = inner.clients.get_mut(self.id) else { return 0 };
        let count = mine.completions.len();
        out.append(&mut mine.completions);
        count
    }

    /// Reports changes of `fd`'s readiness until [`unwatch`](Self::unwatch).
    ///
    /// Edge-triggered: after an event, read or write until the kernel returns `EWOULDBLOCK`.
    /// The caller must keep `fd` open until it has called `unwatch`.
    pub fn watch(&self, fd: BorrowedFd<'_>, interest: Interest, tag: u64) -> io::Result<WatchId> {
        let mut inner = self.inner.borrow_mut();
        let fd = fd.as_raw_fd();
        let slot = inner.pending.insert(PendingOperation::Watch { client: self.id, tag, fd, interest });
        let slot = slot.map_err(|_| io::Error::from(io::ErrorKind::QuotaExceeded))?;
        if let Err(error) = inner.backend.watch(fd, interest, slot.to_bits()) {
            inner.pending.remove(slot);
            return Err(error);
        }
        Ok(WatchId(slot))
    }

    /// Ends a watch. Events that were reported but not reaped yet are still returned, with the old tag.
    pub fn unwatch(&self, watch: WatchId) {
        self.inner.borrow_mut().unwatch(watch.0);
    }
}

impl Drop for EventClient {
    fn drop(&mut self) {
        let mut inner = self.inner.borrow_mut();
        inner.clients.remove(self.id);
        let is_own = |pending: &PendingOperation| match pending {
            PendingOperation::Operation { client, .. } | PendingOperation::Watch { client, .. } => {
                *client == self.id
            }
            PendingOperation::Send(send) => send.client == self.id,
            PendingOperation::Receive(receive) => receive.client == self.id,
            PendingOperation::Unwatched => false,
        };
        let own: Vec<Slot> =
            inner.pending.iter().filter(|(_, pending)| is_own(pending)).map(|(slot, _)| slot).collect();
        for slot in own {
            match inner.pending.get(slot) {
                Some(PendingOperation::Watch { .. }) => inner.unwatch(slot),
                Some(PendingOperation::Send(_)) => inner.cancel(slot),
                Some(PendingOperation::Receive(_)) => inner.stop_receive(slot),
                // File operations complete by themselves.
                _ => {}
            }
        }
        let groups: Vec<Slot> = inner.groups.iter().map(|(slot, _)| slot).collect();
        groups.into_iter().for_each(|slot| inner.remove_unused_group(slot));
    }
}

impl BackendState {
    fn watch(&mut self, fd: RawFd, interest: Interest, user_data: u64) -> io::Result<()> {
        match self {
            BackendState::Uring(uring) => {
                uring.watch(fd, interest, user_data);
                Ok(())
            }
            BackendState::Epoll(epoll) => epoll.watch(fd, interest, user_data),
            BackendState::Virtual(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl EventLoopInner {
    fn turn(&mut self, mut wait: Option<Option<u64>>) -> usize {
        let mut count = 0;
        if self.short_of_buffers {
            self.replenish();
            if self.short_of_buffers
                && let Some(timeout_ns) = &mut wait
            {
                let retry_ns = transfers::STARVED_SLEEP_NS;
                *timeout_ns = Some(timeout_ns.map_or(retry_ns, |timeout_ns| timeout_ns.min(retry_ns)));
            }
        }
        match &mut self.backend {
            BackendState::Uring(uring) => uring.enter(wait),
            BackendState::Epoll(epoll) => {
                if let Err(error) = epoll.wait(wait) {
                    panic!("epoll_wait on our own descriptor cannot fail, but did: {error}");
                }
            }
            BackendState::Virtual(raised) => return std::mem::take(raised),
        }
        loop {
            let raw = match &mut self.backend {
                BackendState::Uring(uring) => uring.next(),
                BackendState::Epoll(epoll) => epoll.next(),
                BackendState::Virtual(_) => None,
            };
            let Some(raw) = raw else { return count };
            count += 1;
            self.dispatch(raw);
        }
    }

    fn unwatch(&mut self, slot: Slot) {
        let Some(PendingOperation::Watch { fd, .. }) = self.pending.get(slot) else { return };
        let fd = *fd;
        match &mut self.backend {
            BackendState::Uring(uring) => {
                uring.unwatch(slot.to_bits());
                if let Some(pending) = self.pending.get_mut(slot) {
                    *pending = PendingOperation::Unwatched;
                }
            }
            BackendState::Epoll(epoll) => {
                epoll.unwatch(fd);
                self.pending.remove(slot);
            }
            BackendState::Virtual(_) => {}
        }
    }

    /// Queues a completion for its client; discards it if the client was dropped.
    fn deliver(&mut self, client: Slot, done: EventCompletion) {
        if let Some(queue) = self.clients.get_mut(client) {
            queue.completions.push(done);
        }
    }

    fn dispatch(&mut self, raw: RawCompletion) {
        match raw.user_data {
            WAKE => return self.on_wake(raw.more()),
            IGNORED => return,
            _ => {}
        }
        let slot = Slot::from_bits(raw.user_data);
        match self.pending.get_mut(slot) {
            Some(PendingOperation::Operation { .. }) => {
                let Some(PendingOperation::Operation { client, tag, data, vectors }) =
                    self.pending.remove(slot)
                else {
                    unreachable!("slot {slot:?} was just found to be an operation")
                };
                self.operations_in_flight -= 1;
                if let Some(vectors) = vectors {
                    self.recycle_vectors(vectors);
                }
                self.deliver(client, EventCompletion { tag, result: raw.result, data });
            }
            Some(PendingOperation::Watch { client, tag, fd, interest }) => {
                let (client, tag, fd, interest) = (*client, *tag, *fd, *interest);
                if !raw.more() {
                    // The kernel ended the multishot poll: after an error for good, otherwise because the
                    // completion queue was full, and it is armed again.
                    let rearmed = raw.result >= 0 && self.backend.watch(fd, interest, slot.to_bits()).is_ok();
                    if !rearmed {
                        self.pending.remove(slot);
                    }
                }
                self.deliver(client, EventCompletion { tag, result: raw.result, data: None });
            }
            Some(PendingOperation::Send(_)) => self.on_send(slot, &raw),
            Some(PendingOperation::Receive(_)) => self.on_receive(slot, &raw),
            Some(PendingOperation::Unwatched) if !raw.more() => {
                self.pending.remove(slot);
            }
            Some(PendingOperation::Unwatched) | None => {}
        }
    }

    fn on_wake(&mut self, more: bool) {
        let mut count = [0; 8];
        let Some(event) = &self.wake_event.event else { return };
        let _ = rustix::io::read(event, &mut count);
        if !more {
            let fd = event.as_fd().as_raw_fd();
            if let Err(error) = self.backend.watch(fd, Interest::READABLE, WAKE) {
                panic!("the wake-up eventfd cannot be watched again: {error}");
            }
        }
    }
}

impl Drop for EventLoopInner {
    /// Waits for operations in flight, because the kernel may still write into their buffers, and leaks the
    /// buffers of those that do not complete.
    fn drop(&mut self) {
        if self.operations_in_flight == 0 {
            return;
        }
        let is_receive = |pending: &PendingOperation| matches!(pending, PendingOperation::Receive(_));
        let receives: Vec<Slot> =
            self.pending.iter().filter(|(_, pending)| is_receive(pending)).map(|(slot, _)| slot).collect();
        receives.into_iter().for_each(|slot| self.stop_receive(slot));
        // Only submitted operations can be cancelled.
        self.turn(None);
        if let BackendState::Uring(uring) = &mut self.backend {
            uring.cancel_all();
        }
        let ended = crate::drain::drain(DROP_TIME_MAX, || {
            self.turn(Some(Some(10_000_000)));
            self.operations_in_flight == 0
        });
        if !ended {
            std::mem::forget(std::mem::replace(&mut self.pending, Slab::with_capacity(0)));
            std::mem::forget(std::mem::replace(&mut self.groups, Slab::with_capacity(0)));
        }
    }
}

impl fmt::Debug for EventLoop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Events({:?})", self.backend())
    }
}

// Miri does not implement io_uring and epoll.
#[cfg(all(test, not(miri)))]
mod tests;
