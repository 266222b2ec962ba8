//! I/O by blocking system calls in threads, as the C library's POSIX AIO does it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use block_io::{Completion, Op, Request, Status};
use dma::Data;

use crate::drain::drain;
use crate::requests::{BlockFile, InFlightRequests, byte_range, queue_accessors};
use crate::vectors::IoVectors;

/// How long drop waits for the system calls of the threads.
const DROP_TIME_MAX: Duration = Duration::from_secs(5);

/// A queue whose requests are executed by threads.
///
/// As in glibc's POSIX AIO, the requests of one file are executed one at a time, in their order, and those of several
/// files by up to [`THREADS_MAX`](Self::THREADS_MAX) threads, which start when they are needed. Unlike glibc's, the
/// threads belong to one queue and stay until it is dropped, so that [`thread_ids`](Self::thread_ids) names them.
///
/// The queue owns a request and its buffer from [`submit`](Self::submit) until [`reap`](Self::reap) returns it. It
/// supports reads, writes and flushes only. The `flow` of a request is the index of its file; its tag must be below the
/// depth and not in flight. Drop cancels requests that no thread has begun, waits for the others for a limited time, and
/// leaks the memory of those that remain.
pub struct ThreadQueue<F> {
    files: Vec<F>,
    requests: InFlightRequests,
    /// Of requests with several slices, by tag.
    vectors: Box<[IoVectors]>,
    /// Results that were taken from the threads and not returned yet.
    results: VecDeque<(u64, i64)>,
    data_sync: bool,
    shared: Arc<SharedQueue>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct SharedQueue {
    state: Mutex<QueueState>,
    /// For idle threads.
    work: Condvar,
    /// For the owner of the queue.
    done: Condvar,
    /// Whether `results` may hold something: read without the lock.
    has_results: AtomicBool,
}

#[derive(Default)]
struct QueueState {
    /// Calls that no thread has begun, of each file.
    waiting: Vec<VecDeque<BlockingCall>>,
    /// Whether a file has a call in progress, or is among `runnable`.
    is_scheduled: Vec<bool>,
    /// Files with a call that a thread may begin.
    runnable: VecDeque<usize>,
    results: VecDeque<(u64, i64)>,
    /// Threads without a call, including those that have not run yet.
    idle_threads: usize,
    thread_ids: Vec<u32>,
    owner_waits: bool,
    is_closed: bool,
}

/// A system call for a request.
struct BlockingCall {
    tag: u64,
    file: usize,
    fd: RawFd,
    offset: i64,
    kind: CallKind,
}

enum CallKind {
    Read { start: *mut u8, bytes: usize },
    Write { start: *const u8, bytes: usize },
    ReadVectored { vectors: *const libc::iovec, count: i32 },
    WriteVectored { vectors: *const libc::iovec, count: i32 },
    Sync,
    DataSync,
}

// SAFETY: the memory that a call refers to belongs to a request that the queue owns until the call's result is taken
// from the thread, or is leaked; nothing else accesses it meanwhile.
unsafe impl Send for BlockingCall {}

impl BlockingCall {
    /// Executes the call, again after signals; returns a number of bytes or a negative error number.
    fn execute(&self) -> i64 {
        loop {
            let result = match self.kind {
                // SAFETY: the buffer has `bytes` bytes, which only this call accesses until its result is taken.
                CallKind::Read { start, bytes } => unsafe {
                    libc::pread(self.fd, start.cast(), bytes, self.offset)
                },
                // SAFETY: the buffer has `bytes` bytes, which nothing writes until the call's result is taken.
                CallKind::Write { start, bytes } => unsafe {
                    libc::pwrite(self.fd, start.cast(), bytes, self.offset)
                },
                // SAFETY: the vectors are those of the request's slot, unchanged until the result is taken, and
                // describe buffers of the request that only this call accesses.
                CallKind::ReadVectored { vectors, count } => unsafe {
                    libc::preadv(self.fd, vectors, count, self.offset)
                },
                // SAFETY: as above, and nothing writes the buffers.
                CallKind::WriteVectored { vectors, count } => unsafe {
                    libc::pwritev(self.fd, vectors, count, self.offset)
                },
                // SAFETY: no memory is passed.
                CallKind::Sync => unsafe { libc::fsync(self.fd) as isize },
                // SAFETY: no memory is passed.
                CallKind::DataSync => unsafe { libc::fdatasync(self.fd) as isize },
            };
            if result >= 0 {
                return result as i64;
            }
            match io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) {
                libc::EINTR => {}
                number => return -i64::from(number),
            }
        }
    }
}

impl SharedQueue {
    /// What a thread does until the queue is closed.
    fn work(&self) {
        let mut state = sync::lock(&self.state);
        state.thread_ids.push(rustix::thread::gettid().as_raw_nonzero().get() as u32);
        state.idle_threads -= 1;
        loop {
            let next = state.runnable.pop_front();
            let Some(call) = next.and_then(|file| state.waiting[file].pop_front()) else {
                if state.is_closed {
                    return;
                }
                state.idle_threads += 1;
                state = sync::wait(&self.work, state);
                state.idle_threads -= 1;
                continue;
            };
            drop(state);
            let result = call.execute();
            state = sync::lock(&self.state);
            state.results.push_back((call.tag, result));
            self.has_results.store(true, Ordering::Release);
            if state.owner_waits {
                state.owner_waits = false;
                self.done.notify_one();
            }
            match state.waiting[call.file].is_empty() {
                true => state.is_scheduled[call.file] = false,
                false => state.runnable.push_back(call.file),
            }
        }
    }

    /// Waits until there is a result, or the time-out expires.
    fn wait(&self, timeout: Duration) {
        let end = Instant::now().checked_add(timeout);
        let mut state = sync::lock(&self.state);
        while state.results.is_empty() {
            let left = end.map_or(timeout, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                break;
            }
            state.owner_waits = true;
            state = sync::wait_timeout(&self.done, state, left);
        }
        state.owner_waits = false;
    }
}

impl<F: BlockFile> ThreadQueue<F> {
    /// Most threads of a queue: as many as glibc starts (`aio_threads` of `aio_init(3)`).
    pub const THREADS_MAX: usize = 20;

    /// Creates a queue for at most `depth` requests in flight. A flush is `fdatasync` with `data_sync`, otherwise
    /// `fsync`.
    ///
    /// # Panics
    /// If `depth` is 0.
    pub fn new(depth: u32, files: Vec<F>, data_sync: bool) -> ThreadQueue<F> {
        assert!(depth > 0, "the depth of a queue of threads is at least 1");
        let shared = SharedQueue::default();
        {
            let mut state = sync::lock(&shared.state);
            state.waiting.resize_with(files.len(), VecDeque::new);
            state.is_scheduled.resize(files.len(), false);
        }
        ThreadQueue {
            files,
            requests: InFlightRequests::new(depth),
            vectors: (0..depth).map(|_| IoVectors::default()).collect(),
            results: VecDeque::new(),
            data_sync,
            shared: Arc::new(shared),
            threads: Vec::new(),
        }
    }

    queue_accessors!(files, requests);

    /// The threads that have started.
    pub fn thread_ids(&self) -> Vec<u32> {
        sync::lock(&self.shared.state).thread_ids.clone()
    }

    /// Submits up to `count` requests from the front of `batch`, limited by [`room`](Self::room); returns their number.
    /// The other requests stay in `batch`.
    ///
    /// # Errors
    /// If the first thread cannot be started; all requests stay in `batch`.
    ///
    /// # Panics
    /// If `batch` has fewer requests; if a tag is in flight already or not below the depth; if a request is longer
    /// than its buffer, or is not a read, write or flush.
    pub fn submit(&mut self, batch: &mut Vec<Request<Data>>, count: usize) -> io::Result<usize> {
        let count = count.min(self.requests.room());
        if count == 0 {
            return Ok(0);
        }
        if self.threads.is_empty() {
            self.start_thread()?;
        }
        let shared = self.shared.clone();
        let mut state = sync::lock(&shared.state);
        for request in batch.drain(..count) {
            let file = request.flow as usize;
            let (offset, bytes) = byte_range(&self.files[file], &request);
            let (tag, bytes) = (request.tag.0, bytes as usize);
            let request = self.requests.insert(request);
            let kind = match (request.op, request.data()) {
                (Op::Flush, _) => {
                    if self.data_sync {
                        CallKind::DataSync
                    } else {
                        CallKind::Sync
                    }
                }
                (Op::Read, Some(Data::One(buffer))) => CallKind::Read { start: buffer.as_ptr(), bytes },
                (Op::Write, Some(Data::One(buffer))) => CallKind::Write { start: buffer.as_ptr(), bytes },
                (op @ (Op::Read | Op::Write), Some(many)) => {
                    let (vectors, count) = self.vectors[tag as usize].describe(many.slices(), 0, bytes);
                    match op {
                        Op::Read => CallKind::ReadVectored { vectors, count: count as i32 },
                        _ => CallKind::WriteVectored { vectors, count: count as i32 },
                    }
                }
                (op, _) => panic!("{op:?} is not supported by a queue of threads"),
            };
            let fd = self.files[file].as_fd().as_raw_fd();
            state.waiting[file].push_back(BlockingCall { tag, file, fd, offset: offset as i64, kind });
            if !state.is_scheduled[file] {
                state.is_scheduled[file] = true;
                state.runnable.push_back(file);
            }
        }
        let (runnable, idle) = (state.runnable.len(), state.idle_threads);
        drop(state);
        (0..runnable.min(idle)).for_each(|_| shared.work.notify_one());
        // Without another thread the calls wait for those that there are, so that an error has no effect.
        let missing = runnable.saturating_sub(idle).min(Self::THREADS_MAX - self.threads.len());
        let _ = (0..missing).try_for_each(|_| self.start_thread());
        Ok(count)
    }

    #[cold]
    fn start_thread(&mut self) -> io::Result<()> {
        let shared = self.shared.clone();
        sync::lock(&shared.state).idle_threads += 1;
        let thread = std::thread::Builder::new().name("aio".to_string());
        match thread.spawn(move || shared.work()) {
            Ok(thread) => self.threads.push(thread),
            Err(error) => {
                sync::lock(&self.shared.state).idle_threads -= 1;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Waits until a completion can be reaped or the time-out expires; returns immediately if nothing is in flight.
    pub fn wait(&mut self, timeout_ns: u64) {
        if self.results.is_empty() && self.requests.len() > 0 {
            self.shared.wait(Duration::from_nanos(timeout_ns));
        }
    }

    /// Appends up to `max` completed requests to `sink`; returns their number. `status` maps the result of a request,
    /// a number of bytes or a negative error number, to its status.
    #[inline]
    pub fn reap(
        &mut self,
        max: usize,
        sink: &mut Vec<Completion<Data>>,
        status: impl Fn(&F, &Request<Data>, i64) -> Status,
    ) -> usize {
        if self.results.is_empty() {
            self.take_results();
        }
        let count = self.results.len().min(max);
        for (tag, result) in self.results.drain(..count) {
            let status_of =
                |request: &Request<Data>| status(&self.files[request.flow as usize], request, result);
            sink.push(self.requests.complete(tag, status_of));
        }
        count
    }
}

impl<F> ThreadQueue<F> {
    #[inline]
    fn take_results(&mut self) {
        if self.shared.has_results.load(Ordering::Acquire) {
            let mut state = sync::lock(&self.shared.state);
            self.shared.has_results.store(false, Ordering::Relaxed);
            std::mem::swap(&mut self.results, &mut state.results);
        }
    }

    fn drain_step(&mut self) -> bool {
        self.take_results();
        while let Some((tag, _)) = self.results.pop_front() {
            drop(self.requests.take(tag));
        }
        if self.requests.len() > 0 {
            self.shared.wait(Duration::from_millis(10));
        }
        self.requests.len() == 0
    }
}

impl<F> Drop for ThreadQueue<F> {
    /// Cancels the calls that no thread has begun, and waits for the others, because the kernel may still use their
    /// buffers and files.
    fn drop(&mut self) {
        let mut state = sync::lock(&self.shared.state);
        state.is_closed = true;
        state.runnable.clear();
        let cancelled: Vec<BlockingCall> = state.waiting.iter_mut().flat_map(|file| file.drain(..)).collect();
        drop(state);
        self.shared.work.notify_all();
        cancelled.into_iter().for_each(|call| drop(self.requests.take(call.tag)));
        if drain(DROP_TIME_MAX, || self.drain_step()) {
            // They have no call any more, and end.
            self.threads.drain(..).for_each(|thread| drop(thread.join()));
        } else {
            self.requests.leak();
            std::mem::forget(std::mem::take(&mut self.vectors));
            std::mem::forget(std::mem::take(&mut self.files));
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::fd::OwnedFd;

    use block_io::Tag;
    use dma::{Arena, ArenaConfig, Pool};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;
    use crate::requests::tests::BlockFile512;

    fn memory_file() -> OwnedFd {
        let fd = memfd_create("thread-queue", MemfdFlags::CLOEXEC).unwrap();
        std::fs::File::from(fd.try_clone().unwrap()).set_len(1 << 20).unwrap();
        fd
    }

    fn pool() -> Pool {
        Pool::new(&Arena::new(ArenaConfig {
            limit_bytes: 4 << 20,
            hugepages: false,
            ..ArenaConfig::default()
        }))
    }

    fn read(pool: &Pool, tag: u64, file: u16) -> Request<Data> {
        let mut request = Request::read(Tag(tag), 0, 1, pool.take(512).unwrap());
        request.flow = file;
        request
    }

    fn reap(queue: &mut ThreadQueue<BlockFile512>, count: usize) -> Vec<(u64, i64)> {
        let results = Mutex::new(Vec::new());
        let mut sink = Vec::new();
        while sink.len() < count {
            queue.wait(1_000_000_000);
            queue.reap(usize::MAX, &mut sink, |_, request, result| {
                sync::lock(&results).push((request.tag.0, result));
                Status::SUCCESS
            });
        }
        results.into_inner().unwrap()
    }

    #[test]
    fn the_requests_of_a_file_are_executed_in_their_order_by_one_thread() {
        let pool = pool();
        let mut queue = ThreadQueue::new(64, vec![BlockFile512(memory_file())], false);
        let mut batch: Vec<_> = (0..65).map(|number| read(&pool, number % 64, 0)).collect();
        assert_eq!(queue.submit(&mut batch, 65).unwrap(), 64);
        assert_eq!((queue.in_flight(), queue.room(), batch.len()), (64, 0, 1));
        let done = reap(&mut queue, 64);
        assert_eq!(done, (0..64).map(|tag| (tag, 512)).collect::<Vec<_>>());
        assert_eq!((queue.in_flight(), queue.thread_ids().len()), (0, 1));
        for _ in 0..100 {
            assert_eq!(queue.submit(&mut batch, 1).unwrap(), 1);
            reap(&mut queue, 1);
            batch.push(read(&pool, 0, 0));
        }
        assert_eq!(queue.threads.len(), 1, "the thread waits for the next request");
    }

    #[test]
    fn files_have_a_thread_each_up_to_the_limit() {
        let max = ThreadQueue::<BlockFile512>::THREADS_MAX;
        for (count, threads) in [(3, 3), (max + 4, max)] {
            let pool = pool();
            let files = (0..count).map(|_| BlockFile512(memory_file())).collect();
            let mut queue = ThreadQueue::new(64, files, false);
            let mut batch: Vec<_> =
                (0..count).map(|number| read(&pool, number as u64, number as u16)).collect();
            assert_eq!(queue.submit(&mut batch, count).unwrap(), count);
            let mut done = reap(&mut queue, count);
            done.sort_unstable();
            assert_eq!(done, (0..count as u64).map(|tag| (tag, 512)).collect::<Vec<_>>());
            assert_eq!(queue.threads.len(), threads);
        }
    }

    #[test]
    fn data_of_several_slices_is_written_and_read_back() {
        let pool = pool();
        let gathered = |byte: u8| {
            let slices = [1024, 512, 512].map(|bytes| {
                let mut slice = pool.take(bytes).unwrap();
                slice.as_mut_slice().fill(byte);
                slice
            });
            Data::gather(slices.into()).unwrap()
        };
        let mut write = Request::new(Tag(0), Op::Write, 1, 4);
        write.set_data(Some(gathered(7)));
        let mut read = Request::new(Tag(1), Op::Read, 1, 4);
        read.set_data(Some(gathered(0)));
        let mut queue = ThreadQueue::new(4, vec![BlockFile512(memory_file())], true);
        let mut batch = vec![write, Request::new(Tag(2), Op::Flush, 0, 0), read];
        assert_eq!(queue.submit(&mut batch, 3).unwrap(), 3);
        let mut sink = Vec::new();
        while sink.len() < 3 {
            queue.wait(1_000_000_000);
            queue.reap(1, &mut sink, |_, request, result| {
                let expected = if request.op == Op::Flush { 0 } else { 2048 };
                if result == expected { Status::SUCCESS } else { Status::INTERNAL_ERROR }
            });
        }
        assert!(sink.iter().all(|one| one.status().is_success()));
        let data = sink.pop().unwrap().into_request().take_data().unwrap();
        assert!(data.slices().iter().all(|slice| slice.as_slice().iter().all(|byte| *byte == 7)));
    }

    #[test]
    fn a_result_is_the_error_number_of_the_call() {
        let pool = pool();
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let mut queue = ThreadQueue::new(4, vec![BlockFile512(reader)], false);
        queue.submit(&mut vec![read(&pool, 3, 0)], 1).unwrap();
        assert_eq!(reap(&mut queue, 1), [(3, -i64::from(libc::ESPIPE))]);
    }

    #[test]
    fn a_dropped_queue_returns_its_buffers() {
        let pool = pool();
        let mut queue = ThreadQueue::new(64, vec![BlockFile512(memory_file())], false);
        let mut batch: Vec<_> = (0..64).map(|tag| read(&pool, tag, 0)).collect();
        let buffer = batch[0].data().and_then(Data::single).unwrap();
        let pools = Arc::downgrade(buffer.arena());
        let shared = Arc::downgrade(&queue.shared);
        assert_eq!(queue.submit(&mut batch, 64).unwrap(), 64);
        drop((queue, batch, pool));
        assert!(pools.upgrade().is_none(), "every buffer is released");
        assert!(shared.upgrade().is_none(), "every thread has ended");
    }
}
