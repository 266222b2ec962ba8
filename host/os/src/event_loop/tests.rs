//! Tests of both backends on the real kernel.

use std::io::Write as _;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use dma::{Arena, Pool};

use super::*;

fn event_loops() -> Vec<EventLoop> {
    let make = |backend| EventLoop::new(&EventLoopConfig { backend: Some(backend), operations_max: 64 });
    let mut all = vec![make(EventBackend::Epoll).unwrap()];
    match make(EventBackend::Uring) {
        Ok(event_loop) => all.push(event_loop),
        Err(error) => eprintln!("SKIPPED for io_uring: {error}"),
    }
    all
}

fn reap(client: &EventClient) -> Vec<EventCompletion> {
    let mut done = Vec::new();
    client.reap(&mut done);
    done
}

#[test]
fn a_waker_on_another_thread_ends_a_sleep() {
    for event_loop in event_loops() {
        let waker = event_loop.waker();
        waker.prepare_sleep();
        let other = waker.clone();
        let thread = std::thread::spawn(move || other.wake());
        let start = Instant::now();
        event_loop.wait(Some(30_000_000_000));
        assert!(start.elapsed() < Duration::from_secs(20), "{event_loop:?}");
        waker.finish_sleep();
        thread.join().unwrap();
        event_loop.turn();
    }
}

#[test]
fn a_sleep_ends_at_its_timeout() {
    for event_loop in event_loops() {
        let start = Instant::now();
        event_loop.wait(Some(5_000_000));
        assert!(start.elapsed() >= Duration::from_millis(5), "{event_loop:?}");
    }
}

#[test]
fn a_watch_reports_each_arrival_until_unwatch() {
    for event_loop in event_loops() {
        let client = event_loop.client();
        let (mut near, far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        let watch = client.watch(far.as_fd(), Interest::READABLE, 42).unwrap();
        for _ in 0..3 {
            near.write_all(b"x").unwrap();
            event_loop.wait(Some(5_000_000_000));
            let done = reap(&client);
            assert!(
                done.iter().any(|done| done.tag == 42 && done.result & libc::POLLIN as i32 != 0),
                "{event_loop:?}"
            );
            std::io::Read::read(&mut &far, &mut [0; 8]).unwrap();
        }
        client.unwatch(watch);
        event_loop.turn();
        reap(&client);
        near.write_all(b"y").unwrap();
        event_loop.wait(Some(1_000_000));
        assert!(reap(&client).is_empty(), "{event_loop:?} reported an ended watch");
    }
}

#[test]
fn file_operations_return_their_buffer() {
    for event_loop in event_loops() {
        let client = event_loop.client();
        let file = tempfile();
        if !client.supports_files() {
            assert_eq!(client.add_file(file.into()).unwrap_err().kind(), io::ErrorKind::Unsupported);
            continue;
        }
        let reader = file.try_clone().unwrap();
        let id = client.add_file(file.into()).unwrap();
        let pool = Pool::new(&Arena::new(dma::ArenaConfig {
            limit_bytes: 2 << 20,
            hugepages: false,
            ..dma::ArenaConfig::default()
        }));
        let mut buffer = pool.take(4096).unwrap();
        buffer.as_mut_slice().fill(9);
        client
            .submit_operation(
                id,
                FileOperation::Write(WriteMode::Durable),
                4096,
                2048,
                Some((buffer.into(), 2048)),
                1,
            )
            .unwrap();
        let wrote = wait_for(&event_loop, &client);
        assert_eq!((wrote.tag, wrote.result), (1, 2048));
        assert_eq!(reader.metadata().unwrap().len(), 4096 + 2048);
        client.submit_operation(id, FileOperation::Sync, 0, 0, None, 2).unwrap();
        assert_eq!(wait_for(&event_loop, &client).result, 0);
        client.submit_operation(id, FileOperation::Punch, 4096, 1024, None, 3).unwrap();
        assert_eq!(wait_for(&event_loop, &client).result, 0);
        let mut buffer = wrote.data.unwrap().into_single().unwrap();
        buffer.clear();
        client.submit_operation(id, FileOperation::Read, 4096, 4096, Some((buffer.into(), 0)), 4).unwrap();
        let read = wait_for(&event_loop, &client);
        let buffer = read.data.unwrap().into_single().unwrap();
        assert_eq!(read.result, 2048, "a short read reports its length");
        assert!(buffer.as_slice()[..1024].iter().all(|byte| *byte == 0));
        assert!(buffer.as_slice()[1024..2048].iter().all(|byte| *byte == 9));
        client.remove_file(id);
        let rejected = client.submit_operation(id, FileOperation::Sync, 0, 0, None, 5).unwrap_err();
        assert_eq!(rejected.reason, io::ErrorKind::NotFound);
    }
}

#[test]
fn data_of_several_slices_is_one_operation() {
    for event_loop in event_loops() {
        let client = event_loop.client();
        if !client.supports_files() {
            continue;
        }
        let file = tempfile();
        let reader = file.try_clone().unwrap();
        let id = client.add_file(file.into()).unwrap();
        let pool = Pool::new(&Arena::new(dma::ArenaConfig {
            limit_bytes: 2 << 20,
            hugepages: false,
            ..dma::ArenaConfig::default()
        }));
        let slices = |fills: [u8; 3]| {
            let fill = |fill| {
                let mut buffer = pool.take(1000).unwrap();
                buffer.as_mut_slice().fill(fill);
                buffer
            };
            Data::gather(fills.map(fill).into()).unwrap()
        };
        let write = FileOperation::Write(WriteMode::Durable);
        // From the middle of the first slice to that of the last.
        client.submit_operation(id, write, 100, 2000, Some((slices([1, 2, 3]), 500)), 1).unwrap();
        let done = wait_for(&event_loop, &client);
        assert_eq!((done.tag, done.result, done.data.unwrap().len()), (1, 2000, 3000));
        let mut contents = vec![9; 2100];
        std::os::unix::fs::FileExt::read_exact_at(&reader, &mut contents, 0).unwrap();
        let expected = [vec![0; 100], vec![1; 500], vec![2; 1000], vec![3; 500]].concat();
        assert_eq!(contents, expected);
        client.submit_operation(id, FileOperation::Read, 0, 2100, Some((slices([7; 3]), 900)), 2).unwrap();
        let done = wait_for(&event_loop, &client);
        let mut bytes = vec![0; 3000];
        done.data.unwrap().copy_to(0, &mut bytes);
        assert_eq!((done.result, &bytes[..900], &bytes[900..]), (2100, &[7; 900][..], &expected[..]));
    }
}

#[test]
fn drop_cancels_operations_in_flight() {
    for event_loop in event_loops() {
        let client = event_loop.client();
        if !client.supports_files() {
            continue;
        }
        let (near, _far) = UnixStream::pair().unwrap();
        let id = client.add_file(near.into()).unwrap();
        let pool = Pool::new(&Arena::new(dma::ArenaConfig {
            limit_bytes: 2 << 20,
            hugepages: false,
            ..dma::ArenaConfig::default()
        }));
        let buffer = pool.take(4096).unwrap();
        // Never completes: nothing is written to the other end.
        client.submit_operation(id, FileOperation::Read, 0, 4096, Some((buffer.into(), 0)), 1).unwrap();
        event_loop.turn();
        drop(client);
        let start = Instant::now();
        drop(event_loop);
        assert!(start.elapsed() < Duration::from_millis(900), "the read was not cancelled");
        drop(pool);
    }
}

#[test]
fn events_of_a_dropped_client_are_discarded() {
    for event_loop in event_loops() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let client = event_loop.client();
        client.watch(far.as_fd(), Interest::READABLE, 42).unwrap();
        near.write_all(b"x").unwrap();
        event_loop.wait(Some(5_000_000_000));
        drop(client);
        let successor = event_loop.client();
        near.write_all(b"y").unwrap();
        event_loop.wait(Some(1_000_000));
        event_loop.turn();
        assert!(reap(&successor).is_empty(), "{event_loop:?}");
    }
}

#[test]
fn a_rejected_operation_returns_its_buffer() {
    for event_loop in event_loops() {
        let client = event_loop.client();
        if !client.supports_files() {
            continue;
        }
        let (near, _far) = UnixStream::pair().unwrap();
        let id = client.add_file(near.into()).unwrap();
        let pool = Pool::new(&Arena::new(dma::ArenaConfig {
            limit_bytes: 2 << 20,
            hugepages: false,
            ..dma::ArenaConfig::default()
        }));
        for tag in 0..64 {
            let buffer = pool.take(4096).unwrap();
            client.submit_operation(id, FileOperation::Read, 0, 4096, Some((buffer.into(), 0)), tag).unwrap();
        }
        let rejected = client
            .submit_operation(
                id,
                FileOperation::Read,
                0,
                4096,
                Some((pool.take(4096).unwrap().into(), 0)),
                64,
            )
            .unwrap_err();
        assert_eq!(rejected.reason, io::ErrorKind::WouldBlock);
        assert!(rejected.data.is_some());
    }
}

fn wait_for(event_loop: &EventLoop, client: &EventClient) -> EventCompletion {
    let mut done = Vec::new();
    while done.is_empty() {
        event_loop.wait(Some(5_000_000_000));
        client.reap(&mut done);
    }
    done.pop().unwrap()
}

fn tempfile() -> std::fs::File {
    let path = std::env::temp_dir().join(format!(
        "ringbolt-sys-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let file =
        std::fs::OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}
