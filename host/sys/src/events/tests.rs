//! Both engines give the same answers; the kernel is the real one.

use std::io::Write as _;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use memory::{Arena, Pool};

use super::*;

fn engines() -> Vec<Events> {
    let make = |engine| Events::new(&Config { engine: Some(engine), operations_max: 64 });
    let mut all = vec![make(Engine::Epoll).unwrap()];
    match make(Engine::Uring) {
        Ok(events) => all.push(events),
        Err(error) => eprintln!("SKIPPED the io_uring half: {error}"),
    }
    all
}

fn reap(client: &Client) -> Vec<Done> {
    let mut done = Vec::new();
    client.reap(&mut done);
    done
}

#[test]
fn a_wake_up_ends_a_sleep_from_another_thread() {
    for events in engines() {
        let waker = events.waker();
        waker.prepare_sleep();
        let other = waker.clone();
        let thread = std::thread::spawn(move || other.wake());
        let start = Instant::now();
        events.wait(Some(30_000_000_000));
        assert!(start.elapsed() < Duration::from_secs(20), "{events:?}");
        waker.awake();
        thread.join().unwrap();
        events.turn();
    }
}

#[test]
fn a_sleep_ends_at_its_timeout() {
    for events in engines() {
        let start = Instant::now();
        events.wait(Some(5_000_000));
        assert!(start.elapsed() >= Duration::from_millis(5), "{events:?}");
    }
}

#[test]
fn a_watch_reports_each_arrival_until_it_is_given_up() {
    for events in engines() {
        let client = events.client();
        let (mut near, far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        let watch = client.watch(far.as_fd(), Interest::READABLE, 42).unwrap();
        for _ in 0..3 {
            near.write_all(b"x").unwrap();
            events.wait(Some(5_000_000_000));
            let done = reap(&client);
            assert!(
                done.iter().any(|done| done.tag == 42 && done.result & libc::POLLIN as i32 != 0),
                "{events:?}"
            );
            std::io::Read::read(&mut &far, &mut [0; 8]).unwrap();
        }
        client.unwatch(watch);
        events.turn();
        reap(&client);
        near.write_all(b"y").unwrap();
        events.wait(Some(1_000_000));
        assert!(reap(&client).is_empty(), "{events:?} reported a watch that was given up");
    }
}

#[test]
fn file_operations_hand_the_buffer_back() {
    for events in engines() {
        let client = events.client();
        let file = tempfile();
        if !client.has_files() {
            assert_eq!(client.add_file(file.into()).unwrap_err().kind(), io::ErrorKind::Unsupported);
            continue;
        }
        let reader = file.try_clone().unwrap();
        let id = client.add_file(file.into()).unwrap();
        let pool = Pool::new(&Arena::new(memory::Config {
            limit_bytes: 2 << 20,
            hugepages: false,
            ..memory::Config::default()
        }));
        let mut buffer = pool.take(4096).unwrap();
        buffer.as_mut_slice().fill(9);
        client.operate(id, Operation::Write(Write::Durable), 4096, 2048, Some((buffer, 2048)), 1).unwrap();
        let wrote = wait_for(&events, &client);
        assert_eq!((wrote.tag, wrote.result), (1, 2048));
        assert_eq!(reader.metadata().unwrap().len(), 4096 + 2048);
        client.operate(id, Operation::Sync, 0, 0, None, 2).unwrap();
        assert_eq!(wait_for(&events, &client).result, 0);
        client.operate(id, Operation::Punch, 4096, 1024, None, 3).unwrap();
        assert_eq!(wait_for(&events, &client).result, 0);
        let mut buffer = wrote.buffer.unwrap();
        buffer.clear();
        client.operate(id, Operation::Read, 4096, 4096, Some((buffer, 0)), 4).unwrap();
        let read = wait_for(&events, &client);
        let buffer = read.buffer.unwrap();
        assert_eq!(read.result, 2048, "a short read is told");
        assert!(buffer.as_slice()[..1024].iter().all(|byte| *byte == 0));
        assert!(buffer.as_slice()[1024..2048].iter().all(|byte| *byte == 9));
        client.remove_file(id);
        let refused = client.operate(id, Operation::Sync, 0, 0, None, 5).unwrap_err();
        assert_eq!(refused.why, io::ErrorKind::NotFound);
    }
}

#[test]
fn dropping_the_ring_waits_for_buffers_in_flight() {
    for events in engines() {
        let client = events.client();
        if !client.has_files() {
            continue;
        }
        let (near, _far) = UnixStream::pair().unwrap();
        let id = client.add_file(near.into()).unwrap();
        let pool = Pool::new(&Arena::new(memory::Config {
            limit_bytes: 2 << 20,
            hugepages: false,
            ..memory::Config::default()
        }));
        let buffer = pool.take(4096).unwrap();
        // Never satisfied: nobody writes to the other end.
        client.operate(id, Operation::Read, 0, 4096, Some((buffer, 0)), 1).unwrap();
        events.turn();
        drop(client);
        let start = Instant::now();
        drop(events);
        assert!(start.elapsed() < Duration::from_millis(900), "the read was not cancelled");
        drop(pool);
    }
}

#[test]
fn a_client_that_left_is_told_nothing_and_its_successor_neither() {
    for events in engines() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let client = events.client();
        client.watch(far.as_fd(), Interest::READABLE, 42).unwrap();
        near.write_all(b"x").unwrap();
        events.wait(Some(5_000_000_000));
        drop(client);
        let successor = events.client();
        near.write_all(b"y").unwrap();
        events.wait(Some(1_000_000));
        events.turn();
        assert!(reap(&successor).is_empty(), "{events:?}");
    }
}

#[test]
fn a_full_ring_gives_the_buffer_back() {
    for events in engines() {
        let client = events.client();
        if !client.has_files() {
            continue;
        }
        let (near, _far) = UnixStream::pair().unwrap();
        let id = client.add_file(near.into()).unwrap();
        let pool = Pool::new(&Arena::new(memory::Config {
            limit_bytes: 2 << 20,
            hugepages: false,
            ..memory::Config::default()
        }));
        for tag in 0..64 {
            let buffer = pool.take(4096).unwrap();
            client.operate(id, Operation::Read, 0, 4096, Some((buffer, 0)), tag).unwrap();
        }
        let refused = client
            .operate(id, Operation::Read, 0, 4096, Some((pool.take(4096).unwrap(), 0)), 64)
            .unwrap_err();
        assert_eq!(refused.why, io::ErrorKind::WouldBlock);
        assert!(refused.buffer.is_some());
    }
}

fn wait_for(events: &Events, client: &Client) -> Done {
    let mut done = Vec::new();
    while done.is_empty() {
        events.wait(Some(5_000_000_000));
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
