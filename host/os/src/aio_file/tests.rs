use std::fs::File;
use std::time::Instant;

use dma::{Arena, ArenaConfig, Buffer, Pool};

use super::*;
use crate::{EventBackend, EventLoop, EventLoopConfig, Interest};

fn pool() -> Pool {
    Pool::new(&Arena::new(ArenaConfig { limit_bytes: 4 << 20, hugepages: false, ..ArenaConfig::default() }))
}

fn filled(pool: &Pool, bytes: usize, fill: u8) -> Buffer {
    let mut buffer = pool.take(bytes).unwrap();
    buffer.as_mut_slice().fill(fill);
    buffer
}

fn file(bytes: u64) -> File {
    let file: File = rustix::fs::memfd_create("aio", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
    file.set_len(bytes).unwrap();
    file
}

fn aio(depth: u32, bytes: u64) -> AioFile {
    AioFile::new(file(bytes).into(), depth).unwrap()
}

/// Submits and reaps until nothing is in flight; sorted by tag.
fn finish(aio: &mut AioFile) -> Vec<EventCompletion> {
    let (mut done, start) = (Vec::new(), Instant::now());
    while aio.in_flight() > 0 {
        assert!(start.elapsed().as_secs() < 30, "{aio:?}");
        aio.submit();
        aio.reap(&mut done);
    }
    done.sort_by_key(|one| one.tag);
    done
}

#[test]
fn a_range_of_data_goes_to_the_file_and_back() {
    let (pool, mut aio) = (pool(), aio(8, 64 << 10));
    let write = FileOperation::Write(WriteMode::Cached);
    let slices = |fills: [u8; 3]| Data::gather(fills.map(|fill| filled(&pool, 512, fill)).into()).unwrap();
    aio.start(write, 4096, 1024, Some((filled(&pool, 2048, 7).into(), 512)), 1).unwrap();
    aio.start(FileOperation::Write(WriteMode::Durable), 8192, 1024, Some((slices([1, 2, 3]), 512)), 2)
        .unwrap();
    let results: Vec<(u64, i32)> = finish(&mut aio).iter().map(|one| (one.tag, one.result)).collect();
    assert_eq!(results, [(1, 1024), (2, 1024)]);
    aio.start(FileOperation::Sync, 77, 99, None, 3).unwrap();
    assert_eq!(finish(&mut aio)[0].result, 0);
    aio.start(FileOperation::Read, 8192, 1536, Some((slices([9, 9, 9]), 0)), 4).unwrap();
    let done = finish(&mut aio).pop().unwrap();
    let mut bytes = vec![0; 1536];
    done.data.unwrap().copy_to(0, &mut bytes);
    assert_eq!((bytes[0], bytes[512], bytes[1024]), (2, 3, 0));
}

#[test]
fn a_full_context_refuses_and_returns_the_data() {
    let (pool, mut aio) = (pool(), aio(2, 4096));
    let buffer = || Some((filled(&pool, 512, 1).into(), 0));
    for tag in 0..2 {
        aio.start(FileOperation::Read, 0, 512, buffer(), tag).unwrap();
    }
    let refused = aio.start(FileOperation::Read, 0, 512, buffer(), 2).unwrap_err();
    assert_eq!((refused.reason, refused.data.is_some()), (io::ErrorKind::WouldBlock, true));
    assert_eq!(finish(&mut aio).len(), 2);
    aio.start(FileOperation::Read, 0, 512, buffer(), 3).unwrap();
    assert_eq!(finish(&mut aio)[0].tag, 3);
    let refused = aio.start(FileOperation::Punch, 0, 512, None, 4).unwrap_err();
    assert_eq!((refused.reason, aio.in_flight()), (io::ErrorKind::Unsupported, 0));
}

#[test]
fn what_the_kernel_refuses_fails_alone() {
    let (pool, mut aio) = (pool(), aio(4, 4096));
    let buffer = || Some((filled(&pool, 512, 1).into(), 0));
    for (tag, offset) in [(0, 0), (1, u64::MAX), (2, 512), (3, 4096)] {
        aio.start(FileOperation::Read, offset, 512, buffer(), tag).unwrap();
    }
    let done = finish(&mut aio);
    let results: Vec<i32> = done.iter().map(|one| one.result).collect();
    assert_eq!(results, [512, -libc::EINVAL, 512, 0], "the last is beyond the end");
    assert!(done.iter().all(|one| one.data.is_some()));
}

#[test]
fn operations_that_end_within_the_submission_stop_signalling() {
    let (pool, mut aio) = (pool(), aio(4, 4096));
    let mut counts = [0; 8];
    for round in 0..INLINE_SUBMISSIONS + 10 {
        aio.start(FileOperation::Read, 0, 512, Some((filled(&pool, 512, 1).into(), 0)), round.into())
            .unwrap();
        assert!(aio.must_poll(), "it is not submitted");
        finish(&mut aio);
    }
    rustix::io::read(&aio.event, &mut counts).unwrap();
    assert_eq!(u64::from_ne_bytes(counts), u64::from(INLINE_SUBMISSIONS));
    assert!(!aio.must_poll());
    // A sync runs on a thread of the kernel and signals always.
    aio.start(FileOperation::Sync, 0, 0, None, 0).unwrap();
    finish(&mut aio);
    rustix::io::read(&aio.event, &mut counts).unwrap();
    assert_eq!(u64::from_ne_bytes(counts), 1);
    // One that takes longer is polled for, and those after it signal.
    aio.start(FileOperation::Read, 0, 512, Some((filled(&pool, 512, 1).into(), 0)), 1).unwrap();
    aio.submit();
    assert_eq!((aio.silent, aio.must_poll()), (1, true));
    aio.adapt();
    assert!(aio.signals);
    finish(&mut aio);
}

#[test]
fn a_completion_wakes_an_event_loop_of_either_kind() {
    for backend in [EventBackend::Epoll, EventBackend::Uring] {
        let config = EventLoopConfig { backend: Some(backend), ..EventLoopConfig::default() };
        let Ok(event_loop) = EventLoop::new(&config) else {
            eprintln!("SKIPPED: no {backend:?}");
            continue;
        };
        let client = event_loop.client();
        let mut aio = aio(4, 1 << 20);
        let watch = client.watch(aio.event(), Interest::READABLE, 5).unwrap();
        for round in 0..20 {
            aio.start(FileOperation::Sync, 0, 0, None, round).unwrap();
            aio.submit();
            assert!(!aio.must_poll());
            let (mut done, mut woken) = (Vec::new(), Vec::new());
            while done.is_empty() {
                let start = Instant::now();
                event_loop.wait(Some(10_000_000_000));
                assert!(start.elapsed().as_secs() < 5, "{backend:?}: nothing woke the loop");
                client.reap(&mut woken);
                aio.reap(&mut done);
            }
            assert_eq!((done[0].tag, done[0].result), (round, 0));
        }
        client.unwatch(watch);
    }
}

#[test]
fn dropping_returns_buffers_and_takes_no_time() {
    let pool = pool();
    let mut aio = aio(16, 1 << 20);
    let buffer = filled(&pool, 4096, 1);
    let arena = std::sync::Arc::downgrade(buffer.arena());
    aio.start(FileOperation::Read, 0, 4096, Some((buffer.into(), 0)), 1).unwrap();
    aio.submit();
    aio.start(FileOperation::Read, 0, 4096, Some((filled(&pool, 4096, 1).into(), 0)), 2).unwrap();
    drop((aio, pool));
    assert!(arena.upgrade().is_none(), "every buffer is released");
}

#[test]
fn an_error_of_the_file_is_the_result() {
    let file = file(4096);
    let seals = rustix::fs::SealFlags::WRITE;
    if rustix::fs::fcntl_add_seals(&file, seals).is_err() {
        return eprintln!("SKIPPED: no seals");
    }
    let mut aio = AioFile::new(file.into(), 2).unwrap();
    let pool = pool();
    let write = FileOperation::Write(WriteMode::Cached);
    aio.start(write, 0, 512, Some((filled(&pool, 512, 1).into(), 0)), 1).unwrap();
    assert_eq!(finish(&mut aio)[0].result, -libc::EPERM);
}
