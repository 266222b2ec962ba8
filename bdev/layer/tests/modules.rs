//! Behaviour of the modules.
#![allow(clippy::unwrap_used)]

mod rig;

use std::time::{Duration, Instant};

use bdev::{
    Access, AsyncChannel, BdevChannel, BdevError, Durability, RateLimits, Request, delay, error, malloc,
    null, passthru, split,
};
use block_io::{Channel as _, Op, Payload, RequestFlags, Status, Tag};
use error::{Chance, FaultAction, FaultInjection};
use rig::Rig;

fn open(rig: &Rig, name: &str) -> BdevChannel {
    rig.registry.open(name, Access::ReadWrite).unwrap().channel(&rig.core).unwrap()
}

fn error_rig() -> (Rig, BdevChannel) {
    let rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    error::create(&rig.registry, error::ErrorConfig { seed: 3, ..error::ErrorConfig::new("M") }).unwrap();
    let channel = open(&rig, "EE_M");
    (rig, channel)
}

#[test]
fn malloc_channels_share_the_data_and_durability_is_reported() {
    let mut rig = Rig::new();
    let device = malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 4096)).unwrap();
    let (mut first, mut second) = (open(&rig, "M"), open(&rig, "M"));
    assert_eq!(rig.write(&mut first, 255, 1, 9), Status::SUCCESS);
    assert_eq!(rig.read(&mut second, 255, 1).unwrap(), vec![9; 4096]);
    assert_eq!(rig.simple(&mut second, Op::Unmap, 0, 256, RequestFlags::NONE), Status::SUCCESS);
    assert_eq!(rig.read(&mut first, 255, 1).unwrap(), vec![0; 4096]);
    assert_eq!(rig.simple(&mut second, Op::Reset, 0, 0, RequestFlags::NONE), Status::SUCCESS);
    assert_eq!(device.bdev().product_name(), "Malloc disk");
    assert_eq!(device.durability(), Durability::Process);
}

/// A device on top of others says what those below it are.
#[test]
fn durability_is_that_of_the_device_below() {
    let rig = Rig::new();
    let registry = &rig.registry;
    let on_top_of = |base: &str| {
        let (base_name, name) = (base.to_string(), format!("{base}-passthru"));
        let config = passthru::PassthruConfig { base: base_name.clone(), name: name.clone(), uuid: None };
        passthru::create(registry, config).unwrap();
        error::create(registry, error::ErrorConfig::new(&name)).unwrap();
        let faulty = format!("EE_{name}");
        split::create(
            registry,
            &split::SplitConfig { base: faulty.clone(), count: 2, part_size: split::PartSize::Even },
        )
        .unwrap();
        let delayed = format!("{base}-delay");
        delay::create(registry, delay::DelayConfig::new(&format!("{faulty}p1"), &delayed, 1)).unwrap();
        [name, faulty.clone(), format!("{faulty}p0"), format!("{faulty}p1"), delayed, base_name]
    };
    malloc::create(registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    null::create(registry, null::NullConfig::new("N", 256, 512)).unwrap();
    bdev::testing::CrashDisk::create(registry, "C", 256, 512, 1).unwrap();
    for (base, expected) in [("M", Durability::Process), ("N", Durability::None), ("C", Durability::Disk)] {
        for name in on_top_of(base) {
            assert_eq!(registry.find(&name).unwrap().durability(), expected, "{name}");
        }
    }
}

/// The block that a seek finds.
fn seek(rig: &mut Rig, channel: &mut BdevChannel, op: Op, lba: u64, blocks: u32) -> Option<u64> {
    let completion = rig.one(channel, Request::new(Tag(1), op, lba, blocks));
    assert_eq!(completion.status(), Status::SUCCESS);
    let Payload::Found(found) = completion.into_request().payload else { panic!("no answer") };
    found
}

#[test]
fn malloc_knows_what_is_allocated() {
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 1 << 15, 512)).unwrap();
    split::create(
        &rig.registry,
        &split::SplitConfig { base: "M".into(), count: 2, part_size: split::PartSize::Even },
    )
    .unwrap();
    let (mut first, mut second) = (open(&rig, "Mp0"), open(&rig, "Mp1"));
    assert_eq!(seek(&mut rig, &mut second, Op::SeekData, 0, 1 << 14), None);
    assert_eq!(rig.write(&mut second, 100, 1, 9), Status::SUCCESS);
    // A page is eight blocks.
    assert_eq!(seek(&mut rig, &mut second, Op::SeekData, 0, 1 << 14), Some(96));
    assert_eq!(seek(&mut rig, &mut second, Op::SeekHole, 98, 1 << 10), Some(104));
    assert_eq!(seek(&mut rig, &mut second, Op::SeekHole, 98, 2), None);
    assert_eq!(seek(&mut rig, &mut first, Op::SeekData, 0, 1 << 14), None);
    assert_eq!(rig.simple(&mut second, Op::Unmap, 97, 7, RequestFlags::NONE), Status::SUCCESS);
    assert_eq!(seek(&mut rig, &mut second, Op::SeekData, 0, 1 << 14), Some(96), "a part of a page");
    if !os::barrier::is_supported() {
        return println!("SKIPPED: no membarrier");
    }
    assert_eq!(rig.simple(&mut second, Op::Unmap, 96, 8, RequestFlags::NONE), Status::SUCCESS);
    assert_eq!(seek(&mut rig, &mut second, Op::SeekData, 0, 1 << 14), None);
}

#[test]
fn a_long_unmap_is_split_over_several_polls() {
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 4096, 4096)).unwrap();
    let mut channel = open(&rig, "M");
    for lba in [0, 1023, 1024, 4095] {
        assert_eq!(rig.write(&mut channel, lba, 1, 9), Status::SUCCESS);
    }
    let unmap = Request::new(Tag(1), Op::Unmap, 0, 4095);
    let mut batch = vec![unmap, Request::read(Tag(2), 4095, 1, rig.buffer(4096, 0))];
    let mut sink = Vec::new();
    channel.submit(&mut batch);
    channel.poll(&mut sink);
    assert_eq!(sink.iter().map(|completion| completion.tag()).collect::<Vec<_>>(), [Tag(2)]);
    while sink.len() < 2 {
        assert_eq!(channel.deadline(), Some(0), "there is more to do");
        channel.poll(&mut sink);
    }
    for lba in [0, 1023, 1024] {
        assert_eq!(rig.read(&mut channel, lba, 1).unwrap(), vec![0; 4096], "block {lba}");
    }
    assert_eq!(rig.read(&mut channel, 4095, 1).unwrap(), vec![9; 4096]);
}

#[test]
fn null_reads_leave_the_buffer_unchanged() {
    let mut rig = Rig::new();
    let device = null::create(&rig.registry, null::NullConfig::new("N", 256, 512)).unwrap();
    let mut channel = open(&rig, "N");
    assert_eq!(rig.write(&mut channel, 0, 1, 9), Status::SUCCESS);
    assert_eq!(rig.read(&mut channel, 0, 1).unwrap(), vec![0xcc; 512]);
    assert!(device.bdev().reads_undefined());
    let batch: Vec<Request> =
        (0..2000).map(|tag| Request::read(Tag(tag), tag % 256, 1, rig.buffer(512, 0))).collect();
    let all = rig.run(&mut channel, batch);
    assert!(all.iter().enumerate().all(|(index, completion)| completion.tag().0 == index as u64));
}

#[test]
fn injected_failures_hit_their_operation_count_times() {
    let (mut rig, mut channel) = error_rig();
    let fault = FaultInjection {
        count: Some(2),
        ..FaultInjection::once(Some(Op::Read), FaultAction::Fail(Status::UNRECOVERED_READ_ERROR))
    };
    error::inject(&rig.registry, "EE_M", fault).unwrap();
    assert_eq!(rig.write(&mut channel, 0, 1, 5), Status::SUCCESS);
    for _ in 0..2 {
        assert_eq!(rig.read(&mut channel, 0, 1), Err(Status::UNRECOVERED_READ_ERROR));
    }
    assert_eq!(rig.read(&mut channel, 0, 1).unwrap(), vec![5; 512]);
    assert_eq!(rig.registry.find("EE_M").unwrap().stats().op(Op::Read).errors, 2);
}

#[test]
fn injections_match_by_range_rate_and_queue_depth() {
    let (mut rig, mut channel) = error_rig();
    let fail = FaultAction::Fail(Status::WRITE_FAULT);
    let base = FaultInjection { count: None, ..FaultInjection::once(None, fail) };
    let inject = |rig: &Rig, fault: FaultInjection| {
        error::clear(&rig.registry, "EE_M").unwrap();
        error::inject(&rig.registry, "EE_M", fault).unwrap();
    };
    inject(&rig, FaultInjection { range: Some(10..20), ..base.clone() });
    let hits: Vec<bool> =
        [(0, 10), (0, 11), (19, 1), (20, 1)].map(|(lba, n)| rig.read(&mut channel, lba, n).is_err()).into();
    assert_eq!(hits, [false, true, true, false]);

    inject(&rig, FaultInjection { chance: Chance::OneIn(3), ..base.clone() });
    let hits: Vec<bool> = (0..6).map(|_| rig.read(&mut channel, 0, 1).is_err()).collect();
    assert_eq!(hits, [false, false, true, false, false, true]);

    inject(&rig, FaultInjection { chance: Chance::PerMille(250), ..base.clone() });
    let hits = (0..1000).filter(|_| rig.read(&mut channel, 0, 1).is_err()).count();
    assert!((200..300).contains(&hits), "{hits} of 1000 at 250 per mille");

    inject(&rig, FaultInjection { queue_depth: 4, ..base });
    assert!(rig.read(&mut channel, 0, 1).is_ok());
    let batch: Vec<Request> = (0..8).map(|tag| Request::read(Tag(tag), 0, 1, rig.buffer(512, 0))).collect();
    let failed: Vec<u64> = rig
        .run(&mut channel, batch)
        .iter()
        .filter(|completion| !completion.status().is_success())
        .map(|completion| completion.tag().0)
        .collect();
    assert_eq!(failed, [4, 5, 6, 7]);
}

#[test]
fn pending_io_is_aborted_by_reset_and_resumed_by_its_method_alone() {
    let (mut rig, mut channel) = error_rig();
    let pending =
        || FaultInjection { count: Some(3), ..FaultInjection::once(Some(Op::Read), FaultAction::Pending) };
    error::inject(&rig.registry, "EE_M", pending()).unwrap();
    let reads =
        |rig: &Rig| (0..3).map(|tag| Request::read(Tag(tag), 0, 1, rig.buffer(512, 1))).collect::<Vec<_>>();
    let mut batch = reads(&rig);
    channel.submit(&mut batch);
    let mut sink = Vec::new();
    for _ in 0..10 {
        rig.reactor.turn();
        channel.poll(&mut sink);
    }
    assert!(sink.is_empty() && channel.outstanding() == 3);
    assert!(channel.deadline().is_some_and(|deadline_ns| deadline_ns > 0), "it must check for a resume");
    channel.submit(&mut vec![Request::new(Tag(9), Op::Reset, 0, 0)]);
    while sink.len() < 4 {
        channel.poll(&mut sink);
    }
    sink.sort_by_key(|completion| completion.tag());
    let statuses: Vec<Status> = sink.iter().map(|completion| completion.status()).collect();
    let aborted = Status::ABORT_REQUESTED;
    assert_eq!(statuses, [aborted, aborted, aborted, Status::SUCCESS]);

    error::inject(&rig.registry, "EE_M", pending()).unwrap();
    channel.submit(&mut reads(&rig));
    assert_eq!(channel.poll(&mut sink), 0);
    // A clear removes the rules; what is pending stays so, as in SPDK.
    error::clear(&rig.registry, "EE_M").unwrap();
    sink.clear();
    assert!(rig.read(&mut channel, 8, 1).is_ok(), "there is no rule");
    assert_eq!((channel.poll(&mut sink), channel.outstanding()), (0, 3));
    error::resume_pending(&rig.registry, "EE_M").unwrap();
    while sink.len() < 3 {
        channel.poll(&mut sink);
    }
    assert!(sink.iter().all(|completion| completion.status().is_success()));

    // Resuming leaves other rules in effect.
    let failure = FaultAction::Fail(Status::WRITE_FAULT);
    error::inject(&rig.registry, "EE_M", FaultInjection::once(Some(Op::Write), failure)).unwrap();
    error::inject(&rig.registry, "EE_M", pending()).unwrap();
    sink.clear();
    channel.submit(&mut vec![Request::read(Tag(7), 0, 1, rig.buffer(512, 1))]);
    assert_eq!(channel.poll(&mut sink), 0);
    error::resume_pending(&rig.registry, "EE_M").unwrap();
    while sink.is_empty() {
        channel.poll(&mut sink);
    }
    assert_eq!((sink[0].tag(), sink[0].status()), (Tag(7), Status::SUCCESS));
    assert_eq!(rig.write(&mut channel, 0, 1, 1), Status::WRITE_FAULT);
}

#[test]
fn io_is_kept_pending_after_a_clear_or_a_resume_that_the_core_has_not_seen() {
    let (rig, mut channel) = error_rig();
    let pending = || FaultInjection::once(Some(Op::Read), FaultAction::Pending);
    let read = |rig: &Rig, tag: u64| Request::read(Tag(tag), tag, 1, rig.buffer(512, 1));
    let mut sink = Vec::new();
    for round in 0..3 {
        // The channel is idle and is not polled in between.
        error::inject(&rig.registry, "EE_M", pending()).unwrap();
        error::clear(&rig.registry, "EE_M").unwrap();
        error::resume_pending(&rig.registry, "EE_M").unwrap();
        error::inject(&rig.registry, "EE_M", pending()).unwrap();
        channel.submit(&mut vec![read(&rig, 2 * round)]);
        assert_eq!((channel.poll(&mut sink), channel.outstanding()), (0, 1), "round {round}");
        // A resume concerns what came before it, not what comes after it and before the next poll.
        error::resume_pending(&rig.registry, "EE_M").unwrap();
        error::inject(&rig.registry, "EE_M", pending()).unwrap();
        channel.submit(&mut vec![read(&rig, 2 * round + 1)]);
        while sink.is_empty() {
            channel.poll(&mut sink);
        }
        assert_eq!((sink.remove(0).tag(), channel.outstanding()), (Tag(2 * round), 1));
        assert_eq!(channel.poll(&mut sink), 0);
        error::resume_pending(&rig.registry, "EE_M").unwrap();
        while sink.is_empty() {
            channel.poll(&mut sink);
        }
        assert_eq!(sink.remove(0).tag(), Tag(2 * round + 1));
    }
}

#[test]
fn corruption_changes_one_byte_but_not_the_buffer_of_a_writer() {
    let (mut rig, mut channel) = error_rig();
    let corrupt = FaultAction::Corrupt { offset: 100, xor: 0xff };
    error::inject(&rig.registry, "EE_M", FaultInjection::once(Some(Op::Write), corrupt)).unwrap();
    let request = Request::write(Tag(1), 0, 1, rig.buffer(512, 3));
    let written = rig.one(&mut channel, request).into_request().take_data().unwrap().into_single().unwrap();
    assert!(written.as_slice().iter().all(|byte| *byte == 3));
    let mut expected = vec![3; 512];
    expected[100] = 3 ^ 0xff;
    assert_eq!(rig.read(&mut channel, 0, 1).unwrap(), expected);
    error::inject(&rig.registry, "EE_M", FaultInjection::once(Some(Op::Read), corrupt)).unwrap();
    assert_eq!(rig.read(&mut channel, 0, 1).unwrap(), vec![3; 512]);
    assert_eq!(rig.read(&mut channel, 0, 1).unwrap(), expected);
}

fn time_of(rig: &mut Rig, channel: &mut BdevChannel, op: Op) -> Duration {
    let start = Instant::now();
    match op {
        Op::Read => drop(rig.read(channel, 0, 1).unwrap()),
        Op::Write => assert_eq!(rig.write(channel, 0, 1, 1), Status::SUCCESS),
        other => assert_eq!(rig.simple(channel, other, 0, 0, RequestFlags::NONE), Status::SUCCESS),
    }
    start.elapsed()
}

#[test]
fn delay_adds_the_configured_latency() {
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    let config = delay::DelayConfig {
        avg_write_latency_us: 20_000,
        p99_write_latency_us: 20_000,
        ..delay::DelayConfig::new("M", "D", 2_000)
    };
    delay::create(&rig.registry, config).unwrap();
    let mut channel = open(&rig, "D");
    assert!(time_of(&mut rig, &mut channel, Op::Read) >= Duration::from_millis(2));
    assert!(time_of(&mut rig, &mut channel, Op::Write) >= Duration::from_millis(20));
    assert!(time_of(&mut rig, &mut channel, Op::Flush) < Duration::from_millis(20));
    delay::update_latency(&rig.registry, "D", delay::LatencyClass::AvgWrite, 0).unwrap();
    delay::update_latency(&rig.registry, "D", delay::LatencyClass::P99Write, 0).unwrap();
    assert!(time_of(&mut rig, &mut channel, Op::Write) < Duration::from_millis(20));
    let stats = rig.registry.find("D").unwrap().stats();
    let longest = os::clock::ticks_to_ns(stats.op(Op::Write).latency_max_ticks);
    assert!(longest >= 20_000_000, "the layer above counts the delay: {longest} ns");
}

#[test]
fn delay_has_a_deadline_and_a_reset_completes_delayed_io() {
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    delay::create(&rig.registry, delay::DelayConfig::new("M", "D", 60_000_000)).unwrap();
    let mut channel = open(&rig, "D");
    channel.submit(&mut vec![Request::read(Tag(1), 0, 1, rig.buffer(512, 0))]);
    let mut sink = Vec::new();
    assert_eq!(channel.poll(&mut sink), 0);
    let left_ns = channel.deadline().unwrap() - os::clock::now_ns();
    assert!(left_ns > 50_000_000_000, "{left_ns} ns until the deadline");
    channel.submit(&mut vec![Request::new(Tag(2), Op::Reset, 0, 0)]);
    while sink.len() < 2 {
        rig.reactor.turn();
        channel.poll(&mut sink);
    }
}

#[test]
fn one_in_a_hundred_gets_the_99th_percentile_selected_by_the_seed() {
    let slow = |seed| {
        let mut rig = Rig::new();
        null::create(&rig.registry, null::NullConfig::new("N", 256, 512)).unwrap();
        let config =
            delay::DelayConfig { p99_read_latency_us: 50_000, seed, ..delay::DelayConfig::new("N", "D", 0) };
        delay::create(&rig.registry, config).unwrap();
        let mut channel = open(&rig, "D");
        let mut batch: Vec<Request> =
            (0..500).map(|tag| Request::read(Tag(tag), 0, 1, rig.buffer(512, 0))).collect();
        channel.submit(&mut batch);
        let mut fast = Vec::new();
        channel.poll(&mut fast);
        channel.poll(&mut fast);
        let fast: Vec<u64> = fast.iter().map(|completion| completion.tag().0).collect();
        rig.run(&mut channel, batch);
        (0..500 - 244).filter(|tag| !fast.contains(tag)).collect::<Vec<_>>()
    };
    let (first, again, other) = (slow(1), slow(1), slow(2));
    assert_eq!(first, again);
    assert_ne!(first, other);
    assert!(first.len() < 20, "{first:?}");
}

#[test]
fn a_dropped_future_frees_its_slot_when_the_io_completes() {
    let rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    delay::create(&rig.registry, delay::DelayConfig::new("M", "D", 3_000)).unwrap();
    let io = AsyncChannel::new(&rig.core, open(&rig, "D"));
    let core = rig.core.clone();
    let start = Instant::now();
    rig.reactor.block_on(async move {
        let buffer = core.pool().take(512).unwrap();
        let mut read = Box::pin(io.read(0, buffer));
        let polled =
            std::future::poll_fn(|context| std::task::Poll::Ready(read.as_mut().poll(context).is_pending()))
                .await;
        assert!(polled);
        drop(read);
        io.write_zeroes(0, 4).await.unwrap();
        let wrong = core.pool().take(100).unwrap();
        let (status, wrong) = io.read(0, wrong).await.unwrap_err();
        assert!(status.same_code(Status::INVALID_FIELD) && wrong.len() == 100);
        io.flush().await.unwrap();
        io.unmap(0, 1).await.unwrap();
        io.reset().await.unwrap();
    });
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn futures_beyond_the_table_size_wait_for_a_slot() {
    let rig = Rig::new();
    null::create(&rig.registry, null::NullConfig::new("N", 256, 512)).unwrap();
    let io = AsyncChannel::new(&rig.core, open(&rig, "N"));
    let core = rig.core.clone();
    let done = std::rc::Rc::new(std::cell::Cell::new(0));
    let count = done.clone();
    rig.reactor.block_on(async move {
        for _ in 0..3000 {
            let (io, count) = (io.clone(), count.clone());
            assert!(core.spawn(async move {
                io.flush().await.unwrap();
                count.set(count.get() + 1);
            }));
        }
        while count.get() < 3000 {
            core.sleep_ns(1000).await;
        }
    });
    assert_eq!(done.get(), 3000);
}

#[test]
fn the_range_of_an_operation_without_range_is_ignored() {
    let (mut rig, mut channel) = error_rig();
    for op in [Op::Flush, Op::Reset] {
        assert_eq!(rig.simple(&mut channel, op, u64::MAX, u32::MAX, RequestFlags::NONE), Status::SUCCESS);
    }
}

#[test]
fn removal_resumes_pending_io() {
    let (rig, mut channel) = error_rig();
    error::inject(&rig.registry, "EE_M", FaultInjection::once(None, FaultAction::Pending)).unwrap();
    let mut sink = Vec::new();
    channel.submit(&mut vec![Request::read(Tag(1), 0, 1, rig.buffer(512, 0))]);
    assert_eq!(channel.poll(&mut sink), 0);
    rig.registry.unregister("EE_M").unwrap();
    while sink.is_empty() {
        channel.poll(&mut sink);
    }
    assert_eq!(sink[0].status(), Status::SUCCESS);
}

#[test]
fn uncorrectable_blocks_fail_reads_on_every_channel_until_rewritten() {
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("Malloc0", 8192, 512)).unwrap();
    let (mut one, mut two) = (open(&rig, "Malloc0"), open(&rig, "Malloc0"));
    assert_eq!(rig.write(&mut one, 8, 8, 5), Status::SUCCESS);
    let bad = rig.simple(&mut one, Op::WriteUncorrectable, 10, 3, RequestFlags::NONE);
    assert_eq!(bad, Status::SUCCESS);
    assert_eq!(rig.read(&mut two, 8, 8), Err(Status::UNRECOVERED_READ_ERROR));
    assert_eq!(rig.read(&mut two, 12, 1), Err(Status::UNRECOVERED_READ_ERROR));
    assert_eq!(rig.read(&mut two, 13, 1), Ok(vec![5; 512]));
    // A write, an unmap and write zeroes each clear their own block only.
    assert_eq!(rig.write(&mut two, 11, 1, 7), Status::SUCCESS);
    assert_eq!(rig.read(&mut one, 11, 1), Ok(vec![7; 512]));
    assert_eq!(rig.read(&mut one, 10, 1), Err(Status::UNRECOVERED_READ_ERROR));
    assert_eq!(rig.simple(&mut two, Op::WriteZeroes, 10, 1, RequestFlags::NONE), Status::SUCCESS);
    assert_eq!(rig.simple(&mut two, Op::Unmap, 12, 1, RequestFlags::NONE), Status::SUCCESS);
    assert_eq!(rig.read(&mut one, 10, 1), Ok(vec![0; 512]));
    assert_eq!(rig.read(&mut one, 12, 1), Ok(vec![0; 512]));
    // A long unmap clears its blocks too.
    assert_eq!(rig.simple(&mut one, Op::WriteUncorrectable, 0, 8192, RequestFlags::NONE), Status::SUCCESS);
    assert_eq!(rig.simple(&mut two, Op::Unmap, 0, 8192, RequestFlags::NONE), Status::SUCCESS);
    assert_eq!(rig.read(&mut one, 8, 1), Ok(vec![0; 512]));
}

#[test]
fn split_parts_have_their_own_blocks_and_share_the_claim() {
    let mut rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    let config = split::SplitConfig { base: "M".into(), count: 3, part_size: split::PartSize::Even };
    let parts = split::create(&rig.registry, &config).unwrap();
    assert_eq!(parts.iter().map(|part| part.geometry().blocks).collect::<Vec<_>>(), [85; 3]);
    for (index, name) in ["Mp0", "Mp1", "Mp2"].into_iter().enumerate() {
        let mut channel = open(&rig, name);
        assert_eq!(rig.write(&mut channel, 0, 85, index as u8 + 1), Status::SUCCESS);
        assert_eq!(rig.simple(&mut channel, Op::Flush, 0, 0, RequestFlags::NONE), Status::SUCCESS);
        let beyond = rig.write(&mut channel, 84, 2, 9);
        assert_eq!(beyond, Status::LBA_OUT_OF_RANGE.do_not_retry(), "into the next part");
        let read = Request::read(Tag(7), 84, 1, rig.buffer(512, 0));
        let completion = rig.one(&mut channel, read);
        assert_eq!((completion.request().lba, completion.status()), (84, Status::SUCCESS));
    }
    let mut base = rig.registry.open("M", Access::ReadOnly).unwrap().channel(&rig.core).unwrap();
    for (lba, fill) in [(0, 1), (84, 1), (85, 2), (169, 2), (170, 3), (254, 3), (255, 0)] {
        assert_eq!(rig.read(&mut base, lba, 1).unwrap(), vec![fill; 512], "block {lba}");
    }
    drop((base, parts));
    for name in ["Mp0", "Mp1", "Mp2"] {
        let claimed = rig.registry.open("M", Access::ReadWrite).err();
        assert!(matches!(claimed, Some(BdevError::Claimed { .. })), "before {name} is gone");
        rig.registry.unregister(name).unwrap();
    }
    assert!(rig.registry.open("M", Access::ReadWrite).is_ok(), "the last part released the claim");
}

#[test]
fn a_split_that_fails_leaves_no_part_and_no_claim() {
    let rig = Rig::new();
    malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    null::create(&rig.registry, null::NullConfig::new("Mp1", 8, 512)).unwrap();
    let config = split::SplitConfig { base: "M".into(), count: 2, part_size: split::PartSize::Even };
    assert!(matches!(split::create(&rig.registry, &config), Err(BdevError::Exists { .. })));
    assert!(rig.registry.find("Mp0").is_none());
    assert!(rig.registry.open("M", Access::ReadWrite).is_ok());
}

#[test]
fn passthru_forwards_and_has_the_same_identity_each_time() {
    let mut uuids = Vec::new();
    for _ in 0..2 {
        let mut rig = Rig::new();
        let mut config = malloc::MallocConfig::new("M", 256, 512);
        config.uuid = Some(bdev::Uuid::from_u128(7));
        malloc::create(&rig.registry, config).unwrap();
        let config = passthru::PassthruConfig { base: "M".into(), name: "P".into(), uuid: None };
        let device = passthru::create(&rig.registry, config).unwrap();
        let mut channel = open(&rig, "P");
        assert_eq!(rig.write(&mut channel, 255, 1, 9), Status::SUCCESS);
        assert_eq!(rig.simple(&mut channel, Op::Reset, 0, 0, RequestFlags::NONE), Status::SUCCESS);
        assert_eq!(rig.read(&mut channel, 255, 1).unwrap(), vec![9; 512]);
        uuids.push(device.uuid());
        rig.registry.unregister("M").unwrap();
        assert!(rig.registry.find("P").is_none(), "it goes with its base");
    }
    assert_eq!(uuids[0], uuids[1]);
}

/// One byte a second: the first request overdraws its tokens, and the next waits for minutes.
fn limited_rig() -> (Rig, BdevChannel) {
    let rig = Rig::new();
    let device = malloc::create(&rig.registry, malloc::MallocConfig::new("M", 256, 512)).unwrap();
    device.set_rate_limits(RateLimits { read_bytes: 1, ..RateLimits::default() });
    let channel = open(&rig, "M");
    (rig, channel)
}

fn reads(rig: &Rig, tags: std::ops::Range<u64>) -> Vec<Request> {
    tags.map(|tag| Request::read(Tag(tag), tag, 1, rig.buffer(512, 0))).collect()
}

#[test]
fn a_rate_limit_holds_back_only_what_it_limits() {
    let (mut rig, mut channel) = limited_rig();
    let mut sink = Vec::new();
    channel.submit(&mut reads(&rig, 0..3));
    channel.poll(&mut sink);
    channel.poll(&mut sink);
    assert_eq!(sink.iter().map(|completion| completion.tag()).collect::<Vec<_>>(), [Tag(0)]);
    assert_eq!(channel.outstanding(), 2);
    let now_ns = os::clock::now_ns();
    let deadline_ns = channel.deadline().unwrap();
    assert!(
        deadline_ns > now_ns && deadline_ns < now_ns + 1_000_000_000,
        "it looks for another limit, not all the time"
    );
    // Another channel of the device has the same limit, and writes have none.
    let mut other = open(&rig, "M");
    assert_eq!(rig.write(&mut other, 9, 1, 9), Status::SUCCESS);
    other.submit(&mut reads(&rig, 0..1));
    other.poll(&mut sink);
    assert_eq!((sink.len(), other.outstanding()), (1, 1));
    // What was lent at the old rate does not delay the new one; everything completes, in order.
    rig.registry
        .find("M")
        .unwrap()
        .set_rate_limits(RateLimits { read_bytes: 1 << 40, ..RateLimits::default() });
    channel.poll(&mut sink);
    channel.poll(&mut sink);
    assert_eq!(sink.iter().map(|completion| completion.tag().0).collect::<Vec<_>>(), [0, 1, 2]);
    other.poll(&mut sink);
    other.poll(&mut sink);
    assert_eq!((sink.len(), channel.outstanding(), other.outstanding()), (4, 0, 0));
}

#[test]
fn a_request_held_back_can_be_aborted_and_fails_with_its_device() {
    let (rig, mut channel) = limited_rig();
    let mut sink = Vec::new();
    channel.submit(&mut reads(&rig, 0..4));
    channel.submit(&mut vec![Request::abort(Tag(9), Tag(1))]);
    channel.poll(&mut sink);
    channel.poll(&mut sink);
    sink.sort_by_key(|completion| completion.tag());
    let statuses: Vec<_> = sink.iter().map(|completion| (completion.tag().0, completion.status())).collect();
    assert_eq!(statuses, [(0, Status::SUCCESS), (1, Status::ABORT_REQUESTED), (9, Status::SUCCESS)]);
    rig.registry.unregister("M").unwrap();
    sink.clear();
    channel.poll(&mut sink);
    assert!(sink.iter().all(|completion| completion.status().same_code(Status::INVALID_NAMESPACE_OR_FORMAT)));
    assert_eq!((sink.len(), channel.outstanding()), (2, 0));
}
