//! The kernel's older asynchronous interface (`libaio`'s), by its system calls.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use memory::Buffer;
use ring::{Completion, Op, Request, Status};

use crate::requests::{Requests, RingFile, span};

const PREAD: u16 = 0;
const PWRITE: u16 = 1;
const FSYNC: u16 = 2;
const FDSYNC: u16 = 3;

/// `struct iocb` of the kernel's `aio_abi.h`, little-endian.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    reqprio: i16,
    fd: u32,
    address: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}
const _: () = assert!(size_of::<Iocb>() == 64);

/// `struct io_event`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Event {
    data: u64,
    iocb: u64,
    result: i64,
    result2: i64,
}
const EVENT_BYTES: usize = 32;
const _: () = assert!(size_of::<Event>() == EVENT_BYTES);

/// How long a context that is dropped waits for what is in flight.
const DROP_TIME_MAX: Duration = Duration::from_secs(5);

/// A context of the kernel's asynchronous I/O, the files that it works on, and the requests that it holds.
///
/// A request's buffer belongs to it from [`submit`](Self::submit) until the kernel has completed it, which
/// is why all of this is safe to call. Reads, writes and flushes only; the `flow` of a request is the index
/// of its file, its tag lies below the depth and is in flight once.
pub struct Aio<F> {
    files: Vec<F>,
    context: Context,
    userspace_reap: bool,
    sync: u16,
    requests: Requests,
    /// One for each place in a submission; the kernel copies them in `io_submit`.
    iocbs: Box<[Iocb]>,
    /// Their addresses.
    list: Box<[u64]>,
    /// Room for events, and how many lie there, taken by `wait` and not yet reaped.
    events: Box<[Event]>,
    held: usize,
}

impl<F: RingFile> Aio<F> {
    /// A context for so many requests at a time. A flush is `fdatasync` with `data_sync`, otherwise `fsync`.
    /// With `userspace_reap`, completions are read from the ring that the kernel shares.
    ///
    /// # Errors
    /// What `io_setup` says: `EAGAIN` where all processes have more than `fs.aio-max-nr`.
    ///
    /// # Panics
    /// If `depth` is 0.
    pub fn new(depth: u32, files: Vec<F>, data_sync: bool, userspace_reap: bool) -> io::Result<Aio<F>> {
        assert!(depth > 0, "a context of no depth does nothing");
        let iocbs: Box<[Iocb]> = vec![Iocb::default(); depth as usize].into();
        let list = iocbs.iter().map(|iocb| (&raw const *iocb).expose_provenance() as u64).collect();
        Ok(Aio {
            files,
            context: Context::new(depth)?,
            userspace_reap,
            sync: if data_sync { FDSYNC } else { FSYNC },
            requests: Requests::new(depth),
            iocbs,
            list,
            events: vec![Event::default(); depth as usize].into(),
            held: 0,
        })
    }

    /// The files, by a request's `flow`.
    #[inline]
    pub fn files(&self) -> &[F] {
        &self.files
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

    /// Gives the kernel the first `count` requests of `batch`, as far as there is room, in one system call;
    /// how many it took. The others stay in `batch`.
    ///
    /// # Errors
    /// What the kernel says of the first of them, which stays in `batch` as well: `EAGAIN` for later.
    ///
    /// # Panics
    /// If there are not so many; if a tag is in flight, or not below the depth; if a request is longer than its
    /// buffer, or is no read, write or flush.
    pub fn submit(&mut self, batch: &mut Vec<Request<Buffer>>, count: usize) -> io::Result<usize> {
        let count = count.min(self.requests.room());
        if count == 0 {
            return Ok(0);
        }
        // Described where they lie, moved once, and given to the kernel only then.
        for (request, iocb) in batch[..count].iter().zip(&mut self.iocbs) {
            let file = &self.files[request.flow as usize];
            let (offset, bytes) = span(file, request);
            (iocb.data, iocb.fd) = (request.tag.0, raw(file));
            iocb.opcode = match request.op {
                Op::Read => PREAD,
                Op::Write => PWRITE,
                Op::Flush => self.sync,
                op => panic!("{op:?} is nothing that this interface does"),
            };
            // A flush must name nothing.
            let named = request.buffer.as_ref().filter(|_| bytes > 0);
            iocb.address = named.map_or(0, |buffer| buffer.as_ptr() as u64);
            iocb.bytes = u64::from(bytes);
            iocb.offset = if bytes > 0 { offset as i64 } else { 0 };
        }
        for request in batch.drain(..count) {
            self.requests.put(request);
        }
        let result = self.context.submit(&self.list[..count]);
        let taken = *result.as_ref().unwrap_or(&0);
        if taken < count {
            self.give_back(taken, count, batch);
        }
        result
    }

    /// What the kernel did not take goes back to where it came from.
    #[cold]
    fn give_back(&mut self, taken: usize, count: usize, batch: &mut Vec<Request<Buffer>>) {
        batch.splice(..0, self.iocbs[taken..count].iter().map(|iocb| self.requests.take(iocb.data)));
    }

    /// Returns when something can be reaped, or after the time; at once when nothing is in flight. Takes up
    /// to `max` completions. Signals may end it early.
    pub fn wait(&mut self, max: usize, timeout_ns: u64) {
        if self.held == 0 && self.requests.len() > 0 {
            let max = max.clamp(1, self.events.len());
            self.held = self.context.get_events(1, &mut self.events[..max], timeout_ns);
        }
    }

    /// Appends up to `max` completed requests to `sink`; how many they were. `status` is shown each with its
    /// file and its result: bytes, or a negative error number.
    #[inline]
    pub fn reap(
        &mut self,
        max: usize,
        sink: &mut Vec<Completion<Buffer>>,
        status: impl Fn(&F, &Request<Buffer>, i64) -> Status,
    ) -> usize {
        if self.held == 0 {
            if self.requests.len() == 0 || self.context.is_empty() {
                return 0;
            }
            let max = max.clamp(1, self.events.len());
            self.held = match self.userspace_reap && self.context.is_readable() {
                true => self.context.read(&mut self.events[..max]),
                false => self.context.get_events(0, &mut self.events[..max], 0),
            };
        }
        let count = std::mem::take(&mut self.held);
        for event in &self.events[..count] {
            let file = |request: &Request<Buffer>| &self.files[request.flow as usize];
            let of = |request: &Request<Buffer>| status(file(request), request, event.result);
            sink.push(self.requests.complete(event.data, of));
        }
        count
    }
}

#[inline]
fn raw<F: RingFile>(file: &F) -> u32 {
    use std::os::fd::AsRawFd;
    file.as_fd().as_raw_fd() as u32
}

impl<F> Drop for Aio<F> {
    /// The kernel may still write into the buffers of what is in flight: waits for that, and gives the memory
    /// up for good where the kernel does not let go of it.
    fn drop(&mut self) {
        let begun = Instant::now();
        self.events[..self.held].iter().for_each(|event| drop(self.requests.take(event.data)));
        while self.requests.len() > 0 && begun.elapsed() < DROP_TIME_MAX {
            let count = self.context.get_events(1, &mut self.events, 100_000_000);
            self.events[..count].iter().for_each(|event| drop(self.requests.take(event.data)));
        }
        self.requests.forget();
    }
}

/// The kernel's side: its number, which is the address where it maps a ring of events.
struct Context {
    ring: NonNull<u8>,
    /// Whether that ring is one that we understand.
    readable: bool,
    events: u32,
    header_bytes: usize,
}

/// Offsets of `struct aio_ring`: `nr`, `head`, `tail`, `magic` and `header_length`, four bytes each.
const EVENTS: usize = 4;
const HEAD: usize = 8;
const TAIL: usize = 12;
const MAGIC_AT: usize = 16;
const HEADER: usize = 28;
const MAGIC: u32 = 0xa10a_10a1;

impl Context {
    fn new(depth: u32) -> io::Result<Context> {
        let mut number = 0usize;
        // SAFETY: io_setup writes the context's address into a word of ours.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut number) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        let ring = NonNull::new(std::ptr::with_exposed_provenance_mut(number));
        let ring = ring.ok_or_else(|| io::Error::other("a context at 0"))?;
        let mut context = Context { ring, readable: false, events: 0, header_bytes: 0 };
        let word = |at| context.word(at).load(Ordering::Relaxed);
        let (readable, events, header_bytes) = (word(MAGIC_AT) == MAGIC, word(EVENTS), word(HEADER));
        (context.readable, context.events, context.header_bytes) = (readable, events, header_bytes as usize);
        Ok(context)
    }

    #[inline]
    fn word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset <= HEADER, "the head of the ring has 32 bytes");
        // SAFETY: the kernel maps at least a page there for as long as the context lives.
        let place = unsafe { self.ring.as_ptr().add(offset) };
        // SAFETY: aligned, as the offsets are multiples of 4 and the mapping is of pages; the kernel accesses
        // these words as wholes.
        unsafe { AtomicU32::from_ptr(place.cast()) }
    }

    #[inline]
    fn is_readable(&self) -> bool {
        self.readable
    }

    /// Whether the ring says, without a system call, that there is nothing.
    #[inline]
    fn is_empty(&self) -> bool {
        self.readable && self.word(HEAD).load(Ordering::Relaxed) == self.word(TAIL).load(Ordering::Acquire)
    }

    /// `addresses` are of iocbs of [`Aio`], which describe memory that its requests own.
    fn submit(&mut self, addresses: &[u64]) -> io::Result<usize> {
        let (count, list) = (addresses.len(), addresses.as_ptr());
        // SAFETY: the list holds `count` addresses of iocbs that live across the call, in which the kernel
        // copies them (they are a box's, which stays where it is); the buffers in them are owned by the
        // requests that `Aio` keeps until their completion.
        let result = unsafe { libc::syscall(libc::SYS_io_submit, self.ring.as_ptr(), count, list) };
        usize::try_from(result).map_err(|_| io::Error::last_os_error())
    }

    /// Takes events, waiting for `min`; how many. An error, as a signal, is none.
    fn get_events(&mut self, min: usize, events: &mut [Event], timeout_ns: u64) -> usize {
        let mut timeout = libc::timespec {
            tv_sec: (timeout_ns / 1_000_000_000) as libc::time_t,
            tv_nsec: (timeout_ns % 1_000_000_000) as libc::c_long,
        };
        let (max, room) = (events.len(), events.as_mut_ptr());
        // SAFETY: there is room for `max` events, and the timeout lives until the call returns.
        let result = unsafe {
            libc::syscall(libc::SYS_io_getevents, self.ring.as_ptr(), min, max, room, &raw mut timeout)
        };
        usize::try_from(result).unwrap_or(0)
    }

    /// As the library does with `userspace_reap`: no system call.
    fn read(&mut self, events: &mut [Event]) -> usize {
        let (mut head, tail) =
            (self.word(HEAD).load(Ordering::Relaxed), self.word(TAIL).load(Ordering::Acquire));
        let mut count = 0;
        while head != tail && head < self.events && count < events.len() {
            let offset = self.header_bytes + head as usize * EVENT_BYTES;
            // SAFETY: `head` is below the ring's number of events, all of which are mapped.
            let place = unsafe { self.ring.as_ptr().add(offset) };
            // SAFETY: aligned, as header and events are multiples of 32 bytes, and the kernel has published
            // the event before the tail.
            events[count] = unsafe { place.cast::<Event>().read_volatile() };
            count += 1;
            head = if head + 1 >= self.events { 0 } else { head + 1 };
        }
        self.word(HEAD).store(head, Ordering::Release);
        count
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is ours, used no more, and nothing points into its ring.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.ring.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use memory::{Arena, Pool};
    use ring::Tag;

    use super::*;
    use crate::requests::tests::Blocks;

    fn files() -> Vec<Blocks> {
        let path = std::env::temp_dir().join(format!(
            "ringbolt-sys-aio-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        std::fs::write(&path, [5; 4096]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        // What cannot be read this way: a directory.
        let directory = std::fs::File::open("/").unwrap();
        vec![Blocks(file.into()), Blocks(directory.into())]
    }

    fn requests(flows: &[u16]) -> Vec<Request<Buffer>> {
        let config = memory::Config { limit_bytes: 2 << 20, hugepages: false, ..memory::Config::default() };
        let pool = Pool::new(&Arena::new(config));
        let read = |(tag, flow): (u64, &u16)| {
            let mut request = Request::read(Tag(tag), tag, 1, pool.take(512).unwrap());
            request.flow = *flow;
            request
        };
        (0..).zip(flows).map(read).collect()
    }

    fn tags(batch: &[Request<Buffer>]) -> Vec<u64> {
        batch.iter().map(|request| request.tag.0).collect()
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no such calls")]
    fn what_the_kernel_does_not_take_stays_in_order() {
        for userspace_reap in [false, true] {
            let mut aio = Aio::new(4, files(), false, userspace_reap).unwrap();
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
    #[cfg_attr(miri, ignore = "Miri has no such calls")]
    fn a_dropped_context_gives_its_buffers_back() {
        let mut aio = Aio::new(2, files(), false, false).unwrap();
        let mut batch = requests(&[0, 0, 0]);
        let pools = batch[0].buffer.as_ref().map(|buffer| std::sync::Arc::downgrade(buffer.arena())).unwrap();
        assert_eq!(aio.submit(&mut batch, 3).unwrap(), 2);
        assert_eq!(tags(&batch), [2], "there is room for two");
        aio.wait(1, 1_000_000_000);
        drop((batch, aio));
        assert!(pools.upgrade().is_none(), "nothing holds a buffer any more");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no such calls")]
    #[should_panic(expected = "nothing that this interface does")]
    fn only_reads_writes_and_flushes_are_taken() {
        let mut aio = Aio::new(2, files(), false, false).unwrap();
        let _ = aio.submit(&mut vec![Request::new(Tag(0), Op::Unmap, 0, 1)], 1);
    }
}
