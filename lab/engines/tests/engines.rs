//! Every engine against a file, as the lab uses them.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::PathBuf;

use engines::{Access, AnyEngine, Config, Engine, File, Kind, Layout, Polling, SyncMode};
use memory::{Arena, Buffer, Pool};
use ring::{Channel, Completion, Op, Request, Status, Tag};

const DEPTH: u32 = 8;
const BLOCK: usize = 4096;
const BLOCKS: u64 = 256;

fn layout(access: Access, direct: bool) -> Layout {
    Layout { access, direct, sync: SyncMode::None, unit_bytes: 512, allow_mounted_write: false }
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

fn requests(pool: &Pool) -> Vec<Request<Buffer>> {
    (0..DEPTH).map(|tag| Request::read(Tag(tag.into()), 0, 0, pool.take(BLOCK).unwrap())).collect()
}

fn finish(engine: &mut AnyEngine, batch: &mut Vec<Request<Buffer>>, count: usize) -> Vec<Completion<Buffer>> {
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

/// Writes all of the file with numbers, flushes, reads it back out of order, and discards the first block.
fn exercise(config: &Config, path: &str, direct: bool) {
    File::make(path, BLOCKS * BLOCK as u64, false, 1).unwrap();
    let files = vec![File::open(path, &layout(Access::Write, direct)).unwrap()];
    let unit = u64::from(files[0].block_bytes());
    let blocks = (BLOCK as u64 / unit) as u32;
    assert_eq!(files[0].bytes(), BLOCKS * BLOCK as u64);
    let pool = Pool::new(&Arena::new(memory::Config { hugepages: false, ..Default::default() }));
    let mut batch = requests(&pool);
    let mut engine = engines::open(config, files, &batch).unwrap();
    for first in (0..BLOCKS).step_by(DEPTH as usize) {
        for (request, number) in batch.iter_mut().zip(first..) {
            (request.op, request.lba, request.blocks) = (Op::Write, number * BLOCK as u64 / unit, blocks);
            request.buffer.as_mut().unwrap().as_mut_slice().fill(number as u8);
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
            let bytes = one.request().buffer.as_ref().unwrap().as_slice();
            assert!(one.status().is_success() && bytes.iter().all(|byte| *byte == number as u8), "{number}");
        }
        batch = done.into_iter().map(Completion::into_request).collect();
    }
    // Behind the end there is nothing to read.
    let rest = batch.split_off(1);
    (batch[0].op, batch[0].lba) = (Op::Read, BLOCKS * BLOCK as u64 / unit);
    let done = finish(&mut engine, &mut batch, 1);
    assert_eq!(done[0].status(), Status::DATA_TRANSFER_ERROR);
    drop((done, rest));
}

#[test]
fn every_engine_moves_the_same_bytes() {
    let direct = std::env::temp_dir();
    let probe = Scratch::new("probe");
    File::make(probe.path(), 4096, false, 1).unwrap();
    let takes_direct = File::open(probe.path(), &layout(Access::Read, true)).is_ok();
    let base = Config { depth: DEPTH, ..Config::default() };
    let uring = Config { kind: Kind::Uring, ..base.clone() };
    let sqpoll = Polling { submission: true, submission_idle_ms: 10, ..Polling::default() };
    let mut cases = vec![
        ("psync", Config { kind: Kind::Psync, ..base.clone() }),
        ("pvsync2", Config { kind: Kind::Pvsync2, ..base.clone() }),
        ("libaio", Config { kind: Kind::Libaio, ..base.clone() }),
        ("libaio-reap", Config { kind: Kind::Libaio, userspace_reap: true, batch_max: 1, ..base }),
    ];
    match engines::open(&uring, Vec::new(), &[]) {
        Ok(_) => cases.extend([
            ("uring", uring.clone()),
            ("uring-fixed", Config { fixed_buffers: true, register_files: true, ..uring.clone() }),
            ("uring-vectored", Config { nonvectored: false, batch_max: 1, reap_max: 1, ..uring.clone() }),
            ("uring-sqpoll", Config { polling: sqpoll, register_files: true, ..uring }),
        ]),
        Err(error) => println!("SKIPPED io_uring: {error}"),
    }
    for (name, config) in cases {
        let scratch = Scratch::new(name);
        exercise(&config, scratch.path(), false);
        if takes_direct {
            exercise(&config, scratch.path(), true);
        } else {
            println!("SKIPPED direct I/O: {} does not take it", direct.display());
        }
    }
}

#[test]
fn a_polling_submission_thread_is_found_and_charged() {
    let polling = Polling { submission: true, submission_idle_ms: 1000, ..Polling::default() };
    let config = Config { kind: Kind::Uring, depth: 2, polling, ..Config::default() };
    let engine = match engines::open(&config, Vec::new(), &[]) {
        Ok(engine) => engine,
        Err(error) => return println!("SKIPPED: {error}"),
    };
    let thread = engine.submission_thread().unwrap();
    // The thread takes its name once it runs; it is a task of this process from the beginning.
    assert!(std::path::Path::new(&format!("/proc/self/task/{thread}")).is_dir());
    assert!(engines::usage::task_ns(thread).is_some());
}

#[test]
fn what_cannot_be_opened_says_why() {
    let missing = File::open("/nonexistent/a", &layout(Access::Read, false)).unwrap_err();
    assert!(missing.is_missing() && missing.to_string().contains("--size"), "{missing}");
    let config = Config { kind: Kind::Passthrough, ..Config::default() };
    let file = File::open("/dev/zero", &layout(Access::Read, false)).unwrap();
    let error = engines::open(&config, vec![file], &[]).err().unwrap();
    assert!(error.to_string().contains("/dev/ng0n1"), "{error}");
}

#[test]
fn a_file_is_laid_out_with_noise_and_grown_only() {
    let scratch = Scratch::new("layout");
    File::make(scratch.path(), 3_000_000, true, 7).unwrap();
    let bytes = std::fs::read(&scratch.0).unwrap();
    let zeroes = bytes.chunks(8).filter(|chunk| chunk.iter().all(|byte| *byte == 0)).count();
    assert_eq!((bytes.len(), zeroes), (3_000_000, 0));
    File::make(scratch.path(), 1000, true, 8).unwrap();
    assert_eq!(std::fs::read(&scratch.0).unwrap(), bytes);
}

#[test]
fn a_dropped_engine_waits_for_what_the_kernel_writes() {
    let scratch = Scratch::new("drop");
    File::make(scratch.path(), BLOCKS * BLOCK as u64, true, 1).unwrap();
    for kind in [Kind::Libaio, Kind::Uring] {
        let files = vec![File::open(scratch.path(), &layout(Access::Read, false)).unwrap()];
        let pool = Pool::new(&Arena::new(memory::Config { hugepages: false, ..Default::default() }));
        let mut batch = requests(&pool);
        for request in &mut batch {
            request.blocks = 8;
        }
        let config = Config { kind, depth: DEPTH, ..Config::default() };
        let mut engine = match engines::open(&config, files, &batch) {
            Ok(engine) => engine,
            Err(error) => {
                println!("SKIPPED {kind:?}: {error}");
                continue;
            }
        };
        engine.submit(&mut batch);
        drop(engine);
        // Every buffer came back to the pool: the same chunk serves them all again.
        assert_eq!(requests(&pool).len(), DEPTH as usize);
    }
}
