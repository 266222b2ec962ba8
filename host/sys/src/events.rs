//! One core's ring to the kernel.
//!
//! Everything that a core waits for comes through here: file operations, readable and writable
//! sockets, wake-ups. Parts of the core take a [`Client`] each and reap only their own completions.
//! Nothing of the caller's runs inside: operations are queued, handed over once a turn, reaped once
//! a turn.

use std::cell::RefCell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::{fmt, io};

use memory::Buffer;
use rustix::event::{EventfdFlags, eventfd};
use slots::{Slab, Slot};

mod epoll;
mod uring;

/// How an [`Events`] is made.
#[derive(Clone, Debug)]
pub struct Config {
    /// Which interface to the kernel; `None` takes io_uring and falls back to epoll.
    pub engine: Option<Engine>,
    /// Most operations and watches at a time.
    pub operations_max: u32,
}

impl Default for Config {
    fn default() -> Self {
        // 4096: a full NVMe/TCP target of 1,024 connections a core with 3,072 file operations.
        Config { engine: None, operations_max: 4096 }
    }
}

/// The interface to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// One io_uring: files and readiness.
    Uring,
    /// An epoll instance: readiness only; file operations are refused.
    Epoll,
}

/// What a watch reports, as `poll(2)`'s bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest(pub u32);

impl Interest {
    /// Bytes, a connection or the end of a stream can be read.
    pub const READABLE: Interest = Interest(libc::POLLIN as u32 | libc::POLLRDHUP as u32);
    /// Readable, or there is room to write again.
    pub const BOTH: Interest = Interest(Self::READABLE.0 | libc::POLLOUT as u32);
}

/// What a file operation does with its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fill the buffer.
    Read,
    /// Write it out.
    Write(Write),
    /// Make everything written so far durable (`fdatasync`).
    Sync,
    /// Give the range back: it reads as zeroes afterwards (`FALLOC_FL_PUNCH_HOLE`).
    Punch,
    /// Make the range zero without giving it back (`FALLOC_FL_ZERO_RANGE`).
    Zero,
}

/// When a write is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// When the device has it.
    Cached,
    /// When it is on the medium (`RWF_DSYNC`).
    Durable,
}

/// One thing that happened.
#[derive(Debug)]
pub struct Done {
    /// The tag that it was asked for with.
    pub tag: u64,
    /// Of an operation: bytes, or a negative error number. Of a watch: `poll(2)`'s bits, or a
    /// negative error number, after which the watch is over.
    pub result: i32,
    /// The operation's buffer, handed back.
    pub buffer: Option<Buffer>,
}

/// A file operation that was not taken, with its buffer.
#[derive(Debug)]
pub struct Refused {
    /// Why.
    pub why: io::ErrorKind,
    /// The buffer, still the caller's.
    pub buffer: Option<Buffer>,
}

/// A descriptor that is being watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watch(Slot);

/// A file that operations can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(Slot);

/// One core's ring; see the module's text. Made on the thread that uses it.
#[derive(Clone)]
pub struct Events {
    inner: Rc<RefCell<Inner>>,
    waker: Waker,
}

/// One user of an [`Events`]: what it asks for comes back to it alone.
///
/// Dropped, it gives up its watches; operations under way still end, and go to nobody.
pub struct Client {
    inner: Rc<RefCell<Inner>>,
    id: Slot,
}

/// Wakes a core that sleeps in [`Events::wait`]; for any thread.
#[derive(Clone)]
pub struct Waker(Arc<WakerInner>);

struct WakerInner {
    sleeping: AtomicBool,
    event: OwnedFd,
}

struct Inner {
    backend: Backend,
    pending: Slab<Pending>,
    files: Slab<OwnedFd>,
    clients: Slab<Vec<Done>>,
    operations_in_flight: u32,
    wake_event: Arc<WakerInner>,
}

enum Backend {
    Uring(Box<uring::Uring>),
    Epoll(epoll::Epoll),
}

/// What an occupied slot stands for.
enum Pending {
    Operation {
        client: Slot,
        tag: u64,
        buffer: Option<Buffer>,
    },
    Watch {
        client: Slot,
        tag: u64,
        fd: RawFd,
        interest: Interest,
    },
    /// A watch that was given up; its last event is still to come and goes to nobody.
    Unwatched,
}

/// A completion as the kernel gave it.
struct Raw {
    user_data: u64,
    result: i32,
    more: bool,
}

/// Most clients of one ring.
const CLIENTS_MAX: u32 = 1 << 16;

const WAKE: u64 = u64::MAX;
const IGNORED: u64 = u64::MAX - 1;

impl Events {
    /// A ring for the calling thread.
    pub fn new(config: &Config) -> io::Result<Events> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let waker = Arc::new(WakerInner { sleeping: AtomicBool::new(false), event });
        let backend = match config.engine {
            Some(Engine::Uring) => Backend::Uring(Box::new(uring::Uring::new(config.operations_max)?)),
            Some(Engine::Epoll) => Backend::Epoll(epoll::Epoll::new()?),
            None => match uring::Uring::new(config.operations_max) {
                Ok(uring) => Backend::Uring(Box::new(uring)),
                Err(_) => Backend::Epoll(epoll::Epoll::new()?),
            },
        };
        let mut inner = Inner {
            backend,
            pending: Slab::with_capacity(config.operations_max),
            files: Slab::with_capacity(uring::FILES_MAX),
            clients: Slab::with_capacity(CLIENTS_MAX),
            operations_in_flight: 0,
            wake_event: waker.clone(),
        };
        inner.backend.watch(waker.event.as_raw_fd(), Interest::READABLE, WAKE)?;
        Ok(Events { inner: Rc::new(RefCell::new(inner)), waker: Waker(waker) })
    }

    /// Which interface to the kernel it is.
    pub fn engine(&self) -> Engine {
        match self.inner.borrow().backend {
            Backend::Uring(_) => Engine::Uring,
            Backend::Epoll(_) => Engine::Epoll,
        }
    }

    /// A new user of this ring.
    ///
    /// # Panics
    /// With 65,536 users at a time, which is more than there are descriptors.
    pub fn client(&self) -> Client {
        match self.inner.borrow_mut().clients.insert(Vec::new()) {
            Ok(id) => Client { inner: self.inner.clone(), id },
            Err(_) => panic!("{CLIENTS_MAX} users of one ring"),
        }
    }

    /// What other threads wake this core with.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Hands over what was queued and takes in what completed, without waiting. Returns how many
    /// completions there were. Where nothing was queued and nothing happened, no system call is made.
    #[inline]
    pub fn turn(&self) -> usize {
        self.inner.borrow_mut().turn(None)
    }

    /// Like [`turn`](Self::turn), but sleeps until something happens or `timeout_ns` have passed.
    pub fn wait(&self, timeout_ns: Option<u64>) -> usize {
        self.inner.borrow_mut().turn(Some(timeout_ns))
    }
}

impl Waker {
    /// Wakes the core if it sleeps or is about to. Call it after what it is to find was put there.
    #[inline]
    pub fn wake(&self) {
        // Orders the caller's store before this load; the core orders its own store of `sleeping`
        // before its last look. One of the two sees the other.
        fence(Ordering::SeqCst);
        if self.0.sleeping.load(Ordering::Relaxed) {
            self.wake_always();
        }
    }

    /// Wakes the core, or ends its next sleep at once.
    pub fn wake_always(&self) {
        let _ = rustix::io::write(&self.0.event, &1u64.to_ne_bytes());
    }

    /// Declares that the core is about to sleep; look at every mailbox once more after this.
    pub fn prepare_sleep(&self) {
        self.0.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Declares that the core is awake.
    pub fn awake(&self) {
        self.0.sleeping.store(false, Ordering::Relaxed);
    }
}

impl Client {
    /// Moves what happened since the last call to the end of `out`.
    #[inline]
    pub fn reap(&self, out: &mut Vec<Done>) -> usize {
        let mut inner = self.inner.borrow_mut();
        let Some(mine) = inner.clients.get_mut(self.id) else { return 0 };
        let count = mine.len();
        out.append(mine);
        count
    }

    /// Reports changes of `fd`'s readiness until [`unwatch`](Self::unwatch).
    ///
    /// Edge-triggered: after a report, read or write until the kernel says that it would block.
    /// The caller keeps `fd` open until it has called `unwatch`.
    pub fn watch(&self, fd: BorrowedFd<'_>, interest: Interest, tag: u64) -> io::Result<Watch> {
        let mut inner = self.inner.borrow_mut();
        let fd = fd.as_raw_fd();
        let slot = inner.pending.insert(Pending::Watch { client: self.id, tag, fd, interest });
        let slot = slot.map_err(|_| io::Error::from(io::ErrorKind::QuotaExceeded))?;
        if let Err(error) = inner.backend.watch(fd, interest, slot.to_bits()) {
            inner.pending.remove(slot);
            return Err(error);
        }
        Ok(Watch(slot))
    }

    /// Ends a watch. What it reported and was not reaped yet still comes, with the old tag.
    pub fn unwatch(&self, watch: Watch) {
        self.inner.borrow_mut().unwatch(watch.0);
    }

    /// Takes a file in, for operations on it. Refused with `Unsupported` where there is no io_uring.
    pub fn add_file(&self, file: OwnedFd) -> io::Result<FileId> {
        let mut inner = self.inner.borrow_mut();
        if matches!(inner.backend, Backend::Epoll(_)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let raw = file.as_raw_fd();
        let slot = inner.files.insert(file).map_err(|_| io::Error::from(io::ErrorKind::QuotaExceeded))?;
        if let Backend::Uring(uring) = &mut inner.backend {
            uring.register_file(slot.index(), raw);
        }
        Ok(FileId(slot))
    }

    /// Lets a file go. Operations on it must have completed.
    pub fn remove_file(&self, file: FileId) {
        let mut inner = self.inner.borrow_mut();
        if inner.files.remove(file.0).is_some()
            && let Backend::Uring(uring) = &mut inner.backend
        {
            uring.unregister_file(file.0.index());
        }
    }

    /// Queues a file operation on `length` bytes at `offset` of the file, from or to the buffer's
    /// bytes at `start`. The buffer comes back with the [`Done`] that carries `tag`.
    pub fn operate(
        &self,
        file: FileId,
        operation: Operation,
        offset: u64,
        length: u64,
        buffer: Option<(Buffer, usize)>,
        tag: u64,
    ) -> Result<(), Refused> {
        let mut guard = self.inner.borrow_mut();
        let inner = &mut *guard;
        let (buffer, start) = match buffer {
            Some((buffer, start)) => (Some(buffer), start),
            None => (None, 0),
        };
        let Some(fd) = inner.files.get(file.0) else {
            return Err(Refused { why: io::ErrorKind::NotFound, buffer });
        };
        let needed = if matches!(operation, Operation::Read | Operation::Write(_)) { length } else { 0 };
        let there = buffer.as_ref().map_or(0, |buffer| buffer.len().saturating_sub(start) as u64);
        assert!(needed <= there, "{operation:?} of {length} bytes with {there} bytes of buffer");
        let Backend::Uring(uring) = &mut inner.backend else {
            return Err(Refused { why: io::ErrorKind::Unsupported, buffer });
        };
        let fd = fd.as_raw_fd();
        let pending = Pending::Operation { client: self.id, tag, buffer };
        let slot = match inner.pending.insert(pending) {
            Ok(slot) => slot,
            Err(Pending::Operation { buffer, .. }) => {
                return Err(Refused { why: io::ErrorKind::WouldBlock, buffer });
            }
            Err(_) => unreachable!("the slab gives back what it was given"),
        };
        let Some(Pending::Operation { buffer, .. }) = inner.pending.get(slot) else {
            unreachable!("the operation was just put there")
        };
        inner.operations_in_flight += 1;
        uring.operate(uring::FileOperation {
            file: file.0.index(),
            fd,
            operation,
            offset,
            length,
            buffer: buffer.as_ref().map(|buffer| (buffer, start)),
            user_data: slot.to_bits(),
        });
        Ok(())
    }

    /// Whether file operations are possible here.
    pub fn has_files(&self) -> bool {
        matches!(self.inner.borrow().backend, Backend::Uring(_))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut inner = self.inner.borrow_mut();
        let of_mine =
            |pending: &Pending| matches!(pending, Pending::Watch { client, .. } if *client == self.id);
        let watches: Vec<Slot> =
            inner.pending.iter().filter(|(_, pending)| of_mine(pending)).map(|(slot, _)| slot).collect();
        for slot in watches {
            inner.unwatch(slot);
        }
        inner.clients.remove(self.id);
    }
}

impl Backend {
    fn watch(&mut self, fd: RawFd, interest: Interest, user_data: u64) -> io::Result<()> {
        match self {
            Backend::Uring(uring) => {
                uring.watch(fd, interest, user_data);
                Ok(())
            }
            Backend::Epoll(epoll) => epoll.watch(fd, interest, user_data),
        }
    }
}

impl Inner {
    fn turn(&mut self, wait: Option<Option<u64>>) -> usize {
        let mut count = 0;
        match &mut self.backend {
            Backend::Uring(uring) => uring.enter(wait),
            Backend::Epoll(epoll) => {
                if let Err(error) = epoll.wait(wait) {
                    panic!("epoll_wait on our own descriptor cannot fail, but did: {error}");
                }
            }
        }
        loop {
            let raw = match &mut self.backend {
                Backend::Uring(uring) => uring.next(),
                Backend::Epoll(epoll) => epoll.next(),
            };
            let Some(raw) = raw else { return count };
            count += 1;
            self.dispatch(raw);
        }
    }

    fn unwatch(&mut self, slot: Slot) {
        let Some(Pending::Watch { fd, .. }) = self.pending.get(slot) else { return };
        let fd = *fd;
        match &mut self.backend {
            Backend::Uring(uring) => {
                uring.unwatch(slot.to_bits());
                if let Some(pending) = self.pending.get_mut(slot) {
                    *pending = Pending::Unwatched;
                }
            }
            Backend::Epoll(epoll) => {
                epoll.unwatch(fd);
                self.pending.remove(slot);
            }
        }
    }

    /// Hands a completion to the client that it is for, if that is still there.
    fn deliver(&mut self, client: Slot, done: Done) {
        if let Some(queue) = self.clients.get_mut(client) {
            queue.push(done);
        }
    }

    fn dispatch(&mut self, raw: Raw) {
        match raw.user_data {
            WAKE => return self.woken(raw.more),
            IGNORED => return,
            _ => {}
        }
        let slot = Slot::from_bits(raw.user_data);
        match self.pending.get_mut(slot) {
            Some(Pending::Operation { .. }) => {
                let Some(Pending::Operation { client, tag, buffer }) = self.pending.remove(slot) else {
                    unreachable!("slot {slot:?} was an operation a line ago")
                };
                self.operations_in_flight -= 1;
                self.deliver(client, Done { tag, result: raw.result, buffer });
            }
            Some(Pending::Watch { client, tag, fd, interest }) => {
                let (client, tag, fd, interest) = (*client, *tag, *fd, *interest);
                if !raw.more {
                    // The kernel dropped the watch: for good after an error, otherwise (its
                    // completion queue was full) to be taken up again.
                    let again = raw.result >= 0 && self.backend.watch(fd, interest, slot.to_bits()).is_ok();
                    if !again {
                        self.pending.remove(slot);
                    }
                }
                self.deliver(client, Done { tag, result: raw.result, buffer: None });
            }
            Some(Pending::Unwatched) if !raw.more => {
                self.pending.remove(slot);
            }
            Some(Pending::Unwatched) | None => {}
        }
    }

    fn woken(&mut self, more: bool) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake_event.event, &mut count);
        if !more {
            let fd = self.wake_event.event.as_fd().as_raw_fd();
            if let Err(error) = self.backend.watch(fd, Interest::READABLE, WAKE) {
                panic!("the wake-up event cannot be watched again: {error}");
            }
        }
    }
}

impl Drop for Inner {
    /// The kernel may still write into buffers of operations in flight: waits for those, and gives
    /// the memory up for good where the kernel does not let go of them.
    fn drop(&mut self) {
        if self.operations_in_flight == 0 {
            return;
        }
        if let Backend::Uring(uring) = &mut self.backend {
            uring.cancel_all();
        }
        const ROUNDS_MAX: u32 = 100; // of 10 ms each
        for _ in 0..ROUNDS_MAX {
            self.turn(Some(Some(10_000_000)));
            if self.operations_in_flight == 0 {
                return;
            }
        }
        let pending = std::mem::replace(&mut self.pending, Slab::with_capacity(0));
        std::mem::forget(pending);
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Events({:?})", self.engine())
    }
}

// Miri has no such system calls.
#[cfg(all(test, not(miri)))]
mod tests;
