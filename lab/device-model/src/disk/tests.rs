use std::time::{Duration, Instant};

use bdev::{Access, BdevChannel, Completion, Request};
use block_io::{Channel as _, Status, Tag};
use dma::{Buffer, Data};
use reactor::{Core, IdlePolicy, Reactor, ReactorConfig};

use super::*;
use crate::faults::{FaultKind, FaultOp};
use crate::rng::ModelRng;

/// A busy-polling reactor on the test's thread.
struct TestBench {
    _reactor: Reactor,
    core: Core,
    registry: Registry,
}

const BLOCK: usize = 512;
const BLOCKS: u64 = 4096;

impl TestBench {
    fn new() -> TestBench {
        let reactor =
            Reactor::new(&ReactorConfig { idle: IdlePolicy::Spin, ..ReactorConfig::default() }).unwrap();
        TestBench { core: reactor.core(), _reactor: reactor, registry: Registry::new() }
    }

    fn disk(&self, profile: &str, store: Store) -> BdevChannel {
        let mut config = ModelConfig::new("M", DeviceProfile::shipped(profile).unwrap());
        (config.num_blocks, config.store, config.seed) = (Some(BLOCKS), store, 7);
        create(&self.registry, config).unwrap();
        self.channel()
    }

    fn channel(&self) -> BdevChannel {
        let descriptor = self.registry.open("M", Access::ReadWrite).unwrap();
        descriptor.channel(&self.core).unwrap()
    }

    fn buffer(&self, blocks: u32, fill: u8) -> Buffer {
        let mut buffer = self.core.pool().take(blocks as usize * BLOCK).unwrap();
        buffer.as_mut_slice().fill(fill);
        buffer
    }

    fn read(&self, tag: u64, lba: u64) -> Request {
        Request::read(Tag(tag), lba, 8, self.buffer(8, 0xcc))
    }
}

fn wait(channel: &mut BdevChannel, count: usize) -> Vec<Completion> {
    let (mut sink, start) = (Vec::new(), Instant::now());
    while sink.len() < count {
        channel.poll(&mut sink);
        assert!(start.elapsed() < Duration::from_secs(30), "{} of {count} in 30 s", sink.len());
    }
    sink
}

#[test]
fn reads_return_the_written_data() {
    let bench = TestBench::new();
    let mut channel = bench.disk("intel-p4800x", Store::Memory);
    let mut contents = vec![0u8; BLOCKS as usize * BLOCK];
    let mut random = ModelRng::new(3);
    for round in 0..200u64 {
        // The ranges of one round do not overlap, so their order does not matter.
        let mut batch = Vec::new();
        for part in 0..16u64 {
            let blocks = 1 + random.below(32) as u32;
            let lba = part * (BLOCKS / 16) + random.below(BLOCKS / 16 - u64::from(blocks));
            let range = lba as usize * BLOCK..(lba as usize + blocks as usize) * BLOCK;
            let fill = random.next_u64() as u8;
            batch.push(match random.below(4) {
                0 => {
                    contents[range].fill(fill);
                    Request::write(Tag(0), lba, blocks, bench.buffer(blocks, fill))
                }
                1 => {
                    contents[range].fill(0);
                    let op = if fill & 1 == 0 { Op::Unmap } else { Op::WriteZeroes };
                    Request::new(Tag(0), op, lba, blocks)
                }
                2 => Request::new(Tag(0), Op::Flush, 0, 0),
                _ => Request::read(Tag(0), lba, blocks, bench.buffer(blocks, !fill)),
            });
        }
        channel.submit(&mut batch);
        for completion in wait(&mut channel, 16) {
            assert!(completion.status().is_success());
            let request = completion.into_request();
            let start = request.lba as usize * BLOCK;
            if let (Op::Read, Some(buffer)) = (request.op, request.data().and_then(Data::single)) {
                assert_eq!(buffer.as_slice(), &contents[start..start + buffer.len()], "round {round}");
            }
        }
    }
}

#[test]
fn write_uncorrectable_blocks_fail_reads_until_rewritten() {
    let bench = TestBench::new();
    for store in [Store::Memory, Store::None] {
        let mut channel = bench.disk("intel-p4800x", store);
        let mut run = |request| {
            channel.submit(&mut vec![request]);
            wait(&mut channel, 1)[0].status()
        };
        assert_eq!(run(Request::new(Tag(0), Op::WriteUncorrectable, 12, 2)), Status::SUCCESS);
        assert_eq!(run(bench.read(1, 8)), Status::UNRECOVERED_READ_ERROR);
        assert_eq!(run(bench.read(2, 0)), Status::SUCCESS);
        assert_eq!(run(bench.read(3, 14)), Status::SUCCESS);
        assert_eq!(run(Request::write(Tag(4), 8, 8, bench.buffer(8, 1))), Status::SUCCESS);
        assert_eq!(run(bench.read(5, 8)), Status::SUCCESS);
        drop(channel);
        bench.registry.unregister("M").unwrap();
    }
}

#[test]
fn requests_take_at_least_the_modelled_latency() {
    let bench = TestBench::new();
    let mut channel = bench.disk("samsung-980-pro", Store::None);
    for tag in 0..50 {
        let start = Instant::now();
        channel.submit(&mut vec![bench.read(tag, tag * 8)]);
        wait(&mut channel, 1);
        assert!(start.elapsed() >= Duration::from_micros(45), "{:?}", start.elapsed());
    }
}

#[test]
fn deadlines_use_the_reactor_clock() {
    let bench = TestBench::new();
    let mut channel = bench.disk("samsung-980-pro", Store::None);
    assert_eq!(channel.deadline(), None);
    let before = os::clock::now_ns();
    channel.submit(&mut vec![bench.read(0, 0)]);
    let deadline = channel.deadline().unwrap();
    assert!(deadline > before + 40_000 && deadline < before + 5_000_000_000, "{before} {deadline}");
    wait(&mut channel, 1);
    assert!(os::clock::now_ns() >= deadline);
    assert_eq!(channel.deadline(), None);
}

#[test]
fn a_timed_out_request_is_aborted_by_a_reset() {
    let bench = TestBench::new();
    let mut channel = bench.disk("ideal", Store::None);
    let fault = ModelFault { count: Some(2), op: FaultOp::Read, ..ModelFault::new(FaultKind::Timeout) };
    inject_fault(&bench.registry, "M", &fault).unwrap();
    channel.submit(&mut vec![bench.read(0, 0), bench.read(1, 0), bench.read(2, 0)]);
    assert_eq!(wait(&mut channel, 1)[0].tag(), Tag(2));
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(3) {
        assert_eq!(channel.poll(&mut Vec::new()), 0);
    }
    channel.submit(&mut vec![Request::new(Tag(9), Op::Reset, 0, 0)]);
    let mut results: Vec<(Tag, Status)> =
        wait(&mut channel, 3).iter().map(|done| (done.tag(), done.status())).collect();
    results.sort_by_key(|(tag, _)| *tag);
    let aborted = Status::ABORT_REQUESTED;
    assert_eq!(results, [(Tag(0), aborted), (Tag(1), aborted), (Tag(9), Status::SUCCESS)]);
}

#[test]
fn injected_media_errors_fail_requests_until_cleared_and_keep_the_data() {
    let bench = TestBench::new();
    let mut channel = bench.disk("ideal", Store::Memory);
    let bad =
        ModelFault { first_lba: Some(64), last_lba: Some(71), ..ModelFault::new(FaultKind::MediaError) };
    inject_fault(&bench.registry, "M", &bad).unwrap();
    let write = |lba| Request::write(Tag(lba), lba, 8, bench.buffer(8, 5));
    channel.submit(&mut vec![write(64), write(72), bench.read(100, 57)]);
    let mut results: Vec<(Tag, Status)> =
        wait(&mut channel, 3).iter().map(|done| (done.tag(), done.status())).collect();
    results.sort_by_key(|(tag, _)| *tag);
    let expected = [
        (Tag(64), Status::WRITE_FAULT),
        (Tag(72), Status::SUCCESS),
        (Tag(100), Status::UNRECOVERED_READ_ERROR),
    ];
    assert_eq!(results, expected);
    clear_faults(&bench.registry, "M").unwrap();
    channel.submit(&mut vec![bench.read(0, 64)]);
    let done = wait(&mut channel, 1).pop().unwrap();
    assert!(done.status().is_success());
    let buffer = done.into_request().take_data().unwrap().into_single().unwrap();
    assert!(buffer.as_slice().iter().all(|byte| *byte == 0), "a failed write stores nothing");
}

#[test]
fn uncorrectable_blocks_can_be_rewritten_without_a_store() {
    let bench = TestBench::new();
    let mut channel = bench.disk("ideal", Store::None);
    let mut run = |request: Request| {
        channel.submit(&mut vec![request]);
        wait(&mut channel, 1)[0].status()
    };
    let bad = Request::new(Tag(0), Op::WriteUncorrectable, 70, 2);
    assert!(run(bad).is_success());
    assert_eq!(run(bench.read(1, 64)), Status::UNRECOVERED_READ_ERROR);
    assert!(run(bench.read(2, 72)).is_success());
    assert!(run(Request::write(Tag(3), 70, 2, bench.buffer(2, 1))).is_success());
    assert!(run(bench.read(4, 64)).is_success());
}

#[test]
fn a_mixed_batch_completes_like_single_requests() {
    let bench = TestBench::new();
    let mut channel = bench.disk("ideal", Store::None);
    let mut batch: Vec<Request> = (0..8).map(|tag| bench.read(tag, tag * 8)).collect();
    batch.push(Request::write(Tag(8), 0, 8, bench.buffer(8, 1)));
    batch.push(Request::new(Tag(9), Op::WriteUncorrectable, 0, 1));
    batch.extend((10..16).map(|tag| bench.read(tag, 0)));
    channel.submit(&mut batch);
    let mut results: Vec<(Tag, Status)> =
        wait(&mut channel, 16).iter().map(|done| (done.tag(), done.status())).collect();
    results.sort_by_key(|(tag, _)| *tag);
    let expected = |tag| if tag < 10 { Status::SUCCESS } else { Status::UNRECOVERED_READ_ERROR };
    assert_eq!(results, (0..16).map(|tag| (Tag(tag), expected(tag))).collect::<Vec<_>>());
    assert_eq!(channel.deadline(), None);
}

#[test]
fn a_fatal_status_stops_every_channel_until_a_reset() {
    let bench = TestBench::new();
    let mut channels = [bench.disk("ideal", Store::None), bench.channel()];
    let fatal =
        ModelFault { count: Some(1), op: FaultOp::Write, ..ModelFault::new(FaultKind::ControllerFatal) };
    inject_fault(&bench.registry, "M", &fatal).unwrap();
    channels[1].submit(&mut vec![bench.read(1, 0)]);
    channels[0].submit(&mut vec![bench.read(0, 0), Request::write(Tag(2), 0, 8, bench.buffer(8, 1))]);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(2) {
        for channel in &mut channels {
            channel.submit(&mut Vec::new());
            assert_eq!(channel.poll(&mut Vec::new()), 0);
        }
    }
    channels[0].submit(&mut vec![bench.read(3, 0), Request::new(Tag(9), Op::Reset, 0, 0)]);
    let mut results: Vec<(Tag, Status)> =
        wait(&mut channels[0], 4).iter().map(|done| (done.tag(), done.status())).collect();
    results.sort_by_key(|(tag, _)| *tag);
    let aborted = Status::ABORT_REQUESTED;
    // The bdev layer submits a reset first.
    let success = Status::SUCCESS;
    let expected = [(Tag(0), aborted), (Tag(2), aborted), (Tag(3), success), (Tag(9), success)];
    assert_eq!(results, expected);
    assert_eq!(
        wait(&mut channels[1], 1)[0].status(),
        aborted,
        "a reset aborts the requests of every channel"
    );
    for channel in &mut channels {
        channel.submit(&mut vec![bench.read(5, 0)]);
        assert!(wait(channel, 1)[0].status().is_success());
    }
}

#[test]
fn a_dropped_completion_still_writes_the_data() {
    let bench = TestBench::new();
    let mut channel = bench.disk("ideal", Store::Memory);
    let lost =
        ModelFault { count: Some(1), op: FaultOp::Write, ..ModelFault::new(FaultKind::DroppedCompletion) };
    inject_fault(&bench.registry, "M", &lost).unwrap();
    channel.submit(&mut vec![Request::write(Tag(0), 0, 8, bench.buffer(8, 7))]);
    channel.submit(&mut vec![bench.read(1, 0)]);
    let done = wait(&mut channel, 1).pop().unwrap();
    assert_eq!(done.tag(), Tag(1));
    assert!(done.into_request().take_data().unwrap().slices()[0].as_slice().iter().all(|byte| *byte == 7));
    channel.submit(&mut vec![Request::new(Tag(9), Op::Reset, 0, 0)]);
    let mut tags: Vec<Tag> = wait(&mut channel, 2).iter().map(|done| done.tag()).collect();
    tags.sort_unstable();
    assert_eq!(tags, [Tag(0), Tag(9)]);
}

#[test]
fn an_injected_surprise_removal_fails_all_requests() {
    let bench = TestBench::new();
    let mut channel = bench.disk("samsung-980-pro", Store::None);
    let pulled = ModelFault { first_lba: Some(800), ..ModelFault::new(FaultKind::SurpriseRemoval) };
    inject_fault(&bench.registry, "M", &pulled).unwrap();
    channel.submit(&mut vec![bench.read(0, 0), bench.read(1, 800), bench.read(2, 0)]);
    let gone = |done: &Completion| done.status() == Status::ABORTED_SQ_DELETION;
    assert!(wait(&mut channel, 3).iter().all(gone));
    channel.submit(&mut vec![bench.read(3, 0)]);
    assert!(wait(&mut channel, 1).iter().all(gone));
}

#[test]
fn surprise_removal_aborts_all_requests_at_once() {
    let bench = TestBench::new();
    let mut channel = bench.disk("samsung-980-pro", Store::None);
    inject_fault(&bench.registry, "M", &ModelFault { count: Some(1), ..ModelFault::new(FaultKind::Timeout) })
        .unwrap();
    channel.submit(&mut vec![bench.read(0, 0), bench.read(1, 0)]);
    surprise_remove(&bench.registry, "M").unwrap();
    assert_eq!(channel.deadline(), Some(0));
    let done = wait(&mut channel, 2);
    assert!(done.iter().all(|done| done.status() == Status::ABORTED_SQ_DELETION), "{done:?}");
    assert!(bench.registry.find("M").is_none());
    channel.submit(&mut vec![bench.read(2, 0)]);
    assert!(!wait(&mut channel, 1)[0].status().is_success());
}

#[test]
fn unregistering_aborts_only_the_hung_requests() {
    let bench = TestBench::new();
    let mut channel = bench.disk("samsung-980-pro", Store::None);
    inject_fault(&bench.registry, "M", &ModelFault { count: Some(1), ..ModelFault::new(FaultKind::Timeout) })
        .unwrap();
    channel.submit(&mut vec![bench.read(0, 0), bench.read(1, 0)]);
    let device = bench.registry.unregister("M").unwrap();
    let mut results: Vec<(Tag, Status)> =
        wait(&mut channel, 2).iter().map(|done| (done.tag(), done.status())).collect();
    results.sort_by_key(|(tag, _)| *tag);
    assert_eq!(results, [(Tag(0), Status::ABORTED_SQ_DELETION), (Tag(1), Status::SUCCESS)]);
    drop(channel);
    assert!(device.wait_closed(Duration::from_secs(5)));
}

#[test]
fn two_channels_complete_all_requests() {
    let bench = TestBench::new();
    let mut channels = [bench.disk("intel-p4800x", Store::None), bench.channel()];
    for _ in 0..100 {
        for (number, channel) in channels.iter_mut().enumerate() {
            let mut batch: Vec<Request> = (0..64 >> number).map(|tag| bench.read(tag, tag * 8)).collect();
            channel.submit(&mut batch);
        }
        for (number, channel) in channels.iter_mut().enumerate() {
            wait(channel, 64 >> number);
        }
    }
}

#[test]
fn an_invalid_configuration_names_the_field() {
    let bench = TestBench::new();
    let config = || ModelConfig::new("M", DeviceProfile::shipped("ideal").unwrap());
    let error = |config| create(&bench.registry, config).unwrap_err().to_string();
    assert!(error(ModelConfig { block_size: Some(1000), ..config() }).starts_with("block_size:"));
    assert!(error(ModelConfig { num_blocks: Some(8), ..config() }).starts_with("num_blocks:"));
    assert!(error(ModelConfig { num_blocks: Some(u64::MAX), ..config() }).starts_with("num_blocks:"));
    let mut profile = config().profile;
    profile.front.read_iops = -1.0;
    assert!(error(ModelConfig { profile, ..config() }).contains("front.read_iops"));
    assert!(matches!(surprise_remove(&bench.registry, "M"), Err(BdevError::NotFound { .. })));
    bdev::null::create(&bench.registry, bdev::null::NullConfig::new("N", 8, 512)).unwrap();
    assert!(matches!(clear_faults(&bench.registry, "N"), Err(BdevError::WrongKind { .. })));
}
