//! The uring device on real files.
#![allow(clippy::unwrap_used)]

mod rig;

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::process::Command;

use bdev::stacking::BaseBdev;
use bdev::uring::{self, UringConfig};
use bdev::{Access, BdevChannel, BdevError, InfoValue, RateLimits, Request};
use block_io::{Channel as _, Op, Payload, RequestFlags, Status, Tag};
use dma::Data;
use rig::Rig;

/// A directory that is removed at the end of the test.
struct TestDirectory(PathBuf);

impl TestDirectory {
    fn new(name: &str) -> TestDirectory {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        TestDirectory(path)
    }

    fn config(&self, bytes: u64) -> UringConfig {
        UringConfig { create_bytes: Some(bytes), ..UringConfig::new("F", self.0.join("file")) }
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A channel of a device on a new file, or `None` without io_uring.
fn device(rig: &Rig, config: UringConfig) -> Option<BdevChannel> {
    match uring::create(&rig.registry, config) {
        Ok(_) => {}
        Err(error @ BdevError::NoFileIo { .. }) => {
            eprintln!("SKIPPED: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    }
    Some(rig.registry.open("F", Access::ReadWrite).unwrap().channel(&rig.core).unwrap())
}

fn field(rig: &Rig, name: &str) -> Option<InfoValue> {
    let specific = rig.registry.find("F").unwrap().bdev().driver_specific();
    let InfoValue::Object(fields) = &specific[0].1 else { panic!("{specific:?}") };
    fields.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone())
}

#[test]
fn any_thread_reads_a_file_until_it_is_limited_or_removed() {
    let (rig, directory) = (Rig::new(), TestDirectory::new("reader"));
    let Some(channel) = device(&rig, directory.config(1 << 20)) else { return };
    let content: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 512) as u8).collect();
    std::fs::write(directory.0.join("file"), &content).unwrap();
    let base = BaseBdev::open(&rig.registry, "F", Access::ReadOnly).unwrap();
    let reader = base.reader().unwrap();
    let read = |offset: u64, bytes: usize| {
        let mut memory = vec![0; bytes + reader.alignment()];
        let start = memory.as_ptr().addr().next_multiple_of(reader.alignment()) - memory.as_ptr().addr();
        let out = &mut memory[start..start + bytes];
        reader.read(offset, out).map(|()| out.to_vec())
    };
    std::thread::scope(|threads| {
        for offset in [0, 4096, 512 << 10] {
            let (read, content) = (&read, &content);
            threads.spawn(move || {
                assert!(read(offset, 8192).unwrap()[..] == content[offset as usize..][..8192])
            });
        }
    });
    assert_eq!(read((1 << 20) - 4096, 8192), Err(Status::LBA_OUT_OF_RANGE));
    let device = base.device().clone();
    device.set_rate_limits(RateLimits { rw_ios: 1000, ..RateLimits::default() });
    assert_eq!(read(0, 4096), Err(Status::INTERNAL_ERROR), "a channel keeps to the limit");
    device.set_rate_limits(RateLimits::default());
    assert!(read(0, 4096).is_ok());
    rig.registry.unregister("F").unwrap();
    assert!(read(0, 4096).is_err());
    drop((base, channel));
    assert!(read(0, 4096).is_err());
}

#[test]
fn a_file_in_memory_says_so() {
    use std::os::fd::AsRawFd;
    let rig = Rig::new();
    let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 20).unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    if device(&rig, UringConfig::new("F", path)).is_none() {
        return;
    }
    assert_eq!(rig.registry.find("F").unwrap().durability(), bdev::Durability::Memory);
}

#[test]
fn written_data_is_in_the_file() {
    for direct in [true, false] {
        let directory = TestDirectory::new(&format!("written-{direct}"));
        let mut rig = Rig::new();
        let config = UringConfig { direct, ..directory.config(1 << 20) };
        let Some(mut channel) = device(&rig, config) else { return };
        eprintln!("direct: {:?} ({:?})", field(&rig, "direct"), field(&rig, "direct_refused"));
        assert!(channel.device().geometry().write_cache);
        let batch: Vec<Request> = (0..64)
            .map(|index| {
                let mut request =
                    Request::write(Tag(index), index * 16, 16, rig.buffer(8192, index as u8 + 1));
                request.flags = if index % 2 == 0 { RequestFlags::FUA } else { RequestFlags::NONE };
                request
            })
            .collect();
        assert!(rig.run(&mut channel, batch).iter().all(|completion| completion.status().is_success()));
        assert_eq!(rig.simple(&mut channel, Op::Flush, 0, 0, RequestFlags::NONE), Status::SUCCESS);
        let contents = std::fs::read(directory.0.join("file")).unwrap();
        for (index, chunk) in contents.chunks(8192).take(64).enumerate() {
            assert!(chunk.iter().all(|byte| *byte == index as u8 + 1), "{index}");
        }
        assert_eq!(rig.read(&mut channel, 16 * 63, 1).unwrap(), vec![64; 512]);
    }
}

#[test]
fn data_of_several_slices_is_one_operation() {
    for direct in [true, false] {
        let directory = TestDirectory::new(&format!("slices-{direct}"));
        let mut rig = Rig::new();
        let config = UringConfig { direct, ..directory.config(1 << 20) };
        let Some(mut channel) = device(&rig, config) else { return };
        let is_direct = field(&rig, "direct") == Some(InfoValue::Bool(true));
        let limits = channel.device().bdev().io_limits();
        assert_eq!((limits.segments_max, limits.alignment), (1024, if is_direct { 4096 } else { 1 }));
        // More requests than the core's ring takes one by one, so that their vectors are in flight together.
        let slices = |rig: &Rig, fill: u8| {
            let slice = |index: u8| rig.buffer(if index == 2 { 512 } else { 4096 }, fill.wrapping_add(index));
            Data::gather((0..3).map(slice).collect()).unwrap()
        };
        let writes = (0..50).map(|at| Request::write(Tag(at), at * 17, 17, slices(&rig, at as u8))).collect();
        assert!(rig.run(&mut channel, writes).iter().all(|completion| completion.status().is_success()));
        let contents = std::fs::read(directory.0.join("file")).unwrap();
        for (at, chunk) in contents.chunks(17 * 512).take(50).enumerate() {
            for (index, slice) in chunk.chunks(4096).enumerate() {
                assert!(slice.iter().all(|byte| usize::from(*byte) == at + index), "{at}, slice {index}");
            }
        }
        let reads = (0..50).map(|at| Request::read(Tag(at), at * 17, 17, slices(&rig, 99))).collect();
        for completion in rig.run(&mut channel, reads) {
            let (at, data) = (completion.tag().0 as u8, completion.into_request().take_data().unwrap());
            for (index, slice) in data.slices().iter().enumerate() {
                let expected = at + index as u8;
                assert!(slice.as_slice().iter().all(|byte| *byte == expected), "{at}, slice {index}");
            }
        }
    }
}

#[test]
fn seeks_find_the_data_and_holes_of_the_file() {
    for sqpoll in [false, true] {
        let directory = TestDirectory::new(&format!("seeks-{sqpoll}"));
        let mut rig = Rig::new();
        let mut config = directory.config(16 << 20);
        config.polling.sqpoll = sqpoll;
        let Some(mut channel) = device(&rig, config) else { return };
        let mut seek = |rig: &mut Rig, op, lba, blocks| {
            let completion = rig.one(&mut channel, Request::new(Tag(1), op, lba, blocks));
            assert_eq!(completion.status(), Status::SUCCESS);
            let Payload::Found(found) = completion.into_request().payload else { panic!("no answer") };
            found
        };
        assert_eq!(seek(&mut rig, Op::SeekData, 0, 32 << 10), None, "a sparse file has no data");
        assert_eq!(seek(&mut rig, Op::SeekHole, 5, 1), Some(5));
        let file = std::fs::File::options().write(true).open(directory.0.join("file")).unwrap();
        file.write_all_at(&vec![7; 1 << 20], 4 << 20).unwrap();
        assert_eq!(seek(&mut rig, Op::SeekData, 0, 32 << 10), Some(8192));
        assert_eq!(seek(&mut rig, Op::SeekHole, 9000, 32 << 9), Some(10240));
        assert_eq!(seek(&mut rig, Op::SeekData, 10240, 100), None);
    }
}

#[test]
fn unmap_deallocates_and_write_zeroes_keeps_the_space() {
    let directory = TestDirectory::new("sparse");
    let mut rig = Rig::new();
    let Some(mut channel) = device(&rig, directory.config(1 << 20)) else { return };
    let space = || std::fs::metadata(directory.0.join("file")).unwrap().blocks() * 512;
    assert!(space() < 64 << 10, "a new file is sparse");
    assert_eq!(rig.write(&mut channel, 0, 1024, 7), Status::SUCCESS);
    let full = space();
    assert!(full >= 512 << 10);
    assert_eq!(rig.simple(&mut channel, Op::WriteZeroes, 0, 256, RequestFlags::NONE), Status::SUCCESS);
    assert_eq!(rig.read(&mut channel, 0, 256).unwrap(), vec![0; 128 << 10]);
    assert!(space() >= full, "write zeroes deallocated");
    for (op, flags, lba) in [
        (Op::Unmap, RequestFlags::FUA, 256),
        (Op::WriteZeroes, RequestFlags::DEALLOCATE | RequestFlags::FUA, 512),
    ] {
        let before = space();
        assert_eq!(rig.simple(&mut channel, op, lba, 256, flags), Status::SUCCESS);
        assert_eq!(rig.read(&mut channel, lba, 256).unwrap(), vec![0; 128 << 10]);
        assert!(space() < before, "{op:?} deallocated nothing");
    }
    assert_eq!(rig.read(&mut channel, 768, 256).unwrap(), vec![7; 128 << 10]);
}

#[test]
fn reads_beyond_the_end_of_a_truncated_file_fail() {
    let directory = TestDirectory::new("truncated");
    let mut rig = Rig::new();
    let Some(mut channel) = device(&rig, directory.config(1 << 20)) else { return };
    let file = std::fs::OpenOptions::new().write(true).open(directory.0.join("file")).unwrap();
    file.set_len(512 << 10).unwrap();
    assert_eq!(rig.read(&mut channel, 1500, 8), Err(Status::UNRECOVERED_READ_ERROR));
    assert_eq!(rig.read(&mut channel, 1020, 8), Err(Status::UNRECOVERED_READ_ERROR), "across the end");
    assert_eq!(rig.registry.find("F").unwrap().stats().op(Op::Read).errors, 2);
    uring::rescan(&rig.registry, "F", uring::FileModule::Uring).unwrap();
    assert!(rig.read(&mut channel, 1020, 8).unwrap_err().same_code(Status::LBA_OUT_OF_RANGE));
    file.set_len((2 << 20) + 100).unwrap();
    uring::rescan(&rig.registry, "F", uring::FileModule::Uring).unwrap();
    assert_eq!(channel.blocks(), 4096);
    assert_eq!(field(&rig, "unused_bytes"), Some(InfoValue::Number(100)));
    assert_eq!(rig.write(&mut channel, 4095, 1, 1), Status::SUCCESS);
}

#[test]
fn unsuitable_files_are_rejected_with_a_reason() {
    let directory = TestDirectory::new("refused");
    let rig = Rig::new();
    let Some(channel) = device(&rig, directory.config(1 << 20)) else { return };
    let at = |name: &str| UringConfig::new("G", directory.0.join(name));
    std::fs::write(directory.0.join("small"), [0; 100]).unwrap();
    std::fs::write(directory.0.join("ragged"), [0; 5000]).unwrap();
    std::fs::hard_link(directory.0.join("file"), directory.0.join("link")).unwrap();
    let refuse = |config| uring::create(&rig.registry, config).unwrap_err();
    let missing = refuse(at("missing")).to_string();
    assert!(missing.contains("missing cannot be opened: No such file"), "{missing}");
    assert!(refuse(at("")).to_string().contains("is a directory"));
    assert!(refuse(at("small")).to_string().contains("100 bytes, less than a block of 512"));
    assert!(
        refuse(UringConfig { block_size: Some(1000), ..at("ragged") })
            .to_string()
            .contains("1000 is not a multiple of 512")
    );
    let taken = refuse(at("link"));
    assert!(matches!(&taken, BdevError::Claimed { by, .. } if by == "the bdev F"), "{taken}");
    let ragged = uring::create(&rig.registry, at("ragged")).unwrap();
    assert_eq!(ragged.geometry().blocks, 9);
    assert!(format!("{:?}", ragged.bdev().driver_specific()).contains("(\"unused_bytes\", Number(392))"));
    // A removed device keeps the lock until its last channel is closed.
    rig.registry.unregister("F").unwrap();
    rig.registry.unregister("G").unwrap();
    assert!(matches!(refuse(at("file")), BdevError::Claimed { .. }));
    drop(channel);
    uring::create(&rig.registry, at("file")).unwrap();
}

#[test]
fn a_read_only_device_rejects_writes() {
    let directory = TestDirectory::new("readonly");
    let mut rig = Rig::new();
    std::fs::write(directory.0.join("file"), vec![5; 1 << 20]).unwrap();
    let config = UringConfig { readonly: true, ..UringConfig::new("F", directory.0.join("file")) };
    let Some(mut channel) = device(&rig, config) else { return };
    assert_eq!(rig.read(&mut channel, 0, 1).unwrap(), vec![5; 512]);
    assert!(rig.write(&mut channel, 0, 1, 9).same_code(Status::NAMESPACE_WRITE_PROTECTED));
    assert_eq!(rig.simple(&mut channel, Op::Flush, 0, 0, RequestFlags::NONE), Status::SUCCESS);
    let second = UringConfig { readonly: true, ..UringConfig::new("G", directory.0.join("file")) };
    assert!(matches!(uring::create(&rig.registry, second), Err(BdevError::Claimed { .. })));
}

#[test]
fn a_channel_may_be_dropped_with_io_in_flight() {
    let directory = TestDirectory::new("dropped");
    let mut rig = Rig::new();
    let Some(mut channel) = device(&rig, directory.config(4 << 20)) else { return };
    let mut batch: Vec<Request> =
        (0..100).map(|tag| Request::write(Tag(tag), tag * 8, 8, rig.buffer(4096, 1))).collect();
    channel.submit(&mut batch);
    drop(channel);
    // The index of the old file must not be reused for the next one.
    std::fs::write(directory.0.join("other"), vec![0; 4 << 20]).unwrap();
    uring::create(&rig.registry, UringConfig::new("G", directory.0.join("other"))).unwrap();
    let mut other = rig.registry.open("G", Access::ReadWrite).unwrap().channel(&rig.core).unwrap();
    // The disk decides how long the writes take; for at most a minute, so that a failure does not hang.
    let is_written = || {
        let first = std::fs::read(directory.0.join("file")).unwrap();
        first[..100 * 4096].iter().all(|byte| *byte == 1)
    };
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !is_written() {
        assert!(std::time::Instant::now() < end, "the writes do not end");
        rig.reactor.turn();
    }
    assert_eq!(rig.read(&mut other, 0, 800).unwrap(), vec![0; 800 * 512]);
}

#[test]
fn io_beyond_the_capacity_of_the_ring_is_retried() {
    let directory = TestDirectory::new("stalled");
    let mut rig = Rig::new();
    let events = os::EventLoopConfig { backend: None, operations_max: 64 };
    let config = reactor::ReactorConfig {
        event_loop: events,
        idle: reactor::IdlePolicy::Spin,
        ..reactor::ReactorConfig::default()
    };
    rig.reactor = reactor::Reactor::new(&config).unwrap();
    rig.core = rig.reactor.core();
    let Some(mut channel) = device(&rig, directory.config(4 << 20)) else { return };
    let batch: Vec<Request> =
        (0..400).map(|tag| Request::write(Tag(tag), tag * 8, 8, rig.buffer(4096, tag as u8))).collect();
    assert!(rig.run(&mut channel, batch).iter().all(|completion| completion.status().is_success()));
    for tag in [0, 63, 64, 255, 256, 399] {
        assert_eq!(rig.read(&mut channel, tag * 8, 8).unwrap(), vec![tag as u8; 4096]);
    }
}

#[test]
fn a_submission_thread_executes_what_the_ring_of_the_core_does() {
    let directory = TestDirectory::new("sqpoll");
    let mut rig = Rig::new();
    let polling = os::UringPolling { sqpoll: true, ..os::UringPolling::default() };
    let config = UringConfig { polling, ..directory.config(1 << 20) };
    let created = uring::create(&rig.registry, config);
    if let Err(error) = &created
        && error.to_string().contains("io_uring_setup")
    {
        return println!("SKIPPED: {error}");
    }
    created.unwrap();
    assert_eq!(field(&rig, "sqpoll"), Some(InfoValue::Bool(true)));
    let mut channel = rig.registry.open("F", Access::ReadWrite).unwrap().channel(&rig.core).unwrap();
    // More than its depth, by several flows, some durable; then what the ring itself cannot do.
    let batch: Vec<Request> = (0..600)
        .map(|index| {
            let mut request = Request::write(Tag(index), index, 1, rig.buffer(512, index as u8));
            request.flow = (index % 3) as u16;
            request.flags = if index % 5 == 0 { RequestFlags::FUA } else { RequestFlags::NONE };
            request
        })
        .collect();
    let done = rig.run(&mut channel, batch);
    assert!(done.iter().enumerate().all(|(index, one)| {
        one.status().is_success()
            && one.tag().0 == index as u64
            && usize::from(one.request().flow) == index % 3
    }));
    assert_eq!(rig.simple(&mut channel, Op::Flush, 0, 0, RequestFlags::NONE), Status::SUCCESS);
    assert_eq!(rig.simple(&mut channel, Op::Unmap, 8, 8, RequestFlags::FUA), Status::SUCCESS);
    let slices = Data::gather((0..4).map(|_| rig.buffer(4096, 0xcc)).collect()).unwrap();
    let read = rig.one(&mut channel, Request::read(Tag(1), 0, 32, slices));
    assert_eq!(read.status(), Status::SUCCESS);
    let mut bytes = vec![0; 32 * 512];
    read.into_request().take_data().unwrap().copy_to(0, &mut bytes);
    for (index, block) in bytes.chunks(512).enumerate() {
        let expected = if (8..16).contains(&index) { 0 } else { index as u8 };
        assert!(block.iter().all(|byte| *byte == expected), "block {index}");
    }
    // The end of a file that was truncated is found by the core's ring, which gets what came back short.
    let file = std::fs::OpenOptions::new().write(true).open(directory.0.join("file")).unwrap();
    file.set_len(512 << 10).unwrap();
    assert_eq!(rig.read(&mut channel, 1020, 8), Err(Status::UNRECOVERED_READ_ERROR));
}

#[test]
fn a_file_that_cannot_be_polled_is_refused_with_what_to_do() {
    let directory = TestDirectory::new("iopoll");
    let mut rig = Rig::new();
    let polling = os::UringPolling { iopoll: true, ..os::UringPolling::default() };
    match uring::create(&rig.registry, UringConfig { polling, ..directory.config(1 << 20) }) {
        Err(error) => {
            let text = error.to_string();
            assert!(text.starts_with("iopoll: "), "{text}");
            assert!(text.contains("poll_queues") || text.contains("direct I/O only"), "{text}");
        }
        // On a device with polled queues.
        Ok(_) => {
            let mut channel = rig.registry.open("F", Access::ReadWrite).unwrap().channel(&rig.core).unwrap();
            assert_eq!(rig.write(&mut channel, 0, 64, 7), Status::SUCCESS);
            assert_eq!(rig.read(&mut channel, 0, 64).unwrap(), vec![7; 64 * 512]);
            assert_eq!(rig.simple(&mut channel, Op::Flush, 0, 0, RequestFlags::NONE), Status::SUCCESS);
        }
    }
    let buffered = UringConfig { polling, direct: false, ..directory.config(1 << 20) };
    if rig.registry.find("F").is_none() {
        let text = uring::create(&rig.registry, buffered).unwrap_err().to_string();
        assert!(text.contains("direct I/O only"), "{text}");
    }
    let null = uring::create(&rig.registry, UringConfig::new("N", "/dev/null")).unwrap_err().to_string();
    assert!(null.contains("nor an NVMe generic device"), "{null}");
}

#[test]
fn a_file_keeps_its_uuid_and_a_copy_gets_its_own() {
    let directory = TestDirectory::new("identity");
    let rig = Rig::new();
    let create = |name: &str, file: &str, readonly: bool| {
        let config = UringConfig { readonly, ..UringConfig::new(name, directory.0.join(file)) };
        uring::create(&rig.registry, config).map(|device| device.uuid())
    };
    let source = |name: &str| {
        let specific = rig.registry.find(name).unwrap().bdev().driver_specific();
        let InfoValue::Object(fields) = &specific[0].1 else { panic!("{specific:?}") };
        let value = &fields.iter().find(|(key, _)| *key == "uuid_source").unwrap().1;
        let InfoValue::Text(text) = value else { panic!("{value:?}") };
        text.clone()
    };
    let remove = |name: &str| {
        let device = rig.registry.unregister(name).unwrap();
        assert!(device.wait_closed(std::time::Duration::from_secs(10)));
    };
    std::fs::write(directory.0.join("one"), vec![0; 8192]).unwrap();
    let first = match create("One", "one", false) {
        Err(error @ BdevError::NoFileIo { .. }) => return eprintln!("SKIPPED: {error}"),
        created => created.unwrap(),
    };
    if source("One") == "random" {
        return eprintln!("SKIPPED: the file system has no extended attributes");
    }
    assert_eq!(source("One"), "file");
    remove("One");
    // By any path, and read-only too.
    std::fs::rename(directory.0.join("one"), directory.0.join("two")).unwrap();
    assert_eq!(create("Two", "two", true).unwrap(), first);
    remove("Two");
    // A copy that takes the attribute along.
    let copy = std::process::Command::new("cp")
        .args(["--archive", "two", "copy"])
        .current_dir(&directory.0)
        .status()
        .unwrap();
    assert!(copy.success());
    assert_eq!(create("Two", "two", false).unwrap(), first);
    let second = create("Copy", "copy", false).unwrap();
    assert_ne!(second, first);
    remove("Copy");
    assert_eq!(create("Copy", "copy", false).unwrap(), second, "it keeps the new one");
    remove("Copy");
    // One that is told apart by nothing is refused by name.
    let given = UringConfig { uuid: Some(second), ..UringConfig::new("Given", directory.0.join("three")) };
    std::fs::write(directory.0.join("three"), vec![0; 8192]).unwrap();
    uring::create(&rig.registry, given).unwrap();
    let error = create("Copy", "copy", false).unwrap_err();
    assert!(matches!(&error, BdevError::SameIdentity { other, .. } if other == "Given"), "{error}");
}

/// A loop device on a file of 16 MiB, detached at the end of the test.
struct LoopDevice {
    node: PathBuf,
    mount_point: PathBuf,
    directory: TestDirectory,
}

impl LoopDevice {
    /// `None` if this machine has no loop devices that the test may use; prints the reason.
    fn new(name: &str) -> Option<LoopDevice> {
        let directory = TestDirectory::new(name);
        let file = directory.0.join("disk");
        std::fs::write(&file, vec![0; 16 << 20]).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
        let made = match made {
            Ok(made) if made.status.success() => made,
            other => {
                println!("SKIPPED {name}: no loop device can be made: {other:?}");
                return None;
            }
        };
        let node = PathBuf::from(String::from_utf8(made.stdout).unwrap().trim());
        let mount_point = directory.0.join("mounted");
        std::fs::create_dir(&mount_point).unwrap();
        Some(LoopDevice { node, mount_point, directory })
    }

    fn run(&self, program: &str, arguments: &[&std::ffi::OsStr]) -> bool {
        Command::new(program).args(arguments).output().is_ok_and(|done| done.status.success())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        self.run("umount", &[self.mount_point.as_ref()]);
        self.run("losetup", &["--detach".as_ref(), self.node.as_ref()]);
        let _ = &self.directory;
    }
}

#[test]
fn a_block_device_in_use_is_refused_and_one_of_ours_is_not_mounted() {
    let Some(disk) = LoopDevice::new("in-use") else { return };
    let rig = Rig::new();
    let create = |name: &str, change: fn(&mut UringConfig)| {
        let mut config = UringConfig::new(name, &disk.node);
        change(&mut config);
        let created = uring::create(&rig.registry, config);
        let refused = created.err();
        rig.registry.unregister(name).ok();
        refused
    };
    let exclusive = {
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::EXCL | rustix::fs::OFlags::CLOEXEC;
        rustix::fs::open(&disk.node, flags, rustix::fs::Mode::empty()).unwrap()
    };
    match create("A", |_| {}) {
        Some(error @ BdevError::NoFileIo { .. }) => return println!("SKIPPED in-use: {error}"),
        Some(BdevError::InUse { by, .. }) => assert!(by.contains("open exclusively"), "{by}"),
        other => panic!("{other:?}"),
    }
    let is_created = |refused: Option<BdevError>| assert!(refused.is_none(), "{refused:?}");
    is_created(create("A", |config| config.force = true));
    is_created(create("A", |config| config.readonly = true));
    drop(exclusive);
    // A process that another test starts may have the descriptor until it executes its program.
    let refused = (0..1000).find_map(|_| match create("A", |_| {}) {
        Some(BdevError::InUse { .. }) => {
            std::thread::sleep(std::time::Duration::from_millis(10));
            None
        }
        other => Some(other),
    });
    is_created(refused.expect("the device is free"));
    let node = disk.node.as_os_str();
    if !disk.run("mkfs.ext4", &["-q".as_ref(), node]) {
        return println!("SKIPPED mounts: no mkfs.ext4");
    }
    uring::create(&rig.registry, UringConfig::new("B", &disk.node)).unwrap();
    assert!(!disk.run("mount", &[node, disk.mount_point.as_ref()]), "it is ours");
    rig.registry.unregister("B").unwrap();
    if !disk.run("mount", &[node, disk.mount_point.as_ref()]) {
        return println!("SKIPPED mounts: ext4 cannot be mounted");
    }
    let Some(refused) = create("A", |_| {}) else { panic!("a mounted device is used") };
    let (text, at) = (refused.to_string(), disk.mount_point.display().to_string());
    assert!(text.contains(&format!("is mounted at {at}")) && text.contains("`force`"), "{text}");
}

#[test]
fn a_loop_device_and_the_file_behind_it_have_one_user() {
    let Some(disk) = LoopDevice::new("loop-file") else { return };
    let rig = Rig::new();
    let file = disk.directory.0.join("disk");
    let other = std::fs::File::options().read(true).write(true).open(&file).unwrap();
    let locked = |timeout| file_lock::lock(&other, file_lock::LockMode::Exclusive, timeout);
    locked(std::time::Duration::ZERO).unwrap();
    match uring::create(&rig.registry, UringConfig::new("A", &disk.node)).err() {
        Some(error @ BdevError::NoFileIo { .. }) => return println!("SKIPPED loop-file: {error}"),
        Some(BdevError::Claimed { by, .. }) => {
            assert!(by.contains(&format!("on its file {}", file.display())), "{by}");
        }
        other => panic!("{other:?}"),
    }
    rustix::fs::flock(&other, rustix::fs::FlockOperation::Unlock).unwrap();
    uring::create(&rig.registry, UringConfig::new("A", &disk.node)).unwrap();
    assert!(locked(std::time::Duration::ZERO).is_err(), "the loop device is in use");
    let removed = rig.registry.unregister("A").unwrap();
    assert!(removed.wait_closed(std::time::Duration::from_secs(60)));
    // A program that another test starts has a copy of the descriptor until it runs.
    locked(std::time::Duration::from_secs(60)).unwrap();
}

#[test]
fn without_io_uring_devices_on_files_are_refused_with_the_reason() {
    let (rig, directory) = (Rig::new(), TestDirectory::new("no-io-uring"));
    rig.registry.refuse_files("locked memory is limited");
    let error = uring::create(&rig.registry, directory.config(1 << 20)).err();
    assert!(matches!(&error, Some(BdevError::NoFileIo { reason }) if reason.contains("locked")), "{error:?}");
    assert!(!directory.0.join("file").exists(), "nothing was created");
    let refusal = |errno| uring::ring_refusal(&std::io::Error::from_raw_os_error(errno));
    // ENOMEM, EPERM, ENOSYS, EMFILE.
    for (errno, hint) in [(12, "RLIMIT_MEMLOCK"), (1, "io_uring_disabled"), (38, "kernel"), (24, "ulimit -n")]
    {
        assert!(refusal(errno).contains(hint), "{errno}: {}", refusal(errno));
    }
}
