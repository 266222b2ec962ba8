//! A channel with an io_uring of its own: polled completions, a submission thread, or NVMe passthrough.
//!
//! The core's ring serves sockets and every other file, so that its modes cannot change for one device. Reads and writes
//! go through this channel's ring; what a polled ring cannot do (flushes, deallocation, durable writes), and transfers
//! that come back short, take the core's. The reactor polls the channel while requests are in flight.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use block_io::{Channel, Errno, Op, RequestFlags, Status, Tag};
use os::{BlockFile, FileIo, NvmePassthrough, SqeFormat, UringPolling, UringQueue, UringQueueConfig};

use super::DEPTH;
use super::channel::FileIoChannel;
use super::plan::status_of;
use super::port::UringPort;
use crate::{Completion, Request};

/// The file of a ring.
pub(super) struct RingFile {
    pub(super) file: OwnedFd,
    pub(super) block_size: u32,
    /// Of an NVMe generic device.
    pub(super) namespace_id: u32,
}

impl AsFd for RingFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl BlockFile for RingFile {
    fn block_bytes(&self) -> u32 {
        self.block_size
    }

    fn namespace_id(&self) -> u32 {
        self.namespace_id
    }
}

/// What a channel needs to know of its entries' format.
pub(super) trait RingFormat: SqeFormat {
    /// Whether the ring executes a request; others go to the core's ring.
    fn takes(request: &Request) -> bool;

    /// The status of a request of `bytes` bytes with the kernel's result; `None` to execute it by the core's ring.
    fn status(op: Op, result: i64, bytes: u64) -> Option<Status>;
}

impl RingFormat for FileIo {
    fn takes(request: &Request) -> bool {
        matches!(request.op, Op::Read | Op::Write)
            && !request.flags.intersects(RequestFlags::FUA | RequestFlags::ATOMIC)
    }

    fn status(_: Op, result: i64, bytes: u64) -> Option<Status> {
        // Short transfers are continued, and errors examined, where every file's are.
        (result as u64 == bytes).then_some(Status::SUCCESS)
    }
}

impl RingFormat for NvmePassthrough {
    fn takes(_: &Request) -> bool {
        true
    }

    fn status(op: Op, result: i64, _: u64) -> Option<Status> {
        Some(match result {
            0 => Status::SUCCESS,
            1.. => Status::from_field(result as u16),
            _ => status_of(op, Errno(-result as i32)),
        })
    }
}

pub(super) struct OwnRingChannel<D: RingFormat> {
    ring: UringQueue<RingFile, D>,
    /// The core's ring; `None` for passthrough, which does everything.
    core_ring: Option<FileIoChannel<UringPort>>,
    /// Tag and flow of the requests in flight, by the tag that they have in the ring.
    callers: Box<[(Tag, u16)]>,
    free: Vec<u16>,
    /// Whether the kernel must be entered to complete requests.
    enters: bool,
    /// Scratch; empty between calls.
    batch: Vec<Request>,
    done: Vec<Completion>,
}

/// The result with which the ring gives a request back that the core's ring is to execute. No device reports it.
const BY_CORE_RING: Status = Status::new(7, 0xff);

impl<D: RingFormat> OwnRingChannel<D> {
    /// # Errors
    /// Those of [`UringQueue::new`].
    pub(super) fn new(
        file: RingFile,
        polling: UringPolling,
        core_ring: Option<FileIoChannel<UringPort>>,
    ) -> std::io::Result<OwnRingChannel<D>> {
        let mut ring = UringQueue::new(&config(polling, DEPTH), vec![file])?;
        // Without it the kernel looks the file up for each request; at the limit of locked memory it does.
        let _ = ring.register_files();
        Ok(OwnRingChannel {
            ring,
            core_ring,
            callers: vec![(Tag(0), 0); DEPTH as usize].into(),
            free: (0..DEPTH as u16).rev().collect(),
            enters: polling.iopoll || !polling.sqpoll,
            batch: Vec::new(),
            done: Vec::new(),
        })
    }

    /// Returns a completed request to its caller, or to the core's ring.
    fn complete(&mut self, completion: Completion, sink: &mut Vec<Completion>) {
        let index = completion.tag().0 as u16;
        self.free.push(index);
        let status = completion.status();
        let mut request = completion.into_request();
        (request.tag, request.flow) = self.callers[usize::from(index)];
        match &mut self.core_ring {
            Some(core_ring) if status == BY_CORE_RING => core_ring.submit(&mut vec![request]),
            _ => sink.push(request.complete(status)),
        }
    }
}

fn config(polling: UringPolling, depth: u32) -> UringQueueConfig {
    UringQueueConfig { depth, polling, nonvectored: true, data_sync: true, batch_max: 0 }
}

impl<D: RingFormat> Channel for OwnRingChannel<D> {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        let mut others = Vec::new();
        for mut request in batch.drain(..) {
            if self.core_ring.is_some() && !D::takes(&request) {
                others.push(request);
                continue;
            }
            let index = self.free.pop().expect("the layer admits no more than the depth");
            self.callers[usize::from(index)] = (request.tag, request.flow);
            (request.tag, request.flow) = (Tag(index.into()), 0);
            self.batch.push(request);
        }
        let count = self.batch.len();
        self.ring.submit(&mut self.batch, count);
        if let Some(core_ring) = self.core_ring.as_mut().filter(|_| !others.is_empty()) {
            core_ring.submit(&mut others);
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        if !self.batch.is_empty() {
            // The kernel lacked resources, or its thread was behind.
            let count = self.batch.len();
            self.ring.submit(&mut self.batch, count);
        }
        if self.ring.in_flight() > 0 {
            if self.enters {
                self.ring.wait(0);
            }
            let mut done = std::mem::take(&mut self.done);
            self.ring.reap(usize::MAX, &mut done, |file, request, result| {
                let bytes = u64::from(request.blocks) * u64::from(file.block_size);
                D::status(request.op, result, bytes).unwrap_or(BY_CORE_RING)
            });
            done.drain(..).for_each(|completion| self.complete(completion, sink));
            self.done = done;
        }
        if let Some(core_ring) = &mut self.core_ring {
            core_ring.poll(sink);
        }
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if self.ring.in_flight() > 0 || !self.batch.is_empty() {
            return Some(0);
        }
        self.core_ring.as_ref().and_then(Channel::deadline)
    }
}

/// Reads the first block in the mode of a device's channels, before the device exists.
///
/// # Errors
/// Why it cannot be used, with what to do about it.
pub(super) fn probe<D: RingFormat>(file: RingFile, polling: UringPolling) -> Result<(), String> {
    let mut ring: UringQueue<RingFile, D> = UringQueue::new(&config(polling, 1), vec![file])
        .map_err(|error| format!("io_uring_setup failed ({error}){}", setup_hint(&error, polling)))?;
    let arena = dma::Arena::new(dma::ArenaConfig { hugepages: false, ..dma::ArenaConfig::default() });
    let bytes = ring.files()[0].block_size;
    let Some(buffer) = dma::Pool::new(&arena).take(bytes as usize) else {
        return Err("no memory for a block".to_string());
    };
    ring.submit(&mut vec![Request::read(Tag(0), 0, 1, buffer)], 1);
    let (mut done, result) = (Vec::new(), std::cell::Cell::new(0));
    let deadline = std::time::Instant::now() + PROBE_TIMEOUT;
    while done.is_empty() {
        if std::time::Instant::now() > deadline {
            return Err("a read did not complete".to_string());
        }
        ring.wait(1_000_000);
        ring.reap(1, &mut done, |_, _, value| {
            result.set(value);
            Status::SUCCESS
        });
    }
    match result.get() {
        value if D::status(Op::Read, value, bytes.into()).is_some_and(Status::is_success) => Ok(()),
        value @ 0.. => Err(format!("a read returned {value} instead of {bytes}")),
        value => {
            let error = std::io::Error::from_raw_os_error(-value as i32);
            Err(format!("a read failed ({error}){}", read_hint(&error, polling)))
        }
    }
}

/// A device answers a read in less, and a kernel that does not poll never does.
const PROBE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

fn setup_hint(error: &std::io::Error, polling: UringPolling) -> &'static str {
    // EPERM, ENOMEM, EINVAL.
    match error.raw_os_error().unwrap_or(0) {
        1 => "; root can allow it with sysctl kernel.io_uring_disabled=0",
        12 => "; raise the limit of locked memory (ulimit -l)",
        22 if polling.sqpoll_cpu.is_some() => "; does the CPU of sqpoll_cpu exist, and is it online?",
        _ => "",
    }
}

fn read_hint(error: &std::io::Error, polling: UringPolling) -> &'static str {
    // EOPNOTSUPP, EINVAL, ENOTTY, EPERM, EACCES.
    match error.raw_os_error().unwrap_or(0) {
        95 | 22 if polling.iopoll => {
            "; iopoll needs direct I/O on a device with polled queues: load the nvme driver with poll_queues=N, or leave \
             iopoll off"
        }
        95 | 25 | 22 => "; the kernel has no NVMe passthrough by io_uring (Linux 5.19 or later does)",
        1 | 13 => "; passthrough needs read and write permission on the device, and before Linux 6.2 root",
        _ => "",
    }
}
