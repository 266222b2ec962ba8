//! The AIO device on real files, by reactors with and without io_uring.
#![allow(clippy::unwrap_used)]

mod rig;

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use bdev::uring::{self, AioConfig, FileModule, UringConfig};
use bdev::{Access, AsyncChannel, BdevChannel, BdevError, InfoValue, Registry, Request};
use block_io::{Channel as _, Op, Payload, RequestFlags, Status, Tag};
use dma::Data;
use os::EventBackend;
use reactor::{IdlePolicy, Reactor, ReactorConfig};
use rig::Rig;

/// A directory that is removed at the end of the test.
struct AioDirectory(PathBuf);

impl AioDirectory {
    fn new(name: &str) -> AioDirectory {
        let path =
            PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("aio-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        AioDirectory(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("file")
    }

    fn config(&self, bytes: u64, fallocate: bool) -> UringConfig {
        UringConfig {
            create_bytes: Some(bytes),
            ..config(&self.file(), AioConfig { fallocate, nowait: false })
        }
    }
}

impl Drop for AioDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn config(path: &Path, aio: AioConfig) -> UringConfig {
    UringConfig { aio: Some(aio), ..UringConfig::new("F", path) }
}

/// A rig without io_uring, or with it where the machine has it.
fn rig(backend: EventBackend) -> Option<Rig> {
    let arena = dma::Arena::new(dma::ArenaConfig {
        limit_bytes: 256 << 20,
        hugepages: false,
        ..dma::ArenaConfig::default()
    });
    let event_loop = os::EventLoopConfig { backend: Some(backend), ..os::EventLoopConfig::default() };
    let config = ReactorConfig { idle: IdlePolicy::Spin, arena, event_loop, ..ReactorConfig::default() };
    match Reactor::new(&config) {
        Ok(reactor) => Some(Rig { core: reactor.core(), reactor, registry: Registry::new() }),
        Err(error) => {
            eprintln!("SKIPPED: no {backend:?}: {error}");
            None
        }
    }
}

fn epoll() -> Rig {
    let rig = rig(EventBackend::Epoll).unwrap();
    rig.registry.refuse_files("io_uring is forbidden");
    rig
}

fn device(rig: &Rig, config: UringConfig) -> BdevChannel {
    uring::create(&rig.registry, config).unwrap();
    rig.registry.open("F", Access::ReadWrite).unwrap().channel(&rig.core).unwrap()
}

fn field(rig: &Rig, name: &str) -> Option<InfoValue> {
    let specific = rig.registry.find("F").unwrap().bdev().driver_specific();
    let (module, InfoValue::Object(fields)) = &specific[0] else { panic!("{specific:?}") };
    assert_eq!(*module, "aio");
    fields.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone())
}

#[test]
fn written_data_is_in_the_file_with_and_without_io_uring() {
    for backend in [EventBackend::Epoll, EventBackend::Uring] {
        for direct in [true, false] {
            let directory = AioDirectory::new(&format!("written-{backend:?}-{direct}"));
            let Some(mut rig) = rig(backend) else { continue };
            let mut channel = device(&rig, UringConfig { direct, ..directory.config(4 << 20, false) });
            assert_eq!(rig.registry.find("F").unwrap().bdev().product_name(), "AIO disk");
            // More than the context takes, some durable, some of several slices.
            let batch: Vec<Request> = (0..400)
                .map(|index| {
                    let fill = (index as u8).wrapping_add(1);
                    let mut request = match index % 3 {
                        0 => {
                            let slices = vec![rig.buffer(4096, fill), rig.buffer(4096, fill)];
                            Request::write(Tag(index), index * 16, 16, Data::gather(slices).unwrap())
                        }
                        _ => Request::write(Tag(index), index * 16, 16, rig.buffer(8192, fill)),
                    };
                    request.flags = if index % 2 == 0 { RequestFlags::FUA } else { RequestFlags::NONE };
                    request
                })
                .collect();
            assert!(rig.run(&mut channel, batch).iter().all(|done| done.status().is_success()));
            assert_eq!(rig.simple(&mut channel, Op::Flush, 0, 0, RequestFlags::NONE), Status::SUCCESS);
            let contents = std::fs::read(directory.file()).unwrap();
            for (index, chunk) in contents.chunks(8192).take(400).enumerate() {
                assert!(chunk.iter().all(|byte| *byte == (index as u8).wrapping_add(1)), "{index}");
            }
            assert_eq!(rig.read(&mut channel, 16 * 63, 1).unwrap(), vec![64; 512]);
        }
    }
}

#[test]
fn a_sleeping_core_wakes_when_operations_end() {
    let directory = AioDirectory::new("sleep");
    let event_loop =
        os::EventLoopConfig { backend: Some(EventBackend::Epoll), ..os::EventLoopConfig::default() };
    let config = ReactorConfig { idle: IdlePolicy::Sleep, event_loop, ..ReactorConfig::default() };
    let reactor = Reactor::new(&config).unwrap();
    let (core, registry) = (reactor.core(), Registry::new());
    uring::create(&registry, directory.config(4 << 20, true)).unwrap();
    let descriptor = registry.open("F", Access::ReadWrite).unwrap();
    let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
    let start = Instant::now();
    reactor.block_on(async move {
        for round in 0..200u64 {
            let mut buffer = core.pool().take(4096).unwrap();
            buffer.as_mut_slice().fill(round as u8);
            io.write(round % 100 * 8, buffer).await.unwrap();
            if round % 10 == 0 {
                io.flush().await.unwrap();
                io.write_zeroes(4096, 64).await.unwrap();
            }
        }
    });
    // A wake-up that is lost takes as long as the next other event, if there is one.
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn fallocate_decides_about_unmap_and_how_zeroes_are_written() {
    for fallocate in [false, true] {
        let directory = AioDirectory::new(&format!("fallocate-{fallocate}"));
        let mut rig = epoll();
        let mut channel = device(&rig, directory.config(1 << 20, fallocate));
        assert_eq!(field(&rig, "fallocate"), Some(InfoValue::Bool(fallocate)));
        assert_eq!(field(&rig, "nowait"), Some(InfoValue::Bool(false)));
        let space = || std::fs::metadata(directory.file()).unwrap().blocks() * 512;
        assert_eq!(rig.write(&mut channel, 0, 2048, 7), Status::SUCCESS);
        let full = space();
        let device = rig.registry.find("F").unwrap();
        assert_eq!((device.supports(Op::Unmap), device.supports(Op::WriteZeroes)), (fallocate, true));
        let unmapped = rig.simple(&mut channel, Op::Unmap, 1024, 1024, RequestFlags::FUA);
        if fallocate {
            assert_eq!(unmapped, Status::SUCCESS);
            assert!(space() <= full - (256 << 10), "nothing is deallocated");
            assert_eq!(rig.read(&mut channel, 1024, 8).unwrap(), vec![0; 4096]);
        } else {
            assert!(unmapped.same_code(Status::INVALID_OPCODE), "{unmapped:?}");
            assert_eq!((space(), rig.read(&mut channel, 1024, 8).unwrap()), (full, vec![7; 4096]));
        }
        let left = space();
        for flags in [RequestFlags::NONE, RequestFlags::FUA] {
            assert_eq!(rig.simple(&mut channel, Op::WriteZeroes, 3, 700, flags), Status::SUCCESS);
        }
        assert!(space() >= left);
        assert_eq!(rig.read(&mut channel, 2, 702).unwrap()[..512], [7; 512]);
        assert_eq!(rig.read(&mut channel, 3, 700).unwrap(), vec![0; 700 * 512]);
        assert_eq!(rig.read(&mut channel, 703, 1).unwrap(), [7; 512]);
    }
}

#[test]
fn a_read_only_device_takes_no_writes() {
    let directory = AioDirectory::new("readonly");
    let mut rig = epoll();
    std::fs::write(directory.file(), vec![5; 1 << 20]).unwrap();
    let aio = AioConfig { fallocate: true, nowait: false };
    let mut channel = device(&rig, UringConfig { readonly: true, ..config(&directory.file(), aio) });
    assert_eq!(rig.read(&mut channel, 0, 1).unwrap(), vec![5; 512]);
    assert!(rig.write(&mut channel, 0, 1, 9).same_code(Status::NAMESPACE_WRITE_PROTECTED));
    let device = rig.registry.find("F").unwrap();
    for op in [Op::Write, Op::Unmap, Op::WriteZeroes] {
        assert!(!device.supports(op), "{op:?}");
    }
    assert!(std::fs::read(directory.file()).unwrap().iter().all(|byte| *byte == 5));
}

#[test]
fn reads_beyond_the_end_of_a_file_that_shrank_fail_and_a_rescan_tells() {
    let directory = AioDirectory::new("truncated");
    let mut rig = epoll();
    let mut channel = device(&rig, directory.config(1 << 20, false));
    let file = std::fs::OpenOptions::new().write(true).open(directory.file()).unwrap();
    file.set_len(512 << 10).unwrap();
    assert_eq!(rig.read(&mut channel, 1500, 8), Err(Status::UNRECOVERED_READ_ERROR));
    assert_eq!(rig.read(&mut channel, 1020, 8), Err(Status::UNRECOVERED_READ_ERROR), "across the end");
    assert!(matches!(uring::rescan(&rig.registry, "F", FileModule::Uring), Err(BdevError::WrongKind { .. })));
    uring::rescan(&rig.registry, "F", FileModule::Aio).unwrap();
    assert!(rig.read(&mut channel, 1020, 8).unwrap_err().same_code(Status::LBA_OUT_OF_RANGE));
    file.set_len(2 << 20).unwrap();
    uring::rescan(&rig.registry, "F", FileModule::Aio).unwrap();
    assert_eq!(channel.blocks(), 4096);
    assert_eq!(rig.write(&mut channel, 4095, 1, 1), Status::SUCCESS);
}

#[test]
fn seeks_find_data_without_io_uring() {
    let directory = AioDirectory::new("seeks");
    let mut rig = epoll();
    let mut channel = device(&rig, directory.config(16 << 20, false));
    let file = std::fs::File::options().write(true).open(directory.file()).unwrap();
    file.write_all_at(&vec![7; 1 << 20], 4 << 20).unwrap();
    let completion = rig.one(&mut channel, Request::new(Tag(1), Op::SeekData, 0, 32 << 10));
    assert!(matches!(completion.into_request().payload, Payload::Found(Some(8192))));
}

#[test]
fn a_channel_may_be_dropped_with_io_in_flight_and_takes_no_time() {
    let directory = AioDirectory::new("dropped");
    let mut rig = epoll();
    let mut channel = device(&rig, directory.config(4 << 20, true));
    let mut batch: Vec<Request> =
        (0..100).map(|tag| Request::write(Tag(tag), tag * 8, 8, rig.buffer(4096, 1))).collect();
    batch.push(Request::new(Tag(100), Op::Flush, 0, 0));
    batch.push(Request::new(Tag(101), Op::Unmap, 4096, 4096));
    channel.submit(&mut batch);
    let start = Instant::now();
    drop(channel);
    // The kernel takes 20 ms and more to destroy a context, but not here.
    assert!(start.elapsed() < Duration::from_millis(15), "{:?}", start.elapsed());
    rig.registry.unregister("F").unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while !std::fs::read(directory.file()).unwrap()[..100 * 4096].iter().all(|byte| *byte == 1) {
        assert!(Instant::now() < end, "the writes do not end");
        rig.reactor.turn();
    }
}

#[test]
fn nowait_is_for_block_devices_and_character_devices_are_refused() {
    let directory = AioDirectory::new("nowait");
    let rig = epoll();
    let nowait = AioConfig { fallocate: false, nowait: true };
    let refused = UringConfig { aio: Some(nowait), ..directory.config(1 << 20, false) };
    match uring::create(&rig.registry, refused) {
        Err(BdevError::File { source, .. }) => assert_eq!(source.raw_os_error(), Some(95)),
        other => panic!("{:?}", other.err()),
    }
    let null = uring::create(&rig.registry, config(Path::new("/dev/null"), AioConfig::default()));
    assert!(null.err().unwrap().to_string().contains("neither a file nor a block device"));
    for (errno, hint) in [(11, "fs.aio-max-nr"), (1, "seccomp"), (38, "kernel")] {
        let text = uring::aio_refusal(&std::io::Error::from_raw_os_error(errno));
        assert!(text.contains(hint), "{errno}: {text}");
    }
}

/// What is undone at the end of a test by a program.
struct UndoneBy(&'static str, Vec<std::ffi::OsString>);

impl Drop for UndoneBy {
    fn drop(&mut self) {
        let _ = Command::new(self.0).args(&self.1).output();
    }
}

#[test]
fn a_full_file_system_is_no_capacity() {
    let directory = AioDirectory::new("full");
    let mount =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "none"]).arg(&directory.0).output();
    if !mount.is_ok_and(|mount| mount.status.success()) {
        return eprintln!("SKIPPED: no file system can be mounted");
    }
    let _mounted = UndoneBy("umount", vec!["--lazy".into(), directory.0.clone().into()]);
    let mut rig = epoll();
    let mut channel = device(&rig, directory.config(4 << 20, false));
    assert_eq!(rig.write(&mut channel, 0, 1024, 1), Status::SUCCESS);
    let statuses: Vec<Status> = (1..8).map(|at| rig.write(&mut channel, at * 1024, 1024, 1)).collect();
    assert!(statuses.contains(&Status::CAPACITY_EXCEEDED), "{statuses:?}");
    assert!(rig.read(&mut channel, 0, 1024).is_ok());
    drop(channel);
}

#[test]
fn a_loop_device_carries_data_with_and_without_nowait() {
    for nowait in [false, true] {
        let directory = AioDirectory::new(&format!("loop-{nowait}"));
        std::fs::write(directory.file(), vec![0; 16 << 20]).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(directory.file()).output();
        let node = match made {
            Ok(made) if made.status.success() => {
                PathBuf::from(String::from_utf8(made.stdout).unwrap().trim())
            }
            other => return eprintln!("SKIPPED: no loop device can be made: {other:?}"),
        };
        let _detached = UndoneBy("losetup", vec!["--detach".into(), node.clone().into()]);
        let mut rig = epoll();
        let mut channel = device(&rig, config(&node, AioConfig { fallocate: true, nowait }));
        assert_eq!(field(&rig, "nowait"), Some(InfoValue::Bool(nowait)));
        assert_eq!(field(&rig, "direct"), Some(InfoValue::Bool(true)));
        let write = |index: u64| Request::write(Tag(index), index * 16, 16, rig.buffer(8192, index as u8));
        let batch: Vec<Request> = (0..600).map(write).collect();
        assert!(rig.run(&mut channel, batch).iter().all(|done| done.status().is_success()));
        assert_eq!(rig.simple(&mut channel, Op::Flush, 0, 0, RequestFlags::NONE), Status::SUCCESS);
        for index in [0, 127, 128, 599] {
            assert_eq!(rig.read(&mut channel, index * 16, 16).unwrap(), vec![index as u8; 8192]);
        }
        assert_eq!(rig.simple(&mut channel, Op::Unmap, 64, 64, RequestFlags::NONE), Status::SUCCESS);
        assert_eq!(rig.read(&mut channel, 64, 64).unwrap(), vec![0; 64 * 512]);
        drop(channel);
        rig.registry.unregister("F").unwrap();
    }
}
