//! `libaio`: the kernel's older asynchronous interface, by its system calls.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use memory::Buffer;
use ring::{Channel, Completion, Op, Request};

use crate::engine::{Slots, drain, status_of, timespec};
use crate::{Config, Engine, File, OpenError};

const PREAD: u16 = 0;
const PWRITE: u16 = 1;
const FSYNC: u16 = 2;
const FDSYNC: u16 = 3;
/// `IOCB_FLAG_IOPRIO` and others are not used; `RWF_HIPRI` goes here.
const EVENT_BYTES: usize = 32;

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
const _: () = assert!(size_of::<Event>() == EVENT_BYTES);

/// The head of the ring that the kernel maps at the context's address.
#[repr(C)]
struct RingHead {
    id: u32,
    events: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compat: u32,
    incompat: u32,
    header_bytes: u32,
}
const MAGIC: u32 = 0xa10a_10a1;

/// A context of the kernel's asynchronous I/O.
pub struct Aio {
    files: Vec<File>,
    context: u64,
    /// Whether the ring in front of the context is one that we understand.
    readable: bool,
    userspace_reap: bool,
    slots: Slots,
    /// One for each tag; the kernel copies it in `io_submit`.
    iocbs: Box<[Iocb]>,
    batch: Vec<*mut Iocb>,
    /// Room for events, and how many lie there, taken by `wait` and not yet polled.
    events: Box<[Event]>,
    held: usize,
    /// Discards, which complete at once.
    done: Vec<Completion<Buffer>>,
    data_sync: bool,
    batch_max: usize,
    reap_max: usize,
}

impl Aio {
    pub(crate) fn open(config: &Config, files: Vec<File>) -> Result<Aio, OpenError> {
        let mut context = 0u64;
        // SAFETY: io_setup writes the context's address into a word of ours.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, config.depth, &raw mut context) };
        if result < 0 {
            return Err(OpenError::Kernel {
                engine: "libaio",
                call: "io_setup",
                error: io::Error::last_os_error(),
                hint: "; more than fs.aio-max-nr in all processes? lower --iodepth or --numjobs",
            });
        }
        // SAFETY: the kernel maps its ring at the context's address for as long as the context lives.
        let readable = unsafe { (*(context as *const RingHead)).magic } == MAGIC;
        let depth = config.depth as usize;
        let limit = |value: u32| if value == 0 { depth } else { (value as usize).min(depth) };
        Ok(Aio {
            files,
            context,
            readable,
            userspace_reap: config.userspace_reap,
            slots: Slots::new(config.depth),
            iocbs: vec![Iocb::default(); depth].into(),
            batch: Vec::with_capacity(depth),
            events: vec![Event::default(); depth].into(),
            held: 0,
            done: Vec::new(),
            data_sync: config.data_sync,
            batch_max: limit(config.batch_max),
            reap_max: limit(config.reap_max),
        })
    }

    fn head(&self) -> &RingHead {
        // SAFETY: mapped while the context lives; what the kernel changes in it are atomics here.
        unsafe { &*(self.context as *const RingHead) }
    }

    /// Fills the request's iocb; its index.
    #[inline]
    fn describe(&mut self, request: &Request<Buffer>) -> usize {
        let file = &self.files[request.flow as usize];
        let bytes = u64::from(request.blocks) * u64::from(file.block_bytes());
        let index = request.tag.0 as usize;
        let iocb = &mut self.iocbs[index];
        *iocb = Iocb { data: request.tag.0, fd: file.raw_fd() as u32, ..Iocb::default() };
        match (request.op, &request.buffer) {
            (Op::Read | Op::Write, Some(buffer)) => {
                assert!(bytes as usize <= buffer.len(), "{bytes} bytes in a buffer of {}", buffer.len());
                iocb.opcode = if request.op == Op::Read { PREAD } else { PWRITE };
                (iocb.address, iocb.bytes) = (buffer.as_ptr() as u64, bytes);
                iocb.offset = (request.lba * u64::from(file.block_bytes())) as i64;
            }
            _ => iocb.opcode = if self.data_sync { FDSYNC } else { FSYNC },
        }
        index
    }

    /// Takes up to `max` events, waiting for `min`, into `events`; how many.
    fn get_events(&mut self, min: usize, max: usize, timeout_ns: u64) -> usize {
        let max = max.min(self.events.len());
        if self.userspace_reap && min == 0 && self.readable {
            return self.read_ring(max);
        }
        let mut timeout = timespec(timeout_ns);
        let events = self.events.as_mut_ptr();
        // SAFETY: there is room for `max` events, and the timeout lives until the call returns.
        let result = unsafe {
            libc::syscall(libc::SYS_io_getevents, self.context, min, max, events, &raw mut timeout)
        };
        usize::try_from(result).unwrap_or(0)
    }

    /// As the library does with `userspace_reap`: no system call.
    fn read_ring(&mut self, max: usize) -> usize {
        let ring = self.head();
        let (size, first) = (ring.events, ring.header_bytes as usize);
        let (mut head, tail) = (ring.head.load(Ordering::Relaxed), ring.tail.load(Ordering::Acquire));
        let mut count = 0;
        while head != tail && count < max {
            let at = self.context as usize + first + head as usize * EVENT_BYTES;
            // SAFETY: `head` is below the ring's size, and the kernel has published the event before the tail.
            self.events[count] = unsafe { std::ptr::read_volatile(at as *const Event) };
            count += 1;
            head = if head + 1 >= size { 0 } else { head + 1 };
        }
        self.head().head.store(head, Ordering::Release);
        count
    }

    fn ring_is_empty(&self) -> bool {
        let ring = self.head();
        self.readable && ring.head.load(Ordering::Relaxed) == ring.tail.load(Ordering::Acquire)
    }
}

impl Channel for Aio {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    fn submit(&mut self, batch: &mut Vec<Request<Buffer>>) {
        while !batch.is_empty() && self.slots.room() > self.done.len() {
            let wanted = batch.len().min(self.slots.room() - self.done.len()).min(self.batch_max);
            self.batch.clear();
            for request in &batch[..wanted] {
                if request.op == Op::Unmap {
                    break;
                }
                let index = self.describe(request);
                let iocb = &raw mut self.iocbs[index];
                self.batch.push(iocb);
            }
            if self.batch.is_empty() {
                let request = batch.remove(0);
                let file = &self.files[request.flow as usize];
                let unit = u64::from(file.block_bytes());
                let result = file.discard(request.lba * unit, u64::from(request.blocks) * unit);
                let status = status_of(Op::Unmap, result.into(), 0);
                self.done.push(request.complete(status));
                continue;
            }
            let (count, list) = (self.batch.len(), self.batch.as_mut_ptr());
            // SAFETY: the list holds `count` pointers to iocbs that live in `self`; their buffers are
            // held by the requests, which go into slots below before anything else happens.
            let result = unsafe { libc::syscall(libc::SYS_io_submit, self.context, count, list) };
            let taken = match usize::try_from(result) {
                Ok(taken) => taken,
                Err(_) => {
                    let error = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
                    if matches!(error, libc::EAGAIN | libc::EINTR) {
                        return;
                    }
                    // The first is at fault; it ends, the others are tried again.
                    let request = batch.remove(0);
                    let status = status_of(request.op, -i64::from(error), 0);
                    self.done.push(request.complete(status));
                    continue;
                }
            };
            for request in batch.drain(..taken) {
                self.slots.put(request);
            }
            if taken < count {
                return;
            }
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Buffer>>) -> usize {
        let mut count = self.done.len();
        sink.append(&mut self.done);
        if self.held == 0 && self.slots.len() > 0 && !self.ring_is_empty() {
            self.held = self.get_events(0, self.reap_max, 0);
        }
        for event in &self.events[..self.held] {
            let request = self.slots.take(event.data);
            let file = &self.files[request.flow as usize];
            let wanted = u64::from(request.blocks) * u64::from(file.block_bytes());
            let status = status_of(request.op, event.result, wanted);
            sink.push(request.complete(status));
        }
        count += self.held;
        self.held = 0;
        count
    }
}

impl Engine for Aio {
    fn wait(&mut self, timeout_ns: u64) {
        if self.held == 0 && self.done.is_empty() && self.slots.len() > 0 {
            self.held = self.get_events(1, self.reap_max, timeout_ns);
        }
    }

    fn in_flight(&self) -> usize {
        self.slots.len() + self.done.len()
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        if !drain(self) {
            self.slots.forget();
        }
        // SAFETY: the context is ours and used no more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}
