use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use block_io::{Op, Tag};
use dma::{Data, Pool};

use super::*;
use crate::requests::tests::BlockFile512;

const CONFIG: UringQueueConfig = UringQueueConfig {
    depth: 4,
    polling: UringPolling { sqpoll: false, sqpoll_cpu: None, sqpoll_idle_ms: 0, iopoll: false },
    nonvectored: true,
    data_sync: false,
    batch_max: 0,
};

fn pool() -> Pool {
    let config = dma::ArenaConfig { limit_bytes: 2 << 20, hugepages: false, ..dma::ArenaConfig::default() };
    Pool::new(&Arena::new(config))
}

fn open(config: &UringQueueConfig, file: OwnedFd) -> Option<UringQueue<BlockFile512, FileIo>> {
    match UringQueue::new(config, vec![BlockFile512(file)]) {
        Ok(ring) => Some(ring),
        Err(error) => {
            println!("SKIPPED: io_uring is not available: {error}");
            None
        }
    }
}

/// Reaps `count` requests, with their results.
fn finish(ring: &mut UringQueue<BlockFile512, FileIo>, count: usize) -> Vec<(Request<Data>, i64)> {
    let (mut done, results) = (Vec::new(), std::cell::RefCell::new(Vec::new()));
    while done.len() < count {
        ring.wait(1_000_000_000);
        ring.reap(usize::MAX, &mut done, |_, _, result| {
            results.borrow_mut().push(result);
            Status::SUCCESS
        });
    }
    assert_eq!((done.len(), ring.in_flight()), (count, 0));
    done.into_iter().map(Completion::into_request).zip(results.into_inner()).collect()
}

#[test]
fn a_wait_without_completions_ends() {
    let (near, mut far) = UnixStream::pair().unwrap();
    let Some(mut ring) = open(&CONFIG, near.into()) else { return };
    let pool = pool();
    let mut batch = vec![Request::read(Tag(0), 0, 1, pool.take(512).unwrap())];
    ring.submit(&mut batch, 1);
    let mut done = Vec::new();
    for timeout_ns in [u64::MAX, 1_000, u64::MAX] {
        ring.wait(timeout_ns);
        assert_eq!(ring.reap(usize::MAX, &mut done, |_, _, _| Status::SUCCESS), 0);
    }
    assert_eq!(ring.in_flight(), 1);
    far.write_all(&[7; 512]).unwrap();
    let finished = finish(&mut ring, 1);
    assert_eq!(finished[0].1, 512);
}

#[test]
fn drop_cancels_a_read_and_returns_its_buffer() {
    let (near, _far) = UnixStream::pair().unwrap();
    let Some(mut ring) = open(&CONFIG, near.into()) else { return };
    let pool = pool();
    // All memory of the arena, so that a leaked buffer is detected.
    let halves = || (0..2).map_while(|_| pool.take(dma::BUFFER_BYTES_MAX)).collect::<Vec<_>>();
    let mut batch: Vec<_> =
        (0..).zip(halves()).map(|(tag, buffer)| Request::read(Tag(tag), 0, 1, buffer)).collect();
    ring.submit(&mut batch, 2);
    assert_eq!((batch.len(), ring.in_flight(), ring.room()), (0, 2, 2));
    let begun = Instant::now();
    drop(ring);
    assert!(begun.elapsed() < DROP_TIME_MAX / 2, "{:?}", begun.elapsed());
    assert_eq!(halves().len(), 2);
}

#[test]
fn requests_beyond_the_depth_stay_in_the_batch() {
    let (near, mut far) = UnixStream::pair().unwrap();
    let one_by_one = UringQueueConfig { batch_max: 1, ..CONFIG };
    let Some(mut ring) = open(&one_by_one, near.into()) else { return };
    let pool = pool();
    let mut batch: Vec<_> =
        (0..6).map(|tag| Request::read(Tag(tag % 4), 0, 1, pool.take(512).unwrap())).collect();
    ring.submit(&mut batch, 6);
    assert_eq!((batch.len(), ring.room()), (2, 0));
    far.write_all(&[7; 4 * 512]).unwrap();
    let done = finish(&mut ring, 4);
    assert!(done.iter().all(|(request, result)| {
        *result == 512
            && request.data().and_then(Data::single).is_some_and(|buffer| buffer.as_slice()[511] == 7)
    }));
}

#[test]
fn registered_memory_is_of_one_arena_and_keeps_it_alive() {
    let path = std::env::temp_dir().join(format!("ringbolt-sys-uring-{}", std::process::id()));
    std::fs::write(&path, [5; 4096]).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let Some(mut ring) = open(&CONFIG, file.into()) else { return };
    let (one, other) = (pool(), pool());
    let of = |pool: &Pool, tag| Request::read(Tag(tag), 0, 1, pool.take(512).unwrap());
    let mixed = [of(&one, 0), of(&other, 1)];
    assert_eq!(ring.register_buffers(&mixed).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    let mut batch = vec![of(&one, 0)];
    if let Err(error) = ring.register_buffers(&batch) {
        return println!("SKIPPED: memory registration is not possible: {error}");
    }
    assert_eq!(ring.register_buffers(&batch).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    ring.register_files().unwrap();
    batch.push(of(&other, 1));
    ring.submit(&mut batch, 2);
    let mut done = finish(&mut ring, 2);
    done.sort_by_key(|(request, _)| request.tag);
    let results: Vec<i64> = done.iter().map(|(_, result)| *result).collect();
    assert_eq!(results, [512, -i64::from(libc::EFAULT)], "memory of another arena is not registered");
    drop((mixed, done, batch));
    let arena = Arc::downgrade(one.arena());
    drop(one);
    assert!(arena.upgrade().is_some(), "registered memory stays mapped");
    drop(ring);
    assert!(arena.upgrade().is_none());
}

#[test]
fn a_request_of_several_slices_is_one_operation() {
    for nonvectored in [false, true] {
        let path =
            std::env::temp_dir().join(format!("ringbolt-sys-vectors-{}-{nonvectored}", std::process::id()));
        std::fs::write(&path, [[5; 512], [6; 512], [7; 512]].concat()).unwrap();
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let reader = file.try_clone().unwrap();
        let Some(mut ring) = open(&UringQueueConfig { nonvectored, ..CONFIG }, file.into()) else { return };
        let pool = pool();
        let slices = |lengths: &[usize]| {
            Data::gather(lengths.iter().map(|length| pool.take(*length).unwrap()).collect()).unwrap()
        };
        let mut batch = vec![
            Request::read(Tag(2), 0, 3, slices(&[100, 1436])),
            Request::read(Tag(1), 1, 1, slices(&[512])),
        ];
        ring.submit(&mut batch, 2);
        let mut done = finish(&mut ring, 2);
        done.sort_by_key(|(request, _)| request.tag);
        let mut bytes = [0; 1536];
        done[1].0.data().unwrap().copy_to(0, &mut bytes);
        assert_eq!((done[0].1, done[1].1), (512, 1536));
        assert_eq!((bytes[99], bytes[511], bytes[512], bytes[1535]), (5, 5, 6, 7));
        let mut data = slices(&[512, 512]);
        data.slices_mut()[0].clear();
        data.slices_mut()[1].as_mut_slice().fill(3);
        ring.submit(&mut vec![Request::write(Tag(0), 0, 2, data)], 1);
        assert_eq!(finish(&mut ring, 1)[0].1, 1024);
        std::os::unix::fs::FileExt::read_exact_at(&reader, &mut bytes, 0).unwrap();
        assert_eq!((bytes[511], bytes[512], bytes[1023], bytes[1024]), (0, 3, 3, 7));
    }
}

#[test]
fn an_unsupported_operation_is_a_no_op() {
    let file = std::fs::File::open("/dev/null").unwrap();
    let Some(mut ring) = open(&CONFIG, file.into()) else { return };
    let mut batch = vec![Request::new(Tag(3), Op::Reset, 0, 0)];
    ring.submit(&mut batch, 1);
    assert_eq!(finish(&mut ring, 1)[0].1, 0);
}

#[test]
#[should_panic(expected = "in a buffer of 512")]
fn a_request_longer_than_its_buffer_never_reaches_the_kernel() {
    let file = std::fs::File::open("/dev/zero").unwrap();
    let Some(mut ring) = open(&CONFIG, file.into()) else { panic!("in a buffer of 512 (SKIPPED)") };
    let mut batch = vec![Request::read(Tag(0), 0, 2, pool().take(512).unwrap())];
    ring.submit(&mut batch, 1);
}
