//! Outcomes that a healthy kernel does not give, fed in by hand; what follows is real I/O.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64};

use reactor::{Config, IdlePolicy, Reactor};
use ring::{Channel as _, Flags, Op, Tag};

use super::*;

const BYTES: usize = 1 << 20;

struct Bench {
    reactor: Reactor,
    channel: Channel,
    reader: std::fs::File,
}

/// A channel on an unlinked file full of ones, or `None` where there is no io_uring.
fn bench(direct: bool) -> Option<Bench> {
    let name = format!("ringbolt-uring-{}-{:?}", std::process::id(), std::thread::current().id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, vec![1; BYTES]).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    let reader = file.try_clone().unwrap();
    let reactor = Reactor::new(&Config { idle: IdlePolicy::Spin, ..Config::default() }).unwrap();
    let core = reactor.core();
    let client = core.events().client();
    if !client.has_files() {
        eprintln!("SKIPPED: no io_uring");
        return None;
    }
    let id = client.add_file(OwnedFd::from(file)).unwrap();
    let shared = Shared {
        blocks: AtomicU64::new(BYTES as u64 / 512),
        unused_bytes: AtomicU64::new(0),
        no_punch: AtomicBool::new(false),
        no_zero: AtomicBool::new(false),
        flush_failed: AtomicBool::new(false),
        direct,
    };
    let channel = Channel::new(core, client, id, 512, Arc::new(shared));
    Some(Bench { reactor, channel, reader })
}

impl Bench {
    /// Puts a request in flight as if its first operation were with the kernel.
    fn pretend(&mut self, request: Request) -> Slot {
        let plan = plan(request.op, request.flags).unwrap();
        let job = Job { request, step: plan.first, then: plan.then, progress: 0, tries: 0, zeroes: None };
        self.channel.jobs.insert(job).unwrap()
    }

    /// The kernel's answer to a pretended operation.
    fn answer(&mut self, slot: Slot, result: i32) {
        let buffer = self.channel.jobs.get_mut(slot).and_then(|job| job.request.buffer.take());
        self.channel.step_done(Done { tag: slot.to_bits(), result, buffer });
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
fn short_transfers_go_on_where_they_stopped() {
    let Some(mut bench) = bench(false) else { return };
    let read = Request::read(Tag(1), 4, 8, bench.buffer(8, 9));
    let slot = bench.pretend(read);
    bench.answer(slot, 1536);
    let completion = bench.wait();
    assert_eq!(completion.status(), Status::SUCCESS);
    let data = completion.into_request().buffer.unwrap();
    assert!(data.as_slice()[..1536].iter().all(|byte| *byte == 9), "what was there before the rest");
    assert!(data.as_slice()[1536..].iter().all(|byte| *byte == 1));

    let write = Request::write(Tag(2), 8, 2, bench.buffer(2, 5));
    let slot = bench.pretend(write);
    bench.answer(slot, 512);
    assert_eq!(bench.wait().status(), Status::SUCCESS);
    let contents = bench.contents();
    assert!(contents[8 * 512..9 * 512].iter().all(|byte| *byte == 1), "the first block is not written again");
    assert!(contents[9 * 512..10 * 512].iter().all(|byte| *byte == 5));
    assert_eq!(contents[10 * 512], 1);
}

#[test]
fn what_the_file_system_cannot_do_is_done_by_writing_zeroes() {
    let Some(mut bench) = bench(false) else { return };
    let mut unmap = Request::new(Tag(1), Op::Unmap, 100, 1500);
    unmap.flags = Flags::FUA;
    let slot = bench.pretend(unmap);
    bench.answer(slot, -EOPNOTSUPP);
    assert!(bench.channel.shared.no_punch.load(Ordering::Relaxed));
    bench.channel.shared.no_zero.store(true, Ordering::Relaxed);
    assert_eq!(bench.wait().status(), Status::SUCCESS);
    // The next goes straight to writing, in pieces of 256 KiB.
    bench.channel.submit(&mut vec![Request::new(Tag(2), Op::WriteZeroes, 10, 1900)]);
    assert_eq!(bench.wait().status(), Status::SUCCESS);
    for (index, byte) in bench.contents().into_iter().enumerate() {
        assert_eq!(byte == 0, (10 * 512..1910 * 512).contains(&index), "byte {index}");
    }
}

#[test]
fn an_interrupted_operation_is_tried_again_and_not_for_ever() {
    let Some(mut bench) = bench(false) else { return };
    let flush = bench.pretend(Request::new(Tag(1), Op::Flush, 0, 0));
    bench.answer(flush, -EAGAIN);
    assert_eq!(bench.channel.deadline(), Some(0));
    assert_eq!(bench.wait().status(), Status::SUCCESS);
    let flush = bench.pretend(Request::new(Tag(2), Op::Flush, 0, 0));
    bench.channel.jobs.get_mut(flush).unwrap().tries = TRIES_MAX;
    bench.answer(flush, -EAGAIN);
    assert_eq!(bench.wait().status(), Status::COMMAND_INTERRUPTED);
}

#[test]
fn after_a_lost_flush_of_the_page_cache_no_flush_succeeds() {
    for direct in [false, true] {
        let Some(mut bench) = bench(direct) else { return };
        let flush = bench.pretend(Request::new(Tag(1), Op::Flush, 0, 0));
        bench.answer(flush, -EIO);
        assert_eq!(bench.wait().status(), Status::WRITE_FAULT);
        bench.channel.submit(&mut vec![Request::new(Tag(2), Op::Flush, 0, 0)]);
        assert_eq!(bench.wait().status().is_success(), direct);
    }
}

#[test]
fn errors_name_their_direction() {
    let Some(mut bench) = bench(true) else { return };
    let read = Request::read(Tag(1), 0, 1, bench.buffer(1, 0));
    let write = Request::write(Tag(2), 0, 1, bench.buffer(1, 0));
    let table = [(read, Status::UNRECOVERED_READ_ERROR), (write, Status::WRITE_FAULT)];
    for (request, status) in table {
        let slot = bench.pretend(request);
        bench.answer(slot, -EIO);
        let completion = bench.wait();
        assert_eq!(completion.status(), status);
        assert!(completion.into_request().buffer.is_some(), "the buffer comes back");
    }
    // A transfer of nothing is the end of the file.
    let read = Request::read(Tag(3), 0, 1, bench.buffer(1, 0));
    let slot = bench.pretend(read);
    bench.answer(slot, 0);
    assert_eq!(bench.wait().status(), Status::UNRECOVERED_READ_ERROR);
}
