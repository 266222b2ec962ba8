use std::time::{Duration, Instant};

use bdev::{Access, Channel, Completion, Request};
use memory::Buffer;
use reactor::{Config, Core, IdlePolicy, Reactor};
use ring::{Channel as _, Status, Tag};

use super::*;
use crate::faults::{FaultKind, FaultOp};
use crate::random::Random;

/// A reactor on the test's own thread that never sleeps.
struct Rig {
    _reactor: Reactor,
    core: Core,
    registry: Registry,
}

const BLOCK: usize = 512;
const BLOCKS: u64 = 4096;

impl Rig {
    fn new() -> Rig {
        let reactor = Reactor::new(&Config { idle: IdlePolicy::Spin, ..Config::default() }).unwrap();
        Rig { core: reactor.core(), _reactor: reactor, registry: Registry::new() }
    }

    fn disk(&self, profile: &str, store: Store) -> Channel {
        let mut config = ModelConfig::new("M", Profile::shipped(profile).unwrap());
        (config.num_blocks, config.store, config.seed) = (Some(BLOCKS), store, 7);
        create(&self.registry, config).unwrap();
        self.channel()
    }

    fn channel(&self) -> Channel {
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

fn wait(channel: &mut Channel, count: usize) -> Vec<Completion> {
    let (mut sink, start) = (Vec::new(), Instant::now());
    while sink.len() < count {
        channel.poll(&mut sink);
        assert!(start.elapsed() < Duration::from_secs(30), "{} of {count} in 30 s", sink.len());
    }
    sink
}

#[test]
fn what_was_written_is_read_back() {
    let rig = Rig::new();
    let mut channel = rig.disk("intel-p4800x", Store::Memory);
    let mut contents = vec![0u8; BLOCKS as usize * BLOCK];
    let mut random = Random::new(3);
    for round in 0..200u64 {
        // Ranges of one round do not overlap, so that their order does not matter.
        let mut batch = Vec::new();
        for part in 0..16u64 {
            let blocks = 1 + random.below(32) as u32;
            let lba = part * (BLOCKS / 16) + random.below(BLOCKS / 16 - u64::from(blocks));
            let range = lba as usize * BLOCK..(lba as usize + blocks as usize) * BLOCK;
            let fill = random.bits() as u8;
            batch.push(match random.below(4) {
                0 => {
                    contents[range].fill(fill);
                    Request::write(Tag(0), lba, blocks, rig.buffer(blocks, fill))
                }
                1 => {
                    contents[range].fill(0);
                    let op = if fill & 1 == 0 { Op::Unmap } else { Op::WriteZeroes };
                    Request::new(Tag(0), op, lba, blocks)
                }
                2 => Request::new(Tag(0), Op::Flush, 0, 0),
                _ => Request::read(Tag(0), lba, blocks, rig.buffer(blocks, !fill)),
            });
        }
        channel.submit(&mut batch);
        for completion in wait(&mut channel, 16) {
            assert!(completion.status().is_success());
            let request = completion.into_request();
            let start = request.lba as usize * BLOCK;
            if let (Op::Read, Some(buffer)) = (request.op, &request.buffer) {
                assert_eq!(buffer.as_slice(), &contents[start..start + buffer.len()], "round {round}");
            }
        }
    }
}

#[test]
fn blocks_are_made_unreadable_until_they_are_written() {
    let rig = Rig::new();
    for store in [Store::Memory, Store::None] {
        let mut channel = rig.disk("intel-p4800x", store);
        let mut run = |request| {
            channel.submit(&mut vec![request]);
            wait(&mut channel, 1)[0].status()
        };
        assert_eq!(run(Request::new(Tag(0), Op::WriteUncorrectable, 12, 2)), Status::SUCCESS);
        assert_eq!(run(rig.read(1, 8)), Status::UNRECOVERED_READ_ERROR);
        assert_eq!(run(rig.read(2, 0)), Status::SUCCESS);
        assert_eq!(run(rig.read(3, 14)), Status::SUCCESS);
        assert_eq!(run(Request::write(Tag(4), 8, 8, rig.buffer(8, 1))), Status::SUCCESS);
        assert_eq!(run(rig.read(5, 8)), Status::SUCCESS);
        drop(channel);
        rig.registry.unregister("M").unwrap();
    }
}

#[test]
fn requests_take_as_long_as_the_model_says() {
    let rig = Rig::new();
    let mut channel = rig.disk("samsung-980-pro", Store::None);
    for tag in 0..50 {
        let start = Instant::now();
        channel.submit(&mut vec![rig.read(tag, tag * 8)]);
        wait(&mut channel, 1);
        assert!(start.elapsed() >= Duration::from_micros(45), "{:?}", start.elapsed());
    }
}

#[test]
fn deadlines_are_in_the_reactors_time() {
    let rig = Rig::new();
    let mut channel = rig.disk("samsung-980-pro", Store::None);
    assert_eq!(channel.deadline(), None);
    let before = sys::clock::now_ns();
    channel.submit(&mut vec![rig.read(0, 0)]);
    let deadline = channel.deadline().unwrap();
    assert!(deadline > before + 40_000 && deadline < before + 5_000_000_000, "{before} {deadline}");
    wait(&mut channel, 1);
    assert!(sys::clock::now_ns() >= deadline);
    assert_eq!(channel.deadline(), None);
}

#[test]
fn a_command_that_never_ends_waits_for_a_reset() {
    let rig = Rig::new();
    let mut channel = rig.disk("ideal", Store::None);
    let fault = Fault { count: Some(2), op: FaultOp::Read, ..Fault::new(FaultKind::Timeout) };
    inject(&rig.registry, "M", &fault).unwrap();
    channel.submit(&mut vec![rig.read(0, 0), rig.read(1, 0), rig.read(2, 0)]);
    assert_eq!(wait(&mut channel, 1)[0].tag(), Tag(2));
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(3) {
        assert_eq!(channel.poll(&mut Vec::new()), 0);
    }
    channel.submit(&mut vec![Request::new(Tag(9), Op::Reset, 0, 0)]);
    let mut ends: Vec<(Tag, Status)> =
        wait(&mut channel, 3).iter().map(|done| (done.tag(), done.status())).collect();
    ends.sort_by_key(|(tag, _)| *tag);
    let aborted = Status::ABORT_REQUESTED;
    assert_eq!(ends, [(Tag(0), aborted), (Tag(1), aborted), (Tag(9), Status::SUCCESS)]);
}

#[test]
fn bad_blocks_fail_until_the_rules_are_cleared_and_keep_their_data() {
    let rig = Rig::new();
    let mut channel = rig.disk("ideal", Store::Memory);
    let bad = Fault { first_lba: Some(64), last_lba: Some(71), ..Fault::new(FaultKind::MediaError) };
    inject(&rig.registry, "M", &bad).unwrap();
    let write = |lba| Request::write(Tag(lba), lba, 8, rig.buffer(8, 5));
    channel.submit(&mut vec![write(64), write(72), rig.read(100, 57)]);
    let mut ends: Vec<(Tag, Status)> =
        wait(&mut channel, 3).iter().map(|done| (done.tag(), done.status())).collect();
    ends.sort_by_key(|(tag, _)| *tag);
    let expected = [
        (Tag(64), Status::WRITE_FAULT),
        (Tag(72), Status::SUCCESS),
        (Tag(100), Status::UNRECOVERED_READ_ERROR),
    ];
    assert_eq!(ends, expected);
    clear(&rig.registry, "M").unwrap();
    channel.submit(&mut vec![rig.read(0, 64)]);
    let done = wait(&mut channel, 1).pop().unwrap();
    assert!(done.status().is_success());
    let buffer = done.into_request().buffer.unwrap();
    assert!(buffer.as_slice().iter().all(|byte| *byte == 0), "a write that failed wrote nothing");
}

#[test]
fn blocks_written_as_uncorrectable_fail_until_they_are_written() {
    let rig = Rig::new();
    let mut channel = rig.disk("ideal", Store::None);
    let mut end = |request: Request| {
        channel.submit(&mut vec![request]);
        wait(&mut channel, 1)[0].status()
    };
    let bad = Request::new(Tag(0), Op::WriteUncorrectable, 70, 2);
    assert!(end(bad).is_success());
    assert_eq!(end(rig.read(1, 64)), Status::UNRECOVERED_READ_ERROR);
    assert!(end(rig.read(2, 72)).is_success());
    assert!(end(Request::write(Tag(3), 70, 2, rig.buffer(2, 1))).is_success());
    assert!(end(rig.read(4, 64)).is_success());
}

#[test]
fn a_batch_of_everything_ends_as_its_commands_do_one_by_one() {
    let rig = Rig::new();
    let mut channel = rig.disk("ideal", Store::None);
    let mut batch: Vec<Request> = (0..8).map(|tag| rig.read(tag, tag * 8)).collect();
    batch.push(Request::write(Tag(8), 0, 8, rig.buffer(8, 1)));
    batch.push(Request::new(Tag(9), Op::WriteUncorrectable, 0, 1));
    batch.extend((10..16).map(|tag| rig.read(tag, 0)));
    channel.submit(&mut batch);
    let mut ends: Vec<(Tag, Status)> =
        wait(&mut channel, 16).iter().map(|done| (done.tag(), done.status())).collect();
    ends.sort_by_key(|(tag, _)| *tag);
    let expected = |tag| if tag < 10 { Status::SUCCESS } else { Status::UNRECOVERED_READ_ERROR };
    assert_eq!(ends, (0..16).map(|tag| (Tag(tag), expected(tag))).collect::<Vec<_>>());
    assert_eq!(channel.deadline(), None);
}

#[test]
fn a_fatal_status_stops_every_queue_until_one_resets_the_controller() {
    let rig = Rig::new();
    let mut channels = [rig.disk("ideal", Store::None), rig.channel()];
    let fatal = Fault { count: Some(1), op: FaultOp::Write, ..Fault::new(FaultKind::ControllerFatal) };
    inject(&rig.registry, "M", &fatal).unwrap();
    channels[1].submit(&mut vec![rig.read(1, 0)]);
    channels[0].submit(&mut vec![rig.read(0, 0), Request::write(Tag(2), 0, 8, rig.buffer(8, 1))]);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(2) {
        for channel in &mut channels {
            channel.submit(&mut Vec::new());
            assert_eq!(channel.poll(&mut Vec::new()), 0);
        }
    }
    channels[0].submit(&mut vec![rig.read(3, 0), Request::new(Tag(9), Op::Reset, 0, 0)]);
    let mut ends: Vec<(Tag, Status)> =
        wait(&mut channels[0], 4).iter().map(|done| (done.tag(), done.status())).collect();
    ends.sort_by_key(|(tag, _)| *tag);
    let aborted = Status::ABORT_REQUESTED;
    // The layer lets a reset go first.
    let fine = Status::SUCCESS;
    let expected = [(Tag(0), aborted), (Tag(2), aborted), (Tag(3), fine), (Tag(9), fine)];
    assert_eq!(ends, expected);
    assert_eq!(wait(&mut channels[1], 1)[0].status(), aborted, "the reset is every queue's");
    for channel in &mut channels {
        channel.submit(&mut vec![rig.read(5, 0)]);
        assert!(wait(channel, 1)[0].status().is_success());
    }
}

#[test]
fn a_lost_completion_has_written() {
    let rig = Rig::new();
    let mut channel = rig.disk("ideal", Store::Memory);
    let lost = Fault { count: Some(1), op: FaultOp::Write, ..Fault::new(FaultKind::DroppedCompletion) };
    inject(&rig.registry, "M", &lost).unwrap();
    channel.submit(&mut vec![Request::write(Tag(0), 0, 8, rig.buffer(8, 7))]);
    channel.submit(&mut vec![rig.read(1, 0)]);
    let done = wait(&mut channel, 1).pop().unwrap();
    assert_eq!(done.tag(), Tag(1));
    assert!(done.into_request().buffer.unwrap().as_slice().iter().all(|byte| *byte == 7));
    channel.submit(&mut vec![Request::new(Tag(9), Op::Reset, 0, 0)]);
    let mut tags: Vec<Tag> = wait(&mut channel, 2).iter().map(|done| done.tag()).collect();
    tags.sort_unstable();
    assert_eq!(tags, [Tag(0), Tag(9)]);
}

#[test]
fn a_device_that_a_rule_pulls_out_fails_everything_from_then_on() {
    let rig = Rig::new();
    let mut channel = rig.disk("samsung-980-pro", Store::None);
    let pulled = Fault { first_lba: Some(800), ..Fault::new(FaultKind::SurpriseRemoval) };
    inject(&rig.registry, "M", &pulled).unwrap();
    channel.submit(&mut vec![rig.read(0, 0), rig.read(1, 800), rig.read(2, 0)]);
    let gone = |done: &Completion| done.status() == Status::ABORTED_SQ_DELETION;
    assert!(wait(&mut channel, 3).iter().all(gone));
    channel.submit(&mut vec![rig.read(3, 0)]);
    assert!(wait(&mut channel, 1).iter().all(gone));
}

#[test]
fn pulling_a_device_fails_everything_at_once() {
    let rig = Rig::new();
    let mut channel = rig.disk("samsung-980-pro", Store::None);
    inject(&rig.registry, "M", &Fault { count: Some(1), ..Fault::new(FaultKind::Timeout) }).unwrap();
    channel.submit(&mut vec![rig.read(0, 0), rig.read(1, 0)]);
    pull(&rig.registry, "M").unwrap();
    assert_eq!(channel.deadline(), Some(0));
    let done = wait(&mut channel, 2);
    assert!(done.iter().all(|done| done.status() == Status::ABORTED_SQ_DELETION), "{done:?}");
    assert!(rig.registry.find("M").is_none());
    channel.submit(&mut vec![rig.read(2, 0)]);
    assert!(!wait(&mut channel, 1)[0].status().is_success());
}

#[test]
fn removal_in_order_completes_what_completes_and_gives_up_the_rest() {
    let rig = Rig::new();
    let mut channel = rig.disk("samsung-980-pro", Store::None);
    inject(&rig.registry, "M", &Fault { count: Some(1), ..Fault::new(FaultKind::Timeout) }).unwrap();
    channel.submit(&mut vec![rig.read(0, 0), rig.read(1, 0)]);
    let device = rig.registry.unregister("M").unwrap();
    let mut ends: Vec<(Tag, Status)> =
        wait(&mut channel, 2).iter().map(|done| (done.tag(), done.status())).collect();
    ends.sort_by_key(|(tag, _)| *tag);
    assert_eq!(ends, [(Tag(0), Status::ABORTED_SQ_DELETION), (Tag(1), Status::SUCCESS)]);
    drop(channel);
    assert!(device.wait_closed(Duration::from_secs(5)));
}

#[test]
fn two_channels_complete_everything_between_them() {
    let rig = Rig::new();
    let mut channels = [rig.disk("intel-p4800x", Store::None), rig.channel()];
    for _ in 0..100 {
        for (number, channel) in channels.iter_mut().enumerate() {
            let mut batch: Vec<Request> = (0..64 >> number).map(|tag| rig.read(tag, tag * 8)).collect();
            channel.submit(&mut batch);
        }
        for (number, channel) in channels.iter_mut().enumerate() {
            wait(channel, 64 >> number);
        }
    }
}

#[test]
fn what_cannot_be_made_says_why() {
    let rig = Rig::new();
    let config = || ModelConfig::new("M", Profile::shipped("ideal").unwrap());
    let error = |config| create(&rig.registry, config).unwrap_err().to_string();
    assert!(error(ModelConfig { block_size: Some(1000), ..config() }).starts_with("block_size:"));
    assert!(error(ModelConfig { num_blocks: Some(8), ..config() }).starts_with("num_blocks:"));
    assert!(error(ModelConfig { num_blocks: Some(u64::MAX), ..config() }).starts_with("num_blocks:"));
    let mut profile = config().profile;
    profile.front.read_iops = -1.0;
    assert!(error(ModelConfig { profile, ..config() }).contains("front.read_iops"));
    assert!(matches!(pull(&rig.registry, "M"), Err(BdevError::NotFound { .. })));
    bdev::null::create(&rig.registry, bdev::null::NullConfig::new("N", 8, 512)).unwrap();
    assert!(matches!(clear(&rig.registry, "N"), Err(BdevError::WrongKind { .. })));
}
