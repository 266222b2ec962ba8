//! Linux AIO, the interface of `libaio`, through its system calls.

use std::io;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use block_io::{Completion, Op, Request, Status};
use dma::Data;

use crate::drain::drain;
use crate::priorities::RequestPriorities;
use crate::requests::{BlockFile, InFlightRequests, TICK_NS, byte_range, queue_accessors};
use crate::vectors::IoVectors;

mod tick;

use tick::{TICK, Tick};

pub(crate) const PREAD: u16 = 0;
pub(crate) const PWRITE: u16 = 1;
const FSYNC: u16 = 2;
pub(crate) const FDSYNC: u16 = 3;
pub(crate) const PREADV: u16 = 7;
pub(crate) const PWRITEV: u16 = 8;

/// `struct iocb` of the kernel's `aio_abi.h`, little-endian.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Iocb {
    pub(crate) data: u64,
    pub(crate) key: u32,
    /// `RWF_*`, since Linux 4.13.
    pub(crate) rw_flags: i32,
    pub(crate) opcode: u16,
    pub(crate) reqprio: i16,
    pub(crate) fd: u32,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) offset: i64,
    pub(crate) reserved: u64,
    pub(crate) flags: u32,
    pub(crate) eventfd: u32,
}
const _: () = assert!(size_of::<Iocb>() == 64);

/// `IOCB_FLAG_RESFD`: completion signals `eventfd`.
pub(crate) const SIGNAL_EVENTFD: u32 = 1;
/// `IOCB_FLAG_IOPRIO`: `reqprio` is valid.
const HAS_PRIORITY: u32 = 2;

impl Iocb {
    /// A read of no bytes whose completion signals `eventfd`.
    pub(crate) fn empty_read(fd: u32) -> Iocb {
        Iocb { opcode: PREAD, fd, flags: SIGNAL_EVENTFD, ..Iocb::default() }
    }
}

/// `struct io_event`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct IoEvent {
    pub(crate) data: u64,
    iocb: u64,
    pub(crate) result: i64,
    result2: i64,
}
const EVENT_BYTES: usize = 32;
const _: () = assert!(size_of::<IoEvent>() == EVENT_BYTES);

/// How long drop waits for requests in flight.
const DROP_TIME_MAX: Duration = Duration::from_secs(5);

/// A Linux AIO context with the files and requests that the kernel uses.
///
/// The queue owns a request and its buffer from [`submit`](Self::submit) until [`reap`](Self::reap) returns it, which
/// makes the interface safe. It supports reads, writes and flushes only. The `flow` of a request is the index of its
/// file; its tag must be below the depth and not in flight. Drop waits for the requests in flight for a limited time
/// and leaks the memory of those that remain.
pub struct AioQueue<F> {
    files: Vec<F>,
    context: AioContext,
    tick: Tick,
    userspace_reap: bool,
    sync: u16,
    requests: InFlightRequests,
    /// The control blocks of one submission; the kernel copies them in `io_submit`.
    iocbs: Box<[Iocb]>,
    /// The addresses of `iocbs`.
    iocb_addresses: Box<[u64]>,
    /// Of requests with several slices in one submission; the kernel copies them in `io_submit`.
    vectors: Vec<IoVectors>,
    /// Space for events, and the number of events in it that `wait` received and `reap` has not returned yet.
    events: Box<[IoEvent]>,
    events_ready: usize,
    priorities: Option<RequestPriorities>,
}

impl<F: BlockFile> AioQueue<F> {
    /// Creates a queue for at most `depth` requests in flight. A flush is `fdatasync` with `data_sync`, otherwise
    /// `fsync`. With `userspace_reap`, completions are read from the event ring that the kernel maps.
    ///
    /// # Errors
    /// The error of `io_setup`: `EAGAIN` if the contexts of all processes exceed `fs.aio-max-nr`.
    ///
    /// # Panics
    /// If `depth` is 0.
    pub fn new(depth: u32, files: Vec<F>, data_sync: bool, userspace_reap: bool) -> io::Result<AioQueue<F>> {
        assert!(depth > 0, "the depth of an AIO context is at least 1");
        let iocbs: Box<[Iocb]> = vec![Iocb::default(); depth as usize].into();
        let iocb_addresses = iocbs.iter().map(|iocb| (&raw const *iocb).expose_provenance() as u64).collect();
        Ok(AioQueue {
            files,
            // One event more for the timer.
            context: AioContext::new(depth + 1)?,
            tick: Tick::default(),
            userspace_reap,
            sync: if data_sync { FDSYNC } else { FSYNC },
            requests: InFlightRequests::new(depth),
            iocbs,
            iocb_addresses,
            vectors: Vec::new(),
            events: vec![IoEvent::default(); depth as usize].into(),
            events_ready: 0,
            priorities: None,
        })
    }

    /// Reads and writes have these I/O priorities.
    pub fn set_priorities(&mut self, priorities: RequestPriorities) {
        self.priorities = Some(priorities);
    }

    queue_accessors!(files, requests);

    /// Submits up to `count` requests from the front of `batch`, limited by [`room`](Self::room), in one system call;
    /// returns their number. The other requests stay in `batch`.
    ///
    /// # Errors
    /// The kernel's error for the first request, which stays in `batch` as well: `EAGAIN` means retry later.
    ///
    /// # Panics
    /// If `batch` has fewer requests; if a tag is in flight already or not below the depth; if a request is longer
    /// than its buffer, or is not a read, write or flush.
    pub fn submit(&mut self, batch: &mut Vec<Request<Data>>, count: usize) -> io::Result<usize> {
        let count = count.min(self.requests.room());
        if count == 0 {
            return Ok(0);
        }
        // Encode in place, move each request once, and submit only then.
        let mut vectors_used = 0;
        for (request, iocb) in batch[..count].iter().zip(&mut self.iocbs) {
            let file = &self.files[request.flow as usize];
            let (offset, bytes) = byte_range(file, request);
            (iocb.data, iocb.fd) = (request.tag.0, raw(file));
            iocb.opcode = match request.op {
                Op::Read => PREAD,
                Op::Write => PWRITE,
                Op::Flush => self.sync,
                op => panic!("{op:?} is not supported by Linux AIO"),
            };
            iocb.offset = if bytes > 0 { offset as i64 } else { 0 };
            (iocb.address, iocb.bytes) = match request.data() {
                Some(Data::One(buffer)) if bytes > 0 => (buffer.as_ptr() as u64, bytes.into()),
                Some(many @ Data::Many(_)) if bytes > 0 => {
                    if self.vectors.len() == vectors_used {
                        self.vectors.push(IoVectors::default());
                    }
                    let (list, count) = self.vectors[vectors_used].describe(many.slices(), 0, bytes as usize);
                    vectors_used += 1;
                    iocb.opcode = if request.op == Op::Read { PREADV } else { PWRITEV };
                    (list.expose_provenance() as u64, count.into())
                }
                // The address and length of a flush must be 0.
                _ => (0, 0),
            };
            if let Some(priorities) = &self.priorities {
                let priority = if request.op == Op::Flush { 0 } else { priorities.get(request.tag.0) };
                (iocb.reqprio, iocb.flags) = (priority as i16, HAS_PRIORITY * u32::from(priority > 0));
            }
        }
        for request in batch.drain(..count) {
            self.requests.insert(request);
        }
        let result = self.context.submit(&self.iocb_addresses[..count]);
        let submitted = *result.as_ref().unwrap_or(&0);
        if submitted < count {
            self.return_unsubmitted(submitted, count, batch);
        }
        result
    }

    /// Returns the requests that the kernel did not accept to the front of `batch`.
    #[cold]
    fn return_unsubmitted(&mut self, submitted: usize, count: usize, batch: &mut Vec<Request<Data>>) {
        batch.splice(..0, self.iocbs[submitted..count].iter().map(|iocb| self.requests.take(iocb.data)));
    }

    /// Waits until a completion can be reaped or the time-out expires; returns immediately if nothing is in flight.
    /// Receives up to `max` completions. A signal may end the wait early, and a time-out of more than 20 ms may be
    /// shortened to that.
    pub fn wait(&mut self, max: usize, timeout_ns: u64) {
        if self.events_ready == 0 && self.requests.len() > 0 {
            let max = max.clamp(1, self.events.len());
            let timeout_ns = match timeout_ns >= TICK_NS && self.tick.start(&mut self.context) {
                true => None,
                false => Some(timeout_ns),
            };
            self.events_ready = self.context.get_events(1, &mut self.events[..max], timeout_ns);
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
        if self.events_ready == 0 {
            if self.requests.len() == 0 || self.context.is_empty() {
                return 0;
            }
            let max = max.clamp(1, self.events.len());
            self.events_ready = match self.userspace_reap && self.context.is_readable() {
                true => self.context.read(&mut self.events[..max]),
                false => self.context.get_events(0, &mut self.events[..max], Some(0)),
            };
        }
        let ready = std::mem::take(&mut self.events_ready);
        let mut count = 0;
        for event in &self.events[..ready] {
            if event.data == TICK {
                self.tick.ended();
                continue;
            }
            count += 1;
            let file = |request: &Request<Data>| &self.files[request.flow as usize];
            let status_of = |request: &Request<Data>| status(file(request), request, event.result);
            sink.push(self.requests.complete(event.data, status_of));
        }
        count
    }
}

#[inline]
fn raw<F: BlockFile>(file: &F) -> u32 {
    use std::os::fd::AsRawFd;
    file.as_fd().as_raw_fd() as u32
}

impl<F> Drop for AioQueue<F> {
    /// Waits for requests in flight, because the kernel may still write into their buffers, and leaks the memory of
    /// those that do not complete.
    fn drop(&mut self) {
        let mut count = self.events_ready;
        let ended = drain(DROP_TIME_MAX, || {
            let ended = self.events[..count].iter().filter(|event| event.data != TICK);
            ended.for_each(|event| drop(self.requests.take(event.data)));
            count = match self.requests.len() {
                0 => 0,
                _ => self.context.get_events(1, &mut self.events, Some(100_000_000)),
            };
            self.requests.len() == 0
        });
        if !ended {
            self.requests.leak();
        }
    }
}

/// The kernel's context. Its identifier is the address where the kernel maps the event ring.
pub(crate) struct AioContext {
    ring: NonNull<u8>,
    /// Whether the ring has the known layout.
    readable: bool,
    events: u32,
    header_bytes: usize,
}

/// Offsets of `struct aio_ring`: `nr`, `head`, `tail`, `magic`, `incompat_features` and `header_length`, four
/// bytes each.
const EVENTS: usize = 4;
const HEAD: usize = 8;
const TAIL: usize = 12;
const MAGIC_AT: usize = 16;
const INCOMPATIBLE: usize = 24;
const HEADER: usize = 28;
const MAGIC: u32 = 0xa10a_10a1;

impl AioContext {
    pub(crate) fn new(depth: u32) -> io::Result<AioContext> {
        let mut address = 0usize;
        // SAFETY: io_setup writes the context's address into `address`, a local word.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut address) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        let ring = NonNull::new(std::ptr::with_exposed_provenance_mut(address));
        let ring = ring.ok_or_else(|| io::Error::other("io_setup returned a context at address 0"))?;
        let mut context = AioContext { ring, readable: false, events: 0, header_bytes: 0 };
        let word = |at| context.word(at).load(Ordering::Relaxed);
        let readable = word(MAGIC_AT) == MAGIC && word(INCOMPATIBLE) == 0;
        let (events, header_bytes) = (word(EVENTS), word(HEADER));
        (context.readable, context.events, context.header_bytes) = (readable, events, header_bytes as usize);
        Ok(context)
    }

    #[inline]
    fn word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset <= HEADER, "the ring's header has 32 bytes");
        // SAFETY: the kernel maps at least a page there for as long as the context lives.
        let place = unsafe { self.ring.as_ptr().add(offset) };
        // SAFETY: aligned, because the offsets are multiples of 4 and the mapping is page-aligned; the kernel
        // accesses these words as a whole.
        unsafe { AtomicU32::from_ptr(place.cast()) }
    }

    #[inline]
    pub(crate) fn is_readable(&self) -> bool {
        self.readable
    }

    /// Whether the event ring is known to be empty; without a system call.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.readable && self.word(HEAD).load(Ordering::Relaxed) == self.word(TAIL).load(Ordering::Acquire)
    }

    /// `addresses` are those of iocbs that describe memory of requests in flight, or none.
    pub(crate) fn submit(&mut self, addresses: &[u64]) -> io::Result<usize> {
        let (count, list) = (addresses.len(), addresses.as_ptr());
        // SAFETY: the list has `count` addresses of iocbs that live across the call, in which the kernel
        // copies them; the buffers in them are owned by the requests that `AioQueue` keeps until their
        // completion, or are empty.
        let result = unsafe { libc::syscall(libc::SYS_io_submit, self.ring.as_ptr(), count, list) };
        usize::try_from(result).map_err(|_| io::Error::last_os_error())
    }

    /// Receives events, waiting for at least `min`, without a time-out for `None`; returns their number, 0 on an error
    /// such as a signal.
    pub(crate) fn get_events(
        &mut self,
        min: usize,
        events: &mut [IoEvent],
        timeout_ns: Option<u64>,
    ) -> usize {
        let mut timeout = timeout_ns.map(|ns| libc::timespec {
            tv_sec: (ns / 1_000_000_000) as libc::time_t,
            tv_nsec: (ns % 1_000_000_000) as libc::c_long,
        });
        let timeout = timeout.as_mut().map_or(std::ptr::null_mut(), |timeout| &raw mut *timeout);
        let (max, room) = (events.len(), events.as_mut_ptr());
        // SAFETY: `events` has space for `max` events, and the timeout lives until the call returns.
        let result =
            unsafe { libc::syscall(libc::SYS_io_getevents, self.ring.as_ptr(), min, max, room, timeout) };
        usize::try_from(result).unwrap_or(0)
    }

    /// Reads events from the ring without a system call, as fio's `userspace_reap` does.
    pub(crate) fn read(&mut self, events: &mut [IoEvent]) -> usize {
        let (mut head, tail) =
            (self.word(HEAD).load(Ordering::Relaxed), self.word(TAIL).load(Ordering::Acquire));
        let mut count = 0;
        while head != tail && head < self.events && count < events.len() {
            let offset = self.header_bytes + head as usize * EVENT_BYTES;
            // SAFETY: `head` is below the ring's number of events, all of which are mapped.
            let place = unsafe { self.ring.as_ptr().add(offset) };
            // SAFETY: aligned, as header and events are multiples of 32 bytes, and the kernel has published
            // the event before the tail.
            events[count] = unsafe { place.cast::<IoEvent>().read_volatile() };
            count += 1;
            head = if head + 1 >= self.events { 0 } else { head + 1 };
        }
        self.word(HEAD).store(head, Ordering::Release);
        count
    }
}

impl AioContext {
    /// Destroys the context on another thread. The kernel takes tens of milliseconds for it, because it waits
    /// until no processor can use the context any more (RCU), which a reactor must not wait for.
    pub(crate) fn destroy_later(self) {
        let address = self.ring.as_ptr().expose_provenance();
        std::mem::forget(self);
        let sender = DESTROYER.get_or_init(|| {
            let (sender, receiver) = channel::<usize>();
            let thread = std::thread::Builder::new().name("aio-destroy".to_string());
            let destroy = move || receiver.into_iter().for_each(destroy);
            thread.spawn(destroy).is_ok().then_some(sender)
        });
        if sender.as_ref().is_none_or(|sender| sender.send(address).is_err()) {
            destroy(address);
        }
    }
}

/// To the thread that destroys contexts, which lives as long as the process; `None` if there can be no
/// thread. It has at most the contexts of one process, which `fs.aio-max-nr` limits.
static DESTROYER: OnceLock<Option<Sender<usize>>> = OnceLock::new();

/// Destroys the context at an address that [`AioContext::destroy_later`] has exposed.
fn destroy(address: usize) {
    if let Some(ring) = NonNull::new(std::ptr::with_exposed_provenance_mut(address)) {
        drop(AioContext { ring, readable: false, events: 0, header_bytes: 0 });
    }
}

impl Drop for AioContext {
    fn drop(&mut self) {
        // SAFETY: this value owns the context, which is not used after this, and nothing points into its ring.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.ring.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use block_io::Tag;
    use dma::{Arena, Data, Pool};

    use super::*;
    use crate::requests::tests::BlockFile512;

    fn files() -> Vec<BlockFile512> {
        let path = std::env::temp_dir().join(format!(
            "ringbolt-sys-aio-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        std::fs::write(&path, [5; 4096]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        // A directory, which AIO cannot read.
        let directory = std::fs::File::open("/").unwrap();
        vec![BlockFile512(file.into()), BlockFile512(directory.into())]
    }

    fn requests(flows: &[u16]) -> Vec<Request<Data>> {
        let config =
            dma::ArenaConfig { limit_bytes: 2 << 20, hugepages: false, ..dma::ArenaConfig::default() };
        let pool = Pool::new(&Arena::new(config));
        let read = |(tag, flow): (u64, &u16)| {
            let mut request = Request::read(Tag(tag), tag, 1, pool.take(512).unwrap());
            request.flow = *flow;
            request
        };
        (0..).zip(flows).map(read).collect()
    }

    fn tags(batch: &[Request<Data>]) -> Vec<u64> {
        batch.iter().map(|request| request.tag.0).collect()
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement Linux AIO")]
    fn requests_that_the_kernel_rejects_stay_in_order() {
        for userspace_reap in [false, true] {
            let mut aio = AioQueue::new(4, files(), false, userspace_reap).unwrap();
            let mut batch = requests(&[0, 1, 0, 0]);
            assert_eq!(aio.submit(&mut batch, 4).unwrap(), 1);
            assert_eq!((tags(&batch), aio.in_flight()), (vec![1, 2, 3], 1));
            let error = aio.submit(&mut batch, 3).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            assert_eq!((tags(&batch), aio.in_flight()), (vec![1, 2, 3], 1));
            batch.remove(0);
            assert_eq!(aio.submit(&mut batch, 1).unwrap(), 1);
            let mut done = Vec::new();
            while done.len() < 2 {
                aio.wait(4, 1_000_000_000);
                aio.reap(4, &mut done, |_, _, result| match result {
                    512 => Status::SUCCESS,
                    _ => Status::DATA_TRANSFER_ERROR,
                });
            }
            assert!(done.iter().all(|one| one.status().is_success()));
            let mut ended: Vec<u64> = done.iter().map(|one| one.tag().0).collect();
            ended.sort_unstable();
            assert_eq!((ended, tags(&batch)), (vec![0, 2], vec![3]));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement Linux AIO")]
    fn requests_of_several_slices_are_one_operation_each() {
        let mut aio = AioQueue::new(4, files(), false, false).unwrap();
        let mut batch = requests(&[0, 0, 0]);
        for request in &mut batch {
            let data = request.take_data().unwrap();
            let mut other = data.slices()[0].home().take(512).unwrap();
            other.clear();
            request.set_data(Some(data.join(other.into())));
            request.blocks = 2;
        }
        assert_eq!(aio.submit(&mut batch, 3).unwrap(), 3);
        let mut done = Vec::new();
        while done.len() < 3 {
            aio.wait(4, 1_000_000_000);
            aio.reap(4, &mut done, |_, _, result| match result {
                1024 => Status::SUCCESS,
                _ => Status::DATA_TRANSFER_ERROR,
            });
        }
        for one in done {
            assert_eq!(one.status(), Status::SUCCESS);
            let data = one.into_request().take_data().unwrap();
            assert_eq!(data.slices().len(), 2);
            assert!(data.slices().iter().all(|slice| slice.as_slice().iter().all(|byte| *byte == 5)));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement Linux AIO")]
    fn a_dropped_queue_returns_its_buffers() {
        let mut aio = AioQueue::new(2, files(), false, false).unwrap();
        let mut batch = requests(&[0, 0, 0]);
        let buffer = batch[0].data().and_then(Data::single).unwrap();
        let pools = std::sync::Arc::downgrade(buffer.arena());
        assert_eq!(aio.submit(&mut batch, 3).unwrap(), 2);
        assert_eq!(tags(&batch), [2], "the depth is 2");
        aio.wait(1, 1_000_000_000);
        drop((batch, aio));
        assert!(pools.upgrade().is_none(), "every buffer is released");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement Linux AIO")]
    #[should_panic(expected = "not supported by Linux AIO")]
    fn other_operations_than_read_write_and_flush_panic() {
        let mut aio = AioQueue::new(2, files(), false, false).unwrap();
        let _ = aio.submit(&mut vec![Request::new(Tag(0), Op::Unmap, 0, 1)], 1);
    }
}
