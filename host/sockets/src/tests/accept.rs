//! Accept fails for lack of descriptors, and succeeds when there are some again.

use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, setrlimit};

use super::*;

/// Set in the environment of the child process, whose limit of descriptors is lowered.
const CHILD: &str = "RINGBOLT_NET_FEW_DESCRIPTORS";
const DONE: &str = "accepted after descriptors were released";

#[test]
fn accept_is_retried_when_descriptors_are_short() {
    if std::env::var_os(CHILD).is_some() {
        return accept_with_few_descriptors();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tests::accept::accept_is_retried_when_descriptors_are_short", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains(DONE), "{text}\n{errors}");
}

fn accept_with_few_descriptors() {
    let limit = 64;
    setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    for events in engines() {
        let mut sockets = Sockets::new(&events);
        let listener = sockets.listen(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let address = sockets.local_address(listener).unwrap();
        // Both are in the accept queue; no event follows them.
        let _peers = [connect(&address).unwrap(), connect(&address).unwrap()];
        let mut files = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            files.push(file);
        }
        for _ in 0..3 {
            let start = Instant::now();
            let failed = wait(&events, &mut sockets);
            let [NetworkEvent::AcceptFailed { listener: failing, error }] = &failed[..] else {
                panic!("{failed:?}")
            };
            assert_eq!((*failing, Errno::from_io_error(error)), (listener, Some(Errno::MFILE)));
            assert!(!sockets.is_pending(), "the core may sleep");
            assert!(start.elapsed() < Duration::from_secs(10));
        }
        files.truncate(files.len() - 2);
        let mut accepted = 0;
        while accepted < 2 {
            for event in wait(&events, &mut sockets) {
                accepted += usize::from(matches!(event, NetworkEvent::Incoming { .. }));
            }
        }
        println!("{events:?}: {DONE}");
    }
}

#[test]
fn a_closed_listener_refuses_connections_before_the_event_loop_runs() {
    for events in engines() {
        let mut sockets = Sockets::new(&events);
        let listener = sockets.listen(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let address = sockets.local_address(listener).unwrap();
        // The kernel takes its reference for the watch now.
        events.turn();
        sockets.close_listener(listener);
        assert!(std::net::TcpStream::connect(address.tcp().unwrap()).is_err(), "{events:?}");
        // The address is free at once.
        sockets.listen(&address).unwrap();
    }
}
