//! An io_uring queue that owns its files and the requests in flight.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use block_io::{Completion, Request, Status};
use dma::{Arena, Buffer, Data};
use io_uring::types::{CancelBuilder, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue};

use crate::drain::drain;
use crate::priorities::RequestPriorities;
use crate::requests::{self, BlockFile, InFlightRequests, byte_range, queue_accessors};
use crate::sqe::SqeFile;

mod sqe_format;

pub use sqe_format::{FileIo, NvmePassthrough, SqeFormat};

/// The crate has these as `EnterFlags`; its `enter` takes raw bits.
const GETEVENTS: u32 = EnterFlags::GETEVENTS.bits();
const SQ_WAKEUP: u32 = EnterFlags::SQ_WAKEUP.bits();
/// A polling loop reads the clock once per this number of polls.
const POLLS_PER_CLOCK_READ: u32 = 256;
/// What the timer entry of a queue is called in its completion; no tag is so large.
const TICK: u64 = u64::MAX;
static TICK_TIME: Timespec = Timespec::new().nsec(requests::TICK_NS as u32);
/// Time limits when a queue is dropped: for the cancellation of requests in flight, and for their completion.
const CANCEL_TIME_MAX: Timespec = Timespec::new().sec(1);
const DROP_TIME_MAX: Duration = Duration::from_secs(5);

/// Polling modes of an io_uring; both are off by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UringPolling {
    /// A kernel thread polls the submission queue (`IORING_SETUP_SQPOLL`), so that submission needs no system call.
    pub sqpoll: bool,
    /// The CPU of that thread; `None` for no affinity.
    pub sqpoll_cpu: Option<u32>,
    /// Milliseconds without work after which that thread sleeps.
    pub sqpoll_idle_ms: u32,
    /// Completions are polled from the device instead of signalled by interrupts (`IORING_SETUP_IOPOLL`). Only for
    /// direct I/O on devices with polled queues.
    pub iopoll: bool,
}

/// Configuration of a [`UringQueue`].
#[derive(Clone, Copy, Debug)]
pub struct UringQueueConfig {
    /// Maximum number of requests in flight; at most [`UringQueue::DEPTH_MAX`].
    pub depth: u32,
    /// Polling modes.
    pub polling: UringPolling,
    /// Use `READ` and `WRITE` instead of `READV` and `WRITEV` with one vector. Data of several slices always uses these.
    pub nonvectored: bool,
    /// Whether a flush is `fdatasync` instead of `fsync`.
    pub data_sync: bool,
    /// Maximum number of requests per system call; 0 for no limit.
    pub batch_max: u32,
}

/// An io_uring instance with the files and requests that the kernel uses.
///
/// The queue owns a request and its buffer from [`submit`](Self::submit) until [`reap`](Self::reap) returns it, which
/// makes the interface safe. `D` is the format of the entries: [`FileIo`] or [`NvmePassthrough`]. Register files and
/// buffers first, then submit, [`wait`](Self::wait) and reap. Drop cancels the requests in flight, waits for them for
/// a limited time, and leaks the memory of those that remain.
///
/// The `flow` of a request is the index of its file; its tag must be below the depth and not in flight.
pub struct UringQueue<F, D: SqeFormat> {
    ring: IoUring<D::Sqe, D::Cqe>,
    dialect: D,
    resources: QueueResources<F>,
    requests: InFlightRequests,
    polling: UringPolling,
    /// Whether the kernel completes requests only when this thread enters it for completions
    /// (`IORING_SETUP_DEFER_TASKRUN`).
    deferred: bool,
    /// Whether a timer entry is in flight, which ends a wait without a time-out of its own.
    ticking: bool,
    /// Entries in the submission queue that are not submitted yet.
    queued: u32,
    batch_max: u32,
}

/// The files and the registered memory of a queue.
pub struct QueueResources<F> {
    files: Vec<F>,
    fixed_files: bool,
    /// The registered-buffer index of each chunk, by the chunk's index in the arena.
    chunks: Vec<u16>,
    /// Individually registered buffers, by the tag of their request.
    buffers: Vec<Option<RegisteredBuffer>>,
    /// The arena of the registered memory, kept alive so that its addresses are not reused.
    arena: Option<Arc<Arena>>,
    priorities: Option<RequestPriorities>,
}

/// An individually registered buffer.
#[derive(Clone, Copy)]
struct RegisteredBuffer {
    start: usize,
    bytes: u32,
    index: u16,
}

const UNREGISTERED: u16 = u16::MAX;

impl<F: BlockFile> QueueResources<F> {
    #[inline]
    fn file(&self, request: &Request<Data>) -> &F {
        &self.files[request.flow as usize]
    }

    #[inline]
    fn handle(&self, request: &Request<Data>) -> SqeFile {
        let raw = self.file(request).as_fd().as_raw_fd();
        if self.fixed_files { SqeFile::Registered(request.flow.into()) } else { SqeFile::Descriptor(raw) }
    }

    /// The request's I/O priority.
    #[inline]
    fn priority(&self, request: &Request<Data>) -> u16 {
        self.priorities.as_ref().map_or(0, |priorities| priorities.get(request.tag.0))
    }

    /// The registered-buffer index of the buffer's chunk.
    #[inline]
    fn registered_chunk(&self, buffer: &Buffer) -> Option<u16> {
        if self.chunks.is_empty() {
            return None;
        }
        let index = *self.chunks.get(buffer.chunk_index()? as usize)?;
        (index != UNREGISTERED).then_some(index)
    }

    /// The registered-buffer index of the request's buffer, if it is individually registered and used as a whole.
    #[inline]
    fn registered_buffer(&self, request: &Request<Data>, bytes: u32) -> Option<u16> {
        let registered = (*self.buffers.get(request.tag.0 as usize)?)?;
        let start = request.data().and_then(Data::single)?.as_ptr() as usize;
        (registered.start == start && registered.bytes == bytes).then_some(registered.index)
    }
}

impl<F: BlockFile, D: SqeFormat> UringQueue<F, D> {
    /// Maximum depth: the kernel's limit of submission queue entries.
    pub const DEPTH_MAX: u32 = 32_768;
    /// The kernel's limit of registered buffers, and of registered files, per instance.
    pub const REGISTERED_MAX: usize = 16_384;

    /// Creates a queue for `files`; retries without newer setup flags if the kernel rejects them.
    ///
    /// # Errors
    /// The error of `io_uring_setup`: `EPERM` if `kernel.io_uring_disabled` forbids it, `ENOMEM` above the limit of
    /// locked memory, `EINVAL` for a CPU that does not exist.
    pub fn new(config: &UringQueueConfig, files: Vec<F>) -> io::Result<UringQueue<F, D>> {
        let (ring, deferred) = build(config)?;
        Ok(UringQueue {
            ring,
            deferred,
            ticking: false,
            dialect: D::new(config),
            resources: QueueResources {
                files,
                fixed_files: false,
                chunks: Vec::new(),
                buffers: Vec::new(),
                arena: None,
                priorities: None,
            },
            requests: InFlightRequests::new(config.depth),
            polling: config.polling,
            queued: 0,
            batch_max: if config.batch_max == 0 { u32::MAX } else { config.batch_max },
        })
    }

    /// Registers the files, so that the kernel does not look them up for each I/O.
    ///
    /// # Errors
    /// The kernel's error: `EMFILE` for more than [`REGISTERED_MAX`](Self::REGISTERED_MAX).
    pub fn register_files(&mut self) -> io::Result<()> {
        let fds: Vec<RawFd> = self.resources.files.iter().map(|file| file.as_fd().as_raw_fd()).collect();
        if !fds.is_empty() {
            self.ring.submitter().register_files(&fds)?;
            self.resources.fixed_files = true;
        }
        Ok(())
    }

    /// Reads and writes have these I/O priorities; with [`NvmePassthrough`] they have none.
    pub fn set_priorities(&mut self, priorities: RequestPriorities) {
        self.resources.priorities = Some(priorities);
    }

    /// Registers the memory of the requests' buffers, so that the kernel does not map it for each I/O. With
    /// [`NvmePassthrough`] each buffer is registered individually, and used as registered if a request with the same
    /// tag uses the whole buffer; with [`FileIo`] whole chunks are registered.
    ///
    /// After this, only buffers of the same arena may be submitted; others fail with `EFAULT`.
    ///
    /// # Errors
    /// The kernel's error, such as `ENOMEM` above the limit of locked memory; `InvalidInput` for more than
    /// [`REGISTERED_MAX`](Self::REGISTERED_MAX) ranges, for buffers of several arenas, or if buffers are registered
    /// already.
    pub fn register_buffers(&mut self, requests: &[Request<Data>]) -> io::Result<()> {
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
        if self.resources.arena.is_some() {
            return Err(invalid("buffers are registered already".to_string()));
        }
        let mut chunks = Vec::new();
        let mut vectors = Vec::new();
        let mut buffers = Vec::new();
        let mut arena: Option<&Arc<Arena>> = None;
        for request in requests {
            let Some(buffer) = request.data().and_then(Data::single) else { continue };
            let Some(chunk) = buffer.chunk() else { continue };
            if !Arc::ptr_eq(arena.get_or_insert(buffer.arena()), buffer.arena()) {
                return Err(invalid("buffers of several arenas".to_string()));
            }
            let next = vectors.len() as u16;
            if D::REGISTERS_EACH_BUFFER {
                let (start, tag) = (buffer.as_ptr(), request.tag.0 as usize);
                if tag >= Self::DEPTH_MAX as usize {
                    return Err(invalid(format!("tag {tag} is above the maximum depth")));
                }
                if buffers.len() <= tag {
                    buffers.resize(tag + 1, None);
                }
                buffers[tag] =
                    Some(RegisteredBuffer { start: start as usize, bytes: buffer.len() as u32, index: next });
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
                return Err(invalid(format!("more than {} memory ranges", Self::REGISTERED_MAX)));
            }
        }
        if vectors.is_empty() {
            return Ok(());
        }
        let arena = arena.cloned();
        // SAFETY: chunks stay mapped as long as their arena, which this queue keeps alive; the kernel uses
        // them only for entries whose buffer is in them, and the queue owns those requests.
        unsafe { self.ring.submitter().register_buffers(&vectors) }?;
        (self.resources.chunks, self.resources.buffers, self.resources.arena) = (chunks, buffers, arena);
        Ok(())
    }

    queue_accessors!(resources.files, requests);

    /// Submits up to `count` requests from the front of `batch`, which it removes; returns their number. It is lower
    /// without [`room`](Self::room), if the kernel's SQPOLL thread is behind, or if the kernel lacks resources.
    ///
    /// # Panics
    /// If `batch` has fewer requests; if a tag is in flight already or not below the depth; if a request is longer
    /// than its buffer.
    pub fn submit(&mut self, batch: &mut Vec<Request<Data>>, count: usize) -> usize {
        let wanted = count.min(self.requests.room());
        let mut left = wanted;
        while left > 0 {
            let mut queue = self.ring.submission();
            // The queue has one entry per slot, less the entries that the SQPOLL thread has not read yet.
            let room = queue.capacity() - queue.len();
            let now = left.min(room).min(self.batch_max.saturating_sub(self.queued) as usize);
            if now == 0 {
                break;
            }
            for request in batch.drain(..now) {
                let request = self.requests.insert(request);
                let span = byte_range(self.resources.file(request), request);
                let entry = self.dialect.encode(request, span, &self.resources);
                // SAFETY: the entry's memory belongs to the request, which stays in its slot until the kernel
                // has completed it, and its file belongs to this queue.
                let pushed = unsafe { queue.push(&entry) };
                assert!(pushed.is_ok(), "a submission queue is full despite its reported room");
            }
            drop(queue);
            left -= now;
            self.queued += now as u32;
            self.enter_queued();
        }
        self.enter_queued();
        wanted - left
    }

    /// Submits queued entries; with SQPOLL this only wakes the kernel thread if it sleeps.
    #[inline]
    fn enter_queued(&mut self) {
        if self.queued > 0 {
            self.enter_now();
        }
    }

    fn enter_now(&mut self) {
        if self.polling.sqpoll {
            self.queued = 0;
            self.wake_thread();
            return;
        }
        while self.queued > 0 {
            // The same system call completes what has finished.
            let flags = if self.deferred { GETEVENTS } else { 0 };
            let submitted = self.enter(self.queued, 0, flags);
            if submitted == 0 {
                // The kernel lacks resources; a later submit or reap retries.
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

    /// Appends up to `max` completed requests to `sink`; returns their number. `status` maps the result of a request
    /// to its status: the result is a number of bytes, a negative error number or, with [`NvmePassthrough`], an NVMe
    /// status field.
    #[inline]
    pub fn reap(
        &mut self,
        max: usize,
        sink: &mut Vec<Completion<Data>>,
        status: impl Fn(&F, &Request<Data>, i64) -> Status,
    ) -> usize {
        if self.requests.len() == 0 {
            return 0;
        }
        self.enter_queued();
        if self.deferred && !self.is_ready() && self.ring.submission().taskrun() {
            self.enter(0, 0, GETEVENTS);
        }
        let (resources, requests) = (&self.resources, &mut self.requests);
        let mut queue = self.ring.completion();
        let mut count = 0;
        while count < max
            && let Some(entry) = queue.next()
        {
            let (tag, result) = D::decode(&entry);
            if tag == TICK {
                self.ticking = false;
                continue;
            }
            sink.push(requests.complete(tag, |request| status(resources.file(request), request, result)));
            count += 1;
        }
        count
    }

    /// Waits until a completion can be reaped or the time-out expires; returns immediately if nothing is in flight.
    /// A signal may end the wait early, and a time-out of more than 20 ms may be shortened to that.
    pub fn wait(&mut self, timeout_ns: u64) {
        if self.requests.len() == 0 || self.is_ready() {
            return;
        }
        if self.polling.sqpoll || self.polling.iopoll {
            return self.poll_until_ready(timeout_ns);
        }
        // A time-out and a signal are errors here and mean that there may be no completion: the caller checks.
        let _ = match timeout_ns >= requests::TICK_NS && self.start_tick() {
            true => self.ring.submitter().submit_and_wait(1),
            false => {
                let (sec, nsec) = (timeout_ns / 1_000_000_000, (timeout_ns % 1_000_000_000) as u32);
                let time = Timespec::new().sec(sec).nsec(nsec);
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time))
            }
        };
        self.queued = self.ring.submission().len() as u32;
    }

    /// Queues the timer entry unless it is in flight. With it a wait sets no timer of its own, which would cost as much
    /// as the rest of the wait in a virtual machine. Returns false if the queue is full.
    #[inline]
    fn start_tick(&mut self) -> bool {
        if !self.ticking {
            let entry = opcode::Timeout::new(&raw const TICK_TIME).build().user_data(TICK);
            // SAFETY: the entry points to a static only.
            self.ticking = unsafe { self.ring.submission().push(&entry.into()) }.is_ok();
        }
        self.ticking
    }

    /// Whether the completion queue has entries.
    fn is_ready(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    /// Polls until there is a completion: the device with IOPOLL, or the completion queue with SQPOLL.
    fn poll_until_ready(&mut self, timeout_ns: u64) {
        let begun = Instant::now();
        let mut polls = 0u32;
        loop {
            if !self.polling.sqpoll {
                // With a minimum of 0 completions, the kernel polls the device once.
                self.enter(0, 0, GETEVENTS);
            } else if polls.is_multiple_of(POLLS_PER_CLOCK_READ) {
                self.wake_thread();
            } else {
                std::hint::spin_loop();
            }
            polls = polls.wrapping_add(1);
            let read_clock = !self.polling.sqpoll || polls.is_multiple_of(POLLS_PER_CLOCK_READ);
            if self.is_ready() || (read_clock && begun.elapsed().as_nanos() >= u128::from(timeout_ns)) {
                return;
            }
        }
    }

    /// The thread identifier of the kernel's SQPOLL thread, if there is one. The source is the line `SqThread: 123`
    /// in the fdinfo of the io_uring.
    pub fn sqpoll_thread_id(&self) -> Option<u32> {
        let path = format!("/proc/self/fdinfo/{}", self.ring.as_raw_fd());
        let text = std::fs::read_to_string(path).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("SqThread:"))?;
        line.trim().parse::<i64>().ok().and_then(|thread| u32::try_from(thread).ok())
    }
}

impl<F, D: SqeFormat> UringQueue<F, D> {
    fn enter(&self, submit: u32, complete: u32, flags: u32) -> u32 {
        // SAFETY: no argument is passed, and the flags announce none.
        let result = unsafe { self.ring.submitter().enter::<libc::sigset_t>(submit, complete, flags, None) };
        // An error is transient (a signal, a full completion queue, no memory): nothing was submitted.
        result.unwrap_or(0) as u32
    }

    /// Takes the completed requests, and waits for others for a short time; returns whether none is in flight.
    fn drain_step(&mut self) -> bool {
        for entry in self.ring.completion() {
            let (tag, _) = D::decode(&entry);
            if tag != TICK {
                drop(self.requests.take(tag));
            }
        }
        if self.requests.len() == 0 {
            return true;
        }
        if self.polling.iopoll {
            self.enter(0, 0, GETEVENTS);
        } else {
            let time = Timespec::new().nsec(10_000_000);
            // Errors are time-outs and signals: the caller checks the completion queue and the time limit.
            let _ = self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time));
        }
        false
    }
}

impl<F, D: SqeFormat> Drop for UringQueue<F, D> {
    /// Cancels requests in flight, waits for the others, because the kernel may still write into their buffers, and
    /// leaks the memory of those that do not complete.
    fn drop(&mut self) {
        if self.requests.len() == 0 {
            return;
        }
        let _ = self.ring.submit();
        // Requests that a disk executes cannot be cancelled; they complete by themselves.
        let _ = self.ring.submitter().register_sync_cancel(Some(CANCEL_TIME_MAX), CancelBuilder::any());
        if !drain(DROP_TIME_MAX, || self.drain_step()) {
            self.requests.leak();
            self.dialect.leak();
        }
    }
}

/// Creates the ring, and whether it defers completions to this thread's system calls: they interrupt nothing then, and
/// wake it once. Kernels before 6.1 lack it, and before 5.19 they always interrupt.
fn build<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    config: &UringQueueConfig,
) -> io::Result<(IoUring<S, C>, bool)> {
    let polling = config.polling;
    let mut builder = IoUring::<S, C>::builder();
    builder.dontfork().setup_cqsize((config.depth + 1).next_power_of_two());
    if polling.iopoll {
        builder.setup_iopoll();
    }
    if polling.sqpoll {
        builder.setup_sqpoll(polling.sqpoll_idle_ms);
        if let Some(cpu) = polling.sqpoll_cpu {
            builder.setup_sqpoll_cpu(cpu);
        }
        return Ok((builder.build(config.depth)?, false));
    }
    let mut deferring = builder.clone();
    deferring.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    if let Ok(ring) = deferring.build(config.depth) {
        return Ok((ring, true));
    }
    let mut cooperative = builder.clone();
    let ring =
        cooperative.setup_coop_taskrun().build(config.depth).or_else(|_| builder.build(config.depth))?;
    Ok((ring, false))
}

// Miri does not implement io_uring.
#[cfg(all(test, not(miri)))]
mod tests;
