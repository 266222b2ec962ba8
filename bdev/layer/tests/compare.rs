//! Compare and fused compare-and-write: results, and atomicity across channels and cores.
#![allow(clippy::unwrap_used)]

mod rig;

use std::sync::Barrier;

use bdev::testing::CrashDisk;
use bdev::{Access, BdevChannel, Completion, Registry, Request, delay, error, malloc, null};
use block_io::{Channel as _, Op, Payload, RequestFlags, Status, Tag};
use dma::{Buffer, Data};
use random::WyRand;
use reactor::Core;
use rig::Rig;

fn open(rig: &Rig, name: &str) -> BdevChannel {
    rig.registry.open(name, Access::ReadWrite).unwrap().channel(&rig.core).unwrap()
}

fn compare(tag: u64, lba: u64, blocks: u32, buffer: Buffer) -> Request {
    Request { payload: Payload::Data(buffer.into()), ..Request::new(Tag(tag), Op::Compare, lba, blocks) }
}

/// A fused compare-and-write: the compare with tag 1, and the write with tag 2.
fn compare_and_write(lba: u64, blocks: u32, expected: Buffer, new: Buffer) -> Vec<Request> {
    let first = Request { flags: RequestFlags::FUSED, ..compare(1, lba, blocks, expected) };
    vec![first, Request::write(Tag(2), lba, blocks, new)]
}

fn statuses(done: &[Completion]) -> Vec<Status> {
    done.iter().map(Completion::status).collect()
}

const FAILED: Status = Status::COMPARE_FAILURE.do_not_retry();

#[test]
fn a_compare_reports_equality_and_does_not_change_its_buffer() {
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    error::create(&rig.registry, error::ErrorConfig::new("M")).unwrap();
    let mut channel = open(&rig, "EE_M");
    assert_eq!(rig.write(&mut channel, 0, 8, 7), Status::SUCCESS);
    for (fill, expected) in [(7, Status::SUCCESS), (8, FAILED)] {
        let done = rig.one(&mut channel, compare(1, 0, 8, rig.buffer(4096, fill)));
        assert_eq!(done.status(), expected);
        assert!(
            done.request().data().and_then(Data::single).unwrap().as_slice().iter().all(|byte| *byte == fill)
        );
    }
    let mut other = vec![7; 4096];
    (other[1300], other[4095]) = (8, 8);
    let mut buffer = rig.buffer(4096, 7);
    buffer.as_mut_slice().copy_from_slice(&other);
    let done = rig.one(&mut channel, compare(1, 0, 8, buffer));
    let Payload::Mismatch(mismatch) = &done.request().payload else { panic!("{done:?}") };
    assert_eq!(mismatch.offset, 1300);
    assert_eq!(done.into_data().and_then(|data| data.into_single().ok()).unwrap().as_slice(), other);
    let bad = rig.simple(&mut channel, Op::WriteUncorrectable, 3, 1, RequestFlags::NONE);
    assert_eq!(bad, Status::SUCCESS);
    let refused = [
        (compare(1, 0, 8, rig.buffer(4096, 7)), Status::UNRECOVERED_READ_ERROR),
        (compare(1, 255, 2, rig.buffer(1024, 7)), Status::LBA_OUT_OF_RANGE.do_not_retry()),
        (compare(1, 0, 8, rig.buffer(512, 7)), Status::DATA_SGL_LENGTH_INVALID.do_not_retry()),
        (Request::new(Tag(1), Op::Compare, 0, 1), Status::DATA_SGL_LENGTH_INVALID.do_not_retry()),
        (compare(1, 0, 0, rig.buffer(512, 7)), Status::INVALID_FIELD.do_not_retry()),
    ];
    for (request, expected) in refused {
        assert_eq!(rig.one(&mut channel, request).status(), expected);
    }
    let stats = channel.device().stats();
    // A rejected compare is an error; a difference is not.
    assert_eq!((stats.op(Op::Compare).ops, stats.op(Op::Compare).errors), (1, 5));
    assert_eq!(channel.outstanding(), 0);
}

#[test]
fn compares_beyond_the_limit_are_queued_and_complete_once() {
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    let mut channel = open(&rig, "M");
    let batch = (0..1000).map(|tag| compare(tag, tag % 256, 1, rig.buffer(512, (tag % 2) as u8)));
    let batch: Vec<Request> = batch.collect();
    let done = rig.run(&mut channel, batch);
    for (tag, completion) in done.iter().enumerate() {
        let expected = if tag % 2 == 0 { Status::SUCCESS } else { FAILED };
        assert_eq!((completion.tag(), completion.status()), (Tag(tag as u64), expected));
    }
}

#[test]
fn a_fused_write_is_executed_only_if_the_compare_succeeds() {
    if !bdev::supports_fused() {
        return println!("SKIPPED: no membarrier");
    }
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    let mut channel = open(&rig, "M");
    let batch = compare_and_write(4, 2, rig.buffer(1024, 1), rig.buffer(1024, 5));
    assert_eq!(statuses(&rig.run(&mut channel, batch)), [FAILED, Status::FUSED_FAILED]);
    assert_eq!(rig.read(&mut channel, 4, 2).unwrap(), vec![0; 1024]);
    let batch = compare_and_write(4, 2, rig.buffer(1024, 0), rig.buffer(1024, 5));
    let done = rig.run(&mut channel, batch);
    assert_eq!(statuses(&done), [Status::SUCCESS; 2]);
    assert_eq!(done[1].request().data().and_then(Data::single).unwrap().as_slice(), [5; 1024]);
    assert_eq!(rig.read(&mut channel, 4, 2).unwrap(), vec![5; 1024]);
    // Each half without the other fails.
    let alone = Request { flags: RequestFlags::FUSED, ..compare(1, 4, 2, rig.buffer(1024, 5)) };
    let missing = Status::FUSED_MISSING.do_not_retry();
    assert_eq!(rig.one(&mut channel, alone).status(), missing);
    let mut elsewhere = compare_and_write(4, 2, rig.buffer(1024, 5), rig.buffer(1024, 6));
    elsewhere[1].lba = 5;
    assert_eq!(statuses(&rig.run(&mut channel, elsewhere)), [missing, Status::FUSED_FAILED]);
    let mut beyond = compare_and_write(255, 2, rig.buffer(1024, 5), rig.buffer(1024, 6));
    drop(beyond[1].take_data());
    let out = Status::LBA_OUT_OF_RANGE.do_not_retry();
    assert_eq!(statuses(&rig.run(&mut channel, beyond)), [out, out]);
    assert_eq!(rig.read(&mut channel, 4, 2).unwrap(), vec![5; 1024]);
    assert_eq!(channel.outstanding(), 0);
}

#[test]
fn a_fused_operation_blocks_overlapping_writes_only() {
    if !bdev::supports_fused() {
        return println!("SKIPPED: no membarrier");
    }
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    delay::create(
        &rig.registry,
        delay::DelayConfig {
            avg_write_latency_us: 0,
            p99_write_latency_us: 0,
            ..delay::DelayConfig::new("M", "D", 30_000)
        },
    )
    .unwrap();
    let (mut one, mut two) = (open(&rig, "D"), open(&rig, "D"));
    one.submit(&mut compare_and_write(8, 8, rig.buffer(4096, 0), rig.buffer(4096, 1)));
    // Its internal read is in flight.
    let mut sink = Vec::new();
    one.poll(&mut sink);
    let mut batch = vec![
        Request::write(Tag(3), 15, 1, rig.buffer(512, 9)),
        Request::write(Tag(4), 16, 1, rig.buffer(512, 9)),
        Request::new(Tag(5), Op::WriteZeroes, 0, 9),
    ];
    two.submit(&mut batch);
    let mut order = Vec::new();
    let start = std::time::Instant::now();
    while order.len() < 5 {
        one.poll(&mut sink);
        two.poll(&mut sink);
        order.extend(sink.drain(..).map(|done| (done.tag().0, done.status())));
        assert!(two.deadline().is_some() || two.outstanding() == 0, "a blocked write has no deadline");
        assert!(start.elapsed().as_secs() < 20, "{order:?}");
    }
    assert!(order.iter().all(|(_, status)| status.is_success()), "{order:?}");
    let tags: Vec<u64> = order.iter().map(|(tag, _)| *tag).collect();
    assert_eq!(tags[..3], [4, 1, 2], "writes outside the range are not blocked");
    assert_eq!(rig.read(&mut one, 8, 1).unwrap(), vec![0; 512]);
    assert_eq!(rig.read(&mut one, 9, 6).unwrap(), vec![1; 6 * 512]);
    assert_eq!(rig.read(&mut one, 15, 2).unwrap(), vec![9; 1024]);
}

#[test]
fn a_fused_operation_waits_for_earlier_writes() {
    if !bdev::supports_fused() {
        return println!("SKIPPED: no membarrier");
    }
    let rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    delay::create(
        &rig.registry,
        delay::DelayConfig {
            avg_read_latency_us: 0,
            p99_read_latency_us: 0,
            ..delay::DelayConfig::new("M", "D", 20_000)
        },
    )
    .unwrap();
    let (mut one, mut two) = (open(&rig, "D"), open(&rig, "D"));
    two.submit(&mut vec![Request::write(Tag(3), 8, 1, rig.buffer(512, 2))]);
    one.submit(&mut compare_and_write(8, 1, rig.buffer(512, 2), rig.buffer(512, 1)));
    let (mut sink, mut order) = (Vec::new(), Vec::new());
    let start = std::time::Instant::now();
    while order.len() < 3 {
        one.poll(&mut sink);
        two.poll(&mut sink);
        order.extend(sink.drain(..).map(|done| (done.tag().0, done.status())));
        assert!(start.elapsed().as_secs() < 20, "{order:?}");
    }
    assert_eq!(order, [(3, Status::SUCCESS), (1, Status::SUCCESS), (2, Status::SUCCESS)]);
}

#[test]
fn removal_fails_blocked_and_queued_requests() {
    if !bdev::supports_fused() {
        return println!("SKIPPED: no membarrier");
    }
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    delay::create(&rig.registry, delay::DelayConfig::new("M", "D", 10_000)).unwrap();
    let (mut one, mut two) = (open(&rig, "D"), open(&rig, "D"));
    one.submit(&mut compare_and_write(8, 1, rig.buffer(512, 0), rig.buffer(512, 1)));
    let mut batch = compare_and_write(8, 1, rig.buffer(512, 0), rig.buffer(512, 2));
    batch.push(Request::write(Tag(3), 8, 1, rig.buffer(512, 3)));
    two.submit(&mut batch);
    rig.registry.unregister("D").unwrap();
    let (mut first, mut second) = (Vec::new(), Vec::new());
    let start = std::time::Instant::now();
    while first.len() < 2 || second.len() < 3 {
        rig.reactor.turn();
        one.poll(&mut first);
        two.poll(&mut second);
        assert!(start.elapsed().as_secs() < 20, "{first:?} {second:?}");
    }
    let removed = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
    assert_eq!(statuses(&second), [removed; 3]);
    assert_eq!(one.outstanding() + two.outstanding(), 0);
    assert!(first.iter().all(|done| done.request().data().is_some()));
}

/// Increments a counter in block 0 by compare-and-write until `count` increments succeeded; returns the failures.
fn increment(core: &Core, channel: &mut BdevChannel, seed: u64, count: u64) -> u64 {
    let buffer = |value: u64| {
        let mut buffer = core.pool().take(512).unwrap();
        buffer.as_mut_slice().fill(0);
        buffer.as_mut_slice()[..8].copy_from_slice(&value.to_le_bytes());
        buffer
    };
    let (mut known, mut done, mut failed, mut noise) = (0, 0, 0, WyRand::new(seed));
    while done < count {
        let mut batch = compare_and_write(0, 1, buffer(known), buffer(known + 1));
        // Writes elsewhere, which must neither wait forever nor affect it.
        let around = 1 + noise.below(200);
        batch.push(Request::write(Tag(3), around, 1, buffer(noise.next_bits())));
        batch.push(Request::read(Tag(4), 0, 1, buffer(0)));
        let (mut sink, wanted) = (Vec::new(), batch.len());
        while sink.len() < wanted {
            channel.submit(&mut batch);
            channel.poll(&mut sink);
        }
        sink.sort_by_key(Completion::tag);
        match statuses(&sink)[..] {
            [Status::SUCCESS, Status::SUCCESS, Status::SUCCESS, Status::SUCCESS] => done += 1,
            [FAILED, Status::FUSED_FAILED, Status::SUCCESS, Status::SUCCESS] => failed += 1,
            _ => panic!("{sink:?}"),
        }
        let read = sink.pop().unwrap().into_request().take_data().unwrap().into_single().unwrap();
        known = u64::from_le_bytes(*read.as_slice().first_chunk().unwrap());
    }
    failed
}

#[test]
fn concurrent_increments_on_several_cores_are_atomic() {
    if !bdev::supports_fused() {
        return println!("SKIPPED: no membarrier");
    }
    let registry = Registry::new();
    malloc::create(&registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    // Its I/Os complete after a random delay, which gives other cores time to interfere.
    CrashDisk::create(&registry, "C", 256, 512, 5).unwrap();
    increment_on_all_cores(&registry, "M", 2000);
    increment_on_all_cores(&registry, "C", 300);
}

fn increment_on_all_cores(registry: &Registry, name: &str, each: u64) {
    const CORES: u64 = 4;
    let start = Barrier::new(CORES as usize);
    let failed: u64 = std::thread::scope(|scope| {
        let one = |seed: u64| {
            let (registry, start) = (registry.clone(), &start);
            scope.spawn(move || {
                let rig = Rig::new();
                let descriptor = registry.open(name, Access::ReadWrite).unwrap();
                let mut channel = descriptor.channel(&rig.core).unwrap();
                start.wait();
                increment(&rig.core, &mut channel, seed, each)
            })
        };
        let threads: Vec<_> = (1..=CORES).map(one).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    let mut rig = Rig::new();
    let mut channel = registry.open(name, Access::ReadWrite).unwrap().channel(&rig.core).unwrap();
    let block = rig.read(&mut channel, 0, 1).unwrap();
    assert_eq!(u64::from_le_bytes(*block.first_chunk().unwrap()), CORES * each, "{name}");
    println!("{name}: {failed} of {} compares failed", failed + CORES * each);
}

/// One of several concurrent incrementers of the same block, each with its own channel.
struct Incrementer {
    channel: BdevChannel,
    batch: Vec<Request>,
    sink: Vec<Completion>,
    known: u64,
    done: u64,
}

#[test]
fn interleaved_increments_on_several_channels_are_atomic() {
    if !bdev::supports_fused() {
        return println!("SKIPPED: no membarrier");
    }
    for seed in 0..40 {
        let mut rig = Rig::new();
        // Its I/Os complete in random order after a random delay, which gives other channels time to interfere.
        CrashDisk::create(&rig.registry, "C", 8, 512, seed).unwrap();
        let counter = |_| Incrementer {
            channel: open(&rig, "C"),
            batch: Vec::new(),
            sink: Vec::new(),
            known: 0,
            done: 0,
        };
        let mut counters: Vec<Incrementer> = (0..4).map(counter).collect();
        let (mut random, mut late) = (WyRand::new(seed), 0);
        for _ in 0..4000 {
            let Incrementer { channel, batch, sink, known, done } = &mut counters[random.index(4)];
            let number = |value: u64| {
                let mut buffer = rig.buffer(512, 0);
                buffer.as_mut_slice()[..8].copy_from_slice(&value.to_le_bytes());
                buffer
            };
            if sink.len() == 3 {
                sink.sort_by_key(Completion::tag);
                let outcome = statuses(sink);
                assert_eq!(outcome[1].is_success(), outcome[0].is_success(), "seed {seed}: {sink:?}");
                *done += u64::from(outcome[1].is_success());
                late += u64::from(outcome[0] == FAILED);
                let read = sink.pop().unwrap().into_request().take_data().unwrap().into_single().unwrap();
                *known = u64::from_le_bytes(*read.as_slice().first_chunk().unwrap());
                sink.clear();
            }
            if sink.is_empty() && batch.is_empty() && channel.outstanding() == 0 {
                *batch = compare_and_write(0, 1, number(*known), number(*known + 1));
                batch.push(Request::read(Tag(4), 0, 1, number(0)));
            }
            channel.submit(batch);
            channel.poll(sink);
        }
        // All operations in flight must complete.
        while counters.iter().any(|counter| counter.channel.outstanding() > 0) {
            for Incrementer { channel, sink, .. } in &mut counters {
                channel.poll(sink);
            }
        }
        let succeeded = |counter: &Incrementer| {
            let write = counter.sink.iter().find(|done| done.tag() == Tag(2));
            counter.done + u64::from(write.is_some_and(|write| write.status().is_success()))
        };
        let counted: u64 = counters.iter().map(succeeded).sum();
        drop(counters);
        let mut channel = open(&rig, "C");
        let block = rig.read(&mut channel, 0, 1).unwrap();
        assert_eq!(u64::from_le_bytes(*block.first_chunk().unwrap()), counted, "seed {seed}");
        assert!(counted > 50 && late > 50, "seed {seed}: {counted} counted, {late} late");
    }
}

#[test]
fn a_read_only_descriptor_rejects_fused_writes() {
    if !bdev::supports_fused() {
        return println!("SKIPPED: no membarrier");
    }
    let mut rig = Rig::new();
    null::create(&rig.registry, null::NullConfig::new("N", 256, 512)).unwrap();
    let descriptor = rig.registry.open("N", Access::ReadOnly).unwrap();
    let mut channel = descriptor.channel(&rig.core).unwrap();
    let batch = compare_and_write(0, 1, rig.buffer(512, 0), rig.buffer(512, 1));
    let expected = [Status::FUSED_FAILED, Status::NAMESPACE_WRITE_PROTECTED.do_not_retry()];
    assert_eq!(statuses(&rig.run(&mut channel, batch)), expected);
}

#[test]
fn memory_that_others_hold_is_compared_and_never_written() {
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    let mut channel = open(&rig, "M");
    assert_eq!(rig.write(&mut channel, 8, 8, 7), Status::SUCCESS);
    let compare = |data: dma::Data| Request { op: Op::Compare, ..Request::read(Tag(1), 8, 8, data) };
    // A peer's memory, at an odd address.
    let region = std::rc::Rc::new(dma::SharedRegion::new(8192).unwrap());
    let external = rig.core.pool().attach_external(region.clone());
    for (fill, status) in [(7, Status::SUCCESS), (8, Status::COMPARE_FAILURE)] {
        region.write(1, &[fill; 4096]);
        let done = rig.one(&mut channel, compare(external.buffer(1, 4096).unwrap().into()));
        assert!(done.status().same_code(status), "{:?}", done.status());
        assert!(done.request().data().unwrap().is_external(), "the caller's memory comes back");
        let mut content = [0; 4096];
        region.read(1, &mut content);
        assert_eq!(content, [fill; 4096], "nothing was read into it");
    }
    // Shared memory, which its other holder borrows.
    let mut shared = dma::Data::from(rig.buffer(4096, 7));
    let other = shared.share();
    let done = rig.one(&mut channel, compare(shared));
    assert_eq!(done.status(), Status::SUCCESS);
    assert!(other.slices()[0].as_slice().iter().all(|byte| *byte == 7));
    // A fused pair: both from the peer's memory.
    if bdev::supports_fused() {
        region.write(0, &[7; 4096]);
        region.write(4096, &[9; 4096]);
        let data = |offset| external.buffer(offset, 4096).unwrap();
        let mut pair = compare(data(0).into());
        pair.flags = RequestFlags::FUSED;
        let done = rig.run(&mut channel, vec![pair, Request::write(Tag(2), 8, 8, data(4096))]);
        assert!(done.iter().all(|one| one.status().is_success()), "{done:?}");
        assert_eq!(rig.read(&mut channel, 8, 8).unwrap(), vec![9; 4096]);
    }
}

#[test]
fn a_peers_memory_that_was_truncated_compares_as_zeroes() {
    use std::os::fd::AsFd;
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    let mut channel = open(&rig, "M");
    let file = rustix::fs::memfd_create("peer", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 8192).unwrap();
    let region = std::rc::Rc::new(dma::SharedRegion::map_untrusted(file.as_fd(), 0, 8192, true).unwrap());
    region.write(0, &[7; 8192]);
    let external = rig.core.pool().attach_external(region);
    let compare = || {
        let data = external.buffer(4096, 4096).unwrap();
        Request { op: Op::Compare, ..Request::read(Tag(1), 0, 8, data) }
    };
    assert!(rig.one(&mut channel, compare()).status().same_code(Status::COMPARE_FAILURE));
    rustix::fs::ftruncate(&file, 0).unwrap();
    // The device is zeroed, and so is what is left of the memory: no signal ends the process.
    assert_eq!(rig.one(&mut channel, compare()).status(), Status::SUCCESS);
}

#[test]
fn a_compare_without_a_buffer_waits_for_one() {
    let rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    let mut channel = open(&rig, "M");
    let region = std::rc::Rc::new(dma::SharedRegion::new(4096).unwrap());
    let external = rig.core.pool().attach_external(region);
    let held: Vec<dma::Buffer> = std::iter::from_fn(|| rig.core.pool().take(4096)).collect();
    let data = external.buffer(0, 4096).unwrap();
    channel.submit(&mut vec![Request { op: Op::Compare, ..Request::read(Tag(1), 0, 8, data) }]);
    let mut sink = Vec::new();
    for _ in 0..3 {
        assert_eq!(channel.poll(&mut sink), 0);
        assert!(channel.deadline().is_some(), "nothing would poll it again");
    }
    drop(held);
    while sink.is_empty() {
        channel.poll(&mut sink);
    }
    assert_eq!(sink[0].status(), Status::SUCCESS);
}
