//! Compares, alone and fused to a write: what they answer, and that nothing comes in between.
#![allow(clippy::unwrap_used)]

mod rig;

use std::sync::Barrier;

use bdev::testing::CrashDisk;
use bdev::{Access, Channel, Completion, Registry, Request, delay, error, malloc, null};
use memory::Buffer;
use reactor::Core;
use rig::Rig;
use ring::{Channel as _, Flags, Op, Status, Tag};

fn open(rig: &Rig, name: &str) -> Channel {
    rig.registry.open(name, Access::ReadWrite).unwrap().channel(&rig.core).unwrap()
}

fn compare(tag: u64, lba: u64, blocks: u32, buffer: Buffer) -> Request {
    Request { buffer: Some(buffer), ..Request::new(Tag(tag), Op::Compare, lba, blocks) }
}

/// A compare with tag 1, and the write that is fused to it with tag 2.
fn swap(lba: u64, blocks: u32, expected: Buffer, new: Buffer) -> Vec<Request> {
    let first = Request { flags: Flags::FUSED, ..compare(1, lba, blocks, expected) };
    vec![first, Request::write(Tag(2), lba, blocks, new)]
}

fn statuses(done: &[Completion]) -> Vec<Status> {
    done.iter().map(Completion::status).collect()
}

const FAILED: Status = Status::COMPARE_FAILURE.do_not_retry();

#[test]
fn a_compare_tells_whether_blocks_are_equal_and_leaves_its_buffer_alone() {
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    error::create(&rig.registry, error::ErrorConfig::new("M")).unwrap();
    let mut channel = open(&rig, "EE_M");
    assert_eq!(rig.write(&mut channel, 0, 8, 7), Status::SUCCESS);
    for (fill, expected) in [(7, Status::SUCCESS), (8, FAILED)] {
        let done = rig.one(&mut channel, compare(1, 0, 8, rig.buffer(4096, fill)));
        assert_eq!(done.status(), expected);
        assert!(done.request().buffer.as_ref().unwrap().as_slice().iter().all(|byte| *byte == fill));
    }
    let bad = rig.simple(&mut channel, Op::WriteUncorrectable, 3, 1, Flags::NONE);
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
    // What is refused is an error; that blocks differ is not.
    assert_eq!((stats.op(Op::Compare).ops, stats.op(Op::Compare).errors), (1, 5));
    assert_eq!(channel.outstanding(), 0);
}

#[test]
fn more_compares_than_fit_wait_and_all_come_back_once() {
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
fn a_fused_write_is_done_only_if_blocks_are_equal() {
    if !bdev::can_fuse() {
        return println!("SKIPPED: membarrier is not there");
    }
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    let mut channel = open(&rig, "M");
    let batch = swap(4, 2, rig.buffer(1024, 1), rig.buffer(1024, 5));
    assert_eq!(statuses(&rig.run(&mut channel, batch)), [FAILED, Status::FUSED_FAILED]);
    assert_eq!(rig.read(&mut channel, 4, 2).unwrap(), vec![0; 1024]);
    let batch = swap(4, 2, rig.buffer(1024, 0), rig.buffer(1024, 5));
    let done = rig.run(&mut channel, batch);
    assert_eq!(statuses(&done), [Status::SUCCESS; 2]);
    assert_eq!(done[1].request().buffer.as_ref().unwrap().as_slice(), [5; 1024]);
    assert_eq!(rig.read(&mut channel, 4, 2).unwrap(), vec![5; 1024]);
    // Neither without the other.
    let alone = Request { flags: Flags::FUSED, ..compare(1, 4, 2, rig.buffer(1024, 5)) };
    let missing = Status::FUSED_MISSING.do_not_retry();
    assert_eq!(rig.one(&mut channel, alone).status(), missing);
    let mut elsewhere = swap(4, 2, rig.buffer(1024, 5), rig.buffer(1024, 6));
    elsewhere[1].lba = 5;
    assert_eq!(statuses(&rig.run(&mut channel, elsewhere)), [missing, Status::FUSED_FAILED]);
    let mut beyond = swap(255, 2, rig.buffer(1024, 5), rig.buffer(1024, 6));
    beyond[1].buffer = None;
    let out = Status::LBA_OUT_OF_RANGE.do_not_retry();
    assert_eq!(statuses(&rig.run(&mut channel, beyond)), [out, out]);
    assert_eq!(rig.read(&mut channel, 4, 2).unwrap(), vec![5; 1024]);
    assert_eq!(channel.outstanding(), 0);
}

#[test]
fn a_write_of_the_range_waits_for_the_fused_operation_and_others_do_not() {
    if !bdev::can_fuse() {
        return println!("SKIPPED: membarrier is not there");
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
    one.submit(&mut swap(8, 8, rig.buffer(4096, 0), rig.buffer(4096, 1)));
    // Its read is under way.
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
        assert!(two.deadline().is_some() || two.outstanding() == 0, "nothing would wake it");
        assert!(start.elapsed().as_secs() < 20, "{order:?}");
    }
    assert!(order.iter().all(|(_, status)| status.is_success()), "{order:?}");
    let tags: Vec<u64> = order.iter().map(|(tag, _)| *tag).collect();
    assert_eq!(tags[..3], [4, 1, 2], "what does not touch the range goes on");
    assert_eq!(rig.read(&mut one, 8, 1).unwrap(), vec![0; 512]);
    assert_eq!(rig.read(&mut one, 9, 6).unwrap(), vec![1; 6 * 512]);
    assert_eq!(rig.read(&mut one, 15, 2).unwrap(), vec![9; 1024]);
}

#[test]
fn a_fused_operation_waits_for_writes_that_were_there_before() {
    if !bdev::can_fuse() {
        return println!("SKIPPED: membarrier is not there");
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
    one.submit(&mut swap(8, 1, rig.buffer(512, 2), rig.buffer(512, 1)));
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
fn what_a_removed_device_has_not_begun_comes_back() {
    if !bdev::can_fuse() {
        return println!("SKIPPED: membarrier is not there");
    }
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    delay::create(&rig.registry, delay::DelayConfig::new("M", "D", 10_000)).unwrap();
    let (mut one, mut two) = (open(&rig, "D"), open(&rig, "D"));
    one.submit(&mut swap(8, 1, rig.buffer(512, 0), rig.buffer(512, 1)));
    let mut batch = swap(8, 1, rig.buffer(512, 0), rig.buffer(512, 2));
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
    let gone = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
    assert_eq!(statuses(&second), [gone; 3]);
    assert_eq!(one.outstanding() + two.outstanding(), 0);
    assert!(first.iter().all(|done| done.request().buffer.is_some()));
}

/// Adds one to a number in block 0 until `count` additions were its own.
fn count_up(core: &Core, channel: &mut Channel, seed: u64, count: u64) -> u64 {
    let buffer = |value: u64| {
        let mut buffer = core.pool().take(512).unwrap();
        buffer.as_mut_slice().fill(0);
        buffer.as_mut_slice()[..8].copy_from_slice(&value.to_le_bytes());
        buffer
    };
    let (mut known, mut done, mut lost, mut noise) = (0, 0, 0, seed);
    while done < count {
        let mut batch = swap(0, 1, buffer(known), buffer(known + 1));
        // Writes around it, which must not wait for ever, nor be let into it.
        noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let around = 1 + noise % 200;
        batch.push(Request::write(Tag(3), around, 1, buffer(noise)));
        batch.push(Request::read(Tag(4), 0, 1, buffer(0)));
        let (mut sink, wanted) = (Vec::new(), batch.len());
        while sink.len() < wanted {
            channel.submit(&mut batch);
            channel.poll(&mut sink);
        }
        sink.sort_by_key(Completion::tag);
        match statuses(&sink)[..] {
            [Status::SUCCESS, Status::SUCCESS, Status::SUCCESS, Status::SUCCESS] => done += 1,
            [FAILED, Status::FUSED_FAILED, Status::SUCCESS, Status::SUCCESS] => lost += 1,
            _ => panic!("{sink:?}"),
        }
        let read = sink.pop().unwrap().into_request().buffer.unwrap();
        known = u64::from_le_bytes(*read.as_slice().first_chunk().unwrap());
    }
    lost
}

#[test]
fn no_increment_is_lost_between_cores() {
    if !bdev::can_fuse() {
        return println!("SKIPPED: membarrier is not there");
    }
    let registry = Registry::new();
    malloc::create(&registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    // It completes now or later, so that there is time for others in between.
    CrashDisk::create(&registry, "C", 256, 512, 5).unwrap();
    count_together(&registry, "M", 2000);
    count_together(&registry, "C", 300);
}

fn count_together(registry: &Registry, name: &str, each: u64) {
    const CORES: u64 = 4;
    let start = Barrier::new(CORES as usize);
    let lost: u64 = std::thread::scope(|scope| {
        let one = |seed: u64| {
            let (registry, start) = (registry.clone(), &start);
            scope.spawn(move || {
                let rig = Rig::new();
                let descriptor = registry.open(name, Access::ReadWrite).unwrap();
                let mut channel = descriptor.channel(&rig.core).unwrap();
                start.wait();
                count_up(&rig.core, &mut channel, seed, each)
            })
        };
        let threads: Vec<_> = (1..=CORES).map(one).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    let mut rig = Rig::new();
    let mut channel = registry.open(name, Access::ReadWrite).unwrap().channel(&rig.core).unwrap();
    let block = rig.read(&mut channel, 0, 1).unwrap();
    assert_eq!(u64::from_le_bytes(*block.first_chunk().unwrap()), CORES * each, "{name}");
    println!("{name}: {lost} of {} came too late", lost + CORES * each);
}

/// One of several that count in the same block, each with a channel of its own.
struct Counter {
    channel: Channel,
    batch: Vec<Request>,
    sink: Vec<Completion>,
    known: u64,
    done: u64,
}

#[test]
fn no_increment_is_lost_however_channels_take_turns() {
    if !bdev::can_fuse() {
        return println!("SKIPPED: membarrier is not there");
    }
    for seed in 0..40 {
        let mut rig = Rig::new();
        // It completes in any order, now or later, so that there is time for others in between.
        CrashDisk::create(&rig.registry, "C", 8, 512, seed).unwrap();
        let counter =
            |_| Counter { channel: open(&rig, "C"), batch: Vec::new(), sink: Vec::new(), known: 0, done: 0 };
        let mut counters: Vec<Counter> = (0..4).map(counter).collect();
        let (mut dice, mut late) = (seed, 0);
        for _ in 0..4000 {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let Counter { channel, batch, sink, known, done } = &mut counters[(dice >> 33) as usize % 4];
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
                let read = sink.pop().unwrap().into_request().buffer.unwrap();
                *known = u64::from_le_bytes(*read.as_slice().first_chunk().unwrap());
                sink.clear();
            }
            if sink.is_empty() && batch.is_empty() && channel.outstanding() == 0 {
                *batch = swap(0, 1, number(*known), number(*known + 1));
                batch.push(Request::read(Tag(4), 0, 1, number(0)));
            }
            channel.submit(batch);
            channel.poll(sink);
        }
        // What is under way ends, whoever waits for whom.
        while counters.iter().any(|counter| counter.channel.outstanding() > 0) {
            for Counter { channel, sink, .. } in &mut counters {
                channel.poll(sink);
            }
        }
        let under_way = |counter: &Counter| {
            let write = counter.sink.iter().find(|done| done.tag() == Tag(2));
            counter.done + u64::from(write.is_some_and(|write| write.status().is_success()))
        };
        let counted: u64 = counters.iter().map(under_way).sum();
        drop(counters);
        let mut channel = open(&rig, "C");
        let block = rig.read(&mut channel, 0, 1).unwrap();
        assert_eq!(u64::from_le_bytes(*block.first_chunk().unwrap()), counted, "seed {seed}");
        assert!(counted > 50 && late > 50, "seed {seed}: {counted} counted, {late} late");
    }
}

#[test]
fn a_device_that_cannot_be_written_takes_no_fused_write() {
    if !bdev::can_fuse() {
        return println!("SKIPPED: membarrier is not there");
    }
    let mut rig = Rig::new();
    null::create(&rig.registry, null::NullConfig::new("N", 256, 512)).unwrap();
    let descriptor = rig.registry.open("N", Access::ReadOnly).unwrap();
    let mut channel = descriptor.channel(&rig.core).unwrap();
    let batch = swap(0, 1, rig.buffer(512, 0), rig.buffer(512, 1));
    let expected = [Status::FUSED_FAILED, Status::NAMESPACE_WRITE_PROTECTED.do_not_retry()];
    assert_eq!(statuses(&rig.run(&mut channel, batch)), expected);
}
