//! An io_uring that owns the requests in it, and its files.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{CancelBuilder, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, squeue};
use memory::{Arena, Buffer};
use ring::{Completion, Request, Status};

use crate::requests::{Requests, RingFile, span};
use crate::sqe::Handle;

mod dialect;

pub use dialect::{Commands, Dialect, Transfers};

/// `EnterFlags` are typed in the crate only for what it calls itself.
const GETEVENTS: u32 = EnterFlags::GETEVENTS.bits();
const SQ_WAKEUP: u32 = EnterFlags::SQ_WAKEUP.bits();
/// How often a loop that asks the ring looks at the clock.
const ASKS_A_LOOK: u32 = 256;
/// How long a ring that is dropped cancels what is in flight, and then waits for it.
const CANCEL_TIME_MAX: Timespec = Timespec::new().sec(1);
const DROP_TIME_MAX: Duration = Duration::from_secs(5);

/// Who asks the kernel whether an io_uring has work, or results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Polling {
    /// A kernel thread looks for submissions, so that none needs a system call.
    pub submission: bool,
    /// Where that thread runs.
    pub submission_cpu: Option<u32>,
    /// Milliseconds without work after which it sleeps.
    pub submission_idle_ms: u32,
    /// Completions are asked for, not announced by interrupts (`IORING_SETUP_IOPOLL`). Direct I/O on devices
    /// with polled queues only.
    pub completion: bool,
}

/// How a [`Uring`] is made.
#[derive(Clone, Copy, Debug)]
pub struct UringConfig {
    /// Most requests at a time; at most [`Uring::DEPTH_MAX`].
    pub depth: u32,
    /// Who looks.
    pub polling: Polling,
    /// One address an I/O, not a vector of one.
    pub nonvectored: bool,
    /// Whether a flush is `fdatasync` and not `fsync`.
    pub data_sync: bool,
    /// Most requests in one system call; 0 for as many as there are.
    pub batch_max: u32,
}

/// A ring of requests. A request's buffer belongs to it from [`submit`](Self::submit) until the kernel has
/// completed it, which is why all of this is safe to call.
///
/// The `flow` of a request is the index of its file; its tag lies below the depth and is in flight once.
pub struct Uring<F, D: Dialect> {
    ring: IoUring<D::Sqe, D::Cqe>,
    dialect: D,
    place: Place<F>,
    requests: Requests,
    polling: Polling,
    /// Queued in the ring, not yet submitted.
    queued: u32,
    batch_max: u32,
}

/// Files, and where registered memory is found.
pub struct Place<F> {
    files: Vec<F>,
    fixed_files: bool,
    /// The registered index of each chunk of the arena, by the chunk's index.
    chunks: Vec<u16>,
    /// The buffers that are registered one by one, by the tag of their request.
    whole: Vec<Option<Whole>>,
    /// The arena of what is registered: no other may be mapped where its chunks are.
    arena: Option<Arc<Arena>>,
}

/// A buffer that is registered on its own.
#[derive(Clone, Copy)]
struct Whole {
    start: usize,
    bytes: u32,
    index: u16,
}

const UNREGISTERED: u16 = u16::MAX;

impl<F: RingFile> Place<F> {
    #[inline]
    fn file(&self, request: &Request<Buffer>) -> &F {
        &self.files[request.flow as usize]
    }

    #[inline]
    fn handle(&self, request: &Request<Buffer>) -> Handle {
        let raw = self.file(request).as_fd().as_raw_fd();
        if self.fixed_files { Handle::Registered(request.flow.into()) } else { Handle::Descriptor(raw) }
    }

    /// The index under which the buffer's memory is registered.
    #[inline]
    fn registered(&self, buffer: &Buffer) -> Option<u16> {
        if self.chunks.is_empty() {
            return None;
        }
        let index = *self.chunks.get(buffer.chunk_index()? as usize)?;
        (index != UNREGISTERED).then_some(index)
    }

    /// The index of the request's buffer, where it is registered on its own and all of it is used.
    #[inline]
    fn registered_whole(&self, request: &Request<Buffer>, bytes: u32) -> Option<u16> {
        let whole = (*self.whole.get(request.tag.0 as usize)?)?;
        let start = request.buffer.as_ref()?.as_ptr() as usize;
        (whole.start == start && whole.bytes == bytes).then_some(whole.index)
    }
}

impl<F: RingFile, D: Dialect> Uring<F, D> {
    /// Most requests at a time: the entries that the kernel allows in a submission queue.
    pub const DEPTH_MAX: u32 = 32_768;
    /// Pieces of memory, and files, that the kernel registers with one ring.
    pub const REGISTERED_MAX: usize = 16_384;

    /// A ring over files, with every flag that the kernel knows: an older one refuses what it does not.
    ///
    /// # Errors
    /// What `io_uring_setup` says: `EPERM` where `kernel.io_uring_disabled` forbids it, `ENOMEM` above the limit
    /// of locked memory, `EINVAL` for a core that is not there.
    pub fn new(config: &UringConfig, files: Vec<F>) -> io::Result<Uring<F, D>> {
        let ring = build(config, true).or_else(|error| match config.polling.submission {
            true => Err(error),
            false => build(config, false),
        })?;
        Ok(Uring {
            ring,
            dialect: D::new(config),
            place: Place { files, fixed_files: false, chunks: Vec::new(), whole: Vec::new(), arena: None },
            requests: Requests::new(config.depth),
            polling: config.polling,
            queued: 0,
            batch_max: if config.batch_max == 0 { u32::MAX } else { config.batch_max },
        })
    }

    /// Registers the files, so that the kernel does not look them up for each I/O.
    ///
    /// # Errors
    /// What the kernel says: `EMFILE` for more than [`REGISTERED_MAX`](Self::REGISTERED_MAX).
    pub fn register_files(&mut self) -> io::Result<()> {
        let fds: Vec<RawFd> = self.place.files.iter().map(|file| file.as_fd().as_raw_fd()).collect();
        if !fds.is_empty() {
            self.ring.submitter().register_files(&fds)?;
            self.place.fixed_files = true;
        }
        Ok(())
    }

    /// Registers the memory of the requests' buffers, so that the kernel does not map it for each I/O. Those of
    /// [`Commands`] are registered one by one, and named as registered where a request with the same tag uses
    /// all of the buffer; of others, whole chunks are.
    ///
    /// Only buffers of the same arena may be submitted from then on; the kernel answers `EFAULT` to others.
    ///
    /// # Errors
    /// What the kernel says, as `ENOMEM` above the limit of locked memory; `InvalidInput` for more than
    /// [`REGISTERED_MAX`](Self::REGISTERED_MAX) pieces, for buffers of several arenas, or the second time.
    pub fn register_buffers(&mut self, requests: &[Request<Buffer>]) -> io::Result<()> {
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
        if self.place.arena.is_some() {
            return Err(invalid("buffers are registered already".to_string()));
        }
        let mut chunks = Vec::new();
        let mut vectors = Vec::new();
        let mut whole = Vec::new();
        let mut arena: Option<&Arc<Arena>> = None;
        for request in requests {
            let Some(buffer) = &request.buffer else { continue };
            let Some(chunk) = buffer.chunk() else { continue };
            if !Arc::ptr_eq(arena.get_or_insert(buffer.arena()), buffer.arena()) {
                return Err(invalid("buffers of several arenas".to_string()));
            }
            let next = vectors.len() as u16;
            if D::WHOLE_BUFFERS {
                let (start, tag) = (buffer.as_ptr(), request.tag.0 as usize);
                if tag >= Self::DEPTH_MAX as usize {
                    return Err(invalid(format!("tag {tag} is above every depth")));
                }
                if whole.len() <= tag {
                    whole.resize(tag + 1, None);
                }
                whole[tag] = Some(Whole { start: start as usize, bytes: buffer.len() as u32, index: next });
                vectors.push(libc::iovec { iov_base: start.cast(), iov_len: buffer.len() });
            } else {
                let index = chunk.index as usize;
                if chunks.len() <= index {
                    chunks.resize(index + 1, UNREGISTERED);
                }
                if chunks[index] == UNREGISTERED {
                    chunks[index] = next;
                    vectors.push(libc::iovec { iov_base: chunk.start.cast(), iov_len: chunk.bytes });
                }
            }
            if vectors.len() > Self::REGISTERED_MAX {
                return Err(invalid(format!("more than {} pieces of memory", Self::REGISTERED_MAX)));
            }
        }
        if vectors.is_empty() {
            return Ok(());
        }
        let arena = arena.cloned();
        // SAFETY: chunks stay mapped as long as their arena, which is kept with the ring; the kernel uses
        // them only for entries that name a buffer in them, which is kept with its request.
        unsafe { self.ring.submitter().register_buffers(&vectors) }?;
        (self.place.chunks, self.place.whole, self.place.arena) = (chunks, whole, arena);
        Ok(())
    }

    /// The files, by a request's `flow`.
    #[inline]
    pub fn files(&self) -> &[F] {
        &self.place.files
    }

    /// Requests that the kernel holds, or has completed and nobody has reaped.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.requests.len()
    }

    /// How many more it takes.
    #[inline]
    pub fn room(&self) -> usize {
        self.requests.room()
    }

    /// Takes the first `count` requests of `batch`, as far as there is room, and gives them to the kernel; how
    /// many it took. Fewer may fit where a polling thread is behind, or the kernel short of something.
    ///
    /// # Panics
    /// If there are not so many; if a tag is in flight, or not below the depth; if a request is longer than
    /// its buffer.
    pub fn submit(&mut self, batch: &mut Vec<Request<Buffer>>, count: usize) -> usize {
        let wanted = count.min(self.requests.room());
        let mut left = wanted;
        while left > 0 {
            let mut queue = self.ring.submission();
            // There are as many entries as slots, but for those that a polling thread has not yet read.
            let room = queue.capacity() - queue.len();
            let now = left.min(room).min(self.batch_max.saturating_sub(self.queued) as usize);
            if now == 0 {
                break;
            }
            for request in batch.drain(..now) {
                let request = self.requests.put(request);
                let span = span(self.place.file(request), request);
                let entry = self.dialect.describe(request, span, &self.place);
                // SAFETY: the entry's memory belongs to the request, which sits in its slot until the kernel
                // has completed it, and its file to the ring.
                let pushed = unsafe { queue.push(&entry) };
                assert!(pushed.is_ok(), "a submission queue has the room that it said it had");
            }
            drop(queue);
            left -= now;
            self.queued += now as u32;
            self.enter_queued();
        }
        self.enter_queued();
        wanted - left
    }

    /// Gives the kernel what is queued; nothing where its thread takes it by itself and is awake.
    #[inline]
    fn enter_queued(&mut self) {
        if self.queued > 0 {
            self.enter_now();
        }
    }

    fn enter_now(&mut self) {
        if self.polling.submission {
            self.queued = 0;
            self.wake_thread();
            return;
        }
        while self.queued > 0 {
            let submitted = self.enter(self.queued, 0, 0);
            if submitted == 0 {
                // The kernel is short of something; the next turn tries again.
                return;
            }
            self.queued -= submitted.min(self.queued);
        }
    }

    fn wake_thread(&mut self) {
        if self.ring.submission().need_wakeup() {
            self.enter(0, 0, SQ_WAKEUP);
        }
    }

    /// Appends up to `max` completed requests to `sink`; how many they were. `status` is shown each with its
    /// file and its result: bytes, or a negative error number, or what a command's result is.
    #[inline]
    pub fn reap(
        &mut self,
        max: usize,
        sink: &mut Vec<Completion<Buffer>>,
        status: impl Fn(&F, &Request<Buffer>, i64) -> Status,
    ) -> usize {
        if self.requests.len() == 0 {
            return 0;
        }
        self.enter_queued();
        let (place, requests) = (&self.place, &mut self.requests);
        let mut queue = self.ring.completion();
        let mut count = 0;
        while count < max
            && let Some(entry) = queue.next()
        {
            let (tag, result) = D::outcome(&entry);
            sink.push(requests.complete(tag, |request| status(place.file(request), request, result)));
            count += 1;
        }
        count
    }

    /// Returns when something can be reaped, or after the time; at once when nothing is in flight. Signals
    /// may end it early.
    pub fn wait(&mut self, timeout_ns: u64) {
        if self.requests.len() == 0 || self.is_ready() {
            return;
        }
        if self.polling.submission || self.polling.completion {
            return self.ask(timeout_ns);
        }
        let time = Timespec::new().sec(timeout_ns / 1_000_000_000).nsec((timeout_ns % 1_000_000_000) as u32);
        // A timeout and a signal are errors here, and mean that nothing is there: the caller looks.
        let _ = self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time));
        self.queued = self.ring.submission().len() as u32;
    }

    /// Whether completions lie in the ring.
    fn is_ready(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    /// Asks until there is something: the device, or, where a thread asks that, the ring.
    fn ask(&mut self, timeout_ns: u64) {
        let begun = Instant::now();
        let mut asks = 0u32;
        loop {
            if !self.polling.submission {
                // With nothing to wait for, the kernel polls the device once.
                self.enter(0, 0, GETEVENTS);
            } else if asks.is_multiple_of(ASKS_A_LOOK) {
                self.wake_thread();
            } else {
                std::hint::spin_loop();
            }
            asks = asks.wrapping_add(1);
            let look = !self.polling.submission || asks.is_multiple_of(ASKS_A_LOOK);
            if self.is_ready() || (look && begun.elapsed().as_nanos() >= u128::from(timeout_ns)) {
                return;
            }
        }
    }

    /// The kernel thread that looks for submissions, where there is one; the kernel says it in the ring's
    /// fdinfo: `SqThread: 123`.
    pub fn submission_thread(&self) -> Option<u32> {
        let path = format!("/proc/self/fdinfo/{}", self.ring.as_raw_fd());
        let text = std::fs::read_to_string(path).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("SqThread:"))?;
        line.trim().parse::<i64>().ok().and_then(|thread| u32::try_from(thread).ok())
    }
}

impl<F, D: Dialect> Uring<F, D> {
    fn enter(&self, submit: u32, complete: u32, flags: u32) -> u32 {
        // SAFETY: no argument is passed, and the flags say so.
        let result = unsafe { self.ring.submitter().enter::<libc::sigset_t>(submit, complete, flags, None) };
        // An error is transient (a signal, a full completion queue, no memory): nothing was taken.
        result.unwrap_or(0) as u32
    }

    /// Waits for what is in flight, as long as that may take.
    fn settle(&mut self) {
        // A panic may have left a request here that the kernel was never given, and does not end.
        let time_max = if std::thread::panicking() { DROP_TIME_MAX / 50 } else { DROP_TIME_MAX };
        let begun = Instant::now();
        loop {
            for entry in self.ring.completion() {
                drop(self.requests.take(D::outcome(&entry).0));
            }
            if self.requests.len() == 0 || begun.elapsed() > time_max {
                return;
            }
            if self.polling.completion {
                self.enter(0, 0, GETEVENTS);
                continue;
            }
            let time = Timespec::new().nsec(10_000_000);
            // Errors are timeouts and signals: what is there is looked at, and the time is bounded.
            let _ = self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time));
        }
    }
}

impl<F, D: Dialect> Drop for Uring<F, D> {
    /// The kernel may still write into the buffers of what is in flight: cancels what can be, waits for the
    /// rest, and gives the memory up for good where the kernel does not let go of it.
    fn drop(&mut self) {
        if self.requests.len() == 0 {
            return;
        }
        let _ = self.ring.submit();
        // What a disk works on is not found, and ends by itself.
        let _ = self.ring.submitter().register_sync_cancel(Some(CANCEL_TIME_MAX), CancelBuilder::any());
        self.settle();
        if self.requests.len() > 0 {
            self.requests.forget();
            self.dialect.forget();
        }
    }
}

fn build<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    config: &UringConfig,
    modern: bool,
) -> io::Result<IoUring<S, C>> {
    let polling = config.polling;
    let mut builder = IoUring::<S, C>::builder();
    builder.dontfork().setup_cqsize(config.depth.next_power_of_two().max(2));
    if polling.completion {
        builder.setup_iopoll();
    }
    if polling.submission {
        builder.setup_sqpoll(polling.submission_idle_ms);
        if let Some(cpu) = polling.submission_cpu {
            builder.setup_sqpoll_cpu(cpu);
        }
    } else if modern {
        // Completions need no interrupt of this thread: it looks by itself.
        builder.setup_coop_taskrun().setup_single_issuer();
    }
    builder.build(config.depth)
}

// Miri has no such system calls.
#[cfg(all(test, not(miri)))]
mod tests;
