//! UNIX sockets: their files, their modes, and who is connected.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Barrier;

use super::*;

/// A directory that is removed with its contents.
pub(super) struct TestDirectory(PathBuf);

impl TestDirectory {
    pub(super) fn new(name: &str) -> TestDirectory {
        let path = std::env::temp_dir().join(format!("ringbolt-net-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        TestDirectory(path)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn names(&self) -> Vec<String> {
        let names = fs::read_dir(&self.0).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn bind(path: &Path) -> io::Result<UnixListenSocket> {
    UnixListenSocket::bind(path, 0o600, 16)
}

#[test]
fn a_unix_connection_carries_bytes_and_credentials() {
    for events in engines() {
        let directory = TestDirectory::new("stream");
        let mut sockets = Sockets::new(&events);
        let address = StreamAddress::Unix(directory.path("s"));
        let listener = sockets.listen(&address).unwrap();
        assert_eq!(sockets.local_address(listener), Some(address.clone()));
        let near = connect(&address).unwrap();
        let ours = PeerCredentials {
            process_id: std::process::id(),
            user_id: rustix::process::geteuid().as_raw(),
            group_id: rustix::process::getegid().as_raw(),
        };
        assert_eq!(near.peer_credentials().unwrap(), ours);
        let near = sockets.add(near).unwrap();
        let (stream, peer) = loop {
            let incoming = wait(&events, &mut sockets).into_iter().find_map(|event| match event {
                NetworkEvent::Incoming { stream, peer, .. } => Some((stream, peer)),
                _ => None,
            });
            if let Some(incoming) = incoming {
                break incoming;
            }
        };
        assert_eq!(peer, StreamAddress::Unix(PathBuf::new()), "the client is not bound to a path");
        assert_eq!(stream.peer_credentials().unwrap(), ours);
        assert_eq!(Sockets::peer_credentials_of(&stream), Some(ours));
        let far = sockets.add(stream).unwrap();
        assert!(matches!(sockets.send(near, &[IoSlice::new(b"hello")]), TransferResult::Bytes(5)));
        let mut bytes = Vec::new();
        while bytes.len() < 5 {
            wait(&events, &mut sockets);
            bytes.extend(read_all(&mut sockets, far, 1, 100).0);
        }
        assert_eq!(bytes, b"hello");
        sockets.close(near);
        while !read_all(&mut sockets, far, 1, 100).1 {
            wait(&events, &mut sockets);
        }
        sockets.close_listener(listener);
        assert!(directory.names().is_empty(), "{:?}", directory.names());
    }
}

#[test]
fn tcp_sockets_have_no_credentials() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = connect(&listener.local_addr().unwrap().into()).unwrap();
    assert_eq!(stream.peer_credentials().unwrap_err().kind(), io::ErrorKind::Unsupported);
    assert_eq!(Sockets::peer_credentials_of(&stream), None);
}

#[test]
fn the_file_has_the_mode_whatever_the_umask() {
    let directory = TestDirectory::new("mode");
    for mode in [0o600, 0o660, 0o666] {
        let path = directory.path(&format!("{mode:o}"));
        let _socket = UnixListenSocket::bind(&path, mode, 16).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
    }
    assert!(directory.names().is_empty(), "temporary files: {:?}", directory.names());
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let directory = TestDirectory::new("stale");
    let path = directory.path("s");
    drop(UnixListener::bind(&path).unwrap());
    let socket = bind(&path).unwrap();
    assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    UnixStream::connect(&path).unwrap();
    drop(socket);
    let foreign = UnixListener::bind(&path).unwrap();
    assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    drop(foreign);
    assert_eq!(directory.names(), ["s"]);
}

#[test]
fn a_socket_whose_accept_queue_is_full_is_not_stale() {
    let directory = TestDirectory::new("full");
    let path = directory.path("s");
    let _socket = UnixListenSocket::bind(&path, 0o600, 1).unwrap();
    let address = StreamAddress::Unix(path.clone());
    let mut waiting = Vec::new();
    let full = loop {
        match connect(&address) {
            Ok(stream) => waiting.push(stream),
            Err(error) => break error,
        }
    };
    assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
    assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
}

#[test]
fn a_file_that_is_not_a_socket_is_kept() {
    let directory = TestDirectory::new("file");
    let path = directory.path("s");
    fs::write(&path, "precious").unwrap();
    assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    assert_eq!(bind(&directory.path("missing/s")).unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(bind(&directory.path(&"x".repeat(120))).map(drop).unwrap_err().raw_os_error(), Some(36));
    assert_eq!(directory.names(), ["s"], "nothing else is left behind");
}

#[test]
fn drop_removes_only_its_own_file() {
    let directory = TestDirectory::new("replaced");
    let path = directory.path("s");
    let socket = bind(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let successor = bind(&path).unwrap();
    drop(socket);
    UnixStream::connect(&path).unwrap();
    drop(successor);
    assert!(!path.exists());
}

#[test]
fn of_concurrent_binds_one_succeeds_and_is_reachable() {
    const THREADS: usize = 4;
    let directory = TestDirectory::new("race");
    let path = directory.path("s");
    for _ in 0..100 {
        drop(UnixListener::bind(&path).unwrap());
        let barrier = Barrier::new(THREADS);
        let bound: Vec<io::Result<UnixListenSocket>> = std::thread::scope(|scope| {
            let bind = || {
                barrier.wait();
                bind(&path)
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(bind)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let errors = bound.iter().filter_map(|bound| bound.as_ref().err());
        assert!(errors.map(io::Error::kind).all(|kind| kind == io::ErrorKind::AddrInUse), "{bound:?}");
        let mut sockets: Vec<UnixListenSocket> = bound.into_iter().flatten().collect();
        assert_eq!(sockets.len(), 1);
        let socket = sockets.remove(0);
        // The others have connected to find out that it listens.
        while socket.accept().unwrap().is_some() {}
        let _client = UnixStream::connect(&path).unwrap();
        assert!(socket.accept().unwrap().is_some(), "the client reached another socket");
        drop(socket);
        assert!(directory.names().is_empty(), "{:?}", directory.names());
    }
}

#[test]
fn addresses_have_a_text_form() {
    for text in ["127.0.0.1:4420", "[::1]:80", "unix:/run/s.sock"] {
        assert_eq!(text.parse::<StreamAddress>().unwrap().to_string(), text);
    }
    assert!("/run/s.sock".parse::<StreamAddress>().is_err());
}
