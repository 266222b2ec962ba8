//! Every engine on a regular file.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::PathBuf;

use block_io::{Channel, Completion, Op, Request, Status, Tag};
use dma::{Arena, Data, Pool};
use io_engines::{
    AnyEngine, EngineConfig, EngineFile, EngineKind, EngineOpenError, FileAccess, FileOpenOptions, IoEngine,
    SyncMode, UringPolling, WriteLock,
};
use os::RequestPriorities;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

const DEPTH: u32 = 8;
const BLOCK: usize = 4096;
const BLOCKS: u64 = 256;

fn layout(access: FileAccess, direct: bool) -> FileOpenOptions {
    FileOpenOptions {
        access,
        direct,
        sync: SyncMode::None,
        buffered_block_bytes: 512,
        allow_mounted_write: false,
        grows_to: 0,
    }
}

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("ringbolt-engines-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Scratch(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn requests(pool: &Pool) -> Vec<Request<Data>> {
    (0..DEPTH).map(|tag| Request::read(Tag(tag.into()), 0, 0, pool.take(BLOCK).unwrap())).collect()
}

fn finish(engine: &mut AnyEngine, batch: &mut Vec<Request<Data>>, count: usize) -> Vec<Completion<Data>> {
    let mut done = Vec::new();
    while done.len() < count {
        engine.submit(batch);
        if engine.poll(&mut done) == 0 {
            engine.wait(1_000_000_000);
        }
    }
    assert_eq!((batch.len(), engine.in_flight()), (0, 0));
    done
}

/// Writes a pattern to the whole file, flushes, reads it back out of order, and reads beyond the end.
fn exercise(config: &EngineConfig, path: &str, direct: bool) {
    EngineFile::lay_out(path, BLOCKS * BLOCK as u64, false, 1).unwrap();
    let files = vec![EngineFile::open(path, &layout(FileAccess::ReadWrite, direct)).unwrap()];
    let unit = u64::from(files[0].block_bytes());
    let blocks = (BLOCK as u64 / unit) as u32;
    assert_eq!(files[0].bytes(), BLOCKS * BLOCK as u64);
    let pool = Pool::new(&Arena::new(dma::ArenaConfig { hugepages: false, ..Default::default() }));
    let mut batch = requests(&pool);
    let mut engine = io_engines::open(config, files, &batch).unwrap();
    for first in (0..BLOCKS).step_by(DEPTH as usize) {
        for (request, number) in batch.iter_mut().zip(first..) {
            (request.op, request.lba, request.blocks) = (Op::Write, number * BLOCK as u64 / unit, blocks);
            request.data_mut().and_then(Data::single_mut).unwrap().as_mut_slice().fill(number as u8);
        }
        let done = finish(&mut engine, &mut batch, DEPTH as usize);
        assert!(done.iter().all(|one| one.status() == Status::SUCCESS), "{:?}", done[0].status());
        batch = done.into_iter().map(Completion::into_request).collect();
    }
    let rest = batch.split_off(1);
    batch[0].op = Op::Flush;
    let done = finish(&mut engine, &mut batch, 1);
    assert_eq!(done[0].status(), Status::SUCCESS);
    batch = done.into_iter().map(Completion::into_request).chain(rest).collect();
    for first in (0..BLOCKS).step_by(DEPTH as usize) {
        for (request, number) in batch.iter_mut().zip(first..) {
            let number = number * 37 % BLOCKS;
            (request.op, request.lba, request.blocks) = (Op::Read, number * BLOCK as u64 / unit, blocks);
        }
        let done = finish(&mut engine, &mut batch, DEPTH as usize);
        for one in &done {
            let number = one.request().lba * unit / BLOCK as u64;
            let bytes = one.request().data().and_then(Data::single).unwrap().as_slice();
            assert!(one.status().is_success() && bytes.iter().all(|byte| *byte == number as u8), "{number}");
        }
        batch = done.into_iter().map(Completion::into_request).collect();
    }
    // A read beyond the end of the file fails.
    let rest = batch.split_off(1);
    (batch[0].op, batch[0].lba) = (Op::Read, BLOCKS * BLOCK as u64 / unit);
    let done = finish(&mut engine, &mut batch, 1);
    assert_eq!(done[0].status(), Status::DATA_TRANSFER_ERROR);
    drop((done, rest));
}

#[test]
fn requests_have_their_own_io_priority() {
    let scratch = Scratch::new("priorities");
    EngineFile::lay_out(scratch.path(), BLOCKS * BLOCK as u64, false, 1).unwrap();
    let pool = Pool::new(&Arena::new(dma::ArenaConfig { hugepages: false, ..Default::default() }));
    for (kind, nonvectored, fixed_buffers) in [
        (EngineKind::Libaio, true, false),
        (EngineKind::Uring, true, false),
        (EngineKind::Uring, false, false),
        (EngineKind::Uring, true, true),
    ] {
        let priorities = RequestPriorities::new(DEPTH);
        // The kernel rejects a class that does not exist, and so proves that it reads the priority.
        priorities.set(1, RequestPriorities::value(7, 0));
        priorities.set(2, RequestPriorities::value(3, 7));
        let config = EngineConfig {
            kind,
            depth: DEPTH,
            nonvectored,
            fixed_buffers,
            priorities: Some(priorities.clone()),
            ..EngineConfig::default()
        };
        let file = EngineFile::open(scratch.path(), &layout(FileAccess::ReadWrite, false)).unwrap();
        let mut batch = requests(&pool);
        batch.iter_mut().for_each(|request| request.blocks = 8);
        batch[3].op = Op::Write;
        let mut engine = io_engines::open(&config, vec![file], &batch).unwrap();
        let mut done = finish(&mut engine, &mut batch, DEPTH as usize);
        done.sort_by_key(Completion::tag);
        let failed: Vec<u64> =
            done.iter().filter(|one| one.status() == Status::INVALID_FIELD).map(|one| one.tag().0).collect();
        assert_eq!(failed, [1], "{kind:?}");
        // Without the priority the same request succeeds, and a flush has none.
        batch = done.into_iter().map(Completion::into_request).filter(|one| one.tag.0 < 2).collect();
        batch[0].op = Op::Flush;
        priorities.set(0, RequestPriorities::value(7, 0));
        priorities.set(1, 0);
        let done = finish(&mut engine, &mut batch, 2);
        assert!(done.iter().all(|one| one.status().is_success()), "{kind:?}: {done:?}");
    }
}

#[test]
fn files_are_allocated_and_truncated() {
    let scratch = Scratch::new("allocated");
    let pool = Pool::new(&Arena::new(dma::ArenaConfig { hugepages: false, ..Default::default() }));
    let length = || std::fs::metadata(scratch.path()).unwrap().len();
    EngineFile::lay_out(scratch.path(), 4096, false, 1).unwrap();
    let perform = |kind, op, lba: u64| {
        let file = EngineFile::open(scratch.path(), &layout(FileAccess::ReadWrite, false)).unwrap();
        let mut request = Request::read(Tag(0), lba, 8, pool.take(4096).unwrap());
        request.op = op;
        if op == Op::Unmap {
            drop(request.take_data());
        }
        let mut batch = vec![request];
        let config = EngineConfig { kind, ..EngineConfig::default() };
        let mut engine = io_engines::open(&config, vec![file], &[]).unwrap();
        finish(&mut engine, &mut batch, 1)[0].status()
    };
    // A write extends the file, a read allocates beyond its end without extending it.
    assert_eq!((perform(EngineKind::Allocate, Op::Write, 8), length()), (Status::SUCCESS, 8192));
    assert_eq!((perform(EngineKind::Allocate, Op::Read, 64), length()), (Status::SUCCESS, 8192));
    assert_eq!((perform(EngineKind::Allocate, Op::Unmap, 0), length()), (Status::SUCCESS, 8192));
    assert_eq!((perform(EngineKind::Truncate, Op::Write, 3), length()), (Status::SUCCESS, 1536));
    let device = vec![EngineFile::open("/dev/zero", &layout(FileAccess::ReadWrite, false)).unwrap()];
    let config = EngineConfig { kind: EngineKind::Truncate, ..EngineConfig::default() };
    assert!(matches!(io_engines::open(&config, device, &[]), Err(EngineOpenError::File { .. })));
}

#[test]
fn a_truncated_file_fails_the_io_of_its_mapping() {
    let scratch = Scratch::new("mapped");
    EngineFile::lay_out(scratch.path(), 16 << 10, false, 1).unwrap();
    let pool = Pool::new(&Arena::new(dma::ArenaConfig { hugepages: false, ..Default::default() }));
    let config = EngineConfig { kind: EngineKind::Mapped, ..EngineConfig::default() };
    let open = |access, grows_to| {
        let options = FileOpenOptions { grows_to, ..layout(access, false) };
        io_engines::open(&config, vec![EngineFile::open(scratch.path(), &options).unwrap()], &[])
    };
    let perform = |engine: &mut AnyEngine, op, lba: u64| {
        let mut request = Request::read(Tag(0), lba, 8, pool.take(4096).unwrap());
        request.op = op;
        finish(engine, &mut vec![request], 1)[0].status()
    };
    let mut engine = open(FileAccess::ReadOnly, 0).unwrap();
    assert_eq!(perform(&mut engine, Op::Read, 0), Status::SUCCESS);
    assert_eq!(perform(&mut engine, Op::Write, 0), Status::NAMESPACE_WRITE_PROTECTED);
    assert!(matches!(open(FileAccess::ReadWrite, 32 << 10), Err(EngineOpenError::File { .. })));
    let mut engine = open(FileAccess::ReadWrite, 0).unwrap();
    assert_eq!(perform(&mut engine, Op::Write, 24), Status::SUCCESS);
    std::fs::File::options().write(true).open(scratch.path()).unwrap().set_len(4096).unwrap();
    assert_eq!(perform(&mut engine, Op::Write, 24), Status::WRITE_FAULT);
    assert_eq!(perform(&mut engine, Op::Read, 0), Status::UNRECOVERED_READ_ERROR);
    let device = vec![EngineFile::open("/dev/zero", &layout(FileAccess::ReadWrite, false)).unwrap()];
    assert!(matches!(io_engines::open(&config, device, &[]), Err(EngineOpenError::File { .. })));
}

#[test]
fn every_engine_reads_back_what_it_wrote() {
    let direct = std::env::temp_dir();
    let probe = Scratch::new("probe");
    EngineFile::lay_out(probe.path(), 4096, false, 1).unwrap();
    let supports_direct = EngineFile::open(probe.path(), &layout(FileAccess::ReadOnly, true)).is_ok();
    let base = EngineConfig { depth: DEPTH, ..EngineConfig::default() };
    let uring = EngineConfig { kind: EngineKind::Uring, ..base.clone() };
    let sqpoll = UringPolling { sqpoll: true, sqpoll_idle_ms: 10, ..UringPolling::default() };
    let mut cases = vec![
        ("psync", EngineConfig { kind: EngineKind::Psync, ..base.clone() }),
        ("pvsync2", EngineConfig { kind: EngineKind::Pvsync2, ..base.clone() }),
        ("mmap", EngineConfig { kind: EngineKind::Mapped, ..base.clone() }),
        ("libaio", EngineConfig { kind: EngineKind::Libaio, ..base.clone() }),
        (
            "libaio-reap",
            EngineConfig { kind: EngineKind::Libaio, userspace_reap: true, batch_max: 1, ..base.clone() },
        ),
        ("posixaio", EngineConfig { kind: EngineKind::PosixAio, ..base.clone() }),
        ("posixaio-single", EngineConfig { kind: EngineKind::PosixAio, batch_max: 1, reap_max: 1, ..base }),
    ];
    match io_engines::open(&uring, Vec::new(), &[]) {
        Ok(_) => cases.extend([
            ("uring", uring.clone()),
            ("uring-fixed", EngineConfig { fixed_buffers: true, register_files: true, ..uring.clone() }),
            (
                "uring-vectored",
                EngineConfig { nonvectored: false, batch_max: 1, reap_max: 1, ..uring.clone() },
            ),
            ("uring-sqpoll", EngineConfig { polling: sqpoll, register_files: true, ..uring }),
        ]),
        Err(error) => println!("SKIPPED io_uring: {error}"),
    }
    for (name, config) in cases {
        let scratch = Scratch::new(name);
        exercise(&config, scratch.path(), false);
        if config.kind == EngineKind::Mapped {
            continue;
        }
        if supports_direct {
            exercise(&config, scratch.path(), true);
        } else {
            println!("SKIPPED direct I/O: {} does not support it", direct.display());
        }
    }
}

#[test]
fn the_sqpoll_thread_is_identified() {
    let polling = UringPolling { sqpoll: true, sqpoll_idle_ms: 1000, ..UringPolling::default() };
    let config = EngineConfig { kind: EngineKind::Uring, depth: 2, polling, ..EngineConfig::default() };
    let engine = match io_engines::open(&config, Vec::new(), &[]) {
        Ok(engine) => engine,
        Err(error) => return println!("SKIPPED: {error}"),
    };
    let thread = engine.submission_thread().unwrap();
    // The thread is a task of this process from the start; its name is set only once it runs.
    assert!(std::path::Path::new(&format!("/proc/self/task/{thread}")).is_dir());
    assert!(io_engines::usage::task_ns(thread).is_some());
}

#[test]
fn open_errors_explain_the_cause() {
    let missing = EngineFile::open("/nonexistent/a", &layout(FileAccess::ReadOnly, false)).unwrap_err();
    assert!(missing.is_missing() && missing.to_string().contains("--size"), "{missing}");
    let config = EngineConfig { kind: EngineKind::Passthrough, ..EngineConfig::default() };
    let file = EngineFile::open("/dev/zero", &layout(FileAccess::ReadOnly, false)).unwrap();
    let error = io_engines::open(&config, vec![file], &[]).err().unwrap();
    assert!(error.to_string().contains("/dev/ng0n1"), "{error}");
}

#[test]
fn layout_fills_a_file_and_never_shrinks_it() {
    let scratch = Scratch::new("layout");
    EngineFile::lay_out(scratch.path(), 3_000_000, true, 7).unwrap();
    let bytes = std::fs::read(&scratch.0).unwrap();
    let zeroes = bytes.chunks(8).filter(|chunk| chunk.iter().all(|byte| *byte == 0)).count();
    assert_eq!((bytes.len(), zeroes), (3_000_000, 0));
    EngineFile::lay_out(scratch.path(), 1000, true, 8).unwrap();
    assert_eq!(std::fs::read(&scratch.0).unwrap(), bytes);
}

#[test]
fn dropping_an_engine_waits_for_requests_in_flight() {
    let scratch = Scratch::new("drop");
    EngineFile::lay_out(scratch.path(), BLOCKS * BLOCK as u64, true, 1).unwrap();
    for kind in [EngineKind::Libaio, EngineKind::PosixAio, EngineKind::Uring] {
        let files = vec![EngineFile::open(scratch.path(), &layout(FileAccess::ReadOnly, false)).unwrap()];
        let pool = Pool::new(&Arena::new(dma::ArenaConfig { hugepages: false, ..Default::default() }));
        let mut batch = requests(&pool);
        for request in &mut batch {
            request.blocks = 8;
        }
        let config = EngineConfig { kind, depth: DEPTH, ..EngineConfig::default() };
        let mut engine = match io_engines::open(&config, files, &batch) {
            Ok(engine) => engine,
            Err(error) => {
                println!("SKIPPED {kind:?}: {error}");
                continue;
            }
        };
        engine.submit(&mut batch);
        drop(engine);
        // All buffers are back in the pool: they can all be allocated again.
        assert_eq!(requests(&pool).len(), DEPTH as usize);
    }
}

#[test]
fn a_file_that_a_server_reads_or_writes_cannot_be_locked_for_writing() {
    let scratch = Scratch::new("locked");
    std::fs::write(&scratch.0, [0; BLOCK]).unwrap();
    // A server that only reads the file excludes writers too.
    for mode in [FlockOperation::NonBlockingLockExclusive, FlockOperation::NonBlockingLockShared] {
        let server = std::fs::File::open(&scratch.0).unwrap();
        flock(&server, mode).unwrap();
        let error = WriteLock::take(scratch.path()).unwrap_err().to_string();
        assert!(error.contains("flock") && error.contains("--allow_mounted_write=1"), "{mode:?}: {error}");
        drop(server);
        WriteLock::take(scratch.path()).unwrap();
    }
    assert!(WriteLock::take("/dev/null").unwrap().is_none(), "neither a file nor a block device");
    assert!(WriteLock::take("/nonexistent/a").unwrap_err().is_missing());
}

#[test]
fn a_block_device_that_a_server_only_reads_cannot_be_locked_for_writing() {
    // It is opened for reading, and nothing is read or written. Who may open none has nothing to test here.
    // Other tests attach files to the first devices that are free, and lock those.
    let is_free = |number: &u32| !std::path::Path::new(&format!("/sys/block/loop{number}/loop")).exists();
    let path = (0..8).rev().filter(is_free).map(|number| format!("/dev/loop{number}"));
    let opened = path.filter_map(|path| std::fs::File::open(&path).ok().map(|file| (path, file))).next();
    let Some((path, server)) = opened else {
        eprintln!("SKIPPED: no loop device can be opened");
        return;
    };
    flock(&server, FlockOperation::LockShared).unwrap();
    let error = WriteLock::take(&path).unwrap_err().to_string();
    assert!(error.contains("flock") && error.contains("--allow_mounted_write=1"), "{error}");
    drop(server);
    let (first, second) = (WriteLock::take(&path).unwrap(), WriteLock::take(&path).unwrap());
    assert!(first.is_some() && second.is_some(), "the jobs of a process share it");
    let server = std::fs::File::open(&path).unwrap();
    assert_eq!(flock(&server, FlockOperation::NonBlockingLockShared), Err(Errno::WOULDBLOCK));
}

#[test]
fn the_jobs_of_a_process_share_the_lock_of_a_file_until_the_last_one_ends() {
    let scratch = Scratch::new("shared-lock");
    std::fs::write(&scratch.0, [0; BLOCK]).unwrap();
    let other_name = Scratch::new("shared-lock-link");
    std::fs::hard_link(&scratch.0, &other_name.0).unwrap();
    let server = std::fs::File::open(&scratch.0).unwrap();
    let serve = || flock(&server, FlockOperation::NonBlockingLockShared);
    let (first, second) =
        (WriteLock::take(scratch.path()).unwrap(), WriteLock::take(other_name.path()).unwrap());
    assert!(first.is_some() && second.is_some());
    drop(first);
    let third = WriteLock::take(scratch.path()).unwrap();
    drop(second);
    assert_eq!(serve(), Err(Errno::WOULDBLOCK));
    drop(third);
    serve().unwrap();
    flock(&server, FlockOperation::Unlock).unwrap();
    let next = WriteLock::take(scratch.path()).unwrap();
    assert_eq!(serve(), Err(Errno::WOULDBLOCK), "locked again");
    drop(next);
    serve().unwrap();
}
