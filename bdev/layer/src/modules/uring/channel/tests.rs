//! Results that a healthy kernel does not return, injected by the test; the I/O that follows them is real.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use block_io::{Channel as _, Op, RequestFlags, Tag};
use dma::Buffer;
use reactor::{IdlePolicy, Reactor, ReactorConfig};

use super::super::port::UringPort;
use super::*;

const BYTES: usize = 1 << 20;

struct UringHarness {
    reactor: Reactor,
    channel: FileIoChannel<UringPort>,
    reader: std::fs::File,
}

/// A channel on an unlinked file filled with 1, or `None` without io_uring.
fn harness(direct: bool) -> Option<UringHarness> {
    let name = format!("ringbolt-uring-{}-{:?}", std::process::id(), std::thread::current().id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, vec![1; BYTES]).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    let reader = file.try_clone().unwrap();
    let reactor =
        Reactor::new(&ReactorConfig { idle: IdlePolicy::Spin, ..ReactorConfig::default() }).unwrap();
    let core = reactor.core();
    let client = core.event_loop().client();
    if !client.supports_files() {
        eprintln!("SKIPPED: no io_uring");
        return None;
    }
    let id = client.add_file(OwnedFd::from(file)).unwrap();
    let shared = UringShared {
        blocks: AtomicU64::new(BYTES as u64 / 512),
        unused_bytes: AtomicU64::new(0),
        no_punch: AtomicBool::new(false),
        no_zero: AtomicBool::new(false),
        flush_failed: AtomicBool::new(false),
        direct,
        has_holes: true,
        atomic_blocks_max: 0,
        worker: super::super::FileWorker::new(reader.try_clone().unwrap()),
    };
    let channel = FileIoChannel::new(core, UringPort::new(client, id), 512, Arc::new(shared));
    Some(UringHarness { reactor, channel, reader })
}

impl UringHarness {
    /// Adds a request as if its first operation were in flight.
    fn start_simulated(&mut self, request: Request) -> Slot {
        let plan = plan(request.op, request.flags).unwrap();
        let job = FileRequest {
            request,
            step: plan.first,
            then: plan.then,
            progress: 0,
            tries: 0,
            writes_own: false,
            own: None,
        };
        self.channel.active.insert(job).unwrap()
    }

    /// Completes a simulated operation with `result`.
    fn complete_simulated(&mut self, slot: Slot, result: i32) {
        let data = self.channel.active.get_mut(slot).and_then(|job| job.request.take_data());
        self.channel.step_done(EventCompletion { tag: slot.to_bits(), result, data });
    }

    fn wait(&mut self) -> Completion {
        let mut sink = Vec::new();
        while sink.is_empty() {
            self.reactor.turn();
            self.channel.poll(&mut sink);
        }
        sink.pop().unwrap()
    }

    fn contents(&self) -> Vec<u8> {
        use std::os::unix::fs::FileExt;
        let mut bytes = vec![0; BYTES];
        self.reader.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn buffer(&self, blocks: u32, fill: u8) -> Buffer {
        let mut buffer = self.channel.core.pool().take((blocks * 512) as usize).unwrap();
        buffer.as_mut_slice().fill(fill);
        buffer
    }
}

#[test]
fn short_transfers_are_continued() {
    let Some(mut harness) = harness(false) else { return };
    let read = Request::read(Tag(1), 4, 8, harness.buffer(8, 9));
    let slot = harness.start_simulated(read);
    harness.complete_simulated(slot, 1536);
    let completion = harness.wait();
    assert_eq!(completion.status(), Status::SUCCESS);
    let data = completion.into_request().take_data().unwrap().into_single().unwrap();
    assert!(data.as_slice()[..1536].iter().all(|byte| *byte == 9), "the part that was already transferred");
    assert!(data.as_slice()[1536..].iter().all(|byte| *byte == 1));

    let write = Request::write(Tag(2), 8, 2, harness.buffer(2, 5));
    let slot = harness.start_simulated(write);
    harness.complete_simulated(slot, 512);
    assert_eq!(harness.wait().status(), Status::SUCCESS);
    let contents = harness.contents();
    assert!(contents[8 * 512..9 * 512].iter().all(|byte| *byte == 1), "the first block is not written again");
    assert!(contents[9 * 512..10 * 512].iter().all(|byte| *byte == 5));
    assert_eq!(contents[10 * 512], 1);
}

#[test]
fn pages_that_are_not_registered_are_an_error() {
    let Some(mut harness) = harness(false) else { return };
    let pages = block_io::RegisteredPages { index: 1024, bytes: 4096 };
    for op in [Op::Read, Op::Write] {
        let request = Request::with_payload(Tag(1), op, 4, 8, Payload::Registered(pages));
        harness.channel.submit(&mut vec![request]);
        let completion = harness.wait();
        assert!(!completion.status().is_success(), "{op:?}");
        let request = completion.into_request();
        assert!(matches!(request.payload, Payload::Registered(of) if of == pages), "{request:?}");
    }
    assert!(harness.contents().iter().all(|byte| *byte == 1));
}

#[test]
fn data_of_several_slices_is_continued_in_the_middle_of_one() {
    let Some(mut harness) = harness(false) else { return };
    let slices = |fills: [u8; 3]| Data::gather(fills.map(|fill| harness.buffer(2, fill)).into()).unwrap();
    let write = Request::write(Tag(1), 8, 6, slices([5, 6, 7]));
    let read = Request::read(Tag(2), 8, 6, slices([9, 9, 9]));
    let slot = harness.start_simulated(write);
    harness.complete_simulated(slot, 1536);
    assert_eq!(harness.wait().status(), Status::SUCCESS);
    let expected: Vec<u8> = [1, 1, 1, 6, 7, 7].iter().flat_map(|fill| [*fill; 512]).collect();
    assert_eq!(harness.contents()[8 * 512..14 * 512], expected, "the first half is not written again");
    harness.channel.submit(&mut vec![read]);
    let data = harness.wait().into_request().take_data().unwrap();
    assert_eq!(data.slices().len(), 3);
    let mut bytes = vec![0; 6 * 512];
    data.copy_to(0, &mut bytes);
    assert_eq!(bytes, expected);
}

#[test]
fn unsupported_fallocate_falls_back_to_writing_zeroes() {
    let Some(mut harness) = harness(false) else { return };
    let mut unmap = Request::new(Tag(1), Op::Unmap, 100, 1500);
    unmap.flags = RequestFlags::FUA;
    let slot = harness.start_simulated(unmap);
    harness.complete_simulated(slot, -EOPNOTSUPP);
    assert!(harness.channel.shared.no_punch.load(Ordering::Relaxed));
    harness.channel.shared.no_zero.store(true, Ordering::Relaxed);
    assert_eq!(harness.wait().status(), Status::SUCCESS);
    // The next request writes zeroes at once, 256 KiB at a time.
    harness.channel.submit(&mut vec![Request::new(Tag(2), Op::WriteZeroes, 10, 1900)]);
    assert_eq!(harness.wait().status(), Status::SUCCESS);
    for (index, byte) in harness.contents().into_iter().enumerate() {
        assert_eq!(byte == 0, (10 * 512..1910 * 512).contains(&index), "byte {index}");
    }
}

#[test]
fn an_atomic_write_is_the_kernels_or_fails_whole() {
    let Some(mut harness) = harness(false) else { return };
    let write = |harness: &UringHarness, tag: u64, blocks: u32| {
        let half = |blocks: u32| {
            let bytes = blocks as usize * 512;
            let mut data = Data::from(harness.reactor.core().pool().take(bytes).unwrap());
            data.copy_from(0, &vec![9; bytes]);
            data
        };
        let data = half(blocks / 2).join(half(blocks - blocks / 2));
        let mut request =
            Request::with_payload(Tag(tag), Op::Write, 8, blocks, block_io::Payload::Data(data));
        request.flags = RequestFlags::ATOMIC;
        request
    };
    Arc::get_mut(&mut harness.channel.shared).unwrap().atomic_blocks_max = 8;
    // This file has no direct I/O, so that the kernel refuses; slices that were joined are returned as they were.
    let request = write(&harness, 1, 8);
    harness.channel.submit(&mut vec![request]);
    let completion = harness.wait();
    assert!(matches!(completion.status(), Status::INVALID_OPCODE | Status::INVALID_FIELD), "{completion:?}");
    assert_eq!(completion.into_data().map(|data| (data.len(), data.slices().len())), Some((4096, 2)));
    let request = write(&harness, 2, 10);
    harness.channel.submit(&mut vec![request]);
    assert_eq!(harness.wait().status(), Status::INVALID_FIELD.do_not_retry());
    let request = write(&harness, 3, 8);
    let slot = harness.start_simulated(request);
    harness.complete_simulated(slot, 512);
    assert_eq!(harness.wait().status(), Status::WRITE_FAULT, "a part is none");
    assert!(harness.contents().iter().all(|byte| *byte == 1));
    // Without a promise, the flag asks for nothing.
    Arc::get_mut(&mut harness.channel.shared).unwrap().atomic_blocks_max = 0;
    let request = write(&harness, 4, 8);
    harness.channel.submit(&mut vec![request]);
    assert_eq!(harness.wait().status(), Status::SUCCESS);
    assert!(harness.contents()[4096..8192].iter().all(|byte| *byte == 9));
}

#[test]
fn interrupted_operations_are_retried_a_bounded_number_of_times() {
    let Some(mut harness) = harness(false) else { return };
    let flush = harness.start_simulated(Request::new(Tag(1), Op::Flush, 0, 0));
    harness.complete_simulated(flush, -EAGAIN);
    assert_eq!(harness.channel.deadline(), Some(0));
    assert_eq!(harness.wait().status(), Status::SUCCESS);
    let flush = harness.start_simulated(Request::new(Tag(2), Op::Flush, 0, 0));
    harness.channel.active.get_mut(flush).unwrap().tries = TRIES_MAX;
    harness.complete_simulated(flush, -EAGAIN);
    assert_eq!(harness.wait().status(), Status::COMMAND_INTERRUPTED);
}

/// A device that takes two operations at a time, which the test completes.
struct BusyPort {
    started: Rc<RefCell<Vec<EventCompletion>>>,
    ended: Rc<RefCell<Vec<EventCompletion>>>,
}

impl FilePort for BusyPort {
    fn start(
        &mut self,
        _: FileOperation,
        _: u64,
        bytes: u64,
        data: Option<(Data, usize)>,
        tag: u64,
    ) -> Result<(), os::RejectedOperation> {
        let is_full = self.started.borrow().len() == 2;
        let data = data.map(|(data, _)| data);
        let one = EventCompletion { tag, result: if is_full { -EAGAIN } else { bytes as i32 }, data };
        if is_full { &self.ended } else { &self.started }.borrow_mut().push(one);
        Ok(())
    }

    fn start_registered(
        &mut self,
        _: FileOperation,
        _: u64,
        _: u64,
        _: (block_io::RegisteredPages, u32),
        _: u64,
    ) -> Result<(), os::RejectedOperation> {
        unreachable!("no request has pages")
    }

    fn reap(&mut self, done: &mut Vec<EventCompletion>) {
        done.append(&mut self.ended.borrow_mut());
    }

    fn defers(&self) -> bool {
        true
    }

    fn close(self, _: &reactor::Core, _: usize) {}
}

#[test]
fn what_a_busy_device_has_no_resources_for_is_retried_when_it_has() {
    let reactor =
        Reactor::new(&ReactorConfig { idle: IdlePolicy::Spin, ..ReactorConfig::default() }).unwrap();
    let core = reactor.core();
    let shared = UringShared {
        blocks: AtomicU64::new(1 << 20),
        unused_bytes: AtomicU64::new(0),
        no_punch: AtomicBool::new(true),
        no_zero: AtomicBool::new(true),
        flush_failed: AtomicBool::new(false),
        direct: true,
        has_holes: false,
        atomic_blocks_max: 0,
        worker: super::super::FileWorker::new(std::fs::File::open("/dev/null").unwrap()),
    };
    let started = Rc::new(RefCell::new(Vec::<EventCompletion>::new()));
    let ended = Rc::new(RefCell::new(Vec::<EventCompletion>::new()));
    let port = BusyPort { started: started.clone(), ended: ended.clone() };
    let mut channel = FileIoChannel::new(core.clone(), port, 512, Arc::new(shared));
    let read = |tag| Request::read(Tag(tag), 0, 1, core.pool().take(512).unwrap());
    channel.submit(&mut (0..4).map(read).collect());
    let mut sink = Vec::new();
    for _ in 0..200 {
        channel.poll(&mut sink);
    }
    assert!(sink.is_empty(), "nothing fails: {sink:?}");
    assert_eq!((started.borrow().len(), channel.deferred.len()), (2, 2));
    assert_eq!(channel.deadline(), Some(channel.deferred_until_ns), "it sleeps meanwhile");
    // One ends: both are retried at once, in order, and one of them finds resources.
    let one = started.borrow_mut().remove(0);
    ended.borrow_mut().push(one);
    for _ in 0..4 {
        channel.poll(&mut sink);
    }
    assert_eq!((sink.len(), started.borrow().len(), channel.deferred.len()), (1, 2, 1));
    assert_eq!(channel.active.get(Slot::from_bits(started.borrow()[1].tag)).unwrap().request.tag, Tag(2));
    // Without a completion it is retried when the time has come, and fails in the end.
    let last = channel.deferred[0];
    channel.active.get_mut(last).unwrap().tries = DEFERRALS_MAX - 1;
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while sink.len() < 2 {
        assert!(std::time::Instant::now() < end, "it is not retried");
        channel.poll(&mut sink);
    }
    assert_eq!((sink[1].tag(), sink[1].status()), (Tag(3), Status::COMMAND_INTERRUPTED));
    assert!(sink[1].request().data().is_some());
}

#[test]
fn after_a_failed_flush_of_the_page_cache_every_flush_fails() {
    for direct in [false, true] {
        let Some(mut harness) = harness(direct) else { return };
        let flush = harness.start_simulated(Request::new(Tag(1), Op::Flush, 0, 0));
        harness.complete_simulated(flush, -EIO);
        assert_eq!(harness.wait().status(), Status::WRITE_FAULT);
        harness.channel.submit(&mut vec![Request::new(Tag(2), Op::Flush, 0, 0)]);
        assert_eq!(harness.wait().status().is_success(), direct);
    }
}

#[test]
fn media_errors_distinguish_reads_and_writes() {
    let Some(mut harness) = harness(true) else { return };
    let read = Request::read(Tag(1), 0, 1, harness.buffer(1, 0));
    let write = Request::write(Tag(2), 0, 1, harness.buffer(1, 0));
    let table = [(read, Status::UNRECOVERED_READ_ERROR), (write, Status::WRITE_FAULT)];
    for (request, status) in table {
        let slot = harness.start_simulated(request);
        harness.complete_simulated(slot, -EIO);
        let completion = harness.wait();
        assert_eq!(completion.status(), status);
        assert!(completion.into_request().data().is_some(), "the buffer is returned");
    }
    // A transfer of 0 bytes is the end of the file.
    let read = Request::read(Tag(3), 0, 1, harness.buffer(1, 0));
    let slot = harness.start_simulated(read);
    harness.complete_simulated(slot, 0);
    assert_eq!(harness.wait().status(), Status::UNRECOVERED_READ_ERROR);
}
