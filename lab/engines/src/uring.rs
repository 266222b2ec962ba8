//! `io_uring` in the papers' modes, and the part of it that commands share.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue, types};
use memory::Buffer;
use ring::{Channel, Completion, Op, Request, Status};

use crate::engine::{Polling, Slots, drain, status_of};
use crate::{Config, Engine, File, OpenError};

/// Entries that the kernel allows in a submission queue.
const ENTRIES_MAX: usize = 32_768;
/// Buffers and files that the kernel registers with one ring.
const REGISTERED_MAX: usize = 16_384;
/// `EnterFlags` are typed in the crate only for what it calls itself.
const GETEVENTS: u32 = EnterFlags::GETEVENTS.bits();
const SQ_WAKEUP: u32 = EnterFlags::SQ_WAKEUP.bits();
/// How often a loop that asks the ring looks at the clock.
const ASKS_A_LOOK: u32 = 256;

/// What a request is as an entry, and how it ended.
pub(crate) trait Shape {
    type Sqe: squeue::EntryMarker;
    type Cqe: cqueue::EntryMarker;
    /// Describes a request, whose buffer stays where it is until it completes.
    fn describe(&mut self, request: &Request<Buffer>, place: &Place) -> Self::Sqe;
    /// Its tag and how it ended.
    fn outcome(&self, entry: &Self::Cqe, slots: &Slots) -> (u64, i64);
    /// The status, of a result for a request of so many bytes.
    fn status(&self, op: Op, result: i64, wanted: u64) -> Status;
}

/// Files, and where registered memory is found.
pub(crate) struct Place {
    pub(crate) files: Vec<File>,
    pub(crate) fixed_files: bool,
    /// The registered index of each chunk of the arena, by the chunk's index.
    chunks: Vec<u16>,
}

const UNREGISTERED: u16 = u16::MAX;

impl Place {
    /// The index under which the buffer's memory is registered.
    #[inline]
    pub(crate) fn registered(&self, buffer: &Buffer) -> Option<u16> {
        let index = *self.chunks.get(buffer.chunk_index()? as usize)?;
        (index != UNREGISTERED).then_some(index)
    }

    pub(crate) fn bytes(&self, request: &Request<Buffer>) -> u64 {
        u64::from(request.blocks) * u64::from(self.files[request.flow as usize].block_bytes())
    }
}

/// A ring, and the requests in it.
pub(crate) struct Ring<S: Shape> {
    ring: IoUring<S::Sqe, S::Cqe>,
    shape: S,
    place: Place,
    slots: Slots,
    /// What needed no ring: discards.
    done: Vec<Completion<Buffer>>,
    polling: Polling,
    /// Queued in the ring, not yet submitted.
    queued: u32,
    batch_max: u32,
    reap_max: usize,
}

impl<S: Shape> Ring<S> {
    pub(crate) fn open(
        config: &Config,
        files: Vec<File>,
        requests: &[Request<Buffer>],
        shape: S,
    ) -> Result<Ring<S>, OpenError> {
        let engine = config.kind.name();
        let too_many = |count, what, max| OpenError::TooMany { engine, count, what, max };
        if config.depth as usize > ENTRIES_MAX {
            return Err(too_many(config.depth as usize, "entries", ENTRIES_MAX));
        }
        let ring = build(config).map_err(|error| OpenError::Kernel {
            engine,
            call: "io_uring_setup",
            hint: match error.raw_os_error() {
                Some(libc::EPERM) => "; kernel.io_uring_disabled=0 as root allows it",
                Some(libc::EINVAL) if config.polling.submission_cpu.is_some() => {
                    "; is the core of sqthread_poll_cpu there, and online?"
                }
                Some(libc::ENOMEM) => "; raise the limit of locked memory (ulimit -l)",
                _ => "",
            },
            error,
        })?;
        let mut ring = Ring {
            ring,
            shape,
            place: Place { files, fixed_files: config.register_files, chunks: Vec::new() },
            slots: Slots::new(config.depth),
            done: Vec::new(),
            polling: config.polling,
            queued: 0,
            batch_max: if config.batch_max == 0 { u32::MAX } else { config.batch_max },
            reap_max: if config.reap_max == 0 { usize::MAX } else { config.reap_max as usize },
        };
        let kernel = |call, hint| move |error| OpenError::Kernel { engine, call, error, hint };
        if config.register_files && !ring.place.files.is_empty() {
            let fds: Vec<RawFd> = ring.place.files.iter().map(File::raw_fd).collect();
            if fds.len() > REGISTERED_MAX {
                return Err(too_many(fds.len(), "files", REGISTERED_MAX));
            }
            ring.ring.submitter().register_files(&fds).map_err(kernel("registerfiles", ""))?;
        }
        if config.fixed_buffers {
            let vectors = ring.chunk_vectors(requests);
            if vectors.len() > REGISTERED_MAX {
                return Err(too_many(vectors.len(), "chunks of buffers", REGISTERED_MAX));
            }
            let hint = "; raise the limit of locked memory (ulimit -l)";
            if !vectors.is_empty() {
                // SAFETY: chunks stay mapped as long as their arena, which the caller's buffers keep alive, and
                // the kernel holds the pages of what is registered itself.
                unsafe { ring.ring.submitter().register_buffers(&vectors) }
                    .map_err(kernel("fixedbufs", hint))?;
            }
        }
        Ok(ring)
    }

    /// The chunks behind the buffers, each once; notes which index each will have.
    fn chunk_vectors(&mut self, requests: &[Request<Buffer>]) -> Vec<libc::iovec> {
        let mut vectors = Vec::new();
        for chunk in requests.iter().filter_map(|request| request.buffer.as_ref()?.chunk()) {
            let index = chunk.index as usize;
            if self.place.chunks.len() <= index {
                self.place.chunks.resize(index + 1, UNREGISTERED);
            }
            if self.place.chunks[index] == UNREGISTERED {
                self.place.chunks[index] = vectors.len() as u16;
                vectors.push(libc::iovec { iov_base: chunk.start.cast(), iov_len: chunk.bytes });
            }
        }
        vectors
    }

    /// Gives the kernel what is queued; nothing where its thread takes it by itself and is awake.
    fn enter_submit(&mut self) {
        if self.polling.submission {
            self.queued = 0;
            let asleep = self.ring.submission().need_wakeup_after_intermittent_seqcst();
            if asleep {
                self.enter(0, 0, SQ_WAKEUP);
            }
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

    fn enter(&self, submit: u32, complete: u32, flags: u32) -> u32 {
        // SAFETY: no argument is passed, and the flags say so.
        let result = unsafe { self.ring.submitter().enter::<libc::sigset_t>(submit, complete, flags, None) };
        // An error is transient (a signal, a full completion queue, no memory): nothing was taken.
        result.unwrap_or(0) as u32
    }

    pub(crate) fn submit(&mut self, batch: &mut Vec<Request<Buffer>>) {
        let count = batch.len().min(self.slots.room() - self.done.len());
        for request in batch.drain(..count) {
            if request.op == Op::Unmap {
                let file = &self.place.files[request.flow as usize];
                let unit = u64::from(file.block_bytes());
                let result = file.discard(request.lba * unit, u64::from(request.blocks) * unit);
                self.done.push(request.complete(status_of(Op::Unmap, result.into(), 0)));
                continue;
            }
            let entry = self.shape.describe(&request, &self.place);
            self.slots.put(request);
            // SAFETY: the entry's memory belongs to the request, which sits in its slot until the kernel
            // has completed it.
            let pushed = unsafe { self.ring.submission().push(&entry) };
            // There are as many entries as slots, but for those that a polling thread has not yet read.
            assert!(pushed.is_ok() || self.polling.submission, "a ring has room for its depth");
            if pushed.is_err() {
                self.push_when_read(&entry);
            }
            self.queued += 1;
            if self.queued >= self.batch_max {
                self.enter_submit();
            }
        }
        if self.queued > 0 {
            self.enter_submit();
        }
    }

    /// The polling thread is behind: waits until it has read an entry.
    #[cold]
    fn push_when_read(&mut self, entry: &S::Sqe) {
        loop {
            self.enter_submit();
            std::hint::spin_loop();
            // SAFETY: as in `submit`.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
        }
    }

    pub(crate) fn poll(&mut self, sink: &mut Vec<Completion<Buffer>>) -> usize {
        let mut count = self.done.len();
        if count > 0 {
            sink.append(&mut self.done);
        }
        if self.slots.len() == 0 {
            return count;
        }
        if self.queued > 0 {
            self.enter_submit();
        }
        let mut queue = self.ring.completion();
        if queue.is_empty() {
            return count;
        }
        for entry in queue.by_ref().take(self.reap_max) {
            let (tag, result) = self.shape.outcome(&entry, &self.slots);
            let request = self.slots.take(tag);
            let status = self.shape.status(request.op, result, self.place.bytes(&request));
            sink.push(request.complete(status));
            count += 1;
        }
        count
    }

    /// Whether completions lie in the ring.
    fn is_ready(&mut self) -> bool {
        !self.done.is_empty() || !self.ring.completion().is_empty()
    }

    pub(crate) fn wait(&mut self, timeout_ns: u64) {
        if self.slots.len() == 0 || self.is_ready() {
            return;
        }
        if self.polling.submission || self.polling.completion {
            self.ask(timeout_ns);
            return;
        }
        let time =
            types::Timespec::new().sec(timeout_ns / 1_000_000_000).nsec((timeout_ns % 1_000_000_000) as u32);
        let arguments = types::SubmitArgs::new().timespec(&time);
        // A timeout and a signal are errors here, and mean that nothing is there: the caller looks.
        let _ = self.ring.submitter().submit_with_args(1, &arguments);
    }

    /// Asks until there is something: the device, or, where a thread asks that, the ring.
    fn ask(&mut self, timeout_ns: u64) {
        let begun = std::time::Instant::now();
        let mut asks = 0u32;
        loop {
            if !self.polling.submission {
                // With nothing to wait for, the kernel polls the device once.
                self.enter(0, 0, GETEVENTS);
            } else if asks.is_multiple_of(ASKS_A_LOOK) {
                self.enter_submit();
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

    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() + self.done.len()
    }

    pub(crate) fn forget(&mut self) {
        self.slots.forget();
    }

    /// The kernel says it in the ring's fdinfo: `SqThread: 123`.
    pub(crate) fn submission_thread(&self) -> Option<u32> {
        let path = format!("/proc/self/fdinfo/{}", self.ring.as_raw_fd());
        let text = std::fs::read_to_string(path).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("SqThread:"))?;
        line.trim().parse::<i64>().ok().and_then(|thread| u32::try_from(thread).ok())
    }
}

/// The ring with every flag that the kernel knows: an older one refuses what it does not.
fn build<S: squeue::EntryMarker, C: cqueue::EntryMarker>(config: &Config) -> io::Result<IoUring<S, C>> {
    let polling = config.polling;
    let attempt = |modern: bool| {
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
    };
    attempt(true).or_else(|error| if polling.submission { Err(error) } else { attempt(false) })
}

/// Reads and writes.
pub(crate) struct Plain {
    nonvectored: bool,
    data_sync: bool,
    vectors: Box<[libc::iovec]>,
}

macro_rules! with_fd {
    ($place:expr, $request:expr, $fd:ident => $entry:expr) => {
        if $place.fixed_files {
            let $fd = types::Fixed(u32::from($request.flow));
            $entry
        } else {
            let $fd = types::Fd($place.files[$request.flow as usize].raw_fd());
            $entry
        }
    };
}
pub(crate) use with_fd;

impl Shape for Plain {
    type Sqe = squeue::Entry;
    type Cqe = cqueue::Entry;

    #[inline]
    fn describe(&mut self, request: &Request<Buffer>, place: &Place) -> squeue::Entry {
        let file = &place.files[request.flow as usize];
        let offset = request.lba * u64::from(file.block_bytes());
        let bytes = request.blocks * file.block_bytes();
        let entry = match (request.op, &request.buffer) {
            (Op::Read | Op::Write, Some(buffer)) => {
                assert!(bytes as usize <= buffer.len(), "{bytes} bytes in a buffer of {}", buffer.len());
                let start = buffer.as_ptr();
                let read = request.op == Op::Read;
                match place.registered(buffer) {
                    Some(index) if read => with_fd!(place, request, fd => {
                        opcode::ReadFixed::new(fd, start, bytes, index).offset(offset).build()
                    }),
                    Some(index) => with_fd!(place, request, fd => {
                        opcode::WriteFixed::new(fd, start, bytes, index).offset(offset).build()
                    }),
                    None if self.nonvectored && read => {
                        with_fd!(place, request, fd => opcode::Read::new(fd, start, bytes).offset(offset).build())
                    }
                    None if self.nonvectored => {
                        with_fd!(place, request, fd => opcode::Write::new(fd, start, bytes).offset(offset).build())
                    }
                    None => {
                        let vector = &mut self.vectors[request.tag.0 as usize];
                        *vector = libc::iovec { iov_base: start.cast(), iov_len: bytes as usize };
                        let vector = (&raw const *vector).cast();
                        match read {
                            true => with_fd!(place, request, fd => {
                                opcode::Readv::new(fd, vector, 1).offset(offset).build()
                            }),
                            false => with_fd!(place, request, fd => {
                                opcode::Writev::new(fd, vector, 1).offset(offset).build()
                            }),
                        }
                    }
                }
            }
            (Op::Flush, _) => {
                let data =
                    if self.data_sync { types::FsyncFlags::DATASYNC } else { types::FsyncFlags::empty() };
                with_fd!(place, request, fd => opcode::Fsync::new(fd).flags(data).build())
            }
            // Nothing else is asked of a kernel's file; it completes, and is wrong.
            _ => opcode::Nop::new().build(),
        };
        entry.user_data(request.tag.0)
    }

    #[inline]
    fn outcome(&self, entry: &cqueue::Entry, _: &Slots) -> (u64, i64) {
        (entry.user_data(), i64::from(entry.result()))
    }

    #[inline]
    fn status(&self, op: Op, result: i64, wanted: u64) -> Status {
        match op {
            Op::Read | Op::Write | Op::Flush => status_of(op, result, wanted),
            _ => Status::INVALID_OPCODE,
        }
    }
}

/// `io_uring`: default (interrupts), with polled completions, with a polling submission thread, or both.
pub struct Uring(Ring<Plain>);

impl Uring {
    pub(crate) fn open(
        config: &Config,
        files: Vec<File>,
        requests: &[Request<Buffer>],
    ) -> Result<Uring, OpenError> {
        let vector = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let count = if config.nonvectored { 0 } else { config.depth as usize };
        let shape = Plain {
            nonvectored: config.nonvectored,
            data_sync: config.data_sync,
            vectors: vec![vector; count].into(),
        };
        Ring::open(config, files, requests, shape).map(Uring)
    }
}

impl Channel for Uring {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    fn submit(&mut self, batch: &mut Vec<Request<Buffer>>) {
        self.0.submit(batch);
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Buffer>>) -> usize {
        self.0.poll(sink)
    }
}

impl Engine for Uring {
    fn wait(&mut self, timeout_ns: u64) {
        self.0.wait(timeout_ns);
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn submission_thread(&self) -> Option<u32> {
        self.0.submission_thread()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        if !drain(self) {
            self.0.forget();
        }
    }
}
